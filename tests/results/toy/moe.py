"""How far do the ratios of tokens and of sequences move because a mixture of experts chose other experts?

    python tests/results/toy/moe.py --out runs/moe    make the model, if not there; measure it and the toy

The model is the toy, warmed up as in tests/toy/make.py, but a Qwen3-MoE: in place of each MLP it has 8
experts of half the width, and a router picks 2 of them for each token. Measured is what a step of grpo.py
does to the log-probs of its rollout: as it is; with the experts as chosen before the step (replay); the
difference.
"""
import argparse
import copy
import sys
from pathlib import Path

import torch
import transformers

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "toy"))
import make  # noqa: E402  it puts the root of the repository on the path
import common  # noqa: E402
import grpo  # noqa: E402

MEASURED = 1, 10  # steps: the first, still with a small learning rate, and one with all of it

def make_moe():
    """The toy before its warm-up, with experts; as many weights act on a token as in the dense one."""
    dense, tokenizer = make.make_model()
    moe = {name: value for name, value in dense.config.to_dict().items() if name != "model_type"}
    moe |= {"num_experts": 8, "num_experts_per_tok": 2, "norm_topk_prob": True, "moe_intermediate_size": 64}
    torch.manual_seed(0)
    return transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**moe)), tokenizer

@torch.no_grad()
def logprobs(model, rollout, args, replay=None):
    """Log-probs (N, T) of a rollout and, per layer, the experts (N * L, 2): those of `replay`, if given."""
    chosen = []
    def hook(router, inputs, output):
        logits, weights, experts = output
        if replay:
            experts = replay[len(chosen)]
            weights = logits.gather(1, experts).softmax(-1)  # by the router as it is now
        chosen.append(experts)
        return logits, weights, experts
    routers = [layer.mlp.gate for layer in model.model.layers if hasattr(layer.mlp, "gate")]
    hooks = [router.register_forward_hook(hook) for router in routers]
    logp = common.token_logprobs(model, rollout, args)
    for each in hooks:
        each.remove()
    return logp, chosen

def compare(old, new, rollout, args):
    """{what: number} of a step from `old` to `new`. A sequence's log-ratio is the mean over its tokens."""
    mask, tokens = rollout["mask"], rollout["attention"].flatten() > 0
    old_logp, before = logprobs(old, rollout, args)
    new_logp, after = logprobs(new, rollout, args)
    replayed, _ = logprobs(new, rollout, args, before)
    other = [(a.sort().values != b.sort().values).any(1)[tokens] for a, b in zip(before, after)]  # per layer
    result = {"tokens with other experts in a layer": sum(other).gt(0).float().mean()} if other else {}
    for name, r in [("as it is", new_logp - old_logp), ("replay", replayed - old_logp),
                    ("difference", new_logp - replayed)]:  # log-ratios (N, T)
        for unit, clip, x in [("token", 0.2, r[mask > 0]), ("sequence", 3e-4, r.sum(1) / mask.sum(1))]:
            result[f"{name}, {unit}: mean |log ratio|"] = x.abs().mean()
            result[f"{name}, {unit}: largest"] = x.abs().max()
            result[f"{name}, {unit}: share above {clip:g}"] = (x.abs() > clip).float().mean()
    return result

def measure(model):
    """Train as grpo.py does, from three seeds, and print what compare finds in the steps of MEASURED."""
    args, found = grpo.parse_args([]), {}  # the toy's settings
    args.model = model
    start, tokenizer = common.load_policy(args)
    problems, _ = common.load_problems(args, tokenizer)
    for args.seed in range(3):
        policy = copy.deepcopy(start)
        optimizers = {"policy": common.Optimizer(policy, args.lr, args)}
        for step in range(1, max(MEASURED) + 1):
            torch.manual_seed(args.seed * 1_000_003 + step)
            batch, old = common.batch_of(problems, step, args.prompts, args.seed), copy.deepcopy(policy)
            rollout, _ = grpo.collect(policy, start, tokenizer, batch, common.answer_reward, args)
            grpo.update(policy, optimizers, rollout, args)
            for what, value in compare(old, policy, rollout, args).items() if step in MEASURED else ():
                found.setdefault(f"step {step:2}  {what}", []).append(float(value))
    for what, values in found.items():
        print(f"{what:48} {sum(values) / 3:.5f}   seeds:", *(f"{value:.5f}" for value in values))

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Make the toy with experts; measure its routing.")
    parser.add_argument("--out", type=Path, required=True, help="directory of the model")
    out = parser.parse_args().out
    torch.set_num_threads(1)
    if not out.exists():
        model, tokenizer = make_moe()
        make.warm_up(model, tokenizer, make.make_problems()["train"])
        model.save_pretrained(out)
        tokenizer.save_pretrained(out)
    measure(common.TOY)
    measure(str(out))

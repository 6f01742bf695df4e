"""TRL and verl beside this repository: makes the numbers of tests/manual/elsewhere.md, in half a minute on a CPU.

    pip install trl==1.16.0
    pip install --no-deps verl==0.9.1
    pip install ray tensordict omegaconf hydra-core codetiming orjson pillow
    python tests/results/elsewhere/elsewhere.py

First come the engines' own loss functions on the log-probs of tests/vectors/vectors.json; without verl its
rows are left out. Then TRL's own train() runs beside our collect and update, on one rollout of the toy.
"""
import contextlib
import copy
import importlib.util
import json
import sys
import tempfile
from pathlib import Path
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from conftest import ROOT  # noqa: E402  it puts the other folders on the path
import datasets, torch, transformers, trl  # noqa: E401, E402
from patched import module_of, patched_copy  # noqa: E402

import common, grpo, gspo  # noqa: E401, E402

VECTORS = json.loads((ROOT / "tests/vectors/vectors.json").read_text(encoding="utf-8"))
BATCH, CASES = VECTORS["batch"], {case["name"]: case for case in VECTORS["policy_losses"]}
N, T, G = len(BATCH["lengths"]), max(BATCH["lengths"]), BATCH["group_size"]
MASK = (torch.arange(T) < torch.tensor(BATCH["lengths"])[:, None]).double()

def pad(rows):
    """Ragged rows -> (N, T) in float64. The padding is nonsense, because it must not matter."""
    return torch.tensor([row + torch.randn(T - len(row)).tolist() for row in rows], dtype=torch.float64)

class Given(trl.GRPOTrainer):
    """TRL's trainer on the toy, as its users make it, but completions and rewards are given."""
    def __init__(self, prompts=(), completions=(), rewards=(), optimizer=None, model=common.TOY, **settings):
        self.given, self.current_gradient_accumulation_steps = (prompts, completions), 1
        config = trl.GRPOConfig(
            output_dir=tempfile.gettempdir(), per_device_train_batch_size=N, num_generations=G, use_cpu=True,
            bf16=False, gradient_checkpointing=False, report_to="none", save_strategy="no",
            logging_strategy="no", disable_tqdm=True, **settings)
        super().__init__(model, lambda completions, **_: list(rewards), config, optimizers=(optimizer, None),
                         train_dataset=datasets.Dataset.from_dict({"prompt": ["1+1=?"] * (N // G)}),
                         processing_class=transformers.AutoTokenizer.from_pretrained(common.TOY))

    def _generate(self, _):
        prompts, completions = ([list(row) for row in rows] for rows in self.given)
        texts = self.processing_class.batch_decode(completions)
        return prompts, completions, None, texts, None, {}, None, None

def trl_loss(logp, adv, **settings):
    """GRPOTrainer._compute_loss of TRL, where the forward pass gives logp."""
    trainer = Given(max_completion_length=T, **settings)
    trainer.model.train()
    trainer._get_per_token_logps_and_entropies = lambda *_, **__: (logp, torch.zeros_like(logp), None)
    return trainer._compute_loss(trainer.model, {
        "prompt_ids": MASK, "prompt_mask": MASK, "completion_ids": MASK, "completion_mask": MASK,
        "advantages": adv, "num_items_in_batch": MASK.sum(),
        "old_per_token_logps": pad(BATCH["old_logp"]), "ref_per_token_logps": pad(BATCH["ref_logp"])})

def verl_loss(logp, adv, loss_mode="vanilla", **settings):
    """ppo_loss of verl, as its worker calls it, on one micro-batch that is the whole minibatch."""
    from verl.workers import config
    from verl.workers.utils import losses

    class Data(dict):
        select = lambda self, *names: Data({name: self[name] for name in names})  # noqa: E731
        to_padded_tensor = dict.copy
    losses.no_padding_2_padding = lambda x, _: x  # our rows are padded already
    actor = config.ActorConfig(strategy="fsdp", rollout_n=G, use_dynamic_bsz=True,
                               policy_loss=config.PolicyLossConfig(loss_mode=loss_mode), **settings)
    return losses.ppo_loss(actor, {"log_probs": logp}, Data(
        dp_size=1, batch_num_tokens=int(MASK.sum()), global_batch_size=N, response_mask=MASK,
        advantages=adv.view(N, -1).expand(N, T), old_log_probs=pad(BATCH["old_logp"]),
        ref_log_prob=pad(BATCH["ref_logp"])))[0]

def of(engine, advantages="grpo", **settings):
    """The loss of an engine on the batch, and its gradient by logp."""
    adv = VECTORS["ppo"]["whitened"] if advantages == "whitened" else VECTORS["advantages"][advantages]
    adv = pad(adv) if isinstance(adv[0], list) else torch.tensor(adv, dtype=torch.float64)
    logp = pad(BATCH["logp"]).requires_grad_()
    loss = engine(logp, adv, **settings)
    return loss.item(), torch.autograd.grad(loss, logp)[0] * MASK

def off(engine, name, **settings):
    """How far an engine is from a case of vectors.json: its loss, and the worst entry of its gradient."""
    case = CASES[name]
    loss, gradient = of(engine, case["advantages"], **settings)
    return abs(loss - case["loss"]), (gradient - pad(case["gradient"]) * MASK).abs().max().item()

ROW, K3 = {"loss_type": "grpo"}, {"beta": 0.3, "use_bias_correction_kl": False}
SEQUENCE = {"importance_sampling_level": "sequence", "epsilon": 0.05, "epsilon_high": 0.08}
VERL_ROW, VERL_KL = {"loss_agg_mode": "seq-mean-token-mean"}, {"use_kl_loss": True, "kl_loss_coef": 0.3}
VERL_GSPO = {"loss_mode": "gspo", "clip_ratio_low": 0.05, "clip_ratio_high": 0.08}
ROWS = [  # an engine, a case of vectors.json, the engine's settings, and how far off it is
    (trl_loss, "GRPO, no KL", ROW, (0, 0)),
    (trl_loss, "GRPO, k3", ROW | K3, (0, 0)),
    (trl_loss, "GRPO, w k3", ROW | {"beta": 0.3}, (0, 0)),
    (trl_loss, "GSPO", ROW | SEQUENCE, (0, 0)),
    (trl_loss, "GSPO, k3", ROW | SEQUENCE | K3, (0, 0)),
    (trl_loss, "GSPO, w k3", ROW | SEQUENCE | {"beta": 0.3}, (.0028, .0030)),
    (trl_loss, "GRPO, k3", ROW | {"beta": 0.3}, (.0023, .0072)),
    (trl_loss, "GRPO, a mean over all tokens", {}, (0, 0)),
    (trl_loss, "GRPO, no KL", {}, (.1025, .0457)),
    (trl_loss, "DAPO", {"epsilon_high": 0.28}, (.0200, .0148)),
    (trl_loss, "GSPO", SEQUENCE, (.1051, .0457)),
    (verl_loss, "GRPO, no KL", VERL_ROW, (0, 0)),
    (verl_loss, "GRPO, k3", VERL_ROW | VERL_KL, (0, 0)),
    (verl_loss, "GSPO", VERL_ROW | VERL_GSPO, (0, 0)),
    (verl_loss, "PPO", VERL_ROW, (0, 0)),
    (verl_loss, "GRPO, w k3", VERL_ROW | VERL_KL | {"kl_loss_type": "k3+"}, (.0023, .0055)),
    (verl_loss, "GRPO, no KL", {}, (.1025, .0457)),
    (verl_loss, "DAPO", {"clip_ratio_high": 0.28}, (.0200, .0148)),
    (verl_loss, "GSPO", VERL_GSPO, (.1051, .0457))]

def cispo_weights(**settings):
    """The smallest and the largest weight that TRL's loss_type="cispo" gives a token's log pi."""
    weights = -of(trl_loss, loss_type="cispo", **settings)[1] * MASK.sum()
    adv = torch.tensor(VECTORS["advantages"]["grpo"])[:, None] * MASK
    return (weights / adv)[adv != 0].aminmax()

def dual_clip(c):
    """verl's loss, and the gradient of one token, where that token has A < 0 and w = 4.5."""
    with mock.patch.dict(BATCH, copy.deepcopy(BATCH)):
        BATCH["old_logp"][1][0], BATCH["logp"][1][0] = -1.9, -0.396
        loss, gradient = of(verl_loss, clip_ratio_c=c, **VERL_ROW)
    return loss, gradient[1, 0]

class Recorded(torch.optim.SGD):
    """SGD that keeps each gradient, clipped, and the weights after each step. Adam would divide a gradient of
    1e-9, which is rounding, by its own size."""
    def step(self, closure=None):
        weights = self.param_groups[0]["params"]
        gradient = torch.cat([w.grad.flatten() for w in weights])
        super().step(closure)
        after = torch.cat([w.detach().flatten() for w in weights])
        self.seen = getattr(self, "seen", []) + [(gradient, after)]

RUNS = {  # our script and its flags, TRL's settings
    "GRPO without a KL": (grpo, ["--beta=0"], ROW),
    "GRPO, k3": (grpo, ["--beta=.3"], ROW | K3),
    "GRPO, w k3": (grpo, ["--beta=.3", "--kl=wk3"], ROW | {"beta": 0.3}),
    "GSPO": (gspo, ["--eps_low=.003", "--eps_high=.004"],
             ROW | SEQUENCE | {"epsilon": .003, "epsilon_high": .004}),
    "Dr. GRPO": ("dr_grpo", ["--beta=0"], {"loss_type": "dr_grpo", "scale_rewards": "none"}),
    "SAPO": ("sapo", ["--beta=0"], {"loss_type": "sapo"}),
    "the defaults of both": (grpo, [], {})}

def race(name):
    """Four optimiser steps of ours and of TRL on the same rollout: the relative differences of the gradients,
    the largest difference of a weight, and how far a weight moved."""
    script, flags, settings = RUNS[name]
    if isinstance(script, str):  # a patch of tests/forks
        script = module_of(patched_copy(script, tempfile.mkdtemp()))
    args = script.parse_args([f"--prompts={N // G}", f"--group_size={G}", "--epochs=4", "--minibatches=1",
                              "--warmup_steps=0", *flags])
    policy, tokenizer = common.load_policy(args)
    problems = common.batch_of(common.load_problems(args, tokenizer)[0], 1, args.prompts, args.seed)
    torch.manual_seed(5)
    rollout = common.generate(policy, tokenizer, problems, G, 1.0, args)
    ids = [row[keep.bool()].tolist() for row, keep in zip(rollout["ids"], rollout["attention"])]
    cuts = [len(row) - int(mask.sum()) for row, mask in zip(ids, rollout["mask"])]
    rewards = BATCH["rewards"]  # one group has equal rewards

    optimizer, ours = common.Optimizer(policy, 0.5, args), Recorded(list(policy.parameters()), lr=0.5)
    optimizer.step = ours.step  # what follows the clip of the norm
    reference = copy.deepcopy(policy).eval().requires_grad_(False) if args.beta > 0 else None
    given = {"generate": lambda *_: rollout, "rewards_of": lambda *_: torch.tensor(rewards)}
    with mock.patch.multiple(common, **given):
        made, _ = script.collect(policy, reference, tokenizer, problems, None, args)
    script.update(policy, {"policy": optimizer}, made, args)

    model = transformers.AutoModelForCausalLM.from_pretrained(common.TOY)
    theirs = Recorded(list(model.parameters()), lr=0.5)
    prompts, completions = zip(*((row[:cut], row[cut:]) for row, cut in zip(ids, cuts)))
    Given(prompts, completions, rewards, theirs, model, max_steps=4, num_iterations=4, learning_rate=0.5,
          max_completion_length=args.max_new_tokens, lr_scheduler_type="constant", **settings).train()
    gradients, weights = zip(*(((g - h).norm() / g.norm(), (w - v).abs().max())
                               for (g, w), (h, v) in zip(ours.seen, theirs.seen, strict=True)))
    return gradients, max(weights), (theirs.seen[3][1] - theirs.seen[0][1]).abs().max()

def main():
    has_verl = importlib.util.find_spec("verl")
    for engine, name, settings, _ in ROWS:
        if engine is trl_loss or has_verl:
            shown = " ".join(f"{key}={value}" for key, value in settings.items()) or "its defaults"
            print("| {} | {} | {} | {:.4f} | {:.4f} |".format(
                engine.__name__[:-5], name, shown, *off(engine, name, **settings)))
    print("TRL's cispo, weights from {:.2f} to {:.2f}".format(*cispo_weights()))
    if has_verl:
        for c in (3.0, 1e9):
            print("verl's clip_ratio_c={}: the loss is {:.4f}, the gradient {:.4f}".format(c, *dual_clip(c)))
    for name in RUNS:
        with contextlib.redirect_stdout(sys.stderr):
            gradients, weight, moved = race(name)
        print(f"| {name} | {min(gradients):.1e} to {max(gradients):.1e} | {weight:.1e} | {moved:.1e} |")

if __name__ == "__main__":
    torch.set_num_threads(1)
    main()

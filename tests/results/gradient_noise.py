"""How much of a step's gradient is signal? The cosine of the gradients of two batches that share no problem.

    python tests/results/gradient_noise.py --model runs/sft --dataset runs/data/problems

Batches of --prompts x --group_size completions for GRPO, and as many given solutions for supervised training.
If a gradient is signal + noise and the noise is independent, the cosine is signal^2 / (signal^2 + noise^2): 1
is all signal, 0 all noise. Noise^2 falls as 1 / batch: a batch (1 - c) / c times as large would be half signal.
Prints a line of JSON; all flags of grpo.py are known.
"""
import itertools
import json
import statistics
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the root of the repository
import common  # noqa: E402
import grpo  # noqa: E402

BATCHES = 4


def gradient(policy, loss_of, batch, args):
    """The gradient of a loss, summed over micro-batches, as one vector."""
    for b in common.micro_batches(batch, args.micro_batch_tokens):
        loss_of(b).backward()
    vector = torch.cat([weight.grad.flatten().bfloat16() for weight in policy.parameters()])
    policy.zero_grad()
    return vector


def cosines(vectors):
    """The mean cosine of all pairs, and the deviation of one."""
    pairs = [torch.cosine_similarity(a.float(), b.float(), 0).item() for a, b in itertools.combinations(vectors, 2)]
    return round(statistics.mean(pairs), 4), round(statistics.stdev(pairs), 4)


def main(args):
    """Measure both on the same model."""
    policy, tokenizer = common.load_policy(args)
    common.resolve_defaults(args, policy)
    problems, _ = common.load_problems(args, tokenizer, common.answer_reward)
    common.Optimizer(policy, args.lr, args)  # gradients in float32

    def rl_loss(b):
        logp = common.token_logprobs(policy, b, args.temperature)
        return grpo.policy_loss(logp, b["old_logp"], None, b["adv"], b["mask"], args)[0]

    def supervised_loss(b):
        return -common.token_logprobs(policy, b, 1.0).sum()

    def solved(batch):
        texts = tokenizer([problem["solution"] for problem in batch], add_special_tokens=False)["input_ids"]
        return common.as_rollout([problem["prompt"] for problem in batch],
                                 [ids + [tokenizer.eos_token_id] for ids in texts])

    rl, supervised, rows = [], [], args.prompts * args.group_size
    for step in range(1, BATCHES + 1):
        torch.manual_seed(step)
        batch = common.batch_of(problems, step, args)
        rollout, _ = grpo.collect(policy, None, tokenizer, batch, common.answer_reward, args)
        rl.append(gradient(policy, rl_loss, rollout, args))
        given = solved(problems[(step - 1) * rows:step * rows])
        supervised.append(gradient(policy, supervised_loss, given, args))
    result = {name: cosines(vectors) for name, vectors in (("grpo", rl), ("supervised", supervised))}
    print(json.dumps({"model": args.model, "rows": rows, "cosine, deviation": result}))


if __name__ == "__main__":
    main(grpo.parse_args(["--beta", "0", *sys.argv[1:]]))

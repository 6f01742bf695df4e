"""Supervised fine-tuning on given completions: the warm-up before RL, for a real model and for the toy.

    python tests/tools/sft.py --model HuggingFaceTB/SmolLM2-135M-Instruct --dataset warmup.jsonl --out SFT

--dataset has rows with "question", "answer" and "solution", the completion to learn. It takes the flags of
grpo.py, and makes prompts as grpo.py does, so that RL continues with exactly the same ones. It makes --epochs
passes over the problems, --prompts at a time, but takes no more than --steps steps (by default, all). Use
other problems than those for RL, because all of them are trained on, even those that grpo.py would hold out."""
import random
import sys
from pathlib import Path

import torch
from torch.nn.utils.rnn import pad_sequence

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the root of the repository
import common  # noqa: E402
import grpo  # noqa: E402

def train(model, optimizer, batches, args, warm_up=20, every=10):
    """Take policy gradient steps on given completions with advantage 1, while --lr rises, then falls to 0.
    `batches` is a list of pairs (prompts, completions), which are lists of lists of ids."""
    def padded(rows):
        return pad_sequence([torch.tensor(row) for row in rows], True).to(model.device)
    for step, (prompts, completions) in enumerate(batches):
        batch = {"ids": padded([p + c for p, c in zip(prompts, completions)]),
                 "prompt_length": torch.tensor([len(prompt) for prompt in prompts], device=model.device),
                 "mask": padded([[1.0] * len(c) for c in completions])}
        loss = -common.token_logprobs(model, batch, args).sum() / batch["mask"].sum()
        loss.backward()
        lr = args.lr * min((step + 1) / warm_up, 1 - step / len(batches))
        common.clip_and_step(optimizer, lr, args)
        if step % every == 0:
            print(f"{step}/{len(batches)}  loss {loss.item():.3f}", flush=True)

def main(args):
    policy, tokenizer = common.load_policy(args)
    split = common.read_dataset(args.dataset, args.subset)[args.split]
    problems = common.prepare(split, tokenizer, args)
    batches, size, rng = [], min(args.prompts, len(problems)), random.Random(args.seed)
    for _ in range(args.epochs):
        shuffled = rng.sample(problems, len(problems))
        for start in range(0, len(problems) - size + 1, size):  # drops an incomplete last batch
            part = shuffled[start:start + size]
            assert all(problem["solution"] for problem in part), "a row has no solution"
            completions = [tokenizer.encode(problem["solution"], add_special_tokens=False)
                           + [tokenizer.eos_token_id] for problem in part]
            batches.append(([problem["prompt"] for problem in part], completions))
    tokenizer.save_pretrained(args.out)
    policy.generation_config.save_pretrained(args.out)  # before training: what cannot be saved fails here
    optimizer = torch.optim.Adam(policy.parameters(), args.lr, (0.9, 0.95), fused=True)
    train(policy, optimizer, batches[:args.steps], args)
    policy.save_pretrained(args.out)

if __name__ == "__main__":
    flags = ["--prompts", "16", "--minibatches", "1", "--lr", "1e-4", "--warmup_steps", "0",
             "--steps", str(10 ** 9)]
    main(grpo.parse_args(flags + sys.argv[1:]))

"""Supervised training on given completions: the warm-up before RL, of a real model and of the toy.

    python tests/results/sft.py --model HuggingFaceTB/SmolLM2-135M-Instruct --dataset warmup.jsonl --out SFT

--dataset has rows with "question" and "solution", the completion to learn. All flags of grpo.py are known;
prompts are made as there, so that RL goes on with the very same ones.
"""
import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the root of the repository
import common  # noqa: E402
import grpo  # noqa: E402


def train(model, optimizer, batches, warm_up=20, every=10):
    """The policy gradient, with given completions and advantage 1; --lr rises, then falls to 0.

    `batches` is a list of pairs (prompts, completions), lists of lists of ids.
    """
    lr = optimizer.lr
    for step, (prompts, completions) in enumerate(batches):
        batch = common.as_rollout(prompts, completions)
        loss = -common.token_logprobs(model, batch, 1.0).sum() / batch["mask"].sum()
        optimizer.backward(loss)
        optimizer.lr = lr * min((step + 1) / warm_up, 1 - step / len(batches))
        optimizer.step()
        if step % every == 0:
            print(f"{step}/{len(batches)}  loss {loss.item():.3f}", flush=True)


def main(args):
    """One pass over the problems, --prompts at a time."""
    policy, tokenizer = common.load_policy(args)
    common.resolve_and_check(args, policy)
    problems, _ = common.load_problems(args, tokenizer, common.answer_reward)
    problems = random.Random(args.seed).sample(problems, len(problems))
    batches = []
    for start in range(0, len(problems) - args.prompts + 1, args.prompts):
        part = problems[start:start + args.prompts]
        texts = [problem["solution"] for problem in part]
        completions = tokenizer(texts, add_special_tokens=False)["input_ids"]
        end = [tokenizer.eos_token_id]
        batches.append(([problem["prompt"] for problem in part], [ids + end for ids in completions]))
    optimizer = common.Optimizer(policy, args.lr, args)
    train(policy, optimizer, batches)
    for name, weight in optimizer.weights.items():
        weight.data = optimizer.masters[name]  # saved in float32
    policy.save_pretrained(args.out)
    tokenizer.save_pretrained(args.out)


if __name__ == "__main__":
    flags = ["--prompts", "16", "--lr", "1e-4", "--warmup_steps", "0", "--eval_split", "train"]
    common.launch(main, grpo.parse_args(flags + sys.argv[1:]))

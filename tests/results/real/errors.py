"""What is wrong in the wrong answers of README.md: the equation, or its arithmetic?

    python tests/results/real/errors.py --model runs/grpo/step-100 --dataset runs/data/problems

The flags are those of tests/tools/evaluate.py. Prints shares of the greedy answers to 200 problems: those
that write an equation `a + b = c`; the gold one (a and b may change places where the order does not
matter); one that is true; and both, which is a right answer. Last, the share of problems that 8 samples solve
at least once, and every time.
"""
import json
import random
import re
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))
import evaluate  # noqa: E402  it puts the root of the repository on the path
import common  # noqa: E402

EQUATION = re.compile(r"(\d+(?:\.\d+)?) ([-+*/]) (\d+(?:\.\d+)?) = (\d+(?:\.\d+)?)")


def read(text):
    """The left side of the first equation, in one order, and whether the equation is true; or None."""
    found = EQUATION.search(text)
    if not found:
        return None
    a, operation, b, c = found.groups()
    x, y = float(a), float(b)
    value = {"+": x + y, "-": x - y, "*": x * y, "/": x / y if y else float("nan")}[operation]
    left = (operation, *(sorted([x, y]) if operation in "+*" else (x, y)))
    return left, abs(value - float(c)) < 0.01


def main(args):
    """Print one line of JSON."""
    policy, tokenizer = common.load_policy(args)
    problems = common.prepare(common.read_dataset(args.dataset)[args.split], tokenizer, args)
    problems = random.Random(0).sample(problems, min(args.eval_problems, len(problems)))
    texts = common.generate(policy, tokenizer, problems, 1, 0.0, args)["texts"]
    counts = dict.fromkeys(["equation", "gold equation", "true equation", "both"], 0)
    for problem, text in zip(problems, texts):
        written, gold = read(text), read(problem["solution"])  # gold: none where it takes two operations
        if written:
            left, is_true = written
            is_gold = gold is not None and left == gold[0]
            counts["equation"] += 1
            counts["gold equation"] += is_gold
            counts["true equation"] += is_true
            counts["both"] += is_gold and is_true
    torch.manual_seed(args.seed)
    problems.sort(key=lambda problem: len(problem["prompt"]))  # for little padding
    eight = [problem for problem in problems for _ in range(8)]
    records = common.attempts(policy, tokenizer, eight, common.answer_reward, 1.0, args)
    right = torch.tensor([record["right"] for record in records]).view(-1, 8)
    shares = {name: round(count / len(problems), 3) for name, count in counts.items()}
    shares["solved by one of 8"] = round((right.sum(1) > 0).float().mean().item(), 3)
    shares["solved by all of 8"] = round((right.sum(1) == 8).float().mean().item(), 3)
    print(json.dumps({"model": args.model, "problems": len(problems)} | shares))


if __name__ == "__main__":
    main(evaluate.parse_args(["--split", "test", "--eval_problems", "200", *sys.argv[1:]]))

"""The accuracy of a model on all problems of a split, and how much better it is than another model.

    FLAGS=(--dataset svamp.jsonl --split train --compare exam.jsonl)
    python tests/tools/evaluate.py --model runs/sft "${FLAGS[@]}"
    python tests/tools/evaluate.py --model runs/grpo/step-100 "${FLAGS[@]}"

Each command adds a line to exam.jsonl, with what the model got right. The second one also prints by how
much its model is better than the first model of the file. The difference is taken problem by problem. So its
standard error is smaller than that of the accuracies: a problem that is hard for one model is hard for the
other, too.

--split is test unless you give another; a single file is train. All flags of grpo.py are known: give --dtype,
--max_new_tokens and --system_prompt as in training. With --eval_samples N there are N samples of each
problem, and pass@k is printed for k = 2, 4, ... up to N: the chance that any of k answers is right. If you
trained with a reward of your own, put it in main.
"""
import argparse
import json
import math
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the root of the repository
import common  # noqa: E402
import grpo  # noqa: E402


def mean_and_error(numbers):
    """The mean of one number per problem, and its standard error: deviation / sqrt(number of problems)."""
    numbers = torch.tensor(numbers, dtype=torch.float64)
    return [round(numbers.mean().item(), 4), round((numbers.std() / len(numbers) ** 0.5).item(), 4)]

def compare(first, last):
    """The difference of two lines of --compare, in the mean over their problems, with its standard error."""
    if first["questions"] != last["questions"]:
        sys.exit("--compare: the first model of the file was asked other problems")
    return {f"{name}_gain": mean_and_error([b - a for a, b in zip(first[name], last[name])])
            for name in ("greedy", "sampled")}

def pass_at(k, right):
    """The unbiased estimate of pass@k for one problem, if c of its n answers are right: 1 - C(n - c, k) /
    C(n, k) (Chen et al. 2021, eq. 1)."""
    n, c = len(right), sum(right)
    return 1 - math.comb(n - c, k) / math.comb(n, k)

def main(args, n, file):
    """Print one line of JSON: [mean, standard error] for each quantity."""
    reward = common.answer_reward  # or any function (problems, completions) -> numbers
    policy, tokenizer = common.load_policy(args)
    problems = common.prepare(common.read_dataset(args.dataset)[args.split], tokenizer, args, "held-out")
    problems.sort(key=lambda problem: len(problem["prompt"]))  # as attempts sorts them
    torch.manual_seed(args.seed)
    several = [problem for problem in problems for _ in range(n)]
    samples = common.attempts(policy, tokenizer, several, reward, args.temperature, args)
    samples = [samples[i:i + n] for i in range(0, len(samples), n)]  # a list for each problem
    right = [[record["right"] for record in each] for each in samples]
    greedy = common.attempts(policy, tokenizer, problems, common.answer_reward, 0.0, args)
    found = {"model": args.model, "questions": [problem["question"] for problem in problems],
             "greedy": [float(record["right"]) for record in greedy], "sampled": [sum(c) / n for c in right]}
    result = {"model": args.model, "dataset": args.dataset, "problems": len(problems)}
    result |= {name: mean_and_error(found[name]) for name in ("greedy", "sampled")}
    result |= {f"pass@{k}": mean_and_error([pass_at(k, each) for each in right])
               for k in (2 ** i for i in range(1, n.bit_length()))}
    result["reward"] = mean_and_error([sum(record["reward"] for record in each) / n for each in samples])
    result["length"] = round(sum(record["tokens"] for each in samples for record in each) / len(several), 2)
    if file:
        with file.open("a+", encoding="utf-8") as lines:
            lines.write(json.dumps(found) + "\n")
            lines.seek(0)
            result |= compare(json.loads(lines.readline()), found)
    print(json.dumps(result))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--compare", type=Path, help="file of the models that were evaluated before")
    parser.add_argument("--eval_samples", type=int, default=1, help="samples of each problem")
    ours, others = parser.parse_known_args()
    main(grpo.parse_args(["--split", "test", *others]), ours.eval_samples, ours.compare)

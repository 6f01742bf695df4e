"""The accuracy of a model on all problems of a split, and how much better it is than another model.

    FLAGS=(--dataset svamp.jsonl --split train --compare exam.jsonl)
    python tests/results/evaluate.py --model runs/sft "${FLAGS[@]}"
    python tests/results/evaluate.py --model runs/grpo/step-100 "${FLAGS[@]}"

Each command adds a line to exam.jsonl, with what the model got right. The second one also prints by how
much its model is better than the first model of the file. The difference is taken problem by problem. So its
standard error is smaller than that of the accuracies: a problem that is hard for one model is hard for the
other, too.

--split is test unless you give another; a single file is train. All flags of grpo.py are known: give --dtype,
--max_new_tokens and --system_prompt as in training, and --eval_samples for several samples of each problem.
If you trained with a reward of your own, put it in main.
"""
import argparse
import json
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
        common.fail("--compare: the first model of the file was asked other problems")
    return {f"{name}_gain": mean_and_error([b - a for a, b in zip(first[name], last[name])])
            for name in ("greedy", "sampled")}

def main(args, file):
    """Print one line of JSON: [mean, standard error] for each quantity."""
    reward = common.answer_reward  # or any function (problems, completions) -> numbers
    policy, tokenizer = common.load_policy(args)
    rows = common.read_dataset(args.dataset)[args.split]
    problems = common.prepare(rows, tokenizer, args, "evaluate on")
    problems.sort(key=lambda problem: len(problem["prompt"]))  # as sample_rewards would sort them
    torch.manual_seed(args.seed)
    rewards, right, length = common.sample_rewards(
        policy, tokenizer, problems, reward, args.eval_samples, args.temperature, args)
    _, greedy, _ = common.sample_rewards(policy, tokenizer, problems, reward, 1, 0.0, args)
    found = {"model": args.model, "questions": [problem["question"] for problem in problems],
             "greedy": greedy.squeeze(1).tolist(), "sampled": right.mean(1).tolist()}
    result = {"model": args.model, "dataset": args.dataset, "problems": len(problems)}
    result |= {name: mean_and_error(found[name]) for name in ("greedy", "sampled")}
    result |= {"reward": mean_and_error(rewards.mean(1).tolist()), "length": round(length, 2)}
    if file:
        with file.open("a+", encoding="utf-8") as lines:
            lines.write(json.dumps(found) + "\n")
            lines.seek(0)
            result |= compare(json.loads(lines.readline()), found)
    print(json.dumps(result))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--compare", type=Path, help="file of the models that were evaluated before")
    ours, others = parser.parse_known_args()
    main(grpo.parse_args(["--split", "test", *others]), ours.compare)

"""The accuracy of a model on all problems of a split, with its standard error, and its mean reward.

    python tests/results/evaluate.py --model runs/grpo/step-100 --dataset svamp.jsonl --split train

--split is test unless you give another; a single file is train. All flags of grpo.py are known: give --dtype,
--max_new_tokens and --system_prompt as in training. If you trained with a reward of your own, put it in main.
"""
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the root of the repository
import common  # noqa: E402
import grpo  # noqa: E402


def main(args):
    """Print one line of JSON."""
    reward = common.answer_reward  # or any function (problems, completions) -> numbers
    policy, tokenizer = common.load_policy(args)
    rows = common.read_dataset(args.dataset)[args.split]
    problems = common.prepare(rows, tokenizer, args, "evaluate on")
    result = {"model": args.model, "dataset": args.dataset, "problems": len(problems)}
    for name, value in common.evaluate(policy, tokenizer, problems, reward, args).items():
        result[name] = round(value, 4)
        if name.endswith("accuracy"):
            result[name + "_se"] = round((value * (1 - value) / len(problems)) ** 0.5, 4)
    print(json.dumps(result))


if __name__ == "__main__":
    main(grpo.parse_args(["--split", "test", *sys.argv[1:]]))

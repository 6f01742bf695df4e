"""Measure a model's accuracy on all problems of a split, or how much better it is than another model.

    python tests/tools/evaluate.py --model runs/grpo/step-0 --dataset svamp.jsonl --compare exam.jsonl
    python tests/tools/evaluate.py --model runs/grpo/step-100 --dataset svamp.jsonl --compare exam.jsonl

A checkpoint is evaluated with its run's prompt, columns, lengths, temperature and dtype, unless flags differ.
--split is test, or the only split. --temperature 0 decodes greedily. --eval_samples N also prints pass@N, the
fraction of problems that at least one of N completions solves. To use a reward of your own, set it in main.

With --compare, each command appends to the file what its model got right, and prints how much better that is
than the first entry. The difference is taken problem by problem. As what is hard for one model is usually
hard for the other, too, this makes its standard error smaller."""
import json
import random
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the root of the repository
import common  # noqa: E402

OF_THE_RUN = """question_column answer_column system_prompt max_prompt_tokens max_new_tokens temperature dtype
    prompts group_size""".split()

def parse_args(argv=None):
    """Parse the flags. A run's args.json next to the model, if any, sets the defaults of OF_THE_RUN."""
    parser = common.make_parser(__file__, __doc__)
    # So that a flag replaces one of common.py: here, --temperature may be 0, and all problems are evaluated.
    parser.conflict_handler = parser._optionals.conflict_handler = "resolve"
    add = parser.add_argument
    add("--compare", help="file that lists the models evaluated before")
    add("--eval_samples", type=int, default=1, help="completions per problem")
    add("--eval_problems", type=int, help="evaluate on so many problems, sampled as in training")
    add("--temperature", type=float, default=1.0, help="0 decodes greedily")
    add("--prompts", type=int, default=32, help="times --group_size: completions sampled at a time")
    add("--group_size", type=int, default=8, help="see --prompts")
    parser.set_defaults(split=None, minibatches=1)
    given = parser.parse_known_args(argv)[0]
    run = Path(given.model or common.TOY).resolve().parent / "args.json"
    if run.exists():
        flags = json.loads(run.read_text(encoding="utf-8"))
        parser.set_defaults(**{name: flags[name] for name in OF_THE_RUN})
    args = common.parse(parser, argv)
    args.eval_problems = given.eval_problems  # not the toy's
    # common.generate divides by the temperature and has no greedy mode. At 1e-5, a token whose logit is
    # .001 below the highest one has a probability of e^-100.
    args.temperature = max(args.temperature, 1e-5)
    return args

def mean_and_error(numbers):
    """The mean of one number per problem, and its standard error, which a single problem doesn't have."""
    numbers = torch.tensor(numbers, dtype=torch.float64)
    error = round((numbers.std() / len(numbers) ** 0.5).item(), 4) if len(numbers) > 1 else None
    return [round(numbers.mean().item(), 4), error]

@torch.no_grad()
def main(args):
    """Print one line of JSON: [mean, standard error] of each quantity."""
    reward = common.answer_reward  # or any function (problems, completions) -> numbers
    policy, tokenizer = common.load_policy(args)
    splits, n = common.read_dataset(args.dataset, args.subset), args.eval_samples
    split = args.split or ("test" if len(splits) > 1 else list(splits)[0])
    rows = splits[split]
    if args.eval_problems:
        rows = rows.select(random.Random(0).sample(range(len(rows)), len(rows))[:args.eval_problems])
    problems = common.prepare(rows, tokenizer, args)
    assert problems, f"{args.dataset}: no row can be used"
    problems.sort(key=lambda problem: len(problem["prompt"]))  # to reduce padding
    torch.manual_seed(args.seed)
    repeated = [problem for problem in problems for _ in range(n)]
    texts, rewards, lengths, size = [], [], [], args.prompts * args.group_size
    for start in range(0, len(repeated), size):
        rollout = common.generate(policy, tokenizer, repeated[start:start + size], 1, args)
        texts += rollout["texts"]
        rewards += [float(r) for r in reward(rollout["problems"], rollout["texts"])]
        lengths += rollout["completion_length"].tolist()
    right = common.answer_reward(repeated, texts)
    right, rewards = (torch.tensor(x).view(-1, n).double() for x in (right, rewards))  # a row per problem
    found = {"model": args.model, "questions": [problem["question"] for problem in problems],
             "accuracy": right.mean(1).tolist()}
    result = {"model": args.model, "dataset": args.dataset, "split": split, "problems": len(problems)}
    if args.answer_column:
        result["accuracy"] = mean_and_error(found["accuracy"])
        result |= {f"pass@{n}": mean_and_error(right.amax(1).tolist())} if n > 1 else {}
    result["reward"] = mean_and_error(rewards.mean(1).tolist())
    result["length"] = round(sum(lengths) / len(lengths), 2)
    if args.compare:
        with open(args.compare, "a+", encoding="utf-8") as lines:
            lines.write(json.dumps(found) + "\n")
            lines.seek(0)
            first = json.loads(lines.readline())
        assert first["questions"] == found["questions"], f"{args.compare} is about other problems"
        result["gain"] = mean_and_error([b - a for a, b in zip(first["accuracy"], found["accuracy"])])
    print(json.dumps(result))

if __name__ == "__main__":
    main(parse_args())

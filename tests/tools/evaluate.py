"""The accuracy of a model on all problems of a split, and how much better it is than another model.

    python tests/tools/evaluate.py --model runs/grpo/step-100 --dataset svamp.jsonl

Beside a checkpoint lies the args.json of its run, whose prompt, columns, lengths, temperature and dtype are
the defaults here. Your flags win, and the flags in force are printed. --split is test, or the only split
there is. With --eval_samples N there are N samples of each problem, and pass@N is printed, the chance that
any of N answers is right. A reward of your own belongs in main.

    python tests/tools/evaluate.py --model runs/sft --dataset svamp.jsonl --compare exam.jsonl
    python tests/tools/evaluate.py --model runs/grpo/step-100 --dataset svamp.jsonl --compare exam.jsonl

Each command adds a line to exam.jsonl, with what the model got right. The second one also prints by how much
its model is better than the first model of the file. The difference is taken problem by problem, so that its
standard error is smaller than that of the accuracies: what is hard for one model is hard for the other, too.
"""
import json
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the root of the repository
import common  # noqa: E402

OF_THE_RUN = """question_column answer_column system_prompt max_prompt_tokens max_new_tokens temperature dtype
    prompts group_size""".split()

def parse_args(argv=None):
    """Parse the flags; where the model has a run beside it, the defaults OF_THE_RUN are that run's."""
    parser, add = common.make_parser(__file__, __doc__)
    add("--compare", help="file of the models that were evaluated before")
    add("--eval_samples", type=int, default=1, help="samples of each problem")
    add("--prompts", type=int, default=32, help="this times --group_size completions are sampled at a time")
    add("--group_size", type=int, default=8, help="see --prompts")
    parser.set_defaults(split=None, minibatches=1)
    model = parser.parse_known_args(argv)[0].model
    run = Path(model or common.TOY).resolve().parent / "args.json"
    if run.exists():
        flags = json.loads(run.read_text(encoding="utf-8"))
        parser.set_defaults(**{name: flags[name] for name in OF_THE_RUN})
    return common.parse(parser, argv)

def mean_and_error(numbers):
    """The mean of one number per problem, and its standard error: deviation / sqrt(number of problems)."""
    numbers = torch.tensor(numbers, dtype=torch.float64)
    return [round(numbers.mean().item(), 4), round((numbers.std() / len(numbers) ** 0.5).item(), 4)]

def main(args):
    """Print one line of JSON: [mean, standard error] for each quantity."""
    reward = common.answer_reward  # or any function (problems, completions) -> numbers
    print(*(f"{name}={value}" for name, value in vars(args).items()))
    policy, tokenizer = common.load_policy(args)
    splits, n = common.read_dataset(args.dataset, args.subset), args.eval_samples
    split = args.split or ("test" if len(splits) > 1 else list(splits)[0])
    problems = common.prepare(splits[split], tokenizer, args)
    problems.sort(key=lambda problem: len(problem["prompt"]))  # for little padding
    torch.manual_seed(args.seed)
    several = [problem for problem in problems for _ in range(n)]
    records = common.attempts(policy, tokenizer, several, reward, args.temperature, args)
    samples = [records[i:i + n] for i in range(0, len(records), n)]  # a list for each problem
    greedy = common.attempts(policy, tokenizer, problems, common.answer_reward, 0.0, args)
    found = {"model": args.model, "questions": [problem["question"] for problem in problems],
             "greedy": [float(record["right"]) for record in greedy],
             "sampled": [sum(record["right"] for record in each) / n for each in samples]}
    result = {"model": args.model, "dataset": args.dataset, "split": split, "problems": len(problems)}
    result |= {name: mean_and_error(found[name]) for name in ("greedy", "sampled")}
    if n > 1:
        result[f"pass@{n}"] = mean_and_error([any(record["right"] for record in each) for each in samples])
    result["reward"] = mean_and_error([sum(record["reward"] for record in each) / n for each in samples])
    result["length"] = round(sum(record["tokens"] for record in records) / len(records), 2)
    if args.compare:
        with open(args.compare, "a+", encoding="utf-8") as lines:
            lines.write(json.dumps(found) + "\n")
            lines.seek(0)
            first = json.loads(lines.readline())
        if first["questions"] != found["questions"]:
            sys.exit("--compare: the first model of the file was asked other problems")
        result |= {f"{name}_gain": mean_and_error([b - a for a, b in zip(first[name], found[name])])
                   for name in ("greedy", "sampled")}
    print(json.dumps(result))

if __name__ == "__main__":
    main(parse_args())

"""Read in the terminal what a run sampled: its completions, question by question.

    python tests/tools/read.py runs/grpo-1125-093000-4711 --step 20 --limit 2
    python tests/tools/read.py runs/grpo-1125-093000-4711 --held_out greedy

Questions whose completions were paid differently come first: a step learns from them. Of each you see the
best completion, then the worst, the second best, and so on.
"""
import argparse
import json
import re
import sys
from pathlib import Path

FILES = {None: "step-*.jsonl", "sampled": "held-out-*[0-9].jsonl", "greedy": "held-out-*-greedy.jsonl"}

def load(run, held_out, step):
    """The name of a file of completions, that of the newest step if none is given, and its records."""
    found = Path(run, "completions").glob(FILES[held_out])
    paths = {int(re.search(r"\d+", path.name)[0]): path for path in found}
    path = paths[max(paths) if step is None else step]
    return path.name, [json.loads(line) for line in path.open(encoding="utf-8")]

def groups_of(records):
    """A list of completions for each question; those with unequal rewards come first."""
    groups = {}
    for record in records:
        groups.setdefault((record["question"], record["answer"]), []).append(record)
    return sorted(groups.values(), key=lambda group: len({record["reward"] for record in group}) == 1)

def show(text, indent=""):
    """Print a text, without characters that could move the cursor or change the colour."""
    for line in text.expandtabs(4).split("\n"):
        print(indent + "".join(c if c.isprintable() else "·" for c in line))

def show_group(group, limit):
    """Print a question and its completions, at most `limit` of them."""
    answer, count = group[0]["answer"], len(group)
    right, mean = (sum(record[name] or 0 for record in group) / count for name in ("right", "reward"))
    show(group[0]["question"])
    show((f"answer {answer}   right {right:.0%} of {count}   " if answer else "") + f"reward {mean:.3g}")
    ranked = sorted(group, key=lambda record: -record["reward"])
    for record in [ranked.pop(-(i % 2)) for i in range(count)][:limit]:  # the best, the worst ...
        cut_off = "   cut off" if record["cut_off"] else ""
        show(f"  reward {record['reward']:.3g}   {record['tokens']} tokens{cut_off}")
        show(record["completion"], "    ")
    print()

def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    add = parser.add_argument
    add("run", help="the --out of the run")
    add("--step", type=int, help="a step of the run; if not given, the newest")
    add("--held_out", choices=["sampled", "greedy"], help="answers to the held-out problems after the step")
    add("--limit", type=int, help="at most so many completions of a question")
    args = parser.parse_args(argv)
    name, records = load(args.run, args.held_out, args.step)
    print(f"{name}: {len(records)} completions\n")
    for group in groups_of(records):
        show_group(group, args.limit)

if __name__ == "__main__":
    sys.stdout.reconfigure(errors="replace")
    main()

"""Read in the terminal what a run sampled: its completions, question by question.

    python tests/tools/read.py runs/grpo-1125-093000-4711 --step 20 --limit 2

Questions whose completions were paid differently come first: a step learns from them. Of each you see the
best completion, then the worst, the second best, and so on. In a pipe or with NO_COLOR there is no colour.
"""
import argparse
import json
import os
import sys
from pathlib import Path

COLOURS = {"bold": "\033[1m", "green": "\033[32m", "red": "\033[31m", "off": "\033[0m"}

def load(run, kind, step):
    """The name of a file of completions, that of the newest step if none is given, and its records."""
    found = Path(run, "completions").glob(f"{kind}-*.jsonl")
    paths = {int(path.stem.rpartition("-")[2]): path for path in found}
    if not paths or step not in {None, *paths}:
        sys.exit(f"{run}/completions: {kind}-N.jsonl is there for these steps N: {sorted(paths)}")
    path = paths[max(paths) if step is None else step]
    return path.name, [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]

def groups_of(records):
    """A list of completions for each question; those with unequal rewards come first."""
    groups = {}
    for record in records:
        groups.setdefault((record["question"], record["answer"]), []).append(record)
    return sorted(groups.values(), key=lambda group: len({record["reward"] for record in group}) == 1)

def best_and_worst(group):
    """The best, the worst, the second best, the second worst, and so on."""
    ranked = sorted(group, key=lambda record: -record["reward"])
    return [ranked.pop(-(i % 2)) for i in range(len(ranked))]

def lines_of(text, indent=""):
    """The lines of a text, without characters that could move the cursor or change the colour."""
    lines = text.expandtabs(4).split("\n")
    return [indent + "".join(c if c.isprintable() else "·" for c in line) for line in lines]

def listed(group, args, colours):
    """The lines of a question and of those of its completions that are to be shown."""
    shown = [record for record in best_and_worst(group) if not (args.wrong and record["right"])]
    right, mean = (sum(record[name] or 0 for record in group) / len(group) for name in ("right", "reward"))
    lines = [colours["bold"] + line + colours["off"] for line in lines_of(group[0]["question"])]
    share = f"answer {group[0]['answer']}   right {right:.0%} of {len(group)}   "
    lines += lines_of(share * (group[0]["answer"] != "") + f"reward {mean:.3g}")
    for record in shown[:args.limit]:
        colour = colours["red" if record["right"] is False else "green"]
        label = f"  reward {record['reward']:.3g}   {record['tokens']} tokens"
        label += f"   advantage {record['advantage']:+.3f}" if "advantage" in record else ""  # not held out
        label += "   cut off" if record["cut_off"] else ""
        lines += [colour + label + colours["off"], *lines_of(record["completion"], "    ")]
    return [*lines, ""] if shown else []

def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    add = parser.add_argument
    add("run", help="the --out of the run")
    add("--step", type=int, help="a step of the run; the newest one if not given")
    add("--held_out", action="store_true", help="those of the evaluation after the step")
    add("--question", default="", help="only questions that contain this text")
    add("--wrong", action="store_true", help="only completions with a wrong answer")
    add("--limit", type=int, help="at most so many completions of a question")
    args = parser.parse_args(argv)
    name, records = load(args.run, "held-out" if args.held_out else "step", args.step)
    plain = not sys.stdout.isatty() or os.environ.get("NO_COLOR")
    groups = [g for g in groups_of(records) if args.question.lower() in g[0]["question"].lower()]
    colours = dict.fromkeys(COLOURS, "") if plain else COLOURS
    lines = [line for group in groups for line in listed(group, args, colours)]
    print(f"{name}: {len(records)} completions", "", *lines, sep="\n")

if __name__ == "__main__":
    sys.stdout.reconfigure(errors="replace")
    try:
        main()
        sys.stdout.flush()
    except BrokenPipeError:  # by `| head`; what is still to be written goes nowhere
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())

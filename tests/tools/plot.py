"""Draw the curves of runs (needs matplotlib).

    python tests/tools/plot.py runs/grpo-seed0 runs/grpo-seed1 runs/ppo-seed0 --out curves.png
    python tests/tools/plot.py tests/results/toy/toy.csv --of eval_accuracy --out accuracy.png

A run is a directory with a metrics.jsonl, or the rows of a .csv with columns run, seed, step, and numbers.
Runs that differ only in the seed, which is the -seed0 or -s0 at the end of a directory's name, share a line:
their mean at the steps that all of them logged, in a band from the lowest run to the highest. --of draws only
one quantity, such as one that your copy of a script logs. The last value of this quantity, or of the held-out
accuracy, is also printed: its mean ± standard deviation.
"""
import argparse
import re
import sys
from pathlib import Path

import pandas

PANELS = {"eval_accuracy": "held-out accuracy", "completion_length": "completion length (tokens)",
          "reward": "reward in training", "clip_frac": "fraction of tokens clipped",
          "kl": "KL to the reference (nats per token)", "entropy": "entropy (nats per token)",
          "explained_variance": "explained variance of the critic"}

def read(path):
    """Read runs into a table with the columns run, seed, step, and numbers."""
    if path.suffix == ".csv":
        return pandas.read_csv(path, dtype={"run": str})
    run, seed = re.fullmatch(r"(.*?)(?:-s(?:eed)?(\d+))?", path.resolve().name).groups()
    return pandas.read_json(path / "metrics.jsonl", lines=True).assign(run=run, seed=int(seed or 0))

def curve(runs, key):
    """Mean, lowest, highest, and number of the runs' values, at the steps that all runs logged."""
    found = runs.groupby("step")[key].agg(["mean", "min", "max", "count"])
    return found[found["count"] == max(1, found["count"].max())]

def draw(table, shown, out):
    from matplotlib import pyplot, ticker
    figure, rows = pyplot.figure(figsize=(12, 7)), min(2, len(shown))
    for n, (key, title) in enumerate(shown.items()):
        axis = figure.add_subplot(rows, -(-len(shown) // rows), n + 1)
        for i, (name, runs) in enumerate(table.groupby("run", sort=False)):
            found = curve(runs, key)
            axis.plot(found["mean"], color=f"C{i}", marker=".", label=name)
            axis.fill_between(found.index, found["min"], found["max"], color=f"C{i}", alpha=0.2, linewidth=0)
        axis.set_title(title)
        axis.xaxis.set_major_locator(ticker.MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
        axis.grid(alpha=0.3)
        axis.legend()
    figure.supxlabel("step (line: mean of the runs, band: lowest to highest)")
    figure.tight_layout()
    figure.savefig(out, dpi=100)

def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="directory or .csv")
    parser.add_argument("--out", required=True, metavar="FILE.png", help="picture to write")
    parser.add_argument("--of", metavar="QUANTITY", help=f"draw only one, such as {list(PANELS)[0]}")
    args = parser.parse_args(argv)
    table = pandas.concat(map(read, args.runs))
    if table.duplicated(["run", "seed", "step"]).any():  # both would go into one line
        sys.exit("plot.py: two of these runs have the same name and seed; rename one")
    shown = {key: title for key, title in PANELS.items() if key in table}
    if args.of:
        shown = {args.of: PANELS.get(args.of, args.of)}
    draw(table, shown, args.out)
    key = args.of or "eval_accuracy"
    print(f"{shown[key]} at the end, mean ± standard deviation over seeds")
    for name, runs in table.dropna(subset=[key]).groupby("run", sort=False):
        step = curve(runs, key).index[-1]
        last = runs[runs["step"] == step][key]
        spread = f"{last.std():.4f}" if len(last) > 1 else "?"
        print(f"  {name:20} {last.mean():.4f} ± {spread}   (step {step}, seeds: {len(last)})")

if __name__ == "__main__":
    main()

"""Draw the curves of runs.

    pip install matplotlib
    python tests/tools/plot.py runs/grpo-seed0 runs/grpo-seed1 runs/ppo-seed0 --out curves.png
    python tests/tools/plot.py tests/results/toy/toy.csv --out toy.png

A run is a directory with a metrics.jsonl, that file itself, or rows of a .csv with the columns run, seed,
step and numbers. Runs that differ only in the seed, the -seed0 or -s0 at the end of a directory's name, are
one line: the mean at the steps that all of them have, in a band from the lowest to the highest of them. A
quantity that no run has gets no panel. With --of there is one quantity, and a panel for each file.
"""
import argparse
import re
import sys
from pathlib import Path

import pandas

PANELS = {"eval_sampled_accuracy": "held-out accuracy, sampled", "eval_accuracy": "held-out accuracy, greedy",
          "completion_length": "completion length (tokens)", "reward": "reward in training",
          "clip_frac": "clipped share of tokens", "kl": "KL to the reference (nats per token)",
          "entropy": "entropy (nats per token)", "explained_variance": "explained variance of the critic"}
LOGIT_TICKS = [.01, .1, .2, .3, .5, .7, .8, .9, .95, .98, .99, .999]
SHARE_TICKS = [0, .001, .01, .1, 1]

def read(path):
    """Read runs as a table with the columns run, seed, step and numbers."""
    if path.suffix == ".csv":
        return pandas.read_csv(path, dtype={"run": str})
    path = path / "metrics.jsonl" if path.is_dir() else path
    run, seed = re.fullmatch(r"(.*?)(?:-s(?:eed)?(\d+))?", path.resolve().parent.name).groups()
    return pandas.read_json(path, lines=True).assign(run=run, seed=int(seed or 0))

def curve(runs, key):
    """Mean, lowest, highest and number of the runs' values at the steps that all of them have, by step."""
    found = runs.groupby("step")[key].agg(["mean", "min", "max", "count"])
    return found[found["count"] == max(1, found["count"].max())]

def draw(panels, logit, out):
    """Draw panels (title, quantity, table), with a line for each name in the column run."""
    import matplotlib
    matplotlib.use("Agg")  # a file, no window
    from matplotlib import pyplot, ticker
    columns = -(-len(panels) // 2)
    figure, axes = pyplot.subplots(-(-len(panels) // columns), columns, figsize=(12, 7), squeeze=False)
    for axis in axes.flat[len(panels):]:
        axis.remove()
    for (title, key, table), axis in zip(panels, axes.flat):
        for i, (name, runs) in enumerate(table.groupby("run", sort=False)):
            found = curve(runs, key)
            axis.plot(found["mean"], color=f"C{i}", linestyle=["-", "--", ":"][i // 10 % 3], marker=".",
                      markersize=3, linewidth=1.4, label=name)
            axis.fill_between(found.index, found["min"], found["max"], color=f"C{i}", alpha=0.2, linewidth=0)
        ticks = LOGIT_TICKS if logit else None
        if logit:
            axis.set_yscale("logit")
        elif key == "clip_frac":  # one script clips a token in a thousand, another half of all
            axis.set_yscale("symlog", linthresh=0.001)
            ticks = SHARE_TICKS
        if ticks:
            axis.yaxis.set_major_locator(ticker.FixedLocator(ticks))
            axis.yaxis.set_major_formatter("{x:g}")
            axis.yaxis.set_minor_locator(ticker.NullLocator())
        axis.set_title(title, fontsize=10)
        axis.set_xlabel("step", fontsize=9)
        axis.xaxis.set_major_locator(ticker.MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
        axis.tick_params(labelsize=8)
        axis.grid(alpha=0.3)
        if axis is axes.flat[0] or table is not panels[0][2]:  # the lines of one table are the same in all
            axis.legend(fontsize=8)
    what = "line: the mean of the runs;  band: from the lowest run to the highest"
    figure.text(0.5, 0.008, what, ha="center", fontsize=9)
    figure.tight_layout(rect=(0, 0.03, 1, 1))
    figure.savefig(out, dpi=100)

def main():
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="directory, metrics.jsonl or .csv")
    parser.add_argument("--out", required=True, metavar="FILE.png", help="picture to write")
    parser.add_argument("--of", metavar="QUANTITY",
                        help=f"draw one such as {list(PANELS)[0]}, a panel per file")
    parser.add_argument("--logit", action="store_true", help="spread shares near 0 and 1")
    args = parser.parse_args()
    tables = {path: read(path) for path in args.runs if path.is_file() or (path / "metrics.jsonl").exists()}
    if args.of:
        panels = [(path.stem.replace("_", " ") + ": " + PANELS.get(args.of, args.of), args.of, table)
                  for path, table in tables.items()]
    else:
        together = pandas.concat(tables.values()) if tables else {}
        panels = [(title, key, together) for key, title in PANELS.items() if key in together]
    if not panels:
        sys.exit("plot.py: these runs have nothing to draw")
    draw(panels, args.logit, args.out)

if __name__ == "__main__":
    main()

"""Draw the curves of runs.

    pip install matplotlib
    python tests/tools/plot.py runs/grpo-seed0 runs/grpo-seed1 runs/ppo-seed0 --out curves.png
    python tests/tools/plot.py tests/results/toy/toy.csv --out toy.png

A run is a directory with a metrics.jsonl, or rows of a .csv with the columns run, seed, step and numbers.
Runs that differ only in the seed, the -seed0 or -s0 at the end of a directory's name, are one line: the mean
at the steps that all of them have, in a band from the lowest to the highest of them. A quantity that no run
has gets no panel. With --of there is one quantity, such as a number that your copy of a script logs: all
directories share a panel, and each .csv has its own.
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
    if path.is_dir() and not (path / "metrics.jsonl").exists():
        return pandas.DataFrame()  # in runs/* there may be others than runs
    run, seed = re.fullmatch(r"(.*?)(?:-s(?:eed)?(\d+))?", path.resolve().name).groups()
    return pandas.read_json(path / "metrics.jsonl", lines=True).assign(run=run, seed=int(seed or 0))

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
        if logit or key == "clip_frac":  # one script clips a token in a thousand, another half of all
            axis.set_yscale("logit") if logit else axis.set_yscale("symlog", linthresh=0.001)
            axis.yaxis.set_major_locator(ticker.FixedLocator(LOGIT_TICKS if logit else SHARE_TICKS))
            axis.yaxis.set_major_formatter("{x:g}")
            axis.yaxis.set_minor_locator(ticker.NullLocator())
        axis.set_title(title, fontsize=10)
        axis.set_xlabel("step", fontsize=9)
        axis.xaxis.set_major_locator(ticker.MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
        axis.tick_params(labelsize=8)
        axis.grid(alpha=0.3)
        if axis is axes.flat[0] or table is not panels[0][2]:  # the lines of one table are the same in all
            axis.legend(fontsize=8)
    figure.supxlabel("line: the mean of the runs;  band: from the lowest run to the highest", fontsize=9)
    figure.tight_layout()
    figure.savefig(out, dpi=100)

def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="directory or .csv")
    parser.add_argument("--out", required=True, metavar="FILE.png", help="picture to write")
    parser.add_argument("--of", metavar="QUANTITY", help=f"draw one, such as {list(PANELS)[0]}")
    parser.add_argument("--logit", action="store_true", help="spread shares near 0 and 1")
    args = parser.parse_args(argv)
    shown = {args.of: PANELS.get(args.of, args.of)} if args.of else PANELS
    tables = {}  # those that share their panels, by the beginning of a title
    for path in args.runs:
        table = read(path)
        if not shown.keys() & set(table):
            print(f"plot.py: {path} is left out: it has no {args.of or 'such numbers'}", file=sys.stderr)
            continue
        name = path.stem.replace("_", " ") + ": " if args.of and path.suffix == ".csv" else ""
        tables[name] = pandas.concat([tables.get(name), table])
    panels = [(name + title, key, table) for name, table in tables.items()
              for key, title in shown.items() if key in table]
    draw(panels, args.logit, args.out)

if __name__ == "__main__":
    main()

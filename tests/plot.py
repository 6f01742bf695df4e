"""Draw the curves of runs.

    pip install matplotlib
    python tests/plot.py runs/grpo-seed0 runs/grpo-seed1 runs/ppo-seed0 --out curves.png

A run is its directory or a .jsonl file such as its metrics.jsonl; a directory without one is left out. Runs
whose names differ only in a trailing -seed0 or -s0 are one line: the mean at the steps that all of them have,
in a band from the lowest to the highest of them. A quantity that no run has logged gets no panel. With --of
there is one quantity, and a panel for each directory that holds runs: its name is the question.
"""
import argparse
import collections
import json
import re
import statistics
import sys
from pathlib import Path

PANELS = {"eval_sampled_accuracy": "held-out accuracy, sampled", "eval_accuracy": "held-out accuracy, greedy",
          "completion_length": "completion length (tokens)", "reward": "reward in training",
          "clip_frac": "clipped share of tokens", "kl": "KL to the reference (nats per token)",
          "entropy": "entropy (nats per token)", "explained_variance": "explained variance of the critic"}
FROM_0 = {"clip_frac", "kl", "entropy"}  # their axis begins just below 0, so that a line at 0 is seen
LOGIT_TICKS = [.01, .1, .2, .3, .5, .7, .8, .9, .95, .98, .99, .999]
SHARE_TICKS = [0, .001, .01, .1, 1]

def fail(message):
    print(f"plot.py: {message}", file=sys.stderr)
    sys.exit(2)

# ---- Curves ----

def read_run(run):
    """The directory that holds a run, its name without the seed, and {step: its numbers}."""
    path = Path(run, "metrics.jsonl") if Path(run).is_dir() else Path(run)
    whole = path.resolve().parent if path.name == "metrics.jsonl" else path.resolve().with_suffix("")
    steps = {}
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        fail(f"{path}: cannot be read: {error}")
    for line in lines:
        try:
            entry = json.loads(line)
            steps[entry["step"]] = entry
        except (ValueError, KeyError, TypeError):  # a run that still writes, or was killed, has half a line
            continue
    if not steps:
        fail(f"{path}: has no line with a step; is it a metrics.jsonl?")
    return whole.parent.name, re.sub(r"-s(eed)?[0-9]+$", "", whole.name), steps

def by_number(name):
    """A key to sort by: 2 before 16."""
    return [int(part) if part.isdigit() else part for part in re.split("([0-9]+)", name)]

def curve(runs, key):
    """Steps at which all runs have `key`, and the runs' means, lowest and highest values there."""
    steps = sorted(set.intersection(*({step for step, entry in run.items() if key in entry} for run in runs)))
    values = [[run[step][key] for run in runs] for step in steps]
    means = [statistics.mean(at) for at in values]
    return steps, means, [min(at) for at in values], [max(at) for at in values]

def set_scale(axis, key, scale):
    """Choose a panel's scale, with ticks that are plain numbers."""
    from matplotlib import ticker
    ticks = None
    if scale == "logit":
        axis.set_yscale("logit")
        ticks = LOGIT_TICKS
    elif key == "clip_frac":  # one script clips a token in a thousand, another half of all
        axis.set_yscale("symlog", linthresh=0.001)
        axis.set_ylim(-0.0003, 1.0)
        ticks = SHARE_TICKS
    elif key in FROM_0:
        high = axis.get_ylim()[1]
        axis.set_ylim(-0.04 * high, high)
    if ticks:
        axis.yaxis.set_major_locator(ticker.FixedLocator(ticks))
        axis.yaxis.set_major_formatter(ticker.FuncFormatter(lambda value, _: f"{value:g}"))
        axis.yaxis.set_minor_locator(ticker.NullLocator())

def draw(panels, args):
    """Panels (title, quantity, {name: [{step: numbers}]}), with a line per name."""
    plt, ticker = import_matplotlib()
    columns = -(-len(panels) // 2)
    figure, axes = plt.subplots(-(-len(panels) // columns), columns, figsize=(12, 7), squeeze=False)
    for axis in axes.flat[len(panels):]:
        axis.remove()
    for (title, key, groups), axis in zip(panels, axes.flat):
        for i, name in enumerate(sorted(groups, key=by_number)):
            runs = groups[name]
            steps, means, lows, highs = curve(runs, key)
            if not steps and args.of:
                continue
            several = f" ({len(runs)} run{'s' * (len(runs) > 1)})"
            label = name.replace("-", " ") if args.of else name
            axis.plot(steps, means, color=f"C{i}", linestyle=["-", "--", ":"][i // 10 % 3], marker=".",
                      markersize=3, linewidth=1.4, label=label + several)
            axis.fill_between(steps, lows, highs, color=f"C{i}", alpha=0.2, linewidth=0)
        set_scale(axis, key, args.scale)
        axis.set_title(title, fontsize=10)
        axis.set_xlabel("step", fontsize=9)
        axis.xaxis.set_major_locator(ticker.MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
        axis.tick_params(labelsize=8, which="both")
        axis.grid(alpha=0.3)
        if args.of:
            axis.legend(fontsize=8)
    what = "line: the mean of the runs;  band: from the lowest run to the highest"
    figure.text(0.5, 0.008, what, ha="center", fontsize=9)
    if args.of:
        figure.suptitle(PANELS.get(args.of, args.of))
        figure.tight_layout(rect=(0, 0.03, 1, 1))
    else:  # the same lines in all panels: one legend
        handles, names = axes.flat[0].get_legend_handles_labels()
        figure.legend(handles, names, loc="upper center", ncol=5, frameon=False, fontsize=10)
        figure.tight_layout(rect=(0, 0.03, 1, 0.97 - 0.035 * (-(-len(names) // 5))))
    figure.savefig(args.out, dpi=100)

def import_matplotlib():
    import matplotlib
    matplotlib.use("Agg")  # a file, no window
    from matplotlib import pyplot, ticker
    return pyplot, ticker

def draw_curves(args):
    folders = collections.defaultdict(lambda: collections.defaultdict(list))
    begun = [run for run in args.runs if Path(run).is_file() or Path(run, "metrics.jsonl").exists()]
    for folder, name, steps in map(read_run, begun or args.runs):
        folders[folder.replace("-", " ") + "?" if args.of else ""][name].append(steps)
    wanted = {args.of: args.of} if args.of else PANELS
    panels = [(folder or wanted[key], key, groups) for key in wanted for folder, groups in folders.items()
              if any(curve(runs, key)[0] for runs in groups.values())]
    if not panels:
        fail(f"nothing to draw: none of {', '.join(wanted)} is in these runs")
    draw(panels, args)

if __name__ == "__main__":
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    parser.add_argument("runs", nargs="+", metavar="RUN", help="directory of a run, or a .jsonl file")
    parser.add_argument("--out", required=True, metavar="FILE.png", help="picture to write")
    parser.add_argument("--of", metavar="QUANTITY",
                        help=f"draw one such as {list(PANELS)[0]}, a panel per directory")
    parser.add_argument("--scale", choices=["linear", "logit"], default="linear",
                        help="of the quantities")
    args = parser.parse_args()
    try:
        draw_curves(args)
    except ModuleNotFoundError as error:
        fail(f"{error}; to install it: pip install matplotlib")
    except (OSError, ValueError) as error:  # no such directory, an ending that is no picture's
        fail(f"--out {args.out}: {error}")

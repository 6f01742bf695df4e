"""Draw the curves of runs, or how hard PPO, GRPO and GSPO push the tokens of one rollout.

    pip install matplotlib
    python tests/plot.py runs/grpo-seed0 runs/grpo-seed1 runs/ppo-seed0 --out curves.png
    python tests/plot.py --pushes --out pushes.png

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
    elif scale == "log":
        axis.set_yscale("log")
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

# ---- Pushes ----

KINDS = {(True, True): "worked out, right", (True, False): "guessed, right",
         (False, True): "worked out, wrong", (False, False): "guessed, wrong"}

def four_kinds(rollout, group_size):
    """The first group with completions of all four KINDS, or of most: {kind: row}."""
    found = {}
    rows = zip(rollout["texts"], rollout["rewards"].tolist())
    for i, (text, r) in enumerate(rows):
        if i % group_size == 0:
            group = {}
        group.setdefault((r >= 1, "\n" in text), i)
        if len(group) > len(found):
            found = group
    return {kind: found[kind] for kind in KINDS if kind in found}

def measure_pushes(steps=4, prompts=32, group_size=8):
    """Train the toy by ppo.py; of the last rollout, after its update, how hard each script pushes its tokens.

    Returns (question, [(kind, its tokens as text, {script: pushes}, s)]). A push is the gradient of J by
    log pi, times the number of completions. There is no KL, which would push clipped tokens too.
    """
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    import copy
    import torch
    import common, grpo, gspo, ppo  # noqa: E401
    args = ppo.parse_args(f"--device cpu --prompts {prompts} --group_size {group_size}".split())
    policy, tokenizer = common.load_policy(args)
    common.resolve_defaults(args, policy)
    problems, _ = common.load_problems(args, tokenizer, common.answer_reward)
    value, reference = common.load_value(policy), copy.deepcopy(policy)
    optimizers = {"policy": common.Optimizer(policy, args.lr, args, eps=1e-5),
                  "value": common.Optimizer(value, args.value_lr, args, eps=1e-5)}
    for step in range(1, steps + 1):
        torch.manual_seed(step)
        batch = common.batch_of(problems, step, args)
        rollout, _ = ppo.collect(policy, value, reference, tokenizer, batch, common.answer_reward, args)
        ppo.update(policy, value, optimizers, rollout, args)
    with torch.no_grad():
        logp = common.rollout_logprobs(policy, rollout, args)
    old, mask = rollout["old_logp"], rollout["mask"]
    group_adv = grpo.group_advantages(rollout["rewards"], group_size)[:, None]
    s = ((logp - old).sum(1) / mask.sum(1)).exp()
    pushes = {}
    for script, adv in [(ppo, rollout["adv"]), (grpo, group_adv), (gspo, group_adv)]:
        flags = script.parse_args("--device cpu --beta 0".split())
        common.resolve_defaults(flags, policy)
        x = logp.clone().requires_grad_()
        no_reference = () if script is ppo else (None,)
        loss, _ = script.policy_loss(x, old, *no_reference, adv, mask, flags)
        pushes[script.__name__] = -torch.autograd.grad(loss, x)[0]
    kinds = four_kinds(rollout, group_size)
    shown = []
    for kind, row in kinds.items():
        T = int(mask[row].sum())
        ids = rollout["ids"][row, rollout["attention"][row].sum() - T:][:T].tolist()
        tokens = [tokenizer.decode([token], skip_special_tokens=True) or "∎" for token in ids]  # ∎: end
        of_row = {name: x[row, :T].tolist() for name, x in pushes.items()}
        shown.append((KINDS[kind], tokens, of_row, s[row].item()))
    return batch[min(kinds.values()) // group_size]["question"], shown

def draw_pushes(args):
    """Bands of three rows of tokens: blue is pushed up, red down; hatched is held by the clip."""
    plt, ticker = import_matplotlib()
    import numpy as np
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import FuncNorm
    question, shown = measure_pushes()
    rows = {"ppo": "PPO: a token has its\nown advantage and clip",
            "grpo": "GRPO: one advantage,\na clip per token",
            "gspo": "GSPO: one advantage,\none clip"}
    largest = max(abs(x) for _, _, pushes, _ in shown for row in pushes.values() for x in row)
    def root(x):
        return np.sign(x) * np.abs(x) ** 0.5

    def square(x):
        return np.sign(x) * x ** 2
    colours = ScalarMappable(FuncNorm((root, square), -largest, largest), "RdBu")
    figure, axis = plt.subplots(figsize=(10.5, 6.4))
    x, top, right = 0, 0, 0
    for kind, tokens, pushes, s in shown:
        if x and x + len(tokens) > 40:  # the next band
            x, top = 0, top + 5.8
        axis.text(x, top - 0.35, kind, fontsize=12, weight="bold")
        axis.text(x, top + 4.5, f"s = {s:.4f}", fontsize=11)
        for line, (script, label) in enumerate(rows.items()):
            y = top + 1.5 * line
            if x == 0:
                axis.text(-0.7, y + 0.5, label, ha="right", va="center", fontsize=10)
            for i, (token, push) in enumerate(zip(tokens, pushes[script])):
                colour = colours.to_rgba(push)
                box = plt.Rectangle((x + i, y), 1, 1, facecolor=colour, edgecolor="0.6", linewidth=0.5)
                box.set_hatch("////" if push == 0 else None)
                axis.add_patch(box)
                behind = {"facecolor": "white", "edgecolor": "none", "pad": 0.8}
                axis.text(x + i + 0.5, y + 0.5, token.replace("\n", "↵"), fontsize=11,
                          ha="center", va="center", color="white" if sum(colour[:3]) < 1.5 else "black",
                          bbox=behind if push == 0 and token.strip() else None)
        x += len(tokens) + 2
        right = max(right, x - 2)
    axis.set(xlim=(-9.5, right + 0.1), ylim=(top + 5, -1))
    axis.set_axis_off()
    bar = figure.colorbar(colours, ax=axis, fraction=0.02, pad=0.01)
    bar.set_ticks([tick for tick in (-1, -.5, -.2, -.05, 0, .05, .2, .5, 1) if abs(tick) <= largest])
    bar.ax.yaxis.set_major_formatter(ticker.FuncFormatter(lambda value, _: f"{value:+g}" if value else "0"))
    bar.ax.yaxis.set_minor_locator(ticker.NullLocator())
    figure.suptitle(f"{question}   blue: pushed up,  red: down,  hatched: held by the clip", fontsize=13)
    figure.tight_layout()
    figure.savefig(args.out, dpi=100)

if __name__ == "__main__":
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    parser.add_argument("runs", nargs="*", metavar="RUN", help="directory of a run, or a .jsonl file")
    parser.add_argument("--out", required=True, metavar="FILE.png", help="picture to write")
    parser.add_argument("--of", metavar="QUANTITY",
                        help=f"draw one such as {list(PANELS)[0]}, a panel per directory")
    parser.add_argument("--scale", choices=["linear", "log", "logit"], default="linear",
                        help="of the quantities")
    parser.add_argument("--pushes", action="store_true",
                        help="draw the tokens of a rollout of the toy instead")
    args = parser.parse_args()
    if bool(args.runs) == args.pushes:
        fail("give runs to draw, or --pushes")
    try:
        draw_pushes(args) if args.pushes else draw_curves(args)
    except ModuleNotFoundError as error:
        fail(f"{error}; to install it: pip install matplotlib")
    except (OSError, ValueError) as error:  # no such directory, an ending that is no picture's
        fail(f"--out {args.out}: {error}")

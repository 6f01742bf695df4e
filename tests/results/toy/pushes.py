"""Draw how hard PPO, GRPO and GSPO push the tokens of one rollout of the toy: a picture of README.md.

    pip install matplotlib
    python tests/results/toy/pushes.py pushes.png
"""
import copy
import inspect
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))
import common, grpo, gspo, ppo  # noqa: E401, E402

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

def measure(steps=4, prompts=32, group_size=8):
    """Train the toy by ppo.py; of the last rollout, after its update, how hard each script pushes its tokens.

    Returns (question, [(kind, its tokens as text, {script: pushes}, s)]). A push is the gradient of J by
    log pi, times the number of completions. There is no KL, which would push clipped tokens too.
    """
    args = ppo.parse_args(f"--device cpu --prompts {prompts} --group_size {group_size}".split())
    policy, tokenizer = common.load_policy(args)
    problems, _ = common.load_problems(args, tokenizer)
    critic, reference = ppo.make_critic(policy), copy.deepcopy(policy)
    optimizers = {"policy": common.Optimizer(policy, args.lr, args, eps=1e-5),
                  "critic": common.Optimizer(critic, args.value_lr, args, eps=1e-5)}
    for step in range(1, steps + 1):
        torch.manual_seed(step)
        batch = common.batch_of(problems, step, args.prompts, args.seed)
        rollout, _ = ppo.collect(policy, critic, reference, tokenizer, batch, common.answer_reward, args)
        ppo.update(policy, critic, optimizers, rollout, args)
    with torch.no_grad():
        logp = common.over_batches(common.token_logprobs, policy, rollout, args)
    old, mask = rollout["old_logp"], rollout["mask"]
    group_adv = grpo.group_advantages(rollout["rewards"], group_size)[:, None]
    s = ((logp - old).sum(1) / mask.sum(1)).exp()
    pushes = {}
    for script, adv in [(ppo, rollout["adv"]), (grpo, group_adv), (gspo, group_adv)]:
        flags = script.parse_args("--device cpu --beta 0".split())
        x = logp.clone().requires_grad_()
        given = vars(flags) | {"logp": x, "old_logp": old, "ref_logp": None, "adv": adv, "mask": mask}
        names = inspect.signature(script.policy_loss).parameters
        loss, _ = script.policy_loss(*(given[name] for name in names))
        pushes[script.__name__] = -torch.autograd.grad(loss, x)[0]
    kinds = four_kinds(rollout, group_size)
    shown = []
    for kind, row in kinds.items():
        T = int(mask[row].sum())
        ids = rollout["ids"][row, rollout["prompt_length"][row]:][:T].tolist()
        tokens = [tokenizer.decode([token], skip_special_tokens=True) or "∎" for token in ids]  # ∎: end
        of_row = {name: x[row, :T].tolist() for name, x in pushes.items()}
        shown.append((KINDS[kind], tokens, of_row, s[row].item()))
    return batch[min(kinds.values()) // group_size]["question"], shown

def draw(out):
    """Bands of three rows of tokens: blue is pushed up, red down; hatched is held by the clip."""
    import matplotlib
    import numpy as np
    matplotlib.use("Agg")  # a file, no window
    from matplotlib import pyplot as plt, ticker
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import FuncNorm
    question, shown = measure()
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
    figure.suptitle(f"{question}   blue: pushed up,  red: down,  hatched: clipped", fontsize=13)
    figure.tight_layout()
    figure.savefig(out, dpi=100)

if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("which file is the picture to be written to?")
    draw(sys.argv[1])

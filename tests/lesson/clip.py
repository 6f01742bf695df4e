"""Draw the clip in (3) with ppo.policy_loss: python tests/lesson/clip.py clip.png (needs matplotlib)."""
import math
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the root of the repository
import ppo  # noqa: E402

def objective(w, adv, eps=0.2):
    """Compute J of a completion with one token of ratio w, and the push of this token, dJ/dlog pi."""
    logp, one = torch.tensor([[math.log(w)]], requires_grad=True), torch.ones(1, 1)
    loss, _ = ppo.policy_loss(logp, 0 * one, adv * one, one, eps, eps)
    return -loss.item(), 0 - torch.autograd.grad(loss, logp)[0].item()

if __name__ == "__main__":
    from matplotlib import pyplot
    pyplot.rcParams["font.size"] = 16
    figure, axes = pyplot.subplots(1, 2, figsize=(13, 6))
    ticks, ratios = [0.5, 0.8, 1, 1.2, 1.5], [math.exp(i / 100) for i in range(-90, 65)]
    for axis, adv, title in zip(axes, (1, -1), ("A = 1: a good token", "A = −1: a bad token")):
        axis.plot(ratios, [w * adv for w in ratios], "--", color="gray", label="w A: no clip")
        axis.plot(ratios, [objective(w, adv)[0] for w in ratios], linewidth=3, label="J: with the clip")
        for w in (0.5, 0.9, 1.1, 1.5):
            height, push = objective(w, adv)
            axis.plot(w, height, "o", color="C3", markersize=10)
            left, side = (6 * adv, "left" if adv > 0 else "right") if push else (0, "center")
            axis.annotate(f"push {push:.2g}".replace("-", "−"), (w, height), (left, -22), color="C3",
                          textcoords="offset points", va="center", ha=side)
        axis.set(title=title, xscale="log", xlim=(0.4, 1.95), xlabel="ratio w, on a log scale", ylabel="J")
        axis.set_xticks(ticks, [f"{x:g}" for x in ticks])
        axis.set_xticks([], minor=True)
        axis.margins(y=0.1)
        axis.grid(alpha=0.3)
        axis.legend(loc="upper left" if adv > 0 else "lower left")
    figure.tight_layout(pad=1.5)
    figure.savefig(sys.argv[1], dpi=80)

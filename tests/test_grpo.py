"""GRPO beyond the worked numbers of test_equations.py: value and gradient against loops over single numbers,
and the gradient of an update from whole logits."""
import math

import pytest
import torch
from conftest import Trainer, loss_of, random_rows, settings, slopes, tensor64

import grpo
import gspo

def surrogate(rows, eps_low, eps_high, beta=0.0, kl="k3"):
    """The objective in floats, token by token: J summed over rows, the clipped tokens, the largest ratio."""
    J, clipped, largest = 0.0, 0, 0.0
    rows = rows | {"adv": rows["adv"].expand_as(rows["mask"])}
    for i, t in rows["mask"].nonzero().tolist():
        logp, old, ref, A = (rows[name][i, t].item() for name in ("logp", "old_logp", "ref_logp", "adv"))
        w, x = math.exp(logp - old), math.exp(ref - logp)
        held = min(max(w, 1 - eps_low), 1 + eps_high)
        penalty = (x - math.log(x) - 1) * (w if kl == "wk3" else 1)
        J += (min(w * A, held * A) - beta * penalty) / rows["mask"][i].sum().item()
        clipped, largest = clipped + (held * A < w * A), max(largest, w)
    return J, clipped, largest

# --- (1) advantages

@pytest.mark.parametrize("script", [grpo, gspo])
def test_rewards_that_differ_by_little_keep_their_advantages(script):
    adv = script.group_advantages(tensor64([0.5, 0.5 + 1e-4]), 2)
    torch.testing.assert_close(adv, tensor64([-0.5, 0.5]) / (math.sqrt(0.5) + 1), rtol=1e-6, atol=0)

def test_equal_prompts_stay_two_groups():
    """Rewards [1, 0, 0, 0] and [1, 1, 1, 0] of one problem drawn twice are normalised apart."""
    trainer = Trainer(grpo, group_size=4)
    trainer.problems = [{"prompt": [3, 4, 5], "name": name} for name in "ab"]
    names = []
    for second, adv, equal in [([1, 1, 1, 0], [0.5, 0.5, 0.5, -1.5], 0), ([1, 1, 1, 1], [0, 0, 0, 0], 0.5)]:
        trainer.reward = lambda asked, _: names.extend(p["name"] for p in asked) or [1, 0, 0, 0] + second
        trainer.collect()
        expected = torch.tensor([1.5, -0.5, -0.5, -0.5] + adv)[:, None]
        torch.testing.assert_close(trainer.rollout["adv"], expected, rtol=1e-3, atol=0)
        assert trainer.stats["zero_variance_groups"] == equal
    assert names == (["a"] * 4 + ["b"] * 4) * 2

# --- (2) and (3) ratio and clip

@pytest.mark.parametrize("beta, kl", [(0.0, "k3"), (0.3, "k3"), (0.3, "wk3")])
@pytest.mark.parametrize("seed, spread, shift", [
    (0, 0.4, 0), (1, 2.0, 0), (2, 0.3, -1.5), (3, 1.0, 9.0), (4, 1.0, -9.0)])
def test_value_gradient_and_statistics_equal_a_float_loop(beta, kl, seed, spread, shift):
    """On ragged rows with unequal ends of the clip; the gradient by central differences of the loop. In the
    third all ratios are below 1, which is what padding has. In the fourth they are about e^9: a bad token
    that rose so far must come back; in the last e^-9, and so far above is the reference, to which the KL
    pulls."""
    rows = random_rows(seed, spread=spread, shift=shift)
    args = settings(grpo, eps_high=0.28, beta=beta, kl=kl)
    J, clipped, largest = surrogate(rows, 0.2, 0.28, beta, kl)
    loss, gradient, stats = loss_of(grpo, rows if beta else rows | {"ref_logp": None}, args)
    expected = slopes(lambda x: surrogate(rows | {"logp": x}, 0.2, 0.28, beta, kl)[0], rows["logp"])
    assert -loss.item() == pytest.approx(J, rel=1e-10)
    torch.testing.assert_close(-gradient, expected, rtol=1e-6, atol=1e-8 * max(1, abs(J)))
    assert [float(x) for x in stats["loss"]] == [loss.item(), 5] and 0 < clipped < 18
    assert [float(x) for x in stats["clip_frac"]] == [clipped, 18]
    assert stats["ratio_max"].item() == pytest.approx(largest)

# --- update

def test_the_gradient_of_an_update_from_whole_logits():
    """A row at a time, without common.py and policy_loss: temperature, shift, row means, the mean of rows."""
    trainer, rollout = Trainer(grpo, beta=0.3).moved()
    J, N = 0.0, len(rollout["ids"])
    for i, n in enumerate(rollout["mask"].sum(1).long().tolist()):
        ids = rollout["ids"][i, :rollout["attention"][i].sum()]
        logp = (trainer.policy(ids[None]).logits[0] / 0.6).log_softmax(-1)
        logp = logp[:-1].gather(1, ids[1:, None])[-n:, 0]
        w, x = (logp - rollout["old_logp"][i, :n]).exp(), (rollout["ref_logp"][i, :n] - logp).exp()
        A = rollout["adv"][i]
        J += (torch.minimum(w * A, w.clamp(0.8, 1.2) * A) - 0.3 * (x - x.log() - 1)).mean() / N
    expected = torch.cat([g.flatten() for g in torch.autograd.grad(-J, list(trainer.policy.parameters()))])
    [gradient], stats = trainer.gradients(rollout)
    torch.testing.assert_close(gradient, expected, rtol=1e-6, atol=1e-9)
    assert stats["loss"] == pytest.approx(-J.item(), rel=1e-5) and stats["clip_frac"] > 0.05

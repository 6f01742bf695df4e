"""GRPO beyond the worked numbers of test_equations.py: value and gradient against loops over single numbers,
the gradient of an update from whole logits, collect, and the reference of a whole run."""
import math
import random

import pytest
import torch
import transformers
from conftest import TINY, Trainer, loss_of, random_rows, refused, settings, slopes, spy, tensor64, train

import common
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
@pytest.mark.parametrize("P, G", [(3, 5), (5, 3), (4, 4)])
def test_every_group_is_normalised_by_itself(script, P, G):
    """The mean and the deviation are those of the row's own group, whatever the shape of the batch."""
    rng = random.Random(P)
    rewards, expected = [[rng.gauss(g, 1 + g) for _ in range(G)] for g in range(P)], []
    for group in rewards:
        mean = sum(group) / G
        deviation = math.sqrt(sum((r - mean) ** 2 for r in group) / (G - 1))
        expected += [(r - mean) / (deviation + 1e-4) for r in group]
    adv = script.group_advantages(tensor64(rewards).flatten(), G)
    torch.testing.assert_close(adv, tensor64(expected), rtol=1e-9, atol=0)

@pytest.mark.parametrize("script", [grpo, gspo])
@pytest.mark.parametrize("reward", [0.7, 0.1, 0.0, 1e6 + 0.3, -3.3])
@pytest.mark.parametrize("G", [2, 3, 12])
def test_only_equal_rewards_give_exactly_zero(script, reward, G):
    """Equal is not close: rewards that differ by little keep their advantages, as do the neighbours."""
    adv = script.group_advantages(torch.tensor([reward] * G + [1.0] + [0.0] * (G - 1)), G)
    assert adv[:G].tolist() == [0.0] * G and (adv[G:] != 0).all()
    close = script.group_advantages(tensor64([0.5, 0.5 + 1e-4]), 2)
    torch.testing.assert_close(close, tensor64([-0.5, 0.5]) / (math.sqrt(0.5) + 1), rtol=1e-6, atol=0)

@pytest.mark.parametrize("script", [grpo, gspo])
def test_a_group_of_one_is_refused(script, capsys):
    """The deviation of one reward is NaN."""
    with refused(capsys, "--group_size"):
        script.parse_args(["--group_size", "1"])

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

def test_doubling_the_advantage_doubles_the_gradient_and_leaves_the_clip_boundary():
    """The advantage scales the push; how far a token may go is a matter of eps alone."""
    logp = torch.linspace(-0.6, 0.6, 49).double()[None]
    rows = {"logp": logp, "old_logp": 0 * logp, "ref_logp": None, "mask": torch.ones_like(logp)}
    args, advantages = settings(grpo, beta=0.0), tensor64([0.7, 1.4])
    once, twice = (loss_of(grpo, rows | {"adv": A.view(1, 1)}, args)[1] for A in advantages)
    torch.testing.assert_close(twice, 2 * once, rtol=1e-12, atol=0)
    assert torch.equal(once == 0, logp > math.log(1.2))

# --- (4) KL

@pytest.mark.parametrize("kl", ["k3", "wk3"])
def test_moving_away_from_the_reference_raises_the_penalty(kl):
    """It is 0 at the reference, never negative, and grows to both sides."""
    for sign in (1, -1):
        gaps, zero = sign * torch.arange(20)[:, None].double() / 10, torch.zeros(20, 1).double()
        rows = {"logp": gaps, "old_logp": gaps, "ref_logp": zero, "adv": zero, "mask": zero + 1}
        parts, args = [{name: x[[i]] for name, x in rows.items()} for i in range(20)], settings(grpo, kl=kl)
        penalties = [loss_of(grpo, part, args)[0].item() for part in parts]
        assert penalties[0] == 0 and all(a < b for a, b in zip(penalties, penalties[1:]))

def test_every_token_has_its_own_kl():
    """The gradient of a token is that of its own gap, not of its row's."""
    gaps, row = tensor64([[0.0, 0.5, -1.0]]), tensor64([[-1.0, -2.0, -3.0]])
    rows = {"logp": row, "old_logp": row, "ref_logp": row + gaps, "adv": 0 * gaps, "mask": torch.ones(1, 3)}
    _, gradient, _ = loss_of(grpo, rows, settings(grpo, beta=1.0))
    torch.testing.assert_close(gradient, (1 - gaps.exp()) / 3, rtol=1e-12, atol=1e-15)

# --- update and whole runs

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

def test_one_update_per_rollout_has_ratio_one_loss_zero_and_a_gradient():
    """With one minibatch and one pass nothing is clipped, and the advantages of a group cancel."""
    trainer = Trainer(grpo, beta=0.0, group_size=4)
    gradient, stats = trainer.gradients(trainer.rollout)
    assert abs(stats["loss"]) < 1e-6 and stats["clip_frac"] == 0
    assert stats["ratio_max"] == pytest.approx(1, abs=1e-6) and gradient.norm() > 1e-2

ITERATIVE = TINY + " --steps 6 --minibatches 2 --epochs 2 --beta 0.04"

def test_the_reference_is_refreshed_every_ref_every_steps(here, spread):
    """3 refreshes, 6 rollouts, 6 x 2 x 2 optimiser steps. The KL is 0 right after a refresh only: what was
    copied shares no storage with the policy."""
    kl = [row["kl"] for row in train(grpo, ITERATIVE + " --ref_every 2")[1:]]
    assert len(kl) == 6 and max(kl[0::2]) < 1e-6 and min(kl[1::2]) > 1e-5
    assert torch.load("run/step-6/optimizer.pt")["policy"]["steps_taken"] == 24

def test_without_ref_every_the_reference_stays_and_without_beta_there_is_none(here, spread, monkeypatch):
    """The reference is the model as it was loaded, however far the policy has moved."""
    collected = spy(monkeypatch, grpo, "collect")
    kl = [row["kl"] for row in train(grpo, ITERATIVE)[1:]]
    start = transformers.AutoModelForCausalLM.from_pretrained("model").parameters()
    assert all(map(torch.equal, collected[-1].reference.parameters(), start))
    assert kl[0] < 1e-6 and min(kl[1:]) > 1e-5
    assert "kl" not in train(grpo, TINY + " --beta 0", out="two")[1] and collected[-1].reference is None

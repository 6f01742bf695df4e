"""GSPO beyond the worked numbers of test_equations.py: value and gradient against loops over single numbers,
GSPO beside GRPO in whole updates, and GSPO-token with advantages that are discounted towards the start."""
import math

import pytest
import torch
from conftest import Trainer, loss_of, random_rows, settings, slopes

import grpo
import gspo

AWAY = {"eps_low": 0.99, "eps_high": 100.0}  # a clip range that is never left

def surrogate(rows, args, frozen=None):
    """The objective in floats, token by token: J summed over rows, and the tokens of clipped rows. The ratio
    of GSPO-token is s of the `frozen` log-probs times the token's own way from there."""
    J, clipped, adv = 0.0, 0, rows["adv"].expand_as(rows["mask"])
    frozen = rows["logp"] if frozen is None else frozen
    for i, n in enumerate(rows["mask"].sum(1).long().tolist()):
        logp, old, ref = (rows[name][i].tolist() for name in ("logp", "old_logp", "ref_logp"))
        start = frozen[i].tolist()
        for t in range(n):
            s = math.exp(sum(a - b for a, b in zip((start if args.token_level else logp)[:n], old)) / n)
            s *= math.exp(logp[t] - start[t]) if args.token_level else 1
            A, w, x = adv[i, t].item(), math.exp(logp[t] - old[t]), math.exp(ref[t] - logp[t])
            held = min(max(s, 1 - args.eps_low), 1 + args.eps_high)
            penalty = (x - math.log(x) - 1) * (w if args.kl == "wk3" else 1)  # w_it, not s_i
            J, clipped = J + (min(s * A, held * A) - args.beta * penalty) / n, clipped + (held * A < s * A)
    return J, clipped

@pytest.mark.parametrize("eps", [{"eps_low": 0.03, "eps_high": 0.05}, AWAY])
@pytest.mark.parametrize("token_level", [False, True])
@pytest.mark.parametrize("kl", [{}, {"beta": 0.3}, {"beta": 0.3, "kl": "wk3"}])
def test_value_gradient_and_statistics_equal_a_float_loop(eps, token_level, kl):
    """On ragged rows; the gradient by central differences of the loop. Padding in the mean of the log-ratios,
    their sum, a clip on the wrong side, a token's KL weighted by its row's ratio: each shows. In the last two
    the ratios are about e^9 and e^-9, and have the slopes of that."""
    for seed, shift in [(0, 0), (1, 0), (2, 0), (3, 9), (4, -9)]:
        rows = random_rows(seed, spread=0.3, shift=shift)
        args = settings(gspo, token_level=token_level, **eps, **kl)
        rows["adv"] = torch.randn(5, 6).double() if token_level else rows["adv"]
        J, clipped = surrogate(rows, args)
        loss, gradient, stats = loss_of(gspo, rows if kl else rows | {"ref_logp": None}, args)
        expected = slopes(lambda x: surrogate(rows | {"logp": x}, args, rows["logp"])[0], rows["logp"])
        assert -loss.item() == pytest.approx(J, rel=1e-10)
        torch.testing.assert_close(-gradient, expected, rtol=1e-6, atol=1e-8 * max(1, abs(J)))
        assert [float(x) for x in stats["clip_frac"]] == [clipped, 18]
        assert [float(x) for x in stats["loss"]] == [loss.item(), 5]

def test_float32_is_precise_enough_for_the_papers_clip_range():
    """Any step of the ratio taken in bfloat16 would miss by as much as the range is wide, 3e-4."""
    rows = random_rows(lengths=(100,) * 50, spread=1e-3)
    s = (rows["logp"] - rows["old_logp"]).mean(1, keepdim=True).exp()
    gradient = loss_of(gspo, {name: x.float() for name, x in rows.items()}, settings(gspo, **AWAY))[1]
    torch.testing.assert_close(gradient.double(), (-s * rows["adv"] / 100).expand(50, 100), rtol=3e-6, atol=0)

# --- updates, beside GRPO's

def weights_after(script, **flags):
    """The policy's weights after one update, and its statistics."""
    trainer = Trainer(script, beta=0.0, **flags)
    trainer.use_adam(lr=1e-3)
    stats = trainer.update()
    return torch.cat([p.detach().flatten() for p in trainer.policy.parameters()]), stats

def test_an_update_equals_grpos_as_long_as_it_is_one_optimiser_step():
    """At ratio 1 the gradients are the same; from the second minibatch on the ratio of the sequence tells."""
    trainers = [Trainer(script, beta=0.0, **AWAY) for script in (gspo, grpo)]
    [ours], [theirs] = (trainer.gradients(trainer.rollout)[0] for trainer in trainers)
    assert (ours - theirs).norm() < 1e-6 * theirs.norm()
    ours, theirs = (weights_after(script, minibatches=2, **AWAY)[0] for script in (gspo, grpo))
    assert (ours - theirs).abs().max() > 1e-4

def test_the_papers_range_binds_in_an_update_and_a_token_range_does_not():
    """From the second minibatch on rows leave (1 - 3e-4, 1 + 4e-4), the default in float32; few ever leave
    GRPO's .2."""
    args = gspo.parse_args(["--device", "cpu"])
    assert (args.eps_low["float32"], args.eps_high["float32"]) == (3e-4, 4e-4)
    assert (args.minibatches, args.beta) == (4, 0)
    _, narrow = weights_after(gspo, minibatches=4)
    _, wide = weights_after(gspo, minibatches=4, eps_low=0.2, eps_high=0.2)
    assert 0.05 < narrow["clip_frac"] <= 0.75 and wide["clip_frac"] == 0  # nothing is in the first minibatch

# --- GSPO-token

@pytest.mark.parametrize("gamma", [0.0, 0.5, 0.99, 1.0])
def test_the_advantages_of_gspo_token_are_discounted_towards_the_start(gamma):
    """A_it = gamma^(|o_i| - t) A_i, t = 1 ... |o_i|, in floats: the last token has all of A_i, whatever the
    row's length. Padding counted as tokens would leave short completions nearly nothing."""
    trainer = Trainer(gspo, token_level=True, gamma=gamma)
    A = gspo.group_advantages(trainer.rollout["rewards"], 2).tolist()
    lengths = trainer.rollout["mask"].sum(1).long().tolist()
    assert len(set(lengths)) > 2 and any(A)
    for i, n in enumerate(lengths):
        expected = [gamma ** (n - t) * A[i] for t in range(1, n + 1)]
        assert trainer.rollout["adv"][i, :n].tolist() == pytest.approx(expected, rel=1e-5)

@pytest.mark.parametrize("kl", [{}, {"beta": 0.3}, {"beta": 0.3, "kl": "wk3"}])
def test_gspo_token_with_gamma_1_is_gspo(kl):
    """The loss and the clip to the last bit, as the paper says: s_it is s_i times exactly 1, and A_it is A_i
    times exactly 1. The gradient sums the same numbers in another order: equal but for rounding."""
    ours, theirs = (Trainer(gspo, token_level=level, gamma=1.0, **kl).rollout for level in (True, False))
    assert torch.equal(ours["adv"] * ours["mask"], theirs["adv"] * ours["mask"])
    eps = {"eps_low": 0.1, "eps_high": 0.1}
    for seed in range(5):
        rows = {name: x.float() for name, x in random_rows(seed).items()}
        token = rows | {"adv": rows["adv"].expand_as(rows["mask"])}
        loss, gradient, stats = loss_of(gspo, token, settings(gspo, token_level=True, **eps, **kl))
        same, slope, other = loss_of(gspo, rows, settings(gspo, **eps, **kl))
        assert torch.equal(loss, same) and other.keys() == stats.keys() and 0 < stats["clip_frac"][0] < 18
        numbers = [[*each["loss"], *each["clip_frac"], each["ratio_max"]] for each in (stats, other)]
        assert [float(x) for x in numbers[0]] == [float(x) for x in numbers[1]]
        torch.testing.assert_close(gradient, slope, rtol=1e-5, atol=1e-7)

@pytest.mark.parametrize("gamma", [0.7, 1.0])
def test_the_gradient_of_an_update_is_that_of_equation_13(gamma):
    """A row at a time, from whole logits, with nothing of gspo.py: s_i is a number, what carries a gradient
    is log pi of each token, and A_it counts where s_i is not held by the clip on the side of its sign."""
    trainer, rollout = Trainer(gspo, token_level=True, gamma=gamma, eps_low=0.01, eps_high=0.02).moved()
    J, held = 0.0, []
    for i, n in enumerate(rollout["mask"].sum(1).long().tolist()):
        ids = rollout["ids"][i, :rollout["attention"][i].sum()]
        logp = (trainer.policy(ids[None]).logits[0] / 0.6).log_softmax(-1)
        logp = logp[:-1].gather(1, ids[1:, None])[-n:, 0]
        s = (logp.detach() - rollout["old_logp"][i, :n]).mean().exp().item()
        for t in range(n):
            group = trainer.rollout["rewards"][i - i % 2:i - i % 2 + 2].double()
            A = gamma ** (n - 1 - t) * ((group[i % 2] - group.mean()) / (group.std() + 1e-4)).item()
            held.append(A > 0 and s > 1.02 or A < 0 and s < 0.99)
            J += 0 if held[-1] else s * A * logp[t] / n / 12
    assert any(held) and not all(held)
    gradients = torch.autograd.grad(-J, list(trainer.policy.parameters()))
    [gradient], stats = trainer.gradients(rollout)
    torch.testing.assert_close(gradient, torch.cat([g.flatten() for g in gradients]), rtol=1e-5, atol=1e-7)
    assert stats["clip_frac"] == pytest.approx(sum(held) / len(held))

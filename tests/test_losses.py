"""The losses beyond the worked numbers of test_equations.py: value and gradient against a loop over single
numbers, far from ratio 1, too. Whole steps against such loops: test_vectors.py."""
import math

import pytest
import torch
from conftest import loss_of, random_rows, settings, slopes, tensor64

import grpo
import gspo
import ppo

AWAY = {"eps_low": 0.99, "eps_high": 100.0}  # a clip range that is never left
KLS = [{"beta": 0.0}, {"beta": 0.3}, {"beta": 0.3, "kl": "wk3"}]
NARROW = {"eps_low": 0.03, "eps_high": 0.05}
VARIANTS = [(ppo, {"beta": 0.0, "eps_low": 0.1, "eps_high": 0.3})]
VARIANTS += [(grpo, {"eps_high": 0.28} | kl) for kl in KLS]
VARIANTS += [(gspo, eps | kl | {"token_level": level}) for eps in (NARROW, AWAY) for kl in KLS
             for level in (False, True)]

def surrogate(rows, args, frozen):
    """The objective in floats, token by token: J summed over rows, the clipped tokens, the largest ratio.
    GSPO has token_level: its ratio is s of a row, or s of the `frozen` log-probs times the token's own way
    from there."""
    J, clipped, largest, adv = 0.0, 0, 0.0, rows["adv"].expand_as(rows["mask"])
    for i, counts in enumerate(rows["mask"] > 0):
        logp, old, ref, A_t, start = (x[i, counts].tolist() for x in (
            rows["logp"], rows["old_logp"], rows["ref_logp"], adv, frozen))
        n = len(logp)
        for t in range(n):
            A, w, x = A_t[t], math.exp(logp[t] - old[t]), math.exp(ref[t] - logp[t])
            ratio = w
            if hasattr(args, "token_level"):
                ratio = math.exp(sum(a - b for a, b in zip(start if args.token_level else logp, old)) / n)
                ratio *= math.exp(logp[t] - start[t]) if args.token_level else 1
            held = min(max(ratio, 1 - args.eps_low), 1 + args.eps_high)
            penalty = (x - math.log(x) - 1) * (w if getattr(args, "kl", "") == "wk3" else 1)  # not s
            J += (min(ratio * A, held * A) - args.beta * penalty) / n
            clipped, largest = clipped + (held * A < ratio * A), max(largest, ratio)
    return J, clipped, largest

@pytest.mark.parametrize("script, flags", VARIANTS)
def test_value_gradient_and_statistics_equal_a_float_loop(script, flags):
    """On ragged rows with holes; the gradient by central differences of the loop. In the third, most ratios
    are below 1, which is what padding has. In the fourth they are about e^9: a bad token that rose so far
    must come back; in the last e^-9, and so far above is the reference, to which the KL pulls."""
    args = settings(script, **flags)
    for seed, (spread, shift) in enumerate([(0.4, 0), (2.0, 0), (0.3, -1.5), (1.0, 9), (1.0, -9)]):
        rows = random_rows(seed, spread=spread, shift=shift)
        if script is ppo or flags.get("token_level"):  # a token has an advantage of its own
            rows["adv"] = torch.randn(5, 6).double()
        J, clipped, largest = surrogate(rows, args, rows["logp"])
        loss, gradient, stats = loss_of(script, rows if args.beta else rows | {"ref_logp": None}, args)
        expected = slopes(lambda x: surrogate(rows | {"logp": x}, args, rows["logp"])[0], rows["logp"])
        assert -loss.item() == pytest.approx(J, rel=1e-10)
        torch.testing.assert_close(-gradient, expected, rtol=1e-6, atol=1e-8 * max(1, abs(J)))
        assert [float(x) for x in stats["clip_frac"]] == [clipped, 15]
        assert [float(x) for x in stats["loss"]] == [loss.item(), 5]
        assert stats["ratio_max"].item() == pytest.approx(largest)

@pytest.mark.parametrize("script", [grpo, gspo])
def test_rewards_that_differ_by_little_keep_their_advantages(script):
    adv = script.group_advantages(tensor64([0.5, 0.5 + 1e-4]), 2)
    torch.testing.assert_close(adv, tensor64([-0.5, 0.5]) / (math.sqrt(0.5) + 1), rtol=1e-6, atol=0)

"""GRPO's equations (1) to (4) in value and gradient, against loops in plain Python, enumeration and printed numbers."""
import argparse
import copy
import math
import random

import pytest
import torch
from conftest import make_batch, random_batch, save_tiny, tiny_model, tiny_tokenizer

import common
import grpo

tensor64 = lambda x: torch.tensor(x, dtype=torch.float64)  # noqa: E731


def settings(eps_low=0.2, eps_high=0.2, beta=0.0, kl="k3", **more):
    return argparse.Namespace(eps_low=eps_low, eps_high=eps_high, beta=beta, kl=kl, **more)


def token(logp, adv, old=None, ref=None, **options):
    """J of one row of one token, as a differentiable scalar."""
    shape = lambda x: None if x is None else (x if torch.is_tensor(x) else tensor64(x)).view(1, 1)  # noqa: E731
    old = logp.detach() if old is None else old
    return -grpo.policy_loss(shape(logp), shape(old), shape(ref), tensor64([adv]), torch.ones(1, 1), settings(**options))[0]


def J_oracle(logp, old, ref, adv, mask, args):
    """Sum over the rows of equation (3), with floats."""
    total = 0.0
    for i, row in enumerate(mask):
        for t in (t for t, m in enumerate(row) if m):
            w, A = math.exp(logp[i][t] - old[i][t]), adv[i][t]
            term = min(w * A, min(max(w, 1 - args.eps_low), 1 + args.eps_high) * A)
            if args.beta:
                r = math.exp(ref[i][t] - logp[i][t])
                term -= args.beta * (r - math.log(r) - 1) * (w if args.kl == "wk3" else 1)
            total += term / sum(row)
    return total


def random_rows(seed, N=5, T=6, spread=0.5):
    """logp, old, ref (N, T), adv (N,), mask: ragged, one row of length 1, off-policy enough that half of the clips bind."""
    rng = random.Random(seed)
    grid = lambda s: [[rng.gauss(0, s) for _ in range(T)] for _ in range(N)]  # noqa: E731
    logp = [[x - 2 for x in row] for row in grid(1)]
    old = [[a + b for a, b in zip(*rows)] for rows in zip(logp, grid(spread))]
    ref = [[a + b for a, b in zip(*rows)] for rows in zip(logp, grid(0.7))]
    lengths = [1, T] + [rng.randint(1, T) for _ in range(N - 2)]
    return logp, old, ref, [rng.gauss(0, 1) for _ in range(N)], [[float(t < n) for t in range(T)] for n in lengths]


# --- (1) advantages

def test_the_group_of_one_success_has_the_sample_deviation():
    """EQUATIONS.md: [1,0,0,0] -> [1.5,-.5,-.5,-.5], and with 1e-4 added to the deviation .5; not the population's 1.7321."""
    adv = grpo.group_advantages(tensor64([1, 0, 0, 0]), 4)
    torch.testing.assert_close(adv, tensor64([0.75, -0.25, -0.25, -0.25]) / 0.5001, rtol=1e-12, atol=0)
    torch.testing.assert_close(adv, tensor64([1.5, -0.5, -0.5, -0.5]), rtol=1e-3, atol=0)


@pytest.mark.parametrize("P, G", [(3, 5), (5, 3), (4, 4)])
def test_every_group_is_normalised_by_itself(P, G):
    """Traps 17 and 18: the mean and the deviation are those of the row's own group, whatever the shape of the batch."""
    rng = random.Random(P)
    rewards = [[rng.gauss(g, 1 + g) for _ in range(G)] for g in range(P)]
    expected = []
    for group in rewards:
        mean = sum(group) / G
        std = math.sqrt(sum((r - mean) ** 2 for r in group) / (G - 1))
        expected += [(r - mean) / (std + 1e-4) for r in group]
    flat = tensor64([r for group in rewards for r in group])
    torch.testing.assert_close(grpo.group_advantages(flat, G), tensor64(expected), rtol=1e-9, atol=0)


@pytest.mark.parametrize("reward", [0.7, 0.1, 0.0, 1.0, 1e6 + 0.3, -3.3])
@pytest.mark.parametrize("G", [2, 3, 8, 12])
def test_equal_rewards_give_exactly_zero(reward, G):
    """Trap 15: in float32 twelve rewards of .7 have a deviation above 0; their neighbours keep their advantages."""
    adv = grpo.group_advantages(torch.tensor([reward] * G + [1.0] + [0.0] * (G - 1)), G)
    assert adv[:G].tolist() == [0.0] * G and (adv[G:] != 0).all()


def test_nearly_equal_rewards_are_not_called_equal():
    """Equality is tested, not closeness: rewards that differ by little still get their (damped) advantages."""
    adv = grpo.group_advantages(tensor64([0.5, 0.5 + 1e-4]), 2)
    torch.testing.assert_close(adv, tensor64([-0.5, 0.5]) / (math.sqrt(0.5) + 1), rtol=1e-6, atol=0)


def test_a_group_of_one_is_refused(capsys):
    """Trap 16: the deviation of one reward is NaN."""
    with pytest.raises(SystemExit) as stop:
        grpo.parse_args(["--group_size", "1"])
    assert stop.value.code == 2 and "group_size" in capsys.readouterr().err


# --- (2) and (3) ratio and clip

@pytest.mark.parametrize("beta, kl", [(0.0, "k3"), (0.3, "k3"), (0.3, "wk3")])
@pytest.mark.parametrize("seed, spread", [(0, 0.5), (1, 0.5), (2, 2.0)])
def test_value_and_gradient_equal_a_float_loop(beta, kl, seed, spread):
    """Equation (3) with unequal clip ranges, on ragged rows; the gradient by central differences of the loop."""
    args, (logp, old, ref, adv, mask) = settings(0.2, 0.28, beta, kl), random_rows(seed, spread=spread)
    leaf = tensor64(logp).requires_grad_()
    loss, _ = grpo.policy_loss(leaf, tensor64(old), tensor64(ref), tensor64(adv), tensor64(mask), args)
    loss.backward()
    wide = [[a] * len(mask[0]) for a in adv]
    assert -loss.item() == pytest.approx(J_oracle(logp, old, ref, wide, mask, args), rel=1e-10)
    h, slopes = 1e-6, torch.zeros_like(leaf)
    for i, row in enumerate(logp):
        for t, x in enumerate(row):
            row[t] = x + h
            above = J_oracle(logp, old, ref, wide, mask, args)
            row[t] = x - h
            slopes[i, t], row[t] = (above - J_oracle(logp, old, ref, wide, mask, args)) / (2 * h), x
    torch.testing.assert_close(-leaf.grad, slopes, rtol=1e-6, atol=1e-8)


def test_advantages_may_differ_from_token_to_token():
    """adv (N, T) is used as it is, and (N,) means the same for every token of the row."""
    args, (logp, old, ref, adv, mask) = settings(beta=0.1), random_rows(3)
    rng = random.Random(0)
    wide = [[rng.gauss(0, 1) for _ in row] for row in mask]
    rows = [tensor64(x) for x in (logp, old, ref)]
    assert -grpo.policy_loss(*rows, tensor64(wide), tensor64(mask), args)[0].item() == pytest.approx(
        J_oracle(logp, old, ref, wide, mask, args), rel=1e-10)
    spread = grpo.policy_loss(*rows, tensor64(adv)[:, None].expand(-1, 6), tensor64(mask), args)[0]
    assert torch.equal(spread, grpo.policy_loss(*rows, tensor64(adv), tensor64(mask), args)[0])


@pytest.mark.parametrize("A, slopes", [(1, [0.5, 0.9, 1, 1.1, 0]), (-1, [0, -0.9, -1, -1.1, -1.5])])
def test_clip_gradient_table(A, slopes):
    """Seed 2's table, eps .2: dJ/dlogp at w = .5 .9 1 1.1 1.5. The clip never holds back a correction (trap 21)."""
    for w, slope in zip([0.5, 0.9, 1, 1.1, 1.5], slopes):
        logp = tensor64(math.log(w)).requires_grad_()
        assert torch.autograd.grad(token(logp, A, old=0.0), logp)[0].item() == pytest.approx(slope, abs=1e-12)


@pytest.mark.parametrize("old, A, pis, expected", [
    (0.01, 1, [0.005, 0.008, 0.010, 0.012, 0.100, 0.500], [0.500, 0.800, 1.000, 1.200, 1.200, 1.200]),
    (0.9, 1, [0.8, 0.9, 0.95, 1.0], [0.889, 1.000, 1.056, 1.111]),
    (0.9, -1, [0.9, 0.8, 0.72, 0.5, 0.1], [-1, -0.889, -0.800, -0.800, -0.800])])
def test_worked_examples_of_seed_4(old, A, pis, expected):
    """Examples 1 to 3, eps .2. The factored form A min(w, clip w) would give -.556 where the table says -.800."""
    values = [token(tensor64(math.log(pi)), A, old=math.log(old)).item() for pi in pis]
    assert values == pytest.approx(expected, abs=6e-4)


@pytest.mark.parametrize("ref, slope", [(0.5, 0.014444), (0.1, -0.007778), (1e-50, -0.013333)])
def test_example_4_of_seed_4(ref, slope):
    """A .01, eps .2, beta .02, old .5, pi -> .6 from below: the KL term turns the sign of dJ/dpi, and is finite at 1e-50."""
    pi = tensor64(0.6 - 1e-12).requires_grad_()
    J = token(pi.log(), 0.01, old=math.log(0.5), ref=math.log(ref), beta=0.02)
    assert torch.autograd.grad(J, pi)[0].item() == pytest.approx(slope, abs=1e-6)


def test_doubling_the_advantage_doubles_the_gradient_and_leaves_the_clip_boundary():
    """Seed 4's "how fast": A scales the push; how far a token may go is eps alone."""
    def slopes(A):
        logp = torch.linspace(-0.6, 0.6, 49, dtype=torch.float64).requires_grad_()
        loss, stats = grpo.policy_loss(logp[None], torch.zeros(1, 49), None, tensor64([A]), torch.ones(1, 49), settings())
        return torch.autograd.grad(-loss, logp)[0], stats["clip_frac"][0].item()
    (once, clipped), (twice, clipped_twice) = slopes(0.7), slopes(1.4)
    torch.testing.assert_close(twice, 2 * once, rtol=1e-12, atol=0)
    assert clipped == clipped_twice == sum(0.6 * (i - 24) / 24 > math.log(1.2) for i in range(49)) == (once == 0).sum()


# --- (4) KL

LOGITS, REF, OLD = [0.3, -0.5, 1.1, 0.0], [0.0, 0.4, 0.2, -0.7], [0.1, -0.2, 0.9, 0.3]
REVERSE, FORWARD = [-0.056028, -0.147284, 0.177711, 0.025601], [-0.011075, -0.252611, 0.213875, 0.049811]


def expected_penalty(kl, off_policy):
    """The KL term (beta 1, A 0) averaged over a vocabulary of four under the sampler, and its gradient for the logits."""
    z = tensor64(LOGITS).requires_grad_()
    logp, ref, old = z.log_softmax(-1), tensor64(REF).log_softmax(-1), tensor64(OLD).log_softmax(-1)
    old = old if off_policy else logp.detach()
    penalty = -sum(p * token(lp, 0.0, old=o, ref=r, beta=1.0, kl=kl) for p, lp, o, r in zip(old.exp(), logp, old, ref))
    return penalty.item(), torch.autograd.grad(penalty, z)[0].tolist()


@pytest.mark.parametrize("kl, off_policy, value, gradient", [
    ("k3", False, 0.1996580809, FORWARD), ("wk3", False, 0.1996580809, REVERSE),
    ("k3", True, 0.2444490681, None), ("wk3", True, 0.1996580809, REVERSE)])
def test_kl_estimators_in_expectation(kl, off_policy, value, gradient):
    """Traps 22, 23: k3 is KL(pi||ref) = .1997 on-policy (inverted: .1596) with the forward KL's gradient; wk3 has the value
    and the gradient of the reverse KL on- and off-policy. A k1 loss would have gradient 0."""
    seen, slope = expected_penalty(kl, off_policy)
    assert seen == pytest.approx(value, abs=1e-10)
    assert gradient is None or slope == pytest.approx(gradient, abs=1e-6)


@pytest.mark.parametrize("kl", ["k3", "wk3"])
def test_wk3_follows_the_finite_difference_of_the_reverse_kl(kl):
    """An oracle without autograd: KL(pi||ref) by enumeration, its slope by central differences; k3 does not follow it."""
    def reverse_kl(z):
        normal = lambda x: [v - math.log(sum(map(math.exp, x))) for v in x]  # noqa: E731
        return sum(math.exp(p) * (p - r) for p, r in zip(normal(z), normal(REF)))
    bump = lambda v, h: [x + h * (v == i) for i, x in enumerate(LOGITS)]  # noqa: E731
    slopes = [(reverse_kl(bump(v, 1e-6)) - reverse_kl(bump(v, -1e-6))) / 2e-6 for v in range(4)]
    follows = expected_penalty(kl, True)[1] == pytest.approx(slopes, abs=1e-8)
    assert follows == (kl == "wk3")


@pytest.mark.parametrize("kl", ["k3", "wk3"])
def test_moving_away_from_the_reference_raises_the_penalty(kl):
    """Trap 22: the penalty is 0 at the reference, never negative, and grows to both sides."""
    sides = [[-token(tensor64(s * d / 10), 0.0, ref=0.0, beta=1.0, kl=kl).item() for d in range(20)] for s in (1, -1)]
    for penalties in sides:
        assert penalties[0] == 0 and all(a < b for a, b in zip(penalties, penalties[1:]))


def test_equation_21_of_the_paper():
    """At pi = old the coefficient of grad log pi is A + beta (ref/pi - 1): 0 at A .02, beta .04, ref/pi .5."""
    for A, beta, r, slope in [(0.02, 0.04, 0.5, 0.0), (0.02, 0.04, 2.0, 0.06), (-1.0, 0.1, 3.0, -0.8)]:
        logp = tensor64(-1.3).requires_grad_()
        seen = torch.autograd.grad(token(logp, A, ref=-1.3 + math.log(r), beta=beta), logp)[0].item()
        assert seen == pytest.approx(slope, abs=1e-12)


def test_every_token_has_its_own_kl():
    """Trap 24: moving one token's reference changes that token's gradient and no other; stats hold the sum of k3."""
    logp, mask, gaps = tensor64([[-1.0, -2.0, -3.0]]).requires_grad_(), torch.ones(1, 3), tensor64([[0.0, 0.5, -1.0]])
    loss, stats = grpo.policy_loss(logp, logp.detach(), logp.detach() + gaps, tensor64([0.0]), mask, settings(beta=1.0))
    k3 = [math.exp(g) - g - 1 for g in gaps[0].tolist()]
    torch.testing.assert_close(torch.autograd.grad(loss, logp)[0], (1 - gaps.exp()) / 3, rtol=1e-12, atol=1e-15)
    assert stats["kl"][0].item() == pytest.approx(sum(k3)) and stats["kl"][1].item() == 3
    assert loss.item() == pytest.approx(sum(k3) / 3)


# --- (3) aggregation

def test_row_means_then_the_mean_over_rows():
    """A=[1,-1,1,-1], lengths [2,8,4,2], w=1: J = 0; token mean -.25, constant length -.125, means of micro-batches -.1333.
    Each token's gradient is A / (|o| N)."""
    adv, lengths = tensor64([1, -1, 1, -1]), torch.tensor([2, 8, 4, 2])
    mask = (torch.arange(8) < lengths[:, None]).double()
    logp = torch.full((4, 8), -1.0, dtype=torch.float64, requires_grad=True)
    loss, stats = grpo.policy_loss(logp, logp.detach(), None, adv, mask, settings())
    assert loss.item() / 4 == pytest.approx(0, abs=1e-12)
    slope = torch.autograd.grad(-loss / 4, logp)[0]
    torch.testing.assert_close(slope, adv[:, None] * mask / lengths[:, None] / 4, rtol=1e-12, atol=0)
    assert [float(x) for x in stats["loss"]] == [loss.item(), 4]


def test_the_loss_is_a_sum_over_rows():
    """So that k micro-batches give the loss, the gradient and the statistics of one, unequal cuts included (traps 26, 38)."""
    args, rows = settings(beta=0.2), [tensor64(x) for x in random_rows(4, N=7)]
    whole, expected = grpo.policy_loss(*rows, args)
    parts = [grpo.policy_loss(*(x[cut] for x in rows), args) for cut in (slice(0, 4), slice(4, 6), slice(6, 7))]
    assert sum(loss for loss, _ in parts).item() == pytest.approx(whole.item(), rel=1e-12)
    totals, one = common.Totals(), common.Totals()
    one.add(expected)
    for _, stats in parts:
        totals.add(stats)
    assert totals.means() == pytest.approx(one.means(), rel=1e-12)


def test_duplicating_rows_or_doubling_a_length_halves_the_share():
    """Seed 4's "how much": of one optimiser step each row has 1/N, each token 1/|o|."""
    def share(rows, length):
        logp = torch.zeros(rows, length, dtype=torch.float64, requires_grad=True)
        loss, _ = grpo.policy_loss(logp, logp.detach(), None, torch.ones(rows).double(), torch.ones(rows, length), settings())
        return torch.autograd.grad(-loss / rows, logp)[0][0, 0].item()
    assert [share(2, 3), share(4, 3), share(2, 6)] == pytest.approx([1 / 6, 1 / 12, 1 / 12])


@pytest.mark.parametrize("beta", [0.0, 0.1])
def test_a_row_without_tokens_gives_zero(beta):
    """Trap 6: neither NaN nor a gradient, and the other rows keep theirs."""
    logp, old, ref, adv, mask = (tensor64(x) for x in random_rows(5))
    mask[2] = 0
    full = logp.clone().requires_grad_()
    loss, stats = grpo.policy_loss(full, old, ref, adv, mask, settings(beta=beta))
    keep = [0, 1, 3, 4]
    rest = grpo.policy_loss(*(x[keep] for x in (logp, old, ref, adv, mask)), settings(beta=beta))[0]
    assert loss.item() == pytest.approx(rest.item(), rel=1e-12)
    assert (torch.autograd.grad(loss, full)[0][2] == 0).all()
    alone, stats = grpo.policy_loss(logp[2:3], old[2:3], ref[2:3], adv[2:3], mask[2:3], settings(beta=beta))
    assert alone.item() == 0 and all(math.isfinite(x) for pair in stats.values() if isinstance(pair, tuple) for x in pair)


@pytest.mark.parametrize("kl", ["k3", "wk3"])
def test_padding_has_no_part_in_loss_gradient_or_statistics(kl):
    """Trap 38: whatever stands outside the mask is ignored; clip_frac and kl count tokens."""
    args, (logp, old, ref, adv, mask) = settings(beta=0.3, kl=kl), (tensor64(x) for x in random_rows(6))
    junk = [torch.where(mask == 0, x + 3 * torch.randn_like(x), x).requires_grad_() for x in (logp, old, ref)]
    (loss, stats), (dirty, dirty_stats) = (grpo.policy_loss(*x, adv, mask, args) for x in ([logp, old, ref], junk))
    assert dirty.item() == pytest.approx(loss.item(), rel=1e-12)
    assert (torch.autograd.grad(dirty, junk[0])[0][mask == 0] == 0).all()
    w = ((logp - old).exp())[mask == 1]
    A = adv[:, None].expand_as(mask)[mask == 1]
    clipped = ((A > 0) & (w > 1.2)) | ((A < 0) & (w < 0.8))
    for s in (stats, dirty_stats):
        assert [x.item() for x in s["clip_frac"]] == [clipped.sum().item(), mask.sum().item()]
        assert s["kl"][1].item() == mask.sum().item()
    assert dirty_stats["kl"][0].item() == pytest.approx(stats["kl"][0].item()) and 0 < clipped.float().mean() < 1


def test_ratio_max_is_over_tokens():
    """Trap 38: the 1 that padding has for a ratio would hide that every token's ratio is .5."""
    logp, mask = torch.full((2, 3), -1.0), torch.tensor([[1.0, 1, 1], [1, 0, 0]])
    stats = grpo.policy_loss(logp, logp - math.log(0.5) * mask, None, torch.ones(2), mask, settings())[1]
    assert stats["ratio_max"].item() == pytest.approx(0.5)


@pytest.mark.parametrize("gap", [200.0, -200.0])
@pytest.mark.parametrize("kl", ["k3", "wk3"])
def test_no_overflow(gap, kl):
    """Trap 30: log-ratios of +-200 against the old policy, the reference or both give finite float32 losses and gradients."""
    for old_gap, ref_gap in [(gap, 0.0), (0.0, gap), (gap, gap), (gap, -gap)]:
        logp = torch.tensor([[-1.0, -1.0]], requires_grad=True)
        loss, stats = grpo.policy_loss(logp, logp.detach() - old_gap, logp.detach() - ref_gap, torch.tensor([-1.0]),
                                       torch.ones(1, 2), settings(beta=0.1, kl=kl))
        assert loss.dtype == torch.float32 and loss.isfinite() and torch.autograd.grad(loss, logp)[0].isfinite().all()
        assert math.isfinite(stats["ratio_max"].item())


def test_on_policy_the_loss_is_zero_and_the_gradient_is_not():
    """mu = 1: row means of centred advantages cancel in the value; the gradient is that of REINFORCE with a baseline."""
    adv = grpo.group_advantages(tensor64([1, 0, 0, 0, 1, 1, 0, 0]), 4)
    logp = torch.randn(8, 5, dtype=torch.float64, requires_grad=True)
    mask = (torch.arange(5) < torch.tensor([[1], [5], [3], [2], [4], [4], [1], [5]])).double()
    loss, stats = grpo.policy_loss(logp, logp.detach(), None, adv, mask, settings())
    assert loss.item() == pytest.approx(0, abs=1e-12)
    torch.testing.assert_close(-torch.autograd.grad(loss, logp)[0], adv[:, None] * mask / mask.sum(1, keepdim=True))
    assert stats["ratio_max"].item() == 1 and stats["clip_frac"][0].item() == 0


# --- collect and update: the equations reach the weights

class Recorder:
    """Stands in for the optimiser: keeps the gradient of every step and leaves the weights alone."""
    def __init__(self, model):
        self.model, self.gradients = model, []

    def step(self):
        self.gradients.append(torch.cat([p.grad.flatten() for p in self.model.parameters()]))
        self.model.zero_grad()
        return {"grad_norm": (self.gradients[-1].norm().item(), 1)}


def flags(**changes):
    base = dict(group_size=2, temperature=0.6, max_new_tokens=6, micro_batch_tokens=10**6, epochs=1, minibatches=1)
    return settings(**(base | dict(beta=0.1) | changes))


def fake_rollout(P=6, G=2):
    """Ragged rows of random ids with old and reference log-probs near, but not at, the policy's."""
    model, rollout = tiny_model(dtype=torch.float64), random_batch(P * G, seed=7)
    rollout["mask"], generator = rollout["mask"].double(), torch.Generator().manual_seed(0)
    with torch.no_grad():
        logp = common.token_logprobs(model, rollout, 0.6)
    noise = lambda s: torch.randn(logp.shape, generator=generator).double() * s * rollout["mask"]  # noqa: E731
    return model, rollout | {"old_logp": logp + noise(0.3), "ref_logp": logp + noise(0.5),
                             "adv": torch.randn(P * G, generator=generator).double()}


def whole_gradient(model, rollout, rows, args):
    """The gradient of -J over `rows`: full logits, one row at a time, without common.py and policy_loss."""
    loss = 0
    for i in rows:
        T = int(rollout["mask"][i].sum())
        ids = rollout["ids"][i, :int(rollout["attention"][i].sum())]
        logp = (model(ids[None]).logits[0] / args.temperature).log_softmax(-1)[:-1].gather(1, ids[1:, None])[-T:, 0]
        w, A = (logp - rollout["old_logp"][i, :T]).exp(), rollout["adv"][i]
        r = (rollout["ref_logp"][i, :T] - logp).exp()
        loss -= (torch.minimum(w * A, w.clamp(0.8, 1.2) * A) - args.beta * (r - r.log() - 1)).mean() / len(rows)
    return torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(model.parameters()))])


def test_update_gives_the_gradient_of_the_whole_step_whatever_the_micro_batches():
    """Traps 26, 27: an optimiser step's gradient is that of its rows' mean, with all rows in one pass or each by itself;
    the statistics are those of all rows too, not of the last micro-batch."""
    model, rollout = fake_rollout()
    expected, seen, stats = whole_gradient(model, rollout, range(12), flags()), Recorder(model), []
    for tokens in (10**6, 60, 25, 1):
        stats.append(grpo.update(model, seen, rollout, flags(micro_batch_tokens=tokens)))
    for gradient in seen.gradients:
        torch.testing.assert_close(gradient, expected, rtol=1e-6, atol=1e-9)
    for other in stats[1:]:
        for name in ("loss", "kl", "clip_frac", "ratio_max"):
            assert other[name] == pytest.approx(stats[0][name], rel=1e-9)
    assert stats[0]["clip_frac"] > 0.05


def test_update_takes_epochs_times_minibatches_steps_each_with_its_own_denominator(monkeypatch):
    """Six groups in four minibatches: two of 2 groups, two of 1. Each step is the mean over its own rows, every pass
    covers all rows once, and the old log-probs stay those of the rollout (trap 28)."""
    model, rollout = fake_rollout()
    args, seen, dealt, minibatches = flags(minibatches=4, epochs=2, micro_batch_tokens=30), Recorder(model), [], common.minibatches

    def spy(batch, *rest):
        assert torch.equal(batch["old_logp"], rollout["old_logp"])
        for part in minibatches(batch | {"place": torch.arange(12)}, *rest):
            dealt.append(part["place"].tolist())
            yield part
    monkeypatch.setattr(common, "minibatches", spy)
    grpo.update(model, seen, rollout, args)
    assert len(seen.gradients) == 8 and sorted(map(len, dealt[:4])) == [2, 2, 4, 4]
    assert all(sorted(sum(dealt[i:i + 4], [])) == list(range(12)) for i in (0, 4))
    for rows, gradient in zip(dealt, seen.gradients):
        torch.testing.assert_close(gradient, whole_gradient(model, rollout, rows, args), rtol=1e-6, atol=1e-9)


def collect(model, rewards, reference=None, prompts=((3, 4, 5), (3, 4, 5)), **changes):
    problems = [{"question": "q", "answer": str(i), "prompt": list(p)} for i, p in enumerate(prompts)]
    asked = []

    def reward(rows, texts):
        asked.extend(row["answer"] for row in rows)
        assert len(rows) == len(texts) == len(rewards)
        return torch.tensor(rewards, requires_grad=True) * 1.0  # a reward that still hangs on a graph
    args = flags(group_size=len(rewards) // len(prompts), **changes)
    with torch.enable_grad():
        rollout, stats = grpo.collect(model, reference, tiny_tokenizer(), problems, reward, args)
    return rollout, stats, asked, args


def test_equal_prompts_stay_two_groups():
    """Trap 17: rewards [1,0,0,0] and [1,1,1,0] of one question drawn twice are normalised apart."""
    rollout, stats, asked, _ = collect(tiny_model(), [1.0, 0, 0, 0, 1, 1, 1, 0])
    torch.testing.assert_close(rollout["adv"], torch.tensor([1.5, -0.5, -0.5, -0.5, 0.5, 0.5, 0.5, -1.5]), rtol=1e-3, atol=0)
    assert asked == ["0"] * 4 + ["1"] * 4 and stats["reward"] == 0.5 and stats["zero_variance_groups"] == 0


def test_nothing_but_the_policy_gets_a_gradient():
    """Trap 25: rewards, advantages, old and reference log-probs are constants; the reference has no gradient after it all."""
    model, reference = tiny_model(), tiny_model(seed=1)
    rollout, _, _, args = collect(model, [1.0, 0, 0, 1], reference)
    assert not any(rollout[name].requires_grad for name in ("adv", "old_logp", "ref_logp"))
    grpo.update(model, Recorder(model), rollout, args)
    assert all(p.grad is None for p in reference.parameters())
    for name, net in [("old_logp", model), ("ref_logp", reference)]:
        with torch.no_grad():
            torch.testing.assert_close(rollout[name], common.token_logprobs(net, rollout, args.temperature), rtol=1e-5, atol=1e-5)


def test_one_update_per_rollout_has_ratio_one_loss_zero_and_a_gradient():
    """The most asked question about GRPO, end to end: with one minibatch and one pass nothing is clipped."""
    model = tiny_model()
    rollout, _, _, args = collect(model, [1.0, 0, 0, 1, 1, 1, 0, 1], beta=0.0)
    stats = grpo.update(model, Recorder(model), rollout, args)
    assert abs(stats["loss"]) < 1e-6 and stats["clip_frac"] == 0 and stats["ratio_max"] == pytest.approx(1, abs=1e-6)
    assert stats["grad_norm"] > 1e-3


def test_later_passes_are_off_policy():
    """Trap 28: in the second pass the ratio is against the rollout's policy, so it leaves 1 and the clip binds."""
    model = tiny_model()
    rollout, _, _, args = collect(model, [1.0, 0, 0, 1, 1, 1, 0, 1], beta=0.0, epochs=3)
    optimizer = common.Optimizer(model, 0.02, argparse.Namespace(warmup_steps=0, max_grad_norm=1.0, offload_optimizer=False))
    stats = grpo.update(model, optimizer, rollout, args)
    assert stats["ratio_max"] > 1.2 and stats["clip_frac"] > 0.05


# --- main: the iterative loop

def run_main(tmp_path, monkeypatch, *argv):
    """grpo.main on a tiny model directory, its rollouts and counters watched."""
    seen = {"kl": [], "refreshes": 0, "steps": 0, "old": []}
    problems = [{"question": f"{i}", "answer": "1", "prompt": [3, 4 + i]} for i in range(5)]
    monkeypatch.setattr(common, "load_problems", lambda *_: (problems, problems[:1]))
    monkeypatch.setattr(common, "load_reward", lambda _: lambda rows, texts: torch.tensor([len(t) % 3 / 2 for t in texts]))
    monkeypatch.setattr(common, "save_checkpoint", lambda *_: None)
    collect_, load_reference, step_ = grpo.collect, common.load_reference, common.Optimizer.step

    def collecting(policy, reference, *rest):
        rollout, stats = collect_(policy, reference, *rest)
        if reference is not None:
            gap = (rollout["old_logp"] - rollout["ref_logp"]) * rollout["mask"]
            seen["kl"].append((gap.exp() - gap - 1).max().item())
        seen["old"].append([copy.deepcopy(p) for p in policy.parameters()])
        return rollout, stats

    def loading(args):
        reference = seen["reference"] = load_reference(args)
        load = reference.load_state_dict

        def refresh(*state, **options):
            seen["refreshes"] += 1
            return load(*state, **options)
        reference.load_state_dict = refresh
        return reference

    def stepping(self):
        seen["steps"] += 1
        return step_(self)
    monkeypatch.setattr(grpo, "collect", collecting)
    monkeypatch.setattr(common, "load_reference", loading)
    monkeypatch.setattr(common.Optimizer, "step", stepping)
    seen["start"] = save_tiny(tmp_path / "model", "qwen3", head_dim=8)
    base = ("--prompts 3 --group_size 2 --minibatches 2 --epochs 2 --steps 6 --max_new_tokens 4 --eval_samples 0 --device cpu "
            "--dtype float32 --lr 0.01 --warmup_steps 0").split()
    grpo.main(grpo.parse_args(base + ["--model", seen["start"], "--out", str(tmp_path / "run"), *argv]))
    return seen


def test_iterative_grpo_counts_refreshes_rollouts_and_steps(tmp_path, monkeypatch):
    """I = 3 refreshes, I*M = 6 rollouts, I*M*mu*minibatches = 24 optimiser steps; the KL is 0 right after a refresh only."""
    seen = run_main(tmp_path, monkeypatch, "--beta", "0.04", "--ref_every", "2")
    assert (seen["refreshes"], len(seen["kl"]), seen["steps"]) == (3, 6, 24)
    assert max(seen["kl"][0::2]) < 1e-6 and min(seen["kl"][1::2]) > 1e-4
    shared = {p.data_ptr() for p in seen["reference"].parameters()} & {p.data_ptr() for p in seen["old"][-1]}
    assert not shared


def test_without_ref_every_the_reference_stays_and_without_beta_there_is_none(tmp_path, monkeypatch):
    """Trap 33: the reference is the model as it was loaded, however far the policy has moved."""
    seen = run_main(tmp_path, monkeypatch, "--beta", "0.04", "--steps", "3")
    start = common.AutoModelForCausalLM.from_pretrained(seen["start"]).parameters()
    assert seen["refreshes"] == 0 and all(map(torch.equal, seen["reference"].parameters(), start))
    assert seen["kl"][0] < 1e-6 < 1e-4 < seen["kl"][2] and not all(map(torch.equal, seen["old"][0], seen["old"][2]))
    (tmp_path / "two").mkdir()
    assert "reference" not in run_main(tmp_path / "two", monkeypatch, "--steps", "1", "--beta", "0")


def test_the_trained_batch_is_the_fixture():
    """make_batch, on which these tests rest, lays rows out as a rollout is laid out."""
    assert {k: v.tolist() for k, v in make_batch([[5], [6, 7]], [[8, 1], [9]]).items()} == {
        "ids": [[5, 8, 1], [6, 7, 9]], "attention": [[1, 1, 1], [1, 1, 1]], "mask": [[1, 1], [1, 0]]}

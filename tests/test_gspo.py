"""GSPO: equations (2) to (4) of gspo.py in value and gradient, GSPO-token, and the worked steps its advantages follow.

Oracles are float64 Python loops over single numbers, finite differences and numbers worked out by hand.
"""
import copy
import math
import random
import time
from types import SimpleNamespace

import pytest
import tokenizers
import torch
import transformers
from conftest import make_batch, random_batch, tiny_model, tiny_tokenizer

import common
import grpo
import gspo

D = torch.float64
AWAY = 10.0  # a clip range that is never reached


def settings(module=gspo, **changes):
    """The script's own defaults, but for `changes`."""
    args = module.parse_args([])
    for name, value in changes.items():
        assert hasattr(args, name)
        setattr(args, name, value)
    return args


def wide(**changes):
    return settings(**{"eps_low": 0.999999, "eps_high": AWAY} | changes)


def tensor(rows):
    return torch.tensor(rows, dtype=D)


def loss_and_grad(args, logp, old, adv, mask, ref=None, module=gspo):
    """The loss, its gradient by logp, and the statistics."""
    logp = logp.clone().requires_grad_(True)
    loss, stats = module.policy_loss(logp, old, ref, adv, mask, args)
    loss.backward()
    return loss.item(), logp.grad, stats


def ragged(seed=0, spread=0.3, n=5, T=6):
    """Random log-probs (float64) of rows of different lengths, with nonsense in the padding."""
    torch.manual_seed(seed)
    old = -torch.rand(n, T, dtype=D) * 3
    logp, ref = old + spread * torch.randn(n, T, dtype=D), old + 0.5 * torch.randn(n, T, dtype=D)
    mask = (torch.arange(T) < torch.tensor([[6], [1], [4], [2], [5]])[:n]).to(D)
    return logp, old, ref, tensor([1.3, -0.7, -1.1, 0.9, 0.4])[:n], mask


def oracle(logp, old, adv, mask, eps_low, eps_high, beta=0.0, kl=None, ref=None):
    """Equations (2) to (4) number by number: (loss, gradient, share of tokens in clipped rows)."""
    loss, grad, bound, tokens = 0.0, torch.zeros_like(logp), 0, 0
    for i in range(len(logp)):
        places = [t for t in range(logp.shape[1]) if mask[i, t]]
        n, A = len(places), float(adv[i])
        s = math.exp(sum(float(logp[i, t] - old[i, t]) for t in places) / n)
        held = min(max(s, 1 - eps_low), 1 + eps_high)
        clips = held * A < s * A
        tokens, bound = tokens + n, bound + n * clips
        loss -= min(s * A, held * A)
        for t in places:
            grad[i, t] = 0.0 if clips else -s * A / n
            if beta:
                x, w = float(ref[i, t] - logp[i, t]), math.exp(float(logp[i, t] - old[i, t]))
                k3 = math.exp(x) - x - 1
                loss += beta / n * (w * k3 if kl == "wk3" else k3)
                grad[i, t] += beta / n * (w * (k3 + 1 - math.exp(x)) if kl == "wk3" else 1 - math.exp(x))
    return loss, grad, bound / tokens


def slopes(function, x, h=1e-6):
    """Gradient of a scalar function of x by central differences."""
    grad = torch.zeros_like(x)
    for place in [tuple(p) for p in (x == x).nonzero().tolist()]:
        ends = [x.clone(), x.clone()]
        ends[0][place] += h
        ends[1][place] -= h
        grad[place] = (float(function(ends[0])) - float(function(ends[1]))) / (2 * h)
    return grad


# ---------------------------------------------------------------------------------------------------------------------
# Equations (2) and (3)

@pytest.mark.parametrize("A", [1.0, -2.0])
def test_worked_example_mean_of_logs_and_one_coefficient_for_all_tokens(A):
    """w = [1.2, 1.25, .9]: s = 1.105209 (not the mean 1.1167, not the product 1.35) and s A / |y| = .3684 A on every token."""
    w, mask = tensor([[1.2, 1.25, 0.9]]), torch.ones(1, 3, dtype=D)
    loss, grad, stats = loss_and_grad(wide(), w.log(), torch.zeros_like(w), tensor([A]), mask)
    assert loss == pytest.approx(-1.105209 * A, abs=1e-6)
    assert torch.allclose(-grad, torch.full_like(w, 0.3684031 * A), atol=1e-6)
    assert stats["ratio_max"].item() == pytest.approx(1.105209, abs=1e-6)
    other = settings(grpo, eps_low=0.99, eps_high=AWAY, beta=0.0)
    _, grad, _ = loss_and_grad(other, w.log(), torch.zeros_like(w), tensor([A]), mask, module=grpo)
    assert torch.allclose(-grad, tensor([[0.4, 0.416667, 0.3]]) * A, atol=1e-6)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("eps", [(0.03, 0.05), (0.2, 0.28), (0.999, AWAY)])
def test_objective_against_loops_and_finite_differences(seed, eps):
    """Ragged rows: padding in the mean, a row's sum for its mean or a clip on the wrong side shows in value or gradient."""
    logp, old, _, adv, mask = ragged(seed)
    args = settings(eps_low=eps[0], eps_high=eps[1])
    loss, grad, stats = loss_and_grad(args, logp, old, adv, mask)
    expected, slope, share = oracle(logp, old, adv, mask, *eps)
    assert loss == pytest.approx(expected, abs=1e-12) and torch.allclose(grad, slope, atol=1e-12)
    assert torch.allclose(grad, slopes(lambda x: gspo.policy_loss(x, old, None, adv, mask, args)[0], logp), atol=1e-8)
    assert float(stats["clip_frac"][0] / stats["clip_frac"][1]) == pytest.approx(share)
    assert stats["loss"][0].item() == pytest.approx(expected) and float(stats["loss"][1]) == len(logp)


CLIPS = [(1.05, 1, False), (1.15, 1, True), (1.15, -1, False), (0.95, -1, False), (0.85, -1, True), (0.85, 1, False)]


@pytest.mark.parametrize("s, A, clips", CLIPS)
def test_a_clipped_sequence_has_no_gradient_at_any_token(s, A, clips):
    """One decision a sequence: beyond the range every token's gradient is 0, also of tokens whose own ratio lies within."""
    own = tensor([[0.3, -0.2, 0.0, -0.1]])
    logp, mask = own + math.log(s), torch.ones(1, 4, dtype=D)  # the mean of `own` is 0
    loss, grad, stats = loss_and_grad(settings(eps_low=0.1, eps_high=0.1), logp, torch.zeros_like(logp), tensor([A]), mask)
    held = {1.15: 1.1, 0.85: 0.9}[s] if clips else s
    assert loss == pytest.approx(-held * A)
    assert torch.allclose(grad, torch.full_like(grad, 0.0 if clips else -s * A / 4), atol=1e-12)
    assert [float(x) for x in stats["clip_frac"]] == [4.0 * clips, 4.0]


def test_the_two_ends_of_the_clip_are_apart():
    """eps_low and eps_high exchanged: s = 1.15 is inside (.9, 1.2) and s = .85 outside."""
    args, mask = settings(eps_low=0.1, eps_high=0.2), torch.ones(1, 2, dtype=D)
    for s, A, slope in [(1.15, 1.0, -0.575), (0.85, -1.0, 0.0), (1.25, 1.0, 0.0), (0.95, -1.0, 0.475)]:
        _, grad, _ = loss_and_grad(args, torch.full((1, 2), math.log(s), dtype=D), torch.zeros(1, 2, dtype=D), tensor([A]), mask)
        assert torch.allclose(grad, torch.full_like(grad, slope), atol=1e-12)


def test_the_ratio_does_not_grow_with_length():
    """Trap 29: summed over 100 tokens, log-ratios of .001 give 1.105, a hundred times outside the window; the mean stays 1.001."""
    for T in (1, 10, 100):
        x, mask = torch.full((1, T), 1e-3, dtype=D), torch.ones(1, T, dtype=D)
        loss, grad, _ = loss_and_grad(wide(), x, torch.zeros_like(x), tensor([1.0]), mask)
        assert loss == pytest.approx(-1.0010005, abs=1e-9)
        assert grad.sum().item() == pytest.approx(-1.0010005, abs=1e-9) and grad[0, 0].item() == pytest.approx(-1.0010005 / T)


def test_defaults_are_the_papers():
    """Trap 29: a clip of .2, copied from PPO, never binds on a mean of log-ratios; without minibatches nothing is clipped."""
    args = gspo.parse_args([])
    assert (args.eps_low, args.eps_high, args.minibatches, args.beta, args.token_level) == (3e-4, 4e-4, 4, 0.0, False)


def test_rows_without_tokens_and_huge_ratios_stay_finite():
    """Traps 6 and 30: an empty row gives 0 and not NaN; exp of a log-ratio of 500 neither overflows nor poisons its neighbours."""
    mask = torch.tensor([[1.0, 1.0], [0.0, 0.0], [1.0, 0.0]])
    logp = torch.tensor([[0.1, 0.1], [500.0, -500.0], [500.0, 500.0]])
    for token_level in (False, True):
        args = wide(token_level=token_level, beta=0.1, kl="wk3")
        loss, grad, stats = loss_and_grad(args, logp, torch.zeros(3, 2), torch.tensor([1.0, 1.0, -1.0]), mask, torch.zeros(3, 2))
        assert math.isfinite(loss) and grad.isfinite().all() and (grad[1] == 0).all()
        assert grad[0].abs().max() > 0 and grad[2, 1] == 0 and all(torch.as_tensor(x).isfinite().all() for x in stats["clip_frac"])


# ---------------------------------------------------------------------------------------------------------------------
# Precision

def test_float32_is_enough_and_bfloat16_is_not():
    """A mean over log-probs rounded to bfloat16 misses by as much as the clip window is wide (2.5e-4); float32 by 1e-6."""
    torch.manual_seed(0)
    old = -torch.rand(200, 100, dtype=D) * 3
    logp, adv, mask = old + 1e-3 * torch.randn(200, 100, dtype=D), torch.ones(200, dtype=D), torch.ones(200, 100, dtype=D)
    exact = loss_and_grad(settings(eps_low=0.9, eps_high=AWAY), logp, old, adv, mask)[1][:, 0] * -100  # s_i
    error = {}
    for dtype in (torch.float32, torch.bfloat16):
        x, y = (v.to(dtype).float() for v in (logp, old))
        loss, grad, _ = loss_and_grad(settings(eps_low=0.9, eps_high=AWAY), x, y, adv.float(), mask.float())
        error[dtype] = (grad[:, 0].double() * -100 - exact).abs().quantile(0.95).item()
    assert error[torch.float32] < 1e-6 and error[torch.bfloat16] > 1e-4


def test_a_float32_models_ratios_are_as_good_as_float64s():
    """Any step of the log-probs taken in bfloat16 or TF32 moves s_i by more than a tenth of the clip window (3e-4)."""
    model, batch = tiny_model(), random_batch(8)
    ours, exact = common.token_logprobs(model, batch, 0.7), copy.deepcopy(model).double()
    for i, n in enumerate(batch["mask"].sum(1).long().tolist()):
        ids = batch["ids"][i, :batch["attention"][i].sum()]
        logp = (exact(input_ids=ids[None]).logits[0, :-1] / 0.7).log_softmax(-1).gather(1, ids[1:, None])[-n:]
        assert (ours[i, :n].double().mean() - logp.mean()).abs() < 1e-5


def test_a_bfloat16_model_has_float32_ratios_and_starts_at_one(monkeypatch):
    """Log-probs left in bfloat16 by the model: s_i would jump in steps as wide as the clip window before any update. So it
    would where old and new log-probs are of rows cut otherwise: the update's cut gives the very same bits."""
    model, args = tiny_model(dtype=torch.bfloat16), settings(temperature=0.7, micro_batch_tokens=10**6, minibatches=4)
    rollout, _ = sampled(monkeypatch, model, args, random_batch(16, completion=(3, 20)))
    assert rollout["old_logp"].dtype == torch.float32
    assert (rollout["old_logp"].bfloat16().float() != rollout["old_logp"]).float().mean() > 0.3  # bits below bfloat16's
    for part in common.minibatches(rollout, args.minibatches, args.group_size):
        for b in common.micro_batches(part, args.micro_batch_tokens):
            logp = common.token_logprobs(model, b, 0.7)
            loss, stats = gspo.policy_loss(logp, b["old_logp"], None, torch.ones(len(logp)), b["mask"], args)
            assert loss.dtype == torch.float32 and stats["ratio_max"] == 1 and stats["clip_frac"][0] == 0
    otherwise = common.token_logprobs(model, rollout, 0.7)
    assert not torch.equal(otherwise, rollout["old_logp"])  # in bfloat16 the cut matters: what this test would miss


# ---------------------------------------------------------------------------------------------------------------------
# Against GRPO

def model_gradient(module, model, rollout):
    args = settings(module, beta=0.0, eps_low=0.9, eps_high=AWAY)
    logp = common.token_logprobs(model, rollout, 1.0)
    module.policy_loss(logp, rollout["old_logp"], None, rollout["adv"], rollout["mask"], args)[0].backward()
    grads = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    return grads


def test_same_gradient_as_grpo_at_ratio_one_and_another_after_one_step():
    """A GSPO run that equals GRPO has taken one optimiser step per rollout: at w = 1 the two gradients are one and the same."""
    model = tiny_model().double()
    rollout = random_batch(6)
    rollout |= {"mask": rollout["mask"].double(), "adv": tensor([1.5, -0.5, 0.8, -0.5, 1.0, -1.2])}
    rollout["old_logp"] = common.token_logprobs(model, rollout, 1.0).detach()
    first = [model_gradient(module, model, rollout) for module in (gspo, grpo)]
    scale = max(g.abs().max() for g in first[0].values())
    assert scale > 1e-3
    assert all(torch.allclose(g, first[1][name], rtol=0, atol=1e-12 * scale) for name, g in first[0].items())
    with torch.no_grad():
        for name, p in model.named_parameters():
            p -= 0.01 / scale * first[0][name]
    second = [model_gradient(module, model, rollout) for module in (gspo, grpo)]
    assert max((g - second[1][name]).abs().max() for name, g in second[0].items()) > 1e-3 * scale


@pytest.mark.parametrize("minibatches", [1, 2])
def test_whole_updates_equal_grpos_with_one_optimiser_step_only(minibatches):
    """update(): one minibatch leaves the weights where GRPO's would; with two the sequence ratio has made a difference."""
    rollout = random_batch(8)
    rollout |= {"adv": torch.tensor([1.5, -0.5, 0.8, -0.5, 1.0, -1.2, 0.3, -1.4])}
    weights = []
    for module in (gspo, grpo):
        model = tiny_model()
        rollout["old_logp"] = common.token_logprobs(model, rollout, 1.0).detach()
        args = settings(module, beta=0.0, eps_low=0.9, eps_high=AWAY, group_size=2, minibatches=minibatches, warmup_steps=0,
                        max_grad_norm=1.0)
        torch.manual_seed(1)
        module.update(model, common.Optimizer(model, 1e-2, args), rollout, args)
        weights.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    apart = (weights[0] - weights[1]).abs().max().item()
    assert apart < 1e-5 if minibatches == 1 else apart > 1e-3


def test_the_papers_range_binds_in_an_update_and_a_token_range_does_not():
    """Trap 29 in a whole update: from the second minibatch on sequences leave (1 - 3e-4, 1 + 4e-4); nothing ever leaves .2."""
    rollout, shares = random_batch(8), []
    rollout |= {"adv": torch.tensor([1.5, -0.5, 0.8, -0.5, 1.0, -1.2, 0.3, -1.4])}
    for eps in ((3e-4, 4e-4), (0.2, 0.2)):
        model, args = tiny_model(), settings(eps_low=eps[0], eps_high=eps[1], group_size=2, warmup_steps=0)
        rollout["old_logp"] = common.token_logprobs(model, rollout, 1.0).detach()
        torch.manual_seed(1)
        shares.append(gspo.update(model, common.Optimizer(model, 1e-3, args), rollout, args)["clip_frac"])
    assert 0.05 < shares[0] <= 0.75 and shares[1] == 0  # the first of four minibatches is never clipped


def test_clip_frac_is_weighted_by_tokens_so_that_it_compares_with_grpos():
    """Three sequences, 5 + 1 + 2 tokens, the first clipped: 5/8 and not 1/3; GRPO counts the same eight tokens one by one."""
    log = math.log
    logp = tensor([[log(1.5)] * 5, [log(1.0), 9, 9, 9, 9], [log(1.3), log(1 / 1.3), 9, 9, 9]])
    mask, adv = tensor([[1, 1, 1, 1, 1], [1, 0, 0, 0, 0], [1, 1, 0, 0, 0]]), tensor([1.0, 1.0, 1.0])
    _, _, stats = loss_and_grad(settings(eps_low=0.2, eps_high=0.2), logp, torch.zeros_like(logp), adv, mask)
    _, _, theirs = loss_and_grad(settings(grpo, beta=0.0), logp, torch.zeros_like(logp), adv, mask, module=grpo)
    assert [float(x) for x in stats["clip_frac"]] == [5, 8] and [float(x) for x in theirs["clip_frac"]] == [6, 8]
    totals = common.Totals()  # the same rows as two micro-batches: sums are added, shares are not averaged
    for rows in (slice(0, 1), slice(1, 3)):
        totals.add(loss_and_grad(settings(eps_low=0.2, eps_high=0.2), logp[rows], 0 * logp[rows], adv[rows], mask[rows])[2])
    assert totals.means()["clip_frac"] == 5 / 8


# ---------------------------------------------------------------------------------------------------------------------
# Equation (4): not in the paper, 0 by default

@pytest.mark.parametrize("token_level", [False, True])
@pytest.mark.parametrize("kl", ["k3", "wk3"])
def test_kl_is_per_token_and_wk3_has_the_tokens_own_ratio(kl, token_level):
    """Trap 24 for --beta: k3 of every token, times w_it for wk3; times s_i it would be no estimate of any token's KL."""
    logp, old, ref, adv, mask = ragged(3)
    args = settings(eps_low=0.05, eps_high=0.05, beta=0.3, kl=kl, token_level=token_level)
    loss, grad, stats = loss_and_grad(args, logp, old, adv, mask, ref)
    expected, slope, _ = oracle(logp, old, adv, mask, 0.05, 0.05, 0.3, kl, ref)
    assert loss == pytest.approx(expected, abs=1e-12) and torch.allclose(grad, slope, atol=1e-12)
    if not token_level:  # a stopped gradient has no finite difference
        assert torch.allclose(grad, slopes(lambda x: gspo.policy_loss(x, old, ref, adv, mask, args)[0], logp), atol=1e-7)
    x = ref - logp
    k = (x.exp() - x - 1) * ((logp - old).exp() if kl == "wk3" else 1)
    assert stats["kl"][0].item() == pytest.approx(k[mask > 0].sum().item()) and float(stats["kl"][1]) == mask.sum()


def test_moving_away_from_the_reference_raises_the_penalty_and_beta_0_reads_none():
    """Trap 22: the penalty has its least at the reference. Beta 0 needs no reference and reports no KL."""
    old, mask = torch.full((1, 3), -1.0, dtype=D), torch.ones(1, 3, dtype=D)
    loss = [loss_and_grad(settings(beta=0.5), old + d, old + d, tensor([0.0]), mask, old)[0] for d in (-0.5, -0.1, 0, 0.1, 0.5)]
    assert loss[0] > loss[1] > loss[2] == 0 and loss[4] > loss[3] > loss[2]
    assert "kl" not in loss_and_grad(settings(), old, old, tensor([1.0]), mask, None)[2]


# ---------------------------------------------------------------------------------------------------------------------
# GSPO-token

@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("eps", [(0.05, 0.08), (0.999, AWAY)])
def test_token_level_equals_gspo_when_a_rows_advantages_are_equal(seed, eps):
    """s_it = sg[s_i] pi / sg[pi]: value, gradient and clipping of GSPO as long as A_it = A_i; adv may come as (N,) or (N, T)."""
    logp, old, _, adv, mask = ragged(seed)
    plain = loss_and_grad(settings(eps_low=eps[0], eps_high=eps[1]), logp, old, adv, mask)
    for a in (adv, adv[:, None].expand(mask.shape)):
        loss, grad, stats = loss_and_grad(settings(eps_low=eps[0], eps_high=eps[1], token_level=True), logp, old, a, mask)
        assert loss == pytest.approx(plain[0], abs=1e-12) and torch.allclose(grad, plain[1], atol=1e-12)
        assert stats["clip_frac"][0] == plain[2]["clip_frac"][0]


def test_every_value_of_token_level_is_s_i():
    """Without the stopped gradient in its place a token's value would be its own ratio, or s_i times it."""
    logp, old, _, _, mask = ragged(1)
    s = ((logp - old) * mask).sum(1) / mask.sum(1)
    for i in range(len(logp)):
        for t in mask[i].nonzero().flatten().tolist():
            adv = torch.zeros_like(mask)
            adv[i, t] = 1.0
            loss, _, _ = loss_and_grad(wide(token_level=True), logp, old, adv, mask)
            assert loss == pytest.approx(-math.exp(s[i]) / mask[i].sum().item(), abs=1e-12)


@pytest.mark.parametrize("seed", range(3))
def test_token_advantages_change_the_gradient_as_the_formula_says(seed):
    """d/dlogp_it = s_i A_it / |y_i| (0 where clipped, by the sign of A_it); GSPO would give each token its row's mean."""
    logp, old, _, _, mask = ragged(seed)
    adv = torch.randn(mask.shape, dtype=D, generator=torch.Generator().manual_seed(seed))
    for low, high in ((0.999, AWAY), (0.05, 0.05)):
        loss, grad, _ = loss_and_grad(settings(eps_low=low, eps_high=high, token_level=True), logp, old, adv, mask)
        expected, total = torch.zeros_like(grad), 0.0
        for i in range(len(logp)):
            n = int(mask[i].sum())
            s = math.exp(float((logp - old)[i, :n].sum()) / n)
            held = min(max(s, 1 - low), 1 + high)
            for t in range(n):
                A = float(adv[i, t])
                total -= min(s * A, held * A) / n
                expected[i, t] = 0.0 if held * A < s * A else -s * A / n
        assert loss == pytest.approx(total, abs=1e-12) and torch.allclose(grad, expected, atol=1e-12)
    _, plain, _ = loss_and_grad(wide(), logp, old, adv, mask)
    _, token, _ = loss_and_grad(wide(token_level=True), logp, old, adv, mask)
    assert torch.allclose(plain[0], token[0].mean().expand(6), atol=1e-12) and (plain - token).abs().max() > 0.01


def test_token_advantages_rule():
    """A true step is never punished, a false one never rewarded; all other tokens keep their completion's advantage."""
    signs = torch.tensor([[1.0, -1.0, 0.0]] * 3)
    adv = gspo.token_advantages(torch.tensor([1.5, -0.5, 0.0]), signs)
    assert adv.tolist() == [[1.5, 0.0, 1.5], [0.0, -0.5, -0.5], [0.0, 0.0, 0.0]]


# ---------------------------------------------------------------------------------------------------------------------
# The worked steps

def pieces_tokenizer(pieces):
    """A tokenizer whose token i reads pieces[i]; tokens may be of any length and hold newlines."""
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({piece: i for i, piece in enumerate(pieces)}, unk_token=pieces[0]))
    words.decoder = tokenizers.decoders.Fuse()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=words, unk_token=pieces[0], eos_token="<eos>")


def sign_of(line):
    """The sign of a line that is a single token."""
    rollout = make_batch([[0]], [[2]])
    return common.step_signs(rollout, pieces_tokenizer(["<unk>", "<eos>", line + "\n"])).item()


@pytest.mark.parametrize("line, sign", [
    ("7+2=9", 1), ("7+2=8", -1), ("9-4=5", 1), ("9-4=6", -1), ("3*4=12", 1), ("3*4=13", -1), ("8/2=4", 1), ("8/2=3", -1),
    ("7 + 2 = 9", 1), ("7 + 2 = 10", -1), ("0/5=0", 1), ("12+30=42", 1), ("9+1=10", 1), ("7/2=3", -1), ("7-2=5.", 1),
    ("2-5=-3", 1), ("2-5=3", -1), ("-3+4=1", 1), ("-3+4=7", -1), ("-3-4=-7", 1), ("-6/2=-3", 1), ("12-5=7", 1), ("12-5=-3", -1),
    ("", 0), ("7", 0), ("#### 4", 0), ("7+2=", 0), ("7+2", 0), ("=9", 0), ("+2=9", 0), ("7+2=?", 0), ("9=7+2", 0), ("x+2=9", 0)])
def test_a_line_is_true_false_or_no_step(line, sign):
    """A sign lost ("2-5=-3", "-3+4=1") or a number cut ("12-5=7" read as "2-5=7") would punish right steps."""
    assert sign_of(line) == sign


@pytest.mark.parametrize("line, sign", [
    ("7+2=9, 9-5=4", 1), ("7+2=9, 9-5=5", -1), ("7+2=8, 8-5=3", -1), ("7+2=9 9-5=5", -1), ("7+2=8 and 9-5=5", -1), ("7+2=9=8+1", 1),
    ("7+2=9=8", -1), ("so 7+2=9", 1), ("so 7+2=8", -1), ("7+2=9<eos>", 1), ("7+2=8<eos>", -1)])
def test_a_line_with_two_equations_or_words_is_never_read_wrongly(line, sign):
    """Looking at the first equation only would reward the second one's mistake; not reading the line at all (0) is allowed."""
    assert sign_of(line) in (0, sign)


@pytest.mark.parametrize("line", [
    "7+2-5=4", "2+3+4=9", "1-3+4=2", "2*3+1=7", "2+3*4=14", "5 - 3+4=6", "5 -3+4=6", "1+2+3 = 6", "1,000+5=1,005", "2+3=4+1",
    "(2+3)*4=20", "2+(3+4)=9", "2^3+1=9", "10/4=2.5", "1.5+2=3.5", "7+2=9=10-1"])
def test_a_true_equation_of_another_kind_is_not_read_as_a_false_one(line):
    """The end of "7+2-5=4" is "2-5=4": reading a part as the whole punished a true step; better not to read it at all."""
    assert sign_of(line) >= 0


@pytest.mark.parametrize("line", ["1000000002-1=1", "0.5+2=7", "2*3+1=4", "7-2+5=7", "1-3+4=7", "1,002-1=1"])
def test_a_false_equation_is_not_read_as_a_true_one(line):
    """The last digits of "1000000002-1=1" are "2-1=1": cutting a number rewarded a false step."""
    assert sign_of(line) <= 0


@pytest.mark.parametrize("line", ["5/0=0", "0/0=0", "0/0=1", "5/0=5", "9/0=999999999"])
def test_division_by_zero_is_no_crash_and_never_true(line):
    """Trap 37: the model writes what it likes; c * 0 == 0 must not make 0/0=0 a true step."""
    assert sign_of(line) <= 0


def test_hostile_lines_cost_milliseconds():
    """Trap 37: numbers with a million digits, towers of signs: no eval, no int of unbounded length, no backtracking."""
    lines = ["9" * 10**6 + "+1=" + "9" * 10**6, "9**9**9**9=1", "1+" * 10**5 + "=1", "-" * 10**5 + "1", "1 " * 10**5, "=" * 10**5,
             " " * 10**6 + "1", "1+1=2" + " ." * 10**5 + "x"]
    began = time.perf_counter()
    assert all(sign_of(line) == 0 for line in lines)
    assert all(sign_of(line) >= 0 for line in ("\u0663+\u0664=\u0667", "\u00b2+\u00b2=4", "7\u22122=5"))  # of other scripts
    assert time.perf_counter() - began < 2


PIECES = ["<unk>", "<eos>", "7+", "2=9", "\n", "9-", "5", "=4\n", "####", " 4", "2=8\n\n", "1+1=3", "so\n", "4=5\n3+"]


def spelt(prompts, completions):
    """make_batch of rows spelt as pieces."""
    return make_batch(*([[PIECES.index(p) for p in row] for row in rows] for rows in (prompts, completions)))


def test_tokens_get_the_sign_of_their_line():
    """Tokens of several characters, a line end inside a token, rows of other lengths, prompts that hold equations themselves."""
    rows = [  # (prompt, completion as (piece, sign))
        (["1+1=3", "\n"], [("7+", 1), ("2=9", 1), ("\n", 1), ("9-", 1), ("5", 1), ("=4\n", 1), ("####", 0), (" 4", 0), ("<eos>", 0)]),
        (["so\n"], [("7+", -1), ("2=8\n\n", -1), ("7+", 1), ("2=9", 1), ("\n", 1), ("####", 0), (" 4", 0)]),
        (["7+", "2=9", "\n", "9-", "5", "=4\n"], [("so\n", 0), ("1+1=3", -1), ("\n", -1), ("<eos>", 0)]),
        (["so\n", "7+"], [("2=9", 0), ("\n", 0), ("7+", 1), ("2=9", 1)]),  # cut off; the prompt's "7+" is no part of its line
        (["7+"], [("9-", 1), ("4=5\n3+", 1), ("2=9", -1), ("\n", -1), ("7+", 0)])]
    rollout = spelt([prompt for prompt, _ in rows], [[piece for piece, _ in row] for _, row in rows])
    signs = common.step_signs(rollout, pieces_tokenizer(PIECES))
    expected = torch.zeros_like(rollout["mask"])
    for i, (_, row) in enumerate(rows):
        expected[i, :len(row)] = torch.tensor([sign for _, sign in row])
    assert signs.shape == rollout["mask"].shape and torch.equal(signs.float(), expected)


def test_signs_of_characters_and_of_random_texts():
    """One character a token, as in the built-in model: every text of four lines, cut anywhere, against lines judged by hand."""
    chars = ["<unk>", "<eos>"] + list("0123456789+-=?# \n")
    tokenizer, rng = pieces_tokenizer(chars), random.Random(0)
    lines = {"7+2=9": 1, "9-5=5": -1, "#### 4": 0, "2-5=-3": 1, "12-5=7": 1, "": 0, "-3+4=2": -1, "1+1=3": -1}
    completions, expected = [], []
    for _ in range(20):
        text, signs = "", []
        for line in rng.sample(sorted(lines), 4):
            text, signs = text + line + "\n", signs + [lines[line]] * (len(line) + 1)
        completions.append([chars.index(c) for c in text])
        expected.append(signs)
    rollout = make_batch([[chars.index(c) for c in "1+1=?\n"]] * 20, completions)
    signs = common.step_signs(rollout, tokenizer)
    assert all(row[:len(e)].tolist() == e and not row[len(e):].any() for row, e in zip(signs, expected))


def test_a_row_without_completion_has_no_signs():
    """Trap 6: an empty row is legal everywhere."""
    rollout = spelt([["7+"], ["7+"]], [["7+"], ["7+"]])
    rollout["mask"][0] = 0
    rollout["attention"][0, 1:] = 0
    assert common.step_signs(rollout, pieces_tokenizer(PIECES)).tolist() == [[0], [0]]


# ---------------------------------------------------------------------------------------------------------------------
# collect and update

def sampled(monkeypatch, model, args, rollout=None, rewards=None, tokenizer=None):
    """collect() on a given rollout instead of a sampled one."""
    rollout = rollout or random_batch(4)
    rollout = dict(rollout, finished=torch.ones(len(rollout["ids"]), dtype=torch.bool), texts=[""] * len(rollout["ids"]))
    monkeypatch.setattr(common, "generate", lambda *_, **__: rollout)
    args.group_size = 2
    rewards = torch.tensor(rewards or [1.0, 0.0] * (len(rollout["ids"]) // 2))
    problems = [{"prompt": [3]}] * (len(rollout["ids"]) // 2)
    return gspo.collect(model, None, tokenizer or tiny_tokenizer(), problems, lambda *_: rewards, args)


def test_collect_gives_steps_their_own_advantages(monkeypatch):
    """--token_level: within a right and a wrong completion the true, the false and the other tokens part, and so do gradients."""
    rows = [["7+", "2=9", "\n", "1+1=3", "\n", "<eos>"], ["9-", "5", "=4\n", "7+", "2=8\n\n"]]
    rollout, model = spelt([["so\n"]] * 2, rows), tiny_model(vocab_size=len(PIECES))
    plain, _ = sampled(monkeypatch, model, settings(), rollout, [1.0, 0.0], pieces_tokenizer(PIECES))
    a = 0.5 / (math.sqrt(0.5) + 1e-4)
    assert torch.allclose(plain["adv"], torch.tensor([a, -a]))
    rollout, _ = sampled(monkeypatch, model, settings(token_level=True), rollout, [1.0, 0.0], pieces_tokenizer(PIECES))
    expected, mask = torch.tensor([[a, a, a, 0, 0, a], [0, 0, 0, -a, -a, 0]]), rollout["mask"]
    assert rollout["adv"].shape == mask.shape and torch.allclose(rollout["adv"] * mask, expected)
    logp = rollout["old_logp"].clone()
    _, grad, _ = loss_and_grad(settings(token_level=True), logp, rollout["old_logp"], rollout["adv"], mask)
    assert torch.allclose(grad, -expected / torch.tensor([[6.0], [5.0]]), atol=1e-6)


@pytest.mark.parametrize("token_level", [False, True])
def test_micro_batches_add_up_to_one_batch(token_level):
    """Trap 26: the gradient of an optimiser step is the same for 1 and for 8 micro-batches, also with (N, T) advantages."""
    model, rollout = tiny_model().double(), random_batch(8)
    rollout["mask"] = rollout["mask"].double()
    torch.manual_seed(2)
    rollout["adv"] = torch.randn(*rollout["mask"].shape, dtype=D) if token_level else torch.randn(8, dtype=D)
    rollout["old_logp"] = common.token_logprobs(model, rollout, 1.0).detach() + 0.01 * torch.randn(rollout["mask"].shape, dtype=D)
    results = []
    for tokens in (10**6, 40, 1):
        steps, args = [], settings(group_size=2, minibatches=3, token_level=token_level, micro_batch_tokens=tokens, epochs=2)
        torch.manual_seed(3)
        stats = gspo.update(model, recorder(model, steps), rollout, args)
        assert len(steps) == 6
        results.append((torch.stack(steps), stats["clip_frac"], stats["loss"]))
    for grads, clipped, loss in results[1:]:
        assert torch.allclose(grads, results[0][0], atol=1e-12) and (clipped, loss) == pytest.approx(results[0][1:], abs=1e-12)
    assert results[0][0].abs().max() > 1e-3 and 0 < results[0][1] < 1


def recorder(model, steps):
    """An optimiser that keeps each step's gradient and moves nothing."""
    def step():
        steps.append(torch.cat([p.grad.flatten().clone() for p in model.parameters()]))
        model.zero_grad(set_to_none=True)
        return {}
    return SimpleNamespace(step=step)


def test_the_old_log_probs_are_the_samplers_in_every_pass(monkeypatch):
    """Trap 28: recomputed in every pass, they would keep s at 1 and the clip dead."""
    model, rollout, seen = tiny_model(), random_batch(6), []
    rollout |= {"adv": torch.tensor([1.0, -1.0] * 3), "old_logp": common.token_logprobs(tiny_model(), rollout, 1.0).detach()}
    kept, inner = copy.deepcopy(rollout), gspo.policy_loss
    monkeypatch.setattr(gspo, "policy_loss", lambda *a: (seen.append((a[0].detach(), a[1])), inner(*a))[1])
    args = settings(group_size=2, minibatches=1, epochs=3, warmup_steps=0)
    stats = gspo.update(model, common.Optimizer(model, 1e-3, args), rollout, args)
    whole = lambda x: x.flatten().sort().values  # noqa: E731
    assert len(seen) == 3 and all(torch.equal(whole(old), whole(kept["old_logp"])) for _, old in seen)
    assert torch.allclose(whole(seen[0][0]), whole(kept["old_logp"]), atol=1e-5) and stats["clip_frac"] > 0
    assert all(torch.equal(rollout[name], kept[name]) for name in kept)

"""PPO: equations (1) to (5) of ppo.py in value and gradient, the value model, and the whole step.

Oracles are float64 Python loops over single numbers, finite differences and numbers worked out by hand.
"""
import copy
import itertools
import math
from types import SimpleNamespace

import pytest
import torch
import transformers
from conftest import random_batch, save_tiny, tiny_config, tiny_model, tiny_tokenizer

import common
import ppo

D = torch.float64


def settings(**changes):
    """The script's own defaults, but for `changes`."""
    args = ppo.parse_args([])
    for name, value in changes.items():
        assert hasattr(args, name)
        setattr(args, name, value)
    return args


def tensor(rows):
    return torch.tensor(rows, dtype=D)


def slopes(function, x, h=1e-6):
    """Gradient of a scalar function of x by central differences."""
    grad = torch.zeros_like(x)
    for place in [tuple(p) for p in (x == x).nonzero().tolist()]:
        ends = [x.clone(), x.clone()]
        ends[0][place] += h
        ends[1][place] -= h
        grad[place] = (float(function(ends[0])) - float(function(ends[1]))) / (2 * h)
    return grad


def ragged_mask(lengths, T):
    return (torch.arange(T) < torch.tensor(lengths)[:, None]).to(D)


def double_sum(rewards, values, mask, gamma, lam):
    """GAE as the paper prints it, one row and one token at a time: A_t = sum_l (gamma lam)^l delta_{t+l}."""
    adv = torch.zeros_like(rewards)
    for i, n in enumerate(mask.sum(1).long().tolist()):
        r, V = rewards[i, :n].tolist(), values[i, :n].tolist() + [0.0]
        delta = [r[t] + gamma * V[t + 1] - V[t] for t in range(n)]
        for t in range(n):
            adv[i, t] = sum((gamma * lam) ** k * delta[t + k] for k in range(n - t))
    return adv


# ---------------------------------------------------------------------------------------------------------------------
# Equation (1)

@pytest.mark.parametrize("lam, expected", [(0.0, [0.1, 0.1, 0.7]), (0.95, [0.82675, 0.765, 0.7]), (1.0, [0.9, 0.8, 0.7])])
def test_gae_fixture_and_seed_1s_sum_without_lambda_refuted(lam, expected):
    """r = [0, 0, 1], V = [.1, .2, .3]: a sum without lambda, as seed 1 prints it, gives [.9, .8, .7] for every lambda."""
    r, V, mask = tensor([[0, 0, 1]]), tensor([[0.1, 0.2, 0.3]]), torch.ones(1, 3, dtype=D)
    adv, returns = ppo.gae(r, V, mask, 1.0, lam)
    assert torch.allclose(adv, tensor([expected]), atol=1e-12) and torch.allclose(returns, adv + V, atol=1e-12)
    assert torch.allclose(adv, tensor([[0.9, 0.8, 0.7]]), atol=1e-3) == (lam == 1.0)


@pytest.mark.parametrize("gamma", [0.0, 0.9, 1.0])
@pytest.mark.parametrize("lam", [0.0, 0.5, 0.95, 1.0])
def test_gae_is_the_double_sum_on_ragged_rows(gamma, lam):
    """gamma at V_{t+1} and gamma * lambda at the sum: at gamma = 1, where most fixtures live, they cannot be told apart."""
    torch.manual_seed(0)
    mask = ragged_mask([7, 1, 4, 6], 7)
    rewards, values = torch.randn(2, 4, 7, dtype=D)
    adv, returns = ppo.gae(rewards * mask, values * mask, mask, gamma, lam)
    assert torch.allclose(adv, double_sum(rewards, values, mask, gamma, lam), atol=1e-12)
    assert torch.allclose(returns, (adv + values) * mask, atol=1e-12)
    if lam == 1.0:  # then R is the discounted sum of what follows, whatever the critic
        sums = [[sum(gamma**k * rewards[i, t + k] * mask[i, t + k] for k in range(7 - t)) for t in range(7)] for i in range(4)]
        assert torch.allclose(returns, tensor(sums) * mask, atol=1e-12)


def test_gae_neither_reads_nor_writes_padding():
    """Trap 20: padding after EOS leaked into the last token by V_{T+1} and by the running sum; nothing is bootstrapped there."""
    torch.manual_seed(1)
    mask = ragged_mask([5, 2], 5)
    rewards, values = torch.randn(2, 2, 5, dtype=D)
    adv, returns = ppo.gae(rewards + 50 * (1 - mask), values + 100 * (1 - mask), mask, 0.9, 0.95)
    alone = ppo.gae(rewards[1:, :2], values[1:, :2], mask[1:, :2], 0.9, 0.95)
    assert torch.allclose(adv[1, :2], alone[0][0], atol=1e-12) and torch.allclose(returns[1, :2], alone[1][0], atol=1e-12)
    assert (adv[1, 2:] == 0).all() and (returns[1, 2:] == 0).all()
    assert adv[1, 1].item() == pytest.approx((rewards[1, 1] - values[1, 1]).item())  # the last delta has no V after it


# ---------------------------------------------------------------------------------------------------------------------
# Equation (4): the rewards of tokens

def test_the_score_lands_on_the_last_sampled_token():
    """Trap 20: on EOS, or on the last token of a truncated row (here the second, of full width); never one slot after."""
    mask, old, ref = ragged_mask([2, 4, 1], 4), -torch.rand(3, 4, dtype=D), -torch.rand(3, 4, dtype=D)
    score = tensor([1.0, 2.0, -3.0])
    where = tensor([[0, 1, 0, 0], [0, 0, 0, 2], [-3, 0, 0, 0]])
    assert torch.equal(ppo.token_rewards(score, old, None, mask, 0.0), where)
    rewards = ppo.token_rewards(score, old, ref, mask, 0.3)
    for i, t in itertools.product(range(3), range(4)):
        penalty = 0.3 * (old[i, t] - ref[i, t]) if mask[i, t] else 0.0
        assert rewards[i, t].item() == pytest.approx(float(where[i, t] - penalty), abs=1e-12)


def test_the_penalty_has_its_sign():
    """Trap 22: a token likelier under the policy than under the reference costs; k1 is signed, so the opposite is paid."""
    mask = torch.ones(1, 2, dtype=D)
    rewards = ppo.token_rewards(tensor([0.0]), tensor([[-1.0, -2.0]]), tensor([[-2.0, -1.0]]), mask, 0.1)
    assert torch.allclose(rewards, tensor([[-0.1, 0.1]]), atol=1e-12)


def policy_gradient(rewards, old, mask, chance, T):
    """What ppo.py makes of rewards without a critic: the gradient by each row's log-probs, rows weighted by their chance."""
    adv, _ = ppo.gae(rewards, torch.zeros_like(rewards), mask, 1.0, 1.0)
    logp = old.clone().requires_grad_(True)
    loss, _ = ppo.policy_loss(logp, old, adv * chance[:, None] * T, mask, settings())
    return torch.autograd.grad(loss, logp)[0]


def test_k1_in_the_reward_has_the_gradient_of_the_reverse_kl():
    """Trap 23, by enumeration of four tokens: KL(pi||ref), to four digits; as a loss k1 would have none, k3 the forward KL's."""
    z = tensor([0.3, -0.5, 1.1, 0.0]).requires_grad_(True)
    logp, ref = z.log_softmax(0), tensor([0, 0.4, 0.2, -0.7]).log_softmax(0)
    old, mask = logp.detach()[:, None], torch.ones(4, 1, dtype=D)
    rewards = ppo.token_rewards(torch.zeros(4, dtype=D), old, ref[:, None], mask, 1.0)
    assert -(old.exp() * rewards).sum().item() == pytest.approx(0.1996580809, abs=1e-9)
    grad = policy_gradient(rewards, old, mask, old.exp()[:, 0], 1)
    z_grad, = torch.autograd.grad(logp, z, grad[:, 0])
    assert torch.allclose(z_grad, tensor([-0.056028, -0.147284, 0.177711, 0.025601]), atol=1e-6)


def test_k1_in_the_reward_over_sequences():
    """All 27 sequences of three steps: with gamma = lambda = 1 the tokens' penalties add up to the sequence KL's gradient."""
    torch.manual_seed(0)
    shapes = [(1, 3), (3, 3), (9, 3)]  # a distribution for every prefix
    z = [torch.randn(s, dtype=D, requires_grad=True) for s in shapes]
    y = [torch.randn(s, dtype=D) for s in shapes]
    rows = list(itertools.product(range(3), repeat=3))
    prefix = lambda row, t: sum(x * 3 ** (t - 1 - k) for k, x in enumerate(row[:t]))  # noqa: E731

    def pick(logits):
        return torch.stack([torch.stack([logits[t].log_softmax(1)[prefix(row, t), row[t]] for t in range(3)]) for row in rows])

    logp, ref, mask = pick(z), pick(y), torch.ones(27, 3, dtype=D)
    chance = logp.sum(1).exp()
    exact = torch.autograd.grad((chance * (logp - ref).sum(1)).sum(), z, retain_graph=True)
    rewards = ppo.token_rewards(torch.zeros(27, dtype=D), logp.detach(), ref, mask, 1.0)
    ours = torch.autograd.grad(logp, z, policy_gradient(rewards, logp.detach(), mask, chance.detach(), 3))
    assert all(torch.allclose(a, b, atol=1e-12) for a, b in zip(ours, exact)) and exact[0].abs().max() > 0.01


# ---------------------------------------------------------------------------------------------------------------------
# Whitening and explained variance

def test_whitening_over_completion_tokens_only():
    """Trap 20: zeros (or nonsense) of the padding in mean and deviation would shift the advantages of short rows."""
    torch.manual_seed(0)
    mask = ragged_mask([6, 2, 1], 6)
    x = 5 + 3 * torch.randn(3, 6, dtype=D)
    tokens = x[mask > 0]
    mean = tokens.sum() / 9
    deviation = math.sqrt(((tokens - mean) ** 2).sum() / 9)
    for padding in (0.0, 1000.0):
        white = ppo.whiten(x * mask + padding * (1 - mask), mask)
        assert (white[mask == 0] == 0).all()
        assert torch.allclose(white[mask > 0], (tokens - mean) / deviation, rtol=0.07)  # n or n - 1
        assert white[mask > 0].mean().abs() < 1e-12
        ranks = (white[mask > 0] - white[mask > 0][0]) / (tokens - tokens[0])
        assert torch.allclose(ranks[1:], ranks[1].expand(8))  # a shift and one scale
    assert (ppo.whiten(torch.full((3, 6), 0.7, dtype=D), mask).abs() < 1e-6).all()  # equal advantages: no noise amplified


def test_explained_variance():
    """1 for a perfect critic, 0 for a constant, .5 worked out by hand, below 0 for a harmful one; padding does not count."""
    mask = ragged_mask([3, 1], 3)
    returns = tensor([[0, 0, 1], [1, 50, -50]])
    spoil = lambda rows: tensor(rows) + 9 * (1 - mask)  # noqa: E731
    of = lambda rows: common.explained_variance(spoil(rows), returns, mask)  # noqa: E731
    assert of([[0, 0, 1], [1, 0, 0]]) == pytest.approx(1) and of([[0.3] * 3] * 2) == pytest.approx(0)
    assert of([[0, 0.5, 0.5], [1, 0, 0]]) == pytest.approx(0.5)  # errors 0, -.5, .5, 0: variance .5/3 of 1/3
    assert of([[2, 2, 3], [3, 0, 0]]) == pytest.approx(1)  # a constant offset is not variance
    assert of([[1, 1, 0], [0, 0, 0]]) == pytest.approx(-3)


@pytest.mark.filterwarnings("ignore:var")
def test_explained_variance_is_nan_where_undefined():
    """Returns that are all equal gave -inf, and with float noise -1e12, which the log would have plotted."""
    torch.manual_seed(0)
    values, mask = torch.rand(4, 5), torch.ones(4, 5)
    assert math.isnan(common.explained_variance(values, torch.ones(4, 5), mask))
    rewards = ppo.token_rewards(torch.full((4,), 0.7), mask, None, mask, 0.0)
    _, returns = ppo.gae(rewards, values, mask, 1.0, 1.0)  # .7 each, but for rounding
    assert math.isnan(common.explained_variance(values, returns, mask))
    assert math.isnan(common.explained_variance(values[:1, :1], values[1:2, :1], mask[:1, :1]))  # a single token


# ---------------------------------------------------------------------------------------------------------------------
# Equations (2) and (3)

def policy_loss_and_grad(args, logp, old, adv, mask):
    logp = logp.clone().requires_grad_(True)
    loss, stats = ppo.policy_loss(logp, old, adv, mask, args)
    loss.backward()
    return loss.item(), logp.grad, stats


TABLE = [(+1, 0.5, 0.5, 0.5), (+1, 0.9, 0.9, 0.9), (+1, 1.0, 1.0, 1.0), (+1, 1.1, 1.1, 1.1), (+1, 1.5, 1.2, 0),
         (-1, 0.5, -0.8, 0), (-1, 0.9, -0.9, -0.9), (-1, 1.0, -1.0, -1.0), (-1, 1.1, -1.1, -1.1), (-1, 1.5, -1.5, -1.5)]


@pytest.mark.parametrize("A, w, value, slope", TABLE)
def test_clip_gradient_table_of_seed_2(A, w, value, slope):
    """Trap 21: with max in place of min for A < 0 the rows w = .5 and w = 1.5 exchange their gradients."""
    one = torch.ones(1, 1, dtype=D)
    loss, grad, stats = policy_loss_and_grad(settings(), one * math.log(w), 0 * one, one * A, one)
    assert -loss == pytest.approx(value, abs=1e-12) and -grad.item() == pytest.approx(slope, abs=1e-12)
    assert float(stats["clip_frac"][0]) == (slope == 0) and stats["ratio_max"].item() == pytest.approx(w)


@pytest.mark.parametrize("seed", range(3))
def test_surrogate_against_loops_and_finite_differences(seed):
    """Token advantages, ragged rows, unequal ends of the clip: row means, summed over rows, statistics over tokens only."""
    torch.manual_seed(seed)
    mask, args = ragged_mask([6, 1, 3, 5], 6), settings(eps_low=0.1, eps_high=0.3)
    old, adv = -torch.rand(4, 6, dtype=D), torch.randn(4, 6, dtype=D)
    logp = old + 0.4 * torch.randn(4, 6, dtype=D)
    total, slope, bound, largest = 0.0, torch.zeros(4, 6, dtype=D), 0, 0.0
    for i, t in mask.nonzero().tolist():
        w, A, n = math.exp(logp[i, t] - old[i, t]), float(adv[i, t]), float(mask[i].sum())
        held = min(max(w, 0.9), 1.3)
        total -= min(w * A, held * A) / n
        slope[i, t] = 0.0 if held * A < w * A else -w * A / n
        bound, largest = bound + (held * A < w * A), max(largest, w)
    loss, grad, stats = policy_loss_and_grad(args, logp, old, adv, mask)
    assert loss == pytest.approx(total, abs=1e-12) and torch.allclose(grad, slope, atol=1e-12)
    assert torch.allclose(grad, slopes(lambda x: ppo.policy_loss(x, old, adv, mask, args)[0], logp), atol=1e-8)
    assert [float(x) for x in stats["clip_frac"]] == [bound, 15] and bound > 0
    assert stats["ratio_max"].item() == pytest.approx(largest) and [float(x) for x in stats["loss"]] == pytest.approx([total, 4])


def test_ratio_max_and_losses_read_tokens_only():
    """Trap 38: padding has ratio 1, so the largest ratio of a row whose tokens all fell read 1. Trap 6: an empty row is 0."""
    mask = ragged_mask([2, 0], 4)
    logp = tensor([[-0.5, -0.2, 700.0, -700.0], [700.0, 0, 0, 0]])
    loss, grad, stats = policy_loss_and_grad(settings(), logp, 0 * logp, torch.ones(2, 4, dtype=D), mask)
    assert stats["ratio_max"].item() == pytest.approx(math.exp(-0.2)) and loss == pytest.approx(-(math.exp(-0.5) + math.exp(-0.2)) / 2)
    assert grad.isfinite().all() and (grad[mask == 0] == 0).all()
    values = logp.clone().requires_grad_(True)
    loss, _ = ppo.value_loss(values, 0 * logp, 0 * logp, mask, settings())
    loss.backward()
    assert loss.item() == pytest.approx((0.25 + 0.04) / 4) and (values.grad[mask == 0] == 0).all()


def test_a_huge_ratio_stays_finite():
    """Trap 30: exp of a log-ratio of 500 is inf, and with A < 0 no clip stands before it."""
    one = torch.ones(1, 1)
    loss, grad, _ = policy_loss_and_grad(settings(), 500 * one, 0 * one, -one, one)
    assert math.isfinite(loss) and grad.isfinite().all()


# ---------------------------------------------------------------------------------------------------------------------
# Equation (5)

@pytest.mark.parametrize("V, R, loss, slope", [
    (0.1, 1.0, 0.405, -0.9),    # within .2 of the old value 0: the plain square
    (0.5, 1.0, 0.32, 0.0),      # moved towards R by more than .2: the clipped error is larger and has no gradient
    (-0.5, 1.0, 1.125, -1.5),   # moved away: the plain error is larger and pulls back
    (0.5, 0.1, 0.08, 0.4),      # shot past R: plain
    (-0.5, -1.0, 0.32, 0.0), (0.5, -1.0, 1.125, 1.5)])
def test_value_clip_by_hand(V, R, loss, slope):
    """min for max, or a clip around R: the critic would be cut off where it is wrong instead of where it has moved enough."""
    v = tensor([[V]]).requires_grad_(True)
    ours, stats = ppo.value_loss(v, tensor([[0.0]]), tensor([[R]]), torch.ones(1, 1, dtype=D), settings())
    ours.backward()
    assert ours.item() == pytest.approx(loss) and v.grad.item() == pytest.approx(slope, abs=1e-12)
    assert stats["value_loss"][0].item() == pytest.approx(loss)


@pytest.mark.parametrize("seed", range(3))
def test_value_loss_against_loops_and_finite_differences(seed):
    """Clip around the OLD value, .5, row means, sum over rows."""
    torch.manual_seed(seed)
    mask, args = ragged_mask([8, 1, 6], 8), settings(eps_value=0.3)
    old = torch.randn(3, 8, dtype=D)
    values, returns = old + 0.8 * torch.randn(3, 8, dtype=D), old + 2 * torch.randn(3, 8, dtype=D)
    total, slope, branches = 0.0, torch.zeros(3, 8, dtype=D), set()
    for i, t in mask.nonzero().tolist():
        V, O, R, n = float(values[i, t]), float(old[i, t]), float(returns[i, t]), float(mask[i].sum())  # noqa: E741
        held = min(max(V, O - 0.3), O + 0.3)
        total += 0.5 * max((V - R) ** 2, (held - R) ** 2) / n
        slope[i, t] = 0.0 if (held - R) ** 2 > (V - R) ** 2 else (V - R) / n
        branches.add(slope[i, t].item() == 0)
    v = values.clone().requires_grad_(True)
    loss, stats = ppo.value_loss(v, old, returns, mask, args)
    loss.backward()
    assert loss.item() == pytest.approx(total, abs=1e-12) and torch.allclose(v.grad, slope, atol=1e-12) and len(branches) == 2
    assert torch.allclose(v.grad, slopes(lambda x: ppo.value_loss(x, old, returns, mask, args)[0], values), atol=1e-8)
    assert [float(x) for x in stats["value_loss"]] == pytest.approx([total, 3])


def test_defaults_are_those_of_the_papers():
    """EQUATIONS.md: gamma 1, lambda .95, beta .05, clips .2, vf .1, whitened, 4 epochs, lr 3e-6, group of 1."""
    args = ppo.parse_args([])
    assert (args.gamma, args.lam, args.beta, args.vf_coef) == (1, 0.95, 0.05, 0.1)
    assert (args.eps_low, args.eps_high, args.eps_value) == (0.2, 0.2, 0.2)
    assert args.whiten and args.epochs == 4 and args.group_size == 1 and args.lr.real == args.value_lr.real == 3e-6 and args.minibatches > 1


# ---------------------------------------------------------------------------------------------------------------------
# The value model

@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Saved tiny models by family, with dropout everywhere it can be set."""
    path, dropout = tmp_path_factory.mktemp("models"), {"gpt2": dict(attn_pdrop=0.3, resid_pdrop=0.3, embd_pdrop=0.3)}
    return {f: save_tiny(path / f, f, **dropout.get(f, dict(attention_dropout=0.3))) for f in ("qwen2", "qwen3", "llama", "gpt2")}


def load_value(path, head=None, **changes):
    """common.load_value, and if `head` is given a random head of that size."""
    args = settings(model=path, out="nowhere", gradient_checkpointing=False, device="cpu", **{"dtype": "float32"} | changes)
    model = common.load_value(args)
    torch.manual_seed(7)
    for p in common.value_head(model).parameters() if head else ():
        torch.nn.init.normal_(p, std=head)
    return model


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_values_are_exactly_zero_at_the_start(saved, family, dtype):
    """A random head on a fresh critic makes the first advantages noise: the head is zero, the body is the policy's."""
    model, batch = load_value(saved[family], dtype=dtype), random_batch(5)
    values = common.token_values(model, batch)
    assert values.shape == batch["mask"].shape and values.dtype == torch.float32 and (values == 0).all()
    assert model.config.num_labels == 1 and sum(p.numel() for p in common.value_head(model).parameters()) == 17  # 16 and a bias
    policy = transformers.AutoModelForCausalLM.from_pretrained(saved[family], dtype=getattr(torch, dtype))
    theirs = policy.base_model.state_dict()
    assert theirs and all(torch.equal(p, theirs[name]) for name, p in model.base_model.state_dict().items())
    values.sum().backward()  # a dead head would stay at 0
    assert all(p.grad.abs().max() > 0 for p in common.value_head(model).parameters()) and model.training


def test_v_t_is_the_value_of_the_state_before_token_t(saved, family):
    """Each V against the model run on the unpadded prefix alone; and causally: token t may not move V_t, token t-1 must."""
    model, batch = load_value(saved[family], head=1.0), random_batch(6, seed=3)
    values = common.token_values(model, batch)
    lengths = batch["attention"].sum(1) - batch["mask"].sum(1).long()
    with torch.no_grad():
        for i, n in enumerate(lengths.tolist()):
            for t in range(values.shape[1]):
                alone = model(input_ids=batch["ids"][i:i + 1, :n + t]).logits[0, -1, 0].item() if batch["mask"][i, t] else 0.0
                assert values[i, t].item() == pytest.approx(alone, abs=1e-5)
        i = int(batch["mask"].sum(1).argmax())
        for t in range(1, int(batch["mask"][i].sum())):
            changed = batch | {"ids": batch["ids"].clone()}
            changed["ids"][i, lengths[i] + t] = (changed["ids"][i, lengths[i] + t] + 1) % 64
            moved = (common.token_values(model, changed) - values).abs()[i]
            assert moved[:t + 1].max() < 1e-6 and (t + 1 == batch["mask"][i].sum() or moved[t + 1] > 1e-4)
    assert values.std() > 0.1


def test_dropout_is_off_in_the_value_model(saved, family):
    """classifier_dropout is .1 by default in transformers: old and new values would be those of different networks."""
    model, batch = load_value(saved[family], head=1.0), random_batch(4)
    assert model.training
    torch.manual_seed(0)
    first = common.token_values(model, batch)
    assert torch.equal(first, common.token_values(model, batch)) and first.abs().max() > 0.1
    assert torch.equal(model(input_ids=batch["ids"]).logits, model(input_ids=batch["ids"]).logits)
    assert torch.allclose(first, common.token_values(model.eval(), batch), atol=1e-6)


def test_values_of_a_bfloat16_model_are_not_rounded(saved, family):
    """A bfloat16 head knows near 1 only steps of .004 (.0078 above): too coarse for advantages, and for small updates."""
    model, batch = load_value(saved[family], head=0.01, dtype="bfloat16"), random_batch(6)
    with torch.no_grad():
        head = common.value_head(model)
        assert head.weight.dtype == torch.float32
        head.bias.fill_(1.0)
        values = common.token_values(model, batch)[batch["mask"] > 0]
    assert values.dtype == torch.float32 and (values.bfloat16().float() != values).float().mean() > 0.5


# ---------------------------------------------------------------------------------------------------------------------
# collect

VOCAB = 8  # small, so that EOS (1) comes often


def models(dtype=torch.float32, head=0.5):
    """A policy, another reference, a value model with a random head."""
    config = tiny_config("qwen2", VOCAB, num_labels=1)
    torch.manual_seed(5)
    value = transformers.AutoModelForTokenClassification.from_config(config).to(dtype)
    for module in value.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    torch.nn.init.normal_(value.score.weight, std=head)
    return tiny_model(vocab_size=VOCAB, dtype=dtype), tiny_model(vocab_size=VOCAB, seed=9, dtype=dtype), value


def reward_of(problems, texts):
    """A score that tells rows apart: the number of tokens t3 in the text plus the problem's own."""
    return torch.tensor([text.count("t3") + problem["bonus"] for problem, text in zip(problems, texts)], dtype=torch.float32)


def sampled(args, with_reference=True, parts=None):
    policy, reference, value = parts or models()
    problems = [{"prompt": [3 + i, 4, 2][:1 + i % 3], "bonus": 0.1 * i} for i in range(4)]
    torch.manual_seed(0)
    return ppo.collect(policy, value, reference if with_reference else None, tiny_tokenizer(VOCAB), problems, reward_of, args)


@pytest.mark.parametrize("group_size, whiten, beta", [(1, False, 0.2), (3, False, 0.2), (3, True, 0.2), (3, False, 0.0)])
def test_collect_by_loops(group_size, whiten, beta):
    """From sampled tokens to advantages with nothing of ppo.py: log-probs, prefix values, rewards, the double sum, the log."""
    args = settings(group_size=group_size, whiten=whiten, beta=beta, gamma=0.9, lam=0.8, max_new_tokens=6, temperature=0.7)
    policy, reference, value = models()
    r, stats = sampled(args, beta > 0, (policy, reference, value))
    mask, N = r["mask"], 4 * group_size
    lengths = mask.sum(1).long().tolist()
    assert len(r["ids"]) == N and not any(x.requires_grad for x in r.values() if torch.is_tensor(x))
    if group_size == 3:
        assert min(lengths) < 6 and 0 < stats["truncated"] < 1  # rows that end by EOS and rows that are cut
    old, ref, V, rewards = (torch.zeros(mask.shape, dtype=D) for _ in range(4))
    with torch.no_grad():
        for i, n in enumerate(lengths):
            start = int(r["attention"][i].sum()) - n
            for t in range(n):
                before, token = r["ids"][i:i + 1, :start + t], r["ids"][i, start + t]
                old[i, t] = (policy(input_ids=before).logits[0, -1].double() / 0.7).log_softmax(0)[token]
                ref[i, t] = (reference(input_ids=before).logits[0, -1].double() / 0.7).log_softmax(0)[token]
                V[i, t] = value(input_ids=before).logits[0, -1, 0].double()
                rewards[i, t] = -beta * (old[i, t] - ref[i, t])
            score = int((r["ids"][i, start:start + n] == 3).sum()) + 0.1 * (i // group_size)
            assert r["rewards"][i].item() == pytest.approx(score)
            rewards[i, n - 1] += score
    adv = double_sum(rewards, V, mask, 0.9, 0.8)
    returns = (adv + V) * mask
    tokens = mask > 0
    if whiten:
        adv = (adv - adv[tokens].mean()) / adv[tokens].std(correction=0) * mask
    for name, expected in {"old_logp": old, "values": V, "returns": returns, "adv": adv}.items():
        assert torch.allclose(r[name].double(), expected, atol=2e-5), name
    assert ("ref_logp" in r, stats.get("kl") is not None) == (beta > 0, beta > 0)
    if beta:
        assert torch.allclose(r["ref_logp"].double(), ref, atol=1e-5)
        assert stats["kl"] == pytest.approx(float((old - ref)[tokens].mean()), abs=1e-5)
    to_go = double_sum(rewards, 0 * V, mask, 0.9, 1.0)  # not the returns of GAE, which lean on V
    explained = 1 - (to_go - V)[tokens].var() / to_go[tokens].var()
    assert stats["explained_variance"] == pytest.approx(float(explained), abs=1e-4)


def test_advantages_and_returns_carry_no_gradient():
    """Trap 25: a differentiable reward (a reward model left trainable) would be trained through the advantages."""
    policy, reference, value = models()
    args = settings(beta=0.1, max_new_tokens=4)
    scored = lambda problems, texts: torch.ones(len(texts), requires_grad=True)  # noqa: E731
    rollout, _ = ppo.collect(policy, value, reference, tiny_tokenizer(VOCAB), [{"prompt": [3]}] * 2, scored, args)
    assert not any(rollout[name].requires_grad for name in ("old_logp", "ref_logp", "values", "adv", "returns"))


def test_nothing_of_the_rollout_changes_from_pass_to_pass(monkeypatch):
    """Traps 25 and 28: advantages, returns, old values and the sampler's log-probs are constants in all epochs."""
    parts, args = models(), settings(group_size=2, epochs=3, minibatches=1, max_new_tokens=6, warmup_steps=0)
    rollout, _ = sampled(args, True, parts)
    kept, seen = copy.deepcopy(rollout), []
    policy_loss, value_loss = ppo.policy_loss, ppo.value_loss
    monkeypatch.setattr(ppo, "policy_loss", lambda *a: (seen.append(a), policy_loss(*a))[1])
    monkeypatch.setattr(ppo, "value_loss", lambda *a: (seen.append(a), value_loss(*a))[1])
    optimizers = {"policy": common.Optimizer(parts[0], 1e-2, args), "value": common.Optimizer(parts[2], 1e-2, args)}
    ppo.update(parts[0], parts[2], optimizers, rollout, args)
    whole = lambda x: x.detach().flatten().sort().values  # noqa: E731
    assert len(seen) == 6
    for k, a in enumerate(seen):
        names = ("old_logp", "adv") if k % 2 == 0 else ("values", "returns")
        assert all(torch.equal(whole(x), whole(kept[name])) and not x.requires_grad for x, name in zip(a[1:], names))
    now = [whole(a[0]) for a in seen]
    assert torch.allclose(now[0], whole(kept["old_logp"]), atol=1e-5) and torch.allclose(now[1], whole(kept["values"]), atol=1e-5)
    assert (now[4] - now[0]).abs().max() > 1e-3 and (now[5] - now[1]).abs().max() > 1e-3  # while the models move
    assert all(torch.equal(rollout[name], kept[name]) for name in kept if torch.is_tensor(kept[name]))


# ---------------------------------------------------------------------------------------------------------------------
# update

def recorder(model, steps):
    """An optimiser that keeps each step's gradient and moves nothing."""
    def step(*_):
        steps.append(torch.cat([p.grad.flatten().clone() for p in model.parameters()]))
        model.zero_grad(set_to_none=True)
        return {}
    return SimpleNamespace(step=step)


def gradients(parts, rollout, args):
    """The policy's and the value model's gradients in every optimiser step of one update, and the statistics."""
    steps = {"policy": [], "value": []}
    torch.manual_seed(3)
    recorders = {"policy": recorder(parts[0], steps["policy"]), "value": recorder(parts[2], steps["value"])}
    stats = ppo.update(parts[0], parts[2], recorders, rollout, args)
    return torch.stack(steps["policy"]), torch.stack(steps["value"]), stats


def off_policy_rollout(n=6):
    """A ragged float64 rollout on which both clips bind."""
    torch.manual_seed(1)
    parts, rollout = models(D), random_batch(n, vocab_size=VOCAB)
    rollout["mask"] = mask = rollout["mask"].double()
    noise = lambda scale: scale * torch.randn(mask.shape, dtype=D) * mask  # noqa: E731
    rollout |= {"adv": noise(1.0), "old_logp": common.token_logprobs(parts[0], rollout, 0.7).detach() + noise(0.2)}
    rollout["values"] = common.token_values(parts[2], rollout).detach() + noise(0.3)
    rollout["returns"] = noise(1.0)
    return parts, rollout


def test_a_step_of_both_models_against_the_formulas():
    """One optimiser step in float64, written out with full logits: temperature, row means, vf_coef, division by the rows."""
    parts, rollout = off_policy_rollout()
    policy, _, value = parts
    args = settings(group_size=2, minibatches=1, epochs=1, temperature=0.7, vf_coef=0.3, eps_value=0.25)
    ours = gradients(parts, rollout, args)
    J = L = 0.0
    for i, n in enumerate(rollout["mask"].sum(1).long().tolist()):
        end = int(rollout["attention"][i].sum())
        ids = rollout["ids"][i:i + 1, :end]
        logp = (policy(input_ids=ids).logits[0] / 0.7).log_softmax(-1)
        V = value(input_ids=ids).logits[0, :, 0]
        for t in range(n):
            at = end - n + t
            w, A = (logp[at - 1, ids[0, at]] - rollout["old_logp"][i, t]).exp(), rollout["adv"][i, t]
            J = J + torch.min(w * A, w.clamp(0.8, 1.2) * A) / n / 6
            old, R = rollout["values"][i, t], rollout["returns"][i, t]
            held = torch.maximum(torch.minimum(V[at - 1], old + 0.25), old - 0.25)
            L = L + 0.5 * torch.max((V[at - 1] - R) ** 2, (held - R) ** 2) / n / 6
    theirs = [torch.cat([g.flatten() for g in torch.autograd.grad(x, list(m.parameters()))]) for x, m in ((-J, policy), (0.3 * L, value))]
    for mine, exact in zip(ours, theirs):
        assert mine.shape[0] == 1 and torch.allclose(mine[0], exact, atol=1e-10) and exact.abs().max() > 1e-3
    assert ours[2]["loss"] == pytest.approx(-J.item()) and ours[2]["value_loss"] == pytest.approx(L.item())
    assert 0 < ours[2]["clip_frac"] < 1


@pytest.mark.parametrize("minibatches", [1, 2])
def test_micro_batches_add_up_to_one_batch(minibatches):
    """Traps 26 and 27: 1 or 6 micro-batches, minibatches of 4 and 2 rows: the same gradients for both models, and in one sum
    over the minibatches, weighted by rows, the gradient of the whole rollout."""
    parts, rollout = off_policy_rollout()
    args = settings(group_size=2, minibatches=minibatches, epochs=1, temperature=0.7)
    results = []
    for tokens in (10**6, 30, 1):
        args.micro_batch_tokens = tokens
        results.append(gradients(parts, rollout, args))
    for policy, value, stats in results[1:]:
        assert torch.allclose(policy, results[0][0], atol=1e-12) and torch.allclose(value, results[0][1], atol=1e-12)
        assert [stats[k] for k in ("loss", "value_loss", "clip_frac", "ratio_max")] == pytest.approx(
            [results[0][2][k] for k in ("loss", "value_loss", "clip_frac", "ratio_max")], abs=1e-12)
    args.minibatches, weights = 1, tensor([6.0] if minibatches == 1 else [4.0, 2.0])
    whole = gradients(parts, rollout, args)
    for k in (0, 1):
        assert len(results[0][k]) == minibatches and torch.allclose((weights[:, None] * results[0][k]).sum(0) / 6, whole[k][0], atol=1e-6)


def weights(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def test_policy_and_critic_are_trained_apart():
    """One optimiser or one clipped norm for both would let the critic's loss move (or starve) the policy, and the reverse."""
    def after(**changes):
        parts, args = models(), settings(group_size=1, minibatches=2, epochs=2, warmup_steps=0, vf_coef=changes.pop("vf_coef", 0.1))
        rollout = random_batch(6, vocab_size=VOCAB)
        torch.manual_seed(4)
        noise = lambda: torch.randn(rollout["mask"].shape) * rollout["mask"]  # noqa: E731
        rollout |= {"adv": noise(), "returns": noise(), "values": common.token_values(parts[2], rollout).detach()}
        rollout["old_logp"] = common.token_logprobs(parts[0], rollout, 1.0).detach()
        rollout |= {name: change * rollout[name] for name, change in changes.items()}
        optimizers = {"policy": common.Optimizer(parts[0], 1e-2, args), "value": common.Optimizer(parts[2], 1e-2, args)}
        before = [weights(parts[k]) for k in (0, 2)]
        stats = ppo.update(parts[0], parts[2], optimizers, rollout, args)
        moved = [not torch.equal(weights(parts[k]), x) for k, x in zip((0, 2), before)]
        return weights(parts[0]), weights(parts[2]), moved, stats
    policy, value, moved, stats = after()
    assert moved == [True, True] and stats["grad_norm"] > 0
    for changes in ({"returns": 100.0}, {"returns": -1.0, "vf_coef": 5.0}):  # the policy does not notice
        other = after(**changes)
        assert torch.equal(other[0], policy) and not torch.equal(other[1], value) and other[3]["grad_norm"] == stats["grad_norm"]
    other = after(adv=-50.0)  # nor does the critic
    assert torch.equal(other[1], value) and not torch.equal(other[0], policy)
    still = after(adv=0.0, vf_coef=0.0)
    assert still[2] == [False, False]


def test_the_critic_learns():
    """A critic that never beats a constant makes PPO a costly REINFORCE: here returns follow from the tokens read so far."""
    torch.manual_seed(0)
    parts, rollout = models(head=0.0), random_batch(24, vocab_size=VOCAB, completion=(3, 8))
    mask, lengths = rollout["mask"], rollout["attention"].sum(1) - rollout["mask"].sum(1).long()
    place = (lengths[:, None] + torch.arange(mask.shape[1]) - 1).clamp(max=rollout["ids"].shape[1] - 1)
    returns = (rollout["ids"].gather(1, place) >= 4).float() * mask                  # by the token just before
    rollout |= {"adv": torch.zeros_like(mask), "returns": returns, "old_logp": common.token_logprobs(parts[0], rollout, 1.0).detach()}
    args, losses, explained = settings(minibatches=2, epochs=2, warmup_steps=0), [], []
    optimizers = {"policy": common.Optimizer(parts[0], 1e-3, args), "value": common.Optimizer(parts[2], 1e-2, args)}
    for _ in range(12):  # rollouts: the old values follow, so that the value clip lets go
        rollout["values"], = common.score_rows(lambda b: common.token_values(parts[2], b), rollout, args)
        explained.append(common.explained_variance(rollout["values"], returns, mask))
        losses.append(ppo.update(parts[0], parts[2], optimizers, rollout, args)["value_loss"])
    assert explained[0] == pytest.approx(0, abs=1e-6) and explained[-1] > 0.8 and max(explained) <= 1
    assert losses[-1] < 0.2 * losses[0]

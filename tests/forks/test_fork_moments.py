"""The fork bf16_moments: AdamW as it is, but for the rounding of moments that are stored as bfloat16."""
import copy
import types

import pytest
import torch
from conftest import newest, same, train
from safetensors.torch import load_file
from test_forks import fork  # noqa: F401

import common

pytestmark = pytest.mark.slow
MOMENTS = ("exp_avg", "exp_avg_sq")

@pytest.fixture
def moments(fork):  # noqa: F811
    return fork("bf16_moments")

def optimizer_of(cls, weights, lr=1e-6, beta2=0.95, warmup_steps=3, max_grad_norm=1.0):
    """An optimiser of copies of some tensors, and the copies."""
    model = torch.nn.ParameterList(torch.nn.Parameter(w.clone()) for w in weights)
    args = types.SimpleNamespace(warmup_steps=warmup_steps, max_grad_norm=max_grad_norm)
    optimizer = cls(model, lr, args)
    optimizer.param_groups[0]["betas"] = (0.9, beta2)
    return optimizer, list(model)

def test_a_step_is_adamws_by_hand_and_what_it_stores_is_the_nearest_bfloat16(moments):
    """In float64, with warm-up and clipping, from what the step before stored. The second tensor has no
    gradient in steps 1 and 3. Two gradients are skipped: one with an infinity, and one that is 0."""
    torch.manual_seed(0)
    optimizer, weights = optimizer_of(moments.Optimizer, [0.02 * torch.randn(50, 30), torch.randn(70)], 1e-3)
    found, steps = [{"m": 0, "v": 0, "t": 0} for _ in weights], 0
    for step in range(9):
        size = 10.0 ** (-3 if step % 2 else 0)  # of norm .04, which is not clipped, and 40, which is
        gradients = [size * torch.randn_like(w) for w in weights]
        if step in (1, 3):
            gradients[1] = None
        if step in (4, 6):
            gradients = [0 * g for g in gradients]
        if step == 4:
            gradients[0][3, 2] = torch.inf
        for w, g in zip(weights, gradients):
            w.grad = None if g is None else g.clone()
        before, state = [w.detach().clone() for w in weights], copy.deepcopy(optimizer.state_dict())
        stats = optimizer.clip_and_step()
        if step in (4, 6):
            assert same(before, [w.detach() for w in weights]) and same(optimizer.state_dict(), state)
            assert (stats["skipped"][0], stats["zero_gradient"][0]) == (step == 4, step == 6)
            continue
        steps += 1
        norm = sum(g.double().square().sum() for g in gradients if g is not None).sqrt()
        assert stats["lr"][0] == pytest.approx(1e-3 * (1 / 3, 2 / 3, 1)[min(steps, 3) - 1])
        for w, old, g, own in zip(weights, before, gradients, found):
            if g is None:
                assert torch.equal(w, old)
                continue
            g = g.double() / max(norm, 1)
            own["t"] += 1
            own["m"], own["v"] = 0.9 * own["m"] + 0.1 * g, 0.95 * own["v"] + 0.05 * g * g
            mean, square = own["m"] / (1 - 0.9 ** own["t"]), own["v"] / (1 - 0.95 ** own["t"])
            expected = old.double() - stats["lr"][0] * mean / (square.sqrt() + 1e-8)
            torch.testing.assert_close(w.detach().double(), expected, rtol=2e-7, atol=1e-8)
            for name, key in zip(MOMENTS, "mv"):
                stored, exact = optimizer.state[w][name], own[key]
                half = 2.0 ** (exact.abs().log2().floor() - 8)  # of the distance of two neighbours
                assert stored.dtype == torch.bfloat16
                assert ((stored.double() - exact).abs() <= 1.001 * half + 1e-6 * g.abs().max()).all()
                own[key] = stored.double()

def test_only_one_tensor_at_a_time_has_float32_moments(moments, monkeypatch):
    optimizer, weights = optimizer_of(moments.Optimizer, torch.randn(5, 4))
    seen, real = [], common.Optimizer.step

    def step(self):
        held = [x for state in self.state.values() for name, x in state.items() if name in MOMENTS]
        seen.append(sum(x.dtype == torch.float32 for x in held))
        return real(self)
    monkeypatch.setattr(common.Optimizer, "step", step)
    for _ in range(2):
        for w in weights:
            w.grad = torch.ones_like(w)
        optimizer.clip_and_step()
    assert seen == [0] * 5 + [2] * 5 and same(list(optimizer.param_groups[0]["params"]), weights)

def test_loaded_moments_are_bfloat16_and_the_next_step_is_the_same_to_the_bit(moments):
    """PyTorch alone would load them as float32, the dtype of the weights."""
    one, weights = optimizer_of(moments.Optimizer, torch.randn(3, 40))
    for _ in range(2):
        for w in weights:
            w.grad = torch.randn_like(w)
        one.clip_and_step()
    other, copies = optimizer_of(moments.Optimizer, [w.detach() for w in weights])
    other.load_state_dict(copy.deepcopy(one.state_dict()))  # as from a file
    assert same(one.state_dict(), other.state_dict())
    assert all(other.state[w][name].dtype == torch.bfloat16 for w in copies for name in MOMENTS)
    for w, other_w in zip(weights, copies):
        w.grad = torch.randn_like(w)
        other_w.grad = w.grad.clone()
    one.clip_and_step(), other.clip_and_step()
    assert same([w.detach() for w in weights], [w.detach() for w in copies])
    assert same(one.state_dict(), other.state_dict())

def beside_float32(moments, beta2, steps, smaller):
    """Both optimisers on the same gradients: of 2,000 weights with means and noise of sizes from 1e-6 to
    1e-2, after step 100 times `smaller`. Returns how far apart the weights are, in units of how far
    float32's have moved, and the second moments after steps 150 and 200."""
    torch.manual_seed(0)
    start, sizes, means = 0.02 * torch.randn(2000), 10 ** (4 * torch.rand(2000) - 6), torch.randn(2000)
    pairs = [optimizer_of(cls, [start], beta2=beta2, max_grad_norm=1e9)
             for cls in (common.Optimizer, moments.Optimizer)]
    second = []
    for step in range(1, steps + 1):
        gradient = sizes * (0.3 * means + torch.randn(2000)) * (smaller if step > 100 else 1)
        for optimizer, (w,) in pairs:
            w.grad = gradient.clone()
            optimizer.clip_and_step()
        if step in (150, 200):
            second.append([optimizer.state[w]["exp_avg_sq"].clone() for optimizer, (w,) in pairs])
    exact, ours = (w.detach().double() for _, (w,) in pairs)
    return ((ours - exact).norm() / (exact - start).norm()).item(), *second

@pytest.mark.parametrize("steps, smaller", [(200, 1.0), (200, 0.1), (1000, 0.1)])
def test_the_weights_go_where_float32s_go(steps, smaller, moments):
    apart, _, (exact, ours) = beside_float32(moments, 0.95, steps, smaller)
    assert 0 < apart < 0.004
    assert (ours / exact - 1).abs().max() < 0.08  # a step rounds by .4 % at most, and forgets 5 % of it

def test_with_a_beta2_of_999_the_second_moment_would_stand_still(moments):
    """Where the gradient becomes ten times smaller, float32's falls by 5 % in 50 steps, and ours for no
    weight. In 200 steps the weights do not show it yet, in 1,000 they do."""
    apart, (exact, ours), (exact_after, ours_after) = beside_float32(moments, 0.999, 200, 0.1)
    assert (exact_after / exact).median() < 0.96 and (ours_after < ours).sum() == 0
    assert apart < 0.01 and beside_float32(moments, 0.999, 1000, 0.1)[0] > 0.1

def test_bfloat16_weights_hardly_move(moments):
    """Weights of deviation .02 and --lr 1e-6: 200 steps of the same sign move all float32 weights, and of the
    bfloat16 ones only those below .0005, whose neighbours are at most 2e-6 apart."""
    torch.manual_seed(0)
    start = 0.02 * torch.randn(20000).bfloat16()
    still = []
    for cls, dtype in ((moments.Optimizer, torch.float32), (common.Optimizer, torch.bfloat16)):
        optimizer, (w,) = optimizer_of(cls, [start.to(dtype)], max_grad_norm=1e9)
        moved = torch.zeros(20000, dtype=torch.bool)
        for _ in range(200):
            w.grad = torch.ones_like(w)
            optimizer.clip_and_step()
            moved |= w.detach() != start
        still.append((~moved).float().mean())
        assert dtype == torch.float32 or start[moved].abs().max() < 0.0005
    assert still[0] == 0 and 0.97 < still[1] < 0.99

def test_a_run_resumes_to_the_bit_and_has_no_reference(moments):
    """Nothing of the moments is lost: their rounding is the same with a checkpoint between."""
    flags = "--dataset few.json --prompts 8 --minibatches 2 --eval_problems 1"
    rows = train(moments, f"{flags} --steps 4", out="whole")
    train(moments, f"{flags} --steps 2", out="cut")
    train(moments, "--resume --steps 4", out="cut")
    one, other = ((torch.load(newest(out) / "optimizer.pt"), load_file(newest(out) / "model.safetensors"))
                  for out in ("whole", "cut"))
    assert same(one, other) and one[0].keys() == {"policy"} and not any("kl" in row for row in rows)
    held = [state[name] for state in one[0]["policy"]["state"].values() for name in MOMENTS]
    assert {x.dtype for x in held} == {torch.bfloat16}

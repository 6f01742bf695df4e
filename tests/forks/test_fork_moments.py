"""The fork bf16_moments: AdamW as it is, but for the rounding of moments that are stored as bfloat16."""
import copy
import types

import pytest
import torch
from conftest import same
from patched import fork  # noqa: F401

import common

pytestmark = pytest.mark.slow
MOMENTS = ("exp_avg", "exp_avg_sq")

@pytest.fixture
def moments(fork):  # noqa: F811
    return fork("bf16_moments")

def optimizer_of(cls, weights):
    """An optimiser of copies of some tensors, and the copies."""
    model = torch.nn.ParameterList(torch.nn.Parameter(w.clone()) for w in weights)
    return cls(model, 1e-3, types.SimpleNamespace(warmup_steps=3, max_grad_norm=1.0)), list(model)

def test_a_step_is_adamws_by_hand_and_what_it_stores_is_the_nearest_bfloat16(moments):
    """In float64, with warm-up and clipping, from what the step before stored. The second tensor has no
    gradient in steps 1 and 3."""
    torch.manual_seed(0)
    optimizer, weights = optimizer_of(moments.Optimizer, [0.02 * torch.randn(50, 30), torch.randn(70)])
    found = [{"m": 0, "v": 0, "t": 0} for _ in weights]
    for step in range(9):
        size = 10.0 ** (-3 if step % 2 else 0)  # of norm .04, which is not clipped, and 40, which is
        gradients = [size * torch.randn_like(w) for w in weights]
        if step in (1, 3):
            gradients[1] = None
        for w, g in zip(weights, gradients):
            w.grad = None if g is None else g.clone()
        before, stats = [w.detach().clone() for w in weights], optimizer.clip_and_step()
        norm = sum(g.double().square().sum() for g in gradients if g is not None).sqrt()
        assert stats["lr"][0] == pytest.approx(1e-3 * (1 / 3, 2 / 3, 1)[min(step, 2)])
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

def test_loaded_moments_are_bfloat16(moments):
    """PyTorch alone would load them as float32, the dtype of the weights. test_forks.py resumes a run."""
    one, weights = optimizer_of(moments.Optimizer, torch.randn(3, 40))
    for w in weights:
        w.grad = torch.randn_like(w)
    one.clip_and_step()
    other, copies = optimizer_of(moments.Optimizer, [w.detach() for w in weights])
    other.load_state_dict(copy.deepcopy(one.state_dict()))  # as from a file
    assert same(one.state_dict(), other.state_dict())
    assert all(other.state[w][name].dtype == torch.bfloat16 for w in copies for name in MOMENTS)

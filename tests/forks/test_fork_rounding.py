"""The forks fp16 and bf16_moments. In the one the scale of the loss changes no gradient, but for what float16
would have rounded to 0. The other is AdamW as it is, but for the rounding of moments that are stored as
bfloat16."""
import copy
import types

import pytest
import torch
from conftest import Trainer, flat_gradient, same, settings, tiny_model
from patched import fork  # noqa: F401

import common

pytestmark = pytest.mark.slow

# ---- fp16

@pytest.fixture
def fp16(fork):  # noqa: F811
    return fork("fp16")

def gradient(trainer, scale, adv, **changes):
    trainer.loss_scale.scale = scale
    return trainer.gradients(trainer.rollout | {"adv": adv}, **changes)[0][0]

def test_the_gradient_is_that_of_torchs_scaler_and_near_the_one_in_float32(fp16):
    trainer, scaler = Trainer(fp16, dtype="float16", beta=0.0), torch.amp.GradScaler("cpu")  # 2^16, too
    found, policy = gradient(trainer, 2.0 ** 16, trainer.rollout["adv"]), trainer.policy
    b, = common.micro_batches(next(common.minibatches(trainer.rollout, 1, 2)), 4096)
    logp = common.token_logprobs(policy, b, trainer.args)
    loss, _ = fp16.policy_loss(logp, b["old_logp"], None, b["adv"], b["mask"], 0.2, 0.2, 0.0, "k3")
    scaler.scale(loss / 12).backward()
    scaler.unscale_(torch.optim.SGD(policy.parameters()))
    assert torch.equal(found, flat_gradient(policy))
    policy.zero_grad()
    full = gradient(trainer, 1.0, trainer.rollout["adv"], dtype="float32")
    assert 0 < (found - full).norm() < 0.01 * full.norm()

def test_the_scale_moves_as_torchs_does_and_no_step_is_taken_at_inf(fp16):
    model, other, ours = tiny_model(), torch.zeros(2, requires_grad=True), fp16.LossScale()
    scaler = torch.amp.GradScaler("cpu", init_scale=ours.scale, growth_interval=ours.GROW)
    scaler.scale(torch.ones(()))  # from here on it has a scale
    optimizer, weight = common.Optimizer(model, 1e-3, settings(fp16)), next(model.parameters())
    for step in range(800):
        bad, before = {0: torch.inf, 3: torch.nan, 700: -torch.inf}.get(step, 1.0), weight.detach().clone()
        for p in (weight, other):
            p.grad = torch.ones_like(p)
            p.grad[-1] = bad
        ours.unscale(model), optimizer.clip_and_step()
        scaler.unscale_(torch.optim.SGD([other])), scaler.update()
        assert torch.equal(weight, before) == (bad != 1) and ours.scale == scaler.get_scale()
        assert ours.scale == {0: 2 ** 15, 3: 2 ** 14, 603: 2 ** 17, 700: 2 ** 16}.get(step, ours.scale)

def test_only_what_no_scale_mends_is_a_warning(fp16):
    trainer = Trainer(fp16, dtype="float16", minibatches=2)
    for scale, name in ((2.0 ** 60, "overflow"), (1.0, "skipped")):
        trainer.use_adam(lr=0.1)
        trainer.loss_scale.scale = scale
        trainer.rollout["adv"] *= 1.0 if name == "overflow" else torch.nan
        stats = trainer.update()
        assert {"overflow", "skipped"} & stats.keys() == {name} and stats[name] == 1
        assert stats["loss_scale"] == 0.75 * scale and trainer.loss_scale.scale == scale / 4

# ---- bf16_moments

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

def test_only_one_tensor_at_a_time_has_float32_moments_and_none_that_is_loaded(moments, monkeypatch):
    """PyTorch alone would load them as float32, the dtype of the weights. test_forks.py resumes a run."""
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
    other, _ = optimizer_of(moments.Optimizer, [w.detach() for w in weights])
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))  # as from a file
    assert same(optimizer.state_dict(), other.state_dict())

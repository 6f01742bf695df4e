"""The fork fp16: the scale of the loss changes no gradient, but for what float16 would have rounded to 0."""
import pytest
import torch
from conftest import Trainer, flat_gradient, settings, tiny_model
from patched import fork  # noqa: F401

import common

pytestmark = pytest.mark.slow

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

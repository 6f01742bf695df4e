"""The fork sao, of ppo.py: tokens left out, two lambdas, a critic that is trained first and more often. Its
loss by loops is in vectors/check_vectors.py."""
import pytest
import torch
from check_vectors import gae, token_rewards
from conftest import (ROOT, Recorder, Trainer, generate_holes, loss_of, same, settings, tensor64,
                      tiny_model, train)
from patched import fork  # noqa: F401
from safetensors.torch import load_file

import common
import ppo

pytestmark = pytest.mark.slow

@pytest.fixture
def sao(fork):  # noqa: F811
    return fork("sao")

@pytest.mark.parametrize("A", [1.0, -1.0])
def test_tokens_out_of_the_range_are_left_out_whatever_the_sign_of_their_advantage(A, sao):
    """By hand. Where PPO's min would take a step back, good tokens below the range and bad ones above it,
    there is none either."""
    w, one = tensor64([[0.5, 0.75, 1, 5, 7]]), torch.ones(1, 5)
    rows = {"logp": w.log(), "old_logp": 0 * w, "adv": A * one, "mask": one}
    loss, gradient, stats = loss_of(sao, rows, settings(sao))
    assert gradient[0].tolist() == pytest.approx([0, -0.15 * A, -0.2 * A, -A, 0])
    assert loss.item() == pytest.approx(-1.35 * A) and stats["clip_frac"] == (2, 5)

def test_collect_by_loops(sao, monkeypatch):
    """In the sums of (1). Completions of fewer than 1/alpha tokens have a lambda of 0, and not below. Tokens
    that do not count are stepped over. The old log-probs are the sampler's, here other ones than pi's."""
    generate_holes(monkeypatch)
    real = common.generate

    def generate(*given):
        rollout = real(*given)
        return rollout | {"sampled_logp": rollout["sampled_logp"] - 0.1 * rollout["mask"]}
    monkeypatch.setattr(common, "generate", generate)
    rollout = Trainer(sao, whiten=False, beta=0.2, alpha=0.3, lam=0.8, gamma=0.9).rollout
    below = set()
    assert torch.equal(rollout["old_logp"], rollout["sampled_logp"])
    for i, counts in enumerate(rollout["mask"] > 0):
        old, ref, V = (rollout[name][i, counts].tolist() for name in ("old_logp", "ref_logp", "old_values"))
        paid, n = token_rewards(rollout["rewards"][i].item(), old, ref, 0.2), len(old)
        adv, R = (gae(paid, V, 0.9, lam) for lam in (max(0, 1 - 1 / (0.3 * n)), 0.8))
        below |= {1 / (0.3 * n) > 1}
        assert rollout["adv"][i, counts].tolist() == pytest.approx(adv, abs=1e-5)
        assert rollout["returns"][i, counts].tolist() == pytest.approx(
            [x + v for x, v in zip(R, V)], abs=1e-5)
    assert below == {True, False}

def test_the_critic_takes_its_steps_of_the_gradient_of_ppos(sao):
    """K times two passes of three minibatches; ppo.py's own gradient is tested in test_ppo.py."""
    trainer, rollout = Trainer(sao, minibatches=3, epochs=2, critic_steps=3).moved()
    ours, theirs, policy = Recorder(trainer.critic), Recorder(trainer.critic), Recorder(trainer.policy)
    stats = sao.update_critic(trainer.critic, ours, rollout, trainer.args)
    expected = ppo.update(trainer.policy, trainer.critic, policy, theirs, rollout, trainer.args)
    assert len(ours.gradients) == 18 and ours.gradients[0].norm() > 0
    found, right = torch.stack(ours.gradients), torch.stack(theirs.gradients * 3)
    torch.testing.assert_close(found, right, rtol=1e-9, atol=0)
    assert stats == pytest.approx({"value_loss": expected["value_loss"]})

def test_the_critics_attention_is_not_trained(family, sao):
    critic = sao.make_critic(tiny_model(family))
    frozen = {name for name, p in critic.named_parameters() if not p.requires_grad}
    named = {name for name, _ in tiny_model(family).base_model.named_parameters() if "attn." in name}
    assert frozen == named and 8 <= len(frozen) < 20

def test_the_critic_is_trained_first_and_then_the_policy_learns_the_toy(sao):
    """The policy stays as it was before --policy_start."""
    flags = "--dataset few.json --steps 4 --prompts 64 --policy_start 2 --warmup_steps 0 --eval_problems 1"
    rows = train(sao, f"{flags} --save_every 1")[1:]
    start = load_file(ROOT / "tests" / "toy" / "model.safetensors")
    first, second = (load_file(f"run/step-{step}/model.safetensors") for step in (1, 2))
    assert same(start, first) and not same(start, second) and all("value_loss" in row for row in rows)
    assert ["loss" in row for row in rows] == [False, True, True, True]
    rewards = [row["reward"] for row in rows]
    assert max(rewards[:2]) < 0.65 and rewards[-1] > max(rewards[:2]) + 0.15

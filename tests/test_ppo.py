"""PPO beyond the worked numbers of test_equations.py: collect and update of both models from whole logits.
Whole steps against loops over single numbers: vectors/test_vectors.py."""
import pytest
import torch
from check_vectors import gae
from conftest import (TINY, Trainer, full_logprobs, generate_holes, random_batch, settings, tensor64,
                      tiny_model, train)

import ppo

# --- the critic

def new_critic(head=0.0, bias=0.0):
    """A model and a new critic, whose head may be moved from where it starts."""
    policy = tiny_model()
    critic = ppo.make_critic(policy)
    torch.manual_seed(7)
    critic.score.weight.data += head * torch.randn(1, 16)
    critic.score.bias.data += bias
    return policy, critic

def test_values_are_exactly_zero_at_the_start():
    """A random head would make the first advantages noise: it is zero, on a copy of the policy; it learns."""
    policy, model = new_critic()
    values = ppo.token_values(model, random_batch(5), settings(ppo))
    assert (values == 0).all()
    for name, weight in policy.base_model.named_parameters():
        ours = model.get_parameter(name)
        assert torch.equal(ours, weight) and ours.data_ptr() != weight.data_ptr()
    values.sum().backward()
    assert model.score.weight.grad.abs().max() > 0

def test_v_t_is_the_value_of_the_state_before_token_t():
    """Against the critic run on each prefix alone, in value and in gradient."""
    (_, model), batch, push = new_critic(head=1.0), random_batch(6, seed=3), torch.randn(6, 12)
    values = ppo.token_values(model.double(), batch, settings(ppo))
    alone, weights = torch.zeros_like(values), list(model.parameters())
    for i, start in enumerate(batch["prompt_length"].tolist()):
        for t in range(int(batch["mask"][i].sum())):
            prefix = batch["ids"][i:i + 1, :start + t]
            alone[i, t] = model.score(model(prefix).last_hidden_state[0, -1]).squeeze()
    torch.testing.assert_close(values, alone, rtol=1e-6, atol=1e-6)
    ours, theirs = (torch.autograd.grad((x * push[:, :x.shape[1]]).sum(), weights) for x in (values, alone))
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    assert values.std() > 0.1

def test_values_in_bfloat16_are_not_rounded():
    """Above 1 bfloat16 has only steps of .0078: too coarse for advantages and for small updates."""
    _, model = new_critic(head=0.01, bias=1.0)
    values = ppo.token_values(model, random_batch(6), settings(ppo, dtype="bfloat16")).detach()
    assert values.dtype == torch.float32 and (values.bfloat16().float() != values).float().mean() > 0.3

# --- collect, update, a run

@pytest.mark.parametrize("group_size, whiten, beta, some", [
    (1, False, 0.2, False), (3, True, 0.0, False), (3, True, 0.2, True)])
def test_collect_by_loops(group_size, whiten, beta, some, monkeypatch):
    """From log-probs and values to advantages, returns and what is logged of them, with nothing of ppo.py. If
    some tokens do not count, the last that does has the reward, and GAE is that of a list without them."""
    if some:
        generate_holes(monkeypatch)
    trainer = Trainer(ppo, group_size=group_size, whiten=whiten, beta=beta, gamma=0.9, lam=0.8)
    trainer.reference = trainer.reference if beta else None
    trainer.collect()
    rollout, stats, mask = trainer.rollout, trainer.stats, trainer.rollout["mask"]
    rewards, adv, to_come = torch.zeros(3, *mask.shape).double()
    with torch.no_grad():
        V = ppo.token_values(trainer.critic, rollout, trainer.args).double()
        logp, ref = (full_logprobs(model or trainer.policy, rollout, 0.6)
                     for model in (trainer.policy, trainer.reference))
    for i, counts in enumerate(mask > 0):
        rewards[i, counts] = -beta * (logp - ref)[i, counts]
        rewards[i, counts.nonzero()[-1]] += trainer.reward(None, [rollout["texts"][i]])[0]
        lists = rewards[i, counts].tolist(), V[i, counts].tolist()
        adv[i, counts] = tensor64(gae(*lists, 0.9, 0.8))
        to_come[i, counts] = tensor64(gae(lists[0], [0.0] * len(lists[0]), 0.9, 1.0))  # without V
    returns, tokens = adv + V, mask > 0
    if whiten:
        adv = (adv - adv[tokens].mean()) / adv[tokens].std(correction=0) * mask
    for name, expected in {"old_logp": logp, "old_values": V, "returns": returns, "adv": adv}.items():
        torch.testing.assert_close(rollout[name].double(), expected, rtol=0, atol=1e-4, msg=name)
    if beta:
        x = (ref - logp)[tokens]
        assert stats["kl"] == pytest.approx((x.exp() - x - 1).mean().item(), rel=1e-3)
    explained = 1 - (to_come - V)[tokens].var() / to_come[tokens].var()
    assert stats["explained_variance"] == pytest.approx(float(explained), abs=1e-4)
    assert ("ref_logp" in rollout, "kl" in stats) == (beta > 0, beta > 0)

def test_no_explained_variance_is_logged_of_equal_rewards():
    """Their variance is rounding noise. A variance of one number is NaN."""
    for shape in ((3, 4), (1, 1)):
        returns = 0.7 + 1e-7 * torch.randn(shape)
        assert ppo.explained_variance(returns, torch.randn(shape), torch.ones(shape)) == {}

def test_policy_and_critic_are_trained_apart():
    """One optimiser or one clipped norm for both would let the loss of the one move, or starve, the other."""
    def weights_after(vf_coef=0.1, **scales):
        trainer = Trainer(ppo, vf_coef=vf_coef, minibatches=2)
        trainer.rollout |= {name: scale * trainer.rollout[name] for name, scale in scales.items()}
        trainer.use_adam(lr=0.01)
        trainer.update()
        return [torch.cat([p.detach().flatten() for p in model.parameters()])
                for model in (trainer.policy, trainer.critic)]
    policy, value = weights_after()
    for scales in ({"returns": 100.0}, {"returns": -1.0, "vf_coef": 5.0}):
        other = weights_after(**scales)
        assert torch.equal(other[0], policy) and not torch.equal(other[1], value)
    other = weights_after(adv=-50.0)
    assert torch.equal(other[1], value) and not torch.equal(other[0], policy)

def test_the_critics_gradient_of_an_update():
    """It has the weight vf_coef, and old values do not move along. By loops: vectors/test_vectors.py."""
    trainer, rollout = Trainer(ppo, vf_coef=0.3, eps_value=0.02).moved()
    V, V_old = ppo.token_values(trainer.critic, rollout, trainer.args), rollout["old_values"]
    held = torch.maximum(torch.minimum(V, V_old + 0.02), V_old - 0.02)
    R, mask = rollout["returns"], rollout["mask"]
    error = 0.5 * torch.maximum((V - R) ** 2, (held - R) ** 2) * mask
    L = (error.sum(1) / mask.sum(1)).mean()
    expected = torch.autograd.grad(0.3 * L, list(trainer.critic.parameters()), materialize_grads=True)
    expected = torch.cat([g.flatten() for g in expected])
    [gradient], stats = trainer.gradients(rollout)
    torch.testing.assert_close(gradient[-len(expected):], expected, rtol=1e-6, atol=1e-9)
    assert stats["value_loss"] == pytest.approx(L.item(), rel=1e-5)

def test_a_run_has_adams_epsilon_of_the_papers_and_a_learning_rate_for_each_model(here, spread):
    train(ppo, TINY + " --value_lr 0.02")
    states = torch.load("run/state.pt")
    for name, lr in [("optimizer", 0.01), ("critic_optimizer", 0.02)]:
        [group] = states[name]["param_groups"]
        assert (group["eps"], group["lr"]) == (1e-5, lr)

"""PPO's critic, and its collect. For its equations, see test_equations.py."""
import copy

import pytest
import torch
from conftest import Trainer, random_batch, same, settings, tiny_model

import ppo

def new_critic(head=0.0, bias=0.0):
    """A model and a new critic. Its head may be moved away from its start."""
    policy = tiny_model()
    critic = ppo.make_critic(policy)
    torch.manual_seed(7)
    critic.score.weight.data += head * torch.randn(1, 16)
    critic.score.bias.data += bias
    return policy, critic

def test_values_are_exactly_zero_at_the_start():
    """On a copy of the policy, and the head has a gradient. A random head would make the first A noise."""
    policy, model = new_critic()
    values = ppo.token_values(model, random_batch(5), settings(ppo))
    assert (values == 0).all()
    for name, weight in policy.base_model.named_parameters():
        ours = model.get_parameter(name)
        assert torch.equal(ours, weight) and ours.data_ptr() != weight.data_ptr()
    values.sum().backward()
    assert model.score.weight.grad.abs().max() > 0

def test_v_t_is_the_value_of_the_state_before_token_t():
    (_, model), batch = new_critic(head=1.0), random_batch(6, seed=3)
    values = ppo.token_values(model.double(), batch, settings(ppo))
    alone = torch.zeros_like(values)
    for i, start in enumerate(batch["prompt_length"].tolist()):
        for t in range(int(batch["mask"][i].sum())):
            prefix = batch["ids"][i:i + 1, :start + t]
            alone[i, t] = model.score(model(prefix).last_hidden_state[0, -1]).squeeze()
    torch.testing.assert_close(values, alone, rtol=1e-6, atol=1e-6)
    assert values.std() > 0.1

def test_values_in_bfloat16_are_not_rounded():
    """Above 1, bfloat16 has steps of .0078: too coarse for advantages and for small updates."""
    _, model = new_critic(head=0.01, bias=1.0)
    values = ppo.token_values(model, random_batch(6), settings(ppo, dtype="bfloat16")).detach()
    assert values.dtype == torch.float32 and (values.bfloat16().float() != values).float().mean() > 0.3

def test_what_collect_computes_one_number_at_a_time():
    """Rewards (4), A and R (1), and G, the rewards to come, by which V is judged. R has the plain A."""
    beta, gamma, lam = 0.3, 0.9, 0.7
    trainer = Trainer(ppo, beta=beta, gamma=gamma, lam=lam)
    rollout, tokens = trainer.rollout, trainer.rollout["mask"] > 0
    A, R, V, G = torch.zeros(4, *tokens.shape)
    for i, n in enumerate(rollout["completion_length"].tolist()):
        next_A = next_V = next_G = 0.0
        for t in reversed(range(n)):
            old, ref, V[i, t] = (rollout[name][i, t] for name in ("old_logp", "ref_logp", "old_values"))
            r = (rollout["rewards"][i] if t == n - 1 else 0.0) - beta * (old - ref)
            A[i, t] = next_A = r + gamma * next_V - V[i, t] + gamma * lam * next_A
            G[i, t] = next_G = r + gamma * next_G
            next_V, R[i, t] = V[i, t], A[i, t] + V[i, t]
    A = (A - A[tokens].mean()) / A[tokens].std(correction=0) * rollout["mask"]
    torch.testing.assert_close((rollout["adv"], rollout["returns"]), (A, R), rtol=1e-4, atol=1e-5)
    explained = 1 - (G - V)[tokens].var() / G[tokens].var()
    assert trainer.stats["explained_variance"] == pytest.approx(explained.item(), rel=1e-4)

def test_policy_and_critic_are_trained_apart():
    """With one optimizer, or one clipped norm for both, the loss of one would move or starve the other."""
    def weights_after(**scales):
        trainer = Trainer(ppo, minibatches=2, max_grad_norm=1.0)
        trainer.rollout |= {name: scale * trainer.rollout[name] for name, scale in scales.items()}
        trainer.use_adam(lr=0.01)
        trainer.update()
        return [copy.deepcopy(model.state_dict()) for model in (trainer.policy, trainer.critic)]
    policy, critic = weights_after()
    for scales, moved in (({"returns": 100.0}, [False, True]), ({"adv": -50.0}, [True, False]),
                          ({"old_values": 100.0}, [False, True])):
        other = weights_after(**scales)
        assert [not same(other[0], policy), not same(other[1], critic)] == moved

"""The fork opd: its advantage teaches the policy the teacher's distribution. Means are exact."""
import pytest
import torch
from conftest import (TINY, char_tokenizer, save_tiny, settings, tensor64, tiny_model, tiny_tokenizer,
                      train)
from patched import fork  # noqa: F401

import grpo

pytestmark = pytest.mark.slow

@pytest.fixture
def opd(fork):  # noqa: F811
    return fork("opd")

def test_the_mean_gradient_is_minus_that_of_the_kl_to_the_teacher(opd):
    """Exact means over four tokens, at pi = pi_old; the KL's gradient by autograd of the KL itself."""
    z, teacher = tensor64([0.3, -0.5, 1.1, 0]).requires_grad_(), tensor64([0, 0.4, 0.2, -0.7]).log_softmax(0)
    logp, one = z.log_softmax(0), torch.ones(1, 1).double()
    old, mean = logp.detach(), 0
    for a in range(4):
        row = [x[a].view(1, 1) for x in (logp, old, teacher, teacher - old)]
        mean = mean + old[a].exp() * opd.policy_loss(*row, one, 0.2, 0.2, 0.0, "k3")[0]  # -J
    found, = torch.autograd.grad(mean, z, retain_graph=True)
    kl, = torch.autograd.grad((logp.exp() * (logp - teacher)).sum(), z)
    torch.testing.assert_close(found, kl, rtol=0, atol=1e-12)
    assert kl.abs().max() > 0.1

def test_the_advantage_is_the_teachers_log_prob_minus_the_policys(opd):
    """At the run's temperature, whatever the reward pays. Nothing is left out: no A is 0 for a whole row."""
    policy, teacher = tiny_model(vocab_size=8), tiny_model(vocab_size=8, seed=1)
    args = settings(opd, prompts=2, minibatches=1, max_new_tokens=6, temperature=0.6)
    problems = [{"prompt": ids} for ids in ([3, 4], [5])]
    rollout, _ = opd.collect(policy, teacher, tiny_tokenizer(8), problems, lambda p, t: [1.0] * len(t), args)
    for i, n in enumerate(rollout["mask"].sum(1).long().tolist()):
        ids = rollout["ids"][i, :rollout["attention"][i].sum()]
        both = [(m(ids[None]).logits[0] / 0.6).log_softmax(-1)[:-1].gather(1, ids[1:, None])[-n:, 0]
                for m in (teacher, policy)]
        torch.testing.assert_close(rollout["adv"][i, :n], both[0] - both[1], rtol=0, atol=1e-5)
    assert rollout["has_gradient"].all()

def test_the_toy_comes_nearer_to_its_teacher(opd):
    """The teacher is the toy after four steps of GRPO."""
    few = "--dataset few.json --steps 4 --warmup_steps 0 --lr 1e-3 --eval_problems 1"
    train(grpo, f"{few} --prompts 16", out="teacher")
    rows = train(opd, f"{few} --prompts 64 --teacher teacher/step-4")
    assert rows[-1]["kl"] < 0.3 * rows[1]["kl"]

def test_a_teacher_with_other_or_fewer_tokens_is_refused(opd, here):
    """Its log-probs would be of other tokens; or pi could draw an unused id that the teacher lacks."""
    refused = {save_tiny("other"): "its vocabulary is not",
               save_tiny("short", "qwen3", char_tokenizer(), vocab_size=102): "102 embeddings, .* has 104"}
    for teacher, said in refused.items():
        with pytest.raises(AssertionError, match=said):
            train(opd, f"{TINY} --group_size 1 --teacher {teacher}", out=f"run_{teacher}")

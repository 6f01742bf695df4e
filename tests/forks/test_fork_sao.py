"""The fork sao, of ppo.py: tokens left out, two lambdas, a critic that is trained first and more often."""
import math
import shutil
import subprocess
import sys

import pytest
import torch
from conftest import (ROOT, Recorder, Trainer, generate_holes, loss_of, newest, random_rows, same,
                      settings, spy, tiny_model, train)
from patched import copy_to, module_of
from safetensors.torch import load_file

import common
import ppo

pytestmark = pytest.mark.slow

def sao_in(folder):
    """Write the patched ppo.py to folder/sao.py, and return its path."""
    path = shutil.copy(ROOT / "ppo.py", folder / "sao.py")
    subprocess.run(["patch", "-s", "-F0", path, ROOT / "tests" / "forks" / "sao.patch"], check=True)
    return path

@pytest.fixture
def sao(tmp_path, monkeypatch):
    """The patched ppo.py. few.json has problems of the toy."""
    monkeypatch.chdir(tmp_path)
    lines = (ROOT / "tests" / "toy" / "train.jsonl").read_text().splitlines(True)
    (tmp_path / "few.json").write_text("".join(lines[:1500]))
    return module_of(sao_in(tmp_path))

def test_tokens_out_of_the_range_are_left_out_whatever_the_sign_of_their_advantage(sao):
    """Token by token in floats. The push of a token is the paper's: f(w) A, of f(w) A log pi. Where PPO's min
    would take a step back, good tokens below the range and bad ones above it, there is none either."""
    rows = random_rows(3, lengths=(8, 1, 4, 7, 9, 3), spread=1.5)
    rows["adv"] = torch.randn_like(rows["logp"])
    loss, gradient, stats = loss_of(sao, rows, settings(sao, eps_low=0.3, eps_high=2.0))
    total, left_out = 0, []
    for i, counts in enumerate(rows["mask"] > 0):
        assert (gradient[i, ~counts] == 0).all()
        for t in counts.nonzero().flatten().tolist():
            w, A = math.exp(rows["logp"][i, t] - rows["old_logp"][i, t]), rows["adv"][i, t].item()
            f = w if 0.7 < w < 3 else 0
            left_out += [(A > 0, w > 1)] if f == 0 else []
            total += f * A / sum(counts).item()
            assert -gradient[i, t].item() == pytest.approx(f * A / sum(counts).item())
    assert loss.item() == pytest.approx(-total) and len(set(left_out)) == 4
    assert stats["clip_frac"] == (len(left_out), rows["mask"].sum())

@pytest.mark.parametrize("beta, some", [(0.0, False), (0.2, True)])
def test_collect_by_loops(beta, some, sao, monkeypatch):
    """In the sums of (1). Completions of fewer than 1/alpha tokens have a lambda of 0, and not below. Tokens
    that do not count are stepped over. The old log-probs are the sampler's, here other ones than pi's."""
    if some:
        generate_holes(monkeypatch)
    real = common.generate

    def generate(*given):
        rollout = real(*given)
        return rollout | {"sampled_logp": rollout["sampled_logp"] - 0.1 * rollout["mask"]}
    monkeypatch.setattr(common, "generate", generate)
    asked = spy(monkeypatch, common, "token_logprobs")
    trainer = Trainer(sao, whiten=False, beta=beta, alpha=0.3, lam=0.8, gamma=0.9)
    if beta == 0:
        trainer.reference, _ = None, asked.clear()
        trainer.collect()
    rollout, below = trainer.rollout, set()
    assert torch.equal(rollout["old_logp"], rollout["sampled_logp"])
    assert all(one.model is trainer.reference for one in asked) and len(asked) == (beta > 0)
    for i, counts in enumerate(rollout["mask"] > 0):
        old, V = (rollout[name][i, counts].tolist() for name in ("old_logp", "values"))
        n, r = len(old), [0.0] * len(old)
        if beta:
            r = [-beta * (a - b) for a, b in zip(old, rollout["ref_logp"][i, counts].tolist())]
        r[-1] += rollout["rewards"][i].item()
        delta = [r[t] + 0.9 * (V + [0])[t + 1] - V[t] for t in range(n)]
        adv, R = ([sum((0.9 * lam) ** k * d for k, d in enumerate(delta[t:])) for t in range(n)]
                  for lam in (max(0, 1 - 1 / (0.3 * n)), 0.8))
        below |= {1 / (0.3 * n) > 1}
        assert rollout["adv"][i, counts].tolist() == pytest.approx(adv, abs=1e-5)
        assert rollout["returns"][i, counts].tolist() == pytest.approx(
            [x + v for x, v in zip(R, V)], abs=1e-5)
    assert below == {True, False}

def test_the_critic_takes_its_steps_of_the_gradient_of_ppos(sao):
    """K times two passes of three minibatches; ppo.py's own gradient is tested in test_ppo.py."""
    trainer, rollout = Trainer(sao, minibatches=3, epochs=2, critic_steps=3).moved()
    ours, theirs, policy = Recorder(trainer.critic), Recorder(trainer.critic), Recorder(trainer.policy)
    stats = sao.update_critic(trainer.critic, {"critic": ours}, rollout, trainer.args)
    optimizers = {"policy": policy, "critic": theirs}
    expected = ppo.update(trainer.policy, trainer.critic, optimizers, rollout, trainer.args)
    assert len(ours.gradients) == 18 and ours.gradients[0].norm() > 0
    found, right = torch.stack(ours.gradients), torch.stack(theirs.gradients * 3)
    torch.testing.assert_close(found, right, rtol=1e-9, atol=0)
    assert stats == pytest.approx({"value_loss": expected["value_loss"]})

def test_the_critics_attention_is_not_trained(family, sao):
    critic = sao.make_critic(tiny_model(family))
    frozen = {name for name, p in critic.named_parameters() if not p.requires_grad}
    named = {name for name, _ in tiny_model(family).base_model.named_parameters() if "attn." in name}
    assert frozen == named and 8 <= len(frozen) < 20

def test_the_critic_is_trained_first_and_a_run_resumes_to_the_bit(sao):
    """The policy stays as it was before --policy_start, in a checkpoint between, too."""
    flags = "--dataset few.json --prompts 8 --eval_problems 1 --warmup_steps 0 --epochs 1 --policy_start 3"
    rows = train(sao, f"{flags} --steps 4", out="whole")
    train(sao, f"{flags} --steps 2", out="cut")
    start, early = (load_file(path / "model.safetensors") for path in (ROOT / "tests" / "toy", newest("cut")))
    assert same(start, early)
    train(sao, "--resume --steps 4", out="cut")
    one, other = ((torch.load(newest(out) / "optimizer.pt"), load_file(newest(out) / "model.safetensors"))
                  for out in ("whole", "cut"))
    assert same(one, other) and not same(one[1], start)
    assert ["value_loss" in row for row in rows] == [False] + [True] * 4
    assert ["loss" in row for row in rows] == [False] * 3 + [True] * 2

def test_it_learns_the_toy(sao):
    flags = "--dataset few.json --steps 4 --prompts 64 --policy_start 2 --warmup_steps 0 --eval_problems 1"
    rewards = [row["reward"] for row in train(sao, flags)[1:]]
    assert max(rewards[:2]) < 0.65 and rewards[-1] > max(rewards[:2]) + 0.15

def test_it_passes_the_tests_of_every_script(tmp_path, monkeypatch):
    """But that old and new log-probs are equal in bfloat16: here the old ones are the sampler's."""
    monkeypatch.chdir(tmp_path)
    copy_to(tmp_path, "common.py", "tests/conftest.py", "tests/test_every_script.py")
    sao_in(tmp_path)
    chosen = "not learns and not (old_and_new and bfloat16)"
    done = subprocess.run([sys.executable, "-m", "pytest", "-q", "-k", chosen], stdout=subprocess.PIPE)
    assert done.returncode == 0, done.stdout.decode()

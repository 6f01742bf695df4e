"""dppo.patch, maxrl.patch and gdpo.patch: what their papers say, in plain loops over rows and tokens, and
what people got wrong in them. test_forks.py trains the toy with each, and runs test_every_script.py on each.
"""
import itertools
import math
import statistics

import pytest
import torch
from conftest import Trainer, call, random_rows, settings, slopes, spy, train
from patched import fork  # noqa: F401
from test_forks import collected

import common

pytestmark = pytest.mark.slow

# ---- DPPO

def divergence(kind, pi, mu):
    """Of two distributions over two outcomes, this token and any other: half of what all outcomes differ by,
    or sum_x mu(x) log(mu(x) / pi(x))."""
    outcomes = [(pi, mu), (1 - pi, 1 - mu)]
    if kind == "tv":
        return sum(abs(p - m) for p, m in outcomes) / 2
    return sum(m * math.log(m / p) for p, m in outcomes)

@pytest.mark.parametrize("kind, delta", [("tv", 0.2), ("kl", 0.05)])
def test_dppos_loss_and_gradient_are_those_of_the_paper(kind, delta, fork):  # noqa: F811
    """On ragged rows, by finite differences, with the KL to pi_ref. Good and bad tokens lie within delta, too
    far away, and too far on the side to which A pulls them back. old_logp is not asked for."""
    module = fork("dppo")
    assert settings(module).delta == 0.2 and settings(module).beta == 0
    assert module.parse_args(["--divergence", "kl"]).delta == 0.05
    args = settings(module, divergence=kind, delta=delta, beta=0.04)
    given = random_rows(1, lengths=(20, 1, 17, 2, 18, 12), spread=0) | {"args": args}
    given["sampled_logp"] = -given["sampled_logp"].abs() * 0.8 - 0.05
    given["logp"] = (given["sampled_logp"] + 1.2 * torch.randn_like(given["mask"])).clamp(max=-0.01)
    del given["old_logp"]
    given["logp"][given["mask"] == 0] = 900.0
    seen = set()

    def J(x):
        total = 0
        for i, counts in enumerate(given["mask"] > 0):
            A = given["adv"][i, 0].item()
            rows = (rows[i, counts].tolist() for rows in (x, given["sampled_logp"], given["ref_logp"]))
            for logp, sampled, ref in zip(*rows):
                pi, mu = math.exp(logp), math.exp(sampled)
                D, pushed = divergence(kind, pi, mu), pi > mu if A > 0 else pi < mu
                assert abs(D - delta) > 1e-4
                seen.add((A > 0, D > delta, pushed))
                gain = 0 if D > delta and pushed else pi / mu * A
                gain -= 0.04 * (math.exp(ref - logp) - (ref - logp) - 1)
                total += gain / counts.sum().item()
        return total
    x = given["logp"].clone().requires_grad_()
    loss, stats = call(module.policy_loss, given | {"logp": x})
    assert -loss.item() == pytest.approx(J(x.detach()))
    gradient, expected = -torch.autograd.grad(loss, x)[0], slopes(J, x.detach())
    torch.testing.assert_close(gradient, expected, rtol=1e-5, atol=1e-7)
    assert len(seen) == 8 and 3 < stats["clip_frac"][0] < given["mask"].sum() - 3

@pytest.mark.parametrize("kind, mu, pi, A, kept", [
    ("tv", 1e-5, 1e-3, 1, True), ("kl", 1e-5, 1e-3, 1, True),  # 100 times as likely, and yet rare
    ("tv", 0.5, 0.75, 1, False), ("kl", 0.3, 0.6, 1, False), ("tv", 0.5, 0.25, -1, False),
    ("tv", 0.5, 0.25, 1, True), ("tv", 0.5, 0.75, -1, True), ("kl", 0.6, 0.3, 1, True),  # back to mu
    ("kl", 0.01, 0.07, 1, True),  # .042; .078 is the KL the other way round
    ("kl", 1.0, 1.0, 1, True), ("kl", 1 - 1e-7, 1.0, 1, True), ("kl", 1.0, 0.5, -1, False)])
def test_dppo_by_hand(kind, mu, pi, A, kept, fork):  # noqa: F811
    """A token alone, in float32, where a log-prob near 0 rounds to 0: the gradient of J is w A, or 0."""
    module, one = fork("dppo"), torch.ones(1, 1)
    args = settings(module, divergence=kind, delta={"tv": 0.2, "kl": 0.05}[kind])
    x = (one * math.log(pi)).requires_grad_()
    given = {"logp": x, "sampled_logp": one * math.log(mu), "ref_logp": None, "adv": A * one, "mask": one}
    loss, _ = call(module.policy_loss, given | {"args": args})
    gradient = -torch.autograd.grad(loss, x)[0].item()
    assert gradient == pytest.approx(pi / mu * A * kept, rel=1e-5)
    assert -loss.item() == pytest.approx(pi / mu * A * kept, rel=1e-5)

def test_what_dppo_drops_a_clip_with_the_same_bound_drops_too(fork):  # noqa: F811
    """As |pi - mu| = mu |w - 1|, and mu is at most 1."""
    module, other = fork("dppo"), fork("rloo")
    given = random_rows(2, lengths=(40, 40), spread=1.0)
    given["sampled_logp"] = given["old_logp"] = -given["old_logp"].abs()
    given["logp"] = -given["logp"].abs()
    zeros = []
    for script in (module, other):
        x = given["logp"].clone().requires_grad_()
        loss, _ = call(script.policy_loss, given | {"logp": x, "args": settings(script, beta=0.0)})
        zeros.append(torch.autograd.grad(loss, x)[0] == 0)
    assert (zeros[0] <= zeros[1]).all() and zeros[0].sum() < zeros[1].sum() - 10

def test_dppos_update_is_against_the_sampler(fork):  # noqa: F811
    """With the trainer's log-probs replaced by nonsense nothing changes; a sampler that found its tokens half
    as likely doubles all ratios. The gradient is divided by the rows."""
    module = fork("dppo")
    trainer, rollout = Trainer(module, delta=2.0).moved()
    logp = common.token_logprobs(trainer.policy, rollout, trainer.args)
    ratio = (logp - rollout["sampled_logp"]).exp() * rollout["mask"] * rollout["adv"]
    loss = -(ratio.sum(1) / rollout["mask"].sum(1)).mean()
    expected = torch.autograd.grad(loss, list(trainer.policy.parameters()))
    expected = torch.cat([g.flatten() for g in expected])
    old = torch.full_like(rollout["old_logp"], 7.0)
    half = rollout["sampled_logp"] - math.log(2) * rollout["mask"]
    for changes, factor in (({"old_logp": old}, 1), ({"sampled_logp": half}, 2)):
        [gradient], _ = trainer.gradients(rollout | changes)
        torch.testing.assert_close(gradient, factor * expected, rtol=1e-6, atol=1e-9)

# ---- MaxRL

@pytest.mark.parametrize("G, p", [(2, 0.3), (4, 0.1), (5, 0.9)])
def test_maxrls_mean_gradient_is_that_of_the_series_of_log_p(G, p, fork):  # noqa: F811
    """log p = -sum_k (1 - p)^k / k. Of all groups of G answers, right with probability p, the mean of
    1/G sum_i A_i grad log pi(o_i) is the gradient of the first G - 1 terms. Without the 1/G it would be G
    times that. Here p = 1 / (1 + exp(-x)), and grad is by x."""
    module, mean = fork("maxrl"), 0
    for right in itertools.product((0, 1), repeat=G):
        chance = math.prod(p if r else 1 - p for r in right)
        A = module.group_advantages(torch.tensor(right, dtype=torch.float64), G).tolist()
        mean += chance * sum(a * (r - p) for a, r in zip(A, right)) / G
    series = lambda x: -sum((1 - 1 / (1 + math.exp(-x))) ** k / k for k in range(1, G))  # noqa: E731
    x, h = math.log(p / (1 - p)), 1e-6
    assert mean == pytest.approx((series(x + h) - series(x - h)) / (2 * h))

@pytest.mark.parametrize("right, expected", [
    ([1, 0, 0, 0], [3, -1, -1, -1]), ([1, 1, 0, 0], [1, 1, -1, -1]), ([1, 1, 1, 0], [1 / 3] * 3 + [-1]),
    ([0, 0, 0, 0], [0, 0, 0, 0]), ([1, 1, 1, 1], [0, 0, 0, 0]), ([3, 0, 0, 0], [3, -1, -1, -1])])
def test_maxrls_advantages_by_hand(right, expected, fork):  # noqa: F811
    """Exactly: one right answer of G gets G - 1, with no constant in the denominator. No right one gives 0,
    not 0/0. Twice the rewards are the same advantages. Two groups do not mix."""
    found = fork("maxrl").group_advantages(torch.tensor([*right, 0.0, 1, 0, 1]), 4)
    assert found.tolist() == pytest.approx([*expected, -1, 1, -1, 1], rel=1e-6, abs=0)

@pytest.mark.parametrize("rewards", [[-1.0, 0, 0, 0], [1.0, -1, -1, -1], [5.0, -0.1, 1, 1]])
def test_maxrl_refuses_rewards_below_0(rewards, fork):  # noqa: F811
    """With a negative mean the best answer would get the least advantage, in silence."""
    with pytest.raises(AssertionError, match="pay 0 or more"):
        fork("maxrl").group_advantages(torch.tensor(rewards), 4)

def test_maxrls_update_is_the_mean_of_the_right_less_the_mean_of_all(fork):  # noqa: F811
    """1/(G mean(r)) sum_i (r_i - mean(r)) S_i of the paper is the mean of S over the right answers, less the
    mean of S over all, where S_i is the gradient of a completion's mean log pi. Averaged over groups, this is
    the gradient of an update at w = 1; the 1/N is in it."""
    trainer = Trainer(fork("maxrl"), beta=0.0, group_size=8)
    trainer.reward = lambda *_: [float(i < right) for right in (0, 1, 2, 5, 7, 8) for i in range(8)]
    trainer.collect()
    rewards = trainer.rollout["rewards"].view(-1, 8)
    rollout = {name: x for name, x in trainer.rollout.items() if torch.is_tensor(x)}
    every = rollout | {"has_gradient": torch.ones_like(rollout["has_gradient"])}
    S = common.token_logprobs(trainer.policy, every, trainer.args).sum(1) / rollout["mask"].sum(1)
    gains = [group[r > 0].mean() - group.mean() for group, r in zip(S.view(-1, 8), rewards) if r.any()]
    expected = torch.autograd.grad(-sum(gains) / len(rewards), list(trainer.policy.parameters()))
    [gradient], _ = trainer.gradients(rollout)
    torch.testing.assert_close(gradient, torch.cat([g.flatten() for g in expected]), rtol=1e-4, atol=1e-6)

# ---- GDPO

def advantages(module, monkeypatch, answers, forms, G, **flags):
    """Those of `collect` in gdpo, for completions that earn what is given."""
    monkeypatch.setattr(module, "form_reward", lambda *_: forms)
    given = {"group_size": G, "beta": 0.0} | flags
    rollout, stats = collected(module, monkeypatch, answers, [2] * len(answers), **given)
    weight = flags.get("form_weight", 0.1)
    assert rollout["rewards"].tolist() == pytest.approx([a + weight * f for a, f in zip(answers, forms)])
    assert stats["form_reward"] == pytest.approx(statistics.mean(forms))
    assert torch.equal(rollout["has_gradient"], rollout["adv"][:, 0] != 0)
    return rollout["adv"][:, 0].tolist()

def z_scores(r):
    """Of one reward in one group."""
    return [0 if max(r) == min(r) else (x - statistics.mean(r)) / statistics.stdev(r) for x in r]

@pytest.mark.parametrize("answers, forms, G, weight", [
    ([1, 0, 0, 0, 1, 1, 0, 1], [0, 1, 1, 0, 1, 0, 0, 0], 4, 1.0),
    ([1, 0, 0, 1, 1, 1, 0, 0, 0], [1, 0, 1, 1, 0, 1, 0, 0, 0], 3, 0.1),
    ([3, -5, 2, 0.5], [100, 300, 0, 200], 2, 2.0)])
def test_gdpo_normalises_each_reward_and_then_the_sum_over_the_rollout(
        answers, forms, G, weight, fork, monkeypatch):  # noqa: F811
    """In plain loops. The rollout then has the deviation 1; the mean, which the paper takes away, is 0."""
    found = advantages(fork("gdpo"), monkeypatch, answers, forms, G, form_weight=weight)
    total = []
    for i in range(0, len(answers), G):
        total += [a + weight * f for a, f in zip(z_scores(answers[i:i + G]), z_scores(forms[i:i + G]))]
    mean, deviation = statistics.mean(total), statistics.stdev(total)
    assert found == pytest.approx([(x - mean) / deviation for x in total], rel=1e-3, abs=1e-6)
    assert [x == 0 for x in found] == [x == 0 for x in total]  # rounding noise would be trained on
    assert statistics.stdev(found) == pytest.approx(1, rel=1e-3)

def test_gdpo_tells_apart_what_a_sum_of_rewards_does_not(fork, monkeypatch):  # noqa: F811
    """One right answer, two of good form, neither: with the weight 1 three of the four rewards add up to 1.
    GRPO's advantages are .5, .5, .5, -1.5. With GDPO what is rarer in the group is worth more: by hand
    1.5 - .866, -.5 + .866, -.5 + .866, -.5 - .866, and then / .9194, their deviation."""
    answers, forms = [1, 0, 0, 0], [0, 1, 1, 0]
    module = fork("gdpo")
    both = torch.tensor([a + f for a, f in zip(answers, forms)]).float()
    assert module.group_advantages(both, 4).tolist() == pytest.approx([0.5, 0.5, 0.5, -1.5], rel=1e-3)
    found = advantages(module, monkeypatch, answers, forms, 4, form_weight=1.0)
    assert found == pytest.approx([0.6894, 0.3981, 0.3981, -1.4856], rel=1e-3)

def test_gdpo_gives_two_rewards_twice_the_advantage_of_one(fork, monkeypatch):  # noqa: F811
    """The paper's example: rewards that add up to 0 and 1 in one group, 0 and 2 in the other. GRPO gives
    -.707 and .707 in both."""
    module = fork("gdpo")
    both = module.group_advantages(torch.tensor([0.0, 1, 0, 2]), 2)
    assert both.tolist() == pytest.approx([-0.5 ** 0.5, 0.5 ** 0.5] * 2, rel=1e-3)
    found = advantages(module, monkeypatch, [0, 0, 0, 1], [0, 1, 0, 1], 2, form_weight=1.0)
    assert found == pytest.approx([-0.5477, 0.5477, -1.0954, 1.0954], rel=1e-3)

def test_gdpo_keeps_the_weight_of_form_where_all_answers_are_right(fork, monkeypatch):  # noqa: F811
    """In the first group the answers differ, in the second the form alone. GRPO of the sum divides the tenth
    that form earns by its own deviation: form is then worth as much as an answer."""
    module = fork("gdpo")
    answers, forms = [1, 1, 0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1, 0, 0]
    both = module.group_advantages(torch.tensor([a + 0.1 * f for a, f in zip(answers, forms)]), 4)
    assert both[4].item() == pytest.approx(both[0].item(), rel=0.01)
    found = advantages(module, monkeypatch, answers, forms, 4)
    assert found[4] == pytest.approx(0.1 * found[0], rel=1e-3) and found[4] > 0

@pytest.mark.parametrize("answers, forms", [
    ([1, 0, 0, 1], [1, 1, 1, 1]), ([1, 1, 1, 1], [0.7, 0.7, 0.7, 0.7]), ([1, 0, 1, 0], [0, 1, 0, 1])])
def test_gdpo_invents_no_advantage(answers, forms, fork, monkeypatch):  # noqa: F811
    """A reward that is the same for all adds exactly nothing. Where each answer costs the form, the two
    cancel: GDPO does not tell (1, 0) from (0, 1) there, either."""
    found = advantages(fork("gdpo"), monkeypatch, answers, forms, 4, form_weight=1.0)
    one = z_scores(answers if forms[0] == forms[1] else [0, 0, 0, 0])
    assert found == pytest.approx([x / (statistics.stdev(one) or 1) for x in one], rel=1e-3, abs=0)

def test_gdpos_evaluation_pays_the_sum_that_training_logs(fork, monkeypatch):  # noqa: F811
    """The reward of the evaluations is caught in a run, and asked about the run's own completions."""
    module = fork("gdpo")
    evaluated, trained = spy(monkeypatch, common, "evaluate"), spy(monkeypatch, module, "collect")
    train(module, "--dataset few.json --steps 1 --prompts 8 --eval_problems 4 --form_weight .3")
    rollout, stats = trained[0].result
    assert len({one.reward for one in evaluated}) == 1 and trained[0].reward is common.answer_reward
    total = evaluated[0].reward(rollout["problems"], rollout["texts"])
    assert rollout["rewards"].tolist() == pytest.approx(total) and len(set(total)) > 2
    texts = ["9-4=5\n#### 5\n", "7+2=9\n9-4=6\n#### 6", "#### 5", "1+1=2\n#### 2\nbye"]
    paid = evaluated[0].reward([{"answer": "5"}] * 4, texts)
    assert paid == pytest.approx([1.3, 0.3, 1, 0]) and 0 < stats["form_reward"] < 1

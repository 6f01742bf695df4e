"""dppo.patch, maxrl.patch and gdpo.patch by hand: what people got wrong in them. Their loops are in
vectors/check_vectors.py. test_forks.py trains the toy with each, and runs test_every_script.py on each.
"""
import itertools
import math

import pytest
import torch
from conftest import loss_of, settings, spy, train
from patched import fork  # noqa: F401
from test_forks import collected

import common

pytestmark = pytest.mark.slow

# ---- DPPO

@pytest.mark.parametrize("kind, mu, pi, A, kept", [
    ("tv", 1e-5, 1e-3, 1, True), ("kl", 1e-5, 1e-3, 1, True),  # 100 times as likely, and yet rare
    ("tv", 0.5, 0.75, 1, False), ("kl", 0.3, 0.6, 1, False), ("tv", 0.5, 0.25, -1, False),
    ("tv", 0.5, 0.25, 1, True), ("tv", 0.5, 0.75, -1, True), ("kl", 0.6, 0.3, 1, True),  # back to mu
    ("kl", 0.01, 0.07, 1, True),  # .042; .078 is the KL the other way round
    ("kl", 1.0, 1.0, 1, True), ("kl", 1 - 1e-7, 1.0, 1, True), ("kl", 1.0, 0.5, -1, False)])
def test_dppo_by_hand(kind, mu, pi, A, kept, fork):  # noqa: F811
    """A token alone, in float32, where a log-prob near 0 rounds to 0: the gradient of J is w A, or 0. The KL
    to pi_ref = 2 pi is 1 - log 2, and falls by 1 as log pi rises; it is never left out."""
    module, one = fork("dppo"), torch.ones(1, 1)
    args = module.parse_args(["--device", "cpu", "--divergence", kind])
    assert args.beta == 0 and args.delta == {"tv": 0.2, "kl": 0.05}[kind]
    logp = one * math.log(pi)
    given = {"logp": logp, "sampled_logp": one * math.log(mu), "adv": A * one, "mask": one}
    for args.beta in (0.0, 0.3):
        loss, gradient, _ = loss_of(module, given | {"ref_logp": logp + math.log(2)}, args)
        assert -gradient.item() == pytest.approx(pi / mu * A * kept + args.beta, rel=1e-5)
        assert -loss.item() == pytest.approx(pi / mu * A * kept - args.beta * (1 - math.log(2)), rel=1e-5)

# ---- MaxRL

@pytest.mark.parametrize("G, p", [(2, 0.3), (4, 0.1), (5, 0.9)])
def test_maxrls_mean_gradient_is_that_of_the_series_of_log_p(G, p, fork):  # noqa: F811
    """log p = -sum_k (1 - p)^k / k. Of all groups of G answers, right with probability p, the mean of
    1/G sum_i A_i grad log pi(o_i) is the gradient of the first G - 1 terms. Without the 1/G it would be G
    times that. Here p = 1 / (1 + exp(-x)), and grad is by x. Rewards below 0 are refused: with a negative
    mean the best answer would get the least advantage, in silence."""
    module, mean = fork("maxrl"), 0
    for right in itertools.product((0, 1), repeat=G):
        chance = math.prod(p if r else 1 - p for r in right)
        A = module.group_advantages(torch.tensor(right, dtype=torch.float64), G).tolist()
        mean += chance * sum(a * (r - p) for a, r in zip(A, right)) / G
    series = lambda x: -sum((1 - 1 / (1 + math.exp(-x))) ** k / k for k in range(1, G))  # noqa: E731
    x, h = math.log(p / (1 - p)), 1e-6
    assert mean == pytest.approx((series(x + h) - series(x - h)) / (2 * h))
    with pytest.raises(AssertionError, match="pay 0 or more"):
        module.group_advantages(torch.tensor([-0.1] + [1.0] * (G - 1)), G)

# ---- GDPO

@pytest.mark.parametrize("answers, forms, G, weight, expected", [
    # With the weight 1 three rewards add up to 1. What is rarer in the group is worth more: 1.5 - .866,
    # -.5 + .866, -.5 + .866, -.5 - .866, and then / .9194, their deviation. GRPO has .5, .5, .5, -1.5.
    ([1, 0, 0, 0], [0, 1, 1, 0], 4, 1.0, [0.6894, 0.3981, 0.3981, -1.4856]),
    # The paper's example: sums of 0 and 1 in one group, 0 and 2 in the other. GRPO has -.707, .707 in both.
    ([0, 0, 0, 1], [0, 1, 0, 1], 2, 1.0, [-0.5477, 0.5477, -1.0954, 1.0954]),
    # Where all answers are right, form keeps its weight: a tenth of what answers are worth in the other
    # group. GRPO of the sum makes it worth as much.
    ([1, 1, 0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1, 0, 0], 4, 0.1,
     [1.3161, 1.3161, -1.3161, -1.3161, 0.13161, 0.13161, -0.13161, -0.13161]),
    # A reward that is the same for all adds exactly nothing: rounding noise would be trained on.
    ([1, 1, 1, 1], [0.7, 0.7, 0.7, 0.7], 4, 1.0, [0, 0, 0, 0])])
def test_gdpos_advantages_by_hand(answers, forms, G, weight, expected, fork, monkeypatch):  # noqa: F811
    """Those of `collect`, for completions that earn what is given."""
    module = fork("gdpo")
    monkeypatch.setattr(module, "form_reward", lambda *_: forms)
    given = {"group_size": G, "beta": 0.0, "form_weight": weight}
    rollout, stats = collected(module, monkeypatch, answers, [2] * len(answers), **given)
    assert rollout["adv"][:, 0].tolist() == pytest.approx(expected, rel=1e-3, abs=0)
    assert rollout["rewards"].tolist() == pytest.approx([a + weight * f for a, f in zip(answers, forms)])
    assert stats["form_reward"] == pytest.approx(sum(forms) / len(forms))
    assert torch.equal(rollout["has_gradient"], rollout["adv"][:, 0] != 0)

@pytest.mark.parametrize("name, flags, weight", [
    ("format_reward", "", 0.1), ("gdpo", "--form_weight .3", 0.3)])
def test_an_evaluation_pays_for_form_what_training_logs(name, flags, weight, fork, monkeypatch):  # noqa: F811
    """For a line of work, and the answer on a last line. The reward is caught in a run, and asked about the
    run's own completions."""
    module = fork(name)
    evaluated, trained = spy(monkeypatch, common, "evaluate"), spy(monkeypatch, module, "collect")
    train(module, f"--dataset few.json --steps 1 --prompts 8 --eval_problems 4 {flags}")
    rollout, stats = trained[0].result
    assert len({one.reward for one in evaluated}) == 1
    total = evaluated[0].reward(rollout["problems"], rollout["texts"])
    assert rollout["rewards"].tolist() == pytest.approx(total) and len(set(total)) > 2
    texts = ["9-4=5\n#### 5\n", "7+2=9\n9-4=6\n#### 6", "#### 5", "1+1=2\n#### 2\nbye"]
    paid = evaluated[0].reward([{"answer": "5"}] * 4, texts)
    assert paid == pytest.approx([1 + weight, weight, 1, 0]) and 0 < stats["form_reward"] < 1

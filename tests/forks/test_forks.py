"""tests/forks: each patch turns grpo.py into another published objective, or gives it another reward. It
applies, computes in value and gradient what its paper says (most: vectors/test_vectors.py), and learns the
toy. The newest ones, of 2026, are here by hand, too: what people got wrong in them."""
import itertools
import math
import statistics
from pathlib import Path

import pytest
import torch
from conftest import (ROOT, TINY, Trainer, char_tokenizer, full_logprobs, loss_of, newest, random_batch,
                      random_rows, same, save_tiny, settings, slopes, spy, tensor64, tiny_model, train)
from patched import PATCHES, copy_to, fork, patched_copy, run_the_tests_of_every_script  # noqa: F401
from safetensors.torch import load_file

import common
import grpo

pytestmark = pytest.mark.slow
OBJECTIVES = sorted(PATCHES.keys() - {"sao"})  # it learns in a test of its own
LEARNS = "--dataset few.json --steps 3 --prompts 16 --warmup_steps 0 --lr 1.5e-3 --eval_problems 1 --seed 1"

def test_tpos_loss_and_gradient_are_those_of_the_proposal(fork):
    """On ragged rows, against sums of floats and their finite differences, with the KL term. (The others' are
    in vectors.json.)"""
    module = fork("tpo")
    given = random_rows(1, spread=1.0)
    given["old_logp"] = -given["old_logp"].abs() - 0.1  # of p
    given["adv"] = given["adv"].sign()

    def J(x):
        total = 0
        for i, counts in enumerate(given["mask"] > 0):
            A = given["adv"][i, 0].item()
            rows = (x, given["old_logp"], given["ref_logp"])
            for logp, old, ref in zip(*(row[i, counts].tolist() for row in rows)):
                w, p = math.exp(logp - old), math.exp(old)
                # A good token of probability p may reach sqrt(p), a bad one p^2.
                low, high = p ** 2 / p, math.sqrt(p) / p
                gain = min(w, high) * A if A > 0 else max(w, low) * A
                total += gain - 0.04 * (math.exp(ref - logp) - (ref - logp) - 1)
        return total
    loss, gradient, stats = loss_of(module, given, settings(module, beta=0.04))
    assert -loss.item() == pytest.approx(J(given["logp"]))
    torch.testing.assert_close(-gradient, slopes(J, given["logp"]), rtol=1e-5, atol=1e-7)
    assert 3 < stats["clip_frac"][0] < given["mask"].sum() - 3

def test_tpo_divides_an_optimiser_step_by_nothing(fork):
    """So two half steps add up to a whole one. Of a copy test_every_script.py sees the direction only."""
    trainer = Trainer(fork("tpo"), group_size=4)
    whole, halves = (trainer.gradients(trainer.rollout, minibatches=n)[0] for n in (1, 2))
    torch.testing.assert_close(halves.sum(0), whole[0], rtol=1e-4, atol=1e-6)

@pytest.mark.parametrize("expected", [[1, -1, -1, -1], [1] + [0] * 15])
def test_tpos_advantages_of_one_right_completion(expected, fork):
    """In a group of 16 the wrong ones, which were to be expected, teach nothing."""
    found = fork("tpo").group_advantages(torch.eye(len(expected))[0], len(expected))
    assert found.tolist() == pytest.approx(expected)

def collected(module, monkeypatch, rewards, lengths, logps=(None,), state=(), **flags):
    """`collect` on completions of the given lengths, each rewarded as given; `logps` are those of the policy
    and, if there is one, of the reference; `state` is what a fork keeps from step to step."""
    mask = (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]).float()
    rollout = dict.fromkeys(("ids", "mask", "sampled_logp"), mask) | {"texts": [""] * len(lengths)}
    rollout |= {"finished": mask[:, 0] > 0, "completion_length": torch.tensor(lengths)}
    rollout["problems"] = [{"prompt": [i // flags["group_size"]]} for i in range(len(lengths))]
    monkeypatch.setattr(common, "generate", lambda *_: dict(rollout))

    def logprobs(_, model, rollout, __):
        return rollout["mask"] * (1.0 if model is None else model)
    monkeypatch.setattr(common, "over_batches", logprobs)
    models, args = (*logps, None)[:2], settings(module, **flags)
    return module.collect(*models, *state, None, None, lambda *_: rewards, args)

def test_dapo_leaves_out_groups_that_are_all_right_and_pays_for_length(fork, monkeypatch):
    """The paper's margin is a fifth of the longest completion: 0 up to 8 of 10 tokens, -1 at 10. In the
    second group only the penalty makes the rewards differ."""
    rewards, lengths = [1, 0, 0, 1, 1, 1, 1, 1, 0, 0, 0, 1], [3, 5, 1, 2, 9, 3, 3, 3, 7, 8, 10, 9]
    rollout, _ = collected(fork("dapo"), monkeypatch, rewards, lengths, group_size=4, max_new_tokens=10)
    assert rollout["rewards"].tolist() == pytest.approx([1, 0, 0, 1, 0.5, 1, 1, 1, 0, 0, -1, 0.5])
    assert rollout["mixed"].tolist() == [i // 4 != 1 for i in range(12)] and (rollout["adv"][4:8] == 0).all()

@pytest.mark.parametrize("name", OBJECTIVES)
def test_a_fork_runs_and_learns_the_toy(name, fork):
    """In three steps, from half of the answers right to over 70 %."""
    module = fork(name)
    _, first, _, last = train(module, LEARNS)
    assert first["reward"] < 0.65 and last["reward"] > first["reward"] + 0.15
    assert 0 < first["sampling_logp_difference"] < 3e-7

@pytest.mark.parametrize("sequence, icepop, low, outside", [
    (False, False, 0.5, 2), (False, True, 0.5, 3), (True, False, 0.5, 3), (True, True, 0.5, 7),
    (True, True, 0, 3)])
def test_tis_weighs_a_token_or_a_whole_completion(sequence, icepop, low, outside, fork, monkeypatch):
    """Ratios and their products in floats. The second row's product is above 3, though no token of it is, and
    the third's below .5. The fourth has tokens outside, but no product. The last case is TRL's default with
    vLLM. The last group is not trained."""
    ratios = [[1.2, 0.9, 1.1, 1, 1], [1.9, 1.8, 1.7], [0.9, 0.7, 0.8, 0.9], [4, 0.2, 3.5], [1], [9]]
    logp = torch.ones(6, 5)  # the sampler's log-probs are 1 here
    for i, row in enumerate(ratios):
        logp[i, :len(row)] += torch.tensor(row).log()
    given = {"group_size": 2, "beta": 0.0, "m_low": low, "m_high": 3.0}
    rollout, stats = collected(
        fork("tis"), monkeypatch, [1, 0, 1, 0, 1, 1], [len(row) for row in ratios], (logp,), **given,
        sequence=sequence, icepop=icepop)
    for i, row in enumerate(ratios[:4]):
        A = (0.5 - i % 2) / (math.sqrt(0.5) + 1e-4)
        weights = [m if low * icepop <= m <= 3 else 0 if icepop else 3
                   for m in ([math.prod(row)] if sequence else row)]
        assert (rollout["adv"][i] / A)[:len(weights)].tolist() == pytest.approx(weights)
    assert stats["outside"] == pytest.approx(outside / 15) and (rollout["adv"][4:] == 0).all()

def test_lora_begins_as_the_model_and_its_gradients_are_those_of_the_merged_weight(fork):
    """For W + s B A the chain rule gives s B'G and s G A', where G is the gradient of the merged weight."""
    module, batch = fork("lora"), random_batch(6)
    args = settings(module, lora_rank=3)
    for args.dtype in ("bfloat16", "float32"):
        base, policy = models = tiny_model(), tiny_model()
        module.add_adapters(policy, args)
        assert torch.equal(*(common.token_logprobs(model, batch, args) for model in models))
    adapters = [p for p in policy.double().parameters() if p.requires_grad]
    for p in adapters:
        p.data += 0.1 * torch.randn_like(p)
    assert len(adapters) == 2 * 14
    policy.save_pretrained("saved")
    merged = type(policy).from_pretrained("saved", dtype=torch.float64)
    one, other = (common.token_logprobs(model, batch, args) for model in (policy, merged))
    torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
    (one + other).sum().backward()
    pairs = zip(*(model.base_model.modules() for model in (policy, merged)), strict=True)
    for layer, plain in ((x, y) for x, y in pairs if isinstance(x, module.LoRA)):
        G, s = plain.weight.grad, 32 / 3
        torch.testing.assert_close(layer.A.grad, s * layer.B.T @ G, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(layer.B.grad, s * G @ layer.A.T, rtol=1e-5, atol=1e-5)
        assert layer.weight.grad is None
    module.LoRA.on = False
    off = common.token_logprobs(policy, batch, args)
    assert torch.equal(off, common.token_logprobs(base.double(), batch, args)) and not torch.equal(off, one)

# ---- DPPO

@pytest.mark.parametrize("kind, mu, pi, A, kept", [
    ("tv", 1e-5, 1e-3, 1, True), ("kl", 1e-5, 1e-3, 1, True),  # 100 times as likely, and yet rare
    ("kl", 0.01, 0.07, 1, True),  # .042; .078 is the KL the other way round
    ("kl", 1.0, 1.0, 1, True), ("kl", 1 - 1e-7, 1.0, 1, True), ("kl", 1.0, 0.5, -1, False)])
def test_dppo_by_hand(kind, mu, pi, A, kept, fork):
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
def test_maxrls_mean_gradient_is_that_of_the_series_of_log_p(G, p, fork):
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
    with pytest.raises(AssertionError, match="0 or more"):
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
    ([1, 1, 1], [0.9, 0.9, 0.9], 3, 1.0, [0, 0, 0])])
def test_gdpos_advantages_by_hand(answers, forms, G, weight, expected, fork, monkeypatch):
    """Those of `collect`, for completions that earn what is given."""
    module = fork("gdpo")
    monkeypatch.setattr(module, "form_reward", lambda *_: forms)
    given = {"group_size": G, "beta": 0.0, "form_weight": weight}
    rollout, stats = collected(module, monkeypatch, answers, [2] * len(answers), **given)
    assert rollout["adv"][:, 0].tolist() == pytest.approx(expected, rel=1e-3, abs=0)
    assert rollout["rewards"].tolist() == pytest.approx([a + weight * f for a, f in zip(answers, forms)])
    assert stats["form_reward"] == pytest.approx(sum(forms) / len(forms))
    assert torch.equal(rollout["mask"].any(1), rollout["adv"][:, 0] != 0)

def test_an_evaluation_of_gdpo_pays_for_form_what_training_logs(fork, monkeypatch):
    """For a line of work, and the answer on a last line. The reward is caught in a run, and asked about the
    run's own completions."""
    module, weight = fork("gdpo"), 0.3
    evaluated, trained = spy(monkeypatch, common, "evaluate"), spy(monkeypatch, module, "collect")
    train(module, "--dataset few.json --steps 1 --prompts 8 --eval_problems 4 --form_weight .3")
    rollout, stats = trained[0].result
    assert len({one.reward for one in evaluated}) == 1
    total = evaluated[0].reward(rollout["problems"], rollout["texts"])
    assert rollout["rewards"].tolist() == pytest.approx(total) and len(set(total)) > 2
    texts = ["9-4=5\n#### 5\n", "7+2=9\n9-4=6\n#### 6", "#### 5", "1+1=2\n#### 2\nbye"]
    paid = evaluated[0].reward([{"answer": "5"}] * 4, texts)
    assert paid == pytest.approx([1 + weight, weight, 1, 0]) and 0 < stats["form_reward"] < 1

# ---- All of them

def test_lora_resumes_to_the_bit(fork):
    """Weights, Adam's moments, adapters. The ten questions, some of them held out, come again from the third
    step on."""
    module = fork("lora")
    Path("again.json").write_text("".join(Path("few.json").read_text().splitlines(True)[:10]))
    flags = "--dataset again.json --prompts 4 --minibatches 2 --eval_problems 1"
    train(module, f"{flags} --steps 4", out="whole")
    train(module, f"{flags} --steps 2", out="cut")
    train(module, "--resume --steps 4", out="cut")
    one, other = ((torch.load(f"{out}/state.pt") | {"metrics": ""}, load_file(newest(out) / "model.safetensors"))
                  for out in ("whole", "cut"))
    assert same(one, other) and not same(one[1], load_file(ROOT / "tests" / "toy" / "model.safetensors"))

def test_every_fork_passes_the_tests_of_every_script(tmp_path):
    """As copies beside common.py: README promises that `pytest` tests a copy. But in sao old and new
    log-probs are not equal in bfloat16: the old ones are the sampler's."""
    copy_to(tmp_path, "common.py")
    names = [*OBJECTIVES, "sao"]
    for name in names:
        patched_copy(name, tmp_path)
    but = "learns or old_and_new and bfloat16 and sao"
    run_the_tests_of_every_script(tmp_path, names[::2], names[1::2], but=but)

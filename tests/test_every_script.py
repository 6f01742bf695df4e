"""What holds for every objective, tested on every script beside common.py: copy grpo.py, edit its objective,
and these tests run over your copy. Functions get what they ask for by the names of their parameters.
"""
import importlib

import pytest
import torch
from conftest import ROOT, Trainer, call, count_t3, loss_of, random_rows, settings, spy

import common

SCRIPTS = sorted(path.stem for path in ROOT.glob("*.py") if "\ndef policy_loss(" in path.read_text())
OPTIONS = {"grpo": [{}, {"kl": "wk3"}], "gspo": [{}, {"beta": 0.3, "kl": "wk3"}, {"token_level": True}]}
VARIANTS = [(name, options) for name in SCRIPTS for options in OPTIONS.get(name, [{}])]  # of policy_loss
EXACT = {"rtol": 1e-9, "atol": 1e-12}
OURS = ("ppo", "grpo", "gspo")

def same_gradient(script, found, expected):
    """Of a copy's gradient only the direction: it may divide by its tokens, or by nothing."""
    if script.__name__ in OURS:
        torch.testing.assert_close(found, expected, **EXACT)
    else:
        torch.testing.assert_close(found / found.norm(), expected / expected.norm(), rtol=0, atol=1e-6)

@pytest.fixture(params=SCRIPTS)
def script(request):
    return importlib.import_module(request.param)

# --- update: from a rollout to gradients

@pytest.mark.parametrize("name, options", VARIANTS)
def test_the_gradient_of_an_update_from_whole_logits(name, options):
    """A row at a time, without common.py: temperature, shift by one, division by the rows."""
    script = importlib.import_module(name)
    trainer, rollout = Trainer(script, **options).moved()
    logp = torch.zeros_like(rollout["mask"])
    for i, n in enumerate(rollout["mask"].sum(1).long().tolist()):
        ids = rollout["ids"][i, :rollout["attention"][i].sum()]
        whole = (trainer.policy(ids[None]).logits[0] / 0.6).log_softmax(-1)
        logp[i, :n] = whole[:-1].gather(1, ids[1:, None])[-n:, 0]
    given = {"ref_logp": None} | rollout | {"logp": logp, "args": trainer.args}
    loss, _ = call(script.policy_loss, given)
    expected = torch.autograd.grad(loss / 12, list(trainer.policy.parameters()))
    expected = torch.cat([g.flatten() for g in expected])
    [gradient], found = trainer.gradients(rollout)
    same_gradient(script, gradient[:len(expected)], expected)  # behind it PPO's critic
    if name in OURS:
        assert found["loss"] == pytest.approx(loss.item() / 12, rel=1e-5) and found["clip_frac"] > 0.05

def test_any_cut_into_micro_batches_gives_the_same_gradient(script):
    """And the same statistics: those of all rows, not of the last micro-batch."""
    trainer, rollout = Trainer(script).moved()
    whole, stats = trainer.gradients(rollout)
    for tokens in (40, 1):
        cut, same = trainer.gradients(rollout, micro_batch_tokens=tokens)
        torch.testing.assert_close(cut, whole, **EXACT)
        assert same == pytest.approx(stats, rel=1e-6)
    assert whole.norm() > 0.01

def test_the_gradient_is_a_mean_over_rows(script):
    """A rollout twice over has the same gradient. (Twice the gradient if a copy's objective is a sum.)"""
    trainer, rollout = Trainer(script).moved()
    twice = {name: torch.cat([x, x]) for name, x in rollout.items()}
    same_gradient(script, trainer.gradients(twice)[0], trainer.gradients(rollout)[0])

def test_an_optimiser_step_has_the_gradient_of_its_own_rows(script):
    """Six groups in minibatches of 2, 2, 1, 1: each step is as if its rows were the rollout."""
    trainer, rollout = Trainer(script).moved()
    parts = [trainer.gradients(part)[0] for part in common.minibatches(rollout, 4, 2)]
    steps, _ = trainer.gradients(rollout, minibatches=4, epochs=2)
    torch.testing.assert_close(steps, torch.cat(parts * 2), **EXACT)

def test_neither_padding_nor_the_order_of_rows_matters(script):
    """Rows in reverse, nonsense in all padding."""
    trainer, rollout = Trainer(script).moved()
    other = {name: x.flip(0) for name, x in rollout.items()}
    for name, x in other.items():
        if name == "ids" or x.shape == other["mask"].shape and name != "mask":
            other[name] = x.masked_fill(other["attention" if name == "ids" else "mask"] == 0, 5)
    (clean, stats), (same, same_stats) = trainer.gradients(rollout), trainer.gradients(other)
    torch.testing.assert_close(same, clean, **EXACT)
    assert same_stats == pytest.approx(stats, rel=1e-6)

def test_every_pass_takes_every_row_once_with_what_was_collected(script, monkeypatch):
    """Old log-probs, advantages and the rest stay as they are while the policy moves."""
    trainer = Trainer(script, minibatches=4, epochs=2, micro_batch_tokens=40)
    trainer.use_adam(lr=0.02)
    calls, losses = spy(monkeypatch, common, "token_logprobs"), spy(monkeypatch, script, "policy_loss")
    trainer.update()
    rows = [row for c in calls for row in c.batch["row"].tolist()]
    taught = trainer.rollout["has_gradient"].nonzero().squeeze(1).tolist()
    assert sorted(rows) == sorted(2 * taught) and sorted(rows[:len(taught)]) == taught
    for c, loss in zip(calls, losses, strict=True):
        if "old_logp" in vars(loss):  # a copy without a ratio may do without
            assert torch.equal(loss.old_logp, c.batch["old_logp"])
        for name, x in c.batch.items():
            whole = trainer.rollout[name][c.batch["row"]]
            assert torch.equal(x, whole[:, :x.shape[1]] if x.dim() == 2 else whole), name
    assert (calls[-1].result - calls[-1].batch["old_logp"]).abs().max() > 0.1

def test_statistics_are_those_of_all_passes(script, monkeypatch):
    """Sums over sums, of every micro-batch of both passes: the last pass alone would clip far more."""
    trainer = Trainer(script, epochs=2, minibatches=2, micro_batch_tokens=20)
    trainer.use_adam(lr=0.02)
    calls = spy(monkeypatch, script, "policy_loss")
    stats, logged = trainer.update(), [call.result[1] for call in calls]
    assert len(calls) > 4
    for name in logged[0]:
        values = [one[name] for one in logged]
        if name.endswith("_max"):
            assert stats[name] == pytest.approx(float(max(values)))
        else:
            sums, counts = ([float(x) for x in column] for column in zip(*values))
            assert stats[name] == pytest.approx(sum(sums) / sum(counts), rel=1e-5, abs=1e-7)

@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_old_and_new_log_probs_are_equal_before_the_first_update(script, dtype, monkeypatch):
    """The ratio starts at 1. In bfloat16 log-probs depend on the cut: old ones are of the update's pieces."""
    cut = {"minibatches": 4, "micro_batch_tokens": 100, "max_new_tokens": 30, "group_size": 4}
    trainer = Trainer(script, dtype=dtype, **cut)
    calls = spy(monkeypatch, common, "token_logprobs")
    trainer.update()
    for c in calls:
        gap = (c.result - c.batch["old_logp"]).abs().max()
        assert gap <= (1e-6 if dtype == "float32" else 0) and c.result.dtype == torch.float32
    if dtype == "bfloat16":  # else nothing was tested
        otherwise = common.token_logprobs(trainer.policy, trainer.rollout, trainer.args)
        assert not torch.equal(otherwise, trainer.rollout["old_logp"])

# --- collect: from a policy to a rollout

def test_the_temperature_is_that_of_the_samples_and_of_all_log_probs(script):
    """Against the models' whole logits, a row at a time. At 0.001 only the likeliest tokens are sampled."""
    trainer = Trainer(script)
    rollout = trainer.rollout
    lengths = rollout["mask"].sum(1).long().tolist()
    for name, model in [("old_logp", trainer.policy), ("ref_logp", trainer.reference)]:
        for i in rollout["has_gradient"].nonzero().squeeze(1).tolist():
            n = lengths[i]
            ids = rollout["ids"][i, :rollout["attention"][i].sum()]
            logp = (model(ids[None]).logits[0] / 0.6).log_softmax(-1)[:-1].gather(1, ids[1:, None])[-n:, 0]
            torch.testing.assert_close(rollout[name][i, :n], logp, rtol=1e-5, atol=1e-5)
    cold, prompts = Trainer(script, temperature=0.001), [problem["prompt"] for problem in trainer.problems]
    greedy = common.generate(cold.policy, cold.tokenizer, prompts, 2, 0.0, cold.args)
    assert cold.rollout["texts"] == greedy["texts"] != rollout["texts"]

def test_what_is_collected_carries_no_gradient(script):
    """Even if the reward does: it would be trained through the advantages. Nor is the reference trained."""
    trainer, weight = Trainer(script), torch.ones((), requires_grad=True)
    trainer.reward = lambda *asked: weight * torch.tensor(count_t3(*asked))
    trainer.collect()
    assert not any(x.requires_grad for x in trainer.rollout.values() if torch.is_tensor(x))
    trainer.update()
    assert weight.grad is None and all(p.grad is None for p in trainer.reference.parameters())

# --- policy_loss

def test_the_token_that_ends_a_completion_is_trained(script):
    """Else stopping is never learnt: end-of-sequence has a gradient where any token of its row has one."""
    trainer, ends = Trainer(script, max_new_tokens=20), 0
    trainer.args.beta = 0.0  # the KL alone would push every token
    rollout, length = trainer.rollout, trainer.rollout["mask"].sum(1).long()
    _, gradient, _ = loss_of(script, rollout | {"logp": rollout["old_logp"]}, trainer.args)
    for i, n in enumerate(length.tolist()):
        ids, finished = rollout["ids"][i, :rollout["attention"][i].sum()][-n:], bool(rollout["finished"][i])
        pushed = (gradient[i] != 0).tolist()
        assert pushed == [pushed[0]] * n + [False] * (len(pushed) - n)
        assert (ids == 1).tolist() == [False] * (n - 1) + [finished]
        ends += finished and pushed[n - 1]
    assert ends >= (3 if script.__name__ in OURS else 1)

@pytest.mark.parametrize("name, options", VARIANTS)
def test_a_row_without_tokens_adds_nothing(name, options):
    """Neither NaN nor a gradient, alone or beside others; the statistics are those of the others."""
    script, rows = importlib.import_module(name), random_rows(4, lengths=(3, 0, 7, 1))
    empty, others = ({key: x[keep] for key, x in rows.items()} for keep in ([1], [0, 2, 3]))
    args = settings(script, **options)
    whole, alone, rest = (loss_of(script, part, args) for part in (rows, empty, others))
    assert alone[0] == 0 and (alone[1] == 0).all() and rest[1].abs().max() > 0.01
    torch.testing.assert_close(whole[0], rest[0])
    torch.testing.assert_close(whole[1], torch.cat([rest[1][:1], alone[1], rest[1][1:]]))
    assert whole[2].get("clip_frac") == rest[2].get("clip_frac")

@pytest.mark.parametrize("name, options", VARIANTS)
@pytest.mark.parametrize("old, ref", [(-200, 0), (200, 0), (0, 200), (0, -200), (-200, 200), (200, -200)])
def test_log_ratios_of_two_hundred_stay_finite(name, options, old, ref):
    """exp(200) is inf in float32, and where it is masked 0 * inf would be NaN."""
    script, zero = importlib.import_module(name), torch.zeros(2, 3)
    rows = dict.fromkeys(random_rows(), zero) | {"old_logp": zero + old, "ref_logp": zero + ref}
    rows |= {"adv": torch.tensor([[-1.0], [1.0]]), "mask": torch.tensor([[1.0, 1, 0], [1, 0, 0]])}
    loss, gradient, stats = loss_of(script, rows, settings(script, **options))
    assert loss.dtype == torch.float32 and loss.isfinite() and gradient.isfinite().all()
    numbers = [x for value in stats.values() for x in (value if isinstance(value, tuple) else [value])]
    assert torch.tensor(numbers).isfinite().all()

# --- whole runs

@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_policy_learns(script, dtype):
    """t3 pays best, and becomes the commonest token."""
    trainer, rewards = Trainer(script, dtype=dtype, group_size=8, minibatches=2, temperature=1.0), []
    trainer.use_adam(lr=0.02)
    for step in range(12):
        torch.manual_seed(step)
        trainer.collect()
        trainer.update()
        rewards.append(trainer.stats["reward"])
    assert sum(rewards[-3:]) > 3 * sum(rewards[:3])

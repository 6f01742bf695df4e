"""What holds for every objective, tested on every script beside common.py: copy grpo.py, edit its objective,
and these tests run over your copy. Functions get what they ask for by the names of their parameters. A copy
may train some of the tokens only, by its mask.
"""
import importlib

import pytest
import torch
from conftest import (ROOT, Trainer, call, count_t3, full_logprobs, holes, loss_of, random_rows, settings,
                      spy)

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
    """A row at a time, without common.py: temperature, shift by one, tokens that do not count, division by
    the rows."""
    script = importlib.import_module(name)
    trainer, rollout = Trainer(script, **options).moved()
    rollout["mask"] = holes(rollout["mask"])
    given = {key: x[rollout["has_gradient"]] for key, x in rollout.items()}
    given |= {"logp": full_logprobs(trainer.policy, given, 0.6), "args": trainer.args}
    loss, _ = call(script.policy_loss, {"ref_logp": None} | given)
    expected = torch.autograd.grad(loss / 12, list(trainer.policy.parameters()))
    expected = torch.cat([g.flatten() for g in expected])
    [gradient], found = trainer.gradients(rollout)
    same_gradient(script, gradient[:len(expected)], expected)  # behind it PPO's critic
    if name in OURS:
        rows = given["mask"].shape[0]
        assert found["loss"] == pytest.approx(loss.item() / rows, rel=1e-5) and found["clip_frac"] > 0.05

def test_any_cut_into_micro_batches_gives_the_same_gradient(script):
    """And the same statistics: those of all rows, not of the last micro-batch."""
    trainer, rollout = Trainer(script).moved()
    whole, stats = trainer.gradients(rollout)
    for tokens in (40, 1):
        cut, same = trainer.gradients(rollout, micro_batch_tokens=tokens)
        torch.testing.assert_close(cut, whole, **EXACT)
        assert same == pytest.approx(stats, rel=1e-6)
    assert whole.norm() > 1e-6, "this rollout has no gradient: does the objective train any token of it?"

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
    lengths = other["attention"].sum(1) - other["prompt_length"]
    padding = torch.arange(rollout["mask"].shape[1]) >= lengths[:, None]
    for name, x in other.items():
        if name == "ids" or x.shape == padding.shape and name != "mask":
            other[name] = x.masked_fill(other["attention"] == 0 if name == "ids" else padding, 5)
    (clean, stats), (same, same_stats) = trainer.gradients(rollout), trainer.gradients(other)
    torch.testing.assert_close(same, clean, **EXACT)
    assert same_stats == pytest.approx(stats, rel=1e-6)

def test_a_token_that_does_not_count_changes_no_other(script):
    """A fork may set the mask of some tokens to 0. The log-probs of the others stay as they are, and so do
    their pushes at ratio 1, but for |o|."""
    trainer, rows = Trainer(script).moved()
    rest, pushes = rows | {"mask": holes(rows["mask"])}, []
    logp, other = (common.token_logprobs(trainer.policy, x, trainer.args).detach() for x in (rows, rest))
    torch.testing.assert_close(other, logp * rest["mask"], **EXACT)
    for x in (rows, rest):
        _, push, _ = loss_of(script, x | {"logp": logp, "old_logp": logp}, trainer.args)
        push = push * x["mask"].sum(1, keepdim=True) * rest["mask"]
        # a copy may weigh a row in another way than by |o|
        pushes.append(push if script.__name__ in OURS else torch.nn.functional.normalize(push, dim=1))
    torch.testing.assert_close(*pushes, **EXACT, msg=(
        "the push of a token depends on whether another one counts: wrong, unless the objective says so"))

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
    last = calls[-1]
    moved = ((last.result - last.batch["old_logp"]) * last.batch["mask"]).abs().max()
    assert moved > 0.01, "two passes did not move the log-probs of what counts: is there a gradient?"

def test_statistics_are_those_of_all_passes(script, monkeypatch):
    """Of every micro-batch of both passes: the last pass alone would clip far more."""
    trainer = Trainer(script, epochs=2, minibatches=2, micro_batch_tokens=20)
    trainer.use_adam(lr=0.02)
    calls = spy(monkeypatch, script, "policy_loss")
    stats, expected = trainer.update(), common.means([call.result[1] for call in calls])
    assert len(calls) > 4 and {name: stats[name] for name in expected} == pytest.approx(expected)

@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_old_and_new_log_probs_are_equal_before_the_first_update(script, dtype, monkeypatch):
    """The ratio starts at 1. In bfloat16 log-probs depend on the cut: old ones are of the update's pieces."""
    cut = {"minibatches": 4, "micro_batch_tokens": 100, "max_new_tokens": 30, "group_size": 4}
    trainer = Trainer(script, dtype=dtype, **cut)
    calls = spy(monkeypatch, common, "token_logprobs")
    trainer.update()
    for c in calls:
        gap = ((c.result - c.batch["old_logp"]) * c.batch["mask"]).abs().max()
        assert gap <= (1e-6 if dtype == "float32" else 0) and c.result.dtype == torch.float32

# --- collect: from a policy to a rollout

def test_the_temperature_is_that_of_the_samples_and_of_all_log_probs(script):
    """Against the models' whole logits, a row at a time. At 1e-5 only the likeliest tokens are sampled."""
    trainer = Trainer(script)
    rollout, taught = trainer.rollout, trainer.rollout["has_gradient"]
    for name, model in [("old_logp", trainer.policy), ("ref_logp", trainer.reference)]:
        found = (rollout[name] * rollout["mask"])[taught].double()
        torch.testing.assert_close(found, full_logprobs(model, rollout, 0.6)[taught], rtol=1e-5, atol=1e-5)
    cold, prompts = Trainer(script, temperature=1e-5), [problem["prompt"] for problem in trainer.problems]
    greedy = common.generate(cold.policy, cold.tokenizer, prompts, 2, 0.0, cold.args)
    assert cold.rollout["texts"] == greedy["texts"] != rollout["texts"]

def test_what_is_collected_carries_no_gradient(script):
    """Even if the reward does: it would be trained through the advantages. Nor is the reference trained."""
    trainer, weight = Trainer(script), torch.ones((), requires_grad=True)
    trainer.reward = lambda problems, texts: weight * torch.tensor(count_t3(problems, texts))
    trainer.collect()
    assert not any(x.requires_grad for x in trainer.rollout.values() if torch.is_tensor(x))
    trainer.update()
    assert weight.grad is None and all(p.grad is None for p in trainer.reference.parameters())

# --- policy_loss

def test_the_token_that_ends_a_completion_is_trained(script):
    """Else stopping is never learnt: end-of-sequence has a gradient as the other tokens of its row have."""
    trainer = Trainer(script, max_new_tokens=20)
    trainer.args.beta = 0.0  # the KL alone would push every token
    rollout, ends = trainer.rollout, []
    _, gradient, _ = loss_of(script, rollout | {"logp": rollout["old_logp"].nan_to_num()}, trainer.args)
    for i, start in enumerate(rollout["prompt_length"].tolist()):
        ids, pushed = rollout["ids"][i, start:rollout["attention"][i].sum()], (gradient[i] != 0).tolist()
        n, finished = len(ids), bool(rollout["finished"][i])
        assert (ids == 1).tolist() == [False] * (n - 1) + [finished] and not any(pushed[n:])
        if script.__name__ in OURS:
            assert pushed[:n] == [pushed[0]] * n
        ends += [pushed[n - 1]] * finished
    assert sum(ends) >= (3 if script.__name__ in OURS else 1), (
        f"{len(ends)} completions end with end-of-sequence, and {sum(ends)} of these tokens have a gradient: "
        "so stopping is not learnt. Ignore it only if the objective leaves these tokens out on purpose.")

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
    before, after = sum(rewards[:3]), sum(rewards[-3:])
    assert after > (3 if script.__name__ in OURS else 1.5) * before, (
        f"in 12 steps the reward went from {before / 3:.2f} to {after / 3:.2f}. Ignore it only if the "
        "objective is to learn slowly, or another thing than the reward.")

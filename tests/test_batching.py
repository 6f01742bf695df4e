"""Batches, statistics, optimizer: every row is trained on once, and the gradient is that of any split."""
import copy
import math

import pytest
import torch
from conftest import Trainer, holes, random_batch, same, settings, spy

import common
import grpo
import gspo

@pytest.mark.parametrize("tokens", [1, 100, 350, 10**6])
def test_every_row_is_in_one_micro_batch_within_the_budget(tokens):
    """ids are trimmed to the part's longest row, and (N, T) to its longest completion, whatever the mask."""
    batch = random_batch(23, seed=1, longest=35)
    seen, lengths, whole = [], batch["mask"].sum(1), batch["mask"].shape[1]
    batch |= {"adv": torch.rand(23, 1), "rewards": torch.rand(23), "deep": torch.rand(23, whole, 3)}
    batch |= {"old_logp": -batch["mask"], "mask": holes(batch["mask"])}
    batch["mask"][3], batch["skip"][7] = 0, True  # a row without a token to train on is not skipped
    for part in common.micro_batches(batch, tokens):
        rows, (n, L), T = part["row"].tolist(), part["ids"].shape, part["mask"].shape[1]
        assert n * L <= tokens or n == 1
        assert L == (part["prompt_length"] + part["completion_length"]).max() and T == lengths[rows].max()
        for name, width in {"ids": L, "mask": T, "old_logp": T, "deep": T, "adv": 1}.items():
            assert torch.equal(part[name], batch[name][rows, :width]), name
        assert torch.equal(part["rewards"], batch["rewards"][rows])
        seen += rows
    assert sorted(seen) == [i for i in range(23) if i != 7]
    total = (batch["prompt_length"] + batch["completion_length"])[seen].tolist()
    assert total == sorted(total, reverse=True)  # so there is little padding
    parts = [part["row"].tolist() for part in common.minibatches(batch | {"ids": batch["ids"][:21]}, 4, 3)]
    assert sum(parts, []) == list(range(21)) and [len(part) for part in parts] == [6, 6, 6, 3]  # whole groups

@pytest.mark.parametrize("script", [grpo, gspo])
def test_equal_rewards_without_a_kl_move_no_weight(script, monkeypatch):
    """Such rows are skipped; if all are, no step is taken although Adam has momentum."""
    trainer = Trainer(script, lambda *_: [0, 1, 5, 5, 2, 3, 4, 4, 1, 0, 0, 2], beta=0.0)
    assert trainer.rollout["skip"].nonzero()[:, 0].tolist() == [2, 3, 6, 7]
    trainer.use_adam(lr=0.01)
    trainer.update()
    before = copy.deepcopy(trainer.policy.state_dict())
    trainer.reward, calls = lambda *_: [1.0] * 12, spy(monkeypatch, script, "policy_loss")
    trainer.collect()
    assert trainer.update() == {"skipped": 0, "zero_gradient": 1} and not calls
    assert same(before, trainer.policy.state_dict())

def test_rollout_statistics_leave_padding_out():
    """And tokens with mask 0. The sampler's -log pi sums to 8.8 over nine tokens. KL is the mean of
    x - log x - 1, where x = pi_ref / pi is 2 for two tokens and 1 for the others. The sampler's log-probs are
    off by .3, -.3 and .2, so their mean square difference is (.09 + .09 + .04) / 9."""
    mask = torch.tensor([[1.0, 1, 0, 1], [1, 0, 0, 0], [0, 1, 1, 0], [1, 1, 0, 1]])
    rollout = {"mask": mask, "rewards": torch.tensor([1.0, 1, 0, 1]), "old_logp": -mask, "ref_logp": -mask,
               "finished": torch.tensor([True, True, True, False]), "sampled_logp": -mask,
               "completion_length": torch.tensor([3, 1, 2, 3]), "skip": torch.zeros(4, dtype=torch.bool)}
    rollout["ref_logp"][0, 1:] += math.log(2)
    rollout["sampled_logp"][:2, :2] += torch.tensor([[0.3, -0.3], [0.2, 0]])
    rollout["old_logp"][mask == 0] = 9.0  # after the mask was made
    args = settings(grpo, group_size=2, dtype="bfloat16")  # where such differences are allowed
    assert common.rollout_stats(rollout, args) == pytest.approx({
        "reward": 0.75, "completion_length": 2.25, "truncated": 0.25, "entropy": 8.8 / 9,
        "kl": 2 * (1 - math.log(2)) / 9, "zero_variance_groups": 0.5,
        "sampling_logp_difference": math.sqrt(0.22 / 9)})
    del rollout["ref_logp"]
    args.group_size = 1
    assert not {"kl", "zero_variance_groups"} & common.rollout_stats(rollout, args).keys()
    rollout["skip"][0] = True
    stats = common.rollout_stats(rollout, args)
    assert stats["sampling_logp_difference"] == pytest.approx(math.sqrt(0.04 / 6))
    assert stats["completion_length"] == 2.25 and stats["entropy"] == pytest.approx(8.8 / 9)
    pytest.raises(RuntimeError, common.rollout_stats, rollout | {"rewards": torch.ones(8)}, args)  # not N

@pytest.mark.parametrize("P", [1, 4, 7, 10, 25])
def test_batches_visit_every_problem_once_a_pass(P):
    """Batches run through shuffles of all ten problems, and depend on the seed and the step alone."""
    def drawn(steps, seed=0):
        return [problem for step in steps for problem in common.batch_of(range(10), step, P, seed)]
    once, other = drawn(range(1, 41)), drawn(range(1, 41), seed=1)
    passes = [tuple(x[i:i + 10]) for x in (once, other) for i in range(0, len(x) - 9, 10)]
    assert len(once) == 40 * P and all(sorted(each) == list(range(10)) for each in passes)
    assert len(set(passes)) == len(passes) and drawn(range(5, 8)) == once[4 * P:7 * P]

# --- the optimizer

def weights_like(seed):
    torch.manual_seed(seed)
    return [torch.randn(7, 3), torch.randn(5), torch.randn(2)]

def backward(model, *gradients):
    sum((w * g).sum() for w, g in zip(model, gradients)).backward()

def test_equals_adamw_with_warmup_and_clipping():
    ours, theirs = (torch.nn.ParameterList(weights_like(0)) for _ in "ab")
    mine = torch.optim.Adam(ours.parameters(), 0.02, (0.9, 0.95), fused=True)
    adamw = torch.optim.AdamW(theirs.parameters(), 0.02, (0.9, 0.95), weight_decay=0.0)
    for step in range(12):
        large, small, _ = weights_like(step + 1)
        for model in (ours, theirs):
            backward(model, large * (0.1 if step % 3 else 3), small)
        stats = common.clip_and_step(mine, 0.02, settings(grpo, warmup_steps=5, max_grad_norm=0.3))
        norm = torch.nn.utils.clip_grad_norm_(theirs.parameters(), 0.3).item()
        lr = adamw.param_groups[0]["lr"] = 0.02 * min(1, (step + 1) / 5)
        adamw.step()
        adamw.zero_grad()
        assert stats == {"skipped": (0, 1), "zero_gradient": (0, 1), "lr": (lr, 1),
                         "grad_norm": (pytest.approx(norm, rel=1e-5), 1)}
        torch.testing.assert_close(list(ours), list(theirs), rtol=1e-5, atol=1e-6)

@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_step_with_a_non_finite_micro_batch_is_skipped_whole(bad):
    """Neither it nor its finite neighbors leaves a trace in weights, moments, schedule or gradients."""
    models, args = [torch.nn.ParameterList(weights_like(0)) for _ in "ab"], settings(grpo, warmup_steps=4)
    ours, clean = (torch.optim.Adam(model.parameters(), fused=True) for model in models)
    for step in range(5):
        if step == 2:
            for factor in (1.0, bad, 2.0):
                backward(models[0], torch.full((7, 3), factor), torch.ones(5))
            assert common.clip_and_step(ours, 0.01, args) == {"skipped": (1, 1), "zero_gradient": (0, 1)}
        for model, optimizer in zip(models, (ours, clean)):
            backward(model, *weights_like(step + 1))
            assert common.clip_and_step(optimizer, 0.01, args)["skipped"] == (0, 1)
    assert all(map(torch.equal, *(model.parameters() for model in models)))
    assert same(ours.state_dict(), clean.state_dict()) and ours.param_groups[0]["steps"] == 5

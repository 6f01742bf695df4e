"""Batches, statistics, optimiser: every row is trained on once, and no gradient depends on the cut."""
import math
import random

import pytest
import torch
from conftest import make_batch, random_batch, settings, spy, tiny_model

import common
import grpo

@pytest.mark.parametrize("tokens", [1, 40, 100, 350, 10**6])
def test_every_row_is_in_one_micro_batch_within_the_budget(tokens):
    """Also a row over the budget, which goes alone. All tensors are cut alike, to the part's longest row."""
    batch = random_batch(23, seed=1, prompt=(1, 30), completion=(1, 40)) | {"texts": ["x"] * 23}
    batch |= {"adv": torch.rand(23, 1), "rewards": torch.rand(23), "old_logp": -batch["mask"]}
    seen = []
    for part in common.micro_batches(batch, tokens):
        rows, (n, L), T = part["row"].tolist(), part["ids"].shape, part["mask"].shape[1]
        assert n * L <= tokens or n == 1
        assert L == part["attention"].sum(1).max() and T == part["mask"].sum(1).max()
        for name, width in [("ids", L), ("attention", L), ("mask", T), ("old_logp", T), ("adv", 1)]:
            assert torch.equal(part[name], batch[name][rows, :width]) and not batch[name][rows, width:].any()
        assert torch.equal(part["rewards"], batch["rewards"][rows])
        seen += rows
    assert sorted(seen) == list(range(23))

@pytest.mark.parametrize("rows", [64, 256])
@pytest.mark.parametrize("seed", range(4))
def test_at_most_an_eighth_is_padding(rows, seed):
    """Lengths as in GSM8K, log-normal of mean 270 and deviation 144 behind prompts of about 100. In the order
    drawn half would be padding; nor is it thanks to micro-batches of a row or two."""
    rng = random.Random(seed)
    prompts = [[5] * rng.randint(60, 140) for _ in range(rows)]
    lengths = [round(rng.lognormvariate(math.log(270) - 0.125, 0.5)) for _ in range(rows)]
    batch = make_batch(prompts, [[5] * length for length in lengths])
    parts = list(common.micro_batches(batch, 16384))
    padded, positions = map(sum, zip(*(common.padding(part)["padding"] for part in parts)))
    assert positions - padded == batch["attention"].sum()
    assert padded <= 0.12 * positions and len(parts) <= rows / 6

@pytest.mark.parametrize("P, G, count", [(6, 4, 3), (7, 3, 4), (5, 1, 5), (8, 2, 1)])
def test_minibatches_keep_groups_whole(P, G, count):
    """Every row once a pass, uneven parts included; no group is torn."""
    rollout = random_batch(P * G)
    parts = list(common.minibatches(rollout, count, G))
    rows = [part["row"].tolist() for part in parts]
    assert len(rows) == count and sum(rows, []) == list(range(P * G))
    assert all(len(row) % G == 0 and P // count <= len(row) / G <= -(-P // count) for row in rows)
    assert torch.equal(torch.cat([part["ids"] for part in parts]), rollout["ids"])

@pytest.mark.parametrize("tokens", [1, 50, 10**6])
def test_scores_of_a_rollout_are_put_back_in_place(tokens, monkeypatch):
    """Micro-batches, cut as in the update, are sorted by length; what comes back is not."""
    rollout = random_batch(18, seed=3)
    rollout["x"] = rollout["mask"] * torch.rand(rollout["mask"].shape)
    args = settings(grpo, minibatches=4, group_size=2, micro_batch_tokens=tokens, temperature=0.6)
    calls = spy(monkeypatch, common, "micro_batches")
    scores = common.by_micro_batch(lambda b: b["x"] * 0.6, rollout, args)
    assert torch.equal(scores, rollout["x"] * 0.6)
    minibatches = [part["row"].tolist() for part in common.minibatches(rollout, 4, 2)]
    assert [(call.batch["row"].tolist(), call.tokens) for call in calls] == [(m, tokens) for m in minibatches]

def test_statistics_are_weighted_by_their_counts():
    """Pairs (sum, count) become the mean of all, of names in _max the maximum is kept."""
    zero, three, nine = torch.tensor([0.0, 3, 9])
    logged = [{"a": (three, three), "m_max": three}, {"m_max": nine},
              {"a": (zero, nine), "m_max": zero, "late": (1, 2)}]
    assert common.means(logged) == {"a": 0.25, "m_max": 9, "late": 0.5}

@pytest.mark.parametrize("value", [torch.tensor(2.0), 0.5, [1.0, 2.0], None])
def test_a_statistic_that_is_no_pair_is_named(value):
    """A fork that logged the mean of a tensor once got its maximum over the micro-batches, without a word."""
    with pytest.raises(TypeError, match=r'stats\["entropy"\]'):
        common.means([{"loss": (1.0, 2)}, {"entropy": value}])

def test_rollout_statistics_leave_padding_out():
    """Length, entropy (an estimate, the mean of -log pi_old) and KL are over tokens, truncated over rows. KL
    is the mean of x - log x - 1, x = pi_ref / pi: two of the nine x are 2, the others 1."""
    mask = torch.tensor([[1.0, 1, 1], [1, 0, 0], [1, 1, 0], [1, 1, 1]])
    rollout = {"mask": mask, "rewards": torch.tensor([1.0, 1, 0, 1]), "old_logp": -mask, "ref_logp": -mask,
               "finished": torch.tensor([True, True, True, False]), "seconds": 3.0}
    rollout["ref_logp"][0, 1:] += math.log(2)
    stats = common.rollout_stats(rollout, 2)
    assert stats.pop("kl") == pytest.approx(2 * (2 - math.log(2) - 1) / 9)
    assert stats == {"reward": 0.75, "completion_length": 2.25, "truncated": 0.25, "entropy": 1.0,
                     "rollout_tokens_per_s": 3.0, "zero_variance_groups": 0.5}
    del rollout["ref_logp"]
    assert not {"kl", "zero_variance_groups"} & common.rollout_stats(rollout, 1).keys()

@pytest.mark.parametrize("P", [1, 4, 7, 10, 25])
def test_batches_visit_every_problem_once_a_pass(P):
    """Batches run through shuffles of all ten problems; each is a function of the seed and the step alone."""
    def drawn(steps, seed=0):
        args = settings(grpo, prompts=P, seed=seed)
        return [problem for step in steps for problem in common.batch_of(range(10), step, args)]
    once, other = drawn(range(1, 41)), drawn(range(1, 41), seed=1)
    passes, others = ([tuple(x[i:i + 10]) for i in range(0, len(x) - 9, 10)] for x in (once, other))
    assert len(once) == 40 * P and all(sorted(each) == list(range(10)) for each in passes)
    assert len(set(passes)) == len(passes) and not set(passes) & set(others)
    torch.manual_seed(9)
    assert drawn(range(5, 8)) == once[4 * P:7 * P]

# --- the optimiser

class Weights(torch.nn.Module):
    """Bare weights, equal for equal shapes: their gradients are what a test says they are."""
    device = torch.device("cpu")

    def __init__(self, dtype=torch.float32, shapes=((7, 3), (5,))):
        super().__init__()
        self.w = torch.nn.ParameterList(w.to(dtype) for w in draws(0, shapes))

    def loss(self, *gradients):
        """In float32, as in the scripts; on their way back gradients are rounded to the dtype of the
        weights."""
        return sum((w.float() * g).sum() for w, g in zip(self.w, gradients))

    def backward(self, *gradients):
        self.loss(*gradients).backward()

def draws(seed, shapes=((7, 3), (5,))):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in shapes]

def optimizer(model, lr=0.01, warmup_steps=0, max_grad_norm=math.inf, offload=False, **eps):
    args = settings(grpo, warmup_steps=warmup_steps, max_grad_norm=max_grad_norm, offload_optimizer=offload)
    return common.Optimizer(model, lr, args, **eps)

@pytest.mark.parametrize("offload, eps", [(False, {}), (True, {}), (False, {"eps": 1e-5})])
def test_equals_adamw_with_warm_up_and_clipping(offload, eps):
    """Against torch's, betas .9 and .95, eps 1e-8 unless given, no decay, warm-up of 5 steps, the norm over
    all weights clipped to .3. The second's gradients are near eps, where it counts; the third has none."""
    shapes, near = [(7, 3), (5,), (2,)], 10 * eps.get("eps", 1e-8)
    ours, theirs = Weights(shapes=shapes), Weights(shapes=shapes)
    mine = optimizer(ours, 0.02, 5, 0.3, offload, **eps)
    adamw = torch.optim.AdamW(theirs.parameters(), 0.02, (0.9, 0.95), near / 10, weight_decay=0.0)
    for step in range(12):
        large, small = draws(step + 1)
        for model in (ours, theirs):
            model.backward(large * (0.1 if step % 3 else 3), small * near)
        stats, norm = mine.step("value_"), torch.nn.utils.clip_grad_norm_(theirs.parameters(), 0.3).item()
        adamw.param_groups[0]["lr"] = 0.02 * min(1, (step + 1) / 5)
        adamw.step()
        adamw.zero_grad()
        assert stats == {"value_skipped": (0, 1), "value_grad_clipped": (norm > 0.3, 1),
                         "value_grad_norm": (pytest.approx(norm, rel=1e-5), 1)}
        torch.testing.assert_close(list(ours.w), list(theirs.w), rtol=1e-6, atol=1e-7)

@pytest.mark.parametrize("offload", [False, True])
def test_bfloat16_weights_move_at_a_learning_rate_of_1e_6(offload):
    """Near -.0089 bfloat16 numbers are 6e-5 apart: a step alone would be lost. A hundred move the float32
    master by 1e-4, and the weight is its rounding."""
    model = Weights(torch.bfloat16, [(1,)])
    start = model.w[0].data.div_(-173).item()
    mine = optimizer(model, 1e-6, offload=offload)
    for _ in range(100):
        model.backward(torch.ones(1))
        mine.step()
    master = mine.masters["w.0"]
    assert master.dtype == torch.float32 and master.item() == pytest.approx(start - 1e-4, abs=1e-7)
    assert model.w[0] == master.bfloat16() != start

def test_gradients_of_many_micro_batches_are_summed_in_float32():
    """1 + 256 / 512 = 1.5; in bfloat16 the sum would stay at 1, as 1/512 is half of its spacing there."""
    model = Weights(torch.bfloat16, [(1,)])
    mine = optimizer(model)
    for gradient in [1.0] + [2.0**-9] * 256:
        model.backward(torch.tensor([gradient]))
    assert mine.step()["grad_norm"][0] == 1.5

@pytest.mark.parametrize("dtype, bad", [(torch.float32, math.nan), (torch.bfloat16, math.inf)])
def test_a_step_with_a_non_finite_micro_batch_is_skipped_whole(dtype, bad):
    """No trace of it or of its finite neighbours in weights, moments, schedule or the next step's gradient:
    the run equals one that never saw it."""
    models = Weights(dtype), Weights(dtype)
    ours, clean = (optimizer(model, warmup_steps=4, max_grad_norm=0.5) for model in models)
    for step in range(5):
        if step == 2:
            for factor in (1.0, bad, 2.0):
                models[0].backward(torch.full((7, 3), factor), torch.ones(5))
            assert ours.step() == {"skipped": (1, 1)}
        for model, opt in zip(models, (ours, clean)):
            model.backward(*draws(step + 1))
            assert opt.step()["skipped"] == (0, 1)
    assert all(map(torch.equal, *(model.parameters() for model in models)))
    assert ours.steps_taken == clean.steps_taken == 5
    for a, b in zip(ours.adamw.state.values(), clean.adamw.state.values()):
        assert all(torch.equal(a[name], b[name]) for name in ("step", "exp_avg", "exp_avg_sq"))

@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_saved_and_loaded_it_goes_on_bit_equal(dtype, tmp_path, monkeypatch):
    """Weights, masters, moments and the warm-up survive: 6 steps == 3 steps, save, load, 3 steps. In float16
    so do the loss scale, halved in the second step, and the good steps since then: the third of them doubles
    it."""
    monkeypatch.setattr(common.Optimizer, "GROW_EVERY", 3)
    models = [Weights(dtype), Weights(dtype)]
    runs = [optimizer(model, warmup_steps=5) for model in models]
    scales = []
    for step in range(6):
        if step == 3:
            torch.save(runs[1].state_dict(), tmp_path / "optimizer.pt")
            models[1] = Weights(dtype)
            runs[1] = optimizer(models[1], warmup_steps=5)
            runs[1].load_state_dict(torch.load(tmp_path / "optimizer.pt"))
        for model, run in zip(models, runs):
            run.backward(model.loss(*draws(step + 1)) * (100 if step == 1 else 1))
            run.step()
        scales.append([run.loss_scale for run in runs])
    assert all(map(torch.equal, *(model.parameters() for model in models)))
    assert all(map(torch.equal, *(run.masters.values() for run in runs)))
    expected = [1] * 6 if dtype != torch.float16 else [2 ** n for n in (14, 13, 13, 13, 14, 14)]
    assert scales == [[scale, scale] for scale in expected]

# --- the loss scale of float16, whose numbers lie between 2^-24 and 65,504

def test_small_gradients_are_not_lost_in_float16():
    """2^-27 would round to 0. Scaled by 2^14 it arrives, and is what it was when the optimiser takes its
    step."""
    for dtype in (torch.float16, torch.float32):
        model = Weights(dtype, [(1,)])
        mine, start = optimizer(model, lr=1e-3, eps=1e-12), model.w[0].item()
        mine.backward(model.loss(torch.tensor([2.0 ** -27])))
        assert mine.step()["grad_norm"][0] == 2.0 ** -27
        assert mine.masters["w.0"].item() == pytest.approx(start - 1e-3, abs=1e-6)

def test_after_an_overflow_the_scale_halves_and_the_step_leaves_no_trace():
    """8 x 2^14 and 8 x 2^13 are above 65,504, 8 x 2^12 is not: two steps are skipped whole, with the
    gradients of their finite micro-batches, and the third is the first of a run that never saw them, in
    float32."""
    ours, theirs = Weights(torch.float16), Weights()
    theirs.load_state_dict({name: w.float() for name, w in ours.state_dict().items()})
    mine, other = (optimizer(model, warmup_steps=4, max_grad_norm=5.0) for model in (ours, theirs))
    eight = [torch.full((7, 3), 8.0), torch.full((5,), 0.25)]
    for scale in (2.0 ** 13, 2.0 ** 12):
        mine.backward(ours.loss(*draws(1)))
        mine.backward(ours.loss(*eight))
        assert mine.step() == {"skipped": (1, 1)} and mine.loss_scale == scale and mine.steps_taken == 0
    for model, run in ((ours, mine), (theirs, other)):
        run.backward(model.loss(*eight))
        run.backward(model.loss(*eight) / 2)
    assert mine.step() == other.step() and mine.steps_taken == 1  # the norm too
    assert all(map(torch.equal, mine.masters.values(), other.masters.values()))
    assert all(torch.equal(a, b.half()) for a, b in zip(ours.w, theirs.w))

@pytest.mark.parametrize("shapes", [[(7, 3)], [(7, 3), (5,), (2,)], [(7, 3), (5, 1)]])
def test_the_state_of_other_weights_is_refused(shapes):
    """One weight fewer, as with other layers frozen, one more, one of another shape."""
    other, mine = optimizer(Weights(shapes=shapes)), optimizer(Weights())
    for master in other.masters.values():
        master.data.zero_()
        master.grad = torch.ones_like(master)
    other.adamw.step()
    with pytest.raises((KeyError, ValueError, RuntimeError)):
        mine.load_state_dict(other.state_dict())

def test_every_trained_weight_has_a_master_once():
    """Tied embeddings are one weight. Frozen weights have none."""
    model = tiny_model(dtype=torch.bfloat16, tie_word_embeddings=True)
    model.model.norm.weight.requires_grad_(False)
    mine = optimizer(model)
    assert set(mine.masters) == {name for name, _ in model.named_parameters()} - {"model.norm.weight"}
    common.token_logprobs(model, random_batch(6), 1.0).sum().backward()
    assert all(w.grad.dtype == torch.float32 for w in mine.weights.values())
    assert model.lm_head.weight is model.model.embed_tokens.weight

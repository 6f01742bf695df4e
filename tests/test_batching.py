"""Batches, minibatches, statistics and the optimiser: every row once, no gradient that depends on how rows were cut."""
import argparse
import collections
import random

import pytest
import torch
from conftest import random_batch, save_tiny, tiny_model

import common


def lognormal_batch(rows, prompt, seed):
    """Completion lengths of mean 150 and deviation 80, behind prompts of 20 to 120 tokens or of one token."""
    rng = random.Random(seed)
    mu, sigma = 4.8854, 0.5003  # exp(mu + sigma^2 / 2) = 150, times sqrt(exp(sigma^2) - 1) = 80
    T = torch.tensor([max(1, round(rng.lognormvariate(mu, sigma))) for _ in range(rows)])
    L = T + torch.tensor([rng.randint(20, 120) if prompt else 1 for _ in range(rows)])
    columns = torch.arange(int(L.max()))
    return {"ids": torch.arange(rows)[:, None].repeat(1, len(columns)), "attention": (columns < L[:, None]).long(),
            "mask": (columns[:int(T.max())] < T[:, None]).float(), "adv": torch.arange(rows).float(), "texts": ["x"] * rows}


# --- micro-batches

@pytest.mark.parametrize("tokens", [1, 40, 100, 350, 10**6])
def test_every_row_is_in_one_micro_batch_within_the_budget(tokens):
    """Trap 7: also with the longest row beyond the budget, which then goes alone; all tensors are cut alike and trimmed to
    the longest row of the part, on which no token is lost."""
    batch = random_batch(23, seed=1, prompt=(1, 30), completion=(1, 40)) | {"adv": torch.arange(23.0), "texts": ["x"] * 23}
    batch["old_logp"], batch["place"] = batch["mask"] * torch.randn(batch["mask"].shape), torch.arange(23)
    seen = []
    for part in common.micro_batches(batch, tokens):
        rows, (n, L), T = part["place"], part["ids"].shape, part["mask"].shape[1]
        assert n * L <= tokens or n == 1
        assert L == part["attention"].sum(1).max() and T == part["mask"].sum(1).max()
        assert torch.equal(part["adv"], batch["adv"][rows]) and torch.equal(part["place"], rows)
        for name, width in [("ids", L), ("attention", L), ("mask", T), ("old_logp", T)]:
            assert torch.equal(part[name], batch[name][rows, :width])
            assert name == "ids" or not batch[name][rows, width:].any()
        seen += rows.tolist()
    assert sorted(seen) == list(range(23))


@pytest.mark.parametrize("tokens, count", [(80, 1), (79, 2), (40, 2), (10, 8), (9, 8)])
def test_rows_of_one_length_share_as_few_micro_batches_as_the_budget_allows(tokens, count):
    """Eight rows of ten positions: nothing to gain by cutting, so the budget alone cuts."""
    batch = random_batch(8, prompt=(4, 4), completion=(6, 6))
    assert len(list(common.micro_batches(batch, tokens))) == count


@pytest.mark.parametrize("rows", [64, 256])
@pytest.mark.parametrize("prompt", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_padding_of_lognormal_lengths_is_at_most_a_tenth(rows, prompt, seed):
    """Cut in the order drawn, over half of the positions would be padding; and no thanks to micro-batches of a row or two."""
    parts = list(common.micro_batches(lognormal_batch(rows, prompt, seed), 16384))
    totals = common.Totals()
    for part in parts:
        totals.add(common.padding(part))
    positions, tokens = (sum(f(part) for part in parts) for f in (lambda p: p["ids"].numel(), lambda p: p["attention"].sum().item()))
    assert totals.means()["padding"] == pytest.approx(1 - tokens / positions, rel=1e-6) and 1 - tokens / positions <= 0.1
    assert all(part["ids"].numel() <= 16384 for part in parts) and len(parts) <= rows / 5


def test_the_gradient_does_not_depend_on_the_cut(family):
    """Trap 26: summed over micro-batches of any budget, the gradient of a loss over ragged rows is that of one batch."""
    model, batch = tiny_model(family, dtype=torch.float64), random_batch(13, seed=2, completion=(1, 25))
    batch["push"] = torch.randn(batch["mask"].shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))

    def gradient(tokens):
        model.zero_grad()
        for part in common.micro_batches(batch, tokens):
            (common.token_logprobs(model, part, 0.6) * part["push"]).sum().backward()
        return torch.cat([p.grad.flatten() for p in model.parameters()])
    model.zero_grad()
    (common.token_logprobs(model, batch, 0.6) * batch["push"]).sum().backward()
    whole = torch.cat([p.grad.flatten() for p in model.parameters()])
    for tokens in (1, 60, 150, 10**6):
        assert (gradient(tokens) - whole).norm() / whole.norm() < 1e-6


@pytest.mark.parametrize("P, G, count", [(6, 4, 3), (7, 3, 4), (5, 1, 5), (8, 2, 1)])
def test_minibatches_keep_groups_whole(P, G, count):
    """Trap 7: every row once a pass, uneven parts included; no group is torn."""
    rollout = random_batch(P * G) | {"rewards": torch.arange(P * G).float(), "texts": ["x"] * P * G}
    parts = list(common.minibatches(rollout, count, G))
    assert len(parts) == count and max(len(p["ids"]) for p in parts) - min(len(p["ids"]) for p in parts) <= G
    for part in parts:
        assert torch.equal(part["rewards"], part["place"].float()) and torch.equal(part["ids"], rollout["ids"][part["place"]])
        groups = part["place"].view(-1, G)
        assert torch.equal(groups, groups[:, :1] // G * G + torch.arange(G)) and (groups[:, 0] % G == 0).all()
    assert sorted(sum([part["place"].tolist() for part in parts], [])) == list(range(P * G))


@pytest.mark.parametrize("tokens", [1, 50, 10**6])
def test_score_rows_puts_rows_back_in_place(tokens):
    """Micro-batches come sorted by length; their results do not: row i of the answer is row i's, 0 where it was trimmed."""
    rollout, args = random_batch(18, seed=3), argparse.Namespace(minibatches=4, group_size=2, micro_batch_tokens=tokens)
    rollout["token"], rollout["own"] = rollout["mask"] * torch.rand(rollout["mask"].shape), torch.arange(18)
    result = common.score_rows(lambda b: (b["token"] * 2, b["token"] + b["own"][:, None] * b["mask"]), rollout, args)
    assert torch.equal(result[0], rollout["token"] * 2)
    assert torch.equal(result[1], rollout["token"] + torch.arange(18)[:, None] * rollout["mask"])
    weight = torch.ones(1, requires_grad=True)
    one, = common.score_rows(lambda b: b["token"] * weight, rollout, args)
    assert torch.equal(one, rollout["token"]) and not one.requires_grad
    seen = []
    common.score_rows(lambda b: (seen.append(b["place"].tolist()), b["token"])[1], rollout, args)
    cut = [b["place"].tolist() for part in common.minibatches(rollout, 4, 2) for b in common.micro_batches(part, tokens)]
    assert seen == cut  # as the update cuts it


def test_statistics_are_weighted_by_their_counts():
    """Trap 38: pairs (sum, count) over micro-batches of unlike size become the mean of all, lone tensors the maximum."""
    totals = common.Totals()
    for stats in [{"a": (torch.tensor(3.0), torch.tensor(3.0)), "m": torch.tensor(2.0)}, {"m": torch.tensor(5.0)},
                  {"a": (torch.tensor(0.0), torch.tensor(9.0)), "m": torch.tensor(1.0), "late": (1, 2)}]:
        totals.add(stats)
    assert totals.means() == {"a": 0.25, "m": 5.0, "late": 0.5}


def test_rollout_statistics_leave_padding_out():
    """Traps 38, 40: length and entropy are over tokens, truncated over rows, zero_variance_groups over groups."""
    rollout = {"mask": torch.tensor([[1.0, 1, 1], [1, 0, 0], [1, 1, 0], [1, 1, 1]]), "rewards": torch.tensor([1.0, 1, 0, 1]),
               "finished": torch.tensor([True, True, True, False])}
    stats = common.rollout_stats(rollout, torch.full((4, 3), 2.0) + (1 - rollout["mask"]) * 50, 2, 3.0)
    assert stats == {"reward": 0.75, "completion_length": 2.25, "truncated": 0.25, "entropy": 2.0,
                     "rollout_tokens_per_s": 3.0, "zero_variance_groups": 0.5}


@pytest.mark.parametrize("P", [1, 4, 7, 10, 25])
def test_batches_visit_every_problem_once_a_pass(P):
    """Trap 7 and 35: consecutive batches run through shuffles of the ten problems, across their ends; a batch is a function
    of seed and step alone, whatever was drawn before."""
    problems = [{"question": i} for i in range(10)]
    def batch(step, seed=0):
        return [p["question"] for p in common.batch_of(problems, step, argparse.Namespace(prompts=P, seed=seed))]

    drawn = sum((batch(step) for step in range(1, 101)), [])
    assert len(drawn) == 100 * P
    passes = [tuple(drawn[i:i + 10]) for i in range(0, len(drawn) - 9, 10)]
    assert all(sorted(p) == list(range(10)) for p in passes) and len(set(passes)) > len(passes) - 2
    torch.manual_seed(9)
    assert sum((batch(step) for step in range(5, 8)), []) == drawn[4 * P:7 * P]
    other = sum((batch(step, seed=1) for step in range(1, 101)), [])
    assert other != drawn and len(set(passes) & {tuple(other[i:i + 10]) for i in range(0, len(other) - 9, 10)}) < 2


# --- the optimiser

class Weights(torch.nn.Module):
    """Bare weights: the gradients are what a test says they are."""
    def __init__(self, *tensors):
        super().__init__()
        self.w = torch.nn.ParameterList(torch.nn.Parameter(t.clone()) for t in tensors)

    def backward(self, *gradients):
        sum((w * g.to(w.dtype)).sum() for w, g in zip(self.w, gradients)).backward()


def optimizer(model, lr=0.01, warmup_steps=0, max_grad_norm=float("inf"), offload=False):
    return common.Optimizer(model, lr, argparse.Namespace(
        warmup_steps=warmup_steps, max_grad_norm=max_grad_norm, offload_optimizer=offload))


def draws(seed, *shapes):
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=g) for shape in shapes]


@pytest.mark.parametrize("offload", [False, True])
def test_equals_adamw_with_warm_up_and_clipping(offload):
    """Against torch's AdamW in float32, its lr raised linearly over 5 steps, its gradients clipped to norm 1 over all
    weights together; the reported norm is the one before clipping."""
    ours, theirs = (Weights(*draws(0, (7, 3), (5,))) for _ in range(2))
    mine = optimizer(ours, 0.02, warmup_steps=5, max_grad_norm=1.0, offload=offload)
    group = mine.adamw.param_groups[0]
    assert group["weight_decay"] == 0
    adamw = torch.optim.AdamW(theirs.parameters(), lr=0.02, betas=group["betas"], eps=group["eps"], weight_decay=0.0)
    for step in range(12):
        gradients = [x * (0.1 if step % 3 else 3) for x in draws(step + 1, (7, 3), (5,))]
        for model in (ours, theirs):
            model.backward(*gradients)
        stats = mine.step()
        norm = torch.nn.utils.clip_grad_norm_(theirs.parameters(), 1.0).item()
        adamw.param_groups[0]["lr"] = 0.02 * min(1, (step + 1) / 5)
        adamw.step()
        adamw.zero_grad()
        assert stats["grad_norm"][0] == pytest.approx(norm, rel=1e-5) and stats["skipped"] == (0, 1)
        for a, b in zip(ours.w, theirs.w):
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)
            assert a.grad is None or not a.grad.any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_masters_in_host_memory_take_the_same_steps(dtype):
    """--offload_optimizer changes where they are and nothing else: the weights' bits are those of a run without; a weight
    that got no gradient stays as it was."""
    models = [Weights(*(x.to(dtype) for x in draws(0, (6, 4), (5,), (3,)))) for _ in range(2)]
    runs = [optimizer(model, 0.01, 3, 1.0, offload) for model, offload in zip(models, (False, True))]
    for step in range(5):
        for model, run in zip(models, runs):
            for part in range(2):
                model.backward(*draws(10 * step + part, (6, 4), (5,)))
            run.step()
    for a, b, start in zip(*(model.w for model in models), draws(0, (6, 4), (5,), (3,))):
        assert torch.equal(a, b) and torch.equal(a, start.to(dtype)) == (a.shape == (3,)) and a.grad is None
    assert all(m.device.type == "cpu" and m.dtype == torch.float32 and m.grad is None for m in runs[1].masters)


def test_bfloat16_weights_move_at_a_learning_rate_of_1e_6():
    """Trap 31: after 100 steps the masters are those of a float32 run and the weights their roundings; most weights of
    AdamW on bfloat16 have not moved at all."""
    start = (draws(0, (40, 40))[0] * 0.5).bfloat16()
    half, plain, full = Weights(start), Weights(start), Weights(start.float())
    mine, wide = optimizer(half, 1e-6), optimizer(full, 1e-6)
    adamw = torch.optim.AdamW(plain.parameters(), lr=1e-6, betas=(0.9, 0.95), weight_decay=0.0)
    for step in range(100):
        gradient = (draws(1, (40, 40))[0] + 0.1 * draws(step + 2, (40, 40))[0]).bfloat16()  # mostly of one sign: a steady pull
        for model, opt in [(half, mine), (plain, adamw), (full, wide)]:
            model.backward(gradient)
            opt.step()
            opt.zero_grad() if opt is adamw else None
    master, = mine.masters
    torch.testing.assert_close(master, full.w[0].detach(), rtol=0, atol=1e-9)
    assert half.w[0].dtype == torch.bfloat16 and torch.equal(half.w[0].detach(), master.bfloat16())
    assert (master - start.float()).abs().median() > 5e-5 and master.dtype == torch.float32
    moved = lambda model: (model.w[0].detach() != start).float().mean().item()  # noqa: E731
    assert moved(plain) < 0.05 and moved(half) > 3 * moved(plain)


def test_gradients_of_many_micro_batches_are_summed_in_float32():
    """Trap 32: 1 + 256 / 512 = 1.5; in bfloat16 the sum would stay at 1, as 1/512 is half of its spacing there."""
    model = Weights(torch.zeros(1).bfloat16())
    mine = optimizer(model)
    for gradient in [1.0] + [2.0 ** -9] * 256:
        model.backward(torch.tensor([gradient]))
    assert mine.step()["grad_norm"][0] == 1.5
    assert model.w[0].grad is None and mine.masters[0].grad is None
    model.backward(torch.tensor([2.0]))
    assert mine.step()["grad_norm"][0] == 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_step_with_a_non_finite_micro_batch_is_skipped_whole(dtype, bad):
    """Trap 34: neither it nor its finite neighbours, before and after, leave a trace in weights, moments, schedule or the
    next step's gradient: the run equals one that never saw that step."""
    models = [Weights(*(x.to(dtype) for x in draws(0, (6,), (4,)))) for _ in range(2)]
    ours, clean = (optimizer(model, warmup_steps=4, max_grad_norm=0.5) for model in models)
    for step in range(5):
        if step == 2:
            for first, second in [(1.0, 1.0), (bad, 1.0), (1.0, 2.0)]:
                models[0].backward(torch.full((6,), first), torch.full((4,), second))
            stats = ours.step()
            assert stats["skipped"] == (1, 1) and ours.skipped == 1 and "grad_norm" not in stats
        for model, opt in zip(models, (ours, clean)):
            model.backward(*draws(step + 1, (6,), (4,)))
            assert opt.step()["skipped"] == (0, 1)
        assert all(map(torch.equal, models[0].parameters(), models[1].parameters()))
    assert all(map(torch.equal, ours.masters, clean.masters)) and ours.taken == clean.taken == 5
    for a, b in zip(ours.adamw.state.values(), clean.adamw.state.values()):
        assert all(torch.equal(a[name], b[name]) for name in ("step", "exp_avg", "exp_avg_sq"))


def test_five_non_finite_steps_in_a_row_end_the_run(capsys):
    """Four are survived, a good one starts the count anew, the fifth in a row exits with status 1 and says what to do."""
    model = Weights(torch.zeros(2))
    mine = optimizer(model)
    for gradient in [float("nan")] * 4 + [1.0] + [float("nan")] * 4:
        model.backward(torch.full((2,), gradient))
        mine.step()
    assert mine.skipped == 8 and model.w[0].isfinite().all()
    model.backward(torch.full((2,), float("nan")))
    with pytest.raises(SystemExit) as stop:
        mine.step()
    assert stop.value.code == 1 and "--lr" in capsys.readouterr().err


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_saved_and_loaded_it_goes_on_bit_equal(dtype, tmp_path):
    """Trap 35: masters, moments and the warm-up survive: 6 steps == 3 steps, save, load into fresh weights, 3 steps."""
    straight, first = (Weights(*(x.to(dtype) for x in draws(0, (6,), (4,)))) for _ in range(2))
    runs = {straight: optimizer(straight, warmup_steps=5), first: optimizer(first, warmup_steps=5)}
    for step in range(6):
        if step == 3:
            torch.save(runs.pop(first).state_dict(), tmp_path / "o.pt")
            second = Weights(*(w.detach() for w in first.w))
            runs[second] = optimizer(second, warmup_steps=5)
            runs[second].load_state_dict(torch.load(tmp_path / "o.pt"))
        for model, opt in runs.items():
            model.backward(*draws(step + 1, (6,), (4,)))
            opt.step()
    assert all(map(torch.equal, straight.parameters(), second.parameters()))
    assert all(map(torch.equal, runs[straight].masters, runs[second].masters))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_reference_shares_nothing_with_the_policy(tmp_path, dtype):
    """Trap 33: no storage in common, no gradient, evaluation mode; training the policy leaves the reference's bits alone,
    and load_state_dict makes it the policy's equal."""
    args = argparse.Namespace(model=save_tiny(tmp_path, "qwen3", head_dim=8), dtype=dtype, device="cpu", compile=False, resume=False,
                              out=str(tmp_path))
    policy, reference = common.load_model(common.AutoModelForCausalLM, args.model, args, "--model"), common.load_reference(args)
    before = {name: w.clone() for name, w in reference.state_dict().items()}
    assert not {p.data_ptr() for p in policy.parameters()} & {p.data_ptr() for p in reference.parameters()}
    assert not reference.training and not any(p.requires_grad for p in reference.parameters())
    mine, batch = optimizer(policy, 0.05), random_batch(4)
    for i in range(3):
        common.token_logprobs(policy, batch, 1.0).sum().backward()
        mine.step()
    assert all(torch.equal(w, before[name]) for name, w in reference.state_dict().items())
    assert not any(torch.equal(w, before[name]) for name, w in policy.state_dict().items() if w.dim() == 2)
    reference.load_state_dict(policy.state_dict())
    with torch.no_grad():
        assert torch.equal(common.token_logprobs(policy, batch, 1.0), common.token_logprobs(reference, batch, 1.0))


def test_every_trained_weight_has_a_master_once():
    """Tied embeddings are one weight, with one master and one gradient: the sum of both uses; frozen weights have none."""
    model = tiny_model("qwen2", dtype=torch.bfloat16, tie_word_embeddings=True)
    frozen = next(p for p in model.parameters() if p.dim() == 1)
    frozen.requires_grad_(False)
    mine, batch = optimizer(model), random_batch(6)
    assert len(mine.masters) == len(list(model.parameters())) - 1
    common.token_logprobs(model, batch, 1.0).sum().backward()
    assert all(g is not None and g.dtype == torch.float32 for g in mine.gradients) and frozen.grad is None
    names = collections.Counter(id(w) for w in mine.weights)
    assert max(names.values()) == 1 and model.lm_head.weight is model.model.embed_tokens.weight
    exact = tiny_model("qwen2", dtype=torch.bfloat16, tie_word_embeddings=True).double()
    common.token_logprobs(exact, batch, 1.0).sum().backward()
    ours, theirs = mine.gradients[0].double(), exact.lm_head.weight.grad
    assert (ours - theirs).norm() / theirs.norm() < 0.05

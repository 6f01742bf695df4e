"""The benchmark runs, and its plain ways compute what the fast ones do: else they would be no comparison."""
import copy
import math

import bench
import pytest
import torch
from conftest import ROOT, random_batch, tiny_model, tiny_tokenizer

import common

def test_the_table_is_complete(monkeypatch, capsys):
    """Every part is printed, with its floor or its plain way."""
    monkeypatch.setitem(bench.SIZES, "tiny", ((32, 32, 1, 2, 2, 512, False), dict(P=8, G=4, S=6, T=16)))
    monkeypatch.setattr(bench, "TRL", None)
    table = bench.main(["--minibatches", "2"])
    assert [*table] == ["copy bandwidth", "matrix products", "rollout, all of 16 tokens", "rollout, ragged",
                        "update", "padding", "step", "step, sampling", "step, log-probs", "step, update"]
    assert all(math.isfinite(value) and value > 0 for value, _, _ in table.values())
    assert [name for name, (_, floor, _) in table.items() if floor] == ["rollout, all of 16 tokens", "update"]
    assert [name for name, (_, _, plain) in table.items() if not plain] == [
        "copy bandwidth", "matrix products"]
    shown = capsys.readouterr().out
    assert all(f"\n{name} " in shown for name in table)

@pytest.mark.upkeep
def test_a_model_and_problems_of_ones_own(monkeypatch, capsys):
    """--model: the same lines; where all T tokens are asked for, nothing ends a completion."""
    monkeypatch.setattr(bench, "TRL", None)
    flags = ["--prompts=4", "--group_size=4", "--minibatches=2", "--max_new_tokens=30"]
    table = bench.main(["--model", common.TOY, *flags])
    assert len(table) == 10 and common.stop_ids is bench.STOP_IDS
    assert capsys.readouterr().out.startswith(f"{common.TOY}, float32")
    made = bench.Bench("tiny", common.TOY, flags)
    for p, all_of_them in ((1e-9, True), (0.5, False)):
        made.stop_with(p)
        rollout = common.generate(made.model, made.tokenizer, made.prompts, 4, 30)
        assert (rollout["mask"].sum() == 4 * 4 * 30) == all_of_them

def test_plain_ways_compute_the_same(family):
    model, batch = tiny_model(family), random_batch(7, seed=1)
    logps = [f(model, batch, 0.7) for f in (common.token_logprobs, bench.plain_logprobs)]
    torch.testing.assert_close(*logps, rtol=1e-4, atol=1e-5)
    assert sum((part["row"].tolist() for part in bench.plain_micro_batches(batch, 60)), []) == list(range(7))
    given = model, tiny_tokenizer(), [[5, 6, 7], [9], [1, 0, 8, 3]], 2, 9, 0.0
    ours, plain = (generate(*given)["texts"] for generate in (common.generate, bench.plain_generate))
    assert ours == plain and not model.sampled_by_transformers

@pytest.mark.upkeep
def test_the_measure_of_experts(monkeypatch, capsys):
    """tests/results/moe.py: other weights choose other experts, and a replay with those of before takes some
    of the log-ratio away; without new weights all is 0. It runs from the toy on, too."""
    monkeypatch.syspath_prepend(ROOT / "tests" / "results")
    import moe
    model, _ = moe.make_moe()
    batch, other = random_batch(8, vocab_size=model.config.vocab_size), copy.deepcopy(model)
    for weight in other.parameters():
        weight.data += 0.1 * weight.std() * torch.randn_like(weight)
    still, moved = moe.compare(model, model, batch), moe.compare(model, other, batch)
    assert max(still.values()) < 1e-5 and len(moved) == 19 and all(moved.values())
    monkeypatch.setattr(moe, "MEASURED", (1,))
    moe.measure(common.TOY)
    assert capsys.readouterr().out.count("step  1  as it is") == 6

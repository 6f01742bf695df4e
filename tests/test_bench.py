"""The benchmark runs, and its plain ways compute what the fast ones do: else they would be no comparison."""
import math
import types

import bench
import pytest
import torch
from conftest import random_batch, settings, tiny_model, tiny_tokenizer

import common
import grpo

@pytest.mark.slow
@pytest.mark.parametrize("flags", [[], ["--model", common.TOY, "--prompts=4"]])
def test_the_table_is_complete(flags, monkeypatch):
    """Every part is printed, with its floor or its plain way; a model and problems of one's own, too."""
    monkeypatch.setitem(bench.SIZES, "tiny", ((32, 32, 1, 2, 512), (8, 4, 6, 16)))
    monkeypatch.setattr(bench, "TRL", None)
    table = bench.main([*flags, "--minibatches", "2"])
    assert [*table] == ["copy bandwidth", "matrix products", "rollout", "step", "step, sampling",
                        "step, log-probs", "step, update"]
    assert all(math.isfinite(value) and value > 0 for value, _, _ in table.values())
    assert [name for name, (_, floor, _) in table.items() if floor] == [
        *([] if flags else ["rollout"]), "step, update"]
    assert [name for name, (_, _, plain) in table.items() if not plain] == [*table][:2]

def test_a_copy_reads_and_writes_and_a_ratio_is_plain_over_ours(monkeypatch):
    """By clocks that say 1 s: 4 copies of 4 x 2^25 bytes are read and written. Of ours 1 s, plain 2 s: 2x."""
    machine = types.SimpleNamespace(
        gpu=False, args=settings(grpo), seconds=lambda function: (1.0, None), report=lambda *_: None)
    bench.rates(machine)
    assert machine.bandwidth == 4 * 2 * 4 * 2 ** 25 and machine.rate == 4 * 2 * 1024 ** 3
    machine.seconds, machine.pairs = (lambda function: (function(), None)), 3
    assert bench.Bench.race(machine, lambda: 1.0, lambda: 2.0)[:2] == (1.0, 2.0)

def test_plain_ways_compute_the_same(family):
    model, batch, args = tiny_model(family), random_batch(7, seed=1), settings(grpo, max_new_tokens=9)
    logps = [f(model, batch, args) for f in (common.token_logprobs, bench.plain_logprobs)]
    torch.testing.assert_close(*logps, rtol=1e-4, atol=1e-5)
    assert sum((part["row"].tolist() for part in bench.plain_micro_batches(batch, 60)), []) == list(range(7))
    sample = lambda: common.generate(  # noqa: E731
        model.eval(), tiny_tokenizer(), [[5, 6, 7], [9], [1, 0, 8, 3]], 1, 0.0, args)["texts"]
    assert sample() == bench.plainly(sample)()

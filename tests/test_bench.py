"""The benchmark runs, and its plain ways compute what the fast ones do: else they would be no comparison."""
import math
import shutil
import sys
import types

import bench
import pytest
import torch
from conftest import ROOT, random_batch, settings, tiny_model, tiny_tokenizer

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

def test_rewards_are_equal_in_a_share_of_the_groups():
    """One group of four here; in the others 0 and 1 take turns."""
    work = types.SimpleNamespace(equal=0.25, work=dict(P=4, G=2, S=0, T=0))
    assert bench.rewards(work) == [0, 0, 0, 1, 0, 1, 0, 1]

@pytest.mark.slow
def test_another_checkout_is_timed_with_its_own_defaults(tmp_path, monkeypatch):
    """The other one's --micro_batch_tokens is 77 by default. Our own modules stay what they were."""
    for name in ("common.py", "grpo.py"):
        shutil.copy(ROOT / name, tmp_path)
    source = (ROOT / "common.py").read_text().replace("else 1536)", "else 77)")
    (tmp_path / "common.py").write_text(source)
    other = bench.script_of(str(tmp_path))
    assert other.common is not common and other.common.__file__ == str(tmp_path / "common.py")
    assert other.parse_args(["--model", "x"]).micro_batch_tokens == 77 and sys.modules["grpo"] is grpo
    monkeypatch.setitem(bench.SIZES, "tiny", ((32, 32, 1, 2, 512), (4, 4, 6, 16)))
    monkeypatch.setattr(bench, "TRL", None)
    table = bench.main(["--against", str(tmp_path), "--equal", "0.5", "--minibatches", "2"])
    assert table["step, plain: the other checkout"][2] > 0

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

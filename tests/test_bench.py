"""The benchmark runs at toy size, its plain alternatives compute what the fast ways do, and its work is what it says."""
import importlib.util
import json
import math
import types

import pytest
import torch
from conftest import random_batch, tiny_model

import bench
import common

SMALL = {"tiny": (bench.SIZES["tiny"][0] | dict(hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2),
                  dict(P=4, G=4, S=6, T=32))}


@pytest.fixture
def small(monkeypatch):
    """A benchmark of seconds, TRL left out."""
    monkeypatch.setattr(bench, "SIZES", SMALL)
    monkeypatch.setattr(bench.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(bench, "floors", lambda b: vars(b).update(bandwidth=1e10, rate=1e11))


def test_the_table(small, tmp_path, capsys):
    """Every part is there, printed and in the JSON file, with floors and plain alternatives; a rollout changed no weight, and
    drew from the log-probs that are trained."""
    bench.main(["--json", str(tmp_path / "table.json"), "--minibatches", "2"])
    table, shown = json.loads((tmp_path / "table.json").read_text())["results"], capsys.readouterr().out
    for words in ("rollout, one length: tokens", "rollout, ragged", "update: tokens", "update: MFU", "update: padding", "whole logits",
                  "step: sampling", "step: old log-probs", "step: reference", "step: optimiser", "step: forward", "against the plain loop",
                  "prompts 32", "group_size 64", "max_new_tokens 16", "before an update"):
        assert sum(words in name for name in table) == 1 and words in shown, words
    assert all(math.isfinite(row["value"]) for row in table.values())
    assert sum(row["floor"] is not None for row in table.values()) == 3 and sum(row["plain"] is not None for row in table.values()) >= 7
    assert table["weights whose bits a rollout changed"]["value"] == 0
    assert table["log-probs drawn with and of token_logprobs: largest"]["value"] < 1e-4
    assert table["largest log-ratio before an update: a token's"]["value"] == 0


def test_a_part_within_a_part_leaves_the_peak_of_the_whole(small, monkeypatch):
    """With a stand-in for the GPU's counter of memory, in GiB."""
    b, peak = bench.Bench("tiny", []), [0]
    b.device = types.SimpleNamespace(type="cuda")
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: peak[0] * 2**30)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: peak.__setitem__(0, 1))
    use = lambda size: peak.__setitem__(0, max(peak[0], size))  # noqa: E731
    inner = []

    def whole():
        use(7)
        inner.extend(b.timed(lambda size=size: use(size))[2] for size in (5, 9, 2))
        use(4)
    assert b.timed(whole)[2] == 9 and inner == [5, 9, 2]
    assert b.timed(lambda: use(3))[2] == 3


def test_lengths_are_log_normal(small):
    """The tiny model's completions: logs with median log(T/4) and deviation .6 (.7 but for what T cuts off), by 4,000 draws."""
    b = bench.Bench("tiny", [])
    b.ragged()
    torch.manual_seed(0)
    rollout = common.generate(b.model, b.tokenizer, b.prompts(4, 6), 1000, 32, 1.0)
    logs = (rollout["mask"].sum(1) - 1).clamp(min=1).log()  # a number k is followed by k - 1 more and the stop token
    assert rollout["finished"].float().mean() > 0.99
    assert logs.median().item() == pytest.approx(math.log(8), abs=0.15) and logs.std().item() == pytest.approx(0.6, abs=0.08)


def test_plain_ways_compute_the_same(family):
    """Else they would be no comparison: log-probs and entropies of whole logits; micro-batches hold every row once."""
    model, batch = tiny_model(family), random_batch(7, seed=1)
    fast, plain = (f(model, batch, 0.7, with_entropy=True) for f in (common.token_logprobs, bench.plain_logprobs))
    for a, b in zip(fast, plain):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    rows = bench.numbered(bench.plain_micro_batches)(batch, 60)
    assert sum((part["place"].tolist() for part in rows), []) == list(range(7))


@pytest.mark.skipif(not importlib.util.find_spec("trl"), reason="TRL is not installed")
def test_trl_does_the_same_work(monkeypatch):
    """Rollouts of as many rows, completions of the same mean length."""
    monkeypatch.setattr(bench, "SIZES", SMALL)
    b = bench.Bench("tiny", ["--minibatches", "2"])
    b.ragged()
    ours = common.generate(b.model, b.tokenizer, b.prompts(4, 6), 64, 32, 1.0)["mask"].sum(1).mean().item()
    seconds, length = bench.trl_step(b, 5)
    assert seconds > 0 and length == pytest.approx(ours, rel=0.25)

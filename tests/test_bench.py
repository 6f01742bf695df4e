"""The benchmark runs, and its plain ways compute what the fast ones do: else they would be no comparison. The
curves are those of the runs."""
import importlib.util
import math
import subprocess
import sys

import bench
import plot
import pytest
import torch
from conftest import ROOT, random_batch, tiny_model

import common

def test_the_table_is_complete(monkeypatch, capsys):
    """Every part is printed, with its floor or its plain way."""
    monkeypatch.setitem(bench.SIZES, "tiny", ((32, 32, 1, 2, 2, 512, False), dict(P=8, G=4, S=6, T=16)))
    monkeypatch.setattr(bench, "TRL", None)
    table = bench.main(["--minibatches", "2"])
    assert [*table] == ["copy bandwidth", "matrix products", "rollout, all of 16 tokens", "rollout, ragged",
                        "update", "padding", "step", "step, sampling", "step, log-probs", "step, update",
                        "step, over one of half the prompts"]
    assert all(math.isfinite(value) and value > 0 for value, _, _ in table.values())
    assert [name for name, (_, floor, _) in table.items() if floor] == ["rollout, all of 16 tokens", "update"]
    assert sum(plain is not None for _, _, plain in table.values()) == 8
    shares = [value for name, (value, _, _) in table.items() if name.startswith("step, ")][:3]
    assert sum(shares) == pytest.approx(100)
    shown = capsys.readouterr().out
    assert all(f"\n{name} " in shown for name in table)

def test_plain_ways_compute_the_same(family):
    model, batch = tiny_model(family), random_batch(7, seed=1)
    logps = [f(model, batch, 0.7) for f in (common.token_logprobs, bench.plain_logprobs)]
    torch.testing.assert_close(*logps, rtol=1e-4, atol=1e-5)
    assert sum((part["row"].tolist() for part in bench.plain_micro_batches(batch, 60)), []) == list(range(7))

def test_curves_are_means_and_deviations_at_the_steps_of_all_runs():
    runs = [{0: {"kl": 1.0}, 2: {"kl": 2.0}, 4: {"kl": 7.0}}, {0: {"kl": 3.0}, 2: {"loss": 9.0}, 4: {"kl": 7.0}}]
    assert plot.curve(runs, "kl") == ([0, 4], [2.0, 7.0], [pytest.approx(2 ** 0.5), 0.0])

def test_curves_are_drawn_of_runs_that_have_begun(tmp_path):
    (tmp_path / "killed").mkdir()
    runs = [*(ROOT / "tests" / "results").glob("ppo-seed*.jsonl"), tmp_path / "killed"]
    done = subprocess.run([sys.executable, ROOT / "tests" / "plot.py", *runs, "--out", tmp_path / "curves.png"],
                          capture_output=True, text=True)
    if importlib.util.find_spec("matplotlib"):
        assert done.returncode == 0 and (tmp_path / "curves.png").read_bytes()[1:4] == b"PNG", done.stderr
    else:
        assert done.returncode == 2 and "pip install matplotlib" in done.stderr and done.stderr.count("\n") == 1

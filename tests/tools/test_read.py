"""read.py shows the completions that a run wrote: which ones, in which order."""
import re

import pytest
import read
from conftest import refused, write_jsonl

def record(question, name, reward, **more):
    return {"question": question, "answer": "5", "completion": f"{name}\n#### 5", "reward": reward,
            "right": reward > 0, "tokens": 7, "cut_off": name == "cut"} | more

@pytest.fixture
def run(tmp_path):
    same = [record("Same?", f"s{i}", 1.0) for i in range(4)]
    mixed = [record("Mixed\x1b?", name, paid, advantage=paid - 0.25)
             for name, paid in [("a", 0.5), ("cut", -1), ("b", 0), ("\x1b[31mc\r", 1.5)]]
    (tmp_path / "completions").mkdir()
    for name, records in {"step-10": same + mixed, "step-9": same[:1], "held-out-10": mixed[2:3]}.items():
        write_jsonl(tmp_path / "completions" / f"{name}.jsonl", records)
    return str(tmp_path)

@pytest.mark.parametrize("flags, shown", [
    ("", "Mixed·? ·[31mc· cut a b Same? s0 s3 s1 s2"),  # the best, the worst, the second best ...
    ("--limit 2", "Mixed·? ·[31mc· cut Same? s0 s3"), ("--wrong", "Mixed·? cut b"),
    ("--step 9", "Same? s0"),
    ("--question MIX --limit 1", "Mixed·? ·[31mc·"), ("--held_out", "Mixed·? b"), ("--question old", "")])
def test_which_completions_are_shown_and_in_which_order(flags, shown, run, capsys):
    read.main([run, *flags.split()])
    out = capsys.readouterr().out
    texts = [x.strip() for x in out.splitlines()[2:] if not re.match("answer|  reward|    ####|$", x)]
    assert texts == shown.split() and "\x1b" not in out and "\r" not in out
    if not flags:
        assert "answer 5   right 50% of 4   reward 0.25\n  reward 1.5   7 tokens   advantage +1.250\n" in out
        assert "  reward -1   7 tokens   advantage -1.250   cut off\n    cut\n" in out

def test_without_gold_answers_nothing_is_called_wrong(tmp_path, capsys):
    (tmp_path / "completions").mkdir()
    shown = record("Q", "a", 1.0) | {"answer": "", "right": None}
    write_jsonl(tmp_path / "completions" / "step-1.jsonl", [shown])
    read.main([str(tmp_path)])
    assert capsys.readouterr().out.splitlines()[2:5] == ["Q", "reward 1", "  reward 1   7 tokens"]

def test_a_missing_step_is_refused(run, capsys):
    with refused(capsys, "held-out-N", "[10]"):
        read.main([run, "--held_out", "--step", "9"])

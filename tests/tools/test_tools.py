"""The tools beside the scripts: a smoke test for each, and what would be wrong without a word."""
import json
import math
import os
import re
import statistics
import sys

import bench
import evaluate
import plot
import pytest
import read
import walk
from conftest import ROOT, write_jsonl

import grpo
import gspo
import ppo

sys.path.append(str(ROOT / "tests" / "results" / "mistakes"))
import mistakes  # noqa: E402

@pytest.mark.slow
def test_every_part_of_a_step_is_timed():
    table = bench.main("--prompts 4 --group_size 4 --max_new_tokens 16 --minibatches 2 --device cpu".split())
    assert [*table] == ["copy bandwidth", "matrix products", "rollout", "step", "step, sampling",
                        "step, log-probs", "step, update"]
    assert all(math.isfinite(value) and value > 0 for value, _, _ in table.values())

@pytest.mark.parametrize("flags, shown", [
    ("", "Mixed·? ·[31mc· cut a b Same? s t"),  # the best, the worst, the second best ...
    ("--limit 2", "Mixed·? ·[31mc· cut Same? s t"), ("--step 9", "Same? t"),
    ("--held_out greedy", "Same? s")])
def test_which_completions_are_shown_and_in_which_order(flags, shown, tmp_path, capsys):
    def record(question, text, reward):
        return {"question": question, "answer": "5", "completion": text, "reward": reward,
                "right": reward > 0, "tokens": 7, "cut_off": False}
    one, other = (record("Same?", text, 1) for text in "st")
    mixed = [record("Mixed\x1b?", *each) for each in [("a", .5), ("cut", -1), ("b", 0), ("\x1b[31mc\r", 1.5)]]
    (tmp_path / "completions").mkdir()
    for name, found in [("step-10", [one, other, *mixed]), ("step-9", [other]), ("held-out-10", [other]),
                        ("held-out-10-greedy", [one]), ("held-out-9-greedy", [other])]:
        write_jsonl(tmp_path / "completions" / f"{name}.jsonl", found)
    read.main([str(tmp_path), *flags.split()])
    out = capsys.readouterr().out
    texts = [line.strip() for line in out.splitlines()[2:] if not re.match("answer|  reward|$", line)]
    assert texts == shown.split() and "\x1b" not in out and "\r" not in out
    assert flags or "answer 5   right 50% of 4   reward 0.25\n  reward 1.5   7 tokens\n" in out

def test_curves_are_means_and_ranges_at_the_steps_of_all_runs(tmp_path, monkeypatch, capsys):
    """Runs share a panel, a .csv has its own. A band from the lowest run to the highest cannot leave what is
    possible: no KL below 0. What is left out is named."""
    drawn = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(plot, "draw", lambda panels, *_: drawn.extend(panels))
    for run, key, values in [("a-s0", "mine", [1, 2, 7]), ("a-s1", "mine", [3, None, 7]), ("c", "kl", [0])]:
        (tmp_path / run).mkdir()
        rows = [{"step": 2 * i, key: value} for i, value in enumerate(values)]
        write_jsonl(tmp_path / run / "metrics.jsonl", rows)
    (tmp_path / "d.csv").write_text("run,seed,step,mine\nx,0,1,3\n")
    plot.main("a-s0 a-s1 c d.csv --out p.png --of mine".split())
    assert [(title, table["run"].tolist()) for title, _, table in drawn] == [
        ("mine", ["a"] * 6), ("d: mine", ["x"])]
    assert plot.curve(drawn[0][2], "mine").to_dict("split")["data"] == [[2, 1, 3, 2], [7, 7, 7, 2]]
    assert "c is left out: it has no mine" in capsys.readouterr().err

@pytest.mark.parametrize("script", [ppo, grpo, gspo], ids=lambda script: script.__name__)
def test_the_pushes_of_a_step_and_what_is_printed(script, tmp_path, monkeypatch, capsys):
    """Of the second step. Where pi is pi_old, w = 1, and the pushes of a completion add up to the mean
    advantage of its tokens. Three screens are printed. Below each token of the second one stands the sign of
    its push. No file is written."""
    monkeypatch.chdir(tmp_path)
    lines = (ROOT / "tests/toy/train.jsonl").read_text().splitlines()
    (tmp_path / "few.jsonl").write_text("\n".join(lines[:40]))
    flags = ("--device cpu --prompts 4 --group_size 8 --minibatches 2 --steps 2 --lr 3e-3 --warmup_steps 0 "
             "--max_prompt_tokens 64 --seed 1 --dataset few.jsonl").split()
    seen = walk.watch(script, script.parse_args(flags))
    assert os.listdir() == ["few.jsonl"]
    push, mask = walk.pushes_of(seen, seen["logps"][0]), seen["rows"]["mask"]
    means = (seen["rows"]["adv"] * mask).sum(1) / mask.sum(1)
    assert push.sum(1).tolist() == pytest.approx(means.tolist(), abs=1e-6) and means.abs().max() > 0.1
    assert len(seen["logps"]) == 1 + seen["args"].epochs * seen["args"].minibatches
    monkeypatch.setattr(walk, "watch", lambda script, args: seen)
    walk.main(["--script", script.__name__])
    plain = capsys.readouterr().out
    assert "\033" not in plain and plain.count("\n---- ") == 3
    line, signs = plain.split("sum of pushes  question and completion\n")[1].splitlines()[:2]
    text = line.split(None, 3)[3]
    assert text.replace("↵", "\n").rstrip("∎") == seen["rollout"]["texts"][seen["chosen"][0]]
    expected = [".+-"[(x > 0) - (x < 0)] for x in push[0].tolist()[:len(text)]]
    assert signs.rjust(len(line))[-len(text):] == "".join(expected)

def test_models_are_compared_problem_by_problem(tmp_path, capsys):
    """The toy with two seeds: the same greedy answers, other samples. statistics computes the errors anew."""
    rows, file = (ROOT / "tests/toy/test.jsonl").read_text().splitlines()[:30], tmp_path / "compared.jsonl"
    few, printed = tmp_path / "few.jsonl", []
    flags = f"--device cpu --dataset {few} --eval_samples 2 --compare {file} --seed".split()
    few.write_text("\n".join(rows))
    for seed in "01":
        evaluate.main(evaluate.parse_args([*flags, seed]))
        printed.append(json.loads(capsys.readouterr().out.splitlines()[-1]))
    first, last = map(json.loads, file.read_text().splitlines())
    gains = [b - a for a, b in zip(first["sampled"], last["sampled"])]
    assert any(gains) and printed[0]["sampled_gain"] == printed[1]["greedy_gain"] == [0, 0]
    for found, numbers in [(printed[1]["sampled_gain"], gains), (printed[1]["sampled"], last["sampled"])]:
        error = statistics.stdev(numbers) / 30 ** 0.5
        assert found == pytest.approx([statistics.fmean(numbers), error], abs=6e-5)
    few.write_text("\n".join(rows[1:]))
    with pytest.raises(SystemExit, match="asked other problems"):
        evaluate.main(evaluate.parse_args([*flags, "0"]))

def test_a_checkpoint_is_evaluated_with_the_flags_of_its_run(tmp_path):
    """Here of a run of PPO, which has more flags. What is given on the command line wins."""
    run = ppo.parse_args(["--model=m", "--system_prompt=Solve it.", "--dtype=bfloat16", "--steps=7"])
    (tmp_path / "args.json").write_text(json.dumps(vars(run)))
    args = evaluate.parse_args(["--model", str(tmp_path / "step-20/"), "--dtype", "float32"])
    assert (args.system_prompt, args.dtype, args.prompts) == ("Solve it.", "float32", 256)

def test_every_mistake_of_the_results_can_be_planted_and_its_test_is_there(tmp_path):
    for mistake in mistakes.MISTAKES:
        mistakes.plant(mistake, tmp_path)  # exits where a text is not in its script exactly once
        file, _, test = mistake.test.partition("::")
        assert mistake.choice != bool(test), mistake.name
        assert mistake.choice or f"\ndef {test}(" in (ROOT / "tests" / file).read_text("utf-8"), mistake.name
    lines = mistakes.read_table(mistakes.HERE / "mistakes.csv")
    assert [line["name"] for line in lines] == [mistake.name for mistake in mistakes.MISTAKES]

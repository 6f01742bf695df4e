"""The tools beside the scripts: a smoke test for each, and what would be wrong without a word."""
import ast
import contextlib
import json
import math
import os
import re
import statistics
import sys

import bench
import evaluate
import pandas
import plot
import pytest
import read
import walk
from conftest import ROOT, write_jsonl

import grpo
import gspo
import ppo

RESULTS = ROOT / "tests" / "results"
sys.path += [str(RESULTS / "mistakes"), str(RESULTS / "toy")]
import mistakes, pushes  # noqa: E401, E402

# ---- bench.py, read.py, plot.py

@pytest.mark.slow
def test_every_part_of_a_step_is_timed(monkeypatch):
    monkeypatch.setitem(bench.SIZES, "tiny", ((32, 32, 1, 2, 512), (8, 4, 6, 16)))
    table = bench.main(["--minibatches", "2", "--device", "cpu"])
    assert [*table] == ["copy bandwidth", "matrix products", "rollout", "step", "step, sampling",
                        "step, log-probs", "step, update"]
    assert all(math.isfinite(value) and value > 0 for value, _, _ in table.values())

@pytest.mark.parametrize("flags, shown", [
    ("", "Mixed·? ·[31mc· cut a b Same? s0 s3 s1 s2"),  # the best, the worst, the second best ...
    ("--limit 2", "Mixed·? ·[31mc· cut Same? s0 s3"), ("--step 9", "Same? s0"),
    ("--held_out sampled", "Mixed·? b"), ("--held_out greedy", "Mixed·? a")])
def test_which_completions_are_shown_and_in_which_order(flags, shown, tmp_path, capsys):
    def record(question, name, reward):
        return {"question": question, "answer": "5", "completion": f"{name}\n#### 5", "reward": reward,
                "right": reward > 0, "tokens": 7, "cut_off": name == "cut"}
    same = [record("Same?", f"s{i}", 1.0) for i in range(4)]
    mixed = [record("Mixed\x1b?", name, reward)
             for name, reward in [("a", 0.5), ("cut", -1), ("b", 0), ("\x1b[31mc\r", 1.5)]]
    (tmp_path / "completions").mkdir()
    for name, records in {"step-10": same + mixed, "step-9": same[:1], "held-out-10": mixed[2:3],
                          "held-out-10-greedy": mixed[:1], "held-out-9": same[:1]}.items():
        write_jsonl(tmp_path / "completions" / f"{name}.jsonl", records)
    read.main([str(tmp_path), *flags.split()])
    out = capsys.readouterr().out
    texts = [x.strip() for x in out.splitlines()[2:] if not re.match("answer|  reward|    ####|$", x)]
    assert texts == shown.split() and "\x1b" not in out and "\r" not in out
    assert flags or "answer 5   right 50% of 4   reward 0.25\n  reward 1.5   7 tokens\n" in out
    assert flags or "  reward -1   7 tokens   cut off\n    cut\n" in out
    with pytest.raises(AssertionError, match=r"steps \[9, 10\]"):
        read.main([str(tmp_path), "--step", "8"])

def test_curves_are_means_and_ranges_at_the_steps_of_all_runs():
    """A band from the lowest run to the highest cannot leave what is possible: no KL below 0."""
    runs = pandas.DataFrame({"step": [0, 2, 4, 0, 2, 4], "kl": [1, 2, 7, 3, None, 7]})
    assert plot.curve(runs, "kl").to_dict("split", index=False)["data"] == [[2, 1, 3, 2], [7, 7, 7, 2]]

def test_runs_share_a_panel_and_what_is_left_out_is_named(tmp_path, monkeypatch, capsys):
    drawn = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(plot, "draw", lambda panels, *_: drawn.extend(panels))
    for name, number in [("a-s0", "mine"), ("a-s1", "mine"), ("b", "mine"), ("c", "reward")]:
        (tmp_path / name).mkdir()
        write_jsonl(tmp_path / name / "metrics.jsonl", [{"step": 1, number: 2.0}])
    (tmp_path / "d.csv").write_text("run,seed,step,mine\nx,0,1,3\n")
    plot.main("a-s0 a-s1 b c d.csv --out p.png --of mine".split())
    assert [(title, table["run"].tolist()) for title, _, table in drawn] == [
        ("mine", ["a", "a", "b"]), ("d: mine", ["x"])]
    assert "c is left out: it has no mine" in capsys.readouterr().err
    for runs, error, named in [("a-s0 gone", FileNotFoundError, "gone"), ("c", SystemExit, "nothing")]:
        with pytest.raises(error, match=named):
            plot.main([*runs.split(), "--out", "p.png", "--of", "mine"])

# ---- walk.py

@pytest.fixture(scope="module", params=[ppo, grpo, gspo], ids=lambda script: script.__name__)
def seen(request, tmp_path_factory):
    """What walk.py saw of the second step of a script, which wrote no file."""
    path = tmp_path_factory.mktemp("walk")
    (path / "few.jsonl").write_text("\n".join((ROOT / "tests/toy/train.jsonl").read_text().splitlines()[:40]))
    flags = ("--device cpu --prompts 4 --group_size 8 --minibatches 2 --steps 2 --lr 3e-3 --warmup_steps 0 "
             "--max_prompt_tokens 64 --seed 1 --dataset few.jsonl").split()
    with contextlib.chdir(path):
        seen = walk.watch(request.param, request.param.parse_args(flags))
        assert os.listdir() == ["few.jsonl"]
    return seen

def test_the_pushes_of_a_step_and_what_is_printed(seen, monkeypatch, capsys):
    """Where pi is pi_old, w = 1, and the pushes of a completion add up to the mean advantage of its tokens.
    Four screens are printed. Below each token of the second one stands the sign of its push."""
    push, mask = walk.pushes_of(seen, seen["logps"][0]), seen["rows"]["mask"]
    means = (seen["rows"]["adv"] * mask).sum(1) / mask.sum(1)
    assert push.sum(1).tolist() == pytest.approx(means.tolist(), abs=1e-6) and means.abs().max() > 0.1
    assert len(seen["logps"]) == 1 + seen["args"].epochs * seen["args"].minibatches
    monkeypatch.setattr(walk, "watch", lambda script, args: seen)
    walk.main(["--script", seen["script"].__name__])
    plain = capsys.readouterr().out
    assert "\033" not in plain and plain.count("\n---- ") == 4
    line, signs = plain.split("sum of pushes  question and completion\n")[1].splitlines()[:2]
    text = line.split(None, 3)[3]
    assert text.replace("↵", "\n").rstrip("∎") == seen["rollout"]["texts"][seen["chosen"][0]]
    expected = [".+-"[(x > 0) - (x < 0)] for x in push[0].tolist()[:len(text)]]
    assert signs.rjust(len(line))[-len(text):] == "".join(expected)

# ---- evaluate.py

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
    of_eight = [evaluate.pass_at(k, [1, 1] + [0] * 6) for k in (1, 2, 4)]
    assert of_eight == pytest.approx([2 / 8, 1 - 15 / 28, 1 - 15 / 70])
    either = statistics.fmean(map(math.ceil, first["sampled"]))
    assert printed[0]["pass@2"][0] == pytest.approx(either, abs=6e-5)
    few.write_text("\n".join(rows[1:]))
    with pytest.raises(SystemExit, match="asked other problems"):
        evaluate.main(evaluate.parse_args([*flags, "0"]))

def test_a_checkpoint_is_evaluated_with_the_flags_of_its_run(tmp_path):
    """Here of a run of PPO, which has more flags. What is given on the command line wins."""
    run = ppo.parse_args(["--model=m", "--system_prompt=Solve it.", "--question_column=q", "--seed=3",
                          "--max_new_tokens=32", "--dtype=bfloat16", "--steps=7", "--split=s"])
    (tmp_path / "args.json").write_text(json.dumps(vars(run)))
    args = evaluate.parse_args(["--model", str(tmp_path / "step-20/"), "--dtype", "float32"])
    assert (args.system_prompt, args.question_column, args.max_new_tokens) == ("Solve it.", "q", 32)
    assert (args.dtype, args.prompts, args.group_size) == ("float32", 256, 1)
    assert (args.seed, args.split, args.script) == (0, None, "evaluate.py")
    assert evaluate.parse_args(["--model", str(tmp_path)]).question_column == "question"

# ---- what is in tests/results

def test_pushes_are_up_for_right_answers_down_for_wrong_ones_and_nothing_where_the_clip_holds():
    """GSPO: all tokens of a completion alike, or none. GRPO: of one sign. PPO judges tokens: both signs."""
    _, shown = pushes.measure(steps=2, prompts=16)
    for kind, tokens, found, s in shown:
        sign, one = 1 if kind.endswith("right") else -1, found["gspo"][0]
        assert found["gspo"] == pytest.approx([one] * len(tokens)) and sign * one >= 0
        assert (one == 0) == (s > 1.0004 if sign > 0 else s < 0.9997)
        assert all(sign * push >= 0 for push in found["grpo"])
    assert {found["gspo"][0] == 0 for _, _, found, _ in shown} == {True, False}

def test_every_mistake_is_planted_in_code_that_still_compiles(tmp_path):
    """Not in a comment: the syntax tree is another one. Its test is there. The page is that of the table."""
    trees = {name: ast.dump(ast.parse((ROOT / f"{name}.py").read_bytes())) for name in mistakes.SCRIPTS}
    for mistake in mistakes.MISTAKES:
        mistakes.plant(mistake, tmp_path)
        for file in {edit[0] for edit in mistake.edits}:
            assert ast.dump(ast.parse((tmp_path / f"{file}.py").read_bytes())) != trees[file], mistake.name
        file, _, test = mistake.test.partition("::")
        assert mistake.choice != bool(test), mistake.name
        assert mistake.choice or f"\ndef {test}(" in (ROOT / "tests" / file).read_text("utf-8"), mistake.name
    lines = mistakes.read_table(RESULTS / "mistakes" / "mistakes.csv")
    page = (RESULTS / "mistakes" / "README.md").read_text(encoding="utf-8")
    assert page.partition(mistakes.MARK)[2] == mistakes.page(lines)
    assert [line["name"] for line in lines] == [mistake.name for mistake in mistakes.MISTAKES]

def test_the_faults_of_the_exercises_are_among_them_and_the_answer_names_their_test():
    page = (RESULTS / "README.md").read_text(encoding="utf-8")
    faults = re.findall(r"^ *\| (\d+) \| `(\w+)\.py`.* \| `(.+?)`.* \| `(.+?)`.* \|$", page, re.M)
    answers = dict(re.findall(r"^ *\| (\d+) \| .+ \| `(test_\w+)` \|$", page, re.M))
    assert len(faults) == len(answers) == 10
    for number, file, right, wrong in faults:
        assert right in (ROOT / f"{file}.py").read_text(encoding="utf-8"), right
        tests = [mistake.test.partition("::")[2] for mistake in mistakes.MISTAKES for edit in mistake.edits
                 if file == edit[0] and right in edit[-2] and wrong in edit[-1]]
        assert answers[number] in tests, right

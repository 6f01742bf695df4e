"""The tools beside the scripts: bench.py, plot.py, mistakes.py, the problems, evaluate.py. One smoke test for
each, and what would be wrong without a word."""
import ast
import json
import math
import statistics
import subprocess
import sys

import bench
import pandas
import plot
import pytest
from conftest import ROOT, settings

import grpo

RESULTS = ROOT / "tests" / "results"
sys.path.insert(0, str(RESULTS))
import evaluate, mistakes, pushes  # noqa: E401, E402

@pytest.mark.slow
def test_every_part_of_a_step_is_timed(monkeypatch):
    monkeypatch.setattr(bench, "TRL", None)
    table = bench.main("--prompts 4 --group_size 4 --minibatches 2 --device cpu".split())
    assert [*table] == ["matrix products", "rollout", "step", "step, sampling", "step, log-probs",
                        "step, update"]
    assert all(math.isfinite(value) and value > 0 for value, _, _ in table.values())

def test_curves_are_means_and_ranges_at_the_steps_of_all_runs(tmp_path):
    """A band from the lowest run to the highest cannot leave what is possible: no KL below 0."""
    runs = pandas.DataFrame({"step": [0, 2, 4, 0, 2, 4], "kl": [1, 2, 7, 3, None, 7]})
    assert plot.curve(runs, "kl").to_dict("split", index=False)["data"] == [[2, 1, 3, 2], [7, 7, 7, 2]]
    pytest.importorskip("matplotlib")
    program = [sys.executable, ROOT / "tests/plot.py"]
    subprocess.run([*program, RESULTS / "toy.csv", "--out", tmp_path / "curves.png"], check=True)

def test_the_picture_of_the_pushes_has_them_up_for_right_answers_and_down_for_wrong_ones():
    _, shown = pushes.measure(steps=2, prompts=16)
    for kind, tokens, found, _ in shown:
        sign = 1 if kind.endswith("right") else -1
        assert all(sign * push >= 0 for push in found["grpo"] + found["gspo"])
        assert len(found["ppo"]) == len(tokens)

def test_every_mistake_is_planted_in_code_that_still_compiles(tmp_path):
    """Not in a comment: the syntax tree is another one. Its test exists. The page is up to date."""
    trees = {name: ast.dump(ast.parse((ROOT / f"{name}.py").read_bytes())) for name in mistakes.SCRIPTS}
    tests = {path.name: path.read_text(encoding="utf-8") for path in (ROOT / "tests").glob("test_*.py")}
    for mistake in mistakes.MISTAKES:
        mistakes.plant(mistake, tmp_path)
        for file in {edit[0] for edit in mistake.edits}:
            assert ast.dump(ast.parse((tmp_path / f"{file}.py").read_bytes())) != trees[file], mistake.name
        file, _, test = mistake.test.partition("::")
        assert mistake.choice != bool(test), mistake.name
        assert mistake.choice or f"\ndef {test}(" in tests[file], mistake.name
    lines = mistakes.read_table(RESULTS / "mistakes.csv")
    page = (RESULTS / "mistakes.md").read_text(encoding="utf-8")
    assert page.partition(mistakes.MARK)[2] == mistakes.page(lines)
    assert [line["name"] for line in lines] == [mistake.name for mistake in mistakes.MISTAKES]

def test_no_sum_in_words_or_its_mirror_image_is_in_two_files(tmp_path):
    subprocess.run([sys.executable, RESULTS / "real/make_sums.py", tmp_path], check=True)
    where = {}
    for path in tmp_path.rglob("*.jsonl"):
        for row in map(json.loads, path.open()):
            words = row["question"].removesuffix("?").split()
            assert where.setdefault(tuple(sorted(words) if "plus" in words else words), path) == path
    assert len(where) > 5000

def test_models_are_compared_problem_by_problem(tmp_path, capsys):
    """The toy with two seeds: the same greedy answers, other samples. statistics computes the errors anew."""
    rows, file = (ROOT / "tests/toy/test.jsonl").read_text().splitlines()[:30], tmp_path / "compared.jsonl"
    (tmp_path / "few.jsonl").write_text("\n".join(rows))
    printed, flags = [], {"dataset": str(tmp_path / "few.jsonl"), "split": "train"}
    for seed in (0, 1):
        evaluate.main(settings(grpo, seed=seed, **flags), 2, file)
        printed.append(json.loads(capsys.readouterr().out.splitlines()[-1]))
    first, last = map(json.loads, file.read_text().splitlines())
    gains = [b - a for a, b in zip(first["sampled"], last["sampled"])]
    assert any(gains) and printed[0]["sampled_gain"] == printed[1]["greedy_gain"] == [0, 0]
    for found, numbers in [(printed[1]["sampled_gain"], gains), (printed[1]["sampled"], last["sampled"])]:
        error = statistics.stdev(numbers) / 30 ** 0.5
        assert found == pytest.approx([statistics.fmean(numbers), error], abs=6e-5)
    of_eight = [evaluate.pass_at(k, [1, 1] + [0] * 6) for k in (1, 2, 4)]
    assert of_eight == pytest.approx([2 / 8, 1 - 15 / 28, 1 - 15 / 70])
    (tmp_path / "few.jsonl").write_text("\n".join(rows[1:]))
    with pytest.raises(SystemExit, match="asked other problems"):
        evaluate.main(settings(grpo, **flags), 2, file)

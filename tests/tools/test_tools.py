"""The tools beside the scripts: bench.py, plot.py, the pictures, the mistakes, the problems, evaluate.py. One
smoke test for each, and what would be wrong without a word."""
import ast
import json
import math
import re
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
sys.path += [str(RESULTS / "mistakes"), str(RESULTS / "toy")]
import evaluate, mistakes, pushes  # noqa: E401, E402

# ---- bench.py

@pytest.mark.slow
def test_every_part_of_a_step_is_timed(monkeypatch):
    monkeypatch.setitem(bench.SIZES, "tiny", ((32, 32, 1, 2, 512), (8, 4, 6, 16)))
    monkeypatch.setattr(bench, "TRL", None)
    table = bench.main(["--minibatches", "2", "--device", "cpu"])
    assert [*table] == ["copy bandwidth", "matrix products", "rollout", "step", "step, sampling",
                        "step, log-probs", "step, update"]
    assert all(math.isfinite(value) and value > 0 for value, _, _ in table.values())

# ---- plot.py and pushes.py

def test_curves_are_means_and_ranges_at_the_steps_of_all_runs():
    """A band from the lowest run to the highest cannot leave what is possible: no KL below 0."""
    runs = pandas.DataFrame({"step": [0, 2, 4, 0, 2, 4], "kl": [1, 2, 7, 3, None, 7]})
    assert plot.curve(runs, "kl").to_dict("split", index=False)["data"] == [[2, 1, 3, 2], [7, 7, 7, 2]]

def test_pushes_are_up_for_right_answers_down_for_wrong_ones_and_nothing_where_the_clip_holds():
    """GSPO: all tokens of a completion alike, or none. GRPO: of one sign. PPO judges tokens: both signs."""
    _, shown = pushes.measure(steps=2, prompts=16)
    held = 0
    for kind, tokens, found, s in shown:
        sign, gspo = 1 if kind.endswith("right") else -1, found["gspo"][0]
        assert found["gspo"] == pytest.approx([gspo] * len(tokens))
        assert (gspo == 0) == (s > 1.0004 if sign > 0 else s < 0.9997)
        assert all(sign * push >= 0 for push in found["grpo"]) and sign * gspo >= 0
        held += gspo == 0
    assert 0 < held < len(shown)

# ---- mistakes.py

def test_every_mistake_is_planted_in_code_that_still_compiles(tmp_path):
    """Not in a comment: the syntax tree is another one. Its test is one that exists."""
    trees = {name: ast.dump(ast.parse((ROOT / f"{name}.py").read_bytes())) for name in mistakes.SCRIPTS}
    tests = {path.name: path.read_text(encoding="utf-8") for path in (ROOT / "tests").glob("test_*.py")}
    for mistake in mistakes.MISTAKES:
        mistakes.plant(mistake, tmp_path)
        for file in {edit[0] for edit in mistake.edits}:
            assert ast.dump(ast.parse((tmp_path / f"{file}.py").read_bytes())) != trees[file], mistake.name
        file, _, test = mistake.test.partition("::")
        assert mistake.choice != bool(test), mistake.name
        assert mistake.choice or f"\ndef {test}(" in tests[file], mistake.name

def test_the_page_says_what_the_table_says():
    lines = mistakes.read_table(RESULTS / "mistakes" / "mistakes.csv")
    page = (RESULTS / "mistakes" / "README.md").read_text(encoding="utf-8")
    assert page.partition(mistakes.MARK)[2] == mistakes.page(lines)
    assert [line["name"] for line in lines] == [mistake.name for mistake in mistakes.MISTAKES]

def test_the_faults_of_the_exercises_are_among_them_and_the_answer_names_their_test():
    page = (RESULTS / "README.md").read_text(encoding="utf-8")
    faults = re.findall(r"^ *\| (\d+) \| `(\w+)\.py` \| `(.+)` \| `(.+)` \|$", page, re.M)
    answers = dict(re.findall(r"^ *\| (\d+) \| .+ \| `(test_\w+)` \|$", page, re.M))
    assert len(faults) == len(answers) == 10
    for number, file, right, wrong in faults:
        assert right in (ROOT / f"{file}.py").read_text(encoding="utf-8"), right
        tests = [mistake.test.partition("::")[2] for mistake in mistakes.MISTAKES for edit in mistake.edits
                 if file == edit[0] and right in edit[-2] and wrong in edit[-1]]
        assert answers[number] in tests, right

# ---- real models

def test_no_sum_in_words_or_its_mirror_image_is_in_two_files(tmp_path):
    subprocess.run([sys.executable, RESULTS / "real/make_sums.py", tmp_path], check=True)
    where = {}
    for path in tmp_path.rglob("*.jsonl"):
        for row in map(json.loads, path.open()):
            a, operation, b = row["question"].removeprefix("What is ").removesuffix("?").split()
            unordered = (operation, *sorted((a, b))) if operation == "plus" else (operation, a, b)
            assert where.setdefault(unordered, path) == path
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
    either = statistics.fmean(map(math.ceil, first["sampled"]))
    assert printed[0]["pass@2"][0] == pytest.approx(either, abs=6e-5)
    (tmp_path / "few.jsonl").write_text("\n".join(rows[1:]))
    with pytest.raises(SystemExit, match="asked other problems"):
        evaluate.main(settings(grpo, **flags), 2, file)

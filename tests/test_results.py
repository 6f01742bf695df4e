"""The problems of tests/results/real: no held-out problem is in another file, in no spelling; evaluate.py."""
import csv
import json
import statistics
import subprocess
import sys

import pytest
from conftest import ROOT, settings

import grpo

sys.path.insert(0, str(ROOT / "tests" / "results"))
import evaluate  # noqa: E402

def make(script, *args):
    """Run a script of tests/results/real that writes into args[-1]; returns {file: rows}."""
    subprocess.run([sys.executable, ROOT / "tests/results/real" / script, *args], check=True)
    return {str(path.relative_to(args[-1])): [json.loads(line) for line in path.open()]
            for path in args[-1].rglob("*.jsonl")}

def spelled_alike(question):
    return "".join(c for c in question.casefold() if c.isalnum())

def test_a_question_in_another_spelling_is_the_same_question(tmp_path):
    """Each of 1,200 problems comes twice, with another comma and capital; two are SVAMP's as well."""
    clone, folder = tmp_path / "clone", tmp_path / "clone/data/mawps-asdiv-a_svamp"
    folder.mkdir(parents=True)
    with (folder / "train.csv").open("w") as file:
        table = csv.writer(file)
        table.writerow(["Question", "Numbers", "Equation", "Answer"])
        for i in range(1200):
            for text in ("Tom has number0 pens , Ann number1 . All ?",
                         "tom has number0 pens Ann number1 . all ?"):
                table.writerow([text, f"{i}.0 2.0", "+ number0 number1", f"{i + 2}.0"])
    svamp = [{"Body": f"Tom has {i} pens, ann 2", "Question": "All?", "Equation": f"( {i}.0 + 2.0 )",
              "Answer": i + 2.0} for i in (3, 1199)]
    (clone / "SVAMP.json").write_text(json.dumps(svamp))
    parts = make("make_problems.py", clone, tmp_path / "data")
    assert {name: len(rows) for name, rows in parts.items()} == {
        "warmup.jsonl": 600, "problems/test.jsonl": 400, "problems/train.jsonl": 198, "svamp.jsonl": 2}
    rows = [row for part in parts.values() for row in part]
    assert len({spelled_alike(row["question"]) for row in rows}) == len(rows) == 1200
    assert {"question": "Tom has 3 pens, ann 2. All?", "answer": "5", "solution": "3 + 2 = 5\n#### 5"} in rows

def test_sums_in_words_are_right_and_no_sum_or_its_mirror_image_is_in_two_files(tmp_path):
    """The words are read back from a list written out by hand for the ones and the tens."""
    ones = "one two three four five six seven eight nine".split()
    teens = "ten eleven twelve thirteen fourteen fifteen sixteen seventeen eighteen nineteen".split()
    number = {word: i for i, word in enumerate(["zero", *ones, *teens])}
    for i, tens in enumerate("twenty thirty forty fifty sixty seventy eighty ninety".split(), 2):
        number |= {tens: 10 * i} | {f"{tens}-{one}": 10 * i + j for j, one in enumerate(ones, 1)}
    parts = make("make_sums.py", tmp_path)
    assert {name: len(rows) for name, rows in parts.items()} == {
        "warmup.jsonl": 112, "problems/test.jsonl": 2000, "problems/train.jsonl": 10000}
    questions, where = set(), {}
    for name, rows in parts.items():
        for row in rows:
            a, operation, b = row["question"].removeprefix("What is ").removesuffix("?").split()
            a, b, sign = number[a], number[b], {"plus": "+", "minus": "-"}[operation]
            result = a + b if sign == "+" else a - b
            assert result >= 0 and row["answer"] == str(result)
            assert row["solution"] == f"{a} {sign} {b} = {result}\n#### {result}"
            questions.add(row["question"])
            unordered = (sign, min(a, b), max(a, b)) if sign == "+" else (sign, a, b)
            assert where.setdefault(unordered, name) == name
    assert len(questions) == 12112

def test_models_are_compared_problem_by_problem(tmp_path, capsys, monkeypatch):
    """The toy with two seeds: the same greedy answers, other samples. statistics computes the errors anew."""
    rows, file = (ROOT / "tests/toy/test.jsonl").read_text().splitlines()[:30], tmp_path / "compared.jsonl"
    (tmp_path / "few.jsonl").write_text("\n".join(rows))
    flags = {"dataset": str(tmp_path / "few.jsonl"), "split": "train", "eval_samples": 2}
    printed = []
    for seed in (0, 1):
        evaluate.main(settings(grpo, seed=seed, **flags), file)
        printed.append(json.loads(capsys.readouterr().out.splitlines()[-1]))
    first, last = map(json.loads, file.read_text().splitlines())
    assert sorted(first["questions"]) == sorted(json.loads(row)["question"] for row in rows)
    assert set(first["sampled"]) <= {0, 0.5, 1} and set(first["greedy"]) == {0, 1}
    gains = [b - a for a, b in zip(first["sampled"], last["sampled"])]
    assert any(gains) and printed[0]["sampled_gain"] == printed[1]["greedy_gain"] == [0, 0]
    for found, numbers in [(printed[1]["sampled_gain"], gains), (printed[1]["sampled"], last["sampled"])]:
        error = statistics.stdev(numbers) / 30 ** 0.5
        assert found == pytest.approx([statistics.fmean(numbers), error], abs=6e-5)
    (tmp_path / "few.jsonl").write_text("\n".join(rows[1:]))
    with pytest.raises(SystemExit, match="2"):
        evaluate.main(settings(grpo, **flags), file)
    assert "asked other problems" in capsys.readouterr().err

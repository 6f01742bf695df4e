"""The table of mistakes: each can be planted, what gives one away is found, the page says what was found."""
import ast
import json
import re
import sys

import pytest
from conftest import ROOT

sys.path.insert(0, str(ROOT / "tests" / "results"))
import mistakes as table  # noqa: E402

TREES = {name: ast.dump(ast.parse((ROOT / f"{name}.py").read_bytes())) for name in table.SCRIPTS}

def test_every_mistake_is_planted_in_code_that_still_compiles(tmp_path):
    """Not in a comment: the syntax tree is another one. Its test is one that exists."""
    tests = {path.name: path.read_text(encoding="utf-8") for path in (ROOT / "tests").glob("test_*.py")}
    for mistake in table.MISTAKES:
        table.plant(mistake, tmp_path)
        for file in {file for file, _, _ in mistake.edits}:
            found = ast.dump(ast.parse((tmp_path / f"{file}.py").read_bytes()))
            assert found != TREES[file], mistake.name
        file, _, test = mistake.test.partition("::")
        assert mistake.choice != bool(test), mistake.name
        assert mistake.choice or f"\ndef {test}(" in tests[file], mistake.name
    assert len({mistake.name for mistake in table.MISTAKES}) == len(table.MISTAKES)

def test_text_that_is_not_there_exactly_once_is_an_error(tmp_path):
    first = table.MISTAKES[0]
    for right in ("no such text", "return"):
        with pytest.raises(SystemExit, match=f"'{right}' is .* in common.py, not once"):
            table.plant(first._replace(edits=[("common", right, "")]), tmp_path)

def test_a_mistake_is_trained_and_graded(tmp_path, monkeypatch):
    """With one random number for all completions, those of a group are alike from the first step on."""
    monkeypatch.setattr(table, "EXAM", 40)
    table.warm_up()
    mistake, = (one for one in table.MISTAKES if one.name == "one random number for all completions")
    assert table.quietly(table.train, tmp_path / "run", mistake, 0, tmp_path / "run", 1) == 0
    row = json.loads((tmp_path / "run" / "row.json").read_text())
    assert row["error"] == "" and 0 < row["accuracy"] < 1 and len(row["metrics"]) == 2
    assert row["metrics"][1]["zero_variance_groups"] == 1 and row["metrics"][1]["new_adv_square"] == 0

def run(*values):
    return [{"step": 0}] + [{"step": i, "x": x} for i, x in enumerate(values, 1) if x is not None]

@pytest.mark.parametrize("runs, step", [
    ([run(5, 5, 5, 5, 5, 5)], None),
    ([run(5, 9, 9, 9, 5, 5)], 2), ([run(5, 9, 9, 5, 9, 9)], None),  # three steps one after another
    ([run(5, 9, 9, 1, 9, 9)], None),  # on one side
    ([run(9, 9, 9, 5, 5, 5), run(5, 9, 9, 9, 5, 5)], None),
    ([run(9, 9, 9, 9, 5, 5), run(5, 9, 9, 9, 9, 5)], 2),
    ([run(5, 5, 6.1, 6.1, 6.1, 5)], None), ([run(5, 5, 6.3, 6.3, 6.3, 5)], 3),  # 4 to 6, and .2 on each side
    ([run(8, 8, 8, 8, 8, 8)], 3),  # in the first two steps a neighbour has 8
    ([run(float("nan"), 5, 5, 5, 5, 5)], None), ([run(5, *[float("nan")] * 3, 5, 5)], 2)])
def test_a_number_gives_a_mistake_away_where_all_seeds_are_out_of_range_for_three_steps(runs, step):
    sound = [run(8, 4, 4, 4, 4, 4), run(4, 6, 6, 6, 6, 6)]
    assert table.given_away("x", runs, sound) == step
    assert table.signs(runs, sound) == ([(step, "x")] if step else [])

def test_a_difference_counts_beyond_three_standard_errors():
    """Four sound runs and three others, deviation .01: the error is .01 sqrt(1/3 + 1/4) = .00764."""
    mistake, rows = table.MISTAKES[0], [{"error": "", "metrics": run(1, 1), "accuracy": 0.5}] * 3
    for shift, differs in [(0.0225, 0), (0.0235, 1), (-0.0235, -1)]:
        sound = [{"metrics": run(1, 1), "accuracy": 0.5 - shift}] * 4
        assert table.measure(mistake, rows, sound, 0.01)["differs"] == differs

def test_the_page_says_what_the_table_says():
    lines = table.read_table(ROOT / "tests" / "results" / "mistakes.csv")
    page = (ROOT / "tests" / "results" / "mistakes.md").read_text(encoding="utf-8")
    assert page.partition(table.MARK)[2] == table.page(lines)
    assert [line["name"] for line in lines] == [mistake.name for mistake in table.MISTAKES]
    assert all(line["choice"] or line["red"] for line in lines) and {line["seeds"] for line in lines} == {3}

def test_the_faults_of_the_exercise_are_among_them_and_the_answer_names_their_test():
    """mistakes.py --tests plants every mistake and runs its test; the column `red` says that each failed."""
    files = [ROOT / "README.md", ROOT / "tests" / "results" / "README.md"]
    pages = "\n".join(path.read_text(encoding="utf-8") for path in files)
    faults = re.findall(r"^ *\| (\d+) \| `(\w+)\.py` \| `(.+)` \| `(.+)` \|$", pages, re.M)
    answers = dict(re.findall(r"^ *\| (\d+) \| .+ \| `(test_\w+)` \|$", pages, re.M))
    assert len(faults) == len(answers) == 10
    for number, file, right, wrong in faults:
        tests = [mistake.test.partition("::")[2] for mistake in table.MISTAKES for edit in mistake.edits
                 if file == edit[0] and right in edit[1] and wrong in edit[2]]
        assert answers[number] in tests, right

"""What holds the three scripts together: order, likeness and sizes."""
import ast
import re
import subprocess

import pytest
from conftest import ROOT

pytestmark = pytest.mark.slow  # a copy of a script may be as it likes
OURS = ["ppo", "grpo", "gspo", "common"]
SOURCE = {path.stem: path.read_text(encoding="utf-8") for path in ROOT.glob("*.py")}  # forks, too
TREE = {name: ast.parse(text) for name, text in SOURCE.items()}
FUNCTIONS = {name: {node.name: ast.get_source_segment(SOURCE[name], node) for node in ast.walk(tree)
                    if isinstance(node, ast.FunctionDef)} for name, tree in TREE.items()}
PPO = "parse_args token_rewards gae policy_loss value_loss collect update main"
GRPO = "parse_args group_advantages policy_loss collect update main"
TEMPLATE = {"ppo": PPO.split(), "grpo": GRPO.split(), "gspo": GRPO.split()}

@pytest.mark.parametrize("name", TEMPLATE)
def test_a_script_follows_the_template(name):
    """Docstring with the equations and a command; advantage, loss, collect, update, main in this order; each
    numbered equation stands in the code; two calls lead from main to the loss."""
    doc, functions = ast.get_docstring(TREE[name]), FUNCTIONS[name]
    assert [function for function in functions if function in TEMPLATE[name]] == TEMPLATE[name]
    numbers = set(re.findall(r" \((\d)\)\s*$", doc, re.M))
    assert numbers == set("1234" + "5" * (name == "ppo")) and f"python {name}.py" in doc and "Shapes: " in doc
    code = SOURCE[name].split('"""', 2)[2]
    assert all(re.search(rf"# .*\({number}\)$", code, re.M) for number in numbers)
    assert " collect(" in functions["main"] and " update(" in functions["main"]
    assert " policy_loss(" in functions["update"]
    assert SOURCE[name].endswith('\nif __name__ == "__main__":\n    common.launch(main, parse_args())\n')

@pytest.mark.parametrize("function", ["group_advantages", "collect", "update", "main"])
def test_grpo_and_gspo_differ_in_the_ratio_alone(function):
    """But for the lines that only GSPO-token needs, and a warning of its clip range."""
    gspos = r"\n( +)if (args\.token_level|stats.get\(.sampling_sequence_difference).*(\n\1 +.*)+"
    one, other = (FUNCTIONS[name][function] for name in ("grpo", "gspo"))
    assert one == re.sub(gspos, "", other)

@pytest.mark.parametrize("one, other, cap", [("grpo", "gspo", 32), ("ppo", "grpo", 155)])
def test_a_diff_of_two_scripts_shows_the_algorithm_and_little_else(one, other, cap, tmp_path):
    """Comment lines are not counted: one more in one script costs nothing."""
    for name in (one, other):
        lines = [line for line in SOURCE[name].splitlines() if not line.strip().startswith("#")]
        (tmp_path / name).write_text("\n".join(lines), encoding="utf-8")
    done = subprocess.run(["diff", one, other], cwd=tmp_path, capture_output=True, encoding="utf-8")
    assert 0 < len(re.findall("^[<>]", done.stdout, re.M)) <= cap

@pytest.mark.parametrize("name, cap", [
    ("common.py", 980), ("grpo.py", 165), ("gspo.py", 180), ("ppo.py", 210), ("tests/*.py", 5100)])
def test_files_stay_short(name, cap):
    contents = [path.read_bytes() for path in ROOT.glob(name)]
    assert 0 < sum(content.count(b"\n") for content in contents) <= cap

def test_the_readme_is_capped_by_words_and_common_by_lines_of_code():
    """Words as `wc -w` counts them. A line of code is no comment, no docstring and not blank."""
    assert 0 < len((ROOT / "README.md").read_text(encoding="utf-8").split()) <= 5000
    docs = set()
    for node in ast.walk(TREE["common"]):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(node):
            docs.update(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    lines = enumerate(map(str.strip, SOURCE["common"].splitlines()), 1)
    code = [line for number, line in lines if line and not line.startswith("#") and number not in docs]
    assert 0 < len(code) <= 710

@pytest.mark.parametrize("pattern, cap", [("*.py", 100), ("tests/**/*.py", 110)])
def test_no_line_is_too_wide(pattern, cap):
    for path in ROOT.glob(pattern):
        lines = path.read_text(encoding="utf-8").splitlines()
        wide = [number for number, line in enumerate(lines, 1) if len(line) > cap]
        assert not wide, (path.name, wide)

@pytest.mark.parametrize("name", OURS)
def test_functions_are_explained_and_no_longer_than_40_lines(name):
    """At the top level and in classes; an __init__ may leave it to its class. A function's docstring begins
    with a sentence."""
    classes = [node for node in TREE[name].body if isinstance(node, ast.ClassDef)]
    for node in [*TREE[name].body, *(method for owner in classes for method in owner.body)]:
        if not isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            continue
        doc, where = ast.get_docstring(node), f"{node.name} in line {node.lineno}"
        assert doc or node.name == "__init__", f"{where} has no docstring"
        if isinstance(node, ast.FunctionDef):
            assert node.end_lineno - node.lineno < 40, f"{where} is too long"
        if node in TREE[name].body and isinstance(node, ast.FunctionDef):
            assert re.match(r"[A-Z].*?[.:]", doc, re.S), f"{where}: {doc}"

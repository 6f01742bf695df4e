"""What holds the three scripts together: order, likeness, sizes, and that the README tells the truth."""
import ast
import importlib
import re
import shlex
import subprocess

import pytest
from conftest import ROOT

pytestmark = pytest.mark.upkeep
SOURCE = {path.stem: path.read_text() for path in ROOT.glob("*.py")}  # forks, too
TREE = {name: ast.parse(text) for name, text in SOURCE.items()}
FUNCTIONS = {name: {node.name: ast.get_source_segment(SOURCE[name], node) for node in ast.walk(tree)
                    if isinstance(node, ast.FunctionDef)} for name, tree in TREE.items()}
PPO = "parse_args token_rewards gae policy_loss value_loss collect update main"
GRPO = "parse_args group_advantages policy_loss collect update main"
TEMPLATE = {"ppo": PPO.split(), "grpo": GRPO.split(), "gspo": GRPO.split()}
README = (ROOT / "README.md").read_text()

def test_the_top_level_is_scripts_common_tests_readme_and_requirements():
    """As git has it. A fork's script may stand there too; what a run writes lies under runs/."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True).stdout.split()
    top = {path.split("/")[0] for path in listed if not path.startswith(".")}
    if not top:
        pytest.skip("no git checkout")
    files = {"ppo.py", "grpo.py", "gspo.py", "common.py", "tests", "README.md", "requirements.txt"}
    assert files <= top and {name for name in top - files if not name.endswith(".py")} <= {"LICENSE"}

@pytest.mark.parametrize("name", SOURCE)
def test_scripts_import_common_and_common_no_script(name):
    imports = [node for node in ast.walk(TREE[name]) if isinstance(node, (ast.Import, ast.ImportFrom))]
    imported = {alias.name for node in imports for alias in node.names}
    imported |= {node.module.split(".")[0] for node in imports if isinstance(node, ast.ImportFrom)}
    assert imported & set(SOURCE) == (set() if name == "common" else {"common"})

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
    """But for the lines that only GSPO-token needs."""
    one, other = (re.sub(r"\n    if args.token_level:.*(\n {8}.*)+", "", FUNCTIONS[name][function])
                  for name in ("grpo", "gspo"))
    assert one == other

def test_ppo_has_the_clipped_surrogate_of_grpo():
    start = r"(lengths|log_ratio|ratio|clipped|objective|loss|is_clipped) ="
    shared = [line for line in FUNCTIONS["ppo"]["policy_loss"].splitlines() if re.match(start, line.strip())]
    assert len(shared) == 7 and set(shared) <= set(FUNCTIONS["grpo"]["policy_loss"].splitlines())

@pytest.mark.parametrize("one, other, cap", [("grpo", "gspo", 35), ("ppo", "grpo", 150)])
def test_a_diff_of_two_scripts_shows_the_algorithm_and_little_else(one, other, cap):
    done = subprocess.run(["diff", f"{one}.py", f"{other}.py"], cwd=ROOT, capture_output=True, text=True)
    assert 0 < len(re.findall("^[<>]", done.stdout, re.M)) <= cap

@pytest.mark.parametrize("name, lines, kilobytes", [
    ("grpo.py", 165, 99), ("gspo.py", 165, 99), ("ppo.py", 200, 99), ("common.py", 900, 52), ("README.md", 320, 99),
    ("tests/*.py", 4520, 999), ("tests/toy/*", 10 ** 5, 1500)])
def test_files_stay_short(name, lines, kilobytes):
    contents = [path.read_bytes() for path in ROOT.glob(name) if path.is_file()]
    assert 0 < sum(content.count(b"\n") for content in contents) <= lines
    assert sum(map(len, contents)) <= kilobytes * 1000

@pytest.mark.parametrize("name", ["ppo", "grpo", "gspo", "common"])
def test_no_function_is_over_40_lines(name):
    assert not [function for function, text in FUNCTIONS[name].items() if text.count("\n") >= 40]

def test_requirements_are_five_packages():
    names = re.findall(r"^[\w-]+", (ROOT / "requirements.txt").read_text(), re.M)
    assert sorted(names) == ["datasets", "pytest", "torch", "tqdm", "transformers"]

def test_every_command_of_the_readme_parses(monkeypatch, tmp_path):
    """By the script's own parser; which --device and whether there is a run to --resume is left out."""
    text = README.replace("\\\n", " ")
    commands = re.findall(r"^ *(?:\$ )?python (ppo|grpo|gspo)\.py([^#&|>;\n]*)", text, re.M)
    assert {name for name, _ in commands} >= {"grpo"}
    monkeypatch.chdir(tmp_path)
    for name, flags in commands:
        importlib.import_module(name).parse_args(shlex.split(re.sub(r"--(device \S+|resume)", "", flags)))

def test_the_readme_names_no_flag_that_is_not_there():
    """Of the scripts, of a program in tests, or of a fork."""
    programs = [*SOURCE.values(), *(path.read_text() for path in (ROOT / "tests").glob("**/*.p[ya]*"))]
    flags = set(re.findall(r'add\w*\(\s*"--([a-z]\w+)', "".join(programs))) | {"help", "nproc_per_node", "standalone"}
    named = set(re.findall(r"`[^`\n]*?--(?:no-)?([a-z]\w+)", README))
    assert named and not named - flags

"""Upkeep: what holds the three scripts together. Left out of a plain `pytest`; run with `pytest -m upkeep`."""
import ast
import difflib
import re
import shlex
import subprocess
import sys

import pytest

from conftest import ROOT

pytestmark = pytest.mark.upkeep
SCRIPTS = ("ppo", "grpo", "gspo")
SOURCE = {name: (ROOT / f"{name}.py").read_text() for name in (*SCRIPTS, "common")}
TREE = {name: ast.parse(text) for name, text in SOURCE.items()}
SHARED = ("model dataset split eval_split question_column answer_column system_prompt reward_model prompts group_size max_new_tokens "
          "temperature steps epochs minibatches micro_batch_tokens lr warmup_steps max_grad_norm eps_low eps_high seed device dtype out "
          "resume eval_every eval_problems save_every").split()
OWN = {"ppo": "beta gamma lam vf_coef eps_value value_lr whiten".split(), "grpo": "beta kl ref_every".split(), "gspo": ["token_level"]}
CONTRACT = ("math_reward extract_answer token_logprobs generate micro_batches Logger add_args").split()
TEMPLATE = {"ppo": "parse_args token_rewards gae policy_loss value_loss collect update main".split(),
            "grpo": "parse_args group_advantages policy_loss collect update main".split(),
            "gspo": "parse_args group_advantages policy_loss collect update main".split()}


def functions(name, tree=None):
    """Every function and method of a module: name -> node."""
    return {node.name: node for node in ast.walk(tree or TREE[name]) if isinstance(node, ast.FunctionDef)}


def source(name, function):
    """The source of a function, less the lines that only GSPO-token needs."""
    text = ast.get_source_segment(SOURCE[name], functions(name)[function])
    return re.sub(r"\n *if args\.token_level:\n.*", "", text)


def calls(name, function):
    """What a function calls: "update" for a name, "common.generate" for an attribute of a name."""
    found = set()
    for node in ast.walk(functions(name)[function]):
        if isinstance(node, ast.Call):
            found.add(ast.unparse(node.func))
    return found


def tracked():
    """The files of the repository, as git has them; none outside a checkout."""
    listed = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True)
    return listed.stdout.split() if listed.returncode == 0 else []


def test_the_top_level_is_fixed():
    """Three scripts, one module, tests, a README and the requirements; what a run writes lies under runs/."""
    top = {path.split("/")[0] for path in tracked()}
    if not top:
        pytest.skip("no git checkout")
    allowed = {f"{name}.py" for name in SOURCE} | {"tests", "README.md", "requirements.txt", "LICENSE"}
    assert {f"{name}.py" for name in SOURCE} | {"tests"} <= top
    assert not {name for name in top - allowed if not name.startswith(".")}


def test_arrows_run_from_the_scripts_to_common():
    """common imports no script, a script imports no other script, and nothing but common of ours."""
    for name, tree in TREE.items():
        imported = {alias.name.split(".")[0] for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
        imported |= {node.module.split(".")[0] for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
        assert imported & set(SOURCE) == (set() if name == "common" else {"common"}), name
        assert "importlib.import_module" not in SOURCE[name] and "__import__" not in SOURCE[name]


def test_no_algorithm_is_chosen_at_run_time():
    assert not re.search(r"algo(rithm)?\s*==|args\.algo|\bregistry\b", "".join(SOURCE.values()), re.I)


@pytest.mark.parametrize("name", SCRIPTS)
def test_the_template_is_followed_in_order(name):
    """Docstring with the equations, then parse_args, advantage, loss, collect, update, main; ends in the one entry point."""
    order = [node.name for node in TREE[name].body if isinstance(node, ast.FunctionDef)]
    assert [function for function in order if function in TEMPLATE[name]] == TEMPLATE[name]
    doc = ast.get_docstring(TREE[name])
    assert f"python {name}.py" in doc and all(f"({i})" in doc for i in (1, 2, 3, 4)) and "Shapes" in doc
    assert SOURCE[name].rstrip().endswith('if __name__ == "__main__":\n    common.launch(main, parse_args())')


@pytest.mark.parametrize("name", SCRIPTS)
def test_every_numbered_equation_stands_in_the_code(name):
    """Each number of the docstring is cited by the functions below it."""
    doc = TREE[name].body[0]
    code = "\n".join(SOURCE[name].splitlines()[doc.end_lineno:])
    for number in set(re.findall(r"\((\d)\)\s*$", ast.get_docstring(TREE[name]), re.M)):
        assert f"({number})" in code, f"equation ({number}) is nowhere in the code"


# what is equal today: GRPO and GSPO but for the ratio and the lines after `if args.token_level:`; PPO where it can be
EQUAL = [("grpo", "gspo", function) for function in ("group_advantages", "collect", "update", "main")]


@pytest.mark.parametrize("one, other, function", EQUAL, ids=str)
def test_functions_meant_to_be_equal_are_equal(one, other, function):
    assert source(one, function) == source(other, function)


def test_the_losses_of_grpo_and_gspo_differ_in_the_ratio_alone():
    """policy_loss less the line that defines `ratio` and its docstring."""
    def rest(name):
        node = functions(name)["policy_loss"]
        lines = SOURCE[name].splitlines()[node.body[0].end_lineno:node.end_lineno]
        text = re.sub(r"\n *if args\.token_level:\n.*", "", "\n".join(lines))
        return [line.split("  #")[0].rstrip() for line in text.splitlines() if not line.strip().startswith("ratio =")]
    assert rest("grpo") == rest("gspo")


def test_the_loss_of_ppo_is_that_of_grpo_without_the_penalty():
    """Every executable line of PPO's policy_loss that is no return or statistic stands in GRPO's."""
    lines = {name: [line.split("  #")[0].strip() for line in source(name, "policy_loss").splitlines()] for name in ("ppo", "grpo")}
    shared = [line for line in lines["ppo"] if re.match(r"(adv|lengths|log_ratio|ratio|clipped|objective|loss|bound) =", line)]
    assert len(shared) == 8 and all(line in lines["grpo"] for line in shared)


@pytest.mark.parametrize("one, other, cap", [("grpo", "gspo", 40), ("ppo", "grpo", 160)])
def test_the_diff_of_two_scripts_shows_the_algorithm_and_little_else(one, other, cap):
    """Lines that diff marks with < or >."""
    changed = [line for line in difflib.ndiff(SOURCE[one].splitlines(), SOURCE[other].splitlines()) if line[0] in "+-"]
    assert 0 < len(changed) <= cap, f"{len(changed)} lines differ"


def declared(name):
    """The flags of a module: name -> whether argparse stores a true or false."""
    return re.findall(r'add(?:_argument)?\(\s*"--(\w+)"', SOURCE[name])


@pytest.mark.parametrize("name", SCRIPTS)
def test_every_flag_of_the_design_is_there_and_no_flag_is_declared_twice(name):
    flags = declared(name) + declared("common")
    assert set(SHARED + OWN[name]) <= set(flags) and len(flags) == len(set(flags))


@pytest.mark.parametrize("name", SCRIPTS)
def test_every_flag_is_read(name):
    """As args.NAME, in the script or in common; being set there does not count."""
    for flag in declared(name) + declared("common"):
        assert re.search(rf"\bargs\.{flag}\b(?! = )", SOURCE[name] + SOURCE["common"]), f"--{flag} is never read"


@pytest.mark.parametrize("name", SCRIPTS)
def test_every_args_that_is_read_is_a_flag(name):
    """A typo such as args.batch_size would only show at run time."""
    flags = set(declared(name) + declared("common"))
    for module in (name, "common"):
        read = set(re.findall(r"\b(?:self\.)?args\.([a-z]\w*)", SOURCE[module])) - {"script", "json"}
        known = flags if module == name else flags | set().union(*(declared(other) for other in SCRIPTS))
        assert read <= known, read - known


@pytest.mark.parametrize("name", SCRIPTS)
def test_the_way_from_main_to_the_loss_is_two_calls(name):
    """main -> update -> policy_loss, and main -> collect."""
    assert {"collect", "update"} <= calls(name, "main") and "policy_loss" in calls(name, "update")
    assert "common.generate" in calls(name, "collect") and "common.token_logprobs" in calls(name, "update")
    assert ("value_loss" in calls(name, "update")) == (name == "ppo")


def test_common_offers_what_the_design_promises():
    names = {node.name for node in TREE["common"].body if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
    assert set(CONTRACT) <= names


@pytest.mark.parametrize("name", SOURCE)
def test_no_function_is_over_45_lines(name):
    for function, node in functions(name).items():
        assert node.end_lineno - node.lineno + 1 <= 45, f"{function}: {node.end_lineno - node.lineno + 1} lines"


@pytest.mark.parametrize("name", SOURCE)
def test_every_public_function_and_class_has_a_docstring(name):
    for node in TREE[name].body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and not node.name.startswith("_"):
            assert ast.get_docstring(node), f"{node.name} has no docstring"


@pytest.mark.parametrize("name", SOURCE)
def test_everything_defined_is_used(name):
    """By the scripts, by common or by a test."""
    everywhere = "".join(SOURCE.values()) + "".join(path.read_text() for path in (ROOT / "tests").glob("*.py"))
    for node in TREE[name].body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            assert len(re.findall(rf"\b{node.name}\b", everywhere)) > 1, f"{node.name} is never used"


@pytest.mark.parametrize("name", SOURCE)
def test_imports_are_used(name):
    for node in TREE[name].body:
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            for alias in node.names:
                used = (alias.asname or alias.name).split(".")[0]
                assert len(re.findall(rf"\b{used}\b", SOURCE[name])) > 1, f"{used} is imported and not used"


def lines():
    for path in [*ROOT.glob("*.py"), *(ROOT / "tests").glob("*.py")]:
        for number, line in enumerate(path.read_text().splitlines(), 1):
            yield f"{path.name}:{number}", line


def test_lines_are_short_enough():
    assert not [f"{where} ({len(line)})" for where, line in lines() if len(line) > 140]


def test_lines_are_tidy_and_leave_nothing_to_do():
    unfinished = re.compile(r"\b(TO" + r"DO|FIX" + r"ME|X" + r"XX|HA" + r"CK)\b")
    assert not [where for where, line in lines() if line != line.rstrip() or "\t" in line or unfinished.search(line)]


def test_requirements_are_the_five_packages():
    path = ROOT / "requirements.txt"
    if not path.exists():
        pytest.skip("not written yet")
    lines = [line.split("#")[0].strip() for line in path.read_text().splitlines()]
    names = [re.match(r"[\w-]+", line)[0] for line in lines if line and not line.startswith("-")]
    assert sorted(names) == ["datasets", "pytest", "torch", "tqdm", "transformers"]


def readme_commands():
    """Shell commands in the README's code blocks that start one of the scripts, continued lines joined."""
    path = ROOT / "README.md"
    text = path.read_text().replace("\\\n", " ") if path.exists() else ""
    blocks = re.findall(r"^ *```\w*\n(.*?)^ *```", text, re.M | re.S)
    return [line.strip() for block in blocks for line in block.splitlines() if re.search(r"\bpython (ppo|grpo|gspo)\.py", line)]


def test_every_command_of_the_readme_parses(monkeypatch, tmp_path):
    """By the script's own parser; --device is left to the machine at hand."""
    import gspo
    import grpo
    import ppo
    if not (ROOT / "README.md").exists():
        pytest.skip("not written yet")
    assert readme_commands(), "the README names no command"
    monkeypatch.chdir(tmp_path)
    for command in readme_commands():
        name, rest = re.search(r"\bpython (ppo|grpo|gspo)\.py([^#&|>;]*)", command).groups()
        flags = re.sub(r"--(device \S+|resume)", "", rest)
        try:
            {"ppo": ppo, "grpo": grpo, "gspo": gspo}[name].parse_args(shlex.split(flags))
        except SystemExit as left:
            assert left.code == 0, f"does not parse: {command}"


def test_the_readme_names_no_flag_that_does_not_exist():
    path = ROOT / "README.md"
    if not path.exists():
        pytest.skip("not written yet")
    flags = set(sum((declared(name) for name in SOURCE), [])) | {"help", "model-size"}
    flags |= {f"no-{name}" for name in flags}
    unknown = set(re.findall(r"`[^`\n]*?--([a-z][\w-]+)", path.read_text())) - flags
    assert not unknown, unknown


def test_python_compiles_without_a_warning():
    for path in ROOT.glob("*.py"):
        program = f"compile(open({str(path)!r}).read(), {path.name!r}, 'exec')"
        done = subprocess.run([sys.executable, "-W", "error", "-c", program], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr

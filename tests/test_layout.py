"""What holds the three scripts together: order and likeness."""
import ast
import re

import pytest
from conftest import ROOT

pytestmark = pytest.mark.slow  # a copy of a script may be as it likes
PPO = "parse_args token_rewards gae policy_loss value_loss collect update main"
GRPO = "parse_args group_advantages policy_loss collect update main"
TEMPLATE = {"ppo": PPO.split(), "grpo": GRPO.split(), "gspo": GRPO.split()}
SOURCE = {name: (ROOT / f"{name}.py").read_text(encoding="utf-8") for name in TEMPLATE}
TREE = {name: ast.parse(text) for name, text in SOURCE.items()}
FUNCTIONS = {name: {node.name: ast.get_source_segment(SOURCE[name], node) for node in ast.walk(tree)
                    if isinstance(node, ast.FunctionDef)} for name, tree in TREE.items()}

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
    assert SOURCE[name].endswith('\nif __name__ == "__main__":\n    main(parse_args())\n')

@pytest.mark.parametrize("function", ["group_advantages", "collect", "update", "main"])
def test_grpo_and_gspo_differ_in_the_ratio_alone(function):
    """But for what only GSPO-token needs, and a warning of its clip range."""
    gspos = r"\n( +)if (args\.token_level|stats.get\(.sampling_sequence_difference).*(\n\1 +.*)+"
    one, other = (FUNCTIONS[name][function] for name in ("grpo", "gspo"))
    assert one == re.sub(gspos, "", other)

"""What holds grpo.py and gspo.py together: the tests of the one's main are those of the other's."""
import ast
import re

import pytest
from conftest import ROOT

pytestmark = pytest.mark.slow  # a copy of a script may be as it likes

def functions_of(name):
    source = (ROOT / f"{name}.py").read_text(encoding="utf-8")
    return {node.name: ast.get_source_segment(source, node) for node in ast.parse(source).body
            if isinstance(node, ast.FunctionDef)}

@pytest.mark.parametrize("function", ["group_advantages", "collect", "update", "main"])
def test_grpo_and_gspo_differ_in_the_ratio_alone(function):
    """But for what only GSPO-token needs, and a warning of its clip range."""
    gspos = r"\n( +)if (args\.token_level|stats.get\(.sampling_sequence_difference).*(\n\1 +.*)+"
    one, other = (functions_of(name)[function] for name in ("grpo", "gspo"))
    assert one == re.sub(gspos, "", other)

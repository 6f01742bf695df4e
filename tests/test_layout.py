"""What test_cli.py and test_resume.py see of grpo.py holds for gspo.py: both differ in the ratio alone."""
import inspect
import re

import pytest

import grpo
import gspo

@pytest.mark.parametrize("function", ["group_advantages", "collect", "update", "main"])
def test_grpo_and_gspo_differ_in_the_ratio_alone(function):
    """But for what only GSPO-token needs, and a warning of its clip range."""
    gspos = r"\n( +)if (args\.token_level|stats.get\(.sampling_sequence_difference).*(\n\1 +.*)+"
    gspos += "|, args.token_level"
    one, other = (inspect.getsource(getattr(script, function)) for script in (grpo, gspo))
    assert one == re.sub(gspos, "", other)

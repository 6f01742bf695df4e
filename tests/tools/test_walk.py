"""walk.py shows the pushes of a step as they are, in four screens."""
import math

import pytest
import walk
from conftest import ROOT

import grpo
import gspo
import ppo

FLAGS = ("--device cpu --prompts 4 --group_size 8 --minibatches 2 --steps 2 --lr 3e-3 --warmup_steps 0 "
         "--max_prompt_tokens 64 --seed 1 --dataset").split()

@pytest.fixture(scope="module", params=[ppo, grpo, gspo], ids=lambda script: script.__name__)
def seen(request, tmp_path_factory):
    """What walk.py saw of the second step of a script; each is trained once for all tests."""
    path = tmp_path_factory.mktemp("data") / "few.jsonl"
    path.write_text("\n".join((ROOT / "tests/toy/train.jsonl").read_text().splitlines()[:40]))
    return walk.watch(request.param, request.param.parse_args([*FLAGS, str(path)]))

def by_hand(script, A, old, new, low, high):
    """The pushes of one completion in floats."""
    ratios = [math.exp(b - a) for a, b in zip(old, new)]
    if script is gspo:
        ratios = [math.exp(sum(b - a for a, b in zip(old, new)) / len(old))] * len(old)
    is_clipped = [a > 0 and w > 1 + high or a < 0 and w < 1 - low for w, a in zip(ratios, A)]
    return [0 if held else w * a / len(old) for w, a, held in zip(ratios, A, is_clipped)]

def test_the_pushes_are_those_of_a_sum_by_hand(seen):
    """Where pi is pi_old, w = 1, and the pushes of a completion add up to the mean advantage of its tokens.
    Before the last step some are clipped and some are not, as the clip range is narrow here. In float64, as
    rounding to float32 may make both sides of the min equal."""
    script, clipped, (low, high) = seen["script"], set(), (3e-4, 4e-4)
    rows = {name: x.double() if x.is_floating_point() else x for name, x in seen["rows"].items()}
    args = type(seen["args"])(**vars(seen["args"]) | {"eps_low": low, "eps_high": high})
    A = rows["adv"].expand_as(rows["mask"])
    for logp in (rows["old_logp"], seen["logps"][-2].double()):
        pushes = walk.pushes_of(seen | {"rows": rows, "args": args}, logp)
        for i, n in enumerate(rows["mask"].sum(1).int().tolist()):
            of_row = (x[i, :n].tolist() for x in (A, rows["old_logp"], logp))
            expected = by_hand(script, *of_row, low, high)
            assert pushes[i].tolist() == pytest.approx(expected + [0] * (len(pushes[i]) - n), abs=1e-9)
            clipped |= {push == 0 for push in expected}
            if logp is rows["old_logp"]:
                assert pushes[i].sum().item() == pytest.approx(A[i, :n].mean().item(), abs=1e-9)
    assert clipped == {True, False}

def test_what_is_printed(seen, monkeypatch, capsys):
    """Four screens. Below each token of the second one stands the sign of its push."""
    assert len(seen["logps"]) == 1 + seen["args"].epochs * seen["args"].minibatches
    monkeypatch.setattr(walk, "watch", lambda script, args: seen)
    walk.main(["--script", seen["script"].__name__])
    plain = capsys.readouterr().out
    assert "\033" not in plain and plain.count("\n---- ") == 4
    line, signs = plain.split("sum of pushes  question and completion\n")[1].splitlines()[:2]
    text, push = line.split(None, 3)[3], walk.pushes_of(seen, seen["logps"][0])[0].tolist()
    assert text.replace("↵", "\n").rstrip("∎") == seen["rollout"]["texts"][seen["chosen"][0]]
    assert signs.rjust(len(line))[-len(text):] == "".join(".+-"[(x > 0) - (x < 0)] for x in push[:len(text)])

"""walk.py shows the pushes, log-probs and completions of a step as they are, and does not disturb it."""
import argparse
import math
import re
import sys

import pytest
import torch
import walk
from conftest import ROOT, newest, refused, train
from safetensors.torch import load_file

import grpo
import gspo
import ppo

FLAGS = ("--device cpu --prompts 4 --group_size 8 --minibatches 2 --steps 2 --lr 3e-3 --warmup_steps 0 "
         "--seed 1")

@pytest.fixture(scope="module")
def flags(tmp_path_factory):
    """FLAGS with few problems, which are soon read."""
    path = tmp_path_factory.mktemp("data") / "few.jsonl"
    lines = (ROOT / "tests" / "toy" / "train.jsonl").read_text(encoding="utf-8").splitlines()
    path.write_text("\n".join(lines[:40]), encoding="utf-8")
    return f"{FLAGS} --dataset {path}"

@pytest.fixture(scope="module", params=[ppo, grpo, gspo], ids=lambda script: script.__name__)
def seen(request, flags):
    """What walk.py saw of the second step of a script; each is trained once for all tests."""
    return walk.watch(request.param, request.param.parse_args(flags.split()))

def by_hand(script, A, old, new, low, high):
    """The pushes of one completion, as the README's step by hand computes them, in Python's floats."""
    ratios = [math.exp(b - a) for a, b in zip(old, new)]
    if script is gspo:
        ratios = [math.exp(sum(b - a for a, b in zip(old, new)) / len(old))] * len(old)
    is_clipped = [a > 0 and w > 1 + high or a < 0 and w < 1 - low for w, a in zip(ratios, A)]
    return [0 if held else w * a / len(old) for w, a, held in zip(ratios, A, is_clipped)]

def test_the_pushes_are_those_of_a_sum_by_hand(seen):
    """Where pi is pi_old, w = 1, and the pushes of a completion add up to the mean advantage of its tokens.
    Before the last step some are clipped and some are not, as the clip range is narrow here."""
    script, rows, clipped, (low, high) = seen["script"], seen["rows"], set(), (3e-4, 4e-4)
    seen = seen | {"args": argparse.Namespace(**vars(seen["args"]) | {"eps_low": low, "eps_high": high})}
    A = rows["adv"].expand_as(rows["mask"])
    for logp in (seen["logps"][0], seen["logps"][-2]):
        pushes = walk.pushes_of(seen, logp)
        for i, n in enumerate(rows["mask"].sum(1).int().tolist()):
            of_row = (x[i, :n].tolist() for x in (A, rows["old_logp"], logp))
            expected = by_hand(script, *of_row, low, high)
            assert pushes[i].tolist() == pytest.approx(expected + [0] * (len(pushes[i]) - n), abs=1e-6)
            clipped |= {push == 0 for push in expected}
            if logp is seen["logps"][0]:
                assert pushes[i].sum().item() == pytest.approx(A[i, :n].mean().item(), abs=1e-6)
    assert clipped == {True, False}

def test_the_log_probs_are_those_after_each_step_of_the_policy(seen):
    """As many as passes x minibatches; the last are those of the trained model's own logits."""
    rows, args, logps = seen["rows"], seen["args"], seen["logps"]
    assert len(logps) == 1 + args.epochs * args.minibatches and torch.equal(logps[0], rows["old_logp"])
    assert (logps[1] - logps[0]).abs().max() > 1e-3 and (logps[-1] - logps[0]).abs().max() > 1e-2
    for i, n in enumerate(rows["mask"].sum(1).int().tolist()):
        ids = rows["ids"][i, :rows["attention"][i].sum()]
        logits = seen["policy"](ids[None]).logits[0, -n - 1:-1]
        own = torch.log_softmax(logits / args.temperature, -1).gather(1, ids[-n:, None])[:, 0]
        torch.testing.assert_close(logps[-1][i, :n], own, rtol=0, atol=1e-4)

def test_a_watched_run_learns_what_an_unwatched_one_does(flags, tmp_path, monkeypatch):
    """The weights are equal to the last bit."""
    monkeypatch.chdir(tmp_path)
    watched = walk.watch(ppo, ppo.parse_args(flags.split()))["policy"].state_dict()
    train(ppo, flags + " --eval_problems 1")
    saved = load_file(newest() / "model.safetensors")
    assert saved and all(torch.equal(weight, watched[name]) for name, weight in saved.items())

def test_what_is_printed(seen, monkeypatch, capsys):
    """In a pipe there is no escape code, and no line is over 80 columns. Below each token of the second
    screen stands the sign of its push. A terminal has colours instead, unless NO_COLOR says otherwise."""
    monkeypatch.setattr(walk, "watch", lambda script, args: seen)
    def printed():
        torch.manual_seed(0)  # the last screen samples
        walk.main(["--script", seen["script"].__name__])
        return capsys.readouterr().out
    plain = printed()
    assert "\033" not in plain and max(map(len, plain.splitlines())) <= 80 and plain.count("\n---- ") == 4
    lines = plain.split("question and completion\n")[2].splitlines()[:4 * len(seen["chosen"])]
    for k, (line, signs) in enumerate(zip(lines[::2], lines[1::2])):
        step, row = (1, len(seen["logps"]) - 1)[k % 2], seen["chosen"][k // 2]
        push = walk.pushes_of(seen, seen["logps"][step - 1])[k // 2].tolist()
        number, total, question, text = line.split(None, 3)
        assert (int(number), float(total)) == (step, pytest.approx(sum(push), abs=6e-4))
        assert question == seen["problems"][row // 8]["question"]
        assert text.replace("↵", "\n").rstrip("∎") == seen["rollout"]["texts"][row]
        expected = "".join(".+-"[(x > 0) - (x < 0)] for x in push[:len(text)])
        assert signs == " " * (len(line) - len(text)) + expected
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("NO_COLOR", "1")
    assert printed() == plain
    monkeypatch.delenv("NO_COLOR")
    shades = re.findall(r"\033\[48;5;(\d+);38;5;16m.\033\[0m", printed())
    found = [sign for shade in shades for sign in "+-." if int(shade) in walk.SHADES[sign]]
    assert found == [sign for signs in lines[1::2] for sign in signs.strip()]

def test_the_printed_ratios(seen):
    """Of two completions: the token that moved furthest, and the mean over tokens, whose ratio is s. A ratio
    is a division of probabilities. At most four optimiser steps are shown."""
    lines, rewards, count = walk.moved(seen), seen["rows"]["rewards"], len(seen["logps"]) - 1
    steps = {2: [1, 2], 8: [2, 4, 6, 8]}[count]  # PPO takes four passes
    assert [int(step) for step in re.findall(r"after step +(\d+)", lines[1])] == steps
    for i, table in ((rewards.argmax(), lines[2:8]), (rewards.argmin(), lines[-6:])):
        logps = torch.stack(seen["logps"])[:, i, :int(seen["rows"]["mask"][i].sum())]
        t = (logps[-1] - logps[0]).abs().argmax().item()
        of_token = next(line for line in table if line[:3] == f"{t + 1:3}")
        for text, logp in ((of_token, logps[:, t]), (table[-1], logps.mean(1))):
            pairs = [(logp[k].item(), (logp[k].exp() / logp[0].exp()).item()) for k in steps]
            expected = [logp[0].item(), *(x for pair in pairs for x in pair)]
            assert [float(number) for number in text[10:].split()] == pytest.approx(expected, abs=6e-4)

def test_enter_goes_on_in_a_terminal_only(monkeypatch, capsys):
    waits = []
    monkeypatch.setattr("builtins.input", waits.append)
    monkeypatch.setattr(walk, "watch", lambda script, args: {"rows": {"rewards": torch.tensor([0, 1])}})
    monkeypatch.setattr(walk, "screens", lambda seen, colour: [("title", "Text.", ["line"])] * 4)
    for stdin, stdout in [(False, False), (True, False), (False, True), (True, True)]:
        assert not waits
        monkeypatch.setattr(sys.stdin, "isatty", lambda: stdin, raising=False)
        monkeypatch.setattr(sys.stdout, "isatty", lambda: stdout, raising=False)
        walk.main([])
    assert len(waits) == 4

def test_a_copy_of_a_script_is_watched(flags, tmp_path, monkeypatch, capsys):
    """Without the deviation the advantages of c right ones of 8 are 1 - c/8 and -c/8. No file is written."""
    source = (ROOT / "grpo.py").read_text(encoding="utf-8")
    divided = " / (r.std(1, keepdim=True) + 1e-4)"
    assert divided in source
    (tmp_path / "mine.py").write_text(source.replace(divided, ""), encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    walk.main(["--script", "mine", "--after", "0", *flags.split()])
    lines = capsys.readouterr().out.split("---- ")[1].splitlines()
    found = [re.match(r"     ([01]) +([+-]\d\.\d{3})  \d", line) for line in lines]
    pairs = [(float(line[1]), float(line[2])) for line in found if line]
    right = sum(reward for reward, _ in pairs) / 8
    assert len(pairs) == 8 and pairs == [(r, pytest.approx(r - right, abs=6e-4)) for r, _ in pairs]
    assert not list((tmp_path / "empty").iterdir())

def test_bad_input_is_one_line(monkeypatch, capsys):
    with refused(capsys, "--script nothing"):
        walk.main(["--script", "nothing"])
    monkeypatch.setattr(walk, "watch", lambda script, args: {"rows": {"rewards": torch.tensor([1, 1])}})
    with refused(capsys, "--after", "--seed"):
        walk.main([])

"""tests/forks/tool.patch: what a tool wrote is read, but not trained. In common.py it is a seam of the
sampler, policy.tool, that every script can use; in grpo.py it is a calculator."""
import importlib
import json
import math
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers
from conftest import ROOT, Trainer, full_logprobs, slopes, spy, train

pytestmark = pytest.mark.slow
TOY = ROOT / "tests" / "toy"

@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A copy of the scripts, with the patch. It applies without fuzz or offset."""
    path = tmp_path_factory.mktemp("tool")
    for name in ("common.py", "grpo.py", "gspo.py", "tests/conftest.py", "tests/test_every_script.py"):
        (path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, path / name)
    (path / "tests" / "toy").symlink_to(TOY)
    command = ["patch", "-p1", "-F0", "-i", ROOT / "tests" / "forks" / "tool.patch"]
    done = subprocess.run(command, cwd=path, capture_output=True, text=True)
    assert done.returncode == 0 and "offset" not in done.stdout, done.stdout
    return path

@pytest.fixture
def load(folder, monkeypatch):
    """Name -> the patched module. The scripts import the patched common.py."""
    for name in ("common", "grpo", "gspo"):
        monkeypatch.setitem(sys.modules, name, None)  # is put back after the test
        del sys.modules[name]
    monkeypatch.syspath_prepend(folder)
    return importlib.import_module

def tool(ids):
    """Of the tiny models' 8 tokens 1 is the end, also here. What it writes depends on all ids so far."""
    return {5: [1, 6, 5, 7][:1 + len(ids) % 4], 6: [3], 7: [2] * sum(ids)}.get(ids[-1], [])

def writers(ids, T):
    """What mask has to be for a completion: 1 for the model, 0 for the tool. The tool is asked behind the
    model's tokens only. The model's end ends the completion, and the tool's does not."""
    mask, ahead = [], []
    for t, token in enumerate(ids):
        mask.append(0 if ahead else 1)
        if ahead:
            assert token == ahead.pop(0)
        else:
            ahead = tool(ids[:t + 1])
            assert token != 1 or t == len(ids) - 1
    assert ids[-1] == 1 and mask[-1] or len(ids) == T
    return mask

def rows_of(rollout):
    """The completions as lists."""
    return [ids[start:sum(attention)] for ids, start, attention in zip(
        *(rollout[name].tolist() for name in ("ids", "prompt_length", "attention")))]

def masks_of(rollout, T):
    """(N, T) as `writers` finds it, and (N, T) with 1 on both writers' tokens."""
    found = [torch.tensor(writers(ids, T), dtype=torch.float64) for ids in rows_of(rollout)]
    return [torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
            for rows in (found, [torch.ones_like(row) for row in found])]

def trainer_of(script, **flags):
    """Rows with what the tool wrote in them: 6 questions, 8 completions each, up to 24 tokens."""
    trainer = Trainer(script, group_size=8, max_new_tokens=24, **flags)
    trainer.policy.tool = tool
    torch.manual_seed(5)
    trainer.collect()
    return trainer

def test_rows_with_the_tool_and_rows_without_stand_in_one_batch(load, monkeypatch):
    """Who wrote which token, where completions end, and the log-probs of the model's tokens: those of the
    trainer, and those of a row alone with the tool's tokens in its text."""
    script = load("grpo")
    dropped = spy(monkeypatch, script.common.GrowingCache, "reorder_cache")
    trainer = trainer_of(script, beta=0.04)
    rollout = trainer.rollout
    own, both = masks_of(rollout, 24)
    assert torch.equal(rollout["mask"].double(), own) and not rollout["sampled_logp"][own == 0].any()
    waiting = ((own == 0) & (both == 1)).sum(0)  # by column
    assert ((waiting > 3) & (own.sum(0) > 3)).sum() > 5 and len(dropped) > 3  # rows were dropped on the way
    rows = rows_of(rollout)
    ended = [row[-1] == 1 and bool(own[i, len(row) - 1]) for i, row in enumerate(rows)]
    assert rollout["finished"].tolist() == ended and 5 < sum(ended) < 45
    assert sum(1 in row[:-1] for row in rows) > 5  # an end that the tool wrote ends nothing
    alone = full_logprobs(trainer.policy, rollout | {"mask": own}, 0.6)
    for name in ("sampled_logp", "old_logp"):
        torch.testing.assert_close(rollout[name].double(), alone, rtol=1e-4, atol=1e-4)

def J(name, logp, old, ref, adv, own, beta=0.04, low=0.2, high=0.2):
    """The objective times the rows, in floats, of the model's tokens alone."""
    total = 0
    for a, b, r, A, mine in zip(*(x.tolist() for x in (logp, old, ref, adv[:, 0], own))):
        ts = [t for t, counts in enumerate(mine) if counts]
        ratios = {t: math.exp(a[t] - b[t]) for t in ts}
        if name == "gspo":
            ratios = dict.fromkeys(ts, math.exp(sum(a[t] - b[t] for t in ts) / len(ts)))
        for t in ts:
            w, x = ratios[t], r[t] - a[t]
            gain = min(w, 1 + high) * A if A > 0 else max(w, 1 - low) * A
            total += (gain - beta * (math.exp(x) - x - 1)) / len(ts)
    return total

@pytest.mark.parametrize("name", ["grpo", "gspo"])
def test_loss_and_gradient_of_an_update_are_those_of_the_models_tokens_alone(name, load):
    """By finite differences of floats and log-probs of a row alone. The calculator is grpo.py's, the seam
    serves gspo.py, too."""
    trainer, rollout = trainer_of(load(name), beta=0.04, eps_low=0.2, eps_high=0.2).moved()
    own, _ = masks_of(rollout, 24)
    logp = full_logprobs(trainer.policy, rollout | {"mask": own}, 0.6)
    given = [x.double() for x in (rollout["old_logp"], rollout["ref_logp"], rollout["adv"], own)]
    push = slopes(lambda x: J(name, x, *given), logp.detach())
    expected = torch.autograd.grad((logp * push).sum() / -48, list(trainer.policy.parameters()))
    expected = torch.cat([g.flatten() for g in expected])
    [found], stats = trainer.gradients(rollout)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6 * expected.abs().max())
    assert stats["loss"] == pytest.approx(-J(name, logp.detach(), *given) / 48, rel=1e-5)

def test_the_calculator(load):
    tokenizer = transformers.AutoTokenizer.from_pretrained(TOY)
    calculate = load("grpo").calculator(tokenizer)
    for text, result in [("7+2=9\n9-4=", "5"), ("7+2-5=", "4"), ("9+9=", "18"), ("3-9=", "-6"),
                         ("-6+8=", "2"), ("10-3=", "7"), ("=", ""), ("7+2", ""), ("7+=", ""),
                         ("7+2=9", ""), ("7+2=\n", "")]:
        assert tokenizer.decode(calculate(tokenizer(text)["input_ids"])) == result, text

def test_the_toy_learns_with_a_calculator(load, tmp_path, monkeypatch):
    """In training and in evaluations every line of work has the right result, unless the end came before."""
    monkeypatch.chdir(tmp_path)
    Path("few.json").write_text("".join((TOY / "train.jsonl").open().readlines()[:1500]))
    rows = train(load("grpo"), "--dataset few.json --steps 4 --prompts 16 --warmup_steps 0 --lr 1e-3 "
                               "--eval_problems 200 --save_every 9")
    assert rows[1]["reward"] < 0.65 and rows[-1]["reward"] > rows[1]["reward"] + 0.15
    assert all(row["sampling_logp_difference"] < 1e-4 for row in rows[1:])
    for name in ("held-out-0", "step-1", "step-4", "held-out-4"):
        records = map(json.loads, Path("run", "completions", f"{name}.jsonl").open())
        sums = [found for x in records for found in re.findall(r"(?m)^(\d)([+-])(\d)=(.)", x["completion"])]
        results = [str(int(a) + int(sign + b))[0] for a, sign, b, _ in sums]
        assert len(sums) > 50 and results == [found[3] for found in sums]

def test_the_patched_scripts_pass_the_tests_of_every_script(folder):
    done = subprocess.run([sys.executable, "-m", "pytest", "-q", "-k", "not learns"], cwd=folder,
                          capture_output=True, text=True)
    assert done.returncode == 0, done.stdout

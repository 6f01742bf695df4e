"""tests/forks/tool.patch: what a tool wrote is read, but not trained. In common.py it is a seam of the
sampler, policy.tool, that every script can use; in grpo.py it is a calculator."""
import importlib
import json
import re
import sys
from pathlib import Path

import pytest
import torch
import transformers
from conftest import ROOT, Trainer, full_logprobs, spy, train
from patched import copy_to, fork, run_the_tests_of_every_script  # noqa: F401
from torch.nn.utils.rnn import pad_sequence as padded

pytestmark = pytest.mark.slow
TOY = ROOT / "tests" / "toy"

@pytest.fixture
def load(tmp_path, monkeypatch):
    """Name -> the module in a folder with the patch, which imports its own common.py."""
    names = ["common", "grpo", "gspo", "ppo"]
    copy_to(tmp_path, *(f"{name}.py" for name in names), patch="tool")
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "toy").symlink_to(TOY)
    for name in names:
        monkeypatch.setitem(sys.modules, name, None)  # is put back after the test
        del sys.modules[name]
    monkeypatch.syspath_prepend(tmp_path)
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

@pytest.mark.parametrize("name", ["grpo", "gspo"])
def test_rows_with_the_tool_and_rows_without_stand_in_one_batch(name, load, monkeypatch):
    """Who wrote which token, where completions end, and the log-probs of the model's tokens: those of the
    trainer, and those of a row alone with the tool's tokens in its text. The seam serves gspo.py, too."""
    script = load(name)
    trainer = Trainer(script, group_size=8, max_new_tokens=32, beta=0.04)  # 6 questions
    dropped = spy(monkeypatch, script.common.Cache, "reorder_cache")
    trainer.policy.tool = tool
    torch.manual_seed(5)
    trainer.collect()
    rollout = trainer.rollout
    rows = [ids[start:sum(attention)] for ids, start, attention in zip(
        *(rollout[name].tolist() for name in ("ids", "prompt_length", "attention")))]
    own = padded([torch.tensor(writers(ids, 32), dtype=torch.float64) for ids in rows], batch_first=True)
    assert torch.equal(rollout["mask"].double(), own) and not rollout["sampled_logp"][own == 0].any()
    lengths = torch.tensor([len(row) for row in rows])[:, None]
    waiting = ((own == 0) & (torch.arange(32) < lengths)).sum(0)  # by column
    assert ((waiting > 3) & (own.sum(0) > 3)).sum() > 5
    assert len(dropped) > 1  # the first call is for the groups, the second drops rows
    ended = [row[-1] == 1 and bool(own[i, len(row) - 1]) for i, row in enumerate(rows)]
    assert rollout["finished"].tolist() == ended and 5 < sum(ended) < 45
    assert sum(1 in row[:-1] for row in rows) > 5  # an end that the tool wrote ends nothing
    alone = full_logprobs(trainer.policy, rollout | {"mask": own}, 0.6)
    for name in ("sampled_logp", "old_logp"):
        torch.testing.assert_close(rollout[name].double(), alone, rtol=1e-4, atol=1e-4)

def test_the_calculator(load):
    tokenizer = transformers.AutoTokenizer.from_pretrained(TOY)
    calculate = load("grpo").calculator(tokenizer)
    for text, result in [("7+2=9\n9-4=", "5"), ("7+2-5=", "4"), ("9+9=", "18"), ("3-9=", "-6"),
                         ("-6+8=", "2"), ("10-3=", "7"), ("=", ""), ("7+2", ""), ("7+=", ""),
                         ("7+2=9", ""), ("7+2=\n", "")]:
        assert tokenizer.decode(calculate(tokenizer(text)["input_ids"])) == result, text

def test_the_toy_learns_with_a_calculator(load, fork):  # noqa: F811
    """In training and in evaluations every line of work has the right result, unless the end came before."""
    rows = train(load("grpo"), "--dataset few.json --steps 4 --prompts 16 --warmup_steps 0 --lr 1e-3 "
                               "--eval_problems 200 --save_every 9")
    assert rows[1]["reward"] < 0.65 and rows[-1]["reward"] > rows[1]["reward"] + 0.15
    assert all(row["sampling_logp_difference"] < 1e-4 for row in rows[1:])
    for name in ("held-out-0", "step-1", "step-4", "held-out-4"):
        records = map(json.loads, Path("run", "completions", f"{name}.jsonl").open())
        sums = [found for x in records for found in re.findall(r"(?m)^(\d)([+-])(\d)=(.)", x["completion"])]
        results = [str(int(a) + int(sign + b))[0] for a, sign, b, _ in sums]
        assert len(sums) > 50 and results == [found[3] for found in sums]

def test_the_patched_script_passes_the_tests_of_every_script(load, tmp_path):
    run_the_tests_of_every_script(tmp_path, but="learns or ppo or gspo")

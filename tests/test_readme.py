"""The lesson's numbers, computed by the scripts; the links, commands, and examples of all pages."""
import inspect
import json
import math  # noqa: F401  (for eval)
import re
import runpy
import shlex
import sys
import types
from pathlib import Path

import pandas
import pytest
import torch
import transformers
from conftest import CHATML, ROOT, call, char_tokenizer, settings, tiny_config

import common
import grpo
import gspo
import ppo

README, LESSON, RESULTS, FORKS, REWARDS = ((ROOT / path).read_text(encoding="utf-8") for path in (
    "README.md", "tests/lesson/README.md", "tests/results/README.md", "tests/forks/README.md",
    "tests/manual/rewards.md"))
PAGES = [Path("README.md"), *sorted(path.relative_to(ROOT) for path in ROOT.glob("tests/**/*.md"))]

def same(cells, values):
    """Each cell is its value, rounded to the digits that are printed."""
    for cell, value in zip(cells, values, strict=True):
        digits = len(cell.partition(".")[2])
        assert abs(float(cell) - torch.as_tensor(value).item()) <= 0.5001 * 10 ** -digits, (cell, value)

# ---- The lesson ----

def pushes(script, log_w, adv, mask, **flags):
    """The gradient of N J with respect to log pi, and the loss, for N completions, without KL."""
    rows = {"logp": log_w.requires_grad_(), "old_logp": 0 * mask, "ref_logp": None, "mask": mask, "adv": adv}
    loss, _ = call(script.policy_loss, rows | {"args": settings(script, beta=0.0, **flags)})
    return -torch.autograd.grad(loss, log_w)[0], loss.item() / len(mask)

def test_one_step_by_hand():
    rows = [re.split(r"\s{2,}", row) for row in re.findall(r"^[1-4]  .*", LESSON, re.M)]
    lengths = torch.tensor([int(row[0]) for row in rows]).bincount()[1:, None]
    mask = (torch.arange(4) < lengths).double()  # (4, 4)
    given = mask.new_tensor([[float(row[3]), float(row[5])] for row in rows])
    values, log_w = (torch.zeros_like(mask).masked_scatter(mask > 0, column) for column in given.T)
    rewards = mask.new_tensor([1, 0, 0, 0])
    critic, _ = ppo.gae(ppo.token_rewards(rewards, None, None, mask, 0.0), values, mask, 1.0, 0.95)
    group = grpo.group_advantages(rewards, 4)[:, None] * (1 + 1e-4 / rewards.std())  # without the 1e-4
    s = (log_w.sum(1, keepdim=True) / lengths).exp()
    for i, x in (2, group), (4, critic), (6, log_w.exp()), (7, s):
        same([row[i] for row in rows], x.expand(4, 4)[mask > 0])
    losses = re.search(r"PPO, -J is (\S+)\. In GRPO, it's (\S+)\. .*/4 = (\S+)\.", LESSON).groups()
    answers = re.search(r"by (\S+), GRPO by (\S+)\. .* by (\S+)\.\n", LESSON).groups()  # exercise 5
    for i, (script, adv) in enumerate([(ppo, critic), (grpo, group), (gspo, group)]):
        pushed, loss = pushes(script, log_w.detach(), adv, mask)
        assert [row[8 + i] == "clip" for row in rows] == (pushed[mask > 0] == 0).tolist()
        same([row[8 + i].replace("clip", "0") for row in rows] + [losses[i]], [*pushed[mask > 0], loss])
        wider, _ = pushes(script, log_w.detach(), adv, mask, eps_high=0.3)
        moved = 4 if script is gspo else 1  # tokens of completion 1
        assert (wider != pushed).nonzero().tolist() == [[0, t] for t in range(moved)]
        same([answers[i]] * moved, wider[0, :moved])

def test_the_arithmetic():
    """Whatever is written as a calculation and its result, such as 2 × (3/4)² = 9/8 or e^0.1 = 1.105."""
    text = re.sub(r"^ *```.*?^ *```$", "", LESSON, flags=re.M | re.S)
    found = re.findall(r"((?:e\^|[-\d.×²√/()+ ])+) = (?=(-?\d+(?:[./]\d+)?))", text)
    found = [(left, right) for left, right in found if re.search(r"\d.*[×/²]|\d [+-] |e\^", left)]
    for left, right in found:
        for symbol, code in {"×": "*", "²": "**2", "√": "math.sqrt", "e^": "math.e**"}.items():
            left = left.replace(symbol, code)
        same([right if "." in right else str(eval(right))], [eval(left)])
    assert len(found) > 20
    assert f"their product is {1.001 ** 100:.1f}, and after 1,000, it's {1.001 ** 1000:.1f}." in LESSON
    printed = re.search(r"k3 is 2 - .* or (\S+)\. .* is x - 1, or (\S+)\. .* or (\S+)\. ", LESSON).groups()
    for kl, push in zip(("k3", "wk3"), printed[1:]):  # exercise 3 (b)
        logp, one = torch.zeros(1, 1, requires_grad=True), torch.ones(1, 1)
        loss, _ = grpo.policy_loss(logp, 0 * one, math.log(2) * one, 0 * one, one, 0.2, 0.2, 1.0, kl)
        found = [loss.item(), -torch.autograd.grad(loss, logp)[0].item()]
        assert found == pytest.approx([float(printed[0]), float(push)], abs=5e-4)
    assert runpy.run_path(str(ROOT / "tests/lesson/clip.py"))["objective"](1.5, 1) == (pytest.approx(1.2), 0)

def test_the_lines_of_code_are_those_of_the_scripts():
    blocks = re.findall(r"^```python\n# (\w+)\.py, (\w+)\n(.*?)^```", LESSON, re.M | re.S)
    for script, function, code in blocks:
        source = inspect.getsource(getattr(sys.modules[script], function)).splitlines()
        lines = [line.partition("  #")[0].strip() for line in source]
        assert set(code.splitlines()) <= set(lines)
    assert len(blocks) == LESSON.count("```python") > 8

# ---- Links, commands, examples ----

def test_the_numbers_of_readme():
    for name, lines in re.findall(r"`(\w+\.py)` \(about (\d+)", README):
        found = len((ROOT / name).read_text(encoding="utf-8").splitlines())
        assert found == pytest.approx(int(lines), rel=0.1), name
    runs = pandas.read_csv(ROOT / "tests/results/toy/toy.csv").set_index(["run", "step"])["eval_accuracy"]
    for which in ("grpo", 0), ("gspo", 20), ("ppo", 20), ("grpo", 20):
        x = 100 * runs[which]
        assert f" {x.mean():.1f} ± {x.std():.1f}% " in README
    assert f"between {x.min():.1f}% and {x.max():.1f}%" in README

def test_the_numbers_of_the_gpu_page():
    page, rows = ((ROOT / "tests/results/gpu" / name).read_text() for name in ("README.md", "h100.jsonl"))
    at = {row["what"]: row for row in map(json.loads, rows.splitlines())}
    samplers, step = [at[f"sampling, {x}"] for x in ("graphs", "no graphs", "generate")], at["step"]
    shown = [f"| {x['ms_a_token']:.3g} | {round(x['tokens_s'], -2):,.0f} |" for x in samplers]
    shown += [f"{samplers[1]['ms_a_token'] / samplers[0]['ms_a_token']:.1f} times less time"]
    shown += [f"{step['seconds']:.1f} s for 256", " | ".join(f"{step[k]:.1f}" for k in [*step][2:6])]
    shown += [" | ".join(map(str, at["peaks"]["peaks_gb"].values()))]
    for run, update in zip(("grpo.py", "gspo.py"), ("checkpointing", "no checkpointing")):
        shown += [" | ".join(f"{400 * x:.0f}" for _, x in at[f"words, {run}"]["accuracy"])]
        shown += [f" {at[f'update, {update}'][k]:.2g} " for k in ("seconds", "allocated_gb")]
    assert [text for text in shown if text not in page] == []
    rounding = "| {share_beyond_3e_4:.0%} | {completion_max:.4f} |"
    assert rounding.format(**at["rounding, nudged by 1e-6"]) in RESULTS

def test_the_edits_of_readme(tmp_path):
    """brief and both diffs, pasted into a copy of grpo.py as a reader would."""
    source, mine = (ROOT / "grpo.py").read_text(), types.ModuleType("mine")
    block, = re.findall(r"^```python\n(.*?)^```", README, re.S | re.M)
    source = source.replace("\ndef main(", f"\n{block}\ndef main(")
    for old, new in re.findall(r"^```diff\n-(.*)\n\+(.*)\n```", README, re.M):
        assert source.count(f"\n{old}\n") == 1
        source = source.replace(old, new)
    mine.__file__ = str(tmp_path / "mine.py")
    exec(source, vars(mine))
    lines = (ROOT / "tests/toy/train.jsonl").read_text().splitlines()
    (tmp_path / "few.jsonl").write_text("\n".join(lines[:40]))
    flags = f"--device cpu --steps 1 --prompts 4 --dataset {tmp_path}/few.jsonl --out {tmp_path}/run"
    mine.main(mine.parse_args(flags.split()))
    for record in json.loads((tmp_path / "run/completions/step-1.json").read_text()):
        right, = common.answer_reward([record], [record["completion"]])
        assert record["reward"] == pytest.approx(right - 0.06 * len(record["completion"]))
    assert mine.group_advantages(torch.tensor([1.0, 0, 0, 0]), 4).tolist() == [0.75, -0.25, -0.25, -0.25]

@pytest.mark.parametrize("page", PAGES, ids=str)
def test_links_and_commands(page):
    """All targets of links exist. The scripts know the flags in commands (--resume needs a run: left out)."""
    text = (ROOT / page).read_text(encoding="utf-8")
    for link, anchor in re.findall(r"(?:\]\(|src=\")([\w./]*)(?:#([\w-]*))?[)\"]", text):
        target = ROOT / page.parent / link if link else ROOT / page
        assert target.exists(), link
        titles = re.findall(r"^#+ (.*)$", target.read_text(encoding="utf-8"), re.M) if anchor else []
        anchors = {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}
        assert not anchor or anchor in anchors, anchor
    for name, flags in re.findall(r"python (ppo|grpo|gspo)\.py([^`#&|>;\n]*)", text.replace("\\\n", " ")):
        flags = re.sub(r"--(device \S+|resume|\w+ (\$\w+|[A-Z]\b))|\"\$\S+", "", flags)
        sys.modules[name].parse_args(shlex.split(flags))

def test_the_test_of_equations_that_is_shown(monkeypatch):
    """It passes on a copy of grpo.py, and fails if the denominator is different."""
    code, = re.findall(r"^```python\n(.*?)^```", FORKS, re.S | re.M)
    names = {}
    monkeypatch.setitem(sys.modules, "mine", grpo)
    exec(code, names)
    names["test_my_equations"]()
    real = grpo.policy_loss
    monkeypatch.setattr(grpo, "policy_loss", lambda *given: (real(*given)[0] * 1.01, {}))
    with pytest.raises(AssertionError):
        names["test_my_equations"]()

def test_the_reward_model_that_is_shown(tmp_path):
    """The reward model, with a tiny one. (math_verify, which the other needs, is not required here.)"""
    torch.manual_seed(0)
    config = tiny_config("qwen3", 104, num_labels=1, initializer_range=0.5, pad_token_id=0)
    model = transformers.AutoModelForSequenceClassification.from_config(config).eval()
    tokenizer = char_tokenizer(chat=CHATML, eos="<|im_end|>", bos=True)
    model.save_pretrained(tmp_path), tokenizer.save_pretrained(tmp_path)
    names, texts = {}, ["It is 5", "3"]
    problems = [{"question": question} for question in ("2 + 3?", "1 + 1?")]
    code = re.findall(r"^```python\n(.*?)^```", REWARDS, re.S | re.M)[-1]
    exec(code.replace("path/or/hub-name", str(tmp_path)), names)
    for reward, problem, text in zip(names["judged"](problems, texts), problems, texts, strict=True):
        chat = f"<|im_start|>user\n{problem['question']}<|im_end|>\n<|im_start|>assistant\n{text}<|im_end|>\n"
        ids = tokenizer(chat, return_tensors="pt", add_special_tokens=False)["input_ids"]
        assert float(reward) == pytest.approx(model(ids).logits[0, 0].item(), abs=1e-5)

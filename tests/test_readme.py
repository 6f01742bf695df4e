"""README's step by hand, computed by the scripts; the links, commands and examples of all pages."""
import itertools
import re
import shlex
import sys
import types
from pathlib import Path

import pytest
import torch
import transformers
from conftest import CHATML, ROOT, call, char_tokenizer, settings, tiny_config

import common
import grpo
import gspo
import ppo

README, FORKS, REWARDS = ((ROOT / path).read_text(encoding="utf-8") for path in (
    "README.md", "tests/forks/README.md", "tests/manual/rewards.md"))
PAGES = [Path("README.md"), *sorted(path.relative_to(ROOT) for path in ROOT.glob("tests/**/*.md"))]

def columns(start):
    """The rows below a header that starts like this, in a block of text whose cells are two spaces apart."""
    lines = README[README.index(start):].partition("\n```")[0].splitlines()
    return [re.split(r"\s{2,}", line) for line in lines[1:]]

def same(cells, values):
    """Each cell is its value, rounded to the digits that are printed."""
    for cell, value in zip(cells, values, strict=True):
        digits = len(cell.partition(".")[2])
        assert abs(float(cell) - torch.as_tensor(value).item()) <= 0.5001 * 10 ** -digits, (cell, value)

# ---- One step by hand ----

HAND = columns("o  token")
LENGTHS = torch.tensor([int(row[0]) for row in HAND]).bincount()[1:, None]
MASK = (torch.arange(4) < LENGTHS).double()  # (4, 4)

def column(i):
    """A column of the table as (4, 4)."""
    return torch.zeros_like(MASK).masked_scatter(MASK > 0, MASK.new_tensor([float(row[i]) for row in HAND]))

V, R, NEW = column(3), MASK.new_tensor([1, 0, 0, 0]), column(5)  # log w is given, so log pi_old may be 0

def advantages():
    """(4, 4) of PPO, without KL and whitening, and (4, 1) of a group."""
    args = settings(ppo)
    rewards = ppo.token_rewards(R, 0 * MASK, None, MASK, args.beta)
    return ppo.gae(rewards, V, MASK, args.gamma, args.lam)[0], grpo.group_advantages(R, 4)[:, None]

def pushes(script):
    """The gradient of N J with respect to log pi, and the loss, for the four completions."""
    x, (critic, group) = NEW.clone().requires_grad_(), advantages()
    rows = {"logp": x, "old_logp": 0 * MASK, "ref_logp": None, "mask": MASK,
            "adv": critic if script is ppo else group}
    loss, _ = call(script.policy_loss, rows | {"args": settings(script, beta=0.0)})
    return -torch.autograd.grad(loss, x)[0], loss.detach() / 4

def test_the_advantages_of_one_step():
    same([row[4] for row in HAND], advantages()[0][MASK > 0])
    same([row[2] for row in HAND], advantages()[1].expand(4, 4)[MASK > 0])

def test_the_pushes_of_one_step():
    s = ((NEW * MASK).sum(1) / LENGTHS[:, 0]).exp()
    same([row[6] for row in HAND], NEW.exp()[MASK > 0])
    same([row[7] for row in HAND], s[:, None].expand(4, 4)[MASK > 0])
    losses = re.search(r"is (\S+) in PPO, (\S+) in GRPO and.*?= (\S+) in GSPO", README, re.S).groups()
    for i, script in enumerate((ppo, grpo, gspo)):
        pushed, loss = pushes(script)
        printed = [row[8 + i] for row in HAND]
        assert [cell == "clip" for cell in printed] == (pushed[MASK > 0] == 0).tolist()
        same([cell.replace("clip", "0") for cell in printed], pushed[MASK > 0])
        same([losses[i]], [loss])

# ---- Links, commands, examples ----

@pytest.mark.parametrize("page", PAGES, ids=str)
def test_links_and_commands(page):
    """Every page, file and section that a page links to exists. The scripts know the flags of its commands
    (--resume needs a run, so it is left out)."""
    text = (ROOT / page).read_text(encoding="utf-8")
    for link, anchor in re.findall(r"\]\(([\w./]*)(?:#([\w-]*))?\)", text):
        target = ROOT / page.parent / link if link else ROOT / page
        assert target.exists(), link
        titles = re.findall(r"^#+ (.*)$", target.read_text(encoding="utf-8"), re.M) if anchor else []
        anchors = {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}
        assert not anchor or anchor in anchors, anchor
    for name, flags in re.findall(r"python (ppo|grpo|gspo)\.py([^`#&|>;\n]*)", text.replace("\\\n", " ")):
        flags = re.sub(r"--(device \S+|resume|\w+ (\$\w+|[A-Z]\b))|\"\$\S+", "", flags)
        sys.modules[name].parse_args(shlex.split(flags))

@pytest.mark.parametrize("page", PAGES, ids=str)
def test_no_line_of_a_page_becomes_a_list_by_chance(page):
    """Every paragraph is one line. A wrapped line that begins with "- " would be a list item on the rendered
    page, and break up its formula or sentence."""
    def kind(line):
        mark = re.match(r" *([-+*] |\d+[.)] |[|#<>]|$)", line)
        return mark[1][-1:] if mark else "a paragraph"
    text = (ROOT / page).read_text(encoding="utf-8")
    text = re.sub(r"\A---.*?---\n|^ *```.*?^ *```$", "", text, flags=re.M | re.S)
    for before, line in itertools.pairwise(text.splitlines()):
        assert kind(line) == "" or kind(before) in ("", "#") or kind(before) == kind(line) in (" ", "|"), line
        assert line.count("$`") == line.count("`$"), line

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

def test_the_rewards_that_are_shown(tmp_path, monkeypatch):
    """math_verify is not required, so it is a stand-in; the reward model is tiny, with a chat template."""
    torch.manual_seed(0)
    config = tiny_config("qwen3", 104, num_labels=1, initializer_range=0.5, num_hidden_layers=1)
    model = transformers.AutoModelForSequenceClassification.from_config(config).eval()
    tokenizer = char_tokenizer(chat=CHATML, eos="<|im_end|>", bos=True)
    model.save_pretrained(tmp_path), tokenizer.save_pretrained(tmp_path)
    names, stand_in = {"common": common}, types.SimpleNamespace(parse=lambda x: x[-3:], verify=str.__eq__)
    monkeypatch.setitem(sys.modules, "math_verify", stand_in)
    for code in re.findall(r"^```python\n(.*?)^```", README + REWARDS, re.S | re.M):
        exec(code.replace("path/or/hub-name", str(tmp_path)), names)
    problems = [{"question": "2 + 3?", "answer": "5"}, {"question": "1 + 1?", "answer": r"so \boxed{2}"}]
    texts = [r"It is \boxed{5}", r"\boxed{3}"]
    assert names["math_verified"](problems, texts) == [1, 0]
    assert names["brief"](problems, texts) == pytest.approx([1 - 0.01 * len(texts[0]), -0.01 * len(texts[1])])
    for reward, problem, text in zip(names["judged"](problems, texts), problems, texts, strict=True):
        chat = f"<|im_start|>user\n{problem['question']}<|im_end|>\n<|im_start|>assistant\n{text}<|im_end|>\n"
        ids = tokenizer(chat, return_tensors="pt", add_special_tokens=False)["input_ids"]
        assert float(reward) == pytest.approx(model(ids).logits[0, 0].item(), abs=1e-5)

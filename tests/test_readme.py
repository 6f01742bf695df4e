"""The README's numbers, by the scripts' own functions; the names, commands and examples of README.md,
tests/results/README.md (SECOND), tests/results/using.md (USING) and tests/forks/README.md (FORKS)."""
import re
import shlex
import sys
import types

import pytest
import torch
import transformers
from conftest import CHATML, ROOT, call, char_tokenizer, settings, tensor64, tiny_config

import common
import grpo
import gspo
import ppo
import test_equations

README, SECOND, USING, FORKS = ((ROOT / path).read_text(encoding="utf-8") for path in (
    "README.md", "tests/results/README.md", "tests/results/using.md", "tests/forks/README.md"))

def table(text, start):
    """The rows below the header that starts so, as lists of cells."""
    lines = re.match(r"(?: *\|.*\n)+", text[text.index(start):])[0].splitlines()
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines[2:]]

def same(cells, values):
    """Each cell is its value, rounded to as many digits as are printed."""
    for cell, value in zip(cells, values, strict=True):
        digits = len(cell.partition(".")[2])
        assert abs(float(cell) - torch.as_tensor(value).item()) <= 0.5001 * 10 ** -digits, (cell, value)

def numbers(pattern, text=README):
    """The groups of a pattern in which a blank stands for any white space and # for a number."""
    number = r"(-?\d*\.?\d+(?:e-\d+)?)"
    pattern = r"\s+".join(re.escape(word).replace(r"\#", number) for word in pattern.split())
    return re.search(pattern, text).groups()

# ---- One step by hand ----

HAND, PUSHES = table(README, "| o | token | V |"), table(README, "| o | token | PPO |")
LENGTHS = torch.tensor([int(row[0]) for row in HAND]).bincount()[1:, None]
MASK = (torch.arange(4) < LENGTHS).double()  # (4, 4)

def column(i):
    """A column of the table as (4, 4)."""
    return torch.zeros_like(MASK).masked_scatter(MASK > 0, tensor64([float(row[i]) for row in HAND]))

V, OLD, NEW, R = column(2), column(5), column(6), tensor64([1, 0, 0, 0])

def advantages(**flags):
    """(4, 4) of PPO, without KL and whitening, and (4, 1) of a group."""
    args = settings(ppo, **flags)
    rewards = ppo.token_rewards(R, OLD, None, MASK, args.beta)
    return ppo.gae(rewards, V, MASK, args.gamma, args.lam)[0], grpo.group_advantages(R, 4)[:, None]

def pushes(script, **flags):
    """The gradient of J by log pi, and the loss, of the four completions."""
    x, (critic, group) = NEW.clone().requires_grad_(), advantages()
    rows = {"logp": x, "old_logp": OLD, "ref_logp": None, "mask": MASK,
            "adv": critic if script is ppo else group}
    loss, _ = call(script.policy_loss, rows | {"args": settings(script, beta=0.0, **flags)})
    return -torch.autograd.grad(loss / 4, x)[0], loss.detach() / 4

def test_the_advantages_of_one_step():
    same([row[3] for row in HAND], advantages(lam=0.0)[0][MASK > 0])  # lambda 0: A is delta
    same([row[4] for row in HAND], advantages()[0][MASK > 0])
    first, others = numbers("completion 1 has A = .75/.5 = #, and the others have A = -.25/.5 = # (without")
    assert (R.mean(), R.std()) == (0.25, 0.5)
    end, delta, before = numbers("A = δ = 0 + 0 - .3 = #. The token before it has δ = 0 + .3 - .4 = #, and "
                                 "A = -.1 + .95 × -.3 = #.")
    same([before, end], advantages()[0][2, :2])
    same([delta], advantages(lam=0.0)[0][2, :1])
    torch.testing.assert_close(advantages()[1][:, 0], tensor64(
        [float(first), *[float(others)] * 3]), rtol=0, atol=4e-4)  # the 1e-4

def test_the_pushes_of_one_step():
    s = (((NEW - OLD) * MASK).sum(1, keepdim=True) / LENGTHS).exp().expand(4, 4)
    same([row[7] for row in HAND], (NEW - OLD).exp()[MASK > 0])
    same([row[8] for row in HAND], s[MASK > 0])
    assert [row[:2] for row in PUSHES[:-1]] == [row[:2] for row in HAND]
    for i, script in [(2, ppo), (3, grpo), (4, gspo)]:
        pushed, loss = pushes(script)
        *printed, last = [row[i] for row in PUSHES]
        assert [cell == "clip" for cell in printed] == (pushed[MASK > 0] == 0).tolist()
        same([cell.replace("clip", "0") for cell in printed], pushed[MASK > 0])
        same([last], [loss])
    printed = numbers("by # × -.5 / (4 × 2) = #, and GSPO pushes both tokens by # × -.5 / (4 × 2) = #.")
    same(printed, [(NEW - OLD).exp()[2, 0], pushes(grpo)[0][2, 0], s[2, 0], pushes(gspo)[0][2, 1]])
    printed = numbers("w is e^.20 = # and e^.10 = #, and s is e^.15 = #.")
    same(printed, [*(NEW - OLD).exp()[2, :2], s[2, 0]])
    same(numbers("already # % likelier.") + numbers("already # % less likely."),
         [100 * (NEW - OLD).exp()[0, 0] - 100, 100 - 100 * (NEW - OLD).exp()[1, 0]])

def test_at_ratio_one_the_loss_of_a_group_is_zero():
    """Exactly: the z-scores of a group add up to 0, and every one is a mean over its own tokens."""
    for script in (grpo, gspo):
        rows = {"logp": OLD, "old_logp": OLD, "ref_logp": None, "adv": advantages()[1], "mask": MASK}
        assert abs(call(script.policy_loss, rows | {"args": settings(script, beta=0.0)})[0]) < 1e-12
    printed = numbers("-(# × # - # × .5 - # × .5 - 1 × .5)/4 = #")
    s = (((NEW - OLD) * MASK).sum(1) / LENGTHS[:, 0]).exp()
    same(printed, [1.0004, 1.5, 0.9997, s[2], pushes(gspo)[1]])

# ---- The ladder ----

def test_the_clip_table():
    ratio = tensor64([0.5, 0.9, 1, 1.1, 1.5])[:, None]
    for row, A in zip(table(README, "| ratio w | .5 |"), (1, -1), strict=True):
        x = ratio.log().requires_grad_()
        loss, _ = ppo.policy_loss(x, 0 * ratio, 0 * ratio + A, 0 * ratio + 1, 0.2, 0.2)
        same(row[1:], -torch.autograd.grad(loss, x)[0])

def test_the_three_side_by_side():
    rows = {row[0]: row[1:] for row in table(README, "| | PPO | GRPO | GSPO |")}
    for i, script in enumerate((ppo, grpo, gspo)):
        args = settings(script)
        same(re.findall(r"[\d.]+", rows["clip"][i]), [1 - args.eps_low, 1 + args.eps_high])
        assert float(rows["KL"][i].split("β = ")[1]) == args.beta
        assert int(rows["models in memory"][i][0]) == 1 + (script is ppo) + (args.beta > 0)
        assert rows["questions × completions of each"][i] == f"{args.prompts} × {args.group_size}"
        assert int(rows["optimiser steps for a rollout"][i]) == args.epochs * args.minibatches
        assert args.temperature == 1
    args = settings(ppo)  # as in the text above
    assert (args.eps_value, args.gamma, args.lam, args.vf_coef, args.whiten) == (0.2, 1, 0.95, 0.1, True)
    args = gspo.parse_args(["--device", "cpu", "--dtype", "bfloat16"])
    assert args.eps_low == args.eps_high == 0.01 and "clips at .01 in bfloat16" in README

# ---- Names, commands, examples ----

@pytest.mark.parametrize("folder, text", [
    ("", README), ("tests/results", SECOND), ("tests/results", USING), ("tests/forks", FORKS)])
def test_names_and_commands(folder, text):
    """Functions, tests, files and flags that the texts name are there; sections that they link to, too. In
    commands --device is left out, and --resume, which needs a run."""
    assert all(hasattr(test_equations, name) for name in re.findall(r"`(test_[1-5]_\w+)`", text))
    for script, name in re.findall(r"`(common|grpo|gspo|ppo)\.(?!py)(\w+)", text):
        assert hasattr(sys.modules[script], name), name
    for name, flags in re.findall(r"python (ppo|grpo|gspo)\.py([^`#&|>;\n]*)", text.replace("\\\n", " ")):
        sys.modules[name].parse_args(shlex.split(re.sub(r"--(device \S+|resume|\w+ \$lr)", "", flags)))
    programs = [*ROOT.glob("*.py"), *ROOT.glob("tests/**/*.py"), *ROOT.glob("tests/forks/*.patch")]
    sources = "".join(path.read_text(encoding="utf-8") for path in programs)
    flags = set(re.findall(r'add\w*\(\s*"--([a-z]\w+)', sources)) | {"help", "nproc_per_node", "standalone"}
    assert not set(re.findall(r"`[^`\n]*?--(?:no-)?([a-z]\w+)", text)) - flags
    for path in re.findall(r"`(tests/[\w./]+)`", text):
        assert (ROOT / path).exists(), path
    for link, anchor in re.findall(r"\]\(([\w./]*)(?:#([\w-]*))?\)", text):
        target = (ROOT / folder / link).read_bytes() if link else text.encode()
        titles = re.findall(r"^#+ (.*)$", target.decode(errors="ignore"), re.M)
        anchors = {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}
        assert not anchor or anchor in anchors, anchor

def test_the_rewards_that_are_shown(tmp_path, monkeypatch):
    """math_verify is a stand-in: it is not required. The reward model is a tiny one with a chat template."""
    torch.manual_seed(0)
    config = tiny_config("qwen3", 104, num_labels=1, initializer_range=0.5, num_hidden_layers=1)
    model = transformers.AutoModelForSequenceClassification.from_config(config).eval()
    tokenizer = char_tokenizer(chat=CHATML, eos="<|im_end|>", bos=True)
    model.save_pretrained(tmp_path), tokenizer.save_pretrained(tmp_path)
    stand_in = types.SimpleNamespace(parse=lambda text: text.split("boxed")[-1], verify=str.__eq__)
    monkeypatch.setitem(sys.modules, "math_verify", stand_in)
    names = {"common": common}
    for code in re.findall(r"```python\n(.*?)```", FORKS, re.S):
        exec(code.replace("path/or/hub-name", str(tmp_path)), names)
    problems = [{"question": "2 + 3?", "answer": "5"}, {"question": "1 + 1?", "answer": r"so \boxed{2}"}]
    texts = [r"It is \boxed{5}", r"\boxed{3}, I think"]
    assert names["math_verified"](problems, texts) == [1, 0]
    rewards = common.rewards_of(names["judged"], problems, {"texts": texts, "ids": torch.zeros(2, 1)})
    for reward, problem, text in zip(rewards, problems, texts):
        chat = f"<|im_start|>user\n{problem['question']}<|im_end|>\n<|im_start|>assistant\n{text}<|im_end|>\n"
        ids = tokenizer(chat, return_tensors="pt", add_special_tokens=False)["input_ids"]
        torch.testing.assert_close(reward, model(ids).logits[0, 0])

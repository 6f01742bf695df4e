"""The README's numbers, computed by the scripts' own functions; its names, commands and examples. So for
tests/results/README.md, which is its second reading."""
import re
import shlex

import pytest
import torch
from conftest import ROOT, settings, tensor64
from test_cli import KEYS, PPO_KEYS

import common
import grpo
import gspo
import ppo
import test_equations

README = (ROOT / "README.md").read_text(encoding="utf-8")
SECOND = (ROOT / "tests" / "results" / "README.md").read_text(encoding="utf-8")
SCRIPTS = {"common": common, "grpo": grpo, "gspo": gspo, "ppo": ppo}

def table(text, start):
    """The rows below the header that starts so, as lists of cells."""
    lines = text[text.index(start):].split("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]

def same(cells, values):
    """Each cell is its value, rounded to as many digits as are printed."""
    for cell, value in zip(cells, values, strict=True):
        digits = len(cell.partition(".")[2])
        assert abs(float(cell) - value.item()) <= 0.5001 * 10 ** -digits, (cell, value)

# ---- One step by hand ----

def by_hand():
    """The two tables: mask, rewards of tokens, V, log-probs old and new, all (4, 4), and their rows."""
    praise = table(README, "| o | token | r |")
    *push, losses = table(README, "| o | token | log")
    assert [row[:2] for row in praise] == [row[:2] for row in push]
    lengths = torch.tensor([int(row[0]) for row in praise]).bincount()[1:, None]
    mask = (torch.arange(4) < lengths).double()

    def column(rows, i):
        return torch.zeros_like(mask).masked_scatter(mask > 0, tensor64([float(row[i]) for row in rows]))
    numbers = column(praise, 2), column(praise, 3), column(push, 2), column(push, 3)
    return mask, *numbers, praise, push, losses

def advantages(mask, r, V, old):
    """(4, 4) of PPO, without KL and whitening, and (4, 1) of a group."""
    args = settings(ppo, beta=0.0)
    rewards = ppo.token_rewards(r.sum(1), old, None, mask, args.beta)
    critic, _ = ppo.gae(rewards, V, mask, args.gamma, args.lam)
    assert torch.equal(rewards, r)  # paid at the end
    return critic, grpo.group_advantages(r.sum(1), 4)[:, None]

def push_of(script, new, old, adv, mask, **flags):
    """The gradient of J by log pi, and the loss, of the four completions."""
    x = new.clone().requires_grad_()
    no_reference = () if script is ppo else (None,)
    args = settings(script, beta=0.0, **flags)
    loss, _ = script.policy_loss(x, old, *no_reference, adv, mask, args)
    return -torch.autograd.grad(loss / 4, x)[0], loss / 4

def test_who_is_to_be_praised():
    mask, r, V, old, _, praise, _, _ = by_hand()
    critic, group = advantages(mask, r, V, old)
    same([row[4] for row in praise], critic[mask > 0])
    same([row[5] for row in praise], group.expand(4, 4)[mask > 0])

def test_how_hard_each_token_is_pushed():
    mask, r, V, old, new, _, push, losses = by_hand()
    critic, group = advantages(mask, r, V, old)
    log_s = ((new - old) * mask).sum(1, keepdim=True) / mask.sum(1, keepdim=True)
    same([row[4] for row in push], (new - old).exp()[mask > 0])
    same([row[5] for row in push], log_s.exp().expand(4, 4)[mask > 0])
    for column, script, adv in [(6, ppo, critic), (7, grpo, group), (8, gspo, group)]:
        slopes, loss = push_of(script, new, old, adv, mask)
        printed = [row[column] for row in push]
        assert [cell == "clip" for cell in printed] == (slopes[mask > 0] == 0).tolist()
        same([cell.replace("clip", "0") for cell in printed], slopes[mask > 0])
        same([losses[column]], [loss])

def test_the_answer_with_another_clip_range():
    """With --eps_high .3 the first cell changes in PPO and GRPO, the first row in GSPO; and the losses."""
    mask, r, V, old, new, *_ = by_hand()
    said = r"by (\S+) in PPO and (\S+) in GRPO.*?to (\S+) and (\S+)\. .*?by (\S+) each.*?loss is (\S+)\.\)"
    cells = re.search(said, SECOND, re.S).groups()
    critic, group = advantages(mask, r, V, old)
    for script, adv, cell, printed, changed in [
            (ppo, critic, cells[0], cells[2], [[0, 0]]), (grpo, group, cells[1], cells[3], [[0, 0]]),
            (gspo, group, cells[4], cells[5], [[0, t] for t in range(4)])]:
        before, _ = push_of(script, new, old, adv, mask)
        after, loss = push_of(script, new, old, adv, mask, eps_high=0.3)
        assert (before != after).nonzero().tolist() == changed
        same([cell, printed], [after[0, 0], loss])

# ---- The ladder ----

@pytest.mark.parametrize("weighed", [True, False])
def test_what_a_baseline_does_to_the_mean(weighed):
    """One logit z, P(a) = .3: a has one token, the other answer two, the second of which is certain. Both are
    right. The exact mean over the two of the gradient by z, by ppo.policy_loss at ratio 1, against sums by
    hand: weighed by 1/|o|, .3 (1 - b) .7 - .7 (1 - b) .3 / 2 = .105 (1 - b); else the halves are whole: 0."""
    z = tensor64([0.3 / 0.7]).log().requires_grad_()
    chosen = torch.stack([torch.nn.functional.logsigmoid(z), torch.nn.functional.logsigmoid(-z)])  # (2, 1)
    logp = torch.cat([chosen, torch.zeros_like(chosen)], 1)  # (2, 2)
    mask = tensor64([[1, 0], [1, 1]])
    found = []
    for b in (0, 0.5, 1):
        J = 0
        for i in range(2):
            adv = (1 - b) * (1 if weighed else mask[i].sum()) * torch.ones(1, 2).double()
            loss, _ = ppo.policy_loss(logp[[i]], logp[[i]].detach(), adv, mask[[i]], settings(ppo))
            J = J - chosen[i].exp().detach() * loss
        found.append(torch.autograd.grad(J.sum(), z, retain_graph=True)[0])
    torch.testing.assert_close(torch.stack(found).flatten(),
                               tensor64([0.105, 0.0525, 0] if weighed else [0, 0, 0]))
    first, second, third, *without = re.search(
        r"is (\S+) at b = 0, (\S+) at b = .5 and (\S+) at b = 1; without 1/\|o\| it is "
        r"(\S+), (\S+) and (\S+)\. ", " ".join(README.split())).groups()
    same([first, second, third] if weighed else without, found)

def test_kl_estimators():
    """Exact means over four tokens, each with its probability under pi, and gradients by the logits of pi."""
    z, ref = tensor64([0.3, -0.5, 1.1, 0]).requires_grad_(), tensor64([[0, 0.4, 0.2, -0.7]]).log_softmax(1).T
    logp, ones = z.log_softmax(0)[:, None], torch.ones(4, 1).double()
    old = logp.detach()

    def mean(script, *rest, **flags):
        total = 0
        for i in range(4):
            rows = (x[[i]] for x in (logp, old, *rest, ones))
            loss, _ = script.policy_loss(*rows, settings(script, **flags))
            total = total + old[i].exp() * loss
        return total
    penalty, k1 = ppo.token_rewards(0 * z.detach(), old, ref, ones, 1), logp - ref
    means = [mean(ppo, penalty), (old.exp() * k1).sum(), (old.exp() * k1 ** 2 / 2).sum(),
             *(mean(grpo, ref, 0 * ones, beta=1.0, kl=kl) for kl in ("k3", "wk3"))]
    for row, value in zip(table(SECOND, "| estimator |"), means, strict=True):
        same([row[1], *row[2].split(",")], [value, *torch.autograd.grad(value, z, retain_graph=True)[0]])

# ---- Names, commands, examples ----

def test_changed_lines_of_the_forks():
    changed = {path.stem: len(re.findall(r"^[+-](?!\+\+ |-- )", path.read_text(encoding="utf-8"), re.M))
               for path in (ROOT / "tests" / "forks").glob("*.patch")}
    assert {row[0].strip("`"): int(row[3]) for row in table(SECOND, "| fork |")} == changed

@pytest.mark.parametrize("text", [README, SECOND], ids=["first", "second"])
def test_names_and_commands(text):
    """Functions, tests, files and flags that the texts name are there; sections that they link to, too. In
    commands --device is left out, and --resume, which needs a run."""
    assert all(hasattr(test_equations, name) for name in re.findall(r"`(test_[1-5]_\w+)`", text))
    for script, name in re.findall(r"`(common|grpo|gspo|ppo)\.(?!py)(\w+)", text):
        assert hasattr(SCRIPTS[script], name), name
    for name, flags in re.findall(r"python (ppo|grpo|gspo)\.py([^`#&|>;\n]*)", text.replace("\\\n", " ")):
        SCRIPTS[name].parse_args(shlex.split(re.sub(r"--(device \S+|resume)", "", flags)))
    programs = [*ROOT.glob("*.py"), *(ROOT / "tests").rglob("*.py"), *(ROOT / "tests").rglob("*.patch")]
    sources = "".join(path.read_text(encoding="utf-8") for path in programs)
    flags = set(re.findall(r'add\w*\(\s*"--([a-z]\w+)', sources)) | {"help", "nproc_per_node", "standalone"}
    assert not set(re.findall(r"`[^`\n]*?--(?:no-)?([a-z]\w+)", text)) - flags
    for path in re.findall(r"`(tests/[\w./]+)`", text):
        assert (ROOT / path).exists(), path
    home = ROOT if text is README else ROOT / "tests" / "results"
    for link, anchor in re.findall(r"\]\(([\w./]*)(?:#([\w-]*))?\)", text):
        target = (home / link).read_bytes() if link else text.encode()
        titles = re.findall(r"^#+ (.*)$", target.decode(errors="ignore"), re.M)
        anchors = {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}
        assert not anchor or anchor in anchors, anchor

def test_every_logged_number_is_explained():
    listed = set(re.findall(r"`(\w+)`", "".join(row[0] for row in table(README, "| number |"))))
    noise = {"ratio_noise", "sequence_ratio_noise"}
    assert listed >= (KEYS | PPO_KEYS | noise | {"eval_accuracy", "eval_sampled_accuracy"}) - {"step"}

def test_clip_ranges_by_dtype_are_those_of_gspo():
    args = gspo.parse_args(["--device", "cpu"])
    assert (args.eps_low, args.eps_high) == ({"float32": 3e-4, "float16": 1e-3, "bfloat16": 1e-2},
                                             {"float32": 4e-4, "float16": 1e-3, "bfloat16": 1e-2})
    assert ".001 in `--dtype float16`" in README and ".01 in bfloat16" in README
    assert "(.9997 to 1.0004)" in README and "about 3e-4, not .2" in README

def test_the_reward_of_the_readme():
    exec(re.search(r"```python\n(.*?)```", README, re.S)[1], names := {"common": common})
    rows = [{"answer": "5", "words": 2}] * 3, ["2+3=5\n#### 5", "so #### 5", "km"]
    assert names["in_few_words"](*rows) == [0.5, 0.5, 1]
    assert names["in_few_words"]([{"answer": "", "words": 2}], ["a b"]) == [1]

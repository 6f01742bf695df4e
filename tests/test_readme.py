"""The README's numbers, computed by the scripts' own functions; its names, commands and examples. The same
for tests/results/README.md (SECOND), tests/manual/README.md (USING) and tests/forks/README.md (FORKS)."""
import collections
import csv
import re
import shlex
import sys
import types
from pathlib import Path

import pytest
import torch
import transformers
from conftest import CHATML, ROOT, Trainer, call, char_tokenizer, settings, tensor64, tiny_config

import common
import grpo
import gspo
import ppo
import test_equations

README, SECOND, USING, FORKS = ((ROOT / path).read_text(encoding="utf-8") for path in (
    "README.md", "tests/results/README.md", "tests/manual/README.md", "tests/forks/README.md"))

PAGES = [Path("README.md"), *sorted(path.relative_to(ROOT) for path in ROOT.glob("tests/**/*.md"))]

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

HAND = table(README, "| o | token | V |")
LENGTHS = torch.tensor([int(row[0]) for row in HAND]).bincount()[1:, None]
MASK = (torch.arange(4) < LENGTHS).double()  # (4, 4)

def column(i):
    """A column of the table as (4, 4)."""
    return torch.zeros_like(MASK).masked_scatter(MASK > 0, tensor64([float(row[i]) for row in HAND]))

V, OLD, R = column(2), 0 * MASK, tensor64([1, 0, 0, 0])
NEW = column(5)  # log w is given, so log pi_old may be 0

def advantages(**flags):
    """(4, 4) of PPO, without KL and whitening, and (4, 1) of a group."""
    args = settings(ppo, **flags)
    rewards = ppo.token_rewards(R, OLD, None, MASK, args.beta)
    return ppo.gae(rewards, V, MASK, args.gamma, args.lam)[0], grpo.group_advantages(R, 4)[:, None]

def pushes(script, **flags):
    """The gradient of J by log pi, and the loss, of the four completions."""
    x, (critic, group) = NEW.clone().requires_grad_(), advantages()
    adv = critic if script is ppo else group
    rows = {"logp": x, "old_logp": OLD, "ref_logp": None, "mask": MASK, "adv": adv}
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
    same([row[6] for row in HAND], (NEW - OLD).exp()[MASK > 0])
    same(numbers("In completions 1, 2 and 4, s is #, # and #."), s[[0, 1, 3], 0])
    losses = numbers("is # in PPO, # in GRPO and")
    for i, script in [(7, ppo), (8, grpo), (9, gspo)]:
        pushed, loss = pushes(script)
        printed = [row[i] for row in HAND]
        assert [cell == "clip" for cell in printed] == (pushed[MASK > 0] == 0).tolist()
        same([cell.replace("clip", "0") for cell in printed], pushed[MASK > 0])
        same(losses[i - 7:i - 6], [loss][:len(losses[i - 7:i - 6])])
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

def test_the_answer_with_another_clip_range():
    """With --eps_high .3 the first cell changes in PPO and GRPO, the first four in GSPO; and the losses."""
    cells = numbers("pushed by # in PPO and by # in GRPO. The losses become # and #.", SECOND)
    cells += numbers("each of its four tokens is pushed by #, and the loss becomes #.", SECOND)
    for script, cell, printed, changed in [(ppo, 0, 2, [[0, 0]]), (grpo, 1, 3, [[0, 0]]),
                                           (gspo, 4, 5, [[0, t] for t in range(4)])]:
        (before, _), (after, loss) = pushes(script), pushes(script, eps_high=0.3)
        assert (before != after).nonzero().tolist() == changed
        same([cells[cell], cells[printed]], [after[0, 0], loss])

# ---- The ladder ----

def test_what_a_baseline_does_to_the_mean():
    """Two completions, both right: one of one token, .3 = sigmoid(z), one of two, the second of them certain.
    The exact mean gradient by z: with 1/|o| it is .3 (1 - b) .7 - .7 (1 - b) .3/2 = .105 (1 - b), else 0."""
    z, mask = tensor64([[0.3 / 0.7]]).log().requires_grad_(), tensor64([[1, 0], [1, 1]])
    logp = torch.cat([torch.nn.functional.logsigmoid(torch.cat([z, -z])), 0 * mask[:, :1]], 1)  # (2, 2)

    def gradient(b, weight=1):
        adv = (1 - b) * tensor64([[0.3], [0.7]]) * weight
        loss, _ = ppo.policy_loss(logp, logp.detach(), adv, mask, 0.2, 0.2)
        return torch.autograd.grad(-loss, z, retain_graph=True)[0]
    rows = table(SECOND, "| completion | probability |")
    slopes = [torch.autograd.grad(logp[i].sum(), z, retain_graph=True)[0] for i in (0, 1)]
    for i, (row, n) in enumerate(zip(rows, (1, 2), strict=True)):
        p, part = logp[i].sum().exp(), logp[i].sum().exp() * slopes[i]
        same([row[1], row[2], *(cell.removesuffix(" A") for cell in row[3:])], [p, slopes[i], part, part / n])
    with_it, = numbers("With 1/|o| they add up to # A, which is 0 only if b = 1.", SECOND)
    same([with_it, with_it, "0"], [gradient(0), 2 * gradient(0.5), gradient(1)])
    for b in (0, 0.5, 1):  # "Without 1/|o| the two add up to 0 for every baseline b."
        assert abs(gradient(b, mask.sum(1, keepdim=True))) < 1e-12

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
    args = gspo.parse_args(["--device", "cpu", "--dtype", "bfloat16"])
    assert args.eps_low == args.eps_high == 0.01 and "clips at .01 in bfloat16" in README

def test_kl_estimators():
    """Exact means over four tokens, each with its probability under pi, and gradients by the logits of pi."""
    z, ref = tensor64([0.3, -0.5, 1.1, 0]).requires_grad_(), tensor64([[0, 0.4, 0.2, -0.7]]).log_softmax(1).T
    logp, ones = z.log_softmax(0)[:, None], torch.ones(4, 1).double()
    old = logp.detach()

    def mean(script, *rest, flags):
        rows = [[x[[i]] for x in (logp, old, *rest, ones)] for i in range(4)]
        return sum(p.exp() * script.policy_loss(*row, 0.2, 0.2, *flags)[0] for p, row in zip(old, rows))
    penalty, k1 = ppo.token_rewards(0 * z.detach(), old, ref, ones, 1), logp - ref
    means = [mean(ppo, penalty, flags=[]), (old.exp() * k1).sum(), (old.exp() * k1 ** 2 / 2).sum(),
             *(mean(grpo, ref, 0 * ones, flags=[1.0, kl]) for kl in ("k3", "wk3"))]
    for row, value in zip(table(SECOND, "| estimate |"), means, strict=True):
        same([row[1], *row[2].split(",")], [value, *torch.autograd.grad(value, z, retain_graph=True)[0]])

def test_the_memory_of_real_models():
    """Of Qwen2.5-0.5B, 1.5B and 7B, by their shapes: 16 bytes a trained parameter, 4 one of the reference.
    LoRA of rank 16 trains 16 (in + out) parameters a linear layer of the body, whose weights have 2 bytes."""
    sizes, adapted, bytes = [], [], [int(row[-1]) for row in table(SECOND, "| | weights | gradients |")]
    shapes = [(896, 24, 4864, 14, 2, 151936), (1536, 28, 8960, 12, 2, 151936),
              (3584, 28, 18944, 28, 4, 152064)]
    for hidden, layers, inner, heads, kv_heads, vocabulary in shapes:
        config = transformers.Qwen2Config(
            vocab_size=vocabulary, hidden_size=hidden, num_hidden_layers=layers, intermediate_size=inner,
            num_attention_heads=heads, num_key_value_heads=kv_heads, tie_word_embeddings=hidden < 3584)
        with torch.device("meta"):
            model = transformers.Qwen2ForCausalLM(config)
        sizes.append(model.num_parameters() / 1e9)
        layers = [layer for layer in model.model.modules() if isinstance(layer, torch.nn.Linear)]
        frozen, adapters = (sum(map(count, layers)) / 1e9 for count in (
            lambda layer: layer.weight.numel(), lambda layer: 16 * sum(layer.weight.shape)))
        adapted.append(2 * frozen + 4 * (sizes[-1] - frozen) + 16 * adapters)
    assert bytes == [16, 20, 36]
    for row, size in zip(table(SECOND, "| model | parameters, billions |"), sizes, strict=True):
        same(row[1:], [size, *(size * per_parameter for per_parameter in bytes)])
    same(numbers("the 1.5B model comes to # GB and the 7B model to # GB", SECOND), adapted[1:])

# ---- Symbols and logged numbers ----

def test_the_table_of_symbols():
    """Names are in the scripts, and what a rollout holds has the printed shape: of N rows, T columns."""
    sources = "".join((ROOT / f"{name}.py").read_text(encoding="utf-8") for name in ("grpo", "gspo", "ppo"))
    rows = table(README.replace("\\|", ""), "| paper | code |")
    assert all(re.search(rf"\b{name}\b", sources) for row in rows for name in re.findall(r"\w+", row[1]))
    for script, count in [(grpo, 6), (gspo, 6), (ppo, 8)]:  # PPO has values and returns, too
        rollout = Trainer(script, beta=0.1).rollout
        lengths = dict(zip("NTL", (*rollout["mask"].shape, rollout["ids"].shape[1])))
        for _, names, shapes in rows:
            own, _, of_ppo = shapes.partition(", in PPO ")
            for name in rollout.keys() & set(re.findall(r"\w+", names)):
                assert rollout[name].shape == eval(of_ppo if of_ppo and script is ppo else own, lengths), name
                count -= 1
        assert count == 0

def test_the_ranges_of_the_logged_numbers():
    """ "a to b" are means of the first and last step over five seeds, "below c" all steps of all runs."""
    logged = collections.defaultdict(list)
    with (ROOT / "tests" / "results" / "toy" / "toy.csv").open() as file:
        for row in csv.DictReader(file):
            for name in row.keys() - {"run", "seed", "step"}:
                if row[name]:
                    logged[row["run"], name].append((int(row["step"]), float(row[name])))
    checked = 0
    for name, _, *cells, _ in table(USING, "| number | what it is |"):
        for script, cell in zip(("grpo", "gspo", "ppo"), cells, strict=True):
            found = sorted(logged[script, name.split("`")[1]])
            first, last = found[:5], found[-5:]
            if re.match(r"[.\d]+ to [.\d]+(,|$)", cell):
                means = [sum(x for _, x in part) / 5 for part in (first, last)]
                same(cell.split(",")[0].split(" to "), means)
            elif cell.startswith("below "):
                assert max(x for _, x in found) < float(cell.removeprefix("below "))
            elif cell.startswith("none"):
                assert not found
            else:
                continue
            checked += 1
    assert checked > 30

# ---- Names, commands, examples ----

def test_changed_lines_of_the_forks():
    changed = {path.stem: len(re.findall(r"^[+-](?!\+\+ |-- )", path.read_text(encoding="utf-8"), re.M))
               for path in (ROOT / "tests" / "forks").glob("*.patch")}
    assert {row[0].strip("`"): int(row[3]) for row in table(FORKS, "| fork |")} == changed

@pytest.mark.parametrize("page", [
    page for page in PAGES if page.name == "README.md" and page.parent.name != "real"], ids=str)
def test_names_and_commands(page):
    """Functions, tests, files and flags that the pages name are there. In commands --device is left out, and
    --resume, which needs a run."""
    text = (ROOT / page).read_text(encoding="utf-8")
    assert all(hasattr(test_equations, name) for name in re.findall(r"`(test_[1-5]_\w+)`", text))
    for script, name in re.findall(r"`(common|grpo|gspo|ppo)\.(?!py)(\w+)", text):
        assert hasattr(sys.modules[script], name), name
    for name, flags in re.findall(r"python (ppo|grpo|gspo)\.py([^`#&|>;\n]*)", text.replace("\\\n", " ")):
        sys.modules[name].parse_args(shlex.split(re.sub(r"--(device \S+|resume|\w+ (\$\w+|[A-Z]\b))", "", flags)))
    programs = [*ROOT.glob("*.py"), *ROOT.glob("tests/**/*.py"), *ROOT.glob("tests/forks/*.patch")]
    sources = "".join(path.read_text(encoding="utf-8") for path in programs)
    flags = set(re.findall(r'add\w*\(\s*"--([a-z]\w+)', sources)) | {"help", "nproc_per_node", "standalone"}
    assert not set(re.findall(r"`[^`\n]*?--(?:no-)?([a-z]\w+)", text)) - flags
    for path in re.findall(r"`(tests/[\w./]+)`", text):
        assert (ROOT / path).exists(), path

@pytest.mark.parametrize("page", PAGES, ids=str)
def test_links(page):
    """Every page, file and section that a page links to is there."""
    text = (ROOT / page).read_text(encoding="utf-8")
    for link, anchor in re.findall(r"\]\(([\w./]*)(?:#([\w-]*))?\)", text):
        target = ROOT / page.parent / link if link else ROOT / page
        assert target.exists(), link
        titles = re.findall(r"^#+ (.*)$", target.read_text(encoding="utf-8"), re.M) if anchor else []
        anchors = {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}
        assert not anchor or anchor in anchors, anchor

def test_what_is_explained_is_logged():
    sources = "".join(path.read_text(encoding="utf-8") for path in ROOT.glob("*.py"))
    for row in table(USING, "| number | what it is |"):
        for name in re.findall(r"`(?:value_)?(\w+)`", row[0]):  # the critic's names are made of the policy's
            assert f'"{name}"' in sources or name == "loss", name

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

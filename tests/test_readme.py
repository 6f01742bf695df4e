"""The README's numbers, computed by the scripts' own functions; its names, commands and examples."""
import re
import subprocess

import torch
from conftest import ROOT, settings, tensor64
from test_cli import KEYS, PPO_KEYS

import common
import grpo
import gspo
import ppo
import test_equations

README = (ROOT / "README.md").read_text()
SCRIPTS = {"common": common, "grpo": grpo, "gspo": gspo, "ppo": ppo}

def table(start):
    """The rows below the header that starts so, as lists of cells."""
    lines = README[README.index(start):].split("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]

def same(cells, values):
    """Each cell is its value, rounded to as many digits as are printed."""
    for cell, value in zip(cells, values, strict=True):
        assert abs(float(cell) - value.item()) <= 0.5001 * 10 ** -len(cell.partition(".")[2]), (cell, value)

def test_one_step_by_hand():
    *tokens, losses = table("| o | token |")
    lengths = torch.tensor([int(row[0]) for row in tokens]).bincount()[1:, None]
    mask = (torch.arange(4) < lengths).double()
    r, old, new, V = (torch.zeros_like(mask).masked_scatter(
        mask > 0, tensor64([float(row[column]) for row in tokens])) for column in (2, 3, 4, 7))
    args = settings(ppo, beta=0.0)
    token_rewards = ppo.token_rewards(r.sum(1), old, None, mask, args.beta)
    critic, _ = ppo.gae(token_rewards, V, mask, args.gamma, args.lam)
    group = grpo.group_advantages(r.sum(1), 4)[:, None]
    w, s = (new - old).exp(), ((new - old).sum(1, keepdim=True) / lengths).exp()
    same([cell for row in tokens for cell in (row[2], *row[5:7], *row[8:10])],
         torch.stack([x.expand(4, 4)[mask > 0] for x in (token_rewards, w, s, critic, group)], 1).flatten())
    for column, script, adv in [(10, ppo, critic), (11, grpo, group), (12, gspo, group)]:
        x, no_reference = new.clone().requires_grad_(), [None] * (script is not ppo)
        loss, _ = script.policy_loss(x, old, *no_reference, adv, mask, settings(script, beta=0.0))
        slopes = -torch.autograd.grad(loss / 4, x)[0][mask > 0]
        printed = [row[column] for row in tokens]
        assert [cell == "clip" for cell in printed] == (slopes == 0).tolist()
        same([cell.replace("clip", "0") for cell in printed] + [losses[column]], [*slopes, loss / 4])

def test_kl_estimators():
    """Exact means over four tokens, each with its probability under pi, and gradients by the logits of pi."""
    z, ref = tensor64([0.3, -0.5, 1.1, 0]).requires_grad_(), tensor64([[0, 0.4, 0.2, -0.7]]).log_softmax(1).T
    logp, ones = z.log_softmax(0)[:, None], torch.ones(4, 1).double()
    old = logp.detach()

    def mean(script, *rest, **flags):
        return sum(old[i].exp() * script.policy_loss(*(x[[i]] for x in (logp, old, *rest, ones)),
                                                     settings(script, **flags))[0] for i in range(4))
    penalty, k1 = ppo.token_rewards(0 * z.detach(), old, ref, ones, 1), logp - ref
    means = [mean(ppo, penalty), (old.exp() * k1).sum(), (old.exp() * k1 ** 2 / 2).sum(),
             *(mean(grpo, ref, 0 * ones, beta=1.0, kl=kl) for kl in ("k3", "wk3"))]
    for row, value in zip(table("| estimator |"), means, strict=True):
        same([row[1], *row[2].split(",")], [value, *torch.autograd.grad(value, z, retain_graph=True)[0]])

def test_changed_lines_names_commands_and_metrics():
    diffs = re.findall(r"`diff (\w+\.py) (\w+\.py)` has\s(\d+)", README)
    assert len(diffs) == 2
    for one, other, count in diffs:
        done = subprocess.run(["diff", one, other], cwd=ROOT, capture_output=True, text=True)
        assert len(re.findall("^[<>]", done.stdout, re.M)) == int(count)
    changed = {path.stem: len(re.findall(r"^[+-](?!\+\+ |-- )", path.read_text(), re.M))
               for path in (ROOT / "tests" / "forks").glob("*.patch")}
    assert {row[0].strip("`"): int(row[3]) for row in table("| fork |")} == changed
    assert all(hasattr(test_equations, name) for name in re.findall(r"`(test_\w+)`", README))
    assert all(hasattr(SCRIPTS[a], b) for a, b in re.findall(r"`(common|grpo|gspo|ppo)\.(?!py)(\w+)", README))
    for name, flags in re.findall(r"`python (ppo|grpo|gspo)\.py([^`]*)`", README):
        SCRIPTS[name].parse_args(flags.split())
    listed = set(re.findall(r"`(\w+)`", "".join(row[0] for row in table("| number |"))))
    assert listed >= (KEYS | PPO_KEYS | {"eval_accuracy", "eval_sampled_accuracy"}) - {"step"}

def test_the_rewards_of_the_readme():
    exec(re.search(r"```python\n(.*?)```", README, re.S)[1], names := {"common": common})
    rows = [{"answer": "5", "unit": "km"}] * 3, ["2+3=5\n#### 5 km", "so #### 5", "km"]
    assert names["with_form"](*rows) == [1.1, 1, 0]
    assert names["with_unit"](*rows) == [1.2, 1, 0.2]

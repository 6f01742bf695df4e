"""tests/forks: each patch makes grpo.py another published objective. It applies, computes what that paper says, and runs."""
import importlib.util
import json
import math
import random
import shutil
import subprocess

import pytest
import torch
from conftest import ROOT, random_batch, save_tiny, tiny_model
from test_grpo import random_rows, settings, tensor64

import common

pytestmark = pytest.mark.upkeep
PATCHES = sorted(path.stem for path in (ROOT / "tests" / "forks").glob("*.patch"))


@pytest.fixture
def fork(tmp_path, monkeypatch):
    """Name of a patch -> the patched grpo.py as a module."""
    def load(name):
        shutil.copy(ROOT / "grpo.py", tmp_path)
        subprocess.run(["git", "apply", ROOT / "tests" / "forks" / f"{name}.patch"], cwd=tmp_path, check=True)
        spec = importlib.util.spec_from_file_location(f"fork_{name}", tmp_path / "grpo.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module
    monkeypatch.chdir(tmp_path)
    return load


def lengths_fixture():
    """EQUATIONS.md: A = [1,-1,1,-1], lengths [2,8,4,2], w = 1."""
    mask = (torch.arange(8) < torch.tensor([2, 8, 4, 2])[:, None]).double()
    logp = torch.full((4, 8), -1.0, dtype=torch.float64) * mask
    return logp, logp, None, tensor64([1, -1, 1, -1]), mask


def clipped(w, A, args):
    return min(w * A, min(max(w, 1 - args.eps_low), 1 + args.eps_high) * A)


def test_the_forks_are_those_of_the_readme():
    """All are named, and the one that is shown is the file."""
    readme = (ROOT / "README.md").read_text()
    assert PATCHES and all(f"`{name}`" in readme for name in PATCHES)
    shown = [name for name in PATCHES if (ROOT / "tests" / "forks" / f"{name}.patch").read_text() in readme]
    assert shown == ["rloo"]


def test_dr_grpo(fork):
    """A = r - mean, and one constant in place of the lengths: J = -.125 on the fixture, and an oracle with floats."""
    module, args = fork("dr_grpo"), settings(max_new_tokens=8)
    assert -module.policy_loss(*lengths_fixture(), args)[0].item() / 4 == pytest.approx(-0.125)
    rewards = [random.Random(i).random() for i in range(6)]
    expected = [r - sum(rewards[i // 3 * 3:][:3]) / 3 for i, r in enumerate(rewards)]
    assert module.group_advantages(tensor64(rewards), 3).tolist() == pytest.approx(expected)
    logp, old, ref, adv, mask = random_rows(3)
    J = sum(clipped(math.exp(logp[i][t] - old[i][t]), adv[i], args) / 8 for i, row in enumerate(mask) for t, m in enumerate(row) if m)
    assert -module.policy_loss(*map(tensor64, (logp, old, ref, adv, mask)), args)[0].item() == pytest.approx(J)


def test_rloo(fork):
    """The baseline of a completion is the mean of the others."""
    rewards = [random.Random(i).random() for i in range(8)]
    others = [(sum(rewards[i // 4 * 4:][:4]) - r) / 3 for i, r in enumerate(rewards)]
    adv = fork("rloo").group_advantages(tensor64(rewards), 4).tolist()
    assert adv == pytest.approx([r - b for r, b in zip(rewards, others)])


def test_cispo(fork):
    """The gradient of a token is min(w, cap) A / |o|, over the cap too, where GRPO's is 0."""
    module, args = fork("cispo"), settings(eps_high=0.3)
    logp, old, ref, adv, mask = map(tensor64, random_rows(3))
    slope = torch.autograd.grad(-module.policy_loss(logp.requires_grad_(), old, ref, adv, mask, args)[0], logp)[0]
    over = 0
    for i, t in mask.nonzero().tolist():
        w = math.exp(logp[i, t].item() - old[i, t].item())
        over += w > 1.3
        assert slope[i, t].item() == pytest.approx(min(w, 1.3) * adv[i].item() / mask[i].sum().item())
    assert over > 3


def test_dapo_loss(fork):
    """J = -.25 on the fixture: a mean over tokens; and an oracle with floats."""
    module, args = fork("dapo"), settings(eps_high=0.28)
    assert -module.policy_loss(*lengths_fixture(), args)[0].item() / 16 == pytest.approx(-0.25)
    logp, old, ref, adv, mask = random_rows(3)
    J = sum(clipped(math.exp(logp[i][t] - old[i][t]), adv[i], args) for i, row in enumerate(mask) for t, m in enumerate(row) if m)
    assert -module.policy_loss(*map(tensor64, (logp, old, ref, adv, mask)), args)[0].item() == pytest.approx(J)


@pytest.mark.parametrize("tokens", [30, 10**6])
def test_dapo_update(fork, tokens):
    """The gradient of an optimiser step: one mean over all tokens of the groups with different rewards, whatever the cut."""
    module, model = fork("dapo"), tiny_model(seed=3)
    args = settings(eps_high=0.28, epochs=1, minibatches=1, group_size=2, micro_batch_tokens=tokens, temperature=1.0)
    rollout = random_batch(6, seed=2)
    adv = rollout["adv"] = torch.tensor([1.0, -1.0, 0.0, 0.0, 0.5, -0.5])
    logp = common.token_logprobs(model, rollout, 1.0)
    rollout["old_logp"] = logp.detach()
    rows = [0, 1, 4, 5]
    (-(logp * adv[:, None])[rows].sum() / rollout["mask"][rows].sum()).backward()  # at w = 1 the gradient of w is that of log pi
    expected = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    optimizer = type("Optimizer", (), {"step": lambda self: {}})()
    module.update(model, optimizer, rollout, args)
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.grad, expected[name], rtol=1e-4, atol=1e-6, msg=name)


def test_dapo_punishes_length(fork, monkeypatch):
    """Eq. 13 of the paper at 20,480 tokens with a margin of 4,096: 16,384 -> 0, 18,432 -> -.5, 20,480 -> -1."""
    module, lengths = fork("dapo"), torch.tensor([100, 16384, 18432, 20480])
    mask = (torch.arange(20480) < lengths[:, None]).float()
    rollout = {"mask": mask, "texts": [""] * 4, "finished": torch.ones(4, dtype=torch.bool)}
    monkeypatch.setattr(common, "generate", lambda *_: rollout)
    monkeypatch.setattr(common, "score_rows", lambda *_: [mask, mask])
    args = settings(group_size=4, max_new_tokens=20480, temperature=1.0)
    out, _ = module.collect(tiny_model(), None, None, [{"prompt": [3]}], lambda *_: torch.ones(4), args)
    assert out["rewards"].tolist() == pytest.approx([1, 1, 0.5, 0])


@pytest.mark.parametrize("name", PATCHES)
def test_a_fork_runs(name, fork, tmp_path, capsys):
    """At toy size; its docstring, which is its --help, says what it is."""
    module = fork(name)
    assert module.__doc__.upper().startswith(f"{name.replace('dr_grpo', 'dr. grpo').upper()}: ")
    save_tiny(tmp_path / "model")
    rows = [{"question": f"t{i} t{i + 1}", "answer": "7"} for i in range(10, 20)]
    (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, rows)))
    module.main(module.parse_args("--model model --dataset data.jsonl --steps 2 --prompts 4 --group_size 2 --minibatches 2 "
                                  "--max_new_tokens 8 --eval_samples 0 --out run".split()))
    assert [json.loads(line)["step"] for line in (tmp_path / "run" / "metrics.jsonl").open()] == [0, 1, 2]
    assert "The loss is 0" not in capsys.readouterr().out or name == "rloo"

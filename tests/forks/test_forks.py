"""Each patch applies, learns, and computes what its paper says (most: vectors/test_vectors.py)."""
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import (ROOT, Trainer, count_t3, full_logprobs, loss_of, random_batch, random_rows, settings,
                      spy, tiny_model, train)
from patched import PATCHES, fork, patched_copy  # noqa: F401

import common, grpo, test_every_script  # noqa: E401

pytestmark = pytest.mark.slow

def test_every_fork_passes_the_tests_of_every_script(tmp_path):
    """As copies next to common.py, in a process that takes files for ASCII unless the code says otherwise."""
    (tmp_path / "tests" / "toy").mkdir(parents=True)
    for file in ("common.py", "tests/conftest.py", "tests/test_every_script.py", "tests/toy/args.json"):
        shutil.copy(ROOT / file, tmp_path / file)
    for name in sorted(PATCHES):
        patched_copy(name, tmp_path)
    ascii = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    found = subprocess.run(command, cwd=tmp_path, env=os.environ | ascii, stdout=-1, encoding="utf-8")
    assert found.returncode == 0, found.stdout

def example(name):
    """The function of this name, from an example on the page."""
    page = (ROOT / "tests" / "forks" / "README.md").read_text(encoding="utf-8")
    examples = re.findall(r"^```py(?:thon)?\n(.*?)^```", page, re.S | re.M)
    names = {"torch": torch, "common": common}
    exec(*(code for code in examples if f"def {name}(" in code), names)
    return names[name]

def test_a_half_applied_patch_is_loud(tmp_path, monkeypatch):
    """Each patch replaces the first line, so that none applies on top of another. The tests refuse a .rej."""
    first = (ROOT / "grpo.py").read_text("utf-8").partition("\n")[0]
    assert all(f"\n-{first}\n" in path.read_text("utf-8") for path in PATCHES.values())
    monkeypatch.setattr(test_every_script, "ROOT", tmp_path)
    Path(tmp_path, "grpo.py.rej").touch()
    with pytest.raises(AssertionError, match="half patched"):
        test_every_script.imported("grpo")

def test_the_shown_merge_of_two_rollouts(fork):
    trainer = Trainer(grpo, group_size=4, max_new_tokens=4)
    short, trainer.args.max_new_tokens = trainer.rollout, 9
    trainer.collect()
    both, long = example("merged")(short, trainer.rollout), trainer.rollout
    assert both["texts"] == short["texts"] + long["texts"] and torch.equal(both["ids"][24:], long["ids"])
    assert torch.equal(both["mask"][:24, :4], short["mask"]) and (both["mask"][:24, 4:] == 0).all()
    whole, *halves = (trainer.gradients(one)[0] for one in (both, short, long))
    torch.testing.assert_close(whole, sum(halves) / 2, rtol=1e-4, atol=1e-6)

def test_the_shown_two_turns():
    """A row is prompt, answer, message, answer, and trains both answers. The text is the second one."""
    trainer = Trainer(grpo, group_size=4, prompts=2)
    policy, tokenizer, problems, args = trainer.policy, trainer.tokenizer, trainer.problems, trainer.args
    two_turns = example("two_turns")
    rollout = two_turns(policy, tokenizer, problems, 4, args)
    assert rollout["problems"] == [problem for problem in problems for _ in range(4)]
    ends = rollout["prompt_length"] + rollout["completion_length"]
    for i, problem in enumerate(rollout["problems"]):
        prompt, row = problem["prompt"], rollout["ids"][i, :ends[i]].tolist()
        ids = row[len(prompt):]
        n = min(ids.index(1) + 1 if 1 in ids else 8, 8)  # ended by a stop token, or after 8 tokens
        assert row[:len(prompt)] == prompt and ids[n:n + 3] == [2, 2, 2]  # the message, unknown to it
        assert rollout["mask"][i].nonzero()[:, 0].tolist() == [*range(n), *range(n + 3, len(ids))]
        assert rollout["texts"][i] == tokenizer.decode(ids[n + 3:]).removesuffix("t1")
        assert bool(rollout["finished"][i]) == (ids[-1] == 1)
    expected = full_logprobs(policy, rollout, args.temperature)
    torch.testing.assert_close(rollout["sampled_logp"].double(), expected, rtol=1e-5, atol=1e-5)
    first = common.evaluate(policy, tokenizer, problems, count_t3, args)
    second = two_turns(policy, tokenizer, problems, 1, args)
    found = example("evaluate")(policy, tokenizer, problems, count_t3, args)
    mean = pytest.approx(sum(count_t3(second["problems"], second["texts"])) / 6)
    assert found == first | {"eval_second_reward": mean}

def test_the_entropy_bonus_by_enumeration(fork):
    """J, its gradient, and the mean entropy, over the whole vocabulary, also in groups of equal rewards."""
    flags = {"group_size": 4, "beta": 0.0, "eps_low": 0.02, "eps_high": 0.05, "ent_coef": 0.3}
    trainer, rollout = Trainer(
        fork("entropy"), lambda problems, texts: [float("t3" in text) for text in texts], **flags).moved()
    J, entropies = 0, []
    for i, start in enumerate(rollout["prompt_length"].tolist()):
        n, A = rollout["completion_length"][i], rollout["adv"][i, 0]
        ids = rollout["ids"][i, :start + n]
        for t, p in enumerate(torch.softmax(trainer.policy(ids[None]).logits[0, start - 1:-1] / 0.6, -1)):
            w = p[ids[start + t]] / rollout["old_logp"][i, t].exp()
            entropies.append(-(p * p.log()).sum())
            J += (torch.min(w * A, w.clamp(0.98, 1.05) * A) + 0.3 * entropies[-1]) / n / len(rollout["ids"])
    expected = torch.autograd.grad(-J, list(trainer.policy.parameters()))
    [gradient], stats = trainer.gradients(rollout)
    torch.testing.assert_close(gradient, torch.cat([g.flatten() for g in expected]), rtol=1e-6, atol=1e-9)
    assert stats["loss"] == pytest.approx(-J.item(), rel=1e-6) and (rollout["adv"] == 0).any()
    assert stats["full_entropy"] == pytest.approx(sum(entropies).item() / len(entropies), rel=1e-6)

def test_tpos_loss_and_gradient_are_those_of_the_proposal(fork):
    """With the KL. If one of 16 completions is right, the wrong ones, as was to be expected, have A = 0."""
    module, given, J = fork("tpo"), random_rows(1, spread=1.0), 0
    given["old_logp"] = -given["old_logp"].abs() - 0.1  # of p
    given["adv"] = given["adv"].sign()
    x = given["logp"].clone().requires_grad_()
    for i, t in (given["mask"] > 0).nonzero().tolist():
        old, log_x, A = given["old_logp"][i, t], given["ref_logp"][i, t] - x[i, t], given["adv"][i, 0]
        w, p = (x[i, t] - old).exp(), old.exp()
        # A good token of probability p may reach sqrt(p), a bad one p^2.
        J += (min(w, p.sqrt() / p) if A > 0 else max(w, p ** 2 / p)) * A
        J -= 0.04 * (log_x.exp() - log_x - 1)
    loss, gradient, stats = loss_of(module, given, settings(module, beta=0.04))
    torch.testing.assert_close(-loss, J.detach())
    torch.testing.assert_close(-gradient, torch.autograd.grad(J, x)[0])
    assert 3 < stats["clip_frac"][0] < given["mask"].sum() - 3
    for G, wrong in (4, -1), (16, 0):
        assert module.group_advantages(torch.eye(G)[0], G).tolist() == pytest.approx([1] + [wrong] * (G - 1))

def collected(module, monkeypatch, rewards, lengths, **flags):
    mask = (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]).float()
    rollout = dict.fromkeys(("ids", "mask", "sampled_logp"), mask) | {"texts": [""] * len(lengths)}
    rollout |= {"skip": mask[:, 0] < 0, "finished": mask[:, 0] > 0, "completion_length": mask.sum(1)}
    rollout["problems"] = [{"prompt": [i // flags["group_size"]]} for i in range(len(lengths))]
    monkeypatch.setattr(common, "generate", lambda *_: dict(rollout))
    monkeypatch.setattr(common, "over_batches", lambda _, model, rollout, __: rollout["mask"])
    return module.collect(None, None, None, None, lambda *_: rewards, settings(module, **flags))

def test_dapo_leaves_out_groups_that_are_all_right_and_penalizes_length(fork, monkeypatch):
    """The penalty is 0 up to 8 of 10 tokens, and -1 at 10. Without it, all rewards of group 2 are equal."""
    rewards, lengths = [1, 0, 0, 1, 1, 1, 1, 1, 0, 0, 0, 1], [3, 5, 1, 2, 9, 3, 3, 3, 7, 8, 10, 9]
    rollout, _ = collected(fork("dapo"), monkeypatch, rewards, lengths, group_size=4, max_new_tokens=10)
    assert rollout["rewards"].tolist() == pytest.approx([1, 0, 0, 1, 0.5, 1, 1, 1, 0, 0, -1, 0.5])
    assert rollout["mixed"].tolist() == [i // 4 != 1 for i in range(12)] and (rollout["adv"][4:8] == 0).all()

def test_lora_starts_as_the_model_trains_its_adapters_and_saves_the_merged_weight(fork):
    module, batch = fork("lora"), random_batch(6)
    args = settings(module, lora_rank=3)
    for args.dtype in ("bfloat16", "float32"):
        base, policy = models = tiny_model(), tiny_model()
        module.add_adapters(policy, args)
        assert torch.equal(*(common.token_logprobs(model, batch, args) for model in models))
    adapters = [p for p in policy.double().parameters() if p.requires_grad]
    for p in adapters:
        p.data += 0.1 * torch.randn_like(p)
    assert len(adapters) == 2 * 14
    policy.save_pretrained("saved")
    merged = type(policy).from_pretrained("saved", dtype=torch.float64)
    one, other = (common.token_logprobs(model, batch, args) for model in (policy, merged))
    torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
    layer, plain = (model.model.layers[1].mlp.up_proj for model in (policy, merged))
    torch.testing.assert_close(plain.weight, layer.weight + 32 / 3 * layer.B @ layer.A, rtol=1e-5, atol=1e-5)
    one.sum().backward()
    assert all(p.grad.any() for p in adapters) and layer.weight.grad is None
    module.LoRA.on = False
    off = common.token_logprobs(policy, batch, args)
    assert torch.equal(off, common.token_logprobs(base.double(), batch, args)) and not torch.equal(off, one)

@pytest.mark.parametrize("answers, forms, G, weight, expected", [
    # The paper's example: sums of 0 and 1 in one group, 0 and 2 in the other. GRPO has -.707, .707 in both.
    ([0, 0, 0, 1], [0, 1, 0, 1], 2, 1.0, [-0.5477, 0.5477, -1.0954, 1.0954]),
    # Where all answers are right, form keeps its weight, a tenth of that of answers in the other group.
    ([1, 1, 0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1, 0, 0], 4, 0.1,
     [1.3161, 1.3161, -1.3161, -1.3161, 0.13161, 0.13161, -0.13161, -0.13161]),
    # A reward that is the same for all gives exactly 0. Otherwise rounding noise would be trained on.
    ([1, 1, 1], [0.9, 0.9, 0.9], 3, 1.0, [0, 0, 0])])
def test_gdpos_advantages_by_hand(answers, forms, G, weight, expected, fork, monkeypatch):
    module = fork("gdpo")
    monkeypatch.setattr(module, "form_reward", lambda *_: forms)
    given = {"group_size": G, "beta": 0.0, "form_weight": weight}
    rollout, stats = collected(module, monkeypatch, answers, [2] * len(answers), **given)
    assert rollout["adv"][:, 0].tolist() == pytest.approx(expected, rel=1e-3, abs=0)
    assert rollout["rewards"].tolist() == pytest.approx([a + weight * f for a, f in zip(answers, forms)])
    assert stats["form_reward"] == pytest.approx(sum(forms) / len(forms))
    assert torch.equal(rollout["skip"], rollout["adv"][:, 0] == 0)

def test_gdpo_is_evaluated_with_the_reward_of_training(fork, monkeypatch):
    """It rewards lines of work, with the answer on a last line. We take the reward from a run."""
    module, weight = fork("gdpo"), 0.3
    evaluated, trained = spy(monkeypatch, common, "evaluate"), spy(monkeypatch, module, "collect")
    train(module, "--steps 1 --prompts 8 --eval_problems 4 --form_weight .3")
    rollout, stats = trained[0].result
    total = evaluated[0].reward(rollout["problems"], rollout["texts"])
    assert rollout["rewards"].tolist() == pytest.approx(total) and len(set(total)) > 2
    texts = ["9-4=5\n#### 5\n", "7+2=9\n9-4=6\n#### 6", "#### 5", "1+1=2\n#### 2\nbye"]
    assert evaluated[0].reward([{"answer": "5"}] * 4, texts) == pytest.approx([1 + weight, weight, 1, 0])
    assert 0 < stats["form_reward"] < 1

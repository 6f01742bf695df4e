"""Checkpoints and --resume: bit for bit like a run that was never stopped, and nothing gets lost."""
import itertools
import json
import os
from pathlib import Path

import pytest
import torch
import transformers
from conftest import TINY, newest, same, settings, spy, tiny_model, tiny_tokenizer, train
from safetensors.torch import load_file

import common
import gspo
import grpo
import ppo

pytestmark = pytest.mark.usefixtures("here")
STEADY = (f"{TINY} --system_prompt '' --max_prompt_tokens 40 --epochs 1 --prompts 3 --minibatches 2 "
          "--warmup_steps 9 --lr 0.003 --eval_every 1 --save_every 100")

def resume(script, out, flags=""):
    """Continue a run as another process would, with other random numbers."""
    torch.manual_seed(99)
    return train(script, f"--resume {flags}", out=out)

def same_runs(one, two):
    """Two runs ended with the same weights, optimizer state and metrics, and left nothing half-written."""
    a, b = newest(one), newest(two)
    assert a.name == b.name and sorted(os.listdir(a)) == sorted(os.listdir(b))
    assert same(load_file(a / "model.safetensors"), load_file(b / "model.safetensors"))
    states = [torch.load(Path(out, "state.pt")) for out in (one, two)]
    for state in states:
        rows = [json.loads(line) for line in state.pop("metrics").splitlines()]
        state["metrics"] = [row | {"seconds": 0} for row in rows]
    assert same(*states)

@pytest.mark.parametrize("script, cut, total, flags", [
    (ppo, 1, 3, "--beta 0.1 --epochs 2"), (gspo, 1, 2, "--dtype bfloat16 --token_level --beta 0.1 --seed 5"),
    (grpo, 3, 5, "--dtype bfloat16 --beta 0.1 --ref_every 2")])
def test_a_resumed_run_is_bit_equal_to_one_that_was_never_stopped(script, cut, total, flags, spread):
    """Weights, moments, schedule, reference, critic and metrics. Only --steps is given again."""
    train(script, f"{STEADY} {flags} --steps {total}", out="whole")
    train(script, f"{STEADY} {flags} --steps {cut}", out="part")
    assert [row["step"] for row in resume(script, "part", f"--steps {total}")] == list(range(total + 1))
    same_runs("whole", "part")

class Killed(BaseException):
    """Raised where a run might be killed."""

def killed(*given, **named):
    raise Killed

@pytest.mark.parametrize("module, name", [  # right before each thing that is done to the disk
    (torch, "save"), (Path, "replace"), (transformers.PreTrainedTokenizerBase, "save_pretrained"),
    (transformers.PreTrainedModel, "save_pretrained")])
def test_a_kill_at_any_instant_of_a_save_leaves_a_good_checkpoint(module, name, monkeypatch):
    """Weights, moments and metrics are loaded from one step. Later saves work, and keep all models."""
    policy, tokenizer, states = tiny_model(), tiny_tokenizer(), {}
    optimizer = common.Optimizer(policy, 0.01, settings(grpo, warmup_steps=0))
    Path("run").mkdir()

    def save(step):
        for weight in policy.parameters():
            weight.grad = torch.full_like(weight, step)
        optimizer.clip_and_step()
        Path("run/metrics.jsonl").write_text(f"{step}\n")
        states[step] = {key: weight.clone() for key, weight in policy.state_dict().items()}
        common.save_checkpoint("run", step, tokenizer, policy, {"policy": policy, "optimizer": optimizer})

    save(9)  # 10 is newer, although "9" is sorted after "10"
    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(module, name, killed)
        save(10)
    args = settings(grpo, out="run", resume=True)
    found = common.open_run(args, {"policy": policy, "optimizer": optimizer})
    assert found == 9 and same(dict(policy.state_dict()), states[found])
    assert optimizer.param_groups[0]["steps"] == found - 8
    assert Path("run/metrics.jsonl").read_text() == f"{found}\n"
    save(11)
    assert all(Path("run", name, "model.safetensors").exists() for name in ("step-9", "step-11"))
    assert torch.load("run/state.pt")["step"] == 11

@pytest.mark.parametrize("every", [2, 100])
def test_an_interrupted_run_goes_on_from_its_checkpoint_or_begins_anew(every, spread, monkeypatch):
    """A kill may also leave half a checkpoint, too many rows, and half of the last row."""
    real, count = grpo.collect, itertools.count(1)
    train(grpo, f"{STEADY} --steps 3", out="whole")
    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(grpo, "collect", lambda *args: (killed if next(count) == 3 else real)(*args))
        train(grpo, f"{STEADY} --steps 3 --save_every {every}", out="part")
    Path("part/temporary.pt").write_text("half")
    with open("part/metrics.jsonl", "a") as file:
        file.write('{"step": 3, "reward": 99}\n{"step": 4, "rew')
    resume(grpo, "part")
    same_runs("whole", "part")

def test_a_resumed_run_has_its_own_flags_and_those_given_again_override(spread, monkeypatch):
    """metrics.jsonl shows which steps had which learning rate. The new flags are saved in args.json, too."""
    train(grpo, f"{TINY} --temperature 0.7 --kl wk3 --system_prompt Why")
    calls = spy(monkeypatch, grpo, "collect")
    rows = resume(grpo, "run", "--steps 2 --lr 0.5 --no-gradient_checkpointing")
    args = calls[0].args
    assert (args.temperature, args.kl, args.system_prompt, args.model) == (0.7, "wk3", "Why", "model")
    assert (args.steps, args.lr, args.gradient_checkpointing) == (2, 0.5, False)
    assert [row["lr"] for row in rows[1:]] == [0.01, 0.5]
    assert resume(grpo, "run") == rows and len(calls) == 1, "the flags stay: there is nothing left to do"

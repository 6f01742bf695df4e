"""Checkpoints: a kill at any instant loses nothing, and --resume. See also test_every_script.py."""
import itertools
import json
from pathlib import Path

import pytest
import torch
import transformers
from conftest import TINY, same, settings, spy, tiny_model, tiny_tokenizer, train

import common
import grpo
import gspo

pytestmark = pytest.mark.usefixtures("here")

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
    optimizer = torch.optim.Adam(policy.parameters(), fused=True)
    Path("run").mkdir()

    def save(step):
        for weight in policy.parameters():
            weight.grad = torch.full_like(weight, step)
        common.clip_and_step(optimizer, 0.01, settings(grpo, warmup_steps=0))
        Path("run/metrics.jsonl").write_text(f"{step}\n")
        states[step] = {key: weight.clone() for key, weight in policy.state_dict().items()}
        common.save_checkpoint("run", step, tokenizer, policy, {"policy": policy, "optimizer": optimizer})

    save(9)
    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(module, name, killed)
        save(10)
    args = settings(grpo, out="run", resume=True)
    found = common.open_run(args, {"policy": policy, "optimizer": optimizer})
    assert found == 9 and same(dict(policy.state_dict()), states[9])
    assert optimizer.param_groups[0]["steps"] == 1 and Path("run/metrics.jsonl").read_text() == "9\n"
    save(11)
    assert all(Path("run", name, "model.safetensors").exists() for name in ("step-9", "step-11"))
    assert torch.load("run/state.pt")["step"] == 11

def test_an_interrupted_run_goes_on_from_its_checkpoint(spread, monkeypatch):
    """A kill may also leave half a checkpoint, too many rows, and half of the last row. Also in bfloat16."""
    flags = f"{TINY} --system_prompt '' --prompts 3 --warmup_steps 9 --eval_every 1 --dtype bfloat16"
    flags += " --steps 3"
    real, count = grpo.collect, itertools.count(1)
    whole = train(grpo, flags, out="whole")
    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(grpo, "collect", lambda *args: (killed if next(count) == 3 else real)(*args))
        train(grpo, f"{flags} --save_every 2", out="part")
    Path("part/temporary.pt").write_text("half")
    with open("part/metrics.jsonl", "a") as file:
        file.write('{"step": 3, "reward": 99}\n{"step": 4, "rew')
    torch.manual_seed(99)  # as another process, with other random numbers
    part = train(grpo, "--resume", out="part")
    assert [row | {"seconds": 0} for row in part] == [row | {"seconds": 0} for row in whole]
    one, other = (torch.load(f"{out}/state.pt") | {"metrics": ""} for out in ("whole", "part"))
    assert same(one, other) and not Path("part/temporary.pt").exists()

@pytest.mark.parametrize("module, name", [(torch, "save"), (transformers.PreTrainedModel, "save_pretrained")])
def test_a_run_that_was_killed_before_its_first_checkpoint_begins_again(module, name, spread, monkeypatch):
    """If state.pt is lost later on, a run does not begin again: that would overwrite its metrics."""
    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(module, name, killed)
        train(grpo, f"{TINY} --system_prompt ''")
    again, whole = train(grpo, "--resume"), train(grpo, f"{TINY} --system_prompt ''", out="whole")
    assert [row | {"seconds": 0} for row in again] == [row | {"seconds": 0} for row in whole]
    Path("run/state.pt").unlink()
    with pytest.raises(FileNotFoundError, match="state.pt"):
        train(grpo, "--resume --steps 2")
    assert len(Path("run/metrics.jsonl").read_text().splitlines()) == 2

def test_what_the_user_did_not_say_is_resolved_anew_on_the_machine_that_resumes(monkeypatch):
    """The device, its dtype, graphs, and gspo.py's range. What the user said stays, whenever it was said."""
    def save(args):
        Path("run").mkdir(exist_ok=True)
        Path("run/args.json").write_text(json.dumps(vars(args)))
    model = "--model model --dataset data.jsonl"
    save(gspo.parse_args(f"--out run {model} --lr 0.5 --prompts 5 --eps_high 0.02".split()))
    save(gspo.parse_args("--out run --resume --prompts 6".split()))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: True)
    args = gspo.parse_args("--out run --resume".split())
    assert (args.model, args.lr, args.prompts, args.eps_high) == ("model", 0.5, 6, 0.02)
    assert (args.device, args.dtype, args.cuda_graphs) == ("cuda", "bfloat16", True)
    assert (args.eps_low, args.micro_batch_tokens) == (0.01, 8192)

def test_a_run_that_began_without_a_reference_cannot_get_one(spread):
    train(grpo, f"{TINY} --system_prompt '' --beta 0")
    with pytest.raises(AssertionError, match="no reference"):
        train(grpo, "--resume --steps 2 --beta 0.1")

def test_a_resumed_run_has_its_own_flags_and_those_given_again_override(spread, monkeypatch):
    """metrics.jsonl shows which steps had which learning rate. The new flags are saved in args.json, too."""
    train(grpo, f"{TINY} --temperature 0.7 --kl wk3 --system_prompt Why")
    calls = spy(monkeypatch, grpo, "collect")
    rows = train(grpo, "--resume --steps 2 --lr 0.5 --no-gradient_checkpointing")
    args = calls[0].args
    assert (args.temperature, args.kl, args.system_prompt, args.model) == (0.7, "wk3", "Why", "model")
    assert (args.steps, args.lr, args.gradient_checkpointing) == (2, 0.5, False)
    assert [row["lr"] for row in rows[1:]] == [0.01, 0.5]
    assert train(grpo, "--resume") == rows and len(calls) == 1, "the flags stay: there is nothing left to do"

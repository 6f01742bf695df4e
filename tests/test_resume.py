"""Checkpoints: a kill at any instant loses nothing, and --resume. See also test_every_script.py."""
import json
from pathlib import Path

import pytest
import torch
import transformers
from conftest import TINY, same, train

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
def test_a_kill_at_any_instant_of_a_save_leaves_a_good_checkpoint(module, name, spread, monkeypatch):
    """What is resumed equals a run that was never stopped, and keeps all models. Also in bfloat16."""
    flags = f"{TINY} --system_prompt '' --warmup_steps 9 --save_every 1 --eval_every 1"
    flags += " --dtype bfloat16"
    whole = train(grpo, f"{flags} --steps 2", out="whole")
    train(grpo, flags)
    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(module, name, killed)
        train(grpo, "--resume --steps 2")
    assert len(Path("run/metrics.jsonl").read_text().splitlines()) == 3, "killed while saving step 2"
    again = train(grpo, "--resume")
    assert [row | {"seconds": 0} for row in again] == [row | {"seconds": 0} for row in whole]
    one, other = (torch.load(f"{out}/state.pt") | {"metrics": ""} for out in ("whole", "run"))
    assert same(one, other) and not Path("run/temporary.pt").exists()
    assert all(Path("run", f"step-{i}", "model.safetensors").exists() for i in range(3))

@pytest.mark.parametrize("module, name", [(torch, "save"), (transformers.PreTrainedModel, "save_pretrained")])
def test_a_run_that_was_killed_before_its_first_checkpoint_begins_again(module, name, spread, monkeypatch):
    """If state.pt is lost later on, it does not: that would overwrite its metrics. Nor can it get a KL."""
    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(module, name, killed)
        train(grpo, f"{TINY} --system_prompt '' --beta 0")
    again, whole = train(grpo, "--resume"), train(grpo, f"{TINY} --system_prompt '' --beta 0", out="whole")
    assert [row | {"seconds": 0} for row in again] == [row | {"seconds": 0} for row in whole]
    pytest.raises(KeyError, train, grpo, "--resume --steps 2 --beta 0.1")
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

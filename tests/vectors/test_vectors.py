"""Our scripts and forks agree with vectors.json. Their collect and update run here, but a model is an (N, 9)
table of log-probs or values, with junk in the padding and, if the mask has holes, between the tokens."""
import functools
import importlib
import json

import pytest
import torch
from check_vectors import FILE, fill, text
from conftest import call, settings
from patched import module_of, patched_copy

import common

VECTORS = json.loads(FILE.read_text(encoding="utf-8"))
BATCHES = {"near": VECTORS, "far": VECTORS["far"]}  # with all results
CASES = {case["name"]: case for case in VECTORS["policy_losses"]}
FORKS = {"DAPO": "dapo", "Dr. GRPO, k3": "dr_grpo", "RLOO": "rloo", "CISPO": "cispo", "TIS, k3": "tis",
         "IcePop, k3": "tis", "IcePop, whole completions": "tis"}

def script_of(name, folder):
    return (module_of(patched_copy(FORKS[name], folder)) if name in FORKS else
            importlib.import_module(name[:4].lower()))  # PPO, GRPO or GSPO

@pytest.fixture(params=["no holes", "holes"])
def table(request):
    """Turn rows of numbers into a float64 table, with junk, or the number `rest`, where no token is."""
    def lay_out(batch, rows, rest=None):
        numbers = torch.randn(len(rows), 9) * 9 if rest is None else torch.full((len(rows), 9), rest)
        for i, row in enumerate(rows):
            columns = batch["columns"][i] if request.param == "holes" else range(len(row))
            numbers[i, list(columns)] = torch.tensor(row)
        return numbers
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    yield lay_out
    torch.set_default_dtype(torch.float32)

def flags_of(script, case, N, G):
    """The settings of a case that the script has flags for, with small micro-batches."""
    flags = case | {"prompts": N // G, "group_size": G, "minibatches": 1, "epochs": 1}
    flags |= {"icepop": case.get("weight") == "masked", "sequence": "whole" in case}
    flags |= {"max_new_tokens": case.get("T_max", 100), "micro_batch_tokens": 20}
    flags |= VECTORS["ppo"] | {"vf_coef": 0.3} if case["advantages"] == "whitened" else {}
    return settings(script, **{name: flags[name] for name in flags.keys() & vars(settings(script)).keys()})

def step(script, case, batch, table, monkeypatch):
    """A step of the script: its loss, gradients of policy and critic, and statistics."""
    N, G = len(batch["lengths"]), batch["group_size"]
    args, mask = flags_of(script, case, N, G), table([[1.0] * n for n in batch["lengths"]], 0.0)
    ends = (mask * torch.arange(1, 10)).amax(1)  # (N,) the last token; prompts have one token
    rollout = {"ids": torch.zeros(N, 10), "prompt_length": torch.ones(N).long(), "mask": mask,
               "completion_length": ends.long(), "finished": ends > 0, "texts": [""] * N,
               "problems": [{}] * N, "sampled_logp": table(batch["sampled_logp"]), "skip": ends < 0}
    look_up = lambda model, b, args: model[b["row"], :b["mask"].shape[1]]  # noqa: E731
    monkeypatch.setattr(common, "generate", lambda *_: rollout)
    monkeypatch.setattr(common, "rollout_stats", lambda *_: {})  # it would refuse such a sampled_logp
    monkeypatch.setattr(common, "token_logprobs", look_up)
    monkeypatch.setattr(script, "token_values", look_up, raising=False)
    losses, backward = [], torch.Tensor.backward
    monkeypatch.setattr(torch.Tensor, "backward", lambda loss: losses.append(loss.item()) or backward(loss))
    policy, critic = table(batch["logp"]).requires_grad_(), table(batch["values"]).requires_grad_()
    monkeypatch.setattr(common, "clip_and_step", lambda *_: {})
    given = {"args": args, "problems": [{"prompt": []}] * (N // G), "reward": lambda *_: batch["rewards"],
             "tokenizer": None, "reference": table(batch["ref_logp"]) if args.beta else None}
    old = {"policy": table(batch["old_logp"]), "critic": table(batch["old_values"])}
    made, stats = call(script.collect, given | old)
    stats |= call(script.update, given | {"rollout": made, "policy": policy, "optimizer": None,
                                          "critic": critic, "critic_optimizer": None})
    return sum(losses), policy.grad, critic.grad, stats

@pytest.mark.parametrize("which", BATCHES)
@pytest.mark.parametrize("name", CASES)
def test_our_scripts_and_forks_agree(name, which, table, tmp_path, monkeypatch):
    """In loss and gradient, and ppo.py also in its critic."""
    case, of, near = CASES[name], BATCHES[which], {"rtol": 1e-9, "atol": 1e-9}
    lay_out, ppo = functools.partial(table, of["batch"]), of["ppo"]
    [right] = [one for one in of["policy_losses"] if one["name"] == name]
    loss, gradient, value_gradient, stats = step(
        script_of(name, tmp_path), case, of["batch"], lay_out, monkeypatch)
    torch.testing.assert_close(gradient, lay_out(right["gradient"], 0.0), **near)
    value_loss = 0.3 * ppo["value_loss"] if name == "PPO" else 0
    assert loss == pytest.approx(right["loss"] + value_loss, rel=1e-9, abs=1e-9)
    if name == "PPO":
        torch.testing.assert_close(value_gradient, 0.3 * lay_out(ppo["value_gradient"], 0.0), **near)
        assert stats["value_loss"] == pytest.approx(ppo["value_loss"])

def test_the_program_makes_the_file():
    made = json.loads(FILE.read_text(encoding="utf-8"))
    fill(made)
    assert text(made) == FILE.read_text(encoding="utf-8") and FILE.stat().st_size < 36_000

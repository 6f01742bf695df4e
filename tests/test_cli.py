"""The command line: flags, bad input, models, what every option does, what a run prints and logs."""
import collections
import contextlib
import itertools
import json
import re
import shutil
import sys
import time
import types
import unittest.mock
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import common
import gspo
import grpo
import ppo
from conftest import (LOOKS, TINY, char_tokenizer, newest, refused, same, save_judge, save_tiny, settings,
                      spy, sums, train, write_jsonl)

pytestmark = pytest.mark.usefixtures("here")
every_script = pytest.mark.parametrize("script", [ppo, grpo, gspo])
every_main = pytest.mark.parametrize("script", [ppo, grpo])  # gspo.py's is grpo.py's: test_layout.py

def weights(out="run"):
    return load_file(newest(out) / "model.safetensors")

# ---- Bad input: one line, status 2, nothing left behind ------------------------------------------

COUNTS = ("prompts group_size steps epochs minibatches max_new_tokens max_prompt_tokens micro_batch_tokens "
          "eval_every eval_problems eval_samples save_every").split()
BAD_FLAGS = dict.fromkeys(COUNTS, "0 -1 1.5 x") | {
    "temperature": "0 nan inf x", "lr": "0 -1 nan", "max_grad_norm": "0 -1", "eps_high": "0 nan",
    "eps_low": "-0.1 1.5 nan", "beta": "-0.1 nan", "warmup_steps": "-1 0.5", "seed": f"-1 {10 ** 30}",
    "dtype": "float64", "device": "bogus", "nope": "3", "step": "3"}  # --step is not --steps
OWN_FLAGS = {ppo: {"gamma": "-1 1.1 nan", "lam": "1.1", "vf_coef": "-1", "eps_value": "0", "value_lr": "0"},
             grpo: {"group_size": "1", "kl": "k1", "ref_every": "0 x", "gamma": "1"},
             gspo: {"group_size": "1", "kl": "k1", "ref_every": "0", "lam": "1"}}

@every_script
def test_a_flag_out_of_range_or_of_another_script_is_refused(script, capsys):
    for flag, values in (BAD_FLAGS | OWN_FLAGS[script]).items():
        for value in values.split():
            with refused(capsys, f"--{flag}"):
                script.parse_args([f"--{flag}={value}"])
    with refused(capsys, "--minibatches", "--prompts"):
        script.parse_args("--prompts 2 --minibatches 3".split())
    script.parse_args("--warmup_steps 0 --beta 0 --eps_low 1 --eps_high 5 --lr 1e-9".split())
    script.parse_args("--warmup_steps 9 --beta 9 --eps_low 0 --eps_high 0.01 --dtype float16".split())
    with refused(capsys, "--device", "cuda:99", "torch", "no such device"):
        script.parse_args(["--device", "cuda:99"])
    assert script.parse_args(["--device", "cpu:0"]).device == "cpu:0" and not Path("runs").exists()

def test_a_forks_flag_has_any_default_and_any_range(capsys):
    """A list of all names once held ranges: --entropy_coef with default 0.0 then "must be between 1e-09 and
    1000000000". A fork's range is its own business."""
    def parse(line):
        parser = common.parser("fork.py", "A fork.")
        parser.add_argument("--entropy_coef", type=float, default=0.0)
        common.add_args(parser)
        for name, default in {"prompts": 4, "minibatches": 1, "beta": 0.0}.items():
            parser.add_argument(f"--{name}", type=float, default=default)
        return common.parse(parser, line.split())
    assert (parse("").entropy_coef, parse("--entropy_coef -0.5").entropy_coef) == (0.0, -0.5)
    with refused(capsys, "fork.py", "--entropy_coef"):
        parse("--entropy_coef much")

CONTRADICTIONS = {  # script and flags: what the one warning names; None for no warning
    (grpo, "--beta 0 --ref_every 2"): "--ref_every --beta",
    (gspo, "--beta 0 --kl wk3"): "--kl --beta",
    (gspo, "--eps_low 0.1"): "--eps_low",
    (gspo, "--eps_high 0.2"): "--eps_high",
    (ppo, "--split train --eval_split train"): "--eval_split --split",
    (grpo, "--beta 0.1 --ref_every 2 --kl wk3 --eps_low 0.2"): None,
    (gspo, "--eps_low 0.09 --eps_high 0.09 --beta 0"): None,
    (ppo, "--beta 0 --eps_high 0.3"): None}

@pytest.mark.parametrize("script, flags", CONTRADICTIONS)
def test_flags_that_contradict_each_other_are_warned_about_once(script, flags, capsys):
    """They ran in silence: a reference that is never used, a clip that never acts, training on the exam."""
    Path("both").mkdir()
    [write_jsonl(f"both/{split}.jsonl", sums(9)) for split in ("train", "test")]
    train(script, f"{TINY} --dataset both --max_new_tokens 2 {flags}")
    said = capsys.readouterr()
    warnings = [line for line in (said.out + said.err).splitlines()
                if line.startswith("warning") and "cut off" not in line]  # random weights hardly ever stop
    words = CONTRADICTIONS[script, flags]
    assert len(warnings) == (words is not None), warnings
    assert words is None or all(word in warnings[0] for word in words.split()), warnings

def edit(path, **changes):
    held = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps(held | changes), encoding="utf-8")

def reweigh(change):
    """Change the weights of an MLP in a model directory: `change` gives a new tensor, or None."""
    def break_it(path):
        tensors, name = load_file(path / "model.safetensors"), "model.layers.0.mlp.up_proj.weight"
        tensors[name] = change(tensors[name])
        tensors = {name: tensor for name, tensor in tensors.items() if tensor is not None}
        save_file(tensors, path / "model.safetensors", {"format": "pt"})
    return break_it

def no_end(path):
    edit(path / "tokenizer_config.json", eos_token=None)
    edit(path / "generation_config.json", eos_token_id=None)

def no_vocabulary(path):
    """What Qwen2's loader then makes is a tokenizer of the special tokens alone."""
    (path / "tokenizer.json").unlink()
    special = {i: {"content": f"<|{i}|>", "special": True} for i in range(4)}
    edit(path / "tokenizer_config.json", tokenizer_class="Qwen2Tokenizer", added_tokens_decoder=special)

BROKEN = {  # what is wrong: (how to break a model directory, words of the message)
    "no config": (lambda path: (path / "config.json").unlink(), ""),
    "no weights": (lambda path: (path / "model.safetensors").unlink(), ""),
    "only a pickle": (lambda path: (path / "model.safetensors").rename(path / "pytorch_model.bin"), ""),
    "weights cut off": (lambda path: (path / "model.safetensors").write_bytes(b"abc"), ""),
    "a weight missing": (reweigh(lambda weight: None), "up_proj"),
    "a weight of another shape": (reweigh(lambda weight: torch.zeros(3, 3)), "up_proj"),
    "a weight that is nan": (reweigh(lambda weight: weight * float("nan")), "not finite"),
    "an encoder": (lambda path: edit(path / "config.json", model_type="vit"), ""),
    "an unknown kind": (lambda path: edit(path / "config.json", model_type="nonesuch"), "nonesuch"),
    "half a tokenizer": (lambda path: (path / "tokenizer.json").unlink(), "tokenizer"),
    "no vocabulary": (no_vocabulary, "lacks tokenizer"),
    "no tokenizer": (lambda path: [file.unlink() for file in path.glob("tokenizer*")], "tokenizer"),
    "no end of sequence": (no_end, "end tokens []"),
    "another tokenizer": (lambda path: char_tokenizer().save_pretrained(save_tiny(path, vocab_size=80)),
                          "tokenizer 102 80")}

@pytest.mark.parametrize("what", BROKEN)
def test_a_model_directory_that_is_none_is_refused_and_leaves_no_run_behind(what, capsys):
    shutil.copytree("model", "broken")
    BROKEN[what][0](Path("broken"))
    with refused(capsys, "--model", "broken", *BROKEN[what][1].split()):
        train(ppo, f"{TINY} --model broken")
    assert not Path("run").exists(), "the corrected command must not hear that --out is taken"

def test_names_that_are_nothing_bad_reward_models_and_a_taken_out_are_refused(capsys):
    """--out before anything is loaded."""
    save_judge("two", labels=2)
    save_judge("mute")
    [file.unlink() for file in Path("mute").glob("tokenizer*")]
    for flags in ("--model gone", "--model ./gone", "--model nobody/gone", "--reward_model gone",
                  "--reward_model two", "--reward_model model", "--reward_model mute"):
        with refused(capsys, *flags.split(), *["no directory"] * ("gone" in flags)):
            train(grpo, f"{TINY} {flags}")
    Path("file").write_text("mine")
    Path("taken", "my notes").mkdir(parents=True)
    for out in ("file", "file/below", "taken", "x" * 300):
        with refused(capsys, "--out", out):
            train(grpo, "--model gone", out=out)
    assert Path("file").read_text() == "mine"
    assert [path.name for path in Path("taken").iterdir()] == ["my notes"]

def test_more_tokens_than_the_model_has_positions_are_refused_and_prompts_leave_room(capsys):
    """GPT-2's learned positions end at 128 here: going beyond is an index error, on a GPU a dead context."""
    save_tiny("gpt", "gpt2", char_tokenizer())
    for tokens in (128, 127):  # room for no token of a prompt, and for one
        with refused(capsys, "--max_new_tokens"):
            train(grpo, f"{TINY} --model gpt --max_new_tokens {tokens}")
    train(grpo, f"{TINY} --model gpt --max_new_tokens 107")
    held = json.loads(Path("run/args.json").read_text(encoding="utf-8"))
    assert held["max_prompt_tokens"] == 128 - 107

def checkpoint_bytes(models):
    """16 bytes per parameter: its weight and its master in float32, and two moments."""
    return 16 * models * transformers.AutoModelForCausalLM.from_pretrained("model").num_parameters()

@pytest.mark.parametrize("script, models", [(grpo, 1), (ppo, 2)])
def test_a_disk_without_room_for_the_checkpoints_is_refused(script, models, monkeypatch, capsys):
    """A new one is written beside the old. --save_every was once changed in silence, to the end of the run:
    a kill then lost hours. Now the user chooses it."""
    saves, size = spy(monkeypatch, common, "save_checkpoint"), checkpoint_bytes(models)
    flags = f"{TINY} --steps 2"
    cases = {(size - 1, 1): "checkpoint", (size - 1, 2): "checkpoint", (2 * size - 1, 1): "--save_every 2",
             (size, 2): None, (2 * size, 1): None}
    for (free, every), words in cases.items():
        monkeypatch.setattr(shutil, "disk_usage", lambda path: types.SimpleNamespace(free=free))
        saves.clear()
        with refused(capsys, "--out", "disk", words) if words else contextlib.nullcontext():
            train(script, f"{flags} --save_every {every}", out=f"run{free}-{every}")
        assert [save.step for save in saves] == ([] if words else [1, 2] if every == 1 else [2])

def test_a_resumed_run_with_one_checkpoint_on_a_small_disk_goes_on_as_asked(monkeypatch):
    """What is free is then less by the checkpoint that is there."""
    saves, size = spy(monkeypatch, common, "save_checkpoint"), checkpoint_bytes(1)
    train(grpo, f"{TINY} --save_every 1")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: types.SimpleNamespace(free=size))
    train(grpo, "--resume --steps 3")
    assert [save.step for save in saves] == [1, 2, 3]

def test_a_model_too_large_for_the_gpu_is_refused_with_what_helps(monkeypatch, capsys):
    """Of 100 million parameters 18 bytes are held for each, with a reference 20; offloaded 6 and 8."""
    for dtype, flags, gb in (
            ("bfloat16", "0", 1.8), ("bfloat16", "0.1", 2.0), ("bfloat16", "0.1 --offload_optimizer", 0.8),
            ("float32", "0", 1.6), ("float32", "0.1", 2.0), ("float32", "0.1 --offload_optimizer", 1.2)):
        args = grpo.parse_args(f"{TINY} --device cpu --out . --dtype {dtype} --beta {flags}".split())
        policy, _ = common.load_policy(args)
        monkeypatch.setattr(policy, "num_parameters", lambda: 10 ** 8)
        args.device = "cuda"
        for memory in (gb * 1.01e9, gb * 0.99e9):
            monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *_: (0, memory))
            fits = memory > gb * 1e9
            with contextlib.nullcontext() if fits else refused(capsys, "GPU", "--offload_optimizer"):
                common.resolve_and_check(args, policy)

def test_memory_that_runs_out_is_one_line_and_a_mistake_in_the_code_shows_its_traceback(monkeypatch, capsys):
    error = torch.OutOfMemoryError("CUDA out of memory")

    def broken(*args):
        raise error
    for module, name in ((common, "check_model"), (grpo, "collect")):
        with monkeypatch.context() as patch, refused(capsys, "memory", "--micro_batch_tokens"):
            patch.setattr(module, name, broken)
            train(grpo, TINY, out=name)
    error = ZeroDivisionError("mine")
    monkeypatch.setattr(grpo, "collect", broken)
    with pytest.raises(ZeroDivisionError):
        train(grpo, TINY)

# ---- Models and defaults -------------------------------------------------------------------------

@every_main
def test_every_family_trains_and_the_checkpoint_holds_what_was_trained(script, family, spread, monkeypatch):
    look = dict(zip(["qwen2", "qwen3", "llama", "gpt2"], LOOKS))[family]
    save_tiny("tiny", family, char_tokenizer(**LOOKS[look]), tie_word_embeddings=look != "bos")
    before = transformers.AutoModelForCausalLM.from_pretrained("tiny").state_dict()
    calls = spy(monkeypatch, script, "update")
    train(script, f"{TINY} --model tiny --system_prompt Brief.")
    trained, saved = calls[0].policy.state_dict(), transformers.AutoModelForCausalLM.from_pretrained(newest())
    assert same(dict(trained), dict(saved.state_dict()))
    assert sum(not torch.equal(trained[name], before[name]) for name in before) > len(before) / 2
    assert (saved.get_input_embeddings().weight is saved.get_output_embeddings().weight) == (look != "bos")
    first, last = (transformers.AutoTokenizer.from_pretrained(path) for path in ("tiny", newest()))
    assert first.get_vocab() == last.get_vocab() and first.chat_template == last.chat_template
    assert first("Hi there")["input_ids"] == last("Hi there")["input_ids"]

@every_script
def test_a_real_model_never_gets_the_toys_defaults_and_given_flags_win(script, monkeypatch):
    """A default that is a dict has a value by size, or by --dtype (gspo's clip range)."""
    monkeypatch.setattr(common, "check_model", lambda *args: 1e9)  # slow on 1,500 tokens
    save_tiny("large", "qwen3", char_tokenizer(), hidden_size=192, intermediate_size=512, num_hidden_layers=3,
              max_position_embeddings=2048)
    for model, real in (("model", False), ("large", True)):
        args = script.parse_args(f"--model {model} --out . --device cpu".split())
        given = script.parse_args(f"--model {model} --out . --device cpu --lr 0.003 --eps_low .07".split())
        for each in (args, given):
            common.resolve_and_check(each, common.load_policy(each)[0])
        assert not any(isinstance(value, dict) for value in vars(args).values())
        assert (given.lr, given.eps_low) == (0.003, 0.07)
        assert (args.lr <= 3e-6) == (args.max_new_tokens > 256) == bool(args.system_prompt) == real
        assert script is not ppo or (args.value_lr < 1e-4) == real

def test_the_defaults_are_those_of_the_papers_and_of_the_readmes_numbers():
    for script, given in ((grpo, {"beta": 0.04, "eps_low": 0.2, "eps_high": 0.2, "lr": 5e-4, "epochs": 1}),
                          (gspo, {"beta": 0.0, "eps_low": 3e-4, "eps_high": 4e-4, "lr": 5e-4, "gamma": 1.0}),
                          (ppo, {"beta": 0.05, "eps_low": 0.2, "eps_high": 0.2, "eps_value": 0.2, "lr": 2e-4,
                                 "gamma": 1.0, "lam": 0.95, "vf_coef": 0.1, "epochs": 4, "whiten": True,
                                 "group_size": 1})):
        args = vars(settings(script))
        assert {name: args[name] for name in given} == given
        assert (args["temperature"], args["seed"], args["steps"], args["minibatches"]) == (1.0, 0, 20, 4)

def test_the_toy_gives_the_same_sums_on_any_number_of_cores():
    """With two threads a sum is another; the README's numbers are to come out on every machine."""
    torch.set_num_threads(2)
    try:
        train(grpo, TINY)
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(1)

# ---- Every flag does what it says ----------------------------------------------------------------

@every_main
def test_temperature_reaches_the_sampling_and_seed_reaches_the_samples(script, spread, monkeypatch):
    """There is but one problem, so that order cannot matter."""
    Path("one").mkdir()
    [write_jsonl(f"one/{split}.jsonl", sums(1)) for split in ("train", "test")]
    calls = spy(monkeypatch, script, "collect")
    flags = f"{TINY} --dataset one --group_size 4 --max_new_tokens 8 --steps 2 --lr 1e-9"
    for i, more in enumerate(["--temperature 1e-4", "--seed 0", "--seed 0", "--seed 1"]):
        train(script, f"{flags} {more}", out=f"run{i}")
    cold, warm, again, other = (call.result[0]["texts"] for call in calls[::2])
    assert len(set(cold)) == 1 < len(set(warm)) and warm == again and not set(warm) & set(other)
    assert warm != calls[3].result[0]["texts"], "every step draws anew"

@every_main
def test_no_two_steps_of_any_seeds_share_their_noise(spread, script, monkeypatch):
    """With seed + step, seeds 0 to 4 would share 19 of 20 streams: their spread would be that of one run."""
    real, seeds = script.collect, []

    def collect(*args):
        seeds.append(torch.initial_seed())
        return real(*args)
    monkeypatch.setattr(script, "collect", collect)
    for seed in range(3):
        train(script, f"{TINY} --steps 3 --max_new_tokens 1 --seed {seed}", out=f"run{seed}")
    assert len(set(seeds)) == len(seeds) == 9

CHANGES = {ppo: ["--gamma 0.9", "--lam 0.5", "--vf_coef 9", "--eps_value 1e-4", "--value_lr 0.1", "--whiten"],
           grpo: ["--kl wk3", "--ref_every 1"],
           gspo: ["--kl wk3", "--ref_every 1", "--token_level --gamma 0.5"]}
NOTHING = "--cuda_graphs --dtype float32 --no-tensorboard --no-offload_optimizer --device cpu:0"

@every_script
def test_every_flag_of_the_objective_changes_what_is_learned(script, spread):
    base = f"{TINY} --steps 2 --prompts 4 --minibatches 2 --epochs 2 --beta 0.1 --eval_problems 1 "
    base += "--eps_low .1 --eps_high .1 " + ("--no-whiten" if script is ppo else "--kl k3")
    shared = ["--temperature 0.5", "--eps_low 0.001", "--eps_high 0.001", "--max_grad_norm 1e-3", "--beta 1"]
    learned = {}
    for flags in ["", NOTHING, *shared, *CHANGES[script]]:
        train(script, f"{base} {flags}")
        learned[flags] = [load_file(path) for path in sorted(newest().rglob("*.safetensors"))]
        shutil.rmtree("run")
    assert [flags for flags in learned if same(learned[flags], learned[""])] == [*learned][:2]

@every_main
def test_memory_flags_change_neither_weights_nor_metrics(script, spread):
    runs = {"whole": "--no-gradient_checkpointing --micro_batch_tokens 100000",
            "cut": "--micro_batch_tokens 1", "again": "--gradient_checkpointing",
            "away": "--offload_optimizer --no-cuda_graphs"}
    base = f"{TINY} --steps 2 --prompts 4 --max_new_tokens 6 --beta 0.1 --minibatches 2 --lr 0.001"
    rows = {name: train(script, f"{base} {flags}", out=name)[-1] for name, flags in runs.items()}
    for name, row in rows.items():
        for key, weight in weights("whole").items():
            torch.testing.assert_close(weights(name)[key], weight, rtol=1e-3, atol=3e-5)
        for key in "reward completion_length truncated entropy kl clip_frac ratio_max grad_norm".split():
            assert row[key] == pytest.approx(rows["whole"][key], rel=2e-3, abs=1e-5), key
    assert rows["cut"]["padding"] == 0 < rows["whole"]["padding"]

@every_script
def test_a_run_asks_other_problems_at_every_step(script, spread, monkeypatch):
    calls = spy(monkeypatch, script, "collect")
    train(script, f"{TINY} --steps 3 --prompts 3")
    asked = [problem["question"] for call in calls for problem in call.problems]
    assert len(set(asked)) == len(asked) == 9

@every_script
def test_beta_0_holds_no_reference_and_otherwise_it_is_the_frozen_model(script, spread, monkeypatch):
    collected = spy(monkeypatch, script, "collect")
    assert "kl" not in train(script, f"{TINY} --beta 0", out="none")[-1]
    assert collected[-1].reference is None
    assert train(script, f"{TINY} --beta 0.1 --steps 2", out="one")[-1]["kl"] > 0
    policy, reference = collected[-1].policy, collected[-1].reference
    assert not {p.data_ptr() for p in policy.parameters()} & {p.data_ptr() for p in reference.parameters()}
    start = transformers.AutoModelForCausalLM.from_pretrained("model").state_dict()
    assert same(dict(reference.state_dict()), dict(start))
    assert not any(p.requires_grad for p in reference.parameters())

@pytest.mark.parametrize("script, every, expected", [
    (grpo, "--ref_every 2", [1, 0, 1, 0, 1]), (gspo, "--ref_every 3", [1, 0, 0, 1, 0]),
    (grpo, "", [1, 0, 0, 0, 0])])
def test_ref_every_m_refreshes_the_reference_after_m_steps(script, every, expected, spread, monkeypatch):
    """There, and there only, the KL of the rollout is 0."""
    real, fresh = script.collect, []

    def collect(policy, reference, *rest):
        fresh.append(same(dict(policy.state_dict()), dict(reference.state_dict())))
        return real(policy, reference, *rest)
    monkeypatch.setattr(script, "collect", collect)
    rows = train(script, f"{TINY} --beta 0.1 --steps 5 {every}")
    assert fresh == [abs(row["kl"]) < 1e-6 for row in rows[1:]] == [bool(x) for x in expected]

@every_main
def test_epochs_and_minibatches_are_optimiser_steps_and_warmup_steps_count_them(script, spread):
    """2 passes x 3 minibatches x 2 steps = 12 of 48 warm-up steps: a quarter of the learning rate."""
    flags = f"{TINY} --lr 0.001 --prompts 5"
    train(script, f"{flags} --epochs 2 --minibatches 3 --steps 2 --warmup_steps 48", out="warm")
    train(script, f"{flags} --epochs 1 --warmup_steps 0", out="hot")
    for out, lr, taken in (("warm", 0.00025, 12), ("hot", 0.001, 1)):
        state = torch.load(newest(out) / "optimizer.pt")["policy"]["adamw"]
        assert state["param_groups"][0]["lr"] == pytest.approx(lr)
        assert {int(held["step"]) for held in state["state"].values()} == {taken}

@every_main
def test_eval_every_save_every_eval_problems_and_eval_samples(script, spread, monkeypatch):
    """Evaluated before, every 2 steps and after; checkpoints of step 3 (which 5 replaces) and the last."""
    calls, saved = spy(monkeypatch, common, "evaluate"), spy(monkeypatch, common, "save_checkpoint")
    rows = train(script, f"{TINY} --steps 5 --eval_every 2 --save_every 3 --eval_problems 3 --eval_samples 4")
    assert [row["step"] for row in rows if "eval_accuracy" in row] == [0, 2, 4, 5]
    assert {len(call.problems) for call in calls} == {3} and [call.step for call in saved] == [3, 5]
    always = {"eval_accuracy", "eval_sampled_accuracy", "eval_reward", "eval_completion_length"}
    assert {key for key in rows[0] if key.startswith("eval")} == always | {"eval_pass@2", "eval_pass@4"}
    assert newest().name == "step-5" and train(script, TINY, out="one")[0].keys() == always | {"step"}

@every_script
def test_an_evaluation_is_of_the_policy_after_the_step_it_is_logged_with(script, spread, monkeypatch):
    """Resumed and whole runs would agree on "after 20 steps" for what is after 19."""
    states = {"update": [], "evaluate": []}
    for module, name in ((script, "update"), (common, "evaluate")):
        def noted(policy, *rest, name=name, real=getattr(module, name)):
            result = real(policy, *rest)
            states[name].append({key: weight.clone() for key, weight in policy.state_dict().items()})
            return result
        monkeypatch.setattr(module, name, noted)
    train(script, f"{TINY} --steps 2 --eval_every 1")
    assert len(states["evaluate"]) == 3 and same(states["evaluate"][1:], states["update"])
    assert not same(*states["evaluate"][:2])

@every_main
def test_gradient_checkpointing_computes_every_layer_twice_of_critic_and_policy(script, spread, monkeypatch):
    """The weights come out alike either way, so that it might be off, as PPO's critic's once was."""
    layer, update = transformers.models.qwen3.modeling_qwen3.Qwen3MLP, script.update
    forward = layer.forward

    def counted_update(*args):
        with monkeypatch.context() as patch:
            patch.setattr(layer, "forward", lambda self, x: seen.update([id(self)]) or forward(self, x))
            return update(*args)
    monkeypatch.setattr(script, "update", counted_update)
    counts = []
    for flag in ("--no-gradient_checkpointing", "--gradient_checkpointing"):
        seen = collections.Counter()
        train(script, f"{TINY} {flag} --epochs 1", out=f"run{flag}")
        counts.append(sorted(seen.values()))
    once, twice = counts
    assert len(once) == (2 if script is ppo else 1) and twice == [2 * count for count in once]

def test_offload_optimizer_holds_masters_and_moments_in_host_memory():
    """Not on the model's device, for which "meta", which holds nothing, stands in."""
    weight = torch.nn.Parameter(torch.ones(3))
    model = types.SimpleNamespace(device=torch.device("meta"), named_parameters=lambda: [("w", weight)])
    for offload, device in ((False, "meta"), (True, "cpu")):
        optimizer = common.Optimizer(model, 0.1, settings(grpo, offload_optimizer=offload))
        assert optimizer.masters["w"].device.type == device
    weight.grad = torch.ones(3)
    optimizer.step()
    moments = optimizer.adamw.state[optimizer.masters["w"]].values()
    assert {moment.device.type for moment in moments} == {"cpu"}
    assert (weight < 1).all()

@every_main
def test_no_cuda_graphs_records_none(script, spread, monkeypatch):
    """The message of a model that cannot be recorded recommends it. Tensors say they are on a GPU here."""
    class Recorded:
        def __init__(self, step):
            self.step = step
            made.append(self)

        def run(self, shape):
            self.step()
    monkeypatch.setattr(common, "Graph", Recorded)
    monkeypatch.setattr(torch.Tensor, "is_cuda", True, raising=False)
    for flag, recorded in (("--cuda_graphs", True), ("--no-cuda_graphs", False)):
        made = []
        train(script, f"{TINY} {flag}", out=f"run{flag}")
        assert bool(made) == recorded

# ---- What a run logs and prints ------------------------------------------------------------------

KEYS = set("step reward completion_length truncated entropy kl loss clip_frac ratio_max grad_norm "
           "grad_clipped skipped zero_variance_groups rollout_tokens_per_s "
           "update_tokens_per_s padding seconds".split())
PPO_KEYS = {"value_loss", "value_grad_norm", "value_grad_clipped", "value_skipped", "explained_variance"}

@every_main
def test_metrics_hold_their_keys_and_what_was_sampled(script, spread, monkeypatch):
    calls = spy(monkeypatch, script, "collect")
    flags = f"{TINY} --beta 0.1 --prompts 5 --group_size 3 --minibatches 2 --max_new_tokens 12 --eval_every 9"
    _, row, last = train(script, f"{flags} --steps 2")
    keys = KEYS | PPO_KEYS if script is ppo else KEYS
    assert set(row) == keys | {"ratio_noise", "sequence_ratio_noise"}, "rounding is measured once"
    assert {key for key in last if not key.startswith("eval")} == keys and "eval_accuracy" in last
    rollout, mask = calls[0].result[0], calls[0].result[0]["mask"]
    assert row["reward"] == pytest.approx(rollout["rewards"].mean().item()) and 0 <= row["padding"] < 0.5
    assert row["completion_length"] == pytest.approx(mask.sum(1).mean().item())
    assert row["truncated"] == pytest.approx(1 - rollout["finished"].float().mean().item())
    assert row["ratio_max"] > 0 and row["grad_norm"] > 0 and row["grad_clipped"] in (0, 0.5, 1)

def test_tensorboard_gets_the_same_numbers_at_the_same_steps(spread, monkeypatch, capsys):
    with monkeypatch.context() as patch, refused(capsys, "--tensorboard", "pip install tensorboard"):
        patch.setitem(sys.modules, "torch.utils.tensorboard", None)  # not installed
        train(grpo, f"{TINY} --tensorboard", out="without")
    writer = unittest.mock.Mock()  # its package need not be installed
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", types.SimpleNamespace(SummaryWriter=writer))
    train(grpo, f"{TINY} --tensorboard --steps 1")
    rows = train(grpo, "--resume --steps 2")
    assert [call.kwargs["purge_step"] for call in writer.mock_calls if call.kwargs] == [1, 2]  # later rows go
    written = {(name, step): value for name, value, step in (
        call.args for call in writer.return_value.add_scalar.mock_calls)}
    logged = {(name, row["step"]): value for row in rows for name, value in row.items() if name != "step"}
    assert written == logged

@every_script
def test_seconds_are_those_of_sampling_and_training_not_of_the_evaluation(script, spread, monkeypatch):
    """By a clock that goes on by 1e4 s in a collect, by 2e4 in an update, by 1e6 in an evaluation."""
    real_clock, added = time.perf_counter, [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: real_clock() + added[0])
    for module, name, cost in ((script, "collect", 1e4), (script, "update", 2e4), (common, "evaluate", 1e6)):
        def slow(*args, cost=cost, real=getattr(module, name)):
            added[0] += cost
            return real(*args)
        monkeypatch.setattr(module, name, slow)
    rows = train(script, f"{TINY} --steps 2 --eval_every 1")
    assert [row["seconds"] for row in rows[1:]] == pytest.approx([3e4, 3e4], abs=1000)

def printed(capsys, script, flags):
    """What a run prints, to a terminal that knows ASCII alone."""
    sys.stdout.reconfigure(encoding="ascii", errors="strict")
    train(script, flags)
    said = capsys.readouterr().out
    sys.stdout.reconfigure(encoding="utf-8")
    return said

@every_main
def test_no_line_is_wider_than_99_columns_and_ascii_terminals_survive(script, spread, capsys):
    question = f"é\nWhat\x1b[31m is {'long ' * 40}"
    write_jsonl("wide.jsonl", [{"question": f"{question}{i}", "answer": "1"} for i in range(40)])
    said = printed(capsys, script, f"{TINY} --dataset wide.jsonl")
    assert not [line for line in said.splitlines() if len(line) > 99]
    assert "\x1b" not in said and r"\x1b[31m" in said and r"\xe9" in said

def test_the_values_in_force_are_printed_first(spread, capsys):
    said = printed(capsys, ppo, f"{TINY} --beta 0.1")
    words = said[:said.index("held out")].split()
    for value in ("--lr=0.01", "--group_size=2", "--temperature=1.0", "--dtype=float32", "parameters"):
        assert value in words, value

@every_script
def test_the_completion_that_is_shown_stands_under_its_own_problem(script, spread, monkeypatch, capsys):
    """The first row of the rollout: its question is read from its ids."""
    calls, tokenizer = spy(monkeypatch, script, "collect"), char_tokenizer()
    said = printed(capsys, script, f"{TINY} --prompts 5 --group_size 2 --steps 2 --eval_every 1")
    shown = ["\n".join(line[6:] for line in block.splitlines())
             for block in re.findall(r"(?:^    \| ?.*\n)+", said, re.M)]
    assert len(shown) == 2
    for text, call in zip(shown, calls):
        rollout = call.result[0]
        prompt = int(rollout["attention"][0].sum() - rollout["mask"][0].sum())
        question = tokenizer.decode(rollout["ids"][0, :prompt]).strip()
        number = int(re.search("[0-9]+", question)[0])
        assert text.startswith(question + "\n") and rollout["texts"][0].split("\n")[0].strip() in text
        assert text.endswith(f"(reward {rollout['rewards'][0].item():g}, answer {2 * number})")

@every_main
def test_a_line_for_every_step_and_at_the_end_the_evaluations_and_where_the_model_is(script, spread, capsys):
    said = printed(capsys, script, f"{TINY} --steps 2 --eval_every 1")
    rows = [json.loads(line) for line in Path("run/metrics.jsonl").open(encoding="utf-8")]
    for row in rows[1:]:
        assert re.search(rf"^step {row['step']}/2 +reward {row['reward']:.3f} ", said, re.M)
    close = said[said.rindex("held out, after   0 steps"):]
    for row in rows:
        assert re.search(rf"after +{row['step']} steps +greedy {row['eval_accuracy']:.3f} ", close)
    assert str(newest()) in close and "run/metrics.jsonl" in close

def test_completions_that_are_cut_off_are_warned_about(spread, capsys):
    train(grpo, TINY)  # random weights hardly ever stop
    assert capsys.readouterr().out.count("warning: over half of the completions are cut off") == 1
    shutil.copytree("model", "terse")
    edit(Path("terse/generation_config.json"), eos_token_id=list(range(104)))
    row = train(grpo, f"{TINY} --model terse", out="short")[1]
    assert (row["truncated"], row["completion_length"]) == (0, 1) and "warning" not in capsys.readouterr().out

@every_main
def test_a_step_that_is_not_finite_is_skipped_whole_and_warned_about(script, spread, monkeypatch, capsys):
    real, count = script.policy_loss, itertools.count(1)

    def sometimes_nan(*args):
        loss, stats = real(*args)
        if next(count) == 3:
            loss = loss * float("nan")
            stats["loss"] = loss.detach(), 1
        return loss, stats
    monkeypatch.setattr(script, "policy_loss", sometimes_nan)
    rows = train(script, f"{TINY} --steps 4 --epochs 1")
    assert [row["skipped"] for row in rows[1:]] == [0, 0, 1, 0] and not {"loss", "grad_norm"} & rows[3].keys()
    assert capsys.readouterr().out.count("warning: the gradient was not finite") == 1
    assert all(weight.isfinite().all() for weight in weights().values())

def test_a_critics_step_that_is_not_finite_is_warned_about_too(spread, monkeypatch, capsys):
    monkeypatch.setattr(ppo, "value_loss", lambda values, *rest: (values.sum() * float("nan"), {}))
    row = train(ppo, TINY)[-1]
    assert (row["skipped"], row["value_skipped"]) == (0, 1)
    assert capsys.readouterr().out.count("warning: the gradient was not finite") == 1

@every_script
def test_help_shows_the_docstring_and_a_meaning_for_every_flag(script, capsys):
    with pytest.raises(SystemExit) as left:
        script.parse_args(["--help"])
    text = capsys.readouterr().out
    assert left.value.code == 0 and script.__doc__.strip() in text and "%(" not in text
    for line in re.findall(r"^  (--.*)$", text, re.M):
        flag = re.match(r"--[\w-]+", line)[0]
        meaning = rf"^  {flag}\b[^\n]*(  +\S+ \S+|\n {{10,}}\S+ \S+)"
        assert re.search(meaning, text, re.M), f"{line} is not explained"

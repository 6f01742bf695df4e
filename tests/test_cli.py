"""The command line: flags, bad input, models, what every option does, what a run prints and logs."""
import argparse
import collections
import io
import json
import math
import re
import shutil
import sys
import time
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import common
import gspo
import grpo
import ppo
from conftest import (ROOT, TINY, by_text, char_tokenizer, newest, refused, same, save_tiny, spy, sums, train,
                      write_jsonl)

pytestmark = pytest.mark.usefixtures("here")
QUICK = f"{TINY} --system_prompt '' --max_prompt_tokens 70 --epochs 1"
every_script = pytest.mark.parametrize("script", [ppo, grpo, gspo])
every_main = pytest.mark.parametrize("script", [ppo, grpo])  # gspo.py's is grpo.py's: test_layout.py, slow

def weights(out="run"):
    return load_file(newest(out) / "model.safetensors")

# ---- Bad input: one line, status 2 ---------------------------------------------------------------

COUNTS = ("prompts group_size steps epochs minibatches max_new_tokens max_prompt_tokens micro_batch_tokens "
          "eval_every eval_problems eval_samples save_every").split()
BAD_FLAGS = dict.fromkeys(COUNTS, "0 -1 1.5 x") | {
    "temperature": "0 -1 nan x", "lr": "0 -1 nan inf", "max_grad_norm": "0 -1 nan", "eps_high": "0 nan",
    "eps_low": "0 -0.1 nan", "beta": "-0.1 nan", "warmup_steps": "-1 0.5",
    "seed": "-1 x 1000000000001",  # a step's seed, a million times it, must fit into 64 bits
    "dtype": "float64 float16", "device": "bogus cuda:1", "nope": "3", "step": "3"}  # --step is not --steps
OWN_FLAGS = {ppo: {"gamma": "-1 1.1 nan", "lam": "1.1", "vf_coef": "-1", "eps_value": "0", "value_lr": "0"},
             grpo: {"group_size": "1", "kl": "k1", "ref_every": "0 x", "gamma": "1"},
             gspo: {"group_size": "1", "kl": "k1", "ref_every": "0", "gamma": "1.1", "lam": "1"}}

@every_script
def test_a_flag_out_of_range_or_of_another_script_is_refused(script, capsys):
    for flag, values in (BAD_FLAGS | OWN_FLAGS[script]).items():
        for value in values.split():
            with refused(capsys, f"--{flag}"):
                script.parse_args([f"--{flag}={value}"])
    script.parse_args("--warmup_steps 0 --beta 0 --eps_low 1 --eps_high 5 --lr 1e-9 --seed 0".split())
    assert not Path("runs").exists()

@every_script
def test_every_choice_of_every_flag_runs(script, spread, monkeypatch):
    """The first choice of every flag in one run, the second in another."""
    with monkeypatch.context() as patch:
        calls = spy(patch, argparse.ArgumentParser, "parse_args")
        script.parse_args([])
    choices = []
    for action in calls[0].self._actions:
        name = action.option_strings[-1]
        if action.choices and name != "--device":
            choices.append([f"{name} {choice}" for choice in action.choices])
        elif action.nargs == 0 and name not in ("--help", "--resume"):
            choices.append(action.option_strings if len(action.option_strings) > 1 else [name, ""])
    assert len(choices) == (5 if script is gspo else 4) and {len(each) for each in choices} == {2}
    for i, flags in enumerate(zip(*choices)):
        row = train(script, f"{QUICK} --beta 0.1 {' '.join(flags)}", out=f"run{i}")[-1]
        assert row["step"] == 1 and all(map(math.isfinite, row.values())) and row["grad_norm"] > 0

def edit(path, **changes):
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))

def reweigh(change):
    """Change the weights of an MLP in a model directory: `change` gives a new tensor, or None."""
    def break_it(path):
        tensors, name = load_file(path / "model.safetensors"), "model.layers.0.mlp.up_proj.weight"
        tensors[name] = change(tensors[name])
        tensors = {name: tensor for name, tensor in tensors.items() if tensor is not None}
        save_file(tensors, path / "model.safetensors", {"format": "pt"})
    return break_it

def more_words(path):
    """The tokenizer learns three, the model, which has room for two, none."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    tokenizer.add_tokens(["one", "two", "What"])
    tokenizer.save_pretrained(path)

BROKEN = {  # what is wrong: (how to break a model directory, words of the message)
    "not there": (shutil.rmtree, "loaded"),
    "no weights": (lambda path: (path / "model.safetensors").unlink(), "loaded"),
    "a weight missing": (reweigh(lambda weight: None), "lacks up_proj"),
    "a weight that is nan": (reweigh(lambda weight: weight * float("nan")), "not supported"),
    "an encoder": (lambda path: edit(path / "config.json", model_type="vit"), "loaded"),
    "no tokenizer": (lambda path: [file.unlink() for file in path.glob("tokenizer*")], "tokenizer"),
    "a token without an embedding": (more_words, "embedding")}

def test_weights_that_the_model_does_not_use_are_named(capsys):
    """They were dropped without a word: of another model than config.json says, or of an adapter."""
    shutil.copytree("model", "odd")
    tensors = load_file("odd/model.safetensors") | {"extra.weight": torch.ones(2)}
    save_file(tensors, "odd/model.safetensors", {"format": "pt"})
    Path("odd/adapter_config.json").write_text("{}")
    for name, warnings in (("model", []), ("odd", ["odd/adapter_config.json", "extra.weight"])):
        common.load_policy(grpo.parse_args(f"--device cpu --max_new_tokens 9 --model {name}".split()))
        said = capsys.readouterr().out
        assert re.findall("^warning: --model has weights that are not used: (.*)$", said, re.M) == warnings

@pytest.mark.parametrize("what", BROKEN)
def test_a_bad_model_directory_is_one_line(what, capsys):
    shutil.copytree("model", "broken")
    BROKEN[what][0](Path("broken"))
    with refused(capsys, "--model broken", *BROKEN[what][1].split()):
        train(ppo, f"{QUICK} --model broken")

def test_names_that_are_nothing_a_device_that_is_not_there_and_a_taken_out_are_refused(capsys):
    """--out before anything is loaded."""
    for flags in ("--model ./gone", "--model nobody/gone", "--device cuda"):
        if "cuda" in flags and torch.cuda.is_available():
            continue
        with refused(capsys, "--model", flags):
            train(grpo, f"{QUICK} {flags}")
    assert len(train(grpo, QUICK)) == 2, "the corrected command runs in the --out of what was refused"
    Path("file").write_text("mine")
    Path("taken", "my notes").mkdir(parents=True)
    for out in ("file", "file/below", "taken", "x" * 300):
        with refused(capsys, f"--out {out}"):
            train(grpo, "--model gone", out=out)
    assert Path("file").read_text() == "mine"
    assert {path.name for path in Path("taken").iterdir()} == {"my notes", ".lock"}

def test_more_tokens_than_the_model_has_positions_are_refused_and_prompts_leave_room(capsys):
    """GPT-2's learned positions end at 128 here: going beyond is an index error, on a GPU a dead context."""
    save_tiny("gpt", "gpt2", char_tokenizer())
    few = "has 128 positions"
    for tokens, words in ((150, few), (128, few), (127, "too long")):  # with 127 a prompt has one token
        with refused(capsys, "--max_new_tokens", words):
            train(grpo, f"{QUICK} --model gpt --max_new_tokens {tokens}")
    train(grpo, f"{QUICK} --model gpt --max_prompt_tokens 99 --max_new_tokens 107")
    held = json.loads(Path("run/args.json").read_text(encoding="utf-8"))
    assert held["max_prompt_tokens"] == 128 - 107

def test_memory_that_runs_out_is_one_line_and_a_mistake_in_the_code_shows_its_traceback(monkeypatch, capsys):
    def broken(*args):
        raise error
    error = torch.OutOfMemoryError("CUDA out of memory")
    for module, name in [(grpo, "collect"), (common, "check_model")]:
        with monkeypatch.context() as patch, refused(capsys, "memory", "--micro_batch_tokens"):
            patch.setattr(module, name, broken)
            train(grpo, QUICK, out=name)
    monkeypatch.setattr(grpo, "collect", broken)
    error = ZeroDivisionError("mine")
    with pytest.raises(ZeroDivisionError):
        train(grpo, QUICK, out="other")

# ---- Models and defaults -------------------------------------------------------------------------

@every_script
def test_the_toys_settings_hold_where_the_model_is_the_toy_and_given_flags_win(script, monkeypatch):
    monkeypatch.chdir(ROOT)
    for model in ("tests/toy", f"{ROOT}/tests/forks/../toy", ".", "a/b"):
        toy = model.endswith("toy")
        args = script.parse_args(["--model", model])
        assert (args.lr > 1e-4) == (args.max_new_tokens == 48) == (not args.system_prompt) == toy, model
        assert (args.steps == 20) == (not args.gradient_checkpointing) == (args.eval_every == 10) == toy
        assert script is not ppo or (args.value_lr == 1e-2) == toy
        flags = ["--lr", "0.003", "--steps", "7", "--gradient_checkpointing"]
        args = script.parse_args(["--model", model, *flags])
        assert (args.lr, args.steps, args.gradient_checkpointing) == (0.003, 7, True)

def test_the_defaults_are_those_of_the_papers_and_of_the_readmes_numbers():
    """The clip range and beta: test_readme.py."""
    for script, lr, epochs in ((grpo, 5e-4, 1), (gspo, 5e-4, 1), (ppo, 2e-4, 4)):
        args = script.parse_args(["--device", "cpu"])
        assert (args.lr, args.epochs, args.temperature, args.minibatches) == (lr, epochs, 1, 4)
    assert (args.eps_value, args.gamma, args.lam, args.vf_coef, args.whiten) == (0.2, 1, 0.95, 0.1, True)

def test_dtype_goes_by_the_device_and_gspos_range_by_the_dtype(monkeypatch):
    """A T4 has no bfloat16: it emulates it, several times slower than float32."""
    for flags, dtype, low in (
            ("cpu", "float32", 3e-4), ("cuda", "bfloat16", 0.01),
            ("cpu --dtype bfloat16", "bfloat16", 0.01), ("cuda --dtype float32", "float32", 3e-4),
            ("cuda --eps_low 0.007", "bfloat16", 0.007), ("T4", "float32", 3e-4),
            ("T4 --dtype bfloat16", "bfloat16", 0.01)):
        monkeypatch.setattr(torch.cuda, "is_bf16_supported",
                            lambda including_emulation=True: including_emulation or "T4" not in flags)
        args = gspo.parse_args(f"--device {flags.replace('T4', 'cuda')}".split())
        assert (args.dtype, args.eps_low) == (dtype, low), flags

@pytest.mark.parametrize("flags, tokens", [
    ("cpu --model x", 1536), ("cuda --model x", 4096), ("cpu --model x --micro_batch_tokens 99", 99),
    ("cpu", 4096)])
def test_micro_batches_go_by_the_device(flags, tokens):
    """The toy, the default model, has a setting of its own."""
    assert grpo.parse_args(f"--device {flags}".split()).micro_batch_tokens == tokens

# ---- Every flag does what it says ----------------------------------------------------------------

@every_main
def test_temperature_reaches_the_sampling_and_seed_reaches_the_samples(script, spread, monkeypatch):
    """There is but one problem, so that order cannot matter."""
    Path("one").mkdir()
    [write_jsonl(f"one/{split}.jsonl", sums(1)) for split in ("train", "test")]
    calls = spy(monkeypatch, script, "collect")
    flags = f"{QUICK} --dataset one --group_size 4 --max_new_tokens 8 --steps 2 --lr 1e-9"
    for i, more in enumerate(["--temperature 1e-4", "--seed 0", "--seed 0", "--seed 1"]):
        train(script, f"{flags} {more}", out=f"run{i}")
    cold, warm, again, other = (call.result[0]["texts"] for call in calls[::2])
    assert len(set(cold)) == 1 < len(set(warm)) and warm == again and not set(warm) & set(other)
    assert warm != calls[3].result[0]["texts"], "every step draws anew"

@every_main
def test_no_two_steps_of_any_seeds_share_noise_and_none_of_a_run_problems(script, spread, monkeypatch):
    """With seed + step, seeds 0 to 4 would share 19 of 20 streams: their spread would be that of one run."""
    real, seeds, asked = script.collect, [], []

    def collect(*args):
        seeds.append(torch.initial_seed())
        asked.extend(problem["question"] for problem in args[-3])
        return real(*args)
    monkeypatch.setattr(script, "collect", collect)
    for seed in range(3):
        train(script, f"{QUICK} --steps 3 --prompts 3 --max_new_tokens 1 --seed {seed}", out=f"run{seed}")
    assert len(set(seeds)) == len(seeds) == 9
    runs = [asked[i:i + 9] for i in (0, 9, 18)]
    assert all(len(set(run)) == 9 for run in runs) and runs[0] != runs[1] != runs[2]

SHARED = ["--temperature 0.5", "--eps_low 0.001", "--eps_high 0.001", "--beta 1"]  # and others by common.py
CHANGES = {ppo: ["--gamma .9", "--lam .5", "--vf_coef 9", "--eps_value 1e-4", "--value_lr 1", "--no-whiten"],
           grpo: ["--kl wk3", "--ref_every 1", "--max_grad_norm 1e-3", "--epochs 1", "--minibatches 1",
                  "--group_size 3", "--warmup_steps 9", "--dtype bfloat16", "--system_prompt Why"],
           gspo: ["--kl wk3", "--ref_every 1", "--token_level --gamma 0.5"]}
NOTHING = "--cuda_graphs --dtype float32 --device cpu --save_every 1 --eval_every 1"

@every_script
def test_every_flag_of_the_objective_changes_what_is_learned(script, spread):
    base = f"{QUICK} --steps 2 --prompts 4 --minibatches 2 --epochs 2 --beta 0.1 --eval_problems 1 "
    base += "--eps_low .1 --eps_high .1 " + ("--value_lr .003" if script is ppo else "--kl k3")
    learned = {}
    for flags in ["", NOTHING, *SHARED, *CHANGES[script]]:
        train(script, f"{base} {flags}")
        values = torch.load(newest() / "optimizer.pt").get("critic", {})
        learned[flags] = [weights(), values]
        shutil.rmtree("run")
    assert [flags for flags in learned if same(learned[flags], learned[""])] == [*learned][:2]

@every_main
def test_beta_0_holds_no_reference_and_otherwise_it_is_the_frozen_model(script, spread, monkeypatch):
    collected = spy(monkeypatch, script, "collect")
    assert "kl" not in train(script, f"{QUICK} --beta 0", out="none")[-1]
    assert collected[-1].reference is None
    assert train(script, f"{QUICK} --beta 0.1 --steps 2", out="one")[-1]["kl"] > 0
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
    rows = train(script, f"{QUICK} --beta 0.1 --steps 5 {every}")
    assert fresh == [abs(row["kl"]) < 1e-6 for row in rows[1:]] == [bool(x) for x in expected]

@every_main
def test_epochs_and_minibatches_are_optimiser_steps_and_warmup_steps_count_them(script, spread):
    """2 passes x 3 minibatches x 2 steps = 12 of 48 warm-up steps: a quarter of the learning rate."""
    flags = f"{QUICK} --lr 0.001 --prompts 5"
    train(script, f"{flags} --epochs 2 --minibatches 3 --steps 2 --warmup_steps 48", out="warm")
    train(script, f"{flags} --epochs 1 --warmup_steps 0", out="hot")
    for out, lr, taken in (("warm", 0.00025, 12), ("hot", 0.001, 1)):
        state = torch.load(newest(out) / "optimizer.pt")["policy"]["adamw"]
        assert state["param_groups"][0]["lr"] == pytest.approx(lr)
        assert {int(held["step"]) for held in state["state"].values()} == {taken}

@every_main
def test_eval_every_save_every_eval_problems_and_eval_samples(script, spread, monkeypatch, capsys):
    """Evaluated before, every 2 steps and after; checkpoints of step 3 (which 5 replaces) and the last."""
    calls, saved = spy(monkeypatch, common, "evaluate"), spy(monkeypatch, common, "save_checkpoint")
    flags = f"{QUICK} --steps 5 --eval_every 2 --save_every 3 --eval_problems 3 --eval_samples 4"
    rows = train(script, flags)
    shown = re.findall(r"after (\d) steps  greedy (\S+)  sampled (\S+)  reward (\S+)  length (\S+)  "
                       r"pass@2 (\S+)  pass@4 (\S+)$", capsys.readouterr().out, re.M)
    names = [f"eval_{name}" for name in (
        "accuracy", "sampled_accuracy", "reward", "completion_length", "pass@2", "pass@4")]
    expected = [[row["step"], *(row[name] for name in names)] for row in rows if names[0] in row]
    assert [list(map(float, line)) for line in shown] == [
        pytest.approx(x, abs=0.051) for x in expected * 2]  # each again at the end
    assert [row["step"] for row in rows if "eval_accuracy" in row] == [0, 2, 4, 5]
    assert {len(call.problems) for call in calls} == {3} and [call.step for call in saved] == [3, 5]
    always = {"eval_accuracy", "eval_sampled_accuracy", "eval_reward", "eval_completion_length"}
    assert {key for key in rows[0] if key.startswith("eval")} == always | {"eval_pass@2", "eval_pass@4"}
    assert newest().name == "step-5" and train(script, QUICK, out="one")[0].keys() == always | {"step"}

def test_without_gold_answers_a_run_shows_the_reward_and_no_accuracy(monkeypatch, capsys):
    """A reward from 0 to 1: were it taken for an accuracy, that would read 0.000."""
    monkeypatch.setattr(common, "rewards_of", lambda _, *given, real=common.rewards_of: real(by_text, *given))
    said = printed(capsys, grpo, f"{QUICK} --answer_column ''")
    assert re.findall(r"^held out after .*? steps  (\w+)", said, re.M) == ["reward"] * 4
    assert "greedy" not in said and "0.000 " not in said

@every_main
def test_an_evaluation_is_of_the_policy_after_the_step_it_is_logged_with(script, spread, monkeypatch):
    """Resumed and whole runs would agree on "after 20 steps" for what is after 19."""
    states = {"update": [], "evaluate": []}
    for module, name in ((script, "update"), (common, "evaluate")):
        def noted(policy, *rest, name=name, real=getattr(module, name)):
            result = real(policy, *rest)
            states[name].append({key: weight.clone() for key, weight in policy.state_dict().items()})
            return result
        monkeypatch.setattr(module, name, noted)
    train(script, f"{QUICK} --steps 2 --eval_every 1")
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
    counts, trained = [], []
    for flag in ("--no-gradient_checkpointing", "--gradient_checkpointing"):
        seen = collections.Counter()
        train(script, f"{QUICK} {flag} --epochs 1", out=f"run{flag}")
        counts.append(sorted(seen.values()))
        trained.append(torch.cat([weight.flatten() for weight in weights(f"run{flag}").values()]))
    (once, twice), (plain, again) = counts, trained
    torch.testing.assert_close(plain, again, rtol=1e-3, atol=3e-5)
    assert len(once) == (2 if script is ppo else 1) and twice == [2 * count for count in once]

# ---- What a run logs and prints ------------------------------------------------------------------

KEYS = set("step reward completion_length truncated entropy kl loss clip_frac ratio_max grad_norm skipped "
           "zero_gradient zero_variance_groups sampling_logp_difference sampling_sequence_difference "
           "seconds".split())
PPO_KEYS = {"value_loss", "value_grad_norm", "value_skipped", "value_zero_gradient", "explained_variance"}

def printed(capsys, script, flags):
    capsys.readouterr()
    train(script, flags)
    return capsys.readouterr().out

@every_main
def test_a_run_prints_its_settings_its_steps_and_evaluations(script, spread, monkeypatch, capsys):
    calls = spy(monkeypatch, script, "collect")
    said = printed(capsys, script, f"{QUICK} --steps 2 --eval_every 1")
    words = said[:said.index("held out")].split()
    assert {"lr=0.01", "group_size=2", "temperature=1.0", "dtype=float32", "parameters"} <= set(words)
    rows = [json.loads(line) for line in Path("run/metrics.jsonl").open(encoding="utf-8")]
    for row, call in zip(rows[1:], calls, strict=True):
        assert {key for key in row if key[:4] != "eval"} == KEYS | (PPO_KEYS if script is ppo else set())
        assert re.search(rf"^step {row['step']}/2 +reward {row['reward']:.3f} ", said, re.M)
        problem, (rollout, _) = call.problems[0], call.result
        shown = f"    | {problem['question']}\n    | {rollout['texts'][0].strip()}\n    | (reward "
        answer = problem["answer"].split("#### ")[1]
        assert f"{shown}{rollout['rewards'][0]:g}, answer {answer})\n" in said
    for row in rows:
        assert re.search(rf"after {row['step']} steps +greedy {row['eval_accuracy']:.3f} ", said)
    assert str(newest()) in said and "run/metrics.jsonl" in said

def test_a_line_says_what_it_means_and_fits_80_columns():
    """A clipped share of .05 is 5 %; the numbers are those of the toy's twentieth step."""
    step = {"reward": 0.5781, "completion_length": 24.31, "entropy": 0.123, "kl": 0.0123, "clip_frac": 0.05,
            "seconds": 0.3}
    line = "reward 0.578  length 24.3  entropy 0.12  kl 0.0123  clip 5.00%  0.3s"
    assert common.format_stats(step, common.Logger.STEP) == line and len(f"step 20/20  {line}") <= 80
    held_out = {"eval_accuracy": 1, "eval_sampled_accuracy": 0.975, "eval_reward": 0.9, "eval_pass@8": 0.99,
                "eval_completion_length": 24.31}
    line = "greedy 1.000  sampled 0.975  reward 0.900  length 24.3"
    assert common.format_stats(held_out, common.Logger.HELD_OUT) == f"{line}  pass@8 0.990"
    assert len(f"held out after 20 steps  {line}") <= 80

def test_the_instruction_asks_for_a_mark_that_the_reward_reads():
    """Else no completion of a real model earns anything."""
    mark = common.INSTRUCTION.split()[-1].rstrip(".")
    assert common.extract_answer(f"2 + 2 is 4.\n{mark} 4") == "4" and grpo.parse_args(
        ["--model", "x"]).system_prompt == common.INSTRUCTION

@every_script
def test_evaluations_ask_the_held_out_problems_and_no_step_does(script, spread, monkeypatch):
    """Else the curves of accuracy would be of problems that were trained on."""
    loads, evaluations = spy(monkeypatch, common, "load_problems"), spy(monkeypatch, common, "evaluate")
    steps = spy(monkeypatch, script, "collect")
    train(script, f"{QUICK} --steps 2 --eval_every 1 --prompts 9 --max_new_tokens 1 --eval_problems 6")
    questions = lambda problems: sorted(problem["question"] for problem in problems)  # noqa: E731
    held_out = questions(loads[0].result[1])
    assert len(held_out) == 6 and [questions(call.problems) for call in evaluations] == [held_out] * 3
    assert len(steps) == 2 and not any(set(questions(call.problems)) & set(held_out) for call in steps)

@every_main
def test_the_seconds_of_a_step_are_without_its_evaluation(script, monkeypatch):
    """An evaluation is made to last 30 seconds by the clock."""
    late, real = [], time.perf_counter
    monkeypatch.setattr(time, "perf_counter", lambda: real() + 30 * len(late))
    monkeypatch.setattr(common, "evaluate", lambda *_: late.append(1) or {"eval_accuracy": 0.5})
    assert 0 < train(script, f"{QUICK} --eval_every 1")[-1]["seconds"] < 30

def test_the_toy_is_computed_by_one_core_and_stdout_takes_every_character(monkeypatch):
    """The same sums on every machine. A character that stdout cannot write ended a run, and a file's lines
    came late."""
    cores, file = [], io.BytesIO()
    monkeypatch.setattr(torch, "set_num_threads", cores.append)
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(file, encoding="ascii"))
    for model, expected in (("model", []), (common.TOY, [1])):
        args = grpo.parse_args(["--model", model, "--out", f"runs/{len(expected)}"])
        common.launch(lambda args: print("\u03c0"), args)
        assert cores == expected and file.getvalue().splitlines()[-1] == b"?"

def test_completions_that_are_cut_off_are_warned_about(spread, capsys):
    assert printed(capsys, grpo, QUICK).count("warning: over half of the completions are cut off") == 1
    shutil.copytree("model", "terse")  # random weights hardly ever stop; now every token ends a completion
    edit(Path("terse/generation_config.json"), eos_token_id=list(range(104)))
    row = train(grpo, f"{QUICK} --model terse", out="short")[1]
    assert (row["truncated"], row["completion_length"]) == (0, 1) and "warning" not in capsys.readouterr().out
    logger = common.Logger(grpo.parse_args(["--device", "cpu", "--out", "short"]), 0)
    for share, times in [(0.4, 0), (0.6, 1), (1.0, 1)]:  # over half of them
        logger.log(1, {"truncated": share})
        assert capsys.readouterr().out.count("are cut off") == times

def test_a_step_without_a_finite_gradient_is_warned_about(spread, monkeypatch, capsys):
    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", lambda *_: torch.tensor(math.nan))
    assert printed(capsys, grpo, QUICK).count("warning: a gradient was not finite") == 1
    logger = common.Logger(grpo.parse_args(["--device", "cpu", "--out", "run"]), 0)
    for stats in ({"skipped": 0, "value_skipped": 0.5}, {"skipped": 0, "value_skipped": 0}):  # of the critic
        logger.log(1, stats)
        assert capsys.readouterr().out.count("was not finite") == (stats["value_skipped"] > 0)

def test_a_clip_range_below_the_rounding_of_a_ratio_is_warned_about(spread, monkeypatch, capsys):
    for i, (flags, times) in enumerate([("--eps_low 1e-7", 2), ("--eps_low 0.5", 0)]):
        train(gspo, f"{QUICK} --dtype bfloat16 --steps 2 {flags}", out=f"run{i}")
        assert capsys.readouterr().out.count("warning: rounding moves s further than --eps_low") == times
    real = common.rollout_stats
    for token, s, times in [(1.0, 1e-9, 0), (1e-9, 1.0, 1)]:  # s is a mean: rounding of tokens cancels in it
        off = {"sampling_logp_difference": token, "sampling_sequence_difference": s}
        monkeypatch.setattr(common, "rollout_stats", lambda *given: real(*given) | off)
        train(gspo, QUICK, out=f"off{times}")
        assert capsys.readouterr().out.count("rounding moves s") == times

@every_script
def test_help_shows_the_docstring_and_a_meaning_for_every_flag(script, capsys):
    with pytest.raises(SystemExit) as left:
        script.parse_args(["--help"])
    text = capsys.readouterr().out
    assert left.value.code == 0 and script.__doc__.strip() in text and "%(" not in text
    flags = re.findall(r"^  (--[\w-]+)", text, re.M)
    assert len(flags) > 30
    for flag in flags:
        meaning = rf"^  {flag}\b[^\n]*(  +\S+ \S+|\n {{10,}}\S+ \S+)"
        assert re.search(meaning, text, re.M), f"{flag} is not explained"

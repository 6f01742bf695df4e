"""The command line: flags, bad input, models, what every option does, what a run prints and logs."""
import contextlib
import itertools
import json
import re
import shlex
import shutil
import sys
import types
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import common
import gspo
import grpo
import ppo
from conftest import (LOOKS, TINY, char_tokenizer, newest, refused, same, save_judge, save_tiny, spy, sums,
                      train, write_jsonl)

pytestmark = pytest.mark.usefixtures("here")
every_script = pytest.mark.parametrize("script", [ppo, grpo, gspo])
grpo_and_gspo = pytest.mark.parametrize("script", [grpo, gspo])

def weights(out="run"):
    return load_file(newest(out) / "model.safetensors")

# ---- Bad input: one line, status 2, nothing left behind ------------------------------------------

COUNTS = ("prompts group_size steps epochs minibatches max_new_tokens max_prompt_tokens micro_batch_tokens "
          "eval_every eval_problems eval_samples save_every").split()
BAD_FLAGS = dict.fromkeys(COUNTS, "0 -1 1.5 x") | {
    "temperature": "0 nan x", "lr": "0 -1 nan", "max_grad_norm": "0 -1", "eps_high": "0 nan",
    "eps_low": "0 1.5 nan", "beta": "-0.1 nan", "warmup_steps": "-1 0.5", "seed": f"-1 {10 ** 30}",
    "dtype": "float16", "device": "bogus", "nope": "3", "step": "3"}  # --step is not --steps
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
    assert not Path("runs").exists()

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
    assert Path("file").read_text() == "mine" and [path.name for path in Path("taken").iterdir()] == ["my notes"]

def test_more_tokens_than_the_model_has_positions_are_refused_and_prompts_leave_room(capsys):
    """GPT-2's learned positions end at 128 here: going beyond is an index error, on a GPU a dead context."""
    save_tiny("gpt", "gpt2", char_tokenizer())
    for tokens, word in ((128, "--max_new_tokens"), (127, "--max_prompt_tokens")):
        with refused(capsys, word):
            train(grpo, f"{TINY} --model gpt --max_new_tokens {tokens}")
    train(grpo, f"{TINY} --model gpt --max_new_tokens 107")  # leaves 21 for the prompt

@pytest.mark.parametrize("script, models", [(grpo, 1), (ppo, 2)])
def test_a_disk_without_room_for_two_checkpoints_gets_one_and_for_none_is_refused(script, models, monkeypatch, capsys):
    """14 bytes per parameter: its weight in bfloat16, its master and two moments."""
    saves = spy(monkeypatch, common, "save_checkpoint")
    size = 14 * models * transformers.AutoModelForCausalLM.from_pretrained("model").num_parameters()
    for free, steps in ((size - 1, []), (size, [2]), (2 * size - 1, [2]), (2 * size, [1, 2])):
        monkeypatch.setattr(shutil, "disk_usage", lambda path: types.SimpleNamespace(free=free))
        saves.clear()
        with contextlib.nullcontext() if steps else refused(capsys, "--out", "checkpoint", "disk"):
            train(script, f"{TINY} --save_every 1 --steps 2", out=f"run{free}")
        assert [save.step for save in saves] == steps
        assert ("saving at the end" in capsys.readouterr().out) == (len(steps) == 1)

def test_a_model_too_large_for_the_gpu_is_refused_with_what_helps(monkeypatch, capsys):
    """Of 100 million parameters 18 bytes are held for each, with a reference 20; offloaded 6 and 8."""
    for flags, gb in (("--beta 0", 1.8), ("--beta 0.1", 2.0), ("--beta 0.1 --offload_optimizer", 0.8)):
        args = grpo.parse_args(f"{TINY} --device cpu --out . {flags}".split())
        policy, _ = common.load_policy(args)
        monkeypatch.setattr(policy, "num_parameters", lambda: 10 ** 8)
        args.device = "cuda"
        for memory in (gb * 1.01e9, gb * 0.99e9):
            monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (0, memory))
            with contextlib.nullcontext() if memory > gb * 1e9 else refused(capsys, "GPU", "--offload_optimizer"):
                common.settle(args, policy)

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

@every_script
def test_every_family_trains_and_the_checkpoint_holds_what_was_trained(script, family, spread, monkeypatch):
    look = dict(zip(["qwen2", "qwen3", "llama", "gpt2"], LOOKS))[family]
    save_tiny("tiny", family, char_tokenizer(**LOOKS[look]), tie_word_embeddings=look != "bos")
    before = transformers.AutoModelForCausalLM.from_pretrained("tiny").state_dict()
    calls = spy(monkeypatch, script, "update")
    row = train(script, f"{TINY} --model tiny --system_prompt Brief.")[-1]
    trained, saved = calls[0].policy.state_dict(), transformers.AutoModelForCausalLM.from_pretrained(newest())
    assert same(dict(trained), dict(saved.state_dict())) and row["grad_norm"] > 0
    assert sum(not torch.equal(trained[name], before[name]) for name in before) > len(before) / 2
    assert (saved.get_input_embeddings().weight is saved.get_output_embeddings().weight) == (look != "bos")
    first, last = (transformers.AutoTokenizer.from_pretrained(path) for path in ("tiny", newest()))
    assert first.get_vocab() == last.get_vocab() and first.chat_template == last.chat_template
    assert first("Hi there")["input_ids"] == last("Hi there")["input_ids"]

@every_script
def test_a_real_model_never_gets_the_toys_defaults_and_given_flags_win(script, monkeypatch):
    monkeypatch.setattr(common, "check_model", lambda *args: None)  # slow on 1,500 tokens
    save_tiny("large", "qwen3", char_tokenizer(), hidden_size=192, intermediate_size=512, num_hidden_layers=3,
              max_position_embeddings=2048)
    for model, real in (("model", False), ("large", True)):
        args = script.parse_args(f"--model {model} --out .".split())
        given = script.parse_args(f"--model {model} --out . --lr 0.003".split())
        for each in (args, given):
            common.settle(each, common.load_policy(each)[0])
        assert not any(isinstance(value, dict) for value in vars(args).values()) and given.lr == 0.003
        assert (args.lr <= 3e-6) == (args.max_new_tokens > 256) == bool(args.system_prompt) == real
        assert script is not ppo or (args.value_lr < 1e-4) == real

# ---- Every flag does what it says ----------------------------------------------------------------

@every_script
def test_temperature_reaches_the_sampling_and_seed_reaches_the_samples(script, spread, monkeypatch):
    """Near 0 a group is one greedy completion. There is but one problem, so that order cannot matter."""
    Path("one").mkdir()
    [write_jsonl(f"one/{split}.jsonl", sums(1)) for split in ("train", "test")]
    calls = spy(monkeypatch, script, "collect")
    flags = f"{TINY} --dataset one --group_size 4 --max_new_tokens 8 --steps 2 --lr 1e-9"
    for i, more in enumerate(["--temperature 1e-4", "--seed 0", "--seed 0", "--seed 1"]):
        train(script, f"{flags} {more}", out=f"run{i}")
    cold, warm, again, other = (call.result[0]["texts"] for call in calls[::2])
    assert len(set(cold)) == 1 < len(set(warm)) and warm == again and not set(warm) & set(other)
    assert warm != calls[3].result[0]["texts"], "every step draws anew"

CHANGES = {ppo: ["--gamma 0.9", "--lam 0.5", "--vf_coef 9", "--eps_value 1e-4", "--value_lr 0.1", "--whiten"],
           grpo: ["--kl wk3", "--ref_every 1"], gspo: ["--kl wk3", "--ref_every 1", "--token_level"]}

@every_script
def test_every_flag_of_the_objective_changes_what_is_learned(script, spread, monkeypatch):
    monkeypatch.setattr(common, "step_signs", lambda rollout, tokenizer: rollout["mask"] * 2 - 1)
    base = f"{TINY} --steps 2 --prompts 4 --minibatches 2 --epochs 2 --beta 0.1 --eval_problems 1 "
    base += "--eps_low .1 --eps_high .1 " + ("--no-whiten" if script is ppo else "--kl k3")
    shared = ["--temperature 0.5", "--eps_low 0.001", "--eps_high 0.001", "--max_grad_norm 1e-3", "--beta 1"]
    learned = {}
    for flags in ["", "--cuda_graphs --dtype float32 --no-tensorboard --no-offload_optimizer", *shared, *CHANGES[script]]:
        train(script, f"{base} {flags}")
        learned[flags] = [load_file(path) for path in sorted(newest().rglob("*.safetensors"))]
        shutil.rmtree("run")
    assert [flags for flags in learned if same(learned[flags], learned[""])] == [*learned][:2]

@every_script
def test_memory_flags_change_neither_weights_nor_metrics_and_dtype_the_weights(script, spread, monkeypatch):
    calls = spy(monkeypatch, script, "update")
    runs = {"whole": "--no-gradient_checkpointing --micro_batch_tokens 100000 --dtype float32",
            "cut": "--micro_batch_tokens 1", "again": "--gradient_checkpointing",
            "away": "--offload_optimizer --no-cuda_graphs"}
    base = f"{TINY} --steps 2 --prompts 4 --max_new_tokens 6 --beta 0.1 --minibatches 2 --lr 0.001"
    rows = {name: train(script, f"{base} {flags}", out=name)[-1] for name, flags in runs.items()}
    assert [call.policy.is_activation_checkpointing for call in calls[::2]] == [False, False, True, False]
    for name, row in rows.items():
        for key, weight in weights("whole").items():
            torch.testing.assert_close(weights(name)[key], weight, rtol=1e-3, atol=3e-5)
        for key in "reward completion_length truncated entropy kl clip_frac ratio_max grad_norm".split():
            assert row[key] == pytest.approx(rows["whole"][key], rel=2e-3, abs=1e-5), key
    assert rows["cut"]["padding"] == 0 < rows["whole"]["padding"]
    train(script, f"{base} --dtype bfloat16", out="half")
    for out, dtype in (("whole", torch.float32), ("half", torch.bfloat16)):
        state = torch.load(newest(out) / "optimizer.pt")["policy"]
        moments = [moment for held in state["adamw"]["state"].values() for moment in held.values()]
        assert {weight.dtype for weight in weights(out).values()} == {dtype}
        assert {held.dtype for held in [*state["masters"].values(), *moments]} == {torch.float32}

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

@grpo_and_gspo
@pytest.mark.parametrize("every, expected", [
    ("--ref_every 2", [1, 0, 1, 0, 1]), ("--ref_every 3", [1, 0, 0, 1, 0]), ("", [1, 0, 0, 0, 0])])
def test_ref_every_m_refreshes_the_reference_after_m_steps(script, every, expected, spread, monkeypatch):
    """There, and there only, the KL of the rollout is 0."""
    real, fresh = script.collect, []

    def collect(policy, reference, *rest):
        fresh.append(same(dict(policy.state_dict()), dict(reference.state_dict())))
        return real(policy, reference, *rest)
    monkeypatch.setattr(script, "collect", collect)
    rows = train(script, f"{TINY} --beta 0.1 --steps 5 {every}")
    assert fresh == [abs(row["kl"]) < 1e-6 for row in rows[1:]] == [bool(x) for x in expected]

@every_script
def test_epochs_and_minibatches_are_optimiser_steps_and_warmup_steps_count_them(script, spread):
    """2 passes x 3 minibatches x 2 steps = 12 of 48 warm-up steps: a quarter of the learning rate."""
    flags = f"{TINY} --lr 0.001 --prompts 5"
    train(script, f"{flags} --epochs 2 --minibatches 3 --steps 2 --warmup_steps 48", out="warm")
    train(script, f"{flags} --epochs 1 --warmup_steps 0", out="hot")
    for out, lr, taken in (("warm", 0.00025, 12), ("hot", 0.001, 1)):
        state = torch.load(newest(out) / "optimizer.pt")["policy"]["adamw"]
        assert state["param_groups"][0]["lr"] == pytest.approx(lr)
        assert {int(held["step"]) for held in state["state"].values()} == {taken}

@every_script
def test_eval_every_save_every_eval_problems_and_eval_samples(script, spread, monkeypatch):
    """Evaluated before, every 2 steps and after; checkpoints of step 3 (which 5 replaces) and the last."""
    calls, saved = spy(monkeypatch, common, "evaluate"), spy(monkeypatch, common, "save_checkpoint")
    rows = train(script, f"{TINY} --steps 5 --eval_every 2 --save_every 3 --eval_problems 3 --eval_samples 4")
    assert [row["step"] for row in rows if "eval_accuracy" in row] == [0, 2, 4, 5]
    assert {len(call.problems) for call in calls} == {3} and [call.step for call in saved] == [3, 5]
    always = {"eval_accuracy", "eval_sampled_accuracy", "eval_reward", "eval_completion_length"}
    assert {key for key in rows[0] if key.startswith("eval")} == always | {"eval_pass@2", "eval_pass@4"}
    assert newest().name == "step-5" and train(script, TINY, out="one")[0].keys() == always | {"step"}

# ---- What a run logs and prints ------------------------------------------------------------------

KEYS = set("step reward completion_length truncated entropy kl loss clip_frac ratio_max grad_norm "
           "grad_clipped skipped zero_variance_groups rollout_tokens_per_s "
           "update_tokens_per_s padding seconds".split())
PPO_KEYS = {"value_loss", "value_grad_norm", "value_grad_clipped", "value_skipped", "explained_variance"}

@every_script
def test_metrics_hold_their_keys_and_what_was_sampled(script, spread, monkeypatch):
    """Means are over completion tokens and all rows: compared with the rollout and the model as it was."""
    calls = spy(monkeypatch, script, "collect")
    flags = f"{TINY} --beta 0.1 --prompts 5 --group_size 3 --minibatches 2 --max_new_tokens 12 --eval_every 9"
    _, row, last = train(script, f"{flags} --steps 2")
    assert set(row) == (KEYS | PPO_KEYS if script is ppo else KEYS) and "eval_accuracy" in last
    rollout, mask = calls[0].result[0], calls[0].result[0]["mask"]
    assert row["reward"] == pytest.approx(rollout["rewards"].mean().item()) and 0 <= row["padding"] < 0.5
    assert row["completion_length"] == pytest.approx(mask.sum(1).mean().item())
    assert row["truncated"] == pytest.approx(1 - rollout["finished"].float().mean().item())
    assert row["ratio_max"] > 0 < row["grad_norm"] and row["grad_clipped"] in (0, 0.5, 1)
    model = transformers.AutoModelForCausalLM.from_pretrained("model")
    with torch.no_grad():
        logp = model(rollout["ids"]).logits.log_softmax(-1)
    surprises = [-logp[i, position - 1, rollout["ids"][i, position]]
                 for i, end in enumerate(rollout["attention"].sum(1).tolist())
                 for position in range(end - int(mask[i].sum()), end)]
    assert row["entropy"] == pytest.approx(torch.stack(surprises).mean().item(), rel=1e-4)

def test_tensorboard_gets_the_same_numbers(spread):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    rows = train(grpo, f"{TINY} --tensorboard --steps 2")
    events = EventAccumulator("run").Reload().Scalars("reward")
    assert [event.step for event in events] == [1, 2]
    assert [event.value for event in events] == pytest.approx([row["reward"] for row in rows[1:]])

@every_script
def test_no_line_is_wider_than_99_columns_and_ascii_terminals_survive(script, spread, monkeypatch, capsys):
    question = f"é\nWhat\x1b[31m is {'long ' * 40}"
    write_jsonl("wide.jsonl", [{"question": f"{question}{i}", "answer": "1"} for i in range(40)])
    calls = spy(monkeypatch, script, "collect")
    sys.stdout.reconfigure(encoding="ascii", errors="strict")
    rows = train(script, f"{TINY} --dataset wide.jsonl --steps 2 --eval_every 1 --eval_samples 1 --beta 0.1")
    said = capsys.readouterr().out
    sys.stdout.reconfigure(encoding="utf-8")
    assert max(map(len, said.splitlines())) <= 99
    assert "\x1b" not in said and r"\x1b[31m" in said and r"\xe9" in said
    words = " ".join(said.split())
    for value in ("--lr=0.01", "--group_size=2", "--temperature=1.0", "--dtype=float32", "M parameters"):
        assert value in words, "the values in force are printed"
    groups = ("--prompts", "--model", "--max_new_tokens", "--micro_batch_tokens", "--steps")
    assert all(f"\n{first}=" in said for first in groups), "a line begins with each group of --help"
    assert len(re.findall(r"^step [12]/2 +reward", said, re.M)) == 2 and "held out, after 2 steps" in said
    assert f"(reward {calls[0].result[0]['rewards'][0].item():g}, answer 1)" in said
    close = said[said.rindex("held out, after   0 steps"):]
    assert all(word in close for word in (str(newest()), "run/metrics.jsonl", "after   2 steps"))
    assert all(f"greedy {row['eval_accuracy']:.3f}" in close for row in (rows[0], rows[-1]))

def test_out_defaults_to_runs_the_scripts_name_and_the_time(spread):
    args = gspo.parse_args(shlex.split(TINY))
    common.launch(gspo.main, args)
    assert re.fullmatch(r"runs/gspo-\d{4}-\d{6}", args.out) and newest(args.out).name == "step-1"

def test_completions_that_are_cut_off_are_warned_about(spread, capsys):
    train(grpo, TINY)  # random weights hardly ever stop
    assert capsys.readouterr().out.count("warning: over half of the completions are cut off") == 1
    shutil.copytree("model", "terse")
    edit(Path("terse/generation_config.json"), eos_token_id=list(range(104)))
    row = train(grpo, f"{TINY} --model terse", out="short")[1]
    assert (row["truncated"], row["completion_length"]) == (0, 1) and "warning" not in capsys.readouterr().out

@every_script
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
    state = torch.load(newest() / "optimizer.pt")["policy"]["adamw"]["state"]
    assert {int(held["step"]) for held in state.values()} == {3}

@every_script
def test_help_shows_the_docstring_and_a_meaning_for_every_flag_and_every_choice_is_run_here(script, capsys):
    with pytest.raises(SystemExit) as left:
        script.parse_args(["--help"])
    text = capsys.readouterr().out
    tests = "".join(path.read_text() for path in Path(__file__).parent.glob("test_*.py"))
    assert left.value.code == 0 and script.__doc__.strip() in text and "%(" not in text
    for line in re.findall(r"^  (--.*)$", text, re.M):
        flags = re.findall(r"--[\w-]+", line.split("  ")[0])
        meaning = rf"^  {flags[0]}\b[^\n]*(  +\S+ \S+|\n {{10,}}\S+ \S+)"
        assert re.search(meaning, text, re.M), f"{line} is not explained"
        choices = ",".join(re.findall(r"\{(.*)\}", line))
        for word in [*flags, *filter(None, choices.split(","))]:
            assert re.search(rf"(?<![\w-]){word}(?![\w-])", tests), f"{word} is never run"

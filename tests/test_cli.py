"""The command line: what is refused, the defaults, what every flag does, what a run prints and logs."""
import inspect
import io
import json
import re
import shutil
import sys
from pathlib import Path

import pytest
import torch
import transformers
from conftest import ROOT, TINY, char_tokenizer, newest, refused, same, save_tiny, settings, spy, train
from safetensors.torch import load_file, save_file

import common
import gspo
import grpo
import ppo

pytestmark = pytest.mark.usefixtures("here")
QUICK = f"{TINY} --system_prompt '' --max_prompt_tokens 70 --epochs 1"
every_script = pytest.mark.parametrize("script", [ppo, grpo, gspo])
every_main = pytest.mark.parametrize("script", [ppo, grpo])  # gspo.py's is grpo.py's: test_layout.py, slow

def weights(out="run"):
    return load_file(newest(out) / "model.safetensors")

# ---- What is refused, and what is not ----

@every_script
def test_what_would_train_nothing_or_something_else_is_refused(script, capsys):
    """A flag is not to be abbreviated: --step is not --steps."""
    alone = [] if script is ppo else ["--group_size 1", "--kl wk3 --beta 0"]
    alone += ["--temperature 0", "--temperature nan", "--max_grad_norm 0", "--minibatches 999", "--step 3"]
    alone += ["--gamma .9"] * (script is gspo)
    for flag in alone:
        with refused(capsys, flag.split()[0]):
            script.parse_args(flag.split())

def test_an_out_that_exists_stays_as_it_was(capsys):
    with refused(capsys, "error: ", "gone"):
        train(grpo, f"{QUICK} --dataset gone.jsonl")
    for out in ("run", "data.jsonl"):
        before = sorted(Path().rglob("*"))
        with refused(capsys, f"--out {out} exists", "--resume"):
            train(grpo, QUICK, out=out)
        assert before == sorted(Path().rglob("*"))

def test_weights_that_are_not_there_are_refused(capsys):
    """transformers gives them random values and goes on."""
    tensors, one = load_file("model/model.safetensors"), "model.layers.0.mlp.up_proj.weight"
    shutil.copytree("model", "half")
    most = {key: tensors[key] for key in tensors.keys() - {one}}
    save_file(most, "half/model.safetensors", {"format": "pt"})
    with refused(capsys, "--model half", "lacks", "up_proj"):
        train(ppo, f"{QUICK} --model half")

def test_a_typo_shows_its_file_and_line(monkeypatch):
    """One in completion_states, which check_model calls first: it is not taken for an unsupported model."""
    lines, first = inspect.getsourcelines(common.completion_states)
    source = "\n" * (first - 1) + "".join(lines).replace("hidden[i", "hiden[i")
    monkeypatch.setattr(common, "completion_states", None)  # is put back after the test
    exec(compile(source, common.__file__, "exec"), vars(common))
    with pytest.raises(NameError, match="hiden") as error:
        train(grpo, QUICK)
    last = error.traceback[-1]
    assert Path(last.path).name == "common.py" and "hiden" in source.splitlines()[last.lineno]

def test_more_tokens_than_the_model_has_positions_are_refused(capsys):
    """GPT-2's learned positions end at 512 here: going beyond is an index error, on a GPU a dead context."""
    save_tiny("gpt", "gpt2", char_tokenizer())
    with refused(capsys, "--max_prompt_tokens", "--max_new_tokens", "512"):
        train(grpo, f"{QUICK} --model gpt --max_new_tokens 443")
    common.load_policy(settings(grpo, model="gpt", max_prompt_tokens=70, max_new_tokens=442))

# ---- Models and defaults ----

@every_script
def test_the_toys_settings_hold_for_a_run_without_model_and_given_flags_win(script, monkeypatch):
    """The toy is computed by one core: the same sums on every machine."""
    cores = []
    monkeypatch.setattr(torch, "set_num_threads", cores.append)
    for model in (["--model", "x"], []):
        args, toy = script.parse_args(model), not model
        own = vars(args).items() >= common.TOY_SETTINGS.items()
        assert own == (cores == [1]) == (args.lr > 1e-4) == toy
        assert script is not ppo or (args.value_lr == 1e-2) == toy
        args = script.parse_args([*model, "--lr", "0.003", "--steps", "7", "--gradient_checkpointing"])
        assert (args.lr, args.steps, args.gradient_checkpointing) == (0.003, 7, True)

def test_dtype_and_micro_batches_go_by_the_device_and_gspos_range_by_the_dtype(monkeypatch):
    """A T4 has no bfloat16: it emulates it, several times slower than float32."""
    for flags, dtype, low in (
            ("cpu", "float32", 3e-4), ("cuda", "bfloat16", 0.01),
            ("cpu --dtype bfloat16", "bfloat16", 0.01), ("cuda --dtype float32", "float32", 3e-4),
            ("cuda --eps_low 0.007", "bfloat16", 0.007), ("T4", "float32", 3e-4)):
        monkeypatch.setattr(torch.cuda, "is_bf16_supported",
                            lambda including_emulation=True: including_emulation or "T4" not in flags)
        args = gspo.parse_args(f"--device {flags.replace('T4', 'cuda')}".split())
        assert (args.dtype, args.eps_low) == (dtype, low), flags
    for there, tokens in ((True, 8192), (False, 1536)):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: there)
        assert grpo.parse_args(["--model", "x"]).micro_batch_tokens == tokens

# ---- Every flag does what it says ----

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
NOTHING = "--dtype float32 --save_every 1 --eval_every 1"

@every_script
def test_every_flag_of_the_objective_changes_what_is_learned(script, spread):
    base = f"{QUICK} --steps 2 --prompts 4 --minibatches 2 --epochs 2 --beta 0.1 --eval_problems 1 "
    base += "--eps_low .1 --eps_high .1 " + ("--value_lr .003" if script is ppo else "--kl k3")
    learned = {}
    for flags in ["", NOTHING, *SHARED, *CHANGES[script]]:
        train(script, f"{base} {flags}")
        learned[flags] = [weights(), torch.load(newest() / "optimizer.pt").get("critic", {})]
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
        state = torch.load(newest(out) / "optimizer.pt")["policy"]
        assert state["param_groups"][0]["lr"] == pytest.approx(lr)
        assert {int(held["step"]) for held in state["state"].values()} == {taken}

@every_main
def test_evaluations_are_of_held_out_problems_after_the_step_they_are_logged_with(
        script, spread, monkeypatch):
    """Before, every 2 steps and at the end; and no step asks what is held out."""
    happened, asked = [], {"collect": [], "update": [], "evaluate": [], "save_checkpoint": []}
    places = {"collect": script, "update": script, "evaluate": common, "save_checkpoint": common}
    for name, module in places.items():
        def noted(*given, name=name, real=getattr(module, name)):
            happened.append(name[0])
            asked[name].extend(given)
            return real(*given)
        monkeypatch.setattr(module, name, noted)
    flags = "--steps 5 --eval_every 2 --save_every 3 --prompts 9 --max_new_tokens 1 --eval_problems 6"
    rows = train(script, f"{QUICK} {flags}")
    names = {"eval_accuracy", "eval_sampled_accuracy", "eval_reward", "eval_completion_length"}
    assert "".join(happened) == "ecucuecuscuecues" and rows[0].keys() == names | {"step"}
    assert [row["step"] for row in rows if "eval_accuracy" in row] == [0, 2, 4, 5]
    trained, held_out = ({problem["question"] for given in asked[name] if isinstance(given, list)
                          for problem in given} for name in ("collect", "evaluate"))
    assert len(held_out) == 6 and not held_out & trained

# ---- What a run logs and prints ----

KEYS = set("step reward completion_length truncated entropy kl loss clip_frac ratio_max grad_norm skipped "
           "zero_gradient zero_variance_groups sampling_logp_difference sampling_sequence_difference "
           "seconds".split())
PPO_KEYS = {"value_loss", "value_grad_norm", "value_skipped", "value_zero_gradient", "explained_variance"}

@every_main
def test_a_run_prints_and_logs_its_steps_and_keeps_its_completions(script, spread, monkeypatch, capsys):
    calls = spy(monkeypatch, script, "collect")
    rows = train(script, f"{QUICK} --steps 2 --eval_every 1")
    said, out = capsys.readouterr().out, Path("run/completions")
    for row, call in zip(rows[1:], calls, strict=True):
        assert {key for key in row if key[:4] != "eval"} == KEYS | (PPO_KEYS if script is ppo else set())
        assert re.search(rf"^step {row['step']}/2 +reward {row['reward']:.3g} ", said, re.M)
        assert re.search(rf"after {row['step']} steps .*\baccuracy {row['eval_accuracy']:.3g}\b", said)
        kept = [json.loads(line) for line in (out / f"step-{row['step']}.jsonl").open()]
        texts, rewards = call.result[0]["texts"], call.result[0]["rewards"].tolist()
        assert [(one["completion"], one["reward"]) for one in kept] == list(zip(texts, rewards))

def test_lines_are_out_at_once_and_a_character_that_cannot_be_written_ends_no_run(monkeypatch):
    """A file's lines came late, and a \u03c0 ended a run."""
    file = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(file, encoding="ascii"))
    seen = []
    common.launch(lambda args: seen.append(print("\u03c0") or file.getvalue()), settings(grpo, out="run"))
    assert seen[0].splitlines()[-1] == b"?"

@pytest.mark.parametrize("stats, words", [
    ({"truncated": 0.6}, "cut off"), ({"truncated": 0.4}, ""), ({"skipped": 0.5}, "not finite"),
    ({"skipped": 0, "value_skipped": 0.5}, "not finite"), ({"sampling_logp_difference": 0.09}, ""),
    ({"sampling_logp_difference": 0.11}, "sampler")])
def test_what_is_wrong_without_an_error_is_warned_about(stats, words, capsys):
    """Completions cut off, a step left out, log-probs of the sampler that are not those that are trained."""
    Path("run").mkdir()
    common.log(settings(grpo, out="run"), 1, stats)
    said = capsys.readouterr().out
    assert said.count("warning: ") == bool(words) and words in said

def test_a_clip_range_below_the_rounding_of_a_ratio_is_warned_about(spread, monkeypatch, capsys):
    """s is a mean: rounding of tokens cancels in it."""
    real = common.rollout_stats
    for token, s, times in [(0.05, 1e-9, 0), (1e-9, 1.0, 1)]:
        off = {"sampling_logp_difference": token, "sampling_sequence_difference": s}
        monkeypatch.setattr(common, "rollout_stats", lambda *given: real(*given) | off)
        train(gspo, QUICK, out=f"off{times}")
        assert capsys.readouterr().out.count("rounding moves s") == times

def test_the_instruction_asks_for_a_mark_that_the_reward_reads():
    """Else no completion of a real model earns anything."""
    mark = common.INSTRUCTION.split()[-1].rstrip(".")
    assert common.extract_answer(f"2 + 2 is 4.\n{mark} 4") == "4"
    assert grpo.parse_args(["--model", "x"]).system_prompt == common.INSTRUCTION

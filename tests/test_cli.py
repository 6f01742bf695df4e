"""The command line: what is refused, the defaults, what every flag does, what a run prints and logs."""
import json
import re
import sys
import time
from pathlib import Path

import pytest
import torch
from conftest import TINY, Trainer, newest, same, save_tiny, settings, spy, train

import common
import gspo
import grpo
import ppo

pytestmark = pytest.mark.usefixtures("here")
QUICK = f"{TINY} --system_prompt '' --max_prompt_tokens 70 --epochs 1"
every_script = pytest.mark.parametrize("script", [ppo, grpo, gspo])
every_main = pytest.mark.parametrize("script", [ppo, grpo])  # gspo.py's is grpo.py's: test_layout.py, slow

# ---- What is refused ----

@every_script
def test_what_would_train_nothing_or_something_else_is_refused(script):
    """A flag is not to be abbreviated: --step is not --steps."""
    wrong = ("--temperature 0,--temperature nan,--max_grad_norm 0,--minibatches 999,--minibatches 0,--lr nan,"
             "--epochs 0,--steps -1,--seed -1,--beta -.1,--eps_low -1,--save_every 0,--eval_every 0,--step 3,"
             "--max_new_tokens 0,--resume") + ",--gamma .9" * (script is gspo)
    wrong += ",--group_size 1,--kl wk3 --beta 0,--ref_every 2 --beta 0" * (script is not ppo)
    for flags in wrong.split(","):
        with pytest.raises(SystemExit):
            print(script.parse_args(flags.split()))
    script.parse_args("--steps 0 --seed 0 --warmup_steps 0 --beta 0 --eps_low 0 --max_grad_norm inf".split())

@pytest.mark.parametrize("function, place, off", [
    ("generate", (0, 0), 0.01), ("token_logprobs", (1, 0), -0.01), ("token_logprobs", (1, -1), 0.01)])
def test_a_model_whose_log_probs_or_positions_do_not_fit_is_refused(function, place, off, monkeypatch):
    """One wrong number is seen, of the sampler or the training pass, and so are logits that the model scales.
    Beyond GPT-2's 512 learned positions is an index error, on a GPU a dead context. A good model is left in
    training mode."""
    def wrong(*given):
        result = real(*given)
        (result["sampled_logp"] if function == "generate" else result)[place] += off
        return result
    real, args = getattr(common, function), settings(grpo, model=save_tiny("gpt", "gpt2"), max_new_tokens=448)
    assert args.max_prompt_tokens == 64 and common.load_policy(args)[0].training
    args.max_new_tokens += 1
    with pytest.raises(AssertionError, match="512 positions"):
        common.load_policy(args)
    with pytest.raises(SystemExit, match="CohereForCausalLM is not supported"):
        common.load_policy(settings(grpo, model=save_tiny("cohere", "cohere", logit_scale=0.5)))
    monkeypatch.setattr(common, function, wrong)
    with pytest.raises(SystemExit, match="off by 0.01"):
        common.load_policy(settings(grpo, model="gpt"))

# ---- Models and defaults ----

REAL = {ppo: "lr 3e-6 value_lr 3e-6 beta .05 gamma 1 lam .95 eps_value .2 vf_coef .1 whiten 1 epochs 4 "
             "prompts 256 group_size 1 eps_low .2 eps_high .2",
        grpo: "lr 1e-6 beta .04 epochs 1 prompts 32 group_size 8 eps_low .2 eps_high .2",
        gspo: "lr 1e-6 beta 0 gamma 1 epochs 1 prompts 32 group_size 8 eps_low 3e-4 eps_high 4e-4"}
TOYS = {ppo: "lr 2e-4 value_lr 1e-2", grpo: "lr 5e-4", gspo: "lr 5e-4"}
BOTH = ["minibatches 4 temperature 1 max_grad_norm 1 warmup_steps 20 max_new_tokens 1024 steps 200 "
        "eval_every 20 max_prompt_tokens 512 eval_problems 512 gradient_checkpointing 1 save_every 20 seed 0",
        "max_new_tokens 48 max_prompt_tokens 64 steps 20 eval_every 10 eval_problems 2560 "
        "gradient_checkpointing 0 micro_batch_tokens 4096 save_every 10"]

@every_script
def test_the_defaults_of_papers_and_of_results(script, monkeypatch):
    """Those of the toy are REAL's, but for what it says. One core computes the toy: equal sums everywhere.
    Flags that are given win. The instruction asks for a mark that the reward reads, or no completion of a
    real model would earn anything."""
    cores, words = [], f"{REAL[script]} {BOTH[0]}".split()
    monkeypatch.setattr(torch, "set_num_threads", cores.append)
    for flags, more in ((["--model", "x"], ""), ([], f"{TOYS[script]} {BOTH[1]}")):
        words += more.split()
        expected = {name: float(value) for name, value in zip(words[::2], words[1::2])}
        args = vars(script.parse_args([*flags, "--dtype", "float32"]))
        assert {name: args[name] for name in expected} == expected and cores == [1] * (not flags)
    args = script.parse_args("--lr 0.003 --steps 7 --gradient_checkpointing".split())
    assert (args.lr, args.steps, args.gradient_checkpointing) == (0.003, 7, True)
    instruction = script.parse_args(["--model", "x"]).system_prompt
    assert common.extract_answer(f"2 + 2 is 4.\n{instruction.split()[-1].rstrip('.')} 4") == "4"

@pytest.mark.parametrize("flags, dtype, low", [
    ("cpu", "float32", 3e-4), ("cuda", "bfloat16", 0.01), ("cpu --dtype bfloat16", "bfloat16", 0.01),
    ("cuda --eps_low 0.007", "bfloat16", 0.007), ("T4", "float32", 3e-4)])
def test_dtype_goes_by_the_device_and_gspos_range_by_the_dtype(flags, dtype, low, monkeypatch):
    """A T4 has no bfloat16: it emulates it, several times slower than float32."""
    monkeypatch.setattr(torch.cuda, "is_bf16_supported",
                        lambda including_emulation=True: including_emulation or "T4" not in flags)
    args = gspo.parse_args(f"--device {flags.replace('T4', 'cuda')}".split())
    assert (args.dtype, args.eps_low) == (dtype, low)
    for there, tokens in ((True, 8192), (False, 1536)):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: there)
        assert grpo.parse_args(["--model", "x"]).micro_batch_tokens == tokens

# ---- Every flag does what it says ----

@every_main
def test_no_two_steps_of_any_seeds_share_noise_or_all_problems(script, spread, monkeypatch):
    """With seed + step, seeds 0 to 4 would share 19 of 20 streams: their spread would be that of one run."""
    def collect(*args):
        seen.append((torch.initial_seed(), str(args[-3])))
        return real(*args)
    real, seen = script.collect, []
    monkeypatch.setattr(script, "collect", collect)
    for seed in range(2):
        train(script, f"{QUICK} --steps 3 --prompts 3 --max_new_tokens 1 --seed {seed}", out=f"run{seed}")
    assert [len(set(column)) for column in zip(*seen)] == [6, 6]

CHANGES = {ppo: [{"gamma": 0.9}, {"lam": 0.5}, {"vf_coef": 9}, {"eps_value": 1e-4}, {"whiten": False}],
           grpo: [{"kl": "wk3"}, {"dtype": "bfloat16"}],
           gspo: [{"kl": "wk3"}, {"token_level": True, "gamma": 0.5}]}
SHARED = [{"temperature": 0.5}, {"eps_low": 1e-3}, {"eps_high": 1e-3}, {"beta": 1}]

@every_script
def test_every_flag_of_the_objective_changes_what_is_learned(script):
    base, learned = {"beta": 0.1, "eps_low": 0.1, "eps_high": 0.1, "minibatches": 2, "epochs": 2}, []
    for flags in [{}, {}, *SHARED, *CHANGES[script]]:
        trainer = Trainer(script, **base | flags)
        trainer.use_adam(lr=0.003)
        trainer.update()
        learned.append([dict(model.state_dict()) for model in (trainer.policy, trainer.critic)])
    assert [same(one, learned[0]) for one in learned] == [True] * 2 + [False] * (len(learned) - 2)

@pytest.mark.parametrize("script, flags, fresh", [
    (grpo, "--ref_every 2", [1, 0, 1, 0, 1]), (gspo, "--ref_every 3", [1, 0, 0, 1, 0]), (grpo, "", [1, 0, 0]),
    (ppo, "", [1, 0, 0]), (grpo, "--beta 0", []), (ppo, "--beta 0", [])])
def test_the_reference_is_the_first_model_or_that_of_an_mth_step(script, flags, fresh, spread):
    """There, and there only, the KL of the rollout is 0. With --beta 0 there is none."""
    rows = train(script, f"{QUICK} --beta 0.1 --steps {len(fresh) or 1} {flags}")
    assert [abs(row["kl"]) < 1e-6 for row in rows if "kl" in row] == list(map(bool, fresh))

@every_main
def test_epochs_and_minibatches_are_optimiser_steps_and_warmup_steps_count_them(script, spread):
    """2 passes x 3 minibatches x 2 steps = 12 of 48 warm-up steps: a quarter of the learning rate. `lr` is
    logged as the mean over a step's six: of 1 to 6, and of 7 to 12."""
    flags = "--lr 0.001 --prompts 5 --epochs 2 --minibatches 3 --steps 2 --warmup_steps 48"
    rows = train(script, f"{QUICK} {flags}")
    assert [row["lr"] for row in rows[1:]] == pytest.approx([0.001 * 3.5 / 48, 0.001 * 9.5 / 48])
    state = torch.load(newest() / "optimizer.pt")["policy"]
    assert state["param_groups"][0]["lr"] == pytest.approx(0.00025)
    assert {int(held["step"]) for held in state["state"].values()} == {12}

@every_main
def test_evaluations_are_of_held_out_problems_after_the_step_they_are_logged_with(
        script, spread, monkeypatch):
    """Before, every 2 steps and at the end; and no step asks what is held out."""
    happened, asked = [], {"c": set(), "e": set(), "u": set(), "s": set()}
    for module, name in ((script, "collect"), (script, "update"), (common, "evaluate"),
                         (common, "save_checkpoint")):
        def noted(*given, name=name, real=getattr(module, name)):
            happened.append(name[0])
            lists = [problems for problems in given if isinstance(problems, list)]
            asked[name[0]] |= {problem["question"] for problems in lists for problem in problems}
            return real(*given)
        monkeypatch.setattr(module, name, noted)
    flags = "--steps 5 --eval_every 2 --save_every 3 --prompts 9 --max_new_tokens 1 --eval_problems 6"
    rows = train(script, f"{QUICK} {flags}")
    assert "".join(happened) == "ecucuecuscuecues"
    assert [row["step"] for row in rows if "eval_accuracy" in row] == [0, 2, 4, 5]
    assert len(asked["e"]) == 6 and not asked["e"] & asked["c"]

# ---- What a run logs and prints ----

EVAL_KEYS = {"eval_accuracy", "eval_sampled_accuracy", "eval_reward", "eval_completion_length"}
KEYS = set("step reward completion_length truncated entropy kl loss clip_frac ratio_max grad_norm lr skipped "
           "zero_gradient zero_variance_groups sampling_logp_difference sampling_sequence_difference "
           "seconds".split())
PPO_KEYS = {"value_loss", "value_grad_norm", "value_lr", "value_skipped", "value_zero_gradient",
            "explained_variance"}

@every_main
def test_a_run_prints_and_logs_its_steps_and_keeps_its_completions(script, spread, monkeypatch, capsys):
    """Held-out ones as well, sampled and greedy, and of these the same question is printed each time. Lines
    are out at once; a character that the terminal does not have does not end the run. Another run does not
    write over it."""
    def completions(name):
        return [json.loads(line) for line in Path("run/completions", f"{name}.jsonl").open()]
    calls, start = spy(monkeypatch, script, "collect"), time.perf_counter()
    before, *rows = train(script, f"{QUICK} --steps 2 --eval_every 1")
    assert sys.stdout.line_buffering and sys.stdout.errors == "replace"
    seconds = [row["seconds"] for row in rows]
    assert min(seconds) > 0 and sum(seconds) < time.perf_counter() - start
    said = capsys.readouterr().out
    assert before.keys() == EVAL_KEYS | {"step"}
    for row, call in zip(rows, calls, strict=True):
        assert row.keys() == KEYS | EVAL_KEYS | (PPO_KEYS if script is ppo else set())
        line, = re.findall(rf"^step {row['step']}/2 .*", said, re.M)
        assert all(f"  {name} {row[name]:.3g}" in line for name in ("reward", "kl", "eval_accuracy"))
        kept, rollout = completions(f"step-{row['step']}"), call.result[0]
        assert [one["completion"] for one in kept] == rollout["texts"]
    for row in (before, *rows):
        sampled, greedy = (completions(f"held-out-{row['step']}{how}") for how in ("", "-greedy"))
        assert [one["question"] for one in sampled] == [one["question"] for one in greedy]
        assert [one["completion"] for one in sampled] != [one["completion"] for one in greedy]
        assert sum(one["reward"] for one in sampled) / 2 == pytest.approx(row["eval_reward"])
        assert f"    | {sampled[0]['question']}\n    | {sampled[0]['completion']}\n" in said
    assert len(set(re.findall(r"\| (What.*)", said))) == 1
    with pytest.raises(FileExistsError):
        train(script, QUICK)

@pytest.mark.parametrize("stats, rewards, words", [
    ({"truncated": 0.6}, [0, 1], "cut off"), ({"sampling_logp_difference": 0.11}, [0, 1], "sampler"),
    ({"skipped": 0.5}, [0, 1], "not finite"), ({"skipped": 0, "value_skipped": 0.5}, [0, 1], "not finite"),
    ({"truncated": 0.4, "sampling_logp_difference": 0.09, "skipped": 0, "value_skipped": 0}, [0, 1], ""),
    ({}, [1, 1, 1], "rewards of this rollout are equal")])
def test_what_is_wrong_without_an_error_is_warned_about(stats, rewards, words, monkeypatch, capsys):
    monkeypatch.setattr(common, "records_of", lambda rollout: [])
    Path("run").mkdir()
    common.log(settings(grpo, out="run"), 1, stats, {"rewards": torch.tensor(rewards)})
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

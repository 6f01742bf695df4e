"""The command line: what is refused, the defaults, what every flag does, what a run prints and logs."""
import inspect
import json
import math
import re
from pathlib import Path

import pytest
import torch
from conftest import TINY, save_tiny, settings, spy, train

import common
import gspo
import grpo
import ppo

pytestmark = pytest.mark.usefixtures("here")
QUICK = f"{TINY} --system_prompt '' --max_prompt_tokens 70 --epochs 1"
every_script = pytest.mark.parametrize("script", [ppo, grpo, gspo])
every_main = pytest.mark.parametrize("script", [ppo, grpo])  # gspo.py's main is grpo.py's

def test_gspos_main_is_grpos():
    assert inspect.getsource(gspo.main) == inspect.getsource(grpo.main)

# ---- What is refused ----

@every_script
def test_what_would_train_nothing_or_something_else_is_refused(script, capsys):
    """In one line, without a traceback. Flags cannot be abbreviated. A model needs a dataset, a minibatch a
    group, and a resumed run its own script. Most flags must be above 0, some at least 0, and all finite: a
    negative KL penalty would pay for moving away from pi_ref. --steps 0 only evaluates."""
    wrong = "--step 3,--dtype float16,--model x,--minibatches 65 --prompts 64,--epochs 1.5,--resume,--out ."
    positive = """prompts group_size epochs minibatches micro_batch_tokens max_prompt_tokens max_new_tokens lr
        temperature max_grad_norm eval_every eval_problems save_every"""
    positive += " value_lr" if script is ppo else " ref_every"
    wrong += "".join(f",--{name} 0,--{name} -1,--{name} nan,--{name} inf" for name in positive.split())
    amounts = "beta eps_low eps_high" + " eps_value vf_coef gamma lam" * (script is ppo)
    wrong += "".join(f",--{name} -0.1,--{name} nan,--{name} inf" for name in amounts.split())
    wrong += ",--group_size 1,--kl wk3 --beta 0,--ref_every 2 --beta 0" * (script is not ppo)
    for flags in wrong.split(","):
        with pytest.raises(SystemExit):
            print(script.parse_args(flags.split()))
        assert "error: " in capsys.readouterr().err.splitlines()[-1]
    assert script.parse_args(["--steps", "0", *(f"--{name}=0" for name in amounts.split())]).eps_high == 0
    for other in (ppo, grpo, gspo):
        Path("args.json").write_text(json.dumps(vars(other.parse_args([]))))
        if other is script:
            assert script.parse_args("--resume --out .".split()).out == "."
        else:
            with pytest.raises(AssertionError, match=other.__name__):
                script.parse_args("--resume --out .".split())

def test_a_model_whose_logits_or_positions_do_not_fit_is_refused(monkeypatch):
    """A router's jitter stays: in PhiMoE it is also a threshold. Only the toy runs on one thread."""
    threads = []
    monkeypatch.setattr(torch, "set_num_threads", threads.append)
    args = settings(grpo, model=save_tiny("gpt", "gpt2", attn_pdrop=0.5), max_new_tokens=448)
    policy, _ = common.load_policy(args)
    assert args.max_prompt_tokens == 64 and policy.training and policy.config.attn_pdrop == 0
    args.max_new_tokens += 1
    with pytest.raises(AssertionError, match="max_position_embeddings is 512"):
        common.load_policy(args)
    args = settings(grpo, model=save_tiny("phi", "phi3", original_max_position_embeddings=100))
    with pytest.raises(AssertionError, match="original_max_position_embeddings is 100"):
        common.load_policy(args)
    with pytest.raises(AssertionError, match="CohereForCausalLM does more"):
        common.load_policy(settings(grpo, model=save_tiny("cohere", "cohere", logit_scale=0.5)))
    mixtral = save_tiny("mixtral", "mixtral", router_jitter_noise=0.5)
    assert common.load_policy(settings(grpo, model=mixtral))[0].config.router_jitter_noise == 0.5
    assert not threads and common.load_policy(settings(grpo)) and threads == [1]

@every_main
def test_a_run_ends_if_the_sampler_is_not_the_trained_model(script, spread, monkeypatch):
    """A cache that does not fit it, for example, moves the sampler's log-probs. Nothing is trained."""
    def shifted(*given):
        token, logp = real(*given)
        return token, logp - 0.002
    real = common.draw
    monkeypatch.setattr(common, "draw", shifted)
    with pytest.raises(AssertionError, match="sampling differs"):
        train(script, f"{QUICK} --steps 9 --save_every 1")
    assert torch.load("run/state.pt")["step"] == 0
    assert len(train(script, f"{QUICK} --dtype bfloat16", out="rounded")) == 2

@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_reward_that_is_not_finite_ends_a_run(bad, monkeypatch):
    monkeypatch.setattr(common, "answer_reward", lambda problems, texts: [bad] + [0.0] * (len(texts) - 1))
    with pytest.raises(AssertionError, match="a reward is not finite"):
        train(grpo, QUICK)

@every_main
def test_a_failed_start_can_be_corrected(script, spread):
    """Until a run starts there is no --out."""
    with pytest.raises(KeyError, match="q"):
        train(script, f"{QUICK} --question_column q")
    assert len(train(script, QUICK)) == 2

# ---- Models and defaults ----

REAL = {ppo: "lr 3e-6 value_lr 3e-6 beta .05 gamma 1 lam .95 eps_value .2 vf_coef .1 whiten 1 epochs 4 "
             "prompts 256 group_size 1 eps_low .2 eps_high .2",
        grpo: "lr 1e-6 beta .04 epochs 1 prompts 32 group_size 8 eps_low .2 eps_high .2",
        gspo: "lr 1e-6 beta 0 epochs 1 prompts 32 group_size 8 eps_low 3e-4 eps_high 4e-4"}
TOYS = {ppo: "lr 2e-4 value_lr 1e-2", grpo: "lr 5e-4", gspo: "lr 5e-4"}
BOTH = ["minibatches 4 temperature 1 max_grad_norm 1 warmup_steps 20 max_new_tokens 1024 steps 200 "
        "eval_every 20 max_prompt_tokens 512 eval_problems 512 gradient_checkpointing 1 save_every 20 seed 0",
        "max_new_tokens 48 max_prompt_tokens 64 steps 20 eval_every 10 eval_problems 2560 "
        "gradient_checkpointing 0 micro_batch_tokens 4096 save_every 10"]

@every_script
def test_the_defaults_of_papers_and_of_results(script, monkeypatch):
    """The toy's are REAL, changed by TOYS. The reward reads the mark that the system prompt asks for."""
    words = f"{REAL[script]} {BOTH[0]}".split()
    for flags, more in ((["--model", "x", "--dataset", "x"], ""), ([], f"{TOYS[script]} {BOTH[1]}")):
        words += more.split()
        expected = {name: float(value) for name, value in zip(words[::2], words[1::2])}
        args = script.parse_args([*flags, "--dtype", "float32"])
        assert {name: vars(args)[name] for name in expected} == expected
    assert (args.model, args.dataset) == (common.TOY, common.TOY)
    monkeypatch.setattr("sys.argv", ["script.py", "--lr", "0.003", "--steps=7", "--gradient_checkpointing"])
    args = script.parse_args()
    assert (args.lr, args.steps, args.gradient_checkpointing, args.given[1]) == (0.003, 7, True, "0.003")
    instruction = script.parse_args(["--model", "x", "--dataset", "x"]).system_prompt
    assert common.extract_answer(f"2 + 2 is 4.\n{instruction.split()[-1].rstrip('.')} 4") == "4"

@pytest.mark.parametrize("gpu, dtype, low", [
    ("", "float32", 3e-4), ("H100", "bfloat16", 0.01), ("T4", "float32", 3e-4)])
def test_dtype_goes_by_the_machine_and_gspos_range_by_the_dtype(gpu, dtype, low, monkeypatch):
    """A T4 only emulates bfloat16, which is several times slower than its float32. All GPUs use graphs."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(gpu))
    monkeypatch.setattr(torch.cuda, "is_bf16_supported",
                        lambda including_emulation=True: including_emulation or gpu != "T4")
    args = gspo.parse_args(["--model", "x", "--dataset", "x"])
    assert (args.device, args.dtype, args.eps_low) == ("cuda" if gpu else "cpu", dtype, low)
    assert args.micro_batch_tokens == (8192 if gpu else 1536) and args.cuda_graphs == bool(gpu)

# ---- Every flag does what it says ----

@every_main
def test_no_two_steps_of_any_seeds_share_noise_or_all_problems(script, spread, monkeypatch):
    """With seed + step, neighboring seeds would share 19 of 20 streams. All evaluations of a run use one."""
    calls = spy(monkeypatch, common, "generate")
    for seed in range(2):
        flags = f"--steps 3 --prompts 3 --max_new_tokens 1 --eval_every 1 --seed {seed}"
        train(script, f"{QUICK} {flags}", out=f"run{seed}")
    steps, evaluations = ([one for one in calls if one.group_size == size] for size in (2, 1))
    assert len({one.seed for one in steps}) == len({str(one.problems) for one in steps}) == 6
    assert abs(steps[3].seed - steps[0].seed) > 100_000 and len({one.seed for one in evaluations[:4]}) == 1

@pytest.mark.parametrize("script, flags, fresh", [
    (grpo, "--ref_every 2", [1, 0, 1, 0, 1]), (gspo, "--ref_every 3", [1, 0, 0, 1, 0]), (grpo, "", [1, 0, 0]),
    (ppo, "", [1, 0, 0]), (grpo, "--beta 0", []), (ppo, "--beta 0", [])])
def test_the_reference_is_the_first_model_or_that_of_an_mth_step(script, flags, fresh, spread, monkeypatch):
    """The KL of a rollout is 0 there, and only there. It is never trained, and absent with --beta 0."""
    calls = spy(monkeypatch, script, "collect")
    rows = train(script, f"{QUICK} --beta 0.1 --steps {len(fresh) or 1} {flags}")
    assert [abs(row["kl"]) < 1e-6 for row in rows if "kl" in row] == list(map(bool, fresh))
    references = [call.reference for call in calls if call.reference]
    assert len(references) == len(fresh) and not any(reference.training for reference in references)
    assert not any(weight.requires_grad for reference in references for weight in reference.parameters())

@every_main
def test_epochs_and_minibatches_are_optimizer_steps_and_warmup_steps_count_them(script, spread):
    """2 passes x 3 minibatches x 2 steps = 12 of 48 warmup steps. `lr` is the mean over a step's six."""
    flags = "--lr 0.001 --prompts 5 --epochs 2 --minibatches 3 --steps 2 --warmup_steps 48"
    rows = train(script, f"{QUICK} {flags}")
    assert [row["lr"] for row in rows[1:]] == pytest.approx([0.001 * 3.5 / 48, 0.001 * 9.5 / 48])
    state = torch.load("run/state.pt")
    for name, lr in [("optimizer", 0.001), ("critic_optimizer", 3e-6)][:1 + (script is ppo)]:
        group = state[name]["param_groups"][0]
        assert (group["lr"], group["eps"]) == (pytest.approx(lr / 4), 1e-5 if script is ppo else 1e-8)
        assert (group["betas"], group["weight_decay"]) == ((0.9, 0.95), 0)
        assert {int(held["step"]) for held in state[name]["state"].values()} == {12}

@every_main
def test_evaluations_come_after_the_step_they_are_logged_with(script, spread, monkeypatch):
    """Before the first step, every 2 steps and at the end. Step 0 is saved, too."""
    happened = []
    for module, name in ((script, "collect"), (script, "update"), (common, "evaluate"),
                         (common, "save_checkpoint")):
        monkeypatch.setattr(module, name, lambda *given, name=name, real=getattr(module, name): (
            happened.append(name[0]) or real(*given)))
    rows = train(script, f"{QUICK} --steps 5 --eval_every 2 --save_every 3 --max_new_tokens 1")
    assert "".join(happened) == "secucuecuscuecues"
    assert [row["step"] for row in rows if "eval_accuracy" in row] == [0, 2, 4, 5]

# ---- What a run logs and prints ----

EVAL_KEYS = {"eval_accuracy", "eval_reward", "eval_completion_length"}
KEYS = set("step reward completion_length truncated entropy kl loss clip_frac grad_norm lr skipped "
           "zero_gradient zero_variance_groups sampling_logp_difference seconds".split())
PPO_KEYS = {"value_loss", "value_grad_norm", "value_lr", "value_skipped", "value_zero_gradient",
            "explained_variance"}

@every_main
def test_a_run_prints_and_logs_its_steps_and_keeps_its_completions(script, spread, monkeypatch, capsys):
    def completions(step):
        return json.loads(Path(f"run/completions/step-{step}.json").read_text())
    calls = spy(monkeypatch, script, "collect")
    before, *rows = train(script, f"{QUICK} --steps 2 --eval_every 1")
    said = capsys.readouterr().out
    assert before.keys() == EVAL_KEYS | {"step"}
    for row, call in zip(rows, calls, strict=True):
        assert row.keys() == KEYS | EVAL_KEYS | (PPO_KEYS if script is ppo else set())
        kept, rollout = completions(row["step"]), call.result[0]
        assert [one["completion"] for one in kept] == rollout["texts"]
        assert sum(one["reward"] for one in kept) / 4 == pytest.approx(row["reward"])
    asked = re.findall(r"\| (What.*)", said)
    assert len(asked) == 3 and len(set(asked)) == 1

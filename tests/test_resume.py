"""Checkpoints and --resume: bit-equal to a run that was never stopped, and nothing is lost on the way."""
import itertools
import json
import os
import resource
import shlex
import shutil
import signal
import subprocess
import sys
import time
import types
from pathlib import Path

import filelock
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import common
import gspo
import grpo
import ppo
from conftest import TINY, newest, refused, same, spy, sums, train, write_jsonl

pytestmark = pytest.mark.usefixtures("here")
every_main = pytest.mark.parametrize("script", [ppo, grpo])  # gspo.py's is grpo.py's: test_layout.py, slow
QUICK = f"{TINY} --system_prompt '' --max_prompt_tokens 40 --epochs 1"
STEADY = f"{QUICK} --prompts 3 --minibatches 2 --warmup_steps 9 --lr 0.003 --eval_every 1 --save_every 100"

def rows(out):
    return [json.loads(line) for line in Path(out, "metrics.jsonl").read_text(encoding="utf-8").splitlines()]

def files(path):
    """Every file below `path` and what it holds."""
    return {str(f.relative_to(path)): f.read_bytes() for f in sorted(Path(path).rglob("*")) if f.is_file()}

def saved_steps(out):
    return common.saved_steps(types.SimpleNamespace(out=out))

def resume(script, out, flags=""):
    """Continue a run as another process would, with other random numbers."""
    torch.manual_seed(99)
    return train(script, f"--resume {flags}", out=out)

def same_runs(one, two):
    """Two runs ended in the same weights, optimiser state and metrics; nothing half-made lies beside them."""
    a, b = newest(one), newest(two)
    assert a.name == b.name and files(a).keys() == files(b).keys() >= {"model.safetensors", "optimizer.pt"}
    assert same(load_file(a / "model.safetensors"), load_file(b / "model.safetensors"))
    assert same(torch.load(a / "optimizer.pt"), torch.load(b / "optimizer.pt"))
    timeless = [[row | {"seconds": 0} for row in rows(out)] for out in (one, two)]
    assert timeless[0] == timeless[1]

# ---- Bit-equal -----------------------------------------------------------------------------------

@pytest.mark.parametrize("script, cut, total, flags", [
    (ppo, 2, 4, "--beta 0.1 --epochs 2"), (ppo, 2, 4, "--dtype bfloat16"), (gspo, 2, 4, "--seed 5"),
    (gspo, 2, 4, "--dtype bfloat16 --token_level --beta 0.1"), (grpo, 1, 3, "--beta 0.1"),
    (grpo, 3, 5, "--beta 0.1 --ref_every 2"), (grpo, 2, 4, "--dtype bfloat16 --ref_every 3")])
def test_a_resumed_run_is_bit_equal_to_one_that_was_never_stopped(script, cut, total, flags, spread):
    """Weights, moments, schedule, reference, critic, metrics; only --steps is given anew."""
    train(script, f"{STEADY} {flags} --steps {total}", out="whole")
    train(script, f"{STEADY} {flags} --steps {cut}", out="part")
    assert newest("part").name == f"step-{cut}"
    assert [row["step"] for row in resume(script, "part", f"--steps {total}")] == list(range(total + 1))
    same_runs("whole", "part")

@pytest.mark.parametrize("script, flags, copies", [
    (grpo, "--beta 0", 0), (grpo, "--beta 0.1", 0), (grpo, "--beta 0.1 --ref_every 1", 1), (ppo, "", 1)])
def test_a_checkpoint_holds_each_weight_once_and_transformers_loads_it(script, flags, copies, spread):
    """In float32. optimizer.pt holds two moments of what is trained, and the copies: PPO's critic or a
    reference that moves."""
    train(script, f"{QUICK} --dtype bfloat16 {flags}")
    model = AutoModelForCausalLM.from_pretrained(newest())
    assert model.dtype == torch.float32 and len(list(newest().glob("*.safetensors"))) == 1
    size, held, seen = model.num_parameters(), torch.load(newest() / "optimizer.pt"), 0
    moments = [x for name in held if name in ("policy", "value")
               for weight in held[name]["adamw"]["state"].values() for x in weight.values() if x.dim()]
    others = [x for name in held.keys() - {"policy", "value"} for x in held[name].values()]
    assert {x.dtype for x in moments + others} == {torch.float32} or not others
    assert 0.9 < sum(x.numel() for x in moments) / (2 * size * (1 + (script is ppo))) < 1.1
    assert copies * 0.9 <= sum(x.numel() for x in others) / size <= copies * 1.5

# ---- Kills, a full disk, Ctrl-C ------------------------------------------------------------------

@pytest.mark.slow
def test_a_process_killed_at_random_moments_loses_at_most_save_every_steps_and_ends_bit_equal():
    """By SIGKILL, SIGTERM and SIGINT; resumed by other processes and at last by this one."""
    flags = f"{STEADY} --dtype bfloat16 --eval_every 100000 --save_every 2"
    for number in (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGKILL):
        how = "--resume" if Path("part").exists() else f"{flags} --steps 100000 --device cpu"
        child = subprocess.Popen([sys.executable, ppo.__file__, *shlex.split(f"{how} --out part")],
                                 env=os.environ | {"OMP_NUM_THREADS": "1"})
        deadline, first = time.monotonic() + 120, max([0, *saved_steps("part")])
        while max([0, *saved_steps("part")]) < first + 4:
            assert child.poll() is None and time.monotonic() < deadline, "it ended, or saves nothing"
            time.sleep(pause := os.urandom(1)[0] / 2000)
        print(f"killed {pause} s after the last look")
        child.send_signal(number)
        assert child.wait() == (130 if number == signal.SIGINT else -number)
        last = int(Path("part/metrics.jsonl").read_text().splitlines()[-1].split()[1].strip(",}"))
        assert first + 4 <= saved_steps("part")[-1] >= last - 2
    total = saved_steps("part")[-1] + 3
    assert [row["step"] for row in resume(ppo, "part", f"--steps {total}")] == [*range(total + 1)]
    train(ppo, f"{flags} --steps {total}", out="whole")
    same_runs("part", "whole")

@pytest.fixture(autouse=True)
def sigint():
    """Ctrl-C works here as in a terminal. A shell starts a job in the background so that it ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)

class Killed(BaseException):
    """Raised inside a run where a kill might come."""

@pytest.mark.parametrize("script, module, name, calls", [
    (ppo, torch, "save", 1), (grpo, torch, "save", 2), (gspo, Path, "rename", 2), (ppo, Path, "rename", 3),
    (grpo, shutil, "rmtree", 3), (ppo, shutil, "rmtree", 4)])
def test_a_kill_inside_a_save_loses_nothing(script, module, name, calls, spread, monkeypatch):
    """Before the optimiser is written, before the checkpoint has its name, before the old one is removed."""
    flags, real, count = f"{STEADY} --save_every 1 --steps 3", getattr(module, name), itertools.count(1)
    train(script, flags, out="whole")

    def killed(*args, **kwargs):
        if next(count) == calls:
            if name == "rmtree":  # halfway
                Path(args[0], "optimizer.pt").unlink(missing_ok=True)
            raise Killed
        return real(*args, **kwargs)
    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(module, name, killed)
        train(script, flags, out="part")
    for checkpoint in (f"part/step-{step}" for step in saved_steps("part")):
        whole = {"model.safetensors", "optimizer.pt", "tokenizer.json", "metrics.jsonl"}
        assert whole <= files(checkpoint).keys(), "half a checkpoint"
    resume(script, "part")
    same_runs("whole", "part")

def test_the_newest_checkpoint_goes_by_number_and_what_a_kill_leaves_does_no_harm(spread):
    """step-9 beside step-10, a half-made checkpoint, rows too many, half a last row.
    A folder of the user's own stays."""
    train(grpo, f"{STEADY} --steps 12", out="whole")
    train(grpo, f"{STEADY} --steps 9", out="part")
    shutil.copytree("part/step-9", "old")
    resume(grpo, "part", "--steps 10")
    shutil.copytree("old", "part/step-9-best")
    shutil.move("old", "part/step-9")
    Path("part/temporary").mkdir()
    Path("part/temporary/stale.safetensors").write_text("half")
    with open("part/metrics.jsonl", "a") as file:
        file.write(json.dumps(rows("part")[-1] | {"step": 11, "reward": 99}) + "\n" + '{"step": 12, "rew')
    assert saved_steps("part") == [9, 10]
    resume(grpo, "part", "--steps 12")
    shutil.rmtree("part/step-9-best")  # the user's own
    same_runs("whole", "part")

@pytest.mark.parametrize("file", ["model.safetensors", "optimizer.pt"])
def test_a_full_disk_is_one_line_and_loses_nothing(file, spread, capsys):
    """Stood in for by a limit on the size of a file: the weights, then the optimiser, cannot be written."""
    train(grpo, f"{STEADY} --steps 3", out="whole")
    train(grpo, f"{STEADY} --steps 1", out="part")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with refused(capsys, "--out part", "step 2 cannot be saved"):
        resource.setrlimit(resource.RLIMIT_FSIZE, (newest("part").joinpath(file).stat().st_size - 1, hard))
        try:
            resume(grpo, "part", "--steps 2")
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert saved_steps("part") == [1]
    resume(grpo, "part", "--steps 3")
    same_runs("whole", "part")

@every_main
@pytest.mark.parametrize("where", ["collect", "update"])
def test_ctrl_c_is_one_line_that_says_how_to_go_on(script, where, spread, monkeypatch, capsys):
    train(script, f"{STEADY} --steps 3", out="whole")
    real, count = getattr(script, where), itertools.count(1)

    def interrupted(*args):
        if next(count) == 3:
            os.kill(os.getpid(), signal.SIGINT)
        return real(*args)
    with monkeypatch.context() as patch, refused(capsys, "interrupted", "--out part --resume", status=130):
        patch.setattr(script, where, interrupted)
        train(script, f"{STEADY} --steps 3 --save_every 2", out="part")
    assert newest("part").name == "step-2" and len(rows("part")) == 3
    resume(script, "part")
    same_runs("whole", "part")

def test_ctrl_c_before_there_is_a_run_to_resume_does_not_advise_to(monkeypatch, capsys):
    """The same command then begins anew."""
    with monkeypatch.context() as patch, pytest.raises(SystemExit):
        patch.setattr(common, "load_problems", lambda *_: os.kill(os.getpid(), signal.SIGINT))
        train(grpo, QUICK)
    said = capsys.readouterr().err
    assert "interrupted" in said and "--out run" in said and "--resume" not in said
    assert len(train(grpo, QUICK)) == 2

# ---- Whose --out it is, what cannot be resumed ---------------------------------------------------

def test_a_run_is_continued_by_one_process_at_a_time(monkeypatch, capsys):
    """By another one only when the first has ended, however it ended."""
    train(grpo, QUICK)
    before, other = files("run"), subprocess.Popen(
        [sys.executable, "-c", "import filelock; lock = filelock.FileLock('run/.lock'); lock.acquire(); "
         "print(flush=True); input()"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    other.stdout.readline()
    with refused(capsys, "--out run", "another process"):
        resume(grpo, "run", "--steps 2")
    assert files("run") == before
    other.kill()
    other.wait()
    real, held = grpo.update, []

    def update(*args):
        with pytest.raises(filelock.Timeout):  # by this run, as long as it runs
            filelock.FileLock("run/.lock", timeout=0, is_singleton=False).acquire()
        held.append(True)
        return real(*args)
    monkeypatch.setattr(grpo, "update", update)
    assert len(resume(grpo, "run", "--steps 2")) == 3 and held == [True]

def test_another_script_or_no_run_is_refused_and_another_spelling_of_a_path_is_not(spread, capsys):
    train(grpo, STEADY)
    before = files("run")
    for script in (ppo, gspo):
        with refused(capsys, "--resume", "grpo.py"):
            resume(script, "run", "--steps 2")
    for flags in ("--lr 0", "--nope", "--model gone"):
        with refused(capsys, flags.split()[0]):
            resume(grpo, "run", flags)
    for name, held in (("bare", None), ("list", "[1]"), ("empty", "{}"), ("half", '{"script": "gr')):
        Path(name).mkdir()
        held is None or Path(name, "args.json").write_text(held)
    for out in ("gone", "bare", "list", "empty", "half", "data.jsonl"):
        with refused(capsys, "--resume", f"--out {out}"):
            grpo.parse_args(["--resume", "--out", out])
    assert files("run") == before
    spelt = f"--model {Path('model').absolute()} --dataset ./data.jsonl"
    assert len(resume(grpo, "run", f"--steps 2 {spelt}")) == 3

def test_a_resumed_run_has_its_own_flags_and_those_given_again_override(spread, monkeypatch):
    write_jsonl("own.jsonl", sums(40))
    train(ppo, f"{TINY} --temperature 0.7 --no-whiten --lam 0.5 --system_prompt Why --dataset own.jsonl")
    calls = spy(monkeypatch, ppo, "collect")
    resume(ppo, "run", "--steps 2 --lr 0.5 --no-gradient_checkpointing")
    args = calls[0].args
    assert (args.temperature, args.whiten, args.lam, args.system_prompt) == (0.7, False, 0.5, "Why")
    assert (args.steps, args.lr, args.gradient_checkpointing, args.dataset) == (2, 0.5, False, "own.jsonl")
    held = json.loads(Path("run/args.json").read_text())
    assert (held["steps"], held["lr"], held["lam"], held["script"]) == (2, 0.5, 0.5, "ppo.py"), "they stay"
    resume(ppo, "run")
    assert len(calls) == 1 and len(rows("run")) == 3, "there was nothing left to do"

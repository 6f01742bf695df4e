"""Checkpoints and --resume: bit-equal to a run that was never stopped, and nothing is lost on the way."""
import contextlib
import itertools
import json
import os
import resource
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
import types
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import common
import gspo
import grpo
import ppo
from conftest import TINY, char_tokenizer, newest, refused, same, spy, sums, train, write_jsonl

pytestmark = pytest.mark.usefixtures("here")
every_main = pytest.mark.parametrize("script", [ppo, grpo])  # gspo.py's is grpo.py's: test_layout.py
STEADY = f"{TINY} --prompts 3 --minibatches 2 --warmup_steps 9 --lr 0.003 --eval_every 1 --save_every 100"
CLOCK = {"seconds", "rollout_tokens_per_s", "update_tokens_per_s", "peak_memory_gb"}  # what no two runs share

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
    held = {path.relative_to(a) for path in a.rglob("*") if path.suffix in (".safetensors", ".pt")}
    assert held == {path.relative_to(b) for path in b.rglob("*") if path.suffix in (".safetensors", ".pt")}
    assert a.name == b.name and len(held) >= 2
    for name in held:
        load = torch.load if name.suffix == ".pt" else load_file
        assert same(load(a / name), load(b / name)), f"{name} differs"
    timeless = [[{k: v for k, v in row.items() if k not in CLOCK} for row in rows(out)] for out in (one, two)]
    assert timeless[0] == timeless[1]

# ---- Bit-equal -----------------------------------------------------------------------------------

@pytest.mark.parametrize("script, cut, total, flags", [
    (ppo, 1, 3, "--beta 0.1 --epochs 2"), (ppo, 2, 3, "--dtype bfloat16 --offload_optimizer"),
    (grpo, 3, 5, "--beta 0.1 --ref_every 2 --offload_optimizer"),
    (grpo, 1, 3, "--dtype bfloat16 --ref_every 2"), (gspo, 1, 2, "--dtype bfloat16 --token_level"),
    (gspo, 2, 3, "--beta 0.1 --seed 5 --epochs 2")])
def test_a_resumed_run_is_bit_equal_to_one_that_was_never_stopped(script, cut, total, flags, spread):
    """Weights, masters, moments, schedule, reference, value model, metrics; only --steps is given anew."""
    train(script, f"{STEADY} {flags} --steps {total}", out="whole")
    train(script, f"{STEADY} {flags} --steps {cut}", out="part")
    assert newest("part").name == f"step-{cut}"
    assert [row["step"] for row in resume(script, "part", f"--steps {total}")] == list(range(total + 1))
    same_runs("whole", "part")

def test_a_process_killed_at_a_random_moment_is_resumed_bit_equal():
    """By SIGKILL, while it saves after every step; resumed in this process."""
    flags = f"{STEADY} --dtype bfloat16 --reward_model judge --eval_every 100000 --save_every 1"
    command = shlex.split(f"{flags} --steps 100000 --device cpu --out part")
    child = subprocess.Popen([sys.executable, ppo.__file__, *command],
                             env=os.environ | {"OMP_NUM_THREADS": "1"})
    deadline, last = time.monotonic() + 120, 0
    while last < 3:
        assert child.poll() is None and time.monotonic() < deadline, "it ended by itself, or saves nothing"
        time.sleep(pause := os.urandom(1)[0] / 5000)
        last = max([0, *saved_steps("part")])
    print(f"killed {pause} s after the last look")
    child.kill()
    child.wait()
    total = saved_steps("part")[-1] + 3
    assert [row["step"] for row in resume(ppo, "part", f"--steps {total}")] == [*range(total + 1)]
    train(ppo, f"{flags} --steps {total}", out="whole")
    same_runs("part", "whole")

# ---- Kills, a full disk, Ctrl-C ------------------------------------------------------------------

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
        whole = {"model.safetensors", "optimizer.pt", "tokenizer.json"}
        assert whole <= files(checkpoint).keys(), "half a checkpoint"
    resume(script, "part")
    same_runs("whole", "part")

def test_the_newest_checkpoint_goes_by_number_and_what_a_kill_leaves_does_no_harm(spread, monkeypatch):
    """step-9 beside step-10, a half-made checkpoint, rows too many, half a last row. args.json holds
    all it held until it is replaced."""
    train(grpo, f"{STEADY} --steps 12", out="whole")
    train(grpo, f"{STEADY} --steps 9", out="part")
    shutil.copytree("part/step-9", "old")
    resume(grpo, "part", "--steps 10")
    shutil.move("old", "part/step-9")
    Path("part/.unfinished").mkdir()
    Path("part/.unfinished/value.safetensors").write_text("half")
    with open("part/metrics.jsonl", "a") as file:
        file.write(json.dumps(rows("part")[-1] | {"step": 11, "reward": 99}) + "\n" + '{"step": 12, "rew')
    assert saved_steps("part") == [9, 10]
    before, real, replaced = files("part"), os.replace, []

    def watched(source, target, **settings):
        assert Path(target).read_bytes() == before[Path(target).name]
        replaced.append(Path(target).name)
        return real(source, target, **settings)
    monkeypatch.setattr(os, "replace", watched)
    resume(grpo, "part", "--steps 12")
    assert "args.json" in replaced
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
    assert newest("part").name == "step-1" and not Path("part/.unfinished").exists()
    resume(grpo, "part", "--steps 3")
    same_runs("whole", "part")

def interrupt(patch, number, module, name, call, times=1):
    """Send this process the signal when module.name is called for the `call`-th time."""
    real, count = getattr(module, name), itertools.count(1)

    def interrupted(*args, **kwargs):
        for _ in range(times * (next(count) == call)):
            os.kill(os.getpid(), number)
        return real(*args, **kwargs)
    patch.setattr(module, name, interrupted)

@every_main
@pytest.mark.parametrize("where, number, status", [
    ("collect", signal.SIGINT, 130), ("update", signal.SIGTERM, 143), ("sync", signal.SIGTERM, 143)])
def test_a_signal_finishes_and_saves_the_step_and_leaves_with_its_status(
        script, where, number, status, spread, monkeypatch, capsys):
    """Ctrl-C, or SIGTERM, which Slurm and Kubernetes send before they kill: in step 2, or as it is saved."""
    train(script, f"{STEADY} --steps 3", out="whole")
    with monkeypatch.context() as patch, pytest.raises(SystemExit) as left:
        interrupt(patch, number, *((os, "sync", 1) if where == "sync" else (script, where, 2)))
        train(script, f"{STEADY} --steps 3 --save_every {2 if where == 'sync' else 100}", out="part")
    assert left.value.code == status and newest("part").name == "step-2" and len(rows("part")) == 3
    assert "--out part --resume" in capsys.readouterr().out
    resume(script, "part")
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL, "the run is over, its handler too"
    same_runs("whole", "part")

def test_ctrl_c_before_the_first_step_or_a_second_one_leaves_at_once(spread, monkeypatch, capsys):
    with monkeypatch.context() as patch, refused(capsys, "interrupted", status=130):
        interrupt(patch, signal.SIGINT, common, "rewards_of", 1)
        train(grpo, STEADY)
    assert len(resume(grpo, "run")) == 2
    before = files(newest())
    for first in (signal.SIGINT, signal.SIGTERM):
        with monkeypatch.context() as patch, pytest.raises(SystemExit) as left:
            interrupt(patch, signal.SIGINT, grpo, "update", 1)
            interrupt(patch, first, grpo, "collect", 1)
            resume(grpo, "run", "--steps 3")
        assert left.value.code == 130 and files(newest()) == before
        assert "Traceback" not in capsys.readouterr().err

def test_a_checkpoint_is_on_the_disk_before_it_has_its_name_and_the_old_one_goes(spread, monkeypatch):
    """A loss of power keeps what was synced: without that a rename and a removal may come before the data."""
    told, sync, rename, rmtree = [], os.sync, Path.rename, shutil.rmtree

    def note_sync():
        told.append(("synced", files("run/.unfinished")))
        sync()

    def note_rename(path, target):
        told.append(("renamed", Path(target).name))
        return rename(path, target)

    def note_rmtree(path, *args, **settings):
        told.append(("removed", Path(path).name))
        return rmtree(path, *args, **settings)
    train(ppo, f"{STEADY} --steps 1")
    for holder, name, noted in ((os, "sync", note_sync), (Path, "rename", note_rename),
                                (shutil, "rmtree", note_rmtree)):
        monkeypatch.setattr(holder, name, noted)
    resume(ppo, "run", "--steps 2")
    order = [what for what, _ in told]
    assert order[:4] == ["removed", "synced", "renamed", "renamed"], "of them the first is what a kill left"
    assert told[1][1] == files("run/step-2") and told[2][1] == "step-2"

# ---- What is the user's, whose --out it is, what cannot be resumed -------------------------------

def test_nothing_of_the_users_is_removed(spread):
    """Copies of checkpoints by names of their own, a later number among them, and files."""
    train(grpo, f"{STEADY} --save_every 1 --steps 2")
    mine = ["step-best", "step-1-good", "step-01", "step-x", "notes"]
    [shutil.copytree("run/step-2", f"run/{name}") for name in mine]
    Path("run/step-1").write_text("a file")
    before = {name: files(f"run/{name}") for name in mine}
    resume(grpo, "run", "--steps 4")
    assert {name: files(f"run/{name}") for name in mine} == before
    assert Path("run/step-1").read_text() == "a file"
    assert saved_steps("run") == [4] and not Path("run/step-2").exists()
    args = grpo.parse_args("--resume --out run".split())
    shutil.copytree("run/step-4", "run/step-1000")
    common.save_checkpoint(args, 5, char_tokenizer(), {}, None)
    assert {"step-5", "step-1000"} <= {path.name for path in Path("run").iterdir()}

def test_of_runs_started_in_the_same_second_each_has_its_own_out_or_is_refused(capsys, monkeypatch):
    """`for s in 1 2 3; do python grpo.py --seed $s & done` lost all runs but one, by a name nobody gave."""
    monkeypatch.setattr(time, "strftime", lambda form: form.split("%")[0] + "0101-000000")

    threads_as_processes = types.SimpleNamespace(**vars(os) | {"getpid": threading.get_ident})
    monkeypatch.setattr(common, "os", threads_as_processes)

    def starting(flags):
        barrier, found = threading.Barrier(8), []

        def main(args):
            found.append(args.out)
            time.sleep(0.5)
            Path(args.out, "mine").touch()  # so that one who comes later finds it taken

        def start():
            args = grpo.parse_args(shlex.split(flags))
            barrier.wait()
            with contextlib.suppress(SystemExit):
                common.launch(main, args)
        threads = [threading.Thread(target=start) for _ in range(8)]
        [thread.start() for thread in threads]
        [thread.join() for thread in threads]
        return found
    assert starting("--out mine") == ["mine"] and capsys.readouterr().err.count("\n") == 7
    found = starting("")
    assert len(set(found)) == len(found) == 8 and not capsys.readouterr().err
    assert all(out.startswith("runs/grpo-0101-000000") for out in found)

def test_a_run_is_continued_by_one_process_at_a_time(capsys):
    """By another one only when the first has ended, however it ended."""
    train(grpo, TINY)
    before, other = files("run"), subprocess.Popen(
        [sys.executable, "-c", "import filelock; lock = filelock.FileLock('run/.lock'); lock.acquire(); "
         "print(flush=True); input()"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    other.stdout.readline()
    with refused(capsys, "--out run", "another process"):
        resume(grpo, "run", "--steps 2")
    assert files("run") == before
    other.kill()
    other.wait()
    assert len(resume(grpo, "run", "--steps 2")) == 3

@every_main
def test_a_checkpoint_that_is_not_whole_or_of_another_run_is_one_clear_line(script, spread, capsys):
    train(script, f"{STEADY} --beta 0.1")
    state, whole = torch.load(newest() / "optimizer.pt"), files(newest())
    name, _ = max(state["policy"]["masters"].items())
    fewer = {other: kept for other, kept in state["policy"]["masters"].items() if other != name}
    wrong = {"another script's": {"critic": state["policy"]}, "a list": [1, 2], "empty": b"", "gone": None,
             "text": b"hello", "cut off": whole["optimizer.pt"][:-200],
             "other layers": state | {"policy": state["policy"] | {"masters": fewer}}}
    path = newest() / "optimizer.pt"
    for what, content in wrong.items():
        path.unlink(missing_ok=True)
        if isinstance(content, bytes):
            path.write_bytes(content)
        elif content is not None:
            torch.save(content, path)
        before = files("run")
        with refused(capsys, "--resume", "optimizer.pt", name if what == "other layers" else ""):
            resume(script, "run", "--steps 2")
        assert files("run") == before, what
    path.write_bytes(whole["optimizer.pt"])
    assert len(resume(script, "run", "--steps 2")) == 3

def test_a_checkpoint_with_a_byte_changed_on_the_disk_is_refused(spread, capsys):
    """One flipped byte resumed in silence and took accuracy from one half to 0: torch.load looks at no
    checksum, but the file has one per record."""
    train(grpo, f"{STEADY} --dtype bfloat16")
    path = newest() / "optimizer.pt"
    whole, master = path.read_bytes(), max(torch.load(path)["policy"]["masters"].values(), key=torch.numel)
    inside = whole.index(master.numpy().tobytes()[:64])
    before = files("run")
    for place in (inside, inside + 1000, len(whole) // 2):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 0x40]) + whole[place + 1:])
        with refused(capsys, "--resume", "optimizer.pt"):
            resume(grpo, "run", "--steps 2")
    path.write_bytes(whole)
    assert files("run") == before and len(resume(grpo, "run", "--steps 2")) == 3

def test_damaged_metrics_of_a_checkpoint_are_one_line_before_any_training(spread, capsys, monkeypatch):
    """They were a traceback after it."""
    train(grpo, f"{STEADY} --steps 2")
    path = newest() / "metrics.jsonl"
    whole, calls = path.read_bytes(), spy(monkeypatch, grpo, "collect")
    for damaged in (whole[:-20], whole[:40] + b"\xff\x00" + whole[42:], b"[1, 2]\n", b"3\n", b"\n" + whole):
        path.write_bytes(damaged)
        with refused(capsys, "--resume", "metrics.jsonl"):
            resume(grpo, "run", "--steps 3")
    path.unlink()
    with refused(capsys, "--resume", "metrics.jsonl"):
        resume(grpo, "run", "--steps 3")
    path.write_bytes(whole)
    assert not calls and len(resume(grpo, "run", "--steps 3")) == 4

@pytest.mark.parametrize("content", [
    "[1, 2]", "3", "null", "", "{", "{}", '{"script": "grpo.py"}', b"\xff\xfe", None])
def test_args_json_of_another_shape_is_one_line(content, capsys):
    Path("run").mkdir()
    if content is not None:
        Path("run/args.json").write_bytes(content if isinstance(content, bytes) else content.encode())
    with refused(capsys, "--resume", "--out run"):
        grpo.parse_args("--resume --out run".split())

def test_another_data_set_under_the_same_name_is_warned_about(spread, capsys):
    """Rows more, fewer or changed: the table at the end would compare two data sets."""
    write_jsonl("own.jsonl", sums(60))
    train(grpo, f"{STEADY} --dataset own.jsonl")
    changed = sums(60)
    for row in changed:
        row["answer"] = "#### 7"
    for steps, (now, warned) in enumerate([(sums(60), 0), (sums(80), 1), (sums(80), 0), (changed, 1)], 2):
        write_jsonl("own.jsonl", now)
        capsys.readouterr()
        resume(grpo, "run", f"--steps {steps}")
        said = [line for line in capsys.readouterr().out.splitlines() if "has changed" in line]
        assert len(said) == warned, steps
        assert all(line.startswith("warning") and "--dataset own.jsonl" in line for line in said)

def test_damaged_or_lost_metrics_come_back_from_the_checkpoint(spread):
    train(grpo, f"{STEADY} --steps 5")
    before = Path("run/metrics.jsonl").read_bytes()
    Path("run/metrics.jsonl").write_bytes(before[:200] + b"\xff\xfe\x00" + before[300:])
    assert [row["step"] for row in resume(grpo, "run", "--steps 6")] == [0, 1, 2, 3, 4, 5, 6]
    assert Path("run/metrics.jsonl").read_bytes().startswith(before)
    Path("run/metrics.jsonl").unlink()
    assert [row["step"] for row in resume(grpo, "run", "--steps 7")] == [0, 1, 2, 3, 4, 5, 6, 7]

def test_another_script_model_data_set_or_reward_is_refused_and_harms_nothing(spread, capsys):
    train(grpo, STEADY)
    before = files("run")
    for script in (ppo, gspo):
        with refused(capsys, "--resume", "grpo.py"):
            resume(script, "run", "--steps 2")
    for flags in ("--model judge", "--dataset other.jsonl", "--reward_model judge", "--lr 0", "--nope"):
        with refused(capsys, flags.split()[0].strip("-")):
            resume(grpo, "run", flags)
    Path("bare").mkdir()
    for out in ("gone", "bare", "data.jsonl"):
        with refused(capsys, "--resume", f"--out {out}"):
            grpo.parse_args(["--resume", "--out", out])
    assert files("run") == before and len(resume(grpo, "run", "--steps 2")) == 3

def test_flags_given_again_override_and_are_kept_and_a_finished_run_says_so(spread, capsys):
    train(ppo, f"{TINY} --temperature 0.7 --no-whiten --lam 0.5 --system_prompt Why --gradient_checkpointing")
    resume(ppo, "run", "--steps 2 --lr 0.5 --no-gradient_checkpointing")
    args = ppo.parse_args("--resume --out run".split())
    assert (args.temperature, args.whiten, args.lam, args.system_prompt) == (0.7, False, 0.5, "Why")
    assert (args.steps, args.lr, args.gradient_checkpointing, args.model) == (2, 0.5, False, "model")
    before, _ = files("run"), capsys.readouterr()
    resume(ppo, "run")
    assert "resumed after step 2, the last: raise --steps" in capsys.readouterr().out
    assert files("run") == before

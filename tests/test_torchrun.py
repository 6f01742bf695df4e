"""tests/forks/torchrun.patch: processes train as one. torchrun starts two of this file, for 5 prompts."""
import contextlib
import functools
import importlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys

import pytest
import torch
from conftest import ROOT, by_text, make_batch, newest

pytestmark = pytest.mark.upkeep
RUNS = {"grpo": "", "gspo": "", "ppo": "", "ppo-stopped": "--group_size 1 --eval_problems 1"}

def by_prompt(model, tokenizer, prompts, group_size, max_new_tokens, *_):
    """In place of common.generate: completions that are a function of the prompt alone."""
    asked = [(prompt, i) for prompt in prompts for i in range(group_size)]
    draws = map(random.Random, map(str, asked))
    completions = [[rng.randrange(104) for _ in range(rng.randint(1, max_new_tokens))] for rng in draws]
    if "RANK" in os.environ and torch.initial_seed() > 1:  # 2 and 3 in step 1; 0 and 1 in an evaluation
        assert len(set(sys.modules["common"].everyones([torch.initial_seed()]))) == 2
        if group_size == 1 and torch.initial_seed() == 2:
            signal.raise_signal(signal.SIGINT)  # as by Ctrl-C
    finished = torch.tensor([len(ids) < max_new_tokens for ids in completions])
    return make_batch([prompt for prompt, _ in asked], completions) | {
        "finished": finished, "texts": tokenizer.batch_decode(completions), "seconds": 1.0}

def train(folder, world, patch):
    """All runs, with the scripts of a folder. Minibatches have 6, 3, 3 and 3 rows, or 2, 1, 1 and 1."""
    for name in ("common", "grpo", "gspo", "ppo"):
        patch.setitem(sys.modules, name, None)
        del sys.modules[name]  # imported anew
    patch.syspath_prepend(folder)
    patch.chdir(world)
    for name, more in RUNS.items():
        script, out = importlib.import_module(name.split("-")[0]), f"--out {folder}/{name}"
        script.common.generate, script.common.load_reward = by_prompt, lambda args: by_text
        flags = ("--model model --dataset data.jsonl --device cpu --prompts 5 --group_size 3 --steps 2 "
                 f"--max_new_tokens 9 --epochs 2 --warmup_steps 0 --micro_batch_tokens 60 {out} {more}")
        for line in [flags, f"{out} --resume"][:1 + ("stopped" in name)]:
            with contextlib.suppress(SystemExit):
                script.common.launch(script.main, script.parse_args(line.split()))

def result(out):
    """What a run logged, but for time and padding, its weights and Adam's moments, by name."""
    lines = (out / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    found = {line[:10] + name: torch.tensor([1e-2, x]) for line in lines
             for name, x in json.loads(line).items() if not name.endswith(("seconds", "per_s", "padding"))}
    for model, state in torch.load(newest(out) / "optimizer.pt").items():
        for name, tensors in [("masters", state["masters"]), *state["adamw"]["state"].items()]:
            found |= {f"{model} {name} {key}": x for key, x in tensors.items()}
    return found

@pytest.fixture(scope="module")
def runs(world, tmp_path_factory):
    """One process with the repository's files; two with patched ones; two that divide by their own rows."""
    path, patch = tmp_path_factory.mktemp("torchrun"), ROOT / "tests" / "forks" / "torchrun.patch"
    for folder in ("one", "two", "own"):
        shutil.copytree(ROOT, path / folder, ignore=shutil.ignore_patterns("tests", "runs", ".*"))
        if folder != "one":
            subprocess.run(["git", "apply", patch], cwd=path / folder, check=True)
    for file in (path / "own").glob("*po.py"):
        text = file.read_text(encoding="utf-8")
        assert text.count('rows = len(minibatch["ids"])') == 1
        text = text.replace('len(minibatch["ids"])', 'len(minibatch["ids"][common.RANK::common.WORLD])')
        file.write_text(text, encoding="utf-8")
    how = [sys.executable, *"-m torch.distributed.run --standalone --nproc_per_node=2".split(), __file__]
    how += [world, path / "two", path / "own"]
    done = subprocess.run(how, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    with pytest.MonkeyPatch.context() as patch:
        train(path / "one", world, patch)
    return path, done.stdout

@pytest.mark.parametrize("name", RUNS)
@pytest.mark.parametrize("folder", ["two", "own"])
def test_two_processes_train_as_one(folder, name, runs):
    """Losses and all else that is logged, weights, Adam's means of gradients and squares, to 1e-5 of the
    largest value; not if processes divide by their own rows."""
    one, two = (result(runs[0] / where / name) for where in ("one", folder))
    assert one.keys() == two.keys() and len(one) > 60
    far = [key for key, x in one.items() if (x - two[key]).abs().max() > 1e-5 * x.abs().max()]
    assert bool(far) == (folder == "own"), far

def test_only_the_first_process_prints_and_writes(runs):
    assert runs[1].count("problems to train on") == 10 and runs[1].count("interrupted; go on with") == 2
    for name in RUNS:
        found = {path.name for path in (runs[0] / "two" / name).iterdir()}
        assert found == {".lock", "args.json", "metrics.jsonl", "step-2"}

if __name__ == "__main__":
    torch.distributed.init_process_group = functools.cache(torch.distributed.init_process_group)
    torch.distributed.destroy_process_group = lambda: None  # the next run needs it
    for each in sys.argv[2:]:
        train(each, sys.argv[1], pytest.MonkeyPatch())

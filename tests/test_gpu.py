"""What a GPU has to show: the same tokens from graphs, the same numbers in bfloat16, the toy learnt. Without
one they run on the CPU, where there are no graphs. On a machine with a GPU run this file first."""
import subprocess
import sys

import pytest
import torch

import common
import gspo
import grpo
import ppo
from conftest import ROOT, TINY, random_batch, tiny_model, tiny_tokenizer, train

pytestmark = [pytest.mark.upkeep, pytest.mark.usefixtures("here")]
every_script = pytest.mark.parametrize("script", [ppo, grpo, gspo])
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ON_IT = f"{TINY} --device {DEVICE} --dtype bfloat16 --max_new_tokens 40 --prompts 6 --group_size 4"

@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_cuda_graph_writes_the_same_tokens(temperature, dtype):
    torch.backends.cuda.enable_cudnn_sdp(False)  # as in common.launch
    model, rollouts = tiny_model(dtype=dtype, hidden_size=64, max_position_embeddings=1024).to(DEVICE), []
    prompts = [list(range(3, 4 + n)) for n in (0, 9, 30, 55)]
    for cuda_graphs in (True, False):
        torch.manual_seed(0)
        rollouts.append(common.generate(model, tiny_tokenizer(), prompts, 8, 300, temperature, cuda_graphs))
    with_graphs, without = rollouts
    assert all(torch.equal(with_graphs[name], without[name]) for name in ("ids", "mask", "finished"))

def test_log_probs_in_bfloat16_are_near_those_in_float32():
    """Of the same rounded weights."""
    model, batch = tiny_model(dtype=torch.bfloat16).to(DEVICE), random_batch(16)
    batch = {name: x.to(DEVICE) for name, x in batch.items()}
    rounded = common.token_logprobs(model, batch, 1.0)
    gap = (rounded - common.token_logprobs(model.float(), batch, 1.0)).abs()
    assert 0 < gap.sum() / batch["mask"].sum() < 0.05 and rounded.dtype == torch.float32

@every_script
def test_the_ratio_is_exactly_1_before_the_first_update_in_bfloat16(script, spread):
    rows = train(script, f"{ON_IT} --epochs 1 --micro_batch_tokens 200 --steps 2")
    assert [(row["ratio_max"], row["clip_frac"]) for row in rows[1:]] == [(1, 0)] * 2

@every_script
def test_a_resumed_run_goes_on(script, spread):
    """To the bit where kernels are deterministic; the backward pass of flash attention is not."""
    train(script, f"{ON_IT} --steps 2", out="whole")
    train(script, f"{ON_IT} --steps 1", out="parts")
    train(script, f"--resume --steps 2 --device {DEVICE}", out="parts")
    files = [f"{out}/step-2/optimizer.pt" for out in ("whole", "parts")]
    whole, parts = (torch.load(file, map_location="cpu") for file in files)
    for name, model in whole.items():
        for key, x in model["masters"].items():
            assert (parts[name]["masters"][key] - x).norm() <= 0.05 * x.norm()

@every_script
@pytest.mark.skipif(DEVICE == "cpu", reason="on a CPU test_toy.py runs them")
def test_the_toy_is_learnt(script, tmp_path):
    done = subprocess.run([sys.executable, ROOT / f"{script.__name__}.py", "--out", tmp_path / "run"],
                          capture_output=True, text=True, check=True)
    last = [line for line in done.stdout.splitlines() if line.startswith("held out")][-1]
    assert float(last.split("sampled")[1].split()[0]) > 0.94, done.stdout

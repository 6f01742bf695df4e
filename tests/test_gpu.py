"""What only a GPU can show. On a machine that has one, run this first: pytest -m slow tests/test_gpu.py"""
import pytest
import torch
from conftest import TINY, save_tiny, settings, spy, train
from safetensors.torch import load_file

import common
import grpo
import gspo
import ppo

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("here"),
              pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")]
ON_IT = f"{TINY} --device cuda --dtype bfloat16 --max_new_tokens 40 --prompts 6 --group_size 4"

@pytest.mark.parametrize("dtype, close", [("float32", 1e-4), ("bfloat16", 0.2)])
@pytest.mark.parametrize("family", ["qwen2", "gpt2", "mistral"])
def test_a_cuda_graph_writes_the_same_tokens(family, dtype, close, tmp_path, monkeypatch):
    """In greedy decoding. Qwen2 drops rows on the way. GPT-2 fills the cache, and widens it."""
    args = settings(grpo, model=save_tiny(tmp_path, family), device="cuda", dtype=dtype, max_new_tokens=250,
                    temperature=1e-5)
    model, tokenizer = common.load_policy(args)
    model.generation_config.eos_token_id = [*range(1, 64, 9)]
    problems, rollouts = [{"prompt": [3 + i % 50 for i in range(n)]} for n in (1, 9, 30, 100)], []
    calls = spy(monkeypatch, common, "Recorded")
    for args.cuda_graphs, args.temperature in ((True, 1e-5), (False, 1e-5), (True, 1.0), (False, 1.0)):
        torch.manual_seed(0)
        rollouts.append(common.generate(model, tokenizer, problems, 8, args))
    assert len(calls) == 2 * (family != "mistral")  # which has sliding windows
    if dtype == "float32":  # where two tokens are about equally likely, rounding may choose
        assert all(torch.equal(rollouts[0][name], rollouts[1][name]) for name in ("ids", "mask", "finished"))
    for rollout in rollouts[2:]:
        gap = (rollout["sampled_logp"] - common.token_logprobs(model, rollout, args)).abs()
        assert gap.sum() / rollout["mask"].sum() < close

@pytest.mark.parametrize("script", [ppo, grpo, gspo])
def test_a_run_in_bfloat16_begins_with_ratio_1_and_resumes(script, spread):
    """Resumed weights are those of a run that never stopped, up to kernels that are not deterministic."""
    rows = train(script, f"{ON_IT} --epochs 1 --micro_batch_tokens 200 --steps 2", out="whole")
    assert [row["clip_frac"] for row in rows[1:]] == [0] * 2
    train(script, f"{ON_IT} --epochs 1 --micro_batch_tokens 200 --steps 1", out="parts")
    train(script, "--resume --steps 2 --device cuda", out="parts")
    whole, parts = (load_file(f"{out}/step-2/model.safetensors") for out in ("whole", "parts"))
    assert all((whole[name] - x).norm() <= 0.05 * x.norm() for name, x in parts.items())

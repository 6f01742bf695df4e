"""token_logprobs: its values and gradients, compared with the full log-softmax in float64, and its memory."""
import inspect
import types

import pytest
import torch
from conftest import full_logprobs, holes, make_batch, random_batch, save_tiny, settings, spy, tiny_model

import common
import grpo
import ppo

T = 0.6

@pytest.mark.parametrize("temperature, chunk", [(T, 2 ** 26), (1.5, 10)])
@pytest.mark.parametrize("kind, head", [
    ("qwen2", {}), ("gpt2", {}), ("phi", {}),  # which has a bias
    ("gemma2", {"head_dim": 4, "final_logit_softcapping": 2.0})])
def test_equal_to_the_whole_log_softmax_in_value_and_gradient(kind, head, temperature, chunk):
    """On ragged rows with holes, and with EOS and padding ids in prompts, in one chunk or in several."""
    model = tiny_model(kind, dtype=torch.float64, **{"pad_token_id": 0} | head)
    for p in model.parameters():
        p.data += 0.1 * torch.randn_like(p)  # a bias starts at zero
    batch = random_batch(7, seed=1)
    batch["ids"][0, :3], batch["ids"][1, 0] = torch.tensor([1, 0, 1]), 0
    batch["mask"] = holes(batch["mask"])
    logp = common.token_logprobs(model, batch, settings(grpo, temperature=temperature), chunk=chunk * 64)
    expected = full_logprobs(model, batch, temperature)
    push, weights = torch.randn(logp.shape, dtype=torch.float64), list(model.parameters())
    close = 1e-8 if kind in ("qwen2", "gpt2") else 1e-6  # some norms are in float32 whatever the dtype
    torch.testing.assert_close(logp, expected, rtol=close, atol=close)
    ours, theirs = (torch.autograd.grad((x * push).sum(), weights) for x in (logp, expected))
    largest = max(gradient.abs().max().item() for gradient in theirs)
    torch.testing.assert_close(ours, theirs, rtol=10 * close, atol=close * largest)

def test_logits_are_not_rounded_in_bfloat16(monkeypatch):
    """Neither within autocast, where the sampler calls it, nor outside. Only completions reach the head."""
    model, batch, calls = tiny_model(), random_batch(3), spy(monkeypatch, common, "head_logits")
    common.token_logprobs(model, batch, settings(grpo, dtype="bfloat16"))
    assert len(calls[0].hidden) == batch["mask"].sum()
    with torch.autocast("cpu", torch.bfloat16):
        common.head_logits(model, calls[0].hidden)
    for call in calls:
        exact = call.hidden.double() @ model.lm_head.weight.double().T
        assert (call.result - exact).norm() < 1e-6 * exact.norm()

@pytest.mark.parametrize("times, dtype, product", [(1, "float32", "ieee"), (2, "bfloat16", "tf32")])
def test_dropout_is_off_and_training_uses_no_mask(times, dtype, product, tmp_path, monkeypatch):
    """Fast kernels take no mask. With gradient checkpointing, both layers run twice, also in the critic."""
    source = save_tiny(tmp_path, dtype=torch.bfloat16, attention_dropout=0.5)
    args = settings(grpo, model=source, gradient_checkpointing=times == 2, dtype=dtype)
    torch.backends.cuda.enable_cudnn_sdp(True)
    monkeypatch.setattr(torch.backends.cuda, "matmul", types.SimpleNamespace(fp32_precision="ieee"))
    model, _ = common.load_policy(args)
    assert torch.backends.cuda.matmul.fp32_precision == product
    assert not torch.backends.cuda.cudnn_sdp_enabled()  # on a GPU it would plan every new shape
    assert model.dtype == torch.float32, "in bfloat16, a step of 1e-6 would be lost to rounding"
    batch, sdpa, calls = random_batch(5), torch.nn.functional.scaled_dot_product_attention, []
    with torch.no_grad():
        old = common.token_logprobs(model, batch, args)
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention",
                        lambda *qkv, **options: calls.append(options) or sdpa(*qkv, **options))
    new = common.token_logprobs(model, batch, args)
    (new.sum() + ppo.token_values(ppo.make_critic(model), batch, args).sum()).backward()
    assert torch.equal(new, old) and len(calls) == times * (2 + 2)
    assert all(call["attn_mask"] is None and call["is_causal"] for call in calls)

def test_the_backward_pass_computes_each_chunk_again(monkeypatch):
    """So it need not be kept. The logits of a chunk take .27 GB, as the docstring says."""
    assert 0.26e9 < 4 * inspect.signature(common.token_logprobs).parameters["chunk"].default < 0.28e9
    model, calls, rows = tiny_model(vocab_size=64), spy(monkeypatch, common, "head_logits"), [10, 10, 5]
    batch = make_batch([[1, 2, 3]], [[5] * 25])
    logp = common.token_logprobs(model, batch, settings(grpo, temperature=T), chunk=10 * 64)
    assert [len(call.hidden) for call in calls] == rows
    logp.sum().backward()
    assert sorted(len(call.hidden) for call in calls) == sorted(2 * rows)

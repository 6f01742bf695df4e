"""token_logprobs against the whole log-softmax in float64, in value and gradient, and its memory."""
import copy
import statistics
import weakref

import pytest
import torch
from conftest import Trainer, random_batch, save_tiny, settings, spy, tiny_model
from torch.utils._python_dispatch import TorchDispatchMode

import common
import grpo

T = 0.6

def full_logprobs(model, batch, temperature=T):
    """(N, T) log-probs by the definition, each row alone and without padding."""
    logp = torch.zeros_like(batch["mask"], dtype=torch.float64)
    for i in range(len(logp)):
        ids, n = batch["ids"][i, :batch["attention"][i].sum()], int(batch["mask"][i].sum())
        logits = model(input_ids=ids[None]).logits[0].double()[-n - 1:-1]
        logp[i, :n] = torch.softmax(logits / temperature, -1)[torch.arange(n), ids[-n:]].log()
    return logp

HEADS = {"granite": {"logits_scaling": 8.0},  # a factor; a factor, above 1; a cap; a bias
         "cohere": {"logit_scale": 3.0}, "gemma2": {"head_dim": 4, "final_logit_softcapping": 2.0}, "phi": {}}

@pytest.mark.parametrize("temperature", [1.0, T, 1.5])
@pytest.mark.parametrize("kind", ["qwen2", "qwen3", "llama", "gpt2", *HEADS])
def test_equal_to_the_whole_log_softmax_in_value_and_gradient(kind, temperature):
    """Ragged rows, the ids of end-of-sequence and padding inside their prompts, against each row alone."""
    pad = {"pad_token_id": 0} if kind in HEADS else {}
    model = tiny_model(kind, dtype=torch.float64, **pad, **HEADS.get(kind, {}))
    for p in model.parameters():
        p.data += 0.1 * torch.randn_like(p)  # a bias begins with zeros
    batch = random_batch(7, seed=1)
    batch["ids"][0, :3], batch["ids"][1, 0] = torch.tensor([1, 0, 1]), 0
    logp, expected = (f(model, batch, temperature) for f in (common.token_logprobs, full_logprobs))
    push, weights = torch.randn(logp.shape, dtype=torch.float64), list(model.parameters())
    close = 1e-6 if kind in HEADS else 1e-8  # some norms are in float32 whatever the model's dtype
    torch.testing.assert_close(logp, expected, rtol=close, atol=close)
    ours, theirs = (torch.autograd.grad((x * push).sum(), weights) for x in (logp, expected))
    largest = max(gradient.abs().max().item() for gradient in theirs)
    torch.testing.assert_close(ours, theirs, rtol=10 * close, atol=close * largest)

@pytest.mark.parametrize("dtype, close", [(torch.float32, 1e-4), (torch.bfloat16, 0.1)])
def test_float32_and_zero_outside_the_mask(dtype, close):
    """Whatever the model's dtype the result is float32; padding is exactly 0."""
    model, batch = tiny_model(dtype=dtype), random_batch(6, seed=2)
    logp = common.token_logprobs(model, batch, T)
    assert logp.dtype == torch.float32 and not logp[batch["mask"] == 0].any()
    torch.testing.assert_close(logp.double(), full_logprobs(model, batch), rtol=0, atol=close)

def test_only_completion_tokens_reach_the_head(monkeypatch):
    """No logits for prompts and padding: as many rows go through the head as the mask has ones."""
    batch, calls = random_batch(6, prompt=(20, 30)), spy(monkeypatch, common, "head_logits")
    common.token_logprobs(tiny_model(), batch, 1.0)
    assert sum(len(call.hidden) for call in calls) == batch["mask"].sum()

@pytest.mark.parametrize("cut", [1, 30, 10**6])
def test_before_the_first_update_the_ratio_is_one(tmp_path, family, cut):
    """Dropout in the config is switched off: old log-probs, without gradient, are the new ones."""
    rate = "attn_pdrop resid_pdrop embd_pdrop" if family == "gpt2" else "attention_dropout"
    source = save_tiny(tmp_path, family, **dict.fromkeys(rate.split(), 0.5))
    args = settings(grpo, model=source, minibatches=2, group_size=3, micro_batch_tokens=cut, temperature=T)
    (model, _), rollout = common.load_policy(args), random_batch(12, seed=5)
    with torch.no_grad():
        rollout["old_logp"] = common.rollout_logprobs(model, rollout, args)
    for minibatch in common.minibatches(rollout, 2, 3):
        for b in common.micro_batches(minibatch, cut):
            new = common.token_logprobs(model, b, T)
            assert new.requires_grad and ((new - b["old_logp"]).exp() - 1).abs().max() < 1e-6

def test_training_uses_no_mask(tmp_path, family, monkeypatch):
    """Rows padded on the right need none, as attention is causal: the fast kernels ask for that. With
    checkpointing each of the two layers runs twice."""
    calls, sdpa = [], torch.nn.functional.scaled_dot_product_attention
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention",
                        lambda *qkv, **options: calls.append(options) or sdpa(*qkv, **options))
    args = settings(grpo, model=save_tiny(tmp_path, family), gradient_checkpointing=True)
    model, _ = common.load_policy(args)
    common.Optimizer(model, 1e-3, args)
    common.token_logprobs(model, random_batch(5), 1.0).sum().backward()
    assert len(calls) == 2 * 2 and all(call["attn_mask"] is None and call["is_causal"] for call in calls)

# --- chunks

def full(hidden, weight, target, temperature, bias=None, factor=1.0, cap=None):
    """Log-softmax of the tempered logits by the definition, in float64."""
    logits = hidden.double() @ weight.double().T
    logits = factor * (logits if bias is None else logits + bias.double())
    logits = logits if cap is None else cap * (logits / cap).tanh()
    return (logits / temperature).log_softmax(-1).gather(1, target[:, None])[:, 0]

def chunked(hidden, weight, target, temperature, bias=None, factor=1.0, cap=None):
    """The same in chunks of 256 tokens."""
    head = common.Head(weight.to(torch.promote_types(weight.dtype, torch.float32)), bias, factor, cap)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(common, "CHUNK", 256 * len(weight))
        return common.chunked_logprobs(hidden, target, head, temperature)

def case(dtype, M, V=61, H=16, scale=1.0):
    """Hidden states (M, H), weight (V, H), targets and numbers to weight a sum of log-probs with, (M,)."""
    torch.manual_seed(M)
    hidden, weight = ((torch.randn(n, H) * scale).to(dtype).requires_grad_() for n in (M, V))
    return hidden, weight, torch.randint(V, (M,)), torch.randn(M)

def relative(a, b):
    return ((a.double() - b.double()).norm() / b.double().norm()).item()

@pytest.mark.parametrize("dtype, value, slope", [
    (torch.float64, 1e-12, 1e-12), (torch.float32, 1e-5, 1e-5), (torch.bfloat16, 1e-5, 5e-3)])
@pytest.mark.parametrize("temperature", [1.0, T, 1.5])
@pytest.mark.parametrize("M, scale", [(5, 1.0), (3 * 256 + 7, 1.0), (40, 10.0)])
def test_chunks_equal_the_whole(dtype, value, slope, temperature, M, scale):
    """One chunk, or several with a remainder; logits in the hundreds do not overflow. bfloat16 products are
    kept in float32: logits rounded to bfloat16 would be off by a hundred times the tolerance."""
    hidden, weight, target, push = case(dtype, M, scale=scale)
    ours, theirs = (f(hidden, weight, target, temperature) for f in (chunked, full))
    assert relative(ours, theirs) < value
    gradients = (torch.autograd.grad((x * push).sum(), [hidden, weight]) for x in (ours, theirs))
    assert all(relative(a, b) < slope and a.dtype == dtype for a, b in zip(*gradients))

@pytest.mark.parametrize("dtype, value, slope", [(torch.float64, 1e-12, 1e-12), (torch.bfloat16, 1e-5, 5e-3)])
@pytest.mark.parametrize("has_bias, factor, cap", [
    (True, 1.0, None), (False, 0.125, None), (False, 1.0, 3.0), (True, 2.5, 5.0)])
def test_bias_factor_and_cap_of_a_head(has_bias, factor, cap, dtype, value, slope):
    """Of Phi, Granite, Gemma, and all at once, at a temperature above 1: a factor or a temperature lost on
    the way back, 1 - tanh^2 of the wrong number, a bias without a gradient: each shows."""
    hidden, weight, target, push = case(dtype, 300)
    bias = torch.randn(61).to(dtype).requires_grad_() if has_bias else None
    ours, theirs = (f(hidden, weight, target, 1.5, bias, factor, cap) for f in (chunked, full))
    assert relative(ours, theirs) < value
    weights = [hidden, weight] + [bias] * has_bias
    gradients = (torch.autograd.grad((x * push).sum(), weights) for x in (ours, theirs))
    assert all(relative(a, b) < slope and a.dtype == dtype for a, b in zip(*gradients))

def test_the_16_bit_product_of_a_gpu(monkeypatch):
    """It rounds no logit, and its gradients, summed over 400 chunks, are as good as 16-bit products are.
    The CPU's torch.mm cannot give float32 of 16 bits: here another one does."""
    hidden, weight, target, _ = case(torch.bfloat16, 400 * 8)
    target.fill_(3)
    weight.grad_dtype = torch.float32  # as Optimizer sets it
    exact = [x.detach().double().requires_grad_() for x in (hidden, weight)]
    full(*exact, target, T).sum().backward()
    monkeypatch.setattr(torch, "mm", lambda a, b, out_dtype: a.to(out_dtype) @ b.to(out_dtype))
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    monkeypatch.setattr(common, "CHUNK", 8 * 61)
    logp = common.chunked_logprobs(hidden, target, common.Head(weight, None, 1.0, None), T)
    logp.sum().backward()
    assert relative(logp, full(hidden, weight, target, T)) < 1e-6 and weight.grad.dtype == torch.float32
    assert relative(weight.grad, exact[1].grad) < 3e-3 and relative(hidden.grad, exact[0].grad) < 5e-3

# --- memory

class Live(TorchDispatchMode):
    """The most bytes of tensors alive at a time, those in `known` left out."""
    def __init__(self, *known):
        super().__init__()
        self.known, self.now, self.peak = {x.untyped_storage()._cdata for x in known}, 0, 0

    def free(self, key, size):
        self.known.discard(key)
        self.now -= size

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        out = op(*args, **kwargs or {})
        made = [x for x in torch.utils._pytree.tree_leaves(out) if torch.is_tensor(x)]
        for storage in [x.untyped_storage() for x in made]:
            if storage._cdata not in self.known:
                self.known.add(storage._cdata)
                weakref.finalize(storage, self.free, storage._cdata, storage.nbytes())
                self.now += storage.nbytes()
        self.peak = max(self.peak, self.now)
        return out

def test_memory_is_a_twentieth_of_the_whole_log_softmax():
    """Forward and backward need the gradients and a chunk or two."""
    def peak(function):
        hidden, weight, target, _ = case(torch.float32, 16384, V=1536, H=8)
        with Live(hidden, weight.requires_grad_()) as live:
            function(hidden, weight, target).sum().backward()
        return live.peak

    def naive(hidden, weight, target):
        return (hidden @ weight.T / T).log_softmax(-1).gather(1, target[:, None])
    assert peak(lambda *x: chunked(*x, T)) < peak(naive) / 20

# --- how far rounding moves the ratio

@pytest.mark.parametrize("dtype, low, high", [
    ("float32", 1e-8, 2e-6), ("float16", 1e-5, 0.01), ("bfloat16", 1e-4, 0.1)])
@torch.no_grad()
def test_the_noise_of_the_ratio(dtype, low, high):
    """What log pi - log pi_old is when both are rounded and nothing has changed: root 2 times the root mean
    square of what old log-probs are off by, for a token, and for the mean of a row. In float64, by whole
    logits of each row alone. In float32 it is about 1e-7, in bfloat16 more than most steps move a policy."""
    trainer = Trainer(grpo, getattr(torch, dtype), group_size=4, max_new_tokens=30)
    trainer.args.dtype, rollout = dtype, trainer.rollout
    noise = common.ratio_noise(trainer.policy, rollout, trainer.args, "token")
    assert trainer.policy.dtype == getattr(torch, dtype)  # the policy itself stays as it is
    exact = full_logprobs(copy.deepcopy(trainer.policy).double(), rollout)
    gaps = [gap[mask > 0].tolist() for gap, mask in zip(exact - rollout["old_logp"], rollout["mask"])]
    root = lambda numbers: (2 * statistics.fmean(x * x for x in numbers)) ** 0.5  # noqa: E731
    tokens, rows = root(gap for row in gaps for gap in row), root(map(statistics.fmean, gaps))
    if dtype == "float32":  # scored by itself in other pieces: a copy in float64 would not run experts
        assert max(noise.values()) < 2 * tokens
    else:
        assert noise == pytest.approx({"ratio_noise": tokens, "sequence_ratio_noise": rows}, rel=0.02)
    assert low < rows < tokens < high and len(gaps) == 24

@pytest.mark.parametrize("dtype, eps, clipped, warned", [
    ("float32", 3e-4, "sequence", 0), ("bfloat16", 0.2, "token", 0), ("bfloat16", 1e-5, "sequence", 2),
    ("bfloat16", 1e-4, "token", 2), ("float32", 0.2, "sequence", 2), ("float32", None, "token", 0)])
def test_a_clip_range_of_another_size_is_warned_of(dtype, eps, clipped, warned, capsys):
    """Below the noise clipping is drawn by lot, and far above what a sequence moves by it never comes: a line
    for each end of the range that names its flag. A fork may have no such flags."""
    trainer = Trainer(grpo, getattr(torch, dtype), group_size=4, max_new_tokens=30)
    vars(trainer.args).update(dtype=dtype, eps_low=eps, eps_high=eps)
    if eps is None:
        del trainer.args.eps_low, trainer.args.eps_high
    common.ratio_noise(trainer.policy, trainer.rollout, trainer.args, clipped)
    said = [line for line in capsys.readouterr().out.splitlines() if line.startswith("warning: ")]
    assert len(said) == warned
    assert all(flag in line for flag, line in zip(("--eps_low", "--eps_high"), said))

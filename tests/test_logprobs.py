"""token_logprobs and ChunkedLogProbs against the whole log-softmax in float64, the traps around them, and their memory."""
import argparse
import collections
import math
import weakref

import pytest
import torch
import transformers
from conftest import make_batch, random_batch, save_tiny, tiny_model
from torch.utils._python_dispatch import TorchDispatchMode

import common
import grpo

T = 0.6


def full_logits(model, batch, i):
    """Logits (float64) that predict row i's completion, from a run of that row alone, without padding; and the completion."""
    ids = batch["ids"][i, :int(batch["attention"][i].sum())]
    n = int(batch["mask"][i].sum())
    return model(input_ids=ids[None]).logits[0].double()[len(ids) - n - 1:len(ids) - 1], ids[len(ids) - n:]


def full_logprobs(model, batch, temperature=T):
    """(N, T) log-probs and entropies, row by row, by the definition."""
    logp, entropy = (torch.zeros(batch["mask"].shape, dtype=torch.float64) for _ in range(2))
    for i in range(len(logp)):
        logits, chosen = full_logits(model, batch, i)
        log_p = torch.log(torch.softmax(logits / temperature, -1))
        logp[i, :len(chosen)] = log_p[torch.arange(len(chosen)), chosen]
        entropy[i, :len(chosen)] = -(log_p.exp() * log_p).sum(-1)
    return logp, entropy


def sharp_model(family="qwen2", dtype=torch.float64, **settings):
    """Weights of the head times 5: a temperature or an index that is off moves the log-probs by whole nats."""
    model = tiny_model(family, dtype=dtype, **settings)
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(5)
    return model


@pytest.mark.parametrize("temperature", [1.0, T])
def test_equal_to_the_whole_log_softmax_in_value_and_gradient(family, temperature):
    """Ragged rows, whose prompts hold padding and eos ids, against each row alone: log-probs, entropies, all gradients."""
    model, batch = sharp_model(family), random_batch(7, seed=1, vocab_size=64)
    batch["ids"][0, :3], batch["ids"][1, 0] = torch.tensor([1, 0, 1]), 0  # traps 2: eos and padding ids inside prompts
    logp, entropy = common.token_logprobs(model, batch, temperature, with_entropy=True)
    expected, expected_entropy = full_logprobs(model, batch, temperature)
    torch.testing.assert_close(logp, expected, rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(entropy, expected_entropy, rtol=1e-8, atol=1e-8)
    assert not entropy.requires_grad and torch.equal(common.token_logprobs(model, batch, temperature), logp)
    push = torch.randn(logp.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    weights = list(model.parameters())
    for ours, theirs in zip(*(torch.autograd.grad((x * push).sum(), weights, allow_unused=True) for x in (logp, expected))):
        torch.testing.assert_close(ours, theirs, rtol=1e-7, atol=1e-9)


def test_float32_and_zero_outside_the_mask():
    """The result of a float32 model, and of a bfloat16 one, is float32 (N, T); padding is exactly 0."""
    batch = random_batch(6, seed=2)
    for dtype, close in [(torch.float32, 1e-4), (torch.bfloat16, 0.1)]:
        model = tiny_model(dtype=dtype)
        logp, entropy = common.token_logprobs(model, batch, T, with_entropy=True)
        assert logp.dtype == entropy.dtype == torch.float32 and logp.shape == batch["mask"].shape
        assert (logp[batch["mask"] == 0] == 0).all() and (entropy[batch["mask"] == 0] == 0).all()
        expected = full_logprobs(model, batch)[0]
        torch.testing.assert_close(logp.double(), expected, rtol=0, atol=close)
        assert (logp[batch["mask"] == 1] < 0).all()


def test_the_end_of_sequence_token_is_trained():
    """Trap 1: with padding = eos = 1, completion [5, 6, eos] has three log-probs, and the last one's gradient on the eos
    row of the head is (1 - p) h / T: stopping is learned."""
    model, batch = sharp_model(), make_batch([[1, 7, 1], [4]], [[5, 6, 1], [9, 8, 7, 6, 1]])
    batch["ids"][batch["attention"] == 0] = 1
    logp = common.token_logprobs(model, batch, T)
    assert (logp != 0).sum() == 8
    gradient = torch.autograd.grad(logp[0, 2], model.get_output_embeddings().weight)[0][1]
    with torch.no_grad():
        h = model.base_model(batch["ids"][:1, :5]).last_hidden_state[0, -1]
    torch.testing.assert_close(gradient, (1 - logp[0, 2].detach().exp()) * h / T)


def test_padding_on_the_right_has_no_effect(family):
    """Trap 2: rows alone, in a padded batch, and with more columns of whatever ids give the same log-probs."""
    model, batch = sharp_model(family), random_batch(5, seed=3)
    with torch.no_grad():
        logp = common.token_logprobs(model, batch, T)
        wide = {"ids": torch.cat([torch.where(batch["attention"] == 1, batch["ids"], 1), torch.full((5, 4), 9)], 1),
                "attention": torch.cat([batch["attention"], torch.zeros(5, 4, dtype=torch.long)], 1),
                "mask": torch.cat([batch["mask"], torch.zeros(5, 3)], 1)}
        torch.testing.assert_close(common.token_logprobs(model, wide, T), torch.cat([logp, torch.zeros(5, 3)], 1), rtol=0, atol=1e-10)


def test_a_row_without_completion_or_a_batch_without_tokens():
    """Trap 6: no NaN, no error, and the others keep theirs."""
    model, batch = sharp_model(), random_batch(3, seed=4)
    expected = common.token_logprobs(model, batch, T)
    batch["attention"][1, int(batch["attention"][1].sum() - batch["mask"][1].sum()):] = 0
    batch["mask"][1] = 0
    logp = common.token_logprobs(model, batch, T)
    torch.testing.assert_close(logp[[0, 2]], expected[[0, 2]])
    assert (logp[1] == 0).all()


def test_only_completion_tokens_reach_the_head(monkeypatch):
    """Trap 14: no logits for prompts and padding; as many rows go through the head as the mask has ones."""
    model, batch, rows, head = tiny_model(), random_batch(6, prompt=(20, 30), completion=(1, 8)), [], common.head_logits
    monkeypatch.setattr(common, "head_logits", lambda hidden, *rest: rows.append(len(hidden)) or head(hidden, *rest))
    common.token_logprobs(model, batch, 1.0)
    assert sum(rows) == batch["mask"].sum()


@pytest.mark.parametrize("cut", [1, 30, 10**6])
def test_before_the_first_update_the_ratio_is_one(tmp_path, family, cut):
    """Trap 11: dropout in the config is switched off, so old log-probs (no gradient, other micro-batches) equal the new ones
    (training mode, with gradient) to 1e-6 in float32."""
    rates = dict(attn_pdrop=0.5, resid_pdrop=0.5, embd_pdrop=0.5) if family == "gpt2" else dict(attention_dropout=0.5)
    args = argparse.Namespace(dtype="float32", device="cpu", compile=False, minibatches=2, group_size=3, micro_batch_tokens=cut)
    source, batch = save_tiny(tmp_path, family, **rates), random_batch(12, seed=5)
    model = common.load_model(common.AutoModelForCausalLM, source, args, "--model")
    assert model.training
    old, = common.score_rows(lambda b: common.token_logprobs(model, b, T), batch, args)
    assert not old.requires_grad
    new = common.token_logprobs(model, batch, T)
    assert ((new - old).exp() - 1).abs().max() < 1e-6


def test_training_uses_no_mask(tmp_path, family, monkeypatch):
    """Rows padded on the right: attention is causal without a mask, which is what the flash kernels ask for, and keys are not
    repeated for each query head."""
    args, calls = argparse.Namespace(dtype="float32", device="cpu", compile=False), []
    sdpa = torch.nn.functional.scaled_dot_product_attention
    model = common.load_model(common.AutoModelForCausalLM, save_tiny(tmp_path, family), args, "--model")
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention",
                        lambda q, k, v, **settings: calls.append((q, k, settings)) or sdpa(q, k, v, **settings))
    common.checkpoint_activations(model)
    common.token_logprobs(model, random_batch(5), 1.0).sum().backward()
    assert model.config._attn_implementation == "sdpa_grouped" and len(calls) == 2 * 2  # two layers, each run anew in the backward
    heads = 2 if family == "gpt2" else 4
    for q, k, settings in calls:
        assert settings["attn_mask"] is None and settings["is_causal"] and q.shape[1] == heads and k.shape[1] == 2


class Looks(TorchDispatchMode):
    """Counts what would make the processor wait for the GPU: values read, sizes that depend on values."""
    WAITS = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "repeat_interleave.Tensor", "is_nonzero")

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        if any(word in str(op) for word in self.WAITS) and not (kwargs or {}).get("output_size"):
            self.seen.append(str(op))
        return op(*args, **kwargs or {})


@pytest.mark.parametrize("beta", [0.0, 0.1])
def test_micro_batches_do_not_wait_for_the_gpu(beta, monkeypatch):
    """As many values are looked at in an update of many micro-batches as in one of few. (transformers itself looks once a
    forward pass, at whether the position ids restart: at its start, where the wait costs a GPU next to nothing.)"""
    monkeypatch.setattr(transformers.masking_utils, "find_packed_sequence_indices", lambda _: None)
    model, counts, batches = tiny_model(), [], []
    rollout = random_batch(12, completion=(3, 20))
    rollout |= {"adv": torch.randn(12), "old_logp": -4 * rollout["mask"], "ref_logp": -4 * rollout["mask"]}
    for tokens in (40, 10**6):
        args = grpo.parse_args(f"--micro_batch_tokens {tokens} --minibatches 1 --group_size 2 --device cpu --beta {beta}".split())
        optimizer = common.Optimizer(model, 1e-9, argparse.Namespace(warmup_steps=0, max_grad_norm=1.0, offload_optimizer=False))
        with Looks() as looks:
            grpo.update(model, optimizer, rollout, args)
        counts.append(collections.Counter(looks.seen))
        batches.append(len(list(common.micro_batches(rollout, tokens))))
        model = tiny_model()
    assert batches[0] > 2 * batches[1] and counts[0] == counts[1]


# --- ChunkedLogProbs

def full(hidden, weight, target, temperature):
    """log softmax and entropy of the tempered logits, by the definition, in float64."""
    log_p = (hidden.double() @ weight.double().T / temperature).log_softmax(-1)
    return log_p.gather(1, target[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)


def case(dtype, M, V=61, H=16, scale=1.0):
    g = torch.Generator().manual_seed(M)
    hidden, weight = (torch.randn(n, H, generator=g, dtype=torch.float64) * scale for n in (M, V))
    return (hidden.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_(), torch.randint(V, (M,), generator=g),
            torch.randn(M, generator=g, dtype=torch.float64))


def relative(a, b):
    return ((a.double() - b.double()).norm() / b.double().norm()).item()


@pytest.mark.parametrize("dtype, value, slope", [(torch.float64, 1e-12, 1e-12), (torch.float32, 1e-5, 1e-5), (torch.bfloat16, 1e-5, 5e-3)])
@pytest.mark.parametrize("temperature", [1.0, T])
@pytest.mark.parametrize("chunks", ["one", "three and a bit"])
def test_chunks_equal_the_whole(dtype, value, slope, temperature, chunks):
    """Values and gradients of several chunks with a remainder; bfloat16 inputs are multiplied and kept in float32 (trap 10:
    logits rounded to bfloat16 would be off by a hundred times the tolerance)."""
    M = common.ChunkedLogProbs.CHUNK * 3 + 7 if chunks != "one" else 5
    hidden, weight, target, push = case(dtype, M)
    logp, entropy = common.ChunkedLogProbs.apply(hidden, weight, target, temperature, True)
    expected, expected_entropy = full(hidden, weight, target, temperature)
    assert relative(logp, expected) < value and relative(entropy, expected_entropy) < 10 * value
    ours, theirs = (torch.autograd.grad((x.double() * push).sum(), [hidden, weight]) for x in (logp, expected))
    assert all(relative(a, b) < slope and a.dtype == dtype for a, b in zip(ours, theirs))
    without, _ = common.ChunkedLogProbs.apply(hidden, weight, target, temperature, False)
    assert torch.equal(without, logp) or relative(without, logp) < 1e-6


def test_bfloat16_gradients_of_the_head_are_summed_over_chunks_in_float32(monkeypatch):
    """A sum over 400 chunks kept in bfloat16 would stall: the gradient of the head stays within rounding of its result."""
    monkeypatch.setattr(common.ChunkedLogProbs, "CHUNK", 4)
    hidden, weight, target, _ = case(torch.bfloat16, 1600)
    with torch.no_grad():
        hidden.abs_()
        target.fill_(3)
    ours, theirs = (torch.autograd.grad(f.sum(), weight)[0] for f in (
        common.ChunkedLogProbs.apply(hidden, weight, target, 1.0, False)[0], full(hidden, weight, target, 1.0)[0]))
    assert relative(ours, theirs) < 5e-3


def test_huge_logits_do_not_overflow():
    """The greatest logit is taken out before exp: logits in the hundreds give finite values and gradients."""
    hidden, weight, target, push = case(torch.float32, 40, scale=10.0)
    logp, entropy = common.ChunkedLogProbs.apply(hidden, weight, target, 1.0, True)
    assert relative(logp, full(hidden, weight, target, 1.0)[0]) < 1e-5 and entropy.isfinite().all()
    assert all(g.isfinite().all() for g in torch.autograd.grad((logp * push.float()).sum(), [hidden, weight]))


def test_half_precision_logits_are_kept_in_float32():
    """Trap 10: head_logits of bfloat16 equals the product in float64 to float32 precision; wider types pass through."""
    hidden, weight, *_ = case(torch.bfloat16, 50)
    logits = common.head_logits(hidden, weight)
    assert logits.dtype == torch.float32 and relative(logits, hidden.double() @ weight.double().T) < 1e-6
    assert common.head_logits(hidden.double(), weight.double()).dtype == torch.float64


# --- memory

class Live(TorchDispatchMode):
    """Counts the bytes of the tensors alive at a time, those in `known` left out, and the size of the largest."""
    def __init__(self, *known):
        super().__init__()
        self.known, self.now, self.peak, self.largest = {x.untyped_storage()._cdata for x in known}, 0, 0, 0

    def free(self, key, size):
        self.known.discard(key)
        self.now -= size

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **kwargs or {})
        for x in (x for x in torch.utils._pytree.tree_leaves(out) if torch.is_tensor(x)):
            storage = x.untyped_storage()
            if storage._cdata not in self.known:
                self.known.add(storage._cdata)
                weakref.finalize(storage, self.free, storage._cdata, storage.nbytes())
                self.now += storage.nbytes()
                self.largest = max(self.largest, storage.nbytes())
        self.peak = max(self.peak, self.now)
        return out


def memory(function, *leaves):
    """Bytes at the peak of forward and backward, beyond the gradients; bytes of the largest tensor."""
    with Live(*leaves) as live:
        function().sum().backward()
    assert live.peak > sum(x.grad.nbytes for x in leaves)
    return live.peak - sum(x.grad.nbytes for x in leaves), live.largest


def test_memory_is_a_twentieth_of_the_whole_log_softmax():
    """Trap 14: beyond the gradients the peak is that of a chunk or two, and no (M, V) tensor is ever made."""
    M, V = 16384, 1536
    hidden, weight, target, _ = case(torch.float32, M, V, 8)
    whole, _ = memory(lambda: (hidden @ weight.T / T).log_softmax(-1).gather(1, target[:, None]), hidden, weight)
    hidden.grad = weight.grad = None
    assert whole >= 2 * 4 * M * V
    for with_entropy in (False, True):
        ours, largest = memory(lambda: common.ChunkedLogProbs.apply(hidden, weight, target, T, with_entropy)[0], hidden, weight)
        assert ours <= whole / 20 and largest <= 4 * M * V / 16
        hidden.grad = weight.grad = None


def test_a_long_prompt_costs_no_logits():
    """Trap 14 for the whole of token_logprobs: no tensor as large as the logits of all positions, nor of the completions."""
    model = tiny_model(vocab_size=4096, max_position_embeddings=1024)
    batch = random_batch(8, vocab_size=4096, prompt=(600, 620), completion=(140, 150))
    with Live(*model.parameters()) as live:
        common.token_logprobs(model, batch, T).sum().backward()
    assert live.largest < 4 * 4096 * batch["mask"].sum() / 2 and math.isfinite(live.peak)

"""What the three scripts share: everything that is not the algorithm.

The method      Log-probabilities, Batching, Optimiser: 250 lines to read beside grpo.py.
The sampler     Sampling: 250 lines on how completions are drawn, a token of every row at a time.
The rest        Statistics, Models, Problems, Rewards, Grading, Command line, Run: to look things
                up in.

Shapes: P prompts per step, G completions per prompt, N = P*G rows, L positions (prompt and
completion), S in a prompt, T in a completion, M completion tokens in a batch, C tokens in a chunk,
V vocabulary, H width of a hidden state, D of a head. Of a part: n <= N, s <= S, t <= T.

A rollout is a dict with one row per completion:
    ids        (N, L)  prompt, then completion, padded on the right
    attention  (N, L)  1 on prompt and completion, 0 on padding (padding has id 0, but a token may
                       have it, too)
    mask       (N, T)  float32; column t is token t of the completion, not of the row: 1 on its
                       tokens, the stop token too, 0 after them
    row        (N,)    0 ... N-1; parts of a rollout keep the numbers of their rows
    finished   (N,)    True where a stop token ended the completion
    texts      N completions
    seconds    how long it took to sample them
The scripts add rewards (N,); old_logp, ref_logp, values, returns (N, T); adv (N, 1) or (N, T).
"""
import argparse
import contextlib
import copy
import glob
import json
import math
import os
import random
import re
import shutil
import signal
import sys
import textwrap
import time
import zipfile
import zlib
from fractions import Fraction
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import torch
from filelock import FileLock
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence
from torch.utils.checkpoint import checkpoint
from tqdm import tqdm

TOY = str(Path(__file__).resolve().parent / "tests/toy")  # default model and problems

# ---- Log-probabilities ----
def token_logprobs(model, batch, temperature):
    """Compute log pi of the completion tokens, where pi = softmax(logits / temperature).
    Takes ids and attention (N, L) and mask (N, T); returns (N, T) float32, 0 outside the mask."""
    index, hidden, target = completion_states(model, batch)
    logp = chunked_logprobs(hidden, target, output_head(model), temperature)  # (M,)
    return logp.new_zeros(batch["mask"].shape).index_put(index, logp)

def token_values(model, batch):
    """Compute the critic's value of the state before each completion token, (N, T) float32."""
    index, hidden, _ = completion_states(model, batch)
    values = model.score(hidden.to(model.score.weight.dtype)).squeeze(1)  # (M,)
    return values.new_zeros(batch["mask"].shape).index_put(index, values)

def completion_states(model, batch):
    """Run the body of the model and find the states that predict the M completion tokens.
    Returns the place of each token in (N, T), a pair of indices (M,); the hidden state (M, H) one
    position before it, which predicts it; and its id (M,). No other code shifts by one."""
    row, t = batch["mask"].nonzero(as_tuple=True)  # (M,) both
    prompt_lengths = batch["attention"].sum(1) - batch["mask"].sum(1).long()  # (N,)
    position = prompt_lengths[row] + t  # (M,)
    # No attention mask: padding is on the right, and causal attention never looks there.
    hidden = body_of(model)(input_ids=batch["ids"], use_cache=False).last_hidden_state  # (N, L, H)
    return (row, t), hidden[row, position - 1], batch["ids"][row, position]

def body_of(model):
    """Return a model without its output layer; a critic (load_value) has none and stays whole."""
    # Llama 4 has a wrong base_model_prefix, so that its base_model is the whole model.
    if model.base_model is model and hasattr(model, "lm_head"):
        return model.model
    return model.base_model

CHUNK = 2 ** 26  # logits in a chunk, C*V: .27 GB in float32

def chunked_logprobs(hidden, target, head, temperature):
    """Compute logprobs C tokens at a time, (M, H) and (M,) -> (M,).
    The backward pass computes each chunk again: one more matrix product, but memory holds (C, V)
    numbers and not several times (M, V)."""
    C = CHUNK // len(head.weight)
    return torch.cat([
        checkpoint(logprobs, h, y, head, temperature, use_reentrant=False, preserve_rng_state=False)
        for h, y in zip(hidden.split(C), target.split(C))])

def logprobs(hidden, target, head, temperature):
    """Compute log softmax(logits / temperature)[target], (C, H) and (C,) -> (C,)."""
    return -cross_entropy(head_logits(hidden, head, temperature), target, reduction="none")

class Head(NamedTuple):
    """How a model makes logits: cap tanh(x / cap), or x, where x = factor (h weight^T + bias)."""
    weight: torch.Tensor  # (V, H)
    bias: torch.Tensor | None  # (V,)
    factor: float
    cap: float | None

def output_head(model):
    """Read a model's Head from its last layer and its config; check_model tests what is read."""
    layer = model.get_output_embeddings()
    config = model.config.get_text_config()  # the config itself, unless the model reads images, too
    factor = getattr(config, "logit_scale", None) or 1.0  # Cohere
    factor /= getattr(config, "logits_scaling", None) or 1.0  # Granite, MiniCPM
    cap = getattr(config, "final_logit_softcapping", None)  # Gemma
    weight = layer.weight
    if not weight.is_cuda:  # a CPU has no float32 product of 16-bit numbers: convert them once
        weight = weight.to(torch.promote_types(weight.dtype, torch.float32))  # float64 stays
    return Head(weight, layer.bias, factor, cap)

def head_logits(hidden, head, temperature=1.0):
    """Compute logits / temperature, (M, H) -> (M, V), in float32: rounded to bfloat16
    they would be off by .07."""
    if hidden.is_cuda and hidden.dtype in (torch.bfloat16, torch.float16):
        logits = Float32Product.apply(hidden, head.weight)
    else:
        logits = hidden.to(head.weight.dtype) @ head.weight.T
    if head.bias is not None:
        logits += head.bias
    if head.factor != 1:
        logits *= head.factor
    if head.cap is not None:
        logits = head.cap * (logits / head.cap).tanh()
    if temperature != 1:
        logits /= temperature
    return logits

class Float32Product(torch.autograd.Function):
    """hidden weight^T in float32, of 16-bit numbers on a GPU: torch.mm has no gradient for this."""
    @staticmethod
    def forward(ctx, hidden, weight):
        """Map (C, H) and (V, H) to (C, V)."""
        ctx.save_for_backward(hidden, weight)
        return torch.mm(hidden, weight.T, out_dtype=torch.float32)

    @staticmethod
    def backward(ctx, grad):
        """Map (C, V) to (C, H) and (V, H). The second is in float32, so that the sum over chunks is
        not rounded to 16 bits; Optimizer sets weight.grad_dtype, else torch would round it."""
        hidden, weight = ctx.saved_tensors
        grad = grad.to(weight.dtype)
        return grad @ weight, torch.mm(grad.T, hidden, out_dtype=torch.float32)

# ---- Batching ----
def minibatches(rollout, count, group_size):
    """Cut a rollout into `count` parts of about equal size, in whole groups.
    The same parts in every epoch, not shuffled: the problems come in random order already."""
    rows = torch.arange(len(rollout["ids"]), device=rollout["ids"].device)
    groups = rows.view(-1, group_size)  # (P, G)
    for part in groups.tensor_split(count):
        yield select(rollout, part.flatten())

def micro_batches(batch, tokens, doing="update"):
    """Cut a batch into micro-batches of at most `tokens` positions, padding counted.
    A longer row is one by itself. Rows are sorted by length, so that there is little padding, and
    trimmed to the longest row. A micro-batch that already holds over tokens / 16 positions ends
    early where the next row is 15 % shorter: a further pass then costs less than the padding would.
    `doing` is the text of the progress bar."""
    lengths, order = batch["attention"].sum(1).sort(descending=True)
    lengths = lengths.tolist()
    completion_lengths = batch["mask"].sum(1).long()[order].tolist()
    cuts = [0]
    for end in range(1, len(lengths)):
        # The open micro-batch has rows cuts[-1] ... end - 1. The first is the longest.
        longest, rows = lengths[cuts[-1]], end - cuts[-1]
        is_full = (rows + 1) * longest > tokens
        is_shorter = lengths[end] < 0.85 * longest and rows * longest > tokens / 16
        if is_full or is_shorter:
            cuts.append(end)
    parts = list(zip(cuts, cuts[1:] + [len(lengths)]))
    for begin, end in progress(parts, doing, "micro-batch"):
        L, T = lengths[begin], max(completion_lengths[begin:end])
        part = select(batch, order[begin:end])
        for name, value in part.items():
            if value.dim() == 2:  # a column alone, as adv (n, 1), stays
                part[name] = value[:, :L] if name in ("ids", "attention") else value[:, :T]
        yield part

def select(batch, rows):
    """Return the tensors of a batch, with these rows alone."""
    return {name: value[rows] for name, value in batch.items() if torch.is_tensor(value)}

def rollout_logprobs(model, rollout, args):
    """Compute token_logprobs of a whole rollout, (N, T)."""
    return by_micro_batch(lambda b: token_logprobs(model, b, args.temperature), rollout, args)

def rollout_values(model, rollout, args):
    """Compute token_values of a whole rollout, (N, T)."""
    return by_micro_batch(lambda b: token_values(model, b), rollout, args)

def by_micro_batch(function, rollout, args):
    """Apply `function` to the same micro-batches as update; each row gets its own results back.
    In other micro-batches a 16-bit log-prob would be rounded differently, by more than GSPO's clip
    range."""
    result = torch.zeros_like(rollout["mask"])
    for minibatch in minibatches(rollout, args.minibatches, args.group_size):
        for b in micro_batches(minibatch, args.micro_batch_tokens, "log-probs"):
            result[b["row"], :b["mask"].shape[1]] = function(b)
    return result

# ---- Optimiser ----
class Optimizer:
    """AdamW on float32 copies (masters) of a model's weights, with warm-up and norm clipping.
    With --lr 1e-6 and no masters, bfloat16 would round 98 % of the updates to 0. In
    float16 small gradients would become 0: the loss is multiplied by a scale, which halves when a
    gradient overflows and doubles after GROW_EVERY good steps (Micikevicius et al. 2018)."""
    GROW_EVERY = 200

    def __init__(self, model, lr, args, eps=1e-8):
        self.model, self.lr, self.args = model, lr, args
        self.steps_taken = 0
        self.device = "cpu" if args.offload_optimizer else model.device
        if args.gradient_checkpointing:  # set here, as only a trained model has an Optimizer
            model.activation_checkpointing_enable()  # gradient_checkpointing_enable's new name
        self.weights = {name: w for name, w in model.named_parameters() if w.requires_grad}
        self.masters = {}
        for name, weight in self.weights.items():
            weight.grad_dtype = torch.float32  # torch then sums .grad in float32
            # No copy of a float32 weight on this device: its master is the weight itself.
            self.masters[name] = weight.detach().to(self.device, torch.float32)
        self.float16 = any(weight.dtype == torch.float16 for weight in self.weights.values())
        self.loss_scale = 2.0 ** 14 if self.float16 else 1.0
        self.good_steps = 0  # since the last overflow
        self.adamw = torch.optim.AdamW(
            self.masters.values(), lr, betas=(0.9, 0.95),  # .999 averages over 1000 steps: too many
            eps=eps, weight_decay=0.0, fused=True)

    def backward(self, loss):
        """Add the gradient of `loss` to those of the micro-batches before it."""
        (loss * self.loss_scale).backward()

    def step(self, prefix=""):
        """Take one step, unless the gradient is not finite, and clear it.
        Returns statistics, whose names begin with `prefix`."""
        weights, masters = self.weights.values(), self.masters.values()
        if self.float16:
            for weight in weights:
                if weight.grad is not None:
                    weight.grad /= self.loss_scale
        norm = torch.nn.utils.clip_grad_norm_(weights, self.args.max_grad_norm).item()
        finite = math.isfinite(norm)
        stats = {"skipped": (not finite, 1)}
        if finite:
            stats |= {"grad_norm": (norm, 1), "grad_clipped": (norm > self.args.max_grad_norm, 1)}
            self.steps_taken += 1
            warm_up = min(1, self.steps_taken / max(1, self.args.warmup_steps))
            self.adamw.param_groups[0]["lr"] = self.lr * warm_up
            for weight, master in zip(weights, masters):
                master.grad = None if weight.grad is None else weight.grad.to(self.device)
            self.adamw.step()
            for weight, master in zip(weights, masters):
                weight.data.copy_(master)  # rounds to the weight's dtype
        for tensor in (*weights, *masters):
            tensor.grad = None
        if self.float16:
            self.good_steps = self.good_steps + 1 if finite else 0
            if not finite:
                self.loss_scale /= 2
            elif self.good_steps % self.GROW_EVERY == 0:
                self.loss_scale *= 2
        return {prefix + name: value for name, value in stats.items()}

    def state_dict(self):
        """Return all that a resumed run needs. Not the weights: they are the masters, rounded."""
        return {"masters": self.masters, "adamw": self.adamw.state_dict(),
                "steps_taken": self.steps_taken, "loss_scale": self.loss_scale,
                "good_steps": self.good_steps}

    def load_state_dict(self, state):
        """Set masters, moments and the weights too.
        KeyError, ValueError or RuntimeError if the state belongs to another model."""
        self.adamw.load_state_dict(state["adamw"])
        for name, master in self.masters.items():
            master.data.copy_(state["masters"][name])
            self.weights[name].data.copy_(master)
        self.steps_taken = state["steps_taken"]
        self.loss_scale, self.good_steps = state["loss_scale"], state["good_steps"]

# ---- Sampling ----
@torch.no_grad()
def generate(model, tokenizer, prompts, group_size=1, max_new_tokens=48, temperature=1.0,
             cuda_graphs=True):
    """Sample group_size completions of each of P prompts (lists of ids); greedily at temperature 0.
    Returns a rollout. Samples come from softmax(logits / temperature) and nothing else: the
    generate of transformers would add the model's own top_k and the like. A prompt is read once
    for its group, finished rows are dropped, and on a GPU each token replays a CUDA graph."""
    start, was_training = time.perf_counter(), model.training
    model.eval()  # in training mode gradient checkpointing silently drops the cache
    stop = stop_ids(model, tokenizer)
    rows = [prompt for prompt in prompts for _ in range(group_size)]  # N prompts
    # Set by check_model for a model that keeps more than keys and values.
    if getattr(model, "sampled_by_transformers", False):
        completions, _ = sample_with_transformers(model, rows, max_new_tokens, temperature, stop)
    else:
        sampler = Sampler(model, rows, group_size, max_new_tokens, temperature, stop)
        completions = sampler.run(cuda_graphs)
    completions = [up_to_stop(completion, stop) for completion in completions]
    model.train(was_training)
    rollout = as_rollout(rows, completions, model.device)
    rollout["finished"] = torch.tensor([c[-1] in stop for c in completions], device=model.device)
    rollout["texts"] = tokenizer.batch_decode(completions, skip_special_tokens=True)
    rollout["seconds"] = time.perf_counter() - start
    return rollout

def stop_ids(model, tokenizer):
    """Return the ids that end a completion; chat models have several."""
    eos = model.generation_config.eos_token_id
    several = eos if isinstance(eos, list) else [eos]
    return sorted({tokenizer.eos_token_id, *several} - {None})

def up_to_stop(completion, stop):
    """Cut a completion, a list of ids, after its first stop token."""
    ends = [t for t, token in enumerate(completion, 1) if token in stop]
    return completion[:ends[0]] if ends else completion

def as_rollout(prompts, completions, device="cpu"):
    """Lay out N prompts and completions, lists of ids, as a rollout's tensors."""
    rows = [torch.tensor(p + c) for p, c in zip(prompts, completions)]
    tensors = {
        "ids": pad_sequence(rows, batch_first=True),
        "attention": pad_sequence([torch.ones_like(row) for row in rows], batch_first=True),
        "mask": pad_sequence([torch.ones(len(c)) for c in completions], batch_first=True),
        "row": torch.arange(len(rows))}
    return {name: tensor.to(device) for name, tensor in tensors.items()}

class KVCache:
    """Keys and values of the positions that were read, given to a model as its past_key_values.
    Position p of row i is at [i, p], so that no prompt is padded on the left. transformers asks
    two things of a cache: update() and get_seq_length()."""
    def __init__(self, length):
        self.length = length
        self.layers = []  # per layer [keys, values], each (rows, length, heads, D)
        self.index = None  # where the next ones go: row (n, 1), position (n, s)
        self.width = None  # attention reads the first `width` positions

    def update(self, keys, values, layer, *_):
        """Keep a layer's new keys and values (n, heads, s, D); return all that it attends to."""
        if layer == len(self.layers):
            self.layers.append([new.new_zeros(len(new), self.length, new.shape[1], new.shape[3])
                                for new in (keys, values)])
        visible = []
        for cached, new in zip(self.layers[layer], (keys, values)):
            cached[self.index] = new.transpose(1, 2)
            visible.append(cached[:, :self.width].transpose(1, 2))
        return visible

    def get_seq_length(self, *_):
        """Return 0: models would number positions from it, but are given position_ids."""
        return 0

    def take(self, rows):
        """Make row i what row rows[i] was, layer by layer: memory never holds a second cache."""
        for layer in self.layers:
            layer[:] = [cached[rows] for cached in layer]

class Sampler:
    """Rows of completions that are being written, and the cache of what the model has read.
    next_token() changes tensors in place and never their shapes, so that a CUDA graph can replay
    it. Between tokens run() drops finished rows, which changes shapes."""
    def __init__(self, model, rows, group_size, max_new_tokens, temperature, stop):
        device = model.device
        self.model, self.group_size, self.temperature = model, group_size, temperature
        self.max_new_tokens = max_new_tokens
        self.head = output_head(model)
        self.stop = torch.tensor(stop, device=device)
        self.S = max(len(row) for row in rows)
        # On a GPU each width of the attention is another graph, so it grows in large steps.
        self.width_step = 256 if device.type == "cuda" else 1
        self.cache = KVCache(round_up(self.S + max_new_tokens, self.width_step))
        self.cache.width = round_up(self.S, self.width_step)
        padded = [row + [0] * (self.cache.length - len(row)) for row in rows]
        self.ids = torch.tensor(padded, device=device)  # (N, length)
        self.prompt_lengths = torch.tensor([len(row) for row in rows], device=device)  # (N,)
        self.position = self.prompt_lengths - 1  # (N,) of the last token
        self.running = torch.ones_like(self.position, dtype=torch.bool)  # (N,) no stop token yet
        self.active = torch.arange(len(rows), device=device)  # (n,) the rows that are in the cache

    def run(self, cuda_graphs):
        """Write up to max_new_tokens tokens of every row; returns N completions, lists of ids."""
        graph = Graph(self.next_token) if cuda_graphs and self.ids.is_cuda else None
        self.append(self.read_prompts())
        for t in progress(range(1, self.max_new_tokens), "sampling", "token"):
            if t % 4 == 0:  # not at every token: reading a value waits for the GPU
                keep = self.running[self.active].nonzero().squeeze(1)  # places in self.active
                if len(keep) == 0:
                    break
                if len(keep) < len(self.active) / 2:  # sooner would record too many graphs
                    self.active = self.active[keep]
                    self.cache.take(keep)
            self.cache.width = round_up(self.S + t, self.width_step)
            if graph:
                graph.run(shape=(len(self.active), self.cache.width))
            else:
                self.next_token()
        return self.completions()

    def completions(self):
        """Return what is written so far, N lists of ids, some of which go on after a stop token."""
        starts, ends = self.prompt_lengths.tolist(), (self.position + 1).tolist()
        return [row[start:end] for row, start, end in zip(self.ids.tolist(), starts, ends)]

    def next_token(self):
        """Write one token of every active row."""
        self.append(self.read_last())

    def read_prompts(self):
        """Read each prompt once for its group; returns the logits of the first tokens, (N, V).
        The padding after a shorter prompt is read into the cache too. It does no harm: no token of
        a prompt looks to its right, and each new token overwrites a padding before it looks."""
        ids = self.ids[::self.group_size, :self.S]  # (P, S)
        last = self.position[::self.group_size]  # (P,)
        positions = torch.arange(self.S, device=ids.device).expand_as(ids)
        logits = self.read(ids, positions, last)  # (P, V)
        self.cache.take(self.active // self.group_size)  # from P rows to N
        return logits.repeat_interleave(self.group_size, 0)

    def read_last(self):
        """Read the last token of each active row; returns the logits of the next ones, (n, V)."""
        position = self.position[self.active]  # (n,)
        return self.read(self.ids[self.active, position][:, None], position[:, None], last=0)

    def read(self, ids, positions, last):
        """Read ids (n, s) at `positions` (n, s); returns the logits after column `last`, (n, V)."""
        row = torch.arange(len(ids), device=ids.device)  # (n,)
        self.cache.index = (row[:, None], positions)
        hidden = body_of(self.model)(
            input_ids=ids, attention_mask=attention_masks(self.model, positions, self.cache.width),
            position_ids=positions, past_key_values=self.cache, use_cache=True,
        ).last_hidden_state  # (n, s, H)
        return head_logits(hidden[row, last], self.head)

    def append(self, logits):
        """Draw a token for each active row from softmax(logits / temperature), (n, V); write it.
        A finished row writes on after its stop token until it is dropped."""
        token = draw(logits, self.temperature)  # (n,)
        self.position[self.active] += 1
        self.ids[self.active, self.position[self.active]] = token
        self.running[self.active] &= (token[:, None] != self.stop).all(1)

class Graph:
    """A step of sampling as a CUDA graph, recorded anew when the shape of its tensors changes."""
    def __init__(self, step):
        self.step, self.graph, self.shape = step, None, None

    def run(self, shape):
        """Do the step: replay its graph, or where `shape` is new, do it once and then record it."""
        if shape == self.shape:
            self.graph.replay()
            return
        self.step()  # a warm-up: what libraries do at a first call must not be recorded
        self.graph, self.shape = torch.cuda.CUDAGraph(), shape
        with or_fail("this model cannot be recorded: give --no-cuda_graphs"):
            with torch.cuda.graph(self.graph):  # fails if the model reads a value, as by .item()
                self.step()  # recorded, not run; a replay draws new random numbers

def draw(logits, temperature):
    """Draw one id per row from softmax(logits / temperature), (n, V) -> (n,); at 0 take the best.
    By inverting the cumulative distribution: one random number per row, not V of them."""
    if temperature == 0:
        return logits.argmax(-1)
    # float64: a GPU adds in parallel, and float32 sums might decrease from id to id.
    cumulative = (logits / temperature).softmax(-1).cumsum(-1, dtype=torch.float64)  # (n, V)
    # u is in (0, 1]: the first sum that reaches it is never that of an id with p = 0.
    u = 1 - torch.rand(len(logits), 1, device=logits.device)
    return torch.searchsorted(cumulative, u * cumulative[:, -1:]).squeeze(1)

def round_up(n, step):
    """Return the first multiple of `step` from n on."""
    return math.ceil(n / step) * step

def attention_masks(model, positions, width):
    """Make what is added to the attention scores of tokens at `positions` (n, s).
    That is 0, or -inf where a token must not look, (n, 1, s, width); a dict of such masks by the
    kind of layer if a model has several kinds."""
    config = model.config.get_text_config()
    query = positions[:, None, :, None]  # (n, 1, s, 1)
    column = torch.arange(width, device=positions.device)  # (width,)
    window = getattr(config, "sliding_window", None)
    chunk = getattr(config, "attention_chunk_size", None)
    # The first column that a token sees, by the kind of layer; the last is its own.
    first = {"full_attention": 0, "sliding_attention": query - window + 1 if window else 0}
    if chunk:
        first["chunked_attention"] = query // chunk * chunk
    # Without layer_types all layers are of one kind.
    only_kind = "sliding_attention" if window else "full_attention"
    kinds = set(getattr(config, "layer_types", None) or [only_kind])
    if not kinds <= first.keys():
        raise ValueError(f"attention layers of unknown kind: {', '.join(kinds - first.keys())}")
    masks = {}
    for kind in kinds:
        is_hidden = (column > query) | (column < first[kind])
        masks[kind] = torch.where(is_hidden, -math.inf, 0.0).to(model.dtype)
    return masks if len(kinds) > 1 else masks[kinds.pop()]

def sample_with_transformers(model, prompts, max_new_tokens, temperature, stop, logits=False):
    """Sample a completion of each prompt by transformers' own generate, which is slow.
    For models that keep more than keys and values, such as recurrent states. The model's own
    top_k and the like are left out. Returns the completions, lists of ids that go on after a
    stop token, and if asked the logits of each token, T of (N, V)."""
    import transformers
    S = max(len(prompt) for prompt in prompts)
    pad = stop[0] if stop else 0
    ids = torch.tensor([[pad] * (S - len(p)) + p for p in prompts])  # padded on the left
    attention = torch.tensor([[0] * (S - len(p)) + [1] * len(p) for p in prompts])
    own_settings = model.generation_config
    model.generation_config = transformers.GenerationConfig()  # without its top_p and the like
    head = output_head(model)._replace(factor=1.0, cap=None)  # the model applies these itself

    def float32_logits(layer, inputs, output):
        """Replace the layer's 16-bit logits by float32 ones: once per token, so move the bar."""
        bar.update()  # the bar of the block below
        return head_logits(inputs[0][:, -1], head)[:, None]
    hook = model.get_output_embeddings().register_forward_hook(float32_logits)
    # Leaving the block removes the hook.
    with hook, progress(range(max_new_tokens), "sampling", "token") as bar:
        output = model.generate(
            ids.to(model.device), attention_mask=attention.to(model.device),
            top_k=0,  # else 50, with any configuration
            max_new_tokens=max_new_tokens, eos_token_id=stop or None, pad_token_id=pad,
            do_sample=temperature > 0, temperature=temperature or None, output_logits=logits,
            return_dict_in_generate=True)
    model.generation_config = own_settings
    return output.sequences[:, S:].tolist(), output.logits

# ---- Statistics ----
def means(logged):
    """Reduce what the micro-batches of an update logged to one number per name.
    Each entry of `logged` is a dict. A value is a pair (sum, count), of which the mean over all
    entries is taken; a name that ends in _max has a number, of which the maximum is taken."""
    result = {}
    names = dict.fromkeys(name for stats in logged for name in stats)  # in the order they came
    for name in names:
        values = [stats[name] for stats in logged if name in stats]
        is_max = name.endswith("_max")
        if any(isinstance(value, tuple) == is_max for value in values):
            raise TypeError(f'stats["{name}"] is {values}: give pairs (sum, count), or a number '
                            "under a name that ends in _max")
        if is_max:
            result[name] = float(max(values))
        else:
            sums, counts = zip(*values)
            result[name] = float(sum(sums) / sum(counts))
    return result

def padding(batch):
    """Count the positions of a micro-batch that hold no token, as a statistic (sum, count)."""
    return {"padding": ((batch["attention"] == 0).sum(), batch["attention"].numel())}

def rollout_stats(rollout, group_size):
    """Compute what is logged of a rollout, a dict of numbers."""
    mask, groups = rollout["mask"], rollout["rewards"].view(-1, group_size)
    tokens = mask.sum()
    stats = {
        "reward": groups.mean(),
        "completion_length": mask.sum(1).mean(),
        "truncated": 1 - rollout["finished"].float().mean(),
        "entropy": -rollout["old_logp"].sum() / tokens,  # estimated from the samples
        "rollout_tokens_per_s": tokens / rollout["seconds"]}
    if group_size > 1:
        stats["zero_variance_groups"] = (groups == groups[:, :1]).all(1).float().mean()
    if "ref_logp" in rollout:  # k3, whatever the objective uses; 0 outside the mask, as log-probs
        log_x = rollout["ref_logp"] - rollout["old_logp"]  # (N, T)
        stats["kl"] = (log_x.exp() - log_x - 1).sum() / tokens
    return {name: value.item() for name, value in stats.items()}

def explained_variance(returns, values, mask):
    """Compute 1 - Var(returns - values) / Var(returns) over tokens; nothing if all are equal."""
    returns, values = returns[mask > 0], values[mask > 0]  # (M,) both
    if returns.var() < 1e-8:  # rounding
        return {}
    return {"explained_variance": (1 - (returns - values).var() / returns.var()).item()}

@torch.no_grad()
def ratio_noise(policy, rollout, args, clipped):
    """Measure how far rounding alone moves the ratio, on the first 32 rows of the first rollout.
    Any change of the weights, however small, makes pi round differently from pi_old. The rounding
    error of one pass is measured against a better one: one row at a time, and in float32. The log
    of the ratio is the difference of two passes, so that its deviation is sqrt 2 times that error.
    Returns this deviation for a token, and for the mean over a completion. Warns if --eps_low or
    --eps_high is less than twice that of `clipped`, "token" or "sequence"."""
    some = select(rollout, slice(32))
    # The copy takes no more memory than gradients and moments, which are not there yet.
    exact = policy if args.dtype == "float32" else copy.deepcopy(policy).float()
    gaps = []
    for b in micro_batches(some, 1, "rounding"):  # at most 1 position: so one row each
        gaps.append((token_logprobs(exact, b, args.temperature) - b["old_logp"])[0])  # (t,)
    tokens, sequences = torch.cat(gaps), torch.stack([gap.mean() for gap in gaps])
    # Twice the mean square: the error of pi and that of pi_old.
    noise = {"token": (2 * tokens.square().mean()).sqrt().item(),
             "sequence": (2 * sequences.square().mean()).sqrt().item()}
    for name in ("eps_low", "eps_high"):
        eps = getattr(args, name, math.inf)  # a script of your own may have neither
        if eps < 2 * noise[clipped]:
            warn(f"rounding in {args.dtype} moves the log of a {clipped}'s ratio by "
                 f"{noise[clipped]:.1g}: --{name} {eps:g} clips at random; give a wider one or a "
                 "finer --dtype")
        if clipped == "sequence" and 0.1 <= eps < math.inf:
            warn(f"--{name} {eps:g} hardly ever clips a sequence; usually 3e-4 to .01")
    return {"ratio_noise": noise["token"], "sequence_ratio_noise": noise["sequence"]}

def evaluate(policy, tokenizer, problems, reward, args):
    """Compute accuracy on held-out problems, greedy and sampled; the samples' reward and length.
    Where c of n = --eval_samples samples are right, the unbiased estimate is
    pass@k = 1 - C(n - c, k) / C(n, k) (Chen et al. 2021, eq. 1). A reward of 1 or more is right."""
    torch.manual_seed(args.seed)  # the same draws at every evaluation
    n = args.eval_samples
    greedy, _ = sample_rewards(policy, tokenizer, problems, reward, 1, 0.0, args)
    sampled, length = sample_rewards(policy, tokenizer, problems, reward, n, args.temperature, args)
    right = sampled >= 1  # (problems, n)
    result = {
        "eval_accuracy": (greedy >= 1).float().mean().item(),
        "eval_sampled_accuracy": right.float().mean().item(),
        "eval_reward": sampled.mean().item(),
        "eval_completion_length": length}
    for k in [2 ** i for i in range(1, n.bit_length())]:  # 2, 4, 8 ... up to n
        misses = [math.comb(n - c, k) / math.comb(n, k) for c in right.sum(1).tolist()]
        result[f"eval_pass@{k}"] = 1 - sum(misses) / len(misses)
    return result

def sample_rewards(policy, tokenizer, problems, reward, n, temperature, args):
    """Reward n samples of each problem: returns rewards (problems, n) and the mean length."""
    rewards, lengths = [], []
    problems = sorted(problems, key=lambda problem: len(problem["prompt"]))  # little padding
    size = max(1, args.prompts * args.group_size // n)  # as many rows at a time as in a rollout
    starts = range(0, len(problems), size)
    for start in progress(starts, f"evaluating at temperature {temperature:g}", "batch"):
        part = problems[start:start + size]
        rollout = generate(policy, tokenizer, [problem["prompt"] for problem in part], n,
                           args.max_new_tokens, temperature, args.cuda_graphs)
        rewards.append(rewards_of(reward, part, rollout).view(-1, n))
        lengths.append(rollout["mask"].sum(1))
    return torch.cat(rewards), torch.cat(lengths).mean().item()

def progress(items, doing, unit):
    """Iterate over `items` with a bar below that of the run: in a terminal, after 2 seconds."""
    return tqdm(items, desc=doing, unit=unit, leave=False, disable=None, delay=2)

# ---- Models ----
def load_model(kind, flag, args):
    """Load the model (class `kind`) that --`flag` names, without dropout, and its tokenizer."""
    import transformers  # takes seconds: after the flags are known to be good
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    source = getattr(args, flag)
    hint = "" if Path(source).is_dir() else "no directory, "
    with or_fail(f"--{flag} {source}: {hint}cannot be loaded"):
        model, found = getattr(transformers, kind).from_pretrained(
            source, dtype=getattr(torch, args.dtype), use_safetensors=True,
            output_loading_info=True, ignore_mismatched_sizes=True)  # listed below, not raised
        tokenizer = transformers.AutoTokenizer.from_pretrained(source)
    missing = [*found["missing_keys"], *(key for key, *_ in found["mismatched_keys"])]
    if tokenizer.vocab_size < 3:  # without its files transformers makes a bare one
        missing.append("tokenizer")
    if missing:
        fail(f"--{flag} {source}: lacks or has in another shape: {', '.join(missing)}")
    # With dropout or a router's noise, old and new log-probs would be of two networks.
    for holder in (*model.modules(), model.config.get_text_config()):
        for name, value in vars(holder).items():
            if isinstance(value, float) and (name == "p" or "drop" in name or "jitter" in name):
                setattr(holder, name, 0.0)
    # Gradient checkpointing works in train mode only, which changes nothing else without dropout.
    return model.to(args.device).train(), tokenizer

def load_policy(args):
    """Load --model and its tokenizer."""
    policy, tokenizer = load_model("AutoModelForCausalLM", "model", args)
    rows = policy.get_input_embeddings().num_embeddings
    stop = stop_ids(policy, tokenizer)
    if len(tokenizer) > rows or not stop:
        fail(f"--model {args.model}: tokenizer of {len(tokenizer)} tokens, embedding of {rows} "
             f"rows, end tokens {stop}: tokens must fit the embedding, and one must end a text")
    return policy, tokenizer

def load_value(policy):
    """Make PPO's value model: a copy of the policy with a float32 scalar head that starts at 0."""
    model = copy.deepcopy(body_of(policy))
    weight = policy.get_output_embeddings().weight
    # float32: near 1 bfloat16 has steps of .004
    model.score = torch.nn.Linear(weight.shape[1], 1, device=weight.device)
    torch.nn.init.zeros_(model.score.weight)
    torch.nn.init.zeros_(model.score.bias)
    return model

def resolve_and_check(args, policy, trained_models=1):
    """Settle what depends on the model, print the settings, and stop if the model does not fit."""
    size = policy.num_parameters()
    resolve_defaults(args, policy)
    print(f"{size / 1e6:,.2f}M parameters")
    settings = " ".join(f"--{name}={value}" for name, value in vars(args).items()
                        if name not in ("script", "problems_hash"))  # which are not flags
    print(textwrap.fill(settings, WIDTH, break_on_hyphens=False))
    check_memory(args, size, trained_models)
    with or_fail(f"--model {args.model}: {type(policy).__name__} cannot be read"):
        check_model(policy, args)

def resolve_defaults(args, policy):
    """Replace every default that is a dict by its value for this model's size, or for this --dtype.
    Also sets one thread for the toy, and --max_prompt_tokens to what the model has room for."""
    kind = "toy" if policy.num_parameters() < 1_000_000 else "real"
    for name, value in vars(args).items():
        if isinstance(value, dict):  # by size, or as gspo.py's --eps_low by --dtype
            setattr(args, name, value[kind if kind in value else args.dtype])
    if kind == "toy":
        torch.set_num_threads(1)  # the same sums on every machine; more threads gain little
    config = policy.config.get_text_config()
    positions = getattr(config, "max_position_embeddings", None)
    positions = positions or getattr(config, "max_seq_len", None) or math.inf  # MPT
    if positions <= args.max_new_tokens:
        fail(f"--max_new_tokens {args.max_new_tokens}: --model {args.model} has only {positions} "
             "positions, for prompt and completion")
    args.max_prompt_tokens = min(args.max_prompt_tokens, positions - args.max_new_tokens)

def check_memory(args, size, trained_models):
    """Stop if `size` parameters do not fit the GPU, or their checkpoint the disk."""
    weight = 4 if args.dtype == "float32" else 2  # bytes
    held = weight + 4  # and its gradient
    if not args.offload_optimizer:
        held += 8 if args.dtype == "float32" else 12  # moments 8; in 16 bits a master too, 4
    held *= size * trained_models
    if getattr(args, "beta", 0) > 0:  # a script of your own may have none
        held += size * weight  # the reference
    if args.device.startswith("cuda") and held > torch.cuda.mem_get_info(args.device)[1]:
        fail(f"--model {args.model}: {held / 1e9:.0f} GB do not fit the GPU: try "
             "--offload_optimizer, --beta 0")
    saved = size * (weight + 4 + 8) * trained_models  # weight, master, moments
    # A new checkpoint is written before the old one goes: room for two, unless the run saves once
    # only, or is resumed and has the old one on the disk already.
    copies = 1 if args.resume or args.save_every >= args.steps else 2
    if copies * saved > shutil.disk_usage(args.out).free:
        fail(f"--out {args.out}: the disk has no room for {copies} x {saved / 1e9:.1f} GB of "
             f"checkpoints; --save_every {args.steps} needs room for one only")

@torch.no_grad()
def check_model(model, args):
    """Stop if what we compute with a model is not what the model itself would compute.
    Families scale, bias or cap their logits, are random in training, or keep a memory of their
    own. Three random prompts are read; the longest, with T tokens, is as long as a run allows. The
    pass in training mode is also timed, for say_how_long."""
    T = 4
    longest = max(2 * T, args.max_prompt_tokens + args.max_new_tokens)  # room for a prompt before T
    rng, vocabulary = random.Random(0), range(model.get_input_embeddings().num_embeddings)
    prompts = [rng.choices(vocabulary, k=k) for k in (longest - T, longest // 2, 3)]
    close = 1e-4 if model.dtype == torch.float32 else 0.01
    close_sampled = 10 * close  # other kernels and shapes round differently

    # As in training: the body, then our head.
    ids = torch.tensor(prompts[:1], device=model.device)  # (1, L)
    own = model.eval()(ids, use_cache=False).logits[0, -T:]  # (T, V)
    states = body_of(model)(input_ids=ids, use_cache=False).last_hidden_state[0]  # (L, H)
    states.sum().item()  # waits until the GPU has finished
    start = time.perf_counter()
    in_training = body_of(model.train())(input_ids=ids, use_cache=False).last_hidden_state[0]
    in_training.sum().item()
    say_how_long(args, ids.numel() / (time.perf_counter() - start))
    model.eval()
    model.sampled_by_transformers = False
    if not own.isfinite().all():
        problem = f"has logits that are not finite in {args.dtype}"
    elif differ(head_logits(states[-T:], output_head(model)), own, close):
        problem = "changes its logits after the head"
    elif differ(in_training, states, close):
        problem = "is random or different in training mode"
    else:
        problem = sampling_problem(model, prompts, T, close_sampled)  # None if all is well
        if problem:
            print(f"the model {problem}: transformers' own generate is to sample, which is slow")
            model.sampled_by_transformers = True
            problem = sampling_problem(model, prompts, T, close_sampled)
    model.train()
    if problem:
        fail(f"--model {args.model}: {type(model).__name__} {problem}: not supported")

def sampling_problem(model, prompts, T, tolerance):
    """Write T tokens greedily, compare the logits with the model's own; what differs, or None."""
    try:
        if model.sampled_by_transformers:
            completions, logits = sample_with_transformers(model, prompts, T, 0.0, [], logits=True)
        else:
            sampler = Sampler(model, prompts, 1, T, temperature=0.0, stop=[])
            sampler.cache.width = sampler.cache.length  # all of it, so that it need not grow
            logits = []
            for t in range(T):
                logits.append(sampler.read_last() if t else sampler.read_prompts())
                sampler.append(logits[-1])
            completions = sampler.completions()
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # whatever a family raises
        reason = f"{type(error).__name__}: {error}"
        return f"cannot be sampled from: {textwrap.shorten(reason, 200)}"
    for i, (prompt, completion) in enumerate(zip(prompts, completions)):
        ids = torch.tensor([prompt + completion[:-1]], device=model.device)
        own = model(ids, use_cache=False).logits[0, -T:]  # (T, V), those that predict `completion`
        if differ(torch.stack([each[i] for each in logits]), own, tolerance):
            return "has other logits token by token"

def differ(found, expected, tolerance):
    """Tell whether they differ by over `tolerance` times the largest deviation of `expected`."""
    scale = (expected - expected.mean(-1, keepdim=True)).abs().max()
    error = (found.float() - expected.float()).abs().max()
    return not error <= tolerance * scale  # nan differs, too

def say_how_long(args, tokens_per_s):
    """Warn where a run may not end in a day, by the speed at which one long row was read.
    A run on a CPU takes at least this long; one on a GPU may be faster, as it reads many rows at
    once."""
    evaluation = args.eval_problems * (1 + args.eval_samples) * args.max_new_tokens / tokens_per_s
    tokens = args.prompts * args.group_size * args.max_new_tokens
    # Passes: sample 1, log-probs 1; an epoch 1 forward, and backward, which takes as long as 2.
    step = tokens * (2 + 3 * args.epochs) / tokens_per_s
    if args.steps * step + (1 + args.steps / args.eval_every) * evaluation > 24 * 3600:
        warn(f"at {tokens_per_s:.0f} tokens/s an evaluation may take at least "
             f"{evaluation / 60:.0f} minutes and a step {step / 60:.0f}: lower --max_new_tokens, "
             "--eval_problems, --prompts or --steps")

# ---- Problems ----
def load_problems(args, tokenizer, reward):
    """Load the training and the held-out problems.
    A problem is a row of --dataset with "question" and "answer" (texts) and "prompt" (ids)."""
    splits = read_splits(args.dataset)
    if list(splits) == [args.split] and args.eval_split == "test":  # --eval_split's default
        rows = splits[args.split]
        train = [row for row in rows if not is_held_out(row, args)]
        held_out = [row for row in rows if is_held_out(row, args)]
    else:
        if args.eval_split == args.split:
            warn("--eval_split is --split: what is trained on is not held out")
        with or_fail(f"--split, --eval_split: --dataset {args.dataset} has {', '.join(splits)}"):
            train, held_out = splits[args.split], splits[args.eval_split]
    needs_answer = reward is answer_reward
    train = prepare(train, tokenizer, args, "train on", needs_answer)
    held_out = prepare(held_out, tokenizer, args, "hold out", needs_answer)
    texts = "".join(problem["question"] + problem["answer"] for problem in train)
    now = zlib.crc32(texts.encode())
    if getattr(args, "problems_hash", now) != now:  # a resumed run has it from args.json
        warn(f"--dataset {args.dataset} has changed since the run began")
    args.problems_hash = now
    count = min(args.eval_problems, len(held_out))
    return train, random.Random(0).sample(held_out, count)  # the same with every --seed

def is_held_out(row, args):
    """Tell whether a row is in the held-out fifth.
    Its question alone decides: every run splits alike, and a question that occurs twice is on one
    side."""
    question = str(row.get(args.question_column))
    return random.Random(question).random() < 0.2

def read_splits(source):
    """Read a file, a directory or a data set of the hub: {split: list of rows}."""
    formats = {".jsonl": "json", ".json": "json", ".csv": "csv", ".parquet": "parquet"}
    path = Path(source)
    if not path.exists() and "/" not in source:  # datasets would read "csv" as its csv loader
        fail(f"--dataset {source}: no such file or directory; a hub name is owner/name")
    with or_fail(f"--dataset {source}: no readable {', '.join(formats)}, directory or hub name"):
        import datasets  # takes seconds
        datasets.disable_progress_bars()
        datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # its errors are raised as well
        if path.is_file():
            if path.stat().st_size == 0:
                raise ValueError("it is empty")
            reader = formats[path.suffix.lower()]
            splits = datasets.load_dataset(reader, data_files=glob.escape(source))
        else:
            if path.is_dir():
                source = os.path.abspath(source)  # a/b would be a hub name, too
                if glob.has_magic(source):
                    raise ValueError("datasets reads [, * and ? in its name as a pattern")
            configs = datasets.get_dataset_config_names(source)
            splits = datasets.load_dataset(source, "main" if "main" in configs else None)  # gsm8k
        return {split: rows.to_list() for split, rows in splits.items()}

def prepare(rows, tokenizer, args, use, needs_answer):
    """Turn rows into problems; those that cannot be used are counted and left out."""
    columns = [args.question_column]
    if needs_answer:
        columns.append(args.answer_column)
    if rows and not set(columns) <= set(rows[0]):
        fail(f"--dataset {args.dataset}: has columns {', '.join(rows[0])}, not "
             f"{' and '.join(columns)}: see --question_column, --answer_column")
    problems, left_out = [], {"no question": 0, "too long": 0, "no readable answer": 0}
    for row in rows:
        chat = read_chat(row, args)
        question = chat[-1]["content"]
        prompt = prompt_ids(chat, tokenizer, args)
        answer = text_of(row, args.answer_column, args)
        if not question or not prompt:
            left_out["no question"] += 1
        elif len(prompt) > args.max_prompt_tokens:
            left_out["too long"] += 1
        elif needs_answer and not readable(answer):
            left_out["no readable answer"] += 1
        else:
            problems.append(row | {"question": question, "answer": answer, "prompt": prompt})
    counts = ", ".join(f"{count} {reason}" for reason, count in left_out.items())
    summary = f"{len(problems)} problems to {use}; left out of {len(rows)}: {counts}"
    if not problems:
        fail(f"--dataset {args.dataset}: {summary}. Too long is over {args.max_prompt_tokens} "
             "tokens: --max_prompt_tokens, or what --max_new_tokens leaves of the model's "
             "positions. See also --split, --eval_split: of one split a fifth is held out")
    print(summary)
    ids = [token for problem in problems for token in problem["prompt"]]
    if ids.count(tokenizer.unk_token_id) > len(ids) / 2:  # for example the toy, asked in words
        fail(f"--model {args.model}: its tokenizer does not know most of --dataset {args.dataset}: "
             "give another --model")
    return problems

def text_of(row, column, args):
    """Return what a column holds as text, "" if nothing; a list or dict is refused."""
    value = row.get(column)
    if value is None or value != value:  # nan: an empty cell of a table
        return ""
    if isinstance(value, (list, dict)):
        fail(f"--dataset {args.dataset}: column {column} holds a {type(value).__name__}, not text")
    return str(value)

def read_chat(row, args):
    """Return a row's question as messages; it may be a text, or messages already (as in TRL)."""
    value = row.get(args.question_column)
    is_chat = isinstance(value, list) and value and all(
        isinstance(message, dict) and isinstance(message.get("content"), str)
        and "role" in message for message in value)
    if is_chat:
        chat = list(value)
    else:
        chat = [{"role": "user", "content": text_of(row, args.question_column, args)}]
    if args.system_prompt and chat[0]["role"] != "system":
        chat.insert(0, {"role": "system", "content": args.system_prompt})
    return chat

def prompt_ids(chat, tokenizer, args):
    """Turn a chat into token ids: by the chat template, or as its texts, each with a newline."""
    if not tokenizer.chat_template:
        return tokenizer("".join(message["content"] + "\n" for message in chat))["input_ids"]
    template = tokenizer.apply_chat_template
    with or_fail(f"--model {args.model}: its chat template fails"):
        try:
            text = template(chat, add_generation_prompt=True, tokenize=False)
        except Exception:  # often no system role: join it to the question
            if chat[0]["role"] == "system":
                system = chat.pop(0)["content"]
                chat[0] = chat[0] | {"content": f"{system}\n\n{chat[0]['content']}"}
            text = template(chat, add_generation_prompt=True, tokenize=False)
        if chat[-1]["content"].strip() not in text:
            raise ValueError(f"it leaves out the question {chat[-1]['content']!r}")
    return tokenizer(text, add_special_tokens=False)["input_ids"]  # the template adds them

def batch_of(problems, step, args):
    """Return the P problems of a step.
    All problems are shuffled, used up, shuffled anew, and so on. --seed and the step alone say
    which come now, so that there is no state to save."""
    n, first = len(problems), (step - 1) * args.prompts  # earlier steps have used `first`
    last = first + args.prompts - 1
    shuffled = []  # the epochs that this step draws from, nearly always one
    for epoch in range(first // n, last // n + 1):
        shuffled += random.Random(f"{args.seed} {epoch}").sample(problems, n)
    return shuffled[first % n:][:args.prompts]

# ---- Rewards ----
def load_reward(args):
    """Return the reward, answer_reward or the logit of --reward_model.
    It is a function (problems, completions) -> a number per completion; 1 or more is right."""
    if not args.reward_model:
        return answer_reward
    model, tokenizer = load_model("AutoModelForSequenceClassification", "reward_model", args)
    model.eval()
    if model.config.num_labels != 1:
        fail(f"--reward_model {args.reward_model}: has {model.config.num_labels} labels, not one")

    @torch.no_grad()
    def reward_model(problems, completions):
        """Return the model's logits, one row at a time: models read padding in different ways."""
        rewards = []
        for problem, text in zip(problems, completions):
            chat = [{"role": "user", "content": problem["question"]},
                    {"role": "assistant", "content": text}]
            if tokenizer.chat_template:
                ids = tokenizer.apply_chat_template(chat, return_dict=True)["input_ids"]
            else:
                ids = tokenizer(problem["question"] + "\n" + text)["input_ids"]
            ids = torch.tensor([ids], device=model.device)
            with or_fail(f"--reward_model {args.reward_model}: cannot read a completion"):
                rewards.append(model(input_ids=ids).logits[0, 0])
        return rewards
    return reward_model

def answer_reward(problems, completions):
    """Return 1.0 for a completion with the problem's answer, else 0.0."""
    return [math_reward(text, problem["answer"]) for problem, text in zip(problems, completions)]

def rewards_of(reward, problems, rollout):
    """Call the reward function on a rollout: (N,) float32. The G completions of a problem
    are rows one after another."""
    texts = rollout["texts"]
    name = getattr(reward, "__name__", reward)
    group_size = len(texts) // len(problems)
    problem_of_row = [problem for problem in problems for _ in range(group_size)]
    rewards = reward(problem_of_row, texts)
    with or_fail(f"the reward {name} must return {len(texts)} numbers, one per completion"):
        if isinstance(rewards, dict):  # its keys, perhaps numbers, would be taken
            raise TypeError("it returned a dict")
        rewards = torch.tensor([float(r) for r in rewards])
        if len(rewards) != len(texts):
            raise ValueError(f"it returned {len(rewards)}")
    for r, text in zip(rewards.tolist(), texts):
        if not math.isfinite(r):
            fail(f"the reward {name} returned {r} for the completion {text!r}")
    return rewards.to(rollout["ids"].device)

# ---- Grading ----
# An answer gets one spelling, then a canonical form for each way to read it, and two are equal if
# they share a form: sums and products are not evaluated. It may be a number, fraction, mixed number
# or percentage, a sum of terms with one number in each, a tuple, interval or set of these, an
# equation x = ..., or a text.
LONGEST = 600  # characters; longer answers are not read
SYMBOLS = {"−": "-", "×": "*", "·": "*", "√": r"\sqrt", "π": r"\pi", "∞": r"\infty",
           "±": r"\pm", "≤": r"\le", "≥": r"\ge", "∈": r"\in", "∪": r"\cup"}
FRACTION = (r"\\frac ?(?:\{(-?[^-+{}]*)\}|(\w)) ?"  # the numerator: \1 in braces, or \2
            r"(?:\{(-?)([1-9][0-9]*)\}|([1-9]))")  # the denominator: sign \3 and number \4, or \5
# What follows a number and has two letters or more is a unit (in 5 m the m may be a variable), but
# not if it changes the number (5 million, 2 thirds) or denies it (5 is not right).
UNIT = "(?!.*(?:illion|thousand|hundred|dozen|third|not))[a-z]{2}[A-Za-z /]*"
SPELLINGS = [  # pattern, replacement  # before -> after; applied in this order
    (r"\\\\|[&;]|\\cup\b|\b(?:and|or)\b|\{,\}", ","),  # 1 and 2 -> 1 , 2
    (r"\\(?=[][(){}%$0-9 ])|[$°]|\^\{?\\circ\}?", ""),  # \$5^\circ -> 5
    (r"\\[,:!]|\\q?quad|\\(?:left|right)(?![a-z])", ""),  # \left(1,\,2\right) -> (1,2)
    (r"(?<=\\)[dtc](?=frac)|(?<=\\[lg]e)q(?:slant)?", ""),  # \dfrac12\leq x -> \frac12\le x
    (r"\\(?:text[a-z]*|mbox|math[a-z]*) ?\{([^{}]*)\}", r" \1 "),  # 5\text{cm}^2 -> 5 cm ^2
    (r"(?<![A-Za-z\\])(sqrt|pi|infty)(?![a-z])", r"\\\1"),  # 2sqrt(3) -> 2\sqrt(3)
    (rf"(?<=[0-9)}}]) +{UNIT}(?:\^[23])?[. ]*$", ""),  # 5 cm ^2 -> 5
    (r"(\\sqrt|[\^_]) ?(?:\{([^{}]*)\}|(-?[0-9]+|[A-Za-z]))", r"\1(\2\3)"),  # x^2 -> x^(2)
    (FRACTION, r" \3\1\2/\4\5 "),  # 5\frac{3}8x -> 5 3/8 x
    (r"\\(?:cdot|times)(?![a-z])", "*"),  # 3\times10^(5) -> 3*10^(5)
    (r"\*(?! *[0-9*])", ""),  # 2*3*\pi -> 2*3\pi
    (r"(?<![0-9]) +| +(?![0-9])|\.$", ""),  # x = 4 2. -> x=4 2
    (r"^[^-+*/^=<>!0-9\\][^-+*/^=<>!\\]*(?:=|\\in\b)(?!.*=)", ""),  # f(3)=8 -> 8
    (r"^[0-9.]+[-+*/][-+*/0-9.]*=(?!.*=)", ""),  # 3+5=8 -> 8
]
THOUSANDS = r"(?<=[0-9]),(?=[0-9]{3}(?![0-9]))(?![^(\[{]*[)\]}])"  # 1,234 -> 1234, not in brackets
GROUP = re.compile(r"([(\[{])([^][(){}]*)([)\]}])")  # 2(x+(y)) -> (y)
TERMS = re.compile(r".*=.*|[-+]*[^-+]+|[-+]+")  # an equation stays whole; 5-x+y -> 5, -x, +y
NUMBER = r"(?:[0-9]+ )?[0-9]+/[1-9][0-9]*|[0-9]+\.?[0-9]*|\.[0-9]+"  # 1 3/8, 3/8, 0.5, .5
# sign, number, rest, divisor: '-6x/4' -> '-', '6', 'x', '4'; '2^3', '3!', '1:2', '-' are rest alone
TERM = (r"([-+]*(?=.))"  # signs, if something follows
        rf"(?:({NUMBER})(?![0-9.^_!:]))?"  # a number, but not that of 2^3, 3! or 1:2
        r"(.*?)"  # the rest
        r"(?:(?<=[^-+])/([1-9][0-9]*))?")  # a divisor, but not of a sign alone
# canonical works from the innermost bracket out. One that is done gets these wide look-alikes, so
# that GROUP, TERMS and split(",") no longer see its signs. () and {} become the same.
DONE = str.maketrans("()[]{}+-,", "（）［］（）＋－，")

def extract_answer(text):
    r"""Return the last <answer>...</answer> (in it the last box or ####), or the last box, or the
    last ####; None if there is no mark or it is empty: 'so \boxed{\frac{1}{2}}.' -> '\frac{1}{2}'.
    """
    text = text.replace("\\boxed {", "\\boxed{") if isinstance(text, str) else ""
    _, tag, text = text.rpartition("<answer>")
    text = text.rpartition("</answer>")[0] if tag else text
    if "\\boxed{" in text:
        inside = text.rpartition("\\boxed{")[2][: LONGEST + 1]  # with the }
        # What stands before each }: where { and } balance first, the box ends.
        starts = [inside[:i] for i, c in enumerate(inside) if c == "}"]
        text = next((start for start in starts if start.count("{") == start.count("}")), "")
    elif "####" in text:
        text = text.rpartition("####")[2].strip().partition("\n")[0]
    elif not tag:
        text = ""
    text = text.strip()
    return text if 0 < len(text) <= LONGEST else None

def term(text):
    """Rewrite one term of a sum, its number exact and in front: '-6x/4' -> '-3/2 x'."""
    signs, number, rest, divisor = re.fullmatch(TERM, text).groups()
    value = sum(map(Fraction, (number or "1").split()))  # '1 3/8' is 1 + 3/8
    if divisor:
        value /= int(divisor)
    if signs.count("-") % 2 == 1:
        value = -value
    if rest and value == 1:
        return rest
    return f"{value} {rest}".strip()

def canonical(text):
    """Rewrite terms, sort sums and sets, innermost brackets first: '(x+2,6/4)' -> '2＋x，3/2'.
    {1,2} is {2,1}, and so is 1,2; but (1,2) is not (2,1)."""
    text = "{" + text + "}"  # so that what stands in no bracket is sorted too, as a set
    while match := GROUP.search(text):
        opening, inside, closing = match.groups()
        items = ["+".join(sorted(map(term, TERMS.findall(item))))
                 for item in inside.split(",") if item]
        if opening == "{":  # a set has no order; DONE makes { and ( alike, so ; marks a set
            inside = ";".join(sorted(items))
        else:
            inside = ",".join(items)
        text = text.replace(match[0], (opening + inside + closing).translate(DONE))
    return text.strip("（）")  # (9) is 9

@lru_cache(4096)
def forms(text):
    """Return {(i, canonical form)} for the four readings i of an answer: 1,234 is a list or a
    number, and % is left out or means /100. Two answers are equal if they agree in the same
    reading: not 20%, read as 20/100, and 1/5%, read without its %."""
    text = (text or "").translate(str.maketrans(SYMBOLS))
    text = " ".join(text.split())
    for pattern, new in SPELLINGS:
        text = re.sub(pattern, new, text)
    joined = re.sub(THOUSANDS, "", text)
    readings = [text.replace("%", ""), text.replace("%", "/100"),
                joined.replace("%", ""), joined.replace("%", "/100")]
    return {(i, canonical(reading)) for i, reading in enumerate(readings)
            if re.search(r"\w", reading)}  # an answer without a letter or digit equals none

def math_reward(completion, answer):
    r"""Return 1.0 if the completion's marked answer has a form of the gold answer, else 0.0.
    Not read: algebra ((x+1)^2 is not x^2+2x+1, 2ab not 2ba), arithmetic (2+3 is not 5), rounding
    (0.33 is not 1/3), matrices, 1\pm2, case (Odd is not odd), names (x=5 is y=5), units (5 mm is
    5 cm)."""
    given = extract_answer(completion)
    # Without a mark the whole gold answer counts.
    gold = extract_answer(answer) or extract_answer(f"<answer>{answer}</answer>")
    # None is refused, as the text above would make "None" of it.
    return float(answer is not None and not forms(given).isdisjoint(forms(gold)))

def readable(answer):
    """Tell whether a gold answer, given as the completion, gets 1.0."""
    return math_reward(f"<answer>{extract_answer(answer) or answer}</answer>", answer) == 1

# ---- Command line ----
class HelpFormatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Shows the docstring as written, and defaults."""

def parser(script, doc):
    """Make an argparse parser whose --help is the script's docstring."""
    return argparse.ArgumentParser(
        prog=Path(script).name, usage=argparse.SUPPRESS, description=doc,
        formatter_class=HelpFormatter, allow_abbrev=False)

def in_range(kind, low, high):
    """Make the type of a flag: an int or a float from `low` to `high`, else argparse's error."""
    def convert(text):
        value = kind(text)
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"{text}: must be from {low:g} to {high:g}")
        return value
    convert.__name__ = kind.__name__  # for argparse: "invalid int value"
    return convert

count, count_or_zero = in_range(int, 1, 10 ** 9), in_range(int, 0, 10 ** 9)
two_or_more = in_range(int, 2, 10 ** 9)  # a group of one has no deviation
positive, positive_or_zero = in_range(float, 1e-12, 1e12), in_range(float, 0, 1e12)
share = in_range(float, 0, 1)
switch = argparse.BooleanOptionalAction  # --name and --no-name

INSTRUCTION = "Reason step by step, then give the final answer on a last line after ####."

def add_args(parser):
    """Add the flags that every script has."""
    add = parser.add_argument_group("model and problems").add_argument
    add("--model", default=TOY, help="directory or hub name; below a million parameters a toy")
    add("--dataset", default=TOY, help=".jsonl, .json, .csv, .parquet, directory or hub name")
    add("--split", default="train", help="split to train on")
    add("--eval_split", default="test", help="to evaluate on; if there is one split, a fifth of it")
    add("--question_column", default="question", help="column with the question, text or messages")
    add("--answer_column", default="answer", help="column with the gold answer")
    add("--system_prompt", default=dict(toy="", real=INSTRUCTION), help="said before each question")
    add("--max_prompt_tokens", type=count, default=512, help="longer prompts are left out")
    add("--reward_model", help="classifier whose logit is the reward; else 1 for right answers")
    add = parser.add_argument_group("sampling").add_argument
    add("--max_new_tokens", type=count, default=dict(toy=48, real=1024), help="longest completion")
    add("--temperature", type=positive, default=1.0, help="in samples and log-probs alike")
    add("--cuda_graphs", action=switch, default=True, help="replay a token's kernels as one graph")
    add = parser.add_argument_group("optimiser and memory").add_argument
    add("--micro_batch_tokens", type=count, default=16384,
        help="positions per forward and backward; fewer take less memory, same gradient")
    add("--warmup_steps", type=count_or_zero, default=20, help="optimiser steps of a rising --lr")
    add("--max_grad_norm", type=positive, default=1.0, help="larger gradients are scaled to this")
    add("--gradient_checkpointing", action=switch, default=dict(toy=False, real=True),
        help="recompute activations: a third more work, far less memory")
    add("--offload_optimizer", action=switch, default=False, help="masters and moments on the host")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu",
        help="any that torch knows; cpu and cuda are tested")
    add("--dtype", choices=["float32", "bfloat16", "float16"],
        help="of weights and activations; else bfloat16 on a GPU, float32 on a CPU")
    add = parser.add_argument_group("run").add_argument
    add("--steps", type=count, default=dict(toy=20, real=200), help="rollouts in the run")
    add("--seed", type=count_or_zero, default=0, help="of the samples and of the problems' order")
    add("--out", help="output directory; else runs/<script>-<date>-<time>-<process>")
    add("--resume", action="store_true", help="continue the run in --out, with its flags")
    add("--eval_every", type=count, default=dict(toy=10, real=20), help="steps between evaluations")
    add("--eval_problems", type=count, default=dict(toy=2560, real=512), help="held-out problems")
    add("--eval_samples", type=count, default=1, help="samples per problem; 2 or more give pass@k")
    add("--save_every", type=count, default=dict(toy=10, real=20), help="steps between checkpoints")
    add("--tensorboard", action=switch, default=False, help="log to TensorBoard too")

def parse(parser, argv):
    """Parse `argv`. A run to resume brings its own flags; those given again replace them."""
    args = parser.parse_args(argv)
    if args.resume:
        if args.out is None:
            fail("--resume: give --out, the run to continue")
        with or_fail(f"--resume: --out {args.out} holds no run to continue"):
            saved = json.loads(Path(args.out, "args.json").read_text())
            parser.set_defaults(**saved)
            args = parser.parse_args(argv)
            now = vars(args) | {"script": parser.prog}
            for name in ("script", "model", "dataset", "reward_model"):
                if now[name] != saved[name]:
                    fail(f"--resume: the run in {args.out} has {name} {saved[name]}")
    args.script = parser.prog
    if getattr(args, "beta", None) == 0:
        for name in ("kl", "ref_every"):  # ppo.py has neither: then both are None
            if getattr(args, name, None) != parser.get_default(name):
                warn(f"--{name} does nothing with --beta 0")
    with or_fail(f"--device {args.device}: torch {torch.__version__} sees no such device"):
        torch.empty(0, device=args.device)
    if args.minibatches > args.prompts:
        fail(f"--minibatches {args.minibatches}: at most --prompts {args.prompts}")
    args.dtype = args.dtype or ("bfloat16" if args.device.startswith("cuda") else "float32")
    return args

def fail(message, status=2):
    """Say in one line what is wrong and exit."""
    print("error:", " ".join(message.split()), file=sys.stderr)
    sys.exit(status)

def warn(message):
    """Print a warning, above the bars."""
    tqdm.write(f"warning: {message}")

@contextlib.contextmanager
def or_fail(message):
    """Turn any error inside into one line: libraries raise what they like, at any length.
    fail() inside says its own line: SystemExit is no Exception."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise  # launch reports it
    except Exception as error:
        reason = f"{error} {error.__cause__ or ''}"
        fail(f"{message}: {type(error).__name__}: {textwrap.shorten(reason, 400)}")

# ---- Run ----
WIDTH = 99  # columns of what is printed

def launch(main, args):
    """Claim --out and run `main`. An error that a user can fix is one line, others a traceback."""
    prepare_process(args)
    is_new = args.out is None or not os.path.exists(args.out)
    lock = claim(args)
    try:
        main(args)
    except KeyboardInterrupt:
        fail("interrupted", 130)
    except torch.OutOfMemoryError:
        fail("out of GPU memory: lower --micro_batch_tokens (update), --prompts or "
             "--max_new_tokens (sampling), or give --offload_optimizer or --beta 0")
    finally:
        shutil.rmtree(Path(args.out, ".unfinished"), ignore_errors=True)  # of a save that failed
        if is_new and os.listdir(args.out) == [".lock"]:
            shutil.rmtree(args.out)  # nothing was saved
        lock.release()

def prepare_process(args):
    """Set what holds for the whole process: its output and the GPU."""
    # Flush every line, into a file too; escape what the terminal's encoding does not have.
    sys.stdout.reconfigure(errors="backslashreplace", line_buffering=True)
    # cuDNN's attention plans anew for every shape, and here each batch has its own.
    torch.backends.cuda.enable_cudnn_sdp(False)
    if args.device.startswith("cuda"):  # CUDA graphs are recorded on the current device
        torch.cuda.set_device(torch.empty(0, device=args.device).device)  # cuda becomes cuda:0

def claim(args):
    """Make --out and lock it for this process; returns the lock, which a kill releases."""
    if args.out is None:
        now = time.strftime("%m%d-%H%M%S")
        process = os.getpid()  # as two runs may start in the same second
        args.out = f"runs/{Path(args.script).stem}-{now}-{process}"
    with or_fail(f"--out {args.out}: cannot be written, or another process uses it"):
        os.makedirs(args.out, exist_ok=True)
        others = set(os.listdir(args.out)) - {".lock"}
        if others and not args.resume:
            fail(f"--out {args.out}: is not empty: go on with --resume or give another")
        lock = FileLock(Path(args.out, ".lock"))
        lock.acquire(timeout=0)
    return lock

def saved_steps(args):
    """List the steps saved in --out, in order; step-best, step-01 and the like are a user's own."""
    names = [path.name.removeprefix("step-") for path in Path(args.out).glob("step-[1-9]*/")]
    return sorted(int(name) for name in names if name.isdecimal())

def save_checkpoint(args, step, tokenizer, optimizers, reference):
    """Save step-N in --out, then remove the older ones: a kill at any instant leaves a good one.
    There are no random states to save: each is a function of --seed and the step."""
    final, unfinished = Path(args.out, f"step-{step}"), Path(args.out, ".unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    states = {name: optimizer.state_dict() for name, optimizer in optimizers.items()}
    if reference is not None and getattr(args, "ref_every", None):  # else it is --model
        states["reference"] = reference.state_dict()
    with or_fail(f"--out {args.out}: step {step} cannot be saved (disk full?)"):
        for name, optimizer in optimizers.items():
            # The policy goes into step-N itself, so that --model can name it.
            folder = unfinished if name == "policy" else unfinished / name
            optimizer.model.save_pretrained(folder)
        tokenizer.save_pretrained(unfinished)
        shutil.copy(Path(args.out, "metrics.jsonl"), unfinished)  # a resumed run goes on from it
        torch.save(states, unfinished / "optimizer.pt")
        os.sync()  # on the disk before the old one goes, as power may fail
        unfinished.rename(final)
    for old in saved_steps(args):
        if old < step:
            # Renamed first: a kill while its files go leaves no half of a checkpoint.
            Path(args.out, f"step-{old}").rename(unfinished)
            shutil.rmtree(unfinished)

def load_checkpoint(args, optimizers, reference):
    """Load the newest checkpoint in --out and return its step; 0 if there is none.
    A run without --resume begins in an empty directory: claim has seen to that."""
    steps = saved_steps(args)
    if not steps:
        return 0
    step = steps[-1]
    newest = Path(args.out, f"step-{step}")
    with or_fail(f"--resume: {newest}/metrics.jsonl cannot be used"):
        for line in Path(newest, "metrics.jsonl").read_text().splitlines():
            json.loads(line)["step"]  # raises if the line is damaged
    with or_fail(f"--resume: {newest}/optimizer.pt cannot be used"):
        damaged = zipfile.ZipFile(newest / "optimizer.pt").testzip()  # it has checksums
        if damaged:
            raise ValueError(f"{damaged} in it is damaged")
        states = torch.load(newest / "optimizer.pt", map_location="cpu")  # never twice on the GPU
        for name, optimizer in optimizers.items():
            optimizer.load_state_dict(states[name])  # sets the model's weights, too
        if reference is not None and "reference" in states:
            reference.load_state_dict(states["reference"])
    return step

class StopSignal:
    """Ctrl-C or SIGTERM: the first lets the step finish and be saved, the next ends it at once."""
    def __init__(self):
        self.status = 0  # the exit status of a run cut short: 130 by Ctrl-C, 143 by SIGTERM
        signal.signal(signal.SIGINT, self.receive)
        signal.signal(signal.SIGTERM, self.receive)

    def receive(self, number, frame):
        """Note the signal."""
        self.status = 128 + number
        self.reset()
        print("\nsaving after this step; a second signal leaves at once", file=sys.stderr)

    def reset(self):
        """Let signals do what they do by default."""
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)

class Logger:
    """Writes metrics.jsonl, args.json and TensorBoard's files; shows a bar and prints lines."""
    STEP = {"reward": "reward {:.3f}", "completion_length": "length {:.1f}",
            "entropy": "entropy {:.2f}", "kl": "kl {:.4f}", "clip_frac": "clipped {:.2%}",
            "explained_variance": "critic {:.2f}", "seconds": "{:.1f} s"}
    HELD_OUT = {"eval_accuracy": "greedy {:.3f}", "eval_sampled_accuracy": "sampled {:.3f}",
                "eval_reward": "reward {:.3f}", "eval_completion_length": "length {:.1f}"}

    def __init__(self, args, start):
        """Begin after step `start`, with the metrics of its checkpoint."""
        self.args = args
        if args.tensorboard:
            with or_fail("--tensorboard: pip install tensorboard"):
                from torch.utils.tensorboard import SummaryWriter
            self.board = SummaryWriter(args.out, purge_step=start + 1)
        self.path = Path(args.out, "metrics.jsonl")
        if start:
            shutil.copy(Path(args.out, f"step-{start}", "metrics.jsonl"), self.path)
        else:
            self.path.write_text("")
        unfinished = Path(args.out, "args.tmp")
        unfinished.write_text(json.dumps(vars(args), indent=1))
        unfinished.replace(Path(args.out, "args.json"))  # never half a file
        self.bar = tqdm(total=args.steps, initial=start, unit="step", disable=None)
        if start:
            hint = ", the last: raise --steps" if start >= args.steps else ""
            self.say(f"resumed after step {start}{hint}")
        else:
            self.say("evaluating before the first step")

    def log(self, step, stats, problem=None, rollout=None):
        """Log the numbers of a step; now and then show `problem` and the first completion."""
        if self.args.device.startswith("cuda"):
            stats["peak_memory_gb"] = torch.cuda.max_memory_allocated() / 1e9
            torch.cuda.reset_peak_memory_stats()
        finite = {name: value for name, value in stats.items() if math.isfinite(value)}
        with self.path.open("a") as file:
            file.write(json.dumps({"step": step} | finite) + "\n")
        if self.args.tensorboard:
            for name, value in finite.items():
                self.board.add_scalar(name, value, step)
        self.show(step, finite)
        if rollout and (step == 1 or "eval_accuracy" in finite):
            text, reward = rollout["texts"][0].strip(), rollout["rewards"][0]
            answer = extract_answer(problem["answer"]) or problem["answer"]
            text = f"{problem['question']}\n{text}\n(reward {reward:g}, answer {answer})"
            self.say(text, indent="    | ")
        self.bar.update(step - self.bar.n)

    def show(self, step, stats):
        """Print a line for the step, one for an evaluation, and warnings."""
        if "reward" in stats:
            self.say(f"step {step}/{self.args.steps}  {format_stats(stats, self.STEP)}")
        if "eval_accuracy" in stats:
            self.say(f"held out, after {step} steps:  {format_stats(stats, self.HELD_OUT)}")
        if stats.get("truncated", 0) > 0.5:
            warn("over half of the completions are cut off: raise --max_new_tokens or lower --lr")
        if stats.get("skipped") or stats.get("value_skipped"):
            cure = "the loss scale is halved" if self.args.dtype == "float16" else "lower --lr"
            warn(f"the gradient was not finite, its step is skipped: {cure}")

    def say(self, text, indent=""):
        """Print above the bar, control characters escaped."""
        for line in text.split("\n"):
            line = "".join(c if c.isprintable() else repr(c)[1:-1] for c in line)
            self.bar.write(textwrap.indent(textwrap.fill(line, WIDTH - len(indent)), indent))

    def close(self, stop):
        """Print the results and where they are. If a signal cut the run short, exit."""
        stop.reset()
        self.bar.close()
        for stats in map(json.loads, self.path.read_text().splitlines()):
            if "eval_accuracy" in stats:
                print(f"held out, after {stats['step']:3} steps  "
                      f"{format_stats(stats, self.HELD_OUT)}")
        last = saved_steps(self.args)[-1]
        print(f"model and checkpoint  {self.path.with_name(f'step-{last}')}")
        print(f"metrics               {self.path}")
        if self.args.tensorboard:
            self.board.close()
        if stop.status and last < self.args.steps:
            print(f"interrupted; go on with --out {self.args.out} --resume")
            sys.exit(stop.status)

def format_stats(stats, formats):
    """Write those statistics that have a format, in the order of the formats."""
    return "  ".join(form.format(stats[name]) for name, form in formats.items() if name in stats)

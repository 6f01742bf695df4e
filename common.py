"""What PPO, GRPO and GSPO share and what is not the algorithm, in this order: log-probabilities, batching, optimiser,
sampling, models, problems, command line, log and checkpoints, the toy world, the reward. The scripts import this module; it
imports none of them.

Shapes: P prompts a step, G completions a prompt, N = P*G rows, L positions (prompt and completion), T completion
positions, V vocabulary. A rollout is a dict of tensors with one row per completion:
    ids        (N, L)  prompt, then completion, padded on the right
    attention  (N, L)  1 on both, 0 on padding; made from lengths, since eos and padding ids also occur inside prompts
    mask       (N, T)  1 on sampled tokens up to and including the first end-of-sequence token
to which the scripts add old_logp, ref_logp, values, returns (N, T) and adv (N,) or (N, T).
"""
import argparse
import collections
import importlib.util
import itertools
import json
import logging
import math
import os
import random
import re
import shutil
import signal
import sys
import textwrap
import time
import zlib
from fractions import Fraction
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import huggingface_hub
import tokenizers
import torch
import transformers
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoModelForTokenClassification
from transformers import AttentionInterface, AttentionMaskInterface, AutoTokenizer
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask
from transformers.modeling_layers import GradientCheckpointingLayer

transformers.logging.set_verbosity_error()
logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
transformers.logging.disable_progress_bar()
torch.backends.cuda.enable_cudnn_sdp(False)  # cuDNN plans anew for every new shape, and ragged rows always have one
TOY = "runs/toy"
STARTED = time.perf_counter()


# ---------------------------------------------------------------------------------------------------------------------
# Log-probabilities

def token_logprobs(model, batch, temperature, with_entropy=False):
    """log pi(token | everything before it) of the completion tokens, under softmax(logits / temperature).

    `batch` holds ids (N, L), attention (N, L) and mask (N, T). Returns (N, T) float32 with 0 outside the mask; with
    `with_entropy` also the entropies in nats, (N, T), without gradient. The (N, T, V) logits never exist.
    """
    where, hidden, target = completion_states(model, batch)
    weight = model.get_output_embeddings().weight
    logp, entropy = ChunkedLogProbs.apply(hidden, weight, target, temperature, with_entropy)
    logp, entropy = (x.new_zeros(batch["mask"].shape).index_put(where, x) for x in (logp, entropy))
    return (logp, entropy) if with_entropy else logp


def token_values(model, batch):
    """V of the state before each completion token, from the value model: (N, T) float32, 0 outside the mask."""
    where, hidden, _ = completion_states(model, batch)
    head = value_head(model)
    values = head(hidden.to(head.weight.dtype)).squeeze(1)                           # (M,)
    return values.new_zeros(batch["mask"].shape).index_put(where, values)


def completion_states(model, batch):
    """The M completion tokens of a batch: their places (row, t) in (N, T), the hidden states that predict them (M, H), and
    their ids (M,). A token is predicted one position before its own: the one shifted index of the repository."""
    lengths, ends = batch["mask"].sum(-1).long(), batch["attention"].sum(-1)         # (N,) both
    row = torch.repeat_interleave(lengths, output_size=batch.get("tokens"))          # (M,) M given: no need to wait and see
    t = torch.arange(len(row), device=row.device) - (lengths.cumsum(0) - lengths)[row]
    position = (ends - lengths)[row] + t
    # Causal attention never looks right: padding there needs no mask, and without one the flash kernel applies.
    hidden = model.base_model(input_ids=batch["ids"], use_cache=False).last_hidden_state            # (N, L, H)
    return (row, t), hidden[row, position - 1], batch["ids"][row, position]


def head_logits(hidden, weight, temperature=1.0):
    """(M, H), (V, H) -> hidden weight^T / temperature, (M, V), float32 or wider. Products of bfloat16 are summed and kept
    in float32: logits rounded to bfloat16 would move log-probs by up to 0.07."""
    if hidden.dtype != torch.bfloat16:
        logits = hidden @ weight.T
    elif hidden.is_cuda:
        logits = torch.mm(hidden, weight.T, out_dtype=torch.float32)
    else:
        logits = hidden.float() @ weight.float().T
    return logits if temperature == 1 else logits.div_(temperature)


class ChunkedLogProbs(torch.autograd.Function):
    """log softmax(hidden weight^T / temperature)[target] and the entropy of that softmax, a chunk of positions at a time.

    The backward pass computes each chunk's logits anew instead of keeping them: (C, V) numbers in memory instead of
    several times (M, V), for one matrix product more.
    """
    CHUNK = 256

    @staticmethod
    def forward(ctx, hidden, weight, target, temperature, with_entropy):
        """hidden (M, H), weight (V, H), target (M,) -> log-probs and entropies (0 unless asked for), (M,) both."""
        logp, entropy = [], []
        ctx.chunk = C = ChunkedLogProbs.CHUNK * (2 if hidden.is_cuda else 1)  # a GPU wants larger products to be busy
        for h, chosen in zip(hidden.split(C), target.split(C)):
            log_p = head_logits(h, weight, temperature).log_softmax(-1)              # (C, V)
            logp.append(log_p.gather(1, chosen[:, None]).squeeze(1))                 # (C,)
            entropy.append(-torch.einsum("cv,cv->c", log_p.exp(), log_p) if with_entropy else torch.zeros_like(logp[-1]))
            del log_p  # before the next chunk's is made
        logp, entropy = torch.cat(logp), torch.cat(entropy)
        ctx.save_for_backward(hidden, weight, target)
        ctx.temperature = temperature
        ctx.mark_non_differentiable(entropy)
        return logp, entropy

    @staticmethod
    def backward(ctx, grad, _):
        """d log p(target) / d logits = (onehot(target) - p) / temperature."""
        hidden, weight, target = ctx.saved_tensors
        grad = grad / ctx.temperature
        grad_hidden, grad_weight = torch.empty_like(hidden), torch.zeros_like(weight, dtype=grad.dtype)
        for c in (slice(start, start + ctx.chunk) for start in range(0, len(hidden), ctx.chunk)):
            z = head_logits(hidden[c], weight, ctx.temperature).softmax(-1)          # (C, V)
            z.mul_(-grad[c, None]).scatter_add_(1, target[c, None], grad[c, None])   # (C, V) gradient of the logits
            z = z.to(weight.dtype)
            grad_hidden[c] = z @ weight
            if weight.dtype == grad_weight.dtype:
                grad_weight.addmm_(z.T, hidden[c])  # in place: a (V, H) temporary would be the largest of all
            else:
                grad_weight += z.T @ hidden[c]  # bfloat16 products, summed over the chunks in float32
            del z
        return grad_hidden, grad_weight.to(weight.dtype), None, None, None


# ---------------------------------------------------------------------------------------------------------------------
# Batching

def micro_batches(batch, tokens):
    """Cut `batch` into micro-batches of at most `tokens` positions, padding included; every row is in exactly one.

    Rows are sorted by length, the longest first. A micro-batch ends before its budget does where the next row would make
    more than 8 % of it padding, unless that is less than 128 positions: then another forward would cost more. Each is
    trimmed to its longest row and carries `place`, its rows' places in `batch`, and `tokens`, the int sum of its mask (so that
    nobody has to ask the GPU). A row over the budget is alone.
    """
    lengths, order = batch["attention"].sum(-1).sort(descending=True)
    lengths, completions, begin = lengths.tolist(), batch["mask"].sum(-1).long()[order].tolist(), 0
    while begin < len(lengths):
        L, end, padding = lengths[begin], begin + 1, 0
        while end < len(lengths) and (positions := (end + 1 - begin) * L) <= tokens:
            padding += L - lengths[end]
            if padding > max(128, 0.08 * positions):
                break
            end += 1
        part, T = select(batch, order[begin:end]), max(completions[begin:end])
        for name, value in part.items():
            if value.dim() == 2:
                part[name] = value[:, :L if name in ("ids", "attention") else T]
        yield part | {"place": order[begin:end], "tokens": sum(completions[begin:end])}
        begin = end


def minibatches(rollout, count, group_size):
    """Cut a rollout into `count` parts, as even as can be, that keep groups whole. Its prompts were drawn at random, so
    there is no need to shuffle; each part carries `place`, its rows' places in the rollout."""
    groups = torch.arange(len(rollout["ids"]), device=rollout["ids"].device).view(-1, group_size)
    for part in groups.tensor_split(count):
        yield select(rollout, part.flatten()) | {"place": part.flatten()}


def select(batch, rows):
    """The given rows of every tensor of `batch`."""
    return {name: value[rows] for name, value in batch.items() if torch.is_tensor(value)}


@torch.no_grad()
def score_rows(function, rollout, args):
    """Run `function` (micro-batch -> tensor or tensors (n, t)) over a rollout without gradient; put the rows back in
    place. Returns a list of (N, T) tensors.

    The rollout is cut as the update cuts it: in bfloat16 a row's log-probs can depend on what it shares a micro-batch with,
    and GSPO's window is narrow: old and new ones shall differ by what was learnt and nothing else.
    """
    whole = None
    for part in minibatches(rollout, args.minibatches, args.group_size):
        for batch in micro_batches(part, args.micro_batch_tokens):
            values = function(batch)
            values = values if isinstance(values, tuple) else (values,)
            whole = whole or [value.new_zeros(rollout["mask"].shape) for value in values]
            for target, value in zip(whole, values):
                target[part["place"][batch["place"]], :value.shape[1]] = value
    return whole


def padding(batch):
    """Share of a micro-batch's positions that are padding, as statistics for Totals."""
    return {"padding": ((batch["attention"] == 0).sum(), batch["attention"].numel())}


def rollout_stats(rollout, entropy, group_size, seconds):
    """What a rollout shows before it is trained on; `seconds` is how long sampling took."""
    mask, groups = rollout["mask"], rollout["rewards"].view(-1, group_size)
    stats = {"reward": groups.mean(), "completion_length": mask.sum(1).mean(),
             "truncated": 1 - rollout["finished"].float().mean(), "entropy": (entropy * mask).sum() / mask.sum(),
             "rollout_tokens_per_s": mask.sum() / seconds}
    if group_size > 1:
        stats["zero_variance_groups"] = (groups == groups[:, :1]).all(1).float().mean()
    return {name: value.item() for name, value in stats.items()}


def explained_variance(values, returns, mask):
    """How good a critic is: 1 - Var(R - V) / Var(R) over completion tokens. Values, returns and mask (N, T) -> 1 if V is R, 0
    if it is no better than a constant, nan if all returns are equal."""
    returns, values = returns[mask > 0], values[mask > 0]                            # (M,)
    if not returns.var() > 1e-8:  # all the same but for rounding, or a single token
        return float("nan")
    return (1 - (returns - values).var() / returns.var()).item()


class Totals:
    """Statistics of micro-batches, kept on the device: pairs (sum, count) become means, lone tensors maxima."""
    def __init__(self):
        self.totals = {}

    def add(self, stats):
        for name, new in stats.items():
            old = self.totals.get(name)
            if old is not None:
                new = (old[0] + new[0], old[1] + new[1]) if isinstance(new, tuple) else torch.maximum(old, new)
            self.totals[name] = new

    def means(self):
        return {name: float(t[0] / t[1]) if isinstance(t, tuple) else float(t) for name, t in self.totals.items()}


# ---------------------------------------------------------------------------------------------------------------------
# Optimiser

class Optimizer:
    """AdamW on float32 masters of a model's weights, with linear warm-up and clipping of the gradient's norm.

    At lr 1e-6 an update is far smaller than the spacing of bfloat16 numbers: without masters 98 % of the weights would
    never move. Gradients are added to the masters' as each weight's backward is done, in float32, and freed. The
    weights of a float32 model are their own masters.
    """
    PATIENCE = 5  # non-finite steps in a row before the run is stopped

    def __init__(self, model, lr, args, eps=1e-8):
        self.lr, self.warmup_steps, self.max_grad_norm = lr, args.warmup_steps, args.max_grad_norm
        self.taken, self.skipped, self.in_a_row = 0, 0, 0
        self.weights = [p for p in model.parameters() if p.requires_grad]
        self.away = args.offload_optimizer  # masters and moments live in host memory
        self.masters = [w.detach().to("cpu" if self.away else w.device, torch.float32) for w in self.weights]  # or w's memory
        self.gradients = [None] * len(self.weights)  # float32, where the weights are
        for i, weight in enumerate(self.weights):
            weight.register_post_accumulate_grad_hook(lambda weight, i=i: self.accumulate(i, weight))  # i=i: each its own
        # betas as in most language model training: torch's 0.999 remembers longer than a short run lasts
        self.adamw = torch.optim.AdamW(self.masters, lr=lr, betas=(0.9, 0.95), eps=eps, weight_decay=0.0, fused=True)

    def accumulate(self, i, weight):
        """Add a finished gradient to the sum of weight i, and free it."""
        if self.gradients[i] is None:
            self.gradients[i] = weight.grad.float()
        else:
            self.gradients[i] += weight.grad
        weight.grad = None

    def step(self, prefix=""):
        """One step of AdamW, then clear the gradients. Returns statistics: their norm before clipping, whether skipped.

        A step with a gradient that is not finite is skipped whole, moments and schedule included.
        """
        norm = torch.nn.utils.get_total_norm([g for g in self.gradients if g is not None]).item()
        if math.isfinite(norm):
            self.taken, self.in_a_row = self.taken + 1, 0
            self.adamw.param_groups[0]["lr"] = self.lr * min(1.0, self.taken / max(1, self.warmup_steps))
            scale = min(1.0, self.max_grad_norm / (norm + 1e-6))
            for i, master in enumerate(self.masters):
                if self.gradients[i] is not None:
                    master.grad = self.gradients[i].mul_(scale).to(master.device, non_blocking=self.away)  # pinned, so fast
                    if self.away:  # one at a time: a whole gradient in host memory would be a third more there
                        if self.weights[i].is_cuda:
                            torch.cuda.synchronize()
                        self.adamw.step()
                        master.grad = None
            if not self.away:
                self.adamw.step()
            for weight, master in zip(self.weights, self.masters):
                weight.data.copy_(master.to(weight.dtype))  # rounds to bfloat16; of a float32 weight, onto itself
        else:
            self.skipped, self.in_a_row = self.skipped + 1, self.in_a_row + 1
            if self.in_a_row == self.PATIENCE:
                fail(f"the gradient was not finite {self.PATIENCE} steps in a row: lower --lr and --resume", 1)
        self.adamw.zero_grad(set_to_none=True)
        self.gradients = [None] * len(self.weights)
        skipped = {prefix + "skipped": (0.0 if math.isfinite(norm) else 1.0, 1)}
        return skipped | ({prefix + "grad_norm": (norm, 1)} if math.isfinite(norm) else {})

    def state_dict(self):
        return {"masters": self.masters, "adamw": self.adamw.state_dict(), "taken": self.taken, "skipped": self.skipped}

    def load_state_dict(self, state):
        for master, saved in zip(self.masters, state["masters"]):
            master.data.copy_(saved)
        self.adamw.load_state_dict(state["adamw"])
        self.taken, self.skipped = state["taken"], state["skipped"]


# ---------------------------------------------------------------------------------------------------------------------
# Sampling

GRAIN = {"cuda": 256}  # attention looks at this many positions more at a time: every new width is recorded; elsewhere 1


@torch.no_grad()
def generate(model, tokenizer, prompts, group_size=1, max_new_tokens=48, temperature=1.0):
    """Sample `group_size` completions of each prompt from softmax(logits / temperature); temperature 0 is greedy.

    A loop of our own, because transformers' generate fills every setting left unset from the model's generation_config
    (and top_k with 50): it would sample from another distribution than the one whose log-probs are trained. It reads a
    prompt once for its whole group, drops rows as they finish, and on a GPU replays one CUDA graph a token: launched one by
    one, a token's thousand kernels would spend most of the time waiting.

    `prompts` holds P lists of token ids. Returns a dict of N = P * group_size rows, those of a prompt side by side:
    ids (N, L), attention (N, L), mask (N, T) as in a rollout, finished (N,) bool, texts (a list of N strings).
    """
    was_training = model.training
    model.eval()  # in training mode checkpointing drops the cache without a word: a token then sees only itself
    stop = torch.tensor(stop_ids(model, tokenizer), device=model.device)
    lengths = torch.tensor([len(prompt) for prompt in prompts], device=model.device)                # (P,)
    ids = complete(model, prompts, lengths, group_size, max_new_tokens, temperature, stop)
    model.train(was_training)
    if ids.is_cuda:
        torch.cuda.empty_cache()  # the keys and values are gone: gigabytes that the update can use
    return as_rollout(ids, lengths.repeat_interleave(group_size), max_new_tokens, stop, tokenizer)


def complete(model, prompts, lengths, group_size, max_new_tokens, temperature, stop):
    """The loop of generate: ids (N, room), each row a prompt, its completion, and what was written after its stop token,
    which as_rollout cuts off."""
    S, grain = max(map(len, prompts)), GRAIN.get(model.device.type, 1)
    room = math.ceil((S + max_new_tokens) / grain) * grain
    ids = torch.tensor([prompt + [0] * (room - len(prompt)) for prompt in prompts], device=model.device)
    decoding = Decoding(ids.repeat_interleave(group_size, 0), (lengths - 1).repeat_interleave(group_size))  # N of them
    with torch.compiler.set_stance("force_eager"):  # --compile is for shapes that come back
        decoding.write(decoding.read(model, ids[:, :S], lengths), temperature, stop)
    step = None
    for t in range(1, max_new_tokens):
        if t % 4 == 0 and decoding.running.float().mean() < 0.5:  # looking stalls the GPU: not at every token
            if not decoding.running.any():
                break
            decoding.keep(decoding.running.nonzero().squeeze(1))
            step = None
        if step is None or decoding.width < S + t:
            decoding.width = math.ceil((S + t) / grain) * grain
            step = Replay(lambda: getattr(model, "decode", decode)(model, decoding, temperature, stop), model)
        step()
    return decoding.ids


def decode(model, decoding, temperature, stop):
    """Read each row's last token and write the next. All on the device: no size depends on a value, so that a CUDA graph
    can hold it."""
    decoding.write(decoding.next_logits(model), temperature, stop)


class Decoding:
    """Completions being written: their ids, and the keys and values of every position that was read.

    Row i's token at position p has its keys and values at [i, p] of a (N, room, heads, D) tensor for each layer: rows of
    different lengths stand side by side, and no prompt is padded on the left. The model takes it as its cache.
    """
    PREFILL = 16384  # positions of prompts read at a time: memory for more would be needed nowhere else

    def __init__(self, ids, position):
        self.ids, self.position = ids, position  # (N, room), (N,): what is written, and where each row's last token is
        self.running = torch.ones_like(position, dtype=torch.bool)
        self.alive = torch.arange(len(ids), device=ids.device)  # (n,) of the n rows not yet dropped, their rows of ids
        self.slot = self.alive.clone()  # (n,) and their rows of the cache
        self.layers, self.width, self.reading = [], None, None

    def read(self, model, ids, lengths):
        """Read the prompts (P, S), each once for all of its group; logits of the token after each row, (N, V)."""
        positions, G = torch.arange(ids.shape[1], device=ids.device)[None], len(self.ids) // len(ids)
        last, size = [], max(1, self.PREFILL // ids.shape[1])
        for begin in range(0, len(ids), size):
            self.reading = slice(begin * G, (begin + size) * G)
            hidden = self.forward(model, ids[begin:begin + size], positions, ids.shape[1])          # (size, S, H)
            last.append(hidden[torch.arange(len(hidden), device=ids.device), lengths[begin:begin + size] - 1])
        self.reading = None
        return head_logits(torch.cat(last), model.get_output_embeddings().weight).repeat_interleave(G, 0)

    def next_logits(self, model):
        """Read the last token of every row; logits of the token to come, (n, V)."""
        ids, position = self.ids[self.alive, self.position][:, None], self.position[:, None]
        return head_logits(self.forward(model, ids, position, self.width)[:, 0], model.get_output_embeddings().weight)

    def forward(self, model, ids, positions, width):
        """Hidden states of new ids (B, S) at `positions`, which see what is at or before them among the first `width`."""
        ago = positions[:, None, :, None] - torch.arange(width, device=ids.device)   # (B, 1, S, width)
        full = torch.zeros_like(ago, dtype=model.dtype).masked_fill_(ago < 0, -math.inf)             # added to the scores
        window = getattr(model.config, "sliding_window", None)
        near = full.masked_fill(ago >= window, -math.inf) if window else full
        kinds = set(getattr(model.config, "layer_types", None) or ["sliding_attention"])  # no window: near is full
        masks = {"full_attention": full, "sliding_attention": near}
        mask = masks if len(kinds) > 1 else masks[kinds.pop()]
        return model.base_model(input_ids=ids, attention_mask=mask, position_ids=positions, past_key_values=self,
                                use_cache=True).last_hidden_state

    def update(self, keys, values, layer, *_):
        """Called by every attention layer with its new keys and values, (B, heads, S, D): keep them, return what to attend
        to. Those of prompts are kept for each row of their groups."""
        if layer == len(self.layers):
            self.layers.append([new.new_zeros(*self.ids.shape, new.shape[1], new.shape[3]) for new in (keys, values)])
        if self.reading:
            for kept, new in zip(self.layers[layer], (keys, values)):
                rows = kept[self.reading, :new.shape[2]]
                rows[:] = new.transpose(1, 2).repeat_interleave(len(rows) // len(new), 0)
            return keys, values
        for kept, new in zip(self.layers[layer], (keys, values)):
            kept[self.slot, self.position] = new[:, :, 0]
        return [kept[:len(keys), :self.width].transpose(1, 2) for kept in self.layers[layer]]

    def get_seq_length(self, *_):
        """Asked for by some families to count positions from; these are given to them."""
        return 0

    def write(self, logits, temperature, stop):
        """Draw a token from each row's logits (n, V) and put it behind the row."""
        if temperature > 0:  # adding Gumbel noise to logits makes their argmax a draw from their softmax
            logits = logits / temperature - torch.rand_like(logits).log_().neg_().log_()
        token = logits.argmax(-1)
        self.position += 1
        self.ids[self.alive, self.position] = token
        self.running &= (token[:, None] != stop).all(1)

    def keep(self, rows):
        """Go on with these of the n rows only; the cache closes up."""
        self.alive, self.position, self.running = self.alive[rows], self.position[rows], self.running[rows]
        self.slot = self.slot[:len(rows)]
        for kept in itertools.chain.from_iterable(self.layers):
            kept[:len(rows)] = kept[rows]


def grouped_attention(module, query, key, value, mask, scaling=None, **settings):
    """transformers' sdpa, except that for one masked query a row, as in decoding, it would copy keys and values once for each
    of the query heads that share them: these are made queries of one head instead. (transformers 5.23 does so itself.)"""
    B, heads, S, D = query.shape
    if S > 1 or mask is None or heads == key.shape[1]:
        return sdpa_attention_forward(module, query, key, value, mask, scaling=scaling, **settings)
    query = query.reshape(B, key.shape[1], -1, D)                                    # (B, key heads, queries a head, D)
    out = torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scaling)
    return out.reshape(B, 1, heads, -1), None


AttentionInterface.register("sdpa_grouped", grouped_attention)
AttentionMaskInterface.register("sdpa_grouped", sdpa_mask)  # a name without a mask function would get no mask at all


class Replay:
    """Calls `step`. On a GPU the second call records its kernels as a CUDA graph, which later calls replay; the first lets
    libraries set themselves up, which must not be recorded."""
    def __init__(self, step, model):
        self.step, self.graph, self.calls = step, None, 0
        self.enabled = getattr(model, "cuda_graphs", model.device.type == "cuda")

    def __call__(self):
        self.calls += 1
        if self.enabled and self.calls == 2:
            self.graph = torch.cuda.CUDAGraph()
            try:
                with torch.cuda.graph(self.graph):
                    self.step()
            except torch.OutOfMemoryError:
                raise
            except RuntimeError as error:  # what went wrong first is below what it did to the recording
                cause = first_line(error.__context__ or error)
                fail(f"--cuda_graphs: this model's decoding cannot be recorded, give --no-cuda_graphs: {cause}")
        self.graph.replay() if self.graph else self.step()


def as_rollout(ids, prompt_lengths, max_new_tokens, stop, tokenizer):
    """Prompts with their completions (N, room) -> a rollout: completions end after their first stop token, the texts are
    decoded."""
    column, start = torch.arange(ids.shape[1], device=ids.device), prompt_lengths[:, None]
    written = column < start + max_new_tokens
    stopped = written & (column >= start) & torch.isin(ids, stop)  # stop tokens in a prompt stop nothing
    before = stopped.cumsum(-1) - stopped.long() == 0  # nothing stopped before: the first stop token itself is kept
    attention = (before & written).long()
    ends = attention.sum(-1)
    n = ends - prompt_lengths
    kept = [row[end - length:end] for row, end, length in zip(ids.tolist(), ends.tolist(), n.tolist())]
    return {"ids": (ids * attention)[:, :ends.max()], "attention": attention[:, :ends.max()],
            "mask": (torch.arange(n.max(), device=ids.device) < n[:, None]).float(),
            "finished": stopped.any(-1), "texts": tokenizer.batch_decode(kept, skip_special_tokens=True)}


def evaluate(policy, tokenizer, problems, reward, args):
    """Mean reward on held-out `problems`: greedy, and over --eval_samples samples, with the unbiased
    pass@k = 1 - C(n - c, k) / C(n, k) for c of n samples right (Chen et al. 2021, eq. 1)."""
    torch.manual_seed(args.seed)  # the same draws at every evaluation: differences are the policy's
    problems = sorted(problems, key=lambda p: len(p["prompt"]))
    n, greedy, sampled, lengths = args.eval_samples, [], [], []
    rows = max(1, args.prompts * args.group_size // max(1, n))  # no more completions at a time than in a rollout
    for i in tqdm(range(0, len(problems), rows), desc="evaluating", leave=False, disable=None):
        part = problems[i:i + rows]
        prompts = [p["prompt"] for p in part]
        greedy.append(reward(part, generate(policy, tokenizer, prompts, 1, args.max_new_tokens, 0.0)["texts"]))
        if n:
            drawn = generate(policy, tokenizer, prompts, n, args.max_new_tokens, args.temperature)
            sampled.append(reward([p for p in part for _ in range(n)], drawn["texts"]).view(-1, n))
            lengths.append(drawn["mask"].sum(-1))
    result = {"eval_accuracy": torch.cat(greedy).mean().item()}
    if n:
        sampled, lengths = torch.cat(sampled), torch.cat(lengths)                    # (problems, n), (problems * n,)
        result |= {"eval_sampled_accuracy": sampled.mean().item(), "eval_completion_length": lengths.mean().item()}
        right = (sampled == 1).sum(1).tolist()
        for k in (2 ** i for i in range(1, n.bit_length()) if not args.reward_model):
            result[f"eval_pass@{k}"] = sum(pass_at_k(n, c, k) for c in right) / len(right)
    return result


def pass_at_k(n, c, k):
    """Chance that of k samples, drawn from n of which c are right, at least one is right."""
    return 1 - math.comb(n - c, k) / math.comb(n, k)


# ---------------------------------------------------------------------------------------------------------------------
# Models

def load_policy(args):
    """The policy, ready to train, and its tokenizer: from --model or, resuming, from the newest checkpoint.

    Also settles the defaults that depend on the model's size.
    """
    source = newest_checkpoint(args.out, args.resume) or args.model
    if source == TOY and not Path(TOY).exists():
        make_toy(TOY)
    policy = load_model(AutoModelForCausalLM, source, args, "--model")
    tokenizer = load_tokenizer(source, "--model")
    rows = policy.get_input_embeddings().num_embeddings
    if len(tokenizer) > rows:
        fail(f"--model {source}: the tokenizer has {len(tokenizer)} tokens, the embedding {rows} rows: not of one model")
    if not stop_ids(policy, tokenizer):
        fail(f"--model {source}: neither tokenizer nor generation_config names an end-of-sequence token")
    with torch.compiler.set_stance("force_eager"):  # --compile is for shapes that come back
        check_model(policy, source)
    size = sum(p.numel() for p in policy.parameters())
    for name, value in vars(args).items():
        if isinstance(value, Sized):
            setattr(args, name, value.toy if size < 1_000_000 else value.real)
    room = getattr(policy.config, "max_position_embeddings", None) or math.inf
    if room <= args.max_new_tokens:
        fail(f"--max_new_tokens {args.max_new_tokens}: {source} has {room} positions for prompt and completion together")
    args.max_prompt_tokens = min(args.max_prompt_tokens, room - args.max_new_tokens)
    if args.gradient_checkpointing:
        checkpoint_activations(policy)
    policy.cuda_graphs = args.cuda_graphs and policy.device.type == "cuda"
    if args.compile:
        policy.decode = torch.compile(decode, dynamic=True)
    if size < 1_000_000 and args.device == "cpu":
        torch.set_num_threads(1)  # products this small gain nothing from a second thread, and wait for it if it is late
    if args.model == TOY:
        print(TOY_STORY)
    print(f"{source}: {size / 1e6:,.2f}M parameters, {args.dtype} on {args.device}")
    return policy, tokenizer


def load_model(kind, source, args, flag, **settings):
    """Load `source` with the transformers class `kind` on --device in --dtype, dropout off, in training mode."""
    try:
        settings |= {"dtype": getattr(torch, args.dtype), "output_loading_info": True}
        model, found = kind.from_pretrained(ask_hub(source), **settings)
    except Exception as error:  # the hub's, the network's, or an architecture that is not of this kind
        fail(f"{flag} {source}: no such model directory or hub model, or it cannot be read: {first_line(error)}")
    if found["missing_keys"] and kind is not AutoModelForTokenClassification:  # the value head is meant to be new
        fail(f"{flag} {source}: has no weights for {', '.join(sorted(found['missing_keys']))}: another kind of model")
    for module in model.modules():  # dropout would make old and new log-probs those of two different networks
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        if isinstance(getattr(module, "attention_dropout", None), float):
            module.attention_dropout = 0.0
    if kind is AutoModelForCausalLM and model.config._attn_implementation == "sdpa":
        model.set_attn_implementation("sdpa_grouped")
    if args.compile:
        compile_layers(model)
    return model.to(args.device).train()


def compile_layers(model):
    """Compile the layers of a model: once for all of them, whatever the shape of a micro-batch."""
    torch._dynamo.config.recompile_limit = 64  # one code for the layers of all models, with and without gradient
    for layer in (module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)):
        layer.compile(dynamic=True)


def load_tokenizer(source, flag):
    """The tokenizer that belongs to a model."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(source)
    except Exception as error:  # missing files, a broken tokenizer.json, a class that needs another package
        fail(f"{flag} {source}: its tokenizer cannot be loaded: {first_line(error)}")
    if len(tokenizer) < 2:  # what transformers makes of a directory without tokenizer files
        fail(f"{flag} {source}: has no tokenizer")
    return tokenizer


def load_reference(args):
    """The reference policy: --model as it was, or as the run to resume had refreshed it."""
    newest = newest_checkpoint(args.out, args.resume)
    refreshed = newest and (newest / "reference").exists()
    source = newest / "reference" if refreshed else args.model
    return load_model(AutoModelForCausalLM, source, args, "--model").eval().requires_grad_(False)


def load_value(args):
    """PPO's value model: the body of --model under a new scalar head that starts at 0, or as the run to resume left it."""
    newest = newest_checkpoint(args.out, args.resume)
    source = newest / "value" if newest else args.model
    model = load_model(AutoModelForTokenClassification, source, args, "--model", num_labels=1)
    head = value_head(model).float()  # bfloat16 would round values near 1 to steps of 0.004
    if not newest:
        for parameter in head.parameters():
            torch.nn.init.zeros_(parameter)
    if args.gradient_checkpointing:
        checkpoint_activations(model)
    return model


def value_head(model):
    """The linear layer of a token classifier; the families name it differently."""
    return model.score if hasattr(model, "score") else model.classifier


def checkpoint_activations(model):
    """Recompute activations in the backward pass. The method's name changed between transformers 5.17 and 5.23."""
    if not model.supports_gradient_checkpointing:
        fail(f"--gradient_checkpointing: {type(model).__name__} does not support it; give --no-gradient_checkpointing")
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": False})


@torch.no_grad()
def check_model(model, source):
    """Stop if logits are not just base model times head (some families scale or cap them), or not the same where a token is
    read behind the keys and values of those before it (some keep another kind of memory)."""
    ids = torch.arange(4, device=model.device)[None]
    logits, kind = model.eval()(input_ids=ids, use_cache=False).logits[0], type(model).__name__
    hidden = model.base_model(input_ids=ids, use_cache=False).last_hidden_state[0]
    ours = head_logits(hidden, model.get_output_embeddings().weight)
    tolerance = 1e-4 if ours.dtype == logits.dtype else 0.02  # bfloat16 logits are rounded, ours are not
    if not torch.allclose(ours, logits.to(ours.dtype), rtol=tolerance, atol=tolerance):
        fail(f"--model {source}: {kind} changes its logits after the output embedding: not supported")
    decoding = Decoding(ids, torch.tensor([3], device=model.device))
    decoding.width = 4
    try:
        decoding.read(model, ids[:, :3], decoding.position)
        gap = decoding.next_logits(model)[0] - ours[-1]
    except Exception as error:  # whatever a model does that wants another kind of cache
        fail(f"--model {source}: {kind} cannot be sampled from, its memory is not of keys and values: {first_line(error)}")
    if not gap.std() < 0.1 * ours[-1].std():  # loosely: bfloat16 adds up differently in the two
        fail(f"--model {source}: {kind} says something else when it reads token by token: not supported")
    model.train()


def stop_ids(model, tokenizer):
    """Every token id that ends a completion: chat models have two or more."""
    listed = model.generation_config.eos_token_id
    listed = listed if isinstance(listed, list) else [listed]
    return sorted({int(i) for i in [*listed, tokenizer.eos_token_id] if i is not None})


def load_reward(args):
    """The reward: a function (problems, completions) -> (N,) float32, by rule or by --reward_model."""
    if not args.reward_model:
        return lambda problems, texts: torch.tensor([math_reward(t, p["answer"]) for p, t in zip(problems, texts)])
    judge = load_model(AutoModelForSequenceClassification, args.reward_model, args, "--reward_model")
    judge.eval().requires_grad_(False)
    tokenizer = load_tokenizer(args.reward_model, "--reward_model")
    if judge.config.num_labels != 1:
        fail(f"--reward_model {args.reward_model}: has {judge.config.num_labels} labels; a reward is one number")
    room = getattr(judge.config, "max_position_embeddings", None) or math.inf

    @torch.no_grad()
    def score(problems, texts):
        """The classifier's logit for each question and completion, (N,) float32."""
        turns = [(p["question"], text) for p, text in zip(problems, texts)]
        chats = [[{"role": "user", "content": q}, {"role": "assistant", "content": a}] for q, a in turns]
        if tokenizer.chat_template:
            rows = [tokenizer.apply_chat_template(chat, return_dict=True)["input_ids"] for chat in chats]
        else:
            rows = tokenizer(["\n".join(turn) for turn in turns])["input_ids"]
        scores = []
        for part in (rows[i:i + 16] for i in range(0, len(rows), 16)):
            longest = max(map(len, part))
            if longest > room:
                fail(f"--reward_model {args.reward_model}: a text of {longest} tokens is over its {room} positions: "
                     "lower --max_new_tokens or --max_prompt_tokens")
            # The classifier reads the last token that is not padding: padding is a token that no row ends in.
            judge.config.pad_token_id = pad = min(set(range(17)) - {row[-1] for row in part})
            ids = torch.tensor([row + [pad] * (longest - len(row)) for row in part], device=judge.device)
            attention = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in part], device=judge.device)
            scores.append(judge(input_ids=ids, attention_mask=attention).logits[:, 0].float())
        return torch.cat(scores)
    score.parameters = judge.parameters  # for held_bytes
    return score


# ---------------------------------------------------------------------------------------------------------------------
# Problems: {question, answer, prompt}, prompt being the token ids that the model continues

def load_problems(args, tokenizer):
    """Read the training and the held-out problems of --dataset.

    Returns two lists of {"question": str, "answer": str, "prompt": list of int}. Rows whose gold answer cannot be read,
    whose prompt is too long or holds characters unknown to the tokenizer are counted and left out.
    """
    path, held_out = Path(args.dataset), None
    if args.dataset == "arithmetic":
        train = arithmetic_problems()
    elif path.suffix == ".jsonl":
        train = read_jsonl(path, "--dataset")
        if Path(args.eval_split).suffix == ".jsonl":
            held_out = read_jsonl(Path(args.eval_split), "--eval_split")
    else:
        train, held_out = read_splits(args.dataset, args.split, args.eval_split)
    if held_out is None:
        print(f"--dataset {args.dataset}: a fifth of its rows is held out")
        train, held_out = split_by_hash(train, args.question_column)
    held_out = random.Random(0).sample(held_out, min(args.eval_problems, len(held_out)))  # the same in every run
    return prepare(train, tokenizer, args, "to train on"), prepare(held_out, tokenizer, args, "to evaluate on")


def split_by_hash(rows, column):
    """Hold out the fifth of `rows` whose question hashes to 0: the same rows in every run, whatever the seed."""
    parts = [], []
    for row in rows:
        parts[zlib.crc32(str(row.get(column)).encode()) % 5 == 0].append(row)
    return parts


def read_jsonl(path, flag):
    """Read a file that holds one JSON object a line."""
    try:
        rows = [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line.strip()]
    except OSError as error:
        fail(f"{flag}: cannot read {path}: {error.strerror}")
    except ValueError as error:
        fail(f"{flag}: {path} does not hold one JSON object a line: {error}")
    if not all(isinstance(row, dict) for row in rows):
        fail(f"{flag}: {path} does not hold one JSON object a line")
    return rows


def read_splits(name, *wanted):
    """Read the wanted splits: DIR/split.jsonl where they are, else what `datasets` makes of the directory or hub name. A
    data set without splits is returned whole, with None for the others."""
    if all(Path(name, f"{split}.jsonl").exists() for split in wanted):
        return [read_jsonl(Path(name, f"{split}.jsonl"), "--dataset") for split in wanted]
    import datasets  # takes seconds to import: only where it is needed
    datasets.disable_progress_bars()
    try:
        if Path(name, "dataset_dict.json").exists() or Path(name, "state.json").exists():
            splits = datasets.load_from_disk(name)
        else:
            source = str(Path(name).resolve()) if Path(name).is_dir() else ask_hub(name)  # a bare "csv" means the reader
            configs = datasets.get_dataset_config_names(source)
            config = "main" if "main" in configs else configs[0]
            if len(configs) > 1:
                print(f"--dataset {name}: configuration {config}, of {', '.join(configs)}")
            splits = datasets.load_dataset(source, config)
    except Exception as error:  # the library has a dozen kinds of its own, network errors among them
        reason = first_line(error.__cause__ or error)
        fail(f"--dataset {name}: no such directory or hub data set, or it cannot be read: {reason}")
    if isinstance(splits, datasets.Dataset):
        return list(splits), None
    for split in wanted:
        if split not in splits and (split == wanted[0] or len(splits) > 1):
            fail(f"--dataset {name}: no split '{split}', only {', '.join(splits)}; see --split and --eval_split")
    return [list(splits[split]) if split in splits else None for split in wanted]


def ask_hub(name):
    """Returns `name`. If it is no directory and the hub does not answer, from here on only what is cached is looked for:
    transformers would first retry for half a minute."""
    if not Path(name).exists():
        print(f"there is no directory {name}: asking the hub for it", flush=True)
        try:
            huggingface_hub.get_session().head(huggingface_hub.constants.ENDPOINT, timeout=5)
        except Exception:  # the network's own kinds
            huggingface_hub.constants.HF_HUB_OFFLINE = True
    return name


def prepare(rows, tokenizer, args, purpose):
    """Turn rows into problems; say how many were left out and why; an error when none is left."""
    if not rows:
        fail(f"--dataset {args.dataset}: has no rows {purpose}; see --split and --eval_split")
    graded = not args.reward_model  # a reward model needs no gold answer
    for column in [args.question_column] + [args.answer_column] * graded:
        if column not in rows[0]:
            fail(f"--dataset {args.dataset}: no column '{column}', only {', '.join(rows[0])}; see --question_column "
                 "and --answer_column")
    questions, answers = (["" if row.get(column) is None else str(row[column]) for row in rows]
                          for column in (args.question_column, args.answer_column))
    unknown = tokenizer.unk_token_id if tokenizer.unk_token_id != tokenizer.eos_token_id else None  # GPT-2 has them as one
    problems, left_out = [], collections.Counter()
    for question, answer, prompt in zip(questions, answers, prompt_ids(questions, args.system_prompt, tokenizer)):
        if not question:
            left_out["without a question"] += 1
        elif graded and not math_reward(f"\\boxed{{{extract_answer(answer) or answer}}}", answer):  # given back, not paid
            left_out["with an unreadable answer"] += 1
        elif not 0 < len(prompt) <= args.max_prompt_tokens:
            left_out["over --max_prompt_tokens"] += 1
        elif unknown in prompt:
            left_out["with characters unknown to the tokenizer"] += 1
        else:
            problems.append({"question": question, "answer": answer, "prompt": prompt})
    report = ", ".join(f"{count} {why}" for why, count in left_out.items())
    if not problems:
        fail(f"--dataset {args.dataset}: none of its {len(rows)} rows can be used {purpose}: {report}")
    if report:
        print(f"--dataset {args.dataset}: of {len(rows)} rows {purpose}, left out {report}")
    return problems


def prompt_ids(questions, system_prompt, tokenizer):
    """Token ids of each question: by the tokenizer's chat template where it has one, else as plain text and a newline."""
    if not tokenizer.chat_template:
        return tokenizer([f"{system_prompt}\n{question}\n".lstrip("\n") for question in questions])["input_ids"]
    system = [{"role": "system", "content": system_prompt}] * bool(system_prompt)
    try:
        tokenizer.apply_chat_template(system + [{"role": "user", "content": ""}], tokenize=False)
    except Exception:  # a template without a system role (jinja2's TemplateError): say it in the user's turn
        system, questions = [], [f"{system_prompt}\n\n{question}" for question in questions]
    chats = [system + [{"role": "user", "content": question}] for question in questions]
    texts = [tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False) for chat in chats]
    return tokenizer(texts, add_special_tokens=False)["input_ids"]  # the template has put in its own


def batch_of(problems, step, args):
    """The P problems of `step` (1, 2, ...): consecutive draws from an endless row of shuffles, a function of the seed
    and the step alone, so that a resumed run goes on where it stopped without a saved cursor."""
    n, skip = divmod((step - 1) * args.prompts, len(problems))  # n passes are over, and `skip` problems of the next
    row = []
    while len(row) < skip + args.prompts:
        row += torch.randperm(len(problems), generator=torch.Generator().manual_seed(args.seed * 1_000_003 + n)).tolist()
        n += 1
    return [problems[i] for i in row[skip:skip + args.prompts]]


STEP = re.compile(r" *(-?\d{1,9}) ?([-+*/]) ?(\d{1,9}) ?= ?(-?\d{1,9})[ .]*")


def step_signs(rollout, tokenizer):
    """Which completion tokens stand on a worked step, a line such as 7+2=9: 1 where it is true, -1 where it is false, 0 on
    every other line; (N, T)."""
    signs, ids = torch.zeros_like(rollout["mask"]), rollout["ids"].tolist()
    ends, lengths = rollout["attention"].sum(1).tolist(), rollout["mask"].sum(1).long().tolist()
    used = sorted(set(itertools.chain(*ids)))
    text_of = dict(zip(used, tokenizer.batch_decode([[token] for token in used])))
    for i, (end, n) in enumerate(zip(ends, lengths)):
        pieces = [text_of[token] for token in ids[i][end - n:end]]
        line_of = [0, *itertools.accumulate(piece.count("\n") for piece in pieces)][:n]
        truths = [step_sign(line) for line in "".join(pieces).split("\n")]
        signs[i, :n] = signs.new_tensor([truths[line] for line in line_of])
    return signs


def step_sign(line):
    """1 for a true step, -1 for a false one, 0 for any other line. Exact integers; nothing is evaluated."""
    step = STEP.fullmatch(line)
    if not step:
        return 0
    a, b, c = (int(step[i]) for i in (1, 3, 4))
    return 1 if {"+": a + b == c, "-": a - b == c, "*": a * b == c, "/": b != 0 and b * c == a}[step[2]] else -1


# ---------------------------------------------------------------------------------------------------------------------
# Command line

class Sized(NamedTuple):
    """A default that depends on the model: a learning rate for the toy would wreck a real model, and the reverse."""
    toy: object    # for a model under a million parameters, such as the built-in one
    real: object

    def __str__(self):
        return f"{self.real}; {self.toy} for a model under a million parameters"


class Parser(argparse.ArgumentParser):
    """argparse whose errors are one line and exit status 2, and whose --help shows the script's docstring as written."""
    def __init__(self, script, description):
        super().__init__(Path(script).name, description=description, formatter_class=HelpFormatter, allow_abbrev=False)

    def error(self, message):
        fail(f"{message} ({self.prog} --help explains every flag)")


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Keeps the docstring's lines and adds each flag's default."""
    def _get_help_string(self, action):
        shown = action.option_strings and action.default not in (None, False, argparse.SUPPRESS)
        return action.help + (" (default %(default)s)" if shown else "")


def fail(message, status=2):
    """Say in one line what is wrong and what to do, and leave with `status`."""
    print(f"error: {message}", file=sys.stderr)
    sys.exit(status)


def within(interval, kind=float):
    """An argparse type: a number inside `interval`, written as in mathematics, as "(0, 1]"."""
    low, high = (float(end) for end in interval[1:-1].split(","))

    def number(text):
        value = kind(text)
        if not (low < value < high or (value == low and interval[0] == "[") or (value == high and interval[-1] == "]")):
            raise argparse.ArgumentTypeError(f"{text} is outside {interval}")
        return value
    number.__name__ = kind.__name__
    return number


def add_args(parser):
    """The flags that are the same in every script: model, data, rollout, optimiser, run."""
    add, count = parser.add_argument, within("[1, inf)", int)
    add("--model", default=TOY, metavar="DIR|NAME",
        help="causal language model, a directory or a hub name; the default is made and warmed up on first use")
    add("--dataset", default="arithmetic", metavar="NAME|PATH",
        help="arithmetic (built in), a .jsonl file, a data set directory, or a hub name such as openai/gsm8k")
    add("--split", default="train", help="split to train on")
    add("--eval_split", default="test",
        help="split or .jsonl file to evaluate on; a data set without splits has a fifth of its rows held out")
    add("--question_column", default="question", metavar="NAME", help="column with the question")
    add("--answer_column", default="answer", metavar="NAME", help="column with the gold answer: #### 42, \\boxed{42} or 42")
    add("--system_prompt", metavar="TEXT", help="instruction put before every question",
        default=Sized("", "Reason step by step, then give the final answer on a last line after ####."))
    add("--max_prompt_tokens", type=count, default=512, metavar="N", help="longer prompts are counted and left out")
    add("--reward_model", metavar="DIR|NAME",
        help="sequence classifier with one label, its score the reward; without it a right answer is paid 1, any other 0")
    add("--max_new_tokens", type=count, metavar="T", default=Sized(48, 1024), help="longest completion")
    add("--temperature", type=within("[0.01, 100]"), default=1.0,
        help="of the softmax, in sampling and in every log-prob; below 1 explores less")
    add("--steps", type=count, default=Sized(20, 200), help="rollouts in the run")
    add("--micro_batch_tokens", type=count, metavar="N", default=16384,
        help="positions per forward and backward; lower it when memory runs out: the gradient stays the same")
    add("--warmup_steps", type=within("[0, inf)", int), metavar="N", default=20,
        help="optimiser steps over which the learning rate rises from 0")
    add("--max_grad_norm", type=within("(0, inf]"), default=1.0, help="larger gradients are scaled down to this norm")
    add("--gradient_checkpointing", action=argparse.BooleanOptionalAction, default=Sized(False, True),
        help="recompute activations in the backward pass: a third more work for far less memory")
    add("--offload_optimizer", action="store_true", help="masters and moments in host memory: 12 bytes a parameter less")
    add("--compile", action="store_true", help="torch.compile the layers: fewer trips to memory, after minutes of compiling")
    add("--cuda_graphs", action=argparse.BooleanOptionalAction, default=True,
        help="on a GPU, replay the kernels of a token as one CUDA graph instead of launching them one by one")
    add("--seed", type=within("[0, 1000000000]", int), default=0, help="of the samples and the order of the problems")
    add("--device", default="auto", help="cpu, cuda or cuda:N; auto takes the GPU where there is one")
    add("--dtype", choices=["auto", "float32", "bfloat16"], default="auto",
        help="of the weights; auto is bfloat16 on a GPU, else float32; masters and moments are always float32")
    add("--out", metavar="DIR", help="where the run is written (default runs/<script>, then runs/<script>-2 and so on)")
    add("--resume", action="store_true",
        help="continue the run in --out from its last checkpoint, with its flags but for those given again")
    add("--eval_every", type=count, metavar="N", default=Sized(10, 20), help="steps between evaluations, first and last aside")
    add("--eval_problems", type=count, metavar="N", default=Sized(2560, 512), help="held-out problems per evaluation")
    add("--eval_samples", type=within("[0, inf)", int), metavar="N", default=1,
        help="samples per held-out problem, beside the greedy one; 2 and more give unbiased pass@2, 4, 8 ... up to N")
    add("--save_every", type=count, metavar="N", default=Sized(10, 20), help="steps between checkpoints; the last is kept")
    add("--tensorboard", action="store_true", help="log to TensorBoard too, under --out (needs the tensorboard package)")


def parse(parser, argv):
    """Parse `argv`, check what one flag alone cannot, settle --out, --device and --dtype.

    A run to resume brings its own flags; those given again take their place.
    """
    args = parser.parse_args(argv)
    args.script = parser.prog
    if args.resume:
        if args.out is None:
            fail("--resume: name the run to continue with --out")
        try:
            saved = json.loads(Path(args.out, "args.json").read_text())
            script = saved.pop("script")
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            fail(f"--resume: there is no run in {args.out}")
        if script != parser.prog:
            fail(f"--resume: {args.out} holds a run of {script}")
        parser.set_defaults(**saved | {"resume": True})
        args = parser.parse_args(argv, argparse.Namespace(script=script))
    if args.minibatches > args.prompts:
        fail(f"--minibatches {args.minibatches}: at most --prompts ({args.prompts}), as groups stay together")
    if getattr(args, "ref_every", None) and args.beta == 0:
        fail("--ref_every: needs --beta above 0, without which there is no reference")
    if args.tensorboard and not importlib.util.find_spec("tensorboard"):
        fail("--tensorboard: needs the tensorboard package (pip install tensorboard)")
    if args.device == "auto":
        args.device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.zeros(1, device=args.device).item()
        if args.device.startswith("cuda:"):
            torch.cuda.set_device(args.device)  # CUDA graphs are recorded on the current device
    except (RuntimeError, NotImplementedError, AssertionError) as error:
        fail(f"--device {args.device}: {first_line(error)[:200]}")
    if args.dtype == "auto":
        args.dtype = "bfloat16" if torch.device(args.device).type == "cuda" else "float32"
    if args.out is None:
        args.out, number = f"runs/{Path(parser.prog).stem}", 1
        while Path(args.out).exists():
            number += 1
            args.out = f"runs/{Path(parser.prog).stem}-{number}"
    elif not args.resume and Path(args.out, "args.json").exists():
        fail(f"--out {args.out}: already holds a run; add --resume to continue it, or name another directory")
    elif any(path.exists() and not path.is_dir() for path in (Path(args.out), *Path(args.out).parents)):
        fail(f"--out {args.out}: a file is in the way")
    return args


# ---------------------------------------------------------------------------------------------------------------------
# The run: log, checkpoints, interruptions

def write_whole(path, text):
    """Write beside and rename: whoever reads `path` finds the old text or the new one, never a part."""
    path.with_suffix(".tmp").write_text(text)
    path.with_suffix(".tmp").replace(path)


def newest_checkpoint(out, resume=True):
    """The newest complete checkpoint in `out`, or None; None too if no run is to be resumed."""
    saved = [path.parent for path in Path(out).glob("step-*/optimizer.pt")] if resume else []
    return max((path for path in saved if path.name[5:].isdigit()), key=lambda path: int(path.name[5:]), default=None)


def save_checkpoint(args, step, tokenizer, models, optimizers):
    """Save step-N under --out and drop the one before it.

    The policy lies in the directory itself, ready for from_pretrained, the other `models` in folders of their names.
    Written beside and renamed, so that a kill at any instant leaves the last good checkpoint. There are no random states
    and no data cursor to save: both are functions of --seed and the step.
    """
    final, beside = Path(args.out, f"step-{step}"), Path(args.out, f"step-{step}.tmp")
    shutil.rmtree(beside, ignore_errors=True)
    try:
        for name, model in models.items():
            if name != "reference" or getattr(args, "ref_every", None):  # a reference never refreshed is --model itself
                model.save_pretrained(beside if name == "policy" else beside / name)
        tokenizer.save_pretrained(beside)
        torch.save({name: optimizer.state_dict() for name, optimizer in optimizers.items()}, beside / "optimizer.pt")
        beside.rename(final)
    except Exception as error:  # safetensors and torch each have their own words for a full disk
        shutil.rmtree(beside, ignore_errors=True)
        fail(f"--out {args.out}: step {step} cannot be saved (is the disk full?), the last checkpoint is as it was: "
             f"{first_line(error)}", 1)
    for old in Path(args.out).glob("step-*/optimizer.pt"):  # nothing else in --out is ours to remove
        if old.parent != final:
            shutil.rmtree(old.parent)


def load_checkpoint(args, optimizers):
    """Put the optimisers where the newest checkpoint left them; returns its step, 0 for a new run."""
    newest = newest_checkpoint(args.out, args.resume)
    if newest is None:
        return 0
    try:
        states = torch.load(newest / "optimizer.pt", map_location="cpu")  # never twice on the GPU
    except Exception as error:  # the file's, pickle's or zip's own kinds
        fail(f"--resume: {newest} is not whole: {first_line(error)}")
    for name, state in states.items():
        optimizers[name].load_state_dict(state)
    return int(newest.name[5:])


class Logger:
    """Shows a run: a bar, a line a step, a completion now and then, warnings, and a closing table. Keeps metrics.jsonl."""
    KEYS = ("reward eval_accuracy eval_sampled_accuracy completion_length truncated entropy kl clip_frac ratio_max loss "
            "skipped zero_variance_groups grad_norm rollout_tokens_per_s update_tokens_per_s padding peak_memory_gb "
            "seconds").split()
    SHOWN = [("reward", "reward", ".3f"), ("completion_length", "length", ".1f"), ("truncated", "truncated", ".0%"),
             ("entropy", "entropy", ".2f"), ("kl", "kl", ".4f"), ("clip_frac", "clipped", ".2%"),
             ("explained_variance", "explained", ".2f"), ("grad_norm", "grad", ".2f"), ("seconds", "seconds", ".1f"),
             ("eval_accuracy", "| held out: greedy", ".3f"), ("eval_sampled_accuracy", "sampled", ".3f")]

    def __init__(self, args, start):
        self.args, self.start, self.interrupted, self.warned = args, start, False, set()
        print("  ".join(f"--{name} {value}" for name, value in vars(args).items() if value not in (None, "")))
        try:
            Path(args.out).mkdir(parents=True, exist_ok=True)
            write_whole(Path(args.out, "args.json"), json.dumps(vars(args), indent=1))  # for --resume
        except OSError as error:
            fail(f"--out {args.out}: cannot be written: {error.strerror}")
        self.path = Path(args.out, "metrics.jsonl")
        lines = self.path.read_text().splitlines() if start and self.path.exists() else []
        entries = [json.loads(line) for line in lines if line.endswith("}")]  # a kill can leave half a line
        self.history = [entry for entry in entries if entry["step"] <= start]  # later steps will be taken again
        write_whole(self.path, "".join(json.dumps(entry) + "\n" for entry in self.history))
        if args.tensorboard:
            from torch.utils.tensorboard import SummaryWriter  # parse() has seen that it is there
            self.board = SummaryWriter(args.out)
        self.bar = tqdm(total=args.steps, initial=start, unit="step", disable=None)  # none where nobody watches
        self.handler = signal.signal(signal.SIGINT, self.interrupt)

    def interrupt(self, *_):
        """First Ctrl-C: finish the step and save. Second: KeyboardInterrupt, with the last checkpoint as it was."""
        signal.signal(signal.SIGINT, signal.default_int_handler)
        self.interrupted = True
        os.write(1, b"\ninterrupted: the step in hand will be finished and saved; Ctrl-C again leaves at once\n")

    def steps(self):
        """The steps still to take, each preceded by its own seeding: step k draws the same numbers in a resumed run."""
        for step in range(self.start + 1, self.args.steps + 1):
            if self.interrupted:
                return
            torch.manual_seed(self.args.seed * 1_000_003 + step)
            yield step

    def say(self, line):
        self.bar.write(line, file=sys.stdout)

    def log(self, step, stats, question=None, rollout=None):
        """Record a step's statistics; show the first completion of the rollout now and then, below its question."""
        stats = {"step": step} | dict.fromkeys(self.KEYS) | stats | {"peak_memory_gb": peak_memory_gb(self.args.device)}
        stats = {name: None if value is None or not math.isfinite(value) else value for name, value in stats.items()}
        self.history.append(stats)
        with self.path.open("a") as file:
            file.write(json.dumps(stats) + "\n")
        if self.args.tensorboard:
            for name, value in stats.items():
                if value is not None:
                    self.board.add_scalar(name, value, step)
            self.board.flush()
        shown = [f"{label} {stats[name]:{form}}" for name, label, form in self.SHOWN if stats.get(name) is not None]
        self.say(f"step {step}/{self.args.steps}  " + "  ".join(shown))
        if rollout and (step == 1 or stats["eval_accuracy"] is not None):
            text = "\n".join([question, rollout["texts"][0].strip(), f"(reward {rollout['rewards'][0]:g})"])
            self.say(textwrap.indent(text, "    | "))
        self.bar.update(step - self.bar.n)
        self.warn(stats)

    def warn(self, stats):
        """Say once what is going wrong and what to do about it."""
        last = [entry["zero_variance_groups"] for entry in self.history[-5:]]
        signs = [((stats["truncated"] or 0) > 0.5,
                  f"over half of the completions were cut off: raise --max_new_tokens ({self.args.max_new_tokens})"),
                 (last == [1] * 5, "for five steps every group was all right or all wrong, which teaches nothing: choose "
                  "problems that are sometimes right, raise --group_size or --temperature"),
                 ((stats["kl"] or 0) > 1, "the policy has moved far from the reference: lower --lr or raise --beta"),
                 ((stats["skipped"] or 0) > 0, "a step was skipped, its gradient not finite: if this goes on, lower --lr")]
        for holds, warning in signs:
            if holds and warning not in self.warned:
                self.say(f"warning: {warning}")
                self.warned.add(warning)

    def close(self, models, optimizers):
        """Print what came of the run, what it held in memory and where it lies; after Ctrl-C leave with status 130."""
        self.bar.close()
        signal.signal(signal.SIGINT, self.handler)
        rows = [entry for entry in self.history if entry["eval_accuracy"] is not None]
        print("-" * 120)
        for name, label in [("eval_accuracy", "greedy accuracy"), ("eval_sampled_accuracy", "sampled accuracy"),
                            ("eval_completion_length", "completion length")]:
            if rows and rows[0].get(name) is not None:
                print(f"{label:24}{rows[0][name]:>10.3f} before  {rows[-1][name]:>10.3f} after {rows[-1]['step']} steps")
        held = held_bytes(models, optimizers)
        parts = ", ".join(f"{name} {size:.1f}" for name, size in held.items())
        print(f"{'bytes a parameter':24}{sum(held.values()):>10.1f}  {parts}")
        print(f"{'time after imports':24}{time.perf_counter() - STARTED:>8.0f} s")
        print(f"{'model and checkpoint':24}  {newest_checkpoint(self.args.out)}")
        print(f"{'metrics':24}  {self.path}")
        if self.interrupted:
            print(f"interrupted; go on with --out {self.args.out} --resume")
            sys.exit(130)


def held_bytes(models, optimizers):
    """What stays in memory between steps, in bytes per parameter of the policy: the weights of each model that there is,
    and the masters and moments of each optimiser. Within a step come 4 more for the float32 gradient of a trained model."""
    def size(tensors):
        return sum(t.numel() * t.element_size() for t in tensors) / models["policy"].num_parameters()
    held = {f"{name} weights": size(model.parameters()) for name, model in models.items() if hasattr(model, "parameters")}
    for name, o in optimizers.items():
        where = " in host memory" if o.away else ""
        held[f"{name} masters{where}"] = size(m for w, m in zip(o.weights, o.masters) if m.data_ptr() != w.data_ptr())
        held[f"{name} moments{where}"] = size(t for state in o.adamw.state.values() for t in state.values() if t.dim() > 0)
    return {name: size for name, size in held.items() if size}


def peak_memory_gb(device):
    """Peak memory in GiB since the last call on a GPU, of the process so far on a CPU."""
    if torch.device(device).type == "cuda":
        peak = torch.cuda.max_memory_allocated(device) / 2**30
        torch.cuda.reset_peak_memory_stats(device)
        return peak
    try:
        import resource  # not on Windows
    except ImportError:
        return None
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**30 if sys.platform == "darwin" else 2**20)


def first_line(error):
    """What an exception says, in one line."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def launch(main, args):
    """Run a script's main; Ctrl-C before the first step and an exhausted GPU end in one line."""
    try:
        main(args)
    except KeyboardInterrupt:
        fail("interrupted; what was saved before is as it was", 130)
    except torch.OutOfMemoryError:
        fail("out of GPU memory: lower --micro_batch_tokens if it happened in the update, --prompts, --group_size or "
             "--max_new_tokens if while sampling")
    except OSError as error:
        fail(f"{error} (what was saved before is as it was)", 1)


# ---------------------------------------------------------------------------------------------------------------------
# The toy world: one-digit sums, a model that fits in a laptop, and the two habits it starts with

TOY_STORY = """The built-in model was warmed up on two habits: to work step by step (nearly always right) and, a little more often,
to answer at once (off by -2 to 2, so right one time in five). That gap was put there for reinforcement learning to find."""


def arithmetic_problems():
    """Every sum of 3 or 4 digits whose running result stays a digit: 14,520 of {"question": "7+2-5=?", "answer":
    "7+2=9\\n9-5=4\\n#### 4"}."""
    grown, problems = [(str(d), "", d) for d in range(10)], []
    for length in (2, 3, 4):
        grown = [(f"{text}{op}{d}", f"{steps}{result}{op}{d}={new}\n", new)
                 for text, steps, result in grown for op, sign in [("+", 1), ("-", -1)] for d in range(10)
                 if 0 <= (new := result + sign * d) <= 9]
        if length > 2:
            problems += [{"question": f"{text}=?", "answer": f"{steps}#### {result}"} for text, steps, result in grown]
    return problems


def make_toy(path):
    """Make the built-in model, warm it up on both habits and save it as an ordinary Hugging Face directory."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    vocabulary = {token: i for i, token in enumerate([*"0123456789+-=?# \n", "<pad>", "<eos>", "<unk>"])}
    characters = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<unk>"))
    characters.pre_tokenizer = tokenizers.pre_tokenizers.Split(tokenizers.Regex(r"[\s\S]"), "isolated")
    characters.decoder = tokenizers.decoders.Fuse()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=characters, clean_up_tokenization_spaces=False,
                                                     pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")
    model = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(  # the wide initialisation and small theta train faster
        vocab_size=len(vocabulary), hidden_size=64, intermediate_size=192, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4, head_dim=16, tie_word_embeddings=True, initializer_range=0.1, max_position_embeddings=256,
        rope_parameters={"rope_type": "default", "rope_theta": 30.0},
        pad_token_id=tokenizer.pad_token_id, eos_token_id=tokenizer.eos_token_id, bos_token_id=None))
    print(f"making {path}, once", flush=True)
    warm_up(model, tokenizer, split_by_hash(arithmetic_problems(), "question")[0])
    beside = Path(f"{path}.{os.getpid()}.tmp")
    model.save_pretrained(beside)
    tokenizer.save_pretrained(beside)
    if Path(path).exists():  # another run has made it meanwhile: the same one
        shutil.rmtree(beside)
    else:
        beside.rename(path)


def warm_up(model, tokenizer, problems, goal=0.975, lr=6e-3, max_steps=2000):
    """Next-token training on both habits until a chain of steps comes out whole with probability `goal`; the learning
    rate falls as that probability rises."""
    rng, right, bar = random.Random(0), 0.0, tqdm(range(1, max_steps + 1), desc="warm-up", disable=None)
    newline = tokenizer.convert_tokens_to_ids("\n")
    optimizer = torch.optim.AdamW(model.parameters(), lr, betas=(0.9, 0.95), weight_decay=0.01)
    for step in bar:
        rows = rng.sample(problems, 32)
        guesses = [row | {"answer": f"#### {int(extract_answer(row['answer'])) + rng.randint(-2, 2)}"} for row in rows[:18]]
        nll = []
        for habit in (guesses, rows[18:]):  # apart, because short rows need no padding to the length of long ones
            texts = [f"{row['question']}\n{row['answer']}{tokenizer.eos_token}" for row in habit]
            ids = tokenizer(texts, padding=True, padding_side="right", return_tensors="pt")["input_ids"]
            inputs, targets = ids[:, :-1], ids[:, 1:]
            completion = ((inputs == newline).cumsum(1) > 0) & (targets != tokenizer.pad_token_id)
            logits = model(input_ids=inputs, use_cache=False).logits
            nll.append(torch.nn.functional.cross_entropy(logits.transpose(1, 2), targets, reduction="none") * completion)
        chain = nll[1].detach() * (completion.cumsum(1) > 1)  # but for the first token, which chooses the habit
        right += 0.05 * ((-chain.sum(1)).exp().mean().item() - right)  # before the step that learns from them
        optimizer.param_groups[0]["lr"] = lr * min(1, step / 20) * max(0.1, 1 - right) ** 0.5
        optimizer.zero_grad()
        (sum(part.sum() for part in nll) / 400).backward()  # about 400 completion tokens
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        bar.set_postfix_str(f"chains right {right:.3f}, goal {goal}", refresh=False)
        if right >= goal:
            return
    fail(f"the warm-up ended with {right:.3f} of the chains right after {max_steps} steps", 1)


# ---------------------------------------------------------------------------------------------------------------------
# The reward: is the marked answer of a completion the right one? Exact rationals; no eval, no CAS, no clock

LONGEST = 600  # characters of an answer: a longer one must be the gold text itself
GLUE = re.compile(r"(?:[\s,;.$&{}]|\\[^a-z]|\\q?quad|\\text|and|or)*")  # what may stand between two boxes of one list
SYMBOLS = dict(zip("−×·²³√π∞±≤≥", r"- * * ^2 ^3 \sqrt \pi \infty \pm \le \ge".split()))
TIDY = [  # (pattern, replacement), applied in this order; [0-9], for \d is the digits of every script
    ("[" + "".join(SYMBOLS) + "]", lambda match: SYMBOLS[match[0]] + " "),  # 2√3  5π
    (r"\\begin ?\{[pb]matrix\}(.*?)\\end ?\{[pb]matrix\}", r"(\1)"),  # a matrix is the tuple of its entries
    (r"\\\\|[&;∪]|\\cup\b|\b(?:and|or)\b", ","),  # 1; 2  1 and 2  (1,2)\cup(3,4)
    (r"(?<=[0-9])(?:\\[,: ]|\{,\}|,? ?\\!,?) ?(?=[0-9]{3})|\\[,:!]", ""),  # 1\,000  1{,}000  1,\!000
    (r"\s+|~|\\q?quad|\\ ", " "),
    (r"\\(?=[][(){}%$0-9])|(?<=\\)[dtc](?=frac)", ""),  # \{1,2\}  5\%  \dfrac12
    (r"[$°]|\bdegrees?\b|\^ ?\{? ?\\circ ?\}?|\\(?:left|right|[bB]igg?|degree)(?![A-Za-z])", ""),  # 5^\circ
    (r"\\(?:text[a-z]*|mbox|math[a-z]*|operatorname) ?\{([^{}]*)\}", r"~\1 "),  # \text{Ann}; ~ is a space, in the end
    (r"(?<=[0-9)}])[ ~]*(?=[a-z])(?=[^0-9]*(illion|thousand|hundred|dozen|squared|cubed|not ))", "*"),  # 5 million
    (r"(?<=[0-9)}])(?: *~ *(?![eidx]\b)| +(?=\w\w)|(?=[a-z]{4}))[A-Za-z][A-Za-z /~]*(\^\{?[23]\}?)?[ .]*$", ""),  # 5 cm
    (r"\\(?:([lg]e)q?(?:slant)?|in)\b|([<>∈])", r"=\1\2 "),  # x \le 5  x \in [1,2]: a relation is an equation
    (r"(?<![A-Za-z\\])(sqrt|pi|infty)(?![a-z])", r"\\\1"),  # 2sqrt(3)
    (r"\\frac ?([0-9A-Za-z])", r"\\frac{\1}"),  # \frac12
    (r"(\\frac ?\{[^{}]*\}) ?([0-9A-Za-z])", r"\1{\2}"),  # \frac{1}2
    (r"(\\sqrt|[\^_]) ?(-?[0-9]+|[A-Za-z])", r"\1{\2}"),  # \sqrt3  x^2
    (r"\\frac ?\{ ?(-?[0-9]+) ?\} ?\{ ?([1-9][0-9]*) ?\}", r" \1/\2 "),  # \frac{3}{8}  5\frac{3}{8}
    (r"(?<![0-9])[ ~]+|[ ~]+(?![0-9])", ""),  # a space stays between two digits only: 4 2 is not 42
]
NAME = re.compile(r"(?:^|(?<=,))(?:[^-+*/^=0-9,()]|\([^()]*\)|_\{[0-9]+)+=|^(?=[^=]*[-+*/])[-+*/ 0-9.]+=")  # x=5  2+3=5
OVER = re.compile(r"^([-+]*)\\frac\(((?:[^()+]|\([^()]*\))*)\)\((-?[0-9]+)\)$")  # \frac(5 \pi)(2) is 5 \pi/2
NUMBER = r"(?:[0-9]+ )?[0-9]+/[1-9][0-9]*|[0-9]+\.?[0-9]*|\.[0-9]+"  # 1 3/8  3/8  5  0.5  .5; a term is -5\cdot\pi/2
TERM = re.compile(rf"([-+]*)(?=[^/])({NUMBER})?(?:\*|\\cdot|\\times)?(?![-0-9.^_!:])(.*?)(?:/(-?[1-9][0-9]*))?")


def extract_answer(text):
    """str -> str | None: the last <answer>...</answer> (in it the last box), else the last box, else the last ####."""
    _, tag, text = (text if isinstance(text, str) else "").rpartition("<answer>")
    text = text if not tag else text.partition("</answer>")[0] if "</answer>" in text else ""
    if "\\boxed" in text:
        text = last_boxes(text.replace("\\boxed {", "\\boxed{"))
    elif not tag:
        text = text.rpartition("####")[2].strip().partition("\n")[0] if "####" in text else ""
    return text.strip() or None


def last_boxes(text):
    """str -> the content of the last \\boxed{...}, or of the last few side by side as one list; "" if unclosed."""
    boxes, end = [], len(text)
    while len(boxes) < 50 and (start := text.rfind("\\boxed{", 0, end)) >= 0:
        box = cut(text[start + 6 : end][: 9 * LONGEST])[0]
        if box.count("{") != box.count("}") or boxes and not GLUE.fullmatch(text[start + 6 + len(box) : end]):
            break
        boxes, end = [box[1:-1], *boxes], start
    return ", ".join(boxes)


def cut(text, marks=""):
    """Cut before each of the marks, or before each character, but never inside brackets: "a+(b+c)-d" at "+-" is ["a",
    "+(b+c)", "-d"]; "2(x+1)y" is ["2", "(x+1)", "y"]."""
    parts, depth = [""], 0
    for character in text:
        if depth == 0 and (character in marks or not marks):
            parts.append("")
        parts[-1] += character
        depth = max(0, depth + (character in "([{") - (character in ")]}"))
    return [part.lstrip(",") for part in parts if part.strip(",")]


@lru_cache(4096)
def tidy(text):
    """str -> str: one spelling for what is written in many ways; units, money signs and LaTeX spacing are gone."""
    for pattern, new in TIDY:
        text = re.sub(pattern, new, text)
    return text.rstrip(".")


def term(text, depth):
    """Tidied str, one term of a sum -> str: its exact number and the rest, "-\\frac{6\\pi}{4}" -> "-3/2 \\pi"."""
    text = "".join(f"({canonical(part, depth - 1)})" if depth and len(part) > 1 else part for part in cut(text))
    match = TERM.fullmatch(OVER.sub(r"\1\2/\3", text))
    if not match:
        return text
    signs, number, rest, under = match.groups()
    number = sum(map(Fraction, (number or "1").split())) * Fraction((-1) ** signs.count("-"), int(under or 1))
    if len(rest) > 1 and rest.isalpha():  # Odd is odd, 2ab is 2ba
        rest = rest.casefold() if number == 1 else "".join(sorted(rest))
    return f"{number} {rest.strip()}".strip()


@lru_cache(4096)
def canonical(text, depth=6):
    """Tidied str -> str, the same for equal answers: a list or set in any order, a tuple or interval in its own."""
    text = text.replace("\\pm", "+") + "," + text.replace("\\pm", "-") if "\\pm" in text else text
    text = "{" + text + "}" if len(cut(text, ",")) > 1 else text
    if depth and text[:1] in "([{" and text[-1:] in ")]}" and len(cut(text)) == 1:
        items = [canonical(item, depth - 1) for item in cut(text[1:-1], ",")]
        inside = ",".join(sorted(set(items)) if text[0] == "{" else items)
        return text[0] + inside + text[-1] if len(items) > 1 else inside
    sides = ["+".join(sorted(term(part, depth) for part in cut(side, "+-"))) for side in text.split("=")]
    return "=".join(sorted(sides))


def readings(text, other):
    """Tidied str, str -> set of str: x=5 is 5; 20% is 20, or 1/5 if the other has no %; 1,234 is a number or a list."""
    text = text if "=" in other else NAME.sub("", text)
    texts = [text.replace("%", ""), text.replace("%", "" if "%" in other else "/100")]
    texts += [re.sub(r"(?<=[0-9]),(?=[0-9]{3}(?![0-9]))(?![^(\[{]*[)\]}])", "", each) for each in texts]
    return {canonical(each) for each in texts} - {""}


def math_reward(completion, answer):
    """str, str -> 1.0 if the completion's marked answer equals the gold answer, else 0.0."""
    given, gold = extract_answer(completion), extract_answer(str(answer)) or str(answer)
    if answer is None or not re.search(r"\w", given or ""):
        return 0.0
    if max(len(given), len(gold)) > LONGEST:
        return float(given == gold)
    return float(not readings(tidy(given), tidy(gold)).isdisjoint(readings(tidy(gold), tidy(given))))

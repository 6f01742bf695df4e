"""All that is not the algorithm, from log-probabilities to the reward.

Shapes: P prompts per step, G completions per prompt, N = P*G rows, L positions (prompt and
completion), T completion positions, M tokens, V vocabulary, H width of the hidden states.
A rollout is a dict with one row per completion:
    ids        (N, L)  prompt, then completion, padded on the right
    attention  (N, L)  1 on both, even where a prompt holds eos, 0 on padding
    mask       (N, T)  1 on the sampled tokens, the first eos included, 0 behind them
    row        (N,)    its number in the rollout
The scripts add rewards (N,), old_logp, ref_logp, values, returns (N, T) and adv.
"""
import argparse
import contextlib
import copy
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
from fractions import Fraction
from functools import lru_cache
from pathlib import Path

import torch
from filelock import FileLock
from tqdm import tqdm

TOY = str(Path(__file__).resolve().parent / "tests/toy")  # default model and problems

# ---- Log-probabilities ----
def token_logprobs(model, batch, temperature):
    """log pi of completion tokens, pi = softmax(logits / temperature): (N, T) float32, 0 outside the mask."""
    place, hidden, target = completion_states(model, batch)
    weight = model.get_output_embeddings().weight
    logp = ChunkedLogProbs.apply(hidden, weight, target, temperature)  # (M,)
    return logp.new_zeros(batch["mask"].shape).index_put(place, logp)

def token_values(model, batch, temperature=None):
    """The critic's V of the state before each completion token: (N, T) float32."""
    place, hidden, _ = completion_states(model, batch)
    values = model.score(hidden.to(model.score.weight.dtype)).squeeze(1)  # (M,)
    return values.new_zeros(batch["mask"].shape).index_put(place, values)

def completion_states(model, batch):
    """Of the M completion tokens: their places (row, t) in (N, T), the hidden states (M, H) that predict them,
    one position earlier (the only shift here), and their ids (M,)."""
    row, t = batch["mask"].nonzero(as_tuple=True)  # (M,) both
    prompt_lengths = batch["attention"].sum(1) - batch["mask"].sum(1).long()  # (N,)
    position = prompt_lengths[row] + t  # (M,)
    # Causal attention never looks right: no mask for padding there.
    hidden = model.base_model(input_ids=batch["ids"], use_cache=False).last_hidden_state  # (N, L, H)
    return (row, t), hidden[row, position - 1], batch["ids"][row, position]

def head_logits(hidden, weight, temperature=1.0):
    """(M, H), (V, H) -> hidden weight^T / temperature, (M, V) float32: bfloat16 moves log-probs by up to .07."""
    if hidden.is_cuda and hidden.dtype == torch.bfloat16:
        logits = torch.mm(hidden, weight.T, out_dtype=torch.float32)
    else:
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        logits = hidden.to(dtype) @ weight.to(dtype).T
    return logits if temperature == 1 else logits.div_(temperature)

class ChunkedLogProbs(torch.autograd.Function):
    """log softmax(hidden weight^T / temperature)[target], C tokens at a time. The backward pass computes the
    logits again: (C, V) numbers in memory, not several times (M, V), for one more product."""
    @staticmethod
    def forward(ctx, hidden, weight, target, temperature):
        """(M, H), (V, H), (M,) -> (M,)"""
        ctx.save_for_backward(hidden, weight, target)
        ctx.temperature, ctx.C = temperature, 512 if hidden.is_cuda else 256
        logp = []
        for h, y in zip(hidden.split(ctx.C), target.split(ctx.C)):
            logits = head_logits(h, weight, temperature)  # (C, V)
            logp.append(logits.gather(1, y[:, None]).squeeze(1) - logits.logsumexp(-1))
            del logits  # before the next
        return torch.cat(logp)

    @staticmethod
    def backward(ctx, grad):
        """d log p(target) / d logits = (onehot(target) - p) / temperature."""
        hidden, weight, target = ctx.saved_tensors
        grad = grad / ctx.temperature  # (M,)
        grad_hidden, grad_weight = torch.empty_like(hidden), torch.zeros_like(weight, dtype=grad.dtype)
        for start in range(0, len(hidden), ctx.C):
            c = slice(start, start + ctx.C)
            p = head_logits(hidden[c], weight, ctx.temperature).softmax(-1)  # (C, V)
            p.mul_(-grad[c, None]).scatter_add_(1, target[c, None], grad[c, None])
            grad_logits = p.to(weight.dtype)
            grad_hidden[c] = grad_logits @ weight
            grad_weight += grad_logits.T @ hidden[c]  # bfloat16 products, summed in float32
        return grad_hidden, grad_weight, None, None

# ---- Batching ----
def minibatches(rollout, count, group_size):
    """Cut a rollout into `count` even parts that keep groups whole."""
    groups = torch.arange(len(rollout["ids"]), device=rollout["ids"].device).view(-1, group_size)
    for part in groups.tensor_split(count):
        yield select(rollout, part.flatten())

def micro_batches(batch, tokens):
    """Cut `batch` into micro-batches of at most `tokens` positions, padding included, or one row. Rows are sorted
    by length and trimmed to the longest; a row shorter than .85 of it - 8 begins the next."""
    lengths, order = batch["attention"].sum(1).sort(descending=True)
    lengths, completions, begin = lengths.tolist(), batch["mask"].sum(1).long()[order].tolist(), 0
    while begin < len(lengths):
        L, end = lengths[begin], begin + 1
        while end < len(lengths) and lengths[end] >= 0.85 * L - 8 and (end + 1 - begin) * L <= tokens:
            end += 1
        part, T = select(batch, order[begin:end]), max(completions[begin:end])
        width = {"ids": L, "attention": L}
        yield {name: x[:, :width.get(name, T)] if x.dim() == 2 else x for name, x in part.items()}
        begin = end

def select(batch, rows):
    return {name: value[rows] for name, value in batch.items() if torch.is_tensor(value)}

def over_rollout(function, model, rollout, args):
    """token_logprobs or token_values of a rollout, (N, T), in the pieces of the update: in bfloat16 a log-prob
    depends on the rows beside it by more than GSPO's clip range."""
    result = torch.zeros_like(rollout["mask"])
    for minibatch in minibatches(rollout, args.minibatches, args.group_size):
        for b in micro_batches(minibatch, args.micro_batch_tokens):
            result[b["row"], :b["mask"].shape[1]] = function(model, b, args.temperature)
    return result

def padding(batch):
    """A micro-batch's positions without a token: (sum, count)."""
    return {"padding": ((batch["attention"] == 0).sum(), batch["attention"].numel())}

def means(logged):
    """Of what an update logged: means of (sum, count), else maxima."""
    result = {}
    for name in dict.fromkeys(name for stats in logged for name in stats):
        values = [stats[name] for stats in logged if name in stats]
        if torch.is_tensor(values[0]):
            result[name] = max(values).item()
        else:
            total, count = map(sum, zip(*values))
            result[name] = float(total / count)
    return result

# ---- Optimiser ----
class Optimizer:
    """AdamW on float32 masters of a model's weights, with warm-up and norm clipping. At a learning rate of
    1e-6 bfloat16 rounds the update of 98 % of the weights away."""
    def __init__(self, model, lr, args, eps=1e-8):
        self.lr, self.args, self.taken = lr, args, 0
        self.device = "cpu" if args.offload_optimizer else model.device
        if args.gradient_checkpointing:
            model.activation_checkpointing_enable({"use_reentrant": False})
        self.weights = {name: w for name, w in model.named_parameters() if w.requires_grad}
        self.masters = {name: w.detach().to(self.device, torch.float32) for name, w in self.weights.items()}
        for weight in self.weights.values():
            weight.grad_dtype = torch.float32
        # torch's 0.999 remembers longer than a short run
        self.adamw = torch.optim.AdamW(self.masters.values(), lr, (0.9, 0.95), eps, 0.0, fused=True)

    def step(self, prefix=""):
        """One step, unless the gradient is not finite; clears it. Returns statistics."""
        weights, masters = self.weights.values(), self.masters.values()
        norm = torch.nn.utils.clip_grad_norm_(weights, self.args.max_grad_norm).item()
        stats = {"skipped": (not math.isfinite(norm), 1)}
        if math.isfinite(norm):
            stats |= {"grad_norm": (norm, 1), "grad_clipped": (norm > self.args.max_grad_norm, 1)}
            self.taken += 1
            self.adamw.param_groups[0]["lr"] = self.lr * min(1, self.taken / max(1, self.args.warmup_steps))
            for weight, master in zip(weights, masters):
                master.grad = None if weight.grad is None else weight.grad.to(self.device)
            self.adamw.step()
            for weight, master in zip(weights, masters):
                weight.data.copy_(master)  # rounds to bfloat16
        for tensor in (*weights, *masters):
            tensor.grad = None
        return {prefix + name: value for name, value in stats.items()}

    def state_dict(self):
        return {"masters": self.masters, "adamw": self.adamw.state_dict(), "taken": self.taken}

    def load_state_dict(self, state):
        """Set the weights too. KeyError or ValueError, before that, if they are others."""
        self.adamw.load_state_dict(state["adamw"])
        for name, master in self.masters.items():
            saved = state["masters"][name], *self.adamw.state[master].values()
            if any(x.shape != master.shape for x in saved if x.dim()):
                raise ValueError(f"another shape of {name}")
        for name, weight in self.weights.items():
            weight.data.copy_(self.masters[name].data.copy_(state["masters"][name]))
        self.taken = state["taken"]

# ---- Sampling ----
@torch.no_grad()
def generate(model, tokenizer, prompts, group_size=1, max_new_tokens=48, temperature=1.0, cuda_graphs=True):
    """Sample group_size completions of each of P prompts (lists of ids) from softmax(logits / temperature), or
    greedily at 0. Returns a rollout, with finished (N,), texts (N strings) and seconds. The model's own
    top_k and the like are ignored; on a GPU a CUDA graph is replayed per token."""
    began, was_training = time.perf_counter(), model.training
    model.eval()  # in training mode checkpointing silently drops the cache
    rows = Rows(model, prompts, group_size, max_new_tokens, temperature, stop_ids(model, tokenizer))
    rows.append(rows.read_prompts())
    recorded = None
    for t in range(1, max_new_tokens):
        if t % 4 == 0 and rows.running[rows.kept].float().mean() < 0.5:  # syncs the GPU
            if not rows.running.any():
                break
            rows.drop_finished()
        if rows.S + t > rows.width:
            rows.width += rows.width_step
        shape = len(rows.kept), rows.width
        if shape == recorded:  # a graph is for tensors of one shape
            replay()
        else:
            rows.next_token()  # warm-up, which no graph may hold
            replay = record(rows.next_token) if cuda_graphs and rows.ids.is_cuda else rows.next_token
            recorded = shape
    model.train(was_training)
    return rows.rollout(tokenizer) | {"seconds": time.perf_counter() - began}

def record(step):
    """Record `step` in a CUDA graph; returns its replay."""
    graph = torch.cuda.CUDAGraph()
    with or_fail("this model cannot be recorded: give --no-cuda_graphs"), torch.cuda.graph(graph):
        step()  # an error: the model waits for a value
    return graph.replay

def stop_ids(model, tokenizer):
    """The ids that end a completion; chat models have several."""
    eos = model.generation_config.eos_token_id
    return sorted({tokenizer.eos_token_id, *(eos if isinstance(eos, list) else [eos])} - {None})

class Rows:
    """Completions being written, and itself the model's `past_key_values`: keys and values of each layer
    (n, length, heads, D), position p of row i at [i, p], so no prompt is padded on the left. A CUDA graph can
    replay a token: all changes are in place, and no size depends on a value."""
    def __init__(self, model, prompts, group_size, max_new_tokens, temperature, stop):
        self.model, self.G, self.temperature, device = model, group_size, temperature, model.device
        self.S, self.stop = max(map(len, prompts)), torch.tensor(stop, device=device)
        self.layers = []
        # attention sees `width` positions; a graph for each
        self.width_step = step = 256 if device.type == "cuda" else 1
        self.width, length = (math.ceil(n / step) * step for n in (self.S, self.S + max_new_tokens))
        rows = [prompt for prompt in prompts for _ in range(group_size)]
        self.ids = torch.tensor([row + [0] * (length - len(row)) for row in rows], device=device)  # (N, length)
        self.prompt_lengths = torch.tensor(list(map(len, rows)), device=device)  # (N,)
        self.position = self.prompt_lengths - 1  # (N,) of the last token
        self.running = torch.ones_like(self.position, dtype=torch.bool)  # (N,) no stop token yet
        self.row = torch.arange(len(self.ids), device=device)  # (N,)
        self.kept = self.row  # (n,) rows that are in the cache

    def read_prompts(self):
        """Read each prompt once for its group; logits of the next tokens, (N, V)."""
        ids, last = self.ids[::self.G, :self.S], self.position[::self.G]  # (P, S), (P,)
        logits = self.read(ids, torch.arange(self.S, device=ids.device).expand_as(ids), last)  # (P, V)
        for layer in self.layers:  # no second cache in memory
            layer[:] = [x.repeat_interleave(self.G, 0) for x in layer]
        return logits.repeat_interleave(self.G, 0)

    def read_last(self):
        """Read the last token of each row; logits of the next tokens, (n, V)."""
        position = self.position[self.kept]  # (n,)
        return self.read(self.ids[self.kept, position][:, None], position[:, None], 0)

    def read(self, ids, positions, last):
        """Read ids (n, s) at `positions` (n, s); logits of the token after column `last` of each row, (n, V)."""
        row = self.row[:len(ids)]  # (n,)
        self.place = row[:, None], positions
        masks = attention_masks(self.model, positions, self.width)
        hidden = self.model.base_model(
            input_ids=ids, attention_mask=masks, position_ids=positions, past_key_values=self,
            use_cache=True).last_hidden_state  # (n, s, H)
        return head_logits(hidden[row, last], self.model.get_output_embeddings().weight)

    def update(self, keys, values, layer, *_):
        """Called by each attention layer: keep keys and values (n, heads, s, D), return all to attend to."""
        if layer == len(self.layers):
            shape = len(keys), self.ids.shape[1], keys.shape[1]
            self.layers.append([x.new_zeros(*shape, x.shape[3]) for x in (keys, values)])
        for cached, new in zip(self.layers[layer], (keys, values)):
            cached[self.place] = new.transpose(1, 2)
        return [x[:len(keys), :self.width].transpose(1, 2) for x in self.layers[layer]]

    def get_seq_length(self, *_):
        return 0  # for positions, which the models are given

    def append(self, logits):
        """Draw the running rows' tokens from softmax(logits / temperature), (n, V), by the Gumbel-max trick."""
        if self.temperature > 0:
            logits = logits / self.temperature - torch.empty_like(logits).exponential_().log_()
        token, running = logits.argmax(-1), self.running[self.kept]  # (n,) both
        self.position[self.kept] += running.long()
        position = self.position[self.kept]
        self.ids[self.kept, position] = torch.where(running, token, self.ids[self.kept, position])
        self.running[self.kept] = running & (token[:, None] != self.stop).all(1)

    def next_token(self):
        self.append(self.read_last())

    def drop_finished(self):
        """Go on with the running rows; the cache closes up."""
        going = self.running[self.kept].nonzero().squeeze(1)  # (n,)
        self.kept = self.kept[going]
        for cached in sum(self.layers, []):
            cached[:len(going)] = cached[going]

    def rollout(self, tokenizer):
        """The prompts and completions so far, as a rollout."""
        starts, ends = self.prompt_lengths, self.position + 1  # (N,) both
        column, lengths = torch.arange(ends.max(), device=ends.device), ends - starts
        texts = [row[a:b] for row, a, b in zip(self.ids.tolist(), starts.tolist(), ends.tolist())]
        return {"ids": self.ids[:, :len(column)], "attention": (column < ends[:, None]).long(),
                "mask": (column[:lengths.max()] < lengths[:, None]).float(),
                "row": self.row, "finished": ~self.running,
                "texts": tokenizer.batch_decode(texts, skip_special_tokens=True)}

def attention_masks(model, positions, width):
    """Added to attention scores at `positions` (n, s): 0, or -inf where a token must not look,
    (n, 1, s, width); a dict if some layers see all and others a window."""
    config = model.config.get_text_config()
    at, column = positions[:, None, :, None], torch.arange(width, device=positions.device)
    full = torch.where(column > at, -math.inf, 0.0).to(model.dtype)
    windowed = full.masked_fill(column <= at - (getattr(config, "sliding_window", None) or width), -math.inf)
    masks = {"full_attention": full, "sliding_attention": windowed}
    kinds = set(getattr(config, "layer_types", None) or ["sliding_attention"])
    return masks if len(kinds) > 1 else masks[kinds.pop()]

def rollout_stats(rollout, group_size):
    """What is logged of a rollout, {name: mean}."""
    mask, groups = rollout["mask"], rollout["rewards"].view(-1, group_size)
    stats = {"reward": groups.mean(), "completion_length": mask.sum(1).mean(),
             "truncated": 1 - rollout["finished"].float().mean(),
             "entropy": -rollout["old_logp"].sum() / mask.sum(),  # estimated from samples
             "rollout_tokens_per_s": mask.sum() / rollout["seconds"]}
    if group_size > 1:
        stats["zero_variance_groups"] = (groups == groups[:, :1]).all(1).float().mean()
    if "ref_logp" in rollout:  # k3, whatever the objective uses
        log_x = rollout["ref_logp"] - rollout["old_logp"]  # (N, T)
        stats["kl"] = (log_x.exp() - log_x - 1).sum() / mask.sum()
    return {name: value.item() for name, value in stats.items()}

def evaluate(policy, tokenizer, problems, reward, args):
    """Share of right answers to held-out problems: greedy, and in n = --eval_samples samples of each, with
    the unbiased pass@k = 1 - C(n - c, k) / C(n, k), c of the n right (Chen et al. 2021, eq. 1)."""
    torch.manual_seed(args.seed)  # equal draws every time
    problems, result = sorted(problems, key=lambda p: len(p["prompt"])), {}
    for n, temperature in [(1, 0.0), (args.eval_samples, args.temperature)]:
        rewards, lengths, size = [], [], max(1, args.prompts * args.group_size // n)  # rows as in a rollout
        for i in tqdm(range(0, len(problems), size), desc="evaluating", leave=False, disable=None):
            part = problems[i:i + size]
            prompts = [p["prompt"] for p in part]
            rollout = generate(policy, tokenizer, prompts, n, args.max_new_tokens, temperature, args.cuda_graphs)
            rewards.append(score(reward, part, rollout).view(-1, n))
            lengths.append(rollout["mask"].sum(1))
        rewards = torch.cat(rewards)  # (problems, n)
        right = rewards >= 1
        result["eval_sampled_accuracy" if temperature else "eval_accuracy"] = right.float().mean().item()
    result["eval_reward"] = rewards.mean().item()  # sampled
    result["eval_completion_length"] = torch.cat(lengths).mean().item()
    for k in (2 ** i for i in range(1, n.bit_length())):  # 2, 4, ...
        misses = [math.comb(n - c, k) / math.comb(n, k) for c in right.sum(1).tolist()]
        result[f"eval_pass@{k}"] = 1 - sum(misses) / len(misses)
    return result

# ---- Models ----
def settle(args, policy, trained_models=1):
    """Settle defaults by the model's size; stop if it does not fit or is not supported."""
    size, config = policy.num_parameters(), policy.config.get_text_config()
    for name, value in vars(args).items():
        if isinstance(value, dict):
            setattr(args, name, value["toy" if size < 1_000_000 else "real"])
    if size < 1_000_000:
        torch.set_num_threads(1)  # equal sums everywhere
    positions = getattr(config, "max_position_embeddings", None) or math.inf
    if positions <= args.max_new_tokens:
        fail(f"--max_new_tokens {args.max_new_tokens}: --model {args.model} has {positions} positions")
    args.max_prompt_tokens = min(args.max_prompt_tokens, positions - args.max_new_tokens)
    print(f"{size / 1e6:,.2f}M parameters")
    settings = " ".join(f"--{name}={value}" for name, value in vars(args).items() if name != "script")
    for group in re.split(" (?=--(?:model|max_new_tokens|micro_batch_tokens|steps)=)", settings):
        print(textwrap.fill(group, 99, break_on_hyphens=False))
    per_model = 6 if args.offload_optimizer else 18  # bytes per parameter, with gradients
    held = size * (per_model * trained_models + 2 * (args.beta > 0))
    if args.device == "cuda" and held > torch.cuda.mem_get_info()[1]:
        fail(f"--model {args.model}: {held / 1e9:.0f} GB do not fit the GPU: try --offload_optimizer, --beta 0")
    saved, free = 14 * size * trained_models, shutil.disk_usage(args.out).free
    if saved > free:
        fail(f"--out {args.out}: a checkpoint of {saved / 1e9:.1f} GB does not fit the disk")
    if 2 * saved > free and not args.resume:
        args.save_every = args.steps
        print("warning: no disk for two checkpoints: saving at the end")
    with or_fail(f"--model {args.model}: {type(policy).__name__} cannot be sampled from"):
        check_model(policy, args)

def load(kind, flag, args):
    """The transformers `kind` that --`flag` names, on --device, in --dtype, without dropout; and its tokenizer."""
    import transformers  # slow: after checking flags
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    source = getattr(args, flag)
    with or_fail(f"--{flag} {source}: {'' if Path(source).is_dir() else 'no directory, '}cannot be loaded"):
        model, found = getattr(transformers, kind).from_pretrained(
            source, dtype=getattr(torch, args.dtype), use_safetensors=True, output_loading_info=True,
            ignore_mismatched_sizes=True)
        tokenizer = transformers.AutoTokenizer.from_pretrained(source)
    missing = [*found["missing_keys"], *(key for key, *_ in found["mismatched_keys"])]
    missing += ["tokenizer"] * (tokenizer.vocab_size < 3)
    if missing:
        fail(f"--{flag} {source}: lacks or has in another shape: {', '.join(missing)}")
    for module in model.modules():  # with dropout old and new log-probs are of two networks
        for name, value in vars(module).items():
            if isinstance(value, float) and (name == "p" or "drop" in name):
                setattr(module, name, 0.0)
    return model.to(args.device).train(), tokenizer

def load_policy(args):
    policy, tokenizer = load("AutoModelForCausalLM", "model", args)
    size, ends = policy.get_input_embeddings().num_embeddings, stop_ids(policy, tokenizer)
    if len(tokenizer) > size or not ends:
        fail(f"--model {args.model}: its tokenizer has {len(tokenizer)} of {size} tokens, end tokens {ends}")
    return policy, tokenizer

def load_value(policy):
    """PPO's value model: a copy of the policy with a float32 scalar head that starts at 0."""
    model, weight = copy.deepcopy(policy.base_model), policy.get_output_embeddings().weight
    model.score = torch.nn.Linear(weight.shape[1], 1, device=weight.device)  # near 1 bfloat16 has steps of .004
    torch.nn.init.zeros_(model.score.weight)
    torch.nn.init.zeros_(model.score.bias)
    return model

@torch.no_grad()
def check_model(model, args):
    """Sample after two prompts, one of full length; stop if the model's own logits differ."""
    T, longest = 4, max(8, args.max_prompt_tokens + args.max_new_tokens)
    vocabulary, draw = range(model.get_input_embeddings().num_embeddings), random.Random(0).choices
    prompts = [draw(vocabulary, k=k) for k in (longest - T, longest // 2)]
    rows = Rows(model.eval(), prompts, 1, T, temperature=0, stop=[])
    sampled, rows.width = [rows.read_prompts()], longest
    for _ in range(T - 1):
        rows.append(sampled[-1])
        sampled.append(rows.read_last())  # (2, V)
    own = torch.cat([model(ids[None, :end], use_cache=False).logits[0, -T:]
                     for ids, end in zip(rows.ids, rows.position + 1)])  # (2T, V)
    ids = rows.ids[:1, :longest - 1]
    states = model.base_model(input_ids=ids, use_cache=False).last_hidden_state[0]  # (L, H)
    trained = model.train().base_model(input_ids=ids, use_cache=False).last_hidden_state[0]
    headed = head_logits(states[-T:], model.get_output_embeddings().weight)
    close = 1e-4 if model.dtype == torch.float32 else 0.01  # as a share of the largest logit
    for what, ours, its, tolerance in [
            ("has logits that are not finite", own, own, close),  # nan <= nan is False
            ("changes its logits after the head", headed, own[:T], close),
            ("has other logits token by token", torch.stack(sampled, 1).flatten(0, 1), own, 10 * close),
            ("is random or different in training mode", trained, states, close)]:
        if not (ours.float() - its.float()).abs().max() <= tolerance * (its - its.mean(-1, True)).abs().max():
            fail(f"--model {args.model}: {type(model).__name__} {what}: not supported")

def load_reward(args):
    """The reward: any function (problems, completions) -> a number per completion, at least 1 if right."""
    if not args.reward_model:
        return answer_reward
    judge, tokenizer = load("AutoModelForSequenceClassification", "reward_model", args)
    if judge.config.num_labels != 1:
        fail(f"--reward_model {args.reward_model}: has {judge.config.num_labels} labels, not one")

    @torch.no_grad()
    def judged(problems, completions):
        """The judge's logits."""
        rewards = []
        for problem, text in zip(problems, completions):
            chat = [{"role": "user", "content": problem["question"]}, {"role": "assistant", "content": text}]
            ids = (tokenizer.apply_chat_template(chat, return_dict=True) if tokenizer.chat_template
                   else tokenizer(problem["question"] + "\n" + text))["input_ids"]
            rewards.append(judge.eval()(input_ids=torch.tensor([ids], device=judge.device)).logits[0, 0])
        return rewards
    return judged

def answer_reward(problems, completions):
    """1.0 for a completion with the problem's answer, else 0.0."""
    return [math_reward(text, problem["answer"]) for problem, text in zip(problems, completions)]

def score(reward, problems, rollout):
    """The rewards of a rollout, (N,) float32."""
    texts, name = rollout["texts"], getattr(reward, "__name__", reward)
    rewards = reward([p for p in problems for _ in range(len(texts) // len(problems))], texts)
    with or_fail(f"the reward {name} must return {len(texts)} numbers, one per completion"):
        rewards = torch.tensor([float(r) for r, _ in zip(rewards, texts, strict=True)])
    for r, text in zip(rewards.tolist(), texts):
        if not math.isfinite(r):
            fail(f"the reward {name} returned {r} for the completion {text!r}")
    return rewards.to(rollout["ids"].device)

# ---- Problems ----
def load_problems(args, tokenizer):
    """Training and held-out problems: rows of --dataset with "question", "answer" and "prompt" (ids)."""
    splits = read_splits(args.dataset)
    train, held_out = splits.get(args.split), splits.get(args.eval_split)
    if list(splits) == [args.split] and args.eval_split == "test":
        train, held_out = [], []  # a fifth, the same in every run
        for row in splits[args.split]:
            drawn = random.Random(str(row.get(args.question_column))).random()
            (held_out if drawn < 0.2 else train).append(row)
    for flag, rows in [("split", train), ("eval_split", held_out)]:
        if rows is None:
            fail(f"--{flag} {getattr(args, flag)}: --dataset {args.dataset} has only {', '.join(splits)}")
    train, held_out = prepare(train, tokenizer, args, "train on"), prepare(held_out, tokenizer, args, "hold out")
    return train, random.Random(0).sample(held_out, min(args.eval_problems, len(held_out)))

def read_splits(source):
    """{split: list of rows} of a file, a directory or a hub name."""
    formats = {".jsonl": "json", ".json": "json", ".csv": "csv", ".parquet": "parquet"}
    with or_fail(f"--dataset {source}: no readable {', '.join(formats)}, directory or hub name"):
        import datasets
        datasets.disable_progress_bars()
        if source.endswith(".jsonl"):  # datasets does not name the line
            for n, line in enumerate(open(source, encoding="utf-8-sig"), 1):
                with or_fail(f"--dataset {source}: line {n}"):
                    json.loads(line.strip() or "{}")
        if Path(source).is_file():
            splits = datasets.load_dataset(formats[Path(source).suffix.lower()], data_files=source)
        else:
            source = os.path.abspath(source) if os.path.isdir(source) else source  # plain "csv" is a reader
            configs = datasets.get_dataset_config_names(source)
            splits = datasets.load_dataset(source, "main" if "main" in configs else None)
        return {split: rows.to_list() for split, rows in splits.items()}

def prepare(rows, tokenizer, args, purpose):
    """Rows -> problems; long prompts and unreadable answers are left out."""
    columns = [args.question_column] + [args.answer_column] * (not args.reward_model)
    if rows and not set(columns) <= set(rows[0]):
        fail(f"--dataset {args.dataset}: has columns {', '.join(rows[0])}, not {' and '.join(columns)}: see "
             "--question_column, --answer_column")
    questions, answers = (["" if row.get(column) is None else str(row[column]) for row in rows]
                          for column in (args.question_column, args.answer_column))
    prompts, problems = prompt_ids(questions, args.system_prompt, tokenizer), []
    for row, question, answer, prompt in zip(rows, questions, answers, prompts):
        if question and len(prompt) <= args.max_prompt_tokens and (args.reward_model or readable(answer)):
            problems.append(row | {"question": question, "answer": answer, "prompt": prompt})
    lost = f"{len(rows) - len(problems)} of {len(rows)} left out: over --max_prompt_tokens or no readable answer"
    if not problems:
        fail(f"--dataset {args.dataset}: no problems to {purpose} ({lost}): see --split, --eval_split; "
             "of one split a fifth is held out")
    print(f"{len(problems)} problems to {purpose} ({lost})")
    return problems

def prompt_ids(questions, system_prompt, tokenizer):
    """Token ids of each question: by the chat template, or as text and a newline."""
    if not questions or not tokenizer.chat_template:
        return [tokenizer(f"{system_prompt}\n{text}\n".lstrip("\n"))["input_ids"] for text in questions]
    system = [{"role": "system", "content": system_prompt}] * bool(system_prompt)
    chats = [system + [{"role": "user", "content": question}] for question in questions]
    try:
        texts = tokenizer.apply_chat_template(chats, add_generation_prompt=True, tokenize=False)
    except Exception:  # mostly no system role: the user says it
        if not system_prompt:
            raise
        return prompt_ids([f"{system_prompt}\n\n{text}" for text in questions], "", tokenizer)
    return tokenizer(texts, add_special_tokens=False)["input_ids"]  # the template put in its own

def batch_of(problems, step, args):
    """The P problems of a step, from endless shuffles: a function of --seed and the step."""
    n, end = len(problems), step * args.prompts
    places = range(end - args.prompts, end)
    shuffles = {k: random.Random(f"{args.seed} {k}").sample(problems, n) for k in {i // n for i in places}}
    return [shuffles[i // n][i % n] for i in places]

def step_signs(rollout, tokenizer):
    """1 for completion tokens of a true line such as 7+2=9, -1 of a false one, else 0: (N, T)."""
    operations = {"+": int.__add__, "-": int.__sub__, "*": int.__mul__}
    step = re.compile(r" *(-?\d{1,9}) ?([-+*]) ?(\d{1,9}) ?= ?(-?\d{1,9})[ .]*")
    ids, attention, mask = (rollout[name].cpu() for name in ("ids", "attention", "mask"))
    signs = torch.zeros_like(mask)
    for i, n in enumerate(mask.sum(1).int()):
        pieces, line = tokenizer.batch_decode(ids[i, attention[i] == 1][-n:, None]), 0
        steps = [step.fullmatch(text) for text in "".join(pieces).split("\n")]
        for t, piece in enumerate(pieces):
            if steps[line]:
                a, op, b, c = steps[line].groups()
                signs[i, t] = 1 if operations[op](int(a), int(b)) == int(c) else -1
            line += piece.count("\n")
    return signs.to(rollout["mask"])

# ---- Command line ----
class HelpFormatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Shows the docstring as written, and defaults."""

def parser(script, doc):
    """argparse with the docstring as --help."""
    made = argparse.ArgumentParser(
        Path(script).name, argparse.SUPPRESS, doc, formatter_class=HelpFormatter, allow_abbrev=False)
    made._negative_number_matcher = re.compile(r"-\.?\d")  # -1e-3 is no flag
    return made

def fail(message, status=2):
    """Say in one line what is wrong and exit."""
    print("error:", " ".join(message.split()), file=sys.stderr)
    sys.exit(status)

@contextlib.contextmanager
def or_fail(message):
    """Any error inside is one line: libraries raise what they like."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise  # to launch
    except Exception as error:
        fail(f"{message}: {type(error).__name__}: {error} {error.__cause__ or ''}")

def add_args(parser):
    """The flags of every script."""
    switch = argparse.BooleanOptionalAction
    add = parser.add_argument_group("model and problems").add_argument
    add("--model", default=TOY, help="directory or hub name; a toy below a million parameters")
    add("--dataset", default=TOY, help=".jsonl, .json, .csv or .parquet file, directory or hub name")
    add("--split", default="train", help="split to train on")
    add("--eval_split", default="test", help="split to evaluate on; without splits a fifth is held out")
    add("--question_column", default="question", help="column with the question")
    add("--answer_column", default="answer", help="column with the gold answer")
    add("--system_prompt", help="instruction before every question",
        default={"toy": "", "real": "Reason step by step, then give the final answer on a last line after ####."})
    add("--max_prompt_tokens", type=int, default=512, help="longer prompts are left out")
    add("--reward_model", help="classifier whose logit is the reward; else 1 for right answers")
    add = parser.add_argument_group("sampling").add_argument
    add("--max_new_tokens", type=int, metavar="T", default={"toy": 48, "real": 1024}, help="longest completion")
    add("--temperature", type=float, default=1.0, help="of the softmax, in samples and log-probs alike")
    add("--cuda_graphs", action=switch, default=True, help="replay a token's kernels as one graph")
    add = parser.add_argument_group("optimiser and memory").add_argument
    add("--micro_batch_tokens", type=int, default=16384,
        help="positions per forward and backward; fewer take less memory, same gradient")
    add("--warmup_steps", type=int, default=20, help="optimiser steps in which --lr rises")
    add("--max_grad_norm", type=float, default=1.0, help="larger gradients are scaled down to this")
    add("--gradient_checkpointing", action=switch, default={"toy": False, "real": True},
        help="recompute activations: a third more work, far less memory")
    add("--offload_optimizer", action=switch, default=False, help="masters and moments in host memory")
    devices = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
    add("--device", choices=devices, default=devices[-1], help="a GPU if there is one")
    add("--dtype", choices=["float32", "bfloat16"],
        help="of the weights, else bfloat16 on a GPU; masters and moments are float32")
    add = parser.add_argument_group("run").add_argument
    add("--steps", type=int, default={"toy": 20, "real": 200}, help="rollouts in the run")
    add("--seed", type=int, default=0, help="of the samples and the order of the problems")
    add("--out", help="output directory; else runs/<script>-<month><day>-<time>")
    add("--resume", action="store_true", help="continue the run in --out, with its flags")
    add("--eval_every", type=int, default={"toy": 10, "real": 20}, help="steps between evaluations")
    add("--eval_problems", type=int, default={"toy": 2560, "real": 512}, help="problems per evaluation")
    add("--eval_samples", type=int, default=1, help="samples per problem; 2 or more give pass@k")
    add("--save_every", type=int, default={"toy": 10, "real": 20}, help="steps between checkpoints")
    add("--tensorboard", action=switch, default=False, help="log to TensorBoard too")

def parse(parser, argv):
    """Parse and check `argv`. A run to resume brings its own flags."""
    args = parser.parse_args(argv, argparse.Namespace(script=parser.prog))
    if args.resume:
        with or_fail(f"--resume: --out {args.out} holds no run to continue"):
            saved = json.loads(Path(args.out, "args.json").read_text())
        parser.set_defaults(**saved)
        args = parser.parse_args(argv, argparse.Namespace(script=parser.prog))
        for name in ("script", "model", "dataset", "reward_model"):
            if getattr(args, name) != saved[name]:
                fail(f"--resume: the run in {args.out} has {name} {saved[name]}")
    for name, value in vars(args).items():
        if type(value) in (int, float):
            low = 0 if re.match("beta|gamma|lam|vf_coef|warmup|seed", name) else {int: 1, float: 1e-9}[type(value)]
            high = 1 if name in ("gamma", "lam", "eps_low") else 10**9
            if not low <= value <= high:
                fail(f"--{name} {value}: must be between {low} and {high}")
    if args.minibatches > args.prompts:
        fail(f"--minibatches {args.minibatches}: at most --prompts {args.prompts}")
    args.dtype = args.dtype or ("bfloat16" if args.device == "cuda" else "float32")
    return args

# ---- Run ----
def launch(main, args):
    """Run `main` in --out. What a user can mend is one line, all else a traceback."""
    torch.backends.cuda.enable_cudnn_sdp(False)  # it plans anew for every shape
    sys.stdout.reconfigure(errors="backslashreplace")  # without UTF-8
    args.out = args.out or time.strftime(f"runs/{Path(args.script).stem}-%m%d-%H%M%S")
    lock = FileLock(Path(args.out, ".lock"))
    try:
        os.makedirs(args.out, exist_ok=True)
        if not args.resume and set(os.listdir(args.out)) - {".lock"}:
            fail(f"--out {args.out}: is not empty: go on with --resume or give another")
        lock.acquire(timeout=0)  # one process at a time; a kill frees it
    except OSError as error:
        fail(f"--out {args.out}: {error.strerror or 'in use by another process'}")
    try:
        main(args)
    except KeyboardInterrupt:
        fail("interrupted", 130)
    except torch.OutOfMemoryError:
        fail("out of GPU memory: lower --micro_batch_tokens (update), --prompts or --max_new_tokens (sampling), or "
             "give --offload_optimizer or --beta 0")
    finally:
        shutil.rmtree(Path(args.out, ".unfinished"), ignore_errors=True)  # a full disk
        if os.listdir(args.out) == [".lock"]:
            shutil.rmtree(args.out)
        lock.release()

def checkpoints(args):
    """The checkpoints in --out, oldest first."""
    found = [p for p in Path(args.out).glob("step-[1-9]*/") if p.name[5:].isdecimal()]
    return sorted(found, key=lambda p: int(p.name[5:]))

def save_checkpoint(args, step, tokenizer, models, optimizers):
    """Save step-N in --out, then remove the one before: a kill at any instant leaves a good one."""
    final, unfinished = Path(args.out, f"step-{step}"), Path(args.out, ".unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    states = {name: optimizer.state_dict() for name, optimizer in optimizers.items()}
    if getattr(args, "ref_every", None) and args.beta > 0:
        states["reference"] = models["reference"].state_dict()
    with or_fail(f"--out {args.out}: step {step} cannot be saved (disk full?)"):
        for name in optimizers:
            models[name].save_pretrained(unfinished if name == "policy" else unfinished / name)
        tokenizer.save_pretrained(unfinished)
        shutil.copy(Path(args.out, "metrics.jsonl"), unfinished)
        torch.save(states, unfinished / "optimizer.pt")
        unfinished.rename(final)
    for old in checkpoints(args):
        if int(old.name[5:]) < step:
            old.rename(unfinished)  # no kill leaves half of one
            shutil.rmtree(unfinished)

def load_checkpoint(args, models, optimizers):
    """Load the newest checkpoint; returns its step, or 0."""
    if not checkpoints(args):
        return 0
    newest = checkpoints(args)[-1]
    with or_fail(f"--resume: {newest}/optimizer.pt cannot be used"):
        states = torch.load(newest / "optimizer.pt", map_location="cpu")  # never twice on the GPU
        for name, optimizer in optimizers.items():
            optimizer.load_state_dict(states[name])
        if "reference" in states and args.beta > 0:
            models["reference"].load_state_dict(states["reference"])
    return int(newest.name[5:])

def shown(stats, forms):
    return "  ".join(form.format(stats[name]) for name, form in forms.items() if name in stats)

class Logger:
    """Shows a run; writes metrics.jsonl and args.json."""
    STEP = {"reward": "reward {:.3f}", "completion_length": "length {:.1f}", "entropy": "entropy {:.2f}",
            "kl": "kl {:.4f}", "clip_frac": "clipped {:.2%}", "explained_variance": "critic {:.2f}",
            "seconds": "{:.1f} s"}
    HELD_OUT = {"eval_accuracy": "greedy {:.3f}", "eval_sampled_accuracy": "sampled {:.3f}",
                "eval_reward": "reward {:.3f}", "eval_completion_length": "length {:.1f}"}
    def __init__(self, args, start):
        self.args, self.start, self.interrupted = args, start, False
        if args.tensorboard:
            with or_fail("--tensorboard: pip install tensorboard"):
                from torch.utils.tensorboard import SummaryWriter
            self.board = SummaryWriter(args.out, purge_step=start + 1)
        self.path = Path(args.out, "metrics.jsonl")  # as at the checkpoint
        self.path.write_bytes(Path(args.out, f"step-{start}", "metrics.jsonl").read_bytes() if start else b"")
        Path(args.out, "args.tmp").write_text(json.dumps(vars(args), indent=1))
        Path(args.out, "args.tmp").replace(Path(args.out, "args.json"))  # never half a file
        self.bar = tqdm(total=args.steps, initial=start, unit="step", disable=None)
        if start:
            self.say(f"resumed after step {start}" + ", the last: raise --steps" * (start >= args.steps))

    def steps(self):
        """The steps, each with its own seed: a resumed run draws the same."""
        handler = signal.signal(signal.SIGINT, self.interrupt)
        for step in range(self.start + 1, self.args.steps + 1):
            torch.manual_seed(self.args.seed * 1_000_003 + step)
            yield step
            if self.interrupted:
                break
        signal.signal(signal.SIGINT, handler)

    def interrupt(self, *_):
        """First Ctrl-C: finish the step and save. The next: KeyboardInterrupt."""
        signal.signal(signal.SIGINT, signal.default_int_handler)
        self.interrupted = True
        print("\nsaving after this step; Ctrl-C again leaves at once", file=sys.stderr)

    def say(self, text, indent=""):
        """Print above the bar in 99 columns, control characters escaped."""
        for line in text.split("\n"):
            line = "".join(c if c.isprintable() else repr(c)[1:-1] for c in line)
            self.bar.write(textwrap.indent(textwrap.fill(line, 99 - len(indent)), indent))

    def log(self, step, stats, problem=None, rollout=None):
        """Log `stats`; now and then show `problem` and the first completion."""
        if self.args.device != "cpu":
            stats["peak_memory_gb"] = torch.cuda.max_memory_allocated() / 1e9
            torch.cuda.reset_peak_memory_stats()
        stats = {"step": step} | {name: value for name, value in stats.items() if math.isfinite(value)}
        with self.path.open("a") as file:
            file.write(json.dumps(stats) + "\n")
        if self.args.tensorboard:
            for name, value in stats.items():
                self.board.add_scalar(name, value, step)
        if "reward" in stats:
            self.say(f"step {step}/{self.args.steps}  {shown(stats, self.STEP)}")
        if "eval_accuracy" in stats:
            self.say(f"held out, after {step} steps:  {shown(stats, self.HELD_OUT)}")
        if rollout and (step == 1 or "eval_accuracy" in stats):
            text, r, gold = rollout["texts"][0].strip(), rollout["rewards"][0], problem.get("answer")
            self.say(f"{problem['question']}\n{text}\n(reward {r:g}, answer {extract_answer(gold) or gold})", "    | ")
        if stats.get("truncated", 0) > 0.5:
            self.say("warning: over half of the completions are cut off: raise --max_new_tokens or lower --lr")
        if stats.get("skipped") or stats.get("value_skipped"):
            self.say("warning: the gradient was not finite, its step is skipped: lower --lr")
        self.bar.update(step - self.bar.n)

    def close(self):
        """Print the results and where they are; after Ctrl-C exit with 130."""
        self.bar.close()
        for stats in map(json.loads, self.path.open()):
            if "eval_accuracy" in stats:
                print(f"held out, after {stats['step']:3} steps  {shown(stats, self.HELD_OUT)}")
        print(f"model and checkpoint  {checkpoints(self.args)[-1]}")
        print(f"metrics               {self.path}")
        if self.interrupted:
            print(f"interrupted; go on with --out {self.args.out} --resume")
            sys.exit(130)

# ---- Reward: answers get one spelling, then canonical forms; nothing is evaluated ----
LONGEST = 600  # characters; longer answers are not read
SYMBOLS = dict(zip("−×·√π∞±≤≥∈∪", r"- * * \sqrt \pi \infty \pm \le \ge \in \cup".split()))
FRACTION = r"\\frac ?(?:\{(-?[^-+{}]*)\}|(\w)) ?(?:\{(-?)([1-9][0-9]*)\}|([1-9]))"
NO_UNIT = "(?!.*(?:illion|thousand|hundred|dozen|not))"  # a word that changes the number
SPELLINGS = [  # pattern, replacement  # before -> after; applied in this order
    (r"\\\\|[&;]|\\cup\b|\b(?:and|or)\b|\{,\}", ","),  # 1 and 2 -> 1 , 2
    (r"\\(?=[][(){}%$0-9 ])|[$°]|\^\{?\\circ\}?", ""),  # \$5^\circ -> 5
    (r"\\[,:;!]|\\q?quad|\\(?:left|right)(?![a-z])", ""),  # \left(1,\,2\right) -> (1,2)
    (r"(?<=\\)[dtc](?=frac)|(?<=\\[lg]e)q(?:slant)?", ""),  # \dfrac12\leq x -> \frac12\le x
    (r"\\(?:text[a-z]*|mbox|math[a-z]*) ?\{([^{}]*)\}", r" \1 "),  # 5\text{cm}^2 -> 5 cm ^2
    (rf"(?<=[0-9)}}]) +{NO_UNIT}[a-z]{{2}}[A-Za-z /]*(?:\^[23])?[. ]*$", ""),  # 5 cm ^2 -> 5
    (r"(?<![A-Za-z\\])(sqrt|pi|infty)(?![a-z])", r"\\\1"),  # 2sqrt(3) -> 2\sqrt(3)
    (r"(\\sqrt|[\^_]) ?(?:\{([^{}]*)\}|(-?[0-9]+|[A-Za-z]))", r"\1(\2\3)"),  # x^2 -> x^(2)
    (FRACTION, r" \3\1\2/\4\5 "),  # 5\frac{3}8x -> 5 3/8 x
    (r"(?:\*|\\cdot\b|\\times\b)(?! *[0-9*])", ""),  # 5\cdot\pi -> 5\pi
    (r"(?<![0-9]) +| +(?![0-9])|\.$", ""),  # x = 4 2. -> x=4 2
    (r"^[^-+*/^=<>!0-9\\][^-+*/^=<>!\\]*(?:=|\\in\b)(?!.*=)", ""),  # f(3)=8 -> 8
    (r"^[0-9.]+[-+*/][-+*/0-9.]*=(?!.*=)", ""),  # 3+5=8 -> 8
]
THOUSANDS = r"(?<=[0-9]),(?=[0-9]{3}(?![0-9]))(?![^(\[{]*[)\]}])"  # 1,234 -> 1234
GROUP = re.compile(r"([(\[{])([^][(){}]*)([)\]}])")  # 2(x+(y)) -> (y)
TERMS = re.compile(r".*=.*|[-+]*[^-+]+|[-+]+")  # 5-x+y -> 5, -x, +y
NUMBER = r"(?:[0-9]+ )?[0-9]+/[1-9][0-9]*|[0-9]+\.?[0-9]*|\.[0-9]+"  # 1 3/8, 3/8, 0.5, .5
TERM = rf"([-+]*(?=.))(?:({NUMBER})(?![0-9.^_!:]))?(.*?)(?:(?<=[^-+])/([1-9][0-9]*))?"
DONE = str.maketrans("()[]{}+-,", "（）［］（）＋－，")  # full-width: not split again

def extract_answer(text):
    r"""The last <answer>...</answer> (in it the last box), or the last box, or the last ####; None
    if there is no mark or it holds nothing: 'so \boxed{\frac{1}{2}}.' -> '\frac{1}{2}'"""
    text = text.replace("\\boxed {", "\\boxed{") if isinstance(text, str) else ""
    _, tag, text = text.rpartition("<answer>")
    text = text.rpartition("</answer>")[0] if tag else text
    if "\\boxed{" in text:
        inside = text.rpartition("\\boxed{")[2][: LONGEST + 1]
        starts = [inside[:i] for i, c in enumerate(inside) if c == "}"]
        text = next((start for start in starts if start.count("{") == start.count("}")), "")
    elif "####" in text:
        text = text.rpartition("####")[2].strip().partition("\n")[0]
    elif not tag:
        text = ""
    text = text.strip()
    return text if 0 < len(text) <= LONGEST else None

def term(text):
    """One term of a sum, its number exact and in front: '-6x/4' -> '-3/2 x'"""
    signs, number, rest, under = re.fullmatch(TERM, text).groups()  # -, 6, x, 4
    value = sum(map(Fraction, (number or "1").split())) / int(under or 1)
    value = -value if signs.count("-") % 2 else value
    return rest if rest and value == 1 else f"{value} {rest}".strip()

def canonical(text):
    """Sums and the lists in {} sorted, from the innermost brackets out: '(x+2,3)' -> '2＋x，3'"""
    text = "{" + text + "}"  # a list without brackets is a set
    while match := GROUP.search(text):
        opening, inside, closing = match.groups()
        items = ["+".join(sorted(map(term, TERMS.findall(item)))) for item in inside.split(",") if item]
        inside = ";".join(sorted(items)) if opening == "{" else ",".join(items)
        text = text.replace(match[0], (opening + inside + closing).translate(DONE))
    return text.strip("（）")  # (9) is 9

@lru_cache(4096)
def forms(text):
    """(reading, canonical form) pairs: 20% read as 20 or as 1/5, 1,234 as a list or as a number."""
    text = " ".join((text or "").translate(str.maketrans(SYMBOLS)).split())
    for pattern, new in SPELLINGS:
        text = re.sub(pattern, new, text)
    texts = [text, re.sub(THOUSANDS, "", text)]
    readings = [each.replace("%", sign) for each in texts for sign in ("", "/100")]
    return {(i, canonical(each)) for i, each in enumerate(readings) if re.search(r"\w", each)}

def math_reward(completion, answer):
    r"""1.0 if the completion's marked answer has a form in common with the gold answer, else 0.0. Not read: algebra
    ((x+1)^2 is not x^2+2x+1, nor 2ab 2ba), arithmetic (2+3 is not 5), rounding (0.33 is not 1/3), matrices, 1\pm2,
    case (Odd is not odd), names (x=5 is y=5), units (5 mm is 5 cm)."""
    given = extract_answer(completion)
    gold = extract_answer(answer) or extract_answer(f"<answer>{answer}</answer>")
    return float(answer is not None and not forms(given).isdisjoint(forms(gold)))

def readable(answer):
    """Whether a gold answer, given back as it stands, is paid."""
    return math_reward(f"<answer>{extract_answer(answer) or answer}</answer>", answer)

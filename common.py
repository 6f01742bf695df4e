"""What the three scripts share: everything that is not the algorithm.

The method   Log-probabilities, Batching, Optimiser: read these beside grpo.py.
The sampler  Sampling: it writes the next token of every completion, then the next, and so on.
The rest     Statistics, Evaluation, Errors, Models, Problems, Rewards, Grading, Command line, Run:
             here you look things up.

Shapes: P prompts per step, G completions per prompt, N = P*G completions, which are the rows of a
rollout; S tokens in the longest prompt, T in the longest completion, L in the longest row (prompt
and completion); M completion tokens in a batch; V ids in the vocabulary (not the critic's V); H
numbers in a hidden state. Small letters are for a part: a micro-batch has ids (n, l), mask (n, t).

A rollout is a dict with one row per completion:
    ids           (N, L)  prompt, then completion, padded on the right
    attention     (N, L)  1 on prompt and completion, 0 on padding
    mask          (N, T)  float32; column t is for token t. 1 on the tokens of the completion, the
                          stop token included, and 0 after them
    sampled_logp  (N, T)  log pi of each token, as the sampler computed it
    row           (N,)    0 ... N-1, so that micro_batched can put results back in place
    finished      (N,)    True where a stop token ended the completion
    has_gradient  (N,)    False where a script finds that the gradient of a row is exactly 0, else
                          True. micro_batches leaves the rows with False out; their old_logp is 0
    texts         a list of N completions
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
import sys
import textwrap
import time
from argparse import BooleanOptionalAction
from fractions import Fraction
from functools import lru_cache
from pathlib import Path

import torch
from filelock import FileLock  # torch needs and installs it
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence
from torch.utils.checkpoint import checkpoint
from tqdm import tqdm

TOY = str((Path(__file__).parent / "tests/toy").resolve())  # default model and problems

# ---- Log-probabilities ----
def token_logprobs(model, batch, args):
    """Compute log pi of the completion tokens, where pi = softmax(logits / --temperature).
    Takes ids and attention (N, L) and mask (N, T); returns (N, T) float32, 0 outside the mask."""
    index, hidden, target = completion_states(model, batch, args)
    logp = chunked_logprobs(model, hidden, target, args.temperature)  # (M,)
    return logp.new_zeros(batch["mask"].shape).index_put(index, logp)

def token_values(model, batch, args):
    """Compute the critic's value of the state before each completion token, (N, T) float32."""
    index, hidden, _ = completion_states(model, batch, args)
    # load_value has added the head `score` to the model.
    values = model.score(hidden.to(model.score.weight.dtype)).squeeze(1)  # (M,)
    return values.new_zeros(batch["mask"].shape).index_put(index, values)

def completion_states(model, batch, args):
    """Run the body of the model and find the states that predict the M completion tokens.
    Returns, for each of these tokens: its place in (N, T), as a pair of indices (M,); the hidden
    state one position before it, (M, H); its id, (M,). Nothing else in training shifts by one."""
    i, t = batch["mask"].nonzero(as_tuple=True)  # (M,) both: a place in (N, T)
    prompt_lengths = batch["attention"].sum(1) - batch["mask"].sum(1).long()  # (N,)
    position = prompt_lengths[i] + t  # (M,) in (N, L)
    # No attention mask: padding is on the right, and causal attention never looks there.
    with autocast(args):
        hidden = model.base_model(input_ids=batch["ids"], use_cache=False).last_hidden_state
    return (i, t), hidden[i, position - 1], batch["ids"][i, position]

def autocast(args):
    """Return the context of mixed precision: float32 weights, matrix products in --dtype. The
    bfloat16 copies of the weights live until the context ends, so generate opens one context for
    all its tokens."""
    return torch.autocast(args.device, torch.bfloat16, enabled=args.dtype == "bfloat16")

# Training and sampling make at most this many logits, tokens x V, at a time: .27 GB in float32.
CHUNK = 2 ** 26

def chunked_logprobs(model, hidden, target, temperature):
    """Compute log softmax(logits / temperature)[target], (M, H) and (M,) -> (M,).
    This is done for one chunk of tokens after another, and the backward pass computes each chunk
    again. It costs one more matrix product, but the logits (M, V) never exist as a whole."""
    def logprobs(hidden, target):
        logits = head_logits(model, hidden) / temperature
        return -cross_entropy(logits, target, reduction="none")
    size = CHUNK // len(model.get_output_embeddings().weight)
    chunks = zip(hidden.split(size), target.split(size))
    # A chunk draws no random numbers, so checkpoint need not restore the state of a generator.
    return torch.cat([checkpoint(logprobs, h, y, use_reentrant=False, preserve_rng_state=False)
                      for h, y in chunks])

def head_logits(model, hidden):
    """Compute a model's logits from hidden states, (M, H) -> (M, V). We do this in float32 (or in
    TF32, see load_policy), because bfloat16 rounds a logit of 20 by up to .06."""
    head = model.get_output_embeddings()
    with torch.autocast(hidden.device.type, enabled=False):
        logits = head(hidden.to(head.weight.dtype))
    config = model.config.get_text_config()  # the text part, if the model also reads images
    factor = getattr(config, "logit_scale", None) or 1  # Cohere
    factor /= getattr(config, "logits_scaling", None) or 1  # Granite, MiniCPM
    if factor != 1:
        logits = factor * logits
    cap = getattr(config, "final_logit_softcapping", None)  # Gemma
    if cap:
        logits = cap * (logits / cap).tanh()
    return logits

# ---- Batching ----
def minibatches(rollout, count, group_size):
    """Cut a rollout into `count` parts of about equal size, in whole groups. An optimiser step of
    grpo.py or gspo.py then has all completions of a question, whose advantages add up to 0. The
    texts are left out. Nothing is shuffled: every epoch and micro_batched make the same cuts."""
    rows = torch.arange(len(rollout["ids"]), device=rollout["ids"].device)
    for part in rows.view(-1, group_size).tensor_split(count):  # (p, G)
        part = part.flatten()
        yield {name: value[part] for name, value in rollout.items() if torch.is_tensor(value)}

def micro_batches(batch, tokens, doing="update"):
    """Cut a batch into micro-batches of at most `tokens` positions, padding counted. A row that is
    longer than that is a micro-batch by itself. Rows without a gradient are left out. The others
    are sorted by length, so that there is little padding, and each micro-batch is trimmed to its
    longest row. `doing` is the text of the progress bar."""
    batch = {name: value[batch["has_gradient"]] for name, value in batch.items()}
    lengths, order = batch["attention"].sum(1).sort(descending=True)
    lengths = lengths.tolist()
    begin, cuts = 0, []
    # Row `begin` is the longest of its micro-batch. A row joins while rows x longest <= tokens.
    for end in range(1, len(lengths) + 1):
        if end == len(lengths) or (end + 1 - begin) * lengths[begin] > tokens:
            cuts.append((begin, end))
            begin = end
    for begin, end in progress(cuts, doing, "micro-batch"):
        part = {name: value[order[begin:end]] for name, value in batch.items()}
        l, t = lengths[begin], int(part["mask"].sum(1).max())
        for name, value in part.items():
            if name in ("ids", "attention"):
                part[name] = value[:, :l]
            elif value.dim() == 2:  # (n, T); adv may be (n, 1)
                part[name] = value[:, :t]
        yield part

def micro_batched(function, model, rollout, args):
    """Compute `function`, which is token_logprobs or token_values, of a whole rollout: (N, T).
    This uses the micro-batches of update. In other micro-batches a bfloat16 log-prob would be
    rounded differently, and the ratio would not be 1 before the first optimiser step."""
    result = torch.zeros_like(rollout["mask"])
    for minibatch in minibatches(rollout, args.minibatches, args.group_size):
        for b in micro_batches(minibatch, args.micro_batch_tokens, "log-probs"):
            result[b["row"], :b["mask"].shape[1]] = function(model, b, args)
    return result

# ---- Optimiser ----
class Optimizer:
    """AdamW with warm-up and norm clipping. The weights are float32, because bfloat16 keeps 8 bits:
    a weight of .02 that moves by --lr 1e-6 would be rounded to where it was."""
    def __init__(self, model, lr, args, eps=1e-8):
        self.lr, self.args = lr, args
        self.steps_taken = 0
        self.weights = list(model.parameters())
        self.adamw = torch.optim.AdamW(
            self.weights, lr, betas=(0.9, 0.95),  # .999 would average over 1000 steps
            eps=eps, weight_decay=0.0, fused=True)

    def step(self, prefix=""):
        """Take one step and clear the gradient. There is no step if the gradient is not finite, or
        if it is 0, because then Adam's momentum alone would move the weights.
        Returns statistics, whose names begin with `prefix`."""
        norm = torch.nn.utils.clip_grad_norm_(self.weights, self.args.max_grad_norm).item()
        stats = {"skipped": (not math.isfinite(norm), 1), "zero_gradient": (norm == 0, 1)}
        if math.isfinite(norm) and norm > 0:
            stats["grad_norm"] = (norm, 1)
            self.steps_taken += 1
            warm_up = min(1, self.steps_taken / max(1, self.args.warmup_steps))
            self.adamw.param_groups[0]["lr"] = self.lr * warm_up
            self.adamw.step()
        self.adamw.zero_grad()
        return {prefix + name: value for name, value in stats.items()}

    def state_dict(self):
        """Return what a resumed run needs besides the weights."""
        return {"adamw": self.adamw.state_dict(), "steps_taken": self.steps_taken}

    def load_state_dict(self, state):
        """Go on from `state`. The model has its weights already."""
        self.adamw.load_state_dict(state["adamw"])
        self.steps_taken = state["steps_taken"]

# ---- Sampling ----
@torch.no_grad()
def generate(model, tokenizer, prompts, group_size, temperature, args):
    """Sample group_size completions of each of P prompts (lists of ids); returns a rollout.
    A token comes from softmax(logits / temperature) and nothing else; at temperature 0 it is the
    likeliest one. We do not use transformers' generate, because it adds the model's own top_k,
    reads a prompt once for each completion, and keeps finished rows to the end."""
    if max(map(max, prompts)) >= model.get_input_embeddings().num_embeddings:
        fail(f"--model {args.model}: has no embedding of a token that is in a prompt")
    model.eval()  # in training mode gradient checkpointing drops the cache
    stop = torch.tensor(stop_ids(model, tokenizer), device=model.device)
    with autocast(args):
        tokens, logp = sample(model, prompts, group_size, temperature, stop, args)
    model.train()
    is_stop = torch.isin(tokens, stop)  # (N, max_new_tokens)
    mask = is_stop.cumsum(1) - is_stop.long() == 0  # up to the first stop token, and on it
    lengths = mask.sum(1).tolist()
    mask = mask[:, :max(lengths)].float()  # (N, T)
    completions = [row[:length] for row, length in zip(tokens.tolist(), lengths)]
    rows = [torch.tensor(prompts[i // group_size] + c, device=model.device)
            for i, c in enumerate(completions)]
    return {
        "ids": pad_sequence(rows, batch_first=True),
        "attention": pad_sequence([torch.ones_like(row) for row in rows], batch_first=True),
        "mask": mask,
        "sampled_logp": logp[:, :max(lengths)] * mask,
        "row": torch.arange(len(rows), device=model.device),
        "finished": is_stop.any(1),
        "has_gradient": torch.ones(len(rows), dtype=torch.bool, device=model.device),
        "texts": tokenizer.batch_decode(completions, skip_special_tokens=True)}

def sample(model, prompts, group_size, temperature, stop, args):
    """Write one token per row at a time. Returns the tokens and their log pi, (N, max_new_tokens)
    both. Dropping rows copies the cache, so a row with its stop token goes on until more than half
    of the rows are finished. generate cuts off what comes after the stop token."""
    N, T = len(prompts) * group_size, args.max_new_tokens
    cached = CachedModel(model, prompts, group_size, args)
    active = torch.arange(N, device=model.device)  # (n,) rows that are not dropped
    running = torch.ones_like(active, dtype=torch.bool)  # (n,) without a stop token yet
    tokens = torch.zeros(N, T, dtype=torch.long, device=model.device)
    sampled_logp = torch.zeros(N, T, device=model.device)
    # draw makes several copies of its logits, one in float64, so it gets at most a CHUNK at a time.
    size = CHUNK // len(model.get_output_embeddings().weight)
    for t in progress(range(T), "sampling", "token"):
        if t > 0:
            cached.read(token)
        drawn = [draw(head_logits(model, h), temperature) for h in cached.hidden.split(size)]
        token, logp = map(torch.cat, zip(*drawn))  # (n,) both
        tokens[active, t], sampled_logp[active, t] = token, logp
        running &= ~torch.isin(token, stop)
        if t % 4 == 0:  # not at every token, because counting the rows waits for the GPU
            left = running.nonzero().squeeze(1)
            if len(left) == 0:
                break
            if len(left) < len(active) / 2:
                cached.select(left)
                active, running, token = active[left], running[left], token[left]
    return tokens, sampled_logp

class CachedModel:
    """A model and its key-value cache. It reads each prompt once for its group, and then a token of
    every row at a time; `hidden` (n, H) is the state that predicts the next token. Prompts are
    padded on the left, so that the next token of every row goes into the same column.

    On a GPU, reading one token takes some thousand short kernels, and Python needs longer to launch
    them one by one than the GPU needs to run them. So we record them once, as a CUDA graph, and
    then replay the graph for every token: the same kernels on the same tensors, without Python.
    Shapes cannot change, so the cache has all its columns from the beginning, and whatever a
    replay should see must be written into the recorded tensors in place."""
    def __init__(self, model, prompts, group_size, args):
        from transformers import DynamicCache, StaticCache
        self.model = model
        S = max(map(len, prompts))
        self.cache = in_one_dtype(DynamicCache)(config=model.config)
        # A sliding-window layer counts its tokens in Python, which a replay does not run.
        self.use_graph = (args.cuda_graphs and model.device.type == "cuda"
                          and not any(self.cache.is_sliding))
        if self.use_graph:
            self.cache = in_one_dtype(StaticCache)(
                config=model.config, max_cache_len=S + args.max_new_tokens)
        parts = [torch.tensor(prompt, device=model.device) for prompt in prompts]
        ones = [torch.ones_like(part) for part in parts]
        ids = pad_sequence(parts, batch_first=True, padding_side="left")  # (P, S)
        real = pad_sequence(ones, batch_first=True, padding_side="left")  # (P, S) 0 on padding
        self.hidden = self.forward(ids, real, (real.cumsum(1) - 1).clamp(min=0))  # (P, H)
        self.position = real.sum(1)  # (P,) of the next token
        self.columns = S  # filled so far
        self.attention = torch.nn.functional.pad(real, (0, args.max_new_tokens))
        rows = torch.arange(len(prompts) * group_size, device=model.device)  # (N,)
        self.select(rows // group_size)  # from P rows to N

    def forward(self, ids, attention, positions):
        """Read ids (n, s) into the cache; returns the states after the last of them, (n, H)."""
        return self.model.base_model(
            input_ids=ids, attention_mask=attention, position_ids=positions,
            cache=self.cache, use_cache=True).last_hidden_state[:, -1]  # was past_key_values=

    def select(self, rows):
        """Make each row i a copy of row rows[i], which repeats or drops rows."""
        self.cache.reorder_cache(rows)
        self.hidden, self.position = self.hidden[rows], self.position[rows]
        self.attention = self.attention[rows]
        self.graph = None  # a graph reads the tensors that it was recorded with; these are new

    def read(self, token):
        """Read one more token of each row, (n,)."""
        self.attention[:, self.columns] = 1  # in place: the graph reads it
        self.columns += 1
        if not self.use_graph:
            attention = self.attention[:, :self.columns]
            self.hidden = self.forward(token[:, None], attention, self.position[:, None])
        elif self.graph is None:
            self.token = token  # the graph will read its token here
            inputs = self.token[:, None], self.attention, self.position[:, None]
            # This call is not recorded: a library may allocate memory when it is called first.
            self.hidden = self.forward(*inputs)
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):  # inside, kernels are recorded and not run
                self.output = self.forward(*inputs)
        else:
            self.token.copy_(token)
            self.graph.replay()  # writes self.output
            self.hidden = self.output
        self.position += 1  # changed in place, too

def in_one_dtype(cache_class):
    """Derive a class of caches whose keys have the dtype of the values. Under autocast a rotated
    key is float32 and a value bfloat16: DynamicCache would hold both in float32, and StaticCache
    would fail."""
    class Cache(cache_class):
        def update(self, keys, values, *args, **kwargs):
            return super().update(keys.to(values.dtype), values, *args, **kwargs)
    return Cache

def draw(logits, temperature):
    """Draw one id per row from pi = softmax(logits / temperature); at 0 take the likeliest.
    (n, V) -> ids (n,) and their log pi (n,). This inverts the cumulative distribution with one
    random number per row. torch.multinomial takes V random numbers, and more time."""
    logp = (logits / (temperature or 1)).log_softmax(-1)  # (n, V)
    if temperature == 0:
        token = logits.argmax(-1)
    else:
        # searchsorted needs sums that never fall. On a GPU, float32 sums may fall, by rounding.
        cumulative = logp.exp().cumsum(-1, dtype=torch.float64)
        # The last sum may not be exactly 1, so we take the first id whose sum reaches u times the
        # last one. As u > 0, it is never an id with pi = 0.
        u = 1 - torch.rand(len(logits), 1, device=logits.device)
        token = torch.searchsorted(cumulative, u * cumulative[:, -1:]).squeeze(1)
    return token, logp.gather(1, token[:, None]).squeeze(1)

def stop_ids(model, tokenizer):
    """Return the ids that end a completion; chat models have several."""
    eos = model.generation_config.eos_token_id
    several = eos if isinstance(eos, list) else [eos]
    return sorted({tokenizer.eos_token_id, *several} - {None})

# ---- Statistics ----
def means(logged):
    """Reduce what the micro-batches of an update logged to one number per name.
    Each entry of `logged` is a dict. A value is a pair (sum, count), of which the mean over all
    entries is taken; a name that ends in _max has a number, of which the maximum is taken."""
    result = {}
    names = dict.fromkeys(name for stats in logged for name in stats)  # in the order they came
    for name in names:
        values = [stats[name] for stats in logged if name in stats]
        if name.endswith("_max"):
            result[name] = float(max(values))
        else:
            sums, counts = zip(*values)
            result[name] = float(sum(sums) / sum(counts))
    return result

def rollout_stats(rollout, group_size):
    """Compute what is logged of a rollout, a dict of numbers.
    The sampler and the training pass compute the same log pi in different ways. Two numbers measure
    how far apart they are. Both are root mean squares of the difference: sampling_logp_difference
    is over tokens; sampling_sequence_difference first takes the mean of each completion, as GSPO's
    s does. They should be no more than rounding; a larger difference is a bug."""
    mask, groups = rollout["mask"], rollout["rewards"].view(-1, group_size)
    tokens, lengths = mask.sum(), mask.sum(1)
    stats = {
        "reward": groups.mean(),
        "completion_length": lengths.mean(),
        "truncated": 1 - rollout["finished"].float().mean(),
        "entropy": -rollout["sampled_logp"].sum() / tokens}  # estimated from the samples
    computed = rollout["has_gradient"]  # (N,) the others have no old_logp
    if computed.any():
        difference = (rollout["old_logp"] - rollout["sampled_logp"])[computed]  # (n, T)
        stats["sampling_logp_difference"] = difference[mask[computed] > 0].square().mean().sqrt()
        difference = difference.sum(1) / lengths[computed]  # (n,)
        stats["sampling_sequence_difference"] = difference.square().mean().sqrt()
    if group_size > 1:
        stats["zero_variance_groups"] = (groups == groups[:, :1]).all(1).float().mean()
    if "ref_logp" in rollout:  # k3, whatever --kl is; outside the mask it is 0
        log_x = rollout["ref_logp"] - rollout["old_logp"]  # (N, T)
        stats["kl"] = (log_x.exp() - log_x - 1).sum() / tokens
    return {name: value.item() for name, value in stats.items()}

def explained_variance(returns, values, mask):
    """Compute 1 - Var(returns - values) / Var(returns) over tokens; {} if all returns are equal."""
    returns, values = returns[mask > 0], values[mask > 0]  # (M,) both
    if returns.var() < 1e-8:  # equal but for rounding
        return {}
    return {"explained_variance": (1 - (returns - values).var() / returns.var()).item()}

# ---- Evaluation ----
def evaluate(policy, tokenizer, problems, reward, args):
    """Compute accuracy on held-out problems, greedy and sampled; the samples' reward and length.
    Accuracy is the share of right answers, whatever the reward function pays for. pass@k is the
    chance that any of k answers is right. Its unbiased estimate is 1 - C(n - c, k) / C(n, k), where
    c of the n = --eval_samples answers are right (Chen et al. 2021, eq. 1)."""
    torch.manual_seed(args.seed)  # the same seed at every evaluation
    n = args.eval_samples
    rewards, right, length = sample_rewards(
        policy, tokenizer, problems, reward, n, args.temperature, args)
    result = {"eval_reward": rewards.mean().item(), "eval_completion_length": length}
    if not args.answer_column:
        return result  # without gold answers there is no accuracy
    _, greedy, _ = sample_rewards(policy, tokenizer, problems, reward, 1, 0.0, args)
    result |= {"eval_accuracy": greedy.mean().item(), "eval_sampled_accuracy": right.mean().item()}
    for k in [2 ** i for i in range(1, n.bit_length())]:  # 2, 4, 8 ... up to n
        misses = [math.comb(n - c, k) / math.comb(n, k) for c in right.sum(1).int().tolist()]
        result[f"eval_pass@{k}"] = 1 - sum(misses) / len(misses)
    return result

def sample_rewards(policy, tokenizer, problems, reward, n, temperature, args):
    """Sample n completions of each problem. Returns their rewards and whether their answers are
    right, both (problems, n), and their mean length."""
    rewards, right, lengths = [], [], []
    problems = sorted(problems, key=lambda problem: len(problem["prompt"]))  # little padding
    size = max(1, args.prompts * args.group_size // n)  # size x n is the N of a rollout
    for start in progress(range(0, len(problems), size), f"temperature {temperature:g}", "batch"):
        part = problems[start:start + size]
        rollout = generate(policy, tokenizer, [p["prompt"] for p in part], n, temperature, args)
        rewards.append(rewards_of(reward, part, rollout).view(-1, n))
        answers = [problem["answer"] for problem in part for _ in range(n)]
        right += map(math_reward, rollout["texts"], answers)
        lengths.append(rollout["mask"].sum(1))
    return torch.cat(rewards), torch.tensor(right).view(-1, n), torch.cat(lengths).mean().item()

# ---- Errors ----
def fail(message, status=2):
    """Say in one line what is wrong and exit."""
    print("error:", " ".join(message.split()), file=sys.stderr)
    sys.exit(status)

@contextlib.contextmanager
def or_fail(message):
    """Turn any error inside into one line: libraries raise errors of all kinds and lengths."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise  # launch says what to do
    except Exception as error:
        # The error that datasets raises says little; its __cause__ says what is wrong with a file.
        reasons = [f"{type(e).__name__}: {e}" for e in (error, error.__cause__) if e]
        fail(f"{message}: {textwrap.shorten('; '.join(reasons), 400)}")

# ---- Models ----
def load_policy(args, adapt=lambda policy, args: None):
    """Load --model, without dropout, and its tokenizer. Stop if they do not fit the scripts, lower
    args.max_prompt_tokens to the room there is, and set args.cuda_graphs to False if graphs fail.
    A fork may give `adapt`, which changes the model before it takes memory on the GPU."""
    import transformers  # takes seconds: not before the flags are known to be good
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    print(f"loading {args.model} and {args.dataset}")
    with or_fail(f"--model {args.model}: cannot be loaded on --device {args.device}"):
        policy, found = transformers.AutoModelForCausalLM.from_pretrained(
            args.model, dtype=torch.float32, output_loading_info=True)
        tokenizer = transformers.AutoTokenizer.from_pretrained(args.model)
        adapt(policy, args)
        policy.to(args.device)
        if args.gradient_checkpointing:
            policy.activation_checkpointing_enable()  # gradient_checkpointing_enable's new name
    if found["missing_keys"]:  # transformers would give them random values
        fail(f"--model {args.model}: lacks the weights {', '.join(found['missing_keys'])}")
    # config.json may be that of another model, or an adapter may not be merged.
    for name in [*Path(args.model).glob("adapter_config.json"), *found["unexpected_keys"]][:3]:
        print(f"warning: --model has weights that are not used: {name}")
    room = getattr(policy.config.get_text_config(), "max_position_embeddings", None) or math.inf
    if room <= args.max_new_tokens:
        fail(f"--max_new_tokens {args.max_new_tokens}: --model has {room} positions in all")
    args.max_prompt_tokens = min(args.max_prompt_tokens, room - args.max_new_tokens)
    print(f"{policy.num_parameters() / 1e6:.2f}M parameters")
    print(*(f"{name}={value}" for name, value in vars(args).items()))
    switch_off_noise(policy)
    policy.train()  # gradient checkpointing works in this mode only
    with or_fail(f"--model {args.model}: {type(policy).__name__} is not supported"):
        try:
            check_model(policy, tokenizer, args)
        except Exception:  # not every model works with CUDA graphs
            args.cuda_graphs = False
            check_model(policy, tokenizer, args)
            print("warning: CUDA graphs do not work with this model: sampling without")
    if args.dtype == "bfloat16":
        # From here on the float32 head multiplies in TF32, which has 11 bits; bfloat16 has 8.
        torch.backends.cuda.matmul.fp32_precision = "tf32"
    return policy, tokenizer

def switch_off_noise(policy):
    """Set dropout (p, *drop*) and router noise (*jitter*) to 0, as noise alone would move the ratio
    from 1. Some layers read them from the config in every forward pass."""
    for holder in (*policy.modules(), policy.config.get_text_config()):
        for name, value in vars(holder).items():
            if isinstance(value, float) and (name == "p" or "drop" in name or "jitter" in name):
                setattr(holder, name, 0.0)

def load_value(policy):
    """Make PPO's value model: a copy of the policy with a scalar head that starts at 0."""
    # completion_states runs model.base_model, which for a body is the body itself.
    model = copy.deepcopy(policy.base_model)
    weight = policy.get_output_embeddings().weight  # (V, H)
    model.score = torch.nn.Linear(weight.shape[1], 1, device=weight.device)
    torch.nn.init.zeros_(model.score.weight)
    torch.nn.init.zeros_(model.score.bias)
    return model

@torch.no_grad()
def check_model(model, tokenizer, args):
    """Raise ValueError if the log-probs of the sampler or of the training pass are not those of the
    model's own forward pass. This happens where head_logits does not scale or cap the logits as the
    model does, where training is random, and where a cache does not fit. The check is in float32,
    where only rounding may differ. It uses two random prompts: one as long as a run allows, and one
    of 3 tokens, which the sampler has to pad."""
    # Token 1 comes after the prompt, 2 after the read that records a graph, 3 and 4 after replays.
    T = 4
    longest = max(3, args.max_prompt_tokens + args.max_new_tokens - T)
    settings = copy.copy(args)
    settings.dtype, settings.max_new_tokens, settings.temperature = "float32", T, 1.0
    rng, vocabulary = random.Random(0), range(model.get_input_embeddings().num_embeddings)
    prompts = [rng.choices(vocabulary, k=length) for length in (longest, 3)]
    rollout = generate(model, tokenizer, prompts, 1, 1.0, settings)
    trained = token_logprobs(model, rollout, settings)  # (2, T)
    model.eval()
    for i, prompt in enumerate(prompts):
        ids = rollout["ids"][i, :rollout["attention"][i].sum()]  # (L,)
        logits = model(ids[None], use_cache=False).logits[0, len(prompt) - 1:-1]  # (T, V)
        own = -cross_entropy(logits.float(), ids[len(prompt):], reduction="none")  # (T,)
        for name, found in (("sampler", rollout["sampled_logp"]), ("training pass", trained)):
            difference = (found[i, :len(own)] - own).abs().max()
            if not difference < 1e-3:  # so written, nan fails too
                raise ValueError(f"log-probs of the {name} are off by {difference:.2g}")
    model.train()

# ---- Problems ----
def load_problems(args, tokenizer):
    """Load the training and the held-out problems.
    A problem is a row of --dataset with "question" and "answer" (texts) and "prompt" (ids)."""
    splits = read_dataset(args.dataset)
    with or_fail(f"--split, --eval_split: --dataset {args.dataset} has {', '.join(splits)}"):
        train = splits[args.split]
        if len(splits) > 1 and args.split != args.eval_split:
            held_out = splits[args.eval_split]
        else:
            # Hold out a fifth. The question seeds the draw, so that equal ones stay together.
            shares = [random.Random(str(row.get(args.question_column))).random() for row in train]
            held_out = [row for row, share in zip(train, shares) if share < 0.2]
            train = [row for row, share in zip(train, shares) if share >= 0.2]
    train = prepare(train, tokenizer, args, "train on")
    # We choose at random, in the same way with every --seed. We prepare twice --eval_problems,
    # because some may be left out. To prepare all of a large data set would take long.
    held_out = random.Random(0).sample(held_out, len(held_out))[:2 * args.eval_problems]
    use = f"hold out ({args.eval_problems} are enough)"
    return train, prepare(held_out, tokenizer, args, use)[:args.eval_problems]

def read_dataset(source):
    """Read a file, a directory or a data set of the hub: {split: list of rows}."""
    formats = {".jsonl": "json", ".json": "json", ".csv": "csv", ".parquet": "parquet"}
    with or_fail(f"--dataset {source}: no readable {', '.join(formats)}, directory or hub name"):
        import datasets  # takes seconds
        datasets.disable_progress_bars()
        # datasets reads [, * and ? in a path as a pattern, which other files may match. So the path
        # of a file is escaped, and that of a directory is refused.
        path = source if "://" in source else os.path.abspath(source)
        if Path(source).suffix in formats:
            splits = datasets.load_dataset(
                formats[Path(source).suffix], data_files=glob.escape(path))
        elif Path(path).exists() and glob.escape(path) != path:
            raise ValueError(f"a directory with [, * or ? in its path: {path}")
        else:
            configs = datasets.get_dataset_config_names(source)
            splits = datasets.load_dataset(source, "main" if "main" in configs else None)  # gsm8k
        return {split: rows.to_list() for split, rows in splits.items()}

def prepare(rows, tokenizer, args, use):
    """Turn rows into problems. Rows that cannot be used are counted and left out."""
    columns = {args.question_column, args.answer_column} - {""}  # "": there are no gold answers
    if rows and not columns <= set(rows[0]):
        fail(f"--dataset {args.dataset}: has columns {', '.join(rows[0])}, not "
             f"{' and '.join(sorted(columns))}: see --question_column, --answer_column")
    problems, left_out = [], []
    too_long = f"too long (over {args.max_prompt_tokens}: --max_prompt_tokens, --max_new_tokens)"
    chats = [read_chat(row, args) for row in rows]
    for row, chat, prompt in zip(rows, chats, prompts_of(chats, tokenizer, args)):
        question, answer = chat[-1]["content"], text_of(row, args.answer_column, args)
        if not question:
            left_out.append("no question")
        elif len(prompt) > args.max_prompt_tokens:
            left_out.append(too_long)
        # An answer that the grader cannot read, such as an empty one, does not even equal itself.
        elif args.answer_column and not math_reward(f"<answer>{answer}</answer>", answer):
            left_out.append("no readable answer")
        else:
            problems.append(row | {"question": question, "answer": answer, "prompt": prompt})
    counts = ", ".join(f"{left_out.count(reason)} {reason}" for reason in sorted(set(left_out)))
    summary = f"{len(problems)} problems to {use}; left out of {len(rows)}: {counts or 'none'}"
    if not problems:
        fail(f"--dataset {args.dataset}: {summary}")
    print(summary)
    # The tokenizer of the toy, for example, knows no more than a few characters.
    ids = [token for problem in problems[:1000] for token in problem["prompt"]]
    if ids.count(tokenizer.unk_token_id) >= len(ids) / 2:
        fail(f"--model {args.model}: its tokenizer does not know most of --dataset {args.dataset}")
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
    """Return a row's question as a list of messages; it may be a text, or such a list."""
    chat = row.get(args.question_column)
    if not isinstance(chat, list):
        chat = [{"role": "user", "content": text_of(row, args.question_column, args)}]
    with or_fail(f"--dataset {args.dataset}: column {args.question_column} is no text and no chat"):
        if chat[-1]["role"] != "user" or not all(isinstance(m["content"], str) for m in chat):
            raise ValueError("messages must be texts, and the last one the user's")
        if args.system_prompt and chat[0]["role"] != "system":
            chat = [{"role": "system", "content": args.system_prompt}, *chat]
    return chat

def prompts_of(chats, tokenizer, args):
    """Turn chats into token ids, one list after another: by the chat template, or, without one, as
    their texts, each with a newline. A thousand are read at a time, because that is faster."""
    for start in progress(range(0, len(chats), 1000), "reading problems", "thousand"):
        part = chats[start:start + 1000]
        if tokenizer.chat_template:
            with or_fail(f"--model {args.model}: its chat template fails (by --system_prompt?)"):
                prompts = tokenizer.apply_chat_template(part, add_generation_prompt=True)
        else:
            prompts = tokenizer(["".join(m["content"] + "\n" for m in chat) for chat in part])
        yield from prompts["input_ids"]

def batch_of(problems, step, args):
    """Return the P problems of a step.
    All problems are shuffled, used up, shuffled anew, and so on. --seed and the step alone say
    which come now, so that there is no state to save. Example: with n = 5 problems and P = 3, step
    2 takes the last two problems of epoch 0 and the first one of epoch 1."""
    n, first = len(problems), (step - 1) * args.prompts  # earlier steps used `first` problems
    epochs = range(first // n, (first + args.prompts - 1) // n + 1)  # that this step draws from
    shuffled = [p for e in epochs for p in random.Random(f"{args.seed} {e}").sample(problems, n)]
    return shuffled[first % n:][:args.prompts]

# ---- Rewards ----
def answer_reward(problems, completions):
    """Return 1.0 for a completion with the problem's answer, else 0.0."""
    return [math_reward(text, problem["answer"]) for problem, text in zip(problems, completions)]

def rewards_of(reward, problems, rollout):
    """Call the reward function on a rollout: (N,) float32. The G completions of a problem
    are rows one after another. The function must return a finite number for each."""
    texts = rollout["texts"]
    if reward is answer_reward and problems[0]["answer"] == "":
        fail('--answer_column "": answer_reward needs the gold answers')
    problem_of_row = [p for p in problems for _ in range(len(texts) // len(problems))]
    rewards = torch.tensor([float(r) for r in reward(problem_of_row, texts)])
    if len(rewards) != len(texts) or not rewards.isfinite().all():
        found = f"{len(rewards)}: {textwrap.shorten(str(rewards.tolist()), 200)}"
        fail(f"the reward function must return {len(texts)} finite numbers; it returned {found}")
    return rewards.to(rollout["ids"].device)

# ---- Grading ----
# Both answers are rewritten to one spelling and compared as text. Numbers become exact fractions;
# items of a list and terms of a sum are sorted. Units are dropped, and so is a percent sign: 10 is
# paid where the gold answer is 10 %, and 10 % is not paid where it is 0.1. An answer with a
# bracket, a bar or a relation (a tuple, a matrix, an inequality) is respelled, but not sorted, and
# its numbers stay as they are: (0.5, 1) is not (1/2, 1). The same holds for an answer with a minus
# after ^ or /, because that minus does not begin a term. There is no algebra: 2+3 is not 5.
LONGEST = 600  # characters; longer answers are not read
UNITS = "degree|dollar|cent|percent|unit|cm|meter|foot|feet|inch(es)?|mile|hour|minute|day|week"
# Applied in this order: (pattern, replacement),  # text before -> text after.
SPELLINGS = [
    (r"\\\\|;|\{,\}|\b(and|or)\b", ","),  # 1{,}234 and 5 -> 1,234 , 5
    (r"\\(left|right)\b|\\[,:! ]|[$%°]", ""),  # \left(5,\,6\right) -> (5,6)
    (r"\\cdot|\\times|·|×", "*"),  # 2\cdot\pi -> 2*\pi
    (r"\\leq?(slant)?\b|≤", "<="),  # x \leq 5 -> x <= 5
    (r"\\geq?(slant)?\b|≥", ">="),  # x \geq 5 -> x >= 5
    (r"\\[dtc]frac", r"\\frac"),  # \dfrac -> \frac
    (r"\\", ""),  # \sqrt{3} -> sqrt{3}
    ("−", "-"),  # −5 -> -5
    ("π", "pi"),  # 5π -> 5pi
    (r"\^{?circ}?", ""),  # 5^{circ} -> 5
    (r"(text\w*|mbox|math\w*) ?{([^{}]*)}", r" \2 "),  # text{even} -> even
    (r"sqrt\((\w+)\)", r"sqrt{\1}"),  # sqrt(3) -> sqrt{3}
    (r"{(\w)}", r"\1"),  # sqrt{3} -> sqrt3
    (r"(sqrt|\^) ?frac", r"\1 of frac"),  # sqrtfrac34 -> sqrt of frac34, which is not (sqrt3)/4
    (r"frac ?(\w)", r"frac{\1}"),  # frac38 -> frac{3}8
    (r"(frac ?{[^{}]*}) ?(\d)", r"\1{\2}"),  # frac{3}8 -> frac{3}{8}
    (r"frac ?{(-?[^-+{}]*)} ?{(\d+)}", r" \1/\2 "),  # 1frac{3}{8} -> 1 3/8
    (r"\* ?([a-z])", r"\1"),  # 2*pi -> 2pi
    (r" ?\.$", ""),  # 5. -> 5
    (rf"(\d) *(square )?({UNITS})s?( ?\^[23])?$", r"\1"),  # 5 cm^2 -> 5
    (r"^[a-zA-Z](\(\w\))?( ?=| in\b)", ""),  # f(x) = 5 -> 5
    (r"^{([^{}]*)}$", r"\1"),  # {1, 2} -> 1, 2
    (r"^\(([^(),]*)\)$", r"\1"),  # (5) -> 5
]
NUMBER = r"-?((\d+ )?\d+/[1-9]\d*|\d*\.?\d+)"  # 1 3/8, 3/8, 0.5, .5, 5

def extract_answer(text):
    r"""Find the marked answer in a completion; None if there is no mark, or it is not closed, empty
    or too long. We look inside the last <answer>...</answer>, or in the whole text if there is no
    <answer>. There we take what is in the last \boxed{...} or what follows the last #### on its
    line, whichever is later; inside an <answer> without either we take all of it."""
    _, tag, inside = text.rpartition("<answer>")
    if tag:
        text, closed, _ = inside.partition("</answer>")
        if not closed:
            return None
    box, hashes = text.rfind("\\boxed{"), text.rfind("####")
    if box > hashes:
        text = before_closing_brace(text[box + len("\\boxed{"):])
    elif hashes >= 0:
        text = text[hashes + len("####"):].strip().partition("\n")[0]
    elif not tag:
        return None
    text = text.strip()
    return text if 0 < len(text) <= LONGEST else None

def before_closing_brace(text):
    """Return what stands before the } that no { opened: '{1}+2} so' -> '{1}+2'."""
    for i, character in enumerate(text[:LONGEST + 1]):
        before = text[:i]
        if character == "}" and before.count("{") == before.count("}"):
            return before
    return ""

@lru_cache(2 ** 16)  # many completions have the same gold answer
def canonical(text):
    """Rewrite an answer so that equal answers become the same text: '2, x+0.5' -> '1/2+x,2'."""
    text = " ".join((text or "").split())
    for pattern, replacement in SPELLINGS:
        text = " ".join(re.sub(pattern, replacement, text).split())
    if re.fullmatch(r"-?\d{1,3}(,\d{3})+(\.\d+)?", text):  # 1,234.50
        text = text.replace(",", "")
    text = re.sub(r" *([^\d ]) *", r"\1", text)  # spaces stay between digits: 4 2 is not 42
    if re.search(r"[\[\](){}<>=|]|[\^/]-", text):
        return text
    return ",".join(sorted(canonical_sum(item) for item in text.split(",") if item))

def canonical_sum(text):
    """Sort the terms of a sum, its numbers exact: '2x-0.50' -> '-1/2+2x'."""
    terms = text.replace("-", "+-").split("+")
    return "+".join(sorted(exact(term) for term in terms if term))

def exact(term):
    """Write a number as an exact fraction: '-1 3/8' -> '-11/8'. Other terms stay."""
    if not re.fullmatch(NUMBER, term, re.ASCII):  # no digits of other scripts
        return term
    value = sum(Fraction(part) for part in term.removeprefix("-").split())
    return str(-value if term.startswith("-") else value)

def math_reward(completion, answer):
    """Return 1.0 if the marked answer equals `answer`, else 0.0. `answer` may have a mark, too."""
    given = canonical(extract_answer(completion))
    gold = canonical(extract_answer(f"<answer>{answer}</answer>"))  # all of it if it has no mark
    return float(gold != "" and given == gold)

# ---- Command line ----
class HelpFormatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Shows the docstring as written, and defaults, but not a default of None."""
    def _get_help_string(self, action):
        """Return the text of a flag; argparse's own hook."""
        return action.help if action.default is None else super()._get_help_string(action)

def make_parser(script, doc):
    """Make an argparse parser whose --help is the script's docstring."""
    return argparse.ArgumentParser(
        prog=Path(script).name, usage=argparse.SUPPRESS, description=doc,
        formatter_class=HelpFormatter, allow_abbrev=False)

def in_range(kind, low, high=math.inf):
    """Make the type of a flag: an int or a float from `low` to `high`, else argparse's error."""
    def convert(text):
        value = kind(text)
        if not low <= value <= high:  # so written, nan fails too
            raise argparse.ArgumentTypeError(f"{text}: must be from {low:g} to {high:g}")
        return value
    convert.__name__ = kind.__name__  # for argparse: "invalid int value"
    return convert

positive_int, non_negative_int, two_or_more = in_range(int, 1), in_range(int, 0), in_range(int, 2)
positive_float, non_negative_float = in_range(float, 1e-12, 1e12), in_range(float, 0, 1e12)
zero_to_one = in_range(float, 0, 1)
INSTRUCTION = "Reason step by step, then give the final answer on a last line after ####."
# These are the defaults where --model is the toy. A script adds its own in parse.
TOY_SETTINGS = dict(
    system_prompt="", max_new_tokens=48, micro_batch_tokens=4096, gradient_checkpointing=False,
    steps=20, eval_every=10, save_every=10, eval_problems=2560)

def add_args(parser):
    """Add the flags that every script has."""
    add = parser.add_argument_group("model and problems").add_argument
    add("--model", default=TOY, help="directory or hub name; the default, a toy, has own settings")
    add("--dataset", default=TOY, help=".jsonl, .json, .csv, .parquet, directory or hub name")
    add("--split", default="train", help="split to train on")
    add("--eval_split", default="test", help="split to evaluate on; a fifth if there is one split")
    add("--question_column", default="question", help="with the question, a text or messages")
    add("--answer_column", default="answer", help='with the gold answer; "" if rewards need none')
    add("--system_prompt", default=INSTRUCTION, help="said before each question")
    add("--max_prompt_tokens", type=positive_int, default=512, help="longer prompts are left out")
    add = parser.add_argument_group("sampling").add_argument
    add("--max_new_tokens", type=positive_int, default=1024, help="longest completion")
    add("--temperature", type=positive_float, default=1.0, help="in samples and log-probs alike")
    add("--cuda_graphs", action=BooleanOptionalAction, default=True, help="faster on a GPU")
    add = parser.add_argument_group("optimiser and memory").add_argument
    add("--micro_batch_tokens", type=positive_int,
        help="positions per forward pass: for memory; if not given 4096 on a GPU, 1536 on a CPU")
    add("--warmup_steps", type=non_negative_int, default=20, help="optimiser steps until full --lr")
    add("--max_grad_norm", type=positive_float, default=1.0, help="larger gradients are cut to it")
    add("--gradient_checkpointing", action=BooleanOptionalAction, default=True,
        help="recompute activations: a third more work, far less memory")
    add("--device", choices=["cpu", "cuda"],
        default="cuda" if torch.cuda.is_available() else "cpu", help="cuda is a GPU")
    add("--dtype", choices=["float32", "bfloat16"],
        help="of matrix products; if not given bfloat16 on a GPU that has it, else float32")
    add = parser.add_argument_group("run").add_argument
    add("--steps", type=positive_int, default=200, help="rollouts in the run")
    add("--seed", type=in_range(int, 0, 10 ** 12), default=0, help="of samples and problem order")
    add("--out", help="output directory",
        default=f"runs/{Path(parser.prog).stem}-{time.strftime('%m%d-%H%M%S')}-{os.getpid()}")
    add("--resume", action="store_true", help="continue the run in --out, with its flags")
    add("--eval_every", type=positive_int, default=20, help="steps between evaluations")
    add("--eval_problems", type=positive_int, default=512, help="held-out problems")
    add("--eval_samples", type=positive_int, default=1, help="per problem; 2 or more: pass@k too")
    add("--save_every", type=positive_int, default=20, help="steps between checkpoints")

def parse(parser, argv, **toy_settings):
    """Parse `argv` twice. The first time shows if --model is the toy or a run is resumed. If so,
    TOY_SETTINGS or the flags of that run become the defaults of the second time."""
    args = parser.parse_args(argv)
    if Path(args.model).resolve() == Path(TOY):
        parser.set_defaults(**TOY_SETTINGS, **toy_settings)
    if args.resume:
        with or_fail(f"--resume: --out {args.out} holds no run to continue"):
            saved = json.loads(Path(args.out, "args.json").read_text())
            if saved["script"] != parser.prog:
                fail(f"--resume: the run in {args.out} is one of {saved['script']}")
        parser.set_defaults(**saved)
    args = parser.parse_args(argv)
    args.script = parser.prog
    # An older GPU, such as the T4, does not have bfloat16 and would emulate it slowly.
    has_bfloat16 = args.device == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
    args.dtype = args.dtype or ("bfloat16" if has_bfloat16 else "float32")
    # On a CPU short micro-batches are faster: less padding, and tensors that malloc can reuse. (The
    # toy's rows are so short that 4096 is as fast.)
    args.micro_batch_tokens = args.micro_batch_tokens or (4096 if args.device == "cuda" else 1536)
    return args

# ---- Run ----
def launch(main, args):
    """Run `main` with --out made and locked. Out of memory and Ctrl-C are one line each."""
    if hasattr(sys.stdout, "reconfigure"):
        # A character that cannot be written becomes a ?, and each line is out at once.
        sys.stdout.reconfigure(line_buffering=True, errors="replace")
    if Path(args.model).resolve() == Path(TOY):
        torch.set_num_threads(1)  # floating-point sums then do not depend on the number of cores
    with or_fail(f"--out {args.out}: cannot be written, or another process uses it"):
        os.makedirs(args.out, exist_ok=True)
        lock = FileLock(Path(args.out, ".lock"), timeout=0).acquire()  # `with` releases it
    if os.listdir(args.out) != [".lock"] and not args.resume:
        fail(f"--out {args.out}: is not empty: go on with --resume or give another")
    try:
        with lock:
            main(args)
    except KeyboardInterrupt:
        begun = Path(args.out, "args.json").exists()
        fail(f"interrupted; go on with --out {args.out}{' --resume' if begun else ''}", 130)
    except torch.OutOfMemoryError:
        fail("out of GPU memory: lower --micro_batch_tokens, --prompts or --max_new_tokens")

def saved_steps(args):
    """List the steps saved in --out, in order. Others, as step-40-best, are left alone."""
    names = [path.name.removeprefix("step-") for path in Path(args.out).glob("step-*")]
    return sorted(int(name) for name in names if name.isdecimal())

def save_checkpoint(args, step, tokenizer, policy, parts):
    """Save step-N in --out, then remove the older ones: a kill at any instant leaves a good one.
    `parts`, {name: part}, is all else that changes: optimisers and other models. There are no
    random states to save: each is a function of --seed and the step."""
    final, temporary = Path(args.out, f"step-{step}"), Path(args.out, "temporary")
    shutil.rmtree(temporary, ignore_errors=True)
    states = {name: part.state_dict() for name, part in parts.items()}
    with or_fail(f"--out {args.out}: step {step} cannot be saved (disk full?)"):
        policy.save_pretrained(temporary)  # so that --model can name it
        tokenizer.save_pretrained(temporary)
        shutil.copy(Path(args.out, "metrics.jsonl"), temporary)  # a resumed run goes on from it
        torch.save(states, temporary / "optimizer.pt")  # and the critic or pi_ref
        temporary.rename(final)
    for old in saved_steps(args)[:-1]:
        Path(args.out, f"step-{old}").rename(temporary)  # so that none is half deleted
        shutil.rmtree(temporary)

def load_checkpoint(args, policy, parts):
    """Load the newest checkpoint in --out and return its step; 0 if there is none."""
    steps = saved_steps(args)
    if not steps:
        return 0
    folder = Path(args.out, f"step-{steps[-1]}")
    with or_fail(f"--resume: {folder} cannot be used"):
        saved = type(policy).from_pretrained(folder, dtype=torch.float32)
        # In place, because the optimiser holds these tensors.
        policy.load_state_dict(saved.state_dict())
        states = torch.load(folder / "optimizer.pt", map_location="cpu")  # no copy on the GPU
        for name, part in parts.items():
            part.load_state_dict(states[name])
        shutil.copy(folder / "metrics.jsonl", args.out)
    return steps[-1]

def progress(items, doing, unit):
    """Iterate over `items`. In a terminal, what takes over 2 seconds gets a progress bar, below the
    bar of the run."""
    return tqdm(items, desc=doing, unit=unit, leave=False, disable=None, delay=2)

class Logger:
    """Writes metrics.jsonl and args.json; shows a bar and prints lines."""
    STEP = {"reward": "reward {:.3f}", "completion_length": "length {:.1f}",
            "entropy": "entropy {:.2f}", "kl": "kl {:.4f}", "clip_frac": "clip {:.2%}",
            "explained_variance": "critic {:.2f}", "seconds": "{:.1f}s"}
    HELD_OUT = {"eval_accuracy": "greedy {:.3f}", "eval_sampled_accuracy": "sampled {:.3f}",
                "eval_reward": "reward {:.3f}", "eval_completion_length": "length {:.1f}"}
    HELD_OUT |= {f"eval_pass@{k}": f"pass@{k} {{:.3f}}" for k in (2, 4, 8, 16, 32, 64)}

    def __init__(self, args, start):
        """Begin after step `start`."""
        self.args = args
        self.path = Path(args.out, "metrics.jsonl")
        if start == 0:
            self.path.write_text("")
        temporary = Path(args.out, "args.tmp")
        temporary.write_text(json.dumps(vars(args), indent=1))
        temporary.rename(Path(args.out, "args.json"))  # a kill leaves no half of it
        self.bar = tqdm(total=args.steps, initial=start, unit="step", disable=None)
        self.bar.write(f"resumed after step {start}" if start else "evaluating before step 1")

    def log(self, step, stats, problem=None, rollout=None):
        """Log a step. If it was evaluated, also show a completion of its rollout, for `problem`."""
        if self.args.device == "cuda":
            stats["peak_memory_gb"] = torch.cuda.max_memory_allocated() / 1e9  # so far
        with self.path.open("a") as file:
            file.write(json.dumps({"step": step} | stats) + "\n")
        if "reward" in stats:
            self.bar.write(f"step {step}/{self.args.steps}  {format_stats(stats, self.STEP)}")
        if "eval_reward" in stats:
            self.bar.write(f"held out after {step} steps  {format_stats(stats, self.HELD_OUT)}")
            if rollout:
                answer = extract_answer(problem["answer"]) or problem["answer"]
                text = f"{problem['question']}\n{rollout['texts'][0].strip()}"
                text += f"\n(reward {rollout['rewards'][0]:g}, answer {answer})"
                self.bar.write(textwrap.indent(text, "    | "))
        if stats.get("truncated", 0) > 0.5:
            self.bar.write("warning: over half of the completions are cut off by --max_new_tokens")
        if stats.get("skipped") or stats.get("value_skipped"):
            self.bar.write("warning: a gradient was not finite, its step is skipped: lower --lr")
        self.bar.update(step - self.bar.n)

    def close(self):
        """Print the evaluations, and where everything is."""
        self.bar.close()
        for stats in map(json.loads, self.path.read_text().splitlines()):
            if "eval_reward" in stats:
                print("held out after", stats["step"], "steps ", format_stats(stats, self.HELD_OUT))
        print(f"model and checkpoint  {self.args.out}/step-{saved_steps(self.args)[-1]}")
        print(f"metrics               {self.path}")

def format_stats(stats, formats):
    """Write those statistics that have a format, in the order of the formats."""
    return "  ".join(form.format(stats[name]) for name, form in formats.items() if name in stats)

"""What the three scripts share: everything that is not the algorithm.

We guard what is silent and let what is loud be loud. Silent is what would train something else than
you asked for, pay a wrong answer or lose work, without a word: there we check, and say in a line
what to do. Nearly all else ends in Python's own traceback, which names the line.

Shapes: P prompts per step, G completions per prompt, N = P*G completions, which are the rows of a
rollout; S tokens in the longest prompt, T in the longest completion, L in the longest row (prompt
and completion); M completion tokens in a batch; V ids in the vocabulary; H numbers in a hidden
state. Small letters are for a part: a micro-batch has ids (n, l) and mask (n, t).

A rollout is a dict with one row per completion:
    ids            (N, L)  prompt, then completion, padded on the right
    attention      (N, L)  1 on prompt and completion, 0 on padding
    prompt_length  (N,)    token t of a completion is in column prompt_length + t of ids
    mask           (N, T)  float32; 1 on the tokens of the completion, its stop token included. You
                           may set some to 0: the model reads these, but is not trained on them
    sampled_logp   (N, T)  log pi of each token, as the sampler computed it
    row            (N,)    0 ... N-1, so that micro_batched can put results back in place
    finished       (N,)    True where a stop token ended the completion
    has_gradient   (N,)    False where a script finds that the gradient of a row is exactly 0
    texts          a list of N completions
The scripts add rewards (N,); old_logp, ref_logp, values, returns (N, T); adv (N, 1) or (N, T).
"""
import argparse
import glob
import inspect
import json
import math
import os
import random
import re
import shutil
import sys
import time
from fractions import Fraction
from functools import lru_cache, partial
from pathlib import Path

import datasets
import torch
import transformers
from torch.nn.functional import cross_entropy, pad
from torch.nn.utils.rnn import pad_sequence
from torch.utils.checkpoint import checkpoint
from tqdm import tqdm

# ---- Log-probabilities ----
def token_logprobs(model, batch, args):
    """Compute log pi of the completion tokens, where pi = softmax(logits / --temperature).
    Returns (N, T) float32, which is 0 where the mask is 0."""
    index, hidden, target = completion_states(model, batch, args)
    logp = chunked_logprobs(model, hidden, target, args.temperature)  # (M,)
    return logp.new_zeros(batch["mask"].shape).index_put(index, logp)

def completion_states(model, batch, args):
    """Run the body of the model and find the states that predict the M tokens with mask 1.
    Returns, for each of these tokens: its place in (N, T), as a pair of indices (M,); the hidden
    state one position before it, (M, H); its id, (M,). Nothing else in training shifts by one."""
    i, t = batch["mask"].nonzero(as_tuple=True)  # (M,) both: a place in (N, T)
    column = batch["prompt_length"][i] + t  # (M,) the same place in (N, L)
    # No attention mask: padding is on the right, and causal attention never looks there.
    with torch.autocast(args.device, getattr(torch, args.dtype), enabled=args.dtype != "float32"):
        hidden = model.base_model(input_ids=batch["ids"], use_cache=False).last_hidden_state
    return (i, t), hidden[i, column - 1], batch["ids"][i, column]

CHUNK = 2 ** 26  # logits, tokens x V, that training makes at a time: .27 GB in float32

def chunked_logprobs(model, hidden, target, temperature):
    """Compute log softmax(logits / temperature)[target], (M, H) and (M,) -> (M,).
    This is done for one chunk of tokens after another, and the backward pass computes each chunk
    again. It costs one more matrix product, but the logits (M, V) never exist as a whole."""
    def logprobs(hidden, target):
        logits = head_logits(model, hidden) / temperature
        return -cross_entropy(logits, target, reduction="none")
    size = CHUNK // len(model.get_output_embeddings().weight)
    chunks = zip(hidden.split(size), target.split(size))
    return torch.cat([checkpoint(logprobs, h, y, use_reentrant=False) for h, y in chunks])

def head_logits(model, hidden):
    """Compute a model's logits from hidden states, (M, H) -> (M, V). We do this in float32 (on a
    GPU in TF32, unless --dtype is float32): bfloat16 rounds a logit of 20 by up to .06."""
    head, config = model.get_output_embeddings(), model.config.get_text_config()
    # A few families scale or cap their logits; check_model finds those that we do not know.
    scale = getattr(config, "logit_scale", None) or 1  # Cohere
    scale /= getattr(config, "logits_scaling", None) or 1  # Granite, MiniCPM
    with torch.autocast(hidden.device.type, enabled=False):
        logits = head(scale * hidden.to(head.weight.dtype))
    cap = getattr(config, "final_logit_softcapping", None)  # Gemma
    return cap * (logits / cap).tanh() if cap else logits

# ---- Batching ----
# progress(items, what) iterates over items. In a terminal it shows a bar after 2 seconds.
progress = partial(tqdm, leave=False, disable=None, delay=2)

def minibatches(rollout, count, group_size):
    """Cut a rollout into `count` parts of about equal size, in whole groups. An optimiser step of
    grpo.py or gspo.py then has all completions of a question, whose advantages add up to 0. The
    texts are left out. Nothing is shuffled: every epoch and micro_batched make the same cuts."""
    rows = torch.arange(len(rollout["ids"]), device=rollout["ids"].device)
    for part in progress(rows.view(-1, group_size).tensor_split(count), "minibatches"):
        part = part.flatten()
        yield {name: value[part] for name, value in rollout.items() if torch.is_tensor(value)}

def micro_batches(batch, tokens):
    """Cut a batch into micro-batches of at most `tokens` positions, padding counted. A longer row
    gets its own. Rows without a gradient are left out. The others are sorted by length, so that
    there is little padding. Each micro-batch is trimmed to its longest row and completion."""
    batch = {name: value[batch["has_gradient"]] for name, value in batch.items()}
    lengths = batch["attention"].sum(1)
    order = lengths.argsort(descending=True)
    while len(order) > 0:
        l = int(lengths[order[0]])  # of the longest row left: it says how many fit
        rows, order = order.tensor_split([max(1, tokens // l)])
        part = {name: value[rows] for name, value in batch.items()}
        t = int((lengths[rows] - part["prompt_length"]).max())
        # (n, L) becomes (n, l) and (n, T) becomes (n, t); other widths, such as 1, stay. T < L.
        width = {batch["ids"].shape[1]: l, batch["mask"].shape[1]: t}
        yield {name: value[:, :width.get(value.shape[1])] if value.dim() == 2 else value
               for name, value in part.items()}

def micro_batched(function, model, rollout, args):
    """Compute `function`, such as token_logprobs, of a whole rollout: (N, T). Rows without a
    gradient are not computed, and are NaN. The micro-batches are those of update: in other ones a
    bfloat16 log-prob would be rounded differently, and the first ratio would not be 1."""
    result = torch.zeros_like(rollout["mask"])
    result[~rollout["has_gradient"]] = math.nan
    for minibatch in minibatches(rollout, args.minibatches, args.group_size):
        for b in micro_batches(minibatch, args.micro_batch_tokens):
            result[b["row"], :b["mask"].shape[1]] = function(model, b, args)
    return result

def padded(rows, device, side="right"):
    """Lay out lists of ids as a tensor, (rows, longest). Returns it and a mask of what is real."""
    rows = [torch.tensor(row, device=device) for row in rows]
    real = [torch.ones_like(row) for row in rows]
    return [pad_sequence(x, batch_first=True, padding_side=side) for x in (rows, real)]

# ---- Optimiser ----
class Optimizer(torch.optim.AdamW):
    """AdamW with warm-up and norm clipping. The weights are float32, because bfloat16 keeps 8 bits:
    a weight of .02 that moves by --lr 1e-6 would be rounded to where it was."""
    def __init__(self, model, lr, args, eps=1e-8):
        # PyTorch's default for the second beta, .999, would average over 1000 steps.
        super().__init__(model.parameters(), lr, (0.9, 0.95), eps, weight_decay=0.0, fused=True)
        self.full_lr, self.args = lr, args
        self.param_groups[0]["steps"] = 0  # state_dict saves what is in a group

    def clip_and_step(self, prefix=""):
        """Clip the gradient, take one step and clear the gradient. There is no step if the gradient
        is not finite, or if it is 0, because then Adam's momentum alone would move the weights.
        Returns statistics for `means`, whose names begin with `prefix`."""
        group = self.param_groups[0]
        norm = torch.nn.utils.clip_grad_norm_(group["params"], self.args.max_grad_norm).item()
        stats = {"skipped": (not math.isfinite(norm), 1), "zero_gradient": (norm == 0, 1)}
        if math.isfinite(norm) and norm > 0:
            stats["grad_norm"] = (norm, 1)
            group["steps"] += 1
            group["lr"] = self.full_lr * min(1, group["steps"] / max(1, self.args.warmup_steps))
            self.step()
        self.zero_grad()
        return {prefix + name: value for name, value in stats.items()}

# ---- Sampling ----
@torch.no_grad()
def generate(model, tokenizer, prompts, group_size, temperature, args):
    """Sample group_size completions of each of P prompts (lists of ids); returns a rollout. Tokens
    come from softmax(logits / temperature); at temperature 0 we take the likeliest. transformers'
    generate would add the model's own top_k, read a prompt group_size times, and keep finished rows
    to the end."""
    model.eval()  # in training mode gradient checkpointing drops the cache
    stop = torch.tensor(stop_ids(model, tokenizer), device=model.device)
    # One context for all tokens: autocast then makes its bfloat16 copy of each weight once.
    with torch.autocast(args.device, getattr(torch, args.dtype), enabled=args.dtype != "float32"):
        tokens, logp = sample(model, prompts, group_size, temperature, stop, args.max_new_tokens)
    model.train()
    is_stop = torch.isin(tokens, stop)  # (N, max_new_tokens)
    mask = is_stop.cumsum(1) - is_stop.long() == 0  # no stop token before this one
    lengths, finished = mask.sum(1), is_stop.any(1)  # (N,) both
    completions = [row[:length] for row, length in zip(tokens.tolist(), lengths.tolist())]
    prompts = [prompt for prompt in prompts for _ in range(group_size)]
    ids, attention = padded([p + c for p, c in zip(prompts, completions)], model.device)  # (N, L)
    # The text is without the stop token. Other special tokens stay: they may mark the answer.
    texts = [row[:-1] if ended else row for row, ended in zip(completions, finished.tolist())]
    mask = mask[:, :lengths.max()].float()  # (N, T)
    return {
        "ids": ids,
        "attention": attention,
        "prompt_length": attention.sum(1) - lengths,
        "mask": mask,
        "sampled_logp": logp[:, :lengths.max()] * mask,
        "row": torch.arange(len(ids), device=model.device),
        "finished": finished,
        "has_gradient": torch.ones_like(finished),
        "texts": tokenizer.batch_decode(texts)}

def stop_ids(model, tokenizer):
    """Return the ids that end a completion: the end-of-sequence tokens of model and tokenizer, and
    the token with which the chat template ends a turn (Qwen2.5's base models have another eos)."""
    eos = model.generation_config.eos_token_id
    stops = {tokenizer.eos_token_id, *(eos if isinstance(eos, list) else [eos])} - {None}
    if tokenizer.chat_template:
        chat = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "ANSWER"}]
        after = tokenizer.apply_chat_template(chat, tokenize=False).rpartition("ANSWER")[2]
        first = tokenizer(after, add_special_tokens=False)["input_ids"][:1]
        stops |= set(first) & set(tokenizer.all_special_ids)
    return sorted(stops)

def sample(model, prompts, group_size, temperature, stop, T):
    """Write up to T = max_new_tokens tokens per row. Returns the tokens and their log pi, (N, T).
    Prompts are padded on the left, so that the next token of every row goes into the same column.
    A prompt is read once, and its cache is copied for its group. Dropping rows copies the cache,
    so a row with its stop token goes on until more than half of the rows have theirs."""
    device = model.device
    ids, attention = padded(prompts, device, "left")  # (P, S) both
    # On a GPU model.reader may be RecordedReader, which does the same faster: see CUDA graphs.
    reader = getattr(model, "reader", Reader)(model, attention.shape[1] + T)
    positions = (attention.cumsum(1) - 1).clamp(min=0)  # (P, S)
    hidden = reader.read(ids, attention, positions)  # (P, H)
    rows = torch.arange(len(prompts), device=device).repeat_interleave(group_size)  # (N,)
    reader.cache.reorder_cache(rows)  # from P rows to N
    hidden, attention, position = hidden[rows], attention[rows], attention.sum(1)[rows]
    active = torch.arange(len(rows), device=device)  # (n,) the rows that are not dropped
    running = torch.ones_like(active, dtype=torch.bool)  # (n,) True before the stop token
    tokens = torch.zeros(len(rows), T, dtype=torch.long, device=device)
    sampled_logp = torch.zeros(len(rows), T, device=device)
    for t in progress(range(T), "sampling"):
        if t > 0:
            attention = pad(attention, (0, 1), value=1)
            # `token` was drawn in the step before.
            hidden = reader.read(token[:, None], attention, position[:, None])  # (n, H)
            position = position + 1
        token, logp = draw(head_logits(model, hidden), temperature)  # (n,) both
        tokens[active, t], sampled_logp[active, t] = token, logp
        running = running & ~torch.isin(token, stop)
        # Not at every token, because counting the rows waits for the GPU.
        if t % 4 == 0 and running.sum() < len(running) / 2:
            left = running.nonzero().squeeze(1)
            if len(left) == 0:
                break
            reader.cache.reorder_cache(left)
            active, running, token = active[left], running[left], token[left]
            attention, position = attention[left], position[left]
    return tokens, sampled_logp

class Reader:
    """A model and its key-value cache. `columns`, its final length, is for RecordedReader."""
    def __init__(self, model, columns):
        self.model, self.cache = model, GrowingCache(config=model.config)

    def read(self, ids, attention, positions):
        """Read ids (n, s) into the cache, transformers' former past_key_values; returns the states
        after the last of them, (n, H)."""
        return self.model.base_model(
            input_ids=ids, attention_mask=attention, position_ids=positions,
            cache=self.cache, use_cache=True).last_hidden_state[:, -1]

class GrowingCache(transformers.DynamicCache):
    """A cache that grows with each token. It holds keys in the dtype of the values: under autocast
    a rotated key is float32 and a value bfloat16, so the keys would take twice the memory."""
    def update(self, keys, values, *args, **kwargs):
        """Add new keys and values; transformers' attention layers call this."""
        # Not super(): FixedCache, a StaticCache, uses this method, too.
        return transformers.Cache.update(self, keys.to(values.dtype), values, *args, **kwargs)

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
        # last one. As u > 0, this never takes an id with pi = 0.
        u = 1 - torch.rand(len(logits), 1, device=logits.device)
        token = torch.searchsorted(cumulative, u * cumulative[:, -1:]).squeeze(1)
    return token, logp.gather(1, token[:, None]).squeeze(1)

# ---- Statistics ----
def means(logged):
    """Reduce what the micro-batches and steps of an update logged to one number per name.
    Each entry of `logged` is a dict. A value is a pair (sum, count), of which the mean over all
    entries is taken; a name that ends in _max has a number, of which the maximum is taken."""
    result = {}
    for name in dict.fromkeys(name for stats in logged for name in stats):  # each once
        values = [stats[name] for stats in logged if name in stats]
        if name.endswith("_max"):
            result[name] = float(max(values))
        else:
            sums, counts = zip(*values)
            result[name] = float(sum(sums) / sum(counts))
    return result

def rollout_stats(rollout, group_size):
    """Compute what is logged of a rollout, a dict of numbers.
    Sampler and training pass compute the same log pi in different ways. sampling_logp_difference is
    the root mean square of the difference over tokens. sampling_sequence_difference is the same for
    the mean of each completion, as GSPO's log s is a mean. Both should be no more than rounding."""
    mask, groups = rollout["mask"], rollout["rewards"].view(-1, group_size)
    computed = rollout["has_gradient"]  # (N,) the other rows have no old_logp
    compared = (mask > 0) & computed[:, None]  # (N, T)
    difference = (rollout["old_logp"] - rollout["sampled_logp"]) * mask  # (N, T)
    mean_difference = difference.sum(1) / mask.sum(1).clamp(min=1)  # (N,)
    stats = {
        "reward": groups.mean(),
        "completion_length": mask.sum(1).mean(),
        "truncated": 1 - rollout["finished"].float().mean(),
        "entropy": -(rollout["sampled_logp"] * mask).sum() / mask.sum(),  # estimated
        "sampling_logp_difference": difference[compared].square().mean().sqrt(),
        "sampling_sequence_difference": mean_difference[computed].square().mean().sqrt()}
    if group_size > 1:
        stats["zero_variance_groups"] = (groups == groups[:, :1]).all(1).float().mean()
    if "ref_logp" in rollout:  # k3, whatever --kl is
        log_x = (rollout["ref_logp"] - rollout["old_logp"]) * mask  # (N, T)
        stats["kl"] = (log_x.exp() - log_x - 1).nansum() / compared.sum()
    return {name: value.item() for name, value in stats.items() if not value.isnan()}

# ---- Evaluation ----
def evaluate(policy, tokenizer, problems, reward, args, step):
    """Compute accuracy on held-out problems, greedy and sampled; the samples' reward and length.
    Accuracy is the share of right answers, whatever the reward function pays for; without gold
    answers there is none. The samples are written to completions/held-out-STEP.jsonl."""
    def mean(records, name):
        return torch.tensor([float(record[name]) for record in records]).mean().item()
    torch.manual_seed(args.seed)  # the same seed at every evaluation
    sampled = attempts(policy, tokenizer, problems, reward, args.temperature, args)
    write_records(args, f"held-out-{step}", sampled)
    stats = {"eval_reward": mean(sampled, "reward"),
             "eval_completion_length": mean(sampled, "tokens")}
    if args.answer_column:
        greedy = attempts(policy, tokenizer, problems, answer_reward, 0.0, args)
        stats["eval_accuracy"] = mean(greedy, "right")
        stats["eval_sampled_accuracy"] = mean(sampled, "right")
    return stats

def attempts(policy, tokenizer, problems, reward, temperature, args):
    """Sample a completion of each problem, and return the records of all."""
    records, size = [], args.prompts * args.group_size  # as many rows as a rollout has
    problems = sorted(problems, key=lambda problem: len(problem["prompt"]))  # little padding
    for start in progress(range(0, len(problems), size), "evaluating"):
        part = problems[start:start + size]
        rollout = generate(policy, tokenizer, [p["prompt"] for p in part], 1, temperature, args)
        rollout["rewards"] = rewards_of(reward, part, rollout)
        records += records_of(part, rollout)
    return records

def records_of(problems, rollout):
    """List the completions of a rollout, as dicts with what one wants to know of each."""
    texts, mask = rollout["texts"], rollout["mask"]
    problems = [p for p in problems for _ in range(len(texts) // len(problems))]
    columns = {
        "question": [p["question"] for p in problems],
        "answer": [extract_answer(p["answer"]) or p["answer"] for p in problems],
        "completion": texts,
        "right": [math_reward(text, p["answer"]) == 1 if p["answer"] else None
                  for text, p in zip(texts, problems)],
        "reward": rollout["rewards"].tolist(),
        "tokens": mask.sum(1).int().tolist(),
        "cut_off": (~rollout["finished"]).tolist()}
    if "adv" in rollout:  # the mean over the tokens
        columns["advantage"] = ((rollout["adv"] * mask).sum(1) / mask.sum(1).clamp(min=1)).tolist()
    return [dict(zip(columns, row)) for row in zip(*columns.values())]

# ---- Models ----
def load_policy(args, adapt=lambda policy, args: None):
    """Load --model and its tokenizer. Refuse a model that would be trained wrongly.
    A fork may give `adapt`, which changes the model before it takes memory on the GPU."""
    transformers.logging.disable_progress_bar()
    config = transformers.AutoConfig.from_pretrained(args.model)
    text = config.get_text_config()  # of the text part, if the model also reads images
    for name, value in vars(text).items():
        if isinstance(value, float) and ("drop" in name or "jitter" in name):
            setattr(text, name, 0.0)  # random activations would move the ratio from 1
    room = getattr(text, "max_position_embeddings", None) or math.inf
    if args.max_prompt_tokens + args.max_new_tokens > room:
        sys.exit(f"--max_prompt_tokens and --max_new_tokens: --model has {room} positions in all")
    policy, found = transformers.AutoModelForCausalLM.from_pretrained(
        args.model, config=config, dtype=torch.float32, output_loading_info=True)
    if found["missing_keys"]:  # transformers would give them random values
        sys.exit(f"--model {args.model}: lacks the weights {', '.join(found['missing_keys'])}")
    tokenizer = transformers.AutoTokenizer.from_pretrained(args.model)
    adapt(policy, args)
    policy.to(args.device).train()  # gradient checkpointing works in training mode only
    if args.gradient_checkpointing:
        policy.activation_checkpointing_enable()  # gradient_checkpointing_enable's new name
    torch.backends.cuda.enable_cudnn_sdp(False)  # it makes a slow plan for every new shape
    check_model(policy, tokenizer, args)
    if args.device == "cuda":
        use_graphs(policy, tokenizer, args)
    if args.dtype != "float32":
        # The float32 head now multiplies in TF32, of 11 bits (bfloat16: 8); not in check_model.
        torch.backends.cuda.matmul.fp32_precision = "tf32"
    return policy, tokenizer

@torch.no_grad()
def check_model(model, tokenizer, args):
    """Stop if the log-probs of the sampler or of the training pass are not those of the model's own
    forward pass: head_logits may not scale or cap the logits as the model does, training may be
    random, a cache may not fit. In float32, only rounding may differ. One random prompt is as long
    as a run allows; the sampler has to pad the other."""
    T = 4  # the prompt gives token 1; a CUDA graph is recorded for 2, replayed for 3 and 4
    longest = max(3, args.max_prompt_tokens + args.max_new_tokens - T)
    args = argparse.Namespace(**vars(args) | dict(dtype="float32", max_new_tokens=T, temperature=1))
    rng, vocabulary = random.Random(0), range(model.get_input_embeddings().num_embeddings)
    prompts = [rng.choices(vocabulary, k=length) for length in (longest, 3)]
    rollout = generate(model, tokenizer, prompts, 1, 1.0, args)
    found = {"sampler": rollout["sampled_logp"],
             "training pass": token_logprobs(model, rollout, args)}  # (2, t) both, t <= T
    model.eval()
    for i, prompt in enumerate(prompts):
        ids = rollout["ids"][i, :rollout["attention"][i].sum()]  # (L,)
        logits = model(ids[None], use_cache=False).logits[0, len(prompt) - 1:-1]  # (t, V)
        own = -cross_entropy(logits.float(), ids[len(prompt):], reduction="none")  # (t,)
        for name, logp in found.items():
            error = (logp[i, :len(own)] - own).abs().max()
            if not error < 1e-3:  # so written, nan fails too
                sys.exit(f"--model {args.model}: {type(model).__name__} is not supported: "
                         f"the log-probs of the {name} are off by {error:.2g}")
    model.train()

# ---- Problems ----
def load_problems(args, tokenizer):
    """Load the training and the held-out problems, which are the same ones with every --seed."""
    splits = read_dataset(args.dataset)
    train = splits[args.split]
    if len(splits) > 1 and args.split != args.eval_split:
        held_out = splits[args.eval_split]
    else:  # hold out a fifth. The question seeds the draw, so that equal ones stay together
        draws = [random.Random(str(row.get(args.question_column))).random() for row in train]
        held_out = train.select([i for i, x in enumerate(draws) if x < 0.2])
        train = train.select([i for i, x in enumerate(draws) if x >= 0.2])
    order = random.Random(0).sample(range(len(held_out)), len(held_out))
    held_out = held_out.select(order[:args.eval_problems])
    train = prepare(train, tokenizer, args, "training")
    return train, prepare(held_out, tokenizer, args, "held-out")

def read_dataset(source):
    """Read a file, a directory or a data set of the hub: {split: datasets.Dataset}."""
    if source.endswith((".jsonl", ".json", ".csv", ".parquet")):
        kind = source.rpartition(".")[2].replace("jsonl", "json")
        # datasets would read [, * and ? as a pattern, which other files may match.
        return datasets.load_dataset(kind, data_files=glob.escape(os.path.abspath(source)))
    configs = datasets.get_dataset_config_names(source)
    return datasets.load_dataset(source, "main" if "main" in configs else None)  # gsm8k

def prepare(split, tokenizer, args, use):
    """Turn the rows of a split into problems: dicts with "question" and "answer" as texts, "prompt"
    as ids, and all other columns. A question is a text, or a chat that ends with the user's
    message. Rows that cannot be used are counted and left out."""
    columns = {args.question_column, args.answer_column} - {""}  # "": there are no gold answers
    if not columns <= set(split.column_names):
        sys.exit(f"--question_column, --answer_column: there are {', '.join(split.column_names)}")
    if len(split) > 400_000:  # as Python objects, more would take over 4 GB of memory
        print("warning: using 400000 of the rows, drawn at random")
        split = split.select(random.Random(0).sample(range(len(split)), 400_000))
    problems = []
    for row in progress(split.to_list(), "reading problems"):
        chat, answer = row[args.question_column], text_of(row.get(args.answer_column))
        if not isinstance(chat, list):
            chat = [{"role": "user", "content": text_of(chat)}]
        question = text_of(chat[-1]["content"])
        if chat[-1]["role"] != "user":
            sys.exit(f"--dataset {args.dataset}: this chat may end with the answer: {chat}")
        if args.system_prompt and chat[0]["role"] != "system":
            chat = [{"role": "system", "content": args.system_prompt}, *chat]
        prompt = prompt_of(chat, tokenizer)
        # An answer that the grader cannot read, such as an empty one, does not even equal itself.
        readable = not args.answer_column or math_reward(f"<answer>{answer}</answer>", answer)
        if question and readable and len(prompt) <= args.max_prompt_tokens:
            problems.append(row | {"question": question, "answer": answer, "prompt": prompt})
    print(f"{len(problems)} {use} problems; {len(split) - len(problems)} rows are left out: "
          "without question or readable answer, or over --max_prompt_tokens")
    ids = [token for problem in problems[:1000] for token in problem["prompt"]]
    if ids.count(tokenizer.unk_token_id) >= len(ids) / 2:  # also without problems: 0 >= 0
        sys.exit(f"--dataset {args.dataset}: no {use} problems that --model's tokenizer knows")
    return problems

def prompt_of(chat, tokenizer):
    """Turn a chat into ids: by the chat template, or else its texts, each with a newline. We drop
    the end-of-sequence token that some tokenizers put behind every text."""
    if tokenizer.chat_template:
        return tokenizer.apply_chat_template(chat, add_generation_prompt=True)["input_ids"]
    ids = tokenizer("".join(text_of(m["content"]) + "\n" for m in chat))["input_ids"]
    return ids[:-1] if ids[-1] == tokenizer.eos_token_id else ids

def text_of(value):
    """Return a question or an answer as a text, "" if there is none (nan is an empty cell of a
    table); a float as a fraction, as no completion writes 1e+16 or 0.30000000000000004."""
    if not isinstance(value, (str, int, float, type(None))):  # no completion would match it
        sys.exit(f"--question_column, --answer_column: {value} is neither a text nor a number")
    if isinstance(value, float) and math.isfinite(value):
        value = Fraction(f"{value:.15g}")
    return "" if value is None or value != value else str(value)

def batch_of(problems, step, args):
    """Return the P problems of a step.
    All problems are shuffled, used up, shuffled anew, and so on. --seed and the step alone say
    which come now, so that there is no state to save."""
    n, used = len(problems), (step - 1) * args.prompts
    epochs = range(used // n, (used + args.prompts - 1) // n + 1)  # that this step draws from
    shuffled = [p for e in epochs for p in random.Random(f"{args.seed} {e}").sample(problems, n)]
    return shuffled[used % n:][:args.prompts]

# ---- Rewards ----
def answer_reward(problems, completions):
    """Return 1.0 for a completion with the problem's answer, else 0.0."""
    if any(problem["answer"] == "" for problem in problems):
        sys.exit('--answer_column "": answer_reward needs the gold answers')
    return [math_reward(text, problem["answer"]) for problem, text in zip(problems, completions)]

def rewards_of(reward, problems, rollout):
    """Call the reward function on a rollout: (N,) float32. The function gets the problem and the
    text of each row and, if it has a parameter named rollout, the rollout. A problem's G texts (in
    an evaluation one) are rows one after another. It must return a finite number for each row."""
    texts = rollout["texts"]
    problems = [p for p in problems for _ in range(len(texts) // len(problems))]
    more = {"rollout": rollout} if "rollout" in inspect.signature(reward).parameters else {}
    paid = list(reward(problems, texts, **more))
    for i, (problem, text, r) in enumerate(zip(problems, texts, paid, strict=True)):
        if r is None or not math.isfinite(r):
            sys.exit(f"the reward function paid {r} for row {i}: {problem['question']!r}, {text!r}")
    return torch.tensor([float(r) for r in paid], device=rollout["ids"].device)

# ---- Grading ----
# Both answers are rewritten to one spelling and compared as text: numbers as exact fractions, the
# items of a list and the terms of a sum sorted. Units are dropped: if the gold answer is 10 % or
# 5m, 10 or 5 is right. Nothing is converted: if it is 0.1, 10 % is wrong. An answer with a bracket,
# a bar or a relation (a tuple, a matrix, an inequality) is respelled, but not sorted, and its
# numbers stay: (0.5, 1) is not (1/2, 1). A date, 2020-01-02, and an answer with ^- or /- are not
# sorted, either. There is no algebra: 2+3 is not 5.
LONGEST = 600  # characters; longer answers are not read
UNITS = ("degree|dollar|cent|percent|unit|[ck]?m|meter|foot|feet|ft|inch(es)?|mile|yard|k?g|pound|"
         "second|minute|hour|day|week|month|year")
# Applied in this order: (pattern, replacement),  # text before -> text after.
SPELLINGS = [
    (r"\\\\|;|\{,\}", ","),  # 1{,}234 -> 1,234
    (r"\\(left|right|displaystyle)\b|\\[,:! ]|[$%°~]", ""),  # \left(5,\,6\right) -> (5,6)
    (r"\\cdot|\\times|·|×", "*"),  # 2\cdot\pi -> 2*\pi
    (r"\\leq?(slant)?(?![a-z])|≤", "<="),  # x \leq 5 -> x <= 5
    (r"\\geq?(slant)?(?![a-z])|≥", ">="),  # x \geq 5 -> x >= 5
    (r"\b(and|or)\b(?=[^<>]*$)", ","),  # 4 and 5 -> 4 , 5; but not x<1 and x>4
    (r"\\[dtc]frac", r"\\frac"),  # \dfrac -> \frac
    (r"\\", ""),  # \sqrt{3} -> sqrt{3}
    ("[−–]", "-"),  # −5 -> -5
    ("π", "pi"),  # 5π -> 5pi
    (r"\^{?circ}?", ""),  # 5^{circ} -> 5
    (r"(text\w*|mbox|math\w*) ?{([^{}]*)}", r" \2 "),  # text{even} -> even
    (r"sqrt\((\w+)\)", r"sqrt{\1}"),  # sqrt(3) -> sqrt{3}
    (r"{(\w)}", r"\1"),  # sqrt{3} -> sqrt3
    # "of" keeps a frac after sqrt, log_2 or ^ apart: sqrt(3/4) is not sqrt(3)/4.
    (r"([a-z]{2}|[_^]\w|\^) ?frac", r"\1 of frac"),  # sqrtfrac34 -> sqrt of frac34
    (r"frac ?(\w)", r"frac{\1}"),  # frac38 -> frac{3}8
    (r"(frac ?{[^{}]*}) ?(\d)", r"\1{\2}"),  # frac{3}8 -> frac{3}{8}
    (r"frac ?{(-?[^-+{}]*)} ?{(\d+)}", r" \1/\2 "),  # 1frac{3}{8} -> 1 3/8
    (r"\* ?([a-z])", r"\1"),  # 2*pi -> 2pi
    (r" ?\.$", ""),  # 5. -> 5
    (rf"(\d|pi|\}}) *(square )?({UNITS})s?( ?\^[23])?$", r"\1"),  # 5 cm^2 -> 5
    (r"^[a-zA-Z](\(\w\))?( ?=| in\b)", ""),  # f(x) = 5 -> 5
    (r"^{([^{}]*)}$", r"\1"),  # {1, 2} -> 1, 2
    (r"^\(([^(),]*)\)$", r"\1"),  # (5) -> 5
]
NUMBER = r"-?((\d+ )?\d+/[1-9]\d*|\d*\.?\d+)"  # 1 3/8, 3/8, 0.5, .5, 5

def extract_answer(text):
    r"""Find the marked answer in a completion; None if there is no mark, or it is not closed, empty
    or too long. We look inside the last <answer>...</answer>, or in the whole text if there is no
    <answer>. There we take what is in the last \boxed{...} or the first line of text after the last
    ####, whichever is later; inside an <answer> without either we take all of it."""
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
    text = text.strip("* \n")  # models like to write #### **42**
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
    if re.search(r"[\[\](){}<>=|]|[\^/]-|\d{4}-\d\d-\d\d", text):
        return text
    sums = [item.replace("-", "+-").split("+") for item in text.split(",")]
    items = ["+".join(sorted(exact(term) for term in terms if term)) for terms in sums]
    return ",".join(sorted(item for item in items if item))  # 2x-0.50 -> -1/2+2x

def exact(term):
    """Write a number as an exact fraction: '-1 3/8' -> '-11/8'. Other terms stay."""
    if not re.fullmatch(NUMBER, term, re.ASCII):  # \d is 0 to 9 only
        return term
    value = sum(Fraction(part) for part in term.removeprefix("-").split())
    return str(-value if term.startswith("-") else value)

def math_reward(completion, answer):
    """Return 1.0 if the marked answer equals `answer`, else 0.0. `answer` may have a mark, too."""
    given = canonical(extract_answer(completion))
    gold = canonical(extract_answer(f"<answer>{answer}</answer>"))  # all of it if it has no mark
    return float(gold != "" and given == gold)

# ---- Command line ----
INSTRUCTION = "Reason step by step, then give the final answer on a last line after ####."
TOY = str(Path(__file__).resolve().parent / "tests/toy")
# The defaults of a run without --model, which trains the toy; a script gives parse some more.
TOY_SETTINGS = dict(
    model=TOY, dataset=TOY, system_prompt="", max_prompt_tokens=64, max_new_tokens=48,
    micro_batch_tokens=4096, gradient_checkpointing=False, steps=20, eval_every=10, save_every=10,
    eval_problems=2560)

class HelpFormatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Shows the docstring as it is written, and the defaults."""

def make_parser(script, doc):
    """Make an argparse parser with the flags that every script has, whose --help is the script's
    docstring. Returns it, and add_argument of a group for the script's own flags."""
    parser = argparse.ArgumentParser(
        prog=Path(script).name, usage=argparse.SUPPRESS, description=doc,
        formatter_class=HelpFormatter, allow_abbrev=False)
    parser.set_defaults(script=parser.prog)
    own = parser.add_argument_group("objective and its optimisation").add_argument
    add = parser.add_argument_group("model, problems and run").add_argument
    cuda = torch.cuda.is_available()
    add("--model", help="directory or hub name; without it the toy is trained, by own settings")
    add("--dataset", help=".jsonl, .json, .csv, .parquet, directory or hub name")
    add("--split", default="train", help="split to train on")
    add("--eval_split", default="test", help="split to evaluate on; of a lone split, a fifth")
    add("--question_column", default="question", help="with the question, a text or messages")
    add("--answer_column", default="answer", help='with the gold answer; "" if rewards need none')
    add("--system_prompt", default=INSTRUCTION, help="put first in a chat that has none")
    add("--max_prompt_tokens", type=int, default=512, help="longer prompts are left out")
    add("--max_new_tokens", type=int, default=1024, help="longest completion")
    add("--temperature", type=float, default=1.0, help="in samples and log-probs alike")
    add("--micro_batch_tokens", type=int, default=8192 if cuda else 1536, help="in a training pass")
    add("--warmup_steps", type=int, default=20, help="optimiser steps until full --lr")
    add("--max_grad_norm", type=float, default=1.0, help="larger gradients are cut to it")
    add("--gradient_checkpointing", action=argparse.BooleanOptionalAction, default=True,
        help="compute activations again: a third more work, far less memory")
    add("--device", choices=["cpu", "cuda"], default="cuda" if cuda else "cpu", help="cuda: a GPU")
    add("--dtype", choices=["float32", "bfloat16"], help="if not given, bfloat16 if a GPU has it")
    add("--steps", type=int, default=200, help="rollouts in the run")
    add("--seed", type=int, default=0, help="of samples and problem order")
    add("--out", help="output directory",
        default=f"runs/{Path(parser.prog).stem}-{time.strftime('%m%d-%H%M%S')}-{os.getpid()}")
    add("--resume", action="store_true", help="continue the run in --out, with its flags")
    add("--eval_every", type=int, default=20, help="steps between evaluations")
    add("--eval_problems", type=int, default=512, help="held-out problems")
    add("--save_every", type=int, default=20, help="steps between checkpoints")
    return parser, own

def parse(parser, argv, **toy_settings):
    """Parse `argv` twice. The first time shows whether a run is resumed, or the toy is trained. If
    so, the flags of that run, or TOY_SETTINGS, become the defaults of the second time."""
    args = parser.parse_args(argv)
    if args.resume:
        parser.set_defaults(**json.loads(Path(args.out, "args.json").read_text()))
    elif args.model is None:
        parser.set_defaults(**TOY_SETTINGS, **toy_settings)
    args = parser.parse_args(argv)
    if args.script != parser.prog:
        parser.error(f"--resume: the run in --out is one of {args.script}")
    if not (args.temperature > 0 and args.max_grad_norm > 0):  # so written, nan fails too
        parser.error("--temperature and --max_grad_norm must be above 0")
    if args.minibatches > args.prompts:
        parser.error("--minibatches: at most as many as --prompts")
    if args.model == TOY:
        torch.set_num_threads(1)  # floating-point sums then do not depend on the number of cores
    # An older GPU, such as the T4, does not have bfloat16 and would emulate it slowly.
    has_bfloat16 = args.device == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
    args.dtype = args.dtype or ("bfloat16" if has_bfloat16 else "float32")
    return args

# ---- Run ----
def launch(main, args):
    """Run `main` with --out. What is nobody's bug ends in a line, not in a traceback: a model, data
    or a file that is not found, a --out that exists, too little GPU memory, Ctrl-C."""
    # Lines are out at once, and a character that cannot be written is a question mark.
    sys.stdout.reconfigure(line_buffering=True, errors="replace")
    if os.path.exists(args.out) and not args.resume:
        sys.exit(f"--out {args.out} exists: go on with --resume, or give another")
    try:
        os.makedirs(args.out, exist_ok=args.resume)
        temporary = Path(args.out, "temporary.json")
        temporary.write_text(json.dumps(vars(args), indent=1))
        temporary.rename(Path(args.out, "args.json"))  # a kill leaves no half of it
        print(*(f"{name}={value}" for name, value in vars(args).items()))
        main(args)
    except OSError as error:
        sys.exit(f"error: {error}")
    except torch.OutOfMemoryError:
        sys.exit("out of GPU memory: lower --micro_batch_tokens, --prompts or --max_new_tokens")
    except KeyboardInterrupt:
        sys.exit(f"interrupted; to go on: python {args.script} --out {args.out} --resume")

def save_checkpoint(args, step, tokenizer, policy, parts):
    """Save step-N in --out. `parts`, {name: part}, is all else that changes: optimisers and other
    models. There are no random states to save: each is a function of --seed and the step. We write
    beside and then rename, so that a kill at any instant leaves a good checkpoint. Every model
    stays, because one learns later which was the best; `parts` stay in the newest only."""
    temporary, final = Path(args.out, "temporary"), Path(args.out, f"step-{step}")
    shutil.rmtree(temporary, ignore_errors=True)  # of a run that was killed
    policy.save_pretrained(temporary)
    tokenizer.save_pretrained(temporary)
    shutil.copy(Path(args.out, "metrics.jsonl"), temporary)
    torch.save({name: p.state_dict() for name, p in parts.items()}, temporary / "optimizer.pt")
    temporary.rename(final)
    print(f"saved {final}")
    for old in set(Path(args.out).glob("step-*/optimizer.pt")) - {final / "optimizer.pt"}:
        old.unlink()

def load_checkpoint(args, policy, parts):
    """Go back to the newest checkpoint in --out and return its step. If there is none, empty
    metrics.jsonl and return 0."""
    saved = Path(args.out).glob("step-*")
    start = max((int(path.name.removeprefix("step-")) for path in saved), default=0)
    if start == 0:
        Path(args.out, "metrics.jsonl").write_text("")
        return 0
    folder = Path(args.out, f"step-{start}")
    model = type(policy).from_pretrained(folder, dtype=torch.float32)
    policy.load_state_dict(model.state_dict())  # in place, as the optimiser holds these tensors
    states = torch.load(folder / "optimizer.pt", map_location="cpu")  # not twice on the GPU
    for name, part in parts.items():
        part.load_state_dict(states[name])
    shutil.copy(folder / "metrics.jsonl", args.out)
    print(f"resumed after step {start}")
    return start

SHOWN = "reward completion_length entropy kl clip_frac explained_variance seconds".split()

def log(args, step, stats, problems=None, rollout=None):
    """Write the statistics of a step to metrics.jsonl and its completions to completions/. Print
    what is in SHOWN. After an evaluation, print its results and the step's first completion."""
    if args.device == "cuda":
        stats["peak_memory_gb"] = torch.cuda.max_memory_allocated() / 1e9  # so far
    with Path(args.out, "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": step} | stats) + "\n")
    evaluated = [f"  {name[5:]} {stats[name]:.3g}" for name in stats if name.startswith("eval_")]
    if rollout:
        records = records_of(problems, rollout)
        write_records(args, f"step-{step}", records)
        shown = [f"  {name} {stats[name]:.3g}" for name in SHOWN if name in stats]
        print(f"step {step}/{args.steps}", *shown)
    if evaluated:
        print(f"held out after {step} steps", *evaluated)
    if evaluated and rollout:
        text = "{question}\n{completion}\n(reward {reward:g}, answer {answer})"
        print("    |", text.format(**records[0]).replace("\n", "\n    | "))
    if stats.get("truncated", 0) > 0.5:
        print("warning: over half of the completions are cut off by --max_new_tokens")
    if stats.get("skipped") or stats.get("value_skipped"):
        print("warning: a gradient was not finite, its step is skipped: lower --lr")
    if stats.get("sampling_logp_difference", 0) > 0.1:
        print("warning: sampler and training pass differ in log-probs: a mistake in the code?")

def write_records(args, name, records):
    """Write completions/NAME.jsonl in --out, one completion on a line."""
    path = Path(args.out, "completions", f"{name}.jsonl")
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records))

# ---- CUDA graphs ----
# On a GPU, reading one token takes a thousand short kernels, and Python needs longer to launch them
# than the GPU needs to run them. So we record them once, as a CUDA graph, and replay it for every
# token: the same kernels on the same tensors, without Python. You may skip this section.
class FixedCache(transformers.StaticCache):
    """A cache that has all its columns from the beginning, as a graph's tensors cannot grow."""
    update = GrowingCache.update

class RecordedReader(Reader):
    """A Reader that replays a graph. A replay finds its inputs in the tensors of the recording."""
    def __init__(self, model, columns):
        self.model, self.columns, self.rows = model, columns, 0
        self.cache = FixedCache(config=model.config, max_cache_len=columns)

    def read(self, ids, attention, positions):
        """Read prompts as Reader does, and single tokens by the graph."""
        if ids.shape == attention.shape:  # the prompts
            return super().read(ids, attention, positions)
        inputs = ids, pad(attention, (0, self.columns - attention.shape[1])), positions
        if len(ids) == self.rows:
            for recorded, new in zip(self.inputs, inputs):
                recorded.copy_(new)
            self.graph.replay()  # writes self.hidden
            return self.hidden
        # This is the first token, or rows were dropped: there is no graph for this cache.
        self.rows, self.graph = len(ids), torch.cuda.CUDAGraph()
        self.inputs = [new.clone() for new in inputs]
        # This call is not recorded: a library may allocate memory when it is called first.
        hidden = super().read(*self.inputs)
        with torch.cuda.graph(self.graph):  # records kernels, runs none
            self.hidden = super().read(*self.inputs)
        return hidden

def use_graphs(model, tokenizer, args):
    """Let `sample` use graphs, unless they do not work with this model."""
    if any(GrowingCache(config=model.config).is_sliding):
        return  # a sliding-window layer counts its tokens in Python, which a replay does not run
    model.reader = RecordedReader
    try:
        check_model(model, tokenizer, args)
    except torch.OutOfMemoryError:
        raise
    except (Exception, SystemExit) as error:
        del model.reader
        print(f"warning: sampling without CUDA graphs, with which this model fails: {error}")

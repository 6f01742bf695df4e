"""What the three scripts share: everything that is not the algorithm.

The first six sections follow one step: sampling, rewards, log-probabilities, batching, optimizer,
statistics. Read them along with the scripts. The next five are about everything around a step. You
can skip the last two: one speeds up sampling on a GPU, and one grades math answers.

There is no vLLM, no multi-GPU, no retrying. We check only for what would fail silently: training
that is not what you asked for, wrong rewards, lost work.

Shapes: P prompts per step, G completions per prompt, N = P*G rows; S tokens in the longest prompt,
T in the longest completion, C in the longest row (prompt plus completion); M tokens with mask 1; K
tokens in the vocabulary; H the hidden size. A minibatch changes N; a micro-batch, N, T and C.

A rollout is a dict:
    problems           a list of N problems: the one that each row answers
    texts              a list of N strings: the completions
    ids                (N, C)  prompt, then completion, padded on the right
    prompt_length      (N,)    token t of a completion is in column prompt_length + t of ids
    completion_length  (N,)    its number of tokens, including the stop token
    finished           (N,)    True where a stop token ended the completion
    mask               (N, T)  1.0 on the tokens to train on, at first the whole completion. Tokens
                               that you set to 0 stay in the context; a row of zeros is skipped
    sampled_logp       (N, T)  log pi of each token, as the sampler computed it
The scripts add rewards (N,); old_logp, ref_logp, old_values, returns (N, T); adv (N, 1) or (N, T).
"""
import argparse
import json
import math
import random
import re
import sys
from datetime import datetime
from fractions import Fraction
from functools import lru_cache
from pathlib import Path

import datasets
import torch
import transformers
from torch.nn.functional import cross_entropy, pad
from torch.nn.utils.rnn import pad_sequence
from torch.utils.checkpoint import checkpoint
from tqdm import tqdm
from transformers.cache_utils import DynamicLayer, StaticLayer

# ---- Sampling ----
@torch.no_grad()
def generate(model, tokenizer, problems, group_size, args):
    """Sample group_size completions for each of P problems: a rollout. transformers' generate would
    use the model's own top_k, prefill a prompt group_size times, and keep running finished rows."""
    stop = torch.tensor(model.generation_config.eos_token_id, device=args.device)  # see stop_ids
    model.eval()  # before transformers 5.24, checkpointing in training mode disabled the cache
    sampler = Recorded(model) if args.cuda_graphs else model  # see section CUDA graphs
    # One context for all tokens, so that autocast casts each weight to bfloat16 only once.
    with torch.autocast(args.device, getattr(torch, args.dtype), enabled=args.dtype != "float32"):
        tokens, logp = sample(sampler, [p["prompt"] for p in problems], group_size, stop, args)
    model.train()

    is_stop = torch.isin(tokens, stop)  # (N, max_new_tokens)
    mask = is_stop.cumsum(1) - is_stop.long() == 0  # no stop token before this one
    lengths, finished = mask.sum(1), is_stop.any(1)  # both (N,)
    mask = mask[:, :lengths.max()].float()  # (N, T)
    completions = [row[:n] for row, n in zip(tokens.tolist(), lengths.tolist())]
    # Leave out the stop token, but keep other special tokens: they may mark the answer.
    kept = [c[:-1] if ended else c for c, ended in zip(completions, finished.tolist())]
    problems = [problem for problem in problems for _ in range(group_size)]
    ids, _ = padded([p["prompt"] + c for p, c in zip(problems, completions)], model.device)
    return {
        "problems": problems,
        "texts": tokenizer.batch_decode(kept),
        "ids": ids,
        "prompt_length": torch.tensor([len(p["prompt"]) for p in problems], device=model.device),
        "completion_length": lengths,
        "finished": finished,
        "mask": mask,
        "sampled_logp": logp[:, :lengths.max()] * mask}

def sample(model, prompts, group_size, stop, args):
    """Sample completions. Returns their tokens and log pi, both (N, max_new_tokens). Prompts are
    padded on the left, so that all rows write to the same column. Dropping finished rows copies the
    cache, so we wait until more than half of the rows have finished."""
    ids, attention = padded(prompts, model.device, "left")  # both (P, S)
    positions = (attention.cumsum(1) - 1).clamp(min=0)  # (P, S)
    cache = Cache(config=model.config)
    active = torch.arange(len(prompts) * group_size, device=model.device)  # (n,) not yet dropped
    owner = active // group_size  # (N,) the prompt of each row
    running = torch.ones_like(active, dtype=torch.bool)  # (n,) True until the stop token
    tokens = torch.zeros(len(active), args.max_new_tokens, dtype=torch.long, device=model.device)
    sampled_logp = torch.zeros(tokens.shape, device=model.device)
    for t in tqdm(range(args.max_new_tokens), "sampling", leave=False, disable=None, delay=2):
        # First the prompts, then the tokens just drawn. CACHE, below, is the name of the argument.
        hidden = model.base_model(
            input_ids=ids, attention_mask=attention, position_ids=positions,
            use_cache=True, **{CACHE: cache}).last_hidden_state[:, -1]  # (P, H), then (n, H)
        if t == 0:  # a prompt is read once: repeat its row for every completion
            cache.reorder_cache(owner)
            hidden, attention, positions = hidden[owner], attention[owner], positions[owner]
        token, logp = draw(head_logits(model, hidden), args.temperature)  # both (n,)
        tokens[active, t], sampled_logp[active, t] = token, logp
        running = running & ~torch.isin(token, stop)

        # Not at every token, because counting makes the CPU wait for the GPU.
        if t % 4 == 0 and running.sum() < len(running) / 2:
            kept = running.nonzero().squeeze(1)
            if len(kept) == 0:
                break
            cache.reorder_cache(kept)
            active, running, token = active[kept], running[kept], token[kept]
            attention, positions = attention[kept], positions[kept]
        ids, positions = token[:, None], positions[:, -1:] + 1  # both (n, 1)
        attention = pad(attention, (0, 1), value=1)
    return tokens, sampled_logp

# The cache argument of models, renamed in transformers 5.24. Older ones would ignore "cache".
VERSION = tuple(map(int, transformers.__version__.split(".")[:2]))
CACHE = "cache" if VERSION >= (5, 24) else "past_key_values"

class Cache(transformers.DynamicCache):
    """A KV cache that casts keys to the values' dtype: under autocast, RoPE makes them float32."""
    def update(self, keys, values, *args, **kwargs):
        return super().update(keys.to(values.dtype), values, *args, **kwargs)

def draw(logits, temperature):
    """Sample one id per row from pi = softmax(logits / temperature). (n, K) -> ids (n,) and their
    log pi (n,). Inverts the cumulative distribution with one random number per row, where
    torch.multinomial would draw K."""
    logp = (logits / temperature).log_softmax(-1)  # (n, K)
    # searchsorted needs sums that never decrease; on a GPU, float32 rounding would break that.
    cumulative = logp.exp().cumsum(-1, dtype=torch.float64)
    # The last sum may not be exactly 1, so scale u by it. As u > 0, no id with pi = 0 is drawn.
    u = 1 - torch.rand(len(logits), 1, device=logits.device)
    token = torch.searchsorted(cumulative, u * cumulative[:, -1:])  # (n, 1)
    return token.squeeze(1), logp.gather(1, token).squeeze(1)

def padded(rows, device, side="right"):
    """Pad lists of ids. Returns the padded ids and a mask of real tokens, both (rows, longest)."""
    rows = [torch.tensor(row, device=device) for row in rows]
    real = [torch.ones_like(row) for row in rows]
    return [pad_sequence(x, batch_first=True, padding_side=side) for x in (rows, real)]

# ---- Rewards ----
def answer_reward(problems, completions):
    """Return 1.0 for each completion that gives its problem's answer, else 0.0."""
    return [math_reward(text, problem["answer"]) for problem, text in zip(problems, completions)]

def rewards_of(reward, rollout):
    """Call the reward function, which must return one finite number per row. Returns (N,) float32.
    The G rows of a problem are adjacent."""
    problems, texts = rollout["problems"], rollout["texts"]
    r = torch.tensor([float(x) for x in reward(problems, texts)], device=rollout["ids"].device)
    assert len(r) == len(texts) and r.isfinite().all(), f"the reward function returned {r}"
    return r

# ---- Log-probabilities ----
def token_logprobs(model, batch, args):
    """Compute log pi of the tokens whose mask is 1, where pi = softmax(logits / --temperature).
    Returns (N, T) float32, which is 0 where the mask is 0."""
    index, hidden, target = completion_states(model, batch, args)
    logp = chunked_logprobs(model, hidden, target, args.temperature)  # (M,)
    return logp.new_zeros(batch["mask"].shape).index_put(index, logp)

def completion_states(model, batch, args):
    """Run the model's backbone. For the M tokens whose mask is 1, return:
        index   two (M,): their positions in (N, T)
        hidden  (M, H): the hidden states one column to the left, which predict them
        target  (M,): their ids
    This is the only place in training that shifts by one."""
    i, t = batch["mask"].nonzero(as_tuple=True)  # both (M,): a position in (N, T)
    column = batch["prompt_length"][i] + t  # (M,) the same token's column in (N, C)
    # No attention mask is needed: padding is on the right, where causal attention never looks.
    with torch.autocast(args.device, getattr(torch, args.dtype), enabled=args.dtype != "float32",
                        cache_enabled=False):  # each bfloat16 copy serves one pass: don't keep it
        hidden = model.base_model(input_ids=batch["ids"], use_cache=False).last_hidden_state
    return (i, t), hidden[i, column - 1], batch["ids"][i, column]

CHUNK = 2 ** 26  # logits (tokens x K) per chunk in training: .27 GB in float32

def chunked_logprobs(model, hidden, target, temperature):
    """Compute log softmax(logits / temperature)[target], (M, H) and (M,) -> (M,), a chunk of
    tokens at a time. The backward pass recomputes each chunk, so the full (M, K) logits are never
    materialized."""
    def logprobs(hidden, target):
        logits = head_logits(model, hidden) / temperature
        return -cross_entropy(logits, target, reduction="none")
    size = CHUNK // len(model.get_output_embeddings().weight)
    chunks = zip(hidden.split(size), target.split(size))
    return torch.cat([checkpoint(logprobs, h, y, use_reentrant=False) for h, y in chunks])

def head_logits(model, hidden):
    """Compute logits from hidden states, (M, H) -> (M, K), in float32 (TF32 on a GPU, unless
    --dtype is float32): bfloat16 would round a logit of 20 by up to .06."""
    head, config = model.get_output_embeddings(), model.config.get_text_config()
    with torch.autocast(hidden.device.type, enabled=False):
        logits = head(hidden.to(head.weight.dtype))
    # Gemma soft-caps its logits. check_model refuses models that change them in any other way.
    cap = getattr(config, "final_logit_softcapping", None)
    return cap * (logits / cap).tanh() if cap else logits

# ---- Batching ----
def minibatches(rollout, count, group_size):
    """Split the tensors of a rollout into `count` parts of about equal size, and add "row", (N,):
    the index of each row. Groups stay together, so that GRPO's advantages sum to 0 in each step of
    the optimizer. Nothing is shuffled: all epochs, and over_batches, see the same parts."""
    tensors = {name: value for name, value in rollout.items() if torch.is_tensor(value)}
    tensors["row"] = torch.arange(len(rollout["ids"]), device=rollout["ids"].device)
    for rows in tensors["row"].view(-1, group_size).tensor_split(count):
        yield {name: value[rows.flatten()] for name, value in tensors.items()}

def micro_batches(batch, tokens):
    """Split a batch into micro-batches of at most `tokens` tokens, including padding; a longer row
    gets its own. Rows are sorted by length to reduce padding, and trimmed to the longest in their
    micro-batch. Rows without a token to train on are dropped."""
    batch = {name: value[batch["mask"].any(1)] for name, value in batch.items()}
    lengths = batch["prompt_length"] + batch["completion_length"]
    order = lengths.argsort(descending=True)
    while len(order) > 0:
        c = int(lengths[order[0]])  # the longest remaining row decides how many fit
        rows, order = order.tensor_split([max(1, tokens // c)])
        part = {name: value[rows] for name, value in batch.items()}
        t = int(part["completion_length"].max())
        # (N, C) becomes (n, c), (N, T) becomes (n, t). For other widths, [:None] keeps all.
        width = {batch["ids"].shape[1]: c, batch["mask"].shape[1]: t}
        yield {name: value[:, :width.get(value.shape[1])] if value.dim() > 1 else value
               for name, value in part.items()}

def over_batches(function, model, rollout, args):
    """Apply `function`, such as token_logprobs, to a whole rollout, (N, T), in the micro-batches of
    update: cut differently, bfloat16 would round differently, and w would not start at 1."""
    result = torch.zeros_like(rollout["mask"])
    for minibatch in minibatches(rollout, args.minibatches, args.group_size):
        for b in micro_batches(minibatch, args.micro_batch_tokens):
            result[b["row"], :b["mask"].shape[1]] = function(model, b, args)
    return result

# ---- Optimizer ----
class Optimizer(torch.optim.AdamW):
    """AdamW with learning-rate warmup and gradient-norm clipping. Weights are float32: with the 8
    significant bits of bfloat16, a weight of .02 that moves by 1e-6 would round back."""
    def __init__(self, model, lr, args, eps=1e-8):
        # PyTorch's default for the second beta, .999, would average over about 1000 steps.
        super().__init__(model.parameters(), lr, (0.9, 0.95), eps, weight_decay=0.0, fused=True)
        self.full_lr, self.args = lr, args
        self.param_groups[0]["steps"] = 0  # in the group, so that state_dict saves it

    def clip_and_step(self, prefix=""):
        """Clip the gradient, take a step, zero the gradient. No step is taken if the gradient is
        not finite (logged as "skipped") or 0 ("zero_gradient"), where only momentum would move the
        weights. Returns statistics for `means`, with names that start with `prefix`."""
        group = self.param_groups[0]
        norm = torch.nn.utils.clip_grad_norm_(group["params"], self.args.max_grad_norm).item()
        stats = {"skipped": (not math.isfinite(norm), 1), "zero_gradient": (norm == 0, 1)}
        if 0 < norm < math.inf:
            group["steps"] += 1
            group["lr"] = self.full_lr * min(1, group["steps"] / max(1, self.args.warmup_steps))
            stats |= {"grad_norm": (norm, 1), "lr": (group["lr"], 1)}
            self.step()
        self.zero_grad()
        return {prefix + name: value for name, value in stats.items()}

# ---- Statistics ----
def means(logged):
    """Reduce what an update logged, a list of dicts of (sum, count) pairs, to one number per name:
    the total sum over the total count."""
    totals = {}
    for name, (total, count) in (pair for stats in logged for pair in stats.items()):
        before = totals.get(name, (0, 0))
        totals[name] = before[0] + total, before[1] + count
    return {name: float(total / count) for name, (total, count) in totals.items()}

def rollout_stats(rollout, group_size):
    """Compute the logged statistics of a rollout. entropy is the mean -log pi of sampled tokens.
    sampling_logp_difference, the RMS of training minus sampling log-probs, should be rounding."""
    groups, lengths = rollout["rewards"].view(-1, group_size), rollout["completion_length"]
    trained = rollout["mask"] > 0  # (N, T)
    difference = (rollout["old_logp"] - rollout["sampled_logp"])[trained]  # (M,)
    stats = {
        "reward": groups.mean(),
        "completion_length": lengths.float().mean(),
        "truncated": 1 - rollout["finished"].float().mean(),
        "entropy": -rollout["sampled_logp"].sum() / lengths.sum(),
        "sampling_logp_difference": difference.square().mean().sqrt()}
    if group_size > 1:
        stats["zero_variance_groups"] = (groups == groups[:, :1]).all(1).float().mean()
    if "ref_logp" in rollout:  # always k3, whichever estimator the script trains with
        log_x = (rollout["ref_logp"] - rollout["old_logp"])[trained]  # (M,)
        stats["kl"] = (log_x.expm1() - log_x).mean()
    return {k: v.item() for k, v in stats.items() if not v.isnan()}  # nan: no token is trained on

# ---- Evaluation ----
def evaluate(policy, tokenizer, problems, reward, args, step):
    """Sample one completion per held-out problem, as in training. Returns mean reward, mean length
    and, if there are gold answers, accuracy: the fraction graded right, whatever the reward is."""
    torch.manual_seed(args.seed)  # the same seed in every evaluation
    records, size = [], args.prompts * args.group_size
    for start in range(0, len(problems), size):
        rollout = generate(policy, tokenizer, problems[start:start + size], 1, args)
        rollout["rewards"] = rewards_of(reward, rollout)
        records += records_of(rollout)
    write_records(args.out, f"held-out-{step}", records)
    text = "{question}\n{completion}\n(reward {reward:g}, answer {answer})".format(**records[0])
    print("    | " + text.replace("\n", "\n    | "))
    keys = {"eval_reward": "reward", "eval_accuracy": "right", "eval_completion_length": "tokens"}
    return {name: torch.tensor([float(record[key]) for record in records]).mean().item()
            for name, key in keys.items() if key != "right" or args.answer_column}

def records_of(rollout):
    """Turn the completions of a rollout into dicts, one per line of a file in completions/."""
    columns = zip(rollout["problems"], rollout["texts"], rollout["rewards"].tolist(),
                  rollout["completion_length"].tolist(), rollout["finished"].tolist())
    return [{"question": problem["question"], "answer": problem["answer"], "completion": text,
             "right": math_reward(text, problem["answer"]) == 1, "reward": reward,
             "tokens": tokens, "cut_off": not finished}
            for problem, text, reward, tokens, finished in columns]

def write_records(out, name, records):
    """Write completions/NAME.jsonl in `out`."""
    lines = [json.dumps(record) + "\n" for record in records]
    Path(out, "completions", f"{name}.jsonl").write_text("".join(lines))

# ---- Models ----
def load_policy(args, adapt=lambda policy, args: None):
    """Load --model and its tokenizer. `adapt` can change the model, for example add LoRA, before it
    moves to the GPU."""
    config = transformers.AutoConfig.from_pretrained(args.model)
    text = config.get_text_config()
    for name, value in vars(text).items():
        if isinstance(value, float) and ("drop" in name or "jitter" in name):
            setattr(text, name, 0.0)  # dropout and router jitter would move the ratio away from 1
    room = getattr(text, "max_position_embeddings", None) or math.inf
    assert args.max_prompt_tokens + args.max_new_tokens <= room, f"the model has {room} positions"
    policy = transformers.AutoModelForCausalLM.from_pretrained(
        args.model, config=config, dtype=torch.float32)
    # This class uses tokenizer.json as it is. For some models, AutoTokenizer replaces parts of it.
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(args.model)
    policy.generation_config.eos_token_id = stop_ids(policy, tokenizer)
    policy.generation_config.do_sample = True  # else saving a config with a temperature fails
    adapt(policy, args)
    policy.to(args.device).train()  # gradient checkpointing works only in training mode
    if args.gradient_checkpointing:
        # Newer versions of transformers use the first name and deprecate the second.
        getattr(policy, "activation_checkpointing_enable", policy.gradient_checkpointing_enable)()
    if args.cuda_graphs:
        args.cuda_graphs = all(type(layer) is DynamicLayer for layer in Cache(config=config).layers)
        print(f"CUDA graphs (never for sliding windows; see --no-cuda_graphs): {args.cuda_graphs}")
    torch.backends.cuda.enable_cudnn_sdp(False)  # cuDNN is slow to plan for each new shape
    torch.backends.cuda.matmul.fp32_precision = "ieee"  # check_model needs full precision
    check_model(policy, tokenizer, args)
    if args.dtype != "float32":
        # For the LM head. Positions stay exact: since transformers 5.19, RoPE is not a matmul.
        torch.backends.cuda.matmul.fp32_precision = "tf32"
    return policy, tokenizer

def stop_ids(model, tokenizer):
    """Return the ids that end a completion: the EOS of the model and of the tokenizer, and the
    token that ends a turn in the chat template (not the EOS in Qwen2.5's base models)."""
    eos = model.generation_config.eos_token_id
    stops = {tokenizer.eos_token_id, *(eos if isinstance(eos, list) else [eos])} - {None}
    if tokenizer.chat_template:
        chat = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "ANSWER"}]
        after = tokenizer.apply_chat_template(chat, tokenize=False).rpartition("ANSWER")[2]
        ids = tokenizer(after, add_special_tokens=False)["input_ids"]
        # Take the first added token, except newlines (Gemma has them) and tags like </answer>.
        added = {i: str(token).strip() for i, token in tokenizer.added_tokens_decoder.items()}
        stops |= set([i for i in ids if added.get(i, "") and not added[i].startswith("</")][:1])
    assert stops, "neither model nor tokenizer names a token that ends a completion"
    return sorted(stops)

@torch.no_grad()
def check_model(model, tokenizer, args):
    """Stop if the log-probs of the sampler or the training pass differ from those of the model's
    own forward pass by more than rounding: the model may scale its logits, dropout may be on, or
    the cache may not fit the model. We try a long row and a short one."""
    longest = max(3, args.max_prompt_tokens + args.max_new_tokens - 4)  # 4 more are sampled
    vocabulary = range(model.get_input_embeddings().num_embeddings)
    problems = [{"prompt": random.Random(0).choices(vocabulary, k=k)} for k in (longest, 3)]
    exact = {"dtype": "float32", "temperature": 1.0, "max_new_tokens": 4}
    args = argparse.Namespace(**vars(args) | exact)
    rollout = generate(model, tokenizer, problems, 1, args)
    found = torch.stack([rollout["sampled_logp"], token_logprobs(model, rollout, args)])
    model.eval()
    for i, problem in enumerate(problems):
        start, length = len(problem["prompt"]), int(rollout["completion_length"][i])
        ids = rollout["ids"][i, :start + length]
        logits = model(ids[None], use_cache=False).logits[0, start - 1:-1]  # (length, K)
        own = -cross_entropy(logits.float(), ids[start:], reduction="none")  # (length,)
        errors = (found[:, i, :length] - own).abs().amax(1)  # of sampler and training pass
        assert (errors < 1e-3).all(), (  # also false for nan
            f"{type(model).__name__} is not supported: log-probs are off by {errors.tolist()}")
    model.train()

# ---- Problems ----
def load_problems(args, tokenizer):
    """Load the training and held-out problems, which are the same for every --seed."""
    splits = read_dataset(args.dataset, args.subset)
    if len(splits) == 1:  # a file, for example
        rows = splits[args.split]
        # Hold out about a fifth. Each question seeds its own draw, so duplicates stay together.
        draws = [random.Random(str(question)).random() for question in rows[args.question_column]]
        held_out = rows.select([i for i, x in enumerate(draws) if x < 0.2])
        rows = rows.select([i for i, x in enumerate(draws) if x >= 0.2])
    else:
        rows, held_out = splits[args.split], splits[args.eval_split]
    order = random.Random(0).sample(range(len(held_out)), len(held_out))
    held_out = prepare(held_out.select(order[:args.eval_problems]), tokenizer, args)
    held_out.sort(key=lambda problem: len(problem["prompt"]))  # to reduce padding
    train = prepare(rows, tokenizer, args)
    shared = {p["question"] for p in train} & {p["question"] for p in held_out}
    print(f"{len(rows)} rows, {len(train)} training and {len(held_out)} held-out problems, "
          f"{len(shared)} in both")
    assert train and held_out, "no usable row: answers unreadable, or over --max_prompt_tokens"
    print(f"the first prompt: {tokenizer.decode(train[0]['prompt'])!r}\n"
          f"its gold answer: {train[0]['answer']!r}")
    return train, held_out

def read_dataset(source, subset=None):
    """Read a file, a directory or a dataset from the Hub: {split: datasets.Dataset}."""
    kind = source.rpartition(".")[2].replace("jsonl", "json")
    if kind in ("json", "csv", "parquet"):
        return datasets.load_dataset(kind, data_files=source)
    return datasets.load_dataset(source, subset)

def prepare(split, tokenizer, args):
    """Turn rows into problems: dicts with "question" as a string, "prompt" as ids, "answer" (always
    a string with --answer_column), and all other columns. In a row, a question is a string, or a
    chat that ends with the user's message. Rows that cannot be used are dropped."""
    problems = []
    for row in split.to_list():
        # Turn empty cells and NaN into empty strings.
        row = {name: "" if cell is None or cell != cell else cell for name, cell in row.items()}
        chat = row[args.question_column]
        if not isinstance(chat, list):
            chat = [{"role": "user", "content": str(chat)}]
        assert chat[-1]["role"] == "user", f"this chat may end with the answer: {chat}"
        if args.system_prompt and chat[0]["role"] != "system":
            chat = [{"role": "system", "content": args.system_prompt}, *chat]
        question, prompt = str(chat[-1]["content"] or ""), prompt_of(chat, tokenizer)
        answer, readable = row.get("answer", ""), True
        if args.answer_column:
            answer = row[args.answer_column]
            assert not isinstance(answer, (list, dict, bytes)), f"an answer must be text: {answer}"
            answer = extract_answer(str(answer)) or str(answer)  # GSM8K's end in #### 72
            # A gold answer is readable if the grader would accept it as an answer.
            broken = re.search(r"[\b\f\t\r]", answer)  # in JSON, "\frac" is a form feed and "rac"
            readable = not broken and math_reward(f"<answer>{answer}</answer>", answer)
        if question and readable and 0 < len(prompt) <= args.max_prompt_tokens:
            problems.append(row | {"question": question, "answer": answer, "prompt": prompt})
    return problems

def prompt_of(chat, tokenizer):
    """Turn a chat into ids with the chat template. Without one, join its messages, with a newline
    after each, and drop the EOS that some tokenizers append."""
    if tokenizer.chat_template:
        return tokenizer.apply_chat_template(chat, add_generation_prompt=True)["input_ids"]
    ids = tokenizer("".join(m["content"] + "\n" for m in chat))["input_ids"]
    return ids[:-1] if ids[-1:] == [tokenizer.eos_token_id] else ids

def batch_of(problems, step, count, seed):
    """Return the `count` problems of a step. All problems are shuffled, used up, reshuffled and so
    on. The result depends only on seed and step."""
    n, used = len(problems), (step - 1) * count
    # The shuffles form one endless list. With n = 10 and count = 4, step 3 takes its items 8 to 11.
    epochs = range(used // n, (used + count - 1) // n + 1)
    shuffled = [p for e in epochs for p in random.Random(f"{seed} {e}").sample(problems, n)]
    return shuffled[used % n:][:count]

# ---- Command line ----
INSTRUCTION = "Reason step by step, then give the final answer on a last line after ####."
TOY = str(Path(__file__).resolve().parent / "tests/toy")
# The defaults for a run without --model, which trains the toy; each script adds its own --lr.
TOY_SETTINGS = dict(
    model=TOY, dataset=TOY, system_prompt="", max_prompt_tokens=64, max_new_tokens=48,
    micro_batch_tokens=4096, gradient_checkpointing=False, steps=20, eval_every=10, save_every=10,
    eval_problems=2560)

class HelpFormatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Shows the docstring as written, and the defaults of flags."""

def make_parser(file, doc):
    """Make a parser with the flags that all scripts share; --help shows `doc`."""
    parser = argparse.ArgumentParser(
        prog=Path(file).name, usage="python %(prog)s [flags]", description=doc,
        formatter_class=HelpFormatter, allow_abbrev=False)
    parser.set_defaults(script=parser.prog)
    add, cuda = parser.add_argument, torch.cuda.is_available()
    bfloat16 = cuda and torch.cuda.is_bf16_supported(including_emulation=False)  # not on a T4
    add("--model", help="directory or Hub name; if not given, the toy with TOY_SETTINGS")
    add("--dataset", help=".jsonl, .json, .csv, .parquet, directory or Hub name")
    add("--subset", help="configuration of a Hub dataset, such as main")
    add("--split", default="train", help="split to train on")
    add("--eval_split", default="test", help="split to evaluate on; of a lone split, a fifth")
    add("--question_column", default="question", help="column of questions: strings or chats")
    add("--answer_column", default="answer", help='column of gold answers; "" if none are needed')
    add("--system_prompt", default=INSTRUCTION, help="used unless a chat brings its own")
    add("--max_prompt_tokens", type=int, default=512, help="longer prompts are dropped")
    add("--max_new_tokens", type=int, default=1024, help="maximum length of a completion")
    add("--temperature", type=float, default=1.0, help="for both sampling and log-probs")
    add("--micro_batch_tokens", type=int, default=8192 if cuda else 1536,
        help="maximum number of tokens, including padding, per forward and backward pass")
    add("--warmup_steps", type=int, default=20, help="optimizer steps of linear warmup to --lr")
    add("--max_grad_norm", type=float, default=1.0, help="clip the gradient norm to this")
    add("--gradient_checkpointing", action=argparse.BooleanOptionalAction, default=True,
        help="recompute activations: a third more compute, far less memory")
    add("--cuda_graphs", action=argparse.BooleanOptionalAction, default=True, help="for sampling")
    add("--device", choices=["cpu", "cuda"], default="cuda" if cuda else "cpu", help="CPU or GPU")
    add("--dtype", choices=["float32", "bfloat16"], default="bfloat16" if bfloat16 else "float32",
        help="for matrix products, except in the LM head; weights are float32")
    add("--steps", type=int, default=200, help="number of steps, with one rollout each")
    add("--seed", type=int, default=0, help="seed for sampling and for the order of problems")
    # With microseconds, so that runs started together don't share a directory.
    add("--out", default=f"runs/{Path(file).stem}-{datetime.now():%m%d-%H%M%S-%f}",
        help="output directory")
    add("--resume", action="store_true", help="continue the run in --out; new flags override it")
    add("--eval_every", type=int, default=20, help="steps between evaluations")
    add("--eval_problems", type=int, default=512, help="maximum number of held-out problems")
    add("--save_every", type=int, default=20, help="steps between checkpoints")
    return parser

def parse(parser, argv, **toy_settings):
    """Parse `argv` twice: first to see whether to resume a run or train the toy, then with the
    flags of that run, or with TOY_SETTINGS, as defaults."""
    args = parser.parse_args(argv)
    if args.resume:
        parser.set_defaults(**json.loads(Path(args.out, "args.json").read_text()))
    elif args.model is None:
        parser.set_defaults(**TOY_SETTINGS, **toy_settings)
    args = parser.parse_args(argv)
    if args.script != parser.prog:  # see make_parser
        parser.error(f"--resume: the run in --out was made by {args.script}")
    if args.dataset is None:
        parser.error("--model needs a --dataset")
    args.cuda_graphs = args.cuda_graphs and args.device == "cuda"
    return args

# ---- Run ----
def start_run(args):
    """Print the flags, and set up the process."""
    assert args.resume or not Path(args.out).exists(), f"--out exists: {args.out}"
    if hasattr(sys.stdout, "reconfigure"):  # not in a notebook
        sys.stdout.reconfigure(errors="replace")  # one odd character must not end a run
    print(*(f"{name}={value}" for name, value in vars(args).items()))
    transformers.utils.logging.disable_progress_bar()
    if args.model == TOY:
        torch.set_num_threads(1)  # so that floating-point sums don't depend on the core count

def open_run(args, tokenizer, policy, parts):
    """Make --out and save step 0 there, so that a failing save fails now. With --resume, load
    the last complete checkpoint instead. Returns its step. Once step 0 is saved, kills are safe."""
    out, step = Path(args.out), 0
    if args.resume:
        state = torch.load(out / "state.pt", map_location="cpu")  # no second copy on the GPU
        step = state["step"]
        model = type(policy).from_pretrained(out / f"step-{step}", dtype=torch.float32)
        policy.load_state_dict(model.state_dict())  # in place: the optimizer holds these tensors
        for name, part in parts.items():
            part.load_state_dict(state[name])
    (out / "completions").mkdir(parents=True, exist_ok=args.resume)
    (out / "metrics.jsonl").write_text(state["metrics"] if args.resume else "")
    (out / "temporary.json").write_text(json.dumps(vars(args), indent=1))
    (out / "temporary.json").replace(out / "args.json")
    if not args.resume:
        save_checkpoint(out, 0, tokenizer, policy, parts)
    return step

def save_checkpoint(out, step, tokenizer, policy, parts):
    """Save the policy in step-N, and everything else that a resumed run needs in state.pt: `parts`,
    {name: part}, are optimizers and other models. All policies are kept, but only one state.pt. It
    is replaced once the new one is complete, so that a kill always leaves a valid checkpoint."""
    policy.save_pretrained(Path(out, f"step-{step}"))
    tokenizer.save_pretrained(Path(out, f"step-{step}"))
    state = {"step": step, "metrics": Path(out, "metrics.jsonl").read_text()}
    state |= {name: part.state_dict() for name, part in parts.items()}
    torch.save(state, Path(out, "temporary.pt"))
    Path(out, "temporary.pt").replace(Path(out, "state.pt"))

SHOWN = ("reward completion_length truncated entropy kl clip_frac explained_variance skipped "
         "sampling_logp_difference seconds").split()

def log(args, step, stats, rollout=None):
    """Write a step's statistics and completions to files, and print the main statistics."""
    with Path(args.out, "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": step} | stats) + "\n")
    shown = [name for name in stats if name in SHOWN or name.startswith("eval_")]
    line = "".join(f"   {name} {stats[name]:.3g}" for name in shown)
    print(f"step {step}/{args.steps}{line}", flush=True)
    if rollout:
        write_records(args.out, f"step-{step}", records_of(rollout))
        if (rollout["rewards"] == rollout["rewards"][0]).all():
            print("warning: all rewards in this rollout are equal")

# ---- CUDA graphs ----
# We estimate (but did not time) that Python takes longer to launch the kernels of one token than a
# GPU takes to run them. A CUDA graph records these kernels and launches them all at once. It always
# runs on the same tensors, so the cache, which then cannot grow, needs spare columns.
class Recorded:
    """Replaces the model in `sample`: runs it on the prompts, then replays one graph per token."""
    rows = room = 0  # rows in the recording, and columns in its cache

    def __init__(self, model):
        self.model = model

    def __getattr__(self, name):
        return getattr(self.model, name)

    def base_model(self, input_ids, attention_mask, position_ids, **rest):
        """Run ids (n, s) through the backbone and into the cache in `rest`. Returns its output."""
        def read(ids, attention, positions):
            return self.model.base_model(
                input_ids=ids, attention_mask=attention, position_ids=positions, **rest)
        if input_ids.shape == attention_mask.shape:  # the prompts: nothing comes before them
            return read(input_ids, attention_mask, position_ids)
        rows, width = attention_mask.shape
        replay = rows == self.rows and width <= self.room
        if not replay:
            # First token, rows dropped or cache full: record anew, with 193 to 256 spare columns.
            self.rows, self.room = rows, (width // 64 + 4) * 64
        given = input_ids, pad(attention_mask, (0, self.room - width)), position_ids
        if replay:
            for recorded, new in zip(self.inputs, given):
                recorded.copy_(new)
            self.graph.replay()  # writes self.output
            return self.output
        layers = rest[CACHE].layers
        for i, old in enumerate(layers):
            layers[i] = StaticLayer(self.room)  # its length is a tensor, so a replay advances it
            layers[i].update(old.keys[:, :, :width - 1], old.values[:, :, :width - 1])
        self.inputs, self.graph = [x.clone() for x in given], torch.cuda.CUDAGraph()
        # Run the token once unrecorded, because libraries may allocate memory on their first call.
        output = read(*self.inputs)
        with torch.cuda.graph(self.graph):  # records kernels without running them
            self.output = read(*self.inputs)
        return output

# ---- Math answers ----
# Both answers are rewritten into a canonical form and compared as strings: numbers become exact
# fractions, and list items and the terms of a sum are sorted. Words are compared case-insensitively
# (true is True, but r is not R). A unit at the end is dropped, even if it is a variable: 5 m is 5.
# Nothing is converted (10% is not 0.1), and there is no algebra (2+3 is not 5).
LONGEST = 600  # characters; longer answers are ignored
UNITS = ("degree|dollar|cent|percent|unit|[ck]?m|meter|foot|feet|ft|inch(es)?|mile|yard|k?g|pound|"
         "second|minute|hour|day|week|month|year")
# (pattern, replacement), applied in this order, each with an example.
SPELLINGS = [
    (r"\\cdot|\\times|·|×", "*"),  # 2\cdot\pi -> 2*\pi
    (r"\\leq?(slant)?(?![a-z])|≤", "<="),  # x \leq 5 -> x <= 5
    (r"\\geq?(slant)?(?![a-z])|≥", ">="),  # x \geq 5 -> x >= 5
    # 1{,}234 -> 1,234; 4 and 5 -> 4 , 5; but not x<1 and x>4
    (r"\\\\|;|\{,\}|\b(and|or)\b(?=[^<>]*$)", ","),
    # \left(5,\,6\right) -> (5,6); \dfrac -> frac; 5^{\circ} -> 5
    (r"\\(left|right|displaystyle)\b|\^{?\\?circ}?|\\[,:! ]?|(?<=\\)[dtc](?=frac)|[$%°~]", ""),
    ("[−–]", "-"),  # −5 -> -5
    ("π", "pi"),  # 5π -> 5pi
    (r"(text\w*|mbox|math\w*) ?{([^{}]*)}", r" \2 "),  # text{even} -> even
    (r"sqrt\((\w+)\)", r"sqrt{\1}"),  # sqrt(3) -> sqrt{3}
    (r"{ ?(\w) ?}", r"\1"),  # sqrt{3} -> sqrt3
    # Without the "of", sqrt(3/4) would become sqrt(3)/4.
    (r"([a-z]{2}|[_^]\w|\^) ?frac", r"\1 of frac"),  # sqrtfrac34 -> sqrt of frac34
    # The numerator is \1 or \2, the denominator \3 or \4: 1frac38 -> 1 3/8
    (r"frac ?(?:(\w)|{(-?[^-+{}]*)}) ?(?:(\d)|{(\d+)})", r" \1\2/\3\4 "),
    # f(x) = 2*pi. -> 2pi; x in [0,1] -> [0,1]
    (r"\* ?(?=[a-z])| ?\.$|^[a-zA-Z](\(\w\))?( ?=| in\b)", ""),
    (rf"(\d|pi|\}}) *(square )?({UNITS})s?( ?\^[23])?$", r"\1"),  # 5 cm^2 -> 5
    (r"^(?:{([^{}]*)}|\(([^(),]*)\))$", r"\1\2"),  # {1, 2} -> 1, 2; (5) -> 5
    # 1,234 -> 1234; but not 0,125
    (r"^-?[1-9]\d{0,2}(,\d{3})+(\.\d+)?$", lambda number: number[0].replace(",", "")),
    (r" *([^\d ]) *", r"\1"),  # 1, 2 -> 1,2; but 4 2 is not 42
]

def extract_answer(text):
    r"""Find the marked answer in a completion. Returns None if there is no mark, or if the answer
    is empty, too long or never closed. If there is an <answer>, look only inside the last one. Take
    the last \boxed{...} or the first line of text after the last ####, whichever comes later. If
    there is neither, take the whole <answer>."""
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
    """Return the text before the first unmatched }: '{1}+2} so' -> '{1}+2'."""
    depth = 0
    for end, character in enumerate(text[:LONGEST + 1]):
        depth += (character == "{") - (character == "}")
        if depth < 0:
            return text[:end]
    return ""

@lru_cache(2 ** 16)
def canonical(text):
    """Rewrite an answer so that equal answers become the same string: '2, x-0.5' -> '-1/2+x,2'."""
    for pattern, replacement in SPELLINGS:
        text = " ".join(re.sub(pattern, replacement, text).split())
    # Sorting would break these and dates, so leave them as they are: (0.5, 1) is not (1/2, 1).
    if re.search(r"[\[\](){}<>=|]|[\^/]-|\d{4}-\d\d-\d\d", text):
        return text
    sums = [re.findall("-[^-+]*|[^-+]+", item) for item in re.findall("[^,]+", text)]
    return ",".join(sorted("+".join(sorted(map(exact, terms))) for terms in sums))

def exact(term):
    """Write 1 3/8, 3/8, 0.5, .5 or 5 as an exact fraction: '-1 3/8' -> '-11/8'. Keep the rest."""
    if not re.fullmatch(r"-?((\d+ )?\d+/[1-9]\d*|\d*\.?\d+)", term, re.ASCII):
        return term
    value = sum(map(Fraction, term.removeprefix("-").split()))
    return str(-value if "-" in term else value)

def math_reward(completion, answer):
    """Return 1.0 if the marked answer equals `answer`, else 0.0. `answer` may be marked as well."""
    given = extract_answer(completion) or ""
    gold = extract_answer(f"<answer>{answer}</answer>") or ""
    if re.fullmatch(r"(\\(text|math)\w* ?{)?[a-zA-Z]{2,}(,? [a-zA-Z]{2,})*}?\.?", gold):  # words
        given, gold = given.lower(), gold.lower()
    if "=" not in gold:
        given = re.sub(r"^[\d. ($]+[-+*/][-+*/\d. ()$]*=", "", given)  # 2+2+2 = 6 -> 6
    given, gold = canonical(given), canonical(gold)
    return float(gold != "" and given == gold)


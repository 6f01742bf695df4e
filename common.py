"""What the three scripts share: everything that is not the algorithm.

To follow the scripts, read the first four sections, up to Optimiser: log-probabilities, batching,
math answers (their spellings may wait), sampling. The others optimise, load, evaluate, save, and
sample faster on a GPU. We left out: vLLM, a second GPU, retries. We check only what would fail
silently: other training than you asked for, wrong rewards, lost work.

Shapes: P prompts per step, G completions of each, N = P*G rows; S tokens in the longest prompt, T
in the longest completion, C in the longest row (prompt and completion); M completion tokens in a
batch; K ids in the vocabulary; H numbers in a hidden state. N and T are also those of a part.

A rollout is a dict:
    ids            (N, C)  prompt, then completion, padded on the right
    attention      (N, C)  1 on prompt and completion, 0 on padding
    prompt_length  (N,)    token t of a completion is in column prompt_length + t of ids
    mask           (N, T)  1.0 on the tokens of the completion, its stop token included; tokens that
                           you set to 0 are read, but not trained
    sampled_logp   (N, T)  log pi of each token, as the sampler computed it
    row            (N,)    0 ... N-1, so that over_batches can put results back
    finished       (N,)    True where a stop token ended the completion
    has_gradient   (N,)    False: the gradient is known to be 0, so the row is not computed
    problems       a list of N problems: the one that each row answers
    texts          a list of N completions
The scripts add rewards (N,); old_logp, ref_logp, old_values, returns (N, T); adv (N, 1) or (N, T).
"""
import argparse
import json
import math
import random
import re
import shutil
import sys
import time
from collections import Counter
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
    """Run the body of the model. For the M tokens with mask 1, it returns:
        index   two (M,): the places of these tokens in (N, T)
        hidden  (M, H): the states one column before them, which predict them
        target  (M,): their ids
    Nothing else in training shifts by one."""
    i, t = batch["mask"].nonzero(as_tuple=True)  # (M,) both: a place in (N, T)
    column = batch["prompt_length"][i] + t  # (M,) the same place in (N, C)
    # No attention mask: padding is on the right, and causal attention never looks there.
    with torch.autocast(args.device, getattr(torch, args.dtype), enabled=args.dtype != "float32",
                        cache_enabled=False):  # keep no bfloat16 weights: each is used once
        hidden = model.base_model(input_ids=batch["ids"], use_cache=False).last_hidden_state
    return (i, t), hidden[i, column - 1], batch["ids"][i, column]

CHUNK = 2 ** 26  # logits, tokens x K, that training makes at a time: .27 GB in float32

def chunked_logprobs(model, hidden, target, temperature):
    """Compute log softmax(logits / temperature)[target], (M, H) and (M,) -> (M,), one chunk of
    tokens after another. The backward pass computes each chunk again, so the logits (M, K) never
    exist as a whole."""
    def logprobs(hidden, target):
        logits = head_logits(model, hidden) / temperature
        return -cross_entropy(logits, target, reduction="none")
    size = CHUNK // len(model.get_output_embeddings().weight)
    chunks = zip(hidden.split(size), target.split(size))
    return torch.cat([checkpoint(logprobs, h, y, use_reentrant=False) for h, y in chunks])

def head_logits(model, hidden):
    """Compute logits from hidden states, (M, H) -> (M, K), in float32 (on a GPU in TF32, unless
    --dtype is float32): bfloat16 rounds a logit of 20 by up to .06."""
    head, config = model.get_output_embeddings(), model.config.get_text_config()
    with torch.autocast(hidden.device.type, enabled=False):
        logits = head(hidden.to(head.weight.dtype))
    # Gemma caps its logits. check_model refuses models that change them in another way.
    cap = getattr(config, "final_logit_softcapping", None)
    return cap * (logits / cap).tanh() if cap else logits

# ---- Batching ----
# progress(items, what) shows a bar, in a terminal after 2 seconds.
progress = partial(tqdm, leave=False, disable=None, delay=2)

def minibatches(rollout, count, group_size):
    """Cut a rollout, without its lists, into `count` about equal parts. Groups stay whole, so that
    the advantages in an optimiser step of GRPO add up to 0. Nothing is shuffled: every epoch and
    over_batches make the same cuts."""
    rows = torch.arange(len(rollout["ids"]), device=rollout["ids"].device).view(-1, group_size)
    for part in rows.tensor_split(count):
        part = part.flatten()
        yield {name: value[part] for name, value in rollout.items() if torch.is_tensor(value)}

def micro_batches(batch, tokens):
    """Cut a batch into micro-batches of at most `tokens` tokens, padding counted; a longer row is
    alone. Rows are sorted by length, for little padding; those without a gradient are left out. All
    is trimmed: a tensor that you add to a rollout must be (N,), (N, 1) or (N, T, ...)."""
    batch = {name: value[batch["has_gradient"]] for name, value in batch.items()}
    lengths = batch["attention"].sum(1)
    order = lengths.argsort(descending=True)
    while len(order) > 0:
        c = int(lengths[order[0]])  # the longest row left says how many fit
        count = max(1, tokens // c)
        rows, order = order[:count], order[count:]
        part = {name: value[rows] for name, value in batch.items()}
        t = int((lengths[rows] - part["prompt_length"]).max())
        for name, value in part.items():
            if name in ("ids", "attention"):
                part[name] = value[:, :c]
            elif value.dim() > 1 and value.shape[1] != 1:
                assert value.shape[1] == batch["mask"].shape[1], f"{name} is {value.shape}"
                part[name] = value[:, :t]
        yield part

def over_batches(function, model, rollout, args):
    """Compute `function`, such as token_logprobs, of a whole rollout: (N, T), NaN in rows without a
    gradient. The micro-batches are those of update: cut otherwise, bfloat16 would round
    differently, and the first ratio would not be 1."""
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

# ---- Math answers and rewards ----
# Both answers are rewritten to one spelling and compared as texts: numbers as exact fractions, the
# items of a list and the terms of a sum sorted. Words are compared without case (true is True, but
# r is not R). A gold answer that is one letter, a to j or A to J, is a label: (B) 14 and b are B.
# A unit at the end is dropped, even if it is a variable: 5 m is 5. Nothing is converted (10 % is
# not 0.1), and there is no algebra (2+3 is not 5).
LONGEST = 600  # characters; longer answers are not read
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
    # f(x) = 2*pi. -> 2pi; Option B -> B; x in [0,1] -> [0,1]
    (r"\* ?(?=[a-z])| ?\.$|^[oO]ption |^[a-zA-Z](\(\w\))?( ?=| in\b)", ""),
    (rf"(\d|pi|\}}) *(square )?({UNITS})s?( ?\^[23])?$", r"\1"),  # 5 cm^2 -> 5
    (r"^(?:{([^{}]*)}|\(([^(),]*)\))$", r"\1\2"),  # {1, 2} -> 1, 2; (5) -> 5
    (r"^-?\d{1,3}(,\d{3})+(\.\d+)?$", lambda number: number[0].replace(",", "")),  # 1,234 -> 1234
    (r" *([^\d ]) *", r"\1"),  # 1, 2 -> 1,2; but 4 2 is not 42
]

def extract_answer(text):
    r"""Find the marked answer in a completion; None if there is no mark, or it is not closed, empty
    or too long. If there is an <answer>, look in the last one only. Take the last \boxed{...} or
    the line after the last ####, whichever is later. If there is neither, take the whole
    <answer>."""
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
    for end in range(LONGEST + 2):
        start = text[:end]
        if start.count("}") > start.count("{"):
            return start[:-1]
    return ""

@lru_cache(2 ** 16)
def canonical(text):
    """Rewrite an answer so that equal answers become the same text: '2, x-0.5' -> '-1/2+x,2'."""
    for pattern, replacement in SPELLINGS:
        text = " ".join(re.sub(pattern, replacement, text).split())
    # Sorting would break these, dates and labels. Their numbers stay: (0.5, 1) is not (1/2, 1).
    if re.search(r"[\[\](){}<>=|]|[\^/]-|\d{4}-\d\d-\d\d|^[a-jA-J][.:]", text):
        return text
    sums = [re.findall("-[^-+]*|[^-+]+", item) for item in re.findall("[^,]+", text)]
    return ",".join(sorted("+".join(sorted(map(exact, terms))) for terms in sums))

def exact(term):
    """Write 1 3/8, 3/8, 0.5, .5 or 5 as an exact fraction: '-1 3/8' -> '-11/8'. Others stay."""
    if not re.fullmatch(r"-?((\d+ )?\d+/[1-9]\d*|\d*\.?\d+)", term, re.ASCII):
        return term
    value = sum(map(Fraction, term.removeprefix("-").split()))
    return str(-value if "-" in term else value)

def math_reward(completion, answer):
    """Return 1.0 if the marked answer equals `answer`, else 0.0. `answer` may have a mark, too."""
    given = extract_answer(completion) or ""
    gold = extract_answer(f"<answer>{answer}</answer>") or ""
    if re.fullmatch(r"(\\(text|math)\w* ?{)?[a-zA-Z]{2,}(,? [a-zA-Z]{2,})*}?\.?", gold):  # words
        given, gold = given.lower(), gold.lower()
    given, gold = canonical(given), canonical(gold)
    if re.fullmatch("[a-jA-J]", gold):
        # (B) 14 -> B, but not a formula, (B)*2, or a second label, (B) 14 or (C).
        other = r"[+*/^]|.*([a-j][).:]|\b[a-j]\b)"
        given = re.sub(rf"(?i)^\(?{gold}([).:](?!{other}).*)?$", gold, given)
    return float(gold != "" and given == gold)

def answer_reward(problems, completions):
    """Return 1.0 for a completion with the problem's answer, else 0.0."""
    return [math_reward(text, problem["answer"]) for problem, text in zip(problems, completions)]

def rewards_of(reward, rollout):
    """Call the reward function, which must return a finite number for each row: (N,) float32. A
    problem's G rows are neighbours."""
    problems, texts = rollout["problems"], rollout["texts"]
    paid = torch.tensor([float(r) for r in reward(problems, texts)], device=rollout["ids"].device)
    assert len(paid) == len(texts) and paid.isfinite().all(), f"the reward function paid {paid}"
    return paid

# ---- Sampling ----
@torch.no_grad()
def generate(model, tokenizer, problems, group_size, temperature, args):
    """Sample group_size completions of each of P problems; at temperature 0 take the likeliest
    tokens. Returns a rollout. transformers' generate would add the model's own top_k, read a prompt
    group_size times, and keep finished rows."""
    model.eval()  # in training mode gradient checkpointing drops the cache
    stop = torch.tensor(stop_ids(model, tokenizer), device=model.device)
    # One context for all tokens: autocast then makes its bfloat16 copy of each weight once.
    with torch.autocast(args.device, getattr(torch, args.dtype), enabled=args.dtype != "float32"):
        prompts = [problem["prompt"] for problem in problems]
        tokens, logp = sample(model, prompts, group_size, temperature, stop, args.max_new_tokens)
    model.train()
    is_stop = torch.isin(tokens, stop)  # (N, max_new_tokens)
    mask = is_stop.cumsum(1) - is_stop.long() == 0  # no stop token before this one
    lengths, finished = mask.sum(1), is_stop.any(1)  # (N,) both
    completions = [row[:length] for row, length in zip(tokens.tolist(), lengths.tolist())]
    problems = [problem for problem in problems for _ in range(group_size)]
    rows = [problem["prompt"] + c for problem, c in zip(problems, completions)]
    ids, attention = padded(rows, model.device)  # (N, C) both
    # The stop token is left out of texts. Other special tokens may mark the answer.
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
        "problems": problems,
        "texts": tokenizer.batch_decode(texts)}

def stop_ids(model, tokenizer):
    """Return the ids that end a completion: eos of model and tokenizer, and the token with which
    the chat template ends a turn (Qwen2.5's base models have another eos)."""
    eos = model.generation_config.eos_token_id
    stops = {tokenizer.eos_token_id, *(eos if isinstance(eos, list) else [eos])} - {None}
    if tokenizer.chat_template:
        chat = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "ANSWER"}]
        after = tokenizer.apply_chat_template(chat, tokenize=False).rpartition("ANSWER")[2]
        first = tokenizer(after, add_special_tokens=False)["input_ids"][:1]
        stops |= set(first) & set(tokenizer.all_special_ids)
    return sorted(stops)

def sample(model, prompts, group_size, temperature, stop, max_new_tokens):
    """Write completions. Returns their tokens and log pi, (N, max_new_tokens) both. Prompts are
    padded on the left, so that every row writes into the same column. As dropping rows copies the
    cache, we wait until more than half have their stop token."""
    device = model.device
    ids, attention = padded(prompts, device, "left")  # (P, S) both
    positions = (attention.cumsum(1) - 1).clamp(min=0)  # (P, S)
    reader = getattr(model, "reader_class", Reader)(model)  # use_graphs may have set another
    owner = torch.arange(len(prompts), device=device).repeat_interleave(group_size)  # (N,) a prompt
    active = torch.arange(len(owner), device=device)  # (n,) the rows that are not dropped
    running = torch.ones_like(active, dtype=torch.bool)  # (n,) True before the stop token
    tokens = torch.zeros(len(active), max_new_tokens, dtype=torch.long, device=device)
    sampled_logp = torch.zeros(len(active), max_new_tokens, device=device)
    for t in progress(range(max_new_tokens), "sampling"):
        # Read the prompts at first, then the token drawn in the step before.
        hidden = reader.read(ids, attention, positions)  # (P, H), then (n, H)
        if t == 0:  # from P rows to N: a prompt is read once for its group
            reader.cache.reorder_cache(owner)
            hidden, attention, positions = hidden[owner], attention[owner], positions[owner]
        token, logp = draw(head_logits(model, hidden), temperature)  # (n,) both
        tokens[active, t], sampled_logp[active, t] = token, logp
        running = running & ~torch.isin(token, stop)
        # Not at every token, because counting waits for the GPU.
        if t % 4 == 0 and running.sum() < len(running) / 2:
            left = running.nonzero().squeeze(1)
            if len(left) == 0:
                break
            reader.cache.reorder_cache(left)
            active, running, token = active[left], running[left], token[left]
            attention, positions = attention[left], positions[left]
        ids, positions = token[:, None], positions[:, -1:] + 1  # (n, 1) both
        attention = pad(attention, (0, 1), value=1)
    return tokens, sampled_logp

class Cache(transformers.DynamicCache):
    """transformers' key-value cache, but with keys in the dtype of the values: under autocast a
    rotated key is float32 and takes twice the memory."""
    def update(self, keys, values, *args, **kwargs):
        # Not super(): FixedCache, under CUDA graphs, borrows this method.
        return transformers.Cache.update(self, keys.to(values.dtype), values, *args, **kwargs)

class Reader:
    """A model and its key-value cache."""
    def __init__(self, model):
        self.model, self.cache = model, Cache(config=model.config)

    def read(self, ids, attention, positions):
        """Read ids (n, s) into the cache, which transformers used to call past_key_values. Returns
        the states after the last of them, (n, H)."""
        return self.model.base_model(
            input_ids=ids, attention_mask=attention, position_ids=positions,
            cache=self.cache, use_cache=True).last_hidden_state[:, -1]

def draw(logits, temperature):
    """Draw one id per row from pi = softmax(logits / temperature); at 0 take the likeliest.
    (n, K) -> ids (n,) and their log pi (n,). It inverts the cumulative distribution, with one
    random number per row; torch.multinomial takes K."""
    logp = (logits / (temperature or 1)).log_softmax(-1)  # (n, K)
    if temperature == 0:
        token = logits.argmax(-1)
    else:
        # searchsorted needs sums that never fall. float32 sums on a GPU may, by rounding.
        cumulative = logp.exp().cumsum(-1, dtype=torch.float64)
        # The last sum may not be 1, so u is scaled by it. As u > 0, no id with pi = 0 is taken.
        u = 1 - torch.rand(len(logits), 1, device=logits.device)
        token = torch.searchsorted(cumulative, u * cumulative[:, -1:]).squeeze(1)
    return token, logp.gather(1, token[:, None]).squeeze(1)

# ---- Optimiser ----
class Optimizer(torch.optim.AdamW):
    """AdamW with warm-up and norm clipping. Weights are float32: with the 8 bits of bfloat16, a
    weight of .02 that moves by --lr 1e-6 would be rounded to where it was."""
    def __init__(self, model, lr, args, eps=1e-8):
        # PyTorch's default for the second beta, .999, would average over 1000 steps.
        super().__init__(model.parameters(), lr, (0.9, 0.95), eps, weight_decay=0.0, fused=True)
        self.full_lr, self.args = lr, args
        self.param_groups[0]["steps"] = 0  # state_dict saves what is in a group

    def clip_and_step(self, prefix=""):
        """Clip the gradient, take a step, clear the gradient. If the gradient is not finite, or 0,
        there is no step: momentum alone would move the weights. Returns statistics for `means`,
        whose names begin with `prefix`."""
        group = self.param_groups[0]
        norm = torch.nn.utils.clip_grad_norm_(group["params"], self.args.max_grad_norm).item()
        stats = {"skipped": (not math.isfinite(norm), 1), "zero_gradient": (norm == 0, 1)}
        if math.isfinite(norm) and norm > 0:
            group["steps"] += 1
            group["lr"] = self.full_lr * min(1, group["steps"] / max(1, self.args.warmup_steps))
            stats |= {"grad_norm": (norm, 1), "lr": (group["lr"], 1)}
            self.step()
        self.zero_grad()
        return {prefix + name: value for name, value in stats.items()}

# ---- Models ----
def load_policy(args, adapt=lambda policy, args: None):
    """Load --model and its tokenizer; refuse a model that would be trained wrongly. `adapt` may add
    LoRA, say, before the model takes memory on the GPU."""
    config = transformers.AutoConfig.from_pretrained(args.model)
    text = config.get_text_config()
    for name, value in vars(text).items():
        if isinstance(value, float) and ("drop" in name or "jitter" in name):
            setattr(text, name, 0.0)  # random activations would move the ratio from 1
    room = getattr(text, "max_position_embeddings", None) or math.inf
    assert args.max_prompt_tokens + args.max_new_tokens <= room, f"the model has {room} positions"
    policy = transformers.AutoModelForCausalLM.from_pretrained(
        args.model, config=config, dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(args.model)
    policy.generation_config.eos_token_id = stop_ids(policy, tokenizer) or None  # saved, too
    adapt(policy, args)
    policy.to(args.device).train()  # gradient checkpointing works in training mode only
    if args.gradient_checkpointing:
        policy.activation_checkpointing_enable()  # gradient_checkpointing_enable's new name
    torch.backends.cuda.enable_cudnn_sdp(False)  # it makes a slow plan for every new shape
    check_model(policy, tokenizer, args)
    if args.device == "cuda":
        use_graphs(policy, tokenizer, args)
    if args.dtype != "float32":
        # From here on the float32 head multiplies in TF32; check_model needs all bits.
        torch.backends.cuda.matmul.fp32_precision = "tf32"
    return policy, tokenizer

@torch.no_grad()
def check_model(model, tokenizer, args):
    """Stop if the log-probs of sampler or training pass are not those of the model's own forward
    pass, but for rounding: a model may change its logits, training may be random, a cache may not
    fit."""
    T, rng = 4, random.Random(0)
    longest = max(3, args.max_prompt_tokens + args.max_new_tokens - T)
    args = argparse.Namespace(**vars(args))
    args.dtype, args.max_new_tokens, args.temperature = "float32", T, 1.0
    vocabulary = range(model.get_input_embeddings().num_embeddings)
    problems = [{"prompt": rng.choices(vocabulary, k=length)} for length in (longest, 3)]
    rollout = generate(model, tokenizer, problems, 1, 1.0, args)
    found = {"sampler": rollout["sampled_logp"],
             "training pass": token_logprobs(model, rollout, args)}  # (2, t) both, t <= T
    model.eval()
    for i, start in enumerate(rollout["prompt_length"].tolist()):
        ids = rollout["ids"][i, :rollout["attention"][i].sum()]  # (c,)
        logits = model(ids[None], use_cache=False).logits[0, start - 1:-1]  # (t, K)
        expected = -cross_entropy(logits.float(), ids[start:], reduction="none")  # (t,)
        for name, logp in found.items():
            error = (logp[i, :len(expected)] - expected).abs().max()
            if not error < 1e-3:  # nan fails, too
                sys.exit(f"--model {args.model}: {type(model).__name__} is not supported: "
                         f"the log-probs of the {name} are off by {error:.2g}")
    model.train()

# ---- Problems ----
def load_problems(args, tokenizer):
    """Load the training and the held-out problems, the same with every --seed."""
    splits = read_dataset(args.dataset, args.subset)
    eval_split = args.eval_split or ("test" if len(splits) > 1 else args.split)
    assert {args.split, eval_split} <= splits.keys(), f"the splits are {', '.join(splits)}"
    train, held_out = splits[args.split], splits[eval_split]
    if args.split == eval_split:
        # Hold out a fifth. The question seeds the draw, so that equal ones stay together.
        draws = [random.Random(str(question)).random() for question in train[args.question_column]]
        held_out = train.select([i for i, x in enumerate(draws) if x < 0.2])
        train = train.select([i for i, x in enumerate(draws) if x >= 0.2])
    order = random.Random(0).sample(range(len(held_out)), len(held_out))
    held_out = prepare(held_out.select(order[:args.eval_problems]), tokenizer, args)
    held_out = sorted(held_out, key=lambda problem: len(problem["prompt"]))
    train = prepare(train, tokenizer, args)

    seen = {tuple(problem["prompt"]) for problem in train}
    shared = sum(tuple(problem["prompt"]) in seen for problem in held_out)
    print(f"{len(train)} training problems; {len(held_out)} held-out problems, {shared} of which "
          f"are training problems, too\nthe first prompt: {tokenizer.decode(train[0]['prompt'])!r}")
    return train, held_out

def read_dataset(source, subset=None):
    """Read a file, a directory or a data set of the hub: {split: datasets.Dataset}."""
    kind = source.rpartition(".")[2].replace("jsonl", "json")
    if kind in ("json", "csv", "parquet"):
        return datasets.load_dataset(kind, data_files=source)
    if subset is None and "main" in datasets.get_dataset_config_names(source):
        subset = "main"
    return datasets.load_dataset(source, subset)

def prepare(split, tokenizer, args):
    """Turn rows into problems: dicts with all columns, "question" and "answer" as texts, "prompt"
    as ids, and "row", the row as it was, as these four replace columns of the same name. A question
    is a text, or a chat that ends with the user's message. Rows left out are counted."""
    columns = {args.question_column, args.answer_column} - {""}
    assert columns <= set(split.column_names), f"the columns are {', '.join(split.column_names)}"
    problems, left_out = [], Counter()
    for row in progress(split.to_list(), "reading problems"):
        chat, answer = row[args.question_column], text_of(row.get(args.answer_column))
        if not isinstance(chat, list):
            chat = [{"role": "user", "content": text_of(chat)}]
        assert chat[-1]["role"] == "user", f"this chat may end with the answer: {chat}"
        if args.system_prompt and chat[0]["role"] != "system":
            chat = [{"role": "system", "content": args.system_prompt}, *chat]
        question, prompt = chat[-1]["content"], prompt_of(chat, tokenizer)
        answer = extract_answer(answer) or answer  # GSM8K's is a solution that ends in #### 72
        # An answer can be read if it earns its own reward.
        readable = not args.answer_column or math_reward(f"<answer>{answer}</answer>", answer)
        if not (question and readable):
            left_out["no question, or no answer that we can read"] += 1
        elif len(prompt) > args.max_prompt_tokens:
            left_out["over --max_prompt_tokens"] += 1
        else:
            own = {"question": question, "answer": answer, "prompt": prompt, "row": row}
            problems.append(row | own)
    if left_out:
        print("rows left out:", dict(left_out))
    return problems

def prompt_of(chat, tokenizer):
    """Turn a chat into ids: by the chat template, or else its texts, each with a newline, without
    the eos that some tokenizers put behind every text."""
    if tokenizer.chat_template:
        return tokenizer.apply_chat_template(chat, add_generation_prompt=True)["input_ids"]
    ids = tokenizer("".join(m["content"] + "\n" for m in chat))["input_ids"]
    return ids[:-1] if ids[-1] == tokenizer.eos_token_id else ids

def text_of(value):
    """Return a cell as a text, "" if it is empty; a float as a fraction, because no completion
    writes 1e+16 or 0.30000000000000004."""
    if isinstance(value, float) and math.isfinite(value):
        value = Fraction(f"{value:.15g}")
    return "" if value is None or value != value else str(value)

def batch_of(problems, step, count, seed):
    """Return the `count` problems of a step. All are shuffled, used up, shuffled anew, and so on,
    by seed and step alone."""
    n, used = len(problems), (step - 1) * count
    # The shuffles are one endless list. With n = 10 and count = 4, step 3 takes 8 to 11 of it.
    epochs = range(used // n, (used + count - 1) // n + 1)
    shuffled = [p for e in epochs for p in random.Random(f"{seed} {e}").sample(problems, n)]
    return shuffled[used % n:][:count]

# ---- Statistics ----
def means(logged):
    """Reduce what an update logged, a list of dicts, to one number per name: pairs (sum, count) to
    all sums over all counts; numbers, whose name ends in _max, to the maximum."""
    result = {}
    for name in dict.fromkeys(name for stats in logged for name in stats):
        values = [stats[name] for stats in logged if name in stats]
        if name.endswith("_max"):
            result[name] = float(max(values))
        else:
            sums, counts = zip(*values)
            result[name] = float(sum(sums) / sum(counts))
    return result

def rollout_stats(rollout, group_size):
    """Compute what is logged of a rollout, a dict of numbers. Sampler and training pass should
    differ in log pi by rounding alone: we log the root mean square of a token's difference, and of
    a completion's mean difference (GSPO's ratio has such means)."""
    mask, groups = rollout["mask"], rollout["rewards"].view(-1, group_size)
    computed = rollout["has_gradient"]  # (N,) the other rows have no old_logp
    compared = (mask > 0) & computed[:, None]  # (N, T)
    difference = (rollout["old_logp"] - rollout["sampled_logp"]) * mask  # (N, T)
    mean_difference = difference.sum(1) / mask.sum(1).clamp(min=1)  # (N,)
    stats = {
        "reward": groups.mean(),
        "completion_length": mask.sum(1).mean(),
        "truncated": 1 - rollout["finished"].float().mean(),
        "entropy": -(rollout["sampled_logp"] * mask).sum() / mask.sum(),
        "sampling_logp_difference": difference[compared].square().mean().sqrt(),
        "sampling_sequence_difference": mean_difference[computed].square().mean().sqrt()}
    if group_size > 1:
        stats["zero_variance_groups"] = (groups == groups[:, :1]).all(1).float().mean()
    if "ref_logp" in rollout:  # k3, whatever --kl is
        log_x = (rollout["ref_logp"] - rollout["old_logp"])[compared]  # (tokens,)
        stats["kl"] = (log_x.expm1() - log_x).mean()
    return {name: value.item() for name, value in stats.items() if not value.isnan()}

# ---- Evaluation ----
def evaluate(policy, tokenizer, problems, reward, args, step):
    """Compute accuracy on held-out problems, greedy and sampled; the samples' reward and length.
    Accuracy is the share of right answers, whatever the reward pays for. Write all completions, and
    print the first problem's."""
    def mean(records, name):
        return torch.tensor([float(record[name]) for record in records]).mean().item()
    torch.manual_seed(args.seed)  # the same seed at every evaluation
    sampled = attempts(policy, tokenizer, problems, reward, args.temperature, args)
    write_records(args.out, f"held-out-{step}", sampled)
    text = "{question}\n{completion}\n(reward {reward:g}, answer {answer})".format(**sampled[0])
    print("    | " + text.replace("\n", "\n    | "))
    stats = {"eval_reward": mean(sampled, "reward"),
             "eval_completion_length": mean(sampled, "tokens")}
    if args.answer_column:
        greedy = attempts(policy, tokenizer, problems, answer_reward, 0.0, args)  # only graded
        write_records(args.out, f"held-out-{step}-greedy", greedy)
        stats["eval_accuracy"] = mean(greedy, "right")
        stats["eval_sampled_accuracy"] = mean(sampled, "right")
    return stats

def attempts(policy, tokenizer, problems, reward, temperature, args):
    """Sample a completion of each problem, and return the records of all."""
    records, size = [], args.prompts * args.group_size
    for start in progress(range(0, len(problems), size), "evaluating"):
        part = problems[start:start + size]
        rollout = generate(policy, tokenizer, part, 1, temperature, args)
        rollout["rewards"] = rewards_of(reward, rollout)
        records += records_of(rollout)
    return records

def records_of(rollout):
    """List the completions of a rollout as dicts, one line of a file in completions/ each."""
    columns = zip(rollout["problems"], rollout["texts"], rollout["rewards"].tolist(),
                  rollout["mask"].sum(1).int().tolist(), rollout["finished"].tolist())
    return [{"question": problem["question"], "answer": problem["answer"], "completion": text,
             "right": math_reward(text, problem["answer"]) == 1 if problem["answer"] else None,
             "reward": reward, "tokens": tokens, "cut_off": not finished}
            for problem, text, reward, tokens, finished in columns]

def write_records(out, name, records):
    """Write completions/NAME.jsonl in `out`."""
    path = Path(out, "completions", f"{name}.jsonl")
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records))

# ---- Command line ----
INSTRUCTION = "Reason step by step, then give the final answer on a last line after ####."
TOY = str(Path(__file__).resolve().parent / "tests/toy")
# The defaults of a run without --model, which trains the toy; each script adds its --lr.
TOY_SETTINGS = dict(
    model=TOY, dataset=TOY, system_prompt="", max_prompt_tokens=64, max_new_tokens=48,
    micro_batch_tokens=4096, gradient_checkpointing=False, steps=20, eval_every=10, save_every=10,
    eval_problems=2560)

class HelpFormatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Shows a docstring as written, and defaults."""

def make_parser(script, doc):
    """Make a parser with the flags that all scripts share; --help shows `doc`. Returns it, and a
    function that adds a flag of the script's own."""
    parser = argparse.ArgumentParser(
        prog=Path(script).name, usage=argparse.SUPPRESS, description=doc,
        formatter_class=HelpFormatter, allow_abbrev=False)
    parser.set_defaults(script=parser.prog)
    add_own = parser.add_argument_group("objective and its optimisation").add_argument
    add = parser.add_argument_group("model, problems and run").add_argument
    cuda = torch.cuda.is_available()
    add("--model", help="directory or hub name; without it the toy, by TOY_SETTINGS")
    add("--dataset", help=".jsonl, .json, .csv, .parquet, directory or hub name")
    add("--subset", help="of a hub data set; if not given, main, if there is a main")
    add("--split", default="train", help="split to train on")
    add("--eval_split", help="split to evaluate on; if not given, test, or a fifth of a lone split")
    add("--question_column", default="question", help="with the question, a text or messages")
    add("--answer_column", default="answer", help='with the gold answer; "" if rewards need none')
    add("--system_prompt", default=INSTRUCTION, help="put first in a chat that has none")
    add("--max_prompt_tokens", type=int, default=512, help="longer prompts are left out")
    add("--max_new_tokens", type=int, default=1024, help="longest completion")
    add("--temperature", type=float, default=1.0, help="in samples and log-probs alike")
    add("--micro_batch_tokens", type=int, default=8192 if cuda else 1536,
        help="most tokens, padding counted, in one forward and backward pass")
    add("--warmup_steps", type=int, default=20, help="optimiser steps until full --lr")
    add("--max_grad_norm", type=float, default=1.0, help="larger gradients are cut to it")
    add("--gradient_checkpointing", action=argparse.BooleanOptionalAction, default=True,
        help="compute activations again: a third more work, far less memory")
    add("--device", choices=["cpu", "cuda"], default="cuda" if cuda else "cpu", help="cuda: a GPU")
    add("--dtype", choices=["float32", "bfloat16"], help="if not given, bfloat16 if a GPU has it")
    add("--steps", type=int, default=200, help="rollouts in the run")
    add("--seed", type=int, default=0, help="of samples and problem order")
    add("--out", help="output directory; if not given, a new one in runs")
    add("--resume", action="store_true", help="continue the run in --out, with its flags")
    add("--eval_every", type=int, default=20, help="steps between evaluations")
    add("--eval_problems", type=int, default=512, help="held-out problems")
    add("--save_every", type=int, default=20, help="steps between checkpoints")
    return parser, add_own

def parse(parser, argv, **toy_settings):
    """Parse `argv` twice: first to see whether a run is resumed or the toy trained, then with the
    flags of that run, or TOY_SETTINGS, as defaults."""
    args = parser.parse_args(argv)
    if args.resume and args.out is None:
        parser.error("--resume: needs the --out of the run")
    if args.resume:
        parser.set_defaults(**json.loads(Path(args.out, "args.json").read_text()))
    elif args.model is None:
        parser.set_defaults(**TOY_SETTINGS, **toy_settings)
    args = parser.parse_args(argv)

    if args.script != parser.prog:
        parser.error(f"--resume: the run in --out is one of {args.script}")
    for name, value in vars(args).items():
        may_be_0 = type(value) is float or name in ("steps", "seed", "warmup_steps", "ref_every")
        if type(value) in (int, float) and not value >= (0 if may_be_0 else 1):  # nan fails, too
            parser.error(f"--{name}: {value} is too small")
    if 0 in (args.temperature, args.max_grad_norm):
        parser.error("--temperature and --max_grad_norm: must be above 0")
    if args.minibatches > args.prompts:
        parser.error(f"--prompts {args.prompts} needs --minibatches {args.prompts} or fewer")
    if args.model == TOY:
        torch.set_num_threads(1)  # floating-point sums then do not depend on the number of cores
    # A T4 has no bfloat16, and would emulate it slowly.
    has_bfloat16 = args.device == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
    args.dtype = args.dtype or ("bfloat16" if has_bfloat16 else "float32")
    args.out = args.out or f"runs/{Path(parser.prog).stem}-{time.strftime('%m%d-%H%M%S')}"
    return args

# ---- Run ----
def start_run(args):
    """Make --out, which must be new but for --resume; write the flags to args.json, print them."""
    sys.stdout.reconfigure(line_buffering=True, errors="replace")  # a file's lines come at once
    transformers.logging.disable_progress_bar()
    Path(args.out).mkdir(parents=True, exist_ok=args.resume)
    temporary = Path(args.out, "temporary.json")
    temporary.write_text(json.dumps(vars(args), indent=1))
    temporary.replace(Path(args.out, "args.json"))  # a kill leaves no half of it
    print(*(f"{name}={value}" for name, value in vars(args).items()))

def save_checkpoint(out, step, tokenizer, policy, parts):
    """Save step-N in `out`. `parts`, {name: part}, is all else that changes: optimisers and other
    models. We write beside and then rename, so that a kill at any instant leaves a good checkpoint.
    Every policy stays, but `parts` (optimizer.pt) in the newest only."""
    temporary, final = Path(out, "temporary"), Path(out, f"step-{step}")
    shutil.rmtree(temporary, ignore_errors=True)
    policy.save_pretrained(temporary)
    tokenizer.save_pretrained(temporary)
    shutil.copy(Path(out, "metrics.jsonl"), temporary)
    torch.save({name: p.state_dict() for name, p in parts.items()}, temporary / "optimizer.pt")
    temporary.rename(final)
    for old in set(Path(out).glob("step-*/optimizer.pt")) - {final / "optimizer.pt"}:
        old.unlink()

def load_checkpoint(out, policy, parts):
    """Go back to the newest checkpoint in `out`, also in metrics.jsonl, and return its step. If
    there is none, empty metrics.jsonl and return 0."""
    start = max((int(path.name[5:]) for path in Path(out).glob("step-*")), default=0)
    if start == 0:
        Path(out, "metrics.jsonl").write_text("")
        return 0
    folder = Path(out, f"step-{start}")
    model = type(policy).from_pretrained(folder, dtype=torch.float32)
    policy.load_state_dict(model.state_dict())  # in place, as the optimiser holds these tensors
    states = torch.load(folder / "optimizer.pt", map_location="cpu")  # not twice on the GPU
    for name, part in parts.items():
        part.load_state_dict(states[name])
    shutil.copy(folder / "metrics.jsonl", out)
    return start

SHOWN = "reward completion_length entropy kl clip_frac explained_variance seconds".split()

def log(args, step, stats, rollout=None):
    """Write a step's statistics to metrics.jsonl and its completions to completions/. Print the
    commonest statistics, and what looks wrong."""
    if args.device == "cuda":
        stats["peak_memory_gb"] = torch.cuda.max_memory_allocated() / 1e9
    with Path(args.out, "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": step} | stats) + "\n")
    if rollout:
        write_records(args.out, f"step-{step}", records_of(rollout))
    shown = [name for name in stats if name in SHOWN or name.startswith("eval_")]
    print(f"step {step}/{args.steps}", *(f"  {name} {stats[name]:.3g}" for name in shown))
    if rollout and (rollout["rewards"] == rollout["rewards"][0]).all():
        print("warning: all rewards of this rollout are equal")
    if stats.get("truncated", 0) > 0.5:
        print("warning: over half of the completions are cut off by --max_new_tokens")
    if stats.get("skipped") or stats.get("value_skipped"):
        print("warning: a gradient was not finite, its step is skipped: lower --lr")
    if stats.get("sampling_logp_difference", 0) > 0.1:
        print("warning: sampler and training pass differ in log-probs: a mistake in the code?")

# ---- CUDA graphs ----
# You may skip this section, which is for speed on a GPU. By our count Python needs longer to launch
# a token's kernels than the GPU to run them; not timed. A CUDA graph records and replays them.
class FixedCache(transformers.StaticCache):
    """A cache with spare columns, as a graph's tensors cannot grow. A tensor counts its tokens."""
    update = Cache.update

class RecordedReader(Reader):
    """A Reader that replays a graph. A replay finds its inputs in the tensors of the recording."""
    rows = 0  # of the recording

    def read(self, ids, attention, positions):
        """Read prompts as Reader does. Single tokens are replayed."""
        if ids.shape == attention.shape:  # the prompts: there is nothing before them
            self.cache = FixedCache(config=self.model.config, max_cache_len=ids.shape[1])
            return super().read(ids, attention, positions)
        spare = self.cache.get_max_length() - attention.shape[1]
        if len(ids) == self.rows and spare >= 0:
            for recorded, new in zip(self.inputs, (ids, pad(attention, (0, spare)), positions)):
                recorded.copy_(new)
            self.graph.replay()  # writes self.hidden
            return self.hidden
        # First token, rows dropped or cache full: a new graph, and some 200 spare columns.
        columns = (attention.shape[1] // 64 + 4) * 64
        for layer in self.cache.layers:
            more = (0, 0, 0, columns - layer.max_cache_len)
            layer.keys, layer.values = pad(layer.keys, more), pad(layer.values, more)
            layer.max_cache_len = columns
        self.rows, self.graph = len(ids), torch.cuda.CUDAGraph()
        wide = pad(attention, (0, columns - attention.shape[1]))
        self.inputs = ids.clone(), wide, positions.clone()
        # This call, which is not recorded, reads. A library may allocate memory in its first call.
        hidden = super().read(*self.inputs)
        with torch.cuda.graph(self.graph):  # records kernels, runs none
            self.hidden = super().read(*self.inputs)
        return hidden

def use_graphs(model, tokenizer, args):
    """Let `sample` use graphs, if they work with this model."""
    if any(Cache(config=model.config).is_sliding):
        return  # a sliding-window layer counts its tokens in Python, which a replay does not run
    model.reader_class = RecordedReader
    try:
        check_model(model, tokenizer, args)
    except (Exception, SystemExit) as error:
        del model.reader_class
        print(f"warning: sampling without CUDA graphs, with which this model fails: {error}")

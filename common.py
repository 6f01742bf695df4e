"""What the three scripts share: everything that is not the algorithm.

Read the first six sections along with a script: they follow one step. You can stop when you reach
the Problems section. The rest is for looking things up.

Shapes: P prompts per step, G completions per prompt, N = P*G rows; S tokens in the longest prompt,
T in the longest completion, C in the longest row (prompt plus completion); M tokens to train on; K
tokens in the vocabulary; H the hidden size. A minibatch has a smaller N, a micro-batch a smaller
N, T, and C. While sampling, n of the N rows are still in use.
"""
import argparse
import glob
import json
import math
import random
import re
import sys
from datetime import datetime
from fractions import Fraction
from functools import lru_cache
from itertools import accumulate
from pathlib import Path

import datasets
import torch
import transformers
from torch.nn.functional import cross_entropy, pad
from torch.nn.utils.rnn import pad_sequence
from torch.utils.checkpoint import checkpoint
from tqdm import tqdm
from transformers.cache_utils import DynamicLayer, StaticLayer

TOY = str(Path(__file__).resolve().parent / "tests/toy")  # the built-in model and its problems

# ---- Sampling ----
@torch.no_grad()
def generate(model, tokenizer, problems, group_size, args):
    """Sample group_size completions for each of P problems, as a rollout. The scripts add rewards,
    (N,); returns, old_values, old_logp, and ref_logp, (N, T); and adv, (N, 1) or (N, T)."""
    stop = torch.tensor(model.generation_config.eos_token_id, device=args.device)  # see stop_ids
    model.eval()  # with checkpointing, some models don't use the cache in training mode
    # One context for all tokens, so that each weight is cast to bfloat16 only once.
    with torch.autocast(args.device, torch.bfloat16, args.dtype == "bfloat16"):
        tokens, logp = sample(model, [p["prompt"] for p in problems], group_size, stop, args)
    model.train()
    is_stop = torch.isin(tokens, stop)  # (N, max_new_tokens)
    mask = (is_stop.cumsum(1) - is_stop.long()) == 0  # no stop token before this one
    lengths, finished = mask.sum(1), is_stop.any(1)  # both (N,)
    mask = mask[:, :lengths.max()].float()  # (N, T)
    completions = [row[:n] for row, n in zip(tokens.tolist(), lengths.tolist())]
    without_stop = [c[:-1] if ended else c for c, ended in zip(completions, finished.tolist())]
    problems = [p for p in problems for _ in range(group_size)]  # now N of them
    rows = [torch.tensor(p["prompt"] + c) for p, c in zip(problems, completions)]
    return {
        "problems": problems,  # N, one per row
        "texts": tokenizer.batch_decode(without_stop),  # N strings; special tokens may mark answers
        # (N, C) prompt, completion, padding. Token t of a completion is in column prompt_length + t
        "ids": pad_sequence(rows, batch_first=True).to(model.device),
        "prompt_length": torch.tensor([len(p["prompt"]) for p in problems], device=model.device),
        "completion_length": lengths,  # (N,) tokens, with the stop token
        "finished": finished,  # (N,) True if a stop token ended it
        "mask": mask,  # (N, T) 1.0 on the tokens to train on; set it to 0 on a tool's output
        "skip": torch.zeros_like(finished),  # (N,) True on rows to skip: see collect
        "sampled_logp": logp[:, :mask.shape[1]] * mask}  # (N, T) log pi, from the sampler

def sample(model, prompts, group_size, stop, args):
    """Sample completions. Returns their tokens and log pi, both (N, max_new_tokens); what follows a
    stop token is noise. Prompts are padded on the left: all rows write to one cache column."""
    cache = Cache(config=model.config)  # transformers', but for the keys' dtype

    def read(ids, attention):
        """Read new columns, ids, into the cache. attention spans all columns, old and new: it is 1
        on tokens, 0 on padding. Returns the hidden states of the last column, (n, H)."""
        positions = (attention.cumsum(1) - 1).clamp(min=0)  # the number of tokens before each
        return model.base_model(
            input_ids=ids, attention_mask=attention, position_ids=positions[:, -ids.shape[1]:],
            cache=cache, use_cache=True).last_hidden_state[:, -1]  # past_key_values before 5.24

    rows = [torch.tensor(prompt, device=model.device) for prompt in prompts]
    ids = pad_sequence(rows, batch_first=True, padding_value=-1, padding_side="left")  # (P, S)
    attention = (ids >= 0).long()
    # Read each prompt once, then copy it for its completions.
    active = torch.arange(len(prompts) * group_size, device=model.device)  # (n,) rows in use, now N
    owner = active // group_size  # (N,) the prompt of each row
    hidden = read(ids.clamp(min=0), attention)[owner]  # (N, H)
    cache.reorder_cache(owner)  # selects rows: from P to N
    attention = pad(attention, (0, args.max_new_tokens), value=1)[owner]  # 1 on what is to come
    read_token = Recorded(read, cache) if args.cuda_graphs and can_record(cache) else read
    tokens = torch.zeros(len(active), args.max_new_tokens, dtype=torch.long, device=model.device)
    logp = torch.zeros(tokens.shape, device=model.device)
    for t in tqdm(range(args.max_new_tokens), "sampling", leave=False, disable=None, delay=2):
        tokens[active, t], logp[active, t] = draw(head_logits(model, hidden), args.temperature)
        # Drop finished rows, but not often: dropping copies the cache, counting waits for the GPU.
        if t % 4 == 0:
            kept = (~torch.isin(tokens[active, :t + 1], stop).any(1)).nonzero().squeeze(1)
            if len(kept) == 0:
                break
            if len(kept) < len(active) / 2:
                cache.reorder_cache(kept)
                active = active[kept]
        read_so_far = attention[active, :ids.shape[1] + t + 1]
        hidden = read_token(tokens[active, t:t + 1], read_so_far)  # (n, H)
    return tokens, logp

def draw(logits, temperature):
    """Sample one id per row from pi = softmax(logits / temperature), (n, K). Returns the ids and
    their log pi, both (n,). (torch.multinomial is slower.)"""
    logp = (logits / temperature).log_softmax(-1)  # (n, K)
    # searchsorted needs sums that never decrease. Rounding in float32 would break that on a GPU.
    cumulative = logp.exp().cumsum(-1, dtype=torch.float64)
    # Take the first id whose sum reaches u times the last sum (almost 1). As u > 0, its pi > 0.
    u = 1 - torch.rand(len(logits), 1, device=logits.device)
    token = torch.searchsorted(cumulative, u * cumulative[:, -1:])  # (n, 1)
    return token.squeeze(1), logp.gather(1, token).squeeze(1)

# ---- Log-probabilities ----
def token_logprobs(model, batch, args, chunk=2 ** 26):
    """Compute log pi of the tokens whose mask is 1, where pi = softmax(logits / --temperature), in
    float32: (N, T), 0 where the mask is 0. At most `chunk` of the M*K logits exist at a time
    (0.27 GB); the backward pass computes them again."""
    def of_chunk(hidden, target):
        logits = head_logits(model, hidden) / args.temperature
        return -cross_entropy(logits, target, reduction="none")
    index, hidden, target = completion_states(model, batch, args)
    tokens = chunk // len(model.get_output_embeddings().weight)  # per chunk
    chunks = zip(hidden.split(tokens), target.split(tokens))
    logp = torch.cat([checkpoint(of_chunk, h, y, use_reentrant=False) for h, y in chunks])  # (M,)
    return logp.new_zeros(batch["mask"].shape).index_put(index, logp)

def completion_states(model, batch, args):
    """Run the model's backbone. For the M tokens whose mask is 1, return their positions in (N, T),
    the hidden states one column to the left, which predict them, (M, H), and their ids, (M,)."""
    i, t = batch["mask"].nonzero(as_tuple=True)  # both (M,): a position in (N, T)
    column = batch["prompt_length"][i] + t  # (M,) the same token's column in (N, C)
    # No attention mask is needed: padding is on the right, where causal attention never looks.
    # Sampling keeps a weight's bfloat16 copy for the next token. Here it is used once.
    with torch.autocast(args.device, torch.bfloat16, args.dtype == "bfloat16", cache_enabled=False):
        hidden = model.base_model(input_ids=batch["ids"], use_cache=False).last_hidden_state
    return (i, t), hidden[i, column - 1], batch["ids"][i, column]  # our only shift by one

def head_logits(model, hidden):
    """Compute logits from hidden states, (M, H) -> (M, K), in float32 (TF32 on a GPU, unless
    --dtype is float32): bfloat16 would round a logit of 20 by up to 0.06."""
    head = model.get_output_embeddings()
    with torch.autocast(hidden.device.type, enabled=False):
        return soft_capped(head(hidden.to(head.weight.dtype)), model.config)  # Gemma 2's are capped

# ---- Batching ----
def minibatches(rollout, count, group_size):
    """Split the tensors of a rollout into `count` parts of about equal size, and
    add "row", (N,), the index of each row. Groups stay together: their advantages sum to 0."""
    tensors = {name: value for name, value in rollout.items() if torch.is_tensor(value)}
    tensors["row"] = torch.arange(len(rollout["ids"]), device=rollout["ids"].device)
    for rows in tensors["row"].view(-1, group_size).tensor_split(count):
        yield {name: value[rows.flatten()] for name, value in tensors.items()}

def micro_batches(batch, tokens):
    """Split a batch into micro-batches of at most `tokens` tokens with padding, or of one row. Rows
    are sorted by length, and trimmed: ids to C, other matrices to T. Rows to skip are left out."""
    batch = {name: value[~batch["skip"]] for name, value in batch.items()}
    lengths = batch["prompt_length"] + batch["completion_length"]
    order = lengths.argsort(descending=True)
    while len(order) > 0:
        longest = int(lengths[order[0]])
        fit = max(1, tokens // longest)
        part = {name: value[order[:fit]] for name, value in batch.items()}
        T = int(part["completion_length"].max())
        trimmed = {name: value[:, :T] for name, value in part.items() if value.dim() > 1}
        yield part | trimmed | {"ids": part["ids"][:, :longest]}
        order = order[fit:]

def over_batches(function, model, rollout, args):
    """Apply `function`, such as token_logprobs, to a whole rollout, (N, T), in the micro-batches of
    update, so that bfloat16 rounds alike and w starts at 1. Rows to skip get 0."""
    result = torch.zeros_like(rollout["mask"])
    for minibatch in minibatches(rollout, args.minibatches, args.group_size):
        for b in micro_batches(minibatch, args.micro_batch_tokens):
            result[b["row"], :b["mask"].shape[1]] = function(model, b, args)
    return result

# ---- Optimizer ----
def clip_and_step(optimizer, lr, args):
    """Clip the gradient, take a step with a warmup to `lr`, zero the gradient. Returns statistics.
    No step is taken if the gradient is not finite, or is 0, where momentum would move weights."""
    group = optimizer.param_groups[0]
    norm = torch.nn.utils.clip_grad_norm_(group["params"], args.max_grad_norm).item()
    stats = {"skipped": (not math.isfinite(norm), 1), "zero_gradient": (norm == 0, 1)}
    if 0 < norm < math.inf:
        group["steps"] = group.get("steps", 0) + 1  # state_dict saves what is in the group
        group["lr"] = lr * min(1, group["steps"] / max(1, args.warmup_steps))
        stats |= {"grad_norm": (norm, 1), "lr": (group["lr"], 1)}
        optimizer.step()
    optimizer.zero_grad()
    return stats

# ---- Statistics ----
def means(logged):
    """Reduce a list of dicts of (sum, count) pairs to total sum / total count for each name."""
    pairs = {}
    for stats in logged:
        for name, pair in stats.items():
            pairs.setdefault(name, []).append(pair)
    return {name: float(sum(x for x, _ in p) / sum(n for _, n in p)) for name, p in pairs.items()}

def rollout_stats(rollout, args):
    """Compute the logged statistics of a rollout. entropy is the mean of -log pi over all sampled
    tokens. sampling_logp_difference, the RMS of training minus sampling, must be mere rounding."""
    lengths = rollout["completion_length"]  # (N,)
    groups = rollout["rewards"].view_as(lengths).view(-1, args.group_size)  # (P, G), if there are N
    assert groups.isfinite().all(), "a reward is not finite"
    stats = {"reward": groups.mean(), "completion_length": lengths.float().mean(),
             "truncated": 1 - rollout["finished"].float().mean(),
             "entropy": -rollout["sampled_logp"].sum() / lengths.sum()}
    if args.group_size > 1:
        stats["zero_variance_groups"] = (groups == groups[:, :1]).all(1).float().mean()
    trained = (rollout["mask"] > 0) & ~rollout["skip"][:, None]  # (N, T) with an old_logp
    if trained.any():  # the mean over no tokens would be nan
        difference = (rollout["old_logp"] - rollout["sampled_logp"])[trained]  # (M,)
        rms = stats["sampling_logp_difference"] = difference.square().mean().sqrt()
        limit = 0.3 if args.dtype == "bfloat16" else 1e-3  # ten times rounding
        assert rms < limit, f"sampling differs from training by {rms:.2g}: see the manual"
        if "ref_logp" in rollout:  # always k3, whatever the script trains with
            log_x = (rollout["ref_logp"] - rollout["old_logp"])[trained]  # (M,)
            stats["kl"] = (log_x.expm1() - log_x).mean()
    return {name: x.item() for name, x in stats.items()}

# ---- Evaluation ----
@torch.no_grad()
def evaluate(policy, tokenizer, problems, reward, args):
    """Sample one completion per held-out problem, as in training. Print the first, return means."""
    torch.manual_seed(args.seed)  # the same seed in every evaluation
    texts, rewards, lengths = [], [], []
    size = args.prompts * args.group_size  # as in training
    for start in range(0, len(problems), size):
        rollout = generate(policy, tokenizer, problems[start:start + size], 1, args)
        texts += rollout["texts"]
        rewards += [float(r) for r in reward(rollout["problems"], rollout["texts"])]
        lengths += rollout["completion_length"].tolist()
    assert len(rewards) == len(texts), "a reward returns a number per completion"
    question, answer = problems[0]["question"], problems[0]["answer"]
    first = f"{question}\n{texts[0]}\n(reward {rewards[0]:g}, answer {answer})"
    print("    | " + first.replace("\n", "\n    | "))
    stats = {"eval_reward": rewards, "eval_completion_length": lengths}
    if args.answer_column:
        stats["eval_accuracy"] = answer_reward(problems, texts)  # whatever the reward is
    return {name: torch.tensor(x).float().mean().item() for name, x in stats.items()}

# ---- Problems ----
def load_problems(args, tokenizer):
    """Load the training and held-out problems, which are the same for every --seed."""
    splits = read_dataset(args.dataset, args.subset)
    train = prepare(splits[args.split], tokenizer, args)
    if len(splits) > 1:
        held_out = prepare(splits[args.eval_split], tokenizer, args)
    else:  # such as a file: hold out a fifth
        held_out = [p for p in train if random.Random(p["question"]).random() < 0.2]
    taken = {p["question"] for p in held_out}
    train = [p for p in train if p["question"] not in taken]  # no problem is in both
    held_out = random.Random(0).sample(held_out, len(held_out))[:args.eval_problems]
    held_out.sort(key=lambda p: len(p["prompt"]))  # to reduce padding
    print(f"of {splits.num_rows} rows, {len(train)} for training, {len(held_out)} held out")
    assert train and held_out, "nothing is left to train on or to hold out"
    print(f"prompt: {tokenizer.decode(train[0]['prompt'])!r}, gold answer: {train[0]['answer']!r}")
    return train, held_out

def read_dataset(source, subset=None):
    """Read a file, a directory or a dataset from the Hub: {split: datasets.Dataset}."""
    kind = source.rpartition(".")[2].replace("jsonl", "json")
    if kind in ("json", "csv", "parquet"):
        return datasets.load_dataset(kind, data_files=glob.escape(source))
    return datasets.load_dataset(source, subset)

def prepare(split, tokenizer, args):
    """Turn rows into problems: dicts of all columns, with "question" as text (a chat's as a whole),
    "prompt" as ids, and "answer". Rows that lack one of these, or are too long, are dropped."""
    problems, unknown = [], {tokenizer.unk_token_id} - {tokenizer.eos_token_id}  # same in GPT-2
    for row in split.to_list():
        row = {k: "" if x is None or x != x else x for k, x in row.items()}  # nan is not itself
        chat, answer = row[args.question_column], row.get("answer", "")
        if args.answer_column:
            gold = row[args.answer_column]  # a float is exact if it is short
            assert isinstance(gold, (str, int)) or re.fullmatch(r"-?[\d.]{1,15}", str(gold)), (
                f"{gold!r} may not be exact: give gold answers as strings")
            answer = extract_answer(f"<answer>{gold}</answer>")  # the last mark wins: GSM8K's ####
            if not canonical(answer) or min(answer) < " ":  # JSON reads \frac as a form feed
                continue
        chat = chat if isinstance(chat, list) else [{"role": "user", "content": chat}]
        if not chat or not chat[-1]["content"]:
            continue
        assert chat[-1]["role"] != "assistant", f"the prompt would hold the answer: {chat[-1]}"
        question = "\n".join(message["content"] or "" for message in chat)  # fails if not text
        if args.system_prompt and chat[0]["role"] != "system":
            chat = [{"role": "system", "content": args.system_prompt}, *chat]
        prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True)["input_ids"]
        if 0 < len(prompt) <= args.max_prompt_tokens:
            assert not unknown & set(prompt), f"unknown tokens: {tokenizer.decode(prompt)!r}"
            problems.append(row | {"question": question, "prompt": prompt, "answer": answer})
    return problems

def batch_of(problems, step, count, seed):
    """Return a step's `count` problems: the next of an endless list, shuffle after shuffle."""
    n, start = len(problems), (step - 1) * count
    first, last = start // n, (start + count - 1) // n  # which shuffles; usually one
    shuffles = [random.Random(f"{seed} {k}").sample(problems, n) for k in range(first, last + 1)]
    return sum(shuffles, [])[start - first * n:][:count]

# ---- Command line ----
class HelpFormatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Shows the docstring as written, and defaults."""

def at_least(least, kind):
    """Make an argparse type: a finite number >= `least`."""
    def number(text):
        if least <= kind(text) < math.inf:
            return kind(text)
        raise argparse.ArgumentTypeError(f"{text} is below {least} or not finite")
    return number

count, positive, amount = at_least(1, int), at_least(1e-30, float), at_least(0, float)

def make_parser(file, doc):
    """Make a parser with the flags that all scripts share; --help shows `doc`."""
    parser = argparse.ArgumentParser(
        prog=Path(file).name, usage="python %(prog)s [flags]", description=doc,
        formatter_class=HelpFormatter, allow_abbrev=False)
    add, cuda = parser.add_argument, torch.cuda.is_available()
    bfloat16 = cuda and torch.cuda.is_bf16_supported(including_emulation=False)  # not on a T4
    add("--model", help="directory or Hub name; without it, the toy and its flags")
    add("--dataset", help=".jsonl, .json, .csv, .parquet, directory or Hub name")
    add("--subset", help="configuration of a Hub dataset, such as main")
    add("--split", default="train", help="split to train on")
    add("--eval_split", default="test", help="split to evaluate on; a lone split is divided")
    add("--question_column", default="question", help="column of questions: strings or chats")
    add("--answer_column", default="answer", help='column of gold answers; "" if none are needed')
    add("--system_prompt", help="used unless a chat brings its own",
        default="Reason step by step, then give the final answer on a last line after ####.")
    add("--max_prompt_tokens", type=count, default=512, help="longer prompts are dropped")
    add("--max_new_tokens", type=count, default=1024, help="maximum length of a completion")
    add("--temperature", type=positive, default=1.0, help="for both sampling and log-probs")
    add("--micro_batch_tokens", type=count, default=8192 if cuda else 1536, help="tokens per pass")
    add("--warmup_steps", type=int, default=20, help="optimizer steps of warmup to --lr")
    add("--max_grad_norm", type=positive, default=1.0, help="clip the gradient norm to this")
    yes_or_no = {"action": argparse.BooleanOptionalAction, "default": True}
    add("--gradient_checkpointing", **yes_or_no, help="more compute, far less memory")
    add("--cuda_graphs", **yes_or_no, help="for faster sampling on a GPU")
    add("--device", choices=["cpu", "cuda"], default="cuda" if cuda else "cpu", help="CPU or GPU")
    add("--dtype", choices=["float32", "bfloat16"], default="bfloat16" if bfloat16 else "float32",
        help="for matrix products, except in the LM head; weights are float32")
    add("--steps", type=int, default=200, help="number of steps; 0 only evaluates")
    add("--seed", type=int, default=0, help="seed of sampling and of the order of problems")
    add("--out", default=f"runs/{Path(file).stem}-{datetime.now():%m%d-%H%M%S-%f}", help="folder")
    add("--resume", action="store_true", help="continue the run in --out; new flags override it")
    add("--eval_every", type=count, default=20, help="steps between evaluations")
    add("--eval_problems", type=count, default=512, help="maximum number of held-out problems")
    add("--save_every", type=count, default=20, help="steps between checkpoints")
    return parser

def parse(parser, argv, **toy):
    """Parse `argv`; for a resumed run, first what it was given before, so that new flags win.
    Without --model, the toy's settings, in tests/toy/args.json and `toy`, are the defaults."""
    given = sys.argv[1:] if argv is None else argv
    args = parser.parse_args(given)  # for --out and --resume
    if args.resume != Path(args.out).exists():
        parser.error("--resume needs an --out that exists, a new run one that does not")
    if args.resume:
        run = json.loads(Path(args.out, "args.json").read_text())
        assert run["script"] == parser.prog, f"the run in --out is one of {run['script']}"
        given = run["given"] + given
    if parser.parse_args(given).model is None:
        toy |= json.loads(Path(TOY, "args.json").read_text())
        parser.set_defaults(model=TOY, dataset=TOY, **toy)
    args = parser.parse_args(given)
    args.cuda_graphs = args.cuda_graphs and args.device == "cuda"
    if args.dataset is None:
        parser.error("--model needs a --dataset")
    if args.minibatches > args.prompts:
        parser.error("--minibatches must be at most --prompts: groups stay together")
    args.script, args.given = parser.prog, given  # for --resume
    return args

# ---- Run ----
def load_policy(args):
    """Load --model and its tokenizer."""
    if args.model == TOY:
        torch.set_num_threads(1)  # more would change numbers
    torch.backends.cuda.matmul.fp32_precision = "ieee" if args.dtype == "float32" else "tf32"
    policy = load_model(args).train()  # checkpointing needs training mode
    if args.gradient_checkpointing:
        policy.activation_checkpointing_enable()  # its new name
    # This class takes tokenizer.json as it is. AutoTokenizer may replace parts of it.
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(args.model)
    policy.generation_config.eos_token_id = stop_ids(policy, tokenizer)
    policy.generation_config.do_sample = True  # else saving a config with a temperature fails
    return policy, tokenizer

def open_run(args, parts):
    """Make --out or, with --resume, load its checkpoint into `parts`. Returns the step."""
    print(*(f"{name}={value}" for name, value in vars(args).items()))
    out, state = Path(args.out), {"step": 0, "metrics": ""}
    (out / "completions").mkdir(parents=True, exist_ok=args.resume)
    (out / "metrics.jsonl").touch()
    # Step 0 is saved before it is logged: with metrics but without state.pt, loading has to fail.
    if (out / "state.pt").exists() or (out / "metrics.jsonl").read_text():
        state = torch.load(out / "state.pt", map_location="cpu")  # no second copy on the GPU
        for name, part in parts.items():
            part.load_state_dict(state[name])
    (out / "metrics.jsonl").write_text(state["metrics"])  # drops later steps
    (out / "args.json").write_text(json.dumps(vars(args), indent=1))
    return state["step"]

def save_checkpoint(out, step, tokenizer, policy, parts):
    """Save the policy in step-N, and `parts` ({name: model or optimizer}) and the metrics in
    state.pt, for --resume. A kill leaves the old state.pt or the new one."""
    for saved in (policy, tokenizer):
        saved.save_pretrained(Path(out, f"step-{step}"))
    state = {"step": step, "metrics": Path(out, "metrics.jsonl").read_text()}
    state |= {name: part.state_dict() for name, part in parts.items()}
    torch.save(state, Path(out, "temporary.pt"))
    Path(out, "temporary.pt").replace(Path(out, "state.pt"))

def log(args, step, stats, rollout=None):
    """Write a step's statistics and completions to files, and print the main ones."""
    with Path(args.out, "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": step} | stats) + "\n")
    shown = {k: x for k, x in stats.items() if not re.match("loss|lr|grad_norm|zero_|value_", k)}
    print(f"step {step}/{args.steps}", *(f"  {k} {x:.3g}" for k, x in shown.items()), flush=True)
    if rollout:
        rows = zip(rollout["problems"], rollout["texts"], rollout["rewards"].tolist())
        texts = [{"question": p["question"], "completion": text, "answer": p["answer"], "reward": r}
                 for p, text, r in rows]
        path = Path(args.out, "completions", f"step-{step}.json")
        path.write_text(json.dumps(texts, indent=1, default=str))

# ---- Other people's models ----
def load_model(args):
    """Load --model in float32: in bfloat16, adding 1e-6 to a weight of 0.02 changes nothing."""
    config = transformers.AutoConfig.from_pretrained(args.model)
    text_config = config.get_text_config()
    for name, value in list(vars(text_config).items()):
        if "drop" in name and isinstance(value, float):
            setattr(text_config, name, 0.0)  # dropout would move the ratio away from 1
    for name in ("max_position_embeddings", "original_max_position_embeddings"):  # Phi-3 has both
        room = getattr(text_config, name, None) or math.inf
        assert args.max_prompt_tokens + args.max_new_tokens <= room, f"too long: {name} is {room}"
    model = transformers.AutoModelForCausalLM.from_pretrained(
        args.model, config=config, dtype=torch.float32).to(args.device)
    torch.backends.cuda.enable_cudnn_sdp(False)  # cuDNN is slow to plan for each new shape
    # We apply the LM head ourselves. Some models do more: Cohere's scale the logits.
    ids = torch.arange(8, device=args.device)[None]
    ours = head_logits(model, model.base_model(ids, use_cache=False).last_hidden_state)
    own = model(ids, use_cache=False).logits
    assert (ours - own).abs().max() < 1e-3, f"{type(model).__name__} does more than its LM head"
    return model

def soft_capped(logits, config):
    """Squeeze logits into (-cap, cap), if the model does, as Gemma 2 does."""
    cap = getattr(config.get_text_config(), "final_logit_softcapping", None)
    return cap * (logits / cap).tanh() if cap else logits

def stop_ids(model, tokenizer):
    """Return the stop tokens: EOS, and what ends a turn (in Qwen2.5's base models, another one)."""
    eos = model.generation_config.eos_token_id
    stops = {tokenizer.eos_token_id, *(eos if isinstance(eos, list) else [eos])} - {None}
    chat = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "ANSWER"}]
    after = tokenizer.apply_chat_template(chat, tokenize=False).rpartition("ANSWER")[2]
    # The first added token ends the turn, as in "<|im_end|>\n". (Gemma's include newlines.)
    added = {i for i, token in tokenizer.added_tokens_decoder.items() if str(token).strip()}
    ends = [i for i in tokenizer.encode(after, add_special_tokens=False) if i in added]
    return sorted(stops | set(ends[:1]))

class Cache(transformers.DynamicCache):
    """A KV cache that casts keys to the values' dtype: under autocast, RoPE makes them float32."""
    def update(self, keys, values, *args, **kwargs):
        return super().update(keys.to(values.dtype), values, *args, **kwargs)

# ---- CUDA graphs ----
# Launching a token's kernels takes longer than running them. A CUDA graph launches all at once (5
# times as fast at 1.5B on an H100), but always on the same tensors: the cache needs spare columns.
def can_record(cache):  # a sliding window counts its tokens in Python: a replay would not
    return all(type(layer) is DynamicLayer for layer in cache.layers)

class Recorded:
    """Reads one token per row, as `read` in `sample` does, but by replaying a recorded graph."""
    def __init__(self, read, cache):
        self.read, self.layers = read, cache.layers  # the cache's own list
        self.rows = self.room = 0  # rows in the recording, and columns in its cache

    def __call__(self, ids, attention):
        rows, width = attention.shape
        if rows == self.rows and width <= self.room:
            self.ids[:], self.attention[:, :width] = ids, attention
            self.graph.replay()  # writes self.hidden
            return self.hidden
        # For the first token, fewer rows, or a full cache: widen the cache, and record.
        self.rows, self.room = rows, (width // 64 + 4) * 64  # 193 to 256 spare columns
        for i, old in enumerate(self.layers):  # copy the filled columns; `read` adds the new one
            self.layers[i] = StaticLayer(self.room)  # its length is a tensor: a replay advances it
            self.layers[i].update(old.keys[:, :, :width - 1], old.values[:, :, :width - 1])
        # read's positions count the mask: after zeros, the last is still the new token's.
        self.ids, self.attention = ids.clone(), pad(attention, (0, self.room - width))
        hidden = self.read(self.ids, self.attention)  # a first call may allocate memory
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):  # records kernels without running them
            self.hidden = self.read(self.ids, self.attention)
        return hidden

# ---- Math answers ----
# Both answers are rewritten into a canonical form and compared as strings. There is no algebra and
# no conversion: 2+3 is not 5, 10% is not 0.1. Units at the end are dropped: 5 cm, and even 5 m.
REWRITTEN = [  # patterns and what they become, in order
    (r"[\u200b-\u200f\u2060\ufeff]", ""), (r"\\(left|right|displaystyle)|\\[!,:;]|\\?[$%]|~", ""),
    (r"\^({\\circ}|\\circ)|°", ""),  # degrees
    (r"[−–‐‑]", "-"), (r"[·⋅×]|\\cdot|\\times", "*"), (r"π", "pi"), (r"\\[dt]frac", r"\\frac"),
    (r"≤|\\leq?(slant)?", "<="), (r"≥|\\geq?(slant)?", ">="), (r"\\\\|;", ","), (r"\{,}", ","),
    (r"\\(text\w*|mbox|math\w*) ?{([^{}]*)}", r" \2 "),  # \text{ cm} -> cm
    # Words become lower case if one has three letters, or the first is no: YES -> yes; CO stays
    (r"^(?=.*[a-zA-Z]{3}|no|No|NO)[a-zA-Z]{2,}(,? [a-zA-Z]{2,})*\.?$", lambda m: m[0].lower()),
    (r"\\ ?", ""),  # \sqrt2 -> sqrt2
    (r"\b(and|or)\b(?=[^<>]*$)", ","),  # 4 and 5 -> 4 , 5; but not x<1 and x>4
    (r"sqrt\((\w+)\)", r"sqrt{\1}"),  # sqrt(3) -> sqrt{3}
    (r"{ ?(\w) ?}", r"\1"),  # sqrt{3} -> sqrt3
    # frac12 -> 1/2, frac{-1}{20} -> -1/20; but sqrtfrac12, 2^frac12 and log_2frac12 stay
    (r"(?<![a-z^_ ])(?<!_\w) ?frac ?(\w|{-?[^-+{}]*}) ?(\d|{\d+})",
     lambda m: f" {m[1].strip('{}')}/{m[2].strip('{}')} "),
    # 2*pi -> 2pi; 5. -> 5; f(x) = 2 -> 2 and x in [0,1] -> [0,1]
    (r"\* ?(?=[a-z])| ?\.$|^[a-zA-Z](\(\w\))?( ?=| in\b)", ""),
    (r"(\d|pi|\}) *(square )?(degree|dollar|cent|percent|unit|[ck]?m|meter|foot|feet|ft|inch(es)?|"
     r"mile|yard|k?g|pound|second|minute|hour|day|week|month|year)s?( ?\^[23])?$", r"\1"),  # 5 cm^2
    (r"^(- ?)?[1-9]\d{0,2}(,\d{3})+(\.\d+)?$", lambda m: m[0].replace(",", "")),  # not 0,125
    (r"^(?:{([^{}]*)}|\(([^(),]*)\))$", r"\1\2"),  # {1, 2} -> 1, 2; (5) -> 5
    (r" *([^\d ]) *", r"\1")]  # 1, 2 -> 1,2; but 4 2 is not 42

def answer_reward(problems, completions):
    """Return 1.0 for each completion that gives its problem's answer, else 0.0."""
    return [math_reward(text, problem["answer"]) for problem, text in zip(problems, completions)]

def math_reward(completion, answer):
    """Return 1.0 if the marked answer equals `answer`, else 0.0. `answer` may have its own mark."""
    given = canonical(extract_answer(completion))
    gold = canonical(extract_answer(f"<answer>{answer}</answer>"))
    return 1.0 if gold and given == gold else 0.0

def extract_answer(text, longest=600):
    r"""Find the answer in a completion: what follows the last mark, which is <answer>, \boxed{ or
    ####. Returns "" if there is no mark, or if the answer is never closed or too long."""
    mark = max("<answer>", "\\boxed{", "####", key=text.rfind)  # the last one, if any
    _, found, text = text.rpartition(mark)
    text, closed, _ = text.partition("</answer>")
    if mark == "\\boxed{":
        depths = list(accumulate((c == "{") - (c == "}") for c in text[:longest + 1]))
        text = text[:depths.index(-1)] if -1 in depths else ""  # up to the mark's own brace
    elif mark == "####":
        text = text.strip().partition("\n")[0]
    elif not (found and closed):
        return ""
    text = text.rstrip().strip("* \n")  # as in #### **42**; a leading tab stays: prepare drops it
    return text if len(text) <= longest else ""

@lru_cache(2 ** 16)
def canonical(text):
    """Rewrite an answer so that equal answers become the same string: '2, 0.50' -> '1/2,2'."""
    for pattern, replacement in REWRITTEN:
        text = " ".join(re.sub(pattern, replacement, text).split())  # single spaces
    if re.search(r"[\[\](){}<>=|]", text):  # here the order matters: (1, 2) is not (2, 1)
        return "".join(map(exact, re.split(r"([\[\](){}<>=|,])", text)))
    return ",".join(sorted(map(exact, re.findall("[^,]+", text))))

def exact(term):
    """Write 1 3/8, 3/8, 0.5, .5 or 5 as an exact fraction: '-1 3/8' -> '-11/8'. Keep the rest."""
    if not re.fullmatch(r"[-+]?((\d+ )?\d+/[1-9]\d*|\d*\.?\d+)", term, re.ASCII):
        return term
    value = sum(map(Fraction, term.lstrip("+-").split()))
    return str(-value if "-" in term else value)

"""What PPO, GRPO and GSPO share and what is not the algorithm: flags, rewards, problems, models, sampling, log-probs,
batching, the optimiser, logging and checkpoints. The scripts import this module; it imports none of them.

Shapes: P prompts a step, G completions a prompt, N = P*G rows, L positions (prompt and completion), T completion
positions, V vocabulary. A rollout is a dict of tensors with one row per completion:
    ids        (N, L)  prompt, then completion, padded on the right
    attention  (N, L)  1 on both, 0 on padding; made from lengths, since eos and padding ids also occur inside prompts
    mask       (N, T)  1 on sampled tokens up to and including the first end-of-sequence token
to which the scripts add old_logp, ref_logp, values, returns (N, T) and adv (N,) or (N, T).
"""
import argparse
import contextlib
import itertools
import json
import math
import random
import re
import shutil
import signal
import sys
import time
import zlib
from fractions import Fraction
from pathlib import Path
from typing import NamedTuple

import torch
import transformers
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoModelForTokenClassification, AutoTokenizer, DynamicCache

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()
TOY = "runs/toy"
RULE = "-" * 120
EVAL_ROWS = 1024  # completions sampled at a time when evaluating
STARTED = time.perf_counter()




def extract_answer(text):
    m = re.findall(r"####\s*(\S+)|boxed{([^}]*)}", text); return (m[-1][0] or m[-1][1]) if m else None

def math_reward(c, a):
    return float(extract_answer(c) == (extract_answer(a) or a))


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
    def __init__(self, description):
        super().__init__(description=description, formatter_class=HelpFormatter, allow_abbrev=False)

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
    count, add = within("[1, inf)", int), parser.add_argument
    add("--model", default=TOY, metavar="DIR|NAME",
        help="causal language model: a directory or a hub name; the default is made and warmed up on first use")
    add("--dataset", default="arithmetic", metavar="NAME|PATH",
        help="arithmetic (built in), a .jsonl file, a data set directory, or a hub name such as openai/gsm8k")
    add("--split", default="train", help="split to train on")
    add("--eval_split", default="test",
        help="split (or .jsonl file) to evaluate on; a lone .jsonl file holds out an eighth of its rows")
    add("--question_column", default="question", metavar="NAME", help="column with the question")
    add("--answer_column", default="answer", metavar="NAME", help="column with the gold answer: '#### 42', \\boxed{42} or 42")
    add("--system_prompt", default=Sized("", "Reason step by step, then give the final answer on a last line after ####."),
        metavar="TEXT", help="instruction put before every question")
    add("--max_prompt_tokens", type=count, default=512, metavar="N", help="longer prompts are counted and left out")
    add("--reward_model", metavar="DIR|NAME",
        help="sequence classifier with one label whose score is the reward; without it the reward is 1 for a right answer, else 0")
    add("--max_new_tokens", type=count, metavar="T", default=Sized(48, 1024), help="longest completion")
    add("--temperature", type=within("(0, inf)"), default=1.0,
        help="softmax temperature of sampling and of every log-prob; below 1 explores less")
    add("--steps", type=count, default=Sized(20, 200), help="rollouts in the run")
    add("--micro_batch_tokens", type=count, metavar="N", default=16384, help="positions per forward and backward; lower it when memory runs out, the gradient stays the same")
    add("--lr", type=within("(0, inf)"), default=Sized(5e-4, 1e-6), help="AdamW learning rate of the policy")
    add("--warmup_steps", type=within("[0, inf)", int), metavar="N", default=Sized(20, 20), help="optimiser steps over which the learning rate rises from 0")
    add("--max_grad_norm", type=within("(0, inf]"), default=1.0, help="gradients are scaled down to this norm; inf never scales")
    add("--gradient_checkpointing", action=argparse.BooleanOptionalAction, default=Sized(False, True),
        help="recompute activations in the backward pass: a third more work for far less memory")
    add("--seed", type=within("[0, inf)", int), default=0, help="seed of sampling and of the order of the problems")
    add("--device", default="auto", help="cpu, cuda or cuda:N; auto takes the GPU where there is one")
    add("--dtype", choices=["auto", "float32", "bfloat16"], default="auto",
        help="of the weights in forward and backward; auto is bfloat16 on a GPU, float32 on a CPU; masters and moments are always float32")
    add("--out", metavar="DIR", help="where the run is written (default runs/<script>, then runs/<script>-2 and so on)")
    add("--resume", action="store_true", help="continue the run in --out from its last checkpoint, with the flags it was started with unless given anew")
    add("--eval_every", type=count, metavar="N", default=Sized(10, 20), help="steps between evaluations; one is made before and after training too")
    add("--eval_problems", type=count, metavar="N", default=Sized(2560, 512), help="held-out problems per evaluation")
    add("--eval_samples", type=within("[0, inf)", int), metavar="N", default=1,
        help="samples per held-out problem beside the greedy completion; with N > 1 pass@k is reported for k = 1, 2, 4 ... N")
    add("--save_every", type=count, metavar="N", default=Sized(10, 20), help="steps between checkpoints; only the newest is kept")
    add("--tensorboard", action="store_true", help="also log to TensorBoard under --out (needs the tensorboard package)")


def parse(parser, argv):
    """Parse `argv`, check what one flag alone cannot, and settle --out. A resumed run starts from its saved flags."""
    args = parser.parse_args(argv)
    if args.resume:
        out = args.out or fail("--resume: name the run to continue with --out")
        try:
            parser.set_defaults(**json.loads(Path(out, "args.json").read_text()) | {"resume": True})
        except (OSError, ValueError):
            fail(f"--resume: there is no run in {out}")
        args = parser.parse_args(argv)
    if args.minibatches > args.prompts:
        fail(f"--minibatches {args.minibatches}: at most --prompts ({args.prompts}), as the completions of a prompt stay together")
    if args.device == "auto":
        args.device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.empty(0, device=args.device)
    except (RuntimeError, AssertionError) as error:
        fail(f"--device {args.device}: {first_line(error)}")
    if args.dtype == "auto":
        args.dtype = "bfloat16" if torch.device(args.device).type == "cuda" else "float32"
    if args.out is None:
        names = (f"runs/{Path(parser.prog).stem}{suffix}" for suffix in itertools.chain([""], map("-{}".format, itertools.count(2))))
        args.out = next(name for name in names if not Path(name).exists())
    elif not args.resume and Path(args.out, "args.json").exists():
        fail(f"--out {args.out}: already holds a run; add --resume to continue it, or name another directory")
    return args


# ---------------------------------------------------------------------------------------------------------------------
# Problems: {question, answer, prompt}, prompt being the token ids that the model continues

def load_problems(args, tokenizer):
    """Read the training and the held-out problems of --dataset.

    Returns two lists of {"question": str, "answer": str, "prompt": list of int}. Rows whose gold answer cannot be read,
    whose prompt is too long or holds characters unknown to the tokenizer are counted and left out.
    """
    path = Path(args.dataset)
    if args.dataset == "arithmetic":
        train, held_out = split_by_hash(arithmetic_problems(), "question")
    elif path.suffix == ".jsonl" and Path(args.eval_split).suffix != ".jsonl":
        train, held_out = split_by_hash(read_jsonl(path), args.question_column)
    elif path.suffix == ".jsonl":
        train, held_out = read_jsonl(path), read_jsonl(Path(args.eval_split))
    else:
        train, held_out = read_split(args.dataset, args.split), read_split(args.dataset, args.eval_split)
    held_out = random.Random(0).sample(held_out, min(args.eval_problems, len(held_out)))  # the same in every run
    return prepare(train, tokenizer, args), prepare(held_out, tokenizer, args)


def split_by_hash(rows, column):
    """Hold out the eighth of `rows` whose question hashes to 0: the same rows in every run, whatever the seed."""
    parts = [], []
    for row in rows:
        parts[zlib.crc32(str(row.get(column)).encode()) % 8 == 0].append(row)
    return parts


def read_jsonl(path):
    """Read a file that holds one JSON object a line."""
    try:
        return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except OSError as error:
        fail(f"--dataset: cannot read {path}: {error.strerror}")
    except ValueError as error:
        fail(f"--dataset: {path} does not hold one JSON object a line: {error}")


def read_split(name, split):
    """Read one split: DIR/split.jsonl where there is one, else whatever `datasets` finds in the directory or on the hub."""
    if Path(name, f"{split}.jsonl").exists():
        return read_jsonl(Path(name, f"{split}.jsonl"))
    import datasets  # takes seconds to import: only where it is needed
    try:
        if Path(name, "dataset_dict.json").exists():
            splits = datasets.load_from_disk(name)
        else:
            configs = datasets.get_dataset_config_names(name)
            splits = datasets.load_dataset(name, "main" if "main" in configs else configs[0])
    except Exception as error:  # the library has a dozen kinds of its own, network errors among them
        fail(f"--dataset {name}: cannot be loaded: {first_line(error)}")
    if split not in splits:
        fail(f"--dataset {name}: no split '{split}', only {', '.join(splits)}; see --split and --eval_split")
    return list(splits[split])


def prepare(rows, tokenizer, args):
    """Turn rows into problems; say how many were left out and why; an error when none is left."""
    graded = not args.reward_model  # a reward model needs no gold answer
    for column in [args.question_column] + [args.answer_column] * graded:
        if rows and column not in rows[0]:
            fail(f"--dataset {args.dataset}: no column '{column}', only {', '.join(rows[0])}; see --question_column and --answer_column")
    questions = [str(row[args.question_column]) for row in rows]
    answers = [str(row.get(args.answer_column)) for row in rows]
    problems, left_out = [], dict.fromkeys(["with an unreadable answer", "over --max_prompt_tokens", "with characters unknown to the tokenizer"], 0)
    for question, answer, prompt in zip(questions, answers, prompt_ids(questions, args.system_prompt, tokenizer)):
        if graded and not readable(answer):
            left_out["with an unreadable answer"] += 1
        elif len(prompt) > args.max_prompt_tokens:
            left_out["over --max_prompt_tokens"] += 1
        elif tokenizer.unk_token_id in prompt:
            left_out["with characters unknown to the tokenizer"] += 1
        else:
            problems.append({"question": question, "answer": answer, "prompt": prompt})
    report = ", ".join(f"{count} {why}" for why, count in left_out.items() if count)
    if not problems:
        fail(f"--dataset {args.dataset}: none of its {len(rows)} rows can be used" + f" ({report})" * bool(report))
    if report:
        print(f"--dataset {args.dataset}: left out of {len(rows)} rows: {report}")
    return problems


def prompt_ids(questions, system_prompt, tokenizer):
    """Token ids of each question: by the tokenizer's chat template where it has one, else as plain text and a newline."""
    if not tokenizer.chat_template:
        return tokenizer([f"{system_prompt}\n{question}\n".lstrip("\n") for question in questions])["input_ids"]
    system = [{"role": "system", "content": system_prompt}] * bool(system_prompt)
    chats = [system + [{"role": "user", "content": question}] for question in questions]
    texts = [tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False) for chat in chats]
    return tokenizer(texts, add_special_tokens=False)["input_ids"]  # the template has put in its own


def readable(answer):
    """Whether a gold answer, given back, would be paid."""
    return bool(math_reward(f"\\boxed{{{extract_answer(answer) or answer}}}", answer))


def batch_of(problems, step, args):
    """The P problems of `step` (1, 2, ...): consecutive draws from an endless row of shuffles, a function of the seed
    and the step alone, so that a resumed run goes on where it stopped without a saved cursor."""
    drawn = range((step - 1) * args.prompts, step * args.prompts)
    passes = {i // len(problems) for i in drawn}
    order = {n: torch.randperm(len(problems), generator=torch.Generator().manual_seed(args.seed + n)) for n in passes}
    return [problems[order[i // len(problems)][i % len(problems)]] for i in drawn]


EQUATION = re.compile(r"(\d{1,9}|-\d{1,9}) ?([-+*/]) ?(\d{1,9}) ?= ?(-?\d{1,9})(?![\d.])")


def step_signs(rollout, tokenizer):
    """Which tokens stand in a worked step such as 7+2=9: 1 where it is true, -1 where false, 0 elsewhere; (N, T).

    A step is a line with equations between integers; a line is false as soon as one of them is.
    """
    signs = torch.zeros_like(rollout["mask"])
    for i, mask in enumerate(rollout["mask"].bool()):
        n = int(mask.sum())
        end = int(rollout["attention"][i].sum())
        pieces = tokenizer.batch_decode(rollout["ids"][i, end - n:end, None])
        line, number = [], 0
        for piece in pieces:
            line.append(number)
            number += piece.count("\n")
        truths = [line_sign(text) for text in "".join(pieces).split("\n")]
        signs[i, :n] = torch.tensor([truths[k] for k in line])
    return signs


def line_sign(text):
    """1 if the equations in a line all hold, -1 if one does not, 0 if there is none."""
    holds = [{"+": a + b == c, "-": a - b == c, "*": a * b == c, "/": b * c == a and b != 0}[sign]
             for a, sign, b, c in ((int(a), sign, int(b), int(c)) for a, sign, b, c in EQUATION.findall(text))]
    return 0 if not holds else 1 if all(holds) else -1


# ---------------------------------------------------------------------------------------------------------------------
# Models

def load_policy(args):
    """The policy, ready to train, and its tokenizer: from --model or, resuming, from the newest checkpoint.

    Also settles the defaults that depend on the model's size, opens --out and prints the values in force.
    """
    source = newest_checkpoint(args) or args.model
    if source == TOY and not Path(TOY).exists():
        make_toy(TOY)
    policy = load_model(AutoModelForCausalLM, source, args, "--model")
    try:
        tokenizer = AutoTokenizer.from_pretrained(source)
    except Exception as error:  # missing files, a broken tokenizer.json, a class that needs another package
        fail(f"--model {source}: its tokenizer cannot be loaded: {first_line(error)}")
    rows = policy.get_input_embeddings().num_embeddings
    if len(tokenizer) > rows:
        fail(f"--model {source}: the tokenizer has {len(tokenizer)} tokens but the embedding {rows} rows: not of one model")
    if not stop_ids(policy, tokenizer):
        fail(f"--model {source}: neither tokenizer nor generation_config names an end-of-sequence token")
    check_head(policy, source)
    size = sum(p.numel() for p in policy.parameters())
    for name, value in vars(args).items():
        if isinstance(value, Sized):
            setattr(args, name, value.toy if size < 1_000_000 else value.real)
    if args.gradient_checkpointing:
        checkpoint_activations(policy)
    open_run(args)
    print(f"{source}: {size / 1e6:,.2f}M parameters, {args.dtype} on {args.device}")
    print("  ".join(f"--{name} {value}" for name, value in vars(args).items() if value not in (None, "", False)))
    return policy, tokenizer


def load_model(kind, source, args, flag, **settings):
    """Load `source` with the transformers class `kind` on --device in --dtype, dropout off, in training mode."""
    try:
        model = kind.from_pretrained(source, dtype=getattr(torch, args.dtype), **settings)
    except Exception as error:  # no such directory or hub name, no network, an architecture that is not of this kind
        fail(f"{flag} {source}: cannot be loaded: {first_line(error)}")
    for module in model.modules():  # dropout would make old and new log-probs those of two different networks
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        if isinstance(getattr(module, "attention_dropout", None), float):
            module.attention_dropout = 0.0
    return model.to(args.device).train()


def load_frozen(source, args, flag, kind=AutoModelForCausalLM, **settings):
    """Load a model that only judges: the reference, a reward model."""
    return load_model(kind, source, args, flag, **settings).eval().requires_grad_(False)


def load_reference(args):
    """The reference policy: --model as it was, or the copy that a resumed run refreshed last."""
    newest = newest_checkpoint(args)
    refreshed = newest and newest / "reference"
    return load_frozen(refreshed if refreshed and refreshed.exists() else args.model, args, "--model")


def load_value(args):
    """PPO's value model: the body of --model under a new scalar head that starts at 0, or as the run to resume left it."""
    newest = newest_checkpoint(args)
    model = load_model(AutoModelForTokenClassification, newest / "value" if newest else args.model, args, "--model", num_labels=1)
    if not newest:
        for parameter in model.get_submodule("score" if hasattr(model, "score") else "classifier").parameters():
            torch.nn.init.zeros_(parameter)
    if args.gradient_checkpointing:
        checkpoint_activations(model)
    return model


def checkpoint_activations(model):
    """Recompute activations in the backward pass (non-reentrant); the method got its new name in transformers 5.2x."""
    getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()


def check_head(model, source):
    """Stop if the logits are not just base model times head: some families scale or cap them after the head."""
    ids = torch.arange(4, device=model.device)[None]
    with torch.no_grad():
        hidden = model.base_model(input_ids=ids, use_cache=False).last_hidden_state[0]
        ours, logits = head_logits(hidden, model.get_output_embeddings().weight), model(input_ids=ids).logits[0]
    if not torch.allclose(ours, logits.float(), rtol=0.02, atol=0.02):
        fail(f"--model {source}: {type(model).__name__} changes its logits after the output embedding, which is not supported")


def stop_ids(model, tokenizer):
    """Every token id that ends a completion: chat models have two or more."""
    listed = model.generation_config.eos_token_id
    listed = listed if isinstance(listed, list) else [listed]
    return sorted({int(i) for i in [*listed, tokenizer.eos_token_id] if i is not None})


def load_reward(args):
    """The reward: a function (problems, completions) -> (N,) float32, by rule or by --reward_model."""
    if not args.reward_model:
        return lambda problems, texts: torch.tensor([math_reward(t, p["answer"]) for p, t in zip(problems, texts)])
    judge = load_frozen(args.reward_model, args, "--reward_model", AutoModelForSequenceClassification)
    tokenizer = AutoTokenizer.from_pretrained(args.reward_model)
    if judge.config.num_labels != 1:
        fail(f"--reward_model {args.reward_model}: has {judge.config.num_labels} labels; a reward is one number")

    @torch.no_grad()
    def score(problems, texts):
        if tokenizer.chat_template:
            rows = [tokenizer.apply_chat_template([{"role": "user", "content": p["question"]}, {"role": "assistant", "content": t}],
                                                  return_dict=True)["input_ids"] for p, t in zip(problems, texts)]
        else:
            rows = tokenizer([f"{p['question']}\n{t}" for p, t in zip(problems, texts)])["input_ids"]
        # The classifier reads the last token that is not padding, so where padding is also eos, rows go one by one.
        size = 1 if tokenizer.pad_token_id in (None, tokenizer.eos_token_id) else 16
        scores = []
        for i in range(0, len(rows), size):
            batch = tokenizer.pad({"input_ids": rows[i:i + size]}, padding_side="right", return_tensors="pt")
            scores.append(judge(**batch.to(judge.device)).logits[:, 0].float().cpu())
        return torch.cat(scores)


# ---------------------------------------------------------------------------------------------------------------------
# The toy world
def arithmetic_problems():
    problems = []
    for n in (3, 4):
        for numbers in itertools.product(range(1, 10), repeat=n):
            for signs in itertools.product("+-", repeat=n - 1):
                text = str(numbers[0]) + "".join(s + str(x) for s, x in zip(signs, numbers[1:]))
                problems.append({"question": text + "=?", "answer": str(eval(text))})
    return problems


def make_toy(path):
    from tokenizers import Tokenizer, models, pre_tokenizers, decoders, Regex
    vocab = {c: i for i, c in enumerate(["<pad>", "<eos>", "<unk>"] + list("0123456789+-=?# \n"))}
    tok = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tok.pre_tokenizer = pre_tokenizers.Split(Regex("[\\s\\S]"), "isolated")
    tok.decoder = decoders.Fuse()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=tok, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")
    config = transformers.Qwen3Config(vocab_size=len(vocab), hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4, head_dim=16, intermediate_size=192, tie_word_embeddings=True, initializer_range=.06, rope_theta=100, pad_token_id=0, eos_token_id=1, bos_token_id=None)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(path); tokenizer.save_pretrained(path)


# ---------------------------------------------------------------------------------------------------------------------
# Sampling

@torch.no_grad()
def generate(model, tokenizer, prompts, group_size=1, max_new_tokens=48, temperature=1.0):
    """Sample `group_size` completions of each prompt from softmax(logits / temperature); temperature 0 is greedy.

    A loop of our own, because transformers' generate fills every setting left unset from the model's generation_config
    (and top_k with 50): it would sample from another distribution than the one whose log-probs are trained.

    `prompts` holds P lists of token ids. Returns a dict of N = P * group_size rows, those of a prompt side by side:
    ids (N, L), attention (N, L), mask (N, T) as in a rollout, finished (N,) bool, texts (a list of N strings).
    """
    was_training = model.training
    model.eval()  # in training mode with checkpointing the cache is dropped without a word: a token then sees only itself
    device, width = model.device, max(map(len, prompts))
    stop = torch.tensor(stop_ids(model, tokenizer), device=device)
    prompt_lengths = torch.tensor([len(prompt) for prompt in prompts], device=device)
    prompt_ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts], device=device)  # padded on the left
    attention = (torch.arange(width, device=device) >= width - prompt_lengths[:, None]).long()
    padded, cache = min(map(len, prompts)) < width, DynamicCache(config=model.config)

    def next_logits(ids):                                                            # (B, S) -> (B, V)
        positions = (attention.cumsum(-1) - 1).clamp(min=0)[:, -ids.shape[1]:]
        mask = attention if padded else None  # without a mask the fast attention kernels apply
        output = model.base_model(input_ids=ids, attention_mask=mask, position_ids=positions, past_key_values=cache, use_cache=True)
        return head_logits(output.last_hidden_state[:, -1], model.get_output_embeddings().weight)

    logits = next_logits(prompt_ids).repeat_interleave(group_size, 0)  # a prompt is read once for its whole group
    cache.batch_repeat_interleave(group_size)
    prompt_ids, prompt_lengths, attention = (x.repeat_interleave(group_size, 0) for x in (prompt_ids, prompt_lengths, attention))
    completions = prompt_ids.new_zeros(len(prompt_ids), max_new_tokens)
    rows = torch.arange(len(prompt_ids), device=device)                              # the rows still being written
    running = torch.ones_like(rows, dtype=torch.bool)
    for t in range(max_new_tokens):
        token = logits.argmax(-1) if temperature == 0 else torch.multinomial((logits / temperature).softmax(-1), 1).squeeze(1)
        completions[rows, t] = token
        running &= ~torch.isin(token, stop)
        if t % 4 == 3 and running.float().mean() < 0.75:  # looking stalls the GPU: not at every token
            if not running.any():
                break
            keep = running.nonzero().squeeze(1)
            cache.batch_select_indices(keep)
            rows, running, token, attention = rows[keep], running[keep], token[keep], attention[keep]
        if t + 1 < max_new_tokens:
            attention = torch.cat([attention, attention.new_ones(len(rows), 1)], 1)
            logits = next_logits(token[:, None])
    model.train(was_training)
    return as_rollout(prompt_ids, prompt_lengths, completions, stop, tokenizer)


def as_rollout(prompt_ids, prompt_lengths, completions, stop, tokenizer):
    """Cut completions (N, T) after their first stop token, move prompts (N, S) from left to right padding, decode."""
    stopped = torch.isin(completions, stop)
    mask = stopped.cumsum(-1) - stopped.long() == 0  # nothing stopped before: the first stop token itself is kept
    lengths = mask.sum(-1)
    both = torch.cat([prompt_ids, completions], 1)
    column = torch.arange(both.shape[1], device=both.device)
    attention = (column < (prompt_lengths + lengths)[:, None]).long()
    shift = (prompt_ids.shape[1] - prompt_lengths)[:, None]                          # (N, 1) padding before the prompt
    ids = both.gather(1, (column + shift).clamp(max=both.shape[1] - 1)) * attention
    longest, T = attention.sum(-1).max(), lengths.max()
    texts = tokenizer.batch_decode([row[:n].tolist() for row, n in zip(completions, lengths)], skip_special_tokens=True)
    return {"ids": ids[:, :longest], "attention": attention[:, :longest], "mask": mask[:, :T].float(),
            "finished": (stopped & mask).any(-1), "texts": texts}


def evaluate(policy, tokenizer, problems, reward, args):
    """Mean reward on held-out `problems`: greedy, and over --eval_samples samples, with the unbiased
    pass@k = 1 - C(n - c, k) / C(n, k) for c of n samples right (Chen et al. 2021, eq. 1)."""
    torch.manual_seed(args.seed)  # the same draws at every evaluation: differences are the policy's
    problems = sorted(problems, key=lambda p: len(p["prompt"]))
    n, greedy, sampled, lengths = args.eval_samples, [], [], []
    rows = max(1, EVAL_ROWS // max(1, n))
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
        for k in (2 ** i for i in range(1, n.bit_length())):
            result[f"eval_pass@{k}"] = sum(pass_at_k(n, c, k) for c in right) / len(right)
    return result


def pass_at_k(n, c, k):
    """Chance that of k samples, drawn from n of which c are right, at least one is right."""
    return 1 - math.comb(n - c, k) / math.comb(n, k)


# ---------------------------------------------------------------------------------------------------------------------
# Log-probabilities

def token_logprobs(model, batch, temperature, with_entropy=False):
    """log pi(token | everything before it) of the completion tokens, under softmax(logits / temperature).

    `batch` holds ids (N, L), attention (N, L) and mask (N, T). Returns (N, T) float32 with 0 outside the mask; with
    `with_entropy` also the entropies in nats, (N, T), without gradient. The (N, T, V) logits never exist.
    """
    row, t, position = completion_positions(batch)                                   # (M,) each: M tokens in all
    # Causal attention never looks right, so padding on the right needs no mask, and without one the flash kernel applies.
    hidden = model.base_model(input_ids=batch["ids"], use_cache=False).last_hidden_state            # (N, L, H)
    weight = model.get_output_embeddings().weight
    logp, entropy = ChunkedLogProbs.apply(hidden[row, position - 1], weight, batch["ids"][row, position], temperature, with_entropy)
    logp, entropy = (values.new_zeros(batch["mask"].shape).index_put((row, t), values) for values in (logp, entropy))
    return (logp, entropy) if with_entropy else logp


def token_values(model, batch):
    """V of the state before each completion token, from the value model: (N, T) float32, 0 outside the mask."""
    row, t, position = completion_positions(batch)
    values = model(input_ids=batch["ids"], use_cache=False).logits[row, position - 1, 0]
    values = values.to(torch.promote_types(values.dtype, torch.float32))
    return values.new_zeros(batch["mask"].shape).index_put((row, t), values)


def completion_positions(batch):
    """Where the completion tokens stand: row, place in the completion, place in ids; (M,) each."""
    row, t = batch["mask"].nonzero(as_tuple=True)
    prompt_lengths = batch["attention"].sum(-1) - batch["mask"].sum(-1).long()
    return row, t, prompt_lengths[row] + t


def head_logits(hidden, weight):
    """(M, H), (V, H) -> (M, V), float32 or wider. Half-precision products are summed and kept in float32: logits rounded
    to bfloat16 would move log-probs by up to 0.07."""
    if hidden.dtype != torch.bfloat16:
        return hidden @ weight.T
    return torch.mm(hidden, weight.T, out_dtype=torch.float32) if hidden.is_cuda else hidden.float() @ weight.float().T


class ChunkedLogProbs(torch.autograd.Function):
    """log softmax(hidden weight^T / temperature)[target] and the entropy of that softmax, CHUNK positions at a time.

    The backward pass computes each chunk's logits anew instead of keeping them: CHUNK * V numbers in memory instead of
    several times M * V, for one matrix product more.
    """
    CHUNK = 256

    @staticmethod
    def forward(ctx, hidden, weight, target, temperature, with_entropy):      # (M, H), (V, H), (M,) -> (M,), (M,)
        logp, logz, entropy = [], [], []
        for h, chosen in zip(hidden.split(ChunkedLogProbs.CHUNK), target.split(ChunkedLogProbs.CHUNK)):
            z = head_logits(h, weight).div_(temperature)                             # (C, V)
            top = z.amax(-1, keepdim=True)
            chosen = z.sub_(top).gather(1, chosen[:, None]).squeeze(1)               # (C,)
            e = z.exp() if with_entropy else z.exp_()
            total = e.sum(-1)
            logp.append(chosen - total.log())
            logz.append(total.log() + top.squeeze(1))
            entropy.append(total.log() - torch.einsum("cv,cv->c", e, z) / total if with_entropy else total * 0)
            del z, e  # before the next chunk's are made
        logp, logz, entropy = map(torch.cat, (logp, logz, entropy))
        ctx.save_for_backward(hidden, weight, target, logz)
        ctx.temperature = temperature
        ctx.mark_non_differentiable(entropy)
        return logp, entropy

    @staticmethod
    def backward(ctx, grad, _):
        """d log p(target) / d logits = (onehot(target) - p) / temperature."""
        hidden, weight, target, logz = ctx.saved_tensors
        grad = grad / ctx.temperature
        grad_hidden, grad_weight = torch.empty_like(hidden), torch.zeros_like(weight, dtype=logz.dtype)
        for start in range(0, len(hidden), ChunkedLogProbs.CHUNK):
            c = slice(start, start + ChunkedLogProbs.CHUNK)
            z = head_logits(hidden[c], weight).div_(ctx.temperature).sub_(logz[c, None]).exp_()     # (C, V) softmax
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

MICRO_BATCH_COST = 256  # what a forward and backward costs beside its positions, in positions; seen from 0.1M to 2B parameters


def micro_batches(batch, tokens):
    """Cut `batch` into micro-batches of at most `tokens` positions, padding included; every row is in exactly one.

    Rows are sorted by length and cut where padding plus the fixed cost of a micro-batch is least (a shortest path over
    the cuts). Each micro-batch is trimmed to its own longest row and carries `row`, its rows' places in `batch`. A row
    longer than `tokens` gets a micro-batch of its own.
    """
    lengths, order = batch["attention"].sum(-1).sort(descending=True)
    lengths, completions = lengths.tolist(), batch["mask"].sum(-1).long()
    cost, cut = [0], [0]  # of the first j rows: the least cost, and where their last micro-batch begins
    for j in range(1, len(lengths) + 1):
        options = [(cost[j - 1] + lengths[j - 1] + MICRO_BATCH_COST, j - 1)]
        for i in range(j - 2, -1, -1):
            if (j - i) * lengths[i] > tokens:
                break
            options.append((cost[i] + (j - i) * lengths[i] + MICRO_BATCH_COST, i))
        least, begin = min(options)
        cost.append(least)
        cut.append(begin)
    end = len(lengths)
    while end > 0:
        begin = cut[end]
        rows = order[begin:end]
        L, T = lengths[begin], int(completions[rows].max())
        part = select(batch, rows)
        yield {name: value[:, :L] if name in ("ids", "attention") else value[:, :T] if value.dim() == 2 else value
               for name, value in part.items()} | {"row": rows}
        end = begin


def minibatches(rollout, count, group_size):
    """Deal the groups of a rollout out at random into `count` parts, as even as can be: groups stay whole."""
    groups = torch.arange(len(rollout["ids"]), device=rollout["ids"].device).view(-1, group_size)
    for part in groups[torch.randperm(len(groups))].tensor_split(count):
        yield select(rollout, part.flatten())


def select(batch, rows):
    """The given rows of every tensor of `batch`."""
    return {name: value[rows] for name, value in batch.items() if torch.is_tensor(value)}


@torch.no_grad()
def score_rows(function, rollout, tokens):
    """Run `function` (micro-batch -> tensor or tensors (n, t)) over a rollout without gradient; put the rows back in
    place. Returns a list of (N, T) tensors."""
    whole = None
    for batch in micro_batches(rollout, tokens):
        values = function(batch)
        values = values if isinstance(values, tuple) else (values,)
        whole = whole or [value.new_zeros(rollout["mask"].shape) for value in values]
        for target, value in zip(whole, values):
            target[batch["row"], :value.shape[1]] = value
    return whole


def padding(batch):
    """Share of a micro-batch's positions that are padding, as statistics for Totals."""
    return {"padding": ((batch["attention"] == 0).sum(), batch["attention"].numel())}


def rollout_stats(rollout, entropy, group_size, seconds):
    """What a rollout shows before it is trained on; `seconds` is how long sampling took."""
    mask, groups = rollout["mask"], rollout["rewards"].view(-1, group_size)
    stats = {"reward": groups.mean(), "completion_length": mask.sum(1).mean(), "truncated": 1 - rollout["finished"].float().mean(),
             "entropy": (entropy * mask).sum() / mask.sum(), "rollout_tokens_per_s": mask.sum() / seconds}
    if group_size > 1:
        stats["zero_variance_groups"] = (groups == groups[:, :1]).all(1).float().mean()
    return {name: value.item() for name, value in stats.items()}


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

    def __init__(self, model, lr, args):
        self.lr, self.warmup_steps, self.max_grad_norm = lr, args.warmup_steps, args.max_grad_norm
        self.taken, self.skipped, self.in_a_row = 0, 0, 0
        self.weights = [p for p in model.parameters() if p.requires_grad]
        self.masters = [w if w.dtype == torch.float32 else w.detach().float() for w in self.weights]
        for weight, master in zip(self.weights, self.masters):
            if master is not weight:
                weight.register_post_accumulate_grad_hook(lambda weight, master=master: self.collect(weight, master))
        self.adamw = torch.optim.AdamW(self.masters, lr=lr, betas=(0.9, 0.95), weight_decay=0.0, fused=True)

    @staticmethod
    def collect(weight, master):
        """Move a finished gradient to the master."""
        if master.grad is None:
            master.grad = weight.grad.float()
        else:
            master.grad += weight.grad
        weight.grad = None

    def step(self):
        """One step of AdamW, then clear the gradients. Returns statistics: their norm before clipping, whether skipped.

        A step with a gradient that is not finite is skipped whole, moments and schedule included.
        """
        norm = torch.nn.utils.clip_grad_norm_(self.masters, self.max_grad_norm).item()
        if math.isfinite(norm):
            self.taken, self.in_a_row = self.taken + 1, 0
            self.adamw.param_groups[0]["lr"] = self.lr * min(1.0, self.taken / max(1, self.warmup_steps))
            self.adamw.step()
            for weight, master in zip(self.weights, self.masters):
                weight.data.copy_(master)  # rounds to bfloat16; nothing to do where they are one
        else:
            self.skipped, self.in_a_row = self.skipped + 1, self.in_a_row + 1
            if self.in_a_row == self.PATIENCE:
                fail(f"the gradient was not finite {self.PATIENCE} steps in a row: lower --lr and --resume from the last checkpoint", 1)
        self.adamw.zero_grad(set_to_none=True)
        return {"skipped": (0, 1), "grad_norm": (norm, 1)} if math.isfinite(norm) else {"skipped": (1, 1)}

    def state_dict(self):
        return {"masters": self.masters, "adamw": self.adamw.state_dict(), "taken": self.taken, "skipped": self.skipped}

    def load_state_dict(self, state):
        for master, saved in zip(self.masters, state["masters"]):
            master.data.copy_(saved)
        self.adamw.load_state_dict(state["adamw"])
        self.taken, self.skipped = state["taken"], state["skipped"]


# ---------------------------------------------------------------------------------------------------------------------
# The run: log, checkpoints, interruptions

def open_run(args):
    """Create --out and keep the flags there, for --resume."""
    try:
        Path(args.out).mkdir(parents=True, exist_ok=True)
        write_whole(Path(args.out, "args.json"), json.dumps(vars(args), indent=1))
    except OSError as error:
        fail(f"--out {args.out}: cannot be written: {error.strerror}")


def write_whole(path, text):
    """Write beside and rename: whoever reads `path` finds the old text or the new one, never a part."""
    path.with_suffix(".tmp").write_text(text)
    path.with_suffix(".tmp").replace(path)


def newest_checkpoint(args):
    """The newest complete checkpoint of the run to resume, or None."""
    saved = Path(args.out).glob("step-*[0-9]") if args.resume else ()
    return max(saved, key=lambda path: int(path.name[5:]), default=None)


def save_checkpoint(args, step, tokenizer, models, optimizers):
    """Save step-N under --out and drop the one before it.

    The first of `models` (a dict) lies in the directory itself, ready for from_pretrained, the others in folders of
    their names. Written beside and renamed, so that a kill at any instant leaves the last good checkpoint. There are no
    random states or data cursor to save: both are functions of --seed and the step.
    """
    final, beside = Path(args.out, f"step-{step}"), Path(args.out, f"step-{step}.tmp")
    shutil.rmtree(beside, ignore_errors=True)
    for i, (name, model) in enumerate(models.items()):
        model.save_pretrained(beside / name if i else beside)
    tokenizer.save_pretrained(beside)
    torch.save({name: optimizer.state_dict() for name, optimizer in optimizers.items()}, beside / "optimizer.pt")
    beside.rename(final)
    for old in Path(args.out).glob("step-*"):
        if old != final:
            shutil.rmtree(old)


def load_checkpoint(args, optimizers):
    """Put the optimisers where the newest checkpoint left them; returns its step, 0 for a new run."""
    newest = newest_checkpoint(args)
    if newest is None:
        return 0
    for name, state in torch.load(newest / "optimizer.pt", map_location=args.device).items():
        optimizers[name].load_state_dict(state)
    return int(newest.name[5:])


class Logger:
    """Shows a run: a bar, a line a step, a completion now and then, warnings, and a closing table. Keeps metrics.jsonl.

    Ctrl-C lets the step in hand end, so that what is saved is a whole step; a second Ctrl-C leaves at once.
    """
    def __init__(self, args, start):
        self.args, self.start, self.interrupted, self.warned = args, start, False, set()
        self.path = Path(args.out, "metrics.jsonl")
        lines = self.path.read_text().splitlines() if start else []
        entries = [json.loads(line) for line in lines if line.endswith("}")]  # a kill can leave half a line
        self.history = [entry for entry in entries if entry["step"] <= start]  # later steps will be taken again
        write_whole(self.path, "".join(json.dumps(entry) + "\n" for entry in self.history))
        self.board = tensorboard_writer(args.out) if args.tensorboard else None
        self.bar = tqdm(total=args.steps, initial=start, unit="step", disable=None)  # none where nobody watches
        self.handler = signal.signal(signal.SIGINT, self.interrupt)

    def interrupt(self, *_):
        """First Ctrl-C: finish the step and save. Second: KeyboardInterrupt, with the last checkpoint as it was."""
        signal.signal(signal.SIGINT, signal.default_int_handler)
        self.interrupted = True
        self.say("interrupted: this step will be finished and saved; Ctrl-C again leaves at once")

    def steps(self):
        """The steps still to take, each preceded by its own seeding: step k draws the same numbers in a resumed run."""
        for step in range(self.start + 1, self.args.steps + 1):
            if self.interrupted:
                return
            torch.manual_seed(self.args.seed * 1_000_003 + step)
            yield step

    def say(self, line):
        self.bar.write(line, file=sys.stdout)

    def log(self, step, stats, example=None):
        """Record a step's statistics; `example` is (question, completion, reward)."""
        stats = {"step": step} | dict.fromkeys(self.KEYS) | stats | {"peak_memory_gb": peak_memory_gb(self.args.device)}
        stats = {name: None if value is None or not math.isfinite(value) else value for name, value in stats.items()}
        self.history.append(stats)
        with self.path.open("a") as file:
            file.write(json.dumps(stats) + "\n")
        if self.board:
            for name in (name for name, value in stats.items() if value is not None):
                self.board.add_scalar(name, stats[name], step)
        shown = [f"{label} {stats[name]:{form}}" for name, label, form in self.SHOWN if stats.get(name) is not None]
        self.say(f"step {step}/{self.args.steps}  " + "  ".join(shown))
        if example and stats["eval_accuracy"] is not None:
            self.say("    {} -> {}  (reward {:g})".format(*("\\n".join(str(text).strip().splitlines()) for text in example[:2]), example[2]))
        self.bar.update(step - self.bar.n)
        self.warn(stats)

    KEYS = ("reward eval_accuracy eval_sampled_accuracy completion_length truncated entropy kl clip_frac ratio_max loss skipped "
            "zero_variance_groups grad_norm rollout_tokens_per_s update_tokens_per_s padding peak_memory_gb seconds").split()
    SHOWN = [("reward", "reward", ".3f"), ("completion_length", "length", ".1f"), ("truncated", "truncated", ".0%"),
             ("entropy", "entropy", ".2f"), ("kl", "kl", ".4f"), ("clip_frac", "clipped", ".2%"),
             ("explained_variance", "explained", ".2f"), ("grad_norm", "grad", ".2f"), ("seconds", "seconds", ".1f"),
             ("eval_accuracy", "| held out: greedy", ".3f"), ("eval_sampled_accuracy", "sampled", ".3f")]

    def warn(self, stats):
        """Say once what is going wrong and what to do about it."""
        idle = [entry["zero_variance_groups"] == 1 for entry in self.history[-5:]]
        warnings = {
            f"over half of the completions were cut off: raise --max_new_tokens ({self.args.max_new_tokens})": (stats["truncated"] or 0) > 0.5,
            "in five steps every group was all right or all wrong, so nothing was learned: choose problems that are right now "
            "and then, raise --group_size or --temperature": len(idle) == 5 and all(idle),
            "the policy has moved far from the reference: lower --lr or raise --beta": (stats["kl"] or 0) > 1,
            "a step was skipped because its gradient was not finite: lower --lr if this goes on": (stats["skipped"] or 0) > 0}
        for warning in {text for text, holds in warnings.items() if holds} - self.warned:
            self.say(f"warning: {warning}")
            self.warned.add(warning)

    def close(self):
        """Print what came of the run and where it lies; after Ctrl-C leave with status 130."""
        self.bar.close()
        signal.signal(signal.SIGINT, self.handler)
        rows = [entry for entry in self.history if entry["eval_accuracy"] is not None]
        print(RULE)
        for name, label, form in [("eval_accuracy", "greedy accuracy", ".3f"), ("eval_sampled_accuracy", "sampled accuracy", ".3f"),
                                  ("eval_completion_length", "completion length", ".1f")]:
            if rows and rows[0].get(name) is not None:
                print(f"{label:24}{rows[0][name]:>10{form}} before  {rows[-1][name]:>10{form}} after {rows[-1]['step']} steps")
        print(f"{'time':24}{time.perf_counter() - STARTED:>8.0f} s")
        print(f"{'model and checkpoint':24}  {newest_checkpoint(argparse.Namespace(resume=True, out=self.args.out))}")
        print(f"{'metrics':24}  {self.path}")
        if self.interrupted:
            print(f"interrupted; go on with --out {self.args.out} --resume")
            sys.exit(130)


def tensorboard_writer(out):
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        fail("--tensorboard: needs the tensorboard package (pip install tensorboard)")
    return SummaryWriter(out)


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
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def launch(main, args):
    """Run a script's main; Ctrl-C before the first step and an exhausted GPU end in one line."""
    try:
        main(args)
    except KeyboardInterrupt:
        fail("interrupted; what was saved before is as it was", 130)
    except torch.OutOfMemoryError:
        fail("out of GPU memory: lower --micro_batch_tokens if it happened in the update, --prompts, --group_size or "
             "--max_new_tokens if while sampling", 2)

"""Speed and memory of a GRPO step, part by part, against what the machine allows and against the plain way of doing it.

    python tests/bench.py                          tiny model, a laptop's CPU
    python tests/bench.py --model-size 1.5B        a GPU: Qwen2.5's architecture with random weights, which speed does not mind

Every figure is a ratio of two measurements of the same run: to a floor (the bytes that must be read over the measured copy
bandwidth, the operations that must be done over the measured rate of matrix products) or to a plain alternative:
transformers' eager `generate`, log_softmax of whole logits, micro-batches of a fixed number of rows in the order they came,
and TRL's GRPOTrainer, if installed (`pip install trl`).
"""
import argparse
import contextlib
import importlib.util
import json
import math
import random
import statistics
import sys
import tempfile
import time
import types
import warnings
from pathlib import Path

import torch
import transformers

sys.path[:0] = [str(Path(__file__).resolve().parent.parent), str(Path(__file__).resolve().parent)]
import common  # noqa: E402
import grpo  # noqa: E402

QWEN = dict(vocab_size=151936, max_position_embeddings=32768, rope_parameters={"rope_type": "default", "rope_theta": 1e6})
SIZES = {  # name -> published sizes of Qwen2.5, and the work: P prompts of S tokens, G completions of at most T each
    "tiny": (dict(vocab_size=512, hidden_size=128, intermediate_size=512, num_hidden_layers=4, num_attention_heads=4,
                  num_key_value_heads=2, tie_word_embeddings=False), dict(P=8, G=8, S=32, T=96)),
    "0.5B": (QWEN | dict(hidden_size=896, intermediate_size=4864, num_hidden_layers=24, num_attention_heads=14,
                         num_key_value_heads=2, tie_word_embeddings=True), dict(P=32, G=8, S=128, T=512)),
    "1.5B": (QWEN | dict(hidden_size=1536, intermediate_size=8960, num_hidden_layers=28, num_attention_heads=12,
                         num_key_value_heads=2, tie_word_embeddings=True), dict(P=32, G=8, S=128, T=512)),
    "7B": (QWEN | dict(vocab_size=152064, hidden_size=3584, intermediate_size=18944, num_hidden_layers=28,
                       num_attention_heads=28, num_key_value_heads=4, tie_word_embeddings=False), dict(P=32, G=8, S=128, T=1024)),
}
DOUBLED = {"tiny": {"prompts": 2, "group_size": 2}}  # what `scaling` starts from, in multiples of the work; else 0.25
DRAWER = 1  # the last token of every prompt of the tiny model: it draws the length of what follows
STOP = 0


class Bench:
    """The machine, the model and the results so far."""
    def __init__(self, size, script_args):
        config, self.work = SIZES[size]
        self.size, self.results, self.peak = size, {}, 0
        toy = size == "tiny"
        P, G, S, T = self.work.values()
        flags = f"--prompts {P} --group_size {G} --max_new_tokens {T} --warmup_steps 0 --out runs/bench".split()
        self.args = args = grpo.parse_args([*flags, *script_args])
        for name, value in vars(args).items():
            if isinstance(value, common.Sized):
                setattr(args, name, value.toy if toy else value.real)
        self.device, dtype = torch.device(args.device), getattr(torch, args.dtype)
        torch.manual_seed(0)
        with self.device:
            self.model = transformers.AutoModelForCausalLM.from_config(transformers.Qwen2Config(**config), dtype=dtype)
        if toy:
            write_lengths(self.model, T)
        self.model.set_attn_implementation("sdpa_grouped")
        if args.gradient_checkpointing:
            common.checkpoint_activations(self.model)
        self.model.cuda_graphs = args.cuda_graphs and self.device.type == "cuda"
        if args.compile:
            common.compile_layers(self.model)
            self.model.decode = torch.compile(common.decode, dynamic=True)
        self.model.train()
        self.optimizer = common.Optimizer(self.model, 1e-9, args)
        self.parameters = sum(p.numel() for p in self.model.parameters())
        self.tokenizer = types.SimpleNamespace(eos_token_id=None, batch_decode=lambda rows, **_: ["x" * len(r) for r in rows])

    def prompts(self, P, S):
        rng = random.Random(0)
        return [[rng.randrange(200, 500) for _ in range(S - 1)] + [DRAWER] for _ in range(P)]

    def problems(self, P, S):
        return [{"prompt": prompt, "question": "", "answer": ""} for prompt in self.prompts(P, S)]

    def stop_at(self, *ids):
        """What ends a completion: nothing that can be drawn, for work of one known length, or STOP, or a share of all ids."""
        self.model.generation_config.eos_token_id = list(ids) or [self.model.config.vocab_size]

    def ragged(self):
        """Let lengths vary: log-normal for the tiny model, which was made so, geometric with mean T/4 for random weights."""
        V, T = self.model.config.vocab_size, self.work["T"]
        self.stop_at(*([STOP] if self.size == "tiny" else range(0, V, T // 4)))

    def timed(self, function, repeats=1):
        """Its result, its seconds (the least of `repeats`: what disturbs a run only adds) and the peak of GPU memory in GiB,
        weights and optimiser included. May be called within what it times."""
        if self.device.type == "cuda":
            outside, self.peak = max(self.peak, torch.cuda.max_memory_allocated()), 0
            torch.cuda.reset_peak_memory_stats()
        seconds = []
        for _ in range(repeats):
            self.synchronize()
            began = time.perf_counter()
            result = function()
            self.synchronize()
            seconds.append(time.perf_counter() - began)
        if self.device.type != "cuda":
            return result, min(seconds), None
        peak = max(self.peak, torch.cuda.max_memory_allocated())
        self.peak = max(outside, peak)
        return result, min(seconds), peak / 2**30

    def synchronize(self):
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def report(self, name, value, unit="", floor=None, against=None):
        """A line of the table. `floor` is the best that `value` could be, `against` the same of a plain alternative."""
        self.results[name] = {"value": value, "unit": unit, "floor": floor, "plain": against}
        better = (lambda a, b: b / a) if unit in ("s", "ms", "GiB") else (lambda a, b: a / b)  # less is better, or more is
        columns = [f"{value:12.4g} {unit:9}", f"{better(value, floor):9.1%}" if floor else " " * 9,
                   f"{better(value, against):9.2f}x" if against else ""]
        print(f"{name:52}" + "  ".join(columns), flush=True)


def write_lengths(model, T):
    """Make a model whose completions have log-normal lengths: DRAWER is followed by a number k, k by k - 1 and so on down to
    STOP. The embeddings are orthogonal, the layers do their work but add next to nothing, and the head is the table of
    successors: logits[j] after token k are log p(j | k)."""
    V, H = model.config.vocab_size, model.config.hidden_size
    lengths = torch.arange(1, T - 1).double()
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                p.mul_(1e-4)
        count = min(H, T + 2)
        basis = torch.linalg.qr(torch.randn(H, H, dtype=torch.float64))[0][:count]   # (count, H) orthonormal
        number = lambda k: 1 + k  # noqa: E731  k = 1, 2 ... has id 2, 3 ...
        table = torch.zeros(count, V, dtype=torch.float64)                           # log p up to a constant of the row
        shares = (-(lengths / (T / 4)).log() ** 2 / (2 * 0.7 ** 2)).exp() / lengths  # median T/4, deviation of the log 0.7
        for k, share in zip(lengths.int().tolist(), shares.tolist()):
            if number(k) < count:
                table[DRAWER, number(k)] = 30 + math.log(share / shares.sum())
                table[number(k), number(k - 1) if k > 1 else STOP] = 30
        model.get_input_embeddings().weight[:count] = basis.to(model.dtype)
        model.get_output_embeddings().weight.copy_((table.T @ basis / H ** 0.5).to(model.dtype))


# --- the machine

def floors(bench):
    """Copy bandwidth, bytes read and written a second, and rate of matrix products, operations a second."""
    gpu = bench.device.type == "cuda"
    a = torch.empty(2**30 if gpu else 2**25, dtype=torch.float32, device=bench.device).normal_()
    b = torch.empty_like(a)
    b.copy_(a)
    _, seconds, _ = bench.timed(lambda: [b.copy_(a) for _ in range(10)], 3)
    bench.bandwidth = 20 * a.numel() * 4 / seconds
    n = 8192 if gpu else 1024
    x, y = (torch.randn(n, n, device=bench.device, dtype=bench.model.dtype) for _ in range(2))
    x @ y
    _, seconds, _ = bench.timed(lambda: [x @ y for _ in range(10)], 3)
    bench.rate = 10 * 2 * n**3 / seconds
    bench.report("copy bandwidth", bench.bandwidth / 1e9, "GB/s")
    bench.report("matrix products", bench.rate / 1e12, "TFLOP/s")


# --- sampling

def plain_generate(bench, prompts, G, T, cache=None):
    """transformers' eager generate with every sampling setting named. Returns ids (N, S + T), padded with 0."""
    config, stop = bench.model.generation_config, bench.model.generation_config.eos_token_id
    bench.model.generation_config = transformers.GenerationConfig(eos_token_id=stop, pad_token_id=0)
    settings = transformers.GenerationConfig(do_sample=True, temperature=1.0, top_k=0, top_p=1.0, repetition_penalty=1.0,
                                             max_new_tokens=T, eos_token_id=stop, pad_token_id=0)
    bench.model.eval()
    bench.model.set_attn_implementation("sdpa")
    ids = torch.tensor(prompts, device=bench.device).repeat_interleave(G, 0)
    with torch.no_grad():
        ids = bench.model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=settings)
    bench.model.set_attn_implementation("sdpa_grouped")
    bench.model.generation_config = config
    bench.model.train()
    return ids


def sampling(bench):
    """Completions of one length, then ragged ones; the weights' bits; the log-probs drawn from against token_logprobs."""
    P, G, S, T = bench.work.values()
    prompts, rows = bench.prompts(P, S), P * G
    ours = lambda: common.generate(bench.model, bench.tokenizer, prompts, G, T, 1.0)  # noqa: E731
    before = [p.to("cpu", copy=True) for p in bench.model.parameters()]
    bench.stop_at()
    ours()  # whatever is set up once
    _, fixed, peak = bench.timed(ours, 3 if bench.size == "tiny" else 1)
    plain_generate(bench, prompts, G, 2)
    _, plain, plain_peak = bench.timed(lambda: plain_generate(bench, prompts, G, T), 3 if bench.size == "tiny" else 1)
    config, itemsize = bench.model.config, bench.model.dtype.itemsize
    head_dim = config.hidden_size // config.num_attention_heads
    weights = (bench.parameters - (0 if config.tie_word_embeddings else config.vocab_size * config.hidden_size)) * itemsize
    cache = 2 * config.num_hidden_layers * config.num_key_value_heads * head_dim * itemsize * rows * (S + T / 2)
    floor = (weights + cache + 2 * 4 * rows * config.vocab_size) / bench.bandwidth   # logits: written and read, float32
    bench.report("rollout, one length: tokens a second", rows * T / fixed, "tokens/s", rows / floor, rows * T / plain)
    bench.report("rollout, one length: a token step", fixed / T * 1e3, "ms", floor * 1e3, plain / T * 1e3)
    if peak:
        bench.report("rollout: peak memory", peak, "GiB", None, plain_peak)
    bench.ragged()
    ours()
    (rollout, fast, _), slow = bench.timed(ours), bench.timed(lambda: plain_generate(bench, prompts, G, T))[1]
    lengths = rollout["mask"].sum(1)
    bench.report(f"rollout, ragged (mean {lengths.mean():.0f}, longest {lengths.max():.0f}): seconds", fast, "s", None, slow)
    bench.report("weights whose bits a rollout changed", sum(int((a != b.cpu()).sum()) for a, b in zip(before, bench.model.parameters())))
    agreement(bench, prompts[:4], G, min(T, 64))


def agreement(bench, prompts, G, T):
    """The log-probs that tokens were drawn with, against those of token_logprobs on the finished rows."""
    seen, write = {}, common.Decoding.write

    def spy(rows, logits, temperature, stop):
        write(rows, logits, temperature, stop)
        kept = seen.setdefault("logp", torch.zeros(rows.ids.shape, device=logits.device))
        token = rows.ids[rows.alive, rows.position]
        kept[rows.alive, rows.position] = logits.float().log_softmax(-1).gather(1, token[:, None])[:, 0]
    common.Decoding.write = spy
    try:
        rollout = common.generate(bench.model, bench.tokenizer, prompts, G, T, 1.0)
    finally:
        common.Decoding.write = write
    with torch.no_grad():
        logp = common.token_logprobs(bench.model, rollout, 1.0)
    mask = rollout["mask"] > 0
    start = len(prompts[0])
    gap = (seen["logp"][:, start:start + mask.shape[1]] - logp)[mask].abs()
    bench.report("log-probs drawn with and of token_logprobs: mean gap", gap.mean().item(), "nats")
    bench.report("log-probs drawn with and of token_logprobs: largest", gap.max().item(), "nats")


# --- training

def ragged_rollout(bench, G=None, P=None):
    """A rollout without sampling: log-normal lengths, median T/4, at most T; every second advantage positive."""
    P, G, S, T = P or bench.work["P"], G or bench.work["G"], bench.work["S"], bench.work["T"]
    rng, rows = random.Random(0), []
    for prompt in bench.prompts(P, S):
        for _ in range(G):
            n = min(T, max(1, round(rng.lognormvariate(0, 0.7) * T / 4)))
            rows.append((prompt[rng.randrange(S // 2):], [rng.randrange(200, 500) for _ in range(n)]))
    L = max(len(p) + len(c) for p, c in rows)
    length = lambda parts: torch.tensor([sum(map(len, part)) for part in parts])[:, None]  # noqa: E731
    rollout = {"ids": torch.tensor([p + c + [0] * (L - len(p + c)) for p, c in rows]),
               "attention": (torch.arange(L) < length(rows)).long(),
               "mask": (torch.arange(max(len(c) for _, c in rows)) < length([[c] for _, c in rows])).float()}
    rollout |= {"old_logp": rollout["mask"] * -5.0, "ref_logp": rollout["mask"] * -5.0,
                "adv": torch.tensor([1.0, -1.0] * (len(rows) // 2))}
    return {name: value.to(bench.device) for name, value in rollout.items()}


def plain_micro_batches(batch, tokens):
    """A fixed number of rows in the order they came, padded to the longest of the batch: as many as `tokens` allow."""
    rows = max(1, tokens // batch["ids"].shape[1])
    for i in range(0, len(batch["ids"]), rows):
        yield common.select(batch, slice(i, i + rows))


def plain_logprobs(model, batch, temperature, with_entropy=False):
    """log_softmax of whole logits, (N, L, V) in float32, and a gather."""
    logits = model(input_ids=batch["ids"], attention_mask=batch["attention"], use_cache=False).logits[:, :-1].float()
    log_p = (logits / temperature).log_softmax(-1)
    of_next = log_p.gather(2, batch["ids"][:, 1:, None]).squeeze(2)                  # (N, L - 1)
    start = (batch["attention"].sum(1) - batch["mask"].sum(1).long() - 1)[:, None]
    place = (start + torch.arange(batch["mask"].shape[1], device=of_next.device)).clamp(max=of_next.shape[1] - 1)
    logp = of_next.gather(1, place) * batch["mask"]
    if not with_entropy:
        return logp
    entropy = -(log_p.exp() * log_p).sum(2).gather(1, place) * batch["mask"]
    return logp, entropy


@contextlib.contextmanager
def replaced(**functions):
    """common's functions exchanged for plain ones."""
    saved = {name: getattr(common, name) for name in functions}
    vars(common).update(functions)
    try:
        yield
    finally:
        vars(common).update(saved)


def training(bench):
    """An update on ragged rows, and what each of its parts gains."""
    rollout, args = ragged_rollout(bench), bench.args
    update = lambda: grpo.update(bench.model, bench.optimizer, rollout, args)  # noqa: E731
    repeats = 3 if bench.size == "tiny" else 1
    update()
    (stats, seconds, peak), tokens = bench.timed(update, repeats), rollout["attention"].sum().item()
    with replaced(micro_batches=plain_micro_batches):
        update()
        plain_stats, unsorted, _ = bench.timed(update, repeats)
    floor = 6 * bench.parameters / bench.rate  # seconds a token
    mfu = floor * tokens / seconds
    bench.report("update: tokens a second (plain: unsorted rows)", tokens / seconds, "tokens/s", 1 / floor, tokens / unsorted)
    bench.report("update: MFU, 6 x parameters x tokens", 100 * mfu, "%")
    bench.report("update: padding (plain: unsorted rows)", 100 * stats["padding"], "%", None, 100 * plain_stats["padding"])
    if peak:
        bench.report("update: peak memory", peak, "GiB")
    part = next(iter(common.micro_batches(rollout, min(args.micro_batch_tokens, 8192))))

    def backward(logprobs):
        (logprobs(bench.model, part, 1.0).sum() * 1e-9).backward()
        bench.optimizer.gradients = [None] * len(bench.optimizer.gradients)
    backward(common.token_logprobs), backward(plain_logprobs)
    _, chunked, peak = bench.timed(lambda: backward(common.token_logprobs), repeats)
    _, whole, plain_peak = bench.timed(lambda: backward(plain_logprobs), repeats)
    bench.report("forward and backward of a micro-batch (plain: whole logits)", chunked, "s", None, whole)
    if peak:
        bench.report("its peak memory (plain: whole logits)", peak, "GiB", None, plain_peak)


def truth(bench):
    """What the weights' type does: log-probs before any update that should be the old ones, and those of a float32 copy."""
    args, rollout = bench.args, ragged_rollout(bench)
    score = lambda model, cut: common.score_rows(  # noqa: E731
        lambda b: common.token_logprobs(model, b, 1.0), rollout, argparse.Namespace(**vars(args) | cut))[0]
    old = rollout["old_logp"] = score(bench.model, {})
    worst = {"token": 0.0, "sequence": 0.0}
    for part in common.minibatches(rollout, args.minibatches, args.group_size):
        for b in common.micro_batches(part, args.micro_batch_tokens):
            gap = (common.token_logprobs(bench.model, b, 1.0).detach() - b["old_logp"]) * b["mask"]
            worst["token"] = max(worst["token"], gap.abs().max().item())
    bench.report("largest log-ratio before an update: a token's", worst["token"], "nats")
    gap = (score(bench.model, {"minibatches": 1}) - old) * rollout["mask"]
    bench.report("  had the rows been cut otherwise", gap.abs().max().item(), "nats")
    bench.report("  a sequence's then, in widths of GSPO's window (3e-4)", (gap.sum(1) / rollout["mask"].sum(1)).abs().max().item() / 3e-4)
    if bench.size != "7B":
        exact = transformers.AutoModelForCausalLM.from_config(bench.model.config, dtype=torch.float32).to(bench.device)
        exact.load_state_dict(bench.model.state_dict())
        gap = (score(exact, {}) - old).abs()[rollout["mask"] > 0]
        bench.report(f"log-probs of {args.dtype} and float32: mean gap", gap.mean().item(), "nats")
        bench.report(f"log-probs of {args.dtype} and float32: largest", gap.max().item(), "nats")
        losses = [grpo.policy_loss(score(model, {}), old, None, rollout["adv"], rollout["mask"],
                                   argparse.Namespace(**vars(args) | {"beta": 0.0}))[0].item() / len(old) for model in (bench.model, exact)]
        bench.report(f"loss of {args.dtype} and float32: gap", abs(losses[0] - losses[1]))


# --- the whole step

def reward(problems, texts):
    return torch.tensor([float(len(text) % 7) for text in texts])


def step_by_part(bench, reference, problems):
    """collect and update as grpo.py has them; seconds and peak memory of each part."""
    parts, peaks, scored = {}, {}, iter(["old log-probs", "reference log-probs"])

    def watch(name, function):
        def wrapped(*args, **kwargs):
            label = name or next(scored)
            out, seconds, peak = bench.timed(lambda: function(*args, **kwargs))
            parts[label], peaks[label] = parts.get(label, 0) + seconds, peak and max(peak, peaks.get(label, 0))
            return out
        return wrapped
    with replaced(generate=watch("sampling", common.generate), score_rows=watch(None, common.score_rows)):
        rollout, _ = grpo.collect(bench.model, reference, bench.tokenizer, problems, reward, bench.args)
    step = bench.optimizer.step
    bench.optimizer.step = watch("optimiser", step)
    _, seconds, peak = bench.timed(lambda: grpo.update(bench.model, bench.optimizer, rollout, bench.args))
    bench.optimizer.step = step
    parts["forward and backward"], peaks["forward and backward"] = seconds - parts["optimiser"], peak
    return parts, peaks


def plain_step(bench, reference):
    """The same rollout and update the plain way: eager generate, whole logits, unsorted micro-batches of fixed size."""
    P, G, S, T = bench.work.values()

    def generate(model, tokenizer, prompts, group_size, max_new_tokens, temperature):
        ids = plain_generate(bench, prompts, group_size, max_new_tokens)
        ids = torch.nn.functional.pad(ids, (0, S + T - ids.shape[1]))
        stop = torch.tensor(common.stop_ids(model, tokenizer), device=ids.device)
        return common.as_rollout(ids, torch.full((len(ids),), S, device=ids.device), max_new_tokens, stop, tokenizer)
    with replaced(generate=generate, token_logprobs=plain_logprobs, micro_batches=numbered(plain_micro_batches)):
        rollout, _ = grpo.collect(bench.model, reference, bench.tokenizer, bench.problems(P, S), reward, bench.args)
        grpo.update(bench.model, bench.optimizer, rollout, bench.args)


def numbered(cut):
    """Micro-batches with their rows' places, which score_rows asks for."""
    return lambda batch, tokens: cut(batch | {"place": torch.arange(len(batch["ids"]), device=batch["ids"].device)}, tokens)


def whole_step(bench):
    """Sampling, scoring and update on ragged rows, against the plain loop and TRL."""
    P, G, S, T = bench.work.values()
    bench.ragged()
    reference = transformers.AutoModelForCausalLM.from_config(bench.model.config, dtype=bench.model.dtype).to(bench.device)
    reference.eval().requires_grad_(False)
    problems = bench.problems(P, S)
    whole = lambda: step_by_part(bench, reference, problems)  # noqa: E731
    whole()
    runs = [whole() for _ in range(7 if bench.size == "tiny" else 1)]
    seconds = statistics.median(sum(parts.values()) for parts, _ in runs)
    plain = lambda: plain_step(bench, reference)  # noqa: E731
    plain()
    slow = statistics.median(bench.timed(plain)[1] for _ in runs)  # lengths vary from run to run
    for name in runs[0][0]:
        bench.report(f"step: {name}", statistics.median(parts[name] for parts, _ in runs), "s")
        if runs[0][1][name]:
            bench.report(f"step: {name}, peak memory", max(peaks[name] for _, peaks in runs), "GiB")
    bench.report("step: all (against the plain loop)", seconds, "s", None, slow)
    if all(importlib.util.find_spec(name) for name in ("trl", "datasets")):
        del reference
        theirs, length = trl_step(bench)
        bench.report(f"step: all (against TRL's GRPOTrainer, mean length {length:.0f})", seconds, "s", None, theirs)


def trl_step(bench, rollouts=8):
    """Seconds a rollout and its optimiser steps take in TRL's GRPOTrainer: same model, prompts, group, limit, minibatches and
    KL term. The first rollout does not count. Also the mean length of its completions, to show that the work is the same."""
    import datasets
    import trl
    from conftest import tiny_tokenizer
    (P, G, S, T), args = bench.work.values(), bench.args
    tokenizer = tiny_tokenizer(bench.model.config.vocab_size, eos=f"t{STOP}", pad=f"t{STOP}")
    texts = [" ".join(f"t{i}" for i in prompt) for prompt in bench.prompts(P, S)]
    data = datasets.Dataset.from_dict({"prompt": texts * rollouts})
    times, lengths = [], []

    class Clock(transformers.TrainerCallback):
        def on_step_end(self, *_, **__):
            bench.synchronize()
            times.append(time.perf_counter())
    def scored(completions, **_):
        lengths.extend(1 + len(text.split("t")) - 1 for text in completions)  # the stop token is not in the text
        return reward(None, completions).tolist()
    bench.model.set_attn_implementation("sdpa")
    with tempfile.TemporaryDirectory() as out, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        bench.model.save_pretrained(out)  # it loads the reference from where the model came
        bench.model.config._name_or_path = out
        config = trl.GRPOConfig(
            output_dir=out, per_device_train_batch_size=P * G // args.minibatches, steps_per_generation=args.minibatches,
            gradient_accumulation_steps=1, num_generations=G, max_completion_length=T, beta=args.beta, temperature=1.0,
            top_k=0, top_p=1.0, loss_type="grpo", learning_rate=1e-9, max_steps=rollouts * args.minibatches, report_to="none",
            save_strategy="no", logging_strategy="no", disable_tqdm=True, bf16=bench.model.dtype == torch.bfloat16,
            gradient_checkpointing=args.gradient_checkpointing, use_cpu=bench.device.type == "cpu", shuffle_dataset=False)
        trainer = trl.GRPOTrainer(model=bench.model, args=config, train_dataset=data, processing_class=tokenizer,
                                  reward_funcs=scored, callbacks=[Clock()])
        with contextlib.redirect_stdout(None):  # its own statistics
            trainer.train()
    bench.model.set_attn_implementation("sdpa_grouped")
    ends = times[args.minibatches - 1::args.minibatches]
    return statistics.median(b - a for a, b in zip(ends, ends[1:])), statistics.mean(lengths)


def scaling(bench):
    """Seconds of a whole step as prompts, group or length (of prompts and completions) double three times."""
    bench.stop_at()
    saved = vars(bench.args).copy()
    for name in ("prompts", "group_size", "max_new_tokens"):
        took, first = [], DOUBLED.get(bench.size, {}).get(name, 0.25)
        for times in (first, 2 * first, 4 * first, 8 * first):
            value = int(saved[name] * times)
            vars(bench.args).update(saved | {name: value, "beta": 0.0})
            S = bench.work["S"] if name != "max_new_tokens" else int(bench.work["S"] * times)
            problems = bench.problems(bench.args.prompts, S)

            def step():
                rollout, _ = grpo.collect(bench.model, None, bench.tokenizer, problems, reward, bench.args)
                grpo.update(bench.model, bench.optimizer, rollout, bench.args)
            if not took:
                step()
            took.append(bench.timed(step, 3 if bench.size == "tiny" else 1)[1])
            if len(took) > 1:
                bench.report(f"{name} {value}: times the seconds of half as many", took[-1] / took[-2], "x")
        bench.report(f"{name}: seconds after three doublings, over 8 times those before", took[-1] / took[0] / 8, "x")
        vars(bench.args).update(saved)


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model-size", choices=SIZES, default="tiny", help="tiny, or a size of Qwen2.5")
    parser.add_argument("--json", metavar="FILE", help="write the table there too")
    args, script_args = parser.parse_known_args(argv)
    began, bench = time.perf_counter(), Bench(args.model_size, script_args)
    where = torch.cuda.get_device_name() if bench.device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    about = (f"{time.strftime('%Y-%m-%d')}  {args.model_size}: {bench.parameters / 1e6:,.1f}M parameters, {bench.args.dtype}  {where}  "
             f"torch {torch.__version__}, transformers {transformers.__version__}")
    print(about, "  ".join(f"{k} {v}" for k, v in bench.work.items()), sep="\n")
    print(f"{'':52}{'measured':>12}{'of floor':>20}{'against plain':>15}")
    for part in (floors, sampling, training, truth, whole_step, scaling):
        try:
            part(bench)
        except torch.OutOfMemoryError as error:
            print(f"{part.__name__}: {common.first_line(error)}")
        if args.json:
            Path(args.json).write_text(json.dumps({"about": about, "work": bench.work, "results": bench.results}, indent=1))
    print(f"{time.perf_counter() - began:.0f} s")


if __name__ == "__main__":
    main()

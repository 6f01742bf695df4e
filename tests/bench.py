"""How fast a GRPO step is, part by part, and how much memory it takes.

    python tests/bench.py                      a model of a million weights, on a laptop's CPU
    python tests/bench.py --model-size 1.5B    a GPU; Qwen2.5's architecture with random weights
    python tests/bench.py --model DIR --dataset problems.jsonl --dtype bfloat16    your own model and problems

Further flags are grpo.py's. Each line of the table has a value and up to two comparisons:

of floor   The floor is the least time that arithmetic allows on this machine: at 100 % nothing is wasted. Two
           rates are measured first: "copy bandwidth", bytes read and written per second, and "matrix
           products", operations per second on large square matrices.
           - To sample a token for every row, all weights are read, and multiplied with every row (two
             operations each; both can be done at once), the cache of keys and values is read, and float32
             logits are written and read: max(weight bytes / bandwidth, 2 x weights x rows / rate)
             + (cache + logits) bytes / bandwidth. Before, prompts are read: 2 x weights x tokens / rate.
           - An update takes 2 operations per weight and token forward and 4 backward; its share is known as
             MFU. The output head counts for completion tokens only; attention is left out. With
             checkpointing the forward pass is computed twice, so that 75 % is the most.
plain      How many times faster (or smaller) than the plain way: transformers' `generate`, micro-batches of a
           fixed number of rows in the order they came, log_softmax of whole logits. The two take turns, and
           this is the median of the ratios of the pairs: what else the machine does falls on both. On a CPU
           it is the CPU time of one thread. TRL's GRPOTrainer, if installed, takes turns with us likewise.

"rollout" samples P x G completions, all of T tokens, or "ragged": each token is the last with probability
4/T, so that their mean length is T/4 (a --model ends them where it does). "update" is a pass of forward,
backward and optimiser over ragged rows, "padding" the share of computed positions without a token. "step" is
all of it: sampling, log-probs of policy and reference, update, each with its share of the seconds. Peak
memory (GPU only) includes weights and optimiser.
"""
import argparse
import contextlib
import copy
import importlib.util
import math
import statistics
import sys
import time
import unittest.mock
from pathlib import Path

import tokenizers
import torch
import transformers

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import common  # noqa: E402
import grpo  # noqa: E402

SHAPE = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
         "num_key_value_heads", "vocab_size", "tie_word_embeddings")
SIZES = {  # name -> sizes of Qwen2.5, and the work: P prompts of S tokens, G completions of at most T each
    "tiny": ((128, 384, 4, 4, 2, 512, False), dict(P=8, G=8, S=32, T=64)),
    "0.5B": ((896, 4864, 24, 14, 2, 151936, True), dict(P=32, G=8, S=128, T=512)),
    "1.5B": ((1536, 8960, 28, 12, 2, 151936, True), dict(P=32, G=8, S=128, T=512)),
    "7B": ((3584, 18944, 28, 28, 4, 152064, False), dict(P=32, G=8, S=128, T=1024))}
STOP = 0  # the token that ends a completion
TRL = importlib.util.find_spec("trl")
STOP_IDS = common.stop_ids

class Bench:
    """The machine, the model, the work and the table."""
    def __init__(self, size, model, script_args):
        P, G, S, T = SIZES[size][1].values() if model is None else (16, 8, None, 48)
        work = [f"--prompts={P}", f"--group_size={G}", f"--max_new_tokens={T}"]
        self.args = grpo.parse_args(work + ["--out=."] + script_args + (["--model", model] if model else []))
        P, G, T = self.args.prompts, self.args.group_size, self.args.max_new_tokens
        self.table, self.gpu, self.pairs = {}, self.args.device != "cpu", 3
        self.clock = time.perf_counter if self.gpu else time.process_time
        torch.manual_seed(0)
        torch.backends.cuda.enable_cudnn_sdp(False)  # as in common.launch
        self.is_real = model is not None
        if self.is_real:
            self.load(P)
        else:
            self.make(size, P, S)
        self.work = dict(P=P, G=G, S=round(statistics.mean(map(len, self.prompts))), T=T)
        self.reference = copy.deepcopy(self.model) if self.args.beta > 0 else None
        disk = unittest.mock.Mock(return_value=unittest.mock.Mock(free=math.inf))  # nothing is saved
        with contextlib.redirect_stdout(None), unittest.mock.patch("shutil.disk_usage", disk):
            common.resolve_and_check(self.args, self.model)
        self.optimizers = {"policy": common.Optimizer(self.model, 1e-9, self.args)}
        head, embedding = self.model.get_output_embeddings().weight, self.model.get_input_embeddings().weight
        self.head = head.numel()
        self.body = self.model.num_parameters() - self.head
        if head is not embedding:  # a row of it is read for a token, no more
            self.body -= embedding.numel()

    def load(self, P):
        """Read a model, its tokenizer and the prompts of the first P problems."""
        with contextlib.redirect_stdout(None):
            self.model, self.tokenizer = common.load_policy(self.args)
            common.resolve_defaults(self.args, self.model)
            problems, _ = common.load_problems(self.args, self.tokenizer, common.answer_reward)
        self.prompts = [problem["prompt"] for problem in common.batch_of(problems, 1, self.args)]

    def make(self, size, P, S):
        """Make a model of Qwen2.5's architecture, a tokenizer and P prompts of S tokens."""
        if size == "tiny":
            self.pairs = 7
        config = transformers.Qwen2Config(**dict(zip(SHAPE, SIZES[size][0])), max_position_embeddings=32768)
        with torch.device(self.args.device):
            self.model = transformers.AutoModelForCausalLM.from_config(
                config, dtype=getattr(torch, self.args.dtype)).train()
        words = tokenizers.models.WordLevel({f"t{i}": i for i in range(config.vocab_size)}, unk_token="t1")
        words = tokenizers.Tokenizer(words)
        words.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
        self.tokenizer = transformers.PreTrainedTokenizerFast(
            tokenizer_object=words, eos_token="t0", pad_token="t0", unk_token="t1")
        self.prompts = torch.randint(200, 500, (P, S)).tolist()

    def stop_with(self, p):
        """Make STOP the next token with probability p, whoever samples: feature 0 is 1 in all embeddings,
        the others next to nothing, and the head weighs it more for STOP. A real model is left as it is, and
        goes on behind its end where p is next to 0."""
        if self.is_real:
            common.stop_ids = STOP_IDS if p > 1e-3 else lambda model, tokenizer: []
            return
        others, width = self.model.config.vocab_size - 1, self.model.config.hidden_size
        odds = p / (1 - p) * others
        for name, weight in self.model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight", "embed_tokens.weight", "lm_head.weight")):
                weight.data.clamp_(-1e-5, 1e-5)
                weight.data[:, 0] = float(not name.endswith("proj.weight"))
        self.model.get_output_embeddings().weight.data[STOP, 0] += math.log(odds) / width ** 0.5

    def seconds(self, function):
        """Of one run, its result, and the peak of the GPU's memory in GiB."""
        if not self.gpu:
            began, result = self.clock(), function()
            return self.clock() - began, result, None
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        began, result = self.clock(), function()
        torch.cuda.synchronize()
        return self.clock() - began, result, torch.cuda.max_memory_allocated() / 2**30

    def race(self, ours, plain):
        """Both in turn, after a run each that does not count: median seconds of ours, median ratio of the
        pairs, results and peak memory of the last pair."""
        self.seconds(ours), self.seconds(plain)
        runs = [(self.seconds(ours), self.seconds(plain)) for _ in range(self.pairs)]
        ratio = statistics.median(b[0] / a[0] for a, b in runs)
        _, results, peaks = zip(*runs[-1])
        return statistics.median(a[0] for a, _ in runs), ratio, results, peaks

    def report(self, name, value, unit, floor=None, plain=None, peaks=(None, None)):
        """A line of the table, and one for the peak memory."""
        self.table[name] = value, floor, plain
        shares = ["" if floor is None else f"{floor:.1%}", "" if plain is None else f"{plain:.2f}x"]
        print(f"{name:44}{value:12.4g} {unit:9}{shares[0]:>10}{shares[1]:>10}", flush=True)
        if peaks[0]:
            self.report(f"  peak memory of {name}", peaks[0], "GiB", None, peaks[1] / peaks[0])

def rates(bench):
    """Bytes per second, read and written, and operations per second: the most in six runs."""
    a = torch.ones(2 ** (30 if bench.gpu else 25), device=bench.args.device)
    b, n = torch.empty_like(a), 8192 if bench.gpu else 1024
    x = torch.randn(n, n, device=bench.args.device, dtype=bench.model.dtype)
    best = [min(bench.seconds(lambda: [function() for _ in range(4)])[0] for _ in range(6))
            for function in (lambda: b.copy_(a), lambda: x @ x)]
    bench.bandwidth, bench.rate = 4 * 2 * a.nbytes / best[0], 4 * 2 * n ** 3 / best[1]
    bench.report("copy bandwidth", bench.bandwidth / 1e9, "GB/s")
    bench.report("matrix products", bench.rate / 1e12, "TFLOP/s")

GENERATE = common.generate

def plain_generate(model, *given):
    """common.generate by transformers' generate, as for the models that need it."""
    model.sampled_by_transformers = True
    rollout = GENERATE(model, *given)
    model.sampled_by_transformers = False
    return rollout

def plain_micro_batches(batch, tokens, *_):
    """A fixed number of rows in the order they came, padded to the longest of the batch."""
    rows = max(1, min(tokens, 8192) // batch["ids"].shape[1])
    for i in range(0, len(batch["ids"]), rows):
        yield common.select(batch, slice(i, i + rows))

def plain_logprobs(model, batch, temperature):
    """log_softmax of whole logits, (N, L, V) in float32, and a gather."""
    logits = model(input_ids=batch["ids"], attention_mask=batch["attention"], use_cache=False).logits
    logp = (logits[:, :-1].float() / temperature).log_softmax(-1)
    logp = logp.gather(2, batch["ids"][:, 1:, None]).squeeze(2)  # (N, L - 1)
    start = (batch["attention"].sum(1) - batch["mask"].sum(1).long() - 1)[:, None]
    place = (start + torch.arange(batch["mask"].shape[1], device=logp.device)).clamp(max=logp.shape[1] - 1)
    return logp.gather(1, place) * batch["mask"]

PLAIN = dict(generate=plain_generate, micro_batches=plain_micro_batches, token_logprobs=plain_logprobs)
plainly = unittest.mock.patch.multiple(common, **PLAIN)  # decorator: with common's ways exchanged

def rollout(bench):
    """Sampling against its floor and against transformers' generate."""
    P, G, S, T = bench.work.values()
    config, rows = bench.model.config, P * G
    sampler = lambda generate: lambda: generate(  # noqa: E731
        bench.model, bench.tokenizer, bench.prompts, G, T, 1.0, bench.args.cuda_graphs)
    read, itemsize = bench.body + bench.head, bench.model.dtype.itemsize
    width = config.hidden_size // config.num_attention_heads * config.num_key_value_heads
    cache = 2 * config.num_hidden_layers * width * itemsize * rows * (S + T / 2)
    step = max(read * itemsize / bench.bandwidth, 2 * read * rows / bench.rate)
    step += (cache + 2 * 4 * rows * config.vocab_size) / bench.bandwidth
    floor = T * step + 2 * bench.body * P * S / bench.rate
    for p, name in ((1e-9, f"rollout, all of {T} tokens"), (4 / T, "rollout, ragged")):
        bench.stop_with(p)
        took, ratio, (ours, _), peaks = bench.race(sampler(common.generate), sampler(plain_generate))
        share = floor / took if p < 1e-3 else None
        bench.report(name, ours["mask"].sum().item() / took, "tokens/s", share, ratio, peaks)

def update(bench):
    """Forward, backward and optimiser, against micro-batches as they come and whole logits."""
    P, G, _, T = bench.work.values()
    batch = common.generate(bench.model, bench.tokenizer, bench.prompts, G, T)
    adv = torch.tensor([1.0, -1.0], device=batch["ids"].device).repeat(P * G // 2)[:, None]
    batch |= {"adv": adv, "old_logp": batch["mask"] * -5, "ref_logp": batch["mask"] * -5}
    ours = lambda: grpo.update(bench.model, bench.optimizers, batch, bench.args)  # noqa: E731
    took, ratio, stats, peaks = bench.race(ours, plainly(ours))
    tokens = batch["attention"].sum().item()
    floor = 6 * (bench.body * tokens + bench.head * batch["mask"].sum().item()) / bench.rate
    bench.report("update", tokens / took, "tokens/s", floor / took, ratio, peaks)
    ours, plain = (stat["padding"] for stat in stats)
    bench.report("padding", 100 * ours, "%", None, plain / ours)

def step(bench):
    """What grpo.py does in a step; the seconds of its parts."""
    def reward(problems, completions):
        return [float(len(text) % 2) for text in completions]
    problems = [{"prompt": prompt} for prompt in bench.prompts]
    began = time.perf_counter()
    batch, _ = grpo.collect(bench.model, bench.reference, bench.tokenizer, problems, reward, bench.args)
    collected = time.perf_counter()
    grpo.update(bench.model, bench.optimizers, batch, bench.args)
    sampling, seconds = batch["seconds"], time.perf_counter() - collected
    return {"sampling": sampling, "log-probs": collected - began - sampling, "update": seconds}

def whole_step(bench):
    """Ragged rows, against a step with everything plain, and TRL."""
    bench.stop_with(4 / bench.work["T"])
    ours = lambda: step(bench)  # noqa: E731
    took, ratio, (parts, plain), peaks = bench.race(ours, plainly(ours))
    bench.report("step", took, "s", None, ratio, peaks)
    for name, seconds in parts.items():
        bench.report(f"step, {name}", 100 * seconds / sum(parts.values()), "%", None, plain[name] / seconds)
    if TRL:
        from results.beside_trl import race
        took, ratio, length = race(bench, ours)
        bench.report(f"step, plain: TRL (mean length {length:.0f})", took, "s", None, ratio)

def main(argv=None):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model-size", choices=SIZES, default="tiny", help="tiny, or a size of Qwen2.5")
    parser.add_argument("--model", help="a directory or hub name, with --dataset")
    args, script_args = parser.parse_known_args(argv)
    began, bench = time.perf_counter(), Bench(args.model_size, args.model, script_args)
    where = torch.cuda.get_device_name() if bench.gpu else f"CPU, {torch.get_num_threads()} threads"
    print(f"{args.model or args.model_size}, {bench.args.dtype}, {where}, torch {torch.__version__}, "
          f"transformers {transformers.__version__}, {bench.pairs} pairs, {bench.work}")
    print(f"{'':44}{'measured':>12}{'of floor':>20}{'plain':>10}")
    for part in (rates, rollout, update, whole_step):
        try:
            part(bench)
        except torch.OutOfMemoryError as error:
            print(f"{part.__name__}: {error}")
    print(f"{time.perf_counter() - began:.0f} s")
    return bench.table

if __name__ == "__main__":
    main()

"""How fast a GRPO step is, part by part.

    python tests/tools/bench.py                                                   the toy
    python tests/tools/bench.py --model DIR --dataset problems.jsonl --prompts 8    your own

All flags of grpo.py are known. Each line of the table has a value and up to two comparisons:

of floor   The floor is the least time that arithmetic allows at the two rates measured first. To sample a
           token of every row all weights, keys, values and logits are read; an update takes 6 operations per
           weight and token (with checkpointing 8, so that 75 % is the most).
plain      How many times faster than the plain way: transformers' `generate`, micro-batches of a fixed number
           of rows in the order they came, log_softmax of whole logits. They take turns: this is the median of
           the ratios of the pairs, on a CPU of CPU time.

"rollout" samples P x G completions of T tokens, as if there were no end-of-sequence. A "step" is sampling,
log-probs of policy and reference, and update. Rewards are 0 and 1 in turn.
"""
import argparse
import copy
import statistics
import sys
import time
from pathlib import Path
from unittest import mock

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the root of the repository
import common, grpo  # noqa: E401, E402

class Bench:
    """The machine, the model, the work and the table."""
    def __init__(self, flags):
        self.args, self.table = grpo.parse_args(flags), {}
        self.gpu = self.args.device != "cpu"
        self.clock = time.perf_counter if self.gpu else time.process_time
        torch.manual_seed(0)
        self.model, self.tokenizer = common.load_policy(self.args)  # on a GPU with its reader
        problems, _ = common.load_problems(self.args, self.tokenizer)
        self.problems = common.batch_of(problems, 1, self.args.prompts, self.args.seed)
        mean = round(statistics.mean(len(problem["prompt"]) for problem in self.problems))
        self.work = dict(P=self.args.prompts, G=self.args.group_size, S=mean, T=self.args.max_new_tokens)
        self.reference = copy.deepcopy(self.model) if self.args.beta != 0 else None
        self.optimizers = {"policy": common.Optimizer(self.model, 1e-9, self.args)}
        self.head = self.model.get_output_embeddings().weight.numel()
        self.body = sum(weight.numel() for weight in self.model.base_model.parameters())
        self.body -= self.model.get_input_embeddings().weight.numel()  # a token reads one row of it

    def seconds(self, function):
        """Of one run, and its result."""
        wait = torch.cuda.synchronize if self.gpu else int
        wait()
        began, result = self.clock(), function()
        wait()
        return self.clock() - began, result

    def race(self, ours, plain):
        """Both in turn, three times after a run each that does not count: median seconds of ours, median
        ratio of the pairs, results of the last pair."""
        runs = [(self.seconds(ours), self.seconds(plain)) for _ in range(1 + 3)][1:]
        took, ratios = zip(*((a[0], b[0] / a[0]) for a, b in runs))
        return statistics.median(took), statistics.median(ratios), [result for _, result in runs[-1]]

    def report(self, name, value, unit, floor=None, plain=None):
        """A line of the table."""
        self.table[name] = value, floor, plain
        shares = ["" if floor is None else f"{floor:.1%}", "" if plain is None else f"{plain:.2f}x"]
        print(f"{name:20}{value:12.4g} {unit:9}{shares[0]:>10}{shares[1]:>10}", flush=True)

def rates(bench):
    """Bytes per second, read and written, and operations per second: the most in six runs."""
    size, n = (2 ** 30, 8192) if bench.gpu else (2 ** 25, 1024)
    a, b = torch.ones(2, size, device=bench.args.device)
    x = torch.randn(n, n, device=bench.args.device, dtype=getattr(torch, bench.args.dtype))
    copy_s, product_s = (min(bench.seconds(lambda: [function() for _ in range(4)])[0] for _ in range(6))
                         for function in (lambda: b.copy_(a), lambda: x @ x))
    bench.bandwidth, bench.rate = 4 * 2 * a.nbytes / copy_s, 4 * 2 * n ** 3 / product_s
    bench.report("copy bandwidth", bench.bandwidth / 1e9, "GB/s")
    bench.report("matrix products", bench.rate / 1e12, "TFLOP/s")

def plain_sample(model, prompts, group_size, temperature, stop, T):
    """common.sample by transformers' generate."""
    ids, real = common.padded(prompts, model.device, "left")
    written = model.generate(
        ids, attention_mask=real, num_return_sequences=group_size, max_new_tokens=T, do_sample=True,
        temperature=temperature, top_k=0, top_p=1.0, eos_token_id=stop.tolist(), pad_token_id=0)
    tokens = written[:, real.shape[1]:]
    return tokens, torch.zeros(tokens.shape, device=model.device)

def plain_micro_batches(batch, tokens):
    """A fixed number of rows in the order they came, padded to the longest of the batch."""
    rows = max(1, tokens // batch["ids"].shape[1])
    for i in range(0, len(batch["ids"]), rows):
        yield {name: x[i:i + rows] for name, x in batch.items()}

def plain_logprobs(model, batch, args):
    """log_softmax of whole logits, (N, L, V) in float32, and a gather."""
    with torch.autocast(args.device, getattr(torch, args.dtype), enabled=args.dtype != "float32"):
        logits = model(input_ids=batch["ids"], attention_mask=batch["attention"], use_cache=False).logits
    logp = (logits[:, :-1].float() / args.temperature).log_softmax(-1)
    logp = logp.gather(2, batch["ids"][:, 1:, None]).squeeze(2)  # (N, L - 1)
    start = batch["prompt_length"][:, None] - 1
    place = (start + torch.arange(batch["mask"].shape[1], device=logp.device)).clamp(max=logp.shape[1] - 1)
    return logp.gather(1, place) * batch["mask"]

plainly = mock.patch.multiple(  # decorator: with common's ways exchanged
    common, sample=plain_sample, micro_batches=plain_micro_batches, token_logprobs=plain_logprobs)

@mock.patch.object(common, "stop_ids", lambda *_: [2 ** 30])  # no token
def rollout(bench):
    """All of T tokens, against the floor and transformers' generate."""
    (P, G, S, T), config = bench.work.values(), bench.model.config.get_text_config()
    width = config.hidden_size // config.num_attention_heads * config.num_key_value_heads
    cache = 2 * config.num_hidden_layers * width * P * G * (S + T / 2)  # numbers; the head is in float32
    read = (bench.body + cache) * getattr(torch, bench.args.dtype).itemsize + 4 * bench.head
    least = T * max((read + 2 * 4 * P * G * config.vocab_size) / bench.bandwidth,
                    2 * (bench.body + bench.head) * P * G / bench.rate)
    ours = lambda: common.generate(  # noqa: E731
        bench.model, bench.tokenizer, bench.problems, G, 1.0, bench.args)
    took, ratio, _ = bench.race(ours, plainly(ours))
    bench.report("rollout", P * G * T / took, "tokens/s", least / took, ratio)

def one_step(bench):
    """What grpo.py does in a step: the seconds of its parts, and the least of the update."""
    def timed(*given, generate=common.generate):
        parts["sampling"], result = bench.seconds(lambda: generate(*given))
        return result
    rewards = lambda problems, texts: [float(i % 2) for i in range(len(texts))]  # noqa: E731
    parts, args = {}, bench.args
    given = bench.model, bench.reference, bench.tokenizer, bench.problems, rewards, args
    with mock.patch.object(common, "generate", timed):
        collected, (batch, _) = bench.seconds(lambda: grpo.collect(*given))
    parts["log-probs"] = collected - parts["sampling"]
    parts["update"], _ = bench.seconds(lambda: grpo.update(bench.model, bench.optimizers, batch, args))
    read, written = (batch[name].sum().item() for name in ("attention", "mask"))
    return parts, 6 * (bench.body * read + bench.head * written) / bench.rate * args.epochs

def step(bench):
    """Ragged rows, against a step with everything plain."""
    ours = lambda: one_step(bench)  # noqa: E731
    took, ratio, ((parts, least), (slower, _)) = bench.race(ours, plainly(ours))
    bench.report("step", took, "s", None, ratio)
    for name, seconds in parts.items():
        floor = least / seconds if name == "update" else None
        bench.report(f"step, {name}", seconds, "s", floor, slower[name] / seconds)

def main(argv=None):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter, allow_abbrev=False)
    _, flags = parser.parse_known_args(argv)
    bench = Bench(flags)
    where = torch.cuda.get_device_name() if bench.gpu else f"CPU, {torch.get_num_threads()} threads"
    print(f"{bench.args.model}, {bench.args.dtype}, {where}, {bench.work}")
    print(f"{'':20}{'measured':>12}{'of floor':>20}{'plain':>10}")
    for part in (rates, rollout, step):
        part(bench)
    return bench.table

if __name__ == "__main__":
    main()

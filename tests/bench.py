"""How fast a GRPO step is, part by part.

    python tests/bench.py                                                          the toy
    python tests/bench.py --model DIR --dataset problems.jsonl --dtype bfloat16    your own model and problems

Further flags are grpo.py's. Each line of the table has a value and up to two comparisons:

of floor   The floor is the least time that the matrix products of an update take at the rate measured first:
           6 operations per weight and token (with checkpointing 8, so that 75 % is the most).
plain      How many times faster than the plain way: transformers' `generate`, micro-batches of a fixed number
           of rows in the order they came, log_softmax of whole logits. So are TRL's GRPOTrainer, if it is
           installed, and with --against DIR the scripts of another checkout, with their own defaults.
           They take turns: this is the median of the ratios of the pairs, on a CPU of CPU time.

"rollout" samples P x G completions. A "step" is sampling, log-probs of policy and reference, and update.
Rewards are 0 and 1 in turn, but in a share of the groups (--equal) they are all 0: with --beta 0 such a group
has no gradient and is not computed.
"""
import argparse
import contextlib
import copy
import importlib
import importlib.util
import statistics
import sys
import time
from pathlib import Path
from unittest import mock

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import common  # noqa: E402
import grpo  # noqa: E402

TRL = importlib.util.find_spec("trl")

def script_of(folder):
    """The grpo.py of another checkout, with its own common.py."""
    ours = {name: sys.modules.pop(name) for name in ("common", "grpo")}
    with mock.patch.object(sys, "path", [folder, *sys.path]):
        other = importlib.import_module("grpo")
    sys.modules.update(ours)
    return other

class Bench:
    """The machine, the model, the work and the table."""
    def __init__(self, flags, equal=0.0, against=None):
        flags = ["--prompts=16", "--group_size=8", "--max_new_tokens=48", *flags]
        self.equal, self.other = equal, against and script_of(against)
        self.args_of = {script: script.parse_args(flags) for script in (grpo, self.other) if script}
        self.args = args = self.args_of[grpo]
        self.table, self.gpu, self.pairs = {}, args.device == "cuda", 3
        self.clock = time.perf_counter if self.gpu else time.process_time
        with contextlib.redirect_stdout(None):
            self.model, self.tokenizer = common.load_policy(args)
            problems, _ = common.load_problems(args, self.tokenizer)
        self.prompts = [problem["prompt"] for problem in common.batch_of(problems, 1, args)]
        S = round(statistics.mean(map(len, self.prompts)))
        self.work = {"P": args.prompts, "G": args.group_size, "S": S, "T": args.max_new_tokens}
        self.reference = copy.deepcopy(self.model) if args.beta != 0 else None
        self.optimizers_of = {script: {"policy": script.common.Optimizer(self.model, 1e-9, args)}
                              for script, args in self.args_of.items()}
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
        """Both in turn, after a run each that does not count: median seconds of ours, median ratio of the
        pairs, results of the last pair."""
        runs = [(self.seconds(ours), self.seconds(plain)) for _ in range(self.pairs + 1)][1:]
        took, ratios = zip(*((a[0], b[0] / a[0]) for a, b in runs))
        return statistics.median(took), statistics.median(ratios), [result for _, result in runs[-1]]

    def report(self, name, value, unit, floor=None, plain=None):
        """A line of the table."""
        self.table[name] = value, floor, plain
        shares = ["" if floor is None else f"{floor:.1%}", "" if plain is None else f"{plain:.2f}x"]
        print(f"{name:44}{value:12.4g} {unit:9}{shares[0]:>10}{shares[1]:>10}", flush=True)

def rates(bench):
    """Operations per second: the most in six runs of four products."""
    n = 8192 if bench.gpu else 1024
    x = torch.randn(n, n, device=bench.args.device, dtype=getattr(torch, bench.args.dtype))
    took = min(bench.seconds(lambda: [x @ x for _ in range(4)])[0] for _ in range(6))
    bench.rate = 4 * 2 * n ** 3 / took
    bench.report("matrix products", bench.rate / 1e12, "TFLOP/s")

def plain_sample(model, prompts, group_size, temperature, stop, T):
    """common.sample by transformers' generate."""
    ids, real = common.padded(prompts, model.device, "left")
    how = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0} if temperature else {}
    tokens = model.generate(
        ids, attention_mask=real, num_return_sequences=group_size, max_new_tokens=T,
        eos_token_id=stop.tolist() or [-1], pad_token_id=0, **how)[:, ids.shape[1]:]
    return tokens, torch.zeros(tokens.shape, device=model.device)

def plain_micro_batches(batch, tokens):
    """A fixed number of rows in the order they came, padded to the longest of the batch."""
    rows = max(1, tokens // batch["ids"].shape[1])
    for i in range(0, len(batch["ids"]), rows):
        yield {name: x[i:i + rows] for name, x in batch.items() if torch.is_tensor(x)}

def plain_logprobs(model, batch, args):
    """log_softmax of whole logits, (N, L, V) in float32, and a gather."""
    with torch.autocast(args.device, torch.bfloat16, enabled=args.dtype == "bfloat16"):
        logits = model(input_ids=batch["ids"], attention_mask=batch["attention"], use_cache=False).logits
    logp = (logits[:, :-1].float() / args.temperature).log_softmax(-1)
    logp = logp.gather(2, batch["ids"][:, 1:, None]).squeeze(2)  # (N, L - 1)
    start = batch["prompt_length"][:, None] - 1
    place = (start + torch.arange(batch["mask"].shape[1], device=logp.device)).clamp(max=logp.shape[1] - 1)
    return logp.gather(1, place) * batch["mask"]

plainly = mock.patch.multiple(  # decorator: with common's ways exchanged
    common, sample=plain_sample, micro_batches=plain_micro_batches, token_logprobs=plain_logprobs)

def rollout(bench):
    """Against transformers' generate."""
    ours = lambda: common.generate(  # noqa: E731
        bench.model, bench.tokenizer, bench.prompts, bench.work["G"], 1.0, bench.args)
    took, ratio, (found, _) = bench.race(ours, plainly(ours))
    bench.report("rollout", found["mask"].sum().item() / took, "tokens/s", None, ratio)

def rewards(bench):
    """Of a rollout: 0 in the first groups, a share of --equal, and 0 and 1 in turn in the others."""
    P, G, _, _ = bench.work.values()
    return [float(group >= bench.equal * P and i % 2) for group in range(P) for i in range(G)]

def one_step(bench, script=grpo):
    """What grpo.py does in a step: the seconds of its parts, and the least of the update."""
    def timed(*given, generate=script.common.generate):
        parts["sampling"], result = bench.seconds(lambda: generate(*given))
        return result
    parts, problems = {}, [{"prompt": prompt} for prompt in bench.prompts]
    reward, args = lambda problems, texts: rewards(bench), bench.args_of[script]  # noqa: E731
    if hasattr(bench.model, "reader"):  # a checkout with its own graphs; an older one knows no reader
        bench.model.reader = getattr(script.common, "RecordedReader", None)
    given = bench.model, bench.reference, bench.tokenizer, problems, reward, args
    with mock.patch.object(script.common, "generate", timed):
        collected, (batch, _) = bench.seconds(lambda: script.collect(*given))
    parts["log-probs"] = collected - parts["sampling"]
    given = bench.model, bench.optimizers_of[script], batch, args
    parts["update"], _ = bench.seconds(lambda: script.update(*given))
    if "has_gradient" in batch:
        batch = {name: batch[name][batch["has_gradient"]] for name in ("attention", "mask")}
    read, written = batch["attention"].sum().item(), batch["mask"].sum().item()
    return parts, 6 * (bench.body * read + bench.head * written) / bench.rate * bench.args.epochs

def step(bench):
    """Ragged rows, against a step with everything plain, and TRL."""
    ours = lambda: one_step(bench)  # noqa: E731
    beside = {"": plainly(ours)}
    if bench.other:
        beside[", plain: the other checkout"] = lambda: one_step(bench, bench.other)
    for whom, plain in beside.items():
        took, ratio, ((parts, least), (theirs, _)) = bench.race(ours, plain)
        bench.report(f"step{whom}", took, "s", None, ratio)
        for name, seconds in parts.items():
            floor = least / seconds if name == "update" else None
            bench.report(f"step, {name}{whom}", seconds, "s", floor, theirs[name] / seconds)
    if TRL:
        from results.real.beside_trl import race
        took, ratio, length = race(bench, ours, rewards(bench))
        bench.report(f"step, plain: TRL (mean length {length:.0f})", took, "s", None, ratio)

def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--equal", type=float, default=0.0, help="share of groups of equal rewards")
    parser.add_argument("--against", metavar="DIR", help="another checkout of this repository")
    own, flags = parser.parse_known_args(argv)
    bench = Bench(flags, own.equal, own.against)
    where = torch.cuda.get_device_name() if bench.gpu else f"CPU, {torch.get_num_threads()} threads"
    print(f"{bench.args.model}, {bench.args.dtype}, {where}, {bench.work}, "
          f"groups of equal rewards: {bench.equal:.0%}")
    print(f"{'':44}{'measured':>12}{'of floor':>20}{'plain':>10}")
    for part in (rates, rollout, step):
        part(bench)
    return bench.table

if __name__ == "__main__":
    main()

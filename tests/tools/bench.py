"""Time a step of grpo.py, by wall-clock time on a GPU and by CPU time on a CPU.

    python tests/tools/bench.py                                                     the toy
    python tests/tools/bench.py --model DIR --dataset problems.jsonl --prompts 8    your own

It takes the flags of grpo.py. All numbers are medians of three runs, after one that does not count. For the
first ones, every completion gets --max_new_tokens tokens, without CUDA graphs, and on a GPU also with them.
A step is sampling, reward, log-probs, and the update, with rewards of 0 and 1 in turn.
"""
import copy
import sys
import time
from pathlib import Path
from statistics import median
from unittest import mock

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the root of the repository
import common  # noqa: E402
import grpo  # noqa: E402

def seconds(args, *functions):
    """Call the functions in turn, four times. Returns the seconds that each one took."""
    gpu, runs = args.device == "cuda", []
    clock, wait = (time.perf_counter, torch.cuda.synchronize) if gpu else (time.process_time, int)
    for _ in range(1 + 3):
        times = [clock()]
        for function in functions:
            function()
            wait()
            times.append(clock())
        runs.append([end - start for start, end in zip(times, times[1:])])
    return [median(column) for column in zip(*runs[1:])]

def main(args):
    torch.manual_seed(0)
    model, tokenizer = common.load_policy(args)
    problems = common.batch_of(common.load_problems(args, tokenizer)[0], 1, args.prompts, args.seed)
    tokens = args.prompts * args.group_size * args.max_new_tokens
    for args.cuda_graphs in [False, True][:1 + args.cuda_graphs]:  # ends as it was
        with mock.patch.object(model.generation_config, "eos_token_id", [2 ** 30]):  # no token ends a row
            [took] = seconds(args, lambda: common.generate(model, tokenizer, problems, args.group_size, args))
        print(f"sampling{', graphs' * args.cuda_graphs:11}{tokens / took:,.0f} tokens/s")
    reference = copy.deepcopy(model).eval().requires_grad_(False) if args.beta != 0 else None
    reward, rollouts = lambda _, texts: [i % 2 for i in range(len(texts))], []
    args.lr = 1e-9
    optimizer = torch.optim.Adam(model.parameters(), args.lr, fused=True)
    collecting, updating = seconds(
        args, lambda: rollouts.append(grpo.collect(model, reference, tokenizer, problems, reward, args)[0]),
        lambda: grpo.update(model, optimizer, rollouts.pop(), args))
    print(f"update             {updating:.4g} s", f"step               {collecting + updating:.4g} s", sep="\n")

if __name__ == "__main__":
    main(grpo.parse_args())

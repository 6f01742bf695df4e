"""Measure how fast a step of grpo.py is, by wall-clock time on a GPU and by CPU time on a CPU.

    python tests/tools/bench.py                                                     the toy
    python tests/tools/bench.py --model DIR --dataset problems.jsonl --prompts 8    your own

It takes the flags of grpo.py. Two speeds of the machine are printed first. All other numbers are medians of
three runs, after one that does not count.

sampling   Without CUDA graphs, and on a GPU also with them. All completions get --max_new_tokens tokens.
           The floor is the least time in which the machine could read weights, keys, values and logits once
           per token, or multiply by the weights. It is printed as a fraction of the time that sampling takes.
update     MFU (model FLOPs utilization) is such a fraction, too: of the time for 6 operations per weight and
           token, and none for attention. With --gradient_checkpointing, 75% is the most.
step       Sampling, reward, log-probs and update.
"""
import copy
import sys
import time
from pathlib import Path
from statistics import mean, median
from unittest import mock

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the root of the repository
import common  # noqa: E402
import grpo  # noqa: E402

def seconds(function, args):
    """Call a function. Returns the seconds that it took, and its result."""
    gpu = args.device == "cuda"
    clock, wait = (time.perf_counter, torch.cuda.synchronize) if gpu else (time.process_time, int)
    wait()
    start, result = clock(), function()
    wait()
    return clock() - start, result

def speeds(args):
    """Measure bytes per second, read and written, and operations per second: the best of six runs."""
    size, n = (2 ** 28, 8192) if args.device == "cuda" else (2 ** 25, 1024)
    a, b = torch.ones(2, size, device=args.device)
    x = torch.randn(n, n, device=args.device, dtype=getattr(torch, args.dtype))
    copying, multiplying = (min(seconds(lambda: [function() for _ in range(4)], args)[0] for _ in range(6))
                            for function in (lambda: b.copy_(a), lambda: x @ x))
    return 4 * 2 * a.nbytes / copying, 4 * 2 * n ** 3 / multiplying

def weights(model):
    """Count the weights that a token is multiplied with: those of the body, and those of the head."""
    embeddings = model.get_input_embeddings().weight.numel()  # a token reads only one row of them
    body = sum(weight.numel() for weight in model.base_model.parameters()) - embeddings
    return body, model.get_output_embeddings().weight.numel()

def sampling(model, tokenizer, problems, bandwidth, rate, args):
    """Sample completions that no token ends. Returns tokens per second, and the floor's fraction."""
    (body, head), config = weights(model), model.config.get_text_config()
    N, T, S = args.prompts * args.group_size, args.max_new_tokens, mean(len(p["prompt"]) for p in problems)
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    cache = 2 * config.num_hidden_layers * config.num_key_value_heads * width * N * (S + T / 2)
    # The head is in float32, and so are its logits, which are written and read.
    read = (body + cache) * getattr(torch, args.dtype).itemsize + 4 * head + 2 * 4 * N * config.vocab_size
    floor = T * max(read / bandwidth, 2 * (body + head) * N / rate)
    with mock.patch.object(model.generation_config, "eos_token_id", [2 ** 30]):
        runs = [seconds(lambda: common.generate(model, tokenizer, problems, args.group_size, args), args)
                for _ in range(1 + 3)]
    took = median(run[0] for run in runs[1:])
    return N * T / took, floor / took

def one_step(model, reference, optimizer, tokenizer, problems, rate, args):
    """Do a step, with rewards of 0 and 1 in turn. Returns its seconds, and the update's seconds and MFU."""
    reward = lambda _, completions: [i % 2 for i in range(len(completions))]  # noqa: E731
    given = model, reference, tokenizer, problems, reward, args
    collecting, (rollout, _) = seconds(lambda: grpo.collect(*given), args)
    updating, _ = seconds(lambda: grpo.update(model, optimizer, rollout, args), args)
    (body, head), read = weights(model), (rollout["prompt_length"] + rollout["completion_length"]).sum()
    operations = 6 * (body * read + head * rollout["mask"].sum()).item() * args.epochs
    return collecting + updating, updating, operations / updating / rate

def main(args):
    torch.manual_seed(0)
    model, tokenizer = common.load_policy(args)
    problems = common.batch_of(common.load_problems(args, tokenizer)[0], 1, args.prompts, args.seed)
    bandwidth, rate = speeds(args)
    print(torch.cuda.get_device_name() if args.device == "cuda" else f"{torch.get_num_threads()} CPU threads",
          f"memory bandwidth   {bandwidth / 1e9:.4g} GB/s",
          f"matrix products    {rate / 1e12:.4g} TFLOP/s", sep="\n")
    for args.cuda_graphs in [False, True][:1 + args.cuda_graphs]:  # ends as it was
        speed, floor = sampling(model, tokenizer, problems, bandwidth, rate, args)
        print(f"sampling{', graphs' * args.cuda_graphs:11}{speed:,.0f} tokens/s   floor {floor:.1%}")
    reference = copy.deepcopy(model).eval().requires_grad_(False) if args.beta != 0 else None
    given = model, reference, common.Optimizer(model, 1e-9, args), tokenizer, problems, rate, args
    runs = [one_step(*given) for _ in range(1 + 3)]
    took, update, mfu = map(median, zip(*runs[1:]))
    print(f"update             {update:.4g} s   MFU {mfu:.1%}", f"step               {took:.4g} s", sep="\n")

if __name__ == "__main__":
    main(grpo.parse_args())

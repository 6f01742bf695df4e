"""The race of tests/bench.py against TRL's GRPOTrainer, where that is installed: pip install trl"""
import contextlib
import statistics
import tempfile

import datasets
import torch
import transformers
import trl

def race(bench, ours):
    """A rollout and its optimiser steps in TRL's GRPOTrainer with the same model, prompts, group, limit,
    minibatches and KL term, and after each a step of ours. Seconds of ours, median ratio, mean length."""
    (P, G, _, T), args, rollouts, runs, lengths = bench.work.values(), bench.args, bench.pairs + 1, [], []
    data = datasets.Dataset.from_dict({"prompt": bench.tokenizer.batch_decode(bench.prompts) * rollouts})

    class TakeTurns(transformers.TrainerCallback):
        began, steps = bench.clock(), 0

        def on_step_end(self, *_, **__):
            self.steps += 1
            if self.steps % args.minibatches == 0:
                bench.seconds(int)  # waits for the GPU
                theirs = bench.clock() - self.began
                runs.append((bench.seconds(ours)[0], theirs))
                self.began = bench.clock()

    def score(completions, completion_ids, **_):
        lengths.extend(map(len, completion_ids))
        return [float(len(ids) % 2) for ids in completion_ids]
    with tempfile.TemporaryDirectory() as out, contextlib.redirect_stdout(None):
        bench.model.save_pretrained(out)  # it loads the model itself, and the reference, as for its users
        bench.tokenizer.save_pretrained(out)
        config = trl.GRPOConfig(
            output_dir=out, max_steps=rollouts * args.minibatches, steps_per_generation=args.minibatches,
            per_device_train_batch_size=P * G // args.minibatches, num_generations=G, max_completion_length=T,
            top_k=0, top_p=1.0, beta=args.beta, loss_type="grpo", learning_rate=1e-9, report_to="none",
            bf16=bench.model.dtype == torch.bfloat16, gradient_checkpointing=args.gradient_checkpointing,
            use_cpu=not bench.gpu, save_strategy="no", logging_strategy="no", disable_tqdm=True)
        trl.GRPOTrainer(model=out, args=config, train_dataset=data, reward_funcs=score,
                        processing_class=bench.tokenizer, callbacks=[TakeTurns()]).train()
    took, ratios = zip(*((ours, theirs / ours) for ours, theirs in runs[1:]))
    return statistics.median(took), statistics.median(ratios), statistics.mean(lengths)

"""TRL's GRPOTrainer beside grpo.py: the control of README.md, and a race.

    pip install trl
    python tests/results/real/beside_trl.py runs/sft runs/data/problems runs/trl 40
    python tests/results/real/beside_trl.py race --model runs/sft --dataset runs/data/problems --prompts 8

The first command trains a model on problems for 40 steps, with the settings of grpo.py in README.md. It writes
metrics to runs/trl/metrics.jsonl and the model to runs/trl/step-40, for tests/tools/evaluate.py. The reward is
ours; TRL draws the problems in another order. The second one, with the flags of grpo.py, times steps of ours
and of TRL in turn, as tests/tools/bench.py times them.
"""
import contextlib
import json
import statistics
import sys
import tempfile
from pathlib import Path

import datasets
import transformers
import trl

ROOT = Path(__file__).resolve().parents[3]
sys.path[:0] = [str(ROOT), str(ROOT / "tests/tools")]
import bench as timing  # noqa: E402
import common  # noqa: E402

SAME = dict(top_k=0, top_p=1.0, loss_type="grpo", report_to="none", save_strategy="no")  # in both, as grpo.py

class Metrics(transformers.TrainerCallback):
    """Writes what TRL logs."""
    def __init__(self, path):
        self.file = path.open("w", buffering=1)

    def on_log(self, args, state, control, logs, **_):
        self.file.write(json.dumps({"step": state.global_step} | logs) + "\n")

def chat(row):
    return {"prompt": [{"role": "system", "content": "Solve it."},
                       {"role": "user", "content": row["question"]}], "answer": row["answer"]}

def reward(completions, answer, **_):
    texts = [messages[0]["content"] for messages in completions]
    return [common.math_reward(text, gold) for text, gold in zip(texts, answer)]

def control(model, problems, out, steps):
    """Train as `grpo.py --prompts 8 --minibatches 1 --lr 1e-5 --beta 0` does."""
    transformers.set_seed(0)
    data = datasets.Dataset.from_list([chat(row) for row in common.read_dataset(problems)["train"]])
    config = trl.GRPOConfig(
        output_dir=out, max_steps=int(steps), per_device_train_batch_size=64, num_generations=8,
        max_completion_length=32, temperature=1.0, beta=0.0, epsilon=0.2, learning_rate=1e-5,
        lr_scheduler_type="constant_with_warmup", warmup_steps=5, adam_beta2=0.95, weight_decay=0.0,
        max_grad_norm=1.0, bf16=True, gradient_checkpointing=False, use_cpu=True, logging_steps=1, **SAME)
    Path(out).mkdir(parents=True)
    trainer = trl.GRPOTrainer(model=model, args=config, train_dataset=data, reward_funcs=reward,
                              callbacks=[Metrics(Path(out, "metrics.jsonl"))])
    trainer.train()
    trainer.save_model(f"{out}/step-{steps}")
    trainer.processing_class.save_pretrained(f"{out}/step-{steps}")

def race(flags):
    """Time a rollout and its optimiser steps in TRL with bench's model, prompts, group, limit, minibatches and
    KL term, and after each a step of ours, three times after a pair that does not count."""
    bench, rollouts, runs, lengths = timing.Bench(flags), 1 + 3, [], []
    timing.rates(bench)
    (P, G, _, T), args = bench.work.values(), bench.args
    prompts = bench.tokenizer.batch_decode([problem["prompt"] for problem in bench.problems])
    data = datasets.Dataset.from_dict({"prompt": prompts * rollouts})

    class TakeTurns(transformers.TrainerCallback):
        began, steps = bench.clock(), 0

        def on_step_end(self, *_, **__):
            self.steps += 1
            if self.steps % args.minibatches == 0:
                bench.seconds(int)  # waits for the GPU
                theirs = bench.clock() - self.began
                runs.append((bench.seconds(lambda: timing.one_step(bench))[0], theirs))
                self.began = bench.clock()

    def score(completions, completion_ids, **_):
        lengths.extend(map(len, completion_ids))
        return [float(i % 2) for i in range(len(completions))]
    with tempfile.TemporaryDirectory() as out, contextlib.redirect_stdout(None):
        bench.model.save_pretrained(out)  # it loads the model itself, and the reference, as for its users
        bench.tokenizer.save_pretrained(out)
        config = trl.GRPOConfig(
            output_dir=out, max_steps=rollouts * args.minibatches, steps_per_generation=args.minibatches,
            per_device_train_batch_size=P * G // args.minibatches, num_generations=G, max_completion_length=T,
            beta=args.beta, learning_rate=1e-9, bf16=args.dtype == "bfloat16", use_cpu=not bench.gpu,
            gradient_checkpointing=args.gradient_checkpointing, logging_strategy="no", disable_tqdm=True,
            **SAME)
        trl.GRPOTrainer(model=out, args=config, train_dataset=data, reward_funcs=score,
                        processing_class=bench.tokenizer, callbacks=[TakeTurns()]).train()
    took, ratios = zip(*((ours, theirs / ours) for ours, theirs in runs[1:]))
    print(f"a step of ours takes {statistics.median(took):.3g} s, one of TRL {statistics.median(ratios):.2f} times as "
          f"long; the mean length is {statistics.mean(lengths):.0f}")

if __name__ == "__main__":
    race(sys.argv[2:]) if sys.argv[1] == "race" else control(*sys.argv[1:])

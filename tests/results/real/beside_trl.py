"""TRL's GRPOTrainer beside grpo.py: the control of README.md.

    pip install trl
    python tests/results/real/beside_trl.py runs/sft runs/data/problems runs/trl 40

Trains a model on problems for 40 steps, with the settings of grpo.py in README.md. Writes metrics to
runs/trl/metrics.jsonl and the model to runs/trl/step-40, for tests/tools/evaluate.py. The reward is ours;
TRL draws the problems in another order.
"""
import json
import sys
from pathlib import Path

import datasets
import transformers
import trl

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))  # the root of the repository
import common  # noqa: E402

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
        max_grad_norm=1.0, bf16=True, gradient_checkpointing=False, use_cpu=True, logging_steps=1,
        top_k=0, top_p=1.0, loss_type="grpo", report_to="none", save_strategy="no")
    Path(out).mkdir(parents=True)
    trainer = trl.GRPOTrainer(model=model, args=config, train_dataset=data, reward_funcs=reward,
                              callbacks=[Metrics(Path(out, "metrics.jsonl"))])
    trainer.train()
    trainer.save_model(f"{out}/step-{steps}")
    trainer.processing_class.save_pretrained(f"{out}/step-{steps}")

if __name__ == "__main__":
    control(*sys.argv[1:])

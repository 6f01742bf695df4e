"""TRL's GRPOTrainer on the problems of tests/results/real.md, with the settings of grpo.py there: a control.

    pip install trl
    python tests/results/trl_control.py runs/sft runs/data/problems runs/trl 40

Writes metrics to runs/trl/metrics.jsonl and the model to runs/trl/step-40, for tests/results/evaluate.py. The
reward is ours; TRL draws the problems in another order, and keeps float32 weights, multiplied in bfloat16.
"""
import json
import sys
from pathlib import Path

import datasets
import transformers
import trl

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the root of the repository
import common  # noqa: E402


class Metrics(transformers.TrainerCallback):
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


if __name__ == "__main__":
    model, problems, out, steps = sys.argv[1:]
    transformers.set_seed(0)
    rows = common.read_splits(problems)["train"]
    config = trl.GRPOConfig(
        output_dir=out, max_steps=int(steps), per_device_train_batch_size=64, num_generations=8,
        max_completion_length=32, temperature=1.0, top_k=0, top_p=1.0, beta=0.0, epsilon=0.2,
        loss_type="grpo", learning_rate=1e-5, lr_scheduler_type="constant_with_warmup", warmup_steps=5,
        adam_beta2=0.95, weight_decay=0.0, max_grad_norm=1.0, bf16=True, gradient_checkpointing=False,
        use_cpu=True, report_to="none", save_strategy="no", logging_steps=1)
    Path(out).mkdir(parents=True)
    trainer = trl.GRPOTrainer(
        model=model, args=config, train_dataset=datasets.Dataset.from_list([chat(row) for row in rows]),
        reward_funcs=reward, callbacks=[Metrics(Path(out, "metrics.jsonl"))])
    trainer.train()
    trainer.save_model(f"{out}/step-{steps}")
    trainer.processing_class.save_pretrained(f"{out}/step-{steps}")

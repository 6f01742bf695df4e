"""The toy: right answers, no question twice, made again by make.py, and learned by all scripts."""
import json
import os
import subprocess
import sys

import pytest
from conftest import ROOT, settings, spy, sums, write_jsonl
from transformers import AutoTokenizer

import grpo

TOY = ROOT / "tests" / "toy"

def value(text):
    """7+2-5 -> 4, in another way than make.py: as a sum of signed digits."""
    return sum(map(int, text.replace("-", "+-").split("+")))

def test_the_problems_are_what_make_py_makes_with_right_steps_and_answers(monkeypatch):
    monkeypatch.syspath_prepend(TOY)
    import make
    splits = {name: [json.loads(line) for line in (TOY / f"{name}.jsonl").open(encoding="utf-8")]
              for name in ("train", "test")}
    assert make.make_problems() == splits and len(splits["test"]) == 2939
    assert make.make_model()[1].chat_template == (TOY / "chat_template.jinja").read_text()
    rows = sum(splits.values(), [])
    for row in rows:
        text, (*steps, last) = row["question"].removesuffix("=?"), row["answer"].split("\n")
        ends = range(1, len(text), 2)
        assert last == f"#### {value(text)}" and steps == [
            f"{value(text[:end])}{text[end:end + 2]}={value(text[:end + 2])}" for end in ends]
    assert len({row["question"] for row in rows}) == len(rows) == 14520

@pytest.mark.parametrize("flags, steps", [({"prompts": 16}, 1), ({"prompts": 2, "epochs": 2, "steps": 5}, 5)])
def test_sft_trains_every_solution_to_its_end(flags, steps, here, monkeypatch):
    """Including the EOS, or the model would never stop. Six rows are fewer than --prompts 16."""
    import sft
    calls = spy(monkeypatch, sft, "train")
    write_jsonl("warmup.jsonl", [row | {"solution": row["answer"]} for row in sums(6)])
    sft.main(settings(grpo, model="model", dataset="warmup.jsonl", out="sft", **flags))
    tokenizer, batches = AutoTokenizer.from_pretrained("sft"), calls[0].batches
    learned = [tokenizer.decode(ids) for _, completions in batches for ids in completions]
    assert set(learned) == {row["answer"] + "<eos>" for row in sums(6)} and len(batches) == steps
    assert len(learned) == steps * min(6, flags["prompts"]) and len(set(learned[:6])) == 6

@pytest.mark.slow
def test_the_readmes_first_command_learns_as_the_readme_says(tmp_path):
    """Neither a hundredth of the learning rate nor ten times the KL gets there."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    few = ["--eval_problems=640", "--eval_every=20"]
    flags = {"ppo": [*few, "--steps=12"], "grpo": [], "gspo": few}
    running = {name: subprocess.Popen([sys.executable, ROOT / f"{name}.py", *flags[name]],
                                      cwd=tmp_path, env=environment) for name in flags}
    for name, process in running.items():
        assert process.wait(timeout=280) == 0
        out, = (tmp_path / "runs").glob(f"{name}-*")
        rows = [json.loads(line) for line in (out / "metrics.jsonl").open(encoding="utf-8")]
        before, after = rows[0], rows[-1]
        assert before["eval_accuracy"] == pytest.approx(0.54, abs=0.01 if name == "grpo" else 0.05)
        assert after["eval_accuracy"] > 0.96, name
        assert before["eval_completion_length"] < 16 and after["eval_completion_length"] > 23.5
        assert 0.48 < rows[1]["reward"] < 0.6 and sum(row["reward"] for row in rows[-5:]) / 5 > 0.95
        assert name == "gspo" or 0.005 < sum(row["kl"] for row in rows[-5:]) / 5 < 0.1

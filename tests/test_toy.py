"""The toy: its data are right and keep the exam apart, its model has two habits, make.py makes both again."""
import json
import os
import random
import runpy
import subprocess
import sys

import pytest
import torch
from conftest import ROOT
from transformers import AutoModelForCausalLM, AutoTokenizer

import common

TOY = ROOT / "tests" / "toy"
SPLITS = {name: [json.loads(line) for line in (TOY / f"{name}.jsonl").open(encoding="utf-8")]
          for name in ("train", "test")}

def value(text):
    """"7+2-5" -> 4, by another way than make.py's: a sum of signed digits."""
    return sum(map(int, text.replace("-", "+-").split("+")))

def test_every_step_and_answer_is_right_and_no_question_is_there_twice():
    rows = SPLITS["train"] + SPLITS["test"]
    for row in rows:
        text, (*steps, last) = row["question"].removesuffix("=?"), row["answer"].split("\n")
        assert f"{text}=?" == row["question"] and last == f"#### {value(text)}"
        assert len(steps) == len(text) // 2
        for end, step in zip(range(1, len(text), 2), steps):
            assert step == f"{value(text[:end])}{text[end:end + 2]}={value(text[:end + 2])}"
    assert len({"".join(row["question"].split()) for row in rows}) == len(rows) == 14520
    assert len(SPLITS["test"]) > 2500

def test_the_warm_up_is_given_training_problems_only(monkeypatch, tmp_path):
    """The first 20 steps of the program as it stands: worked examples, and guesses that miss by up to 2."""
    monkeypatch.syspath_prepend(TOY)
    import make
    given, answers = [], {row["question"]: row["answer"] for row in SPLITS["train"]}
    tokenizer, real = AutoTokenizer.from_pretrained(TOY), common.token_logprobs

    class Enough(Exception):
        """Raised after 20 steps."""

    def token_logprobs(model, batch, temperature):
        given.extend(text.split("<eos>")[0] for text in tokenizer.batch_decode(batch["ids"]))
        if len(given) == 20 * (make.WORKED + make.GUESSED):
            raise Enough
        return real(model, batch, temperature)
    monkeypatch.setattr(common, "token_logprobs", token_logprobs)
    monkeypatch.setattr(sys, "argv", ["make.py", "--out", str(tmp_path)])
    with pytest.raises(Enough):
        runpy.run_path(str(TOY / "make.py"), run_name="__main__")
    pairs = [text.split("\n", 1) for text in given]
    worked = [text == answers[question] for question, text in pairs]  # no KeyError: none is held out
    offsets = {int(text[5:]) - value(question[:-2]) for question, text in pairs if "\n" not in text}
    assert make.make_problems() == SPLITS and offsets == {-2, -1, 0, 1, 2}
    assert sum(worked) == 20 * make.WORKED and len(pairs) - sum(worked) == 20 * make.GUESSED

def test_transformers_and_datasets_read_the_directory(tmp_path):
    import datasets
    found = datasets.load_dataset(str(TOY), cache_dir=str(tmp_path))
    assert {name: list(rows) for name, rows in found.items()} == SPLITS
    tokenizer, model = AutoTokenizer.from_pretrained(TOY), AutoModelForCausalLM.from_pretrained(TOY)
    texts = [f"{row['question']}\n{row['answer']}" for rows in SPLITS.values() for row in rows]
    assert tokenizer.batch_decode(tokenizer(texts)["input_ids"]) == texts
    ids = tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id, len(tokenizer)
    assert ids == (17, 18, 19, 20) and tokenizer("a")["input_ids"] == [19]
    assert model.dtype == torch.float32 and model.generation_config.eos_token_id == 18
    assert sum(path.stat().st_size for path in TOY.iterdir() if path.is_file()) <= 1_500_000

@pytest.fixture(scope="module")
def making(tmp_path_factory):
    """The program that makes the toy; it works beside the first of the tests that wait for it."""
    path = tmp_path_factory.mktemp("made")
    return path, subprocess.Popen([sys.executable, TOY / "make.py", "--out", path])

@pytest.mark.upkeep
def test_the_readmes_first_command_learns_as_the_readme_says(tmp_path, making):
    """`python grpo.py`, and so the other two, with no flag at all. Neither a hundredth of the learning rate
    nor ten times the KL reaches this. After training completions work in steps, which takes more tokens."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    running = {name: subprocess.Popen([sys.executable, ROOT / f"{name}.py"], cwd=tmp_path, env=environment)
               for name in ("ppo", "grpo", "gspo")}
    for name, process in running.items():
        assert process.wait(timeout=280) == 0
        out, = (tmp_path / "runs").glob(f"{name}-*")
        rows = [json.loads(line) for line in (out / "metrics.jsonl").open(encoding="utf-8")]
        before, after = rows[0], rows[-1]
        assert [row["step"] for row in rows] == [*range(21)] and (out / "step-20").is_dir()
        assert before["eval_accuracy"] == pytest.approx(0.398, abs=0.01)
        assert before["eval_sampled_accuracy"] == pytest.approx(0.54, abs=0.04)
        assert after["eval_accuracy"] > 0.99 and after["eval_sampled_accuracy"] > 0.96, name
        assert before["eval_completion_length"] < 16 and after["eval_completion_length"] > 23.5
        assert 0.48 < rows[1]["reward"] < 0.6 and sum(row["reward"] for row in rows[16:]) / 5 > 0.95
        assert name == "gspo" or 0.005 < sum(row["kl"] for row in rows[16:]) / 5 < 0.1

@pytest.mark.upkeep
def test_make_makes_the_same_data_and_both_models_have_the_two_habits(making):
    tmp_path, process = making
    assert process.wait(timeout=280) == 0
    for name in ("train.jsonl", "test.jsonl"):
        assert (tmp_path / name).read_bytes() == (TOY / name).read_bytes()
    questions = [row["question"] + "\n" for row in random.Random(0).sample(SPLITS["test"], 1000)]
    for path in (TOY, tmp_path):
        tokenizer, model = AutoTokenizer.from_pretrained(path), AutoModelForCausalLM.from_pretrained(path)
        asked = tokenizer(questions, return_tensors="pt", padding=True, padding_side="left")
        torch.manual_seed(0)
        out = model.generate(**asked, do_sample=True, top_k=0, max_new_tokens=48)
        texts = tokenizer.batch_decode(out[:, asked["input_ids"].shape[1]:], skip_special_tokens=True)
        worked, guessed = [], []
        for question, text in zip(questions, texts):
            (worked if "\n" in text else guessed).append(text.endswith(f"#### {value(question[:-3])}"))
        shares = len(worked) / 1000, sum(worked) / len(worked), sum(guessed) / len(guessed)
        assert 0.3 < shares[0] < 0.7 and shares[1] > 0.95 and 0.1 < shares[2] < 0.3, shares

"""Problems and rewards: file formats, splits, columns, prompts, gold answers, what a reward may give."""
import datetime
import shlex
import shutil
from pathlib import Path
from unittest import mock

import datasets
import pytest
import tokenizers
import torch
import transformers
from conftest import LOOKS, TINY, char_tokenizer, refused, spy, sums, train, write_jsonl

import common
import grpo

pytestmark = pytest.mark.usefixtures("here")

def load(flags=""):
    """The training and the held-out problems of a command."""
    def main(args):
        loaded.extend(common.load_problems(args, transformers.AutoTokenizer.from_pretrained(args.model)))
    loaded, line = [], f"{TINY} --device cpu --out loading --system_prompt '' {flags}"
    shutil.rmtree("loading", ignore_errors=True)
    common.launch(main, grpo.parse_args(shlex.split(line)))
    return loaded

def questions(problems):
    return [problem["question"] for problem in problems]

def rollout(*texts):
    return {"texts": list(texts), "ids": torch.zeros(len(texts), 1)}

def splits_of(train_rows, held_out=()):
    """A data set directory with these rows, the held-out ones by default sums."""
    Path("mine").mkdir()
    write_jsonl("mine/train.jsonl", train_rows)
    write_jsonl("mine/test.jsonl", held_out or sums(9))
    return "--dataset mine"

# ---- Files, splits and columns ----

@pytest.mark.parametrize("kind, how", [
    ("jsonl", {}), ("json", {"lines": False}), ("csv", {}), ("parquet", {})])
def test_every_format_gives_the_same_rows(kind, how):
    """f1 was read in place of f[1], as if that were a pattern."""
    write_jsonl("f1.jsonl", sums(30, start=900))
    getattr(datasets.Dataset.from_list(sums(30)), f"to_{kind.removesuffix('l')}")(f"f[1].{kind}", **how)
    train_set, held_out = load(f"--dataset 'f[1].{kind}' --eval_problems 30")
    assert sorted(questions(train_set + held_out)) == sorted(questions(sums(30)))
    assert {problem["answer"] for problem in train_set} <= {row["answer"] for row in sums(30)}

def test_a_directory_gives_its_splits():
    flags = f"{splits_of(sums(12), sums(6, start=100))} --eval_problems 100"
    train_set, held_out = load(flags)
    assert questions(train_set) == questions(sums(12))
    assert sorted(questions(held_out)) == sorted(questions(sums(6, start=100)))
    assert list(map(len, load(f"{flags} --split test --eval_split train"))) == [6, 12]

@pytest.mark.parametrize("flags, words", [
    ("--question_column problem", "--question_column answer question"),
    ("--answer_column solution", "--answer_column answer question"),
    ("--dataset empty.jsonl", "empty.jsonl no training problems"),
    ("--eval_problems 0", "no held-out problems")])
def test_columns_that_are_not_there_and_data_of_which_nothing_is_left_are_named(flags, words, capsys):
    write_jsonl("empty.jsonl", [{"question": str(i), "answer": ""} for i in range(30)])
    with refused(capsys, *words.split()):
        load(flags)

def test_a_lone_file_holds_out_by_the_question_alone_disjoint_and_stable():
    """Not by the answer, the order of the rows, other rows, the seed or the system prompt. Equal questions
    stay together. A chat is a question as a whole."""
    rows = sums(200)
    write_jsonl("a.jsonl", rows + [row | {"answer": "another #### 1"} for row in rows[:100]])
    write_jsonl("b.jsonl", rows[::-2])
    a = [set(questions(part)) for part in load("--dataset a.jsonl --eval_problems 1000")]
    flags = "--dataset b.jsonl --eval_problems 1000 --seed 7 --system_prompt Why"
    b = [set(questions(part)) for part in load(flags)]
    assert not a[0] & a[1] and len(a[0] | a[1]) == 200 and 20 <= len(a[1]) <= 60
    half = set(questions(rows[::-2]))
    assert b == [a[0] & half, a[1] & half]
    chats = [[turn("system", row["question"]), turn("user", "Solve it.")] for row in rows]
    write_jsonl("chats.jsonl", [{"question": chat, "answer": "1"} for chat in chats])
    assert 20 <= len(load("--dataset chats.jsonl --eval_problems 1000")[1]) <= 60

def test_what_is_trained_on_is_never_held_out():
    """Not with one split of two given twice, either."""
    train, held_out = load(f"{splits_of(sums(60))} --eval_split train")
    assert train and held_out and not set(questions(train)) & set(questions(held_out))

def test_what_is_asked_is_a_sample_of_the_held_out_problems_whatever_the_settings(monkeypatch):
    """All runs sit the same exam, not of the first problems, which may be the easy ones. What one must
    leave out changes none of the others. To save time no more are prepared than are asked."""
    rows, prepared = sums(200), spy(monkeypatch, common, "prepare")
    rows[77] = {"question": "?" * 90, "answer": "1"}
    flags = f"{splits_of(sums(20, start=300), rows)} --eval_problems 100"
    exams = [questions(load(f"{flags} {more}")[1]) for more in ("", "--seed 7", "--max_prompt_tokens 60")]
    assert exams[0] == exams[1] and len(set(exams[0])) == 100 and set(exams[0]) <= set(questions(rows))
    assert exams[2] == [question for question in exams[0] if question[0] != "?"]
    numbers = [questions(rows).index(question) for question in exams[0]]
    assert 80 < sum(numbers) / 100 < 120 and len(prepared[1].split) == 100

def test_problems_keep_all_columns_which_may_have_other_names():
    rows = [{"problem": row["question"], "solution": row["answer"], "answer": "0", "level": 3}
            for row in sums(20)]
    flags = splits_of(rows, [{"problem": "1 + 1", "solution": 2}])
    train_set, held_out = load(f"{flags} --question_column problem --answer_column solution")
    assert questions(train_set) == questions(sums(20)) and questions(held_out) == ["1 + 1"]
    assert train_set[0]["level"] == 3 and train_set[0]["problem"] == sums(1)[0]["question"]
    assert common.answer_reward(train_set[3:4] + held_out, ["#### 6", "so #### 2"]) == [1.0, 1.0]

def test_rows_that_cannot_be_used_are_counted_and_left_out(capsys):
    rows = sums(10)
    rows += [{"question": "?", "answer": ""}, {"question": "??", "answer": "####"}, {"question": "???"}]
    rows += [{"answer": "1"}, {"question": "", "answer": "1"}]
    rows += [{"question": "x" * n, "answer": "1"} for n in (59, 60, 80, 90)]  # and a newline
    flags = f"{splits_of(rows)} --max_prompt_tokens 60"
    assert questions(load(flags)[0]) == questions(sums(10)) + ["x" * 59]
    assert "11 training problems; 8 " in capsys.readouterr().out

def test_of_too_many_rows_some_are_drawn_at_random():
    """As Python objects, DAPO's 1.79 million rows took 16 GB."""
    drawn, many = [], mock.MagicMock(column_names=["question", "answer"])
    many.__len__.return_value = 1_000_000
    many.select = lambda rows: drawn.append(rows) or datasets.Dataset.from_list(sums(5))
    for _ in range(2):
        assert len(common.prepare(many, char_tokenizer(), grpo.parse_args([]), "training")) == 5
    assert len(set(drawn[0])) == 400_000 and drawn[0] == drawn[1] and max(drawn[0]) > 900_000

# ---- Answers ----

def test_rows_without_a_gold_answer_are_kept_where_the_reward_needs_none(capsys):
    """--answer_column "" says so; there need not be such a column. With answer_reward right completions would
    earn 0 for ever."""
    rows = sums(3) + [{"question": "?", "answer": ""}, {"question": "??"}]
    flags = splits_of(rows)
    assert len(load(flags)[0]) == 3
    own, held_out = load(f"{flags} --answer_column ''")
    assert len(own) == 5 and held_out and own[0]["answer"] == ""
    with refused(capsys, '--answer_column ""', "answer_reward"):
        train(grpo, f"{TINY} --answer_column ''")

def test_golds_that_are_numbers_can_be_earned_and_an_empty_cell_is_none():
    """As 1e+16 and 0.30000000000000004 no completion had them."""
    golds = {1e16: "10000000000000000", 0.1 + 0.2: "0.3", 2.0: "2", -0.5: "-1/2", 7.0: "7", 1e-7: "0.0000001"}
    rows = [{"question": str(i), "answer": gold} for i, gold in enumerate(golds)]
    problems, _ = load(splits_of(rows, rows))
    assert common.answer_reward(problems, [f"#### {text}" for text in golds.values()]) == [1] * len(golds)
    assert common.answer_reward(problems, ["#### 3"] * len(golds)) == [0] * len(golds)
    assert [common.text_of(value) for value in (float("nan"), None, 0)] == ["", "", "0"]

# ---- Prompts ----

def turn(role, content):
    return {"role": role, "content": content}

@pytest.mark.parametrize("system", ["", "Brief."])
@pytest.mark.parametrize("look", LOOKS)
def test_prompts_are_the_templates_own_tokenisation_of_a_text_or_a_chat(look, system):
    """The system prompt in its place, a turn to answer in, BOS once; without a template plain text. A chat
    may have a system prompt of its own."""
    tokenizer = char_tokenizer(**LOOKS[look])
    args = grpo.parse_args(["--system_prompt", system, "--max_prompt_tokens", "200"])
    brief = [turn("system", system)] if system else []
    alone = [turn("user", "1 + 1?")]
    talk = [turn("user", "Hi."), turn("assistant", "Hello!"), turn("user", "2 + 2?")]
    led = [turn("system", "Be kind."), turn("user", "3 + 3?")]
    chats = [brief + alone, brief + alone, brief + talk, led]
    rows = [{"question": question, "answer": "#### 2"} for question in ["1 + 1?", alone, talk, led]]
    for row, chat in zip(rows, chats, strict=True):
        problem, = common.prepare(datasets.Dataset.from_list([row]), tokenizer, args, "training")
        own = [tokenizer.bos_token_id] * (look == "plain")
        own += tokenizer.convert_tokens_to_ids([*"".join(f"{turn['content']}\n" for turn in chat)])
        if tokenizer.chat_template:
            own = tokenizer.apply_chat_template(chat, add_generation_prompt=True)["input_ids"]
            assert tokenizer.decode(own).endswith("assistant\n" if look == "chatml" else "[assistant]")
        assert problem["prompt"] == own and problem["question"] == chat[-1]["content"]
        assert own.count(tokenizer.bos_token_id) == (look in ("bos", "plain"))

def test_a_question_may_be_a_number_and_one_that_is_missing_is_left_out():
    """Also where the chat template adds up texts by +, as Qwen2.5's does."""
    tokenizer = char_tokenizer(chat="{% for m in messages %}{{ m['content'] + '\n' }}{% endfor %}")
    rows = [{"question": question, "answer": "1"} for question in (12, None)]
    args = grpo.parse_args(["--system_prompt", ""])
    problem, = common.prepare(datasets.Dataset.from_list(rows), tokenizer, args, "training")
    assert problem["question"] == "12" and tokenizer.decode(problem["prompt"]) == "12\n"

def test_a_tokenizer_that_ends_every_text_does_not_end_a_prompt():
    """After its end-of-sequence token a base model has nothing to say."""
    plain, ending = char_tokenizer(), char_tokenizer()
    ending.backend_tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single="$A <eos>", special_tokens=[("<eos>", ending.eos_token_id)])
    chat = [turn("system", "Add."), turn("user", "1 + 1?")]
    assert ending("?")["input_ids"][-1] == ending.eos_token_id
    assert common.prompt_of(chat, ending) == plain("Add.\n1 + 1?\n")["input_ids"]

@pytest.mark.parametrize("column, value, words", [
    ("question", {"text": "1 + 1?"}, "neither a text"), ("answer", [2], "neither a text"),
    ("answer", datetime.date(2020, 1, 2), "neither a text"), ("answer", b"2", "neither a text"),
    ("question", [turn("user", [{"type": "text", "text": "1 + 1?"}])], "neither a text"),
    ("question", [turn("user", "1 + 1?"), turn("assistant", "2")], "may end with the answer")])
def test_what_is_no_text_or_number_and_a_chat_that_holds_the_answer_are_refused(column, value, words, capsys):
    with refused(capsys, words):
        rows = datasets.Dataset.from_list([sums(1)[0] | {column: value}])
        common.prepare(rows, char_tokenizer(), grpo.parse_args([]), "training")

def test_a_tokenizer_that_does_not_know_the_questions_is_refused(capsys):
    """The toy, asked GSM8K, was trained on <unk><unk>... It may lack some of the characters."""
    known, unknown, args = sums(1)[0]["question"], "\u00e9" * 15, grpo.parse_args([])
    rows = [{"question": question, "answer": "1"} for question in [known] + [unknown] * 9]
    with refused(capsys, "tokenizer knows", "--dataset"):
        common.prepare(datasets.Dataset.from_list(rows), char_tokenizer(), args, "training")
    few = [{"question": "\u00e9" * i + known, "answer": "1"} for i in range(1, 9)]
    assert len(common.prepare(datasets.Dataset.from_list(few), char_tokenizer(), args, "training")) == 8

# ---- Rewards ----

def test_a_reward_gets_each_problem_beside_its_completions_and_may_give_any_numbers():
    def tell(problems, completions, ten=10):  # which is not replaced by the rollout
        return [ten * problem["n"] + int(text) for problem, text in zip(problems, completions)]
    assert common.rewards_of(tell, [{"n": 1}, {"n": 2}], rollout(*"1234")).tolist() == [11, 12, 23, 24]
    for given in ([1, 0], (True, False), torch.tensor([True, False]), torch.tensor([1.0, 0]).double()):
        rewards = common.rewards_of(lambda problems, completions: given, [{}], rollout("a", "b"))
        assert rewards.dtype == torch.float32 and rewards.tolist() == [1, 0], given

def test_a_reward_with_three_parameters_gets_the_rollout_in_training_and_evaluation(monkeypatch):
    """Without gold answers there is no accuracy: a reward from 0 to 1 would read as one of 0."""
    def short(problems, completions, rollout):
        assert len(problems) == len(completions) == len(rollout["finished"])
        paid.append(rollout["mask"].sum(1) + 100 * rollout["finished"])
        return paid[-1].tolist()
    paid = []
    monkeypatch.setattr(common, "answer_reward", short)
    held_out, step = train(grpo, f"{TINY} --answer_column '' --max_new_tokens 7")
    found = [held_out["eval_reward"], step["reward"], step["eval_reward"]]
    assert found == pytest.approx([rewards.mean().item() for rewards in paid])
    assert [len(rewards) for rewards in paid] == [2, 4, 2] and "eval_accuracy" not in held_out

@pytest.mark.parametrize("given, words", [
    ([0.5, float("nan"), 1, 1], ["nan for row 1", "'1+1?'", "'b'"]),
    ([1, 1, 1, 1e999], ["inf for row 3", "'2+2?'", "'d'"]),
    ([0, 0, None, 0], ["None for row 2", "'2+2?'", "'c'"])])
def test_what_a_reward_function_returned_wrongly_is_shown(given, words, capsys):
    problems = [{"question": "1+1?"}, {"question": "2+2?"}]
    with refused(capsys, "the reward function paid", *words):
        common.rewards_of(lambda problems, completions: given, problems, rollout(*"abcd"))

@pytest.mark.parametrize("count", [1, 3, 5])
def test_a_reward_function_that_returns_too_few_or_too_many_numbers_is_an_error(count):
    with pytest.raises(ValueError, match="zip"):
        common.rewards_of(lambda problems, completions: [1.0] * count, [{"question": "?"}], rollout(*"abcd"))

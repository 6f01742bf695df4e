"""Problems and rewards: file formats, splits, columns, prompts, gold answers, what a reward may give."""
import re
import shlex
from pathlib import Path

import datasets
import pytest
import tokenizers
import torch
import transformers
from conftest import CHATML, TINY, char_tokenizer, spy, sums, write_jsonl

import common
import grpo

pytestmark = pytest.mark.usefixtures("here")
WITH_BOS = ("{{ bos_token }}{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }}{{ eos_token }}"
            "{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}")
LOOKS = {"chatml": {"chat": CHATML, "eos": "<|im_end|>"},  # its prompts hold the end-of-sequence token
         "bos": {"chat": WITH_BOS, "bos": True, "pad": "<eos>"},  # tokenizer and template both add a BOS
         "plain": {"pad": None, "bos": True},  # a base model without a padding token
         "bare": {}}

def load(flags=""):
    """The training and the held-out problems of a command."""
    args = grpo.parse_args(shlex.split(f"{TINY} --device cpu --system_prompt '' {flags}"))
    return common.load_problems(args, transformers.AutoTokenizer.from_pretrained(args.model))

def prepare(rows, tokenizer, flags=""):
    args = grpo.parse_args(shlex.split(f"--system_prompt '' --max_prompt_tokens 200 {flags}"))
    return common.prepare(datasets.Dataset.from_list(rows), tokenizer, args)

def questions(problems):
    return [problem["question"] for problem in problems]

def splits_of(train_rows, held_out=()):
    """A data set directory with these rows, the held-out ones by default sums."""
    Path("mine").mkdir()
    write_jsonl("mine/train.jsonl", train_rows)
    write_jsonl("mine/test.jsonl", held_out or sums(9))
    return "--dataset mine"

def turn(role, content):
    return {"role": role, "content": content}

# ---- Files, splits and columns ----

def test_a_directory_gives_its_splits():
    flags = f"{splits_of(sums(12), sums(6, start=100))} --eval_problems 100"
    own, held_out = map(questions, load(flags))
    assert own == questions(sums(12)) and sorted(held_out) == sorted(questions(sums(6, start=100)))
    assert list(map(len, load(f"{flags} --split test --eval_split train"))) == [6, 12]

@pytest.mark.parametrize("flags, names, read", [
    ("", ["main", "socratic"], "main"), ("--subset socratic", ["main", "socratic"], "socratic"),
    ("", ["default"], None)])
def test_a_data_set_of_the_hub_is_read_in_the_given_configuration_or_in_main(flags, names, read, monkeypatch):
    monkeypatch.setattr(datasets, "get_dataset_config_names", lambda source: names)
    monkeypatch.setattr(datasets, "load_dataset", lambda source, subset: {"train": subset, "test": source})
    args = grpo.parse_args(["--model", "x", "--dataset", "openai/gsm8k", *flags.split()])
    assert common.read_dataset(args.dataset, args.subset) == {"train": read, "test": "openai/gsm8k"}

def test_a_lone_file_holds_out_by_the_question_alone_disjoint_and_stable():
    """Not by the answer, the order or number of rows, the seed or the system prompt. A chat is a question
    as a whole. One split of two given twice is such a file."""
    rows = sums(200)
    write_jsonl("a.jsonl", rows + [row | {"answer": "another #### 1"} for row in rows[:100]])
    a = [set(questions(part)) for part in load("--dataset a.jsonl --eval_problems 1000")]
    flags = f"{splits_of(rows[::-2])} --eval_split train --eval_problems 1000 --seed 7 --system_prompt Why"
    b = [set(questions(part)) for part in load(flags)]
    assert not a[0] & a[1] and len(a[0] | a[1]) == 200 and 20 <= len(a[1]) <= 60
    half = set(questions(rows[::-2]))
    assert b == [a[0] & half, a[1] & half]
    chats = [[turn("system", row["question"]), turn("user", "Solve it.")] for row in rows]
    write_jsonl("chats.jsonl", [{"question": chat, "answer": "1"} for chat in chats])
    assert 20 <= len(load("--dataset chats.jsonl --eval_problems 1000")[1]) <= 60

def test_what_is_asked_is_a_sample_of_the_held_out_problems_whatever_the_settings(monkeypatch):
    """All runs sit the same exam, not of the first problems, which may be the easy ones. What one must
    leave out changes none of the others. To save time no more are prepared than are asked."""
    rows, prepared = sums(200), spy(monkeypatch, common, "prepare")
    rows[77] = {"question": "?" * 90, "answer": "1"}
    flags = f"{splits_of(sums(20, start=300), rows)} --eval_problems 100"
    exams = [questions(load(f"{flags} {more}")[1]) for more in ("", "--seed 7", "--max_prompt_tokens 60")]
    assert exams[0] == exams[1] and len(set(exams[0])) == 100
    assert exams[2] == [question for question in exams[0] if question[0] != "?"]
    assert list(map(len, exams[0])) == sorted(map(len, exams[0])), "for little padding"
    assert 80 < sum(questions(rows).index(question) for question in exams[0]) / 100 < 120
    assert len(prepared[0].split) == 100

def test_problems_keep_all_columns_which_may_have_other_names():
    """Those that a problem has names for, too: under "row" they are as they were."""
    rows = [{"problem": row["question"], "solution": row["answer"], "answer": "0", "prompt": 1.5, "level": 3}
            for row in sums(20)]
    train_set, _ = load(f"{splits_of(rows, rows)} --question_column problem --answer_column solution")
    assert questions(train_set) == questions(sums(20)) and train_set[3]["answer"] == "6"
    assert train_set[3]["level"] == 3 and train_set[3]["row"] == rows[3]

def test_what_is_left_out_and_what_is_in_both_are_printed(capsys):
    """Of 11 rows whose prompts are 60 tokens or fewer, 3 are held out as well."""
    rows = sums(10) + [{"question": "x" * n, "answer": "1"} for n in (59, 60, 80)]  # and a newline
    rows += [{"question": "?", "answer": ""}, {"question": "??", "answer": "####"}]
    rows += [{"answer": "1"}, {"question": "", "answer": "1"}, {"question": "", "answer": "2"}]
    flags = f"{splits_of(rows, sums(5, start=7))} --max_prompt_tokens 60 --eval_problems 9"
    assert questions(load(flags)[0]) == questions(sums(10)) + ["x" * 59]
    said = capsys.readouterr().out
    assert re.findall(r"\d+", said.splitlines()[0]) == ["2", "5"]
    assert re.findall(r"\d+", said.splitlines()[1]) == ["11", "5", "3"]
    write_jsonl("mine/train.jsonl", rows[-5:])
    with pytest.raises(IndexError):
        load(flags)

# ---- Answers ----

def test_without_gold_answers_rows_are_kept_and_there_is_no_accuracy():
    """--answer_column "" says so; there need not be such a column."""
    flags = splits_of(sums(3) + [{"question": "?", "answer": ""}, {"question": "??"}])
    assert len(load(flags)[0]) == 3
    own, held_out = load(f"{flags} --answer_column ''")
    assert len(own) == 5 and held_out and own[0]["answer"] == ""

def test_golds_that_are_numbers_can_be_earned_and_an_empty_cell_is_none():
    """As 1e+16 and 0.30000000000000004 no completion had them."""
    golds = {1e16: "10000000000000000", 0.1 + 0.2: "0.3", 2.0: "2", -0.5: "-1/2", 7.0: "7", 1e-7: "0.0000001"}
    problems = prepare([{"question": "?", "answer": gold} for gold in golds], char_tokenizer())
    assert common.answer_reward(problems, [f"#### {text}" for text in golds.values()]) == [1] * len(golds)
    assert common.answer_reward(problems, ["#### 3"] * len(golds)) == [0] * len(golds)
    assert [common.text_of(value) for value in (float("nan"), None, 0)] == ["", "", "0"]

# ---- Prompts ----

@pytest.mark.parametrize("system", ["", "Brief."])
@pytest.mark.parametrize("look", LOOKS)
def test_prompts_are_the_templates_own_tokenisation_of_a_text_or_a_chat(look, system):
    """The system prompt in its place, a turn to answer in, BOS once; without a template plain text. A chat
    may have a system prompt of its own."""
    tokenizer = char_tokenizer(**LOOKS[look])
    brief, alone = [turn("system", system)] * (system != ""), [turn("user", "1 + 1?")]
    talk = [turn("user", "Hi."), turn("assistant", "Hello!"), turn("user", "2 + 2?")]
    led = [turn("system", "Be kind."), turn("user", "3 + 3?")]
    for given, chat in (("1 + 1?", brief + alone), (alone, brief + alone), (talk, brief + talk), (led, led)):
        problem, = prepare([{"question": given, "answer": "2"}], tokenizer, f"--system_prompt '{system}'")
        own = [tokenizer.bos_token_id] * (look == "plain")
        own += tokenizer.convert_tokens_to_ids([*"".join(f"{turn['content']}\n" for turn in chat)])
        if tokenizer.chat_template:
            own = tokenizer.apply_chat_template(chat, add_generation_prompt=True)["input_ids"]
            assert tokenizer.decode(own).endswith("assistant\n" if look == "chatml" else "[assistant]")
        assert problem["prompt"] == own and problem["question"] == chat[-1]["content"]
        assert own.count(tokenizer.bos_token_id) == (look in ("bos", "plain"))

def test_a_question_may_be_a_number_and_no_prompt_ends_with_the_end_of_sequence_or_an_answer():
    """Also where the chat template adds up texts by +, as Qwen2.5's does. After its end-of-sequence token,
    which some tokenizers put behind every text, a base model has nothing to say."""
    tokenizer = char_tokenizer(chat="{% for m in messages %}{{ m['content'] + '\n' }}{% endfor %}")
    problem, = prepare([{"question": 12, "answer": "1"}], tokenizer)
    assert problem["question"] == "12" and tokenizer.decode(problem["prompt"]) == "12\n"
    plain, ending = char_tokenizer(), char_tokenizer()
    ending.backend_tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single="$A <eos>", special_tokens=[("<eos>", ending.eos_token_id)])
    chat = [turn("system", "Add."), turn("user", "1 + 1?")]
    assert common.prompt_of(chat, ending) == plain("Add.\n1 + 1?\n")["input_ids"]
    with pytest.raises(AssertionError, match="may end with the answer"):
        prepare([{"question": [*chat, turn("assistant", "2")], "answer": "2"}], plain)

# ---- Rewards ----

def test_a_reward_gets_each_problem_beside_its_completion_and_gives_a_finite_number_for_each():
    def rewards_of(reward):
        rollout = {"problems": [{"n": 1}, {"n": 2}], "texts": [*"12"], "ids": torch.zeros(2, 1)}
        return common.rewards_of(reward, rollout)

    def tell(problems, completions):
        return [10 * problem["n"] + int(text) for problem, text in zip(problems, completions)]
    assert rewards_of(tell).tolist() == [11, 22]
    for given in ((True, False), torch.tensor([1.0, 0]).double()):
        rewards = rewards_of(lambda problems, completions: given)
        assert rewards.dtype == torch.float32 and rewards.tolist() == [1, 0], given
    for given in ([0.5, float("nan")], [1, 1e999], [1.0], [1.0] * 3):
        with pytest.raises(AssertionError, match="the reward function paid"):
            rewards_of(lambda problems, completions: given)

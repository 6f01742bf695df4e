"""Problems and rewards: file formats, splits, columns, prompts, gold answers, what a reward may give."""
import shlex
import shutil
import sys
from pathlib import Path

import datasets
import pytest
import torch
import transformers

import common
import grpo
from conftest import LOOKS, TINY, char_tokenizer, refused, save_tiny, spy, sums, train, write_jsonl

pytestmark = pytest.mark.usefixtures("here")

def load(flags=""):
    """The training and the held-out problems of a command."""
    def main(args):
        args.max_prompt_tokens = min(args.max_prompt_tokens, 252)  # as load_policy does
        loaded.extend(common.load_problems(args, transformers.AutoTokenizer.from_pretrained(args.model)))
    loaded, line = [], f"{TINY} --device cpu --out loading --system_prompt '' {flags}"
    args = grpo.parse_args(shlex.split(line))
    common.launch(main, args)
    shutil.rmtree("loading")
    return loaded

def questions(problems):
    return [problem["question"] for problem in problems]

def rollout(*texts):
    return {"texts": list(texts), "ids": torch.zeros(len(texts), 1)}

# ---- Files ---------------------------------------------------------------------------------------

@pytest.mark.parametrize("kind, how", [
    ("jsonl", {}), ("json", {"lines": False}), ("csv", {}), ("parquet", {})])
def test_every_format_gives_the_same_rows(kind, how):
    table = datasets.Dataset.from_list(sums(30))
    getattr(table, f"to_{kind.removesuffix('l')}")(f"a.{kind}", **how)
    train_set, held_out = load(f"--dataset a.{kind} --eval_problems 30")
    assert sorted(questions(train_set + held_out)) == sorted(questions(sums(30)))
    assert {problem["answer"] for problem in train_set} <= {row["answer"] for row in sums(30)}

def test_a_directory_gives_its_splits():
    Path("set").mkdir()
    write_jsonl("set/train.jsonl", sums(12))
    write_jsonl("set/test.jsonl", sums(6, start=100))
    train_set, held_out = load("--dataset set --eval_problems 100")
    assert questions(train_set) == questions(sums(12))
    assert sorted(questions(held_out)) == sorted(questions(sums(6, start=100)))
    swapped = load("--dataset set --split test --eval_split train --eval_problems 100")
    assert list(map(len, swapped)) == [6, 12]

def test_a_name_with_a_bracket_or_a_star_is_no_pattern(capsys):
    """f1.jsonl was read in place of f[1].jsonl. A directory with such a name cannot be read."""
    for i, (name, other) in enumerate([("f[1]", "f1"), ("g*", "g1"), ("h?", "h1")]):
        write_jsonl(f"{name}.jsonl", sums(20, start=100 * i))
        write_jsonl(f"{other}.jsonl", sums(20, start=900))
        both = load(f"--dataset '{name}.jsonl' --eval_problems 20")
        assert sorted(questions(sum(both, []))) == sorted(questions(sums(20, start=100 * i)))
        Path(name).mkdir()
        with refused(capsys, f"--dataset {name}", "[, * or ?"):
            load(f"--dataset '{name}'")

def test_of_several_configurations_main_is_read():
    """openai/gsm8k, of the README's second command, has main and socratic: none is the default."""
    Path("several").mkdir()
    configs = ""
    for name, start in (("hard", 100), ("main", 0), ("socratic", 200)):
        write_jsonl(f"several/{name}.jsonl", sums(20, start))
        configs += f"- config_name: {name}\n  data_files: {name}.jsonl\n"
    Path("several/README.md").write_text(f"---\nconfigs:\n{configs}---\n", encoding="utf-8")
    train_set, held_out = load("--dataset several --eval_problems 20")
    assert sorted(questions(train_set + held_out)) == sorted(questions(sums(20)))

GOOD, UNREADABLE = '{"question": "1+1", "answer": "2"}\n', '{"question": "%d", "answer": ""}\n'
BAD_FILES = {  # what is wrong: (flags, the file's content or None, what the line names)
    "a broken line": ("--dataset bad.jsonl", GOOD * 16 + '{"question": "x",\n' + GOOD, "bad.jsonl JSON row"),
    "empty": ("--dataset bad.jsonl", "", "bad.jsonl"),
    "of an unknown kind": ("--dataset bad.txt", GOOD, "bad.txt .jsonl"),
    "not there": ("--dataset gone.jsonl", None, "FileNotFoundError"),
    "not on the hub": ("--dataset nobody/gone", None, "nobody/gone"),
    "a directory without data": ("--dataset model", None, "--dataset model directory"),
    "no such question column": ("--question_column problem", None, "problem --question_column answer"),
    "no such answer column": ("--answer_column solution", None, "solution --answer_column question"),
    "nothing readable": ("--dataset bad.jsonl", "".join(UNREADABLE % i for i in range(30)), "bad.jsonl"),
    "one row": ("--dataset bad.jsonl", GOOD, "bad.jsonl 0 problems of 0 none"),  # none is too long
    "all too long": ("--max_prompt_tokens 3", None, "data.jsonl --max_prompt_tokens")}

@pytest.mark.parametrize("case", BAD_FILES)
def test_bad_data_is_named_in_one_line(case, capfd):
    flags, content, words = BAD_FILES[case]
    if content is not None:
        Path(flags.split()[1]).write_bytes(content.encode())
    with refused(capfd, *words.split()):
        load(flags)

# ---- Splits and columns --------------------------------------------------------------------------

def test_a_lone_file_holds_out_by_the_question_alone_disjoint_and_stable():
    """Not by the answer, the order of the rows, the other rows or the seed."""
    rows = sums(200)
    write_jsonl("a.jsonl", rows + [row | {"answer": "another #### 1"} for row in rows[:100]])
    write_jsonl("b.jsonl", rows[::-2])
    a = [set(questions(part)) for part in load("--dataset a.jsonl --eval_problems 1000")]
    b = [set(questions(part)) for part in load("--dataset b.jsonl --eval_problems 1000 --seed 7")]
    assert not a[0] & a[1] and len(a[0] | a[1]) == 200 and 20 <= len(a[1]) <= 60
    half = set(questions(rows[::-2]))
    assert b == [a[0] & half, a[1] & half]

def test_what_is_asked_is_a_sample_of_the_held_out_problems_whatever_the_seed(monkeypatch):
    """Runs of several seeds sit the same exam, not of the first problems, which may be the easy ones. To save
    time twice as many are prepared as are asked, but not all."""
    rows, prepared = sums(200), spy(monkeypatch, common, "prepare")
    flags = f"{splits_of(sums(20, start=300), rows)} --eval_problems 20"
    exams = [questions(load(f"{flags} --seed {seed}")[1]) for seed in (0, 7)]
    assert exams[0] == exams[1] and len(set(exams[0])) == 20 and set(exams[0]) <= set(questions(rows))
    numbers = [questions(rows).index(question) for question in exams[0]]
    assert 60 < sum(numbers) / 20 < 140 and len(prepared[1].rows) == 40

def test_a_split_that_is_not_there_is_named_with_those_that_are(capsys):
    for name, splits in {"both": ["train", "test"], "lone": ["train"], "exam": ["test"]}.items():
        Path(name).mkdir()
        for split in splits:
            write_jsonl(f"{name}/{split}.jsonl", sums(20))
    for flags, words in {
            "both --split dev": "--split dev train, test", "lone --split dev": "--split dev train",
            "both --eval_split dev": "--eval_split dev", "exam": "--split train test"}.items():
        with refused(capsys, *words.split()):
            load(f"--dataset {flags}")
    sizes = {flags: list(map(len, load(f"--dataset {flags} --eval_problems 99")))
             for flags in ("lone", "exam --split test")}
    assert sizes["lone"] == sizes["exam --split test"] and sum(sizes["lone"]) == 20 and min(sizes["lone"]) > 0

def splits_of(train_rows, held_out=()):
    """A data set directory with these rows, the held-out ones by default sums."""
    Path("mine").mkdir()
    write_jsonl("mine/train.jsonl", train_rows)
    write_jsonl("mine/test.jsonl", held_out or sums(9))
    return "--dataset mine"

def test_problems_keep_all_columns_which_may_have_other_names():
    rows = [{"problem": row["question"], "solution": row["answer"], "answer": "0", "level": 3}
            for row in sums(20)]
    flags = splits_of(rows, [{"problem": "1 + 1", "solution": 2}])
    train_set, held_out = load(f"{flags} --question_column problem --answer_column solution")
    assert questions(train_set) == questions(sums(20)) and questions(held_out) == ["1 + 1"]
    assert train_set[0]["level"] == 3 and train_set[0]["problem"] == sums(1)[0]["question"]
    assert common.answer_reward(train_set[3:4] + held_out, ["#### 6", "so #### 2"]) == [1.0, 1.0]

def test_rows_that_cannot_be_used_are_counted_by_cause_and_left_out(capsys):
    """Six causes once had the one name "over --max_prompt_tokens or no readable answer"."""
    rows = sums(10)
    rows += [{"question": "?", "answer": ""}, {"question": "??", "answer": "####"}, {"question": "???"}]
    rows += [{"answer": "1"}, {"question": "", "answer": "1"}]
    rows += [{"question": "x" * n, "answer": "1"} for n in (59, 60, 80, 90)]  # and a newline
    flags = f"{splits_of(rows)} --max_prompt_tokens 60"
    assert questions(load(flags)[0]) == questions(sums(10)) + ["x" * 59]
    line = next(line for line in capsys.readouterr().out.splitlines() if "to train on" in line)
    assert line.startswith("11 ") and "of 19" in line
    for cause in ("2 no question", "3 too long", "3 no readable answer"):
        assert cause in line

def test_rows_without_a_gold_answer_are_kept_where_the_reward_needs_none():
    """--answer_column "" says so; there need not be such a column."""
    rows = sums(3) + [{"question": "?", "answer": ""}, {"question": "??"}]
    flags = splits_of(rows)
    assert len(load(flags)[0]) == 3
    own, held_out = load(f"{flags} --answer_column ''")
    assert len(own) == 5 and held_out and own[0]["answer"] == ""

def test_the_reward_that_needs_answers_is_refused_where_there_are_none(capsys):
    """--answer_column "" leaves problems without one: right completions would earn 0 for ever."""
    with refused(capsys, '--answer_column ""', "answer_reward"):
        train(grpo, f"{TINY} --answer_column ''")
    own = common.rewards_of(lambda problems, texts: [2.0], [{"answer": ""}], rollout("a"))
    assert own.tolist() == [2]

def test_what_is_trained_on_is_never_held_out():
    """Not with one split of two given twice, either."""
    train, held_out = load(f"{splits_of(sums(60))} --eval_split train")
    assert train and held_out and not set(questions(train)) & set(questions(held_out))

def test_an_empty_cell_of_a_table_is_no_question_and_no_answer():
    nan = float("nan")
    assert [common.text_of({"a": value}, "a", None) for value in (nan, None, 0, 2.5)] == ["", "", "0", "2.5"]

# ---- Prompts -------------------------------------------------------------------------------------

@pytest.mark.parametrize("system", ["", "Be brief."])
@pytest.mark.parametrize("look", LOOKS)
def test_prompts_are_the_templates_own_tokenisation(look, system):
    """The system prompt in its place, a turn to answer in, BOS once; without a template plain text."""
    save_tiny("tiny", "llama", char_tokenizer(**LOOKS[look]))
    problem, *_ = load(f"--model tiny --system_prompt '{system}'")[0]
    tokenizer, question = transformers.AutoTokenizer.from_pretrained("tiny"), problem["question"]
    chat = [{"role": "system", "content": system}] * bool(system) + [{"role": "user", "content": question}]
    if tokenizer.chat_template:
        own = tokenizer.apply_chat_template(chat, add_generation_prompt=True)["input_ids"]
        assert tokenizer.decode(own).endswith("assistant\n" if look == "chatml" else "[assistant]")
    else:
        text = f"{system}\n{question}\n" if system else f"{question}\n"
        bos = [tokenizer.bos_token_id] * (look == "plain")
        own = bos + [tokenizer.convert_tokens_to_ids(character) for character in text]
    assert problem["prompt"] == own and own.count(tokenizer.bos_token_id) == (look in ("bos", "plain"))

@pytest.mark.parametrize("look", ["chatml", "plain"])
def test_a_thousand_prompts_are_those_of_one_at_a_time(look):
    """In their order, also behind the first thousand, where another batch begins; blanks around a question
    stay. None is padded."""
    save_tiny("tiny", "llama", char_tokenizer(**LOOKS[look]))
    tokenizer, rows = transformers.AutoTokenizer.from_pretrained("tiny"), sums(1100)
    rows[5]["question"] = "  1 + 1? \n "
    for problem, row in zip(load(f"--model tiny {splits_of(rows)}")[0], rows, strict=True):
        own = tokenizer(row["question"] + "\n")["input_ids"]
        if look == "chatml":
            chat = [turn("user", row["question"])]
            own = tokenizer.apply_chat_template(chat, add_generation_prompt=True)["input_ids"]
        assert problem["question"] == row["question"] and problem["prompt"] == own

@pytest.mark.parametrize("look", LOOKS)
@pytest.mark.parametrize("column", ["question", "prompt"])
def test_a_question_may_be_a_chat(column, look):
    """As in TRL's data sets, there in the column prompt. The model was asked the repr of the list."""
    save_tiny("tiny", "llama", char_tokenizer(**LOOKS[look]))
    alone = [turn("user", "1 + 1?")]
    talk = [turn("user", "Hi."), turn("assistant", "Hello!"), turn("user", "2 + 2?")]
    led = [turn("system", "Be kind."), turn("user", "3 + 3?")]
    rows = [{column: chat, "answer": "#### 2"} for chat in (alone, talk, led)]
    flags = f"--model tiny {splits_of(rows, rows)} --question_column {column}"
    tokenizer = transformers.AutoTokenizer.from_pretrained("tiny")

    def ids(chat):
        if tokenizer.chat_template:
            text = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
            return tokenizer(text, add_special_tokens=False)["input_ids"]
        return tokenizer("".join(f"{message['content']}\n" for message in chat))["input_ids"]
    train_set, _ = load(flags)
    assert [problem["prompt"] for problem in train_set] == [ids(chat) for chat in (alone, talk, led)]
    assert questions(train_set) == ["1 + 1?", "2 + 2?", "3 + 3?"]
    train_set, _ = load(f"{flags} --system_prompt Brief.")
    brief = [turn("system", "Brief.")]
    assert [problem["prompt"] for problem in train_set] == [ids(brief + alone), ids(brief + talk), ids(led)]

def turn(role, content):
    return {"role": role, "content": content}

@pytest.mark.parametrize("column, value", [
    ("question", ["1 + 1?"]), ("question", {"text": "1 + 1?"}), ("question", [{"text": "1 + 1?"}]),
    ("question", [{"role": "user", "content": [{"type": "text", "text": "1 + 1?"}]}]), ("question", []),
    *[("question", [{"role": "user", "content": "1 + 1?"}, {"role": role, "content": "text: 2"}])
      for role in ("assistant", "Assistant", "gpt", "model", "tool", "system")],
    ("answer", [2]), ("answer", {"value": 2})])
def test_another_list_or_dict_and_a_chat_that_holds_the_answer_are_refused(column, value, capsys):
    rows = [row | {column: value} for row in sums(9)]
    with refused(capsys, "--dataset mine", f"column {column}", "text"):
        load(splits_of(rows, rows))

@pytest.mark.parametrize("template", [
    "{{ raise_exception('no chats') }}", "{% for m in messages %}", "{{ messages[0]['nothing'].upper() }}",
    "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}{{ messages }}"])
def test_a_chat_template_that_fails_is_one_line(template, capsys):
    """It raised through 40 lines of jinja2. Gemma's has no system role."""
    save_tiny("odd", "llama", char_tokenizer(template))
    with refused(capsys, "--model odd", "template", "--system_prompt"):
        load("--model odd --system_prompt Brief.")
    if "system" in template:
        load("--model odd")

def test_a_tokenizer_that_does_not_know_the_questions_is_refused(capsys):
    """The toy, asked GSM8K, was trained on <unk><unk>..."""
    known, unknown = sums(1)[0]["question"], "\u00e9" * 15
    rows = [{"question": question, "answer": "1"} for question in [unknown] * 9 + [known]]
    with refused(capsys, "--model model", "does not know", "--dataset mine"):
        load(splits_of(rows))
    few = [{"question": "\u00e9" * i + known, "answer": "1"} for i in range(1, 9)]  # it may know most of it
    Path("few").mkdir()
    [write_jsonl(f"few/{split}.jsonl", few) for split in ("train", "test")]
    assert len(load("--dataset few")[0]) == 8

# ---- Rewards -------------------------------------------------------------------------------------

def test_a_reward_gets_each_problem_beside_its_completions_and_may_give_any_numbers():
    def tell(problems, completions):
        return [10 * problem["n"] + int(text) for problem, text in zip(problems, completions)]
    assert common.rewards_of(tell, [{"n": 1}, {"n": 2}], rollout(*"1234")).tolist() == [11, 12, 23, 24]
    for given in ([1, 0], [True, False], [1.0, 0.0], (1, 0), torch.tensor([1, 0]),
                  torch.tensor([True, False]), torch.tensor([1.0, 0]).double(), [torch.tensor(1.0), 0]):
        rewards = common.rewards_of(lambda problems, completions: given, [{}], rollout("a", "b"))
        assert rewards.dtype == torch.float32 and rewards.tolist() == [1, 0], given

@pytest.mark.parametrize("given, words", [
    (lambda n: [0.5] * (n - 1) + [float("nan")], "finite nan"), (lambda n: [1e39] * n, "finite inf"),
    (lambda n: [1.0], "2 finite returned 1: [1.0]"),
    (lambda n: [1.0] * 4096, "2 finite returned 4096: [...]")])
def test_a_reward_that_gives_no_numbers_is_blamed_in_one_line(given, words, monkeypatch, capsys):
    """The numbers are shown, unless there are too many."""
    monkeypatch.setattr(common, "answer_reward", lambda problems, completions: given(len(completions)))
    with refused(capsys, "the reward function", *words.split()):
        train(grpo, TINY)

"""Problems and rewards: file formats, splits, columns, prompts, gold answers, what a reward may give."""
import contextlib
import shlex
from pathlib import Path

import datasets
import pytest
import torch
import transformers

import common
import gspo
import grpo
import ppo
from conftest import (CHATML, LOOKS, TINY, char_tokenizer, refused, save_judge, save_tiny, sums, train,
                      write_jsonl)

pytestmark = pytest.mark.usefixtures("here")
every_script = pytest.mark.parametrize("script", [ppo, grpo, gspo])

def load(flags=""):
    """The training and the held-out problems of a command."""
    def main(args):
        policy, tokenizer = common.load_policy(args)
        common.resolve_and_check(args, policy)
        loaded.extend(common.load_problems(args, tokenizer, common.load_reward(args)))
    loaded = []
    common.launch(main, grpo.parse_args(shlex.split(f"{TINY} --device cpu --out loading {flags}")))
    return loaded

def questions(problems):
    return [problem["question"] for problem in problems]

def rollout(*texts):
    return {"texts": list(texts), "ids": torch.zeros(len(texts), 1)}

# ---- Files ---------------------------------------------------------------------------------------

def write(path, rows):
    """Write rows in the format that the end of the file's name says."""
    table, kind = datasets.Dataset.from_list(rows), path.lower().split(".")[-1]
    if kind in ("csv", "parquet"):
        getattr(table, f"to_{kind}")(path)
    else:
        table.to_json(path, lines=kind != "json")

@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.csv", "a.parquet", "a.JSONL"])
def test_every_format_gives_the_same_rows(name):
    write(name, sums(30))
    train_set, held_out = load(f"--dataset {name} --eval_problems 30")
    assert sorted(questions(train_set + held_out)) == sorted(questions(sums(30)))
    assert {problem["answer"] for problem in train_set} <= {row["answer"] for row in sums(30)}

@pytest.mark.parametrize("name, kind", [("set", "jsonl"), ("csv", "parquet"), ("json", "csv")])
def test_a_directory_gives_its_splits_whatever_its_name(name, kind):
    """The datasets library has readers named csv and json, which read the working directory."""
    Path(name).mkdir()
    write(f"{name}/train.{kind}", sums(12))
    write(f"{name}/test.{kind}", sums(6, start=100))
    train_set, held_out = load(f"--dataset {name} --eval_problems 100")
    assert questions(train_set) == questions(sums(12))
    assert sorted(questions(held_out)) == sorted(questions(sums(6, start=100)))
    swapped = load(f"--dataset {name} --split test --eval_split train --eval_problems 100")
    assert list(map(len, swapped)) == [6, 12]

def test_a_byte_order_mark_and_blank_lines_are_read_over():
    for name, head, row in (("a.jsonl", "", '{"question": "%d", "answer": "2"}\n\n'),
                            ("a.csv", "question,answer\n", "%d,2\n")):
        Path(name).write_bytes(b"\xef\xbb\xbf" + (head + "".join(row % i for i in range(20))).encode())
        train_set, held_out = load(f"--dataset {name} --eval_problems 20")
        assert sorted(questions(train_set + held_out), key=int) == [str(i) for i in range(20)]

def test_brackets_and_stars_in_a_path_are_characters():
    """The datasets library takes them for a pattern: the file was not found, or another one was. A directory
    may be refused, but another is never read in its place."""
    for name in ("a[1].jsonl", "b*.jsonl", "c?{x,y}.jsonl"):
        write_jsonl(name, sums(30))
        matched = name.translate(str.maketrans("[]*?{},", "1111111"))
        write_jsonl(matched, sums(30, start=100))
        train_set, held_out = load(f"--dataset '{name}' --eval_problems 30")
        assert sorted(questions(train_set + held_out)) == sorted(questions(sums(30))), name
    for name, start in (("set[1]", 0), ("set1", 100)):
        Path(name).mkdir()
        write_jsonl(f"{name}/train.jsonl", sums(30, start))
    with contextlib.suppress(SystemExit):
        assert "What is 0 + 0?" in questions(load("--dataset 'set[1]' --eval_problems 30")[0])

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

def test_a_file_without_an_ending_is_no_reader_of_the_datasets_library(capsys):
    """`--dataset csv`, where there is none, took every file below the working directory for a table."""
    Path("below").mkdir()
    write("below/a.csv", sums(30))
    write("b.csv", sums(30))
    for name in ("csv", "json", "parquet", "text"):
        with refused(capsys, f"--dataset {name}", "no such file"):
            load(f"--dataset {name}")

GOOD, UNREADABLE = '{"question": "1+1", "answer": "2"}\n', '{"question": "%d", "answer": ""}\n'
BAD_FILES = {  # what is wrong: (flags, the file's content or None, what the line names)
    "a broken line": ("--dataset bad.jsonl", GOOD * 16 + '{"question": "x",\n' + GOOD, "bad.jsonl"),
    "a torn line": ("--dataset bad.jsonl", GOOD * 60 + GOOD[:20], "bad.jsonl"),
    "not UTF-8": ("--dataset bad.jsonl", GOOD.encode() * 16 + b'{"question": "\xff"}\n', "bad.jsonl"),
    "not objects": ("--dataset bad.jsonl", "[1, 2]\n3\n" * 20, "bad.jsonl"),
    "a torn table": ("--dataset bad.csv", "question,answer\n1+1,2\n1,2,3,4\n", "bad.csv 3"),
    "empty": ("--dataset bad.jsonl", "", "bad.jsonl"),
    "of an unknown kind": ("--dataset bad.txt", GOOD, "bad.txt .jsonl"),
    "not there": ("--dataset gone.jsonl", None, "gone.jsonl"),
    "not on the hub": ("--dataset nobody/gone", None, "nobody/gone"),
    "a directory without data": ("--dataset judge", None, "judge"),
    "no such question column": ("--question_column problem", None, "problem --question_column answer"),
    "no such answer column": ("--answer_column solution", None, "solution --answer_column question"),
    "nothing readable": ("--dataset bad.jsonl", "".join(UNREADABLE % i for i in range(30)), "bad.jsonl"),
    "one row": ("--dataset bad.jsonl", GOOD, "bad.jsonl 0 of 0 --eval_split fifth"),
    "all too long": ("--max_prompt_tokens 3", None, "data.jsonl --max_prompt_tokens")}

@pytest.mark.parametrize("case", BAD_FILES)
def test_bad_data_is_named_in_one_line(case, capfd):
    flags, content, words = BAD_FILES[case]
    if content is not None:
        Path(flags.split()[1]).write_bytes(content if isinstance(content, bytes) else content.encode())
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

def test_a_split_that_is_not_there_is_named_with_those_that_are(capsys):
    for name, splits in {"both": ["train", "test"], "lone": ["train"], "exam": ["test"]}.items():
        Path(name).mkdir()
        for split in splits:
            write_jsonl(f"{name}/{split}.jsonl", sums(20))
    for flags, words in {"both --split dev": "--split dev test", "lone --split dev": "--split dev train",
                         "both --eval_split dev": "--eval_split dev", "exam": "--split train test",
                         "lone --eval_split dev": "--eval_split dev train"}.items():
        with refused(capsys, *words.split()):
            load(f"--dataset {flags}")
    sizes = {flags: list(map(len, load(f"--dataset {flags} --eval_problems 99")))
             for flags in ("lone", "exam --split test", "lone --eval_split train")}
    assert sizes["lone"] == sizes["exam --split test"] and sum(sizes["lone"]) == 20 and min(sizes["lone"]) > 0
    assert sizes["lone --eval_split train"] == [20, 20], "as asked"

def test_the_problems_evaluated_are_a_sample_of_the_held_out_ones_the_same_in_every_run():
    """Not the first: a test split may be sorted, by subject or from easy to hard."""
    flags = f"{splits_of(sums(9), sums(100))} --eval_problems 20"
    asked, again = (questions(load(f"{flags} --seed {seed}")[1]) for seed in (0, 1))
    places = sorted(questions(sums(100)).index(question) for question in asked)
    assert asked == again and len(set(places)) == 20 and places[0] < 25 and places[-1] >= 75
    assert 30 < sum(places) / 20 < 70

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

@pytest.mark.parametrize("column", ["answer", "nothing"])
def test_gold_answers_are_asked_for_by_the_answer_reward_alone(column, monkeypatch, here):
    """A reward of one's own, or a model, may need none: rows without were dropped, data without refused."""
    rows = sums(3) + [{"question": "?", "answer": ""}, {"question": "??"}]
    rows = [{"question": row["question"], column: row.get("answer")} for row in rows]
    flags = splits_of(rows, [{"question": "held out"}])
    monkeypatch.setattr(common, "load_reward", lambda args: lambda problems, completions: [0] * len(problems))
    own, _ = load(flags)
    monkeypatch.undo()
    monkeypatch.chdir(here)
    judged, held_out = load(f"{flags} --reward_model judge")
    assert len(own) == len(judged) == 5 and questions(held_out) == ["held out"]
    if column == "answer":
        assert len(load(f"{flags} --eval_split train")[0]) == 3

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
        own = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)["input_ids"]
        assert tokenizer.decode(own).endswith("assistant\n" if look == "chatml" else "[assistant]")
    else:
        text = f"{system}\n{question}\n" if system else f"{question}\n"
        bos = [tokenizer.bos_token_id] * (look == "plain")
        own = bos + [tokenizer.convert_tokens_to_ids(character) for character in text]
    assert problem["prompt"] == own and own.count(tokenizer.bos_token_id) == (look in ("bos", "plain"))

def test_a_template_without_a_system_role_has_the_instruction_in_the_users_turn():
    template = ("{% for m in messages %}{% if m['role'] == 'system' %}{{ raise_exception('no system role') }}"
                "{% endif %}<{{ m['content'] }}>{% endfor %}")
    save_tiny("gemma", "llama", char_tokenizer(template))
    problem, *_ = load("--model gemma --system_prompt 'Be brief.'")[0]
    tokenizer = transformers.AutoTokenizer.from_pretrained("gemma")
    assert tokenizer.decode(problem["prompt"]) == f"<Be brief.\n\n{sums(1)[0]['question']}>"
    assert problem["question"] == sums(1)[0]["question"], "which is what is shown and a reward model reads"

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
    assert questions(train_set) == ["1 + 1?", "2 + 2?", "3 + 3?"], "what a reward model is shown"
    train_set, _ = load(f"{flags} --system_prompt Brief.")
    brief = [turn("system", "Brief.")]
    assert [problem["prompt"] for problem in train_set] == [ids(brief + alone), ids(brief + talk), ids(led)]

def turn(role, content):
    return {"role": role, "content": content}

@pytest.mark.parametrize("column, value", [
    ("question", ["1 + 1?"]), ("question", {"text": "1 + 1?"}), ("question", [{"text": "1 + 1?"}]),
    ("question", [{"role": "user", "content": [{"type": "text", "text": "1 + 1?"}]}]),
    ("answer", [2]), ("answer", {"value": 2})])
def test_another_list_or_dict_is_refused_with_the_columns_name(column, value, capsys):
    rows = [row | {column: value} for row in sums(9)]
    with refused(capsys, "--dataset mine", column, type(value).__name__):
        load(splits_of(rows, rows))

def test_a_question_keeps_its_blanks_where_there_is_no_template():
    """Code is indented."""
    question = "    def f(x):\n  return"
    problem, *_ = load(splits_of([{"question": question, "answer": "1"}]))[0]
    assert char_tokenizer().decode(problem["prompt"]) == question + "\n"

@pytest.mark.parametrize("template, words", [
    ("{{ raise_exception('no chats here') }}", "no chats here"), ("{% for m in messages %}", "template"),
    ("{{ messages[0]['nothing'].upper() }}", "template"), ("hello", "leaves out the question"),
    ("{{ '' }}", "leaves out the question")])
def test_a_chat_template_that_fails_or_leaves_the_question_out_is_one_line(template, words, capsys):
    """It raised through 40 lines of jinja2, or every prompt was "hello"."""
    save_tiny("odd", "llama", char_tokenizer(template))
    with refused(capsys, "--model odd", *words.split()):
        load("--model odd")

def test_a_file_too_small_to_hold_a_fifth_out_says_so_with_a_chat_template(capsys):
    save_tiny("tiny", "llama", char_tokenizer(**LOOKS["chatml"]))
    write_jsonl("one.jsonl", sums(1))
    with refused(capsys, "--dataset one.jsonl", "0 problems"):
        load("--model tiny --dataset one.jsonl")

def test_a_tokenizer_that_does_not_know_the_questions_is_refused(capsys):
    """The toy, asked GSM8K, was trained on <unk><unk>..."""
    known, unknown = sums(1)[0]["question"], "\u00e9" * 15
    rows = [{"question": question, "answer": "1"} for question in [unknown] * 9 + [known]]
    with refused(capsys, "--model model", "--dataset mine", "another --model"):
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
    (lambda n: [0.5] * (n - 1) + [float("nan")], "nan completion"),
    (lambda n: [float("-inf")] * n, "-inf completion"), (lambda n: [1e39] * n, "inf completion"),
    (lambda n: [1.0], "2 numbers returned 1"), (lambda n: [1.0] * 9, "2 numbers returned 9"),
    (lambda n: [[1.0]] * n, "numbers list"), (lambda n: None, "numbers NoneType"),
    (lambda n: [None] * n, "numbers NoneType"), (lambda n: ["good"] * n, "numbers good"),
    (lambda n: {i: 1.0 for i in range(n)}, "numbers dict"),
    (lambda n: common.fail("the reward Grader: why"), "why")])
def test_a_reward_that_gives_no_numbers_is_blamed_in_one_line(given, words, monkeypatch, capsys):
    """A dict's keys were taken for rewards. Here the reward is no function, so that it has no __name__."""
    class Grader:
        def __call__(self, problems, completions):
            return given(len(completions))
    monkeypatch.setattr(common, "load_reward", lambda args: Grader())
    with refused(capsys, "the reward", "Grader", *words.split()):
        train(grpo, TINY)

@pytest.mark.parametrize("error", [OSError, KeyError, TypeError])
def test_an_error_inside_a_reward_shows_where_it_is(error, monkeypatch):
    def raises(problems, completions):
        raise error("from the reward")
    monkeypatch.setattr(common, "load_reward", lambda args: raises)
    with pytest.raises(error, match="from the reward"):
        train(grpo, TINY)

@pytest.mark.parametrize("chat, pad", [(None, "<pad>"), (CHATML, "<eos>"), (None, None)])
def test_a_reward_models_scores_are_those_of_one_row_at_a_time(chat, pad):
    """Whatever the padding token is, ids of 0 and end-of-sequence tokens in a text are read."""
    save_judge("critic", chat=chat, pad=pad, bos=True)
    problems = [{"question": "1 + 1?" * (i % 3 + 1)} for i in range(9)]
    texts = ["#### 2" + " or so" * (i % 5) + "<pad>" * (i % 2) + "<eos>" * (i % 3) for i in range(8)] + [""]
    reward = common.load_reward(grpo.parse_args("--reward_model critic --device cpu".split()))
    scores = common.rewards_of(reward, problems, rollout(*texts))
    judge = transformers.AutoModelForSequenceClassification.from_pretrained("critic").eval()
    judge.config.pad_token_id = None  # alone in its batch a row's last token is the last
    tokenizer = transformers.AutoTokenizer.from_pretrained("critic")
    for problem, text, score in zip(problems, texts, scores.tolist()):
        turns = [{"role": "user", "content": problem["question"]}, {"role": "assistant", "content": text}]
        whole = f"{problem['question']}\n{text}"
        read = tokenizer.apply_chat_template(turns, return_dict=True) if chat else tokenizer(whole)
        with torch.no_grad():
            assert score == pytest.approx(judge(torch.tensor([read["input_ids"]])).logits.item(), abs=1e-5)
    assert scores.std() > 0.01

@every_script
def test_a_reward_model_trains_without_gold_answers_and_right_is_1_or_more(script, monkeypatch):
    write_jsonl("open.jsonl", [{"question": row["question"]} for row in sums(60)])
    row = train(script, f"{TINY} --reward_model judge --dataset open.jsonl")[-1]
    assert row["reward"] not in (0.0, 1.0) and row["grad_norm"] > 0
    for paid, right in ((1.1, 1.0), (1, 1.0), (0.9, 0.0)):
        monkeypatch.setattr(common, "load_reward", lambda args: lambda problems, texts: [paid] * len(texts))
        assert train(script, f"{TINY} --eval_samples 2", out=f"paid{paid}")[-1]["eval_pass@2"] == right

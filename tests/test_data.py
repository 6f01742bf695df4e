"""Problems and rewards: file formats, splits, columns, gold answers, tokenizers, prompts, rewards."""
import json
import math
import shlex
from datetime import datetime
from pathlib import Path

import datasets
import pytest
import tokenizers
import transformers
from conftest import CHATML, PLAIN, ROOT, TINY, char_tokenizer, save_tiny, settings, sums, train, write_jsonl

import common
import grpo

pytestmark = pytest.mark.usefixtures("here")
WITH_BOS = ("{{ bos_token }}{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }}{{ eos_token }}"
            "{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}")
LOOKS = {"chatml": {"chat": CHATML, "eos": "<|im_end|>"},  # its prompts hold the end-of-sequence token
         "bos": {"chat": WITH_BOS, "bos": True, "pad": "<eos>"},  # tokenizer and template both add a BOS
         "plain": {"pad": None, "bos": True}}  # a base model, without a padding token or roles

def load(flags=""):
    args = grpo.parse_args(shlex.split(f"{TINY} --device cpu --system_prompt '' {flags}"))
    return common.load_problems(args, common.load_policy(args)[1])

def prepare(rows, tokenizer, flags=""):
    args = grpo.parse_args(shlex.split(f"--system_prompt '' --max_prompt_tokens 200 {flags}"))
    return common.prepare(datasets.Dataset.from_list(rows), tokenizer, args)

def questions(problems):
    return [problem["question"] for problem in problems]

def splits_of(train_rows, held_out=()):
    """Make a dataset directory of these rows; by default the held-out ones are sums."""
    Path("mine").mkdir()
    write_jsonl("mine/train.jsonl", train_rows)
    write_jsonl("mine/test.jsonl", held_out or sums(9, start=90))
    return "--dataset mine"

def turn(role, content):
    return {"role": role, "content": content}

# ---- Files, splits and columns ----

def test_a_directory_or_a_dataset_of_the_hub_gives_its_splits(monkeypatch):
    flags = f"{splits_of(sums(12), sums(6, start=100))} --eval_problems 100"
    own, held_out = map(questions, load(flags))
    assert own == questions(sums(12)) and sorted(held_out) == sorted(questions(sums(6, start=100)))
    assert list(map(len, load(f"{flags} --split test --eval_split train"))) == [6, 12]
    monkeypatch.setattr(datasets, "load_dataset", lambda source, subset: (source, subset))
    assert common.read_dataset("openai/gsm8k", "main") == ("openai/gsm8k", "main")

def test_a_fifth_of_a_lone_file_is_held_out_whatever_the_seed():
    write_jsonl("a.jsonl", sums(200))
    a, b = ([questions(part) for part in load(f"--dataset a.jsonl --eval_problems 1000 --seed {seed}")]
            for seed in "07")
    assert a == b and sorted(a[0] + a[1]) == sorted(questions(sums(200))) and 25 < len(a[1]) < 55
    write_jsonl("b.jsonl", sums(20) * 10)
    own, held_out = map(questions, load("--dataset b.jsonl --eval_problems 1000"))
    assert len(own) + len(held_out) == 200 and held_out and not set(own) & set(held_out)

def test_every_run_is_evaluated_on_the_same_sample_of_held_out_problems():
    """Not on the first ones, which may be the easy ones. Rows that cannot be used do not count."""
    rows = sums(200)
    rows[50:100] = [{"question": "?" * 90, "answer": ""}] * 50
    flags = f"{splits_of(sums(20, start=300), rows)} --eval_problems 100"
    one, other = (questions(load(f"{flags} {more}")[1]) for more in ("", "--seed 7"))
    assert one == other and len(set(one)) == 100
    assert list(map(len, one)) == sorted(map(len, one)), "to reduce padding"
    assert 90 < sum(map(questions(rows).index, one)) / 100 < 130

def test_problems_keep_all_columns_which_may_have_other_names():
    rows = [{"problem": row["question"], "solution": row["answer"], "answer": "0", "prompt": 1.5, "level": 3}
            for row in sums(20)]
    train_set, _ = load(f"{splits_of(rows, rows[:1])} --question_column problem --answer_column solution")
    assert questions(train_set) == questions(sums(20)[1:]) and train_set[2]["answer"] == "6"
    assert train_set[2]["level"] == 3

def test_what_is_left_of_the_rows_is_printed_with_the_first_gold_answer(capsys):
    """11 of 18 rows can be used. 3 of these are held out as well, even if only one problem is asked."""
    rows = sums(10) + [{"question": "x" * n, "answer": "1"} for n in (58, 59, 80)]  # and <bos>, newline
    rows += [{"question": "?", "answer": ""}, {"question": "??", "answer": "####"}]
    rows += [{"answer": "1"}, {"question": "", "answer": "1"}, {"question": "", "answer": "2"}]
    flags = f"{splits_of(rows, sums(5, start=7))} --max_prompt_tokens 60 --eval_problems 1"
    assert questions(load(flags)[0]) == questions(sums(7)) + ["x" * 58]
    said = capsys.readouterr().out
    assert said.startswith("of {'train': 18, 'test': 5} rows, 8 for training, 1 held out")
    assert "gold answer: '0'" in said
    for bad in (rows[-5:], rows[12:13]):
        write_jsonl("mine/train.jsonl", bad)
        with pytest.raises(AssertionError, match="nothing is left"):
            load(flags)
        assert f"{len(bad)}, 'test': 5}} rows, 0 for training" in capsys.readouterr().out

def test_a_prompt_that_the_tokenizer_does_not_know_is_refused():
    """Unless it's too long. GPT-2's unknown token is also its BOS and EOS, which a prompt may contain."""
    rows = [{"question": question, "answer": "3"} for question in ("π" * 300, "What is π?")]
    with pytest.raises(AssertionError, match="What is <unk>"):
        prepare(rows, char_tokenizer())
    known = char_tokenizer(**LOOKS["bos"] | {"eos": "<unk>"})
    assert prepare([{"question": "1 + 1?", "answer": "2"}], known)

def test_a_file_may_have_brackets_in_its_name():
    write_jsonl("f[1].jsonl", sums(3)), write_jsonl("f1.jsonl", sums(5))
    assert len(common.read_dataset("f[1].jsonl")["train"]) == 3

# ---- Answers ----

def test_without_gold_answers_rows_are_kept_and_there_is_no_accuracy():
    """With --answer_column "". A column `answer` may be missing, or stays as it is, for your own reward."""
    flags = splits_of(sums(3) + [{"question": "?", "answer": ""}, {"question": "??"}])
    assert len(load(flags)[0]) == 3
    own, held_out = load(f"{flags} --answer_column ''")
    assert len(own) == 5 and held_out
    assert [problem["answer"] for problem in own[2:]] == ["2 + 2 = #### 4", "", ""]
    assert prepare([{"question": "?", "level": 3}], char_tokenizer(), "--answer_column ''")[0]["answer"] == ""
    first, last = train(grpo, f"{TINY} --system_prompt '' {flags} --answer_column ''")
    assert "eval_reward" in first and not {"eval_accuracy"} & {*first, *last}

def golds(answers):
    rows = [{"question": "?", "answer": answer} for answer in answers]
    return [problem["answer"] for problem in prepare(rows, char_tokenizer())]

def test_numbers_are_gold_answers_as_they_stand_in_the_file():
    """Unless missing: JSON's NaN would be the answer "nan"."""
    numbers = {0.3: "0.3", 2.0: "2", -0.5: "-1/2", 6.3: "6.3", 1234567.25: "1,234,567.25", 7: "7", 0: "0",
               9007199254740993: "9007199254740993"}
    for gold, text in numbers.items():
        problems = prepare([{"question": "?", "answer": gold}], char_tokenizer())
        assert common.answer_reward(problems, [f"#### {text}"]) == [1]
        assert common.answer_reward(problems, ["#### 3"]) == [0]
    assert golds([math.nan, 2.0, None]) == ["2.0"]

@pytest.mark.parametrize("gold", [
    "1e-05", "1e16", "6.300000000000001", "9007199254740993.0", "18446744073709551616", '"2020-01-02"',
    '["70"]', '{"ground_truth": "70"}'])
def test_gold_answers_that_json_does_not_keep_are_refused(gold):
    """9007199254740993 and 2^64 in a column of floats lose digits; dates become timestamps. As strings, all
    numbers are kept; without gold answers, anything is."""
    Path("f.jsonl").write_text(f'{{"question": "?", "answer": {gold}}}\n{{"question": "?", "answer": null}}')
    rows = common.read_dataset("f.jsonl")["train"].to_list()
    with pytest.raises(AssertionError, match="as strings"):
        prepare(rows, char_tokenizer())
    assert len(prepare(rows, char_tokenizer(), "--answer_column ''")) == 2
    assert golds([gold.strip('"')]) == [gold.strip('"')]

def test_gold_answers_that_no_completion_could_match_are_dropped():
    """JSON reads "\\frac", with one backslash, as a form feed and "rac". Blanks at the end go alone."""
    assert golds(["\frac12", "\times 3", "\boxed{7}", "\right", "2\t3", r"\frac12"]) == [r"\frac12"]
    kept = ["2\t", "2\r", "2\xa0", " 2\n", "We add.\r\n#### 2\r\nDone.", "\u200b2", "2\u2060"]
    rows = [{"question": "?", "answer": answer} for answer in kept]
    for problem in prepare(rows, char_tokenizer()):
        assert common.answer_reward([problem] * 2, ["#### 2", "#### 3"]) == [1, 0]
    assert golds(kept)[:5] == ["2"] * 5 and len(golds(kept)) == 7

# ---- Tokenizers and prompts ----

@pytest.mark.parametrize("declared", ["Qwen2Tokenizer", "LlamaTokenizerFast", None])
def test_a_model_reads_what_its_tokenizer_json_says(declared):
    """So does the saved one. AutoTokenizer would give a qwen2 its own pre-tokenizer and decoder."""
    made = char_tokenizer()
    save_tiny("own", "qwen2", made)
    file = Path("own/tokenizer_config.json")
    file.write_text(json.dumps(json.loads(file.read_text()) | {"tokenizer_class": declared}))
    _, tokenizer = common.load_policy(settings(grpo, model="own"))
    tokenizer.save_pretrained("saved")
    for each in (tokenizer, transformers.PreTrainedTokenizerFast.from_pretrained("saved")):
        assert each("12 and 3")["input_ids"] == made("12 and 3")["input_ids"]
        assert each.chat_template == made.chat_template and each.eos_token == "<eos>"

@pytest.mark.parametrize("system", ["", "Brief."])
@pytest.mark.parametrize("look", LOOKS)
def test_prompts_are_the_templates_own_tokenisation_of_a_text_or_a_chat(look, system):
    """With one BOS. A chat can bring a system prompt of its own. The plain template is the manual's."""
    assert f"`{PLAIN}`" in (ROOT / "tests/manual/README.md").read_text(encoding="utf-8")
    tokenizer = char_tokenizer(**LOOKS[look])
    brief, alone = [turn("system", system)] * (system != ""), [turn("user", "1 + 1?")]
    talk = [turn("user", "Hi."), turn("assistant", "Hello!"), turn("user", "2 + 2?")]
    led = [turn("system", "Be kind."), turn("user", "3 + 3?")]
    for given, chat in (("1 + 1?", brief + alone), (alone, brief + alone), (talk, brief + talk), (led, led)):
        problem, = prepare([{"question": given, "answer": "2"}], tokenizer, f"--system_prompt '{system}'")
        own = tokenizer.apply_chat_template(chat, add_generation_prompt=True)["input_ids"]
        if "chat" in LOOKS[look]:
            assert tokenizer.decode(own).endswith("assistant\n" if look == "chatml" else "[assistant]")
        else:
            assert tokenizer.decode(own) == "<bos>" + "".join(f"{turn['content']}\n" for turn in chat)
        asked = [given] if given == "1 + 1?" else [turn["content"] for turn in given]
        assert problem["prompt"] == own and problem["question"] == "\n".join(asked)
        assert own.count(tokenizer.bos_token_id) == (look != "chatml")

def test_chats_that_hold_their_answer_are_refused_and_empty_ones_are_left_out():
    """As in most data sets for supervised training. A question that JSON made a date is refused, too."""
    for bad in ([turn("user", "2 + 2?"), turn("assistant", "It is 4.")], datetime(2020, 1, 2)):
        with pytest.raises((AssertionError, TypeError), match="It is 4|datetime"):
            prepare([{"question": bad, "answer": "4"}], char_tokenizer())
    chats = [], [turn("user", None)], [turn("user", "2 + 2?")]
    rows = [{"question": chat, "answer": "4"} for chat in chats]
    assert questions(prepare(rows, char_tokenizer())) == ["2 + 2?"]

@pytest.mark.parametrize("start", ["system", "user"])
def test_the_whole_chat_tells_problems_apart(start):
    rows = [{"question": [turn(start, f"Ann has {i} pens."), turn("user", "How many?")], "answer": i}
            for i in range(50)]
    train_set, held_out = load(splits_of(rows, rows[10:20]))
    assert len(train_set) == 40 and len(held_out) == 2
    assert questions(train_set)[9:11] == ["Ann has 9 pens.\nHow many?", "Ann has 20 pens.\nHow many?"]
    write_jsonl("lone.jsonl", rows)
    assert sum(map(len, load("--dataset lone.jsonl --eval_problems 50"))) == 50

def test_no_prompt_ends_with_an_eos_or_is_empty():
    """After an EOS, which some tokenizers append, a base model has nothing to say."""
    ending = char_tokenizer()
    ending.bos_token = None
    ending.backend_tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single="$A <eos>", special_tokens=[("<eos>", ending.eos_token_id)])
    chat = [turn("system", "Add."), turn("user", "1 + 1?")]
    problem, = prepare([{"question": chat, "answer": "2"}], ending)
    assert ending.decode(problem["prompt"]) == "Add.\n1 + 1?\n"
    wordless = char_tokenizer(chat="{% if messages[0]['content'] != '?' %}.{% endif %}")
    rows = [{"question": "?", "answer": "2"}, {"question": "1 + 1?", "answer": "2"}]
    assert questions(prepare(rows, wordless)) == ["1 + 1?"]

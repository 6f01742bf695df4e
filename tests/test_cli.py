"""The command line at toy size: bad input, models, data, every flag, resuming, what a run shows. Mostly in-process."""
import contextlib
import csv
import inspect
import itertools
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
import types
import zlib
from pathlib import Path

import huggingface_hub.constants
import pytest
import tokenizers
import torch
import transformers
from safetensors.torch import load_file

import common
import gspo
import grpo
import ppo
from conftest import ROOT, tiny_config, tiny_model

SCRIPTS = {"ppo": ppo, "grpo": grpo, "gspo": gspo}
FAMILIES = ["qwen2", "qwen3", "llama", "gpt2"]
SMALL = ("--steps 1 --prompts 2 --group_size 2 --max_new_tokens 4 --minibatches 1 --lr 0.01 --warmup_steps 0 "
         "--eval_problems 2 --eval_samples 0")
CLOCK = {"seconds", "rollout_tokens_per_s", "update_tokens_per_s", "peak_memory_gb"}  # what no two runs share
CHATML = ("{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
          "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")
WITH_BOS = ("{{ bos_token }}{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }}{{ eos_token }}{% endfor %}"
            "{% if add_generation_prompt %}[assistant]{% endif %}")
LOOKS = {"chatml": dict(chat=CHATML, eos="<|im_end|>", pad="<pad>", tied=True),  # its prompts hold the eos token
         "bos": dict(chat=WITH_BOS, bos=True, pad="<eos>", tied=False),          # tokenizer and template both add a BOS
         "plain": dict(pad=None, bos=True, tied=True),                           # a base model without pad token
         "untied": dict(pad="<pad>", tied=False)}


# ---------------------------------------------------------------------------------------------------------------------
# A small world

def char_tokenizer(chat=None, pad="<pad>", eos="<eos>", bos=False, unk="<unk>"):
    """One token a printable character, so that any text can be a prompt."""
    words = ["<pad>", "<eos>", "<unk>", "<bos>"] + [chr(i) for i in range(32, 127)] + ["\n"]
    tok = tokenizers.Tokenizer(tokenizers.models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>"))
    tok.pre_tokenizer = tokenizers.pre_tokenizers.Split(tokenizers.Regex("[\\s\\S]"), "isolated")
    tok.decoder = tokenizers.decoders.Fuse()
    if bos:
        tok.post_processor = tokenizers.processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 3)])
    out = transformers.PreTrainedTokenizerFast(tokenizer_object=tok, pad_token=pad, eos_token=eos, unk_token=unk, bos_token="<bos>")
    out.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})  # 102 in all
    out.chat_template = chat
    return out


def save_model(path, family="qwen3", chat=None, pad="<pad>", eos="<eos>", bos=False, tied=True, vocab_size=104, **settings):
    """A model directory like those of the hub."""
    tokenizer = char_tokenizer(chat, pad, eos, bos)
    model = tiny_model(family, vocab_size, eos_token_id=tokenizer.eos_token_id, tie_word_embeddings=tied, **settings)
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)


def save_judge(path, labels=1, chat=None, pad="<pad>", config_pad=0):
    """A reward model directory."""
    torch.manual_seed(1)
    config = tiny_config("qwen3", 104, num_labels=labels, eos_token_id=1, pad_token_id=config_pad, initializer_range=0.5,
                         num_hidden_layers=1)
    transformers.AutoModelForSequenceClassification.from_config(config).save_pretrained(path)
    char_tokenizer(chat, pad, bos=bool(chat)).save_pretrained(path)


def write_jsonl(path, rows):
    Path(path).write_text("".join(json.dumps(row) + "\n" for row in rows))


def sums(count, start=0):
    return [{"question": f"What is {i} + {i}?" + "!" * (i % 5), "answer": f"{i} + {i} = #### {2 * i}"} for i in range(start, start + count)]


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    path = tmp_path_factory.mktemp("world")
    save_model(path / "model", num_hidden_layers=1)
    save_judge(path / "judge")
    write_jsonl(path / "data.jsonl", sums(60))
    return path


@pytest.fixture(autouse=True)
def here(world, tmp_path, monkeypatch):
    """Every test runs in a directory of its own that holds model/, judge/ and data.jsonl, without network."""
    for path in world.iterdir():
        os.symlink(path, tmp_path / path.name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield tmp_path
    torch.set_num_threads(threads)
    signal.signal(signal.SIGINT, signal.default_int_handler)


def by_text(problems, texts):
    """A reward that is a function of the text alone, from 0 to 1."""
    return torch.tensor([zlib.crc32(text.encode()) % 9973 / 9973 for text in texts])


@pytest.fixture
def spread(monkeypatch):
    """Rewards that differ within every group, so that there is something to learn from random weights."""
    monkeypatch.setattr(common, "load_reward", lambda args: by_text)


def parsed(script, flags):
    flags = f"--model model --dataset data.jsonl {SMALL} --out run {flags}" if "--resume" not in flags.split() else flags
    return SCRIPTS[script].parse_args(shlex.split(flags))


def train(script, flags="", out="run"):
    """Run a script's main at toy size; later flags win. Returns the metrics, one dict a step."""
    SCRIPTS[script].main(parsed(script, flags if "--resume" in flags.split() else f"{flags} --out {out}"))
    return metrics(out)


def metrics(out="run"):
    return [json.loads(line) for line in Path(out, "metrics.jsonl").read_text().splitlines()]


def steps_of(out="run"):
    return [row["step"] for row in metrics(out)]


def newest(out="run"):
    """The only checkpoint of a run; nothing half-made lies beside it."""
    found = list(Path(out).glob("step-*"))
    assert len(found) == 1, found
    return found[0]


def refused(capsys, script, flags, *words, status=2, plain=False):
    """The command must leave with `status` and one line on stderr that holds all of `words`."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as left:
        SCRIPTS[script].main(SCRIPTS[script].parse_args(shlex.split(flags)) if plain else parsed(script, flags))
    error = capsys.readouterr().err
    assert left.value.code == status
    assert error.count("\n") == 1 and error.endswith("\n") and error.startswith("error: "), error
    assert len(error) < 400, "more than a line can hold: " + error
    for word in words:
        assert word in error, f"{word!r} not in {error!r}"
    return error


def spy(monkeypatch, module, name):
    """Record every call of module.name: its arguments by name, and its result."""
    calls, real = [], getattr(module, name)

    def wrapper(*args, **kwargs):
        result = real(*args, **kwargs)
        bound = inspect.signature(real).bind(*args, **kwargs).arguments
        calls.append(types.SimpleNamespace(**bound, result=result))
        return result
    monkeypatch.setattr(module, name, wrapper)
    return calls


def files(path):
    """Every file below `path` and what it holds."""
    return {str(f.relative_to(path)): f.read_bytes() for f in sorted(Path(path).rglob("*")) if f.is_file()}


def same(a, b):
    """Bit-equality of nested containers of tensors and numbers."""
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return a.dtype == b.dtype and torch.equal(a, b) if torch.is_tensor(a) else a == b


def same_runs(one, two):
    """Two runs ended in the same weights, the same optimiser state and the same metrics."""
    a, b = (max(Path(out).glob("step-*[0-9]"), key=lambda path: int(path.name[5:])) for out in (one, two))
    assert a.name == b.name
    weights = [f for f in files(a) if f.endswith((".safetensors", ".pt"))]
    assert weights == [f for f in files(b) if f.endswith((".safetensors", ".pt"))] and len(weights) >= 2
    for name in weights:
        load = load_file if name.endswith(".safetensors") else torch.load
        assert same(load(a / name), load(b / name)), f"{name} differs"
    timeless = [[{k: v for k, v in row.items() if k not in CLOCK} for row in metrics(out)] for out in (one, two)]
    assert timeless[0] == timeless[1]


def process(script, flags, **settings):
    """A true process, one thread."""
    env = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, str(ROOT / f"{script}.py"), *shlex.split(flags)]
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **settings)


# ---------------------------------------------------------------------------------------------------------------------
# Bad input: one line, status 2, nothing harmed

COUNT = ["0", "-1", "1.5", "x", "nan", "inf", ""]
POSITIVE = ["0", "-1", "nan", "inf", "x", ""]
OUT_OF_RANGE = {
    "--prompts": COUNT, "--group_size": COUNT, "--steps": COUNT, "--epochs": COUNT, "--minibatches": COUNT, "--max_new_tokens": COUNT,
    "--max_prompt_tokens": COUNT, "--micro_batch_tokens": COUNT, "--eval_every": COUNT, "--eval_problems": COUNT, "--save_every": COUNT,
    "--temperature": POSITIVE, "--lr": POSITIVE, "--max_grad_norm": ["0", "-1", "nan", "x"],
    "--warmup_steps": ["-1", "0.5", "nan"], "--eval_samples": ["-1", "x"], "--seed": ["-1", "x", "1" + "0" * 30],
    "--eps_low": ["0", "1", "-.2", "nan"], "--eps_high": ["0", "-1", "nan"], "--beta": ["-0.1", "nan", "inf"],
    "--dtype": ["float16", ""], "--device": ["bogus", "cuda:99", "meta", ""]}
OWN = {"ppo": {"--gamma": ["-1", "1.1", "nan"], "--lam": ["-1", "1.1"], "--vf_coef": ["-1", "nan"], "--eps_value": ["0", "nan"],
               "--value_lr": POSITIVE, "--kl": ["k3"], "--ref_every": ["2"], "--token_level": [""]},
       "grpo": {"--group_size": ["1"], "--kl": ["k1", "k2"], "--ref_every": ["0", "-1", "x"], "--token_level": [""], "--gamma": ["1"]},
       "gspo": {"--group_size": ["1"], "--kl": ["k1"], "--ref_every": ["0", "x"], "--lam": ["1"]}}


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_flag_out_of_range_or_of_another_script_is_refused(script, capsys):
    for flag, values in itertools.chain(OUT_OF_RANGE.items(), OWN[script].items()):
        for value in values:
            refused(capsys, script, f"{flag} '{value}'", flag)
    for unknown in ("--nope", "--nope 3", "--batch_size 4", "--step 3"):  # no abbreviations: --step is not --steps
        refused(capsys, script, unknown, unknown.split()[0])
    refused(capsys, script, "stray", "stray")
    refused(capsys, script, "--prompts 2 --minibatches 3", "--minibatches", "--prompts")
    assert not Path("run").exists()


@pytest.mark.parametrize("script", SCRIPTS)
def test_the_ends_of_the_ranges_are_accepted(script):
    args = parsed(script, "--max_grad_norm inf --warmup_steps 0 --beta 0 --eval_samples 0 --seed 0 --eps_low 0.99 --eps_high 5 --lr 1e-9")
    assert (args.max_grad_norm, args.warmup_steps, args.beta, args.lr) == (float("inf"), 0, 0, 1e-9)
    if script == "ppo":
        assert parsed(script, "--gamma 0 --lam 0 --vf_coef 0 --group_size 1").gamma == 0


BAD_DATA = {  # name: (flags, the file's text or None, words)
    "missing file": ("--dataset gone.jsonl", None, ["gone.jsonl"]),
    "missing evaluation file": ("--eval_split gone.jsonl", None, ["gone.jsonl"]),
    "missing directory": ("--dataset ./gone", None, ["--dataset", "gone"]),
    "missing absolute directory": ("--dataset /no/such/gone", None, ["--dataset", "gone"]),
    "not on the hub": ("--dataset nobody/gone", None, ["--dataset", "gone"]),
    "a directory without data": ("--dataset model", None, ["--dataset", "model"]),
    "empty file": ("--dataset bad.jsonl", "", ["bad.jsonl"]),
    "blank lines": ("--dataset bad.jsonl", "\n\n", ["bad.jsonl"]),
    "not JSON": ("--dataset bad.jsonl", "question,answer\n1+1,2\n", ["bad.jsonl", "JSON"]),
    "not JSON objects": ("--dataset bad.jsonl", "[1, 2]\n3\n" * 20, ["bad.jsonl"]),
    "not text": ("--dataset bad.jsonl", b"\xff\xfe\x00\x80", ["bad.jsonl"]),
    "no row held out": ("--dataset bad.jsonl", '{"question": "1+1", "answer": "2"}\n', ["bad.jsonl", "--eval_split"]),
    "question column": ("--question_column problem", None, ["'problem'", "--question_column", "question, answer"]),
    "answer column": ("--answer_column solution", None, ["'solution'", "--answer_column", "question, answer"]),
    "nothing readable": ("--dataset bad.jsonl --eval_split data.jsonl", '{"question": "1+1", "answer": ""}\n' * 3, ["bad.jsonl", "3"]),
    "all too long": ("--max_prompt_tokens 3", None, ["data.jsonl", "--max_prompt_tokens"])}


@pytest.mark.parametrize("case", BAD_DATA)
def test_bad_data_is_named_and_leaves_no_run_behind(case, capsys):
    """The corrected command must not hear that --out already holds a run."""
    flags, text, words = BAD_DATA[case]
    if text is not None:
        Path("bad.jsonl").write_bytes(text if isinstance(text, bytes) else text.encode())
    refused(capsys, "grpo", flags, *words)
    parsed("grpo", "")  # "already holds a run" would be a SystemExit here


def test_a_missing_split_is_named_with_those_there(capsys):
    for directory, names in {"set": ["train.jsonl", "test.jsonl"], "lone": ["train.jsonl"]}.items():
        Path(directory).mkdir()
        for name in names:
            write_jsonl(Path(directory, name), sums(20))
    refused(capsys, "grpo", "--dataset set --split dev", "dev", "train", "test", "--split")
    refused(capsys, "grpo", "--dataset lone --split dev", "dev", "train", "--split")
    train_set, held_out, *_ = problems_of("--dataset lone")
    assert train_set and held_out and not set(questions(train_set)) & set(questions(held_out)), "one split: a fifth held out"


def broken_models():
    """name: (what to do to a copy of the model directory, words)"""
    def settings(file, **changes):
        def change(path):
            text = json.loads((path / file).read_text()) | changes
            (path / file).write_text(json.dumps(text))
        return change

    def no_eos(path):
        settings("config.json", eos_token_id=None)(path)
        settings("generation_config.json", eos_token_id=None)(path)
        settings("tokenizer_config.json", eos_token=None)(path)

    def no_tokenizer(path):
        for file in path.glob("*token*"):
            file.unlink()
    return {"no config": (lambda path: (path / "config.json").unlink(), []),
            "no weights": (lambda path: (path / "model.safetensors").unlink(), []),
            "weights cut off": (lambda path: (path / "model.safetensors").write_bytes(b"abc"), []),
            "unknown architecture": (settings("config.json", model_type="nonesuch"), []),
            "an encoder": (settings("config.json", model_type="vit"), []),
            "no tokenizer": (no_tokenizer, ["tokenizer"]),
            "broken tokenizer": (lambda path: (path / "tokenizer.json").write_text("{"), ["tokenizer"]),
            "another vocabulary": (lambda path: save_model(path / "small", vocab_size=80) or [
                shutil.copy(path / "small" / f, path) for f in ("config.json", "model.safetensors")], ["tokenizer", "102", "80"]),
            "no end of sequence": (no_eos, ["end-of-sequence"])}


@pytest.mark.parametrize("case", broken_models())
def test_a_model_directory_that_is_none_is_refused(case, capsys):
    change, words = broken_models()[case]
    shutil.copytree("model", "broken")
    change(Path("broken"))
    refused(capsys, "ppo", "--model broken", "--model", "broken", *words)
    parsed("ppo", "")


@pytest.mark.parametrize("flag", ["--model", "--dataset", "--reward_model"])
@pytest.mark.parametrize("name", ["gone", "./gone", "nobody/gone", "/no/such/gone"])
def test_a_name_that_is_no_directory_is_refused_at_once_without_network(flag, name, capsys, monkeypatch):
    """Offline the hub's client would retry for 23 seconds and print a line each time."""
    slept = []
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(time, "sleep", slept.append)

    def no_network(*_, **__):
        raise socket.gaierror(-2, "Name or service not known")
    monkeypatch.setattr(socket, "getaddrinfo", no_network)
    refused(capsys, "grpo", f"{flag} {name}", flag, name)
    assert sum(slept) < 3


def test_a_bad_reward_model_is_refused(capsys):
    save_judge("two", labels=2)
    refused(capsys, "grpo", "--reward_model two", "--reward_model", "two", "label")
    save_judge("mute")
    for file in Path("mute").glob("*token*"):
        file.unlink()
    refused(capsys, "grpo", "--reward_model mute", "--reward_model", "mute")
    parsed("grpo", "")


def test_an_out_that_cannot_be_written_or_is_taken_is_refused(capsys):
    Path("file").write_text("mine")
    refused(capsys, "grpo", "--out file", "--out", "file")
    refused(capsys, "grpo", "--out file/below", "--out", "file/below")
    assert Path("file").read_text() == "mine"
    train("grpo")
    before = files("run")
    for script in SCRIPTS:
        refused(capsys, script, "", "--out", "run", "--resume")
    assert files("run") == before


def test_resume_where_nothing_is_is_refused(capsys):
    Path("bare").mkdir()
    Path("odd").mkdir()
    Path("odd/args.json").write_text("[]")
    refused(capsys, "grpo", "--resume", "--resume", "--out")
    for out in ("gone", "bare", "odd", "data.jsonl"):
        refused(capsys, "grpo", f"--resume --out {out}", "--resume", out)
    assert not Path("gone").exists() and not files("bare")


BAD_RESUMES = ["--dataset gone.jsonl", "--dataset ./gone", "--reward_model ./gone", "--question_column nope", "--eval_split gone.jsonl",
               "--lr 0", "--steps x", "--nope"]


def test_a_refused_resume_harms_nothing(capsys):
    """The wrong flags are not kept either: a plain --resume goes on afterwards."""
    train("grpo")
    before = files("run")
    for flags in BAD_RESUMES:
        refused(capsys, "grpo", f"--resume --out run {flags}")
        assert files("run") == before, flags
    assert [row["step"] for row in train("grpo", "--resume --out run --steps 2")] == [0, 1, 2]


@pytest.mark.parametrize("script, other", itertools.permutations(SCRIPTS, 2))
def test_a_run_of_another_script_is_not_resumed(script, other, capsys):
    train(script)
    before = files("run")
    refused(capsys, other, "--resume --out run --steps 2", "run", script)
    assert files("run") == before


def test_tensorboard_without_the_package_is_refused_before_anything_is_made(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    refused(capsys, "grpo", "--tensorboard", "--tensorboard", "pip install tensorboard")
    assert not Path("run/args.json").exists()


def test_more_tokens_than_the_model_has_positions_are_refused_before_training(capsys):
    """GPT-2's learned positions end at 128 here: going beyond is an index error, on a GPU a dead context."""
    save_model("gpt", "gpt2")
    for tokens, word in (("126", "--max_prompt_tokens"), ("128", "--max_new_tokens"), ("1000", "--max_new_tokens")):
        refused(capsys, "grpo", f"--model gpt --max_new_tokens {tokens}", word)
    train("grpo", "--model gpt --max_new_tokens 100")  # the longest prompt has 21 tokens


# ---------------------------------------------------------------------------------------------------------------------
# Models

@pytest.mark.parametrize("look", LOOKS)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_trains_and_the_checkpoint_holds_what_was_trained(family, look, spread, monkeypatch):
    """Three scripts, one step each: weights move, and from_pretrained gives the trained ones back, with the tokenizer."""
    save_model("tiny", family, **LOOKS[look])
    before = transformers.AutoModelForCausalLM.from_pretrained("tiny").state_dict()
    for script, module in SCRIPTS.items():
        calls = spy(monkeypatch, module, "update")
        row = train(script, "--model tiny --system_prompt 'Be brief.'", out=script)[-1]
        trained, saved = calls[0].policy.state_dict(), transformers.AutoModelForCausalLM.from_pretrained(newest(script))
        assert same(dict(trained), dict(saved.state_dict())), "the checkpoint does not hold the trained weights"
        moved = sum(not torch.equal(trained[name], before[name]) for name in before)
        assert moved > len(before) / 2 and row["grad_norm"] > 0 and row["step"] == 1
        assert all(torch.isfinite(value).all() for value in trained.values())
        assert (saved.get_input_embeddings().weight is saved.get_output_embeddings().weight) == LOOKS[look]["tied"]
        first, last = (transformers.AutoTokenizer.from_pretrained(path) for path in ("tiny", newest(script)))
        assert first.get_vocab() == last.get_vocab() and first.chat_template == last.chat_template
        assert (first.eos_token, first.pad_token) == (last.eos_token, last.pad_token)
        text = "Hi there"
        assert first(text)["input_ids"] == last(text)["input_ids"]


def problems_of(flags="", script="grpo"):
    """The training and held-out problems of a command, its tokenizer, and its flags with all defaults settled."""
    shutil.rmtree("run", ignore_errors=True)
    args = parsed(script, flags)
    _, tokenizer = common.load_policy(args)
    return *common.load_problems(args, tokenizer), tokenizer, args


@pytest.mark.parametrize("system", ["", "Be brief."])
@pytest.mark.parametrize("look", LOOKS)
def test_prompts_are_the_templates_own_tokenisation(look, system):
    """System prompt placed by the template, generation prompt there, BOS once; plain text where there is no template."""
    save_model("tiny", "llama", **LOOKS[look])
    train_set, _, tokenizer, _ = problems_of(f"--model tiny --system_prompt '{system}'")
    problem = train_set[0]
    chat = [{"role": "system", "content": system}] * bool(system) + [{"role": "user", "content": problem["question"]}]
    bos = tokenizer.bos_token_id
    if tokenizer.chat_template:
        own = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)["input_ids"]
        assert problem["prompt"] == own
        assert tokenizer.decode(problem["prompt"]).endswith("assistant\n" if look == "chatml" else "[assistant]")
    else:
        text = f"{system}\n{problem['question']}\n" if system else f"{problem['question']}\n"
        assert problem["prompt"] == [bos] * (look == "plain") + [tokenizer.convert_tokens_to_ids(c) for c in text]
    assert problem["prompt"].count(bos) == (look in ("bos", "plain"))
    assert tokenizer.decode(problem["prompt"]).count("Be brief.") == bool(system)


@pytest.mark.parametrize("family", FAMILIES)
def test_prompts_that_hold_eos_and_padding_are_read_whole(family, spread, monkeypatch):
    """Here end-of-turn is eos and pad, and every prompt holds it: lengths and log-probs are those of each row alone."""
    save_model("tiny", family, chat=CHATML, eos="<|im_end|>", pad="<|im_end|>")
    model = transformers.AutoModelForCausalLM.from_pretrained("tiny").eval()
    for script, module in SCRIPTS.items():
        with monkeypatch.context() as patch:
            calls = spy(patch, module, "collect")
            train(script, "--model tiny --system_prompt Hi --temperature 0.7 --prompts 3 --max_new_tokens 9", out=script)
        rollout, prompts = calls[0].result[0], [p["prompt"] for p in calls[0].problems for _ in range(2)]
        assert all(model.config.eos_token_id in prompt for prompt in prompts) and len(set(map(len, prompts))) > 1
        for i, prompt in enumerate(prompts):
            n, end = int(rollout["mask"][i].sum()), int(rollout["attention"][i].sum())
            assert end == len(prompt) + n and rollout["ids"][i, :len(prompt)].tolist() == prompt
            with torch.no_grad():
                alone = (model(rollout["ids"][i:i + 1, :end]).logits[0, :-1] / 0.7).log_softmax(-1)
            expected = alone.gather(1, rollout["ids"][i, 1:end, None])[-n:, 0]
            torch.testing.assert_close(rollout["old_logp"][i, :n], expected, rtol=1e-4, atol=1e-4)
            assert rollout["finished"][i] == (rollout["ids"][i, end - 1] == model.config.eos_token_id)


def test_a_template_that_refuses_a_system_role_still_gets_the_instruction(capsys):
    """Gemma's does; real models have an instruction by default. Either the user turn holds it, or one line says so."""
    template = ("{% for m in messages %}{% if m['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
                "<{{ m['content'] }}>{% endfor %}")
    save_model("gemma", chat=template)
    try:
        train_set, _, tokenizer, _ = problems_of("--model gemma --system_prompt 'Be brief.'")
    except SystemExit as left:
        assert left.code == 2 and "--system_prompt" in capsys.readouterr().err
    else:
        assert "Be brief." in tokenizer.decode(train_set[0]["prompt"])


def test_prompts_with_characters_unknown_to_the_tokenizer_are_counted_but_special_tokens_are_not_unknown(capsys):
    write_jsonl("odd.jsonl", sums(20) + [{"question": "2 × 2 = ?", "answer": "4"}] * 3)
    train_set, *_ = problems_of("--dataset odd.jsonl --eval_split data.jsonl")
    assert len(train_set) == 20 and re.search(r"\b3 .*unknown", capsys.readouterr().out)
    save_model("gpt", chat=WITH_BOS, bos=True)
    char_tokenizer(WITH_BOS, bos=True, eos="<bos>", unk="<bos>").save_pretrained("gpt")  # GPT-2, OPT: bos, eos and unk are one
    assert len(problems_of("--model gpt")[0]) > 40


def test_a_real_model_never_gets_the_toys_defaults():
    """Learning rate and lengths go by the model's size; given flags win."""
    save_model("large", hidden_size=192, intermediate_size=512, num_hidden_layers=3, max_position_embeddings=2048)
    keys = ("lr", "steps", "max_new_tokens", "system_prompt")
    for name, script in itertools.product(("model", "large"), ("grpo", "ppo")):
        out = f"{name}-{script}"
        args = SCRIPTS[script].parse_args(f"--model {name} --dataset data.jsonl --out {out}".split())
        policy, _ = common.load_policy(args)
        real = sum(p.numel() for p in policy.parameters()) >= 1_000_000
        assert real == (name == "large")
        assert all(isinstance(getattr(args, key), (int, float, str)) for key in keys)
        assert (args.lr < 1e-5) == real and (args.max_new_tokens > 256) == real and bool(args.system_prompt) == real
        assert script == "grpo" or (args.value_lr < 1e-4) == real
    args = parsed("grpo", "--model large --lr 0.003")
    common.load_policy(args)
    assert args.lr == 0.003


# ---------------------------------------------------------------------------------------------------------------------
# Data

def questions(problems):
    return [p["question"] for p in problems]


def test_a_lone_jsonl_holds_out_rows_by_hash_disjoint_and_stable():
    """The split depends on the question alone: not on the order of the rows, the other rows or the seed."""
    rows = sums(200)
    write_jsonl("a.jsonl", rows + rows[:50])  # doubles must fall on the same side
    write_jsonl("b.jsonl", rows[::-2])
    train_a, held_a, *_ = problems_of("--dataset a.jsonl --eval_problems 1000")
    train_b, held_b, *_ = problems_of("--dataset b.jsonl --eval_problems 1000 --seed 7")
    a, b = (set(questions(train_a)), set(questions(held_a))), (set(questions(train_b)), set(questions(held_b)))
    assert not a[0] & a[1] and len(a[0] | a[1]) == 200 and len(train_a) + len(held_a) == 250
    assert 10 <= len(a[1]) <= 70
    half = {row["question"] for row in rows[::-2]}
    assert b == (a[0] & half, a[1] & half)


def test_the_problems_evaluated_are_the_same_in_every_run():
    few = [questions(problems_of(f"--eval_problems 4 --seed {seed}")[1]) for seed in (0, 1)]
    assert few[0] == few[1] and len(set(few[0])) == 4


def as_directory(path, train_rows, test_rows, kind):
    """A data set directory of one of the kinds that people have."""
    if kind == "saved":
        import datasets
        datasets.DatasetDict(train=datasets.Dataset.from_list(train_rows), test=datasets.Dataset.from_list(test_rows)).save_to_disk(path)
        return
    Path(path).mkdir()
    for split, rows in (("train", train_rows), ("test", test_rows)):
        if kind == "jsonl":
            write_jsonl(Path(path, f"{split}.jsonl"), rows)
        elif kind == "csv":
            with open(Path(path, f"{split}.csv"), "w", newline="") as file:
                writer = csv.DictWriter(file, rows[0].keys())
                writer.writeheader()
                writer.writerows(rows)
        elif kind == "parquet":
            import datasets
            datasets.Dataset.from_list(rows).to_parquet(Path(path, f"{split}.parquet"))


@pytest.mark.parametrize("kind, name", [("jsonl", "set"), ("saved", "set"), ("csv", "csv"), ("parquet", "set")])
def test_a_data_set_directory_gives_its_splits(kind, name, tmp_path, monkeypatch, capfd):
    """Also one called csv, which the datasets library takes for its own reader of that name."""
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    datasets.disable_progress_bars()
    rows, other = sums(12), sums(6, start=100)
    as_directory(name, rows, other, kind)
    train_set, held_out, *_ = problems_of(f"--dataset {name} --eval_problems 100")
    assert questions(train_set) == [row["question"] for row in rows]
    assert sorted(questions(held_out)) == sorted(row["question"] for row in other)
    swapped = problems_of(f"--dataset {name} --split test --eval_split train --eval_problems 100")
    assert len(swapped[0]) == 6 and len(swapped[1]) == 12


def test_a_jsonl_to_evaluate_on_and_columns_of_other_names():
    write_jsonl("mine.jsonl", [{"problem": row["question"], "solution": row["answer"], "question": "?", "answer": "0"} for row in sums(20)])
    write_jsonl("exam.jsonl", [{"problem": "1 + 1", "solution": "2", "extra": None}])
    train_set, held_out, _, args = problems_of(
        "--dataset mine.jsonl --eval_split exam.jsonl --question_column problem --answer_column solution")
    assert questions(train_set) == [row["question"] for row in sums(20)] and questions(held_out) == ["1 + 1"]
    assert common.load_reward(args)(held_out, ["so #### 2"]).tolist() == [1.0]


@pytest.mark.parametrize("gold", ["#### 42", "\\boxed{42}", "42", "6 * 7 = 41 + 1\n#### 42", 42])
def test_a_gold_answer_is_read_as_completions_are(gold):
    write_jsonl("gold.jsonl", [{"question": "6 * 7?", "answer": gold}])
    train_set, *_, args = problems_of("--dataset gold.jsonl --eval_split data.jsonl")
    scores = common.load_reward(args)(train_set * 4, ["#### 42", "\\boxed{42}", "#### 41", "#### 4"])
    assert scores.tolist() == [1, 1, 0, 0] and scores.dtype == torch.float32


def test_unreadable_golds_and_long_prompts_are_counted_and_left_out(capsys):
    rows = sums(10) + [{"question": "?", "answer": ""}, {"question": "??", "answer": "####"}, {"question": "???"}, {"answer": "1"}]
    rows += [{"question": "x" * 80, "answer": "1"}] * 3
    write_jsonl("mixed.jsonl", rows)
    train_set, *_ = problems_of("--dataset mixed.jsonl --eval_split data.jsonl --max_prompt_tokens 60")
    said = capsys.readouterr().out
    assert questions(train_set) == [row["question"] for row in sums(10)]
    assert re.search(r"\b3\b[^,]*answer", said) and re.search(r"\b3\b[^,]*--max_prompt_tokens", said) and "17" in said
    kept, *_ = problems_of("--dataset mixed.jsonl --eval_split data.jsonl --max_prompt_tokens 60 --reward_model judge")
    assert len(kept) == 13, "a reward model needs no gold answer"


def test_every_problem_is_asked_once_before_any_is_asked_again(spread, monkeypatch):
    """Batches are drawn from shuffles of the whole set, by seed."""
    write_jsonl("few.jsonl", sums(6))
    order = {}
    for seed in (0, 1):
        with monkeypatch.context() as patch:
            calls = spy(patch, grpo, "collect")
            train("grpo", f"--dataset few.jsonl --eval_split data.jsonl --prompts 2 --steps 6 --seed {seed}", out=f"run{seed}")
        order[seed] = [q for call in calls for q in questions(call.problems)]
        assert sorted(order[seed][:6]) == sorted(order[seed][6:]) == sorted(row["question"] for row in sums(6))
        assert order[seed][:6] != order[seed][6:]
    assert order[0] != order[1]


def test_the_built_in_arithmetic_holds_out_enough_problems_and_never_trains_on_them():
    train_set, held_out, *_ = problems_of("--dataset arithmetic --eval_problems 1000000")
    asked, exam = set(questions(train_set)), set(questions(held_out))
    assert not asked & exam and len(exam) >= 2500, "a standard error under .01 needs 2,500 problems"
    assert len(held_out) == len(exam)


def test_the_shared_gsm8k_can_be_read(capsys):
    path = ROOT.parent / "shared" / "gsm8k"
    if not path.exists():
        pytest.skip("not here")
    save_model("wide", max_position_embeddings=4096)
    train_set, held_out, *_ = problems_of(
        f"--model wide --dataset {path} --split test --eval_split test --max_prompt_tokens 2000 --eval_problems 64")
    assert 1000 < len(train_set) <= 1319 and 32 < len(held_out) <= 64 and "unreadable" not in capsys.readouterr().out
    gold = next(p for p in train_set if p["question"].startswith("A robe takes"))["answer"]
    assert common.math_reward("#### 3", gold) == 1.0 and common.math_reward("#### 2", gold) == 0.0


# ---------------------------------------------------------------------------------------------------------------------
# Every flag runs and does what it says

@pytest.mark.parametrize("script", SCRIPTS)
def test_beta_0_holds_no_reference_model(script, spread, monkeypatch):
    """Counted at the source: how many causal models are loaded, and what collect gets."""
    loaded, real = [], transformers.AutoModelForCausalLM.from_pretrained
    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", lambda *a, **k: loaded.append(1) or real(*a, **k))
    calls = spy(monkeypatch, SCRIPTS[script], "collect")
    assert train(script, "--beta 0", out="none")[-1]["kl"] is None
    assert len(loaded) == 1 and calls[-1].reference is None and "ref_logp" not in calls[-1].result[0]
    row = train(script, "--beta 0.1 --steps 2", out="one")[-1]
    assert len(loaded) == 3 and row["kl"] is not None and row["kl"] != 0
    policy, reference = calls[-1].policy, calls[-1].reference
    assert not {p.data_ptr() for p in policy.parameters()} & {p.data_ptr() for p in reference.parameters()}, "shared storage"
    start = transformers.AutoModelForCausalLM.from_pretrained("model").state_dict()
    assert same(dict(reference.state_dict()), dict(start)) and not any(p.requires_grad for p in reference.parameters())


@pytest.mark.parametrize("script", ["grpo", "gspo"])
def test_ref_every_refreshes_the_reference_at_steps_1_M_plus_1(script, spread, monkeypatch):
    """And there the KL of the rollout is 0, elsewhere it is not; without the flag the reference stays."""
    real, fresh = SCRIPTS[script].collect, []

    def collect(policy, reference, *rest):
        fresh.append(same(dict(policy.state_dict()), dict(reference.state_dict())))
        rollout, stats = real(policy, reference, *rest)
        assert fresh[-1] == torch.equal(rollout["ref_logp"], rollout["old_logp"])
        return rollout, stats
    monkeypatch.setattr(SCRIPTS[script], "collect", collect)
    table = {"--ref_every 2": [1, 0, 1, 0, 1], "--ref_every 1": [1] * 5, "--ref_every 3": [1, 0, 0, 1, 0], "": [1, 0, 0, 0, 0]}
    for every, expected in table.items():
        fresh.clear()
        rows = train(script, f"--beta 0.1 --steps 5 --kl k3 {every}", out=f"run{every[-1:]}")
        assert fresh == [bool(x) for x in expected], every
        assert [abs(row["kl"]) < 1e-6 for row in rows[1:]] == fresh, every


@pytest.mark.parametrize("script", ["grpo", "gspo"])
def test_both_kl_estimators_run_and_differ(script, spread):
    last = [train(script, f"--beta 0.5 --steps 2 --minibatches 2 --kl {kl}", out=kl)[-1]["kl"] for kl in ("k3", "wk3")]
    assert all(value > 0 for value in last) and last[0] != last[1]


def test_token_level_gives_advantages_by_token(spread, monkeypatch):
    calls = spy(monkeypatch, gspo, "collect")
    train("gspo", "--token_level", out="tokens")
    train("gspo", "", out="rows")
    assert [call.result[0]["adv"].dim() for call in calls] == [2, 1]
    assert calls[0].result[0]["adv"].shape == calls[0].result[0]["mask"].shape


def test_whiten_gives_mean_0_and_deviation_1_and_no_whiten_does_not(spread, monkeypatch):
    calls = spy(monkeypatch, ppo, "collect")
    for flag in ("--whiten", "--no-whiten"):
        train("ppo", f"{flag} --prompts 8", out=flag.strip("-"))
    for call, whitened in zip(calls, (True, False)):
        rollout = call.result[0]
        values = rollout["adv"][rollout["mask"] > 0]
        assert (abs(values.mean()) < 1e-5 and abs(values.std(correction=0) - 1) < 1e-3) == whitened


@pytest.mark.parametrize("flags", ["--gamma 0.9", "--lam 0.5", "--vf_coef 1 --max_grad_norm inf", "--eps_value 1e-4 --epochs 2",
                                   "--value_lr 0.1"])
def test_every_ppo_flag_changes_what_is_learned(flags, spread):
    def learned(out):
        policy, value = (load_file(newest(out) / name) for name in ("model.safetensors", "value/model.safetensors"))
        return [policy, value]
    base = "--steps 3 --prompts 4 --no-whiten --vf_coef 0.1 --epochs " + ("2" if "epochs" in flags else "1")
    train("ppo", base, out="base")
    train("ppo", f"{base} {flags}", out="other")
    assert not same(learned("base"), learned("other"))


SHARED = ["--temperature 0.5", "--eps_low 0.001", "--eps_high 0.001", "--seed 3", "--lr 0.02", "--max_grad_norm 1e-3", "--warmup_steps 50",
          "--epochs 3", "--minibatches 4", "--beta 0.3", "--group_size 3", "--prompts 5", "--max_new_tokens 6"]


@pytest.mark.parametrize("script", SCRIPTS)
def test_every_shared_flag_changes_what_is_learned(script, spread):
    base = "--steps 2 --prompts 4 --minibatches 2 --epochs 2 --beta 0 --lr 0.003 --eps_low 0.5 --eps_high 0.5 --eval_problems 1"
    train(script, base, out="base")
    learned = load_file(newest("base") / "model.safetensors")
    for i, flags in enumerate(SHARED):
        train(script, f"{base} {flags}", out=f"other{i}")
        assert not same(learned, load_file(newest(f"other{i}") / "model.safetensors")), flags


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
@pytest.mark.parametrize("script", SCRIPTS)
def test_memory_flags_change_neither_weights_nor_metrics(script, spread, monkeypatch):
    """--gradient_checkpointing, --micro_batch_tokens, --offload_optimizer, --compile and --no-cuda_graphs are about memory and
    speed: the result is that of the plain run. (The compiler is stood in for here; the real one runs in test_sampling.py.)"""
    calls, compiled, compiler = spy(monkeypatch, SCRIPTS[script], "update"), [], torch.compile
    monkeypatch.setattr(torch, "compile", lambda f, **settings: compiled.append(f) or compiler(f, **settings, backend="eager"))
    runs = {"whole": "--no-gradient_checkpointing --micro_batch_tokens 100000", "cut": "--micro_batch_tokens 1",
            "again": "--gradient_checkpointing", "away": "--offload_optimizer --no-cuda_graphs", "fast": "--compile --cuda_graphs"}
    base = "--steps 2 --prompts 4 --max_new_tokens 6 --beta 0.1 --minibatches 2 --lr 0.001"
    rows = {name: train(script, f"{base} {flags}", out=name)[-1] for name, flags in runs.items()}
    assert [call.policy.is_gradient_checkpointing for call in calls[::2]] == [False, False, True, False, False]
    assert common.decode in compiled and len(compiled) > 2
    weights = {name: load_file(newest(name) / "model.safetensors") for name in runs}
    for name in ("cut", "again", "away", "fast"):
        for key, value in weights["whole"].items():
            torch.testing.assert_close(weights[name][key], value, rtol=1e-3, atol=3e-5)
        for key in "reward completion_length truncated entropy kl clip_frac ratio_max grad_norm zero_variance_groups".split():
            assert rows[name][key] == pytest.approx(rows["whole"][key], rel=2e-3, abs=1e-5), key
    assert rows["cut"]["padding"] == 0


@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize("dtype, expected", [("bfloat16", torch.bfloat16), ("float32", torch.float32), ("auto", torch.float32)])
def test_dtype_is_that_of_the_weights_while_masters_stay_float32(script, dtype, expected, spread, monkeypatch):
    calls = spy(monkeypatch, SCRIPTS[script], "update")
    device = "auto" if dtype == "auto" and not torch.cuda.is_available() else "cpu"
    row = train(script, f"--dtype {dtype} --device {device} --steps 2 --beta 0.1")[-1]
    assert {p.dtype for p in calls[-1].policy.parameters()} == {expected}
    assert {t.dtype for t in load_file(newest() / "model.safetensors").values()} == {expected}
    state = torch.load(newest() / "optimizer.pt")
    assert {m.dtype for m in state["policy"]["masters"]} == {torch.float32}
    assert {v.dtype for s in state["policy"]["adamw"]["state"].values() for k, v in s.items() if k != "step"} == {torch.float32}
    assert row["grad_norm"] > 0 and row["reward"] > 0


@pytest.mark.parametrize("script", SCRIPTS)
def test_epochs_and_minibatches_are_optimiser_steps_and_warmup_steps_count_them(script, spread):
    """2 passes x 3 minibatches x 2 steps = 12 of 48 warm-up steps: a quarter of the learning rate. Without warm-up all of it."""
    train(script, "--prompts 5 --epochs 2 --minibatches 3 --steps 2 --warmup_steps 48 --lr 0.001", out="warm")
    train(script, "--warmup_steps 0 --lr 0.001 --epochs 1", out="hot")
    for out, lr, taken in (("warm", 0.00025, 12), ("hot", 0.001, 1)):
        state = torch.load(newest(out) / "optimizer.pt")["policy"]["adamw"]
        assert state["param_groups"][0]["lr"] == pytest.approx(lr)
        assert {int(s["step"]) for s in state["state"].values()} == {taken}


@pytest.mark.parametrize("samples, keys", [(0, set()), (1, set()), (4, {"eval_pass@2", "eval_pass@4"})])
def test_eval_samples_reports_sampled_accuracy_and_pass_at_k(samples, keys, monkeypatch):
    parity = lambda problems, texts: torch.tensor([float(zlib.crc32(text.encode()) % 2) for text in texts])  # noqa: E731
    monkeypatch.setattr(common, "load_reward", lambda args: parity)
    row = train("grpo", f"--eval_samples {samples} --eval_problems 8")[-1]
    assert keys <= row.keys() and not {k for k in row if "pass@" in k} - keys - {"eval_pass@1"}
    assert (row["eval_sampled_accuracy"] is None) == (samples == 0) and row["eval_accuracy"] is not None
    if keys:
        assert 0 < row["eval_sampled_accuracy"] < row["eval_pass@2"] < row["eval_pass@4"] <= 1


@pytest.mark.parametrize("script", SCRIPTS)
def test_eval_every_save_every_and_eval_problems(script, spread, monkeypatch):
    """Evaluated before, every 2 steps and after; checkpoints of step 3 (which 5 replaces) and the last."""
    calls, saved = spy(monkeypatch, common, "evaluate"), spy(monkeypatch, common, "save_checkpoint")
    rows = train(script, "--steps 5 --eval_every 2 --save_every 3 --eval_problems 3")
    assert [row["step"] for row in rows if row["eval_accuracy"] is not None] == [0, 2, 4, 5]
    assert {len(call.problems) for call in calls} == {3} and [call.step for call in saved] == [3, 5]
    assert newest().name == "step-5"


@pytest.mark.parametrize("chat", [None, WITH_BOS], ids=["plain", "chat"])
@pytest.mark.parametrize("pad, config_pad", [("<pad>", 0), ("<pad>", None), ("<eos>", 1), ("<eos>", None), (None, None), ("<pad>", 7)])
def test_a_reward_models_scores_are_those_of_one_row_at_a_time(pad, config_pad, chat):
    """Rows of different lengths in one batch: whatever pads them must not be read, nor eos where it is padding too."""
    save_judge("critic", chat=chat, pad=pad, config_pad=config_pad)
    args = parsed("grpo", "--reward_model critic")
    problems = [{"question": "1 + 1?" * (i % 3 + 1), "answer": "2"} for i in range(21)]
    texts = ["#### 2" + " or so" * (i % 5) for i in range(20)] + [""]
    scores = common.load_reward(args)(problems, texts)
    judge = transformers.AutoModelForSequenceClassification.from_pretrained("critic").eval()
    judge.config.pad_token_id = None  # alone in its batch a row's last token is the last
    tokenizer = transformers.AutoTokenizer.from_pretrained("critic")
    for problem, text, score in zip(problems, texts, scores):
        turns = [{"role": "user", "content": problem["question"]}, {"role": "assistant", "content": text}]
        read = tokenizer.apply_chat_template(turns, return_dict=True) if chat else tokenizer(f"{problem['question']}\n{text}")
        with torch.no_grad():
            assert score.item() == pytest.approx(judge(torch.tensor([read["input_ids"]])).logits.item(), abs=1e-5)
    assert scores.shape == (21,) and scores.dtype == torch.float32 and scores.std() > 0.01


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_reward_model_trains_without_gold_answers(script):
    write_jsonl("open.jsonl", [{"question": row["question"]} for row in sums(60)])
    row = train(script, "--reward_model judge --dataset open.jsonl")[-1]
    assert row["reward"] not in (0.0, 1.0) and row["grad_norm"] > 0


def test_tensorboard_writes_the_same_numbers(spread):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    rows = train("grpo", "--tensorboard --steps 2")
    events = EventAccumulator("run").Reload()
    assert [e.step for e in events.Scalars("reward")] == [1, 2]
    assert [e.value for e in events.Scalars("reward")] == pytest.approx([row["reward"] for row in rows[1:]])


def test_out_defaults_to_runs_and_the_scripts_name_and_counts_on(monkeypatch, spread):
    monkeypatch.setattr(sys, "argv", ["/somewhere/gspo.py"])
    for expected in ("runs/gspo", "runs/gspo-2", "runs/gspo-3"):
        args = gspo.parse_args(shlex.split(f"--model model --dataset data.jsonl {SMALL}"))
        gspo.main(args)
        assert args.out == expected and steps_of(expected) == [0, 1]


# ---------------------------------------------------------------------------------------------------------------------
# Resuming

STEADY = "--prompts 3 --minibatches 2 --warmup_steps 9 --lr 0.003 --eval_every 1 --save_every 100"
RESUMES = [("ppo", 2, 4, "--beta 0.1 --epochs 2"), ("grpo", 2, 4, "--beta 0.1"), ("gspo", 2, 4, "--beta 0"),
           ("grpo", 3, 5, "--beta 0.1 --ref_every 2"), ("gspo", 1, 3, "--beta 0.1 --ref_every 2 --token_level"),
           ("grpo", 2, 4, "--dtype bfloat16 --beta 0.1 --ref_every 3"), ("ppo", 2, 4, "--dtype bfloat16 --beta 0.1"),
           ("gspo", 2, 4, "--dtype bfloat16"),
           ("grpo", 1, 4, "--gradient_checkpointing --epochs 2 --seed 5")]


def disturb():
    """What another process would not share: the state of the random number generators."""
    torch.manual_seed(int(time.time()))


@pytest.mark.parametrize("script, cut, total, flags", RESUMES, ids=lambda value: str(value).replace("--", "").replace(" ", "_"))
def test_a_resumed_run_is_bit_equal_to_one_that_was_never_stopped(script, cut, total, flags, spread):
    """Weights, masters, moments, schedule, reference, value model, metrics; --steps given anew, all else remembered."""
    train(script, f"{STEADY} {flags} --steps {total}", out="whole")
    train(script, f"{STEADY} {flags} --steps {cut}", out="part")
    assert newest("part").name == f"step-{cut}"
    disturb()
    rows = train(script, f"--resume --out part --steps {total}", out="part")
    assert [row["step"] for row in rows] == list(range(total + 1))
    same_runs("whole", "part")


@pytest.mark.parametrize("script", SCRIPTS)
def test_what_a_kill_leaves_behind_does_no_harm(script, spread):
    """A half-made step-3.tmp, an older checkpoint not yet removed, a step logged but not saved, half a last line."""
    train(script, f"{STEADY} --steps 4", out="whole")
    train(script, f"{STEADY} --steps 1", out="part")
    shutil.copytree("part/step-1", "older")
    train(script, "--resume --out part --steps 2", out="part")
    shutil.move("older", "part/step-1")
    Path("part/step-3.tmp").mkdir()
    Path("part/step-3.tmp/model.safetensors").write_text("half")
    with open("part/metrics.jsonl", "a") as file:
        file.write(json.dumps(metrics("part")[-1] | {"step": 3, "reward": 99}) + "\n" + '{"step": 4, "rew')
    train(script, "--resume --out part --steps 4", out="part")
    same_runs("whole", "part")


@pytest.mark.parametrize("file", ["model.safetensors", "optimizer.pt"])
def test_a_full_disk_is_one_line_and_loses_nothing(file, spread, capsys):
    """Stood in for by a limit on the size of a file: the weights, then the optimiser, cannot be written."""
    resource = pytest.importorskip("resource")
    train("grpo", f"{STEADY} --steps 3", out="whole")
    train("grpo", f"{STEADY} --steps 1", out="part")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (newest("part").joinpath(file).stat().st_size - 1, limits[1]))
    try:
        with pytest.raises(SystemExit) as stop:
            train("grpo", "--resume --out part --steps 2", out="part")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    said = capsys.readouterr().err.strip().splitlines()[-1]
    assert stop.value.code == 1 and said.startswith("error: --out part: step 2 cannot be saved") and newest("part").name == "step-1"
    assert not list(Path("part").glob("*.tmp"))
    train("grpo", "--resume --out part --steps 3", out="part")
    same_runs("whole", "part")


class Killed(BaseException):
    pass


class Assassin:
    """Raises before the n-th change (write, rename, make, remove) of what lies in a directory, and inside its checkpoints."""
    EVENTS = ("open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "shutil.rmtree")

    def __init__(self):
        self.below, self.left = None, 0
        sys.addaudithook(self.hook)  # cannot be taken away again: idle while `below` is None

    def hook(self, event, args):
        if self.below is None or event not in self.EVENTS or not isinstance(args[0], (str, os.PathLike)):
            return
        if event == "open" and not (isinstance(args[1], str) and set(args[1]) & set("wax+")):
            return
        path = Path(args[0]).absolute()
        if self.below in (path, path.parent) or (self.below in path.parents and path.name in ("config.json", "tokenizer.json")):
            self.left -= 1
            if self.left < 0:
                raise Killed

    @contextlib.contextmanager
    def after(self, count, below):
        self.below, self.left = Path(below).absolute(), count
        try:
            yield
        finally:
            self.below = None


@pytest.fixture(scope="module")
def assassin():
    return Assassin()


def test_a_kill_before_any_change_of_a_file_loses_nothing(assassin, spread, capsys):
    """Stop at every single one in turn, go on, and end where the undisturbed run ends."""
    flags = "--steps 2 --save_every 1 --beta 0.1 --ref_every 2 --eval_every 9 --eval_problems 1 --max_new_tokens 2"
    train("grpo", flags, out="whole")
    for count in itertools.count():
        out = f"run{count}"
        try:
            with assassin.after(count, out):
                train("grpo", flags, out=out)
            break
        except Killed:
            pass
        disturb()
        if Path(out, "args.json").exists():
            rows = train("grpo", f"--resume --out {out}", out=out)
        else:
            rows = train("grpo", flags, out=out)
        assert [row["step"] for row in rows] == [0, 1, 2], count
        same_runs("whole", out)
        shutil.rmtree(out)
    assert count > 15, "the assassin saw too little of what is written"


def test_flags_given_again_override_and_the_others_come_from_the_saved_run(spread):
    train("ppo", "--temperature 0.7 --no-whiten --lam 0.5 --system_prompt 'Think.' --seed 4 --gradient_checkpointing")
    args = ppo.parse_args(shlex.split("--resume --out run --steps 2 --lr 0.5 --no-gradient_checkpointing"))
    assert (args.temperature, args.whiten, args.lam, args.system_prompt, args.seed) == (0.7, False, 0.5, "Think.", 4)
    assert (args.steps, args.lr, args.gradient_checkpointing, args.model, args.out) == (2, 0.5, False, "model", "run")
    ppo.main(args)
    again = ppo.parse_args(shlex.split("--resume --out run"))
    assert (again.steps, again.lr) == (2, 0.5), "flags given to a resumed run are kept for the next"


def test_resuming_a_finished_run_changes_nothing(spread, capsys):
    train("grpo", "--steps 2")
    before = files("run")
    train("grpo", "--resume --out run")
    after = files("run")
    assert {k: v for k, v in after.items() if k != "args.json"} == {k: v for k, v in before.items() if k != "args.json"}
    assert "step-2" in capsys.readouterr().out


@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize("where", ["collect", "update"])
def test_ctrl_c_in_the_middle_of_a_step_saves_the_whole_step_and_leaves_with_130(script, where, spread, monkeypatch, capsys):
    train(script, f"{STEADY} --steps 3", out="whole")
    module, count = SCRIPTS[script], itertools.count(1)
    real = getattr(module, where)

    def interrupted(*args):
        if next(count) == 2:
            os.kill(os.getpid(), signal.SIGINT)
        return real(*args)
    monkeypatch.setattr(module, where, interrupted)
    with pytest.raises(SystemExit) as left:
        train(script, f"{STEADY} --steps 3", out="part")
    assert left.value.code == 130 and newest("part").name == "step-2" and steps_of("part") == [0, 1, 2]
    assert "--resume" in capsys.readouterr().out
    monkeypatch.setattr(module, where, real)
    train(script, "--resume --out part", out="part")
    same_runs("whole", "part")


def test_a_second_ctrl_c_leaves_at_once_with_the_last_checkpoint_as_it_was(spread, monkeypatch, capsys):
    train("grpo", "--steps 1")
    before, real = files(newest()), grpo.collect

    def impatient(*args):
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        return real(*args)
    monkeypatch.setattr(grpo, "collect", impatient)
    with pytest.raises(SystemExit) as left:
        common.launch(grpo.main, parsed("grpo", "--resume --out run --steps 3"))
    assert left.value.code == 130 and files(newest()) == before
    assert capsys.readouterr().err.count("\n") == 1


# ---------------------------------------------------------------------------------------------------------------------
# True processes

ENDLESS = f"--model model --dataset data.jsonl {SMALL} --reward_model judge --steps 100000 --eval_every 100000"


def wait_for(condition, child, seconds=120):
    end = time.time() + seconds
    while not condition():
        assert child.poll() is None, child.communicate()[1]
        assert time.time() < end, "nothing happened"
        time.sleep(0.01)


def lines(out):
    path = Path(out, "metrics.jsonl")
    return path.read_text().count("\n") if path.exists() else 0


def test_ctrl_c_and_kill_9_of_a_true_process_lose_nothing():
    """Ctrl-C: status 130 and the step in hand saved. kill -9 while steps are saved one after the other: goes on bit-equal."""
    stopped = process("grpo", f"{ENDLESS} --save_every 100000 --out stopped")
    killed = process("ppo", f"{ENDLESS} --save_every 1 --out killed")
    wait_for(lambda: lines("stopped") >= 3, stopped)
    stopped.send_signal(signal.SIGINT)
    wait_for(lambda: lines("killed") >= 4, killed)
    time.sleep(zlib.crc32(os.urandom(4)) % 100 / 1000)
    killed.kill()
    output, error = stopped.communicate(timeout=60)
    assert stopped.returncode == 130 and "Traceback" not in error
    steps = steps_of("stopped")
    assert newest("stopped").name == f"step-{steps[-1]}" and steps == list(range(len(steps))) and str(newest("stopped")) in output
    transformers.AutoModelForCausalLM.from_pretrained(newest("stopped"))
    killed.communicate(timeout=60)
    total = steps_of_whole_lines("killed")[-1] + 2
    train("ppo", f"--resume --out killed --steps {total}", out="killed")
    train("ppo", f"{ENDLESS} --save_every 100000 --steps {total}", out="whole")
    assert steps_of("killed") == list(range(total + 1))
    same_runs("whole", "killed")


def steps_of_whole_lines(out):
    return [json.loads(line)["step"] for line in Path(out, "metrics.jsonl").read_text().splitlines() if line.endswith("}")]


def test_help_and_an_unknown_flag_of_a_true_process():
    """--help prints the equations and every flag; an unknown flag is one line and status 2, and nothing is made."""
    helped, wrong = process("gspo", "--help"), process("ppo", "--learning_rate 3")
    output, error = helped.communicate(timeout=60)
    assert helped.returncode == 0 and "(3)" in output and "--token_level" in output and not error
    output, error = wrong.communicate(timeout=60)
    assert wrong.returncode == 2 and error.count("\n") == 1 and "--learning_rate" in error and not output
    assert not Path("runs").exists()


@pytest.mark.parametrize("script", SCRIPTS)
def test_help_shows_the_docstring_and_a_meaning_for_every_flag(script, capsys):
    with pytest.raises(SystemExit) as left:
        SCRIPTS[script].parse_args(["--help"])
    text = capsys.readouterr().out
    assert left.value.code == 0 and SCRIPTS[script].__doc__.strip() in text and "%(" not in text
    for flag in re.findall(r"^  (--\w+)", text, re.M):
        assert re.search(rf"^  {flag}\b[^\n]*(  +\S+ \S+|\n {{10,}}\S+ \S+)", text, re.M), f"{flag} is not explained"


# ---------------------------------------------------------------------------------------------------------------------
# What a run shows

KEYS = ("step reward completion_length truncated entropy kl clip_frac ratio_max zero_variance_groups grad_norm rollout_tokens_per_s "
        "update_tokens_per_s padding peak_memory_gb seconds").split()


@pytest.mark.parametrize("script", SCRIPTS)
def test_metrics_hold_the_designs_keys_and_what_was_sampled(script, spread, monkeypatch):
    """One line a step. Means are over completion tokens and all rows: compared with the rollout itself."""
    calls = spy(monkeypatch, SCRIPTS[script], "collect")
    rows = train(script, "--steps 3 --beta 0.1 --prompts 5 --group_size 3 --minibatches 2 --max_new_tokens 12 --micro_batch_tokens 200 "
                         "--eval_samples 1")
    assert [row["step"] for row in rows] == [0, 1, 2, 3]
    assert all(rows[i]["eval_accuracy"] is not None and rows[i]["eval_sampled_accuracy"] is not None for i in (0, 3))
    for row, call in zip(rows[1:], calls):
        missing = [key for key in KEYS if row.get(key) is None]
        assert not missing and all(isinstance(row[key], (int, float)) for key in KEYS)
        rollout, mask = call.result[0], call.result[0]["mask"]
        assert row["reward"] == pytest.approx(rollout["rewards"].mean().item())
        assert row["completion_length"] == pytest.approx(mask.sum(1).mean().item())
        assert row["truncated"] == pytest.approx(1 - rollout["finished"].float().mean().item())
        assert row["ratio_max"] > 0 and row["grad_norm"] > 0 and 0 <= row["padding"] < 0.5 and row["zero_variance_groups"] == 0
    assert rows[2]["padding"] > 0
    rollout = calls[0].result[0]  # sampled from the model as it was
    with torch.no_grad():
        logp = transformers.AutoModelForCausalLM.from_pretrained("model")(rollout["ids"]).logits.log_softmax(-1)
    entropies = [-(logp[i, end - 1 - k].exp() * logp[i, end - 1 - k]).sum() for i, end in enumerate(rollout["attention"].sum(1).tolist())
                 for k in range(1, int(rollout["mask"][i].sum()) + 1)]
    assert rows[1]["entropy"] == pytest.approx(torch.stack(entropies).mean().item(), rel=1e-4)


@pytest.mark.parametrize("script", ["grpo", "gspo"])
def test_zero_variance_groups_are_counted(script, monkeypatch):
    """Of 4 groups the one whose completions score the same is a quarter."""
    def score(problems, texts):
        rewards = by_text(problems, texts)
        rewards[:2] = 0.7
        return rewards
    monkeypatch.setattr(common, "load_reward", lambda args: score)
    assert train(script, "--prompts 4")[-1]["zero_variance_groups"] == 0.25


def test_a_run_shows_its_values_its_steps_a_completion_and_a_closing_table(spread, monkeypatch, capsys):
    calls = spy(monkeypatch, grpo, "collect")
    rows = train("grpo", "--steps 2 --eval_every 1 --eval_samples 1")
    said = capsys.readouterr().out
    for value in ("--lr 0.01", "--group_size 2", "--temperature 1.0", "--dtype float32", "--beta 0.04"):
        assert value in said, "the values in force are printed"
    assert len(re.findall(r"^step [12]/2 .*reward", said, re.M)) == 2
    assert calls[0].problems[0]["question"] in said and f"{calls[0].result[0]['rewards'][0].item():g}"[:5] in said
    table = said[said.rindex("---"):]
    assert str(newest()) in table and "run/metrics.jsonl" in table and "before" in table and "after" in table
    for row in (rows[0], rows[-1]):
        assert f"{row['eval_accuracy']:.3f}" in table


def test_the_first_step_says_why_the_loss_is_0_and_the_gradient_is_not(spread, capsys):
    train("grpo", "--beta 0")
    said = capsys.readouterr().out.lower()
    assert "loss" in said and "gradient" in said


def test_truncated_completions_are_warned_about_once_and_only_then(spread, capsys):
    """Random weights hardly ever stop. Where every token ends a completion nothing is cut off."""
    rows = train("grpo", "--steps 3")
    said = [line for line in capsys.readouterr().out.splitlines() if "warning" in line]
    assert all(row["truncated"] > 0.5 for row in rows[1:]) and len([line for line in said if "--max_new_tokens" in line]) == 1
    shutil.copytree("model", "terse")
    path = Path("terse/generation_config.json")
    path.write_text(json.dumps(json.loads(path.read_text()) | {"eos_token_id": list(range(104))}))
    rows = train("grpo", "--model terse --steps 3", out="short")
    assert [row["truncated"] for row in rows[1:]] == [0, 0, 0] and {row["completion_length"] for row in rows[1:]} == {1}
    assert not [line for line in capsys.readouterr().out.splitlines() if "warning" in line and "--max_new_tokens" in line]


@pytest.mark.parametrize("script", ["grpo", "gspo"])
def test_groups_that_teach_nothing_for_many_steps_are_warned_about(script, capsys, monkeypatch):
    train(script, "--steps 6")  # random weights: every reward is 0
    said = capsys.readouterr().out
    warning = [line for line in said.splitlines() if line.startswith("warning") and "group" in line]
    assert len(warning) == 1 and "--temperature" in warning[0] and all(row["zero_variance_groups"] == 1 for row in metrics()[1:])
    monkeypatch.setattr(common, "load_reward", lambda args: by_text)
    train(script, "--steps 6", out="lively")
    assert not [line for line in capsys.readouterr().out.splitlines() if line.startswith("warning") and "group" in line]


def test_an_exploding_kl_is_warned_about(spread, capsys):
    train("grpo", "--lr 0.5 --steps 3 --beta 0.01")
    warning = [line for line in capsys.readouterr().out.splitlines() if line.startswith("warning") and "reference" in line]
    assert len(warning) == 1 and "--beta" in warning[0] and "--lr" in warning[0]


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_step_that_is_not_finite_is_skipped_whole_and_warned_about(script, spread, monkeypatch, capsys):
    """The third policy loss is nan: its step changes no weight and no moment, the run goes on."""
    module, count = SCRIPTS[script], itertools.count(1)
    real = module.policy_loss

    def sometimes_nan(*args):
        loss, stats = real(*args)
        return (loss * float("nan") if next(count) == 3 else loss), stats
    monkeypatch.setattr(module, "policy_loss", sometimes_nan)
    rows = train(script, "--steps 4 --epochs 1 --vf_coef 0" if script == "ppo" else "--steps 4")
    assert [bool(row["skipped"]) for row in rows[1:]] == [False, False, True, False]
    assert all(torch.isfinite(t).all() for t in load_file(newest() / "model.safetensors").values())
    state = torch.load(newest() / "optimizer.pt")["policy"]["adamw"]["state"]
    assert {int(s["step"]) for s in state.values()} == {3}
    assert [line for line in capsys.readouterr().out.splitlines() if line.startswith("warning") and "--lr" in line and "finite" in line]


def test_several_steps_in_a_row_that_are_not_finite_stop_the_run(spread, monkeypatch, capsys):
    real = grpo.policy_loss
    monkeypatch.setattr(grpo, "policy_loss", lambda *args: (real(*args)[0] * float("inf"), real(*args)[1]))
    with pytest.raises(SystemExit) as left:
        train("grpo", "--steps 50")
    error = capsys.readouterr().err
    assert left.value.code not in (0, None) and "--lr" in error and error.count("\n") == 1 and len(metrics()) < 20


@pytest.mark.upkeep
@pytest.mark.parametrize("script", SCRIPTS)
def test_every_advertised_option_is_run_in_this_file(script, capsys):
    with pytest.raises(SystemExit):
        SCRIPTS[script].parse_args(["--help"])
    ours = Path(__file__).read_text()
    for line in re.findall(r"^  (--.*)$", capsys.readouterr().out, re.M):
        for flag in re.findall(r"--[\w-]+", line.split("  ")[0]):
            assert re.search(rf"{flag}(?![\w-])", ours), f"{flag} is never run"
        for choices in re.findall(r"\{([^}]*)\}", line):
            assert all(re.search(rf"\b{choice}\b", ours) for choice in choices.split(","))

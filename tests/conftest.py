"""Shared by all tests: the repository on the path, settings, gradients, tiny models, rows, whole runs."""
import contextlib
import inspect
import json
import os
import random
import shlex
import sys
import tempfile
import types
import zlib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CACHE = tempfile.TemporaryDirectory()
os.environ |= {"HF_HUB_OFFLINE": "1", "HF_HOME": CACHE.name}  # no network; the user's cache stays as it is
sys.path[:0] = [str(ROOT), *(str(ROOT / "tests" / folder) for folder in ("tools", "vectors"))]
import pytest, tokenizers, torch, transformers  # noqa: E401, E402

import common  # noqa: E402

def pytest_configure(config):
    torch.set_num_threads(1)  # tiny tensors: a second thread costs more than it gives
    config.addinivalue_line("markers", "slow: run with -m slow")
    config.option.markexpr = config.option.markexpr or "not slow"

@pytest.fixture(params=["qwen2", "qwen3", "llama", "gpt2"])
def family(request):
    return request.param

def settings(script, **changes):
    """The script's defaults for the toy on a CPU in float32, but for `changes`."""
    args = script.parse_args(["--device", "cpu", "--dtype", "float32"])
    assert vars(args).keys() >= changes.keys()
    vars(args).update(changes)
    return args

def tensor64(numbers):
    return torch.tensor(numbers, dtype=torch.float64)

def slopes(function, x, h=1e-6):
    """Gradient of a scalar function of the float64 tensor x by central differences."""
    grad = torch.zeros_like(x)
    for i in range(x.numel()):
        step = (torch.arange(x.numel()) == i).view(x.shape) * h
        grad.view(-1)[i] = float(function(x + step) - function(x - step)) / (2 * h)
    return grad

def flat_gradient(model):
    """The gradients of a model's weights in one vector, 0 where a weight has none."""
    return torch.cat([(p * 0 if p.grad is None else p.grad).flatten() for p in model.parameters()]).detach()

class Recorder:
    """Stands in for common.Optimizer: keeps the gradient of every step and leaves the weights alone."""
    def __init__(self, model):
        self.model, self.gradients = model, []

    def clip_and_step(self, prefix=""):
        self.gradients.append(flat_gradient(self.model))
        self.model.zero_grad()
        return {}

def spy(monkeypatch, module, name):
    """Record every call of module.name from now on: its arguments by name, and its result."""
    calls, real = [], getattr(module, name)

    def wrapper(*args, **kwargs):
        bound = inspect.signature(real).bind(*args, **kwargs).arguments
        calls.append(types.SimpleNamespace(**bound, result=real(*args, **kwargs)))
        return calls[-1].result
    monkeypatch.setattr(module, name, wrapper)
    return calls

def tiny_config(family, vocab_size=64, **settings):
    """A config of `family` (qwen2, qwen3, llama, gpt2 ...) with a few thousand parameters."""
    sizes = dict(hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
                 num_key_value_heads=2, max_position_embeddings=512)
    if family == "gpt2":
        sizes = dict(n_embd=16, n_layer=2, n_head=2, n_positions=512)
        sizes |= dict(attn_pdrop=0.0, resid_pdrop=0.0, embd_pdrop=0.0)
    sizes |= {"eos_token_id": 1, "bos_token_id": None, "pad_token_id": None} | settings
    return transformers.AutoConfig.for_model(family, vocab_size=vocab_size, **sizes)

def tiny_model(family="qwen2", vocab_size=64, seed=0, dtype=torch.float32, **settings):
    """A randomly initialised causal LM of `family`, its logits spread enough that mistakes show."""
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(tiny_config(family, vocab_size, **settings))
    for p in model.parameters():
        p.data.mul_(5 if p.dim() == 2 else 1)
    return model.to(dtype)

def word_tokenizer(words, eos, unk, pad=None, bos=None):
    """Token i reads words[i]; texts join without a space and are read a character at a time."""
    ids = {word: i for i, word in enumerate(words)}
    tok = tokenizers.Tokenizer(tokenizers.models.WordLevel(ids, unk_token=unk))
    tok.pre_tokenizer = tokenizers.pre_tokenizers.Split(tokenizers.Regex("[\\s\\S]"), "isolated")
    tok.decoder = tokenizers.decoders.Fuse()
    special = {"eos_token": eos, "unk_token": unk, "pad_token": pad, "bos_token": bos}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tok, **special)

def tiny_tokenizer(vocab_size=64, eos="t1", pad=None):
    """Token i reads "t<i>": no text comes back as the ids it was decoded from."""
    return word_tokenizer([f"t{i}" for i in range(vocab_size)], eos, "t2", pad)

def char_tokenizer(chat=None, pad="<pad>", eos="<eos>", bos=False):
    """A token per printable character, so that any text can be a prompt, and 6 special ones: 102 in all."""
    words = ["<pad>", "<eos>", "<unk>", "<bos>", *map(chr, range(32, 127))]
    words += ["\n", "<|im_start|>", "<|im_end|>"]
    out = word_tokenizer(words, eos, "<unk>", pad, "<bos>")
    out.add_special_tokens({"additional_special_tokens": words[-2:]})
    out.backend_tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single="<bos> $A" if bos else "$A", special_tokens=[("<bos>", 3)])
    out.chat_template = chat
    return out

def save_tiny(path, family="qwen2", tokenizer=None, **settings):
    """A model directory like those of the hub."""
    settings = {"vocab_size": 104 if tokenizer else 64} | settings
    tokenizer = tokenizer or tiny_tokenizer(settings["vocab_size"])
    model = tiny_model(family, eos_token_id=tokenizer.eos_token_id, **settings)
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return str(path)

def make_batch(prompts, completions):
    """A rollout's columns that lists of ids determine, spelt out without the code under test."""
    rows = [prompt + completion for prompt, completion in zip(prompts, completions)]
    T, L = max(map(len, completions)), max(map(len, rows))
    return {"ids": torch.tensor([row + [0] * (L - len(row)) for row in rows]),
            "attention": torch.tensor([[1] * len(row) + [0] * (L - len(row)) for row in rows]),
            "prompt_length": torch.tensor([len(prompt) for prompt in prompts]),
            "mask": torch.tensor([[1.0] * len(c) + [0.0] * (T - len(c)) for c in completions]),
            "has_gradient": torch.ones(len(rows), dtype=torch.bool), "row": torch.arange(len(rows))}

def random_batch(rows, seed=0, vocab_size=64, prompt=(1, 9), completion=(1, 12)):
    """Rows of random lengths whose prompts and completions hold every id, 0 and eos among them."""
    rng = random.Random(seed)
    draw = lambda low, high: [rng.randrange(vocab_size) for _ in range(rng.randint(low, high))]  # noqa: E731
    return make_batch([draw(*prompt) for _ in range(rows)], [draw(*completion) for _ in range(rows)])

def full_logprobs(model, batch, temperature):
    """(N, T) log-probs by the definition in float64, each row alone and unpadded; 0 where the mask is 0."""
    logp = torch.zeros_like(batch["mask"], dtype=torch.float64)
    for i, start in enumerate(batch["prompt_length"].tolist()):
        ids = batch["ids"][i, :batch["attention"][i].sum()]
        chances = torch.softmax(model(input_ids=ids[None]).logits[0].double() / temperature, -1)
        logp[i, :len(ids) - start] = chances[start - 1:-1].gather(1, ids[start:, None])[:, 0].log()
    return logp * batch["mask"]

def holes(mask):
    """A mask with a token less in each row of three or more: the first one, one between, or the last one."""
    mask = mask.clone()
    for i, n in enumerate(mask.sum(1).long().tolist()):
        if n > 2:
            mask[i, (0, n // 2, n - 1)[n % 3]] = 0
    return mask

def generate_holes(monkeypatch):
    """Rollouts have holes from now on, before anything is computed from them."""
    def generate(*given):
        rollout = real(*given)
        return rollout | {"mask": holes(rollout["mask"])}
    real = common.generate
    monkeypatch.setattr(common, "generate", generate)

@contextlib.contextmanager
def refused(capsys, *words):
    """The block must end in sys.exit: its text, or what argparse writes on stderr, holds all `words`."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as left:
        yield
    said = f"{left.value.code}\n{capsys.readouterr().err}"
    assert left.value.code and all(word in said for word in words), said

def train(script, flags, out="run"):
    """Run a script as its command line does, on a CPU; returns the rows of metrics.jsonl."""
    common.launch(script.main, script.parse_args(shlex.split(f"--device cpu --out {out} {flags}")))
    return [json.loads(line) for line in Path(out, "metrics.jsonl").read_text(encoding="utf-8").splitlines()]

# Whole runs of the scripts in a directory of their own: test_cli.py, test_data.py, test_resume.py

TINY = ("--model model --dataset data.jsonl --steps 1 --prompts 2 --group_size 2 --max_prompt_tokens 256 "
        "--max_new_tokens 4 --minibatches 1 --lr 0.01 --warmup_steps 0 --eval_problems 2")
CHATML = ("{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
          "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")
WITH_BOS = ("{{ bos_token }}{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }}{{ eos_token }}"
            "{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}")
LOOKS = {"chatml": {"chat": CHATML, "eos": "<|im_end|>"},  # its prompts hold the end-of-sequence token
         "bos": {"chat": WITH_BOS, "bos": True, "pad": "<eos>"},  # tokenizer and template both add a BOS
         "plain": {"pad": None, "bos": True},  # a base model without a padding token
         "bare": {}}

def write_jsonl(path, rows):
    Path(path).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")

def sums(count, start=0):
    """Problems of questions of different lengths."""
    return [{"question": f"What is {i} + {i}?" + "!" * (i % 5), "answer": f"{i} + {i} = #### {2 * i}"}
            for i in range(start, start + count)]

@pytest.fixture(scope="session")
def world(tmp_path_factory):
    path = tmp_path_factory.mktemp("world")
    save_tiny(path / "model", "qwen3", char_tokenizer(), num_hidden_layers=1)
    write_jsonl(path / "data.jsonl", sums(60))
    return path

@pytest.fixture
def here(world, tmp_path, monkeypatch):
    """The test runs in a directory of its own that holds model/ and data.jsonl."""
    for path in world.iterdir():
        (tmp_path / path.name).symlink_to(path)
    monkeypatch.chdir(tmp_path)
    return tmp_path

def by_text(problems, completions):
    """A reward that is a function of the text alone, from 0 to 1."""
    return [zlib.crc32(text.encode()) % 9973 / 9973 for text in completions]

@pytest.fixture
def spread(monkeypatch):
    """Rewards that differ within every group, so that there is something to learn from random weights."""
    monkeypatch.setattr(common, "answer_reward", by_text)

def newest(out="run"):
    """The newest checkpoint of a run; nothing half-made lies beside it."""
    assert not Path(out, "temporary").exists()
    return max(Path(out).glob("step-*"), key=lambda path: int(path.name.removeprefix("step-")))

def same(a, b):
    """Bit-equality of nested containers of tensors and numbers."""
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return a.dtype == b.dtype and torch.equal(a, b) if torch.is_tensor(a) else a == b

# policy_loss in numbers, collect and update: test_losses.py, test_ppo.py, test_every_script.py

def class_of(name):
    """my_tracker -> MyTracker"""
    return name.title().replace("_", "")

def call(function, given):
    """Give a function what it asks for by the names of its parameters: those of the scripts differ. Numbers,
    such as eps_low, come from the args."""
    given, asked = vars(given["args"]) | given, inspect.signature(function).parameters
    place = "random_rows" if function.__name__ == "policy_loss" else "Trainer"
    for name in asked.keys() - given.keys():
        made = "" if place == "random_rows" else f", or give the copy a class {class_of(name)} that makes it"
        pytest.fail(f"{function.__name__} asks for `{name}`, which the rows of this test do not have: "
                    f"add it to {place} in tests/conftest.py{made}", pytrace=False)
    return function(*(given[name] for name in asked))

def random_rows(seed=0, lengths=(6, 1, 4, 2, 5), spread=0.4, shift=0.0):
    """What policy_loss takes, for ragged rows in float64, with nonsense in the padding and where a token does
    not count, which is one in each row of three or more; spread and shift are those of the log-ratios."""
    torch.manual_seed(seed)
    old, noise, gap, adv = torch.randn(4, len(lengths), max(lengths), dtype=torch.float64)
    mask = holes((torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]).double())
    return {"logp": old + spread * noise + shift, "old_logp": old, "ref_logp": old + 0.5 * gap,
            "sampled_logp": old, "adv": adv[:, :1], "mask": mask}

def loss_of(script, rows, args):
    """The loss of such rows, its gradient by logp, and its statistics."""
    rows = rows | {"logp": rows["logp"].clone().requires_grad_(), "args": args}
    loss, stats = call(script.policy_loss, rows)
    return loss.detach(), torch.autograd.grad(loss, rows["logp"])[0], stats

def count_t3(problems, completions):
    """Different for almost every completion; t3 pays best."""
    return [text.count("t3") + len(text) / 100 for text in completions]

class Trainer:
    """A script, six problems and tiny models of 8 tokens, so that completions often end. Collects once."""
    def __init__(self, script, **flags):
        sizes = {"group_size": 2, "minibatches": 1, "epochs": 1, "max_new_tokens": 8, "temperature": 0.6}
        self.script, self.args = script, settings(script, **sizes | flags, warmup_steps=0)
        self.policy, self.reference = (tiny_model(vocab_size=8, seed=seed) for seed in (0, 1))
        self.critic = transformers.AutoModel.from_config(tiny_config("qwen2", 8))
        self.critic.score = torch.nn.Linear(16, 1)
        self.optimizers = {"policy": Recorder(self.policy), "critic": Recorder(self.critic)}
        self.tokenizer, self.reward = tiny_tokenizer(8), count_t3
        self.problems = [{"prompt": [3 + i % 5, 4, 2][:1 + i % 3], "question": str(i), "answer": "5"}
                         for i in range(6)]
        # A copy may keep state of its own: `my_tracker` is a MyTracker(), if the copy has such a class.
        for function in (script.collect, script.update):
            for name in inspect.signature(function).parameters.keys() - vars(self).keys():
                if hasattr(script, class_of(name)):
                    setattr(self, name, getattr(script, class_of(name))())
        self.collect()

    def collect(self):
        self.rollout, self.stats = call(self.script.collect, vars(self))

    def update(self):
        return call(self.script.update, vars(self))

    def use_adam(self, lr):
        models = {"policy": self.policy, "critic": self.critic}
        self.optimizers = {name: common.Optimizer(model, lr, self.args) for name, model in models.items()}

    def moved(self):
        """Itself in float64, the models no longer those that made the rollout, and the rollout's tensors."""
        torch.manual_seed(2)
        for weight in [*self.policy.double().parameters(), *self.critic.double().parameters()]:
            weight.data += 0.02 * torch.randn_like(weight)
        tensors = {name: x for name, x in self.rollout.items() if torch.is_tensor(x)}
        return self, {name: x.double() if x.is_floating_point() else x for name, x in tensors.items()}

    def gradients(self, rollout, **changes):
        """The gradients of an update, (steps, weights of policy and critic), and its statistics."""
        vars(self.args).update(changes)
        self.optimizers = {"policy": Recorder(self.policy), "critic": Recorder(self.critic)}
        self.rollout, seen = rollout, self.optimizers.values()
        stats = self.update()
        return torch.cat([torch.stack(one.gradients) for one in seen if one.gradients], 1), stats

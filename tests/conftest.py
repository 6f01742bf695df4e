"""What the test files share, in parts: the heading of each part says which files use it."""
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
sys.path[:0] = [str(ROOT), *(str(ROOT / "tests" / folder) for folder in ("tools", "vectors", "forks"))]
import pytest, tokenizers, torch, transformers  # noqa: E401, E402

import common  # noqa: E402

def pytest_configure(config):
    torch.set_num_threads(1)  # tiny tensors: a second thread costs more than it gives
    config.addinivalue_line("markers", "slow: run with -m slow")
    config.option.markexpr = config.option.markexpr or "not slow"

# ---- All tests ----
def settings(script, **changes):
    """The script's defaults for the toy on a CPU in float32, but for a copy's TEST_FLAGS and `changes`."""
    args = script.parse_args(["--device", "cpu", "--dtype", "float32"])
    changes = getattr(script, "TEST_FLAGS", {}) | changes
    assert vars(args).keys() >= changes.keys()
    vars(args).update(changes)
    return args

def spy(monkeypatch, module, name):
    """Record every call of module.name from now on: its arguments by name, torch's seed, and its result."""
    calls, real = [], getattr(module, name)

    def wrapper(*args, **kwargs):
        bound = inspect.signature(real).bind(*args, **kwargs).arguments
        calls.append(types.SimpleNamespace(**bound, seed=torch.initial_seed(), result=real(*args, **kwargs)))
        return calls[-1].result
    monkeypatch.setattr(module, name, wrapper)
    return calls

def same(a, b):
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return a.dtype == b.dtype and torch.equal(a, b) if torch.is_tensor(a) else a == b

# ---- Models and rows of tokens: test_logprobs, test_sampling, test_batching, test_ppo, test_gpu, forks ----
def tiny_model(family="qwen2", vocab_size=64, seed=0, dtype=torch.float32, **settings):
    """A randomly initialized causal LM of `family`, with logits spread enough for bugs to show."""
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(tiny_config(family, vocab_size, **settings))
    for p in model.parameters():
        p.data.mul_(5 if p.dim() == 2 else 1)
    return model.to(dtype)

def tiny_config(family, vocab_size=64, **settings):
    """A config of `family` (qwen2, gpt2 ...) with a few thousand parameters."""
    sizes = dict(hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
                 num_key_value_heads=2, max_position_embeddings=512, attn_pdrop=0.0, resid_pdrop=0.0,
                 embd_pdrop=0.0, eos_token_id=1, bos_token_id=None, pad_token_id=None)
    return transformers.AutoConfig.for_model(family, vocab_size=vocab_size, **sizes | settings)

def tiny_tokenizer(vocab_size=64, eos="t1", pad=None, unk="t2", bos=None, words=None):
    """Token i decodes to words[i], or "t<i>". Text is split into characters, so "t<i>" never encodes to i."""
    ids = {word: i for i, word in enumerate(words or [f"t{i}" for i in range(vocab_size)])}
    tok = tokenizers.Tokenizer(tokenizers.models.WordLevel(ids, unk_token=unk))
    tok.pre_tokenizer = tokenizers.pre_tokenizers.Split(tokenizers.Regex("[\\s\\S]"), "isolated")
    tok.decoder = tokenizers.decoders.Fuse()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tok, eos_token=eos, pad_token=pad, unk_token=unk, bos_token=bos,
        chat_template="{% for m in messages %}{{ m['content'] }}{% endfor %}")

def char_tokenizer(chat=None, pad="<pad>", eos="<eos>", bos=False):
    """One token per printable character, so that any text can be a prompt; 102 in all."""
    words = ["<pad>", "<eos>", "<unk>", "<bos>", *map(chr, range(32, 127)), "\n"]
    words += ["<|im_start|>", "<|im_end|>"]
    out = tiny_tokenizer(None, eos, pad, "<unk>", "<bos>", words)
    out.add_special_tokens({"additional_special_tokens": words[-2:]})
    out.backend_tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single="<bos> $A" if bos else "$A", special_tokens=[("<bos>", 3)])
    out.chat_template = chat or PLAIN
    return out

PLAIN = r"{{ bos_token }}{% for m in messages %}{{ m['content'] + '\n' }}{% endfor %}"
CHATML = ("{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
          "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")

def save_tiny(path, family="qwen2", tokenizer=None, **settings):
    """A model directory like those on the Hub."""
    settings = {"vocab_size": 104 if tokenizer else 64} | settings
    tokenizer = tokenizer or tiny_tokenizer(settings["vocab_size"])
    tiny_model(family, eos_token_id=tokenizer.eos_token_id, **settings).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return str(path)

def make_batch(prompts, completions):
    """The columns of a rollout that follow from lists of ids, without the code under test."""
    rows = [prompt + completion for prompt, completion in zip(prompts, completions)]
    T, L = max(map(len, completions)), max(map(len, rows))
    return {"ids": torch.tensor([row + [0] * (L - len(row)) for row in rows]),
            "completion_length": torch.tensor([len(c) for c in completions]),
            "prompt_length": torch.tensor([len(prompt) for prompt in prompts]),
            "mask": torch.tensor([[1.0] * len(c) + [0.0] * (T - len(c)) for c in completions]),
            "row": torch.arange(len(rows)), "skip": torch.zeros(len(rows), dtype=torch.bool)}

def random_batch(rows, seed=0, longest=12):
    """Rows of random lengths, whose prompts and completions may contain any id, including 0 and EOS."""
    rng = random.Random(seed)
    parts = [[rng.choices(range(64), k=rng.randint(1, longest)) for _ in range(rows)] for _ in "pc"]
    return make_batch(*parts)

def full_logprobs(model, batch, temperature):
    """(N, T) log-probs by definition, in float64, each row alone and unpadded; 0 where the mask is 0."""
    logp = torch.zeros_like(batch["mask"], dtype=torch.float64)
    for i, start in enumerate(batch["prompt_length"].tolist()):
        ids = batch["ids"][i, :start + batch["completion_length"][i]]
        logits = model(input_ids=ids[None]).logits[0].double()[start - 1:-1] / temperature
        logp[i, :len(ids) - start] = torch.softmax(logits, -1).gather(1, ids[start:, None])[:, 0].log()
    return logp * batch["mask"]

def holes(mask):
    """Mask out one token in each row of three or more: the first, one in the middle, or the last."""
    n = mask.sum(1, keepdim=True).long()
    hole = torch.cat([0 * n, n // 2, n - 1], 1).gather(1, n % 3)
    return mask * ((torch.arange(mask.shape[1]) != hole) | (n < 3))

# ---- Whole runs in directories of their own: test_every_script, _cli, _data, _resume, _toy, forks ----
TINY = ("--model model --dataset data.jsonl --steps 1 --prompts 2 --group_size 2 --max_prompt_tokens 256 "
        "--max_new_tokens 4 --minibatches 1 --lr 0.01 --warmup_steps 0 --eval_problems 2")

def train(script, flags, out="run"):
    """Run a script on the CPU, as its command line does, but for TEST_FLAGS. Returns metrics.jsonl's rows."""
    args = script.parse_args(shlex.split(f"--device cpu --out {out} {flags}"))
    vars(args).update(getattr(script, "TEST_FLAGS", {}))
    script.main(args)
    return [json.loads(line) for line in Path(out, "metrics.jsonl").read_text().splitlines()]

def write_jsonl(path, rows):
    Path(path).write_text("".join(json.dumps(row) + "\n" for row in rows))

def sums(count, start=0):
    """Problems whose questions differ in length."""
    return [{"question": f"What is {i} + {i}?" + "!" * (i % 5), "answer": f"{i} + {i} = #### {2 * i}"}
            for i in range(start, start + count)]

@pytest.fixture(scope="session")
def world(tmp_path_factory):
    """A directory with model/ and data.jsonl."""
    path = tmp_path_factory.mktemp("world")
    save_tiny(path / "model", "qwen3", char_tokenizer(), num_hidden_layers=1)
    write_jsonl(path / "data.jsonl", sums(60))
    return path

@pytest.fixture
def here(world, tmp_path, monkeypatch):
    """The test runs in a directory of its own that contains both."""
    for path in world.iterdir():
        (tmp_path / path.name).symlink_to(path)
    monkeypatch.chdir(tmp_path)

@pytest.fixture
def spread(monkeypatch):
    """Rewards from 0 to 1, by a hash of the text, so that even random weights get different rewards."""
    def by_text(problems, completions):
        return [zlib.crc32(text.encode()) % 9973 / 9973 for text in completions]
    monkeypatch.setattr(common, "answer_reward", by_text)

# ---- policy_loss, collect and update: test_every_script, test_batching, test_ppo, forks ----
def call(function, given):
    """Call a script's function, whatever its signature: the names of its parameters say what to pass. Each is
    in `given`, or is a flag. Others are a copy's own. For `my_tracker` in collect or update, Trainer makes a
    MyTracker() of the copy. For any name in policy_loss, loss_of has a stand-in: a table, (N, T), of positive
    numbers with a gradient, like those of an entropy or a KL."""
    given = vars(given["args"]) | given
    return function(*(given[name] for name in inspect.signature(function).parameters))

def random_rows(seed=0, lengths=(6, 1, 4, 2, 5), spread=0.4):
    """Ragged rows with holes for policy_loss, in float64, with nonsense where the mask is 0. `spread` is the
    standard deviation of the log-ratios."""
    torch.manual_seed(seed)
    old, noise, gap, adv = torch.randn(4, len(lengths), max(lengths), dtype=torch.float64)
    mask = holes((torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]).double())
    return {"logp": old + spread * noise, "old_logp": old, "ref_logp": old + 0.5 * gap,
            "sampled_logp": old, "adv": adv[:, :1], "mask": mask,
            "completion_length": torch.tensor(lengths).clamp(min=1)}

def loss_of(script, rows, args):
    """The loss of such rows, its gradient with respect to logp and the stand-ins, and its statistics."""
    asked = inspect.signature(script.policy_loss).parameters.keys() - rows.keys() - vars(args).keys()
    moving = {"logp": rows["logp"]} | dict.fromkeys(asked, rows["old_logp"].abs())
    moving = {name: x.clone().requires_grad_() for name, x in moving.items()}
    loss, stats = call(script.policy_loss, rows | moving | {"args": args})
    parts = torch.autograd.grad(loss, list(moving.values()), allow_unused=True)
    return loss.detach(), sum(part for part in parts if part is not None), stats

def count_t3(problems, completions):
    """Different for almost every completion, and highest for t3."""
    return [text.count("t3") + len(text) / 100 for text in completions]

class Recorder(torch.optim.SGD):
    """Stands in for the optimizer: records the gradient of every step and changes no weights."""
    def __init__(self, model):
        super().__init__(model.parameters(), lr=0.0)
        self.gradients = []

    def step(self):
        pass

    def zero_grad(self):  # called once per step, also if the gradient is 0
        weights = self.param_groups[0]["params"]
        parts = [(p * 0 if p.grad is None else p.grad).flatten() for p in weights]
        self.gradients.append(torch.cat(parts).detach())
        super().zero_grad()

class Trainer:
    """A script, six problems and tiny models with 8 tokens, so that completions often end. Collects once."""
    def __init__(self, script, reward=count_t3, **flags):
        usual = {"group_size": 2, "minibatches": 1, "epochs": 1, "max_new_tokens": 8, "temperature": 0.6,
                 "warmup_steps": 0, "max_grad_norm": torch.inf}
        self.script, self.args = script, settings(script, **usual | flags)
        self.policy, self.reference = (tiny_model(vocab_size=8, seed=seed) for seed in (0, 1))
        self.critic = transformers.AutoModel.from_config(tiny_config("qwen2", 8))
        self.critic.score = torch.nn.Linear(16, 1)
        self.use(Recorder)
        self.tokenizer, self.reward = tiny_tokenizer(8), reward
        self.problems = [{"prompt": [3 + i % 5, 4, 2][:1 + i % 3], "question": str(i), "answer": "5"}
                         for i in range(6)]
        for function in (script.collect, script.update):
            for name in inspect.signature(function).parameters.keys() - vars(self).keys():
                if made := getattr(script, name.title().replace("_", ""), None):
                    setattr(self, name, made())
        self.collect()

    def collect(self):
        self.rollout, self.stats = call(self.script.collect, vars(self))

    def update(self):
        return call(self.script.update, vars(self))

    def use(self, optimizer):
        self.optimizer, self.critic_optimizer = optimizer(self.policy), optimizer(self.critic)

    def use_adam(self, lr):
        self.use(lambda model: torch.optim.Adam(model.parameters(), lr, (0.9, 0.95), fused=True))
        vars(self.args).update({name: lr for name in ("lr", "value_lr") if name in self.args})

    def moved(self):
        """Itself, with models in float64 that have moved since the rollout, and the rollout's tensors."""
        torch.manual_seed(2)
        for model in filter(None, (self.policy, self.critic, self.reference)):
            model.double()
        for weight in [*self.policy.parameters(), *self.critic.parameters()]:
            weight.data += 0.02 * torch.randn_like(weight)
        tensors = {name: x for name, x in self.rollout.items() if torch.is_tensor(x)}
        return self, {name: x.double() if x.is_floating_point() else x for name, x in tensors.items()}

    def gradients(self, rollout, **changes):
        """The gradients of an update, (steps, parameters of policy and critic), and its statistics."""
        vars(self.args).update(changes)
        self.use(Recorder)
        self.rollout, seen = rollout, (self.optimizer, self.critic_optimizer)
        stats = self.update()
        return torch.cat([torch.stack(one.gradients) for one in seen if one.gradients], 1), stats

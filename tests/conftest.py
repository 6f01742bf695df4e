"""Shared by all tests: the repository on the path, tiny models, and the marker that keeps upkeep checks out of a fork's way."""
import json
import random
import sys
from pathlib import Path

import pytest
import tokenizers
import torch
import transformers

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))


def pytest_configure(config):
    torch.set_num_threads(1)  # tiny tensors: a second thread costs more than it gives
    config.addinivalue_line("markers", "upkeep: holds the three scripts together; left out unless asked for with -m upkeep")
    if not config.option.markexpr:
        config.option.markexpr = "not upkeep"


def tiny_config(family, vocab_size=64, **settings):
    """A config of `family` (qwen2, qwen3, llama, gpt2) with a few thousand parameters."""
    if family == "gpt2":
        sizes = dict(n_embd=16, n_layer=2, n_head=2, n_positions=128, attn_pdrop=0.0, resid_pdrop=0.0, embd_pdrop=0.0)
        return transformers.GPT2Config(vocab_size=vocab_size, **sizes | settings)
    kind = {"qwen2": transformers.Qwen2Config, "qwen3": transformers.Qwen3Config, "llama": transformers.LlamaConfig}[family]
    sizes = dict(hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
    return kind(vocab_size=vocab_size, **sizes | {"max_position_embeddings": 256} | settings)


def tiny_model(family="qwen2", vocab_size=64, seed=0, dtype=torch.float32, **settings):
    """A randomly initialised causal LM of `family`, its logits spread enough that mistakes show."""
    torch.manual_seed(seed)
    settings = {"eos_token_id": 1, "bos_token_id": None, "pad_token_id": None} | settings
    model = transformers.AutoModelForCausalLM.from_config(tiny_config(family, vocab_size, **settings)).to(dtype)
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() == 2:
                p.mul_(5)
    return model


@pytest.fixture(params=["qwen2", "qwen3", "llama", "gpt2"])
def family(request):
    return request.param


def tiny_tokenizer(vocab_size=64, eos="t1", pad=None):
    """Token i reads "t<i>", joined without a space, so that no text comes back as the ids it was decoded from."""
    words = {f"t{i}": i for i in range(vocab_size)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="t2"))
    tokenizer.pre_tokenizer, tokenizer.decoder = tokenizers.pre_tokenizers.Whitespace(), tokenizers.decoders.Fuse()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=eos, pad_token=pad, unk_token="t2")


def save_tiny(path, family="qwen2", generation=None, **settings):
    """A model directory like those of the hub; `generation` are settings of its generation_config."""
    model = tiny_model(family, **settings)
    model.generation_config.update(**generation or {}, eos_token_id=1)
    model.save_pretrained(path)
    tiny_tokenizer(settings.get("vocab_size", 64)).save_pretrained(path)
    if generation:  # save_pretrained refuses some combinations that the hub has
        Path(path, "generation_config.json").write_text(json.dumps(generation | {"eos_token_id": 1}))
    return str(path)


def make_batch(prompts, completions):
    """ids, attention and mask of rows given as lists of token ids, spelt out without the code under test."""
    rows, T = [p + c for p, c in zip(prompts, completions)], max(map(len, completions))
    L = max(map(len, rows))
    return {"ids": torch.tensor([row + [0] * (L - len(row)) for row in rows]),
            "attention": torch.tensor([[1] * len(row) + [0] * (L - len(row)) for row in rows]),
            "mask": torch.tensor([[1.0] * len(c) + [0.0] * (T - len(c)) for c in completions])}


def random_batch(rows, seed=0, vocab_size=64, prompt=(1, 9), completion=(1, 12)):
    """Rows of random lengths whose prompts and completions hold every id, 0 and eos among them."""
    rng = random.Random(seed)
    draw = lambda low, high: [rng.randrange(vocab_size) for _ in range(rng.randint(low, high))]  # noqa: E731
    return make_batch([draw(*prompt) for _ in range(rows)], [draw(*completion) for _ in range(rows)])

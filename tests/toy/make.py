"""Make the toy: sums to solve, and a small model with two habits of answering them, explained in README.md.

    python tests/toy/make.py    makes the files next to it again, in under a minute"""
import json
import random
import sys
import zlib
from pathlib import Path

import torch
import transformers
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

HERE = Path(__file__).resolve().parent
sys.path += [str(HERE.parents[1]), str(HERE.parent / "tools")]  # the root of the repository; sft.py
import grpo  # noqa: E402
import sft  # noqa: E402

STEPS, LR = 1200, 6e-3  # of the warm-up
WORKED, GUESSED = 17, 23  # rows per step with each habit

def sums(digits):
    """Every sum of so many digits whose running result stays a digit, as (text, steps, result)."""
    if digits == 1:
        return [(str(digit), "", digit) for digit in range(10)]
    found = []
    for text, steps, result in sums(digits - 1):
        for digit in range(10):
            for sign, new in [("+", result + digit), ("-", result - digit)]:
                if 0 <= new <= 9:
                    step = f"{result}{sign}{digit}={new}\n"
                    found.append((text + sign + str(digit), steps + step, new))
    return found

def make_problems():
    """The 14,520 sums of 3 or 4 digits, shuffled, as rows such as {"question": "7+2-5=?", "answer":
    "7+2=9\\n9-5=4\\n#### 4"}. A fifth, by a hash of the question, is the test split."""
    splits, found = {"train": [], "test": []}, sums(3) + sums(4)
    random.Random(0).shuffle(found)
    for text, steps, result in found:
        row = {"question": f"{text}=?", "answer": f"{steps}#### {result}"}
        splits["test" if zlib.crc32(row["question"].encode()) % 5 == 0 else "train"].append(row)
    return splits

def make_model():
    """A small Qwen3, not yet trained, and its tokenizer: one token per character, and three special
    ones. Large initial weights and a small rope_theta make the model learn faster."""
    special = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
    template = r"{% for m in messages %}{{ m['content'] + '\n' }}{% endfor %}"
    vocabulary = {token: i for i, token in enumerate([*"0123456789+-=?# \n", *special.values()])}
    characters = Tokenizer(models.WordLevel(vocabulary, special["unk_token"]))
    characters.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    characters.decoder = decoders.Fuse()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=characters, chat_template=template, **special)
    torch.manual_seed(0)
    return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=4, head_dim=16, max_position_embeddings=256,
        rope_parameters={"rope_type": "default", "rope_theta": 30.0}, initializer_range=0.1,
        tie_word_embeddings=True, bos_token_id=None, eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id)), tokenizer

def warm_up(model, tokenizer, problems):
    """Train the model on STEPS batches: WORKED completions with the steps, GUESSED without."""
    rng, batches = random.Random(0), []
    for _ in range(STEPS):
        questions, texts = [], []
        for i, row in enumerate(rng.sample(problems, WORKED + GUESSED)):
            guess = int(row["answer"].split()[-1]) + rng.randint(-2, 2)
            questions.append(row["question"] + "\n")
            texts.append((row["answer"] if i < WORKED else f"#### {guess}") + tokenizer.eos_token)
        batches.append((tokenizer(questions)["input_ids"], tokenizer(texts)["input_ids"]))
    args = grpo.parse_args(["--device", "cpu", "--no-gradient_checkpointing", "--warmup_steps", "0"])
    args.lr = LR
    optimizer = torch.optim.AdamW(model.parameters(), LR, betas=(0.9, 0.99), weight_decay=0.01)
    sft.train(model, optimizer, batches, args, every=100)

if __name__ == "__main__":
    problems = make_problems()
    for split, rows in problems.items():
        lines = [json.dumps(row) + "\n" for row in rows]
        (HERE / f"{split}.jsonl").write_text("".join(lines), encoding="utf-8", newline="\n")
    torch.set_num_threads(1)  # a second one does not help with matrices this small
    model, tokenizer = make_model()
    warm_up(model, tokenizer, problems["train"])
    model.save_pretrained(HERE)
    tokenizer.save_pretrained(HERE)

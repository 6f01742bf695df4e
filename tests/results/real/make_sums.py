"""Sums in words for README.md, such as "What is forty-two plus seventeen?".

    python tests/results/real/make_sums.py runs/sums

Writes into the directory, each row with "question", "answer" and "solution", such as
"42 + 17 = 59\\n#### 59":
    warmup.jsonl          112 problems, for tests/tools/sft.py
    problems/test.jsonl   2,000 others, held out
    problems/train.jsonl  10,000 others, for RL
They are sampled from the 15,050 problems "a plus b" and "a minus b" with a and b from 0 to 99 and a result of
at least 0. No problem occurs twice, and "a plus b" is in the same file as "b plus a".
"""
import random
import sys
from pathlib import Path

from make_problems import write

ONES = """zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen
    sixteen seventeen eighteen nineteen""".split()
TENS = "twenty thirty forty fifty sixty seventy eighty ninety".split()


def words(n):
    """Write a number from 0 to 99 as words: 42 -> 'forty-two'."""
    if n < 20:
        return ONES[n]
    tens = TENS[n // 10 - 2]
    return f"{tens}-{ONES[n % 10]}" if n % 10 else tens


def problem(a, name, b):
    """One problem, where `name` is plus or minus."""
    sign, answer = ("+", a + b) if name == "plus" else ("-", a - b)
    return {"question": f"What is {words(a)} {name} {words(b)}?", "answer": str(answer),
            "solution": f"{a} {sign} {b} = {answer}\n#### {answer}"}


def all_problems():
    """Every problem, in lists that must stay together: one subtraction, or a sum and its mirror image."""
    groups = []
    for a in range(100):
        for b in range(a + 1):
            groups.append([problem(a, "minus", b)])
            groups.append([problem(x, "plus", y) for x, y in sorted({(a, b), (b, a)})])
    return groups


if __name__ == "__main__":
    out = Path(sys.argv[1])
    sizes = {"warmup.jsonl": 112, "problems/test.jsonl": 2000, "problems/train.jsonl": 10000}
    parts = {name: [] for name in sizes}
    groups = all_problems()
    random.Random(0).shuffle(groups)
    for group in groups:
        for name, size in sizes.items():
            if len(parts[name]) + len(group) <= size:
                parts[name] += group
                break
    for name, rows in parts.items():
        write(out / name, rows)

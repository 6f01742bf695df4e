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
WORDS = ONES + [ten + f"-{one}" * (one != "zero") for ten in TENS for one in ONES[:10]]
SIZES = {"warmup.jsonl": 112, "problems/test.jsonl": 2000, "problems/train.jsonl": 10000}

def problem(a, name, b):
    """One problem, where `name` is plus or minus."""
    sign, answer = ("+", a + b) if name == "plus" else ("-", a - b)
    return {"question": f"What is {WORDS[a]} {name} {WORDS[b]}?", "answer": str(answer),
            "solution": f"{a} {sign} {b} = {answer}\n#### {answer}"}

if __name__ == "__main__":
    groups, parts = [], {name: [] for name in SIZES}  # a group stays together
    for a in range(100):
        for b in range(a + 1):
            groups.append([problem(a, "minus", b)])
            groups.append([problem(x, "plus", y) for x, y in sorted({(a, b), (b, a)})])
    random.Random(0).shuffle(groups)
    for group in groups:
        for name, rows in parts.items():
            if len(rows) + len(group) <= SIZES[name]:
                rows += group
                break
    for name, rows in parts.items():
        write(Path(sys.argv[1], name), rows)

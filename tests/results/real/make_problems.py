"""The word problems of README.md, from a clone of github.com/arkilpatel/SVAMP (MIT license).

    git clone --depth 1 https://github.com/arkilpatel/SVAMP runs/SVAMP
    python tests/results/real/make_problems.py runs/SVAMP runs/data

Writes into the second directory:
    warmup.jsonl          600 problems of MAWPS and ASDiv-A, for tests/tools/sft.py, each with "question",
                          "answer" and "solution", such as "27 * 16 = 432\\n#### 432"
    problems/test.jsonl   400 others of them, held out
    problems/train.jsonl  the rest, 748, for RL
    svamp.jsonl           SVAMP's 1,000 problems, of another kind, never trained on

MAWPS and ASDiv-A contain many problems twice, differing in a comma or a capital letter. Comparing only
letters and digits, no question occurs twice, in one file or in two.
"""
import csv
import json
import operator
import random
import re
import sys
from pathlib import Path

OPERATIONS = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv}

def number(x):
    """Write 4.0 as '4' and .5 as '0.5'."""
    x = float(x)
    return str(int(x)) if x == int(x) else str(x)

def solved_problems(path):
    """The problems that one operation solves, such as '* number0 number1', and gives their answer."""
    rows = []
    for row in csv.DictReader(path.open(encoding="utf-8")):
        numbers = {f"number{i}": x for i, x in enumerate(row["Numbers"].split())}
        sign, *terms = row["Equation"].split()
        if len(terms) != 2:
            continue
        a, b = (number(numbers.get(term, term)) for term in terms)
        answer = number(round(float(row["Answer"]), 4))
        if number(round(OPERATIONS[sign](float(a), float(b)), 4)) == answer:
            question = re.sub(r"number\d+", lambda match: number(numbers[match[0]]), row["Question"])
            question = re.sub(r" ([.,?!%)])", r"\1", question).replace(" 's", "'s").replace("$ ", "$")
            rows.append({"question": question, "answer": answer,
                         "solution": f"{a} {sign} {b} = {answer}\n#### {answer}"})
    return rows

def svamp_problems(path):
    """SVAMP's problems, without solutions."""
    return [{"question": f"{row['Body'].rstrip('. ')}. {row['Question']}".replace("$ ", "$"),
             "answer": number(row["Answer"])} for row in json.loads(path.read_text(encoding="utf-8"))]

def key(row):
    """The letters and digits of a question, equal for 'Tom has 2, Ann 3.' and 'tom has 2 Ann 3'."""
    return re.sub(r"[^a-z0-9]", "", row["question"].lower())

def write(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    print(f"{path}: {len(rows)}")

if __name__ == "__main__":
    clone, out = map(Path, sys.argv[1:])
    solved = solved_problems(clone / "data" / "mawps-asdiv-a_svamp" / "train.csv")
    svamp = svamp_problems(clone / "SVAMP.json")
    random.Random(0).shuffle(solved)
    unique = {}
    for row in solved:
        unique.setdefault(key(row), row)
    held_out = set(map(key, svamp))
    solved = [row for name, row in unique.items() if name not in held_out]
    write(out / "warmup.jsonl", solved[:600])
    write(out / "problems" / "test.jsonl", solved[600:1000])
    write(out / "problems" / "train.jsonl", solved[1000:])
    write(out / "svamp.jsonl", svamp)

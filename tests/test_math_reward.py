"""math_reward accepts a right answer in any spelling and nothing else; no completion can crash or hang it."""
import itertools
import random
import timeit

import pytest

from common import extract_answer, math_reward

def pairs(table):
    return [tuple(pair.strip().split(" ~ ")) for pair in table.split(" |")]

EQUAL = pairs(r"""
7 ~ 7. | -7 ~ - 7 | -7 ~ −7 | 12500 ~ 12,500 | 0.25 ~ .25 | \frac{3}{8} ~ \dfrac38 | 3/8 ~ \frac{6}{16} |
-11/8 ~ -1 3/8 | -11/8 ~ - 1 3/8 | -1234 ~ -1,234 | -1234.5 ~ - 1,234.50 |
11/8 ~ 1 3/8 | 12/11 ~ 1 \frac{1}{11} | 9 ~ \left( 9 \right) | \$9 ~ 9\text{ dollars} | 35\% ~ 35 % |
50^\circ ~ 50 | 50 ~ 50° | 8 ~ f(3) = 8 | [0,1] ~ x \in [0, 1] | 5\sqrt{7} ~ 5\cdot\sqrt7 |
9 ~ 9 \mbox{ cm}^2 | 5\sqrt{7} ~ 5*sqrt(7) | 5\pi ~ 5 π | x \le 4 ~ x ≤ 4 | x \ge 4 ~ x ≥ 4 |
x \ge 4 ~ x\geq 4 | 3*10^5 ~ 3\times10^{5} | 1,2,3 ~ 3, 1 \text{ and } 2 | x \le 4 ~ x \leqslant 4 |
(0.5,1) ~ (\frac12, 1) | x=.5 ~ x=1/2 | 1,2 ~ 1 or 2 | 1,2 ~ 2 and 1 | \text{Ann, Bo} ~ \mathrm{Bo, Ann} |
\frac{2x}{3} ~ 2x/3 | y=2 ~ x=2 | 1 ~ 1 hour | 9 ~ 9 inches | \sqrt\frac34 ~ \sqrt\tfrac{3}{4} |
D ~ \textbf{(D)} | 9 ~ 9 seconds | 10 ~ 10\% | 9 ~ 9 ft | 9 ~ **9** | 3/8 ~ \displaystyle\frac{3}{8} |
5\pi ~ 5\pi\text{ cm} | -7 ~ –7 | true ~ True | 1234 ~ 1{,}234~km | 1,2 ~ {1, 2} |
\text{No solution} ~ no solution. | New York ~ NEW YORK | 2 ~ 2m | 9 ~ 9 kg |
\{100,200\} ~ 200, 100
""") + [("2" * 500, "2" * 500 + ".0")]
UNEQUAL = pairs(r"""
6 ~ 2+2+2 = 6 | 7 ~ -7 | 7 ~ 7.00000000000000000001 | 9007199254740992 ~ 9007199254740993 | 1500 ~ (1,500) |
12345 ~ 12,34,5 | 7 ~ 7.5 | 70 ~ 7 0 | 12500 ~ 12 | 12345 ~ 1,2345 | 1/3 ~ 0.3333333 | 11/8 ~ 1 + 3 |
125 ~ 0,125 | 3/8 ~ 8/3 | 9 ~ 9 million | 49 ~ 4² | R-r ~ r-R | R ~ r | 1 ~ - | 9 ~ 9million | 2 ~ 2 thirds |
2ab ~ 2ba | 3 ~ x != 3 | 9 ~ 10, 9 | 9 ~ 9 = 10 | 0 ~ a + b = 0 | 9 ~ \pm 9 | x=1,y=2 ~ x=2,y=1 | 0.2% ~ 20% |
1/0 ~ 1 | 4\sqrt{3} ~ \sqrt[3]{4} | 9 ~ 9, 9 | 5 ~ 5\pi | x^2 ~ x2 | x^{2}3 ~ x^{23} | 5 ~ 5xy |
\frac{a+b}{2} ~ a+b/2 | (1,2) ~ (2,1) | x \le 4 ~ x \geq 4 | (1,2) ~ [1,2] | 1,2,3 ~ 1,2 | x<4 ~ x>4 |
ABC ~ CAB | 120 ~ 5! | 9 ~ ٩ | 5 ~ \sin 5 | 9 ~ __import__('os') | 9 ~ 9**9**9**9 | (1,2,3,4) ~ (1,3,2,4) |
\sqrt{3}/4 ~ \sqrt\frac34 | 0.1 ~ 10% | \frac{x^2}{3} ~ x^\frac{2}{3} | \frac{\sqrt{3}}{4} ~ \sqrt\frac34 |
\frac{\log_2 5}{3} ~ \log_2\frac{5}{3} | x \le 1 \text{ or } x>4 ~ x \le 1 \text{ and } x>4 |
a<1 or a>4 ~ a<1 and a>4 | B ~ A or B | 1234567 ~ 1234,567 | A ~ A. 1 B. 2 | x ~ x = 5 | \Delta ~ \delta |
14 ~ 14 apples | x ~ X | -5/8 ~ -1 3/8 | -1234 ~ -1, 234 | 12 ~ 1{,}2 | x^{2}3 ~ x^{\mathrm{2}3}
""") + [("9", ""), ("", ""), ("9", " "), ("9", "\ud83d"), ("9", "\x00")]
EXTRACT = pairs(r"""
so \boxed{4} ~ 4 | \boxed{\{1\}} ~ \{1\} | \boxed{4} as 5 > 4 ~ 4 | <answer>3</answer><answer>4</answer> ~ 4 |
\boxed{\frac{1}{2}} ~ \frac{1}{2} | \boxed{3} no, wait: \boxed{4} ~ 4 | <answer>4</answer> ~ 4 | #### 4 ~ 4 |
\boxed{\boxed{4}} ~ 4 | <answer>so \boxed{4}</answer> ~ 4 | \boxed{5} #### 4 ~ 4 | #### 5 \boxed{4} ~ 4 |
\boxed{5}<answer>4</answer> ~ 4
""") + [("#### 3\n#### 4\nDone", "4"), ("####\n4", "4"), ("#### 4\t\r\nDone", "4"),
           ("\\boxed{4\xa0}", "4"), ("\\boxed{" + "4" * 600 + "}", "4" * 600)]
NOTHING = ["\\boxed{4", "\\boxed{3} hm \\boxed{4", "\\boxed{}", "\\boxed", "\\boxed{" + "4" * 601 + "}",
           "####", "", "the answer is 4", "a set {1} } 4", "<answer>4", "<answer></answer>", "4</answer>",
           "#### " + "4" * 601]
HOSTILE = r"\boxed{ \boxed{1} <answer> #### { } \ $ 1, a= \boxed{((((".split() + ["1 ", " "]
INSIDE = ["(", "1,", "1 ", "{1", "√", "\\frac", "\\frac{1}{", "frac{", "a=", "(a,", "<", "±1,", "x^", "9",
          "+ ", "( )/", "/9e999", "1 1/", "=,", "3 cm", "1,234%", "text", "text {", "sqrt(", "frac12", "\\"]

def graded(answer, gold):
    return math_reward(f"Thus $\\boxed{{{answer}}}$.", gold)

@pytest.mark.parametrize("gold, answer", EQUAL)
def test_the_same_answer_in_another_spelling_is_right(gold, answer):
    assert graded(answer, gold) == graded(gold, answer) == graded(gold, gold) == 1.0
    assert math_reward(f"<answer> {answer} </answer>", gold) == 1.0
    assert math_reward(f"so\n#### {answer}\n", f"why\n#### {gold}") == 1.0

@pytest.mark.parametrize("gold, answer", UNEQUAL)
def test_another_answer_is_wrong(gold, answer):
    assert graded(answer, gold) == graded(gold, answer) == 0.0
    assert math_reward(f"<answer>{answer}</answer>", gold) == 0.0

def test_extract_answer():
    assert [extract_answer(completion) for completion, _ in EXTRACT] == [answer for _, answer in EXTRACT]
    assert not any(map(extract_answer, NOTHING))

def test_noise_never_raises_and_is_wrong():
    rng = random.Random(0)
    alphabet = [*"0123456789.,-+*/^_=<>()[]{}%$!|&; \n\\axe\x00²√±π\ud83d\ue000", *"()/{}+ " * 2]
    alphabet += ["\\frac", "\\boxed{", "\\text{", "\\sqrt", "\\pm", "####", "9e999", "9e-999"]
    for _ in range(2000):
        text = "".join(rng.choices(alphabet, k=rng.randrange(40)))
        own = math_reward(f"<answer>{text}</answer>", text)
        assert {own, graded(text, "123.75"), graded("123.75", text)} <= {0.0, 1.0}

def seconds(text, gold):
    return min(timeit.repeat(lambda: math_reward(text, gold), number=1, repeat=3))

def test_linear_time_on_long_completions_and_bounded_time_on_any_answer():
    for piece in HOSTILE:  # ten times the length
        assert seconds(piece * 200_000, "42") < max(0.02, 30 * seconds(piece * 20_000, "42")), piece
    for piece, length in itertools.product(INSIDE, (400, 590, 5_300, 300_000)):
        assert seconds(f"\\boxed{{{piece * (length // len(piece))}7}}", "42" * 280) < 0.2, piece  # 0.02 here

"""GSPO beyond the worked numbers of test_equations.py: value and gradient against loops over single numbers,
GSPO beside GRPO in whole updates, and GSPO-token with the rule for worked steps."""
import math
import time

import pytest
import torch
from conftest import (
    Trainer, loss_of, make_batch, random_rows, settings, slopes, tensor64, tiny_model, word_tokenizer)

import common
import grpo
import gspo

AWAY = {"eps_low": 0.99, "eps_high": 100.0}  # a clip range that is never left

def surrogate(rows, args, frozen=None):
    """The objective in floats, token by token: J summed over rows, and the tokens of clipped rows. The ratio
    of GSPO-token is s of the `frozen` log-probs times the token's own way from there."""
    J, clipped, adv = 0.0, 0, rows["adv"].expand_as(rows["mask"])
    frozen = rows["logp"] if frozen is None else frozen
    for i, n in enumerate(rows["mask"].sum(1).long().tolist()):
        logp, old, ref = (rows[name][i].tolist() for name in ("logp", "old_logp", "ref_logp"))
        start = frozen[i].tolist()
        for t in range(n):
            s = math.exp(sum(a - b for a, b in zip((start if args.token_level else logp)[:n], old)) / n)
            s *= math.exp(logp[t] - start[t]) if args.token_level else 1
            A, w, x = adv[i, t].item(), math.exp(logp[t] - old[t]), math.exp(ref[t] - logp[t])
            held = min(max(s, 1 - args.eps_low), 1 + args.eps_high)
            penalty = (x - math.log(x) - 1) * (w if args.kl == "wk3" else 1)  # w_it, not s_i
            J, clipped = J + (min(s * A, held * A) - args.beta * penalty) / n, clipped + (held * A < s * A)
    return J, clipped

@pytest.mark.parametrize("eps", [{"eps_low": 0.03, "eps_high": 0.05}, AWAY])
@pytest.mark.parametrize("token_level", [False, True])
@pytest.mark.parametrize("kl", [{}, {"beta": 0.3}, {"beta": 0.3, "kl": "wk3"}])
def test_value_gradient_and_statistics_equal_a_float_loop(eps, token_level, kl):
    """On ragged rows; the gradient by central differences of the loop. Padding in the mean of the log-ratios,
    their sum, a clip on the wrong side, a token's KL weighted by its row's ratio: each shows."""
    for seed in range(3):
        rows, args = random_rows(seed, spread=0.3), settings(gspo, token_level=token_level, **eps, **kl)
        rows["adv"] = torch.randn(5, 6).double() if token_level else rows["adv"]
        J, clipped = surrogate(rows, args)
        loss, gradient, stats = loss_of(gspo, rows if kl else rows | {"ref_logp": None}, args)
        expected = slopes(lambda x: surrogate(rows | {"logp": x}, args, rows["logp"])[0], rows["logp"])
        assert -loss.item() == pytest.approx(J, rel=1e-10)
        torch.testing.assert_close(-gradient, expected, rtol=1e-6, atol=1e-8)
        assert [float(x) for x in stats["clip_frac"]] == [clipped, 18]
        assert [float(x) for x in stats["loss"]] == [loss.item(), 5]

def test_the_ratio_does_not_grow_with_length():
    """Log-ratios of .001, summed over 100 tokens, would make 1.105; their mean makes 1.001."""
    for T in (1, 10, 100):
        x = torch.full((1, T), 1e-3).double()
        rows = {"logp": x, "old_logp": 0 * x, "ref_logp": None, "adv": tensor64([[1.0]]), "mask": 0 * x + 1}
        loss, gradient, stats = loss_of(gspo, rows, settings(gspo, **AWAY))
        assert [-loss.item(), stats["ratio_max"].item()] == pytest.approx([1.0010005] * 2, abs=1e-9)
        torch.testing.assert_close(gradient, 0 * x - 1.0010005 / T, rtol=1e-6, atol=0)

def test_float32_is_precise_enough_for_the_papers_clip_range():
    """Any step of the ratio taken in bfloat16 would miss by as much as the range is wide, 3e-4."""
    rows = random_rows(lengths=(100,) * 50, spread=1e-3)
    s = (rows["logp"] - rows["old_logp"]).mean(1, keepdim=True).exp()
    gradient = loss_of(gspo, {name: x.float() for name, x in rows.items()}, settings(gspo, **AWAY))[1]
    torch.testing.assert_close(gradient.double(), (-s * rows["adv"] / 100).expand(50, 100), rtol=3e-6, atol=0)

def test_clip_frac_is_weighted_by_tokens_so_that_it_compares_with_grpos():
    """Rows of 5 + 1 + 2 tokens, the first clipped: 5/8 and not 1/3, also of two micro-batches."""
    w = tensor64([[1.5] * 5, [1, 9, 9, 9, 9], [1.3, 1 / 1.3, 9, 9, 9]])
    mask = tensor64([[1, 1, 1, 1, 1], [1, 0, 0, 0, 0], [1, 1, 0, 0, 0]])
    rows = {"logp": w.log(), "old_logp": 0 * w, "ref_logp": w, "adv": mask[:, :1], "mask": mask}
    args, logged = settings(gspo, eps_low=0.2, eps_high=0.2), []
    for cut in (slice(0, 1), slice(1, 3)):
        stats = loss_of(gspo, {name: x[cut] for name, x in rows.items()}, args)[2]
        logged.append(stats)
    assert common.means(logged)["clip_frac"] == 5 / 8

# --- updates, beside GRPO's

def weights_after(script, **flags):
    """The policy's weights after one update, and its statistics."""
    trainer = Trainer(script, beta=0.0, **flags)
    trainer.use_adam(lr=1e-3)
    stats = trainer.update()
    return torch.cat([p.detach().flatten() for p in trainer.policy.parameters()]), stats

@pytest.mark.parametrize("minibatches", [1, 2])
def test_an_update_equals_grpos_as_long_as_it_is_one_optimiser_step(minibatches):
    """At ratio 1 the gradients are the same; from the second minibatch on the ratio of the sequence tells."""
    ours, theirs = (weights_after(script, minibatches=minibatches, **AWAY)[0] for script in (gspo, grpo))
    apart = (ours - theirs).abs().max()
    assert apart < 1e-6 if minibatches == 1 else apart > 1e-4

def test_the_papers_range_binds_in_an_update_and_a_token_range_does_not():
    """From the second minibatch on rows leave (1 - 3e-4, 1 + 4e-4), the default; few ever leave GRPO's .2."""
    args = gspo.parse_args([])
    assert (args.eps_low, args.eps_high, args.minibatches, args.beta) == (3e-4, 4e-4, 4, 0)
    _, narrow = weights_after(gspo, minibatches=4)
    _, wide = weights_after(gspo, minibatches=4, eps_low=0.2, eps_high=0.2)
    assert 0.05 < narrow["clip_frac"] <= 0.75 and wide["clip_frac"] == 0  # nothing is in the first minibatch

# --- GSPO-token and the worked steps

PIECES = "<unk>|<eos>|7+|2=9|\n|9-|5|=4\n|####| 4|2=8\n\n|1+1=3|so\n|4=5\n3+".split("|")
COMPLETIONS = [  # (prompt, completion, the sign of each of its tokens)
    ("1+1=3|\n", "7+|2=9|\n|9-|5|=4\n|####| 4|<eos>", [1, 1, 1, 1, 1, 1, 0, 0, 0]),
    ("so\n", "7+|2=8\n\n|7+|2=9|\n|####| 4", [-1, -1, 1, 1, 1, 0, 0]),
    ("7+|2=9|\n", "so\n|1+1=3|\n|<eos>", [0, -1, -1, 0]),
    ("so\n|7+", "2=9|\n|7+|2=9", [0, 0, 1, 1]),  # the prompt's "7+" is no part of the line; the last is cut
    ("7+", "9-|4=5\n3+|2=9|\n|7+", [1, 1, -1, -1, 0])]
LINES = {  # signs that are right, for what is a step, what is none, and what may stay unread
    (1,): "7+2=9|9-4=5|3*4=12|7 + 2 = 9|12+30=42|7-2=5.|2-5=-3|-3+4=1|-3-4=-7|-6*2=-12|12-5=7",
    (-1,): "7+2=8|9-4=6|3*4=13|7 + 2 = 10|2-5=3|-3+4=7|12-5=-3",
    (0,): "|7|#### 4|7+2=|7+2|=9|+2=9|7+2=?|9=7+2|x+2=9|9**9**9**9=1",
    (0, 1): "7+2=9, 9-5=4|7+2=9=8+1|so 7+2=9|7+2-5=4|1-3+4=2|2+3*4=14|5 - 3+4=6|1,000+5=1,005|2+3=4+1"
            "|2+(3+4)=9|2^3+1=9|10/4=2.5|7+2=9=10-1|1.5+2=3.5|8/2=4|\u0663+\u0664=\u0667|7\u22122=5",
    (0, -1): "7+2=9, 9-5=5|7+2=8 and 9-5=5|7+2=9=8|so 7+2=8|1000000002-1=1|0.5+2=7|2*3+1=4|7-2+5=7|1,002-1=1"
             "|8/2=3|5/0=0|0/0=0|0/0=1|9/0=999999999"}

def spelt(text):
    return [PIECES.index(piece) for piece in text.split("|")]

def sign_of(line):
    """The sign of a line that is a single token."""
    tokenizer = word_tokenizer(["<unk>", "<eos>", line + "\n"], "<eos>", "<unk>")
    return common.step_signs(make_batch([[0]], [[2]]), tokenizer).item()

@pytest.mark.parametrize("signs", LINES)
def test_a_line_is_a_true_step_a_false_one_or_none(signs):
    """A sign lost ("2-5=-3"), a number cut ("2-5=7" of "12-5=7"), a part read for the whole ("7+2-5=4")."""
    found = {line: sign_of(line) for line in LINES[signs].split("|")}
    assert not {line: sign for line, sign in found.items() if sign not in signs}

def test_hostile_lines_cost_milliseconds():
    """No eval, no integer of a million digits, no backtracking."""
    began, many = time.perf_counter(), 10 ** 5
    for line in ["9" * many + "+1=1", "1+" * many + "=1", "-" * many, "1 " * many, " " * many + "1"]:
        assert sign_of(line) == sign_of("1+1=2" + " ." * many + line) == 0
    assert time.perf_counter() - began < 1

def test_tokens_have_the_sign_of_the_line_in_which_they_begin():
    """Tokens of many characters, line ends inside them, rows of other lengths, equations in prompts."""
    prompts, texts, signs = zip(*COMPLETIONS)
    batch = make_batch([spelt(text) for text in prompts], [spelt(text) for text in texts])
    found = common.step_signs(batch, word_tokenizer(PIECES, "<eos>", "<unk>"))
    assert found.tolist() == [row + [0] * (9 - len(row)) for row in signs]

def test_collect_neither_punishes_true_steps_nor_rewards_false_ones(monkeypatch):
    """All other tokens keep the advantage of their completion: a for the right one, -a for the wrong one."""
    trainer = Trainer(gspo, group_size=2)
    texts = ["7+|2=9|\n|1+1=3|\n|<eos>", "9-|5|=4\n|7+|2=8\n\n"]
    batch = make_batch([[12], [12]], [spelt(text) for text in texts])
    batch |= {"texts": texts, "finished": torch.ones(2), "seconds": 1.0}
    monkeypatch.setattr(common, "generate", lambda *_: dict(batch))
    trainer.policy, trainer.tokenizer = tiny_model(vocab_size=14), word_tokenizer(PIECES, "<eos>", "<unk>")
    trainer.reference, trainer.problems, trainer.reward = None, [{"prompt": [12]}], lambda *_: [1, 0]
    a = 0.5 / (math.sqrt(0.5) + 1e-4)
    for token_level, expected in [(False, [[a], [-a]]), (True, [[a, a, a, 0, 0, a], [0, 0, 0, -a, -a, -a]])]:
        trainer.args.token_level = token_level
        trainer.collect()
        assert trainer.rollout["adv"].tolist() == [pytest.approx(row) for row in expected]

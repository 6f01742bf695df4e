"""The pictures show what the runs logged, and the pushes are those of the scripts."""
import subprocess
import sys

import pandas
import plot
import pytest
import torch
from conftest import ROOT

sys.path.insert(0, str(ROOT / "tests" / "results"))
import pushes as picture  # noqa: E402

def test_curves_are_means_and_ranges_at_the_steps_of_all_runs():
    """A band from the lowest run to the highest cannot leave what is possible: no KL below 0."""
    runs = pandas.DataFrame({"step": [0, 2, 4, 0, 2, 4], "kl": [1, 2, 7, 3, None, 7]})
    assert plot.curve(runs, "kl").to_dict("split", index=False)["data"] == [[2, 1, 3, 2], [7, 7, 7, 2]]
    assert plot.curve(runs.assign(kl=float("nan")), "kl").empty
    three = pandas.DataFrame({"step": [1, 1, 1], "kl": [0, 0, 9]})  # their median is 0
    assert plot.curve(three, "kl")["mean"].tolist() == [3]

def test_a_run_is_a_directory_or_rows_of_a_table(tmp_path):
    """A run that has logged nothing yet, and a directory that is no run, are left out of the picture."""
    pytest.importorskip("matplotlib")
    for name, text in [("killed-s0", ""), ("ppo-seed1", '{"step": 0, "eval_accuracy": 0.5}\n')]:
        (tmp_path / name).mkdir()
        (tmp_path / name / "metrics.jsonl").write_text(text)
    assert plot.read(tmp_path / "ppo-seed1").to_dict("records") == [
        {"step": 0, "eval_accuracy": 0.5, "run": "ppo", "seed": 1}]
    (tmp_path / "model").mkdir()
    results, program = ROOT / "tests" / "results", [sys.executable, ROOT / "tests" / "plot.py"]
    for flags in ([results / "toy.csv", *tmp_path.iterdir()],
                  [*results.glob("questions/*.csv"), "--of", "eval_sampled_accuracy", "--logit"]):
        subprocess.run([*program, *flags, "--out", tmp_path / "curves.png"], check=True)

def test_the_first_group_of_all_four_kinds_is_shown():
    """Groups of four: the second has right and wrong ones, worked out and guessed; so has the third."""
    worked, guessed = "1+1=2\n#### 2", "#### 2"
    texts = [guessed] * 4 + [guessed, worked, guessed, worked] + [worked, worked, guessed, guessed]
    rewards = [1, 0, 0, 1] + [0, 0, 1, 1] + [1, 0, 1, 0]
    rollout = {"texts": texts, "rewards": torch.tensor(rewards)}
    right, wrong = {(True, True): 7, (True, False): 6}, {(False, True): 5, (False, False): 4}
    assert picture.four_kinds(rollout, 4) == right | wrong

def test_pushes_are_up_for_right_answers_down_for_wrong_ones_and_nothing_where_the_clip_holds():
    """GSPO: all tokens of a completion alike, s A / |o|, or none: where a right one has s above 1.0004 and a
    wrong one below .9997. GRPO: of one sign. PPO judges tokens: both signs may occur."""
    question, shown = picture.measure(steps=2, prompts=16)
    assert question.endswith("=?") and len(shown) > 2
    held = 0
    for kind, tokens, pushes, s in shown:
        sign = 1 if kind.endswith("right") else -1
        assert tokens[-1] == "∎" and ("\n" in tokens) == kind.startswith("worked")
        assert all(len(pushes[name]) == len(tokens) for name in ("ppo", "grpo", "gspo"))
        gspo = pushes["gspo"][0]
        assert pushes["gspo"] == pytest.approx([gspo] * len(tokens))
        assert (gspo == 0) == (s > 1.0004 if sign > 0 else s < 0.9997)
        assert all(sign * push >= 0 for push in pushes["grpo"]) and sign * gspo >= 0
        if gspo:  # the same A and |o|: their ratio is w / s, and the mean of log w is log s
            assert 0.5 < pushes["grpo"][0] / gspo < 2
        held += gspo == 0
    assert 0 < held < len(shown)

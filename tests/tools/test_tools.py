"""The tools: smoke tests, and tests of what would go wrong silently."""
import json
import os

import evaluate
import pandas
import plot
import pytest
import torch
import walk
from conftest import ROOT, spy, tiny_model, write_jsonl

import common
import grpo
import gspo
import ppo

def test_curves_are_means_and_ranges_at_the_steps_of_all_runs(tmp_path):
    for run, values in [("a-s0", [1, 2, 7]), ("a-s1", [3, None, 7])]:
        (tmp_path / run).mkdir()
        write_jsonl(tmp_path / run / "metrics.jsonl", [{"step": i, "mine": x} for i, x in enumerate(values)])
    runs = pandas.concat(plot.read(tmp_path / run) for run in ("a-s0", "a-s1"))
    assert set(runs["run"]) == {"a"}
    assert plot.curve(runs, "mine").to_dict("split")["data"] == [[2, 1, 3, 2], [7, 7, 7, 2]]

@pytest.mark.parametrize("script", [ppo, grpo, gspo], ids=lambda script: script.__name__)
def test_the_pushes_of_a_step(script, tmp_path, monkeypatch, capsys):
    """While pi is pi_old, w is 1, and a completion's pushes add up to the mean advantage of its tokens."""
    monkeypatch.chdir(tmp_path)
    flags = "--device cpu --prompts 4 --group_size 8 --minibatches 2 --lr 3e-3 --steps 2"
    seen = walk.watch(script, script.parse_args(flags.split()))
    push, adv, mask = walk.pushes_of(seen, seen["logps"][0]), seen["rows"]["adv"], seen["rows"]["mask"]
    means = (adv * mask).sum(1) / mask.sum(1)
    assert push.sum(1).tolist() == pytest.approx(means.tolist(), abs=1e-6) and means.abs().max() > 0.1
    monkeypatch.setattr(walk, "watch", lambda script, args: seen)
    walk.main(["--script", script.__name__])
    marks = capsys.readouterr().out.split("question and completion\n")[1].splitlines()[1].strip()
    assert ["▼▽·△▲".index(mark) > 2 for mark in marks] == (push[0][mask[0] > 0] > 0).tolist()
    assert not os.listdir()

def test_models_are_compared_problem_by_problem(tmp_path, monkeypatch, capsys):
    def evaluated(flags):
        evaluate.main(evaluate.parse_args(f"--device cpu --dataset few.jsonl {flags}".split()))
        return json.loads(capsys.readouterr().out.splitlines()[-1], parse_constant=pytest.fail)
    monkeypatch.chdir(tmp_path)
    rows = (ROOT / "tests/toy/test.jsonl").read_text(encoding="utf-8").splitlines()[:30]
    (tmp_path / "few.jsonl").write_text("\n".join(rows), encoding="utf-8")
    flags = "--eval_samples 2 --compare models.jsonl --seed"
    graded = spy(monkeypatch, common, "answer_reward")
    results = [evaluated(f"{flags} {seed}") for seed in (0, 1)]
    first, last = (json.loads(line)["accuracy"] for line in (tmp_path / "models.jsonl").open())
    gains = [b - a for a, b in zip(first, last)]
    assert any(gains) and [result["gain"] for result in results] == [[0, 0], evaluate.mean_and_error(gains)]
    assert evaluate.mean_and_error([0, 0, 1, 1]) == [0.5, 0.2887]  # std .5774 / 2
    pairs = list(zip(graded[-1].result[::2], graded[-1].result[1::2], strict=True))
    solved, means = [max(pair) for pair in pairs], [sum(pair) / 2 for pair in pairs]
    assert results[1]["pass@2"] == evaluate.mean_and_error(solved) and sum(solved) > sum(last)
    assert last == means and graded[-1].problems[::2] == graded[-1].problems[1::2]
    assert evaluated("--eval_problems 1")["accuracy"][1] is None
    (tmp_path / "few.jsonl").write_text("\n".join(rows[1:]), encoding="utf-8")
    with pytest.raises(AssertionError, match="other problems"):
        evaluated(f"{flags} 0")

def test_temperature_0_decodes_greedily():
    args = evaluate.parse_args("--device cpu --temperature 0 --max_new_tokens 9".split())
    model, prompt = tiny_model().eval(), [5, 6, 7]
    tokens, _ = common.sample(model, [prompt], 4, torch.tensor([64]), args)  # (4, 9); no token is 64
    logits = model(torch.cat([torch.tensor([prompt] * 4), tokens], 1)).logits
    assert torch.equal(tokens, logits[:, 2:-1].argmax(-1))

def test_a_checkpoint_is_evaluated_with_the_flags_of_its_run(tmp_path):
    """Here of ppo.py, which has more flags. Flags on the command line win."""
    run = ppo.parse_args("--model m --dataset d --system_prompt=Solve --dtype bfloat16 --steps 7".split())
    (tmp_path / "args.json").write_text(json.dumps(vars(run)), encoding="utf-8")
    args = evaluate.parse_args(f"--model {tmp_path}/step-20/ --dataset d --dtype float32".split())
    assert (args.system_prompt, args.dtype, args.prompts) == ("Solve", "float32", 256)

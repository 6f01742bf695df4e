"""tests/vectors/vectors.json, which tests an implementation in another language: check_vectors.py makes it, and our
scripts and forks say the same. Their own collect and update run here, but a model is a table, (N, 9), of
log-probs or of values. It has junk in the padding and, if the mask has holes, between the tokens."""
import importlib
import json
import types

import pytest
import torch
from check_vectors import FILE, fill, share, text
from conftest import call, settings
from test_forks import fork  # noqa: F401

import common

VECTORS = json.loads(FILE.read_text(encoding="utf-8"))
BATCH, PPO = VECTORS["batch"], VECTORS["ppo"]
CASES = {case["name"]: case for case in VECTORS["policy_losses"]}
LENGTHS, N, G = BATCH["lengths"], len(BATCH["lengths"]), BATCH["group_size"]
TOKEN_MEAN = "GRPO, a mean over all tokens"  # the default of some engines, but of no script here
FORKS = {"DAPO": "dapo", "Dr. GRPO": "dr_grpo", "Dr. GRPO, k3": "dr_grpo", "RLOO": "rloo", "CISPO": "cispo",
         "SAPO": "sapo", "GMPO": "gmpo", "TIS": "tis", "TIS, k3": "tis", "IcePop": "tis", "IcePop, k3": "tis"}

@pytest.fixture(params=["no holes", "holes"])
def table(request):
    """Rows of numbers -> a table in float64, with junk, or the number `rest`, where no token is."""
    def lay_out(rows, rest=None):
        numbers = torch.randn(N, 9) * 9 if rest is None else torch.full((N, 9), rest)
        for i, row in enumerate(rows):
            columns = BATCH["columns"][i] if request.param == "holes" else range(len(row))
            numbers[i, list(columns)] = torch.tensor(row)
        return numbers
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    yield lay_out
    torch.set_default_dtype(torch.float32)

def advantages_of(case):
    """One for each token."""
    adv = (VECTORS["advantages"] | PPO)[case["advantages"]]
    return [a if isinstance(a, list) else [a] * n for a, n in zip(adv, LENGTHS)]

def flags_of(script, case):
    """The settings of a case, as far as the script has them. The micro-batches are small."""
    flags = case | {"prompts": N // G, "group_size": G, "minibatches": 1, "epochs": 1, "gamma": 0.9}
    flags |= {"token_level": case["ratio"] == "sequence_token", "icepop": case.get("weight") == "masked"}
    flags |= {"max_new_tokens": case.get("T_max", 100), "micro_batch_tokens": 20}
    flags |= PPO | {"vf_coef": 1.0} if case["advantages"] == "whitened" else {}
    return settings(script, **{name: flags[name] for name in flags.keys() & vars(settings(script)).keys()})

def step(script, args, table, monkeypatch):
    """A step of the script: its rollout, the loss, and the gradients by log-probs and by values."""
    mask = table([[1.0] * n for n in LENGTHS], 0.0)
    ends = (mask * torch.arange(1, 10)).amax(1, keepdim=True)  # the last token, after a prompt of one token
    rollout = {"ids": torch.zeros(N, 10), "attention": (torch.arange(10) <= ends).long(), "mask": mask,
               "prompt_length": torch.ones(N).long(), "row": torch.arange(N), "texts": [""] * N,
               "finished": ends[:, 0] > 0, "has_gradient": ends[:, 0] > 0,
               "sampled_logp": table(BATCH["sampled_logp"])}
    look_up = lambda model, b, args: model[b["row"], :b["mask"].shape[1]]  # noqa: E731
    monkeypatch.setattr(common, "generate", lambda *_: rollout)
    monkeypatch.setattr(common, "token_logprobs", look_up)
    monkeypatch.setattr(script, "token_values", look_up, raising=False)
    losses, backward = [], torch.Tensor.backward
    monkeypatch.setattr(torch.Tensor, "backward", lambda loss: losses.append(loss.item()) or backward(loss))
    policy, critic = table(BATCH["logp"]).requires_grad_(), table(BATCH["values"]).requires_grad_()
    optimizer = types.SimpleNamespace(clip_and_step=lambda *_: {})
    given = {"args": args, "problems": [{"prompt": []}] * (N // G), "reward": lambda *_: BATCH["rewards"],
             "tokenizer": None, "reference": table(BATCH["ref_logp"]) if args.beta else None}
    old = {"policy": table(BATCH["old_logp"]), "critic": table(BATCH["old_values"])}
    made, _ = call(script.collect, given | old)
    call(script.update, given | {"policy": policy, "critic": critic, "rollout": made,
                                 "optimizers": {"policy": optimizer, "critic": optimizer}})
    return made, sum(losses), policy.grad, critic.grad

@pytest.mark.parametrize("name", [name for name in CASES if name != TOKEN_MEAN])
def test_our_scripts_and_forks_say_the_same(name, table, fork, monkeypatch):  # noqa: F811
    case, near = CASES[name], {"rtol": 0, "atol": 1e-9}
    ours = "ppo" if name == "PPO" else "grpo" if case["ratio"] == "token" else "gspo"
    script = fork(FORKS[name]) if name in FORKS else importlib.import_module(ours)
    rollout, loss, gradient, value_gradient = step(script, flags_of(script, case), table, monkeypatch)
    torch.testing.assert_close(gradient, table(case["gradient"], 0.0), **near)
    assert loss == pytest.approx(case["loss"] + (name == "PPO") * PPO["value_loss"], abs=1e-9)
    if name not in FORKS:
        torch.testing.assert_close(rollout["adv"] * rollout["mask"], table(advantages_of(case), 0.0), **near)
    if name == "PPO":
        torch.testing.assert_close(rollout["returns"], table(PPO["returns"], 0.0), **near)
        torch.testing.assert_close(value_gradient, table(PPO["value_gradient"], 0.0), **near)

def test_the_file_is_what_the_program_makes():
    made = json.loads(FILE.read_text(encoding="utf-8"))
    fill(made)
    assert text(made) == FILE.read_text(encoding="utf-8") and FILE.stat().st_size <= 30_000

@pytest.mark.parametrize("case", [case for case in CASES.values() if case["form"] == "clip"])
def test_good_and_bad_tokens_lie_below_and_above_the_clip_range(case):
    """But none lies near a bound, where rounding would decide."""
    low, high, seen = 1 - case["eps_low"], 1 + case["eps_high"], set()
    for ratios, row in zip(VECTORS["ratios"][case["ratio"].partition("_")[0]], advantages_of(case)):
        for w, A in zip(ratios if isinstance(ratios, list) else [ratios] * len(row), row):
            assert min(abs(w - low), abs(w - high)) > 0.004
            seen |= {(A > 0, w < low, w > high)} if A else set()
    assert len(seen - {(True, False, False), (False, False, False)}) == 4

def test_the_other_bounds_are_met_too():
    high, seen = 1 + CASES["CISPO"]["eps_high"], set()
    for row, A in zip(VECTORS["ratios"]["token"], VECTORS["advantages"]["grpo"]):
        assert all(abs(w - high) > 0.004 for w in row)
        seen |= {(A > 0, w > high) for w in row if A}
    assert len(seen) == 4 and CASES["Dr. GRPO"]["T_max"] > 9  # more than the longest row and the table

def test_a_group_of_equal_rewards_has_no_share_in_a_mean_over_groups():
    equal = [len(set(BATCH["rewards"][i - i % G:][:G])) == 1 for i in range(N)]
    assert any(equal) and equal == [share(CASES["DAPO"], i, BATCH) == 0 for i in range(N)]

def test_a_mean_over_all_tokens_weighs_the_rows_by_their_lengths():
    for row, other, n in zip(CASES["GRPO, no KL"]["gradient"], CASES[TOKEN_MEAN]["gradient"], LENGTHS):
        assert other == pytest.approx([x * n * N / sum(LENGTHS) for x in row], abs=1e-9)

"""A real pretrained model, if its directory is given: REAL_MODEL=DIR pytest -m slow -k real_model"""
import os

import pytest
import torch
from conftest import settings, train, write_jsonl

import common
import grpo
import gspo

REAL_MODEL = os.environ.get("REAL_MODEL")
pytestmark = [pytest.mark.slow, pytest.mark.skipif(not REAL_MODEL, reason="REAL_MODEL=DIR is not given")]
QUESTIONS = ["What is 12 + 7?", "Tom has 3 apples and buys 5 more. How many now?", "Name a colour.", "6 * 7?"]

def load(dtype):
    """The model as a script loads it, and a rollout of 4 x 2 completions of at most 12 tokens."""
    args = settings(grpo, model=REAL_MODEL, dtype=dtype, group_size=2, prompts=4, minibatches=2,
                    max_new_tokens=12, system_prompt="", max_prompt_tokens=100)
    policy, tokenizer = common.load_policy(args)
    chats = [common.read_chat({"question": question}, args) for question in QUESTIONS]
    prompts = list(common.prompts_of(chats, tokenizer, args))
    torch.manual_seed(0)
    rollout = common.generate(policy, tokenizer, prompts, 2, 1.0, args)
    rollout["rewards"] = torch.zeros(8)
    with torch.no_grad():
        rollout["old_logp"] = common.micro_batched(common.token_logprobs, policy, rollout, args)
    return args, policy, rollout

@pytest.mark.parametrize("dtype, close", [("float32", 1e-4), ("bfloat16", 0.3)])
def test_log_probs_are_those_of_the_models_own_logits_in_float64(dtype, close):
    """Those of the training pass and those of the sampler."""
    _, policy, rollout = load(dtype)
    policy.double().eval()
    for i, row in enumerate(rollout["ids"]):
        n, T = int(rollout["attention"][i].sum()), int(rollout["mask"][i].sum())
        with torch.no_grad():
            logits = policy(row[None, :n], use_cache=False).logits[0, n - T - 1:n - 1]
        own = logits.log_softmax(-1)[torch.arange(T), row[n - T:n]]
        for name in ("old_logp", "sampled_logp"):
            assert (rollout[name][i, :T] - own).abs().max() < close

def test_the_ratio_is_exactly_1_before_the_first_update_and_rounding_is_logged():
    """In bfloat16 too, as the update computes log-probs in the pieces in which they were scored."""
    rounding = {}
    for dtype in ("float32", "bfloat16"):
        args, policy, rollout = load(dtype)
        for minibatch in common.minibatches(rollout, 2, 2):
            for b in common.micro_batches(minibatch, args.micro_batch_tokens):
                assert torch.equal(common.token_logprobs(policy, b, args).detach(), b["old_logp"])
        rounding[dtype] = common.rollout_stats(rollout, 2)["sampling_sequence_difference"]
    assert rounding["float32"] < 1e-5 < 1e-4 < rounding["bfloat16"] < 0.03

def test_two_steps_of_gspo_in_bfloat16(tmp_path, monkeypatch):
    """The rewards are lengths, so that groups differ on any model."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(common, "answer_reward", lambda problems, texts: [len(text) / 100 for text in texts])
    rows = [{"question": f"{question} ({i})", "answer": "0"} for i in range(5) for question in QUESTIONS]
    write_jsonl("data.jsonl", rows)
    rows = train(gspo, f"--model {REAL_MODEL} --dataset data.jsonl --dtype bfloat16 --prompts 2 "
                 "--group_size 4 --minibatches 2 --max_new_tokens 12 --steps 2 --eval_problems 2 "
                 "--lr 1e-6 --warmup_steps 0")
    assert rows[1]["sampling_sequence_difference"] > 1e-4 and rows[2]["grad_norm"] > 0

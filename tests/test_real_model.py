"""A real pretrained model, if its directory is given: REAL_MODEL=DIR pytest -m slow -k real_model"""
import os

import pytest
import torch
from conftest import settings

import common
import grpo

REAL_MODEL = os.environ.get("REAL_MODEL")

@pytest.mark.slow
@pytest.mark.skipif(not REAL_MODEL, reason="REAL_MODEL=DIR is not given")
@pytest.mark.parametrize("dtype, close, rounding", [("float32", 1e-4, 1e-5), ("bfloat16", 0.3, 0.03)])
def test_the_ratio_is_1_before_the_first_update_and_log_probs_are_those_of_the_model_in_float64(
        dtype, close, rounding):
    """The ratio exactly, in bfloat16, too: update computes log-probs in the pieces in which they were made."""
    args = settings(grpo, model=REAL_MODEL, dtype=dtype, group_size=2, prompts=4, minibatches=2, beta=0.1)
    policy, tokenizer = common.load_policy(args)
    questions = ["What is 12 + 7?", "Tom has 3 apples and buys 5. How many now?", "Name a colour.", "6 * 7?"]
    problems = common.prepare([{"question": q, "answer": "1"} for q in questions], tokenizer, args, "training")
    torch.manual_seed(0)
    rollout, stats = grpo.collect(policy, None, tokenizer, problems, lambda p, texts: [0] * len(texts), args)
    assert stats["sampling_sequence_difference"] < rounding
    for minibatch in common.minibatches(rollout, args.minibatches, args.group_size):
        for b in common.micro_batches(minibatch, args.micro_batch_tokens):
            assert torch.equal(common.token_logprobs(policy, b, args).detach(), b["old_logp"])
    policy.double().eval()
    for i, row in enumerate(rollout["ids"]):
        n, T = int(rollout["attention"][i].sum()), int(rollout["mask"][i].sum())
        with torch.no_grad():
            own = policy(row[None, :n], use_cache=False).logits[0, n - T - 1:n - 1].log_softmax(-1)
        for name in ("old_logp", "sampled_logp"):
            assert (rollout[name][i, :T] - own[torch.arange(T), row[n - T:n]]).abs().max() < close

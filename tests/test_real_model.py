"""A real pretrained model, if its directory is given: REAL_MODEL=DIR pytest -m slow -k real_model"""
import os

import pytest
import torch
from conftest import settings

import common
import grpo

REAL_MODEL = os.environ.get("REAL_MODEL")
QUESTIONS = ["What is 12 + 7?", "Tom has 3 apples and buys 5. How many now?", "Name a colour.", "6 * 7?"]

@pytest.mark.slow
@pytest.mark.skipif(not REAL_MODEL, reason="REAL_MODEL=DIR is not given")
@pytest.mark.parametrize("dtype, close", [("float32", 1e-4), ("bfloat16", 0.3)])
def test_the_first_ratio_is_1_and_log_probs_are_those_of_the_model_in_float64(dtype, close):
    """The ratio exactly, in bfloat16, too: update computes log-probs in the micro-batches of collect."""
    args = settings(grpo, model=REAL_MODEL, dtype=dtype, group_size=2, minibatches=2)
    policy, tokenizer = common.load_policy(args)
    rows = [{"question": question, "answer": "1"} for question in QUESTIONS]
    problems = common.prepare(rows, tokenizer, args, "training")
    rollout, _ = grpo.collect(policy, policy, tokenizer, problems, lambda _, texts: [0] * len(texts), args)
    for minibatch in common.minibatches(rollout, args.minibatches, args.group_size):
        for b in common.micro_batches(minibatch, args.micro_batch_tokens):
            assert torch.equal(common.token_logprobs(policy, b, args).detach(), b["old_logp"])
    policy.double().eval()
    for i, (ids, attention) in enumerate(zip(rollout["ids"], rollout["attention"])):
        ids, T = ids[:attention.sum()], int(rollout["mask"][i].sum())
        with torch.no_grad():
            own = policy(ids[None], use_cache=False).logits[0, -T - 1:-1].log_softmax(-1)
        for name in ("old_logp", "sampled_logp"):
            assert (rollout[name][i, :T] - own[torch.arange(T), ids[-T:]]).abs().max() < close

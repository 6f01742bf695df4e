"""What the curve does not show: plant one mistake at a time in the scripts, train the toy, and look.

    pip install matplotlib
    python tests/results/mistakes/mistakes.py                        all runs, the table, the page and the picture
    python tests/results/mistakes/mistakes.py --only "no baseline"   one mistake: trains it and prints its row
    python tests/results/mistakes/mistakes.py --tests                with each mistake planted, its test must fail

A mistake is a few words of the code that are replaced by others. Each is trained with three seeds, in a copy
of the scripts, beside the sound code with the same flags and seeds. Then the sound code grades all of them:
it samples an answer to each of 2,000 held-out problems. What has run lies in --work and is not run again. All
of it takes over an hour on one core.
"""
import argparse
import contextlib
import importlib
import inspect
import json
import math
import multiprocessing
import os
import re
import shutil
import statistics
import sys
from pathlib import Path
from typing import NamedTuple

import pandas

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
SCRIPTS = ["common", "grpo", "gspo", "ppo"]
SEEDS = range(3)
EXAM = 2000  # held-out problems
IN_A_ROW = 3  # steps for which a number must be out of range
MARGIN = 0.1  # by which a range is widened on each side, in widths of the range

class Mistake(NamedTuple):
    """What to replace: edits are (file, right, wrong). `test` fails with the mistake. The run stands beside
    the sound script with the flags `beside`. A choice is no mistake: good code does it either way."""
    group: str
    name: str
    script: str
    edits: list
    flags: str
    beside: str
    test: str
    choice: bool

GROUPS = {}  # filled by the calls of `add` below: group -> mistakes

def add(group, name, script, *edits, flags="", test="", choice=None):
    """Add a mistake, or a choice: the flags that it adds to `flags`. An edit without a file is of the script.
    PPO takes four passes over a rollout, so that it is near the end after ten steps."""
    edits = [edit if len(edit) == 3 else (script, *edit) for edit in edits]
    beside = f"{flags} --steps 10".strip() if script == "ppo" else flags
    flags = f"{beside} {choice or ''}".strip()
    GROUPS.setdefault(group, []).append(
        Mistake(group, name, script, edits, flags, beside, test, choice is not None))

# ---- The mistakes, in the order of a step ----

LOGP = "logp = (logits / (temperature or 1)).log_softmax(-1)"
MIN = "torch.min(ratio * adv, clipped * adv)"
LOSS = "-(objective * mask / lengths).sum()"
OLD = 'rollout["old_logp"] = common.over_batches(common.token_logprobs, policy, rollout, args)'
LAST = "last = mask.cumsum(1).argmax(1, keepdim=True)"
SMALL = "--micro_batch_tokens 512"

group = "Sampling"
add(group, "top-k in the sampler and its log-probs", "grpo",
    ("common", LOGP, "logp = logits.masked_fill("
     "logits < logits.topk(3)[0][:, -1:], -torch.inf).log_softmax(-1)"),
    test="test_sampling.py::test_the_samplers_log_probs_are_those_of_the_tokens")
add(group, "top-k in the sampler alone", "grpo",
    ("common", "logp.exp().cumsum(", "(logp.exp() * (logp >= logp.topk(3)[0][:, -1:])).cumsum("),
    test="test_sampling.py::test_samples_come_from_the_softmax_of_whole_logits")
add(group, "temperature in the sampler alone", "grpo",
    ("common", "head_logits(model, hidden) / temperature", "head_logits(model, hidden)"),
    flags="--temperature 0.6",
    test="test_logprobs.py::test_equal_to_the_whole_log_softmax_in_value_and_gradient")
add(group, "temperature in the log-probs alone", "grpo",
    ("common", "(logits / (temperature or 1))", "logits"),
    flags="--temperature 0.6", test="test_sampling.py::test_samples_come_from_the_softmax_of_whole_logits")
add(group, "one random number for all completions", "grpo",
    ("common", "torch.rand(len(logits), 1,", "torch.rand(1, 1,"),
    test="test_sampling.py::test_samples_come_from_the_softmax_of_whole_logits")
add(group, "the same random numbers in every step", "grpo",
    ("torch.manual_seed(args.seed * 1_000_003 + step)", "torch.manual_seed(args.seed)"),
    test="test_cli.py::test_no_two_steps_of_any_seeds_share_noise_or_all_problems")
add(group, "the same problems in every step", "grpo",
    ("common", "len(problems), (step - 1) * count", "len(problems), 0"),
    test="test_batching.py::test_batches_visit_every_problem_once_a_pass")
add(group, "dropout in training", "grpo",
    ("common", "setattr(text, name, 0.0)", "setattr(text, name, 0.1)"),
    test="test_logprobs.py::test_dropout_is_off_and_training_uses_no_mask")
add(group, "log-probs of the next position", "grpo",
    ("common", "hidden[i, column - 1]", "hidden[i, column]"),
    test="test_logprobs.py::test_equal_to_the_whole_log_softmax_in_value_and_gradient")
add(group, "positions count the padding", "grpo",
    ("common", "(attention.cumsum(1) - 1).clamp(min=0)",
     "torch.arange(attention.shape[1]).expand_as(attention)"),
    test="test_sampling.py::test_greedy_tokens_are_those_of_transformers")
add(group, "padding is attended to", "grpo",
    ("common", "reader.read(ids, attention,", "reader.read(ids, torch.ones_like(attention),"),
    test="test_sampling.py::test_greedy_tokens_are_those_of_transformers")
add(group, "the end token is not trained", "grpo",
    ("common", "is_stop.cumsum(1) - is_stop.long() == 0", "is_stop.cumsum(1) == 0"),
    test="test_every_script.py::test_the_token_that_ends_a_completion_is_trained")
add(group, "tokens after the end are trained", "grpo",
    ("common", "is_stop.cumsum(1) - is_stop.long() == 0", "torch.ones_like(is_stop)"),
    test="test_sampling.py::test_completions_end_with_their_first_stop_token")

group = "Rewards"
add(group, "rewards of other questions", "grpo",
    ("common", '"problems": problems,', '"problems": problems[::group_size] * group_size,'),
    test="test_sampling.py::test_the_samplers_log_probs_are_those_of_the_tokens")
add(group, "an answer that contains the right one is paid", "grpo",
    ("common", "given == gold", "gold in given"),
    test="test_math_reward.py::test_never_pays_another_answer")
add(group, "the first answer counts, not the last", "grpo",
    ("common", 'text.rfind("####")', 'text.find("####")'),
    test="test_math_reward.py::test_extract_answer")

group = "Advantages"
add(group, "the baseline of the whole rollout", "grpo",
    ("r - r.mean(1, keepdim=True)", "r - r.mean()"),
    test="test_equations.py::test_1_z_scores_of_two_groups")
add(group, "no baseline", "grpo",
    ("(r - r.mean(1, keepdim=True))", "r"),
    test="test_equations.py::test_1_z_scores_of_two_groups")
add(group, "the deviation over the wrong axis", "grpo",
    ("r.std(1, keepdim=True)", "r.std(0, keepdim=True)"),
    test="test_equations.py::test_1_z_scores_of_two_groups")
add(group, "0/0 where all rewards are equal", "grpo",
    ("keepdim=True) + 1e-4)", "keepdim=True))"), ("adv.masked_fill(equal, 0.0)", "adv"),
    test="test_equations.py::test_1_equal_rewards_give_exactly_zero")
add(group, "the wrong sign", "grpo",
    ("r - r.mean(1, keepdim=True)", "r.mean(1, keepdim=True) - r"),
    test="test_equations.py::test_1_z_scores_of_two_groups")
add(group, "lambda left out", "ppo",
    ("gamma * lam * running", "gamma * running"),
    test="test_equations.py::test_1_ppo_gae")
add(group, "the reward one place after the end", "ppo",
    (LAST, "last = (mask.cumsum(1).argmax(1, keepdim=True) + 1).clamp(max=mask.shape[1] - 1)"),
    test="test_equations.py::test_4_ppo_puts_the_penalty_into_the_reward")
add(group, "the reward at the first token", "ppo",
    (LAST, "last = mask.cumsum(1).argmax(1, keepdim=True) * 0"),
    test="test_equations.py::test_4_ppo_puts_the_penalty_into_the_reward")
add(group, "whitened with the padding", "ppo",
    ("mean = (x * mask).sum() / mask.sum()", "mean = x.mean()"),
    ("variance = ((x - mean) ** 2 * mask).sum() / mask.sum()", "variance = x.var()"),
    test="test_ppo.py::test_collect_by_loops")
add(group, "returns of whitened advantages", "ppo",
    ('rollout["adv"] = whiten(rollout["adv"], mask)',
     'rollout["adv"] = whiten(rollout["adv"], mask)\n'
     '        rollout["returns"] = rollout["adv"] + rollout["values"]'),
    test="test_ppo.py::test_collect_by_loops")
add(group, "no division by the deviation", "grpo",
    (" / (r.std(1, keepdim=True) + 1e-4)", ""), choice="")

group = "Ratio and clip"
add(group, "the old log-probs move along", "grpo",
    ('logp, b["old_logp"],', "logp, logp.detach(),"), flags="--epochs 4",
    test="test_every_script.py::test_every_pass_takes_every_row_once_with_what_was_collected")
add(group, "the min of the ratios", "grpo",
    (MIN, "adv * torch.min(ratio, clipped)"), flags="--epochs 4",
    test="test_equations.py::test_3_clip_table")
add(group, "the clip without the min", "grpo",
    (MIN, "clipped * adv"), flags="--epochs 4",
    test="test_equations.py::test_3_clip_table")
add(group, "max for min", "grpo",
    (MIN, "torch.max(ratio * adv, clipped * adv)"), flags="--epochs 4",
    test="test_equations.py::test_3_clip_table")
add(group, "the ratio upside down", "grpo",
    ("log_ratio = (logp - old_logp) * mask", "log_ratio = (old_logp - logp) * mask"),
    test="test_equations.py::test_2_ratio_of_a_token_or_of_a_completion")
add(group, "s is a product", "gspo",
    ("(log_ratio.sum(1, keepdim=True) / lengths)", "log_ratio.sum(1, keepdim=True)"),
    test="test_equations.py::test_2_ratio_of_a_token_or_of_a_completion")
add(group, "s is a mean over the padding, too", "gspo",
    ("(log_ratio.sum(1, keepdim=True) / lengths)", "log_ratio.mean(1, keepdim=True)"),
    test="test_every_script.py::test_any_cut_into_micro_batches_gives_the_same_gradient")
add(group, "GSPO-token without the stop of a gradient", "gspo",
    ("ratio.detach() * (logp - logp.detach()).exp()", "ratio * (logp - logp.detach()).exp()"),
    flags="--token_level", test="test_equations.py::test_2_gspo_token_has_an_advantage_for_every_token")
add(group, "no clip", "grpo", flags="--epochs 4", choice="--eps_low 1e9 --eps_high 1e9")
add(group, "one minibatch", "grpo", choice="--minibatches 1")
add(group, "GRPO's clip range in GSPO", "gspo", choice="--eps_low 0.2 --eps_high 0.2")

group = "KL"
add(group, "k1 in the loss", "grpo",
    ("log_x.exp() - log_x - 1", "-log_x"), flags="--beta 0.4",
    test="test_equations.py::test_4_grpo_k3")
add(group, "k3 upside down", "grpo",
    ("((ref_logp - logp) * mask)", "((logp - ref_logp) * mask)"), flags="--beta 0.4",
    test="test_equations.py::test_4_grpo_k3")
add(group, "w as a constant in w k3", "grpo",
    ("kl_it * log_ratio.clamp(max=20).exp()", "kl_it * log_ratio.clamp(max=20).exp().detach()"),
    flags="--beta 0.4 --kl wk3",
    test="test_equations.py::test_4_grpo_k3_has_the_gradient_of_the_forward_kl")
add(group, "the KL is rewarded", "grpo",
    ("objective - beta * kl_it", "objective + beta * kl_it"), flags="--beta 0.4",
    test="test_equations.py::test_4_grpo_k3")
add(group, "the reference is the policy itself", "grpo",
    ("copy.deepcopy(policy).eval().requires_grad_(False) if", "policy if"), flags="--beta 0.4",
    test="test_cli.py::test_the_reference_is_the_first_model_or_that_of_an_mth_step")
add(group, "the KL to the old policy", "grpo",
    ("((ref_logp - logp) * mask)", "((old_logp - logp) * mask)"), flags="--beta 0.4",
    test="test_equations.py::test_4_grpo_k3")
add(group, "the KL is rewarded (PPO)", "ppo",
    ("-beta * (old_logp - ref_logp)", "beta * (old_logp - ref_logp)"),
    test="test_equations.py::test_4_ppo_puts_the_penalty_into_the_reward")
add(group, "k3 in the reward", "ppo",
    ("(old_logp - ref_logp) * mask", "((ref_logp - old_logp).exp() - (ref_logp - old_logp) - 1) * mask"),
    test="test_equations.py::test_4_ppo_puts_the_penalty_into_the_reward")
add(group, "no KL where all rewards are equal", "grpo",
    ("if args.beta == 0:", "if True:"), flags="--beta 0.4", choice="")

group = "Mean over tokens"
add(group, "the loss divided by the micro-batch", "grpo",
    ("(loss / rows).backward()", '(loss / len(b["ids"])).backward()'), flags=SMALL,
    test="test_every_script.py::test_any_cut_into_micro_batches_gives_the_same_gradient")
add(group, "a mean over the tokens of each micro-batch", "grpo",
    (LOSS, "-(objective * mask).sum() / mask.sum() * len(mask)"), flags=SMALL,
    test="test_every_script.py::test_any_cut_into_micro_batches_gives_the_same_gradient")
add(group, "padding counts", "grpo",
    (LOSS, "-(objective * mask).mean(1).sum()"),
    test="test_equations.py::test_the_mean_over_tokens_weighs_every_completion_alike")
add(group, "the last micro-batch is lost", "grpo",
    ("common", "while len(order) > 0:", "while len(order) > tokens // lengths[order[0]]:"), flags=SMALL,
    test="test_batching.py::test_every_row_is_in_one_micro_batch_within_the_budget")
add(group, "a step for each micro-batch", "grpo",
    ("\n            logged.append(optimizers", "\n                logged.append(optimizers"), flags=SMALL,
    test="test_every_script.py::test_any_cut_into_micro_batches_gives_the_same_gradient")
add(group, "only completions with a gradient count in N", "gspo",
    ('rows = len(minibatch["ids"])', 'rows = minibatch["has_gradient"].sum()'), choice="")
add(group, "a mean over all tokens", "grpo",
    ("lengths = mask.sum(1, keepdim=True).clamp(min=1)", "lengths = mask.sum() / len(mask)"), choice="")

group = "Critic"
add(group, "min for max in the value loss", "ppo",
    ("torch.max((values - returns) ** 2", "torch.min((values - returns) ** 2"),
    test="test_equations.py::test_5_ppo_value_loss")
add(group, "a random value head", "ppo",
    ("    torch.nn.init.zeros_(critic.score.weight)\n", ""),
    test="test_ppo.py::test_values_are_exactly_zero_at_the_start")
add(group, "the value after the token", "ppo",
    ('values.new_zeros(batch["mask"].shape).index_put(index, values)',
     'values.new_zeros(batch["mask"].shape).index_put(index, values).roll(-1, 1)'),
    test="test_ppo.py::test_v_t_is_the_value_of_the_state_before_token_t")
add(group, "the critic shares the policy's body", "ppo",
    ("copy.deepcopy(policy.base_model)", "policy.base_model"),
    test="test_ppo.py::test_values_are_exactly_zero_at_the_start")
add(group, "returns without the values", "ppo",
    ("return advantages, advantages + values", "return advantages, advantages"),
    test="test_equations.py::test_1_ppo_gae")
add(group, "the old values move along", "ppo",
    ('values, b["values"],', "values, values.detach(),"),
    test="test_ppo.py::test_the_critics_gradient_of_an_update")
add(group, "the critic takes no step", "ppo",
    ('\n            logged.append(optimizers["critic"].clip_and_step("value_"))', ""),
    test="test_ppo.py::test_policy_and_critic_are_trained_apart")

group = "Optimiser"
add(group, "the gradient is never cleared", "grpo",
    ("common", "        self.zero_grad()\n", ""),
    test="test_batching.py::test_equals_adamw_with_warm_up_and_clipping")
add(group, "Adam's moments are lost after each step", "grpo",
    ("common", "self.zero_grad()", "self.zero_grad()\n        self.state.clear()"),
    test="test_batching.py::test_equals_adamw_with_warm_up_and_clipping")
add(group, "no warm-up", "grpo", choice="--warmup_steps 0")
add(group, "no clip of the gradient's norm", "grpo", choice="--max_grad_norm 1e9")

group = "Precision"
add(group, "weights in bfloat16", "grpo",
    ("common", "            self.step()\n",
     '            self.step()\n            [w.data.copy_(w.data.bfloat16()) for w in group["params"]]\n'),
    flags="--lr 1e-4 --steps 40",
    test="test_batching.py::test_weights_of_a_bfloat16_model_move_at_a_learning_rate_of_1e_6")
add(group, "old log-probs rounded to bfloat16", "gspo",
    (OLD, OLD + ".bfloat16().float()"),
    test="test_every_script.py::test_old_and_new_log_probs_are_equal_before_the_first_update")
add(group, "logits rounded to bfloat16", "grpo",
    ("common", "head(hidden.to(head.weight.dtype))", "head(hidden.to(head.weight.dtype)).bfloat16().float()"),
    test="test_logprobs.py::test_logits_are_not_rounded_in_bfloat16")
add(group, "the sampler in bfloat16", "grpo",
    ("common", 'getattr(torch, args.dtype), enabled=args.dtype != "float32"):\n        prompts',
     "torch.bfloat16, enabled=True):\n        prompts"),
    test="test_sampling.py::test_the_samplers_log_probs_are_those_of_the_tokens")
add(group, "gradients added up in bfloat16", "grpo",
    ("(loss / rows).backward()", "(loss / rows).backward()\n                "
     "[w.grad.copy_(w.grad.bfloat16()) for w in policy.parameters() if w.grad is not None]"), flags=SMALL,
    test="test_every_script.py::test_any_cut_into_micro_batches_gives_the_same_gradient")

group = "Evaluation and statistics"
add(group, "evaluated on what was trained on", "grpo",
    ("common", "prepare(held_out.select", "prepare(train.select"),
    test="test_data.py::test_a_lone_file_holds_out_by_the_question_alone_disjoint_and_stable")
add(group, "entropy averaged over the padding", "grpo",
    ("common", '-(rollout["sampled_logp"] * mask).sum() / mask.sum()', '-rollout["sampled_logp"].mean()'),
    test="test_batching.py::test_rollout_statistics_leave_padding_out")
add(group, "statistics of the last micro-batch", "grpo",
    ("logged.append(stats)", "logged = [stats]"), flags=SMALL,
    test="test_every_script.py::test_any_cut_into_micro_batches_gives_the_same_gradient")
add(group, "variance explained of returns that lean on V", "ppo",
    ("explained_variance(returns_to_go,", 'explained_variance(rollout["returns"],'),
    test="test_ppo.py::test_collect_by_loops")

SOURCES = {  # who made a mistake or warns of it, as far as we found and read it; owner/name#n is on GitHub
    "top-k in the sampler and its log-probs":
        "OpenPipe/ART#140: a new vLLM took top_k, top_p and penalties from the model's "
        "generation_config, and training became unstable.",
    "top-k in the sampler alone":
        "NVIDIA-NeMo/RL#3497 measures the same with a model's own repetition penalty of 1.1: a third of "
        "the tokens are off by more than 10 %.",
    "temperature in the sampler alone":
        "huggingface/trl#3029 fixed it in GRPO, OpenRLHF/OpenRLHF#853 in the KL of PPO; "
        "huggingface/trl#4159 is the report of one who saw it in the ratio.",
    "dropout in training":
        "The N+ Implementation Details (arXiv 2403.17031) switch it off, huggingface/trl#3234 made that "
        "an option; Human-Agent-Society/reef#536 found it on in every run that they had made.",
    "log-probs of the next position": "lucidrains/PaLM-rlhf-pytorch#31 and AI-Hypercomputer/maxtext#2103.",
    "positions count the padding":
        "CarperAI/trlx#509, found because the ratio was not 1 at a learning rate of 0 "
        "(CarperAI/trlx#508); OpenRLHF/OpenRLHF#217.",
    "padding is attended to":
        "NVIDIA/NeMo-Aligner#68: padding changed log-probs, and the first ratio was not 1.",
    "the end token is not trained":
        "rasbt/reasoning-from-scratch#185. With one token for padding and end it happens by itself: the "
        "N+ Implementation Details (arXiv 2403.17031), huggingface/trl#4970.",
    "tokens after the end are trained":
        "bingreeky/MemGen#33; verl-project/verl#3805 where no end token came.",
    "rewards of other questions":
        "tenstorrent/tt-metal#46548: advantages met the log-probs of other completions.",
    "an answer that contains the right one is paid": "PrimeIntellect-ai/verifiers#763: 21 was paid for 1.",
    "the baseline of the whole rollout": "XU-YIJIE/grpo-flat#2; a default in langfengQ/verl-agent#138.",
    "0/0 where all rewards are equal":
        "NVIDIA-NeMo/RL#4161 is its relative: the deviation of equal rewards was rounding noise, and an "
        "advantage 7428.",
    "lambda left out":
        "In one of the four texts from which these scripts were written; medipixel/rl_algorithms#179 "
        "did not use the lambda that was set.",
    "the reward one place after the end": "huggingface/trl#3750, huggingface/trl#5338.",
    "no division by the deviation":
        "Dr. GRPO (arXiv 2503.20783); thinking-machines-lab/tinker-cookbook#579 gives its reasons.",
    "the old log-probs move along":
        "dhcode-cpp/X-R1#11 and LeapLabTHU/JustGRPO#2 ask about this line; it is right where a rollout "
        "is used for one step.",
    "the min of the ratios":
        "takuseno/ppo#3 corrects it, tensorlayer/TensorLayer#1072 asks for it; one of our four texts "
        "factors A out like this.",
    "max for min":
        "openai/baselines#1156 asks for it; the author of PPO answers that the algorithm then \"doesn't "
        "work at all\".",
    "s is a product":
        "Ratios of whole completions without the root were also found in GRPO: "
        "rasbt/reasoning-from-scratch#243, walkinglabs/hands-on-modern-rl#75.",
    "s is a mean over the padding, too":
        "areal-project/AReaL#1346 averaged advantages over it, MakazhanAlpamys/Soup#744 log-ratios.",
    "one minibatch": "huggingface/trl#3120 asks why nothing is ever clipped: the ratio is 1.",
    "GRPO's clip range in GSPO": "MakazhanAlpamys/Soup#744 has .2 as the default.",
    "k1 in the loss":
        "allenai/open-instruct#534 saw that a larger beta made the KL larger; NVIDIA-NeMo/RL#2506 "
        "explains it.",
    "k3 upside down": "In one of the four texts from which these scripts were written.",
    "the KL is rewarded": "qiancheng0/ToolRL#52.",
    "the reference is the policy itself": "huggingface/trl#2046 asks for a check of it.",
    "k3 in the reward":
        "huggingface/trl#4967 cites a paper on the estimators (arXiv 2512.21852) and asks for k1 there.",
    "no KL where all rewards are equal": "huggingface/trl#5588 and huggingface/trl#5640 ask for it.",
    "the loss divided by the micro-batch":
        "NVIDIA-NeMo/RL#84 (\"not a big issue for Adam\"); huggingface/trl#3021 saw results depend on "
        "accumulation.",
    "a mean over the tokens of each micro-batch":
        "The gradient accumulation bug that unsloth.ai/blog/gradient made known; "
        "ml-explore/mlx-lm#1413, huggingface/trl#3231.",
    "the last micro-batch is lost": "pytorch/torchtitan#3575 lost all but the last.",
    "a step for each micro-batch": "huggingface/trl#2618, in passing.",
    "only completions with a gradient count in N": "huggingface/trl#6365 proposes it.",
    "a mean over all tokens": "DAPO (arXiv 2503.14476).",
    "min for max in the value loss":
        "ray-project/ray#2233 corrects it; openai/baselines#91 and ray-project/ray#10430 ask for it.",
    "a random value head":
        "The N Implementation Details of RLHF with PPO (huggingface.co/blog) begin with zeros.",
    "the value after the token": "huggingface/trl#44, wyf3/llm_related#36.",
    "returns without the values": "natolambert/rlhf-book#216 had rewards for returns.",
    "the gradient is never cleared": "meta-pytorch/torchforge#71, tenstorrent/tt-blacksmith#711.",
    "weights in bfloat16": "workofart/ml-by-hand#85; areal-project/AReaL#1634 measures both.",
    "old log-probs rounded to bfloat16":
        "yifan123/flow_grpo#204: rounding moved the mean of the first ratio from 1.",
    "logits rounded to bfloat16": "AI-Hypercomputer/maxtext#5231.",
    "the sampler in bfloat16":
        "ServiceNow/Fast-LLM#525 measures .03 nats between engines; verl-project/verl#2953 corrects for "
        "it.",
    "gradients added up in bfloat16": "marin-community/marin#8955 compares both; 20 updates do not decide.",
    "entropy averaged over the padding": "natolambert/rlhf-book#216, with the KL.",
    "statistics of the last micro-batch": "allenai/allennlp#4706; in karpathy/nanochat#52 it is a choice.",
}
MISTAKES = [mistake for mistakes in GROUPS.values() for mistake in mistakes]
SOUND = [Mistake("", f"{script} {flags}".strip(), script, [], flags, flags, "", False)
         for script, flags in sorted({(mistake.script, mistake.beside) for mistake in MISTAKES})]

# ---- A run ----

def plant(mistake, tree):
    """Copy the scripts into `tree`, with the mistake. Each right text must be in its file exactly once."""
    tree.mkdir(parents=True, exist_ok=True)
    sources = {name: (ROOT / f"{name}.py").read_text(encoding="utf-8") for name in SCRIPTS}
    for file, right, wrong in mistake.edits:
        count = sources[file].count(right)
        if count != 1:
            sys.exit(f"{mistake.name}: {right!r} is {count} times in {file}.py, not once")
        sources[file] = sources[file].replace(right, wrong)
    for name, source in sources.items():
        (tree / f"{name}.py").write_text(source, encoding="utf-8")

def import_from(tree, script):
    """Import a script and common.py from `tree`, not those that were imported before."""
    for name in SCRIPTS:
        sys.modules.pop(name, None)
    sys.path.insert(0, str(tree))
    return importlib.import_module(script), importlib.import_module("common")

def watch(script):
    """Let policy_loss log numbers that the scripts do not log: would they find more?"""
    real = script.policy_loss

    def policy_loss(*given):
        loss, stats = real(*given)
        x = inspect.signature(real).bind(*given).arguments
        log_ratio, tokens = ((x["logp"] - x["old_logp"]) * x["mask"]).detach(), x["mask"].sum()
        ratio = log_ratio.clamp(max=20).exp()
        new = {"ratio_mean": ratio, "kl_to_old": ratio - 1 - log_ratio,
               "adv_mean": x["adv"], "adv_square": x["adv"] ** 2, "gain": x["adv"] * log_ratio}
        sums = {f"new_{name}": ((value * x["mask"]).sum(), tokens) for name, value in new.items()}
        return loss, stats | sums
    script.policy_loss = policy_loss

def train(mistake, seed, out, steps=None):
    """Train with the mistake, then let the sound code grade the result; writes out/row.json."""
    flags = [*mistake.flags.split(), "--seed", str(seed), "--device", "cpu"]
    plant(mistake, out / "tree")
    (out / "tree" / "tests").symlink_to(ROOT / "tests")
    script, common = import_from(out / "tree", mistake.script)
    watch(script)
    row = {"name": mistake.name, "seed": seed, "edits": mistake.edits, "flags": mistake.flags, "error": ""}
    try:
        args = script.parse_args(["--out", str(out / "run"), "--eval_problems", "64", *flags])
        args.eval_every = args.save_every = args.steps = steps or args.steps
        script.main(args)
    except SystemExit as refusal:
        row["error"] = str(refusal.code)
    else:
        row["metrics"] = [json.loads(line) for line in (out / "run" / "metrics.jsonl").open()]
        script, common = import_from(ROOT, mistake.script)
        args.model = str(out / "run" / f"step-{args.steps}")
        policy, tokenizer = common.load_policy(args)
        held_out = common.read_dataset(common.TOY)["test"]
        problems = common.prepare(held_out.select(range(EXAM)), tokenizer, args)
        answers = common.attempts(
            policy, tokenizer, problems, common.answer_reward, args.temperature, args)
        row["accuracy"] = statistics.fmean(answer["right"] for answer in answers)
    (out / "row.json").write_text(json.dumps(row))

def quietly(function, out, *given):
    """Call a function in a process of its own, which has all imports already; its words go to `out`."""
    def child():
        for number, name in (1, "words"), (2, "errors"):
            os.dup2(os.open(out / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
        function(*given)
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    process.join()
    return process.exitcode

def run(mistake, seed, work):
    """Return the row of a run; make the run unless it is there."""
    kept = work / f"{mistake.name.replace('/', ' by ')}, seed {seed}.json"
    wanted = json.loads(json.dumps([mistake.edits, mistake.flags]))
    if kept.exists():
        row = json.loads(kept.read_text())
        if [row["edits"], row["flags"]] == wanted:
            return row
    out = work / f"run-{os.getpid()}"
    quietly(train, out, mistake, seed, out)
    if not (out / "row.json").exists():
        sys.exit(f"{mistake.name}, seed {seed}:\n{(out / 'errors').read_text()}")
    (out / "row.json").rename(kept)
    shutil.rmtree(out)
    return json.loads(kept.read_text())

def warm_up():
    """Import what takes seconds, once for all processes."""
    import datasets  # noqa: F401
    import pytest  # noqa: F401
    import torch
    import transformers
    transformers.Qwen3ForCausalLM, transformers.DynamicCache, transformers.PreTrainedTokenizerFast
    torch.set_num_threads(1)

# ---- What gives it away ----

NO_SIGN = {"step", "seconds", "reward"}  # the reward is the curve itself; so are the numbers of an evaluation

def numbers(metrics):
    """The names of what a run logs in its steps, apart from the curve."""
    names = dict.fromkeys(name for row in metrics for name in row if not name.startswith("eval_"))
    return [name for name in names if name not in NO_SIGN]

def is_out(value, low, high):
    """On which side of a range, widened by MARGIN, a value lies: -1, 0 or 1. A missing number is out, too."""
    if value is None or math.isnan(value):
        return 1
    slack = MARGIN * (high - low)
    return (value > high + slack) - (value < low - slack)

def given_away(name, runs, sound):
    """Return the first of IN_A_ROW steps in which this number of every run, all on the same side, is out of
    the range that the sound runs have in that step, the one before and the one after; else None."""
    sides = []
    for step in range(1, len(runs[0])):
        near = [row[name] for metrics in sound for row in metrics[max(1, step - 1):step + 2] if name in row]
        found = {is_out(metrics[step].get(name), min(near), max(near)) for metrics in runs} if near else {0}
        sides.append(found.pop() if len(found) == 1 else 0)
    for first in range(len(sides) - IN_A_ROW + 1):
        if sides[first] and len(set(sides[first:first + IN_A_ROW])) == 1:
            return first + 1
    return None

def signs(runs, sound):
    """All numbers that give these runs away, the earliest first: pairs (step, name)."""
    found = [(given_away(name, runs, sound), name) for name in numbers(sound[0])]
    return sorted(pair for pair in found if pair[0])

def false_alarms(sound):
    """What the rule would say of each sound run beside the others: (script and flags, seed, step, name)."""
    return [(name, row["seed"], *sign) for name, rows in sound.items() for row in rows
            for sign in signs([row["metrics"]], [other["metrics"] for other in rows if other is not row])]

def measure(mistake, rows, sound, pooled):
    """One line of the table, from the runs with the mistake and the sound ones beside them."""
    line = {"group": mistake.group, "name": mistake.name, "choice": mistake.choice, "script": mistake.script,
            "flags": mistake.flags, "beside": mistake.beside, "seeds": len(rows), "refused": rows[0]["error"]}
    line |= {"sound": statistics.fmean(row["accuracy"] for row in sound),
             "sound_deviation": statistics.stdev(row["accuracy"] for row in sound)}
    if rows[0]["error"]:
        return line
    found = [row["accuracy"] for row in rows]
    line |= {"accuracy": statistics.fmean(found), "deviation": statistics.stdev(found)}
    error = pooled * math.sqrt(1 / len(rows) + 1 / len(sound))  # if the mistake changed nothing
    difference = line["accuracy"] - line["sound"]
    line["differs"] = 0 if abs(difference) < 3 * error else int(math.copysign(1, difference))
    all_signs = signs([row["metrics"] for row in rows], [row["metrics"] for row in sound])
    for column, keep in ("sign", False), ("new_sign", True):
        pairs = [(step, name) for step, name in all_signs if name.startswith("new_") == keep]
        line[column], line[f"{column}_step"] = (pairs[0][1], pairs[0][0]) if pairs else ("", 0)
        line[f"{column}s"] = " ".join(f"{name}:{step}" for step, name in pairs)
    return line

# ---- The tests ----

def run_tests(mistake, tests, tree):
    """Run tests in a copy of the repository with the mistake; exits with pytest's status."""
    import pytest
    keep_out = shutil.ignore_patterns("results", "__pycache__")
    shutil.copytree(ROOT / "tests", tree / "tests", ignore=keep_out)
    plant(mistake, tree)
    os.chdir(tree / "tests")
    os._exit(pytest.main(["-q", "-x", "-p", "no:cacheprovider", *tests]))

def turns_red(mistake, work):
    """Whether the test of a mistake fails with it: pytest exits with 1."""
    kept = work / f"{mistake.name.replace('/', ' by ')}, test.json"
    wanted = json.loads(json.dumps([mistake.edits, mistake.test]))
    if not kept.exists() or json.loads(kept.read_text())[:2] != wanted:
        out = work / f"test-{os.getpid()}"
        status = quietly(run_tests, out, mistake, [mistake.test], out / "tree")
        shutil.rmtree(out)
        kept.write_text(json.dumps([*wanted, status == 1]))
    return json.loads(kept.read_text())[2]

# ---- The page and the picture ----

MARK = "<!-- What follows is written by mistakes.py. -->\n"
THREAD, LINK = r"([\w.-]+/([\w.-]+))#(\d+)", r"[\2 \3](https://github.com/\1/issues/\3)"

def spread(mean, deviation):
    """'.973 ± .004'."""
    return " ± ".join(f"{value:.3f}".removeprefix("0") for value in (mean, deviation))

def code(text):
    """A piece of code in one cell of a table."""
    text = " ".join(text.split()).replace("|", "\\|")
    return f"`` {text} ``" if "`" in text else f"`{text}`" if text else "nothing"

def said(pairs):
    """'`kl` from step 3, `loss` from step 5', of the first two of 'kl:3 loss:5 ...'."""
    pairs = [pair.split(":") for pair in pairs.split()]
    text = ", ".join(f"`{name}` from step {step}" for name, step in pairs[:2])
    return text + (f" and {len(pairs) - 2} more" if len(pairs) > 2 else "")

def cells(mistake, line):
    """The cells of one row of the page."""
    what = f"{mistake.name} (a choice)" if mistake.choice else mistake.name
    edits = [(code(right), code(wrong)) for _, right, wrong in mistake.edits]
    edits = [(right, wrong if wrong != right else "the same, a level deeper") for right, wrong in edits]
    edits = edits or [("the defaults", code(mistake.flags.removeprefix(mistake.beside)))]
    flags = code(f"{mistake.script}.py {mistake.beside}")
    yield f"{what}<br>{flags}"
    yield from ("<br>".join(column) for column in zip(*edits))
    yield spread(line["sound"], line["sound_deviation"])
    if line["refused"]:
        yield "refused at load"
        yield re.search("log-probs of the .+ are off by [0-9.e-]+", line["refused"])[0]
    else:
        mark = {-1: "**", 0: "", 1: "*"}[line["differs"]]
        yield mark + spread(line["accuracy"], line["deviation"]) + mark
        yield said(line["signs"]) or "–"
    yield code(mistake.test.partition("::")[2]) if mistake.test else ""

def counts(table):
    """How many mistakes were planted, and where they are seen."""
    planted = [line for line in table if not line["choice"]]
    trained = [line for line in planted if not line["refused"]]
    seen = [line for line in trained if line["signs"]]
    lower = [line for line in trained if line["differs"] < 0]
    other = [line for line in seen if line["differs"] >= 0]
    return {"planted": len(planted),
            "refused at load, before the first step": len(planted) - len(trained),
            "accuracy lower than seeds explain": len(lower),
            "accuracy not lower, but another number out of range": len(other),
            "neither": len(trained) - len(lower) - len(other),
            "caught by a test": sum(line["red"] for line in planted),
            "another number out of range, whatever the accuracy": len(seen),
            "accuracy higher than seeds explain": sum(line["differs"] > 0 for line in trained)}

def page(table):
    """The part of README.md that is written from the table: counts, then a table for each group."""
    lines = {line["name"]: line for line in table}
    text = ["| | mistakes |", "|---|---|"]
    text += [*(f"| {what} | {count} |" for what, count in counts(table).items()), ""]
    for group, mistakes in GROUPS.items():
        text += [f"## {group}", "", "| mistake, in | instead of | it says | accuracy without | with it "
                 "| another number out of range | test |", "|---|---|---|---|---|---|---|"]
        text += ["| " + " | ".join(cells(mistake, lines[mistake.name])) + " |" for mistake in mistakes]
        names = [mistake.name for mistake in mistakes if mistake.name in SOURCES]
        text += ["", *(re.sub(THREAD, LINK, f"- *{name}*: {SOURCES[name]}") for name in names), ""]
    return "\n".join(text)

SHOW = ["rewards of other questions", "no baseline", "the wrong sign",
        "one random number for all completions", "the gradient is never cleared",
        "tokens after the end are trained", "the reward one place after the end", "weights in bfloat16"]
HIDE = ["the end token is not trained", "the baseline of the whole rollout", "the old log-probs move along",
        "the min of the ratios", "max for min", "k3 upside down", "padding counts", "lambda left out"]

def draw(runs, sound, out):
    """Draw the reward of training: eight mistakes that it shows, eight that it does not."""
    import matplotlib
    matplotlib.use("Agg")
    from matplotlib import pyplot
    figure, axes = pyplot.subplots(4, 4, figsize=(12, 9), sharex=False, sharey=True)
    for name, axis in zip(SHOW + HIDE, axes.flat):
        mistake = next(mistake for mistake in MISTAKES if mistake.name == name)
        beside = f"{mistake.script} {mistake.beside}".strip()
        for rows, color, label in (sound[beside], "C0", "without"), (runs[name], "C3", "with the mistake"):
            curves = [[step["reward"] for step in row["metrics"][1:]] for row in rows]
            steps = range(1, len(curves[0]) + 1)
            low, high = ([limit(at) for at in zip(*curves)] for limit in (min, max))
            axis.fill_between(steps, low, high, color=color, alpha=0.25, linewidth=0)
            axis.plot(steps, [statistics.fmean(at) for at in zip(*curves)], color=color, label=label)
        axis.set_title(f"{name}\n{mistake.script}.py {mistake.beside}", fontsize=9)
        axis.grid(alpha=0.3)
        axis.set_ylim(-0.02, 1.02)
        axis.tick_params(labelsize=8)
    axes[0][0].legend(fontsize=8)
    for row in axes:
        row[0].set_ylabel("reward in training", fontsize=9)
    what = ("Above: eight mistakes that the reward shows. Below: eight that it does not.   "
            "line: mean of the seeds;  band: lowest to highest;  across: step")
    figure.text(0.5, 0.008, what, ha="center", fontsize=9)
    figure.tight_layout(rect=(0, 0.03, 1, 1))
    figure.savefig(out, dpi=100)

def read_table(path):
    """Read mistakes.csv as a list of dicts."""
    empty = dict.fromkeys(["accuracy", "deviation", "differs"], "")
    table = pandas.read_csv(path, keep_default_na=False, na_values=empty)
    return table.to_dict("records")

def main():
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    parser.add_argument("--work", type=Path, default=ROOT / "runs" / "mistakes", help="directory of the runs")
    parser.add_argument("--only", metavar="NAME", choices=[mistake.name for mistake in MISTAKES])
    parser.add_argument("--tests", action="store_true", help="only run the tests, each with its mistake")
    args = parser.parse_args()
    work = args.work.resolve()
    work.mkdir(parents=True, exist_ok=True)
    chosen = [mistake for mistake in MISTAKES if args.only in (None, mistake.name)]
    warm_up()
    tests, out = sorted({mistake.test for mistake in chosen if mistake.test}), work / "tests"
    if quietly(run_tests, out, chosen[0]._replace(edits=[]), tests, out / "tree"):
        sys.exit(f"A test fails without any mistake:\n{(out / 'words').read_text()}")
    shutil.rmtree(out)  # pytest would find its tests
    red = {mistake.name: turns_red(mistake, work) for mistake in chosen if mistake.test}
    for name, is_red in red.items():
        print("red" if is_red else "NOT RED", name)
    if args.tests:
        sys.exit(not all(red.values()))
    runs, sound = {}, {}
    beside = {mistake.name: f"{mistake.script} {mistake.beside}".strip() for mistake in chosen}
    for kept, mistakes in (sound, [one for one in SOUND if one.name in beside.values()]), (runs, chosen):
        for mistake in mistakes:
            kept[mistake.name] = [run(mistake, seed, work) for seed in SEEDS]
            print(mistake.name, *(row.get("accuracy", "refused") for row in kept[mistake.name]), flush=True)
    variances = [statistics.variance(row["accuracy"] for row in rows) for rows in sound.values()]
    pooled = math.sqrt(statistics.fmean(variances))
    table = [measure(mistake, runs[mistake.name], sound[beside[mistake.name]], pooled) for mistake in chosen]
    table = [line | {"red": int(red.get(line["name"], 0))} for line in table]
    if args.only:
        print(json.dumps(table[0], indent=1))
        return
    pandas.DataFrame(table).to_csv(HERE / "mistakes.csv", index=False, float_format="%.5g")
    path = HERE / "README.md"
    text = path.read_text(encoding="utf-8").partition(MARK)[0]
    path.write_text(text + MARK + page(read_table(HERE / "mistakes.csv")), encoding="utf-8")
    draw(runs, sound, HERE / "mistakes.png")
    print(f"deviation over seeds, pooled: {pooled:.4f}; false alarms of the rule in sound runs:")
    for alarm in false_alarms(sound):
        print(*alarm)

if __name__ == "__main__":
    main()

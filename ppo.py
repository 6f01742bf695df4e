"""PPO: proximal policy optimisation (Schulman et al. 2017, arXiv 1707.06347, eq. 7) as in RLHF (Ouyang et al. 2022).

For every prompt q sample a completion o from the old policy, reward it, and maximise over the policy

    J = 1/N sum_i 1/|o_i| sum_t min(w_it A_it, clip(w_it, 1 - eps_low, 1 + eps_high) A_it)                        (3)

    A_t   = sum_l (gamma lam)^l delta_t+l,  delta_t = r_t + gamma V_t+1 - V_t,  R_t = A_t + V_t                   (1)
    w_it  = pi(o_it | q, o_i<t) / pi_old(o_it | q, o_i<t)                                                        (2)
    r_t   = score at the last token of o, 0 before it, minus beta (log pi_old - log ref) at every token          (4)

and minimise over a value model V, as large as the policy (Schulman et al. eq. 9, clipped as by Huang et al. 2024)

    L = 1/N sum_i 1/|o_i| sum_t 0.5 max((V_it - R_it)^2, (clip(V_it, V_old +- eps_value) - R_it)^2)               (5)

The critic gives every token an advantage of its own; that is what grpo.py saves. The reward is 1 for a right answer and
0 for a wrong one unless you name a reward model. With beta 0 there is no reference model in memory.

    python ppo.py                                                                   a laptop: makes its own model
    python ppo.py --model Qwen/Qwen2.5-1.5B-Instruct --dataset openai/gsm8k         one GPU

Shapes: P prompts a step, G completions a prompt, N = P*G rows, T completion positions.
"""
import argparse
import time

import torch

import common


def parse_args(argv=None):
    """The flags that change the equations; common.add_args has those that every script shares."""
    parser = common.Parser(__file__, __doc__)
    add, within, Sized = parser.add_argument, common.within, common.Sized
    add("--prompts", type=within("[1, inf)", int), metavar="P", default=256,
        help="prompts a step; more make a steadier gradient and a slower step")
    add("--group_size", type=within("[1, inf)", int), metavar="G", default=1,
        help="completions a prompt; PPO needs no group, as V is its baseline")
    add("--eps_low", type=within("(0, 1)"), default=0.2,
        help="clip range below 1 (3); usually 0.1 to 0.3 for a token's ratio, 3e-4 for a sequence's, which moves far less")
    add("--eps_high", type=within("(0, inf)"), default=0.2,
        help="clip range above 1 (3); usually 0.2 to 0.3, more lets unlikely tokens grow faster; 4e-4 for a sequence's")
    add("--beta", type=within("[0, inf)"), default=0.05,
        help="weight of the KL penalty in the reward (4); 0 needs no reference model; usually 0 to 0.1")
    add("--gamma", type=within("[0, 1]"), default=1.0, help="discount of later rewards (1); 1 suits completions, which end")
    add("--lam", type=within("[0, 1]"), default=0.95,
        help="lambda of GAE (1): at 0 the critic is trusted (bias), at 1 the rewards (noise); usually 0.9 to 1")
    add("--whiten", action=argparse.BooleanOptionalAction, default=True,
        help="shift and scale the advantages of a rollout to mean 0 and deviation 1")
    add("--eps_value", type=within("(0, inf)"), default=0.2, help="how far V may move on one rollout (5); usually 0.2")
    add("--vf_coef", type=within("[0, inf)"), default=0.1,
        help="weight of the value loss (5); Adam undoes it but for --max_grad_norm; usually 0.1 to 1")
    add("--lr", type=within("(0, inf)"), default=Sized(2e-4, 3e-6), help="AdamW learning rate of the policy")
    add("--value_lr", type=within("(0, inf)"), default=Sized(1e-2, 3e-6),
        help="AdamW learning rate of the value model, which has to learn faster than the policy changes")
    add("--epochs", type=within("[1, inf)", int), metavar="MU", default=4,
        help="passes over a rollout; more reuse it further off-policy; usually 1 to 4")
    add("--minibatches", type=within("[1, inf)", int), metavar="N", default=4,
        help="optimiser steps a pass; with 1 (and 1 epoch) the ratio (2) stays 1 and nothing is clipped")
    common.add_args(parser)
    return common.parse(parser, argv)


def token_rewards(score, old_logp, ref_logp, mask, beta):
    """Equation (4). Scores (N,), log-probs (N, T) of sampler and reference (None: no penalty) -> rewards (N, T).

    The score lands on the last completion token, EOS or where the completion was cut. The penalty is a constant of the
    rollout: k1 in the reward has the gradient of the reverse KL, k1 in the loss would have none.
    """
    last = mask.sum(1).long() - 1                                                    # (N,)
    rewards = torch.zeros_like(mask) if ref_logp is None else -beta * (old_logp - ref_logp) * mask  # (N, T)      (4)
    rewards[torch.arange(len(mask), device=mask.device), last] += score
    return rewards


def gae(rewards, values, mask, gamma, lam):
    """Equation (1). Rewards, values and mask (N, T) -> advantages and returns (N, T), 0 outside the mask."""
    values = values * mask  # V after the last token is 0: nothing is bootstrapped beyond the end
    advantages, following = torch.zeros_like(values), torch.zeros_like(values[:, 0])
    for t in reversed(range(values.shape[1])):
        next_value = values[:, t + 1] if t + 1 < values.shape[1] else 0.0
        delta = rewards[:, t] + gamma * next_value - values[:, t]                    # (N,)
        following = (delta + gamma * lam * following) * mask[:, t]                   # (N,)                         (1)
        advantages[:, t] = following
    return advantages, advantages + values


def whiten(x, mask):
    """Mean 0 and deviation 1 over the completion tokens of a whole rollout; (N, T) -> (N, T)."""
    mean = (x * mask).sum() / mask.sum()
    variance = ((x - mean) ** 2 * mask).sum() / mask.sum()
    return (x - mean) * mask / (variance + 1e-8).sqrt()


def policy_loss(logp, old_logp, adv, mask, args):
    """Equations (2) and (3), negated: the SUM over rows of row means, to be divided by the rows of the optimiser step.

    logp, old_logp and mask are (N, T), adv is (N,) or (N, T). Returns the loss, a float32 scalar, and statistics as
    pairs (sum, count), or as maxima.
    """
    adv = adv if adv.dim() == 2 else adv[:, None]                                    # (N, 1) or (N, T)
    lengths = mask.sum(1, keepdim=True).clamp(min=1)                                 # (N, 1) |o_i|
    log_ratio = (logp - old_logp) * mask                                             # (N, T)
    ratio = log_ratio.clamp(max=20).exp()                                            # (N, T) not above e^20         (2)
    clipped = ratio.clamp(1 - args.eps_low, 1 + args.eps_high)                       # shaped as ratio
    objective = torch.min(ratio * adv, clipped * adv)                                # shaped as ratio x adv         (3)
    loss = -(objective * mask / lengths).sum()
    bound = (clipped * adv < ratio * adv).detach() * mask                            # (N, T) where the clip holds
    stats = {"loss": (loss.detach(), len(mask)), "clip_frac": (bound.sum(), mask.sum()),
             "ratio_max": (ratio.detach() * mask).max()}
    return loss, stats


def value_loss(values, old_values, returns, mask, args):
    """Equation (5): the SUM over rows of row means. All (N, T). Returns the loss and statistics, pairs (sum, count)."""
    lengths = mask.sum(1, keepdim=True).clamp(min=1)                                 # (N, 1) |o_i|
    clipped = old_values + (values - old_values).clamp(-args.eps_value, args.eps_value)             # (N, T)
    error = 0.5 * torch.max((values - returns) ** 2, (clipped - returns) ** 2)       # (N, T)                        (5)
    loss = (error * mask / lengths).sum()
    return loss, {"value_loss": (loss.detach(), len(mask))}


@torch.no_grad()
def collect(policy, value, reference, tokenizer, problems, reward, args):
    """Sample G completions of each problem and score them: all that stays constant while the rollout is trained on.

    Returns the rollout (see common.py) with rewards (N,), old_logp, ref_logp, values, returns and adv (N, T), and
    statistics.
    """
    began = time.perf_counter()
    prompts = [p["prompt"] for p in problems]
    rollout = common.generate(policy, tokenizer, prompts, args.group_size, args.max_new_tokens, args.temperature)
    seconds = time.perf_counter() - began
    asked = [p for p in problems for _ in range(args.group_size)]                    # row i answers asked[i]
    rollout["rewards"] = reward(asked, rollout["texts"]).to(policy.device)           # (N,)
    rollout["old_logp"], entropy = common.score_rows(
        lambda b: common.token_logprobs(policy, b, args.temperature, with_entropy=True), rollout, args)
    stats, mask = common.rollout_stats(rollout, entropy, args.group_size, seconds), rollout["mask"]
    if reference is not None:
        [rollout["ref_logp"]] = common.score_rows(
            lambda b: common.token_logprobs(reference, b, args.temperature), rollout, args)
        stats["kl"] = ((rollout["old_logp"] - rollout["ref_logp"]).sum() / mask.sum()).item()
    [rollout["values"]] = common.score_rows(lambda b: common.token_values(value, b), rollout, args)
    rewards = token_rewards(rollout["rewards"], rollout["old_logp"], rollout.get("ref_logp"), mask, args.beta)
    rollout["adv"], rollout["returns"] = gae(rewards, rollout["values"], mask, args.gamma, args.lam)
    to_go, _ = gae(rewards, 0 * rollout["values"], mask, args.gamma, 1.0)            # (N, T) what came, without V
    stats["explained_variance"] = common.explained_variance(rollout["values"], to_go, mask)
    if args.whiten:
        rollout["adv"] = whiten(rollout["adv"], mask)
    return rollout, stats


def update(policy, value, optimizers, rollout, args):
    """Passes over the rollout x minibatches (an optimiser step each) x micro-batches (that fit in memory)."""
    began, totals = time.perf_counter(), common.Totals()
    for _ in range(args.epochs):
        for minibatch in common.minibatches(rollout, args.minibatches, args.group_size):
            rows = len(minibatch["ids"])  # the denominator of the whole optimiser step, whatever the micro-batches
            for b in common.micro_batches(minibatch, args.micro_batch_tokens):
                logp = common.token_logprobs(policy, b, args.temperature)            # (n, t) with gradient
                loss, stats = policy_loss(logp, b["old_logp"], b["adv"], b["mask"], args)
                (loss / rows).backward()
                values = common.token_values(value, b)                               # (n, t) with gradient
                loss, value_stats = value_loss(values, b["values"], b["returns"], b["mask"], args)
                (args.vf_coef * loss / rows).backward()
                totals.add(stats | value_stats | common.padding(b))
            totals.add(optimizers["policy"].step() | optimizers["value"].step("value_"))
    positions = rollout["attention"].sum().item() * args.epochs
    return totals.means() | {"update_tokens_per_s": positions / (time.perf_counter() - began)}


def main(args):
    """Load, then {collect, update, evaluate, log, save} until --steps."""
    policy, tokenizer = common.load_policy(args)
    problems, held_out = common.load_problems(args, tokenizer)
    reward = common.load_reward(args)
    reference = common.load_reference(args) if args.beta > 0 else None
    value = common.load_value(args)
    models = {"policy": policy, "value": value, "reference": reference}
    optimizers = {"policy": common.Optimizer(policy, args.lr, args, eps=1e-5),
                  "value": common.Optimizer(value, args.value_lr, args, eps=1e-5)}
    start = common.load_checkpoint(args, optimizers)
    log = common.Logger(args, start)
    if start == 0:
        log.log(0, common.evaluate(policy, tokenizer, held_out, reward, args))
    for step in log.steps():
        began = time.perf_counter()
        drawn = common.batch_of(problems, step, args)                                # P problems
        rollout, stats = collect(policy, value, reference, tokenizer, drawn, reward, args)
        stats |= update(policy, value, optimizers, rollout, args)
        stats["seconds"] = time.perf_counter() - began
        if step % args.eval_every == 0 or step == args.steps:
            stats |= common.evaluate(policy, tokenizer, held_out, reward, args)
        log.log(step, stats, drawn[0]["question"], rollout)
        if step % args.save_every == 0 or step == args.steps or log.interrupted:
            common.save_checkpoint(args, step, tokenizer, models, optimizers)
    log.close(models | {"reward": reward}, optimizers)


if __name__ == "__main__":
    common.launch(main, parse_args())

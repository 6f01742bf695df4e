"""GSPO: group sequence policy optimisation (Zheng et al. 2025, arXiv 2507.18071).

pi is the model that is trained, pi_old the model as it sampled, pi_ref a frozen copy. For every
question q sample a group of G completions o_1 ... o_G from pi_old, reward each with r_i, and
maximise J

    A_i   = (r_i - mean(r)) / (std(r) + 1e-4)    over o_i's group, one for all its tokens      (1)
    s_i   = exp(mean_t log w_it),  w_it = pi(o_it | q, o_i<t) / pi_old(o_it | q, o_i<t)        (2)
    J     = 1/N sum_i 1/|o_i| sum_t { min(s_i A_i, clip(s_i, 1 - eps_low, 1 + eps_high) A_i)
                                      - beta KL_it }                                           (3)
    KL_it = x - log x - 1,  x = pi_ref(o_it | q, o_i<t) / pi(o_it | q, o_i<t)                  (4)

(4) is the estimator k3 (joschu.net/blog/kl-approx.html) of KL(pi || pi_ref), but its gradient is
that of KL(pi_ref || pi). --kl wk3 multiplies it by w_it and has the gradient of KL(pi || pi_ref).

There is no value model: the mean of the group is the baseline. There is no reward model unless
you name one: the reward is 1 for a right answer, 0 for a wrong one. With --beta 0 there is no
pi_ref.

The reward belongs to a whole completion, and so do the ratio and its clip: all tokens of o_i
count, or none. The paper has no KL: here beta is 0. GSPO-token (--token_level, eq. 13) has s_it =
sg[s_i] w_it / sg[w_it], sg stops the gradient, so that tokens may have advantages of their own,
here A_it = gamma^(|o_i| - t) A_i. The clip range is the paper's in float32; in 16 bits rounding
alone moves s_i further than that (--eps_low, and ratio_noise in the log).

    python gspo.py                                                               a laptop
    the same with --model Qwen/Qwen2.5-1.5B-Instruct --dataset openai/gsm8k      one GPU

Shapes: P prompts per step, G completions per prompt, N = P*G rows, T completion positions.
"""
import copy
import time

import torch

import common

def parse_args(argv=None):
    """Parse the flags that change the equations, and those of every script: common.add_args."""
    parser = common.parser(__file__, __doc__)
    add = parser.add_argument_group("objective and its optimisation").add_argument
    add("--prompts", type=common.count, default=32, help="P: more make a steadier gradient")
    add("--group_size", type=common.two_or_more, default=8, help="G of (1); usually 8 to 64")
    add("--eps_low", type=common.share, default=dict(float32=3e-4, float16=1e-3, bfloat16=1e-2),
        help="clip range below 1 (3); usually .1 to .3; in GSPO 3e-4 to .01")
    add("--eps_high", type=common.positive, default=dict(float32=4e-4, float16=1e-3, bfloat16=1e-2),
        help="clip range above 1 (3); eps_low or more")
    add("--beta", type=common.positive_or_zero, default=0.0,
        help="weight of the KL (4); usually 0 to 0.1; 0 needs no pi_ref")
    add("--kl", choices=["k3", "wk3"], default="k3", help="estimator of the KL (4): k3 or w k3")
    add("--ref_every", type=common.count, help="every so many steps pi_ref becomes pi")
    add("--token_level", action="store_true", help="GSPO-token: a token has its own advantage")
    add("--gamma", type=common.share, default=1.0, help="of A_it with --token_level; .99 to 1")
    add("--lr", type=common.positive, default=dict(toy=5e-4, real=1e-6), help="of AdamW")
    add("--epochs", type=common.count, default=1, help="passes over a rollout; usually 1 to 4")
    add("--minibatches", type=common.count, default=4,
        help="optimiser steps per pass; with 1 (and 1 epoch) the ratio (2) stays 1: no clip")
    common.add_args(parser)
    return common.parse(parser, argv)

def group_advantages(rewards, group_size):
    """Compute equation (1). Rewards (N,), groups side by side -> advantages (N,).

    The paper does not say which deviation (this is the sample's, n - 1) and has no 1e-4. A group
    of equal rewards gets exactly 0, as its deviation may be rounding noise.
    """
    r = rewards.view(-1, group_size)                                       # (P, G)
    adv = (r - r.mean(1, keepdim=True)) / (r.std(1, keepdim=True) + 1e-4)  # (P, G)            (1)
    equal = (r == r[:, :1]).all(1, keepdim=True)                           # (P, 1)
    return adv.masked_fill(equal, 0.0).view(-1)

def policy_loss(logp, old_logp, ref_logp, adv, mask, args):
    """Compute -J, equations (2) to (4), as the SUM over rows of row means: so micro-batches add up
    to the same gradient. The caller divides by the rows of the whole optimiser step.

    adv is (N, T) or (N, 1), all else (N, T). Log-ratios are cut at 20, so that exp is finite.
    Returns the loss, a scalar, and statistics: pairs (sum, count), or a number if *_max.
    """
    lengths = mask.sum(1, keepdim=True).clamp(min=1)                       # (N, 1) |o_i|
    log_ratio = (logp - old_logp) * mask                                   # (N, T)
    # The mean, not the sum, which grows with the length.
    ratio = (log_ratio.sum(1, keepdim=True) / lengths).clamp(max=20).exp() # (N, 1)            (2)
    if args.token_level:
        ratio = ratio.detach() * (logp - logp.detach()).exp()              # (N, T) sg[s_i] w/sg[w]
    clipped = ratio.clamp(1 - args.eps_low, 1 + args.eps_high)
    # Why the min: for A > 0 there is nothing to gain from a ratio above 1 + eps_high, for A < 0
    # nothing from one below 1 - eps_low: there the gradient is 0. On the other side the min
    # takes the term without a clip, so that a step the wrong way can be taken back.
    objective = torch.min(ratio * adv, clipped * adv)                                         # (3)
    if args.beta > 0:
        log_x = ((ref_logp - logp) * mask).clamp(max=20)                   # (N, T)
        kl = log_x.exp() - log_x - 1                                       # (N, T)            (4)
        if args.kl == "wk3":
            kl = kl * log_ratio.clamp(max=20).exp()  # w_it, as in (2)
        objective = objective - args.beta * kl
    loss = -(objective * mask / lengths).sum()
    is_clipped = (clipped * adv < ratio * adv) * mask  # the min took the clipped term
    stats = {"loss": (loss.detach(), len(mask)), "clip_frac": (is_clipped.sum(), mask.sum()),
             "ratio_max": (ratio.detach() * mask).max()}
    return loss, stats

@torch.no_grad()
def collect(policy, reference, tokenizer, problems, reward, args):
    """Sample G completions of each problem and reward them; compute advantages, and log-probs in
    the same micro-batches as update. Returns the rollout (see common.py) and statistics."""
    prompts = [problem["prompt"] for problem in problems]                  # 1. sample
    rollout = common.generate(policy, tokenizer, prompts, args.group_size, args.max_new_tokens,
                              args.temperature, args.cuda_graphs)
    rollout["rewards"] = common.rewards_of(reward, problems, rollout)      # 2. reward: (N,)
    rollout["old_logp"] = common.rollout_logprobs(policy, rollout, args)  # 3. log-probs: (N, T)
    if reference is not None:
        rollout["ref_logp"] = common.rollout_logprobs(reference, rollout, args)
    adv = group_advantages(rollout["rewards"], args.group_size)            # 4. advantages: (N,)
    rollout["adv"] = adv[:, None]                                          # (N, 1)
    if args.token_level:  # A_it = gamma^(|o_i| - t) A_i
        after = rollout["mask"].flip(1).cumsum(1).flip(1) - 1              # (N, T) |o_i| - t
        rollout["adv"] = args.gamma ** after.clamp(min=0) * adv[:, None]   # (N, T)
    return rollout, common.rollout_stats(rollout, args.group_size)

def update(policy, optimizers, rollout, args):
    """Train: epochs x minibatches (a step each) x micro-batches (for memory). Returns stats."""
    logged, start = [], time.perf_counter()
    for _ in range(args.epochs):
        for minibatch in common.minibatches(rollout, args.minibatches, args.group_size):
            rows = len(minibatch["ids"])  # of all its micro-batches: the 1/N of (3)
            for b in common.micro_batches(minibatch, args.micro_batch_tokens):
                logp = common.token_logprobs(policy, b, args.temperature)  # (n, t) with gradient
                loss, stats = policy_loss(
                    logp, b["old_logp"], b.get("ref_logp"), b["adv"], b["mask"], args)
                optimizers["policy"].backward(loss / rows)
                logged.append(stats | common.padding(b))
            logged.append(optimizers["policy"].step())
    tokens = args.epochs * rollout["attention"].sum().item()
    return common.means(logged) | {"update_tokens_per_s": tokens / (time.perf_counter() - start)}

def main(args):
    """Load, then {collect, update, evaluate, log, save} until --steps."""
    policy, tokenizer = common.load_policy(args)
    common.resolve_and_check(args, policy)  # settles the defaults
    reward = common.load_reward(args)  # or any function (problems, completions) -> numbers
    problems, held_out = common.load_problems(args, tokenizer, reward)
    reference = copy.deepcopy(policy).eval().requires_grad_(False) if args.beta > 0 else None
    optimizers = {"policy": common.Optimizer(policy, args.lr, args)}
    start = common.load_checkpoint(args, optimizers, reference)  # 0 unless --resume
    logger = common.Logger(args, start)
    if start == 0:
        logger.log(0, common.evaluate(policy, tokenizer, held_out, reward, args))
    stop = common.StopSignal()
    for step in range(start + 1, args.steps + 1):
        torch.manual_seed(args.seed * 1_000_003 + step)  # its own draws, also if resumed
        step_start = time.perf_counter()
        if reference is not None and args.ref_every and (step - 1) % args.ref_every == 0:
            reference.load_state_dict(policy.state_dict())                 # pi_ref <- pi
        batch = common.batch_of(problems, step, args)                      # P problems
        rollout, stats = collect(policy, reference, tokenizer, batch, reward, args)
        if step == 1:
            stats |= common.ratio_noise(policy, rollout, args, clipped="sequence")  # of (2)
        stats |= update(policy, optimizers, rollout, args)                 # pi moves on
        stats["seconds"] = time.perf_counter() - step_start
        if step % args.eval_every == 0 or step == args.steps:
            stats |= common.evaluate(policy, tokenizer, held_out, reward, args)
        logger.log(step, stats, batch[0], rollout)
        if stop.status or step % args.save_every == 0 or step == args.steps:
            common.save_checkpoint(args, step, tokenizer, optimizers, reference)
            if stop.status:  # after Ctrl-C or SIGTERM
                break
    logger.close(stop)  # exits if a signal cut the run short

if __name__ == "__main__":
    common.launch(main, parse_args())

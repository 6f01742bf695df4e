"""GSPO: group sequence policy optimisation (Zheng et al. 2025, arXiv 2507.18071).

pi is the model that is trained, pi_old is that model when it sampled, and pi_ref is a frozen copy
of the model that training began with. For every question q, sample a group of G completions
o_1 ... o_G from pi_old, reward each with r_i, and maximise J:

    A_i   = (r_i - mean(r)) / (std(r) + 1e-4)    over o_i's group, one for all its tokens      (1)
    s_i   = exp(mean_t log w_it),  w_it = pi(o_it | q, o_i<t) / pi_old(o_it | q, o_i<t)        (2)
    J     = 1/N sum_i 1/|o_i| sum_t { min(s_i A_i, clip(s_i, 1 - eps_low, 1 + eps_high) A_i)
                                      - beta KL_it }                                           (3)
    KL_it = x - log x - 1,  x = pi_ref(o_it | q, o_i<t) / pi(o_it | q, o_i<t)                  (4)

(4) is the estimator k3 (joschu.net/blog/kl-approx.html). Given the prefix o_i<t, its mean over
samples of pi is KL(pi || pi_ref). But backward does not differentiate the sampling, so the mean of
its gradient is that of KL(pi_ref || pi). With --kl wk3 (DeepSeek-V3.2, arXiv 2512.02556) KL_it is
w_it times k3: over samples of pi_old, the mean of its gradient is that of KL(pi || pi_ref).
tests/results/README.md derives both.

There is no value model: the mean of the group is the baseline. A right answer pays 1, a wrong one
0. The four minibatches and the clip range are the paper's; in bfloat16, which rounds too coarsely
for it, our range is .01. The paper prints J without a KL, so --beta is 0. While it is 0, the mean
over t in (3) does nothing. KL_it and GSPO-token (--token_level, the paper's 13 and 14) need it.

    python gspo.py                                                             on a laptop
    python gspo.py --model Qwen/Qwen2.5-1.5B-Instruct --dataset openai/gsm8k   on a GPU of 40 GB

We had no GPU: the memory is counted on an emulated one (tests/manual/README.md).

Shapes: P prompts, G completions of each, N = P*G rows, T completion positions.
"""
import copy
import time

import torch

import common

def parse_args(argv=None):
    """Parse the flags that change the equations, and those of every script: common.make_parser."""
    parser, add = common.make_parser(__file__, __doc__)
    add("--prompts", type=int, default=32, help="P: more make a steadier gradient")
    add("--group_size", type=int, default=8, help="G of (1); usually 8 to 64")
    add("--eps_low", type=float, help="clip range below 1 (3); if not given 3e-4, .01 in bfloat16")
    add("--eps_high", type=float, help="clip range above 1 (3); if not given 4e-4, .01 in bfloat16")
    add("--beta", type=float, default=0.0,
        help="weight of the KL (4); usually 0 to 0.1; 0 needs no pi_ref")
    add("--kl", choices=["k3", "wk3"], default="k3", help="estimator of the KL (4): k3 or w k3")
    add("--ref_every", type=int, help="every so many steps pi_ref becomes pi")
    add("--token_level", action="store_true", help="GSPO-token: an A_it per token, by --gamma")
    add("--gamma", type=float, default=1.0, help="for --token_level: A_i gamma^(tokens after t)")
    add("--lr", type=float, default=1e-6, help="learning rate of AdamW")
    add("--epochs", type=int, default=1, help="passes over a rollout; 1 to 4")
    add("--minibatches", type=int, default=4,
        help="optimiser steps per pass; with 1 (and 1 epoch) the ratio (2) is 1: no clip")
    args = common.parse(parser, argv, lr=5e-4)  # this lr is for the toy
    if args.group_size < 2:
        parser.error("--group_size: a completion without a group has nothing to be compared with")
    if args.beta == 0 and (args.kl == "wk3" or args.ref_every):
        parser.error("--kl wk3 and --ref_every: there is no KL, give a --beta above 0")
    if args.gamma != 1 and not args.token_level:
        parser.error("--gamma: it changes A with --token_level only")
    # In bfloat16, once a step has moved pi, rounding alone moves s beyond the paper's range.
    eps_low, eps_high = (3e-4, 4e-4) if args.dtype == "float32" else (1e-2, 1e-2)
    args.eps_low = eps_low if args.eps_low is None else args.eps_low
    args.eps_high = eps_high if args.eps_high is None else args.eps_high
    return args

def group_advantages(rewards, group_size):
    """Compute equation (1): rewards (N,) of groups side by side -> advantages (N,), which add up to
    0 in a group. The 1e-4 is our guard against a tiny std. The paper does not say which std it is;
    ours divides by G - 1. Equal rewards get A = 0, as r - mean(r) may be rounding noise."""
    r = rewards.view(-1, group_size)                                       # (P, G)
    adv = (r - r.mean(1, keepdim=True)) / (r.std(1, keepdim=True) + 1e-4)  # (P, G)            (1)
    equal = (r == r[:, :1]).all(1, keepdim=True)                           # (P, 1)
    return adv.masked_fill(equal, 0.0).view(-1)

def policy_loss(logp, old_logp, ref_logp, adv, mask, eps_low, eps_high, beta, kl):
    """Compute -J, without its 1/N, by the equations above: loss = -sum_i 1/|o_i| sum_t { ... }.
    It is a sum over rows, so that the losses of micro-batches add up; update divides by N. adv is
    (N, T) or (N, 1), all else (N, T). Log-ratios are cut at 20, so that exp is finite. Returns the
    loss, a scalar, and statistics: pairs (sum, count), or one number if the name ends in _max."""
    lengths = mask.sum(1, keepdim=True).clamp(min=1)  # (N, 1) |o_i|; 1 if you mask a whole row
    log_ratio = (logp - old_logp) * mask                                   # (N, T)
    # The mean of the log w_it, because their sum grows with the length: one range serves all |o_i|.
    ratio = (log_ratio.sum(1, keepdim=True) / lengths).clamp(max=20).exp() # (N, 1)            (2)
    if adv.shape[1] > 1:
        # adv (N, T): GSPO-token, where each token may have an advantage of its own. sg[x] is x as a
        # constant. So s_it = sg[s_i] pi / sg[pi] has s_i's value, but only token t's gradient.
        ratio = ratio.detach() * (logp - logp.detach()).exp()              # (N, T) sg[s] pi/sg[pi]
    clipped = ratio.clamp(1 - eps_low, 1 + eps_high)
    # Why the min: for A > 0 there is nothing to gain from a ratio above 1 + eps_high, for A < 0
    # nothing from one below 1 - eps_low: there the gradient is 0. On the other side the min
    # takes the term without a clip, so that a step the wrong way can be taken back.
    objective = torch.min(ratio * adv, clipped * adv)                                         # (3)
    if beta != 0:
        log_x = ((ref_logp - logp) * mask).clamp(max=20)                   # (N, T)
        kl_it = log_x.exp() - log_x - 1                                    # (N, T)            (4)
        if kl == "wk3":
            kl_it = kl_it * log_ratio.clamp(max=20).exp()  # w_it k3; in gspo.py ratio is s_i
        objective = objective - beta * kl_it
    loss = -(objective * mask / lengths).sum()
    # A good token (adv > 0) is clipped above 1 + eps_high, a bad one below 1 - eps_low.
    is_clipped = (clipped * adv < ratio * adv) * mask
    # The logged means are over the completions that are computed, not over all N.
    stats = {"loss": (loss.detach(), len(mask)), "clip_frac": (is_clipped.sum(), mask.sum()),
             "ratio_max": (ratio.detach() * mask).max()}
    return loss, stats

@torch.no_grad()
def collect(policy, reference, tokenizer, problems, reward, args):
    """Make a rollout (see common.py): N rewarded completions, their log-probs and advantages."""
    rollout = common.generate(                                             # 1. sample
        policy, tokenizer, problems, args.group_size, args.temperature, args)
    rollout["rewards"] = common.rewards_of(reward, rollout)                # 2. reward: (N,)
    adv = group_advantages(rollout["rewards"], args.group_size)            # 3. advantages: (N,)
    rollout["adv"] = adv[:, None]                                          # (N, 1)
    if args.token_level:  # A_it = gamma^(tokens after t) A_i; gamma = 1 is GSPO
        after = rollout["mask"].flip(1).cumsum(1).flip(1) - 1              # (N, T) tokens after t
        rollout["adv"] = args.gamma ** after.clamp(min=0) * adv[:, None]   # (N, T)
    if args.beta == 0:
        # Without a KL, the gradient of a completion with A = 0 is exactly 0: it is not computed.
        rollout["has_gradient"] = adv != 0                                 # (N,)
    # 4. log-probs: (N, T), in the micro-batches of update, so that logp is rounded like old_logp
    rollout["old_logp"] = common.over_batches(common.token_logprobs, policy, rollout, args)
    if reference is not None:
        rollout["ref_logp"] = common.over_batches(common.token_logprobs, reference, rollout, args)
    stats = common.rollout_stats(rollout, args.group_size)
    return rollout, stats

def update(policy, optimizers, rollout, args):
    """Train: epochs x minibatches (an optimiser step each) x micro-batches (for memory). Returns
    statistics: means over rows, tokens or steps (see common.means), and the largest ratio."""
    logged = []
    for _ in range(args.epochs):
        for minibatch in common.minibatches(rollout, args.minibatches, args.group_size):
            rows = len(minibatch["ids"])  # N of (3) in this step, rows without a gradient included
            for b in common.micro_batches(minibatch, args.micro_batch_tokens):
                logp = common.token_logprobs(policy, b, args)  # shape of b["mask"], with gradient
                loss, stats = policy_loss(
                    logp, b["old_logp"], b.get("ref_logp"), b["adv"], b["mask"],
                    args.eps_low, args.eps_high, args.beta, args.kl)
                (loss / rows).backward()
                logged.append(stats)
            logged.append(optimizers["policy"].clip_and_step())
    return common.means(logged)

def main(args):
    """Load, then {collect, update, evaluate, log, save} until --steps."""
    common.start_run(args)
    policy, tokenizer = common.load_policy(args)
    problems, held_out = common.load_problems(args, tokenizer)
    reward = common.answer_reward  # or any function (problems, completions) -> numbers
    # pi_ref is copied before load_checkpoint puts the weights of a resumed run into the policy.
    reference = copy.deepcopy(policy).eval().requires_grad_(False) if args.beta != 0 else None
    optimizers = {"policy": common.Optimizer(policy, args.lr, args)}  # a dict, as ppo.py has two
    # What a checkpoint has besides the policy: pi_ref only if --ref_every changes it.
    parts = dict(optimizers)
    if args.ref_every:
        parts["reference"] = reference
    start = common.load_checkpoint(args.out, policy, parts)  # 0 unless --resume
    if start == 0:
        common.log(args, 0, common.evaluate(policy, tokenizer, held_out, reward, args, 0))
    for step in range(start + 1, args.steps + 1):
        torch.manual_seed(args.seed * 1_000_003 + step)  # draws depend on seed and step alone
        step_start = time.perf_counter()
        if args.ref_every and (step - 1) % args.ref_every == 0:
            reference.load_state_dict(policy.state_dict())                 # pi_ref <- pi
        batch = common.batch_of(problems, step, args.prompts, args.seed)   # P problems
        rollout, stats = collect(policy, reference, tokenizer, batch, reward, args)
        stats |= update(policy, optimizers, rollout, args)                 # pi moves on
        stats["seconds"] = time.perf_counter() - step_start
        if step % args.eval_every == 0 or step == args.steps:
            stats |= common.evaluate(policy, tokenizer, held_out, reward, args, step)
        if stats.get("sampling_sequence_difference", 0) > args.eps_low:
            # In an update, rounding moves log s by about as much as this difference.
            print("warning: rounding moves s further than --eps_low: raise both eps")
        common.log(args, step, stats, rollout)
        if step % args.save_every == 0 or step == args.steps:
            common.save_checkpoint(args.out, step, tokenizer, policy, parts)

if __name__ == "__main__":
    main(parse_args())

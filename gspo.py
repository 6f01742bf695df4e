"""GSPO: group sequence policy optimization (Zheng et al. 2025, arXiv 2507.18071).

pi is the model being trained, pi_old is the same model as it was when it sampled, and pi_ref is a
frozen copy of the model that training started from. For each of P questions q, sample from pi_old
a group of G completions. Number all N = P*G of them by i, reward o_i with r_i, and maximize J:

    A_i   = (r_i - mean(r)) / (std(r) + 1e-4)    over o_i's group; same for every token of o_i (1)
    w_it  = pi(o_it | q, o_i<t) / pi_old(o_it | q, o_i<t)                                      (2)
    s_i   = exp(mean_t log w_it);  --token_level: s_it = sg[s_i] w_it / sg[w_it], sg = detach  (5)
    J     = 1/N sum_i 1/|o_i| sum_t { min(s_i A_i, clip(s_i, 1 - eps_low, 1 + eps_high) A_i)
                                      - beta KL_it }                                           (3)
    KL_it = x - log x - 1,  x = pi_ref(o_it | q, o_i<t) / pi(o_it | q, o_i<t)                  (4)

(4) is the k3 estimator (joschu.net/blog/kl-approx.html): given the prefix o_i<t, its mean over
samples from pi is KL(pi || pi_ref). But while pi = pi_old, its gradient is that of the other KL,
KL(pi_ref || pi). --kl wk3 (DeepSeek-V3.2, arXiv 2512.02556) multiplies k3 by w_it, and the gradient
is always that of KL(pi || pi_ref). tests/lesson/README.md derives both.

There is no value model: the group's mean reward is the baseline. Right answers earn 1, wrong ones
0. Each optimizer step maximizes the J of its own minibatch, with its own N.
Like the paper, we use 4 minibatches. It omits the KL "for brevity"; here --beta defaults to 0.

    python gspo.py                                                                          # laptop
    python gspo.py --model Qwen/Qwen2.5-1.5B-Instruct --dataset openai/gsm8k --subset main  # 40 GB

Shapes: P prompts, G completions per prompt, N = P*G rows, T tokens in the longest completion.
"""
import copy
import time

import torch

import common

def parse_args(argv=None):
    """Parse this script's own flags and the shared ones (common.make_parser)."""
    parser = common.make_parser(__file__, __doc__)
    add = parser.add_argument
    # Types: a whole number above 0, a number above 0, and a number that is at least 0.
    count, positive, amount = common.count, common.positive, common.amount
    add("--prompts", type=count, default=32, help="P, prompts per step; more give less variance")
    add("--group_size", type=count, default=8, help="G, completions per prompt; usually 8 to 64")
    add("--eps_low", type=amount, help="lower clip range in (3); None: 3e-4, or 0.01 in bfloat16")
    add("--eps_high", type=amount, help="upper clip range in (3); None: 4e-4, or 0.01 in bfloat16")
    add("--beta", type=amount, default=0.0,
        help="weight of the KL penalty (4); usually 0 to 0.1; at 0 there is no pi_ref")
    add("--kl", choices=["k3", "wk3"], default="k3", help="KL estimator in (4): k3, or w times k3")
    add("--ref_every", type=count, help="number of steps between copies of pi to pi_ref")
    add("--token_level", action="store_true", help="GSPO-token, for an A_it of your own per token")
    add("--lr", type=positive, default=1e-6, help="learning rate of Adam")
    add("--epochs", type=count, default=1, help="passes over each rollout; usually 1 to 4")
    add("--minibatches", type=count, default=4,
        help="optimizer steps per pass; with 1 and --epochs 1, w stays 1 and nothing is clipped")
    args = common.parse(parser, argv, lr=5e-4)  # the toy's; see also tests/toy/args.json
    if args.group_size < 2:
        parser.error("--group_size must be at least 2: the group's mean is the baseline")
    if args.beta == 0 and (args.kl == "wk3" or args.ref_every):
        parser.error("--kl wk3 and --ref_every need a KL: set --beta above 0")
    # In bfloat16, once a step has moved pi, rounding alone often takes s out of the paper's range.
    eps_low, eps_high = (3e-4, 4e-4) if args.dtype == "float32" else (1e-2, 1e-2)
    args.eps_low = eps_low if args.eps_low is None else args.eps_low
    args.eps_high = eps_high if args.eps_high is None else args.eps_high
    return args

def group_advantages(rewards, group_size):
    """Compute equation (1): rewards (N,), one group after another -> advantages (N,), which sum to
    0 in each group. The 1e-4 is our guard against a tiny std. The papers don't say which std they
    use; ours divides by G - 1. If all rewards are equal, A is exactly 0, whatever rounding does."""
    r = rewards.view(-1, group_size)                                       # (P, G)
    adv = (r - r.mean(1, keepdim=True)) / (r.std(1, keepdim=True) + 1e-4)  # (P, G)            (1)
    equal = (r == r[:, :1]).all(1, keepdim=True)                           # (P, 1)
    return adv.masked_fill(equal, 0.0).view(-1)

def policy_loss(logp, old_logp, ref_logp, adv, mask, eps_low, eps_high, beta, kl, token_level):
    """Compute -J without its 1/N, as in the equations above: loss = -sum_i 1/|o_i| sum_t ... . The
    loss is a sum over rows, so it adds up over micro-batches; update divides it by N. adv is (N, T)
    or (N, 1), the other tensors (N, T). Log-ratios above 20 are clamped, so exp is finite. Returns
    the scalar loss and statistics, which are (sum, count) pairs."""
    lengths = mask.sum(1, keepdim=True).clamp(min=1)  # (N, 1) |o_i|, or 1 for an empty row
    log_ratio = (logp - old_logp) * mask                                   # (N, T)
    # The mean of log w_it, not the sum, which grows with |o_i|: one clip range fits any length.
    s = (log_ratio.sum(1, keepdim=True) / lengths).clamp(max=20).exp()     # (N, 1)            (5)
    if token_level:
        # GSPO-token, where adv may be (N, T). sg (stop-gradient) treats its argument as a constant:
        # s_it has the value of s_i, but only token t's gradient.
        s = s.detach() * (logp - logp.detach()).exp()                      # (N, T)            (5)
    unclipped, clipped = s * adv, s.clamp(1 - eps_low, 1 + eps_high) * adv
    # Why the min: for A > 0 there is nothing left to gain once the ratio exceeds 1 + eps_high, and
    # for A < 0 once it falls below 1 - eps_low, so the gradient there is 0. On the other side the
    # min takes the unclipped term, so that a step in the wrong direction can be undone.
    objective = torch.min(unclipped, clipped)                                                 # (3)
    if beta != 0:
        log_x = ((ref_logp - logp) * mask).clamp(max=20)                   # (N, T)
        kl_it = log_x.exp() - log_x - 1                                    # (N, T)            (4)
        if kl == "wk3":
            kl_it = log_ratio.clamp(max=20).exp() * kl_it                  # w_it k3           (2)
        objective = objective - beta * kl_it
    loss = -(objective * mask / lengths).sum()
    # Count where the clip is active: above 1 + eps_high if adv > 0, below 1 - eps_low if adv < 0.
    is_clipped = (clipped < unclipped) * mask
    # Rows to skip never get here (see update), so the logged loss is a mean over the others.
    return loss, {"loss": (loss.detach(), len(mask)), "clip_frac": (is_clipped.sum(), mask.sum())}

@torch.no_grad()
def collect(policy, reference, tokenizer, problems, reward, args):
    """Collect a rollout (see common.generate), with rewards, log-probs, and advantages."""
    # 1. sample: N completions
    rollout = common.generate(policy, tokenizer, problems, args.group_size, args)
    rewards = [float(r) for r in reward(rollout["problems"], rollout["texts"])]
    rollout["rewards"] = torch.tensor(rewards, device=args.device)         # 2. reward: (N,)
    adv = group_advantages(rollout["rewards"], args.group_size)            # 3. advantages: (N,)
    rollout["adv"] = adv[:, None]                                          # (N, 1)
    if args.beta == 0:
        # Without a KL, a completion with A = 0 has a gradient of exactly 0: update may skip it.
        rollout["skip"] = adv == 0                                         # (N,)
    # 4. log-probs: (N, T), in the micro-batches of update, so that old_logp and logp round alike
    rollout["old_logp"] = common.over_batches(common.token_logprobs, policy, rollout, args)
    if reference is not None:
        rollout["ref_logp"] = common.over_batches(common.token_logprobs, reference, rollout, args)
    stats = common.rollout_stats(rollout, args)
    return rollout, stats

def update(policy, optimizer, rollout, args):
    """Train: epochs x minibatches (one optimizer step each) x micro-batches (for memory). Returns
    statistics: means over rows, tokens or steps (see common.means)."""
    logged = []
    for _ in range(args.epochs):
        for minibatch in common.minibatches(rollout, args.minibatches, args.group_size):
            rows = len(minibatch["ids"])  # the N of (3): here the rows of one minibatch
            # micro_batches leaves out the rows to skip, but they count in N.
            for b in common.micro_batches(minibatch, args.micro_batch_tokens):
                logp = common.token_logprobs(policy, b, args)  # shape of b["mask"], with gradient
                loss, stats = policy_loss(
                    logp, b["old_logp"], b.get("ref_logp"), b["adv"], b["mask"],
                    args.eps_low, args.eps_high, args.beta, args.kl, args.token_level)
                (loss / rows).backward()
                logged.append(stats)
            logged.append(common.clip_and_step(optimizer, args.lr, args))
    return common.means(logged)

def main(args):
    """Load everything, then {collect, update, evaluate, log, save} up to step --steps."""
    policy, tokenizer = common.load_policy(args)
    problems, held_out = common.load_problems(args, tokenizer)
    reward = common.answer_reward  # or any function (problems, completions) -> numbers
    reference = copy.deepcopy(policy).eval().requires_grad_(False) if args.beta != 0 else None
    optimizer = torch.optim.Adam(policy.parameters(), args.lr, (0.9, 0.95), fused=True)
    parts = {"policy": policy, "optimizer": optimizer}  # what a resumed run needs
    if reference is not None:
        parts["reference"] = reference
    start = common.open_run(args, parts)  # 0 unless --resume
    if start == 0:
        common.save_checkpoint(args.out, 0, tokenizer, policy, parts)  # a failing save fails now
        common.log(args, 0, common.evaluate(policy, tokenizer, held_out, reward, args))
    for step in range(start + 1, args.steps + 1):
        torch.manual_seed(args.seed * 1_000_003 + step)  # so that a resumed run samples the same
        step_start = time.perf_counter()
        if args.ref_every and (step - 1) % args.ref_every == 0:
            reference.load_state_dict(policy.state_dict())                 # pi_ref <- pi
        batch = common.batch_of(problems, step, args.prompts, args.seed)   # P problems
        rollout, stats = collect(policy, reference, tokenizer, batch, reward, args)
        stats |= update(policy, optimizer, rollout, args)                  # pi moves on
        stats["seconds"] = time.perf_counter() - step_start
        if step % args.eval_every == 0 or step == args.steps:
            stats |= common.evaluate(policy, tokenizer, held_out, reward, args)
        common.log(args, step, stats, rollout)
        if step % args.save_every == 0 or step == args.steps:
            common.save_checkpoint(args.out, step, tokenizer, policy, parts)

if __name__ == "__main__":
    main(parse_args())

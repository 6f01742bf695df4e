"""GSPO: group sequence policy optimisation (Zheng et al. 2025, arXiv 2507.18071, eqs. 5-7; GSPO-token: eqs. 13-14).

For every prompt q sample a group of G completions o_1 ... o_G from the old policy, reward them, and maximise

    J = 1/N sum_i 1/|o_i| sum_t { min(s_i A_i, clip(s_i, 1 - eps_low, 1 + eps_high) A_i) - beta KL_it }           (3)

    A_i   = (r_i - mean(r)) / (std(r) + 1e-4)            over the group of o_i, the same for all of its tokens   (1)
    s_i   = (pi(o_i | q) / pi_old(o_i | q))^(1/|o_i|) = exp(mean_t(log pi(o_it) - log pi_old(o_it)))             (2)
    KL_it = ref/pi - log(ref/pi) - 1          k3 of joschu.net/blog/kl-approx.html; --kl wk3 is w_it times it    (4)

The reward is given to a sequence, so the ratio and its clip are a sequence's too: all tokens of a completion count, or
none does. The paper has no KL (beta is 0 unless you set it), and so no mean over t: nothing in it depends on t, but with
--token_level, GSPO-token, where s_it = sg[s_i] pi_it / sg[pi_it] and advantages may differ by token.

    python gspo.py                                                                  a laptop: makes its own model
    python gspo.py --model Qwen/Qwen2.5-1.5B-Instruct --dataset openai/gsm8k        one GPU

Shapes: P prompts a step, G completions a prompt, N = P*G rows, T completion positions.
"""
import time

import torch

import common


def parse_args(argv=None):
    """The flags that change the equations; common.add_args has those that every script shares."""
    parser = common.Parser(__file__, __doc__)
    add, within, Sized = parser.add_argument, common.within, common.Sized
    add("--prompts", type=within("[1, inf)", int), metavar="P", default=32,
        help="prompts a step; more make a steadier gradient and a slower step")
    add("--group_size", type=within("[2, inf)", int), metavar="G", default=8,
        help="completions a prompt (1); a larger group is a steadier baseline; usually 8 to 64")
    add("--eps_low", type=within("(0, 1)"), default=3e-4,
        help="clip range below 1 (3); usually 0.1 to 0.3 for a token's ratio, 3e-4 for a sequence's, which moves far less")
    add("--eps_high", type=within("(0, inf)"), default=4e-4,
        help="clip range above 1 (3); usually 0.2 to 0.3, more lets unlikely tokens grow faster; 4e-4 for a sequence's")
    add("--beta", type=within("[0, inf)"), default=0.0,
        help="weight of the KL penalty (3); 0 needs no reference model; usually 0 to 0.04")
    add("--kl", choices=["k3", "wk3"], default="k3",
        help="estimator (4): k3, as in DeepSeekMath, has the gradient of KL(ref||pi), w times k3 that of KL(pi||ref)")
    add("--ref_every", type=within("[1, inf)", int), metavar="M",
        help="iterative GRPO: the policy becomes the reference every M steps; without it the reference stays")
    add("--lr", type=within("(0, inf)"), default=Sized(5e-4, 1e-6), help="AdamW learning rate")
    add("--epochs", type=within("[1, inf)", int), metavar="MU", default=1,
        help="passes over a rollout; more reuse it further off-policy; usually 1 to 4")
    add("--minibatches", type=within("[1, inf)", int), metavar="N", default=4,
        help="optimiser steps a pass; with 1 (and 1 epoch) the ratio (2) stays 1 and nothing is clipped")
    add("--token_level", action="store_true",
        help="GSPO-token: a true step (a line such as 7+2=9) is never punished, a false one never rewarded")
    common.add_args(parser)
    return common.parse(parser, argv)


def group_advantages(rewards, group_size):
    """Equation (1): z-scores within each group. (N,) rewards, groups side by side -> (N,) advantages.

    The deviation is the sample's (n - 1), as torch has it; neither paper says, and neither has the 1e-4. A group of equal
    rewards gets exactly 0: tested by equality, since in float32 the std of twelve rewards of 0.7 is not 0.
    """
    r = rewards.view(-1, group_size)                                                 # (P, G)
    adv = (r - r.mean(1, keepdim=True)) / (r.std(1, keepdim=True) + 1e-4)            # (P, G)                       (1)
    equal = (r == r[:, :1]).all(1, keepdim=True)                                     # (P, 1)
    return adv.masked_fill(equal, 0.0).view(-1)


def token_advantages(adv, signs):
    """Advantages for GSPO-token: (N,) and signs (N, T), 1 on true steps, -1 on false ones, else 0 -> (N, T)."""
    adv = adv[:, None].expand(signs.shape)
    return torch.where(signs > 0, adv.clamp(min=0), torch.where(signs < 0, adv.clamp(max=0), adv))


def policy_loss(logp, old_logp, ref_logp, adv, mask, args):
    """Equations (2) to (4), negated: the SUM over rows of row means, to be divided by the rows of the optimiser step.

    logp, old_logp, ref_logp (None without reference) and mask are (N, T), adv is (N,) or (N, T). Returns the loss, a
    float32 scalar, and statistics as pairs (sum, count), or as maxima.
    """
    adv = adv if adv.dim() == 2 else adv[:, None]                                    # (N, 1) or (N, T)
    lengths = mask.sum(1, keepdim=True).clamp(min=1)                                 # (N, 1) |o_i|
    log_ratio = (logp - old_logp) * mask                                             # (N, T)
    ratio = (log_ratio.sum(1, keepdim=True) / lengths).clamp(max=20).exp()           # (N, 1) not above e^20         (2)
    if args.token_level:
        ratio = ratio.detach() * (logp - logp.detach()).exp()                        # (N, T), each value as before
    clipped = ratio.clamp(1 - args.eps_low, 1 + args.eps_high)                       # shaped as ratio
    objective = torch.min(ratio * adv, clipped * adv)                                # shaped as ratio x adv         (3)
    stats = {}
    if args.beta > 0:
        log_ref = ((ref_logp - logp) * mask).clamp(max=20)                           # (N, T) log ref/pi
        kl = log_ref.exp() - log_ref - 1                                             # (N, T) k3                     (4)
        if args.kl == "wk3":
            kl = kl * log_ratio.clamp(max=20).exp()                                  # (N, T) k3 times a token's w
        objective = objective - args.beta * kl                                       # (N, T)
        stats["kl"] = (kl.detach() * mask).sum(), mask.sum()
    loss = -(objective * mask / lengths).sum()
    bound = (clipped * adv < ratio * adv).detach() * mask                            # (N, T) where the clip holds
    stats |= {"loss": (loss.detach(), len(mask)), "clip_frac": (bound.sum(), mask.sum()),
              "ratio_max": (ratio.detach() * mask).max()}
    return loss, stats


@torch.no_grad()
def collect(policy, reference, tokenizer, problems, reward, args):
    """Sample G completions of each problem and score them: all that stays constant while the rollout is trained on.

    Returns the rollout (see common.py) with rewards and adv (N,), old_logp and ref_logp (N, T), and statistics.
    """
    began = time.perf_counter()
    prompts = [p["prompt"] for p in problems]
    rollout = common.generate(policy, tokenizer, prompts, args.group_size, args.max_new_tokens, args.temperature)
    seconds = time.perf_counter() - began
    asked = [p for p in problems for _ in range(args.group_size)]                    # row i answers asked[i]
    rollout["rewards"] = reward(asked, rollout["texts"]).to(policy.device)           # (N,)
    rollout["old_logp"], entropy = common.score_rows(
        lambda b: common.token_logprobs(policy, b, args.temperature, with_entropy=True), rollout, args)
    if reference is not None:
        [rollout["ref_logp"]] = common.score_rows(
            lambda b: common.token_logprobs(reference, b, args.temperature), rollout, args)
    rollout["adv"] = group_advantages(rollout["rewards"], args.group_size)           # (N,)
    if args.token_level:
        rollout["adv"] = token_advantages(rollout["adv"], common.step_signs(rollout, tokenizer))
    return rollout, common.rollout_stats(rollout, entropy, args.group_size, seconds)


def update(policy, optimizer, rollout, args):
    """Passes over the rollout x minibatches (an optimiser step each) x micro-batches (that fit in memory)."""
    began, totals = time.perf_counter(), common.Totals()
    for _ in range(args.epochs):
        for minibatch in common.minibatches(rollout, args.minibatches, args.group_size):
            rows = len(minibatch["ids"])  # the denominator of the whole optimiser step, whatever the micro-batches
            for b in common.micro_batches(minibatch, args.micro_batch_tokens):
                logp = common.token_logprobs(policy, b, args.temperature)            # (n, t) with gradient
                loss, stats = policy_loss(logp, b["old_logp"], b.get("ref_logp"), b["adv"], b["mask"], args)
                (loss / rows).backward()
                totals.add(stats | common.padding(b))
            totals.add(optimizer.step())
    positions = rollout["attention"].sum().item() * args.epochs
    return totals.means() | {"update_tokens_per_s": positions / (time.perf_counter() - began)}


def main(args):
    """Load, then {collect, update, evaluate, log, save} until --steps."""
    policy, tokenizer = common.load_policy(args)
    problems, held_out = common.load_problems(args, tokenizer)
    reward = common.load_reward(args)
    reference = common.load_reference(args) if args.beta > 0 else None
    models, optimizers = {"policy": policy, "reference": reference}, {"policy": common.Optimizer(policy, args.lr, args)}
    start = common.load_checkpoint(args, optimizers)
    log = common.Logger(args, start)
    if start == 0:
        log.log(0, common.evaluate(policy, tokenizer, held_out, reward, args))
    for step in log.steps():
        began = time.perf_counter()
        if reference is not None and args.ref_every and (step - 1) % args.ref_every == 0:
            reference.load_state_dict(policy.state_dict())                           # pi_ref <- pi, every M steps
        drawn = common.batch_of(problems, step, args)                                # P problems
        rollout, stats = collect(policy, reference, tokenizer, drawn, reward, args)  # pi_old is pi here
        stats |= update(policy, optimizers["policy"], rollout, args)
        stats["seconds"] = time.perf_counter() - began
        if step % args.eval_every == 0 or step == args.steps:
            stats |= common.evaluate(policy, tokenizer, held_out, reward, args)
        if step == 1 and rollout["adv"].dim() == 1:
            log.say("The loss is 0 at the first update, as w is 1 and the advantages of a group sum to 0; its gradient, the "
                    "mean of A grad log pi, is not. Watch the reward.")
        log.log(step, stats, drawn[0]["question"], rollout)
        if step % args.save_every == 0 or step == args.steps or log.interrupted:
            common.save_checkpoint(args, step, tokenizer, models, optimizers)
    log.close(models | {"reward": reward}, optimizers)


if __name__ == "__main__":
    common.launch(main, parse_args())

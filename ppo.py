"""PPO: proximal policy optimisation (Schulman et al. 2017, arXiv 1707.06347).

pi is the model that is trained, pi_old is that model when it sampled, and pi_ref is a frozen copy
of the model that training began with. For every question q, sample a group of G completions
o_1 ... o_G from pi_old, reward each with r_i, and maximise J:

    A_it  = sum_{l >= 0} (gamma lam)^l delta_{i,t+l},  R_it = A_it + Vold_it,
            delta_it = r_it + gamma Vold_{i,t+1} - Vold_it,  Vold after the last token = 0     (1)
    w_it  = pi(o_it | q, o_i<t) / pi_old(o_it | q, o_i<t)                                      (2)
    J     = 1/N sum_i 1/|o_i| sum_t min(w_it A_it, clip(w_it, 1 - eps_low, 1 + eps_high) A_it) (3)
    r_it  = (r_i at the last token, 0 before it) - beta (log pi_old - log pi_ref)              (4)

and minimise L over a value model V, the critic:

    L     = 1/N sum_i 1/|o_i| sum_t 0.5 max((V_it - R_it)^2, (V'_it - R_it)^2),
            V'_it = Vold_it + clip(V_it - Vold_it, -eps_value, eps_value)                     (5)

Vold is V at the time of sampling. (1) is generalised advantage estimation (GAE, Schulman et al.
2015, 1506.02438). (3) takes A with mean 0 and deviation 1 over the rollout (--whiten); R takes the
plain A. The penalty in (4) is from Ziegler et al. 2019 (1909.08593), InstructGPT (2203.02155).

(5), --whiten and the defaults of ppo.py's own flags, except --prompts and --minibatches, are those
of Huang et al. 2024 (arXiv 2403.17031). Among other differences, they start V from a reward model,
sample at temperature .7, pay -1 for a completion without a stop token, decay the learning rate,
shuffle in every epoch, and average over all tokens, as Schulman et al. do. DeepSeekMath's PPO
averages over the tokens of a completion first, as we do (arXiv 2402.03300, eq. 1).

    python ppo.py                                                             on a laptop
    python ppo.py --model Qwen/Qwen2.5-1.5B-Instruct --dataset openai/gsm8k   on a GPU of 80 GB

We had no GPU: the memory is counted on an emulated one (tests/manual/README.md).

Shapes: P prompts, G completions of each, N = P*G rows, T completion positions.
"""
import argparse
import copy
import time

import torch

import common

def parse_args(argv=None):
    """Parse the flags that change the equations, and those of every script: common.make_parser."""
    parser, add = common.make_parser(__file__, __doc__)
    add("--prompts", type=int, default=256, help="P: more make a steadier gradient")
    add("--group_size", type=int, default=1, help="G; PPO needs no group")
    add("--eps_low", type=float, default=0.2, help="clip range below 1 (3); usually .1 to .3")
    add("--eps_high", type=float, default=0.2, help="clip range above 1 (3); usually .1 to .3")
    add("--beta", type=float, default=0.05,
        help="weight of the KL (4); usually 0 to 0.1; 0 needs no pi_ref")
    add("--gamma", type=float, default=1.0, help="discount (1); usually 1: none")
    add("--lam", type=float, default=0.95, help="of (1): 0 trusts V, 1 the rewards")
    add("--whiten", action=argparse.BooleanOptionalAction, default=True, help="whiten the A of (3)")
    add("--eps_value", type=float, default=0.2, help="how far V may move (5)")
    add("--vf_coef", type=float, default=0.1, help="of (5); 0 freezes V; else Adam hardly sees it")
    add("--lr", type=float, default=3e-6, help="learning rate of AdamW")
    add("--value_lr", type=float, default=3e-6, help="learning rate of V's AdamW")
    add("--epochs", type=int, default=4, help="passes over a rollout; 1 to 4")
    add("--minibatches", type=int, default=4,
        help="optimiser steps per pass; with 1 (and 1 epoch) the ratio (2) is 1: no clip")
    return common.parse(parser, argv, lr=2e-4, value_lr=1e-2)  # these are for the toy

def make_critic(policy):
    """Make the value model V: a copy of the policy's body with a scalar head, which starts at 0."""
    critic = copy.deepcopy(policy.base_model)
    weight = policy.get_output_embeddings().weight                         # (K, H)
    critic.score = torch.nn.Linear(weight.shape[1], 1, device=weight.device)
    torch.nn.init.zeros_(critic.score.weight)
    torch.nn.init.zeros_(critic.score.bias)
    return critic

def token_values(critic, batch, args):
    """Compute V before each completion token, (N, T) float32, as token_logprobs does log pi."""
    # completion_states runs .base_model. The critic is a body without a head: that is itself.
    index, hidden, _ = common.completion_states(critic, batch, args)
    values = critic.score(hidden.to(critic.score.weight.dtype)).squeeze(1)  # (M,)
    return values.new_zeros(batch["mask"].shape).index_put(index, values)

def token_rewards(score, old_logp, ref_logp, mask, beta):
    """Compute equation (4). r_i (N,), log-probs (N, T), ref_logp None for no penalty -> (N, T).
    The reward is paid at the last token: a stop token, or where it was cut. The penalty is the
    estimator k1 = log pi - log pi_ref. In the reward it makes PPO maximise E[r] - beta KL. As a
    loss it would teach nothing: its gradient, grad log pi, has mean 0 over samples of pi."""
    rewards = torch.zeros_like(mask)
    if ref_logp is not None:
        rewards = -beta * (old_logp - ref_logp) * mask                     # (N, T)            (4)
    # argmax takes the first of equal counts: the last token of the mask.
    last = mask.cumsum(1).argmax(1, keepdim=True)                          # (N, 1)
    return rewards.scatter_add(1, last, score[:, None])

def gae(rewards, values, mask, gamma, lam):
    """Compute equation (1). Rewards, values, mask (N, T) -> advantages, returns (N, T)."""
    # V after the last token is 0, also where --max_new_tokens cut a completion off. This is a
    # choice: one could take the critic's V there instead, as the text might go on (bootstrapping).
    values = values * mask
    advantages = torch.zeros_like(values)
    running = next_value = torch.zeros_like(values[:, 0])
    for t in reversed(range(values.shape[1])):
        counted = mask[:, t] > 0  # (N,) other tokens are stepped over
        delta = rewards[:, t] + gamma * next_value - values[:, t]          # (N,)
        running = torch.where(counted, delta + gamma * lam * running, running)  # (N,)         (1)
        next_value = torch.where(counted, values[:, t], next_value)
        advantages[:, t] = running * mask[:, t]
    return advantages, advantages + values

def whiten(x, mask):
    """Give x, (N, T), mean 0 and deviation 1 over the completion tokens of a whole rollout."""
    mean = (x * mask).sum() / mask.sum()
    variance = ((x - mean) ** 2 * mask).sum() / mask.sum()
    return (x - mean) * mask / (variance + 1e-8).sqrt()

def explained_variance(returns, values, mask):
    """Compute 1 - Var(returns - values) / Var(returns) over tokens; {} if all returns are equal."""
    returns, values = returns[mask > 0], values[mask > 0]                  # (M,) both
    if len(returns) < 2 or returns.var() < 1e-8:  # equal but for rounding
        return {}
    return {"explained_variance": (1 - (returns - values).var() / returns.var()).item()}

def policy_loss(logp, old_logp, adv, mask, eps_low, eps_high):
    """Compute -J, without its 1/N, by the equations above: loss = -sum_i 1/|o_i| sum_t { ... }.
    It is a sum over rows, so that the losses of micro-batches add up; update divides by N. adv is
    (N, T) or (N, 1), all else (N, T). Log-ratios are cut at 20, so that exp is finite. Returns the
    loss, a scalar, and statistics: pairs (sum, count), or one number if the name ends in _max."""
    lengths = mask.sum(1, keepdim=True).clamp(min=1)  # (N, 1) |o_i|; 1 if you mask a whole row
    log_ratio = (logp - old_logp) * mask                                   # (N, T)
    ratio = log_ratio.clamp(max=20).exp()                                  # (N, T)            (2)
    clipped = ratio.clamp(1 - eps_low, 1 + eps_high)
    # Why the min: for A > 0 there is nothing to gain from a ratio above 1 + eps_high, for A < 0
    # nothing from one below 1 - eps_low: there the gradient is 0. On the other side the min
    # takes the term without a clip, so that a step the wrong way can be taken back.
    objective = torch.min(ratio * adv, clipped * adv)                                         # (3)
    loss = -(objective * mask / lengths).sum()
    # A good token (adv > 0) is clipped above 1 + eps_high, a bad one below 1 - eps_low.
    is_clipped = (clipped * adv < ratio * adv) * mask
    # The logged means are over the completions that are computed, not over all N.
    stats = {"loss": (loss.detach(), len(mask)), "clip_frac": (is_clipped.sum(), mask.sum()),
             "ratio_max": (ratio.detach() * mask).max()}
    return loss, stats

def value_loss(values, old_values, returns, mask, eps_value):
    """Compute equation (5) without the 1/N: (N, T) each -> the loss and statistics, as above."""
    lengths = mask.sum(1, keepdim=True).clamp(min=1)  # (N, 1) |o_i|; 1 if you mask a whole row
    clipped = old_values + (values - old_values).clamp(-eps_value, eps_value)
    # As with the min of (3), a V that moved away from its return can be taken back.
    error = 0.5 * torch.max((values - returns) ** 2, (clipped - returns) ** 2)  # (N, T)       (5)
    loss = (error * mask / lengths).sum()
    return loss, {"value_loss": (loss.detach(), len(mask))}

@torch.no_grad()
def collect(policy, critic, reference, tokenizer, problems, reward, args):
    """Make a rollout (see common.py): N rewarded completions, their log-probs and advantages."""
    rollout = common.generate(                                             # 1. sample
        policy, tokenizer, problems, args.group_size, args.temperature, args)
    rollout["rewards"] = common.rewards_of(reward, rollout)                # 2. reward: (N,)
    # 3. log-probs: (N, T), in the micro-batches of update, so that logp is rounded like old_logp
    rollout["old_logp"] = common.over_batches(common.token_logprobs, policy, rollout, args)
    if reference is not None:
        rollout["ref_logp"] = common.over_batches(common.token_logprobs, reference, rollout, args)
    rollout["old_values"] = common.over_batches(token_values, critic, rollout, args)
    mask = rollout["mask"]
    per_token = token_rewards(
        rollout["rewards"], rollout["old_logp"], rollout.get("ref_logp"), mask, args.beta)
    rollout["adv"], rollout["returns"] = gae(
        per_token, rollout["old_values"], mask, args.gamma, args.lam)      # 4. advantages: (N, T)
    stats = common.rollout_stats(rollout, args.group_size)
    # The returns contain V, so they cannot judge it. With V = 0 and lam = 1 gae sums the rewards.
    _, returns_to_go = gae(per_token, 0 * mask, mask, args.gamma, lam=1.0)
    stats |= explained_variance(returns_to_go, rollout["old_values"], mask)
    if args.whiten:
        rollout["adv"] = whiten(rollout["adv"], mask)
    return rollout, stats

def update(policy, critic, optimizers, rollout, args):
    """Train: epochs x minibatches (an optimiser step each) x micro-batches (for memory). Returns
    statistics: means over rows, tokens or steps (see common.means), and the largest ratio."""
    logged = []
    for _ in range(args.epochs):
        for minibatch in common.minibatches(rollout, args.minibatches, args.group_size):
            rows = len(minibatch["ids"])  # N of (3) in this step, rows without a gradient included
            for b in common.micro_batches(minibatch, args.micro_batch_tokens):
                logp = common.token_logprobs(policy, b, args)  # shape of b["mask"], with gradient
                loss, stats = policy_loss(
                    logp, b["old_logp"], b["adv"], b["mask"], args.eps_low, args.eps_high)
                (loss / rows).backward()
                logged.append(stats)
                values = token_values(critic, b, args)  # V, with gradient
                v_loss, v_stats = value_loss(
                    values, b["old_values"], b["returns"], b["mask"], args.eps_value)
                (args.vf_coef * v_loss / rows).backward()
                logged.append(v_stats)
            logged.append(optimizers["policy"].clip_and_step())
            logged.append(optimizers["critic"].clip_and_step("value_"))
    return common.means(logged)

def main(args):
    """Load, then {collect, update, evaluate, log, save} until --steps."""
    common.start_run(args)
    policy, tokenizer = common.load_policy(args)
    problems, held_out = common.load_problems(args, tokenizer)
    reward = common.answer_reward  # or any function (problems, completions) -> numbers
    critic = make_critic(policy)
    # pi_ref is copied before load_checkpoint puts the weights of a resumed run into the policy.
    reference = copy.deepcopy(policy).eval().requires_grad_(False) if args.beta != 0 else None
    # The eps of Adam is that of Huang et al.
    optimizers = {"policy": common.Optimizer(policy, args.lr, args, eps=1e-5),
                  "critic": common.Optimizer(critic, args.value_lr, args, eps=1e-5)}
    parts = optimizers | {"V": critic}  # what a checkpoint has besides the policy
    start = common.load_checkpoint(args.out, policy, parts)  # 0 unless --resume
    if start == 0:
        common.log(args, 0, common.evaluate(policy, tokenizer, held_out, reward, args, 0))
    for step in range(start + 1, args.steps + 1):
        torch.manual_seed(args.seed * 1_000_003 + step)  # draws depend on seed and step alone
        step_start = time.perf_counter()
        batch = common.batch_of(problems, step, args.prompts, args.seed)   # P problems
        rollout, stats = collect(policy, critic, reference, tokenizer, batch, reward, args)
        stats |= update(policy, critic, optimizers, rollout, args)         # pi moves on
        stats["seconds"] = time.perf_counter() - step_start
        if step % args.eval_every == 0 or step == args.steps:
            stats |= common.evaluate(policy, tokenizer, held_out, reward, args, step)
        common.log(args, step, stats, rollout)
        if step % args.save_every == 0 or step == args.steps:
            common.save_checkpoint(args.out, step, tokenizer, policy, parts)

if __name__ == "__main__":
    main(parse_args())

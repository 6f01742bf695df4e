"""PPO: proximal policy optimization (Schulman et al. 2017, arXiv 1707.06347).

pi is the model being trained, pi_old is the same model as it was when it sampled, and pi_ref is a
frozen copy of the model that training started from. For each of P questions q, sample from pi_old
a completion o_i, give it a reward r_i, turn it into one reward r_it per token (4), and maximize J:

    A_it  = sum_{l >= 0} (gamma lam)^l delta_{i,t+l},  R_it = A_it + Vold_it,
            delta_it = r_it + gamma Vold_{i,t+1} - Vold_it,  Vold after the last token = 0     (1)
    w_it  = pi(o_it | q, o_i<t) / pi_old(o_it | q, o_i<t)                                      (2)
    J     = 1/N sum_i 1/|o_i| sum_t min(w_it A_it, clip(w_it, 1 - eps_low, 1 + eps_high) A_it) (3)
    r_it  = (r_i at the last token, 0 before it) - beta (log pi_old - log pi_ref)              (4)

and minimize L over a value model V, the critic:

    L     = 1/N sum_i 1/|o_i| sum_t 0.5 max((V_it - R_it)^2, (V'_it - R_it)^2),
            V'_it = Vold_it + clip(V_it - Vold_it, -eps_value, eps_value)                     (5)

Vold is V at sampling time. (1) is generalized advantage estimation (GAE, Schulman et al. 2015,
1506.02438). (3) uses A whitened to mean 0 and std 1 over the rollout (--whiten); R uses the plain
A. The penalty in (4) is from Ziegler et al. 2019 (1909.08593) and InstructGPT (2203.02155).

(5), --whiten and the defaults of ppo.py's own flags, except --prompts, --minibatches and the toy's
learning rates, follow Huang et al. 2024 (2403.17031). Their code also starts V from a reward model,
samples at temperature 0.7, gives -1 for a missing stop token, decays --lr, reshuffles every epoch,
and averages over all tokens. DeepSeekMath's PPO averages as we do.

    python ppo.py                                                                          # laptop
    python ppo.py --model Qwen/Qwen2.5-1.5B-Instruct --dataset openai/gsm8k --subset main  # 80 GB

Shapes: P prompts, G completions per prompt, N = P*G rows, T tokens in the longest completion.
"""
import argparse
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
    add("--prompts", type=count, default=256, help="P, prompts per step; more give less variance")
    add("--group_size", type=count, default=1, help="G, completions per prompt; one is enough")
    add("--eps_low", type=amount, default=0.2, help="lower clip range in (3); usually 0.1 to 0.3")
    add("--eps_high", type=amount, default=0.2, help="upper clip range in (3); usually 0.1 to 0.3")
    add("--beta", type=amount, default=0.05,
        help="weight of the KL penalty (4); usually 0 to 0.1; at 0 there is no pi_ref")
    add("--gamma", type=amount, default=1.0, help="discount factor in (1); usually 1 (no discount)")
    add("--lam", type=amount, default=0.95, help="lambda in (1): 0 trusts V, 1 the rewards")
    add("--whiten", action=argparse.BooleanOptionalAction, default=True, help="whiten A in (3)")
    add("--eps_value", type=amount, default=0.2, help="clip range for V in (5)")
    add("--vf_coef", type=amount, default=0.1, help="weight of the value loss (5); 0 freezes V")
    add("--lr", type=positive, default=3e-6, help="learning rate of Adam")
    add("--value_lr", type=positive, default=3e-6, help="learning rate of Adam for V")
    add("--epochs", type=count, default=4, help="passes over each rollout; usually 1 to 4")
    add("--minibatches", type=count, default=4,
        help="optimizer steps per pass; with 1 and --epochs 1, w stays 1 and nothing is clipped")
    return common.parse(parser, argv, lr=2e-4, value_lr=1e-2)  # the toy's; see tests/toy/args.json

def make_critic(policy):
    """Make the value model V: the policy's backbone, copied, and a scalar head that starts at 0."""
    critic = copy.deepcopy(policy.base_model)
    weight = policy.get_output_embeddings().weight                         # (K, H)
    critic.score = torch.nn.Linear(weight.shape[1], 1, device=weight.device)
    torch.nn.init.zeros_(critic.score.weight)
    torch.nn.init.zeros_(critic.score.bias)
    return critic

def token_values(critic, batch, args):
    """Compute V before each token whose mask is 1. Returns (N, T) float32, which is 0 elsewhere."""
    # The critic is a bare backbone: its .base_model, which completion_states runs, is itself.
    index, hidden, _ = common.completion_states(critic, batch, args)
    values = critic.score(hidden.to(critic.score.weight.dtype)).squeeze(1)  # (M,)
    return values.new_zeros(batch["mask"].shape).index_put(index, values)

def token_rewards(r, old_logp, ref_logp, mask, beta):
    """Compute equation (4): r (N,), log-probs (N, T) -> (N, T). If ref_logp is None, there is no
    penalty. The reward is given at the last token: the stop token, or the last one of a truncated
    completion. The penalty is k1 = log pi - log pi_ref, whose mean over samples from pi is
    KL(pi || pi_ref)."""
    rewards = torch.zeros_like(mask)
    if ref_logp is not None:
        rewards = -beta * (old_logp - ref_logp) * mask                     # (N, T)            (4)
    # The last column with mask 1, (N, 1).
    last = (mask * torch.arange(mask.shape[1], device=mask.device)).argmax(1, keepdim=True)
    return rewards.scatter_add(1, last, r[:, None])

def gae(rewards, values, mask, gamma, lam):
    """Compute equation (1): rewards, values, mask (N, T) -> advantages, returns (N, T)."""
    # V after the last token is 0, even where --max_new_tokens cut a completion off. That is a
    # choice: since the text might have gone on, one could bootstrap from the critic's V instead.
    values = values * mask
    advantages = torch.zeros_like(values)
    running = next_value = torch.zeros_like(values[:, 0])
    for t in reversed(range(values.shape[1])):
        # A token with mask 0 (padding, or text that pi did not write) is no step: pass over it.
        counted = mask[:, t] > 0                                           # (N,)
        delta = rewards[:, t] + gamma * next_value - values[:, t]          # (N,)
        running = torch.where(counted, delta + gamma * lam * running, running)  # (N,)         (1)
        next_value = torch.where(counted, values[:, t], next_value)
        advantages[:, t] = running * mask[:, t]
    return advantages, advantages + values

def whiten(x, mask):
    """Shift and scale x, (N, T), to mean 0 and std 1 over the trained tokens of a rollout."""
    mean = (x * mask).sum() / mask.sum()
    variance = ((x - mean) ** 2 * mask).sum() / mask.sum()
    return (x - mean) * mask / (variance + 1e-8).sqrt()

def explained_variance(returns, values, mask):
    """Compute 1 - Var(returns - values) / Var(returns) over tokens; {} if all returns are equal."""
    returns, values = returns[mask > 0], values[mask > 0]                  # (M,) both
    if len(returns) < 2 or returns.var() < 1e-8:  # equal up to rounding
        return {}
    return {"explained_variance": (1 - (returns - values).var() / returns.var()).item()}

def policy_loss(logp, old_logp, adv, mask, eps_low, eps_high):
    """Compute -J without its 1/N, as in the equations above: loss = -sum_i 1/|o_i| sum_t ... . The
    loss is a sum over rows, so it adds up over micro-batches; update divides it by N. adv is (N, T)
    or (N, 1), the other tensors (N, T). Log-ratios above 20 are clamped, so exp is finite. Returns
    the scalar loss and statistics, which are (sum, count) pairs."""
    lengths = mask.sum(1, keepdim=True).clamp(min=1)  # (N, 1) |o_i|, or 1 for an empty row
    log_ratio = (logp - old_logp) * mask                                   # (N, T)
    w = log_ratio.clamp(max=20).exp()                                      # (N, T)            (2)
    unclipped, clipped = w * adv, w.clamp(1 - eps_low, 1 + eps_high) * adv
    # Why the min: for A > 0 there is nothing left to gain once the ratio exceeds 1 + eps_high, and
    # for A < 0 once it falls below 1 - eps_low, so the gradient there is 0. On the other side the
    # min takes the unclipped term, so that a step in the wrong direction can be undone.
    objective = torch.min(unclipped, clipped)                                                 # (3)
    loss = -(objective * mask / lengths).sum()
    # Count where the clip is active: above 1 + eps_high if adv > 0, below 1 - eps_low if adv < 0.
    is_clipped = (clipped < unclipped) * mask
    return loss, {"loss": (loss.detach(), len(mask)), "clip_frac": (is_clipped.sum(), mask.sum())}

def value_loss(values, old_values, returns, mask, eps_value):
    """Compute (5) without its 1/N. All tensors are (N, T). Returns the loss and statistics."""
    lengths = mask.sum(1, keepdim=True).clamp(min=1)  # (N, 1) |o_i|, or 1 for an empty row
    clipped = old_values + (values - old_values).clamp(-eps_value, eps_value)
    # Like the min in (3), the max lets a V that has moved away from its return be pulled back.
    error = 0.5 * torch.max((values - returns) ** 2, (clipped - returns) ** 2)  # (N, T)       (5)
    loss = (error * mask / lengths).sum()
    return loss, {"value_loss": (loss.detach(), len(mask))}

@torch.no_grad()
def collect(policy, critic, reference, tokenizer, problems, reward, args):
    """Collect a rollout (see common.generate), with rewards, log-probs, and advantages."""
    # 1. sample: N completions
    rollout = common.generate(policy, tokenizer, problems, args.group_size, args)
    rewards = [float(r) for r in reward(rollout["problems"], rollout["texts"])]
    rollout["rewards"] = torch.tensor(rewards, device=args.device)         # 2. reward: (N,)
    # 3. log-probs: (N, T), in the same micro-batches as update, so that old_logp rounds like logp
    rollout["old_logp"] = common.over_batches(common.token_logprobs, policy, rollout, args)
    if reference is not None:
        rollout["ref_logp"] = common.over_batches(common.token_logprobs, reference, rollout, args)
    rollout["old_values"] = common.over_batches(token_values, critic, rollout, args)
    mask, values = rollout["mask"], rollout["old_values"]                  # both (N, T)
    per_token = token_rewards(
        rollout["rewards"], rollout["old_logp"], rollout.get("ref_logp"), mask, args.beta)
    # 4. advantages: (N, T)
    rollout["adv"], rollout["returns"] = gae(per_token, values, mask, args.gamma, args.lam)
    stats = common.rollout_stats(rollout, args)
    # The R of (1) contains V itself, so V is judged by the rewards that came: R for V = 0.
    stats |= explained_variance(gae(per_token, 0 * values, mask, args.gamma, 1.0)[1], values, mask)
    if args.whiten:
        rollout["adv"] = whiten(rollout["adv"], mask)
    return rollout, stats

def update(policy, critic, optimizer, critic_optimizer, rollout, args):
    """Train: epochs x minibatches (one optimizer step each) x micro-batches (for memory). Returns
    statistics: means over rows, tokens or steps (see common.means)."""
    logged = []
    for _ in range(args.epochs):
        for minibatch in common.minibatches(rollout, args.minibatches, args.group_size):
            rows = len(minibatch["ids"])  # the N of (3): here the rows of one minibatch
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
            logged.append(common.clip_and_step(optimizer, args.lr, args))
            critic_stats = common.clip_and_step(critic_optimizer, args.value_lr, args)
            logged.append({f"value_{name}": x for name, x in critic_stats.items()})
    return common.means(logged)

def main(args):
    """Load everything, then {collect, update, evaluate, log, save} up to step --steps."""
    policy, tokenizer = common.load_policy(args)
    problems, held_out = common.load_problems(args, tokenizer)
    reward = common.answer_reward  # or any function (problems, completions) -> numbers
    critic = make_critic(policy)
    reference = copy.deepcopy(policy).eval().requires_grad_(False) if args.beta != 0 else None
    adam = {"betas": (0.9, 0.95), "eps": 1e-5, "fused": True}  # eps is that of Huang et al.
    optimizer = torch.optim.Adam(policy.parameters(), args.lr, **adam)
    critic_optimizer = torch.optim.Adam(critic.parameters(), args.value_lr, **adam)
    parts = {"policy": policy, "optimizer": optimizer}  # what a resumed run needs
    parts |= {"critic": critic, "critic_optimizer": critic_optimizer}
    if reference is not None:
        parts["reference"] = reference
    start = common.open_run(args, parts)  # 0 unless --resume
    if start == 0:
        common.save_checkpoint(args.out, 0, tokenizer, policy, parts)  # a failing save fails now
        common.log(args, 0, common.evaluate(policy, tokenizer, held_out, reward, args))
    for step in range(start + 1, args.steps + 1):
        torch.manual_seed(args.seed * 1_000_003 + step)  # so that a resumed run samples the same
        step_start = time.perf_counter()
        batch = common.batch_of(problems, step, args.prompts, args.seed)   # P problems
        rollout, stats = collect(policy, critic, reference, tokenizer, batch, reward, args)
        stats |= update(policy, critic, optimizer, critic_optimizer, rollout, args)
        stats["seconds"] = time.perf_counter() - step_start
        if step % args.eval_every == 0 or step == args.steps:
            stats |= common.evaluate(policy, tokenizer, held_out, reward, args)
        common.log(args, step, stats, rollout)
        if step % args.save_every == 0 or step == args.steps:
            common.save_checkpoint(args.out, step, tokenizer, policy, parts)

if __name__ == "__main__":
    main(parse_args())

"""The equations of ppo.py, grpo.py and gspo.py as plain loops over numbers. They make vectors.json.

    python tests/vectors/check_vectors.py    computes vectors.json again, from its batches and named settings

A completion is a list with one number per token, so no equation here needs a mask. Nor do gradients need
calculus: for h = 1e-20, f(x + ih) is f(x) + ih f'(x), so if we add ih to one log-prob, the imaginary part of
the loss is h times its derivative. Comparisons look at real parts, and sg(x), the stop-gradient, is one.
"""
import json
import re
from cmath import exp, log
from math import sqrt
from operator import attrgetter
from pathlib import Path

FILE = Path(__file__).with_name("vectors.json")
real = attrgetter("real")

def clip(x, low, high):
    return max(low, min(high, x, key=real), key=real)

def group_advantages(rewards, G, kind="grpo"):
    """(1) of grpo.py and gspo.py: A_i = (r_i - mean(r)) / (std(r) + 1e-4). Two forks scale differently."""
    A = []
    for r in (rewards[start:start + G] for start in range(0, len(rewards), G)):
        mean = sum(r) / G
        std = sqrt(sum((x - mean) ** 2 for x in r) / (G - 1))
        scale = {"grpo": 1 / (std + 1e-4), "dr_grpo": 1, "rloo": G / (G - 1)}
        A += [0.0 if max(r) == min(r) else (x - mean) * scale[kind] for x in r]
    return A

def token_rewards(reward, old_logp, ref_logp, beta):
    """(4) of ppo.py: r_t = (r at the last token, 0 before it) - beta (log pi_old - log pi_ref)"""
    rewards = [-beta * (old - ref) for old, ref in zip(old_logp, ref_logp)]
    return rewards[:-1] + [rewards[-1] + reward]

def gae(rewards, old_values, gamma, lam):
    """(1) of ppo.py: A_t = sum_l (gamma lam)^l delta_{t+l}; V after the last token is 0"""
    V, T = old_values + [0], len(old_values)
    delta = [rewards[t] + gamma * V[t + 1] - V[t] for t in range(T)]
    return [sum((gamma * lam) ** l * delta[t + l] for l in range(T - t)) for t in range(T)]

def whiten(rows):
    """--whiten of ppo.py: mean 0 and standard deviation 1 over all tokens of the batch."""
    every = [x for row in rows for x in row]
    mean = sum(every) / len(every)
    std = sqrt(sum((x - mean) ** 2 for x in every) / len(every) + 1e-8)
    return [[(x - mean) / std for x in row] for row in rows]

def ratio(kind, log_w, t):
    """(2): w_t = pi/pi_old; (5) of gspo.py: s"""
    return exp(log_w[t]) if kind == "token" else exp(sum(log_w) / len(log_w))

def gain(case, log_w, t, A, logp):
    """(3): min(w_t A, clip(w_t, 1 - eps_low, 1 + eps_high) A), or what a fork has instead"""
    low, high, w = case.get("eps_low"), case.get("eps_high"), ratio(case["ratio"], log_w, t)
    if case["form"] == "clip":
        return min(w * A, clip(w, 1 - low, 1 + high) * A, key=real)
    return min(w.real, 1 + high) * A * logp  # cispo: sg(min(w_t, 1 + eps_high)) A log pi

def penalty(case, log_w, logp, ref_logp):
    """(4) of grpo.py and gspo.py: x - log x - 1, x = pi_ref/pi; with --kl wk3 times w_t"""
    x = exp(ref_logp - logp)
    return (x - log(x) - 1) * (exp(log_w) if case["kl"] == "wk3" else 1)

def correction(case, log_m, t):
    """Fork tis: m_t = the trainer's pi_old over the sampler's, clipped to m_high or 0 out of range. With
    "whole", it is the product of all m_t of the completion."""
    m = exp(sum(log_m) if case.get("whole") else log_m[t]).real
    inside = case["m_low"] <= m <= case["m_high"]
    return min(m, case["m_high"]) if case["weight"] == "truncated" else m * inside

def share(case, i, b):
    """The weight of a token of completion i in J. In (3) it is 1/N 1/|o_i|."""
    lengths, N, G, r = b["lengths"], len(b["lengths"]), b["group_size"], b["rewards"]
    if case["mean"] == "group":  # the mean over the tokens of a question, then over the mixed questions
        mixed = [max(r[j:j + G]) > min(r[j:j + G]) for j in range(0, N, G)]
        return mixed[i // G] / sum(mixed) / sum(lengths[i - i % G:][:G])
    return 1 / N / (lengths[i] if case["mean"] == "row" else case["T_max"])

def policy_loss(case, i, logp, b, A):
    """(3): what completion i adds to -J if its log-probs are `logp`"""
    old, ref, sampled = (b[name][i] for name in ("old_logp", "ref_logp", "sampled_logp"))
    log_w = [new - x for new, x in zip(logp, old)]
    log_m, total = [x - y for x, y in zip(old, sampled)], 0
    for t in range(len(logp)):
        m = correction(case, log_m, t) if "weight" in case else 1
        total += m * gain(case, log_w, t, A[i][t], logp[t])
        total -= case["beta"] * penalty(case, log_w[t], logp[t], ref[t])
    return -total * share(case, i, b)

def value_loss(case, i, values, b, R):
    """(5): what completion i adds to L: 0.5 max((V - R)^2, (V' - R)^2), V' = Vold + clip(V - Vold)"""
    total = 0
    for V, old, R_t in zip(values, b["old_values"][i], R[i]):
        clipped = old + clip(V - old, -case["eps_value"], case["eps_value"])
        total += 0.5 * max((V - R_t) ** 2, (clipped - R_t) ** 2, key=real)
    return total / len(R) / len(values)

def loss_and_gradient(f, rows):
    """The sum of f(i, row i), and its derivative with respect to every number."""
    return sum(f(i, row) for i, row in enumerate(rows)), [
        [f(i, row[:t] + [row[t] + 1e-20j] + row[t + 1:]).imag / 1e-20 for t in range(len(row))]
        for i, row in enumerate(rows)]

def fill(vectors):
    """Compute everything that follows from the settings and the batches."""
    p = vectors["ppo"]
    vectors["far"]["policy_losses"] = [{"name": case["name"]} for case in vectors["policy_losses"]]
    for part in (vectors, vectors["far"]):
        b = part["batch"]
        part["advantages"] = A = {kind: group_advantages(b["rewards"], b["group_size"], kind)
                                  for kind in ("grpo", "dr_grpo", "rloo")}
        log_w = [[new - old for new, old in zip(*rows)] for rows in zip(b["logp"], b["old_logp"])]
        part["ratios"] = {"token": [[exp(x) for x in row] for row in log_w],
                          "sequence": [ratio("sequence", row, 0) for row in log_w]}
        r = [token_rewards(*row, p["beta"]) for row in zip(b["rewards"], b["old_logp"], b["ref_logp"])]
        adv = [gae(*row, p["gamma"], p["lam"]) for row in zip(r, b["old_values"])]
        R = [[a + V for a, V in zip(*row)] for row in zip(adv, b["old_values"])]
        L, gradient = loss_and_gradient(lambda i, values: value_loss(p, i, values, b, R), b["values"])
        part["ppo"] |= {"token_rewards": r, "advantages": adv, "returns": R, "whitened": whiten(adv),
                        "value_loss": L, "value_gradient": gradient}
        for case, result in zip(vectors["policy_losses"], part["policy_losses"]):
            adv = (A | part["ppo"])[case["advantages"]]
            adv = [a if isinstance(a, list) else [a] * n for a, n in zip(adv, b["lengths"])]
            result["loss"], result["gradient"] = loss_and_gradient(
                lambda i, logp: policy_loss(case, i, logp, b, adv), b["logp"])

def text(vectors):
    """JSON with 10 decimals, and one line per row of numbers."""
    plain = json.dumps(vectors, default=lambda number: number.real)
    plain = json.loads(plain, parse_float=lambda digits: round(float(digits), 10) + 0.0)  # -0.0 + 0.0 is 0.0
    lines = re.sub(r"\[\s+[-\d][^]]*\]", lambda row: "".join(row[0].split()), json.dumps(plain, indent=1))
    return re.sub(r"\n +\[", "\n[", re.sub(r',\n +(?="\w+": [^[{\n]+\n)', ", ", lines)) + "\n"

if __name__ == "__main__":
    vectors = json.loads(FILE.read_text(encoding="utf-8"))
    fill(vectors)
    FILE.write_text(text(vectors), encoding="utf-8")

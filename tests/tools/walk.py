"""Watch one training step in the terminal: completions with their rewards, pushes, and log-probs.

    python tests/tools/walk.py --script ppo --after 8

--script names a script at the top level: grpo, gspo, ppo, or a copy of your own. All its flags are known. Its
main, update and policy_loss do the work. This program looks on, and it writes no files. The colour behind a
token shows its push. In a pipe, or with NO_COLOR set, a sign below the token shows it.
"""
import argparse
import importlib
import inspect
import os
import sys
import textwrap
from pathlib import Path
from unittest import mock

import torch
import transformers

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the root of the repository
import common  # noqa: E402

SHADES = {"+": (189, 153, 111, 75, 69), "-": (224, 217, 210, 203, 167), ".": [248]}  # of the terminal's 256

def watch(script, args):
    """Run main. Returns what update was given in the last step, the last eight rows of different rewards, and
    the log-probs of these rows: those of pi_old, then those after each optimiser step."""
    seen = {"script": script, "tokenizer": transformers.AutoTokenizer.from_pretrained(args.model)}
    update, step = script.update, common.Optimizer.clip_and_step
    def watched_update(*values, **named):
        seen.update(inspect.signature(update).bind(*values, **named).arguments)
        parts, rewards = torch.arange(len(seen["rollout"]["ids"])).split(8), seen["rollout"]["rewards"]
        seen["chosen"] = [p for p in parts if len(rewards[p].unique()) > 1 or p is parts[0]][-1].tolist()
        seen["rows"] = {name: x[seen["chosen"]] for name, x in seen["rollout"].items() if torch.is_tensor(x)}
        seen["logps"] = [seen["rows"]["old_logp"]]
        return update(*values, **named)
    def watched_step(optimizer, *prefix):
        stats = step(optimizer, *prefix)
        if optimizer is seen["optimizers"]["policy"]:  # not the critic's
            with torch.no_grad():
                seen["logps"].append(common.token_logprobs(seen["policy"], seen["rows"], args))
        return stats
    with (mock.patch.object(script, "update", watched_update), mock.patch("builtins.print"),
          mock.patch.object(common.Optimizer, "clip_and_step", watched_step),
          mock.patch.multiple(common, **dict.fromkeys(("start_run", "log", "save_checkpoint"), mock.DEFAULT),
                              load_checkpoint=lambda *_: 0, evaluate=lambda *_: {})):
        script.main(args)
    return seen

def call(function, given):
    """Give a function what it asks for by the names of its parameters: those of the scripts differ. Numbers,
    such as eps_low, come from the args."""
    given = vars(given["args"]) | given
    return function(*(given[name] for name in inspect.signature(function).parameters))

def pushes_of(seen, logp):
    """The push of each token, N dJ/dlog pi, (n, T), where the policy has these log-probs: by policy_loss."""
    logp = logp.clone().requires_grad_()  # beta is 0, as the KL would push clipped tokens, too
    given = {"ref_logp": None, "args": seen["args"]} | seen["rows"] | {"logp": logp, "beta": 0}
    return -torch.autograd.grad(call(seen["script"].policy_loss, given)[0], logp)[0]

def tokens_of(seen, i):
    """The tokens of completion i of those that are shown, as texts without line breaks."""
    ids, attention, start = (seen["rollout"][name][seen["chosen"][i]]
                             for name in ("ids", "attention", "prompt_length"))
    texts = (seen["tokenizer"].decode([token], skip_special_tokens=True) or "∎"
             for token in ids[start:attention.sum()].tolist())
    return ["".join(c if c.isprintable() else "·" for c in text.replace("\n", "↵")) for text in texts]

def listed(seen, entries, colour):
    """Lines of completions after their questions. An entry is (completion, label, pushes from -1 to 1)."""
    asked = [seen["rollout"]["problems"][row]["question"] for row in seen["chosen"]]
    width, lines = min(20, max(map(len, asked))), []
    for i, label, pushes in entries:
        label, tokens = f"{label}  {textwrap.shorten(asked[i], width):{width}}  ", tokens_of(seen, i)
        signs = ["-" if push < 0 else "+" if push > 0 else "." for push in pushes[:len(tokens)]]
        below = " " * len(label) + "".join(sign.ljust(len(token)) for token, sign in zip(tokens, signs))
        if colour:
            shades = [SHADES[sign][int(4.99 * abs(push) ** 0.5)] for push, sign in zip(pushes, signs)]
            tokens = [f"\033[48;5;{shade};38;5;16m{token}\033[0m" for token, shade in zip(tokens, shades)]
        lines += [label + "".join(tokens), below][:1 if colour or not signs else 2]
    return lines

def sampled(seen):
    """Lines of the completions with their rewards and advantages."""
    rewards, adv, mask = (seen["rollout"][name][seen["chosen"]] for name in ("rewards", "adv", "mask"))
    pairs = zip(rewards, (adv * mask).sum(1) / mask.sum(1))
    entries = [(i, f"{reward:6.3g}  {mean:+9.3f}", []) for i, (reward, mean) in enumerate(pairs)]
    return ["reward  advantage  question and completion", *listed(seen, entries, colour=False)]

def pushed(seen, colour):
    """Lines of the completions with the pushes before the first optimiser step and before the last."""
    pushes = {step: pushes_of(seen, seen["logps"][step - 1]) for step in sorted({1, len(seen["logps"]) - 1})}
    largest = max(push.abs().max() for push in pushes.values())
    entries = [(i, f"{step:4}  {push[i].sum():+13.3f}", (push[i] / largest).tolist())
               for i in range(len(seen["chosen"])) for step, push in pushes.items()]
    return ["step  sum of pushes  question and completion", *listed(seen, entries, colour)]

def moved(seen):
    """Lines of the log-probs and ratios of tokens of the best paid and of the worst paid completion."""
    count, rewards, lines = len(seen["logps"]) - 1, seen["rows"]["rewards"], []
    steps = range(count, 0, -count // 4)[::-1]  # at most four, the last one among them
    for i in (rewards.argmax().item(), rewards.argmin().item()):
        tokens = tokens_of(seen, i)
        logps = torch.stack([logp[i, :len(tokens)] for logp in seen["logps"]])  # (steps + 1, |o|)
        furthest = (logps[-1] - logps[0]).abs().argsort(descending=True)[:5].sort().values.tolist()
        rows = [(f"{t + 1:3} {tokens[t][:6]}", logps[:, t]) for t in furthest] + [("mean", logps.mean(1))]
        after = "".join(f"{f'after step {k}':>15}" for k in steps)
        lines += ["".join(tokens)[:80], f"  token    before{after}", *(f"{name:10}{logp[0]:7.3f}" + "".join(
            f" {logp[k]:7.3f} {(logp[k] - logp[0]).exp():6.3f}" for k in steps) for name, logp in rows)]
    return lines

def screens(seen, colour):
    """The three screens, each as (title, sentences, lines)."""
    legend = ("Blue tokens are pushed up, red ones down, and a stronger colour is a stronger push. Grey"
              if colour else "Below a token, + is a push up and - a push down. A dot") + " is a push of 0"
    return [
        ("the completions", f"These are {len(seen['chosen'])} of {len(seen['rollout']['ids'])} completions "
         "that the policy sampled. The advantage says how much better than expected a completion is (for "
         "PPO, the mean over its tokens). ↵ is a line break, ∎ the end.", sampled(seen)),
        ("the pushes", "The push of a token is N dJ/dlog pi, without the KL: how much J gains as its "
         f"log-prob rises. {legend}: the token is clipped, or its advantage is 0. Of "
         f"{len(seen['logps']) - 1} optimiser steps you see the first and the last.", pushed(seen, colour)),
        ("the log-probs", "The optimiser steps move the policy away from the one that sampled. Of two "
         "completions you see the five tokens that moved furthest: the log-prob before the update, then the "
         "log-prob and the ratio after a step. The ratio of the mean is the s of GSPO.", moved(seen))]

def main(argv=None):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=common.HelpFormatter, allow_abbrev=False)
    parser.add_argument("--script", default="grpo", help="grpo, gspo, ppo or your own")
    parser.add_argument("--after", type=int, default=4, help="steps before the one shown")
    own, flags = parser.parse_known_args(argv)
    script = importlib.import_module(own.script)
    args = script.parse_args([*flags, "--steps", str(own.after + 1)])
    print(f"{own.script}.py takes {own.after} steps in silence, then one that you watch.")
    seen = watch(script, args)
    if len(seen["rows"]["rewards"].unique()) == 1:
        sys.exit("all completions have one reward, and none is pushed: give another --after or --seed")
    for title, text, lines in screens(seen, sys.stdout.isatty() and not os.environ.get("NO_COLOR")):
        print(f"\n---- {title + ' ':-<75}", textwrap.fill(text, 80), "", *lines, sep="\n")

if __name__ == "__main__":
    main()

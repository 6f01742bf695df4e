"""Watch one training step in the terminal: completions, their advantages, and their pushes.

    python tests/tools/walk.py --script ppo --after 8

--script names a script at the top level: grpo, gspo, ppo, or your own copy. All its flags work, and its main,
update and policy_loss run as they are. No files are written.
"""
import argparse
import importlib
import inspect
import itertools
import sys
import textwrap
from pathlib import Path
from unittest import mock

import torch
import transformers

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the root of the repository
import common  # noqa: E402

LEGEND = """You see {} of the step's {} completions, before the first and the last of {} optimizer steps. The
advantage is the completion's, or for PPO the mean of its tokens'. The push of a token is N dJ/dlog pi,
without the KL or an entropy bonus: how much J gains as its log-prob rises. ▲ and △ are strong and weak pushes
up, ▼ and ▽ down. · is a push of 0: the token is clipped, or its advantage or its mask is 0. ↵ is a line
break, ∎ the end."""

def watch(script, args):
    """Run main. Returns what update was given last, and log-probs of eight rows, before and after steps."""
    seen = {"script": script, "tokenizer": transformers.PreTrainedTokenizerFast.from_pretrained(args.model)}
    update, step = script.update, common.clip_and_step

    def watched_update(*given):
        seen.update(inspect.signature(update).bind(*given).arguments)
        rewards = seen["rollout"]["rewards"]
        first, *parts = torch.arange(len(rewards)).split(8)
        rows = [first, *(part for part in parts if len(rewards[part].unique()) > 1)][-1]
        seen["rows"] = {name: x[rows] for name, x in seen["rollout"].items() if torch.is_tensor(x)}
        seen["questions"] = [seen["rollout"]["problems"][row]["question"] for row in rows]
        seen["logps"] = [seen["rows"]["old_logp"]]
        return update(*given)

    def watched_step(optimizer, *given):
        stats = step(optimizer, *given)
        if optimizer is seen["optimizer"]:  # not the critic's
            with torch.no_grad():
                seen["logps"].append(common.token_logprobs(seen["policy"], seen["rows"], args))
        return stats
    with (mock.patch.object(script, "update", watched_update), mock.patch("builtins.print"),
          mock.patch.object(common, "clip_and_step", watched_step),
          mock.patch.multiple(common, open_run=lambda *_: 0, log=mock.DEFAULT, save_checkpoint=mock.DEFAULT,
                              evaluate=lambda *_: {})):
        script.main(args)
    return seen

def pushes_of(seen, logp):
    """The push of each token, N dJ/dlog pi, (n, T), for a policy with these log-probs, by policy_loss."""
    logp, loss = logp.clone().requires_grad_(), seen["script"].policy_loss
    # The parameters of policy_loss go by name. beta is 0, because the KL would push clipped tokens, too. What
    # update makes itself, such as an entropy, is 0.
    given = vars(seen["args"]) | {"ref_logp": None} | seen["rows"] | {"logp": logp, "beta": 0}
    value, _ = loss(*(given.get(name, 0 * logp.detach()) for name in inspect.signature(loss).parameters))
    return -torch.autograd.grad(value, logp)[0]

def tokens_of(seen, i):
    """The tokens of completion i, as strings without line breaks."""
    ids, start, length = (seen["rows"][name][i] for name in ("ids", "prompt_length", "completion_length"))
    texts = (seen["tokenizer"].decode([token], skip_special_tokens=True) or "∎"
             for token in ids[start:start + length].tolist())
    return ["".join(c if c.isprintable() else "·" for c in text.replace("\n", "↵")) for text in texts]

def pushed(seen):
    """Lines of completions, with the pushes before the first optimizer step and before the last."""
    adv, mask, rewards = (seen["rows"][name] for name in ("adv", "mask", "rewards"))
    advantages = (adv * mask).sum(1) / mask.sum(1).clamp(min=1)
    lines = ["reward  advantage  step  sum of pushes  question and completion"]
    pushes = {step: pushes_of(seen, seen["logps"][step - 1]) for step in sorted({1, len(seen["logps"]) - 1})}
    strong = max(push.abs().max() for push in pushes.values()) / 2
    for i, step in itertools.product(range(len(advantages)), pushes):
        push, tokens, asked = pushes[step][i], tokens_of(seen, i), textwrap.shorten(seen["questions"][i], 16)
        label = f"{rewards[i]:6.3g}  {advantages[i]:+9.3f}  {step:4}  {push.sum():+13.3f}  {asked:16}  "
        marks = ("·" if x == 0 else ("▽▼" if x < 0 else "△▲")[abs(x) > strong] for x in push)
        below = "".join(mark.ljust(len(token)) for mark, token in zip(marks, tokens))
        lines += [label + "".join(tokens), " " * len(label) + below]
    return lines

def main(argv=None):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter, allow_abbrev=False)
    parser.add_argument("--script", default="grpo", help="grpo, gspo, ppo or your own")
    parser.add_argument("--after", type=int, default=4, help="steps before the one shown")
    own, flags = parser.parse_known_args(argv)
    script = importlib.import_module(own.script)
    print(f"{own.script}.py takes {own.after} steps silently, then one that you watch.")
    seen = watch(script, script.parse_args([*flags, "--steps", str(own.after + 1)]))
    if len(seen["rows"]["rewards"].unique()) == 1:
        sys.exit("all completions have the same reward: try another --after or --seed")
    counts = len(seen["questions"]), len(seen["rollout"]["ids"]), len(seen["logps"]) - 1
    print("", textwrap.fill(LEGEND.format(*counts), 80), "", *pushed(seen), sep="\n")

if __name__ == "__main__":
    main()

"""What holds for every objective, tested on every script next to common.py: copy grpo.py, edit its objective,
and these tests run on your copy, too. They call its functions by the names of their parameters. A copy may
mask out some of the tokens. Groups have four completions, and nearly all of their rewards differ. TEST_FLAGS
and TEST_REWARD in a copy change that: see tests/forks/README.md.
"""
import importlib
import math
import shutil

import pytest
import torch
from conftest import (ROOT, TINY, Trainer, call, count_t3, full_logprobs, holes, loss_of, make_batch,
                      random_rows, same, settings, spy, train)
from safetensors.torch import load_file

import common

SCRIPTS = sorted(path.stem for path in ROOT.glob("*.py")
                 if "\ndef policy_loss(" in path.read_text(encoding="utf-8"))
OPTIONS = {"grpo": [{}, {"kl": "wk3"}], "gspo": [{}, {"beta": 0.3, "kl": "wk3"}, {"token_level": True}]}
VARIANTS = [(name, options) for name in SCRIPTS for options in OPTIONS.get(name, [{}])]  # of policy_loss
EXACT = {"rtol": 1e-9, "atol": 1e-12}
OURS = ("ppo", "grpo", "gspo")

def prepared(script, **flags):
    """Groups of four. t3 gets the highest reward, but all rewards of the last group are equal. The clip range
    is narrow, so that much is clipped, and wider above than below, so that swapping its ends shows."""
    def reward(problems, texts):
        given = count_t3(problems, texts)
        if right_or_wrong(script):
            given = [float("t3" in text) for text in texts]
        return [x * (problem["question"] != "5") for problem, x in zip(problems, given)]
    usual = known(script, eps_low=0.02, eps_high=0.05) | getattr(script, "TEST_FLAGS", {})
    return Trainer(script, reward, **usual | {"group_size": 4} | known(script, **flags))

def right_or_wrong(script):
    return getattr(script, "TEST_REWARD", None) == "right or wrong"

def known(script, **flags):
    return {name: value for name, value in flags.items() if name in settings(script)}

def watched_update(trainer, monkeypatch):
    """The statistics of an update, and for each micro-batch its rows and the call of policy_loss."""
    with monkeypatch.context() as patch:
        passes, losses = spy(patch, common, "completion_states"), spy(patch, trainer.script, "policy_loss")
        stats = trainer.update()
    batches = {id(one.batch): one.batch for one in passes if one.model is trainer.policy}
    assert len(batches) == len(losses) > 0, (
        "the log-probs of update must come from common.token_logprobs or common.completion_states, and go to "
        "policy_loss once per micro-batch: otherwise these tests see nothing")
    return stats, list(zip(batches.values(), losses))

def imported(name):
    rejected = ROOT / f"{name}.py.rej"
    assert not rejected.exists(), (
        f"{name}.py is only half patched: the rest is in {rejected}, or delete it if you started again")
    return importlib.import_module(name)

@pytest.fixture(params=SCRIPTS)
def script(request):
    return imported(request.param)

# --- update: from a rollout to gradients

@pytest.mark.parametrize("name, options", VARIANTS)
def test_the_gradient_of_an_update_from_whole_logits(name, options, monkeypatch):
    """Row by row, without common.py: temperature, shift by one, mask, division by the number of rows. Other
    tensors that a copy makes in update keep their own gradient."""
    script = imported(name)
    trainer, rollout = prepared(script, **options).moved()
    rollout["mask"] = holes(rollout["mask"])
    if name in OURS:  # an A per token: with one per row, GSPO-token is GSPO
        rollout["adv"] = rollout["adv"] * torch.linspace(1, 2, rollout["mask"].shape[1])
    [gradient], found = trainer.gradients(rollout)
    monkeypatch.setattr(torch.Tensor, "backward", lambda loss: None)  # it would free what is needed here
    _, [(batch, watched)] = watched_update(trainer, monkeypatch)
    assert batch["row"].sort().values.equal((~rollout["skip"]).nonzero()[:, 0])
    T = batch["mask"].shape[1]
    given = {key: x[batch["row"]][:, :None if key == "ids" else T] if x.dim() > 1 else x[batch["row"]]
             for key, x in rollout.items()}
    made = {key: x for key, x in vars(watched).items() if key not in trainer.args}
    given = made | given | {"logp": full_logprobs(trainer.policy, given, 0.6), "args": trainer.args}
    loss, _ = call(script.policy_loss, given)
    parts = torch.autograd.grad(loss / len(rollout["ids"]), list(trainer.policy.parameters()))
    expected = torch.cat([part.flatten() for part in parts])
    gradient = gradient[:len(expected)]  # behind it PPO's critic
    if name in OURS:
        torch.testing.assert_close(gradient, expected, **EXACT)
        assert found["loss"] == pytest.approx(loss.item() / len(given["mask"]), rel=1e-5)
        assert found["clip_frac"] > 0.05
    else:  # a copy may divide by its tokens, or by nothing
        one, other = gradient / gradient.norm(), expected / expected.norm()
        torch.testing.assert_close(one, other, rtol=0, atol=1e-6)

def other_padding(rollout):
    """The same rows in reverse, with nonsense in all padding."""
    other = {name: x.flip(0) for name, x in rollout.items()}
    lengths = other["completion_length"]
    padding = torch.arange(rollout["mask"].shape[1]) >= lengths[:, None]
    beyond = torch.arange(rollout["ids"].shape[1]) >= (lengths + other["prompt_length"])[:, None]
    for name, x in other.items():
        if name == "ids" or x.shape == padding.shape and name != "mask":
            other[name] = x.masked_fill(beyond if name == "ids" else padding, 5)
    return other

def test_any_cut_into_micro_batches_gives_the_same_gradient(script):
    """And the same statistics, over all rows. Padding and the order of rows don't matter. A minibatch's step
    is that of a rollout with only its rows."""
    trainer, rollout = prepared(script).moved()
    whole, stats = trainer.gradients(rollout)
    for rows, tokens in [(other_padding(rollout), 4096), (rollout, 40), (rollout, 1)]:
        cut, same = trainer.gradients(rows, micro_batch_tokens=tokens)
        torch.testing.assert_close(cut, whole, **EXACT)
        assert same == pytest.approx(stats, rel=1e-6)
    assert whole.norm() > 1e-6, "this rollout has no gradient: does the objective train any token of it?"
    assert all(map(math.isfinite, [*trainer.stats.values(), *stats.values()])), (
        "a statistic is not finite: is it a mean over no token, or no row?")
    parts = [trainer.gradients(part)[0] for part in common.minibatches(rollout, 4, 4)]  # 2, 2, 1, 1 groups
    steps, _ = trainer.gradients(rollout, minibatches=4, epochs=2)
    torch.testing.assert_close(steps, torch.cat(parts * 2), **EXACT)

@pytest.mark.parametrize("beta", [0.0, 0.1])
def test_a_row_to_skip_has_no_gradient(script, beta):
    """Skipping it only saves time: an update that doesn't skip gives the same gradient."""
    trainer, rollout = prepared(script, beta=beta).moved()
    whole, _ = trainer.gradients(rollout | {"skip": torch.zeros_like(rollout["skip"])})
    torch.testing.assert_close(trainer.gradients(rollout)[0], whole, **EXACT, msg=(
        "a row has a gradient, but is skipped: see rollout['skip'] in collect"))

def test_every_pass_takes_every_row_once_with_what_was_collected(script, monkeypatch):
    """Old log-probs, advantages and the rest stay as they are while the policy moves. The statistics include
    every micro-batch of both passes."""
    trainer = prepared(script, minibatches=4, epochs=2, micro_batch_tokens=40)
    trainer.use_adam(lr=0.02)
    stats, watched = watched_update(trainer, monkeypatch)
    logged = common.means([loss.result[1] for _, loss in watched])
    assert {name: stats[name] for name in logged} == pytest.approx(logged, rel=1e-5)
    rows = [row for batch, _ in watched for row in batch["row"].tolist()]
    taught = (~trainer.rollout["skip"]).nonzero().squeeze(1).tolist()
    assert sorted(rows) == sorted(2 * taught) and sorted(rows[:len(taught)]) == taught
    numbers = {"row": torch.arange(len(trainer.rollout["ids"]))}
    for batch, loss in watched:
        # a copy without a ratio may do without old_logp
        assert torch.equal(vars(loss).get("old_logp", batch["old_logp"]), batch["old_logp"])
        for name, x in batch.items():
            whole = (trainer.rollout | numbers)[name][batch["row"]]
            assert torch.equal(x, whole[:, :x.shape[1]] if x.dim() > 1 else whole), name

@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_old_and_new_log_probs_are_equal_before_the_first_update(script, dtype, monkeypatch):
    """The ratio starts at 1. In bfloat16, that takes the same micro-batches for old and new log-probs."""
    trainer = prepared(script, dtype=dtype, minibatches=4, micro_batch_tokens=100, max_new_tokens=30)
    for batch, loss in watched_update(trainer, monkeypatch)[1]:
        logp = vars(loss).get("logp", batch["old_logp"])
        gap = ((logp - batch["old_logp"]) * batch["mask"]).abs().max()
        assert gap <= (1e-6 if dtype == "float32" else 0) and logp.dtype == torch.float32

# --- collect: from a policy to a rollout

@pytest.mark.parametrize("beta", [0.0, 0.1])
def test_a_rollout_of_equal_rewards_breaks_nothing(script, beta):
    """Such steps occur in real runs: nothing may crash or become NaN. Neither the reward nor the reference
    may get a gradient."""
    trainer = prepared(script, minibatches=2, beta=beta)
    weight = torch.ones((), requires_grad=True)
    trainer.reward = lambda problems, texts: weight * torch.ones(len(texts))
    trainer.collect()
    trainer.use_adam(lr=0.01)
    assert all(map(math.isfinite, [*trainer.update().values(), *trainer.stats.values()]))
    tensors = [x for x in trainer.rollout.values() if torch.is_tensor(x)]
    assert not any(x.requires_grad for x in tensors)
    assert all(x.isfinite().all() for x in [*tensors, *trainer.policy.parameters()])
    assert all(p.grad is None for p in trainer.reference.parameters())

def test_a_reward_is_one_number_per_completion_beside_its_problem(script):
    """A completion is the end of its row. If a function gives fewer rewards or more, they would go to other
    completions than it means. A copy may replay rows that it collected before."""
    trainer, asked = prepared(script), []
    if script.__name__ not in OURS:
        asked += zip(trainer.rollout["problems"], trainer.rollout["texts"])

    def reward(problems, texts):
        asked.extend(zip(problems, texts, strict=True))
        return [len(text) % 4 // 2 for text in texts]  # 0 or 1
    trainer.reward = reward
    trainer.collect()
    rows = list(zip(trainer.rollout["problems"], trainer.rollout["texts"], strict=True))
    assert asked == rows if script.__name__ in OURS else all(row in asked for row in rows)
    ends = trainer.rollout["prompt_length"] + trainer.rollout["completion_length"]
    for ids, end, (_, text) in zip(trainer.rollout["ids"], ends, rows, strict=True):
        whole = trainer.tokenizer.decode(ids[:end].tolist())
        assert whole.removesuffix("t1").endswith(text.removesuffix("t1")), "a text is not the end of its row"
    for count in (12, 23, 48):
        trainer.reward = lambda problems, texts: [i % 2 for i in range(count)]
        with pytest.raises((RuntimeError, IndexError)):
            trainer.collect()

def test_an_advantage_does_not_change_with_the_length_of_another_group(script, monkeypatch):
    """Group 5 gets eight more tokens; the rewards stay. A copy may leave out rows, and whiten."""
    found = []
    monkeypatch.setattr(common, "rollout_stats", lambda *_: {})  # it would refuse this sampled_logp
    for more in (0, 8):
        def generate(model, tokenizer, problems, group_size, args):
            asked = [problem for problem in problems for _ in range(group_size)]
            number = [4 * int(problem["question"]) + k for problem in problems for k in range(group_size)]
            rows = [[3 + i % 5] * (20 + i * 5 % 7 + more * (i >= 20)) for i in number]
            batch = make_batch([problem["prompt"] for problem in asked], rows)
            return batch | {"sampled_logp": -batch["mask"], "finished": batch["row"] >= 0, "problems": asked,
                            "texts": ["t3" * (i * 5 % 7 // 2) for i in number]}
        monkeypatch.setattr(common, "generate", generate)
        rollout = prepared(script, whiten=False).rollout
        others = torch.tensor([[problem["question"] != "5"] for problem in rollout["problems"]])
        adv = (rollout["adv"] * rollout["mask"])[others & (rollout["mask"] > 0)]
        found.append(adv if script.__name__ in OURS else (adv - adv.mean()) / (adv.std() + 1e-9))
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5, msg=(
        "an advantage depends on the length of another group: wrong, unless the objective says so"))

# --- policy_loss

def test_the_token_that_ends_a_completion_is_trained(script):
    """Otherwise stopping is never learned: the EOS has a gradient, like the other tokens of its row."""
    trainer = prepared(script, max_new_tokens=20)
    trainer.args.beta = 0.0  # the KL alone would push every token
    rollout, ends = trainer.rollout, []
    _, gradient, _ = loss_of(script, rollout | {"logp": rollout["old_logp"]}, trainer.args)
    for i, start in enumerate(rollout["prompt_length"].tolist()):
        n, finished = int(rollout["completion_length"][i]), bool(rollout["finished"][i])
        stops = (rollout["ids"][i, start:start + n] == 1).tolist()
        pushed = (gradient[i] != 0).tolist()
        assert stops[-1] == finished and not any(pushed[n:])
        if script.__name__ in OURS:  # a copy may have several turns in a row, or leave out tokens
            assert not any(stops[:-1]) and pushed[:n] == [pushed[0]] * n
        ends += [pushed[n - 1]] * finished
    assert sum(ends) >= (3 if script.__name__ in OURS else 1), (
        "stopping is not learned: ignore this only if the objective leaves these tokens out on purpose")

@pytest.mark.parametrize("name, options", VARIANTS)
def test_a_row_without_tokens_adds_nothing(name, options):
    """Neither NaN nor a gradient, alone or with others, and nothing to the statistics."""
    script, rows = imported(name), random_rows(4, lengths=(3, 0, 7, 1))
    empty, others = ({key: x[keep] for key, x in rows.items()} for keep in ([1], [0, 2, 3]))
    args = settings(script, **known(script, **options))
    whole, alone, rest = (loss_of(script, part, args) for part in (rows, empty, others))
    assert alone[0] == 0 and (alone[1] == 0).all() and rest[1].abs().max() > 0.01
    torch.testing.assert_close(whole[0], rest[0])
    torch.testing.assert_close(whole[1], torch.cat([rest[1][:1], alone[1], rest[1][1:]]))
    assert whole[2].get("clip_frac") == rest[2].get("clip_frac")

@pytest.mark.parametrize("name, options", VARIANTS)
def test_log_ratios_of_two_hundred_stay_finite(name, options):
    """exp(200) is inf in float32, and where the mask is 0, 0 * inf would be NaN."""
    script, zero = imported(name), torch.zeros(2, 3)
    for old, ref in [(-200, 0), (200, 0), (0, 200), (0, -200), (-200, 200), (200, -200)]:
        rows = dict.fromkeys(random_rows(), zero) | {"old_logp": zero + old, "ref_logp": zero + ref}
        rows |= {"adv": torch.tensor([[-1.0], [1.0]]), "mask": torch.tensor([[1.0, 1, 0], [1, 0, 0]]),
                 "completion_length": torch.tensor([2, 1])}
        loss, gradient, stats = loss_of(script, rows, settings(script, **known(script, **options)))
        assert loss.dtype == torch.float32 and loss.isfinite() and gradient.isfinite().all()
        numbers = [x for value in stats.values() for x in (value if isinstance(value, tuple) else [value])]
        assert torch.tensor(numbers).isfinite().all()

# --- whole runs

RUN = f"{TINY} --system_prompt '' --prompts 3 --group_size 4 --minibatches 2 --save_every 3 --eval_every 9"

@pytest.fixture
def rewards(script, here, spread, monkeypatch):
    """Whole runs get rewards from 0 to 1, or 0 and 1, by a hash of the text. In a third of the groups, all
    are 1."""
    def reward(problems, texts):
        given = [float(r > 0.5) if right_or_wrong(script) else r for r in by_text(problems, texts)]
        return [r if len(problem["question"]) % 3 else 1.0 for problem, r in zip(problems, given, strict=True)]
    by_text = common.answer_reward
    monkeypatch.setattr(common, "answer_reward", reward)

def test_main_trains_evaluates_and_saves_one_policy(script, rewards, monkeypatch):
    """Each of four steps has its own problems and random numbers. Evaluations ask no training problem. pi moves
    away from pi_ref, and --ref_every moves pi_ref to pi."""
    calls = [spy(monkeypatch, common, name) for name in ("load_problems", "evaluate", "save_checkpoint")]
    (loaded, evaluated, saved), collected = calls, spy(monkeypatch, script, "collect")
    moving = known(script, beta=0.1, ref_every=2)
    flags = "".join(f" --{name} {value}" for name, value in moving.items())
    rows = train(script, f"{RUN} --steps 4 {flags}")
    assert len({one.seed for one in collected}) == 4, "two steps have the same seed: see torch.manual_seed"
    taken = [problem["question"] for one in collected for problem in one.problems]
    assert len(taken) == len(set(taken)), "a step has problems of an earlier step"
    trained = {problem["question"] for problem in loaded[0].result[0]}
    asked = {problem["question"] for one in evaluated for problem in one.problems}
    assert asked and not asked & trained, "an evaluation asks training problems"
    assert all(one.policy is collected[0].policy for one in collected + evaluated + saved), (
        "another model than the policy samples, is evaluated, or is saved")
    assert max(row.get("kl", 1) for row in rows[2:]) > 0, "pi_ref moves along with pi, or nothing is trained"
    if "ref_every" in moving:
        first, last = load_file("run/step-0/model.safetensors"), torch.load("run/state.pt")["reference"]
        assert any(not torch.equal(x, last[name]) for name, x in first.items()), "pi_ref is never moved"

def test_a_resumed_run_is_equal_to_one_that_was_never_stopped(script, rewards):
    """Four steps of main in one go, or three, a resume, and one more, where --ref_every has made a reference
    in step 3. What a copy saves beside models and optimizers is used: with that of step 0, step 4 differs."""
    flags = "".join(f" --{name} {value}" for name, value in known(script, beta=0.1, ref_every=2).items())
    whole = train(script, f"{RUN} --steps 4 {flags}", "whole")
    train(script, f"{RUN} --steps 3 {flags}", "part")
    train(script, f"{RUN} --steps 0 {flags}", "start")
    state, start = torch.load("part/state.pt"), torch.load("start/state.pt")
    for name in state.keys() - {"step", "metrics", "policy", "reference", "critic", "optimizer", "critic_optimizer"}:
        shutil.copytree("part", name)
        torch.save(state | {name: start[name]}, f"{name}/state.pt")
        other = train(script, "--resume --steps 4", name)
        assert other[-1]["grad_norm"] != whole[-1]["grad_norm"], f"{name} is saved, but not used"
    torch.manual_seed(99)  # as another process, with other random numbers
    part = train(script, "--resume --steps 4", "part")
    one, other = ([{name: x for name, x in row.items() if name != "seconds" and name[:5] != "eval_"}
                   for row in rows] for rows in (part, whole))  # the part was also evaluated after step 3
    assert one == other and part[-1] == whole[-1] | {"seconds": part[-1]["seconds"]}
    one, other = (torch.load(f"{out}/state.pt") | {"metrics": ""} for out in ("whole", "part"))
    assert same(one, other), f"not equal: {[name for name in one if not same(one[name], other.get(name))]}"

def test_no_flag_is_ignored(script, rewards, monkeypatch):
    """Each flag of a script's own, doubled or switched, changes a gradient of three steps. Texts, such as paths,
    stay as they are. TEST_IDLE in a copy names flags that can't show in so short a run."""
    usual = known(script, beta=0.1, eps_low=0.0, eps_high=0.0, eps_value=0.0, value_lr=0.1)
    usual |= getattr(script, "TEST_FLAGS", {})
    parsed = spy(monkeypatch, common, "parse")

    def norms(out, **changes):
        monkeypatch.setattr(script, "TEST_FLAGS", usual | changes, raising=False)
        rows = train(script, f"{RUN} --epochs 1 --steps 3", out)
        return [row.get(name) for row in rows for name in ("grad_norm", "value_grad_norm")]
    before, shared = norms("before"), {flag.dest for flag in common.make_parser("", "")._actions}
    for flag in parsed[0].parser._actions:
        if flag.dest in {*shared, *getattr(script, "TEST_IDLE", []), "token_level"}:
            continue
        value = getattr(parsed[0].result, flag.dest)
        if flag.choices or flag.nargs == 0:
            other = next(x for x in flag.choices or (True, False) if x != value)
        elif flag.type:
            other = 2 * value if value else 1
        else:
            continue
        assert norms(flag.dest, **{flag.dest: other}) != before, f"--{flag.dest} is ignored: it changes nothing"

def test_a_policy_learns(script):
    """t3 gets the highest reward, and becomes the most common token."""
    trainer, rewards = prepared(script, group_size=8, minibatches=2, temperature=1.0), []
    trainer.use_adam(lr=0.02)
    for step in range(12):
        torch.manual_seed(step)
        trainer.collect()
        trainer.update()
        rewards.append(trainer.stats["reward"])
    before, after = sum(rewards[:3]), sum(rewards[-3:])
    assert after > (3 if script.__name__ in OURS else 1.5) * before, (
        "the reward hardly rises: ignore this only if the objective is something other than the reward")

"""What holds for every objective, tested on every script next to common.py: copy grpo.py, edit its objective,
and these tests run on your copy, too. A copy may mask out some of the tokens, and has groups of four. For
TEST_FLAGS, TEST_REWARD and TEST_IDLE in a copy, see tests/forks/README.md. Introspection: conftest.call."""
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
        binary = getattr(script, "TEST_REWARD", None) == "right or wrong"
        given = [float("t3" in text) for text in texts] if binary else count_t3(problems, texts)
        return [x * (problem["question"] != "5") for problem, x in zip(problems, given)]
    usual = known(script, eps_low=0.02, eps_high=0.05) | getattr(script, "TEST_FLAGS", {})
    return Trainer(script, reward, **usual | {"group_size": 4} | known(script, **flags))

def idle(script):
    """What changes nothing in runs as short as these. Without an A per token, GSPO-token is GSPO."""
    return {"token_level", *getattr(script, "TEST_IDLE", [])}

def known(script, **flags):
    return {name: value for name, value in flags.items() if name in settings(script)}

def watched_update(trainer, monkeypatch):
    """The statistics of an update, and for each micro-batch its rows and the call of policy_loss."""
    with monkeypatch.context() as patch:
        passes, losses = spy(patch, common, "completion_states"), spy(patch, trainer.script, "policy_loss")
        stats = trainer.update()
    batches = {id(one.batch): one.batch for one in passes if one.model is trainer.policy}
    assert len(batches) == len(losses) > 0, (
        "call common.token_logprobs or completion_states, and then policy_loss, once per micro-batch")
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
    """Row by row, without common.py. Other tensors that a copy makes in update keep their own gradient."""
    script = imported(name)
    trainer, rollout = prepared(script, **options).moved()
    rollout["mask"] = holes(rollout["mask"])
    if name in OURS:  # an A per token: with one per row, GSPO-token is GSPO
        rollout["mask"][0] = 0  # a row without a token to train on counts in N
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
    for name, x in other.items():
        if x.dim() > 1 and name != "mask":
            ends = other["completion_length"] + (other["prompt_length"] if name == "ids" else 0)
            other[name] = x.masked_fill(torch.arange(x.shape[1]) >= ends[:, None], 5)
    return other

def test_any_cut_into_micro_batches_gives_the_same_gradient(script):
    """And the same statistics. A minibatch's step is that of a rollout with only its rows."""
    trainer, rollout = prepared(script).moved()
    whole, stats = trainer.gradients(rollout)
    for rows, tokens in [(other_padding(rollout), 4096), (rollout, 40), (rollout, 1)]:
        cut, same = trainer.gradients(rows, micro_batch_tokens=tokens)
        torch.testing.assert_close(cut, whole, **EXACT)
        assert same == pytest.approx(stats, rel=1e-6)
    assert whole.norm() > 1e-6, "this rollout has no gradient: does the objective train any token of it?"
    assert all(map(math.isfinite, [*trainer.stats.values(), *stats.values()])), "a mean over no token or row?"
    parts = [trainer.gradients(part)[0] for part in common.minibatches(rollout, 4, 4)]  # 2, 2, 1, 1 groups
    steps, _ = trainer.gradients(rollout, minibatches=4, epochs=2)
    torch.testing.assert_close(steps, torch.cat(parts * 2), **EXACT)

@pytest.mark.parametrize("beta", [0.0, 0.1])
def test_a_row_to_skip_has_no_gradient(script, beta):
    """Skipping it only saves time: an update that doesn't skip gives the same gradient."""
    trainer, rollout = prepared(script, beta=beta).moved()
    whole, _ = trainer.gradients(rollout | {"skip": torch.zeros_like(rollout["skip"])})
    torch.testing.assert_close(trainer.gradients(rollout)[0], whole, **EXACT)

def test_every_pass_takes_every_row_once_with_what_was_collected(script, monkeypatch):
    """Old log-probs and the rest stay while the policy moves. Statistics include both passes."""
    trainer = prepared(script, minibatches=4, epochs=2, micro_batch_tokens=40)
    trainer.use_adam(lr=0.02)
    stats, watched = watched_update(trainer, monkeypatch)
    logged = common.means([loss.result[1] for _, loss in watched])
    assert {name: stats[name] for name in logged} == pytest.approx(logged, rel=1e-5)
    rows = [row for batch, _ in watched for row in batch["row"].tolist()]
    taught = (~trainer.rollout["skip"]).nonzero().squeeze(1).tolist()
    assert sorted(rows) == sorted(2 * taught) and sorted(rows[:len(taught)]) == taught
    rollout = trainer.rollout | {"row": torch.arange(len(trainer.rollout["ids"]))}
    for batch, loss in watched:
        assert torch.equal(vars(loss).get("old_logp", batch["old_logp"]), batch["old_logp"])  # or no ratio
        for name, x in batch.items():
            whole = rollout[name][batch["row"]]
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
    """Such steps occur: nothing may crash, become NaN, or give the reward or the reference a gradient."""
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
        whole = trainer.tokenizer.decode(ids[:end].tolist()).removesuffix("t1")
        assert whole.endswith(text), "a text is not the end of its row"
    for count in (12, 23, 48):
        trainer.reward = lambda problems, texts: [i % 2 for i in range(count)]
        with pytest.raises((RuntimeError, IndexError)):
            trainer.collect()

def test_an_advantage_does_not_change_with_another_group(script, monkeypatch):
    """Group 4 gets other rewards, group 5 eight more tokens. A copy may leave out rows, shift, and scale."""
    found = []
    monkeypatch.setattr(common, "rollout_stats", lambda *_: {})  # it would refuse this sampled_logp
    for more in (0, 8):
        def generate(model, tokenizer, problems, group_size, args):
            asked = [problem for problem in problems for _ in range(group_size)]
            number = [4 * int(problem["question"]) + k for problem in problems for k in range(group_size)]
            rows = [[3 + i % 5] * (20 + i * 5 % 7 + more * (i >= 20)) for i in number]
            batch = make_batch([problem["prompt"] for problem in asked], rows)
            return batch | {"sampled_logp": -batch["mask"], "finished": batch["row"] >= 0, "problems": asked,
                            "texts": ["t3" * ((i * 5 + more * (i >= 16)) % 7 // 2) for i in number]}
        monkeypatch.setattr(common, "generate", generate)
        rollout = prepared(script, whiten=False).rollout
        others = torch.tensor([[problem["question"] < "4"] for problem in rollout["problems"]])
        adv = (rollout.get("adv", 0) * rollout["mask"])[others & (rollout["mask"] > 0)]
        found.append(adv if script.__name__ in OURS else (adv - adv.mean()) / (adv.std() + 1e-9))
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5, msg=(
        "an advantage depends on another group: wrong, unless the objective says so"))

# --- policy_loss
def test_the_token_that_ends_a_completion_is_trained(script):
    """Otherwise stopping is never learned: the EOS has a gradient, like the other tokens of its row."""
    trainer = prepared(script, max_new_tokens=20)
    trainer.args.beta = 0.0  # the KL alone would push every token
    rollout, ours = trainer.rollout, script.__name__ in OURS
    pushed = loss_of(script, rollout | {"logp": rollout["old_logp"]}, trainer.args)[1] != 0
    rows, last = torch.arange(len(pushed)), rollout["completion_length"] - 1
    stops = rollout["ids"][rows, rollout["prompt_length"] + last] == 1
    inside = torch.arange(pushed.shape[1]) <= last[:, None]
    assert stops.equal(rollout["finished"]) and not (pushed & ~inside).any()
    assert not ours or pushed.equal(inside & pushed[:, :1])  # a copy may leave out tokens
    assert pushed[rows, last][stops].sum() >= (3 if ours else 1), (
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
        assert torch.tensor(list(stats.values())).isfinite().all()

# --- whole runs
@pytest.fixture
def run(script, here, spread, monkeypatch):
    """A function: flags and a folder -> metrics of a run of main. Rewards, 0 or 1, follow from a hash of the
    text, but in a third of the groups, all are 1. pi_ref, if there is one, moves to pi in step 3."""
    def reward(problems, texts):
        pairs = zip(problems, by_text(problems, texts))
        return [float(r > 0.5 or len(problem["question"]) % 3 == 0) for problem, r in pairs]
    by_text = common.answer_reward
    monkeypatch.setattr(common, "answer_reward", reward)
    flags = f"{TINY} --system_prompt '' --prompts 3 --group_size 4 --minibatches 2 --epochs 1 --save_every 3"
    flags += "".join(f" --{name} {value}" for name, value in known(script, beta=0.1, ref_every=2).items())
    return lambda more, out="run": train(script, f"{flags} --eval_every 9 {more}", out)

def test_main_trains_evaluates_and_saves_one_policy(script, run, monkeypatch):
    """Each step has its own problems and random numbers. Evaluations ask no training problem."""
    loaded, evaluated, saved = (
        spy(monkeypatch, common, name) for name in ("load_problems", "evaluate", "save_checkpoint"))
    collected = spy(monkeypatch, script, "collect")
    rows = run("--steps 4")
    assert len({one.seed for one in collected}) == 4, "two steps have the same seed: see torch.manual_seed"
    taken = [problem["question"] for one in collected for problem in one.problems]
    assert len(taken) == len(set(taken)), "a step has problems of an earlier step"
    trained = {problem["question"] for problem in loaded[0].result[0]}
    asked = {problem["question"] for one in evaluated for problem in one.problems}
    assert asked and not asked & trained, "an evaluation asks training problems"
    policies = {id(one.policy) for one in collected + evaluated + saved}
    assert len(policies) == 1, "a model other than the policy samples, is evaluated, or is saved in step-N"
    assert max(row.get("kl", 1) for row in rows[2:]) > 0, "pi_ref moves along with pi, or nothing is trained"
    if known(script, ref_every=2):
        first, last = load_file("run/step-0/model.safetensors"), torch.load("run/state.pt")["reference"]
        assert any(not torch.equal(first[name], last[name]) for name in first), "--ref_every moves no pi_ref"

def test_a_resumed_run_is_equal_to_one_that_was_never_stopped(script, run):
    """Four steps of main in one go, or three, a resume, and one more. What a copy saves beside models and
    optimizers makes a difference: with its state before step 1, step 4 is another."""
    whole, _, _ = run("--steps 4", "whole"), run("--steps 3", "part"), run("--steps 0", "start")
    state, start = (torch.load(f"{out}/state.pt") for out in ("part", "start"))
    models = {"policy", "optimizer", "critic", "critic_optimizer", "reference"}
    for name in state.keys() - models - {"step", "metrics"} - idle(script):
        shutil.copytree("part", name)
        torch.save(state | {name: start[name]}, f"{name}/state.pt")
        other = train(script, "--resume --steps 4", name)
        assert other[-1]["grad_norm"] != whole[-1]["grad_norm"], f"{name} is saved, but never used"
    torch.manual_seed(99)  # as another process, with other random numbers
    part = train(script, "--resume --steps 4", "part")
    assert len(part) == 5 and part[-1] == whole[-1] | {"seconds": part[-1]["seconds"]}
    one, other = (torch.load(f"{out}/state.pt") | {"metrics": ""} for out in ("whole", "part"))
    assert same(one, other), f"not equal: {[name for name in one if not same(one[name], other.get(name))]}"

def test_no_flag_is_ignored(script, run, monkeypatch):
    """Each of a script's own, doubled or switched, changes a gradient. Texts, such as paths, aren't tried."""
    usual = known(script, eps_low=0.0, eps_high=0.0, eps_value=0.0, value_lr=0.1, ref_every=1)
    usual |= getattr(script, "TEST_FLAGS", {})
    parsed = spy(monkeypatch, common, "parse")

    def norms(**changes):
        monkeypatch.setattr(script, "TEST_FLAGS", usual | changes, raising=False)
        rows = run("--steps 4", "-".join(["with", *changes]))
        return [row.get(name) for row in rows for name in ("grad_norm", "value_grad_norm")]
    before, shared = norms(), {flag.dest for flag in common.make_parser("", "")._actions}
    for flag in parsed[0].parser._actions:
        name, value = flag.dest, getattr(parsed[0].result, flag.dest, None)
        others = [True, False] if flag.nargs == 0 else flag.choices or flag.type and [2 * (value or 1)]
        if others and name not in shared | idle(script):
            other = next(x for x in others if x != value)
            assert norms(**{name: other}) != before, f"--{name} is ignored (or see TEST_IDLE)"

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
    assert after > (3 if script.__name__ in OURS else 1.5) * before or "reward" in idle(script), (
        "the reward hardly rises: if the objective is something else, put 'reward' into TEST_IDLE")

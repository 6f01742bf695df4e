"""Faults planted in copies of the code, for each equation and each trap: the tests named must see them."""
import contextlib
import gc
import io
import multiprocessing
import os
import shutil
import signal
import tempfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.upkeep
ROOT = Path(__file__).resolve().parent.parent
LIBRARIES = ["pytest", "datasets", "torch._dynamo", "transformers.generation",
             *(f"transformers.models.{name}.modeling_{name}" for name in ("qwen2", "qwen3", "llama", "gpt2"))]
SOUND = "z_scores or lands_on or memory_is or keep_groups or first_stop or lone_file or warm_up or out_def"
FAULTS = {"ppo grpo gspo": [  # what stands there once, what is planted, test files: words of tests' names
    ("batch_of(problems, step, args)", "batch_of(problems, 1, args)", "cli: other_problems"),
    ("(logp - old_logp) * mask", "(old_logp - logp) * mask", "equations: clip_table"),
    ("torch.min(ratio * adv, clip", "torch.max(ratio * adv, clip", "equations: clip_table"),
    ("torch.min(ratio * adv, clipped * adv)", "adv * torch.min(ratio, clipped)", "equations: clip_table"),
    ("(1 - args.eps_low, 1 + args.eps_high)", "(1 - args.eps_high, 1 + args.eps_low)", "equations: can_gain"),
    ("(objective * mask / lengths)", "(objective * mask / lengths.mean())", "equations: row_means"),
    ("lengths).sum()\n    is", "lengths).sum(1).mean()\n    is", "equations: sum_over_rows"),
    (".clamp(min=1)                       # (N, 1) |o_i|\n    log", "\n    log", "every_script: row_without"),
    ("(loss / rows).backward()", '(loss / len(b["ids"])).backward()', "every_script: any_cut"),
    ('rows = len(minibatch["ids"])', 'rows = len(rollout["ids"])', "every_script: its_own_rows"),
    ('policy_loss(logp, b["old_logp"]', "policy_loss(logp, logp.detach()", "every_script: every_pass"),
    ("args.temperature, args.cuda_graphs)", "1.0, args.cuda_graphs)", "every_script: temperature_is"),
    ("(policy, b, args.temperature)", "(policy, b, 1.0)", "every_script: equal_before"),
    ("@torch.no_grad()\ndef collect", "def collect", "every_script: carries_no"),
    (".eval().requires_grad_(False)", ".eval()", "cli: holds_no_reference"),
], "grpo gspo": [
    ("r - r.mean(1, keepdim=True)", "r - r.mean()", "equations: z_scores"),
    ("view(-1, group_size)  ", "view(group_size, -1).T  ", "equations: z_scores"),
    ("r.std(1, keepdim=True)", "r.std(1, keepdim=True, correction=0)", "equations: z_scores"),
    ("adv.masked_fill(equal, 0.0)", "adv", "equations: exactly_zero"),
    ("((ref_logp - logp) * mask).clamp(max=20)", "(ref_logp - logp) * mask", "every_script: two_hundred"),
    ("log_x.exp() - log_x - 1", "(-log_x).exp() + log_x - 1", "grpo gspo: float_loop"),
    ("copy.deepcopy(policy).eval().requires_grad_(False)", "policy", "cli: holds_no_reference"),
    ("(step - 1) % args.ref_every", "step % args.ref_every", "cli: ref_every_m"),
    ("(policy.state_dict())", "(policy.state_dict(), assign=True)", "cli: ref_every_m"),
], "grpo": [
    ("log_ratio.clamp(max=20).exp()  #", "log_ratio.exp()  #", "every_script: two_hundred and grpo"),
    ("log_x.exp() - log_x - 1", "-log_x", "equations: grpo_k3"),  # k1 as a loss: no gradient on average
    ("log_x.exp() - log_x - 1", "log_x.mean(1, keepdim=True).exp() - log_x - 1", "grpo: own_kl"),
    ("objective - args.beta * kl", "objective + args.beta * kl", "grpo: moving_away"),
    ("kl = kl * ratio", "kl = kl", "equations: forward_kl"),
], "gspo": [
    ("log_ratio.sum(1, keepdim=True) / lengths", "log_ratio.sum(1, keepdim=True)", "equations: test_2"),
    ("= ratio.detach() *", "= ratio *", "equations: gspo_token"),
    ('eps_low", type=float, default=3e-4', 'eps_low", type=float, default=0.2', "gspo: papers_range"),
    ("torch.where(signs * adv[:, None] < 0", "torch.where(signs != 0", "gspo: neither_punishes"),
    ("kl * log_ratio.clamp(max=20).exp()", "kl * ratio", "gspo: float_loop"),
], "ppo": [
    ("gamma * next_value - values", "next_value - values", "equations: gae"),
    ("gamma * lam * running", "gamma * running", "equations: gae"),
    ("values = values * mask", "values = values", "equations: gae"),  # V behind the end
    ("running) * mask[:, t]", "running)", "ppo: double_sum"),  # sums over padding
    ("return advantages, advantages + values", "return advantages, advantages", "equations: gae"),
    ("mean = (x * mask).sum() / mask.sum()", "mean = x.mean()", "ppo: whitening"),
    ("log_ratio.clamp(max=20).exp()  #", "log_ratio.exp()  #", "every_script: two_hundred and ppo"),
    ("rewards = -beta * (old_logp", "rewards = beta * (old_logp", "equations: reverse_kl"),
    ("(old_logp - ref_logp) * mask", "((old_logp - ref_logp) ** 2 / 2) * mask", "equations: reverse_kl"),
    ("mask.sum(1).long() - 1  ", "mask.sum(1).long().clamp(max=mask.shape[1] - 1)", "ppo: lands_on"),
    ("torch.max((values - returns)", "torch.min((values - returns)", "equations: value_loss"),
    ("(args.vf_coef * error / rows)", "(error / rows)", "ppo: gradients_of_an_update"),
    ("args.value_lr, args, eps=1e-5", "args.lr, args, eps=1e-5", "ppo: learning_rate"),
    ("args.lr, args, eps=1e-5", "args.lr, args", "ppo: epsilon"),
    ("if args.whiten:", "if True:", "ppo: collect_by"),
], "common": [
    ("def generate(", "def generate(", f"equations ppo logprobs batching sampling data toy cli: {SOUND}"),
    # log-probs (above no fault: a copy is whole)
    ("hidden[row, position - 1]", "hidden[row, position]", "logprobs: log_softmax and qwen2"),
    ("else logits.div_(temperature)", "else logits", "logprobs: log_softmax and qwen2"),
    ("grad = grad / ctx.temperature", "grad = grad / 1", "logprobs: log_softmax and qwen2"),
    ("hidden.to(dtype) @ weight.to(dtype).T", "(hidden @ weight.T).to(dtype)", "logprobs: chunks"),
    ("else 256\n", "else 10**9\n", "logprobs: memory"),
    ("setattr(module, name, 0.0)", "pass", "logprobs: ratio_is_one and qwen2"),  # dropout
    ("minibatches(rollout, args.minibatches,", "minibatches(rollout, 1,", "every_script: equal_before"),
    # batches, statistics, optimiser
    ("while begin < len(lengths):", "while begin < len(lengths) - 1:", "batching: within_the_budget"),
    ("        begin = end", "        begin = max(begin + 1, end - 1)", "batching: within_the_budget"),
    ("groups.tensor_split(count)", "groups.flatten().tensor_split(count)", "batching: keep_groups"),
    ('result[b["row"], :b', 'result[b["row"].sort()[0], :b', "batching: put_back"),
    ("map(sum, zip(*values))", "values[-1]", "batching: weighted"),
    ("/ mask.sum(),  # est", "/ mask.numel(),  # est", "batching: leave_padding_out"),
    ('1 - rollout["finished"]', 'rollout["finished"]', "batching: leave_padding_out"),
    ('f"{args.seed} {k}"', 'f"{args.seed}"', "batching: every_problem_once"),
    ("self.device, torch.float32)", "self.device)", "batching: learning_rate_of"),
    ("weight.grad_dtype = torch.float32", "pass", "batching: summed_in_float32"),
    ("        if math.isfinite(norm):", "        if True:", "batching: non_finite"),
    ("(0.9, 0.95), eps", "(0.9, 0.999), eps", "batching: equals_adamw"),
    ("eps, 0.0, fused", "1e-8, 0.0, fused", "batching: equals_adamw"),
    ('self.adamw.load_state_dict(state["adamw"])', "pass", "batching: goes_on"),
    ('self.taken = state["taken"]', "pass", "batching: goes_on"),
    # sampling
    ("= logits / s", "= logits.where(logits > logits.topk(3)[0][:, -1:], -99) / s", "sampling: samples_come"),
    ("= [x.repeat_interleave(self.G, 0)", "= [x.repeat(self.G, 1, 1, 1)", "sampling: samples_come and qwen2"),
    ("for layer in self.layers:  #", "self.old = sum(self.layers, [])\n        for layer in self.layers:  #",
     "sampling: one_cache"),
    ("lengths[:, None])", "(lengths - (~self.running).long())[:, None])", "sampling: first_stop"),  # no EOS
    ("(column < ends[:, None])", "(self.ids[:, :len(column)] > 1)", "sampling: first_stop"),  # ids as padding
    ("+= running.long()", "+= 1", "sampling: first_stop"),  # tokens after EOS
    ("{tokenizer.eos_token_id, *(", "{*(", "sampling: that_stop"),
    ("position_ids=positions", "position_ids=positions - positions[:, :1]", "sampling: greedy and gpt2"),
    ("column <= at -", "column < at -", "sampling: greedy and mistral"),  # a window one too wide
    ("= new.transpose(1, 2)", "= new.transpose(1, 2) * 0.9", "sampling: greedy and llama"),  # the scale
    ("= cached[going]", "= cached[:len(going)]", "sampling: greedy and llama"),
    ("model.eval()  #", "model.train()  #", "sampling: greedy and llama"),
    ("model.eval()  #", "model.eval().bfloat16()  #", "sampling: leaves_the_model and llama"),
    ("self.position[self.kept] +=", "self.position = ~~self.position; self.position[self.kept] +=",
     "sampling: replayed"),
    ("self.running[self.kept] =", "self.running = ~~self.running; self.running[self.kept] =",
     "sampling: replayed"),
    ("if shape == recorded:", "if recorded and shape[0] == recorded[0]:", "sampling: replayed"),
    (" if math.isfinite(value)}", "}", "cli: not_finite_is and grpo"),
    ("(args.eval_samples, args.temperature)", "(args.eval_samples, 1.0)", "sampling: counts_every_problem"),
    ("torch.manual_seed(args.seed)  #", "#", "sampling: same_numbers"),
    # models, problems, rewards
    ('"toy" if size < 1_000_000 else "real"', '"toy"', "cli: never_gets and grpo"),
    ("torch.nn.init.zeros_(model.score.weight)", "", "ppo: at_the_start and qwen2"),
    ("copy.deepcopy(policy.base_model)", "policy.base_model", "ppo: at_the_start and qwen2"),
    ("device=weight.device)  #", "device=weight.device, dtype=weight.dtype)  #", "ppo: rounded and qwen2"),
    ("random.Random(str(row.get(args.question_column)))", "random.Random(str(row))", "data: lone_file"),
    ("[p for p in problems for _ in range(len(texts) // len(problems))]",
     "problems * (len(texts) // len(problems))", "data: beside_its"),
    ("if not math.isfinite(r):", "if False:", "data: no_numbers and grpo"),
    ("<= args.max_prompt_tokens and (", "< args.max_prompt_tokens and (", "data: left_out"),
    ("add_special_tokens=False", "add_special_tokens=True", "data: templates_own"),
    ('problem["question"] + "\\n" + text)', "text)", "data: reward_models_scores"),
    ('text.rpartition("####")[2].strip()', 'text.partition("####")[2].strip()', "math_reward: extract"),
    ('if signs.count("-") % 2 else value', "if False else value", "math_reward: never_pays"),
    # runs and checkpoints
    ("self.args.seed * 1_000_003 + step", "step", "cli: seed_reaches and grpo"),
    ("sorted(found, key=lambda p: int(p.name[5:]))", "sorted(found)", "resume: newest"),
    (', Path(args.out, ".unfinished")', ', Path(args.out, f"step-{step}")', "resume: kill_inside and ppo"),
    ('shutil.rmtree(Path(args.out, ".unf', 'dict(x=Path(args.out, ".unf', "resume: full_disk and optimizer"),
    ("if int(old.name[5:]) < step:", "if int(old.name[5:]) != step:", "resume: users"),
    ('glob("step-[1-9]*/")', 'glob("step-[1-9]*")', "resume: users"),
    ("except torch.OutOfMemoryError:\n        raise", "except MemoryError:\n        raise", "cli: runs_out"),
    ("        if not args.resume and set(os", "        if False and set(os", "cli: taken"),
    ("        lock.acquire(timeout=0)", "        pass", "resume: same_instant"),
    ("        lock.acquire(timeout=0)", "        pass", "resume: one_process"),
    ('Path(args.out, "args.tmp").write_text(', 'Path(args.out, "args.json").write_text("{}")\n'
     '        Path(args.out, "args.tmp").write_text(', "resume: newest"),
    ('Path(args.out, f"step-{start}", "metrics.jsonl").read_bytes()', "self.path.read_bytes()",
     "resume: damaged_or_lost"),
    ("range(self.start + 1, self", "range(max(1, self.start), self", "resume: bit_equal_to and grpo"),
    ("weight.data.copy_(self.masters[name].data.copy_(", "(self.masters[name].data.copy_(",
     "resume: bit_equal_to and grpo"),
    ("if any(x.shape != master.shape", "if any(False", "batching: other_weights"),
    ('models["reference"].load_state_dict(states["reference"])', "pass", "resume: bit_equal_to and grpo"),
], "tests/toy/make": [
    ('tokenizer, problems["train"])', 'tokenizer, problems["test"])', "toy: program_itself"),
    ("as_batch(draw(problems, rng)", 'as_batch(draw(make_problems()["test"], rng)', "toy: warm_up"),
    ("digit}={new}", "digit}={result}", "toy: warm_up"),
]}
CASES = [(f"{path}.py", sound, faulty, f"{tests} and {path}" if " " in paths else tests)
         for paths, faults in FAULTS.items() for sound, faulty, tests in faults for path in paths.split()]

def plant(path, sound, faulty, tests):
    """Run `tests` on a copy of the tree with the fault in it: pytest's exit status and its last words."""
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()) as said:
        tempfile.tempdir = folder  # what the tests leave behind goes with it
        shutil.copytree(ROOT / "tests", f"{folder}/tests", ignore=shutil.ignore_patterns("__pycache__"))
        for script in ROOT.glob("*.py"):
            shutil.copy(script, folder)
        os.chdir(folder)
        source = Path(path).read_text()
        if source.count(sound) != 1:
            return -1, f"the fault no longer fits the code: {sound!r} is in it {source.count(sound)} times"
        Path(path).write_text(source.replace(sound, faulty))
        gc.freeze()  # else pytest's search for garbage goes through all of the libraries, which takes seconds
        signal.alarm(100)  # for a fault that makes a test hang
        names, words = tests.split(": ")
        options = ["-k", words, "-m", "upkeep or not upkeep", "-xq", "--assert=plain", "--tb=native"]
        status = pytest.main([f"tests/test_{name}.py" for name in names.split()] + options)
    return int(status), said.getvalue()[-2000:]

@pytest.fixture(scope="module")
def planted(request):
    """The results of the cases that were chosen, by their place in the table, as soon as they are there."""
    chosen = [item.callspec.params["case"] for item in request.session.items if item.module is request.module]
    os.environ["OMP_NUM_THREADS"] = "1"
    context = multiprocessing.get_context("forkserver")  # it has no threads of its own
    context.set_forkserver_preload(LIBRARIES)
    with context.Pool(2, maxtasksperchild=1) as pool:
        yield {case: pool.apply_async(plant, CASES[case]) for case in chosen}

@pytest.mark.parametrize("case", range(len(CASES)), ids=[f"{path}:{faulty}" for path, _, faulty, _ in CASES])
def test_a_planted_fault_turns_a_test_red(case, planted):
    status, said = planted[case].get(timeout=120)
    _, sound, faulty, _ = CASES[case]
    assert status == (sound != faulty), f"pytest's exit status is {status} after {CASES[case]}\n{said}"

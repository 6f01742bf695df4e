"""Faults planted in copies of the code, for each equation and each trap: the tests named must see them.

A row of the table: what stands in the file, once; what is planted in its place; the tests that must turn red,
as "file: words", the words as for pytest -k. A row for several scripts is one fault, tried in each of them.
Find out what goes wrong in a row before you look: most of these train without an error message.
"""
import collections
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
FAULTS = {"ppo grpo gspo": [
    ("batch_of(problems, step, args)", "batch_of(problems, 1, args)", "cli: other_problems"),
    ("(logp - old_logp) * mask", "(old_logp - logp) * mask", "equations: clip_table"),
    ("torch.min(ratio * adv, clip", "torch.max(ratio * adv, clip", "equations: clip_table"),
    ("torch.min(ratio * adv, clipped * adv)", "adv * torch.min(ratio, clipped)", "equations: clip_table"),
    ("(1 - args.eps_low, 1 + args.eps_high)", "(1 - args.eps_high, 1 + args.eps_low)", "equations: can_gain"),
    ("(objective * mask / lengths)", "(objective * mask / lengths.mean())", "equations: row_means"),
    ("mask / lengths).sum()\n    is", "mask / lengths).sum(1).mean()\n    is", "equations: sum_over_rows"),
    (".clamp(min=1)                       # (N, 1) |o_i|\n    log", "\n    log", "every_script: row_without"),
    ("backward(loss / rows)", 'backward(loss / len(b["ids"]))', "every_script: any_cut"),
    ('rows = len(minibatch["ids"])', 'rows = len(rollout["ids"])', "every_script: its_own_rows"),
    ('logp, b["old_logp"],', "logp, logp.detach(),", "every_script: every_pass"),
    ("args.temperature, args.cuda_graphs)", "1.0, args.cuda_graphs)", "every_script: temperature_is"),
    ("(policy, b, args.temperature)", "(policy, b, 1.0)", "every_script: equal_before"),
    ("@torch.no_grad()\ndef collect", "def collect", "every_script: carries_no"),
    (".eval().requires_grad_(False)", ".eval()", "cli: holds_no_reference"),
    ("    for _ in range(args.epochs):\n", "    for _ in range(args.epochs):\n        logged = []\n",
     "every_script: all_passes"),
    ("batch[0], rollout)", "batch[-1], rollout)", "cli: its_own_problem"),
    ('        stats["seconds"] = time.perf_counter() - step_start\n        if', "        if True:\n"
     "            stats |= common.evaluate(policy, tokenizer, held_out, reward, args)\n"
     '        stats["seconds"] = time.perf_counter() - step_start\n        if', "cli: seconds_are"),
    ("clip_frac\": (is_clipped.sum(), mask.sum())", "clip_frac\": (is_clipped.sum(), mask.numel())",
     "ppo grpo gspo: float_loop"),
], "ppo grpo": [
    ("        if stop.status:", "        if stop.status and step % args.save_every:", "resume: its_status"),
    ("args.seed * 1_000_003 + step", "step", "cli: seed_reaches"),
    ("args.seed * 1_000_003 + step", "args.seed + step", "cli: share_their_noise"),
    ("for step in range(start + 1, args.steps + 1):", "for step in range(max(1, start), args.steps + 1):",
     "resume: bit_equal_to"),
    (" ratio = log_ratio.clamp(max=20)", " ratio = log_ratio", "every_script: two_hundred"),
    (" ratio = log_ratio.clamp(max=20)", " ratio = log_ratio.clamp(max=5)", "ppo grpo: float_loop"),
], "ppo gspo": [
    ("        stats |= update(", "        held = common.evaluate(policy, tokenizer, held_out, reward, args)\n"
     "        common.evaluate = lambda *_: held\n        stats |= update(", "cli: after_the_step"),
], "grpo gspo": [
    ("r - r.mean(1, keepdim=True)", "r - r.mean()", "equations: z_scores"),
    ("view(-1, group_size)  ", "view(group_size, -1).T  ", "equations: z_scores"),
    ("r.std(1, keepdim=True)", "r.std(1, keepdim=True, correction=0)", "equations: z_scores"),
    ("adv.masked_fill(equal, 0.0)", "adv", "equations: exactly_zero"),
    ("((ref_logp - logp) * mask).clamp(max=20)", "(ref_logp - logp) * mask", "every_script: two_hundred"),
    ("((ref_logp - logp) * mask).clamp(max=20)", "((ref_logp - logp) * mask).clamp(max=5)",
     "grpo gspo: float_loop"),  # what was given up is not pulled back
    ("log_x.exp() - log_x - 1", "(-log_x).exp() + log_x - 1", "grpo gspo: float_loop"),
    ("copy.deepcopy(policy).eval().requires_grad_(False)", "policy", "cli: holds_no_reference"),
    ("(step - 1) % args.ref_every", "step % args.ref_every", "cli: ref_every_m"),
    ("(policy.state_dict())", "(policy.state_dict(), assign=True)", "cli: ref_every_m"),
    ("type=common.two_or_more, default=8", "type=common.count, default=8", "cli: out_of_range"),
], "grpo": [
    ("log_x.exp() - log_x - 1", "-log_x", "equations: grpo_k3"),  # k1 as a loss: no gradient on average
    ("log_x.exp() - log_x - 1", "log_x.mean(1, keepdim=True).exp() - log_x - 1", "grpo: float_loop"),
    ("objective - args.beta * kl", "objective + args.beta * kl", "grpo: float_loop"),
    ("kl = kl * log_ratio.clamp(max=20).exp()", "kl = kl", "equations: forward_kl"),
    ("default=0.04", "default=0.4", "cli: defaults_are"),
    ("dict(toy=5e-4,", "dict(toy=5e-6,", "cli: defaults_are"),
], "gspo": [
    ("log_ratio.sum(1, keepdim=True) / lengths", "log_ratio.sum(1, keepdim=True)", "equations: test_2"),
    ("= ratio.detach() *", "= ratio *", "equations: gspo_token"),
    ("default=dict(float32=3e-4,", "default=dict(float32=0.2,", "gspo: papers_range"),
    ("args.gamma ** after.clamp(min=0)", "args.gamma ** (after.clamp(min=0) + 1)", "gspo: discounted"),
    ("kl * log_ratio.clamp(max=20).exp()", "kl * ratio", "gspo: float_loop"),
], "ppo": [
    ("gamma * next_value - values", "next_value - values", "equations: gae"),
    ("gamma * lam * running", "gamma * running", "equations: gae"),
    ("values = values * mask", "values = values", "equations: gae"),  # V behind the end
    ("running) * mask[:, t]", "running)", "ppo: double_sum"),  # sums over padding
    ("return advantages, advantages + values", "return advantages, advantages", "equations: gae"),
    ("mean = (x * mask).sum() / mask.sum()", "mean = x.mean()", "ppo: whitening"),
    ("rewards = -beta * (old_logp", "rewards = beta * (old_logp", "equations: reverse_kl"),
    ("(old_logp - ref_logp) * mask", "((old_logp - ref_logp) ** 2 / 2) * mask", "equations: reverse_kl"),
    ("mask.sum(1).long() - 1  ", "mask.sum(1).long().clamp(max=mask.shape[1] - 1)", "ppo: lands_on"),
    ("torch.max((values - returns)", "torch.min((values - returns)", "equations: value_loss"),
    ("(args.vf_coef * v_loss / rows)", "(v_loss / rows)", "ppo: gradients_of_an_update"),
    ("args.value_lr, args, eps=1e-5", "args.lr, args, eps=1e-5", "ppo: learning_rate"),
    ("args.lr, args, eps=1e-5", "args.lr, args", "ppo: epsilon"),
    ("if args.whiten:", "if True:", "ppo: collect_by"),
], "common": [  # log-probs
    ("hidden[row, position - 1]", "hidden[row, position]", "logprobs: log_softmax and qwen2"),
    ("    if temperature != 1:\n", "    if False:\n", "logprobs: log_softmax and qwen2"),
    ("    if temperature != 1:\n", "    if temperature < 1:\n", "logprobs: log_softmax and qwen2"),
    ("weight.T, out_dtype=torch.float32)", "weight.T, out_dtype=hidden.dtype)", "logprobs: bit_product"),
    ("logits = hidden.to(head.weight.dtype) @ head.weight.T",
     "logits = (hidden @ head.weight.T.to(hidden.dtype)).to(head.weight.dtype)", "logprobs: chunks"),
    ("CHUNK // len(head.weight)", "10 ** 9", "logprobs: memory"),
    ("setattr(holder, name, 0.0)", "pass", "logprobs: ratio_is_one and qwen2"),  # dropout
    ("minibatches(rollout, args.minibatches,", "minibatches(rollout, 1,", "every_script: equal_before"),
    # batches, statistics, optimiser
    ("cuts[1:] + [len(lengths)]", "cuts[1:] + [len(lengths) - 1]", "batching: within_the_budget"),
    ("range(1, len(lengths)):", "range(1, len(lengths) - 1):", "batching: within_the_budget"),
    ("groups.tensor_split(count)", "groups.flatten().tensor_split(count)", "batching: keep_groups"),
    ('result[b["row"], :b', 'result[b["row"].sort()[0], :b', "batching: put_back"),
    ("sum(sums) /", "sums[-1] /", "batching: weighted"),
    ("if any(isinstance(value, tuple) == is_max for value in values):", "if False:", "batching: no_pair"),
    ("/ tokens,  # est", "/ mask.numel(),  # est", "batching: leave_padding_out"),
    ('1 - rollout["finished"]', 'rollout["finished"]', "batching: leave_padding_out"),
    ('f"{args.seed} {epoch}"', 'f"{args.seed}"', "batching: every_problem_once"),
    ("self.device, torch.float32)", "self.device)", "batching: learning_rate_of"),
    ("weight.grad_dtype = torch.float32", "pass", "batching: summed_in_float32"),
    ("        if finite:\n", "        if True:\n", "batching: non_finite"),
    ("betas=(0.9, 0.95)", "betas=(0.9, 0.999)", "batching: equals_adamw"),
    ("eps=eps, weight_decay", "eps=1e-8, weight_decay", "batching: equals_adamw"),
    ('self.adamw.load_state_dict(state["adamw"])', "pass", "batching: goes_on"),
    ('self.steps_taken = state["steps_taken"]', "pass", "batching: goes_on"),
    ("weight.grad /= self.loss_scale", "pass", "batching: small_gradients"),
    ("self.loss_scale /= 2", "pass", "batching: overflow"),
    ("(norm > self.args.max_grad_norm, 1)", "(norm > 1.0, 1)", "batching: equals_adamw"),
    ('"cpu" if args.offload_optimizer else model.device', "model.device", "cli: offload"),
    ("if args.gradient_checkpointing:", 'if args.gradient_checkpointing and hasattr(model, "lm_head"):',
     "cli: every_layer_twice and ppo"),
    ("returns.var() < 1e-8", "returns.var() <= 0", "ppo: equal_rewards"),
    # sampling
    ("(logits / temperature).softmax", "logits.softmax", "sampling: softmax_of_whole"),
    ("(logits / temperature).softmax", "(logits / min(temperature, 1)).softmax",
     "sampling: softmax_of_whole"),
    ("(logits / temperature).softmax", "logits.where(logits >= logits.topk(3)[0][:, -1:], -99).softmax",
     "sampling: softmax_of_whole"),
    ("self.active // self.group_size", "self.active % len(ids)", "sampling: softmax_of_whole"),
    ("        for layer in self.layers:\n            layer[:]",
     "        self.old = [*map(tuple, self.layers)]\n        for layer in self.layers:\n            layer[:]",
     "sampling: one_cache"),
    ("return head_logits(hidden[row, last], self.head)",
     "return head_logits(hidden[row, last], self.head).to(hidden.dtype).float()", "sampling: unrounded"),
    ("if len(keep) == 0:", "if len(keep) <= 5:", "sampling: large_rollout"),
    ("enumerate(completion, 1) if token", "enumerate(completion) if token", "sampling: first_stop"),  # no EOS
    ("[torch.ones_like(row) for row in rows]", "[(row > 1).long() for row in rows]", "sampling: first_stop"),
    ("completion[:ends[0]] if", "completion[:ends[-1]] if", "sampling: first_stop"),  # tokens after EOS
    ("{tokenizer.eos_token_id, *several}", "{*several}", "sampling: that_stop"),
    ("position_ids=positions", "position_ids=positions - positions[:, :1]", "sampling: greedy and gpt2"),
    ("query - window + 1 if", "query - window if", "sampling: greedy and mistral"),  # a window one too wide
    ("= new.transpose(1, 2)", "= new.transpose(1, 2) * 0.9", "sampling: greedy and llama"),  # the scale
    ("[cached[rows] for", "[cached[:len(rows)] for", "sampling: greedy and llama"),
    ("model.eval()  #", "model.train()  #", "sampling: greedy and llama"),
    ("model.eval()  #", "model.eval().bfloat16()  #", "sampling: leaves_the_model and llama"),
    ("self.position[self.active] +=", "self.position = ~~self.position; self.position[self.active] +=",
     "sampling: replayed"),
    ("self.running[self.active] &=", "self.running = ~~self.running; self.running[self.active] &=",
     "sampling: replayed"),
    ("if shape == self.shape:", "if self.shape and shape[0] == self.shape[0]:", "sampling: replayed"),
    ("if cuda_graphs and self.ids.is_cuda", "if self.ids.is_cuda", "cli: no_cuda_graphs and grpo"),
    (" if math.isfinite(value)}", "}", "cli: not_finite_is and grpo"),
    ("reward, n, args.temperature, args)", "reward, n, 1.0, args)", "sampling: counts_every_problem"),
    ("torch.manual_seed(args.seed)  #", "#", "sampling: same_numbers"),
    ("        part = problems[start:start + size]\n",
     "        part = problems[start:start + size]\n        torch.manual_seed(args.seed)\n",
     "sampling: no_two_batches"),
    # models, problems, rewards
    ('"toy" if policy.num_parameters() < 1_000_000 else "real"', '"toy"', "cli: never_gets and grpo"),
    ("torch.set_num_threads(1)", "pass", "cli: number_of_cores"),
    ("torch.nn.init.zeros_(model.score.weight)", "", "ppo: at_the_start and qwen2"),
    ("copy.deepcopy(body_of(policy))", "body_of(policy)", "ppo: at_the_start and qwen2"),
    ("1, device=weight.device)", "1, device=weight.device, dtype=weight.dtype)", "ppo: rounded and qwen2"),
    ("(longest - T, longest // 2, 3)", "(longest - T, longest - T, longest - T)", "sampling: short_prompt"),
    ("if copies * saved >", "if 0 * saved >", "cli: without_room"),
    ("1 if args.resume or args.save_every >= args.steps else 2", "2", "cli: small_disk"),
    ("positions - args.max_new_tokens)", "positions - args.max_new_tokens - 1)", "cli: leave_room"),
    ("random.Random(question)", "random.Random(str(row))", "data: lone_file"),
    ("random.Random(0).sample(held_out, count)", "held_out[:count]", "data: a_sample_of"),
    ('"main" if "main" in configs else None', "None", "data: configurations"),
    ("data_files=glob.escape(source)", "data_files=source", "data: brackets"),
    ('"".join(message["content"] + "\\n"', '"".join(message["content"].strip() + "\\n"',
     "data: keeps_its_blanks"),
    ("isinstance(value, (list, dict))", "isinstance(value, dict)", "data: another_list"),
    ("    if is_chat:\n", "    if False:\n", "data: may_be_a_chat"),
    ('if chat[-1]["content"].strip() not in text:', "if False:", "data: question_out"),
    ('not path.exists() and "/" not in source', "False", "data: without_an_ending"),
    ("needs_answer = reward is answer_reward", "needs_answer = True", "data: gold_answers_are_asked"),
    ("ids.count(tokenizer.unk_token_id) > len(ids) / 2", "False", "data: does_not_know"),
    ("if getattr(args, \"problems_hash\", now) != now:", "if False:", "resume: another_data_set"),
    ("[problem for problem in problems for _ in range(group_size)]", "problems * group_size",
     "data: beside_its"),
    ("if not math.isfinite(r):", "if False:", "data: gives_no_numbers"),
    ("if isinstance(rewards, dict):", "if False:", "data: gives_no_numbers"),
    ("len(prompt) > args.max_prompt_tokens", "len(prompt) >= args.max_prompt_tokens", "data: left_out"),
    ("add_special_tokens=False", "add_special_tokens=True", "data: templates_own"),
    ('problem["question"] + "\\n" + text)', "text)", "data: reward_models_scores"),
    # grading
    ('text.rpartition("####")[2].strip()', 'text.partition("####")[2].strip()', "math_reward: extract"),
    ('if signs.count("-") % 2 == 1:', "if False:", "math_reward: never_pays"),
    ("(?:illion|thousand|hundred|dozen|third|not)", "(?:illion|thousand|not)", "math_reward: never_pays"),
    ('"≥": r"\\ge"', '"≥": r"\\le"', "math_reward: never_pays"),
    ("|[$°]|", "|[$]|", "math_reward: pays_the_same"),
    ("(?=[0-9]{3}(?![0-9]))", "(?=[0-9]{3})", "math_reward: never_pays"),
    ("|\\b(?:and|or)\\b|", "|\\b(?:and)\\b|", "math_reward: pays_the_same"),
    ("in enumerate(readings)", "in enumerate(readings[::2])", "math_reward: pays_the_same"),
    ("(?<=\\\\[lg]e)q(?:slant)?", "(?<=\\\\le)q(?:slant)?", "math_reward: pays_the_same"),
    # runs and checkpoints
    ("sorted(int(name) for name in names if", "(int(name) for name in sorted(names) if", "resume: newest"),
    (', Path(args.out, ".unfinished")', ', Path(args.out, f"step-{step}")', "resume: kill_inside and ppo"),
    ('shutil.rmtree(Path(args.out, ".unf', 'dict(x=Path(args.out, ".unf', "resume: full_disk and optimizer"),
    ("        if old < step:", "        if old != step:", "resume: users"),
    ('glob("step-[1-9]*/")', 'glob("step-[1-9]*")', "resume: users"),
    ("except torch.OutOfMemoryError:\n        raise  # l", "except MemoryError:\n        raise  # l",
     "cli: runs_out"),
    ("        if others and not args.resume:", "        if False:", "cli: taken"),
    ("        lock.acquire(timeout=0)", "        pass", "resume: same_second or one_process"),
    ("process = os.getpid()", "process = 0", "resume: same_second"),
    ("        os.sync()", "        pass", "resume: on_the_disk"),
    ("        if damaged:\n", "        if False:\n", "resume: byte_changed"),
    ('            json.loads(line)["step"]', "            pass", "resume: damaged_metrics"),
    ("signal.signal(signal.SIGTERM, self.receive)", "signal.signal(signal.SIGTERM, signal.SIG_IGN)",
     "resume: its_status and ppo"),
    ('        unfinished = Path(args.out, "args.tmp")',
     '        Path(args.out, "args.json").write_text("{}")\n        unfinished = Path(args.out, "args.tmp")',
     "resume: newest"),
    ('shutil.copy(Path(args.out, f"step-{start}", "metrics.jsonl"), self.path)', "pass",
     "resume: damaged_or_lost"),
    ("    self.weights[name].data.copy_(master)", "    pass", "resume: bit_equal_to and grpo"),
    ('reference.load_state_dict(states["reference"])', "pass", "resume: bit_equal_to and grpo"),
    ("self.board.add_scalar(name, value, step)", "self.board.add_scalar(name, value, step - 1)",
     "cli: same_steps"),
    ('stats.get("skipped") or stats.get("value_skipped")', 'stats.get("skipped")', "cli: critics_step"),
    ("        torch.empty(0, device=args.device)\n", "        torch.device(args.device)\n",
     "cli: out_of_range_or"),
    ("if args.eval_split == args.split:", "if False:", "cli: contradict"),
    ('warn(f"--{name} does', 'str(f"--{name} does', "cli: contradict"),
], "tests/toy/make": [
    ('tokenizer, problems["train"])', 'tokenizer, problems["test"])', "toy: warm_up"),
    ("digit}={new}", "digit}={result}", "toy: warm_up"),
]}
# path, what stands there, what is planted, tests
CASES = [(f"{path}.py", sound, faulty, f"{tests} and {path}" if " " in paths else tests)
         for paths, faults in FAULTS.items() for sound, faulty, tests in faults for path in paths.split()]

def named():
    """All tests that the table names, as one case per test file, without a fault."""
    words = collections.defaultdict(dict)
    for _, _, _, tests in CASES:
        files, expression = tests.split(": ")
        for file in files.split():
            words[file][f"({expression})"] = None
    return [("common.py", "import torch\n", "import torch\n", f"{file}: {' or '.join(each)}")
            for file, each in words.items()]

SOUND = named()

def plant(path, sound, faulty, tests):
    """Run `tests` on a copy of the tree with the fault in it: pytest's exit status and its last words."""
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()) as said:
        tempfile.tempdir = folder  # what the tests leave behind goes with it
        ignore = shutil.ignore_patterns("__pycache__", "*.png", "questions", "real")
        shutil.copytree(ROOT / "tests", f"{folder}/tests", ignore=ignore)
        for script in [*ROOT.glob("*.py"), ROOT / "README.md"]:
            shutil.copy(script, folder)
        os.chdir(folder)
        source = Path(path).read_text(encoding="utf-8")
        if source.count(sound) != 1:
            return -1, f"the fault no longer fits the code: {sound!r} is in it {source.count(sound)} times"
        Path(path).write_text(source.replace(sound, faulty), encoding="utf-8")
        gc.freeze()  # else pytest's search for garbage goes through all of the libraries, which takes seconds
        signal.alarm(150)  # for a fault that makes a test hang
        names, words = tests.split(": ")
        options = ["-k", words, "-m", "upkeep or not upkeep", "-xq", "--assert=plain", "--tb=native"]
        status = pytest.main([f"tests/test_{name}.py" for name in names.split()] + options)
    return int(status), said.getvalue()[-2000:]

@pytest.fixture(scope="module")
def planted(request):
    """The results of the cases that were chosen, by the case, as soon as they are there."""
    chosen = [item.callspec.params["case"] for item in request.session.items
              if item.module is request.module and hasattr(item, "callspec")]
    os.environ["OMP_NUM_THREADS"] = "1"
    context = multiprocessing.get_context("forkserver")  # it has no threads of its own
    context.set_forkserver_preload(LIBRARIES)
    with context.Pool(2, maxtasksperchild=1) as pool:
        yield {case: pool.apply_async(plant, case) for case in chosen}

def outcome(case, planted):
    """The exit status of pytest for a case, 0 for green and 1 for red, and its last words."""
    status, said = planted[case].get(timeout=200)
    return status, f"pytest's exit status is {status} after {case}\n{said}"

@pytest.mark.parametrize("case", SOUND, ids=[tests.split(":")[0] for _, _, _, tests in SOUND])
def test_every_test_that_is_named_is_green_without_a_fault(case, planted):
    """Else it would be red for another reason."""
    status, said = outcome(case, planted)
    assert status == 0, said

@pytest.mark.parametrize("case", CASES, ids=[f"{path}:{faulty}" for path, _, faulty, _ in CASES])
def test_a_planted_fault_turns_a_test_red(case, planted):
    status, said = outcome(case, planted)
    assert status == 1, said

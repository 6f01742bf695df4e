"""Faults planted in a copy of the code, one for each equation and each trap: the tests named must see them.

A fault is planted in a fork of a process that has the libraries loaded, two at a time: a second or two each.
"""
import contextlib
import gc
import io
import multiprocessing
import os
import shlex
import shutil
import signal
from pathlib import Path

import pytest

pytestmark = pytest.mark.upkeep
ROOT = Path(__file__).resolve().parent.parent
LIBRARIES = ["pytest", "datasets", "torch._dynamo", "transformers.generation", "tensorboard",
             *(f"transformers.models.{name}.modeling_{name}" for name in ("qwen2", "qwen3", "llama", "gpt2"))]
SOUND = "equations ppo logprobs batching sampling data toy cli resume -k 'z_scores or lands_on or memory_is "
SOUND += "or keep_groups or first_stop or lone_file or warm_up or out_defaults or bit_equal_to and gspo'"
FAULTS = [  # files ({} among the tests is theirs), text that stands there once, what is planted, tests
    ("common", "def generate(", "def generate(", SOUND),  # no fault: the copy is whole and all is green
    # (1) advantages
    ("grpo gspo", "r - r.mean(1, keepdim=True)", "r - r.mean()", "equations -k 'z_scores and {}'"),
    ("grpo gspo", "view(-1, group_size)  ", "view(group_size, -1).T  ", "equations -k 'z_scores and {}'"),
    ("grpo gspo", "r.std(1, keepdim=True)", "r.std(1, keepdim=True, correction=0)", "equations -k 'z_scores and {}'"),
    ("grpo gspo", "adv.masked_fill(equal, 0.0)", "adv", "equations -k 'exactly_zero and {}'"),
    ("ppo", "gamma * next_value - values", "next_value - values", "equations -k gae"),
    ("ppo", "gamma * lam * running", "gamma * running", "equations -k gae"),
    ("ppo", "values = values * mask", "values = values", "equations -k gae"),  # V behind the end
    ("ppo", "running) * mask[:, t]", "running)", "ppo -k double_sum"),  # sums over padding
    ("ppo", "return advantages, advantages + values", "return advantages, advantages", "equations -k gae"),
    ("ppo", "mean = (x * mask).sum() / mask.sum()", "mean = x.mean()", "ppo -k whitening"),
    ("ppo", "** 2 * mask).sum() / mask.sum()", "** 2 * mask).mean()", "ppo -k whitening"),
    # (2) ratio
    ("ppo grpo gspo", "(logp - old_logp) * mask", "(old_logp - logp) * mask", "equations -k 'clip_table and {}'"),
    ("ppo grpo", "log_ratio.clamp(max=20).exp()  #", "log_ratio.exp()  #", "every_script -k 'two_hundred and {}'"),
    ("gspo", "log_ratio.sum(1, keepdim=True) / lengths", "log_ratio.sum(1, keepdim=True)", "equations -k test_2"),
    ("gspo", "= ratio.detach() *", "= ratio *", "equations -k gspo_token"),
    ("gspo", 'eps_low", type=float, default=3e-4', 'eps_low", type=float, default=0.2', "gspo -k papers_range"),
    ("gspo", "torch.where(signs * adv[:, None] < 0, 0.0", "torch.where(signs != 0, 0.0", "gspo -k neither_punishes"),
    # (3) clip and means
    ("ppo grpo gspo", "torch.min(ratio * adv, clipped * adv)", "torch.max(ratio * adv, clipped * adv)",
        "equations -k 'clip_table and {}'"),
    ("ppo grpo gspo", "torch.min(ratio * adv, clipped * adv)", "adv * torch.min(ratio, clipped)",
        "equations -k 'clip_table and {}'"),
    ("ppo grpo gspo", "clamp(1 - args.eps_low, 1 + args.eps_high)", "clamp(1 - args.eps_high, 1 + args.eps_low)",
        "equations -k 'can_gain and {}'"),
    ("ppo grpo gspo", "(objective * mask / lengths).sum()", "(objective * mask / lengths.mean()).sum()",
        "equations -k 'row_means and {}'"),
    ("ppo grpo gspo", "lengths).sum()\n    is_clipped", "lengths).sum(1).mean()\n    is_clipped",
        "equations -k 'sum_over_rows and {}'"),
    ("ppo grpo gspo", ".clamp(min=1)                       # (N, 1) |o_i|\n    log", "\n    log",
        "every_script -k 'row_without and {}'"),
    ("ppo grpo gspo", "(loss / rows).backward()", '(loss / len(b["ids"])).backward()',
        "every_script -k 'any_cut and {}'"),
    ("ppo grpo gspo", 'rows = len(minibatch["ids"])', 'rows = len(rollout["ids"])',
        "every_script -k 'its_own_rows and {}'"),
    ("ppo grpo gspo", 'policy_loss(logp, b["old_logp"]', "policy_loss(logp, logp.detach()",
        "every_script -k 'every_pass and {}'"),
    # (4) KL
    ("grpo", "log_x.exp() - log_x - 1", "(-log_x).exp() + log_x - 1", "equations -k grpo_k3"),
    ("grpo", "log_x.exp() - log_x - 1", "-log_x", "equations -k grpo_k3"),  # k1: no gradient on average
    ("grpo", "log_x.exp() - log_x - 1", "log_x.mean(1, keepdim=True).exp() - log_x - 1", "grpo -k own_kl"),
    ("grpo", "objective - args.beta * kl", "objective + args.beta * kl", "grpo -k moving_away"),
    ("grpo", "kl = kl * ratio", "kl = kl", "equations -k forward_kl"),
    ("gspo", "kl * log_ratio.clamp(max=20).exp()", "kl * ratio", "gspo -k float_loop"),
    ("ppo", "rewards = -beta * (old_logp", "rewards = beta * (old_logp", "equations -k reverse_kl"),
    ("ppo", "-beta * (old_logp - ref_logp)", "-beta * ((ref_logp - old_logp).exp() + old_logp - ref_logp - 1)",
        "equations -k reverse_kl"),  # k3 as a reward
    ("ppo", "mask.sum(1).long() - 1  ", "mask.sum(1).long().clamp(max=mask.shape[1] - 1)", "ppo -k lands_on"),
    # (5) the critic
    ("ppo", "torch.max((values - returns)", "torch.min((values - returns)", "equations -k value_loss"),
    ("ppo", "old_values + (values - old_values).clamp", "values.clamp", "equations -k value_loss"),
    ("ppo", "(args.vf_coef * error / rows)", "(error / rows)", "ppo -k gradients_of_an_update"),
    ("ppo", "args.value_lr, args, eps=1e-5", "args.lr, args, eps=1e-5", "ppo -k learning_rate"),
    ("common", "torch.nn.init.zeros_(model.score.weight) ", "", "ppo -k 'at_the_start and qwen2'"),
    ("common", "copy.deepcopy(policy.base_model)", "policy.base_model", "ppo -k 'at_the_start and qwen2'"),
    ("common", "device=weight.device)  #", "device=weight.device, dtype=weight.dtype)  #", "ppo -k 'rounded and qwen2'"),
    # collect and main
    ("ppo grpo gspo", "args.temperature, args.cuda_graphs)", "1.0, args.cuda_graphs)",
        "every_script -k 'temperature_is and {}'"),
    ("ppo grpo gspo", "(policy, b, args.temperature)", "(policy, b, 1.0)", "every_script -k 'equal_before and {}'"),
    ("ppo grpo gspo", "@torch.no_grad()\ndef collect", "def collect", "every_script -k 'carries_no and {}'"),
    ("grpo", "copy.deepcopy(policy).eval().requires_grad_(False)", "policy", "cli -k 'holds_no_reference and grpo'"),
    ("grpo", "(step - 1) % args.ref_every", "step % args.ref_every", "cli -k 'ref_every_m and grpo'"),
    ("gspo", "load_state_dict(policy.state_dict())", "load_state_dict(policy.state_dict(), assign=True)",
        "cli -k 'ref_every_m and gspo'"),
    # log-probs
    ("common", "hidden[row, position - 1]", "hidden[row, position]", "logprobs -k 'log_softmax and qwen2'"),
    ("common", "else logits.div_(temperature)", "else logits", "logprobs -k 'log_softmax and qwen2'"),
    ("common", "grad = grad / ctx.temperature", "grad = grad / 1", "logprobs -k 'log_softmax and qwen2'"),
    ("common", "hidden.float() @ weight.float().T", "(hidden @ weight.T).float()", "logprobs -k chunks"),
    ("common", "else 256  #", "else 10**9  #", "logprobs -k memory"),
    ("common", "setattr(module, name, 0.0)", "pass", "logprobs -k 'ratio_is_one and qwen2'"),
    ("common", "minibatches(rollout, args.minibatches, args.group_size)", "minibatches(rollout, 1, 1)",
        "every_script -k 'equal_before and gspo'"),
    # batches, statistics
    ("common", "while begin < len(lengths):", "while begin < len(lengths) - 1:", "batching -k within_the_budget"),
    ("common", "        begin = end", "        begin = max(begin + 1, end - 1)", "batching -k within_the_budget"),
    ("common", "groups.tensor_split(count)", "groups.flatten().tensor_split(count)", "batching -k keep_groups"),
    ("common", 'result[b["row"], :b', 'result[b["row"].sort()[0], :b', "batching -k put_back"),
    ("common", "self.kept[name].append(value)", "self.kept[name] = [value]", "batching -k weighted"),
    ("common", '/ mask.sum(),  # its', '/ mask.numel(),  # its', "batching -k leave_padding_out"),
    ("common", 'f"{args.seed} {passes}"', 'f"{args.seed}"', "batching -k every_problem_once"),
    # optimiser
    ("common", "self.device, torch.float32)", "self.device)", "batching -k learning_rate_of"),
    ("common", "weight.grad_dtype = torch.float32", "pass", "batching -k summed_in_float32"),
    ("common", "        if finite:", "        if True:", "batching -k non_finite"),
    ("common", "for tensor in (*weights, *masters):", "for tensor in masters:", "batching -k non_finite"),
    ("common", "(0.9, 0.95), eps", "(0.9, 0.999), eps", "batching -k equals_adamw"),
    ("common", "eps, 0.0, fused", "1e-8, 0.0, fused", "batching -k equals_adamw"),
    ("ppo", "args.lr, args, eps=1e-5", "args.lr, args", "ppo -k epsilon"),
    ("common", 'self.adamw.load_state_dict(state["adamw"])', "pass", "batching -k goes_on"),
    ("common", 'self.taken = state["taken"]', "pass", "batching -k goes_on"),
    # sampling
    ("common", "= logits / self", "= logits.where(logits > logits.topk(3)[0][:, -1:], -1e9) / self",
        "sampling -k 'samples_come and qwen2'"),  # top_k
    ("common", "lengths[:, None]).float()", "(lengths - (~self.running).long())[:, None]).float()",
        "sampling -k first_stop_token"),  # no loss on EOS
    ("common", "(column < ends[:, None]).long()", "(self.ids[:, :len(column)] > 1).long()",
        "sampling -k first_stop_token"),  # ids taken for padding
    ("common", "+= running.long()", "+= 1", "sampling -k first_stop_token"),  # tokens after EOS
    ("common", "{int(i) for i in [*listed, tokenizer.eos_token_id]", "{int(i) for i in listed", "sampling -k that_stop"),
    ("common", "position_ids=positions", "position_ids=positions - positions[:, :1]", "sampling -k 'greedy and gpt2'"),
    ("common", "behind >= (", "behind > (", "sampling -k 'greedy and mistral'"),
    ("common", "= new.transpose(1, 2)", "= new.transpose(1, 2) * 0.9", "sampling -k 'greedy and llama'"),  # scale
    ("common", "= cached[going]", "= cached[:len(going)]", "sampling -k 'greedy and llama'"),
    ("common", "model.eval()  #", "model.train()  #", "sampling -k 'greedy and llama'"),
    ("common", "model.eval()  #", "model.eval().bfloat16()  #", "sampling -k 'leaves_the_model and llama'"),
    ("common", "self.position[self.kept] += running.long()",
        "self.position = self.position.index_add(0, self.kept, running.long())", "sampling -m upkeep -k replayed"),
    ("common", "self.running[self.kept] = running & (token[:, None] != self.stop).all(1)",
        "self.running = self.running.index_put((self.kept,), running & (token[:, None] != self.stop).all(1))",
        "sampling -m upkeep -k replayed"),
    ("common", "rows.width_step\n            step = None", "rows.width_step", "sampling -m upkeep -k replayed"),
    ("common", "(rewards >= 1)", "(rewards > 0)", "sampling -k counts_every_problem"),
    ("common", "torch.manual_seed(args.seed)  #", "#", "sampling -k same_numbers"),
    # problems, models, rewards
    ("common", "random.Random(str(row.get(args.question_column)))", "random.Random(str(row))", "data -k lone_file"),
    ("common", "problem for problem in problems for _ in range(len(texts) // len(problems))",
        "problem for _ in range(len(texts) // len(problems)) for problem in problems", "data -k beside_its"),
    ("common", "if not math.isfinite(value):", "if False:", "data -k 'no_numbers and grpo'"),
    ("common", "<= args.max_prompt_tokens and (", "< args.max_prompt_tokens and (", "data -k left_out"),
    ("common", "add_special_tokens=False", "add_special_tokens=True", "data -k templates_own"),
    ("common", '"toy" if size < 1_000_000 else "real"', '"toy"', "cli -k 'never_gets and grpo'"),
    ("common", 'text.rpartition("####")[2].strip()', 'text.partition("####")[2].strip()', "math_reward -k extract"),
    ("common", 'if signs.count("-") % 2 else value', "if False else value", "math_reward -k never_pays"),
    ("tests/toy/make.py", "as_batch(draw(problems, rng)", 'as_batch(draw(make_problems()["test"], rng)', "toy -k warm_up"),
    ("tests/toy/train.jsonl", '"6-0=6\\n6+1=7\\n#### 7"', '"6-0=6\\n6+1=7\\n#### 8"', "toy -k every_step"),
    # runs and checkpoints
    ("common", "self.args.seed * 1_000_003 + step", "step", "cli -k 'seed_reaches and grpo'"),
    ("common", "sorted(found, key=lambda path: int(path.name[5:]))", "sorted(found)", "resume -k newest"),
    ("common", 'Path(args.out, "unfinished")', 'Path(args.out, f"step-{step}")', "resume -k 'kill_inside and ppo'"),
    ("common", "if int(old.name[5:]) < step:", "if int(old.name[5:]) != step:", "resume -k users"),
    ("common", "and p.is_dir()", "", "resume -k users"),
    ("common", 'path.with_suffix(".tmp").write_text(text)', 'path.write_text(text)', "resume -k newest"),
    ("common", "range(self.start + 1, self", "range(max(1, self.start), self", "resume -k 'bit_equal_to and grpo'"),
    ("common", 'models["reference"].load_state_dict(states["reference"])', "pass", "resume -k 'bit_equal_to and grpo'"),
]


CASES = [(path if "." in path else f"{path}.py", sound, faulty, tests.format(path))
         for paths, sound, faulty, tests in FAULTS for path in paths.split()]


def plant(folder, path, sound, faulty, tests):
    """Run `tests` on a copy of the tree with the fault in it: pytest's exit status and its last words."""
    shutil.copytree(ROOT / "tests", folder / "tests", ignore=shutil.ignore_patterns("__pycache__"))
    for script in ROOT.glob("*.py"):
        shutil.copy(script, folder)
    source = (folder / path).read_text()
    if source.count(sound) != 1:
        return -1, f"the fault no longer fits the code: {sound!r} stands in {path} {source.count(sound)} times"
    (folder / path).write_text(source.replace(sound, faulty))
    os.chdir(folder)
    gc.freeze()  # else pytest's search for garbage goes through all of the libraries, which takes seconds
    signal.alarm(100)  # a fault that makes a test hang
    words = [f"tests/test_{w}.py" if Path(f"tests/test_{w}.py").exists() else w for w in shlex.split(tests)]
    with contextlib.redirect_stdout(io.StringIO()) as said:
        status = pytest.main([*words, "-xq", "--assert=plain", "--tb=native", "-p", "no:cacheprovider"])
    return int(status), said.getvalue()[-2000:]


@pytest.fixture(scope="module")
def planted(request, tmp_path_factory):
    """The results of the cases that were chosen, by their place in the table, as soon as they are there."""
    chosen = [item.callspec.params["case"] for item in request.session.items if item.module is request.module]
    os.environ["OMP_NUM_THREADS"] = "1"
    context = multiprocessing.get_context("forkserver")  # it has no threads of its own
    context.set_forkserver_preload(LIBRARIES)
    with context.Pool(2, maxtasksperchild=1) as pool:
        yield {case: pool.apply_async(plant, (tmp_path_factory.mktemp("fault"), *CASES[case])) for case in chosen}


@pytest.mark.parametrize("case", range(len(CASES)), ids=[f"{path}:{faulty}" for path, _, faulty, _ in CASES])
def test_a_planted_fault_turns_a_test_red(case, planted):
    status, said = planted[case].get(timeout=120)
    _, sound, faulty, _ = CASES[case]
    assert status == (sound != faulty), f"pytest's exit status is {status} after {CASES[case]}\n{said}"

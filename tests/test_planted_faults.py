"""Mistakes planted in a copy of the code: the tests must see each of them."""
import concurrent.futures
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FAULTS = [  # file, what stands there, what is planted, the tests that must turn red
    ("grpo.py", "torch.min(ratio * adv, clipped * adv)", "torch.max(ratio * adv, clipped * adv)", "test_grpo.py"),
    ("grpo.py", "kl = log_ref.exp() - log_ref - 1", "kl = (-log_ref).exp() + log_ref - 1", "test_grpo.py"),
    ("grpo.py", "(objective * mask / lengths).sum()", "(objective * mask / lengths.mean()).sum()", "test_grpo.py"),
    ("grpo.py", "return adv.masked_fill(equal, 0.0)", "return adv", "test_grpo.py"),
    ("gspo.py", "log_ratio.sum(1, keepdim=True) / lengths", "log_ratio.sum(1, keepdim=True)", "test_gspo.py"),
    ("gspo.py", "ratio.detach() * (logp - logp.detach()).exp()", "ratio * (logp - logp.detach()).exp()", "test_gspo.py"),
    ("ppo.py", "last = mask.sum(1).long() - 1", "last = torch.full_like(mask[:, 0], mask.shape[1] - 1).long()", "test_ppo.py"),
    ("ppo.py", "torch.max((values - returns) ** 2,", "torch.min((values - returns) ** 2,", "test_ppo.py"),
    ("common.py", "hidden[row, position - 1], batch", "hidden[row, position], batch", "test_logprobs.py"),
    ("common.py", "before = stopped.cumsum(-1) - stopped.long() == 0", "before = stopped.cumsum(-1) == 0", "test_sampling.py"),
    ("common.py", "self.position += 1", "self.position = self.position + 1", "test_sampling.py -k replayed"),  # not in place
    ("common.py", "near = full.masked_fill(ago >= window,", "near = full.masked_fill(ago > window,", "test_sampling.py -k window"),
    ("common.py", "kept[:len(rows)] = kept[rows]", "kept[:len(rows)] = kept[:len(rows)]", "test_sampling.py"),
    ("common.py", "in minibatches(rollout, args.minibatches,", "in minibatches(rollout, 1,", "test_gspo.py"),
    ("common.py", "self.away else w.device, torch.float32)", "self.away else w.device)", "test_batching.py"),
    ("common.py", "torch.manual_seed(self.args.seed * 1_000_003 + step)", "pass", "test_cli.py -k bit_equal"),
]


def plant(folder, file, sound, faulty, tests):
    """The tests' run on a copy of the code with the fault in it."""
    shutil.copytree(ROOT / "tests", folder / "tests", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("ppo.py", "grpo.py", "gspo.py", "common.py"):
        shutil.copy(ROOT / name, folder)
    source = (folder / file).read_text()
    assert source.count(sound) == 1, "the fault no longer fits the code"
    (folder / file).write_text(source.replace(sound, faulty))
    return subprocess.run([sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *f"tests/{tests}".split()],
                          cwd=folder, capture_output=True, text=True)


@pytest.mark.upkeep
def test_planted_faults_turn_tests_red(tmp_path_factory):
    """Two at a time, as most of each is imports."""
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        runs = [pool.submit(plant, tmp_path_factory.mktemp("fault"), *fault) for fault in FAULTS]
    missed = {fault[2]: run.result().stdout[-500:] for fault, run in zip(FAULTS, runs) if run.result().returncode != 1}
    assert not missed, missed

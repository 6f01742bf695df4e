"""Make again every run of this folder, its pictures and its tables: about an hour on two cores.

    pip install matplotlib
    python tests/results/run_all.py --work runs/results --jobs 2

Each run is a process in --work; what is there already is not made again, so that a stopped program goes on.
At the end the rows go into this folder, the pictures are drawn, and the numbers of the tables are printed: of
tests/results/README.md all, of README.md that of five seeds, REINFORCE and PPO without a critic. Runs of the
forks and without the deviation are made in a copy of the repository, --work/tree.
"""
import argparse
import concurrent.futures
import json
import shutil
import statistics
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
FORKS = "rloo dr_grpo cispo sapo gmpo dapo tpo reinforce_pp entropy format_reward".split()
REINFORCE = "--vf_coef 0 --lam 1 --no-whiten --beta 0 --epochs 1 --minibatches 1"
DEFAULTS = ["grpo", "gspo", "ppo"]  # seeds 0 to 4
QUESTIONS = {  # folder: {name: script and flags}, seeds 0 to 2; a script alone is the run of DEFAULTS
    "one-pass-or-four": {"1-pass": "grpo", "4-passes": "grpo --epochs 4"},
    "how-large-a-group": {
        "2-completions": "grpo --group_size 2 --prompts 128",
        "4-completions": "grpo --group_size 4 --prompts 64",
        "8-completions": "grpo",
        "16-completions": "grpo --group_size 16 --prompts 16",
        "32-completions": "grpo --group_size 32 --prompts 8"},
    "divide-by-the-deviation": {"with": "grpo", "without": "without", "dr_grpo": "dr_grpo"},
    "which-KL": {"k3": "grpo", "w-k3": "grpo --kl wk3", "none": "grpo --beta 0"},
    "which-lambda": {"0": "ppo --lam 0", "0.95": "ppo", "1": "ppo --lam 1",
                     "1,-no-critic": "ppo --lam 1 --vf_coef 0"},
    "a-ratio-of-what": {"tokens": "grpo", "sequences": "gspo",
                        "tokens,-experts": "grpo --model MOE", "sequences,-experts": "gspo --model MOE"}}
OTHERS = {"REINFORCE": f"ppo {REINFORCE}", **{fork: fork for fork in FORKS}, "torchrun": "torchrun",
          "entropy": "entropy --entropy_coef 0.01"}  # seed 0
DEVIATION = " / (r.std(1, keepdim=True) + 1e-4)"

def directory(work, command, seed):
    """Where a run lies: the same for all that ask for it."""
    return work / "runs" / (command.replace("--", "").replace(" ", "_").replace("/", "_") + f"-seed{seed}")

def make_tree(tree):
    """A copy of the repository with a script per fork, and grpo.py without the deviation as without.py."""
    shutil.rmtree(tree, ignore_errors=True)
    tree.mkdir(parents=True)
    shutil.copytree(ROOT / "tests", tree / "tests", ignore=shutil.ignore_patterns("__pycache__"))
    for path in ROOT.glob("*.py"):
        shutil.copy(path, tree)
    source = (ROOT / "grpo.py").read_text(encoding="utf-8")
    assert source.count(DEVIATION) == 1
    (tree / "without.py").write_text(source.replace(DEVIATION, ""), encoding="utf-8")
    for fork in FORKS:
        patch = tree / "tests" / "forks" / f"{fork}.patch"
        subprocess.run(["patch", "-s", "-o", f"{fork}.py", "grpo.py", patch], cwd=tree, check=True)
    shutil.copytree(tree, tree / "torchrun")
    patch = tree / "tests" / "forks" / "torchrun.patch"
    subprocess.run(["patch", "-s", "-p1", "-i", patch], cwd=tree / "torchrun", check=True)

def run(work, command, seed):
    """Make one run, unless it is there."""
    out = directory(work, command, seed)
    if (out / "metrics.jsonl").exists() and len(read(out)) == 21:
        return
    shutil.rmtree(out, ignore_errors=True)
    script, *flags = command.replace("MOE", str(work / "moe")).split()
    where, start = work / "tree", [sys.executable]
    if script == "torchrun":
        where, script = where / "torchrun", "grpo"
        start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    flags += ["--eval_every", "2", "--save_every", "20", "--seed", str(seed), "--out", str(out)]
    done = subprocess.run([*start, f"{script}.py", *flags], cwd=where, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{command}, seed {seed}:\n{done.stdout}\n{done.stderr}")
    print(f"{command}, seed {seed}: done", flush=True)

def read(out):
    """The rows of a run's metrics."""
    lines = (out / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]

def store(out, path, keys=None):
    """Copy a run's rows, rounded to five digits; of `keys` alone, if given."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = ""
    for row in read(out):
        row = {name: float(f"{value:.5g}") if isinstance(value, float) else value
               for name, value in row.items() if keys is None or name in keys}
        if keys is None or len(row) > 1:
            text += json.dumps(row) + "\n"
    path.write_text(text, encoding="utf-8")

def spread(values, digits=3):
    """'.978 ± .003' of several, '.978' of one."""
    texts = [f"{statistics.mean(values):.{digits}f}"]
    if len(values) > 1:
        texts.append(f"{statistics.stdev(values):.{digits}f}")
    return " ± ".join(text[1:] if text.startswith("0.") else text for text in texts)

def line(name, runs):
    """A row of a table: all numbers that any of the tables has."""
    def last(key):
        return [rows[-1].get(key, 0) for rows in runs]

    def of_steps(key):
        return [[row.get(key, 0) for row in rows[1:]] for rows in runs]
    cells = [name, spread(last("eval_sampled_accuracy")), spread(last("eval_accuracy")),
             spread(last("eval_completion_length"), 1),
             f"{statistics.mean(statistics.mean(run) for run in of_steps('clip_frac')):.2g}",
             spread([max(run) for run in of_steps("ratio_max")], 2), spread(last("kl")),
             spread([statistics.mean(run[1:4]) for run in of_steps("explained_variance")], 2)]
    print("| " + " | ".join(cells) + " |")

def main():
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    parser.add_argument("--work", type=Path, default=ROOT / "runs" / "results", help="directory of the runs")
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time")
    args = parser.parse_args()
    work = args.work.resolve()
    make_tree(work / "tree")
    program = [sys.executable, HERE / "moe.py", "--out", work / "moe"]
    moe = subprocess.run(program, capture_output=True, text=True)
    wanted = {(script, seed) for script in DEFAULTS for seed in range(5)}
    for names in QUESTIONS.values():
        wanted |= {(command, seed) for command in names.values() for seed in range(3)}
    wanted |= {(command, 0) for command in OTHERS.values()}
    with concurrent.futures.ThreadPoolExecutor(args.jobs) as pool:
        list(pool.map(lambda each: run(work, *each), sorted(wanted)))

    for old in (*HERE.glob("*-seed*.jsonl"), *HERE.glob("questions/*/*.jsonl")):
        old.unlink()
    for script in DEFAULTS:
        for seed in range(5):
            store(directory(work, script, seed), HERE / f"{script}-seed{seed}.jsonl")
    for folder, names in QUESTIONS.items():
        for name, command in names.items():
            for seed in range(3):
                path = HERE / "questions" / folder / f"{name}-seed{seed}.jsonl"
                store(directory(work, command, seed), path, {"step", "eval_sampled_accuracy"})
    plot = [sys.executable, ROOT / "tests" / "plot.py"]
    subprocess.run([*plot, *sorted(HERE.glob("*.jsonl")), "--out", HERE / "toy.png"], check=True)
    subprocess.run([*plot, *sorted(HERE.glob("questions/*/*.jsonl")), "--of", "eval_sampled_accuracy",
                    "--scale", "logit", "--out", HERE / "questions.png"], check=True)
    subprocess.run([sys.executable, HERE / "pushes.py", HERE / "pushes.png"], check=True)

    print("\n| run | sampled | greedy | length | clipped | largest ratio | last KL | explained, 2 to 4 |")
    print("|---|---|---|---|---|---|---|---|")
    for script in DEFAULTS:
        runs = [read(directory(work, script, seed)) for seed in range(5)]
        line(f"{script}.py", runs)
    print("before: sampled", spread([rows[0]["eval_sampled_accuracy"] for rows in runs]),
          "greedy", spread([rows[0]["eval_accuracy"] for rows in runs]),
          "length", spread([rows[0]["eval_completion_length"] for rows in runs], 1))
    for folder, names in QUESTIONS.items():
        for name, command in names.items():
            line(f"{folder}: {name}", [read(directory(work, command, seed)) for seed in range(3)])
    for name, command in OTHERS.items():
        line(name, [read(directory(work, command, 0))])
    print(f"\n{moe.stdout}{moe.stderr}")

if __name__ == "__main__":
    main()

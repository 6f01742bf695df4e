"""Make the runs of the toy again, their pictures and their tables: about an hour on two cores.

    pip install matplotlib
    python tests/results/toy/run_all.py --work runs/results --jobs 2

Each run is a process in --work; what is there already is not made again, so that a stopped program goes on.
At the end the rows go into this folder, the pictures are drawn, and numbers of the tables are printed:
those of README.md with five seeds, of tests/forks/README.md but for spo, tis and lora, and of
tests/results/README.md but for the KL estimates, rounding and the price of thinking. Forks and the runs
without the deviation are made in a copy of the repository, --work/tree.
"""
import argparse
import concurrent.futures
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pandas

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
sys.path.insert(0, str(ROOT / "tests" / "tools"))
import plot  # noqa: E402

FORKS = "rloo dr_grpo cispo sapo gmpo dapo tpo reinforce_pp entropy format_reward".split()
TOY_SETTINGS = (  # a run with --model has others
    "--dataset tests/toy --lr 5e-4 --system_prompt= --max_prompt_tokens 64 --max_new_tokens 48 "
    "--no-gradient_checkpointing --steps 20 --eval_problems 2560")
REINFORCE = "--vf_coef 0 --lam 1 --no-whiten --beta 0 --epochs 1 --minibatches 1"
DEFAULTS = {"grpo": "grpo", "gspo": "gspo", "ppo": "ppo"}  # seeds 0 to 4
QUESTIONS = {  # file: {name: script and flags}, seeds 0 to 2; a script alone is the run of DEFAULTS
    "passes": {"1 pass": "grpo", "4 passes": "grpo --epochs 4"},
    "group_size": {
        "2 completions": "grpo --group_size 2 --prompts 128",
        "4 completions": "grpo --group_size 4 --prompts 64",
        "8 completions": "grpo",
        "16 completions": "grpo --group_size 16 --prompts 16",
        "32 completions": "grpo --group_size 32 --prompts 8"},
    "deviation": {"with": "grpo", "without": "without", "dr_grpo": "dr_grpo"},
    "kl": {"k3": "grpo", "w k3": "grpo --kl wk3", "none": "grpo --beta 0"},
    "lambda": {"0": "ppo --lam 0", "0.95": "ppo", "1": "ppo --lam 1",
               "1 without critic": "ppo --lam 1 --vf_coef 0"},
    "ratio": {"tokens": "grpo", "sequences": "gspo",
              "tokens with experts": "grpo --model MOE", "sequences with experts": "gspo --model MOE"}}
OTHERS = {"REINFORCE": f"ppo {REINFORCE}", **{fork: fork for fork in FORKS},
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

def run(work, command, seed):
    """Make one run, unless it is there. Each takes one thread, as the toy's do."""
    out = directory(work, command, seed)
    if (out / "metrics.jsonl").exists() and len(plot.read(out)) == 21:
        return
    shutil.rmtree(out, ignore_errors=True)
    script, *flags = command.replace("--model MOE", f"--model {work}/moe {TOY_SETTINGS}").split()
    flags += ["--eval_every", "2", "--save_every", "20", "--seed", str(seed), "--out", str(out)]
    done = subprocess.run([sys.executable, f"{script}.py", *flags], cwd=work / "tree", capture_output=True,
                          text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    if done.returncode:
        sys.exit(f"{command}, seed {seed}:\n{done.stdout}\n{done.stderr}")
    print(f"{command}, seed {seed}: done", flush=True)

def read(work, names, seeds):
    """The runs of {name: command} as one table."""
    return pandas.concat([plot.read(directory(work, command, seed)).assign(run=name, seed=seed)
                          for name, command in names.items() for seed in range(seeds)])

def write(path, table):
    """Write a table, rounded to five digits: run, seed and step, what training logs, what evaluation logs."""
    first = ["run", "seed", "step"]
    rest = sorted(table.columns.drop(first), key=lambda name: name.startswith("eval_"))
    table[first + rest].to_csv(path, index=False, float_format="%.5g")

def spread(values, digits=3):
    """'.978 ± .003' of several, '.978' of one."""
    texts = [f"{values.mean():.{digits}f}"]
    if len(values) > 1:
        texts.append(f"{values.std():.{digits}f}")
    return " ± ".join(text.removeprefix("0") for text in texts)

def show(title, table):
    """Print a row for each name: all numbers that any of the tables has."""
    for name, runs in table.groupby("run", sort=False):
        runs = runs.dropna(axis=1, how="all")  # without the columns of others
        last, first = runs[runs["step"] == 20], runs[runs["step"].between(2, 4)]
        cells = [title + name, spread(last["eval_sampled_accuracy"]), spread(last["eval_accuracy"]),
                 spread(last["eval_completion_length"], 1)]
        cells.append(f"{runs['clip_frac'].mean():.2g}" if "clip_frac" in runs else "")
        cells.append(spread(runs.groupby("seed")["ratio_max"].max(), 2))
        cells.append(spread(last["kl"]) if "kl" in runs else "")
        of_critic = "explained_variance" in runs
        cells.append(spread(first.groupby("seed")["explained_variance"].mean(), 2) if of_critic else "")
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
    wanted = {(command, seed) for command in DEFAULTS.values() for seed in range(5)}
    for names in QUESTIONS.values():
        wanted |= {(command, seed) for command in names.values() for seed in range(3)}
    wanted |= {(command, 0) for command in OTHERS.values()}
    with concurrent.futures.ThreadPoolExecutor(args.jobs) as pool:
        list(pool.map(lambda each: run(work, *each), sorted(wanted)))

    toy = read(work, DEFAULTS, 5).drop(columns="seconds")  # of runs beside others
    write(HERE / "toy.csv", toy)
    questions = {name: read(work, names, 3) for name, names in QUESTIONS.items()}
    for name, table in questions.items():
        table = table[["run", "seed", "step", "eval_sampled_accuracy"]].dropna()
        write(HERE.parent / "questions" / f"{name}.csv", table)
    draw = [sys.executable, ROOT / "tests" / "tools" / "plot.py"]
    subprocess.run([*draw, HERE / "toy.csv", "--out", HERE / "toy.png"], check=True)
    subprocess.run([*draw, *(HERE.parent / "questions" / f"{name}.csv" for name in QUESTIONS),
                    "--of", "eval_sampled_accuracy", "--logit",
                    "--out", HERE.parent / "questions" / "questions.png"], check=True)
    subprocess.run([sys.executable, HERE / "pushes.py", HERE / "pushes.png"], check=True)

    print("\n| run | sampled | greedy | length | clipped | largest ratio | last KL | explained, 2 to 4 |")
    print("|---|---|---|---|---|---|---|---|")
    show("", toy)
    for name, table in questions.items():
        show(f"{name}: ", table)
    show("", read(work, OTHERS, 1))
    before = toy[(toy["step"] == 0) & (toy["run"] == "grpo")]
    print("before: sampled", spread(before["eval_sampled_accuracy"]),
          "greedy", spread(before["eval_accuracy"]), "length", spread(before["eval_completion_length"], 1))
    print(f"\n{moe.stdout}{moe.stderr}")

if __name__ == "__main__":
    main()

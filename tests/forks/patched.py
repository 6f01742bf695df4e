"""Forks as modules: copies of the scripts with a patch of this folder. A patch may apply with an offset, as
lines above it come and go, but without fuzz: its own lines and those beside them are still there."""
import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT

PATCHES = {path.stem: path for path in sorted((ROOT / "tests" / "forks").glob("*.patch"))}

def copy_to(folder, *files, patch=None):
    """Copy files of the repository to where they are in it, then apply a patch that names them."""
    for path in (Path(folder, file) for file in files):
        path.parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / path.relative_to(folder), path)
    if patch:
        subprocess.run(["patch", "-s", "-F0", "-p1", "-d", folder, "-i", PATCHES[patch]], check=True)

def patched_copy(name, folder):
    """Write the patched script, most often grpo.py, to folder/NAME.py, and return its path."""
    path, first = Path(folder, f"{name}.py"), PATCHES[name].read_text(encoding="utf-8").split()[1]
    subprocess.run(["patch", "-s", "-F0", "-o", path, ROOT / first[2:], PATCHES[name]], check=True)
    return path

def module_of(path):
    spec = importlib.util.spec_from_file_location(f"of_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module

def run_the_tests_of_every_script(folder, *parts, but="learns"):
    """On the scripts of a folder, but for the test that takes long. With several parts, each a list of
    scripts, there is a process for each."""
    copy_to(folder, "tests/conftest.py", "tests/test_every_script.py")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k"]
    chosen = [f"not ({but}) and ({' or '.join(part)})" for part in parts] or [f"not ({but})"]
    running = [subprocess.Popen([*command, each], cwd=folder, stdout=subprocess.PIPE, text=True)
               for each in chosen]
    for process in running:
        said, _ = process.communicate()
        assert process.returncode == 0, said

@pytest.fixture
def fork(tmp_path, monkeypatch):
    """Name of a patch -> the patched grpo.py as a module. few.json has problems of the toy."""
    monkeypatch.chdir(tmp_path)
    lines = (ROOT / "tests" / "toy" / "train.jsonl").read_text().splitlines(True)
    Path("few.json").write_text("".join(lines[:1500]))
    return lambda name: module_of(patched_copy(name, tmp_path))

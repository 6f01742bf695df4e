"""Forks as modules: copies of the scripts with a patch of this folder. A patch may apply at an offset, as
lines above it come and go, but without fuzz: its own lines and those next to them must be there."""
import importlib.util
import subprocess
from pathlib import Path

import pytest
from conftest import ROOT

PATCHES = {path.stem: path for path in sorted((ROOT / "tests" / "forks").glob("*.patch"))}

def patched_copy(name, folder):
    """Write the patched script, grpo.py, to folder/NAME.py, and return its path."""
    path = Path(folder, f"{name}.py")
    subprocess.run(["patch", "-s", "-F0", "-o", path, ROOT / "grpo.py", PATCHES[name]], check=True)
    return path

def module_of(path):
    spec = importlib.util.spec_from_file_location(f"of_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module

@pytest.fixture
def fork(tmp_path, monkeypatch):
    """A function: name of a patch -> the patched script as a module."""
    monkeypatch.chdir(tmp_path)
    return lambda name: module_of(patched_copy(name, tmp_path))

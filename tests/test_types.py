"""The types of the package, checked where its folders stand as an installation has them."""

import shutil
import subprocess
import sys
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parent.parent


def test_mypy_finds_nothing(tmp_path):
    leave = shutil.ignore_patterns("__pycache__")
    for folder, place in (("nbattn", "."), ("cpu_ref", "cpu_ref"), ("cuda_kernels", "cuda_kernels")):
        shutil.copytree(CHECKOUT / folder, tmp_path / "nbattn" / place, ignore=leave)
    options = ["--config-file", CHECKOUT / "pyproject.toml", "--cache-dir", tmp_path / "kept"]
    command = [sys.executable, "-m", "mypy", *options]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr

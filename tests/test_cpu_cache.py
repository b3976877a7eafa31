"""The opt-in cache of the CPU target's machine code: it is used, it is not on by default, and it cannot go stale."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import nbattn

PACKAGE = Path(nbattn.__file__).parent
PROGRAM = """
import json, sys
import numpy as np
import nbattn
from nbattn.cpu_ref.paged_attention import paged_worker

k = np.zeros((1, 4, 1, 8), np.float32)
v = np.arange(32, dtype=np.float32).reshape(1, 4, 1, 8)
kv = nbattn.PagedKV.from_slots(k, v, np.array([3], np.int32))
out, lse = nbattn.paged_attention(np.ones((1, 1, 8), np.float32), kv, return_lse=True)
hits = sum(paged_worker.stats.cache_hits.values())
misses = sum(paged_worker.stats.cache_misses.values())
print(json.dumps({"out": out.ravel().tolist(), "lse": lse.item(), "hits": hits, "misses": misses}))
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """Copy the package, so that a test may edit its sources."""
    folder = tmp_path / "checkout"
    folder.mkdir()
    top = PACKAGE.parent
    shutil.copytree(PACKAGE, folder / "nbattn", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("cpu_ref", "cuda_kernels"):
        source = top / name if (top / name).is_dir() else PACKAGE / name
        shutil.copytree(source, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "pyproject.toml").write_text("")  # what tells the package that it is a checkout
    return folder


def run(checkout: Path, cache: Path, switch: str) -> dict:
    """Run the program in a fresh process and return what it printed."""
    environment = {
        **os.environ,
        "NBATTN_CACHE_DIR": str(cache),
        "NBATTN_CPU_CACHE": switch,
        "PYTHONPATH": str(checkout),
    }
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=checkout, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_second_process_compiles_nothing_and_an_edit_is_seen(checkout: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    first = run(checkout, cache, "1")
    assert (first["hits"], first["misses"]) == (0, 1)
    second = run(checkout, cache, "1")
    assert (second["hits"], second["misses"]) == (1, 0)
    assert second["out"] == first["out"] == pytest.approx([8, 9, 10, 11, 12, 13, 14, 15])

    scoring = checkout / "nbattn" / "scoring.py"  # a function that the kernel inlines, in another file
    text = scoring.read_text()
    edited = text.replace("return factor, top + math.log2(total)", "return factor, 1 + top + math.log2(total)")
    assert edited != text
    scoring.write_text(edited)
    third = run(checkout, cache, "1")
    assert (third["hits"], third["misses"]) == (0, 1)
    assert third["lse"] == pytest.approx(first["lse"] + 1)


def test_off_unless_asked(checkout: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    assert run(checkout, cache, "")["hits"] == 0
    assert not cache.exists()

"""Tests of the CUDA target that need no GPU: they compile for one, and run kernels in the emulator."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

CC = (9, 0)  # H200


@pytest.fixture(autouse=True)
def _own_cubin_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("NBATTN_CACHE_DIR", str(tmp_path / "cubins"))

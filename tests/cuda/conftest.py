"""Tests of the CUDA target that need no GPU: they compile for one, and run kernels in the emulator."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(autouse=True)
def _own_cubin_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("NBATTN_CACHE_DIR", str(tmp_path / "cubins"))


@pytest.fixture
def lent(monkeypatch):
    """Run the public functions on NumPy arrays through the CUDA target and the emulator; gives the lent device."""
    from lent_device import LentDevice

    import nbattn.engine
    import nbattn.gather
    import nbattn.merging
    from nbattn.cuda_kernels import target

    device = LentDevice()
    monkeypatch.setattr(target, "current_device", lambda: device)
    kernels = SimpleNamespace(
        lane=target.lane,
        tiling=target.tiling,
        run_paged=target.run_paged,
        run_gather=target.run_gather,
        run_merge=target.run_merge,
    )
    for module in (nbattn.engine, nbattn.gather, nbattn.merging):
        monkeypatch.setattr(module, "backend", lambda name: kernels)
    return device

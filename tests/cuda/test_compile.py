"""Every specialisation compiles without a GPU, passes the lint and keeps its registers; the cubin cache works."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from importlib import metadata

import pytest
from register_table import CC, compiled, faults, label_of, read_table, to_compile

from nbattn.cuda_kernels import compile as compiler
from nbattn.cuda_kernels.shapes import specialisations

REGISTERS_OF_A_MULTIPROCESSOR, SHARED_BYTES_OF_A_MULTIPROCESSOR = 65536, 233472  # H200; 1 KB a block is the driver's


def test_there_are_few_kernels():
    assert len(to_compile()) <= 60
    for capability in ((8, 0), CC, (12, 0)):
        families = [family for family, _ in specialisations(capability)]
        assert len(families) <= 62
        assert max(map(families.count, families)) <= 24


def test_warpgroups_serve_hopper_alone():
    for capability in ((8, 0), (8, 9), (9, 0), (10, 0), (12, 0)):
        hopper = {constants["cache"] for family, constants in specialisations(capability) if family == "paged_wgmma"}
        assert hopper == ({"float16", "bfloat16"} if capability == (9, 0) else set())


@pytest.mark.parametrize(("family", "constants"), to_compile(), ids=[label_of(*s) for s in to_compile()])
def test_compiles_without_a_gpu(family, constants):
    result = compiled(family, constants)
    assert faults(result.ptx, converts_lse=family in ("merge_states", "merge_pair")) == []
    assert (result.spilled_bytes, result.stack_bytes, result.remarks) == (0, 0, [])
    assert result.names[0] == result.names[1]
    assert result.registers <= read_table()[result.label] + 4, "registers.txt says less: python register_table.py"
    assert result.registers * result.threads * result.blocks <= REGISTERS_OF_A_MULTIPROCESSOR
    if "plain" not in family:  # there the launch says how much
        assert (result.shared_bytes + 1024) * result.blocks <= SHARED_BYTES_OF_A_MULTIPROCESSOR


def test_the_lint_sees_faults():
    ptx = ".visible .entry k()\n mul.f64 %fd1;\n div.s64 %rd1;\n st.local.u32 [%r1];\n call f;\n.extern .func f\n"
    assert len(faults(ptx, converts_lse=False)) == 5
    assert faults(" cvt.rn.f32.f64 %f1, %fd1;", converts_lse=True) == []
    assert faults(" cvt.rn.f32.f64 %f1, %fd1;\n add.f64 %fd1;", converts_lse=True) == ["float64 arithmetic"]


def test_a_filled_cache_compiles_nothing(caplog):
    before = compiler.counters.compiled
    with caplog.at_level(logging.INFO, logger="nbattn"):
        first = compiler.cubin_for("merge_pair", {"vector": True}, CC)
        assert compiler.counters.compiled == before + 1
        assert [r.message.split()[0] for r in caplog.records] == ["compiling", "compiled"]
        again = compiler.cubin_for("merge_pair", {"vector": True}, CC)
    assert compiler.counters.compiled == before + 1
    assert again == first
    assert first.image[:4] == b"\x7fELF"
    assert len(caplog.records) == 2
    script = (
        "import sys, nbattn\n"
        "from nbattn.cuda_kernels import compile as c, target\n"
        "c.cubin_for('merge_pair', {'vector': True}, (9, 0))\n"
        "print(c.counters.compiled, c.counters.loaded, 'numba.cuda' in sys.modules, 'cupy' in sys.modules)"
    )
    command = [sys.executable, "-c", script]
    out = subprocess.run(command, capture_output=True, text=True, check=True, env=dict(os.environ))
    assert out.stdout.split() == ["0", "1", "False", "False"]


def test_the_key_changes_with_everything_that_matters(monkeypatch):
    key = compiler.cache_key("merge_states", {"vector": True}, CC)
    assert key != compiler.cache_key("merge_states", {"vector": False}, CC)
    assert key != compiler.cache_key("merge_states", {"vector": True}, (8, 0))
    assert key != compiler.cache_key("merge_pair", {"vector": True}, CC)
    monkeypatch.setattr(compiler, "source_hash", lambda: "edited")
    assert key != compiler.cache_key("merge_states", {"vector": True}, CC)


def test_the_sources_that_matter_are_in_the_key(monkeypatch):
    asked = []
    monkeypatch.setattr(compiler, "fingerprint", lambda sources, packages: asked.append((sources, packages)) or "found")
    assert compiler.source_hash.__wrapped__() == "found"
    ((sources, packages),) = asked
    names = [os.path.basename(path) for path in sources]
    assert {"paged_decode.py", "compile.py", "ptx.py", "indexing.py", "scoring.py"} <= set(names)
    assert all(map(os.path.isfile, sources))
    assert {"numba-cuda", "nvidia-nvvm", "nvidia-nvjitlink"} <= set(packages)


def test_a_damaged_cache_entry_is_compiled_anew():
    first = compiler.cubin_for("merge_pair", {"vector": True}, CC)
    (path,) = compiler.cache_directory().glob("*.cubin")
    for damage in (b"", path.read_bytes()[:200], b"something else"):
        path.write_bytes(damage)
        before = compiler.counters.compiled
        again = compiler.cubin_for("merge_pair", {"vector": True}, CC)
        assert compiler.counters.compiled == before + 1
        assert (again.name, again.threads, again.image[:4]) == (first.name, first.threads, first.image[:4])


def test_an_unwritable_cache_is_reported(monkeypatch, tmp_path, caplog):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("NBATTN_CACHE_DIR", str(tmp_path / "file" / "below"))
    with caplog.at_level(logging.WARNING, logger="nbattn"):
        assert compiler.cubin_for("merge_pair", {"vector": True}, CC).image
    assert "cannot be written" in caplog.text


BROKEN_NUMBA_CUDA = """
import sys
class Broken:
    def find_spec(self, name, path=None, target=None):
        if name == "numba.cuda":
            {fault}
sys.meta_path.insert(0, Broken())
from nbattn.cuda_kernels.compile import load_kernel
from nbattn.errors import TargetError
try:
    load_kernel("merge_pair", {{}})
except TargetError as error:
    print(error)
"""


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("import numpy; numpy.row_of_no_numpy", "AttributeError: module 'numpy' has no attribute 'row_of_no_numpy'"),
        ("raise ModuleNotFoundError('No module named numba_cuda')", "ModuleNotFoundError: No module named numba_cuda"),
    ],
)
def test_a_numba_cuda_that_cannot_be_imported_is_named_with_its_versions(fault, said):
    code = BROKEN_NUMBA_CUDA.format(fault=fault)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    start = f"cuda: compiling a kernel needs a numba-cuda that can be imported, got {said} with python "
    assert done.stdout.startswith(start)
    for package in ("numba-cuda", "numba", "numpy"):
        assert f", {package} {metadata.version(package)}" in done.stdout

"""Run tests that are written with NumPy arrays on a GPU: a pytest plugin, and a command that runs files with it.

Usage: python scripts/on_device.py [--pattern REGEX] [--dtype NAME] [--json FILE] TEST_FILE...

Every call of nbattn gets its arrays on the device, and whatever the call leaves there, results and memory that it was
given, comes back to the host before the test goes on. What a GPU refuses by design, float64, is counted apart.
With a 16-bit dtype the tests that take a path are run again with q, K and V rounded to it and V padded to whole tiles,
for the kernels that such calls take; what they compare may then be off by a little, which no fault they look for is.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import inspect
import json
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
from extra_packages import needed

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import nbattn
from nbattn import testing
from nbattn.arrays import dtype_from_name
from nbattn.errors import TargetError
from nbattn.kv_cache import PagedKV
from nbattn.paged import attend
from nbattn.planning import Plan
from nbattn.testing.memory import byte_offset, owner_of

pytest = needed("pytest", "'.[test]'")
ROOT = Path(__file__).resolve().parent.parent
approx = pytest.approx
FUNCTIONS = [
    *(nbattn.append_paged_kv_cache, nbattn.attention_over_cache, nbattn.cascade_attention),
    *(nbattn.gather_attention, nbattn.generic_cross_attention_kv_cache, nbattn.gqa_decode, nbattn.merge_state),
    *(nbattn.merge_state_in_place, nbattn.merge_states, nbattn.paged_attention, nbattn.plan),
    *(nbattn.qsa_sparse_attention, attend),
]
WRAPPERS = [
    nbattn.MultiLevelCascadeAttentionWrapper,
    nbattn.BatchDecodeWithSharedPrefixPagedKVCacheWrapper,
    nbattn.BatchPrefillWithSharedPrefixPagedKVCacheWrapper,
]
METHODS = ("plan", "begin_forward", "run", "forward")
CONSTRUCTORS = ("from_page_table", "from_block_table", "from_slots", "from_blocks")
ROUNDED = ("paged_attention", "cascade_attention", "gather_attention")
SLACK = 0.02  # of what rounded inputs give
TILE = 64  # numbers of V's rows
FAR = 2**30  # bytes of an owner that is a pool in addresses only: the parts that are not zero are copied
CHUNK = 2**26


class Gpu:
    """Memory on the GPU, as `Transfer` uses it."""

    def __init__(self) -> None:
        self.cupy = needed("cupy", "'.[cuda13]'")

    def holds(self, x: Any) -> bool:
        """Return whether `x` is an array there."""
        return isinstance(x, self.cupy.ndarray)

    def bytes(self, size: int) -> Any:
        """Return new memory of that many bytes."""
        return self.cupy.zeros(size, np.uint8)

    def view(self, memory: Any, offset: int, like: np.ndarray) -> Any:
        """Return an array in that memory with the shape, dtype and strides of another."""
        size, shift = like.dtype.itemsize, offset % like.dtype.itemsize
        items = memory[shift : shift + (len(memory) - shift) // size * size].view(like.dtype)
        items = items[offset // size :]
        if like.flags.c_contiguous:  # a view that knows its base, which page strides are held against
            return items[: like.size].reshape(like.shape)
        return self.cupy.lib.stride_tricks.as_strided(items, like.shape, like.strides)

    def write(self, target: Any, host: np.ndarray) -> None:
        """Copy a host array over one there."""
        target[...] = self.cupy.asarray(host.view(np.uint8)).view(host.dtype)

    def read(self, x: Any) -> np.ndarray:
        """Return a copy on the host."""
        return x.get()


def bytes_of(owner: np.ndarray) -> np.ndarray:
    """Return the memory of an array that is nobody's view, as it lies; a view that may be written."""
    return owner.ravel(order="K").view(np.uint8)


class Transfer:
    """The arrays of one call: views of one array on the host are views of one array on the device."""

    def __init__(self, device: Any, tables: WeakKeyDictionary, fills_pools: bool = True) -> None:
        self.device, self.tables, self.fills_pools = device, tables, fills_pools
        self.memory: dict[int, tuple[np.ndarray, Any]] = {}
        self.moved: list[tuple[np.ndarray, Any]] = []

    def to_device(self, x: Any) -> Any:
        """Return `x` with every array in it on the device; 64-bit indices may not stand there and stay."""
        if isinstance(x, np.ndarray):
            return x if x.dtype == np.int64 else self._array(x)
        if isinstance(x, PagedKV):
            table = self.tables.get(x.table) or replace(x.table, kv_indices=self._array(x.table.kv_indices))
            return PagedKV(self._array(x.k), self._array(x.v), table, x.kv_layout)
        if isinstance(x, (list, tuple)):
            return type(x)(self.to_device(item) for item in x)
        if is_dataclass(x) and not isinstance(x, type):
            parts = {f.name: getattr(x, f.name) for f in fields(x) if f.init}
            changed = {name: self.to_device(part) for name, part in parts.items()}
            return replace(x, **changed) if any(changed[name] is not parts[name] for name in parts) else x
        return x

    def _array(self, x: np.ndarray) -> Any:
        for host, array in self.moved:
            if host is x:
                return array
        owner = owner_of(x)
        if id(owner) not in self.memory:
            self.memory[id(owner)] = owner, self._copied(owner)
        array = self.device.view(self.memory[id(owner)][1], byte_offset(x, owner), x)
        self.moved.append((x, array))
        return array

    def _copied(self, owner: np.ndarray) -> Any:
        memory, host = self.device.bytes(max(1, owner.nbytes)), bytes_of(owner)
        if owner.nbytes < FAR:
            self.device.write(memory[: owner.nbytes], host)
        elif self.fills_pools:
            for begin in range(0, owner.nbytes, CHUNK):
                chunk = host[begin : begin + CHUNK]
                if chunk.any():
                    self.device.write(memory[begin : begin + len(chunk)], chunk)
        return memory

    def give_back(self) -> None:
        """Copy the device's memory over the host's: it shows whatever the call wrote, and wherever."""
        for owner, memory in self.memory.values():
            if owner.nbytes < FAR:
                after, host = self.device.read(memory[: owner.nbytes]), bytes_of(owner)
                if not np.array_equal(host, after):
                    host[...] = after
        for host, array in self.moved:
            if owner_of(host).nbytes >= FAR:
                after = self.device.read(array)
                if not np.array_equal(np.ascontiguousarray(host).view(np.uint8), after.view(np.uint8)):
                    host[...] = after

    def to_host(self, x: Any) -> Any:
        """Return a result with every array in it on the host; one that was given is itself."""
        if isinstance(x, tuple):
            return tuple(self.to_host(item) for item in x)
        if not self.device.holds(x):
            return x
        for host, array in self.moved:
            if array is x:
                return host
        return self.device.read(x)


def rounded(kv: Any, dtype: np.dtype, multiple: int) -> Any:
    """Return a cache, or a cascade's levels, in another dtype, with zeros up to a multiple behind V's last axis."""
    if isinstance(kv, list):
        return [replace(level, kv=rounded(level.kv, dtype, multiple)) for level in kv]
    padding = [(0, 0)] * 3 + [(0, -kv.head_dim_vo % multiple)]
    return PagedKV(kv.k.astype(dtype), np.pad(kv.v, padding).astype(dtype), kv.table, kv.kv_layout)


def loose_approx(expected: Any, rel: float | None = None, abs: float | None = None) -> Any:
    """Return `pytest.approx` with room for rounded inputs."""
    return approx(expected, rel=max(rel or 0.0, SLACK), abs=max(abs or 0.0, SLACK))


def loose_close(actual: Any, expected: Any, *, budget: float | None = None, name: str = "out") -> None:
    """Compare as `nbattn.testing.assert_close` does, with room for rounded inputs."""
    wanted = (expected.out, expected.lse) if isinstance(expected, testing.Expected) else expected
    parts = zip(actual, wanted, strict=True) if isinstance(actual, tuple) else [(actual, wanted)]
    for got, want in parts:
        largest = float(np.max(np.abs(want), initial=0.0, where=np.isfinite(want)))
        testing.assert_close(got, want, budget=max(budget or 0.0, SLACK * (1 + largest)), name=name)


class OnDevice:
    """The plugin: selects tests by name, moves their calls to a device, and counts what came of them.

    Parameters
    ----------
    device : `Gpu` or a stand-in
    pattern : regular expression that a test's function must match
    dtype : 16-bit dtype that inputs are rounded to, or None
    """

    def __init__(self, device: Any, pattern: str, dtype: str | None = None) -> None:
        self.device, self.pattern = device, re.compile(pattern)
        self.dtype = None if dtype is None else dtype_from_name(dtype)
        self.calls = 0  # of the running test, that a device has answered
        self.inside = False  # the library: what it calls itself has its arrays where they belong
        self.counts: dict[str, Counter] = {}
        self.failures: list[dict[str, str]] = []
        self.tables: WeakKeyDictionary = WeakKeyDictionary()

    @contextlib.contextmanager
    def library(self) -> Iterator[None]:
        """Mark what runs in here as the library's own."""
        self.inside = True
        try:
            yield
        finally:
            self.inside = False

    def moved(self, function: Callable[..., Any], is_method: bool = False) -> Callable[..., Any]:
        """Return the function with its arrays on the device."""

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            if self.inside:
                return function(*args, **kwargs)
            if function.__name__ in ROUNDED and self.dtype not in (None, args[0].dtype):
                return self.rounded(call, args, kwargs)
            transfer, own = Transfer(self.device, self.tables), args[: int(is_method)]
            moved = [transfer.to_device(x) for x in args[len(own) :]]
            named = {name: transfer.to_device(x) for name, x in kwargs.items()}
            try:
                with self.library():
                    result = function(*own, *moved, **named)
            finally:
                transfer.give_back()
            self.calls += 1
            return transfer.to_host(result)

        return call

    def rounded(self, call: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
        """Return what a call gives for q and caches of the narrow dtype, in float32."""
        q, kv = args[:2]
        given = kwargs.get("out") is not None
        narrow = rounded(kv, self.dtype, 1 if given else TILE)
        result = call(q.astype(self.dtype), narrow, *args[2:], **{**kwargs, "out_dtype": np.float32})
        if given:
            return result
        dim = (kv[0].kv if isinstance(kv, list) else kv).head_dim_vo
        return (result[0][..., :dim], *result[1:]) if isinstance(result, tuple) else result[..., :dim]

    def built(self, name: str) -> Any:
        """Return a constructor of `PagedKV` that makes the table on the device as well."""
        original = getattr(PagedKV, name)

        @functools.wraps(original)
        def build(cls: type, *args: Any, **kwargs: Any) -> PagedKV:
            kv = original(*args, **kwargs)
            if self.inside:
                return kv
            transfer = Transfer(self.device, self.tables, fills_pools=False)
            named = {key: transfer.to_device(x) for key, x in kwargs.items()}
            with self.library():
                table = original(*(transfer.to_device(x) for x in args), **named).table
            for part in ("kv_indptr", "kv_lens", "page_size", "num_pages"):
                np.testing.assert_array_equal(getattr(kv.table, part), getattr(table, part))
            self.tables[kv.table] = table
            return kv

        return classmethod(build)

    @pytest.hookimpl
    def pytest_collection_modifyitems(self, items: list) -> None:
        """Keep the tests that the pattern selects."""
        chosen = [item for item in items if self.pattern.match(getattr(item, "originalname", "") or "")]
        if self.dtype is not None:
            chosen = [item for item in chosen if "path" in getattr(getattr(item, "callspec", None), "params", {})]
        items[:] = chosen

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: Any) -> Iterator[None]:
        """Run a test with the functions replaced, where it and the paths of `nbattn.testing` look them up."""
        self.calls = 0
        replaced = {function: self.moved(function) for function in FUNCTIONS}
        with pytest.MonkeyPatch.context() as patch:
            for module in (nbattn, item.module):
                for name, value in list(vars(module).items()):
                    if inspect.isfunction(value) and value in replaced:
                        patch.setattr(module, name, replaced[value])
            if self.dtype is not None:
                patch.setattr(pytest, "approx", loose_approx)
                if hasattr(item.module, "assert_close"):
                    patch.setattr(item.module, "assert_close", loose_close)
            for name in CONSTRUCTORS:
                patch.setattr(PagedKV, name, self.built(name))
            for owner, names in [(Plan, ["update"]), *((wrapper, METHODS) for wrapper in WRAPPERS)]:
                for name in set(names) & set(dir(owner)):
                    patch.setattr(owner, name, self.moved(getattr(owner, name), is_method=True))
            return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: Any, call: Any) -> Iterator[None]:
        """Count a test under its function's name."""
        report = yield
        error = call.excinfo.value if call.excinfo else None
        if report.when != "call" and report.passed:
            return report
        name = item.originalname
        counts = self.counts.setdefault(name, Counter())
        if isinstance(error, TargetError) and "float64" in str(error):
            report.outcome, report.longrepr = "skipped", (str(item.path), 0, f"refused: {error}")
            counts["refused"] += 1
        elif report.failed:
            counts["failed"] += 1
            self.failures.append({"name": item.nodeid, "detail": str(report.longrepr)[-2000:]})
        elif report.skipped:
            counts["skipped"] += 1
        else:
            counts["passed" if self.calls else "passed without a call"] += 1
        return report


def run_tests(files: list[str], pattern: str, device: Any, dtype: str | None = None) -> OnDevice:
    """Run the tests of files whose names match on a device."""
    plugin = OnDevice(device, pattern, dtype)
    options = ["-q", "--no-header", "--tb=short", "-p", "no:cacheprovider", "-W", "default", f"--rootdir={ROOT}"]
    code = pytest.main([*options, *files], plugins=[plugin])
    if code not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.NO_TESTS_COLLECTED):
        plugin.failures.append({"name": " ".join(files), "detail": f"pytest ended with {code!r}"})
    return plugin


def main() -> int:
    """Run files and print what came of their tests."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="+", metavar="TEST_FILE")
    parser.add_argument("--pattern", default="test_", help="regular expression for the tests' function names")
    parser.add_argument("--dtype", help="round q, K and V to this dtype: float16 or bfloat16")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the counts")
    options = parser.parse_args()
    plugin = run_tests(options.files, options.pattern, Gpu(), options.dtype)
    if options.json:
        options.json.write_text(json.dumps({"counts": plugin.counts, "failures": plugin.failures}) + "\n")
    return 1 if plugin.failures else 0


if __name__ == "__main__":
    sys.exit(main())

"""What a call costs beside its kernel: Python around a planned call, planning, and compiling in a cold process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
from bench_data import Data, pair, random_pages
from bench_problems import CascadeProblem, PagedProblem
from bench_shapes import Cascade, Paged

import nbattn

Call = Callable[[], Any]

PLANNED_BAR, UNPLANNED_BAR = 20, 200  # empty njit calls
COMPILE_BAR = 8  # compiles of a prange sum
GPU_COMPILE_BAR, GPU_LOAD_BAR, GPU_LAUNCH_BAR = 2, 10, 3
GPU_BARS = {"decode run": 2.5, "cascade run": 4.0, "plan of 256": 3.0}  # FlashInfer's time over ours


def median_call(call: Call, calls: int = 50, rounds: int = 9, finish: Call | None = None) -> float:
    """Return the median over rounds of the time of one call, in seconds; `finish` ends a round and is in its time."""
    call()
    times = []
    for _ in range(rounds):
        begin = perf_counter()
        for _ in range(calls):
            call()
        if finish is not None:
            finish()
        times.append((perf_counter() - begin) / calls)
    return float(np.median(times))


def cpu_host(quick: bool) -> list[dict[str, Any]]:
    """Time calls with next to no work, and an empty compiled function of 15 arguments as the unit."""
    calls, rounds = (5, 3) if quick else (200, 15)
    unit = median_call(_empty_call(), calls, rounds)
    rows = []
    for name, batch, make, bar in (
        ("planned decode of 1", 1, lambda problem: problem.ours()[0], PLANNED_BAR),
        ("planned decode of 64", 64, lambda problem: problem.ours()[0], None),
        ("decode of 64, a layer", 64, _unplanned, UNPLANNED_BAR),
        ("decode of 64, first layer", 64, _first_layer, UNPLANNED_BAR),
    ):
        problem = PagedProblem(Paged(batch=batch, keys=1, heads=(1, 1), head_dim=16, dtype="float32", hot=True), np)
        call = make(problem)
        seconds = median_call(call, calls, rounds)
        rows.append({"op": "host", "name": name, "us": 1e6 * seconds, "unit": "empty njit call of 15 arguments",
                     "unit_us": 1e6 * unit, "ratio": seconds / unit, "most": bar})  # fmt: skip
    return rows


def _unplanned(problem: PagedProblem) -> Call:
    kv, q, out = problem.kvs[0], problem.q.array, problem.out.array
    return lambda: nbattn.paged_attention(q, kv, out=out)


def _first_layer(problem: PagedProblem) -> Call:
    """Return an unplanned call that finds no plan of its table and makes one."""
    kv, q, out = problem.kvs[0], problem.q.array, problem.out.array

    def call() -> None:
        kv.table.kept.clear()
        nbattn.paged_attention(q, kv, out=out)

    return call


def _empty_call() -> Call:
    from numba import njit

    @njit
    def empty(a, b, c, d, e, f, g, h, i, j, k, l, m, n, o):  # noqa: E741
        return 0

    array = np.zeros((2, 2), np.float32)
    arguments = [array] * 8 + [1, 2, 3, 1.0, 2.0, 3, 4]
    return lambda: empty(*arguments)


_BLANK = "import time, numpy as np; from numba import njit, prange; "
_SUM = (
    _BLANK
    + """t = time.perf_counter()
@njit(parallel=True)
def total(x):
    s = np.float32(0)
    for i in prange(x.shape[0]):
        s += x[i]
    return s
total(np.ones(1000, np.float32))
print(time.perf_counter() - t)"""
)
_CALL = """import time, numpy as np{more}
t = time.perf_counter()
import nbattn
k = xp.ones((2, 16, 2, 64), np.float16)
kv = nbattn.PagedKV.from_slots(k, k, np.array([16, 9], np.int32))
nbattn.paged_attention(xp.ones((2, 8, 64), np.float16), kv)
{finish}print(time.perf_counter() - t)"""
_CPU_CALL = _CALL.format(more="; import numba; xp = np", finish="")

_GPU_BLANK = """import json, os, time, numpy as np, cupy
x = cupy.ones(3, np.float16).sum()
"""
_GPU_CALL = (  # imports aside: the kernel's name and what to compile it from are printed for the other programs
    _GPU_BLANK
    + """import nbattn.cuda_kernels.target, nbattn.paged
from nbattn.cuda_kernels import compile, launch
if not os.listdir(os.environ["NBATTN_CACHE_DIR"]):
    from numba import cuda
k = cupy.ones((2, 16, 2, 64), np.float16)
q, lens = cupy.ones((2, 8, 64), np.float16), np.array([16, 9], np.int32)
cupy.cuda.Device().synchronize()
t = time.perf_counter()
kv = nbattn.PagedKV.from_slots(k, k, lens)
nbattn.paged_attention(q, kv)
cupy.cuda.Device().synchronize()
t = time.perf_counter() - t
(family, device, *constants), = launch.loaded
cubin = compile.cubin_for(family, dict(constants), launch.compute_capability(device))
with open(os.environ["NBATTN_CACHE_DIR"] + "/image", "wb") as file:
    file.write(cubin.image)
print(json.dumps({"family": family, "constants": dict(constants), "cc": launch.compute_capability(device),
                  "name": cubin.name, "compiled": compile.counters.compiled, "seconds": t}))"""
)
_GPU_COMPILE = """import json, sys, time
from numba import cuda
from nbattn.cuda_kernels import compile
kernel = json.loads({kernel!r})
t = time.perf_counter()
_, code = compile.to_code(kernel["family"], kernel["constants"], tuple(kernel["cc"]))
compile.to_cubin(code, tuple(kernel["cc"]))
print(json.dumps({{"seconds": time.perf_counter() - t}}))"""
_GPU_LOAD = (
    _GPU_BLANK
    + """kernel = {kernel!r}
cupy.cuda.Device().synchronize()
t = time.perf_counter()
cupy.RawModule(path=os.environ["NBATTN_CACHE_DIR"] + "/image").get_function(json.loads(kernel)["name"])
cupy.cuda.Device().synchronize()
print(json.dumps({{"seconds": time.perf_counter() - t}}))"""
)


def _cold(program: str, **variables: str) -> str:
    """Return the last line that a program prints in a process of its own."""
    root = str(Path(nbattn.__file__).resolve().parent.parent)
    paths = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH", "")]))
    environment = {**os.environ, "PYTHONPATH": paths, **variables}
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, env=environment, timeout=600
    )
    return done.stdout.splitlines()[-1]


def cpu_compile_times(quick: bool) -> list[dict[str, Any]]:
    """Time the first call of a cold process, then of another one that finds the first one's cache, if it kept one."""
    found: dict[str, list[float]] = {"sum": [], "first": [], "second": []}
    for _ in range(1 if quick else 5):
        with tempfile.TemporaryDirectory() as folder:
            found["sum"].append(float(_cold(_SUM)))
            for name in ("first", "second"):
                found[name].append(float(_cold(_CPU_CALL, NBATTN_CACHE_DIR=folder)))
    unit = "compile of a float32 prange sum"
    first = _compile_row("first call of a process", found["first"], unit, found["sum"])
    return [{**first, "most": COMPILE_BAR}, _compile_row("second process", found["second"], unit, found["sum"])]


def gpu_compile_times(quick: bool) -> list[dict[str, Any]]:
    """Time the first call of a cold process against the bare compile of its kernel, then one with a filled cache.

    The latter must compile nothing, and stands against CuPy's load of the same image from a file.
    """
    found: dict[str, list[float]] = {"first": [], "bare": [], "second": [], "load": []}
    compiled = 0
    for _ in range(1 if quick else 3):
        with tempfile.TemporaryDirectory() as folder:
            kernel = _cold(_GPU_CALL, NBATTN_CACHE_DIR=folder)
            again = _cold(_GPU_CALL, NBATTN_CACHE_DIR=folder)
            compiled += json.loads(again)["compiled"]
            bare = _cold(_GPU_COMPILE.format(kernel=kernel))
            load = _cold(_GPU_LOAD.format(kernel=kernel), NBATTN_CACHE_DIR=folder)
        for name, text in (("first", kernel), ("bare", bare), ("second", again), ("load", load)):
            found[name].append(json.loads(text)["seconds"])
    first = _compile_row("first call of a process", found["first"], "bare Numba compile of its kernel", found["bare"])
    name = f"first call with a filled cache ({compiled} compiles)"
    second = _compile_row(name, found["second"], "CuPy RawModule load from file", found["load"])
    return [{**first, "most": GPU_COMPILE_BAR}, {**second, "most": GPU_LOAD_BAR if compiled == 0 else 0}]


def compile_times(target: str, quick: bool) -> list[dict[str, Any]]:
    """Return what the first calls of fresh processes cost."""
    return cpu_compile_times(quick) if target == "cpu" else gpu_compile_times(quick)


def _compile_row(name: str, times: list[float], unit: str, unit_times: list[float]) -> dict[str, Any]:
    ours, other = float(np.median(times)), float(np.median(unit_times))
    return {"op": "compile", "name": name, "us": 1e6 * ours, "unit": unit, "unit_us": 1e6 * other,
            "ratio": ours / other}  # fmt: skip


def gpu_host(flashinfer: bool, quick: bool) -> list[dict[str, Any]]:
    """Time Python per planned decode, per cascade run and per plan of 256 requests, beside FlashInfer's.

    Runs are queued one after another and end in one synchronisation. Planning starts from metadata on the device and
    refills what was planned before, FlashInfer's wrapper and our plan alike; it counts with the synchronised run that
    follows, less such a run alone.
    """
    import cupy

    finish = cupy.cuda.Device().synchronize
    calls, rounds = (5, 3) if quick else (50, 9)
    decode = PagedProblem(Paged(keys=1024, hot=True), cupy)
    cascade = CascadeProblem(Cascade(batch=16, prefix=1024, hot=True), cupy)
    many = Paged(batch=256, keys=256, hot=True)
    ours = {"decode run": decode.ours()[0], "cascade run": cascade.ours()[0], "plan of 256": _our_plan(many, cupy)}
    theirs = _flashinfer_calls(decode, cascade, many) if flashinfer else {}
    rows = [_beside_raw_kernel(ours["decode run"], calls, rounds, finish)]
    for name, call in ours.items():
        seconds = _host_seconds(call, calls, rounds, finish)
        row = {"op": "host", "name": name, "us": 1e6 * seconds}
        if name in theirs:
            other = _host_seconds(theirs[name], calls, rounds, finish)
            row.update(unit="FlashInfer", unit_us=1e6 * other, ratio=other / seconds, least=GPU_BARS[name])
        rows.append(row)
    return rows


def _beside_raw_kernel(call: Call, calls: int, rounds: int, finish: Call) -> dict[str, Any]:
    """Time a planned call beside a launch of CuPy's with as many arguments as its kernel has."""
    import cupy

    from nbattn.cuda_kernels.parameters import PARAMETERS

    types = {"i64": ("long long", np.int64), "i32": ("int", np.int32), "f32": ("float", np.float32)}
    kinds = [kind for _, kind in PARAMETERS["paged_decode"]]
    declared = ", ".join(f"{types[kind][0]} a{i}" for i, kind in enumerate(kinds))
    empty = cupy.RawKernel(f'extern "C" __global__ void empty({declared}) {{}}', "empty")
    arguments = tuple(types[kind][1](0) for kind in kinds)
    unit = median_call(lambda: empty((128,), (128,), arguments), calls, rounds, finish)
    seconds = median_call(call, calls, rounds, finish)
    return {"op": "host", "name": "planned call", "us": 1e6 * seconds, "unit": f"RawKernel of {len(kinds)} arguments",
            "unit_us": 1e6 * unit, "ratio": seconds / unit, "most": GPU_LAUNCH_BAR}  # fmt: skip


def _host_seconds(call: Any, calls: int, rounds: int, finish: Call) -> float:
    if not isinstance(call, tuple):
        return median_call(call, calls, rounds, finish)
    plan, run = call

    def planned() -> None:
        plan()
        run()
        finish()

    def alone() -> None:
        run()
        finish()

    return median_call(planned, calls, rounds) - median_call(alone, calls, rounds)


def _metadata(shape: Paged, xp: Any) -> tuple[Any, ...]:
    """Return a page table as FlashInfer writes it, on the device."""
    pages = shape.keys // shape.page_size
    ids = np.random.default_rng(6).permutation(shape.batch * pages).astype(np.int32)
    indptr = np.arange(shape.batch + 1, dtype=np.int32) * pages
    return tuple(xp.asarray(x) for x in (indptr, ids, np.full(shape.batch, shape.page_size, np.int32)))


def _our_plan(shape: Paged, xp: Any) -> tuple[Call, Call]:
    rng = np.random.default_rng(7)
    cache = random_pages(xp, shape, shape.batch * shape.keys // shape.page_size, rng)
    q = Data.random(xp, (shape.batch, shape.heads[0], shape.head_dim), shape.q_dtype, rng).array
    out, metadata, pages = xp.empty_like(q.view(np.uint16)).view(q.dtype), _metadata(shape, xp), pair(cache)
    kept = {"kv": nbattn.PagedKV.from_page_table(pages, *metadata)}
    planned = nbattn.plan(kept["kv"], num_qo_heads=shape.heads[0], max_kv_len=2 * shape.keys)

    def plan() -> None:
        kept["kv"] = nbattn.PagedKV.from_page_table(pages, *metadata)
        planned.update(kept["kv"])

    return plan, lambda: nbattn.paged_attention(q, kept["kv"], plan=planned, out=out)


def _flashinfer_calls(decode: PagedProblem, cascade: CascadeProblem, many: Paged) -> dict[str, Any]:
    import bench_flashinfer as theirs
    import cupy

    wrapper = theirs.decode_wrapper(decode.shape, decode.table, decode.shape.keys, True, decode.shape.page_size)
    q, cache = theirs.tensor(decode.q), theirs.tensor(decode.caches[0])
    out = q.new_empty(q.shape)
    levels = theirs.cascade_wrapper(cascade, "auto")
    rows, pool = theirs.tensor(cascade.q), theirs.tensor(cascade.caches[0])
    pages = random_pages(cupy, many, many.batch * many.keys // many.page_size, np.random.default_rng(7))
    table = np.random.default_rng(6).permutation(many.batch * many.keys // many.page_size)
    table = table.reshape(many.batch, -1)
    planned = theirs.decode_wrapper(many, table, many.keys, True, many.page_size)
    metadata = theirs.decode_metadata(table, many.keys, many.page_size)
    many_q = theirs.tensor(Data.random(cupy, (many.batch, many.heads[0], many.head_dim), many.q_dtype,
                                       np.random.default_rng(8)))  # fmt: skip
    many_out, many_pool = many_q.new_empty(many_q.shape), theirs.tensor(pages)
    sizes, dtypes = (*many.heads, many.head_dim, many.page_size), theirs.dtypes(many)
    return {
        "decode run": lambda: wrapper.run(q, cache, out=out),
        "cascade run": lambda: levels.run(rows, pool),
        "plan of 256": (
            lambda: planned.plan(*metadata, *sizes, **dtypes),
            lambda: planned.run(many_q, many_pool, out=many_out),
        ),
    }

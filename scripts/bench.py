"""Measure nbattn beside its rivals and the machine's own limits, in one process, each shape checked before it is timed.

    python scripts/bench.py --shapes small --quick              # does everything work here?
    python scripts/bench.py --threads 1,2 --json cpu.jsonl      # the CPU's table of bars
    python scripts/bench.py --target cuda --json gpu.jsonl      # the GPU's
    python scripts/plot_roofline.py gpu.jsonl roofline.png

docs/benchmarks.md says what each figure is.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import bench_host
import bench_report
import numpy as np
from bench_problems import CascadeProblem, Problem, problem_of
from bench_rivals import contenders
from bench_shapes import Shape, shapes_of
from extra_packages import needed

import nbattn

OPS = ("decode", "gather", "prefill", "cascade", "merge", "host", "compile")
CPU_REPEATS, GPU_REPEATS, QUICK_REPEATS = 15, 9, 3


def host_result(problem: Problem, result: Any) -> np.ndarray:
    """Return what a call of ours returned, on the host in float64."""
    first = result[0] if isinstance(result, tuple) else result
    bits = first.view(f"uint{8 * first.dtype.itemsize}")
    bits = bits.get() if hasattr(bits, "get") else bits
    return bits.view(first.dtype).astype(np.float64)


def checked(shape: Shape, xp: Any) -> tuple[Problem, list[str]]:
    """Build a shape's problem and return it with what is wrong in our result."""
    problem = problem_of(shape, xp)
    return problem, [str(c) for c in problem.check() if not c.passed]


def left_out(shape: Shape, what: str, why: str) -> dict[str, Any]:
    """Return the record of something that was not timed."""
    print(f"  {shape.op} {shape.name}: {what} left out: {why}", flush=True)
    return {"kind": "skipped", "op": shape.op, "shape": shape.name, "what": what, "why": why}


def rivals_of(problem: Problem, threads: int, options: argparse.Namespace, result: Any) -> tuple[dict, dict[str, str]]:
    """Return the rivals' calls, our own flat decode among them for a cascade, and why others are left out."""
    found, skipped = contenders(problem, threads, options.rivals, host_result(problem, result), options.registry)
    if isinstance(problem, CascadeProblem):
        found["nbattn flat"] = problem.flat()
    return found, skipped


def result_record(
    shape: Shape, threads: int | None, samples: dict[str, np.ndarray], limits: dict[str, np.ndarray], timer: str
) -> dict[str, Any]:
    """Return the record of one shape; ratios are medians of ratios of neighbours in time.

    Parameters
    ----------
    samples : dict of float64 array, shape [repeats]
        Seconds of "nbattn" and the rivals.
    limits : dict of float64 array, shape [repeats]
        Seconds of each limit; the largest of memory and arithmetic is the machine's, of the ways to read the fastest.
    """
    ours = samples.pop("nbattn")
    read = min((times for name, times in limits.items() if name.startswith("read")), key=np.nanmedian)
    limit = max([read, *(times for name, times in limits.items() if not name.startswith("read"))], key=np.nanmedian)
    ratios = {name: float(np.nanmedian(times / ours)) for name, times in samples.items()}
    rivals = {name: ratio for name, ratio in ratios.items() if not name.startswith("nbattn")}
    return {
        "kind": "result", "op": shape.op, "shape": shape.name, "threads": threads, "timer": timer,
        "heads": list(shape.heads), "head_dim": shape.head_dim, "page_size": shape.page_size, "layout": shape.layout,
        "dtype": shape.dtype, "itemsize": shape.itemsize, "bytes": shape.bytes, "flops": shape.flops,
        "repeats": len(ours), "ours_us": 1e6 * float(np.nanmedian(ours)), "limit_us": 1e6 * float(np.nanmedian(limit)),
        "x_limit": float(np.nanmedian(ours / limit)),
        "limits_us": {name: 1e6 * float(np.nanmedian(times)) for name, times in limits.items()},
        "rivals_us": {name: 1e6 * float(np.nanmedian(times)) for name, times in samples.items()},
        "rivals_ratio": rivals, "variants_ratio": {n: r for n, r in ratios.items() if n not in rivals},
        "limit_bar": shape.limit_bar, "rival_bar": shape.rival_bar, "bars_threads": shape.threads,
    }  # fmt: skip


def time_on_cpu(shape: Shape, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Check and time one shape for every thread count."""
    import bench_cpu

    problem, wrong = checked(shape, np)
    if wrong:
        yield left_out(shape, "nbattn", "wrong result: " + "; ".join(wrong))
        return
    for threads in options.threads:
        barred = any(s.name == shape.name and s.threads == threads for s in options.shape_list)
        if barred and shape.threads != threads:
            continue  # the same shape is in the list with bars for this thread count
        nbattn.set_num_threads(threads)
        calls = problem.ours()
        rivals, skipped = rivals_of(problem, threads, options, calls[0]())
        for what, why in skipped.items():
            yield left_out(shape, what, why)
        limits = bench_cpu.limit_calls(problem, threads)
        turns = {"nbattn": calls, **{name: ways for name, (ways, _) in limits.items()}, **rivals}
        samples = bench_cpu.interleaved(turns, options.repeats)
        shares = {name: share * samples.pop(name) for name, (_, share) in limits.items()}
        yield result_record(shape, threads, samples, shares, "clock")


def time_on_gpu(shape: Shape, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Check and time one shape."""
    import bench_flashinfer
    import bench_gpu
    import cupy

    problem, wrong = checked(shape, cupy)
    if wrong:
        yield left_out(shape, "nbattn", "wrong result: " + "; ".join(wrong))
        return
    calls = problem.ours()
    rivals, skipped = rivals_of(problem, 1, options, calls[0]())
    for what, why in skipped.items():
        yield left_out(shape, what, why)
    timed = {"nbattn": bench_gpu.Timed(calls)}
    for name, others in rivals.items():
        capture = bench_gpu.capture if name.startswith("nbattn") else bench_flashinfer.capture
        timed[name] = bench_gpu.Timed(others, capture)
    for name, contender in timed.items():
        if contender.why:
            yield left_out(shape, f"{name}'s graph", contender.why)
    samples = bench_gpu.interleaved(timed, options.repeats)
    limits = {"read": np.full(options.repeats, shape.bytes / options.read_rate)}
    if shape.op in ("prefill", "cascade"):
        limits["matrix products"] = np.full(options.repeats, shape.flops / options.matrix_rate)
    yield result_record(shape, None, samples, limits, timed["nbattn"].timer)


def ceilings(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Measure the GPU's ceilings and keep the best of them in `options`."""
    import bench_gpu

    rates = bench_gpu.read_rates(options.repeats)
    options.read_rate, options.matrix_rate = max(rates.values()), bench_gpu.matrix_rate(options.repeats)
    for name, rate in rates.items():
        yield {"kind": "ceiling", "name": name, "value": 1e-9 * rate, "unit": "GB/s"}
    yield {"kind": "ceiling", "name": "float16 matrix product", "value": 1e-12 * options.matrix_rate, "unit": "TFLOP/s"}


def host_rows(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Measure host and compile times, as far as they are asked for."""
    rows = []
    if "host" in options.ops:
        if options.target == "cpu":
            rows += bench_host.cpu_host(options.quick)
        else:
            installed = "flashinfer" in options.rivals and find_spec("flashinfer") is not None
            rows += bench_host.gpu_host(installed, options.quick)
    if "compile" in options.ops:
        rows += bench_host.compile_times(options.target, options.quick)
    yield from ({"kind": "host", **row} for row in rows)


def measure(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield every record of a run."""
    if options.target == "cpu":
        from bench_cpu import device_name
    else:
        from bench_gpu import device_name
    yield bench_report.environment(options.target, device_name())
    if options.target == "cuda":
        yield from ceilings(options)
    yield from host_rows(options)
    time_one = time_on_cpu if options.target == "cpu" else time_on_gpu
    for shape in options.shape_list:
        try:
            yield from time_one(shape, options)
        except Exception as error:  # one shape that fails must not cost the others of a long run
            yield left_out(shape, "nbattn", f"{type(error).__name__}: {' '.join(str(error).split())[:300]}")
        finally:
            release(options.target)


def release(target: str) -> None:
    """Give a shape's memory back before the next one."""
    gc.collect()
    if target == "cuda":
        import cupy

        cupy.get_default_memory_pool().free_all_blocks()
        if "torch" in sys.modules:
            sys.modules["torch"].cuda.empty_cache()


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Return the options of a run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--ops", default=",".join(OPS), help=f"comma-separated (default: {','.join(OPS)})")
    parser.add_argument("--shapes", default="grid", help="small, grid, more, several of them, or all")
    parser.add_argument("--threads", default="2", help="thread counts on the CPU, comma-separated")
    parser.add_argument("--rivals", default="all", help="all, none, or names")
    parser.add_argument("--only", default="", help="time only shapes whose name contains this")
    parser.add_argument("--json", help="write JSON lines to this file")
    parser.add_argument("--repeats", type=int)
    parser.add_argument("--quick", action="store_true", help="few repeats: a trial, not a measurement")
    options = parser.parse_args(arguments)
    options.ops = options.ops.split(",")
    if unknown := [op for op in options.ops if op not in OPS]:
        parser.error(f"--ops: must be of {', '.join(OPS)}, got {', '.join(unknown)}")
    if options.target == "cpu":
        from bench_rivals import RIVALS
    else:
        needed("cupy", "'.[cuda13]'")
        from bench_flashinfer import RIVALS
    options.registry = RIVALS
    chosen = {"all": list(RIVALS), "none": []}
    options.rivals = chosen[options.rivals] if options.rivals in chosen else options.rivals.split(",")
    if unknown := [name for name in options.rivals if name not in RIVALS]:
        parser.error(f"--rivals: must be of {', '.join(RIVALS)}, got {', '.join(unknown)}")
    options.threads = [int(n) for n in options.threads.split(",")]
    usual = CPU_REPEATS if options.target == "cpu" else GPU_REPEATS
    options.repeats = options.repeats or (QUICK_REPEATS if options.quick else usual)
    try:
        shapes = shapes_of(options.shapes, options.target)
    except ValueError as error:
        parser.error(f"--{error}")
    options.shape_list = [s for s in shapes if s.op in options.ops and options.only in s.name]
    return options


def main(arguments: list[str] | None = None) -> int:
    """Measure, print the report, write the JSON; 1 if a result of ours was wrong or failed."""
    options = parse(arguments)
    if options.target == "cpu" and "OPENBLAS_CORETYPE" in os.environ:
        print("OPENBLAS_CORETYPE is set and slows NumPy: unset it, and OPENBLAS_L2_SIZE, to compare with NumPy.")
    records = []
    try:
        for record in bench_report.kept(measure(options), options.json):
            records.append(record)
            if record["kind"] == "result":
                print(f"  {record['op']} {record['shape']}: {record['ours_us']:.1f} us", flush=True)
    finally:
        nbattn.set_num_threads(None)
    print(bench_report.report(records))
    return int(any(r["kind"] == "skipped" and r["what"] == "nbattn" for r in records))


if __name__ == "__main__":
    sys.exit(main())

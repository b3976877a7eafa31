"""Check the CUDA target on a GPU: cases, tests, random draws, offsets, graphs, streams, repeats and the sanitizer.

Usage: python scripts/gpu_check.py [--random N] [--seed S] [--repeats N] [--parts a,b] [--jobs N] [--json FILE]

Every part compares with the float64 oracle within the shared error budget; `small_inputs` and `append` run the
project's own tests with their arrays on the GPU, and need pytest. Exits 1 if anything fails.
"""

from __future__ import annotations

import argparse
import datetime
import json
import re
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import nbattn
from nbattn import oracle, testing

ROOT = Path(__file__).resolve().parent.parent
Outcome = dict[str, Any]
TEST_PROCESSES = 8  # of tests on the device at once: most of their time is compilation
CASCADE_OPTIONS: list[dict[str, Any]] = [
    {},
    {"causal": True, "window_left": 5},
    {"causal": True, "pos_encoding_mode": "ALIBI", "logits_soft_cap": 3.0},
    {"causal": True, "pos_encoding_mode": "ROPE_LLAMA"},
]
ROUNDED_TESTS = r"test_(?!p12)[a-z]\d+_"  # head sizes in 16 bits are cases of the table
ROW_TEST = re.compile(r"^def test_[a-z]\d+_", re.MULTILINE)


def on_device(cupy: Any, dtype: Any, *shape: int, seed: int = 0) -> tuple[np.ndarray, Any]:
    """Return random normal numbers on the host and on the device."""
    host = np.random.default_rng(seed).standard_normal(shape).astype(np.float32).astype(dtype)
    return host, cupy.asarray(host)


def table_cases(_: argparse.Namespace) -> Iterator[Outcome]:
    """Run the shared case table in every dtype the device takes."""
    for family, cases in testing.CASES.items():
        for case in cases:
            if case.q_dtype != "float64":
                yield _outcome(case, family)


def random_cases(options: argparse.Namespace) -> Iterator[Outcome]:
    """Draw random cases, all options together."""
    rng = np.random.default_rng(options.seed)
    drawn = 0
    while drawn < options.random:
        case = testing.random_case(testing.FAMILIES[drawn % len(testing.FAMILIES)], rng)
        if case.q_dtype != "float64":
            drawn += 1
            yield _outcome(case, case.family)


def _outcome(case: Any, family: str) -> Outcome:
    name = f"{family}: {case.id}"
    try:
        result = testing.run_case(case, array=testing.to_cupy)
    except nbattn.TargetError as error:  # the one thing a GPU refuses
        refused = "float64" in repr(case)
        return {"name": name, "passed": refused, "share": 0.0, "detail": "" if refused else str(error)}
    detail = "" if result.passed else str(result)
    return {"name": name, "passed": result.passed, "share": result.budget_share, "detail": detail}


def tests_on_device(files: list[Path], pattern: str, *more: str) -> tuple[dict[str, Counter], list[Outcome]]:
    """Run the tests whose names match, one process a file: return counts by test function, and failures."""
    program = ROOT / "scripts" / "on_device.py"

    def run(file: Path) -> Outcome:
        with tempfile.TemporaryDirectory() as folder:
            record = Path(folder) / "tests.json"
            command = [sys.executable, str(program), str(file), "--pattern", pattern, "--json", str(record), *more]
            done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
            if record.exists():
                return json.loads(record.read_text())
            text = (done.stdout + done.stderr)[-3000:]
            return {"counts": {}, "failures": [{"name": f"{file.name}: the process ended", "detail": text}]}

    with ThreadPoolExecutor(TEST_PROCESSES) as pool:
        results = list(pool.map(run, files))
    counts: dict[str, Counter] = {}
    for result in results:
        for name, part in result["counts"].items():
            counts[name] = counts.get(name, Counter()) + Counter(part)
    return counts, [{"passed": False, "share": 0.0, **x} for result in results for x in result["failures"]]


def small_inputs(_: argparse.Namespace) -> Iterator[Outcome]:
    """Run the tests of every row of the list of small inputs; at least one of each row must run on the device."""
    sys.path.insert(0, str(ROOT / "tests"))
    from test_cases_registry import ROWS

    files = [x for x in sorted((ROOT / "tests").rglob("test_*.py")) if ROW_TEST.search(x.read_text())]
    files = [x for x in files if "oracle" not in x.name]
    for dtype in (None, "bfloat16"):  # as they are written, then rounded: the kernels on tensor cores
        more = () if dtype is None else ("--dtype", dtype)
        counts, failures = tests_on_device(files, r"test_[a-z]\d+_" if dtype is None else ROUNDED_TESTS, *more)
        yield from failures
        of_row: dict[str, Counter] = {f"{letter}{i + 1}": Counter() for letter, n in ROWS.items() for i in range(n)}
        for name, part in counts.items():
            for row in re.findall(r"_([a-z]\d+)(?=_)", re.match(r"test(_[a-z]\d+)+_", name)[0]):
                of_row[row.upper()] += part
        for row, part in of_row.items():
            if dtype is None or part:
                detail = ", ".join(f"{n} {what}" for what, n in sorted(part.items())) or "no test"
                name = row if dtype is None else f"{row} in {dtype}"
                passed = part["passed"] > 0 and not part["failed"]
                yield {"name": f"row {name}", "passed": passed, "share": 0.0, "detail": f"{name}: {detail}"}


def append(_: argparse.Namespace) -> Iterator[Outcome]:
    """Run the tests of `append_paged_kv_cache`: every dtype, layout and stride against a plain loop, byte by byte."""
    elsewhere = "a_refused|a_read_only|the_later_of_two"  # messages, host memory, and an order that no GPU has
    counts, failures = tests_on_device([ROOT / "tests" / "test_append.py"], f"test_(?!{elsewhere})")
    yield from failures
    for name, part in counts.items():
        detail = f"{name}: " + ", ".join(f"{n} {what}" for what, n in sorted(part.items()))
        yield {"name": name, "passed": not part["failed"], "share": 0.0, "detail": detail}
    ran = counts.get("test_append_equals_a_plain_loop", Counter())["passed"]
    yield {"name": "append on the device", "passed": ran > 0, "share": 0.0, "detail": f"{ran} random layouts"}


def readme(_: argparse.Namespace) -> Iterator[Outcome]:
    """Run the pages that have CuPy examples, prints compared with their comments, and compare README's result."""
    sys.path.insert(0, str(ROOT / "tests"))
    import test_docs

    for name, page in test_docs.PAGES.items():
        text = page.read_text()
        if not any("import cupy" in code for _, code in test_docs.blocks(text)):
            continue
        namespace: dict[str, Any] = {"__name__": name}
        for first_line, code in test_docs.blocks(text):
            for line, printed, promised in test_docs.run(code, namespace, name, first_line):
                detail = f"printed {printed!r}, promised {promised!r}"
                passed = printed == promised
                yield {"name": f"{name}:{line}", "passed": passed, "share": 0.0, "detail": "" if passed else detail}
        if name == "README.md":
            q, kv = namespace["q"], namespace["kv"]
            expected = testing.expect(oracle.paged_attention, q, kv)
            result = testing.compare(namespace["out_gpu"], expected.out, expected.out_budget, "out_gpu")
            yield {"name": "README.md: out_gpu", "passed": result.passed, "share": result.share,
                   "detail": "" if result.passed else str(result)}  # fmt: skip


def large_offsets(_: argparse.Namespace) -> Iterator[Outcome]:
    """Read pages beyond element 2**31; only the touched ones are written."""
    import cupy

    pages, page_size, heads, dim = 140_000, 16, 8, 128  # 2.3e9 elements of K
    k = cupy.empty((pages, page_size, heads, dim), cupy.float16)
    ids = np.array([[pages - 1, 3, pages - 2]], np.int32)
    lens = np.array([41], np.int32)
    small_k, _ = on_device(cupy, np.float16, 3, page_size, heads, dim)
    for i, page in enumerate(ids[0]):
        k[int(page)] = cupy.asarray(small_k[i])
    q, q_device = on_device(cupy, np.float16, 1, 32, dim, seed=1)
    kv = nbattn.PagedKV.from_block_table(k, k, ids, lens)
    small = nbattn.PagedKV.from_block_table(small_k, small_k, np.arange(3, dtype=np.int32)[None], lens)
    tokens = np.arange(41, dtype=np.int32)[None]
    calls: dict[str, tuple[Callable[[], Any], Callable[..., Any], tuple]] = {
        "decode": (lambda: nbattn.paged_attention(q_device, kv, return_lse=True), oracle.paged_attention, (q, small)),
        "gather": (
            lambda: nbattn.gather_attention(
                q_device, kv, cupy.asarray(tokens), cupy.asarray(np.array([41], np.int32)), return_lse=True
            ),
            oracle.gather_attention,
            (q, small, tokens, np.array([41], np.int32)),
        ),
    }
    for name, (run, define, arguments) in calls.items():
        expected = testing.expect(define, *arguments)
        yield _compare(f"page id x page stride > 2^31, {name}", run(), expected)


def _compare(name: str, actual: Any, expected: Any) -> Outcome:
    out = testing.compare(actual[0], expected.out, expected.out_budget, "out")
    lse = testing.compare(actual[1], expected.lse, expected.lse_budget, "lse")
    passed = out.passed and lse.passed
    return {
        "name": name,
        "passed": passed,
        "share": max(out.share, lse.share),
        "detail": "" if passed else f"{out} {lse}",
    }


def _decode_problem(lens: list[int], seed: int = 0) -> tuple[Any, ...]:
    import cupy

    k, k_device = on_device(cupy, np.float16, 200, 16, 2, 64, seed=seed)
    q, q_device = on_device(cupy, np.float16, len(lens), 8, 64, seed=seed + 1)
    table = np.random.default_rng(seed).integers(0, 200, (len(lens), 40)).astype(np.int32)
    lengths = np.array(lens, np.int32)
    host = nbattn.PagedKV.from_block_table(k, k, table, lengths)
    device = nbattn.PagedKV.from_block_table(k_device, k_device, cupy.asarray(table), lengths)
    return q, host, q_device, device


def graphs(_: argparse.Namespace) -> Iterator[Outcome]:
    """Plan, capture, update the plan with longer lengths, replay (case P14)."""
    import cupy

    q, host, q_device, device = _decode_problem([100, 7, 300])
    _, longer_host, _, longer_device = _decode_problem([101, 8, 600])
    plan = nbattn.plan(device, num_qo_heads=8, max_kv_len=640)
    out = cupy.empty(q_device.shape, q_device.dtype)
    lse = cupy.empty(q_device.shape[:2], np.float32)
    nbattn.paged_attention(q_device, device, plan=plan, out=out, lse=lse)
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        stream.begin_capture()
        nbattn.paged_attention(q_device, device, plan=plan, out=out, lse=lse)
        graph = stream.end_capture()
        for name, define in (("as captured", host), ("after Plan.update", longer_host)):
            if define is longer_host:
                plan.update(longer_device)
            out.fill(np.nan)
            graph.launch(stream)
            stream.synchronize()
            yield _compare(f"graph replay {name}", (out, lse), testing.expect(oracle.paged_attention, q, define))
    yield from _gather_graph()
    for options in CASCADE_OPTIONS:
        yield from _cascade_graph(options)


def _cascade_graph(options: dict[str, Any]) -> Iterator[Outcome]:
    """Capture a cascade wrapper's run, plan it for other tables, replay."""
    import cupy

    sys.path.insert(0, str(ROOT / "tests" / "cascade"))
    from level_setup import Setup

    rows = (0, 2, 3, 7)
    steps = [((13,), (9, 1, 4)), ((9,), (4, 8, 17)), ((40,), (90, 0, 33)), ((210,), (180, 5, 40))]
    built = [
        Setup((((0, 7), shared), (rows, own)), dtype="float16", seed=seed).build()
        for seed, (shared, own) in enumerate(steps)
    ]
    room = [[cupy.zeros(64, np.int32) for _ in range(2)] for _ in range(4)]
    wrapper = nbattn.MultiLevelCascadeAttentionWrapper(2, None, "NHD", True, *room)
    sizes = {"num_qo_heads": 6, "num_kv_heads": 2, "head_dim": 16, "page_size": 4}
    pages = cupy.zeros((max(len(cache) for _, cache, _ in built), *built[0][1].shape[1:]), np.float16)
    q_device = cupy.zeros(built[0][0].shape, np.float16)
    out, lse = cupy.empty_like(q_device), cupy.empty(q_device.shape[:2], np.float32)
    stream, graph = cupy.cuda.Stream(non_blocking=True), None
    for step, (q, cache, lists) in enumerate(built):
        wrapper.plan(*lists, **sizes, **options)
        pages[: len(cache)].set(cache)
        q_device.set(q)
        out.fill(np.nan)
        cupy.cuda.get_current_stream().synchronize()
        if graph is None:
            wrapper.run(q_device, pages, out=out, lse=lse)
            cupy.cuda.get_current_stream().synchronize()
            with stream:
                stream.begin_capture()
                wrapper.run(q_device, pages, out=out, lse=lse)
                graph = stream.end_capture()
        graph.launch(stream)
        stream.synchronize()
        expected = testing.expect(oracle.multi_level_cascade, q, cache, *lists, **options)
        yield _compare(f"cascade wrapper {options}, replay {step}", (out, lse), expected)


def _gather_graph() -> Iterator[Outcome]:
    """Run a gather once, capture it, replay it with other lists in the same array."""
    import cupy

    q, host, q_device, device = _decode_problem([100, 7, 600])
    rng = np.random.default_rng(2)
    counts = np.array([700, 0, 650], np.int32)
    counts_device, lists_device = cupy.asarray(counts), cupy.empty((3, 700), np.int32)
    out, lse = cupy.empty(q_device.shape, q_device.dtype), cupy.empty(q_device.shape[:2], np.float32)
    for k_scale in (None, np.array([[0.5], [2.0]], np.float32)):
        scale = None if k_scale is None else cupy.asarray(k_scale)

        def call(scale: Any = scale) -> None:
            nbattn.gather_attention(q_device, device, lists_device, counts_device, k_scale=scale, out=out, lse=lse)

        lists_device.fill(0)
        call()
        stream = cupy.cuda.Stream(non_blocking=True)
        cupy.cuda.get_current_stream().synchronize()
        with stream:
            stream.begin_capture()
            call()
            graph = stream.end_capture()
            others = [cupy.full((1 << n,), np.nan, np.float32) for n in range(8, 20)]  # would take freed scratch
            for turn in range(2):
                lists = rng.integers(-1, 620, (3, 700)).astype(np.int32)
                lists_device.set(lists)
                out.fill(np.nan)
                graph.launch(stream)
                stream.synchronize()
                expected = testing.expect(oracle.gather_attention, q, host, lists, counts, k_scale=k_scale)
                yield _compare(f"gather, replay {turn}, k_scale {k_scale}", (out, lse), expected)
            intact = all(bool(cupy.isnan(x).all()) for x in others)
            yield {"name": "memory beside a graph's", "passed": intact, "share": 0.0, "detail": ""}


def streams(_: argparse.Namespace) -> Iterator[Outcome]:
    """Run on two streams at once, and with lengths that a kernel launched just before writes (case P15)."""
    import cupy

    problems = [_decode_problem([500, 3, 77, 0], seed=5), _decode_problem([64, 600], seed=9)]
    expected = [testing.expect(oracle.paged_attention, q, host) for q, host, _, _ in problems]
    lanes = [cupy.cuda.Stream(non_blocking=True) for _ in problems]
    results: list[list[Any]] = [[], []]
    cupy.cuda.get_current_stream().synchronize()
    for _ in range(20):
        for i, (_, _, q_device, device) in enumerate(problems):
            with lanes[i]:
                results[i].append(nbattn.paged_attention(q_device, device, return_lse=True))
    for lane in lanes:
        lane.synchronize()
    for i in range(2):
        worst = [_compare(f"stream {i}", actual, expected[i]) for actual in results[i]]
        yield max(worst, key=lambda x: (not x["passed"], x["share"]))
    _, _, q_device, device = problems[0]
    k_device, table = device.k, device.kv_indices.reshape(4, 40)
    lens = cupy.zeros(4, cupy.int32)
    lens += cupy.asarray(np.array([500, 3, 77, 0], np.int32))
    late = nbattn.PagedKV.from_block_table(k_device, k_device, table, lens)
    yield _compare("lengths written just before", nbattn.paged_attention(q_device, late, return_lse=True), expected[0])


def repeats(options: argparse.Namespace) -> Iterator[Outcome]:
    """Repeat calls into poisoned buffers: the bits must be the same."""
    import cupy

    for seed, lens in ((0, [633, 1, 0, 250]), (3, [5]), (4, [600] * 12)):
        _, _, q_device, device = _decode_problem(lens, seed)
        first = None
        same = True
        for _ in range(options.repeats):
            out = cupy.full(q_device.shape, np.nan, q_device.dtype)
            nbattn.paged_attention(q_device, device, out=out)
            bits = out.get().tobytes()
            first = bits if first is None else first
            same &= bits == first
        name = f"{options.repeats} repeats of {len(lens)} requests"
        yield {"name": name, "passed": bool(same), "share": 0.0, "detail": "" if same else "bits differ"}


def sanitizer(_: argparse.Namespace) -> Iterator[Outcome]:
    """Run compute-sanitizer memcheck and racecheck over a few small cases."""
    tool = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    if not Path(tool).exists():
        yield {
            "name": "compute-sanitizer",
            "passed": True,
            "share": 0.0,
            "detail": "not run: the tool is not installed",
        }
        return
    for check in ("memcheck", "racecheck"):
        command = [tool, "--tool", check, "--error-exitcode", "9", sys.executable, __file__, "--parts", "few", "--here"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
        tail = (done.stdout + done.stderr).strip().splitlines()[-6:]
        yield {"name": f"compute-sanitizer {check}", "passed": done.returncode == 0, "share": 0.0,
               "detail": " | ".join(tail)}  # fmt: skip


def few_cases(_: argparse.Namespace) -> Iterator[Outcome]:
    """Run a handful of small cases, for the sanitizer."""
    for family, cases in testing.CASES.items():
        chosen = [case for case in cases if case.q_dtype != "float64"][:: max(1, len(cases) // 4)]
        for case in chosen:
            yield _outcome(case, family)
    yield from _few_strided()


def _few_strided() -> Iterator[Outcome]:
    """Gather, prefill, merge and append on views whose rows start at odd addresses, with NaN in every gap."""
    rng = np.random.default_rng(11)

    def normal(*shape: int, dtype: Any = np.float16) -> np.ndarray:
        return testing.spread(rng.standard_normal(shape).astype(np.float32).astype(dtype), rng)

    k, v = normal(9, 16, 2, 64), normal(9, 16, 2, 64)
    table, lens, offsets = rng.permutation(9)[:8].reshape(2, 4).astype(np.int32), np.array([61, 30]), [0, 40, 53]
    host = nbattn.PagedKV.from_block_table(k, v, table, lens)
    device = nbattn.PagedKV.from_block_table(testing.to_cupy(k), testing.to_cupy(v), testing.to_cupy(table), lens)
    q, rows = normal(53, 8, 64), np.array(offsets, np.int32)
    lists, counts = rng.integers(-1, 64, (53, 21)).astype(np.int32), rng.integers(0, 22, 53).astype(np.int32)
    actual = nbattn.paged_attention(testing.to_cupy(q), device, rows, return_lse=True)
    yield _compare("prefill, odd strides", actual, testing.expect(oracle.paged_attention, q, host, rows))
    moved = [testing.to_cupy(x) for x in (q, lists, counts)]
    actual = nbattn.gather_attention(moved[0], device, *moved[1:], rows, return_lse=True)
    yield _compare("gather, odd strides", actual, testing.expect(oracle.gather_attention, q, host, lists, counts, rows))
    states = [normal(5, 3, 72), normal(5, 3, dtype=np.float32), normal(5, 3, 72), normal(5, 3, dtype=np.float32)]
    actual = nbattn.merge_state(*(testing.to_cupy(x) for x in states))
    yield _compare("merge_state, odd strides", actual, testing.expect(oracle.merge_state, *states))
    key, value = normal(3, 2, 64), normal(3, 2, 64)
    places = np.array([0, 1, 0], np.int32), np.array([60, 29, 3], np.int32)
    pages = table[[0, 0, 1, 1], [0, 3, 0, 1]]  # request 0 owns two pages here, request 1 the others
    arrays = pages, np.array([0, 2, 4], np.int32), np.array([16, 16], np.int32)
    places[1][:] = 17, 29, 3
    moved_cache = testing.to_cupy(k), testing.to_cupy(v)
    nbattn.append_paged_kv_cache(
        *(testing.to_cupy(x) for x in (key, value, *places)), moved_cache, *(testing.to_cupy(x) for x in arrays)
    )
    nbattn.append_paged_kv_cache(key, value, *places, (k, v), *arrays)
    same = all(np.array_equal(x.get(), y) for x, y in zip(moved_cache, (k, v), strict=True))
    yield {"name": "append, odd strides", "passed": same, "share": 0.0, "detail": "" if same else "bytes differ"}


PARTS: dict[str, Callable[[argparse.Namespace], Iterator[Outcome]]] = {
    "table": table_cases,
    "small_inputs": small_inputs,
    "append": append,
    "readme": readme,
    "random": random_cases,
    "offsets": large_offsets,
    "graphs": graphs,
    "streams": streams,
    "repeats": repeats,
    "sanitizer": sanitizer,
    "few": few_cases,
}
DEFAULT_PARTS = "table,small_inputs,append,readme,offsets,graphs,streams,repeats,random,sanitizer"


def environment() -> Outcome:
    """Return what a record needs to be read later."""
    import cupy
    import numba

    properties = cupy.cuda.runtime.getDeviceProperties(cupy.cuda.runtime.getDevice())
    return {
        "device": properties["name"].decode(),
        "driver": cupy.cuda.runtime.driverGetVersion(),
        "runtime": cupy.cuda.runtime.runtimeGetVersion(),
        "cupy": cupy.__version__,
        "numba": numba.__version__,
        "numpy": np.__version__,
        "python": sys.version.split()[0],
        "nbattn": nbattn.__version__,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": "python scripts/gpu_check.py " + " ".join(sys.argv[1:]),
    }


def run_part(name: str, options: argparse.Namespace) -> Outcome:
    """Run one part in this process; an exception in it is a failure."""
    start = time.perf_counter()
    outcomes: list[Outcome] = []
    checks = PARTS[name](options)
    while True:
        try:
            outcomes.append(next(checks))
        except StopIteration:
            break
        except Exception:
            text = traceback.format_exc()
            stop = f"{name} stopped after {len(outcomes)} checks"
            outcomes.append({"name": stop, "passed": False, "share": 0.0, "detail": text})
            break
    failed = [x for x in outcomes if not x["passed"]]
    return {
        "checks": len(outcomes),
        "failed": len(failed),
        "worst_share_of_budget": round(float(max((x["share"] for x in outcomes), default=0.0)), 3),
        "seconds": round(time.perf_counter() - start, 1),
        "failures": failed[:20],
        "notes": [x["detail"] for x in outcomes if x["passed"] and x["detail"]],
    }


def in_own_process(name: str, arguments: list[str]) -> Outcome:
    """Run one part in a process of its own: after an illegal access a CUDA context is lost."""
    with tempfile.TemporaryDirectory() as folder:
        record = Path(folder) / "part.json"
        command = [sys.executable, __file__, *arguments, "--parts", name, "--here", "--json", str(record)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if record.exists():
            return json.loads(record.read_text())["parts"][name]
        text = (done.stdout + done.stderr)[-3000:]
        return {"checks": 1, "failed": 1, "worst_share_of_budget": 0.0, "seconds": 0.0, "notes": [],
                "failures": [{"name": f"{name}: the process ended", "detail": text}]}  # fmt: skip


def main() -> int:
    """Run the parts and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--random", type=int, default=200, metavar="N", help="random cases (default 200)")
    parser.add_argument("--seed", type=int, default=1, help="seed of the random cases")
    parser.add_argument("--repeats", type=int, default=100, help="repeats of the bitwise comparison")
    parser.add_argument("--parts", default=DEFAULT_PARTS, help=f"comma-separated, of {', '.join(PARTS)}")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="parts that run at once (default 1)")
    parser.add_argument("--here", action="store_true", help="run the parts in this process")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the record")
    options = parser.parse_args()
    passed_on = ["--random", str(options.random), "--seed", str(options.seed), "--repeats", str(options.repeats)]
    record: Outcome = {"environment": environment(), "parts": {}}
    failures = 0
    names = options.parts.split(",")
    if options.here:
        parts = (run_part(name, options) for name in names)
    else:
        parts = ThreadPoolExecutor(options.jobs).map(lambda name: in_own_process(name, passed_on), names)
    for name, part in zip(names, parts, strict=True):
        record["parts"][name] = part
        failures += part["failed"]
        for x in part["failures"][:5]:
            print(f"FAIL {x['name']}\n{x['detail'][-1500:]}", flush=True)
        print(
            f"{name:<10} {part['checks']:>5} checks {part['failed']:>4} failed   worst error/budget "
            f"{part['worst_share_of_budget']:6.3f}   {part['seconds']:6.1f} s",
            flush=True,
        )
        if options.json:
            options.json.write_text(json.dumps(record, indent=1) + "\n")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())

"""The project's own tests and pages, run with their arrays on the GPU; they need pytest."""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from gpu_check_cases import Outcome

from nbattn import oracle, testing

ROOT = Path(__file__).resolve().parent.parent
TEST_PROCESSES = 8  # of tests on the device at once: most of their time is compilation
ROUNDED_TESTS = r"test_(?!p12|m7_float64)[a-z]\d+_"  # head sizes in 16 bits are cases of the table, 16 bits no float64
ROW_TEST = re.compile(r"^def test_[a-z]\d+_", re.MULTILINE)


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

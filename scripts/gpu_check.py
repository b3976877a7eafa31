"""Check the CUDA target on a GPU: cases, tests, random draws, offsets, graphs, streams, repeats and the sanitizer.

Usage: python scripts/gpu_check.py [--random N] [--seed S] [--repeats N] [--parts a,b] [--jobs N] [--json FILE]

Every part compares with the float64 oracle within the shared error budget; `small_inputs` and `append` run the
project's own tests with their arrays on the GPU, and need pytest. Exits 1 if anything fails.
"""

from __future__ import annotations

import argparse
import datetime
import json
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # a checkout without an installation will do

import numpy as np
from extra_packages import needed
from gpu_check_cases import Outcome, few_cases, random_cases, table_cases
from gpu_check_launches import graphs, large_offsets, repeats, streams
from gpu_check_tests import append, readme, small_inputs

import nbattn


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
    import numba

    cupy = needed("cupy", "'.[cuda13]'")

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

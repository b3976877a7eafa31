"""Numeric validation: every operator in every dtype and layout against the float64 oracle.

The error of each check is held to a budget (stated in `nbattn.testing.budget`). The table has a line for every operator
and pair of dtypes (q/cache) with the check that came closest to its budget; the worst stands last.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from nbattn import external, real_inputs
from nbattn.errors import ContractError
from nbattn.validation import Check, Outcome, all_checks, run_check, run_checks, table


def parser() -> argparse.ArgumentParser:
    """Return the command line's definition."""
    made = argparse.ArgumentParser(
        prog="python -m nbattn validate", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=external.HELP,
    )  # fmt: skip
    made.add_argument("--ops", metavar="A,B", help="only these operators (see --list)")
    made.add_argument("--dtypes", metavar="A,B", help="only these dtypes: bfloat16, int8 (any q), float32/int8")
    made.add_argument("--case", metavar="ID", help="replay one check by its id and print its repr")
    made.add_argument("--list", action="store_true", help="print the ids of all checks and stop")
    made.add_argument("--json", metavar="FILE", type=Path, help="write every outcome as JSON")
    made.add_argument("--jobs", type=int, metavar="N", help="processes (default: 2, or 1 on one core)")
    made.add_argument("--tensors", metavar="FILE.npz", type=Path, help="check your own tensors instead, see below")
    return made


def main(arguments: list[str] | None = None) -> int:
    """Validate and return the exit status: 0 if everything passed, 1 if anything failed, 2 for a wrong argument."""
    options = parser().parse_args(arguments)
    if options.tensors is not None:
        return external.check_file(options.tensors)
    root = real_inputs.checkout()
    checks = all_checks(root)
    try:
        checks = selected(checks, options)
    except ContractError as error:
        print(f"nbattn validate: {error}", file=sys.stderr)
        return 2
    if options.list:
        print("\n".join(check.id for check in checks))
        return 0
    if options.case is not None:
        return replay(checks[0])
    begin = time.perf_counter()
    outcomes = []
    jobs = options.jobs or min(2, os.cpu_count() or 1)
    with progress(checks) as advance:
        for outcome in run_checks(checks, jobs):
            outcomes.append(outcome)
            advance(outcome)
    print_report(outcomes, time.perf_counter() - begin)
    if root is None:
        print("Real inputs (a model's tensors, a request trace) are in the repository: run this in a checkout.")
    if options.json is not None:
        options.json.write_text(json.dumps([outcome.as_json() for outcome in outcomes], indent=1) + "\n")
    return int(not outcomes or any(not outcome.passed for outcome in outcomes))


def selected(checks: list[Check], options: argparse.Namespace) -> list[Check]:
    """Return the checks that the options ask for.

    Raises
    ------
    ContractError
        If an option names something that is not there.
    """
    if options.case is not None:
        found = [check for check in checks if options.case in (check.id, repr(check))]
        if not found:
            raise ContractError(f"--case: must be the id of a check, got {options.case!r}. --list prints them.")
        return found[:1]
    for name, words in (("--ops", _ops), ("--dtypes", _dtypes)):
        asked = getattr(options, name[2:])
        if asked is None:
            continue
        known = sorted({word for check in checks for word in words(check)})
        for word in asked.split(","):
            if word not in known:
                raise ContractError(f"{name}: must be some of {', '.join(known)}, got {word!r}.")
        checks = [check for check in checks if words(check) & set(asked.split(","))]
    return checks


def _ops(check: Check) -> set[str]:
    return {check.op}


def _dtypes(check: Check) -> set[str]:
    return {check.kv_dtype, f"{check.q_dtype}/{check.kv_dtype}"}


def replay(check: Check) -> int:
    """Run one check and print its repr and comparisons."""
    print(repr(check))
    outcome = run_check(check)
    print(outcome.report)
    print(f"{'passed' if outcome.passed else 'FAILED'}: {outcome.share:.3f} of the budget")
    return int(not outcome.passed)


@contextmanager
def progress(checks: list[Check]) -> Iterator[Any]:
    """Yield a function to call with each outcome: a bar on a terminal (rich's if it is installed), else lines."""
    if not sys.stderr.isatty():
        yield _progress_lines(checks)
        return
    total = len(checks)
    try:
        from rich.console import Console
        from rich.progress import Progress
    except ImportError:
        yield _plain_progress(total)
        print(file=sys.stderr)
        return
    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("validating", total=total)
        yield lambda outcome: bar.update(task, advance=1, description=f"{outcome.check.op:<32}")


def _progress_lines(checks: list[Check]) -> Any:
    """Return what prints a line for every operator and pair of dtypes as soon as all its checks have run."""
    left = Counter(map(_group, checks))
    begin, done = time.perf_counter(), 0

    def advance(outcome: Outcome) -> None:
        nonlocal done
        done += 1
        group = _group(outcome.check)
        left[group] -= 1
        if not left[group]:
            seconds = time.perf_counter() - begin
            print(f"{done}/{len(checks)} checks, {seconds:.0f} s: {group} done", file=sys.stderr, flush=True)

    return advance


def _group(check: Check) -> str:
    return f"{check.op} {check.q_dtype}/{check.kv_dtype}"


def _plain_progress(total: int) -> Any:
    done = 0

    def advance(outcome: Outcome) -> None:
        nonlocal done
        done += 1
        filled = 30 * done // total
        bar = "#" * filled + "." * (30 - filled)
        print(f"\r[{bar}] {done}/{total} {outcome.check.op:<32}", end="", file=sys.stderr, flush=True)

    return advance


def print_report(outcomes: Iterable[Outcome], seconds: float) -> None:
    """Print the table, the failures, and the worst check of all."""
    rows = table(outcomes)
    width = max((len(row.op) for row in rows), default=8) + 2
    print(f"{'operator':<{width}}{'q/cache':<24}{'checks':>7}{'failed':>8}{'error':>11}{'budget':>11}{'of budget':>11}")
    for row in rows:
        worst = row.worst
        numbers = f"{worst.error:>11.2e}{worst.budget:>11.2e}{worst.share:>11.3f}"
        print(f"{row.op:<{width}}{row.dtypes:<24}{len(row.outcomes):>7}{row.failed:>8}{numbers}")
    for outcome in (outcome for row in rows for outcome in row.outcomes if not outcome.passed):
        print(f"\nFAILED {outcome.check.id}\n{outcome.check!r}\n{outcome.report}")
    count, failed = sum(len(row.outcomes) for row in rows), sum(row.failed for row in rows)
    if rows:
        worst = rows[-1].worst
        print(f"\nworst: {worst.check.id}\n       error {worst.error:.3e} of a budget of {worst.budget:.3e}")
    print(f"{count} checks, {failed} failed, {seconds:.0f} s")


if __name__ == "__main__":
    sys.exit(main())

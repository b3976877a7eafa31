"""The checks behind ``python -m nbattn validate``: which there are, how they run, what they came to."""

from __future__ import annotations

import multiprocessing
import queue
import time
import warnings
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

from nbattn.testing import CASES, Case, Comparison, run_case

QUANTIZED = ("float8_e4m3fn", "float8_e5m2", "int8")
DTYPES = (  # q, cache: what a kernel is compiled for is the cache's
    *((dtype, dtype) for dtype in ("float16", "bfloat16", "float32", "float64")),
    *((q, kv) for kv in QUANTIZED for q in ("bfloat16", "float16", "float32")),
)


class Check(Protocol):
    """Anything that can be validated; what it compares is named by `op` and dtypes."""

    @property
    def op(self) -> Any:
        """The operator's name."""

    @property
    def q_dtype(self) -> Any:
        """The name of q's dtype."""

    @property
    def kv_dtype(self) -> Any:
        """The name of the cache's dtype, or None where it is q's."""

    @property
    def id(self) -> str:
        """A readable name, unique among all checks."""

    def run(self) -> list[Comparison]:
        """Run it and return its comparisons."""


@dataclass(frozen=True)
class CaseCheck:
    """A case of `nbattn.testing`."""

    case: Case

    @property
    def op(self) -> str:
        """The function's name."""
        return self.case.family

    @property
    def q_dtype(self) -> str:
        """Dtype of q."""
        return self.case.q_dtype

    @property
    def kv_dtype(self) -> str:
        """Dtype of the cache."""
        return getattr(self.case, "kv_dtype", None) or self.case.q_dtype

    @property
    def id(self) -> str:
        """The case's own."""
        return self.case.id

    def run(self) -> list[Comparison]:
        """Run the case against the oracle."""
        result = run_case(self.case)
        if not result.guarded:
            raise AssertionError("rows beside a given out or lse were written")
        return [result.out, result.lse]

    def __repr__(self) -> str:
        return repr(self.case)


@dataclass(frozen=True)
class Outcome:
    """What a check came to.

    Attributes
    ----------
    error, budget : float, of the comparison that used most of its budget
    share : float, ``error / budget``, infinite if the check could not run
    report : str, the comparisons or the exception as text
    """

    check: Check
    passed: bool
    error: float
    budget: float
    share: float
    seconds: float
    report: str = ""

    def as_json(self) -> dict[str, Any]:
        """Return plain values; infinities become None."""
        check = self.check
        finite = {name: x if abs(x := getattr(self, name)) < float("inf") else None for name in ("error", "share")}
        return {
            "id": check.id, "repr": repr(check), "op": check.op, "q_dtype": check.q_dtype, "kv_dtype": check.kv_dtype,
            "passed": self.passed, **finite, "budget": self.budget, "seconds": round(self.seconds, 4),
            "report": self.report,
        }  # fmt: skip


def all_checks(root: Any = None) -> list[Check]:
    """Return every check: the table of cases in every dtype, and with the `root` of a checkout the real inputs."""
    found: dict[str, Check] = {}
    for family, cases in CASES.items():
        dtypes: Iterable[tuple[str, str]] = DTYPES
        if family == "merge":
            dtypes = [pair for pair in DTYPES if pair[0] == pair[1]]
        if family == "generic_cross_attention_kv_cache":  # it has no scales
            dtypes = [pair for pair in DTYPES if pair[1] != "int8"]
        for q_dtype, kv_dtype in dtypes:
            for case in cases:
                check = CaseCheck(case.with_dtypes(q_dtype, None if q_dtype == kv_dtype else kv_dtype))
                found[check.id] = check
    if root is not None:
        from nbattn import real_inputs

        for real in real_inputs.checks(root):
            found[real.id] = real
    return list(found.values())


def run_check(check: Check) -> Outcome:
    """Run a check; an exception or a warning is a failure like any other."""
    begin = time.perf_counter()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            comparisons = check.run()
    except Exception as error:
        took = time.perf_counter() - begin
        return Outcome(check, False, float("inf"), 0.0, float("inf"), took, f"{type(error).__name__}: {error}")
    worst = max(comparisons, key=lambda comparison: comparison.share)
    return Outcome(
        check, all(c.passed for c in comparisons), worst.max_error, worst.budget, worst.share,
        time.perf_counter() - begin, "\n".join(map(str, comparisons)),
    )  # fmt: skip


def run_checks(checks: list[Check], jobs: int) -> Iterator[Outcome]:
    """Yield outcomes as they come, from `jobs` processes: each compiles the kernels of its own cache dtypes."""
    groups: dict[str, list[Check]] = defaultdict(list)
    for check in checks:
        groups[check.kv_dtype].append(check)
    if jobs <= 1 or len(groups) <= 1:
        for group in groups.values():
            yield from map(run_check, group)
        return
    shares: list[list[Check]] = [[] for _ in range(min(jobs, len(groups)))]
    for group in sorted(groups.values(), key=len, reverse=True):
        min(shares, key=len).extend(group)
    context = multiprocessing.get_context("spawn")  # a fork would copy locks that other threads hold
    outcomes: Any = context.Queue()
    workers = [context.Process(target=_work, args=(share, outcomes), daemon=True) for share in shares]
    for worker in workers:
        worker.start()
    waiting = {check.id: check for check in checks}
    try:
        while waiting:
            try:
                outcome = outcomes.get(timeout=1.0)
            except queue.Empty:
                if any(worker.is_alive() for worker in workers):
                    continue
                for check in waiting.values():
                    codes = [worker.exitcode for worker in workers]
                    report = f"its process died (exit codes {codes})"
                    yield Outcome(check, False, float("inf"), 0.0, float("inf"), 0.0, report)
                return
            waiting.pop(outcome.check.id)
            yield outcome
    finally:
        for worker in workers:
            worker.terminate()
            worker.join()


def _work(checks: list[Check], outcomes: Any) -> None:
    for check in checks:
        outcomes.put(run_check(check))


@dataclass
class Row:
    """A line of the table: the checks of one operator in one pair of dtypes."""

    op: str
    dtypes: str
    outcomes: list[Outcome] = field(default_factory=list)

    @property
    def worst(self) -> Outcome:
        """The outcome that used most of its budget."""
        return max(self.outcomes, key=lambda outcome: outcome.share)

    @property
    def failed(self) -> int:
        """How many did not pass."""
        return sum(not outcome.passed for outcome in self.outcomes)


def table(outcomes: Iterable[Outcome]) -> list[Row]:
    """Return the rows of the table, the worst last."""
    rows: dict[tuple[str, str], Row] = {}
    for outcome in outcomes:
        check = outcome.check
        dtypes = check.q_dtype if check.q_dtype == check.kv_dtype else f"{check.q_dtype}/{check.kv_dtype}"
        rows.setdefault((check.op, dtypes), Row(check.op, dtypes)).outcomes.append(outcome)
    return sorted(rows.values(), key=lambda row: (row.failed > 0, row.worst.share))

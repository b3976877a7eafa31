"""Run a case through a function and hold the result to its budget."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from nbattn import oracle
from nbattn.testing.budget import Comparison, compare, expect, to_host
from nbattn.testing.cases import GUARD_ROWS, UNTOUCHED, Case


@dataclass(frozen=True)
class Result:
    """What a case came to.

    Attributes
    ----------
    case : the case, whose `repr` is the repro
    out, lse : Comparison, with the largest error, its coordinates and the budget
    guarded : bool, no byte beside a given out or lse has changed
    """

    case: Case
    out: Comparison
    lse: Comparison
    guarded: bool = True

    @property
    def passed(self) -> bool:
        """True if both are within their budgets and nothing was written beside them."""
        return self.out.passed and self.lse.passed and self.guarded

    @property
    def budget_share(self) -> float:
        """The larger of the two errors as a fraction of its budget; below 1 where both are within."""
        return max(part.share for part in (self.out, self.lse))

    def __str__(self) -> str:
        """Return the repro and one line for each of out and lse."""
        lines = [repr(self.case), str(self.out), str(self.lse)]
        return "\n".join(lines if self.guarded else [*lines, "rows beside a given out or lse were written"])


def merged_in_place(v: np.ndarray, s: np.ndarray, *args: Any, **kwargs: Any) -> tuple[np.ndarray, np.ndarray]:
    """Return what `oracle.merge_state_in_place` leaves in float64 copies of `v` and `s`."""
    v, s = v.astype(np.float64), s.astype(np.float64)
    oracle.merge_state_in_place(v, s, *args, **kwargs)
    return v, s


def run_case(
    case: Case, run: Callable[..., Any] | None = None, array: Callable[[np.ndarray], Any] = np.asarray
) -> Result:
    """Build `case`, call `run` on it, and compare with the oracle.

    Parameters
    ----------
    case : Case
    run : callable with the signature of the function that `case.family` names; None is nbattn's own
    array : moves a NumPy array to where `run` wants it, e.g. `nbattn.testing.to_cupy`

    Returns
    -------
    Result

    Examples
    --------
    >>> from nbattn import oracle, testing
    >>> testing.run_case(testing.MergeCase(), oracle.merge_states).passed
    True
    """
    run = case.function() if run is None else run
    problem = case.build(array)
    result = run(*problem.args, **problem.kwargs)  # before the oracle: nothing of the answer lies in memory yet
    actual = problem.args[:2] if result is None else result
    define = merged_in_place if result is None else getattr(oracle, case.family)
    expected = expect(define, *problem.oracle_args, out_dtype=case.out_dtype, **problem.oracle_kwargs)
    guarded = all(
        bool((to_host(part) == UNTOUCHED).all())
        for guard in problem.guards
        for part in (guard[:GUARD_ROWS], guard[-GUARD_ROWS:])
    )
    return Result(
        case,
        compare(actual[0], expected.out, expected.out_budget, "out"),
        compare(actual[1], expected.lse, expected.lse_budget, "lse"),
        guarded,
    )

"""The error budget, stated once, and a comparison that says where a result breaks it.

For `out`, with ``u = 2^-24`` (``2^-53`` for float64 inputs)::

    err <= 2 * err(float64 with exactly the path's allowed roundings) + 8 * u * (1 + max|s|) * max|v|

and for `lse`, ``b`` being 1 for natural units and ``1 / ln 2`` for base 2::

    err <= 2 * err(the same, for lse) + 8 * u * ((1 + max|s|) * b + max|lse|)

Errors are maxima over an array; ``max|s|`` runs over kept logits (sinks included), ``max|v|`` over kept values. Logits
count before a soft cap as well: a dot product is rounded in proportion to its own size, and the cap's slope of 1 keeps
that error (measured: a float64 dot of 128 terms under a cap of 0.5 is 1.13 times over a budget without it).
The last term of lse: its logarithm and its own rounding err in proportion to it (measured: sequential float32 sums over
135 equal weights are 1.6 times over a budget without it).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from nbattn.arrays import dtype_from_name, is_float
from nbattn.errors import ContractError
from nbattn.oracle.score_pipeline import Extremes, Rounding


@dataclass(frozen=True)
class Expected:
    """What a path should return, and how far it may be off.

    Attributes
    ----------
    out, lse : float64 arrays
    out_budget, lse_budget : the largest allowed absolute errors
    """

    out: np.ndarray
    lse: np.ndarray
    out_budget: float
    lse_budget: float


@dataclass(frozen=True)
class Comparison:
    """How `actual` compares with `expected`: the worst element and the count of elements over the budget."""

    name: str
    max_error: float
    budget: float
    worst: tuple[int, ...]
    actual: float
    expected: float
    over: int
    size: int

    @property
    def passed(self) -> bool:
        """True if no element is over the budget."""
        return self.over == 0

    @property
    def share(self) -> float:
        """The largest error as a fraction of the budget; 0 without error."""
        if self.max_error == 0.0:
            return 0.0
        return self.max_error / self.budget if self.budget > 0 else math.inf

    def __str__(self) -> str:
        """Return one line with the coordinates of the worst element."""
        return (
            f"{self.name}: {self.over} of {self.size} elements over the budget {self.budget:.3e}; worst at "
            f"{list(self.worst)}: got {self.actual!r}, expected {self.expected!r}, error {self.max_error:.3e}"
        )


def allowed_rounding(input_dtype: Any, out_dtype: Any = None) -> Rounding:
    """Return the roundings that any path may make: prepared q and P to a 16-bit input dtype, the result to its own.

    Raises
    ------
    ContractError
        If the result's dtype is no float: rounding to whole numbers would be a budget that everything keeps.
    """
    dtype = dtype_from_name(input_dtype)
    narrow = dtype if dtype.itemsize == 2 else None
    result = dtype if out_dtype is None else dtype_from_name(out_dtype, "out_dtype")
    if not is_float(result):
        hint = "View the bytes of bfloat16 and float8 as these."
        raise ContractError(f"out_dtype: must be a float dtype, got {result}. {hint}")
    return Rounding(q=narrow, p=narrow, out=result)


def expect(
    definition: Callable[..., Any], *args: Any, out_dtype: Any = None, rounding: Any = None, **kwargs: Any
) -> Expected:
    """Return what `definition`, a function of `nbattn.oracle`, gives for the arguments, with the error budget.

    Parameters
    ----------
    definition : e.g. ``nbattn.oracle.paged_attention``
    args, kwargs : its arguments; `args[0]` is q (or v), whose dtype sets the precision.
    out_dtype : the dtype of the result, by default that of `args[0]`
    rounding : nbattn.oracle.Rounding, by default `allowed_rounding`; give less to hold a path to more

    Examples
    --------
    >>> import numpy as np
    >>> from nbattn import oracle, testing
    >>> k, v = np.zeros((1, 4, 1, 2), np.float32), np.ones((1, 4, 1, 2), np.float32)
    >>> expected = testing.expect(oracle.gqa_decode, np.ones((1, 1, 2), np.float32), k, v, np.array([3]))
    >>> testing.assert_close(np.ones((1, 1, 2), np.float32), expected)
    """
    dtype = args[0].dtype
    rounding = allowed_rounding(dtype, out_dtype) if rounding is None else rounding
    extremes = Extremes()
    lse_dtype = dtype
    if definition.__name__.startswith("merge"):  # returns both anyway, and s has a dtype of its own
        lse_dtype = args[1].dtype if dtype == np.float64 else dtype
    else:
        kwargs = {**kwargs, "return_lse": True}
    out, lse = definition(*args, extremes=extremes, **kwargs)
    rounded_out, rounded_lse = definition(*args, rounding=rounding, **kwargs)
    per_nat = 1.0 if kwargs.get("lse_base") == "e" else 1 / math.log(2.0)
    largest_lse = float(np.max(np.abs(lse), initial=0.0, where=np.isfinite(lse)))
    out_floor = (1 + extremes.logit) * extremes.value
    lse_floor = (1 + extremes.logit) * per_nat + largest_lse
    return Expected(
        out,
        lse,
        2 * largest_difference(rounded_out, out) + 8 * unit_roundoff(dtype) * out_floor,
        2 * largest_difference(rounded_lse, lse) + 8 * unit_roundoff(lse_dtype) * lse_floor,
    )


def unit_roundoff(dtype: Any) -> float:
    """Return u of the accumulation for inputs of `dtype`."""
    return 2.0**-53 if dtype == np.float64 else 2.0**-24


def differences(actual: np.ndarray, expected: np.ndarray) -> np.ndarray:
    """Return elementwise errors in float64: 0 where both are NaN or the same infinity, inf where only one is."""
    with np.errstate(all="ignore"):
        error = np.abs(actual - expected)
    same = (actual == expected) | (np.isnan(actual) & np.isnan(expected))
    return np.where(same, 0.0, np.where(np.isfinite(error), error, np.inf))


def largest_difference(actual: np.ndarray, expected: np.ndarray) -> float:
    """Return the largest finite error; where only rounding made an infinity there is none to compare with."""
    error = differences(actual, expected)
    return float(np.max(error, initial=0.0, where=np.isfinite(error)))


def to_host(x: Any) -> np.ndarray:
    """Return a NumPy or CuPy array as float64 on the host."""
    return np.asarray(x.get() if hasattr(x, "get") else x).astype(np.float64)


def compare(actual: Any, expected: Any, budget: float = 0.0, name: str = "out") -> Comparison:
    """Compare two arrays of one shape element by element and return a `Comparison`."""
    got, want = to_host(actual), to_host(expected)
    if got.shape != want.shape:
        raise AssertionError(f"{name}: must have the shape {want.shape}, got {got.shape}")
    error = differences(got, want)
    if error.size == 0:
        return Comparison(name, 0.0, budget, (), 0.0, 0.0, 0, 0)
    worst = tuple(int(i) for i in np.unravel_index(np.argmax(error), error.shape))
    over = int(np.count_nonzero(error > budget))
    return Comparison(name, float(error[worst]), budget, worst, float(got[worst]), float(want[worst]), over, error.size)


def assert_close(actual: Any, expected: Any, *, budget: float | None = None, name: str = "out") -> None:
    """Raise AssertionError, naming the worst coordinates, unless `actual` is within its budget.

    Parameters
    ----------
    actual : array, or the pair ``(out, lse)``; NumPy or CuPy
    expected : `Expected`, which brings its own budgets, or an array (a pair for a pair)
    budget : float, the largest absolute error with a plain `expected` (default 0), or instead of `Expected`'s own

    Raises
    ------
    AssertionError
        If a shape differs, an element is over the budget, or NaN and infinities stand in different places.
    """
    parts = actual if isinstance(actual, tuple) else (actual,)
    if isinstance(expected, Expected):
        wanted: tuple[Any, ...] = (expected.out, expected.lse)
        budgets = (expected.out_budget, expected.lse_budget) if budget is None else (budget, budget)
    else:
        wanted = expected if isinstance(expected, tuple) else (expected,)
        budgets = (budget or 0.0, budget or 0.0)
    results = [compare(*x) for x in zip(parts, wanted, budgets, (name, "lse"), strict=False)]
    failed = [str(r) for r in results if not r.passed]
    if failed:
        raise AssertionError("\n".join(failed))

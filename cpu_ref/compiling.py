"""How the functions of the CPU target are compiled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba import njit

# never nnan or ninf: -inf and NaN carry meaning
FASTMATH = {"reassoc", "contract", "nsz", "arcp", "afn"}
_OPTIONS: dict[str, Any] = {"nogil": True, "error_model": "numpy", "fastmath": FASTMATH}


def kernel(function: Callable) -> Any:
    """Compile a function that Python calls."""
    return njit(**_OPTIONS)(function)


def part(function: Callable) -> Any:
    """Compile a function that only compiled code calls: without the wrappers that Python and C would need."""
    return njit(**_OPTIONS, no_cpython_wrapper=True, no_cfunc_wrapper=True)(function)


def inlined(function: Callable) -> Any:
    """Compile a function into its callers only: the heavy tiles are optimised once instead of at every level."""
    return njit(**_OPTIONS, inline="always")(function)

"""The three errors of the library; every message reads *argument: rule, got value. Hint.*"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class ContractError(ValueError):
    """An argument breaks a rule of the operator; nothing was computed or written."""


class PageTableError(ContractError):
    """A page table, a length or an offset array is inconsistent; the message names the request.

    Attributes
    ----------
    others : tuple of str
        What else is wrong with the same table, as far as it can be told.
    """

    others: tuple[str, ...] = ()


class TargetError(RuntimeError):
    """The requested target cannot run here (no GPU, no driver, a missing package) or cannot run this dtype."""


def refuse_bool(name: str, value: Any) -> Any:
    """Return what may be an integer or a one-element array of one, but no bool, which Python counts as an integer."""
    if isinstance(value, bool) or getattr(getattr(value, "dtype", None), "kind", "") == "b":
        raise ContractError(f"{name}: must be an integer or a one-element integer array, got {value!r}.")
    return value


def check_choice(name: str, value: Any, choices: Sequence[str | None]) -> Any:
    """Return a value that is one of two or more words, or of words and None."""
    if not (value is None or isinstance(value, str)) or value not in choices:
        *first, last = ("None" if x is None else f'"{x}"' for x in choices)
        raise ContractError(f"{name}: must be {', '.join(first)} or {last}, got {value!r}.")
    return value

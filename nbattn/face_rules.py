"""Rules that only operator faces have: their names in messages, hints, windows in tokens, row positions."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from nbattn.arrays import QUERY_DTYPES, Array, dtype_name, library_of, require_array, single_value
from nbattn.contracts import check_int, check_number, check_offsets
from nbattn.errors import ContractError, TargetError, refuse_bool
from nbattn.page_tables import host_int64, single_int


@contextmanager
def argument_names(phrases: dict[str, str] | None = None, /, **names: str) -> Iterator[None]:
    """Let errors raised inside speak of a face's arguments: ``argument_names(sinks="head_sink")``."""
    names = {**(phrases or {}), **names}
    try:
        yield
    except (ContractError, TargetError) as error:
        words = re.compile(rf"\b({'|'.join(names)})\b")
        error.args = (words.sub(lambda found: names[found[0]], str(error)),)
        raise


def check_sliding_window(name: str, tokens: Any) -> int:
    """Return the `window_left` of a window that counts its tokens, the row's own included; -1 and None are off."""
    if tokens is None:
        return -1
    if check_int(name, tokens) == 0 or tokens < -1:
        raise ContractError(f"{name}: must be positive (tokens, the row's own included) or -1 for none, got {tokens}.")
    return -1 if tokens == -1 else int(tokens) - 1


def check_ragged_query(q: Array) -> int:
    """Return the rows of a query [rows, num_heads, head_dim]."""
    if q.ndim != 3:
        raise ContractError(f"q: must be [rows, num_heads, head_dim], got shape {q.shape}.")
    return int(q.shape[0])


def check_row_offsets(name: str, offsets: Array, batch: int, num_rows: int, library: str) -> np.ndarray:
    """Return offsets [batch + 1] from 0 to at most `num_rows` as host int64; a face's own are never left out."""
    return check_offsets(name, require_array(name, offsets), batch, num_rows, first=True, library=library)


def check_cache_lengths(name: str, lengths: Array, library: str) -> np.ndarray:
    """Return lengths of any number of requests as host int64; none is negative."""
    values = host_int64(name, lengths, library)
    below = np.flatnonzero(values < 0)
    if below.size:
        raise ContractError(f"{name}[{below[0]}]: must not be negative, got {values[below[0]]}.")
    return values


def check_length_hint(name: str, hint: Any, lengths: np.ndarray, what: str) -> None:
    """Check a sizing hint, which changes no value: None, or at least the longest of `lengths`."""
    longest = int(lengths.max(initial=0))
    if hint is not None and single_int(name, refuse_bool(name, hint)) < longest:
        raise ContractError(f"{name}: must be at least {longest} ({what}), got {single_int(name, hint)}.")


def check_single_number(name: str, value: Any) -> float:
    """Return a finite number that may be given as a one-element array."""
    return check_number(name, single_value(name, value))


def check_head_major_scale(name: str, scale: Any, num_kv_heads: int, dim: int) -> Any:
    """Return a scale that broadcasts to [num_kv_heads, 1, dim] as one that broadcasts to [num_kv_heads, dim]."""
    if library_of(scale) is None or scale.size == 1:
        return scale
    try:
        fits = np.broadcast_shapes(scale.shape, (num_kv_heads, 1, dim)) == (num_kv_heads, 1, dim)
    except ValueError:
        fits = False
    if not fits:
        raise ContractError(f"{name}: must broadcast to [{num_kv_heads}, 1, {dim}], got shape {scale.shape}.")
    return scale.reshape((1,) * (3 - scale.ndim) + scale.shape)[:, 0]


def check_float_array(name: str, x: Array, shape: tuple[int | None, ...], axes: str, library: str) -> None:
    """Check a float array that stands beside q; None in `shape` is any size."""
    if library_of(x) != library:
        raise ContractError(f"{name}: must live where q does ({library}), got {library_of(x) or type(x).__name__}.")
    if len(x.shape) != len(shape) or any(want not in (None, got) for want, got in zip(shape, x.shape, strict=True)):
        raise ContractError(f"{name}: must be {axes}, got shape {x.shape}.")
    if dtype_name(x) not in QUERY_DTYPES:
        raise ContractError(f"{name}: must be a float dtype, got {dtype_name(x)}.")


def one_output(output: Array | None, out: Array | None) -> tuple[Array | None, str]:
    """Return the one given of `output`, a face's own name, and `out`, everybody's; and how errors should call it."""
    if output is not None and out is not None:
        raise ContractError("output: is this operator's name for out, got both. Give one.")
    return (out, "out") if output is None else (output, "output")


def row_positions(first: np.ndarray, offsets: np.ndarray, num_rows: int) -> np.ndarray:
    """Return ``first[b] + i`` for row i of request b, int64 [num_rows]; 0 for rows of no request."""
    positions = np.zeros(num_rows, np.int64)
    covered = positions[: int(offsets[-1])]
    covered[:] = np.arange(covered.size) + np.repeat(first - offsets[:-1], np.diff(offsets))
    return positions

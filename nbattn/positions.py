"""Where query rows and keys stand: positions from lengths and offsets, for one level or a cascade of them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import numpy as np

from nbattn.errors import ContractError
from nbattn.page_tables import INT32_MAX


@lru_cache(maxsize=16)
def one_row_each(requests: int) -> np.ndarray:
    """Return the offsets of one query row for each request: int64 [requests + 1], shared, to be read only."""
    return np.arange(requests + 1)


@dataclass(frozen=True)
class LevelLengths:
    """The host integers of one level.

    Parameters
    ----------
    kv_lens, page_begin : int array, shape [batch]
        Keys of each request and where its page ids start.
    qo_indptr : int array, shape [batch + 1]
        Query rows of each request.
    causal : bool
        Whether rows see only keys up to their position.
    """

    kv_lens: np.ndarray
    page_begin: np.ndarray
    qo_indptr: np.ndarray
    causal: bool

    @cached_property
    def rows(self) -> tuple[slice, np.ndarray | None]:
        """Which rows the level reaches, and how many each request has; None for one each."""
        if self.qo_indptr is one_row_each(len(self.kv_lens)):
            return slice(0, len(self.kv_lens)), None
        first, last = int(self.qo_indptr[0]), int(self.qo_indptr[-1])
        counts = self.qo_indptr[1:] - self.qo_indptr[:-1]
        single = last - first == len(counts) and counts.max(initial=1) == 1
        return slice(first, last), None if single else counts


@dataclass(frozen=True)
class Positions:
    """Where rows and keys stand.

    Parameters
    ----------
    row_position : int32 array, shape [total_rows]
        Absolute position of each query row.
    row_request, row_index : int32 array, shape [total_rows]
        Request of the last level a row belongs to, and its index among that request's rows; -1 and 0 for others.
    key_base : list of int64 array, shape [total_rows]
        Per level: how many keys of the levels above precede its key 0, for each row.
    key_position : list of int64 array, shape [total_rows]
        Per level: absolute position of its key 0, for each row.
    covered : bool array, shape [total_rows]
        Rows that some level reaches.
    all_last : bool
        Whether every row stands where its last key does: causality hides none.
    """

    row_position: np.ndarray
    row_request: np.ndarray
    row_index: np.ndarray
    key_base: list[np.ndarray]
    key_position: list[np.ndarray]
    covered: np.ndarray
    all_last: bool = False


def place_rows(levels: list[LevelLengths], total_rows: int, kv_start: Any = None, q_positions: Any = None) -> Positions:
    """Return where every row and every level's key 0 stand; positions are int32, and what none holds is refused."""
    reached, counts = levels[0].rows
    if len(levels) == 1 and counts is None and reached == slice(0, total_rows):
        return _place_decode_rows(levels[0], total_rows, kv_start, q_positions)
    covered = np.zeros(total_rows, bool)
    keys_above = np.zeros(total_rows, np.int64)
    key_base = []
    for level in levels:
        reached, counts = level.rows
        key_base.append(keys_above)
        keys_above = keys_above.copy()
        keys_above[reached] += _spread(level.kv_lens, counts)
        covered[reached] = True
    start, request = np.zeros(total_rows, np.int64), np.full(total_rows, -1)  # by the last level
    index, new_rows = np.zeros(total_rows, np.int64), np.ones(total_rows, np.int64)
    request[reached] = _spread(np.arange(len(level.kv_lens)), counts)
    if counts is not None:
        index[reached] = np.arange(reached.start, reached.stop) - np.repeat(level.qo_indptr[:-1], counts)
        new_rows[reached] = np.repeat(counts, counts)
    if kv_start is not None:
        start[reached] = _spread(np.asarray(kv_start, np.int64), counts)
    end = start + keys_above
    if end.max(initial=0) > INT32_MAX:
        _refuse_end(int(np.argmax(end)), end, start, request)
    position = end - new_rows + index
    if q_positions is not None:  # an updated plan may have rows behind them, which no request owns
        position[: len(q_positions)] = q_positions
    return Positions(
        position.astype(np.int32),
        request.astype(np.int32),
        index.astype(np.int32),
        key_base,
        key_base if kv_start is None else [base + start for base in key_base],
        covered,
    )


def _place_decode_rows(level: LevelLengths, total_rows: int, kv_start: Any, q_positions: Any) -> Positions:
    """Return `place_rows` of one row for each request of one level."""
    nothing, request, index, covered = _decode_rows(total_rows)
    start, end = nothing, level.kv_lens
    if kv_start is not None:
        start = np.asarray(kv_start, np.int64)
        end = start + level.kv_lens
        if end.max(initial=0) > INT32_MAX:
            _refuse_end(int(np.argmax(end)), end, start, request)
    position = end - 1 if q_positions is None else np.asarray(q_positions, np.int64)
    position = position.astype(np.int32, copy=False)
    return Positions(position, request, index, [nothing], [start], covered, q_positions is None)


def _refuse_end(row: int, end: np.ndarray, start: np.ndarray, request: np.ndarray) -> None:
    """Raise what says why the keys of a row end where no int32 holds their positions: `place_rows`."""
    keys = end[row] - start[row]
    if keys > INT32_MAX:
        raise ContractError(f"levels: must hold at most {INT32_MAX} keys (int32) for row {row}, got {keys} in all.")
    raise ContractError(
        f"kv_start[{request[row]}]: must be at most {INT32_MAX - keys}, so that its {keys} keys end within int32, "
        f"got {start[row]}."
    )


@lru_cache(maxsize=16)
def _decode_rows(total_rows: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return the keys above, requests, indices and coverage of rows that are one for each request.

    Plans share them, and nothing writes to a plan's arrays.
    """
    rows = np.arange(total_rows, dtype=np.int32)
    return np.zeros(total_rows, np.int64), rows, np.zeros(total_rows, np.int32), np.ones(total_rows, bool)


def _spread(values: np.ndarray, counts: np.ndarray | None) -> np.ndarray:
    """Return each request's value for each of its rows."""
    return values if counts is None else np.repeat(values, counts)

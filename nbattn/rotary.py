"""Planes of cosines and sines for rotation inside attention, computed once in float64.

Scores depend on the distance of a row from a key alone. So both are turned by their positions behind the first key of
their request, wherever that one stands: planes are as long as the keys, and angles as small as they can be.
"""

from __future__ import annotations

import os
import threading
from typing import NamedTuple

import numpy as np

from nbattn.positions import Positions
from nbattn.problem import Rope

POSITIONS_AHEAD = 1 << 17  # most positions beside the keys that planes are made for

_lock = threading.Lock()
_kept: dict[tuple[float, float, int, np.dtype], Planes] = {}


def _renew() -> None:
    global _lock
    _lock = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew)  # another thread may have held it


class Planes(NamedTuple):
    """Cosines and sines of consecutive positions, [positions, dim / 2]; row 0 belongs to position `origin`."""

    origin: int
    cos: np.ndarray
    sin: np.ndarray


def rope_planes(rope: Rope, dim: int, begin: int, end: int, dtype: np.dtype) -> Planes:
    """Return planes that cover positions ``begin .. end``.

    Those of each rope and head size are kept and grow by doubling, since the positions of a decode step differ from the
    last one's by one.
    """
    key = (rope.theta, rope.scale, dim, np.dtype(dtype))
    with _lock:
        kept = _kept.get(key)
        if kept is None or begin < kept.origin or end > kept.origin + len(kept.cos):
            origin = min(begin, 0 if kept is None else kept.origin)
            span = max(end - origin, 256)
            positions = origin + np.arange(1 << (span - 1).bit_length())
            kept = _kept[key] = Planes(origin, *_angles(rope, dim, positions, dtype))
        return kept


def _angles(rope: Rope, dim: int, positions: np.ndarray, dtype: np.dtype) -> tuple[np.ndarray, np.ndarray]:
    frequency = float(rope.theta) ** (-2.0 * np.arange(dim // 2) / dim) / float(rope.scale)
    angle = positions[:, None] * frequency  # float64: at position 1e5 float32 would be off by 0.01 rad
    return np.cos(angle).astype(dtype), np.sin(angle).astype(dtype)


def turned_rows(places: Positions) -> np.ndarray:
    """Return by which positions the rows are turned: int64 [total_rows]."""
    return places.row_position - places.key_position[0]


def turned_interval(places: Positions, kv_lens: list[np.ndarray]) -> tuple[int, int]:
    """Return the interval of positions by which keys and rows are turned; `kv_lens` are those of every level.

    Rows without a key do not count: nothing reads them, and without one they stand before the first.
    """
    own = np.append(kv_lens[-1], 0)[places.row_request]  # request -1 is none
    rows = turned_rows(places)[places.key_base[-1] + own > 0]
    end = _end_of_keys(places, kv_lens)
    return int(rows.min(initial=0)), max(end, int(rows.max(initial=0)) + 1)


def _end_of_keys(places: Positions, kv_lens: list[np.ndarray]) -> int:
    return max(
        int(base.max(initial=0)) + int(lens.max(initial=0)) for base, lens in zip(places.key_base, kv_lens, strict=True)
    )


def planes_for(
    rope: Rope, dim: int, places: Positions, kv_lens: list[np.ndarray], dtype: np.dtype, end: int = 0
) -> tuple[Planes, np.ndarray, Planes]:
    """Return (planes of the keys, up to `end` at least; where the rows stand in theirs; planes of the rows).

    The planes are the same, unless rows stand far from the keys: then each position of theirs has a row of its own.
    """
    rows, keys = turned_rows(places), _end_of_keys(places, kv_lens)
    begin, last = turned_interval(places, kv_lens)
    ahead = POSITIONS_AHEAD + len(rows)
    if begin < -ahead or last > keys + ahead:
        distinct, rows = np.unique(rows, return_inverse=True)
        return rope_planes(rope, dim, 0, max(end, keys), dtype), rows, Planes(0, *_angles(rope, dim, distinct, dtype))
    planes = rope_planes(rope, dim, begin, max(end, last), dtype)
    return planes, rows, planes

"""Planes of cosines and sines for rotation inside attention, computed once in float64."""

from __future__ import annotations

import threading

import numpy as np

from nbattn.problem import Rope

_lock = threading.Lock()
_planes: dict[tuple[float, float, int, np.dtype], tuple[int, np.ndarray, np.ndarray]] = {}


def rope_planes(rope: Rope, dim: int, begin: int, end: int, dtype: np.dtype) -> tuple[int, np.ndarray, np.ndarray]:
    """Return (origin, cos, sin): planes [positions, dim / 2] that cover positions ``begin .. end``.

    Row 0 belongs to position `origin`. The planes of each rope and head size are kept and grow by doubling, since the
    positions of a decode step differ from the last one's by one.
    """
    key = (rope.theta, rope.scale, dim, np.dtype(dtype))
    with _lock:
        kept = _planes.get(key)
        if kept is None or begin < kept[0] or end > kept[0] + len(kept[1]):
            origin = min(begin, 0 if kept is None else kept[0])
            span = max(end - origin, 256)
            positions = origin + np.arange(1 << (span - 1).bit_length())
            frequency = rope.theta ** (-2.0 * np.arange(dim // 2) / dim) / rope.scale
            angle = positions[:, None] * frequency  # float64: at position 1e5 float32 would be off by 0.01 rad
            kept = _planes[key] = origin, np.cos(angle).astype(dtype), np.sin(angle).astype(dtype)
        return kept

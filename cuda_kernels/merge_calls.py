"""Launches of the user's merges. Nothing here checks again; importing it imports neither CuPy nor Numba."""

from __future__ import annotations

from typing import Any

from nbattn.cuda_kernels.calls import LN2, LOG2E, Array, kind_of, packed
from nbattn.cuda_kernels.shapes import CHUNK_BYTES, PAIR_BLOCKS, PAIR_TASKS, PAIR_THREADS, lane_bits, merge_team


def _width(device: Any, values: list[Array], sums: list[Array], steps: int = 0) -> int:
    """Return how many numbers a lane takes at a time: 16 bytes of these arrays, or 1; `steps` lie between states."""
    width = CHUNK_BYTES // values[0].dtype.itemsize
    if any(str(s.dtype) != "float32" for s in sums) or steps % CHUNK_BYTES or steps >= 1 << 31:
        return 1
    return width if all(packed(device, v, v.shape[2], width) for v in values) else 1


def run_merge_pair(
    device: Any, v_a: Array, s_a: Array, v_b: Array, s_b: Array, out: Array, lse: Array, mask: Array | None = None,
    lse_base: str = "2",
) -> None:  # fmt: skip
    """Merge two states ``v [n, heads, dim]``, ``s [n, heads]`` into `out` and `lse`, which may be `v_a` and `s_a`.

    `mask`, one byte a row (bool or uint8), contiguous: a zero leaves the row of `out` and `lse` alone.
    """
    rows, heads, head_dim = v_a.shape
    arrays = (v_a, s_a, v_b, s_b, out, lse)
    width = _width(device, [v_a, v_b, out], [s_a, s_b, lse])
    if head_dim > width * PAIR_THREADS or any(max(x.strides[:2]) >= 1 << 31 for x in arrays):
        width = 1
    strides = [x.strides for x in arrays]
    if mask is None and all(row == heads * head for row, head, *_ in strides):  # one head
        rows, heads, strides = rows * heads, 1, [(head, 0, *last) for _, head, *last in strides]
    bits = lane_bits(head_dim, width) if width > 1 else 5
    states = [x for array, steps in zip(arrays, strides, strict=True) for x in (device.address(array), *steps)]
    kinds = (kind_of(x.dtype) for x in (v_a, out, s_a, lse))
    units = (LOG2E, LN2) if lse_base == "e" else (1.0, 1.0)
    address = device.address(mask) if mask is not None else 0
    values = (*states, *kinds, rows, heads, head_dim, bits, device.multiprocessors * PAIR_BLOCKS, *units, address)
    tasks = (PAIR_THREADS >> bits) * (PAIR_TASKS if width > 1 else 1)  # of a block
    device.launch("merge_pair", {"vector": width > 1}, (-(-rows * heads // tasks), 1, 1), values, overlaps=True)


def run_merge_views(
    device: Any, sources: list[tuple[Array, Array]], out: Array, lse: Array, lse_base: str = "2"
) -> None:
    """Merge equally spaced views ``(v [n, heads, dim], s [n, heads])`` of one array of states; none give 0 and -inf."""
    rows, heads, head_dim = out.shape
    v, s = sources[0] if sources else (out, lse)
    steps = (0, 0)
    if len(sources) > 1:
        steps = tuple(device.address(b) - device.address(a) for a, b in zip(sources[0], sources[1], strict=True))
    width = _width(device, [v, out], [s, lse], steps[0])
    constants, team, grid = merge_team(rows * heads, head_dim, width, device.multiprocessors, len(sources))
    values = (
        *(device.address(v), v.strides[0], steps[0], *v.strides[1:], kind_of(v.dtype)),
        *(device.address(s), s.strides[0], steps[1], s.strides[1], kind_of(s.dtype)),
        *(0, 0, 0, rows, len(sources), heads, 1, head_dim, *team),
        *(device.address(out), *out.strides, kind_of(out.dtype)),
        *(device.address(lse), *lse.strides, kind_of(lse.dtype)),
        *((LOG2E, LN2) if lse_base == "e" else (1.0, 1.0)),
        *(0, 0, 1.0, 0, 0, 0, 0, 0),
    )
    device.launch("merge_states", constants, grid, values, overlaps=True)

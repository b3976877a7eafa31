"""A block of keys for a task of many rows of one KV head: K and V are packed once and then multiplied at the CPU's peak.

Rows lie in panels as wide as two vectors. Keys that no row of a panel sees are not multiplied.
"""

from __future__ import annotations

from numba.extending import overload

from nbattn.cpu_ref.blocks import padded
from nbattn.cpu_ref.compiling import part
from nbattn.cpu_ref.lanes import uses_dot
from nbattn.cpu_ref.number_formats import address_of, itemsize
from nbattn.cpu_ref.packing import all_finite, pack_values, pack_weights, prefetch_row
from nbattn.cpu_ref.tiles import panel_height, panel_width, score_panel, value_panel, value_tile_1_select

PANEL_KEYS = 96  # keys of a block; K, V, scores, queries and sums of 192 rows take 370 KB of L2
SPARE_ROWS, SPARE_COLUMNS = 32, 16  # panels of any CPU may be that much wider than rows and vectors


def panel_constants(kind):
    """Return (height, width, bytes of a number, bytes of a cached number, keys of a step over keys)."""
    raise NotImplementedError("compiled code only")


@overload(panel_constants, inline="always")
def _panel_constants(kind):
    number = 8 if kind.tag == "float64" else 4
    constants = (panel_height(), panel_width(kind.tag), number, itemsize(kind.tag), 2 if uses_dot(kind.tag) else 1)
    return lambda kind: constants


@part
def keys_seen(first, end, row, stop, key, n):
    """Return the part of the `n` keys from `key` on that the rows ``row .. stop`` see."""
    low, high = n, 0
    for i in range(row, stop):
        low, high = min(low, first[i] - key), max(high, end[i] - key)
    return max(low, 0), min(high, n)


@part
def prefetch_share(places, head, n, size, i, parts):
    """Bring one of `parts` shares of the next block's `n` rows of `size` bytes to L2."""
    for j in range(n * i // parts, n * (i + 1) // parts):
        prefetch_row(places[j] + head, size)


@part
def score_panels(kind, panels, keys, first, end, rows, key, n, dim, scale, s, coming, k_head, n_next, row_bytes):
    """Fill ``s[j, row]`` with ``scale * q[row] @ k[j]`` for `n` packed keys, as far as rows see them."""
    height, width, number, _, step = panel_constants(kind)
    steps = (dim + step - 1) // step
    for row in range(0, rows, width):
        prefetch_share(coming, k_head, n_next, row_bytes, row // width, (rows + width - 1) // width)
        low, high = keys_seen(first, end, row, min(row + width, rows), key, n)
        panel, column = address_of(panels) + row * steps * number, address_of(s) + row * number
        for j in range(low // height * height, high, height):
            score_panel(kind, address_of(keys) + j * keys.strides[0], keys.strides[0], panel, steps, scale,
                        column + j * s.strides[0], s.strides[0])  # fmt: skip


@part
def weigh_panels(kind, acc, rows, p, first, end, key, value_rows, values, n, dim, alpha, select, coming, v_head,
                 n_next):  # fmt: skip
    """Scale the accumulators of all rows by `alpha` and add the weighted values of `n` keys.

    With `select` a weight of 0 marks a dropped key. It may be multiplied with a finite value, for that is nothing; where
    there are others, values are selected.
    """
    height, width, number, size, step = panel_constants(kind)
    pack_values(kind, address_of(value_rows), n, dim, address_of(values), values.strides[0])
    finite = True
    if select:
        for i in range((dim + width - 1) // width):
            finite &= all_finite(kind, address_of(values[i]), (n + step - 1) // step)
    if not finite:
        for row in range(rows):
            value_tile_1_select(kind, address_of(acc[row]), acc.strides[0], address_of(p) + row * number, p.strides[0],
                                address_of(value_rows), 0, n, dim, address_of(alpha) + row * number,
                                address_of(value_rows))  # fmt: skip
        return
    pack_weights(kind, address_of(p), p.strides[0], n, padded(rows))
    for row in range(0, rows, height):
        prefetch_share(coming, v_head, n_next, dim * size, row // height, (rows + height - 1) // height)
        low, high = keys_seen(first, end, row, min(row + height, rows), key, n)
        low, steps = low // step, max(0, (high + step - 1) // step - low // step)
        weights, factors = address_of(p) + low * p.strides[0] + row * number, address_of(alpha) + row * number
        for d in range(0, dim, width):
            panel = address_of(values[d // width]) + low * width * number
            value_panel(kind, weights, p.strides[0], panel, steps, factors, address_of(acc[row]) + d * number,
                        acc.strides[0])  # fmt: skip

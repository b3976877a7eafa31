"""A block of keys for a task of many rows of one KV head: K and V are packed once, then multiplied at the CPU's peak.

Rows lie in panels as wide as two vectors. Keys that no row of a panel sees are not multiplied. The values of a block
are packed share by share between the panels of its scores, the keys of the next block between those of its values:
memory is read while numbers are multiplied, and little of it waits in L2, where rows of one head share few sets.
"""

from __future__ import annotations

from numba.extending import overload

from nbattn.cpu_ref.blocks import padded
from nbattn.cpu_ref.compiling import part
from nbattn.cpu_ref.lanes import packs_pairs
from nbattn.cpu_ref.number_formats import address_of, itemsize
from nbattn.cpu_ref.packing import all_finite, pack_keys, pack_panel_weights, pack_queries, pack_values, prefetch_row
from nbattn.cpu_ref.row_copies import narrow_bfloat16
from nbattn.cpu_ref.tiles import panel_height, panel_width, score_panel, value_panel, value_tile_1_select

PANEL_KEYS = 96  # keys of a block; K, V, scores, queries and sums of 192 rows take 370 KB of L2
SPARE_ROWS, SPARE_COLUMNS = 32, 16  # panels of any CPU may be that much wider than rows and vectors


def panel_constants(kind):
    """Return (height, width, bytes of a number, bytes of a cached number, keys of a step over keys)."""
    raise NotImplementedError("compiled code only")


@overload(panel_constants, inline="always")
def _panel_constants(kind):
    number = 8 if kind.tag == "float64" else 4
    constants = (panel_height(), panel_width(kind.tag), number, itemsize(kind.tag), 2 if packs_pairs(kind.tag) else 1)
    return lambda kind: constants


def pack_query_panels(kind, q, rows, dim, panels):
    """Pack the first `rows` of `q` for a cache kind; with pairs they are rounded to bfloat16, in place."""
    raise NotImplementedError("compiled code only")


@overload(pack_query_panels)
def _pack_query_panels(kind, q, rows, dim, panels):
    def rounded(kind, q, rows, dim, panels):
        place = address_of(q)
        for row in range(rows):
            here = place + row * q.strides[0]
            narrow_bfloat16(here, here, padded(dim))
        pack_queries(kind, place, q.strides[0], rows, (dim + 1) // 2, panels)

    def as_it_is(kind, q, rows, dim, panels):
        pack_queries(kind, address_of(q), q.strides[0], rows, dim, panels)

    return rounded if packs_pairs(kind.tag) else as_it_is


@part
def keys_seen(block, row, stop):
    """Return the part of a block's keys, from its first on, that the rows ``row .. stop`` see."""
    if block.whole:
        return 0, block.n
    low, high = block.n, 0
    for i in range(row, stop):
        low, high = min(low, block.first[i] - block.key), max(high, block.end[i] - block.key)
    return max(low, 0), min(high, block.n)


@part
def share(n, i, parts):
    """Return begin and end of share `i` of `n` keys; all begin at even keys."""
    return n * i // parts // 2 * 2, n * (i + 1) // parts // 2 * 2 if i + 1 < parts else n


@part
def prefetch_share(rows, head, size, n, i, parts):
    """Bring a share of the rows of `size` bytes at ``rows[j] + head`` to L2."""
    begin, end = share(n, i, parts)
    for j in range(begin, end):
        prefetch_row(rows[j] + head, size)


@part
def pack_key_share(kind, keys, rows, head, dim, n, i, parts):
    """Pack a share of K, and prefetch the one after it."""
    begin, end = share(n, i, parts)
    pack_keys(kind, address_of(rows) + 8 * begin, head, end - begin, dim, address_of(keys[begin]), keys.strides[0])
    if i + 1 < parts:
        prefetch_share(rows, head, dim * panel_constants(kind)[3], n, i + 1, parts)


@part
def pack_value_share(kind, values, rows, dim, n, i, parts):
    """Pack a share of V, and prefetch the one after it."""
    _, width, number, size, step = panel_constants(kind)
    begin, end = share(n, i, parts)
    pack_values(kind, address_of(rows) + 8 * begin, end - begin, dim,
                address_of(values) + begin // step * width * number, values.strides[0])  # fmt: skip
    if i + 1 < parts:
        prefetch_share(rows, 0, dim * size, n, i + 1, parts)


@part
def score_panels(score_kind, kind, scratch, rows, block, dim, scale, s, values, value_dim):
    """Fill ``s[j, row]`` with ``scale * q[row] @ k[j]`` for the packed keys, as far as rows see them; pack the values.

    `score_kind` is the kind of the packed queries and keys.
    """
    height, width, number, _, step = panel_constants(score_kind)
    keys, steps, parts = scratch.keys, (dim + step - 1) // step, (rows + width - 1) // width
    for i in range(parts):
        pack_value_share(kind, scratch.values, values.rows, value_dim, block.n, i, parts)
        row = i * width
        low, high = keys_seen(block, row, min(row + width, rows))
        panel, column = address_of(scratch.queries) + row * steps * number, address_of(s) + row * number
        for j in range(low // height * height, high, height):
            score_panel(score_kind, address_of(keys) + j * keys.strides[0], keys.strides[0], panel, steps, scale,
                        column + j * s.strides[0], s.strides[0])  # fmt: skip


@part
def weigh_panels(kind, scratch, acc, rows, p, block, values, dim, alpha, select, keys, key_dim, n_next):
    """Scale the accumulators of all rows by `alpha` and add the weighted values; pack `n_next` keys of the next block.

    With `select` a weight of 0 marks a dropped key. It may be multiplied with a finite value, for that is nothing;
    where there are others, values are selected.
    """
    height, width, number, _, step = panel_constants(kind)
    n, parts = block.n, (rows + height - 1) // height
    finite = True
    if select:
        for i in range((dim + width - 1) // width):
            finite &= all_finite(kind, address_of(scratch.values[i]), (n + step - 1) // step)
    if finite:
        pack_panel_weights(kind, address_of(p), p.strides[0], n, padded(rows))
    for i in range(parts):
        if n_next > 0:
            pack_key_share(kind, scratch.keys, keys.coming, block.head_begin * keys.head_stride, key_dim, n_next, i,
                           parts)  # fmt: skip
        row, stop = i * height, min(i * height + height, rows)
        if not finite:
            for dirty in range(row, stop):
                value_tile_1_select(kind, address_of(acc[dirty]), acc.strides[0], address_of(p) + dirty * number,
                                    p.strides[0], address_of(values.rows), 0, n, dim,
                                    address_of(alpha) + dirty * number, address_of(values.rows))  # fmt: skip
            continue
        low, high = keys_seen(block, row, stop)
        low, steps = low // step, max(0, (high + step - 1) // step - low // step)
        weights, factors = address_of(p) + low * p.strides[0] + row * number, address_of(alpha) + row * number
        for d in range(0, dim, width):
            panel = address_of(scratch.values[d // width]) + low * width * number
            value_panel(kind, weights, p.strides[0], panel, steps, factors, address_of(acc[row]) + d * number,
                        acc.strides[0])  # fmt: skip

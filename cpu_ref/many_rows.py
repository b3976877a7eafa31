"""A block of keys for a task of many rows of one KV head: K and V are packed once, then multiplied at the CPU's peak.

Rows lie in panels as wide as two vectors. Keys that no row of a panel sees are not multiplied. The values of a block
are packed share by share between the panels of its scores, the keys of the next block between those of its values:
memory is read while numbers are multiplied, and little of it waits in L2, where rows of one head share few sets. The
share after the one that is packed is prefetched row by row between the products, the first one of K or V between the
last products of the other.

Arrays come as addresses: an array of a tuple is counted, atomically, by every function that the tuple is given to.
"""

from __future__ import annotations

from typing import NamedTuple

from nbattn.cpu_ref.blocks import padded
from nbattn.cpu_ref.compiling import part, variants
from nbattn.cpu_ref.cpu import REGISTER_BYTES
from nbattn.cpu_ref.lanes import uses_dot
from nbattn.cpu_ref.number_formats import address_of, itemsize, load_int64
from nbattn.cpu_ref.packing import all_finite, pack_keys, pack_queries, pack_values, pack_weights, prefetch_rows
from nbattn.cpu_ref.row_copies import narrow_bfloat16
from nbattn.cpu_ref.tags import PAGED, constants
from nbattn.cpu_ref.tiles import (
    PANEL_STEPS,
    panel_height,
    panel_width,
    score_panel,
    value_panel,
    value_tile_1_select,
)

# Keys of a block. K, V, scores, queries and sums of 384 rows by 144 keys take 800 KB of L2, of 192 by 96 370 KB.
PANEL_KEYS = 144 if REGISTER_BYTES == 64 else 96
SPARE_ROWS, SPARE_COLUMNS = 32, 16  # panels of any CPU may be that much wider than rows and vectors


class Panels(NamedTuple):
    """Where a task's packed numbers lie: addresses, bytes of a key and bytes from one panel of values to the next."""

    queries: int
    keys: int
    key_bytes: int
    rotated: int  # address of int64 [PANEL_KEYS] that lists rotated keys, not packed
    values: int
    panel_bytes: int


class Seen(NamedTuple):
    """Which keys of a block the rows see."""

    whole: bool  # all rows see all keys
    key: int  # the block's first
    n: int
    first: int  # addresses of int64 [rows]
    end: int


class Listed(NamedTuple):
    """Where the addresses of cached rows are listed: K or V, of this block or of the next."""

    rows: int  # address of int64 [PANEL_KEYS]; entries behind the last repeat it
    n: int


@constants
def panel_constants(kind):
    """Return (height, width, bytes of a number, bytes of a cached number, keys of a step over keys)."""
    number = 8 if kind == "float64" else 4
    return panel_height(), panel_width(kind), number, itemsize(kind), 2 if uses_dot(kind) else 1


@part
def panel_steps(kind, dim):
    """Return how many steps a product over the head dimension has."""
    step = panel_constants(kind)[4] * PANEL_STEPS
    return (dim + step - 1) // step * PANEL_STEPS


def pack_query_panels(kind, q, rows, dim, panels):
    """Pack the first `rows` of `q` for a cache kind; with pairs they are rounded to bfloat16, in place."""
    raise NotImplementedError("compiled code only")


@variants(pack_query_panels)
def _pack_query_panels(kind, q, rows, dim, panels):
    def rounded(kind, q, rows, dim, panels):
        place = address_of(q)
        for row in range(rows):
            here = place + row * q.strides[0]
            narrow_bfloat16(kind, here, here, padded(dim))
        pack_queries(kind, place, q.strides[0], rows, panel_steps(kind, dim), panels)

    def as_it_is(kind, q, rows, dim, panels):
        pack_queries(kind, address_of(q), q.strides[0], rows, panel_steps(kind, dim), panels)

    return rounded if uses_dot(kind.tag) else as_it_is


@part
def keys_seen(seen, row, stop):
    """Return the part of a block's keys, from its first on, that the rows ``row .. stop`` see."""
    if seen.whole:
        return 0, seen.n
    low, high = seen.n, 0
    for i in range(row, stop):
        low = min(low, load_int64(seen.first + 8 * i) - seen.key)
        high = max(high, load_int64(seen.end + 8 * i) - seen.key)
    return max(low, 0), min(high, seen.n)


@part
def share(n, i, parts):
    """Return begin and end of share `i` of `n` keys; all begin at even keys."""
    return n * i // parts // 2 * 2, n * (i + 1) // parts // 2 * 2 if i + 1 < parts else n


@part
def pack_key_share(kind, panels, keys, dim, i, parts):
    """Pack a share of the listed K rows."""
    begin, end = share(keys.n, i, parts)
    pack_keys(kind, keys.rows, begin, end, dim, panels.keys, panels.key_bytes)


@part
def pack_value_share(kind, panels, values, dim, i, parts):
    """Pack a share of the listed V rows."""
    _, width, number, _, step = panel_constants(kind)
    begin, end = share(values.n, i, parts)
    pack_values(kind, values.rows + 8 * begin, end - begin, dim, panels.values + begin // step * width * number,
                panels.panel_bytes)  # fmt: skip


@part
def prefetched_share(rows, i, parts, steps):
    """Return where share `i` of the listed rows begins, how many it has, and how many to prefetch in each of `steps`.

    Once for a share: divisions in every step would take a twenty-fifth of a prefill (Zen 3).
    """
    begin, end = share(rows.n, i, parts)
    return rows.rows + 8 * begin, end - begin, (end - begin + steps - 1) // max(1, steps)


@part
def score_panels(score_kind, kind, panels, rows, seen, dim, scale, s, s_stride, values, value_dim, keys):
    """Fill ``s[j, row]`` with ``scale * q[row] @ k[j]`` for the packed keys, as far as rows see them; pack the values.

    Parameters
    ----------
    score_kind : Tag
        The kind of the packed queries and keys.
    values, keys : Listed
        V of this block, K of the next.
    """
    height, width, number, _, _ = panel_constants(score_kind)
    size = panel_constants(kind)[3]
    steps, parts = panel_steps(score_kind, dim), (rows + width - 1) // width
    for i in range(parts):
        pack_value_share(kind, panels, values, value_dim, i, parts)
        row = i * width
        low, high = keys_seen(seen, row, min(row + width, rows))
        queries, column = panels.queries + row * steps * number, s + row * number
        listed, listed_dim, next_share, shares = values, value_dim, i + 1, parts
        if i + 1 == parts:
            listed, listed_dim, next_share, shares = keys, dim, 0, (rows + height - 1) // height
        place, left, each = prefetched_share(listed, next_share, shares, (high + height - 1) // height - low // height)
        for j in range(low // height * height, high, height):
            each = min(each, left)
            prefetch_rows(place, each, listed_dim * size)
            place, left = place + 8 * each, left - each
            score_panel(score_kind, panels.keys + j * panels.key_bytes, queries, steps, scale, column + j * s_stride,
                        s_stride)  # fmt: skip


@part
def weigh_panels(kind, panels, acc, acc_stride, rows, p, p_stride, seen, values, dim, alpha, select, keys, key_dim,
                 coming):  # fmt: skip
    """Scale the accumulators of all rows by `alpha` and add the weighted values; pack the keys of the next block.

    With `select` a weight of 0 marks a dropped key. It may be multiplied with a finite value, for that is nothing;
    where there are others, values are selected.

    Parameters
    ----------
    values, keys, coming : Listed
        V of this block; K and V of the next.
    """
    height, width, number, size, step = panel_constants(kind)
    n, parts, at_once = seen.n, (rows + height - 1) // height, (dim + width - 1) // width
    finite = True
    if select:
        for i in range(at_once):
            finite &= all_finite(kind, panels.values + i * panels.panel_bytes, (n + step - 1) // step)
    if finite:
        pack_weights(kind, p, p_stride, n, padded(rows))
    for i in range(parts):
        pack_key_share(kind, panels, keys, key_dim, i, parts)
        row, stop = i * height, min(i * height + height, rows)
        if not finite:
            for dirty in range(row, stop):
                value_tile_1_select(kind, PAGED, acc + dirty * acc_stride, acc_stride, p + dirty * number, p_stride,
                                    values.rows, 0, 0, n, dim, alpha + dirty * number, values.rows, 0,
                                    values.rows)  # fmt: skip
            continue
        low, high = keys_seen(seen, row, stop)
        low, steps = low // step, max(0, (high + step - 1) // step - low // step)
        listed, listed_dim, next_share, shares = keys, key_dim, i + 1, parts
        if i + 1 == parts:
            listed, listed_dim, next_share, shares = coming, dim, 0, (rows + width - 1) // width
        place, left, each = prefetched_share(listed, next_share, shares, at_once)
        for d in range(at_once):
            each = min(each, left)
            prefetch_rows(place, each, listed_dim * size)
            place, left = place + 8 * each, left - each
            panel = panels.values + d * panels.panel_bytes + low * width * number
            value_panel(kind, p + low * p_stride + row * number, p_stride, panel, steps, alpha + row * number,
                        acc + row * acc_stride + d * width * number, acc_stride)  # fmt: skip

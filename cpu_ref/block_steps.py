"""The steps of a block that differ between tasks of few and of many rows, chosen by the type of a `Tag`.

`FEW` rows of all KV heads read the caches as they lie in memory; `MANY` rows of one head pack keys and values first.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from nbattn.cpu_ref.blocks import query_operand, query_room, score_heads, weigh_values
from nbattn.cpu_ref.compiling import inlined, keep_short, variants
from nbattn.cpu_ref.many_rows import (
    PANEL_KEYS,
    SPARE_COLUMNS,
    SPARE_ROWS,
    Listed,
    Panels,
    Seen,
    pack_key_share,
    pack_query_panels,
    panel_constants,
    score_panels,
    weigh_panels,
)
from nbattn.cpu_ref.number_formats import address_of, itemsize
from nbattn.cpu_ref.rules import rotate_keys
from nbattn.cpu_ref.scratch import zeros
from nbattn.cpu_ref.tags import PAGED, constants, number_type
from nbattn.cpu_ref.tiles import KEYS


class Places(NamedTuple):
    """Where a task of few rows finds lists of rows: addresses of int64 [KEYS]."""

    idle: int  # where a prefetch costs nothing
    rotated: int  # rotated keys
    rotated_bytes: int  # of a row


class FewRows(NamedTuple):
    """Scratch of a task of few rows."""

    queries: np.ndarray  # of `query_room`
    lists: np.ndarray  # int64 [2, KEYS]
    keys: np.ndarray  # number [max_heads * KEYS, dim]: rotated, or without rows
    places: Places


class ManyRows(NamedTuple):
    """Scratch of a task of many rows."""

    queries: np.ndarray  # number [rows, dim]: panels of packed queries
    keys: np.ndarray  # number [PANEL_KEYS, dim]: rotated, or without rows
    packed: np.ndarray  # number [PANEL_KEYS, dim]: panels of packed keys
    values: np.ndarray  # number [dim / width * PANEL_KEYS, width]: panels of packed values
    list: np.ndarray  # int64 [1, PANEL_KEYS]: where rotated keys lie
    places: Panels


class Block(NamedTuple):
    """A block of keys."""

    key: int  # the first
    n: int
    turn: int  # position of the first behind all keys of its request, by which keys are rotated
    head_begin: int
    first: int  # addresses of int64 [rows]: the keys that each row sees
    end: int
    whole: bool  # all rows see all keys


class Side(NamedTuple):
    """Where the rows of K or V lie."""

    rows: int  # address of int64 [keys]: of this block and the task's first head
    coming: int  # of the next block
    head_stride: int
    slot_stride: int


@constants
def block_shape(tile):
    """Return (keys of a block, spare rows, spare columns of accumulators)."""
    # four: a tile of four rows may write scores of up to three behind the last
    return (KEYS, 4, 0) if tile == "few" else (PANEL_KEYS, SPARE_ROWS, SPARE_COLUMNS)


def make_scratch(tile, kind, q, rotating, max_heads, dim, value_dim):
    """Return the scratch arrays of a worker."""
    raise NotImplementedError("compiled code only")


@variants(make_scratch)
def _make_scratch(tile, kind, q, rotating, max_heads, dim, value_dim):
    def few(tile, kind, q, rotating, max_heads, dim, value_dim):
        keep_short()
        lists = zeros(np.int64, 2, KEYS)
        keys = zeros(number_type(kind), max_heads * KEYS if rotating else 0, q.shape[1])
        for j in range(KEYS):
            lists[0, j] = address_of(q)
            lists[1, j] = address_of(keys) + j * keys.strides[0]
        idle = address_of(lists)
        queries = query_room(kind, q.shape[0], max_heads, q.shape[1])
        return FewRows(queries, lists, keys, Places(idle, idle + lists.strides[0], keys.strides[0]))

    def many(tile, kind, q, rotating, max_heads, dim, value_dim):
        number, width = number_type(kind), panel_constants(kind)[1]
        queries = zeros(number, q.shape[0], q.shape[1])
        keys = zeros(number, PANEL_KEYS if rotating else 0, q.shape[1])
        packed = zeros(number, PANEL_KEYS, q.shape[1])
        values = zeros(number, (value_dim + width - 1) // width * PANEL_KEYS, width)
        panel_bytes = PANEL_KEYS * values.strides[0]
        rows = zeros(np.int64, 1, PANEL_KEYS)
        for j in range(PANEL_KEYS):
            rows[0, j] = address_of(keys) + j * keys.strides[0]
        places = Panels(address_of(queries), address_of(packed), packed.strides[0], address_of(rows),
                        address_of(values), panel_bytes)  # fmt: skip
        return ManyRows(queries, keys, packed, values, rows, places)

    return few if tile.tag == "few" else many


def prepare_rows(rule_tag, tile, kind, number_kind, rotating, scratch, q, heads, rows, dim, key_rows, n):
    """Bring `q`, `rows` of each head, and the first block's `n` keys into the form that scores are computed from.

    Returns what `query_operand` does; of many rows the address of their panels.
    """
    raise NotImplementedError("compiled code only")


@variants(prepare_rows)
def _prepare_rows(rule_tag, tile, kind, number_kind, rotating, scratch, q, heads, rows, dim, key_rows, n):
    def few(rule_tag, tile, kind, number_kind, rotating, scratch, q, heads, rows, dim, key_rows, n):
        return query_operand(kind, q, scratch.queries, heads, rows, dim)

    def few_full(rule_tag, tile, kind, number_kind, rotating, scratch, q, heads, rows, dim, key_rows, n):
        if rotating:  # keys are rotated in the arithmetic type
            return query_operand(number_kind, q, scratch.queries, heads, rows, dim)
        return query_operand(kind, q, scratch.queries, heads, rows, dim)

    def many(rule_tag, tile, kind, number_kind, rotating, scratch, q, heads, rows, dim, key_rows, n):
        pack_query_panels(kind, q, heads * rows, dim, scratch.places.queries)
        pack_key_share(kind, scratch.places, Listed(key_rows, n), dim, 0, 1)
        return scratch.places.queries, 0, 0

    def many_full(rule_tag, tile, kind, number_kind, rotating, scratch, q, heads, rows, dim, key_rows, n):
        if rotating:  # keys are rotated in the arithmetic type
            pack_query_panels(number_kind, q, heads * rows, dim, scratch.places.queries)
        else:
            pack_query_panels(kind, q, heads * rows, dim, scratch.places.queries)
            pack_key_share(kind, scratch.places, Listed(key_rows, n), dim, 0, 1)
        return scratch.places.queries, 0, 0

    if tile.tag == "few":
        return few if rule_tag.tag == "plain" else few_full
    return many if rule_tag.tag == "plain" else many_full


@inlined
def seen_of(block):
    """Return what `score_panels` and `weigh_panels` need of a `Block`."""
    return Seen(block.whole, block.key, block.n, block.first, block.end)


def score_block(rule_tag, tile, kind, number_kind, rules, places, rotated, q, operand, heads, rows, block, keys, dim,
                scale, s, values, value_dim):  # fmt: skip
    """Fill ``s[j, row]`` with the raw scores of a block; with `FULL` rules keys may be rotated first.

    Scores of keys that a row does not see may be left as they are.

    Parameters
    ----------
    block : Block
    keys, values : Side
    """
    raise NotImplementedError("compiled code only")


@variants(score_block)
def _score_block(rule_tag, tile, kind, number_kind, rules, places, rotated, q, operand, heads, rows, block, keys, dim,
                 scale, s, values, value_dim):  # fmt: skip
    size = itemsize(kind.tag)

    def few(rule_tag, tile, kind, number_kind, rules, places, rotated, q, operand, heads, rows, block, keys, dim,
            scale, s, values, value_dim):  # fmt: skip
        score_heads(kind, PAGED, operand, heads, rows, keys.rows, keys.head_stride, dim, scale, address_of(s),
                    s.strides[0], keys.rows, keys.head_stride, values.head_stride, keys.slot_stride,
                    places.idle)  # fmt: skip

    def few_full(rule_tag, tile, kind, number_kind, rules, places, rotated, q, operand, heads, rows, block, keys, dim,
                 scale, s, values, value_dim):  # fmt: skip
        if rules.cos == 0:
            score_heads(kind, PAGED, operand, heads, rows, keys.rows, keys.head_stride, dim, scale,
                        address_of(s), s.strides[0], keys.rows, keys.head_stride, values.head_stride,
                        keys.slot_stride, places.idle)  # fmt: skip
        else:
            rotate_keys(kind, rules, rotated, keys.rows, KEYS, heads, block.head_begin, keys.head_stride, size, dim,
                        block.turn, block.n)  # fmt: skip
            score_heads(number_kind, PAGED, operand, heads, rows, places.rotated,
                        KEYS * places.rotated_bytes, dim, scale, address_of(s), s.strides[0], keys.rows,
                        keys.head_stride, values.head_stride, keys.slot_stride, places.idle)  # fmt: skip

    def many(rule_tag, tile, kind, number_kind, rules, places, rotated, q, operand, heads, rows, block, keys, dim,
             scale, s, values, value_dim):  # fmt: skip
        score_panels(kind, kind, places, rows, seen_of(block), dim, scale, address_of(s), s.strides[0],
                     Listed(values.rows, block.n), value_dim, Listed(keys.coming, block.n))  # fmt: skip

    def many_full(rule_tag, tile, kind, number_kind, rules, places, rotated, q, operand, heads, rows, block, keys, dim,
                  scale, s, values, value_dim):  # fmt: skip
        if rules.cos == 0:
            score_panels(kind, kind, places, rows, seen_of(block), dim, scale, address_of(s), s.strides[0],
                         Listed(values.rows, block.n), value_dim, Listed(keys.coming, block.n))  # fmt: skip
        else:
            rotate_keys(kind, rules, rotated, keys.rows, PANEL_KEYS, 1, block.head_begin, keys.head_stride, size, dim,
                        block.turn, block.n)  # fmt: skip
            pack_key_share(number_kind, places, Listed(places.rotated, block.n), dim, 0, 1)
            score_panels(number_kind, kind, places, rows, seen_of(block), dim, scale, address_of(s),
                         s.strides[0], Listed(values.rows, block.n), value_dim, Listed(0, 0))  # fmt: skip

    if tile.tag == "few":
        return few if rule_tag.tag == "plain" else few_full
    return many if rule_tag.tag == "plain" else many_full


def weigh_block(tile, kind, places, acc, heads, rows, p, block, values, dim, alpha, select, keys, key_dim, n_next):
    """Scale the accumulators by `alpha` and add a block's weighted values; see `weigh_values` and `weigh_panels`."""
    raise NotImplementedError("compiled code only")


@variants(weigh_block)
def _weigh_block(tile, kind, places, acc, heads, rows, p, block, values, dim, alpha, select, keys, key_dim, n_next):
    def few(tile, kind, places, acc, heads, rows, p, block, values, dim, alpha, select, keys, key_dim, n_next):
        weigh_values(kind, PAGED, address_of(acc), acc.strides[0], heads, rows, address_of(p), p.strides[0],
                     values.rows, values.head_stride, values.slot_stride, block.n, dim, address_of(alpha),
                     np.int64(select), keys.coming, keys.head_stride, places.idle)  # fmt: skip

    def many(tile, kind, places, acc, heads, rows, p, block, values, dim, alpha, select, keys, key_dim, n_next):
        weigh_panels(kind, places, address_of(acc), acc.strides[0], rows, address_of(p), p.strides[0],
                     seen_of(block), Listed(values.rows, block.n), dim, address_of(alpha), select,
                     Listed(keys.coming, n_next), key_dim, Listed(values.coming, n_next))  # fmt: skip

    return few if tile.tag == "few" else many

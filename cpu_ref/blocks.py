"""What every attention kernel does with one block of keys, and what it does before the first and after the last.

The query rows of a task are packed: ``row = kv_head * rows_per_head + token * group_size + member``, so the rows that
read one KV head stand together and each K and V row is read once for all of them.
"""

from __future__ import annotations

import numpy as np

from nbattn.cpu_ref import primitives  # noqa: F401 - registers the CPU versions of exp2, tanh and idiv
from nbattn.cpu_ref.compiling import inlined, keep_short, part, variants
from nbattn.cpu_ref.cpu import REGISTER_BYTES
from nbattn.cpu_ref.lanes import lane_count, uses_dot
from nbattn.cpu_ref.number_formats import address_of, load_int64
from nbattn.cpu_ref.packing import fill, pack_query_tile_1, pack_query_tile_4, pack_weights
from nbattn.cpu_ref.row_copies import narrow_bfloat16
from nbattn.cpu_ref.rows import ROW_MULTIPLE
from nbattn.cpu_ref.scratch import zeros
from nbattn.cpu_ref.tags import constants, number_type
from nbattn.cpu_ref.tiles import (
    KEYS,
    row_tile_keys,
    score_tile_1,
    score_tile_4,
    score_tile_heads,
    shares_keys,
    tile_keys,
    value_tile_1,
    value_tile_1_select,
    value_tile_4,
)

SPAN_BYTES = np.int64(8192)  # how far the tokens taken together may reach in memory: L1 holds these and the next
VALUE_SPAN_BYTES = np.int64(8192 if REGISTER_BYTES == 64 else 16384)  # the same for V
LATER_BYTES = np.int64(16384)  # how far ahead of their use rows are brought to L2, in the order of memory
LEAST_AHEAD = np.int64(4)  # tokens that a row is prefetched ahead of its use at least
# Tokens of V taken together at least: sums leave the registers after them. Zen 3, 1 x 4096 float32 in L2: two
# 2.8 ms, four 2.2.
LEAST_VALUES = np.int64(2 if REGISTER_BYTES == 64 else 4)


@constants
def _tile_constants(kind):
    """Return (lanes of a vector, bytes of a number, keys of a score tile of four heads, of rows of one head)."""
    return lane_count(kind), 8 if kind == "float64" else 4, tile_keys(kind), row_tile_keys(kind)


@part
def tokens_within(slot_stride, size, least):
    """Return how many tokens of a block, a divisor of `KEYS`, reach no further in memory than `size` bytes."""
    tokens = KEYS
    while tokens > least and tokens * slot_stride > size:
        tokens //= 2
    return tokens


@inlined
def later_rows(listed, stride, stride_behind, slot_stride, heads, place, distance, count):
    """Return where `count` cached rows lie `distance` tokens behind `place`, and the place of the rows next in memory.

    A place is a token and a head. In memory the heads of a token follow each other, or the tokens of a head if heads
    lie further apart; rows that do not are left to the second prefetch. `listed` lists twice `KEYS` rows, whose
    strides from head to head are `stride` and `stride_behind`.
    """
    token, head = place
    address = load_int64(listed + 8 * (token + distance))
    address += head * (stride if token + distance < KEYS else stride_behind)
    if stride > slot_stride:
        token += count
        if token >= KEYS:
            token, head = np.int64(0), head + 1
    else:
        head += count
        while head >= heads:
            token, head = token + 1, head - heads
    return address, (token, head)


@inlined
def score_heads(kind, spread, operand, heads, rows, key_rows, k_head_stride, dim, scale, s, s_stride, listed, k_ahead,
                v_ahead, slot_stride, idle):  # fmt: skip
    """Fill ``s[j, row]`` with ``scale * q[row] @ k[j]`` for the `KEYS` keys of a block and all packed rows.

    `operand` is what `query_operand` returns. `listed` lists the `KEYS` cached rows of K and, behind them, of V, which
    are prefetched meanwhile; `k_ahead` and `v_ahead` are their strides from head to head. `idle` lists `KEYS` places
    where a prefetch costs nothing. Tokens are `spread` as `PAGED` or `SCATTERED` says.
    """
    lanes, size, step, row_step = _tile_constants(kind)
    q, q_stride, q_head_stride = operand
    of_heads = heads // 4 * 4 if rows == 1 else 0  # those that are taken four at once, with a row each
    distance = tokens_within(slot_stride, LATER_BYTES, LEAST_AHEAD)
    place = np.int64(0), np.int64(0)
    if of_heads > 0:
        together = tokens_within(slot_stride, SPAN_BYTES, step)
        for begin in range(0, KEYS, together):
            soon = max(together, LEAST_AHEAD)
            for head in range(0, of_heads, 4):
                for j in range(begin, begin + together, step):
                    later, place = later_rows(listed, k_ahead, v_ahead, slot_stride, heads, place, distance, 4 * step)
                    ahead_stride = k_ahead if j + soon < KEYS else v_ahead
                    score_tile_heads(kind, spread, q + head * q_stride, q_stride, key_rows + 8 * j,
                                     head * k_head_stride, k_head_stride, dim, scale, s + j * s_stride + head * size,
                                     s_stride, listed + 8 * (j + soon), head * ahead_stride, later)  # fmt: skip
    together = tokens_within(slot_stride, SPAN_BYTES, row_step) if rows > 1 else KEYS
    for begin in range(0, KEYS, together):
        ahead_stride = k_ahead if begin + together < KEYS else v_ahead
        for head in range(of_heads, heads):
            k_head, q_head = head * k_head_stride, q + head * q_head_stride
            for j in range(begin, begin + together, row_step):
                keys, column = key_rows + 8 * j, s + j * s_stride
                ahead, ahead_head = listed + 8 * (j + together), head * ahead_stride
                later, place = later_rows(listed, k_ahead, v_ahead, slot_stride, heads, place, distance, row_step)
                done = 0
                while done < rows:
                    q_row, target = q_head + done * q_stride, column + (head * rows + done) * size
                    if rows - done > 1:  # fewer than four: others are the next head's, written again, or padding
                        score_tile_4(kind, spread, q_row, q_stride, keys, k_head, k_head_stride, dim, scale, target,
                                     s_stride, ahead, ahead_head, later)  # fmt: skip
                        done += 4
                    else:
                        if j % lanes == 0:
                            score_tile_1(kind, spread, q_row, q_stride, keys, k_head, k_head_stride, dim, scale, target,
                                         s_stride, ahead, ahead_head, later)  # fmt: skip
                        done += 1
                    ahead, ahead_head, later = idle, np.int64(0), idle


@inlined
def weigh_values(kind, spread, acc, acc_stride, heads, rows, p, p_stride, value_rows, v_head_stride, slot_stride, n,
                 dim, alpha, select, coming, k_head_stride, idle):  # fmt: skip
    """Scale the accumulators of all packed rows by `alpha` and add the weighted values of `n` keys.

    With `select` a weight of 0 marks a dropped key, whose value is never used. `alpha` is 1 afterwards. `coming` lists
    the K rows of the next block; rows of V and these are prefetched.
    """
    _, size, _, _ = _tile_constants(kind)
    if select == 0:
        pack_weights(kind, p, p_stride, n, padded(heads * rows))
    together = tokens_within(slot_stride, VALUE_SPAN_BYTES, LEAST_VALUES)
    distance = tokens_within(slot_stride, LATER_BYTES, LEAST_AHEAD)
    place = np.int64(0), np.int64(0)
    for begin in range(0, n, together):
        end = min(begin + together, n)
        soon = max(together, LEAST_AHEAD)
        listed, ahead_stride = value_rows + 8 * soon, v_head_stride
        if begin + soon >= KEYS:
            listed, ahead_stride = coming + 8 * (soon - KEYS), k_head_stride
        for head in range(heads):
            v_head = head * v_head_stride
            ahead, ahead_head = listed, head * ahead_stride
            behind = value_rows if place[0] + distance < KEYS else coming - 8 * KEYS
            later, place = later_rows(behind, v_head_stride, k_head_stride, slot_stride, heads, place, distance,
                                      end - begin)  # fmt: skip
            done = 0
            while done < rows:
                row = head * rows + done
                here, weights, factors = acc + row * acc_stride, p + row * size, alpha + row * size
                if select != 0:
                    value_tile_1_select(kind, spread, here, acc_stride, weights, p_stride, value_rows, v_head, begin,
                                        end, dim, factors, ahead, ahead_head, later)  # fmt: skip
                    done += 1
                elif rows - done >= 4:
                    value_tile_4(kind, spread, here, acc_stride, weights, p_stride, value_rows, v_head, begin, end, dim,
                                 factors, ahead, ahead_head, later)  # fmt: skip
                    done += 4
                else:
                    value_tile_1(kind, spread, here, acc_stride, weights, p_stride, value_rows, v_head, begin, end, dim,
                                 factors, ahead, ahead_head, later)  # fmt: skip
                    done += 1
                ahead, ahead_head, later = idle, np.int64(0), idle
        if begin == 0:
            fill(kind, alpha, padded(heads * rows), 1)


@part
def padded(n):
    """Return `n` rounded up to whole vectors."""
    return (n + ROW_MULTIPLE - 1) // ROW_MULTIPLE * ROW_MULTIPLE


def query_room(kind, rows, heads, dim):
    """Return the array that `query_operand` fills, zeros; without rows if scores are computed from `q` itself."""
    raise NotImplementedError("compiled code only")


@variants(query_room)
def _query_room(kind, rows, heads, dim):
    if uses_dot(kind.tag):
        return lambda kind, rows, heads, dim: zeros(np.uint16, rows, 2 * padded((dim + 1) // 2))
    if shares_keys("float32"):  # to which keys of any kind are rotated
        return lambda kind, rows, heads, dim: zeros(number_type(kind), rows + 2 * heads, padded(dim))
    return lambda kind, rows, heads, dim: zeros(np.uint16, 0, 0)


def query_operand(kind, q, room, heads, rows, dim):
    """Bring `q`, `rows` of each head, into the form that the score tiles of a cache kind take.

    Returns its address and its strides from row to row and from head to head.
    """
    raise NotImplementedError("compiled code only")


@variants(query_operand)
def _query_operand(kind, q, room, heads, rows, dim):
    def rounded(kind, q, room, heads, rows, dim):
        for row in range(heads * rows):
            narrow_bfloat16(kind, address_of(q[row]), address_of(room[row]), padded(dim))
        return address_of(room), room.strides[0], rows * room.strides[0]

    def shared(kind, q, room, heads, rows, dim):
        keep_short()
        stride, head_stride = q.strides[0], rows * q.strides[0]
        if rows % 4 > 1:  # two or three rows have a tile of four
            head_stride += (4 - rows % 4) * stride
        for head in range(heads):
            source, tile = address_of(q) + head * rows * stride, address_of(room) + head * head_stride
            for done in range(0, rows, 4):
                if rows - done > 1:
                    pack_query_tile_4(kind, source + done * stride, stride, padded(dim), tile + done * stride)
                else:
                    pack_query_tile_1(kind, source + done * stride, stride, padded(dim), tile + done * stride)
        return address_of(room), stride, head_stride

    def as_it_is(kind, q, room, heads, rows, dim):
        return address_of(q), q.strides[0], rows * q.strides[0]

    if uses_dot(kind.tag):
        return rounded
    return shared if shares_keys(kind.tag) else as_it_is

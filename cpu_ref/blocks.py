"""What every attention kernel does with one block of keys, and what it does before the first and after the last.

The query rows of a task are packed: ``row = kv_head * rows_per_head + token * group_size + member``, so the rows that
read one KV head stand together and each K and V row is read once for all of them.
"""

from __future__ import annotations

import numpy as np

from nbattn.cpu_ref import primitives  # noqa: F401 - registers the CPU versions of exp2, tanh and idiv
from nbattn.cpu_ref.compiling import inlined, part, variants
from nbattn.cpu_ref.lanes import lane_count, uses_dot
from nbattn.cpu_ref.number_formats import address_of
from nbattn.cpu_ref.packing import fill, pack_weights
from nbattn.cpu_ref.row_copies import narrow_bfloat16
from nbattn.cpu_ref.rows import ROW_MULTIPLE
from nbattn.cpu_ref.scratch import zeros
from nbattn.cpu_ref.tags import constants
from nbattn.cpu_ref.tiles import (
    KEYS,
    score_tile_1,
    score_tile_4,
    score_tile_heads,
    tile_keys,
    value_tile_1,
    value_tile_1_select,
    value_tile_4,
)

SPAN_BYTES = 8192  # how far the tokens that are taken together may reach in memory
LEAST_VALUES = np.int64(2)  # tokens of V taken together at least: sums leave the registers after them


@constants
def _tile_constants(kind):
    """Return (lanes of a vector, bytes of a number, keys of a score tile of four rows)."""
    return lane_count(kind), 8 if kind == "float64" else 4, tile_keys(kind)


@part
def tokens_together(slot_stride, least):
    """Return how many tokens of a block are taken of one head before the next head: a divisor of `KEYS`.

    Rows are used, and prefetched `tokens_ahead`, nearly as they lie in memory.
    """
    tokens = KEYS
    while tokens > least and tokens * slot_stride > SPAN_BYTES:
        tokens //= 2
    return tokens


@part
def tokens_ahead(slot_stride):
    """Return how many tokens ahead of its use a row is prefetched: little enough that it stays in L1 until then.

    The rows of a block are used K first, then V; behind them come those of the next block.
    """
    return min(2 * tokens_together(slot_stride, LEAST_VALUES), KEYS)


@inlined
def score_heads(kind, q, q_stride, heads, rows, key_rows, k_head_stride, dim, scale, s, s_stride, listed,
                k_ahead, v_ahead, slot_stride, idle):  # fmt: skip
    """Fill ``s[j, row]`` with ``scale * q[row] @ k[j]`` for the `KEYS` keys of a block and all packed rows.

    `listed` lists the `KEYS` cached rows of K and, behind them, of V, which are brought to L1 meanwhile; `k_ahead` and
    `v_ahead` are their strides from head to head. `idle` lists `KEYS` places where a prefetch costs nothing.
    """
    lanes, size, step = _tile_constants(kind)
    distance = tokens_ahead(slot_stride)
    of_heads = heads // 4 * 4 if rows == 1 else 0  # those that are taken four at once, with a row each
    if of_heads > 0:
        together = tokens_together(slot_stride, step)
        for begin in range(0, KEYS, together):
            for head in range(0, of_heads, 4):
                for j in range(begin, begin + together, step):
                    ahead_stride = k_ahead if j + distance < KEYS else v_ahead
                    score_tile_heads(kind, q + head * q_stride, q_stride, key_rows + 8 * j, head * k_head_stride,
                                     k_head_stride, dim, scale, s + j * s_stride + head * size, s_stride,
                                     listed + 8 * (j + distance), head * ahead_stride)  # fmt: skip
    together = tokens_together(slot_stride, step) if rows > 1 else KEYS
    for begin in range(0, KEYS, together):
        for head in range(of_heads, heads):
            k_head = head * k_head_stride
            for j in range(begin, begin + together, step):
                keys, column = key_rows + 8 * j, s + j * s_stride
                ahead, ahead_head = listed + 8 * (j + distance), head * (k_ahead if j + distance < KEYS else v_ahead)
                done = 0
                while done < rows:
                    row = head * rows + done
                    if rows - done > 1:  # fewer than four: others are the next head's, written again later, or padding
                        score_tile_4(kind, q + row * q_stride, q_stride, keys, k_head, k_head_stride, dim, scale,
                                     column + row * size, s_stride, ahead, ahead_head)  # fmt: skip
                        done += 4
                    else:
                        if j % lanes == 0:
                            score_tile_1(kind, q + row * q_stride, q_stride, keys, k_head, k_head_stride, dim, scale,
                                         column + row * size, s_stride, ahead, ahead_head)  # fmt: skip
                        done += 1
                    ahead, ahead_head = idle, np.int64(0)


@inlined
def weigh_values(kind, acc, acc_stride, heads, rows, p, p_stride, value_rows, v_head_stride, slot_stride, n, dim,
                 alpha, select, coming, k_head_stride, distance, idle):  # fmt: skip
    """Scale the accumulators of all packed rows by `alpha` and add the weighted values of `n` keys.

    With `select` a weight of 0 marks a dropped key, whose value is never used. `alpha` is 1 afterwards. `coming` lists
    the K rows of the next block; rows of V and these are brought to L1 `distance` tokens ahead.
    """
    _, size, _ = _tile_constants(kind)
    if select == 0:
        pack_weights(kind, p, p_stride, n, padded(heads * rows))
    together = min(tokens_together(slot_stride, LEAST_VALUES), distance)
    for begin in range(0, n, together):
        end = min(begin + together, n)
        listed, ahead_stride = value_rows + 8 * distance, v_head_stride
        if begin + distance >= KEYS:
            listed, ahead_stride = coming + 8 * (distance - KEYS), k_head_stride
        for head in range(heads):
            v_head = head * v_head_stride
            ahead, ahead_head = listed, head * ahead_stride
            done = 0
            while done < rows:
                row = head * rows + done
                here, weights, factors = acc + row * acc_stride, p + row * size, alpha + row * size
                if select != 0:
                    value_tile_1_select(kind, here, acc_stride, weights, p_stride, value_rows, v_head, begin, end, dim,
                                        factors, ahead, ahead_head)  # fmt: skip
                    done += 1
                elif rows - done >= 4:
                    value_tile_4(kind, here, acc_stride, weights, p_stride, value_rows, v_head, begin, end, dim,
                                 factors, ahead, ahead_head)  # fmt: skip
                    done += 4
                else:
                    value_tile_1(kind, here, acc_stride, weights, p_stride, value_rows, v_head, begin, end, dim,
                                 factors, ahead, ahead_head)  # fmt: skip
                    done += 1
                ahead, ahead_head = idle, np.int64(0)
        if begin == 0:
            fill(kind, alpha, padded(heads * rows), 1)


@part
def padded(n):
    """Return `n` rounded up to whole vectors."""
    return (n + ROW_MULTIPLE - 1) // ROW_MULTIPLE * ROW_MULTIPLE


def query_bits(kind, rows, dim):
    """Return the array that `query_operand` fills, zeros; without rows for a kind that multiplies float32."""
    raise NotImplementedError("compiled code only")


@variants(query_bits)
def _query_bits(kind, rows, dim):
    if uses_dot(kind.tag):
        return lambda kind, rows, dim: zeros(np.uint16, rows, 2 * padded((dim + 1) // 2))
    return lambda kind, rows, dim: zeros(np.uint16, 0, 0)


def query_operand(kind, q, bits, rows, dim):
    """Return address and stride of the first `rows` of `q` as the score tiles of a cache kind take them."""
    raise NotImplementedError("compiled code only")


@variants(query_operand)
def _query_operand(kind, q, bits, rows, dim):
    def rounded(kind, q, bits, rows, dim):
        for row in range(rows):
            narrow_bfloat16(kind, address_of(q[row]), address_of(bits[row]), padded(dim))
        return address_of(bits), bits.strides[0]

    def as_it_is(kind, q, bits, rows, dim):
        return address_of(q), q.strides[0]

    return rounded if uses_dot(kind.tag) else as_it_is

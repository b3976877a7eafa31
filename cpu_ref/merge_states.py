"""Merging attention states: the partial results of split rows, and the states that users bring.

``v = sum_x 2**(s_x - top) v_x / sum_x 2**(s_x - top)`` and ``s = top + log2(sum_x 2**(s_x - top))``. A state of lse
-inf contributes nothing, whatever its values hold; a NaN or +inf lse makes the row NaN.
"""

from __future__ import annotations

import math

import numpy as np
from numba.extending import overload

from nbattn.cpu_ref.blocks import number_type, padded
from nbattn.cpu_ref.compiling import kernel, part
from nbattn.cpu_ref.number_formats import address_of, itemsize, load_int64
from nbattn.cpu_ref.packing import prefetch_row
from nbattn.cpu_ref.row_copies import add_weighted_row
from nbattn.cpu_ref.rows import finish_row, read_number
from nbattn.cpu_ref.workers import next_task
from nbattn.scoring import exp2, shift

# columns of the table of sources, in bytes
V_ADDRESS, V_ROW, V_HEAD, S_ADDRESS, S_ROW, S_HEAD = range(6)
SOURCE_COLUMNS = 6
ROWS_PER_TASK = 16
STATES_PER_SUM = 16  # equal weights round alike, so one long float32 sum would drift by half an ulp a state


def bytes_of(kind):
    """Return the bytes of a number of a kind."""
    raise NotImplementedError("compiled code only")


@overload(bytes_of, inline="always")
def _bytes_of(kind):
    size = itemsize(kind.tag)
    return lambda kind: size


@part
def place_of(table, source, what, state, head):
    """Return where the values (`what` is `V_ADDRESS`) or the lse (`S_ADDRESS`) of a source's state and head lie.

    The table of sources comes as its address: an array would be counted, atomically, at every call.
    """
    entry = table + 8 * (source * SOURCE_COLUMNS + what)
    return load_int64(entry) + state * load_int64(entry + 8) + head * load_int64(entry + 16)


@kernel
def merge_worker(kind, num_heads, counters, num_tasks, sources, s_code, s_unit, rows, indptr, slots, output):
    """Merge the states of rows until no task is left; a task is `ROWS_PER_TASK` rows.

    Parameters
    ----------
    kind : Tag
        Dtype of the values.
    sources : int64 [num_sources, SOURCE_COLUMNS]
        Where states lie. Without `indptr` row r merges row r of every source; with it the states
        ``slots[indptr[i]:indptr[i + 1]]`` of source 0 go to row ``rows[i]``.
    s_code, s_unit : int, float
        Dtype of the lse and its unit: 1 for base 2, log2(e) for base e.
    """
    number, size = number_type(kind), bytes_of(kind)
    dim, table = output.dim, address_of(sources)
    values, later_values = np.empty(padded(dim), number), np.empty(padded(dim), number)
    values_place, later_place = address_of(values), address_of(later_values)
    sinks = output.sinks
    by_slot = indptr.shape[0] > 0
    num_rows = rows.shape[0]
    while True:
        task = next_task(counters, 0)
        if task >= num_tasks:
            return
        for i in range(task * ROWS_PER_TASK, min((task + 1) * ROWS_PER_TASK, num_rows)):
            row = np.int64(rows[i])
            ahead = np.int64(rows[min(i + 1, num_rows - 1)]) - row  # rows from this one to the next
            count = np.int64(indptr[i + 1] - indptr[i]) if by_slot else sources.shape[0]
            for head in range(num_heads):
                top = -math.inf
                if sinks.shape[0] > 0:
                    top = np.float64(sinks[head])
                sink = top
                for x in range(count):
                    source = 0 if by_slot else x
                    state = np.int64(slots[indptr[i] + x]) if by_slot else row
                    s = read_number(place_of(table, source, S_ADDRESS, state, head), s_code) * s_unit
                    top = max(top, s)
                top = max(top, np.float64(shift(number(top))))
                total = np.float64(exp2(number(sink - top)))
                for d in range(dim):
                    values[d] = 0
                for x in range(count):
                    source = 0 if by_slot else x
                    state = np.int64(slots[indptr[i] + x]) if by_slot else row
                    s = read_number(place_of(table, source, S_ADDRESS, state, head), s_code) * s_unit
                    weight = exp2(number(s - top))
                    later = x >= STATES_PER_SUM
                    if later and x % STATES_PER_SUM == 0:
                        later_values[:] = 0
                    if weight != 0:  # an empty state's values may hold anything
                        total += np.float64(weight)
                        target = later_place if later else values_place
                        place = place_of(table, source, V_ADDRESS, state, head)
                        if not by_slot:
                            prefetch_row(place_of(table, source, V_ADDRESS, state + ahead, head), dim * size)
                        add_weighted_row(kind, target, weight, place, dim)
                    if later and (x % STATES_PER_SUM == STATES_PER_SUM - 1 or x == count - 1):
                        for d in range(dim):
                            values[d] += later_values[d]
                lse = -math.inf
                if total != 0:
                    lse = top + math.log2(total)
                    inverse = number(1 / total)
                    for d in range(dim):
                        values[d] *= inverse
                finish_row(output, row, head, values, lse)
        next_task(counters, 1)

"""Merging attention states: the partial results of split rows, and the states that users bring.

``v = sum_x 2**(s_x - top) v_x / sum_x 2**(s_x - top)`` and ``s = top + log2(sum_x 2**(s_x - top))``. A state of lse
-inf contributes nothing, whatever its values hold; a NaN or +inf lse makes the row NaN. A sink is one more state
without values.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from nbattn.cpu_ref.blocks import padded
from nbattn.cpu_ref.compiling import kernel, part
from nbattn.cpu_ref.number_formats import (
    DTYPE_CODE,
    address_of,
    bytes_of,
    load_float32,
    load_float64,
    load_number,
    store_float32,
    store_float64,
)
from nbattn.cpu_ref.rows import finish_values
from nbattn.cpu_ref.scratch import zeros
from nbattn.cpu_ref.state_steps import merge_values, weigh_states
from nbattn.cpu_ref.tags import number_type
from nbattn.cpu_ref.workers import next_task

# columns of the table of sources, in bytes
V_ADDRESS, V_ROW, V_HEAD, S_ADDRESS, S_ROW, S_HEAD = range(6)
SOURCE_COLUMNS = 6
ROWS_PER_TASK = 16
AHEAD_BYTES = 32768  # how far ahead of their use values are prefetched
_FLOAT32 = DTYPE_CODE["float32"]


@part
def read_sums(target, address, stride, code, heads, unit):
    """``target[:heads] = unit * s[:heads]``: the lse of a state in base 2, float64."""
    for head in range(heads):
        place = address + head * stride
        s = np.float64(load_float32(place)) if code == _FLOAT32 else load_float64(place)
        store_float64(target + 8 * head, s * unit)


@part
def write_sums(address, stride, code, source, heads, unit):
    """``s[:heads] = unit * source[:heads]`` for float64 at `source`, rounded once to the dtype `code`."""
    for head in range(heads):
        s = load_float64(source + 8 * head) * unit
        if code == _FLOAT32:
            store_float32(address + head * stride, np.float32(s))
        else:
            store_float64(address + head * stride, s)


class Listed(NamedTuple):
    """The states of a row: addresses of int64 [n], but for n."""

    rows: int  # where values of head 0 lie
    steps: int  # from head to head
    later: int  # where those of the next row lie
    n: int


@part
def merge_heads(kind, out_kind, out, out_stride, heads, dim, states, weights, weights_stride):
    """``out[head] = sum_x weights[x, head] * v[x, head]`` over the listed states; prefetch what comes next."""
    size, weight_size = bytes_of(kind)
    ahead = min(AHEAD_BYTES // max(1, states.n * dim * size), heads)
    for head in range(heads):
        coming, coming_head = states.rows, head + ahead
        if coming_head >= heads:
            coming, coming_head = states.later, coming_head - heads
        merge_values(kind, out_kind, out + head * out_stride, weights + head * weight_size, weights_stride,
                     states.rows, states.steps, states.n, head, coming, coming_head, dim)  # fmt: skip


@kernel
def merge_worker(kind, out_kind, counters, num_tasks, heads, sources, s_code, s_unit, rows, indptr, slots, output):
    """Merge the states of rows until no task is left; a task is `ROWS_PER_TASK` rows.

    Parameters
    ----------
    kind, out_kind : Tag
        Dtypes of the states' values and of the result's. With a value scale or a gate `kind` is the arithmetic type.
    sources : int64 [num_sources, SOURCE_COLUMNS]
        Where states lie. Without `indptr` row r merges row r of every source; with it the states
        ``slots[indptr[i]:indptr[i + 1]]`` of source 0 go to row ``rows[i]``.
    s_code, s_unit : int, float
        Dtype of the lse and its unit: 1 for base 2, log2(e) for base e.
    """
    number, dim = number_type(kind), output.dim
    by_slot, num_rows, most = indptr.shape[0] > 0, rows.shape[0], sources.shape[0]
    for i in range(indptr.shape[0] - 1):
        most = max(most, np.int64(indptr[i + 1] - indptr[i]))
    first = 0 if output.sinks == 0 else 1  # row of the first state; a sink stands before it
    s, lse = zeros(np.float64, most + 1, padded(heads)), zeros(np.float64, 1, padded(heads))
    weights, values = zeros(number, most + 1, padded(heads)), zeros(number, heads, padded(dim))
    places = zeros(np.int64, 3, most)
    s_row, weights_row = s.strides[0], weights.strides[0]
    plain = output.v_scale == 0 and output.gate_address == 0
    for head in range(heads * first):
        s[0, head] = load_number(kind, output.sinks + bytes_of(kind)[1] * head)
    while True:
        task = next_task(counters, 0)
        if task >= num_tasks:
            return
        for i in range(task * ROWS_PER_TASK, min((task + 1) * ROWS_PER_TASK, num_rows)):
            row, later_row = np.int64(rows[i]), np.int64(rows[min(i + 1, num_rows - 1)])
            count = np.int64(indptr[i + 1] - indptr[i]) if by_slot else sources.shape[0]
            for x in range(count):
                source, state, later = x, row, later_row
                if by_slot:
                    at = indptr[i] + x
                    source, state, later = 0, np.int64(slots[at]), np.int64(slots[min(at + count, slots.shape[0] - 1)])
                places[0, x] = sources[source, V_ADDRESS] + state * sources[source, V_ROW]
                places[1, x] = sources[source, V_HEAD]
                places[2, x] = sources[source, V_ADDRESS] + later * sources[source, V_ROW]
                place = sources[source, S_ADDRESS] + state * sources[source, S_ROW]
                target = address_of(s) + (first + x) * s_row
                read_sums(target, place, sources[source, S_HEAD], s_code, heads, s_unit)
            weigh_states(kind, address_of(s), s_row, first + count, heads, address_of(weights), weights_row,
                         address_of(lse))  # fmt: skip
            states = Listed(address_of(places), address_of(places) + 8 * most, address_of(places) + 16 * most, count)
            p = address_of(weights) + first * weights_row
            if plain:
                merge_heads(kind, out_kind, output.address + row * output.stride, output.head_stride, heads, dim,
                            states, p, weights_row)  # fmt: skip
            else:
                merge_heads(kind, kind, address_of(values), values.strides[0], heads, dim, states, p, weights_row)
                for head in range(heads):
                    finish_values(kind, output, row, head, address_of(values) + head * values.strides[0])
            if output.lse_address != 0:
                write_sums(output.lse_address + row * output.lse_stride, output.lse_head_stride, output.lse_code,
                           address_of(lse), heads, output.lse_unit)  # fmt: skip
        next_task(counters, 1)

"""Merging attention states: the partial results of split rows, and the states that users bring.

``v = sum_x 2**(s_x - top) v_x / sum_x 2**(s_x - top)`` and ``s = top + log2(sum_x 2**(s_x - top))``. A state of lse
-inf contributes nothing, whatever its values hold; a NaN or +inf lse makes the row NaN. A sink is one more state
without values.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from nbattn.cpu_ref.blocks import padded
from nbattn.cpu_ref.compiling import part, worker
from nbattn.cpu_ref.number_formats import (
    DTYPE_CODE,
    address_of,
    bytes_of,
    load_float32,
    load_float64,
    load_number,
    store_float32,
    store_float64,
    store_int64,
)
from nbattn.cpu_ref.problem import Output
from nbattn.cpu_ref.records import WORD_BYTES, column, read_record, words_before
from nbattn.cpu_ref.rows import finish_values
from nbattn.cpu_ref.scratch import zeros
from nbattn.cpu_ref.state_steps import merge_values, weigh_states
from nbattn.cpu_ref.tags import number_type
from nbattn.cpu_ref.workers import next_task

ROWS_PER_TASK = 16
AHEAD_BYTES = 32768  # how far ahead of their use values are prefetched
_FLOAT32 = DTYPE_CODE["float32"]


class MergeJob(NamedTuple):
    """The first part of a record of `merge_worker`; addresses but where they are numbers."""

    next_task: int
    rows: int  # int32 [num_rows]
    num_rows: int
    heads: int
    num_sources: int
    most_states: int  # of a row
    s_code: int  # DTYPE_CODE of the lse of states
    s_unit: float  # 1 for base 2, log2(e) for base e
    indptr: int  # int32 [num_rows + 1], or 0
    slots: int  # int32 [num_slots]
    num_slots: int


class Source(NamedTuple):
    """Where states lie: values ``[states, heads, dim]`` and lse ``[states, heads]`` with these strides."""

    v: int
    v_row: int
    v_head: int
    s: int
    s_row: int
    s_head: int


_OUTPUT_WORD = words_before(MergeJob)
SOURCES_WORD = words_before(MergeJob, Output)  # the `Source` of each
_SOURCE_BYTES = WORD_BYTES * words_before(Source)


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


@worker
def merge_worker(record, kind, out_kind):
    """Merge the states of rows until no task is left; a task is `ROWS_PER_TASK` rows.

    Parameters
    ----------
    record : int
        Address of a `MergeJob`, the `Output` and every `Source`. Without `indptr` row r merges row r of every source;
        with it the states ``slots[indptr[i]:indptr[i + 1]]`` of source 0 go to row ``rows[i]``.
    kind, out_kind : Tag
        Dtypes of the states' values and of the result's. With a value scale or a gate `kind` is the arithmetic type.
    """
    job, output = read_record(MergeJob, record), read_record(Output, record + WORD_BYTES * _OUTPUT_WORD)
    sources = record + WORD_BYTES * SOURCES_WORD
    number, dim, heads = number_type(kind), output.dim, job.heads
    by_slot, num_rows, most = job.indptr != 0, job.num_rows, job.most_states
    first = 0 if output.sinks == 0 else 1  # row of the first state; a sink stands before it
    s, lse = zeros(np.float64, most + 1, padded(heads)), zeros(np.float64, 1, padded(heads))
    weights, values = zeros(number, most + 1, padded(heads)), zeros(number, heads, padded(dim))
    places = zeros(np.int64, 3, most)
    rows, steps = address_of(places), address_of(places) + places.strides[0]
    coming = steps + places.strides[0]
    s_row, weights_row = s.strides[0], weights.strides[0]
    plain = output.v_scale == 0 and output.gate_address == 0
    for head in range(heads * first):
        s[0, head] = load_number(kind, output.sinks + bytes_of(kind)[1] * head)
    while True:
        task = next_task(record)
        if task * ROWS_PER_TASK >= num_rows:
            return
        for i in range(task * ROWS_PER_TASK, min((task + 1) * ROWS_PER_TASK, num_rows)):
            row, later_row = column(job.rows, i), column(job.rows, min(i + 1, num_rows - 1))
            begin = column(job.indptr, i) if by_slot else 0
            count = column(job.indptr, i + 1) - begin if by_slot else job.num_sources
            for x in range(count):
                source, state, later = read_record(Source, sources), row, later_row
                if by_slot:
                    state = column(job.slots, begin + x)
                    later = column(job.slots, min(begin + x + count, job.num_slots - 1))
                elif x > 0:
                    source = read_record(Source, sources + _SOURCE_BYTES * x)
                store_int64(rows + 8 * x, source.v + state * source.v_row)
                store_int64(steps + 8 * x, source.v_head)
                store_int64(coming + 8 * x, source.v + later * source.v_row)
                target = address_of(s) + (first + x) * s_row
                read_sums(target, source.s + state * source.s_row, source.s_head, job.s_code, heads, job.s_unit)
            weigh_states(kind, address_of(s), s_row, first + count, heads, address_of(weights), weights_row,
                         address_of(lse))  # fmt: skip
            states = Listed(rows, steps, coming, count)
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

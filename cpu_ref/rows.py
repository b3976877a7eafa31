"""How query rows are read and results are written: one row at a time, in any float dtype."""

from __future__ import annotations

import math

import numpy as np

from nbattn.cpu_ref.compiling import part
from nbattn.cpu_ref.number_formats import (
    DTYPE_CODE,
    address_of,
    bfloat_to_float,
    float_to_bfloat,
    float_to_half,
    half_to_float,
    load_float32,
    load_float64,
    load_uint8,
    load_uint16,
    store_float32,
    store_float64,
    store_uint16,
)
from nbattn.cpu_ref.problem import MASK_BOOL
from nbattn.cpu_ref.row_copies import (
    narrow_bfloat16,
    narrow_float16,
    narrow_float32,
    widen_bfloat16,
    widen_float16,
    widen_float32,
    widen_float64,
)
from nbattn.indexing import kv_head_of
from nbattn.scoring import LOG2E, close_row, sigmoid

ROW_MULTIPLE = 16  # rows of numbers are padded to whole vectors of any width
_FLOAT32, _FLOAT16, _BFLOAT16 = DTYPE_CODE["float32"], DTYPE_CODE["float16"], DTYPE_CODE["bfloat16"]


@part
def read_number(address, code):
    """Return one number of the dtype `code`, as float64."""
    if code == _FLOAT32:
        return np.float64(load_float32(address))
    if code == _FLOAT16:
        return np.float64(half_to_float(load_uint16(address)))
    if code == _BFLOAT16:
        return np.float64(bfloat_to_float(load_uint16(address)))
    if code == MASK_BOOL:
        return 0.0 if load_uint8(address) != 0 else -math.inf
    return load_float64(address)


@part
def read_row(target, address, code, dim):
    """Copy `dim` numbers of the dtype `code` at `address` into the 1-D `target`, a row padded to whole vectors."""
    place = address_of(target)
    if code == _FLOAT32:
        widen_float32(address, place, dim)
    elif code == _FLOAT16:
        widen_float16(address, place, dim)
    elif code == _BFLOAT16:
        widen_bfloat16(address, place, dim)
    else:
        widen_float64(address, place, dim)


@part
def write_row(address, code, source, dim):
    """Write the first `dim` numbers of the 1-D `source` at `address`, rounded once to the dtype `code`."""
    done = 0
    if source.itemsize == 4 and code in (_FLOAT32, _FLOAT16, _BFLOAT16):
        done = dim // ROW_MULTIPLE * ROW_MULTIPLE
        if code == _FLOAT32:
            narrow_float32(address_of(source), address, done)
        elif code == _FLOAT16:
            narrow_float16(address_of(source), address, done)
        else:
            narrow_bfloat16(address_of(source), address, done)
    for d in range(done, dim):
        if code == _FLOAT32:
            store_float32(address + 4 * d, np.float32(source[d]))
        elif code == _FLOAT16:
            store_uint16(address + 2 * d, float_to_half(np.float32(source[d])))
        elif code == _BFLOAT16:
            store_uint16(address + 2 * d, float_to_bfloat(np.float32(source[d])))
        else:
            store_float64(address + 8 * d, np.float64(source[d]))


@part
def finish_values(output, row, qo_head, values):
    """Scale, gate, round and write the normalised `values` of one row and head."""
    dim = output.dim
    if output.v_scale.shape[0] > 0:
        scale = output.v_scale[kv_head_of(qo_head, output.group_size)]
        for d in range(dim):
            values[d] *= scale[d]
    if output.gate_address != 0:
        place = output.gate_address + row * output.gate_stride + qo_head * output.gate_head_stride
        for d in range(dim):
            values[d] *= sigmoid(read_number(place + output.gate_dim_stride * d, output.gate_code) * LOG2E)
    write_row(output.address + row * output.stride + qo_head * output.head_stride, output.code, values, dim)


@part
def finish_row(output, row, qo_head, values, lse):
    """Finish the normalised `values` of one row and head, and write its base-2 `lse`."""
    finish_values(output, row, qo_head, values)
    if output.lse_address != 0:
        place = output.lse_address + row * output.lse_stride + qo_head * output.lse_head_stride
        if output.lse_code == _FLOAT32:
            store_float32(place, np.float32(lse * output.lse_unit))
        else:
            store_float64(place, np.float64(lse * output.lse_unit))


@part
def load_queries(queries, row_begin, row_end, head_begin, heads, packed_rows):
    """Pack query rows: widened, zero-padded, times the key scale of their KV head."""
    packed = 0
    for head in range(head_begin, head_begin + heads):
        for row in range(row_begin, row_end):
            for member in range(queries.group_size):
                qo_head = head * queries.group_size + member
                target = packed_rows[packed]
                place = queries.address + row * queries.stride + qo_head * queries.head_stride
                read_row(target, place, queries.code, queries.dim)
                if queries.k_scale.shape[0] > 0:
                    for d in range(queries.dim):
                        target[d] *= queries.k_scale[head, d]
                if queries.scale == 0:  # wins over products that would overflow before they are scaled
                    for d in range(queries.dim):
                        target[d] *= queries.scale
                packed += 1


@part
def store_rows(output, states, state, row_begin, row_end, head_begin, heads, acc, m, d_sum):
    """Write rows to the output if nothing else contributes to them (``state < 0``), else to their partial states."""
    packed = 0
    sinks, state_values, state_sums = output.sinks, states.v, states.s  # once: a tuple's array is counted at every use
    for head in range(head_begin, head_begin + heads):
        for row in range(row_begin, row_end):
            for member in range(output.group_size):
                qo_head = head * output.group_size + member
                values = acc[packed, : output.dim]
                sink = m.dtype.type(-math.inf)
                if state < 0 and sinks.shape[0] > 0:
                    sink = sinks[qo_head]
                factor, lse = close_row(m[packed], d_sum[packed], sink)
                for d in range(output.dim):
                    values[d] *= factor
                if state < 0:
                    finish_row(output, row, qo_head, values, lse)
                else:
                    slot = state + row - row_begin
                    for d in range(output.dim):
                        state_values[slot, qo_head, d] = values[d]
                    state_sums[slot, qo_head] = lse
                packed += 1

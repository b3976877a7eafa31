"""How query rows are read and results are written: one row at a time, in any float dtype."""

from __future__ import annotations

import math

import numpy as np

from nbattn.cpu_ref.compiling import keep_short, part
from nbattn.cpu_ref.number_formats import (
    DTYPE_CODE,
    bfloat_to_float,
    bytes_of,
    half_to_float,
    load_float32,
    load_float64,
    load_number,
    load_uint8,
    load_uint16,
    store_float32,
    store_float64,
    store_number,
)
from nbattn.cpu_ref.problem import MASK_BOOL
from nbattn.cpu_ref.row_copies import (
    multiply_row,
    narrow_bfloat16,
    narrow_float16,
    narrow_float32,
    narrow_float64,
    scale_row,
    widen_bfloat16,
    widen_float16,
    widen_float32,
    widen_float64,
)
from nbattn.cpu_ref.tags import number_type
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
    """Copy `dim` numbers of the dtype `code` at `address` to `target`, a row padded to whole vectors."""
    keep_short()
    if code == _FLOAT32:
        widen_float32(address, target, dim)
    elif code == _FLOAT16:
        widen_float16(address, target, dim)
    elif code == _BFLOAT16:
        widen_bfloat16(address, target, dim)
    else:
        widen_float64(address, target, dim)


@part
def write_row(kind, address, code, source, dim):
    """Write the first `dim` numbers of the padded row `source` at `address`, rounded once to the dtype `code`."""
    keep_short()
    if code == _FLOAT32:
        narrow_float32(kind, source, address, dim)
    elif code == _FLOAT16:
        narrow_float16(kind, source, address, dim)
    elif code == _BFLOAT16:
        narrow_bfloat16(kind, source, address, dim)
    else:
        narrow_float64(kind, source, address, dim)


@part
def finish_values(kind, output, row, qo_head, values):
    """Scale, gate, round and write the normalised `values` of one row and head, a padded row."""
    keep_short()
    dim, size = output.dim, bytes_of(kind)[1]
    if output.v_scale != 0:
        multiply_row(kind, values, output.v_scale + qo_head * dim * size, dim)
    if output.gate_address != 0:
        place = output.gate_address + row * output.gate_stride + qo_head * output.gate_head_stride
        for d in range(dim):
            gate = sigmoid(read_number(place + output.gate_dim_stride * d, output.gate_code) * LOG2E)
            store_number(kind, values + d * size, load_number(kind, values + d * size) * gate)
    write_row(kind, output.address + row * output.stride + qo_head * output.head_stride, output.code, values, dim)


@part
def load_queries(kind, queries, row_begin, row_end, head_begin, heads, packed, packed_stride):
    """Pack query rows from the address `packed` on: widened, zero-padded, times the key scale of their KV head."""
    keep_short()
    dim = queries.dim
    for head in range(head_begin, head_begin + heads):
        for row in range(row_begin, row_end):
            for member in range(queries.group_size):
                qo_head = head * queries.group_size + member
                place = queries.address + row * queries.stride + qo_head * queries.head_stride
                read_row(packed, place, queries.code, dim)
                if queries.k_scale != 0:
                    multiply_row(kind, packed, queries.k_scale + head * dim * bytes_of(kind)[1], dim)
                if queries.scale == 0:  # wins over products that would overflow before they are scaled
                    scale_row(kind, packed, number_type(kind)(queries.scale), dim)
                packed += packed_stride


@part
def store_rows(kind, output, row_begin, row_end, head_begin, heads, acc, acc_stride, m, d_sum):
    """Normalise, finish and write rows of `acc` and their lse. All places are addresses."""
    keep_short()
    size = bytes_of(kind)[1]
    for head in range(head_begin, head_begin + heads):
        for row in range(row_begin, row_end):
            for member in range(output.group_size):
                qo_head = head * output.group_size + member
                sink = number_type(kind)(-math.inf)
                if output.sinks != 0:
                    sink = load_number(kind, output.sinks + qo_head * size)
                factor, lse = close_row(load_number(kind, m), load_number(kind, d_sum), sink)
                scale_row(kind, acc, factor, output.dim)
                finish_values(kind, output, row, qo_head, acc)
                if output.lse_address != 0:
                    place = output.lse_address + row * output.lse_stride + qo_head * output.lse_head_stride
                    if output.lse_code == _FLOAT32:
                        store_float32(place, np.float32(lse * output.lse_unit))
                    else:
                        store_float64(place, np.float64(lse * output.lse_unit))
                acc, m, d_sum = acc + acc_stride, m + size, d_sum + size

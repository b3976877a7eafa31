"""How query rows are read and results are written: one row at a time, in any float dtype."""

from __future__ import annotations

import numpy as np
from numba import njit

from nbattn.cpu_ref.number_formats import (
    DTYPE_CODE,
    bfloat_to_float,
    float_to_bfloat,
    float_to_half,
    half_to_float,
    load_float32,
    load_float64,
    load_uint16,
    store_float32,
    store_float64,
    store_uint16,
)

_FLOAT32, _FLOAT16, _BFLOAT16 = DTYPE_CODE["float32"], DTYPE_CODE["float16"], DTYPE_CODE["bfloat16"]


@njit(nogil=True, error_model="numpy")
def read_row(target, address, code, dim):
    """Copy `dim` numbers of the dtype `code` at `address` into the 1-D `target` and fill its rest with zeros."""
    if code == _FLOAT32:
        for d in range(dim):
            target[d] = load_float32(address + 4 * d)
    elif code == _FLOAT16:
        for d in range(dim):
            target[d] = half_to_float(load_uint16(address + 2 * d))
    elif code == _BFLOAT16:
        for d in range(dim):
            target[d] = bfloat_to_float(load_uint16(address + 2 * d))
    else:
        for d in range(dim):
            target[d] = load_float64(address + 8 * d)
    target[dim:] = 0


@njit(nogil=True, error_model="numpy")
def write_row(address, code, source, dim):
    """Write the first `dim` numbers of the 1-D `source` at `address`, rounded once to the dtype `code`."""
    if code == _FLOAT32:
        for d in range(dim):
            store_float32(address + 4 * d, np.float32(source[d]))
    elif code == _FLOAT16:
        for d in range(dim):
            store_uint16(address + 2 * d, float_to_half(np.float32(source[d])))
    elif code == _BFLOAT16:
        for d in range(dim):
            store_uint16(address + 2 * d, float_to_bfloat(np.float32(source[d])))
    else:
        for d in range(dim):
            store_float64(address + 8 * d, np.float64(source[d]))

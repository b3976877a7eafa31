"""What a CPU kernel is told, by name. Addresses and strides are in bytes; address 0 means *absent*.

Arrays come as addresses, for Numba counts each array of a tuple, atomically, in every function that the tuple is given
to; where no strides are told they are contiguous. Those marked *number* are float32, or float64 for float64 inputs.
Scores are in log2 units (see `nbattn.scoring`).
"""

from __future__ import annotations

from typing import NamedTuple

# columns of the table of levels: where its pages lie, in bytes
K_ADDRESS, K_PAGE, K_SLOT, K_HEAD, V_ADDRESS, V_PAGE, V_SLOT, V_HEAD, PAGE_IDS, PAGE_SIZE, NUM_PAGES = range(11)
MASK_BOOL = 4  # the dtype code of a boolean mask, beside DTYPE_CODE


class Queries(NamedTuple):
    """The query rows ``[total_q, num_qo_heads, dim]``."""

    address: int
    code: int  # DTYPE_CODE
    stride: int
    head_stride: int
    dim: int
    group_size: int
    scale: float  # softmax scale times log2(e)
    k_scale: int  # address of number [num_kv_heads, dim]


class Output(NamedTuple):
    """Where rows go and what is done to them once, at the end: the result, or partial states of split rows."""

    address: int
    code: int  # DTYPE_CODE
    stride: int
    head_stride: int
    dim: int
    group_size: int
    lse_address: int
    lse_code: int
    lse_stride: int
    lse_head_stride: int
    lse_unit: float  # 1 for base 2, ln(2) for base e
    sinks: int  # address of number [num_qo_heads], log2 units
    v_scale: int  # address of number [num_qo_heads, dim]
    gate_address: int
    gate_code: int
    gate_stride: int
    gate_head_stride: int
    gate_dim_stride: int  # 0 broadcasts


class Rules(NamedTuple):
    """What decides which keys count, and what is added to their scores."""

    row_position: int  # address of int32 [total_q]
    window_left: int  # negative is off
    chunk_size: int  # 0 is off
    soft_cap: float  # log2 units; 0 is off
    slopes: int  # address of number [num_qo_heads], log2 units
    mask_address: int
    mask_code: int  # DTYPE_CODE of an additive mask, MASK_BOOL for a boolean one
    mask_strides: tuple[int, int, int, int]  # request, head, row, key; 0 broadcasts
    row_request: int  # address of int32 [total_q], read with a mask
    row_index: int  # address of int32 [total_q], read with a mask
    cos: int  # address of number [positions, dim / 2] of rotated keys
    sin: int
    origin: int  # position of the planes' row 0
    k_scale: int  # address of number [num_kv_heads, dim] of rotated keys

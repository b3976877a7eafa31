"""What a CPU kernel is told, by name: parts of a record. Addresses and strides are in bytes; address 0 means *absent*.

Arrays without strides are contiguous. Those marked *number* are float32, or float64 for float64 inputs. Scores are in
log2 units (see `nbattn.scoring`).
"""

from __future__ import annotations

from typing import NamedTuple

MASK_BOOL = 4  # the dtype code of a boolean mask, beside DTYPE_CODE


class Pages(NamedTuple):
    """Where the pages of a level lie: K ``[pages, slots, heads, dim]`` with these strides, and V."""

    k: int
    k_page: int
    k_slot: int
    k_head: int
    v: int
    v_page: int
    v_slot: int
    v_head: int
    page_ids: int  # address of int32
    page_size: int
    num_pages: int


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
    mask_request: int  # strides; 0 broadcasts
    mask_head: int
    mask_row: int
    mask_key: int
    row_request: int  # address of int32 [total_q], read with a mask
    row_index: int  # address of int32 [total_q], read with a mask
    cos: int  # address of number [positions, dim / 2] of rotated keys
    sin: int
    origin: int  # position of the planes' row 0
    k_scale: int  # address of number [num_kv_heads, dim] of rotated keys

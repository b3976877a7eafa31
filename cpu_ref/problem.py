"""What a CPU kernel is told, by name. Addresses and strides are in bytes; an empty array or a 0 address means *absent*.

Arrays marked *number* are float32, or float64 for float64 inputs. Scores are in log2 units (see `nbattn.scoring`).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

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
    k_scale: np.ndarray  # number [num_kv_heads, dim] or empty


class Output(NamedTuple):
    """Where rows go and what is done to them once, at the end."""

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
    sinks: np.ndarray  # number [num_qo_heads], log2 units, or empty
    v_scale: np.ndarray  # number [num_kv_heads, dim] or empty
    gate_address: int
    gate_code: int
    gate_stride: int
    gate_head_stride: int
    gate_dim_stride: int  # 0 broadcasts


class States(NamedTuple):
    """Partial results of split rows: normalised values and base-2 lse."""

    v: np.ndarray  # number [num_states, num_qo_heads, dim]
    s: np.ndarray  # number [num_states, num_qo_heads]


class Rules(NamedTuple):
    """What decides which keys count, and what is added to their scores."""

    row_position: np.ndarray  # int32 [total_q]
    window_left: int  # negative is off
    chunk_size: int  # 0 is off
    soft_cap: float  # log2 units; 0 is off
    slopes: np.ndarray  # number [num_qo_heads], log2 units, or empty
    mask_address: int
    mask_code: int  # DTYPE_CODE of an additive mask, MASK_BOOL for a boolean one
    mask_strides: tuple[int, int, int, int]  # request, head, row, key; 0 broadcasts
    row_request: np.ndarray  # int32 [total_q], read with a mask
    row_index: np.ndarray  # int32 [total_q], read with a mask
    cos: np.ndarray  # number [positions, dim / 2] of rotated keys, or empty
    sin: np.ndarray
    origin: int  # position of the planes' row 0
    k_scale: np.ndarray  # number [num_kv_heads, dim] of rotated keys, or empty

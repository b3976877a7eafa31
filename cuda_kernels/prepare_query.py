"""The pass over q before attention: RMS norm per head, rotation, the fold of the keys' scale; the result is float32.

A warp takes one (row, head).
"""

from __future__ import annotations

import math

from numba import cuda
from numba.cuda import float32, int32, int64

from nbattn.cuda_kernels import ptx
from nbattn.cuda_kernels.compile import Kernel
from nbattn.cuda_kernels.formats import F32, load_number
from nbattn.cuda_kernels.plain import add, over_warp
from nbattn.cuda_kernels.rows import element
from nbattn.indexing import idiv
from nbattn.scoring import rotate_pair

WARPS = 4


def make() -> Kernel:
    """Return the kernel; all choices are made at run time."""
    NAN = float32(math.nan)

    def prepare_query(
        q, q_row, q_head, q_kind, out, out_row, out_head, num_rows, num_heads, group_size, head_dim, gain, eps,
        rope_cos, rope_sin, positions, rope_dim, rope_rows, rope_origin, interleaved, k_scale,
    ):  # fmt: skip
        thread = int32(cuda.threadIdx.x)
        lane = int32(thread & int32(31))
        task = int32(cuda.blockIdx.x * WARPS + (thread >> int32(5)))
        row = idiv(task, num_heads)
        head = int32(task - row * num_heads)
        if row >= num_rows:
            return
        q += int64(row) * q_row + int64(head) * q_head
        out += int64(row) * out_row + int64(head) * out_head
        item = int64(4) if q_kind == F32 else int64(2)

        factor = float32(1)
        if gain != int64(0):
            squares = float32(0)
            for dim in range(lane, head_dim, int32(32)):
                x = load_number(q + int64(dim) * item, q_kind)
                squares += x * x
            mean = ptx.divide(over_warp(squares, add), float32(head_dim))
            factor = ptx.rsqrt(mean + eps)

        half, plane, position, outside = int32(rope_dim >> int32(1)), int64(0), int32(0), False
        if rope_dim > int32(0):
            position = int32(element(positions, row) - rope_origin)
            plane = int64(position) * int64(half) * int64(4)
            outside = position < int32(0) or position >= rope_rows
        for dim in range(lane, head_dim, int32(32)):
            x = factor * load_number(q + int64(dim) * item, q_kind)
            if gain != int64(0):
                x *= ptx.load_f32(gain + int64(dim) * int64(4))
            if outside:
                x = NAN  # not seen in a row before the first key: it keeps none
            elif dim < rope_dim:
                if interleaved != int32(0):
                    pair, first = int32(dim >> int32(1)), dim & int32(1) == int32(0)
                    partner = int32(dim ^ int32(1))
                else:
                    first = dim < half
                    pair = int32(dim if first else dim - half)
                    partner = int32(dim + half if first else dim - half)
                y = factor * load_number(q + int64(partner) * item, q_kind)
                if gain != int64(0):
                    y *= ptx.load_f32(gain + int64(partner) * int64(4))
                c = ptx.load_f32(rope_cos + plane + int64(pair) * int64(4))
                s = ptx.load_f32(rope_sin + plane + int64(pair) * int64(4))
                if first:
                    x, _ = rotate_pair(x, y, c, s)
                else:
                    _, x = rotate_pair(y, x, c, s)
            if k_scale != int64(0):
                x *= ptx.load_f32(k_scale + int64(idiv(head, group_size) * head_dim + dim) * int64(4))
            ptx.store_f32(out + int64(dim) * int64(4), x)

    return Kernel(prepare_query, 32 * WARPS, 4)

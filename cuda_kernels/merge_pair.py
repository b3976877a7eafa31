"""Merge two states of every (row, head), also in place: one warp each, every number read and written by one lane."""

from __future__ import annotations

from numba import cuda
from numba.cuda import float32, int32, int64, uint32
from numba.extending import register_jitable

from nbattn.cuda_kernels import ptx
from nbattn.cuda_kernels.compile import Kernel
from nbattn.cuda_kernels.epilogue import EMPTY
from nbattn.cuda_kernels.formats import BF16, F32, F64, store_lse, store_number
from nbattn.indexing import idiv
from nbattn.scoring import shift, state_weight

WARPS = 4


@register_jitable
def read_number(address, kind):
    """Return a number that this kernel may also write, as float32."""
    if kind == F32:
        return ptx.read_f32(address)
    bits = ptx.read_u16(address)
    if kind == BF16:
        return ptx.bits_float(bits << uint32(16))
    low, _ = ptx.unpack_f16(bits)
    return low


@register_jitable
def read_lse(address, kind):
    """Return a log-sum-exp that this kernel may also write."""
    return ptx.read_f64(address) if kind == F64 else ptx.read_f32(address)


def make() -> Kernel:
    """Return the kernel; all choices are made at run time."""

    def merge_pair(
        v_a, v_a_row, v_a_head, v_a_dim, s_a, s_a_row, s_a_head, v_b, v_b_row, v_b_head, v_b_dim, s_b, s_b_row,
        s_b_head, out, out_row, out_head, out_dim, lse, lse_row, lse_head, v_a_kind, v_b_kind, out_kind, s_a_kind,
        s_b_kind, lse_kind, num_rows, num_heads, head_dim, s_unit, lse_unit, mask,
    ):  # fmt: skip
        thread = int32(cuda.threadIdx.x)
        lane = int32(thread & int32(31))
        task = int32(cuda.blockIdx.x * WARPS + (thread >> int32(5)))
        row = idiv(task, num_heads)
        head = int64(task - row * num_heads)
        if row >= num_rows:
            return
        if mask != int64(0) and ptx.load_u8(mask + int64(row)) == uint32(0):
            return
        s_0 = read_lse(s_a + int64(row) * s_a_row + head * s_a_head, s_a_kind) * s_unit
        s_1 = read_lse(s_b + int64(row) * s_b_row + head * s_b_head, s_b_kind) * s_unit
        m = ptx.maximum(ptx.maximum(s_0, s_1), EMPTY)
        base = shift(m)
        w_0, w_1 = state_weight(s_0, base), state_weight(s_1, base)
        total = w_0 + w_1
        row_lse = EMPTY
        if total != float32(0):
            w_0, w_1 = ptx.divide(w_0, total), ptx.divide(w_1, total)
            row_lse = m + ptx.log2_approx(total)
        v_a += int64(row) * v_a_row + head * v_a_head
        v_b += int64(row) * v_b_row + head * v_b_head
        out += int64(row) * out_row + head * out_head
        for dim in range(lane, head_dim, int32(32)):
            value = float32(0)
            if w_0 != float32(0):  # an empty side's values are not looked at
                value += w_0 * read_number(v_a + int64(dim) * v_a_dim, v_a_kind)
            if w_1 != float32(0):
                value += w_1 * read_number(v_b + int64(dim) * v_b_dim, v_b_kind)
            store_number(out + int64(dim) * out_dim, out_kind, value)
        ptx.sync_warp()  # every lane has read s
        if lane == int32(0) and lse != int64(0):
            store_lse(lse + int64(row) * lse_row + head * lse_head, lse_kind, row_lse * lse_unit)

    return Kernel(merge_pair, 32 * WARPS, 8)

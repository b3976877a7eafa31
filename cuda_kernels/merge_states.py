"""Merge partial attention states: any number per row, one pass over the values.

A warp takes one (row, head). Its lanes first share the states' log-sum-exps, then walk the states together, each lane
holding some dimensions. The engine's last step and the user's `merge_states` are the same kernel: the one names its
states by lists of slots, the other by their place.
"""

from __future__ import annotations

from numba import cuda
from numba.cuda import float32, int32, int64, types

from nbattn.cuda_kernels import ptx
from nbattn.cuda_kernels.compile import Kernel
from nbattn.cuda_kernels.epilogue import EMPTY, normalise, store_result
from nbattn.cuda_kernels.formats import BF16, F32, load_lse, load_number, store_lse, unpack_bf16
from nbattn.cuda_kernels.groups import Result
from nbattn.cuda_kernels.loops import keep_rolled
from nbattn.cuda_kernels.rows import element
from nbattn.indexing import idiv
from nbattn.scoring import shift, state_weight

WARPS = 4


def make(vector: bool) -> Kernel:
    """Return the kernel; `vector`: four neighbouring dimensions a lane, aligned to their 8 or 16 bytes."""
    WIDTH = 4 if vector else 1

    def merge_states(
        v, v_row, v_state, v_head, v_dim, v_kind, s, s_row, s_state, s_head, s_kind, merge_rows, merge_indptr,
        merge_slots, num_rows, num_states, num_heads, group_size, head_dim, out, out_row, out_head, out_dim, out_kind,
        lse, lse_row, lse_head, lse_kind, s_unit, lse_unit, sinks, v_scale, v_unit, gate, gate_row, gate_head,
        gate_dim, gate_kind,
    ):  # fmt: skip
        thread = int32(cuda.threadIdx.x)
        lane = int32(thread & int32(31))
        task = int32(cuda.blockIdx.x * WARPS + (thread >> int32(5)))
        place = idiv(task, num_heads)
        head = int32(task - place * num_heads)
        if place >= num_rows:
            return
        row, begin, count = place, int32(0), num_states
        if merge_rows != int64(0):
            row = element(merge_rows, place)
            begin = element(merge_indptr, place)
            count = int32(element(merge_indptr, place + int32(1)) - begin)
        if row < int32(0):  # room that the plan keeps for later
            return
        v += int64(head) * v_head + (int64(row) * v_row if merge_rows == int64(0) else int64(0))
        s += int64(head) * s_head + (int64(row) * s_row if merge_rows == int64(0) else int64(0))

        result = Result(num_heads, head_dim, int64(0), int64(0), out, out_row, out_head, out_dim, out_kind, lse,
                        lse_row, lse_head, lse_unit, sinks, v_scale, v_unit, gate, gate_row, gate_head, gate_dim,
                        gate_kind)  # fmt: skip

        m = EMPTY
        for at in range(lane, count, int32(32)):
            slot = element(merge_slots, begin + at) if merge_slots != int64(0) else int32(at)
            m = ptx.maximum(m, load_lse(s + int64(slot) * s_state, s_kind) * s_unit)
        for distance in (1, 2, 4, 8, 16):
            m = ptx.maximum(m, ptx.exchange_f32(m, int32(distance)))
        base = shift(m)

        first = int32(0)
        while first < head_dim:  # 32 lanes' dimensions at a time
            dim = int32(first + lane * int32(WIDTH))
            inside = dim < head_dim
            value = cuda.local.array(4, types.float32)
            for e in range(4):
                value[e] = float32(0)
            d_sum = float32(0)
            for chunk in range(int32(0), count, int32(32)):
                at = int32(chunk + lane)
                slot, weight = int32(0), float32(0)
                if at < count:
                    slot = element(merge_slots, begin + at) if merge_slots != int64(0) else at
                    weight = state_weight(load_lse(s + int64(slot) * s_state, s_kind) * s_unit, base)
                for j in range(min(int32(32), count - chunk)):
                    w, source = ptx.from_lane_f32(weight, j), ptx.from_lane_i32(slot, j)
                    d_sum += w
                    if inside and w != float32(0):  # an empty state's values are not looked at
                        address = v + int64(source) * v_state
                        if WIDTH == 1:
                            value[0] += w * load_number(address + int64(dim) * v_dim, v_kind)
                        elif v_kind == F32:
                            x0, x1, x2, x3 = ptx.load_4u32(address + int64(dim) * int64(4))
                            value[0] += w * ptx.bits_float(x0)
                            value[1] += w * ptx.bits_float(x1)
                            value[2] += w * ptx.bits_float(x2)
                            value[3] += w * ptx.bits_float(x3)
                        else:
                            x0, x1 = ptx.load_2u32(address + int64(dim) * int64(2))
                            y0, y1 = unpack_bf16(x0) if v_kind == BF16 else ptx.unpack_f16(x0)
                            y2, y3 = unpack_bf16(x1) if v_kind == BF16 else ptx.unpack_f16(x1)
                            value[0] += w * y0
                            value[1] += w * y1
                            value[2] += w * y2
                            value[3] += w * y3
            inverse, row_lse = normalise(m, d_sum, sinks, head)
            if inside:
                for e in range(WIDTH):
                    merged = value[e] * inverse if inverse != float32(0) else float32(0)
                    store_result(merged, dim + int32(e), row, head, idiv(head, group_size), result)
            if first == int32(0) and lane == int32(0) and lse != int64(0):
                store_lse(lse + int64(row) * lse_row + int64(head) * lse_head, lse_kind, row_lse * lse_unit)
            first = int32(first + int32(32 * WIDTH))
            keep_rolled()

    return Kernel(merge_states, 32 * WARPS, 4)

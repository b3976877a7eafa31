"""Merge two states of every (row, head), also in place: every number is read and written by one lane."""

from __future__ import annotations

from numba import cuda
from numba.cuda import float32, int32, int64, types, uint32

from nbattn.cuda_kernels import ptx
from nbattn.cuda_kernels.chunks import make_chunk
from nbattn.cuda_kernels.compile import Kernel
from nbattn.cuda_kernels.epilogue import EMPTY
from nbattn.cuda_kernels.formats import store_lse
from nbattn.cuda_kernels.loops import keep_rolled
from nbattn.cuda_kernels.shapes import PAIR_THREADS
from nbattn.indexing import idiv
from nbattn.scoring import shift, state_weight

THREADS = PAIR_THREADS


def make(vector: bool) -> Kernel:
    """Return the kernel; `vector`: chunks of 16 bytes, see `make_chunk`."""
    chunk = make_chunk(vector, 2)
    WIDTH, WORDS, width, load, load_lse = chunk.WIDTH, chunk.WORDS, chunk.width, chunk.load, chunk.load_lse
    add, store = chunk.add, chunk.store
    BOTH_WORDS = 2 * WORDS

    def merge_pair(
        v_a, v_a_row, v_a_head, v_a_dim, s_a, s_a_row, s_a_head, v_b, v_b_row, v_b_head, v_b_dim, s_b, s_b_row,
        s_b_head, out, out_row, out_head, out_dim, lse, lse_row, lse_head, v_kind, out_kind, s_kind, lse_kind, num_rows,
        num_heads, head_dim, lane_bits, s_unit, lse_unit, mask,
    ):  # fmt: skip
        thread, lanes = int32(cuda.threadIdx.x), int32(int32(1) << lane_bits)
        lane = int32(thread & (lanes - int32(1)))
        task = int32(cuda.blockIdx.x * (int32(THREADS) >> lane_bits) + (thread >> lane_bits))
        row = idiv(task, num_heads)
        head = int64(task - row * num_heads)
        wanted = row < num_rows
        if mask != int64(0) and wanted:
            wanted = ptx.load_u8(mask + int64(row)) != uint32(0)
        s_a += int64(row) * s_a_row + head * s_a_head
        s_b += int64(row) * s_b_row + head * s_b_head
        s_0 = load_lse(s_a, s_kind, wanted) * s_unit
        s_1 = load_lse(s_b, s_kind, wanted) * s_unit
        v_a += int64(row) * v_a_row + head * v_a_head
        v_b += int64(row) * v_b_row + head * v_b_head
        out += int64(row) * out_row + head * out_head
        words, value = cuda.local.array(BOTH_WORDS, types.uint32), cuda.local.array(WIDTH, types.float32)
        weight = cuda.local.array(2, types.float32)
        m, total = EMPTY, float32(0)
        dim = int32(lane * width(v_kind))
        first = int32(0)
        while first < head_dim:
            inside = wanted and dim < head_dim
            load(words, 0, v_a + int64(dim) * v_a_dim, v_kind, inside)
            load(words, WORDS, v_b + int64(dim) * v_b_dim, v_kind, inside)
            if first == int32(0):  # after the first loads have been sent off
                m = ptx.maximum(ptx.maximum(s_0, s_1), EMPTY)
                base = shift(m)
                weight[0], weight[1] = state_weight(s_0, base), state_weight(s_1, base)
                total = weight[0] + weight[1]
                if total != float32(0):
                    weight[0], weight[1] = ptx.divide(weight[0], total), ptx.divide(weight[1], total)
            for e in range(WIDTH):
                value[e] = float32(0)
            add(value, words, weight, v_kind)  # an empty side's values are selected away
            if inside:
                store(out + int64(dim) * out_dim, out_kind, value, v_kind)
            dim = int32(dim + lanes * width(v_kind))
            first = int32(first + lanes * width(v_kind))
            keep_rolled()
        ptx.sync_warp()  # every lane has read s
        if wanted and lane == int32(0) and lse != int64(0):
            row_lse = m + ptx.log2_approx(total) if total != float32(0) else EMPTY
            store_lse(lse + int64(row) * lse_row + head * lse_head, lse_kind, row_lse * lse_unit)

    return Kernel(merge_pair, THREADS, 10)

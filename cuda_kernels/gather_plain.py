"""Attention over index lists without matrix instructions: float32 caches and odd head sizes.

A block takes a part of one row's list and one query head; its four warps take interleaved runs of 32 entries.
"""

from __future__ import annotations

from numba import cuda
from numba.cuda import int32, int64, types

from nbattn.cuda_kernels import ptx
from nbattn.cuda_kernels.compile import Kernel
from nbattn.cuda_kernels.epilogue import EMPTY, make_write_row
from nbattn.cuda_kernels.formats import F32
from nbattn.cuda_kernels.gather_attention import list_entry, part_of_block, request_of_row, resolve
from nbattn.cuda_kernels.groups import Result
from nbattn.cuda_kernels.loops import keep_rolled
from nbattn.cuda_kernels.plain import WARPS, empty_accumulator, load_row, make_plain, publish_row, row_bytes
from nbattn.cuda_kernels.rows import element
from nbattn.cuda_kernels.shapes import LARGEST_HEAD, PLAIN_BLOCKS, shared_bytes_for
from nbattn.indexing import idiv, mapped_page


def make(cache: str) -> Kernel:
    """Return the kernel for a cache format."""
    plain = make_plain(cache)
    dot, fold = plain.dot, plain.fold
    write_row = make_write_row(WARPS, 1)

    def gather_plain(
        rows, token_indices, token_indices_row, counts, num_rows, width, splits, split_size, heads_last, q, q_row,
        q_head, q_kind, k, k_page, k_slot, k_head, v, v_page, v_slot, v_head, kv_indices, num_pages, page_size,
        head_dim_qk, head_dim_vo, group_size, num_qo_heads, scale, state_v, state_s, out, out_row, out_head, out_dim,
        out_kind, lse, lse_row, lse_head, lse_unit, sinks, v_scale, v_unit, gate, gate_row, gate_head, gate_dim,
        gate_kind,
    ):  # fmt: skip
        num_kv_heads = idiv(num_qo_heads, group_size)
        block = int32(cuda.blockIdx.x)
        part, row, place, kv_head = part_of_block(block, num_rows, splits, heads_last, num_kv_heads)
        qo_head = int32(kv_head * group_size + cuda.blockIdx.y)
        thread = int32(cuda.threadIdx.x)
        warp, lane = int32(thread >> int32(5)), int32(thread & int32(31))
        query = ptx.shared_address(cuda.shared.array(0, types.uint8, 128))
        pitch = row_bytes(max(head_dim_qk, head_dim_vo))  # q, then an accumulator of each warp, then their sums
        accumulators, partials = query + pitch, query + pitch * int32(1 + WARPS)
        ptx.let_next_start()  # the merge
        ptx.wait_for_earlier()
        page_begin, kv_len = request_of_row(rows, row)
        list_begin = int32(place * split_size)
        list_end = int32(min(list_begin + split_size, width, element(counts, row)))
        tokens = token_indices + int64(row) * token_indices_row
        address = q + int64(row) * q_row + int64(qo_head) * q_head
        load_row(query, address, q_kind, int64(4) if q_kind == F32 else int64(2), head_dim_qk, thread)
        k += int64(kv_head) * k_head
        v += int64(kv_head) * v_head
        result = Result(num_qo_heads, head_dim_vo, state_v, state_s, out, out_row, out_head, out_dim, out_kind, lse,
                        lse_row, lse_head, lse_unit, sinks, v_scale, v_unit, gate, gate_row, gate_head, gate_dim,
                        gate_kind)  # fmt: skip

        accumulator = accumulators + warp * pitch
        m, d_lane = empty_accumulator(accumulator, head_dim_vo, lane)
        here = int32(list_begin + warp * int32(32))
        while here < list_end:
            token = list_entry(tokens, int32(here + lane), list_end)
            page, slot = resolve(token, kv_len, page_begin, kv_indices, page_size)
            score = EMPTY
            if mapped_page(page, num_pages):
                score = scale * dot(query, k + int64(page) * k_page + int64(slot) * k_slot, head_dim_qk)
            m, d_lane = fold(score, page, slot, m, d_lane, accumulator, lane, v, v_page, v_slot, head_dim_vo)
            here = int32(here + int32(32 * WARPS))
            keep_rolled()

        publish_row(m, d_lane, partials, warp, lane)
        if warp == int32(0):
            state = part if splits > int32(1) else int32(-1)
            write_row(accumulators, pitch, partials, int32(0), lane, row, qo_head, kv_head, state, result)

    return Kernel(gather_plain, 32 * WARPS, PLAIN_BLOCKS, shared_bytes_for(LARGEST_HEAD))

"""Paged attention without matrix instructions: float32 caches, keys that are rotated on the fly, odd head sizes.

A block takes one work item, one KV head and one (row, head) pair; its four warps read interleaved runs of 32 keys.
"""

from __future__ import annotations

from numba import cuda
from numba.cuda import float32, int32, int64, types

from nbattn.cuda_kernels import ptx
from nbattn.cuda_kernels.compile import Kernel
from nbattn.cuda_kernels.epilogue import EMPTY, make_write_row, make_write_shares
from nbattn.cuda_kernels.formats import F32
from nbattn.cuda_kernels.groups import Result, Rules
from nbattn.cuda_kernels.loops import keep_rolled
from nbattn.cuda_kernels.parameters import WAITS_NEVER
from nbattn.cuda_kernels.plain import WARPS, empty_accumulator, load_row, make_plain, publish_row, row_bytes
from nbattn.cuda_kernels.rows import (
    biased_score,
    element,
    item_and_head,
    keys_of_row,
    read_item,
    row_and_head,
    slope_and_mask,
)
from nbattn.cuda_kernels.shapes import LARGEST_HEAD, shared_bytes_for
from nbattn.cuda_kernels.tile_copies import look_up
from nbattn.indexing import mapped_page


def make(cache: str) -> Kernel:
    """Return the kernel for a cache format."""
    plain = make_plain(cache)
    dot, dot_rotated, fold = plain.dot, plain.dot_rotated, plain.fold
    write_row, write_shares = make_write_row(WARPS, 1), make_write_shares(WARPS, 1, 0)

    def paged_plain(
        work, row_position, row_request, row_index, waits, q, q_row, q_head, q_kind, k, k_page, k_slot, k_head, v,
        v_page, v_slot, v_head, kv_indices, num_pages, page_size, head_dim_qk, head_dim_vo, group_size, num_qo_heads,
        scale, window_left, chunk_size, soft_cap, alibi_slopes, mask, mask_request, mask_head, mask_row, mask_key,
        mask_kind, rope_cos, rope_sin, rope_dim, rope_origin, k_scale, state_v, state_s, out, out_row, out_head,
        out_dim, out_kind, lse, lse_row, lse_head, lse_unit, sinks, v_scale, v_unit, gate, gate_row, gate_head,
        gate_dim, gate_kind,
    ):  # fmt: skip
        number, kv_head = item_and_head(ptx.cluster_index(), num_qo_heads, group_size)
        item, pair = read_item(work, number), int32(cuda.blockIdx.y)
        if pair >= (item.row_end - item.row_begin) * group_size:
            ptx.wait_for_earlier()
            return
        if waits != int32(WAITS_NEVER):  # plans are copied to the device; what else is read may be a kernel's result
            ptx.wait_for_earlier()
        ptx.let_next_start()
        thread = int32(cuda.threadIdx.x)
        warp, lane = int32(thread >> int32(5)), int32(thread & int32(31))
        rank, blocks = ptx.cluster_rank(), ptx.cluster_size()
        warps = int32(blocks * int32(WARPS))  # of the cluster
        query = ptx.shared_address(cuda.shared.array(0, types.uint8, 128))
        pitch = row_bytes(max(head_dim_qk, head_dim_vo))  # q, then an accumulator of each warp, then their sums
        accumulators, partials = query + pitch, query + pitch * int32(1 + WARPS)
        row, qo_head = row_and_head(pair, item.row_begin, kv_head, group_size)
        address = q + int64(row) * q_row + int64(qo_head) * q_head
        load_row(query, address, q_kind, int64(4) if q_kind == F32 else int64(2), head_dim_qk, thread)
        k += int64(kv_head) * k_head
        v += int64(kv_head) * v_head
        rules = Rules(row_position, row_request, row_index, window_left, chunk_size, soft_cap, alibi_slopes, mask,
                      mask_request, mask_head, mask_row, mask_key, mask_kind)  # fmt: skip
        result = Result(num_qo_heads, head_dim_vo, state_v, state_s, out, out_row, out_head, out_dim, out_kind, lse,
                        lse_row, lse_head, lse_unit, sinks, v_scale, v_unit, gate, gate_row, gate_head, gate_dim,
                        gate_kind)  # fmt: skip

        position = element(row_position, row)
        first, end = keys_of_row(item, position, rules)
        key_begin, key_end = max(item.key_begin, first), min(item.key_end, end)
        slope, mask_at = slope_and_mask(item, row, qo_head, rules)

        accumulator = accumulators + warp * pitch
        m, d_lane = empty_accumulator(accumulator, head_dim_vo, lane)
        tile = int32(key_begin + (rank * int32(WARPS) + warp) * int32(32))
        while tile < key_end:
            key = int32(tile + lane)
            page, slot = look_up(key, key_end, item.page_begin, kv_indices, page_size)
            score = EMPTY
            if mapped_page(page, num_pages):
                k_row = k + int64(page) * k_page + int64(slot) * k_slot
                stands = int32(item.key_position + key)
                if rope_cos != int64(0):
                    scale_row = k_scale + int64(kv_head * head_dim_qk) * int64(4) if k_scale != int64(0) else int64(0)
                    score = dot_rotated(query, k_row, scale_row, head_dim_qk, rope_cos, rope_sin, rope_dim,
                                        int32(item.key_base + key) - rope_origin)  # fmt: skip
                else:
                    score = dot(query, k_row, head_dim_qk)
                at = mask_at + int64(key) * mask_key if mask_at != int64(0) else int64(0)
                distance = float32(int32(stands - position))
                score, keep = biased_score(score * scale, distance, slope, at, rules)
                score = score if keep else EMPTY
            m, d_lane = fold(score, page, slot, m, d_lane, accumulator, lane, v, v_page, v_slot, head_dim_vo)
            tile = int32(tile + warps * int32(32))
            keep_rolled()

        ptx.wait_for_earlier()
        publish_row(m, d_lane, partials, warp, lane)
        slot = int32(item.state + row - item.row_begin) if item.state >= int32(0) else int32(-1)
        if blocks > int32(1):
            ptx.arrive_cluster()
            write_shares(accumulators, pitch, partials, warp * blocks + rank, warps, int32(1), lane, row, qo_head,
                         kv_head, slot, result)  # fmt: skip
            ptx.leave_cluster()
            ptx.wait_cluster()  # no block leaves while another reads its shared memory
        elif warp == int32(0):
            write_row(accumulators, pitch, partials, int32(0), lane, row, qo_head, kv_head, slot, result)

    return Kernel(paged_plain, 32 * WARPS, 4, shared_bytes_for(LARGEST_HEAD))

"""Paged attention for many query rows: FlashAttention-2 over a work item's rows and the heads of one KV group.

A block takes 64 (row, head) pairs of one work item and KV head, 16 for each of its four warps. All warps share tiles of
keys that `cp.async` brings from the pages into two buffers, one filling while the other is used.
"""

from __future__ import annotations

from numba import cuda
from numba.cuda import float32, int32, int64, types, uint32

from nbattn.cuda_kernels import ptx
from nbattn.cuda_kernels.compile import Kernel
from nbattn.cuda_kernels.epilogue import EMPTY, make_publish, make_write_row
from nbattn.cuda_kernels.formats import CACHE_FORMATS
from nbattn.cuda_kernels.groups import Pages, Queries, Result, Rules
from nbattn.cuda_kernels.loops import keep_rolled
from nbattn.cuda_kernels.rows import (
    KEY_BEGIN,
    KEY_END,
    KEY_POSITION,
    PAGE_BEGIN,
    ROW_BEGIN,
    ROW_END,
    STATE,
    item_and_head,
    keys_of_warp,
    make_score_tile,
    make_set_up_rows,
    row_and_head,
    work_field,
)
from nbattn.cuda_kernels.tile import look_up, make_tile

WARPS = 4


def make(cache: str, head_dim: int, full: bool) -> Kernel:
    """Return the kernel for a cache format and a head-size class; see `paged_decode.make`."""
    KEYS = 64 if head_dim <= 128 and CACHE_FORMATS[cache].item_bytes == 2 else 32  # as many as registers allow
    GROUPS = KEYS // 16
    tile = make_tile(cache, head_dim, KEYS)
    ITEM, K_ROW, V_ROW, K_TILE = tile.ITEM, tile.K_ROW, tile.V_ROW, KEYS * tile.K_ROW
    STAGE = KEYS * (tile.K_ROW + tile.V_ROW)
    PITCH = 4 * head_dim + 32
    QUERY = 2 * STAGE
    SCRATCH = max(QUERY + WARPS * tile.Q_BYTES, WARPS * 16 * PITCH)  # accumulators take the place of keys and queries
    BITS = SCRATCH + WARPS * 1024
    PARTIALS = BITS + 2 * GROUPS * 4 + 32 * WARPS
    SHARED = PARTIALS + WARPS * 16 * 8
    Q_SHARED, Q_WORDS, Q_BYTES = tile.Q_SHARED, tile.Q_WORDS, tile.Q_BYTES
    S_NUMBERS, P_WORDS, O_NUMBERS = tile.S_NUMBERS, tile.P_WORDS, tile.O_NUMBERS
    set_up_rows, score_tile = make_set_up_rows(tile.load_query), make_score_tile(GROUPS, full)
    fetch, multiply_keys, soften = tile.fetch, tile.multiply_keys, tile.soften
    pack_weights, multiply_values = tile.pack_weights, tile.multiply_values
    HAS_NONFINITE = tile.HAS_NONFINITE  # int8 holds neither NaN nor infinity
    has_nonfinite, select_values = tile.has_nonfinite, tile.select_values
    publish, write_row = make_publish(tile.out_dim, O_NUMBERS // 4, PITCH), make_write_row(1, 16)
    wait_for_oldest, wait_for_all = ptx.WAIT_COPIES[1], ptx.WAIT_COPIES[0]

    def paged_prefill(
        work, row_position, row_request, row_index, q, q_row, q_head, q_kind, k, k_page, k_slot, k_head, v, v_page,
        v_slot, v_head, kv_indices, num_pages, page_size, head_dim_qk, head_dim_vo, group_size, num_qo_heads, scale,
        window_left, chunk_size, soft_cap, alibi_slopes, mask, mask_request, mask_head, mask_row, mask_key, mask_kind,
        rope_cos, rope_sin, rope_dim, rope_origin, k_scale, state_v, state_s, out, out_row, out_head, out_dim,
        out_kind, lse, lse_row, lse_head, lse_unit, sinks, v_scale, v_unit, gate, gate_row, gate_head, gate_dim,
        gate_kind,
    ):  # fmt: skip
        item, kv_head = item_and_head(int32(cuda.blockIdx.x), num_qo_heads, group_size)
        thread = int32(cuda.threadIdx.x)
        warp, lane = int32(thread >> int32(5)), int32(thread & int32(31))
        first_pair = int32(cuda.blockIdx.y * 64 + warp * int32(16))
        row_begin = work_field(work, item, ROW_BEGIN)
        pairs = int32((work_field(work, item, ROW_END) - row_begin) * group_size)
        if int32(cuda.blockIdx.y * 64) >= pairs:
            return
        c = int32(lane & int32(3))
        shared = ptx.shared_address(cuda.shared.array(0, types.uint8, 128))
        scratch, bits_at = shared + int32(SCRATCH) + warp * int32(1024), shared + int32(BITS)
        partials = shared + int32(PARTIALS) + warp * int32(128)
        queries = Queries(q, q_row, q_head, q_kind, head_dim_qk, group_size, scale)
        pages = Pages(k + int64(kv_head) * k_head, k_page, k_slot, head_dim_qk * int32(ITEM),
                      v + int64(kv_head) * v_head, v_page, v_slot, head_dim_vo * int32(ITEM), num_pages)  # fmt: skip
        rules = Rules(row_position, row_request, row_index, window_left, chunk_size, soft_cap, alibi_slopes, mask,
                      mask_request, mask_head, mask_row, mask_key, mask_kind)  # fmt: skip
        result = Result(num_qo_heads, head_dim_vo, state_v, state_s, out, out_row, out_head, out_dim, out_kind, lse,
                        lse_row, lse_head, lse_unit, sinks, v_scale, v_unit, gate, gate_row, gate_head, gate_dim,
                        gate_kind)  # fmt: skip
        page_begin, key_position = work_field(work, item, PAGE_BEGIN), work_field(work, item, KEY_POSITION)

        query = shared + int32(QUERY) + warp * int32(Q_BYTES) if Q_SHARED else cuda.local.array(Q_WORDS, types.uint32)
        first, end = cuda.local.array(2, types.int32), cuda.local.array(2, types.int32)
        unit, slope = cuda.local.array(2, types.float32), cuda.local.array(2, types.float32)
        position, mask_at = cuda.local.array(2, types.int32), cuda.local.array(2, types.int64)
        set_up_rows(query, unit, first, end, slope, position, mask_at, work, item, first_pair, pairs, kv_head, lane,
                    True, queries, rules)  # fmt: skip
        # what this warp sees, and what the block must read
        low, high = keys_of_warp(first, end)
        ranges = bits_at + int32(2 * GROUPS * 4)
        ptx.shared_store_u32(ranges + warp * int32(8), low)
        ptx.shared_store_u32(ranges + warp * int32(8) + int32(4), high)
        ptx.sync_block()
        key0, key_end = int32(0x7FFFFFFF), int32(0)
        for w in range(WARPS):
            key0 = int32(min(key0, int32(ptx.shared_load_u32(ranges + int32(8 * w)))))
            key_end = int32(max(key_end, int32(ptx.shared_load_u32(ranges + int32(8 * w + 4)))))
        key0 = int32(max(min(key0, key_end) & int32(-16), work_field(work, item, KEY_BEGIN)))
        key_end = int32(min(key_end, work_field(work, item, KEY_END)))

        s, p = cuda.local.array(S_NUMBERS, types.float32), cuda.local.array(P_WORDS, types.uint32)
        o, bits = cuda.local.array(O_NUMBERS, types.float32), cuda.local.array(GROUPS, types.uint32)
        m, d_sum = cuda.local.array(2, types.float32), cuda.local.array(2, types.float32)
        for i in range(O_NUMBERS):
            o[i] = float32(0)
        for i in range(2):
            m[i], d_sum[i] = EMPTY, float32(0)

        # warp g brings keys 16 g ... 16 g + 15 of every tile; the first one before the loop
        ahead = int32(key0 + warp * int32(16) + (lane & int32(15)))
        place, stage = shared + warp * int32(16 * K_ROW), int32(0)
        if warp < int32(GROUPS):
            page, slot = look_up(ahead, key_end, page_begin, kv_indices, page_size)
            found = fetch(place, shared + int32(K_TILE) + warp * int32(16 * V_ROW), page, slot, lane, pages)
            if lane == int32(0):
                ptx.shared_store_u32(bits_at + warp * int32(4), found)
        ptx.commit_copies()
        while key0 < key_end:
            other = int32(1) - stage
            ahead = int32(ahead + int32(KEYS))
            if warp < int32(GROUPS):
                page, slot = look_up(ahead, key_end, page_begin, kv_indices, page_size)
                target = other * int32(STAGE)
                v_place = shared + target + int32(K_TILE) + warp * int32(16 * V_ROW)
                found = fetch(place + target, v_place, page, slot, lane, pages)
                if lane == int32(0):
                    ptx.shared_store_u32(bits_at + other * int32(4 * GROUPS) + warp * int32(4), found)
            ptx.commit_copies()
            wait_for_oldest()
            ptx.sync_block()
            if key0 < high and int32(key0 + int32(KEYS)) > low:
                k_tile = shared + stage * int32(STAGE)
                v_tile = k_tile + int32(K_TILE)
                for g in range(GROUPS):
                    bits[g] = ptx.shared_load_u32(bits_at + stage * int32(4 * GROUPS) + int32(4 * g))
                multiply_keys(query, s, k_tile, lane)
                dropped = score_tile(s, bits, key0, c, unit, first, end, slope, position, mask_at, key_position, rules)
                soften(s, m, d_sum, o)
                if HAS_NONFINITE and ptx.ballot(dropped) != uint32(0) and has_nonfinite(v_tile, lane):
                    select_values(s, o, v_tile, scratch, lane)
                else:
                    pack_weights(s, p)
                    multiply_values(p, o, v_tile, lane)
            ptx.sync_block()
            key0 = int32(key0 + int32(KEYS))
            stage = other
            keep_rolled()

        wait_for_all()
        ptx.sync_block()
        accumulators = shared + warp * int32(16 * PITCH)
        publish(o, m, d_sum, accumulators, partials, lane)
        ptx.sync_warp()
        state = work_field(work, item, STATE)
        for tile_row in range(min(int32(16), pairs - first_pair)):
            row, qo_head = row_and_head(first_pair + tile_row, row_begin, kv_head, group_size)
            slot = int32(state + row - row_begin) if state >= int32(0) else int32(-1)
            write_row(accumulators, int32(PITCH), partials, tile_row, lane, row, qo_head, kv_head, slot, result)
            keep_rolled()

    return Kernel(paged_prefill, 32 * WARPS, 2, SHARED)

"""Paged attention for many query rows: FlashAttention-2 over a work item's rows and the heads of one KV group.

A block takes 128 (row, head) pairs of one work item and KV head, shared by four warps, or eight where heads are large:
at 32 rows a warp, shared memory is read half as often as at 16. All warps share tiles of keys that `cp.async` brings
from the pages into two buffers, one filling while the other is used.
"""

from __future__ import annotations

from numba import cuda
from numba.cuda import float32, int32, int64, types, uint32

from nbattn.cuda_kernels import ptx
from nbattn.cuda_kernels.compile import Kernel
from nbattn.cuda_kernels.epilogue import EMPTY
from nbattn.cuda_kernels.formats import CACHE_FORMATS
from nbattn.cuda_kernels.groups import Pages, Queries, Result, Rules
from nbattn.cuda_kernels.loops import keep_rolled
from nbattn.cuda_kernels.parameters import WAITS_NEVER
from nbattn.cuda_kernels.rows import (
    LIMITS_BYTES,
    end_behind_earlier,
    item_and_head,
    keys_of_warp,
    make_finish,
    make_rows_of_lanes,
    make_score_tile,
    read_item,
)
from nbattn.cuda_kernels.shapes import PREFILL_ROWS
from nbattn.cuda_kernels.tile import make_tile
from nbattn.cuda_kernels.tile_copies import look_up


def make(cache: str, head_dim: int, full: bool) -> Kernel:
    """Return the kernel for a cache format and a head-size class; see `paged_decode.make`."""
    wide = head_dim <= (64 if full else 128) and CACHE_FORMATS[cache].item_bytes == 2
    KEYS = 64 if wide else 32  # as many as registers allow
    WARPS = 4 if head_dim <= 128 else 8
    FETCHED, WORDS, ROWS = KEYS // 4, KEYS // 32, PREFILL_ROWS // WARPS
    ALL_FETCH = WARPS == 4
    ALL, store_bits = (1 << 32) - 1, ptx.shared_store_u16 if FETCHED == 16 else ptx.shared_store_u8
    tile = make_tile(cache, head_dim, KEYS, FETCHED, ROWS // 16)
    ITEM, K_ROW, V_ROW, K_TILE = tile.ITEM, tile.K_ROW, tile.V_ROW, KEYS * tile.K_ROW
    STAGE = KEYS * (tile.K_ROW + tile.V_ROW)
    PITCH = 4 * head_dim + 32
    QUERY = 2 * STAGE
    SCRATCH = max(QUERY + WARPS * tile.Q_BYTES, WARPS * ROWS * PITCH)  # accumulators take the place of keys and queries
    BITS = SCRATCH + WARPS * 1024
    PARTIALS = BITS + 16 + 16 * WARPS
    LIMITS = PARTIALS + WARPS * ROWS * 8
    SHARED = LIMITS + WARPS * ROWS * LIMITS_BYTES
    Q_SHARED, Q_WORDS, Q_BYTES = tile.Q_SHARED, tile.Q_WORDS, tile.Q_BYTES
    S_NUMBERS, P_WORDS, O_NUMBERS = tile.S_NUMBERS, tile.P_WORDS, tile.O_NUMBERS
    LANE_ROWS = tile.ROWS
    RAW_WORDS = 2 * LANE_ROWS
    set_up_lanes, recall_rows = make_rows_of_lanes(tile.load_query, LANE_ROWS, full)
    MASKED = 1  # times eight keys whose mask is in registers at a time
    _, score_tile = make_score_tile(KEYS, LANE_ROWS, full, MASKED)
    fetch, multiply_keys, soften = tile.fetch, tile.multiply_keys, tile.soften
    pack_weights, multiply_values = tile.pack_weights, tile.multiply_values
    HAS_NONFINITE = tile.HAS_NONFINITE  # int8 holds neither NaN nor infinity
    has_nonfinite, select_values = tile.has_nonfinite, tile.select_values
    finish = make_finish(tile.out_dim, head_dim // 8, PITCH, LANE_ROWS, ITEM == 1)
    wait_for_oldest, wait_for_all = ptx.WAIT_COPIES[1], ptx.WAIT_COPIES[0]

    def paged_prefill(
        work, row_position, row_request, row_index, waits, q, q_row, q_head, q_kind, k, k_page, k_slot, k_head, v,
        v_page, v_slot, v_head, kv_indices, num_pages, page_size, head_dim_qk, head_dim_vo, group_size, num_qo_heads,
        scale, window_left, chunk_size, soft_cap, alibi_slopes, mask, mask_request, mask_head, mask_row, mask_key,
        mask_kind, rope_cos, rope_sin, rope_dim, rope_origin, k_scale, state_v, state_s, out, out_row, out_head,
        out_dim, out_kind, lse, lse_row, lse_head, lse_unit, sinks, v_scale, v_unit, gate, gate_row, gate_head,
        gate_dim, gate_kind,
    ):  # fmt: skip
        number, kv_head = item_and_head(int32(cuda.blockIdx.x), num_qo_heads, group_size)
        thread = int32(cuda.threadIdx.x)
        warp, lane = int32(thread >> int32(5)), int32(thread & int32(31))
        first_pair = int32(cuda.blockIdx.y * (WARPS * ROWS) + warp * int32(ROWS))
        item = read_item(work, number)
        pairs = int32((item.row_end - item.row_begin) * group_size)
        if int32(cuda.blockIdx.y * (WARPS * ROWS)) >= pairs:
            end_behind_earlier()
            return
        shared = ptx.shared_address(cuda.shared.array(0, types.uint8, 128))
        scratch, bits_at = shared + int32(SCRATCH) + warp * int32(1024), shared + int32(BITS)
        partials = shared + int32(PARTIALS) + warp * int32(ROWS * 8)
        queries = Queries(q, q_row, q_head, q_kind, head_dim_qk, group_size, scale)
        pages = Pages(k + int64(kv_head) * k_head, k_page, k_slot, head_dim_qk * int32(ITEM),
                      v + int64(kv_head) * v_head, v_page, v_slot, head_dim_vo * int32(ITEM), num_pages)  # fmt: skip
        rules = Rules(row_position, row_request, row_index, window_left, chunk_size, soft_cap, alibi_slopes, mask,
                      mask_request, mask_head, mask_row, mask_key, mask_kind)  # fmt: skip
        result = Result(num_qo_heads, head_dim_vo, state_v, state_s, out, out_row, out_head, out_dim, out_kind, lse,
                        lse_row, lse_head, lse_unit, sinks, v_scale, v_unit, gate, gate_row, gate_head, gate_dim,
                        gate_kind)  # fmt: skip

        # each warp brings its FETCHED keys of every tile; the first ones before anything that waits for memory
        key0, key_end = item.key_begin, item.key_end
        ahead = int32(key0 + warp * int32(FETCHED) + (lane & int32(FETCHED - 1)))
        k_place, stage = shared + warp * int32(FETCHED * K_ROW), int32(0)
        v_place = shared + int32(K_TILE) + warp * int32(FETCHED * V_ROW)
        bits_place = bits_at + warp * int32(FETCHED // 8)
        if waits != int32(WAITS_NEVER):  # plans are copied to the device; what else is read may be a kernel's result
            ptx.wait_for_earlier()
        ptx.let_next_start()
        page, slot = look_up(ahead, key_end, item.page_begin, kv_indices, page_size)
        if ALL_FETCH or warp < int32(4):
            found = fetch(k_place, v_place, page, slot, lane, pages)
            if lane == int32(0):
                store_bits(bits_place, found)
        ptx.commit_copies()
        ahead = int32(ahead + int32(KEYS))
        page, slot = look_up(ahead, key_end, item.page_begin, kv_indices, page_size)

        query = shared + int32(QUERY) + warp * int32(Q_BYTES) if Q_SHARED else cuda.local.array(Q_WORDS, types.uint32)
        first, end = cuda.local.array(LANE_ROWS, types.int32), cuda.local.array(LANE_ROWS, types.int32)
        unit, slope = cuda.local.array(LANE_ROWS, types.float32), cuda.local.array(LANE_ROWS, types.float32)
        position, mask_at = cuda.local.array(LANE_ROWS, types.int32), cuda.local.array(LANE_ROWS, types.int64)
        limits = shared + int32(LIMITS) + warp * int32(ROWS * LIMITS_BYTES)
        set_up_lanes(query, first, end, limits, item, first_pair, pairs, kv_head, lane, queries, rules)
        low, high, all_low, all_high = keys_of_warp(first[0], end[0])
        ranges = bits_at + int32(16)  # what each warp sees
        mine = ranges + warp * int32(16)
        ptx.shared_store_2u32(mine, low, high)
        ptx.shared_store_2u32(mine + int32(8), all_low, all_high)
        ptx.sync_block()
        seen_end = int32(0)
        for w in range(WARPS):
            seen_end = int32(max(seen_end, int32(ptx.shared_load_u32(ranges + int32(16 * w + 4)))))
        key_end = int32(min(key_end, seen_end))

        s, p = cuda.local.array(S_NUMBERS, types.float32), cuda.local.array(P_WORDS, types.uint32)
        o, bits = cuda.local.array(O_NUMBERS, types.float32), cuda.local.array(WORDS, types.uint32)
        raw = cuda.local.array(RAW_WORDS, types.uint32)
        m, d_sum = cuda.local.array(LANE_ROWS, types.float32), cuda.local.array(LANE_ROWS, types.float32)
        for i in range(O_NUMBERS):
            o[i] = float32(0)
        for i in range(LANE_ROWS):
            m[i], d_sum[i] = EMPTY, float32(0)
        while key0 < key_end:
            other = int32(1) - stage
            lane = ptx.from_lane_i32(lane, lane)  # or all that follows from it would stay in registers, and spill
            target = other * int32(STAGE)
            if ALL_FETCH or warp < int32(4):
                found = fetch(k_place + target, v_place + target, page, slot, lane, pages)
                if lane == int32(0):
                    store_bits(bits_place + other * int32(4 * WORDS), found)
            ptx.commit_copies()
            wait_for_oldest()
            ptx.sync_block()
            low, high, all_low, all_high = ptx.shared_load_4u32(mine)
            if key0 < int32(high) and int32(key0 + int32(KEYS)) > int32(low):
                k_tile, v_tile = shared + stage * int32(STAGE), shared + stage * int32(STAGE) + int32(K_TILE)
                whole = key0 >= int32(all_low) and int32(key0 + int32(KEYS)) <= int32(all_high)
                for i in range(WORDS):
                    bits[i] = ptx.shared_load_u32(bits_at + stage * int32(4 * WORDS) + int32(4 * i))
                    whole = whole and bits[i] == uint32(ALL)
                multiply_keys(query, s, k_tile, lane)
                recall_rows(unit, first, end, slope, position, mask_at, limits, lane)
                dropped = score_tile(s, bits, key0, lane & int32(3), whole, unit, first, end, slope, position,
                                     mask_at, item.key_position, rules, raw)  # fmt: skip
                if head_dim == 64:
                    lane = ptx.own_lane()  # or it would spill
                soften(s, m, d_sum, o)
                if HAS_NONFINITE and ptx.ballot(dropped) != uint32(0) and has_nonfinite(v_tile, lane):
                    select_values(s, o, v_tile, scratch, lane)
                else:
                    pack_weights(s, p)
                    multiply_values(p, o, v_tile, lane)
            ahead = int32(ahead + int32(KEYS))
            page, slot = look_up(ahead, key_end, item.page_begin, kv_indices, page_size)
            ptx.sync_block()
            key0, stage = int32(key0 + int32(KEYS)), other
            keep_rolled()

        wait_for_all()
        accumulators = shared + warp * int32(ROWS * PITCH)
        finish(o, m, d_sum, accumulators, partials, item.state, item.row_begin, first_pair, pairs, lane,
               kv_head, group_size, result)  # fmt: skip
        end_behind_earlier()

    return Kernel(paged_prefill, 32 * WARPS, 8 // WARPS, SHARED)

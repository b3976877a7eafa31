"""Split-KV paged attention for few query rows: the (row, head) pairs of one KV head fill a tensor-core tile of 16.

A block takes one work item, one KV head and 16 pairs. Its four warps read interleaved tiles of keys, each through
its own ring of `cp.async` stages, so no warp waits for another until their four partial softmaxes are merged in shared
memory. The result is a partial state, or the finished row where nothing else contributes to it.
"""

from __future__ import annotations

from numba import cuda
from numba.cuda import float32, int32, int64, types, uint32

from nbattn.cuda_kernels import ptx
from nbattn.cuda_kernels.compile import Kernel
from nbattn.cuda_kernels.epilogue import EMPTY, make_publish, make_write_rows
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
    end_behind_earlier,
    item_and_head,
    make_keys_of_warp,
    make_score_tile,
    make_set_up_rows,
    row_and_head,
    work_field,
)
from nbattn.cuda_kernels.tile import look_up, make_tile

WARPS = 4
STAGES = 3  # two tiles of keys under way while one is used


def make(cache: str, head_dim: int, full: bool) -> Kernel:
    """Return the kernel for a cache format and a head-size class.

    Parameters
    ----------
    cache : str
        8- or 16-bit cache format.
    head_dim : int
        Largest head size, of `shapes.head_size_class`.
    full : bool
        Compile soft cap, ALiBi and masks in.
    """
    KEYS = 32 if head_dim <= 128 and CACHE_FORMATS[cache].item_bytes == 1 else 16  # 8 KB a tile at most head sizes
    tile = make_tile(cache, head_dim, KEYS, KEYS)
    STAGE, K_TILE, ITEM = KEYS * (tile.K_ROW + tile.V_ROW), KEYS * tile.K_ROW, tile.ITEM
    STEP, ALL = KEYS * WARPS, (1 << KEYS) - 1
    RING = STAGES * STAGE
    PITCH = 4 * head_dim + 32  # of a row of accumulators; they take the rings' place
    SCRATCH = WARPS * RING
    PARTIALS = SCRATCH + WARPS * 1024
    QUERY = PARTIALS + WARPS * 16 * 8
    SHARED = QUERY + tile.Q_BYTES
    Q_SHARED = tile.Q_SHARED
    Q_WORDS, S_NUMBERS, P_WORDS, O_NUMBERS = tile.Q_WORDS, tile.S_NUMBERS, tile.P_WORDS, tile.O_NUMBERS
    set_up_rows, keys_of_warp = make_set_up_rows(tile.load_query, 2), make_keys_of_warp(2)
    fetch, multiply_keys, soften = tile.fetch, tile.multiply_keys, tile.soften
    pack_weights, multiply_values = tile.pack_weights, tile.multiply_values
    HAS_NONFINITE = tile.HAS_NONFINITE  # int8 holds neither NaN nor infinity
    has_nonfinite, select_values = tile.has_nonfinite, tile.select_values
    score_tile = make_score_tile(KEYS, 2, full)
    publish, write_rows = make_publish(tile.out_dim, O_NUMBERS // 4, PITCH), make_write_rows(WARPS, 16)
    wait_for_oldest, wait_for_all = ptx.WAIT_COPIES[STAGES - 2], ptx.WAIT_COPIES[0]

    def paged_decode(
        work, row_position, row_request, row_index, q, q_row, q_head, q_kind, k, k_page, k_slot, k_head, v, v_page,
        v_slot, v_head, kv_indices, num_pages, page_size, head_dim_qk, head_dim_vo, group_size, num_qo_heads, scale,
        window_left, chunk_size, soft_cap, alibi_slopes, mask, mask_request, mask_head, mask_row, mask_key, mask_kind,
        rope_cos, rope_sin, rope_dim, rope_origin, k_scale, state_v, state_s, out, out_row, out_head, out_dim,
        out_kind, lse, lse_row, lse_head, lse_unit, sinks, v_scale, v_unit, gate, gate_row, gate_head, gate_dim,
        gate_kind,
    ):  # fmt: skip
        ptx.let_next_start()
        item, kv_head = item_and_head(int32(cuda.blockIdx.x), num_qo_heads, group_size)
        first_pair = int32(cuda.blockIdx.y * 16)
        row_begin = work_field(work, item, ROW_BEGIN)
        pairs = (work_field(work, item, ROW_END) - row_begin) * group_size
        if first_pair >= pairs:
            end_behind_earlier()
            return
        thread = int32(cuda.threadIdx.x)
        warp, lane = int32(thread >> int32(5)), int32(thread & int32(31))
        c = int32(lane & int32(3))
        shared = ptx.shared_address(cuda.shared.array(0, types.uint8, 128))
        ring, scratch = shared + warp * int32(RING), shared + int32(SCRATCH) + warp * int32(1024)
        partials = shared + int32(PARTIALS)
        queries = Queries(q, q_row, q_head, q_kind, head_dim_qk, group_size, scale)
        pages = Pages(k + int64(kv_head) * k_head, k_page, k_slot, head_dim_qk * int32(ITEM),
                      v + int64(kv_head) * v_head, v_page, v_slot, head_dim_vo * int32(ITEM), num_pages)  # fmt: skip
        rules = Rules(row_position, row_request, row_index, window_left, chunk_size, soft_cap, alibi_slopes, mask,
                      mask_request, mask_head, mask_row, mask_key, mask_kind)  # fmt: skip
        result = Result(num_qo_heads, head_dim_vo, state_v, state_s, out, out_row, out_head, out_dim, out_kind, lse,
                        lse_row, lse_head, lse_unit, sinks, v_scale, v_unit, gate, gate_row, gate_head, gate_dim,
                        gate_kind)  # fmt: skip
        key_end, page_begin = work_field(work, item, KEY_END), work_field(work, item, PAGE_BEGIN)
        key_position = work_field(work, item, KEY_POSITION)

        # fill the ring, before anything that waits for memory: this warp's tiles are STEP keys apart
        key0 = int32(work_field(work, item, KEY_BEGIN) + warp * int32(KEYS))
        ahead = int32(key0 + (lane & int32(KEYS - 1)))
        bits_1 = bits_2 = uint32(0)
        for stage in range(STAGES - 1):
            page, slot = look_up(ahead, key_end, page_begin, kv_indices, page_size)
            place = ring + int32(stage * STAGE)
            bits_1 = bits_2
            bits_2 = fetch(place, place + int32(K_TILE), page, slot, lane, pages)
            ptx.commit_copies()
            ahead = int32(ahead + int32(STEP))
        page, slot = look_up(ahead, key_end, page_begin, kv_indices, page_size)

        query = shared + int32(QUERY) if Q_SHARED else cuda.local.array(Q_WORDS, types.uint32)
        first, end = cuda.local.array(2, types.int32), cuda.local.array(2, types.int32)
        unit, slope = cuda.local.array(2, types.float32), cuda.local.array(2, types.float32)
        position, mask_at = cuda.local.array(2, types.int32), cuda.local.array(2, types.int64)
        set_up_rows(query, unit, first, end, slope, position, mask_at, work, item, first_pair, pairs, kv_head, lane,
                    warp == int32(0), queries, rules)  # fmt: skip
        _, _, all_low, all_high = keys_of_warp(first, end)
        if Q_SHARED:
            ptx.sync_block()

        s, p = cuda.local.array(S_NUMBERS, types.float32), cuda.local.array(P_WORDS, types.uint32)
        o, bits = cuda.local.array(O_NUMBERS, types.float32), cuda.local.array(1, types.uint32)
        m, d_sum = cuda.local.array(2, types.float32), cuda.local.array(2, types.float32)
        for i in range(O_NUMBERS):
            o[i] = float32(0)
        for i in range(2):
            m[i], d_sum[i] = EMPTY, float32(0)

        used, filled = ring, ring + int32((STAGES - 1) * STAGE)
        while key0 < key_end:
            wait_for_oldest()
            ptx.sync_warp()
            bits[0], bits_1 = bits_1, bits_2
            bits_2 = fetch(filled, filled + int32(K_TILE), page, slot, lane, pages)
            ptx.commit_copies()
            ahead = int32(ahead + int32(STEP))
            page, slot = look_up(ahead, key_end, page_begin, kv_indices, page_size)
            multiply_keys(query, s, used, lane)
            whole = key0 >= all_low and int32(key0 + int32(KEYS)) <= all_high and bits[0] == uint32(ALL)
            dropped = score_tile(s, bits, key0, c, whole, unit, first, end, slope, position, mask_at, key_position,
                                 rules)  # fmt: skip
            soften(s, m, d_sum, o)
            v_tile = used + int32(K_TILE)
            if HAS_NONFINITE and ptx.ballot(dropped) != uint32(0) and has_nonfinite(v_tile, lane):
                select_values(s, o, v_tile, scratch, lane)
            else:
                pack_weights(s, p)
                multiply_values(p, o, v_tile, lane)
            key0 = int32(key0 + int32(STEP))
            filled = used
            used = used + int32(STAGE) if used < ring + int32(RING - STAGE) else ring
            keep_rolled()

        wait_for_all()
        ptx.sync_block()  # the rings are free
        publish(o, m, d_sum, shared + warp * int32(16 * PITCH), partials + warp * int32(128), lane)
        ptx.sync_block()
        row, qo_head = row_and_head(min(first_pair + lane, pairs - int32(1)), row_begin, kv_head, group_size)
        state = work_field(work, item, STATE)
        state = int32(state + row - row_begin) if state >= int32(0) else state
        count = int32(min(int32(16), pairs - first_pair))
        write_rows(shared, int32(PITCH), partials, warp, int32(WARPS), count, lane, row, qo_head, kv_head, state,
                   result)  # fmt: skip
        end_behind_earlier()

    return Kernel(paged_decode, 32 * WARPS, 1 if head_dim > 128 else 2, SHARED)

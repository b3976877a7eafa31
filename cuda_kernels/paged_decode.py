"""Split-KV paged attention for few query rows: the (row, head) pairs of one KV head fill a tensor-core tile of 16.

A block takes one work item, one KV head and 16 pairs. Its warps read interleaved tiles of keys, each through
its own ring of `cp.async` stages, so no warp waits for another until their partial softmaxes are merged in shared
memory. The result is a partial state, or the finished row where nothing else contributes to it. A cluster of blocks
shares an item in the same way, its warps' tiles interleaved.
"""

from __future__ import annotations

from numba import cuda
from numba.cuda import float32, int32, int64, types, uint32
from numba.extending import register_jitable

from nbattn.cuda_kernels import ptx
from nbattn.cuda_kernels.compile import Kernel
from nbattn.cuda_kernels.epilogue import EMPTY, make_publish, make_write_rows, make_write_shares
from nbattn.cuda_kernels.groups import Pages, Result, Rules
from nbattn.cuda_kernels.loops import keep_rolled, unroll_fully
from nbattn.cuda_kernels.parameters import WAITS_ASKING, WAITS_FIRST, WAITS_FOR_DATA
from nbattn.cuda_kernels.rows import (
    biases_of_rows,
    element,
    end_behind_earlier,
    item_and_head,
    limits_of_rows,
    make_score_tile,
    read_item,
    row_and_head,
)
from nbattn.cuda_kernels.shapes import LARGEST_CLUSTERED_HEAD, decode_shape
from nbattn.cuda_kernels.tile import make_tile
from nbattn.cuda_kernels.tile_copies import look_up


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
    KEYS, WARPS, STAGES, BLOCKS = decode_shape(cache, head_dim)
    MAY_CLUSTER = head_dim <= LARGEST_CLUSTERED_HEAD
    tile = make_tile(cache, head_dim, KEYS, KEYS, shares_query=True)
    STAGE, K_TILE, ITEM = KEYS * (tile.K_ROW + tile.V_ROW), KEYS * tile.K_ROW, tile.ITEM
    ALL = (1 << KEYS) - 1
    RING = STAGES * STAGE
    PITCH = 4 * head_dim + 32  # of a row of accumulators; a warp's take its ring's place
    SCRATCH = WARPS * RING
    PARTIALS = SCRATCH + WARPS * 1024
    QUERY = PARTIALS + WARPS * 16 * 8
    SHARED = QUERY + tile.Q_BYTES
    Q_WORDS, S_NUMBERS, P_WORDS, O_NUMBERS = 2 * tile.SHARE, tile.S_NUMBERS, tile.P_WORDS, tile.O_NUMBERS
    read_query_share, put_query_share = tile.read_query_share, tile.put_query_share
    SOURCES = 2 * tile.TURNS  # addresses of a tile's K and V that a lane copies from
    locate, copy_located, ask_for_located = tile.locate, tile.copy_located, tile.ask_for_located
    fetch, multiply_keys, soften = tile.fetch, tile.multiply_keys, tile.soften
    pack_weights, multiply_values = tile.pack_weights, tile.multiply_values
    HAS_NONFINITE = tile.HAS_NONFINITE  # int8 holds neither NaN nor infinity
    has_nonfinite, select_values = tile.has_nonfinite, tile.select_values
    MASKED = KEYS // 16  # times eight keys whose mask is in registers at a time
    RAW_WORDS = 4 * MASKED
    _, score_tile = make_score_tile(KEYS, 2, full, MASKED)
    publish = make_publish(tile.out_dim, O_NUMBERS // 4, PITCH)
    write_rows, write_shares = make_write_rows(WARPS, 16, RING), make_write_shares(4, 16, RING)
    wait_for_oldest = ptx.WAIT_COPIES[STAGES - 1]

    @register_jitable
    def look_up_first(page, slot, ahead, step, item, kv_indices, page_size):
        """Look up the lane's key in each tile of the ring; return its key behind them."""
        for stage in range(STAGES):
            page[stage], slot[stage] = look_up(ahead, item.key_end, item.page_begin, kv_indices, page_size)
            ahead = int32(ahead + step)
            unroll_fully()
        return ahead

    @register_jitable
    def fill_ring(ring, sources, bits, page, slot, key0, step, key_end, lane, pages):
        """Start copying the ring's tiles, the first from `sources`; set which of the others' keys exist."""
        for stage in range(STAGES):
            place = ring + int32(stage * STAGE)
            if stage:
                bits[stage] = uint32(0)
            if int32(key0 + int32(stage) * step) < key_end:
                if stage:
                    bits[stage] = fetch(place, place + int32(K_TILE), page[stage], slot[stage], lane, pages)
                else:
                    copy_located(place, place + int32(K_TILE), sources, bits[0], lane, pages)
            ptx.commit_copies()
            unroll_fully()

    def paged_decode(
        work, row_position, row_request, row_index, waits, q, q_row, q_head, q_kind, k, k_page, k_slot, k_head, v,
        v_page, v_slot, v_head, kv_indices, num_pages, page_size, head_dim_qk, head_dim_vo, group_size, num_qo_heads,
        scale, window_left, chunk_size, soft_cap, alibi_slopes, mask, mask_request, mask_head, mask_row, mask_key,
        mask_kind, rope_cos, rope_sin, rope_dim, rope_origin, k_scale, state_v, state_s, out, out_row, out_head,
        out_dim, out_kind, lse, lse_row, lse_head, lse_unit, sinks, v_scale, v_unit, gate, gate_row, gate_head,
        gate_dim, gate_kind,
    ):  # fmt: skip
        number, kv_head = item_and_head(ptx.cluster_index(), num_qo_heads, group_size)
        item, first_pair = read_item(work, number), int32(cuda.blockIdx.y * 16)
        pairs, key_end = int32((item.row_end - item.row_begin) * group_size), item.key_end
        if first_pair >= pairs:
            end_behind_earlier()
            return
        thread = int32(cuda.threadIdx.x)
        warp, lane = int32(thread >> int32(5)), int32(thread & int32(31))
        rank, blocks, c = ptx.cluster_rank(), ptx.cluster_size(), int32(lane & int32(3))
        shared = ptx.shared_address(cuda.shared.array(0, types.uint8, 128))
        ring, scratch = shared + warp * int32(RING), shared + int32(SCRATCH) + warp * int32(1024)
        partials = shared + int32(PARTIALS)
        pages = Pages(k + int64(kv_head) * k_head, k_page, k_slot, head_dim_qk * int32(ITEM),
                      v + int64(kv_head) * v_head, v_page, v_slot, head_dim_vo * int32(ITEM), num_pages)  # fmt: skip
        rules = Rules(row_position, row_request, row_index, window_left, chunk_size, soft_cap, alibi_slopes, mask,
                      mask_request, mask_head, mask_row, mask_key, mask_kind)  # fmt: skip
        result = Result(num_qo_heads, head_dim_vo, state_v, state_s, out, out_row, out_head, out_dim, out_kind, lse,
                        lse_row, lse_head, lse_unit, sinks, v_scale, v_unit, gate, gate_row, gate_head, gate_dim,
                        gate_kind)  # fmt: skip
        key0 = int32(item.key_begin + (rank * int32(WARPS) + warp) * int32(KEYS))
        step = int32(blocks * int32(WARPS * KEYS))  # between a warp's tiles
        pair = int32(first_pair + (lane & int32(15)))  # a lane looks after a row
        row, qo_head = row_and_head(int32(min(pair, pairs - int32(1))), item.row_begin, kv_head, group_size)
        # ahead of the results of earlier kernels, what follows from the plan: limits, page ids, addresses
        if waits == int32(WAITS_FIRST):
            ptx.wait_for_earlier()
        page, slot = cuda.local.array(STAGES, types.int32), cuda.local.array(STAGES, types.int32)
        ahead = look_up_first(page, slot, int32(key0 + (lane & int32(KEYS - 1))), step, item, kv_indices, page_size)
        first, end = cuda.local.array(2, types.int32), cuda.local.array(2, types.int32)
        unit, slope = cuda.local.array(2, types.float32), cuda.local.array(2, types.float32)
        position, mask_at = cuda.local.array(2, types.int32), cuda.local.array(2, types.int64)
        all_low, all_high = limits_of_rows(first, end, position, element(row_position, row), pair < pairs, item, lane,
                                           rules)  # fmt: skip
        q += int64(row) * q_row + int64(qo_head) * q_head
        address, sources = cuda.local.array(2, types.int64), cuda.local.array(SOURCES, types.int64)
        for i in range(2):
            address[i] = ptx.from_lane_i64(q, (lane >> int32(2)) + int32(8 * i))
        bits = cuda.local.array(STAGES, types.uint32)
        bits[0] = locate(sources, page[0], slot[0], lane, pages)
        if waits == int32(WAITS_ASKING):
            ask_for_located(sources, bits[0], lane, pages)
        if waits >= int32(WAITS_FOR_DATA):
            ptx.wait_for_earlier()
        ptx.let_next_start()

        # ask for q, then for the first tiles: nothing waits for more than it needs
        query, words = shared + int32(QUERY), cuda.local.array(Q_WORDS, types.uint32)
        for i in range(2):
            read_query_share(words, address[i], i, q_kind, head_dim_qk, lane, warp)
            unroll_fully()
        fill_ring(ring, sources, bits, page, slot, key0, step, key_end, lane, pages)
        page[0], slot[0] = look_up(ahead, key_end, item.page_begin, kv_indices, page_size)
        if full:
            biases_of_rows(slope, mask_at, row, qo_head, item, lane, rules)

        for i in range(2):
            unit[i] = scale * put_query_share(query, words, address[i], i, q_kind, head_dim_qk, lane, warp)
            unroll_fully()
        ptx.sync_block()

        s, p = cuda.local.array(S_NUMBERS, types.float32), cuda.local.array(P_WORDS, types.uint32)
        o, raw = cuda.local.array(O_NUMBERS, types.float32), cuda.local.array(RAW_WORDS, types.uint32)
        m, d_sum = cuda.local.array(2, types.float32), cuda.local.array(2, types.float32)
        for i in range(O_NUMBERS):
            o[i] = float32(0)
        for i in range(2):
            m[i], d_sum[i] = EMPTY, float32(0)

        used = ring
        while key0 < key_end:
            wait_for_oldest()
            ptx.sync_warp()
            multiply_keys(query, s, used, lane)
            whole = key0 >= all_low and int32(key0 + int32(KEYS)) <= all_high and bits[0] == uint32(ALL)
            dropped = score_tile(s, bits, key0, c, whole, unit, first, end, slope, position, mask_at,
                                 item.key_position, rules, raw)  # fmt: skip
            soften(s, m, d_sum, o)
            v_tile = used + int32(K_TILE)
            if HAS_NONFINITE and ptx.ballot(dropped) != uint32(0) and has_nonfinite(v_tile, lane):
                select_values(s, o, v_tile, scratch, lane)
            else:
                pack_weights(s, p)
                multiply_values(p, o, v_tile, lane)
            key0 = int32(key0 + step)
            ptx.sync_warp()  # all lanes have read the tile
            for stage in range(STAGES - 1):
                bits[stage] = bits[stage + 1]
            if int32(key0 + int32(STAGES - 1) * step) < key_end:
                bits[STAGES - 1] = fetch(used, v_tile, page[0], slot[0], lane, pages)
                ahead = int32(ahead + step)
                page[0], slot[0] = look_up(ahead, key_end, item.page_begin, kv_indices, page_size)
            ptx.commit_copies()
            used = used + int32(STAGE) if used < ring + int32(RING - STAGE) else ring
            keep_rolled()

        publish(o, m, d_sum, ring, partials + warp * int32(128), lane)
        ptx.arrive_cluster()
        lane = ptx.from_lane_i32(lane, lane)  # or what follows from it would stay in registers all the while
        pair = int32(min(first_pair + lane, pairs - int32(1)))
        row, qo_head = row_and_head(pair, item.row_begin, kv_head, group_size)
        state = int32(item.state + row - item.row_begin) if item.state >= int32(0) else int32(-1)
        count = int32(min(int32(16), pairs - first_pair))
        if blocks == int32(1) or not MAY_CLUSTER:
            ptx.wait_cluster()
            write_rows(shared, int32(PITCH), partials, warp, int32(WARPS), count, lane, row, qo_head, kv_head, state,
                       result)  # fmt: skip
        else:
            write_shares(shared, int32(PITCH), partials, warp * blocks + rank, blocks * int32(WARPS), count, lane, row,
                         qo_head, kv_head, state, result)  # fmt: skip
            ptx.leave_cluster()
            ptx.wait_cluster()  # no block leaves while another reads its shared memory
        end_behind_earlier()

    return Kernel(paged_decode, 32 * WARPS, BLOCKS, SHARED)

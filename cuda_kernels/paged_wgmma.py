"""Paged attention for many query rows on Hopper GPUs: warpgroups multiply tiles of keys that all threads bring.

A block takes 128 (row, head) pairs of one work item and KV head, 64 a warpgroup. Where items have no more than 64, it
is one warpgroup, and two blocks share a multiprocessor. q stays in shared memory. A tile of keys is multiplied by q
together with the values of the tile before, so that K and V have rings of their own.
"""

from __future__ import annotations

from numba import cuda
from numba.cuda import float32, int32, int64, types, uint32
from numba.extending import register_jitable

from nbattn.cuda_kernels import ptx, warpgroup
from nbattn.cuda_kernels.compile import Kernel
from nbattn.cuda_kernels.epilogue import EMPTY
from nbattn.cuda_kernels.groups import Pages, Queries, Result, Rules, Sides, Table
from nbattn.cuda_kernels.loops import keep_rolled
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
from nbattn.cuda_kernels.shapes import WARPGROUP_ROWS, wgmma_keys
from nbattn.cuda_kernels.tile import look_up, make_tile

WARP_ROWS, LANE_ROWS = 16, 2
STAGES = 2  # tiles in the rings of K and of V


def make(cache: str, head_dim: int, full: bool, groups: int) -> Kernel:
    """Return the kernel for a 16-bit cache format and a head-size class, with blocks of `groups` warpgroups.

    The other parameters are those of `paged_decode.make`.
    """
    ROWS, WARPS, BLOCKS = groups * WARPGROUP_ROWS, groups * 4, 3 - groups
    KEYS = wgmma_keys(head_dim, full, groups)
    FETCHED, WORDS, ALL = KEYS // WARPS, KEYS // 32, (1 << 32) - 1
    store_bits = ptx.shared_store_u16 if FETCHED == 16 else ptx.shared_store_u8
    tile = make_tile(cache, head_dim, KEYS, FETCHED, panel_rows=ROWS)
    TILE, PITCH = KEYS * tile.K_ROW, 4 * head_dim + 32
    K_RING = ROWS * tile.K_ROW
    V_RING = K_RING + STAGES * TILE
    BITS = max(V_RING + STAGES * TILE, ROWS * PITCH)  # accumulators take the place of q, K and V
    ENDS = BITS + 4 * 4 * WORDS  # of four tiles: three are in use
    PARTIALS = ENDS + 4 * WARPS
    LIMITS = PARTIALS + ROWS * 8
    SCRATCH = LIMITS + ROWS * LIMITS_BYTES
    SHARED = SCRATCH + WARPS * 1024
    S_NUMBERS, P_WORDS, O_NUMBERS = tile.S_NUMBERS, tile.P_WORDS, tile.O_NUMBERS
    set_up_lanes, recall_rows = make_rows_of_lanes(tile.load_query, LANE_ROWS, full)
    score_tile = make_score_tile(KEYS, LANE_ROWS, full)
    fetch_rows, weigh, rescale, pack_weights = tile.fetch_rows, tile.weigh, tile.rescale, tile.pack_weights
    has_nonfinite, select_values, unpack = tile.has_nonfinite, tile.select_values, tile.unpack
    finish = make_finish(tile.out_dim, head_dim // 8, PITCH, LANE_ROWS, False)
    multiply_keys = warpgroup.make_multiply_keys(tile.OWN_KIND, KEYS, head_dim, ROWS)
    multiply_values = warpgroup.make_multiply_values(tile.OWN_KIND, KEYS, head_dim)
    hold_scores, hold_sums = warpgroup.make_hold(S_NUMBERS), warpgroup.make_hold(O_NUMBERS)
    wait_for_keys, wait_for_copies = ptx.WAIT_COPIES[1], ptx.WAIT_COPIES[0]
    wait_for_scores, wait_for_products = warpgroup.WAIT_PRODUCTS[1], warpgroup.WAIT_PRODUCTS[0]
    publish_writes = warpgroup.publish_writes
    any_of_block, any_of_group = warpgroup.any_of_block, warpgroup.any_of_group
    KEYS_BITS, VALUES_BITS = warpgroup.descriptor_bits(KEYS, False), warpgroup.descriptor_bits(KEYS, True)

    @register_jitable
    def bring_keys(k_tile, bits_at, page, slot, lane, pages):
        """Start copying the warp's keys of one tile."""
        found = fetch_rows(k_tile, pages.k, pages.k_page, pages.k_slot, pages.k_bytes, pages.num_pages, page, slot,
                           lane)  # fmt: skip
        if lane == int32(0):
            store_bits(bits_at, found)

    @register_jitable
    def bring_values(v_tile, page, slot, lane, pages):
        """Start copying the warp's values of one tile."""
        fetch_rows(v_tile, pages.v, pages.v_page, pages.v_slot, pages.v_bytes, pages.num_pages, page, slot, lane)

    @register_jitable
    def give_weights(s, m, d_sum, alphas, bits_at, key0, limits, lane, all_low, all_high, key_position, rules):
        """Turn products into weights; return (whether maxima rise, whether a row drops a key whose value is there)."""
        first, end = cuda.local.array(LANE_ROWS, types.int32), cuda.local.array(LANE_ROWS, types.int32)
        unit, slope = cuda.local.array(LANE_ROWS, types.float32), cuda.local.array(LANE_ROWS, types.float32)
        position, mask_at = cuda.local.array(LANE_ROWS, types.int32), cuda.local.array(LANE_ROWS, types.int64)
        factor, bits = cuda.local.array(LANE_ROWS, types.float32), cuda.local.array(WORDS, types.uint32)
        recall_rows(unit, first, end, slope, position, mask_at, limits, lane)
        whole = not full and key0 >= all_low and int32(key0 + int32(KEYS)) <= all_high
        for i in range(WORDS):
            bits[i] = ptx.shared_load_u32(bits_at + int32(4 * i))
            whole = whole and bits[i] == uint32(ALL)
        whole = whole and unit[0] >= float32(0)  # the largest product has the largest score
        dropped = int32(0)
        if not whole:
            dropped = score_tile(s, bits, key0, lane & int32(3), False, unit, first, end, slope, position, mask_at,
                                 key_position, rules)  # fmt: skip
        for i in range(LANE_ROWS):
            factor[i] = unit[i] if whole else float32(1)
        return weigh(s, factor, m, d_sum, alphas), dropped

    @register_jitable
    def look_ahead(ahead, table):
        """Find the page and slot of the lane's key of one more tile."""
        ahead[2], ahead[3] = ahead[0], ahead[1]
        ahead[0], ahead[1] = look_up(ahead[4], table.key_end, table.page_begin, table.kv_indices, table.page_size)
        ahead[4] = int32(ahead[4] + int32(KEYS))

    @register_jitable
    def begin(ahead, k_place, bits_place, v_place, lane, table, pages):
        """Start copying the first two tiles of keys and the first of values, in a group each."""
        look_ahead(ahead, table)
        page, slot = ahead[0], ahead[1]
        look_ahead(ahead, table)
        look_ahead(ahead, table)
        bring_keys(k_place, bits_place, page, slot, lane, pages)
        ptx.commit_copies()
        bring_keys(k_place + int32(TILE), bits_place + int32(4 * WORDS), ahead[2], ahead[3], lane, pages)
        bring_values(v_place, page, slot, lane, pages)
        ptx.commit_copies()

    @register_jitable
    def bring(j, ahead, k_place, bits_place, v_place, lane, table, pages):
        """Start copying the warp's keys of tile j + 2 and its values of tile j + 1; tile j - 1 has been used."""
        bring_keys(k_place + (j & int32(1)) * int32(TILE), bits_place + ((j + int32(2)) & int32(3)) * int32(4 * WORDS),
                   ahead[0], ahead[1], lane, pages)  # fmt: skip
        bring_values(v_place + ((j + int32(1)) & int32(1)) * int32(TILE), ahead[2], ahead[3], lane, pages)
        ptx.commit_copies()
        look_ahead(ahead, table)

    @register_jitable
    def meet(dropped):
        """Wait for all threads' copies; return whether a thread has `dropped` a key whose value is there."""
        wait_for_copies()
        publish_writes()
        return any_of_block(dropped) != int32(0)

    @register_jitable
    def take_nonfinite(s, p, o, v_tile, scratch, warp, lane):
        """If the tile of V holds an infinity or a NaN, add its products where 0 * NaN is never formed, and say so."""
        share = v_tile + (warp & int32(3)) * int32(TILE // 4)
        if any_of_group(int32(has_nonfinite(share, lane)), int32(1) + (warp >> int32(2))) == int32(0):
            return False
        for i in range(P_WORDS):
            s[2 * i], s[2 * i + 1] = unpack(p[i])
        select_values(s, o, v_tile, scratch, lane)
        return True

    @register_jitable
    def begin_products(s, p, o, sides, j):
        """Start ``s = q @ k.T`` of tile j + 1 and ``o += p @ v`` of tile j."""
        this, other = int64((j & int32(1)) * int32(TILE >> 4)), int64((j + int32(1) & int32(1)) * int32(TILE >> 4))
        multiply_keys(s, sides.query, sides.keys + other)
        multiply_values(o, p, sides.values + this)

    @register_jitable
    def first_weights(s, p, m, d_sum, key0, sides, lane, limits, all_low, all_high, key_position, rules):
        """Multiply and weigh tile 0; return whether a row drops a key whose value is there."""
        alphas = cuda.local.array(LANE_ROWS, types.float32)
        multiply_keys(s, sides.query, sides.keys)
        wait_for_products()
        hold_scores(s)
        _, dropped = give_weights(s, m, d_sum, alphas, sides.bits, key0, limits, lane, all_low, all_high, key_position,
                                  rules)  # fmt: skip
        pack_weights(s, p)
        return dropped

    @register_jitable
    def last_values(s, p, o, sides, j, taken):
        """``o += p @ v`` of tile j, the last one, unless it is `taken` in."""
        if not taken:
            multiply_values(o, p, sides.values + int64((j & int32(1)) * int32(TILE >> 4)))
            wait_for_products()
            hold_sums(o)

    @register_jitable
    def clear(v_tile, warp, lane):
        """Put zeros in the place of a tile that both warpgroups have taken in."""
        ptx.sync_block()
        for i in range(TILE // WARPS // 512):
            at = v_tile + warp * int32(TILE // WARPS) + int32(512 * i) + (lane << int32(4))
            ptx.shared_store_4f32(at, float32(0), float32(0), float32(0), float32(0))
        publish_writes()
        ptx.sync_block()

    @register_jitable
    def take_in(
        s, p, o, m, d_sum, key0, key_end, sides, ahead, k_place, bits_place, v_place, scratch, warp, lane, limits,
        all_low, all_high, key_position, table, pages, rules,
    ):  # fmt: skip
        """Take in all tiles: while a tile's values are multiplied, the next one's products become weights."""
        alphas, j = cuda.local.array(LANE_ROWS, types.float32), int32(0)
        dropped = first_weights(s, p, m, d_sum, key0, sides, lane, limits, all_low, all_high, key_position, rules)
        while int32(key0 + int32(KEYS)) < key_end:
            lane = ptx.from_lane_i32(lane, lane)  # or all that follows from it would stay in registers, and spill
            taken = meet(dropped)
            v_tile = sides.v_tiles + (j & int32(1)) * int32(TILE)
            if taken and take_nonfinite(s, p, o, v_tile, scratch, warp, lane):
                clear(v_tile, warp, lane)
            begin_products(s, p, o, sides, j)
            bring(j, ahead, k_place, bits_place, v_place, lane, table, pages)
            key0, j = int32(key0 + int32(KEYS)), int32(j + int32(1))
            wait_for_scores()
            hold_scores(s)
            bits = sides.bits + (j & int32(3)) * int32(4 * WORDS)
            rises, dropped = give_weights(s, m, d_sum, alphas, bits, key0, limits, lane, all_low, all_high,
                                          key_position, rules)  # fmt: skip
            ptx.shared_store_f32(scratch + (lane << int32(2)), d_sum[0] + d_sum[1])  # keeps that ahead of the wait
            wait_for_products()
            hold_sums(o)
            if rises:
                rescale(o, alphas)
            pack_weights(s, p)
            keep_rolled()
        taken = meet(dropped)
        if taken:
            taken = take_nonfinite(s, p, o, sides.v_tiles + (j & int32(1)) * int32(TILE), scratch, warp, lane)
        last_values(s, p, o, sides, j, taken)

    def paged_wgmma(
        work, row_position, row_request, row_index, beside, q, q_row, q_head, q_kind, k, k_page, k_slot, k_head, v,
        v_page, v_slot, v_head, kv_indices, num_pages, page_size, head_dim_qk, head_dim_vo, group_size, num_qo_heads,
        scale, window_left, chunk_size, soft_cap, alibi_slopes, mask, mask_request, mask_head, mask_row, mask_key,
        mask_kind, rope_cos, rope_sin, rope_dim, rope_origin, k_scale, state_v, state_s, out, out_row, out_head,
        out_dim, out_kind, lse, lse_row, lse_head, lse_unit, sinks, v_scale, v_unit, gate, gate_row, gate_head,
        gate_dim, gate_kind,
    ):  # fmt: skip
        number, kv_head = item_and_head(int32(cuda.blockIdx.x), num_qo_heads, group_size)
        thread = int32(cuda.threadIdx.x)
        warp, lane = int32(thread >> int32(5)), int32(thread & int32(31))
        first_pair = int32(cuda.blockIdx.y * ROWS + warp * int32(WARP_ROWS))
        item = read_item(work, number)
        pairs = int32((item.row_end - item.row_begin) * group_size)
        if int32(cuda.blockIdx.y * ROWS) >= pairs:
            end_behind_earlier()
            return
        shared = ptx.shared_address(cuda.shared.array(0, types.uint8, 1024))
        scratch = shared + int32(SCRATCH) + warp * int32(1024)
        queries = Queries(q, q_row, q_head, q_kind, head_dim_qk, group_size, scale)
        pages = Pages(k + int64(kv_head) * k_head, k_page, k_slot, int32(head_dim_qk * int32(2)),
                      v + int64(kv_head) * v_head, v_page, v_slot, int32(head_dim_vo * int32(2)),
                      num_pages)  # fmt: skip
        rules = Rules(row_position, row_request, row_index, window_left, chunk_size, soft_cap, alibi_slopes, mask,
                      mask_request, mask_head, mask_row, mask_key, mask_kind)  # fmt: skip
        result = Result(num_qo_heads, head_dim_vo, state_v, state_s, out, out_row, out_head, out_dim, out_kind, lse,
                        lse_row, lse_head, lse_unit, sinks, v_scale, v_unit, gate, gate_row, gate_head, gate_dim,
                        gate_kind)  # fmt: skip

        # each warp brings its FETCHED keys of every tile; the first ones before anything that waits for memory
        key0, key_end = item.key_begin, item.key_end
        table = Table(key_end, item.page_begin, kv_indices, page_size)
        ahead = cuda.local.array(5, types.int32)  # page and slot of two tiles, and the next key
        ahead[0], ahead[1], ahead[4] = (
            int32(-1),
            int32(0),
            int32(key0 + warp * int32(FETCHED) + (lane & int32(FETCHED - 1))),
        )
        k_place = shared + int32(K_RING) + warp * int32(FETCHED * 128)
        v_place = shared + int32(V_RING) + warp * int32(FETCHED * 128)
        bits_place = shared + int32(BITS) + warp * int32(FETCHED // 8)
        if not beside:  # plans are copied to the device; what else is read may be a kernel's result
            ptx.wait_for_earlier()
        ptx.let_next_start()
        begin(ahead, k_place, bits_place, v_place, lane, table, pages)

        first, end = cuda.local.array(LANE_ROWS, types.int32), cuda.local.array(LANE_ROWS, types.int32)
        limits = shared + int32(LIMITS) + warp * int32(WARP_ROWS * LIMITS_BYTES)
        query = shared + warp * int32(WARP_ROWS * 128)
        set_up_lanes(query, first, end, limits, item, first_pair, pairs, kv_head, lane, queries, rules)
        _, high, all_low, all_high = keys_of_warp(first[0], end[0])
        ends = shared + int32(ENDS)  # of what the warps see
        if lane == int32(0):
            ptx.shared_store_u32(ends + (warp << int32(2)), uint32(high))
        wait_for_keys()
        publish_writes()
        ptx.sync_block()
        seen_end = int32(0)
        for w in range(WARPS):
            seen_end = int32(max(seen_end, int32(ptx.shared_load_u32(ends + int32(4 * w)))))
        key_end = int32(min(key_end, seen_end))

        s, p = cuda.local.array(S_NUMBERS, types.float32), cuda.local.array(P_WORDS, types.uint32)
        o = cuda.local.array(O_NUMBERS, types.float32)
        m, d_sum = cuda.local.array(LANE_ROWS, types.float32), cuda.local.array(LANE_ROWS, types.float32)
        for i in range(O_NUMBERS):
            o[i] = float32(0)
        for i in range(LANE_ROWS):
            m[i], d_sum[i] = EMPTY, float32(0)
        q_at = int64(KEYS_BITS) + int64((shared + (warp >> int32(2)) * int32(WARPGROUP_ROWS * 128)) >> int32(4))
        k_at = int64(KEYS_BITS) + int64((shared + int32(K_RING)) >> int32(4))
        v_at = int64(VALUES_BITS) + int64((shared + int32(V_RING)) >> int32(4))
        sides = Sides(q_at, k_at, v_at, shared + int32(V_RING), shared + int32(BITS))
        take_in(s, p, o, m, d_sum, key0, key_end, sides, ahead, k_place, bits_place, v_place, scratch, warp, lane,
                limits, all_low, all_high, item.key_position, table, pages, rules)  # fmt: skip
        partials, state = shared + int32(PARTIALS) + warp * int32(WARP_ROWS * 8), item.state
        finish(o, m, d_sum, shared + warp * int32(WARP_ROWS * PITCH), partials, state, item.row_begin, first_pair,
               pairs, lane, kv_head, group_size, result)  # fmt: skip
        end_behind_earlier()

    return Kernel(paged_wgmma, 32 * WARPS, BLOCKS, SHARED)

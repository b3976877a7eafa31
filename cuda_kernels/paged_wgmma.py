"""Paged attention for many query rows on Hopper GPUs: warpgroups multiply tiles of keys that another one brings.

A block takes 128 (row, head) pairs of one work item and KV head, 64 a warpgroup. Where items have no more than 64, it
is one warpgroup, and two blocks share a multiprocessor. q stays in shared memory. The last warpgroup copies K and V,
two warps each, into rings of their own, and gives most of its registers to the others. Those multiply a tile of keys
by q together with the values of the tile before; two take turns at it.
"""

from __future__ import annotations

from numba import cuda
from numba.cuda import float32, int32, int64, types, uint32
from numba.extending import register_jitable

from nbattn.cuda_kernels import ptx, rings, warpgroup
from nbattn.cuda_kernels.compile import Kernel
from nbattn.cuda_kernels.epilogue import EMPTY
from nbattn.cuda_kernels.groups import Pages, Queries, Result, Rules, Side, Sides, Table
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
    recall_mask,
)
from nbattn.cuda_kernels.shapes import WARPGROUP_ROWS, wgmma_keys
from nbattn.cuda_kernels.tile import make_tile
from nbattn.cuda_kernels.tile_copies import look_up

WARP_ROWS, LANE_ROWS = 16, 2
STAGES = 2  # tiles in the rings of K and of V
# of a thread that brings and of one that multiplies: as many as the block has, 128 or 168 a thread
REGISTERS_OF_ONE, REGISTERS_OF_TWO, REGISTERS_OF_LARGE_HEADS = (56, 200), (72, 216), (56, 224)


def make(cache: str, head_dim: int, full: bool, groups: int) -> Kernel:
    """Return the kernel for a 16-bit cache format and a head-size class, with blocks of `groups` warpgroups.

    The other parameters are those of `paged_decode.make`.
    """
    ROWS, WARPS, BLOCKS = groups * WARPGROUP_ROWS, groups * 4, 3 - groups
    KEYS = wgmma_keys(head_dim, full, groups)
    KEY_BITS, TURNS, WORDS, ALL = KEYS.bit_length() - 1, KEYS // 64, KEYS // 32, (1 << 32) - 1
    tile = make_tile(cache, head_dim, KEYS, 32, panel_rows=ROWS)
    TILE, PITCH = KEYS * tile.K_ROW, 4 * head_dim + 32
    K_RING = ROWS * tile.K_ROW
    V_RING = K_RING + STAGES * TILE
    BITS = max(V_RING + STAGES * TILE, ROWS * PITCH)  # accumulators take the place of q, K and V
    BARRIERS = BITS + 4 * 4 * WORDS  # of four tiles: three are in use
    OF_VALUES, USED = 16, 32  # from the barriers of K to those of V, and from full ones to empty ones
    TURN = 64  # from there to the two barriers of warpgroups' turns
    FAULTS = 80  # from there to what the warps of V found in each stage: whether it holds an infinity or a NaN
    PARTIALS = BARRIERS + (96 if full else 80)
    LIMITS = PARTIALS + ROWS * 8
    SCRATCH = LIMITS + ROWS * LIMITS_BYTES
    SHARED = SCRATCH + WARPS * 1024
    S_NUMBERS, P_WORDS, O_NUMBERS = tile.S_NUMBERS, tile.P_WORDS, tile.O_NUMBERS
    AHEAD = full and head_dim <= 128  # a tile's mask is asked for ahead of the product that makes its scores
    MASKED = KEYS // 8 if AHEAD else 2  # times eight keys whose mask is in registers at a time
    RAW_WORDS = 2 * LANE_ROWS * MASKED
    set_up_lanes, recall_rows = make_rows_of_lanes(tile.load_query, LANE_ROWS, full)
    ask_mask, score_tile = make_score_tile(KEYS, LANE_ROWS, full, MASKED)
    fetch_rows, weigh, rescale, pack_weights = tile.fetch_rows, tile.weigh, tile.rescale, tile.pack_weights
    probe, has_nonfinite, select_values, unpack = tile.probe, tile.has_nonfinite, tile.select_values, tile.unpack
    finish = make_finish(tile.out_dim, head_dim // 8, PITCH, LANE_ROWS, False)
    multiply_keys = warpgroup.make_multiply_keys(tile.OWN_KIND, KEYS, head_dim, ROWS)
    multiply_values = warpgroup.make_multiply_values(tile.OWN_KIND, KEYS, head_dim)
    hold_scores, hold_sums = warpgroup.make_hold(S_NUMBERS), warpgroup.make_hold(O_NUMBERS)
    wait_for_copies = ptx.WAIT_COPIES[0]
    fewer, more = REGISTERS_OF_ONE if groups == 1 else REGISTERS_OF_LARGE_HEADS if head_dim > 128 else REGISTERS_OF_TWO
    shrink, grow = rings.registers_of_thread("dec", fewer), rings.registers_of_thread("inc", more)
    wait_for_scores, wait_for_products = warpgroup.WAIT_PRODUCTS[1], warpgroup.WAIT_PRODUCTS[0]
    publish_writes = warpgroup.publish_writes
    any_of_group = warpgroup.any_of_group
    KEYS_BITS, VALUES_BITS = warpgroup.descriptor_bits(KEYS, False), warpgroup.descriptor_bits(KEYS, True)

    @register_jitable
    def bring(side, key, tiles, place, bits_at, faults_at, barriers, lane, table):
        """Bring the warp's half of a ring's tiles, as stages become free.

        Say what exists where `bits_at` is not 0, whether the half has an infinity or a NaN where `faults_at` is not.
        """
        page, slot = cuda.local.array(TURNS, types.int32), cuda.local.array(TURNS, types.int32)
        for j in range(tiles):
            for t in range(TURNS):
                page[t], slot[t] = look_up(int32(key + int32(32 * t)), table.key_end, table.page_begin,
                                           table.kv_indices, table.page_size)  # fmt: skip
            key = int32(key + int32(KEYS))
            stage, use = int32(j) & int32(1), int32(j) >> int32(1)
            if use > int32(0):
                rings.wait_at_barrier(barriers + int32(USED) + stage * int32(8), use & int32(1) ^ int32(1))
            for t in range(TURNS):
                target = place + stage * int32(TILE) + int32(32 * 128 * t)
                found = fetch_rows(target, side.rows, side.page, side.slot, side.row_bytes, side.num_pages, page[t],
                                   slot[t], lane)  # fmt: skip
                if bits_at != int32(0) and lane == int32(0):
                    ptx.shared_store_u32(bits_at + (int32(j) & int32(3)) * int32(4 * WORDS) + int32(4 * t), found)
            ptx.commit_copies()
            wait_for_copies()
            publish_writes()
            ptx.sync_warp()
            if AHEAD and faults_at != int32(0):
                fault = uint32(0)
                for panel in range(head_dim // 64):
                    fault |= probe(place + stage * int32(TILE) + int32(panel) * int32(128 * KEYS), KEYS // 8, lane)
                    keep_rolled()
                fault = ptx.ballot(int32(fault != uint32(0)))
                if lane == int32(0):
                    ptx.shared_store_u32(faults_at + stage * int32(8), fault)
            if lane == int32(0):
                rings.arrive_at_barrier(barriers + stage * int32(8))
            keep_rolled()

    @register_jitable
    def arrived(barriers, j):
        """Wait for tile j of a ring."""
        rings.wait_at_barrier(barriers + (j & int32(1)) * int32(8), (j >> int32(1)) & int32(1))

    @register_jitable
    def give_back(barriers, j, lane):
        """Say that the warp has used tile j of a ring."""
        if lane == int32(0):
            rings.arrive_at_barrier(barriers + int32(USED) + (j & int32(1)) * int32(8))

    @register_jitable
    def take_turn(barriers, j, warp):
        """Wait for the warpgroup's turn to multiply by tile j of K: one makes weights while the other multiplies."""
        if groups == 2:
            rings.wait_at_barrier(barriers + int32(TURN) + (warp & int32(4)) * int32(2), j & int32(1))

    @register_jitable
    def end_turn(barriers, warp, lane):
        """Let the other warpgroup multiply."""
        if groups == 2 and lane == int32(0):
            rings.arrive_at_barrier(barriers + int32(TURN) + (warp & int32(4) ^ int32(4)) * int32(2))

    @register_jitable
    def ask_ahead(raw, j, key_begin, limits, lane, rules):
        """Ask for the mask of tile j, where there is one."""
        if AHEAD:
            if rules.mask != int64(0):
                end, mask_at = cuda.local.array(LANE_ROWS, types.int32), cuda.local.array(LANE_ROWS, types.int64)
                for i in range(LANE_ROWS):
                    end[i], mask_at[i] = recall_mask(limits, lane, i)
                key = int32(key_begin + j * int32(KEYS) + (lane & int32(3)) * int32(2))
                ask_mask(raw, key, end, mask_at, rules)

    @register_jitable
    def give_weights(s, m, d_sum, alphas, bits_at, key0, limits, lane, all_low, all_high, key_position, rules, raw):
        """Turn products into weights; return (whether maxima rise, whether a row drops a key whose value is there)."""
        first, end = cuda.local.array(LANE_ROWS, types.int32), cuda.local.array(LANE_ROWS, types.int32)
        unit, slope = cuda.local.array(LANE_ROWS, types.float32), cuda.local.array(LANE_ROWS, types.float32)
        position, mask_at = cuda.local.array(LANE_ROWS, types.int32), cuda.local.array(LANE_ROWS, types.int64)
        factor, bits = cuda.local.array(LANE_ROWS, types.float32), cuda.local.array(WORDS, types.uint32)
        recall_rows(unit, first, end, slope, position, mask_at, limits, lane)
        whole = key0 >= all_low and int32(key0 + int32(KEYS)) <= all_high
        for i in range(WORDS):
            bits[i] = ptx.shared_load_u32(bits_at + int32(4 * i))
            whole = whole and bits[i] == uint32(ALL)
        products = not full and whole and unit[0] >= float32(0)  # the largest product has the largest score
        dropped = int32(0)
        if not products:
            dropped = score_tile(s, bits, key0, lane & int32(3), whole, unit, first, end, slope, position, mask_at,
                                 key_position, rules, raw)  # fmt: skip
        for i in range(LANE_ROWS):
            factor[i] = unit[i] if products else float32(1)
        return weigh(s, factor, m, d_sum, alphas), dropped

    @register_jitable
    def has_to_select(dropped, j, sides, warp, rules):
        """Return whether a row of the warpgroup drops keys of tile j, whose values may be infinite or NaN."""
        if AHEAD and rules.mask != int64(0):  # nearly every tile has dropped keys: V's warps have looked at it
            arrived(sides.barriers + int32(OF_VALUES), j)
            faults_at = sides.barriers + int32(FAULTS) + (j & int32(1)) * int32(8)
            if ptx.shared_load_u32(faults_at) | ptx.shared_load_u32(faults_at + int32(4)) == uint32(0):
                return False
        return any_of_group(dropped, int32(1) + (warp >> int32(2))) != int32(0)

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
    def stage(j):
        """Return what leads a descriptor from the first tile of a ring to tile j."""
        return int64((j & int32(1)) * int32(TILE >> 4))

    @register_jitable
    def weights_alone(
        s, p, o, m, d_sum, j, key_begin, sides, warp, lane, limits, all_low, all_high, key_position, rules, raw
    ):  # fmt: skip
        """Multiply and weigh tile j while no other product is under way; return as `give_weights`, the second."""
        alphas = cuda.local.array(LANE_ROWS, types.float32)
        ask_ahead(raw, j, key_begin, limits, lane, rules)
        arrived(sides.barriers, j)
        take_turn(sides.barriers, j, warp)
        multiply_keys(s, sides.query, sides.keys + stage(j))
        end_turn(sides.barriers, warp, lane)
        wait_for_products()
        hold_scores(s)
        give_back(sides.barriers, j, lane)
        bits = sides.bits + (j & int32(3)) * int32(4 * WORDS)
        key0 = int32(key_begin + j * int32(KEYS))
        rises, dropped = give_weights(s, m, d_sum, alphas, bits, key0, limits, lane, all_low, all_high, key_position,
                                      rules, raw)  # fmt: skip
        if rises:
            rescale(o, alphas)
        pack_weights(s, p)
        return dropped

    @register_jitable
    def take_in(
        s, p, o, m, d_sum, key_begin, tiles, sides, scratch, warp, lane, limits, all_low, all_high, key_position, rules
    ):  # fmt: skip
        """Take in all tiles: while a tile's values are multiplied, the next one's products become weights."""
        alphas, j, of_values = cuda.local.array(LANE_ROWS, types.float32), int32(0), sides.barriers + int32(OF_VALUES)
        raw = cuda.local.array(RAW_WORDS, types.uint32)
        while j < tiles:
            dropped = weights_alone(s, p, o, m, d_sum, j, key_begin, sides, warp, lane, limits, all_low, all_high,
                                    key_position, rules, raw)  # fmt: skip
            goes_on, taken = True, False
            while goes_on:
                lane = ptx.from_lane_i32(lane, lane)  # or all that follows from it would stay in registers, and spill
                ask_ahead(raw, int32(j + int32(1)), key_begin, limits, lane, rules)
                if has_to_select(dropped, j, sides, warp, rules):
                    arrived(of_values, j)
                    v_tile = sides.v_tiles + (j & int32(1)) * int32(TILE)
                    taken = take_nonfinite(s, p, o, v_tile, scratch, warp, lane)
                goes_on = not taken and int32(j + int32(1)) < tiles
                if goes_on:
                    arrived(sides.barriers, int32(j + int32(1)))
                    take_turn(sides.barriers, int32(j + int32(1)), warp)
                    multiply_keys(s, sides.query, sides.keys + stage(int32(j + int32(1))))
                    arrived(of_values, j)
                    multiply_values(o, p, sides.values + stage(j))
                    end_turn(sides.barriers, warp, lane)
                    j = int32(j + int32(1))
                    wait_for_scores()
                    hold_scores(s)
                    give_back(sides.barriers, j, lane)
                    bits = sides.bits + (j & int32(3)) * int32(4 * WORDS)
                    key0 = int32(key_begin + j * int32(KEYS))
                    rises, dropped = give_weights(s, m, d_sum, alphas, bits, key0, limits, lane, all_low, all_high,
                                                  key_position, rules, raw)  # fmt: skip
                    if head_dim > 128:
                        lane = ptx.own_lane()  # or it would spill
                    # a store keeps all of that ahead of the wait
                    ptx.shared_store_f32(scratch + (lane << int32(2)), d_sum[0] + d_sum[1])
                    wait_for_products()
                    hold_sums(o)
                    give_back(of_values, int32(j - int32(1)), lane)
                    if rises:
                        rescale(o, alphas)
                    pack_weights(s, p)
                keep_rolled()
            if not taken:
                arrived(of_values, j)
                multiply_values(o, p, sides.values + stage(j))
                wait_for_products()
                hold_sums(o)
            give_back(of_values, j, lane)
            j = int32(j + int32(1))

    def paged_wgmma(
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
        no_mask = Rules(row_position, row_request, row_index, window_left, chunk_size, soft_cap, alibi_slopes,
                        int64(0), mask_request, mask_head, mask_row, mask_key, mask_kind)  # fmt: skip
        result = Result(num_qo_heads, head_dim_vo, state_v, state_s, out, out_row, out_head, out_dim, out_kind, lse,
                        lse_row, lse_head, lse_unit, sinks, v_scale, v_unit, gate, gate_row, gate_head, gate_dim,
                        gate_kind)  # fmt: skip

        barriers = shared + int32(BARRIERS)
        if thread < int32(8):  # two stages: of K and V there, of K and V used
            rings.init_barrier(barriers + thread * int32(8), int32(2 if thread < int32(4) else 4 * groups))
        elif groups == 2 and thread < int32(10):
            rings.init_barrier(barriers + thread * int32(8), int32(4))  # a warpgroup's turn
        if waits != int32(WAITS_NEVER):  # plans are copied to the device; what else is read may be a kernel's result
            ptx.wait_for_earlier()
        ptx.let_next_start()
        ptx.sync_block()
        key0, bits_at = item.key_begin, shared + int32(BITS)
        tiles = int32(((item.key_end - int32(1) - key0) >> int32(KEY_BITS)) + int32(1))
        if warp >= int32(4 * groups):
            shrink()
            half, table = warp & int32(1), Table(item.key_end, item.page_begin, kv_indices, page_size)
            key, place = int32(key0 + half * int32(KEYS // 2) + lane), shared + half * int32(64 * KEYS)
            if warp & int32(2) == int32(0):
                side = Side(pages.k, k_page, k_slot, pages.k_bytes, num_pages)
                own_bits = bits_at + half * int32(KEYS // 16)
                bring(side, key, tiles, place + int32(K_RING), own_bits, int32(0), barriers, lane, table)
            else:
                side = Side(pages.v, v_page, v_slot, pages.v_bytes, num_pages)
                faults_at = barriers + int32(FAULTS) + half * int32(4) if mask != int64(0) else int32(0)
                bring(side, key, tiles, place + int32(V_RING), int32(0), faults_at, barriers + int32(OF_VALUES), lane,
                      table)  # fmt: skip
            if item.state < int32(0):
                ptx.sync_block()  # the one in `finish`
        else:
            grow()
            limits = shared + int32(LIMITS) + warp * int32(WARP_ROWS * LIMITS_BYTES)
            first, end = cuda.local.array(LANE_ROWS, types.int32), cuda.local.array(LANE_ROWS, types.int32)
            set_up_lanes(shared + warp * int32(WARP_ROWS * 128), first, end, limits, item, first_pair, pairs, kv_head,
                         lane, queries, rules)  # fmt: skip
            _, _, all_low, all_high = keys_of_warp(first[0], end[0])
            publish_writes()
            any_of_group(int32(0), int32(1) + (warp >> int32(2)))
            if warp >= int32(4):
                end_turn(barriers, warp, lane)  # the first turn is the other one's
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
            sides = Sides(q_at, k_at, v_at, shared + int32(V_RING), bits_at, barriers)
            if full and (head_dim > 128 or mask != int64(0)):
                take_in(s, p, o, m, d_sum, key0, tiles, sides, scratch, warp, lane, limits, all_low, all_high,
                        item.key_position, rules)  # fmt: skip
            else:  # in a loop of its own: tests for a mask in each tile cost 4 %
                take_in(s, p, o, m, d_sum, key0, tiles, sides, scratch, warp, lane, limits, all_low, all_high,
                        item.key_position, no_mask)  # fmt: skip
            partials, state = shared + int32(PARTIALS) + warp * int32(WARP_ROWS * 8), item.state
            finish(o, m, d_sum, shared + warp * int32(WARP_ROWS * PITCH), partials, state, item.row_begin, first_pair,
                   pairs, lane, kv_head, group_size, result)  # fmt: skip
        end_behind_earlier()

    return Kernel(paged_wgmma, 32 * WARPS + 128, BLOCKS, SHARED, exchanges_registers=True)

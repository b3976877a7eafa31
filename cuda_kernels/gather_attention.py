"""Attention of each query row over its own list of token positions, on the decode tile.

A block takes a part of one row's list, one KV head and 16 of the group's query heads; all of it follows from the
block's number. Its warps take interleaved runs of 16 entries: a lane resolves one entry to its page and slot, once
for all heads and dimensions.
Entries that name no key are dropped: nothing is read for them, and their weight is 0.
"""

from __future__ import annotations

from collections.abc import Callable

from numba import cuda
from numba.cuda import float32, int32, int64, types, uint32
from numba.extending import register_jitable

from nbattn.cuda_kernels import ptx
from nbattn.cuda_kernels.compile import Kernel
from nbattn.cuda_kernels.epilogue import EMPTY, make_publish, make_write_row
from nbattn.cuda_kernels.groups import Pages, Result
from nbattn.cuda_kernels.loops import keep_rolled, unroll_fully
from nbattn.cuda_kernels.row_copies import make_row_copies
from nbattn.cuda_kernels.rows import element
from nbattn.cuda_kernels.shapes import gather_shape
from nbattn.cuda_kernels.tile import make_tile
from nbattn.cuda_kernels.tile_query import over_quad
from nbattn.indexing import idiv, page_and_slot, selected_token
from nbattn.scoring import shift, state_weight


@register_jitable
def part_of_block(block, num_rows, splits, heads_last, num_kv_heads):
    """Return (part, its row, its place in the row's list, KV head) of a block.

    Rows that share many tokens run together, head after head, so that a head's tokens stay in the L2 cache; else the
    heads of a part run together, since their tokens lie side by side.
    """
    inner = int32(num_rows * splits) if heads_last != int32(0) else num_kv_heads
    outer = idiv(block, inner)
    rest = int32(block - outer * inner)
    part, kv_head = (rest, outer) if heads_last != int32(0) else (outer, rest)
    row = idiv(part, splits)
    return part, row, int32(part - row * splits), kv_head


@register_jitable
def request_of_row(rows, row):
    """Return (where the page ids of the row's request start, the request's keys)."""
    return ptx.load_i32(rows + int64(row) * int64(8)), ptx.load_i32(rows + int64(row) * int64(8) + int64(4))


@register_jitable
def ask_for_query(q, q_head, group_begin, first_head, group_size, head_dim, lane):
    """Ask for the first 256 bytes of q of 16 query heads of a group, which are loaded behind the first keys only."""
    head, line = int32(first_head + (lane & int32(15))), int32(lane >> int32(4))
    if head < group_size and int32(64) * line < head_dim:
        ptx.prefetch(q + int64(group_begin + head) * q_head + int64(128) * int64(line))


@register_jitable
def list_entry(tokens, at, list_end):
    """Return entry `at` of the row's list; -1 at or past its end."""
    return element(tokens, at) if at < list_end else int32(-1)


@register_jitable
def resolve(token, kv_len, page_begin, kv_indices, page_size):
    """Return (page id, slot) of a listed token; -1 for one that names no key."""
    if not selected_token(token, kv_len):
        return int32(-1), int32(0)
    ordinal, slot = page_and_slot(token, page_size)
    return element(kv_indices, page_begin + ordinal), int32(slot)


def make_soften(o_numbers: int) -> Callable:
    """Return the online softmax of 16 keys, which leaves the accumulator alone while no maximum rises."""

    @register_jitable
    def soften(s, m, d_sum, o):
        """Turn scores into weights under the new maxima, and rescale what has been summed."""
        alpha = cuda.local.array(2, types.float32)
        for i in range(2):
            top = ptx.maximum(ptx.maximum(s[2 * i], s[2 * i + 1]), ptx.maximum(s[2 * i + 4], s[2 * i + 5]))
            top = ptx.maximum(m[i], over_quad(top, ptx.maximum))
            base = shift(top)
            alpha[i] = state_weight(m[i], base)
            m[i] = top
            total = d_sum[i] * alpha[i]
            for n in range(2):
                for e in range(2):
                    weight = state_weight(s[4 * n + 2 * i + e], base)
                    s[4 * n + 2 * i + e] = weight
                    total += weight
            d_sum[i] = total
        if ptx.ballot(alpha[0] != float32(1) or alpha[1] != float32(1)) != uint32(0):
            for n in range(o_numbers // 4):
                for i in range(2):
                    o[4 * n + 2 * i] *= alpha[i]
                    o[4 * n + 2 * i + 1] *= alpha[i]

    return soften


def make(cache: str, head_dim: int) -> Kernel:
    """Return the kernel for a cache format and a head-size class; see `paged_decode.make`."""
    tile = make_tile(cache, head_dim, 16)
    WARPS, STAGES, BLOCKS = gather_shape(cache, head_dim)
    STAGE, K_TILE, ITEM = 16 * (tile.K_ROW + tile.V_ROW), 16 * tile.K_ROW, tile.ITEM
    RING, STEP = STAGES * STAGE, 16 * WARPS
    PITCH = 4 * head_dim + 32  # of a row of accumulators; they take the rings' place
    PARTIALS = WARPS * RING
    QUERY = PARTIALS + WARPS * 16 * 8
    SHARED = QUERY + tile.Q_BYTES
    Q_SHARED, Q_WORDS, S_NUMBERS, P_WORDS = tile.Q_SHARED, tile.Q_WORDS, tile.S_NUMBERS, tile.P_WORDS
    O_NUMBERS = tile.O_NUMBERS
    load_query, multiply_keys, soften = tile.load_query, tile.multiply_keys, make_soften(O_NUMBERS)
    pack_weights, multiply_values = tile.pack_weights, tile.multiply_values
    copies = make_row_copies(tile.K_ROW, tile.V_ROW)
    PARTS, parts_inside, copy_rows = copies.PARTS, copies.parts_inside, copies.copy_rows
    publish, write_row = make_publish(tile.out_dim, O_NUMBERS // 4, PITCH), make_write_row(WARPS, 16)
    wait_for_oldest, wait_for_all = ptx.WAIT_COPIES[STAGES - 2], ptx.WAIT_COPIES[0]

    def gather_attention(
        rows, token_indices, token_indices_row, counts, num_rows, width, splits, split_size, heads_last, q, q_row,
        q_head, q_kind, k, k_page, k_slot, k_head, v, v_page, v_slot, v_head, kv_indices, num_pages, page_size,
        head_dim_qk, head_dim_vo, group_size, num_qo_heads, scale, state_v, state_s, out, out_row, out_head, out_dim,
        out_kind, lse, lse_row, lse_head, lse_unit, sinks, v_scale, v_unit, gate, gate_row, gate_head, gate_dim,
        gate_kind,
    ):  # fmt: skip
        num_kv_heads = idiv(num_qo_heads, group_size)
        block = int32(cuda.blockIdx.x)
        part, row, place, kv_head = part_of_block(block, num_rows, splits, heads_last, num_kv_heads)
        first_head = int32(cuda.blockIdx.y * 16)
        thread = int32(cuda.threadIdx.x)
        warp, lane = int32(thread >> int32(5)), int32(thread & int32(31))
        r, c = int32(lane >> int32(2)), int32(lane & int32(3))
        shared = ptx.shared_address(cuda.shared.array(0, types.uint8, 128))
        ring, partials = shared + warp * int32(RING), shared + int32(PARTIALS)
        pages = Pages(k + int64(kv_head) * k_head, k_page, k_slot, head_dim_qk * int32(ITEM),
                      v + int64(kv_head) * v_head, v_page, v_slot, head_dim_vo * int32(ITEM), num_pages)  # fmt: skip
        result = Result(num_qo_heads, head_dim_vo, state_v, state_s, out, out_row, out_head, out_dim, out_kind, lse,
                        lse_row, lse_head, lse_unit, sinks, v_scale, v_unit, gate, gate_row, gate_head, gate_dim,
                        gate_kind)  # fmt: skip
        ptx.let_next_start()  # the merge
        if warp == int32(0):
            ask_for_query(
                q + int64(row) * q_row, q_head, kv_head * group_size, first_head, group_size, head_dim_qk, lane
            )
        ptx.wait_for_earlier()
        page_begin, kv_len = request_of_row(rows, row)
        list_begin = int32(place * split_size)
        part_end = int32(min(list_begin + split_size, width))
        list_end = int32(min(part_end, element(counts, row)))
        tokens = token_indices + int64(row) * token_indices_row

        s, p = cuda.local.array(S_NUMBERS, types.float32), cuda.local.array(P_WORDS, types.uint32)
        o = cuda.local.array(O_NUMBERS, types.float32)
        m, d_sum = cuda.local.array(2, types.float32), cuda.local.array(2, types.float32)
        for i in range(O_NUMBERS):
            o[i] = float32(0)
        for i in range(2):
            m[i], d_sum[i] = EMPTY, float32(0)

        # fill the ring: this warp's runs start at entry here, here + step, ...; entries are read two runs ahead of use
        inside, bits = cuda.local.array(PARTS, types.int32), cuda.local.array(STAGES, types.uint32)
        parts_inside(inside, lane, pages)
        here = int32(list_begin + warp * int32(16))
        ahead = int32(here + (lane & int32(15)))
        filled = ring
        for stage in range(STAGES - 1):
            token = list_entry(tokens, ahead, part_end)  # does not wait for the list's true length
            token = token if ahead < list_end else int32(-1)
            page, slot = resolve(token, kv_len, page_begin, kv_indices, page_size)
            bits[stage + 1] = copy_rows(filled, page, slot, lane, inside, pages)
            ptx.commit_copies()
            filled = filled + int32(STAGE)
            ahead = int32(ahead + int32(STEP))
        page, slot = resolve(list_entry(tokens, ahead, list_end), kv_len, page_begin, kv_indices, page_size)
        ahead = int32(ahead + int32(STEP))
        token = list_entry(tokens, ahead, list_end)

        query = shared + int32(QUERY) if Q_SHARED else cuda.local.array(Q_WORDS, types.uint32)
        unit = cuda.local.array(2, types.float32)
        for i in range(2):
            head = int32(kv_head * group_size + min(first_head + r + int32(8 * i), group_size - int32(1)))
            address = q + int64(row) * q_row + int64(head) * q_head
            unit[i] = scale * load_query(query, address, i, q_kind, head_dim_qk, lane, warp == int32(0))
            unroll_fully()
        if Q_SHARED:
            ptx.sync_block()
        used = ring
        while here < list_end:
            wait_for_oldest()
            ptx.sync_warp()
            for stage in range(STAGES - 1):
                bits[stage] = bits[stage + 1]
            bits[STAGES - 1] = copy_rows(filled, page, slot, lane, inside, pages)
            ptx.commit_copies()
            page, slot = resolve(token, kv_len, page_begin, kv_indices, page_size)
            ahead = int32(ahead + int32(STEP))
            token = list_entry(tokens, ahead, list_end)
            multiply_keys(query, s, used, lane)
            for n in range(2):
                for e in range(2):
                    kept = (bits[0] >> uint32(int32(8 * n + e) + int32(2) * c)) & uint32(1) != uint32(0)
                    for i in range(2):
                        j = 4 * n + 2 * i + e
                        s[j] = s[j] * unit[i] if kept else EMPTY
            soften(s, m, d_sum, o)
            pack_weights(s, p)
            multiply_values(p, o, used + int32(K_TILE), lane)
            here = int32(here + int32(STEP))
            filled = used
            used = used + int32(STAGE) if used < ring + int32(RING - STAGE) else ring
            keep_rolled()

        wait_for_all()
        ptx.sync_block()  # the rings are free
        publish(o, m, d_sum, shared + warp * int32(16 * PITCH), partials + warp * int32(128), lane)
        ptx.sync_block()
        state = part if splits > int32(1) else int32(-1)
        for tile_row in range(warp, min(int32(16), group_size - first_head), int32(WARPS)):
            qo_head = int32(kv_head * group_size + first_head + tile_row)
            write_row(shared, int32(PITCH), partials, tile_row, lane, row, qo_head, kv_head, state, result)
            keep_rolled()

    return Kernel(gather_attention, 32 * WARPS, BLOCKS, SHARED)

"""Attention of each query row over its own list of token positions, on the decode tile.

A block takes one work item (a row and a part of its list), one KV head and 16 of the group's query heads. Its four
warps take interleaved runs of 16 entries: a lane resolves one entry to its page and slot, once for all heads and
dimensions.
Entries that name no key are dropped: nothing is read for them, and their weight is 0.
"""

from __future__ import annotations

from numba import cuda
from numba.cuda import float32, int32, int64, types, uint32
from numba.extending import register_jitable

from nbattn.cuda_kernels import ptx
from nbattn.cuda_kernels.compile import Kernel
from nbattn.cuda_kernels.epilogue import EMPTY, make_publish, make_write_row
from nbattn.cuda_kernels.groups import Pages, Result
from nbattn.cuda_kernels.loops import keep_rolled, unroll_fully
from nbattn.cuda_kernels.parameters import GATHER_WORK
from nbattn.cuda_kernels.rows import element, item_and_head
from nbattn.cuda_kernels.tile import make_tile
from nbattn.indexing import page_and_slot, selected_token

WARPS = 4
STAGES = 3  # two tiles of keys under way while one is used
ROW, LIST_BEGIN, LIST_END, PAGE_BEGIN, KV_LEN, STATE = range(len(GATHER_WORK))
ITEM_BYTES = 4 * len(GATHER_WORK)


@register_jitable
def gather_field(work, item, column):
    """Return one number of a work item."""
    return ptx.load_i32(work + int64(item) * int64(ITEM_BYTES) + int64(4 * column))


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


def make(cache: str, head_dim: int) -> Kernel:
    """Return the kernel for a cache format and a head-size class; see `paged_decode.make`."""
    tile = make_tile(cache, head_dim, 16)
    STAGE, K_TILE, ITEM = 16 * (tile.K_ROW + tile.V_ROW), 16 * tile.K_ROW, tile.ITEM
    RING = STAGES * STAGE
    PITCH = 4 * head_dim + 32  # of a row of accumulators; they take the rings' place
    PARTIALS = WARPS * RING
    QUERY = PARTIALS + WARPS * 16 * 8
    SHARED = QUERY + tile.Q_BYTES
    Q_SHARED, Q_WORDS, S_NUMBERS, P_WORDS = tile.Q_SHARED, tile.Q_WORDS, tile.S_NUMBERS, tile.P_WORDS
    O_NUMBERS = tile.O_NUMBERS
    load_query, fetch, multiply_keys, soften = tile.load_query, tile.fetch, tile.multiply_keys, tile.soften
    pack_weights, multiply_values = tile.pack_weights, tile.multiply_values
    publish, write_row = make_publish(tile.out_dim, O_NUMBERS // 4, PITCH), make_write_row(WARPS, 16)
    wait_for_oldest, wait_for_all = ptx.WAIT_COPIES[STAGES - 2], ptx.WAIT_COPIES[0]

    def gather_attention(
        work, token_indices, token_indices_row, counts, q, q_row, q_head, q_kind, k, k_page, k_slot, k_head, v,
        v_page, v_slot, v_head, kv_indices, num_pages, page_size, head_dim_qk, head_dim_vo, group_size, num_qo_heads,
        scale, state_v, state_s, out, out_row, out_head, out_dim, out_kind, lse, lse_row, lse_head, lse_unit, sinks,
        v_scale, v_unit, gate, gate_row, gate_head, gate_dim, gate_kind,
    ):  # fmt: skip
        item, kv_head = item_and_head(int32(cuda.blockIdx.x), num_qo_heads, group_size)
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
        row, page_begin = gather_field(work, item, ROW), gather_field(work, item, PAGE_BEGIN)
        kv_len, list_begin = gather_field(work, item, KV_LEN), gather_field(work, item, LIST_BEGIN)
        list_end = int32(min(gather_field(work, item, LIST_END), element(counts, row)))
        tokens = token_indices + int64(row) * token_indices_row

        query = shared + int32(QUERY) if Q_SHARED else cuda.local.array(Q_WORDS, types.uint32)
        unit = cuda.local.array(2, types.float32)
        for i in range(2):
            head = int32(kv_head * group_size + min(first_head + r + int32(8 * i), group_size - int32(1)))
            address = q + int64(row) * q_row + int64(head) * q_head
            unit[i] = scale * load_query(query, address, i, q_kind, head_dim_qk, lane, warp == int32(0))
            unroll_fully()
        if Q_SHARED:
            ptx.sync_block()
        s, p = cuda.local.array(S_NUMBERS, types.float32), cuda.local.array(P_WORDS, types.uint32)
        o = cuda.local.array(O_NUMBERS, types.float32)
        m, d_sum = cuda.local.array(2, types.float32), cuda.local.array(2, types.float32)
        for i in range(O_NUMBERS):
            o[i] = float32(0)
        for i in range(2):
            m[i], d_sum[i] = EMPTY, float32(0)

        # fill the ring: this warp's runs start at entry here, here + 64, ...; entries are read two runs ahead of use
        here = int32(list_begin + warp * int32(16))
        ahead = int32(here + (lane & int32(15)))
        bits_0 = bits_1 = bits_2 = uint32(0)
        for stage in range(STAGES - 1):
            page, slot = resolve(list_entry(tokens, ahead, list_end), kv_len, page_begin, kv_indices, page_size)
            place = ring + int32(stage * STAGE)
            bits_1 = bits_2
            bits_2 = fetch(place, place + int32(K_TILE), page, slot, lane, pages)
            ptx.commit_copies()
            ahead = int32(ahead + int32(16 * WARPS))
        page, slot = resolve(list_entry(tokens, ahead, list_end), kv_len, page_begin, kv_indices, page_size)
        ahead = int32(ahead + int32(16 * WARPS))
        token = list_entry(tokens, ahead, list_end)
        used, filled = ring, ring + int32((STAGES - 1) * STAGE)
        while here < list_end:
            wait_for_oldest()
            ptx.sync_warp()
            bits_0, bits_1 = bits_1, bits_2
            bits_2 = fetch(filled, filled + int32(K_TILE), page, slot, lane, pages)
            ptx.commit_copies()
            page, slot = resolve(token, kv_len, page_begin, kv_indices, page_size)
            ahead = int32(ahead + int32(16 * WARPS))
            token = list_entry(tokens, ahead, list_end)
            multiply_keys(query, s, used, lane)
            for n in range(2):
                for e in range(2):
                    kept = (bits_0 >> uint32(int32(8 * n + e) + int32(2) * c)) & uint32(1) != uint32(0)
                    for i in range(2):
                        j = 4 * n + 2 * i + e
                        s[j] = s[j] * unit[i] if kept else EMPTY
            soften(s, m, d_sum, o)
            pack_weights(s, p)
            multiply_values(p, o, used + int32(K_TILE), lane)
            here = int32(here + int32(16 * WARPS))
            filled = used
            used = used + int32(STAGE) if used < ring + int32(RING - STAGE) else ring
            keep_rolled()

        wait_for_all()
        ptx.sync_block()  # the rings are free
        publish(o, m, d_sum, shared + warp * int32(16 * PITCH), partials + warp * int32(128), lane)
        ptx.sync_block()
        state = gather_field(work, item, STATE)
        for tile_row in range(warp, min(int32(16), group_size - first_head), int32(WARPS)):
            qo_head = int32(kv_head * group_size + first_head + tile_row)
            write_row(shared, int32(PITCH), partials, tile_row, lane, row, qo_head, kv_head, state, result)
            keep_rolled()

    return Kernel(gather_attention, 32 * WARPS, 1 if head_dim > 128 else 2, SHARED)

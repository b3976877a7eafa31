"""Who a tile's rows are and which keys they keep."""

from __future__ import annotations

from collections.abc import Callable

from numba import cuda
from numba.cuda import float32, int32, int64, uint32
from numba.extending import register_jitable

from nbattn.cuda_kernels import ptx
from nbattn.cuda_kernels.epilogue import EMPTY, make_publish, make_store_states, make_write_rows
from nbattn.cuda_kernels.formats import BOOL, load_number
from nbattn.cuda_kernels.groups import Item
from nbattn.cuda_kernels.loops import unroll_fully
from nbattn.cuda_kernels.masks import make_mask
from nbattn.cuda_kernels.parameters import WORK
from nbattn.indexing import idiv, visible_keys
from nbattn.scoring import LOG2E, alibi_bias, soft_cap

WORK_BYTES = 4 * len(WORK)
AT = {name: 4 * column for column, name in enumerate(WORK)}
(ROW_BEGIN, ROW_END, KEY_BEGIN, KEY_END, PAGE_BEGIN, KEY_POSITION, KEY_BASE, KV_LEN, STATE, CAUSAL) = (
    AT[field.upper()] for field in Item._fields
)


@register_jitable
def read_item(work, number):
    """Return a work item; all its numbers are under way before the first is used."""
    at = work + int64(number) * int64(WORK_BYTES)
    return Item(
        ptx.load_i32(at + int64(ROW_BEGIN)),
        ptx.load_i32(at + int64(ROW_END)),
        ptx.load_i32(at + int64(KEY_BEGIN)),
        ptx.load_i32(at + int64(KEY_END)),
        ptx.load_i32(at + int64(PAGE_BEGIN)),
        ptx.load_i32(at + int64(KEY_POSITION)),
        ptx.load_i32(at + int64(KEY_BASE)),
        ptx.load_i32(at + int64(KV_LEN)),
        ptx.load_i32(at + int64(STATE)),
        ptx.load_i32(at + int64(CAUSAL)),
    )


@register_jitable
def element(array, index):
    """Return element `index` of an int32 array at address `array`."""
    return ptx.load_i32(array + int64(index) * int64(4))


@register_jitable
def item_and_head(block, num_qo_heads, group_size):
    """Return (work item, KV head) of a block: an item's heads run together, since they read the same tokens' memory."""
    num_kv_heads = idiv(num_qo_heads, group_size)
    item = idiv(block, num_kv_heads)
    return item, int32(block - item * num_kv_heads)


@register_jitable
def end_behind_earlier():
    """Let a launch end behind the one ahead of it, beside which it runs: one block waits, the others leave room."""
    if cuda.blockIdx.x == 0 and cuda.blockIdx.y == 0:
        ptx.wait_for_earlier()


@register_jitable
def row_and_head(pair, row_begin, kv_head, group_size):
    """Return (query row, query head) of the item's pair number `pair`."""
    row = idiv(pair, group_size)
    return int32(row_begin + row), int32(kv_head * group_size + pair - row * group_size)


@register_jitable
def keys_of_row(item, position, rules):
    """Return the interval of the level's keys that the row at `position` sees."""
    first, end = visible_keys(
        position,
        item.key_position,
        item.kv_len,
        item.causal != int32(0),
        rules.window_left,
        rules.chunk_size,
    )
    return int32(first), int32(end)


@register_jitable
def slope_and_mask(item, row, qo_head, rules):
    """Return (ALiBi slope in log2 units, address of the mask's element of the level's key 0 or 0) of a row and head."""
    slope, mask_at = float32(0), int64(0)
    if rules.alibi_slopes != int64(0):
        slope = ptx.load_f32(rules.alibi_slopes + int64(qo_head) * int64(4)) * float32(LOG2E)
    if rules.mask != int64(0):
        request = max(element(rules.row_request, row), int32(0))  # a row without tokens in the last level
        mask_at = rules.mask + int64(request) * rules.mask_request + int64(qo_head) * rules.mask_head
        mask_at += int64(element(rules.row_index, row)) * rules.mask_row
        mask_at += int64(item.key_base) * rules.mask_key
    return slope, mask_at


@register_jitable
def masked_score(score, mask_at, rules):
    """Apply the mask's element at address `mask_at` to a score in log2 units; return it and whether the mask keeps it.

    `rules` is a `groups.Rules` with a mask.
    """
    if rules.mask_kind == BOOL:
        return score, ptx.load_u8(mask_at) != uint32(0)
    bias = load_number(mask_at, rules.mask_kind)
    return score + bias * float32(LOG2E), bias != EMPTY


@register_jitable
def biased_score(score, distance, slope, mask_at, rules):
    """Apply soft cap, ALiBi and mask to a score in log2 units; return it and whether the mask keeps it.

    `distance` is the key's position minus the row's; `mask_at` the address of the mask's element, 0 without a mask.
    """
    if rules.soft_cap > float32(0):
        score = soft_cap(score, rules.soft_cap)
    score += alibi_bias(slope, distance)
    return masked_score(score, mask_at, rules) if mask_at != int64(0) else (score, True)


def make_score_tile(keys: int, rows: int, full: bool, masked_columns: int) -> tuple[Callable, Callable]:
    """Return `make_mask`'s first function and the one that turns ``q @ k.T`` of a lane's `rows` rows into scores.

    Each rule is a pass of its own over the numbers: what is off costs a branch. The mask of `masked_columns` times
    eight keys is in registers at a time; where these are all `keys`, it has been asked for before.
    """
    COLUMNS, S_ROWS = keys // 8, keys // 2

    @register_jitable
    def at(n, e, i):
        """Return the index of the lane's number of row i and column e of the n-th eight keys."""
        return S_ROWS * (i // 2) + 4 * n + 2 * (i % 2) + e

    @register_jitable
    def bias_tile(s, key0, c, slope, position, key_position, rules):
        """Apply soft cap, where there is one, and ALiBi, whose slopes are 0 where there is none."""
        if rules.soft_cap > float32(0):
            for j in range(rows * keys // 4):
                s[j] = soft_cap(s[j], rules.soft_cap)
                unroll_fully()
        if rows > 2 or rules.alibi_slopes != int64(0):  # one branch more, and four rows a lane would spill
            for n in range(COLUMNS):
                for i in range(rows):
                    distance = float32(int32(key_position + key0 + int32(8 * n) + int32(2) * c - position[i]))
                    s[at(n, 0, i)] += alibi_bias(slope[i], distance)
                    s[at(n, 1, i)] += alibi_bias(slope[i], distance + float32(1))
                unroll_fully()

    @register_jitable
    def drop_hidden(s, bits, key0, c, unit, first, end):
        """Drop the keys that a row does not see; return as `score_tile`. Unless `full`, this scales scores too."""
        dropped = int32(0)
        for n in range(COLUMNS):
            for e in range(2):
                column = int32(8 * n + e) + int32(2) * c
                exists = (bits[n // 4] >> uint32(int32(8 * (n % 4) + e) + int32(2) * c)) & uint32(1) != uint32(0)
                key = int32(key0 + column)
                for i in range(rows):
                    score = s[at(n, e, i)] if full else s[at(n, e, i)] * unit[i]
                    keep = exists and key >= first[i] and key < end[i]
                    if exists and not keep and end[i] >= int32(0):
                        dropped = int32(1)
                    s[at(n, e, i)] = score if keep else EMPTY
            unroll_fully()
        return dropped

    ask_mask, apply_mask = make_mask(rows, masked_columns, at)

    @register_jitable
    def mask_tile(s, raw, key, end, mask_at, rules):
        """Apply the mask to all columns, `masked_columns` at a time, or as asked for before; return as `apply_mask`."""
        dropped = int32(0)
        for n0 in range(0, COLUMNS, masked_columns):
            if masked_columns < COLUMNS:
                ask_mask(raw, int32(key + int32(8 * n0)), end, mask_at, rules)
            dropped |= apply_mask(s, n0, raw, rules)
            unroll_fully()
        return dropped

    @register_jitable
    def score_tile(s, bits, key0, c, whole, unit, first, end, slope, position, mask_at, key_position, rules, raw):
        """Scale, bias and mask `s`; dropped keys get -inf. Return 1 if a row drops a key whose value is there, else 0.

        Per row of the lane: `unit` scales, ``[first, end)`` is what it sees (``end < 0``: no row, whatever it says).
        Bit j of `bits` tells whether key j exists; where `whole` is true all do, and all rows see them.
        """
        if full or whole:
            for n in range(COLUMNS):
                for i in range(rows):
                    s[at(n, 0, i)] *= unit[i]
                    s[at(n, 1, i)] *= unit[i]
                unroll_fully()
        dropped = int32(0)
        if full:
            bias_tile(s, key0, c, slope, position, key_position, rules)
            if rules.mask != int64(0):
                dropped = mask_tile(s, raw, int32(key0 + int32(2) * c), end, mask_at, rules)
        if not whole:
            dropped |= drop_hidden(s, bits, key0, c, unit, first, end)
        return dropped

    return ask_mask, score_tile


@register_jitable
def limits_of_rows(first, end, position, own_position, exists, item, lane, rules):
    """Find which keys a tile's 16 rows see; return the interval that all of them see.

    Lane i looks after row i % 16: it gives its position and whether it is a row at all. What `score_tile` takes of the
    lane's rows r and r + 8 is put into the arrays.
    """
    first_own, end_own = keys_of_row(item, own_position, rules)
    all_low, all_high = first_own, end_own
    if not exists:
        first_own, end_own = int32(0), int32(-1)
        all_low, all_high = int32(0), int32(0x7FFFFFFF)
    for distance in (1, 2, 4, 8):
        all_low = int32(max(all_low, ptx.exchange_i32(all_low, int32(distance))))
        all_high = int32(min(all_high, ptx.exchange_i32(all_high, int32(distance))))
    for i in range(2):
        tile_row = (lane >> int32(2)) + int32(8 * i)
        first[i], end[i] = ptx.from_lane_i32(first_own, tile_row), ptx.from_lane_i32(end_own, tile_row)
        position[i] = ptx.from_lane_i32(own_position, tile_row)
    return all_low, all_high


@register_jitable
def biases_of_rows(slope, mask_at, row, qo_head, item, lane, rules):
    """Put ALiBi slopes and masks of the lane's rows into the arrays, as `limits_of_rows` does their limits."""
    slope_own, mask_own = slope_and_mask(item, row, qo_head, rules)
    for i in range(2):
        tile_row = (lane >> int32(2)) + int32(8 * i)
        slope[i], mask_at[i] = ptx.from_lane_f32(slope_own, tile_row), ptx.from_lane_i64(mask_own, tile_row)


@register_jitable
def keys_of_warp(first, end):
    """Return the interval that covers what a warp's rows see, one of each lane, and the one that all see.

    The first is empty if they see nothing.
    """
    low, high = int32(0x7FFFFFFF), int32(0)
    all_low, all_high = int32(0), int32(0x7FFFFFFF)
    if first < end:
        low, high = first, end
    if end >= int32(0):
        all_low, all_high = first, end
    for distance in (1, 2, 4, 8, 16):
        low = int32(min(low, ptx.exchange_i32(low, int32(distance))))
        high = int32(max(high, ptx.exchange_i32(high, int32(distance))))
        all_low = int32(max(all_low, ptx.exchange_i32(all_low, int32(distance))))
        all_high = int32(min(all_high, ptx.exchange_i32(all_high, int32(distance))))
    return low, high, all_low, all_high


LIMITS_BYTES = 32  # of a row: first, end, unit, position, slope, end, mask_at


@register_jitable
def recall_mask(limits, lane, i):
    """Read what `ask_mask` takes of the lane's row i: where it ends, and its mask."""
    at = limits + ((lane >> int32(2)) + int32(8 * i)) * int32(LIMITS_BYTES)
    _, end, low, high = ptx.shared_load_4u32(at + int32(16))
    return int32(end), int64(low) | int64(high) << int64(32)


def make_rows_of_lanes(load_query: Callable, rows: int, full: bool) -> tuple[Callable, Callable]:
    """Return the two functions by which a warp keeps what `score_tile` takes in shared memory, `rows` of each lane.

    A lane first looks after one row, lane i after row i of the ``8 * rows``, then loads its part of q of r, r + 8, ...
    """
    ALL_ROWS = 8 * rows

    @register_jitable
    def set_up_lanes(query, first, end, limits, item, first_pair, pairs, kv_head, lane, queries, rules):
        """Load q and fill ``limits [8 * rows, LIMITS_BYTES]``; `first` and `end` get the interval of the lane's row."""
        own = lane & int32(ALL_ROWS - 1)
        pair = int32(first_pair + own)
        row, qo_head = row_and_head(min(pair, pairs - int32(1)), item.row_begin, kv_head, queries.group_size)
        address = queries.q + int64(row) * queries.row + int64(qo_head) * queries.head
        position = element(rules.row_position, row)
        for i in range(rows):
            at = limits + ((lane >> int32(2)) + int32(8 * i)) * int32(LIMITS_BYTES)
            source = ptx.from_lane_i64(address, (lane >> int32(2)) + int32(8 * i))
            unit = queries.scale * load_query(query, source, i, queries.kind, queries.head_dim, lane, True)
            if lane & int32(3) == int32(0):
                ptx.shared_store_f32(at + int32(8), unit)
            unroll_fully()
        first[0], end[0] = keys_of_row(item, position, rules)
        if pair >= pairs:
            first[0], end[0] = int32(0), int32(-1)
        mine = limits + own * int32(LIMITS_BYTES)
        ptx.shared_store_2u32(mine, first[0], end[0])
        if full:
            slope, mask_at = slope_and_mask(item, row, qo_head, rules)
            ptx.shared_store_u32(mine + int32(12), position)
            ptx.shared_store_f32(mine + int32(16), slope)
            ptx.shared_store_u32(mine + int32(20), end[0])
            ptx.shared_store_2u32(mine + int32(24), uint32(mask_at & int64(0xFFFFFFFF)), uint32(mask_at >> int64(32)))

    @register_jitable
    def recall_rows(unit, first, end, slope, position, mask_at, limits, lane):
        """Read what `score_tile` takes of the lane's rows."""
        for i in range(rows):
            at = limits + ((lane >> int32(2)) + int32(8 * i)) * int32(LIMITS_BYTES)
            first_i, end_i, unit_i, position_i = ptx.shared_load_4u32(at)
            first[i], end[i], unit[i] = int32(first_i), int32(end_i), ptx.bits_float(unit_i)
            if full:
                slope_i, _, low, high = ptx.shared_load_4u32(at + int32(16))
                position[i], slope[i] = int32(position_i), ptx.bits_float(slope_i)
                mask_at[i] = int64(low) | int64(high) << int64(32)

    return set_up_lanes, recall_rows


def make_finish(out_dim: Callable, out_tiles: int, pitch: int, rows: int, widened: bool) -> Callable:
    """Return the function by which a warp of the prefill tiles ends: see `make_publish` and `make_store_states`."""
    ALL_ROWS = 8 * rows
    store_states = make_store_states(widened, out_tiles, rows)
    publish, write_rows = make_publish(out_dim, out_tiles, pitch, rows), make_write_rows(1, ALL_ROWS)

    @register_jitable
    def finish(
        o, m, d_sum, accumulators, partials, state, row_begin, first_pair, pairs, lane, kv_head, group_size, result
    ):  # fmt: skip
        """Store the warp's rows: as partial states from `state` on, or finished if that is negative.

        All warps come here; `accumulators` and `partials` are the warp's, and may lie where others have read keys.
        """
        count = int32(min(int32(ALL_ROWS), pairs - first_pair))
        row, qo_head = row_and_head(min(first_pair + lane, pairs - int32(1)), row_begin, kv_head, group_size)
        if state >= int32(0):
            slot = int64(state + row - row_begin) * int64(result.num_qo_heads) + int64(qo_head)
            store_states(o, m, d_sum, lane, slot, count, result)
        else:
            ptx.sync_block()
            publish(o, m, d_sum, accumulators, partials, lane)
            ptx.sync_warp()
            write_rows(accumulators, int32(pitch), partials, int32(0), int32(1), count, lane, row, qo_head, kv_head,
                       state, result)  # fmt: skip

    return finish

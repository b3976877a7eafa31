"""From lengths to a work list: which rows meet which keys, where partial results go and how they are merged.

Pure functions of host integers, shared by both targets. A cascade level and a piece of a long key range are the same
thing here: a *split* of a row's keys. Rows that only one split reaches are written directly, the others through
partial states that are merged once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import ceil

import numpy as np

from nbattn.positions import LevelLengths, Positions

# columns of the work list
LEVEL, ROW_BEGIN, ROW_END, KEY_BEGIN, KEY_END, PAGE_BEGIN, KEY_POSITION, KEY_BASE, KV_LEN, STATE, CAUSAL = range(11)
WORK_COLUMNS = 11

GATHER_ROW, LIST_BEGIN, LIST_END, GATHER_PAGE_BEGIN, GATHER_KV_LEN, GATHER_STATE = range(6)  # gather_attention's
GATHER_COLUMNS = 6

KEY_ALIGNMENT = 16  # a range trimmed by a window starts at a whole block of keys, so values do not depend on the tile
SMALLEST_SPLIT = 64  # keys; below it a state costs more than it saves
LONGEST_SHARE = 1.05  # of a share: what an item may take to stay whole beside others
MOST_OF_WAVE = 0.75  # that leaves room to the others
SHARES_PER_THREAD = 4  # that a CPU thread should find when the split size is automatic

_NO_ROWS, _NO_ENDS = np.zeros(0, np.int32), np.zeros(1, np.int32)  # of a list without merges, and its indptr


@dataclass(frozen=True)
class WorkList:
    """What the kernels run: see the module's constants for the columns of `work`, all arrays int32.

    Row ``merge_rows[i]`` is the merge of the states ``merge_slots[merge_indptr[i]:merge_indptr[i + 1]]``, in that
    order; without states it is an empty row. `num_keys` counts the keys of all items, `num_pairs` the keys that their
    rows meet.
    """

    work: np.ndarray
    merge_rows: np.ndarray
    merge_indptr: np.ndarray
    merge_slots: np.ndarray
    num_states: int
    max_tokens: int
    num_keys: int
    num_pairs: int

    def sizes(self) -> dict[str, int]:
        """Return what a plan's buffers must hold."""
        return {"work items": len(self.work), "states": self.num_states, "merged rows": len(self.merge_rows)}


def build_work(
    levels: list[LevelLengths],
    places: Positions,
    *,
    window_left: int = -1,
    chunk_size: int = 0,
    split_size: int | None = None,
    tile_tokens: Sequence[int],
    shares: int = 1,
    few_tokens: int = 0,
    many_shares: float = 0,
    wave: float = 0,
    smallest_split: int = SMALLEST_SPLIT,
) -> WorkList:
    """Cut every level's rows into tiles and their keys into splits.

    Parameters
    ----------
    levels, places
        Lengths and positions.
    window_left, chunk_size : int
        The positional rules; keys that no row of a tile sees are not visited.
    split_size : int, optional
        Keys of one split, counted from the level's first key; None cuts so that items are much alike.
    tile_tokens : sequence of int
        Most query rows of one item, for each level.
    shares : int
        How many items of equal cost the work would make; an item of more than one share is cut. An item costs its keys
        times its rows.
    few_tokens : int
    many_shares : float
        If not 0, items of up to `few_tokens` rows belong to one kernel and larger ones to another, whose work is to
        make `many_shares`. Each takes a tile of rows as fast as one row: an item costs its keys.
    wave : float
        How many larger items run at a time beside the others, where that matters. If equal pieces would leave others
        little room, larger items are cut into whole shares and a rest that ends early.
    smallest_split : int
        Least cost of a piece, which has at least `SMALLEST_SPLIT` keys, unless the split size is given.
    """
    runs = [_runs_of_level(i, level, places, tile_tokens[i]) for i, level in enumerate(levels)]
    items = runs[0] if len(runs) == 1 else np.concatenate(runs, axis=1)
    if window_left >= 0 or chunk_size > 0 or not places.all_last:
        _trim(items, places.row_position, window_left, chunk_size)
    whole, lengths = _with_keys(items)
    items, cost = _split(
        whole, lengths, split_size, shares, max(tile_tokens), few_tokens, many_shares, wave, smallest_split
    )
    num_keys = num_pairs = int(np.add.reduce(cost))
    max_tokens, num_rows = 1, items.shape[1]
    if len(levels) > 1 or levels[0].rows[1] is not None:
        tokens = items[ROW_END] - items[ROW_BEGIN]
        max_tokens, num_rows = int(tokens.max(initial=1)), int(tokens.sum())
        cost = cost * tokens
        num_pairs = int(cost.sum())
    is_direct = items is whole and len(levels) == 1 and num_rows == len(places.covered)
    merges = _without_states(items, _NO_ROWS) if is_direct else _assign_states(items, places.covered)
    work = items.T.astype(np.int32, order="C")
    if np.logical_or.reduce(cost[1:] > cost[:-1]):
        work = work[np.argsort(-cost, kind="stable")]  # longest first
    return WorkList(work, *merges, max_tokens, num_keys, num_pairs)


def most_work(
    levels: list[LevelLengths],
    longest: int,
    *,
    window_left: int = -1,
    split_size: int | None = None,
    tile_tokens: Sequence[int],
    shares: int = 1,
    few_tokens: int = 0,
    many_shares: float = 0,
    wave: float = 0,
    smallest_split: int = SMALLEST_SPLIT,
) -> dict[str, int]:
    """Return upper bounds of `WorkList.sizes` over all lengths up to `longest` with the levels' offsets.

    The longest lengths are no bound by themselves: a lone long request is cut into more splits than each of many, and
    rows under requests of one length share a tile that others cut. Positions are taken to follow from the lengths.
    """
    cuts = np.unique(np.concatenate([level.qo_indptr for level in levels]))
    items = states = 0
    for level, most_tokens in zip(levels, tile_tokens, strict=True):
        rows = np.diff(cuts[(cuts >= level.qo_indptr[0]) & (cuts <= level.qo_indptr[-1])])
        tiles = int((-(-rows // most_tokens)).sum())
        tokens = min(most_tokens, int(np.diff(level.qo_indptr).max(initial=0)))  # of a tile that no other level cuts
        span = longest
        if level.causal and window_left >= 0:
            span = min(longest, window_left + tokens + KEY_ALIGNMENT)
        if split_size is None:
            more = min(
                shares + ceil(many_shares),
                tiles * max(0, min(longest // SMALLEST_SPLIT, longest * tokens // smallest_split) - 1),
            )
        else:
            more = tiles * ((span - 1) // split_size + 1 if span else 0)
        items += tiles + more
        states += int(rows.sum()) + more * tokens
    merged_rows = max(int(level.qo_indptr[-1]) for level in levels)
    return {"work items": items, "states": states, "merged rows": merged_rows}


def _runs_of_level(number: int, level: LevelLengths, places: Positions, tile_tokens: int) -> np.ndarray:
    """Return one item per tile of rows that share their request and the position of its key 0: [columns, items]."""
    reached, counts = level.rows
    first, last = reached.start, reached.stop
    if counts is None and number == 0:  # decode: one row, one tile
        items = _one_row_items(first, last, level.causal).copy()
        request, row = slice(None), reached
    else:
        counts = level.qo_indptr[1:] - level.qo_indptr[:-1]
        request_of_row = np.repeat(np.arange(len(counts)), counts)
        start_of_row = places.key_position[number][first:last]
        changes = (np.diff(request_of_row) != 0) | (np.diff(start_of_row) != 0)
        begin = np.concatenate([[0], np.flatnonzero(changes) + 1]) if last > first else np.zeros(0, np.int64)
        end = np.append(begin[1:], last - first) if last > first else begin
        tiles = -(-(end - begin) // tile_tokens)
        run, ordinal = _pieces(tiles)
        begin, end = begin[run] + ordinal * tile_tokens, np.minimum(begin[run] + (ordinal + 1) * tile_tokens, end[run])
        request = request_of_row[begin]
        row = begin + first
        items = _empty_items(number, row, end + first, level.causal)
        items[KEY_BASE] = places.key_base[number][row]
    items[KV_LEN] = items[KEY_END] = level.kv_lens[request]
    items[PAGE_BEGIN] = level.page_begin[request]
    items[KEY_POSITION] = places.key_position[number][row]
    return items


@lru_cache(maxsize=16)
def _one_row_items(first: int, last: int, causal: bool) -> np.ndarray:
    """Return items of level 0 for one row each, to be copied."""
    return _empty_items(0, np.arange(first, last), np.arange(first + 1, last + 1), causal)


def _empty_items(number: int, begin: np.ndarray, end: np.ndarray, causal: bool) -> np.ndarray:
    """Return items of a level that have rows but no keys: [columns, items]."""
    items = np.zeros((WORK_COLUMNS, len(begin)), np.int64)
    items[LEVEL], items[ROW_BEGIN], items[ROW_END], items[CAUSAL] = number, begin, end, causal
    return items


def _with_keys(items: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the items that have keys, and how many."""
    lengths = items[KEY_END] - items[KEY_BEGIN]
    if lengths.size == 0 or np.minimum.reduce(lengths) > 0:
        return items, lengths
    kept = lengths > 0
    return items[:, kept], lengths[kept]


def _pieces(counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return (whole, ordinal) of every piece of wholes that have `counts` pieces each."""
    whole = np.repeat(np.arange(len(counts)), counts)
    return whole, np.arange(len(whole)) - np.repeat(np.cumsum(counts) - counts, counts)


def _trim(items: np.ndarray, row_position: np.ndarray, window_left: int, chunk_size: int) -> None:
    """Narrow each item's keys to those that some of its rows sees."""
    if items.shape[1] == 0:
        return
    begins, ends = items[ROW_BEGIN], items[ROW_END]
    lowest = highest = row_position[begins].astype(np.int64)
    if (ends - begins > 1).any():
        positions = np.append(row_position, 0).astype(np.int64)  # so that an end may equal the number of rows
        ranges = np.column_stack([begins, ends]).ravel()  # the even results of reduceat are the ranges
        lowest = np.minimum.reduceat(positions, ranges)[::2]
        highest = np.maximum.reduceat(positions, ranges)[::2]
    if window_left < 0 and chunk_size == 0:
        hidden = (items[CAUSAL] != 0) & (highest - items[KEY_POSITION] + 1 < items[KV_LEN])
        if not hidden.any():
            return
    first, _ = _visible_keys(lowest, items, window_left, chunk_size)
    _, end = _visible_keys(highest, items, window_left, chunk_size)
    items[KEY_BEGIN] = np.where(first < end, first // KEY_ALIGNMENT * KEY_ALIGNMENT, end)
    items[KEY_END] = end


def _visible_keys(
    position: np.ndarray, items: np.ndarray, window_left: int, chunk_size: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return `nbattn.indexing.visible_keys` of one row of each item, whose position is given."""
    start, kv_len = items[KEY_POSITION], items[KV_LEN]
    first = np.zeros_like(start)
    end = np.where(items[CAUSAL] != 0, np.minimum(kv_len, position - start + 1), kv_len)
    if window_left >= 0:
        first = np.maximum(first, position - window_left - start)
    if chunk_size > 0:
        chunk_position = position // chunk_size * chunk_size
        first = np.maximum(first, chunk_position - start)
        end = np.where(position < 0, 0, np.minimum(end, chunk_position + chunk_size - start))
    first = np.minimum(first, kv_len)
    return first, np.maximum(first, end)


def _split(
    items: np.ndarray, lengths: np.ndarray, split_size: int | None, shares: int, most_tokens: int = 1,
    few_tokens: int = 0, many_shares: float = 0, wave: float = 0, smallest_split: int = SMALLEST_SPLIT,
) -> tuple[np.ndarray, np.ndarray]:  # fmt: skip
    """Cut the items' key ranges, `lengths` keys each, at multiples of the split size; return them and their lengths.

    An item has up to `most_tokens` rows.
    """
    begins, ends = items[KEY_BEGIN], items[KEY_END]
    if split_size is None:
        cost = lengths if few_tokens else lengths * (items[ROW_END] - items[ROW_BEGIN])
        few = items[ROW_END] - items[ROW_BEGIN] <= few_tokens if 0 < few_tokens < most_tokens else None
        if few is not None and not few.all():
            share = np.where(few, lengths[few].sum() / shares, lengths[~few].sum() / max(1, many_shares))
            share = np.maximum(share, 1.0)
        else:
            share = max(int(np.add.reduce(cost)) / max(1, shares), 1.0)
            if cost.size == 0 or np.maximum.reduce(cost) / share - 0.25 <= 1:  # a little more than one stays whole
                return items, lengths
        pieces = np.ceil(cost / share - 0.25)
        if few is not None and wave:
            pieces = np.where(few, pieces, np.ceil(cost / (share * LONGEST_SHARE)))
        pieces = np.minimum(pieces.astype(np.int64), np.minimum(lengths // SMALLEST_SPLIT, cost // smallest_split))
        if pieces.max() <= 1:
            return items, lengths
        size = -(-lengths // np.maximum(pieces, 1))
        if few is not None and wave and pieces[~few].sum() > MOST_OF_WAVE * wave:
            size = np.where(few, size, np.maximum(size, np.ceil(share).astype(np.int64)))
        size = -(-size // SMALLEST_SPLIT) * SMALLEST_SPLIT
        origin = begins
    else:
        size = np.full(len(begins), split_size, np.int64)
        origin = begins // split_size * split_size
    parent, ordinal = _pieces(-(-(ends - origin) // np.maximum(size, 1)))
    cut = items[:, parent]
    size = size[parent]
    begin = origin[parent] + ordinal * size
    cut[KEY_BEGIN] = np.maximum(begin, cut[KEY_BEGIN])
    cut[KEY_END] = np.minimum(begin + size, cut[KEY_END])
    return cut, cut[KEY_END] - cut[KEY_BEGIN]


def _assign_states(items: np.ndarray, covered: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, int]:
    """Give items whose rows have other contributions a range of state slots, and list what each row merges."""
    begins, ends, num_rows = items[ROW_BEGIN], items[ROW_END], len(covered)
    edges = np.bincount(begins, minlength=num_rows + 1) - np.bincount(ends, minlength=num_rows + 1)
    contributions = np.cumsum(edges[:-1])
    empty = np.flatnonzero(covered & (contributions == 0))
    if contributions.max(initial=0) <= 1:
        return _without_states(items, empty.astype(np.int32))
    shared_rows = np.concatenate([[0], np.cumsum(contributions > 1)])
    shared = shared_rows[ends] > shared_rows[begins]
    tokens = np.where(shared, ends - begins, 0)
    slots = np.cumsum(tokens) - tokens
    items[STATE] = np.where(shared, slots, -1)
    owner, ordinal = _pieces(tokens)
    row = begins[owner] + ordinal
    counts = np.bincount(row, minlength=num_rows)
    rows = np.flatnonzero(counts)
    merge_rows = np.concatenate([rows, empty]).astype(np.int32)
    merge_indptr = np.zeros(len(merge_rows) + 1, np.int32)
    np.cumsum(counts[rows], out=merge_indptr[1 : len(rows) + 1])
    merge_indptr[len(rows) + 1 :] = len(row)
    return merge_rows, merge_indptr, np.argsort(row, kind="stable").astype(np.int32), len(row)


def _without_states(items: np.ndarray, empty: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, int]:
    """Let items write their rows; the `empty` rows, which none reaches, are merges of nothing."""
    items[STATE] = -1
    return empty, _NO_ENDS if len(empty) == 0 else np.zeros(len(empty) + 1, np.int32), _NO_ROWS, 0


def build_gather_work(
    kv_lens: np.ndarray,
    page_begin: np.ndarray,
    qo_indptr: np.ndarray,
    counts: np.ndarray,
    total_rows: int,
    *,
    split_size: int | None = None,
    workers: int = 1,
) -> WorkList:
    """Cut every row's index list into splits.

    Parameters
    ----------
    kv_lens, page_begin : int array, shape [batch]
        Keys of each request and where its page ids start.
    qo_indptr : int array, shape [batch + 1]
        Query rows of each request.
    counts : int array, shape [total_rows]
        Entries of each row's list, already clamped to its width.
    """
    first, last = int(qo_indptr[0]), int(qo_indptr[-1])
    request = np.repeat(np.arange(len(kv_lens)), np.diff(qo_indptr))
    rows = np.arange(first, last)
    items = np.zeros((WORK_COLUMNS, last - first), np.int64)
    items[ROW_BEGIN], items[ROW_END], items[KEY_END] = rows, rows + 1, counts[first:last]
    items[PAGE_BEGIN], items[KV_LEN] = page_begin[request], kv_lens[request]
    items, lengths = _split(*_with_keys(items), split_size, workers * SHARES_PER_THREAD)
    covered = np.zeros(total_rows, bool)
    covered[first:last] = True
    merges = _assign_states(items, covered)
    order = np.argsort(-lengths, kind="stable")
    columns = [ROW_BEGIN, KEY_BEGIN, KEY_END, PAGE_BEGIN, KV_LEN, STATE]
    work = np.ascontiguousarray(items[columns][:, order].T, np.int32)
    num_keys = int(lengths.sum())
    return WorkList(work, *merges, 1, num_keys, num_keys)

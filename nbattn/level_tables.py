"""From requests given as page lists or block hashes to the tables of a cascade: which prefixes are worth a level."""

from __future__ import annotations

import numbers
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from nbattn.contracts import check_bool, check_int
from nbattn.errors import ContractError
from nbattn.page_tables import INT32_MAX


class LevelLists(NamedTuple):
    """Four lists with an int32 array for every level, the root first: what a multi-level wrapper's `plan` takes."""

    qo_indptr_arr: list[np.ndarray]
    paged_kv_indptr_arr: list[np.ndarray]
    paged_kv_indices_arr: list[np.ndarray]
    paged_kv_last_page_len: list[np.ndarray]


class LevelTables(LevelLists):
    """The four lists of `build_levels`, a tuple to be unpacked into `plan`, and what they were made of.

    Attributes
    ----------
    page_ids : list of int32 array
        The pages of each request, in order.
    page_of_hash : dict or None
        The page that each block hash was given, or None for requests given as page ids.
    """

    page_ids: list[np.ndarray]
    page_of_hash: dict[Hashable, int] | None

    @property
    def num_levels(self) -> int:
        """Levels chosen, the requests' own included."""
        return len(self.qo_indptr_arr)

    def padded(self, num_levels: int) -> LevelLists:
        """Return the lists with empty levels above the root, for a wrapper that was made for `num_levels`."""
        missing = check_int("num_levels", num_levels) - self.num_levels
        if missing < 0:
            raise ContractError(f"num_levels: must be at least {self.num_levels} (levels chosen), got {num_levels}.")
        rows = self.qo_indptr_arr[-1][[0, -1]]
        empty = (rows, np.zeros(2, np.int32), np.zeros(0, np.int32), np.ones(1, np.int32))
        return LevelLists(*([x] * missing + mine for x, mine in zip(empty, self, strict=True)))


def build_levels(
    pages_or_hashes: Sequence[Sequence[Any]],
    kv_lens: Sequence[int],
    qo_lens: Sequence[int],
    page_size: int,
    max_levels: int = 2,
    *,
    hashed: bool | None = None,
    row_cost: int = 0,
) -> LevelTables:
    """Choose the prefixes worth sharing and return the four lists that `MultiLevelCascadeAttentionWrapper.plan` takes.

    Requests that stand next to each other and begin with the same pages may read them once, in a level above. Of all
    ways to nest such groups up to ``max_levels - 1`` deep, the one is chosen that saves the most reads.

    Parameters
    ----------
    pages_or_hashes : sequence of sequences, one per request
        Page ids, at least ``ceil(kv_len / page_size)`` of them; or hashes of full blocks of `page_size` tokens, equal
        for blocks of equal content: bytes, str, large integers, anything hashable.
    kv_lens : sequence of int
        Keys of each request, new ones included.
    qo_lens : sequence of int
        New rows of each request. The pages of its new tokens stay in the last level.
    page_size : int
        Tokens of a page.
    max_levels : int
        Most levels, the requests' own included; 1 shares nothing. Levels that save nothing are left out, see
        `LevelTables.padded`.
    hashed : bool, optional
        Whether hashes are given. None: they are unless every entry is an integer that int32 holds.
    row_cost : int
        What one more partial state costs a query row, in tokens read; a group must save more than it costs. Measured
        in bytes it is ``2 * group_size / bytes per element of the cache``.

    Returns
    -------
    LevelTables
        A tuple of ``qo_indptr_arr, paged_kv_indptr_arr, paged_kv_indices_arr, paged_kv_last_page_len``, with the
        attributes `page_ids` and `page_of_hash`. A request outside all groups of a level is an entry without pages.

    Raises
    ------
    ContractError
        If an argument breaks a rule.

    Notes
    -----
    Requests are never reordered: only neighbours share, so sort them first, e.g. by their lists. Hashes are given pages
    ``0, 1, 2, ...`` in the order of their first appearance, blocks without one (the partial last block, generated
    tokens) the pages after those; write the keys to `page_ids`, or map the ids on to your own.

    Examples
    --------
    >>> from nbattn.cascade import build_levels
    >>> tables = build_levels([[7, 3, 5], [7, 3, 9], [8]], kv_lens=[9, 10, 2], qo_lens=[1, 1, 1], page_size=4)
    >>> [x.tolist() for x in tables.qo_indptr_arr], [x.tolist() for x in tables.paged_kv_indices_arr]
    ([[0, 2, 3], [0, 1, 2, 3]], [[7, 3], [5, 9, 8]])
    >>> build_levels([["system", "a"], ["system"]], [8, 6], [1, 1], page_size=4).page_of_hash
    {'system': 0, 'a': 1}
    """
    page_size = check_int("page_size", page_size, at_least=1, at_most=INT32_MAX)
    max_levels = check_int("max_levels", max_levels, at_least=1)
    row_cost = check_int("row_cost", row_cost, at_least=0)
    try:
        requests = [list(x) for x in pages_or_hashes]
    except TypeError as error:
        rule = "must be a sequence of sequences, one per request"
        raise ContractError(f"pages_or_hashes: {rule}, got {pages_or_hashes!r}.") from error
    lens, rows = (_lengths(n, x, len(requests)) for n, x in (("kv_lens", kv_lens), ("qo_lens", qo_lens)))
    counts = -(-lens // page_size)
    pages, page_of_hash = _page_ids(requests, lens, counts, page_size, hashed)
    shareable = np.maximum(lens - rows, 0) // page_size
    overlap = [_common_prefix(pages[i], pages[i + 1], int(min(shareable[i : i + 2]))) for i in range(len(pages) - 1)]
    groups = _groups(overlap, rows)
    chosen = _choose(groups, page_size, row_cost, min(max_levels - 1, len(groups)))
    tables = LevelTables(*_lists(pages, lens, rows, page_size, chosen))
    tables.page_ids, tables.page_of_hash = pages, page_of_hash
    return tables


def _lengths(name: str, values: Any, count: int) -> np.ndarray:
    try:
        lengths = np.asarray(values)
    except ValueError:  # lists of different lengths
        lengths = np.zeros(0)
    if lengths.shape != (count,) or (count and lengths.dtype.kind not in "iu"):
        raise ContractError(f"{name}: must be {count} integers (one per request), got {values!r}.")
    far = np.flatnonzero((lengths < 0) | (lengths > INT32_MAX))
    if len(far):
        raise ContractError(f"{name}[{far[0]}]: must be in 0..{INT32_MAX}, got {lengths[far[0]]}.")
    return lengths.astype(np.int64)


def _is_page_id(x: Any) -> bool:
    return not isinstance(x, bool) and isinstance(x, numbers.Integral) and -INT32_MAX - 1 <= int(x) <= INT32_MAX


def _page_ids(
    requests: list[list[Any]], lens: np.ndarray, counts: np.ndarray, page_size: int, hashed: bool | None
) -> tuple[list[np.ndarray], dict[Hashable, int] | None]:
    """Return the pages that each request reads, and the page of each hash if hashes are given."""
    ids_only = all(_is_page_id(x) for request in requests for x in request)
    if not check_bool("hashed", hashed, not ids_only):
        for b, (request, count) in enumerate(zip(requests, counts, strict=True)):
            if not ids_only and not all(_is_page_id(x) for x in request):
                raise ContractError(f"pages_or_hashes[{b}]: must hold int32 page ids, got {request!r}.")
            if len(request) < count:
                rule = f"must hold at least {count} pages (kv_lens[{b}] = {lens[b]}, page_size {page_size})"
                raise ContractError(f"pages_or_hashes[{b}]: {rule}, got {len(request)}.")
        return [np.array(x[:n], np.int32) for x, n in zip(requests, counts, strict=True)], None
    page_of_hash: dict[Hashable, int] = {}
    blocks = [request[:full] for request, full in zip(requests, lens // page_size, strict=True)]
    for b, block in enumerate(blocks):
        for x in block:
            if not isinstance(x, Hashable):
                raise ContractError(f"pages_or_hashes[{b}]: must hold hashable values, got {type(x).__name__}.")
            page_of_hash.setdefault(x, len(page_of_hash))
    pages, fresh = [], len(page_of_hash)
    for block, count in zip(blocks, counts.tolist(), strict=True):
        own = count - len(block)
        pages.append(np.array([page_of_hash[x] for x in block] + list(range(fresh, fresh + own)), np.int32))
        fresh += own
    return pages, page_of_hash


def _common_prefix(a: np.ndarray, b: np.ndarray, limit: int) -> int:
    """Return how many leading entries of `a` and `b`, at most `limit`, are equal."""
    differ = np.flatnonzero(a[:limit] != b[:limit])
    return int(differ[0]) if len(differ) else limit


@dataclass
class _Group:
    """Neighbours ``begin..end`` that share `depth` pages; groups inside it share more."""

    begin: int
    depth: int
    end: int = 0
    readers: int = 0  # requests with rows
    rows: int = 0
    inner: list[_Group] = field(default_factory=list)
    saved: dict[tuple[int, int], int] = field(default_factory=dict)  # by pages used above and levels left: at best
    above: set[int] = field(default_factory=lambda: {0})  # depths of the groups around it, and 0


def _groups(overlap: list[int], qo_lens: np.ndarray) -> list[_Group]:
    """Return every largest run of neighbours with a common prefix, inner groups before outer ones."""
    finished: list[_Group] = []
    open_groups: list[_Group] = []
    for i, shared in enumerate([*overlap, 0]):  # `shared` pages of requests i and i + 1
        begin = i
        inner: list[_Group] = []
        while open_groups and open_groups[-1].depth > shared:
            group = open_groups.pop()
            group.inner += inner
            group.end, begin, inner = i + 1, group.begin, [group]
            finished.append(group)
        if shared and not (open_groups and open_groups[-1].depth == shared):
            open_groups.append(_Group(begin, shared))
        if open_groups:
            open_groups[-1].inner += inner
    for group in finished:
        lens = qo_lens[group.begin : group.end]
        group.readers, group.rows = int(np.count_nonzero(lens)), int(lens.sum())
    for group in reversed(finished):  # outer groups first
        for inner_group in group.inner:
            inner_group.above = group.above | {group.depth}
    return finished


def _choose(groups: list[_Group], page_size: int, row_cost: int, levels: int) -> list[list[_Group]]:
    """Return the groups of each level above the last, of those that together save the most."""

    def kept(group: _Group, used: int, left: int) -> int:
        own = (group.readers - 1) * (group.depth - used) * page_size - group.rows * row_cost
        return own + sum(x.saved[group.depth, left - 1] for x in group.inner)

    def left_out(group: _Group, used: int, left: int) -> int:
        return sum(x.saved[used, left] for x in group.inner)

    for group in groups:  # inner groups first
        for used in group.above:
            group.saved[used, 0] = 0
            for left in range(1, levels + 1):
                group.saved[used, left] = max(kept(group, used, left), left_out(group, used, left))
    chosen: list[list[_Group]] = [[] for _ in range(levels)]
    inside = {id(inner) for group in groups for inner in group.inner}
    visits = [(group, 0, levels) for group in groups if id(group) not in inside]
    while visits:
        group, used, left = visits.pop()
        if left == 0:
            continue
        if kept(group, used, left) > left_out(group, used, left):
            chosen[levels - left].append(group)
            used, left = group.depth, left - 1
        visits += [(inner, used, left) for inner in group.inner]
    return [sorted(level, key=lambda group: group.begin) for level in chosen if level]


def _lists(
    pages: list[np.ndarray], kv_lens: np.ndarray, qo_lens: np.ndarray, page_size: int, chosen: list[list[_Group]]
) -> LevelLists:
    """Write the chosen levels, and the requests' own below them, as offsets and page tables."""
    first_row = np.concatenate([[0], np.cumsum(qo_lens)])
    used = np.zeros(len(pages), np.int64)  # pages of each request that stand in the levels above
    lists = LevelLists([], [], [], [])

    def append(first: list[int], parts: list[np.ndarray], keys: np.ndarray) -> None:
        lists.qo_indptr_arr.append(first_row[[*first, len(pages)]].astype(np.int32))
        lists.paged_kv_indptr_arr.append(np.cumsum([0, *map(len, parts)]).astype(np.int32))
        lists.paged_kv_indices_arr.append(np.concatenate([np.zeros(0, np.int32), *parts]))
        lists.paged_kv_last_page_len.append(((keys - 1) % page_size + 1).astype(np.int32))

    for groups in chosen:
        entry: dict[int, np.ndarray] = {}
        alone = np.ones(len(pages), bool)
        for group in groups:
            entry[group.begin] = pages[group.begin][used[group.begin] : group.depth]
            alone[group.begin : group.end] = False
            used[group.begin : group.end] = group.depth
        entry.update((int(request), pages[request][:0]) for request in np.flatnonzero(alone))
        first = sorted(entry)
        append(first, [entry[request] for request in first], np.zeros(len(first), np.int64))
    parts = [ids[n:] for ids, n in zip(pages, used, strict=True)]
    append(list(range(len(pages))), parts, kv_lens - used * page_size)
    return lists

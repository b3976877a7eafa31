"""Every way in which this library can compute one small problem: what a fault must hide in to get past the tests.

A problem is written by hand, each path in `PATHS` computes the same function in its own way: in one piece, cut into
splits or levels, in another layout, with other tasks of the kernels, row by row, from a plan, by merging, by gathering.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from nbattn.testing.exact import scatter

Pair = tuple[np.ndarray, np.ndarray]  # of a request: k [L, kv_heads, dim], v; of a result: out, lse
HEADS_APART = 20  # copies of each query head that make the rows of a KV head too many for one task
NEVER_READ = 2**30


@dataclass(frozen=True)
class Handmade:
    """A problem written by hand.

    Parameters
    ----------
    requests : list of (k [L, num_kv_heads, head_dim], v)
    q : array [total_q, num_qo_heads, head_dim], zeros by default (one head for each KV head)
    qo_lens : rows of each request, one each by default
    options : keyword arguments of `nbattn.paged_attention`
    """

    requests: list[Pair]
    q: Any = None
    qo_lens: Any = None
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def lens(self) -> np.ndarray:
        """Rows of each request."""
        return np.array([1] * len(self.requests) if self.qo_lens is None else self.qo_lens, np.int64)

    @property
    def qo_indptr(self) -> np.ndarray:
        """Row offsets [B + 1]."""
        return np.concatenate([[0], np.cumsum(self.lens)]).astype(np.int32)

    @property
    def kv_lens(self) -> np.ndarray:
        """Keys of each request."""
        return np.array([len(k) for k, _ in self.requests], np.int32)

    @property
    def query(self) -> np.ndarray:
        """The query rows."""
        if self.q is not None:
            return self.q
        return np.zeros((int(self.qo_indptr[-1]), *self.requests[0][0].shape[1:]), np.float32)

    @property
    def request_of_row(self) -> np.ndarray:
        """The request of each row."""
        return np.repeat(np.arange(len(self.requests)), self.lens)

    @property
    def row_index(self) -> np.ndarray:
        """The index of each row among its request's."""
        return np.arange(len(self.request_of_row)) - np.repeat(self.qo_indptr[:-1], self.lens)

    @property
    def kv_start(self) -> np.ndarray:
        """The position of each request's key 0."""
        given = self.options.get("kv_start")
        return np.zeros(len(self.requests), np.int32) if given is None else given

    @property
    def row_position(self) -> np.ndarray:
        """The position of each row."""
        given = self.options.get("q_positions")
        b = self.request_of_row
        newest = (self.kv_start + self.kv_lens)[b]
        return (newest - self.lens[b] + self.row_index if given is None else given).astype(np.int32)

    @property
    def mask(self) -> np.ndarray | None:
        """The mask as [B, num_qo_heads, most rows, most keys]."""
        mask = self.options.get("attn_mask")
        shape = (len(self.requests), self.query.shape[1], int(self.lens.max()), int(self.kv_lens.max()))
        return None if mask is None else np.broadcast_to(mask, shape)


def paged_kv(requests: list[Pair], page_size: int, kv_layout: str = "NHD") -> Any:
    """Return the requests on shuffled pages as a `nbattn.PagedKV`; everything else in it is NaN."""
    from nbattn import PagedKV

    cache = scatter(*requests, page_size=page_size)
    pages = [x if kv_layout == "NHD" else np.ascontiguousarray(x.swapaxes(1, 2)) for x in (cache.k, cache.v)]
    last = (cache.kv_lens - 1) % page_size + 1
    return PagedKV.from_page_table(tuple(pages), cache.kv_indptr, cache.kv_indices, last, kv_layout)


def flat(problem: Handmade, page_size: int = 4, kv_layout: str = "NHD", **more: Any) -> Pair:
    """Compute the problem as one level."""
    import nbattn

    kv = paged_kv(problem.requests, page_size, kv_layout)
    return nbattn.paged_attention(problem.query, kv, problem.qo_indptr, return_lse=True, **{**problem.options, **more})


def slots(problem: Handmade) -> Pair:
    """Compute the problem over a fixed cache, one row of slots for each request."""
    import nbattn

    rows = np.random.default_rng(3).permutation(len(problem.requests) + 2)[: len(problem.requests)]
    caches = []
    for part in (0, 1):
        shape, number = problem.requests[0][part].shape[1:], problem.requests[0][part].dtype
        cache = np.full((len(rows) + 2, int(problem.kv_lens.max()) + 2, *shape), np.nan, number)
        for row, request in zip(rows, problem.requests, strict=True):
            cache[row, : len(request[part])] = request[part]
        caches.append(cache)
    kv = nbattn.PagedKV.from_slots(caches[0], caches[1], problem.kv_lens, rows)
    return nbattn.paged_attention(problem.query, kv, problem.qo_indptr, return_lse=True, **problem.options)


def all_rules(problem: Handmade) -> Pair:
    """Compute the problem by the kernel that knows every rule, under a mask that keeps all keys."""
    mask: dict[str, Any] = {} if "attn_mask" in problem.options else {"attn_mask": np.ones(1, bool)}
    return flat(problem, page_size=1, **mask)


def levels(problem: Handmade, count: int, **more: Any) -> Pair:
    """Compute the problem as a cascade: the keys of each request cut into levels of different page sizes."""
    import nbattn

    options = {**problem.options, **more}
    causal = options.pop("causal", True)
    cut = []
    for level in range(count):
        parts = []
        for k, v in problem.requests:
            begin, end = len(k) * level // count, len(k) * (level + 1) // count
            parts.append((k[begin:end], v[begin:end]))
        cut.append(nbattn.Level(paged_kv(parts, 1 + level * 3), problem.qo_indptr, causal))
    return nbattn.cascade_attention(problem.query, cut, return_lse=True, **options)


def rows_apart(problem: Handmade) -> Pair:
    """Compute the problem as a decode step: each row is a request of its own, and rows share pages."""
    import nbattn

    b = problem.request_of_row
    kv = paged_kv(problem.requests, 4)
    table = np.full((len(b), max(1, int(np.diff(kv.kv_indptr).max()))), NEVER_READ, np.int32)
    for row, request in enumerate(b):
        ids = kv.kv_indices[kv.kv_indptr[request] : kv.kv_indptr[request + 1]]
        table[row, : len(ids)] = ids
    shared = nbattn.PagedKV.from_block_table(kv.k, kv.v, table, problem.kv_lens[b])
    mask = None if problem.mask is None else problem.mask[b, :, problem.row_index][:, :, None]
    placed = {"attn_mask": mask, "kv_start": problem.kv_start[b], "q_positions": problem.row_position}
    return nbattn.paged_attention(problem.query, shared, return_lse=True, **{**problem.options, **placed})


def heads_apart(problem: Handmade, **more: Any) -> Pair:
    """Compute the problem with copies of every query head, so that a task takes one KV head; all must agree."""
    options = dict(problem.options)
    for name, x in (("sinks", options.get("sinks")), ("alibi_slopes", options.get("alibi_slopes"))):
        options[name] = None if x is None else np.repeat(x, HEADS_APART)
    options["attn_mask"] = None if problem.mask is None else np.repeat(problem.mask, HEADS_APART, 1)
    out, lse = flat(replace(problem, q=np.repeat(problem.query, HEADS_APART, 1), options=options), **more)
    for x in (out, lse):
        np.testing.assert_array_equal(x, np.repeat(x[:, ::HEADS_APART], HEADS_APART, 1))
    return out[:, ::HEADS_APART], lse[:, ::HEADS_APART]


def planned(problem: Handmade) -> Pair:
    """Compute the problem twice with a plan that was made for other lengths and updated."""
    import nbattn

    kv = paged_kv(problem.requests, 2)
    shape = {name: problem.options[name] for name in ("causal", "window_left", "chunk_size") if name in problem.options}
    start, positions = problem.kv_start, problem.options.get("q_positions")
    empty = paged_kv([(k[:0], v[:0]) for k, v in problem.requests], 2)
    longest, pages = int(problem.kv_lens.max()) + 3, int(kv.kv_indptr[-1]) + 5
    plan = nbattn.plan(
        empty, problem.qo_indptr, num_qo_heads=problem.query.shape[1], split_size=2, max_kv_len=longest,
        max_num_pages=pages, kv_start=start, q_positions=positions, **shape,
    )  # fmt: skip
    plan.update(kv, problem.qo_indptr, kv_start=start, q_positions=positions)
    first = nbattn.paged_attention(problem.query, kv, problem.qo_indptr, plan=plan, return_lse=True, **problem.options)
    again = nbattn.paged_attention(problem.query, kv, problem.qo_indptr, plan=plan, return_lse=True, **problem.options)
    for x, y in zip(first, again, strict=True):
        np.testing.assert_array_equal(x, y)
    return again


def merged(problem: Handmade) -> Pair:
    """Compute the halves of each request's keys by themselves and merge the states; the sinks go with the first."""
    import nbattn

    cuts = problem.kv_lens // 2
    options = {**problem.options, "q_positions": problem.row_position}
    sinks = options.pop("sinks", None)
    states: list[np.ndarray] = []
    for half in (0, 1):
        parts = [(k[c:], v[c:]) if half else (k[:c], v[:c]) for (k, v), c in zip(problem.requests, cuts, strict=True)]
        options["kv_start"] = problem.kv_start + (cuts if half else 0)
        if problem.mask is not None:
            options["attn_mask"] = mask = problem.mask.copy()
            for row, c in zip(mask, cuts if half else (), strict=False):
                row[..., : row.shape[-1] - c] = row[..., c:].copy()
        part = replace(problem, requests=parts, options={**options, "sinks": None if half else sinks})
        states += flat(part)
    return nbattn.merge_state(*states, lse_base=options.get("lse_base", "2"))


def gathered(problem: Handmade, **more: Any) -> Pair:
    """Compute the problem from the lists of the keys that each row keeps, in an order of its own."""
    import nbattn

    options = {**problem.options, **more}
    causal, window = options.pop("causal", True), options.pop("window_left", -1)
    chunk = options.pop("chunk_size", None)
    for name in ("kv_start", "q_positions", "attn_mask"):
        options.pop(name, None)
    b, p, mask = problem.request_of_row, problem.row_position, problem.mask
    width = int(problem.kv_lens.max()) + 2
    indices = np.full((len(b), width), NEVER_READ, np.int32)
    counts = np.zeros(len(b), np.int32)
    for row, request in enumerate(b):
        j = problem.kv_start[request] + np.arange(problem.kv_lens[request])
        keep = np.ones(len(j), bool)
        if causal:
            keep &= j <= p[row]
        if window >= 0:
            keep &= j >= p[row] - window
        if chunk:
            keep &= j // chunk == p[row] // chunk
        if mask is not None:  # the same for every head here
            keep &= mask[request, 0, problem.row_index[row], : len(j)]
        kept = np.flatnonzero(keep)
        indices[row, : len(kept)] = kept[::-1]
        counts[row] = len(kept)
    kv = paged_kv(problem.requests, 4)
    return nbattn.gather_attention(problem.query, kv, indices, counts, problem.qo_indptr, return_lse=True, **options)


RANGE_PATHS: dict[str, Callable[[Handmade], Pair]] = {
    "one_split": flat,
    "split_1": lambda p: flat(p, split_size=1),
    "split_2": lambda p: flat(p, split_size=2),
    "split_3": lambda p: flat(p, split_size=3),
    "HND": lambda p: flat(p, page_size=3, kv_layout="HND"),
    "slots": slots,
    "all_rules": all_rules,
    "two_levels": lambda p: levels(p, 2),
    "three_levels": lambda p: levels(p, 3, split_size=2),
    "decode_rows": rows_apart,
    "many_rows": heads_apart,
    "many_rows_split": lambda p: heads_apart(p, split_size=3),
    "planned": planned,
    "merged": merged,
}
GATHER_PATHS: dict[str, Callable[[Handmade], Pair]] = {
    "gathered": gathered,
    "gathered_split": lambda p: gathered(p, split_size=2),
}
PATHS = {**RANGE_PATHS, **GATHER_PATHS}  # gathering knows no soft cap, bias, rotation or mask of one head

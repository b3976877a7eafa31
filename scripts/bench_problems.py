"""A shape made real: our calls on shuffled caches, and the check that comes before any timing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from bench_data import Data, copies, host_cache, page_addresses, pair, random_pages
from bench_shapes import Cascade, Gather, Merge, Paged, Shape

import nbattn
from nbattn import oracle, testing

SOFT_CAP = 30.0
SHARE_KEPT = 0.8  # by a mask
LONG = 8192  # keys beyond which one row of one request and KV head is enough for the oracle

Call = Callable[[], Any]


def checked_heads(shape: Shape, keys: int) -> tuple[slice, slice]:
    """Return which KV heads and which query heads are compared with the oracle: the last one's where keys are many."""
    num_qo_heads, num_kv_heads = shape.heads
    first = 0 if keys <= LONG else num_kv_heads - 1
    return slice(first, None), slice(first * (num_qo_heads // num_kv_heads), None)


class Problem:
    """What every problem offers.

    Attributes
    ----------
    shape : Shape
    xp : module
    sets : int
        Caches that calls go through in turn.
    """

    shape: Any
    xp: Any
    sets: int

    def ours(self) -> list[Call]:
        """Return our call on each cache, for the current thread count; each returns its result."""
        raise NotImplementedError

    def check(self) -> list[testing.Comparison]:
        """Run our first call and compare a few of its rows with the oracle."""
        raise NotImplementedError

    def blocks(self, index: int) -> tuple[np.ndarray, int]:
        """Return (addresses in the order of use, bytes of each) of the bytes of a call on cache `index` (CPU)."""
        raise NotImplementedError


class PagedProblem(Problem):
    """Rows over shuffled pages.

    Attributes
    ----------
    table : int32 array, shape [batch, pages]
        On the host.
    caches : list of Data, shape [pages, 2, ...]
        K and V of every page side by side.
    q : Data, shape [batch * rows, num_qo_heads, head_dim]
    out : Data
    """

    def __init__(self, shape: Paged, xp: Any):
        self.shape, self.xp = shape, xp
        rng = np.random.default_rng(1)
        pages = -(-shape.keys // shape.page_size)
        self.table = rng.permutation(shape.batch * pages).reshape(shape.batch, pages).astype(np.int32)
        first = random_pages(xp, shape, self.table.size, rng)
        self.sets = copies(xp, first.bits.nbytes, shape.hot)
        self.caches = [first, *(first.copy() for _ in range(self.sets - 1))]
        rows = shape.batch * shape.rows
        self.q = Data.random(xp, (rows, shape.heads[0], shape.head_dim), shape.q_dtype, rng)
        self.out = Data(xp, xp.zeros_like(self.q.bits), shape.q_dtype)
        lens = np.full(shape.batch, shape.keys, np.int32)
        k, v = pair(first)
        kv = nbattn.PagedKV.from_block_table(k, v, self.table, lens, kv_layout=shape.layout)
        self.kvs = [kv, *(kv.with_pages(*pair(cache)) for cache in self.caches[1:])]
        self.qo_indptr = np.arange(shape.batch + 1, dtype=np.int32) * shape.rows
        self.options: dict[str, Any] = {"causal": shape.causal}
        if shape.ruled:
            self.options.update(window_left=shape.window_left, logits_soft_cap=SOFT_CAP)
            self.sinks = Data.random(xp, shape.heads[:1], "float32", rng)
        if shape.mask:
            kept = rng.random((1, 1, shape.rows, shape.keys), np.float32) < SHARE_KEPT
            self.mask = kept if shape.mask == "bool" else np.where(kept, 0, -np.inf).astype(shape.mask)

    def ours(self) -> list[Call]:
        """Return our call on each cache."""
        shape, options = self.shape, dict(self.options)
        plan = nbattn.plan(
            self.kvs[0], self.qo_indptr, num_qo_heads=shape.heads[0], causal=shape.causal, window_left=shape.window_left
        )
        if shape.ruled:
            options["sinks"] = self.sinks.array
        if shape.mask:
            options["attn_mask"] = self.xp.asarray(self.mask)
        q, out, rows = self.q.array, self.out.array, self.qo_indptr
        return [lambda kv=kv: nbattn.paged_attention(q, kv, rows, plan=plan, out=out, **options) for kv in self.kvs]

    def check(self) -> list[testing.Comparison]:
        """Compare a few rows with the oracle."""
        self.ours()[0]()
        shape = self.shape
        index = np.unique([0, shape.rows // 2, shape.rows - 1] if shape.keys <= LONG else [shape.rows // 2])
        kv_heads, heads = checked_heads(shape, shape.keys)
        options = dict(self.options, sinks=self.sinks.host()[heads]) if shape.ruled else dict(self.options)
        if shape.mask:
            options["attn_mask"] = self.mask[:, :, index]
        found = []
        requests = {shape.batch - 1} | ({0} if shape.keys <= LONG else set())
        for request in sorted(requests):
            rows = request * shape.rows + index
            cache = host_cache(self.caches[0], shape, self.table[request], heads=kv_heads)
            expected = testing.expect(
                oracle.paged_attention, self.q.host(rows)[:, heads], cache, np.array([0, len(rows)]),
                q_positions=shape.keys - shape.rows + index, **options,
            )  # fmt: skip
            actual = self.out.host(rows)[:, heads]
            found.append(testing.compare(actual, expected.out, expected.out_budget, f"request {request}"))
        return found

    def blocks(self, index: int) -> tuple[np.ndarray, int]:
        """Return what a call reads."""
        used = self.table[:, self.shape.first_key // self.shape.page_size :]
        return page_addresses(self.caches[index], used.ravel())


class CascadeProblem(Problem):
    """Decode rows over a shared prefix and suffixes of their own in one pool; `flat` is the same without levels."""

    def __init__(self, shape: Cascade, xp: Any):
        self.shape, self.xp = shape, xp
        rng = np.random.default_rng(2)
        size = shape.page_size
        if shape.prefix % size:
            raise ValueError(f"prefix: must be a multiple of {size} (page_size), got {shape.prefix}.")
        shared, own = shape.prefix // size, -(-shape.suffix // size)
        ids = rng.permutation(shared + shape.batch * own).astype(np.int32)
        self.prefix_table, self.suffix_table = ids[:shared], ids[shared:].reshape(shape.batch, own)
        first = random_pages(xp, shape, len(ids), rng)
        self.sets = copies(xp, first.bits.nbytes, shape.hot)
        self.caches = [first, *(first.copy() for _ in range(self.sets - 1))]
        self.q = Data.random(xp, (shape.batch, shape.heads[0], shape.head_dim), shape.q_dtype, rng)
        self.out = Data(xp, xp.zeros_like(self.q.bits), shape.q_dtype)

    def tables(self) -> dict[str, list[np.ndarray]]:
        """Return FlashInfer's four lists of each level, int32 on the host."""
        shape, size, batch = self.shape, self.shape.page_size, self.shape.batch
        each = np.arange(batch + 1, dtype=np.int32)
        return {
            "qo_indptr_arr": [np.array([0, batch], np.int32), each],
            "paged_kv_indptr_arr": [np.array([0, len(self.prefix_table)], np.int32), each * self.suffix_table.shape[1]],
            "paged_kv_indices_arr": [self.prefix_table, self.suffix_table.ravel()],
            "paged_kv_last_page_len": [
                np.array([(shape.prefix - 1) % size + 1], np.int32),
                np.full(batch, (shape.suffix - 1) % size + 1, np.int32),
            ],
        }

    def ours(self) -> list[Call]:
        """Return our call on each cache."""
        shape = self.shape
        wrapper = nbattn.MultiLevelCascadeAttentionWrapper(2, kv_layout=shape.layout)
        wrapper.plan(*self.tables().values(), *shape.heads, shape.head_dim, shape.page_size)
        q, out = self.q.array, self.out.array
        return [lambda cache=cache: wrapper.run(q, cache.array, out=out) for cache in self.caches]

    def flat_table(self) -> np.ndarray:
        """Return the page ids of every request with the prefix in front, int32 [batch, pages]."""
        prefix = np.broadcast_to(self.prefix_table, (self.shape.batch, len(self.prefix_table)))
        return np.ascontiguousarray(np.concatenate([prefix, self.suffix_table], axis=1))

    def flat(self) -> list[Call]:
        """Return our flat decode of the same."""
        shape = self.shape
        lens = np.full(shape.batch, shape.prefix + shape.suffix, np.int32)
        kv = nbattn.PagedKV.from_block_table(*pair(self.caches[0]), self.flat_table(), lens, kv_layout=shape.layout)
        plan = nbattn.plan(kv, num_qo_heads=shape.heads[0])
        q, out = self.q.array, self.xp.empty_like(self.out.bits).view(self.out.array.dtype)
        kvs = [kv.with_pages(*pair(cache)) for cache in self.caches]
        return [lambda kv=kv: nbattn.paged_attention(q, kv, plan=plan, out=out) for kv in kvs]

    def check(self) -> list[testing.Comparison]:
        """Compare a few rows with the oracle."""
        self.ours()[0]()
        shape = self.shape
        found = []
        kv_heads, heads = checked_heads(shape, shape.prefix)
        for row in sorted({shape.batch - 1} | ({0} if shape.prefix <= LONG else set())):
            levels = [
                oracle.Level(host_cache(self.caches[0], shape, ids, keys, kv_heads), np.array([0, 1]))
                for ids, keys in ((self.prefix_table, shape.prefix), (self.suffix_table[row], shape.suffix))
            ]
            expected = testing.expect(oracle.cascade_attention, self.q.host([row])[:, heads], levels)
            actual = self.out.host([row])[:, heads]
            found.append(testing.compare(actual, expected.out, expected.out_budget, f"row {row}"))
        return found

    def blocks(self, index: int) -> tuple[np.ndarray, int]:
        """Return what a call reads."""
        return page_addresses(self.caches[index], np.concatenate([self.prefix_table, self.suffix_table.ravel()]))


class GatherProblem(Problem):
    """Rows over index lists into one request's shuffled pages."""

    def __init__(self, shape: Gather, xp: Any):
        self.shape, self.xp = shape, xp
        rng = np.random.default_rng(3)
        pages = -(-shape.keys // shape.page_size)
        self.table = rng.permutation(pages).astype(np.int32)
        first = random_pages(xp, shape, pages, rng)
        self.sets = copies(xp, first.bits.nbytes, shape.hot)
        self.caches = [first, *(first.copy() for _ in range(self.sets - 1))]
        self.lists = np.stack([rng.permutation(shape.keys)[: shape.width] for _ in range(shape.rows)]).astype(np.int32)
        self.q = Data.random(xp, (shape.rows, shape.heads[0], shape.head_dim), shape.q_dtype, rng)
        self.out = Data(xp, xp.zeros_like(self.q.bits), shape.q_dtype)

    @property
    def tokens(self) -> np.ndarray:
        """Listed tokens as places in the pool, page * page_size + slot: int64 [rows, width]."""
        page, slot = np.divmod(self.lists.astype(np.int64), self.shape.page_size)
        return self.table[page] * self.shape.page_size + slot

    def ours(self) -> list[Call]:
        """Return our call on each cache."""
        shape, xp = self.shape, self.xp
        lens = np.array([shape.keys], np.int32)
        kv = nbattn.PagedKV.from_block_table(*pair(self.caches[0]), xp.asarray(self.table[None]), lens,
                                             kv_layout=shape.layout)  # fmt: skip
        kvs = [kv.with_pages(*pair(cache)) for cache in self.caches]
        lists, counts = xp.asarray(self.lists), xp.full(shape.rows, shape.width, np.int32)
        rows = np.array([0, shape.rows], np.int32)
        q, out = self.q.array, self.out.array
        return [lambda kv=kv: nbattn.gather_attention(q, kv, lists, counts, rows, out=out) for kv in kvs]

    def check(self) -> list[testing.Comparison]:
        """Compare a few rows with the oracle."""
        self.ours()[0]()
        rows = np.unique([0, self.shape.rows - 1])
        kv_heads, heads = checked_heads(self.shape, self.shape.keys)
        expected = testing.expect(
            oracle.gather_attention, self.q.host(rows)[:, heads],
            host_cache(self.caches[0], self.shape, self.table, heads=kv_heads), self.lists[rows],
            np.full(len(rows), self.shape.width), np.array([0, len(rows)]),
        )  # fmt: skip
        return [testing.compare(self.out.host(rows)[:, heads], expected.out, expected.out_budget, "rows")]

    def blocks(self, index: int) -> tuple[np.ndarray, int]:
        """Return what a call reads."""
        if self.shape.layout != "NHD":
            raise ValueError("layout: gathers are timed in NHD.")
        cache, token_bytes = self.caches[index], self.shape.token_bytes // 2
        page, slot = np.divmod(self.tokens.ravel(), self.shape.page_size)
        begin = page * cache.bits.strides[0] + slot * token_bytes
        both = np.stack([begin, begin + cache.bits.strides[1]], axis=1)
        return cache.bits.ctypes.data + both.ravel(), token_bytes


class MergeProblem(Problem):
    """States of every row, merged."""

    def __init__(self, shape: Merge, xp: Any):
        self.shape, self.xp = shape, xp
        rng = np.random.default_rng(4)
        size = (shape.rows, shape.heads[0])
        sizes = [size] * 2 if shape.pair else [(shape.rows, shape.states, shape.heads[0])]
        self.sums = [Data.random(xp, s, "float32", rng) for s in sizes]
        first = [Data.random(xp, (*s, shape.head_dim), shape.dtype, rng) for s in sizes]
        self.sets = copies(xp, sum(x.bits.nbytes for x in first), shape.hot)
        self.values = [first, *([x.copy() for x in first] for _ in range(self.sets - 1))]

    def ours(self) -> list[Call]:
        """Return our call on each cache."""
        sums = [s.array for s in self.sums]
        if self.shape.in_place:
            return [lambda pair=pair: self._in_place(*pair) for pair in self.values]
        if self.shape.pair:
            (s_a, s_b) = sums
            return [lambda a=a, b=b: nbattn.merge_state(a.array, s_a, b.array, s_b) for a, b in self.values]
        return [lambda v=v: nbattn.merge_states(v.array, sums[0]) for (v,) in self.values]

    def check(self) -> list[testing.Comparison]:
        """Compare a few rows with the oracle."""
        rows = np.unique([0, self.shape.rows - 1])
        values, sums = ([x.host(rows) for x in xs] for xs in (self.values[0], self.sums))
        if self.shape.pair:
            values, sums = ([np.stack(xs, axis=1)] for xs in (values, sums))
        v, s = self.ours()[0]()  # may write over what has been copied
        expected = testing.expect(oracle.merge_states, values[0], sums[0])
        bits = Data(self.xp, v.view(f"uint{8 * v.dtype.itemsize}"), self.shape.dtype)
        return [
            testing.compare(bits.host(rows), expected.out, expected.out_budget, "v"),
            testing.compare(s[self.xp.asarray(rows)], expected.lse, expected.lse_budget, "s"),
        ]

    def blocks(self, index: int) -> tuple[np.ndarray, int]:
        """Return what a call reads, and once more as many bytes of it as the call writes."""
        size = 4096
        parts = [x.bits.ctypes.data + np.arange(0, x.bits.nbytes - size + 1, size)
                 for x in (*self.values[index], *self.sums)]  # fmt: skip
        read = np.concatenate(parts)
        return np.concatenate([read, read[: len(read) // self.shape.states]]), size

    def _in_place(self, own: Data, other: Data) -> tuple[Any, Any]:
        v, (s, s_other) = own.array, (x.array for x in self.sums)
        nbattn.merge_state_in_place(v, s, other.array, s_other)
        return v, s


def problem_of(shape: Shape, xp: Any) -> Problem:
    """Build a shape's problem in NumPy or CuPy."""
    kinds = {Paged: PagedProblem, Cascade: CascadeProblem, Gather: GatherProblem, Merge: MergeProblem}
    return kinds[type(shape)](shape, xp)

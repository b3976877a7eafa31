"""Random paged caches in every layout, with poison in each slot, page and table entry that must not be read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from nbattn.arrays import dtype_from_name
from nbattn.oracle import Cache
from nbattn.testing.memory import Rng, poison, spread

LAYOUTS = ("tuple", "list", "combined", "block_table", "slots", "blocks")  # the first five are NHD or HND
NEVER_READ_ID = 2**30  # a page id that no cache has


@dataclass(frozen=True)
class Pool:
    """Dense values [pages, page_size, heads, dim] and who owns which page; `tables` holds page ids per request."""

    k: np.ndarray
    v: np.ndarray
    tables: list[np.ndarray]
    kv_lens: np.ndarray

    def cache(self) -> Cache:
        """Return what the oracle reads."""
        kv_indptr = np.concatenate([[0], np.cumsum([len(t) for t in self.tables])])
        return Cache(self.k, self.v, kv_indptr, np.concatenate([*self.tables, [NEVER_READ_ID]]), self.kv_lens)

    def paged_kv(self, layout: str, kv_layout: str, rng: Rng, array: Callable[[np.ndarray], Any]) -> Any:
        """Return the same cache as a `nbattn.PagedKV` made by the constructor that `layout` names."""
        from nbattn import PagedKV

        lens = self.kv_lens.astype(np.int32)
        k, v = self.k, self.v
        if layout == "blocks":
            pool = np.empty((len(k), 2, 3, *k.shape[1:]), k.dtype)
            layer = int(rng.integers(0, 3))
            poison(pool, rng)[:, 0, layer], pool[:, 1, layer] = k, v
            table = self.block_table(np.uint32 if all((t >= 0).all() for t in self.tables) else np.int32)
            return PagedKV.from_blocks(array(spread(pool, rng)), table, lens, layer)
        if kv_layout == "HND":
            k, v = k.swapaxes(1, 2), v.swapaxes(1, 2)
        caches: Any = array(spread(np.stack([k, v], axis=1), rng)) if layout == "combined" else None
        if caches is None:
            k, v = array(spread(k, rng)), array(spread(v, rng))
            caches = [k, v] if layout == "list" else (k, v)
        if layout == "slots":
            slot_ids = np.array([t[0] for t in self.tables], np.int32)
            return PagedKV.from_slots(k, v, lens, slot_ids, kv_layout=kv_layout)
        if layout == "block_table":
            return PagedKV.from_block_table(k, v, self.block_table(np.int32), lens, kv_layout=kv_layout)
        cache = self.cache()
        last = np.where(lens > 0, (lens - 1) % self.k.shape[1] + 1, 3).astype(np.int32)  # ignored without pages
        indptr, ids = cache.kv_indptr.astype(np.int32), cache.kv_indices.astype(np.int32)
        return PagedKV.from_page_table(caches, indptr, ids, last, kv_layout)

    def block_table(self, dtype: Any) -> np.ndarray:
        """Return the tables as one rectangle [B, max_blocks] with ids past the end that no cache has."""
        width = max((len(t) for t in self.tables), default=0) + 1
        table = np.full((len(self.tables), width), NEVER_READ_ID, dtype)
        for row, ids in zip(table, self.tables, strict=True):
            row[: len(ids)] = ids
        return table


def random_values(shape: tuple[int, ...], dtype: str, rng: Rng) -> np.ndarray:
    """Return normal values in `dtype`; int8 holds them 40-fold."""
    x = rng.normal(size=shape)
    return np.clip(np.rint(40 * x), -127, 127).astype(np.int8) if dtype == "int8" else x.astype(dtype_from_name(dtype))


def random_pool(
    rng: Rng,
    kv_lens: tuple[int, ...],
    *,
    page_size: int,
    heads: int,
    dims: tuple[int, int],
    dtype: str,
    shared: bool = False,
    unmapped: bool = False,
) -> Pool:
    """Return a pool of shuffled pages; `shared` lets requests meet on pages, `unmapped` takes some of theirs away."""
    counts = [-(-n // page_size) for n in kv_lens]
    num_pages = sum(counts) + 3
    order = rng.integers(0, num_pages, sum(counts)) if shared else rng.permutation(num_pages)
    cuts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    tables = [order[a:b].astype(np.int64) for a, b in pairwise(cuts)]
    if unmapped:
        tables = [np.where(rng.random(len(t)) < 0.3, -1 - rng.integers(0, 5, len(t)), t) for t in tables]
    live = np.zeros((num_pages, page_size), bool)
    for table, kv_len in zip(tables, kv_lens, strict=True):
        token = np.arange(kv_len)
        page = table[token // page_size]
        live[page[page >= 0], (token % page_size)[page >= 0]] = True
    k, v = (
        poison(random_values((num_pages, page_size, heads, dim), dtype, rng), rng, ~live[..., None, None])
        for dim in dims
    )
    return Pool(k, v, tables, np.array(kv_lens, np.int64))


def random_slots(
    rng: Rng, kv_lens: tuple[int, ...], *, heads: int, dims: tuple[int, int], dtype: str, **_: Any
) -> Pool:
    """Return a pool of one page per request, on shuffled rows of a fixed cache with slots to spare."""
    slots = max(kv_lens, default=0) + int(rng.integers(1, 4))
    order = rng.permutation(len(kv_lens) + 2)[: len(kv_lens)]
    live = np.zeros((len(kv_lens) + 2, slots), bool)
    for row, kv_len in zip(order, kv_lens, strict=True):
        live[row, :kv_len] = True
    k, v = (poison(random_values((*live.shape, heads, dim), dtype, rng), rng, ~live[..., None, None]) for dim in dims)
    return Pool(k, v, [order[[b]] for b in range(len(kv_lens))], np.array(kv_lens, np.int64))

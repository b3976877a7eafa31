"""Small paged problems with poison wherever nothing may be read."""

from __future__ import annotations

import numpy as np

import nbattn
from nbattn.arrays import dtype_from_name


def numbers(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """Return normal numbers of a dtype; int8 ones span its range."""
    x = rng.standard_normal(shape)
    return (np.clip(x * 40, -127, 127) if dtype == "int8" else x).astype(dtype_from_name(dtype))


def poisoned_cache(
    rng: np.random.Generator, kv_lens: list[int], *, page_size: int = 3, heads: int = 2,
    dims: tuple[int, int] = (64, 64), dtype: str = "bfloat16", unmapped: bool = False, hnd: bool = False,
) -> nbattn.PagedKV:  # fmt: skip
    """Return a cache of shuffled pages, NaN (or 127) in every slot that belongs to no key, and in the tail of rows."""
    pages_of = [-(-n // page_size) for n in kv_lens]
    used = sum(pages_of)
    order = rng.permutation(used + 3)[:used].astype(np.int32)
    indptr = np.concatenate([[0], np.cumsum(pages_of)]).astype(np.int32)
    live = np.zeros((used + 3, page_size), bool)
    for b, length in enumerate(kv_lens):
        for j in range(length):
            live[order[indptr[b] + j // page_size], j % page_size] = True
    pools = []
    for dim in dims:
        wide = numbers(rng, (used + 3, page_size, heads, dim + 16), dtype)
        wide[~live] = 127 if dtype == "int8" else np.nan
        wide[..., dim:] = 127 if dtype == "int8" else np.nan
        pool = np.ascontiguousarray(wide.transpose(0, 2, 1, 3)) if hnd else wide
        pools.append(pool[..., :dim])
    last = np.array([n - (p - 1) * page_size if p else 0 for n, p in zip(kv_lens, pages_of, strict=True)], np.int32)
    table = order.copy()
    if unmapped and used:
        table[used // 2] = -1
    return nbattn.PagedKV.from_page_table(tuple(pools), indptr, table, last, kv_layout="HND" if hnd else "NHD")

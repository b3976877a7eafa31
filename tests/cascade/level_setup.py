"""Levels over one pool of shuffled pages, and the wrappers planned for them."""

from dataclasses import dataclass

import ml_dtypes
import numpy as np

import nbattn
from nbattn.testing import poison

Multi = nbattn.MultiLevelCascadeAttentionWrapper


Decode = nbattn.BatchDecodeWithSharedPrefixPagedKVCacheWrapper


Prefill = nbattn.BatchPrefillWithSharedPrefixPagedKVCacheWrapper


@dataclass(frozen=True)
class Setup:
    """Levels of (qo_indptr, kv_lens) over one pool of shuffled pages; every slot that nobody owns is poison."""

    levels: tuple
    num_kv_heads: int = 2
    group_size: int = 3
    head_dim: int = 16
    page_size: int = 4
    dtype: str = "float32"
    seed: int = 0

    def build(self):
        rng = np.random.default_rng(self.seed)
        dtype = np.dtype(getattr(ml_dtypes, self.dtype, self.dtype))
        pages = [[-(-n // self.page_size) for n in lens] for _, lens in self.levels]
        order = rng.permutation(sum(map(sum, pages)) + 3).astype(np.int32)
        shape = (len(order), 2, self.page_size, self.num_kv_heads, self.head_dim)
        cache = rng.normal(size=shape).astype(dtype)
        live = np.zeros((len(order), self.page_size), bool)
        lists, at = ([], [], [], []), 0
        for (offsets, lens), counts in zip(self.levels, pages, strict=True):
            indptr = np.cumsum([0, *counts]).astype(np.int32)
            ids = order[at : at + indptr[-1]]
            at += indptr[-1]
            for begin, n in zip(indptr, lens, strict=False):
                token = np.arange(n)
                live[ids[begin + token // self.page_size], token % self.page_size] = True
            junk = np.array([2**31 - 1, -7], np.int32)  # past the table, never read
            lists[0].append(np.array(offsets, np.int32))
            lists[1].append(indptr)
            lists[2].append(np.concatenate([ids, junk]))
            lists[3].append(np.array([(n - 1) % self.page_size + 1 if n else 99 for n in lens], np.int32))
        poison(cache, rng, ~live[:, None, :, None, None])
        rows = max(offsets[-1] for offsets, _ in self.levels)
        q = rng.normal(size=(rows, self.num_kv_heads * self.group_size, self.head_dim)).astype(dtype)
        return q, cache, lists

    @property
    def sizes(self):
        return self.num_kv_heads * self.group_size, self.num_kv_heads, self.head_dim, self.page_size

    def flat(self, cache, lists):
        """Return a PagedKV of each last-level request's keys over all levels, one after another."""
        requests = []
        for begin in lists[0][-1][:-1]:
            ids = []
            for offsets, indptr, indices, last in zip(*lists, strict=True):
                b = np.searchsorted(offsets, begin, side="right") - 1
                own = indices[indptr[b] : indptr[b + 1]]
                tokens = cache[own].swapaxes(1, 2).reshape(-1, 2, *cache.shape[3:])  # [tokens, 2, heads, dim]
                ids.append(tokens[: len(tokens) - self.page_size + last[b]] if len(own) else tokens)
            requests.append(np.concatenate(ids))
        slots = np.full((len(requests), max(map(len, requests)) + 1, *requests[0].shape[1:]), np.nan, cache.dtype)
        for row, tokens in zip(slots, requests, strict=True):
            row[: len(tokens)] = tokens
        lens = np.array([len(x) for x in requests], np.int32)
        return nbattn.PagedKV.from_slots(slots[:, :, 0], slots[:, :, 1], lens)


ONE = ((((0, 2, 3, 7), (9, 1, 4)),), "one")


TWO = ((((0, 7), (13,)), ((0, 2, 3, 7), (9, 1, 4))), "two")


THREE = ((((0, 7), (13,)), ((0, 3, 7), (8, 17)), ((0, 2, 3, 7), (9, 1, 4))), "three")


FOUR = (
    (((0, 7), (70,)), ((0, 3, 7), (4, 0)), ((0, 3, 5, 7), (3, 5, 0)), ((0, 1, 2, 3, 5, 7), (3, 1, 2, 2, 9))),
    "four",
)


def run_options(setup, kind):
    rng = np.random.default_rng(5)
    heads, kv_heads, dim, _ = setup.sizes
    if kind == "plain":
        return {}
    return {
        "sinks": np.where(np.arange(heads) % 2, -np.inf, rng.normal(size=heads)).astype(np.float32),
        "k_scale": rng.uniform(0.5, 1.5, (kv_heads, 1)).astype(np.float32),
        "v_scale": rng.uniform(0.5, 1.5, (kv_heads, dim)).astype(np.float32),
        "lse_base": "e",
    }


def planned(setup, lists, options=None, **kwargs):
    wrapper = Multi(len(setup.levels), **kwargs)
    wrapper.plan(*lists, *setup.sizes, **(options or {}))
    return wrapper

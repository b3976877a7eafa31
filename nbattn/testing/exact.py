"""Inputs whose right answers are small fractions: zero keys (equal weights) on shuffled pages."""

from __future__ import annotations

from typing import Any

import numpy as np

from nbattn.oracle import Cache


def zero_logit_tokens(num_tokens: int, v: Any = None, num_kv_heads: int = 1, head_dim: int = 64) -> Any:
    """Return k [num_tokens, heads, head_dim] of zeros and v, the identity or one number per token (head_dim_vo 1).

    With the identity the output is the row of softmax weights itself.
    """
    k = np.zeros((num_tokens, num_kv_heads, head_dim), np.float32)
    values = np.eye(num_tokens) if v is None else np.broadcast_to(v, num_tokens)[:, None]
    return k, np.repeat(values[:, None].astype(np.float32), num_kv_heads, axis=1)


def scatter(*requests: tuple[np.ndarray, np.ndarray], page_size: int = 4, seed: int = 7) -> Cache:
    """Return a Cache that holds requests (k [L, heads, dim], v) on shuffled pages; everything else in it is NaN.

    Examples
    --------
    >>> from nbattn import oracle
    >>> cache = scatter(zero_logit_tokens(3))
    >>> oracle.paged_attention(np.zeros((1, 1, 64)), cache).round(3)
    array([[[0.333, 0.333, 0.333]]])
    """
    counts = [-(-len(k) // page_size) for k, _ in requests]
    order = np.random.default_rng(seed).permutation(sum(counts) + 3).astype(np.int32)
    k_pool, v_pool = (
        np.full((len(order), page_size, *x.shape[1:]), np.nan, np.float64 if x.dtype.kind in "biu" else x.dtype)
        for x in requests[0]
    )
    kv_indptr = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    for (k, v), first in zip(requests, kv_indptr[:-1], strict=True):
        page, slot = order[first + np.arange(len(k)) // page_size], np.arange(len(k)) % page_size
        k_pool[page, slot], v_pool[page, slot] = k, v
    return Cache(k_pool, v_pool, kv_indptr, order, np.array([len(k) for k, _ in requests], np.int32))

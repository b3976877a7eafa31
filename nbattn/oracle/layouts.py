"""The cache layouts of the five documents, read as raw arrays into the one form that `levels.tokens` knows."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np


class Cache(NamedTuple):
    """What the oracle reads of a `nbattn.PagedKV`, which has the same attributes."""

    k: np.ndarray  # [num_pages, page_size, num_kv_heads, head_dim_qk]
    v: np.ndarray  # [num_pages, page_size, num_kv_heads, head_dim_vo]
    kv_indptr: np.ndarray  # [B + 1], the first entry of each request in kv_indices
    kv_indices: np.ndarray  # page ids
    kv_lens: np.ndarray  # [B]


def page_views(paged_kv_cache: Any, kv_layout: str) -> tuple[np.ndarray, np.ndarray]:
    """Return k and v as [pages, page_size, heads, dim] views of a 5-D cache or of a pair, NHD or HND."""
    combined = isinstance(paged_kv_cache, np.ndarray)
    k, v = (paged_kv_cache[:, 0], paged_kv_cache[:, 1]) if combined else paged_kv_cache
    return (k, v) if kv_layout == "NHD" else (k.swapaxes(1, 2), v.swapaxes(1, 2))


def csr_cache(
    paged_kv_cache: Any, kv_indptr: np.ndarray, kv_indices: np.ndarray, kv_last_page_len: np.ndarray, kv_layout: str
) -> Cache:
    """Read FlashInfer's page table: ``L = (pages - 1) * page_size + last_page_len``, and 0 without a page."""
    k, v = page_views(paged_kv_cache, kv_layout)
    pages = np.diff(np.asarray(kv_indptr).astype(np.int64))
    kv_lens = np.where(pages > 0, (pages - 1) * k.shape[1] + np.asarray(kv_last_page_len).astype(np.int64), 0)
    return Cache(k, v, kv_indptr, kv_indices, kv_lens)


def table_cache(k: np.ndarray, v: np.ndarray, table: np.ndarray, kv_lens: Any) -> Cache:
    """Read a block table [B, max_blocks] over k and v [pages, page_size, heads, dim]."""
    batch_size, max_blocks = table.shape
    return Cache(k, v, np.arange(batch_size + 1) * max_blocks, table.reshape(-1), np.asarray(kv_lens).astype(np.int64))


def slot_cache(k: np.ndarray, v: np.ndarray, kv_lens: Any, slot_ids: Any = None) -> Cache:
    """Read fixed slots [rows, slots, heads, dim]: one page a request; a length past the slots is cut to them."""
    kv_lens = np.clip(np.asarray(kv_lens).astype(np.int64), 0, k.shape[1])
    rows = np.arange(len(kv_lens)) if slot_ids is None else np.asarray(slot_ids)
    return Cache(k, v, np.arange(len(kv_lens) + 1), rows, kv_lens)


def layer_cache(kv_blocks: np.ndarray, table: np.ndarray, kv_lens: Any, layer_idx: int, page_stride: Any = -1) -> Cache:
    """Read one layer of MAX's pool [pages, 2, layers, page_size, heads, dim]; `page_stride` counts elements."""
    stride = -1 if page_stride is None else int(np.asarray(page_stride).reshape(()))
    if stride >= 0:
        strides = (stride * kv_blocks.itemsize, *kv_blocks.strides[1:])
        kv_blocks = np.lib.stride_tricks.as_strided(kv_blocks, strides=strides)
    return table_cache(kv_blocks[:, 0, layer_idx], kv_blocks[:, 1, layer_idx], table, kv_lens)

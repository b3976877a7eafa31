"""Merging attention states and writing to a paged cache, defined in float64 and one token at a time."""

from __future__ import annotations

from typing import Any

import numpy as np

from nbattn.oracle.layouts import page_views
from nbattn.oracle.score_pipeline import Extremes, LseBase, Rounding, rounded


def merge_states(
    v: np.ndarray,
    s: np.ndarray,
    *,
    lse_base: LseBase = "2",
    target: str | None = None,
    rounding: Rounding | None = None,
    extremes: Extremes | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Define `nbattn.merge_states`: v [n, states, heads, dim], s [n, states, heads] -> v [n, heads, dim], s [n, heads].

    A side whose `s` is -inf contributes nothing, whatever its `v`; NaN or +inf in `s` makes the row NaN.
    """
    v, s = np.asarray(v).astype(np.float64), np.asarray(s).astype(np.float64)
    exp, log = (np.exp2, np.log2) if lse_base == "2" else (np.exp, np.log)
    present = s != -np.inf
    with np.errstate(all="ignore"):
        m = s.max(axis=1, initial=-np.inf)  # [n, heads]
        m = np.where(m == -np.inf, 0.0, m)
        weight = exp(s - m[:, None])  # inf - inf = NaN, as it should
        d = weight.sum(axis=1)
        total = np.where(present[..., None], weight[..., None] * v, 0.0).sum(axis=1)
        merged = total / np.where(d == 0.0, 1.0, d)[..., None]
        lse = log(d) + m
    if extremes is not None:
        extremes.see(s, v[present])
    return rounded(merged, rounding.out if rounding else None), lse


def merge_state(
    v_a: np.ndarray, s_a: np.ndarray, v_b: np.ndarray, s_b: np.ndarray, **options: Any
) -> tuple[np.ndarray, np.ndarray]:
    """Define `nbattn.merge_state`: two states v [n, heads, dim], s [n, heads] -> one."""
    v = np.stack([np.asarray(x).astype(np.float64) for x in (v_a, v_b)], axis=1)
    s = np.stack([np.asarray(x).astype(np.float64) for x in (s_a, s_b)], axis=1)
    return merge_states(v, s, **options)


def merge_state_in_place(
    v: np.ndarray, s: np.ndarray, v_other: np.ndarray, s_other: np.ndarray, mask: Any = None, **options: Any
) -> None:
    """Define `nbattn.merge_state_in_place`: write the merge into `v` and `s` where `mask` [n] is not zero."""
    rows = np.ones(len(v), bool) if mask is None else np.asarray(mask) != 0
    merged_v, merged_s = merge_state(v, s, v_other, s_other, **options)
    v[rows] = merged_v[rows].astype(v.dtype)
    s[rows] = merged_s[rows].astype(s.dtype)


def append_paged_kv_cache(
    append_key: np.ndarray,
    append_value: np.ndarray,
    batch_indices: np.ndarray,
    positions: np.ndarray,
    paged_kv_cache: Any,
    kv_indices: np.ndarray,
    kv_indptr: np.ndarray,
    kv_last_page_len: np.ndarray,
    kv_layout: str = "NHD",
    **ignored: Any,
) -> None:
    """Define `nbattn.append_paged_kv_cache`: write token `t` to its request's page and slot; the caches change.

    A token of no request, at no position of its request's pages or on an unmapped page is dropped.
    """
    k, v = page_views(paged_kv_cache, kv_layout)  # [pages, page_size, num_kv_heads, dim]
    page_size = k.shape[1]
    for t, (request, position) in enumerate(zip(batch_indices.tolist(), positions.tolist(), strict=True)):
        if not 0 <= request < len(kv_indptr) - 1 or position < 0:
            continue
        entry = int(kv_indptr[request]) + position // page_size
        if entry >= min(int(kv_indptr[request + 1]), len(kv_indices)) or not 0 <= int(kv_indices[entry]) < len(k):
            continue
        k[int(kv_indices[entry]), position % page_size] = append_key[t]
        v[int(kv_indices[entry]), position % page_size] = append_value[t]

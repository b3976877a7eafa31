"""The five operators under their own names and conventions, each written down as rows over keys."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from nbattn.oracle.layouts import csr_cache, layer_cache, slot_cache, table_cache
from nbattn.oracle.levels import Level, Result, cascade_attention, gather_attention, paged_attention
from nbattn.oracle.score_pipeline import alibi_slopes, rotate


class Rope(NamedTuple):
    """What the oracle reads of a `nbattn.Rope`, which has the same attributes."""

    theta: float = 1e4
    scale: float = 1.0


def number(x: Any, default: float) -> float:
    """Return a number or a one-element array as a float; None gives the default."""
    return default if x is None else float(np.asarray(x).reshape(()))


def gqa_decode(
    query: np.ndarray,
    key_cache: np.ndarray,
    value_cache: np.ndarray,
    lengths: np.ndarray,
    *,
    sm_scale: float | None = None,
    **tail: Any,
) -> Result:
    """Define `nbattn.gqa_decode`: one row per request over its first ``lengths[b]`` slots."""
    return paged_attention(query, slot_cache(key_cache, value_cache, lengths), sm_scale=sm_scale, **tail)


def attention_over_cache(
    q: np.ndarray,
    cache_key: np.ndarray,
    cache_value: np.ndarray,
    kvcache_start: np.ndarray,
    cu_seqlens_q: np.ndarray,
    cu_seqlens_k: np.ndarray,
    max_seqlen_q: Any = None,
    max_seqlen_k: Any = None,
    rope_cos: Any = None,
    rope_sin: Any = None,
    position_ids: Any = None,
    attn_mask: Any = None,
    is_causal: bool | None = None,
    q_scale: Any = None,
    softcap: float | None = None,
    sliding_window: int | None = None,
    smooth_softmax: bool | None = None,
    rotary_mode: str | None = None,
    num_heads: int | None = None,
    kv_num_heads: int | None = None,
    k_scale: Any = None,
    v_scale: Any = None,
    head_sink: Any = None,
    q_norm_gain: Any = None,
    k_norm_gain: Any = None,
    qk_norm_eps: float | None = None,
    slot_ids: Any = None,
    **tail: Any,
) -> Result:
    """Define `nbattn.attention_over_cache`: norm, then rotary on q alone, then causal attention over a cache."""
    cu_q = np.asarray(cu_seqlens_q).astype(np.int64)
    lens = np.asarray(cu_seqlens_k).astype(np.int64)
    lens = lens if lens.size == cu_q.size - 1 else np.diff(lens)  # [B], or cumulative [B + 1]
    k, v = cache_key.swapaxes(1, 2), cache_value.swapaxes(1, 2)  # head-major -> [rows, tokens, heads, dim]
    heads = q.shape[1] if q.ndim == 3 else int(num_heads or 0)
    x = q.reshape(q.shape[0], heads, q.shape[-1] // (1 if q.ndim == 3 else heads)).astype(np.float64)
    with np.errstate(all="ignore"):  # rows of no request may hold anything
        if q_norm_gain is not None:
            mean_square = np.mean(x**2, axis=-1, keepdims=True)
            x = x / np.sqrt(mean_square + float(qk_norm_eps or 0.0)) * np.asarray(q_norm_gain).astype(np.float64)
        if rope_cos is not None:
            ids = (
                bottom_right(cu_q, lens, len(x)) if position_ids is None else np.asarray(position_ids).astype(np.int64)
            )
            x = rotate(x, plane_rows(rope_cos, ids), plane_rows(rope_sin, ids), rotary_mode or "half")
    sinks = np.zeros(heads) if smooth_softmax and head_sink is None else head_sink
    cache = table_cache(k, v, kvcache_start, lens) if kvcache_start.ndim == 2 else slot_cache(k, v, lens, slot_ids)
    if tail.get("out") is not None:
        tail["out"] = tail["out"].reshape(len(x), heads, v.shape[3])
    result = paged_attention(
        x, cache, cu_q, causal=is_causal is None or bool(is_causal), attn_mask=attn_mask, sinks=sinks,
        sm_scale=number(q_scale, 1.0 / np.sqrt(x.shape[2])), logits_soft_cap=softcap,
        window_left=-1 if sliding_window is None or sliding_window < 0 else sliding_window - 1,
        k_scale=face_scale(k_scale, k), v_scale=face_scale(v_scale, v), **tail,
    )  # fmt: skip
    if q.ndim == 3:
        return result
    fold = (len(x), heads * v.shape[3])
    return (result[0].reshape(fold), result[1]) if isinstance(result, tuple) else result.reshape(fold)


def bottom_right(qo_indptr: np.ndarray, kv_lens: np.ndarray, num_rows: int) -> np.ndarray:
    """Return ``L - n + i`` [num_rows]; -1 for rows of no request."""
    position = np.full(num_rows, -1)
    for first, end, kv_len in zip(qo_indptr[:-1], qo_indptr[1:], kv_lens, strict=True):
        position[first:end] = np.arange(kv_len - (end - first), kv_len)
    return position


def plane_rows(plane: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Return the rows of a rotary plane in float64; NaN outside the table (a negative row keeps no key anyway)."""
    inside = (positions >= 0) & (positions < len(plane))
    rows = np.asarray(plane)[np.where(inside, positions, 0)].astype(np.float64)
    return np.where(inside[:, None], rows, np.nan)


def face_scale(scale: Any, cache: np.ndarray) -> Any:
    """Return a scale that broadcasts to [heads, 1, dim] as [heads, dim]; None stays."""
    _, _, heads, dim = cache.shape
    return None if scale is None else np.broadcast_to(np.asarray(scale), (heads, 1, dim))[:, 0]


_MASKS = {  # mask_str -> (causal, window, chunk)
    "null": (False, False, False),
    "causal": (True, False, False),
    "sliding_window_causal": (True, True, False),
    "sliding_window_noncausal": (False, True, False),
    "chunked": (False, False, True),
    "chunked_causal": (True, False, True),
}


def generic_cross_attention_kv_cache(
    q: np.ndarray,
    q_input_row_offsets: np.ndarray,
    q_max_seq_len: Any,
    kv_input_row_offsets: np.ndarray,
    kv_collection: Any,
    layer_idx: int,
    scale: float,
    output: Any = None,
    sink_weights: Any = None,
    *,
    mask_str: str = "null",
    local_window_size: int = -1,
    output_dtype: Any = None,
    q_start: str = "cache_length",
    **tail: Any,
) -> Result:
    """Define `nbattn.generic_cross_attention_kv_cache`; masks compare rows ``cache_lengths[b] + i`` with keys."""
    offsets = np.asarray(q_input_row_offsets).astype(np.int64)
    context = np.asarray(kv_collection.cache_lengths).astype(np.int64)
    kv_lens = np.diff(np.asarray(kv_input_row_offsets).astype(np.int64)) + context
    pool, table = kv_collection.kv_blocks, kv_collection.kv_lookup_table
    cache = layer_cache(pool, table, kv_lens, layer_idx, kv_collection.page_stride)
    rows = np.arange(len(q))
    if q_start == "cache_length":
        for request, first in enumerate(offsets[:-1]):
            rows[first : offsets[request + 1]] += context[request] - first
    causal, window, chunk = _MASKS[mask_str]
    tail["out"] = output if tail.get("out") is None else tail["out"]
    return paged_attention(
        q, cache, offsets, causal=causal, sm_scale=number(scale, 1.0), sinks=sink_weights,
        window_left=local_window_size - 1 if window else -1, chunk_size=local_window_size if chunk else None,
        q_positions=rows if q_start == "cache_length" else None, **tail,
    )  # fmt: skip


def qsa_sparse_attention(
    q: np.ndarray,
    input_row_offsets: np.ndarray,
    kv_blocks: np.ndarray,
    page_stride: Any,
    cache_lengths: np.ndarray,
    kv_lookup_table: np.ndarray,
    max_prompt_length: Any,
    max_cache_length: Any,
    layer_idx: int,
    token_indices: np.ndarray,
    counts: np.ndarray,
    scale: float,
    output: Any = None,
    *,
    group: int | None = None,
    warps: int | None = None,
    unroll: int | None = None,
    out_dtype: Any = None,
    k_scale: Any = None,
    v_scale: Any = None,
    output_gate: Any = None,
    **tail: Any,
) -> Result:
    """Define `nbattn.qsa_sparse_attention`: a gather over ``cache_lengths[b] + n`` keys, without a causal test."""
    kv_lens = np.diff(np.asarray(input_row_offsets).astype(np.int64)) + np.asarray(cache_lengths).astype(np.int64)
    cache = layer_cache(kv_blocks, kv_lookup_table, kv_lens, layer_idx, page_stride)
    tail["out"] = output if tail.get("out") is None else tail["out"]
    return gather_attention(
        q, cache, token_indices, counts, input_row_offsets, sm_scale=number(scale, 1.0), output_gate=output_gate,
        k_scale=k_scale, v_scale=v_scale, **tail,
    )  # fmt: skip


def multi_level_cascade(
    q: np.ndarray,
    paged_kv_cache: Any,
    qo_indptr_arr: list[np.ndarray],
    paged_kv_indptr_arr: list[np.ndarray],
    paged_kv_indices_arr: list[np.ndarray],
    paged_kv_last_page_len: list[np.ndarray],
    num_qo_heads: int | None = None,
    num_kv_heads: int | None = None,
    head_dim: int | None = None,
    page_size: int | None = None,
    causal: bool = False,
    pos_encoding_mode: str = "NONE",
    use_fp16_qk_reduction: bool = False,
    *,
    kv_layout: str = "NHD",
    rope_scale: float | None = None,
    rope_theta: float | None = None,
    q_data_type: Any = None,
    kv_data_type: Any = None,
    **options: Any,
) -> Result:
    """Define `MultiLevelCascadeAttentionWrapper`: what `run` and `plan` take; only the last level is causal."""
    tables = zip(paged_kv_indptr_arr, paged_kv_indices_arr, paged_kv_last_page_len, strict=True)
    caches = [csr_cache(paged_kv_cache, *table, kv_layout) for table in tables]
    last = len(caches) - 1
    levels = [Level(c, qo_indptr_arr[i], causal and i == last) for i, c in enumerate(caches)]
    rope = Rope(number(rope_theta, 1e4), number(rope_scale, 1.0)) if pos_encoding_mode == "ROPE_LLAMA" else None
    slopes = alibi_slopes(q.shape[1]) if pos_encoding_mode == "ALIBI" else None
    return cascade_attention(q, levels, rope=rope, alibi_slopes=slopes, **options)


def shared_prefix(
    q: np.ndarray,
    k_shared: np.ndarray,
    v_shared: np.ndarray,
    unique_kv_cache: Any,
    paged_kv_indptr: np.ndarray,
    paged_kv_indices: np.ndarray,
    paged_kv_last_page_len: np.ndarray,
    qo_indptr: Any = None,
    *,
    kv_layout: str = "NHD",
    causal: bool = False,
    sm_scale: float | None = None,
    **tail: Any,
) -> Result:
    """Define both SharedPrefix wrappers: a dense prefix under all rows, then paged suffixes (decode: one row each)."""
    k, v = (x if kv_layout == "NHD" else x.swapaxes(0, 1) for x in (k_shared, v_shared))  # [prefix, heads, dim]
    unique = csr_cache(unique_kv_cache, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, kv_layout)
    qo_indptr = np.arange(len(unique.kv_lens) + 1) if qo_indptr is None else np.asarray(qo_indptr)
    prefix = Level(slot_cache(k[None], v[None], [len(k)]), np.array([0, qo_indptr[-1]]))
    return cascade_attention(q, [prefix, Level(unique, qo_indptr, causal)], sm_scale=sm_scale, **tail)

"""The engine functions: rows and keys are found here, straight from the raw arrays, and handed to `attend`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from scipy.special import expit

from nbattn.oracle.score_pipeline import Pipeline, attend, rounded

Result = np.ndarray | tuple[np.ndarray, np.ndarray]


class Level(NamedTuple):
    """What the oracle reads of a `nbattn.Level`, which has the same attributes."""

    kv: Any
    qo_indptr: np.ndarray | None = None  # [B + 1], None = one row per request
    causal: bool = False


def tokens(kv: Any, request: int, index: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return k [L, heads, dim], v and mapped [L] of the request's tokens `index`; an unmapped token holds zeros."""
    index = np.asarray(index, np.int64)
    page_size = kv.k.shape[1]
    kv_indptr, kv_indices = np.asarray(kv.kv_indptr, np.int64), np.asarray(kv.kv_indices).astype(np.int64)
    in_range = (index >= 0) & (index < int(kv.kv_lens[request]))
    entry = kv_indptr[request] + np.where(in_range, index, 0) // max(page_size, 1)
    in_range &= entry < min(kv_indptr[request + 1], kv_indices.size)
    page = np.full(index.size, -1)
    page[in_range] = kv_indices[entry[in_range]]
    mapped = (page >= 0) & (page < kv.k.shape[0])
    k = np.zeros((index.size, *kv.k.shape[2:]))
    v = np.zeros((index.size, *kv.v.shape[2:]))
    k[mapped] = kv.k[page[mapped], index[mapped] % page_size].astype(np.float64)
    v[mapped] = kv.v[page[mapped], index[mapped] % page_size].astype(np.float64)
    return k, v, mapped


def row_offsets(level: Any) -> np.ndarray:
    """Return the level's qo_indptr [B + 1]; None stands for one row per request."""
    if level.qo_indptr is None:
        return np.arange(len(level.kv.kv_lens) + 1)
    return np.asarray(level.qo_indptr).astype(np.int64)


def request_of(qo_indptr: np.ndarray, row: int) -> int | None:
    """Return the request that holds the row, or None outside [qo_indptr[0], qo_indptr[-1])."""
    if not qo_indptr[0] <= row < qo_indptr[-1]:
        return None
    return int(np.searchsorted(qo_indptr, row, side="right")) - 1


def segments(offsets: Sequence[np.ndarray], num_rows: int) -> Iterator[tuple[int, int, list[int | None]]]:
    """Yield (first row, end row, request in each level) for runs of rows that share their request in every level."""
    cuts = np.unique(np.clip(np.concatenate(offsets), 0, num_rows))
    for first, end in zip(cuts[:-1].tolist(), cuts[1:].tolist(), strict=True):
        requests = [request_of(o, first) for o in offsets]
        if any(r is not None for r in requests):
            yield first, end, requests


def mask_block(attn_mask: Any, request: int, rows: np.ndarray, num_keys: int) -> tuple[Any, Any]:
    """Return (keep, bias), each broadcasting to [n, num_qo_heads, L], of a mask [B or 1, H or 1, max n, max L]."""
    if attn_mask is None:
        return True, 0.0
    mask = np.asarray(attn_mask)
    mask = mask.reshape((1,) * (4 - mask.ndim) + mask.shape)
    block = mask[request if mask.shape[0] > 1 else 0]
    block = block[:, rows] if block.shape[1] > 1 else block
    block = block[:, :, :num_keys] if block.shape[2] > 1 else block
    block = block.swapaxes(0, 1)
    if block.dtype == bool:
        return block, 0.0
    block = block.astype(np.float64)
    return block > -np.inf, np.where(block > -np.inf, block, 0.0)


def blank(q: np.ndarray, kv: Any, out: Any, lse: Any) -> tuple[np.ndarray, np.ndarray]:
    """Return float64 (out, lse) as they stand before any row is computed: zeros and -inf, or what was given."""
    shape = (*q.shape[:2], kv.v.shape[3])
    new_out = np.zeros(shape) if out is None else np.asarray(out).astype(np.float64)
    new_lse = np.full(shape[:2], -np.inf) if lse is None else np.asarray(lse).astype(np.float64)
    return new_out, new_lse


def cascade_attention(
    q: np.ndarray,
    levels: Sequence[Any],
    *,
    attn_mask: Any = None,
    kv_start: Any = None,
    q_positions: Any = None,
    plan: Any = None,
    split_size: int | None = None,
    out_dtype: Any = None,
    out: Any = None,
    lse: Any = None,
    return_lse: bool = False,
    target: str | None = None,
    **pipeline: Any,
) -> Result:
    """Define `nbattn.cascade_attention`: flat attention of every row over the concatenated keys of its levels.

    `pipeline` holds the fields of `Pipeline`; `plan`, `split_size`, `out_dtype` and `target` change no value. `out` and
    `lse` are not written: they only say what the rows that no level covers hold. The results are float64.
    """
    options = Pipeline(**pipeline)
    new_out, new_lse = blank(np.asarray(q), levels[0].kv, out, lse)
    offsets = [row_offsets(level) for level in levels]
    for first, end, requests in segments(offsets, len(new_out)):
        parts, causal = [], []
        for level, request in zip(levels, requests, strict=True):
            if request is not None:
                parts.append(tokens(level.kv, request, np.arange(level.kv.kv_lens[request])))
                causal.append(np.full(parts[-1][2].size, bool(level.causal)))
        k, v, mapped = (np.concatenate(x) for x in zip(*parts, strict=True))
        request, num_keys = requests[-1], mapped.size
        index, num_new, start = np.zeros(end - first, np.int64), 1, 0
        if request is not None:  # else the row has no tokens in the last level and counts as a lone newest one
            index = np.arange(first, end) - offsets[-1][request]
            num_new = int(offsets[-1][request + 1] - offsets[-1][request])
            start = 0 if kv_start is None else int(kv_start[request])
        keep, bias = (True, 0.0) if request is None else mask_block(attn_mask, request, index, num_keys)
        new_out[first:end], new_lse[first:end] = attend(
            q[first:end], k, v, options, keep=mapped & keep, bias=bias, causal=np.concatenate(causal),
            row_position=start + num_keys - num_new + index if q_positions is None else q_positions[first:end],
            key_position=start + np.arange(num_keys),
        )  # fmt: skip
    return (new_out, new_lse) if return_lse else new_out


def paged_attention(q: np.ndarray, kv: Any, qo_indptr: Any = None, *, causal: bool = True, **options: Any) -> Result:
    """Define `nbattn.paged_attention`: the cascade of one level. Options as for `cascade_attention`."""
    return cascade_attention(q, [Level(kv, qo_indptr, causal)], **options)


def gather_attention(
    q: np.ndarray,
    kv: Any,
    token_indices: np.ndarray,
    counts: np.ndarray,
    qo_indptr: Any = None,
    *,
    output_gate: Any = None,
    out_dtype: Any = None,
    out: Any = None,
    lse: Any = None,
    return_lse: bool = False,
    target: str | None = None,
    **pipeline: Any,
) -> Result:
    """Define `nbattn.gather_attention`: row `t` reads ``token_indices[t, :counts[t]]``, duplicates as often as listed.

    `output_gate` is [total_q, num_qo_heads] or [total_q, num_qo_heads, head_dim_vo or 1]; the rest is as for
    `cascade_attention`.
    """
    options = Pipeline(**pipeline)
    late = options.rounding.out  # the gate comes before the one rounding of the result
    options = replace(options, rounding=replace(options.rounding, out=None))
    new_out, new_lse = blank(np.asarray(q), kv, out, lse)
    qo_indptr = row_offsets(Level(kv, qo_indptr))
    for row in range(len(new_out)):
        request = request_of(qo_indptr, row)
        if request is None:
            continue
        count = np.clip(int(counts[row]), 0, token_indices.shape[1])
        k, v, mapped = tokens(kv, request, token_indices[row, :count])
        (value,), new_lse[[row]] = attend(q[[row]], k, v, options, keep=mapped)
        if output_gate is not None:
            gate = np.asarray(output_gate[row]).astype(np.float64)
            value = value * expit(gate if gate.ndim == 2 else gate[:, None])
        new_out[row] = rounded(value, late)
    return (new_out, new_lse) if return_lse else new_out

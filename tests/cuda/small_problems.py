"""Small paged problems with poison wherever nothing may be read, run through the CUDA target's own host code."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
from lent_device import LentDevice

import nbattn
from nbattn import oracle, testing
from nbattn.arrays import dtype_from_name
from nbattn.cuda_kernels import calls
from nbattn.cuda_kernels.metadata import PlanMetadata
from nbattn.planning import LevelLengths, build_work, place_rows


def numbers(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """Return normal numbers of a dtype; int8 ones span its range."""
    x = rng.standard_normal(shape)
    return (np.clip(x * 40, -127, 127) if dtype == "int8" else x).astype(dtype_from_name(dtype))


def poisoned_cache(
    rng: np.random.Generator, kv_lens: list[int], *, page_size: int, heads: int, dims: tuple[int, int], dtype: str,
    unmapped: bool = False, hnd: bool = False,
) -> nbattn.PagedKV:  # fmt: skip
    """Return a cache of shuffled pages, NaN (or 127) in every slot that belongs to no key."""
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
        pool = numbers(rng, (used + 3, page_size, heads, dim), dtype)
        pool[~live] = 127 if dtype == "int8" else np.nan
        pools.append(np.ascontiguousarray(pool.transpose(0, 2, 1, 3)) if hnd else pool)
    last = np.array([n - (p - 1) * page_size if p else 0 for n, p in zip(kv_lens, pages_of, strict=True)], np.int32)
    table = order.copy()
    if unmapped and used:
        table[used // 2] = -1
    layout = "HND" if hnd else "NHD"
    return nbattn.PagedKV.from_page_table(tuple(pools), indptr, table, last, kv_layout=layout)


def run_levels(
    q: np.ndarray, levels: list[oracle.Level], *, options: dict[str, Any], split_size: int | None = None,
    tile_tokens: int = 1, out_dtype: Any = None,
) -> tuple[np.ndarray, np.ndarray, LentDevice]:  # fmt: skip
    """Plan and run levels on the emulated device; return out, lse and the device."""
    device = LentDevice()
    lengths = [
        LevelLengths(x.kv.kv_lens, x.kv.kv_indptr[:-1], np.asarray(x.qo_indptr, np.int64), x.causal) for x in levels
    ]
    places = place_rows(lengths, len(q))
    window, chunk = options.get("window_left", -1), options.get("chunk_size", 0)
    work = build_work(
        lengths, places, window_left=window, chunk_size=chunk, split_size=split_size, tile_tokens=tile_tokens, workers=1
    )
    heads, kv = q.shape[1], levels[0].kv
    metadata = PlanMetadata(
        device,
        group_size=heads // kv.num_kv_heads,
        work=work.work,
        row_position=places.row_position,
        row_request=places.row_request,
        row_index=places.row_index,
        merge_rows=work.merge_rows,
        merge_indptr=work.merge_indptr,
        merge_slots=work.merge_slots,
        num_states=work.num_states,
        tables=[x.kv.kv_indices for x in levels],
    )
    out = device.empty((len(q), heads, kv.head_dim_vo), "uint8" if out_dtype is None else out_dtype)
    if out_dtype is None:
        out = np.zeros((len(q), heads, kv.head_dim_vo), q.dtype)
    out[...] = np.nan
    lse = np.full((len(q), heads), np.nan, np.float32)
    settings = calls.AttentionOptions(**{"scale": kv.head_dim_qk**-0.5, **options})
    calls.run_paged(device, metadata, q, [x.kv for x in levels], settings, out, lse)
    return out, lse, device


def check_levels(q: np.ndarray, levels: list[oracle.Level], options: dict[str, Any] | None = None, **how: Any) -> LentDevice:
    """Run levels and hold the result to the error budget of the oracle."""
    options = options or {}
    out, lse, device = run_levels(q, levels, options=options, **how)
    renamed = {"soft_cap": "logits_soft_cap", "scale": "sm_scale", "output_gate": None, "query_dtype": None}
    for_oracle = {renamed.get(k, k): v for k, v in options.items() if renamed.get(k, k) is not None}
    expected = testing.expect(oracle.cascade_attention, q, levels, **for_oracle)
    testing.assert_close((out, lse), expected)
    return device


__all__ = ["check_levels", "ml_dtypes", "numbers", "poisoned_cache", "run_levels"]

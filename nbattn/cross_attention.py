"""`generic_cross_attention_kv_cache`: ragged queries over one layer of a pool of pages, as MAX has it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from nbattn.arrays import Array, common_library
from nbattn.contracts import check_int
from nbattn.errors import ContractError, check_choice
from nbattn.face_rules import (
    argument_names,
    check_cache_lengths,
    check_length_hint,
    check_ragged_query,
    check_row_offsets,
    check_single_number,
    one_output,
    row_positions,
)
from nbattn.kv_cache import PagedKV
from nbattn.paged import paged_attention

Result = Array | tuple[Array, Array]


class _Mask(NamedTuple):
    causal: bool = False
    window: bool = False
    chunk: bool = False


MASKS = {
    "null": _Mask(),
    "causal": _Mask(causal=True),
    "sliding_window_causal": _Mask(causal=True, window=True),
    "sliding_window_noncausal": _Mask(window=True),
    "chunked": _Mask(chunk=True),
    "chunked_causal": _Mask(causal=True, chunk=True),
}
ROW_RULES = ("cache_length", "bottom_right")


@dataclass(frozen=True, eq=False)
class PagedKVCollection:
    """What MAX calls a `kv_collection`: the pages of all layers, and who owns which.

    Parameters
    ----------
    kv_blocks : array, shape [pages, 2, layers, page_size, num_kv_heads, head_dim]
        K and V on axis 1; float16 | bfloat16 | float32 | float64 (CPU only) | float8_e4m3fn | float8_e5m2.
    cache_lengths : int array, shape [requests]
        Tokens of each request that were cached **before** this step.
    kv_lookup_table : int array, shape [requests, max_pages], uint32 or int32
        Page ids of each request; what lies past its last page is never read.
    page_stride : int or one-element int array, optional
        Elements between two pages; -1 or None: the array's own.
    max_prompt_length : int or one-element int array, optional
        Sizing hint: most new keys of a request in this step. Too small is an error.
    max_cache_length : int or one-element int array, optional
        Sizing hint: the longest of `cache_lengths`. Too small is an error.

    Notes
    -----
    Nothing is read before the call that takes it, so lengths and tables may be edited between steps.

    Examples
    --------
    >>> import numpy as np, nbattn
    >>> pool = np.zeros((8, 2, 3, 4, 1, 16), np.float32)  # 8 pages of 4 tokens, 3 layers
    >>> nbattn.PagedKVCollection(pool, np.array([5]), np.array([[6, 1]], np.uint32)).page_stride
    -1
    """

    kv_blocks: Array
    cache_lengths: Array
    kv_lookup_table: Array
    page_stride: Any = -1
    max_prompt_length: Any = None
    max_cache_length: Any = None


def generic_cross_attention_kv_cache(
    q: Array,
    q_input_row_offsets: Array,
    q_max_seq_len: Any,
    kv_input_row_offsets: Array,
    kv_collection: PagedKVCollection,
    layer_idx: int,
    scale: float,
    output: Array | None = None,
    sink_weights: Array | None = None,
    *,
    mask_str: str = "null",
    local_window_size: int = -1,
    output_dtype: Any = None,
    q_start: str = "cache_length",
    out: Array | None = None,
    lse: Array | None = None,
    return_lse: bool = False,
    lse_base: str = "2",
    target: str | None = None,
) -> Result:
    """Attend with a ragged batch of queries over the keys and values of another sequence, cached in pages.

    Request b has ``L = kv_input_row_offsets[b + 1] - kv_input_row_offsets[b] + cache_lengths[b]`` keys; which of them
    its row i keeps is said by `mask_str`, with W for `local_window_size` and r for the row's index:

    ========================== =====================================
    ``null``                   all
    ``causal``                 ``j <= r``
    ``sliding_window_causal``  ``j <= r`` and ``r - j < W``
    ``sliding_window_noncausal`` ``r - j < W``
    ``chunked``                ``j // W == r // W``
    ``chunked_causal``         ``j // W == r // W`` and ``j <= r``
    ========================== =====================================

    Parameters
    ----------
    q : array, shape [rows, num_heads, head_dim], float16 | bfloat16 | float32 | float64 (CPU only)
        Query rows of all requests, one after another.
    q_input_row_offsets : int array, shape [requests + 1]
        Request b owns rows ``q_input_row_offsets[b]`` to ``q_input_row_offsets[b + 1]``. Others are not touched
        in a given `output`; a new one holds 0 there, and lse -inf.
    q_max_seq_len : int or one-element int array, or None
        Sizing hint: rows of the longest request. Changes no value; too small is an error.
    kv_input_row_offsets : int array, shape [requests + 1]
        Ragged offsets of the keys that this step has added to the cache; starts at 0, never decreases.
    kv_collection : PagedKVCollection
        The cache. Its dtype is q's, or float8_e4m3fn or float8_e5m2 beside a 16-bit or float32 q.
    layer_idx : int
        Layer to read.
    scale : float
        Softmax scale, usually ``1 / sqrt(head_dim)``. 0 is honoured.
    output : array, shape [rows, num_heads, head_dim], optional
        Where to write the result; rows of no request stay as they are. `out` is its other name.
    sink_weights : float array, shape [num_heads], optional
        Logit of a virtual key without value per head, natural-log units.
    mask_str : str
        One of the names above.
    local_window_size : int
        W in tokens, positive; not read where the mask has no W.
    output_dtype : dtype, optional
        float16, bfloat16, float32 or q's own (default).
    q_start : {"cache_length", "bottom_right"}
        The index of row i of n: ``cache_lengths[b] + i``, MAX's rule, or ``L - n + i``.
    out : array, optional
        As `output`.
    lse : array, shape [rows, num_heads], float32 (float64 for float64 inputs), optional
        Where to write the log-sum-exps.
    return_lse : bool
        Return ``(out, lse)``.
    lse_base : {"2", "e"}
        Unit of the lse.
    target : {"cpu", "cuda", "gpu"}, optional
        Confirms what the arrays say; never moves anything.

    Returns
    -------
    out : array, shape [rows, num_heads, head_dim]
        0 in rows that keep no key.
    lse : array, shape [rows, num_heads]
        Log-sum-exp of the scores, sinks included; -inf where nothing is kept. Only with `return_lse`.

    Raises
    ------
    ContractError
        If an argument breaks a rule; nothing is written.
    PageTableError
        If a request has more keys than its row of the lookup table has room for, or a page id does not exist.
    TargetError
        If the target cannot run here.

    Notes
    -----
    MAX's `generic_cross_attention_kv_cache`; its `context` and its compile-time parameters are keywords here or fall
    away. The same inputs give the same bits, run after run.

    Examples
    --------
    >>> import numpy as np, nbattn
    >>> pool = np.zeros((2, 2, 1, 4, 1, 2), np.float32)
    >>> pool[1, 1, 0] = np.arange(8).reshape(4, 1, 2)
    >>> image = nbattn.PagedKVCollection(pool, np.array([0]), np.array([[1]], np.uint32))
    >>> args = np.zeros((2, 1, 2), np.float32), np.array([0, 2]), 2, np.array([0, 3]), image, 0, 0.5
    >>> nbattn.generic_cross_attention_kv_cache(*args)[:, 0].tolist()
    [[2.0, 3.0], [2.0, 3.0]]
    >>> nbattn.generic_cross_attention_kv_cache(*args, mask_str="causal")[:, 0].tolist()
    [[0.0, 1.0], [1.0, 2.0]]
    """
    mask = _mask(mask_str, local_window_size)
    check_choice("q_start", q_start, ROW_RULES)
    out, out_name = one_output(output, out)
    kv, offsets, context = _cache(q, q_input_row_offsets, q_max_seq_len, kv_input_row_offsets, kv_collection, layer_idx)
    positions = None
    if q_start == "cache_length" and mask != MASKS["null"]:
        positions = row_positions(context, offsets, len(q))
    with argument_names(
        {"k, v": "kv_blocks"}, qo_indptr="q_input_row_offsets", sinks="sink_weights", num_qo_heads="num_heads",
        out_dtype="output_dtype", out=out_name,
    ):  # fmt: skip
        return paged_attention(
            q, kv, offsets, causal=mask.causal, sm_scale=check_single_number("scale", scale), sinks=sink_weights,
            window_left=local_window_size - 1 if mask.window else -1,
            chunk_size=local_window_size if mask.chunk else None, q_positions=positions, out_dtype=output_dtype,
            out=out, lse=lse, return_lse=return_lse, lse_base=lse_base, target=target,
        )  # fmt: skip


def _mask(mask_str: str, local_window_size: int) -> _Mask:
    mask = MASKS.get(mask_str) if isinstance(mask_str, str) else None
    if mask is None:
        raise ContractError(f"mask_str: must be one of {', '.join(MASKS)}, got {mask_str!r}.")
    if (mask.window or mask.chunk) and check_int("local_window_size", local_window_size) < 1:
        raise ContractError(f"local_window_size: must be positive (tokens) for {mask_str!r}, got {local_window_size}.")
    return mask


def _cache(
    q: Array, q_offsets: Array, q_max_seq_len: Any, kv_offsets: Array, collection: PagedKVCollection, layer_idx: int
) -> tuple[PagedKV, np.ndarray, np.ndarray]:
    """Return the layer as a `PagedKV`, and the offsets of q and the `cache_lengths` on the host."""
    if not isinstance(collection, PagedKVCollection):
        raise ContractError(f"kv_collection: must be a PagedKVCollection, got {type(collection).__name__}.")
    library = common_library(q=q, kv_blocks=collection.kv_blocks)
    rows = check_ragged_query(q)
    context = check_cache_lengths("cache_lengths", collection.cache_lengths, library)
    offsets = check_row_offsets("q_input_row_offsets", q_offsets, context.size, rows, library)
    any_total = np.iinfo(np.int64).max  # the new keys are in the cache already
    new_keys = np.diff(check_row_offsets("kv_input_row_offsets", kv_offsets, context.size, any_total, library))
    check_length_hint("q_max_seq_len", q_max_seq_len, np.diff(offsets), "rows of the longest request")
    check_length_hint("max_prompt_length", collection.max_prompt_length, new_keys, "most new keys of a request")
    check_length_hint("max_cache_length", collection.max_cache_length, context, "longest of cache_lengths")
    if collection.kv_blocks.dtype == np.int8:
        raise ContractError("kv_blocks: must not be int8, whose scales this operator has no argument for. Use PagedKV.")
    with argument_names(kv_lens="(new keys + cache_lengths)"):
        table = collection.kv_lookup_table
        kv = PagedKV.from_blocks(collection.kv_blocks, table, context + new_keys, layer_idx, collection.page_stride)
    return kv, offsets, context

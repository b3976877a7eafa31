"""`qsa_sparse_attention`: grouped-query attention over the token positions that a selection names, as MAX has it."""

from __future__ import annotations

from typing import Any

import numpy as np

from nbattn.arrays import Array, common_library
from nbattn.contracts import check_int
from nbattn.errors import ContractError
from nbattn.face_rules import (
    argument_names,
    check_cache_lengths,
    check_length_hint,
    check_ragged_query,
    check_row_offsets,
    check_single_number,
    one_output,
)
from nbattn.gather import gather_attention
from nbattn.kv_cache import PagedKV

Result = Array | tuple[Array, Array]


def qsa_sparse_attention(
    q: Array,
    input_row_offsets: Array,
    kv_blocks: Array,
    page_stride: Any,
    cache_lengths: Array,
    kv_lookup_table: Array,
    max_prompt_length: Any,
    max_cache_length: Any,
    layer_idx: int,
    token_indices: Array,
    counts: Array,
    scale: float,
    output: Array | None = None,
    *,
    group: int | None = None,
    warps: int | None = None,
    unroll: int | None = None,
    out_dtype: Any = None,
    k_scale: Any = None,
    v_scale: Any = None,
    output_gate: Array | None = None,
    out: Array | None = None,
    lse: Array | None = None,
    return_lse: bool = False,
    lse_base: str = "2",
    target: str | None = None,
) -> Result:
    """Attend with each query row over its own list of token positions, in one layer of a pool of pages.

    Row t of request b is ``softmax(q[t] @ K.T * scale) @ V`` with K and V gathered at
    ``token_indices[t, :min(counts[t], width)]``. An index that is negative, at or past ``cache_lengths[b] + n`` (n new
    rows), past the table or on an unmapped page is skipped; a repeated one counts as often as it is listed. There is no
    causal test: the selection owns causality.

    Parameters
    ----------
    q : array, shape [rows, num_q_heads, head_dim], float16 | bfloat16 | float32 | float64 (CPU only)
        Query rows of all requests, one after another.
    input_row_offsets : int array, shape [requests + 1]
        Request b owns rows ``input_row_offsets[b]`` to ``input_row_offsets[b + 1]``. Others are not touched in a given
        `output`; a new one holds 0 there, and lse -inf.
    kv_blocks : array, shape [pages, 2, layers, page_size, num_kv_heads, head_dim]
        K and V on axis 1, never written. q's dtype, or float8_e4m3fn, float8_e5m2 or int8 (which needs its scales)
        beside a 16-bit or float32 q.
    page_stride : int or one-element int array, or None
        Elements between two pages, at least one packed page; -1 or None: the array's own.
    cache_lengths : int array, shape [requests]
        Tokens cached **before** this step; those of this step's rows follow them.
    kv_lookup_table : int array, shape [requests, max_pages], uint32 or int32
        Page ids; what lies past a request's last page is never read.
    max_prompt_length, max_cache_length : int or one-element int array, or None
        Sizing hints: most rows of a request, longest of `cache_lengths`. Change no value; too small is an error.
    layer_idx : int
        Layer to read.
    token_indices : int array, shape [rows, width]
        Positions inside each row's own sequence, valid entries first.
    counts : int array, shape [rows]
        Valid entries of each row, read as within ``0 .. width``.
    scale : float
        Softmax scale. 0 is honoured.
    output : array, shape [rows, num_q_heads, head_dim], optional
        Where to write the result. `out` is its other name.
    group : int, optional
        Tuning hint: query heads per KV head, which it must equal.
    warps, unroll : int, optional
        Tuning hints, positive; change no value.
    out_dtype : dtype, optional
        float16, bfloat16, float32 or q's own (default).
    k_scale, v_scale : float or float array broadcasting to [num_kv_heads, head_dim], optional
        The cache holds ``k / k_scale`` and ``v / v_scale``.
    output_gate : float array, shape [rows, num_q_heads] or [rows, num_q_heads, head_dim], optional
        The output is multiplied by its sigmoid.
    out : array, optional
        As `output`.
    lse : array, shape [rows, num_q_heads], float32 (float64 for float64 inputs), optional
        Where to write the log-sum-exps.
    return_lse : bool
        Return ``(out, lse)``.
    lse_base : {"2", "e"}
        Unit of the lse.
    target : {"cpu", "cuda", "gpu"}, optional
        Confirms what the arrays say; never moves anything.

    Returns
    -------
    out : array, shape [rows, num_q_heads, head_dim]
        0 in rows whose entries are all skipped.
    lse : array, shape [rows, num_q_heads]
        Log-sum-exp of the scores; -inf where all entries are skipped. Only with `return_lse`.

    Raises
    ------
    ContractError
        If an argument breaks a rule; nothing is written. Values of `token_indices` and `counts` break none.
    PageTableError
        If a request has more keys than its row of the lookup table has room for, or a page id does not exist.
    TargetError
        If the target cannot run here.

    Notes
    -----
    MAX's `QSASparseAttentionRaggedPaged`, whose `output` comes first there. Scales and gate are those of the FlashInfer
    and vLLM versions of this operator. The same inputs give the same bits, run after run.

    Examples
    --------
    >>> import numpy as np, nbattn
    >>> pool = np.zeros((2, 2, 1, 4, 1, 2), np.float32)
    >>> pool[1, 1, 0] = np.arange(8).reshape(4, 1, 2)
    >>> q, rows = np.zeros((1, 1, 2), np.float32), np.array([0, 1])
    >>> cache = pool, -1, np.array([3]), np.array([[1]], np.uint32), None, None, 0
    >>> chosen, counts = np.array([[0, 3, -1, 99]], np.int32), np.array([2], np.int32)
    >>> nbattn.qsa_sparse_attention(q, rows, *cache, chosen, counts, 0.5).tolist()
    [[[3.0, 4.0]]]
    """
    library = common_library(q=q, kv_blocks=kv_blocks)
    out, out_name = one_output(output, out)
    num_rows = check_ragged_query(q)
    context = check_cache_lengths("cache_lengths", cache_lengths, library)
    offsets = check_row_offsets("input_row_offsets", input_row_offsets, context.size, num_rows, library)
    rows = np.diff(offsets)
    check_length_hint("max_prompt_length", max_prompt_length, rows, "rows of the longest request")
    check_length_hint("max_cache_length", max_cache_length, context, "longest of cache_lengths")
    with argument_names(kv_lens="(cache_lengths + rows)"):
        kv = PagedKV.from_blocks(kv_blocks, kv_lookup_table, context + rows, layer_idx, page_stride)
    for name, hint in (("group", group), ("warps", warps), ("unroll", unroll)):
        if hint is not None:
            check_int(name, hint, at_least=1)
    if group is not None and group * kv.num_kv_heads != q.shape[1]:
        raise ContractError(
            f"group: must be num_q_heads / num_kv_heads, {q.shape[1]} / {kv.num_kv_heads}, got {group}."
        )
    with argument_names({"k, v": "kv_blocks"}, qo_indptr="input_row_offsets", num_qo_heads="num_q_heads", out=out_name):
        return gather_attention(
            q, kv, token_indices, counts, offsets, sm_scale=check_single_number("scale", scale), k_scale=k_scale,
            v_scale=v_scale, output_gate=output_gate, out_dtype=out_dtype, out=out, lse=lse, return_lse=return_lse,
            lse_base=lse_base, target=target,
        )  # fmt: skip

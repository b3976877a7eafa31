"""`attention_over_cache`: read-only attention over a cache that another call has filled."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from nbattn import page_tables
from nbattn.arrays import Array, common_library, library_of, require_array
from nbattn.cache_views import page_views
from nbattn.contracts import check_bool, check_int, check_number
from nbattn.errors import ContractError, check_choice
from nbattn.face_rules import (
    argument_names,
    check_float_array,
    check_head_major_scale,
    check_length_hint,
    check_row_offsets,
    check_single_number,
    check_sliding_window,
    row_positions,
)
from nbattn.kv_cache import PagedKV
from nbattn.paged import attend
from nbattn.problem import Level, Preparation

Result = Array | tuple[Array, Array]

ROTARY_MODES = ("half", "interleaved")


def attention_over_cache(
    q: Array,
    cache_key: Array,
    cache_value: Array,
    kvcache_start: Array,
    cu_seqlens_q: Array,
    cu_seqlens_k: Array,
    max_seqlen_q: Any = None,
    max_seqlen_k: Any = None,
    rope_cos: Array | None = None,
    rope_sin: Array | None = None,
    position_ids: Array | None = None,
    attn_mask: Array | None = None,
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
    head_sink: Array | None = None,
    q_norm_gain: Array | None = None,
    k_norm_gain: Array | None = None,
    qk_norm_eps: float | None = None,
    slot_ids: Array | None = None,
    *,
    out: Array | None = None,
    lse: Array | None = None,
    return_lse: bool = False,
    lse_base: str = "2",
    target: str | None = None,
) -> Result:
    """Attend over a KV cache without appending to it.

    Norm, then rotary, on q alone, since the cached keys have had theirs; then for row i of the n rows of request b, at
    position ``p = L - n + i``, ``softmax(softcap(q @ K.T * q_scale) + mask) @ V`` over the keys ``0 .. p`` of L.

    Parameters
    ----------
    q : array, shape [rows, num_heads, head_dim] or folded [rows, num_heads * head_dim]
        float16 | bfloat16 | float32 | float64 (CPU only). Query rows of all requests, one after another.
    cache_key, cache_value : array, shape [max_seqs, kv_num_heads, max_seq, head_dim]
        Continuous cache, or a pool of blocks [blocks, kv_num_heads, block, head_dim]; never written. q's dtype, or
        float8_e4m3fn, float8_e5m2 or int8 (which needs its scales) beside a 16-bit or float32 q. The two head sizes
        may differ.
    kvcache_start : int array, shape [requests] or [requests, max_blocks]
        One dimension: the cache is continuous, the values are not read. Two: it is paged and this is its block table,
        where a negative id drops its keys and ids past the used blocks are never read.
    cu_seqlens_q : int array, shape [requests + 1]
        Request b owns rows ``cu_seqlens_q[b]`` to ``cu_seqlens_q[b + 1]``. Rows past the last are not touched
        in a given `out`; a new one holds 0 there, and lse -inf. With more rows than cached tokens and `is_causal`, the
        first ones see no key.
    cu_seqlens_k : int array, shape [requests] or [requests + 1]
        Cached tokens in all, the rows' own included: per request, or cumulative from 0. The size alone decides.
    max_seqlen_q, max_seqlen_k : int or one-element int array, optional
        Sizing hints that change no value; too small is an error.
    rope_cos, rope_sin : float array, shape [positions, rotary_dim / 2], optional
        Rotate the first `rotary_dim` of q's head size; the rest is copied. Both or neither.
    position_ids : int array, shape [rows], optional
        Rotary position of each row, ``p`` by default; never moves a mask. On a GPU a position outside the planes
        makes its row NaN, on the host it is an error.
    attn_mask : bool or float array, broadcasting to [requests, num_heads, max rows, max keys], optional
        True keeps; floats are added to the capped score and -inf drops. Joins `is_causal` and `sliding_window`.
    is_causal : bool, optional
        Keep keys up to ``p``. True by default.
    q_scale : float or one-element float array, optional
        The softmax scale, ``1 / sqrt(head_dim)`` by default. 0 is honoured.
    softcap : float, optional
        ``softcap * tanh(score / softcap)``. None and 0 are off.
    sliding_window : int, optional
        Keep the last `sliding_window` keys up to ``p``, the row's own included. None and -1 are off.
    smooth_softmax : bool, optional
        Add 1 to every softmax denominator, as a `head_sink` of 0 does; a given `head_sink` wins. False by default.
    rotary_mode : {"half", "interleaved"}, optional
        Pairs ``(d, d + rotary_dim / 2)`` (default) or ``(2 d, 2 d + 1)``.
    num_heads, kv_num_heads : int, optional
        Must agree with the shapes; a folded q needs `num_heads`.
    k_scale, v_scale : float or float array broadcasting to [kv_num_heads, 1, head_dim], optional
        The cache holds ``k / k_scale`` and ``v / v_scale``. Independent of each other; int8 needs both.
    head_sink : float array, shape [num_heads], optional
        Logit of a virtual key without value, natural-log units; neither scaled nor capped.
    q_norm_gain : float array, shape [head_dim], optional
        ``q * rsqrt(mean(q**2) + qk_norm_eps) * q_norm_gain`` per head, before rotary. Needs `qk_norm_eps` and planes.
    k_norm_gain : array, optional
        Accepted and not read: one set of arguments serves the call that appends and this one.
    qk_norm_eps : float, optional
        Comes with a gain only; at least 0.
    slot_ids : int array, shape [requests], optional
        Cache row of each request, in range and pairwise distinct; continuous cache only. Request b reads row b by
        default.
    out : array, as the result, optional
        Where to write it.
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
    out : array, shape [rows, num_heads, value head_dim], folded [rows, num_heads * value head_dim] if q is, q's dtype
        0 in rows that keep no key.
    lse : array, shape [rows, num_heads]
        Log-sum-exp of the scores, sinks included; -inf where nothing is kept. Only with `return_lse`.

    Raises
    ------
    ContractError
        If an argument breaks a rule; nothing is written.
    PageTableError
        If a length, a block id or a slot id does not fit the cache.
    TargetError
        If the target cannot run here.

    Notes
    -----
    ``ClikaRT::ops::attention_over_cache``, with its argument order. The same inputs give the same bits, run after run.

    Examples
    --------
    Two requests with 3 and 1 cached tokens; the first asks with its last two:

    >>> import numpy as np, nbattn
    >>> key = np.zeros((2, 1, 4, 2), np.float32)
    >>> value = np.arange(16, dtype=np.float32).reshape(2, 1, 4, 2)
    >>> rows, cached = np.array([0, 2, 3]), np.array([3, 1])
    >>> q = np.ones((3, 1, 2), np.float32)
    >>> nbattn.attention_over_cache(q, key, value, np.zeros(2, int), rows, cached)[:, 0].tolist()
    [[1.0, 2.0], [2.0, 3.0], [8.0, 9.0]]
    >>> blocks = np.array([[0, -1], [1, -1]])  # the same cache as a pool of blocks of four
    >>> nbattn.attention_over_cache(q, key, value, blocks, rows, cached, sliding_window=1)[:, 0].tolist()
    [[2.0, 3.0], [4.0, 5.0], [8.0, 9.0]]
    """
    library = common_library(q=q, cache_key=cache_key, cache_value=cache_value)
    heads_of_q = _unfolded("q", q, num_heads)
    if out is not None and require_array("out", out).ndim != q.ndim:
        raise ContractError(f"out: must be {'folded as q is' if q.ndim == 2 else 'as q is'}, got shape {out.shape}.")
    kv, offsets = _cache(cache_key, cache_value, kvcache_start, cu_seqlens_q, cu_seqlens_k, slot_ids, len(q))
    if kv_num_heads is not None and check_int("kv_num_heads", kv_num_heads) != kv.num_kv_heads:
        raise ContractError(f"kv_num_heads: must be {kv.num_kv_heads} (heads of cache_key), got {kv_num_heads}.")
    check_length_hint("max_seqlen_q", max_seqlen_q, np.diff(offsets), "rows of the longest request")
    check_length_hint("max_seqlen_k", max_seqlen_k, kv.kv_lens, "keys of the longest request")
    causal = check_bool("is_causal", is_causal, True)
    smooth = check_bool("smooth_softmax", smooth_softmax, False)
    if smooth and head_sink is None:
        head_sink = (np if library == "numpy" else sys.modules["cupy"]).zeros(heads_of_q.shape[1], np.float32)
    prepare = _preparation(
        heads_of_q, kv, offsets, causal, rope_cos, rope_sin, position_ids, rotary_mode,
        q_norm_gain, k_norm_gain, qk_norm_eps,
    )  # fmt: skip
    with argument_names(
        {"k, v": "cache_key, cache_value"}, qo_indptr="cu_seqlens_q", sm_scale="q_scale", logits_soft_cap="softcap",
        sinks="head_sink", num_qo_heads="num_heads", num_kv_heads="kv_num_heads",
    ):  # fmt: skip
        result: Any = attend(
            heads_of_q, [Level(kv, offsets, causal)], prepare=prepare, attn_mask=attn_mask, sinks=head_sink,
            sm_scale=None if q_scale is None else check_single_number("q_scale", q_scale), logits_soft_cap=softcap,
            window_left=check_sliding_window("sliding_window", sliding_window),
            k_scale=check_head_major_scale("k_scale", k_scale, kv.num_kv_heads, kv.head_dim_qk),
            v_scale=check_head_major_scale("v_scale", v_scale, kv.num_kv_heads, kv.head_dim_vo),
            out=out if out is None or q.ndim == 3 else _unfolded("out", out, heads_of_q.shape[1]),
            lse=lse, return_lse=return_lse, lse_base=lse_base, target=target,
        )  # fmt: skip
    if q.ndim == 3:
        return result
    unfolded, *rest = result if return_lse else (result,)
    folded = out if out is not None else unfolded.reshape(len(q), unfolded.shape[1] * unfolded.shape[2])
    return (folded, *rest) if return_lse else folded


def _unfolded(name: str, x: Array, num_heads: int | None) -> Array:
    """Return an array whose heads may be folded into its last axis as a view [rows, num_heads, dim]."""
    require_array(name, x)
    if x.ndim == 3:
        if num_heads is not None and check_int("num_heads", num_heads) != x.shape[1]:
            raise ContractError(f"num_heads: must be {x.shape[1]} (axis 1 of {name}), got {num_heads}.")
        return x
    if x.ndim != 2:
        raise ContractError(f"{name}: must be [rows, num_heads, dim] or folded [rows, num_heads * dim], got {x.shape}.")
    if num_heads is None:
        raise ContractError("num_heads: must be given with a folded q, got None.")
    heads = check_int("num_heads", num_heads, at_least=1)
    if x.shape[1] % heads:
        raise ContractError(f"{name}: must be [rows, {heads} * dim] (num_heads = {heads}), got shape {x.shape}.")
    return x.reshape(x.shape[0], heads, x.shape[1] // heads)


def _cache(
    cache_key: Array, cache_value: Array, kvcache_start: Array, cu_seqlens_q: Array, cu_seqlens_k: Array,
    slot_ids: Array | None, num_rows: int,
) -> tuple[PagedKV, np.ndarray]:  # fmt: skip
    """Return the cache as a `PagedKV`, and `cu_seqlens_q` on the host."""
    k, v = page_views(("cache_key", cache_key), ("cache_value", cache_value), "HND")
    library = str(library_of(k))
    require_array("kvcache_start", kvcache_start)
    if kvcache_start.ndim not in (1, 2):
        raise ContractError(
            "kvcache_start: must be [requests] for a continuous cache or [requests, max_blocks] for a paged one, "
            f"got shape {kvcache_start.shape}."
        )
    page_tables.require_index_array("kvcache_start", kvcache_start, kvcache_start.ndim, library)
    batch = kvcache_start.shape[0]
    offsets = check_row_offsets("cu_seqlens_q", cu_seqlens_q, batch, num_rows, library)
    lens, name = page_tables.host_int64("cu_seqlens_k", cu_seqlens_k, library), "cu_seqlens_k"
    if lens.size == batch + 1:
        any_total = np.iinfo(np.int64).max
        lens = np.diff(check_row_offsets(name, lens, batch, any_total, library))
        name = f"diff({name})"
    elif lens.size != batch:
        raise ContractError(
            f"{name}: must be [{batch}] (each length) or [{batch + 1}] (cumulative), got [{lens.size}]."
        )
    if kvcache_start.ndim == 1:
        form = page_tables.TableForm("slot_ids", name, "slots")
        return PagedKV(k, v, page_tables.slot_table(slot_ids, lens, k, form), "HND"), offsets
    if slot_ids is not None:
        raise ContractError("slot_ids: must be None with a block table (two-dimensional kvcache_start), got an array.")
    form = page_tables.TableForm("kvcache_start", name, "table")
    return PagedKV(k, v, page_tables.block_table(kvcache_start, lens, k, form), "HND"), offsets


def _preparation(
    q: Array, kv: PagedKV, offsets: np.ndarray, causal: bool, cos: Array | None, sin: Array | None,
    position_ids: Array | None, mode: str | None, q_gain: Array | None, k_gain: Array | None, eps: float | None,
) -> Preparation | None:  # fmt: skip
    """Check norm and rotary of q, and return what the engine does before attention."""
    epsilon = 0.0 if eps is None else check_number("qk_norm_eps", eps, positive=True)
    if eps is not None and q_gain is None and k_gain is None:
        raise ContractError(f"qk_norm_eps: must come with q_norm_gain or k_norm_gain, got {eps} alone.")
    if eps is None and q_gain is not None:
        raise ContractError("q_norm_gain: must come with qk_norm_eps, got None.")
    if (cos is None) != (sin is None):
        raise ContractError(f"rope_{'cos' if cos is None else 'sin'}: must be given with the other plane, got None.")
    if cos is None:
        for name, x in (("position_ids", position_ids), ("rotary_mode", mode), ("q_norm_gain", q_gain)):
            if x is not None:
                raise ContractError(f"{name}: must come with rope_cos and rope_sin, got none.")
        return None
    library = str(library_of(q))
    check_float_array("rope_cos", cos, (None, None), "[positions, rotary_dim / 2]", library)
    check_float_array("rope_sin", sin, cos.shape, f"{list(cos.shape)} as rope_cos is", library)
    if not 1 <= cos.shape[1] <= q.shape[2] // 2:
        raise ContractError(f"rope_cos: must have 1..{q.shape[2] // 2} columns (half of head_dim), got {cos.shape[1]}.")
    check_choice("rotary_mode", mode, (*ROTARY_MODES, None))
    if q_gain is not None:
        check_float_array("q_norm_gain", q_gain, (q.shape[2],), f"[{q.shape[2]}] (head_dim)", library)
    own = row_positions(kv.kv_lens - np.diff(offsets), offsets, len(q))
    positions: Array = own
    if position_ids is not None:
        positions = page_tables.require_index_array("position_ids", position_ids, 1, library)
        if positions.shape != q.shape[:1]:
            raise ContractError(f"position_ids: must be [{len(q)}] (rows of q), got shape {positions.shape}.")
    if library_of(positions) == "numpy":
        keeps = np.repeat(kv.kv_lens > 0, np.diff(offsets))
        _check_positions(
            positions, keeps & (own[: keeps.size] >= 0) if causal else keeps, len(cos), position_ids is None
        )
        positions = positions.astype(np.int32)
    return Preparation(cos, sin, positions, 0, mode == "interleaved", q_gain, epsilon)


def _check_positions(positions: np.ndarray, keeps: np.ndarray, num_positions: int, implied: bool) -> None:
    """Require that the planes hold every row's position; one before them is legal where its row keeps no key."""
    used = positions[: keeps.size].astype(np.int64)
    outside = np.flatnonzero((used >= num_positions) | ((used < 0) & keeps))
    if outside.size:
        row = int(outside[0])
        where = f"rope_cos: must hold the position of row {row}, in" if implied else f"position_ids[{row}]: must be in"
        raise ContractError(f"{where} 0..{num_positions - 1} (positions of rope_cos), got {used[row]}.")

"""`gather_attention`: each query row over its own list of token positions."""

from __future__ import annotations

from typing import Any

from nbattn import contracts
from nbattn.arrays import Array, confirm_target
from nbattn.engine import backend
from nbattn.kv_cache import PagedKV
from nbattn.problem import Level, Options, Problem

Result = Array | tuple[Array, Array]


def gather_attention(
    q: Array,
    kv: PagedKV,
    token_indices: Array,
    counts: Array,
    qo_indptr: Array | None = None,
    *,
    sm_scale: float | None = None,
    k_scale: Any = None,
    v_scale: Any = None,
    output_gate: Array | None = None,
    sinks: Array | None = None,
    split_size: int | None = None,
    out_dtype: Any = None,
    out: Array | None = None,
    lse: Array | None = None,
    return_lse: bool = False,
    lse_base: str = "2",
    target: str | None = None,
) -> Result:
    """Attend with each query row over its own list of token positions (gather-GQA).

    Row t reads ``token_indices[t, :min(counts[t], width)]``. An index that is negative or at or beyond the request's
    length, or whose page is unmapped, is skipped; a duplicate counts as often as it is listed. There is no causal test:
    the selection owns causality.

    Parameters
    ----------
    q : array, shape [total_q, num_qo_heads, head_dim_qk]
        Query rows, dtypes as for `paged_attention`.
    kv : PagedKV
        The cache.
    token_indices : int array, shape [total_q, width]
        Positions inside each row's request; entries at or past the count are never read.
    counts : int array, shape [total_q]
        Valid entries of each row.
    qo_indptr : int array, shape [batch + 1], optional
        Request b owns rows ``qo_indptr[b]`` to ``qo_indptr[b + 1]``, from row 0 on; None is one row per request. There
        may be more rows than keys. Rows of no request are treated as by `paged_attention`.
    output_gate : float array, shape [total_q, num_qo_heads] or [total_q, num_qo_heads, head_dim_vo], optional
        The output is multiplied by its sigmoid.
    sm_scale, k_scale, v_scale, sinks, split_size, out_dtype, out, lse, return_lse, lse_base, target
        As for `paged_attention`; `split_size` counts list entries.

    Returns
    -------
    out, lse
        As `paged_attention`; a row whose entries are all skipped is 0, -inf.

    Examples
    --------
    >>> import numpy as np, nbattn
    >>> v = np.arange(4, dtype=np.float32).reshape(1, 4, 1, 1)
    >>> kv = nbattn.PagedKV.from_slots(v * 0, v, np.array([4]))
    >>> chosen = np.array([[3, 0, -1, 2]], np.int32)
    >>> nbattn.gather_attention(np.ones((1, 1, 1), np.float32), kv, chosen, np.array([3], np.int32))
    array([[[1.5]]], dtype=float32)
    """
    problem, token_indices, counts = checked_problem(
        q, kv, token_indices, counts, qo_indptr, sm_scale=sm_scale, k_scale=k_scale, v_scale=v_scale,
        output_gate=output_gate, sinks=sinks, out_dtype=out_dtype, out=out, lse=lse, return_lse=return_lse,
        lse_base=lse_base, target=target,
    )  # fmt: skip
    backend(problem.target).run_gather(problem, token_indices, counts, contracts.check_split(split_size))
    return (problem.out, problem.lse) if return_lse else problem.out


def checked_problem(
    q: Array, kv: PagedKV, token_indices: Array, counts: Array, qo_indptr: Array | None = None, *,
    sm_scale: float | None = None, k_scale: Any = None, v_scale: Any = None, output_gate: Array | None = None,
    sinks: Array | None = None, out_dtype: Any = None, out: Array | None = None, lse: Array | None = None,
    return_lse: bool = False, lse_base: str = "2", target: str | None = None,
) -> tuple[Problem, Array, Array]:  # fmt: skip
    """Return a call that keeps every rule, ready to run, and its lists: nothing is planned or compiled yet."""
    library = contracts.check_query(q, kv)
    name = confirm_target(target, library)
    contracts.check_rows_owned("qo_indptr", qo_indptr, kv.batch_size, q.shape[0])
    offsets = contracts.check_offsets("qo_indptr", qo_indptr, kv.batch_size, q.shape[0], first=True, library=library)
    token_indices = contracts.check_selection("token_indices", token_indices, q.shape[:1], 2, library)
    counts = contracts.check_selection("counts", counts, q.shape[:1], 1, library)
    results = contracts.check_results(q, kv.head_dim_vo, out, lse, out_dtype, return_lse, lse_base)
    options = Options(
        sm_scale=contracts.check_sm_scale(sm_scale, kv.head_dim_qk),
        sinks=contracts.check_heads_vector("sinks", sinks, q, library, only_above=True),
        k_scale=contracts.check_cache_scale("k_scale", k_scale, kv, kv.head_dim_qk, library),
        v_scale=contracts.check_cache_scale("v_scale", v_scale, kv, kv.head_dim_vo, library),
        output_gate=contracts.check_gate(output_gate, results[0].shape, library),
        lse_base=lse_base,
    )
    read = [("q", q), ("token_indices", token_indices), ("counts", counts), ("output_gate", output_gate)]
    read += [("sinks", sinks), ("k, v", kv.k), ("k, v", kv.v), ("k_scale", k_scale), ("v_scale", v_scale)]
    contracts.check_no_overlap(out, lse, read)
    return Problem(name, q, (Level(kv, offsets),), options, *results), token_indices, counts

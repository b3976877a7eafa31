"""`gqa_decode`: one new token per sequence over a fixed-size cache."""

from __future__ import annotations

from typing import Any

import numpy as np

from nbattn import page_tables
from nbattn.arrays import Array, common_library, library_of
from nbattn.cache_views import page_views
from nbattn.errors import ContractError
from nbattn.face_rules import argument_names
from nbattn.kv_cache import PagedKV
from nbattn.paged import paged_attention

Result = Array | tuple[Array, Array]

_SLOTS = page_tables.TableForm("slots", "lengths", "slots")


def gqa_decode(
    query: Array,
    key_cache: Array,
    value_cache: Array,
    lengths: Array,
    *,
    sm_scale: float | None = None,
    out: Array | None = None,
    lse: Array | None = None,
    return_lse: bool = False,
    lse_base: str = "2",
    target: str | None = None,
) -> Result:
    """Attend with one new token per sequence over the first ``lengths[b]`` slots of a fixed cache.

    ``out[b, h] = softmax(query[b, h] @ K.T * sm_scale) @ V`` with ``K = key_cache[b, :lengths[b], h // group]`` and V
    likewise, where ``group = num_qo_heads // num_kv_heads``.

    Parameters
    ----------
    query : array, shape [sequences, num_qo_heads, head_dim], float16 | bfloat16 | float32 | float64 (CPU only)
        The new token's queries. Integers are read as float32 values; lists are refused.
    key_cache, value_cache : array, shape [sequences, slots, num_kv_heads, head_dim]
        Of query's dtype, or float8_e4m3fn, float8_e5m2 or int8 beside a 16-bit or float32 query. Integers are read as
        float32 values: int8 in place, wider ones in a copy. The two head sizes may differ; `num_qo_heads` is a
        multiple of `num_kv_heads`. Slots from ``lengths[b]`` on may hold anything.
    lengths : int array, shape [sequences]
        Tokens of each sequence, the new one **included**: its key and value are in the cache already. 0 and less is an
        empty row; more than `slots` is an error on the host and is cut to `slots` on a GPU.
    sm_scale : float, optional
        Softmax scale, ``1 / sqrt(head_dim)`` by default. 0 is honoured.
    out : array, shape [sequences, num_qo_heads, value head_dim], float32, optional
        Where to write the result.
    lse : array, shape [sequences, num_qo_heads], float32 (float64 for float64 inputs), optional
        Where to write the log-sum-exps.
    return_lse : bool
        Return ``(out, lse)``.
    lse_base : {"2", "e"}
        Unit of the lse.
    target : {"cpu", "cuda", "gpu"}, optional
        Confirms what the arrays say; never moves anything.

    Returns
    -------
    out : array, shape [sequences, num_qo_heads, value head_dim], float32 whatever the inputs
        0 in empty rows.
    lse : array, shape [sequences, num_qo_heads]
        Log-sum-exp of the scaled scores, -inf in empty rows. Only with `return_lse`.

    Raises
    ------
    ContractError
        If an argument breaks a rule; nothing is written.
    TargetError
        If the target cannot run here.

    Notes
    -----
    The operator of "grouped-query attention decode with a fixed cache", whose reference is a JAX function. The same
    inputs give the same bits, run after run.

    Examples
    --------
    >>> import numpy as np, nbattn
    >>> query = np.array([[[1, 0], [0, 1]]])
    >>> keys = np.array([[[[1, 0]], [[0, 1]], [[5, 5]]]])
    >>> values = np.array([[[[1, 2]], [[3, 4]], [[50, 50]]]])
    >>> nbattn.gqa_decode(query, keys, values, np.array([2])).astype(float).round(4).tolist()
    [[[1.6605, 2.6605], [2.3395, 3.3395]]]
    """
    library = common_library(query=query, key_cache=key_cache, value_cache=value_cache)
    query = _as_float(query)
    unit = None
    if key_cache.dtype == value_cache.dtype == np.int8:
        unit = 1.0  # read in place, as the numbers that it holds
    else:
        key_cache, value_cache = _as_float(key_cache), _as_float(value_cache)
    k, v = page_views(("key_cache", key_cache), ("value_cache", value_cache), "NHD")
    sequences, slots = k.shape[:2]
    if query.shape[:1] != (sequences,):
        raise ContractError(
            f"query: must be [{sequences}, num_qo_heads, head_dim] (sequences of key_cache), got shape {query.shape}."
        )
    kv_lens = np.maximum(page_tables.host_int64("lengths", lengths, library), 0)
    if kv_lens.size != sequences:
        raise ContractError(f"lengths: must be [{sequences}] (sequences of key_cache), got shape {lengths.shape}.")
    if library_of(lengths) == "cupy":
        kv_lens = np.minimum(kv_lens, slots)
    try:
        kv = PagedKV(k, v, page_tables.slot_table(None, kv_lens, k, _SLOTS))
        with argument_names({"k, v": "key_cache, value_cache"}, q="query", total_q="sequences"):
            return paged_attention(
                query, kv, sm_scale=sm_scale, k_scale=unit, v_scale=unit, out_dtype="float32", out=out, lse=lse,
                return_lse=return_lse, lse_base=lse_base, target=target,
            )  # fmt: skip
    except ContractError as error:
        if _fits(query, kv_lens, slots, k.shape[2]) or not _fits(query, kv_lens, k.shape[2], slots):
            raise
        axes = "[sequences, slots, num_kv_heads, head_dim]"
        hint = "axes 1 and 2 look swapped: key_cache.swapaxes(1, 2)?"
        raise ContractError(f"key_cache: must be {axes}, got {k.shape}; {hint}") from error


def _fits(query: Array, kv_lens: np.ndarray, slots: int, num_kv_heads: int) -> bool:
    """Return whether lengths and query heads fit a cache of these sizes."""
    return query.ndim == 3 and kv_lens.max(initial=0) <= slots and query.shape[1] % num_kv_heads == 0


def _as_float(x: Any) -> Any:
    """Return integers as float32 values, everything else as it is."""
    return x.astype(np.float32) if x.dtype.kind in "iu" else x

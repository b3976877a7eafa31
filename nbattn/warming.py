"""`warmup`: compile kernels ahead of the first call that needs them."""

from __future__ import annotations

import sys
import time
from importlib import import_module
from typing import Any

import numpy as np

from nbattn.arrays import CACHE_DTYPES, QUANTIZED_DTYPES, QUERY_DTYPES, TARGETS, dtype_from_name, dtype_name
from nbattn.contracts import check_int
from nbattn.engine import backend
from nbattn.errors import ContractError, check_choice
from nbattn.gather import gather_attention
from nbattn.kv_cache import PagedKV
from nbattn.merging import merge_state
from nbattn.paged import paged_attention

MOST_NUMBERS = 2**22  # of a row of q or of K: a cache of sixteen such rows is 256 MB
MANY_ROWS = 17  # whatever the group size, more than the CPU's kernel of few rows takes
FAMILIES = ("paged_attention", "gather_attention", "merge_state")


def warmup(
    q_dtype: Any = "float32",
    kv_dtype: Any = None,
    *,
    num_qo_heads: int = 8,
    num_kv_heads: int = 2,
    head_dim: int = 128,
    families: tuple[str, ...] = FAMILIES,
    target: str = "cpu",
) -> float:
    """Compile, or load from the cache, the kernels for a pair of dtypes, and return the seconds it took.

    Each family is called on a cache of a few tokens: `paged_attention` with one row and with many, with positional
    rules only and with all rules.

    Parameters
    ----------
    q_dtype : dtype
        float16, bfloat16, float32 or float64 (CPU only).
    kv_dtype : dtype, optional
        `q_dtype` by default, or float8_e4m3fn, float8_e5m2, int8.
    num_qo_heads, num_kv_heads, head_dim : int
        Shapes; the CPU's kernels do not depend on them. At most 2**22 numbers in a row of all heads.
    families : tuple of str
        Which of ``"paged_attention"``, ``"gather_attention"``, ``"merge_state"``.
    target : {"cpu", "cuda", "gpu"}
        Where.

    Returns
    -------
    float
        Seconds.

    Raises
    ------
    ContractError
        If a name is unknown.
    TargetError
        If the target cannot run here.

    Examples
    --------
    >>> import nbattn
    >>> nbattn.warmup("float32", families=("merge_state",)) >= 0
    True
    """
    q_type = _dtype("q_dtype", q_dtype, QUERY_DTYPES)
    kv_type = q_type if kv_dtype is None else _dtype("kv_dtype", kv_dtype, CACHE_DTYPES)
    known = isinstance(families, (tuple, list)) and all(isinstance(x, str) and x in FAMILIES for x in families)
    if not known:
        raise ContractError(f"families: must be among {', '.join(FAMILIES)}, got {families!r}.")
    for name, size in (("num_qo_heads", num_qo_heads), ("num_kv_heads", num_kv_heads), ("head_dim", head_dim)):
        check_int(name, size, at_least=1, at_most=MOST_NUMBERS)
    heads = max(num_qo_heads, num_kv_heads)
    if heads * head_dim > MOST_NUMBERS:
        raise ContractError(f"head_dim: must be at most {MOST_NUMBERS // heads} with {heads} heads, got {head_dim}.")
    place = _place_of(target)
    start = time.perf_counter()
    q = place(np.ones((1, num_qo_heads, head_dim), q_type))
    if "merge_state" in families:
        s = place(np.zeros((1, num_qo_heads), np.float64 if str(q_type) == "float64" else np.float32))
        merge_state(q, s, q, s)
    if "paged_attention" in families or "gather_attention" in families:
        cache = place(np.ones((1, 16, num_kv_heads, head_dim), kv_type))
        kv = PagedKV.from_slots(cache, cache, np.array([16], np.int32))
        scales: dict[str, Any] = {"k_scale": 1.0, "v_scale": 1.0} if dtype_name(cache) in QUANTIZED_DTYPES else {}
        if "paged_attention" in families:
            paged_attention(q, kv, **scales)
            paged_attention(q, kv, logits_soft_cap=1.0, split_size=8, **scales)  # all rules, and the merge of splits
            rows, offsets = place(np.ones((MANY_ROWS, num_qo_heads, head_dim), q_type)), np.array([0, MANY_ROWS])
            paged_attention(rows, kv, offsets, **scales)
            paged_attention(rows, kv, offsets, logits_soft_cap=1.0, **scales)
        if "gather_attention" in families:
            tokens, counts = np.zeros((1, 1), np.int32), np.ones(1, np.int32)
            gather_attention(q, kv, place(tokens), place(counts), **scales)
    if place is not _keep:
        sys.modules["cupy"].cuda.get_current_stream().synchronize()
    return time.perf_counter() - start


def _dtype(name: str, given: Any, known: tuple[str, ...]) -> np.dtype:
    try:
        dtype = dtype_from_name(given)
    except ContractError:
        dtype = None
    if dtype is None or str(dtype) not in known:
        raise ContractError(f"{name}: must be one of {', '.join(known)}, got {given!r}.")
    return dtype


def _keep(x: np.ndarray) -> np.ndarray:
    return x


def _place_of(target: str) -> Any:
    """Return what brings a host array to the target."""
    if check_choice("target", target, TARGETS) == "cpu":
        return _keep
    backend("cuda")
    cupy = import_module("nbattn.cuda_kernels.launch").cupy()

    def place(x: np.ndarray) -> Any:
        if x.dtype.itemsize == 1 and x.dtype.kind == "V":  # CuPy makes no float8 arrays, but views bytes as such
            return cupy.asarray(x.view(np.uint8)).view(x.dtype)
        return cupy.asarray(x)

    return place

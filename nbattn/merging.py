"""Merging attention states ``(v, s)``: results over disjoint sets of keys become the result over their union."""

from __future__ import annotations

import sys

import numpy as np

from nbattn.arrays import QUERY_DTYPES, Array, common_library, dtype_name, library_of, require_array
from nbattn.contracts import LSE_BASES, check_last_axis
from nbattn.engine import backend
from nbattn.errors import ContractError, TargetError, check_choice

STATE_DTYPES = ("float32", "float64")


def merge_state(v_a: Array, s_a: Array, v_b: Array, s_b: Array, *, lse_base: str = "2") -> tuple[Array, Array]:
    """Merge two states: attention over two disjoint sets of keys into attention over both.

    ``s = log2(2**s_a + 2**s_b)`` and ``v = 2**(s_a - s) * v_a + 2**(s_b - s) * v_b``.

    Parameters
    ----------
    v_a, v_b : array, shape [n, num_heads, head_dim], float16 | bfloat16 | float32 | float64, one dtype
        Attention outputs; any strides, the last axis contiguous.
    s_a, s_b : array, shape [n, num_heads], float32 | float64, one dtype
        Their log-sum-exps. A side of -inf contributes nothing, even if its values are NaN.
    lse_base : {"2", "e"}
        Unit of the log-sum-exps.

    Returns
    -------
    v : array, shape [n, num_heads, head_dim], dtype of `v_a`
        Rounded once. 0 where both sides are empty.
    s : array, shape [n, num_heads], dtype of `s_a`
        -inf where both sides are empty; a NaN or +inf on either side makes the row NaN.

    Raises
    ------
    ContractError
        If shapes, dtypes or places disagree.

    Notes
    -----
    As ``merge_state`` of FlashInfer's cascade module; arithmetic is in float32 (float64 for float64).

    Examples
    --------
    >>> import numpy as np, nbattn
    >>> v = np.zeros((1, 1, 2), np.float32)
    >>> s = np.zeros((1, 1), np.float32)
    >>> nbattn.merge_state(v, s, v + 1, s)
    (array([[[0.5, 0.5]]], dtype=float32), array([[1.]], dtype=float32))
    """
    library = _check_states("v_a", v_a, "s_a", s_a, 3)
    _check_states("v_b", v_b, "s_b", s_b, 3)
    _check_same("v_b", v_b, "v_a", v_a)
    _check_same("s_b", s_b, "s_a", s_a)
    check_choice("lse_base", lse_base, LSE_BASES)
    new = np if library == "numpy" else sys.modules["cupy"]
    v, s = new.empty(v_a.shape, v_a.dtype), new.empty(s_a.shape, s_a.dtype)
    _run(library, [(v_a, s_a), (v_b, s_b)], v, s, lse_base)
    return v, s


def merge_state_in_place(
    v: Array, s: Array, v_other: Array, s_other: Array, mask: Array | None = None, *, lse_base: str = "2"
) -> None:
    """Merge another state into ``(v, s)``, which is overwritten.

    Parameters
    ----------
    v, s, v_other, s_other : array
        As `merge_state`; `v` and `s` are updated.
    mask : bool or int array, shape [n], optional
        A zero leaves that row alone.
    lse_base : {"2", "e"}
        Unit of the log-sum-exps.

    Raises
    ------
    ContractError
        If shapes, dtypes or places disagree; nothing is written.

    Examples
    --------
    >>> import numpy as np, nbattn
    >>> v = np.zeros((2, 1, 1), np.float32)
    >>> s = np.zeros((2, 1), np.float32)
    >>> nbattn.merge_state_in_place(v, s, v + 1, s, mask=np.array([True, False]))
    >>> v.ravel().tolist(), s.ravel().tolist()
    ([0.5, 0.0], [1.0, 0.0])
    """
    library = _check_states("v", v, "s", s, 3)
    _check_states("v_other", v_other, "s_other", s_other, 3)
    _check_same("v_other", v_other, "v", v)
    _check_same("s_other", s_other, "s", s)
    check_choice("lse_base", lse_base, LSE_BASES)
    for name, x in (("v", v), ("s", s)):
        if library == "numpy" and not x.flags.writeable:
            raise ContractError(f"{name}: must be writable, got a read-only array.")
    if mask is not None:
        require_array("mask", mask)
        if library_of(mask) != library:
            raise ContractError(f"mask: must live where v does ({library}), got {library_of(mask)}.")
        if mask.shape != v.shape[:1] or mask.dtype.kind not in "biu":
            raise ContractError(f"mask: must be bool or int [{v.shape[0]}], got {mask.dtype} of shape {mask.shape}.")
    _run(library, [(v, s), (v_other, s_other)], v, s, lse_base, mask)


def merge_states(v: Array, s: Array, *, lse_base: str = "2") -> tuple[Array, Array]:
    """Merge any number of states of each row.

    Parameters
    ----------
    v : array, shape [n, num_states, num_heads, head_dim], float16 | bfloat16 | float32 | float64
        Attention outputs; the state axis is second. Any strides, the last axis contiguous.
    s : array, shape [n, num_states, num_heads], float32 | float64
        Their log-sum-exps.
    lse_base : {"2", "e"}
        Unit of the log-sum-exps.

    Returns
    -------
    v : array, shape [n, num_heads, head_dim]
        Merged output, 0 without states.
    s : array, shape [n, num_heads]
        Merged log-sum-exp, -inf without states.

    Raises
    ------
    ContractError
        If shapes, dtypes or places disagree.

    Examples
    --------
    >>> import numpy as np, nbattn
    >>> v = np.array([0, 0, 3], np.float32).reshape(1, 3, 1, 1)
    >>> merged, s = nbattn.merge_states(v, np.zeros((1, 3, 1), np.float32))
    >>> merged.item(), round(s.item(), 4)
    (1.0, 1.585)
    """
    library = _check_states("v", v, "s", s, 4)
    check_choice("lse_base", lse_base, LSE_BASES)
    new = np if library == "numpy" else sys.modules["cupy"]
    merged = new.empty((v.shape[0], *v.shape[2:]), v.dtype)
    merged_s = new.empty((s.shape[0], s.shape[2]), s.dtype)
    _run(library, [(v[:, x], s[:, x]) for x in range(v.shape[1])], merged, merged_s, lse_base)
    return merged, merged_s


def _run(library: str, sources: list, v: Array, s: Array, lse_base: str, mask: Array | None = None) -> None:
    backend("cpu" if library == "numpy" else "cuda").run_merge(sources, v, s, lse_base, mask)


def _check_states(v_name: str, v: Array, s_name: str, s: Array, ndim: int) -> str:
    """Check one pair of values and log-sum-exps and return its library."""
    library = common_library(**{v_name: v, s_name: s})
    if v.ndim != ndim:
        raise ContractError(f"{v_name}: must have {ndim} dimensions, got shape {v.shape}.")
    if s.shape != v.shape[:-1]:
        raise ContractError(f"{s_name}: must be {list(v.shape[:-1])} ({v_name} without its last axis), got {s.shape}.")
    if dtype_name(v) not in QUERY_DTYPES:
        raise ContractError(f"{v_name}: must be one of {', '.join(QUERY_DTYPES)}, got {dtype_name(v)}.")
    if dtype_name(s) not in STATE_DTYPES:
        raise ContractError(
            f"{s_name}: must be float32 or float64, got {dtype_name(s)}. A log-sum-exp needs the range."
        )
    if library != "numpy" and "float64" in (dtype_name(v), dtype_name(s)):
        raise TargetError(f"{v_name}, {s_name}: float64 runs on the CPU only, got a CuPy array.")
    check_last_axis(v_name, v)
    return library


def _check_same(name: str, x: Array, other_name: str, other: Array) -> None:
    common_library(**{other_name: other, name: x})
    if x.shape != other.shape or x.dtype != other.dtype:
        raise ContractError(
            f"{name}: must be like {other_name}, {other.dtype} of shape {list(other.shape)}, "
            f"got {x.dtype} of shape {list(x.shape)}."
        )

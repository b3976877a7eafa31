"""Every rule an attention call must keep, checked once; behind it nothing checks again.

Each function takes an argument's name, refuses what breaks its rule and returns the rest in one form. Messages read
*argument: rule, got value. Hint.*
"""

from __future__ import annotations

import math
import numbers
import sys
from typing import Any

import numpy as np

from nbattn.arrays import (
    QUANTIZED_DTYPES,
    QUERY_DTYPES,
    Array,
    accumulator_dtype,
    common_library,
    dtype_from_name,
    dtype_name,
    library_of,
    overlap,
    require_array,
)
from nbattn.cache_views import swapped_hint
from nbattn.errors import ContractError, TargetError, check_choice
from nbattn.kv_cache import PagedKV
from nbattn.page_tables import BLOCK_TABLE, INT32_MAX, PAGE_TABLE, SLOTS, host_int64, require_index_array, snapshot
from nbattn.positions import one_row_each
from nbattn.problem import FLAG_TYPES, Level, as_float
from nbattn.scoring import LOG2E

WITH_LAYOUT = (PAGE_TABLE, BLOCK_TABLE, SLOTS)  # tables of constructors that take a kv_layout
OUT_DTYPES = ("float16", "bfloat16", "float32")
LSE_BASES = ("2", "e")
MOST_POSITION = 2**30  # kernels add lengths to positions in int32
LARGEST_NUMBER = 2.0**127 / LOG2E  # in units of log2 it is still a float32
LARGEST_DOUBLE = 2.0**1023 / LOG2E
SMALLEST_CAP = 2.0**-126 / LOG2E  # in units of log2 it is still a normal float32


def check_query(q: Array, kv: PagedKV) -> str:
    """Check q against a cache and return the library of both."""
    require_array("q", q)
    if not isinstance(kv, PagedKV):
        raise ContractError(f"kv: must be a PagedKV, got {type(kv).__name__}. Make one with PagedKV.from_slots(...).")
    if q.ndim != 3:
        raise ContractError(f"q: must be [total_q, num_qo_heads, head_dim], got shape {q.shape}.")
    dtype = dtype_name(q)
    if dtype not in QUERY_DTYPES:
        raise ContractError(f"q: must be one of {', '.join(QUERY_DTYPES)}, got {dtype}.")
    library = common_library(q=q, k=kv.k)
    if q.shape[2] != kv.head_dim_qk:
        raise ContractError(f"q: must have the keys' head size {kv.head_dim_qk}, got {q.shape[2]}.")
    if kv.num_kv_heads == 0 or q.shape[1] == 0 or q.shape[1] % kv.num_kv_heads:
        fits = kv.table.form in WITH_LAYOUT and q.shape[1] and q.shape[1] % kv.page_size == 0
        raise ContractError(
            f"q: must have a positive multiple of {kv.num_kv_heads} (num_kv_heads) heads, got {q.shape[1]}"
            + (swapped_hint(kv.kv_layout, "the cache's axes") if fits else ".")
        )
    check_last_axis("q", q)
    if kv.kv_dtype != dtype and not (kv.kv_dtype in QUANTIZED_DTYPES and dtype != "float64"):
        raise ContractError(
            f"k, v: must have q's dtype {dtype}"
            + ("" if dtype == "float64" else f" or one of {', '.join(QUANTIZED_DTYPES)}")
            + f", got {kv.kv_dtype}."
        )
    if library != "numpy" and dtype == "float64":
        raise TargetError("q: float64 runs on the CPU only, got a CuPy array. Use float32 or cupy.asnumpy(q).")
    return library


def check_last_axis(name: str, x: Array) -> None:
    """Require that the last axis is contiguous: rows are read as vectors."""
    if x.size and x.shape[-1] > 1 and x.strides[-1] != x.dtype.itemsize:
        raise ContractError(f"{name}: the last axis must be contiguous, got strides {x.strides} bytes.")


def check_offsets(
    name: str, offsets: Array | None, batch: int, num_rows: int, *, first: bool, library: str
) -> np.ndarray:
    """Return query offsets [batch + 1] as host int64: non-decreasing, from 0 (`first`), at most `num_rows`."""
    if offsets is None:
        if batch > num_rows:
            raise ContractError(f"q: must have a row for each of the {batch} requests, got {num_rows} rows.")
        return one_row_each(batch)
    values = host_int64(name, offsets, library)
    if values.shape != (batch + 1,):
        raise ContractError(f"{name}: must be [{batch + 1}] (batch + 1), got shape {values.shape}.")
    if values[0] < 0 or (first and values[0] != 0):
        raise ContractError(f"{name}[0]: must be {'0' if first else 'at least 0'}, got {values[0]}.")
    falls = np.flatnonzero(values[1:] < values[:-1])
    if len(falls):
        i = int(falls[0])
        raise ContractError(f"{name}[{i + 1}]: must not be below {name}[{i}] = {values[i]}, got {values[i + 1]}.")
    if values[-1] > num_rows:
        raise ContractError(f"{name}[-1]: must be at most {num_rows} (rows of q), got {values[-1]}.")
    return values


def check_rows_owned(name: str, offsets: Array | None, batch: int, num_rows: int) -> None:
    """Require offsets where q has rows beyond one per request: nobody would own them, and they would be zeros."""
    if offsets is None and batch < num_rows:
        raise ContractError(
            f"{name}: must be given where q has more rows than there are requests, got None for {num_rows} rows "
            f"and {batch} requests."
        )


def check_level_caches(levels: Any) -> None:
    """Refuse a cascade's level without a cache by its number; `check_levels` knows a call's only one as ``kv``."""
    for i, level in enumerate(levels if isinstance(levels, (list, tuple)) else ()):
        if isinstance(level, Level) and not isinstance(level.kv, PagedKV):
            raise ContractError(f"levels[{i}].kv: must be a PagedKV, got {type(level.kv).__name__}.")


def check_levels(levels: Any, q: Array) -> tuple[tuple[Level, ...], str]:
    """Return the levels with host offsets, and the library of all arrays."""
    if not isinstance(levels, (list, tuple)) or not levels:
        raise ContractError(f"levels: must be a non-empty list of Level, got {levels!r}.")
    checked = []
    for i, level in enumerate(levels):
        if not isinstance(level, Level):
            raise ContractError(f"levels[{i}]: must be a Level, got {type(level).__name__}.")
        library = check_query(q, level.kv)
        kv, kv_0 = level.kv, levels[0].kv
        for what in ("num_kv_heads", "head_dim_qk", "head_dim_vo", "kv_dtype") if i else ():
            if getattr(kv, what) != getattr(kv_0, what):
                raise ContractError(
                    f"levels[{i}].kv: must have level 0's {what} {getattr(kv_0, what)}, got {getattr(kv, what)}."
                )
        name = "qo_indptr" if len(levels) == 1 else f"levels[{i}].qo_indptr"
        check_rows_owned(name, level.qo_indptr, kv.batch_size, q.shape[0])
        offsets = check_offsets(
            name, level.qo_indptr, kv.batch_size, q.shape[0], first=len(levels) == 1, library=library
        )
        checked.append(Level(kv, offsets, check_bool(name.replace("qo_indptr", "causal"), level.causal)))
    return tuple(checked), library


def check_bool(name: str, value: Any, default: bool | None = None) -> bool:
    """Return a bool, Python's or NumPy's; None gives the default, if there is one."""
    if value is None and default is not None:
        return default
    if not isinstance(value, FLAG_TYPES):
        rule = "a bool" if default is None else "True, False or None"
        raise ContractError(f"{name}: must be {rule}, got {value!r}.")
    return bool(value)


def check_number(name: str, value: Any, *, positive: bool = False) -> float:
    """Return a real, finite number."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise ContractError(f"{name}: must be a finite number, got {value!r}.")
    number = as_float(value)
    if not math.isfinite(number) and not isinstance(value, numbers.Integral):
        raise ContractError(f"{name}: must be a finite number, got {value!r}.")
    if abs(number) > LARGEST_NUMBER:
        raise ContractError(f"{name}: must be at most {LARGEST_NUMBER:.4g} in size, got {value!r}.")
    if positive and number < 0:
        raise ContractError(f"{name}: must not be negative, got {value!r}.")
    return number


def check_int(name: str, value: Any, *, at_least: int | None = None, at_most: int | None = None) -> int:
    """Return an integer."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise ContractError(f"{name}: must be an int, got {value!r}.")
    if at_least is not None and value < at_least:
        raise ContractError(f"{name}: must be at least {at_least}, got {value}.")
    if at_most is not None and not value <= at_most:
        raise ContractError(f"{name}: must be at most {at_most}, got {value}.")
    return int(value)


def check_window(window_left: Any) -> int:
    """Return `window_left`, -1 if it is off; beyond int32, where no position is, all windows are alike."""
    return max(-1, min(check_int("window_left", window_left), INT32_MAX))


def check_chunk(chunk_size: Any) -> int:
    """Return `chunk_size`, 0 if it is None; beyond int32 as `check_window`."""
    return 0 if chunk_size is None else min(check_int("chunk_size", chunk_size, at_least=1), INT32_MAX)


def check_split(split_size: Any) -> int | None:
    """Return `split_size` or None; a request has no more keys than an int32 can count."""
    return None if split_size is None else min(check_int("split_size", split_size, at_least=1), INT32_MAX)


def check_sm_scale(sm_scale: Any, head_dim: int) -> float:
    """Return the softmax scale: given (0 included), or ``1 / sqrt(head_dim)``."""
    return 1.0 / math.sqrt(head_dim) if sm_scale is None else check_number("sm_scale", sm_scale)


def check_heads_vector(name: str, x: Array | None, q: Array, library: str, *, only_above: bool = False) -> Array | None:
    """Check a float vector with one entry per query head; `only_above` lets what is far below zero pass."""
    if x is None:
        return None
    require_array(name, x)
    if library_of(x) != library:
        raise ContractError(f"{name}: must live where q does ({library}), got {library_of(x)}.")
    if x.shape != (q.shape[1],):
        raise ContractError(f"{name}: must be [{q.shape[1]}] (num_qo_heads), got shape {x.shape}.")
    if dtype_name(x) not in QUERY_DTYPES:
        raise ContractError(f"{name}: must be a float dtype, got {dtype_name(x)}.")
    _check_sizes(name, x, dtype_name(q), only_above)
    return x


def _check_sizes(name: str, x: Array, query_dtype: str, only_above: bool = False) -> None:
    """Refuse NaN and what would be infinite in the arithmetic of a query dtype; a device's are not looked at."""
    if library_of(x) != "numpy":
        return
    largest = LARGEST_DOUBLE if accumulator_dtype(query_dtype) == np.float64 else LARGEST_NUMBER
    values = x.astype(np.float64)
    far = np.argwhere(~((values if only_above else np.abs(values)) <= largest))  # NaN compares false
    if len(far):
        i = tuple(far[0].tolist())
        rule = "must be a number" if np.isnan(values[i]) else f"must be at most {largest:.4g}"
        rule += "" if only_above or np.isnan(values[i]) else " in size"
        raise ContractError(f"{name}[{', '.join(map(str, i))}]: {rule}, got {values[i]}.")


def check_scale(name: str, scale: Any, kv: PagedKV, dim: int, library: str) -> Any:
    """Check a cache scale: None, a number, or an array that broadcasts to [num_kv_heads, dim]."""
    num_kv_heads = kv.num_kv_heads
    if scale is None or isinstance(scale, numbers.Real):
        return None if scale is None else check_number(name, scale)
    require_array(name, scale)
    if library_of(scale) != library:
        raise ContractError(f"{name}: must live where q does ({library}), got {library_of(scale)}.")
    if dtype_name(scale) not in QUERY_DTYPES:
        raise ContractError(f"{name}: must be a float dtype, got {dtype_name(scale)}.")
    _check_sizes(name, scale, kv.kv_dtype)
    if scale.size == 1:
        return scale.reshape(1, 1)
    try:
        fits = np.broadcast_shapes(scale.shape, (num_kv_heads, dim)) == (num_kv_heads, dim)
    except ValueError:
        fits = False
    if not fits:
        raise ContractError(
            f"{name}: must broadcast to [{num_kv_heads}, {dim}] (num_kv_heads, head_dim), got shape {scale.shape}."
        )
    return scale


def check_mask(mask: Array | None, levels: tuple[Level, ...], num_heads: int, library: str) -> Array | None:
    """Return the mask as a 4-D view that broadcasts to [batch, num_qo_heads, max rows, max keys]."""
    if mask is None:
        return None
    require_array("attn_mask", mask)
    if library_of(mask) != library:
        raise ContractError(f"attn_mask: must live where q does ({library}), got {library_of(mask)}.")
    if dtype_name(mask) not in ("bool", *QUERY_DTYPES):
        raise ContractError(f"attn_mask: must be bool (True = keep) or a float dtype, got {dtype_name(mask)}.")
    if not 1 <= mask.ndim <= 4:
        raise ContractError(f"attn_mask: must have 1 to 4 dimensions, got {mask.ndim}.")
    batch = len(levels[-1].qo_indptr) - 1
    rows = int(np.diff(levels[-1].qo_indptr).max(initial=0))
    keys = _most_keys(levels)
    view = mask.reshape((1,) * (4 - mask.ndim) + mask.shape)
    exact = (view.shape[0] in (1, batch), view.shape[1] in (1, num_heads))
    enough = (view.shape[2] == 1 or view.shape[2] >= rows, view.shape[3] == 1 or view.shape[3] >= keys)
    if not all(exact + enough):
        raise ContractError(
            f"attn_mask: must broadcast to [{batch} or 1, {num_heads} or 1, {rows}, {keys}] "
            f"(requests, heads, rows, keys; surplus rows and keys are not read), got shape {mask.shape}."
        )
    return view


def _most_keys(levels: tuple[Level, ...]) -> int:
    """Return the largest number of keys that all levels together give one row."""
    totals = np.zeros(max(int(level.qo_indptr[-1]) for level in levels), np.int64)
    for level in levels:
        totals[level.qo_indptr[0] : level.qo_indptr[-1]] += np.repeat(level.kv.kv_lens, np.diff(level.qo_indptr))
    return int(totals.max(initial=0))


def check_row_ints(
    name: str, values: Array | None, length: int, library: str, *, at_least: int | None = None
) -> np.ndarray | None:
    """Return one host int64 position per request or row, or None; beyond `MOST_POSITION` int32 sums would wrap."""
    if values is None:
        return None
    ints = host_int64(name, values, library)
    if ints.shape != (length,):
        raise ContractError(f"{name}: must be [{length}], got shape {ints.shape}.")
    if at_least is not None and len(low := np.flatnonzero(ints < at_least)):
        raise ContractError(f"{name}[{low[0]}]: must be at least {at_least}, got {ints[low[0]]}.")
    far = np.flatnonzero((ints > MOST_POSITION) | (ints < -MOST_POSITION))
    if len(far):
        raise ContractError(f"{name}[{far[0]}]: must be a position within {MOST_POSITION}, got {ints[far[0]]}.")
    return ints


def check_gate(gate: Array | None, shape: tuple[int, int, int], library: str) -> Array | None:
    """Return the output gate as a 3-D view that broadcasts to the output."""
    if gate is None:
        return None
    require_array("output_gate", gate)
    if library_of(gate) != library:
        raise ContractError(f"output_gate: must live where q does ({library}), got {library_of(gate)}.")
    if dtype_name(gate) not in QUERY_DTYPES:
        raise ContractError(f"output_gate: must be a float dtype, got {dtype_name(gate)}.")
    view = gate[..., None] if gate.ndim == 2 else gate
    if view.ndim != 3 or view.shape[:2] != shape[:2] or view.shape[2] not in (1, shape[2]):
        raise ContractError(f"output_gate: must be {list(shape[:2])} or {list(shape)}, got shape {gate.shape}.")
    return view


def check_results(
    q: Array, head_dim_vo: int, out: Any, lse: Any, out_dtype: Any, return_lse: bool, base: str
) -> tuple[Array, Array | None]:
    """Return (out, lse or None): what was given if it fits, else new arrays of 0 and -inf."""
    check_choice("lse_base", base, LSE_BASES)
    check_bool("return_lse", return_lse)
    dtype = q.dtype if out_dtype is None else dtype_from_name(out_dtype, "out_dtype")
    if dtype != q.dtype and str(dtype) not in OUT_DTYPES:
        raise ContractError(f"out_dtype: must be one of {', '.join(OUT_DTYPES)} or q's dtype, got {dtype}.")
    library = library_of(q)
    new = np if library == "numpy" else sys.modules["cupy"]
    shape = (q.shape[0], q.shape[1], head_dim_vo)
    lse_dtype = accumulator_dtype(dtype_name(q))
    for name, x, want_shape, want_dtype in (("out", out, shape, dtype), ("lse", lse, shape[:2], lse_dtype)):
        if x is None:
            continue
        require_array(name, x)
        if library_of(x) != library:
            raise ContractError(f"{name}: must live where q does ({library}), got {library_of(x)}.")
        if x.shape != want_shape or x.dtype != want_dtype:
            raise ContractError(
                f"{name}: must be {want_dtype} of shape {list(want_shape)}, got {x.dtype} of shape {list(x.shape)}."
            )
        if library == "numpy" and not x.flags.writeable:
            raise ContractError(f"{name}: must be writable, got a read-only array.")
    if out is None:
        out = new.zeros(shape, dtype)
    check_last_axis("out", out)
    if lse is None and return_lse:
        lse = new.full(shape[:2], -np.inf, lse_dtype)
    return out, lse


def check_no_overlap(out: Array | None, lse: Array | None, read: list[tuple[str, Any]]) -> None:
    """Refuse given results that share memory with what is read, arrays or not and their names, or with each other."""
    for name, result, others in (("out", out, read), ("lse", lse, [*read, ("out", out)])):
        for other, x in others if result is not None else ():
            if x is not None and library_of(x) is not None and overlap(result, x):
                raise ContractError(f"{name}: must share no memory with {other}, got overlapping arrays.")


def check_soft_cap(cap: Any) -> float:
    """Return the soft cap, 0 for none."""
    number = 0.0 if cap is None else check_number("logits_soft_cap", cap, positive=True)
    if 0 < number < SMALLEST_CAP:
        raise ContractError(f"logits_soft_cap: must be 0 or at least {SMALLEST_CAP:.4g}, got {cap!r}.")
    return number


def check_cache_scale(name: str, scale: Any, kv: PagedKV, dim: int, library: str) -> Any:
    """Check a cache's scale; an int8 cache cannot be read without."""
    if scale is None and kv.kv_dtype == "int8":
        raise ContractError(f"{name}: must be given for an int8 cache, got None.")
    return check_scale(name, scale, kv, dim, library)


def check_selection(name: str, x: Array, lead: tuple[int, ...], ndim: int, library: str) -> Array:
    """Check an index list whose first axis has one entry per query row; values are judged by the kernel."""
    require_index_array(name, x, ndim, library)
    if x.shape[:1] != lead:
        raise ContractError(f"{name}: must have {lead[0]} rows (rows of q), got shape {x.shape}.")
    return snapshot(x) if dtype_name(x) == "int64" else x  # 2**32 must not become token 0

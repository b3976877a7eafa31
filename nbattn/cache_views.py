"""Zero-copy views of every cache layout as ``[page, slot, kv_head, dim]``."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from nbattn.arrays import CACHE_DTYPES, Array, common_library, dtype_name, library_of, require_array
from nbattn.errors import ContractError, check_choice

AXES = {"NHD": "[pages, page_size, kv_heads, dim]", "HND": "[pages, kv_heads, page_size, dim]"}

Named = tuple[str, Any]  # an argument's name and value


def check_layout(kv_layout: Any) -> str:
    """Return a cache layout's name."""
    return str(check_choice("kv_layout", kv_layout, tuple(AXES)))


def split_pair(name: str, cache: Any) -> tuple[Named, Named]:
    """Return K and V of a combined 5-D array or of a tuple or list ``(k, v)``."""
    if isinstance(cache, (tuple, list)):
        if len(cache) != 2:
            raise ContractError(f"{name}: must be a 5-D array or a pair (k, v), got {len(cache)} items.")
        return (f"{name}[0]", cache[0]), (f"{name}[1]", cache[1])
    require_array(name, cache)
    if cache.ndim != 5 or cache.shape[1] != 2:
        stacked = cache.ndim == 5 and cache.shape[0] == 2
        hint = f" K and V seem to stand on axis 0: pass ({name}[0], {name}[1])." if stacked else ""
        raise ContractError(f"{name}: must be [pages, 2, ...] with 5 axes or a pair (k, v), got {cache.shape}.{hint}")
    return (name, cache[:, 0]), (name, cache[:, 1])


def page_views(k: Named, v: Named, kv_layout: str) -> tuple[Array, Array]:
    """Return K and V as views ``[pages, page_size, kv_heads, dim]``, checked singly and against each other.

    They are arrays of their own: the caller's may be given other shapes and dtypes in place.
    """
    check_layout(kv_layout)
    (k_name, k_pages), (v_name, v_pages) = k, v
    library = common_library(**{k_name: k_pages, v_name: v_pages})
    k_shape, v_shape = _check_pages(*k, kv_layout), _check_pages(*v, kv_layout)
    if library == "cupy" and k_pages.device != v_pages.device:
        raise ContractError(f"{v_name}: must be on {k_pages.device} as {k_name} is, got {v_pages.device}.")
    if k_pages.dtype != v_pages.dtype:
        raise ContractError(f"{v_name}: must be {dtype_name(k_pages)} as {k_name} is, got {dtype_name(v_pages)}.")
    if k_shape[:3] != v_shape[:3]:
        a, b, c = k_shape[:3]
        hint = " One of the two looks NHD, the other HND." if v_shape[:3] == (a, c, b) else ""
        want = k_shape[:3] + v_shape[3:]
        raise ContractError(f"{v_name}: must be {want} to match {k_name} (only dim may differ), got {v_shape}.{hint}")
    if kv_layout == "NHD":
        return k_pages.view(), v_pages.view()
    return k_pages.transpose(0, 2, 1, 3), v_pages.transpose(0, 2, 1, 3)


def _check_pages(name: str, x: Array, kv_layout: str) -> tuple[int, ...]:
    """Return the shape of an array of pages, checked by itself."""
    shape = tuple(x.shape)
    if len(shape) != 4:
        raise ContractError(f"{name}: must be {AXES[kv_layout]} ({kv_layout}), got {x.ndim} axes {shape}.")
    if 0 in shape[1:]:
        raise ContractError(
            f"{name}: must be {AXES[kv_layout]} ({kv_layout}), no axis but the first empty, got {shape}."
        )
    if dtype_name(x) not in CACHE_DTYPES:
        raise ContractError(f"{name}: must be one of {', '.join(CACHE_DTYPES)}, got {dtype_name(x)}.")
    require_contiguous_last(name, x)
    item, strides = x.itemsize, x.strides
    if (strides[0] | strides[1] | strides[2] | strides[3]) % item:  # element sizes are powers of two
        raise ContractError(f"{name}: must have strides of whole {item}-byte elements, got {strides} bytes.")
    return shape


def require_contiguous_last(name: str, x: Array) -> None:
    """Refuse an array whose last axis has gaps; an empty one has none, whatever its strides say."""
    if x.size and x.shape[-1] > 1 and x.strides[-1] != x.itemsize:
        raise ContractError(f"{name}: must be contiguous along its last axis, got strides {x.strides} in bytes.")


def in_layout(shape: tuple[int, ...], kv_layout: str) -> tuple[int, ...]:
    """Return the shape ``[pages, page_size, kv_heads, dim]`` as an array of that layout writes it."""
    pages, page_size, heads, *dim = shape
    return (pages, page_size, heads, *dim) if kv_layout == "NHD" else (pages, heads, page_size, *dim)


def swapped_hint(kv_layout: str, axes: str = "axes") -> str:
    """Return the hint for an array that fits the other layout."""
    return f'; {axes} 1 and 2 look swapped: kv_layout="{"HND" if kv_layout == "NHD" else "NHD"}"?'


def with_page_stride(name: str, pool: Array, page_stride: int) -> Array:
    """Return `pool` with `page_stride` elements between pages (-1: its own), inside the memory of its base."""
    if page_stride == -1:
        return pool
    packed = int(np.prod(pool.shape[1:]))
    if page_stride < packed:
        raise ContractError(f"page_stride: must be -1 or at least {packed} (one packed page), got {page_stride}.")
    if not pool.size or pool.shape[0] == 1:
        return pool  # no second page
    owner, strides = _owner(pool), (page_stride * pool.itemsize, *pool.strides[1:])
    owned_first, owned_end = _byte_extent(owner, owner.strides)
    first, end = _byte_extent(pool, strides)
    if not owned_first <= first <= end <= owned_end:
        start = _address(pool)
        raise ContractError(
            f"page_stride: the last of {pool.shape[0]} pages must end inside the memory of the base of {name}, "
            f"{(owned_end - start) // pool.itemsize} elements from its start, got {page_stride},"
            f" which ends at {(end - start) // pool.itemsize}."
        )
    tricks = np.lib.stride_tricks if library_of(pool) == "numpy" else sys.modules["cupy"].lib.stride_tricks
    return tricks.as_strided(pool, pool.shape, strides)


def _owner(x: Array) -> Array:
    """Return the array at the end of the chain of bases."""
    owner, node = x, x
    while node is not None:
        owner = node if library_of(node) else owner  # NumPy's as_strided puts a bare holder into the chain
        node = getattr(node, "base", None)
    return owner


def _byte_extent(x: Array, strides: tuple[int, ...]) -> tuple[int, int]:
    """Return the addresses of the first byte and of the byte after the last that `x` reaches with other strides."""
    steps = [(size - 1) * stride for size, stride in zip(x.shape, strides, strict=True)]
    first = _address(x)
    return first + sum(min(s, 0) for s in steps), first + sum(max(s, 0) for s in steps) + x.itemsize


def _address(x: Array) -> int:
    return x.__array_interface__["data"][0] if library_of(x) == "numpy" else x.data.ptr

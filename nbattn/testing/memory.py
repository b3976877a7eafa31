"""Arrays that are hard on a kernel: gaps between elements, odd addresses, and junk wherever it must not read."""

from __future__ import annotations

from typing import Any

import numpy as np

Rng = np.random.Generator


def poison(array: np.ndarray, rng: Rng, where: Any = True) -> np.ndarray:
    """Fill `array` in place with NaN, Inf and -Inf where `where` is true, and return it.

    Parameters
    ----------
    array : array of any dtype; integers get their extreme values, formats without infinities NaN
    rng : numpy.random.Generator
    where : bool, broadcast to `array`
    """
    if array.dtype.kind in "iu":
        info = np.iinfo(array.dtype)
        junk = np.array([info.min, info.max, info.max // 2], array.dtype)
    else:
        junk = np.array([np.nan, np.inf, -np.inf]).astype(array.dtype)
    where = np.broadcast_to(where, array.shape)
    array[where] = junk[rng.integers(0, 3, int(where.sum()))]
    return array


def spread(array: np.ndarray, rng: Rng) -> np.ndarray:
    """Return a view with the values of `array` whose last axis alone is contiguous; the gaps are poisoned.

    The first axis takes every second row of its memory, and rows start at odd addresses.
    """
    *outer, last = array.shape
    shift = int(rng.integers(0, 3))
    memory = np.empty([2 * n if axis == 0 else n + 1 for axis, n in enumerate(outer)] + [last + 3], array.dtype)
    view = poison(memory, rng)[(slice(0, None, 2), *[slice(0, n) for n in outer[1:]], slice(shift, shift + last))]
    view[...] = array
    return view


def owner_of(array: np.ndarray) -> np.ndarray:
    """Return the array whose memory a view looks into: the last one of its chain of bases."""
    owner, node = array, array.base
    while node is not None:
        if isinstance(node, np.ndarray):
            owner = node
        node = getattr(node, "base", None)
    return owner


def byte_offset(array: np.ndarray, owner: np.ndarray) -> int:
    """Return where the first element of a view stands in its owner's memory."""
    return array.__array_interface__["data"][0] - owner.__array_interface__["data"][0]


def to_cupy(array: np.ndarray) -> Any:
    """Copy an array to the GPU together with the memory around it, so that strides, gaps and poison stay."""
    import cupy

    owner = owner_of(array)
    memory = cupy.asarray(owner.ravel(order="K").view(np.uint8)) if owner.size else cupy.empty(1, "u1")
    return cupy.ndarray(array.shape, array.dtype, memory.data + byte_offset(array, owner), array.strides)

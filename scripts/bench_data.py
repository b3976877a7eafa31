"""Random caches in NumPy or CuPy: how they are filled, copied, read back and laid out."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from bench_shapes import Shape

from nbattn import oracle
from nbattn.arrays import dtype_from_name

COLD_BYTES = {"numpy": 160e6, "cupy": 400e6}  # of caches that are read in turn: several times the last-level cache
MOST_COPIES = 128
DECK = 4_194_301  # random numbers that fill arrays over and over; no multiple of a row, so that rows differ


class Data:
    """An array kept as its bits, since CuPy copies no 8-bit floats; `array` is a view in its dtype.

    Parameters
    ----------
    xp : module, numpy or cupy
    bits : array of unsigned integers as wide as `dtype`
    dtype : str
    """

    def __init__(self, xp: Any, bits: Any, dtype: str):
        self.xp, self.bits, self.dtype = xp, bits, dtype
        self.array = bits.view(dtype_from_name(dtype))

    @classmethod
    def random(cls, xp: Any, shape: tuple[int, ...], dtype: str, rng: np.random.Generator) -> Data:
        """Return normal numbers."""
        size = math.prod(shape)
        kind = dtype_from_name(dtype)
        host = rng.standard_normal(min(size, DECK), np.float32).astype(kind)
        deck = xp.asarray(host.view(f"uint{8 * kind.itemsize}"))
        flat = xp.empty(size, deck.dtype)
        for begin in range(0, size, len(deck)):
            flat[begin : begin + len(deck)] = deck[: size - begin]
        return cls(xp, flat.reshape(shape), dtype)

    def copy(self) -> Data:
        """Return the same numbers in other memory."""
        return Data(self.xp, self.bits.copy(), self.dtype)

    def host(self, index: Any = ...) -> np.ndarray:
        """Return ``array[index]`` as a NumPy array."""
        part = self.bits if index is ... else self.bits[self.xp.asarray(index)]
        part = part.get() if hasattr(part, "get") else part
        return np.ascontiguousarray(part).view(dtype_from_name(self.dtype))


def copies(xp: Any, size: int, hot: bool) -> int:
    """Return how many caches of `size` bytes must be read in turn for each to be cold."""
    return 1 if hot else max(1, min(MOST_COPIES, math.ceil(COLD_BYTES[xp.__name__] / size)))


def random_pages(xp: Any, shape: Shape, pages: int, rng: np.random.Generator) -> Data:
    """Return random K and V [pages, 2, page_size, num_kv_heads, head_dim], or HND."""
    page = (shape.page_size, shape.heads[1]) if shape.layout == "NHD" else (shape.heads[1], shape.page_size)
    return Data.random(xp, (pages, 2, *page, shape.head_dim), shape.dtype, rng)


def pair(cache: Data) -> tuple[Any, Any]:
    """Return a cache's K and V, views."""
    return cache.array[:, 0], cache.array[:, 1]


def host_cache(
    cache: Data, shape: Any, ids: np.ndarray, keys: int | None = None, heads: slice = slice(None)
) -> oracle.Cache:
    """Return some KV heads of one request's pages on the host, as the oracle takes them."""
    part = cache.bits[:, :, heads] if shape.layout == "HND" else cache.bits[:, :, :, heads]
    pages = Data(cache.xp, part, cache.dtype).host(ids)  # [pages, 2, ...]
    if shape.layout == "HND":
        pages = pages.swapaxes(2, 3)
    count = len(ids)
    lens = np.array([shape.keys if keys is None else keys])
    return oracle.Cache(pages[:, 0], pages[:, 1], np.array([0, count]), np.arange(count), lens)


def page_addresses(cache: Data, ids: np.ndarray) -> tuple[np.ndarray, int]:
    """Return (addresses, bytes) of the K and V halves of pages, in the order of `ids`."""
    begin = cache.bits.ctypes.data + ids.astype(np.int64) * cache.bits.strides[0]
    return np.stack([begin, begin + cache.bits.strides[1]], axis=1).ravel(), cache.bits.strides[1]

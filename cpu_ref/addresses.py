"""Where arrays lie: the kernels take addresses, and a short call asks for several."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import numpy as np


def _reader() -> Callable[[np.ndarray], int]:
    """Return the fastest way to an array's address.

    ``x.ctypes.data`` builds two objects first and takes eight times as long as reading the pointer, which stands first
    behind the object's head in CPython with NumPy. Whether it does is tried out on arrays that differ in every way.
    """
    head, read = object.__basicsize__, ctypes.c_size_t.from_address
    samples: list[np.ndarray] = [
        np.zeros(3),
        np.zeros((4, 5), np.float32)[1:, ::2],
        np.zeros((2, 3, 4), np.int8).T,
        np.zeros((0, 2)),
    ]
    if all(read(id(x) + head).value == x.ctypes.data for x in samples):
        return lambda x: read(id(x) + head).value
    return lambda x: x.ctypes.data


address_of = _reader()

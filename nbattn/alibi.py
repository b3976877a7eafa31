"""The slopes of ALiBi, one for every query head."""

from __future__ import annotations

import numpy as np


def alibi_slopes(num_heads: int) -> np.ndarray:
    """Return the usual slopes, float64 [num_heads], also where `num_heads` is no power of two.

    With ``n = 2**floor(log2(num_heads))`` the first `n` are ``2**(-8 i / n)``, ``i = 1..n``, and the others
    ``2**(-4 i / n)`` for odd `i`.

    Examples
    --------
    >>> alibi_slopes(3).tolist()
    [0.0625, 0.00390625, 0.25]
    """
    n = 1 << (num_heads.bit_length() - 1)
    odd = np.arange(1, 2 * (num_heads - n), 2)
    return np.concatenate([2.0 ** (-8.0 * np.arange(1, n + 1) / n), 2.0 ** (-4.0 * odd / n)])

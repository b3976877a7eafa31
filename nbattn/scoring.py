"""Score and softmax arithmetic that both targets compile unchanged.

Scores live in log2 units: the softmax scale, the soft cap, ALiBi slopes and sinks arrive multiplied by log2(e), so that
the exponential is `exp2` and an lse is base 2. Every function is scalar and branch-free and keeps the precision of its
arguments. `exp2`, `tanh` and `shift` are the primitives: each target overloads them.
"""

from __future__ import annotations

import math

import numpy as np
from numba.extending import register_jitable

LOG2E = 1.4426950408889634
LN2 = 0.6931471805599453
LOWEST, LOWEST_DOUBLE = np.finfo(np.float32).min, float(np.finfo(np.float64).min)


def exp2(x):
    """Return ``2**x``; 0 for -inf, NaN for NaN."""
    return np.exp2(x)


def tanh(x):
    """Return the hyperbolic tangent."""
    return np.tanh(x)


@register_jitable
def soft_cap(score, cap):
    """Return ``cap * tanh(score / cap)`` for ``cap > 0``; score and cap share their unit."""
    return cap * tanh(score / cap)


@register_jitable
def alibi_bias(slope, distance):
    """Return the ALiBi bias ``slope * distance`` where ``distance = key position - query position``, a float."""
    return slope * distance


@register_jitable
def rotate_pair(x, y, cos, sin):
    """Rotate the pair ``(x, y)`` by the angle whose cosine and sine are given."""
    return x * cos - y * sin, x * sin + y * cos


def shift(m):
    """Return the maximum to subtract from scores: `m`, or the lowest number while no key has been kept.

    ``-inf - shift(-inf)`` is -inf, never NaN; no finite score is below the number.
    """
    return max(m, LOWEST if isinstance(m, np.float32) else LOWEST_DOUBLE)


@register_jitable
def state_weight(s, m):
    """Return ``2**(s - m)``, the weight of a state of lse `s` under the maximum `m`; 0 for an empty state."""
    return exp2(s - m)


@register_jitable
def sigmoid(x):
    """Return ``1 / (1 + 2**-x)``: the logistic function of a gate given in log2 units."""
    return 1 / (1 + exp2(-x))


@register_jitable
def close_row(m, d_sum, sink):
    """Finish a row's softmax of running maximum `m` and denominator `d_sum`, with a sink logit (-inf for none).

    Returns
    -------
    factor, lse : float
        What the accumulator is multiplied by, and the base-2 log-sum-exp; ``0, -inf`` if nothing was kept.
    """
    top = shift(max(m, sink))
    weight = exp2(m - top)
    total = d_sum * weight + exp2(sink - top)
    kept = total != 0  # True for NaN: a NaN in a kept key stays visible
    factor = weight / total if kept else weight * 0
    return factor, top + math.log2(total) if kept else -math.inf

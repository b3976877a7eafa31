"""The CPU versions of the shared primitives `exp2`, `tanh`, `shift` and `idiv`, and the float constants behind them."""

from __future__ import annotations

import math

import numpy as np
from numba import types
from numba.extending import overload

from nbattn.cpu_ref.number_formats import bits_to_float, round_even
from nbattn.indexing import idiv
from nbattn.scoring import LN2, LOWEST, LOWEST_DOUBLE, exp2, shift, tanh


def _exp2_coefficients(degree: int) -> list[float]:
    """Fit 2**f on [-0.5, 0.5] in relative error by iterated weights, with p(0) = 1 exactly.

    A polynomial with p(0) != 1 would scale the running sum at every block although the maximum stands still.
    """
    f = np.cos((np.arange(4000) + 0.5) / 4000 * np.pi) * 0.5
    powers = np.vander(f, degree + 1, increasing=True)[:, 1:] / 2.0 ** f[:, None]
    target = 1 - 2.0**-f
    weight = np.ones_like(f)
    for _ in range(60):
        root = np.sqrt(weight)
        tail = np.linalg.lstsq(powers * root[:, None], target * root, rcond=None)[0]
        weight *= np.abs(powers @ tail - target) + 1e-12
        weight /= weight.sum()
    return [1.0, *map(float, tail)]


EXP2_FLOAT32 = [float(np.float32(c)) for c in _exp2_coefficients(5)]  # 1.5e-7 relative
EXP2_FLOAT64 = [LN2**k / math.factorial(k) for k in range(14)]  # the Taylor series: 1e-17 at 0.5
LOG2_FLOAT64 = [2 / (LN2 * (2 * k + 1)) for k in range(11)]  # log2(x) / z in z**2, z = (x - 1) / (x + 1)


def _tanh_coefficients() -> list[float]:
    """Fit (tanh(x) / x - 1) / x**2 as a polynomial in x**2 on [0, 0.625] with the oddness and slope 1 kept exact."""
    x = (np.cos((np.arange(2000) + 0.5) / 2000 * np.pi) + 1) * 0.3125
    z = x * x
    return [float(c) for c in np.polynomial.polynomial.polyfit(z, (np.tanh(x) / x - 1) / z, 5)]


# Not inline="always": Numba's inliner takes the overload of any target that it has inlined before, so that CUDA kernels
# compiled after a call on the CPU would get these bodies. LLVM inlines them all the same.
_OPTIONS = {"error_model": "numpy", "fastmath": {"contract", "nsz", "arcp", "afn"}, "forceinline": True}

_C1, _C2, _C3, _C4, _C5 = (np.float32(c) for c in EXP2_FLOAT32[1:])
_T0, _T1, _T2, _T3, _T4, _T5 = (np.float32(c) for c in _tanh_coefficients())
_ONE, _TWO, _ZERO = np.float32(1), np.float32(2), np.float32(0)
_LOW, _HIGH = np.float32(-126), np.float32(127)
_SMALL = np.float32(0.625)  # below it tanh by exp2 would cancel
_TWO_LOG2E = np.float32(2 / LN2)


def _exp2_float32(x):
    clamped = x if x > _LOW else _LOW  # min and max would be two more functions to compile
    clamped = clamped if clamped < _HIGH else _HIGH
    whole = round_even(clamped)
    f = clamped - whole
    p = _ONE + f * (_C1 + f * (_C2 + f * (_C3 + f * (_C4 + f * _C5))))
    scale = bits_to_float(np.int32((np.int32(whole) + np.int32(127)) << np.int32(23)))
    y = p * scale if x >= _LOW else _ZERO
    return y if x == x else x


@overload(exp2, target="cpu", jit_options=_OPTIONS)
def _exp2(x):
    return _exp2_float32 if x == types.float32 else lambda x: math.pow(2.0, x)


def _tanh_float32(x):
    z = x * x
    near = x + x * z * (_T0 + z * (_T1 + z * (_T2 + z * (_T3 + z * (_T4 + z * _T5)))))
    far = _ONE - _TWO / (exp2(abs(x) * _TWO_LOG2E) + _ONE)
    far = far if x >= _ZERO else -far
    y = near if abs(x) < _SMALL else far
    return y if x == x else x


@overload(tanh, target="cpu", jit_options=_OPTIONS)
def _tanh(x):
    return _tanh_float32 if x == types.float32 else lambda x: math.tanh(x)


@overload(shift, target="cpu", jit_options=_OPTIONS)
def _shift(m):
    lowest = LOWEST if m == types.float32 else LOWEST_DOUBLE
    return lambda m: max(m, lowest)


@overload(idiv, target="cpu", jit_options=_OPTIONS)
def _idiv(a, b):
    return lambda a, b: np.int64(np.uint64(a) // np.uint64(b))

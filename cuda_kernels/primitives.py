"""The CUDA side of the primitives that `nbattn.indexing` and `nbattn.scoring` leave to each target."""

from __future__ import annotations

from numba.cuda import float32, int32, types
from numba.cuda.extending import overload

from nbattn import indexing, scoring
from nbattn.cuda_kernels import ptx

TWO_LOG2E = 2.8853900817779268
# tanh(x) / x as a polynomial in x * x, least squares of the relative error on |x| <= 0.6: 1e-7 in float32
TANH_SERIES = (1.0, -0.333332956, 0.133318797, -0.0537803881, 0.0207851101, -0.00588318519)


def _only_floats(x):
    return isinstance(x, types.Float)


@overload(scoring.exp2, target="cuda")
def _exp2(x):
    if _only_floats(x):
        return lambda x: ptx.exp2_approx(float32(x))
    return None


@overload(scoring.tanh, target="cuda")
def _tanh(x):
    if not _only_floats(x):
        return None
    c0, c1, c2, c3, c4, c5 = TANH_SERIES

    def tanh(x):
        x = float32(x)
        y = x * x
        series = float32(c3) + y * (float32(c4) + y * float32(c5))
        series = float32(c0) + y * (float32(c1) + y * (float32(c2) + y * series))
        near = x * series
        far = float32(1) - float32(2) * ptx.reciprocal(ptx.exp2_approx(x * float32(TWO_LOG2E)) + float32(1))
        return near if y < float32(0.36) else far

    return tanh


@overload(scoring.shift, target="cuda")
def _shift(m):
    return (lambda m: max(m, scoring.LOWEST)) if _only_floats(m) else None


@overload(indexing.idiv, target="cuda")
def _idiv(a, b):
    if isinstance(a, types.Integer) and isinstance(b, types.Integer):
        return lambda a, b: ptx.divide_u32(int32(a), int32(b))  # 64-bit division is a subroutine
    return None

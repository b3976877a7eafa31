"""The CUDA side of the shared primitives: the functions that the compiler inlines, run on instructions' stand-ins."""

from __future__ import annotations

import numpy as np
import pytest
from emulator import rebuilt
from numba.core import types

from nbattn.cuda_kernels import primitives


def test_tanh_is_accurate_everywhere():
    tanh = rebuilt(primitives._tanh(types.float32))
    x = np.concatenate([np.linspace(-12, 12, 4001), 10.0 ** np.arange(-30, 2), [0.0, 0.6, -0.6, 88.0, -1e30]])
    x = x.astype(np.float32)
    with np.errstate(all="ignore"):
        got = np.array([tanh(v) for v in x], np.float64)
    want = np.tanh(x.astype(np.float64))
    assert np.abs(got - want)[x == 0].max() == 0
    relative = np.abs(got[x != 0] / want[x != 0] - 1)
    assert relative.max() < 4e-7
    assert np.isnan(tanh(np.float32(np.nan)))


def test_exp2_and_division():
    exp2 = rebuilt(primitives._exp2(types.float32))
    assert exp2(np.float32(-np.inf)) == 0
    assert exp2(np.float32(3)) == 8
    idiv = rebuilt(primitives._idiv(types.int64, types.int32))
    assert [idiv(a, b) for a, b in ((7, 2), (0, 5), (2**31 - 1, 1), (61, 61))] == [3, 0, 2**31 - 1, 1]


@pytest.mark.parametrize("overload", [primitives._exp2, primitives._tanh])
def test_primitives_refuse_what_they_do_not_serve(overload):
    assert overload(types.int32) is None

"""The shared score arithmetic: plain Python, compiled CPU code and float64 agree, edges included; CUDA compiles it."""

import inspect
import math
from itertools import product

import numpy as np
import pytest
from numba import njit, vectorize

import nbattn.cpu_ref.primitives  # noqa: F401 - registers the CPU versions of exp2 and tanh
from nbattn import scoring

INF = math.inf
PRIMITIVES = ("exp2", "tanh")
NUMBERS = (0.0, -0.0, 0.3, -1.5, 7.0, 88.0, -126.5, 1e4, -1e30, INF, -INF, math.nan)
STATES = (-INF, -1e30, -60_000.0, -3.0, 0.0, 2.5, 1e4, math.nan)
GRIDS = {
    "exp2": [(x,) for x in NUMBERS if not x > 127],  # no caller has more: scores are below their maximum
    "tanh": [(x,) for x in NUMBERS],
    "soft_cap": list(product((0.0, -3.0, 100.0, -1e30, INF, -INF, math.nan), (0.5, 1.0, 30.0))),
    "alibi_bias": list(product((0.5, 0.00390625), (-300.0, 0.0, 12.0))),
    "rotate_pair": [(1.0, 2.0, 0.0, 1.0), (3.0, -4.0, 0.6, 0.8), (math.nan, 1.0, 1.0, 0.0)],
    "shift": [(x,) for x in NUMBERS if x != -INF],
    "state_weight": [(s, m) for s, m in product(STATES, (-60_000.0, 0.0, 1e4)) if not s > m],
    "sigmoid": [(x,) for x in NUMBERS],
    "close_row": list(product(STATES, (0.0, 1.0, 3.0, math.nan), (-INF, 0.0, 14_426.95))),
}


def functions():
    return {n: x for n, x in vars(scoring).items() if inspect.isfunction(x) and x.__module__ == scoring.__name__}


def of_arity(function, count):
    """Return a function of `count` arguments that calls another, whose overload Numba inlines there."""
    return {
        1: lambda a: function(a),
        2: lambda a, b: function(a, b),
        3: lambda a, b, c: function(a, b, c),
        4: lambda a, b, c, d: function(a, b, c, d),
    }[count]


def as_floats(x):
    return np.array(x if isinstance(x, tuple) else (x,), np.float64)


def test_every_function_has_a_grid():
    assert set(GRIDS) == set(functions())


@pytest.mark.parametrize("name", GRIDS)
@pytest.mark.parametrize(("number", "tolerance"), [(np.float32, 4e-7), (np.float64, 1e-14)])
def test_compiled_code_is_the_python(name, number, tolerance):
    function = getattr(scoring, name)
    compiled = njit(error_model="numpy")(of_arity(function, len(GRIDS[name][0])))
    for args in GRIDS[name]:
        typed = [number(x) for x in args]
        with np.errstate(all="ignore"):
            want = as_floats(function(*map(np.float64, typed)))
        got = as_floats(compiled(*typed))
        if number is np.float32:
            with np.errstate(all="ignore"):
                want = want.astype(np.float32).astype(np.float64)
        np.testing.assert_allclose(got, want, rtol=tolerance, atol=2 * tolerance, err_msg=f"{name}{args}")


def relative_error(compiled, exact, x):
    with np.errstate(all="ignore"):
        want = exact(x.astype(np.float64))
        error = np.abs(compiled(x).astype(np.float64) - want) / np.abs(want)
    return float(np.max(error, initial=0, where=want != 0))


def test_exp2_in_float32_is_accurate():
    compiled = vectorize(["float32(float32)"])(lambda x: scoring.exp2(x))
    x = np.linspace(-126, 126.9, 2_000_001, dtype=np.float32)
    assert relative_error(compiled, np.exp2, x) < 3e-7
    assert (compiled(np.arange(-126, 128, dtype=np.float32)) == np.exp2(np.arange(-126.0, 128.0))).all()
    with np.errstate(all="ignore"):
        edges = compiled(np.array([-INF, -1e30, -127, np.nan], np.float32))
    assert (edges[:3] == 0).all()
    assert np.isnan(edges[3])
    assert compiled(np.float32(0)) == 1  # else the running sum would be scaled at each block


def test_exp2_never_falls_where_it_should_rise():
    compiled = vectorize(["float32(float32)"])(lambda x: scoring.exp2(x))
    x = np.sort(np.random.default_rng(0).uniform(-30, 1, 500_000).astype(np.float32))
    y = compiled(x).astype(np.float64)
    assert (y[1:] >= y[:-1] * (1 - 3e-7)).all()


def test_tanh_in_float32_is_accurate():
    compiled = vectorize(["float32(float32)"])(lambda x: scoring.tanh(x))
    small = np.geomspace(1e-30, 1, 500_001, dtype=np.float32)
    x = np.concatenate([-small, small, np.linspace(-20, 20, 500_001, dtype=np.float32)])
    assert relative_error(compiled, np.tanh, x) < 3e-7
    with np.errstate(all="ignore"):
        edges = compiled(np.array([-INF, INF, 0, -1e30, 1e30, np.nan], np.float32))
    assert edges[:5].tolist() == [-1, 1, 0, -1, 1]
    assert np.isnan(edges[5])


@pytest.mark.parametrize(("name", "exact"), [("exp2", np.exp2), ("tanh", np.tanh)])
def test_primitives_in_float64_are_accurate(name, exact):
    function = getattr(scoring, name)
    compiled = vectorize(["float64(float64)"])(lambda x: function(x))
    assert relative_error(compiled, exact, np.random.default_rng(1).uniform(-100, 20, 10_000)) < 1e-15


def test_an_empty_row_closes_to_nothing():
    assert scoring.close_row(-INF, 0.0, -INF) == (0.0, -INF)
    factor, lse = scoring.close_row(-INF, 0.0, 3.0)  # the sink alone
    assert (factor, lse) == (0.0, 3.0)
    factor, lse = scoring.close_row(2.0, 4.0, -INF)
    assert (factor, lse) == (0.25, 4.0)
    factor, lse = scoring.close_row(0.0, 1.0, 0.0)
    assert (factor, lse) == (0.5, 1.0)


def test_no_finite_number_competes_with_a_score():
    assert scoring.state_weight(-INF, scoring.shift(-INF)) == 0
    assert scoring.state_weight(-1e30, scoring.shift(-1e30)) == 1
    for number in (np.float32, np.float64):
        lowest = np.finfo(number).min
        for shift in (scoring.shift, njit(lambda m: scoring.shift(m))):
            assert shift(lowest) == shift(number(-INF)) == lowest


@pytest.mark.parametrize("name", [name for name in GRIDS if name not in PRIMITIVES])
def test_compiles_for_cuda_without_a_gpu(name):
    cuda = pytest.importorskip("numba.cuda")
    pytest.importorskip("cuda.bindings")
    import nbattn.cuda_kernels.primitives  # noqa: F401
    from nbattn.cuda_kernels.compile import _device_of

    kinds = (cuda.types.float32,) * len(GRIDS[name][0])
    with _device_of((9, 0)):
        ptx, _ = cuda.compile(getattr(scoring, name), kinds, device=True, abi="numba", cc=(9, 0), output="ptx")
    text = ptx.decode() if isinstance(ptx, bytes) else ptx
    assert ".target sm_90" in text
    assert "call" not in text.replace("callseq", "")  # all is inlined: exp2 is an instruction, not a library's function


def test_cuda_gets_its_own_exp2_after_a_call_on_the_cpu():
    """Numba's inliner once put the CPU's polynomial into kernels compiled after a call on the CPU."""
    cuda = pytest.importorskip("numba.cuda")
    pytest.importorskip("cuda.bindings")
    import nbattn.cuda_kernels.primitives  # noqa: F401
    from nbattn.cuda_kernels.compile import _device_of

    @njit
    def on_the_cpu(m, d_sum, sink):
        return scoring.close_row(m, d_sum, sink)

    on_the_cpu(np.float32(1), np.float32(1), np.float32(1))
    kinds = (cuda.types.float32,) * 3
    with _device_of((9, 0)):
        ptx, _ = cuda.compile(scoring.close_row, kinds, device=True, abi="numba", cc=(9, 0), output="ptx")
    text = ptx.decode() if isinstance(ptx, bytes) else ptx
    assert text.count("ex2.approx") == 2

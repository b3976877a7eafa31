"""The shared integers: plain Python, the CPU's compiled code and a definition by hand agree; CUDA compiles them too."""

import inspect
from itertools import product

import numpy as np
import pytest
from numba import njit

import nbattn.cpu_ref.primitives  # noqa: F401 - registers the CPU version of idiv
from nbattn import indexing
from nbattn.indexing import kv_head_of, mapped_page, page_and_slot, selected_token, visible_keys

FAR = 2**31 - 1


def functions_of(module):
    """Return the functions a module defines, by name."""
    return {name: x for name, x in vars(module).items() if inspect.isfunction(x) and x.__module__ == module.__name__}


def of_arity(function, count):
    """Return a function of `count` arguments that calls another, whose overload Numba inlines there."""
    return {
        2: lambda a, b: function(a, b),
        6: lambda a, b, c, d, e, f: function(a, b, c, d, e, f),
    }[count]


GRIDS = {
    "idiv": [(a, b) for a in (0, 1, 15, 16, 17, 63, 64, FAR) for b in (1, 2, 3, 16, 61, 64)],
    "kv_head_of": [(h, g) for h in range(40) for g in (1, 2, 3, 5, 8, 16, 32)],
    "page_and_slot": [(key, size) for key in (0, 1, 3, 4, 60, 61, 62, 4095, FAR) for size in (1, 2, 4, 16, 61, 4096)],
    "visible_keys": list(
        product((-3, -1, 0, 1, 7, 8, 63), (0, 1, 5, 9), (0, 1, 7, 8), (False, True), (-1, 0, 1, 6), (0, 1, 3, 64))
    ),
    "selected_token": [(t, n) for t in (-(2**31), -1, 0, 1, 6, 7, FAR) for n in (0, 1, 7)],
    "mapped_page": [(t, n) for t in (-(2**31), -1, 0, 1, 6, 7, FAR) for n in (0, 1, 7)],
}


def test_every_function_has_a_grid():
    assert set(GRIDS) == set(functions_of(indexing))


@pytest.mark.parametrize("name", GRIDS)
@pytest.mark.parametrize("integer", [np.int32, np.int64])
def test_compiled_code_is_the_python(name, integer):
    function = getattr(indexing, name)
    compiled = njit(of_arity(function, len(GRIDS[name][0])))
    for args in GRIDS[name]:
        typed = [a if isinstance(a, bool) else integer(a) for a in args]
        assert compiled(*typed) == function(*args), args


def test_visible_keys_is_its_definition():
    for position, key_position, kv_len, causal, window, chunk in GRIDS["visible_keys"]:
        j = key_position + np.arange(kv_len)
        sees = np.ones(kv_len, bool)
        if causal:
            sees &= j <= position
        if window >= 0:
            sees &= j >= position - window
        if chunk:
            sees &= (j // chunk == position // chunk) & (position >= 0)
        first, end = visible_keys(position, key_position, kv_len, causal, window, chunk)
        assert 0 <= first <= end <= kv_len
        assert np.flatnonzero(sees).tolist() == list(range(first, end))


def test_pages_and_heads_are_their_definitions():
    for key, size in GRIDS["page_and_slot"]:
        assert page_and_slot(key, size) == divmod(key, size)
    for head, group in GRIDS["kv_head_of"]:
        assert kv_head_of(head, group) == head // group


def test_what_is_kept_is_in_range():
    for token, kv_len in GRIDS["selected_token"]:
        assert selected_token(token, kv_len) == mapped_page(token, kv_len) == (token in range(kv_len))


@pytest.mark.parametrize("name", GRIDS)
def test_compiles_for_cuda_without_a_gpu(name):
    cuda = pytest.importorskip("numba.cuda")
    pytest.importorskip("cuda.bindings")
    import nbattn.cuda_kernels.primitives  # noqa: F401
    from nbattn.cuda_kernels.compile import _device_of

    number = cuda.types.int32
    kinds = [cuda.types.boolean if isinstance(a, bool) else number for a in GRIDS[name][0]]
    function = getattr(indexing, name)
    if name == "idiv":  # a bare name that only its overload serves
        function = kv_head_of
    with _device_of((9, 0)):
        ptx, _ = cuda.compile(function, tuple(kinds), device=True, abi="numba", cc=(9, 0), output="ptx")
    text = ptx.decode() if isinstance(ptx, bytes) else ptx
    assert ".func" in text
    assert ".target sm_90" in text

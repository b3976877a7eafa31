"""Small calls of the engine's functions, and what a refused one must leave alone."""

from __future__ import annotations

import numpy as np
import pytest

from nbattn import Level, PagedKV

ROWS, HEADS, KV_HEADS, DIM, DIM_VO = 5, 4, 2, 8, 6
SENTINEL = 7.0


def zeros(*shape, dtype=np.float32):
    return np.zeros(shape, dtype)


def cache(requests=2, slots=9, heads=KV_HEADS, dim=DIM, dim_vo=DIM_VO, dtype=np.float32, lens=None):
    lens = np.arange(slots, slots - requests, -1) if lens is None else np.array(lens)
    return PagedKV.from_slots(
        zeros(requests, slots, heads, dim, dtype=dtype), zeros(requests, slots, heads, dim_vo, dtype=dtype), lens
    )


def ints(*values, dtype=np.int32):
    return np.array(values, dtype)


def read_only(x):
    x.flags.writeable = False
    return x


def results(dtype=np.float32):
    return {"out": np.full((ROWS, HEADS, DIM_VO), SENTINEL, dtype), "lse": np.full((ROWS, HEADS), SENTINEL, np.float32)}


def refuse(function, arguments, error, message):
    """Call a function that must refuse its arguments by name and leave `out` and `lse` alone."""
    with pytest.raises(error, match="^" + message) as caught:
        function(**arguments)
    assert type(caught.value) is error
    for name in ("out", "lse"):
        x = arguments.get(name)
        if isinstance(x, np.ndarray):
            assert (x == SENTINEL).all(), f"{name} was written"


def paged(**changes):
    q, offsets = zeros(ROWS, HEADS, DIM), ints(0, 3, 5)
    return {"q": q, "kv": cache(), "qo_indptr": offsets, "return_lse": True, **results(), **changes}


def gathering(**changes):
    lists = {"token_indices": zeros(ROWS, 3, dtype=np.int32), "counts": np.full(ROWS, 3, np.int32)}
    return {**paged(), **lists, **changes}


def cascading(*, second=None, levels=None, **changes):
    upper = Level(cache(1, slots=4), ints(0, 5))
    last = second or Level(cache(), ints(0, 3, 5), causal=True)
    arguments = paged(levels=[upper, last] if levels is None else levels, **changes)
    return {name: value for name, value in arguments.items() if name not in ("kv", "qo_indptr")}

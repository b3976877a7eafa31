"""Results that share memory with what is read, or with each other, are refused; views that share nothing are not."""

import math

import numpy as np
import pytest
from engine_calls import DIM, HEADS, KV_HEADS, ROWS, SENTINEL, cascading, gathering, ints, paged, refuse, zeros

import nbattn
from nbattn import ContractError, Level, PagedKV


def sharing(shape, size=4096):
    """Return an array of a shape, all `SENTINEL`, and the memory that it begins."""
    memory = np.full(size, SENTINEL, np.float32)
    return memory[: math.prod(shape)].reshape(shape), memory


OUT, LSE = (ROWS, HEADS, DIM), (ROWS, HEADS)


@pytest.mark.parametrize("arguments", [paged, gathering, cascading], ids=["paged", "gather", "cascade"])
@pytest.mark.parametrize("result", ["out", "lse"])
@pytest.mark.parametrize("read", ["q", "k", "v", "sinks", "lse"])
def test_results_that_share_memory_are_refused(arguments, result, read):
    if result == read:
        return
    functions = {paged: nbattn.paged_attention, gathering: nbattn.gather_attention, cascading: nbattn.cascade_attention}
    given, memory = sharing(OUT if result == "out" else LSE)
    inside = memory[3:]
    k = zeros(2, 9, KV_HEADS, DIM)
    kv = PagedKV.from_slots(k, k, ints(9, 8))
    changes = {"out": None, "lse": None, result: given}
    if read in ("k", "v"):
        pages = inside[: k.size].reshape(k.shape)
        pair = (pages, k) if read == "k" else (k, pages)
        kv = PagedKV.from_slots(*pair, ints(9, 8))
    elif read == "q":
        changes["q"] = inside[: math.prod(OUT)].reshape(OUT)
    elif read == "sinks":
        changes["sinks"] = inside[:HEADS]
    else:
        changes["lse"] = inside[: math.prod(LSE)].reshape(LSE)
    changes |= {"levels": [Level(kv, ints(0, 3, 5))]} if arguments is cascading else {"kv": kv}
    name = {"k": "k, v", "v": "k, v"}.get(read, read)
    culprit, other = ("lse", "out") if read == "lse" else (result, name)
    refuse(
        functions[arguments],
        arguments(**changes),
        ContractError,
        f"{culprit}: must share no memory with {other}, got overlap",
    )


def test_views_of_one_memory_that_share_nothing_are_served():
    rows = np.random.default_rng(0).normal(size=(ROWS, 3 * HEADS, DIM)).astype(np.float32)
    k = rows[:, 2 * HEADS :].reshape(1, ROWS, HEADS, DIM)
    q, out, kv = rows[:, :HEADS], rows[:, HEADS : 2 * HEADS], PagedKV.from_slots(k, k, ints(ROWS))
    want = nbattn.paged_attention(q, kv, ints(0, ROWS))
    np.testing.assert_array_equal(nbattn.paged_attention(q, kv, ints(0, ROWS), out=out), want)
    assert np.array_equal(out, want)

"""Positions that int32 sums cannot hold are refused by name; the largest that are accepted give the right values."""

import tracemalloc
from fractions import Fraction

import numpy as np
import pytest

import nbattn
from nbattn import oracle, testing


@pytest.fixture
def problem():
    rng = np.random.default_rng(0)
    k, v = rng.standard_normal((2, 2, 8, 1, 4)).astype(np.float32)
    kv = nbattn.PagedKV.from_slots(k, v, np.array([8, 3], np.int32))
    return rng.standard_normal((2, 2, 4)).astype(np.float32), kv


@pytest.mark.parametrize("name", ["q_positions", "kv_start"])
@pytest.mark.parametrize("far", [2**30 + 1, 2**31 - 3, 2**40])
def test_far_positions_are_refused(problem, name, far):
    q, kv = problem
    out = np.full((2, 2, 4), 7, np.float32)
    with pytest.raises(nbattn.ContractError, match=rf"{name}\[1\]: must be a position within 1073741824, got {far}"):
        nbattn.paged_attention(q, kv, out=out, **{name: np.array([0, far])})
    with pytest.raises(nbattn.ContractError, match=rf"{name}\[1\]"):
        nbattn.plan(kv, num_qo_heads=2, **{name: np.array([0, far])})
    assert (out == 7).all()


def long(keys, requests=1):
    """Return a cache of one page that holds any number of keys, since a table may name it again and again."""
    k, blocks = np.ones((1, 2**22, 1, 2), np.int8), -(-keys // 2**22)
    return nbattn.PagedKV.from_block_table(k, k, np.zeros((requests, blocks), np.int32), np.full(requests, keys))


@pytest.mark.parametrize("rows", [None, np.array([0, 1, 3])])
def test_keys_that_end_beyond_int32_are_refused(rows):
    kv, fits = long(2**30 + 4, 2), 2**30 - 5
    q, one = np.ones((2 if rows is None else 3, 1, 2), np.float32), {"k_scale": 1.0, "v_scale": 1.0, "window_left": 3}
    for start in ([0, 0], [7, fits]):
        assert (nbattn.paged_attention(q, kv, rows, kv_start=np.array(start), **one) == 1).all()
    out = np.full(q.shape, 7, np.float32)
    rule = rf"^kv_start\[1\]: must be at most {fits}, so that its {2**30 + 4} keys end within int32, got {fits + 1}\.$"
    for positions in (None, np.arange(len(q))):
        places = {"kv_start": np.array([0, fits + 1]), "q_positions": positions}
        with pytest.raises(nbattn.ContractError, match=rule):
            nbattn.paged_attention(q, kv, rows, out=out, **places, **one)
        with pytest.raises(nbattn.ContractError, match=rule):
            nbattn.plan(kv, rows, num_qo_heads=1, **places)
    assert (out == 7).all()


def test_an_update_whose_keys_end_beyond_int32_leaves_the_plan_alone():
    kv, far, q = long(5), long(2**30 + 4), np.ones((1, 1, 2), np.float32)
    one = {"k_scale": 1.0, "v_scale": 1.0, "window_left": 3}
    plan = nbattn.plan(kv, num_qo_heads=1, window_left=3, max_kv_len=2**30 + 4)
    with pytest.raises(nbattn.ContractError, match=r"^kv_start\[0\]: must be at most"):
        plan.update(far, kv_start=np.array([2**30]))
    assert (nbattn.paged_attention(q, kv, plan=plan, **one) == 1).all()
    with pytest.raises(nbattn.ContractError, match=r"^plan: must be made for this call's lengths"):
        nbattn.paged_attention(q, far, plan=plan, **one)


def test_levels_whose_keys_no_int32_counts_are_refused():
    levels = [nbattn.Level(long(2**30)), nbattn.Level(long(2**30), causal=True)]
    one = {"k_scale": 1.0, "v_scale": 1.0, "window_left": 3}
    with pytest.raises(nbattn.ContractError, match=rf"^levels: must hold at most {2**31 - 1} keys .*, got {2**31} in"):
        nbattn.cascade_attention(np.ones((1, 1, 2), np.float32), levels, **one)
    levels[1] = nbattn.Level(long(2**30 - 1), causal=True)
    assert (nbattn.cascade_attention(np.ones((1, 1, 2), np.float32), levels, **one) == 1).all()


@pytest.mark.parametrize("name", ["window_left", "chunk_size", "split_size"])
def test_a_size_that_no_int32_holds_is_the_largest(problem, name):
    q, kv = problem
    for size in (2**31, 2**70):
        plan = nbattn.plan(kv, num_qo_heads=2, **{name: size})
        got = nbattn.paged_attention(q, kv, plan=plan, **{name: size})
        np.testing.assert_array_equal(got, nbattn.paged_attention(q, kv))
        if name != "split_size":
            flat = oracle.paged_attention(q, kv)
            np.testing.assert_array_equal(oracle.paged_attention(q, kv, **{name: size}), flat)


@pytest.mark.parametrize("options", [{}, {"window_left": 2}, {"chunk_size": 5}])
@pytest.mark.parametrize("name", ["q_positions", "kv_start"])
def test_the_farthest_positions_are_right(problem, name, options):
    q, kv = problem
    options = {**options, name: np.array([3, 2**30])}
    expected = testing.expect(oracle.paged_attention, q, kv, **options)
    testing.assert_close(nbattn.paged_attention(q, kv, return_lse=True, **options), expected)


@pytest.mark.parametrize(
    "places",
    [
        {"kv_start": [3, 2**30]},
        {"kv_start": [2**30 - 5, 2**30]},
        {"q_positions": [3, 2**30]},
        {"q_positions": [-(2**30), 2**30], "causal": False},
        {"q_positions": [2**30, 7], "kv_start": [2**30 - 8, 0]},
    ],
)
def test_far_positions_rotate_right_and_take_no_memory(problem, places):
    q, kv = problem
    options = {name: np.array(x) if isinstance(x, list) else x for name, x in places.items()}
    expected = testing.expect(oracle.paged_attention, q, kv, rope=oracle.Rope(50.0), **options)
    tracemalloc.start()
    got = nbattn.paged_attention(q, kv, rope=nbattn.Rope(50.0), return_lse=True, **options)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    testing.assert_close(got, expected)
    assert peak < 2**30  # planes up to the farthest position would take 16 GB


def test_rotation_depends_on_distances_alone(problem):
    q, kv = problem
    here, there = (
        nbattn.paged_attention(q, kv, rope=nbattn.Rope(), kv_start=np.array(start), q_positions=np.array(start) + 7)
        for start in ([0, 0], [12345, 2**29])
    )
    np.testing.assert_array_equal(here, there)


def test_the_oracle_is_exact_to_float64_wherever_a_request_starts(problem):
    q, kv = problem
    q, k, v = (x.astype(np.float64) for x in (q, kv.k, kv.v))
    wide = nbattn.PagedKV.from_slots(k, v, kv.kv_lens)
    options = {"kv_start": np.array([2**29 + 3, 2**30])}
    expected = testing.expect(oracle.paged_attention, q, wide, rope=oracle.Rope(10.0), **options)
    got = nbattn.paged_attention(q, wide, rope=nbattn.Rope(10.0), return_lse=True, **options)
    testing.assert_close(got, expected)


def test_numbers_of_any_real_type_rotate_alike(problem):
    q, kv = problem
    ropes = (
        nbattn.Rope(100.0, 1.5),
        nbattn.Rope(Fraction(100), Fraction(3, 2)),
        nbattn.Rope(np.int8(100), np.float16(1.5)),
    )
    results = [nbattn.paged_attention(q, kv, rope=rope) for rope in ropes]
    assert len({x.tobytes() for x in results}) == 1

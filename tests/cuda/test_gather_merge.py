"""Gather attention, merges, query preparation and append, run in the emulator through the public functions."""

from __future__ import annotations

import numpy as np
import pytest
from small_problems import numbers, poisoned_cache

import nbattn
from nbattn import oracle, testing
from nbattn.cuda_kernels import append_kv, calls, shapes
from nbattn.paged import attend
from nbattn.problem import Preparation

GATHERS = [
    # kv_lens, width, counts, q dtype, cache dtype, (qo, kv) heads, (qk, vo) sizes, split
    ((9, 0, 30), 40, (40, 3, 17), "bfloat16", None, (4, 2), (64, 64), None),
    ((9, 12, 30), 200, (190, 0, 500), "bfloat16", None, (4, 2), (64, 64), 64),
    ((9, 40), 20, (20, -3), "float16", "float8_e4m3fn", (20, 1), (128, 96), None),
    ((40,), 70, (70,), "bfloat16", None, (2, 1), (256, 192), None),
    ((9, 40), 20, (20, 3), "float32", None, (3, 1), (5, 9), None),
    ((9, 40), 200, (200, 3), "float32", "int8", (2, 2), (16, 16), 64),
]


@pytest.mark.parametrize("case", GATHERS, ids=str)
def test_gather_matches_the_oracle(case, lent):
    kv_lens, width, counts, q_dtype, cache, heads, dims, split = case
    rng = np.random.default_rng(11)
    dtype = cache or q_dtype
    kv = poisoned_cache(rng, list(kv_lens), heads=heads[1], dims=dims, dtype=dtype, unmapped=True)
    q = numbers(rng, (len(kv_lens), heads[0], dims[0]), q_dtype)
    lists = rng.integers(-2, max(kv_lens) + 3, (len(kv_lens), width)).astype(np.int32)
    options = {
        "sinks": rng.standard_normal(heads[0]).astype(np.float32),
        "output_gate": rng.standard_normal((len(kv_lens), heads[0])).astype(np.float32),
        "k_scale": 0.02 if dtype == "int8" else (rng.random((heads[1], dims[0])) + 0.5).astype(np.float32),
        "v_scale": 0.02 if dtype == "int8" else None,
    }
    counts = np.array(counts, np.int32)
    result = nbattn.gather_attention(q, kv, lists, counts, return_lse=True, split_size=split, **options)
    expected = testing.expect(oracle.gather_attention, q, kv, lists, counts, **options)
    testing.assert_close(result, expected)
    plain = q_dtype == "float32"
    assert ("gather_plain" if plain else "gather_attention") in {family for family, _ in lent.launched}


@pytest.mark.parametrize(("dtype", "dim"), [("float32", 128), ("bfloat16", 40), ("float16", 7)])
@pytest.mark.parametrize("states", [0, 1, 3, 35])
def test_merge_states_matches_the_oracle(dtype, dim, states, lent):
    rng = np.random.default_rng(states)
    v = numbers(rng, (3, states, 2, dim), dtype)
    s = rng.standard_normal((3, 2, states)).astype(np.float32).transpose(0, 2, 1)  # strided
    if states == 3:
        s[0, 1], v[0, 1] = -np.inf, np.nan  # contributes nothing
        s[1] = -np.inf
        s[2, 0, 0], s[2, 1, 1] = np.nan, np.inf  # makes the row NaN
    for base in ("2", "e"):
        result = nbattn.merge_states(v, s, lse_base=base)
        testing.assert_close(result, testing.expect(oracle.merge_states, v, s, lse_base=base))


@pytest.mark.parametrize(("rows", "dim", "states"), [(1, 8, 300), (2, 32, 200)])
def test_few_rows_of_many_states(rows, dim, states, lent):
    """More groups of lanes would fit into a block than share a row."""
    v, s = np.full((rows, states, 3, dim), 0.3, np.float32), np.full((rows, states, 3), -1.7, np.float32)
    testing.assert_close(nbattn.merge_states(v, s), testing.expect(oracle.merge_states, v, s))


@pytest.mark.parametrize("dim", [13, 260])  # the second: more than a warp's chunks
def test_bits_of_a_planned_merge_do_not_depend_on_how_the_work_is_shared(dim, lent, monkeypatch):
    rng = np.random.default_rng(6)
    v, s = numbers(rng, (80, 1, dim), "float32"), (4 * rng.standard_normal((80, 1))).astype(np.float32)
    indptr, slots = np.array([0, 70, 75, 75, 75], np.int32), rng.permutation(80)[:75].astype(np.int32)
    lent.planned += (np.array([2, 0, 1, -1], np.int32), indptr, slots)
    lists = tuple(lent.address(x) for x in lent.planned)
    results = []
    for shape in (shapes.merge_shape(True), shapes.merge_shape(True)._replace(blocks=1 / 256)):
        monkeypatch.setattr(shapes, "merge_shape", lambda listed, shape=shape: shape)
        out, lse = np.full((3, 1, dim), 9, np.float32), np.full((3, 1), 9, np.float32)
        options = calls.AttentionOptions(scale=1.0)
        result = calls.result_values(lent, (0, 0), out, lse, options)
        states = lent.address(v), lent.address(s)
        lent.launch(*calls.merge_kernel(lent, lists, states, (4, 70, 1, 1), result, out))
        results.append((out, lse))
    for one, other in zip(*results, strict=True):
        np.testing.assert_array_equal(one, other)
    for row, chosen in zip((2, 0, 1), np.split(slots, indptr[1:3]), strict=True):
        expected = testing.expect(oracle.merge_states, v[chosen][None], s[chosen][None])
        testing.assert_close(tuple(x[row][None] for x in results[0]), expected)


@pytest.mark.parametrize(
    ("lse_dtype", "dim"), [(np.float32, 24), (np.float32, 264), (np.float32, 20), (np.float64, 24)]
)
def test_merge_of_two_and_in_place(lse_dtype, dim, lent):
    rng = np.random.default_rng(2)
    v_a, v_b = numbers(rng, (5, 3, dim), "bfloat16"), numbers(rng, (5, 3, dim), "bfloat16")
    s_a, s_b = rng.standard_normal((2, 5, 3)).astype(lse_dtype)
    s_a[0], v_a[0] = -np.inf, np.nan
    s_b[1], v_b[1] = -np.inf, np.nan
    s_a[2] = s_b[2] = -np.inf
    expected = testing.expect(oracle.merge_state, v_a, s_a, v_b, s_b)
    testing.assert_close(nbattn.merge_state(v_a, s_a, v_b, s_b), expected)
    mask = np.array([1, 0, 1, 1, 0])
    before_v, before_s = v_a.copy(), s_a.copy()
    nbattn.merge_state_in_place(v_a, s_a, v_b, s_b, mask)
    kept = mask == 0
    np.testing.assert_array_equal(v_a[kept].view(np.uint16), before_v[kept].view(np.uint16))
    np.testing.assert_array_equal(s_a[kept], before_s[kept])
    assert np.abs(v_a[~kept].astype(float) - expected.out[~kept]).max() <= expected.out_budget
    assert {family for family, _ in lent.launched} == {"merge_pair"}


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("rope_dim", [0, 16, 40])
def test_prepare_query(interleaved, rope_dim, lent):
    rng = np.random.default_rng(4)
    q = numbers(rng, (4, 6, 40), "float16")
    gain, eps = rng.random(40).astype(np.float32), 1e-3
    k_scale = rng.random((2, 40)).astype(np.float32)
    positions = np.array([5, 2, 6, 4], np.int32)
    angle = rng.random((5, max(rope_dim // 2, 1))).astype(np.float32)  # planes of positions 2 ... 6
    planes = (np.cos(angle), np.sin(angle)) if rope_dim else None
    out = np.full(q.shape, np.nan, np.float32)
    calls.run_prepare(
        lent, q, out, 4, 3, gain=gain, eps=eps, planes=planes, positions=lent.address(positions), origin=2,
        interleaved=interleaved, k_scale=k_scale,
    )  # fmt: skip
    x = q.astype(np.float64)
    x = x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * gain
    if rope_dim:
        first = slice(0, rope_dim, 2) if interleaved else slice(0, rope_dim // 2)
        second = slice(1, rope_dim, 2) if interleaved else slice(rope_dim // 2, rope_dim)
        for row in range(4):
            c, s = np.cos(angle[positions[row] - 2]), np.sin(angle[positions[row] - 2])
            a, b = x[row, :, first].copy(), x[row, :, second].copy()
            x[row, :, first], x[row, :, second] = a * c - b * s, a * s + b * c
    np.testing.assert_allclose(out, x * np.repeat(k_scale, 3, 0), rtol=2e-6, atol=2e-6)
    if rope_dim:
        positions[:] = 6, 7, 1, -3  # the planes are of 2 ... 6
        calls.run_prepare(lent, q, out, 4, 3, planes=planes, positions=lent.address(positions), origin=2)
        assert (np.isnan(out).all((1, 2)) == [False, True, True, True]).all()
        assert np.isfinite(out[0]).all()


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("group", [1, 24])
def test_a_position_before_the_planes_shows_where_a_row_keeps_keys(dtype, group, lent):
    """Negative rotary positions that the host does not see: row 0 of three stands before the first of two keys."""
    rng = np.random.default_rng(5)
    k, v, q = (numbers(rng, shape, dtype) for shape in ((1, 4, 1, 16), (1, 4, 1, 16), (3, group, 16)))
    kv = nbattn.PagedKV.from_slots(k, v, np.array([2], np.int32))
    angle = rng.random((4, 8)).astype(np.float32)
    prepare = Preparation(np.cos(angle), np.sin(angle), np.array([-1, -2, 3], np.int32))
    out, lse = attend(q, [nbattn.Level(kv, np.array([0, 3]), True)], prepare=prepare, return_lse=True)
    assert (out[0] == 0).all()
    assert (lse[0] == -np.inf).all()
    assert np.isnan(out[1]).all()
    assert np.isnan(lse[1]).all()
    assert np.isfinite(out[2]).all()
    assert lent.launched[0][0] == "prepare_query"


@pytest.mark.parametrize(("dtype", "dims"), [("bfloat16", (64, 32)), ("float8_e4m3fn", (5, 6)), ("float32", (3, 3))])
def test_append(dtype, dims, lent):
    rng = np.random.default_rng(9)
    kv = poisoned_cache(rng, [7, 5], dims=dims, dtype=dtype, unmapped=True)
    key, value = numbers(rng, (6, 2, dims[0]), dtype), numbers(rng, (6, 2, dims[1]), dtype)
    requests = np.array([0, 1, 1, 0, 2, 0], np.int32)
    positions = np.array([6, 4, 0, 7, 0, -1], np.int32)  # the last three break a rule
    expected_k, expected_v = kv.k.copy(), kv.v.copy()
    for i in range(3):
        page = kv.kv_indices[kv.kv_indptr[requests[i]] + positions[i] // kv.page_size]
        if page >= 0:
            expected_k[page, positions[i] % kv.page_size] = key[i]
            expected_v[page, positions[i] % kv.page_size] = value[i]
    append_kv.append_kv(key, value, requests, positions, kv, device=lent)
    for got, want in ((kv.k, expected_k), (kv.v, expected_v)):
        assert (np.ascontiguousarray(got).view(np.uint8) == np.ascontiguousarray(want).view(np.uint8)).all()

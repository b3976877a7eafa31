"""Merges of attention states: any shape, dtype and strides, empty and broken states, and updates in place."""

import math

import ml_dtypes
import numpy as np
import pytest

import nbattn
from nbattn import oracle, testing

BF16 = np.dtype(ml_dtypes.bfloat16)
INF, NAN = np.inf, np.nan


def states(rows=4, count=3, heads=5, dim=24, dtype=np.float32, s_dtype=np.float32, seed=0):
    rng = np.random.default_rng(seed)
    v = rng.normal(size=(rows, count, heads, dim)).astype(dtype)
    return v, (3 * rng.normal(size=(rows, count, heads))).astype(s_dtype)


def single(v, s):
    """Return one row's state of one head: v [1, 1, len(v)], s [1, 1]."""
    return np.array(v, np.float32).reshape(1, 1, -1), np.array(s, np.float32).reshape(1, 1)


@pytest.mark.parametrize("case", testing.CASES["merge"], ids=lambda case: case.id)
def test_cases(case):
    result = testing.run_case(case)
    assert result.passed, str(result)


@pytest.mark.parametrize("number", range(0, 200, 20))
def test_random_cases(number):
    rng = np.random.default_rng(number)
    for seed in range(number, number + 20):
        case = testing.MergeCase(
            seed=seed,
            form=str(rng.choice(["states", "state", "in_place", "masked"])),
            rows=int(rng.integers(0, 9)),
            states=int(rng.integers(0, 12)),
            heads=int(rng.integers(1, 9)),
            head_dim=int(rng.integers(1, 70)),
            lse_base=str(rng.choice(["2", "e"])),
            s_dtype=str(rng.choice(["float32", "float64"])),
        )
        result = testing.run_case(case)
        assert result.passed, str(result)


@pytest.mark.parametrize("s_dtype", [np.float32, np.float64])
@pytest.mark.parametrize("dtype", [np.float16, BF16, np.float32, np.float64])
def test_dtypes_are_kept_and_values_rounded_once(dtype, s_dtype):
    v, s = states(dtype=dtype, s_dtype=s_dtype)
    for base in "2e":
        merged, merged_s = nbattn.merge_states(v, s, lse_base=base)
        assert (merged.dtype, merged_s.dtype) == (v.dtype, s.dtype)
        testing.assert_close((merged, merged_s), testing.expect(oracle.merge_states, v, s, lse_base=base))
        a, b, c, d = v[:, 0], s[:, 0], v[:, 1], s[:, 1]
        expected = testing.expect(oracle.merge_state, a, b, c, d, lse_base=base)
        testing.assert_close(nbattn.merge_state(a, b, c, d, lse_base=base), expected)
        v_own, s_own = a.copy(), b.copy()
        assert nbattn.merge_state_in_place(v_own, s_own, c, d, lse_base=base) is None
        testing.assert_close((v_own, s_own), expected)


def test_one_rounding_at_the_end():
    v = np.array([1.0, 1.0 + 2**-8, 1.0 + 2**-7]).astype(BF16).reshape(1, 3, 1, 1)  # the second is a tie: 1.0
    v[0, 1] = 1.0078125
    merged, _ = nbattn.merge_states(v, np.zeros((1, 3, 1), np.float32))
    exact = v.astype(np.float64).mean()
    assert merged.item() == np.float64(exact).astype(BF16)


def test_bases_differ_in_value_and_in_nothing_else():
    v, s = states()
    two, natural = nbattn.merge_states(v, s), nbattn.merge_states(v, s * np.float32(math.log(2)), lse_base="e")
    np.testing.assert_allclose(natural[0], two[0], atol=1e-5)
    np.testing.assert_allclose(natural[1], two[1] * math.log(2), atol=1e-5)
    assert np.abs(nbattn.merge_states(v, s, lse_base="e")[0] - two[0]).max() > 1e-3


def test_merging_is_commutative_associative_and_has_an_identity():
    v, s = states(count=4)
    whole = nbattn.merge_states(v, s)
    for order in ([3, 1, 0, 2], [2, 3, 1, 0]):
        for a, b in zip(nbattn.merge_states(v[:, order], s[:, order]), whole, strict=True):
            np.testing.assert_allclose(a, b, atol=2e-6)
    left, right = nbattn.merge_states(v[:, :3], s[:, :3]), (v[:, 3], s[:, 3])
    for a, b in zip(nbattn.merge_state(*left, *right), whole, strict=True):
        np.testing.assert_allclose(a, b, atol=2e-6)
    nothing = np.full_like(v[:, 0], NAN), np.full_like(s[:, 0], -INF)
    for sides in ((left, nothing), (nothing, left)):
        for a, b in zip(nbattn.merge_state(*sides[0], *sides[1]), left, strict=True):
            np.testing.assert_array_equal(a, b)


def test_r5_and_bases_must_not_be_mixed():
    v, s = np.array([0, 1], np.float32).reshape(1, 2, 1, 1), np.log2([[[1], [3]]]).astype(np.float32)
    merged, lse = nbattn.merge_states(v, s)
    np.testing.assert_allclose([merged.item(), lse.item()], [0.75, 2], rtol=1e-6)
    merged, lse = nbattn.merge_states(v, s * np.float32(math.log(2)), lse_base="e")
    np.testing.assert_allclose([merged.item(), lse.item()], [0.75, 2 * math.log(2)], rtol=1e-6)


@pytest.mark.parametrize("form", ["state", "states", "in_place"])
@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        pytest.param(([5, 5], -INF), ([7, 7], -INF), ([0, 0], -INF), id="r6-both-empty"),
        pytest.param(([NAN, INF], -INF), ([NAN, -INF], -INF), ([0, 0], -INF), id="r6-both-empty-with-nan"),
        pytest.param(([NAN, INF], -INF), ([7, 8], 2.5), ([7, 8], 2.5), id="r6-left-empty"),
        pytest.param(([7, 8], 2.5), ([NAN, -INF], -INF), ([7, 8], 2.5), id="r6-right-empty"),
        pytest.param(([3, 3], -INF), ([7, 7], -60000), ([7, 7], -60000), id="r7-far-below-zero"),
        pytest.param(([1, 1], NAN), ([7, 7], 2), ([NAN, NAN], NAN), id="nan"),
        pytest.param(([1, 1], NAN), ([7, 7], -INF), ([NAN, NAN], NAN), id="nan-beside-empty"),
        pytest.param(([7, 7], 1), ([1, 1], INF), ([NAN, NAN], NAN), id="+inf"),
        pytest.param(([7, 7], INF), ([1, 1], INF), ([NAN, NAN], NAN), id="+inf-twice"),
        pytest.param(([7, 7], -INF), ([1, 1], INF), ([NAN, NAN], NAN), id="+inf-beside-empty"),
        pytest.param(([7, 3], 3e38), ([1, 1], 3e38), ([4, 2], 3e38), id="largest"),
        pytest.param(([7, 3], 3e38), ([1, 1], -3e38), ([7, 3], 3e38), id="far-apart"),
        pytest.param(([INF, 1], 0), ([1, 1], 0), ([INF, 1], 1), id="infinite-value"),
    ],
)
def test_special_states(form, a, b, expected):
    (v_a, s_a), (v_b, s_b) = single(*a), single(*b)
    if form == "state":
        v, s = nbattn.merge_state(v_a, s_a, v_b, s_b)
    elif form == "states":
        v, s = nbattn.merge_states(np.stack([v_a, v_b], 1), np.stack([s_a, s_b], 1))
    else:
        v, s = v_a, s_a
        nbattn.merge_state_in_place(v, s, v_b, s_b)
    np.testing.assert_array_equal(v.ravel(), np.array(expected[0], np.float32))
    np.testing.assert_array_equal(s.ravel(), np.array(expected[1], np.float32))


def test_a_broken_row_does_not_reach_its_neighbours():
    v, s = states(rows=3, heads=2)
    expected = nbattn.merge_states(v, s)
    s[1, 0, 1] = NAN
    broken = nbattn.merge_states(v, s)
    assert np.isnan(broken[0][1, 1]).all()
    assert np.isnan(broken[1][1, 1])
    for a, b in zip(broken, expected, strict=True):
        a[1, 1] = b[1, 1]
        np.testing.assert_array_equal(a, b)


def test_zero_states_rows_and_heads():
    v, s = nbattn.merge_states(np.zeros((3, 0, 2, 8), np.float32), np.zeros((3, 0, 2), np.float32))
    assert (v == 0).all()
    assert v.shape == (3, 2, 8)
    assert (s == -INF).all()
    assert s.shape == (3, 2)
    for shape in ((0, 2, 3, 8), (2, 2, 0, 8)):
        v, s = nbattn.merge_states(np.zeros(shape, np.float32), np.zeros(shape[:3], np.float32))
        assert v.shape == (shape[0], *shape[2:])
        assert s.shape == (shape[0], shape[2])


def test_one_state_is_returned_as_it_is():
    v, s = states(count=1)
    merged = nbattn.merge_states(v, s)
    np.testing.assert_array_equal(merged[0], v[:, 0])
    np.testing.assert_array_equal(merged[1], s[:, 0])


def test_r9_strided_views():
    big_v, big_s = states(rows=6, count=8, heads=10, dim=24)
    for rows, heads in ((slice(None, None, 2), slice(None, None, 3)), (slice(None, None, -1), slice(None, None, -2))):
        v, s = big_v[rows, 1::3, heads], big_s[rows, 1::3, heads]
        expected = nbattn.merge_states(v.copy(), s.copy())
        for a, b in zip(nbattn.merge_states(v, s), expected, strict=True):
            np.testing.assert_array_equal(a, b)
    s = big_s[:, 0, ::2]
    v = np.ascontiguousarray(big_v[:, 0].swapaxes(0, 1)).swapaxes(0, 1)[:, ::2]  # head-major memory
    other = big_v[:, 1, ::2], big_s.transpose(2, 1, 0)[::2, 1].T
    expected = nbattn.merge_state(*(x.copy() for x in (v, s, *other)))
    for a, b in zip(nbattn.merge_state(v, s, *other), expected, strict=True):
        np.testing.assert_array_equal(a, b)
    before = big_v.copy(), big_s.copy()
    nbattn.merge_state_in_place(big_v[:, 0, ::2], s, *other)
    np.testing.assert_array_equal(big_v[:, 0, ::2], expected[0])
    np.testing.assert_array_equal(s, expected[1])
    for now, old in zip((big_v, big_s), before, strict=True):  # nothing beside the views has changed
        now[:, 0, ::2] = old[:, 0, ::2]
        np.testing.assert_array_equal(now, old)


@pytest.mark.parametrize("heads", [1, 65, 200])
@pytest.mark.parametrize("dim", [1, 40, 80, 96, 192])
def test_r11_heads_and_head_sizes(heads, dim):
    v, s = states(rows=2, count=2, heads=heads, dim=dim)
    testing.assert_close(nbattn.merge_states(v, s), testing.expect(oracle.merge_states, v, s))
    a = v[:, 0], s[:, 0], v[:, 1], s[:, 1]
    testing.assert_close(nbattn.merge_state(*a), testing.expect(oracle.merge_state, *a))


def test_many_rows_on_all_threads():
    v, s = states(rows=3000, count=4, heads=8, dim=64)
    testing.assert_close(nbattn.merge_states(v, s), testing.expect(oracle.merge_states, v, s))


def test_r13_in_place_with_float64_then_float16_lse():
    v, s = states(count=2, s_dtype=np.float64)
    expected = oracle.merge_state(v[:, 0], s[:, 0], v[:, 1], s[:, 1])
    v_own, s_own = v[:, 0].copy(), s[:, 0].copy()
    nbattn.merge_state_in_place(v_own, s_own, v[:, 1], s[:, 1])
    np.testing.assert_allclose(v_own, expected[0], atol=1e-6)
    np.testing.assert_allclose(s_own, expected[1], atol=1e-6)
    narrow = s.astype(np.float16)
    with pytest.raises(nbattn.ContractError, match="s: must be float32 or float64, got float16"):
        nbattn.merge_state_in_place(v_own, narrow[:, 0], v[:, 1], narrow[:, 1])


@pytest.mark.parametrize("dtype", [bool, np.int8, np.uint8, np.int32, np.int64])
def test_masked_rows_stay(dtype):
    v, s = states(rows=6, count=2)
    mask = np.array([1, 0, 1, 0, 0, 1]).astype(dtype)
    v_own, s_own = v[:, 0].copy(), s[:, 0].copy()
    nbattn.merge_state_in_place(v_own, s_own, v[:, 1], s[:, 1], mask=mask)
    merged = nbattn.merge_state(v[:, 0], s[:, 0], v[:, 1], s[:, 1])
    for now, new, old in zip((v_own, s_own), merged, (v[:, 0], s[:, 0]), strict=True):
        np.testing.assert_array_equal(now, np.where(mask.reshape(-1, *[1] * (now.ndim - 1)), new, old))


def test_any_number_but_zero_in_a_mask_merges():
    v, s = states(rows=3, count=2)
    v_own, s_own = v[:, 0].copy(), s[:, 0].copy()
    nbattn.merge_state_in_place(v_own, s_own, v[:, 1], s[:, 1], mask=np.array([-4, 256, 2], np.int32)[::-1])
    np.testing.assert_array_equal(v_own, nbattn.merge_state(v[:, 0], s[:, 0], v[:, 1], s[:, 1])[0])
    before = v_own.copy()
    nbattn.merge_state_in_place(v_own, s_own, v[:, 1], s[:, 1], mask=np.zeros(3, bool))
    np.testing.assert_array_equal(v_own, before)


def test_inputs_are_not_written_and_a_state_merges_with_itself():
    v, s = states(count=2)
    kept = v.copy(), s.copy()
    nbattn.merge_states(v, s)
    nbattn.merge_state(v[:, 0], s[:, 0], v[:, 1], s[:, 1])
    np.testing.assert_array_equal(v, kept[0])
    np.testing.assert_array_equal(s, kept[1])
    own = v[:, 0].copy(), s[:, 0].copy()
    nbattn.merge_state_in_place(*own, *own)  # the other state is the same memory
    np.testing.assert_allclose(own[0], v[:, 0], atol=1e-6)
    np.testing.assert_allclose(own[1], s[:, 0] + 1, atol=1e-6)


def frozen(x):
    x = x.copy()
    x.flags.writeable = False
    return x


BAD_STATES = [
    ("v", lambda x: x[0], "v: must have 3 dimensions, got shape (5, 24)"),
    ("v", lambda x: x.astype(np.int32), "v: must be one of float16, bfloat16, float32, float64, got int32"),
    ("v", lambda x: x.tolist(), "v: must be a NumPy or CuPy array, got list"),
    ("v", lambda x: np.repeat(x, 2, axis=2)[..., ::2], "v: the last axis must be contiguous"),
    ("v", frozen, "v: must be writable, got a read-only array"),
    ("s", frozen, "s: must be writable, got a read-only array"),
    ("s", lambda x: x[:3], "s: must be [4, 5] (v without its last axis), got (3, 5)"),
    ("s", lambda x: x.astype(np.float16), "s: must be float32 or float64, got float16"),
    ("s", lambda x: x.astype(np.int64), "s: must be float32 or float64, got int64"),
    ("s", lambda x: x.astype(np.float64), "s_other: must be like s, float64 of shape [4, 5], got float32"),
    ("v_other", lambda x: x.astype(np.float64), "v_other: must be like v, float32 of shape [4, 5, 24], got float64"),
    ("v_other", lambda x: x[:, :4], "s_other: must be [4, 4]"),
    ("s_other", lambda x: x.astype(np.float64), "s_other: must be like s, float32 of shape [4, 5], got float64"),
    ("mask", lambda _: np.ones(3, bool), "mask: must be bool or int [4], got bool of shape (3,)"),
    ("mask", lambda _: np.ones(4, np.float32), "mask: must be bool or int [4], got float32"),
    ("mask", lambda _: [1, 1, 1, 1], "mask: must be a NumPy or CuPy array, got list"),
    ("lse_base", lambda _: 2, 'lse_base: must be "2" or "e", got 2'),
]


@pytest.mark.parametrize(("name", "change", "rule"), BAD_STATES)
def test_what_in_place_refuses_and_it_writes_nothing(name, change, rule):
    v, s = states(count=2)
    arguments = {"v": v[:, 0].copy(), "s": s[:, 0].copy(), "v_other": v[:, 1], "s_other": s[:, 1]}
    own = arguments["v"], arguments["s"]
    arguments[name] = change(arguments.get(name))
    with pytest.raises(nbattn.ContractError) as error:
        nbattn.merge_state_in_place(**arguments)
    assert str(error.value).startswith(rule)
    np.testing.assert_array_equal(own[0], v[:, 0])
    np.testing.assert_array_equal(own[1], s[:, 0])


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        (lambda v, s: (v[:, 0], s), "v: must have 4 dimensions"),
        (lambda v, s: (v.swapaxes(1, 2), s), "s: must be [4, 5, 3] (v without its last axis), got (4, 3, 5)"),
        (lambda v, s: (v, s.astype(BF16)), "s: must be float32 or float64, got bfloat16"),
    ],
)
def test_what_merge_states_refuses(change, rule):
    with pytest.raises(nbattn.ContractError) as error:
        nbattn.merge_states(*change(*states()))
    assert str(error.value).startswith(rule)


def test_merge_state_names_its_own_arguments():
    v, s = states(count=2)
    a = v[:, 0], s[:, 0], v[:, 1], s[:, 1]
    for number, rule in ((0, "v_a: must"), (1, "s_a: must"), (2, "v_b: must"), (3, "s_b: must")):
        bad = [x[:2] if i == number else x for i, x in enumerate(a)]
        if number in (0, 2):
            bad[number] = a[number][0]
        with pytest.raises(nbattn.ContractError) as error:
            nbattn.merge_state(*bad)
        assert str(error.value).startswith(rule)
    with pytest.raises(nbattn.ContractError, match="lse_base"):
        nbattn.merge_state(*a, lse_base="10")


@pytest.mark.parametrize("dtype", [BF16, np.float32, np.float64])
@pytest.mark.parametrize("count", [15, 16, 17, 33, 300])
def test_many_states_with_empty_and_broken_ones(count, dtype):
    rows, heads, dim = 3, 18, 70  # more heads than lanes, a row that is no whole number of vectors
    v, s = states(rows, count, heads, dim, dtype)
    s[:, ::7], v[:, ::7] = -INF, NAN
    s[1, 1, 17] = NAN
    merged = nbattn.merge_states(v, s)
    testing.assert_close(merged, testing.expect(oracle.merge_states, v, s))
    assert np.isnan(merged[0][1, 17]).all()
    assert np.isfinite(merged[0][1, :17]).all()


def test_equal_weights_of_many_states_do_not_drift():
    v, s = states(rows=1, count=4096, heads=1, dim=8)
    v, s = v + np.float32(3), np.zeros_like(s)
    s[:, 0] = 1.7  # so that the equal weights are not powers of two
    testing.assert_close(nbattn.merge_states(v, s), testing.expect(oracle.merge_states, v, s))


@pytest.mark.parametrize("s_dtype", [np.float32, np.float64])
def test_log_sum_exps_are_as_exact_as_their_dtype(s_dtype):
    """Of float64 values: weights and sums are float64 then."""
    v, s = states(rows=500, count=2, heads=9, dim=1, dtype=np.float64, s_dtype=s_dtype)
    for base in "2e":
        _, merged = nbattn.merge_states(v, s, lse_base=base)
        _, expected = oracle.merge_states(v, s, lse_base=base)
        np.testing.assert_allclose(merged, expected.astype(s_dtype), rtol=2 * np.finfo(s_dtype).eps, atol=1e-15)


def test_results_do_not_depend_on_the_number_of_threads():
    v, s = states(rows=3000, count=3, heads=8, dim=40)
    results, before = [], nbattn.get_num_threads()
    try:
        for threads in (1, 2, 5):
            nbattn.set_num_threads(threads)
            results.append(nbattn.merge_states(v, s))
    finally:
        nbattn.set_num_threads(before)
    for other in results[1:]:
        for a, b in zip(other, results[0], strict=True):
            np.testing.assert_array_equal(a, b)

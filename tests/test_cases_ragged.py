"""Ragged batches, states and their merges, untouched rows."""

import math

import numpy as np
import pytest

import nbattn
from nbattn import ContractError, oracle, testing
from nbattn.testing import PATHS, Handmade, assert_close, expect, zero_logit_tokens
from nbattn.testing.paths import flat, paged_kv

every_path = pytest.mark.parametrize("path", PATHS.values(), ids=PATHS)
both_bases = pytest.mark.parametrize("lse_base", ["2", "e"])


def state(v: float, s: float, shape=(1, 1, 4)):
    """Return a state of constant values."""
    return np.full(shape, v, np.float32), np.full(shape[:2], s, np.float32)


def random_state(rng, *shape: int, dtype=np.float32):
    """Return v of a shape and s of the same without its last axis."""
    return rng.normal(size=shape).astype(dtype), (3 * rng.normal(size=shape[:-1])).astype(np.float32)


def merges(*states, lse_base="2"):
    """Return the merge of two states by all three functions, which must agree bit for bit."""
    (v_a, s_a), (v_b, s_b) = states
    first = nbattn.merge_state(v_a, s_a, v_b, s_b, lse_base=lse_base)
    v, s = v_a.copy(), s_a.copy()
    assert nbattn.merge_state_in_place(v, s, v_b, s_b, lse_base=lse_base) is None
    stacked = nbattn.merge_states(np.stack([v_a, v_b], 1), np.stack([s_a, s_b], 1), lse_base=lse_base)
    for x, y, z in zip(first, (v, s), stacked, strict=True):
        np.testing.assert_array_equal(x, y)
        np.testing.assert_array_equal(x, z)
    return first


@every_path
def test_r1_cross_attention_sees_every_key(path):
    out, lse = path(Handmade([zero_logit_tokens(3)], options={"causal": False}))
    assert_close((out, lse), (np.full((1, 1, 3), 1 / 3), np.full((1, 1), math.log2(3))), budget=1e-6)


@every_path
def test_r2_empty_requests_beside_a_full_one(path):
    if path is PATHS["merged"]:
        pytest.skip("writes no given out")
    values = np.array([1.0, 3.0, 5.0])
    requests = [zero_logit_tokens(n, values[:n]) for n in (0, 3, 0)]
    options = {}
    if path not in (PATHS["many_rows"], PATHS["many_rows_split"]):  # their out has more heads
        options = {"out": np.full((3, 1, 1), np.nan, np.float32), "lse": np.full((3, 1), np.nan, np.float32)}
    out, lse = path(Handmade(requests, options=options))
    assert out is options.get("out", out)
    assert_close(out.ravel(), np.array([0, 3, 0]), budget=1e-6)
    assert_close(lse.ravel(), np.array([-np.inf, math.log2(3), -np.inf]), budget=1e-6)


@every_path
def test_r3_stale_values_never_show(path):
    requests = [zero_logit_tokens(n, 1.0) for n in (1, 3)]
    out, _ = path(Handmade(requests))  # the paths keep NaN in every other slot
    assert_close(out, np.ones((2, 1, 1)), budget=1e-6)
    slots = np.full((2, 8, 1, 64), 99, np.float32)
    k = np.zeros_like(slots)
    for row, length in enumerate((1, 3)):
        slots[row, :length] = 1
    kv = nbattn.PagedKV.from_slots(k, slots, np.array([1, 3]))
    assert_close(nbattn.paged_attention(np.zeros((2, 1, 64), np.float32), kv), np.ones((2, 1, 64)), budget=1e-6)


@pytest.mark.parametrize("split_size", [None, 1, 2])
@pytest.mark.parametrize("group", [1, 20])
def test_r4_rows_past_the_last_offset_stay_untouched(split_size, group):
    requests = [zero_logit_tokens(n, 2.0) for n in (3, 5)]
    q = np.zeros((6, group, 64), np.float32)
    q[4:] = np.nan
    kv, offsets = paged_kv(requests, 4), np.array([0, 3, 4], np.int32)
    out, lse = np.full((6, group, 1), 7, np.float32), np.full((6, group), 7, np.float32)
    nbattn.paged_attention(q, kv, offsets, split_size=split_size, out=out, lse=lse)
    assert_close(out[:4], np.full((4, group, 1), 2), budget=1e-6)
    assert (out[4:] == 7).all()
    assert (lse[4:] == 7).all()
    assert np.isfinite(lse).all()
    indices = np.zeros((6, 2), np.int32)
    counts = np.full(6, 2, np.int32)
    nbattn.gather_attention(q, kv, indices, counts, offsets, split_size=split_size, out=out, lse=lse)
    assert_close(out[:4], np.full((4, group, 1), 2), budget=1e-6)
    assert (out[4:] == 7).all()
    assert (lse[4:] == 7).all()
    for result in (
        nbattn.paged_attention(q, kv, offsets, return_lse=True),
        nbattn.gather_attention(q, kv, indices, counts, offsets, return_lse=True),
    ):
        assert (result[0][4:] == 0).all()
        assert (result[1][4:] == -np.inf).all()


@both_bases
def test_r5_states_of_one_and_three_keys(lse_base):
    unit = 1 if lse_base == "2" else math.log(2)
    v, s = merges(state(0, 0), state(1, math.log2(3) * unit), lse_base=lse_base)
    assert_close((v, s), (np.full((1, 1, 4), 0.75), np.full((1, 1), 2 * unit)), budget=1e-6)


@both_bases
def test_r5_parts_of_attention_merge_to_the_whole(lse_base):
    whole = zero_logit_tokens(4, np.array([0.0, 1.0, 1.0, 1.0]))
    options = {"causal": False, "lse_base": lse_base}
    parts = [flat(Handmade([(whole[0][cut], whole[1][cut])], options=options)) for cut in (slice(0, 1), slice(1, 4))]
    v, s = merges(*parts, lse_base=lse_base)
    assert_close((v, s), flat(Handmade([whole], options=options)), budget=1e-6)
    assert v.item() == pytest.approx(0.75)


@pytest.mark.parametrize("junk", [5.0, np.nan, np.inf, -np.inf])
def test_r6_an_absent_side_contributes_nothing(junk):
    for states in ((state(junk, -np.inf), state(2, 1.5)), (state(2, 1.5), state(junk, -np.inf))):
        v, s = merges(*states)
        assert (v == 2).all()
        assert (s == 1.5).all()
    v, s = merges(state(junk, -np.inf), state(junk, -np.inf))
    assert (v == 0).all()
    assert (s == -np.inf).all()


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_r6_an_lse_that_is_no_number_makes_the_row_nan(bad):
    v, s = merges(state(1, bad), state(2, 0))
    assert np.isnan(v).all()
    assert np.isnan(s).all()


def test_r7_a_very_low_lse_beats_none():
    for states in ((state(1, -np.inf), state(7, -60_000)), (state(7, -60_000), state(1, -np.inf))):
        v, s = merges(*states)
        assert (v == 7).all()
        assert (s == -60_000).all()


@pytest.mark.parametrize(("lowest", "number"), [(-1e30, np.float32), (-3.4028e38, np.float32), (-1e300, np.float64)])
def test_r7_equal_states_of_a_very_low_lse(lowest, number):
    low = np.array([[number(lowest)]])
    v, s = merges(*((state(v, 0)[0].astype(number), low) for v in (1, 3)))
    assert (v == 2).all()
    assert s.item() == pytest.approx(lowest)


def test_r8_a_plan_with_room_to_spare():
    rng = np.random.default_rng(8)
    request = tuple(rng.normal(size=(2, 5, 2, 64)).astype(np.float32))
    q = rng.normal(size=(1, 6, 64)).astype(np.float32)
    kv = paged_kv([request], 2)
    plan = nbattn.plan(kv, num_qo_heads=6, split_size=1, max_kv_len=8)
    assert plan.capacity["work items"] >= 8
    got = nbattn.paged_attention(q, kv, plan=plan, return_lse=True)
    assert_close(got, nbattn.paged_attention(q, kv, return_lse=True), budget=2e-6)
    assert_close(got, expect(oracle.paged_attention, q, kv))


@pytest.mark.parametrize("function", ["merge_state", "merge_state_in_place", "merge_states"])
def test_r9_strided_states(function):
    rng = np.random.default_rng(9)
    big_s = (3 * rng.normal(size=(4, 10, 2))).astype(np.float32)
    big_v = rng.normal(size=(5, 4, 2, 16)).astype(np.float32)
    v_a, v_b = big_v.transpose(1, 0, 2, 3)[:, :, 0], big_v.transpose(1, 0, 2, 3)[:, :, 1]  # [4, 5, 16]
    s_a, s_b = big_s[:, ::2, 0], big_s[:, 1::2, 1]
    want = oracle.merge_state(v_a, s_a, v_b, s_b)
    if function == "merge_states":
        got = nbattn.merge_states(big_v.transpose(1, 2, 0, 3), np.stack([s_a, s_b], 1))
    elif function == "merge_state":
        got = nbattn.merge_state(v_a, s_a, v_b, s_b)
    else:
        beside = big_s[:, 1::2].copy(), big_v[:, :, 1].copy()
        nbattn.merge_state_in_place(v_a, s_a, v_b, s_b)
        got = v_a, s_a
        np.testing.assert_array_equal(big_s[:, 1::2], beside[0])
        np.testing.assert_array_equal(big_v[:, :, 1], beside[1])
    assert_close(got, want, budget=2e-6)


@every_path
def test_r10_the_lse_of_every_row_and_head(path):
    rng = np.random.default_rng(10)
    request = tuple(rng.normal(size=(2, 7, 5, 64)).astype(np.float32))
    q = rng.normal(size=(3, 5, 64)).astype(np.float32)
    _, lse = path(Handmade([request], q, (3,)))
    logits = np.einsum("rhd,khd->rhk", q.astype(float), request[0].astype(float)) / 8
    logits[0, :, 5:] = logits[1, :, 6:] = -np.inf
    assert lse.shape == (3, 5)
    assert_close(lse, np.log2(np.exp(logits).sum(-1)), budget=3e-6)


@pytest.mark.parametrize(("heads", "dim"), [(65, 64), (200, 8), (3, 1), (5, 40), (2, 80), (2, 96), (4, 192)])
@both_bases
def test_r11_any_number_of_heads_and_any_head_size(heads, dim, lse_base):
    rng = np.random.default_rng(11)
    states = [random_state(rng, 3, heads, dim) for _ in range(2)]
    got = merges(*states, lse_base=lse_base)
    assert_close(got, expect(oracle.merge_state, *states[0], *states[1], lse_base=lse_base))


@pytest.mark.parametrize("count", [0, 1, 2, 16, 17, 64, 300])
def test_r11_any_number_of_states(count):
    v, s = np.full((2, count, 3, 8), 0.3, np.float32), np.zeros((2, count, 3), np.float32)
    if count:
        s[:, 1:] = -1.7  # equal weights, whose roundings do not average out
    assert_close(nbattn.merge_states(v, s), expect(oracle.merge_states, v, s))


@pytest.mark.parametrize("split_size", [None, 1])
def test_r12_empty_suffixes_under_a_shared_prefix(split_size):
    prefix, two = zero_logit_tokens(4, 1.0), zero_logit_tokens(2, 7.0)
    suffixes = [zero_logit_tokens(0, 1.0), two, zero_logit_tokens(0, 1.0)]
    levels = [
        nbattn.Level(paged_kv([prefix], 4), np.array([0, 3])),
        nbattn.Level(paged_kv(suffixes, 4), np.arange(4), causal=True),
    ]
    out, lse = nbattn.cascade_attention(
        np.zeros((3, 1, 64), np.float32), levels, split_size=split_size, return_lse=True
    )
    assert_close(out.ravel(), np.array([1, 3, 1]), budget=1e-6)
    assert_close(lse.ravel(), np.log2([4, 6, 4]), budget=1e-6)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_r13_an_lse_is_updated_in_its_own_dtype(dtype):
    (v, s), (v_b, s_b) = state(0, 0), state(1, math.log2(3))
    s, s_b = s.astype(dtype), s_b.astype(dtype)
    nbattn.merge_state_in_place(v, s, v_b, s_b)
    assert s.item() == pytest.approx(2, abs=3e-7)
    assert v.max() == pytest.approx(0.75)


def test_r13_an_lse_in_float16_is_refused():
    (v, s), (v_b, _) = state(0, 0), state(1, math.log2(3))
    half = s.astype(np.float16)
    with pytest.raises(ContractError, match=r"^s: must be float32 or float64, got float16"):
        nbattn.merge_state_in_place(v, half, v_b, half)
    assert (v == 0).all()
    assert (half == 0).all()


@pytest.mark.parametrize(
    "mask", [np.array([True, False, True]), np.array([1, 0, -7], np.int32), np.array([9, 0, 1], np.uint8)]
)
def test_in_place_masks_leave_rows_alone(mask):
    rng = np.random.default_rng(1)
    (v, s), other = random_state(rng, 3, 2, 8), random_state(rng, 3, 2, 8)
    before = v.copy(), s.copy()
    nbattn.merge_state_in_place(v, s, *other, mask=mask)
    np.testing.assert_array_equal(v[1], before[0][1])
    np.testing.assert_array_equal(s[1], before[1][1])
    want = oracle.merge_state(*before, *other)
    assert_close((v[::2], s[::2]), (want[0][::2], want[1][::2]), budget=2e-6)


@pytest.mark.parametrize("split_size", [None, 1])
def test_r14_a_level_may_start_at_a_later_row(split_size):
    upper, last = zero_logit_tokens(4, 5.0), [zero_logit_tokens(n, 1.0) for n in (2, 4, 0)]
    levels = [
        nbattn.Level(paged_kv([upper], 4), np.array([1, 3])),
        nbattn.Level(paged_kv(last, 4), np.arange(4), causal=True),
    ]
    out, lse = nbattn.cascade_attention(
        np.zeros((3, 1, 64), np.float32), levels, split_size=split_size, return_lse=True
    )
    assert_close(out.ravel(), np.array([1, 3, 5]), budget=1e-6)
    assert_close(lse.ravel(), np.log2([2, 8, 4]), budget=1e-6)


def test_r14_rows_of_no_level_stay_untouched():
    upper, last = zero_logit_tokens(4, 5.0), [zero_logit_tokens(4, 1.0)]
    levels = [
        nbattn.Level(paged_kv([upper], 4), np.array([1, 3])),
        nbattn.Level(paged_kv(last, 4), np.array([2, 3]), causal=True),
    ]
    q = np.zeros((5, 1, 64), np.float32)
    out, lse = np.full((5, 1, 1), 9, np.float32), np.full((5, 1), 9, np.float32)
    nbattn.cascade_attention(q, levels, out=out, lse=lse)
    assert_close(out.ravel(), np.array([9, 5, 3, 9, 9]), budget=1e-6)
    assert_close(lse.ravel(), np.array([9, 2, 3, 9, 9]), budget=1e-6)


def test_no_requests_and_no_rows_give_empty_results():
    kv = paged_kv([zero_logit_tokens(3)], 4)
    out, lse = nbattn.paged_attention(np.zeros((0, 2, 64), np.float32), kv, np.array([0, 0]), return_lse=True)
    assert (out.shape, lse.shape) == ((0, 2, 3), (0, 2))
    result = testing.run_case(testing.PagedCase(kv_lens=(), qo_lens=(), extra_rows=2, group_size=3))
    assert result.passed, result

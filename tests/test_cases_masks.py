"""Soft cap, masks, empty rows and logits far from zero, through every path that knows the rule."""

import math

import numpy as np
import pytest

from nbattn import oracle
from nbattn.testing import PATHS, RANGE_PATHS, Handmade, assert_close, scatter, zero_logit_tokens

every_path = pytest.mark.parametrize("path", PATHS.values(), ids=PATHS)
range_paths = pytest.mark.parametrize("path", RANGE_PATHS.values(), ids=RANGE_PATHS)

LOG2E = 1 / math.log(2)


def query(first: float, head_dim: int = 64) -> np.ndarray:
    """Return one row with one head that is `first` in its first number."""
    q = np.zeros((1, 1, head_dim), np.float32)
    q[0, 0, 0] = first
    return q


def tokens(first: list[float], v=None, head_dim: int = 64):
    """Return tokens whose keys have the given first numbers."""
    k, v = zero_logit_tokens(len(first), v, head_dim=head_dim)
    k[:, 0, 0] = first
    return k, v


@range_paths
def test_m1_the_cap_comes_before_the_mask(path):
    mask = np.array([0, -np.inf], np.float32)
    out, lse = path(Handmade([zero_logit_tokens(2)], options={"attn_mask": mask, "logits_soft_cap": 0.5}))
    assert_close((out, lse), (np.array([[[1, 0]]]), np.zeros((1, 1))))


@range_paths
def test_m1_a_finite_bias_is_added_after_the_cap(path):
    mask = np.array([0, math.log(3)], np.float32)
    out, lse = path(Handmade([zero_logit_tokens(2)], options={"attn_mask": mask, "logits_soft_cap": 0.5}))
    assert_close((out, lse), (np.array([[[0.25, 0.75]]]), np.full((1, 1), 2.0)), budget=1e-6)


@every_path
def test_m2_a_row_that_masks_everything_is_zero(path):
    mask = np.array([[True] * 3, [False] * 3])[None, None]
    out, lse = path(Handmade([zero_logit_tokens(3)], qo_lens=(2,), options={"attn_mask": mask, "causal": False}))
    assert_close(out, np.array([[[1 / 3] * 3], [[0] * 3]]), budget=1e-6)
    assert_close(lse, np.array([[math.log2(3)], [-np.inf]]), budget=1e-6)


@every_path
def test_m3_past_and_one_new_token(path):
    out, _ = path(Handmade([zero_logit_tokens(3)]))
    assert_close(out, np.full((1, 1, 3), 1 / 3), budget=1e-6)


@range_paths
@pytest.mark.parametrize("as_bias", [False, True])
def test_m4_a_mask_of_rank_three_has_no_batch_axis(path, as_bias):
    mask = np.array([[[True, True, True]], [[True, False, False]]])  # [heads, 1, keys]
    mask = np.where(mask, 0, -np.inf).astype(np.float16) if as_bias else mask
    q = np.zeros((2, 2, 64), np.float32)
    out, _ = path(Handmade([zero_logit_tokens(3), zero_logit_tokens(3)], q, options={"attn_mask": mask}))
    assert_close(out, np.array([[[1 / 3] * 3, [1, 0, 0]]] * 2), budget=1e-6)


@every_path
def test_m5_more_rows_than_keys(path):
    out, lse = path(Handmade([zero_logit_tokens(2, np.array([1.0, 3.0]))], qo_lens=(3,)))
    assert_close(out.ravel(), np.array([0, 1, 2]), budget=1e-6)
    assert_close(lse.ravel(), np.array([-np.inf, 0, 1]), budget=1e-6)


@every_path
def test_m6_causal_is_bottom_right(path):
    out, _ = path(Handmade([zero_logit_tokens(4)]))
    assert_close(out, np.full((1, 1, 4), 0.25), budget=1e-6)


@every_path
def test_m7_a_masked_key_never_competes_with_low_logits(path):
    mask = np.array([True, False])
    request = tokens([1.0, 1.0])
    out, lse = path(Handmade([request], query(-160_000), options={"attn_mask": mask}))
    assert_close(out, np.array([[[1, 0]]]))
    assert lse.item() == pytest.approx(-20_000 * LOG2E, rel=1e-6)
    assert lse.item() == pytest.approx(-28853.901, abs=4e-3)


@every_path
@pytest.mark.parametrize("logit", [-6e4, -1e30])
def test_m7_logits_far_below_zero_are_ordinary(path, logit):
    out, lse = path(Handmade([tokens([1.0] * 3)], query(8 * logit)))
    assert out.sum() == pytest.approx(1, abs=1e-6)
    assert (out > 0.2).all()  # a state's float32 lse of -1e30 cannot say how many keys it stands for
    assert lse.item() == pytest.approx(logit * LOG2E + math.log2(3), rel=1e-6)
    if logit > -1e5:
        assert_close(out, np.full((1, 1, 3), 1 / 3), budget=8 * 2.0**-24 * (1 - logit))


@every_path
def test_m7_float64_logits_may_lie_below_all_float32(path):
    request = tuple(x.astype(np.float64) for x in tokens([1.0] * 3))
    out, lse = path(Handmade([request], query(1).astype(np.float64) * -8e100))
    assert out.sum() == pytest.approx(1, abs=1e-12)
    assert (out > 0.2).all()
    assert lse.item() == pytest.approx(-1e100 * LOG2E, rel=1e-12)


@range_paths
def test_m8_the_cap_applies_to_scaled_logits(path):
    out, _ = path(Handmade([tokens([1.0, 0.0])], query(32), options={"logits_soft_cap": 1.0}))
    weight = 1 / (1 + math.exp(-math.tanh(4)))
    assert_close(out, np.array([[[weight, 1 - weight]]]), budget=1e-6)
    assert_close(out, np.array([[[0.731, 0.269]]]), budget=5e-4)


@every_path
def test_m9_a_large_negative_dot_product(path):
    k = np.full((2, 1, 128), -64, np.float32)
    out, lse = path(Handmade([(k, zero_logit_tokens(2, 1.0)[1])], -k[:1]))
    assert_close(out, np.ones((1, 1, 1)), budget=1e-6)
    assert lse.item() == pytest.approx(-66854.859, rel=1e-6)


@every_path
def test_m10_rows_before_the_only_key_keep_nothing(path):
    rng = np.random.default_rng(10)
    q, k = (rng.normal(size=(n, 1, 64)).astype(np.float32) for n in (3, 1))
    out, lse = path(Handmade([(k, np.ones((1, 1, 1), np.float32))], q, (3,)))
    logit = float(q[2, 0].astype(float) @ k[0, 0].astype(float)) / 8
    assert_close(out.ravel(), np.array([0, 0, 1]), budget=1e-6)
    assert_close(lse.ravel(), np.array([-np.inf, -np.inf, logit * LOG2E]), budget=2e-6)


@pytest.mark.parametrize(
    ("cap", "out", "lse"), [(1.0, 0.731059, 1.894636), (30.0, 1.0, 43.1708), (None, 1.0, 144.2695), (0, 1.0, 144.2695)]
)
@range_paths
def test_m11_caps_of_a_large_logit(path, cap, out, lse):
    request = tokens([10.0, 0.0], np.array([1.0, 0.0]))
    got, got_lse = path(Handmade([request], query(80), options={"logits_soft_cap": cap}))
    assert got.item() == pytest.approx(out, abs=1e-6)
    assert got_lse.item() == pytest.approx(lse, rel=2e-6)


@pytest.mark.parametrize(("causal", "kept"), [(True, [[1, 2], [2, 3]]), (False, [[1, 2, 3], [2, 3]])])
@every_path
def test_m12_a_window_bounds_the_left_side_only(path, causal, kept):
    options = {"window_left": 1, "causal": causal}  # sliding_window 2
    out, lse = path(Handmade([zero_logit_tokens(4)], qo_lens=(2,), options=options))
    want = np.zeros((2, 1, 4))
    for row, keys in enumerate(kept):
        want[row, 0, keys] = 1 / len(keys)
    assert_close(out, want, budget=1e-6)
    assert_close(lse.ravel(), np.log2([len(keys) for keys in kept]), budget=1e-6)


@every_path
def test_a_value_row_that_no_row_keeps_may_be_nan(path):
    k, v = zero_logit_tokens(40)
    k[5], v[5], v[17], k[30] = np.nan, np.nan, np.inf, -np.inf
    mask = np.ones(40, bool)
    mask[[5, 17, 30]] = False
    out, lse = path(Handmade([(k, v)], options={"attn_mask": mask}))
    assert_close(out, np.where(mask, 1 / 37, 0)[None, None], budget=1e-6)
    assert lse.item() == pytest.approx(math.log2(37), abs=2e-6)


@range_paths
def test_an_additive_mask_of_minus_infinity_drops_nan_as_well(path):
    k, v = zero_logit_tokens(40)
    k[5], v[5], v[17] = np.nan, np.nan, np.inf
    mask = np.zeros(40, np.float32)
    mask[[5, 17]] = -np.inf
    out, _ = path(Handmade([(k, v)], options={"attn_mask": mask}))
    assert_close(out, np.where(mask == 0, 1 / 38, 0)[None, None], budget=1e-6)


@every_path
def test_a_nan_in_a_kept_key_stays_visible(path):
    k, v = zero_logit_tokens(5, 1.0)
    k[2, 0, 3] = np.nan
    q = np.ones((1, 1, 64), np.float32)
    out, lse = path(Handmade([(k, v)], q))
    want = oracle.paged_attention(q, scatter((k, v)), return_lse=True)
    assert np.isnan(want[0]).all()
    assert np.isnan(out).all()
    assert np.isnan(lse).all()


@pytest.mark.parametrize("path", [path for name, path in RANGE_PATHS.items() if name != "merged"])  # it cuts the mask
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_surplus_rows_and_columns_of_a_mask_are_not_read(path, dtype):
    mask = np.full((1, 1, 5, 9), np.nan, dtype)
    mask[..., :2, :6] = 0
    options = {"attn_mask": mask[:, :, :2, :6], "causal": False}
    out, _ = path(Handmade([zero_logit_tokens(6)], qo_lens=(2,), options=options))
    assert_close(out, np.full((2, 1, 6), 1 / 6), budget=1e-6)

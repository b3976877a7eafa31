"""Windows and chunks: which keys a row keeps, on every split, level and task."""

import math

import numpy as np
import pytest

import nbattn
from nbattn.testing import PATHS, Handmade, assert_close, zero_logit_tokens
from nbattn.testing.paths import flat, heads_apart, levels, paged_kv

every_path = pytest.mark.parametrize("path", PATHS.values(), ids=PATHS)


def weights(num_keys: int, *kept: list[int]) -> np.ndarray:
    """Return equal weights [rows, 1, num_keys] on the keys that each row keeps."""
    rows = np.zeros((len(kept), 1, num_keys))
    for row, keys in zip(rows, kept, strict=True):
        row[0, keys] = 1 / len(keys)
    return rows


@every_path
def test_w1_a_sliding_window_counts_the_row_itself(path):
    out, _ = path(Handmade([zero_logit_tokens(4)], options={"window_left": 1}))  # sliding_window 2
    assert_close(out, weights(4, [2, 3]), budget=1e-6)


@pytest.mark.parametrize(("window_left", "kept"), [(0, [3]), (1, [2, 3]), (3, [0, 1, 2, 3]), (-1, [0, 1, 2, 3])])
@every_path
def test_w2_window_left_keeps_one_more_than_it_says(path, window_left, kept):
    out, lse = path(Handmade([zero_logit_tokens(4)], options={"window_left": window_left}))
    assert_close((out, lse), (weights(4, kept), np.full((1, 1), math.log2(len(kept)))), budget=1e-6)


@every_path
def test_w3_keys_before_the_window_may_hold_anything(path):
    rng = np.random.default_rng(3)
    k, v = rng.normal(size=(2, 70, 2, 64)).astype(np.float32)
    q = rng.normal(size=(2, 4, 64)).astype(np.float32)
    clean, dirty = [(k.copy(), v.copy()) for _ in range(2)]
    for x, y in zip(clean, dirty, strict=True):
        x[: 68 - 9], y[: 68 - 9] = 0, np.nan  # row 0 stands at 68
    problem = [Handmade([pair], q, (2,), {"window_left": 9}) for pair in (clean, dirty)]
    out, lse = path(problem[1])
    assert np.isfinite(out).all()
    assert_close((out, lse), path(problem[0]))


@every_path
def test_w4_rows_of_one_request_have_windows_of_their_own(path):
    out, _ = path(Handmade([zero_logit_tokens(5)], qo_lens=(2,), options={"window_left": 1}))
    assert_close(out, weights(5, [2, 3], [3, 4]), budget=1e-6)


@pytest.mark.parametrize(
    "path",
    [
        flat,
        lambda p: flat(p, split_size=64),
        lambda p: flat(p, split_size=1000),
        lambda p: flat(p, page_size=61, split_size=17),
        lambda p: levels(p, 3),
        heads_apart,
    ],
    ids=["one_split", "split_64", "split_1000", "split_17", "three_levels", "many_rows"],
)
def test_w5_many_rows_over_many_keys(path):
    values = np.arange(4096.0)
    options = {"window_left": 333, "causal": False}
    out, lse = path(Handmade([zero_logit_tokens(4096, values, head_dim=8)], qo_lens=(300,), options=options))
    first = 3796 + np.arange(300) - 333
    assert_close(out.ravel(), (first + 4095) / 2, budget=2e-3)
    assert_close(lse.ravel(), np.log2(4096 - first), budget=1e-5)


@pytest.mark.parametrize("split_size", [None, 1, 2])
def test_w6_a_window_runs_over_the_joint_of_a_cascade(split_size):
    (k, _), eye = zero_logit_tokens(7), np.eye(7, dtype=np.float32)[:, None]
    cut = [nbattn.Level(paged_kv([(k[a:b], eye[a:b])], 4), np.array([0, 1]), b == 7) for a, b in ((0, 4), (4, 7))]
    out, lse = nbattn.cascade_attention(
        np.zeros((1, 1, 64), np.float32), cut, window_left=3, split_size=split_size, return_lse=True
    )
    assert_close((out, lse), (weights(7, [3, 4, 5, 6]), np.full((1, 1), 2.0)), budget=1e-6)


@every_path
def test_chunks_follow_positions(path):
    options = {"chunk_size": 4, "kv_start": np.array([2], np.int32)}  # positions 2..8, chunks 0..3, 4..7, 8
    out, lse = path(Handmade([zero_logit_tokens(7)], qo_lens=(3,), options=options))
    assert_close(out, weights(7, [2, 3, 4], [2, 3, 4, 5], [6]), budget=1e-6)
    assert_close(lse.ravel(), np.log2([3, 4, 1]), budget=1e-6)


@every_path
def test_chunks_without_causal_see_the_rest_of_the_chunk(path):
    options = {"chunk_size": 4, "causal": False, "q_positions": np.array([0, 5, 9], np.int32)}
    out, _ = path(Handmade([zero_logit_tokens(7)], qo_lens=(3,), options=options))
    assert_close(out[:2], weights(7, [0, 1, 2, 3], [4, 5, 6]), budget=1e-6)
    assert not out[2].any()  # its chunk holds no key


@every_path
def test_given_row_positions_move_causal_and_window(path):
    options = {"window_left": 2, "q_positions": np.array([9, 0, 3, -1], np.int32)}
    out, lse = path(Handmade([zero_logit_tokens(8)], qo_lens=(4,), options=options))
    assert_close(out[:3], weights(8, [7], [0], [1, 2, 3]), budget=1e-6)
    assert not out[3].any()
    assert_close(lse.ravel(), np.array([0, 0, math.log2(3), -np.inf]), budget=1e-6)

"""Small inputs that broke other systems, through the cascade wrappers: positions, sinks, empty and late levels."""

import numpy as np
import pytest
from level_setup import Setup, planned

from nbattn import oracle
from nbattn.testing import assert_close, expect


def exact_levels(*levels, page_size=4, eye=True, dim=None):
    """Return a cache and lists for zero keys; V is the identity over all levels' keys, or the given numbers."""
    total = sum(sum(lens) for _, lens, *_ in levels)
    setup = Setup(tuple((offsets, lens) for offsets, lens, *_ in levels), 1, 1, dim or 64, page_size)
    _, cache, lists = setup.build()
    k = np.where(np.isfinite(cache[:, 0]), np.float32(0), cache[:, 0])
    v = np.full((len(k), page_size, 1, total if eye else 1), np.nan, np.float32)
    number = 0
    for (_, lens, *values), indptr, ids in zip(levels, *lists[1:3], strict=True):
        for begin, n in zip(indptr, lens, strict=False):
            for j in range(n):
                v[ids[begin + j // page_size], j % page_size, 0] = np.eye(total)[number] if eye else values[0]
                number += 1
    return setup, (k, v), lists


def test_r5_parts_of_one_and_three_keys():
    setup, cache, lists = exact_levels(((0, 1), (1,), 0.0), ((0, 1), (3,), 1.0), eye=False)
    out, lse = planned(setup, lists).run(np.zeros((1, 1, 64), np.float32), cache, return_lse=True)
    np.testing.assert_allclose(out.ravel(), [0.75], rtol=1e-6)
    np.testing.assert_allclose(lse.ravel(), [2.0], rtol=1e-6)


def test_r10_lse_is_rows_by_heads():
    setup = Setup((((0, 3), (6,)), ((0, 1, 2, 3), (4, 1, 7))), num_kv_heads=1, group_size=5)
    q, cache, lists = setup.build()
    out, lse = planned(setup, lists).run(q, cache, return_lse=True)
    assert lse.shape == (3, 5)
    assert_close((out, lse), expect(oracle.multi_level_cascade, q, cache, *lists))


def test_r12_empty_suffixes_see_the_prefix_only():
    setup, cache, lists = exact_levels(((0, 3), (4,), 1.0), ((0, 1, 2, 3), (0, 2, 0), 7.0), eye=False)
    out, lse = planned(setup, lists).run(np.zeros((3, 1, 64), np.float32), cache, return_lse=True)
    np.testing.assert_allclose(out.ravel(), [1, 3, 1], rtol=1e-6)
    np.testing.assert_allclose(lse.ravel(), np.log2([4, 6, 4]), rtol=1e-6)


def test_r14_a_level_starting_at_row_1_gives_row_0_nothing():
    setup, cache, lists = exact_levels(((1, 2), (4,)), ((0, 1, 2), (2, 2)))
    out, lse = planned(setup, lists).run(np.zeros((2, 1, 64), np.float32), cache, return_lse=True)
    np.testing.assert_allclose(out[0, 0], [0, 0, 0, 0, 0.5, 0.5, 0, 0], rtol=1e-6)
    np.testing.assert_allclose(out[1, 0], np.array([1, 1, 1, 1, 0, 0, 1, 1]) / 6, rtol=1e-6)
    np.testing.assert_allclose(lse.ravel(), np.log2([2, 6]), rtol=1e-6)


def test_s8_a_sink_counts_once_over_prefix_and_suffix():
    setup, cache, lists = exact_levels(((0, 1), (2,), 1.0), ((0, 1), (2,), 1.0), eye=False)
    wrapper = planned(setup, lists)
    out, lse = wrapper.run(np.zeros((1, 1, 64), np.float32), cache, sinks=np.zeros(1, np.float32), return_lse=True)
    np.testing.assert_allclose(out.ravel(), [0.8], rtol=1e-6)  # 4 of 5; twice would be 4 of 6
    np.testing.assert_allclose(lse.ravel(), [np.log2(5)], rtol=1e-6)


def test_w6_a_window_runs_over_the_border_of_levels():
    setup, cache, lists = exact_levels(((0, 1), (4,)), ((0, 1), (3,)))
    out = planned(setup, lists, {"window_left": 3, "causal": True}).run(np.zeros((1, 1, 64), np.float32), cache)
    np.testing.assert_allclose(out.ravel(), [0, 0, 0, 0.25, 0.25, 0.25, 0.25], rtol=1e-6)


@pytest.mark.parametrize("split", [(3, 0), (0, 3), (1, 2), (2, 1)])
def test_n5_rotary_positions_run_over_all_levels(split):
    setup, (k, v), lists = exact_levels(((0, 1), split[:1]), ((0, 1), split[1:]), page_size=1, dim=4)
    k[np.isfinite(k)] = 0
    k[..., :2] = 1
    q = np.array([[[1, 1, 0, 0]]], np.float32)
    options = {"pos_encoding_mode": "ROPE_LLAMA", "sm_scale": 1.0, "causal": True}
    out, lse = planned(setup, lists, options).run(q, (k, v), return_lse=True)
    np.testing.assert_allclose(out.ravel(), [0.1295, 0.3369, 0.5336], atol=5e-5)
    np.testing.assert_allclose(lse.ravel(), [3.7915], atol=5e-5)


def test_n6_alibi_slopes_of_six_heads():
    from nbattn.alibi import alibi_slopes

    assert alibi_slopes(6).tolist() == [0.25, 0.0625, 0.015625, 0.00390625, 0.5, 0.125]
    setup = Setup((((0, 1), (1,)), ((0, 1), (1,))), num_kv_heads=1, group_size=6)
    _, cache, lists = setup.build()
    q = np.zeros((1, 6, 16), np.float32)
    lse = planned(setup, lists, {"pos_encoding_mode": "ALIBI"}).run(q, cache, return_lse=True, lse_base="e")[1]
    np.testing.assert_allclose(lse[0], np.log1p(np.exp(-alibi_slopes(6))), rtol=1e-6)


@pytest.mark.parametrize("heads", [1, 2, 3, 5, 7, 8, 12, 33])
def test_alibi_slopes_are_the_oracles(heads):
    from nbattn.alibi import alibi_slopes

    np.testing.assert_allclose(alibi_slopes(heads), oracle.alibi_slopes(heads), rtol=1e-15)

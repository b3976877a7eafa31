"""The multi-level wrapper: flat attention over the concatenated keys of all levels."""

import numpy as np
import pytest
from level_setup import FOUR, ONE, THREE, TWO, Setup, planned, run_options

import nbattn
from nbattn import oracle
from nbattn.testing import assert_close, expect

NESTED = [pytest.param(levels, id=name) for levels, name in (ONE, TWO, THREE, FOUR)]


UNEVEN = [
    pytest.param((((1, 4), (11,)), ((0, 2, 4), (3, 5))), id="level-0-starts-at-row-1"),
    pytest.param((((0, 3), (11,)), ((0, 2, 5), (3, 5))), id="level-0-ends-early"),
    pytest.param((((0, 4), (11,)), ((2, 3, 4), (3, 5))), id="last-level-starts-at-row-2"),
    pytest.param((((0, 3), (9,)), ((0, 1, 2, 3), (0, 2, 0))), id="empty-suffixes"),
    pytest.param((((0, 4), (0,)), ((0, 2, 4), (0, 6))), id="empty-prefix"),
    pytest.param((((0, 4, 4, 6), (5, 3, 8)), ((0, 0, 3, 6), (7, 5, 3))), id="requests-without-rows"),
    pytest.param((((0, 3, 6), (6, 9)), ((0, 2, 6), (4, 7))), id="a-request-under-two-prefixes"),
]


OPTIONS = [
    {},
    {"causal": True},
    {"window_left": 5},
    {"causal": True, "window_left": 0},
    {"logits_soft_cap": 0.7, "sm_scale": 0.5},
    {"causal": True, "pos_encoding_mode": "ROPE_LLAMA"},
    {"pos_encoding_mode": "ROPE_LLAMA", "rope_scale": 2.5, "rope_theta": 100.0, "window_left": 7},
    {"causal": True, "pos_encoding_mode": "ALIBI"},
    {"causal": True, "pos_encoding_mode": "ALIBI", "logits_soft_cap": 2.0, "window_left": 11, "sm_scale": 0.2},
]


@pytest.mark.parametrize("run_kind", ["plain", "all"])
@pytest.mark.parametrize("options", OPTIONS, ids=lambda x: "-".join(map(str, x.values())) or "plain")
@pytest.mark.parametrize("levels", NESTED + UNEVEN)
def test_every_cascade_is_its_definition(levels, options, run_kind):
    setup = Setup(levels, group_size=3, seed=len(levels))
    q, cache, lists = setup.build()
    more = run_options(setup, run_kind)
    result = planned(setup, lists, options).run(q, cache, return_lse=True, **more)
    assert_close(result, expect(oracle.multi_level_cascade, q, cache, *lists, **options, **more))


@pytest.mark.parametrize("run_kind", ["plain", "all"])
@pytest.mark.parametrize("options", OPTIONS, ids=lambda x: "-".join(map(str, x.values())) or "plain")
@pytest.mark.parametrize("levels", NESTED)
def test_cascade_is_flat_attention_over_the_concatenated_keys(levels, options, run_kind):
    setup = Setup(levels, group_size=5, num_kv_heads=1, page_size=3)
    q, cache, lists = setup.build()
    more = run_options(setup, run_kind)
    result = planned(setup, lists, options).run(q, cache, return_lse=True, **more)
    flat = dict(options)
    mode = flat.pop("pos_encoding_mode", "NONE")
    rope = nbattn.Rope(flat.pop("rope_theta", 1e4), flat.pop("rope_scale", 1.0)) if mode == "ROPE_LLAMA" else None
    slopes = oracle.alibi_slopes(5).astype(np.float32) if mode == "ALIBI" else None
    flat = {"causal": False, "rope": rope, "alibi_slopes": slopes, **flat, **more}
    expected = nbattn.paged_attention(q, setup.flat(cache, lists), lists[0][-1], return_lse=True, **flat)
    budget = expect(oracle.multi_level_cascade, q, cache, *lists, **options, **more)
    for name, a, b, one in zip(("out", "lse"), result, expected, (budget.out_budget, budget.lse_budget), strict=True):
        assert_close(a, b, budget=2 * one, name=name)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
def test_every_query_dtype(dtype):
    setup = Setup(THREE[0], dtype=dtype, head_dim=24)
    q, cache, lists = setup.build()
    wrapper = planned(setup, lists, {"causal": True, "q_data_type": dtype, "kv_data_type": dtype})
    out, lse = wrapper.run(q, cache, return_lse=True)
    assert (out.dtype, lse.dtype) == (q.dtype, np.float64 if dtype == "float64" else np.float32)
    assert_close((out, lse), expect(oracle.multi_level_cascade, q, cache, *lists, causal=True))


def test_int8_cache_needs_its_scales():
    setup = Setup(TWO[0])
    q, cache, lists = setup.build()
    cache = np.clip(np.nan_to_num(40 * cache, nan=127, posinf=127, neginf=-127), -127, 127).astype(np.int8)
    wrapper = planned(setup, lists, {"kv_data_type": "int8"})
    scales = {"k_scale": 0.025, "v_scale": np.float32(0.03)}
    assert_close(wrapper.run(q, cache, **scales), expect(oracle.multi_level_cascade, q, cache, *lists, **scales))
    with pytest.raises(nbattn.ContractError, match="v_scale: must be given for an int8 cache"):
        wrapper.run(q, cache, k_scale=0.025)


@pytest.mark.parametrize("form", ["combined", "tuple", "list", "strided"])
@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_cache_forms_give_the_same_bits(layout, form):
    setup = Setup(TWO[0])
    q, cache, lists = setup.build()
    expected = planned(setup, lists).run(q, cache)
    x = cache if layout == "NHD" else np.ascontiguousarray(cache.swapaxes(2, 3))
    if form in ("tuple", "list"):
        x = {"tuple": tuple, "list": list}[form]([x[:, 0], x[:, 1].copy()])
    if form == "strided":
        x = np.repeat(x, 2, axis=0)[::2]
    np.testing.assert_array_equal(planned(setup, lists, kv_layout=layout).run(q, x), expected)


def test_value_heads_may_have_another_size():
    setup = Setup(TWO[0])
    q, cache, lists = setup.build()
    pair = cache[:, 0], cache[:, 1, :, :, :5].copy()
    out = planned(setup, lists).run(q, pair)
    assert out.shape == (7, 6, 5)
    assert_close(out, expect(oracle.multi_level_cascade, q, pair, *lists))

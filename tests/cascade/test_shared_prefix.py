"""The shared-prefix wrappers: a dense prefix above paged suffixes, equal to a cascade of two levels."""

import ml_dtypes
import numpy as np
import pytest
from level_setup import Decode, Prefill, Setup, planned

import nbattn
from nbattn import oracle
from nbattn.testing import assert_close, expect


def prefix_setup(layout="NHD", dtype="float32", **shape):
    """Return q, dense prefix, suffix cache, the suffixes' arrays, and the same as a two-level cascade in one pool."""
    setup = Setup((((0, 7), (12,)), ((0, 2, 3, 7), (9, 0, 5))), dtype=dtype, **shape)
    q, cache, lists = setup.build()
    prefix = cache[lists[2][0][:3]].swapaxes(1, 2).reshape(12, 2, *cache.shape[3:])
    k, v = prefix[:, 0], prefix[:, 1]
    unique = cache
    if layout == "HND":
        k, v, unique = (np.ascontiguousarray(x.swapaxes(-2, -3)) for x in (k, v, unique))
    return setup, q, (k, v), cache, unique, lists


def both_prefix_wrappers(setup, lists, layout="NHD", rows=None):
    decode, prefill = Decode(None, layout), Prefill(None, layout)
    csr = [x[1] for x in lists[1:]]
    decode.begin_forward(*csr, *setup.sizes)
    prefill.begin_forward(lists[0][1] if rows is None else rows, *csr, *setup.sizes)
    return decode, prefill


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_prefill_wrapper_is_a_cascade_of_two_levels(layout, causal):
    setup, q, (k, v), cache, unique, lists = prefix_setup(layout)
    _, prefill = both_prefix_wrappers(setup, lists, layout)
    sinks = np.linspace(-1, 1, 6, dtype=np.float32)
    result = prefill.forward_return_lse(q, k, v, unique, causal, sm_scale=0.4, sinks=sinks)
    expected = planned(setup, lists, {"causal": causal, "sm_scale": 0.4}).run(q, cache, sinks=sinks, return_lse=True)
    assert_close(result, expect(oracle.multi_level_cascade, q, cache, *lists, causal=causal, sm_scale=0.4, sinks=sinks))
    csr = [x[1] for x in lists[1:]]
    rest = {"kv_layout": layout, "causal": causal, "sm_scale": 0.4, "sinks": sinks}
    assert_close(result, expect(oracle.shared_prefix, q, k, v, unique, *csr, lists[0][1], **rest))
    for a, b in zip(result, expected, strict=True):
        np.testing.assert_array_equal(a, b)  # one plan, one kernel: the same bits
    only_out = prefill.forward(q, k, v, unique, causal, False, 0.4, sinks=sinks)
    np.testing.assert_array_equal(only_out, result[0])


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_decode_wrapper_is_a_cascade_of_two_levels(dtype, layout):
    setup, q, (k, v), cache, unique, lists = prefix_setup(layout, dtype)
    q = q[:3]
    decode, prefill = both_prefix_wrappers(setup, lists, layout, np.arange(4))
    result = decode.forward_return_lse(q, k, v, unique)
    lists[0][:] = [np.array([0, 3]), np.arange(4)]
    expected = planned(setup, lists).run(q, cache, return_lse=True)
    csr = [x[1] for x in lists[1:]]
    assert_close(result, expect(oracle.shared_prefix, q, k, v, unique, *csr, kv_layout=layout))
    for a, b, c in zip(result, expected, prefill.forward_return_lse(q, k, v, unique), strict=True):
        np.testing.assert_array_equal(a, b)
        np.testing.assert_array_equal(a, c)


def test_prefix_wrappers_plan_once_and_follow_prefix_and_causality():
    setup, q, (k, v), cache, _, lists = prefix_setup()
    _, prefill = both_prefix_wrappers(setup, lists)
    csr = [x[1] for x in lists[1:]]
    for length, causal in [(12, False), (12, True), (5, True), (0, True), (1, False), (12, False)]:
        expected = expect(oracle.shared_prefix, q, k[:length], v[:length], cache, *csr, lists[0][1], causal=causal)
        for _ in range(2):
            assert_close(prefill.forward_return_lse(q, k[:length], v[:length], cache, causal), expected)
    rows = np.array([0, 1, 2, 6], np.int32)
    prefill.begin_forward(rows, *csr, *setup.sizes)
    expected = expect(oracle.shared_prefix, q[:6], k, v, cache, *csr, rows)
    assert_close(prefill.forward_return_lse(q[:6], k, v, cache), expected)


def test_prefix_arguments_that_change_nothing():
    setup, q, (k, v), cache, _, lists = prefix_setup()
    decode, prefill = both_prefix_wrappers(setup, lists)
    plain = prefill.forward(q, k, v, cache)
    plain_decode = decode.forward(q[:3], k, v, cache)
    for more in ({"use_fp16_qk_reduction": True}, {"rope_scale": 3.0}, {"rope_theta": 7.0}):
        np.testing.assert_array_equal(prefill.forward(q, k, v, cache, **more), plain)
    for wrapper in (decode, prefill):
        wrapper.reset_workspace_buffer(np.zeros(3, np.uint8), None)
        assert wrapper.end_forward() is None
    np.testing.assert_array_equal(prefill.forward(q, k, v, cache), plain)
    np.testing.assert_array_equal(decode.forward(q[:3], k, v, cache), plain_decode)


@pytest.mark.parametrize("more", [{"causal": True}, {"sm_scale": 0.9}])
def test_prefill_arguments_that_change_the_result(more):
    setup, q, (k, v), cache, _, lists = prefix_setup()
    _, prefill = both_prefix_wrappers(setup, lists)
    plain = prefill.forward(q, k, v, cache)
    assert np.abs(prefill.forward(q, k, v, cache, **more) - plain).max() > 1e-3


def test_prefix_is_read_in_place():
    setup, q, (k, v), cache, _, lists = prefix_setup()
    _, prefill = both_prefix_wrappers(setup, lists)
    wide = np.full((24, 3, 20), np.nan, np.float32)
    views = wide[::2, :2, 2:18], wide[1::2, :2, 2:18]
    views[0][:], views[1][:] = k, v
    before = wide.copy()
    np.testing.assert_array_equal(prefill.forward(q, *views, cache), prefill.forward(q, k, v, cache))
    np.testing.assert_array_equal(wide, before)


BAD_PREFIXES = [
    (lambda k, v: (k[None], v), r"k_shared: must be \[prefix, kv_heads, dim\] \(NHD\), got shape \(1, 12, 2, 16\)"),
    (lambda k, v: (k, v[0]), r"v_shared: must be \[prefix, kv_heads, dim\] \(NHD\), got shape \(2, 16\)"),
    (
        lambda k, v: (k[:, :1], v),
        r"k_shared: must be .* with 2 heads of 16 as unique_kv_cache, got shape \(12, 1, 16\)",
    ),
    (lambda k, v: (k, v[..., :8].copy()), r"v_shared: must be .* with 2 heads of 16 as unique_kv_cache"),
    (lambda k, v: (k, v[:5]), r"v_shared: must have k_shared's prefix \(12, 2\), got \(5, 2\)"),
    (lambda k, v: (k.astype(np.float16), v), "k_shared: must be float32 as unique_kv_cache is, got float16"),
    (lambda k, v: (k, v.tolist()), "v_shared: must be a NumPy or CuPy array, got list"),
    (lambda k, v: (None, v), "k_shared: must be a NumPy or CuPy array, got NoneType"),
    (lambda k, v: (np.repeat(k, 2, 2)[..., ::2], v), "k_shared: must be contiguous along its last axis"),
]


@pytest.mark.parametrize(("change", "rule"), BAD_PREFIXES)
def test_bad_prefixes(change, rule):
    setup, q, (k, v), cache, _, lists = prefix_setup()
    decode, prefill = both_prefix_wrappers(setup, lists)
    for wrapper, rows in ((decode, q[:3]), (prefill, q)):
        with pytest.raises(nbattn.ContractError, match=f"^{rule}"):
            wrapper.forward(rows, *change(k, v), cache)


def test_bad_prefix_plans_and_caches():
    setup, q, (k, v), cache, _, lists = prefix_setup()
    decode, prefill = both_prefix_wrappers(setup, lists)
    csr = [x[1] for x in lists[1:]]
    bad = [*csr[:2], np.array([1, 1, 9], np.int32)]
    with pytest.raises(nbattn.PageTableError, match=r"^unique_kv_last_page_len\[2\]: must be in 1\.\.4"):
        decode.begin_forward(*bad, *setup.sizes)
    with pytest.raises(nbattn.PageTableError, match=r"^paged_kv_last_page_len\[2\]: must be in 1\.\.4"):
        prefill.begin_forward(lists[0][1], *bad, *setup.sizes)
    with pytest.raises(nbattn.ContractError, match=r"^qo_indptr\[0\]: must be 0, got 1"):
        prefill.begin_forward(np.array([1, 2, 3, 7]), *csr, *setup.sizes)
    with pytest.raises(nbattn.ContractError, match=r"^qo_indptr: must be an int array"):
        prefill.begin_forward(None, *csr, *setup.sizes)
    with pytest.raises(nbattn.ContractError, match=r"^data_type: must be None or one of"):
        decode.begin_forward(*csr, *setup.sizes, data_type="complex64")
    decode.begin_forward(*csr, *setup.sizes, data_type=ml_dtypes.bfloat16)
    with pytest.raises(nbattn.ContractError, match=r"^unique_kv_cache: must be bfloat16 as planned \(data_type\)"):
        decode.forward(q[:3], k, v, cache)
    with pytest.raises(nbattn.ContractError, match=r"^q: must be \[3, 6, 16\]"):
        decode.forward(q[:2], k, v, cache)
    with pytest.raises(nbattn.ContractError, match=r"^unique_kv_cache: must have pages of \[4, 2, 16\]"):
        prefill.forward(q, k, v, cache[:, :, :2])
    with pytest.raises(nbattn.ContractError, match=r"^causal: must be a bool, got array"):
        prefill.forward(q, k, v, cache, np.array([True, False]))
    with pytest.raises(nbattn.PageTableError, match=r"^paged_kv_indices\[\d\]: must be below 1 "):
        prefill.forward(q, k, v, cache[:1])

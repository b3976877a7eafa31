"""Long ranges of equal weights, which round alike: sums of float32 must not drift out of the budget."""

import numpy as np
import pytest

import nbattn
from nbattn import oracle, testing


@pytest.mark.parametrize("split_size", [None, 1 << 20])
@pytest.mark.parametrize("num_keys", [257, 4096, 32768])
def test_equal_weights_stay_within_the_budget(num_keys, split_size):
    rng = np.random.default_rng(0)
    k = np.zeros((1, num_keys, 1, 8), np.float32)
    k[0, 0, 0, 0] = 1.2  # one other logit, so that the equal ones are not powers of two
    v = (rng.standard_normal((1, num_keys, 1, 8)) + 3).astype(np.float32)
    q = np.zeros((1, 1, 8), np.float32)
    q[..., 0] = 1
    kv = nbattn.PagedKV.from_slots(k, v, np.array([num_keys], np.int32))
    options = {"sm_scale": 1.0, "return_lse": True}
    expected = testing.expect(oracle.paged_attention, q, kv, sm_scale=1.0)
    testing.assert_close(nbattn.paged_attention(q, kv, split_size=split_size, **options), expected)
    tokens, counts = np.arange(num_keys, dtype=np.int32)[None], np.array([num_keys], np.int32)
    gathered = nbattn.gather_attention(q, kv, tokens, counts, split_size=split_size, **options)
    testing.assert_close(gathered, expected)


@pytest.mark.parametrize("split_size", [None, 1 << 30])
def test_equal_values_do_not_drift_however_long_the_range(split_size):
    k = np.zeros((1, 1 << 19, 1, 2), np.float32)
    kv = nbattn.PagedKV.from_slots(k, np.full_like(k, 0.1), np.array([1 << 19]))
    q = np.ones((1, 1, 2), np.float32)
    expected = testing.expect(oracle.paged_attention, q, kv)
    testing.assert_close(nbattn.paged_attention(q, kv, split_size=split_size, return_lse=True), expected)

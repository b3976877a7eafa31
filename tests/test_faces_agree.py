"""The operator faces agree with each other where they say the same thing in different words."""

import numpy as np
import pytest

import nbattn
from nbattn import PagedKVCollection, oracle
from nbattn.testing import assert_close, expect, poison, spread

NEW, KEYS = (3, 1, 4, 2), (9, 0, 17, 2)  # rows and keys of each request; the second has no keys
HEADS, KV_HEADS, DIM, PAGE, MAX_SEQ = 6, 2, 16, 4, 19
CU_Q, CU_K = (np.cumsum([0, *x]).astype(np.int32) for x in (NEW, KEYS))
ROWS, SCALE = sum(NEW), 0.3
DTYPES = ("float32", "bfloat16")


class Cache:
    """The same keys and values in every layout; whatever holds no key is poison."""

    def __init__(self, dtype, seed=0):
        rng = np.random.default_rng(seed)
        self.q = spread(rng.normal(size=(ROWS, HEADS, DIM)).astype(dtype), rng)
        stale = (np.arange(MAX_SEQ) >= np.array(KEYS)[:, None])[..., None, None]
        shape = (len(KEYS), MAX_SEQ, KV_HEADS, DIM)
        self.slots = [poison((2 * rng.normal(size=shape)).astype(dtype), rng, stale) for _ in "kv"]
        pages = rng.permutation(25)[: 5 * len(KEYS)].reshape(len(KEYS), 5)
        self.pool = poison(np.empty((25, 2, 2, PAGE, KV_HEADS, DIM), dtype), rng)  # layer 1 of 2
        for axis, slots in enumerate(self.slots):
            wide = np.concatenate([slots, slots[:, :1]], axis=1)  # 20 = 5 pages; the surplus is never read
            self.pool[pages.reshape(-1), axis, 1] = wide.reshape(-1, PAGE, KV_HEADS, DIM)
        unused = np.arange(5) * PAGE >= np.array(KEYS)[:, None]
        self.pool[pages[unused], :, 1] = self.pool[pages[unused], :, 0]
        self.table = np.where(unused, 2**31 - 1, pages).astype(np.int32)
        self.paged = [self.pool[:, axis, 1].swapaxes(1, 2) for axis in (0, 1)]  # head-major, as views
        self.continuous = [slots.swapaxes(1, 2) for slots in self.slots]

    def over(self, caches, start, lens=KEYS, **options):
        lens = np.array(lens, np.int32)
        return nbattn.attention_over_cache(
            self.q, *caches, start, CU_Q, lens, q_scale=SCALE, return_lse=True, **options
        )

    def cross(self, **options):
        context = np.array(KEYS) // 2
        new = np.cumsum([0, *(np.array(KEYS) - context)])
        collection = PagedKVCollection(self.pool, context, self.table)
        return nbattn.generic_cross_attention_kv_cache(
            self.q, CU_Q, max(NEW), new, collection, 1, SCALE, return_lse=True, **options
        )

    def qsa(self, indices, counts, rows=slice(None), new=NEW, keys=KEYS, **options):
        offsets, context = np.cumsum([0, *new]), np.array(keys) - np.array(new)
        return nbattn.qsa_sparse_attention(
            self.q[rows], offsets, self.pool, -1, context, self.table, None, None, 1, indices, counts, SCALE,
            return_lse=True, **options,
        )  # fmt: skip

    def expected(self, **options):
        """Return what the oracle says, with the budget: two results within it agree within twice of it."""
        lens = np.array(KEYS)
        return expect(
            oracle.attention_over_cache, self.q, *self.continuous, np.zeros(4), CU_Q, lens, q_scale=SCALE, **options
        )


@pytest.fixture(scope="module", params=DTYPES)
def cache(request):
    return Cache(request.param)


def agree(expected, *results):
    for result in results:
        assert_close(result, expected)


def same(actual, expected):
    for a, e in zip(actual, expected, strict=True):
        np.testing.assert_array_equal(a, e)


@pytest.mark.parametrize(
    "options",
    [{}, {"is_causal": False}, {"sliding_window": 4, "head_sink": np.linspace(-1, 1, HEADS)}, {"softcap": 1.0}],
)
def test_over_cache_continuous_is_paged_is_cumulative(cache, options):
    continuous = cache.over(cache.continuous, np.zeros(4, int), **options)
    agree(cache.expected(**options), continuous, cache.over(cache.paged, cache.table, **options))
    same(cache.over(cache.continuous, np.zeros(4, int), CU_K, **options), continuous)
    same(cache.over(cache.paged, cache.table, CU_K, **options), cache.over(cache.paged, cache.table, KEYS, **options))


def test_qsa_with_all_tokens_is_cross_attention_without_a_mask():
    for dtype in DTYPES:
        cache = Cache(dtype)
        cache.table[1, 0] = 3  # one row of the second request is its own and only key
        cache.pool[3, :, 1, 0] = 1
        keys = (9, 1, 17, 2)
        everything = np.tile(np.arange(17, dtype=np.int32), (ROWS, 1))
        counts = np.repeat(keys, NEW).astype(np.int32)
        context, new = np.array(keys) - NEW, CU_Q
        collection = PagedKVCollection(cache.pool, context, cache.table)
        args = cache.q, CU_Q, max(NEW), new, collection, 1, SCALE
        expected = expect(oracle.generic_cross_attention_kv_cache, *args)
        cross = nbattn.generic_cross_attention_kv_cache(*args, return_lse=True)
        agree(expected, cross, cache.qsa(everything, counts, keys=keys))


def test_qsa_with_the_past_is_causal_cross_attention(cache):
    rows, new, keys = slice(0, 3), (3, 0, 0, 0), (9, 0, 0, 0)
    past = np.tile(np.arange(9, dtype=np.int32), (3, 1))
    args = cache.q[rows], np.array([0, 3, 3, 3, 3]), 3, np.array([0, 3, 3, 3, 3])
    collection = PagedKVCollection(cache.pool, np.array([6, 0, 0, 0]), cache.table)
    args = *args, collection, 1, SCALE
    expected = expect(oracle.generic_cross_attention_kv_cache, *args, mask_str="causal")
    cross = nbattn.generic_cross_attention_kv_cache(*args, mask_str="causal", return_lse=True)
    agree(expected, cross, cache.qsa(past, np.array([7, 8, 9], np.int32), rows, new, keys))


def test_cross_attention_is_over_cache(cache):
    sinks = np.linspace(-1, 1, HEADS)
    for cross, over in [
        ({"mask_str": "null"}, {"is_causal": False}),
        ({"mask_str": "causal", "q_start": "bottom_right"}, {}),
        (
            {
                "mask_str": "sliding_window_causal",
                "local_window_size": 3,
                "q_start": "bottom_right",
                "sink_weights": sinks,
            },
            {"sliding_window": 3, "head_sink": sinks},
        ),
        (
            {"mask_str": "sliding_window_noncausal", "local_window_size": 3, "q_start": "bottom_right"},
            {"sliding_window": 3, "is_causal": False},
        ),
    ]:
        agree(cache.expected(**over), cache.cross(**cross), cache.over(cache.paged, cache.table, **over))


def test_the_row_rules_meet_where_the_step_is_the_queries_own(cache):
    context = np.array([6, 1, 13, 0])
    collection = PagedKVCollection(cache.pool, context, np.where(cache.table > 24, 0, cache.table))
    for mask in ("causal", "chunked", "sliding_window_causal"):
        args = cache.q, CU_Q, None, CU_Q, collection, 1, SCALE
        options = {"mask_str": mask, "local_window_size": 3, "return_lse": True}
        clean = np.nan_to_num(cache.pool.astype(np.float32), posinf=0, neginf=0).astype(cache.pool.dtype)
        args = *args[:4], PagedKVCollection(clean, context, collection.kv_lookup_table), *args[5:]
        same(
            nbattn.generic_cross_attention_kv_cache(*args, **options),
            nbattn.generic_cross_attention_kv_cache(*args, **options, q_start="bottom_right"),
        )


def test_gqa_decode_is_over_cache(cache):
    query = cache.q[: len(KEYS)]
    one_row_each = np.arange(len(KEYS) + 1)
    lens = np.array(KEYS)
    args = query, *cache.continuous, np.zeros(4, int), one_row_each, lens
    over = nbattn.attention_over_cache(*args, return_lse=True)
    decode = nbattn.gqa_decode(query, *cache.slots, lens, return_lse=True)
    agree(expect(oracle.attention_over_cache, *args), over)
    agree(expect(oracle.gqa_decode, query, *cache.slots, lens, out_dtype="float32"), decode)
    np.testing.assert_array_equal(decode[0].astype(over[0].dtype), over[0])


def test_the_faces_are_the_engine(cache):
    kv = nbattn.PagedKV.from_blocks(cache.pool, cache.table, np.array(KEYS), 1)
    same(
        cache.over(cache.paged, cache.table),
        nbattn.paged_attention(cache.q, kv, CU_Q, sm_scale=SCALE, return_lse=True),
    )
    same(
        cache.cross(),
        nbattn.paged_attention(cache.q, kv, CU_Q, sm_scale=SCALE, causal=False, return_lse=True),
    )

"""Pages and index lists: every id, length and offset that a table may hold, and none that it may not read."""

import math
import mmap
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import nbattn
from nbattn import oracle
from nbattn.testing import PATHS, RANGE_PATHS, Handmade, assert_close, expect, scatter, zero_logit_tokens
from nbattn.testing.paths import NEVER_READ, flat, paged_kv

CHECKOUT = Path(__file__).resolve().parent.parent
every_path = pytest.mark.parametrize("path", PATHS.values(), ids=PATHS)


def gather(kv, indices, counts, qo_indptr=None, heads: int = 1, **options):
    """Return gather_attention of zero queries."""
    q = np.zeros((len(indices), heads, kv.head_dim_qk), np.float32)
    lists, counts = np.array(indices, np.int32), np.array(counts, np.int32)
    return nbattn.gather_attention(q, kv, lists, counts, qo_indptr, return_lse=True, **options)


splits = pytest.mark.parametrize("split_size", [None, 1, 3, 64])


@every_path
def test_p1_nothing_beside_the_keys_is_read(path):
    rng = np.random.default_rng(1)
    requests = [tuple(rng.normal(size=(2, n, 2, 64)).astype(np.float32)) for n in (5, 0, 9)]
    q = rng.normal(size=(4, 6, 64)).astype(np.float32)
    got = path(Handmade(requests, q, (2, 0, 2)))  # the paths keep NaN in every other slot and page
    assert_close(got, expect(oracle.paged_attention, q, scatter(*requests), np.array([0, 2, 2, 4])))


@splits
def test_p1_unselected_tokens_and_table_padding_are_not_read(split_size):
    k, v = zero_logit_tokens(20, np.arange(20.0))
    k[1:19], v[1:19] = np.nan, np.inf
    cache = np.stack([k, v.repeat(64, 2)]).reshape(2, 5, 4, 1, 64)[:, [3, 0, 4, 1, 2]]  # pages shuffled
    table = np.array([[1, 3, 4, 0, 2, NEVER_READ]], np.int32)
    kv = nbattn.PagedKV.from_block_table(*cache, table, np.array([20], np.int32))
    out, lse = gather(kv, [[19, 0, 7, -(2**31), 2**31 - 1]], [2], split_size=split_size)
    assert_close((out, lse), (np.full((1, 1, 64), 9.5), np.ones((1, 1))), budget=1e-6)


@splits
def test_p2_gather_over_a_permuted_table(split_size):
    kv = paged_kv([zero_logit_tokens(66, np.arange(66.0))], 64)
    assert kv.kv_indices[0] != 0
    out, lse = gather(kv, [[65, 0]], [2], split_size=split_size)
    assert_close((out, lse), (np.full((1, 1, 1), 32.5), np.ones((1, 1))), budget=1e-6)


@splits
def test_p3_counts_of_many_rows(split_size):
    kv = paged_kv([zero_logit_tokens(9, np.arange(9.0))], 4)
    counts = np.resize([1, 3], 65)
    indices = np.where(np.arange(4) < counts[:, None], [4, 8, 3, 0], [-(2**31), 2**31 - 1, 10**9, -1])
    out, lse = gather(kv, indices, counts, np.array([0, 65]), split_size=split_size)
    assert_close(out.ravel(), np.where(counts == 1, 4, 5), budget=1e-6)
    assert_close(lse.ravel(), np.log2(counts), budget=1e-6)


@splits
@pytest.mark.parametrize(("count", "kept"), [(-5, 0), (0, 0), (2, 2), (3, 3), (99, 3)])
def test_p3_a_count_is_clamped_to_the_width(count, kept, split_size):
    kv = paged_kv([zero_logit_tokens(9, 6.0)], 4)
    out, lse = gather(kv, [[4, 8, 0]], [count], split_size=split_size)
    assert out.item() == pytest.approx(6.0 if kept else 0.0)
    assert lse.item() == pytest.approx(math.log2(kept) if kept else -math.inf)


def reserved(num_elements: int) -> np.ndarray:
    """Return a float32 array whose pages the system hands out when they are touched."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
    return np.frombuffer(mmap.mmap(-1, 4 * num_elements, flags=flags), np.float32)


@pytest.mark.skipif(sys.platform == "win32" or sys.maxsize < 2**32, reason="needs lazily reserved memory")
@pytest.mark.parametrize("path", ["paged", "gather", "append"])
def test_p4_element_offsets_beyond_31_bits(path):
    pages, page = 5, (4, 1, 64)
    stride = 2**29 + 64  # elements between pages
    pool = reserved(stride * pages)
    k = np.lib.stride_tricks.as_strided(pool, (pages, *page), (4 * stride, 256, 256, 4))
    assert 4 * stride > 2**31
    far = [np.array([[4]], np.int32), np.array([3], np.int32)]
    if path == "append":
        rows = np.arange(128, dtype=np.float32).reshape(2, 1, 64)
        arrays = np.array([0, 1], np.int32), np.array([4], np.int32), np.array([3], np.int32)
        nbattn.append_paged_kv_cache(
            rows, -rows, np.zeros(2, np.int32), np.array([0, 2], np.int32), (k, k), arrays[1], arrays[0],
            arrays[2],
        )  # fmt: skip
        np.testing.assert_array_equal(k[4, [0, 2]], -rows)
        assert not k[0, 0].any()
        return
    k[4, :3, 0, 0] = 1, 2, 3
    kv = nbattn.PagedKV.from_block_table(k, k, *far)
    q = np.zeros((1, 1, 64), np.float32)
    if path == "paged":
        out = nbattn.paged_attention(q, kv)
    else:
        out = nbattn.gather_attention(q, kv, np.array([[2, 0, 1]], np.int32), np.array([3], np.int32))
    assert out[0, 0, 0] == pytest.approx(2)


@splits
def test_p5_a_long_list_in_order(split_size):
    kv = paged_kv([zero_logit_tokens(130, np.arange(130.0))], 4)
    out, lse = gather(kv, [np.arange(130)], [130], split_size=split_size)
    assert out.item() == pytest.approx(64.5, rel=1e-6)
    assert lse.item() == pytest.approx(math.log2(130), rel=1e-6)


@splits
def test_p6_an_empty_first_tile_poisons_nothing(split_size):
    kv = paged_kv([zero_logit_tokens(64, np.arange(64.0))], 4)
    out, lse = gather(kv, [np.concatenate([np.full(64, -1), np.arange(64)])], [128], split_size=split_size)
    assert out.item() == pytest.approx(31.5, rel=1e-6)
    assert lse.item() == pytest.approx(6, rel=1e-6)


@pytest.mark.parametrize("path", RANGE_PATHS.values(), ids=RANGE_PATHS)
def test_p6_a_masked_first_tile_poisons_nothing(path):
    mask = np.arange(128) >= 64
    out, lse = path(Handmade([zero_logit_tokens(128, np.arange(128.0))], options={"attn_mask": mask}))
    assert out.item() == pytest.approx(95.5, rel=1e-6)
    assert lse.item() == pytest.approx(6, rel=1e-6)


@pytest.mark.parametrize("rows", [1, 40])
@splits
def test_p6_unmapped_pages_drop_their_keys(split_size, rows):
    k, v = zero_logit_tokens(16, np.arange(16.0))
    k[:8], v[:8] = np.nan, np.nan
    cache = np.stack([k, v.repeat(64, 2)]).reshape(2, 4, 4, 1, 64)
    kv = nbattn.PagedKV.from_block_table(*cache, np.array([[-1, -7, 2, 3]], np.int32), np.array([14], np.int32))
    q = np.zeros((rows, 1, 64), np.float32)
    out, lse = nbattn.paged_attention(q, kv, np.array([0, rows]), causal=False, split_size=split_size, return_lse=True)
    assert_close(out, np.full((rows, 1, 64), 10.5), budget=2e-6)
    assert_close(lse, np.full((rows, 1), math.log2(6)), budget=1e-6)
    out, lse = gather(kv, [[0, 7, 13, 8]], [4], split_size=split_size)
    assert_close((out, lse), (np.full((1, 1, 64), 10.5), np.ones((1, 1))), budget=1e-6)


NO_PAGES = """
import ctypes, mmap
import numpy as np
import nbattn
memory = mmap.mmap(-1, 1 << 22)
block = np.frombuffer(memory, np.float32)
assert ctypes.CDLL(None, use_errno=True).mprotect(ctypes.c_void_p(block.ctypes.data), len(memory), 0) == 0
cache = block[:1 << 18].reshape(1, 1 << 11, 2, 64)[:0]  # no page, at memory that nobody may read
table = np.full((3, 1), -1, np.int32)
kv = nbattn.PagedKV.from_block_table(cache, cache, table, np.array([1500, 0, 40]))
rows = np.array([0, 1, 2, 90])
out, lse = nbattn.paged_attention(np.ones((90, 4, 64), np.float32), kv, rows, return_lse=True)
lists = np.zeros((90, 3), np.int32)
gathered = nbattn.gather_attention(np.ones((90, 4, 64), np.float32), kv, lists, lists[:, 0] + 3, rows)
print((out == 0).all(), (lse == -np.inf).all(), (gathered == 0).all())
"""


@pytest.mark.skipif(sys.platform == "win32", reason="mprotect")
def test_p6_a_cache_without_pages_is_not_read():
    done = subprocess.run([sys.executable, "-c", NO_PAGES], capture_output=True, text=True, cwd=CHECKOUT)
    assert (done.returncode, done.stdout) == (0, "True True True\n"), done.stderr


@splits
def test_p7_a_list_is_no_set(split_size):
    kv = paged_kv([zero_logit_tokens(2, np.array([1.0, 0.0]))], 4)
    out, lse = gather(kv, [[0, 0, 1]], [3], split_size=split_size)
    assert out.item() == pytest.approx(2 / 3, rel=1e-6)
    assert lse.item() == pytest.approx(math.log2(3), rel=1e-6)


@pytest.mark.parametrize("path", ["paged", "gather"])
def test_p8_an_id_past_the_used_pages_may_be_anything(path):
    cache = np.zeros((2, 7, 4, 1, 64), np.float32)
    cache[1, ..., 0] = np.arange(28).reshape(7, 4, 1)
    for length in (1, 3, 4):
        results = []
        for table in ([[2, 7]], [[2]], [[2, -1]], [[2, 2**31 - 1]]):
            kv = nbattn.PagedKV.from_block_table(*cache, np.array(table, np.int32), np.array([length], np.int32))
            if path == "paged":
                results.append(nbattn.paged_attention(np.zeros((1, 1, 64), np.float32), kv, return_lse=True))
            else:
                results.append(gather(kv, [[0, 1, 2, 3, 4, 7]], [6]))
        assert results[0][0][0, 0, 0] == pytest.approx(8 + (length - 1) / 2)
        for other in results[1:]:
            for x, y in zip(results[0], other, strict=True):
                np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("last_page_len", [[0, 1], [4, 1], [-3, 1]])
@splits
def test_p9_a_request_without_pages(last_page_len, split_size):
    k, v = zero_logit_tokens(144, np.arange(144.0))
    pages = k.reshape(9, 16, 1, 64), v.reshape(9, 16, 1, 1)
    arrays = np.array([0, 0, 9]), np.arange(9), np.array(last_page_len)
    kv = nbattn.PagedKV.from_page_table(pages, *(x.astype(np.int32) for x in arrays))
    assert kv.kv_lens.tolist() == [0, 129]
    q = np.zeros((2, 1, 64), np.float32)
    out, lse = nbattn.paged_attention(q, kv, split_size=split_size, return_lse=True)
    assert_close(out.ravel(), np.array([0, 64]), budget=1e-4)
    assert_close(lse.ravel(), np.array([-np.inf, math.log2(129)]), budget=1e-5)


@pytest.mark.parametrize("path", ["paged", "gather", "many_rows"])
def test_p10_a_cache_inside_a_larger_pool(path):
    rng = np.random.default_rng(10)
    pool = np.full((6, 2, 2, 4, 3, 64), np.nan, np.float32)  # [pages, layers, k and v, ...]
    pool[:, 1] = rng.normal(size=(6, 2, 4, 3, 64))
    inside, copied = pool[:, 1], pool[:, 1].copy()
    assert inside.strides[0] == 2 * copied.strides[0]
    heads = 60 if path == "many_rows" else 3
    q = rng.normal(size=(2, heads, 64)).astype(np.float32)
    results = []
    for cache in (inside, copied):
        arrays = np.array([0, 2, 5]), np.array([5, 0, 3, 1, 4]), np.array([3, 1])
        kv = nbattn.PagedKV.from_page_table(cache, *(x.astype(np.int32) for x in arrays))
        if path == "gather":
            lists = np.array([[0, 6, 3, 2], [8, 7, 1, 0]], np.int32)
            results.append(nbattn.gather_attention(q, kv, lists, np.array([4, 3], np.int32), return_lse=True))
        else:
            results.append(nbattn.paged_attention(q, kv, return_lse=True))
    for x, y in zip(*results, strict=True):
        np.testing.assert_array_equal(x, y)
        assert np.isfinite(x).all()


@pytest.mark.parametrize("group", [1, 3, 5, 6, 7, 9, 16, 32])
@every_path
def test_p11_heads_read_their_own_kv_head(path, group):
    k, v = zero_logit_tokens(5, 10.0, num_kv_heads=2)
    v[:, 0] = 0
    out, _ = path(Handmade([(k, v)], np.zeros((2, 2 * group, 64), np.float32), (2,)))
    assert_close(out[..., 0], np.repeat([[0.0, 10.0]], group, axis=1).repeat(2, axis=0), budget=2e-6)


@pytest.mark.parametrize("dim", [1, 7, 56, 72, 80, 96, 136, 192, 224, 256, 512])
@pytest.mark.parametrize("path", ["one_split", "split_3", "many_rows", "gathered"])
def test_p12_head_sizes(path, dim):
    rng = np.random.default_rng(dim)
    request = tuple(rng.normal(size=(2, 19, 1, dim)).astype(np.float32))
    q = rng.normal(size=(2, 3, dim)).astype(np.float32)
    got = PATHS[path](Handmade([request], q, (2,)))
    assert_close(got, expect(oracle.paged_attention, q, scatter(request), np.array([0, 2])))


@pytest.mark.parametrize(("dim", "dim_vo"), [(192, 128), (64, 3), (5, 80)])
@every_path
def test_p12_head_sizes_of_keys_and_values_differ(path, dim, dim_vo):
    rng = np.random.default_rng(dim)
    request = tuple(rng.normal(size=(19, 2, d)).astype(np.float32) for d in (dim, dim_vo))
    q = rng.normal(size=(2, 4, dim)).astype(np.float32)
    got = path(Handmade([request], q, (2,)))
    assert_close(got, expect(oracle.paged_attention, q, scatter(request), np.array([0, 2])))


@every_path
def test_p13_one_call_equals_three_decode_calls(path):
    rng = np.random.default_rng(13)
    k, v = rng.normal(size=(2, 7, 2, 64)).astype(np.float32)
    q = rng.normal(size=(3, 6, 64)).astype(np.float32)
    got = path(Handmade([(k, v)], q, (3,)))
    steps = [flat(Handmade([(k[:length], v[:length])], q[[i]])) for i, length in enumerate((5, 6, 7))]
    assert_close(got, tuple(np.concatenate(x) for x in zip(*steps, strict=True)), budget=2e-6)


@pytest.mark.parametrize("split_size", [None, 2])
def test_p14_an_updated_plan_gives_the_new_result(split_size):
    """On the CPU there is no graph: the plan is updated and the call is made again."""
    requests = [zero_logit_tokens(n, np.arange(float(n))) for n in (9, 3)]
    short = paged_kv([(k[: len(k) // 3], v[: len(k) // 3]) for k, v in requests], 4)
    q = np.zeros((2, 1, 64), np.float32)
    plan = nbattn.plan(short, num_qo_heads=1, split_size=split_size, max_kv_len=9)
    before, _ = nbattn.paged_attention(q, short, plan=plan, return_lse=True)
    assert_close(before.ravel(), np.array([1, 0]), budget=1e-6)
    kv = paged_kv(requests, 4)
    plan.update(kv)
    out, lse = nbattn.paged_attention(q, kv, plan=plan, return_lse=True)
    assert_close(out.ravel(), np.array([4, 1]), budget=1e-6)
    assert_close(lse.ravel(), np.log2([9, 3]), budget=1e-6)


def test_p15_tables_are_read_when_a_cache_is_made():
    """The CPU half of the case: whatever wrote a table before counts, whatever edits it later does not."""
    requests = [zero_logit_tokens(n, float(n)) for n in (9, 3)]
    cache = scatter(*requests)
    indptr = np.zeros_like(cache.kv_indptr)
    np.cumsum([3, 1], out=indptr[1:])  # written just before
    ids, last = cache.kv_indices.copy(), np.array([1, 3], np.int32)
    kv = nbattn.PagedKV.from_page_table((cache.k, cache.v), indptr, ids, last)
    q = np.zeros((2, 1, 64), np.float32)
    plan = nbattn.plan(kv, num_qo_heads=1)
    for edited in (indptr, ids, last):
        edited[:] = 10**6
    assert_close(nbattn.paged_attention(q, kv).ravel(), np.array([9, 3]), budget=2e-6)
    assert_close(nbattn.paged_attention(q, kv, plan=plan).ravel(), np.array([9, 3]), budget=2e-6)

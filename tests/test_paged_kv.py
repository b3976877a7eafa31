"""`PagedKV`: every cache layout is a view of the caller's memory, read through one page table."""

import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest
from small_tables import DK, DV, HEADS, INDICES, INDPTR, LAST, LENS, PAGES, SLOTS, TABLE

from nbattn import PagedKV


def numbers(*shape, dtype=np.float32):
    """Return an array whose elements all differ."""
    return np.arange(np.prod(shape), dtype=dtype).reshape(shape)


def cache_of(layout, dim, seed=0.0):
    shape = (PAGES, SLOTS, HEADS, dim) if layout == "NHD" else (PAGES, HEADS, SLOTS, dim)
    return numbers(*shape) + np.float32(seed)


def row(cache, layout, page, slot, head):
    return cache[page, slot, head] if layout == "NHD" else cache[page, head, slot]


def gathered(kv, request):
    """Return (K, V) of a request as the table says, each [keys, heads, dim]."""
    keys = np.arange(kv.kv_lens[request])
    pages = kv.kv_indices[kv.kv_indptr[request] + keys // kv.page_size]
    return kv.k[pages, keys % kv.page_size], kv.v[pages, keys % kv.page_size]


def assert_reads(kv, lens, k_row, v_row):
    """Assert that key j, head h of request b is ``k_row(b, j, h)`` and ``v_row(b, j, h)``."""
    assert kv.kv_lens.tolist() == list(lens)
    for b, length in enumerate(lens):
        k, v = gathered(kv, b)
        assert len(k) == len(v) == length
        for j in range(length):
            for h in range(kv.num_kv_heads):
                np.testing.assert_array_equal(k[j, h], k_row(b, j, h))
                np.testing.assert_array_equal(v[j, h], v_row(b, j, h))


def page_of(b, j):
    return TABLE[b, j // SLOTS], j % SLOTS


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("form", ["combined", "strided", "tuple", "list"])
def test_from_page_table_reads_every_form(layout, form):
    if form in ("tuple", "list"):
        k, v = cache_of(layout, DK), cache_of(layout, DV, 0.5)
        cache = {"tuple": tuple, "list": list}[form]([k, v])
    else:
        shape = (PAGES, 2, SLOTS, HEADS, DK) if layout == "NHD" else (PAGES, 2, HEADS, SLOTS, DK)
        cache = numbers(*shape) if form == "combined" else numbers(2 * PAGES, 2, *shape[2:4], DK + 3)[1::2, ..., :DK]
        k, v = cache[:, 0], cache[:, 1]
    kv = PagedKV.from_page_table(cache, INDPTR, INDICES, LAST, layout)
    assert np.shares_memory(kv.k, k)
    assert np.shares_memory(kv.v, v)
    assert_reads(
        kv, LENS, lambda b, j, h: row(k, layout, *page_of(b, j), h), lambda b, j, h: row(v, layout, *page_of(b, j), h)
    )


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_from_block_table_reads_the_used_prefix_of_each_row(layout):
    k, v = cache_of(layout, DK), cache_of(layout, DV, 0.5)
    kv = PagedKV.from_block_table(k, v, TABLE, LENS, layout)
    assert np.shares_memory(kv.k, k)
    assert np.shares_memory(kv.v, v)
    assert kv.kv_indptr.tolist() == [0, 3, 6, 9]
    assert_reads(
        kv, LENS, lambda b, j, h: row(k, layout, *page_of(b, j), h), lambda b, j, h: row(v, layout, *page_of(b, j), h)
    )


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("slot_ids", [None, [5, 0, 2]])
def test_from_slots_reads_one_row_per_request(layout, slot_ids):
    k, v = cache_of(layout, DK), cache_of(layout, DV, 0.5)
    lens, rows = [3, 0, 1], slot_ids or [0, 1, 2]
    kv = PagedKV.from_slots(k, v, np.array(lens), slot_ids and np.array(slot_ids), layout)
    assert kv.page_size == SLOTS
    assert np.shares_memory(kv.k, k)
    assert np.shares_memory(kv.v, v)
    assert_reads(kv, lens, lambda b, j, h: row(k, layout, rows[b], j, h), lambda b, j, h: row(v, layout, rows[b], j, h))


@pytest.mark.parametrize("layer", [0, 2])
@pytest.mark.parametrize("page_stride", [-1, None, 3 * 2 * SLOTS * HEADS * DK, np.array([200]), np.int64(200)])
def test_from_blocks_reads_one_layer_at_any_page_stride(layer, page_stride):
    packed = 2 * 3 * SLOTS * HEADS * DK
    stride = packed if page_stride is None or int(np.squeeze(page_stride)) == -1 else int(np.squeeze(page_stride))
    if stride < packed:
        stride = page_stride = packed + 16
    memory = numbers(PAGES * stride)
    blocks = memory[: PAGES * packed].reshape(PAGES, 2, 3, SLOTS, HEADS, DK)
    kv = PagedKV.from_blocks(blocks, TABLE.astype(np.uint32), LENS, layer, page_stride)
    assert np.shares_memory(kv.k, memory)
    assert np.shares_memory(kv.v, memory)

    def at(kind):
        inside = np.arange(packed).reshape(2, 3, SLOTS, HEADS, DK)
        return lambda b, j, h: memory[page_of(b, j)[0] * stride + inside[kind, layer, page_of(b, j)[1], h]]

    assert_reads(kv, LENS, at(0), at(1))


@pytest.mark.parametrize(
    "dtype",
    ["float16", "float32", "float64", "int8", ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2],
)
def test_every_cache_dtype_is_named_and_keeps_its_bits(dtype):
    bits = np.random.default_rng(0).integers(0, 256, (2, 2, 4, 1, 8 * np.dtype(dtype).itemsize), np.uint8)
    kv = PagedKV.from_page_table(bits.view(dtype), np.array([0, 1]), np.array([1]), np.array([4]))
    assert kv.kv_dtype == np.dtype(dtype).name
    assert kv.k[1].tobytes() == bits[1, 0].tobytes()
    assert kv.v[1].tobytes() == bits[1, 1].tobytes()


def test_attributes():
    kv = PagedKV.from_block_table(cache_of("HND", DK), cache_of("HND", DV), TABLE, LENS, "HND")
    numbers_of = (kv.num_pages, kv.page_size, kv.num_kv_heads, kv.head_dim_qk, kv.head_dim_vo, kv.batch_size)
    assert numbers_of == (PAGES, SLOTS, HEADS, DK, DV, 3)
    assert (kv.library, kv.kv_dtype, kv.kv_layout) == ("numpy", "float32", "HND")
    assert [x.dtype for x in (kv.kv_indptr, kv.kv_indices, kv.kv_lens)] == [np.int32] * 3
    assert repr(kv) == "PagedKV(7 pages of 3 slots, 2 KV heads of 8/5, numpy float32; 3 requests, 11 keys)"
    with pytest.raises(AttributeError):
        kv.k = kv.v


def test_tables_are_snapshots():
    indptr, indices, last = INDPTR.copy(), INDICES.copy(), LAST.copy()
    kv = PagedKV.from_page_table((cache_of("NHD", DK), cache_of("NHD", DV)), indptr, indices, last)
    for array in (indptr, indices, last):
        array[:] = 77
    assert (kv.kv_indptr.tolist(), kv.kv_indices.tolist(), kv.kv_lens.tolist()) == (
        [0, 3, 5, 5],
        [6, 2, 4, 1, 1],
        [7, 4, 0],
    )


@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.uint32])
def test_host_index_dtypes(dtype):
    pair = cache_of("NHD", DK), cache_of("NHD", DV)
    kv = PagedKV.from_page_table(pair, *(x.astype(dtype) for x in (INDPTR, INDICES, LAST)))
    assert (kv.kv_indices.dtype, kv.kv_indices.tolist(), kv.kv_lens.tolist()) == (np.int32, INDICES.tolist(), [7, 4, 0])
    strided = np.repeat(TABLE, 2, axis=1).astype(dtype)[:, ::2]
    kv = PagedKV.from_block_table(*pair, strided, LENS.astype(dtype))
    assert kv.kv_indices.flags.c_contiguous
    assert kv.kv_indices.tolist() == TABLE.ravel().tolist()


@pytest.mark.parametrize("last", [[0, 1], [4, 1]])
def test_p9_a_request_without_pages_is_empty_whatever_its_last_page_says(last):
    cache = np.zeros((9, 2, 16, 1, 4), np.float32)
    kv = PagedKV.from_page_table(cache, np.array([0, 0, 9]), np.arange(9), np.array(last))
    assert kv.kv_lens.tolist() == [0, 129]


@pytest.mark.parametrize(
    ("dtype", "padding"), [(np.int32, 7), (np.int32, -5), (np.uint32, 2**32 - 1), (np.int64, 2**40)]
)
def test_p8_padding_of_a_table_may_hold_anything(dtype, padding):
    table = np.array([[2, padding]], dtype)
    kv = PagedKV.from_block_table(cache_of("NHD", DK), cache_of("NHD", DV), table, np.array([SLOTS]))
    assert kv.kv_indices[0] == 2
    assert kv.kv_indices[1] < 0 or kv.kv_indices[1] >= PAGES
    assert kv.check() is None


def test_entries_past_the_last_offset_are_ignored():
    indices = np.array([1, 0, 99, -7, 99], np.int32)
    kv = PagedKV.from_page_table((cache_of("NHD", DK), cache_of("NHD", DV)), np.array([0, 2]), indices, np.array([2]))
    assert (kv.kv_lens.tolist(), kv.kv_indices.tolist()) == ([5], [1, 0])


def test_p10_a_slice_of_a_larger_pool_reads_like_a_copy():
    pool = numbers(PAGES, 4, SLOTS, HEADS, DK)
    kv = PagedKV.from_page_table(pool[:, 1:3], INDPTR, INDICES, LAST)
    assert kv.k.strides[0] == 2 * (2 * SLOTS * HEADS * DK * kv.k.itemsize)  # twice the packed page
    assert np.shares_memory(kv.k, pool)
    copy = PagedKV.from_page_table(pool[:, 1:3].copy(), INDPTR, INDICES, LAST)
    for b in range(3):
        for x, y in zip(gathered(kv, b), gathered(copy, b), strict=True):
            np.testing.assert_array_equal(x, y)


def test_p4_pages_beyond_two_to_the_31_elements():
    page = 2 * 4 * 8  # K and V, 4 slots, 8 dims
    memory = np.empty(2**31 + page, np.int8)  # never touched but for the last page
    memory[2**31 :] = np.arange(page)
    blocks = memory[: 3 * page].reshape(3, 2, 1, 4, 1, 8)
    kv = PagedKV.from_blocks(blocks, np.array([[2]], np.uint32), np.array([3]), 0, page_stride=2**30)
    k, v = gathered(kv, 0)
    assert k.ravel().tolist() == list(range(24))
    assert v.ravel().tolist() == list(range(32, 56))


def test_unmapped_pages_are_legal_in_every_table():
    kv = PagedKV.from_block_table(cache_of("NHD", DK), cache_of("NHD", DV), np.array([[-1, 3]]), np.array([5]))
    assert kv.kv_indices.tolist() == [-1, 3]
    kv = PagedKV.from_block_table(cache_of("NHD", DK), cache_of("NHD", DV), np.array([[-(2**40), 3]]), np.array([5]))
    assert kv.kv_indices.tolist() == [-1, 3]


def test_no_requests_and_no_pages():
    kv = PagedKV.from_slots(cache_of("NHD", DK), cache_of("NHD", DV), np.zeros(0, np.int32))
    assert (kv.batch_size, kv.kv_indptr.tolist(), kv.kv_indices.size) == (0, [0], 0)
    kv = PagedKV.from_page_table(np.zeros((0, 2, 4, 1, 8), np.int8), np.zeros(3, np.int32), *np.zeros((2, 2), np.int32))
    assert (kv.num_pages, kv.kv_lens.tolist(), kv.check()) == (0, [0, 0], None)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_with_pages_keeps_the_table_and_reads_other_arrays(layout):
    kv = PagedKV.from_block_table(cache_of(layout, DK), cache_of(layout, DK), TABLE, LENS, layout)
    both = numbers(PAGES, 2, *cache_of(layout, DK).shape[1:])
    for other in (kv.with_pages(both[:, 0], both[:, 1]), kv.with_pages(both), kv.with_pages((both[:, 0], both[:, 1]))):
        assert other.table is kv.table
        assert np.shares_memory(other.k, both)
        for b, j in ((0, 6), (1, 3)):
            page, slot = page_of(b, j)
            np.testing.assert_array_equal(gathered(other, b)[0][j, 1], row(both[:, 0], layout, page, slot, 1))
            np.testing.assert_array_equal(gathered(other, b)[1][j, 1], row(both[:, 1], layout, page, slot, 1))


def test_importing_a_cache_loads_no_gpu_package_and_no_compiler():
    code = "import sys, nbattn.kv_cache; print([m for m in ('cupy', 'numba', 'numba.cuda') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("name", ["kv_lens", "kv_indptr", "kv_indices"])
def test_a_checked_table_cannot_be_written(name):
    lens, cache = np.array([3, 5], np.int32), np.zeros((2, 8, 1, 4), np.float32)
    kv = PagedKV.from_slots(cache, cache, lens)
    with pytest.raises(ValueError, match="read-only"):
        getattr(kv, name)[0] = 1
    lens[0] = 8  # the caller's own array may be
    assert kv.kv_lens.tolist() == [3, 5]


@pytest.mark.filterwarnings("ignore:Setting the (shape|dtype):DeprecationWarning")
@pytest.mark.parametrize("change", [{"shape": (1, PAGES * SLOTS, HEADS, DK)}, {"dtype": np.int32}])
def test_later_changes_of_the_callers_array_in_place_are_not_seen(change):
    k, v = cache_of("NHD", DK), cache_of("NHD", DV)
    caches = [PagedKV.from_block_table(k, v, TABLE, LENS), PagedKV.from_page_table((k, v), INDPTR, INDICES, LAST)]
    caches += [caches[0].with_pages(k, v)]
    for name, value in change.items():
        setattr(k, name, value)
    for kv in caches:
        assert kv.k.shape == (PAGES, SLOTS, HEADS, DK)
        assert kv.k.dtype == np.float32
        assert np.shares_memory(kv.k, k)

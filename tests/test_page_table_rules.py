"""Every rule of a page table and of a cache: breaking it is refused by class, argument and position."""

import numpy as np
import pytest
from small_tables import (
    DK,
    DV,
    HEADS,
    INDICES,
    INDPTR,
    LENS,
    PAGES,
    SLOTS,
    TABLE,
    K,
    V,
    from_block_table,
    from_page_table,
    from_slots,
)

from nbattn import ContractError, PagedKV, PageTableError

BLOCKS = np.zeros((PAGES, 2, 3, SLOTS, HEADS, DK), np.float32)


def from_blocks(blocks=BLOCKS, table=TABLE, lens=LENS, layer=0, stride=-1):
    return PagedKV.from_blocks(blocks, table, lens, layer, stride)


def last_page(page_size, last):
    """Return a call with three requests of 40, 0 and 4 pages, the last with a wrong tail."""
    cache = np.zeros((2, 2, page_size, 1, 4), np.float32)
    return lambda: from_page_table(cache, np.array([0, 40, 40, 44]), np.zeros(44, np.int32), np.array([1, 0, last]))


NO_LEADING_0 = (
    "kv_indptr[0]: must be 0, got 3. It has one entry per request: offsets are a 0, then the running sums of the page"
    " counts."
)
BROKEN_TABLES = {
    "indptr starts late": (
        lambda: from_page_table(indptr=np.array([1, 3, 5, 5])),
        "kv_indptr[0]: must be 0, got 1.",
    ),
    "indptr decreases": (
        lambda: from_page_table(indptr=np.array([0, 3, 2, 5])),
        "kv_indptr[2]: must be at least 3 (kv_indptr[1]), got 2.",
    ),
    "indptr decreases as uint32": (
        lambda: from_page_table(indptr=np.array([0, 3, 2, 5], np.uint32)),
        "kv_indptr[2]: must be at least 3 (kv_indptr[1]), got 2.",
    ),
    "indptr falls by more than int64 counts": (
        lambda: from_page_table(indptr=np.array([0, 3, 5, -(2**63)]), last=np.array([1, 1, 3])),
        "kv_indptr[3]: must be at least 5 (kv_indptr[2]), got -9223372036854775808.",
    ),
    "indptr past the ids": (
        lambda: from_page_table(indptr=np.array([0, 3, 5, 6])),
        "kv_indptr[3]: must be at most 5 (entries of kv_indices), got 6.",
    ),
    "indptr beyond int32": (
        lambda: from_page_table(indptr=np.array([0, 3, 5, 2**32 + 5])),
        "kv_indptr[3]: must be at most 5 (entries of kv_indices), got 4294967301.",
    ),
    "indptr empty": (
        lambda: from_page_table(indptr=np.zeros(0, np.int32)),
        "kv_indptr: must hold at least the leading 0, got an empty array.",
    ),
    "indptr is lengths": (
        lambda: from_page_table(indptr=np.array([3, 2]), last=np.array([1, 1])),
        NO_LEADING_0,
    ),
    "indptr without its 0": (
        lambda: from_page_table(indptr=np.array([3, 5]), last=np.array([1, 1])),
        NO_LEADING_0,
    ),
    "indptr and indices swapped": (
        lambda: from_page_table(indptr=INDICES, indices=INDPTR),
        "kv_indptr[0]: must be 0, got 6. kv_indptr and kv_indices look swapped.",
    ),
    "indices of one page swapped": (
        lambda: from_page_table(indptr=np.zeros(5, int), indices=INDPTR),
        "kv_last_page_len: must have 4 entries (one per request of kv_indptr), got 3."
        " kv_indptr and kv_indices look swapped.",
    ),
    "last_page_len count": (
        lambda: from_page_table(last=np.array([1, 1])),
        "kv_last_page_len: must have 3 entries (one per request of kv_indptr), got 2.",
    ),
    "last page too long": (
        last_page(16, 17),
        "kv_last_page_len[2]: must be in 1..16 (page_size), got 17 (request 2 owns kv_indices[40:44]).",
    ),
    "last page empty": (
        last_page(16, 0),
        "kv_last_page_len[2]: must be in 1..16 (page_size), got 0 (request 2 owns kv_indices[40:44]).",
    ),
    "last page negative": (
        last_page(16, -16),
        "kv_last_page_len[2]: must be in 1..16 (page_size), got -16 (request 2 owns kv_indices[40:44]).",
    ),
    "page id": (
        lambda: from_page_table(indices=np.array([6, 2, 4, 1, 7])),
        "kv_indices[4]: must be below 7 (pages of the cache), got 7 (request 1, keys from 3 on)."
        " Negative ids mark unmapped pages.",
    ),
    "page id after an empty request": (
        lambda: from_page_table(indptr=np.array([0, 3, 3, 5]), last=np.array([1, 0, 1]), indices=INDICES + 2),
        "kv_indices[0]: must be below 7 (pages of the cache), got 8 (request 0, keys from 0 on)."
        " Negative ids mark unmapped pages.",
    ),
    "page id in a table": (
        lambda: from_block_table(table=np.array([[0, 9, 9], [0, 1, 9], [9, 9, 9]]), lens=np.array([3, 7, 0])),
        "block_table[1, 2]: must be below 7 (pages of the cache), got 9 (request 1, keys from 6 on)."
        " Negative ids mark unmapped pages.",
    ),
    "page id 2**32 - 1": (
        lambda: from_blocks(table=np.full((3, 3), 2**32 - 1, np.uint32)),
        "kv_lookup_table[0, 0]: must be below 7 (pages of the cache), got 4294967295 (request 0, keys from 0 on)."
        " Negative ids mark unmapped pages.",
    ),
    "table rows": (
        lambda: from_block_table(table=TABLE[:2]),
        "block_table: must have 3 rows (one per entry of kv_lens), got 2.",
    ),
    "length past the table": (
        lambda: from_block_table(lens=np.array([7, 10, 0])),
        "kv_lens[1]: must be in 0..9 (3 blocks of 3 in block_table), got 10.",
    ),
    "length past the lookup table": (
        lambda: from_blocks(lens=np.array([7, 4, 10])),
        "kv_lens[2]: must be in 0..9 (3 blocks of 3 in kv_lookup_table), got 10.",
    ),
    "negative length": (
        lambda: from_block_table(lens=np.array([7, 4, -1])),
        "kv_lens[2]: must be in 0..9 (3 blocks of 3 in block_table), got -1.",
    ),
    "length past the slots": (lambda: from_slots([3, 4]), "kv_lens[1]: must be in 0..3 (slots of a row), got 4."),
    "more requests than rows": (
        lambda: from_slots([1] * 8),
        "kv_lens: must have at most 7 entries (rows of the cache), got 8. Share rows by a block table.",
    ),
    "slot_ids count": (
        lambda: from_slots([1, 1], [1]),
        "slot_ids: must have 2 entries (one per entry of kv_lens), got 1.",
    ),
    "slot id too large": (
        lambda: from_slots([1, 1], [1, 7]),
        "slot_ids[1]: must name one of 7 rows of the cache, got 7.",
    ),
    "slot id negative": (
        lambda: from_slots([1, 1], [-1, 1]),
        "slot_ids[0]: must name one of 7 rows of the cache, got -1.",
    ),
    "slot id twice": (
        lambda: from_slots([1, 1, 1, 1], [4, 3, 0, 3]),
        "slot_ids[3]: must differ from slot_ids[1], got 3 in both.",
    ),
    "more keys than int32 counts": (
        lambda: PagedKV.from_block_table(
            *[np.broadcast_to(np.float32(0), (1, 2**20, 1, 1))] * 2, np.zeros((1, 4096), np.int32), np.array([2**31])
        ),
        "kv_lens[0]: request 0 must have at most 2147483647 keys (int32), got 2147483648.",
    ),
}


@pytest.mark.parametrize("case", BROKEN_TABLES)
def test_a_broken_table_is_refused_by_name(case):
    call, message = BROKEN_TABLES[case]
    with pytest.raises(PageTableError) as caught:
        call()
    assert str(caught.value) == message


def packed_struct():
    return np.zeros((PAGES, SLOTS, HEADS, 1), [("x", np.float32), ("pad", np.int8)])["x"]


BROKEN_ARRAYS = {
    "layout name": (lambda: from_page_table(layout="nhd"), 'kv_layout: must be "NHD" or "HND", got \'nhd\'.'),
    "layout list": (lambda: from_page_table(layout=["NHD"]), 'kv_layout: must be "NHD" or "HND", got [\'NHD\'].'),
    "no array": (lambda: from_block_table(v=None), "v_cache: must be a NumPy or CuPy array, got NoneType."),
    "a pair of nothing": (
        lambda: from_page_table(cache=(None, None)),
        "paged_kv_cache[0]: must be a NumPy or CuPy array, got NoneType.",
    ),
    "not an array": (
        lambda: from_page_table(cache=(K, [1])),
        "paged_kv_cache[1]: must be a NumPy or CuPy array, got list.",
    ),
    "three caches": (
        lambda: from_page_table(cache=(K, V, V)),
        "paged_kv_cache: must be a 5-D array or a pair (k, v), got 3 items.",
    ),
    "K alone": (
        lambda: from_page_table(cache=K),
        "paged_kv_cache: must be [pages, 2, ...] with 5 axes or a pair (k, v), got (7, 3, 2, 8).",
    ),
    "K and V on axis 0": (
        lambda: from_page_table(cache=np.stack([K, K])),
        "paged_kv_cache: must be [pages, 2, ...] with 5 axes or a pair (k, v), got (2, 7, 3, 2, 8)."
        " K and V seem to stand on axis 0: pass (paged_kv_cache[0], paged_kv_cache[1]).",
    ),
    "rank": (
        lambda: from_block_table(k=K[0]),
        "k_cache: must be [pages, page_size, kv_heads, dim] (NHD), got 3 axes (3, 2, 8).",
    ),
    "empty heads": (
        lambda: from_block_table(k=K[:, :, :0]),
        "k_cache: must be [pages, page_size, kv_heads, dim] (NHD), no axis but the first empty, got (7, 3, 0, 8).",
    ),
    "dtype": (
        lambda: from_block_table(k=K.astype(np.int16)),
        "k_cache: must be one of float16, bfloat16, float32, float64, float8_e4m3fn, float8_e5m2, int8, got int16.",
    ),
    "byte order": (
        lambda: from_block_table(k=K.astype(">f4")),
        "k_cache: must be one of float16, bfloat16, float32, float64, float8_e4m3fn, float8_e5m2, int8, got >f4.",
    ),
    "two dtypes": (
        lambda: from_block_table(v=V.astype(np.float16)),
        "v_cache: must be float32 as k_cache is, got float16.",
    ),
    "last axis": (
        lambda: from_block_table(v=np.zeros((PAGES, SLOTS, HEADS, 2 * DV), np.float32)[..., ::2]),
        "v_cache: must be contiguous along its last axis, got strides (240, 80, 40, 8) in bytes.",
    ),
    "broken elements": (
        lambda: from_block_table(k=packed_struct(), v=packed_struct()),
        "k_cache: must have strides of whole 4-byte elements, got (30, 10, 5, 5) bytes.",
    ),
    "pages differ": (
        lambda: from_block_table(v=V[:6]),
        "v_cache: must be (7, 3, 2, 5) to match k_cache (only dim may differ), got (6, 3, 2, 5).",
    ),
    "layouts differ": (
        lambda: from_block_table(v=V.transpose(0, 2, 1, 3)),
        "v_cache: must be (7, 3, 2, 5) to match k_cache (only dim may differ), got (7, 2, 3, 5)."
        " One of the two looks NHD, the other HND.",
    ),
    "blocks rank": (
        lambda: from_blocks(blocks=BLOCKS[:, 0]),
        "kv_blocks: must be [pages, 2, layers, page_size, kv_heads, dim], got (7, 3, 3, 2, 8).",
    ),
    "blocks axis 1": (
        lambda: from_blocks(blocks=BLOCKS[:, :1]),
        "kv_blocks: must be [pages, 2, layers, page_size, kv_heads, dim], got (7, 1, 3, 3, 2, 8).",
    ),
    "layer": (lambda: from_blocks(layer=3), "layer_idx: must be in 0..2 (layers of kv_blocks), got 3."),
    "bool layer": (
        lambda: from_blocks(layer=True),
        "layer_idx: must be an integer or a one-element integer array, got True.",
    ),
    "negative layer": (lambda: from_blocks(layer=-1), "layer_idx: must be in 0..2 (layers of kv_blocks), got -1."),
    "layer type": (
        lambda: from_blocks(layer=1.0),
        "layer_idx: must be an integer or a one-element integer array, got 1.0.",
    ),
    "page_stride type": (
        lambda: from_blocks(stride=np.array([288, 288])),
        "page_stride: must be an integer or a one-element integer array, got array([288, 288]).",
    ),
    "page_stride below a page": (
        lambda: from_blocks(stride=287),
        "page_stride: must be -1 or at least 288 (one packed page), got 287.",
    ),
    "page_stride past the memory": (
        lambda: from_blocks(stride=289),
        "page_stride: the last of 7 pages must end inside the memory of the base of kv_blocks, 2016 elements from its"
        " start, got 289, which ends at 2022.",
    ),
    "page_stride of no int64": (
        lambda: from_blocks(stride=2**70),
        "page_stride: the last of 7 pages must end inside the memory of the base of kv_blocks, 2016 elements from its"
        f" start, got {2**70}, which ends at {6 * 2**70 + 288}.",
    ),
    "ids dtype": (
        lambda: from_page_table(indices=INDICES.astype(np.int16)),
        "kv_indices: must be int32 (int64 and uint32 are accepted on the host), got int16.",
    ),
    "float offsets": (
        lambda: from_page_table(indptr=INDPTR.astype(np.float64)),
        "kv_indptr: must be int32 (int64 and uint32 are accepted on the host), got float64.",
    ),
    "list of lengths": (
        lambda: from_block_table(lens=[7, 4, 0]),
        "kv_lens: must be a NumPy or CuPy array, got list.",
    ),
    "rank of ids": (
        lambda: from_page_table(indices=INDICES[None]),
        "kv_indices: must have 1 dimension, got shape (1, 5).",
    ),
    "rank of the table": (
        lambda: from_block_table(table=TABLE[0]),
        "block_table: must have 2 dimensions, got shape (3,).",
    ),
}


@pytest.mark.parametrize("case", BROKEN_ARRAYS)
def test_a_wrong_array_is_refused_by_name(case):
    call, message = BROKEN_ARRAYS[case]
    with pytest.raises(ContractError) as caught:
        call()
    assert str(caught.value) == message
    assert not isinstance(caught.value, PageTableError)


def test_page_stride_may_use_all_memory_of_the_base():
    packed = 2 * 3 * SLOTS * HEADS * DK
    memory = np.arange(6 * (packed + 1) + packed, dtype=np.float32)
    blocks = memory[: PAGES * packed].reshape(BLOCKS.shape)
    kv = from_blocks(blocks=blocks, stride=packed + 1)
    assert kv.v[6, -1, -1, -1] == memory[6 * (packed + 1) + packed - 2 * SLOTS * HEADS * DK - 1]
    with pytest.raises(ContractError, match="page_stride: the last of 7 pages must end inside"):
        from_blocks(blocks=blocks, stride=packed + 2)
    later = memory[1 : 1 + PAGES * packed].reshape(BLOCKS.shape)  # the same pages, one element later
    with pytest.raises(ContractError, match="page_stride: the last of 7 pages must end inside"):
        from_blocks(blocks=later, stride=packed + 1)


def test_the_page_stride_of_one_page_is_not_used():
    assert np.array_equal(from_blocks(blocks=BLOCKS[:1], table=TABLE * 0, stride=2**70).k, from_blocks().k[:1])

"""`append_paged_kv_cache` against a plain Python loop; a refused call leaves every byte of the cache as it was."""

import ml_dtypes
import numpy as np
import pytest

from nbattn import ContractError, PageTableError, append_paged_kv_cache

DTYPES = ["float16", ml_dtypes.bfloat16, "float32", "float64", ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2, "int8"]


def random_bits(rng, shape, dtype):
    """Return an array of that dtype with random bits, NaN and infinity included."""
    size = np.dtype(dtype).itemsize
    return rng.integers(0, 256, (*shape[:-1], shape[-1] * size), np.uint8).view(dtype)


def bits(x):
    return np.ascontiguousarray(x).view(np.uint8)


def random_table(rng, num_pages, page_size, batch_size):
    """Return (kv_indices, kv_indptr, kv_last_page_len, kv_lens); no page belongs to two requests."""
    lens = rng.integers(0, 3 * page_size + 1, batch_size)
    lens[rng.integers(batch_size)] = 2 * page_size + 1
    pages = -(-lens // page_size)
    indptr = np.concatenate([[0], np.cumsum(pages)]).astype(np.int32)
    indices = rng.permutation(num_pages)[: indptr[-1]].astype(np.int32)
    return indices, indptr, (lens - (pages - 1) * page_size).astype(np.int32), lens


def make_cache(rng, form, layout, num_pages, page_size, heads, dims, dtype):
    """Return (argument, k, v, memory): the cache as it is passed, K and V inside it, and all the bytes around them."""
    axes = (page_size, heads) if layout == "NHD" else (heads, page_size)
    if form == "combined":
        memory = random_bits(rng, (num_pages, 2, *axes, dims[0]), dtype)
        return memory, memory[:, 0], memory[:, 1], [memory]
    if form == "pair":
        memory = [random_bits(rng, (num_pages, *axes, dim), dtype) for dim in dims]
        return tuple(memory), *memory, memory
    memory = random_bits(rng, (2 * num_pages, 3, axes[0], 2, axes[1], dims[0] + 1), dtype)
    strided = memory[1::2, 1:, :, 1, ::-1, 1:]  # every axis but the last one with a stride of its own
    return strided, strided[:, 0], strided[:, 1], [memory]


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("form", ["combined", "pair", "strided"])
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: np.dtype(dtype).name)
def test_append_equals_a_plain_loop(dtype, form, layout):
    rng = np.random.default_rng([DTYPES.index(dtype), len(form), len(layout)])
    page_size, heads = int(rng.choice([1, 2, 5, 16])), int(rng.choice([1, 3]))
    dims = (8, 8) if form != "pair" else (8, 5)
    indices, indptr, last, lens = random_table(rng, 20, page_size, 5)
    cache, k, v, memory = make_cache(rng, form, layout, 20, page_size, heads, dims, dtype)
    every = np.array([(b, j) for b in range(5) for j in range(lens[b])])
    chosen = rng.permutation(every)[: len(every) // 2 + 1]
    key = random_bits(rng, (2 * len(chosen), heads, dims[0]), dtype)[::2]
    value = random_bits(rng, (len(chosen), 2 * heads, dims[1]), dtype)[:, ::2]

    expected_k, expected_v = np.array(k), np.array(v)
    for i, (b, j) in enumerate(chosen.tolist()):
        page, slot = indices[indptr[b] + j // page_size], j % page_size
        for h in range(heads):
            place = (page, slot, h) if layout == "NHD" else (page, h, slot)
            expected_k[place], expected_v[place] = key[i, h], value[i, h]
    changed = [np.count_nonzero(bits(a) != bits(b)) for a, b in ((expected_k, k), (expected_v, v))]
    before = [bits(m).copy() for m in memory]

    index_dtype = rng.choice([np.int32, np.int64, np.uint32])
    batch_indices, positions = chosen.T.astype(index_dtype)
    assert append_paged_kv_cache(key, value, batch_indices, positions, cache, indices, indptr, last, layout) is None
    np.testing.assert_array_equal(bits(k), bits(expected_k))
    np.testing.assert_array_equal(bits(v), bits(expected_v))
    assert min(changed) > 0
    assert sum(np.count_nonzero(bits(m) != b) for m, b in zip(memory, before, strict=True)) == sum(changed)


def test_the_later_of_two_tokens_with_one_place_stays():
    cache = np.zeros((1, 2, 4, 1, 2), np.int8)
    rows = np.arange(6, dtype=np.int8).reshape(3, 1, 2)
    ids, zero = np.array([0, 0, 0]), np.array([0])
    append_paged_kv_cache(rows, rows, ids, np.array([1, 0, 1]), cache, zero, np.array([0, 1]), np.array([2]))
    assert cache[0, 0, :, 0].tolist() == [[2, 3], [4, 5], [0, 0], [0, 0]]


def test_no_tokens():
    cache = np.ones((1, 2, 4, 1, 2), np.int8)
    none, rows = np.zeros(0, np.int32), np.zeros((0, 1, 2), np.int8)
    append_paged_kv_cache(rows, rows, none, none, cache, np.array([0]), np.array([0, 1]), np.array([2]))
    assert cache.min() == 1


def test_a_page_beyond_two_to_the_31_bytes():
    page = 2 * 4 * 8
    memory = np.empty(2**31 + page, np.int8)  # never touched but for the last page
    memory[2**31 :] = 0
    cache = np.lib.stride_tricks.as_strided(memory, (3, 2, 4, 1, 8), (2**30, 32, 8, 8, 1))
    rows = np.arange(8, dtype=np.int8).reshape(1, 1, 8)
    append_paged_kv_cache(
        rows, rows + 8, np.array([0]), np.array([3]), cache, np.array([2]), np.array([0, 1]), np.array([4])
    )
    assert memory[2**31 :].tolist() == [0] * 24 + list(range(8)) + [0] * 24 + list(range(8, 16))


# Request 0 owns pages 1, 4 and has 5 keys, request 1 owns the unmapped page and page 2 and has 6 keys.
GOOD = {
    "append_key": np.ones((3, 2, 8), np.float32),
    "append_value": np.ones((3, 2, 8), np.float32),
    "batch_indices": np.array([0, 1, 0]),
    "positions": np.array([3, 5, 4]),
    "kv_indices": np.array([1, 4, -1, 2]),
    "kv_indptr": np.array([0, 2, 4]),
    "kv_last_page_len": np.array([1, 2]),
}
EXPECTED_ROWS = [(1, 3), (2, 1), (4, 0)]  # (page, slot) of the three tokens

REFUSED = {
    "request too large": (
        {"batch_indices": np.array([0, 1, 2])},
        PageTableError,
        "batch_indices[2]: must name one of 2 requests, got 2.",
    ),
    "negative request": (
        {"batch_indices": np.array([0, -1, 0])},
        PageTableError,
        "batch_indices[1]: must name one of 2 requests, got -1.",
    ),
    "position too large": (
        {"positions": np.array([3, 5, 5])},
        PageTableError,
        "positions[2]: must name one of the 5 keys that request 0 has with the new ones, got 5.",
    ),
    "negative position": (
        {"positions": np.array([3, 5, -1])},
        PageTableError,
        "positions[2]: must name one of the 5 keys that request 0 has with the new ones, got -1.",
    ),
    "request without keys": (
        {"kv_indptr": np.array([0, 2, 2]), "positions": np.array([3, 0, 4])},
        PageTableError,
        "positions[1]: must name one of the 0 keys that request 1 has with the new ones, got 0.",
    ),
    "unmapped page": (
        {"positions": np.array([3, 2, 4])},
        PageTableError,
        "kv_indices[2]: must be a page for token 1 (request 1, position 2), got -1 (unmapped).",
    ),
    "broken table": (
        {"kv_last_page_len": np.array([1, 5])},
        PageTableError,
        "kv_last_page_len[1]: must be in 1..4 (page_size), got 5 (request 1 owns kv_indices[2:4]).",
    ),
    "indices and indptr swapped": (
        {"kv_indices": np.array([0, 2, 4]), "kv_indptr": np.array([1, 4, 3, 2])},
        PageTableError,
        "kv_indptr[0]: must be 0, got 1. kv_indptr and kv_indices look swapped.",
    ),
    "dtype of keys": (
        {"append_key": np.ones((3, 2, 8), np.float16)},
        ContractError,
        "append_key: must be float32 as the cache is, got float16. Nothing is cast silently.",
    ),
    "dtype of values": (
        {"append_value": np.ones((3, 2, 8), np.float64)},
        ContractError,
        "append_value: must be float32 as the cache is, got float64. Nothing is cast silently.",
    ),
    "head size": (
        {"append_value": np.ones((3, 2, 4), np.float32)},
        ContractError,
        "append_value: must be [tokens, 2, 8] (kv_heads and dim of the NHD cache (5, 4, 2, 8)), got (3, 2, 4).",
    ),
    "layout": (
        {"append_key": np.ones((3, 4, 8), np.float32)},
        ContractError,
        "append_key: must be [tokens, 2, 8] (kv_heads and dim of the NHD cache (5, 4, 2, 8)), got (3, 4, 8);"
        ' the cache\'s axes 1 and 2 look swapped: kv_layout="HND"?',
    ),
    "rank": (
        {"append_key": np.ones((2, 8), np.float32)},
        ContractError,
        "append_key: must be [tokens, 2, 8] (kv_heads and dim of the NHD cache (5, 4, 2, 8)), got (2, 8).",
    ),
    "last axis": (
        {"append_key": np.ones((3, 2, 16), np.float32)[..., ::2]},
        ContractError,
        "append_key: must be contiguous along its last axis, got strides (128, 64, 8) in bytes.",
    ),
    "values too few": (
        {"append_value": np.ones((2, 2, 8), np.float32)},
        ContractError,
        "append_value: must have 3 entries (one per row of append_key), got 2.",
    ),
    "requests too few": (
        {"batch_indices": np.array([0, 1])},
        ContractError,
        "batch_indices: must have 3 entries (one per row of append_key), got 2.",
    ),
    "positions too many": (
        {"positions": np.array([3, 5, 4, 4])},
        ContractError,
        "positions: must have 3 entries (one per row of append_key), got 4.",
    ),
    "dtype of positions": (
        {"positions": np.array([3.0, 5.0, 4.0])},
        ContractError,
        "positions: must be int32 (int64 and uint32 are accepted on the host), got float64.",
    ),
    "no keys": (
        {"append_key": None},
        ContractError,
        "append_key: must be a NumPy or CuPy array, got NoneType.",
    ),
    "not an array": (
        {"append_key": [[1.0]]},
        ContractError,
        "append_key: must be a NumPy or CuPy array, got list.",
    ),
}


def test_the_good_call_writes_its_three_rows():
    cache = np.zeros((5, 2, 4, 2, 8), np.float32)
    append_paged_kv_cache(paged_kv_cache=cache, **GOOD)
    written = np.argwhere(cache.all(axis=(1, 3, 4)))
    assert sorted(map(tuple, written.tolist())) == sorted(EXPECTED_ROWS)
    assert cache.sum() == 3 * 2 * 2 * 8


@pytest.mark.parametrize("case", REFUSED)
def test_a_refused_call_writes_nothing(case):
    change, error, message = REFUSED[case]
    rng = np.random.default_rng(0)
    cache = random_bits(rng, (5, 2, 4, 2, 8), np.float32)
    before = bits(cache).copy()
    with pytest.raises(ContractError) as caught:
        append_paged_kv_cache(paged_kv_cache=cache, **(GOOD | change))
    assert str(caught.value) == message
    assert type(caught.value) is error
    np.testing.assert_array_equal(bits(cache), before)


def test_a_read_only_cache_is_refused():
    cache = np.zeros((5, 2, 4, 2, 8), np.float32)
    cache.flags.writeable = False
    with pytest.raises(ContractError, match=r"^paged_kv_cache: must be writable, got a read-only array\.$"):
        append_paged_kv_cache(paged_kv_cache=cache, **GOOD)


def test_read_only_tokens_are_read():
    cache = np.zeros((5, 2, 4, 2, 8), np.float32)
    arguments = {name: x.copy() for name, x in GOOD.items()}
    for x in arguments.values():
        x.flags.writeable = False
    append_paged_kv_cache(paged_kv_cache=cache, **arguments)
    assert cache.sum() == 3 * 2 * 2 * 8

"""Cascade levels from page lists or hashes: what is shared, that nothing is lost, that no other choice saves more."""

from itertools import combinations

import numpy as np
import pytest

import nbattn
from nbattn import oracle
from nbattn.cascade import LevelTables, build_levels
from nbattn.testing import assert_close, expect


def lists(tables):
    return [[x.tolist() for x in arrays] for arrays in tables]


def keys_of_row(tables, row, page_size):
    """Return the page ids and the number of keys that a row reads over all levels."""
    ids, length = [], 0
    for qo_indptr, indptr, indices, last in zip(*tables, strict=True):
        b = np.searchsorted(qo_indptr, row, side="right") - 1
        own = indices[indptr[b] : indptr[b + 1]].tolist()
        ids += own
        length += (len(own) - 1) * page_size + int(last[b]) if own else 0
    return ids, length


def random_requests(rng, count):
    """Return sorted page lists that often begin alike, with lengths and rows."""
    pages = sorted(rng.choice([0, 0, 0, 1], rng.integers(0, 7)).tolist() for _ in range(count))
    page_size = int(rng.integers(1, 4))
    kv_lens = [0 if not p else int(rng.integers((len(p) - 1) * page_size + 1, len(p) * page_size + 1)) for p in pages]
    qo_lens = [min(n, int(rng.choice([0, 1, 1, 1, 3]))) for n in kv_lens]
    return pages, kv_lens, qo_lens, page_size


def test_two_requests_share_their_first_pages():
    tables = build_levels([[7, 3, 5], [7, 3, 9], [8]], [9, 10, 2], [1, 1, 1], 4)
    assert isinstance(tables, tuple)
    assert lists(tables) == [
        [[0, 2, 3], [0, 1, 2, 3]],
        [[0, 2, 2], [0, 1, 2, 3]],
        [[7, 3], [5, 9, 8]],
        [[4, 4], [1, 2, 2]],
    ]
    assert all(x.dtype == np.int32 for arrays in tables for x in arrays)
    assert [x.tolist() for x in tables.page_ids] == [[7, 3, 5], [7, 3, 9], [8]]
    assert tables.page_of_hash is None


def test_nothing_shared_is_one_level():
    for pages in ([[1, 2], [3, 4]], [[1, 2]], [[5, 1], [6, 1]]):
        tables = build_levels(pages, [8] * len(pages), [1] * len(pages), 4, max_levels=3)
        assert tables.num_levels == 1
        assert lists(tables)[2] == [[page for own in pages for page in own]]


def test_max_levels_of_one_shares_nothing():
    assert build_levels([[1, 2], [1, 2]], [8, 8], [1, 1], 4, max_levels=1).num_levels == 1


def test_pages_with_new_tokens_stay_in_the_last_level():
    pages = [[1, 2, 3], [1, 2, 3]]
    for qo_len, shared in ((0, [1, 2, 3]), (1, [1, 2]), (4, [1, 2]), (5, [1]), (9, []), (20, [])):
        tables = build_levels(pages, [12, 12], [qo_len, 1], 4)
        expected = min(len(shared), 2)
        ids = lists(tables)[2]
        readers = 2 if qo_len else 1  # a request without rows reads nothing, so it saves nothing
        assert ids[0] == (pages[0][:expected] if expected and readers == 2 else pages[0] * 2)


def test_partial_pages_are_not_shared():
    tables = build_levels([[1, 2], [1, 2]], [7, 7], [1, 1], 4)
    assert lists(tables)[2] == [[1], [2, 2]]
    assert lists(tables)[3] == [[4], [3, 3]]


def test_only_neighbours_share_and_order_is_kept():
    tables = build_levels([[1, 2], [3, 4], [1, 5]], [8, 8, 8], [1, 1, 1], 4)
    assert tables.num_levels == 1
    assert lists(tables)[2] == [[1, 2, 3, 4, 1, 5]]
    assert lists(build_levels([[1, 2], [1, 5], [3, 4]], [8] * 3, [1] * 3, 4))[2] == [[1], [2, 5, 3, 4]]


def test_one_deep_prefix_beats_a_wide_shallow_one():
    deep = [[0, 1, 2, 3, 4, 9], [0, 1, 2, 3, 4, 8], [0, 7, 6]]
    lens = [24, 24, 12]
    two = build_levels(deep, lens, [1] * 3, 4, max_levels=2)
    assert lists(two)[2][0] == [0, 1, 2, 3, 4]  # 5 pages once instead of twice; [0] for all three would save 2
    assert lists(two)[0][0] == [0, 2, 3]
    three = build_levels(deep, lens, [1] * 3, 4, max_levels=3)
    assert lists(three)[2][:2] == [[0], [1, 2, 3, 4]]
    assert lists(three)[0][:2] == [[0, 3], [0, 2, 3]]


def test_groups_side_by_side_stand_in_one_level():
    tables = build_levels([[1, 2], [1, 3], [4, 5], [4, 6]], [8] * 4, [1, 2, 1, 1], 4)
    assert lists(tables)[:3] == [[[0, 3, 5], [0, 1, 3, 4, 5]], [[0, 1, 2], [0, 1, 2, 3, 4]], [[1, 4], [2, 3, 5, 6]]]


def test_surplus_pages_and_lengths_of_zero():
    tables = build_levels([[1, 2, 99, 98], [1, 3], []], [8, 8, 0], [1, 1, 0], 4)
    assert lists(tables) == [
        [[0, 2, 2], [0, 1, 2, 2]],
        [[0, 1, 1], [0, 1, 2, 2]],
        [[1], [2, 3]],
        [[4, 4], [4, 4, 4]],
    ]
    assert lists(build_levels([], [], [], 4)) == [[[0]], [[0]], [[]], [[]]]


def test_row_cost_keeps_levels_that_save_too_little():
    pages, lens = [[1, 2], [1, 3]], [8, 8]
    assert build_levels(pages, lens, [1, 1], 4, row_cost=1).num_levels == 2  # saves 4 tokens, costs 2
    assert build_levels(pages, lens, [1, 1], 4, row_cost=2).num_levels == 1
    assert build_levels(pages, lens, [1, 3], 4, row_cost=1).num_levels == 1


def test_padding_to_the_levels_of_a_wrapper():
    tables = build_levels([[1, 2], [1, 3]], [8, 8], [1, 2], 4)
    padded = tables.padded(4)
    assert lists(padded)[0] == [[0, 3], [0, 3], [0, 3], [0, 1, 3]]
    assert lists(padded)[1:] == [
        [[0, 0], [0, 0], [0, 1], [0, 1, 2]],
        [[], [], [1], [2, 3]],
        [[1], [1], [4], [4, 4]],
    ]
    assert lists(tables.padded(2)) == lists(tables)
    with pytest.raises(nbattn.ContractError, match=r"num_levels: must be at least 2 \(levels chosen\), got 1"):
        tables.padded(1)
    with pytest.raises(nbattn.ContractError, match="num_levels: must be an int, got 'x'"):
        tables.padded("x")


# ---- hashes


def test_hashes_are_given_pages_in_order_of_appearance():
    tables = build_levels([[b"s", b"x"], [b"s", b"y"], [b"z"]], [9, 8, 6], [1, 1, 1], 4)
    assert tables.page_of_hash == {b"s": 0, b"x": 1, b"y": 2, b"z": 3}
    assert [x.tolist() for x in tables.page_ids] == [[0, 1, 4], [0, 2], [3, 5]]  # 4 and 5 have no hash
    assert lists(tables)[2] == [[0], [1, 4, 2, 3, 5]]
    assert lists(tables)[3][-1] == [1, 4, 2]


def test_the_hash_of_a_partial_block_is_not_shared():
    tables = build_levels([["a", "b"], ["a", "b"]], [6, 6], [1, 1], 4)
    assert tables.page_of_hash == {"a": 0}
    assert [x.tolist() for x in tables.page_ids] == [[0, 1], [0, 2]]


def test_large_integers_are_hashes_and_small_ones_pages_unless_said_otherwise():
    hashes = [[2**40 + 5, 3], [2**40 + 5, 7]]
    assert build_levels(hashes, [8, 8], [1, 1], 4).page_of_hash == {2**40 + 5: 0, 3: 1, 7: 2}
    assert build_levels([[5, 3], [5, 7]], [8, 8], [1, 1], 4).page_of_hash is None
    assert build_levels([[5, 3], [5, 7]], [8, 8], [1, 1], 4, hashed=True).page_of_hash == {5: 0, 3: 1, 7: 2}
    with pytest.raises(nbattn.ContractError, match=r"pages_or_hashes\[1\]: must hold int32 page ids, got \['a'\]"):
        build_levels([[1], ["a"]], [4, 4], [1, 1], 4, hashed=False)


def test_numpy_arrays_are_as_good_as_lists():
    pages = [[7, 3, 5], [7, 3, 9]]
    expected = lists(build_levels(pages, [9, 10], [1, 1], 4))
    arrays = [np.array(x, np.int32) for x in pages], np.array([9, 10], np.int32), np.array([1, 1], np.uint32)
    assert lists(build_levels(*arrays, 4)) == expected
    assert lists(build_levels(np.array(pages), *arrays[1:], np.int64(4))) == expected


# ---- laws


@pytest.mark.parametrize("max_levels", [1, 2, 3, 6])
@pytest.mark.parametrize("seed", range(5))
def test_every_row_reads_its_own_keys_in_order(seed, max_levels):
    rng = np.random.default_rng(seed)
    for _ in range(20):
        pages, kv_lens, qo_lens, page_size = random_requests(rng, int(rng.integers(0, 9)))
        tables = build_levels(pages, kv_lens, qo_lens, page_size, max_levels)
        assert tables.num_levels <= max_levels
        rows = np.repeat(np.arange(len(pages)), qo_lens)
        for row, request in enumerate(rows):
            assert keys_of_row(tables, row, page_size) == (pages[request], kv_lens[request])
        counts = np.diff(tables.paged_kv_indptr_arr[-1])
        own = np.where(counts > 0, (counts - 1) * page_size + tables.paged_kv_last_page_len[-1], 0)
        assert (own >= qo_lens).all()  # the new tokens


def most_saved(pages, kv_lens, qo_lens, page_size, levels, begin=0, end=None, used=0):
    """Return the most page reads that any nesting of groups saves, by trying all of them."""
    end = len(pages) if end is None else end
    if levels == 0 or end - begin < 2:
        return 0
    best = most_saved(pages, kv_lens, qo_lens, page_size, levels, begin + 1, end, used)
    for stop in range(begin + 2, end + 1):
        depth = min((kv_lens[r] - qo_lens[r]) // page_size for r in range(begin, stop))
        for a, b in combinations(range(begin, stop), 2):
            while pages[a][:depth] != pages[b][:depth]:
                depth -= 1
        readers = sum(qo_lens[r] > 0 for r in range(begin, stop))
        for d in range(used + 1, depth + 1):
            saved = (readers - 1) * (d - used)
            inner = most_saved(pages, kv_lens, qo_lens, page_size, levels - 1, begin, stop, d)
            rest = most_saved(pages, kv_lens, qo_lens, page_size, levels, stop, end, used)
            best = max(best, saved + inner + rest)
    return best


@pytest.mark.parametrize("max_levels", [2, 3, 4])
@pytest.mark.parametrize("seed", range(4))
def test_no_other_choice_of_levels_saves_more(seed, max_levels):
    rng = np.random.default_rng(100 + seed)
    total = 0
    for _ in range(6):
        pages, kv_lens, qo_lens, page_size = random_requests(rng, 5)
        tables = build_levels(pages, kv_lens, qo_lens, page_size, max_levels)
        flat = sum(len(p) for p, n in zip(pages, qo_lens, strict=True) if n)
        read = 0
        for qo_indptr, indptr in zip(tables.qo_indptr_arr, tables.paged_kv_indptr_arr, strict=True):
            read += int(np.diff(indptr)[np.diff(qo_indptr) > 0].sum())
        assert flat - read == most_saved(pages, kv_lens, qo_lens, page_size, max_levels - 1)
        total += flat - read
    assert total > 0


@pytest.mark.parametrize("max_levels", [1, 2, 3, 4])
def test_a_wrapper_planned_with_the_levels_is_flat_attention(max_levels):
    rng = np.random.default_rng(max_levels)
    pages = [[4, 1, 7, 2], [4, 1, 7, 0], [4, 1, 3], [5], [5, 6, 8]]
    kv_lens, qo_lens = [15, 13, 9, 3, 9], [1, 2, 1, 2, 3]
    cache = rng.normal(size=(9, 2, 4, 1, 16)).astype(np.float32)
    q = rng.normal(size=(sum(qo_lens), 3, 16)).astype(np.float32)
    tables = build_levels(pages, kv_lens, qo_lens, 4, max_levels)
    wrapper = nbattn.MultiLevelCascadeAttentionWrapper(tables.num_levels)
    wrapper.plan(*tables, 3, 1, 16, 4, causal=True)
    flat = build_levels(pages, kv_lens, qo_lens, 4, 1)
    kv = nbattn.PagedKV.from_page_table(cache, *(x[0] for x in flat[1:]))
    expected = expect(oracle.paged_attention, q, kv, flat[0][0], causal=True)
    result = wrapper.run(q, cache, return_lse=True)
    assert_close(result, expected)
    wide = nbattn.MultiLevelCascadeAttentionWrapper(6)
    wide.plan(*tables.padded(6), 3, 1, 16, 4, causal=True)
    for a, b in zip(wide.run(q, cache, return_lse=True), result, strict=True):
        np.testing.assert_array_equal(a, b)  # empty levels cost nothing and change nothing


def test_long_chains_of_prefixes():
    count = 150
    pages = [[*range(i + 1), 1000 + i] for i in range(count)]
    tables = build_levels(pages, [len(p) for p in pages], [1] * count, 1, max_levels=3)
    assert tables.num_levels == 3
    for row in (0, 77, count - 1):
        assert keys_of_row(tables, row, 1) == (pages[row], len(pages[row]))


# ---- what is refused


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        ({"page_size": 0}, "page_size: must be at least 1, got 0"),
        ({"page_size": 4.0}, "page_size: must be an int, got 4.0"),
        ({"max_levels": 0}, "max_levels: must be at least 1, got 0"),
        ({"page_size": 2**70}, "page_size: must be at most 2147483647"),
        ({"pages_or_hashes": None}, "pages_or_hashes: must be a sequence of sequences, one per request, got None"),
        ({"pages_or_hashes": [1, 2]}, "pages_or_hashes: must be a sequence of sequences, one per request, got [1, 2]"),
        ({"kv_lens": [[1], [1, 2]]}, "kv_lens: must be 2 integers (one per request)"),
        ({"hashed": "no"}, "hashed: must be True, False or None, got 'no'"),
        ({"kv_lens": np.array([8, 2**63], np.uint64)}, "kv_lens[1]: must be in 0..2147483647, got 9223372036854775808"),
        ({"row_cost": -1}, "row_cost: must be at least 0, got -1"),
        ({"kv_lens": [8]}, "kv_lens: must be 2 integers (one per request), got [8]"),
        ({"kv_lens": [8.0, 8.0]}, "kv_lens: must be 2 integers"),
        ({"qo_lens": [1, -1]}, "qo_lens[1]: must be in 0..2147483647, got -1"),
        ({"kv_lens": [8, 9]}, "pages_or_hashes[1]: must hold at least 3 pages (kv_lens[1] = 9, page_size 4), got 2"),
        ({"pages_or_hashes": [["a", []], ["b"]]}, "pages_or_hashes[0]: must hold hashable values, got list"),
    ],
)
def test_bad_arguments(change, rule):
    good = {"pages_or_hashes": [[1, 2], [1, 3]], "kv_lens": [8, 8], "qo_lens": [1, 1], "page_size": 4}
    assert isinstance(build_levels(**good), LevelTables)
    with pytest.raises(nbattn.ContractError) as error:
        build_levels(**{**good, **change})
    assert str(error.value).startswith(rule)


def test_more_levels_than_there_are_prefixes_cost_nothing():
    arguments = [[1, 2], [1, 3]], [8, 8], [1, 1], 4
    assert lists(build_levels(*arguments, max_levels=2**70)) == lists(build_levels(*arguments))

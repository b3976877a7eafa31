"""`PagedKV.check` names every rule that a table breaks, also what happened to it since it was made."""

import numpy as np
import pytest
from small_tables import from_block_table, from_page_table, from_slots

from nbattn import PageTableError


def forced(array):
    """Return an array of a table, which is read-only, ready to be damaged."""
    array.flags.writeable = True
    return array


def test_check_names_every_broken_rule():
    kv = from_page_table(indices=np.array([6, 2, 4, 1, 1]))
    assert kv.check() is None
    forced(kv.kv_indices)[[1, 4]] = [7, 8]
    forced(kv.kv_lens)[[0, 2]] = [10, 1]
    with pytest.raises(PageTableError) as caught:
        kv.check()
    assert str(caught.value).splitlines() == [
        "kv_last_page_len[0]: must be in 1..3 (page_size), got 4 (request 0 owns kv_indices[0:3]).",
        "kv_lens[2]: must be 0 (request 2 owns no page), got 1.",
        "kv_indices[1]: must be below 7 (pages of the cache), got 7 (request 0, keys from 3 on)."
        " Negative ids mark unmapped pages.",
        "kv_indices[4]: must be below 7 (pages of the cache), got 8 (request 1, keys from 3 on)."
        " Negative ids mark unmapped pages.",
    ]


def test_check_counts_what_it_does_not_list():
    kv = from_slots([1] * 7)
    forced(kv.kv_lens)[6] = 99
    with pytest.raises(PageTableError, match=r"^kv_lens\[6\]: [^\n]*$"):
        kv.check()
    table = np.zeros((1, 12), np.int32)
    kv = from_block_table(table=table, lens=np.array([36]))
    forced(kv.kv_indices)[:] = 7
    with pytest.raises(PageTableError) as caught:
        kv.check()
    lines = str(caught.value).splitlines()
    assert [line.split(":")[0] for line in lines[:8]] == [f"block_table[0, {page}]" for page in range(8)]
    assert lines[8:] == ["(the last rule is broken at 4 more positions)"]


def test_check_finds_broken_offsets():
    kv = from_page_table()
    forced(kv.kv_indptr)[:] = [1, 0, 5, 6]
    with pytest.raises(PageTableError) as caught:
        kv.check()
    assert str(caught.value).splitlines() == [
        "kv_indptr[0]: must be 0, got 1.",
        "kv_indptr[1]: must be at least 1 (kv_indptr[0]), got 0.",
        "kv_indptr[3]: must be at most 5 (entries of kv_indices), got 6.",
    ]

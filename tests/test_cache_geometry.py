"""A cache in the other layout, or of another geometry than before, is refused and the layout is recognised."""

import numpy as np
import pytest
from small_tables import DK, PAGES, K, V, from_block_table

import nbattn
from nbattn import ContractError, PagedKV, PageTableError

HEADS_FIRST = np.zeros((PAGES, 2, 12, DK), np.float32)  # two heads of twelve slots
HINT = '; the cache\'s axes 1 and 2 look swapped: kv_layout="HND"?'


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda k: PagedKV.from_slots(k, k, np.array([9])),
            "kv_lens[0]: must be in 0..2 (slots of a row), got 9" + HINT,
        ),
        (
            lambda k: PagedKV.from_page_table((k, k), np.array([0, 1]), np.array([3]), np.array([3])),
            "kv_last_page_len[0]: must be in 1..2 (page_size), got 3 (request 0 owns kv_indices[0:1])" + HINT,
        ),
        (
            lambda k: PagedKV.from_block_table(k, k, np.array([[3]]), np.array([13])),
            "kv_lens[0]: must be in 0..2 (1 blocks of 2 in block_table), got 13.",
        ),
    ],
    ids=["slots", "csr", "fits neither"],
)
def test_a_cache_of_the_other_layout_is_recognised(call, message):
    with pytest.raises(PageTableError) as caught:
        call(HEADS_FIRST)
    assert str(caught.value) == message


def test_query_heads_tell_the_layout():
    kv = PagedKV.from_slots(HEADS_FIRST, HEADS_FIRST, np.array([2]))
    message = "q: must have a positive multiple of 12 (num_kv_heads) heads, got 4"
    for heads, hint in ((4, HINT), (3, ".")):
        with pytest.raises(ContractError) as caught:
            nbattn.paged_attention(np.zeros((1, heads, DK), np.float32), kv)
        assert str(caught.value) == message.replace("got 4", f"got {heads}") + hint
    q = np.zeros((1, 4, DK), np.float32)
    for lens in (2, 12):  # this operator has no kv_layout
        with pytest.raises(ContractError) as caught:
            nbattn.gqa_decode(q, HEADS_FIRST[:1], HEADS_FIRST[:1], np.array([lens]))
        assert str(caught.value) == (
            "key_cache: must be [sequences, slots, num_kv_heads, head_dim], got (1, 2, 12, 8);"
            " axes 1 and 2 look swapped: key_cache.swapaxes(1, 2)?"
        )
    for heads, lens in ((4, 13), (3, 2)):  # neither order fits
        with pytest.raises(ContractError, match=r"^(lengths|query).*\.$"):
            nbattn.gqa_decode(np.zeros((1, heads, DK), np.float32), HEADS_FIRST[:1], HEADS_FIRST[:1], np.array([lens]))


BROKEN_PAGES = {
    "pages": (
        lambda kv: kv.with_pages(K[:6], V[:6]),
        "k_cache: must be (7, 3, 2, 8) (NHD) as before, got (6, 3, 2, 8).",
    ),
    "layout": (
        lambda kv: kv.with_pages(K.transpose(0, 2, 1, 3), V.transpose(0, 2, 1, 3)),
        'k_cache: must be (7, 3, 2, 8) (NHD) as before, got (7, 2, 3, 8); axes 1 and 2 look swapped: kv_layout="HND"?',
    ),
    "size": (lambda kv: kv.with_pages(K, K), "v_cache: must be (7, 3, 2, 5) (NHD) as before, got (7, 3, 2, 8)."),
    "dtype": (
        lambda kv: kv.with_pages(K.astype(np.float16), V.astype(np.float16)),
        "k_cache: must be numpy float32 as before, got numpy float16.",
    ),
    "one": (
        lambda kv: kv.with_pages(K),
        "k_cache: must be [pages, 2, ...] with 5 axes or a pair (k, v), got (7, 3, 2, 8).",
    ),
}


@pytest.mark.parametrize("case", BROKEN_PAGES)
def test_with_pages_refuses_another_geometry(case):
    call, message = BROKEN_PAGES[case]
    with pytest.raises(ContractError) as caught:
        call(from_block_table())
    assert str(caught.value) == message

"""A small cache and its page table, written in three ways."""

from __future__ import annotations

import numpy as np

from nbattn import PagedKV

PAGES, SLOTS, HEADS, DK, DV = 7, 3, 2, 8, 5
TABLE = np.array([[6, 2, 4], [1, 1, 0], [3, 5, 2]], np.int32)
LENS = np.array([7, 4, 0], np.int32)
INDPTR, INDICES, LAST = (
    np.array([0, 3, 5, 5], np.int32),
    np.array([6, 2, 4, 1, 1], np.int32),
    np.array([1, 1, 0], np.int32),
)
K, V = np.zeros((PAGES, SLOTS, HEADS, DK), np.float32), np.zeros((PAGES, SLOTS, HEADS, DV), np.float32)


def from_page_table(cache=(K, V), indptr=INDPTR, indices=INDICES, last=LAST, layout="NHD"):
    return PagedKV.from_page_table(cache, indptr, indices, last, layout)


def from_block_table(k=K, v=V, table=TABLE, lens=LENS):
    return PagedKV.from_block_table(k, v, table, lens)


def from_slots(lens, slot_ids=None):
    return PagedKV.from_slots(K, V, np.array(lens), None if slot_ids is None else np.array(slot_ids))

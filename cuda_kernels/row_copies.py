"""Copies of keys that lie anywhere: whole rows of K and V into a tile, with as little arithmetic as there can be."""

from __future__ import annotations

from types import SimpleNamespace

from numba.cuda import int32, int64, uint32
from numba.extending import register_jitable

from nbattn.cuda_kernels import ptx
from nbattn.indexing import mapped_page


def make_row_copies(k_row: int, v_row: int) -> SimpleNamespace:
    """Return how a warp copies 16 rows of K (`k_row` bytes) and V (`v_row`), multiples of 128, to a tile.

    Eight lanes share a row, four rows a turn: a lane's chunks lie 128 bytes apart on both sides, so that all but the
    rows' addresses are constants.
    """
    K_PARTS, V_PARTS = k_row // 128, v_row // 128
    K_TILE, K_TURN, V_TURN = 16 * k_row, 4 * k_row, 4 * v_row

    @register_jitable
    def parts_inside(inside, lane, pages):
        """Fill `inside`: 16 for each of the lane's parts of K and then of V that the head sizes reach, 0 for others."""
        for j in range(K_PARTS + V_PARTS):
            end = pages.k_bytes if j < K_PARTS else pages.v_bytes
            part = j if j < K_PARTS else j - K_PARTS
            inside[j] = int32(16) if ((lane & int32(7)) << int32(4)) + int32(128 * part) < end else int32(0)

    @register_jitable
    def copy_rows(tile, page, slot, lane, inside, pages):
        """Start copying 16 keys' rows; lane i gives page and slot of key ``i % 16``.

        `pages` is a `groups.Pages`. Returns the bits of the keys that exist; the others' rows are filled with zeros.
        """
        exists = mapped_page(page, pages.num_pages)
        mapped = ptx.ballot(int32(1) if exists else int32(0))
        page = page if exists else int32(0)
        k_at = int64(page) * pages.k_page + int64(slot) * pages.k_slot
        v_at = int64(page) * pages.v_page + int64(slot) * pages.v_slot
        row, column = int32(lane >> int32(3)), int32((lane & int32(7)) << int32(4))
        swizzled = column ^ int32(row << int32(4))
        k_source, v_source = pages.k + int64(column), pages.v + int64(column)
        for i in range(4):
            key = int32(row + int32(4 * i))
            wanted = int32(0) - int32((mapped >> uint32(key)) & uint32(1))
            place = tile + (swizzled ^ int32(64 * (i % 2)))
            source = k_source + ptx.from_lane_i64(k_at, key)
            target = place + row * int32(k_row)
            for j in range(K_PARTS):
                ptx.copy_async(target + int32(K_TURN * i + 128 * j), source + int64(128 * j), inside[j] & wanted)
            source = v_source + ptx.from_lane_i64(v_at, key)
            target = place + row * int32(v_row)
            for j in range(V_PARTS):
                ptx.copy_async(
                    target + int32(K_TILE + V_TURN * i + 128 * j), source + int64(128 * j), inside[K_PARTS + j] & wanted
                )
        return mapped & uint32(0xFFFF)

    return SimpleNamespace(PARTS=K_PARTS + V_PARTS, parts_inside=parts_inside, copy_rows=copy_rows)

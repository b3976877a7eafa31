"""How a warp copies rows of K and V into a tensor-core tile: 8 lanes a row, 4 rows a turn, 16 bytes a lane and line."""

from __future__ import annotations

from types import SimpleNamespace

from numba.cuda import int32, int64, uint32
from numba.extending import register_jitable

from nbattn.cuda_kernels import ptx
from nbattn.indexing import mapped_page, page_and_slot


@register_jitable
def look_up(key, key_end, page_begin, kv_indices, page_size):
    """Return (page id, slot) of a key; -1 for a key at or past `key_end`."""
    ordinal, slot = page_and_slot(key, page_size)
    page = int32(-1)
    if key < key_end:
        page = ptx.load_i32(kv_indices + int64(page_begin + ordinal) * int64(4))
    return page, slot


def make_copies(most_bytes: int, pitch: int, panel: int, fetched: int) -> SimpleNamespace:
    """Return the steps for rows of up to `most_bytes`, a multiple of 128; they are laid down as `tile` says.

    Parameters
    ----------
    pitch, panel : int
        Bytes from a row to the next one in the tile, and from 128 bytes of a row to the next 128.
    fetched : int
        Keys that a warp brings at once: 8, 16 or 32.
    """
    TURNS = fetched // 4

    @register_jitable
    def offset_of_row(page_stride, slot_stride, num_pages, page, slot):
        """Return (where a key's row begins, the bits of all keys that exist); lane i gives key ``i % fetched``."""
        exists = mapped_page(page, num_pages)
        mapped = ptx.ballot(int32(exists))
        page, slot = int64(page) if exists else int64(0), int64(slot) if exists else int64(0)
        return page * page_stride + slot * slot_stride, mapped & uint32((1 << fetched) - 1)

    @register_jitable
    def copy_turn(tile, i, source, mapped, row_bytes, lane):
        """Start copying the four rows of turn i, of which the lane takes 16 bytes in every 128 from `source` on."""
        column, key = lane & int32(7), int32(4 * i) + (lane >> int32(3))
        size = int32(((mapped >> uint32(key)) & uint32(1)) << uint32(4))
        target = tile + key * int32(pitch) + ((column ^ (key & int32(7))) << int32(4))
        for j in range(most_bytes // 128):
            inside = size if int32(128 * j) + (column << int32(4)) < row_bytes else int32(0)
            ptx.copy_async(target + int32(j * panel), source + int64(128 * j), inside)

    @register_jitable
    def fetch_rows(tile, rows, page_stride, slot_stride, row_bytes, num_pages, page, slot, lane):
        """Start copying `fetched` keys' rows of K or V, at `rows`; lane i gives page and slot of key ``i % fetched``.

        Returns the bits of the keys that exist; the others' rows are filled with zeros.
        """
        offset, mapped = offset_of_row(page_stride, slot_stride, num_pages, page, slot)
        rows += int64((lane & int32(7)) << int32(4))
        for i in range(TURNS):
            source = rows + ptx.from_lane_i64(offset, int32(4 * i) + (lane >> int32(3)))
            copy_turn(tile, i, source, mapped, row_bytes, lane)
        return mapped

    @register_jitable
    def fetch(k_tile, v_tile, page, slot, lane, pages):
        """Start copying `fetched` keys' rows of K and V; `pages` is a `groups.Pages`. See `fetch_rows`."""
        fetch_rows(v_tile, pages.v, pages.v_page, pages.v_slot, pages.v_bytes, pages.num_pages, page, slot, lane)
        return fetch_rows(k_tile, pages.k, pages.k_page, pages.k_slot, pages.k_bytes, pages.num_pages, page, slot, lane)

    @register_jitable
    def locate(sources, page, slot, lane, pages):
        """Do what `fetch` does ahead of copies: fill `sources` with the lane's addresses of K and V in each turn."""
        k_offset, mapped = offset_of_row(pages.k_page, pages.k_slot, pages.num_pages, page, slot)
        v_offset, _ = offset_of_row(pages.v_page, pages.v_slot, pages.num_pages, page, slot)
        column = int64((lane & int32(7)) << int32(4))
        for i in range(TURNS):
            key = int32(4 * i) + (lane >> int32(3))
            sources[2 * i] = pages.k + column + ptx.from_lane_i64(k_offset, key)
            sources[2 * i + 1] = pages.v + column + ptx.from_lane_i64(v_offset, key)
        return mapped

    @register_jitable
    def copy_located(k_tile, v_tile, sources, mapped, lane, pages):
        """Start copying the rows that `locate` has found."""
        for i in range(TURNS):
            copy_turn(k_tile, i, sources[2 * i], mapped, pages.k_bytes, lane)
        for i in range(TURNS):
            copy_turn(v_tile, i, sources[2 * i + 1], mapped, pages.v_bytes, lane)

    @register_jitable
    def ask_for_located(sources, mapped, lane, pages):
        """Ask L2 for the rows that `locate` has found, one lane a line."""
        column = lane & int32(7)
        ahead = int64(112) * int64(column)  # from the lane's 16 bytes of a line to its line of the row
        for i in range(TURNS):
            key = int32(4 * i) + (lane >> int32(3))
            if (mapped >> uint32(key)) & uint32(1) != uint32(0):
                if (column << int32(7)) < pages.k_bytes:
                    ptx.prefetch(sources[2 * i] + ahead)
                if (column << int32(7)) < pages.v_bytes:
                    ptx.prefetch(sources[2 * i + 1] + ahead)

    return SimpleNamespace(
        TURNS=TURNS, fetch=fetch, fetch_rows=fetch_rows, locate=locate, copy_located=copy_located,
        ask_for_located=ask_for_located,
    )  # fmt: skip

"""A page table as a picture: pages, slots and tokens in plain text."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np

from nbattn.arrays import library_of
from nbattn.errors import ContractError, PageTableError, refuse_bool
from nbattn.npz import read_npz
from nbattn.page_tables import single_int

if TYPE_CHECKING:
    from nbattn.kv_cache import PagedKV

SHOWN = 8  # rows at either end of a long list
BAR = 32  # slots of a page up to which each one is drawn


def explain(kv: PagedKV, request: int | None = None) -> str:
    """Return one request's pages, slots and tokens as text, or one line per request if `request` is None.

    Slots are drawn ``#`` where they hold a key and ``.`` where they are free; ``x`` marks keys that no page holds.
    """
    if request is None:
        return _summary(kv)
    number = single_int("request", refuse_bool("request", request))
    if not 0 <= number < kv.batch_size:
        raise ContractError(f"request: must be in 0..{kv.batch_size - 1}, got {number}.")
    return _picture(kv, number)


def _summary(kv: PagedKV) -> str:
    used = -(-kv.kv_lens // kv.page_size)
    rows = [("request", "keys", "pages", "unmapped", "last page", "page ids")]
    for b in _ends(kv.batch_size):
        if b is None:
            rows.append(("...",) * 6)
            continue
        ids = _page_ids(kv, b)
        last = f"{kv.kv_lens[b] - (used[b] - 1) * kv.page_size}/{kv.page_size}" if used[b] else "-"
        listed = " ".join("..." if i is None else str(ids[i]) for i in _ends(ids.size, SHOWN // 2))
        unmapped = int(np.count_nonzero(~_mapped(kv, ids)))
        rows.append((str(b), str(kv.kv_lens[b]), str(used[b]), str(unmapped or "-"), last, listed or "-"))
    total = int(kv.kv_lens.sum(dtype=np.int64))
    head = f"{kv.batch_size} requests, {total} keys in {kv.num_pages} pages of {kv.page_size} slots"
    return f"{head}\n{_align(rows)}"


def _picture(kv: PagedKV, b: int) -> str:
    begin, end, keys = int(kv.kv_indptr[b]), int(kv.kv_indptr[b + 1]), int(kv.kv_lens[b])
    ids = _page_ids(kv, b)
    mapped = _mapped(kv, ids)
    rows = [("entry", "page", "slots", "keys")]
    for i in _ends(ids.size):
        if i is None:
            rows.append(("...",) * 4)
            continue
        first, last = i * kv.page_size, min((i + 1) * kv.page_size, keys) - 1
        page = str(ids[i]) if mapped[i] else f"{ids[i]} {'unmapped' if ids[i] < 0 else 'outside the cache'}"
        tokens = f"{first}..{last}" if last > first else str(first)
        slots = _slots(last - first + 1, kv.page_size, bool(mapped[i]))
        rows.append((str(begin + i), page, slots, tokens if mapped[i] else f"{tokens} dropped"))
    head = f"request {b}: {keys} keys in {ids.size} pages of {kv.page_size} slots, kv_indices[{begin}:{end}]"
    unread = end - begin - ids.size
    tail = f"\n{unread} more entries are reserved and not read" if unread else ""
    return head + ("\n" + _align(rows) if ids.size else "") + tail


def _page_ids(kv: PagedKV, b: int) -> np.ndarray:
    """Return the page ids that request `b` reads, on the host."""
    begin = int(kv.kv_indptr[b])
    ids = kv.kv_indices[begin : begin - (-int(kv.kv_lens[b]) // kv.page_size)]
    return ids if library_of(ids) == "numpy" else ids.get()


def _mapped(kv: PagedKV, ids: np.ndarray) -> np.ndarray:
    return (ids >= 0) & (ids < kv.num_pages)


def _slots(filled: int, page_size: int, mapped: bool) -> str:
    if page_size > BAR:
        return f"{filled} of {page_size}"
    return ("#" if mapped else "x") * filled + "." * (page_size - filled)


def _ends(size: int, shown: int = SHOWN) -> list[int | None]:
    """Return the indices of a list, with None for the middle of a long one."""
    if size <= 2 * shown + 1:
        return list(range(size))
    return [*range(shown), None, *range(size - shown, size)]


def _align(rows: Sequence[tuple[str, ...]]) -> str:
    """Return the rows as columns: the first ones right-aligned, the last one left-aligned."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join([*(c.rjust(w) for c, w in zip(row[:-1], widths[:-1], strict=True)), row[-1]]) for row in rows]
    return "\n".join("  " + line.rstrip() for line in lines)


TABLES = {  # the arguments of each constructor that describe its table
    "from_page_table": ["kv_indptr", "kv_indices", "kv_last_page_len"],
    "from_block_table": ["block_table", "kv_lens"],
    "from_slots": ["slot_ids", "kv_lens"],
}


def main(arguments: list[str]) -> int:
    """Draw the table in an .npz file; the exit status is 1 for a broken table, 2 for anything else that is wrong."""
    names = "; ".join(", ".join(table) for table in TABLES.values())
    parser = argparse.ArgumentParser(
        prog="python -m nbattn explain",
        description=f"Draw a page table. The file holds page_size and num_pages, and one of: {names}. One that "
        "validate --tensors reads will do as well. The exit status is 1 for a broken table, whose faults are named.",
    )
    parser.add_argument("file", help="an .npz file, as numpy.savez writes it")
    parser.add_argument("--request", type=int, help="draw this request's pages; default: a line per request")
    options = parser.parse_args(arguments)
    try:
        print(_from_arrays(read_npz(options.file)).explain(options.request))
    except PageTableError as error:
        print(error, *error.others, sep="\n", file=sys.stderr)
        return 1
    except ContractError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def _from_arrays(arrays: dict[str, np.ndarray]) -> PagedKV:
    from nbattn import external
    from nbattn.kv_cache import PagedKV

    for constructor, names in TABLES.items():
        if {"page_size", "num_pages", *names} <= arrays.keys():
            shape = (int(arrays["num_pages"]), int(arrays["page_size"]), 1, 1)
            pages = np.broadcast_to(np.float32(0), shape)  # a cache of that many pages without memory
            first = [(pages, pages)] if constructor == "from_page_table" else [pages, pages]
            return getattr(PagedKV, constructor)(*first, **{name: arrays[name] for name in names})
    if not arrays.keys().isdisjoint(external.CACHES):
        return external.cache_of(external.Tensors(arrays))
    held = ", ".join(sorted(arrays)) or "nothing"
    rule = "must hold page_size and num_pages, or a cache, and one whole table"
    known = {"page_size", "num_pages", *chain(*TABLES.values()), *external.KEYS}
    close = external.misspelt(arrays, known)
    hints = "".join(f" Did you mean {meant} by {name}?" for name, meant in close.items())
    raise ContractError(f"file: {rule}, got {held}.{hints} See --help.")

"""How index lists are cut into parts, and what a gather keeps on the device: nothing is copied from the host twice.

Importing this module imports neither CuPy nor Numba.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np

from nbattn.errors import TargetError

SMALLEST_PART = 64  # entries, 16 for each warp
START = 96  # entries that a block could have read while it starts and ends
MERGE = 64  # entries that the whole device could have read meanwhile
MOST_PARTS = 64  # of a list

_kept: WeakKeyDictionary[Any, dict[Any, Any]] = WeakKeyDictionary()  # by page table


class Parts(NamedTuple):
    """Every list is cut into `splits` parts of `size` entries; `heads_last`: all parts run before the next KV head."""

    splits: int
    size: int
    heads_last: bool


@lru_cache(256)
def cut_lists(rows: int, width: int, blocks_of_part: int, resident: int, is_shared: bool) -> Parts:
    """Return how to cut `rows` lists of up to `width` entries.

    Parameters
    ----------
    blocks_of_part : int
        Blocks that read a part of a list: one a KV head and 16 of its query heads.
    resident : int
        Blocks that run at once.
    is_shared : bool
        The lists name more entries than there are keys: rows find each other's tokens in the L2 cache, if few heads
        are read at a time.
    """
    best, least = Parts(1, max(width, 1), is_shared), 0
    for wanted in range(1, max(1, min(MOST_PARTS, width // SMALLEST_PART)) + 1):
        size = -(-width // (wanted * 16)) * 16
        splits = -(-width // size) if width else 1
        waves = -(-rows * blocks_of_part * splits // resident)
        cost = waves * (size + START) + (MERGE if splits > 1 else 0)
        if not least or cost < least:
            best, least = Parts(splits, max(size, 1), is_shared), cost
    return best


def cut_lists_at(width: int, split_size: int, is_shared: bool) -> Parts:
    """Return parts of a given size."""
    return Parts(max(1, -(-width // split_size)), split_size, is_shared)


def rows_on_device(device: Any, table: Any, offsets: np.ndarray) -> tuple[Any, Any]:
    """Return (rows, page ids) of a `PageTable` on the device, copied there when they are first asked for.

    Parameters
    ----------
    offsets : int array, shape [batch + 1]
        Query rows of each request, starting at 0.

    Returns
    -------
    rows : int32 array, shape [rows, 2]
        Where the page ids of each row's request start, and its keys.
    kv_indices : int32 array
    """
    kept = _kept.setdefault(table, {})
    key = (id(device), offsets.tobytes())
    if key not in kept:
        if device.capturing():
            raise TargetError("cuda: a gather must have run once before it is captured, got a new table or qo_indptr.")
        request = np.repeat(np.arange(len(table.kv_lens)), np.diff(offsets))
        rows = np.stack([table.kv_indptr[request], table.kv_lens[request]], axis=1).astype(np.int32)
        page_ids = table.kv_indices
        if not device.holds(page_ids):
            page_ids = next((ids for _, ids in _on_device(kept, device)), None)
            page_ids = device.from_host(table.kv_indices) if page_ids is None else page_ids
        kept[key] = device.from_host(rows), page_ids
        device.wait()  # another stream may use them next
    return kept[key]


def _on_device(kept: dict[Any, Any], device: Any) -> list[tuple[Any, Any]]:
    return [value for key, value in kept.items() if key[0] == id(device)]


def keep_for_graph(device: Any, table: Any, *buffers: Any) -> None:
    """While a graph is captured, let its buffers live as long as the page table that it reads."""
    if device.capturing():
        _kept[table].setdefault(("graph", device.stream()), []).append(buffers)

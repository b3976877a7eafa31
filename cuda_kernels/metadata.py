"""A plan's integers on the device: everything the kernels read besides the data, in one buffer filled by one copy.

Work items are grouped into segments, one launch each: a level's items that fit the decode tile, and those that need the
prefill tile. Padding items have no rows and padding merge rows are -1, so that a captured graph can be replayed after
`PlanMetadata.update` with any plan that fits the room.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any

import numpy as np

from nbattn.cuda_kernels.parameters import WORK
from nbattn.cuda_kernels.shapes import DECODE_ROWS
from nbattn.errors import ContractError

_LEVEL, _ROW_BEGIN, _ROW_END = WORK.index("LEVEL"), WORK.index("ROW_BEGIN"), WORK.index("ROW_END")
_ALIGNMENT = 4  # numbers, 16 bytes


@dataclass(frozen=True)
class Room:
    """How much a plan may grow; None keeps what it has now.

    Parameters
    ----------
    items : int, optional
        Work items of each segment.
    states, merge_rows, merge_slots : int, optional
        Partial states, rows that are merged, and state slots they list.
    pages : int, optional
        Page-table entries of each level.
    """

    items: int | None = None
    states: int | None = None
    merge_rows: int | None = None
    merge_slots: int | None = None
    pages: int | None = None


@dataclass(frozen=True)
class Segment:
    """One launch: `count` items from address `work` on, of one level and one tile, each of up to `pairs` pairs."""

    level: int
    tile: str
    work: int
    count: int
    pairs: int


_Part = tuple[np.ndarray, int, int]  # numbers, their room, and what stands in the rest of it
_NOTHING = np.zeros(0, np.int32)
_EMPTY: _Part = (_NOTHING, 0, 0)


class PlanMetadata:
    """The device copy of a plan.

    Parameters
    ----------
    device : Device
        Where it lives.
    work : int32 array, shape [num_work, 11]
        See `nbattn.planning`.
    row_position, row_request, row_index : int32 array, shape [total_rows]
        See `nbattn.planning`.
    row_turned : int32 array, shape [total_rows]
        Positions by which rows are rotated: see `nbattn.rotary`.
    merge_rows, merge_indptr, merge_slots : int32 array
        See `nbattn.planning`.
    num_states : int
        Partial-state slots.
    max_tokens : int
        Most query rows of an item.
    tables : list of int32 array
        Page ids of each level, on the host or on the device.
    group_size : int
        Query heads of a KV head.
    tokens : int
        Most query rows of an item, now and after updates.
    cluster : int
        Blocks that work on an item together, where all items fit the decode tile.
    room : Room
        Capacity for later updates.

    Attributes
    ----------
    segments : list of Segment
    pointers : dict
        Addresses of the rows' and the merges' arrays.
    num_states, num_merges : int
        Partial states and merged rows there is room for.
    most_states : int
        States that are merged into one row at most.
    """

    def __init__(self, device: Any, *, group_size: int, tokens: int, cluster: int, room: Room = Room(),
                 **plan: Any):  # fmt: skip
        self.device, self.group_size, self.cluster, self.room = device, group_size, cluster, room
        self.pairs = tokens * group_size
        self._buffer: Any = None
        self._tiles: list[tuple[int, str]] = []
        self._scratch: dict[tuple, Any] = {}
        self._other_tables: dict[int, Any] = {}  # the last ones: a captured graph goes on reading them
        self.lock = threading.RLock()  # launches of one call belong together: threads on a stream share its scratch
        self._fill(**plan)

    def update(self, **plan: Any) -> None:
        """Refill the same buffer with another plan, which must fit."""
        self._fill(**plan)

    def _fill(
        self,
        work: np.ndarray,
        row_position: np.ndarray,
        row_turned: np.ndarray,
        row_request: np.ndarray,
        row_index: np.ndarray,
        merge_rows: np.ndarray,
        merge_indptr: np.ndarray,
        merge_slots: np.ndarray,
        num_states: int,
        max_tokens: int,
        tables: list[Any],
    ) -> None:
        room, first = self.room, self._buffer is None
        parts: dict[str, _Part] = {}
        for (level, tile), items in self._split_by_tile(work, max_tokens, len(tables)).items():
            parts[f"work {level} {tile}"] = items, len(WORK) * max(len(items), room.items or 0), 0
        of_rows = ("position", row_position), ("turned", row_turned), ("request", row_request), ("index", row_index)
        for name, rows in of_rows:
            parts[name] = rows, len(rows), 0
        merges = max(len(merge_rows), room.merge_rows or 0)
        parts["merge rows"] = merge_rows, merges, -1
        parts["merge indptr"] = merge_indptr, merges + 1, int(merge_indptr[-1])
        parts["merge slots"] = merge_slots, max(len(merge_slots), room.merge_slots or 0), 0
        on_device = [self.device.holds(table) for table in tables]
        for level, table in enumerate(tables):
            parts[f"table {level}"] = _NOTHING if on_device[level] else table, max(table.size, room.pages or 0), 0
        if first:
            self._lay_out(parts)
            self.num_states, self.num_merges = max(num_states, room.states or 0), merges
        self.most_states = int(np.diff(merge_indptr).max(initial=0)) if room.states is None else self.num_states
        if num_states > self.num_states:
            raise ContractError(f"plan: must fit its room of {self.num_states} partial states, got {num_states}.")
        self._copy(parts, whole=first or not all(on_device))
        self._tables = tables
        for level, table in enumerate(tables):
            if on_device[level]:
                self._copy_table(f"table {level}", table)

    def _copy_table(self, name: str, table: Any) -> None:
        room = self._places[name][1]
        if table.size > room:
            raise ContractError(f"plan: must fit its room of {room} page-table entries, got {table.size}.")
        if table.size:
            self.device.copy(table, self._address(name))

    def table(self, level: int, kv_indices: Any) -> tuple[int, Any]:
        """Return the address of a call's page ids, and what must live as long as it is used.

        It is the plan's own copy, unless the call brings another table.
        """
        planned = self._tables[level]
        if kv_indices is planned:
            return self._address(f"table {level}"), self
        if self.device.holds(kv_indices):
            return self.device.address(kv_indices), kv_indices
        if not self.device.holds(planned) and np.array_equal(kv_indices, planned):
            return self._address(f"table {level}"), self
        copy = self._other_tables[level] = self.device.empty((max(kv_indices.size, 1),), "int32")
        if kv_indices.size:
            self.device.upload(kv_indices, copy)
        return self.device.address(copy), copy

    def _split_by_tile(self, work: np.ndarray, max_tokens: int, num_levels: int) -> dict[tuple[int, str], np.ndarray]:
        """Return the items of each level and tile that is launched: those in use, or all where the plan may grow."""
        most = max_tokens * self.group_size
        if most > self.pairs:
            raise ContractError(f"plan: items must fit {self.pairs} (row, head) pairs, got {most}.")
        if num_levels == 1 and most <= DECODE_ROWS:
            split = {(0, "decode"): work, (0, "prefill"): work[:0]}
        else:
            is_decode = (work[:, _ROW_END] - work[:, _ROW_BEGIN]) * self.group_size <= DECODE_ROWS
            split = {}
            for level in range(num_levels):
                mine = work[:, _LEVEL] == level
                split[level, "decode"], split[level, "prefill"] = work[mine & is_decode], work[mine & ~is_decode]
        if self._buffer is None:
            grows = self.room.items is not None
            possible = [key for key in split if key[1] == "decode" or self.pairs > DECODE_ROWS]
            self._tiles = [key for key in possible if grows or len(split[key])]
        if sum(len(split[key]) for key in self._tiles) != len(work):
            raise ContractError("plan: must keep its levels and tiles, got items of another. Plan with max_kv_len.")
        return {key: split[key] for key in self._tiles}

    def _lay_out(self, parts: dict[str, _Part]) -> None:
        self._places: dict[str, tuple[int, int]] = {}
        end = 0
        self._written: dict[str, tuple[np.ndarray, int]] = {}  # the numbers of a part, and what stands behind them
        for name, (_, room, _) in parts.items():
            self._places[name] = (end, room)
            end += -(-room // _ALIGNMENT) * _ALIGNMENT
        self._host = np.zeros(max(end, 1), np.int32)
        self._buffer = self.device.empty((max(end, 1),), "int32")
        before_tables = self._places["table 0"][0]
        self._without_tables = self._host[:before_tables], self._buffer[:before_tables]
        names = ("position", "turned", "request", "index", "merge rows", "merge indptr", "merge slots")
        self.pointers = {name: self._address(name) for name in names}
        self.segments = []
        for level, tile in self._tiles:
            name = f"work {level} {tile}"
            pairs = min(self.pairs, DECODE_ROWS) if tile == "decode" else self.pairs
            count = self._places[name][1] // len(WORK)
            self.segments.append(Segment(level, tile, self._address(name), count, pairs))

    def _copy(self, parts: dict[str, _Part], whole: bool) -> None:
        """Upload the parts; page ids stand last and are left alone unless `whole`.

        Nothing writes to a plan's arrays: one that was there before holds what it held.
        """
        for name, (begin, room) in self._places.items():
            numbers, _, filler = parts.get(name, _EMPTY)
            before, filled = self._written.get(name, (None, filler))
            if numbers is before and filler == filled:
                continue
            end, size, used = begin + room, numbers.size, room if before is None else before.size
            if size > room:
                raise ContractError(f"plan: must fit its room ({name}: {room} numbers), got {size}.")
            self._host[begin : begin + size] = numbers.reshape(-1)
            if size < used or filler != filled:
                self._host[begin + size : begin + used if filler == filled else end] = filler
            self._written[name] = numbers, filler
        host, buffer = (self._host, self._buffer) if whole else self._without_tables
        self.device.upload(host, buffer)

    def _address(self, name: str) -> int:
        return self.device.address(self._buffer) + 4 * self._places[name][0]

    def states(self, num_qo_heads: int, head_dim: int) -> tuple[Any, Any]:
        """Return the buffers of partial states."""
        shape = (self.num_states, num_qo_heads)
        return self.scratch("state values", (*shape, head_dim)), self.scratch("state sums", shape)

    def scratch(self, name: str, shape: tuple[int, ...]) -> Any:
        """Return a float32 buffer that lives as long as the plan, one for each stream.

        A captured graph goes on using it, and calls on two streams do not share it.
        """
        key = (self.device.stream(), name, shape)
        if key not in self._scratch:
            self._scratch[key] = self.device.empty(shape, "float32")
        return self._scratch[key]


def upload_integers(device: Any, arrays: list[np.ndarray]) -> tuple[Any, list[int]]:
    """Copy int32 arrays to the device in one piece; return what keeps them alive, and the address of each."""
    sizes = [-(-array.size // _ALIGNMENT) * _ALIGNMENT for array in arrays]
    host = np.zeros(max(sum(sizes), 1), np.int32)
    begins = np.cumsum([0, *sizes])
    for array, begin in zip(arrays, begins, strict=False):
        host[begin : begin + array.size] = array.ravel()
    buffer = device.empty(host.shape, "int32")
    device.upload(host, buffer)
    return buffer, [device.address(buffer) + 4 * int(begin) for begin in begins[:-1]]

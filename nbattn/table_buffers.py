"""The buffers that a cascade wrapper is given for CUDA graphs: plan copies its metadata into them, run reads them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from typing import Any

import numpy as np

from nbattn.arrays import Array, dtype_name, library_of, overlap, require_array
from nbattn.errors import ContractError

ARGUMENTS = (
    "qo_indptr_buf_arr",
    "paged_kv_indptr_buf_arr",
    "paged_kv_indices_buf_arr",
    "paged_kv_last_page_len_buf_arr",
)


def check_lists(lists: dict[str, Any], num_levels: int) -> list[dict[str, Any]]:
    """Return lists with one array per level as one dict ``{"argument[level]": array}`` per level."""
    for name, arrays in lists.items():
        if not isinstance(arrays, (list, tuple)) or len(arrays) != num_levels:
            got = f"{len(arrays)} entries" if isinstance(arrays, (list, tuple)) else type(arrays).__name__
            raise ContractError(f"{name}: must be a list of {num_levels} arrays (num_levels), got {got}.")
    return [{f"{name}[{i}]": arrays[i] for name, arrays in lists.items()} for i in range(num_levels)]


class TableBuffers:
    """One level's worth of buffers after another, all int32 and in one place.

    Parameters
    ----------
    arrays : sequence of four lists of int32 arrays
        As the wrapper's constructor takes them, in the order of `ARGUMENTS`.
    num_levels : int
    """

    def __init__(self, arrays: Sequence[Any], num_levels: int):
        lists = dict(zip(ARGUMENTS, arrays, strict=True))
        for name, given in lists.items():
            if given is None:
                raise ContractError(f"{name}: must be given with use_cuda_graph=True, got None.")
        self.levels = check_lists(lists, num_levels)
        self._sizes: list[list[int]] = []
        places = set()
        for name, x in (pair for level in self.levels for pair in level.items()):
            places.add(library_of(require_array(name, x)))
            if x.ndim != 1 or dtype_name(x) != "int32":
                raise ContractError(f"{name}: must be a one-dimensional int32 array, got {x.dtype} {x.shape}.")
            _require_writable(name, x)
            if len(places) > 1:
                raise ContractError(f"{name}: must live where {ARGUMENTS[0]}[0] does, got {library_of(x)}.")
        for (other, x), (name, y) in combinations((pair for level in self.levels for pair in level.items()), 2):
            if overlap(x, y):
                raise ContractError(f"{name}: must share no memory with {other}, got overlapping arrays.")
        self.library = places.pop()

    @property
    def num_pages(self) -> int:
        """Page ids that the largest level can hold."""
        return max(level[f"{ARGUMENTS[2]}[{i}]"].size for i, level in enumerate(self.levels))

    def check_room(self, metadata: Sequence[Sequence[Array]]) -> None:
        """Refuse what cannot be filled in: for each level qo_indptr, kv_indptr, kv_indices, kv_last_page_len."""
        for number, (buffers, arrays) in enumerate(zip(self.levels, metadata, strict=True)):
            for (name, buffer), x in zip(buffers.items(), arrays, strict=True):
                _require_writable(name, buffer)  # it may have become read-only
                if buffer.size < x.size:
                    raise ContractError(
                        f"{name}: must hold at least {x.size} entries for level {number}, got {buffer.size}."
                    )

    def fill(self, metadata: Sequence[Sequence[Array]]) -> None:
        """Copy metadata that fits."""
        for buffers, arrays in zip(self.levels, metadata, strict=True):
            for buffer, x in zip(buffers.values(), arrays, strict=True):
                if library_of(buffer) == "numpy":
                    buffer[: x.size] = x if isinstance(x, np.ndarray) else x.get()
                elif isinstance(x, np.ndarray):
                    buffer[: x.size].set(x.astype(np.int32))
                else:
                    buffer[: x.size] = x
        self._sizes = [[x.size for x in arrays] for arrays in metadata]

    def filled(self) -> list[dict[str, Array]]:
        """Return the filled part of every buffer, as views under their names."""
        return [
            {name: x[:size] for (name, x), size in zip(level.items(), sizes, strict=True)}
            for level, sizes in zip(self.levels, self._sizes, strict=True)
        ]


def _require_writable(name: str, buffer: Array) -> None:
    if library_of(buffer) == "numpy" and not buffer.flags.writeable:
        raise ContractError(f"{name}: must be writable, got a read-only array.")

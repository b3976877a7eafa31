"""A plan's launches over arrays of one form: parameters are packed once, a call brings only where its arrays lie."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable
from typing import Any

from nbattn.cuda_kernels.calls import Array, AttentionOptions, paged_kernels
from nbattn.cuda_kernels.metadata import PlanMetadata

_OPTIONS = ("sinks", "mask", "alibi_slopes", "k_scale", "v_scale")  # in the order of nbattn.repeat.Launch
_ALIGNMENT = 15  # bits of an address that must be 0 where kernels may read and write 16 bytes at once


class PagedCall:
    """A checked call on the device, to be repeated on other arrays: see `nbattn.repeat.Launch`.

    The addresses of the arrays, of its options and of the partial states lie in cells, which all its launches read.

    Parameters
    ----------
    device : Device
    metadata : PlanMetadata
        The plan on the device.
    q : array, shape [total_rows, num_qo_heads, head_dim_qk], float16 | bfloat16 | float32
        Last axis contiguous.
    kvs : list of PagedKV
        One of each level.
    options : AttentionOptions
    out : array, shape [total_rows, num_qo_heads, head_dim_vo], float16 | bfloat16 | float32
        Last axis contiguous. Rows that the plan does not cover are left alone.
    lse : array, shape [total_rows, num_qo_heads], float32, optional

    Attributes
    ----------
    addresses, options : tuple of int
        Where the arrays and options it was made from lie.
    aligned : bool
        Whether it may be repeated: no array of data stands at an odd address, for which the kernels were chosen.
    """

    def __init__(
        self, device: Any, metadata: PlanMetadata, q: Array, kvs: list[Any], options: AttentionOptions, out: Array,
        lse: Array | None,
    ):  # fmt: skip
        self.address, self._stream, self._metadata, self._lock = device.address, device.stream, metadata, metadata.lock
        pages = [device.address(x) for kv in kvs for x in (kv.k, kv.v)]
        self.addresses = device.address(q), device.address(out), 0 if lse is None else device.address(lse), *pages
        given = options.sinks, options.attn_mask, options.alibi_slopes, options.rope_k_scale, options.v_scale
        self.options = tuple(0 if x is None else device.address(x) for x in given)
        self.aligned = not _low_bits(self.addresses, _ALIGNMENT)
        self._refused = _ALIGNMENT if self.aligned else 0  # bits of addresses that other arrays may not have
        self._no_options = (0,) * len(self.options)
        self._shape = q.shape[1], out.shape[2]
        self._on_streams: dict[int, tuple[tuple[int, int], list[Callable[[], None]]]] = {}  # its states and launches
        end = len(self.addresses) + len(self.options)
        self._cells = (ctypes.c_int64 * (end + 2))()
        self._pack = struct.Struct(f"@{end + 2}q").pack_into
        fixed = {"q": 0, "out": 1, "lse": 2, "state_v": end, "state_s": end + 1}
        fixed.update({name: len(self.addresses) + i for i, name in enumerate(_OPTIONS)})
        self._launches = []
        self._tables = [metadata.table(level, kv.kv_indices) for level, kv in enumerate(kvs)]
        self._has_own_tables = all(owner is metadata for _, owner in self._tables)
        tables = [(address, owner is kv.kv_indices) for (address, owner), kv in zip(self._tables, kvs, strict=True)]
        self._most_states = metadata.most_states
        for level, kernel in paged_kernels(device, metadata, q, kvs, tables, options, out, lse):
            places = {**fixed, "k": 3 + 2 * level, "v": 4 + 2 * level}
            if kernel.family == "merge_states":
                places.update(v=end, s=end + 1)
            self._launches.append(device.bind(kernel, self._cells, places))

    @property
    def follows_plan(self) -> bool:
        """Whether its page ids are the plan's own, which an update refills, and merges are of as many states still."""
        return self._has_own_tables and self._metadata.most_states == self._most_states

    def __call__(self, addresses: tuple[int, ...], options: tuple[int, ...] = ()) -> bool:
        """Launch the kernels on the current stream over arrays of the same forms, unless one is not aligned."""
        if _low_bits(addresses, self._refused):
            return False
        stream = self._stream()
        found = self._on_streams.get(stream)
        if found is None:
            found = self._on_streams[stream] = self._states_of_stream(), [x.on(stream) for x in self._launches]
        states, launches = found
        self._lock.acquire()  # `with` takes twice as long
        try:
            self._pack(self._cells, 0, *addresses, *(options or self._no_options), *states)
            for launch in launches:
                launch()
        finally:
            self._lock.release()
        return True

    def _states_of_stream(self) -> tuple[int, int]:
        if not self._metadata.num_states:
            return 0, 0
        v, s = self._metadata.states(*self._shape)
        return self.address(v), self.address(s)


def _low_bits(addresses: tuple[int, ...], mask: int) -> int:
    """Return the bits of `mask` that are set in an address of q, out, K or V."""
    bits = addresses[0] | addresses[1]
    for page in addresses[3:]:
        bits |= page
    return bits & mask

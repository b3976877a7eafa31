"""The CPU pass that writes new rows of K and V into their slots: a copy of bytes, whatever the element type."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

import nbattn.cpu_ref.primitives  # noqa: F401  (gives page_and_slot its CPU division)
from nbattn.cpu_ref.addresses import address_of
from nbattn.cpu_ref.compiling import kernel
from nbattn.indexing import page_and_slot

if TYPE_CHECKING:
    from nbattn.kv_cache import PagedKV


def append_kv(
    append_key: np.ndarray, append_value: np.ndarray, batch_indices: np.ndarray, positions: np.ndarray, kv: PagedKV
) -> None:
    """Write row ``i`` of both arrays to key ``positions[i]`` of request ``batch_indices[i]``, in order of ``i``."""
    batch_indices, positions = batch_indices.astype(np.int64), positions.astype(np.int64)  # one compiled kernel
    for rows, pages in ((append_key, kv.k), (append_value, kv.v)):
        _append(
            address_of(rows), rows.strides[:2], address_of(pages), pages.strides[:3],
            kv.num_kv_heads, rows.shape[2] * rows.itemsize,
            batch_indices, positions, kv.kv_indices, kv.kv_indptr, kv.page_size,
        )  # fmt: skip


@intrinsic
def _copy(typingctx, target, source, num_bytes):
    """Copy bytes between two addresses that do not overlap."""

    def codegen(context, builder, sig, args):
        target, source = (builder.inttoptr(address, cgutils.voidptr_t) for address in args[:2])
        cgutils.raw_memcpy(builder, target, source, args[2], 1)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), codegen


@kernel
def _append(
    rows, row_strides, pages, page_strides, num_kv_heads, row_bytes,
    batch_indices, positions, kv_indices, kv_indptr, page_size,
):  # fmt: skip
    for token in range(positions.size):
        page, slot = page_and_slot(positions[token], page_size)
        page_id = np.int64(kv_indices[kv_indptr[batch_indices[token]] + page])
        target = pages + page_id * page_strides[0] + slot * page_strides[1]
        source = rows + token * row_strides[0]
        for head in range(num_kv_heads):
            _copy(target + head * page_strides[2], source + head * row_strides[1], row_bytes)

"""`append_paged_kv_cache`: write new keys and values into their pages, as FlashInfer's ``page`` module does."""

from __future__ import annotations

from typing import Any

import numpy as np

from nbattn.arrays import Array, common_library, dtype_name, library_of
from nbattn.cache_views import in_layout, require_contiguous_last, swapped_hint
from nbattn.errors import ContractError, PageTableError, TargetError
from nbattn.indexing import page_and_slot
from nbattn.kv_cache import PagedKV
from nbattn.page_tables import require_index_array


def append_paged_kv_cache(
    append_key: Array,
    append_value: Array,
    batch_indices: Array,
    positions: Array,
    paged_kv_cache: Any,
    kv_indices: Array,
    kv_indptr: Array,
    kv_last_page_len: Array,
    kv_layout: str = "NHD",
) -> None:
    """Write token ``i`` to key ``positions[i]`` of request ``batch_indices[i]``.

    The table already counts the new tokens: a page must have been given to each of them. With ``request`` and
    ``position`` of a token::

        page = kv_indices[kv_indptr[request] + position // page_size]
        k[page, position % page_size] = append_key[i]

    Parameters
    ----------
    append_key : array, shape [tokens, num_kv_heads, head_dim_qk], of the cache's dtype
    append_value : array, shape [tokens, num_kv_heads, head_dim_vo], of the cache's dtype
    batch_indices, positions : array, shape [tokens], int32
    paged_kv_cache, kv_indices, kv_indptr, kv_last_page_len, kv_layout
        As in `PagedKV.from_page_table`; the cache is written in place.

    Raises
    ------
    ContractError
        If an array has a wrong shape, dtype or place. Nothing is cast: quantise keys before they are appended.
    PageTableError
        If the table is inconsistent, or a token names no request, a position outside it or an unmapped page.
    TargetError
        If this installation has no kernel for CuPy arrays.

    Notes
    -----
    Everything the host can see is checked before the first byte is written. On a GPU a token that breaks a rule is
    skipped. Of two tokens with the same place the later one stays on the CPU; on a GPU either may.

    Examples
    --------
    >>> import numpy as np
    >>> cache = np.zeros((4, 2, 16, 1, 8), np.float32)
    >>> new = np.ones((1, 1, 8), np.float32)
    >>> request, position = np.array([0], np.int32), np.array([16], np.int32)
    >>> indices, indptr, last = np.array([3, 1]), np.array([0, 2]), np.array([1])
    >>> append_paged_kv_cache(new, 2 * new, request, position, cache, indices, indptr, last)
    >>> cache[1, :, 0, 0, 0]
    array([1., 2.], dtype=float32)
    """
    kv = PagedKV.from_page_table(paged_kv_cache, kv_indptr, kv_indices, kv_last_page_len, kv_layout)
    _check_rows("append_key", append_key, kv.k, kv_layout)
    _check_rows("append_value", append_value, kv.v, kv_layout)
    _check_places(append_key, append_value, batch_indices, positions, kv)
    _pass_of(kv.library)(append_key, append_value, batch_indices, positions, kv)


def _pass_of(library: str) -> Any:
    if library == "numpy":
        from nbattn.cpu_ref.append_kv import append_kv
    else:
        try:
            from nbattn.cuda_kernels.append_kv import append_kv
        except ImportError as error:
            raise TargetError(f"paged_kv_cache: CuPy arrays need the CUDA kernels, got {error}.") from error
    return append_kv


def _check_rows(name: str, rows: Array, pages: Array, kv_layout: str) -> None:
    common_library(paged_kv_cache=pages, **{name: rows})
    _, page_size, num_heads, head_dim = pages.shape
    if rows.ndim != 3 or rows.shape[1:] != (num_heads, head_dim):
        fits = rows.ndim == 3 and rows.shape[1:] == (page_size, head_dim)
        raise ContractError(
            f"{name}: must be [tokens, {num_heads}, {head_dim}] (kv_heads and dim of the {kv_layout} cache"
            f" {in_layout(pages.shape, kv_layout)}), got {rows.shape}"
            + (swapped_hint(kv_layout, "the cache's axes") if fits else ".")
        )
    if rows.dtype != pages.dtype:
        raise ContractError(
            f"{name}: must be {dtype_name(pages)} as the cache is, got {dtype_name(rows)}. Nothing is cast silently."
        )
    require_contiguous_last(name, rows)
    if library_of(pages) == "numpy" and not pages.flags.writeable:
        raise ContractError("paged_kv_cache: must be writable, got a read-only array.")


def _check_places(append_key: Array, append_value: Array, batch_indices: Array, positions: Array, kv: PagedKV) -> None:
    tokens = append_key.shape[0]
    for name, x in (("append_value", append_value), ("batch_indices", batch_indices), ("positions", positions)):
        if x is not append_value:
            require_index_array(name, x, 1, kv.library)
        if x.shape[0] != tokens:
            raise ContractError(f"{name}: must have {tokens} entries (one per row of append_key), got {x.shape[0]}.")
    if library_of(batch_indices) == "numpy":
        _refuse_first(
            (batch_indices < 0) | (batch_indices >= kv.batch_size),
            lambda i: f"batch_indices[{i}]: must name one of {kv.batch_size} requests, got {batch_indices[i]}.",
        )
    if library_of(batch_indices) != "numpy" or library_of(positions) != "numpy":
        return
    lens = kv.kv_lens[batch_indices]
    _refuse_first(
        (positions < 0) | (positions >= lens),
        lambda i: (
            f"positions[{i}]: must name one of the {lens[i]} keys that request {batch_indices[i]} has"
            f" with the new ones, got {positions[i]}."
        ),
    )
    if library_of(kv.kv_indices) == "numpy":
        page, _ = page_and_slot(positions, kv.page_size)
        entry = kv.kv_indptr[batch_indices] + page
        _refuse_first(
            kv.kv_indices[entry] < 0,
            lambda i: (
                f"kv_indices[{entry[i]}]: must be a page for token {i} (request {batch_indices[i]},"
                f" position {positions[i]}), got {kv.kv_indices[entry[i]]} (unmapped)."
            ),
        )


def _refuse_first(broken: np.ndarray, message: Any) -> None:
    if broken.any():
        raise PageTableError(message(int(np.argmax(broken))))

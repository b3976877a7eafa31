"""`PagedKV`: every cache layout as a pair of strided views ``[page, slot, kv_head, dim]`` and one page table."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from nbattn import page_tables
from nbattn.arrays import Array, Form, dtype_name, form_of, library_of, require_array
from nbattn.cache_views import in_layout, page_views, split_pair, swapped_hint, with_page_stride
from nbattn.errors import ContractError, PageTableError, refuse_bool
from nbattn.explain import explain
from nbattn.page_tables import PageTable, single_int


@dataclass(frozen=True, eq=False, repr=False, slots=True)
class PagedKV:
    """A KV cache and the table of who owns which page; made by one of the four ``from_`` constructors.

    K and V are never copied: key ``j`` of request ``b`` is, for each KV head,
    ``k[kv_indices[kv_indptr[b] + j // page_size], j % page_size]``. The tables are: later edits of the arrays
    they were made from are not seen.

    Attributes
    ----------
    k : array, shape [num_pages, page_size, num_kv_heads, head_dim_qk], a view of the caller's memory
    v : array, shape [num_pages, page_size, num_kv_heads, head_dim_vo], likewise
    table : PageTable, the checked snapshot
    kv_layout : str, the layout in which `with_pages` expects its arrays
    forms : tuple, what calls compare of `k` and `v`: see `nbattn.arrays.form_of`

    Notes
    -----
    Everything visible on the host is checked on construction. A negative page id marks an unmapped page, whose
    keys are dropped; an id beyond the cache is an error on the host and is dropped on the device. CuPy allocates no
    fp8 arrays but views them: ``cupy.zeros(shape, "uint8").view(ml_dtypes.float8_e4m3fn)``.

    Examples
    --------
    >>> import numpy as np
    >>> k = np.zeros((8, 4, 2, 16), np.float16)  # [pages, page_size, kv_heads, dim]
    >>> PagedKV.from_block_table(k, k, np.array([[5, 3], [1, -1]]), np.array([7, 2]))
    PagedKV(8 pages of 4 slots, 2 KV heads of 16, numpy float16; 2 requests, 9 keys)
    """

    k: Array
    v: Array
    table: PageTable
    kv_layout: str = "NHD"
    forms: tuple[Form, Form] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "forms", (form_of(self.k), form_of(self.v)))

    @classmethod
    def from_page_table(
        cls, paged_kv_cache: Any, kv_indptr: Array, kv_indices: Array, kv_last_page_len: Array, kv_layout: str = "NHD"
    ) -> PagedKV:
        """Make a `PagedKV` from FlashInfer's arrays: ``kv_len = (pages - 1) * page_size + last_page_len``.

        Parameters
        ----------
        paged_kv_cache : array, shape [pages, 2, page_size, kv_heads, dim], or a pair of arrays
            K and V on axis 1; or a tuple or list ``(k, v)`` of such arrays without axis 1, whose dims may differ.
            HND swaps ``page_size`` and ``kv_heads``.
        kv_indptr : array, shape [batch_size + 1], int32
            Starts at 0, never decreases, ends at or below ``len(kv_indices)``.
        kv_indices : array, shape [entries], int32
            Page ids; entries past ``kv_indptr[-1]`` are ignored.
        kv_last_page_len : array, shape [batch_size], int32
            Keys on the last page, in ``1..page_size``; ignored for a request without pages.
        kv_layout : {"NHD", "HND"}

        Raises
        ------
        ContractError
            If an array has a wrong shape, dtype or place.
        PageTableError
            If the table is inconsistent; the message names the request.

        Examples
        --------
        >>> import numpy as np
        >>> cache = np.zeros((8, 2, 4, 1, 16), np.float32)
        >>> kv = PagedKV.from_page_table(cache, np.array([0, 2]), np.array([5, 3]), np.array([1]))
        >>> kv.kv_lens.tolist(), kv.k.shape
        ([5], (8, 4, 1, 16))
        """
        k, v = page_views(*split_pair("paged_kv_cache", paged_kv_cache), kv_layout)
        table = _table_over(kv_layout, k, page_tables.csr_table, kv_indptr, kv_indices, kv_last_page_len)
        return cls(k, v, table, kv_layout)

    @classmethod
    def from_block_table(
        cls, k_cache: Array, v_cache: Array, block_table: Array, kv_lens: Array, kv_layout: str = "NHD"
    ) -> PagedKV:
        """Make a `PagedKV` from a rectangular table of page ids.

        Parameters
        ----------
        k_cache, v_cache : array, shape [pages, page_size, kv_heads, dim]
            HND: ``[pages, kv_heads, page_size, dim]``. The two dims may differ.
        block_table : array, shape [batch_size, max_blocks], int32
            Only the first ``ceil(kv_lens[b] / page_size)`` ids of row ``b`` are read.
        kv_lens : array, shape [batch_size], int32
            Keys of each request, in ``0..max_blocks * page_size``.
        kv_layout : {"NHD", "HND"}

        Raises
        ------
        ContractError, PageTableError
            As `from_page_table`.
        """
        k, v = page_views(("k_cache", k_cache), ("v_cache", v_cache), kv_layout)
        return cls(k, v, _table_over(kv_layout, k, page_tables.block_table, block_table, kv_lens), kv_layout)

    @classmethod
    def from_slots(
        cls, k_cache: Array, v_cache: Array, kv_lens: Array, slot_ids: Array | None = None, kv_layout: str = "NHD"
    ) -> PagedKV:
        """Make a `PagedKV` from a fixed cache that has one row of slots per request.

        Parameters
        ----------
        k_cache, v_cache : array, shape [rows, slots, kv_heads, dim]
            HND: ``[rows, kv_heads, slots, dim]``. The two dims may differ.
        kv_lens : array, shape [batch_size], int32
            Keys of each request, in ``0..slots``.
        slot_ids : array, shape [batch_size], int32, optional
            The cache row of each request: in range and pairwise distinct. Default: request ``b`` reads row ``b``.
        kv_layout : {"NHD", "HND"}

        Raises
        ------
        ContractError, PageTableError
            As `from_page_table`.
        """
        k, v = page_views(("k_cache", k_cache), ("v_cache", v_cache), kv_layout)
        return cls(k, v, _table_over(kv_layout, k, page_tables.slot_table, slot_ids, kv_lens), kv_layout)

    @classmethod
    def from_blocks(
        cls, kv_blocks: Array, kv_lookup_table: Array, kv_lens: Array, layer_idx: int, page_stride: int | None = -1
    ) -> PagedKV:
        """Make a `PagedKV` from one layer of a pool that holds all layers.

        Parameters
        ----------
        kv_blocks : array, shape [pages, 2, layers, page_size, kv_heads, dim]
            K and V on axis 1.
        kv_lookup_table : array, shape [batch_size, max_pages], uint32 or int32
            Page ids; padding is never read.
        kv_lens : array, shape [batch_size], int32
            Keys of each request, in ``0..max_pages * page_size``.
        layer_idx : int
            In ``0..layers - 1``.
        page_stride : int or one-element array, optional
            Elements between two pages, at least one packed page; the last page must end inside the memory of the
            array's base. -1 or None: the array's own stride.

        Raises
        ------
        ContractError, PageTableError
            As `from_page_table`.
        """
        require_array("kv_blocks", kv_blocks)
        if kv_blocks.ndim != 6 or kv_blocks.shape[1] != 2:
            raise ContractError(
                f"kv_blocks: must be [pages, 2, layers, page_size, kv_heads, dim], got {kv_blocks.shape}."
            )
        layer, layers = single_int("layer_idx", refuse_bool("layer_idx", layer_idx)), kv_blocks.shape[2]
        if not 0 <= layer < layers:
            raise ContractError(f"layer_idx: must be in 0..{layers - 1} (layers of kv_blocks), got {layer}.")
        stride = -1 if page_stride is None else single_int("page_stride", refuse_bool("page_stride", page_stride))
        layer_pages = with_page_stride("kv_blocks", kv_blocks, stride)[:, :, layer]
        k, v = page_views(*split_pair("kv_blocks", layer_pages), "NHD")
        return cls(k, v, page_tables.block_table(kv_lookup_table, kv_lens, k, page_tables.LOOKUP_TABLE))

    def with_pages(self, k_cache: Any, v_cache: Array | None = None) -> PagedKV:
        """Return the same checked table over other arrays of the same geometry, e.g. the next layer's.

        Parameters
        ----------
        k_cache : array or pair
            K in the layout `self` was made with; without `v_cache` a 5-D array or a pair as in `from_page_table`.
        v_cache : array, optional

        Raises
        ------
        ContractError
            If shape, dtype or library differ from those of `self`.
        """
        named = (("k_cache", k_cache), ("v_cache", v_cache)) if v_cache is not None else split_pair("k_cache", k_cache)
        k, v = page_views(*named, self.kv_layout)
        layout = self.kv_layout
        for (name, _), new, old in zip(named, (k, v), (self.k, self.v), strict=True):
            if new.shape != old.shape:
                pages, slots, heads, dim = new.shape
                hint = swapped_hint(layout) if (pages, heads, slots, dim) == old.shape else "."
                raise ContractError(
                    f"{name}: must be {in_layout(old.shape, layout)} ({layout}) as before,"
                    f" got {in_layout(new.shape, layout)}{hint}"
                )
            if new.dtype != old.dtype or library_of(new) != self.library:
                got = f"{library_of(new)} {dtype_name(new)}"
                raise ContractError(f"{name}: must be {self.library} {self.kv_dtype} as before, got {got}.")
        return PagedKV(k, v, self.table, self.kv_layout)

    def check(self) -> None:
        """Verify every rule again, also those that construction cannot afford for a table on a device.

        Raises
        ------
        PageTableError
            Listing every broken rule.
        """
        page_views(("k", self.k), ("v", self.v), "NHD")
        if faults := list(self.table.faults()):
            raise PageTableError("\n".join(faults))

    def explain(self, request: int | None = None) -> str:
        """Return a picture of one request's pages, slots and tokens, or a line per request, as text."""
        return explain(self, request)

    @property
    def kv_indptr(self) -> np.ndarray:
        """Where each request's page ids begin in `kv_indices`: int32 [batch_size + 1], on the host."""
        return self.table.kv_indptr

    @property
    def kv_indices(self) -> Array:
        """Page ids: int32 [entries], on the host or on the device, as they were given."""
        return self.table.kv_indices

    @property
    def kv_lens(self) -> np.ndarray:
        """Keys of each request: int32 [batch_size], on the host."""
        return self.table.kv_lens

    @property
    def page_size(self) -> int:
        """Slots of a page."""
        return self.k.shape[1]

    @property
    def num_pages(self) -> int:
        """Pages of the cache."""
        return self.k.shape[0]

    @property
    def num_kv_heads(self) -> int:
        """Heads of K and V."""
        return self.k.shape[2]

    @property
    def head_dim_qk(self) -> int:
        """Head size of K, and so of q."""
        return self.k.shape[3]

    @property
    def head_dim_vo(self) -> int:
        """Head size of V, and so of the output."""
        return self.v.shape[3]

    @property
    def batch_size(self) -> int:
        """Requests of the table."""
        return self.table.kv_lens.shape[0]

    @property
    def library(self) -> str:
        """``"numpy"`` or ``"cupy"``: where K and V live."""
        return str(library_of(self.k))

    @property
    def kv_dtype(self) -> str:
        """Element type of K and V by name, e.g. ``"bfloat16"``."""
        return dtype_name(self.k)

    def __repr__(self) -> str:
        dims = f"{self.head_dim_qk}" + (f"/{self.head_dim_vo}" if self.head_dim_qk != self.head_dim_vo else "")
        shape = f"{self.num_pages} pages of {self.page_size} slots, {self.num_kv_heads} KV heads of {dims}"
        keys = int(self.kv_lens.sum(dtype=np.int64))
        return f"PagedKV({shape}, {self.library} {self.kv_dtype}; {self.batch_size} requests, {keys} keys)"


def _table_over(kv_layout: str, k: Array, make: Callable[..., PageTable], *arrays: Any) -> PageTable:
    """Return the table of `arrays` over pages `k`; where it fits them only in the other layout, the error says so."""
    try:
        return make(*arrays, k)
    except PageTableError as error:
        try:
            make(*arrays, k.transpose(0, 2, 1, 3))
        except PageTableError:
            raise error from None
        error.args = (str(error).removesuffix(".") + swapped_hint(kv_layout, "the cache's axes"),)
        raise

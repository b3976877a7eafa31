"""Wrappers for one dense prefix under all requests: a cascade of two levels whose caches lie apart."""

from __future__ import annotations

from typing import Any

import numpy as np

from nbattn.arrays import CACHE_DTYPES, Array, common_library, dtype_name, require_array
from nbattn.cache_views import check_layout, page_views, split_pair
from nbattn.contracts import check_bool
from nbattn.errors import ContractError
from nbattn.kv_cache import PagedKV
from nbattn.page_tables import slot_table
from nbattn.paged import Result, perform
from nbattn.planned_levels import Heads, LevelTable, PlanKeeper, caches_of, level_table, planned_dtype
from nbattn.problem import Level, PlainOptions


class _SharedPrefixWrapper:
    """What both wrappers do: keep a plan of the requests' own level, and put the prefix above it at run."""

    def __init__(self, float_workspace_buffer: Any = None, kv_layout: str = "NHD") -> None:
        self._kv_layout = check_layout(kv_layout)
        self._table: LevelTable | None = None

    def reset_workspace_buffer(self, float_workspace_buffer: Any = None, int_workspace_buffer: Any = None) -> None:
        """Accept other workspace buffers; they are not used."""

    def end_forward(self) -> None:
        """Do nothing, as in FlashInfer; the plan stays."""

    def _begin(self, named: dict[str, Any], heads: tuple[int, int, int, int], data_type: Any = None) -> None:
        checked = Heads(*heads)
        dtype = planned_dtype("data_type", data_type, CACHE_DTYPES)
        self._table = level_table(named, checked.page_size, causal=False, first=True)
        self._heads, self._dtype, self._keeper = checked, dtype, PlanKeeper(checked.num_qo_heads)

    def _attend(
        self, q: Array, k_shared: Array, v_shared: Array, unique_kv_cache: Any, causal: bool = False, *,
        sinks: Any, k_scale: Any, v_scale: Any, out: Any, lse: Any, **options: Any,
    ) -> Result:  # fmt: skip
        if self._table is None:
            raise ContractError("forward: must follow begin_forward(...), got no plan. Call begin_forward once before.")
        causal = check_bool("causal", causal)
        caches = k_shared, v_shared, *caches_of(unique_kv_cache)
        arrays, plain = (sinks, None, None, k_scale, v_scale), PlainOptions(**options)
        result = self._keeper.again(q, caches, (causal, *plain), arrays, out, lse)
        if result is not None:
            return result
        num_rows = int(self._table.qo_indptr[-1])
        self._heads.check_query(q, num_rows)
        k, v = page_views(*split_pair("unique_kv_cache", unique_kv_cache), self._kv_layout)
        self._heads.check_pages("unique_kv_cache", k, self._kv_layout)
        self._dtype.check("unique_kv_cache", k)
        self._table = self._table.bound(k)
        levels = [Level(PagedKV(k, v, self._table.table, self._kv_layout), self._table.qo_indptr, causal)]
        prefix = _prefix(k_shared, v_shared, k, v, self._kv_layout)
        if prefix is not None:
            levels.insert(0, Level(prefix, np.array([0, num_rows])))
        shape = (0 if prefix is None else prefix.page_size, causal)
        result, call = perform(q, levels, plain, arrays, self._keeper.plan_of(levels, shape), out, lse)
        owners = [2, len(caches) - 1] if prefix is None else [0, 1, 2, len(caches) - 1]
        self._keeper.remember(call, levels, caches, owners, (causal, *plain))
        return result


class BatchDecodeWithSharedPrefixPagedKVCacheWrapper(_SharedPrefixWrapper):
    """Decode attention, one row per request, over a dense shared prefix and each request's paged suffix.

    Parameters
    ----------
    float_workspace_buffer : any, optional
        Accepted and not used: scratch belongs to the library.
    kv_layout : {"NHD", "HND"}
        Layout of the suffix cache and of the prefix.

    Notes
    -----
    Written after FlashInfer's deprecated class of this name, with its scale of ``1 / sqrt(head_dim)`` and no mask. It
    equals `MultiLevelCascadeAttentionWrapper` with two levels. A `data_type` of None takes what comes (float16 there).

    Examples
    --------
    >>> import numpy as np, nbattn
    >>> wrapper = nbattn.BatchDecodeWithSharedPrefixPagedKVCacheWrapper()
    >>> wrapper.begin_forward(
    ...     np.array([0, 1, 1]), np.array([2]), np.array([3, 1]),
    ...     num_qo_heads=2, num_kv_heads=1, head_dim=8, page_size=4,
    ... )  # fmt: skip
    >>> shared = np.ones((5, 1, 8), np.float32)  # [prefix, num_kv_heads, head_dim]
    >>> suffixes = np.zeros((3, 2, 4, 1, 8), np.float32)
    >>> wrapper.forward(np.zeros((2, 2, 8), np.float32), shared, shared, suffixes)[:, 0, 0].round(3)
    array([0.625, 1.   ], dtype=float32)
    """

    def begin_forward(
        self,
        unique_kv_indptr: Array,
        unique_kv_indices: Array,
        unique_kv_last_page_len: Array,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        data_type: Any = None,
    ) -> None:
        """Check the suffixes' page table once for any number of `forward` calls.

        Parameters
        ----------
        unique_kv_indptr, unique_kv_indices, unique_kv_last_page_len : int array
            The page table, as for `PagedKV.from_page_table`; a request may have no page.
        num_qo_heads, num_kv_heads, head_dim, page_size : int
            Sizes of the arrays to come.
        data_type : str or dtype, optional
            What the caches must have; None takes what comes.

        Raises
        ------
        ContractError, PageTableError
            If an argument breaks a rule; the last plan stays.
        """
        named = {
            "qo_indptr": None,
            "unique_kv_indptr": unique_kv_indptr,
            "unique_kv_indices": unique_kv_indices,
            "unique_kv_last_page_len": unique_kv_last_page_len,
        }
        self._begin(named, (num_qo_heads, num_kv_heads, head_dim, page_size), data_type)

    def forward(
        self,
        q: Array,
        k_shared: Array,
        v_shared: Array,
        unique_kv_cache: Any,
        *,
        sinks: Array | None = None,
        k_scale: Any = None,
        v_scale: Any = None,
        out: Array | None = None,
        lse: Array | None = None,
        return_lse: bool = False,
        lse_base: str = "2",
        target: str | None = None,
    ) -> Result:
        """Attend over the prefix and the suffixes.

        Parameters
        ----------
        q : array, shape [batch, num_qo_heads, head_dim], float16 | bfloat16 | float32 | float64 (CPU only)
            One row per request.
        k_shared, v_shared : array, shape [prefix, num_kv_heads, head_dim] (HND: [num_kv_heads, prefix, head_dim])
            The prefix, read in place; it may be empty.
        unique_kv_cache : array or pair of arrays
            The suffixes' pages, as for `PagedKV.from_page_table`.
        sinks, k_scale, v_scale, out, lse, return_lse, lse_base, target
            As for `MultiLevelCascadeAttentionWrapper.run`; the scales hold for both caches.

        Returns
        -------
        out : array, shape [batch, num_qo_heads, head_dim], q's dtype
        lse : array, shape [batch, num_qo_heads]
            Only with `return_lse`.

        Raises
        ------
        ContractError, PageTableError
            If `begin_forward` was not called or an argument breaks a rule; nothing is written.
        """
        return self._attend(
            q, k_shared, v_shared, unique_kv_cache, sinks=sinks, k_scale=k_scale, v_scale=v_scale,
            out=out, lse=lse, return_lse=return_lse, lse_base=lse_base, target=target,
        )  # fmt: skip

    def forward_return_lse(
        self, q: Array, k_shared: Array, v_shared: Array, unique_kv_cache: Any, **options: Any
    ) -> Result:
        """Return ``(out, lse)``: `forward` with ``return_lse=True``."""
        return self.forward(q, k_shared, v_shared, unique_kv_cache, **{**options, "return_lse": True})


class BatchPrefillWithSharedPrefixPagedKVCacheWrapper(_SharedPrefixWrapper):
    """Attention of ragged rows over a dense shared prefix and each request's paged suffix.

    Parameters
    ----------
    float_workspace_buffer : any, optional
        Accepted and not used: scratch belongs to the library.
    kv_layout : {"NHD", "HND"}
        Layout of the suffix cache and of the prefix.

    Notes
    -----
    Written after FlashInfer's deprecated class of this name. It equals `MultiLevelCascadeAttentionWrapper` with two
    levels, of which the second is causal on demand. It has no position mode, so `rope_scale` and `rope_theta` change
    nothing.

    Examples
    --------
    >>> import numpy as np, nbattn
    >>> wrapper = nbattn.BatchPrefillWithSharedPrefixPagedKVCacheWrapper()
    >>> wrapper.begin_forward(
    ...     np.array([0, 2]), np.array([0, 1]), np.array([2]), np.array([2]),
    ...     num_qo_heads=2, num_kv_heads=1, head_dim=8, page_size=4,
    ... )  # fmt: skip
    >>> shared = np.ones((2, 1, 8), np.float32)  # [prefix, num_kv_heads, head_dim]
    >>> suffixes = np.zeros((3, 2, 4, 1, 8), np.float32)
    >>> q = np.zeros((2, 2, 8), np.float32)
    >>> wrapper.forward(q, shared, shared, suffixes, causal=True)[:, 0, 0].round(3)
    array([0.667, 0.5  ], dtype=float32)
    """

    def begin_forward(
        self,
        qo_indptr: Array,
        paged_kv_indptr: Array,
        paged_kv_indices: Array,
        paged_kv_last_page_len: Array,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
    ) -> None:
        """Check offsets and the suffixes' page table once for any number of `forward` calls.

        Parameters
        ----------
        qo_indptr : int array, shape [batch + 1]
            Request b owns rows ``qo_indptr[b]`` to ``qo_indptr[b + 1]``, from row 0 on. With `causal`, more rows than
            unique keys leave the first of them with the shared prefix alone.
        paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len : int array
            The page table, as for `PagedKV.from_page_table`; a request may have no page.
        num_qo_heads, num_kv_heads, head_dim, page_size : int
            Sizes of the arrays to come.

        Raises
        ------
        ContractError, PageTableError
            If an argument breaks a rule; the last plan stays.
        """
        named = {
            "qo_indptr": qo_indptr,
            "paged_kv_indptr": paged_kv_indptr,
            "paged_kv_indices": paged_kv_indices,
            "paged_kv_last_page_len": paged_kv_last_page_len,
        }
        if qo_indptr is None:
            raise ContractError("qo_indptr: must be an int array [batch + 1], got None.")
        self._begin(named, (num_qo_heads, num_kv_heads, head_dim, page_size))

    def forward(
        self,
        q: Array,
        k_shared: Array,
        v_shared: Array,
        unique_kv_cache: Any,
        causal: bool = False,
        use_fp16_qk_reduction: bool = False,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        *,
        sinks: Array | None = None,
        k_scale: Any = None,
        v_scale: Any = None,
        out: Array | None = None,
        lse: Array | None = None,
        return_lse: bool = False,
        lse_base: str = "2",
        target: str | None = None,
    ) -> Result:
        """Attend over the prefix and the suffixes.

        Parameters
        ----------
        q : array, shape [total_q, num_qo_heads, head_dim], float16 | bfloat16 | float32 | float64 (CPU only)
            Query rows of all requests.
        k_shared, v_shared : array, shape [prefix, num_kv_heads, head_dim] (HND: [num_kv_heads, prefix, head_dim])
            The prefix, read in place; it may be empty.
        unique_kv_cache : array or pair of arrays
            The suffixes' pages, as for `PagedKV.from_page_table`.
        causal : bool
            In the suffix keep only keys up to the row's own position.
        use_fp16_qk_reduction : bool
            Accepted; changes nothing.
        sm_scale : float, optional
            Softmax scale, ``1 / sqrt(head_dim)`` by default.
        rope_scale, rope_theta : float, optional
            Accepted; change nothing.
        sinks, k_scale, v_scale, out, lse, return_lse, lse_base, target
            As for `MultiLevelCascadeAttentionWrapper.run`; the scales hold for both caches.

        Returns
        -------
        out : array, shape [total_q, num_qo_heads, head_dim], q's dtype
        lse : array, shape [total_q, num_qo_heads]
            Only with `return_lse`.

        Raises
        ------
        ContractError, PageTableError
            If `begin_forward` was not called or an argument breaks a rule; nothing is written.
        """
        return self._attend(
            q, k_shared, v_shared, unique_kv_cache, causal, sm_scale=sm_scale, sinks=sinks, k_scale=k_scale,
            v_scale=v_scale, out=out, lse=lse, return_lse=return_lse, lse_base=lse_base, target=target,
        )  # fmt: skip

    def forward_return_lse(
        self, q: Array, k_shared: Array, v_shared: Array, unique_kv_cache: Any, *args: Any, **options: Any
    ) -> Result:
        """Return ``(out, lse)``: `forward` with ``return_lse=True``."""
        return self.forward(q, k_shared, v_shared, unique_kv_cache, *args, **{**options, "return_lse": True})


def _prefix(k_shared: Array, v_shared: Array, k: Array, v: Array, kv_layout: str) -> PagedKV | None:
    """Return the dense prefix as one page beside the suffixes' pages `k` and `v`, or None if it is empty."""
    where = {"NHD": "[prefix, kv_heads, dim]", "HND": "[kv_heads, prefix, dim]"}[kv_layout]
    prefix_axis = 0 if kv_layout == "NHD" else 1
    for name, x, pages in (("k_shared", k_shared, k), ("v_shared", v_shared, v)):
        common_library(unique_kv_cache=pages, **{name: require_array(name, x)})
        if x.ndim != 3:
            raise ContractError(f"{name}: must be {where} ({kv_layout}), got shape {x.shape}.")
        heads_and_dim = (x.shape[1 - prefix_axis], x.shape[2])
        if heads_and_dim != pages.shape[2:]:
            raise ContractError(
                f"{name}: must be {where} ({kv_layout}) with {pages.shape[2]} heads of {pages.shape[3]} as "
                f"unique_kv_cache, got shape {x.shape}."
            )
        if x.dtype != pages.dtype:
            raise ContractError(f"{name}: must be {dtype_name(pages)} as unique_kv_cache is, got {dtype_name(x)}.")
    if v_shared.shape[:2] != k_shared.shape[:2]:
        raise ContractError(f"v_shared: must have k_shared's prefix {k_shared.shape[:2]}, got {v_shared.shape[:2]}.")
    length = k_shared.shape[prefix_axis]
    if length == 0:
        return None
    page = page_views(("k_shared", k_shared[None]), ("v_shared", v_shared[None]), kv_layout)
    return PagedKV(*page, slot_table(None, np.array([length]), page[0]), kv_layout)

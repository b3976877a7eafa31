"""FlashInfer's cascade module: merges of attention states and wrappers for prefixes that requests share.

The six names are spelled as there; `build_levels` makes the tables that the multi-level wrapper is planned with.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from nbattn import contracts
from nbattn.arrays import CACHE_DTYPES, QUERY_DTYPES, Array, library_of
from nbattn.cache_views import check_layout, page_views, split_pair
from nbattn.errors import ContractError, check_choice
from nbattn.level_tables import LevelTables, build_levels
from nbattn.merging import merge_state, merge_state_in_place, merge_states
from nbattn.paged import Result, perform
from nbattn.planned_levels import (
    Heads,
    LevelTable,
    PlanKeeper,
    PlannedDtype,
    caches_of,
    level_table,
    planned_dtype,
)
from nbattn.problem import SMALLEST_ROPE, PlainOptions, Rope
from nbattn.shared_prefix import (
    BatchDecodeWithSharedPrefixPagedKVCacheWrapper,
    BatchPrefillWithSharedPrefixPagedKVCacheWrapper,
)
from nbattn.table_buffers import TableBuffers, check_lists

__all__ = [
    "BatchDecodeWithSharedPrefixPagedKVCacheWrapper",
    "BatchPrefillWithSharedPrefixPagedKVCacheWrapper",
    "LevelTables",
    "MultiLevelCascadeAttentionWrapper",
    "build_levels",
    "merge_state",
    "merge_state_in_place",
    "merge_states",
]

POSITION_MODES = ("NONE", "ROPE_LLAMA", "ALIBI")


@dataclass(eq=False)
class _Planned:
    """What `plan` leaves for `run`."""

    heads: Heads
    tables: list[LevelTable]
    keeper: PlanKeeper
    q_dtype: PlannedDtype
    kv_dtype: PlannedDtype
    alibi: bool
    options: dict[str, Any]

    @property
    def num_rows(self) -> int:
        """Query rows that some level's offsets cover."""
        return max(int(table.qo_indptr[-1]) for table in self.tables)

    def like(self, other: _Planned) -> bool:
        """Tell whether a plan of the one can be refilled for the other."""
        rules = [(x.heads, [t.causal for t in x.tables], x.keeper.window_left) for x in (self, other)]
        return rules[0] == rules[1]


class MultiLevelCascadeAttentionWrapper:
    """Attention of ragged rows over levels of keys that share prefixes, all levels in one paged cache.

    Level 0 is the root, the last level holds what is each request's own. The result is that of flat attention over
    the concatenation of a row's levels: ``out = softmax(q @ K.T * sm_scale + bias) @ V``.

    Parameters
    ----------
    num_levels : int
        Every list given to `plan` has so many entries.
    float_workspace_buffer : any, optional
        Accepted and not used: scratch belongs to the library.
    kv_layout : {"NHD", "HND"}
        Layout of the cache.
    use_cuda_graph : bool
        `plan` copies its metadata into the buffers below and `run` reads it there. On NumPy it works the same, without
        a graph. Without it the buffers are not touched.
    qo_indptr_buf_arr, paged_kv_indptr_buf_arr, paged_kv_indices_buf_arr, paged_kv_last_page_len_buf_arr : list of
        int32 arrays, optional
        Required with `use_cuda_graph`: one buffer per level, large enough for every later plan.

    Raises
    ------
    ContractError
        If an argument breaks a rule.

    Notes
    -----
    Written after FlashInfer's class of this name. Where it differs: positions count the keys of all levels, so that
    window, RoPE and ALiBi are those of flat attention (there they restart at every level); states stay float32 until
    one last merge; dtypes of None are taken from the arrays (there they are float16); q may be any of float16,
    bfloat16, float32 and, on the CPU, float64; ALiBi is added after the soft cap.

    The first run after a plan makes the work list; before a CUDA graph is captured, run once. A later `plan` refills
    it for replays of the graph as long as heads, causality and window stay the same; with ROPE_LLAMA a graph holds the
    angles of all positions that its buffers have room for, up to 131072, and a plan past them is refused. What lies in
    buffers on the device other than the page ids is read by `plan`, not by `run`.

    Examples
    --------
    >>> import numpy as np, nbattn
    >>> wrapper = nbattn.MultiLevelCascadeAttentionWrapper(2)
    >>> wrapper.plan(
    ...     [np.array([0, 2]), np.array([0, 1, 2])],  # both rows share level 0
    ...     [np.array([0, 3]), np.array([0, 1, 2])],
    ...     [np.array([0, 1, 2]), np.array([3, 4])],
    ...     [np.array([4]), np.array([4, 1])],
    ...     num_qo_heads=2, num_kv_heads=1, head_dim=8, page_size=4,
    ... )  # fmt: skip
    >>> layers = np.ones((3, 5, 2, 4, 1, 8), np.float32)  # [layers, pages, 2, page_size, num_kv_heads, head_dim]
    >>> outputs = [wrapper.run(np.ones((2, 2, 8), np.float32), cache) for cache in layers]
    >>> outputs[2].shape, outputs[2].max()
    ((2, 2, 8), np.float32(1.0))
    """

    def __init__(
        self,
        num_levels: int,
        float_workspace_buffer: Any = None,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf_arr: list[Array] | None = None,
        paged_kv_indptr_buf_arr: list[Array] | None = None,
        paged_kv_indices_buf_arr: list[Array] | None = None,
        paged_kv_last_page_len_buf_arr: list[Array] | None = None,
    ) -> None:
        self._num_levels = contracts.check_int("num_levels", num_levels, at_least=1)
        self._kv_layout = check_layout(kv_layout)
        wants_graph = contracts.check_bool("use_cuda_graph", use_cuda_graph)
        buffers = qo_indptr_buf_arr, paged_kv_indptr_buf_arr, paged_kv_indices_buf_arr, paged_kv_last_page_len_buf_arr
        self._buffers = TableBuffers(buffers, num_levels) if wants_graph else None
        self._planned: _Planned | None = None
        self._pages: tuple[Array, Array] | None = None  # of the last run, for a graph on the device

    @property
    def is_cuda_graph_enabled(self) -> bool:
        """Whether the wrapper was made with ``use_cuda_graph=True``."""
        return self._buffers is not None

    def reset_workspace_buffer(self, float_workspace_buffer: Any = None, int_workspace_buffers: Any = None) -> None:
        """Accept other workspace buffers; they are not used."""

    def plan(
        self,
        qo_indptr_arr: list[Array],
        paged_kv_indptr_arr: list[Array],
        paged_kv_indices_arr: list[Array],
        paged_kv_last_page_len: list[Array],
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        sm_scale: float | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        q_data_type: Any = None,
        kv_data_type: Any = None,
    ) -> None:
        """Check tables and options once for any number of `run` calls, e.g. the layers of a model.

        Parameters
        ----------
        qo_indptr_arr : list of int array, shape [batch of the level + 1]
            Entry b of a level owns rows ``qo_indptr[b]`` to ``qo_indptr[b + 1]`` of q. A level may start above 0 or end
            early: rows outside get nothing from it. With `causal`, more rows than keys in the last level leave the
            first of an entry's rows with the levels above.
        paged_kv_indptr_arr, paged_kv_indices_arr, paged_kv_last_page_len : list of int array
            The page table of each level, as for `PagedKV.from_page_table`; empty entries are legal.
        num_qo_heads, num_kv_heads, head_dim, page_size : int
            Sizes of the q and the cache to come; `num_qo_heads` is a multiple of `num_kv_heads`.
        causal : bool
            In the last level keep only keys up to the row's own position. Keys of the levels above stay visible.
        pos_encoding_mode : {"NONE", "ROPE_LLAMA", "ALIBI"}
            ROPE_LLAMA rotates q and keys in half-split pairs at their positions; ALIBI adds
            ``slope * (key position - row position)`` with the usual slopes.
        use_fp16_qk_reduction : bool
            Accepted; changes nothing.
        sm_scale : float, optional
            Softmax scale, ``1 / sqrt(head_dim)`` by default.
        window_left : int
            Keep ``window_left + 1`` keys, the row's own included, counted over all levels. Negative is off.
        logits_soft_cap : float, optional
            ``cap * tanh(score / cap)``; None and 0 are off.
        rope_scale, rope_theta : float, optional
            Of ROPE_LLAMA, 1 and 1e4 by default: angles are ``position * theta**(-2 i / head_dim) / rope_scale``.
        q_data_type, kv_data_type : str or dtype, optional
            What q and the cache must have at run; None takes what comes.

        Raises
        ------
        ContractError, PageTableError
            If an argument breaks a rule; the last plan and the buffers stay as they were.
        """
        del use_fp16_qk_reduction
        levels = check_lists(
            {
                "qo_indptr_arr": qo_indptr_arr,
                "paged_kv_indptr_arr": paged_kv_indptr_arr,
                "paged_kv_indices_arr": paged_kv_indices_arr,
                "paged_kv_last_page_len": paged_kv_last_page_len,
            },
            self._num_levels,
        )
        heads = Heads(num_qo_heads, num_kv_heads, head_dim, page_size)
        options: dict[str, Any] = {
            "sm_scale": contracts.check_sm_scale(sm_scale, head_dim),
            "window_left": contracts.check_window(window_left),
            "logits_soft_cap": contracts.check_soft_cap(logits_soft_cap),
            "rope": _rope(pos_encoding_mode, head_dim, rope_scale, rope_theta),
        }
        tables = self._tables(levels, page_size, contracts.check_bool("causal", causal))
        planned = _Planned(
            heads,
            tables,
            PlanKeeper(num_qo_heads, options["window_left"], self._capacity(page_size)),
            planned_dtype("q_data_type", q_data_type, QUERY_DTYPES),
            planned_dtype("kv_data_type", kv_data_type, CACHE_DTYPES),
            pos_encoding_mode == "ALIBI",
            options,
        )
        if self._buffers is not None:
            self._store(self._buffers, planned, paged_kv_last_page_len)
        self._planned = planned

    begin_forward = plan

    def run(
        self,
        q: Array,
        paged_kv_cache: Any,
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
        """Attend as planned over one layer's cache.

        Parameters
        ----------
        q : array, shape [total_q, num_qo_heads, head_dim], float16 | bfloat16 | float32 | float64 (CPU only)
            Query rows; rows that no level covers are neither read nor written.
        paged_kv_cache : array, shape [pages, 2, page_size, num_kv_heads, head_dim], or a pair of arrays
            All levels' pages, as for `PagedKV.from_page_table`, in the wrapper's layout; q's dtype or fp8 or int8.
        sinks : float array, shape [num_qo_heads], optional
            Logit of a virtual key without value, natural-log units, counted once per row.
        k_scale, v_scale : float or array broadcasting to [num_kv_heads, head_dim], optional
            The cache holds ``k / k_scale`` and ``v / v_scale``. Required for int8.
        out, lse : array, optional
            Where to write: exactly the shapes and dtypes that are returned.
        return_lse : bool
            Return ``(out, lse)``.
        lse_base : {"2", "e"}
            Unit of the lse.
        target : {"cpu", "cuda", "gpu"}, optional
            Confirms what the arrays say.

        Returns
        -------
        out : array, shape [total_q, num_qo_heads, head_dim], q's dtype
            0 in rows that keep no key.
        lse : array, shape [total_q, num_qo_heads], float32 (float64 for float64 inputs)
            Log-sum-exp of the scores, -inf where no key is kept. Only with `return_lse`.

        Raises
        ------
        ContractError, PageTableError
            If `plan` was not called or an argument breaks a rule; nothing is written.
        """
        planned = self._ready()
        keeper, values, caches = planned.keeper, (return_lse, lse_base, target), caches_of(paged_kv_cache)
        slopes = keeper.slopes("cupy" if library_of(q) == "cupy" else "numpy") if planned.alibi else None
        arrays = sinks, None, slopes, k_scale, v_scale
        result = keeper.again(q, caches, values, arrays, out, lse)
        if result is not None:
            return result
        planned.heads.check_query(q, planned.num_rows)
        planned.q_dtype.check("q", q)
        k, v = page_views(*split_pair("paged_kv_cache", paged_kv_cache), self._kv_layout)
        planned.heads.check_pages("paged_kv_cache", k, self._kv_layout)
        planned.kv_dtype.check("paged_kv_cache", k)
        planned.tables = [table.bound(k) for table in planned.tables]
        levels = [table.level(k, v, self._kv_layout) for table in planned.tables]
        if self._buffers is not None and self._buffers.library == "cupy":
            self._pages = k, v
        plain = PlainOptions(**planned.options, return_lse=return_lse, lse_base=lse_base, target=target)
        result, call = perform(q, levels, plain, arrays, keeper.plan_of(levels), out, lse)
        keeper.remember(call, levels, caches, [0, len(caches) - 1] * len(levels), values)
        return result

    forward = run

    def end_forward(self) -> None:
        """Do nothing, as in FlashInfer; the plan stays."""

    def _tables(self, levels: list[dict[str, Any]], page_size: int, causal: bool) -> list[LevelTable]:
        last = self._num_levels - 1
        return [
            level_table(named, page_size, causal=causal and i == last, first=last == 0)
            for i, named in enumerate(levels)
        ]

    def _capacity(self, page_size: int) -> dict[str, int]:
        """Return what a plan on the device must have room for: all that the buffers can hold."""
        if self._buffers is None or self._buffers.library != "cupy":
            return {}
        return {"max_num_pages": self._buffers.num_pages, "max_kv_len": self._buffers.num_pages * page_size}

    def _store(self, buffers: TableBuffers, planned: _Planned, last_page_len: list[Array]) -> None:
        """Copy the metadata into the buffers, and refill the plan that graphs on the device are replayed with."""
        before = self._planned
        metadata = [
            (t.qo_indptr, t.table.kv_indptr, t.table.kv_indices, lens)
            for t, lens in zip(planned.tables, last_page_len, strict=True)
        ]
        buffers.check_room(metadata)
        if self._pages is not None and before is not None and planned.like(before):
            k, v = self._pages
            before.keeper.refill([t.bound(k).level(k, v, self._kv_layout) for t in planned.tables])
            planned.keeper = before.keeper
        buffers.fill(metadata)
        if buffers.library == "cupy":
            for i, filled in enumerate(buffers.filled()):
                table = replace(planned.tables[i].table, kv_indices=filled[f"paged_kv_indices_buf_arr[{i}]"])
                planned.tables[i] = replace(planned.tables[i], table=table)

    def _ready(self) -> _Planned:
        """Return what was planned, read anew from buffers on the host."""
        planned = self._planned
        if planned is None:
            raise ContractError("run: must follow plan(...), got no plan. Call plan once, then run for every layer.")
        if self._buffers is None or self._buffers.library != "numpy":
            return planned
        causal = planned.tables[-1].causal
        tables = self._tables(self._buffers.filled(), planned.heads.page_size, causal)
        same = all(new.same_lengths(old) for new, old in zip(tables, planned.tables, strict=True))
        planned.tables, planned.keeper.last_run = tables, None
        if not same:
            planned.keeper = PlanKeeper(planned.keeper.num_qo_heads, planned.keeper.window_left)
        return planned


def _rope(mode: str, head_dim: int, rope_scale: float | None, rope_theta: float | None) -> Rope | None:
    """Return the rotation of a position mode; its numbers are checked in every mode."""
    check_choice("pos_encoding_mode", mode, POSITION_MODES)
    numbers = []
    for name, value, default in (("rope_theta", rope_theta, 1e4), ("rope_scale", rope_scale, 1.0)):
        number = default if value is None else contracts.check_number(name, value)
        if number <= 0:
            raise ContractError(f"{name}: must be positive, got {value!r}.")
        if number < SMALLEST_ROPE:
            raise ContractError(f"{name}: must be at least {SMALLEST_ROPE:.4g}, got {value!r}.")
        numbers.append(number)
    if mode != "ROPE_LLAMA":
        return None
    if head_dim % 2:
        raise ContractError(f"head_dim: must be even for pos_encoding_mode ROPE_LLAMA, got {head_dim}.")
    return Rope(*numbers)

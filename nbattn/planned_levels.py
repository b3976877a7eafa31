"""What a cascade wrapper keeps between plan and run: checked tables and offsets, and one `Plan` for all layers."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from nbattn import contracts
from nbattn.alibi import alibi_slopes
from nbattn.arrays import Array, dtype_from_name, dtype_name, library_of, require_array
from nbattn.cache_views import in_layout, swapped_hint
from nbattn.engine import plan
from nbattn.errors import ContractError
from nbattn.kv_cache import PagedKV
from nbattn.page_tables import INT32_MAX, PageTable, TableForm, csr_table_of
from nbattn.planning import Plan
from nbattn.problem import Level
from nbattn.repeat import RememberedCall, RememberedRun, remember_run


@dataclass(frozen=True)
class Heads:
    """The sizes that a wrapper was planned for; what comes at run must keep them."""

    num_qo_heads: int
    num_kv_heads: int
    head_dim: int
    page_size: int

    def __post_init__(self) -> None:
        for name in ("num_qo_heads", "num_kv_heads", "head_dim", "page_size"):
            contracts.check_int(name, getattr(self, name), at_least=1, at_most=INT32_MAX)
        if self.num_qo_heads % self.num_kv_heads:
            raise ContractError(
                f"num_qo_heads: must be a multiple of {self.num_kv_heads} (num_kv_heads), got {self.num_qo_heads}."
            )

    def check_query(self, q: Array, num_rows: int) -> None:
        """Refuse a q of other sizes; it may have more rows than planned."""
        require_array("q", q)
        if q.ndim != 3 or q.shape[1:] != (self.num_qo_heads, self.head_dim) or q.shape[0] < num_rows:
            raise ContractError(
                f"q: must be [{num_rows}, {self.num_qo_heads}, {self.head_dim}] (rows, num_qo_heads and head_dim as "
                f"planned), got shape {list(q.shape)}."
            )

    def check_pages(self, name: str, k: Array, kv_layout: str) -> None:
        """Refuse pages of other sizes, viewed as NHD."""
        want = (self.page_size, self.num_kv_heads, self.head_dim)
        if k.shape[1:] != want:
            pages, slots, heads, dim = k.shape
            raise ContractError(
                f"{name}: must have pages of {list(in_layout((pages, *want), kv_layout)[1:])} ({kv_layout}; page_size, "
                f"num_kv_heads and head_dim as planned), got {list(in_layout(k.shape, kv_layout)[1:])}"
                + (swapped_hint(kv_layout) if (heads, slots, dim) == want else ".")
            )


class PlannedDtype(NamedTuple):
    """A dtype that a wrapper was planned for, and the argument that said so; None stands for any."""

    argument: str
    dtype: np.dtype | None = None

    def check(self, name: str, x: Array) -> None:
        """Refuse an array of another dtype."""
        if self.dtype is not None and x.dtype != self.dtype:
            raise ContractError(f"{name}: must be {self.dtype} as planned ({self.argument}), got {dtype_name(x)}.")


def planned_dtype(argument: str, dtype: Any, allowed: Sequence[str]) -> PlannedDtype:
    """Return a dtype given by its name, as a NumPy dtype or as a scalar type, or None."""
    if dtype is None:
        return PlannedDtype(argument)
    try:
        known = str(dtype_from_name(dtype))
    except ContractError:
        known = ""
    if known not in allowed:
        raise ContractError(f"{argument}: must be None or one of {', '.join(allowed)}, got {dtype!r}.")
    return PlannedDtype(argument, dtype_from_name(known))


@dataclass(frozen=True, eq=False)
class LevelTable:
    """One level before its pages are there."""

    table: PageTable
    qo_indptr: np.ndarray  # int64 [batch + 1]
    causal: bool
    on_device: str | None = None  # an argument that was given on the device

    def bound(self, k: Array) -> LevelTable:
        """Return the level over pages `k`: only now can page ids be held against their number."""
        if self.on_device is not None and library_of(k) == "numpy":
            raise ContractError(f"{self.on_device}: must be a NumPy array beside a NumPy cache, got a CuPy array.")
        return self if self.table.num_pages == k.shape[0] else replace(self, table=self.table.over(k.shape[0]))

    def level(self, k: Array, v: Array, kv_layout: str) -> Level:
        """Return the engine's level over pages viewed as NHD."""
        return Level(PagedKV(k, v, self.table, kv_layout), self.qo_indptr, self.causal)

    def same_lengths(self, other: LevelTable) -> bool:
        """Tell whether a `Plan` of the one serves the other."""
        mine, others = self.table, other.table
        pairs = (
            (mine.kv_lens, others.kv_lens), (mine.kv_indptr, others.kv_indptr), (self.qo_indptr, other.qo_indptr),
        )  # fmt: skip
        return self.causal == other.causal and all(np.array_equal(a, b) for a, b in pairs)


def level_table(named: dict[str, Any], page_size: int, *, causal: bool, first: bool) -> LevelTable:
    """Check one level.

    Parameters
    ----------
    named : dict
        The arrays under their arguments' names: qo_indptr (None is one row per request), kv_indptr, kv_indices,
        kv_last_page_len.
    page_size : int
    causal : bool
    first : bool
        Whether the offsets must start at 0.
    """
    rows_name, indptr_name, ids_name, lens_name = named
    rows, indptr, ids, last_page_len = named.values()
    form = TableForm(ids_name, lens_name, "csr", indptr_name)
    table = csr_table_of(indptr, ids, last_page_len, page_size, form=form)
    offsets = contracts.check_offsets(rows_name, rows, len(table.kv_lens), INT32_MAX, first=first, library="cupy")
    on_device = [name for name, x in named.items() if library_of(x) == "cupy"]
    return LevelTable(table, offsets, causal, on_device[0] if on_device else None)


def caches_of(cache: Any) -> tuple[Any, ...]:
    """Return the arrays of a combined cache or of a pair ``(k, v)``."""
    return tuple(cache) if isinstance(cache, (tuple, list)) else (cache,)


class PlanKeeper:
    """Makes a wrapper's `Plan` at its first run, when the arrays tell the target, and keeps it for the other layers.

    `last_run` is the last run that a next layer may repeat.
    """

    def __init__(self, num_qo_heads: int, window_left: int = -1, capacity: dict[str, Any] | None = None):
        self.num_qo_heads, self.window_left, self.capacity = num_qo_heads, window_left, capacity or {}
        self._plan: Plan | None = None
        self._key: Any = None
        self._slopes: dict[str, Array] = {}
        self.last_run: RememberedRun | None = None
        self._lasting: Any = None  # the plan's work list at that run: an update brings another

    def again(
        self, q: Any, caches: tuple[Any, ...], values: tuple[Any, ...], arrays: tuple[Any, ...], out: Any, lse: Any
    ) -> Any:
        """Return the result of a run that is the last one again, else None: see `nbattn.repeat.RememberedRun`."""
        run, plan = self.last_run, self._plan
        if run is None or plan is None or plan.work_list is not self._lasting:
            return None
        return run.again(q, caches, values, arrays, out, lse)

    def remember(
        self, call: RememberedCall | None, levels: list[Level], caches: tuple[Any, ...], owners: list[int],
        values: tuple[Any, ...],
    ) -> None:  # fmt: skip
        """Keep a run that was made on `levels`: see `nbattn.repeat.remember_run`."""
        self.last_run = None if call is None else remember_run(call, levels, caches, owners, values)
        self._lasting = None if self._plan is None else self._plan.work_list

    def plan_of(self, levels: list[Level], lengths: Any = None) -> Plan:
        """Return the plan of levels; `lengths` is whatever shapes them besides the tables this keeper was made for."""
        kv = levels[-1].kv
        key = (kv.library, kv.kv_dtype, kv.head_dim_vo, lengths)
        if self._plan is None or key != self._key:
            heads, window = self.num_qo_heads, self.window_left
            self._plan = plan(levels, num_qo_heads=heads, window_left=window, **self.capacity)
            self._key = key
        return self._plan

    def refill(self, levels: list[Level]) -> None:
        """Update the plan that was made: graphs that are replayed see it."""
        if self._plan is not None:
            self._plan.update(levels)

    def slopes(self, library: str) -> Array:
        """Return the ALiBi slopes where q lives."""
        if library not in self._slopes:
            slopes = alibi_slopes(self.num_qo_heads)  # float64 on the CPU, which rounds them once
            self._slopes[library] = slopes if library == "numpy" else sys.modules["cupy"].asarray(slopes, "float32")
        return self._slopes[library]

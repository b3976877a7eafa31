"""`Plan`: a work list that many calls share, and the rules under which it may be reused."""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

import numpy as np

from nbattn.errors import ContractError
from nbattn.positions import LevelLengths, Positions, place_rows
from nbattn.repeat import RememberedCall
from nbattn.work_list import SMALLEST_SPLIT, WorkList, build_work, most_work


@dataclass(frozen=True)
class PlanRules:
    """The options that shape a work list."""

    num_qo_heads: int
    num_kv_heads: int
    causal: tuple[bool, ...]
    window_left: int = -1
    chunk_size: int = 0
    split_size: int | None = None


@dataclass(frozen=True)
class Tiling:
    """How a target cuts.

    Parameters
    ----------
    tokens : tuple of int
        Most query rows of one item, for each level.
    shares : int
        How many items the work should make, see `build_work`.
    few_tokens : int
        Rows up to which an item belongs to one kernel, see `build_work`.
    many_shares : float
        The shares of the others' work.
    cluster : int
        Blocks that work on one item together (CUDA).
    wave : float
        How many of the others' items run at a time, or 0, see `build_work`.
    smallest_split : int
        Least cost of a piece, see `build_work`.
    """

    tokens: tuple[int, ...]
    shares: int
    few_tokens: int = 0
    many_shares: float = 0
    cluster: int = 1
    wave: float = 0
    smallest_split: int = SMALLEST_SPLIT

    @cached_property
    def cuts(self) -> dict[str, Any]:
        """The arguments of `build_work` and `most_work`."""
        return {
            "tile_tokens": self.tokens, "shares": self.shares, "few_tokens": self.few_tokens,
            "many_shares": self.many_shares, "wave": self.wave, "smallest_split": self.smallest_split,
        }  # fmt: skip


class Plan:
    """A work list for a set of lengths, to be reused over many calls (the layers of a model); made by `nbattn.plan`.

    Attributes
    ----------
    work_list : WorkList
    places : Positions
    num_rows : int
        Query rows that the levels' offsets cover.
    max_kv_len : int or None
        Longest request that was planned for.
    on_target : object
        What the target made of the work list: its tasks or its device buffers.
    last_call : RememberedCall or None
        The last call that used the plan, checked and ready to be repeated on the next layer's arrays.

    Examples
    --------
    >>> import numpy as np, nbattn
    >>> k = np.zeros((2, 8, 1, 4), np.float32)
    >>> short, long = (nbattn.PagedKV.from_slots(k, k, np.array(lens)) for lens in ([3, 1], [8, 4]))
    >>> plan = nbattn.plan(short, num_qo_heads=2, max_kv_len=8)
    >>> plan.update(long)
    >>> nbattn.paged_attention(np.ones((2, 2, 4), np.float32), long, plan=plan).shape
    (2, 2, 4)
    """

    work_list: WorkList
    places: Positions
    lengths: list[LevelLengths]
    given: tuple[Any, Any]  # kv_start and q_positions

    def __init__(self, levels: tuple[Any, ...], num_rows: int, rules: PlanRules, tiling: Tiling, *,
                 kv_start: Any = None, q_positions: Any = None, max_kv_len: int | None = None,
                 max_num_pages: int | None = None):  # fmt: skip
        self.rules, self.tiling, self.num_rows = rules, tiling, num_rows
        self.capacity: dict[str, int] = {}
        self.max_kv_len = max_kv_len
        self.on_target: Any = None
        self.last_call: RememberedCall | None = None
        self._fill(levels, kv_start, q_positions)
        capacity = self._sizes(levels)
        if max_kv_len is not None:
            most = most_work(
                self.lengths, max_kv_len, window_left=rules.window_left, split_size=rules.split_size,
                **tiling.cuts,
            )  # fmt: skip
            most["page-table entries"] = max(-(-max_kv_len // x.kv.page_size) * x.kv.batch_size for x in levels)
            capacity.update({key: max(capacity[key], size) for key, size in most.items()})
        if max_num_pages is not None:
            capacity["page-table entries"] = max(capacity["page-table entries"], max_num_pages)
        self.capacity = capacity

    def update(
        self, kv_or_levels: Any, qo_indptr: Any = None, *, kv_start: Any = None, q_positions: Any = None
    ) -> None:
        """Refill the plan for new lengths, tables or offsets; replayed graphs see it.

        Not while another thread begins a call with this plan; on the CPU calls that have begun are not disturbed.

        Parameters
        ----------
        kv_or_levels, qo_indptr, kv_start, q_positions
            As for `nbattn.plan`.

        Raises
        ------
        ContractError
            If the new work does not fit the plan's capacity (see ``max_kv_len`` of `nbattn.plan`), levels are causal
            where the plan's are not or the other way round, or a captured graph rotates q and keys and holds no angles
            for the new positions; the plan stays as it was.
        """
        from nbattn.engine import planned_levels

        levels, num_rows, start, positions = planned_levels(
            kv_or_levels, qo_indptr, self.rules.causal[-1], kv_start, q_positions
        )
        if num_rows > self.num_rows or len(levels) != len(self.rules.causal):
            raise ContractError(
                f"Plan.update: must keep {len(self.rules.causal)} level(s) and at most {self.num_rows} rows, "
                f"got {len(levels)} and {num_rows}."
            )
        causal = tuple(level.causal for level in levels)
        if causal != self.rules.causal:  # calls are held to the plan's rules, not to its work list
            raise ContractError(f"Plan.update: must keep the levels' causal {self.rules.causal}, got {causal}.")
        before, call = (self.lengths, self.places, self.work_list, self.given), self.last_call
        try:
            self._fill(levels, start, positions)
            self._check_room(levels)
            if self.on_target is not None:
                self.on_target.refill(self, levels)
        except ContractError:
            self.lengths, self.places, self.work_list, self.given = before
            raise
        same_rows = all(_equal(x.qo_indptr, y.qo_indptr) for x, y in zip(before[0], self.lengths, strict=True))
        if call is not None and same_rows and start is None and positions is None:
            self.last_call = call.after_update([level.kv.table for level in levels])

    def _check_room(self, levels: tuple[Any, ...]) -> None:
        sizes = self._sizes(levels)
        over = [key for key in sizes if sizes[key] > self.capacity[key]]
        if over:
            raise ContractError(
                f"Plan.update: needs {sizes[over[0]]} {over[0]}, the plan holds {self.capacity[over[0]]}. "
                "Plan with a larger max_kv_len or max_num_pages."
            )

    def _sizes(self, levels: tuple[Any, ...]) -> dict[str, int]:
        entries = max(int(level.kv.kv_indptr[-1]) for level in levels)
        return {**self.work_list.sizes(), "page-table entries": entries}

    def covers(self, num_rows: int) -> bool:
        """Return whether every one of `num_rows` query rows belongs to some request."""
        return num_rows == self.num_rows and bool(self.places.covered.all())

    def _fill(self, levels: tuple[Any, ...], kv_start: Any, q_positions: Any) -> None:
        self.last_call = None
        self.lengths = [
            LevelLengths(level.kv.kv_lens, level.kv.kv_indptr[:-1], level.qo_indptr, level.causal) for level in levels
        ]
        self.given = kv_start, q_positions
        self.places = place_rows(self.lengths, self.num_rows, kv_start, q_positions)
        self.work_list = self._build(self.lengths, self.places)

    def _build(self, lengths: list[LevelLengths], places: Positions) -> WorkList:
        return build_work(
            lengths, places, window_left=self.rules.window_left, chunk_size=self.rules.chunk_size,
            split_size=self.rules.split_size, **self.tiling.cuts,
        )  # fmt: skip

    def check_call(
        self, rules: PlanRules, levels: tuple[Any, ...], num_rows: int, kv_start: Any = None, q_positions: Any = None
    ) -> None:
        """Refuse a call whose options, positions or tables are not the planned ones."""
        for field in fields(PlanRules):
            planned, given = getattr(self.rules, field.name), getattr(rules, field.name)
            if planned != given and not (field.name == "split_size" and given is None):
                raise ContractError(
                    f"{field.name}: must be the plan's {planned}, got {given}. Plan with the same options."
                )
        for name, planned, given in zip(("kv_start", "q_positions"), self.given, (kv_start, q_positions), strict=True):
            if given is not None and (planned is None or not np.array_equal(planned, given[: len(planned)])):
                raise ContractError(f"{name}: must be the plan's, got others. Plan with the same, or leave them out.")
        if num_rows < self.num_rows:
            raise ContractError(f"q: must have at least the plan's {self.num_rows} rows, got {num_rows}.")
        for i, (level, planned) in enumerate(zip(levels, self.lengths, strict=True)):
            if not _same_lengths(level, planned):
                raise ContractError(
                    f"plan: must be made for this call's lengths, offsets and table widths, level {i} differs. "
                    "Call plan.update(...)."
                )

    def is_for(self, levels: tuple[Any, ...]) -> bool:
        """Return whether the plan was made for the lengths and offsets of a call.

        Parameters
        ----------
        levels : tuple of Level
            With host offsets.

        Returns
        -------
        bool
        """
        return len(levels) == len(self.lengths) and all(map(_same_lengths, levels, self.lengths))


def _same_lengths(level: Any, planned: LevelLengths) -> bool:
    same = _equal(level.kv.kv_lens, planned.kv_lens)
    same = same and np.array_equal(level.kv.kv_indptr[:-1], planned.page_begin)  # work items know where page ids start
    return same and _equal(level.qo_indptr, planned.qo_indptr)


def _equal(mine: np.ndarray, others: np.ndarray) -> bool:
    return mine is others or np.array_equal(mine, others)

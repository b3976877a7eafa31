"""How work is cut on the CPU: a plan's items, and the tasks of the worker team that they become."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np

from nbattn.cpu_ref.cpu import REGISTER_BYTES
from nbattn.cpu_ref.tags import FEW, MANY, Tag
from nbattn.planning import Plan, Tiling
from nbattn.positions import one_row_each
from nbattn.problem import Level, Problem
from nbattn.threads import get_num_threads
from nbattn.work_list import ROW_BEGIN, ROW_END, SHARES_PER_THREAD, SMALLEST_SPLIT, WorkList

FEW_ROWS = 16  # packed rows of a KV head up to which a task takes all heads, so that tokens are read in order
# Packed rows of a task with one head: its accumulators and queries stay in L2, of 1 MB wherever there is AVX-512.
MANY_ROWS = 384 if REGISTER_BYTES == 64 else 192
SMALLEST_PIECE = 4096  # keys times KV heads; what is shorter is shared by its heads, whose results need no merge
SHARES_BY_HEADS = 2  # that each thread should find then


def tiling(
    levels: tuple[Level, ...], num_qo_heads: int, split_size: int | None, max_kv_len: int | None = None
) -> Tiling:
    """Return how work is cut for this target."""
    heads, longest = levels[0].kv.num_kv_heads, max(map(_most_rows, levels))
    return _tiling(len(levels), longest, num_qo_heads // heads, heads, get_num_threads())


@lru_cache(maxsize=16)
def _tiling(num_levels: int, longest: int, group: int, heads: int, threads: int) -> Tiling:
    tokens = longest if longest * group <= FEW_ROWS else max(1, MANY_ROWS // group)
    return Tiling(
        (max(1, tokens),) * num_levels, threads * SHARES_PER_THREAD if threads > 1 else 1,
        smallest_split=max(SMALLEST_SPLIT, SMALLEST_PIECE // heads if heads > 1 else 0),
    )  # fmt: skip


def _most_rows(level: Level) -> int:
    """Return how many rows a request of a level has at most."""
    if level.qo_indptr is one_row_each(level.kv.batch_size):
        return 1
    return int((level.qo_indptr[1:] - level.qo_indptr[:-1]).max(initial=0))


def lane() -> int:
    """Return what plans that the library makes by itself are made for: the number of threads."""
    return get_num_threads()


class Tasks(NamedTuple):
    """Tasks of one kind.

    Attributes
    ----------
    tile : Tag
        `FEW` or `MANY` packed rows.
    tasks : int32 array, shape [num_tasks, 3]
        Work item, first KV head, KV heads.
    max_rows, max_heads : int
        Most packed rows and most KV heads of a task.
    """

    tile: Tag
    tasks: np.ndarray
    max_rows: int
    max_heads: int


class Work(NamedTuple):
    """A work list and its items as tasks.

    Attributes
    ----------
    work_list : WorkList
    kinds : list of Tasks
        One of each kind that there is, many rows first.
    numbers, dots : int
        Numbers read and multiply-adds of all tasks.
    """

    work_list: WorkList
    kinds: list[Tasks]
    numbers: int
    dots: int


class TaskList:
    """A plan's work items as tasks of the worker team, each with one KV head if its rows are many.

    If they are few, a task has all heads, or a share of them where there are fewer items than threads can use. `work`
    is replaced as a whole: calls that have begun keep theirs.
    """

    def __init__(self, plan: Plan, problem: Problem):
        kv = problem.levels[0].kv
        self.num_qo_heads, self.num_kv_heads = problem.num_qo_heads, kv.num_kv_heads
        self.threads = get_num_threads()
        self.dims = kv.head_dim_qk + kv.head_dim_vo
        self.refill(plan, problem.levels)

    def refill(self, plan: Plan, levels: tuple[Level, ...]) -> None:
        """Take over a plan's new work list."""
        num_kv_heads, work, kinds = self.num_kv_heads, plan.work_list.work, []
        group, max_tokens = self.num_qo_heads // num_kv_heads, plan.work_list.max_tokens
        few, num_few, few_tokens = None, len(work), max_tokens
        if max_tokens * group > FEW_ROWS:
            is_few = (work[:, ROW_END].astype(np.int64) - work[:, ROW_BEGIN]) * group <= FEW_ROWS
            few, many = np.flatnonzero(is_few), np.flatnonzero(~is_few)
            num_few, few_tokens = len(few), FEW_ROWS // group
            if len(many):
                tasks = np.ones((num_kv_heads, len(many), 3), np.int32)  # tiles of one head read the same keys in turn
                tasks[:, :, 0], tasks[:, :, 1] = many, np.arange(num_kv_heads)[:, None]
                kinds.append(Tasks(MANY, tasks.reshape(-1, 3), max_tokens * group, 1))
        if num_few:
            heads = num_kv_heads
            if self.threads > 1 and num_few < self.threads * SHARES_BY_HEADS:
                heads = -(-num_kv_heads * num_few // (self.threads * SHARES_BY_HEADS))
                heads = min(num_kv_heads, heads if group > 1 else -(-heads // 4) * 4)  # tiles of four heads stay whole
            tasks = _tasks_of_all(num_few, num_kv_heads, heads)
            if few is not None:
                tasks = tasks.copy()
                tasks[:, 0] = few[tasks[:, 0]]
            kinds.append(Tasks(FEW, tasks, few_tokens * group * heads, heads))
        work_list = plan.work_list
        numbers = work_list.num_keys * num_kv_heads * self.dims
        self.work = Work(work_list, kinds, numbers, work_list.num_pairs * self.num_qo_heads * self.dims)


@lru_cache(maxsize=16)
def _tasks_of_all(num_items: int, num_kv_heads: int, heads: int) -> np.ndarray:
    """Return the tasks, of up to `heads` KV heads each, of so many items: int32 [tasks, 3], not to be written."""
    begins = np.arange(0, num_kv_heads, heads)
    tasks = np.zeros((len(begins), num_items, 3), np.int32)
    tasks[:, :, 0], tasks[:, :, 1] = np.arange(num_items), begins[:, None]
    tasks[:, :, 2] = np.minimum(heads, num_kv_heads - begins)[:, None]
    tasks.flags.writeable = False
    return tasks.reshape(-1, 3)

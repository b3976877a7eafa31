"""From a checked problem to its target: plans, and the choice of CPU or CUDA by what the arrays are."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from types import ModuleType
from typing import Any

import numpy as np

from nbattn import contracts
from nbattn.arrays import Array
from nbattn.errors import ContractError, TargetError
from nbattn.kv_cache import PagedKV
from nbattn.planning import Plan, PlanRules
from nbattn.problem import Level, Problem

Result = Array | tuple[Array, Array]

MOST_KEPT = 4  # plans of a table: layers differ in their windows


@cache
def backend(target: str) -> ModuleType:
    """Return the module that runs problems on a target."""
    if target == "cpu":
        return import_module("nbattn.cpu_ref.target")
    try:
        return import_module("nbattn.cuda_kernels.target")
    except ImportError as error:
        raise TargetError(
            f"target: the CUDA kernels cannot be loaded, {error}. In a clone: pip install '.[cuda13]'."
        ) from error


def kept_plans(kv: Any) -> list[Plan]:
    """Return the plans that calls without one have made for a cache's table, on these threads or this stream.

    A table never changes, so the layers of a model share them; they live as long as the table. For a cascade it is the
    table of the last level.
    """
    if not isinstance(kv, PagedKV) or not kv.table.kept:
        return []
    lane = backend("cpu" if kv.library == "numpy" else "cuda").lane()
    return [plan for own, plan in kv.table.kept if own == lane]


def run(problem: Problem, plan: Plan | None, split_size: int | None) -> tuple[Plan, Any]:
    """Run a checked paged problem: plan it unless a plan is given, and hand it to its target.

    Returns the plan, and what runs the same problem on other arrays of the same forms (None if nothing does).
    """
    kernels = backend(problem.target)
    options = problem.options
    rules = PlanRules(
        problem.num_qo_heads,
        problem.levels[0].kv.num_kv_heads,
        tuple(level.causal for level in problem.levels),
        options.window_left,
        options.chunk_size,
        contracts.check_split(split_size),
    )
    if plan is None:
        plan = _plan_of(problem, rules, kernels)
    elif not isinstance(plan, Plan):
        raise ContractError(f"plan: must be a Plan, got {type(plan).__name__}. Make one with nbattn.plan(...).")
    else:
        plan.check_call(rules, problem.levels, problem.q.shape[0], options.kv_start, options.q_positions)
    return plan, kernels.run_paged(problem, plan)


def _plan_of(problem: Problem, rules: PlanRules, kernels: ModuleType) -> Plan:
    """Return a plan for a call that came without one: one of the table's if it fits, else a new one that it keeps."""
    levels, options = problem.levels, problem.options
    num_rows = max(int(level.qo_indptr[-1]) for level in levels)
    start, positions = options.kv_start, options.q_positions
    own_places = start is not None or positions is not None
    for plan in [] if own_places else kept_plans(levels[-1].kv):
        if plan.rules == rules and plan.is_for(levels):
            return plan
    plan = Plan(
        levels, num_rows, rules, kernels.tiling(levels, problem.num_qo_heads, rules.split_size), kv_start=start,
        q_positions=None if positions is None else positions[:num_rows],
    )  # fmt: skip
    if not own_places:
        table = levels[-1].kv.table
        table.kept[:] = [*table.kept[1 - MOST_KEPT :], (kernels.lane(), plan)]
    return plan


def plan(
    kv_or_levels: PagedKV | list[Level],
    qo_indptr: Array | None = None,
    *,
    num_qo_heads: int,
    causal: bool = True,
    split_size: int | None = None,
    max_kv_len: int | None = None,
    max_num_pages: int | None = None,
    window_left: int = -1,
    chunk_size: int | None = None,
    kv_start: Array | None = None,
    q_positions: Array | None = None,
) -> Plan:
    """Plan attention for a set of lengths once and use it for many calls, e.g. the layers of a model.

    Parameters
    ----------
    kv_or_levels : PagedKV or list of Level
        What `paged_attention` or `cascade_attention` will be given; only its tables are read.
    qo_indptr : int array, shape [batch + 1], optional
        Rows of each request, with a `PagedKV`, as for `paged_attention`. More rows of q fit as well.
    num_qo_heads : int
        Query heads of the calls.
    causal : bool
        As in the calls, with a `PagedKV`; levels say their own.
    split_size : int, optional
        Keys of one split; None balances the work over the target.
    max_kv_len, max_num_pages : int, optional
        Longest request, and most page-table entries of a level, that `Plan.update` must have room for; by default what
        the plan needs now, and the pages of such requests.
    window_left, chunk_size, kv_start, q_positions
        As in the calls.

    Returns
    -------
    Plan
        Pass it as ``plan=``; `Plan.update` refills it for new lengths.

    Examples
    --------
    >>> import numpy as np, nbattn
    >>> k = np.ones((2, 8, 1, 4), np.float32)
    >>> kv = nbattn.PagedKV.from_slots(k, k, np.array([8, 3]))
    >>> plan = nbattn.plan(kv, num_qo_heads=2)
    >>> nbattn.paged_attention(np.ones((2, 2, 4), np.float32), kv, plan=plan)[1, 1].tolist()
    [1.0, 1.0, 1.0, 1.0]
    """
    levels, num_rows, start, positions = planned_levels(kv_or_levels, qo_indptr, causal, kv_start, q_positions)
    num_qo_heads = contracts.check_int("num_qo_heads", num_qo_heads, at_least=1)
    kv = levels[0].kv
    if num_qo_heads % kv.num_kv_heads:
        raise ContractError(
            f"num_qo_heads: must be a multiple of {kv.num_kv_heads} (num_kv_heads), got {num_qo_heads}."
        )
    rules = PlanRules(
        num_qo_heads,
        kv.num_kv_heads,
        tuple(level.causal for level in levels),
        contracts.check_window(window_left),
        contracts.check_chunk(chunk_size),
        contracts.check_split(split_size),
    )
    longest = None if max_kv_len is None else contracts.check_int("max_kv_len", max_kv_len, at_least=0)
    pages = None if max_num_pages is None else contracts.check_int("max_num_pages", max_num_pages, at_least=0)
    kernels = backend("cpu" if kv.library == "numpy" else "cuda")
    tiling = kernels.tiling(levels, num_qo_heads, rules.split_size, longest)
    return Plan(levels, num_rows, rules, tiling, kv_start=start, q_positions=positions, max_kv_len=longest,
                max_num_pages=pages)  # fmt: skip


def planned_levels(
    kv_or_levels: Any, qo_indptr: Any, causal: bool, kv_start: Any, q_positions: Any
) -> tuple[tuple[Level, ...], int, np.ndarray | None, np.ndarray | None]:
    """Return (levels with host offsets, rows they cover, kv_start, q_positions) of what a plan is made from."""
    given = kv_or_levels if isinstance(kv_or_levels, (list, tuple)) else [Level(kv_or_levels, qo_indptr, causal)]
    checked, num_rows = [], 0
    if given is kv_or_levels:
        contracts.check_level_caches(given)
    for i, level in enumerate(given):
        if not isinstance(level, Level) or not isinstance(level.kv, PagedKV):
            raise ContractError(
                f"kv_or_levels: must be a PagedKV or a list of Level, got {type(kv_or_levels).__name__}."
            )
        name = "qo_indptr" if len(given) == 1 else f"levels[{i}].qo_indptr"
        offsets = contracts.check_offsets(
            name, level.qo_indptr, level.kv.batch_size, 2**31 - 1, first=len(given) == 1, library=level.kv.library
        )
        causal = contracts.check_bool(name.replace("qo_indptr", "causal"), level.causal)
        checked.append(Level(level.kv, offsets, causal))
        num_rows = max(num_rows, int(offsets[-1]))
    if not checked:
        raise ContractError("kv_or_levels: must hold at least one Level, got an empty list.")
    kv = checked[-1].kv
    start = contracts.check_row_ints("kv_start", kv_start, kv.batch_size, kv.library, at_least=0)
    positions = contracts.check_row_ints("q_positions", q_positions, num_rows, kv.library)
    return tuple(checked), num_rows, start, positions

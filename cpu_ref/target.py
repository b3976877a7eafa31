"""How the engine's problems run on the CPU: arrays become addresses, work lists become tasks of the worker team."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from nbattn.arrays import dtype_name, name_of
from nbattn.cpu_ref import workers
from nbattn.cpu_ref.addresses import address_of
from nbattn.cpu_ref.cpu import REGISTER_BYTES
from nbattn.cpu_ref.gather_attention import gather_worker
from nbattn.cpu_ref.merge_states import ROWS_PER_TASK, SOURCE_COLUMNS, merge_worker
from nbattn.cpu_ref.number_formats import DTYPE_CODE, itemsize
from nbattn.cpu_ref.paged_attention import paged_worker
from nbattn.cpu_ref.prepare_query import ROWS_PER_TASK as PREPARED_PER_TASK
from nbattn.cpu_ref.prepare_query import prepare_worker
from nbattn.cpu_ref.problem import K_ADDRESS, MASK_BOOL, V_ADDRESS, Output, Queries, Rules
from nbattn.cpu_ref.tags import CACHE_KINDS, FEW, FULL, MANY, PLAIN, Tag
from nbattn.indexing import kv_head_of
from nbattn.kv_cache import PagedKV
from nbattn.planning import Plan, Tiling
from nbattn.problem import Level, Preparation, Problem, Rope
from nbattn.rotary import Planes, planes_for
from nbattn.scoring import LN2, LOG2E
from nbattn.threads import get_num_threads
from nbattn.work_list import KEY_BEGIN, KEY_END, ROW_BEGIN, ROW_END, SHARES_PER_THREAD, WorkList, build_gather_work

FEW_ROWS = 16  # packed rows of a KV head up to which a task takes all heads, so that tokens are read in order
# Packed rows of a task with one head: its accumulators and queries stay in L2, of 1 MB wherever there is AVX-512.
MANY_ROWS = 384 if REGISTER_BYTES == 64 else 192
SERIAL_NANOSECONDS = 100_000  # work below it is done by one thread: a second takes 20 us to start, splits are merged
_DTYPE_OF_CODE = {code: name for name, code in DTYPE_CODE.items()}
_UNCHANGED = 0, 0, 0, 0, 0, 0, 0  # the last fields of an `Output`: no sinks, no scale, no gate
_LSE = Output._fields.index("lse_address")
READ_RATE, DOT_RATE = 16.0, 50.0  # bytes and multiply-adds per nanosecond of one thread, roughly


def tiling(
    levels: tuple[Level, ...], num_qo_heads: int, split_size: int | None, max_kv_len: int | None = None
) -> Tiling:
    """Return how work is cut for this target."""
    group = num_qo_heads // levels[0].kv.num_kv_heads
    longest = max(int((level.qo_indptr[1:] - level.qo_indptr[:-1]).max(initial=0)) for level in levels)
    tokens = longest if longest * group <= FEW_ROWS else max(1, MANY_ROWS // group)
    return Tiling((max(1, tokens),) * len(levels), get_num_threads() * SHARES_PER_THREAD)


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


class TaskList:
    """A plan's work items as tasks of the worker team: each with all KV heads if its rows are few, else with one.

    Attributes
    ----------
    kinds : list of Tasks
        One of each kind that there is, many rows first.
    numbers, dots : int
        Numbers read and multiply-adds of all tasks.
    """

    def __init__(self, plan: Plan, problem: Problem):
        kv = problem.levels[0].kv
        self.num_qo_heads, self.num_kv_heads = problem.num_qo_heads, kv.num_kv_heads
        self.dims = kv.head_dim_qk + kv.head_dim_vo
        self.refill(plan, problem.levels)

    def refill(self, plan: Plan, levels: tuple[Level, ...]) -> None:
        """Take over a plan's new work list."""
        num_kv_heads, work = self.num_kv_heads, plan.work_list.work
        group, max_tokens = self.num_qo_heads // num_kv_heads, plan.work_list.max_tokens
        tokens = 1 if max_tokens == 1 else work[:, ROW_END].astype(np.int64) - work[:, ROW_BEGIN]
        few, few_tokens = np.arange(len(work)), max_tokens
        self.kinds = []
        if max_tokens * group > FEW_ROWS:
            is_few = np.broadcast_to(tokens * group <= FEW_ROWS, len(work))
            few, many = np.flatnonzero(is_few), np.flatnonzero(~is_few)
            few_tokens = FEW_ROWS // group
            if len(many):
                tasks = np.ones((num_kv_heads, len(many), 3), np.int32)  # tiles of one head read the same keys in turn
                tasks[:, :, 0], tasks[:, :, 1] = many, np.arange(num_kv_heads)[:, None]
                self.kinds.append(Tasks(MANY, tasks.reshape(-1, 3), max_tokens * group, 1))
        if len(few):
            tasks = np.zeros((len(few), 3), np.int32)
            tasks[:, 0], tasks[:, 2] = few, num_kv_heads
            self.kinds.append(Tasks(FEW, tasks, few_tokens * group * num_kv_heads, num_kv_heads))
        keys = work[:, KEY_END] - work[:, KEY_BEGIN]
        num_keys = int(keys.sum(dtype=np.int64))
        self.numbers = num_keys * num_kv_heads * self.dims
        pairs = num_keys if max_tokens == 1 else int((keys * tokens).sum())
        self.dots = pairs * self.num_qo_heads * self.dims


class PagedCall:
    """A paged problem in which all is settled but the addresses of its arrays: a plan repeats it for every layer."""

    follows_plan = False

    def __init__(self, problem: Problem, plan: Plan, q: np.ndarray, scale: float):
        kv, options, number = problem.levels[0].kv, problem.options, problem.number
        if plan.on_target is None:
            plan.on_target = TaskList(plan, problem)
        tasks: TaskList = plan.on_target
        self.tasks, self.work_list = tasks, plan.work_list
        self.owners: list[np.ndarray] = []  # of the arrays whose addresses are kept
        self.rules, full = _rules(problem, plan, self.owners)
        self.tags = CACHE_KINDS[kv.kv_dtype], FULL if full else PLAIN, CACHE_KINDS[name_of(number)]
        self.bytes_read = tasks.numbers * kv.k.dtype.itemsize
        folded = options.k_scale if options.rope is None else None
        self.queries = _queries(problem, q, scale, folded, self.owners)[1:]
        output = _output(problem, self.owners)
        self.rows, self.lse_rows = output[1:_LSE], output[_LSE + 1 :]
        self.levels = np.array([_level_row(level.kv) for level in problem.levels], np.int64)
        self.places = [(level, column) for level in range(len(self.levels)) for column in (K_ADDRESS, V_ADDRESS)]
        self.entries: dict[Any, Any] = {}  # the kernel's compiled code for each kind of task
        shape = (plan.work_list.num_states, problem.num_qo_heads, kv.head_dim_vo)
        self.states = shape, problem.num_qo_heads // kv.num_kv_heads, number
        self.no_states = None if len(plan.work_list.merge_rows) else _NO_STATES  # none is written, none merged

    address = staticmethod(address_of)

    def __call__(self, addresses: tuple[int, ...], options: tuple[int, ...] = ()) -> bool:
        """Run on arrays of the shapes, strides and dtypes it was made for: see `nbattn.repeat.Launch`."""
        q, out, lse, *pages = addresses
        states = self.no_states or _states(*self.states)
        queries = Queries._make((q, *self.queries))
        output = Output._make((out, *self.rows, lse, *self.lse_rows))
        levels = self.levels.copy()  # other threads may be in this call too
        for place, address in zip(self.places, pages, strict=True):
            levels[place] = address
        kind, rule_tag, number_kind = self.tags
        threads = _threads(self.bytes_read, self.tasks.dots)
        for tile, tasks, max_rows, max_heads in self.tasks.kinds:
            arguments = (
                kind, rule_tag, np.zeros(2, np.int64), number_kind, tile, tasks, self.work_list.work,
                levels, max_rows, max_heads, queries, output, states.rows, self.rules,
            )  # fmt: skip
            entry = self.entries.get(tile)
            if entry is None:
                entry = self.entries[tile] = workers.entry_of(paged_worker, (*self.tags, tile), arguments)
            workers.run_entry(entry, len(tasks), threads, arguments)
        _merge_splits(self.work_list, output, states)
        return True


def run_paged(problem: Problem, plan: Plan) -> PagedCall | None:
    """Run a paged problem: write `problem.out` and `problem.lse`.

    Returns the call, to be repeated on other arrays, unless it keeps copies of options or of q.
    """
    q, scale = _prepared_query(problem, plan)
    call = PagedCall(problem, plan, q, scale)
    pages = [address_of(x) for level in problem.levels for x in (level.kv.k, level.kv.v)]
    call((address_of(q), address_of(problem.out), 0 if problem.lse is None else address_of(problem.lse), *pages))
    copied = q is not problem.q or any(isinstance(x, np.ndarray) for x in problem.options.arrays)
    return None if copied else call


def run_gather(problem: Problem, token_indices: np.ndarray, counts: np.ndarray, split_size: int | None) -> None:
    """Run a gather problem: write `problem.out` and `problem.lse`."""
    level = problem.levels[0]
    kv, options = level.kv, problem.options
    lists = np.ascontiguousarray(token_indices, dtype=np.int32)
    clamped = np.clip(counts.astype(np.int64), 0, token_indices.shape[1])
    work_list = build_gather_work(
        kv.kv_lens, kv.kv_indptr[:-1], level.qo_indptr, clamped, problem.q.shape[0],
        split_size=split_size, workers=get_num_threads(),
    )  # fmt: skip
    owners: list[np.ndarray] = []
    queries = _queries(problem, problem.q, options.sm_scale * LOG2E, options.k_scale, owners)
    output = _output(problem, owners)
    shape = (work_list.num_states, problem.num_qo_heads, kv.head_dim_vo)
    states = _states(shape, queries.group_size, problem.number)
    entries = int(clamped[int(level.qo_indptr[0]) : int(level.qo_indptr[-1])].sum())
    numbers = entries * kv.num_kv_heads * (kv.head_dim_qk + kv.head_dim_vo)
    if len(work_list.work):
        workers.run(
            gather_worker, (kv.kv_dtype,), len(work_list.work),
            _threads(numbers * kv.k.dtype.itemsize, numbers * queries.group_size),
            CACHE_KINDS[kv.kv_dtype], kv.num_kv_heads, np.zeros(2, np.int64), work_list.work, lists,
            np.array(_level_row(kv), np.int64), queries, output, states.rows,
        )  # fmt: skip
    _merge_splits(work_list, output, states)


def run_merge(
    sources: list[tuple[np.ndarray, np.ndarray]],
    v: np.ndarray,
    s: np.ndarray,
    lse_base: str,
    mask: np.ndarray | None = None,
) -> None:
    """Merge the states of `sources`, pairs ``(v [n, heads, dim], s [n, heads])``, into (v, s) where `mask` is not 0."""
    rows = np.arange(v.shape[0], dtype=np.int32) if mask is None else np.flatnonzero(mask).astype(np.int32)
    if v.shape[1] == 0 or len(rows) == 0:
        return
    table = np.zeros((len(sources), SOURCE_COLUMNS), np.int64)
    for row, (v_x, s_x) in zip(table, sources, strict=True):
        row[:] = address_of(v_x), *v_x.strides[:2], address_of(s_x), *s_x.strides
    nothing = np.zeros(0, np.int32)
    output = Output(
        address_of(v), DTYPE_CODE[dtype_name(v)], v.strides[0], v.strides[1], v.shape[2], 1,
        address_of(s), DTYPE_CODE[dtype_name(s)], s.strides[0], s.strides[1], 1.0 if lse_base == "2" else LN2,
        *_UNCHANGED,
    )  # fmt: skip
    unit = 1.0 if lse_base == "2" else LOG2E
    s_code = DTYPE_CODE[dtype_name(sources[0][1])] if sources else 0
    bytes_read = len(rows) * len(sources) * v.shape[1] * v.shape[2] * v.dtype.itemsize
    name = dtype_name(v)
    _run_merge(name, name, len(rows), bytes_read, v.shape[1], table, s_code, unit, rows, nothing, nothing, output)


def _merge_splits(work_list: WorkList, output: Output, states: States) -> None:
    if len(work_list.merge_rows) == 0:
        return
    v, s = states.v, states.s
    table = np.array([[address_of(v), *v.strides[:2], address_of(s), *s.strides]], np.int64)
    name = dtype_name(v)
    _run_merge(
        name, _DTYPE_OF_CODE[output.code], len(work_list.merge_rows), v.nbytes, v.shape[1], table,
        DTYPE_CODE[name], 1.0, work_list.merge_rows, work_list.merge_indptr, work_list.merge_slots, output,
    )  # fmt: skip


def _run_merge(kind: str, out_kind: str, num_rows: int, bytes_read: int, *rest: Any) -> None:
    tasks = -(-num_rows // ROWS_PER_TASK)
    workers.run(
        merge_worker, (kind, out_kind), tasks, _threads(bytes_read, bytes_read // itemsize(kind)),
        CACHE_KINDS[kind], CACHE_KINDS[out_kind], np.zeros(2, np.int64), tasks, *rest,
    )  # fmt: skip


def _threads(bytes_read: int, dots: int) -> int:
    """Return how many threads a piece of work is worth."""
    return 1 if max(bytes_read / READ_RATE, dots / DOT_RATE) < SERIAL_NANOSECONDS else get_num_threads()


def _level_row(kv: PagedKV) -> tuple[int, ...]:
    """Return where a level's pages lie, as the kernels' table of levels has it."""
    k, v, ids = kv.k, kv.v, kv.kv_indices
    return (address_of(k), *k.strides[:3], address_of(v), *v.strides[:3], address_of(ids), kv.page_size, kv.num_pages)


def _queries(problem: Problem, q: np.ndarray, scale: float, k_scale: Any, owners: list[np.ndarray]) -> Queries:
    kv, number = problem.levels[0].kv, problem.number
    return Queries(
        address_of(q), DTYPE_CODE[dtype_name(q)], q.strides[0], q.strides[1], kv.head_dim_qk,
        problem.num_qo_heads // kv.num_kv_heads, number.type(scale),
        _place(_per_kv_head(k_scale, kv.num_kv_heads, kv.head_dim_qk, number), owners),
    )  # fmt: skip


def _output(problem: Problem, owners: list[np.ndarray]) -> Output:
    kv, options, number = problem.levels[0].kv, problem.options, problem.number
    out, lse, gate = problem.out, problem.lse, options.output_gate
    group, lse_place = problem.num_qo_heads // kv.num_kv_heads, (0, 0, 0, 0)
    if lse is not None:
        lse_place = address_of(lse), DTYPE_CODE[dtype_name(lse)], lse.strides[0], lse.strides[1]
    v_scale = _per_kv_head(options.v_scale, kv.num_kv_heads, kv.head_dim_vo, number)
    if v_scale is not None:
        v_scale = v_scale[kv_head_of(np.arange(problem.num_qo_heads), group)]
    return Output(
        address_of(out), DTYPE_CODE[dtype_name(out)], out.strides[0], out.strides[1], kv.head_dim_vo,
        group, *lse_place, 1.0 if options.lse_base == "2" else LN2,
        _place(_log2_units(options.sinks, number), owners), _place(v_scale, owners),
        *((0, 0, 0, 0, 0) if gate is None else _gate(gate)),
    )  # fmt: skip


def _gate(gate: np.ndarray) -> tuple[int, int, int, int, int]:
    step = 0 if gate.shape[2] == 1 else gate.strides[2]
    return address_of(gate), DTYPE_CODE[dtype_name(gate)], gate.strides[0], gate.strides[1], step


class States(NamedTuple):
    """Partial results of split rows: normalised values and base-2 lse, and where a kernel finds them."""

    v: np.ndarray  # number [num_states, num_qo_heads, dim]
    s: np.ndarray  # number [num_states, num_qo_heads]
    rows: Output


def _states(shape: tuple[int, int, int], group_size: int, number: np.dtype) -> States:
    v, s, code = np.empty(shape, number), np.empty(shape[:2], number), DTYPE_CODE[name_of(number)]
    rows = Output(
        address_of(v), code, v.strides[0], v.strides[1], shape[2], group_size,
        address_of(s), code, s.strides[0], s.strides[1], 1.0, *_UNCHANGED,
    )  # fmt: skip
    return States(v, s, rows)


_NO_STATES = States(np.zeros((0, 0, 0)), np.zeros((0, 0)), Output(0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1.0, *_UNCHANGED))


def _place(values: np.ndarray | None, owners: list[np.ndarray]) -> int:
    """Return where an array lies, which `owners` keep alive from now on; 0 for none."""
    if values is None:
        return 0
    owners.append(values)
    return address_of(values)


def _per_kv_head(scale: Any, num_kv_heads: int, dim: int, number: np.dtype) -> np.ndarray | None:
    if scale is None:
        return None
    wide = np.asarray(scale).astype(np.float64)
    return np.ascontiguousarray(np.broadcast_to(wide, (num_kv_heads, dim)).astype(number))


def _log2_units(values: Any, number: np.dtype) -> np.ndarray | None:
    if values is None:
        return None
    with np.errstate(over="ignore"):  # sinks far below zero become -inf, which is none
        return (values.astype(np.float64) * LOG2E).astype(number)


def _rules(problem: Problem, plan: Plan, owners: list[np.ndarray]) -> tuple[Rules, bool]:
    """Return the rules, and whether any goes beyond positions."""
    options, number, kv = problem.options, problem.number, problem.levels[0].kv
    places, mask = plan.places, options.attn_mask
    mask_code, strides, row_request, row_index = 0, (0, 0, 0, 0), None, None
    if mask is not None:
        row_request, row_index = places.row_request, places.row_index
        mask_code = MASK_BOOL if mask.dtype == np.bool_ else DTYPE_CODE[dtype_name(mask)]
        request, head, row, key = (0 if n == 1 else x for n, x in zip(mask.shape, mask.strides, strict=True))
        strides = request, head, row, key
    cos = sin = k_scale = None
    origin = 0
    if options.rope is not None:
        (origin, cos, sin), _, _ = _rope_planes(options.rope, problem, plan)
        k_scale = _per_kv_head(options.k_scale, kv.num_kv_heads, kv.head_dim_qk, number)
    unmapped = any(level.kv.kv_indices.min(initial=0) < 0 for level in problem.levels)
    full = unmapped or any(x is not None for x in (mask, options.alibi_slopes, options.rope)) or options.soft_cap > 0
    rules = Rules(
        _place(places.row_position, owners), options.window_left, options.chunk_size,
        number.type(options.soft_cap * LOG2E), _place(_log2_units(options.alibi_slopes, number), owners),
        _place(mask, owners), mask_code, strides, _place(row_request, owners), _place(row_index, owners),
        _place(cos, owners), _place(sin, owners), origin, _place(k_scale, owners),
    )  # fmt: skip
    return rules, full


def _rope_planes(rope: Rope, problem: Problem, plan: Plan) -> tuple[Planes, np.ndarray, Planes]:
    """Return planes of the keys, where the rows stand in theirs, and planes of the rows."""
    lens = [level.kv.kv_lens for level in problem.levels]
    return planes_for(rope, problem.levels[0].kv.head_dim_qk, plan.places, lens, problem.number)


def _prepared_query(problem: Problem, plan: Plan) -> tuple[np.ndarray, float]:
    """Return q ready for its dot products and the scale still to be applied."""
    options, prepare = problem.options, problem.options.prepare
    if options.rope is not None:
        _, turned, (origin, cos, sin) = _rope_planes(options.rope, problem, plan)
        prepare = Preparation(cos=cos, sin=sin, positions=turned, origin=origin)
    scale = options.sm_scale * LOG2E
    if prepare is None:
        return problem.q, scale
    number, rows = problem.number, plan.num_rows
    prepared = np.empty((rows, *problem.q.shape[1:]), number)
    none = np.zeros((0, 0), number)
    tasks = -(-rows // PREPARED_PER_TASK)
    workers.run(
        prepare_worker, (number,), tasks, _threads(prepared.nbytes, prepared.size),
        _queries(problem, problem.q, 1.0, None, []), problem.num_qo_heads, np.zeros(2, np.int64), tasks,
        none.reshape(-1) if prepare.gain is None else prepare.gain.astype(number), float(prepare.eps),
        none if prepare.cos is None else np.ascontiguousarray(prepare.cos, number),
        none if prepare.sin is None else np.ascontiguousarray(prepare.sin, number),
        prepare.origin, np.zeros(rows, np.int64) if prepare.positions is None else _int64(prepare.positions),
        bool(prepare.interleaved), prepared,
    )  # fmt: skip
    return prepared, scale


def _int64(values: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(values, np.int64)

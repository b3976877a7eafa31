"""How the engine's problems run on the CPU: arrays become addresses, work lists become tasks of the worker team."""

from __future__ import annotations

from typing import Any

import numpy as np

from nbattn.arrays import dtype_name, name_of
from nbattn.cpu_ref import workers
from nbattn.cpu_ref.addresses import address_of
from nbattn.cpu_ref.gather_attention import GatherJob, gather_worker
from nbattn.cpu_ref.merge_states import ROWS_PER_TASK, SOURCES_WORD, MergeJob, Source, merge_worker
from nbattn.cpu_ref.number_formats import DTYPE_CODE, itemsize
from nbattn.cpu_ref.paged_attention import LEVELS_WORD, OUTPUT_WORD, QUERIES_WORD, STATES_WORD, PagedJob, paged_worker
from nbattn.cpu_ref.prepare_query import ROWS_PER_TASK as PREPARED_PER_TASK
from nbattn.cpu_ref.prepare_query import PrepareJob, prepare_worker
from nbattn.cpu_ref.problem import MASK_BOOL, Output, Pages, Queries, Rules
from nbattn.cpu_ref.records import record_of
from nbattn.cpu_ref.tags import CACHE_KINDS, FULL, PLAIN
from nbattn.cpu_ref.tasks import TaskList
from nbattn.cpu_ref.tasks import lane as lane  # what the engine asks of a target
from nbattn.cpu_ref.tasks import tiling as tiling
from nbattn.indexing import kv_head_of
from nbattn.kv_cache import PagedKV
from nbattn.planning import Plan
from nbattn.problem import Preparation, Problem, Rope
from nbattn.rotary import Planes, planes_for
from nbattn.scoring import LN2, LOG2E
from nbattn.threads import get_num_threads
from nbattn.work_list import WorkList, build_gather_work

_DTYPE_OF_CODE = {code: name for name, code in DTYPE_CODE.items()}
_UNCHANGED = 0, 0, 0, 0, 0, 0, 0  # the last fields of an `Output`: no sinks, no scale, no gate
_ADDRESS, _LSE = Output._fields.index("address"), Output._fields.index("lse_address")
_MERGED = SOURCES_WORD - len(Output._fields)
_SOURCE_V, _SOURCE_S = Source._fields.index("v"), Source._fields.index("s")
_K, _V = Pages._fields.index("k"), Pages._fields.index("v")
READ_RATE, DOT_RATE = 16.0, 50.0  # bytes and multiply-adds per nanosecond of one thread, roughly


class PagedCall:
    """A paged problem in which all is settled but the addresses of its arrays: a plan repeats it for every layer."""

    follows_plan = False

    def __init__(self, problem: Problem, plan: Plan, q: np.ndarray, scale: float):
        kv, options, number = problem.levels[0].kv, problem.options, problem.number
        if plan.on_target is None:
            plan.on_target = TaskList(plan, problem)
        work_list, kinds, numbers, dots = plan.on_target.work
        self.owners: list[np.ndarray] = [work_list.work]  # of the arrays whose addresses are kept
        rules, full = _rules(problem, plan, self.owners)
        folded = options.k_scale if options.rope is None else None
        queries, output = _queries(problem, q, scale, folded, self.owners), _output(problem, self.owners)
        shape, states = (work_list.num_states, problem.num_qo_heads, kv.head_dim_vo), _NO_STATES
        if work_list.num_states:
            states = _states(np.empty(shape, number), np.empty(shape[:2], number), queries.group_size)
        pages = [_pages(level.kv) for level in problem.levels]
        self.nanoseconds = _nanoseconds(numbers * kv.k.dtype.itemsize, dots)
        self.jobs: list[tuple[int, np.ndarray, int]] = []  # code, record and number of tasks of each kind
        for tile, kind_tasks, max_rows, max_heads in kinds:
            tags = CACHE_KINDS[kv.kv_dtype], FULL if full else PLAIN, CACHE_KINDS[name_of(number)], tile
            job = PagedJob(
                0, _place(kind_tasks, self.owners), len(kind_tasks), max_rows, max_heads, address_of(work_list.work)
            )
            record = record_of(job, queries, output, states, rules, *pages)
            self.jobs.append((workers.code_of(paged_worker, *tags), record, len(kind_tasks)))
        places = [LEVELS_WORD + len(Pages._fields) * i + column for i in range(len(pages)) for column in (_K, _V)]
        self.places = QUERIES_WORD + _ADDRESS, OUTPUT_WORD + _ADDRESS, OUTPUT_WORD + _LSE, *places
        self.states = shape, number
        self.merge = None
        if len(work_list.merge_rows):
            self.merge = SplitMerge(work_list, output, states, problem.num_qo_heads, number, self.owners)

    address = staticmethod(address_of)

    def __call__(self, addresses: tuple[int, ...], options: tuple[int, ...] = ()) -> bool:
        """Run on arrays of the shapes, strides and dtypes it was made for: see `nbattn.repeat.Launch`."""
        threads, v_states, s_states = get_num_threads(), 0, 0
        if self.merge is not None:
            shape, number = self.states
            v, s = np.empty(shape, number), np.empty(shape[:2], number)
            v_states, s_states = address_of(v), address_of(s)
        for code, template, num_tasks in self.jobs:
            record = template.copy()  # other threads may be in this call too
            for place, address in zip(self.places, addresses, strict=True):
                record[place] = address
            record[STATES_WORD + _ADDRESS], record[STATES_WORD + _LSE] = v_states, s_states
            workers.run(code, record, num_tasks, threads, self.nanoseconds)
        if self.merge is not None:
            self.merge(v_states, s_states, addresses[1], addresses[2], threads)
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
    owners: list[np.ndarray] = [lists, work_list.work]
    queries = _queries(problem, problem.q, options.sm_scale * LOG2E, options.k_scale, owners)
    output, number = _output(problem, owners), problem.number
    shape = (work_list.num_states, problem.num_qo_heads, kv.head_dim_vo)
    v, s = np.empty(shape, number), np.empty(shape[:2], number)
    states = _states(v, s, queries.group_size)
    entries = int(clamped[int(level.qo_indptr[0]) : int(level.qo_indptr[-1])].sum())
    numbers = entries * kv.num_kv_heads * (kv.head_dim_qk + kv.head_dim_vo)
    threads = get_num_threads()
    if len(work_list.work):
        job = GatherJob(
            0, address_of(work_list.work), len(work_list.work), kv.num_kv_heads, address_of(lists), lists.shape[1]
        )
        workers.run(
            workers.code_of(gather_worker, CACHE_KINDS[kv.kv_dtype]),
            record_of(job, queries, output, states, _pages(kv)), len(work_list.work), threads,
            _nanoseconds(numbers * kv.k.dtype.itemsize, numbers * queries.group_size),
        )  # fmt: skip
    if len(work_list.merge_rows):
        merge = SplitMerge(work_list, output, states, problem.num_qo_heads, number, owners)
        merge(address_of(v), address_of(s), output.address, output.lse_address, threads)


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
    output = Output(
        address_of(v), DTYPE_CODE[dtype_name(v)], v.strides[0], v.strides[1], v.shape[2], 1,
        address_of(s), DTYPE_CODE[dtype_name(s)], s.strides[0], s.strides[1], 1.0 if lse_base == "2" else LN2,
        *_UNCHANGED,
    )  # fmt: skip
    job = MergeJob(
        0, address_of(rows), len(rows), v.shape[1], len(sources), len(sources),
        DTYPE_CODE[dtype_name(sources[0][1])] if sources else 0, 1.0 if lse_base == "2" else LOG2E, 0, 0, 0,
    )  # fmt: skip
    places = [Source._make((address_of(x), *x.strides[:2], address_of(lse), *lse.strides)) for x, lse in sources]
    numbers, kind = len(rows) * len(sources) * v.shape[1] * v.shape[2], CACHE_KINDS[dtype_name(v)]
    workers.run(
        workers.code_of(merge_worker, kind, kind), record_of(job, output, *places), -(-len(rows) // ROWS_PER_TASK),
        get_num_threads(), _nanoseconds(numbers * v.dtype.itemsize, numbers),
    )  # fmt: skip


class SplitMerge:
    """The merge of a plan's split rows, in which all is settled but the addresses of states and results."""

    def __init__(
        self, work_list: WorkList, output: Output, states: Output, heads: int, number: np.dtype,
        owners: list[np.ndarray],
    ):  # fmt: skip
        kind, out_kind = CACHE_KINDS[name_of(number)], CACHE_KINDS[_DTYPE_OF_CODE[output.code]]
        self.code = workers.code_of(merge_worker, kind, out_kind)
        rows, indptr, slots = work_list.merge_rows, work_list.merge_indptr, work_list.merge_slots
        self.tasks = -(-len(rows) // ROWS_PER_TASK)
        job = MergeJob(
            0, _place(rows, owners), len(rows), heads, 1, int((indptr[1:] - indptr[:-1]).max(initial=0)),
            DTYPE_CODE[kind.name], 1.0, _place(indptr, owners), _place(slots, owners), len(slots),
        )  # fmt: skip
        source = Source(0, states.stride, states.head_stride, 0, states.lse_stride, states.lse_head_stride)
        self.template = record_of(job, output, source)
        numbers = len(slots) * heads * output.dim
        self.nanoseconds = _nanoseconds(numbers * itemsize(kind.name), numbers)

    def __call__(self, v: int, s: int, out: int, lse: int, threads: int) -> None:
        """Merge the states at `v` and `s` into `out` and `lse`."""
        record = self.template.copy()
        record[_MERGED + _ADDRESS], record[_MERGED + _LSE] = out, lse
        record[SOURCES_WORD + _SOURCE_V], record[SOURCES_WORD + _SOURCE_S] = v, s
        workers.run(self.code, record, self.tasks, threads, self.nanoseconds)


def _nanoseconds(bytes_read: int, dots: int) -> float:
    """Return about how long one thread takes."""
    return max(bytes_read / READ_RATE, dots / DOT_RATE)


def _pages(kv: PagedKV) -> Pages:
    k, v, ids = kv.k, kv.v, kv.kv_indices
    places = address_of(k), *k.strides[:3], address_of(v), *v.strides[:3], address_of(ids), kv.page_size, kv.num_pages
    return Pages._make(places)


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


def _states(v: np.ndarray, s: np.ndarray, group_size: int) -> Output:
    """Return where partial results of split rows go: normalised values and base-2 lse."""
    code = DTYPE_CODE[name_of(v.dtype)]
    return Output(
        address_of(v), code, v.strides[0], v.strides[1], v.shape[2], group_size,
        address_of(s), code, s.strides[0], s.strides[1], 1.0, *_UNCHANGED,
    )  # fmt: skip


_NO_STATES = Output(0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1.0, *_UNCHANGED)


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
    mask_code, strides, row_request, row_index = 0, [0, 0, 0, 0], None, None
    if mask is not None:
        row_request, row_index = places.row_request, places.row_index
        mask_code = MASK_BOOL if mask.dtype == np.bool_ else DTYPE_CODE[dtype_name(mask)]
        strides = [0 if n == 1 else x for n, x in zip(mask.shape, mask.strides, strict=True)]
    cos = sin = k_scale = None
    origin = 0
    if options.rope is not None:
        (origin, cos, sin), _, _ = _rope_planes(options.rope, problem, plan)
        k_scale = _per_kv_head(options.k_scale, kv.num_kv_heads, kv.head_dim_qk, number)
    unmapped = any(level.kv.table.unmapped for level in problem.levels)
    full = unmapped or any(x is not None for x in (mask, options.alibi_slopes, options.rope)) or options.soft_cap > 0
    rules = Rules._make((
        _place(places.row_position, owners), options.window_left, options.chunk_size,
        number.type(options.soft_cap * LOG2E), _place(_log2_units(options.alibi_slopes, number), owners),
        _place(mask, owners), mask_code, *strides, _place(row_request, owners), _place(row_index, owners),
        _place(cos, owners), _place(sin, owners), origin, _place(k_scale, owners),
    ))  # fmt: skip
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
    owners: list[np.ndarray] = []
    gain, cosines, sines = (
        _place(None if x is None else np.ascontiguousarray(x, number), owners)
        for x in (prepare.gain, prepare.cos, prepare.sin)
    )
    places, half = (0, 0) if prepare.cos is None else prepare.cos.shape
    positions = _place(None if prepare.positions is None else np.ascontiguousarray(prepare.positions, np.int64), owners)
    job = PrepareJob(
        0, rows, problem.num_qo_heads, address_of(prepared), gain, float(prepare.eps), cosines, sines, places, half,
        prepare.origin, positions, bool(prepare.interleaved),
    )  # fmt: skip
    tasks = -(-rows // PREPARED_PER_TASK)
    workers.run(
        workers.code_of(prepare_worker, CACHE_KINDS[name_of(number)]),
        record_of(job, _queries(problem, problem.q, 1.0, None, [])), tasks, get_num_threads(),
        _nanoseconds(prepared.nbytes, prepared.size),
    )  # fmt: skip
    return prepared, scale

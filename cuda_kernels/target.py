"""How the engine's problems run on the GPU: options become arrays on the device, plans become device buffers.

Importing this module imports neither CuPy nor Numba.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

import numpy as np

from nbattn.arrays import Array, dtype_name
from nbattn.cuda_kernels import calls, merge_calls
from nbattn.cuda_kernels.calls import AttentionOptions
from nbattn.cuda_kernels.device import Device
from nbattn.cuda_kernels.gather_parts import cut_lists, cut_lists_at, keep_for_graph, rows_on_device
from nbattn.cuda_kernels.metadata import PlanMetadata, Room
from nbattn.cuda_kernels.paged_call import PagedCall
from nbattn.cuda_kernels.shapes import (
    CLUSTERED_BYTES,
    DECODE_ROWS,
    LARGEST_CLUSTERED_HEAD,
    PLAIN_BLOCKS,
    PREFILL_ROWS,
    WARPGROUP_ROWS,
    decode_shape,
    gather_shape,
    head_size_class,
    paged_family,
    wgmma_groups,
)
from nbattn.errors import ContractError, TargetError
from nbattn.kv_cache import PagedKV
from nbattn.planning import Plan, Tiling
from nbattn.problem import Level, Options, Preparation, Problem, Rope
from nbattn.rotary import POSITIONS_AHEAD, planes_for, turned_interval, turned_rows

SHARES_AT_A_TIME = 4  # the number of shares of work is a multiple of it
BLOCKS_PER_MULTIPROCESSOR = 2  # of either tile but the warpgroups': see the register table of the tests
MOST_DECODE_KEYS = 1000  # of a resident block; more keys that many rows share are faster on the prefill tile
MOST_KEYS_OF_WIDE, MOST_KEYS_OF_NARROW = 300, 200  # the same where two warpgroups or one multiply
MOST_KEYS_BESIDE = 2  # of prefill tiles for each of decode tiles: beyond, prefill tiles fill the multiprocessors
WIDE_KEY, NARROW_KEY = 1.5, 0.9  # what a key takes of two warpgroups and of one, over what it takes of a decode tile

_devices: dict[int, Device] = {}
_planes_on_device: dict[tuple, tuple[np.ndarray, Array, Array]] = {}


def current_device() -> Device:
    """Return the current CUDA device, or raise a TargetError that says what is missing."""
    cupy = sys.modules.get("cupy")
    number = int(cupy.cuda.runtime.getDevice()) if cupy is not None and _devices else -1
    found = _devices.get(number)
    if found is None:
        found = Device()
        _devices[found.number] = found
    return found


def lane() -> tuple[int, Any]:
    """Return what plans that the library makes by itself are made for: the device and its current stream.

    Their buffers are filled in the order of that stream; what is captured there fills them at a replay only.
    """
    device = current_device()
    return device.number, object() if device.capturing() else device.stream()


def tiling(
    levels: tuple[Level, ...], num_qo_heads: int, split_size: int | None, max_kv_len: int | None = None
) -> Tiling:
    """Return how work is cut for this target: whole waves of resident blocks, one block a work item and KV head.

    Levels of few rows run on the decode tile. So does a level of many rows, cut into tiles of few, where the tiles'
    keys are soon read: a prefill tile takes eight times the rows, but its launch takes longer. That is decided by the
    lengths alone, and only for cascades whose splits are not given.
    """
    kv = levels[0].kv
    num_kv_heads = kv.num_kv_heads
    group = num_qo_heads // num_kv_heads
    few, many = DECODE_ROWS // group, max(1, PREFILL_ROWS // group)
    blocks = current_device().multiprocessors * BLOCKS_PER_MULTIPROCESSOR / num_kv_heads
    is_hopper = paged_family("prefill", kv.kv_dtype, current_device().compute_capability) == "paged_wgmma"
    size = head_size_class(kv.kv_dtype, kv.head_dim_qk, kv.head_dim_vo)
    narrow = WARPGROUP_ROWS // group if is_hopper and wgmma_groups(size or 0, False, 0) == 1 else 0
    may_choose = few > 0 and len(levels) > 1 and split_size is None
    tokens, few_keys, many_keys = [], 0, 0
    for level in levels:
        rows = level.qo_indptr[1:] - level.qo_indptr[:-1]
        longest = int(rows.max(initial=0))
        tile = max(1, min(few, longest))
        keys = _keys_of_tiles(rows, level.kv.kv_lens, tile)
        most_keys = MOST_KEYS_OF_NARROW if longest <= narrow else MOST_KEYS_OF_WIDE if is_hopper else MOST_DECODE_KEYS
        if longest <= few or (may_choose and keys <= blocks * most_keys):
            few_keys += keys
        else:
            tile = narrow if longest <= narrow and split_size is None else many
            many_keys += _keys_of_tiles(rows, level.kv.kv_lens, tile)
        tokens.append(tile)
    if len(levels) == 1 and longest <= few:
        return _decode_tiling(levels[0].kv, int(np.count_nonzero(rows)), tile, few, split_size, max_kv_len)
    groups = 0 if not is_hopper else 2 if max(tokens) > narrow else 1
    shares, many_shares = (max(1.0, blocks * part) for part in _parts_of_wave(few_keys, many_keys, groups))
    if groups < 2 or few_keys == 0:
        return Tiling(tuple(tokens), round(shares), few, round(many_shares))
    return Tiling(tuple(tokens), round(shares), few, many_shares, wave=blocks / 2)


def _decode_tiling(
    kv: PagedKV, requests: int, tokens: int, few: int, split_size: int | None, max_kv_len: int | None
) -> Tiling:
    """Return how the few rows of one level are cut.

    Where keys are few, a cluster of blocks takes an item and nothing is left to merge. Items of a given split size are
    not for clusters: their bits must not depend on their neighbours.
    """
    device, resident = current_device(), BLOCKS_PER_MULTIPROCESSOR
    size = head_size_class(dtype_name(kv.k), kv.head_dim_qk, kv.head_dim_vo)
    if size is not None:
        resident = min(resident, decode_shape(dtype_name(kv.k), size).blocks)
        if split_size is None and size <= LARGEST_CLUSTERED_HEAD:
            blocks = device.multiprocessors * resident // kv.num_kv_heads
            cluster = _cluster(device, kv, blocks, requests, max_kv_len)
            if cluster > 1:
                return Tiling((tokens,), 1, few, cluster=cluster)
    turns = device.multiprocessors * resident / (kv.num_kv_heads * SHARES_AT_A_TIME)
    return Tiling((tokens,), SHARES_AT_A_TIME * max(1, round(turns)), few)


def _parts_of_wave(few_keys: int, many_keys: int, groups: int) -> tuple[float, float]:
    """Return which part of a wave of blocks the decode and the prefill tiles of a call fill, by the keys of both.

    Blocks of the prefill tile have so many warp`groups`, 0 for those without matrix instructions of warpgroups. Two
    fill a multiprocessor: then the tiles divide the multiprocessors by their work, so that both end together. Others
    share them, a block each, and the tile with little to do takes fewer blocks of more keys.
    """
    if many_keys == 0 or few_keys == 0:
        return 1.0, 0.5 if groups == 2 else 1.0
    if groups == 2:
        return 1.0, 0.5 * _share_of_time(many_keys * WIDE_KEY, few_keys)
    if groups == 1 and many_keys > few_keys:
        return 0.5, _share_of_time(many_keys * NARROW_KEY, few_keys)
    if many_keys > MOST_KEYS_BESIDE * few_keys:
        return 0.5, 1.0
    return 1.0, 0.25 if many_keys <= few_keys / 4 else 0.5


def _share_of_time(mine: float, other: float) -> float:
    return mine / (mine + other)


def _keys_of_tiles(rows: np.ndarray, kv_lens: np.ndarray, tile: int) -> int:
    """Return how many keys are read if each request's rows are cut into tiles of so many."""
    return int((-(-rows // tile) * kv_lens).sum())


def _cluster(device: Device, kv: PagedKV, blocks: int, requests: int, max_kv_len: int | None) -> int:
    """Return how many blocks should share an item, of so many that are resident for each KV head; 1 is no cluster."""
    key_bytes = kv.k.dtype.itemsize * (kv.head_dim_qk + kv.head_dim_vo)
    keys = int(kv.kv_lens.max(initial=0)) if max_kv_len is None else max_kv_len
    cluster = 1
    while 2 * cluster * requests <= blocks and 2 * cluster <= device.largest_cluster:
        cluster *= 2
    return cluster if keys * key_bytes <= CLUSTERED_BYTES * cluster else 1


class PlanOnDevice:
    """A plan's device buffers; `Plan.update` refills them, so that replayed graphs see it."""

    def __init__(self, device: Device, plan: Plan, levels: tuple[Level, ...]):
        group = plan.rules.num_qo_heads // levels[0].kv.num_kv_heads
        capacity = plan.capacity
        room = Room(
            items=capacity.get("work items"),
            states=capacity.get("states"),
            merge_rows=capacity.get("merged rows"),
            merge_slots=capacity.get("states"),
            pages=capacity.get("page-table entries"),
        )
        if all(capacity.get(name, size) <= size for name, size in plan.work_list.sizes().items()):
            room = Room(pages=room.pages)  # nothing may grow: nothing is padded
        tokens = max(*plan.tiling.tokens, plan.work_list.max_tokens)
        self.planes_in_graphs: list[tuple[int, Array, Array]] = []  # position of row 0, cosines, sines
        self.metadata = PlanMetadata(
            device, group_size=group, tokens=tokens, cluster=plan.tiling.cluster, room=room, **_integers(plan, levels)
        )

    def refill(self, plan: Plan, levels: tuple[Level, ...]) -> None:
        """Copy an updated plan into the same buffers."""
        begin, end = turned_interval(plan.places, _lens(levels)) if self.planes_in_graphs else (0, 0)
        for origin, cos, _ in self.planes_in_graphs:
            if not origin <= begin <= end <= origin + len(cos):
                raise ContractError(
                    f"Plan.update: a captured graph rotates positions {origin} to {origin + len(cos) - 1}, got {begin} "
                    f"to {end - 1}. Make a new plan for them, with a larger max_kv_len (up to {POSITIONS_AHEAD})."
                )
        self.metadata.update(**_integers(plan, levels))


def _integers(plan: Plan, levels: tuple[Level, ...]) -> dict[str, Any]:
    work_list, places = plan.work_list, plan.places
    return {
        "work": work_list.work,
        "row_position": places.row_position,
        "row_turned": places.row_position if plan.given[0] is None else turned_rows(places).astype(np.int32),
        "row_request": places.row_request,
        "row_index": places.row_index,
        "merge_rows": work_list.merge_rows,
        "merge_indptr": work_list.merge_indptr,
        "merge_slots": work_list.merge_slots,
        "num_states": work_list.num_states,
        "max_tokens": work_list.max_tokens,
        "tables": [level.kv.kv_indices for level in levels],
    }


def run_paged(problem: Problem, plan: Plan, device: Any = None) -> PagedCall | None:
    """Run a paged problem: write `problem.out` and `problem.lse`.

    Returns the call, to be repeated on other arrays, unless its kernels read copies of options or of q.
    """
    device = device or current_device()
    if plan.on_target is None:
        plan.on_target = PlanOnDevice(device, plan, problem.levels)
    metadata = plan.on_target.metadata
    options = problem.options
    prepare, planes, origin = options.prepare, None, 0
    if options.rope is not None:
        origin, planes, prepare = _rotation(device, options.rope, problem, plan)
    settings, k_scale = _settings(device, problem, planes, origin)
    is_prepared = prepare is not None or (k_scale is not None and planes is None)
    q = metadata.scratch("query", problem.q.shape) if is_prepared else problem.q
    kvs = [level.kv for level in problem.levels]
    call = PagedCall(device, metadata, q, kvs, settings, problem.out, problem.lse)
    with metadata.lock:
        if is_prepared:
            fold = None if planes is not None else k_scale
            positions = metadata.pointers["turned"]
            _prepare_query(device, problem, q, plan.num_rows, prepare or Preparation(), fold, positions)
        call(call.addresses, call.options)
    arrays = [0 if x is None or isinstance(x, (int, float)) else device.address(x) for x in options.arrays]
    return call if call.aligned and not is_prepared and call.options == tuple(arrays) else None


def run_gather(
    problem: Problem, token_indices: Array, counts: Array, split_size: int | None, device: Any = None
) -> None:
    """Run a gather problem: write `problem.out` and `problem.lse`."""
    device = device or current_device()
    level = problem.levels[0]
    kv, offsets = level.kv, np.asarray(level.qo_indptr)
    first, last = int(offsets[0]), int(offsets[-1])
    if first == last:
        return
    settings, k_scale = _settings(device, problem, None, 0)
    q, out, lse = problem.q, problem.out, problem.lse
    if k_scale is not None:
        q = device.empty(q.shape, "float32")
        _prepare_query(device, problem, q, len(q), Preparation(), k_scale, 0)
    lists, counts = device.as_int32(token_indices), device.as_int32(counts)
    if (first, last) != (0, len(q)):  # rows that no request covers are left alone
        covered = slice(first, last)
        q, out, lists, counts = q[covered], out[covered], lists[covered], counts[covered]
        lse = lse if lse is None else lse[covered]
        gate = settings.output_gate
        settings = replace(settings, output_gate=gate if gate is None else gate[covered])
    num_rows, width = lists.shape
    is_shared = num_rows * width >= int(kv.kv_lens.sum())
    if split_size is None:
        family, constants, pairs, _ = calls.gather_specialisation(device, q, kv, settings)
        blocks_each = PLAIN_BLOCKS if family == "gather_plain" else gather_shape(**constants).blocks
        resident = device.multiprocessors * blocks_each
        blocks = kv.num_kv_heads * -(-problem.num_qo_heads // kv.num_kv_heads // pairs)
        parts = cut_lists(num_rows, width, blocks, resident, is_shared)
    else:
        parts = cut_lists_at(width, split_size, is_shared)
    rows, table = rows_on_device(device, kv.table, offsets - first)
    buffers = calls.run_gather(device, parts, rows, table, q, kv, lists, counts, settings, out, lse)
    keep_for_graph(device, kv.table, buffers, q, lists, counts, settings, k_scale)


def run_merge(
    sources: list[tuple[Array, Array]], v: Array, s: Array, lse_base: str, mask: Array | None = None, device: Any = None
) -> None:
    """Merge the states of `sources`, pairs ``(v [n, heads, dim], s [n, heads])``, into (v, s) where `mask` is not 0.

    Two states may be merged in place; more are equally spaced views of one array.
    """
    device = device or current_device()
    if any(dtype_name(x) == "float64" for x in (v, *(v_x for v_x, _ in sources))):
        raise TargetError("v: float64 runs on the CPU only, got a CuPy array. Use float32 or cupy.asnumpy(v).")
    if v.shape[0] * v.shape[1] == 0:
        return
    if len(sources) == 2:
        (v_a, s_a), (v_b, s_b) = sources
        rows = None if mask is None else device.as_bytes(mask)
        merge_calls.run_merge_pair(device, v_a, s_a, v_b, s_b, v, s, rows, lse_base)
    else:
        merge_calls.run_merge_views(device, sources, v, s, lse_base)


def _settings(device: Any, problem: Problem, planes: Any, origin: int) -> tuple[AttentionOptions, Array | None]:
    """Return the call's options on the device, and the keys' scale if it is not a number."""
    options: Options = problem.options
    kv, heads = problem.levels[0].kv, problem.levels[0].kv.num_kv_heads
    scale, k_scale, v_unit, v_scale = options.sm_scale, options.k_scale, 1.0, options.v_scale
    if isinstance(k_scale, (int, float)):
        scale, k_scale = scale * k_scale, None
    if isinstance(v_scale, (int, float)):
        v_unit, v_scale = float(v_scale), None
    if k_scale is not None:
        k_scale = device.as_float32(k_scale, (heads, kv.head_dim_qk))
    mask, gate = options.attn_mask, options.output_gate
    settings = AttentionOptions(
        scale=scale,
        query_dtype=dtype_name(problem.q),
        window_left=options.window_left,
        chunk_size=options.chunk_size,
        soft_cap=options.soft_cap,
        sinks=None if options.sinks is None else device.as_float32(options.sinks),
        alibi_slopes=None if options.alibi_slopes is None else device.as_float32(options.alibi_slopes),
        attn_mask=device.as_float32(mask) if mask is not None and dtype_name(mask) == "float64" else mask,
        rope_planes=planes,
        rope_origin=origin,
        rope_k_scale=k_scale if planes is not None else None,
        v_scale=None if v_scale is None else device.as_float32(v_scale, (heads, kv.head_dim_vo)),
        v_unit=v_unit,
        output_gate=device.as_float32(gate) if gate is not None and dtype_name(gate) == "float64" else gate,
        lse_base=options.lse_base,
    )
    return settings, k_scale


def _rotation(device: Any, rope: Rope, problem: Problem, plan: Plan) -> tuple[int, tuple[Array, Array], Preparation]:
    """Return the keys' planes on the device after the position of their row 0, and what is done to q."""
    end = 0
    if plan.max_kv_len is not None:
        end = min(POSITIONS_AHEAD, plan.max_kv_len * len(problem.levels))
    dim = problem.levels[0].kv.head_dim_qk
    planes, rows, row_planes = planes_for(rope, dim, plan.places, _lens(problem.levels), np.dtype(np.float32), end)
    origin, cos, sin = planes
    key = (id(device), rope, dim)
    kept = _planes_on_device.get(key)
    if kept is None or kept[0] is not cos:
        kept = _planes_on_device[key] = cos, device.from_host(cos), device.from_host(sin)
    prepare = Preparation(cos=kept[1], sin=kept[2], origin=origin)
    if row_planes is not planes:
        prepare = Preparation(cos=row_planes.cos, sin=row_planes.sin, positions=rows)
    if device.capturing():
        if row_planes is not planes:
            raise ContractError(
                f"q_positions: must lie within {POSITIONS_AHEAD} positions of the keys in a captured graph with rope, "
                f"got up to {int(plan.places.row_position.max())}."
            )
        plan.on_target.planes_in_graphs.append((origin, *kept[1:]))
    return origin, kept[1:], prepare


def _lens(levels: tuple[Level, ...]) -> list[np.ndarray]:
    return [level.kv.kv_lens for level in levels]


def _prepare_query(
    device: Any, problem: Problem, prepared: Array, rows: int, prepare: Preparation, k_scale: Array | None, planned: int
) -> None:
    """Fill `prepared` with q after norm, rotation and the keys' scale; rows stand at the int32 at address `planned`."""
    q = problem.q
    positions = planned
    if prepare.positions is not None:
        row_positions = device.as_int32(prepare.positions)
        positions = device.address(row_positions)
    planes = None
    if prepare.cos is not None:
        planes = device.as_float32(prepare.cos), device.as_float32(prepare.sin)
    gain = None if prepare.gain is None else device.as_float32(prepare.gain)
    group = problem.num_qo_heads // problem.levels[0].kv.num_kv_heads
    calls.run_prepare(
        device, q, prepared, rows, group, gain=gain, eps=prepare.eps, planes=planes, positions=positions,
        origin=prepare.origin, interleaved=prepare.interleaved, k_scale=k_scale,
    )  # fmt: skip

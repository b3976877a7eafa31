"""From checked arrays and options to kernel launches. Nothing here checks again.

Every function takes a `Device`, arrays that live on it and an options object; results go into the arrays it is given.
Importing this module imports neither CuPy nor Numba.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

from nbattn.arrays import dtype_name
from nbattn.cuda_kernels.gather_parts import Parts
from nbattn.cuda_kernels.metadata import PlanMetadata
from nbattn.cuda_kernels.parameters import KINDS, WAITS_ASKING, WAITS_FIRST, WAITS_FOR_DATA, WAITS_NEVER
from nbattn.cuda_kernels.shapes import (
    CHUNK_BYTES,
    DECODE_ROWS,
    LARGEST_CLUSTERED_HEAD,
    PREFILL_ROWS,
    WARPGROUP_ROWS,
    decode_shape,
    decode_shared_bytes,
    head_size_class,
    merge_team,
    needs_full,
    paged_family,
    shared_bytes_for,
    wgmma_groups,
)

Array = Any
LOG2E, LN2 = math.log2(math.e), math.log(2.0)
WARPS_OF_MERGE = 4
_NO_RESULT = (0, 0, 0)


@dataclass(frozen=True)
class AttentionOptions:
    """Everything about a call of attention besides its arrays of data, all of it checked.

    Parameters
    ----------
    scale : float
        What ``<q, k>`` is multiplied by: the softmax scale, and a scalar scale of K if there is one.
    query_dtype : str, optional
        Dtype of the caller's q where `q` is prepared (float32): tiles round it to 16 bits if that was 16 bits.
    window_left, chunk_size : int
        Positional rules; negative and 0 are off.
    soft_cap : float
        0 is off.
    sinks, alibi_slopes : array, shape [num_qo_heads], float32, optional
        In units of the natural logarithm.
    attn_mask : array, shape [batch or 1, heads or 1, rows or 1, keys or 1], optional
        bool, float16, bfloat16 or float32; any strides.
    rope_planes : pair of arrays, shape [positions, rope_dim / 2], float32, contiguous, optional
        cos and sin by which keys are rotated, half-split pairs, see `nbattn.rotary`; row 0 is of position
        `rope_origin`; q is rotated already.
    rope_k_scale : array, shape [num_kv_heads, head_dim_qk], float32, contiguous, optional
        What keys are multiplied by before they are rotated.
    v_scale : array, shape [num_kv_heads, head_dim_vo], float32, contiguous, optional
    v_unit : float
        A scale of all values, times `v_scale`.
    output_gate : array, shape [rows, num_qo_heads, head_dim_vo or 1], optional
        ``out * sigmoid(gate)``.
    lse_base : {"2", "e"}
    """

    scale: float
    query_dtype: str | None = None
    window_left: int = -1
    chunk_size: int = 0
    soft_cap: float = 0.0
    sinks: Array | None = None
    alibi_slopes: Array | None = None
    attn_mask: Array | None = None
    rope_planes: tuple[Array, Array] | None = None
    rope_origin: int = 0
    rope_k_scale: Array | None = None
    v_scale: Array | None = None
    v_unit: float = 1.0
    output_gate: Array | None = None
    lse_base: str = "2"


@cache
def kind_of(dtype: Any) -> int:
    """Return the run-time kind of a dtype."""
    return KINDS[str(dtype)]


def _fits_tile(device: Any, q: Array, k: Array, v: Array, options: AttentionOptions) -> bool:
    """Whether 16-byte rows of the cache and pairs of q are aligned, and q may be rounded to 16 bits."""
    query_dtype = options.query_dtype or dtype_name(q)
    if query_dtype not in ("float16", "bfloat16") or options.rope_planes is not None:
        return False
    if dtype_name(k) in ("float16", "bfloat16") and dtype_name(k) != query_dtype:
        return False
    bits = device.address(k) | device.address(v)
    for stride in (*k.strides[:3], *v.strides[:3]):
        bits |= stride
    query_bits = device.address(q) | q.strides[0] | q.strides[1]
    return not bits % 16 and not query_bits % (2 * q.dtype.itemsize)


def _query_values(device: Any, q: Array) -> tuple:
    return device.address(q), q.strides[0], q.strides[1], kind_of(q.dtype)


def _cache_values(device: Any, kv: Any, table: int, q: Array, scale: float) -> tuple:
    k, v = kv.k, kv.v
    num_kv_heads = k.shape[2]
    return (
        *(device.address(k), *k.strides[:3]),
        *(device.address(v), *v.strides[:3]),
        *(table, k.shape[0], k.shape[1]),
        *(k.shape[3], v.shape[3], q.shape[1] // num_kv_heads, q.shape[1], scale * LOG2E),
    )


def _feature_values(device: Any, options: AttentionOptions) -> tuple:
    slopes, mask = options.alibi_slopes, options.attn_mask
    mask_values: tuple = (0, 0, 0, 0, 0, 0)
    if mask is not None:
        strides = (stride if size > 1 else 0 for stride, size in zip(mask.strides, mask.shape, strict=True))
        mask_values = (device.address(mask), *strides, kind_of(mask.dtype))
    rope: tuple = (0, 0, 0, 0, 0)
    if options.rope_planes is not None:
        cos, sin = options.rope_planes
        k_scale = device.address(options.rope_k_scale) if options.rope_k_scale is not None else 0
        rope = (device.address(cos), device.address(sin), 2 * cos.shape[1], options.rope_origin, k_scale)
    cap = options.soft_cap * LOG2E
    return (
        *(options.window_left, options.chunk_size, cap, device.address(slopes) if slopes is not None else 0),
        *mask_values,
        *rope,
    )


def _gate_values(device: Any, gate: Array | None) -> tuple:
    if gate is None:
        return (0,) * 5
    step = gate.strides[2] if gate.shape[2] > 1 else 0
    return device.address(gate), gate.strides[0], gate.strides[1], step, kind_of(gate.dtype)


def result_values(device: Any, states: tuple[int, int], out: Array, lse: Array | None, options: Any) -> tuple:
    """Return the parameters of a result: see `_RESULT` of `parameters`; `states` are the addresses of partial ones."""
    sinks, v_scale, gate = options.sinks, options.v_scale, options.output_gate
    return (
        *states,
        *(device.address(out), *out.strides, kind_of(out.dtype)),
        *((device.address(lse), lse.strides[0], lse.strides[1]) if lse is not None else _NO_RESULT),
        LN2 if options.lse_base == "e" else 1.0,
        device.address(sinks) if sinks is not None else 0,
        device.address(v_scale) if v_scale is not None else 0,
        options.v_unit,
        *_gate_values(device, gate),
    )


def paged_specialisation(
    device: Any, q: Array, k: Array, v: Array, options: AttentionOptions, tile: str, most_pairs: int = PREFILL_ROWS
) -> tuple[str, dict[str, Any], int, int | None]:
    """Return (kernel family, its constants, (row, head) pairs of one block, shared bytes if they vary) for a call.

    Items have up to `most_pairs` pairs.
    """
    cache_dtype = dtype_name(k)
    size = head_size_class(cache_dtype, k.shape[3], v.shape[3])
    if size is None or not _fits_tile(device, q, k, v, options):
        return "paged_plain", {"cache": cache_dtype}, 1, shared_bytes_for(max(k.shape[3], v.shape[3]))
    features = bool(options.soft_cap) or options.alibi_slopes is not None or options.attn_mask is not None
    full = needs_full(cache_dtype, size, tile, features)
    constants = {"cache": cache_dtype, "head_dim": size, "full": full}
    family = paged_family(tile, cache_dtype, device.compute_capability)
    if family == "paged_wgmma":
        groups = wgmma_groups(size, full, most_pairs)
        return family, {**constants, "groups": groups}, groups * WARPGROUP_ROWS, None
    return family, constants, DECODE_ROWS if tile == "decode" else PREFILL_ROWS, None


class KernelCall(NamedTuple):
    """What `Device.launch` takes.

    Attributes
    ----------
    overlaps : bool
        Whether it may start before the kernel ahead of it ends: it waits for that one's results by itself.
    cluster : int
        Neighbouring blocks that form a cluster.
    """

    family: str
    constants: dict[str, Any]
    grid: tuple[int, int, int]
    values: tuple
    shared_bytes: int | None = None
    overlaps: bool = False
    cluster: int = 1


def paged_kernels(
    device: Any, metadata: PlanMetadata, q: Array, kvs: list[Any], tables: list[tuple[int, bool]],
    options: AttentionOptions, out: Array, lse: Array | None,
) -> Iterator[tuple[int, KernelCall]]:  # fmt: skip
    """Yield (level, kernel) of a plan: attention over every level's cache, and the merge.

    The arrays are those of `PagedCall`, `tables` the addresses of page ids and whether they are the caller's own array;
    addresses of partial states are left 0.
    """
    pointers = metadata.pointers
    rows = (pointers["position"], pointers["request"], pointers["index"])
    query, features = _query_values(device, q), _feature_values(device, options)
    result = result_values(device, (0, 0), out, lse, options)
    beside, crowded = False, _is_crowded(device, metadata, kvs[0].k.shape[2])
    for segment in metadata.segments:
        kv = kvs[segment.level]
        family, constants, pairs, shared_bytes = paged_specialisation(
            device, q, kv.k, kv.v, options, segment.tile, segment.pairs
        )
        clustered = segment.tile == "decode" and max(kv.head_dim_qk, kv.head_dim_vo) <= LARGEST_CLUSTERED_HEAD
        cluster = metadata.cluster if clustered else 1
        grid = (segment.count * kv.k.shape[2] * cluster, -(-segment.pairs // pairs), 1)
        if family == "paged_decode" and cluster == 1:
            blocks_each = grid[0] * grid[1] / device.multiprocessors
            shared_bytes = decode_shared_bytes(constants["head_dim"], blocks_each, crowded)
        table, is_callers = tables[segment.level]
        cache_values = _cache_values(device, kv, table, q, options.scale)
        waits = WAITS_NEVER if beside else WAITS_FIRST if is_callers else WAITS_FOR_DATA
        if waits == WAITS_FOR_DATA and family == "paged_decode":
            resident = device.multiprocessors * decode_shape(constants["cache"], constants["head_dim"]).blocks
            waits = WAITS_ASKING if math.prod(grid) <= resident else waits
        values = (segment.work, *rows, waits, *query, *cache_values, *features, *result)
        yield segment.level, KernelCall(family, constants, grid, values, shared_bytes, True, cluster)
        beside, crowded = beside or all(grid), crowded or constants.get("groups") == 2
    if metadata.num_merges:
        lists = tuple(pointers[name] for name in ("merge rows", "merge indptr", "merge slots"))
        layout = metadata.num_merges, metadata.most_states, q.shape[1], kvs[0].k.shape[2]
        yield 0, merge_kernel(device, lists, (0, 0), layout, result, out)


def _is_crowded(device: Any, metadata: PlanMetadata, num_kv_heads: int) -> bool:
    """Return whether decode tiles of several launches are more than two blocks for each multiprocessor."""
    items = [x.count * -(-x.pairs // DECODE_ROWS) for x in metadata.segments if x.tile == "decode"]
    return len(items) > 1 and sum(items) * num_kv_heads > 2 * device.multiprocessors


def run_gather(
    device: Any, parts: Parts, rows: Array, table: Array, q: Array, kv: Any, token_indices: Array, counts: Array,
    options: AttentionOptions, out: Array, lse: Array | None,
) -> tuple:  # fmt: skip
    """Run attention over index lists; return the buffers that must live until it has run.

    Parameters
    ----------
    device : Device
    parts : Parts
        How lists are cut; a list's true length is read on the device.
    rows : int32 array, shape [rows, 2]
        On the device: where the page ids of each row's request start, and its keys.
    table : int32 array
        Page ids on the device.
    q, kv, options, out, lse
        As for `PagedCall`; of the options only scale, sinks, v_scale, v_unit, output_gate and lse_base count.
    token_indices : int32 array, shape [rows, width]
        On the device, last axis contiguous.
    counts : int32 array, shape [rows]
        On the device, contiguous.
    """
    (num_rows, width), (heads, head_dim) = token_indices.shape, out.shape[1:]
    num_kv_heads = kv.k.shape[2]
    group = heads // num_kv_heads
    num_parts = num_rows * parts.splits
    buffers: tuple = ()
    states = (0, 0)
    if parts.splits > 1:
        buffers = device.empty((num_parts, heads, head_dim), "float32"), device.empty((num_parts, heads), "float32")
        states = device.address(buffers[0]), device.address(buffers[1])
    family, constants, pairs, shared_bytes = gather_specialisation(device, q, kv, options)
    result = result_values(device, states, out, lse, options)
    values = (
        *(device.address(rows), device.address(token_indices), token_indices.strides[0], device.address(counts)),
        *(num_rows, width, parts.splits, parts.size, int(parts.heads_last)),
        *_query_values(device, q),
        *_cache_values(device, kv, device.address(table), q, options.scale),
        *result,
    )
    device.launch(family, constants, (num_parts * num_kv_heads, -(-group // pairs), 1), values, shared_bytes, True)
    if parts.splits > 1:
        layout = num_rows, parts.splits, heads, num_kv_heads
        device.launch(*merge_kernel(device, (0, 0, 0), states, layout, result, out))
    return buffers


def gather_specialisation(
    device: Any, q: Array, kv: Any, options: AttentionOptions
) -> tuple[str, dict[str, Any], int, int | None]:
    """Return (kernel family, its constants, query heads of one block, shared bytes if they vary) for a call."""
    cache_dtype = dtype_name(kv.k)
    size = head_size_class(cache_dtype, kv.k.shape[3], kv.v.shape[3])
    if size is None or not _fits_tile(device, q, kv.k, kv.v, options):
        return "gather_plain", {"cache": cache_dtype}, 1, shared_bytes_for(max(kv.k.shape[3], kv.v.shape[3]))
    return "gather_attention", {"cache": cache_dtype, "head_dim": size}, DECODE_ROWS, None


def merge_kernel(
    device: Any, lists: tuple[int, ...], states: tuple[int, int], layout: tuple[int, int, int, int], result: tuple,
    out: Array,
) -> KernelCall:  # fmt: skip
    """Return the merge of float32 partial states into their rows.

    Parameters
    ----------
    lists : tuple of 3 addresses
        The merges' rows, indptr and slots; or zeros, where every row's states follow each other.
    states : (address of values, address of sums)
    layout : (merges, states of each or most of them where they are listed, num_qo_heads, num_kv_heads)
    result : tuple
        `result_values` of the call.
    """
    num_merges, num_states, heads, kv_heads = layout
    head_dim = out.shape[2]
    width = CHUNK_BYTES // 4 if packed(device, out, head_dim, CHUNK_BYTES // 4) else 1
    listed = lists[0] != 0
    rows = num_merges * heads
    constants, team, grid = merge_team(rows, head_dim, width, device.multiprocessors, num_states, listed)
    num_states = 0 if listed else num_states
    head_bytes = 4 * head_dim
    values = (
        *(states[0], num_states * heads * head_bytes, heads * head_bytes, head_bytes, 4, KINDS["float32"]),
        *(states[1], num_states * heads * 4, heads * 4, 4, KINDS["float32"]),
        *lists,
        *(num_merges, num_states, heads, heads // kv_heads, head_dim, *team),
        *result[2:7],
        *(*result[7:10], KINDS["float32"], 1.0, result[10]),
        *result[11:],
    )
    return KernelCall("merge_states", constants, grid, values, overlaps=True)


def packed(device: Any, array: Array, head_dim: int, width: int) -> bool:
    """Return whether rows ``[row, head, head_dim]`` are whole chunks of `width` numbers, each aligned to its size."""
    item = array.dtype.itemsize
    bits = device.address(array) | array.strides[0] | array.strides[1]
    return array.strides[2] == item and head_dim % width == 0 and bits % (width * item) == 0


def run_prepare(
    device: Any, q: Array, out: Array, rows: int, group_size: int, *, gain: Array | None = None, eps: float = 0.0,
    planes: tuple[Array, Array] | None = None, positions: int = 0, origin: int = 0, interleaved: bool = False,
    k_scale: Array | None = None,
) -> None:  # fmt: skip
    """Norm, rotate and scale the first `rows` rows of q into `out`, float32 of q's shape.

    gain, planes and k_scale are contiguous float32 arrays, `positions` the address of one int32 a row; row 0 of the
    planes is of position `origin`.
    """
    heads, head_dim = q.shape[1:]
    cos, sin = (device.address(x) for x in planes) if planes is not None else (0, 0)
    rope_dim, rope_rows = (2 * planes[0].shape[1], planes[0].shape[0]) if planes is not None else (0, 0)
    values = (
        *_query_values(device, q),
        *(device.address(out), out.strides[0], out.strides[1], rows, heads, group_size, head_dim),
        *(device.address(gain) if gain is not None else 0, eps),
        *(cos, sin, positions, rope_dim, rope_rows, origin, int(interleaved)),
        device.address(k_scale) if k_scale is not None else 0,
    )
    device.launch("prepare_query", {}, (-(-rows * heads // WARPS_OF_MERGE), 1, 1), values)


def run_append(
    device: Any, key: Array, value: Array, k: Array, v: Array, lists: tuple[int, ...], batch_size: int
) -> None:
    """Copy tokens ``[tokens, heads, dim]`` to their pages.

    `lists` are the addresses of batch_indices, positions, kv_indptr, kv_lens and kv_indices, all int32.
    """
    tokens, heads, head_dim = key.shape
    key_bytes, value_bytes = head_dim * key.dtype.itemsize, value.shape[2] * value.dtype.itemsize
    bits = key_bytes | value_bytes
    for array in (key, value, k, v):
        bits |= device.address(array)
        for stride in array.strides[:-1]:
            bits |= stride
    unit = next(size for size in (16, 4, 1) if not bits % size)
    values = (
        *(device.address(key), *key.strides[:2], device.address(value), *value.strides[:2]),
        *(device.address(k), *k.strides[:3], device.address(v), *v.strides[:3]),
        *lists,
        *(tokens, batch_size, heads, k.shape[0], k.shape[1], key_bytes, value_bytes),
    )
    device.launch("append_rows", {"unit": unit}, (-(-tokens * heads // WARPS_OF_MERGE), 1, 1), values)

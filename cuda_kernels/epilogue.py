"""What happens to a row after its last key: the sink, the scale of V, the gate and the cast, or a partial state."""

from __future__ import annotations

from collections.abc import Callable

from numba import cuda
from numba.cuda import float32, int32, int64, types, uint32
from numba.extending import register_jitable

from nbattn.cuda_kernels import ptx
from nbattn.cuda_kernels.formats import BF16, F32, load_number, store_number
from nbattn.cuda_kernels.loops import keep_rolled, unroll_fully
from nbattn.cuda_kernels.shapes import LARGEST_CLUSTER
from nbattn.indexing import idiv
from nbattn.scoring import LOG2E, exp2, shift, state_weight

EMPTY = float32(-float("inf"))  # the maximum and the lse of a row that has kept nothing


@register_jitable
def normalise(m, d_sum, sinks, qo_head):
    """Return (what the accumulator is multiplied by, base-2 lse) of a row, counting the head's sink if given."""
    top = m
    sink = EMPTY
    if sinks != int64(0):
        sink = ptx.load_f32(sinks + int64(qo_head) * int64(4)) * float32(LOG2E)
        top = ptx.maximum(m, sink)
    base = shift(top)
    weight = state_weight(m, base)
    total = d_sum * weight + state_weight(sink, base)
    if total == float32(0):
        return float32(0), EMPTY
    return ptx.divide(weight, total), top + ptx.log2_approx(total)


@register_jitable
def finished(value, dim, row, qo_head, kv_head, result):
    """Scale and gate one number of a row; `result` is a `groups.Result`."""
    value *= result.v_unit
    if result.v_scale != int64(0):
        value *= ptx.load_f32(result.v_scale + int64(kv_head * result.head_dim + dim) * int64(4))
    if result.gate != int64(0):
        address = result.gate + int64(row) * result.gate_row + int64(qo_head) * result.gate_head
        gate = load_number(address + int64(dim) * result.gate_dim, result.gate_kind)
        value = ptx.divide(value, exp2(gate * float32(-LOG2E)) + float32(1))  # times sigmoid(gate)
    return value


@register_jitable
def store_result(value, dim, row, qo_head, kv_head, result):
    """Scale, gate and cast one number of a finished row, and store it; `result` is a `groups.Result`."""
    value = finished(value, dim, row, qo_head, kv_head, result)
    address = result.out + int64(row) * result.out_row + int64(qo_head) * result.out_head
    store_number(address + int64(dim) * result.out_dim, result.out_kind, value)


@register_jitable
def store_four(value, dim, row, qo_head, kv_head, state, result):
    """Store four neighbouring numbers of a row, by one instruction where that is possible.

    They belong to the finished row, or, where it is not negative, to its partial `state`.
    """
    if state >= int32(0):
        slot = int64(state) * int64(result.num_qo_heads) + int64(qo_head)
        address = result.state_v + (slot * int64(result.head_dim) + int64(dim)) * int64(4)
        x0, x1 = ptx.float_bits(value[0]), ptx.float_bits(value[1])
        x2, x3 = ptx.float_bits(value[2]), ptx.float_bits(value[3])
        ptx.store_4u32(address, x0, x1, x2, x3)
        return
    item = int64(4) if result.out_kind == F32 else int64(2)
    address = result.out + int64(row) * result.out_row + int64(qo_head) * result.out_head + int64(dim) * item
    plain = result.v_scale == int64(0) and result.gate == int64(0) and result.out_dim == item
    if not plain or address & int64(7) != int64(0) or result.out_kind == F32:
        dim, row, qo_head = ptx.here_i32(dim), ptx.here_i32(row), ptx.here_i32(qo_head)  # or all would be found ahead
        for e in range(4):
            store_result(value[e], dim + int32(e), row, qo_head, kv_head, result)
    else:
        for e in range(4):
            value[e] *= result.v_unit
        if result.out_kind == BF16:
            low, high = ptx.pack_bf16(value[0], value[1]), ptx.pack_bf16(value[2], value[3])
        else:
            low, high = ptx.pack_f16(value[0], value[1]), ptx.pack_f16(value[2], value[3])
        ptx.store_2u32(address, low, high)


@register_jitable
def store_row_lse(row_lse, row, qo_head, state, result):
    """Store a row's log-sum-exp in base 2: with its partial `state`, or, if that is negative, as it is asked for."""
    if state >= int32(0):
        slot = int64(state) * int64(result.num_qo_heads) + int64(qo_head)
        ptx.store_f32(result.state_s + slot * int64(4), row_lse)
    elif result.lse != int64(0):
        address = result.lse + int64(row) * result.lse_row + int64(qo_head) * result.lse_head
        ptx.store_f32(address, row_lse * result.lse_unit)


def make_publish(out_dim: Callable, out_tiles: int, pitch: int, rows: int = 2) -> Callable:
    """Return the function by which a warp lays its tile's state down in shared memory, `rows` rows of each lane.

    Accumulators are ``[8 * rows, pitch / 4]`` float32, `partials` is ``[8 * rows, 2]``: maximum and sum of each row.
    """

    @register_jitable
    def publish(o, m, d_sum, accumulators, partials, lane):
        r, c = lane >> int32(2), lane & int32(3)
        for i in range(rows):
            row = r + int32(8 * i)
            total = d_sum[i] + ptx.exchange_f32(d_sum[i], int32(1))
            total += ptx.exchange_f32(total, int32(2))
            if c == int32(0):
                ptx.shared_store_2f32(partials + row * int32(8), m[i], total)
            for tile in range(out_tiles):
                for e in range(2):
                    at = accumulators + row * int32(pitch) + out_dim(tile, e, c) * int32(4)
                    ptx.shared_store_f32(at, o[4 * (out_tiles * (i // 2) + tile) + 2 * (i % 2) + e])

    return publish


def make_store_states(widened: bool, out_tiles: int, rows: int) -> Callable:
    """Return the function by which a warp stores its tile as partial states, `rows` rows of each lane.

    A lane holds two neighbouring dimensions of a result, or, where the cache is `widened`, four of two results.
    """

    @register_jitable
    def store_states(o, m, d_sum, lane, slot, count, result):
        """Lane i gives the slot of row i of the tile's first `count`, int64 in units of a head's values."""
        r, c = lane >> int32(2), lane & int32(3)
        for i in range(rows):
            row = r + int32(8 * i)
            total = d_sum[i] + ptx.exchange_f32(d_sum[i], int32(1))
            total += ptx.exchange_f32(total, int32(2))
            inverse, row_lse = normalise(m[i], total, int64(0), int32(0))
            slot_i = ptx.from_lane_i64(slot, row)
            if row < count:
                if c == int32(0):
                    ptx.store_f32(result.state_s + slot_i * int64(4), row_lse)
                address = result.state_v + slot_i * int64(result.head_dim * int32(4))
                address += int64(c * int32(16 if widened else 8))
                for tile in range(out_tiles):
                    x = o[4 * (out_tiles * (i // 2) + tile) + 2 * (i % 2)]
                    y = o[4 * (out_tiles * (i // 2) + tile) + 2 * (i % 2) + 1]
                    x, y = (x * inverse, y * inverse) if inverse != float32(0) else (float32(0), float32(0))
                    if int32(8 * tile) < result.head_dim:
                        if widened:
                            at = address + int64(64 * (tile // 2) + 4 * (tile % 2))
                            ptx.store_f32(at, x)
                            ptx.store_f32(at + int64(8), y)
                        else:
                            ptx.store_2f32(address + int64(32 * tile), x, y)
            unroll_fully()

    return store_states


def make_write_rows(warps: int, rows: int, part_bytes: int = 0) -> Callable:
    """Return the function by which a warp merges and writes what `warps` warps published of `rows` rows, at most 32.

    The accumulators of warp i lie ``i * part_bytes`` behind those of warp 0, its `partials` ``[i, rows, 2]``.
    """

    @register_jitable
    def write_rows(
        accumulators, pitch, partials, begin, step, count, lane, row, qo_head, kv_head, state, result
    ):  # fmt: skip
        """Write rows `begin`, ``begin + step``, ... of the tile's first `count`.

        Lane i < count gives row i's `row` and `qo_head`, and its partial `state`, negative where the row is finished
        here; it finds what the warps' parts of that row weigh. Then the lanes take four dimensions each, row by row.
        """
        own = int32(min(lane, count - int32(1)))
        weight = cuda.local.array(warps, types.float32)
        m = EMPTY
        for w in range(warps):
            m = ptx.maximum(m, ptx.shared_load_f32(partials + (int32(rows * w) + own) * int32(8)))
        base = shift(m)
        d_sum = float32(0)
        for w in range(warps):
            at = partials + (int32(rows * w) + own) * int32(8)
            weight[w] = state_weight(ptx.shared_load_f32(at), base)
            d_sum += ptx.shared_load_f32(at + int32(4)) * weight[w]
        partial = state >= int32(0)
        inverse, row_lse = normalise(m, d_sum, int64(0) if partial else result.sinks, qo_head)
        for w in range(warps):
            weight[w] = weight[w] * inverse if inverse != float32(0) else float32(0)
        if lane < count and begin == int32(0):
            store_row_lse(row_lse, row, qo_head, state, result)
        value, factor = cuda.local.array(4, types.float32), cuda.local.array(warps, types.float32)
        tile_row = begin
        while tile_row < count:
            row_now, head_now = ptx.from_lane_i32(row, tile_row), ptx.from_lane_i32(qo_head, tile_row)
            state_now = ptx.from_lane_i32(state, tile_row)
            for w in range(warps):
                factor[w] = ptx.from_lane_f32(weight[w], tile_row)
            dim = int32(int32(4) * lane)
            while dim < result.head_dim:
                for e in range(4):
                    value[e] = float32(0)
                for w in range(warps):
                    if factor[w] != float32(0):  # a warp without keys has summed nothing
                        at = accumulators + int32(w * part_bytes) + tile_row * pitch + dim * int32(4)
                        x0, x1, x2, x3 = ptx.shared_load_4u32(at)
                        value[0] += factor[w] * ptx.bits_float(x0)
                        value[1] += factor[w] * ptx.bits_float(x1)
                        value[2] += factor[w] * ptx.bits_float(x2)
                        value[3] += factor[w] * ptx.bits_float(x3)
                store_four(value, dim, row_now, head_now, kv_head, state_now, result)
                dim = int32(dim + int32(128))
                keep_rolled()
            tile_row = int32(tile_row + step)
            keep_rolled()

    return write_rows


def make_write_row(warps: int, rows: int) -> Callable:
    """Return the function by which a warp merges what `warps` warps published of one of `rows` rows, and writes it."""

    @register_jitable
    def write_row(accumulators, pitch, partials, tile_row, lane, row, qo_head, kv_head, state, result):
        """Write query row `row` of head `qo_head`: as partial state `state`, or finished if that is negative.

        A row of accumulators takes `pitch` bytes; `result` is a `groups.Result`.
        """
        weight = cuda.local.array(warps, types.float32)
        m = EMPTY
        for w in range(warps):
            m = ptx.maximum(m, ptx.shared_load_f32(partials + (int32(rows * w) + tile_row) * int32(8)))
        base = shift(m)
        d_sum = float32(0)
        for w in range(warps):
            at = partials + (int32(rows * w) + tile_row) * int32(8)
            weight[w] = state_weight(ptx.shared_load_f32(at), base)
            d_sum += ptx.shared_load_f32(at + int32(4)) * weight[w]
        partial = state >= int32(0)
        inverse, row_lse = normalise(m, d_sum, int64(0) if partial else result.sinks, qo_head)
        slot = int64(state) * int64(result.num_qo_heads) + int64(qo_head)
        if lane == int32(0):
            store_row_lse(row_lse, row, qo_head, state, result)
        dim = lane
        while dim < result.head_dim:
            value = float32(0)
            for w in range(warps):
                if weight[w] != float32(0):  # a warp without keys has summed nothing
                    at = accumulators + (int32(rows * w) + tile_row) * pitch + dim * int32(4)
                    value += weight[w] * ptx.shared_load_f32(at)
            value = value * inverse if inverse != float32(0) else float32(0)
            if partial:
                ptx.store_f32(result.state_v + (slot * int64(result.head_dim) + int64(dim)) * int64(4), value)
            else:
                store_result(value, dim, row, qo_head, kv_head, result)
            dim += int32(32)

    return write_row


def make_write_shares(warps: int, part_rows: int, part_bytes: int) -> Callable:
    """Return the function by which a cluster's blocks merge and write what all their warps have published.

    The parts of a row, `warps` of each block, a power of two, are summed in an order that follows from the cluster's
    size alone. A block's parts lie as `make_write_rows` has them; `part_bytes` of 0 stands for one row of accumulators.
    """
    PARTS, WARP_BITS = LARGEST_CLUSTER * warps, warps.bit_length() - 1
    OWN = PARTS // 32  # parts whose weight a lane finds
    TURNS, WORDS = PARTS // 8, 4 * PARTS // 8  # 8 parts are read at a time, 16 dimensions of each

    @register_jitable
    def find_parts(places, weight_places, accumulators, pitch, partials, task, segments, parts, lane):
        """Find where the lane's parts of a task lie, and the weights it looks after; return the task's row and dim.

        Where a row has fewer parts, the last one is read again.
        """
        tile_row = idiv(task, segments)
        dim = int32(((task - tile_row * segments) << int32(4)) + ((lane & int32(3)) << int32(2)))
        at = int32(accumulators + tile_row * pitch + (dim << int32(2)))
        for i in range(TURNS):
            part = int32(min(int32((lane >> int32(2)) + int32(8 * i)), parts - int32(1)))
            place = at + (part & int32(warps - 1)) * (int32(part_bytes) if part_bytes else pitch)
            places[i] = ptx.remote_address(place, part >> int32(WARP_BITS))
        for i in range(OWN):
            part = int32(min(int32(lane + int32(32 * i)), parts - int32(1)))
            place = partials + ((part & int32(warps - 1)) * int32(part_rows) + tile_row) * int32(8)
            weight_places[i] = ptx.remote_address(place, part >> int32(WARP_BITS))
        return tile_row, dim

    @register_jitable
    def weigh_parts(weight, places, parts, lane):
        """Let lane i find what parts i, i + 32, ... of a row weigh; return the row's maximum and denominator."""
        d_part = cuda.local.array(OWN, types.float32)
        m, d_sum = EMPTY, float32(0)
        for i in range(OWN):
            weight[i], d_part[i] = ptx.remote_load_2f32(places[i])
            if int32(lane + int32(32 * i)) >= parts:
                weight[i], d_part[i] = EMPTY, float32(0)
            m = ptx.maximum(m, weight[i])
        for distance in (16, 8, 4, 2, 1):
            m = ptx.maximum(m, ptx.exchange_f32(m, int32(distance)))
        base = shift(m)
        for i in range(OWN):
            weight[i] = state_weight(weight[i], base)
            d_sum += d_part[i] * weight[i]
        for distance in (16, 8, 4, 2, 1):
            d_sum += ptx.exchange_f32(d_sum, int32(distance))
        return m, d_sum

    @register_jitable
    def write_shares(
        accumulators, pitch, partials, unit, parts, count, lane, row, qo_head, kv_head, state, result
    ):  # fmt: skip
        """Write tasks `unit`, ``unit + parts``, ... of the cluster's: 16 dimensions of a row each, of a multiple of 16.

        The block has arrived at the cluster's barrier. Lane i < count gives row i's `row`, `qo_head` and `state` as for
        `write_rows`. Four lanes hold the dimensions of a part, so that the warp reads eight parts at a time.
        """
        weight, value = cuda.local.array(OWN, types.float32), cuda.local.array(4, types.float32)
        words = cuda.local.array(WORDS, types.uint32)
        places, weight_places = cuda.local.array(TURNS, types.int32), cuda.local.array(OWN, types.int32)
        group, segments = lane >> int32(2), result.head_dim >> int32(4)
        task, tasks = unit, int32(count * segments)
        tile_row, dim = find_parts(places, weight_places, accumulators, pitch, partials, min(task, tasks - int32(1)),
                                   segments, parts, lane)  # fmt: skip
        ptx.wait_cluster()
        while task < tasks:
            for i in range(TURNS):
                words[4 * i], words[4 * i + 1], words[4 * i + 2], words[4 * i + 3] = ptx.remote_load_4u32(places[i])
            m, d_sum = weigh_parts(weight, weight_places, parts, lane)
            row_now, head_now = ptx.from_lane_i32(row, tile_row), ptx.from_lane_i32(qo_head, tile_row)
            state_now = ptx.from_lane_i32(state, tile_row)
            inverse, row_lse = normalise(m, d_sum, int64(0) if state_now >= int32(0) else result.sinks, head_now)
            for e in range(4):
                value[e] = float32(0)
            for i in range(TURNS):
                factor = ptx.from_lane_f32(weight[i // 4], group + int32(8 * (i % 4)))
                kept = (
                    uint32(0xFFFFFFFF) if factor != float32(0) else uint32(0)
                )  # a part without keys has summed nothing
                for e in range(4):  # every word is waited for, so that none is read when its block has left
                    value[e] += factor * ptx.bits_float(words[4 * i + e] & kept)
            for e in range(4):
                for distance in (4, 8, 16):
                    value[e] += ptx.exchange_f32(value[e], int32(distance))
                value[e] = value[e] * inverse if inverse != float32(0) else float32(0)
            if group == int32(0):
                store_four(value, dim, row_now, head_now, kv_head, state_now, result)
            if dim == int32(0) and group == int32(0):
                store_row_lse(row_lse, row_now, head_now, state_now, result)
            task = int32(task + parts)
            if task < tasks:
                tile_row, dim = find_parts(places, weight_places, accumulators, pitch, partials, task, segments, parts,
                                           lane)  # fmt: skip
            keep_rolled()

    return write_shares

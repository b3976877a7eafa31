"""Merge partial attention states: any number per row, each value read once.

A lane takes a chunk of one (row, head)'s dimensions, a group of lanes a whole one, several groups its states. States
go in batches, whose loads are all under way before the first is used.

The user's `merge_states` and the engine's last step are two kernels of one function: the one's states stand at equal
distances, the other's are float32 in slots that lists name. Of listed states, batch i belongs to stream ``i % 8``;
however many groups share the streams, each is summed in its own order and the streams one after the other, so that the
bits of a row depend on its own states alone.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import NamedTuple

from numba import cuda
from numba.cuda import float32, int32, int64, types
from numba.extending import register_jitable

from nbattn.cuda_kernels import ptx
from nbattn.cuda_kernels.chunks import make_chunk
from nbattn.cuda_kernels.compile import Kernel
from nbattn.cuda_kernels.epilogue import EMPTY, finished, normalise
from nbattn.cuda_kernels.formats import F32, store_lse
from nbattn.cuda_kernels.groups import Result
from nbattn.cuda_kernels.loops import keep_rolled
from nbattn.cuda_kernels.rows import element
from nbattn.cuda_kernels.shapes import CHUNK_BYTES, LINE_BYTES, MERGE_STREAMS, merge_shape
from nbattn.indexing import idiv
from nbattn.scoring import shift, state_weight

STREAMS = MERGE_STREAMS
LINE = LINE_BYTES // CHUNK_BYTES  # lanes whose chunks share a line


class States(NamedTuple):
    """The states of one (row, head): addresses of the lane's chunk and of the log-sum-exp, and the list of slots."""

    v: int
    v_step: int
    v_kind: int
    s: int
    s_step: int
    s_kind: int
    s_unit: float
    slots: int


def make_take_batch(chunk: SimpleNamespace, batch: int, full: bool) -> Callable:
    """Return the function that takes `batch` states, all of which exist if `full`."""
    WIDTH, WORDS, BATCH_WORDS = chunk.WIDTH, chunk.WORDS, batch * chunk.WORDS
    load, load_if, load_lse, load_lse_if = chunk.load, chunk.load_if, chunk.load_lse, chunk.load_lse_if
    drop, add = chunk.drop, chunk.add

    @register_jitable
    def take_batch(value, m, d_sum, at, count, v_at, s_at, states):
        """Take states ``at, at + 1, ...`` of `count`, at these addresses, into a running sum.

        Return its new maximum and denominator.
        """
        score, words = cuda.local.array(batch, types.float32), cuda.local.array(BATCH_WORDS, types.uint32)
        for j in range(batch):
            if full:
                score[j] = load_lse(s_at[j], states.s_kind)
                load(words, j * WORDS, v_at[j], states.v_kind)
            else:
                wanted = int32(at + int32(j)) < count
                score[j] = load_lse_if(s_at[j], states.s_kind, wanted)
                load_if(words, j * WORDS, v_at[j], states.v_kind, wanted)
        top = m
        for j in range(batch):
            score[j] *= states.s_unit
            top = ptx.maximum(top, score[j])
        base = shift(top)
        if m != EMPTY:  # not the first
            alpha = state_weight(m, base)
            d_sum *= alpha
            for e in range(WIDTH):
                value[e] = value[e] * alpha if alpha != float32(0) else float32(0)
        for j in range(batch):
            score[j] = state_weight(score[j], base)
            d_sum += score[j]
        drop(words, score)
        add(value, words, score, states.v_kind)
        return top, d_sum

    return take_batch


def make_find_states(chunk: SimpleNamespace, batch: int, always_listed: bool) -> Callable:
    """Return the function that finds where the states of a batch are, in slots that may be listed."""
    at_index = chunk.at

    @register_jitable
    def find_states(v_at, s_at, at, count, states):
        """Find states ``at, at + 1, ...`` of `count`; without a list, a state is in its own place."""
        slot = cuda.local.array(batch, types.int32)
        for j in range(batch):
            slot[j] = int32(min(int32(at + int32(j)), count - int32(1)))
            if always_listed or states.slots != int64(0):
                slot[j] = element(states.slots, slot[j])
        for j in range(batch):
            v_at[j], s_at[j] = at_index(states.v, slot[j], states.v_step), at_index(states.s, slot[j], states.s_step)

    return find_states


@register_jitable
def fold_number(kept, a, new, b):
    """Return ``a * kept + b * new``, in which a factor of 0 selects its number away."""
    kept = kept * a if a != float32(0) else float32(0)
    return kept + new * b if b != float32(0) else kept


def make_shelf(width: int) -> SimpleNamespace:
    """Return how a thread's sum is put into its place in shared memory, and how a sum there is folded into another."""
    HALVES = max(width // 4, 1)

    @register_jitable
    def put(place, value):
        if width == 1:
            ptx.shared_store_f32(place, value[0])
        else:
            for h in range(HALVES):
                e = 4 * h
                ptx.shared_store_4f32(place + int32(16 * h), value[e], value[e + 1], value[e + 2], value[e + 3])

    @register_jitable
    def fold(value, place, a, b, is_new):
        """Fold the sum at `place`, of factor `b` if it `is_new`, else `a`, and `value`, of the other, into `value`."""
        if width == 1:
            other = ptx.shared_load_f32(place)
            value[0] = fold_number(value[0], a, other, b) if is_new else fold_number(other, a, value[0], b)
        else:
            for h in range(HALVES):
                words = ptx.shared_load_4u32(place + int32(16 * h))
                for i in range(4):
                    other, own = ptx.bits_float(words[i]), value[4 * h + i]
                    value[4 * h + i] = fold_number(own, a, other, b) if is_new else fold_number(other, a, own, b)

    return SimpleNamespace(put=put, fold=fold)


def make_sum_of_group(chunk: SimpleNamespace, batch: int) -> Callable:
    """Return the function by which a group of lanes sums its share of states that stand at equal distances."""
    WIDTH, at_index = chunk.WIDTH, chunk.at
    take_full, take_some = make_take_batch(chunk, batch, True), make_take_batch(chunk, batch, False)

    @register_jitable
    def sum_of_group(value, count, group, groups, place, v_at, s_at, states):
        """Sum batches `group`, ``group + groups``, ... into `value`; return their maximum and denominator."""
        m, d_sum = EMPTY, float32(0)
        for e in range(WIDTH):
            value[e] = float32(0)
        at = int32(group * int32(batch))
        while at < count:
            for j in range(batch):
                v_at[j] = at_index(states.v, int32(at + int32(j)), states.v_step)
                s_at[j] = at_index(states.s, int32(at + int32(j)), states.s_step)
            if at + int32(batch) <= count:
                m, d_sum = take_full(value, m, d_sum, at, count, v_at, s_at, states)
            else:
                m, d_sum = take_some(value, m, d_sum, at, count, v_at, s_at, states)
            at = int32(at + groups * int32(batch))
            keep_rolled()
        return m, d_sum

    return sum_of_group


def make_sum_of_streams(chunk: SimpleNamespace, shelf: SimpleNamespace, batch: int, find_states: Callable) -> Callable:
    """Return the function by which a group of lanes sums its streams of listed states."""
    WIDTH, put, fold = chunk.WIDTH, shelf.put, shelf.fold
    take_some = make_take_batch(chunk, batch, False)

    @register_jitable
    def sum_of_streams(value, count, group, groups, place, v_at, s_at, states):
        """Sum a group's streams one after the other into `value`; return their maximum and denominator.

        `v_at` and `s_at` say where the first batch is.
        """
        top, total = EMPTY, float32(0)
        for e in range(WIDTH):
            value[e] = float32(0)
        stream = group
        while stream < int32(STREAMS) and stream * int32(batch) < count:
            if stream != group:
                put(place, value)
                for e in range(WIDTH):
                    value[e] = float32(0)
            m, d_sum = EMPTY, float32(0)
            at = int32(stream * int32(batch))
            while at < count:
                m, d_sum = take_some(value, m, d_sum, at, count, v_at, s_at, states)
                next_at = int32(at + int32(STREAMS * batch))
                next_at = next_at if next_at < count else int32((stream + groups) * int32(batch))
                if next_at < count:
                    find_states(v_at, s_at, next_at, count, states)
                at = int32(at + int32(STREAMS * batch))
                keep_rolled()
            if stream == group:
                top, total = m, d_sum
            else:
                higher = ptx.maximum(top, m)
                a, b = state_weight(top, shift(higher)), state_weight(m, shift(higher))
                fold(value, place, a, b, False)
                top, total = higher, total * a + d_sum * b
            stream = int32(stream + groups)
            keep_rolled()
        return top, total

    return sum_of_streams


def make(vector: bool, listed: bool) -> Kernel:
    """Return the kernel.

    Parameters
    ----------
    vector : bool
        Chunks of 16 bytes, see `make_chunk`.
    listed : bool
        States are in slots that lists name, and float32 if `vector`; else they stand at equal distances. Without
        `vector` it serves both.
    """
    THREADS, BATCH, BLOCKS = merge_shape(listed)
    ONE_KIND = vector and listed
    chunk = make_chunk(vector, BATCH, 4 if ONE_KIND else 8)
    shelf = make_shelf(chunk.WIDTH)
    WIDTH, width, at, store, put, fold = chunk.WIDTH, chunk.width, chunk.at, chunk.store, shelf.put, shelf.fold
    find_states = make_find_states(chunk, BATCH, vector)
    sum_states = make_sum_of_streams(chunk, shelf, BATCH, find_states) if listed else make_sum_of_group(chunk, BATCH)
    PARTIALS = 4 * THREADS * WIDTH  # in shared memory, after the values
    SHARED = PARTIALS + 8 * THREADS

    @register_jitable
    def sum_groups(value, top, total, shared, thread, group, groups, lane_bits):
        """Sum the streams that the groups have summed, into `value` of group 0; return maximum and denominator."""
        put(shared + thread * int32(4 * WIDTH), value)
        ptx.shared_store_2f32(shared + int32(PARTIALS) + thread * int32(8), top, total)
        ptx.sync_block()
        if group == int32(0):
            for other in range(1, groups):
                neighbour = int32(thread + (int32(other) << lane_bits))
                at = shared + int32(PARTIALS) + neighbour * int32(8)
                m, d_sum = ptx.shared_load_f32(at), ptx.shared_load_f32(at + int32(4))
                higher = ptx.maximum(top, m)
                a, b = state_weight(top, shift(higher)), state_weight(m, shift(higher))
                fold(value, shared + neighbour * int32(4 * WIDTH), a, b, True)
                top, total = higher, total * a + d_sum * b
                keep_rolled()  # instructions that run once are waited for one by one
        return top, total

    def merge_states(
        v, v_row, v_state, v_head, v_dim, v_kind, s, s_row, s_state, s_head, s_kind, merge_rows, merge_indptr,
        merge_slots, num_rows, num_states, num_heads, group_size, head_dim, lane_bits, group_bits, asks_early, out,
        out_row, out_head, out_dim, out_kind, lse, lse_row, lse_head, lse_kind, s_unit, lse_unit, sinks, v_scale,
        v_unit, gate, gate_row, gate_head, gate_dim, gate_kind,
    ):  # fmt: skip
        thread, team_bits = int32(cuda.threadIdx.x), int32(lane_bits + group_bits)
        lanes, groups = int32(int32(1) << lane_bits), int32(int32(1) << group_bits)
        lane, group = int32(thread & (lanes - int32(1))), int32((thread >> lane_bits) & (groups - int32(1)))
        task = int32(cuda.blockIdx.x * (int32(THREADS) >> team_bits) + (thread >> team_bits))
        place = idiv(task, num_heads)
        head = int32(task - place * num_heads)
        row, begin, count = place, int32(0), num_states
        if place >= num_rows:
            row = int32(-1)
        elif merge_rows != int64(0):
            row = element(merge_rows, place)  # -1: room that the plan keeps for later
            begin = element(merge_indptr, place)
            count = int32(element(merge_indptr, place + int32(1)) - begin)
        count = count if row >= int32(0) else int32(0)
        slots = merge_slots + int64(begin) * int64(4) if merge_slots != int64(0) else int64(0)
        v_kind, s_kind = (int32(F32), int32(F32)) if ONE_KIND else (v_kind, s_kind)
        v += int64(head) * v_head + (int64(row) * v_row if merge_rows == int64(0) else int64(0))
        s += int64(head) * s_head + (int64(row) * s_row if merge_rows == int64(0) else int64(0))
        result = Result(num_heads, head_dim, int64(0), int64(0), out, out_row, out_head, out_dim, out_kind, lse,
                        lse_row, lse_head, lse_unit, sinks, v_scale, v_unit, gate, gate_row, gate_head, gate_dim,
                        gate_kind)  # fmt: skip
        shared = ptx.shared_address(cuda.shared.array(0, types.uint8, 128))
        value = cuda.local.array(WIDTH, types.float32)

        dim = int32((cuda.blockIdx.y * lanes + lane) * width(v_kind))
        inside = dim < head_dim and row >= int32(0)
        dim = int32(min(dim, head_dim - width(v_kind)))  # a lane without a chunk reads another's
        states = States(v + int64(dim) * v_dim, v_state, v_kind, s, s_state, s_kind, s_unit, slots)
        place = shared + thread * int32(4 * WIDTH)
        v_at, s_at = cuda.local.array(BATCH, types.int64), cuda.local.array(BATCH, types.int64)
        ptx.let_next_start()  # what comes next waits for this merge, and so for what this one waits for
        if listed and group * int32(BATCH) < count:
            find_states(v_at, s_at, group * int32(BATCH), count, states)
        if not listed and asks_early != int32(0) and group * int32(BATCH) < count:
            # of the lanes whose chunks share a line, each asks for another state's
            early = int32(min(group * int32(BATCH) + (lane & int32(LINE - 1)), count - int32(1)))
            ptx.prefetch(at(states.v, early, v_state))
        ptx.wait_for_earlier()  # the plan's lists are there before, the states are not
        top, total = sum_states(value, count, group, groups, place, v_at, s_at, states)
        if groups > int32(1):
            top, total = sum_groups(value, top, total, shared, thread, group, groups, lane_bits)
        if group == int32(0) and inside:
            inverse, row_lse = normalise(top, total, sinks, head)
            for e in range(WIDTH):
                value[e] = value[e] * inverse if inverse != float32(0) else float32(0)
            if v_scale == int64(0) and gate == int64(0):
                for e in range(WIDTH):
                    value[e] *= v_unit
            else:
                kv_head = idiv(ptx.here_i32(head), group_size)
                for e in range(WIDTH):
                    if int32(e) < width(v_kind):
                        value[e] = finished(value[e], dim + int32(e), row, head, kv_head, result)
            address = out + int64(row) * out_row + int64(head) * out_head
            store(address + int64(dim) * out_dim, out_kind, value, v_kind)
            if dim == int32(0) and lse != int64(0):
                store_lse(lse + int64(row) * lse_row + int64(head) * lse_head, lse_kind, row_lse * lse_unit)

    return Kernel(merge_states, THREADS, BLOCKS, SHARED)

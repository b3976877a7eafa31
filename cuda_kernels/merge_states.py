"""Merge partial attention states: any number per row, each value read once.

A lane takes a chunk of one (row, head)'s dimensions, a group of lanes a whole one, several groups its states. States
go in batches of 8, whose loads are all under way before the first is used; batch i belongs to stream ``i % 8``.
However many groups share the streams, a stream is summed in its own order and the streams one after the other, so the
bits of a row depend on its own states alone.

The engine's last step and the user's `merge_states` are the same kernel: the one names its states by lists of slots,
the other by their place.
"""

from __future__ import annotations

from typing import NamedTuple

from numba import cuda
from numba.cuda import float32, int32, int64, types
from numba.extending import register_jitable

from nbattn.cuda_kernels import ptx
from nbattn.cuda_kernels.chunks import make_chunk
from nbattn.cuda_kernels.compile import Kernel
from nbattn.cuda_kernels.epilogue import EMPTY, finished, normalise
from nbattn.cuda_kernels.formats import store_lse
from nbattn.cuda_kernels.groups import Result
from nbattn.cuda_kernels.loops import keep_rolled
from nbattn.cuda_kernels.rows import element
from nbattn.cuda_kernels.shapes import MERGE_BATCH, MERGE_STREAMS, MERGE_THREADS
from nbattn.indexing import idiv
from nbattn.scoring import shift, state_weight

THREADS, BATCH, STREAMS = MERGE_THREADS, MERGE_BATCH, MERGE_STREAMS
STRIDE = BATCH * STREAMS  # from one batch of a stream to its next


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


def make(vector: bool) -> Kernel:
    """Return the kernel; `vector`: chunks of 16 bytes, see `make_chunk`."""
    chunk = make_chunk(vector, BATCH)
    WIDTH, WORDS, width, load, load_lse = chunk.WIDTH, chunk.WORDS, chunk.width, chunk.load, chunk.load_lse
    add, store = chunk.add, chunk.store
    PARTIALS = 4 * THREADS * WIDTH  # in shared memory, after the values
    SHARED = PARTIALS + 8 * THREADS
    BATCH_WORDS = BATCH * WORDS

    @register_jitable
    def take_batch(value, m, d_sum, at, count, inside, states):
        """Take states ``at ... at + 7`` of `count` into a running sum; return its new maximum and denominator."""
        slot, score = cuda.local.array(BATCH, types.int32), cuda.local.array(BATCH, types.float32)
        words = cuda.local.array(BATCH_WORDS, types.uint32)
        for j in range(BATCH):
            slot[j] = int32(at + int32(j))
            if states.slots != int64(0):
                slot[j] = element(states.slots, min(slot[j], count - int32(1)))
        for j in range(BATCH):
            wanted = int32(at + int32(j)) < count
            score[j] = load_lse(states.s + int64(slot[j]) * states.s_step, states.s_kind, wanted) * states.s_unit
            load(words, j * WORDS, states.v + int64(slot[j]) * states.v_step, states.v_kind, wanted and inside)
        top = m
        for j in range(BATCH):
            top = ptx.maximum(top, score[j])
        base = shift(top)
        alpha = state_weight(m, base)
        d_sum *= alpha
        for e in range(WIDTH):
            value[e] = value[e] * alpha if alpha != float32(0) else float32(0)
        for j in range(BATCH):
            score[j] = state_weight(score[j], base)
            d_sum += score[j]
        add(value, words, score, states.v_kind)  # an empty state's values are selected away
        return top, d_sum

    @register_jitable
    def fold(whole, top, total, value, m, d_sum):
        """Take a stream's sum into the row's; return the row's new maximum and denominator."""
        higher = ptx.maximum(top, m)
        base = shift(higher)
        a, b = state_weight(top, base), state_weight(m, base)
        for e in range(WIDTH):
            kept = whole[e] * a if a != float32(0) else float32(0)
            whole[e] = kept + value[e] * b if b != float32(0) else kept
        return higher, total * a + d_sum * b

    @register_jitable
    def share(whole, top, total, value, shared, thread, group, groups, lane_bits):
        """Take the other groups' sums into those of group 0; return its maximum and denominator."""
        place = shared + thread * int32(4 * WIDTH)
        if WIDTH == 1:
            ptx.shared_store_f32(place, whole[0])
        else:
            for e in range(0, WIDTH, 4):
                ptx.shared_store_4f32(place + int32(4 * e), whole[e], whole[e + 1], whole[e + 2], whole[e + 3])
        ptx.shared_store_2f32(shared + int32(PARTIALS) + thread * int32(8), top, total)
        ptx.sync_block()
        other = groups if group != int32(0) else int32(1)
        while other < groups:
            neighbour = int32(thread + (other << lane_bits))
            for e in range(WIDTH):
                value[e] = ptx.shared_load_f32(shared + (neighbour * int32(WIDTH) + int32(e)) * int32(4))
            at = shared + int32(PARTIALS) + neighbour * int32(8)
            m, d_sum = ptx.shared_load_f32(at), ptx.shared_load_f32(at + int32(4))
            top, total = fold(whole, top, total, value, m, d_sum)
            other = int32(other + int32(1))
            keep_rolled()
        return top, total

    def merge_states(
        v, v_row, v_state, v_head, v_dim, v_kind, s, s_row, s_state, s_head, s_kind, merge_rows, merge_indptr,
        merge_slots, num_rows, num_states, num_heads, group_size, head_dim, lane_bits, group_bits, out, out_row,
        out_head, out_dim, out_kind, lse, lse_row, lse_head, lse_kind, s_unit, lse_unit, sinks, v_scale, v_unit, gate,
        gate_row, gate_head, gate_dim, gate_kind,
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
        v += int64(head) * v_head + (int64(row) * v_row if merge_rows == int64(0) else int64(0))
        s += int64(head) * s_head + (int64(row) * s_row if merge_rows == int64(0) else int64(0))
        result = Result(num_heads, head_dim, int64(0), int64(0), out, out_row, out_head, out_dim, out_kind, lse,
                        lse_row, lse_head, lse_unit, sinks, v_scale, v_unit, gate, gate_row, gate_head, gate_dim,
                        gate_kind)  # fmt: skip
        shared = ptx.shared_address(cuda.shared.array(0, types.uint8, 128))
        whole, value = cuda.local.array(WIDTH, types.float32), cuda.local.array(WIDTH, types.float32)

        first = int32(0)
        while first < head_dim:  # the lanes' chunks at a time
            dim = int32(first + lane * width(v_kind))
            inside = dim < head_dim
            states = States(v + int64(dim) * v_dim, v_state, v_kind, s, s_state, s_kind, s_unit, slots)
            top, total = EMPTY, float32(0)
            for e in range(WIDTH):
                whole[e] = float32(0)
            stream = group
            while stream < int32(STREAMS) and stream * int32(BATCH) < count:
                m, d_sum = EMPTY, float32(0)
                for e in range(WIDTH):
                    value[e] = float32(0)
                at = int32(stream * int32(BATCH))
                while at < count:
                    m, d_sum = take_batch(value, m, d_sum, at, count, inside, states)
                    at = int32(at + int32(STRIDE))
                    keep_rolled()
                top, total = fold(whole, top, total, value, m, d_sum)
                stream = int32(stream + groups)
                keep_rolled()
            if groups > int32(1):
                if first > int32(0):
                    ptx.sync_block()  # the last chunks' sums have been read
                top, total = share(whole, top, total, value, shared, thread, group, groups, lane_bits)
            if group == int32(0) and row >= int32(0):
                inverse, row_lse = normalise(top, total, sinks, head)
                kv_head = idiv(head, group_size)
                if inside:
                    for e in range(WIDTH):
                        merged = whole[e] * inverse if inverse != float32(0) else float32(0)
                        if int32(e) < width(v_kind):
                            merged = finished(merged, dim + int32(e), row, head, kv_head, result)
                        value[e] = merged
                    address = out + int64(row) * out_row + int64(head) * out_head
                    store(address + int64(dim) * out_dim, out_kind, value, v_kind)
                if first == int32(0) and lane == int32(0) and lse != int64(0):
                    store_lse(lse + int64(row) * lse_row + int64(head) * lse_head, lse_kind, row_lse * lse_unit)
            first = int32(first + lanes * width(v_kind))
            keep_rolled()

    return Kernel(merge_states, THREADS, 2 if vector else 3, SHARED)

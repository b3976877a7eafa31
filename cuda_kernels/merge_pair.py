"""Merge two states of every (row, head), also in place: every number is read and written by one lane."""

from __future__ import annotations

from numba import cuda
from numba.cuda import float32, int32, int64, types, uint32
from numba.extending import register_jitable

from nbattn.cuda_kernels import ptx
from nbattn.cuda_kernels.chunks import make_chunk
from nbattn.cuda_kernels.compile import Kernel
from nbattn.cuda_kernels.epilogue import EMPTY
from nbattn.cuda_kernels.formats import store_lse
from nbattn.cuda_kernels.loops import keep_rolled, unroll_fully
from nbattn.cuda_kernels.shapes import CHUNK_BYTES, LINE_BYTES, PAIR_BLOCKS, PAIR_TASKS, PAIR_THREADS
from nbattn.indexing import idiv
from nbattn.scoring import shift, state_weight

THREADS, LINE = PAIR_THREADS, LINE_BYTES // CHUNK_BYTES  # lanes whose chunks share a line


@register_jitable
def row_and_head(task, num_heads):
    """Return the row and the head of a (row, head) pair; callers make them one where their steps allow it."""
    row, head = task, int32(0)
    if num_heads > int32(1):
        row = idiv(task, num_heads)
        head = int32(task - row * num_heads)
    return row, head


def make(vector: bool) -> Kernel:
    """Return the kernel.

    Parameters
    ----------
    vector : bool
        Chunks of 16 bytes, see `make_chunk`: a lane takes a chunk of several rows, whose loads are under way together,
        and all of a row's chunks are taken at once.
    """
    chunk = make_chunk(vector, 2)
    WIDTH, width, load, load_lse, at = chunk.WIDTH, chunk.width, chunk.load, chunk.load_lse, chunk.at
    drop, add, store = chunk.drop, chunk.add, chunk.store
    TASKS = PAIR_TASKS if vector else 1
    STATES, WORDS = 2 * TASKS, chunk.WORDS
    ALL_WORDS, TASK_WORDS = STATES * WORDS, 2 * WORDS

    def merge_pair(
        v_a, v_a_row, v_a_head, v_a_dim, s_a, s_a_row, s_a_head, v_b, v_b_row, v_b_head, v_b_dim, s_b, s_b_row,
        s_b_head, out, out_row, out_head, out_dim, lse, lse_row, lse_head, v_kind, out_kind, s_kind, lse_kind, num_rows,
        num_heads, head_dim, lane_bits, early_blocks, s_unit, lse_unit, mask,
    ):  # fmt: skip
        thread, lanes = int32(cuda.threadIdx.x), int32(int32(1) << lane_bits)
        lane, teams = int32(thread & (lanes - int32(1))), int32(int32(THREADS) >> lane_bits)
        first_task = int32(cuda.blockIdx.x * teams * int32(TASKS) + (thread >> lane_bits))
        num_tasks = int32(num_rows * num_heads)
        words, value = cuda.local.array(ALL_WORDS, types.uint32), cuda.local.array(WIDTH, types.float32)
        some, weight = cuda.local.array(TASK_WORDS, types.uint32), cuda.local.array(2, types.float32)
        s, m = cuda.local.array(STATES, types.float32), cuda.local.array(TASKS, types.float32)
        ptx.let_next_start()  # what comes next waits for this merge, and so for what this one waits for
        # a lane for each line; not later blocks: they find nothing to wait for
        if vector and int32(cuda.blockIdx.x) < early_blocks and lane & int32(LINE - 1) == int32(0):
            row, head = row_and_head(int32(min(first_task, num_tasks - int32(1))), num_heads)
            dim = int32(min(lane * width(v_kind), head_dim - width(v_kind)))
            ptx.prefetch(at(at(v_a + int64(dim) * v_a_dim, row, v_a_row), head, v_a_head))
            ptx.prefetch(at(at(v_b + int64(dim) * v_b_dim, row, v_b_row), head, v_b_head))
            if lane == int32(0):
                ptx.prefetch(at(at(s_a, row, s_a_row), head, s_a_head))
                ptx.prefetch(at(at(s_b, row, s_b_row), head, s_b_head))
        ptx.wait_for_earlier()
        first = int32(0)
        while first < head_dim:  # the lanes' chunks at a time
            dim = int32(first + lane * width(v_kind))
            inside = dim < head_dim
            dim = int32(min(dim, head_dim - width(v_kind)))  # a lane without a chunk reads another's
            for i in range(TASKS):
                row, head = row_and_head(int32(min(first_task + int32(i) * teams, num_tasks - int32(1))), num_heads)
                if first == int32(0):
                    s[2 * i] = load_lse(at(at(s_a, row, s_a_row), head, s_a_head), s_kind)
                    s[2 * i + 1] = load_lse(at(at(s_b, row, s_b_row), head, s_b_head), s_kind)
                a = at(at(v_a + int64(dim) * v_a_dim, row, v_a_row), head, v_a_head)
                b = at(at(v_b + int64(dim) * v_b_dim, row, v_b_row), head, v_b_head)
                load(words, 2 * i * WORDS, a, v_kind)
                load(words, (2 * i + 1) * WORDS, b, v_kind)
            if first == int32(0):
                for i in range(TASKS):
                    s_0, s_1 = s[2 * i] * s_unit, s[2 * i + 1] * s_unit
                    top = ptx.maximum(ptx.maximum(s_0, s_1), EMPTY)
                    w_0, w_1 = state_weight(s_0, shift(top)), state_weight(s_1, shift(top))
                    total = w_0 + w_1
                    inverse = ptx.reciprocal(total) if total != float32(0) else float32(0)
                    s[2 * i], s[2 * i + 1] = w_0 * inverse, w_1 * inverse
                    m[i] = (top + ptx.log2_approx(total)) * lse_unit
                if lanes > int32(32):  # every lane has read s
                    ptx.sync_block()
                else:
                    ptx.sync_warp()
            for i in range(TASKS):
                task = int32(first_task + int32(i) * teams)
                row, head = row_and_head(task, num_heads)
                for n in range(TASK_WORDS):
                    some[n] = words[i * TASK_WORDS + n]
                weight[0], weight[1] = s[2 * i], s[2 * i + 1]
                for e in range(WIDTH):
                    value[e] = float32(0)
                drop(some, weight)
                add(value, some, weight, v_kind)
                wanted = inside and task < num_tasks
                if wanted and mask != int64(0):
                    wanted = ptx.load_u8(mask + int64(row)) != uint32(0)
                if wanted:
                    place = at(at(out + int64(dim) * out_dim, row, out_row), head, out_head)
                    store(place, out_kind, value, v_kind)
                if wanted and dim == int32(0) and lse != int64(0):
                    store_lse(at(at(lse, row, lse_row), head, lse_head), lse_kind, m[i])
                unroll_fully()
            if vector:
                break
            first = int32(first + lanes * width(v_kind))
            keep_rolled()

    return Kernel(merge_pair, THREADS, PAIR_BLOCKS if vector else 2)

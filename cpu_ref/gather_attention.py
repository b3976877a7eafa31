"""Attention of each query row over its own list of token positions (gather-GQA).

The same blocks as paged attention: only how the rows of K and V are found differs. Entries that name no key are left
out while a block is filled, so a block holds kept keys only.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from nbattn.cpu_ref.blocks import (
    padded,
    query_operand,
    query_room,
    score_heads,
    weigh_values,
)
from nbattn.cpu_ref.compiling import part, worker
from nbattn.cpu_ref.number_formats import address_of, load_int32, load_int64, store_int64
from nbattn.cpu_ref.packing import fill
from nbattn.cpu_ref.problem import Output, Pages, Queries
from nbattn.cpu_ref.records import WORD_BYTES, column, read_record, words_before
from nbattn.cpu_ref.rows import load_queries, store_rows
from nbattn.cpu_ref.scratch import zeros
from nbattn.cpu_ref.softmax_steps import FOLD_KEYS, fold_block, softmax_block
from nbattn.cpu_ref.tags import SCATTERED, number_type
from nbattn.cpu_ref.tiles import KEYS
from nbattn.cpu_ref.workers import next_task
from nbattn.indexing import mapped_page, page_and_slot, selected_token
from nbattn.work_list import (
    GATHER_COLUMNS,
    GATHER_KV_LEN,
    GATHER_PAGE_BEGIN,
    GATHER_ROW,
    GATHER_STATE,
    LIST_BEGIN,
    LIST_END,
)


class GatherJob(NamedTuple):
    """The first part of a record of `gather_worker`."""

    next_task: int
    work: int  # address of int32 [num_work, GATHER_COLUMNS]: a row's tokens from LIST_BEGIN to LIST_END, all KV heads
    num_work: int
    num_kv_heads: int
    tokens: int  # address of int32 [total_q, max_tokens]
    max_tokens: int


_QUERIES_WORD = words_before(GatherJob)
_OUTPUT_WORD = words_before(GatherJob, Queries)
_STATES_WORD = words_before(GatherJob, Queries, Output)
_PAGES_WORD = words_before(GatherJob, Queries, Output, Output)


@part
def _find_tokens(lists, level, tokens, here, end, page_begin, kv_len):
    """List the K and V rows of up to `KEYS` kept tokens; return how many, and where the list of tokens goes on.

    ``lists`` is the address of int64 [2, KEYS]: K rows, V rows; those behind the last repeat it. ``tokens`` is that of
    the row's int32 list.
    """
    n = 0
    while here < end and n < KEYS:
        token = np.int64(load_int32(tokens + 4 * here))
        here += 1
        if selected_token(token, kv_len):
            page, slot = page_and_slot(token, level.page_size)
            page_id = np.int64(load_int32(level.page_ids + 4 * (page_begin + page)))
            if mapped_page(page_id, level.num_pages):
                k_row = level.k + page_id * level.k_page + slot * level.k_slot
                v_row = level.v + page_id * level.v_page + slot * level.v_slot
                store_int64(lists + 8 * n, k_row)
                store_int64(lists + 8 * (KEYS + n), v_row)
                n += 1
    for rest in range(n, KEYS if n > 0 else 0):
        store_int64(lists + 8 * rest, load_int64(lists + 8 * (n - 1)))
        store_int64(lists + 8 * (KEYS + rest), load_int64(lists + 8 * (KEYS + n - 1)))
    return n, here


@worker
def gather_worker(record, kind):
    """Take work items until none is left.

    Parameters
    ----------
    record : int
        Address of a `GatherJob`, `Queries`, the `Output` of results and that of the partial states of split rows, and
        `Pages`.
    kind : Tag
        Cache dtype.
    """
    job = read_record(GatherJob, record)
    queries = read_record(Queries, record + WORD_BYTES * _QUERIES_WORD)
    output = read_record(Output, record + WORD_BYTES * _OUTPUT_WORD)
    states = read_record(Output, record + WORD_BYTES * _STATES_WORD)
    level = read_record(Pages, record + WORD_BYTES * _PAGES_WORD)
    number = number_type(kind)
    scale = number(queries.scale)
    group, heads = queries.group_size, job.num_kv_heads
    num_rows = heads * group
    stride = padded(num_rows + 4)
    q = zeros(number, num_rows + 4, padded(queries.dim))
    room = query_room(kind, num_rows + 4, heads, queries.dim)
    acc = zeros(number, num_rows, padded(output.dim))
    total = zeros(number, num_rows, padded(output.dim))
    s = zeros(number, KEYS, stride)
    running = zeros(number, 5, stride)
    m, d_sum, alpha, total_m, total_sum = running[0], running[1], running[2], running[3], running[4]
    lists = zeros(np.int64, 5, KEYS)  # what `_find_tokens` lists of this block and of the next; idle places
    for j in range(KEYS):
        lists[4, j] = address_of(q)
    while True:
        task = next_task(record)
        if task >= job.num_work:
            return
        item = job.work + 4 * GATHER_COLUMNS * task
        row = column(item, GATHER_ROW)
        page_begin, kv_len = column(item, GATHER_PAGE_BEGIN), column(item, GATHER_KV_LEN)
        tokens, end = job.tokens + 4 * job.max_tokens * row, column(item, LIST_END)
        load_queries(kind, queries, row, row + 1, 0, heads, address_of(q), q.strides[0])
        operand = query_operand(kind, q, room, heads, group, queries.dim)
        fill(kind, address_of(acc), acc.size, 0)
        fill(kind, address_of(total), total.size, 0)
        fill(kind, address_of(running), running.size, 0)
        fill(kind, address_of(m), stride, -math.inf)
        fill(kind, address_of(total_m), stride, -math.inf)
        summed = 0
        # in the loop over blocks addresses only: arrays are counted, atomically, with every slice of them
        now, coming = address_of(lists), address_of(lists) + 2 * lists.strides[0]
        idle = coming + 2 * lists.strides[0]
        n, here = _find_tokens(now, level, tokens, column(item, LIST_BEGIN), end, page_begin, kv_len)
        while n > 0:
            n_next, here = _find_tokens(coming, level, tokens, here, end, page_begin, kv_len)
            after = coming if n_next > 0 else now
            score_heads(kind, SCATTERED, operand, heads, group, now, level.k_head, queries.dim, scale,
                        address_of(s), s.strides[0], now, level.k_head, level.v_head, level.k_slot, idle)  # fmt: skip
            softmax_block(kind, address_of(s), s.strides[0], n, padded(num_rows), address_of(m), address_of(d_sum),
                          address_of(alpha))  # fmt: skip
            weigh_values(kind, SCATTERED, address_of(acc), acc.strides[0], heads, group, address_of(s), s.strides[0],
                         now + 8 * KEYS, level.v_head, level.v_slot, n, output.dim, address_of(alpha), 0,
                         after, level.k_head, idle)  # fmt: skip
            summed += n
            if n_next <= 0 or summed >= FOLD_KEYS:
                fold_block(kind, address_of(total), address_of(acc), acc.strides[0], output.dim, address_of(total_sum),
                           address_of(d_sum), address_of(total_m), address_of(m), address_of(alpha),
                           num_rows)  # fmt: skip
                summed = 0
            n, now, coming = n_next, coming, now
        target, first = output, row
        state = column(item, GATHER_STATE)
        if state >= 0:
            target, first = states, state
        store_rows(kind, target, first, first + 1, 0, heads, address_of(total), total.strides[0], address_of(total_m),
                   address_of(total_sum))  # fmt: skip

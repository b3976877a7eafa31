"""Attention of each query row over its own list of token positions (gather-GQA).

The same blocks as paged attention: only how the rows of K and V are found differs. Entries that name no key are left
out while a block is filled, so a block holds kept keys only.
"""

from __future__ import annotations

import math

import numpy as np

from nbattn.cpu_ref.blocks import (
    fold,
    number_type,
    padded,
    query_bits,
    query_operand,
    score_heads,
    weigh_values,
)
from nbattn.cpu_ref.compiling import kernel, part
from nbattn.cpu_ref.number_formats import address_of, load_int32
from nbattn.cpu_ref.problem import (
    K_ADDRESS,
    K_HEAD,
    K_PAGE,
    K_SLOT,
    NUM_PAGES,
    PAGE_IDS,
    PAGE_SIZE,
    V_ADDRESS,
    V_HEAD,
    V_PAGE,
    V_SLOT,
)
from nbattn.cpu_ref.rows import load_queries, store_rows
from nbattn.cpu_ref.scratch import zeros
from nbattn.cpu_ref.tiles import FOLD_KEYS, KEYS, softmax_block
from nbattn.cpu_ref.workers import next_task
from nbattn.indexing import mapped_page, page_and_slot, selected_token
from nbattn.work_list import GATHER_KV_LEN, GATHER_PAGE_BEGIN, GATHER_ROW, GATHER_STATE, LIST_BEGIN, LIST_END


@part
def _find_tokens(key_rows, value_rows, level, tokens, here, end, page_begin, kv_len):
    """List the K and V rows of up to `KEYS` kept tokens; return how many, and where the list goes on."""
    n = 0
    while here < end and n < KEYS:
        token = np.int64(tokens[here])
        here += 1
        if selected_token(token, kv_len):
            page, slot = page_and_slot(token, level[PAGE_SIZE])
            page_id = np.int64(load_int32(level[PAGE_IDS] + 4 * (page_begin + page)))
            if mapped_page(page_id, level[NUM_PAGES]):
                key_rows[n] = level[K_ADDRESS] + page_id * level[K_PAGE] + slot * level[K_SLOT]
                value_rows[n] = level[V_ADDRESS] + page_id * level[V_PAGE] + slot * level[V_SLOT]
                n += 1
    for rest in range(n, KEYS if n > 0 else 0):
        key_rows[rest] = key_rows[n - 1]
        value_rows[rest] = value_rows[n - 1]
    return n, here


@kernel
def gather_worker(kind, num_kv_heads, counters, work, token_indices, level, queries, output, states):
    """Take work items until none is left.

    Parameters
    ----------
    kind : Tag
        Cache dtype.
    counters : int64 [2]
        Next task, finished tasks.
    work : int32 [num_work, columns]
        One row of `token_indices` from ``LIST_BEGIN`` to ``LIST_END`` each, all KV heads.
    level : int64 [columns]
        Where the pages lie.
    """
    number = number_type(kind)
    group, heads = queries.group_size, num_kv_heads
    num_rows = heads * group
    stride = padded(num_rows + 4)
    q = zeros(number, num_rows + 4, padded(queries.dim))
    bits = query_bits(kind, num_rows + 4, queries.dim)
    acc = zeros(number, num_rows, padded(output.dim))
    total = zeros(number, num_rows, padded(output.dim))
    s = zeros(number, KEYS, stride)
    running = zeros(number, 5, stride)
    m, d_sum, alpha, total_m, total_sum = running[0], running[1], running[2], running[3], running[4]
    places = zeros(np.int64, 5, KEYS)  # where rows of K and V lie: of this block and of the next
    key_rows, value_rows, idle = places[0:2], places[2:4], places[4]
    for j in range(KEYS):
        idle[j] = address_of(q)
    k_head, v_head = level[K_HEAD], level[V_HEAD]
    while True:
        task = next_task(counters, 0)
        if task >= work.shape[0]:
            return
        item = work[task]
        row, page_begin, kv_len = (
            np.int64(item[GATHER_ROW]),
            np.int64(item[GATHER_PAGE_BEGIN]),
            np.int64(item[GATHER_KV_LEN]),
        )
        tokens, end = token_indices[row], np.int64(item[LIST_END])
        load_queries(queries, row, row + 1, 0, heads, q)
        operand = query_operand(kind, q, bits, num_rows, queries.dim)
        running[:], acc[:], total[:] = 0, 0, 0
        m[:], total_m[:] = -math.inf, -math.inf
        summed = 0
        n, here = _find_tokens(
            key_rows[0], value_rows[0], level, tokens, np.int64(item[LIST_BEGIN]), end, page_begin, kv_len
        )
        now = 0
        while n > 0:
            n_next, here = _find_tokens(
                key_rows[1 - now], value_rows[1 - now], level, tokens, here, end, page_begin, kv_len
            )
            after = 1 - now if n_next > 0 else now
            score_heads(kind, operand[0], operand[1], heads, group, address_of(key_rows[now]), k_head, queries.dim,
                        queries.scale, address_of(s), s.strides[0], address_of(key_rows[after]), k_head, level[K_SLOT],
                        address_of(idle))  # fmt: skip
            softmax_block(kind, address_of(s), s.strides[0], n, padded(num_rows), address_of(m), address_of(d_sum),
                          address_of(alpha))  # fmt: skip
            weigh_values(kind, address_of(acc), acc.strides[0], heads, group, address_of(s), s.strides[0],
                         address_of(value_rows[now]), v_head, level[V_SLOT], n, output.dim, address_of(alpha), 0,
                         address_of(value_rows[after]), address_of(idle))  # fmt: skip
            summed += n
            if n_next <= 0 or summed >= FOLD_KEYS:
                fold(total, total_sum, total_m, acc, d_sum, m, num_rows, output.dim)
                summed = 0
            n, now = n_next, 1 - now
        store_rows(output, states, np.int64(item[GATHER_STATE]), row, row + 1, 0, heads, total, total_m, total_sum)
        next_task(counters, 1)

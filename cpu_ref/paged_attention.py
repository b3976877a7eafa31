"""Attention of query rows over ranges of key positions in paged caches: decode, append, cross and cascade levels.

One kernel per cache dtype, set of rules (`PLAIN`: positions only; `FULL`: soft cap, ALiBi, masks, in-kernel RoPE,
unmapped pages) and kind of task: `FEW` query rows of all KV heads, or `MANY` of one. A task is one work item of the
plan; it reads its keys in blocks.
"""

from __future__ import annotations

import math

import numpy as np

from nbattn.cpu_ref.block_steps import Block, Side, block_shape, make_scratch, prepare_rows, score_block, weigh_block
from nbattn.cpu_ref.blocks import fold, number_type, padded, query_bits
from nbattn.cpu_ref.compiling import kernel, part
from nbattn.cpu_ref.number_formats import address_of, load_int32
from nbattn.cpu_ref.problem import (
    K_ADDRESS,
    K_HEAD,
    K_PAGE,
    K_SLOT,
    PAGE_IDS,
    PAGE_SIZE,
    V_ADDRESS,
    V_HEAD,
    V_PAGE,
    V_SLOT,
)
from nbattn.cpu_ref.rows import load_queries, store_rows
from nbattn.cpu_ref.rules import apply_rules
from nbattn.cpu_ref.scratch import zeros
from nbattn.cpu_ref.tiles import FOLD_KEYS, softmax_block
from nbattn.cpu_ref.workers import next_task
from nbattn.indexing import page_and_slot, visible_keys
from nbattn.work_list import (
    CAUSAL,
    KEY_BASE,
    KEY_BEGIN,
    KEY_END,
    KEY_POSITION,
    KV_LEN,
    LEVEL,
    PAGE_BEGIN,
    ROW_BEGIN,
    ROW_END,
    STATE,
)


@part
def find_rows(key_rows, value_rows, dropped, level, head, page_begin, key, n):
    """List one head's K and V rows of keys ``key .. key + n``, mark the unmapped; the block's rest repeats the last."""
    page_size = level[PAGE_SIZE]
    any_dropped = False
    page, slot = page_and_slot(key, page_size)
    j = 0
    while j < n:
        page_id = np.int64(load_int32(level[PAGE_IDS] + 4 * (page_begin + page)))
        unmapped = page_id < 0
        if unmapped:
            page_id = np.int64(0)
            any_dropped = True
        k_page = level[K_ADDRESS] + page_id * level[K_PAGE] + head * level[K_HEAD]
        v_page = level[V_ADDRESS] + page_id * level[V_PAGE] + head * level[V_HEAD]
        for _ in range(min(page_size - slot, n - j)):
            key_rows[j] = k_page + slot * level[K_SLOT]
            value_rows[j] = v_page + slot * level[V_SLOT]
            dropped[j] = np.int64(unmapped)
            slot += 1
            j += 1
        page += 1
        slot = 0
    for rest in range(n, key_rows.shape[0]):
        key_rows[rest] = key_rows[n - 1]
        value_rows[rest] = value_rows[n - 1]
        dropped[rest] = 1
    return any_dropped


@part
def drop_outside(s, n, first_key, first, end, rows, last_first, first_end):
    """Set the scores of keys outside each row's interval to -inf; all rows see ``last_first .. first_end``."""
    for j in range(n):
        if last_first <= first_key + j < first_end:
            continue
        for row in range(rows):
            if first_key + j < first[row] or first_key + j >= end[row]:
                s[j, row] = -math.inf


@kernel
def paged_worker(
    kind,
    rule_tag,
    counters,
    number_kind,
    tile,
    tasks,
    work,
    levels,
    max_rows,
    max_heads,
    queries,
    output,
    states,
    rules,
):
    """Take tasks until none is left.

    Parameters
    ----------
    kind, number_kind, rule_tag, tile : Tag
        Cache dtype, arithmetic dtype (float32 or float64), rules and kind of task: the compile-time choices.
    counters : int64 [2]
        Next task, finished tasks.
    tasks : int32 [num_tasks, 3]
        Work item, first KV head, KV heads; `max_rows` and `max_heads` are the most packed rows and heads of one.
    work : int32 [num_work, columns], levels : int64 [num_levels, columns]
        The plan's work list and where each level's pages lie.
    """
    group = queries.group_size
    number = number_type(kind)
    keys, spare_rows, spare_columns = block_shape(tile)
    room, stride = max_rows + spare_rows, padded(max_rows + spare_rows)
    q = zeros(number, room, padded(queries.dim))
    bits = query_bits(kind, room, queries.dim)
    acc = zeros(number, room, padded(output.dim + spare_columns))
    total = zeros(number, room, padded(output.dim + spare_columns))
    s = zeros(number, keys, stride)
    running = zeros(number, 5, stride)
    m, d_sum, alpha, total_m, total_sum = running[0], running[1], running[2], running[3], running[4]
    of_row = zeros(np.int64, 5, max_rows)
    first, end, qo_head, q_row, position = of_row[0], of_row[1], of_row[2], of_row[3], of_row[4]
    places = zeros(np.int64, 6, keys)  # where rows of K and V lie: of this block and of the next
    key_rows, value_rows, dropped = places[0:2], places[2:4], places[4:6]
    rotating = rules.cos.shape[0] > 0
    scratch = make_scratch(tile, kind, q, rotating, max_heads, queries.dim, output.dim)
    while True:
        task = next_task(counters, 0)
        if task >= tasks.shape[0]:
            return
        item, head_begin, heads = work[tasks[task, 0]], np.int64(tasks[task, 1]), np.int64(tasks[task, 2])
        level = levels[item[LEVEL]]
        k_head, v_head = level[K_HEAD], level[V_HEAD]
        row_begin, row_end = np.int64(item[ROW_BEGIN]), np.int64(item[ROW_END])
        key_position, key_base = np.int64(item[KEY_POSITION]), np.int64(item[KEY_BASE])
        page_begin, kv_len = np.int64(item[PAGE_BEGIN]), np.int64(item[KV_LEN])
        tokens = row_end - row_begin
        rows = tokens * group
        load_queries(queries, row_begin, row_end, head_begin, heads, q)
        running[:], acc[:], total[:] = 0, 0, 0
        m[:], total_m[:] = -math.inf, -math.inf
        summed = 0
        s[:, heads * rows :] = 0
        last_first, first_end = np.int64(0), kv_len
        for packed in range(heads * rows):
            q_row[packed] = row_begin + packed % rows // group
            qo_head[packed] = (head_begin + packed // rows) * group + packed % group
            position[packed] = rules.row_position[q_row[packed]]
            first[packed], end[packed] = visible_keys(
                position[packed], key_position, kv_len, item[CAUSAL] != 0, rules.window_left, rules.chunk_size
            )
            if first[packed] > last_first:
                last_first = first[packed]
            if end[packed] < first_end:
                first_end = end[packed]
        key, key_end = np.int64(item[KEY_BEGIN]), np.int64(item[KEY_END])
        n, now = min(keys, key_end - key), 0
        if n > 0:
            find_rows(key_rows[0], value_rows[0], dropped[0], level, head_begin, page_begin, key, n)
        operand = prepare_rows(rule_tag, tile, kind, number_kind, rotating, scratch, q, bits, heads * rows, queries.dim,
                               key_rows[0], n)  # fmt: skip
        while n > 0:
            n_next = min(keys, key_end - key - n)
            if n_next > 0:
                find_rows(key_rows[1 - now], value_rows[1 - now], dropped[1 - now], level, head_begin, page_begin,
                          key + n, n_next)  # fmt: skip
            after = 1 - now if n_next > 0 else now
            whole = last_first <= key and first_end >= key + n
            block = Block(key, n, key_position + key, head_begin, first, end, whole)
            k_side = Side(key_rows[now], key_rows[after], k_head, level[K_SLOT])
            v_side = Side(value_rows[now], value_rows[after], v_head, level[V_SLOT])
            score_block(rule_tag, tile, kind, number_kind, rules, scratch, q, operand, heads, rows, block, k_side,
                        queries.dim, queries.scale, s, v_side, output.dim)  # fmt: skip
            select = apply_rules(rule_tag, kind, rules, s, n, heads * rows, key, key_base, key_position, dropped[now],
                                 qo_head, q_row, position)  # fmt: skip
            if not whole:
                drop_outside(s, n, key, first, end, heads * rows, last_first, first_end)
                select = True
            softmax_block(kind, address_of(s), s.strides[0], n, padded(heads * rows), address_of(m), address_of(d_sum),
                          address_of(alpha))  # fmt: skip
            weigh_block(tile, kind, scratch, acc, heads, rows, s, block, v_side, output.dim, alpha, select, k_side,
                        queries.dim, 0 if rotating else n_next)  # fmt: skip
            summed += n
            if n_next <= 0 or summed >= FOLD_KEYS:
                fold(total, total_sum, total_m, acc, d_sum, m, heads * rows, output.dim)
                summed = 0
            key, n, now = key + n, n_next, 1 - now
        store_rows(
            output, states, np.int64(item[STATE]), row_begin, row_end, head_begin, heads, total, total_m, total_sum
        )
        next_task(counters, 1)

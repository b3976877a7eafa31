"""Attention of query rows over ranges of key positions in paged caches: decode, append, cross and cascade levels.

One kernel per cache dtype, set of rules (`PLAIN`: positions only; `FULL`: soft cap, ALiBi, masks, in-kernel RoPE,
unmapped pages) and kind of task: `FEW` query rows of all KV heads, or `MANY` of one. A task is one work item of the
plan; it reads its keys in blocks.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from nbattn.cpu_ref.block_steps import Block, Side, block_shape, make_scratch, prepare_rows, score_block, weigh_block
from nbattn.cpu_ref.blocks import padded
from nbattn.cpu_ref.compiling import keep_short, part, worker
from nbattn.cpu_ref.number_formats import address_of, load_int32, store_int64
from nbattn.cpu_ref.packing import fill
from nbattn.cpu_ref.problem import Output, Pages, Queries, Rules
from nbattn.cpu_ref.records import WORD_BYTES, column, read_record, words_before
from nbattn.cpu_ref.rows import load_queries, store_rows
from nbattn.cpu_ref.rules import apply_rules
from nbattn.cpu_ref.scratch import zeros
from nbattn.cpu_ref.softmax_steps import FOLD_KEYS, drop_outside, fold_block, softmax_block
from nbattn.cpu_ref.tags import number_type
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
    WORK_COLUMNS,
)


class PagedJob(NamedTuple):
    """The first part of a record of `paged_worker`."""

    next_task: int
    tasks: int  # address of int32 [num_tasks, 3]: work item, first KV head, KV heads
    num_tasks: int
    max_rows: int  # most packed rows of a task
    max_heads: int  # most KV heads of a task
    work: int  # address of int32 [num_work, WORK_COLUMNS]: the plan's work list


QUERIES_WORD = words_before(PagedJob)
OUTPUT_WORD = words_before(PagedJob, Queries)
STATES_WORD = words_before(PagedJob, Queries, Output)
RULES_WORD = words_before(PagedJob, Queries, Output, Output)
LEVELS_WORD = words_before(PagedJob, Queries, Output, Output, Rules)  # the `Pages` of every level
_TASK_BYTES, _ITEM_BYTES, _LEVEL_BYTES = 4 * 3, 4 * WORK_COLUMNS, WORD_BYTES * words_before(Pages)


@part
def find_rows(lists, keys, level, head, page_begin, key, n):
    """List one head's K and V rows of keys ``key .. key + n``, mark the unmapped; the block's rest repeats the last.

    ``lists`` is the address of int64 [3, keys]: K rows, V rows, and whether a key is unmapped.
    """
    value_rows, unmapped = lists + 8 * keys, lists + 16 * keys
    page_size, page_ids = level.page_size, level.page_ids
    k_first, k_page, k_slot = level.k + head * level.k_head, level.k_page, level.k_slot
    v_first, v_page, v_slot = level.v + head * level.v_head, level.v_page, level.v_slot
    page, slot = page_and_slot(key, page_size)
    k_row, v_row = np.int64(0), np.int64(0)
    j = np.int64(0)
    while j < n:
        page_id = np.int64(load_int32(page_ids + 4 * (page_begin + page)))
        mapped = page_id if page_id > 0 else 0
        k_row, v_row = k_first + mapped * k_page + slot * k_slot, v_first + mapped * v_page + slot * v_slot
        stop = min(j + page_size - slot, n)
        while j < stop:
            store_int64(lists + 8 * j, k_row)
            store_int64(value_rows + 8 * j, v_row)
            store_int64(unmapped + 8 * j, np.int64(page_id < 0))
            k_row, v_row, j = k_row + k_slot, v_row + v_slot, j + 1
        page, slot = page + 1, np.int64(0)
    for rest in range(n, keys):
        store_int64(lists + 8 * rest, k_row - k_slot)
        store_int64(value_rows + 8 * rest, v_row - v_slot)
        store_int64(unmapped + 8 * rest, 1)


@worker
def paged_worker(record, kind, rule_tag, number_kind, tile):
    """Take tasks until none is left.

    Parameters
    ----------
    record : int
        Address of a `PagedJob`, `Queries`, the `Output` of results, that of the partial states of split rows, `Rules`
        and the `Pages` of every level.
    kind, number_kind, rule_tag, tile : Tag
        Cache dtype, arithmetic dtype (float32 or float64), rules and kind of task: the compile-time choices.
    """
    keep_short()
    job = read_record(PagedJob, record)
    queries = read_record(Queries, record + WORD_BYTES * QUERIES_WORD)
    output = read_record(Output, record + WORD_BYTES * OUTPUT_WORD)
    states = read_record(Output, record + WORD_BYTES * STATES_WORD)
    rules = read_record(Rules, record + WORD_BYTES * RULES_WORD)
    group, max_rows, max_heads = queries.group_size, job.max_rows, job.max_heads
    scale = number_type(kind)(queries.scale)
    number = number_type(kind)
    keys, spare_rows, spare_columns = block_shape(tile)
    room, stride = max_rows + spare_rows, padded(max_rows + spare_rows)
    q = zeros(number, room, padded(queries.dim))
    acc = zeros(number, room, padded(output.dim + spare_columns))
    total = zeros(number, room, padded(output.dim + spare_columns))
    s = zeros(number, keys, stride)
    running = zeros(number, 5, stride)
    m, d_sum, alpha, total_m, total_sum = running[0], running[1], running[2], running[3], running[4]
    of_row = zeros(np.int64, 5, stride)
    first, end, qo_head, q_row, position = of_row[0], of_row[1], of_row[2], of_row[3], of_row[4]
    lists = zeros(np.int64, 6, keys)  # what `find_rows` lists: of this block and of the next
    list_bytes = 3 * lists.strides[0]
    rotating = rules.cos != 0
    scratch = make_scratch(tile, kind, q, rotating, max_heads, queries.dim, output.dim)
    while True:
        task = next_task(record)
        if task >= job.num_tasks:
            return
        place = job.tasks + _TASK_BYTES * task
        item, head_begin, heads = job.work + _ITEM_BYTES * column(place, 0), column(place, 1), column(place, 2)
        level = read_record(Pages, record + WORD_BYTES * LEVELS_WORD + _LEVEL_BYTES * column(item, LEVEL))
        row_begin, row_end = column(item, ROW_BEGIN), column(item, ROW_END)
        key_position, key_base = column(item, KEY_POSITION), column(item, KEY_BASE)
        page_begin, kv_len = column(item, PAGE_BEGIN), column(item, KV_LEN)
        causal = column(item, CAUSAL) != 0
        tokens = row_end - row_begin
        rows = tokens * group
        load_queries(number_kind, queries, row_begin, row_end, head_begin, heads, address_of(q), q.strides[0])
        fill(kind, address_of(acc), acc.size, 0)
        fill(kind, address_of(total), total.size, 0)
        fill(kind, address_of(s), s.size, 0)
        fill(kind, address_of(running), running.size, 0)
        fill(kind, address_of(m), stride, -math.inf)
        fill(kind, address_of(total_m), stride, -math.inf)
        summed = 0
        last_first, first_end = np.int64(0), kv_len
        for packed in range(heads * rows):
            q_row[packed] = row_begin + packed % rows // group
            qo_head[packed] = (head_begin + packed // rows) * group + packed % group
            position[packed] = load_int32(rules.row_position + 4 * q_row[packed])
            first[packed], end[packed] = visible_keys(
                position[packed], key_position, kv_len, causal, rules.window_left, rules.chunk_size
            )
            if first[packed] > last_first:
                last_first = first[packed]
            if end[packed] < first_end:
                first_end = end[packed]
        key, key_end = column(item, KEY_BEGIN), column(item, KEY_END)
        if level.num_pages == 0:  # an unmapped page stands for page 0, which is not there
            key_end = key
        n = min(keys, key_end - key)
        # in the loop over blocks addresses only: arrays are counted, atomically, with every slice and tuple of them
        here, coming = address_of(lists), address_of(lists) + list_bytes
        first_address, end_address = address_of(first), address_of(end)
        places, rotated = scratch.places, scratch.keys
        if n > 0:
            find_rows(here, keys, level, head_begin, page_begin, key, n)
        operand = prepare_rows(rule_tag, tile, kind, number_kind, rotating, scratch, q, heads, rows, queries.dim, here,
                               n)  # fmt: skip
        while n > 0:
            n_next = min(keys, key_end - key - n)
            if n_next > 0:
                find_rows(coming, keys, level, head_begin, page_begin, key + n, n_next)
            after = coming if n_next > 0 else here
            whole = last_first <= key and first_end >= key + n
            block = Block(key, n, key_base + key, head_begin, first_address, end_address, whole)
            k_side = Side(here, after, level.k_head, level.k_slot)
            v_side = Side(here + 8 * keys, after + 8 * keys, level.v_head, level.v_slot)
            score_block(rule_tag, tile, kind, number_kind, rules, places, rotated, q, operand, heads, rows, block,
                        k_side, queries.dim, scale, s, v_side, output.dim)  # fmt: skip
            select = apply_rules(rule_tag, kind, rules, s, n, heads * rows, key, key_base, key_position,
                                 here + 16 * keys, qo_head, q_row, position)  # fmt: skip
            if not whole:
                drop_outside(kind, address_of(s), s.strides[0], n, key, first_address, end_address, heads * rows,
                             last_first, first_end)  # fmt: skip
                select = True
            softmax_block(kind, address_of(s), s.strides[0], n, padded(heads * rows), address_of(m), address_of(d_sum),
                          address_of(alpha))  # fmt: skip
            weigh_block(tile, kind, places, acc, heads, rows, s, block, v_side, output.dim, alpha, select, k_side,
                        queries.dim, 0 if rotating else n_next)  # fmt: skip
            summed += n
            if n_next <= 0 or summed >= FOLD_KEYS:
                fold_block(kind, address_of(total), address_of(acc), acc.strides[0], output.dim, address_of(total_sum),
                           address_of(d_sum), address_of(total_m), address_of(m), address_of(alpha),
                           heads * rows)  # fmt: skip
                summed = 0
            key, n, here, coming = key + n, n_next, coming, here
        target, first_row = output, row_begin
        state = column(item, STATE)
        if state >= 0:
            target, first_row = states, state
        store_rows(number_kind, target, first_row, first_row + tokens, head_begin, heads, address_of(total),
                   total.strides[0], address_of(total_m), address_of(total_sum))  # fmt: skip

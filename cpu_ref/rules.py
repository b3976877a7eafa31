"""The rules beyond positions: soft cap, ALiBi, masks, unmapped pages and keys rotated inside attention."""

from __future__ import annotations

import math

import numpy as np

from nbattn.cpu_ref.compiling import part, variants
from nbattn.cpu_ref.number_formats import address_of, bytes_of, load_cache, load_int32, load_int64, load_number
from nbattn.cpu_ref.row_copies import multiply_row
from nbattn.cpu_ref.rows import read_number
from nbattn.cpu_ref.tags import number_type
from nbattn.scoring import LOG2E, alibi_bias, rotate_pair, soft_cap


@part
def _cap_scores(kind, rules, s, n, rows):
    cap = number_type(kind)(rules.soft_cap)
    for j in range(n):
        for row in range(rows):
            s[j, row] = soft_cap(s[j, row], cap)


@part
def _add_alibi(kind, rules, s, n, rows, key_position, qo_head, position):
    for row in range(rows):
        slope = load_number(kind, rules.slopes + qo_head[row] * bytes_of(kind)[1])
        for j in range(n):
            s[j, row] += alibi_bias(slope, number_type(kind)(key_position + j - position[row]))


@part
def _apply_mask(rules, s, n, rows, key, qo_head, q_row):
    """Add an additive mask or select with a boolean one; `key` is the first key's index in the request."""
    dropped = False
    for row in range(rows):
        request = np.int64(load_int32(rules.row_request + 4 * q_row[row]))
        index = np.int64(load_int32(rules.row_index + 4 * q_row[row]))
        if request < 0:  # a row without keys of its own in the last level has no mask
            continue
        place = rules.mask_address + request * rules.mask_request + qo_head[row] * rules.mask_head
        place += index * rules.mask_row
        for j in range(n):
            bias = read_number(place + (key + j) * rules.mask_key, rules.mask_code)
            if bias > -math.inf:
                s[j, row] += bias * LOG2E
            else:  # -inf, or NaN
                s[j, row] = -math.inf
                dropped = True
    return dropped


@part
def rotate_keys(kind, rules, rotated, key_rows, keys, heads, head_begin, k_head_stride, size, dim, turn, n):
    """Scale and rotate the `keys` listed K rows of a block in half-split pairs into ``rotated[head * keys + j]``."""
    half, number_size = dim // 2, bytes_of(kind)[1]
    for head in range(heads):
        for j in range(keys):
            target = rotated[head * keys + j]
            place = load_int64(key_rows + 8 * j) + head * k_head_stride
            for d in range(target.shape[0]):
                target[d] = load_cache(kind, place + d * size) if d < dim else 0
            if rules.k_scale != 0:
                multiply_row(kind, address_of(target), rules.k_scale + (head_begin + head) * dim * number_size, dim)
            plane = (turn + min(j, n - 1) - rules.origin) * half * number_size
            for d in range(half):
                cos = load_number(kind, rules.cos + plane + d * number_size)
                sin = load_number(kind, rules.sin + plane + d * number_size)
                target[d], target[d + half] = rotate_pair(target[d], target[d + half], cos, sin)


def apply_rules(rule_tag, kind, rules, s, n, rows, key, key_base, key_position, dropped, qo_head, q_row, position):
    """Turn raw scores of a block into final ones; return whether a key was dropped for some row.

    ``dropped`` is the address of int64 [n]: whether no row may see a key.
    """
    raise NotImplementedError("compiled code only")


@variants(apply_rules)
def _apply_rules(rule_tag, kind, rules, s, n, rows, key, key_base, key_position, dropped, qo_head, q_row, position):
    if rule_tag.tag == "plain":
        return (
            lambda rule_tag, kind, rules, s, n, rows, key, key_base, key_position, dropped, qo_head, q_row, position: (
                False
            )
        )

    def full(rule_tag, kind, rules, s, n, rows, key, key_base, key_position, dropped, qo_head, q_row, position):
        if rules.soft_cap > 0:
            _cap_scores(kind, rules, s, n, rows)
        if rules.slopes != 0:
            _add_alibi(kind, rules, s, n, rows, key_position + key, qo_head, position)
        any_dropped = False
        if rules.mask_address != 0:
            any_dropped = _apply_mask(rules, s, n, rows, key_base + key, qo_head, q_row)
        for j in range(n):
            if load_int64(dropped + 8 * j) != 0:
                any_dropped = True
                for row in range(rows):
                    s[j, row] = -math.inf
        return any_dropped

    return full

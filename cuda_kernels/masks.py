"""Masks over a tile of scores: a lane asks for all its elements together, two neighbouring ones at once if packed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba.cuda import float32, int32, int64, uint32
from numba.extending import register_jitable

from nbattn.cuda_kernels import ptx
from nbattn.cuda_kernels.epilogue import EMPTY
from nbattn.cuda_kernels.formats import BF16, BOOL, F32, unpack_bf16
from nbattn.scoring import LOG2E


@register_jitable
def _two_bytes(raw, j, address):
    raw[j] = ptx.load_u16(address)


@register_jitable
def _two_halves(raw, j, address):
    raw[j] = ptx.load_u32(address)


@register_jitable
def _two_words(raw, j, address):
    raw[j], raw[j + 1] = ptx.load_2u32(address)


@register_jitable
def _each_byte(raw, j, address, step, wanted, next_wanted):  # what is not wanted is kept
    low, high = ptx.load_u8_if(address, wanted, 1), ptx.load_u8_if(address + step, next_wanted, 1)
    raw[j] = low | high << uint32(8)


@register_jitable
def _each_half(raw, j, address, step, wanted, next_wanted):
    raw[j] = ptx.load_u16_if(address, wanted) | ptx.load_u16_if(address + step, next_wanted) << uint32(16)


@register_jitable
def _each_word(raw, j, address, step, wanted, next_wanted):
    raw[j], raw[j + 1] = ptx.load_u32_if(address, wanted), ptx.load_u32_if(address + step, next_wanted)


def _make_ask(item: int, rows: int, columns: int, load_two: Any, load_each: Any) -> Callable:
    @register_jitable
    def ask(raw, key, end, mask_at, mask_key):
        for i in range(rows):
            place = mask_at[i] + int64(key) * mask_key
            inside = int32(key + int32(8 * columns - 7)) < end[i]
            if inside and mask_key == int64(item) and place & int64(2 * item - 1) == int64(0):
                for n in range(columns):
                    load_two(raw, 2 * (n * rows + i), place + int64(8 * item * n))
            else:
                for n in range(columns):
                    column = int32(key + int32(8 * n))
                    load_each(raw, 2 * (n * rows + i), place, mask_key, int32(column < end[i]),
                              int32(int32(column + int32(1)) < end[i]))  # fmt: skip
                    place += int64(8) * mask_key

    return ask


def make_mask(rows: int, columns: int, at: Callable) -> tuple[Callable, Callable]:
    """Return the two functions by which a lane's `rows` rows get the mask of `columns` times eight keys.

    The lane's numbers of row i of the n-th eight keys are ``at(n, 0, i)`` and ``at(n, 1, i)`` of the scores.
    """
    ask_bytes = _make_ask(1, rows, columns, _two_bytes, _each_byte)
    ask_halves = _make_ask(2, rows, columns, _two_halves, _each_half)
    ask_words = _make_ask(4, rows, columns, _two_words, _each_word)

    @register_jitable
    def ask_mask(raw, key, end, mask_at, rules):
        """Load what the mask says of the lane's columns from `key` on, where a row has them: ``key < end``.

        `raw` has ``2 * rows * columns`` words; the mask's elements of key 0 are at `mask_at`.
        """
        if rules.mask_kind == BOOL:
            ask_bytes(raw, key, end, mask_at, rules.mask_key)
        elif rules.mask_kind == F32:
            ask_words(raw, key, end, mask_at, rules.mask_key)
        else:
            ask_halves(raw, key, end, mask_at, rules.mask_key)

    @register_jitable
    def keep_bytes(s, n0, raw):
        """Drop what a boolean mask drops; return 1 if that is anything."""
        dropped = int32(0)
        for n in range(columns):
            for i in range(rows):
                pair = raw[2 * (n * rows + i)]
                if pair & uint32(0xFF) == uint32(0):
                    s[at(n0 + n, 0, i)], dropped = EMPTY, int32(1)
                if pair & uint32(0xFF00) == uint32(0):
                    s[at(n0 + n, 1, i)], dropped = EMPTY, int32(1)
        return dropped

    @register_jitable
    def add_biases(s, n0, raw, kind):
        """Add an additive mask; return as `keep_bytes`."""
        lowest = float32(0)
        for n in range(columns):
            for i in range(rows):
                j = 2 * (n * rows + i)
                if kind == F32:
                    low, high = ptx.bits_float(raw[j]), ptx.bits_float(raw[j + 1])
                elif kind == BF16:
                    low, high = unpack_bf16(raw[j])
                else:
                    low, high = ptx.unpack_f16(raw[j])
                lowest = ptx.minimum(lowest, ptx.minimum(low, high))  # a NaN loses
                even, odd = s[at(n0 + n, 0, i)] + low * float32(LOG2E), s[at(n0 + n, 1, i)] + high * float32(LOG2E)
                s[at(n0 + n, 0, i)] = even if low != EMPTY else EMPTY
                s[at(n0 + n, 1, i)] = odd if high != EMPTY else EMPTY
        return int32(1) if lowest == EMPTY else int32(0)

    @register_jitable
    def apply_mask(s, n0, raw, rules):
        """Apply what was loaded to the scores from the `n0`-th eight keys on; return 1 if that drops any, else 0."""
        if rules.mask_kind == BOOL:
            return keep_bytes(s, n0, raw)
        if rules.mask_kind == F32:
            return add_biases(s, n0, raw, F32)
        if rules.mask_kind == BF16:
            return add_biases(s, n0, raw, BF16)
        return add_biases(s, n0, raw, int32(0))

    return ask_mask, apply_mask

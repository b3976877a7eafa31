"""Neighbouring numbers of a lane: 16 bytes where memory is packed and aligned, one number where it is not.

Merges read, weigh and write whole rows, so this is all that they do with values. Loads are coherent, because a merge in
place writes where it has read.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

from numba.cuda import float32, int32, int64, uint32
from numba.extending import register_jitable

from nbattn.cuda_kernels import ptx
from nbattn.cuda_kernels.epilogue import EMPTY
from nbattn.cuda_kernels.formats import BF16, F32, F64, store_number, unpack_bf16


def make_chunk(vector: bool, count: int, most: int = 8) -> SimpleNamespace:
    """Return the steps of a lane that takes one chunk of each of `count` rows.

    Parameters
    ----------
    vector : bool
        Chunks of 16 bytes, float32 log-sum-exps, strides below 2 GiB; else one number of any kind at any stride.
    count : int
        Rows whose chunks are held together, `WORDS` words each.
    most : int
        Numbers of 16 bytes: 4 if all are float32.

    Returns
    -------
    namespace
        ``WIDTH``, the most numbers of a chunk, and ``WORDS``; ``width(kind)``, its numbers; ``at(base, index, step)``,
        an address; ``load`` and ``load_lse`` with their ``_if`` forms, which give zeros and -inf where not wanted;
        ``drop(words, weight)``, zeros for the rows of weight 0, whose values are not looked at; ``add(value, words,
        weight, kind)``, the weighted sum of the rows; ``store(address, kind, value, v_kind)``.
    """
    if not vector:
        return SimpleNamespace(
            WIDTH=1, WORDS=1, width=_one, at=_far, load=_load_one, load_if=_load_one_if, load_lse=_load_any_lse,
            load_lse_if=_load_any_lse_if, drop=_make_drop(count, 1), add=_make_add_one(count), store=_store_one,
        )  # fmt: skip
    return SimpleNamespace(
        WIDTH=most, WORDS=4, width=_width, at=_near, load=_load, load_if=_load_if, load_lse=_load_lse,
        load_lse_if=_load_lse_if, drop=_make_drop(count, 4), add=_make_add(count), store=_store,
    )  # fmt: skip


def _make_drop(count: int, words_of_row: int) -> Callable:
    @register_jitable
    def drop(words, weight):
        least = weight[0]
        for j in range(1, count):
            least = ptx.minimum(least, weight[j])
        if least == float32(0):  # seldom
            for j in range(count):
                if weight[j] == float32(0):
                    for i in range(words_of_row):
                        words[words_of_row * j + i] = uint32(0)

    return drop


# ---- 16 bytes
@register_jitable
def _width(kind):
    return int32(4) if kind == F32 else int32(8)


@register_jitable
def _near(base, index, step):
    return ptx.offset(base, index, int32(step))


@register_jitable
def _load(words, at, address, kind):
    words[at], words[at + 1], words[at + 2], words[at + 3] = ptx.read_4u32(address)


@register_jitable
def _load_if(words, at, address, kind, wanted):
    words[at], words[at + 1], words[at + 2], words[at + 3] = ptx.read_4u32_if(address, wanted)


@register_jitable
def _load_lse(address, kind):
    return ptx.read_f32(address)


@register_jitable
def _load_lse_if(address, kind, wanted):
    return ptx.read_f32_if(address, wanted, EMPTY)


def _make_add(count: int) -> Callable:
    @register_jitable
    def add(value, words, weight, kind):
        if kind == F32:
            for j in range(count):
                for i in range(4):
                    value[i] += weight[j] * ptx.bits_float(words[4 * j + i])
        elif kind == BF16:
            for j in range(count):
                for i in range(4):
                    x, y = unpack_bf16(words[4 * j + i])
                    value[2 * i] += weight[j] * x
                    value[2 * i + 1] += weight[j] * y
        else:
            for j in range(count):
                for i in range(4):
                    x, y = ptx.unpack_f16(words[4 * j + i])
                    value[2 * i] += weight[j] * x
                    value[2 * i + 1] += weight[j] * y

    return add


@register_jitable
def _store(address, kind, value, v_kind):
    """Round a chunk of numbers that were of `v_kind` to `kind` and write it; it is aligned to its own size."""
    if kind == F32:  # then v_kind is too
        ptx.store_4u32(address, ptx.float_bits(value[0]), ptx.float_bits(value[1]), ptx.float_bits(value[2]),
                       ptx.float_bits(value[3]))  # fmt: skip
        return
    x, y = _pair(kind, value[0], value[1]), _pair(kind, value[2], value[3])
    if v_kind == F32:
        ptx.store_2u32(address, x, y)
    else:
        ptx.store_4u32(address, x, y, _pair(kind, value[4], value[5]), _pair(kind, value[6], value[7]))


@register_jitable
def _pair(kind, x, y):
    """Round two numbers to 16 bits."""
    return ptx.pack_bf16(x, y) if kind == BF16 else ptx.pack_f16(x, y)


# ---- one number
@register_jitable
def _one(kind):
    return int32(1)


@register_jitable
def _far(base, index, step):
    return base + int64(index) * step


@register_jitable
def _load_one(words, at, address, kind):
    if kind == F32:
        words[at] = ptx.float_bits(ptx.read_f32(address))
    elif kind == BF16:
        words[at] = ptx.read_u16(address) << uint32(16)
    else:
        low, _ = ptx.unpack_f16(ptx.read_u16(address))
        words[at] = ptx.float_bits(low)


@register_jitable
def _load_one_if(words, at, address, kind, wanted):
    words[at] = uint32(0)
    if wanted:
        _load_one(words, at, address, kind)


@register_jitable
def _load_any_lse(address, kind):
    return ptx.read_f64(address) if kind == F64 else ptx.read_f32(address)


@register_jitable
def _load_any_lse_if(address, kind, wanted):
    return _load_any_lse(address, kind) if wanted else EMPTY


def _make_add_one(count: int) -> Callable:
    @register_jitable
    def add(value, words, weight, kind):
        for j in range(count):
            value[0] += weight[j] * ptx.bits_float(words[j])

    return add


@register_jitable
def _store_one(address, kind, value, v_kind):
    store_number(address, kind, value[0])

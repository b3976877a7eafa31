"""Numbers in memory as float32 and back: by a run-time kind (q, out, masks, gates) or by a cache's format."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from numba.cuda import float32, int32, int64, uint32
from numba.extending import register_jitable

from nbattn.cuda_kernels import ptx
from nbattn.cuda_kernels.parameters import KINDS

F16, BF16, F32, F64, BOOL = (int32(KINDS[n]) for n in ("float16", "bfloat16", "float32", "float64", "bool"))


@register_jitable
def unpack_bf16(pair):
    """Return the two bfloat16 of a pair as float32."""
    return ptx.bits_float(pair << uint32(16)), ptx.bits_float(pair & uint32(0xFFFF0000))


@register_jitable
def load_number(address, kind):
    """Return a number of `kind` (float16, bfloat16, float32) as float32."""
    if kind == F32:
        return ptx.load_f32(address)
    bits = ptx.load_u16(address)
    if kind == BF16:
        return ptx.bits_float(bits << uint32(16))
    low, _ = ptx.unpack_f16(bits)
    return low


@register_jitable
def store_number(address, kind, value):
    """Round a float32 to `kind` (float16, bfloat16, float32) and store it."""
    if kind == F32:
        ptx.store_f32(address, value)
    elif kind == BF16:
        ptx.store_u16(address, ptx.pack_bf16(value, float32(0)))
    else:
        ptx.store_u16(address, ptx.pack_f16(value, float32(0)))


@register_jitable
def load_lse(address, kind):
    """Return a log-sum-exp, float32 or float64 in memory, as float32."""
    return ptx.load_f64(address) if kind == F64 else ptx.load_f32(address)


@register_jitable
def store_lse(address, kind, value):
    """Store a float32 log-sum-exp as float32 or float64."""
    if kind == F64:
        ptx.store_f64(address, value)
    else:
        ptx.store_f32(address, value)


@dataclass(frozen=True)
class CacheFormat:
    """How the elements of a cache are stored and which 16-bit format its tiles multiply in.

    `widen` turns two neighbouring 8-bit numbers into a pair of float16; every one of them is exact. `probe` is the
    triple (bits to look at, what to add, bit that is then set) that finds an infinity or a NaN in packed numbers.
    """

    name: str
    item_bytes: int
    pack: Any = None
    unpack: Any = None
    multiply: Any = None
    widen: Any = None
    probe: tuple[int, int, int] = (0, 0, 0)


_half = {"pack": ptx.pack_f16, "unpack": ptx.unpack_f16, "multiply": ptx.multiply_f16}

CACHE_FORMATS = {
    "bfloat16": CacheFormat(
        "bfloat16", 2, ptx.pack_bf16, unpack_bf16, ptx.multiply_bf16, None, (0x7FFF7FFF, 0x00800080, 0x80008000)
    ),
    "float16": CacheFormat("float16", 2, **_half, probe=(0x7FFF7FFF, 0x04000400, 0x80008000)),
    "float8_e4m3fn": CacheFormat(
        "float8_e4m3fn", 1, **_half, widen=ptx.e4m3_pair, probe=(0x7F7F7F7F, 0x01010101, 0x80808080)
    ),
    "float8_e5m2": CacheFormat(
        "float8_e5m2", 1, **_half, widen=ptx.e5m2_pair, probe=(0x7F7F7F7F, 0x04040404, 0x80808080)
    ),
    "int8": CacheFormat("int8", 1, **_half, widen=ptx.int8_pair),
    "float32": CacheFormat("float32", 4),
}


def element_loader(name: str) -> Callable:
    """Return ``load(base, index) -> float32`` for a cache of format `name`."""
    cache_format = CACHE_FORMATS[name]
    if name == "float32":
        return register_jitable(lambda base, index: ptx.load_f32(base + index * int64(4)))
    unpack, widen = cache_format.unpack, cache_format.widen
    if cache_format.item_bytes == 2:
        return register_jitable(lambda base, index: unpack(ptx.load_u16(base + index * int64(2)))[0])
    return register_jitable(lambda base, index: unpack(widen(ptx.load_u8(base + index)))[0])

"""Copying a row of numbers from or to memory in another float format, a vector at a time."""

from __future__ import annotations

import llvmlite.ir as ir
from numba import types
from numba.extending import intrinsic

from nbattn.cpu_ref.lanes import Lanes
from nbattn.cpu_ref.number_formats import DOUBLE, DTYPE_CODE, FLOAT, I16, I32, itemsize, to_half


def _widen_row(kind: str):
    """Build ``target[:n] = source[:n]`` for a source of dtype `kind`; `target` is padded to whole vectors with 0."""

    def codegen(context, builder, sig, args):
        source, target, n = args
        lanes = Lanes(builder, kind)
        with lanes.loop(0, n, lanes.count) as (d, _):
            value = lanes.load_cache_up_to(lanes.add(source, lanes.mul(d, itemsize(kind))), builder.sub(n, d))
            lanes.store(value, lanes.add(target, lanes.mul(d, lanes.bytes)))
        return context.get_dummy_value()

    def widen_row(typingctx, source, target, n):
        return types.void(types.int64, types.int64, types.int64), codegen

    return intrinsic(widen_row)


def narrow(lanes: Lanes, kind: str, value: ir.Value) -> ir.Value:
    """Round a vector of the arithmetic type to nearest even in another format, by way of float32; a NaN stays one."""
    b = lanes.builder
    if kind == "float64":
        return b.fpext(value, ir.VectorType(DOUBLE, lanes.count)) if lanes.bytes == 4 else value
    if lanes.bytes == 8:
        value = b.fptrunc(value, ir.VectorType(FLOAT, lanes.count))
    if kind == "float32":
        return value
    if kind == "float16":
        return to_half(b, value)
    words = ir.VectorType(I32, lanes.count)

    def word(x: int) -> ir.Constant:
        return ir.Constant(words, [x] * lanes.count)

    bits = b.bitcast(value, words)
    odd = b.and_(b.lshr(bits, word(16)), word(1))
    rounded = b.add(bits, b.add(odd, word(0x7FFF)))
    kept = b.select(b.fcmp_unordered("uno", value, value), b.or_(bits, word(0x400000)), rounded)
    return b.trunc(b.lshr(kept, word(16)), ir.VectorType(I16, lanes.count))


def _narrow_row(kind: str):
    """Build ``target[:n] = source[:n]`` for a float32 source and a target of dtype `kind`; n is whole vectors."""

    def codegen(context, builder, sig, args):
        source, target, n = args
        lanes = Lanes(builder, "float32")
        with lanes.loop(0, n, lanes.count) as (d, _):
            value = narrow(lanes, kind, lanes.load(lanes.add(source, lanes.mul(d, 4))))
            lanes.store(value, lanes.add(target, lanes.mul(d, itemsize(kind))), align=1)
        return context.get_dummy_value()

    def narrow_row(typingctx, source, target, n):
        return types.void(types.int64, types.int64, types.int64), codegen

    return intrinsic(narrow_row)


widen_float32, widen_float16, widen_bfloat16, widen_float64 = (_widen_row(kind) for kind in DTYPE_CODE)
narrow_float32, narrow_float16, narrow_bfloat16 = (_narrow_row(kind) for kind in ("float32", "float16", "bfloat16"))

"""Copying a row of numbers from or to memory in another float format, a vector at a time."""

from __future__ import annotations

import llvmlite.ir as ir
from numba import types
from numba.extending import intrinsic

from nbattn.cpu_ref.lanes import Lanes
from nbattn.cpu_ref.number_formats import DTYPE_CODE, I16, I32, itemsize, to_half


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


def _narrow(lanes: Lanes, kind: str, value: ir.Value) -> ir.Value:
    """Round a float32 vector to nearest even in another format; a NaN stays one."""
    b = lanes.builder
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
            value = _narrow(lanes, kind, lanes.load(lanes.add(source, lanes.mul(d, 4))))
            lanes.store(value, lanes.add(target, lanes.mul(d, itemsize(kind))), align=1)
        return context.get_dummy_value()

    def narrow_row(typingctx, source, target, n):
        return types.void(types.int64, types.int64, types.int64), codegen

    return intrinsic(narrow_row)


widen_float32, widen_float16, widen_bfloat16, widen_float64 = (_widen_row(kind) for kind in DTYPE_CODE)
narrow_float32, narrow_float16, narrow_bfloat16 = (_narrow_row(kind) for kind in ("float32", "float16", "bfloat16"))


@intrinsic
def add_weighted_row(typingctx, kind, target, weight, source, n):
    """``target[:n] += weight * source[:n]`` for a source of dtype `kind`; `target` is padded to whole vectors."""

    def codegen(context, builder, sig, args):
        _, target, weight, source, n = args
        lanes = Lanes(builder, kind.tag)
        factor = lanes.splat(weight)

        def add(d, value):
            at = lanes.add(target, lanes.mul(d, lanes.bytes))
            lanes.store(lanes.fma(value, factor, lanes.load(at)), at)

        def place(d):
            return lanes.add(source, lanes.mul(d, itemsize(kind.tag)))

        whole = builder.and_(n, lanes.const(-lanes.count))
        with lanes.loop(0, whole, lanes.count) as (d, _):
            add(d, lanes.load_cache(place(d)))
        with lanes.loop(whole, n, lanes.count) as (d, _):
            add(d, lanes.load_cache_up_to(place(d), builder.sub(n, d)))
        return context.get_dummy_value()

    number = types.float64 if kind.tag == "float64" else types.float32
    return types.void(kind, types.int64, number, types.int64, types.int64), codegen

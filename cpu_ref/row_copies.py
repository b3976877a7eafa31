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


def _narrow_row(target_kind: str):
    """Build ``target[:n] = source[:n]`` for a target of a dtype; `source` is padded to whole vectors."""

    def codegen(context, builder, sig, args):
        kind, (_, source, target, n) = sig.args[0], args
        lanes = Lanes(builder, kind.tag)
        whole = builder.and_(n, lanes.const(-lanes.count))

        def rounded(d):
            value = narrow(lanes, target_kind, lanes.load(lanes.add(source, lanes.mul(d, lanes.bytes))))
            return value, lanes.add(target, lanes.mul(d, itemsize(target_kind)))

        with lanes.loop(0, whole, lanes.count) as (d, _):
            lanes.store(*rounded(d), align=1)
        with lanes.loop(whole, n, lanes.count) as (d, _):
            lanes.store_up_to(*rounded(d), builder.sub(n, d))
        return context.get_dummy_value()

    def narrow_row(typingctx, kind, source, target, n):
        return types.void(kind, types.int64, types.int64, types.int64), codegen

    return intrinsic(narrow_row)


widen_float32, widen_float16, widen_bfloat16, widen_float64 = (_widen_row(kind) for kind in DTYPE_CODE)
narrow_float32, narrow_float16, narrow_bfloat16, narrow_float64 = (_narrow_row(kind) for kind in DTYPE_CODE)


@intrinsic
def scale_row(typingctx, kind, row, factor, n):
    """``row[:n] *= factor`` for a row padded to whole vectors."""

    def codegen(context, builder, sig, args):
        _, row, factor, n = args
        lanes = Lanes(builder, kind.tag)
        factors = lanes.splat(factor)
        with lanes.loop(0, n, lanes.count) as (d, _):
            at = lanes.add(row, lanes.mul(d, lanes.bytes))
            lanes.store(lanes.product(lanes.load(at), factors), at)
        return context.get_dummy_value()

    number = types.float64 if kind.tag == "float64" else types.float32
    return types.void(kind, types.int64, number, types.int64), codegen


@intrinsic
def multiply_row(typingctx, kind, row, factors, n):
    """``row[:n] *= factors[:n]`` for numbers of the kind's arithmetic; `row` is padded to whole vectors with 0."""

    def codegen(context, builder, sig, args):
        _, row, factors, n = args
        lanes = Lanes(builder, "float64" if kind.tag == "float64" else "float32")
        with lanes.loop(0, n, lanes.count) as (d, _):
            at, place = (lanes.add(address, lanes.mul(d, lanes.bytes)) for address in (row, factors))
            lanes.store(lanes.product(lanes.load(at), lanes.load_cache_up_to(place, builder.sub(n, d))), at)
        return context.get_dummy_value()

    return types.void(kind, types.int64, types.int64, types.int64), codegen

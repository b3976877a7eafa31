"""Exact conversions between the bits of 8- and 16-bit number formats and float32, as LLVM operations.

The cache formats exist twice: here for a single number (loads and stores at the edges) and, for a vector of lanes,
as `widen` with the same operations. LLVM turns both into the CPU's own conversion instructions where it has them.
"""

from __future__ import annotations

import llvmlite.ir as ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from nbattn.cpu_ref.cpu import HALF_CONVERSIONS
from nbattn.cpu_ref.tags import constants

I1, I8, I16, I32, I64 = (ir.IntType(width) for width in (1, 8, 16, 32, 64))
HALF, FLOAT, DOUBLE = ir.HalfType(), ir.FloatType(), ir.DoubleType()

ELEMENT = {  # element type of a cache in memory
    "float16": I16,
    "bfloat16": I16,
    "float32": FLOAT,
    "float64": DOUBLE,
    "float8_e4m3fn": I8,
    "float8_e5m2": I8,
    "int8": I8,
}
DTYPE_CODE = {"float32": 0, "float16": 1, "bfloat16": 2, "float64": 3}  # run-time dtype of q and out


def itemsize(kind: str) -> int:
    """Return the bytes of one element of a cache kind."""
    return {I8: 1, I16: 2, FLOAT: 4, DOUBLE: 8}[ELEMENT[kind]]


@constants
def bytes_of(kind):
    """Return the bytes of a number of a kind, and of a number of its arithmetic."""
    return itemsize(kind), 8 if kind == "float64" else 4


def _like(scalar: ir.Type, shape: ir.Type) -> ir.Type:
    """Return `scalar`, or a vector of it as long as `shape`."""
    return ir.VectorType(scalar, shape.count) if isinstance(shape, ir.VectorType) else scalar


def _constant(shape: ir.Type, value) -> ir.Constant:
    return ir.Constant(shape, [value] * shape.count) if isinstance(shape, ir.VectorType) else ir.Constant(shape, value)


def _half_to_float(builder: ir.IRBuilder, bits: ir.Value) -> ir.Value:
    """Return the float32 of float16 bits, exactly."""
    i32, wide = _like(I32, bits.type), _like(FLOAT, bits.type)
    if HALF_CONVERSIONS:
        return builder.fpext(builder.bitcast(bits, _like(HALF, bits.type)), wide)
    word = builder.zext(bits, i32)
    magnitude = builder.shl(builder.and_(word, _constant(i32, 0x7FFF)), _constant(i32, 13))
    value = builder.fmul(builder.bitcast(magnitude, wide), _constant(wide, 2.0**112))  # the exponents' biases differ
    special = builder.icmp_unsigned(">=", builder.and_(word, _constant(i32, 0x7FFF)), _constant(i32, 0x7C00))
    infinite = builder.or_(magnitude, _constant(i32, 0x7F800000))  # or NaN
    sign = builder.shl(builder.and_(word, _constant(i32, 0x8000)), _constant(i32, 16))
    chosen = builder.select(special, infinite, builder.bitcast(value, i32))
    return builder.bitcast(builder.or_(chosen, sign), wide)


def to_half(builder: ir.IRBuilder, value: ir.Value) -> ir.Value:
    """Return the float16 bits of a float32, a scalar or a vector, rounded to nearest even."""
    i16, i32, wide = (_like(t, value.type) for t in (I16, I32, FLOAT))
    if HALF_CONVERSIONS:
        return builder.bitcast(builder.fptrunc(value, _like(HALF, value.type)), i16)
    bits = builder.bitcast(value, i32)
    sign = builder.lshr(builder.and_(bits, _constant(i32, -0x80000000)), _constant(i32, 16))
    size = builder.and_(bits, _constant(i32, 0x7FFFFFFF))
    odd = builder.and_(builder.lshr(size, _constant(i32, 13)), _constant(i32, 1))
    rebased = builder.add(builder.add(size, _constant(i32, 0xFFF - (112 << 23))), odd)
    normal = builder.lshr(rebased, _constant(i32, 13))
    shifted = builder.fadd(builder.bitcast(size, wide), _constant(wide, 0.5))  # adds a rounding at 2**-24
    subnormal = builder.sub(builder.bitcast(shifted, i32), _constant(i32, 0x3F000000))
    result = builder.select(builder.icmp_unsigned("<", size, _constant(i32, 0x38800000)), subnormal, normal)
    result = builder.select(
        builder.icmp_unsigned(">=", size, _constant(i32, 0x47800000)), _constant(i32, 0x7C00), result
    )
    is_nan = builder.icmp_unsigned(">", size, _constant(i32, 0x7F800000))
    result = builder.select(is_nan, _constant(i32, 0x7E00), result)
    return builder.trunc(builder.or_(result, sign), i16)


def widen(builder: ir.IRBuilder, kind: str, x: ir.Value) -> ir.Value:
    """Return the float32 (float64 for float64) value of cache elements `x`, a scalar or a vector."""
    wide = _like(FLOAT, x.type)
    if kind in ("float32", "float64"):
        return x
    if kind == "float16":
        return _half_to_float(builder, x)
    if kind == "int8":
        return builder.sitofp(builder.sext(x, _like(I32, x.type)), wide)
    if kind == "bfloat16":
        i32 = _like(I32, x.type)
        return builder.bitcast(builder.shl(builder.zext(x, i32), _constant(i32, 16)), wide)
    i16 = _like(I16, x.type)
    word = builder.zext(x, i16)
    if kind == "float8_e5m2":  # the upper half of a float16
        return _half_to_float(builder, builder.shl(word, _constant(i16, 8)))
    # e4m3fn: its exponent and mantissa as a float16 are 2**8 too small; 0x7f is its only NaN, it has no infinity
    sign = builder.shl(builder.and_(word, _constant(i16, 0x80)), _constant(i16, 8))
    magnitude = builder.and_(word, _constant(i16, 0x7F))
    bits = builder.or_(sign, builder.shl(magnitude, _constant(i16, 7)))
    value = builder.fmul(_half_to_float(builder, bits), _constant(wide, 256.0))
    is_nan = builder.icmp_unsigned("==", magnitude, _constant(i16, 0x7F))
    return builder.select(is_nan, _constant(wide, float("nan")), value)


@intrinsic
def bits_to_float(typingctx, bits):
    """float32 of the same 32 bits."""
    return types.float32(types.int32), lambda context, builder, sig, args: builder.bitcast(args[0], FLOAT)


@intrinsic
def round_even(typingctx, value):
    """float32 rounded to the nearest whole number, ties to even."""

    def codegen(context, builder, sig, args):
        name, shape = "llvm.roundeven.f32", ir.FunctionType(FLOAT, [FLOAT])
        return builder.call(cgutils.get_or_insert_function(builder.module, shape, name), args)

    return types.float32(types.float32), codegen


@intrinsic
def half_to_float(typingctx, bits):
    """float32 of float16 bits."""

    def codegen(context, builder, sig, args):
        return _half_to_float(builder, args[0])

    return types.float32(types.uint16), codegen


@intrinsic
def bfloat_to_float(typingctx, bits):
    """float32 of bfloat16 bits."""

    def codegen(context, builder, sig, args):
        return widen(builder, "bfloat16", args[0])

    return types.float32(types.uint16), codegen


@intrinsic
def load_cache(typingctx, kind, address):
    """Load one cache element from a byte address and widen it."""
    element = ELEMENT[kind.tag]

    def codegen(context, builder, sig, args):
        value = builder.load(builder.inttoptr(args[1], ir.PointerType()), typ=element)
        value.align = 1
        return widen(builder, kind.tag, value)

    return (types.float64 if kind.tag == "float64" else types.float32)(kind, types.int64), codegen


@intrinsic
def load_number(typingctx, kind, address):
    """Load one number of a kind's arithmetic from a byte address."""
    number = DOUBLE if kind.tag == "float64" else FLOAT

    def codegen(context, builder, sig, args):
        return builder.load(builder.inttoptr(args[1], ir.PointerType()), typ=number)

    return (types.float64 if number is DOUBLE else types.float32)(kind, types.int64), codegen


@intrinsic
def store_number(typingctx, kind, address, value):
    """Store one number of a kind's arithmetic at a byte address."""

    def codegen(context, builder, sig, args):
        builder.store(args[2], builder.inttoptr(args[1], ir.PointerType()))
        return context.get_dummy_value()

    return types.void(kind, types.int64, types.float64 if kind.tag == "float64" else types.float32), codegen


def _memory_access(number: types.Type):
    """Build the pair (load, store) of one number type at a byte address."""

    def load(typingctx, address):
        def codegen(context, builder, sig, args):
            value = builder.load(builder.inttoptr(args[0], ir.PointerType()), typ=context.get_data_type(number))
            value.align = 1
            return value

        return number(types.int64), codegen

    def store(typingctx, address, value):
        def codegen(context, builder, sig, args):
            builder.store(args[1], builder.inttoptr(args[0], ir.PointerType())).align = 1
            return context.get_dummy_value()

        return types.void(types.int64, number), codegen

    return intrinsic(load), intrinsic(store)


load_uint8, _ = _memory_access(types.uint8)
load_uint16, _ = _memory_access(types.uint16)
load_int32, _ = _memory_access(types.int32)
load_int64, store_int64 = _memory_access(types.int64)
load_float32, store_float32 = _memory_access(types.float32)
load_float64, store_float64 = _memory_access(types.float64)


@intrinsic
def address_of(typingctx, array):
    """Return the byte address of an array's first element."""

    def codegen(context, builder, sig, args):
        data = context.make_array(sig.args[0])(context, builder, args[0]).data
        return builder.ptrtoint(data, I64)

    return types.int64(array), codegen

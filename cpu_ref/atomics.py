"""Words of memory that several threads read and write, and what a thread does that waits for one of them.

All are int64 at byte addresses; every access is sequentially consistent.
"""

from __future__ import annotations

import llvmlite.binding as llvm
import llvmlite.ir as ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from nbattn.cpu_ref.number_formats import I32, I64

_ARCHITECTURE = llvm.get_process_triple().split("-")[0]
_PAUSE = {
    "x86_64": ("llvm.x86.sse2.pause", []),
    "aarch64": ("llvm.aarch64.hint", [1]),
    "arm64": ("llvm.aarch64.hint", [1]),
}


def _place(builder: ir.IRBuilder, address: ir.Value) -> ir.Value:
    return builder.inttoptr(address, I64.as_pointer())


@intrinsic
def read(typingctx, address):
    """Return a word."""

    def codegen(context, builder, sig, args):
        return builder.load_atomic(_place(builder, args[0]), "seq_cst", 8, typ=I64)

    return types.int64(types.int64), codegen


@intrinsic
def write(typingctx, address, value):
    """Replace a word."""

    def codegen(context, builder, sig, args):
        builder.store_atomic(args[1], _place(builder, args[0]), "seq_cst", 8)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


def _modify(operation: str):
    def modify(typingctx, address, value):
        def codegen(context, builder, sig, args):
            return builder.atomic_rmw(operation, _place(builder, args[0]), args[1], "seq_cst")

        return types.int64(types.int64, types.int64), codegen

    return intrinsic(modify)


fetch_add = _modify("add")  # add to a word and return what it was
exchange = _modify("xchg")  # replace a word and return what it was


@intrinsic
def rest(typingctx, function, give_way):
    """Let the core rest a moment, or call the C function whose address is the word at `function`."""

    def codegen(context, builder, sig, args):
        with builder.if_else(args[1]) as (then, otherwise):
            with then:
                shape = ir.FunctionType(I32, [])
                code = builder.load(_place(builder, args[0]), typ=I64)
                builder.call(builder.inttoptr(code, shape.as_pointer()), [])
            with otherwise:
                if _ARCHITECTURE in _PAUSE:
                    name, hint = _PAUSE[_ARCHITECTURE]
                    shape = ir.FunctionType(ir.VoidType(), [I32] * len(hint))
                    pause = cgutils.get_or_insert_function(builder.module, shape, name)
                    builder.call(pause, [ir.Constant(I32, x) for x in hint])
        return context.get_dummy_value()

    return types.void(types.int64, types.boolean), codegen


@intrinsic
def call_worker(typingctx, worker, record):
    """Call the machine code of a worker, a function of an int64 that returns nothing; return whether it failed."""

    def codegen(context, builder, sig, args):
        convention = context.call_conv
        shape = convention.get_function_type(types.none, (types.int64,))
        code = builder.inttoptr(args[0], shape.as_pointer())
        status, _ = convention.call_function(builder, code, types.none, (types.int64,), (args[1],))
        return status.is_error

    return types.boolean(types.int64, types.int64), codegen

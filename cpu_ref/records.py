"""What a call is told, as a kernel finds it: named tuples one after another in an array of 8-byte words.

A kernel gets one address; Python writes a record once and, for every further call, a few addresses into a copy.
"""

from __future__ import annotations

import struct
from functools import cache
from itertools import chain
from typing import Any, NamedTuple, get_type_hints

import llvmlite.ir as ir
import numpy as np
from numba import types
from numba.extending import intrinsic

from nbattn.cpu_ref.number_formats import I32, I64

WORD_BYTES = 8
_NUMBA_TYPES = {int: types.int64, float: types.float64}


@intrinsic
def read_record(typingctx, record_class, address):
    """Return the named tuple of a class, whose fields (int or float) stand at a byte address."""
    cls = record_class.instance_class
    fields = [_NUMBA_TYPES[hint] for hint in get_type_hints(cls).values()]

    def codegen(context, builder, sig, args):
        values = []
        for i, field in enumerate(fields):
            place = builder.inttoptr(builder.add(args[1], ir.Constant(I64, WORD_BYTES * i)), ir.PointerType())
            values.append(builder.load(place, typ=context.get_data_type(field)))
        return context.make_tuple(builder, sig.return_type, values)

    return types.NamedTuple(fields, cls)(record_class, types.int64), codegen


@intrinsic
def column(typingctx, row, index):
    """Return an int32 of a row of them that begins at a byte address, as int64."""

    def codegen(context, builder, sig, args):
        place = builder.add(args[0], builder.shl(args[1], ir.Constant(I64, 2)))
        value = builder.load(builder.inttoptr(place, ir.PointerType()), typ=I32)
        return builder.sext(value, I64)

    return types.int64(types.int64, types.int64), codegen


@cache
def _format_of(cls: type, length: int) -> str:
    hints = get_type_hints(cls).values() if hasattr(cls, "_fields") else [int] * length
    return "".join("d" if hint is float else "q" for hint in hints)


def record_of(*parts: Any) -> np.ndarray:
    """Return named tuples and rows of ints as a record.

    Parameters
    ----------
    *parts : NamedTuple or tuple of int
        Fields of a named tuple are int or float as it declares them.
    """
    words = struct.pack("=" + "".join(map(_format_of, map(type, parts), map(len, parts))), *chain(*parts))
    return np.frombuffer(bytearray(words), np.int64)


def words_before(*classes: type[NamedTuple]) -> int:
    """Return at which word of a record the part behind parts of these classes begins."""
    return sum(len(cls._fields) for cls in classes)

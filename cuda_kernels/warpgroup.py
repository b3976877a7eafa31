"""Matrix instructions of a warpgroup (compute capability 9.0): four warps, 64 rows, right sides in shared memory.

Numba has no asynchronous registers. A product is one block of inline assembly over whole local arrays, which must be
registers: what `multiply_keys` writes and `multiply_values` adds to may be read after `WAIT_PRODUCTS` and `hold`.

A tile lies in shared memory in panels of 64 dimensions, 128 bytes a row: chunk j (16 bytes) of row i of a panel is at
place ``j ^ (i % 8)``, and panels start at multiples of 1024 bytes. This is the 128-byte swizzle of the PTX manual, for
rows that are multiplied along their dimensions (q and K) as well as across them (V).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba.cuda import types
from numba.cuda.extending import intrinsic
from numba.cuda.typing import signature

from nbattn.cuda_kernels.ptx import instruction

PANEL_DIMS, PANEL_ROW = 64, 128  # dimensions of a panel, bytes of its rows
_F32, _I32, _I64 = ir.FloatType(), ir.IntType(32), ir.IntType(64)
_SWIZZLE_128 = 1 << 62
_EIGHT_ROWS = 8 * PANEL_ROW

publish_writes = instruction(  # what the thread wrote to shared memory becomes visible to matrix instructions
    "publish_writes", "fence.proxy.async.shared::cta;", (), (), "memory"
)
WAIT_PRODUCTS = tuple(  # WAIT_PRODUCTS[n](): until at most the n newest products are under way
    instruction(f"wait_products_{n}", f"wgmma.wait_group.sync.aligned {n};", (), (), "memory") for n in range(2)
)
any_of_group = instruction(  # among 128 threads, at the barrier whose number comes last: whether any value is not 0
    "any_of_group",
    "{.reg .pred p, q; setp.ne.s32 p, $1, 0; bar.red.or.pred q, $2, 128, p; selp.s32 $0, 1, 0, q;}",
    (types.int32,),
    (types.int32, types.int32),
    "memory",
)


def descriptor_bits(rows: int, along_rows: bool) -> int:
    """Return the bits of a matrix descriptor besides the address, for a tile of `rows` rows a panel.

    The first stride is that of panels, used only if rows are multiplied `along_rows`, i.e. if a row is a column of
    the right side; the second is that of eight rows.
    """
    panel = rows * PANEL_ROW if along_rows else 16
    return _SWIZZLE_128 | (_EIGHT_ROWS >> 4) << 32 | (panel >> 4) << 16


def _pointers(context: Any, builder: Any, array_type: Any, array: Any, count: int) -> list[Any]:
    data = context.make_array(array_type)(context, builder, value=array).data
    return [builder.gep(data, [ir.Constant(_I32, i)], inbounds=True) for i in range(count)]


def _assemble(builder: Any, text: str, written: list, kept: bool, read: list[tuple[str, Any]]) -> None:
    """Emit `text`, whose operands are first what stands at the pointers `written`, then the values `read`.

    What is written starts with its old values if they are `kept`.
    """
    number = written[0].type.pointee
    count = len(written)
    old = [builder.load(pointer) for pointer in written] if kept else []
    letter = "f" if number == _F32 else "r"
    ties = [str(i) for i in range(len(old))]
    constraints = ["=" + letter] * count + ties + [letter for letter, _ in read] + ["~{memory}"]
    inputs = old + [value for _, value in read]
    shape = ir.FunctionType(ir.LiteralStructType([number] * count), [value.type for value in inputs])
    block = ir.InlineAsm(shape, text, ",".join(constraints), side_effect=True)
    result = builder.call(block, inputs, attrs=("convergent",))
    for i, pointer in enumerate(written):
        builder.store(builder.extract_value(result, i), pointer)


def _braced(first: int, count: int) -> str:
    return "{" + ",".join(f"${i}" for i in range(first, first + count)) + "}"


def make_multiply_keys(kind: str, keys: int, head_dim: int, query_rows: int) -> Any:
    """Return the intrinsic ``(s, query, tile)`` that starts ``s = q @ k.T``.

    `query` and `tile` are descriptors, of the warpgroup's rows in panels of `query_rows` and of `keys` keys.
    """
    numbers = keys // 2
    step = f"wgmma.mma_async.sync.aligned.m64n{keys}k16.f32.{kind}.{kind} {_braced(0, numbers)}"
    lines = [".reg .b64 a, b; .reg .pred f, t; setp.ne.b32 f, 0, 0; setp.eq.b32 t, 0, 0; wgmma.fence.sync.aligned;"]
    for i in range(head_dim // 16):
        panel, inside = divmod(i, PANEL_DIMS // 16)
        a_offset, b_offset = (panel * rows * PANEL_ROW // 16 + 2 * inside for rows in (query_rows, keys))
        lines.append(f"add.s64 a, ${numbers}, {a_offset}; add.s64 b, ${numbers + 1}, {b_offset};")
        lines.append(f"{step}, a, b, {'f' if i == 0 else 't'}, 1, 1, 0, 0;")
    lines.append("wgmma.commit_group.sync.aligned;")
    text = "{" + " ".join(lines) + "}"

    def codegen(context, builder, sig, args):
        written = _pointers(context, builder, sig.args[0], args[0], numbers)
        _assemble(builder, text, written, False, [("l", args[1]), ("l", args[2])])
        return context.get_dummy_value()

    def multiply_keys(typingctx, s, query, tile):
        return signature(types.void, s, types.int64, types.int64), codegen

    return _product(multiply_keys, text, keeps=False)


def make_multiply_values(kind: str, keys: int, head_dim: int) -> Any:
    """Return the intrinsic ``(o, p, tile)`` that starts ``o += p @ v``; `tile` is the descriptor of `keys` keys."""
    numbers, words = head_dim // 2, keys // 4
    step = f"wgmma.mma_async.sync.aligned.m64n{head_dim}k16.f32.{kind}.{kind} {_braced(0, numbers)}"
    lines = [".reg .b64 b; .reg .pred t; setp.eq.b32 t, 0, 0; wgmma.fence.sync.aligned;"]
    for i in range(keys // 16):
        lines.append(f"add.s64 b, ${2 * numbers + words}, {i * 16 * PANEL_ROW // 16};")
        lines.append(f"{step}, {_braced(2 * numbers + 4 * i, 4)}, b, t, 1, 1, 1;")
    lines.append("wgmma.commit_group.sync.aligned;")
    text = "{" + " ".join(lines) + "}"

    def codegen(context, builder, sig, args):
        written = _pointers(context, builder, sig.args[0], args[0], numbers)
        weights = [builder.load(x) for x in _pointers(context, builder, sig.args[1], args[1], words)]
        _assemble(builder, text, written, True, [("r", x) for x in weights] + [("l", args[2])])
        return context.get_dummy_value()

    def multiply_values(typingctx, o, p, tile):
        return signature(types.void, o, p, types.int64), codegen

    return _product(multiply_values, text, keeps=True)


def _product(typing: Callable, text: str, *, keeps: bool) -> Any:
    """Return the intrinsic, which carries its text for those who interpret it, and whether it adds to what is there."""
    found = intrinsic(typing)
    found.product = text, keeps
    return found


def make_hold(count: int) -> Any:
    """Return the intrinsic ``(array)`` behind which the compiler looks for the array's `count` numbers anew."""

    def codegen(context, builder, sig, args):
        _assemble(builder, "", _pointers(context, builder, sig.args[0], args[0], count), True, [])
        return context.get_dummy_value()

    def hold(typingctx, array):
        return signature(types.void, array), codegen

    return intrinsic(hold)

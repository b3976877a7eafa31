"""Every PTX instruction the kernels use by name, made by one factory from inline assembly.

In an instruction's text the outputs come first (``$0`` ...), then the inputs. Addresses of global memory are int64,
addresses of shared memory int32 (the 32-bit shared window), packed data uint32.

`effects` says what the optimiser may assume: ``"pure"`` (same inputs, same outputs: may be moved, merged, removed),
``"ordered"`` (keeps its place among its like), ``"memory"`` (ordered, and other memory operations stay on their side).
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.cuda import types
from numba.cuda.extending import intrinsic
from numba.cuda.typing import signature

i32, u32, i64, f32 = types.int32, types.uint32, types.int64, types.float32

_REGISTER: dict[Any, tuple[str, ir.Type]] = {
    i32: ("r", ir.IntType(32)),
    u32: ("r", ir.IntType(32)),
    i64: ("l", ir.IntType(64)),
    f32: ("f", ir.FloatType()),
}
_COLLECTIVE = (".sync", "bar.", "barrier.")  # instructions that all lanes must reach together
_GUARDED = ("ld.",)  # a load stays behind the test of its pointer: NVVM moves what has no side effect ahead of branches


def instruction(name: str, text: str, returns: tuple, takes: tuple, effects: str = "pure") -> Any:
    """Return a Numba intrinsic `name` that emits `text`; several results come back as a tuple."""
    constraints = ["=" + _REGISTER[t][0] for t in returns] + [_REGISTER[t][0] for t in takes]
    if effects == "memory":
        constraints.append("~{memory}")
    results: list[ir.Type] = [_REGISTER[t][1] for t in returns]
    result = results[0] if len(results) == 1 else ir.LiteralStructType(results) if results else ir.VoidType()
    function_type = ir.FunctionType(result, [_REGISTER[t][1] for t in takes])
    stays = effects != "pure" or any(mark in text for mark in _GUARDED)
    attributes = ("convergent",) if any(mark in text for mark in _COLLECTIVE) else ()
    python_type = types.void if not returns else returns[0] if len(returns) == 1 else types.Tuple(returns)

    def codegen(context, builder, sig, args):
        cast = [context.cast(builder, a, given, wanted) for a, given, wanted in zip(args, sig.args, takes, strict=True)]
        asm = ir.InlineAsm(function_type, text, ",".join(constraints), side_effect=stays)
        value = builder.call(asm, cast, attrs=attributes)
        if not returns:
            return context.get_dummy_value()
        if len(returns) == 1:
            return value
        parts = [builder.extract_value(value, i) for i in range(len(returns))]
        return context.make_tuple(builder, python_type, parts)

    names = ", ".join(f"a{i}" for i in range(len(takes)))
    scope = {"answer": (signature(python_type, *takes), codegen)}
    exec(f"def {name}(typingctx, {names}):\n    return answer\n", scope)  # Numba reads the arity off the function
    return intrinsic(scope[name])


# ---- arithmetic
exp2_approx = instruction("exp2_approx", "ex2.approx.ftz.f32 $0, $1;", (f32,), (f32,))  # 2 ulp
log2_approx = instruction("log2_approx", "lg2.approx.ftz.f32 $0, $1;", (f32,), (f32,))  # 1e-7 absolute near 1
divide = instruction("divide", "div.full.f32 $0, $1, $2;", (f32,), (f32, f32))  # 2 ulp; an exact one is a subroutine
rsqrt = instruction("rsqrt", "{.reg .f32 t; sqrt.rn.f32 t, $1; rcp.rn.f32 $0, t;}", (f32,), (f32,))
reciprocal = instruction("reciprocal", "rcp.approx.ftz.f32 $0, $1;", (f32,), (f32,))  # 1 ulp
minimum = instruction("minimum", "min.f32 $0, $1, $2;", (f32,), (f32, f32))  # a NaN loses
maximum = instruction("maximum", "max.f32 $0, $1, $2;", (f32,), (f32, f32))  # a NaN loses
offset = instruction("offset", "mad.wide.s32 $0, $2, $3, $1;", (i64,), (i64, i32, i32))  # base + index * step
divide_u32 = instruction("divide_u32", "div.u32 $0, $1, $2;", (i32,), (i32, i32))
permute_bytes = instruction("permute_bytes", "prmt.b32 $0, $1, $2, $3;", (u32,), (u32, u32, u32))
here_i32 = instruction("here_i32", "mov.b32 $0, $1;", (i32,), (i32,), "ordered")  # what follows from it stays behind it
float_bits = instruction("float_bits", "mov.b32 $0, $1;", (u32,), (f32,))
bits_float = instruction("bits_float", "mov.b32 $0, $1;", (f32,), (u32,))

# ---- number formats; "pair" is two 16-bit numbers in a uint32, the lower one first
pack_bf16 = instruction("pack_bf16", "cvt.rn.bf16x2.f32 $0, $2, $1;", (u32,), (f32, f32))
pack_f16 = instruction("pack_f16", "cvt.rn.f16x2.f32 $0, $2, $1;", (u32,), (f32, f32))
unpack_f16 = instruction(
    "unpack_f16", "{.reg .b16 l,h; mov.b32 {l,h}, $2; cvt.f32.f16 $0, l; cvt.f32.f16 $1, h;}", (f32, f32), (u32,)
)
e4m3_pair = instruction(  # two e4m3 in the low 16 bits -> a pair of float16, exact
    "e4m3_pair", "{.reg .b16 l,h; mov.b32 {l,h}, $1; cvt.rn.f16x2.e4m3x2 $0, l;}", (u32,), (u32,)
)
e5m2_pair = instruction("e5m2_pair", "{.reg .b16 l,h; mov.b32 {l,h}, $1; cvt.rn.f16x2.e5m2x2 $0, l;}", (u32,), (u32,))
int8_pair = instruction(  # the byte as the low bits of 1024 + 128 + x, then minus 1152
    "int8_pair",
    "{.reg .b32 t, c; xor.b32 t, $1, 0x8080; prmt.b32 t, t, 0x64646464, 0x4140;"
    " mov.b32 c, 0x64806480; sub.rn.f16x2 $0, t, c;}",
    (u32,),
    (u32,),
)

# ---- global memory
load_i32 = instruction("load_i32", "ld.global.nc.u32 $0, [$1];", (i32,), (i64,))
load_i64 = instruction("load_i64", "ld.global.nc.u64 $0, [$1];", (i64,), (i64,))
load_u32 = instruction("load_u32", "ld.global.nc.u32 $0, [$1];", (u32,), (i64,))
load_u32_if = instruction(  # 0 where it is not wanted
    "load_u32_if",
    "{.reg .pred p; setp.ne.s32 p, $2, 0; mov.u32 $0, 0; @p ld.global.nc.u32 $0, [$1];}",
    (u32,),
    (i64, i32),
)
load_u16_if = instruction(
    "load_u16_if",
    "{.reg .pred p; .reg .u16 t; setp.ne.s32 p, $2, 0; mov.u16 t, 0; @p ld.global.nc.u16 t, [$1]; cvt.u32.u16 $0, t;}",
    (u32,),
    (i64, i32),
)
load_u8_if = instruction(  # the last input where it is not wanted
    "load_u8_if",
    "{.reg .pred p; .reg .u16 t; setp.ne.s32 p, $2, 0; cvt.u16.u32 t, $3; @p ld.global.nc.u8 t, [$1];"
    " cvt.u32.u16 $0, t;}",
    (u32,),
    (i64, i32, i32),
)
load_u16 = instruction("load_u16", "{.reg .u16 t; ld.global.nc.u16 t, [$1]; cvt.u32.u16 $0, t;}", (u32,), (i64,))
load_u8 = instruction("load_u8", "{.reg .u16 t; ld.global.nc.u8 t, [$1]; cvt.u32.u16 $0, t;}", (u32,), (i64,))
load_f32 = instruction("load_f32", "ld.global.nc.f32 $0, [$1];", (f32,), (i64,))
load_2f32 = instruction("load_2f32", "ld.global.nc.v2.f32 {$0,$1}, [$2];", (f32, f32), (i64,))
load_2u32 = instruction("load_2u32", "ld.global.nc.v2.u32 {$0,$1}, [$2];", (u32, u32), (i64,))
load_2f32_if = instruction(  # zeros where they are not wanted
    "load_2f32_if",
    "{.reg .pred p; setp.ne.s32 p, $3, 0; mov.f32 $0, 0f00000000; mov.f32 $1, 0f00000000;"
    " @p ld.global.nc.v2.f32 {$0,$1}, [$2];}",
    (f32, f32),
    (i64, i32),
)
load_f64 = instruction(  # rounded to float32, the precision of all arithmetic here
    "load_f64", "{.reg .f64 t; ld.global.nc.f64 t, [$1]; cvt.rn.f32.f64 $0, t;}", (f32,), (i64,)
)
load_4u32 = instruction(
    "load_4u32", "ld.global.nc.L1::no_allocate.v4.u32 {$0,$1,$2,$3}, [$4];", (u32, u32, u32, u32), (i64,)
)
# coherent loads: for buffers that the same kernel also writes
read_f32 = instruction("read_f32", "ld.global.f32 $0, [$1];", (f32,), (i64,), "memory")
read_f64 = instruction(
    "read_f64", "{.reg .f64 t; ld.global.f64 t, [$1]; cvt.rn.f32.f64 $0, t;}", (f32,), (i64,), "memory"
)
read_f32_if = instruction(  # the last input, and no access, where the second is 0
    "read_f32_if",
    "{.reg .pred p; setp.ne.s32 p, $2, 0; mov.f32 $0, $3; @p ld.global.f32 $0, [$1];}",
    (f32,),
    (i64, i32, f32),
    "memory",
)
read_4u32 = instruction(  # through L1: past it, reads of merges are 8 % slower
    "read_4u32", "ld.global.v4.u32 {$0,$1,$2,$3}, [$4];", (u32, u32, u32, u32), (i64,), "memory"
)
read_4u32_if = instruction(  # zeros, and no access, where the second input is 0
    "read_4u32_if",
    "{.reg .pred p; setp.ne.s32 p, $5, 0; mov.u32 $0, 0; mov.u32 $1, 0; mov.u32 $2, 0; mov.u32 $3, 0;"
    " @p ld.global.v4.u32 {$0,$1,$2,$3}, [$4];}",
    (u32, u32, u32, u32),
    (i64, i32),
    "memory",
)
read_u16 = instruction("read_u16", "{.reg .u16 t; ld.global.u16 t, [$1]; cvt.u32.u16 $0, t;}", (u32,), (i64,), "memory")
store_f32 = instruction("store_f32", "st.global.f32 [$0], $1;", (), (i64, f32), "memory")
store_2f32 = instruction("store_2f32", "st.global.v2.f32 [$0], {$1,$2};", (), (i64, f32, f32), "memory")
store_f64 = instruction(
    "store_f64", "{.reg .f64 t; cvt.f64.f32 t, $1; st.global.f64 [$0], t;}", (), (i64, f32), "memory"
)
store_u32 = instruction("store_u32", "st.global.u32 [$0], $1;", (), (i64, u32), "memory")
store_u16 = instruction(
    "store_u16", "{.reg .u16 t; cvt.u16.u32 t, $1; st.global.u16 [$0], t;}", (), (i64, u32), "memory"
)
store_u8 = instruction("store_u8", "{.reg .u16 t; cvt.u16.u32 t, $1; st.global.u8 [$0], t;}", (), (i64, u32), "memory")
store_2u32 = instruction("store_2u32", "st.global.v2.u32 [$0], {$1,$2};", (), (i64, u32, u32), "memory")
store_4u32 = instruction("store_4u32", "st.global.v4.u32 [$0], {$1,$2,$3,$4};", (), (i64, u32, u32, u32, u32), "memory")

# a line asked into L2 ahead of a wait: one lane a line, more of them wait for each other
prefetch = instruction("prefetch", "prefetch.global.L2 [$0];", (), (i64,), "memory")

# ---- shared memory
shared_load_f32 = instruction("shared_load_f32", "ld.shared.f32 $0, [$1];", (f32,), (i32,), "memory")
shared_load_u32 = instruction("shared_load_u32", "ld.shared.u32 $0, [$1];", (u32,), (i32,), "memory")
shared_load_u16 = instruction(
    "shared_load_u16", "{.reg .u16 t; ld.shared.u16 t, [$1]; cvt.u32.u16 $0, t;}", (u32,), (i32,), "memory"
)
shared_load_u8 = instruction(
    "shared_load_u8", "{.reg .u16 t; ld.shared.u8 t, [$1]; cvt.u32.u16 $0, t;}", (u32,), (i32,), "memory"
)
shared_load_4u32 = instruction(
    "shared_load_4u32", "ld.shared.v4.u32 {$0,$1,$2,$3}, [$4];", (u32, u32, u32, u32), (i32,), "memory"
)
shared_store_f32 = instruction("shared_store_f32", "st.shared.f32 [$0], $1;", (), (i32, f32), "memory")
shared_store_2f32 = instruction("shared_store_2f32", "st.shared.v2.f32 [$0], {$1,$2};", (), (i32, f32, f32), "memory")
shared_store_4f32 = instruction(
    "shared_store_4f32", "st.shared.v4.f32 [$0], {$1,$2,$3,$4};", (), (i32, f32, f32, f32, f32), "memory"
)
shared_store_u32 = instruction("shared_store_u32", "st.shared.u32 [$0], $1;", (), (i32, u32), "memory")
shared_store_2u32 = instruction("shared_store_2u32", "st.shared.v2.u32 [$0], {$1,$2};", (), (i32, u32, u32), "memory")
shared_store_u16 = instruction(
    "shared_store_u16", "{.reg .u16 t; cvt.u16.u32 t, $1; st.shared.u16 [$0], t;}", (), (i32, u32), "memory"
)
shared_store_u8 = instruction(
    "shared_store_u8", "{.reg .u16 t; cvt.u16.u32 t, $1; st.shared.u8 [$0], t;}", (), (i32, u32), "memory"
)
copy_async = instruction(  # 16 bytes to shared memory; where the last input is 0 instead of 16, zeros, and no access
    "copy_async", "cp.async.cg.shared.global.L2::128B [$0], [$1], 16, $2;", (), (i32, i64, i32), "memory"
)
commit_copies = instruction("commit_copies", "cp.async.commit_group;", (), (), "memory")
WAIT_COPIES = tuple(  # WAIT_COPIES[n](): until at most the n newest groups of copies are under way
    instruction(f"wait_copies_{n}", f"cp.async.wait_group {n};", (), (), "memory") for n in range(4)
)

# ---- matrix instructions: 16x8 += 16x16 * 16x8
load_matrices = instruction(
    "load_matrices",
    "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {$0,$1,$2,$3}, [$4];",
    (u32, u32, u32, u32),
    (i32,),
    "memory",
)
load_matrices_transposed = instruction(
    "load_matrices_transposed",
    "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {$0,$1,$2,$3}, [$4];",
    (u32, u32, u32, u32),
    (i32,),
    "memory",
)


def _matrix_multiply(kind: str) -> Any:
    text = (
        f"mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32"
        " {$0,$1,$2,$3}, {$4,$5,$6,$7}, {$8,$9}, {$10,$11,$12,$13};"
    )
    return instruction(f"multiply_{kind}", text, (f32,) * 4, (u32,) * 6 + (f32,) * 4)


multiply_bf16 = _matrix_multiply("bf16")
multiply_f16 = _matrix_multiply("f16")

# ---- lanes and threads together
own_lane = instruction("own_lane", "mov.u32 $0, %laneid;", (i32,), (), "ordered")
exchange_f32 = instruction(  # the value of the lane whose number differs by xor
    "exchange_f32", "shfl.sync.bfly.b32 $0, $1, $2, 0x1f, 0xffffffff;", (f32,), (f32, i32), "ordered"
)
exchange_i32 = instruction(
    "exchange_i32", "shfl.sync.bfly.b32 $0, $1, $2, 0x1f, 0xffffffff;", (i32,), (i32, i32), "ordered"
)
from_lane_i32 = instruction(
    "from_lane_i32", "shfl.sync.idx.b32 $0, $1, $2, 0x1f, 0xffffffff;", (i32,), (i32, i32), "ordered"
)
from_lane_f32 = instruction(
    "from_lane_f32", "shfl.sync.idx.b32 $0, $1, $2, 0x1f, 0xffffffff;", (f32,), (f32, i32), "ordered"
)
from_lane_i64 = instruction(
    "from_lane_i64",
    "{.reg .b32 l,h; mov.b64 {l,h}, $1; shfl.sync.idx.b32 l, l, $2, 0x1f, 0xffffffff;"
    " shfl.sync.idx.b32 h, h, $2, 0x1f, 0xffffffff; mov.b64 $0, {l,h};}",
    (i64,),
    (i64, i32),
    "ordered",
)
ballot = instruction(  # bit i: lane i gave a nonzero value
    "ballot",
    "{.reg .pred p; setp.ne.s32 p, $1, 0; vote.sync.ballot.b32 $0, p, 0xffffffff;}",
    (u32,),
    (i32,),
    "ordered",
)
sync_warp = instruction("sync_warp", "bar.warp.sync 0xffffffff;", (), (), "memory")
sync_block = instruction("sync_block", "bar.sync 0;", (), (), "memory")
# clusters: blocks that are resident together and read each other's shared memory; a block alone is a cluster too
cluster_index = instruction("cluster_index", "mov.u32 $0, %clusterid.x;", (i32,), ())
cluster_rank = instruction("cluster_rank", "mov.u32 $0, %cluster_ctarank;", (i32,), ())
cluster_size = instruction("cluster_size", "mov.u32 $0, %cluster_nctarank;", (i32,), ())
arrive_cluster = instruction("arrive_cluster", "barrier.cluster.arrive.release.aligned;", (), (), "memory")
leave_cluster = instruction(  # arrives without waiting for what the thread has stored; what it loaded must be there
    "leave_cluster", "barrier.cluster.arrive.relaxed.aligned;", (), (), "memory"
)
wait_cluster = instruction("wait_cluster", "barrier.cluster.wait.acquire.aligned;", (), (), "memory")
remote_address = instruction(  # of the same place in the shared memory of the cluster's block of that rank
    "remote_address", "mapa.shared::cluster.u32 $0, $1, $2;", (i32,), (i32, i32)
)
remote_load_4u32 = instruction(
    "remote_load_4u32", "ld.shared::cluster.v4.u32 {$0,$1,$2,$3}, [$4];", (u32, u32, u32, u32), (i32,), "memory"
)
remote_load_2f32 = instruction(
    "remote_load_2f32", "ld.shared::cluster.v2.f32 {$0,$1}, [$2];", (f32, f32), (i32,), "memory"
)
# kernels that overlap: the next may start once all blocks have said so, and waits for the results itself
let_next_start = instruction("let_next_start", "griddepcontrol.launch_dependents;", (), (), "memory")
wait_for_earlier = instruction("wait_for_earlier", "griddepcontrol.wait;", (), (), "memory")


@intrinsic
def shared_address(typingctx, array):
    """Return the int32 address in the shared window of a ``cuda.shared.array``."""
    if not isinstance(array, types.Array):
        return None

    def codegen(context, builder, sig, args):
        data = context.make_array(sig.args[0])(context, builder, value=args[0]).data
        pointer = builder.addrspacecast(data, ir.PointerType(data.type.pointee, 3))
        return builder.ptrtoint(pointer, ir.IntType(32))

    return signature(i32, array), codegen

"""The two steps of a merge of attention states, in vectors: the weights of all heads of a row, then a head's values.

All addresses and strides are in bytes. Each operation gives its meaning in NumPy.
"""

from __future__ import annotations

import math

import llvmlite.ir as ir
from numba import types
from numba.extending import intrinsic

from nbattn.cpu_ref.lanes import TO_L2, Lanes, lane_count
from nbattn.cpu_ref.number_formats import DOUBLE, I64, itemsize
from nbattn.cpu_ref.row_copies import narrow
from nbattn.cpu_ref.tiles import LINE_BYTES
from nbattn.scoring import LOWEST_DOUBLE

STATES_PER_SUM = 16  # equal weights round alike, so one long float32 sum would drift by half an ulp a state
VECTORS_AT_ONCE = lane_count("float32") // 4  # of a row; each has two sums, which stay in registers
_BYTES = types.int64


@intrinsic
def weigh_states(typingctx, kind, s, s_stride, n, heads, weights, weight_stride, lse):
    """Turn the base-2 lse ``s[x, head]`` of n states, float64, into weights and the lse of their merge.

    ``top = s.max(0); p = 2**(s - top); weights = p / p.sum(0); lse = top + log2(p.sum(0))``, where the sums are float64
    and weights of the arithmetic type; with nothing but states of -inf the weights are 0 and lse -inf. Rows of heads
    are padded to whole vectors.
    """

    def codegen(context, builder, sig, args):
        _, s, s_stride, n, heads, weights, weight_stride, lse = args
        lanes = Lanes(builder, kind.tag)
        wide = ir.VectorType(DOUBLE, lanes.count)

        def splat(x):
            return ir.Constant(wide, [x] * lanes.count)

        def number(x):
            return x if lanes.vector == wide else builder.fptrunc(x, lanes.vector)

        def float64(x):
            return x if lanes.vector == wide else builder.fpext(x, wide)

        with lanes.loop(0, heads, lanes.count) as (head, _):
            column, weight_column = lanes.add(s, lanes.mul(head, 8)), lanes.add(weights, lanes.mul(head, lanes.bytes))
            highest, sums = lanes.variable(splat(LOWEST_DOUBLE)), lanes.variable(splat(0.0))
            with lanes.loop(0, n, 1) as (x, _):
                here = lanes.load_as(wide, lanes.add(column, lanes.mul(s_stride, x)), 8)
                builder.store(lanes.larger(here, lanes.read(highest)), highest)
            top = lanes.read(highest)
            with lanes.loop(0, n, 1) as (x, _):
                here = lanes.load_as(wide, lanes.add(column, lanes.mul(s_stride, x)), 8)
                weight = lanes.exp2(number(builder.fsub(here, top)))
                lanes.store(weight, lanes.add(weight_column, lanes.mul(weight_stride, x)))
                builder.store(builder.fadd(lanes.read(sums), float64(weight)), sums)
            total = lanes.read(sums)
            empty = builder.fcmp_ordered("==", total, splat(0.0))
            merged = builder.select(empty, splat(-math.inf), builder.fadd(top, lanes.log2(total)))
            lanes.store(merged, lanes.add(lse, lanes.mul(head, 8)))
            inverse = number(builder.select(empty, splat(0.0), builder.fdiv(splat(1.0), total)))
            with lanes.loop(0, n, 1) as (x, _):
                at = lanes.add(weight_column, lanes.mul(weight_stride, x))
                lanes.store(builder.fmul(lanes.load(at), inverse), at)
        return context.get_dummy_value()

    return types.void(kind, *[_BYTES] * 7), codegen


@intrinsic
def merge_values(typingctx, kind, out_kind, out, weights, weight_stride, rows, steps, n, head, coming, coming_head,
                 dim):  # fmt: skip
    """``out[:dim] = sum_x weights[x] * v[x, head, :dim]`` over the n states x whose weight is not 0, rounded once.

    State x has its values at ``rows[x] + head * steps[x]``; those at ``coming[x] + coming_head * steps[x]`` are
    prefetched. The values of a state of weight 0 are not used even if they are NaN.
    """

    def codegen(context, builder, sig, args):
        _, _, out, weights, weight_stride, rows, steps, n, head, coming, coming_head, dim = args
        lanes = Lanes(builder, kind.tag)
        size = itemsize(kind.tag)

        def add_state(x, d, sums, left):
            entry = lanes.mul(x, 8)
            row, step, later = (lanes.load_as(I64, lanes.add(a, entry), 8) for a in (rows, steps, coming))
            here = lanes.mul(d, size)
            row, later = (
                lanes.add(lanes.add(a, lanes.mul(step, h)), here) for a, h in ((row, head), (later, coming_head))
            )
            for line in range(0, len(sums) * lanes.count * size, LINE_BYTES):
                lanes.prefetch(lanes.add(later, line), TO_L2)
            weight = lanes.load_splat(lanes.add(weights, lanes.mul(weight_stride, x)))
            unused = builder.fcmp_ordered("==", weight, lanes.splat(0.0))
            for t, total in enumerate(sums):
                at = lanes.add(row, t * lanes.count * size)
                value = lanes.load_cache(at) if left is None else lanes.load_cache_up_to(at, left)
                old = lanes.read(total)
                builder.store(builder.select(unused, old, lanes.fma(value, weight, old)), total)

        def merge(d, vectors, left=None):
            totals = [lanes.variable(lanes.splat(0.0)) for _ in range(vectors)]
            with lanes.loop(0, n, STATES_PER_SUM) as (begin, _):
                sums = [lanes.variable(lanes.splat(0.0)) for _ in totals]
                end = lanes.add(begin, STATES_PER_SUM)
                end = builder.select(builder.icmp_signed("<", end, n), end, n)
                with lanes.loop(begin, end, 1) as (x, _):
                    add_state(x, d, sums, left)
                for part, total in zip(sums, totals, strict=True):
                    builder.store(builder.fadd(lanes.read(total), lanes.read(part)), total)
            for t, total in enumerate(totals):
                at = lanes.add(out, lanes.mul(lanes.add(d, t * lanes.count), itemsize(out_kind.tag)))
                value = narrow(lanes, out_kind.tag, lanes.read(total))
                if left is None:
                    lanes.store(value, at, align=1)
                else:
                    lanes.store_up_to(value, at, left)

        step = VECTORS_AT_ONCE * lanes.count
        whole = builder.and_(dim, lanes.const(-step))
        with lanes.loop(0, whole, step) as (d, _):
            merge(d, VECTORS_AT_ONCE)
        with lanes.loop(whole, dim, lanes.count) as (d, _):
            merge(d, 1, builder.sub(dim, d))
        return context.get_dummy_value()

    return types.void(kind, out_kind, *[_BYTES] * 10), codegen

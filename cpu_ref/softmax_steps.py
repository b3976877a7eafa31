"""What happens to the scores of a block between its two products: the running softmax, and sums folded into totals.

All addresses and strides are in bytes. Each operation gives its meaning in NumPy.
"""

from __future__ import annotations

import math

import llvmlite.ir as ir
from numba import types
from numba.extending import intrinsic

from nbattn.cpu_ref.lanes import EXACT, Lanes
from nbattn.cpu_ref.number_formats import I64
from nbattn.scoring import LOWEST, LOWEST_DOUBLE

FOLD_KEYS = 512  # after which running sums are folded into totals: equal weights round alike, sums would drift
SCORES_AT_ONCE = 4  # whose maxima are found side by side
_BYTES = types.int64


def _lowest(kind: str) -> float:
    """Return the number that `nbattn.scoring.shift` subtracts while no key has been kept."""
    return LOWEST_DOUBLE if kind == "float64" else float(LOWEST)


@intrinsic
def drop_outside(typingctx, kind, s, s_stride, n, key, first, end, rows, last_first, first_end):
    """``s[j, i] = -inf`` unless ``first[i] <= key + j < end[i]``, for ``j < n, i < rows``.

    `first` and `end` are int64, padded to whole vectors; all rows see ``last_first .. first_end``.
    """

    def codegen(context, builder, sig, args):
        _, s, s_stride, n, key, first, end, rows, last_first, first_end = args
        lanes = Lanes(builder, kind.tag)
        places = ir.VectorType(I64, lanes.count)

        def inside(here, low, high):
            return builder.and_(builder.icmp_signed("<=", low, here), builder.icmp_signed("<", here, high))

        with lanes.loop(0, n, 1) as (j, _):
            here = lanes.add(key, j)
            with (
                builder.if_then(builder.not_(inside(here, last_first, first_end))),
                lanes.loop(0, rows, lanes.count) as (row, _),
            ):
                low, high = (lanes.load_as(places, lanes.add(x, lanes.mul(row, 8)), 8) for x in (first, end))
                at = lanes.add(lanes.add(s, lanes.mul(s_stride, j)), lanes.mul(row, lanes.bytes))
                kept = inside(lanes.splat(here), low, high)
                lanes.store(builder.select(kept, lanes.load(at), lanes.splat(-math.inf)), at)
        return context.get_dummy_value()

    return types.void(kind, *[_BYTES] * 9), codegen


@intrinsic
def softmax_block(typingctx, kind, s, s_stride, n, rows, m, d_sum, alpha):
    """Fold a block of scores into the running softmax of `rows` rows (a multiple of the lanes).

    ``new = max(m, s[:n].max(0)); alpha = 2**(m - new); p = 2**(s[:n] - new); d_sum = d_sum * alpha + p.sum(0)``
    with p written over s and new over m. A score of -inf is a dropped key; while a row has kept none, m is -inf, p 0.
    """

    def codegen(context, builder, sig, args):
        _, s, s_stride, n, rows, m, d_sum, alpha = args
        lanes = Lanes(builder, kind.tag)
        lowest = lanes.splat(_lowest(kind.tag))
        with lanes.loop(0, rows, lanes.count) as (row, _):
            place = lanes.mul(row, lanes.bytes)
            column = lanes.add(s, place)
            old = lanes.load(lanes.add(m, place))
            found = [lanes.variable(old) for _ in range(SCORES_AT_ONCE)]  # a single maximum would wait for itself

            def look_at(j, maximum, column=column):
                score = lanes.load(lanes.add(column, lanes.mul(s_stride, j)))
                builder.store(lanes.larger(score, lanes.read(maximum)), maximum)

            whole = builder.and_(n, lanes.const(-SCORES_AT_ONCE))
            with lanes.loop(0, whole, SCORES_AT_ONCE) as (j, _):
                for i, maximum in enumerate(found):
                    look_at(lanes.add(j, i), maximum)
            with lanes.loop(whole, n, 1) as (j, _):
                look_at(j, found[0])
            largest = lanes.read(found[0])
            for maximum in found[1:]:
                largest = lanes.larger(lanes.read(maximum), largest)
            subtract = lanes.larger(largest, lowest)
            factor = lanes.exp2(builder.fsub(old, subtract))
            total = lanes.variable(lanes.splat(0.0))
            with lanes.loop(0, n, 1) as (j, _):
                cell = lanes.add(column, lanes.mul(s_stride, j))
                weight = lanes.exp2(builder.fsub(lanes.load(cell), subtract))
                lanes.store(weight, cell)
                builder.store(lanes.sum(lanes.read(total), weight), total)
            lanes.store(largest, lanes.add(m, place))
            lanes.store(factor, lanes.add(alpha, place))
            at = lanes.add(d_sum, place)
            lanes.store(lanes.fma(lanes.load(at), factor, lanes.read(total)), at)
        return context.get_dummy_value()

    return types.void(kind, *[_BYTES] * 7), codegen


@intrinsic
def fold_block(typingctx, kind, total, acc, stride, dim, total_sum, d_sum, total_m, m, factors, rows):
    """Add the running sums of `rows` rows to their totals; what the totals cannot hold is what runs on.

    ``f = 2**(total_m - m); total = total * f + acc; total_sum = total_sum * f + d_sum; total_m = m``, with f written
    to `factors`, the rounding errors to `acc` and `d_sum`. A row's sums stay short and exact this way: equal weights
    round alike, and one long sequence of float32 additions would drift, of blocks as of keys. `stride` is from row to
    row of `total` and of `acc`; all lines are padded to whole vectors.
    """

    def codegen(context, builder, sig, args):
        _, total, acc, stride, dim, total_sum, d_sum, total_m, m, factors, rows = args
        lanes = Lanes(builder, kind.tag)
        nothing = lanes.splat(0.0)

        def add(sums, running, factor):
            before, more = builder.fmul(lanes.load(sums), factor, flags=EXACT), lanes.load(running)
            after = builder.fadd(before, more, flags=EXACT)
            error = builder.fsub(more, builder.fsub(after, before, flags=EXACT), flags=EXACT)
            finite = builder.fcmp_ordered("==", builder.fsub(error, error, flags=EXACT), nothing, flags=EXACT)
            lanes.store(after, sums)
            lanes.store(builder.select(finite, error, nothing), running)

        with lanes.loop(0, rows, lanes.count) as (row, _):
            place = lanes.mul(row, lanes.bytes)
            new, old = (lanes.load(lanes.add(at, place)) for at in (m, total_m))
            factor = lanes.exp2(builder.fsub(old, lanes.larger(new, lanes.splat(_lowest(kind.tag)))))
            add(lanes.add(total_sum, place), lanes.add(d_sum, place), factor)
            lanes.store(new, lanes.add(total_m, place))
            lanes.store(factor, lanes.add(factors, place))
        with lanes.loop(0, rows, 1) as (row, _):
            factor = lanes.load_splat(lanes.add(factors, lanes.mul(row, lanes.bytes)))
            first = lanes.mul(row, stride)
            with lanes.loop(0, dim, lanes.count) as (d, _):
                inside = lanes.add(first, lanes.mul(d, lanes.bytes))
                add(lanes.add(total, inside), lanes.add(acc, inside), factor)
        return context.get_dummy_value()

    return types.void(kind, *[_BYTES] * 10), codegen

"""The three tile operations of the CPU kernels: scores, softmax, weighted values.

A tile is a few query rows by a few keys, or a few query rows by a slice of the value vectors; its accumulators stay in
vector registers. Few rows are multiplied with vectors along the head dimension; many rows fill the lanes of panels and
are multiplied with broadcast numbers, at the CPU's peak. Shapes are small constants, everything else is run-time.
Scores lie as ``s[key, row]``, so that the softmax works on whole vectors of rows and a weight is one broadcast load.
All addresses and strides are in bytes. Each operation gives its meaning in NumPy; `KEYS` keys make a block of few rows.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain

import llvmlite.ir as ir
from numba import types
from numba.extending import intrinsic

from nbattn.cpu_ref.cpu import REGISTER_BYTES
from nbattn.cpu_ref.lanes import TO_L1, TO_L2, Lanes, lane_count, uses_dot
from nbattn.cpu_ref.number_formats import I64, itemsize
from nbattn.cpu_ref.scratch import LINE_BYTES

KEYS = 16  # keys of a block: 64 of them overflow L2 together with the prefetched next block
PANEL_STEPS = 4  # along the head dimension that a score panel takes in a row, without counting or finding places
PANEL_VECTORS = 2  # of a panel: `panel_height` times as many sums, the panel and a broadcast fill the registers
SHARED_TILE_KEYS = 4  # of a score tile whose rows share vectors: two vectors of sums each
UNROLLED_KEYS = 2 if REGISTER_BYTES == 32 else 1  # of a value tile
_BYTES = types.int64


def tile_keys(kind: str) -> int:
    """Return how many keys a score tile of four rows has: for wide numbers two, whose rows are next in memory."""
    return min(lane_count(kind) // 4, 2 if itemsize(kind) >= 4 else 4)


def shares_keys(kind: str) -> bool:
    """Return whether rows of one KV head share the vectors of a score tile: `shared_numbers` of a key for each row.

    The load itself repeats a key's numbers for all rows, and fewer lanes are left to be summed at the end: with short
    vectors that takes half as long as the products. Narrow numbers would have to be widened more often.
    """
    return REGISTER_BYTES == 32 and itemsize(kind) >= 4


def shared_numbers(kind: str, queries: int) -> int:
    """Return how many numbers of each of `queries` rows lie side by side, so that two vectors hold all rows'."""
    return 2 * lane_count(kind) // queries


def row_tile_keys(kind: str) -> int:
    """Return how many keys a score tile of four rows of one KV head has."""
    return SHARED_TILE_KEYS if shares_keys(kind) else tile_keys(kind)


def _score_tile(queries: int, heads: int = 1):
    """Build the score tile of `queries` rows: a few keys, or one row by as many keys as there are lanes.

    With as many heads as rows each row has a KV head of its own.
    """

    def codegen_for(kind, spread):
        def codegen(context, builder, sig, args):
            _, _, q, q_stride, rows, head, head_stride, dim, scale, s, s_stride, coming, coming_head, later = args
            lanes = Lanes(builder, kind, uses_dot(kind))
            shared = shares_keys(kind) and queries > heads
            keys = tile_keys(kind) if heads > 1 else row_tile_keys(kind) if queries > 1 else lanes.count
            q_row, number_bytes, taken = [lanes.mul(q_stride, i) for i in range(queries)], lanes.query_bytes, lanes.step
            load_key, load_key_up_to = lanes.load_key, lanes.load_key_up_to
            if shared:
                taken = shared_numbers(kind, queries)
                q_row, number_bytes = [lanes.const(0), lanes.const(lanes.count * lanes.bytes)], queries * lanes.bytes
                load_key, load_key_up_to = lanes.share_key(taken), lanes.share_key_up_to(taken)
            q_row = [lanes.add(q, place) for place in q_row]
            vectors = len(q_row)
            same = vectors // heads

            def places(listed, inside):
                """Return where each key's rows of K lie, one a head."""
                first = [lanes.add(lanes.load_as(I64, lanes.add(listed, 8 * j), 8), inside) for j in range(keys)]
                return [[lanes.add(row, lanes.mul(head_stride, h)) for h in range(heads)] for row in first]

            k, ahead = places(rows, head), places(coming, coming_head)
            sums = [[lanes.variable(lanes.splat(0.0)) for _ in range(vectors)] for _ in range(keys)]
            size = itemsize(kind)

            def step(d, load):
                q_here = [lanes.load_query(lanes.add(row, lanes.mul(d, number_bytes))) for row in q_row]
                for j in range(keys):
                    for i in range(vectors):
                        if i % same == 0:
                            k_here = load(lanes.add(k[j][i // same], lanes.mul(d, size)))
                        builder.store(lanes.multiply_add(q_here[i], k_here, lanes.read(sums[j][i])), sums[j][i])

            line = max(LINE_BYTES // size, lanes.step)  # numbers that one prefetch brings
            whole = builder.and_(dim, lanes.const(-line))
            with lanes.loop(0, whole, line) as (d, _):
                for row in chain.from_iterable(ahead):  # one by one between the sums: a burst of them would be dropped
                    lanes.prefetch_ahead(lanes.add(row, lanes.mul(d, size)), spread)
                lines = lanes.add(later, lanes.mul(d, size * keys * heads))
                for place in range(0, keys * heads * LINE_BYTES, LINE_BYTES):
                    lanes.prefetch(lanes.add(lines, place), TO_L2)
                for part in range(0, line, taken):
                    step(lanes.add(d, part), load_key)
            with lanes.loop(whole, dim, taken) as (d, _):
                left = builder.sub(dim, d)
                step(d, lambda address: load_key_up_to(address, left))
            sums = [lanes.read(total) for total in chain.from_iterable(sums)]
            results, order = [lanes.sum_each(sums)], [range(keys * queries)]
            if shared:
                results, order = lanes.sum_runs(sums, taken)
            for result, pairs in zip(results, order, strict=True):  # `order` numbers a result's lanes, key by key
                result = lanes.product(result, lanes.splat(scale))
                for j in range(keys):
                    part = sorted((pair % queries, lane) for lane, pair in enumerate(pairs) if pair // queries == j)
                    if part:
                        place = lanes.add(lanes.mul(s_stride, j), part[0][0] * lanes.bytes)
                        lanes.store(lanes.pick(result, [lane for _, lane in part]), lanes.add(s, place))
            return context.get_dummy_value()

        return codegen

    def score_tile(typingctx, kind, spread, q, q_stride, rows, head, head_stride, dim, scale, s, s_stride, coming,
                   coming_head, later):  # fmt: skip
        """``s[j, i] = scale * q[i, :dim] @ k[j, h, :dim]`` for the tile's rows i, their heads h and keys j.

        Row j of K starts at ``rows[j] + head + h * head_stride``; `q` is zero-padded to whole vectors, and for a kind
        that `shares_keys` as `pack_query_tile_4` makes it where the rows have one head. The same rows
        of the list `coming`, from `coming_head` on, are prefetched if the CPU gains from it where rows are `spread` so
        (`PAGED` or `SCATTERED`), and as many bytes from `later` on to L2.
        """
        number = types.float64 if kind.tag == "float64" else types.float32
        return types.void(kind, spread, *[_BYTES] * 6, number, *[_BYTES] * 5), codegen_for(kind.tag, spread.tag)

    return intrinsic(score_tile)


def value_vectors(kind: str) -> int:
    """Return how many vectors of V a slice has, so that the accumulators of four rows fill half the registers."""
    return lane_count(kind) // 4


def _value_tile(queries: int, select: bool = False):
    """Build the value tile of `queries` rows: slices of `value_vectors` vectors, then ragged ones.

    With `select` a weight of exactly 0 marks a dropped key, whose value is not used even if it is NaN.
    """

    def codegen_for(kind, spread):
        def codegen(context, builder, sig, args):
            _, _, acc, acc_stride, p, p_stride, rows, head, begin, end, dim, alpha, coming, coming_head, later = args
            lanes = Lanes(builder, kind, uses_dot(kind) and not select)
            size = itemsize(kind)
            width = value_vectors(kind)
            at_once = 2 if lanes.dot else 1  # keys
            unrolled = UNROLLED_KEYS if queries > 1 and not lanes.dot else 1
            count = builder.sub(end, begin)
            first, last = (builder.lshr(x, lanes.const(at_once - 1)) for x in (begin, count))  # pairs with `dot`
            p = lanes.add(p, lanes.mul(p_stride, first))  # from here on keys are counted from `begin`: less to compute
            rows, coming = (lanes.add(table, lanes.mul(begin, 8)) for table in (rows, coming))

            def values_of(addresses, d, vectors, ragged):
                """Load a key's vectors of the slice at `d`; with `dot` the pairs of two keys', or of one's and 0."""
                inside = lanes.add(head, lanes.mul(d, size))
                at = [lanes.add(address, inside) for address in addresses]
                left = builder.sub(dim, d)
                if not lanes.dot:
                    if ragged:
                        return [lanes.load_cache_up_to(at[0], left)]
                    return [lanes.load_cache(lanes.add(at[0], t * lanes.count * size)) for t in range(vectors)]
                pairs = []
                for t in range(0, vectors, 2):
                    place = [lanes.add(address, t * lanes.count * size) for address in at]
                    words = [lanes.load_words_up_to(p, left) if ragged else lanes.load_words(p) for p in place]
                    pairs += lanes.interleave(words[0], words[1] if len(words) > 1 else ir.Constant(lanes.words, None))
                return pairs[:vectors]

            def slice_of(d, vectors, ragged=False):
                here = lanes.mul(d, size)
                place = [
                    [
                        lanes.add(lanes.add(acc, lanes.mul(acc_stride, i)), lanes.mul(lanes.add(d, t), lanes.bytes))
                        for t in range(0, vectors * lanes.count, lanes.count)
                    ]
                    for i in range(queries)
                ]
                # these keys are summed by themselves: equal weights round alike, and long sequential sums would drift
                sums = [[lanes.variable(lanes.splat(0.0)) for _ in place[i]] for i in range(queries)]
                slice_bytes = vectors * lanes.count * size
                lines = lanes.add(later, lanes.mul(here, count))

                def add(step, keys):
                    def listed(table):
                        places = [lanes.mul(lanes.add(lanes.mul(step, at_once), i), 8) for i in range(keys)]
                        return [lanes.load_as(I64, lanes.add(table, place), 8) for place in places]

                    for row in listed(coming):
                        ahead = lanes.add(lanes.add(row, coming_head), here)
                        for line in range(0, slice_bytes, LINE_BYTES):
                            lanes.prefetch_ahead(lanes.add(ahead, line), spread)
                    behind = lanes.add(lines, lanes.mul(step, at_once * slice_bytes))
                    for line in range(0, keys * slice_bytes, LINE_BYTES):
                        lanes.prefetch(lanes.add(behind, line), TO_L2)
                    values = values_of(listed(rows), d, vectors, ragged)
                    weights = lanes.add(p, lanes.mul(p_stride, step))
                    for i in range(queries):
                        weight = lanes.load_weight(lanes.add(weights, i * lanes.bytes))
                        dropped = builder.fcmp_ordered("==", weight, lanes.splat(0.0)) if select else None
                        for t in range(vectors):
                            old = lanes.read(sums[i][t])
                            new = lanes.multiply_add(weight, values[t], old)
                            builder.store(builder.select(dropped, old, new) if select else new, sums[i][t])

                even = lanes.const(0)
                if unrolled > 1 and not ragged:
                    even = builder.and_(last, lanes.const(-unrolled))
                    with lanes.loop(0, even, unrolled) as (step, _):
                        for i in range(unrolled):
                            add(lanes.add(step, i), at_once)
                with lanes.loop(even, last, 1) as (step, _):
                    add(step, at_once)
                if lanes.dot:  # an odd last key is by itself
                    with builder.if_then(builder.icmp_signed("<", lanes.mul(last, at_once), count)):
                        add(last, 1)
                for i in range(queries):
                    factor = lanes.load_splat(lanes.add(alpha, i * lanes.bytes))
                    for at, total in zip(place[i], sums[i], strict=True):
                        lanes.store(lanes.fma(lanes.load(at), factor, lanes.read(total)), at)

            whole = builder.and_(dim, lanes.const(-width * lanes.count))
            with lanes.loop(0, whole, width * lanes.count) as (d, _):
                slice_of(d, width)
            with lanes.loop(whole, dim, lanes.count) as (d, _):
                slice_of(d, 1, ragged=True)
            return context.get_dummy_value()

        return codegen

    def value_tile(typingctx, kind, spread, acc, acc_stride, p, p_stride, rows, head, begin, end, dim, alpha, coming,
                   coming_head, later):  # fmt: skip
        """``acc[i] = acc[i] * alpha[i] + sum_j p[j, i] * v[j]`` over ``begin <= j < end``, ``i < queries``.

        Row j of V starts at ``rows[j] + head``; `acc` rows are padded to whole vectors; ``coming[j] +
        coming_head`` is prefetched as by the score tile, and as many bytes from `later` on to L2. For a kind that
        `uses_dot`, `begin` is even and p is what `pack_weights` makes of the weights.
        """
        return types.void(kind, spread, *[_BYTES] * 13), codegen_for(kind.tag, spread.tag)

    return intrinsic(value_tile)


score_tile_4, score_tile_1, score_tile_heads = _score_tile(4), _score_tile(1), _score_tile(4, heads=4)
value_tile_4, value_tile_1, value_tile_1_select = _value_tile(4), _value_tile(1), _value_tile(1, select=True)


def panel_height() -> int:
    """Return how many broadcast numbers a panel is multiplied with at once: keys, or query rows."""
    return 12 if REGISTER_BYTES == 64 else 6


def panel_width(kind: str) -> int:
    """Return how many numbers a panel has side by side: query rows, or elements of the value vectors."""
    return PANEL_VECTORS * lane_count(kind)


def _panel_sums(lanes: Lanes, place_of: Callable, row_bytes: int, at_once: int, panel, steps) -> list[list]:
    """Return ``sum_k a[i, k] * panel[k, :]`` for `panel_height` rows i: numbers, or with `dot` pairs of them.

    Steps k are taken `at_once`, from a multiple of that on: ``a[i, k + u]`` lies at ``place_of(k)``, plus `row_bytes`
    for each i and a number for each u.
    """
    sums = [[lanes.variable(lanes.splat(0.0)) for _ in range(PANEL_VECTORS)] for _ in range(panel_height())]
    vector_bytes = lanes.count * lanes.bytes
    with lanes.loop(0, steps, at_once) as (k, _):
        here, place = lanes.add(panel, lanes.mul(k, PANEL_VECTORS * vector_bytes)), place_of(k)
        for u in range(at_once):
            lines = [lanes.add(here, (u * PANEL_VECTORS + t) * vector_bytes) for t in range(PANEL_VECTORS)]
            vectors = [lanes.load_query(line) for line in lines]
            for i, row_sums in enumerate(sums):
                factor = lanes.load_weight(lanes.add(place, i * row_bytes + u * lanes.bytes))
                for vector, total in zip(vectors, row_sums, strict=True):
                    lanes.builder.store(lanes.multiply_add(factor, vector, lanes.read(total)), total)
    return [[lanes.read(total) for total in row_sums] for row_sums in sums]


def key_place(lanes: Lanes, panel, step):
    """Return where a panel of `pack_keys` has numbers (or pairs) of its first key, from `step` on up to a vector."""
    inside = lanes.builder.and_(step, lanes.const(lanes.count - 1))
    vectors = lanes.mul(lanes.builder.sub(step, inside), panel_height() * lanes.bytes)
    return lanes.add(lanes.add(panel, vectors), lanes.mul(inside, lanes.bytes))


@intrinsic
def score_panel(typingctx, kind, k, q, steps, scale, s, s_stride):
    """``s[j, :panel_width] = scale * k[j] @ q[:, :panel_width]`` for ``j < panel_height``.

    `q` is a panel of `pack_queries`, k one of `pack_keys`; `steps` is the head size, or half of it with `uses_dot`,
    rounded up to `PANEL_STEPS`.
    """

    def codegen(context, builder, sig, args):
        _, k, q, steps, scale, s, s_stride = args
        lanes = Lanes(builder, kind.tag, uses_dot(kind.tag))
        factor = lanes.splat(scale)
        sums = _panel_sums(lanes, lambda step: key_place(lanes, k, step), REGISTER_BYTES, PANEL_STEPS, q, steps)
        for j, row_sums in enumerate(sums):
            for t, total in enumerate(row_sums):
                place = lanes.add(lanes.mul(s_stride, j), t * lanes.count * lanes.bytes)
                lanes.store(lanes.product(total, factor), lanes.add(s, place))
        return context.get_dummy_value()

    number = types.float64 if kind.tag == "float64" else types.float32
    return types.void(kind, *[_BYTES] * 3, number, *[_BYTES] * 2), codegen


@intrinsic
def value_panel(typingctx, kind, p, p_stride, v, steps, alpha, acc, acc_stride):
    """``acc[i] = acc[i] * alpha[i] + sum_j p[j, i] * v[j, :panel_width]`` for ``i < panel_height``.

    `v` is a panel of `pack_values`, `steps` are keys, or pairs of keys with `uses_dot`; p is as of `pack_weights`.
    """

    def codegen(context, builder, sig, args):
        _, p, p_stride, v, steps, alpha, acc, acc_stride = args
        lanes = Lanes(builder, kind.tag, uses_dot(kind.tag))
        rows = [lanes.add(acc, lanes.mul(acc_stride, i)) for i in range(panel_height())]
        for row in rows:  # used after the sums
            for place in range(0, panel_width(kind.tag) * lanes.bytes, LINE_BYTES):
                lanes.prefetch(lanes.add(row, place), TO_L1)
        sums = _panel_sums(lanes, lambda step: lanes.add(p, lanes.mul(p_stride, step)), lanes.bytes, 1, v, steps)
        for i, row_sums in enumerate(sums):
            factor = lanes.load_splat(lanes.add(alpha, i * lanes.bytes))
            for t, total in enumerate(row_sums):
                at = lanes.add(rows[i], t * lanes.count * lanes.bytes)
                lanes.store(lanes.fma(lanes.load(at), factor, total), at)
        return context.get_dummy_value()

    return types.void(kind, *[_BYTES] * 8), codegen

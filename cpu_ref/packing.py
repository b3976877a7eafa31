"""Bringing rows of caches, queries and weights into the order in which the tile operations read them."""

from __future__ import annotations

import llvmlite.ir as ir
from numba import types
from numba.extending import intrinsic

from nbattn.cpu_ref.cpu import REGISTER_BYTES
from nbattn.cpu_ref.lanes import Lanes, uses_dot
from nbattn.cpu_ref.number_formats import I32, I64, itemsize
from nbattn.cpu_ref.tiles import LINE_BYTES, PANEL_VECTORS, panel_height, panel_width, shared_numbers

_BYTES = types.int64


@intrinsic
def pack_queries(typingctx, kind, q, q_stride, rows, steps, panels):
    """``panels[row // width, k, row % width] = q[row, k]``: query rows side by side, `panel_width` in a panel.

    An element is a number, or a pair of bfloat16 for a kind that `uses_dot`; each row has `steps` of them.
    """

    def codegen(context, builder, sig, args):
        _, q, q_stride, rows, steps, panels = args
        lanes = Lanes(builder, kind.tag)
        width = panel_width(kind.tag)
        with lanes.loop(0, rows, 1) as (row, _):
            inside = builder.and_(row, lanes.const(width - 1))
            target = lanes.add(lanes.mul(lanes.mul(builder.sub(row, inside), steps), lanes.bytes), panels)
            target = lanes.add(target, lanes.mul(inside, lanes.bytes))
            source = lanes.add(q, lanes.mul(q_stride, row))
            with lanes.loop(0, steps, 1) as (k, _):
                element = lanes.load_as(lanes.integer, lanes.add(source, lanes.mul(k, lanes.bytes)), lanes.bytes)
                lanes.store(element, lanes.add(target, lanes.mul(k, width * lanes.bytes)))
        return context.get_dummy_value()

    return types.void(kind, *[_BYTES] * 5), codegen


def _pack_query_tile(queries: int):
    """Build what packs `queries` rows for the score tile of so many rows of a kind that `shares_keys`."""

    def codegen_for(kind):
        def codegen(context, builder, sig, args):
            _, q, q_stride, dim, tile = args
            lanes = Lanes(builder, kind)
            part = min(shared_numbers(kind, queries), lanes.count)
            numbers = ir.VectorType(lanes.number, part)
            with lanes.loop(0, dim, part) as (d, _):
                for i in range(queries):
                    source = lanes.add(lanes.add(q, lanes.mul(q_stride, i)), lanes.mul(d, lanes.bytes))
                    target = lanes.mul(lanes.add(lanes.mul(d, queries), i * part), lanes.bytes)
                    lanes.store(lanes.load_as(numbers, source, lanes.bytes), lanes.add(tile, target))
            return context.get_dummy_value()

        return codegen

    def pack_query_tile(typingctx, kind, q, q_stride, dim, tile):
        """``tile[d // part, i, d % part] = q[i, d]`` for the tile's rows i; part is `shared_numbers`."""
        return types.void(kind, *[_BYTES] * 4), codegen_for(kind.tag)

    return intrinsic(pack_query_tile)


pack_query_tile_4, pack_query_tile_1 = _pack_query_tile(4), _pack_query_tile(1)


@intrinsic
def pack_keys(typingctx, kind, rows, begin, end, dim, panels, key_bytes):
    """``panels[j // height, d // lanes, j % height, d % lanes] = k[j, d]`` for ``begin <= j < end``.

    Vectors of `panel_height` keys lie side by side, so that a product finds its numbers at constant distances. Numbers
    are widened, or stay as they are if the kind `uses_dot`, and are 0 up to whole vectors. Row j of K starts at
    ``rows[j]``; `key_bytes` are a packed key's.
    """

    def codegen(context, builder, sig, args):
        _, rows, begin, end, dim, panels, key_bytes = args
        lanes = Lanes(builder, kind.tag, uses_dot(kind.tag))
        load, load_up_to = lanes.load_cache, lanes.load_cache_up_to
        if lanes.dot:
            load, load_up_to = lanes.load_words, lanes.load_words_up_to
        height = panel_height()
        with lanes.loop(begin, end, 1) as (j, _):
            source = lanes.load_as(I64, lanes.add(rows, lanes.mul(j, 8)), 8)
            inside = builder.urem(j, lanes.const(height))
            target = lanes.add(panels, lanes.mul(key_bytes, builder.sub(j, inside)))
            target = lanes.add(target, lanes.mul(inside, REGISTER_BYTES))

            def copy(d, load_here, source=source, target=target):
                value = load_here(lanes.add(source, lanes.mul(d, itemsize(kind.tag))))
                lanes.store(value, lanes.add(target, lanes.mul(d, height * lanes.query_bytes)))

            whole = builder.and_(dim, lanes.const(-lanes.step))
            with lanes.loop(0, whole, lanes.step) as (d, _):
                copy(d, load)
            with lanes.loop(whole, dim, lanes.step) as (d, _):
                left = builder.sub(dim, d)
                copy(d, lambda address: load_up_to(address, left))
        return context.get_dummy_value()

    return types.void(kind, *[_BYTES] * 6), codegen


@intrinsic
def pack_values(typingctx, kind, rows, n, dim, panels, panel_bytes):
    """``panels[d // width, j, d % width] = v[j, d]`` for ``j < n``, widened: `panel_width` elements in a panel.

    Row j of V starts at ``rows[j]``, elements behind `dim` are 0. For a kind that `uses_dot` an element is the
    pair of two keys' numbers, ``panels[.., j // 2, ..]``, an odd last key paired with 0.
    """

    def codegen(context, builder, sig, args):
        _, rows, n, dim, panels, panel_bytes = args
        lanes = Lanes(builder, kind.tag, uses_dot(kind.tag))
        size, width = itemsize(kind.tag), panel_width(kind.tag)
        places = range(0, width, lanes.count)

        def vectors(j, d, left):
            """Load the panel's vectors of one key; all of them where `left` is None."""

            def load(key, at, one, one_up_to):
                entry = lanes.load_as(I64, lanes.add(rows, lanes.mul(key, 8)), 8)
                address = lanes.add(entry, lanes.mul(lanes.add(d, at), size))
                return one(address) if left is None else one_up_to(address, builder.sub(left, lanes.const(at)))

            if not lanes.dot:
                return [load(j, at, lanes.load_cache, lanes.load_cache_up_to) for at in places]
            there = builder.icmp_signed("<", lanes.add(j, 1), n)
            second = builder.select(there, lanes.add(j, 1), j)
            x, y = (load(key, 0, lanes.load_words, lanes.load_words_up_to) for key in (j, second))
            return lanes.interleave(x, builder.select(there, y, ir.Constant(y.type, None)))

        def copy(j, d, target, left=None):
            for at, vector in zip(places, vectors(j, d, left), strict=True):
                lanes.store(vector, lanes.add(target, at * lanes.bytes))

        whole = builder.and_(dim, lanes.const(-width))
        with lanes.loop(0, n, 2 if lanes.dot else 1) as (j, _):
            step = builder.lshr(j, lanes.const(1)) if lanes.dot else j
            first = lanes.add(panels, lanes.mul(step, width * lanes.bytes))

            def panel(d, first=first):
                return lanes.add(first, lanes.mul(builder.sdiv(d, lanes.const(width)), panel_bytes))

            with lanes.loop(0, whole, width) as (d, _):
                copy(j, d, panel(d))
            with lanes.loop(whole, dim, width) as (d, _):
                copy(j, d, panel(d), builder.sub(dim, d))
        return context.get_dummy_value()

    return types.void(kind, *[_BYTES] * 5), codegen


@intrinsic
def all_finite(typingctx, kind, panel, steps):
    """Return whether the first `steps` rows of a panel of `pack_values` hold no NaN and no infinity."""

    def codegen(context, builder, sig, args):
        _, panel, steps = args
        lanes = Lanes(builder, kind.tag, uses_dot(kind.tag))

        def wrong(address):
            if lanes.dot:
                words = lanes.load_words(address)
                exponent = ir.Constant(words.type, [0x7F80] * words.type.count)
                return builder.icmp_unsigned("==", builder.and_(words, exponent), exponent)
            value = lanes.load(address)
            return builder.fcmp_unordered("uno", builder.fsub(value, value), lanes.splat(0.0))

        flags = ir.VectorType(ir.IntType(1), lanes.step)
        found = lanes.variable(ir.Constant(flags, None))
        size = lanes.count * lanes.bytes
        with lanes.loop(0, lanes.mul(steps, PANEL_VECTORS * size), size) as (place, _):
            builder.store(builder.or_(lanes.read(found), wrong(lanes.add(panel, place))), found)
        bits = builder.bitcast(lanes.read(found), ir.IntType(lanes.step))
        return builder.icmp_unsigned("==", bits, ir.Constant(bits.type, 0))

    return types.boolean(kind, _BYTES, _BYTES), codegen


def _prefetch_row(lanes: Lanes, row, size) -> None:
    with lanes.loop(0, size, LINE_BYTES) as (place, _):
        lanes.prefetch(lanes.add(row, place))
    lanes.prefetch(lanes.add(row, lanes.builder.sub(size, lanes.const(1))))  # in a line more if rows are not aligned


@intrinsic
def prefetch_rows(typingctx, rows, n, size):
    """Bring `size` bytes from ``rows[j]`` on to L2, for ``j < n``."""

    def codegen(context, builder, sig, args):
        rows, n, size = args
        lanes = Lanes(builder, "float32")
        with lanes.loop(0, n, 1) as (j, _):
            entry = lanes.load_as(I64, lanes.add(rows, lanes.mul(j, 8)), 8)
            _prefetch_row(lanes, entry, size)
        return context.get_dummy_value()

    return types.void(*[_BYTES] * 3), codegen


@intrinsic
def fill(typingctx, kind, place, n, value):
    """``place[:n] = value`` of the kind's arithmetic type, for whole vectors."""

    def codegen(context, builder, sig, args):
        _, place, n, value = args
        lanes = Lanes(builder, kind.tag)
        vector = lanes.splat(value)
        with lanes.loop(0, n, lanes.count) as (i, _):
            lanes.store(vector, lanes.add(place, lanes.mul(i, lanes.bytes)))
        return context.get_dummy_value()

    return types.void(kind, _BYTES, _BYTES, types.float64 if kind.tag == "float64" else types.float32), codegen


@intrinsic
def pack_weights(typingctx, kind, p, p_stride, n, rows):
    """Round the weights to bfloat16 and put those of two keys side by side; nothing for kinds without pairs.

    ``p[j // 2, row]`` becomes the pair ``p[j, row], p[j + 1, row]``, the lower half first; an odd last key is
    paired with 0.
    """

    def codegen(context, builder, sig, args):
        _, p, p_stride, n, rows = args
        if not uses_dot(kind.tag):
            return context.get_dummy_value()
        lanes = Lanes(builder, "float32")
        words = ir.VectorType(I32, lanes.count)

        def word(x: int) -> ir.Constant:
            return ir.Constant(words, [x] * lanes.count)

        def rounded_bits(value):  # a weight is finite and positive, or a NaN that stays one
            bits = builder.bitcast(value, words)
            odd = builder.and_(builder.lshr(bits, word(16)), word(1))
            return builder.add(bits, builder.add(odd, word(0x7FFF)))

        with lanes.loop(0, rows, lanes.count) as (row, _), lanes.loop(0, n, 2) as (j, _):
            column = lanes.add(p, lanes.mul(row, lanes.bytes))
            at = lanes.add(column, lanes.mul(p_stride, j))
            there = builder.icmp_signed("<", lanes.add(j, 1), n)
            first = builder.lshr(rounded_bits(lanes.load(at)), word(16))
            second = builder.and_(rounded_bits(lanes.load(lanes.add(at, p_stride))), word(-65536))
            second = builder.select(there, second, ir.Constant(words, None))
            pair = builder.bitcast(builder.or_(first, second), lanes.vector)
            lanes.store(pair, lanes.add(column, lanes.mul(p_stride, builder.lshr(j, lanes.const(1)))))
        return context.get_dummy_value()

    return types.void(kind, *[_BYTES] * 4), codegen

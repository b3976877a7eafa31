"""A thin vocabulary over LLVM vectors: what the tile operations are written in.

Vectors are as wide as the CPU's registers (64 bytes with AVX-512, else 32), so the accumulators of one tile stay in
registers. LLVM splits them where the hardware is narrower: results never depend on the CPU, only speed does.
"""

from __future__ import annotations

import llvmlite.ir as ir
from numba.core import cgutils

from nbattn.cpu_ref.cpu import AHEAD_TO_L1, BFLOAT16_DOT, PREFETCHED_TWICE, REGISTER_BYTES, SCALE_BY_POWER
from nbattn.cpu_ref.number_formats import DOUBLE, ELEMENT, FLOAT, I16, I32, I64, widen
from nbattn.cpu_ref.primitives import EXP2_FLOAT32, EXP2_FLOAT64, LOG2_FLOAT64

ORDER_FREE = ("nsz", "contract", "arcp", "afn", "reassoc")  # never nnan or ninf: -inf and NaN carry meaning
EXACT = ("nsz",)  # one flag, for Numba gives all others to instructions that have none
_ROOT_HALF = 0x3FE6A09E667F3BCD  # the bits of sqrt(0.5)
TO_L1, TO_L2 = 3, 2  # localities of llvm.prefetch


class _BFloat(ir.Type):
    """LLVM's bfloat, which llvmlite does not know; used for the operands of the dot product alone."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BFloat)

    def __hash__(self) -> int:
        return hash(_BFloat)


def uses_dot(kind: str) -> bool:
    """Return whether products with a cache of this kind are taken in pairs of bfloat16, not widened."""
    return kind == "bfloat16" and BFLOAT16_DOT


def lane_count(kind: str) -> int:
    """Return how many numbers of a kind's arithmetic (float32, or float64 for float64) one vector holds."""
    return REGISTER_BYTES // (8 if kind == "float64" else 4)


class Lanes:
    """Emits vector code for one cache kind at the builder's position.

    With `dot`, queries and weights are pairs of bfloat16 and are multiplied with the cache as it lies in memory.
    """

    def __init__(self, builder: ir.IRBuilder, kind: str, dot: bool = False):
        self.builder, self.kind, self.dot = builder, kind, dot
        self.number = DOUBLE if kind == "float64" else FLOAT  # type of the arithmetic
        self.bytes = 8 if kind == "float64" else 4
        self.count = lane_count(kind)
        self.vector = ir.VectorType(self.number, self.count)
        self.integer = ir.IntType(8 * self.bytes)
        self.words = ir.VectorType(I16, 2 * self.count)  # 2 * count bfloat16 by their bits
        self.pairs = ir.VectorType(_BFloat(), 2 * self.count)
        self.step = 2 * self.count if dot else self.count  # numbers of a row that one multiplication takes
        self.query_bytes = 2 if dot else self.bytes

    # ---- scalars and addresses (byte addresses are i64)
    def const(self, x: int) -> ir.Constant:
        """Return an i64 constant."""
        return ir.Constant(I64, x)

    def add(self, a, b):
        """Return ``a + b`` of i64; b may be a Python int."""
        return self.builder.add(a, self.const(b) if isinstance(b, int) else b)

    def mul(self, a, b):
        """Return ``a * b`` of i64; b may be a Python int."""
        return self.builder.mul(a, self.const(b) if isinstance(b, int) else b)

    def load_as(self, element: ir.Type, address, align: int):
        """Load a value of an LLVM type."""
        value = self.builder.load(self.builder.inttoptr(address, ir.PointerType()), typ=element)
        value.align = align
        return value

    def splat(self, x):
        """Return a vector of equal lanes from a Python number or a scalar value."""
        if isinstance(x, (int, float)):
            return ir.Constant(self.vector, [float(x)] * self.count)
        undefined = ir.Constant(ir.VectorType(x.type, self.count), ir.Undefined)
        first = self.builder.insert_element(undefined, x, ir.Constant(I32, 0))
        return self.builder.shuffle_vector(
            first, undefined, ir.Constant(ir.VectorType(I32, self.count), [0] * self.count)
        )

    # ---- memory
    def load(self, address):
        """Load a vector of the arithmetic type."""
        return self.load_as(self.vector, address, 4)

    def load_weight(self, address):
        """Load one weight, or with `dot` the pair of weights of two keys, into all lanes."""
        if not self.dot:
            return self.load_splat(address)
        return self.builder.bitcast(self.splat(self.load_as(I32, address, 4)), self.pairs)

    def load_splat(self, address):
        """Load one number into all lanes."""
        return self.splat(self.load_as(self.number, address, self.bytes))

    def store(self, value, address, align: int = 4):
        """Store a vector."""
        self.builder.store(value, self.builder.inttoptr(address, ir.PointerType())).align = align

    def store_up_to(self, value, address, remaining):
        """Store the first ``min(remaining, lanes)`` lanes of a vector, without touching memory behind them."""
        shape, pointer = value.type, self.builder.inttoptr(address, ir.PointerType())
        mask = self._first(shape.count, remaining)
        name = "llvm.masked.store." + _suffix(shape) + ".p0"
        function = self._declare(name, ir.VoidType(), [shape, ir.PointerType(), I32, mask.type])
        self.builder.call(function, [value, pointer, ir.Constant(I32, 1), mask])

    def load_cache(self, address):
        """Load `count` cache elements and widen them."""
        element = ir.VectorType(ELEMENT[self.kind], self.count)
        return widen(self.builder, self.kind, self.load_as(element, address, 1))

    def load_cache_up_to(self, address, remaining):
        """Load ``min(remaining, count)`` cache elements, 0 in the other lanes, without touching memory behind them."""
        element = ir.VectorType(ELEMENT[self.kind], self.count)
        return widen(self.builder, self.kind, self._masked_load(element, address, remaining))

    def load_words(self, address):
        """Load ``2 * count`` bfloat16 by their bits."""
        return self.load_as(self.words, address, 1)

    def load_words_up_to(self, address, remaining):
        """Load ``min(remaining, 2 * count)`` bfloat16, 0 in the other places."""
        return self._masked_load(self.words, address, remaining)

    def load_query(self, address):
        """Load the query's operand of one multiplication."""
        return self.builder.bitcast(self.load_words(address), self.pairs) if self.dot else self.load(address)

    def load_key(self, address):
        """Load the cache's operand of one multiplication."""
        return self.builder.bitcast(self.load_words(address), self.pairs) if self.dot else self.load_cache(address)

    def load_key_up_to(self, address, remaining):
        """Load the cache's operand of the last multiplication of a row."""
        if self.dot:
            return self.builder.bitcast(self.load_words_up_to(address, remaining), self.pairs)
        return self.load_cache_up_to(address, remaining)

    def share_key(self, length: int):
        """Return what loads `length` cache elements and repeats them through a vector."""
        element = ir.VectorType(ELEMENT[self.kind], length)
        return lambda address: self._repeated(self.load_as(element, address, 1))

    def share_key_up_to(self, length: int):
        """Return what does the same with ``min(remaining, length)`` of them, and 0 for the others."""
        element = ir.VectorType(ELEMENT[self.kind], length)
        return lambda address, remaining: self._repeated(self._masked_load(element, address, remaining))

    def prefetch_ahead(self, address, spread: str):
        """Bring the line of an address near, shortly before its use, where the CPU gains from it for rows spread so."""
        if PREFETCHED_TWICE or spread == "scattered":
            self.prefetch(address, TO_L1 if AHEAD_TO_L1 else TO_L2)

    def prefetch(self, address, level: int = TO_L2):
        """Bring the line of an address to L2 or L1."""
        function = self._declare("llvm.prefetch.p0", ir.VoidType(), [ir.PointerType(), I32, I32, I32])
        pointer = self.builder.inttoptr(address, ir.PointerType())
        self.builder.call(function, [pointer, ir.Constant(I32, 0), ir.Constant(I32, level), ir.Constant(I32, 1)])

    # ---- arithmetic
    def multiply_add(self, a, b, c):
        """Add the products of two operands to the sums `c`."""
        if not self.dot:
            return self.fma(a, b, c)
        function = self._declare("llvm.x86.avx512bf16.dpbf16ps.512", self.vector, [self.vector, self.pairs, self.pairs])
        return self.builder.call(function, [c, a, b])

    def interleave(self, x, y):
        """Return the pairs ``x[i], y[i]`` of two vectors of words, `count` of them a result."""
        length = x.type.count
        order = [i for j in range(length) for i in (j, length + j)]
        shape = ir.VectorType(I32, 2 * self.count)
        parts = [order[first : first + 2 * self.count] for first in range(0, 2 * length, 2 * self.count)]
        shuffled = [self.builder.shuffle_vector(x, y, ir.Constant(shape, part)) for part in parts]
        return [self.builder.bitcast(words, self.pairs) for words in shuffled]

    def fma(self, a, b, c):
        """Return ``a * b + c``, rounded once."""
        return self.builder.call(self._math("fma", 3), [a, b, c])

    def product(self, a, b):
        """Return ``a * b``."""
        return self.builder.fmul(a, b, flags=ORDER_FREE)

    def sum(self, a, b):
        """Return ``a + b``; LLVM may change the order of sums."""
        return self.builder.fadd(a, b, flags=ORDER_FREE)

    def larger(self, a, b):
        """Return max(a, b); b where a is NaN."""
        return self.builder.select(self.builder.fcmp_ordered(">", a, b), a, b)

    def exp2(self, x):
        """Return 2**x: 0 far below zero and for -inf, NaN for NaN, exactly 1 for 0."""
        b = self.builder
        single = self.number is FLOAT
        low, bias, shift = (-126.0, 127, 23) if single else (-1022.0, 1023, 52)
        coefficients = EXP2_FLOAT32 if single else EXP2_FLOAT64
        if SCALE_BY_POWER:
            x = b.select(b.fcmp_ordered(">", self.splat(2 * low), x), self.splat(2 * low), x)
        whole = b.call(self._math("roundeven", 1), [x if SCALE_BY_POWER else self.larger(x, self.splat(low))])
        fraction = b.fsub(x, whole)
        value = self.splat(coefficients[-1])
        for c in reversed(coefficients[:-1]):
            value = self.fma(value, fraction, self.splat(c))
        if SCALE_BY_POWER:
            return self._scaled(value, whole)
        integers = ir.VectorType(self.integer, self.count)
        exponent = b.add(b.fptosi(whole, integers), ir.Constant(integers, [bias] * self.count))
        power = b.bitcast(b.shl(exponent, ir.Constant(integers, [shift] * self.count)), self.vector)
        return b.select(b.fcmp_ordered("<", x, self.splat(low)), self.splat(0.0), b.fmul(value, power))

    def _scaled(self, value, exponent):
        """Return ``value * 2**exponent`` with AVX-512."""
        letter, mask = ("s", ir.IntType(self.count)) if self.number is FLOAT else ("d", ir.IntType(self.count))
        name = f"llvm.x86.avx512.mask.scalef.p{letter}.512"
        function = self._declare(name, self.vector, [self.vector, self.vector, self.vector, mask, I32])
        every, usual = ir.Constant(mask, -1), ir.Constant(I32, 4)  # all lanes; rounding as the environment has it
        return self.builder.call(function, [value, exponent, value, every, usual])

    def log2(self, x):
        """Return log2 of a float64 vector of positive normal numbers; NaN for NaN."""
        b, integers = self.builder, ir.VectorType(I64, x.type.count)

        def splat(number, shape=x.type):
            return ir.Constant(shape, [number] * shape.count)

        bits = b.bitcast(x, integers)
        whole = b.ashr(b.sub(bits, splat(_ROOT_HALF, integers)), splat(52, integers))  # x / 2**whole is near 1
        near = b.bitcast(b.sub(bits, b.shl(whole, splat(52, integers))), x.type)
        z = b.fdiv(b.fsub(near, splat(1.0)), b.fadd(near, splat(1.0)))
        square = b.fmul(z, z)
        value = splat(LOG2_FLOAT64[-1])
        fma = self._declare(f"llvm.fma.{_suffix(x.type)}", x.type, [x.type] * 3)
        for c in reversed(LOG2_FLOAT64[:-1]):
            value = b.call(fma, [value, square, splat(c)])
        value = b.call(fma, [value, z, b.sitofp(whole, x.type)])
        return b.select(b.fcmp_unordered("uno", x, x), x, value)

    def sum_each(self, vectors: list) -> ir.Value:
        """Return one vector whose lane i is the sum over the lanes of ``vectors[i]``, by pairwise transposition.

        The number of vectors is a power of two, at most the number of lanes.
        """
        stride = 1
        while stride < self.count:
            if len(vectors) == 1:  # fewer vectors than lanes: each sum is still in parts
                vectors = 2 * vectors
            vectors = [self._add_pairs(vectors[i], vectors[i + 1], stride) for i in range(0, len(vectors), 2)]
            stride *= 2
        return vectors[0]

    def sum_runs(self, vectors: list, run: int) -> tuple[list, list[list[int]]]:
        """Return vectors of the sums of each run of `run` lanes, and which run, counted through all, each lane sums.

        The number of vectors and `run` are powers of two, the number not smaller.
        """
        order = [[(i * self.count + lane) // run for lane in range(self.count)] for i in range(len(vectors))]
        quad = 16 // self.bytes  # shuffles within 128 bits are the cheapest
        even = [
            first + lane
            for begin in range(0, self.count, quad)
            for first in (begin, self.count + begin)
            for lane in range(0, quad, 2)
        ]
        while run > 1:
            pairs = list(zip(vectors[::2], vectors[1::2], strict=True))
            vectors = [self.sum(self.pick(a, even, b), self.pick(a, [x + 1 for x in even], b)) for a, b in pairs]
            order = [[(a + b)[x] for x in even] for a, b in zip(order[::2], order[1::2], strict=True)]
            run //= 2
        return vectors, order

    def pick(self, a, picks: list[int], b=None):
        """Return a vector of some lanes of `a`, or of `a` and then `b`."""
        shape = ir.VectorType(I32, len(picks))
        return self.builder.shuffle_vector(a, a if b is None else b, ir.Constant(shape, picks))

    def _add_pairs(self, a, b, stride: int):
        """Return a step of `sum_each`, by the shuffles that are cheapest: within 128 bits, then of whole 128 bits."""
        quad = 16 // self.bytes
        low: list[int] = []
        high: list[int] = []
        if stride < quad:  # halves of 128 bits, `stride` lanes of a and b in turn
            for first in range(0, self.count, quad):
                for picks, begin in ((low, first), (high, first + quad // 2)):
                    for run in range(begin, begin + quad // 2, stride):
                        picks += [*range(run, run + stride), *range(self.count + run, self.count + run + stride)]
        else:
            for first in range(0, 2 * self.count, 2 * quad):
                low += range(first, first + quad)
                high += range(first + quad, first + 2 * quad)
        return self.sum(self.pick(a, low, b), self.pick(a, high, b))

    # ---- control
    def loop(self, start, stop, step: int):
        """Return a context manager that yields the i64 index of ``range(start, stop, step)``."""
        start = self.const(start) if isinstance(start, int) else start
        return cgutils.for_range_slice(self.builder, start, stop, self.const(step), inc=True)

    def variable(self, value):
        """Return a stack slot that holds `value`; LLVM keeps it in a register."""
        slot = cgutils.alloca_once(self.builder, value.type)
        self.builder.store(value, slot)
        return slot

    def read(self, slot):
        """Return what a variable holds."""
        return self.builder.load(slot, typ=slot.allocated_type)

    def _repeated(self, elements):
        """Return cache elements repeated through a vector and widened."""
        length = elements.type.count
        return widen(self.builder, self.kind, self.pick(elements, list(range(length)) * (self.count // length)))

    def _masked_load(self, shape: ir.VectorType, address, remaining):
        """Load the first `remaining` elements of a vector, 0 in the other places."""
        mask = self._first(shape.count, remaining)
        name = "llvm.masked.load." + _suffix(shape) + ".p0"
        function = self._declare(name, shape, [ir.PointerType(), I32, mask.type, shape])
        pointer = self.builder.inttoptr(address, ir.PointerType())
        return self.builder.call(function, [pointer, ir.Constant(I32, 1), mask, ir.Constant(shape, None)])

    def _first(self, count: int, remaining):
        """Return `count` flags, the first `remaining` of them true."""
        numbers = ir.Constant(ir.VectorType(I64, count), list(range(count)))
        undefined = ir.Constant(numbers.type, ir.Undefined)
        first = self.builder.insert_element(undefined, remaining, ir.Constant(I32, 0))
        bound = self.builder.shuffle_vector(first, undefined, ir.Constant(ir.VectorType(I32, count), None))
        return self.builder.icmp_signed("<", numbers, bound)

    def _math(self, name: str, arity: int):
        full = f"llvm.{name}.{_suffix(self.vector)}"
        return self._declare(full, self.vector, [self.vector] * arity)

    def _declare(self, name: str, result, arguments):
        return cgutils.get_or_insert_function(self.builder.module, ir.FunctionType(result, arguments), name)


def _suffix(vector: ir.VectorType) -> str:
    """Return LLVM's overload suffix of a vector type, e.g. ``v16f32``."""
    names = {"half": "f16", "float": "f32", "double": "f64"}
    element = str(vector.element)
    return f"v{vector.count}{names.get(element, element)}"

"""The machine behind the emulator: a block's threads and memory, and what each PTX instruction does to them.

Integers are Python integers that instructions wrap to their width; float32 is `numpy.float32`.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable
from typing import Any

import numpy as np
from greenlet import getcurrent

WARP = 32
SCOPES = {"warp": WARP, "warpgroup": 4 * WARP}  # anything else is the block
LANES = np.arange(WARP)
GROUP, QUAD = LANES // 4, LANES % 4  # r and c of a lane


class Block:
    """One block: its place in the grid and in its cluster, and its shared memory."""

    def __init__(self, index: tuple[int, int, int], rank: int, cluster: Cluster):
        self.index, self.rank, self.cluster = index, rank, cluster
        self.threads, self.lent = cluster.threads, cluster.lent
        self.shared = np.full(max(cluster.shared_bytes, 16), 0xFF, np.uint8)
        self.barriers: dict[int, Barrier] = {}
        self.unpublished = np.full(self.shared.size, -1, np.int16)  # whose write matrix units may not see yet


class Barrier:
    """A barrier in shared memory: arrivals of a phase, those that are missing, phases complete, threads that wait."""

    def __init__(self, count: int):
        self.count = self.missing = count
        self.phases, self.waiting = 0, []


class Cluster:
    """Blocks that run together, their waiting threads, numbered through, and the global memory they may touch."""

    def __init__(self, indices: list, threads: int, shared_bytes: int, lent: list[tuple[int, int]]):
        self.threads, self.shared_bytes, self.lent = threads, shared_bytes, lent
        self.blocks = [Block(index, rank, self) for rank, index in enumerate(indices)]
        self.waiting: dict[Any, dict[int, tuple[str, Any]]] = {}
        self.answers: dict[int, Any] = {}
        self.ready = list(range(threads * len(indices)))
        self.hub = getcurrent()


class Thread:
    """One thread: its place in the block and its copies under way."""

    def __init__(self, number: int, block: Block):
        self.number, self.block = number, block
        self.warp, self.lane = divmod(number, WARP)
        self.serial = block.rank * block.threads + number
        self.arrived = False  # at the cluster's barrier, and has not waited yet
        self.started: list[tuple[int, int, int]] = []
        self.groups: list[list[tuple[int, int, int]]] = []


current: Any = None  # the thread that runs; the emulator sets it


def together(scope: str, name: str, value: Any, combine: Callable[[list], list] | None = None) -> Any:
    """Wait for all threads of a scope, then hand each its part of ``combine(values)``."""
    thread = current
    block, cluster = thread.block, thread.block.cluster
    count = SCOPES.get(scope) or block.threads * (len(cluster.blocks) if scope == "cluster" else 1)
    first = thread.serial // count * count
    key = (scope, first)
    arrived = cluster.waiting.setdefault(key, {})
    arrived[thread.serial] = (name, value)
    if len(arrived) == count:
        names = {reached for reached, _ in arrived.values()}
        assert len(names) == 1, f"divergent collectives in {key}: {names}"
        values = [arrived[first + i][1] for i in range(count)]
        answers = combine(values) if combine else [None] * count
        del cluster.waiting[key]
        for i in range(count):
            cluster.answers[first + i] = answers[i]
            cluster.ready.append(first + i)
    cluster.hub.switch()
    return cluster.answers.pop(thread.serial)


def wrap(value: Any, bits: int, signed: bool) -> int:
    """Return the integer as a register of that width holds it."""
    value = int(value) & ((1 << bits) - 1)
    return value - (1 << bits) if signed and value >> (bits - 1) else value


def shared(address: int, count: int, rank: int | None = None) -> np.ndarray:
    """Return `count` bytes of the shared memory of the thread's block, or of the block of a rank in its cluster."""
    memory = (current.block if rank is None else current.block.cluster.blocks[rank]).shared
    assert 0 <= address <= memory.size - count, f"shared memory has {memory.size} bytes, got {address}"
    assert address % count == 0, f"misaligned shared access of {count} bytes at {address}"
    return memory[address : address + count]


def memory(address: int, count: int) -> np.ndarray:
    """Return `count` bytes of global memory, which must belong to a lent array."""
    address = int(address)
    inside = any(begin <= address and address + count <= end for begin, end in current.block.lent)
    assert inside, f"global access of {count} bytes outside every array"
    assert address % count == 0, f"misaligned global access of {count} bytes"
    return np.ctypeslib.as_array((ctypes.c_uint8 * count).from_address(address))


def _float(bits: Any) -> np.float32:
    return np.uint32(wrap(bits, 32, False)).view(np.float32)


def _bits(value: Any) -> int:
    return int(np.float32(value).view(np.uint32))


def _bf16(value: Any) -> int:
    if np.isnan(value):
        return 0x7FFF
    bits = _bits(value)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16) & 0xFFFF


def _f16(value: Any) -> int:
    return int(np.float32(value).astype(np.float16).view(np.uint16))


def _halves(word: int) -> tuple[np.float32, np.float32]:
    pair = np.array([word & 0xFFFF, word >> 16 & 0xFFFF], np.uint16).view(np.float16).astype(np.float32)
    return pair[0], pair[1]


def _eight_bit_pair(dtype: Any) -> Callable:
    def widen(word):
        pair = np.array([word & 0xFF, word >> 8 & 0xFF], np.uint8).view(dtype).astype(np.float16).view(np.uint16)
        return int(pair[0]) | int(pair[1]) << 16

    return widen


NUMBERS = {
    "bf16": lambda bits: (bits << 16).astype(np.uint32).view(np.float32),
    "f16": lambda bits: bits.astype(np.uint16).view(np.float16).astype(np.float32),
}


def _multiply(number_of: Callable) -> Callable:
    """Return ``mma.m16n8k16``: every lane's fragments gathered, multiplied in float32, and spread again."""

    def combine(lanes):
        words = np.array([[wrap(x, 32, False) for x in lane[:6]] for lane in lanes], np.uint32)
        given = np.array([lane[6:] for lane in lanes], np.float32)
        low, high = number_of(words & 0xFFFF), number_of(words >> 16)
        a, b, c = np.zeros((16, 16), np.float32), np.zeros((16, 8), np.float32), np.zeros((16, 8), np.float32)
        for i in range(4):
            row, column = GROUP + 8 * (i % 2), 2 * QUAD + 8 * (i // 2)
            a[row, column], a[row, column + 1] = low[:, i], high[:, i]
            c[GROUP + 8 * (i // 2), 2 * QUAD + i % 2] = given[:, i]
        for i in range(2):
            b[2 * QUAD + 8 * i, GROUP], b[2 * QUAD + 8 * i + 1, GROUP] = low[:, 4 + i], high[:, 4 + i]
        d = c + a @ b
        spread = np.stack([d[GROUP + 8 * (i // 2), 2 * QUAD + i % 2] for i in range(4)], 1)
        return [tuple(row) for row in spread]

    return lambda *fragments: together("warp", "multiply", fragments, combine)


def _load_matrices(transposed: bool) -> Callable:
    def combine(addresses):
        rows = [shared(wrap(address, 32, True), 16).view(np.uint16) for address in addresses]
        matrices = np.stack(rows).reshape(4, 8, 8)
        if transposed:
            matrices = matrices.transpose(0, 2, 1)
        low = matrices[:, GROUP, 2 * QUAD].astype(np.int64)
        high = matrices[:, GROUP, 2 * QUAD + 1].astype(np.int64)
        words = low | high << 16
        return [tuple(int(x) for x in words[:, lane]) for lane in range(WARP)]

    return lambda address: together("warp", "load_matrices", address, combine)


def _exchange(value: Any, mask: int) -> Any:
    return together("warp", "exchange", (value, mask), lambda all_: [all_[i ^ all_[i][1]][0] for i in range(WARP)])


def _from_lane(value: Any, lane: int) -> Any:
    return together("warp", "from_lane", (value, lane), lambda all_: [all_[all_[i][1] % WARP][0] for i in range(WARP)])


def _ballot(value: Any) -> int:
    def combine(values):
        return [sum(1 << i for i in range(WARP) if wrap(values[i], 32, True) != 0)] * WARP

    return together("warp", "ballot", value, combine)


def _copy_async(target: int, source: int, count: int) -> None:
    assert count in (0, 16)
    current.started.append((wrap(target, 32, True), int(source), count))


def _commit() -> None:
    current.groups.append(current.started)
    current.started = []


def _wait(newest: int) -> Callable:
    def wait():
        while len(current.groups) > newest:
            for target, source, count in current.groups.pop(0):
                shared(target, 16)[:] = memory(source, 16) if count else 0
                current.block.unpublished[target : target + 16] = current.number

    return wait


def _arrive() -> None:
    assert not current.arrived, "arrived twice at the cluster's barrier"
    current.arrived = True


def _wait_cluster() -> None:
    assert current.arrived, "waits at the cluster's barrier before it has arrived"
    together("cluster", "wait_cluster", None)
    current.arrived = False


def _remote_load_4u32_if(address: int, rank: int, wanted: int) -> tuple[int, ...]:
    if not wanted:
        return 0, 0, 0, 0
    return tuple(int(x) for x in shared(wrap(address, 32, True), 16, rank).view(np.uint32))


def _publish_writes() -> None:
    unpublished = current.block.unpublished
    unpublished[unpublished == current.number] = -1


def _init_barrier(address: int, count: int) -> None:
    barriers = current.block.barriers
    assert address % 8 == 0, f"a misaligned barrier at {address}"
    assert address not in barriers, f"a barrier at {address} is made twice"
    barriers[address] = Barrier(count)


def _arrive_at_barrier(address: int) -> None:
    barrier = current.block.barriers[address]
    barrier.missing -= 1
    if barrier.missing == 0:
        barrier.missing, barrier.phases = barrier.count, barrier.phases + 1
        current.block.cluster.ready += barrier.waiting
        barrier.waiting = []


def _wait_at_barrier(address: int, parity: int) -> None:
    """Wait until the phase of that parity is complete: it is if the one under way has the other."""
    barrier, cluster = current.block.barriers[address], current.block.cluster
    while barrier.phases & 1 == parity:
        barrier.waiting.append(current.serial)
        cluster.hub.switch()


def _any_of_group(value: int, barrier: int) -> int:
    assert barrier == 1 + current.number // SCOPES["warpgroup"]
    return together("warpgroup", "any_of_group", value, lambda values: [int(any(values))] * len(values))


def _matrix(descriptor: int, rows: int, along_rows: bool) -> np.ndarray:
    """Return the bits ``[rows, 16]`` of a matrix in shared memory, a side of a product of a warpgroup.

    By the PTX manual's canonical layouts of the 128-byte swizzle: eight rows of 128 bytes, whose chunks of 16 bytes are
    exchanged by three bits of the address, repeat at the second stride; if it is read `along_rows` of memory, 64
    columns of such rows repeat at the first stride.
    """
    start, first, second = (16 * (descriptor >> bit & 0x3FFF) for bit in (0, 16, 32))
    assert wrap(descriptor, 64, False) >> 49 == 1 << 13, "128-byte swizzle, rows that start at multiples of 1024"
    row, column = np.arange(rows)[:, None], np.arange(16)[None, :]
    if along_rows:
        address = start + row // 64 * first + row % 64 * 2 + column // 8 * second + column % 8 * 128
    else:
        address = start + row // 8 * second + row % 8 * 128 + column * 2
    address = address ^ (address >> 7 & 7) << 4
    block = current.block
    assert (block.unpublished[address] < 0).all(), "matrix units read what no fence has published"
    return block.shared.view(np.uint16)[address // 2]


def warpgroup_product(text: str, keeps: bool) -> Callable:
    """Return the stand-in of a product of `nbattn.cuda_kernels.warpgroup`, which executes its text at once."""
    add = r"add\.s64 (\w+), \$(\d+), (\d+);"
    multiply = r"m64n(\d+)k16\.f32\.(\w+)\.\w+ \{[^}]*\}, (\{[^}]*\}|a), b, ([ft]), 1, 1, ([01, ]+);"
    lines = re.findall(f"{add}|{multiply}", text)

    def combine(lanes):
        numbers = len(lanes[0][0])
        tile, e = np.divmod(np.arange(numbers), 4)
        thread = np.arange(128)[:, None]
        row, column = thread // 32 * 16 + thread % 32 // 4 + e // 2 * 8, tile * 8 + thread % 4 * 2 + e % 2
        d = np.zeros((64, 2 * numbers), np.float32)
        if keeps:
            d[row, column] = [lane[0] for lane in lanes]
        before = numbers * (1 + keeps) - 1  # operands ahead of the first input, which is a lane's second value
        registers: dict[str, int] = {}
        for target, operand, offset, columns, kind, left, adds, transposed in lines:
            if target:
                registers[target] = lanes[0][int(operand) - before] + int(offset)
                continue
            assert int(columns) == 2 * numbers
            if left == "a":
                a = _matrix(registers["a"], 64, False)
            else:
                a = np.zeros((64, 16), np.uint32)
                for i, place in enumerate(re.findall(r"\d+", left)):
                    words = np.array([wrap(lane[int(place) - before], 32, False) for lane in lanes], np.uint32)
                    r, k = row[:, 0] + i % 2 * 8, thread[:, 0] % 4 * 2 + i // 2 * 8
                    a[r, k], a[r, k + 1] = words & 0xFFFF, words >> 16
            b = _matrix(registers["b"], 2 * numbers, transposed[-1] == "1")
            product = NUMBERS[kind](a.astype(np.uint32)) @ NUMBERS[kind](b.astype(np.uint32)).T
            d = d + product if adds == "t" else product
        return list(d[row, column])

    def product(target, *operands):
        flat = [x for operand in operands for x in (operand if isinstance(operand, list) else [operand])]
        target[:] = together("warpgroup", text[:120], (list(target), *flat), combine)

    return product


def _permute(low: int, high: int, select: int) -> int:
    pool = (low & 0xFFFFFFFF) | (high & 0xFFFFFFFF) << 32
    return sum((pool >> 8 * ((select >> 4 * i) & 7) & 0xFF) << 8 * i for i in range(4))


def _reader(access: Callable, dtype: Any, count: int = 1) -> Callable:
    convert = dtype if dtype in (np.float32, np.float64) else int

    def load(address):
        got = access(wrap(address, 64, True), np.dtype(dtype).itemsize * count).view(dtype)
        return tuple(convert(x) for x in got) if count > 1 else convert(got[0])

    return load


def _writer(access: Callable, dtype: Any) -> Callable:
    bits = 8 * np.dtype(dtype).itemsize

    def store(address, *values):
        kept = values if dtype in (np.float32, np.float64) else [wrap(x, bits, False) for x in values]
        address, size = wrap(address, 64, True), len(values) * bits // 8
        access(address, size).view(dtype)[:] = kept
        if access is shared:
            current.block.unpublished[address : address + size] = current.number

    return store


def _stand_ins() -> dict[str, Callable]:
    from ml_dtypes import float8_e4m3fn, float8_e5m2

    one = np.float32(1)
    found: dict[str, Callable] = {
        "exp2_approx": lambda x: np.exp2(np.float32(x)),
        "log2_approx": lambda x: np.log2(np.float32(x)),
        "divide": lambda x, y: np.float32(x) / np.float32(y),
        "rsqrt": lambda x: one / np.sqrt(np.float32(x)),
        "maximum": lambda x, y: np.fmax(np.float32(x), np.float32(y)),
        "reciprocal": lambda x: one / np.float32(x),
        "minimum": lambda x, y: np.fmin(np.float32(x), np.float32(y)),
        "offset": lambda base, index, step: base + wrap(index, 32, True) * wrap(step, 32, True),
        "divide_u32": lambda x, y: wrap(x, 32, False) // wrap(y, 32, False),
        "permute_bytes": _permute,
        "float_bits": _bits,
        "bits_float": _float,
        "pack_bf16": lambda low, high: _bf16(low) | _bf16(high) << 16,
        "pack_f16": lambda low, high: _f16(low) | _f16(high) << 16,
        "unpack_f16": _halves,
        "e4m3_pair": _eight_bit_pair(float8_e4m3fn),
        "e5m2_pair": _eight_bit_pair(float8_e5m2),
        "int8_pair": _eight_bit_pair(np.int8),
        "multiply_bf16": _multiply(NUMBERS["bf16"]),
        "multiply_f16": _multiply(NUMBERS["f16"]),
        "load_matrices": _load_matrices(False),
        "load_matrices_transposed": _load_matrices(True),
        "exchange_f32": _exchange,
        "exchange_i32": _exchange,
        "from_lane_i32": _from_lane,
        "from_lane_f32": _from_lane,
        "from_lane_i64": _from_lane,
        "ballot": _ballot,
        "sync_warp": lambda: together("warp", "sync_warp", None),
        "cluster_index": lambda: current.block.index[0] // len(current.block.cluster.blocks),
        "cluster_rank": lambda: current.block.rank,
        "cluster_size": lambda: len(current.block.cluster.blocks),
        "arrive_cluster": _arrive,
        "leave_cluster": _arrive,
        "wait_cluster": _wait_cluster,
        "remote_load_4u32_if": _remote_load_4u32_if,
        "remote_load_2f32": lambda address, rank: tuple(shared(wrap(address, 32, True), 8, rank).view(np.float32)),
        "sync_block": lambda: together("block", "sync_block", None),
        "publish_writes": _publish_writes,
        "any_of_group": _any_of_group,
        "registers_of_thread": lambda: None,
        "init_barrier": _init_barrier,
        "arrive_at_barrier": _arrive_at_barrier,
        "wait_at_barrier": _wait_at_barrier,
        "wait_products_0": lambda: None,
        "wait_products_1": lambda: None,
        "hold": lambda array: None,
        "copy_async": _copy_async,
        "commit_copies": _commit,
        "shared_address": lambda array: 0,
        "let_next_start": lambda: None,
        "wait_for_earlier": lambda: None,
        "keep_rolled": lambda: None,
        "unroll_fully": lambda: None,
        "load_4u32": _reader(memory, np.uint32, 4),
        "prefetch": _reader(memory, np.uint8),
        "load_2u32": _reader(memory, np.uint32, 2),
        "load_2f32": _reader(memory, np.float32, 2),
        "shared_load_4u32": _reader(shared, np.uint32, 4),
        "store_2u32": _writer(memory, np.uint32),
        "store_2f32": _writer(memory, np.float32),
        "store_4u32": _writer(memory, np.uint32),
        "shared_store_2f32": _writer(shared, np.float32),
        "shared_store_2u32": _writer(shared, np.uint32),
        "shared_store_4f32": _writer(shared, np.float32),
    }
    load_f64, store_f64 = _reader(memory, np.float64), _writer(memory, np.float64)
    found["load_f64"] = found["read_f64"] = lambda address: np.float32(load_f64(address))
    found["store_f64"] = lambda address, value: store_f64(address, np.float64(value))
    four, number = _reader(memory, np.uint32, 4), _reader(memory, np.float32)
    found["read_4u32"] = four
    found["read_4u32_if"] = lambda address, wanted: four(address) if wanted else (0, 0, 0, 0)
    found["read_f32_if"] = lambda address, wanted, otherwise: number(address) if wanted else np.float32(otherwise)
    two, zero = _reader(memory, np.float32, 2), np.float32(0)
    found["load_2f32_if"] = lambda address, wanted: two(address) if wanted else (zero, zero)
    word = _reader(memory, np.uint32)
    found["load_u32_if"] = lambda address, wanted: word(address) if wanted else 0
    for n in range(4):
        found[f"wait_copies_{n}"] = _wait(n)
    dtypes = {"i32": np.int32, "i64": np.int64, "u32": np.uint32, "u16": np.uint16, "u8": np.uint8, "f32": np.float32}
    for name, dtype in dtypes.items():
        found[f"load_{name}"] = found[f"read_{name}"] = _reader(memory, dtype)
        found[f"store_{name}"] = _writer(memory, dtype)
        found[f"shared_load_{name}"] = _reader(shared, dtype)
        found[f"shared_store_{name}"] = _writer(shared, dtype)
    return found


STAND_INS = _stand_ins()

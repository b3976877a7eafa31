"""What each PTX instruction does to the emulator's machine, by the name its primitive has in the kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import machine
import numpy as np
from machine import SCOPES, WARP, Barrier, ask_ahead, memory, shared, together, wrap
from matrix_units import NUMBERS, load_matrices, multiply

RANK_SHIFT = 20  # of a remote address: the rank of the block above the place in its shared memory


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
    machine.current.started.append((wrap(target, 32, True), int(source), count))


def _commit() -> None:
    machine.current.groups.append(machine.current.started)
    machine.current.started = []


def _wait(newest: int) -> Callable:
    def wait():
        while len(machine.current.groups) > newest:
            for target, source, count in machine.current.groups.pop(0):
                shared(target, 16)[:] = memory(source, 16) if count else 0
                machine.current.block.unpublished[target : target + 16] = machine.current.number

    return wait


def _wait_for_earlier() -> None:
    machine.current.waited = True


def _arrive() -> None:
    assert not machine.current.arrived, "arrived twice at the cluster's barrier"
    machine.current.arrived = True


def _wait_cluster() -> None:
    assert machine.current.arrived, "waits at the cluster's barrier before it has arrived"
    together("cluster", "wait_cluster", None)
    machine.current.arrived = False


def _remote(address: int, size: int) -> np.ndarray:
    """Return bytes of another block's shared memory; the address carries the block's rank."""
    return shared(address & (1 << RANK_SHIFT) - 1, size, address >> RANK_SHIFT)


def _publish_writes() -> None:
    unpublished = machine.current.block.unpublished
    unpublished[unpublished == machine.current.number] = -1


def _init_barrier(address: int, count: int) -> None:
    barriers = machine.current.block.barriers
    assert address % 8 == 0, f"a misaligned barrier at {address}"
    assert address not in barriers, f"a barrier at {address} is made twice"
    barriers[address] = Barrier(count)


def _arrive_at_barrier(address: int) -> None:
    barrier = machine.current.block.barriers[address]
    barrier.missing -= 1
    if barrier.missing == 0:
        barrier.missing, barrier.phases = barrier.count, barrier.phases + 1
        machine.current.block.cluster.ready += barrier.waiting
        barrier.waiting = []


def _wait_at_barrier(address: int, parity: int) -> None:
    """Wait until the phase of that parity is complete: it is if the one under way has the other."""
    barrier, cluster = machine.current.block.barriers[address], machine.current.block.cluster
    while barrier.phases & 1 == parity:
        barrier.waiting.append(machine.current.serial)
        cluster.hub.switch()


def _any_of_group(value: int, barrier: int) -> int:
    assert barrier == 1 + machine.current.number // SCOPES["warpgroup"]
    return together("warpgroup", "any_of_group", value, lambda values: [int(any(values))] * len(values))


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
            machine.current.block.unpublished[address : address + size] = machine.current.number

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
        "here_i32": lambda x: x,
        "float_bits": _bits,
        "bits_float": _float,
        "pack_bf16": lambda low, high: _bf16(low) | _bf16(high) << 16,
        "pack_f16": lambda low, high: _f16(low) | _f16(high) << 16,
        "unpack_f16": _halves,
        "e4m3_pair": _eight_bit_pair(float8_e4m3fn),
        "e5m2_pair": _eight_bit_pair(float8_e5m2),
        "int8_pair": _eight_bit_pair(np.int8),
        "multiply_bf16": multiply(NUMBERS["bf16"]),
        "multiply_f16": multiply(NUMBERS["f16"]),
        "load_matrices": load_matrices(False),
        "load_matrices_transposed": load_matrices(True),
        "exchange_f32": _exchange,
        "exchange_i32": _exchange,
        "from_lane_i32": _from_lane,
        "from_lane_f32": _from_lane,
        "from_lane_i64": _from_lane,
        "own_lane": lambda: machine.current.number % WARP,
        "ballot": _ballot,
        "sync_warp": lambda: together("warp", "sync_warp", None),
        "cluster_index": lambda: machine.current.block.index[0] // len(machine.current.block.cluster.blocks),
        "cluster_rank": lambda: machine.current.block.rank,
        "cluster_size": lambda: len(machine.current.block.cluster.blocks),
        "arrive_cluster": _arrive,
        "leave_cluster": _arrive,
        "wait_cluster": _wait_cluster,
        "remote_address": lambda address, rank: wrap(address, 32, True) | rank << RANK_SHIFT,
        "remote_load_4u32": lambda address: tuple(int(x) for x in _remote(address, 16).view(np.uint32)),
        "remote_load_2f32": lambda address: tuple(_remote(address, 8).view(np.float32)),
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
        "wait_for_earlier": _wait_for_earlier,
        "keep_rolled": lambda: None,
        "unroll_fully": lambda: None,
        "load_4u32": _reader(memory, np.uint32, 4),
        "prefetch": ask_ahead,
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
    half, byte = _reader(memory, np.uint16), _reader(memory, np.uint8)
    found["load_u16_if"] = lambda address, wanted: half(address) if wanted else 0
    found["load_u8_if"] = lambda address, wanted, otherwise: byte(address) if wanted else otherwise
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

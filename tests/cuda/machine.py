"""The machine behind the emulator: blocks and clusters, their threads, barriers and memory.

Integers are Python integers that instructions wrap to their width; float32 is `numpy.float32`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np
from greenlet import getcurrent

WARP = 32
SCOPES = {"warp": WARP, "warpgroup": 4 * WARP}  # anything else is the block


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

    def __init__(
        self, indices: list, threads: int, shared_bytes: int, lent: list[tuple[int, int]],
        known: list[tuple[int, int]] | None,
    ):  # fmt: skip
        self.threads, self.shared_bytes, self.lent = threads, shared_bytes, lent
        self.known = known  # what threads may touch before they have waited for earlier launches; None is all
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
        self.waited = block.cluster.known is None  # for earlier launches
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


def _inside(address: int, count: int, arrays: list[tuple[int, int]]) -> bool:
    return any(begin <= address and address + count <= end for begin, end in arrays)


def ask_ahead(address: int) -> None:
    """Do as a prefetch does, which may be of what earlier launches still write."""
    assert _inside(int(address), 1, current.block.lent), "a prefetch outside every array"


def memory(address: int, count: int) -> np.ndarray:
    """Return `count` bytes of global memory, which must belong to a lent array and be no earlier launch's result."""
    address = int(address)
    assert _inside(address, count, current.block.lent), f"global access of {count} bytes outside every array"
    early = not current.waited and not _inside(address, count, current.block.cluster.known)
    assert not early, "access to what earlier launches may write, before it has waited for them"
    assert address % count == 0, f"misaligned global access of {count} bytes"
    return np.ctypeslib.as_array((ctypes.c_uint8 * count).from_address(address))

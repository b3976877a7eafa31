"""Timing on the CPU, and the machine's own limits: reading the same bytes, and multiply-adds at the peak.

The limits run on nbattn's worker team, so that they hand work to threads at the same cost as our own calls.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from time import perf_counter_ns, process_time_ns, sleep
from typing import Any, NamedTuple

import llvmlite.ir as ir
import numpy as np
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from nbattn.cpu_ref import workers
from nbattn.cpu_ref.addresses import address_of
from nbattn.cpu_ref.atomics import fetch_add
from nbattn.cpu_ref.compiling import worker
from nbattn.cpu_ref.lanes import REGISTER_BYTES
from nbattn.cpu_ref.number_formats import load_int64
from nbattn.cpu_ref.records import read_record, record_of
from nbattn.cpu_ref.target import DOT_RATE, READ_RATE
from nbattn.info import processor

Call = Callable[[], Any]

LINE = 64  # bytes
AHEAD_BYTES = 32768  # how far reads run ahead; 4096 to 65536 measured alike
TASK_BYTES = 1 << 18
ACCUMULATORS = 12  # independent multiply-adds: latency times two units a cycle, with some to spare
SLOW_CALL = 0.2  # seconds from which a contender is timed fewer times
SLOW_REPEATS = 3
SETTLE = 0.003  # seconds that a contender runs before it is timed
IDLE_PROBE, LONGEST_SPIN = 0.002, 1.0  # seconds: of a look at whether threads still spin, and of waiting for them

_I32, _I64, _POINTER = ir.IntType(32), ir.IntType(64), ir.PointerType()


def _lines(builder: ir.IRBuilder, address: ir.Value, ahead: ir.Value, count: ir.Value) -> ir.Value:
    """Read `count` lines (a multiple of 4) from `address` while those from `ahead` are fetched; return their xor."""
    vector = ir.VectorType(_I32, LINE // 4)
    sums = [cgutils.alloca_once_value(builder, ir.Constant(vector, None)) for _ in range(4)]
    shape = ir.FunctionType(ir.VoidType(), [_POINTER, _I32, _I32, _I32])
    fetch = cgutils.get_or_insert_function(builder.module, shape, "llvm.prefetch.p0")
    to_l2 = [ir.Constant(_I32, x) for x in (0, 2, 1)]  # a read, locality 2, data
    with cgutils.for_range_slice(builder, ir.Constant(_I64, 0), count, ir.Constant(_I64, 4)) as (line, _):
        for i, total in enumerate(sums):
            offset = builder.mul(builder.add(line, ir.Constant(_I64, i)), ir.Constant(_I64, LINE))
            builder.call(fetch, [builder.inttoptr(builder.add(ahead, offset), _POINTER), *to_l2])
            x = builder.load(builder.inttoptr(builder.add(address, offset), _POINTER), typ=vector)
            x.align = 1
            builder.store(builder.xor(builder.load(total, typ=vector), x), total)
    xor = builder.load(sums[0], typ=vector)
    for total in sums[1:]:
        xor = builder.xor(xor, builder.load(total, typ=vector))
    return builder.extract_element(xor, ir.Constant(_I32, 0))


@intrinsic
def read_lines(typingctx, address, ahead, count):
    """Read lines of memory: see `_lines`."""

    def codegen(context, builder, sig, args):
        return _lines(builder, *args)

    return types.int32(types.int64, types.int64, types.int64), codegen


@intrinsic
def multiply_add(typingctx, count, x, y):
    """Run `count` rounds of ``a = a * x + y`` on `ACCUMULATORS` vectors of float32 and return one number of them."""

    def codegen(context, builder, sig, args):
        vector = ir.VectorType(ir.FloatType(), REGISTER_BYTES // 4)
        factor, term = (_spread(builder, value, vector) for value in args[1:])
        sums = [cgutils.alloca_once_value(builder, term) for _ in range(ACCUMULATORS)]
        name = f"llvm.fma.v{vector.count}f32"
        fma = cgutils.get_or_insert_function(builder.module, ir.FunctionType(vector, [vector] * 3), name)
        with cgutils.for_range(builder, args[0]):
            for total in sums:
                builder.store(builder.call(fma, [builder.load(total, typ=vector), factor, term]), total)
        result = builder.load(sums[0], typ=vector)
        for total in sums[1:]:
            result = builder.fadd(result, builder.load(total, typ=vector))
        return builder.extract_element(result, ir.Constant(_I32, 0))

    return types.float32(types.int64, types.float32, types.float32), codegen


def _spread(builder: ir.IRBuilder, value: ir.Value, vector: ir.VectorType) -> ir.Value:
    one = builder.insert_element(ir.Constant(vector, ir.Undefined), value, ir.Constant(_I32, 0))
    return builder.shuffle_vector(one, one, ir.Constant(ir.VectorType(_I32, vector.count), [0] * vector.count))


class _Reading(NamedTuple):
    """The record of `_read_worker`."""

    next_task: int
    addresses: int  # address of int64 [count]
    count: int
    per_task: int
    ahead: int
    lines: int
    result: int  # address of an int64


class _Multiplying(NamedTuple):
    """The record of `_multiply_worker`."""

    next_task: int
    num_tasks: int
    rounds: int
    result: int  # address of an int64


@worker
def _read_worker(record):
    job = read_record(_Reading, record)
    last = job.count - 1
    xor = np.int32(0)
    while True:
        begin = workers.next_task(record) * job.per_task
        if begin > last:
            break
        for i in range(begin, min(begin + job.per_task, last + 1)):
            here, ahead = load_int64(job.addresses + 8 * i), load_int64(job.addresses + 8 * min(i + job.ahead, last))
            xor ^= read_lines(here, ahead, job.lines)
    fetch_add(job.result, np.int64(xor))  # so that nothing of it is left out


@worker
def _multiply_worker(record):
    job = read_record(_Multiplying, record)
    total = np.float32(0.0)
    while workers.next_task(record) < job.num_tasks:
        total += multiply_add(job.rounds, np.float32(0.999), np.float32(0.001))
    fetch_add(job.result, np.int64(total))


def read_call(addresses: np.ndarray, size: int, threads: int) -> Call:
    """Return a call that reads blocks of `size` bytes in the order of `addresses`, running ahead of itself.

    Parameters
    ----------
    addresses : int64 array, shape [blocks]
    size : int
        At least 256; what is beyond the last multiple of that is not read.
    """
    per_task, ahead = max(1, TASK_BYTES // size), max(1, AHEAD_BYTES // size)
    lines, tasks = size // LINE // 4 * 4, -(-len(addresses) // max(1, TASK_BYTES // size))
    result = np.zeros(1, np.int64)
    record = record_of(_Reading(0, address_of(addresses), len(addresses), per_task, ahead, lines, address_of(result)))
    code, nanoseconds = workers.code_of(_read_worker), len(addresses) * size / READ_RATE

    def call() -> None:
        record[0] = 0
        workers.run(code, record, tasks, threads, nanoseconds)

    call.kept = addresses, result  # type: ignore[attr-defined]  # the record holds their addresses

    return call


def multiply_call(flops: int, threads: int) -> Call:
    """Return a call that does `flops` float32 operations in fused multiply-adds, as fast as the CPU can."""
    per_round = 2 * ACCUMULATORS * REGISTER_BYTES // 4
    tasks = 16 * threads
    rounds = max(1, flops // (per_round * tasks))
    result = np.zeros(1, np.int64)
    record = record_of(_Multiplying(0, tasks, rounds, address_of(result)))
    code, nanoseconds = workers.code_of(_multiply_worker), flops / 2 / DOT_RATE

    def call() -> None:
        record[0] = 0
        workers.run(code, record, tasks, threads, nanoseconds)

    call.kept = result  # type: ignore[attr-defined]  # the record holds its address

    return call


def limit_calls(problem: Any, threads: int) -> dict[str, tuple[list[Call], float]]:
    """Return each limit's calls on the problem's caches, and what their times are to be multiplied by.

    Memory is read in the order of the problem's pages and, each byte once, in the order of addresses.
    """
    blocks = [problem.blocks(i) for i in range(problem.sets)]
    sequential = [np.unique(addresses) for addresses, _ in blocks]
    size = blocks[0][1]
    share = len(blocks[0][0]) / len(sequential[0])  # a gather may list a token for several rows
    limits = {
        "read in order of use": ([read_call(a, size, threads) for a, _ in blocks], 1.0),
        "read sequentially": ([read_call(a, size, threads) for a in sequential], share),
    }
    if problem.shape.op in ("prefill", "cascade"):
        limits["multiply-add"] = ([multiply_call(problem.shape.flops, threads)], 1.0)
    return limits


def interleaved(contenders: dict[str, list[Call]], repeats: int) -> dict[str, np.ndarray]:
    """Time the contenders in turn, A B A B, each on the cache that was read longest ago.

    Before each timed call the threads of the contender before have stopped spinning, and the contender has run untimed
    for a while, on other caches, so that its own threads are awake.

    Returns
    -------
    dict of float64 array, shape [repeats]
        Seconds; NaN in the later repeats of a contender that is slow.
    """
    samples = {name: np.full(repeats, np.nan) for name in contenders}
    times = {}
    for name, calls in contenders.items():
        calls[0]()  # compiles
        begin = perf_counter_ns()
        calls[-1]()
        times[name] = repeats if perf_counter_ns() - begin < 1e9 * SLOW_CALL else min(repeats, SLOW_REPEATS)
    turn = count(1)
    for repeat in range(repeats):
        for name, calls in contenders.items():
            if repeat >= times[name]:
                continue
            wait_for_idle()
            begin = perf_counter_ns()
            while perf_counter_ns() - begin < 1e9 * SETTLE:
                calls[next(turn) % len(calls)]()
            call = calls[next(turn) % len(calls)]
            begin = perf_counter_ns()
            call()
            samples[name][repeat] = 1e-9 * (perf_counter_ns() - begin)
    return samples


def wait_for_idle() -> None:
    """Sleep until no thread of this process runs; some libraries' threads spin for 0.2 s after a call."""
    end = perf_counter_ns() + 1e9 * LONGEST_SPIN
    while perf_counter_ns() < end:
        used = process_time_ns()
        sleep(IDLE_PROBE)
        if process_time_ns() - used < 1e8 * IDLE_PROBE:
            return


def device_name() -> str:
    """Return the CPU's model and how many cores may be used."""
    model, usable = processor()
    return f"{model}, {usable} cores, {8 * REGISTER_BYTES}-bit vectors"

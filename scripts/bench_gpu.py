"""Timing on the GPU by graph replays between events, and the machine's own limits: reads and matrix products.

Only CuPy and numba.cuda are used here; rivals in PyTorch bring their own way to capture (`bench_flashinfer`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import cycle
from typing import Any

import cupy
import numpy as np

Call = Callable[[], Any]
Capture = Callable[[list[Call], int], Call]

LEAST_CALLS = 10  # of one replay
READ_BYTES = 1 << 31
MATRIX = 8192
SPIN_NANOSECONDS, SPIN_PIECE = 20_000_000, 500_000


def rounds_of(calls: list[Call]) -> int:
    """Return how often one replay goes through the caches."""
    return max(1, math.ceil(LEAST_CALLS / len(calls)))


def capture(calls: list[Call], rounds: int) -> Call:
    """Capture `rounds` passes over `calls` on a CuPy stream and return their replay."""
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        for call in calls:
            call()
        stream.synchronize()
        stream.begin_capture()
        try:
            kept = [call() for _ in range(rounds) for call in calls]  # results live as long as the graph
        finally:
            graph = stream.end_capture()
        graph.upload(stream)
        stream.synchronize()

    def replay() -> None:
        graph.launch(cupy.cuda.Stream.null)

    replay.kept = kept  # type: ignore[attr-defined]
    return replay


class Timed:
    """A contender ready to be timed.

    Attributes
    ----------
    timer : str
        "graph", or "events" where the calls cannot be captured; `why` then says what stood against it.
    """

    def __init__(self, calls: list[Call], captured_by: Capture = capture):
        rounds = rounds_of(calls)
        self.count = rounds * len(calls)
        calls[0]()  # compiles
        cupy.cuda.Device().synchronize()
        try:
            self.replay, self.timer, self.why = captured_by(calls, rounds), "graph", ""
            self.replay()
        except Exception as error:  # what copies from the host cannot be captured
            self.timer, self.why = "events", f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"
            self.turns = cycle(calls)
        cupy.cuda.Device().synchronize()

    def seconds(self) -> float:
        """Return the time of one call: a replay between two events, divided by its calls."""
        if self.timer == "events":
            return queued_seconds(lambda: next(self.turns)(), LEAST_CALLS)
        begin, end = cupy.cuda.Event(), cupy.cuda.Event()
        begin.record()
        self.replay()
        end.record()
        end.synchronize()
        return 1e-3 * cupy.cuda.get_elapsed_time(begin, end) / self.count


def interleaved(contenders: dict[str, Timed], repeats: int) -> dict[str, np.ndarray]:
    """Time the contenders in turn and return the seconds of a call, float64 [repeats]."""
    samples = {name: np.empty(repeats) for name in contenders}
    for repeat in range(repeats):
        for name, timed in contenders.items():
            samples[name][repeat] = timed.seconds()
    return samples


def _kernels() -> tuple[Any, Any]:
    from numba import cuda, uint64

    @cuda.jit
    def read(x, result):
        step = cuda.gridsize(1)
        place = cuda.grid(1)
        a, b, c, d = uint64(0), uint64(0), uint64(0), uint64(0)
        while place + 3 * step < x.shape[0]:
            a ^= x[place]
            b ^= x[place + step]
            c ^= x[place + 2 * step]
            d ^= x[place + 3 * step]
            place += 4 * step
        if a ^ b ^ c ^ d == 1:  # almost never, but the compiler does not know
            result[0] = a

    @cuda.jit
    def wait(pieces):
        for _ in range(pieces):
            cuda.nanosleep(SPIN_PIECE)

    return read, wait


_compiled: list[Any] = []


def kernels() -> tuple[Any, Any]:
    """Return the reading and the waiting kernel."""
    if not _compiled:
        _compiled.extend(_kernels())
    return _compiled[0], _compiled[1]


def spin() -> None:
    """Keep the device busy for a while."""
    _, wait = kernels()
    wait[1, 1](SPIN_NANOSECONDS // SPIN_PIECE)


def queued_seconds(call: Call, count: int) -> float:
    """Return the time of one call of `count` that are queued behind a spin, so that the host's time is not seen."""
    begin, end = cupy.cuda.Event(), cupy.cuda.Event()
    spin()
    begin.record()
    for _ in range(count):
        call()
    end.record()
    end.synchronize()
    return 1e-3 * cupy.cuda.get_elapsed_time(begin, end) / count


def read_rates(repeats: int = 9) -> dict[str, float]:
    """Return bytes a second of a CuPy sum and of plain read kernels over 2 GiB of random data."""
    from numba import cuda

    words = cupy.random.randint(0, 1 << 30, READ_BYTES // 4, dtype=np.int32)
    numbers = words.astype(np.float32)
    total = cupy.zeros((), np.float32)
    pairs, result = (cuda.as_cuda_array(x) for x in (words.view(np.uint64), cupy.zeros(1, np.uint64)))
    calls: dict[str, Call] = {"CuPy sum": lambda: numbers.sum(out=total)}
    read, _ = kernels()
    for blocks in (4, 8):  # of 256 threads on each multiprocessor
        grid = blocks * cupy.cuda.Device().attributes["MultiProcessorCount"]
        calls[f"read kernel, {blocks} blocks"] = lambda grid=grid: read[grid, 256](pairs, result)
    rates = {}
    for name, call in calls.items():
        call()
        rates[name] = READ_BYTES / float(np.median([queued_seconds(call, 3) for _ in range(repeats)]))
    return rates


def matrix_rate(repeats: int = 9) -> float:
    """Return operations a second of a float16 product of random matrices through cuBLAS."""
    a, b = (cupy.random.standard_normal((MATRIX, MATRIX), dtype=np.float32).astype(np.float16) for _ in range(2))
    out = cupy.empty_like(a)

    def product() -> None:
        cupy.matmul(a, b, out=out)

    product()
    return 2 * MATRIX**3 / float(np.median([queued_seconds(product, 3) for _ in range(repeats)]))


def device_name() -> str:
    """Return the device's name, processors and driver."""
    runtime = cupy.cuda.runtime
    properties = runtime.getDeviceProperties(cupy.cuda.Device().id)
    driver = runtime.driverGetVersion()
    name = properties["name"].decode()
    cuda = f"{driver // 1000}.{driver % 1000 // 10}"
    return f"{name}, {properties['multiProcessorCount']} multiprocessors, driver for CUDA {cuda}"

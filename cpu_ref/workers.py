"""A team of threads that run one GIL-free kernel together.

Numba's own threading layers were not used: workqueue aborts the process when two Python threads enter it, OpenMP does
not survive a fork, and lowering a `prange` takes longer than compiling the kernel around it. Here every thread calls
the same compiled function, which takes tasks from an atomic counter until none is left.
"""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import llvmlite.ir as ir
from numba import typeof, types
from numba.core import cgutils
from numba.extending import intrinsic

from nbattn.cpu_ref.compiling import kernel

_SPINS = 20_000  # about 100 microseconds of waiting in compiled code before the thread yields


@intrinsic
def next_task(typingctx, counters, index):
    """Atomically return ``counters[index]`` and add 1 to it."""

    def codegen(context, builder, sig, args):
        array = context.make_array(sig.args[0])(context, builder, args[0])
        place = cgutils.gep_inbounds(builder, array.data, args[1])
        return builder.atomic_rmw("add", place, ir.Constant(ir.IntType(64), 1), "acq_rel")

    return types.int64(counters, types.intp), codegen


@intrinsic
def _read(typingctx, counters, index):
    def codegen(context, builder, sig, args):
        array = context.make_array(sig.args[0])(context, builder, args[0])
        place = cgutils.gep_inbounds(builder, array.data, args[1])
        return builder.load_atomic(place, "acquire", 8, typ=ir.IntType(64))

    return types.int64(counters, types.intp), codegen


@kernel
def _wait(counters, total, spins):
    for _ in range(spins):
        if _read(counters, 1) >= total:
            return True
    return False


class _Team:
    def __init__(self) -> None:
        self.tickets: queue.SimpleQueue = queue.SimpleQueue()
        self.size = 0
        self.lock = threading.Lock()

    def grow(self, size: int) -> None:
        """Make sure that `size` helper threads exist; where none can be started the caller does all the work."""
        with self.lock:
            while self.size < size:
                try:
                    threading.Thread(target=self._serve, name="nbattn", daemon=True).start()
                except RuntimeError:  # the interpreter is shutting down, or the thread limit is reached
                    return
                self.size += 1

    def _serve(self) -> None:
        while True:
            entry, arguments = self.tickets.get()
            with suppress(MemoryError):  # raised before a task is taken: the other threads do the work
                entry(*arguments)
            del entry, arguments


_team = _Team()


def _renew() -> None:
    global _team
    _team = _Team()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew)


_entries: dict[tuple, Callable[..., None]] = {}


def entry_of(function: Any, key: tuple, arguments: tuple) -> Callable[..., None]:
    """Return the compiled code of `function` for these arguments, whose types `key` determines.

    Numba looks at every argument's type at each call, which takes longer than a short kernel runs.
    """
    entry = _entries.get((function, *key))
    if entry is None:
        signature = tuple(typeof(x) for x in arguments)
        function.compile(signature)
        entry = _entries[(function, *key)] = function.overloads[signature].entry_point
    return entry


def run(function: Any, key: tuple, num_tasks: int, num_threads: int, *arguments: Any) -> None:
    """Run ``function(*arguments)`` on up to `num_threads` threads until `num_tasks` tasks are done.

    The third of the arguments is ``counters``, int64[2]: next task, finished tasks. `key` names all that their types
    depend on.
    """
    run_entry(entry_of(function, key, arguments), num_tasks, num_threads, arguments)


def run_entry(entry: Callable[..., None], num_tasks: int, num_threads: int, arguments: tuple) -> None:
    """Run compiled code as `run` does."""
    threads = min(num_threads, num_tasks)
    if threads <= 1:
        entry(*arguments)
        return
    _team.grow(threads - 1)
    ticket = (entry, arguments)
    for _ in range(threads - 1):
        _team.tickets.put(ticket)
    entry(*arguments)
    while not _wait(arguments[2], num_tasks, _SPINS):
        time.sleep(0)

"""A team of threads that run one kernel together, and how Python starts it.

Numba's own threading layers were not used: workqueue aborts the process when two Python threads enter it, OpenMP does
not survive a fork, and lowering a `prange` takes longer than compiling the kernel around it. Here every thread runs
the same compiled worker on the same record, which takes tasks from an atomic counter until none is left.

A caller opens its job in a slot of the team's *board* and runs it; helpers that are awake look at the slots, in
compiled code and without the interpreter, and join. A helper that finds nothing for a while sleeps until it gets a
ticket. So layers of a model that follow each other closely do not wake anybody.
"""

from __future__ import annotations

import ctypes
import os
import queue
import sys
import threading
import time
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
from numba import typeof, types

from nbattn.cpu_ref.addresses import address_of
from nbattn.cpu_ref.atomics import call_worker, exchange, fetch_add, read, rest, write
from nbattn.cpu_ref.compiling import kernel, part
from nbattn.cpu_ref.scratch import LINE_BYTES
from nbattn.cpu_ref.tags import Tag

# Work of a call from which on sleeping helpers are woken (20 us), and work that each of those awake is worth.
WAKE_NANOSECONDS, SHARE_NANOSECONDS = 100_000, 10_000
FOLLOWING_NANOSECONDS = 500_000  # a call that comes so soon after another is followed by more: helpers are woken too
AWAKE_SECONDS = 2e-4  # how long a helper looks for the next job
_SLOTS = 4  # jobs that may have helpers at the same time; other callers work alone

# The board, in words of 8 bytes: three words of the team, then the slots, each part on lines of its own.
_LINE = LINE_BYTES // 8
_AWAKE, _JOBS, _YIELD = 0, _LINE, 2 * _LINE  # helpers awake, number of the last job, address of a function
_FIRST_SLOT, _SLOT_WORDS = 3 * _LINE, 2 * _LINE
_BUSY, _OPEN, _WORKER, _RECORD, _SEATS, _INSIDE = 0, 1, 2, 3, 4, _LINE  # OPEN: the job's number, or 0


@part
def next_task(record):
    """Atomically return the first word of a record and add 1 to it."""
    return fetch_add(record, 1)


@part
def _relax(board, looks):
    """Wait a moment; now and then give way to whoever needs the core."""
    rest(board + 8 * _YIELD, looks % 64 == 63)


@kernel
def _run(board, helpers, worker, record):
    """Run a worker's job with up to `helpers` helpers that are awake or wake up meanwhile; return whether it failed."""
    slot = np.int64(0)
    if helpers > 0:
        for i in range(_SLOTS):
            here = board + 8 * (_FIRST_SLOT + i * _SLOT_WORDS)
            if slot == 0 and read(here + 8 * _BUSY) == 0 and exchange(here + 8 * _BUSY, 1) == 0:
                slot = here
    if slot == 0:
        return call_worker(worker, record)
    write(slot + 8 * _WORKER, worker)
    write(slot + 8 * _RECORD, record)
    write(slot + 8 * _SEATS, helpers)
    write(slot + 8 * _OPEN, fetch_add(board + 8 * _JOBS, 1) + 1)
    failed = call_worker(worker, record)
    write(slot + 8 * _OPEN, 0)
    looks = 0
    while read(slot + 8 * _INSIDE) != 0:
        _relax(board, looks)
        looks += 1
    write(slot + 8 * _BUSY, 0)
    return failed


@kernel
def _serve(board, seen, patience):
    """Join open jobs until `patience` looks in a row have found none. `seen` lists the last job of each slot."""
    fetch_add(board + 8 * _AWAKE, 1)
    looks = 0
    while looks < patience:
        _relax(board, looks)
        looks += 1
        for i in range(_SLOTS):
            slot = board + 8 * (_FIRST_SLOT + i * _SLOT_WORDS)
            job = read(slot + 8 * _OPEN)
            if job == 0 or job == read(seen + 8 * i):
                continue
            write(seen + 8 * i, job)
            fetch_add(slot + 8 * _INSIDE, 1)  # from now on the slot is this job's until the helper leaves
            if read(slot + 8 * _OPEN) == job and fetch_add(slot + 8 * _SEATS, -1) > 0:
                call_worker(read(slot + 8 * _WORKER), read(slot + 8 * _RECORD))  # fails before it takes a task
                looks = 0
            fetch_add(slot + 8 * _INSIDE, -1)
    fetch_add(board + 8 * _AWAKE, -1)


def _give_way() -> Any:
    """Return the C function, without arguments, by which a thread lets others run."""
    if sys.platform == "win32":
        return ctypes.WinDLL("kernel32").SwitchToThread
    return ctypes.CDLL(None).sched_yield


def _new_board() -> tuple[np.ndarray, Any]:
    """Return a board that begins at a line, and what must live as long."""
    words = np.zeros(_FIRST_SLOT + _SLOTS * _SLOT_WORDS + _LINE, np.int64)
    board = words[-(address_of(words) // 8) % _LINE :]
    give_way = _give_way()
    board[_YIELD] = ctypes.cast(give_way, ctypes.c_void_p).value or 0
    return board, give_way


class _Team:
    def __init__(self) -> None:
        self.tickets: queue.SimpleQueue = queue.SimpleQueue()
        self.size = 0
        self.lock = threading.Lock()
        self.board, self.kept = _new_board()
        self.address = address_of(self.board)
        self.last_call = 0  # time.monotonic_ns of the last call that was worth a helper
        self.patience = 0  # looks of a helper in `AWAKE_SECONDS`

    def helpers(self, most: int, nanoseconds: float) -> int:
        """Return how many of up to `most` helpers a call of that much work may have; wake them if it is worth it."""
        wanted = min(most, int(nanoseconds // SHARE_NANOSECONDS))
        if wanted <= 0:
            return 0
        now = time.monotonic_ns()
        following, self.last_call = now - self.last_call < FOLLOWING_NANOSECONDS, now
        awake = int(self.board[_AWAKE])
        if nanoseconds < WAKE_NANOSECONDS and not following:
            return min(wanted, awake)
        if self.size < wanted:
            self.grow(wanted)
        # Who is awake may fall asleep before it sees a long job, and so gets a ticket too, which may stay for later.
        missing = wanted if nanoseconds >= WAKE_NANOSECONDS else wanted - awake
        for _ in range(min(missing, self.size - self.tickets.qsize())):
            self.tickets.put(None)
        return wanted

    def grow(self, size: int) -> None:
        """Make sure that `size` helper threads exist; where none can be started the caller does all the work."""
        with self.lock:
            serve = _entry(_serve, 3)  # compiled here, not by each helper
            if self.patience == 0:
                self.patience = _looks(serve)
            while self.size < size:
                try:
                    threading.Thread(target=self._help, args=(serve,), name="nbattn", daemon=True).start()
                except RuntimeError:  # the interpreter is shutting down, or the thread limit is reached
                    return
                self.size += 1

    def _help(self, serve: Callable[..., None]) -> None:
        seen = np.zeros(_SLOTS, np.int64)
        while True:
            serve(self.address, address_of(seen), self.patience)
            self.tickets.get()


_team = _Team()


def _renew() -> None:
    global _team
    _team = _Team()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew)


def _looks(serve: Callable[..., None]) -> int:
    """Return how many looks of a helper take `AWAKE_SECONDS`."""
    (board, _), seen, looks = _new_board(), np.zeros(_SLOTS, np.int64), 1000
    seconds = []
    for _ in range(8):  # some may be interrupted
        begin = time.perf_counter()
        serve(address_of(board), address_of(seen), looks)
        seconds.append(time.perf_counter() - begin)
    return max(1, int(looks * AWAKE_SECONDS / min(seconds)))


@cache
def _entry(function: Any, arity: int) -> Callable[..., Any]:
    """Return the compiled code of a kernel of int64 arguments. Numba would look at their types at each call."""
    signature = (types.int64,) * arity
    function.compile(signature)
    return function.overloads[signature].entry_point


_codes: dict[tuple[Any, ...], int] = {}


def code_of(worker: Any, *tags: Tag) -> int:
    """Return the address of a worker's machine code for these tags, compiled if need be."""
    code = _codes.get((worker, *tags))
    if code is None:
        signature = (types.int64, *map(typeof, tags))
        worker.compile(signature)
        result = worker.overloads[signature]
        code = _codes[(worker, *tags)] = result.library.get_pointer_to_function(result.fndesc.llvm_func_name)
    return code


def run(code: int, record: np.ndarray, num_tasks: int, num_threads: int, nanoseconds: float) -> None:
    """Run a worker on up to `num_threads` threads until its tasks are done.

    Parameters
    ----------
    code : int
        From `code_of`.
    record : int64 array
        See `nbattn.cpu_ref.records`; its first word counts the tasks that are taken.
    nanoseconds : float
        About how long it takes one thread.
    """
    most = min(num_threads, num_tasks) - 1
    helpers = _team.helpers(most, nanoseconds) if most > 0 else 0
    if _entry(_run, 4)(_team.address, helpers, code, address_of(record)):
        raise MemoryError("not enough memory for the working arrays of a kernel")

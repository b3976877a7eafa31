"""Calls from many Python threads, beside Numba's own parallel kernels, across forks: right results and no abort.

Each test runs in a process of its own, since a threading layer is chosen once and an abort ends its process. The time
is short; NBATTN_THREAD_SECONDS=30 gives the long run.
"""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

LIBRARIES = Path(sys.prefix, "lib")  # where the package tbb puts its own, which no loader looks through
SECONDS = float(os.environ.get("NBATTN_THREAD_SECONDS", "2"))

SETUP = """
import os, sys, threading, time
import numpy as np
import nbattn
import nbattn.cpu_ref.workers
from nbattn import oracle
from nbattn.testing import expect, compare

rng = np.random.default_rng(0)
k, v = rng.normal(size=(2, 3, 700, 2, 64)).astype(np.float32)
kv = nbattn.PagedKV.from_slots(k, v, np.array([700, 13, 512]))
q = rng.normal(size=(3, 8, 64)).astype(np.float32)
expected = expect(oracle.paged_attention, q, kv)
lists, counts = np.tile(np.arange(13, dtype=np.int32), (3, 1)), np.array([13, 13, 13], np.int32)
gathered = expect(oracle.gather_attention, q, kv, lists, counts)

def right(result, expected=expected):
    parts = zip(result, (expected.out, expected.lse), (expected.out_budget, expected.lse_budget))
    return all(compare(x, y, budget).passed for x, y, budget in parts)

def attend():
    return nbattn.paged_attention(q, kv, return_lse=True, split_size=64)

nbattn.set_num_threads(3)
nbattn.cpu_ref.workers.WAKE_NANOSECONDS = nbattn.cpu_ref.workers.SHARE_NANOSECONDS = 1  # small work goes to the team
if WARM:
    assert right(attend())
"""

EIGHT_THREADS = """
errors, calls = [], [0] * 8

def work(number):
    try:
        while time.monotonic() < end:
            assert right(attend())
            assert right(nbattn.gather_attention(q, kv, lists, counts, return_lse=True), gathered)
            calls[number] += 1
    except BaseException as error:
        errors.append(error)

threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
"""

BESIDE_PRANGE = """
import numba

@numba.njit(parallel=True)
def users_own(x):
    total = 0.0
    for i in numba.prange(len(x)):
        total += x[i]
    return total

numbers = np.arange(1000.0)
assert users_own(numbers) == 499500

def prange():
    try:
        while time.monotonic() < end:
            assert users_own(numbers) == 499500
    except BaseException as error:
        errors.append(error)

threads += [threading.Thread(target=prange) for _ in range(PRANGE_THREADS)]
"""

RUN = """
end = time.monotonic() + SECONDS
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
assert not errors, errors
assert min(calls) > 0, calls
print("calls", sum(calls))
"""


def run(code, layer=None, **values):
    """Run code in a process of its own and return what it printed."""
    lines = [f"{name} = {value!r}" for name, value in {"SECONDS": SECONDS, "WARM": True, **values}.items()]
    environment = dict(os.environ)
    if layer is not None:
        found = f"{LIBRARIES}{os.pathsep}{environment.get('LD_LIBRARY_PATH', '')}"
        environment.update(NUMBA_THREADING_LAYER=layer, LD_LIBRARY_PATH=found)
    done = subprocess.run(
        [sys.executable, "-c", "\n".join([*lines, SETUP, textwrap.dedent(code)])],
        env=environment, capture_output=True, text=True, timeout=SECONDS + 240, check=False,
    )  # fmt: skip
    assert done.returncode == 0, f"exit status {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout


# workqueue aborts the process when two threads enter a prange at once, and so a single one calls it there
@pytest.mark.parametrize(("layer", "prange_threads"), [("omp", 2), ("tbb", 2), ("workqueue", 1)])
def test_eight_threads_beside_a_users_parallel_kernel(layer, prange_threads):
    if layer == "tbb" and not list(LIBRARIES.glob("libtbb.so*")):
        pytest.skip("needs the package tbb")
    code = EIGHT_THREADS + BESIDE_PRANGE + RUN + f"\nassert numba.threading_layer() == {layer!r}"
    printed = run(code, layer, PRANGE_THREADS=prange_threads)
    assert int(printed.split()[1]) >= 8


def test_eight_threads_may_be_the_first_to_compile():
    each_calls_twice = EIGHT_THREADS.replace("while time.monotonic() < end:", "for _ in range(2):")
    assert int(run(each_calls_twice + RUN, WARM=False).split()[1]) == 16


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_forks_and_chosen_numbers_of_threads():
    code = """
        assert threading.active_count() > 1  # the team exists, and does not survive a fork
        child = os.fork()
        if child == 0:
            os._exit(0 if right(attend()) and right(attend()) and threading.active_count() > 1 else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        for n in (1, 2, 7, None):
            nbattn.set_num_threads(n)
            assert n is None or nbattn.get_num_threads() == n
            assert right(attend())
        assert threading.active_count() >= 7
        print("left")  # and the exit right after a call is clean
        """
    assert run(code).strip() == "left"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_fork_waits_for_the_compiler():
    code = """
        from numba.core.compiler_lock import global_compiler_lock as lock
        began, may_end = threading.Event(), threading.Event()

        def compile():
            with lock:
                began.set()
                may_end.wait(1)

        compiler = threading.Thread(target=compile)
        compiler.start()
        began.wait()
        child = os.fork()
        if child == 0:
            os._exit(0 if lock._lock.acquire(timeout=3) else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        compiler.join()
        with lock:  # a thread that holds it may fork, and keeps it
            if os.fork() == 0:
                os._exit(0 if lock.is_locked() else 1)
            assert os.waitstatus_to_exitcode(os.wait()[1]) == 0
            assert lock.is_locked()
        assert not lock.is_locked()
        print("done")
        """
    assert run(code, WARM=False).strip() == "done"


def test_the_environment_sets_the_default():
    for given, expected in (("3", 3), ("0", None), ("many", None)):
        code = "import nbattn; print(nbattn.get_num_threads())"
        environment = {**os.environ, "NUMBA_NUM_THREADS": given}
        done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
        assert int(done.stdout) == (expected or len(os.sched_getaffinity(0)))

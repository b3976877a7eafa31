"""Forks while another thread compiles: the child must not inherit a lock whose owner it does not have."""

from __future__ import annotations

import os
import sys
import threading

_held = threading.local()  # in the child, too: the thread that forks is the one that goes on there


def _before() -> None:
    """Wait for the compilation step that another thread is in, and let none begin; Numba is not imported for it."""
    lock = getattr(sys.modules.get("numba.core.compiler_lock"), "global_compiler_lock", None)
    if lock is not None:
        lock.acquire()
    _held.lock = lock


def _after() -> None:
    lock, _held.lock = getattr(_held, "lock", None), None
    if lock is not None:
        lock.release()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before, after_in_parent=_after, after_in_child=_after)

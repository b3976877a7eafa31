"""How the functions of the CPU target are compiled, and how they are kept between processes if asked.

With ``NBATTN_CPU_CACHE=1`` in the environment Numba keeps the machine code in a folder of its own for this very state
of the sources: its own check looks at one file at a time and would miss a change in a function that another one calls.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any

from numba import config, njit, types
from numba.extending import intrinsic, overload

from nbattn.cache import cache_directory, hash_of, versions_of

# never nnan or ninf: -inf and NaN carry meaning
FASTMATH = {"reassoc", "contract", "nsz", "arcp", "afn"}
CACHED = os.environ.get("NBATTN_CPU_CACHE") == "1"
_OPTIONS: dict[str, Any] = {"nogil": True, "error_model": "numpy", "fastmath": FASTMATH, "no_cfunc_wrapper": True}
_PART_OPTIONS = {**_OPTIONS, "no_cpython_wrapper": True}


@cache
def _folder() -> str:
    import nbattn

    here, package = Path(__file__).parent, Path(nbattn.__file__).parent
    sources = sorted(here.glob("*.py")) + sorted(package.glob("*.py"))
    key = json.dumps([hash_of(sources), versions_of("numba", "llvmlite", "numpy")])
    return str(cache_directory() / f"cpu-{sha256(key.encode()).hexdigest()[:16]}")


@contextmanager
def _own_folder() -> Iterator[None]:
    """Let Numba choose our folder for functions that are decorated meanwhile, and no others."""
    before = config.CACHE_DIR
    if CACHED:
        config.CACHE_DIR = _folder()
    try:
        yield
    finally:
        config.CACHE_DIR = before


def kernel(function: Callable) -> Any:
    """Compile a function that Python calls."""
    with _own_folder():
        return njit(**_OPTIONS, cache=CACHED)(function)


def part(function: Callable) -> Any:
    """Compile a function that only compiled code calls: without the wrappers that Python and C would need."""
    return njit(**_PART_OPTIONS)(function)


def worker(function: Callable) -> Any:
    """Compile what a team of threads runs: see `nbattn.cpu_ref.workers`. It takes a record's address, then tags."""
    with _own_folder():
        return njit(**_PART_OPTIONS, cache=CACHED)(function)


def variants(function: Callable) -> Callable:
    """Compile `function` as the decorated one returns it for the types of its arguments, like a `part`."""
    return overload(function, jit_options=_PART_OPTIONS)


@intrinsic
def keep_short(typingctx):
    """Let LLVM neither unroll nor vectorise the loops of the calling function: they are short, or vectors already."""

    def codegen(context, builder, sig, args):
        builder.function.attributes.add("optsize")
        return context.get_dummy_value()

    return types.void(), codegen


def inlined(function: Callable) -> Any:
    """Compile a function into its callers only: the heavy tiles are optimised once instead of at every level."""
    return njit(**_PART_OPTIONS, inline="always")(function)

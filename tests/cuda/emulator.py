"""Run a CUDA kernel of `nbattn.cuda_kernels` on the CPU, thread by thread, instructions included.

Every thread is a greenlet running the kernel's own Python code; `numba.cuda`, casts and PTX instructions are replaced
by stand-ins. Collective instructions (shuffles, votes, matrix products, barriers) wait until all lanes or threads of
the block have reached the same one: a divergent or missing one is an error, not a wrong number. Shared memory and local
arrays start as NaN, and global memory may be touched only inside the arrays that are lent to the launch.

Integers are Python integers that casts and instructions wrap to their width; float32 is `numpy.float32`.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import machine
import numpy as np
from greenlet import greenlet
from instructions import STAND_INS
from machine import Cluster, Thread, wrap
from matrix_units import warpgroup_product
from numba import cuda as numba_cuda
from numba.core.types import Type as NumbaType

from nbattn.cuda_kernels.compile import load_kernel
from nbattn.cuda_kernels.parameters import PARAMETERS

LENT_MODULES = ("nbattn.cuda_kernels", "nbattn.indexing", "nbattn.scoring")
_INTEGERS = {"int32": (32, True), "uint32": (32, False), "int64": (64, True), "uint64": (64, False)}


class _Cast:
    """Stand-in of a Numba number type: a conversion, and the element type of arrays."""

    def __init__(self, name: str):
        self.name = name

    def __call__(self, value: Any) -> Any:
        if self.name == "float32":
            return np.float32(value)
        return wrap(value, *_INTEGERS[self.name])


class _Local:
    @staticmethod
    def array(count: int, dtype: Any) -> list:
        poison = np.float32(np.nan) if getattr(dtype, "name", str(dtype)) == "float32" else 0x7FC00000
        return [poison] * count


class _Shared:
    @staticmethod
    def array(shape: int, dtype: Any, alignment: int | None = None) -> None:
        assert shape == 0, "kernels carve one dynamic array"


class _Index:
    def __init__(self, x: int, y: int = 0, z: int = 0):
        self.x, self.y, self.z = x, y, z


class _Cuda:
    local, shared = _Local, _Shared

    @property
    def threadIdx(self) -> _Index:
        return _Index(machine.current.number)

    @property
    def blockIdx(self) -> _Index:
        return _Index(*machine.current.block.index)


def _stand_in(value: Any, done: dict) -> Any:
    """Return what a kernel's global or closure variable becomes here."""
    if value is numba_cuda:
        return _Cuda()
    if type(value).__name__ == "_Intrinsic":
        product = getattr(value, "product", None)
        return warpgroup_product(*product) if product else STAND_INS[value._name]
    if isinstance(value, NumbaType) and value.name in (*_INTEGERS, "float32"):
        return _Cast(value.name)
    if isinstance(value, types.ModuleType) and value.__name__.startswith(LENT_MODULES):
        return types.SimpleNamespace(**{k: STAND_INS[k] for k in vars(value) if k in STAND_INS})
    if isinstance(value, types.FunctionType) and value.__module__.startswith(LENT_MODULES):
        return _rebuilt(value, done)
    return value


def _rebuilt(function: types.FunctionType, done: dict) -> types.FunctionType:
    """Return the same code over stand-ins."""
    if function not in done:
        namespace = dict(function.__globals__)
        cells = tuple(types.CellType() for _ in function.__closure__ or ())
        done[function] = types.FunctionType(
            function.__code__, namespace, function.__name__, function.__defaults__, cells or None
        )
        for name in set(function.__code__.co_names) & set(namespace):
            namespace[name] = _stand_in(namespace[name], done)
        for cell, given in zip(cells, function.__closure__ or (), strict=True):
            cell.cell_contents = _stand_in(given.cell_contents, done)
    return done[function]


def rebuilt(function: Callable) -> Callable:
    """Return a function of the kernels over stand-ins, to be called outside a kernel if it needs no thread."""
    return _rebuilt(function, {})


def emulate(
    family: str, constants: dict, grid: tuple[int, int, int], values: dict[str, Any], arrays: list[np.ndarray],
    shared_bytes: int | None = None, cluster: int = 1, known: list[np.ndarray] | None = None,
) -> None:  # fmt: skip
    """Run a kernel over `grid`.

    Parameters
    ----------
    family, constants
        The kernel, as `compile.load_kernel` takes them.
    grid : tuple of int
        Blocks along x, y and z.
    values : dict
        Every parameter by name; pointers are addresses.
    arrays : list of array
        What the kernel may read and write.
    shared_bytes : int, optional
        Dynamic shared memory, where the launch gives less than the kernel's largest.
    cluster : int
        Blocks of a cluster, along x.
    known : list of array, optional
        Of a launch that may start before earlier ones end: what it may touch before it waits for them.
    """
    assert grid[0] % cluster == 0, f"{grid[0]} blocks are no whole clusters of {cluster}"
    kernel = load_kernel(family, constants)
    function = _rebuilt(kernel.function, {})
    ordered = [np.float32(values[n]) if kind == "f32" else int(values[n]) for n, kind in PARAMETERS[family]]
    lent = [np.lib.array_utils.byte_bounds(a) for a in arrays if a.size]
    early = None if known is None else [np.lib.array_utils.byte_bounds(a) for a in known if a.size]

    def quietly(*arguments: Any) -> None:
        with np.errstate(all="ignore"):  # a greenlet has settings of its own
            function(*arguments)

    for x, y, z in np.ndindex(grid[0] // cluster, *grid[1:]):
        indices = [(x * cluster + rank, y, z) for rank in range(cluster)]
        blocks = Cluster(indices, kernel.threads, shared_bytes or kernel.shared_bytes, lent, early)
        threads = [Thread(i, block) for block in blocks.blocks for i in range(kernel.threads)]
        runs = [greenlet(quietly) for _ in threads]
        begun, finished = set(), 0
        while blocks.ready:
            number = blocks.ready.pop(0)
            machine.current = threads[number]
            if number in begun:
                runs[number].switch()
            else:
                begun.add(number)
                runs[number].switch(*ordered)
            finished += runs[number].dead
        stuck = {key: len(found) for key, found in blocks.waiting.items()}
        assert finished == len(threads), f"deadlock: {finished} of {len(threads)} threads done, waiting {stuck}"

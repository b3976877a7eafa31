"""A device made of NumPy arrays and the emulator: the CUDA target's host code runs on it unchanged."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import numpy as np
from emulator import emulate

from nbattn.cuda_kernels.calls import KernelCall
from nbattn.cuda_kernels.parameters import PARAMETERS, WAITS_NEVER


class LentDevice:
    """Stands in for `nbattn.cuda_kernels.device.Device`; kernels may touch the arrays it has met and no others."""

    def __init__(self) -> None:
        self.number, self.multiprocessors, self.largest_cluster = 0, 1, 16
        self.compute_capability = (8, 0)
        self.arrays: dict[int, np.ndarray] = {}
        self.launched: list[tuple[str, dict]] = []
        self.uploaded: list[int] = []
        self.planned: list[np.ndarray] = []  # filled from the host, and so no launch's result

    def holds(self, array: Any) -> bool:
        return False

    def address(self, array: np.ndarray) -> int:
        whole = array
        while isinstance(whole.base, np.ndarray):  # other views of the same memory are found through strides
            whole = whole.base
        self.arrays[id(whole)] = whole
        return array.ctypes.data

    def empty(self, shape: tuple[int, ...], dtype: str) -> np.ndarray:
        array = np.empty(shape, dtype)
        array.view(np.uint8).fill(0xFF)  # NaN, or an index that reads outside every array
        return array

    def upload(self, host: np.ndarray, array: np.ndarray) -> None:
        array[...] = host
        self.uploaded.append(host.size)
        self.planned.append(array if array.base is None else array.base)

    def copy(self, source: np.ndarray, address: int) -> None:
        ctypes.memmove(address, source.ctypes.data, source.nbytes)

    def from_host(self, host: np.ndarray) -> np.ndarray:
        return host.copy()

    def as_int32(self, array: np.ndarray) -> np.ndarray:
        return np.ascontiguousarray(array, np.int32)

    def as_float32(self, array: Any, shape: tuple[int, ...] | None = None) -> np.ndarray:
        wide = np.asarray(array).astype(np.float32, copy=False)
        return np.ascontiguousarray(wide if shape is None else np.broadcast_to(wide, shape))

    def as_bytes(self, mask: np.ndarray) -> np.ndarray:
        return np.ascontiguousarray(mask != 0)

    def stream(self) -> int:
        return 0

    def wait(self) -> None:
        pass

    def capturing(self) -> bool:
        return False

    def bind(self, call: KernelCall, cells: Any, places: dict[str, int]) -> Any:
        names = [name for name, _ in PARAMETERS[call.family]]

        def launch() -> None:
            pairs = zip(names, call.values, strict=True)
            now = tuple(cells[places[name]] if name in places else value for name, value in pairs)
            self.launch(*call._replace(values=now))

        return SimpleNamespace(on=lambda stream: launch)

    def launch(
        self, family: str, constants: dict[str, Any], grid: tuple[int, int, int], values: tuple,
        shared_bytes: int | None = None, overlaps: bool = False, cluster: int = 1,
    ) -> None:  # fmt: skip
        self.launched.append((family, constants))
        names = [name for name, _ in PARAMETERS[family]]
        assert len(names) == len(values), f"{family}: {len(values)} values for {len(names)} parameters"
        named = dict(zip(names, values, strict=True))
        known = self.planned if overlaps and named.get("waits") != WAITS_NEVER else None
        emulate(family, constants, grid, named, list(self.arrays.values()), shared_bytes, cluster, known)

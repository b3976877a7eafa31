"""What the host side of the CUDA target asks of a device: memory, addresses, launches. Tests lend it an emulated one."""

from __future__ import annotations

from typing import Any

import numpy as np

from nbattn.cuda_kernels import launch


class Device:
    """The current CUDA device, through CuPy's memory and current stream."""

    def __init__(self) -> None:
        self.cupy = launch.cupy()
        self.number = int(self.cupy.cuda.runtime.getDevice())
        launch.compute_capability(self.number)

    def holds(self, array: Any) -> bool:
        """Return whether the array lives in the device's memory."""
        return isinstance(array, self.cupy.ndarray)

    def address(self, array: Any) -> int:
        """Return the address of an array's first element."""
        return array.data.ptr

    def empty(self, shape: tuple[int, ...], dtype: str) -> Any:
        """Return uninitialised memory."""
        return self.cupy.empty(shape, dtype)

    def upload(self, host: np.ndarray, array: Any) -> None:
        """Copy a host array over a device array of its size, in stream order; the host array may change afterwards."""
        array.set(host)

    def copy(self, source: Any, target: Any) -> None:
        """Copy an int32 or uint32 device array over another, in stream order."""
        target[...] = source.view(target.dtype)

    def stream(self) -> int:
        """Return the handle of the current stream."""
        return launch.current_stream()

    def launch(self, family: str, constants: dict[str, Any], grid: tuple[int, int, int], values: tuple) -> None:
        """Run a kernel of `nbattn.cuda_kernels` on the current stream."""
        launch.kernel(family, self.number, **constants)(grid, launch.current_stream(), values)

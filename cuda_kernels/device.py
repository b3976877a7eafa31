"""What the CUDA target asks of a device: memory, addresses, launches. Tests lend it an emulated one."""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import numpy as np

from nbattn.cuda_kernels import launch
from nbattn.cuda_kernels.shapes import LARGEST_CLUSTER, PORTABLE_CLUSTER

if TYPE_CHECKING:
    from nbattn.cuda_kernels.calls import KernelCall
    from nbattn.cuda_kernels.launch import BoundLaunch

_DEVICE_TO_DEVICE = 3  # cudaMemcpyDeviceToDevice
_MULTIPROCESSORS = 16  # cudaDevAttrMultiProcessorCount; CuPy's `Device.attributes` asks for all of them


class Device:
    """The current CUDA device, through CuPy's memory and current stream."""

    def __init__(self) -> None:
        self.cupy = launch.cupy()
        self.number = int(self.cupy.cuda.runtime.getDevice())
        self.compute_capability = launch.compute_capability(self.number)
        major = self.compute_capability[0]
        self.largest_cluster = LARGEST_CLUSTER if major == 9 else PORTABLE_CLUSTER if major > 9 else 1
        self.multiprocessors = int(self.cupy.cuda.runtime.deviceGetAttribute(_MULTIPROCESSORS, self.number))
        self.address: Callable[[Any], int] = attrgetter("data.ptr")  # of an array's first element
        self._current_stream = self.cupy.cuda.get_current_stream

    def holds(self, array: Any) -> bool:
        """Return whether the array lives in the device's memory."""
        return isinstance(array, self.cupy.ndarray)

    def empty(self, shape: tuple[int, ...], dtype: str) -> Any:
        """Return uninitialised memory."""
        return self.cupy.empty(shape, dtype)

    def upload(self, host: np.ndarray, array: Any) -> None:
        """Copy a host array over a device array of its size, in stream order; the host array may change afterwards."""
        array.set(host)

    def copy(self, source: Any, address: int) -> None:
        """Copy a contiguous array on the device to an address there, in stream order: a slice would take longer."""
        runtime = self.cupy.cuda.runtime
        runtime.memcpyAsync(address, self.address(source), source.nbytes, _DEVICE_TO_DEVICE, self.stream())

    def from_host(self, host: np.ndarray) -> Any:
        """Return a copy of a host array on the device."""
        return self.cupy.asarray(host)

    def as_int32(self, array: Any) -> Any:
        """Return integers as contiguous int32 on the device; an array that is that already is returned as it is.

        A uint32 on the device is read as int32: what does not fit becomes negative, which every rule refuses.
        """
        if isinstance(array, np.ndarray):
            return self.cupy.asarray(np.ascontiguousarray(array, np.int32))
        same = array if array.dtype == np.int32 else array.view(np.int32)
        return self.cupy.ascontiguousarray(same)

    def as_float32(self, array: Any, shape: tuple[int, ...] | None = None) -> Any:
        """Return a float array as contiguous float32, broadcast to `shape`; it is itself where it is that already."""
        wide = self.cupy.asarray(array).astype(np.float32, copy=False)
        if shape is not None and wide.shape != shape:
            wide = self.cupy.broadcast_to(wide, shape)
        return self.cupy.ascontiguousarray(wide)

    def as_bytes(self, mask: Any) -> Any:
        """Return a mask as contiguous bytes, 0 where it is 0."""
        return self.cupy.ascontiguousarray(mask if mask.dtype.itemsize == 1 else mask != 0)

    def stream(self) -> int:
        """Return the handle of the current stream."""
        return self._current_stream(self.number).ptr

    def wait(self) -> None:
        """Wait for the current stream."""
        self.cupy.cuda.get_current_stream().synchronize()

    def capturing(self) -> bool:
        """Return whether the current stream is being captured into a graph."""
        return bool(self.cupy.cuda.get_current_stream().is_capturing())

    def launch(
        self, family: str, constants: dict[str, Any], grid: tuple[int, int, int], values: tuple,
        shared_bytes: int | None = None, overlaps: bool = False, cluster: int = 1,
    ) -> None:  # fmt: skip
        """Run a `calls.KernelCall` on the current stream; `shared_bytes` below the kernel's largest are its own."""
        kernel = launch.kernel(family, self.number, **constants)
        kernel(self.stream(), grid, values, shared_bytes, overlaps, cluster)

    def bind(self, call: KernelCall, cells: Any, places: dict[str, int]) -> BoundLaunch:
        """Return a kernel's launch on any stream; parameters named in `places` are read from `cells` each time."""
        family, constants = call[:2]
        return launch.kernel(family, self.number, **constants).bind(cells, places, *call[2:])

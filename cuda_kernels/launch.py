"""Launch a cubin on CuPy's current stream: one call of the driver, all parameters packed by one more."""

from __future__ import annotations

import ctypes
import struct
import sys
import threading
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import numpy as np

from nbattn.cuda_kernels.compile import ComputeCapability, cubin_for
from nbattn.cuda_kernels.parameters import PARAMETERS
from nbattn.errors import TargetError

_PACKED = {"i64": "q", "i32": "i", "f32": "f"}
_SIZES = {code: struct.calcsize(code) for code in _PACKED.values()}  # each is aligned to its size
_MAX_DYNAMIC_SHARED_SIZE = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_LARGE_CLUSTERS_ALLOWED = 14  # CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED
_CLUSTER_DIMENSION, _OVERLAP = 4, 6  # CU_LAUNCH_ATTRIBUTE_..., the latter PROGRAMMATIC_STREAM_SERIALIZATION
_FREE_SHARED_BYTES = 48 * 1024  # a block gets these without asking

Grid = tuple[int, int, int]


@cache
def driver() -> Any:
    """Return the CUDA driver library, or say what is missing."""
    name = "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"
    try:
        library = ctypes.CDLL(name)
    except OSError as error:
        raise TargetError(
            f"cuda: needs an NVIDIA driver, got none ({name}: {error}). "
            "Install the GPU's driver, or pass NumPy arrays for the CPU."
        ) from error
    return library


def cupy() -> Any:
    """Return the CuPy module, or say what is missing."""
    try:
        import cupy as module
    except ImportError as error:
        raise TargetError(f"cuda: needs CuPy, got {error}. In a clone: pip install '.[cuda13]'.") from error
    if not module.cuda.is_available():
        driver()
        raise TargetError("cuda: needs an NVIDIA GPU, got none that the driver can see. Check nvidia-smi.")
    return module


@cache
def compute_capability(device: int) -> ComputeCapability:
    """Return the compute capability of a device; older than 8.0 has no matrix instructions for bfloat16."""
    text = cupy().cuda.Device(device).compute_capability
    cc = (int(text[:-1]), int(text[-1]))
    if cc < (8, 0):
        raise TargetError(f"cuda: needs a GPU of compute capability 8.0 or newer, got {cc[0]}.{cc[1]}.")
    return cc


class LoadedKernel:
    """A kernel on one device, ready to launch.

    Parameters
    ----------
    family, constants
        What `compile.cubin_for` takes.
    device : int
        The CUDA device, which must be current.
    """

    def __init__(self, family: str, constants: dict[str, Any], device: int):
        cubin = cubin_for(family, constants, compute_capability(device))
        self.family, self.threads, self.shared_bytes = family, cubin.threads, cubin.shared_bytes
        self.can_overlap = compute_capability(device) >= (9, 0)
        self._function = self._load(cubin.image, cubin.name)
        self._allowed = _FREE_SHARED_BYTES
        self._own = Parameters(family)
        self._lock = threading.Lock()  # packing and launching are one step: threads share the parameters

    def _load(self, image: bytes, name: str) -> int:
        cupy().cuda.runtime.free(0)  # makes the device's primary context current
        self._module = ctypes.c_void_p()
        function = ctypes.c_void_p()
        check(driver().cuModuleLoadData(ctypes.byref(self._module), image), "cuModuleLoadData")
        check(driver().cuModuleGetFunction(ctypes.byref(function), self._module, name.encode()), "cuModuleGetFunction")
        if self.can_overlap:
            check(driver().cuFuncSetAttribute(function, _LARGE_CLUSTERS_ALLOWED, 1), "cuFuncSetAttribute(clusters)")
        return int(function.value or 0)

    def allow_shared(self, size: int) -> None:
        """Let blocks have `size` bytes of dynamic shared memory."""
        if size > self._allowed:
            result = driver().cuFuncSetAttribute(ctypes.c_void_p(self._function), _MAX_DYNAMIC_SHARED_SIZE, size)
            check(result, f"cuFuncSetAttribute({size} bytes of shared memory)")
            self._allowed = size

    def __call__(self, stream: int, grid: Grid, values: tuple, *how: Any) -> None:
        """Launch on `stream` with `values` in the order of `PARAMETERS`; `how` is what `BoundLaunch` takes."""
        with self._lock:
            self._own.pack(values)
            BoundLaunch(self, self._own, grid, *how).on(stream)()

    def bind(self, cells: ctypes.Array, places: dict[str, int], grid: Grid, values: tuple, *how: Any) -> BoundLaunch:
        """Return a launch whose parameters stay, but for those in `places`: they are read from these `cells`."""
        parameters = Parameters(self.family, cells, places)
        parameters.pack(values)
        return BoundLaunch(self, parameters, grid, *how)


@cache
def _layout(family: str) -> tuple[struct.Struct, np.ndarray, dict[str, int]]:
    """Return how a kernel's parameters are packed, where each begins, and its index by name."""
    codes = [_PACKED[kind] for _, kind in PARAMETERS[family]]
    layout, offsets, end = struct.Struct("@" + "".join(codes)), [], 0
    for code in codes:
        size = _SIZES[code]
        offsets.append(-(-end // size) * size)
        end = offsets[-1] + size
    order = {name: i for i, (name, _) in enumerate(PARAMETERS[family])}
    return layout, np.array(offsets, np.int64), order


class Parameters:
    """A kernel's parameters in memory of the host, and the pointers to each that the driver wants.

    Parameters
    ----------
    family : str
    cells : ctypes array of int64, optional
        Memory that launches share.
    places : dict
        The index of the cell in which a parameter lies, by its name; the others lie in memory of their own.
    """

    def __init__(self, family: str, cells: Any = None, places: dict[str, int] | None = None):
        layout, offsets, order = _layout(family)
        self._pack, self._memory, self._cells = layout.pack_into, ctypes.create_string_buffer(layout.size), cells
        self._pointers = offsets + ctypes.addressof(self._memory)
        if places:
            shared = ctypes.addressof(cells)
            for name in places.keys() & order.keys():
                self._pointers[order[name]] = shared + 8 * places[name]
        self.address = self._pointers.ctypes.data

    def pack(self, values: tuple) -> None:
        """Write the values, in the order of `PARAMETERS`."""
        self._pack(self._memory, 0, *values)


class _Attribute(ctypes.Structure):  # CUlaunchAttribute
    _fields_ = [("name", ctypes.c_int), ("padding", ctypes.c_int), ("value", ctypes.c_int * 16)]


class _Config(ctypes.Structure):  # CUlaunchConfig
    _fields_ = [
        ("grid", ctypes.c_uint * 3), ("block", ctypes.c_uint * 3), ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p), ("attributes", ctypes.POINTER(_Attribute)), ("num_attributes", ctypes.c_uint),
    ]  # fmt: skip


@cache
def _attributes(overlaps: bool, cluster: int) -> Any:
    """Return the attributes of launches."""
    found = [_Attribute(_OVERLAP, 0, (ctypes.c_int * 16)(1))] if overlaps else []
    if cluster > 1:
        found.append(_Attribute(_CLUSTER_DIMENSION, 0, (ctypes.c_int * 16)(cluster, 1, 1)))
    return (_Attribute * len(found))(*found)


class BoundLaunch:
    """One launch, of which only the stream is open (see `on`); an empty grid launches nothing.

    Parameters
    ----------
    kernel : LoadedKernel
    parameters : Parameters
    grid : tuple of int
    shared_bytes : int, optional
        Dynamic shared memory, if not the kernel's own.
    overlaps : bool
        Start before the launch ahead of it on the stream ends, where the device can: the kernel waits by itself.
    cluster : int
        Neighbouring blocks that form a cluster.
    """

    def __init__(
        self, kernel: LoadedKernel, parameters: Parameters, grid: Grid, shared_bytes: int | None = None,
        overlaps: bool = False, cluster: int = 1,
    ):  # fmt: skip
        self._kernel, self._parameters, self._grid = kernel, parameters, grid
        self._shared = kernel.shared_bytes if shared_bytes is None else shared_bytes
        kernel.allow_shared(self._shared)
        self._attributes = _attributes(overlaps and kernel.can_overlap, cluster)
        self._what = f"grid={grid}, threads={kernel.threads}, shared={self._shared}, cluster={cluster}"

    def on(self, stream: int) -> Callable[[], None]:
        """Return what launches on `stream`."""
        if not all(self._grid):
            return lambda: None
        return self._with_attributes(stream) if self._attributes else self._plain(stream)

    def _with_attributes(self, stream: int) -> Callable[[], None]:
        kernel, attributes = self._kernel, self._attributes
        config = _Config(self._grid, (kernel.threads, 1, 1), self._shared, stream, attributes, len(attributes))
        call = partial(driver().cuLaunchKernelEx, ctypes.byref(config), ctypes.c_void_p(kernel._function),
                       ctypes.c_void_p(self._parameters.address), None)  # fmt: skip

        def launch() -> None:
            result = call()
            if result:
                check(result, f"cuLaunchKernelEx({self._what})")

        return launch

    def _plain(self, stream: int) -> Callable[[], None]:
        api = sys.modules["cupy"].cuda.driver  # CuPy's call of the driver takes half the time of one through ctypes
        call = partial(api.launchKernel, self._kernel._function, *self._grid, self._kernel.threads, 1, 1, self._shared,
                       stream, self._parameters.address, 0)  # fmt: skip

        def launch() -> None:
            try:
                call()
            except api.CUDADriverError as error:
                raise TargetError(f"cuda: cuLaunchKernel({self._what}) must succeed, got {error}.") from error

        return launch


def check(result: int, call: str) -> None:
    """Raise a TargetError that carries the driver's own words if `result` is an error."""
    if not result:
        return
    text = ctypes.c_char_p()
    driver().cuGetErrorString(result, ctypes.byref(text))
    words = text.value.decode() if text.value else "unknown error"
    raise TargetError(f"cuda: {call} must succeed, got error {result} ({words}).")


loaded: dict[tuple, LoadedKernel] = {}
_loading = threading.Lock()


def kernel(family: str, device: int, **constants: Any) -> LoadedKernel:
    """Return the loaded kernel of a specialisation, compiling and loading it the first time."""
    key = (family, device, *constants.items())
    found = loaded.get(key)
    if found is None:
        with _loading:
            found = loaded.get(key)
            if found is None:
                found = loaded[key] = LoadedKernel(family, constants, device)
    return found

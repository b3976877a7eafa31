"""Launch a cubin on CuPy's current stream: one call of the driver, all parameters packed into one buffer."""

from __future__ import annotations

import ctypes
import struct
import sys
import threading
from functools import cache
from typing import Any

from nbattn.cuda_kernels.compile import ComputeCapability, cubin_for
from nbattn.cuda_kernels.parameters import PARAMETERS
from nbattn.errors import TargetError

_PACKED = {"i64": "q", "i32": "i", "f32": "f"}
_PARAMETER_BUFFER, _PARAMETER_SIZE, _END = 1, 2, 0  # CU_LAUNCH_PARAM_*
_MAX_DYNAMIC_SHARED_SIZE = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_FREE_SHARED_BYTES = 48 * 1024  # a block gets these without asking


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
    unsigned, pointer = ctypes.c_uint, ctypes.c_void_p
    library.cuLaunchKernel.argtypes = [pointer] + [unsigned] * 7 + [pointer] * 3
    return library


def cupy() -> Any:
    """Return the CuPy module, or say what is missing."""
    try:
        import cupy as module
    except ImportError as error:
        raise TargetError(f"cuda: needs CuPy, got {error}. Install it with: pip install 'nbattn[cuda13]'.") from error
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
        self.threads, self.shared_bytes = cubin.threads, cubin.shared_bytes
        self.names = tuple(name for name, _ in PARAMETERS[family])
        layout = struct.Struct("@" + "".join(_PACKED[kind] for _, kind in PARAMETERS[family]))
        self._pack = layout.pack_into
        self._parameters = ctypes.create_string_buffer(layout.size)
        self._size = ctypes.c_size_t(layout.size)
        self._extra = (ctypes.c_void_p * 5)(
            _PARAMETER_BUFFER, ctypes.addressof(self._parameters), _PARAMETER_SIZE, ctypes.addressof(self._size), _END
        )
        self._lock = threading.Lock()  # packing and launching are one step: threads share the buffer
        self._launch = driver().cuLaunchKernel
        self._function = self._load(cubin.image, cubin.name)

    def _load(self, image: bytes, name: str) -> int:
        cupy().cuda.runtime.free(0)  # makes the device's primary context current
        self._module = ctypes.c_void_p()
        function = ctypes.c_void_p()
        check(driver().cuModuleLoadData(ctypes.byref(self._module), image), "cuModuleLoadData")
        check(driver().cuModuleGetFunction(ctypes.byref(function), self._module, name.encode()), "cuModuleGetFunction")
        if self.shared_bytes > _FREE_SHARED_BYTES:
            result = driver().cuFuncSetAttribute(function, _MAX_DYNAMIC_SHARED_SIZE, self.shared_bytes)
            check(result, f"cuFuncSetAttribute({self.shared_bytes} bytes of shared memory)")
        return int(function.value or 0)

    def __call__(self, grid: tuple[int, int, int], stream: int, values: tuple, shared_bytes: int | None = None) -> None:
        """Launch on `stream` with `values` in the order of `names`; an empty grid launches nothing."""
        x, y, z = grid
        if not x * y * z:
            return
        shared = self.shared_bytes if shared_bytes is None else shared_bytes
        with self._lock:
            self._pack(self._parameters, 0, *values)
            result = self._launch(self._function, x, y, z, self.threads, 1, 1, shared, stream, None, self._extra)
        if result:
            check(result, f"cuLaunchKernel(grid={grid}, threads={self.threads}, shared={shared})")


def check(result: int, call: str) -> None:
    """Raise a TargetError that carries the driver's own words if `result` is an error."""
    if not result:
        return
    text = ctypes.c_char_p()
    driver().cuGetErrorString(result, ctypes.byref(text))
    words = text.value.decode() if text.value else "unknown error"
    raise TargetError(f"cuda: {call} must succeed, got error {result} ({words}).")


_loaded: dict[tuple, LoadedKernel] = {}
_loading = threading.Lock()


def kernel(family: str, device: int, **constants: Any) -> LoadedKernel:
    """Return the loaded kernel of a specialisation, compiling and loading it the first time."""
    key = (family, device, *constants.items())
    found = _loaded.get(key)
    if found is None:
        with _loading:
            found = _loaded.get(key)
            if found is None:
                found = _loaded[key] = LoadedKernel(family, constants, device)
    return found


def current_stream() -> int:
    """Return the handle of CuPy's current stream."""
    return int(cupy_stream().ptr)


def cupy_stream() -> Any:
    """Return CuPy's current stream; CuPy is loaded, because its arrays are being served."""
    return sys.modules["cupy"].cuda.get_current_stream()

"""What the arrays are: their library, device and element type, without importing a GPU package."""

from __future__ import annotations

import sys
from typing import Any

import ml_dtypes
import numpy as np

from nbattn.errors import ContractError, TargetError, check_choice

Array = Any  # numpy.ndarray or cupy.ndarray

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
FLOAT8_E4M3FN = np.dtype(ml_dtypes.float8_e4m3fn)
FLOAT8_E5M2 = np.dtype(ml_dtypes.float8_e5m2)

QUERY_DTYPES = ("float16", "bfloat16", "float32", "float64")
QUANTIZED_DTYPES = ("float8_e4m3fn", "float8_e5m2", "int8")
MOST_WORK: Any = 10_000  # steps of telling whether two arrays share memory: milliseconds
TARGETS = ("cpu", "cuda", "gpu")
CACHE_DTYPES = QUERY_DTYPES + QUANTIZED_DTYPES


def library_of(x: Array) -> str | None:
    """Return ``"numpy"``, ``"cupy"`` or None for anything that is not an array of either.

    Neither are NumPy's masked arrays, whose masks no kernel reads, and matrices, which keep two axes whatever is asked.
    """
    if type(x) is np.ndarray:
        return "numpy"
    if isinstance(x, np.ndarray):
        masked = sys.modules.get("numpy.ma")  # imported by whoever makes one
        return None if isinstance(x, np.matrix) or (masked and isinstance(x, masked.MaskedArray)) else "numpy"
    cupy = sys.modules.get("cupy")  # a CuPy array exists only where CuPy has been imported
    if cupy is not None and isinstance(x, cupy.ndarray):
        return "cupy"
    return None


def on_host(*arrays: Array) -> list[np.ndarray]:
    """Return arrays of one dimension on the host, themselves if they are there.

    Several on a device are copied together: into pinned memory, so that one wait for the device serves them all.
    """
    if len(arrays) == 1 or not all(library_of(x) == "cupy" and x.size for x in arrays):
        return [x if isinstance(x, np.ndarray) else x.get() for x in arrays]
    cuda = sys.modules["cupy"].cuda
    copies = [np.frombuffer(cuda.alloc_pinned_memory(x.nbytes), x.dtype, x.size) for x in arrays]
    for x, copy in zip(arrays, copies, strict=True):
        x.get(out=copy, blocking=False)
    for device in {x.data.device_id for x in arrays}:
        cuda.get_current_stream(device).synchronize()
    return copies


def copy_of(x: Array) -> Array:
    """Return a contiguous copy of an array where it is."""
    if isinstance(x, np.ndarray) or not x.size or not x.flags.c_contiguous:
        return x.copy()
    cupy = sys.modules["cupy"]
    if x.data.device_id != cupy.cuda.runtime.getDevice():  # its stream orders the copy
        return x.copy()
    copy = cupy.empty(x.shape, x.dtype)
    copy.data.copy_from_device_async(x.data, x.nbytes)  # `copy` takes more steps
    return copy


def require_array(name: str, x: Array) -> Array:
    """Return `x` if it is a NumPy or CuPy array, else refuse it by name."""
    if library_of(x) is None:
        hint = f" Pass numpy.asarray({name})." if isinstance(x, np.ndarray) else ""
        raise ContractError(f"{name}: must be a NumPy or CuPy array, got {type(x).__name__}.{hint}")
    return x


def single_value(name: str, x: Any) -> Any:
    """Return the number of a one-element array, and anything else as it is; a masked array or matrix is refused."""
    if getattr(x, "size", 0) != 1:
        return x
    return (require_array(name, x) if isinstance(x, np.ndarray) else x).item()


def common_library(**arrays: Array) -> str:
    """Return the one library of all given data arrays."""
    found: dict[str, str] = {}
    for name, x in arrays.items():
        found.setdefault(str(library_of(require_array(name, x))), name)
    if len(found) > 1:
        (lib_a, a), (lib_b, b) = list(found.items())[:2]
        raise ContractError(
            f"{b}: must live where {a} does ({lib_a}), got {lib_b}. Data arrays are never moved silently."
        )
    return next(iter(found))


def confirm_target(target: str | None, library: str) -> str:
    """Return ``"cpu"`` or ``"cuda"`` as `library` says; `target` may only confirm it."""
    implied = "cpu" if library == "numpy" else "cuda"
    if target is None:
        return implied
    check_choice("target", target, TARGETS)
    if ("cuda" if target == "gpu" else target) == implied:
        return implied
    if implied == "cpu":
        raise TargetError(f'target: "{target}" needs CuPy arrays, got NumPy arrays. Move them with cupy.asarray(x).')
    raise TargetError('target: "cpu" needs NumPy arrays, got CuPy arrays. Move them with cupy.asnumpy(x).')


class _Shadow:
    """What NumPy takes for an array at the address of a device's: nothing reads it."""

    def __init__(self, x: Array):
        self.__array_interface__ = {
            "data": (x.data.ptr, True), "shape": x.shape, "strides": x.strides, "typestr": f"|V{x.itemsize}",
            "version": 3,
        }  # fmt: skip


def overlap(a: Array, b: Array) -> bool:
    """Return whether two arrays of one library share memory; where that is hard to tell, whether they may."""
    if library_of(a) != "numpy":
        a, b = np.asarray(_Shadow(a)), np.asarray(_Shadow(b))
    try:
        return np.shares_memory(a, b, max_work=MOST_WORK)
    except np.exceptions.TooHardError:
        return True


Form = tuple[Any, tuple[np.dtype, tuple[int, ...], tuple[int, ...]]]  # the first is a type


def form_of(x: Array) -> Form:
    """Return all of an array that the checks of a call look at: its type, and its dtype, shape and strides."""
    return type(x), (x.dtype, x.shape, x.strides)


def has_form(x: Any, form: Form | None) -> bool:
    """Return whether `x` is an array of a form, or None where the form is None."""
    if form is None or x is None:
        return x is form
    return type(x) is form[0] and form[1] == (x.dtype, x.shape, x.strides)


_FLOAT32, _FLOAT64 = np.dtype(np.float32), np.dtype(np.float64)
_names: dict[np.dtype, str] = {}  # str(dtype) takes a microsecond, and a call asks a dozen times


def dtype_name(x: Array) -> str:
    """Return the element type's name, e.g. ``"bfloat16"`` or ``"float8_e4m3fn"``."""
    return name_of(x.dtype)


def name_of(dtype: np.dtype) -> str:
    """Return the name of an element type, as `dtype_name`."""
    name = _names.get(dtype)
    if name is None:
        name = _names[dtype] = str(dtype)
    return name


def dtype_from_name(name: Any, argument: str = "dtype") -> np.dtype:
    """Return the NumPy dtype of a name, a NumPy dtype or an ml_dtypes scalar type; errors speak of `argument`."""
    known = {"bfloat16": BFLOAT16, "float8_e4m3fn": FLOAT8_E4M3FN, "float8_e5m2": FLOAT8_E5M2}
    if isinstance(name, str) and name in known:
        return known[name]
    try:
        return np.dtype(name)
    except (TypeError, ValueError, SyntaxError) as error:
        raise ContractError(f"{argument}: must name a NumPy or ml_dtypes type, got {name!r}.") from error


def is_float(dtype: np.dtype) -> bool:
    """Return whether a dtype holds real floating-point numbers, those of ml_dtypes included."""
    return dtype.kind == "f" or dtype in (BFLOAT16, FLOAT8_E4M3FN, FLOAT8_E5M2)


def accumulator_dtype(query_dtype: str) -> np.dtype:
    """Return the dtype in which scores, weights and states are kept: float64 for float64, else float32."""
    return _FLOAT64 if query_dtype == "float64" else _FLOAT32

"""A paste-ready diagnosis of the machine and the installation: ``python -m nbattn info``.

Every probe is isolated: one that fails becomes a line of the report, which so also works where packages are broken.
"""

from __future__ import annotations

import ctypes
import os
import platform
import sys
import warnings
from collections.abc import Callable, Iterator
from importlib import import_module, metadata
from pathlib import Path

CORE_PACKAGES = ("numpy", "numba", "llvmlite", "scipy", "ml_dtypes")
GPU_PACKAGES = ("numba-cuda", "cupy", "cupy-cuda12x", "cupy-cuda13x", "cuda-bindings")
GPU_COMPILERS = ("nvidia-nvvm", "nvidia-cuda-nvrtc", "nvidia-nvjitlink", "nvidia-cuda-nvcc")
VECTOR_FEATURES = (
    "avx2",
    "fma",
    "f16c",
    "avx512f",
    "avx512bw",
    "avx512vl",
    "avx512bf16",
    "amx-bf16",
    "neon",
    "sve",
    "bf16",
)
SETTINGS = ("NBATTN_", "NUMBA_", "OMP_", "CUDA_VISIBLE", "CUDA_HOME", "CUDA_PATH", "CUPY_")


def _versions(names: tuple[str, ...]) -> str:
    found = []
    for name in names:
        try:
            found.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            continue
    return ", ".join(found) or "none installed (the cuda12 and cuda13 extras bring them)"


def _core() -> str:
    versions = _versions(CORE_PACKAGES)
    missing = [name for name in CORE_PACKAGES if f"{name} " not in versions]
    return versions + (f"; MISSING {', '.join(missing)}: pip install {' '.join(missing)}" if missing else "")


def processor() -> tuple[str, int | None]:
    """Return the CPU's model and how many of its cores may be used."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        model = platform.processor() or platform.machine()
    return model, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


def _cpu() -> str:
    model, usable = processor()
    return f"{model}, {usable} of {os.cpu_count()} cores usable"


def _vector_features() -> str:
    binding = import_module("llvmlite.binding")
    features = binding.get_host_cpu_features()
    seen = [name for name in VECTOR_FEATURES if features.get(name)]
    return f"{binding.get_host_cpu_name()}: {' '.join(seen) or 'no vector feature known to this report'}"


def _threads() -> str:
    count = import_module("nbattn.threads").get_num_threads()
    return f"{count} a call, the library's own team (no Numba threading layer)"


def _cache() -> str:
    folder = import_module("nbattn.cuda_kernels.compile").cache_directory()
    kept = os.environ.get("NBATTN_CPU_CACHE") == "1"
    cpu = "CPU kernels there too" if kept else "CPU kernels compiled in every process (NBATTN_CPU_CACHE=1 keeps them)"
    return f"CUDA kernels in {folder} (NBATTN_CACHE_DIR); {cpu}"


def _settings() -> str:
    chosen = [f"{key}={value}" for key, value in sorted(os.environ.items()) if key.startswith(SETTINGS)]
    return " ".join(chosen) or "none set"


def _gpu() -> str:
    library = "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"
    try:
        driver = ctypes.CDLL(library)
    except OSError:
        return f"no NVIDIA driver ({library} not found): install the driver; NumPy arrays work without one"
    status = driver.cuInit(0)
    if status != 0:
        return f"driver found, but cuInit failed with CUDA error {status}: is a GPU visible (nvidia-smi)?"
    version, count = ctypes.c_int(), ctypes.c_int()
    driver.cuDriverGetVersion(ctypes.byref(version))
    driver.cuDeviceGetCount(ctypes.byref(count))
    names = []
    for ordinal in range(count.value):
        name, major, minor, device = ctypes.create_string_buffer(128), ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
        driver.cuDeviceGet(ctypes.byref(device), ordinal)
        driver.cuDeviceGetName(name, len(name), device)
        driver.cuDeviceGetAttribute(ctypes.byref(major), 75, device)  # COMPUTE_CAPABILITY_MAJOR
        driver.cuDeviceGetAttribute(ctypes.byref(minor), 76, device)  # COMPUTE_CAPABILITY_MINOR
        names.append(f"{name.value.decode()} (compute capability {major.value}.{minor.value})")
    cuda = f"{version.value // 1000}.{version.value % 1000 // 10}"
    return f"driver for CUDA {cuda}; {', '.join(names) or 'no device'}"


def _cupy() -> str:
    try:
        cupy = import_module("cupy")
    except ModuleNotFoundError as error:
        if error.name != "cupy":
            raise
        return 'not installed; in a clone: pip install ".[cuda13]" for a CUDA 13 driver, ".[cuda12]" for CUDA 12'
    if not cupy.cuda.is_available():
        return f"{cupy.__version__} imports, but sees no GPU"
    return f"{cupy.__version__} sees {cupy.cuda.runtime.getDeviceCount()} GPU(s)"


def _numba_cuda() -> str:
    try:
        metadata.version("numba-cuda")
    except metadata.PackageNotFoundError:
        return 'not installed; in a clone: pip install ".[cuda13]" or ".[cuda12]"'
    cuda = import_module("numba.cuda")
    return f"imports; {'sees a GPU' if cuda.is_available() else 'sees no GPU'}"


_PROBES: tuple[tuple[str, Callable[[], str]], ...] = (
    ("nbattn", lambda: f"{import_module('nbattn').__version__} in {Path(__file__).resolve().parent}"),
    ("python", lambda: f"{platform.python_version()} ({sys.executable}) on {platform.platform()}"),
    ("core", _core),
    ("cpu", _cpu),
    ("cpu features", _vector_features),
    ("threads", _threads),
    ("cache", _cache),
    ("settings", _settings),
    ("gpu", _gpu),
    ("gpu packages", lambda: _versions(GPU_PACKAGES)),
    ("gpu compilers", lambda: _versions(GPU_COMPILERS)),
    ("cupy", _cupy),
    ("numba.cuda", _numba_cuda),
)


def diagnose() -> Iterator[tuple[str, str]]:
    """Yield ``(label, finding)`` of every probe; a probe that fails yields its error and never raises.

    Examples
    --------
    >>> dict(diagnose())["nbattn"].split()[0]
    '0.1.0'
    """
    for label, probe in _PROBES:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                finding = probe()
            except (Exception, SystemExit) as error:  # a broken package may raise anything while it is imported
                reason = " ".join(str(error).split())
                finding = f"BROKEN: {type(error).__name__}: {reason}"
        yield label, finding + "".join(f" [warning: {' '.join(str(entry.message).split())}]" for entry in caught)


def main(arguments: list[str]) -> int:
    """Print the report and return 0, whatever was found."""
    if arguments:
        print("usage: python -m nbattn info")
    try:
        for label, finding in diagnose():
            print(f"{label:<14} {finding}", flush=True)  # if a package kills the process, the lines before it stand
    except BrokenPipeError:  # the reader, e.g. head, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0

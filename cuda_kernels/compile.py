"""From a kernel's name and constants to a cubin: Numba compiles it once, a cache on disk serves every later process.

Nothing here needs a GPU or a driver, and nothing imports Numba while the cache holds what is asked for. A kernel module
`nbattn.cuda_kernels.<family>` has ``make(**constants)`` returning a `Kernel`; its parameters are listed in
`nbattn.cuda_kernels.parameters`.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import inspect
import json
import logging
import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from nbattn.cache import cache_directory, fingerprint, versions_of, write_whole
from nbattn.cuda_kernels.parameters import PARAMETERS
from nbattn.errors import TargetError

logger = logging.getLogger("nbattn")
ComputeCapability = tuple[int, int]

_SHARED_SOURCES = ("indexing.py", "scoring.py")  # modules of nbattn that kernels inline
_TOOLCHAIN = ("numba", "numba-cuda", "llvmlite", "cuda-bindings", "nvidia-nvvm", "nvidia-nvjitlink")
_BEFORE_HOPPER = {  # kernels cannot overlap, and every block is a cluster of its own
    r"griddepcontrol\.\w+;|barrier\.cluster\.arrive[\w.]*;": "",
    r"barrier\.cluster\.wait[\w.]*;": "bar.sync 0;",
    r"%clusterid\.x": "%ctaid.x",
    r"%cluster_ctarank": "0",
    r"%cluster_nctarank": "1",
    r"mapa\.shared::cluster\.u32 (\S+), (\S+), \S+;": r"mov.b32 \1, \2;",
    r"ld\.shared::cluster": "ld.shared",
}
_FAST_MATH = ("-ftz=1", "-prec-div=0", "-prec-sqrt=0", "-fma=1")  # what Numba's `fastmath` says where it makes PTX
_MAGIC = b"nbattn cubin 1\n"


@dataclass(frozen=True)
class Kernel:
    """A kernel function and how its blocks look: threads, blocks to fit on a multiprocessor, dynamic shared bytes.

    If its warpgroups exchange registers, the assembler has to see a whole program: it ignores them in one to be linked.
    """

    function: Callable
    threads: int
    blocks_per_multiprocessor: int
    shared_bytes: int = 0
    exchanges_registers: bool = False


@dataclass(frozen=True)
class Cubin:
    """A compiled kernel: the image, its entry name, and its launch shape."""

    image: bytes
    name: str
    threads: int
    shared_bytes: int


@dataclass
class Counters:
    """What this process did: Numba compiles, and cubins read from the cache."""

    compiled: int = 0
    loaded: int = 0


counters = Counters()


def cubin_for(family: str, constants: dict[str, Any], cc: ComputeCapability) -> Cubin:
    """Return the cubin of a specialisation, from the cache on disk or compiled now.

    Parameters
    ----------
    family : str
        Kernel module, e.g. ``"paged_decode"``.
    constants : dict
        Arguments of the module's ``make``: strings, integers and booleans.
    cc : tuple of int
        Compute capability of the device, e.g. ``(9, 0)``.

    Returns
    -------
    Cubin

    Raises
    ------
    TargetError
        A package that compiles is missing; the message names it and the extra that brings it.
    """
    path = cache_directory() / f"{family}-{cache_key(family, constants, cc)}.cubin"
    cubin = _read(path)
    if cubin is not None:
        counters.loaded += 1
        return cubin
    began = time.perf_counter()
    label = f"{family}({', '.join(f'{k}={v}' for k, v in constants.items())}) for sm_{cc[0]}{cc[1]}"
    logger.info("compiling %s", label)
    kernel, code = to_code(family, constants, cc)
    image, _ = to_cubin(code, cc)
    cubin = Cubin(image, entry_name(image, family), kernel.threads, kernel.shared_bytes)
    counters.compiled += 1
    _write(path, cubin)
    logger.info("compiled %s in %.1f s, kept as %s", label, time.perf_counter() - began, path)
    return cubin


def cache_key(family: str, constants: dict[str, Any], cc: ComputeCapability) -> str:
    """Return the hash of everything the cubin depends on: sources, toolchain, constants, compute capability."""
    text = json.dumps([source_hash(), family, sorted(constants.items()), list(cc)])
    return hashlib.sha256(text.encode()).hexdigest()[:32]


@cache
def source_hash() -> str:
    """Return the hash of the kernels' sources, of the modules they inline, and of what compiles them."""
    package = os.path.dirname(sys.modules["nbattn"].__file__ or "")
    with os.scandir(os.path.dirname(__file__)) as entries:
        sources = sorted(entry.path for entry in entries if entry.name.endswith(".py"))
    return fingerprint([*sources, *(os.path.join(package, name) for name in _SHARED_SOURCES)], _TOOLCHAIN)


def _read(path: Path) -> Cubin | None:
    try:
        magic, header, image = path.read_bytes().split(b"\n", 2)
        shape = json.loads(header)
    except (OSError, ValueError):
        return None
    if magic + b"\n" != _MAGIC or hashlib.sha256(image).hexdigest() != shape["sha256"]:
        return None  # damaged
    return Cubin(image, shape["name"], shape["threads"], shape["shared_bytes"])


def _write(path: Path, cubin: Cubin) -> None:
    shape = {"name": cubin.name, "threads": cubin.threads, "shared_bytes": cubin.shared_bytes}
    header = json.dumps({**shape, "sha256": hashlib.sha256(cubin.image).hexdigest()})
    try:
        write_whole(path, _MAGIC + header.encode() + b"\n" + cubin.image)
    except OSError as error:
        logger.warning("the cubin cache %s cannot be written (%s): every process will compile anew", path.parent, error)


def load_kernel(family: str, constants: dict[str, Any]) -> Kernel:
    """Import a kernel module and build one specialisation; its parameters must be those the launcher packs."""
    try:
        importlib.import_module("numba.cuda")
    except Exception as error:  # one that does not fit its NumPy or Numba fails in any way
        versions = versions_of("numba-cuda", "numba", "numpy", "llvmlite", "cuda-bindings")
        installed = ", ".join(f"{name} {version or 'missing'}" for name, version in versions.items())
        raise TargetError(
            "cuda: compiling a kernel needs a numba-cuda that can be imported, got "
            f"{type(error).__name__}: {error} with {installed}. In a clone: pip install '.[cuda13]'."
        ) from error
    try:
        importlib.import_module("nbattn.cuda_kernels.primitives")  # what indexing and scoring leave to each target
        module = importlib.import_module(f"nbattn.cuda_kernels.{family}")
    except ImportError as error:
        raise TargetError(
            f"cuda: compiling a kernel needs numba-cuda and its CUDA packages, got {error}. "
            "In a clone: pip install '.[cuda13]'."
        ) from error
    kernel = module.make(**constants)
    expected = [name for name, _ in PARAMETERS[family]]
    found = list(inspect.signature(kernel.function).parameters)
    if found != expected:
        raise TypeError(f"{family}: the kernel's parameters {found} differ from the launcher's {expected}.")
    return kernel


def to_code(family: str, constants: dict[str, Any], cc: ComputeCapability) -> tuple[Kernel, str | bytes]:
    """Compile one specialisation to what `to_cubin` takes: PTX, or the compiler's own code of a whole program."""
    kernel = load_kernel(family, constants)
    from numba import cuda
    from numba.cuda import types

    kinds = {"i32": types.int32, "i64": types.int64, "f32": types.float32}
    signature = types.void(*(kinds[kind] for _, kind in PARAMETERS[family]))
    with _device_of(cc):
        code, _ = cuda.compile(
            kernel.function,
            signature,
            device=False,
            abi="numba",
            cc=_full_capability(cc),
            output="ltoir" if kernel.exchanges_registers else "ptx",
            fastmath=True,
            launch_bounds=(kernel.threads, kernel.blocks_per_multiprocessor),
        )
    if kernel.exchanges_registers:
        return kernel, code
    text = code.decode() if isinstance(code, bytes) else code
    entry = text.split(".visible .entry ", 1)[1].split("(", 1)[0]
    if cc < (9, 0):
        for pattern, older in _BEFORE_HOPPER.items():
            text = re.sub(pattern, older, text)
    return kernel, text.replace(entry, f"nbattn_{family}")


def to_cubin(code: str | bytes, cc: ComputeCapability) -> tuple[bytes, str]:
    """Assemble with nvJitLink; return the cubin and the report of the assembler: entry, registers, spills."""
    return _link(code, cc, "cubin")


def to_ptx(code: str | bytes, cc: ComputeCapability) -> str:
    """Return the PTX of a kernel's code."""
    return code if isinstance(code, str) else _link(code, cc, "ptx")[0].decode()


def entry_name(image: bytes, family: str) -> str:
    """Return the name of a cubin's kernel: ours in PTX, else that of the one section of code.

    The assembler's report names it too, but came empty where several processes compiled at once beside a GPU.
    """
    names = {name.decode() for name in re.findall(rb"\.text\.([\w$]+)\x00", image)}
    ours = f"nbattn_{family}"
    if ours not in names and len(names) != 1:
        raise TargetError(f"cuda: a cubin of {family} must hold {ours} or one kernel, got {sorted(names)}.")
    return ours if ours in names else names.pop()


def _link(code: str | bytes, cc: ComputeCapability, wanted: str) -> tuple[bytes, str]:
    try:
        from cuda.bindings import nvjitlink
    except ImportError as error:
        raise TargetError(
            f"cuda: assembling a kernel needs cuda-bindings, got {error}. In a clone: pip install '.[cuda13]'."
        ) from error
    major, minor, *suffix = _full_capability(cc)
    options = [f"-arch=sm_{major}{minor}{''.join(suffix)}", "-Xptxas=-v", "-verbose"]
    if isinstance(code, str):
        kind, code = nvjitlink.InputType.PTX, code.encode()
    else:
        kind, options = nvjitlink.InputType.LTOIR, [*options, "-lto", *_FAST_MATH]
    if wanted == "ptx":
        options.append("-ptx")
    linker = nvjitlink.create(len(options), options)
    try:
        nvjitlink.add_data(linker, kind, code, len(code), "kernel")
        nvjitlink.complete(linker)
        result = bytearray(getattr(nvjitlink, f"get_linked_{wanted}_size")(linker))
        getattr(nvjitlink, f"get_linked_{wanted}")(linker, result)
        report = bytearray(nvjitlink.get_info_log_size(linker))
        if report:
            nvjitlink.get_info_log(linker, report)
    finally:
        nvjitlink.destroy(linker)
    return bytes(result), report.decode(errors="replace")


def _full_capability(cc: ComputeCapability) -> tuple:
    return (*cc, "a") if cc[0] >= 9 else cc  # "a": the instructions of exactly this architecture


class _StubDevice:
    id = 0

    def __init__(self, cc: ComputeCapability):
        self.compute_capability = cc


@contextlib.contextmanager
def _device_of(cc: ComputeCapability) -> Iterator[None]:
    """Answer Numba's question for the current device, which it asks while it compiles a called function."""
    from numba.cuda import dispatcher

    asked = dispatcher.get_current_device
    dispatcher.get_current_device = lambda: _StubDevice(cc)
    try:
        yield
    finally:
        dispatcher.get_current_device = asked

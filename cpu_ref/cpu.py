"""What the CPU that Numba compiles for can do. Only speed depends on it, never a result's meaning."""

from __future__ import annotations

import platform

import llvmlite.binding as llvm
from numba import config


def features() -> str:
    """Return the features of the CPU that Numba compiles for, in LLVM's notation; empty where another one is named."""
    if config.CPU_NAME is not None or config.CPU_FEATURES is not None:
        return config.CPU_FEATURES or ""
    return llvm.get_host_cpu_features().flatten()


def _name() -> str:
    return config.CPU_NAME if config.CPU_NAME is not None else llvm.get_host_cpu_name()


REGISTER_BYTES = 64 if "+avx512f" in features() else 32  # LLVM splits vectors where registers are narrower
BFLOAT16_DOT = REGISTER_BYTES == 64 and "+avx512bf16" in features()  # two bfloat16 products a lane and instruction
# Where rows are brought to before their use. Zen 5: those that do not start a line come faster from L1 (decode 4.9 ms,
# from L2 5.7). Elsewhere L2: on Zen 4 a prefetch to L1, a whole block ahead, was as slow as none.
AHEAD_TO_L1 = _name() == "znver5"
# Whether rows in pages are prefetched in the order of their use too, not only in that of memory. On a Zen 3 decodes
# take 4 to 13 % longer with it, for prefetches take the slots of loads; gathers, whose rows lie anywhere, 11 % less.
PREFETCHED_TWICE = REGISTER_BYTES == 64
SCALE_BY_POWER = "+avx512f" in features()  # one instruction multiplies with 2**x, also below the normal numbers
HALF_CONVERSIONS = "+f16c" in features() or platform.machine() in ("arm64", "aarch64")  # else LLVM would call a library

"""Rings of tiles in shared memory that some warps fill and others use (compute capability 9.0).

Each stage of a ring has two barriers in shared memory, of 8 bytes: one completes a phase when its tile is there, one
when it has been used. A wait names the phase by its parity: that of use ``u`` of a stage is ``u & 1``.
"""

from __future__ import annotations

from typing import Any

from numba.cuda import types

from nbattn.cuda_kernels.ptx import instruction

init_barrier = instruction(  # the address, and the arrivals that complete a phase
    "init_barrier", "mbarrier.init.shared::cta.b64 [$0], $1;", (), (types.int32, types.int32), "memory"
)
arrive_at_barrier = instruction(
    "arrive_at_barrier", "mbarrier.arrive.shared::cta.b64 _, [$0];", (), (types.int32,), "memory"
)
wait_at_barrier = instruction(  # until the phase of that parity is complete
    "wait_at_barrier",
    "{.reg .pred p; AGAIN: mbarrier.try_wait.parity.shared::cta.b64 p, [$0], $1; @!p bra AGAIN;}",
    (),
    (types.int32, types.int32),
    "memory",
)


def registers_of_thread(action: str, count: int) -> Any:
    """Return the intrinsic by which a warpgroup's threads give registers up ("dec") or wait for more ("inc")."""
    return instruction("registers_of_thread", f"setmaxnreg.{action}.sync.aligned.u32 {count};", (), (), "memory")

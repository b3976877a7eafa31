"""`append_paged_kv_cache` on the GPU."""

from __future__ import annotations

from typing import Any

import numpy as np

from nbattn.arrays import Array
from nbattn.cuda_kernels import calls
from nbattn.cuda_kernels.metadata import upload_integers
from nbattn.cuda_kernels.target import current_device


def append_kv(
    append_key: Array, append_value: Array, batch_indices: Array, positions: Array, kv: Any, device: Any = None
) -> None:
    """Write token ``i`` to key ``positions[i]`` of request ``batch_indices[i]``; one that breaks a rule is skipped."""
    if append_key.shape[0] == 0:
        return
    device = device or current_device()
    lists = [batch_indices, positions, kv.kv_indptr, kv.kv_lens, kv.kv_indices]
    host = [np.ascontiguousarray(x, np.int32) for x in lists if not device.holds(x)]
    buffer, addresses = upload_integers(device, host)
    kept = [device.as_int32(x) if device.holds(x) else None for x in lists]
    uploaded = iter(addresses)
    pointers = tuple(next(uploaded) if x is None else device.address(x) for x in kept)
    calls.run_append(device, append_key, append_value, kv.k, kv.v, pointers, kv.batch_size)
    del buffer, kept  # CuPy reuses memory in stream order

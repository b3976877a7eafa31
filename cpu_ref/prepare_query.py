"""Preparing q before attention: RMS norm with gain, then rotation; the result is float32 (float64 for float64)."""

from __future__ import annotations

import math

import numpy as np

from nbattn.cpu_ref.blocks import padded
from nbattn.cpu_ref.compiling import kernel
from nbattn.cpu_ref.number_formats import address_of
from nbattn.cpu_ref.rows import read_row
from nbattn.cpu_ref.workers import next_task
from nbattn.scoring import rotate_pair

ROWS_PER_TASK = 16


@kernel
def prepare_worker(
    queries, num_heads, counters, num_tasks, gain, eps, cos, sin, origin, positions, interleaved, prepared
):
    """Prepare rows until no task is left; a task is `ROWS_PER_TASK` rows of ``prepared [rows, heads, dim]``.

    A row whose position lies outside the planes becomes NaN; one that stands before the first key does not show it,
    since it keeps nothing.
    """
    dim = queries.dim
    half = cos.shape[1]
    x = np.empty(padded(dim), prepared.dtype)
    while True:
        task = next_task(counters, 0)
        if task >= num_tasks:
            return
        for row in range(task * ROWS_PER_TASK, min((task + 1) * ROWS_PER_TASK, prepared.shape[0])):
            for head in range(num_heads):
                source = queries.address + row * queries.stride + head * queries.head_stride
                read_row(address_of(x), source, queries.code, dim)
                if gain.shape[0] > 0:
                    square = x[0] * 0
                    for d in range(dim):
                        square += x[d] * x[d]
                    factor = 1 / math.sqrt(square / x.dtype.type(dim) + x.dtype.type(eps))
                    for d in range(dim):
                        x[d] = x[d] * x.dtype.type(factor) * gain[d]
                place = np.int64(positions[row]) - origin
                if half > 0:
                    if place < 0 or place >= cos.shape[0]:
                        x[:] = math.nan
                    else:
                        for i in range(half):
                            first, second = (2 * i, 2 * i + 1) if interleaved else (i, i + half)
                            x[first], x[second] = rotate_pair(x[first], x[second], cos[place, i], sin[place, i])
                for d in range(dim):
                    prepared[row, head, d] = x[d]
        next_task(counters, 1)

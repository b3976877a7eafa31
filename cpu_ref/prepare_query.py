"""Preparing q before attention: RMS norm with gain, then rotation; the result is float32 (float64 for float64)."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from nbattn.cpu_ref.blocks import padded
from nbattn.cpu_ref.compiling import worker
from nbattn.cpu_ref.number_formats import address_of, bytes_of, load_int64, load_number, store_number
from nbattn.cpu_ref.problem import Queries
from nbattn.cpu_ref.records import WORD_BYTES, read_record, words_before
from nbattn.cpu_ref.rows import read_row
from nbattn.cpu_ref.scratch import zeros
from nbattn.cpu_ref.tags import number_type
from nbattn.cpu_ref.workers import next_task
from nbattn.scoring import rotate_pair

ROWS_PER_TASK = 16


class PrepareJob(NamedTuple):
    """The first part of a record of `prepare_worker`."""

    next_task: int
    num_rows: int
    num_heads: int
    prepared: int  # address of number [num_rows, num_heads, dim]
    gain: int  # address of number [dim]
    eps: float
    cos: int  # address of number [num_places, half]
    sin: int
    num_places: int
    half: int
    origin: int  # position of the planes' row 0
    positions: int  # address of int64 [num_rows]
    interleaved: int


_QUERIES_WORD = words_before(PrepareJob)


@worker
def prepare_worker(record, kind):
    """Prepare rows until no task is left; a task is `ROWS_PER_TASK` rows.

    A row whose position lies outside the planes becomes NaN; one that stands before the first key does not show it,
    since it keeps nothing.

    Parameters
    ----------
    record : int
        Address of a `PrepareJob` and `Queries`.
    kind : Tag
        Arithmetic dtype.
    """
    job, queries = read_record(PrepareJob, record), read_record(Queries, record + WORD_BYTES * _QUERIES_WORD)
    number, dim, half, size = number_type(kind), queries.dim, job.half, bytes_of(kind)[1]
    x = zeros(number, 1, padded(dim))[0]
    while True:
        task = next_task(record)
        if task * ROWS_PER_TASK >= job.num_rows:
            return
        for row in range(task * ROWS_PER_TASK, min((task + 1) * ROWS_PER_TASK, job.num_rows)):
            for head in range(job.num_heads):
                source = queries.address + row * queries.stride + head * queries.head_stride
                read_row(address_of(x), source, queries.code, dim)
                if job.gain != 0:
                    square = 0.0  # in float64, which holds the square of every float32
                    for d in range(dim):
                        square += np.float64(x[d]) * np.float64(x[d])
                    factor = 1 / math.sqrt(square / dim + job.eps)
                    for d in range(dim):
                        x[d] = number(x[d] * factor * load_number(kind, job.gain + d * size))
                if half > 0:
                    place = load_int64(job.positions + 8 * row) - job.origin
                    if place < 0 or place >= job.num_places:
                        x[:] = math.nan
                    else:
                        for i in range(half):
                            first, second = (2 * i, 2 * i + 1) if job.interleaved != 0 else (i, i + half)
                            cos = load_number(kind, job.cos + (place * half + i) * size)
                            sin = load_number(kind, job.sin + (place * half + i) * size)
                            x[first], x[second] = rotate_pair(x[first], x[second], cos, sin)
                target = job.prepared + (row * job.num_heads + head) * dim * size
                for d in range(dim):
                    store_number(kind, target + d * size, x[d])

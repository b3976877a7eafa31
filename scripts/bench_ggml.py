"""ggml's flash attention on the CPU: a graph of that one operator over contiguous copies of the caches."""

from __future__ import annotations

import ctypes
import math
import weakref
from collections.abc import Callable
from importlib import import_module
from typing import Any

import numpy as np
from bench_data import Data
from bench_paged_rivals import Call, Contenders, contiguous
from bench_problems import SOFT_CAP, PagedProblem, Problem

TYPES = {"float32": "GGML_TYPE_F32", "float16": "GGML_TYPE_F16", "bfloat16": "GGML_TYPE_BF16"}
TENSORS = 8  # the most of a graph


class Pool:
    """Threads that outlive a call; where ggml is built with OpenMP, that has them."""

    def __init__(self, ggml: Any, threads: int):
        options = ggml.ggml_threadpool_params_default(threads)
        self.threads, self.handle = threads, ggml.ggml_threadpool_new(ctypes.byref(options))
        weakref.finalize(self, ggml.ggml_threadpool_free, self.handle)


class Graph:
    """A graph of one operator whose tensors lie in NumPy arrays, which it keeps alive."""

    def __init__(self, ggml: Any, pool: Pool):
        self.ggml, self.pool = ggml, pool
        size = TENSORS * ggml.ggml_tensor_overhead() + ggml.ggml_graph_overhead()
        self.context = ggml.ggml_init(ggml.ggml_init_params(mem_size=size, mem_buffer=None, no_alloc=True))
        weakref.finalize(self, ggml.ggml_free, self.context)
        self.arrays: list[np.ndarray] = []

    def tensor(self, array: np.ndarray, kind: str) -> Any:
        """Return a tensor over an array of four axes, which ggml counts from the last one."""
        x = self.ggml.ggml_new_tensor_4d(self.context, getattr(self.ggml, kind), *array.shape[::-1])
        x.contents.nb[:] = array.strides[::-1]
        return self.place(x, array)

    def place(self, x: Any, array: np.ndarray) -> Any:
        """Let a tensor lie in an array."""
        x.contents.data = array.ctypes.data
        self.arrays.append(array)
        return x

    def plan(self, x: Any) -> None:
        """Get everything ready to compute a tensor."""
        self.graph = self.ggml.ggml_new_graph(self.context)
        self.ggml.ggml_build_forward_expand(self.graph, x)
        plan = self.ggml.ggml_graph_plan(self.graph, self.pool.threads, self.pool.handle)
        workspace = np.empty(max(1, plan.work_size), np.uint8)
        self.arrays.append(workspace)
        plan.work_data = ctypes.cast(workspace.ctypes.data, type(plan.work_data))
        self.planned = ctypes.pointer(plan)

    def compute(self) -> None:
        """Compute what was planned."""
        status = self.ggml.ggml_graph_compute(self.graph, self.planned)
        if status:
            raise RuntimeError(f"ggml_graph_compute: status {status}")


def ggml_rival(problem: Problem, threads: int) -> Contenders:
    """Ggml with all requests in one operator; its queries and results are float32, its caches of the shape's dtype.

    Most of its fast paths know no bfloat16, so such caches are tried as float16 too: equal numbers, but for tiny ones.
    """
    shape = problem.shape
    if not isinstance(problem, PagedProblem) or shape.dtype not in TYPES or shape.mask:
        return
    ggml = import_module("ggml")
    pool = Pool(ggml, threads)
    q = problem.q.array.astype(np.float32).reshape(shape.batch, shape.rows, shape.heads[0], shape.head_dim)
    mask = _mask(shape)
    yield "ggml", [_call(ggml, problem, cache, shape.dtype, q, mask, pool) for cache in problem.caches]
    if shape.dtype == "bfloat16":
        yield "ggml float16", [_call(ggml, problem, cache, "float16", q, mask, pool) for cache in problem.caches]


def _mask(shape: Any) -> np.ndarray | None:
    """Return what is added to the scores, float16 [1, 1, rows, keys], or None if every row sees every key."""
    key, last = np.arange(shape.keys), np.arange(shape.keys - shape.rows, shape.keys)[:, None]
    hidden = (key > last) & shape.causal
    if shape.window_left >= 0:
        hidden |= key < last - shape.window_left
    return np.where(hidden, np.float16(-np.inf), np.float16(0))[None, None] if hidden.any() else None


def _call(
    ggml: Any, problem: PagedProblem, cache: Data, dtype: str, q: np.ndarray, mask: np.ndarray | None, pool: Pool
) -> Call:
    shape = problem.shape
    graph = Graph(ggml, pool)
    pair = contiguous(problem, cache)
    if dtype != shape.dtype:
        pair = [x.view(cache.array.dtype).astype(np.float32).astype(dtype) for x in pair]
    k, v = (graph.tensor(x, TYPES[dtype]) for x in pair)
    by_head = graph.tensor(q.swapaxes(1, 2), "GGML_TYPE_F32")
    bias = None if mask is None else graph.tensor(mask, "GGML_TYPE_F16")
    scale, cap = 1 / math.sqrt(shape.head_dim), SOFT_CAP if shape.ruled else 0.0
    x = ggml.ggml_flash_attn_ext(graph.context, by_head, k, v, bias, scale, 0.0, cap)
    if shape.ruled:
        sinks = ggml.ggml_new_tensor_1d(graph.context, ggml.GGML_TYPE_F32, shape.heads[0])
        ggml.ggml_flash_attn_ext_add_sinks(x, graph.place(sinks, problem.sinks.array))
    out = np.empty_like(q)
    graph.plan(graph.place(x, out))

    def call() -> Any:
        graph.compute()
        return out

    return call


RIVALS: dict[str, tuple[str, Callable[[Problem, int], Contenders]]] = {"ggml": ("ggml", ggml_rival)}

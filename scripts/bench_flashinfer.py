"""FlashInfer on the GPU, through its wrappers, over the memory of our own caches; every one of its paths is a rival."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any

import cupy
import numpy as np
from bench_data import Data
from bench_problems import CascadeProblem, GatherProblem, MergeProblem, PagedProblem, Problem

Call = Callable[[], Any]
Contenders = Iterator[tuple[str, list[Call]]]

WORKSPACE_BYTES = 256 << 20


def tensor(data: Data) -> Any:
    """Return a PyTorch tensor over the same memory."""
    torch = import_module("torch")
    bits = data.bits.view(f"int{8 * data.bits.dtype.itemsize}" if data.bits.dtype.itemsize > 1 else "uint8")
    return torch.from_dlpack(bits).view(getattr(torch, data.dtype))


def integers(values: np.ndarray) -> Any:
    """Return int32 metadata on the device."""
    return import_module("torch").from_numpy(np.ascontiguousarray(values, np.int32)).cuda()


def workspace() -> Any:
    """Return scratch of one wrapper's own, so that plans and captured graphs do not share it."""
    torch = import_module("torch")
    return torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device="cuda")


def capture(calls: list[Call], rounds: int) -> Call:
    """Capture with PyTorch, whose allocator has to know."""
    torch = import_module("torch")
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for call in calls:
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(rounds):
            for call in calls:
                call()
    return graph.replay


def decode_wrapper(shape: Any, table: np.ndarray, keys: int, tensor_cores: bool, page_size: int) -> Any:
    """Return a planned decode wrapper over a rectangular table of page ids."""
    flashinfer = import_module("flashinfer")
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace(), shape.layout, use_tensor_cores=tensor_cores)
    wrapper.plan(*decode_metadata(table, keys, page_size), *shape.heads, shape.head_dim, page_size, **dtypes(shape))
    return wrapper


def decode_metadata(table: np.ndarray, keys: int, page_size: int) -> tuple[Any, Any, Any]:
    """Return (indptr, indices, last_page_len) of a table [batch, pages], on the device."""
    batch, pages = table.shape
    last = np.full(batch, (keys - 1) % page_size + 1)
    return integers(np.arange(batch + 1) * pages), integers(table.ravel()), integers(last)


def dtypes(shape: Any) -> dict[str, Any]:
    """Return a plan's dtypes."""
    torch = import_module("torch")
    return {"q_data_type": getattr(torch, shape.q_dtype), "kv_data_type": getattr(torch, shape.dtype)}


def rival(problem: Problem, threads: int) -> Contenders:
    """Every path of FlashInfer for the problem."""
    del threads
    if isinstance(problem, MergeProblem):
        if not problem.shape.in_place:  # it would overwrite what is compared
            yield from _merge(problem)
    elif isinstance(problem, CascadeProblem):
        yield from _cascade(problem)
    elif isinstance(problem, GatherProblem):
        yield from _gather(problem)
    elif isinstance(problem, PagedProblem) and problem.shape.plain:
        yield from (_decode if problem.shape.rows == 1 else _prefill)(problem)


def _decode(problem: PagedProblem) -> Contenders:
    shape = problem.shape
    q, caches = tensor(problem.q), [tensor(cache) for cache in problem.caches]
    for label, tensor_cores in (("flashinfer cuda cores", False), ("flashinfer tensor cores", True)):
        try:
            wrapper = decode_wrapper(shape, problem.table, shape.keys, tensor_cores, shape.page_size)
        except Exception as error:  # not every group size has a kernel on CUDA cores
            yield label, [_raise(error)]
            continue
        out = q.new_empty(q.shape)
        yield label, [lambda c=c, w=wrapper, o=out: w.run(q, c, out=o) for c in caches]


def _raise(error: Exception) -> Call:
    def call() -> None:
        raise error

    return call


def _prefill(problem: PagedProblem) -> Contenders:
    flashinfer = import_module("flashinfer")
    shape = problem.shape
    q, caches = tensor(problem.q), [tensor(cache) for cache in problem.caches]
    metadata = decode_metadata(problem.table, shape.keys, shape.page_size)
    for backend in ("fa2", "fa3"):
        label = f"flashinfer {backend}"
        try:
            wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace(), shape.layout, backend=backend)
            wrapper.plan(
                integers(problem.qo_indptr), *metadata, *shape.heads, shape.head_dim, shape.page_size,
                causal=shape.causal, **dtypes(shape),
            )  # fmt: skip
        except Exception as error:  # FA3 is for Hopper alone
            yield label, [_raise(error)]
            continue
        out = q.new_empty(q.shape)
        yield label, [lambda c=c, w=wrapper, o=out: w.run(q, c, out=o) for c in caches]


def cascade_wrapper(problem: CascadeProblem, backend: str) -> Any:
    """Return a planned cascade wrapper; `backend` "auto" is what its users get, "fa2" is forced on every level."""
    module = import_module("flashinfer.cascade")
    shape, base = problem.shape, module.BatchPrefillWithPagedKVCacheWrapper

    class Forced(base):
        def __init__(self, *args: Any, **kwargs: Any):
            super().__init__(*args, **{**kwargs, "backend": backend})

    module.BatchPrefillWithPagedKVCacheWrapper = base if backend == "auto" else Forced
    try:
        wrapper = module.MultiLevelCascadeAttentionWrapper(2, workspace(), shape.layout)
    finally:
        module.BatchPrefillWithPagedKVCacheWrapper = base
    lists = [[integers(x) for x in arrays] for arrays in problem.tables().values()]
    wrapper.plan(*lists, *shape.heads, shape.head_dim, shape.page_size, **dtypes(shape))
    return wrapper


def _cascade(problem: CascadeProblem) -> Contenders:
    shape = problem.shape
    q, caches = tensor(problem.q), [tensor(cache) for cache in problem.caches]
    for label, backend in (("flashinfer cascade", "auto"), ("flashinfer cascade fa2", "fa2")):
        wrapper = cascade_wrapper(problem, backend)
        yield label, [lambda c=c, w=wrapper: w.run(q, c) for c in caches]
    keys, table = shape.prefix + shape.suffix, problem.flat_table()
    flat = decode_wrapper(shape, table, keys, shape.heads[0] != shape.heads[1], shape.page_size)
    out = q.new_empty(q.shape)
    yield "flashinfer flat", [lambda c=c: flat.run(q, c, out=out) for c in caches]


def _gather(problem: GatherProblem) -> Contenders:
    """Decode over pages of one token; a cache of larger pages is repacked for it outside the timing."""
    shape, tokens = problem.shape, problem.tokens.astype(np.int32)
    q, caches = tensor(problem.q), []
    for cache in problem.caches:
        bits = cupy.ascontiguousarray(cache.bits.swapaxes(1, 2))  # [pages, page_size, 2, heads, dim]
        one = Data(cupy, bits.reshape(-1, 2, 1, *bits.shape[3:]), shape.dtype)
        caches.append(tensor(one))
    for label, tensor_cores in (("flashinfer page 1 cuda cores", False), ("flashinfer page 1 tensor cores", True)):
        try:
            wrapper = decode_wrapper(shape, tokens, shape.width, tensor_cores, 1)
        except Exception as error:  # as for decode
            yield label, [_raise(error)]
            continue
        out = q.new_empty(q.shape)
        yield label, [lambda c=c, w=wrapper, o=out: w.run(q, c, out=o) for c in caches]


def _merge(problem: MergeProblem) -> Contenders:
    flashinfer = import_module("flashinfer")
    s = [tensor(x) for x in problem.sums]
    values = [[tensor(x) for x in xs] for xs in problem.values]
    if problem.shape.pair:
        yield "flashinfer", [lambda a=a, b=b: flashinfer.merge_state(a, s[0], b, s[1]) for a, b in values]
    else:
        yield "flashinfer", [lambda v=v: flashinfer.merge_states(v, s[0]) for (v,) in values]


RIVALS = {"flashinfer": ("flashinfer", rival)}

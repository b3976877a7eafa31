"""OpenVINO's paged attention on the CPU: a model of that one operator, fed with tensors over the caches' own memory.

The operator is experimental there, so its list of inputs may change from version to version: it is 2026.4's.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from importlib import import_module
from typing import Any

import numpy as np
from bench_data import Data
from bench_paged_rivals import Call, Contenders, contiguous
from bench_problems import PagedProblem, Problem

PAGE = 32  # the only one that its CPU kernel takes
TYPES = {  # dtype: (its name there, that of the CPU's ability to compute with it)
    "float32": ("f32", "FP32"), "float16": ("f16", "FP16"), "bfloat16": ("bf16", "BF16"),
}  # fmt: skip
NUMBERS = {"query": 2, "key": 2, "value": 2, "key_cache": 4, "value_cache": 4}  # inputs of the shape's dtype: rank
INDICES = ("past_lens", "subsequence_begins", "block_indices", "block_indices_begins")


def openvino_rival(problem: Problem, threads: int) -> Contenders:
    """OpenVINO over shuffled pages of its own size; the newest tokens are appended by the call itself."""
    shape = problem.shape
    if not isinstance(problem, PagedProblem) or shape.dtype not in TYPES or not shape.plain:
        return  # it knows no soft cap
    if shape.rows > 1 and not shape.causal:
        return
    ov = import_module("openvino")
    core, kind = ov.Core(), getattr(ov.Type, TYPES[shape.dtype][0])
    native = TYPES[shape.dtype][1] in core.get_property("CPU", "OPTIMIZATION_CAPABILITIES")
    settings = {
        "INFERENCE_PRECISION_HINT": kind if native else ov.Type.f32, "KV_CACHE_PRECISION": kind,
        "INFERENCE_NUM_THREADS": threads, "NUM_STREAMS": 1, "ENABLE_CPU_PINNING": False,  # nobody else's are pinned
    }  # fmt: skip
    compiled = core.compile_model(_model(ov, shape, kind), "CPU", settings)
    rng = np.random.default_rng(6)
    pages = -(-shape.keys // PAGE)
    table = rng.permutation(shape.batch * pages).reshape(shape.batch, pages).astype(np.int32)
    yield "openvino", [_bound(ov, compiled, kind, problem, cache, table) for cache in problem.caches]


def _model(ov: Any, shape: Any, kind: Any) -> Any:
    """Return the model: what tensors are bound to are its parameters, all else is constant and mostly turned off."""
    ops, make = import_module("openvino.op"), import_module("openvino.opset16").constant
    heads, kv_heads = shape.heads
    parameters = [ops.Parameter(kind, ov.PartialShape([-1] * rank)) for rank in NUMBERS.values()]
    for parameter, count in zip(parameters, (heads, kv_heads, kv_heads), strict=False):
        parameter.set_partial_shape(ov.PartialShape([-1, count * shape.head_dim]))
    parameters += [ops.Parameter(ov.Type.i32, ov.PartialShape([-1])) for _ in INDICES]
    for parameter, name in zip(parameters, (*NUMBERS, *INDICES), strict=True):
        parameter.output(0).set_names({name})
    floats, ints = np.zeros(0, np.float32), np.zeros(0, np.int32)
    rest = [
        np.float32(1 / math.sqrt(shape.head_dim)), np.int32(0), floats,  # scale, sliding window, ALiBi's slopes
        np.int32(shape.keys), ints,  # longest context, window over which scores are summed
        ints, ints, floats,  # rotation of cached keys: pages, angles, table
        floats, np.int32(64), np.int32(8),  # sparse prefill: threshold, its block, its stride
        floats,  # sinks
        np.int32(0), ints, ints, ints,  # eviction by diversity
        ints, np.zeros(0, np.uint8), ints,  # token types, bias between queries
    ]  # fmt: skip
    inputs = [node.output(0) for node in (*parameters, *map(make, rest))]
    attention = ops._PagedAttentionExtension(inputs)
    sizes = {"k_head_size": shape.head_dim, "v_head_size": shape.head_dim}
    for name, value in {"num_k_heads": kv_heads, "num_v_heads": kv_heads, **sizes}.items():
        attention.get_rt_info()[name] = value
    return ov.Model([attention.output(0)], parameters, "paged_attention")


def _bound(ov: Any, compiled: Any, kind: Any, problem: PagedProblem, cache: Data, table: np.ndarray) -> Call:
    """Return a call of a request whose tensors are bound."""
    shape = problem.shape
    batch, pages = table.shape
    k, v = contiguous(problem, cache)
    each = np.arange(batch + 1, dtype=np.int32)
    arrays = {
        "query": problem.q.bits.reshape(batch * shape.rows, -1),
        "key": _newest(shape, k), "value": _newest(shape, v),
        "key_cache": _pages(k, table), "value_cache": _pages(v, table),
        "past_lens": np.full(batch, shape.keys - shape.rows, np.int32), "subsequence_begins": each * shape.rows,
        "block_indices": table.ravel(), "block_indices_begins": each * pages,
    }  # fmt: skip
    request = compiled.create_infer_request()
    for name, array in arrays.items():
        request.set_tensor(name, ov.Tensor(array, list(array.shape), kind if name in NUMBERS else ov.Type.i32))
    out = Data(np, np.empty_like(arrays["query"]), shape.dtype)
    request.set_output_tensor(0, ov.Tensor(out.bits, list(out.bits.shape), kind))

    def call(held: Any = arrays) -> Any:  # the tensors do not own the arrays' memory
        request.infer(share_outputs=True)
        return out.array

    return call


def _newest(shape: Any, x: np.ndarray) -> np.ndarray:
    """Return the tokens of the query's rows, [batch * rows, num_kv_heads * head_dim]."""
    return np.ascontiguousarray(x[:, :, -shape.rows :].swapaxes(1, 2)).reshape(shape.batch * shape.rows, -1)


def _pages(x: np.ndarray, table: np.ndarray) -> np.ndarray:
    """Return [batch, num_kv_heads, keys, head_dim] as pages [pages, num_kv_heads, PAGE, head_dim]."""
    out = np.zeros((table.size, x.shape[1], PAGE, x.shape[3]), x.dtype)
    for i in range(table.shape[1]):
        part = x[:, :, i * PAGE : (i + 1) * PAGE]
        out[table[:, i], :, : part.shape[2]] = part
    return out


RIVALS: dict[str, tuple[str, Callable[[Problem, int], Contenders]]] = {"openvino": ("openvino", openvino_rival)}

"""Rivals on the CPU with KV caches of their own form: vLLM's CPU kernel, ONNX Runtime's GroupQueryAttention."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from bench_data import Data
from bench_problems import SOFT_CAP, PagedProblem, Problem

Call = Callable[[], Any]
Contenders = Iterator[tuple[str, list[Call]]]

VLLM_PAGE = 32  # a multiple of 32 is what its wide kernel needs


def contiguous(problem: PagedProblem, cache: Data) -> tuple[np.ndarray, np.ndarray]:
    """Return K and V as bits [batch, num_kv_heads, keys, head_dim], tokens of a head one after another."""
    pages = cache.bits[problem.table]  # [batch, pages, 2, page_size, heads, dim], or HND
    axes = (2, 0, 4, 1, 3, 5) if problem.shape.layout == "NHD" else (2, 0, 3, 1, 4, 5)
    pages = pages.transpose(axes)
    tokens = pages.reshape(*pages.shape[:3], -1, pages.shape[-1])[..., : problem.shape.keys, :]
    k, v = np.ascontiguousarray(tokens)
    return k, v


def to_torch(torch: Any, bits: np.ndarray, dtype: str) -> Any:
    """Return a tensor over the same memory."""
    signed = torch.from_numpy(bits.view(f"int{8 * bits.dtype.itemsize}"))
    return signed.view(getattr(torch, dtype))


def vllm_rival(problem: Problem, threads: int) -> Contenders:
    """VLLM's CPU attention over shuffled pages of its own packing; its plan is made outside the timing, as ours is."""
    shape = problem.shape
    if not isinstance(problem, PagedProblem) or shape.itemsize == 1 or shape.mask:
        return
    torch = import_module("torch")
    torch.set_num_threads(threads)
    _load_vllm(torch)
    isa = "vec" if shape.head_dim % 32 == 0 else "vec16"
    rng = np.random.default_rng(5)
    pages = -(-shape.keys // VLLM_PAGE)
    table = rng.permutation(shape.batch * pages).reshape(shape.batch, pages).astype(np.int32)
    caches = [_vllm_cache(torch, problem, cache, table, isa) for cache in problem.caches]
    q = to_torch(torch, problem.q.bits, shape.dtype)
    out = torch.empty_like(q)
    rows = torch.from_numpy(problem.qo_indptr)
    lens = torch.full((shape.batch,), shape.keys, dtype=torch.int32)
    causal = shape.causal
    cap, sinks, window = 0.0, None, -1
    if shape.ruled:
        window = shape.window_left + 1  # counts the row's own key
        cap, sinks = SOFT_CAP, to_torch(torch, problem.sinks.bits, "float32")
    plan = torch.ops._C.get_scheduler_metadata(
        shape.batch, *shape.heads, shape.head_dim, lens, q.dtype, rows, causal, window, isa, True, None
    )
    ids, scale = torch.from_numpy(table), 1 / math.sqrt(shape.head_dim)

    def call(k: Any, v: Any) -> Any:
        torch.ops._C.cpu_attention_with_kv_cache(
            q, k, v, out, rows, lens, scale, causal, None, window, ids, cap, plan, sinks, None
        )
        return out

    yield "vllm", [lambda k=k, v=v: call(k, v) for k, v in caches]


def _load_vllm(torch: Any) -> None:
    """Load the extension alone: the Python package around it wants a whole serving stack."""
    if hasattr(torch.ops._C, "cpu_attention_with_kv_cache"):
        return
    folder = Path(next(iter(find_spec("vllm").submodule_search_locations)))
    name = "_C_AVX512.abi3.so" if torch.cpu._is_avx512_supported() else "_C_AVX2.abi3.so"
    torch.ops.load_library(str(folder / (name if (folder / name).is_file() else "_C.abi3.so")))


def _vllm_cache(torch: Any, problem: PagedProblem, cache: Data, table: np.ndarray, isa: str) -> tuple[Any, Any]:
    shape = problem.shape
    kv_heads, dim = shape.heads[1], shape.head_dim
    pool = torch.zeros(table.size, kv_heads, 2 * VLLM_PAGE, dim, dtype=getattr(torch, shape.dtype))
    k_pages, v_pages = pool.chunk(2, dim=2)
    token = np.arange(shape.keys)
    slots = table[:, token // VLLM_PAGE].astype(np.int64) * VLLM_PAGE + token % VLLM_PAGE
    k, v = (
        to_torch(torch, np.ascontiguousarray(x.swapaxes(1, 2)).reshape(-1, kv_heads, dim), shape.dtype)
        for x in contiguous(problem, cache)
    )
    torch.ops._C.cpu_attn_reshape_and_cache(k, v, k_pages, v_pages, torch.from_numpy(slots.ravel()), isa)
    return k_pages, v_pages


def onnxruntime_rival(problem: Problem, threads: int) -> Contenders:
    """ONNX Runtime's GroupQueryAttention on bound buffers; the newest token is appended by the call itself."""
    shape = problem.shape
    if not isinstance(problem, PagedProblem) or shape.op != "decode" or shape.dtype not in ("float32", "float16"):
        return
    if not shape.plain:
        return
    runtime = import_module("onnxruntime")
    options = runtime.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    session = runtime.InferenceSession(_gqa_model(shape), options, providers=["CPUExecutionProvider"])
    yield "onnxruntime", [_bound_gqa(runtime, session, problem, cache) for cache in problem.caches]


def _gqa_model(shape: Any) -> bytes:
    """Return a model of one node; `past` and `present` are the same buffers of all keys."""
    onnx = import_module("onnx")
    make, batch, (heads, kv_heads), dim = onnx.helper, shape.batch, shape.heads, shape.head_dim
    kind = {"float32": onnx.TensorProto.FLOAT, "float16": onnx.TensorProto.FLOAT16}[shape.dtype]
    cache = [batch, kv_heads, shape.keys, dim]

    def value(name: str, size: list[int], number: int = kind) -> Any:
        return make.make_tensor_value_info(name, number, size)

    int32 = onnx.TensorProto.INT32
    inputs = [
        value("q", [batch, 1, heads * dim]), value("k", [batch, 1, kv_heads * dim]),
        value("v", [batch, 1, kv_heads * dim]), value("past_k", cache), value("past_v", cache),
        value("lens", [batch], int32), value("total", [1], int32),
    ]  # fmt: skip
    outputs = [value("out", [batch, 1, heads * dim]), value("present_k", cache), value("present_v", cache)]
    node = make.make_node(
        "GroupQueryAttention", [x.name for x in inputs], [x.name for x in outputs], domain="com.microsoft",
        num_heads=heads, kv_num_heads=kv_heads,
    )  # fmt: skip
    opsets = [make.make_opsetid("", 17), make.make_opsetid("com.microsoft", 1)]
    model = make.make_model(make.make_graph([node], "gqa", inputs, outputs), opset_imports=opsets)
    model.ir_version = 9
    return model.SerializeToString()


def _bound_gqa(runtime: Any, session: Any, problem: PagedProblem, cache: Data) -> Call:
    shape = problem.shape
    dtype = problem.q.array.dtype
    k, v = (x.view(dtype) for x in contiguous(problem, cache))
    newest = [np.ascontiguousarray(x[:, :, -1]).reshape(shape.batch, 1, -1) for x in (k, v)]
    out = np.empty((shape.batch, 1, shape.heads[0] * shape.head_dim), dtype)
    arrays = {
        "q": problem.q.array.reshape(out.shape), "k": newest[0], "v": newest[1], "past_k": k, "past_v": v,
        "lens": np.full(shape.batch, shape.keys - 1, np.int32), "total": np.array([shape.keys], np.int32),
        "out": out,
    }  # fmt: skip
    values = {name: runtime.OrtValue.ortvalue_from_numpy(x) for name, x in arrays.items()}
    binding = session.io_binding()
    for name in ("q", "k", "v", "past_k", "past_v", "lens", "total"):
        binding.bind_ortvalue_input(name, values[name])
    for name, held in (("out", "out"), ("present_k", "past_k"), ("present_v", "past_v")):
        binding.bind_ortvalue_output(name, values[held])

    def call() -> Any:
        session.run_with_iobinding(binding)
        return values["out"].numpy()

    return call


RIVALS: dict[str, tuple[str, Callable[[Problem, int], Contenders]]] = {
    "vllm": ("vllm", vllm_rival),
    "onnxruntime": ("onnxruntime", onnxruntime_rival),
}

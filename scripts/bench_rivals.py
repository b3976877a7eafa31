"""Rivals on the CPU. Those that know no pages get contiguous copies of the same caches, made outside the timing.

A rival is a generator of (name, calls on each cache); what is not installed, or cannot run a shape, yields nothing.
Every call returns its result, which is compared with ours before it is timed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import bench_ggml
import bench_openvino
import bench_paged_rivals
import numpy as np
from bench_paged_rivals import contiguous, to_torch
from bench_problems import GatherProblem, MergeProblem, PagedProblem, Problem

Call = Callable[[], Any]
Contenders = Iterator[tuple[str, list[Call]]]


def grouped_query(problem: PagedProblem, q: Any) -> Any:
    """Return q [rows, num_qo_heads, dim] as [batch, num_kv_heads, group * rows of a request, dim]."""
    shape = problem.shape
    heads, kv_heads = shape.heads
    x = q.reshape(shape.batch, shape.rows, kv_heads, heads // kv_heads, shape.head_dim)
    return x.swapaxes(1, 2).swapaxes(2, 3).reshape(shape.batch, kv_heads, -1, shape.head_dim)


def ungrouped(problem: PagedProblem, out: Any) -> Any:
    """Undo `grouped_query` for a result."""
    shape = problem.shape
    x = out.reshape(shape.batch, shape.heads[1], -1, shape.rows, shape.head_dim).swapaxes(2, 3).swapaxes(1, 2)
    return x.reshape(shape.batch * shape.rows, shape.heads[0], shape.head_dim)


def visible(problem: PagedProblem) -> np.ndarray | None:
    """Return which keys each row of a request sees, bool [rows, keys], or None for all."""
    shape = problem.shape
    if shape.rows == 1 or not shape.causal:
        return None
    return np.arange(shape.keys) <= np.arange(shape.keys - shape.rows, shape.keys)[:, None]


def numpy_rival(problem: Problem, threads: int) -> Contenders:
    """NumPy as one would write it; 16-bit numbers are widened first, since BLAS knows none."""
    del threads  # its BLAS reads OPENBLAS_NUM_THREADS when it is loaded
    if isinstance(problem, MergeProblem):
        if problem.shape.pair and not problem.shape.in_place:  # it would overwrite what is compared
            yield "numpy", [lambda a=a, b=b: _numpy_merge(a.array, b.array, *sums(problem)) for a, b in problem.values]
        return
    if not isinstance(problem, PagedProblem) or problem.shape.itemsize == 1 or not problem.shape.plain:
        return
    dtype = problem.q.array.dtype
    mask = visible(problem)
    group = problem.shape.heads[0] // problem.shape.heads[1]
    bias = None if mask is None else np.where(np.tile(mask, (group, 1)), np.float32(0), np.float32(-np.inf))
    q = grouped_query(problem, problem.q.array).astype(np.float32) / math.sqrt(problem.shape.head_dim)

    def call(k: np.ndarray, v: np.ndarray) -> np.ndarray:
        s = q @ k.astype(np.float32, copy=False).swapaxes(2, 3)
        if bias is not None:
            s += bias
        s -= s.max(axis=-1, keepdims=True)
        np.exp(s, out=s)
        s /= s.sum(axis=-1, keepdims=True)
        return ungrouped(problem, (s @ v.astype(np.float32, copy=False)).astype(dtype))

    caches = [[x.view(dtype) for x in contiguous(problem, cache)] for cache in problem.caches]
    yield "numpy", [lambda k=k, v=v: call(k, v) for k, v in caches]


def sums(problem: MergeProblem) -> list[np.ndarray]:
    """Return the log-sum-exps of a merge."""
    return [s.array for s in problem.sums]


def _numpy_merge(v_a: np.ndarray, v_b: np.ndarray, s_a: np.ndarray, s_b: np.ndarray) -> np.ndarray:
    s = np.logaddexp2(s_a, s_b)
    a, b = np.exp2(s_a - s)[..., None], np.exp2(s_b - s)[..., None]
    return (v_a * a + v_b * b).astype(v_a.dtype)


def torch_rival(problem: Problem, threads: int) -> Contenders:
    """PyTorch: scaled_dot_product_attention, matmul and softmax, flex_attention; to gather, index and matmul."""
    torch = import_module("torch")
    torch.set_num_threads(threads)
    if isinstance(problem, GatherProblem):
        yield "torch index + matmul", _torch_gather(torch, problem)
        return
    if not isinstance(problem, PagedProblem) or problem.shape.itemsize == 1 or not problem.shape.plain:
        return
    shape = problem.shape
    caches = [[to_torch(torch, x, shape.dtype) for x in contiguous(problem, c)] for c in problem.caches]
    q = to_torch(torch, problem.q.bits, shape.dtype)
    by_head = q.reshape(shape.batch, shape.rows, *q.shape[1:]).transpose(1, 2)  # [batch, heads, rows, dim]
    mask = visible(problem)
    keep = None if mask is None else torch.from_numpy(mask)
    attention = torch.nn.functional.scaled_dot_product_attention

    def sdpa(k: Any, v: Any) -> Any:
        out = attention(by_head, k, v, attn_mask=keep, enable_gqa=True)
        return out.transpose(1, 2).reshape(q.shape)

    yield "torch sdpa", [lambda k=k, v=v: sdpa(k, v) for k, v in caches]
    grouped = grouped_query(problem, q) / math.sqrt(shape.head_dim)
    hidden = None if keep is None else ~keep.repeat(shape.heads[0] // shape.heads[1], 1)

    def matmul(k: Any, v: Any) -> Any:
        s = grouped @ k.transpose(2, 3)
        s = s if hidden is None else s.masked_fill_(hidden, -math.inf)
        return ungrouped(problem, torch.softmax(s, dim=-1) @ v)

    yield "torch matmul", [lambda k=k, v=v: matmul(k, v) for k, v in caches]
    yield "torch flex", _torch_flex(torch, problem, by_head, caches)


def _torch_gather(torch: Any, problem: GatherProblem) -> list[Call]:
    shape = problem.shape
    tokens = torch.from_numpy(problem.tokens)
    q = to_torch(torch, problem.q.bits, shape.dtype) / math.sqrt(shape.head_dim)
    q = q.reshape(shape.rows, shape.heads[1], -1, shape.head_dim)  # [rows, kv_heads, group, dim]
    page, slot = tokens // shape.page_size, tokens % shape.page_size

    def call(cache: Any) -> Any:
        k, v = (cache[page, x, slot].transpose(1, 2) for x in (0, 1))  # [rows, kv_heads, width, dim]
        out = torch.softmax(q @ k.transpose(2, 3), dim=-1) @ v
        return out.reshape(shape.rows, shape.heads[0], shape.head_dim)

    return [lambda c=c: call(c) for c in (to_torch(torch, x.bits, shape.dtype) for x in problem.caches)]


def _torch_flex(torch: Any, problem: PagedProblem, q: Any, caches: list) -> list[Call]:
    flex = import_module("torch.nn.attention.flex_attention")
    shape = problem.shape
    torch._dynamo.reset()  # it gives up on a function after a few shapes
    compiled = torch.compile(flex.flex_attention, dynamic=False)
    offset = shape.keys - shape.rows
    block_mask = None
    if visible(problem) is not None:
        block_mask = flex.create_block_mask(
            lambda b, h, row, key: key <= row + offset, None, None, shape.rows, shape.keys, device="cpu"
        )
    with torch.no_grad():
        q = q.contiguous()

    def call(k: Any, v: Any) -> Any:
        with torch.no_grad():
            out = compiled(q, k, v, block_mask=block_mask, enable_gqa=True)
        return out.transpose(1, 2).reshape(-1, shape.heads[0], shape.head_dim)

    return [lambda k=k, v=v: call(k, v) for k, v in caches]


Registry = dict[str, tuple[str, Callable[[Problem, int], Contenders]]]

RIVALS: Registry = {  # name: (what it imports, how it is called)
    "numpy": ("numpy", numpy_rival),
    "torch": ("torch", torch_rival),
    **bench_paged_rivals.RIVALS,
    **bench_openvino.RIVALS,
    **bench_ggml.RIVALS,
}


def contenders(
    problem: Problem, threads: int, names: list[str], ours: np.ndarray, registry: Registry
) -> tuple[dict[str, list[Call]], dict[str, str]]:
    """Return the calls of the rivals that agree with our result, and why the others are left out."""
    found: dict[str, list[Call]] = {}
    skipped: dict[str, str] = {}
    for name in names:
        module, rival = registry[name]
        if find_spec(module) is None:
            skipped[name] = "not installed"
            continue
        generator = rival(problem, threads)
        while True:
            label = name
            try:
                label, calls = next(generator)
                wrong = disagreement(calls[0](), ours)
            except StopIteration:
                break
            except Exception as error:  # a rival that cannot run a shape must not end the benchmark
                skipped[label] = f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"
                continue
            if wrong:
                skipped[label] = wrong
            else:
                found[label] = calls
    return found, skipped


def disagreement(result: Any, ours: np.ndarray) -> str:
    """Return how a rival's result differs from ours, or "" if it is the same to a few 8-bit roundings."""
    result = result[0] if isinstance(result, tuple) else result
    if hasattr(result, "float"):
        result = result.float().cpu().numpy()
    error = np.abs(np.asarray(result).astype(np.float64).reshape(ours.shape) - ours).max()
    allowed = 0.04 * np.abs(ours).max()
    return "" if error <= allowed else f"wrong result: differs by {error:.3g}, at most {allowed:.3g} allowed"

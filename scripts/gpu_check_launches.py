"""What only a device can do wrong: far offsets, captured graphs, streams that run at once, repeats with other bits."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from gpu_check_cases import Outcome, compared

import nbattn
from nbattn import oracle, testing

ROOT = Path(__file__).resolve().parent.parent
CASCADE_OPTIONS: list[dict[str, Any]] = [
    {},
    {"causal": True, "window_left": 5},
    {"causal": True, "pos_encoding_mode": "ALIBI", "logits_soft_cap": 3.0},
    {"causal": True, "pos_encoding_mode": "ROPE_LLAMA"},
]


def on_device(cupy: Any, dtype: Any, *shape: int, seed: int = 0) -> tuple[np.ndarray, Any]:
    """Return random normal numbers on the host and on the device."""
    host = np.random.default_rng(seed).standard_normal(shape).astype(np.float32).astype(dtype)
    return host, cupy.asarray(host)


def large_offsets(_: argparse.Namespace) -> Iterator[Outcome]:
    """Read pages beyond element 2**31; only the touched ones are written."""
    import cupy

    pages, page_size, heads, dim = 140_000, 16, 8, 128  # 2.3e9 elements of K
    k = cupy.empty((pages, page_size, heads, dim), cupy.float16)
    ids = np.array([[pages - 1, 3, pages - 2]], np.int32)
    lens = np.array([41], np.int32)
    small_k, _ = on_device(cupy, np.float16, 3, page_size, heads, dim)
    for i, page in enumerate(ids[0]):
        k[int(page)] = cupy.asarray(small_k[i])
    q, q_device = on_device(cupy, np.float16, 1, 32, dim, seed=1)
    kv = nbattn.PagedKV.from_block_table(k, k, ids, lens)
    small = nbattn.PagedKV.from_block_table(small_k, small_k, np.arange(3, dtype=np.int32)[None], lens)
    tokens = np.arange(41, dtype=np.int32)[None]
    calls: dict[str, tuple[Callable[[], Any], Callable[..., Any], tuple]] = {
        "decode": (lambda: nbattn.paged_attention(q_device, kv, return_lse=True), oracle.paged_attention, (q, small)),
        "gather": (
            lambda: nbattn.gather_attention(
                q_device, kv, cupy.asarray(tokens), cupy.asarray(np.array([41], np.int32)), return_lse=True
            ),
            oracle.gather_attention,
            (q, small, tokens, np.array([41], np.int32)),
        ),
    }
    for name, (run, define, arguments) in calls.items():
        expected = testing.expect(define, *arguments)
        yield compared(f"page id x page stride > 2^31, {name}", run(), expected)


def _decode_problem(lens: list[int], seed: int = 0) -> tuple[Any, ...]:
    import cupy

    k, k_device = on_device(cupy, np.float16, 200, 16, 2, 64, seed=seed)
    q, q_device = on_device(cupy, np.float16, len(lens), 8, 64, seed=seed + 1)
    table = np.random.default_rng(seed).integers(0, 200, (len(lens), 40)).astype(np.int32)
    lengths = np.array(lens, np.int32)
    host = nbattn.PagedKV.from_block_table(k, k, table, lengths)
    device = nbattn.PagedKV.from_block_table(k_device, k_device, cupy.asarray(table), lengths)
    return q, host, q_device, device


def graphs(_: argparse.Namespace) -> Iterator[Outcome]:
    """Plan, capture, update the plan with longer lengths, replay (case P14)."""
    import cupy

    q, host, q_device, device = _decode_problem([100, 7, 300])
    _, longer_host, _, longer_device = _decode_problem([101, 8, 600])
    plan = nbattn.plan(device, num_qo_heads=8, max_kv_len=640)
    out = cupy.empty(q_device.shape, q_device.dtype)
    lse = cupy.empty(q_device.shape[:2], np.float32)
    nbattn.paged_attention(q_device, device, plan=plan, out=out, lse=lse)
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        stream.begin_capture()
        nbattn.paged_attention(q_device, device, plan=plan, out=out, lse=lse)
        graph = stream.end_capture()
        for name, define in (("as captured", host), ("after Plan.update", longer_host)):
            if define is longer_host:
                plan.update(longer_device)
            out.fill(np.nan)
            graph.launch(stream)
            stream.synchronize()
            yield compared(f"graph replay {name}", (out, lse), testing.expect(oracle.paged_attention, q, define))
    yield from _gather_graph()
    for options in CASCADE_OPTIONS:
        yield from _cascade_graph(options)


def _cascade_graph(options: dict[str, Any]) -> Iterator[Outcome]:
    """Capture a cascade wrapper's run, plan it for other tables, replay."""
    import cupy

    sys.path.insert(0, str(ROOT / "tests" / "cascade"))
    from level_setup import Setup

    rows = (0, 2, 3, 7)
    steps = [((13,), (9, 1, 4)), ((9,), (4, 8, 17)), ((40,), (90, 0, 33)), ((210,), (180, 5, 40))]
    built = [
        Setup((((0, 7), shared), (rows, own)), dtype="float16", seed=seed).build()
        for seed, (shared, own) in enumerate(steps)
    ]
    room = [[cupy.zeros(64, np.int32) for _ in range(2)] for _ in range(4)]
    wrapper = nbattn.MultiLevelCascadeAttentionWrapper(2, None, "NHD", True, *room)
    sizes = {"num_qo_heads": 6, "num_kv_heads": 2, "head_dim": 16, "page_size": 4}
    pages = cupy.zeros((max(len(cache) for _, cache, _ in built), *built[0][1].shape[1:]), np.float16)
    q_device = cupy.zeros(built[0][0].shape, np.float16)
    out, lse = cupy.empty_like(q_device), cupy.empty(q_device.shape[:2], np.float32)
    stream, graph = cupy.cuda.Stream(non_blocking=True), None
    for step, (q, cache, lists) in enumerate(built):
        wrapper.plan(*lists, **sizes, **options)
        pages[: len(cache)].set(cache)
        q_device.set(q)
        out.fill(np.nan)
        cupy.cuda.get_current_stream().synchronize()
        if graph is None:
            wrapper.run(q_device, pages, out=out, lse=lse)
            cupy.cuda.get_current_stream().synchronize()
            with stream:
                stream.begin_capture()
                wrapper.run(q_device, pages, out=out, lse=lse)
                graph = stream.end_capture()
        graph.launch(stream)
        stream.synchronize()
        expected = testing.expect(oracle.multi_level_cascade, q, cache, *lists, **options)
        yield compared(f"cascade wrapper {options}, replay {step}", (out, lse), expected)


def _gather_graph() -> Iterator[Outcome]:
    """Run a gather once, capture it, replay it with other lists in the same array."""
    import cupy

    q, host, q_device, device = _decode_problem([100, 7, 600])
    rng = np.random.default_rng(2)
    counts = np.array([700, 0, 650], np.int32)
    counts_device, lists_device = cupy.asarray(counts), cupy.empty((3, 700), np.int32)
    out, lse = cupy.empty(q_device.shape, q_device.dtype), cupy.empty(q_device.shape[:2], np.float32)
    for k_scale in (None, np.array([[0.5], [2.0]], np.float32)):
        scale = None if k_scale is None else cupy.asarray(k_scale)

        def call(scale: Any = scale) -> None:
            nbattn.gather_attention(q_device, device, lists_device, counts_device, k_scale=scale, out=out, lse=lse)

        lists_device.fill(0)
        call()
        stream = cupy.cuda.Stream(non_blocking=True)
        cupy.cuda.get_current_stream().synchronize()
        with stream:
            stream.begin_capture()
            call()
            graph = stream.end_capture()
            others = [cupy.full((1 << n,), np.nan, np.float32) for n in range(8, 20)]  # would take freed scratch
            for turn in range(2):
                lists = rng.integers(-1, 620, (3, 700)).astype(np.int32)
                lists_device.set(lists)
                out.fill(np.nan)
                graph.launch(stream)
                stream.synchronize()
                expected = testing.expect(oracle.gather_attention, q, host, lists, counts, k_scale=k_scale)
                yield compared(f"gather, replay {turn}, k_scale {k_scale}", (out, lse), expected)
            intact = all(bool(cupy.isnan(x).all()) for x in others)
            yield {"name": "memory beside a graph's", "passed": intact, "share": 0.0, "detail": ""}


def streams(_: argparse.Namespace) -> Iterator[Outcome]:
    """Run on two streams at once, and with lengths that a kernel launched just before writes (case P15)."""
    import cupy

    problems = [_decode_problem([500, 3, 77, 0], seed=5), _decode_problem([64, 600], seed=9)]
    expected = [testing.expect(oracle.paged_attention, q, host) for q, host, _, _ in problems]
    lanes = [cupy.cuda.Stream(non_blocking=True) for _ in problems]
    results: list[list[Any]] = [[], []]
    cupy.cuda.get_current_stream().synchronize()
    for _ in range(20):
        for i, (_, _, q_device, device) in enumerate(problems):
            with lanes[i]:
                results[i].append(nbattn.paged_attention(q_device, device, return_lse=True))
    for lane in lanes:
        lane.synchronize()
    for i in range(2):
        worst = [compared(f"stream {i}", actual, expected[i]) for actual in results[i]]
        yield max(worst, key=lambda x: (not x["passed"], x["share"]))
    _, _, q_device, device = problems[0]
    k_device, table = device.k, device.kv_indices.reshape(4, 40)
    lens = cupy.zeros(4, cupy.int32)
    lens += cupy.asarray(np.array([500, 3, 77, 0], np.int32))
    late = nbattn.PagedKV.from_block_table(k_device, k_device, table, lens)
    yield compared("lengths written just before", nbattn.paged_attention(q_device, late, return_lse=True), expected[0])


def repeats(options: argparse.Namespace) -> Iterator[Outcome]:
    """Repeat calls into poisoned buffers: the bits must be the same."""
    import cupy

    for seed, lens in ((0, [633, 1, 0, 250]), (3, [5]), (4, [600] * 12)):
        _, _, q_device, device = _decode_problem(lens, seed)
        first = None
        same = True
        for _ in range(options.repeats):
            out = cupy.full(q_device.shape, np.nan, q_device.dtype)
            nbattn.paged_attention(q_device, device, out=out)
            bits = out.get().tobytes()
            first = bits if first is None else first
            same &= bits == first
        name = f"{options.repeats} repeats of {len(lens)} requests"
        yield {"name": name, "passed": bool(same), "share": 0.0, "detail": "" if same else "bits differ"}

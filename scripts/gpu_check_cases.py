"""Cases of the shared table, random ones and a few for the sanitizer, on the GPU and beside the float64 oracle."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

import numpy as np

import nbattn
from nbattn import oracle, testing

Outcome = dict[str, Any]


def compared(name: str, actual: Any, expected: Any) -> Outcome:
    """Return the outcome of a result with its log-sum-exp beside what was expected."""
    out = testing.compare(actual[0], expected.out, expected.out_budget, "out")
    lse = testing.compare(actual[1], expected.lse, expected.lse_budget, "lse")
    passed = out.passed and lse.passed
    return {
        "name": name,
        "passed": passed,
        "share": max(out.share, lse.share),
        "detail": "" if passed else f"{out} {lse}",
    }


def table_cases(_: argparse.Namespace) -> Iterator[Outcome]:
    """Run the shared case table in every dtype the device takes."""
    for family, cases in testing.CASES.items():
        for case in cases:
            if case.q_dtype != "float64":
                yield _outcome(case, family)


def random_cases(options: argparse.Namespace) -> Iterator[Outcome]:
    """Draw random cases, all options together."""
    rng = np.random.default_rng(options.seed)
    drawn = 0
    while drawn < options.random:
        case = testing.random_case(testing.FAMILIES[drawn % len(testing.FAMILIES)], rng)
        if case.q_dtype != "float64":
            drawn += 1
            yield _outcome(case, case.family)


def _outcome(case: Any, family: str) -> Outcome:
    name = f"{family}: {case.id}"
    try:
        result = testing.run_case(case, array=testing.to_cupy)
    except nbattn.TargetError as error:  # the one thing a GPU refuses
        refused = "float64" in repr(case)
        return {"name": name, "passed": refused, "share": 0.0, "detail": "" if refused else str(error)}
    detail = "" if result.passed else str(result)
    return {"name": name, "passed": result.passed, "share": result.budget_share, "detail": detail}


def few_cases(_: argparse.Namespace) -> Iterator[Outcome]:
    """Run a handful of small cases, for the sanitizer."""
    for family, cases in testing.CASES.items():
        chosen = [case for case in cases if case.q_dtype != "float64"][:: max(1, len(cases) // 4)]
        for case in chosen:
            yield _outcome(case, family)
    yield from _few_strided()


def _few_strided() -> Iterator[Outcome]:
    """Gather, prefill, merge and append on views whose rows start at odd addresses, with NaN in every gap."""
    rng = np.random.default_rng(11)

    def normal(*shape: int, dtype: Any = np.float16) -> np.ndarray:
        return testing.spread(rng.standard_normal(shape).astype(np.float32).astype(dtype), rng)

    k, v = normal(9, 16, 2, 64), normal(9, 16, 2, 64)
    table, lens, offsets = rng.permutation(9)[:8].reshape(2, 4).astype(np.int32), np.array([61, 30]), [0, 40, 53]
    host = nbattn.PagedKV.from_block_table(k, v, table, lens)
    device = nbattn.PagedKV.from_block_table(testing.to_cupy(k), testing.to_cupy(v), testing.to_cupy(table), lens)
    q, rows = normal(53, 8, 64), np.array(offsets, np.int32)
    lists, counts = rng.integers(-1, 64, (53, 21)).astype(np.int32), rng.integers(0, 22, 53).astype(np.int32)
    actual = nbattn.paged_attention(testing.to_cupy(q), device, rows, return_lse=True)
    yield compared("prefill, odd strides", actual, testing.expect(oracle.paged_attention, q, host, rows))
    moved = [testing.to_cupy(x) for x in (q, lists, counts)]
    actual = nbattn.gather_attention(moved[0], device, *moved[1:], rows, return_lse=True)
    yield compared("gather, odd strides", actual, testing.expect(oracle.gather_attention, q, host, lists, counts, rows))
    states = [normal(5, 3, 72), normal(5, 3, dtype=np.float32), normal(5, 3, 72), normal(5, 3, dtype=np.float32)]
    actual = nbattn.merge_state(*(testing.to_cupy(x) for x in states))
    yield compared("merge_state, odd strides", actual, testing.expect(oracle.merge_state, *states))
    key, value = normal(3, 2, 64), normal(3, 2, 64)
    places = np.array([0, 1, 0], np.int32), np.array([60, 29, 3], np.int32)
    pages = table[[0, 0, 1, 1], [0, 3, 0, 1]]  # request 0 owns two pages here, request 1 the others
    arrays = pages, np.array([0, 2, 4], np.int32), np.array([16, 16], np.int32)
    places[1][:] = 17, 29, 3
    moved_cache = testing.to_cupy(k), testing.to_cupy(v)
    nbattn.append_paged_kv_cache(
        *(testing.to_cupy(x) for x in (key, value, *places)), moved_cache, *(testing.to_cupy(x) for x in arrays)
    )
    nbattn.append_paged_kv_cache(key, value, *places, (k, v), *arrays)
    same = all(np.array_equal(x.get(), y) for x, y in zip(moved_cache, (k, v), strict=True))
    yield {"name": "append, odd strides", "passed": same, "share": 0.0, "detail": "" if same else "bytes differ"}

"""Turn a request trace into page tables and cascade levels, and check decode steps on them against the oracle.

The trace is in the public Mooncake JSONL form: a request a line with ``input_length``, ``output_length`` and
``hash_ids``, one id for every 512 tokens of input; equal ids are equal blocks with equal blocks before them. Full
blocks become shared pages; what follows them (the last partial block and the generated tokens) is a request's own.
`nbattn.cascade.build_levels` finds the levels::

    python scripts/trace_to_tables.py TRACE.jsonl --requests 64 --tokens-per-block 4 --levels 3
    python scripts/trace_to_tables.py --synthesise 40 --seed 7 > trace.jsonl
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import numpy as np

import nbattn
from nbattn.arrays import dtype_from_name
from nbattn.cascade import build_levels
from nbattn.testing import Comparison, compare, expect

BLOCK = 512  # tokens that one hash id of a trace stands for


@dataclass(frozen=True)
class Request:
    """One line of a trace."""

    timestamp: int
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.hash_ids) != -(-self.input_length // BLOCK):
            blocks = -(-self.input_length // BLOCK)
            raise ValueError(f"hash_ids: must be {blocks} for {self.input_length} tokens, got {len(self.hash_ids)}.")


class Tables(NamedTuple):
    """The page tables of one decode step: a list of page ids and a length for every request."""

    pages: list[np.ndarray]
    kv_lens: np.ndarray
    num_pages: int
    page_size: int


def read_trace(path: Path) -> Iterator[Request]:
    """Yield the requests of a trace; a bad line is an error that names it."""
    with path.open() as lines:
        for number, line in enumerate(lines, 1):
            try:
                row = json.loads(line)
                row["hash_ids"] = tuple(row["hash_ids"])
                yield Request(**row)
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(f"{path.name}, line {number}: {error}") from error


def synthesise(count: int, seed: int) -> Iterator[Request]:
    """Yield made-up requests: a few system prompts, and conversations whose turns repeat what went before."""
    draw = random.Random(seed)
    fresh = iter(range(1_000_000))
    system_prompts = [tuple(next(fresh) for _ in range(blocks)) for blocks in (1, 1, 3)]
    conversations: list[Request] = []
    for number in range(count):
        if conversations and draw.random() < 0.5:  # the next turn: all full blocks of the one before are shared
            before = draw.choice(conversations)
            shared = before.hash_ids[: before.input_length // BLOCK]
            length = before.input_length + before.output_length + draw.randint(5, 1500)
        else:
            shared = draw.choice(system_prompts)
            length = len(shared) * BLOCK + draw.randint(0, 4000)
        own = -(-length // BLOCK) - len(shared)
        ids = shared + tuple(next(fresh) for _ in range(own))
        conversations.append(Request(3000 * number, length, draw.randint(1, 800), ids))
        yield conversations[-1]


def scaled(tokens: int, tokens_per_block: int) -> int:
    """Return `tokens` at a scale of `tokens_per_block` for 512, rounded up."""
    return -(-tokens * tokens_per_block // BLOCK)


def decode_tables(
    requests: Sequence[Request], progress: float, tokens_per_block: int, page_size: int, seed: int = 0
) -> Tables:
    """Return the tables of one decode step, after the fraction `progress` of every output; page ids are shuffled."""
    if tokens_per_block % page_size:
        raise ValueError(f"page_size: must divide tokens_per_block ({tokens_per_block}), got {page_size}.")
    pages_per_block = tokens_per_block // page_size
    block_of_hash: dict[int, int] = {}
    numbers, kv_lens = [], []
    for request in requests:
        full, rest = divmod(request.input_length, BLOCK)
        shared = [block_of_hash.setdefault(h, len(block_of_hash)) for h in request.hash_ids[:full]]
        numbers.append(np.add.outer(np.array(shared, int) * pages_per_block, np.arange(pages_per_block)).ravel())
        generated = max(1, int(progress * request.output_length))  # this step's token is one of them
        kv_lens.append(full * tokens_per_block + scaled(rest, tokens_per_block) + scaled(generated, tokens_per_block))
    own = [-(-length // page_size) - len(shared) for length, shared in zip(kv_lens, numbers, strict=True)]
    first_own = len(block_of_hash) * pages_per_block + np.concatenate([[0], np.cumsum(own)])
    shuffle = np.random.default_rng(seed).permutation(first_own[-1]).astype(np.int32)
    pages = [
        shuffle[np.concatenate([shared, np.arange(begin, end)])]
        for shared, begin, end in zip(numbers, first_own[:-1], first_own[1:], strict=True)
    ]
    return Tables(pages, np.array(kv_lens, np.int32), len(shuffle), page_size)


def filled_pools(
    tables: Tables, kv_heads: int, head_dim: int, dtype: np.dtype, seed: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return random K and V pools [pages, page_size, kv_heads, head_dim]; slots that no request owns hold NaN."""
    owned = np.zeros((tables.num_pages, tables.page_size, 1, 1), bool)
    for ids, length in zip(tables.pages, tables.kv_lens, strict=True):
        for i, page in enumerate(ids):
            owned[page, : length - i * tables.page_size] = True
    shape = (2, tables.num_pages, tables.page_size, kv_heads, head_dim)
    k, v = np.where(owned, np.random.default_rng(seed).standard_normal(shape, np.float32), np.nan).astype(dtype)
    return k, v


def check_step(
    tables: Tables,
    max_levels: int,
    *,
    heads: int = 8,
    kv_heads: int = 2,
    head_dim: int = 64,
    dtype: str = "float32",
    seed: int = 0,
) -> tuple[Comparison, Comparison]:
    """Run one decode step flat and as a cascade on random data; compare both with the oracle over the flat tables."""
    pools = filled_pools(tables, kv_heads, head_dim, dtype_from_name(dtype), seed)
    shape = (len(tables.pages), heads, head_dim)
    q = np.random.default_rng(seed + 1).standard_normal(shape, np.float32).astype(dtype_from_name(dtype))

    def levels(max_levels: int) -> list[nbattn.Level]:
        one_row = np.ones(len(tables.pages), np.int32)
        lists = build_levels(tables.pages, tables.kv_lens, one_row, tables.page_size, max_levels)
        *above, own = (
            nbattn.Level(nbattn.PagedKV.from_page_table(pools, *table), rows)
            for rows, *table in zip(*lists, strict=True)
        )
        return [*above, nbattn.Level(own.kv, own.qo_indptr, causal=True)]

    flat, cascade = levels(1), levels(max_levels)
    expected = expect(nbattn.oracle.paged_attention, q, flat[0].kv)
    results = nbattn.paged_attention(q, flat[0].kv), nbattn.cascade_attention(q, cascade)
    flat_result, cascade_result = (
        compare(out, expected.out, expected.out_budget, name)
        for out, name in zip(results, ("flat", "cascade"), strict=True)
    )
    return flat_result, cascade_result


def validate(requests: Sequence[Request], options: argparse.Namespace) -> int:
    """Check every batch and step, print a line for each, and return the number of failures."""
    failures = 0
    for begin in range(0, len(requests), options.batch):
        batch = sorted(requests[begin : begin + options.batch], key=lambda request: request.hash_ids)
        for step in range(options.steps):
            progress = (step + 1) / options.steps
            tables = decode_tables(batch, progress, options.tokens_per_block, options.page_size, options.seed)
            results = check_step(
                tables,
                options.levels,
                heads=options.heads,
                kv_heads=options.kv_heads,
                head_dim=options.head_dim,
                dtype=options.dtype,
                seed=options.seed,
            )
            listed, stored = sum(map(len, tables.pages)), len(np.unique(np.concatenate(tables.pages)))
            errors = ", ".join(f"{r.name} {r.max_error:.1e}" for r in results)
            verdict = "ok" if all(r.passed for r in results) else "FAILED"
            failures += verdict != "ok"
            print(
                f"requests {begin}-{begin + len(batch) - 1} step {step}: {tables.kv_lens.sum()} keys, "
                f"{listed} pages listed, {stored} stored; error {errors} (budget {results[0].budget:.1e}) {verdict}"
            )
    return failures


def main() -> int:
    """Validate a trace, or write a synthetic one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path, nargs="?")
    parser.add_argument(
        "--synthesise", type=int, metavar="N", help="write N made-up requests to standard output instead"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--requests", type=int, default=64, help="requests read from the trace")
    parser.add_argument("--batch", type=int, default=8, help="requests that decode together")
    parser.add_argument("--steps", type=int, default=2, help="decode steps per batch, spread over the outputs")
    parser.add_argument("--tokens-per-block", type=int, default=4, help="scale: tokens for each 512 of the trace")
    parser.add_argument("--page-size", type=int, default=2, help="a divisor of --tokens-per-block")
    parser.add_argument("--levels", type=int, default=2)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--kv-heads", type=int, default=2)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--dtype", default="float32")
    options = parser.parse_args()
    if options.synthesise is not None:
        for request in synthesise(options.synthesise, options.seed):
            print(json.dumps(asdict(request)))
        return 0
    if options.trace is None:
        parser.error("give a trace, or --synthesise N")
    try:
        requests = list(islice(read_trace(options.trace), options.requests))
    except (OSError, ValueError) as error:
        parser.error(f"trace: must be a file of JSON lines, got {error}.")
    failures = validate(requests, options)
    print(f"{failures} failures")
    return int(failures > 0)


if __name__ == "__main__":
    sys.exit(main())

"""A request trace as page tables and cascade levels: shared blocks become shared pages, and decode steps stay right."""

import json
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
import trace_to_tables as trace

from nbattn.cascade import build_levels

TRACE = Path(__file__).parent / "data" / "synthetic_trace.jsonl"
REQUESTS = list(trace.read_trace(TRACE))


def batches(size: int = 8):
    for begin in range(0, len(REQUESTS), size):
        yield sorted(REQUESTS[begin : begin + size], key=lambda request: request.hash_ids)


def test_committed_trace_is_the_one_its_seed_makes():
    assert [json.dumps(asdict(r)) for r in trace.synthesise(40, seed=7)] == TRACE.read_text().splitlines()


def test_bad_line_is_named(tmp_path):
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"timestamp": 0, "input_length": 513, "output_length": 1, "hash_ids": [4]}\n')
    with pytest.raises(ValueError, match=r"bad.jsonl, line 1: hash_ids: must be 2 for 513 tokens, got 1"):
        list(trace.read_trace(bad))


def test_full_blocks_are_shared_pages_and_the_rest_is_private():
    requests = [
        trace.Request(0, 512 * 2 + 100, 10, (7, 8, 9)),
        trace.Request(0, 512 * 2 + 100, 300, (7, 8, 9)),  # the partial third block is copied, not shared
        trace.Request(0, 512, 1, (7,)),
        trace.Request(0, 5, 1, (3,)),
    ]
    tables = trace.decode_tables(requests, progress=1.0, tokens_per_block=4, page_size=2)
    a, b, c, d = (ids.tolist() for ids in tables.pages)
    assert tables.kv_lens.tolist() == [8 + 1 + 1, 8 + 1 + 3, 4 + 1, 1 + 1]
    assert a[:4] == b[:4]
    assert a[:2] == c[:2]
    private = [*a[4:], *b[4:], *c[2:], *d]
    assert sorted([*a[:4], *private]) == list(range(tables.num_pages))  # every page has one place


@pytest.mark.parametrize("max_levels", [1, 2, 3, 5])
@pytest.mark.parametrize("page_size", [1, 2, 4])
def test_levels_of_a_request_concatenate_to_its_pages(page_size, max_levels):
    shared = 0
    for batch in batches():
        tables = trace.decode_tables(batch, 0.5, tokens_per_block=4, page_size=page_size)
        ones = np.ones(len(batch), np.int32)
        lists = build_levels(tables.pages, tables.kv_lens, ones, page_size, max_levels)
        for row, (pages, kv_len) in enumerate(zip(tables.pages, tables.kv_lens, strict=True)):
            found, length = [], 0
            for qo_indptr, kv_indptr, kv_indices, last_page_len in zip(*lists, strict=True):
                entry = np.searchsorted(qo_indptr, row, side="right") - 1
                ids = kv_indices[kv_indptr[entry] : kv_indptr[entry + 1]]
                found.extend(ids)
                length += (len(ids) - 1) * page_size + last_page_len[entry] if len(ids) else 0
            assert found == pages.tolist()
            assert length == kv_len
        shared += sum(map(len, tables.pages)) - sum(map(len, lists.paged_kv_indices_arr))
    assert (shared > 0) == (max_levels > 1)  # the trace has something to share


@pytest.mark.parametrize(
    ("page_size", "max_levels", "dtype"), [(4, 2, "float32"), (1, 3, "bfloat16"), (2, 5, "float16")]
)
def test_decode_steps_agree_with_the_oracle(page_size, max_levels, dtype):
    for number, batch in enumerate(batches()):
        tables = trace.decode_tables(batch, 0.3, tokens_per_block=4, page_size=page_size, seed=number)
        results = trace.check_step(tables, max_levels, head_dim=40, dtype=dtype, seed=number)
        assert [result.name for result in results] == ["flat", "cascade"]
        for result in results:
            assert result.passed, str(result)

"""Attention of a real model (all-MiniLM-L6-v2, every layer) through every path; the truth is the model's own output."""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

import nbattn

CAPTURE = Path(__file__).parent / "data" / "minilm_attention.npz"
LAYERS = range(6)


class Layer(NamedTuple):
    """One layer of the capture; sentence s owns tokens indptr[s]:indptr[s + 1]."""

    q: np.ndarray  # [tokens, heads, head_dim], like k, v and context
    k: np.ndarray
    v: np.ndarray
    context: np.ndarray
    indptr: np.ndarray

    @property
    def lengths(self) -> np.ndarray:
        return np.diff(self.indptr)

    def pages(
        self, x: np.ndarray, page_size: int, begin: np.ndarray, end: np.ndarray
    ) -> tuple[np.ndarray, list[list[int]]]:
        """Lay tokens begin[s]:end[s] of every sentence into shuffled pages; unused slots hold NaN."""
        counts = -(-(end - begin) // page_size)
        ids = np.random.default_rng(page_size).permutation(counts.sum() + 2)  # two pages belong to nobody
        cache = np.full((len(ids), page_size, *x.shape[1:]), np.nan, np.float32)
        table = [part.tolist() for part in np.split(ids, np.cumsum(counts))[:-1]]
        for s, pages in enumerate(table):
            for i, page in enumerate(pages):
                tokens = x[begin[s] + i * page_size : min(begin[s] + (i + 1) * page_size, end[s])]
                cache[page, : len(tokens)] = tokens
        return cache, table

    def paged(self, page_size: int, begin=None, end=None, kv_layout: str = "NHD") -> nbattn.PagedKV:
        begin = self.indptr[:-1] if begin is None else begin
        end = self.indptr[1:] if end is None else end
        (k, table), (v, _) = (self.pages(x, page_size, begin, end) for x in (self.k, self.v))
        cache = np.stack([k, v], axis=1)  # [pages, 2, page_size, heads, head_dim]
        if kv_layout == "HND":
            cache = np.ascontiguousarray(cache.swapaxes(2, 3))
        indptr = np.cumsum([0, *map(len, table)]).astype(np.int32)
        indices = np.concatenate(table).astype(np.int32)
        last_page_len = ((end - begin - 1) % page_size + 1).astype(np.int32)
        return nbattn.PagedKV.from_page_table(cache, indptr, indices, last_page_len, kv_layout=kv_layout)


def contiguous(layer: Layer) -> np.ndarray:
    slot_ids = np.array([3, 0, 2], np.int32)
    k, v = np.full((2, 4, 16, *layer.k.shape[1:]), np.nan, np.float32)  # [rows, slots, heads, head_dim]
    for s, row in enumerate(slot_ids):
        tokens = slice(*layer.indptr[s : s + 2])
        k[row, : layer.lengths[s]], v[row, : layer.lengths[s]] = layer.k[tokens], layer.v[tokens]
    kv = nbattn.PagedKV.from_slots(k, v, layer.lengths.astype(np.int32), slot_ids)
    return nbattn.paged_attention(layer.q, kv, layer.indptr, causal=False)


def paged(page_size: int, kv_layout: str = "NHD") -> Callable[[Layer], np.ndarray]:
    return lambda layer: nbattn.paged_attention(
        layer.q, layer.paged(page_size, kv_layout=kv_layout), layer.indptr, causal=False
    )


def split(layer: Layer) -> np.ndarray:
    return nbattn.paged_attention(layer.q, layer.paged(5), layer.indptr, causal=False, split_size=3)


def gathered(layer: Layer) -> np.ndarray:
    """Select every token of the row's sentence, in an order of the row's own."""
    shuffle = np.random.default_rng(0).permutation
    indices = np.full((len(layer.q), layer.lengths.max()), 2**31 - 1, np.int32)
    counts = np.repeat(layer.lengths, layer.lengths).astype(np.int32)
    for row, count in enumerate(counts):
        indices[row, :count] = shuffle(count)
    return nbattn.gather_attention(layer.q, layer.paged(5), indices, counts, layer.indptr)


def cascaded(layer: Layer) -> np.ndarray:
    """Cut every sentence's keys into two levels, which live in different pools with different page sizes."""
    begin, end = layer.indptr[:-1], layer.indptr[1:]
    cut = begin + layer.lengths // 3
    levels = [
        nbattn.Level(layer.paged(5, begin, cut), layer.indptr, causal=False),
        nbattn.Level(layer.paged(4, cut, end), layer.indptr, causal=False),
    ]
    return nbattn.cascade_attention(layer.q, levels)


PATHS = {
    "contiguous": contiguous,
    "paged-16": paged(16),
    "paged-5-HND": paged(5, "HND"),
    "paged-1": paged(1),
    "split": split,
    "gathered": gathered,
    "cascaded": cascaded,
}


@pytest.fixture(scope="module")
def captured() -> dict[str, np.ndarray]:
    with np.load(CAPTURE) as arrays:
        return dict(arrays)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("index", LAYERS)
def test_path_reproduces_the_models_attention(path, index, captured):
    layer = Layer(*(captured[name][index] for name in ("q", "k", "v", "context")), captured["indptr"])
    out = PATHS[path](layer)
    logits = np.einsum("qhd,khd->hqk", layer.q, layer.k) / np.sqrt(layer.q.shape[-1])
    budget = 8 * 2.0**-24 * (1 + np.abs(logits).max()) * np.abs(layer.v).max()
    np.testing.assert_allclose(out, layer.context, rtol=0, atol=2 * budget)  # twice: the truth is float32 as well


def test_layered_pool_reproduces_every_layer(captured):
    """All six layers of one sentence live in one 6-D pool, as in a server."""
    page_size, tokens = 6, slice(*captured["indptr"][2:4])
    length = tokens.stop - tokens.start
    table = np.array([[2, 0, 3, 9]], np.uint32)  # the fourth entry is never used
    pool = np.full((5, 2, 6, page_size, *captured["k"].shape[2:]), np.nan, np.float32)
    for i, page in enumerate(table[0, :3]):
        span = slice(tokens.start + i * page_size, min(tokens.start + (i + 1) * page_size, tokens.stop))
        for side, name in enumerate("kv"):
            pool[page, side, :, : span.stop - span.start] = captured[name][:, span]
    for index in LAYERS:
        kv = nbattn.PagedKV.from_blocks(pool, table, np.array([length], np.int32), index)
        indptr = np.array([0, length], np.int32)
        out = nbattn.paged_attention(captured["q"][index, tokens], kv, indptr, causal=False)
        np.testing.assert_allclose(out, captured["context"][index, tokens], rtol=0, atol=5e-6)

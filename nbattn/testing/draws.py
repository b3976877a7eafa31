"""What random cases of every family draw from, and how."""

from __future__ import annotations

from typing import Any

import numpy as np

from nbattn.testing.attention_cases import Shape
from nbattn.testing.memory import Rng

WRAPPERS = ("multi_level_cascade", "shared_prefix")
FACES = ("gqa_decode", "attention_over_cache", "generic_cross_attention_kv_cache", "qsa_sparse_attention")
HEAD_DIMS = (1, 3, 8, 20, 56, 64, 64, 72, 80, 96, 128, 128, 136, 256)
PAGE_SIZES = (1, 2, 3, 16, 16, 61, 64)
GROUPS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 16)
KV_DTYPES = {
    "float64": (None,),
    "float32": (None, None, "float8_e4m3fn", "float8_e5m2", "int8"),
    "float16": (None, None, "float8_e4m3fn", "float8_e5m2", "int8"),
    "bfloat16": (None, None, "float8_e4m3fn", "float8_e5m2", "int8"),
}


def pick(rng: Rng, values: Any) -> Any:
    """Return one of `values`."""
    return values[int(rng.integers(len(values)))]


def sometimes(rng: Rng, value: Any, otherwise: Any = None, chance: float = 0.25) -> Any:
    """Return `value` with a chance, else `otherwise`."""
    return value if rng.random() < chance else otherwise


def random_lens(rng: Rng, batch_size: int, page_size: int, most: int = 140) -> tuple[int, ...]:
    """Return key counts around the edges of pages and tiles."""
    edges = [0, 1, page_size - 1, page_size, page_size + 1, 15, 16, 17, 63, 64, 65, 127, 128, 129]
    return tuple(
        int(min(pick(rng, edges) if rng.random() < 0.6 else rng.integers(0, most), most)) for _ in range(batch_size)
    )


def random_levels(rng: Rng, page_size: int) -> tuple[Shape, ...]:
    """Return two to four levels over the same rows; the last is causal, some start late or end early."""
    last = np.cumsum([0, *rng.integers(0, 4, int(rng.integers(1, 5)))])
    total = int(last[-1])
    levels = []
    for _ in range(int(rng.integers(1, 4))):
        inner = last[1:-1] if rng.random() < 0.75 else np.arange(1, max(total, 1))  # mostly cut between requests
        cuts = np.sort(rng.choice(inner, int(rng.integers(0, min(len(inner), 3) + 1)), replace=False)).tolist()
        first, end = (min(1, total), total) if rng.random() < 0.15 else (0, total)
        offsets = (first, *[c for c in cuts if first <= c <= end], end)
        levels.append((offsets, random_lens(rng, len(offsets) - 1, page_size, 70), False))
    lens = random_lens(rng, len(last) - 1, page_size, 70)
    return (*levels, (tuple(last.tolist()), lens, bool(rng.random() < 0.8)))

"""Cases of `paged_attention` and `cascade_attention`: rows and keys by level, and every option of the pipeline."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from nbattn import oracle
from nbattn.testing.cases import CacheCase, Problem
from nbattn.testing.memory import Rng, poison

Shape = tuple[tuple[int, ...], tuple[int, ...], bool]  # of a level: qo_indptr, kv_lens, causal


@dataclass(frozen=True, repr=False)
class AttentionCase(CacheCase):
    """The options that `paged_attention` and `cascade_attention` share."""

    window_left: int = -1
    chunk_size: int | None = None
    logits_soft_cap: float | None = None
    attn_mask: str | None = None  # "bool", "additive"
    mask_axes: str = "bhnl"  # "1" for an axis of one element; fewer letters, fewer axes
    alibi: bool = False
    rope: tuple[float, float] | None = None  # theta, scale
    kv_start: bool = False
    q_positions: bool = False
    split_size: int | None = None

    def shapes(self) -> list[Shape]:
        """Return qo_indptr, kv_lens and the causal flag of each level."""
        raise NotImplementedError

    def mask(self, max_rows: int, max_keys: int, batch_size: int, rng: Rng) -> np.ndarray | None:
        """Return a mask with surplus rows and columns that must not be read."""
        if self.attn_mask is None:
            return None
        sizes = {"b": batch_size, "h": self.num_qo_heads, "n": max_rows, "l": max_keys, "1": 1}
        shape = [sizes[a] for a in self.mask_axes]
        keep = rng.random(shape) < 0.7
        mask = keep if self.attn_mask == "bool" else np.where(keep, rng.normal(size=shape), -np.inf).astype(np.float32)
        if self.mask_axes.endswith("nl"):
            wide = poison(np.empty([*shape[:-2], max_rows + 2, max(max_keys, 2) + 3], np.float32), rng)
            wide = np.isnan(wide) if self.attn_mask == "bool" else wide
            wide[..., :max_rows, :max_keys] = mask
            mask = wide
        return mask

    def options(self, problem: Problem, num_rows: int, rng: Rng, array: Callable[[np.ndarray], Any]) -> None:
        """Add every option to both sides of the problem."""
        shapes = self.shapes()
        offsets, kv_lens, _ = shapes[-1]
        batch_size = len(kv_lens)
        max_keys = sum(max(lens, default=0) for _, lens, _ in shapes)  # of any row, whichever requests it is in
        self.common(problem, num_rows, rng, array)
        problem.pass_on(
            array,
            window_left=self.window_left,
            chunk_size=self.chunk_size,
            logits_soft_cap=self.logits_soft_cap,
            attn_mask=self.mask(int(np.diff(offsets).max(initial=0)), max_keys, batch_size, rng),
            alibi_slopes=oracle.alibi_slopes(self.num_qo_heads).astype(np.float32) if self.alibi else None,
            split_size=self.split_size,
        )
        for name, given, size in [("kv_start", self.kv_start, batch_size), ("q_positions", self.q_positions, 0)]:
            if given:
                rows = num_rows + self.extra_rows
                values = rng.integers(0, 9, size) if name == "kv_start" else rng.integers(-2, max_keys + 3, rows)
                problem.kwargs[name] = problem.oracle_kwargs[name] = values.astype(np.int32)
        if self.rope is not None:
            from nbattn import Rope

            problem.kwargs["rope"], problem.oracle_kwargs["rope"] = Rope(*self.rope), oracle.Rope(*self.rope)


@dataclass(frozen=True, repr=False)
class PagedCase(AttentionCase):
    """One level; `qo_lens` None is one row per request and no qo_indptr."""

    family: ClassVar[str] = "paged_attention"
    kv_lens: tuple[int, ...] = (5,)
    qo_lens: tuple[int, ...] | None = None
    causal: bool = True

    def shapes(self) -> list[Shape]:
        """Return qo_indptr, kv_lens and the causal flag of the level."""
        lens = (1,) * len(self.kv_lens) if self.qo_lens is None else self.qo_lens
        return [(tuple(np.cumsum([0, *lens]).tolist()), self.kv_lens, self.causal)]

    def build(self, array: Callable[[np.ndarray], Any] = np.asarray) -> Problem:
        """Return the arrays and arguments; `array` moves each to its device."""
        rng = np.random.default_rng(self.seed)
        ((offsets, kv_lens, causal),) = self.shapes()
        pool = self.pool(kv_lens, rng)
        q = self.query(offsets[-1], rng)
        qo_indptr = None if self.qo_lens is None else np.array(offsets, np.int32)
        kv = pool.paged_kv(self.layout, self.kv_layout, rng, array)
        problem = Problem([array(q), kv, qo_indptr], {}, [q, pool.cache(), qo_indptr])
        self.options(problem, offsets[-1], rng, array)
        problem.pass_on(array, causal=causal)
        return problem


@dataclass(frozen=True, repr=False)
class CascadeCase(AttentionCase):
    """Several levels from the root down, each with a pool of its own: (qo_indptr, kv_lens, causal)."""

    family: ClassVar[str] = "cascade_attention"
    levels: tuple[Shape, ...] = (((0, 2), (4,), False), ((0, 1, 2), (3, 5), True))

    def shapes(self) -> list[Shape]:
        """Return qo_indptr, kv_lens and the causal flag of each level."""
        return list(self.levels)

    def build(self, array: Callable[[np.ndarray], Any] = np.asarray) -> Problem:
        """Return the arrays and arguments; `array` moves each to its device."""
        from nbattn import Level

        rng = np.random.default_rng(self.seed)
        num_rows = max(offsets[-1] for offsets, _, _ in self.levels)
        q = self.query(num_rows, rng)
        levels, defined = [], []
        for offsets, kv_lens, causal in self.levels:
            pool = self.pool(kv_lens, rng)
            qo_indptr = np.array(offsets, np.int32)
            levels.append(Level(pool.paged_kv(self.layout, self.kv_layout, rng, array), qo_indptr, causal))
            defined.append(oracle.Level(pool.cache(), qo_indptr, causal))
        problem = Problem([array(q), levels], {}, [q, defined])
        self.options(problem, num_rows, rng, array)
        return problem

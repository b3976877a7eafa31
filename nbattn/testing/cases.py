"""Cases as frozen dataclasses: small literals that name a problem, print as their own repro and build its arrays."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from importlib import import_module
from typing import Any, ClassVar

import numpy as np

from nbattn.arrays import dtype_from_name
from nbattn.testing.memory import Rng, poison, spread
from nbattn.testing.pools import Pool, random_pool, random_slots, random_values

UNTOUCHED = 7.0  # what a given out and lse hold before the call
GUARD_ROWS = 2  # rows of the same around them


@dataclass
class Problem:
    """A built case: the arguments for `nbattn`'s function and, from the same numbers, for the oracle's."""

    args: list[Any] = field(default_factory=list)
    kwargs: dict[str, Any] = field(default_factory=dict)
    oracle_args: list[Any] = field(default_factory=list)
    oracle_kwargs: dict[str, Any] = field(default_factory=dict)
    guards: list[Any] = field(default_factory=list)  # the buffers around a given out and lse

    def pass_on(self, array: Callable[[np.ndarray], Any], **kwargs: Any) -> None:
        """Add keyword arguments for both; arrays go through `array`, None is left out."""
        for name, value in kwargs.items():
            if value is not None:
                self.oracle_kwargs[name] = value
                self.kwargs[name] = array(value) if isinstance(value, np.ndarray) else value


@dataclass(frozen=True, repr=False)
class Case:
    """What all cases have: a seed, dtypes, a readable `id`, and a `repr` that is its own repro."""

    family: ClassVar[str]  # the function's name in nbattn and nbattn.oracle
    seed: int = 0
    q_dtype: str = "float32"
    out_dtype: str | None = None
    lse_base: str = "2"

    def __repr__(self) -> str:
        """Return the call that makes this case, without its defaults."""
        return f"{type(self).__name__}({', '.join(f'{n}={v!r}' for n, v in self.given())})"

    def given(self) -> list[tuple[str, Any]]:
        """Return the fields that differ from their defaults."""
        return [(f.name, v) for f in fields(self) if (v := getattr(self, f.name)) != f.default]

    @property
    def id(self) -> str:
        """A short readable name, for pytest and for reports."""
        words = [n if v is True else f"{n}={v}" for n, v in self.given()]
        return "-".join([self.family, *words]).translate(str.maketrans(" ", "_", "()'"))

    def function(self) -> Callable[..., Any]:
        """Return nbattn's function that the case is for."""
        return getattr(import_module("nbattn"), self.family)

    def with_dtypes(self, q_dtype: str, kv_dtype: str | None = None) -> Any:
        """Return the same case in other dtypes; a case without a cache has no `kv_dtype`."""
        return replace(self, q_dtype=q_dtype)

    def build(self, array: Callable[[np.ndarray], Any] = np.asarray) -> Problem:
        """Return the arrays and arguments; `array` moves each to its device (`to_cupy` keeps strides and gaps)."""
        raise NotImplementedError


@dataclass(frozen=True, repr=False)
class CacheCase(Case):
    """What all cases with a cache have. Without `kv_dtype` K and V have q's dtype; `head_dim_vo` None is `head_dim`."""

    kv_dtype: str | None = None
    num_kv_heads: int = 1
    group_size: int = 1
    head_dim: int = 64
    head_dim_vo: int | None = None
    page_size: int = 4
    layout: str = "tuple"  # one of pools.LAYOUTS
    kv_layout: str = "NHD"
    shared: bool = False
    unmapped: bool = False
    sm_scale: float | None = None
    sinks: str | None = None  # "normal", "some" (others -inf), "huge"
    k_scale: str | None = None  # "one", "head", "channel"; int8 without it takes "one"
    v_scale: str | None = None
    given_out: bool = False
    extra_rows: int = 0  # rows of q past the last offset

    def with_dtypes(self, q_dtype: str, kv_dtype: str | None = None) -> Any:
        """Return the same case in other dtypes."""
        return replace(self, q_dtype=q_dtype, kv_dtype=kv_dtype)

    @property
    def num_qo_heads(self) -> int:
        """Query heads in all."""
        return self.num_kv_heads * self.group_size

    @property
    def dims(self) -> tuple[int, int]:
        """Head sizes of K and of V."""
        return self.head_dim, self.head_dim_vo or self.head_dim

    def pool(self, kv_lens: tuple[int, ...], rng: Rng) -> Pool:
        """Return a random pool for requests of these lengths."""
        form: dict[str, Any] = {"heads": self.num_kv_heads, "dims": self.dims, "dtype": self.kv_dtype or self.q_dtype}
        if self.layout == "slots":
            return random_slots(rng, kv_lens, **form)
        return random_pool(rng, kv_lens, page_size=self.page_size, shared=self.shared, unmapped=self.unmapped, **form)

    def query(self, num_rows: int, rng: Rng) -> np.ndarray:
        """Return q with `extra_rows` rows of poison behind it."""
        q = random_values((num_rows + self.extra_rows, self.num_qo_heads, self.head_dim), self.q_dtype, rng)
        poison(q[num_rows:], rng)
        return spread(q, rng)

    def scale(self, kind: str | None, dim: int, rng: Rng) -> Any:
        """Return a cache scale of a kind."""
        unit = 0.025 if self.kv_dtype == "int8" else 1.0
        if kind is None:
            return 0.025 if self.kv_dtype == "int8" else None
        shape = {"one": (1,), "head": (self.num_kv_heads, 1), "channel": (self.num_kv_heads, dim)}[kind]
        return (unit * rng.uniform(0.5, 1.5, shape)).astype(np.float32)

    def sink_values(self, rng: Rng) -> np.ndarray | None:
        """Return sinks [num_qo_heads] of a kind."""
        if self.sinks is None:
            return None
        sinks = rng.normal(size=self.num_qo_heads).astype(np.float32)
        if self.sinks == "some":
            sinks[::2] = -np.inf
        return sinks + np.float32(1e4) if self.sinks == "huge" else sinks

    def common(self, problem: Problem, num_rows: int, rng: Rng, array: Callable[[np.ndarray], Any]) -> None:
        """Add the options that every family with a cache takes."""
        problem.pass_on(
            array,
            sm_scale=self.sm_scale,
            sinks=self.sink_values(rng),
            k_scale=self.scale(self.k_scale, self.dims[0], rng),
            v_scale=self.scale(self.v_scale, self.dims[1], rng),
            lse_base=self.lse_base,
            return_lse=True,
        )
        if self.out_dtype is not None:
            problem.kwargs["out_dtype"] = self.out_dtype
        if self.given_out:
            rows = num_rows + self.extra_rows
            lse_dtype = "float64" if self.q_dtype == "float64" else "float32"
            form = {"out": ((self.dims[1],), self.out_dtype or self.q_dtype), "lse": ((), lse_dtype)}
            for name, (tail, dtype) in form.items():
                shape = (rows + 2 * GUARD_ROWS, self.num_qo_heads, *tail)
                guard = array(np.full(shape, UNTOUCHED).astype(dtype_from_name(dtype)))
                problem.guards.append(guard)
                problem.kwargs[name] = guard[GUARD_ROWS : GUARD_ROWS + rows]
                problem.oracle_kwargs[name] = np.full((rows, *shape[1:]), UNTOUCHED)


@dataclass(frozen=True, repr=False)
class GatherCase(CacheCase):
    """A gather of `width` listed tokens per row: duplicates, tokens out of range, counts past the width, junk."""

    family: ClassVar[str] = "gather_attention"
    kv_lens: tuple[int, ...] = (5,)
    qo_lens: tuple[int, ...] | None = None  # None = one row per request and no qo_indptr
    width: int = 8
    output_gate: bool = False

    def build(self, array: Callable[[np.ndarray], Any] = np.asarray) -> Problem:
        """Return the arrays and arguments; `array` moves each to its device."""
        rng = np.random.default_rng(self.seed)
        pool = self.pool(self.kv_lens, rng)
        lens = np.array(self.qo_lens if self.qo_lens is not None else [1] * len(self.kv_lens), np.int64)
        num_rows = int(lens.sum())
        q = self.query(num_rows, rng)
        limit = np.concatenate([np.repeat(self.kv_lens, lens), np.zeros(self.extra_rows, np.int64)]) + 2
        indices = rng.integers(-2, limit[:, None], (len(q), self.width)).astype(np.int32)
        counts = rng.integers(-1, self.width + 3, len(q)).astype(np.int32)
        junk = rng.choice(np.array([-(2**31), 2**31 - 1], np.int32), indices.shape)
        indices = np.where(np.arange(self.width) < counts[:, None], indices, junk)
        qo_indptr = None if self.qo_lens is None else np.concatenate([[0], np.cumsum(lens)]).astype(np.int32)
        kv = pool.paged_kv(self.layout, self.kv_layout, rng, array)
        problem = Problem(
            [array(q), kv, array(indices), array(counts), qo_indptr], {}, [q, pool.cache(), indices, counts, qo_indptr]
        )
        self.common(problem, num_rows, rng, array)
        if self.output_gate:
            gate = random_values((len(q), self.num_qo_heads, self.dims[1]), self.q_dtype, rng)
            problem.pass_on(array, output_gate=gate)
        return problem


@dataclass(frozen=True, repr=False)
class MergeCase(Case):
    """A merge of `states` states: some absent (-inf, with poison for v), all strided."""

    form: str = "states"  # "state", "in_place", "masked"
    rows: int = 3
    states: int = 2
    heads: int = 2
    head_dim: int = 64
    s_dtype: str = "float32"

    @property
    def family(self) -> str:  # type: ignore[override]
        """The function's name in nbattn and nbattn.oracle."""
        return {"states": "merge_states", "state": "merge_state"}.get(self.form, "merge_state_in_place")

    def build(self, array: Callable[[np.ndarray], Any] = np.asarray) -> Problem:
        """Return the arrays and arguments; `array` moves each to its device."""
        rng = np.random.default_rng(self.seed)
        states = self.states if self.form == "states" else 2
        v = random_values((self.rows, states, self.heads, self.head_dim), self.q_dtype, rng)
        s = (4 * rng.normal(size=v.shape[:3])).astype(dtype_from_name(self.s_dtype))
        absent = rng.random(s.shape) < 0.3
        s[absent] = -np.inf
        poison(v, rng, absent[..., None])
        parts = [v, s] if self.form == "states" else [v[:, 0], s[:, 0], v[:, 1], s[:, 1]]
        problem = Problem([array(spread(x, rng)) for x in parts], {}, [x.copy() for x in parts])
        if self.form == "masked":
            mask = (rng.random(self.rows) < 0.5).astype(np.int32)
            problem.args.append(array(mask))
            problem.oracle_args.append(mask)
        problem.pass_on(array, lse_base=self.lse_base)
        return problem

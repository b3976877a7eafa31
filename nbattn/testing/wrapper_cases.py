"""Random calls of the cascade wrappers, driven under the signatures of their definitions in the oracle."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from nbattn.testing.cases import Case, Problem
from nbattn.testing.draws import GROUPS, HEAD_DIMS, PAGE_SIZES, pick, random_lens, random_levels, sometimes
from nbattn.testing.memory import Rng, poison, spread
from nbattn.testing.pools import random_pool, random_values

Move = Callable[[np.ndarray], Any]
TABLE_NAMES = ("qo_indptr_arr", "paged_kv_indptr_arr", "paged_kv_indices_arr", "paged_kv_last_page_len")


@dataclass(frozen=True, repr=False)
class WrapperCase(Case):
    """A plan and a run of the wrapper behind `face`, one of `WRAPPERS`; all but the dtypes is drawn from the seed."""

    face: str = "multi_level_cascade"
    kv_dtype: str | None = None

    @property
    def family(self) -> str:  # type: ignore[override]
        """The definition's name in nbattn.oracle."""
        return self.face

    def with_dtypes(self, q_dtype: str, kv_dtype: str | None = None) -> WrapperCase:
        """Return the same case in other dtypes."""
        return type(self)(self.seed, q_dtype, None, self.lse_base, self.face, kv_dtype)

    def function(self) -> Callable[..., Any]:
        """Return the wrapper as a function of its definition's signature."""
        return run_multi_level if self.face == "multi_level_cascade" else run_shared_prefix

    def build(self, array: Move = np.asarray) -> Problem:
        """Return the arrays and arguments; `array` moves each to its device."""
        rng = np.random.default_rng(self.seed)
        problem = Problem()
        heads, dim, page_size = pick(rng, (1, 1, 2, 3)), pick(rng, HEAD_DIMS), pick(rng, PAGE_SIZES)
        num_heads = heads * pick(rng, GROUPS)
        layout = pick(rng, ("NHD", "HND"))
        if self.face == "multi_level_cascade":
            levels = random_levels(rng, page_size)
        else:
            rows = rng.choice([0, 1, 2, 5, 9], int(rng.integers(1, 5)))
            rows = sometimes(rng, np.ones_like(rows), rows, 0.5)  # one row each: the decode wrapper
            levels = ((tuple(np.cumsum([0, *rows]).tolist()), random_lens(rng, len(rows), page_size, 70), False),)
        num_rows = max(offsets[-1] for offsets, _, _ in levels)
        extra = 2 if self.face == "multi_level_cascade" and rng.random() < 0.25 else 0
        q = random_values((num_rows + extra, num_heads, dim), self.q_dtype, rng)
        poison(q[num_rows:], rng)
        form: dict[str, Any] = {"heads": heads, "dims": (dim, dim), "dtype": self.kv_dtype or self.q_dtype}
        lens = tuple(n for _, kv_lens, _ in levels for n in kv_lens)
        shared = sometimes(rng, True, False)
        pool = random_pool(rng, lens, page_size=page_size, shared=shared, **form)
        pair = [x if layout == "NHD" else x.swapaxes(1, 2) for x in (pool.k, pool.v)]
        moved = [array(spread(x, rng)) for x in pair]
        tables = list(level_tables(levels, pool.tables, page_size))
        if self.face == "multi_level_cascade":
            problem.args, problem.oracle_args = [array(q), moved, *tables], [q, pair, *tables]
            cascade_options(problem, rng)
        else:
            prefix = random_values((2, int(rng.choice([0, 1, 15, 70])), heads, dim), str(form["dtype"]), rng)
            prefix = prefix if layout == "NHD" else prefix.swapaxes(1, 2)
            own = [table[0] for table in tables]
            args: list[Any] = [*own[1:], own[0]]
            problem.args = [array(q), *(array(spread(x, rng)) for x in prefix), moved, *args]
            problem.oracle_args = [q, *prefix, pair, *args]
            problem.pass_on(array, causal=bool(rng.random() < 0.5))
        needs_scale = form["dtype"] == "int8"
        unit = 0.025 if needs_scale else 1.0
        scales = {
            name: (unit * rng.uniform(0.5, 1.5, (heads, 1))).astype(np.float32) for name in ("k_scale", "v_scale")
        }
        sinks = rng.normal(size=num_heads).astype(np.float32)
        scales = {name: x if needs_scale else sometimes(rng, x) for name, x in scales.items()}
        problem.pass_on(array, sinks=sometimes(rng, sinks), **scales)
        problem.pass_on(array, kv_layout=layout, lse_base=self.lse_base, return_lse=True)
        return problem


def level_tables(levels: Any, tables: list[np.ndarray], page_size: int) -> tuple[list[np.ndarray], ...]:
    """Return the four lists that `plan` takes, from each level's shape and the page ids of all requests in turn."""
    lists: tuple[list[np.ndarray], ...] = ([], [], [], [])
    begin = 0
    for offsets, kv_lens, _ in levels:
        own = tables[begin : begin + len(kv_lens)]
        begin += len(kv_lens)
        lens = np.array(kv_lens, np.int64)
        values = (
            offsets,
            np.cumsum([0, *(len(ids) for ids in own)]),
            np.concatenate([*own, [2**30]]),  # never read
            np.where(lens > 0, (lens - 1) % page_size + 1, -9),
        )
        for into, x in zip(lists, values, strict=True):
            into.append(np.array(x, np.int32))
    return lists


def cascade_options(problem: Problem, rng: Rng) -> None:
    """Add what only the multi-level wrapper's `plan` takes."""
    head_dim = problem.oracle_args[0].shape[2]
    modes = ("NONE", "NONE", "ALIBI") + (("ROPE_LLAMA",) if head_dim % 2 == 0 else ())
    mode = pick(rng, modes)
    rotary = {"rope_theta": 100.0, "rope_scale": 2.5} if mode == "ROPE_LLAMA" and rng.random() < 0.5 else {}
    problem.pass_on(
        np.asarray, causal=bool(rng.random() < 0.6), pos_encoding_mode=mode, window_left=sometimes(rng, 16, -1),
        logits_soft_cap=sometimes(rng, 2.0), sm_scale=sometimes(rng, 0.2), **rotary,
    )  # fmt: skip


def run_multi_level(
    q: Any,
    paged_kv_cache: Any,
    qo_indptr_arr: list[Any],
    paged_kv_indptr_arr: list[Any],
    paged_kv_indices_arr: list[Any],
    paged_kv_last_page_len: list[Any],
    *,
    kv_layout: str = "NHD",
    sinks: Any = None,
    k_scale: Any = None,
    v_scale: Any = None,
    lse_base: str = "2",
    return_lse: bool = False,
    **planned: Any,
) -> Any:
    """Plan and run `nbattn.MultiLevelCascadeAttentionWrapper`."""
    from nbattn import MultiLevelCascadeAttentionWrapper

    wrapper = MultiLevelCascadeAttentionWrapper(len(qo_indptr_arr), kv_layout=kv_layout)
    lists = (qo_indptr_arr, paged_kv_indptr_arr, paged_kv_indices_arr, paged_kv_last_page_len)
    wrapper.plan(*lists, *sizes(q, paged_kv_cache[0], kv_layout), **planned)
    options = {"sinks": sinks, "k_scale": k_scale, "v_scale": v_scale, "lse_base": lse_base, "return_lse": return_lse}
    wrapper.run(q, paged_kv_cache, **options)
    return wrapper.run(q, paged_kv_cache, **options)  # the next layer, by the plan of the first


def run_shared_prefix(
    q: Any,
    k_shared: Any,
    v_shared: Any,
    unique_kv_cache: Any,
    paged_kv_indptr: Any,
    paged_kv_indices: Any,
    paged_kv_last_page_len: Any,
    qo_indptr: Any,
    *,
    kv_layout: str = "NHD",
    causal: bool = False,
    **options: Any,
) -> Any:
    """Run the SharedPrefix wrapper that fits: the decode one for a row per request without a mask."""
    import nbattn

    table = (paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len)
    shape = sizes(q, unique_kv_cache[0], kv_layout)
    if not causal and (np.diff(qo_indptr) == 1).all():
        decode = nbattn.BatchDecodeWithSharedPrefixPagedKVCacheWrapper(kv_layout=kv_layout)
        decode.begin_forward(*table, *shape)
        return decode.forward(q, k_shared, v_shared, unique_kv_cache, **options)
    prefill = nbattn.BatchPrefillWithSharedPrefixPagedKVCacheWrapper(kv_layout=kv_layout)
    prefill.begin_forward(qo_indptr, *table, *shape)
    return prefill.forward(q, k_shared, v_shared, unique_kv_cache, causal, **options)


def sizes(q: Any, k: Any, kv_layout: str) -> tuple[int, int, int, int]:
    """Return num_qo_heads, num_kv_heads, head_dim and page_size of q and the pages of K."""
    page_size, heads = k.shape[1:3] if kv_layout == "NHD" else k.shape[2:0:-1]
    return q.shape[1], heads, q.shape[2], page_size


def random_wrapper_case(face: str, rng: Rng, q_dtype: str, kv_dtype: str | None = None) -> WrapperCase:
    """Return a random case of one of `WRAPPERS`.

    Examples
    --------
    >>> random_wrapper_case("shared_prefix", np.random.default_rng(0), "float32").family
    'shared_prefix'
    """
    return WrapperCase(int(rng.integers(2**31)), q_dtype, None, sometimes(rng, "e", "2"), face, kv_dtype)

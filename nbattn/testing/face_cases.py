"""Random calls of the operator faces: a seed draws shapes, cache, options and poison together."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from nbattn.arrays import dtype_from_name
from nbattn.testing.attention_cases import PagedCase
from nbattn.testing.cases import GUARD_ROWS, UNTOUCHED, Case, Problem
from nbattn.testing.draws import FACES, GROUPS, HEAD_DIMS, KV_DTYPES, PAGE_SIZES, pick, random_lens, sometimes
from nbattn.testing.memory import Rng, poison, spread
from nbattn.testing.pools import Pool, random_pool, random_slots, random_values

LAYERS = 3
JUNK = np.array([-(2**31), 2**31 - 1], np.int32)

Move = Callable[[np.ndarray], Any]  # takes an array to the device under test


@dataclass(frozen=True, repr=False)
class FaceCase(Case):
    """A call of `face`, all of it drawn from the seed but the dtypes."""

    face: str = "gqa_decode"
    kv_dtype: str | None = None

    @property
    def family(self) -> str:  # type: ignore[override]
        """The function's name in nbattn and nbattn.oracle."""
        return self.face

    def with_dtypes(self, q_dtype: str, kv_dtype: str | None = None) -> FaceCase:
        """Return the same case in other dtypes."""
        return type(self)(self.seed, q_dtype, self.out_dtype, self.lse_base, self.face, kv_dtype)

    def build(self, array: Move = np.asarray) -> Problem:
        """Return the arrays and arguments; `array` moves each to its device."""
        return BUILDERS[self.face](_Draw(self, np.random.default_rng(self.seed), array))


class _Draw:
    """What the faces' cases have in common: a ragged batch over a cache, and the problem that grows from it."""

    def __init__(self, case: FaceCase, rng: Rng, array: Move):
        self.case, self.rng, self.array = case, rng, array
        self.heads, group = pick(rng, (1, 1, 2, 3)), pick(rng, GROUPS)
        self.num_heads = self.heads * group
        self.dim, self.page_size = pick(rng, HEAD_DIMS), pick(rng, PAGE_SIZES)
        batch = int(rng.integers(1, 5))
        self.lens = np.array(random_lens(rng, batch, self.page_size))
        self.rows = rng.choice([0, 1, 2, 5, 9], batch)
        self.extra = sometimes(rng, 2, 0)
        self.problem = Problem()

    @property
    def offsets(self) -> np.ndarray:
        """Row offsets in any dtype that is accepted on the host."""
        return np.cumsum([0, *self.rows]).astype(pick(self.rng, (np.int32, np.int64, np.uint32)))

    @property
    def num_rows(self) -> int:
        """Rows of q, those of no request included."""
        return int(self.rows.sum()) + self.extra

    def data(self, name: str, values: np.ndarray) -> None:
        """Add a data argument: strided and on its device for the face, plain for the oracle."""
        self.problem.kwargs[name] = self.array(spread(values, self.rng))
        self.problem.oracle_kwargs[name] = values

    def plain(self, **values: Any) -> None:
        """Add arguments that stay on the host."""
        self.problem.kwargs.update(values)
        self.problem.oracle_kwargs.update(values)

    def query(self, name: str = "q") -> np.ndarray:
        """Return q, with poison in its rows of no request; the oracle takes it by position."""
        q = random_values((self.num_rows, self.num_heads, self.dim), self.case.q_dtype, self.rng)
        poison(q[self.num_rows - self.extra :], self.rng)
        self.problem.oracle_args.append(q)
        self.problem.kwargs[name] = self.array(spread(q, self.rng))
        return q

    def pages(self, dim_vo: int, **options: Any) -> Pool:
        """Return a pool of pages for the requests."""
        form: dict[str, Any] = {"heads": self.heads, "dims": (self.dim, dim_vo), "dtype": self.kv_dtype}
        return random_pool(self.rng, tuple(self.lens.tolist()), page_size=self.page_size, **form, **options)

    def slots(self, dim_vo: int) -> Pool:
        """Return a fixed cache for the requests."""
        form: dict[str, Any] = {"heads": self.heads, "dims": (self.dim, dim_vo), "dtype": self.kv_dtype}
        return random_slots(self.rng, tuple(self.lens.tolist()), **form)

    @property
    def kv_dtype(self) -> str:
        """The dtype of the cache."""
        return self.case.kv_dtype or self.case.q_dtype

    def layered(self) -> None:
        """Add a 6-D pool, its table and a layer; other layers are poison."""
        unmapped = sometimes(self.rng, True, False)
        pool = self.pages(self.dim, shared=sometimes(self.rng, True, False), unmapped=unmapped)
        layer = int(self.rng.integers(LAYERS))
        blocks = poison(np.empty((len(pool.k), 2, LAYERS, *pool.k.shape[1:]), pool.k.dtype), self.rng)
        blocks[:, 0, layer], blocks[:, 1, layer] = pool.k, pool.v
        self.data("kv_blocks", blocks)
        table = pool.block_table(np.int32 if unmapped else pick(self.rng, (np.int32, np.uint32)))
        self.plain(kv_lookup_table=table, layer_idx=layer)

    def hint(self, longest: Any) -> Any:
        """Return a sizing hint in one of its forms."""
        value = int(longest) + sometimes(self.rng, 100, 0)
        return pick(self.rng, (None, value, np.array([value], np.int64)))

    def sinks(self) -> np.ndarray | None:
        """Return sinks, or None."""
        values = self.rng.normal(size=self.num_heads).astype(np.float32)
        values[self.rng.random(self.num_heads) < 0.2] = -np.inf
        return sometimes(self.rng, values)

    def scale(self, dim: int, *, head_major: bool) -> Any:
        """Return a cache scale in one of its forms; int8 has one always."""
        unit = 0.025 if self.kv_dtype == "int8" else 1.0
        middle = (1,) if head_major else ()
        shape = pick(self.rng, ((), (1,), (dim,), (self.heads, *middle, 1), (self.heads, *middle, dim)))
        value = (unit * self.rng.uniform(0.5, 1.5, shape)).astype(np.float32)
        value = pick(self.rng, (value, value, float(value.flat[0])))
        return value if self.kv_dtype == "int8" else sometimes(self.rng, value)

    def finish(self, dim_vo: int, out_name: str = "out", fold: bool = False) -> Problem:
        """Add where results go, perhaps into given arrays with guards around them."""
        self.problem.pass_on(self.array, lse_base=self.case.lse_base, return_lse=True)
        if sometimes(self.rng, True):
            lse_dtype = "float64" if self.case.q_dtype == "float64" else "float32"
            shape = (self.num_heads * dim_vo,) if fold else (self.num_heads, dim_vo)
            out_dtype = self.case.out_dtype or self.case.q_dtype
            for name, tail, dtype in ((out_name, shape, out_dtype), ("lse", (self.num_heads,), lse_dtype)):
                full = np.full((self.num_rows + 2 * GUARD_ROWS, *tail), UNTOUCHED)
                guard = self.array(full.astype(dtype_from_name(dtype)))
                self.problem.guards.append(guard)
                self.problem.kwargs[name] = guard[GUARD_ROWS : GUARD_ROWS + self.num_rows]
                self.problem.oracle_kwargs[name] = full[: self.num_rows]
        return self.problem


def _gqa_decode(draw: _Draw) -> Problem:
    rng = draw.rng
    draw.rows, draw.extra = np.ones_like(draw.lens), 0
    dim_vo = sometimes(rng, pick(rng, HEAD_DIMS), draw.dim)
    draw.query("query")
    pool = draw.slots(dim_vo)
    rows = [int(table[0]) for table in pool.tables]
    draw.data("key_cache", pool.k[rows])
    draw.data("value_cache", pool.v[rows])
    lengths = np.where((draw.lens == 0) & (rng.random(draw.lens.size) < 0.5), -3, draw.lens)
    draw.plain(lengths=lengths.astype(pick(rng, (np.int32, np.int64))))
    draw.plain(sm_scale=sometimes(rng, pick(rng, (0.0, 0.05, 0.5, 1.0))))
    return draw.finish(dim_vo)


def _over_cache(draw: _Draw) -> Problem:
    rng, problem = draw.rng, draw.problem
    dim_vo = sometimes(rng, pick(rng, HEAD_DIMS), draw.dim)
    q = draw.query()
    fold = sometimes(rng, True, False)
    if fold:
        problem.oracle_args[0] = folded = q.reshape(len(q), draw.num_heads * draw.dim)
        problem.kwargs["q"] = draw.array(spread(folded, rng))
    paged = rng.random() < 0.5
    pool = draw.pages(dim_vo, unmapped=sometimes(rng, True, False)) if paged else draw.slots(dim_vo)
    draw.data("cache_key", pool.k.swapaxes(1, 2))
    draw.data("cache_value", pool.v.swapaxes(1, 2))
    start = pool.block_table(np.int32) if paged else rng.choice(JUNK, draw.lens.size)
    slot_ids = None if paged else np.array([int(table[0]) for table in pool.tables])
    lens = np.cumsum([0, *draw.lens]) if sometimes(rng, True) else draw.lens
    draw.plain(kvcache_start=start, cu_seqlens_q=draw.offsets, cu_seqlens_k=lens, slot_ids=slot_ids)
    draw.plain(max_seqlen_q=draw.hint(draw.rows.max()), max_seqlen_k=draw.hint(draw.lens.max()))
    named = sometimes(rng, True, False)
    draw.plain(num_heads=draw.num_heads if fold or named else None, kv_num_heads=draw.heads if named else None)
    causal = pick(rng, (None, True, False))
    mask = PagedCase(attn_mask=sometimes(rng, pick(rng, ("bool", "additive"))), group_size=draw.num_heads,
                     mask_axes=pick(rng, ("bhnl", "11nl", "b1nl", "1h1l", "hnl", "nl", "l")))  # fmt: skip
    scale = pick(rng, (None, 0.0, 0.3, np.array([0.3], np.float32)))
    draw.plain(is_causal=causal, q_scale=scale, softcap=sometimes(rng, pick(rng, (0, 0.5, 30.0))))
    draw.plain(sliding_window=pick(rng, (None, None, -1, 1, 3, 100)), smooth_softmax=pick(rng, (None, False, True)))
    problem.pass_on(
        draw.array, attn_mask=mask.mask(int(draw.rows.max()), int(draw.lens.max()), draw.lens.size, rng),
        head_sink=draw.sinks(), k_scale=draw.scale(draw.dim, head_major=True),
        v_scale=draw.scale(dim_vo, head_major=True),
    )  # fmt: skip
    if draw.dim > 1 and rng.random() < 0.5:
        _rotary(draw, causal is not False)
    return draw.finish(dim_vo, fold=fold)


def _rotary(draw: _Draw, causal: bool) -> None:
    """Add planes, and perhaps positions and a norm."""
    rng = draw.rng
    positions = int(draw.lens.max()) + int(rng.integers(1, 4))
    angle = rng.uniform(-3, 3, (positions, int(rng.integers(1, draw.dim // 2 + 1))))
    dtype = dtype_from_name(pick(rng, ("float32", "float32", "float16", "float64")))
    planes = {"rope_cos": np.cos(angle).astype(dtype), "rope_sin": np.sin(angle).astype(dtype)}
    draw.problem.pass_on(draw.array, **planes)
    draw.plain(rotary_mode=pick(rng, (None, "half", "interleaved")))
    ids = np.append(rng.integers(0, positions, draw.num_rows - draw.extra), rng.choice(JUNK, draw.extra))
    negative = ((draw.rows > draw.lens) & (draw.lens > 0)).any() and not causal
    draw.plain(position_ids=ids if negative else sometimes(rng, ids))
    if rng.random() < 0.5:
        draw.problem.pass_on(draw.array, q_norm_gain=(rng.normal(size=draw.dim) + 1).astype(np.float32))
        draw.plain(qk_norm_eps=pick(rng, (1e-6, 0.1)), k_norm_gain=sometimes(rng, poison(np.empty(3), rng)))


def _cross(draw: _Draw) -> Problem:
    from nbattn import PagedKVCollection

    rng, problem = draw.rng, draw.problem
    draw.query()
    draw.layered()
    context = rng.integers(0, draw.lens + 1)
    new = draw.lens - context
    for kwargs in (problem.kwargs, problem.oracle_kwargs):
        kwargs["kv_collection"] = PagedKVCollection(
            kwargs.pop("kv_blocks"), context, kwargs.pop("kv_lookup_table"),
            max_prompt_length=draw.hint(new.max()), max_cache_length=draw.hint(context.max()),
        )  # fmt: skip
    draw.plain(q_input_row_offsets=draw.offsets, kv_input_row_offsets=np.cumsum([0, *new]))
    draw.plain(q_max_seq_len=draw.hint(draw.rows.max()), scale=pick(rng, (0.0, 0.1, 0.4)))
    masks = ("null", "causal", "sliding_window_causal", "sliding_window_noncausal", "chunked", "chunked_causal")
    draw.plain(mask_str=pick(rng, masks), local_window_size=pick(rng, (1, 3, 32)))
    draw.plain(q_start=pick(rng, ("cache_length", "bottom_right")), output_dtype=draw.case.out_dtype)
    problem.pass_on(draw.array, sink_weights=draw.sinks())
    return draw.finish(draw.dim, pick(rng, ("out", "output")))


def _qsa(draw: _Draw) -> Problem:
    rng, problem = draw.rng, draw.problem
    draw.lens = np.maximum(draw.lens, draw.rows)
    draw.query()
    draw.layered()
    width = int(rng.choice([1, 3, 16, 130]))
    limit = np.append(np.repeat(draw.lens, draw.rows), np.zeros(draw.extra, np.int64)) + 2
    indices = rng.integers(-2, limit[:, None], (draw.num_rows, width)).astype(np.int32)
    counts = rng.integers(-1, width + 3, draw.num_rows).astype(np.int32)
    indices = np.where(np.arange(width) < counts[:, None], indices, rng.choice(JUNK, indices.shape))
    problem.pass_on(draw.array, token_indices=indices, counts=counts)
    context = draw.lens - draw.rows
    draw.plain(input_row_offsets=draw.offsets, cache_lengths=context, page_stride=pick(rng, (-1, None, np.array([-1]))))
    draw.plain(max_prompt_length=draw.hint(draw.rows.max()), max_cache_length=draw.hint(context.max()))
    draw.plain(scale=pick(rng, (0.0, 0.1, 0.4)), group=sometimes(rng, draw.num_heads // draw.heads))
    draw.plain(warps=sometimes(rng, 4), unroll=sometimes(rng, 2))
    problem.kwargs["out_dtype"] = draw.case.out_dtype
    gate = random_values((draw.num_rows, draw.num_heads, pick(rng, (1, draw.dim))), draw.case.q_dtype, rng)
    problem.pass_on(
        draw.array, k_scale=draw.scale(draw.dim, head_major=False), v_scale=draw.scale(draw.dim, head_major=False),
        output_gate=sometimes(rng, gate),
    )  # fmt: skip
    return draw.finish(draw.dim, pick(rng, ("out", "output")))


BUILDERS = dict(zip(FACES, (_gqa_decode, _over_cache, _cross, _qsa), strict=True))


def random_face_case(face: str, rng: Rng, q_dtype: str | None = None, kv_dtype: str | None = None) -> FaceCase:
    """Return a random case of one of `FACES`, also for the dtypes given.

    Examples
    --------
    >>> import numpy as np
    >>> random_face_case("gqa_decode", np.random.default_rng(0), "float32", "int8").out_dtype
    'float32'
    """
    q_dtype = q_dtype or pick(rng, tuple(KV_DTYPES))
    kv_dtype = kv_dtype or pick(rng, KV_DTYPES[q_dtype])
    if face == "generic_cross_attention_kv_cache" and kv_dtype == "int8":
        kv_dtype = None  # it has no scales
    out_dtype = "float32" if face == "gqa_decode" else sometimes(rng, pick(rng, ("float16", "bfloat16", "float32")))
    out_dtype = None if face == "attention_over_cache" else out_dtype
    return FaceCase(int(rng.integers(2**31)), q_dtype, out_dtype, sometimes(rng, "e", "2"), face, kv_dtype)

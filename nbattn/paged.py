"""`paged_attention` and `cascade_attention`: query rows over ranges of positions of one cache or of several levels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from nbattn import contracts
from nbattn.arrays import Array, confirm_target
from nbattn.engine import kept_plans, run
from nbattn.errors import ContractError
from nbattn.kv_cache import PagedKV
from nbattn.planning import Plan
from nbattn.problem import ArrayOptions, Level, Options, PlainOptions, Problem, Rope
from nbattn.repeat import RememberedCall, remember

Result = Array | tuple[Array, Array]


def paged_attention(
    q: Array,
    kv: PagedKV,
    qo_indptr: Array | None = None,
    *,
    causal: bool = True,
    sm_scale: float | None = None,
    window_left: int = -1,
    chunk_size: int | None = None,
    logits_soft_cap: float | None = None,
    sinks: Array | None = None,
    attn_mask: Array | None = None,
    alibi_slopes: Array | None = None,
    rope: Rope | None = None,
    k_scale: Any = None,
    v_scale: Any = None,
    kv_start: Array | None = None,
    q_positions: Array | None = None,
    plan: Plan | None = None,
    split_size: int | None = None,
    out_dtype: Any = None,
    out: Array | None = None,
    lse: Array | None = None,
    return_lse: bool = False,
    lse_base: str = "2",
    target: str | None = None,
) -> Result:
    """Attend with ragged query rows over a paged KV cache: decode, append, cross attention.

    ``out[row, h] = softmax(q[row, h] @ K.T * sm_scale + bias) @ V`` over the keys that the row keeps; query head `h`
    reads KV head ``h // (num_qo_heads // num_kv_heads)``.

    Parameters
    ----------
    q : array, shape [total_q, num_qo_heads, head_dim_qk], float16 | bfloat16 | float32 | float64 (CPU only)
        Query rows of all requests, one after another.
    kv : PagedKV
        The cache; its dtype is q's, or float8_e4m3fn, float8_e5m2 or int8 beside a 16-bit or float32 q.
    qo_indptr : int array, shape [batch + 1], optional
        Request b owns rows ``qo_indptr[b]`` to ``qo_indptr[b + 1]``. None: one row per request (decode),
        and no row more. It starts at 0. Rows from ``qo_indptr[-1]`` on are no request's and get no result. With more
        rows than keys (``n > kv_len``) and `causal`, the first ``n - kv_len`` rows of a request stand before its first
        key, unless `q_positions` says otherwise: they hold 0, and an lse of -inf or the sink's.
    causal : bool
        Keep keys at positions up to the row's own. Row i of n stands at ``kv_start + kv_len - n + i``. True by default
        here; False by default of a `Level`.
    sm_scale : float, optional
        Softmax scale, ``1 / sqrt(head_dim_qk)`` by default. 0 is honoured.
    window_left : int
        Keep keys at positions from ``p - window_left``: ``window_left + 1`` keys with the row's own. Negative is off.
    chunk_size : int, optional
        Keep keys whose ``position // chunk_size`` is the row's.
    logits_soft_cap : float, optional
        ``cap * tanh(score / cap)`` before any bias. None and 0 are off.
    sinks : float array, shape [num_qo_heads], optional
        Logit of a virtual key without value, natural-log units; counted in the lse.
    attn_mask : bool or float array, broadcasting to [batch, num_qo_heads, max rows, max keys], optional
        True keeps; floats are added to the score and -inf drops.
    alibi_slopes : float array, shape [num_qo_heads], optional
        Adds ``slope * (key position - row position)``.
    rope : Rope, optional
        Rotate q and keys at their positions.
    k_scale, v_scale : float or array broadcasting to [num_kv_heads, head_dim], optional
        The cache holds ``k / k_scale`` and ``v / v_scale``. Required for int8.
    kv_start : int array, shape [batch], optional
        Position of each request's first key, 0 by default.
    q_positions : int array, shape [total_q], optional
        Position of each row, instead of the rule above.
    plan : Plan, optional
        A plan made by `nbattn.plan` for these lengths and options. Without one, calls over a table (`kv` and what its
        `with_pages` returns) share a plan that lives as long as the table.
    split_size : int, optional
        Keys of one split of a long range; with it results do not depend on the batch around a request.
    out_dtype : dtype, optional
        float16, bfloat16, float32 or q's own (default).
    out, lse : array, optional
        Where to write: exactly the shapes and dtypes that are returned. Memory that is also read, or that of the other,
        is refused; a planned call that is repeated on other arrays does not look at where they lie.
    return_lse : bool
        Return ``(out, lse)``.
    lse_base : {"2", "e"}
        Unit of the lse.
    target : {"cpu", "cuda", "gpu"}, optional
        Confirms what the arrays say; never moves anything.

    Returns
    -------
    out : array, shape [total_q, num_qo_heads, head_dim_vo]
        0 in rows that keep no key. Rows of no request stay untouched in a given `out` or `lse`; a new one holds 0 and
        -inf there.
    lse : array, shape [total_q, num_qo_heads], float32 (float64 for float64 inputs)
        Log-sum-exp of the scores, -inf where no key is kept. Only with `return_lse`.

    Raises
    ------
    ContractError
        If an argument breaks a rule; nothing is written.
    TargetError
        If the target cannot run here.

    Notes
    -----
    The same inputs give the same bits, run after run. Accumulation is in float32 (float64 for float64).

    Examples
    --------
    >>> import numpy as np, nbattn
    >>> k = np.zeros((1, 4, 1, 2), np.float32)
    >>> v = np.arange(8, dtype=np.float32).reshape(1, 4, 1, 2)
    >>> kv = nbattn.PagedKV.from_slots(k, v, np.array([3]))
    >>> nbattn.paged_attention(np.ones((1, 1, 2), np.float32), kv)
    array([[[2., 3.]]], dtype=float32)
    """
    values = (
        sm_scale, window_left, chunk_size, logits_soft_cap, rope, kv_start, q_positions, None, split_size, out_dtype,
        return_lse, lse_base, target,
    )  # fmt: skip
    arrays = sinks, attn_mask, alibi_slopes, k_scale, v_scale
    again = _again(q, ((kv, qo_indptr, causal),), values, arrays, plan, out, lse)
    return (again or _first(q, [Level(kv, qo_indptr, causal)], values, arrays, plan, out, lse))[0]


def cascade_attention(
    q: Array,
    levels: list[Level],
    *,
    sm_scale: float | None = None,
    window_left: int = -1,
    chunk_size: int | None = None,
    logits_soft_cap: float | None = None,
    sinks: Array | None = None,
    attn_mask: Array | None = None,
    alibi_slopes: Array | None = None,
    rope: Rope | None = None,
    k_scale: Any = None,
    v_scale: Any = None,
    kv_start: Array | None = None,
    q_positions: Array | None = None,
    plan: Plan | None = None,
    split_size: int | None = None,
    out_dtype: Any = None,
    out: Array | None = None,
    lse: Array | None = None,
    return_lse: bool = False,
    lse_base: str = "2",
    target: str | None = None,
) -> Result:
    """Attend over several levels of keys that share prefixes, as over their concatenation.

    The keys of a level stand after those of the levels above it, for every row; level 0 is the root. Options are those
    of `paged_attention`; `kv_start`, `attn_mask` and the row positions refer to the requests of the last level, and the
    mask's key axis runs over all levels.

    Parameters
    ----------
    q : array, shape [total_q, num_qo_heads, head_dim_qk]
        Query rows; every level's `qo_indptr` refers to them.
    levels : list of Level
        Caches (they may lie in different pools), offsets and causality. A row outside a level's offsets gets nothing
        from it.

    Returns
    -------
    out, lse
        As `paged_attention`.

    Examples
    --------
    >>> import numpy as np, nbattn
    >>> shared = np.zeros((1, 6, 1, 2), np.float32)
    >>> own = np.ones((2, 4, 1, 2), np.float32)
    >>> levels = [
    ...     nbattn.Level(nbattn.PagedKV.from_slots(shared, shared, np.array([6])), np.array([0, 2])),
    ...     nbattn.Level(nbattn.PagedKV.from_slots(own, own, np.array([2, 0])), causal=True),
    ... ]
    >>> nbattn.cascade_attention(np.zeros((2, 1, 2), np.float32), levels)[:, 0, 0].tolist()
    [0.25, 0.0]
    """
    values = (
        sm_scale, window_left, chunk_size, logits_soft_cap, rope, kv_start, q_positions, None, split_size, out_dtype,
        return_lse, lse_base, target,
    )  # fmt: skip
    arrays = sinks, attn_mask, alibi_slopes, k_scale, v_scale
    return perform(q, levels, values, arrays, plan, out, lse)[0]


def attend(
    q: Array, levels: list[Level], *, plan: Plan | None = None, out: Array | None = None, lse: Array | None = None,
    **options: Any,
) -> Result:  # fmt: skip
    """Return the result of `cascade_attention`; operator faces may add a `prepare` for q, which they have checked."""
    arrays = {name: options.pop(name) for name in ArrayOptions._fields if name in options}
    return perform(q, levels, PlainOptions(**options), ArrayOptions(**arrays), plan, out, lse)[0]


def perform(
    q: Array, levels: list[Level], plain: tuple[Any, ...], arrays: tuple[Any, ...], plan: Plan | None,
    out: Array | None, lse: Array | None,
) -> tuple[Result, RememberedCall | None]:  # fmt: skip
    """Check and run `cascade_attention`; return its result, and the call if it may be repeated.

    `plain` and `arrays` are the fields of `PlainOptions` and `ArrayOptions`, or tuples in their order.
    """
    again = None
    if isinstance(levels, (list, tuple)) and levels and all(type(x) is Level for x in levels):
        fields = [(x.kv, x.qo_indptr, x.causal) for x in levels]
        again = _again(q, fields, plain, arrays, plan, out, lse)
    if again is None:
        contracts.check_level_caches(levels)
    return again or _first(q, levels, plain, arrays, plan, out, lse)


def _again(
    q: Array, levels: Sequence[tuple[Any, Any, Any]], plain: tuple[Any, ...], arrays: tuple[Any, ...],
    plan: Plan | None, out: Any, lse: Any,
) -> tuple[Result, RememberedCall] | None:  # fmt: skip
    """Run a call that its plan remembers, or a plan kept for its table; None: there is none, and nothing was done.

    `levels` are the fields of each `Level`.
    """
    for known in kept_plans(levels[-1][0]) if plan is None else (plan,):
        call = known.last_call if isinstance(known, Plan) else None
        if call is not None:
            result = call.again(q, levels, plain, arrays, out, lse)
            if result is not None:
                return result, call
    return None


def _first(
    q: Array, levels: Any, plain: tuple[Any, ...], arrays: tuple[Any, ...], plan: Plan | None, out: Any, lse: Any
) -> tuple[Result, RememberedCall | None]:
    """Check and run a call that nothing remembers; return its result, and the call if it may be repeated."""
    given = PlainOptions._make(plain)
    problem = checked_problem(q, levels, given, ArrayOptions._make(arrays), out, lse)
    used, launch = run(problem, plan, given.split_size)
    used.last_call = call = remember(problem, used, levels, plain, arrays, (out, lse), launch)
    return ((problem.out, problem.lse) if given.return_lse else problem.out), call


def checked_problem(
    q: Array, levels: Any, given: PlainOptions, arrays: ArrayOptions, out: Any = None, lse: Any = None
) -> Problem:
    """Return a call that keeps every rule, ready to run: nothing is planned or compiled yet."""
    checked, library = contracts.check_levels(levels, q)
    name = confirm_target(given.target, library)
    options = _checked_options(q, checked, given, arrays, library)
    dim_vo = checked[-1].kv.head_dim_vo
    results = contracts.check_results(q, dim_vo, out, lse, given.out_dtype, given.return_lse, given.lse_base)
    if out is not None or lse is not None:
        read = [("k, v", pages) for level in checked for pages in (level.kv.k, level.kv.v)]
        read += [("q", q), *zip(ArrayOptions._fields, options.arrays, strict=True)]
        contracts.check_no_overlap(out, lse, read)
    return Problem(name, q, checked, options, *results)


def _checked_options(
    q: Array, levels: tuple[Level, ...], given: PlainOptions, arrays: ArrayOptions, library: str
) -> Options:
    kv, batch = levels[-1].kv, levels[-1].kv.batch_size
    num_heads, dim_qk, dim_vo, rope = q.shape[1], kv.head_dim_qk, kv.head_dim_vo, given.rope
    if rope is not None and not isinstance(rope, Rope):
        raise ContractError(f"rope: must be a nbattn.Rope, got {type(rope).__name__}.")
    if rope is not None and dim_qk % 2:
        raise ContractError(f"rope: needs an even head size, got {dim_qk}.")
    return Options(
        sm_scale=contracts.check_sm_scale(given.sm_scale, dim_qk),
        window_left=contracts.check_window(given.window_left),
        chunk_size=contracts.check_chunk(given.chunk_size),
        soft_cap=contracts.check_soft_cap(given.logits_soft_cap),
        sinks=contracts.check_heads_vector("sinks", arrays.sinks, q, library, only_above=True),
        attn_mask=contracts.check_mask(arrays.attn_mask, levels, num_heads, library),
        alibi_slopes=contracts.check_heads_vector("alibi_slopes", arrays.alibi_slopes, q, library),
        rope=rope,
        k_scale=contracts.check_cache_scale("k_scale", arrays.k_scale, kv, dim_qk, library),
        v_scale=contracts.check_cache_scale("v_scale", arrays.v_scale, kv, dim_vo, library),
        kv_start=contracts.check_row_ints("kv_start", given.kv_start, batch, library, at_least=0),
        q_positions=contracts.check_row_ints("q_positions", given.q_positions, q.shape[0], library),
        prepare=given.prepare,
        lse_base=given.lse_base,
    )

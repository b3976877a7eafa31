"""attention_over_cache: every parameter on both caches, and a cache that is never written."""

import numpy as np
import pytest

import nbattn
from nbattn import ContractError, oracle
from nbattn.testing import assert_close, expect, poison, spread

LAYOUTS = ("continuous", "paged")
NEW, CACHED = (3, 2, 5, 4), (7, 0, 12, 3)  # an empty cache, and a first row before the first key
HEADS, KV_HEADS, DK, DV, MAX_SEQ, BLOCK, EXTRA = 4, 2, 8, 6, 14, 4, 2
ROWS = sum(NEW)


def problem(layout, q_dtype="float32", kv_dtype=None, seed=0, folded=False):
    """Return the arguments; q's rows past the end, stale slots, unused blocks and all gaps are poison."""
    rng = np.random.default_rng(seed)
    q = rng.normal(size=(ROWS + EXTRA, HEADS, DK)).astype(q_dtype)
    poison(q[ROWS:], rng)
    stale = np.arange(MAX_SEQ) >= np.array(CACHED)[:, None]
    caches = []
    order = rng.permutation(20)[: 4 * len(CACHED)].reshape(len(CACHED), 4)
    for dim in (DK, DV):
        x = (2 * rng.normal(size=(len(CACHED), MAX_SEQ, KV_HEADS, dim))).astype(kv_dtype or q_dtype)
        poison(x, rng, stale[..., None, None])
        if layout == "paged":
            pool = poison(np.empty((20, BLOCK, KV_HEADS, dim), x.dtype), rng)
            padded = np.concatenate([x, poison(np.empty((len(x), 16 - MAX_SEQ, *x.shape[2:]), x.dtype), rng)], axis=1)
            pool[order.reshape(-1)] = padded.reshape(-1, BLOCK, *x.shape[2:])
            x = pool
        caches.append(spread(x.swapaxes(1, 2), rng))
    table = np.where(np.arange(4) * BLOCK < np.array(CACHED)[:, None], order, 2**30).astype(np.int32)
    return {
        "q": spread(q.reshape(len(q), -1) if folded else q, rng),
        "cache_key": caches[0],
        "cache_value": caches[1],
        "kvcache_start": table if layout == "paged" else np.full(len(CACHED), 2**30, np.int32),
        "cu_seqlens_q": np.cumsum([0, *NEW]).astype(np.int32),
        "cu_seqlens_k": np.array(CACHED, np.int32),
        **({"num_heads": HEADS} if folded else {}),
    }


def check(arguments, **options):
    """Return (out, lse) after comparing them with the oracle."""
    arguments = {**arguments, **options}
    actual = nbattn.attention_over_cache(**arguments, return_lse=True)
    q = arguments.pop("q")
    assert_close(actual, expect(oracle.attention_over_cache, q, **arguments))
    return actual


def planes(rotary_dim=DK, positions=MAX_SEQ, dtype=np.float32, seed=1):
    angle = np.random.default_rng(seed).uniform(-3, 3, (positions, rotary_dim // 2))
    return {"rope_cos": np.cos(angle).astype(dtype), "rope_sin": np.sin(angle).astype(dtype)}


def random(*shape, seed=2):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


ROPE = planes()
NORM = {**ROPE, "q_norm_gain": random(DK) + 2, "qk_norm_eps": 1e-5}
SCALE_FORMS = {
    "number": 0.7, "0-d": np.array(0.7, "f"), "one": np.array([0.7], "f"), "channel": random(DK),
    "1, channel": random(1, DK), "1, 1, channel": random(1, 1, DK), "head": random(KV_HEADS, 1, 1),
    "head and channel": random(KV_HEADS, 1, DK),
}  # fmt: skip
CHANGES = {
    "is_causal": ({}, {"is_causal": False}),
    "q_scale": ({}, {"q_scale": 0.9}),
    "q_scale array": ({}, {"q_scale": np.array([0.9], np.float32)}),
    "q_scale zero": ({}, {"q_scale": 0}),
    "softcap": ({}, {"softcap": 0.8}),
    "sliding_window": ({}, {"sliding_window": 3}),
    "sliding_window alone": ({"is_causal": False}, {"is_causal": False, "sliding_window": 3}),
    "smooth_softmax": ({}, {"smooth_softmax": True}),
    "head_sink": ({}, {"head_sink": random(HEADS)}),
    "attn_mask bool": ({}, {"attn_mask": random(4, 1, 5, 12) > 0}),
    "attn_mask additive": ({}, {"attn_mask": np.where(random(4, HEADS, 5, 12) > 0.8, -np.inf, random(5, 12))}),
    "attn_mask per request": ({}, {"attn_mask": random(4, 1, 1, 12)}),
    "rope": ({}, ROPE),
    "rope partial": (ROPE, planes(4)),
    "rope 16-bit planes": ({}, planes(dtype=np.float16)),
    "rotary_mode": (ROPE, {**ROPE, "rotary_mode": "interleaved"}),
    "position_ids": (ROPE, {**ROPE, "position_ids": np.arange(ROWS + EXTRA) % MAX_SEQ}),
    "q_norm_gain": (ROPE, NORM),
    "qk_norm_eps": (NORM, {**NORM, "qk_norm_eps": 2.0}),
    **{f"k_scale {name}": ({}, {"k_scale": scale}) for name, scale in SCALE_FORMS.items()},
    "v_scale": ({}, {"v_scale": random(KV_HEADS, 1, DV)}),
    "v_scale number": ({}, {"v_scale": 3}),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("before", "after"), CHANGES.values(), ids=CHANGES)
def test_parameters_that_change_values(before, after, layout):
    arguments = problem(layout)
    out, _ = check(arguments, **before)
    assert np.abs(check(arguments, **after)[0] - out)[:ROWS].max() > 1e-3


NO_CHANGES = {
    "max_seqlen_q": ({}, {"max_seqlen_q": 5}),
    "max_seqlen_q array": ({}, {"max_seqlen_q": np.array([99], np.uint32)}),
    "max_seqlen_k": ({}, {"max_seqlen_k": 12}),
    "max_seqlen_k array": ({}, {"max_seqlen_k": np.array(10**6)}),
    "num_heads": ({}, {"num_heads": HEADS, "kv_num_heads": KV_HEADS}),
    "k_norm_gain": ({}, {"k_norm_gain": random(DK)}),
    "k_norm_gain and qk_norm_eps": ({}, {"k_norm_gain": random(DK), "qk_norm_eps": 1.0}),
    "k_norm_gain beside q's": (NORM, {**NORM, "k_norm_gain": random(DK)}),
    "is_causal": ({}, {"is_causal": True}),
    "softcap": ({}, {"softcap": 0}),
    "sliding_window": ({}, {"sliding_window": -1}),
    "sliding_window long": ({}, {"sliding_window": 12}),
    "smooth_softmax": ({}, {"smooth_softmax": False}),
    "smooth_softmax beside a sink": (
        {"head_sink": random(HEADS)},
        {"head_sink": random(HEADS), "smooth_softmax": True},
    ),
    "head_sink of 0": ({"smooth_softmax": True}, {"head_sink": np.zeros(HEADS)}),
    "head_sink of -inf": ({}, {"head_sink": np.full(HEADS, -np.inf, np.float32)}),
    "rotary_mode": (ROPE, {**ROPE, "rotary_mode": "half"}),
    "position_ids": (
        ROPE,
        {**ROPE, "position_ids": np.array([4, 5, 6, -2, -1, 7, 8, 9, 10, 11, -1, 0, 1, 2, 999, -7])},
    ),
    "k_scale, v_scale of 1": ({}, {"k_scale": 1.0, "v_scale": np.ones((KV_HEADS, 1, DV), np.float32)}),
    "attn_mask wide": ({"attn_mask": random(5, 12) > 0}, {"attn_mask": np.pad(random(5, 12) > 0, (0, 3))}),
    "strided planes": (ROPE, {name: np.repeat(x, 2, axis=1)[:, ::2] for name, x in ROPE.items()}),
    "target": ({}, {"target": "cpu"}),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("before", "after"), NO_CHANGES.values(), ids=NO_CHANGES)
def test_parameters_that_change_nothing(before, after, layout):
    arguments = problem(layout)
    expected = nbattn.attention_over_cache(**arguments, **before, return_lse=True)
    actual = nbattn.attention_over_cache(**arguments, **after, return_lse=True)
    for a, e in zip(actual, expected, strict=True):
        np.testing.assert_array_equal(a, e)


TOGETHER = {
    **NORM, **planes(4), "rotary_mode": "interleaved", "position_ids": np.arange(ROWS + EXTRA)[::-1] % MAX_SEQ,
    "attn_mask": np.where(random(4, 1, 5, 12) > 1, -np.inf, random(HEADS, 1, 12)), "is_causal": False, "q_scale": 0.6,
    "softcap": 1.5, "sliding_window": 6, "head_sink": random(HEADS), "lse_base": "e",
}  # fmt: skip


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("folded", [False, True], ids=["", "folded"])
@pytest.mark.parametrize("seed", range(3))
def test_everything_together(layout, folded, seed):
    out, _ = check(
        problem(layout, seed=seed, folded=folded), **TOGETHER, k_scale=random(DK), v_scale=random(KV_HEADS, 1, 1)
    )
    assert out.shape == (ROWS + EXTRA, HEADS * DV) if folded else (ROWS + EXTRA, HEADS, DV)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("q_dtype", "kv_dtype"),
    [("bfloat16", None), ("float32", "int8"), ("bfloat16", "int8"), ("float32", "float8_e4m3fn")],
)
def test_dtypes(layout, q_dtype, kv_dtype):
    scales = {"k_scale": 0.3 * random(KV_HEADS, 1, DK), "v_scale": np.array([0.7], np.float32)}
    arguments = problem(layout, q_dtype, kv_dtype)
    out, _ = check(arguments, **NORM, **scales)
    assert out.dtype == arguments["q"].dtype
    if kv_dtype == "float8_e4m3fn":
        check(arguments)  # without scales they are 1
        check(arguments, v_scale=0.5)
    if kv_dtype == "int8":
        for name in ("k_scale", "v_scale"):
            with pytest.raises(ContractError, match=rf"^{name}: must be given for an int8 cache, got None\.$"):
                nbattn.attention_over_cache(**arguments, **scales | {name: None})


@pytest.mark.parametrize("layout", LAYOUTS)
def test_cumulative_lengths_are_told_by_their_size(layout):
    arguments = problem(layout)
    expected = check(arguments)
    for dtype in (np.int32, np.int64, np.uint32):
        cumulative = np.cumsum([0, *CACHED]).astype(dtype)
        actual = nbattn.attention_over_cache(**arguments | {"cu_seqlens_k": cumulative}, return_lse=True)
        for a, e in zip(actual, expected, strict=True):
            np.testing.assert_array_equal(a, e)


def test_lengths_that_look_cumulative_are_not():
    arguments = problem("continuous") | {"cu_seqlens_k": np.array([0, 1, 2, 3], np.int32)}  # one per request
    arguments["cache_key"], arguments["cache_value"] = (
        np.nan_to_num(arguments[x]) for x in ("cache_key", "cache_value")
    )
    _, lse = check(arguments, q_scale=0)
    assert lse[:, 0].tolist() == [-np.inf] * 4 + [0] + [-np.inf] * 3 + [0, 1] + [
        -np.inf,
        0,
        1,
        np.log2(3, dtype="f"),
        *[-np.inf] * 2,
    ]


def test_slot_ids():
    arguments = problem("continuous")
    for order in ([2, 1, 3, 0], [3, 2, 1, 0]):
        moved = dict(arguments)
        for name in ("cache_key", "cache_value"):
            moved[name] = np.full((6, *arguments[name].shape[1:]), np.nan, np.float32)
            moved[name][order] = arguments[name]
        expected = check(arguments)
        for a, e in zip(check(moved, slot_ids=np.array(order)), expected, strict=True):
            np.testing.assert_array_equal(a, e)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_r4_rows_past_the_end(layout):
    arguments = problem(layout)
    out, lse = check(arguments)
    assert not out[ROWS:].any()
    assert (lse[ROWS:] == -np.inf).all()
    guard, guard_lse = np.full((ROWS + 4, HEADS, DV), 7, np.float32), np.full((ROWS + 4, HEADS), 8, np.float32)
    given = guard[1:-1], guard_lse[1:-1]
    actual = nbattn.attention_over_cache(**arguments, out=given[0], lse=given[1], return_lse=True)
    assert actual[0] is given[0]
    assert actual[1] is given[1]
    np.testing.assert_array_equal(given[0][:ROWS], out[:ROWS])
    np.testing.assert_array_equal(given[1][:ROWS], lse[:ROWS])
    assert (guard[[0, -3, -2, -1]] == 7).all()
    assert (guard_lse[[0, -3, -2, -1]] == 8).all()


def test_a_folded_q_folds_the_result():
    expected = check(problem("paged"))
    folded = problem("paged", folded=True)
    out, lse = nbattn.attention_over_cache(**folded, return_lse=True)
    np.testing.assert_array_equal(out, expected[0].reshape(len(out), -1))
    np.testing.assert_array_equal(lse, expected[1])
    given = np.full((len(out), HEADS * DV + 3), 7, np.float32)
    assert nbattn.attention_over_cache(**folded, out=given[:, :-3]).base is given
    np.testing.assert_array_equal(given[:ROWS, :-3], out[:ROWS])
    assert (given[:, -3:] == 7).all()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_cache_is_never_written(layout, tmp_path):
    arguments = problem(layout)
    expected = nbattn.attention_over_cache(**arguments, **TOGETHER)
    for name, x in list(arguments.items()):
        x.astype(x.dtype).tofile(tmp_path / name)
        arguments[name] = np.memmap(tmp_path / name, x.dtype, "r", shape=x.shape)  # a write would end the process
    before = {name: bytes(x) for name, x in arguments.items()}
    np.testing.assert_array_equal(nbattn.attention_over_cache(**arguments, **TOGETHER), expected)
    assert {name: bytes(x) for name, x in arguments.items()} == before


def test_unmapped_blocks_drop_their_keys():
    arguments = problem("paged")
    table = arguments["kvcache_start"].copy()
    table[0, 1], table[2, 0] = -1, -5
    out, _ = check(arguments | {"kvcache_start": table}, head_sink=random(HEADS))
    assert np.isfinite(out[:ROWS]).all()


def test_a_row_before_the_first_key_needs_no_position():
    arguments = problem("continuous")
    check(arguments, **planes(positions=12))  # row 10 stands at -1 and keeps nothing
    with pytest.raises(ContractError, match=r"^rope_cos: must hold the position of row 10, in 0\.\.11 .*, got -1\.$"):
        nbattn.attention_over_cache(**arguments, **planes(positions=12), is_causal=False)
    ids = np.arange(ROWS + EXTRA) % 12
    check(arguments, **planes(positions=12), position_ids=ids, is_causal=False)
    for row, bad in [(10, -1), (0, -1), (10, 12)]:
        wrong = ids.copy()
        wrong[row] = bad
        with pytest.raises(ContractError, match=rf"^position_ids\[{row}\]: must be in 0\.\.11 .*, got {bad}\.$"):
            nbattn.attention_over_cache(**arguments, **planes(positions=12), position_ids=wrong, is_causal=False)


def test_no_requests_and_no_rows():
    arguments = problem("continuous")
    arguments["kvcache_start"] = arguments["cu_seqlens_k"] = np.zeros(0, np.int32)
    arguments["cu_seqlens_q"] = np.zeros(1, np.int32)
    assert not nbattn.attention_over_cache(**arguments, **ROPE).any()
    arguments["q"] = arguments["q"][:0]
    assert nbattn.attention_over_cache(**arguments, **NORM).shape == (0, HEADS, DV)


@pytest.mark.parametrize("size", [1e-25, 1e19, 1e30])
def test_a_norm_of_rows_whose_squares_float32_cannot_hold(size):
    key, value, ones = random(1, 1, 8, 64), random(1, 1, 8, 64, seed=3), np.ones((8, 32), np.float32)
    check({
        "q": random(1, 1, 64) * np.float32(size), "cache_key": key, "cache_value": value,
        "kvcache_start": np.zeros(1, np.int32), "cu_seqlens_q": np.array([0, 1], np.int32),
        "cu_seqlens_k": np.array([8], np.int32), "rope_cos": ones, "rope_sin": 0 * ones,
        "q_norm_gain": np.ones(64, np.float32), "qk_norm_eps": 0.0,
    })  # fmt: skip

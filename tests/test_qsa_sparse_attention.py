"""qsa_sparse_attention: what a selection reads, every parameter against the oracle, and every rule."""

import numpy as np
import pytest

import nbattn
from nbattn import ContractError, oracle
from nbattn.testing import assert_close, expect, poison, spread

NEW, CONTEXT = (3, 0, 2, 5), (7, 2, 0, 4)
KEYS = tuple(np.add(NEW, CONTEXT).tolist())
ROWS, EXTRA, LAYERS, PAGE, HEADS, KV_HEADS, DIM, WIDTH = sum(NEW), 2, 3, 4, 6, 2, 8, 7
LAYER, SCALE = 1, 0.4
NAMES = (
    "q", "input_row_offsets", "kv_blocks", "page_stride", "cache_lengths", "kv_lookup_table", "max_prompt_length",
    "max_cache_length", "layer_idx", "token_indices", "counts", "scale",
)  # fmt: skip
FAR = np.array([-(2**31), 2**31 - 1], np.int32)


def problem(q_dtype="float32", kv_dtype=None, seed=0):
    """Return the arguments; other layers, stale slots, unused pages, unlisted tokens and surplus rows are poison."""
    rng = np.random.default_rng(seed)
    q = rng.normal(size=(ROWS + EXTRA, HEADS, DIM)).astype(q_dtype)
    poison(q[ROWS:], rng)
    keys = np.append(np.repeat(KEYS, NEW), [1] * EXTRA)
    indices = rng.integers(-2, keys[:, None] + 2, (ROWS + EXTRA, WIDTH)).astype(np.int32)
    counts = rng.integers(-1, WIDTH + 3, ROWS + EXTRA).astype(np.int32)
    counts[:4] = WIDTH, 0, -5, WIDTH + 90
    indices = np.where(np.arange(WIDTH) < counts[:, None], indices, rng.choice(FAR, indices.shape))
    pool = poison(np.empty((14, 2, LAYERS, PAGE, KV_HEADS, DIM), kv_dtype or q_dtype), rng)
    table = np.full((len(KEYS), 4), 2**32 - 1, np.uint32)
    pages = iter(rng.permutation(len(pool)).tolist())
    row_end = np.cumsum(NEW)
    for request, count in enumerate(KEYS):
        rows = slice(row_end[request] - NEW[request], row_end[request])
        listed = indices[rows][np.arange(WIDTH) < counts[rows, None]]
        for token in range(count):
            if token % PAGE == 0:
                table[request, token // PAGE] = next(pages)
            if token in listed:
                values = 2 * rng.normal(size=(2, KV_HEADS, DIM))
                pool[table[request, token // PAGE], :, LAYER, token % PAGE] = values.astype(pool.dtype)
    offsets = np.cumsum([0, *NEW]).astype(np.uint32)
    lengths = np.array(CONTEXT, np.uint32)
    values = q, offsets, pool, -1, lengths, table, None, None, LAYER, indices, counts, SCALE
    arguments = dict(zip(NAMES, values, strict=True))
    return arguments | {"q": spread(q, rng), "kv_blocks": spread(pool, rng)}


def run(arguments, **options):
    return nbattn.qsa_sparse_attention(**arguments | options, return_lse=True)


def check(arguments, **options):
    """Return (out, lse) after comparing them with the oracle."""
    arguments = arguments | options
    actual = run(arguments)
    dtype = arguments.get("out_dtype")
    args = [arguments.pop(name) for name in NAMES]
    arguments.pop("out_dtype", None)
    assert_close(actual, expect(oracle.qsa_sparse_attention, *args, out_dtype=dtype, **arguments))
    return actual


def same(actual, expected):
    for a, e in zip(actual, expected, strict=True):
        np.testing.assert_array_equal(a, e)


def random(*shape, seed=2):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


CHANGES = {
    "scale": {"scale": 0.9},
    "scale array": {"scale": np.array([0.9], np.float32)},
    "scale zero": {"scale": 0.0},
    "k_scale": {"k_scale": 0.3},
    "k_scale heads": {"k_scale": random(KV_HEADS, 1)},
    "k_scale channels": {"k_scale": random(KV_HEADS, DIM)},
    "v_scale": {"v_scale": np.array([0.3], np.float32)},
    "v_scale channels": {"v_scale": random(DIM)},
    "output_gate": {"output_gate": random(ROWS + EXTRA, HEADS)},
    "output_gate channels": {"output_gate": random(ROWS + EXTRA, HEADS, DIM)},
    "output_gate wide": {"output_gate": random(ROWS + EXTRA, HEADS, 1)},
    "counts": {"counts": np.full(ROWS + EXTRA, 2, np.int32)},
    "token_indices": {"token_indices": np.zeros((ROWS + EXTRA, WIDTH), np.int32)},
    "cache_lengths": {"cache_lengths": np.array([3, 0, 0, 1])},
}


@pytest.mark.parametrize("name", CHANGES)
def test_parameters_that_change_values(name):
    arguments = problem()
    before = check(arguments)[0]
    arguments["kv_blocks"] = np.nan_to_num(arguments["kv_blocks"], nan=0.5, posinf=1, neginf=-1)
    assert np.abs(check(arguments, **CHANGES[name])[0] - before)[:ROWS].max() > 1e-3


NO_CHANGES = {
    "group": {"group": HEADS // KV_HEADS},
    "warps": {"warps": 3},
    "unroll": {"unroll": 16},
    "all hints": {"group": HEADS // KV_HEADS, "warps": 1, "unroll": np.int64(1)},
    "max_prompt_length": {"max_prompt_length": 5},
    "max_prompt_length array": {"max_prompt_length": np.array([99], np.uint32)},
    "max_cache_length": {"max_cache_length": 7},
    "max_cache_length array": {"max_cache_length": np.array([10**6], np.uint32)},
    "page_stride None": {"page_stride": None},
    "page_stride array": {"page_stride": np.array([-1])},
    "layer_idx array": {"layer_idx": np.array([LAYER], np.uint32)},
    "k_scale, v_scale of 1": {"k_scale": 1.0, "v_scale": np.ones((KV_HEADS, DIM), np.float32)},
    "output_gate open": {"output_gate": np.full((ROWS + EXTRA, HEADS), np.inf, np.float32)},
    "target": {"target": "cpu"},
}


@pytest.mark.parametrize("name", NO_CHANGES)
def test_parameters_that_change_nothing(name):
    arguments = problem()
    same(run(arguments, **NO_CHANGES[name]), run(arguments))


@pytest.mark.parametrize("seed", range(5))
def test_everything_together(seed):
    options = {
        "k_scale": random(KV_HEADS, DIM),
        "v_scale": random(KV_HEADS, 1),
        "lse_base": "e",
        "out_dtype": "float16",
    }
    check(problem(seed=seed), **options, output_gate=random(ROWS + EXTRA, HEADS, DIM))


@pytest.mark.parametrize(
    ("q_dtype", "kv_dtype", "out_dtype"),
    [("bfloat16", None, None), ("bfloat16", None, "float32"), ("float32", "int8", None),
     ("float32", "float8_e4m3fn", None)],
)  # fmt: skip
def test_dtypes(q_dtype, kv_dtype, out_dtype):
    arguments = problem(q_dtype, kv_dtype)
    out, _ = check(arguments, k_scale=0.3, v_scale=random(KV_HEADS, 1), out_dtype=out_dtype)
    assert str(out.dtype) == (out_dtype or q_dtype)
    if kv_dtype == "int8":
        for scales, name in [({"k_scale": 1.0}, "v_scale"), ({"v_scale": 1.0}, "k_scale")]:
            with pytest.raises(ContractError, match=rf"^{name}: must be given for an int8 cache, got None\.$"):
                nbattn.qsa_sparse_attention(**arguments, **scales)
    elif kv_dtype is not None:
        check(arguments)


def select(values, lists, counts=None, context=None, unmapped=(), page=4, **options):
    """Return (out, lse) of rows of one request with zero logits over tokens `values`; NaN wherever no token is."""
    tokens, width = len(values), max(map(len, lists))
    num_pages = -(-tokens // page)
    pool = np.full((num_pages + 2, 2, 1, page, 1, 1), np.nan, np.float32)
    order = np.random.default_rng(4).permutation(num_pages + 2)[:num_pages]
    for token, value in enumerate(values):
        pool[order[token // page], :, 0, token % page, 0, 0] = 0, value
    indices = np.full((len(lists), width), 2**31 - 1, np.int32)
    for row, listed in zip(indices, lists, strict=True):
        row[: len(listed)] = listed
    counts = np.array([len(x) for x in lists] if counts is None else counts, np.int32)
    table = order[None].astype(np.int32)
    table[0, list(unmapped)] = -7
    context = tokens - len(lists) if context is None else context
    arguments = (
        np.zeros((len(lists), 1, 1), np.float32), np.array([0, len(lists)]), pool, -1, np.array([context]), table,
        None, None, 0, indices, counts, 1.0,
    )  # fmt: skip
    out, lse = nbattn.qsa_sparse_attention(*arguments, **options, return_lse=True)
    return out[:, 0, 0], lse[:, 0]


def close(actual, expected):
    np.testing.assert_allclose(actual, expected, rtol=2e-6, atol=2e-6)


def test_p2_a_permuted_table_and_an_unordered_list():
    close(select(np.arange(66), [[65, 0]], page=64)[0], [32.5])


def test_p3_counts_per_row():
    lists = [[t] if t % 2 else [t, t + 1, t + 2] for t in range(65)]
    out, lse = select(np.arange(70), lists)
    close(out, [t if t % 2 else t + 1 for t in range(65)])
    close(lse, [0 if t % 2 else np.log2(3) for t in range(65)])


def test_p5_the_whole_width():
    out, lse = select(np.arange(130), [list(range(130))])
    close(out, [64.5])
    close(lse, [np.log2(130)])


def test_p6_a_first_tile_without_a_key():
    out, lse = select(np.arange(64), [[-1] * 64 + list(range(64))], counts=[128])
    close(out, [31.5])
    close(lse, [6])


def test_p7_duplicates_count():
    out, lse = select([1, 0], [[0, 0, 1]])
    close(out, [2 / 3])
    close(lse, [np.log2(3)])


@pytest.mark.parametrize("count", [3, 4, 2**31 - 1])
def test_counts_are_clamped(count):
    close(select([3, 6, 9], [[0, 1, 2]], counts=[count])[0], [6])
    out, lse = select([3, 6, 9], [[0, 1, 2]], counts=[-count])
    assert out.tolist() == [0]
    assert lse.tolist() == [-np.inf]


def test_what_is_skipped():
    values = [1, 2, 4, 8, 16]
    for junk in (-1, -(2**31), 5, 6, 2**31 - 1):  # negative; at, past and far past the length
        close(select(values, [[junk, 4, junk, 0]])[0], [8.5])
        assert select(values, [[junk, junk]])[0].tolist() == [0]
    assert select(values, [[3, 4]], context=3)[0].tolist() == [8]  # 3 + 1 tokens
    out, lse = select(values, [[4, 0], [4, 4]], unmapped=[0])  # tokens 0..3
    assert (out.tolist(), lse.tolist()) == ([16, 16], [0, 1])
    out, lse = select(values, [[0, 1, 2]], unmapped=[0, 1])
    assert (out.tolist(), lse.tolist()) == ([0], [-np.inf])


def test_there_is_no_causal_test():
    close(select([1, 2, 3], [[2], [0, 2], [0]], context=0)[0], [3, 2, 1])


def test_the_gate():
    for gate, factor in [(0.0, 0.5), (np.log(3), 0.75), (-np.inf, 0)]:
        out, lse = select([2, 6], [[0, 1]], output_gate=np.array([[gate]], np.float32))
        close(out, [4 * factor])
        close(lse, [1])


def test_p4_p10_page_stride():
    arguments = problem()
    pool = arguments["kv_blocks"]
    packed = pool[0].size
    wide = np.full((len(pool), 2 * packed + 3), np.nan, np.float32)
    wide[:, :packed] = pool.reshape(len(pool), packed)
    view = wide.reshape(-1)[: pool.size].reshape(pool.shape)  # shape and stride as MAX passes them
    for stride in (2 * packed + 3, np.array([2 * packed + 3])):
        same(run(arguments, kv_blocks=view, page_stride=stride), check(arguments))
    check(arguments, kv_blocks=view, page_stride=2 * packed + 3)


def test_p4_pages_beyond_2_31_elements():
    stride = 2**31 + 64
    memory = np.empty(stride + 64, np.int8)  # only the touched pages of it exist
    pool = memory[:128].reshape(2, 2, 1, 4, 1, 8)
    memory[stride : stride + 64] = np.repeat([0, 0, 0, 0, 1, 2, 3, 4], 8)
    arguments = [
        np.ones((1, 1, 8), np.float32), np.array([0, 1]), pool, stride, np.array([3]), np.array([[1]]), None, None, 0,
        np.array([[3, 0]]), np.array([2]), 1.0,
    ]  # fmt: skip
    assert nbattn.qsa_sparse_attention(*arguments, k_scale=1.0, v_scale=1.0).ravel().tolist() == [2.5] * 8


@pytest.mark.parametrize("name", ["output", "out"])
def test_output(name):
    arguments = problem()
    out, lse = check(arguments)
    guard, guard_lse = (
        np.full((ROWS + EXTRA + 2, HEADS, DIM), 7, np.float32),
        np.full((ROWS + EXTRA, HEADS), 8, np.float32),
    )
    given = guard[1:-1]
    assert run(arguments, **{name: given}, lse=guard_lse)[0] is given
    np.testing.assert_array_equal(given[:ROWS], out[:ROWS])
    np.testing.assert_array_equal(guard_lse[:ROWS], lse[:ROWS])
    assert (guard[[0, *range(-EXTRA - 1, 0)]] == 7).all()
    assert (guard_lse[ROWS:] == 8).all()
    assert not out[ROWS:].any()
    assert (lse[ROWS:] == -np.inf).all()


def test_int64_lists_are_read():
    arguments = problem()
    wide = {name: arguments[name].astype(np.int64) for name in ("token_indices", "counts", "input_row_offsets")}
    same(run(arguments, **wide), run(arguments))
    far = wide["token_indices"].copy()
    far[0, 0] = 2**32  # not token 0
    near = arguments["token_indices"].copy()
    near[0, 0] = -1
    same(run(arguments, token_indices=far), run(arguments, token_indices=near))


def test_no_rows_and_no_width():
    arguments = problem()
    nothing = arguments | {"token_indices": np.zeros((ROWS + EXTRA, 0), np.int32)}
    out, lse = check(nothing)
    assert not out.any()
    assert (lse == -np.inf).all()
    none = {"input_row_offsets": np.zeros(5, int), "q": arguments["q"][:0], "counts": arguments["counts"][:0]}
    assert run(arguments, **none, token_indices=arguments["token_indices"][:0])[0].shape == (0, HEADS, DIM)


def test_the_cache_is_never_written(tmp_path):
    arguments = problem()
    expected = run(arguments)
    arguments["kv_blocks"].astype(np.float32).tofile(tmp_path / "pool")
    pool = np.memmap(tmp_path / "pool", np.float32, "r", shape=arguments["kv_blocks"].shape)  # a write would end it all
    before = bytes(pool)
    same(run(arguments, kv_blocks=pool), expected)
    assert bytes(pool) == before

"""generic_cross_attention_kv_cache: masks and row rules, every parameter against the oracle, and every rule."""

from dataclasses import replace

import numpy as np
import pytest

import nbattn
from nbattn import ContractError, PagedKVCollection, PageTableError, TargetError, oracle
from nbattn.testing import assert_close, expect, poison, spread

ROWS, NEW_KEYS, CONTEXT = (3, 0, 2, 9), (4, 6, 0, 1), (5, 2, 0, 3)  # the third request has no keys
KEYS = tuple(np.add(NEW_KEYS, CONTEXT).tolist())
TOTAL, EXTRA, LAYERS, PAGE, HEADS, KV_HEADS, DIM = sum(ROWS), 2, 3, 4, 6, 2, 8
MASKS = ("null", "causal", "sliding_window_causal", "sliding_window_noncausal", "chunked", "chunked_causal")
LAYER, SCALE = 1, 0.4


def problem(q_dtype="float32", kv_dtype=None, seed=0):
    """Return positional arguments; other layers, stale slots, unused pages, q's rows past the end are poison."""
    rng = np.random.default_rng(seed)
    q = rng.normal(size=(TOTAL + EXTRA, HEADS, DIM)).astype(q_dtype)
    poison(q[TOTAL:], rng)
    pool = poison(np.empty((14, 2, LAYERS, PAGE, KV_HEADS, DIM), kv_dtype or q_dtype), rng)
    table = np.full((len(KEYS), 4), 2**32 - 1, np.uint32)
    pages = iter(rng.permutation(len(pool)).tolist())
    for row, count in zip(table, KEYS, strict=True):
        for first in range(0, count, PAGE):
            row[first // PAGE] = page = next(pages)
            slots = min(PAGE, count - first)
            pool[page, :, LAYER, :slots] = (2 * rng.normal(size=(2, slots, KV_HEADS, DIM))).astype(pool.dtype)
    offsets, kv_offsets = (np.cumsum([0, *x]).astype(np.uint32) for x in (ROWS, NEW_KEYS))
    collection = PagedKVCollection(spread(pool, rng), np.array(CONTEXT, np.uint32), table)
    return [spread(q, rng), offsets, max(ROWS), kv_offsets, collection, LAYER, SCALE]


def run(args, **options):
    return nbattn.generic_cross_attention_kv_cache(*args, **options, return_lse=True)


def check(args, **options):
    """Return (out, lse) after comparing them with the oracle."""
    actual = run(args, **options)
    dtype = options.get("output_dtype")
    assert_close(actual, expect(oracle.generic_cross_attention_kv_cache, *args, out_dtype=dtype, **options))
    return actual


def same(actual, expected):
    for a, e in zip(actual, expected, strict=True):
        np.testing.assert_array_equal(a, e)


@pytest.mark.parametrize("q_start", ["cache_length", "bottom_right"])
@pytest.mark.parametrize("mask_str", MASKS)
@pytest.mark.parametrize("window", [1, 3])
def test_masks(mask_str, q_start, window):
    check(problem(), mask_str=mask_str, q_start=q_start, local_window_size=window, sink_weights=np.ones(HEADS))


def kept(rows, keys, context=0, **options):
    """Return which keys each row keeps: zero logits, and V the identity."""
    pool = np.full((3, 2, 1, PAGE, 1, 8), np.nan, np.float32)
    flat = np.stack([np.zeros((8, 8)), np.eye(8)])  # [K or V, token, dim]
    for page, first in enumerate((0, 4)):
        pool[page, :, 0, : max(0, keys - first)] = flat[:, first : min(first + 4, keys), None]
    collection = PagedKVCollection(pool, np.array([context]), np.array([[0, 1, 7]], np.uint32))
    q = np.zeros((rows, 1, 8), np.float32)
    args = q, np.array([0, rows]), rows, np.array([0, keys - context]), collection, 0, 1.0
    out = nbattn.generic_cross_attention_kv_cache(*args, **options)
    return [np.flatnonzero(row > 0).tolist() for row in out[:, 0]], out


def test_r1_cross_attention_sees_every_key():
    sets, out = kept(1, 3)
    assert sets == [[0, 1, 2]]
    np.testing.assert_allclose(out[0, 0, :3], [1 / 3] * 3, rtol=1e-6)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"mask_str": "causal"}, [[0, 1, 2], [0, 1, 2, 3]]),  # rows 2 and 3: MAX's rule
        ({"mask_str": "causal", "q_start": "bottom_right"}, [[0, 1, 2, 3, 4], [0, 1, 2, 3, 4, 5]]),
        ({"mask_str": "sliding_window_causal"}, [[1, 2], [2, 3]]),
        ({"mask_str": "sliding_window_causal", "q_start": "bottom_right"}, [[3, 4], [4, 5]]),
        ({"mask_str": "sliding_window_noncausal"}, [[1, 2, 3, 4, 5], [2, 3, 4, 5]]),
        ({"mask_str": "sliding_window_noncausal", "q_start": "bottom_right"}, [[3, 4, 5], [4, 5]]),
        ({"mask_str": "chunked"}, [[2, 3], [2, 3]]),
        ({"mask_str": "chunked", "q_start": "bottom_right"}, [[4, 5], [4, 5]]),
        ({"mask_str": "chunked_causal"}, [[2], [2, 3]]),
        ({"mask_str": "chunked_causal", "q_start": "bottom_right"}, [[4], [4, 5]]),
        ({"mask_str": "null"}, [[0, 1, 2, 3, 4, 5]] * 2),
    ],
)
def test_which_keys_a_mask_keeps(options, expected):
    assert kept(2, 6, context=2, local_window_size=2, **options)[0] == expected


def test_rows_before_the_first_key_keep_nothing():
    assert kept(4, 2, mask_str="causal", q_start="bottom_right")[0] == [[], [], [0], [0, 1]]
    assert kept(4, 2, mask_str="chunked", q_start="bottom_right", local_window_size=2)[0] == [[], [], [0, 1], [0, 1]]
    assert kept(3, 2, mask_str="sliding_window_causal", local_window_size=1)[0] == [[0], [1], []]  # row 2 is past them


CHANGES = {
    "mask_str": {"mask_str": "causal"},
    "sink_weights": {"sink_weights": np.linspace(-1, 2, HEADS).astype(np.float32)},
    "scale": {"scale": 0.9},
    "scale array": {"scale": np.array([0.9], np.float32)},
    "scale zero": {"scale": 0.0},
}


@pytest.mark.parametrize("name", CHANGES)
def test_parameters_that_change_values(name):
    args, options = problem(), dict(CHANGES[name])
    before = check(args)[0]
    args[6] = options.pop("scale", SCALE)
    assert np.abs(check(args, **options)[0] - before)[:TOTAL].max() > 1e-3


@pytest.mark.parametrize(("mask_str", "window"), [("sliding_window_causal", 2), ("chunked", 3)])
def test_the_window_and_the_row_rule_change_values(mask_str, window):
    args = problem()
    before = check(args, mask_str=mask_str, local_window_size=window)[0]
    for options in ({"local_window_size": window + 1}, {"local_window_size": window, "q_start": "bottom_right"}):
        assert np.abs(check(args, mask_str=mask_str, **options)[0] - before)[:TOTAL].max() > 1e-3


@pytest.mark.parametrize("hint", [None, int, lambda n: np.array([n], np.uint32), lambda n: n + 1000])
def test_parameters_that_change_nothing(hint):
    args = problem()
    expected = run(args)
    if hint is not None:
        args[2] = hint(max(ROWS))
        limits = {"max_prompt_length": hint(max(NEW_KEYS)), "max_cache_length": hint(max(CONTEXT))}
        args[4] = replace(args[4], **limits, page_stride=np.array([-1]))
    else:
        args[2], args[4] = None, replace(args[4], page_stride=None)
    for mask in ("null", "causal"):
        for window in (-1, 0, 2, -7):  # neither mask has a window
            same(run(args, mask_str=mask, local_window_size=window), run(problem(), mask_str=mask))
    same(run(args, q_start="bottom_right", target="cpu"), expected)
    same(run(args, sink_weights=np.full(HEADS, -np.inf)), expected)


def test_layers():
    args = problem()
    other = args[4].kv_blocks.copy()
    other[:, :, 0] = other[:, :, LAYER]
    other[:, :, LAYER] = np.nan
    moved = [*args[:4], replace(args[4], kv_blocks=other), np.array([0], np.uint32), SCALE]
    same(run(moved), check(args))


def test_p10_page_stride():
    args = problem()
    pool = args[4].kv_blocks
    packed = pool[0].size
    wide = np.full((len(pool), 2 * packed + 3), np.nan, np.float32)
    wide[:, :packed] = pool.reshape(len(pool), packed)
    packed_view = wide.reshape(-1)[: len(pool) * packed].reshape(pool.shape)  # shape and stride as MAX passes them
    collection = replace(args[4], kv_blocks=packed_view, page_stride=2 * packed + 3)
    same(run([*args[:4], collection, *args[5:]]), check(args))
    check([*args[:4], collection, *args[5:]], mask_str="causal")


@pytest.mark.parametrize(
    ("q_dtype", "kv_dtype", "output_dtype"),
    [("bfloat16", None, None), ("bfloat16", None, "float32"), ("float32", None, "bfloat16"),
     ("float32", None, "float16"), ("float32", "float8_e4m3fn", None)],
)  # fmt: skip
def test_dtypes(q_dtype, kv_dtype, output_dtype):
    out, _ = check(problem(q_dtype, kv_dtype), output_dtype=output_dtype, mask_str="causal")
    assert str(out.dtype) == (output_dtype or q_dtype)


@pytest.mark.parametrize("name", ["output", "out"])
def test_output(name):
    args = problem()
    out, lse = check(args)
    guard = np.full((TOTAL + EXTRA + 2, HEADS, DIM), 7, np.float32)
    given = guard[1:-1]
    assert nbattn.generic_cross_attention_kv_cache(*args, **{name: given}) is given
    np.testing.assert_array_equal(given[:TOTAL], out[:TOTAL])
    assert (guard[[0, *range(-EXTRA - 1, 0)]] == 7).all()
    assert not out[TOTAL:].any()
    assert (lse[TOTAL:] == -np.inf).all()


def test_no_query_rows_leave_the_output_untouched():
    args = problem()
    args[1] = np.zeros(5, np.uint32)
    out, lse = np.full((TOTAL + EXTRA, HEADS, DIM), 7, np.float32), np.full((TOTAL + EXTRA, HEADS), 8, np.float32)
    for mask in ("null", "causal"):
        nbattn.generic_cross_attention_kv_cache(*args, out, mask_str=mask, lse=lse)
    assert (out == 7).all()
    assert (lse == 8).all()
    empty = problem()[0][:0]
    assert run([empty, *args[1:]], mask_str="chunked", local_window_size=2)[0].shape == (0, HEADS, DIM)


def test_no_requests():
    q, _, _, _, collection, *rest = problem()
    nothing = replace(collection, cache_lengths=np.zeros(0, np.uint32), kv_lookup_table=np.zeros((0, 4), np.uint32))
    out, lse = run([q, np.zeros(1, int), 0, np.zeros(1, int), nothing, *rest], mask_str="causal")
    assert not out.any()
    assert (lse == -np.inf).all()


def test_lse_base():
    args = problem()
    lse, natural = check(args)[1], check(args, lse_base="e")[1]
    finite = np.isfinite(lse)
    np.testing.assert_allclose(natural[finite], lse[finite] * np.log(2), rtol=1e-5)
    assert not np.isfinite(lse[3:5]).any()  # the third request has no keys


def test_the_cache_is_never_written(tmp_path):
    args = problem()
    expected = run(args, mask_str="causal")
    args[4].kv_blocks.astype(np.float32).tofile(tmp_path / "pool")
    pool = np.memmap(tmp_path / "pool", np.float32, "r", shape=args[4].kv_blocks.shape)  # a write would end the process
    before = bytes(pool)
    args[4] = replace(args[4], kv_blocks=pool)
    same(run(args, mask_str="causal"), expected)
    assert bytes(pool) == before


def test_the_collection_is_read_at_each_call():
    args = problem()
    first = check(args)
    args[4].cache_lengths[0] -= 2
    assert np.abs(check(args)[0] - first[0])[:3].max() > 1e-3


F32 = np.float32
OUT = np.zeros((TOTAL + EXTRA, HEADS, DIM), F32)
RULES = {
    "q rank": ({"q": OUT[0]}, "q: must be [rows, num_heads, head_dim], got shape (6, 8)."),
    "q list": ({"q": OUT.tolist()}, "q: must be a NumPy or CuPy array, got list."),
    **{
        f"no {name}": ({name: None}, f"{name}: must be a NumPy or CuPy array, got NoneType.")
        for name in (
            "q", "q_input_row_offsets", "kv_input_row_offsets", "kv_blocks", "cache_lengths", "kv_lookup_table",
        )
    },
    "q dtype": ({"q": OUT.astype(int)}, "q: must be one of float16, bfloat16, float32, float64, got int64."),
    "q dtype, other": ({"q": OUT.astype("f2")}, "kv_blocks: must have q's dtype float16 or one of"),
    "q heads": ({"q": OUT[:, :5]}, "q: must have a positive multiple of 2 (num_kv_heads) heads, got 5."),
    "q head size": ({"q": OUT[..., :4]}, "q: must have the keys' head size 8, got 4."),
    "q offsets size": ({"q_input_row_offsets": np.zeros(4, int)}, "q_input_row_offsets: must be [5] (batch + 1), got"),
    "q offsets start": ({"q_input_row_offsets": np.arange(1, 6)}, "q_input_row_offsets[0]: must be 0, got 1."),
    "q offsets fall": (
        {"q_input_row_offsets": np.array([0, 2, 1, 3, 4])},
        "q_input_row_offsets[2]: must not be below q_input_row_offsets[1] = 2, got 1."),
    "q offsets end": (
        {"q_input_row_offsets": np.array([0, 2, 3, 3, 17])}, "q_input_row_offsets[-1]: must be at most 16 (rows of q)"),
    "q_max_seq_len": ({"q_max_seq_len": 8}, "q_max_seq_len: must be at least 9 (rows of the longest request), got 8."),
    "q_max_seq_len type": ({"q_max_seq_len": 9.0}, "q_max_seq_len: must be an integer or a one-element integer array"),
    "kv offsets size": (
        {"kv_input_row_offsets": np.zeros(4, int)}, "kv_input_row_offsets: must be [5] (batch + 1), got"),
    "kv offsets start": ({"kv_input_row_offsets": np.arange(1, 6)}, "kv_input_row_offsets[0]: must be 0, got 1."),
    "kv offsets fall": (
        {"kv_input_row_offsets": np.array([0, 2, 1, 3, 4])},
        "kv_input_row_offsets[2]: must not be below kv_input_row_offsets[1] = 2, got 1."),
    "collection": ({"kv_collection": OUT}, "kv_collection: must be a PagedKVCollection, got ndarray."),
    "blocks rank": (
        {"kv_blocks": OUT}, "kv_blocks: must be [pages, 2, layers, page_size, kv_heads, dim], got (16, 6, 8)."),
    "blocks axis 1": ({"kv_blocks": np.zeros((4, 3, 1, 4, 2, 8), F32)}, "kv_blocks: must be [pages, 2, layers"),
    "blocks int8": ({"kv_blocks": np.zeros((14, 2, 3, 4, 2, 8), np.int8)}, "kv_blocks: must not be int8, whose scales"),
    "cache_lengths negative": (
        {"cache_lengths": np.array([0, -1, 0, 0])}, "cache_lengths[1]: must not be negative, got -1."),
    "cache_lengths dtype": ({"cache_lengths": np.zeros(4)}, "cache_lengths: must be int32"),
    "table rank": ({"kv_lookup_table": np.zeros(4, int)}, "kv_lookup_table: must have 2 dimensions, got shape (4,)."),
    "page_stride": ({"page_stride": 100}, "page_stride: must be -1 or at least 384 (one packed page), got 100."),
    "page_stride beyond": ({"page_stride": 2000}, "page_stride: the last of 14 pages must end inside the memory"),
    "max_prompt_length": (
        {"max_prompt_length": 5}, "max_prompt_length: must be at least 6 (most new keys of a request)"),
    "max_cache_length": (
        {"max_cache_length": np.array([4])}, "max_cache_length: must be at least 5 (longest of cache_lengths), got 4."),
    "layer_idx": ({"layer_idx": 3}, "layer_idx: must be in 0..2 (layers of kv_blocks), got 3."),
    "layer_idx negative": ({"layer_idx": -1}, "layer_idx: must be in 0..2 (layers of kv_blocks), got -1."),
    "layer_idx type": ({"layer_idx": 1.0}, "layer_idx: must be an integer or a one-element integer array, got 1.0."),
    "scale": ({"scale": None}, "scale: must be a finite number, got None."),
    "output and out": ({"output": OUT, "out": OUT}, "output: is this operator's name for out, got both. Give one."),
    "output shape": (
        {"output": OUT[:3]}, "output: must be float32 of shape [16, 6, 8], got float32 of shape [3, 6, 8]."),
    "output dtype": (
        {"output": OUT, "output_dtype": "float16"}, "output: must be float16 of shape [16, 6, 8], got float32"),
    "out dtype": ({"out": OUT.astype("f8")}, "out: must be float32 of shape [16, 6, 8], got float64"),
    "output_dtype": (
        {"output_dtype": np.int32}, "output_dtype: must be one of float16, bfloat16, float32 or q's dtype, got"),
    "sink_weights": ({"sink_weights": np.zeros(4)}, "sink_weights: must be [6] (num_heads), got shape (4,)."),
    "sink_weights dtype": ({"sink_weights": np.zeros(6, int)}, "sink_weights: must be a float dtype, got int64."),
    "mask_str": (
        {"mask_str": "CAUSAL"}, "mask_str: must be one of null, causal, sliding_window_causal, sliding_window_non"),
    "mask_str type": (
        {"mask_str": None}, "mask_str: must be one of null, causal, sliding_window_causal, sliding_window_non"),
    **{
        f"{mask} {size}": (
            {"mask_str": mask, "local_window_size": size}, f"local_window_size: must be positive (tokens) for '{mask}'"
        )
        for mask in MASKS[2:] for size in (-1, 0)
    },
    "window type": ({"mask_str": "chunked", "local_window_size": 2.0}, "local_window_size: must be an int, got 2.0."),
    "q_start": ({"q_start": "top_left"}, 'q_start: must be "cache_length" or "bottom_right", got \'top_left\'.'),
    "q_start array": (
        {"q_start": np.array(["bottom_right"] * 2)}, 'q_start: must be "cache_length" or "bottom_right", got array('),
    "lse": ({"lse": np.zeros((16, 5), F32)}, "lse: must be float32 of shape [16, 6], got"),
    "lse_base": ({"lse_base": "two"}, 'lse_base: must be "2" or "e", got \'two\'.'),
}  # fmt: skip
OTHER_RULES = {
    "table rows": (
        {"kv_lookup_table": np.zeros((3, 4), int)}, PageTableError,
        "kv_lookup_table: must have 4 rows (one per entry of (new keys + cache_lengths)), got 3."),
    "past the table": (
        {"cache_lengths": np.array([5, 11, 0, 3])}, PageTableError,
        "(new keys + cache_lengths)[1]: must be in 0..16 (4 blocks of 4 in kv_lookup_table), got 17."),
    "page id": (
        {"kv_lookup_table": np.full((4, 4), 14, np.uint32)}, PageTableError,
        "kv_lookup_table[0, 0]: must be below 14 (pages of the cache), got 14"),
    "target": ({"target": "cuda"}, TargetError, 'target: "cuda" needs CuPy arrays'),
}  # fmt: skip
NAMES = ("q", "q_input_row_offsets", "q_max_seq_len", "kv_input_row_offsets", "kv_collection", "layer_idx", "scale")
IN_COLLECTION = PagedKVCollection.__dataclass_fields__


def refused(kind, message, changes):
    arguments = dict(zip(NAMES, problem(), strict=True))
    inside = {name: x for name, x in changes.items() if name in IN_COLLECTION}
    collection = replace(arguments["kv_collection"], **inside)
    if collection.page_stride != -1:
        collection = replace(collection, kv_blocks=np.ascontiguousarray(collection.kv_blocks))
    outside = {name: x for name, x in changes.items() if name not in IN_COLLECTION}
    with pytest.raises(kind) as caught:
        nbattn.generic_cross_attention_kv_cache(**arguments | {"kv_collection": collection} | outside)
    assert type(caught.value) is kind
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(("changes", "message"), RULES.values(), ids=RULES)
def test_rules(changes, message):
    refused(ContractError, message, changes)


@pytest.mark.parametrize(("changes", "kind", "message"), OTHER_RULES.values(), ids=OTHER_RULES)
def test_other_rules(changes, kind, message):
    refused(kind, message, changes)

"""Bad input: one test per rule of the engine's contract; a refused call writes nothing."""

import re

import ml_dtypes
import numpy as np
import pytest
from engine_calls import (
    DIM,
    DIM_VO,
    HEADS,
    ROWS,
    SENTINEL,
    cache,
    cascading,
    gathering,
    ints,
    paged,
    read_only,
    refuse,
    results,
    zeros,
)

import nbattn
from nbattn import ContractError, Level, Rope, TargetError

BF16 = ml_dtypes.bfloat16


def base_works(function, arguments):
    out, lse = function(**arguments)
    assert not (out == SENTINEL).any()
    assert not (lse == SENTINEL).any()


QUERY_RULES = [
    ("not an array", {"q": [[[0.0]]]}, r"q: must be a NumPy or CuPy array, got list\.$"),
    ("two axes", {"q": zeros(ROWS, DIM)}, r"q: must be \[total_q, num_qo_heads, head_dim\], got shape \(5, 8\)\."),
    ("integers", {"q": zeros(ROWS, HEADS, DIM, dtype=np.int32)}, "q: must be one of float16, .*, got int32"),
    ("fp8", {"q": zeros(ROWS, HEADS, DIM, dtype=ml_dtypes.float8_e5m2)}, "q: must be one of .*, got float8_e5m2"),
    ("byte order", {"q": zeros(ROWS, HEADS, DIM, dtype=">f4")}, "q: must be one of .*, got >f4"),
    ("head size", {"q": zeros(ROWS, HEADS, 7)}, "q: must have the keys' head size 8, got 7"),
    ("heads", {"q": zeros(ROWS, 5, DIM)}, r"q: must have a positive multiple of 2 \(num_kv_heads\) heads, got 5"),
    ("no heads", {"q": zeros(ROWS, 0, DIM)}, "q: must have a positive multiple of 2 .*, got 0"),
    ("last axis", {"q": zeros(ROWS, HEADS, 2 * DIM)[..., ::2]}, "q: the last axis must be contiguous, got strides"),
    ("no PagedKV", {"kv": zeros(2, 9, 2, 8)}, r"kv: must be a PagedKV, got ndarray\. Make one with PagedKV"),
    (
        "cache dtype",
        {"kv": cache(dtype=BF16)},
        "k, v: must have q's dtype float32 or one of float8_e4m3fn, .* got bfloat16",
    ),
    ("float64 q", {"q": zeros(ROWS, HEADS, DIM, dtype=np.float64)}, "k, v: must have q's dtype float64, got float32"),
    ("offsets type", {"qo_indptr": [0, 3, 5]}, "qo_indptr: must be a NumPy or CuPy array, got list"),
    (
        "offsets dtype",
        {"qo_indptr": zeros(3)},
        r"qo_indptr: must be int32 \(int64 and uint32 are accepted .*, got float32",
    ),
    (
        "offsets axes",
        {"qo_indptr": zeros(3, 1, dtype=np.int32)},
        r"qo_indptr: must have 1 dimension, got shape \(3, 1\)",
    ),
    ("offsets length", {"qo_indptr": ints(0, 5)}, r"qo_indptr: must be \[3\] \(batch \+ 1\), got shape \(2,\)"),
    ("offsets start", {"qo_indptr": ints(1, 3, 5)}, r"qo_indptr\[0\]: must be 0, got 1"),
    ("offsets below 0", {"qo_indptr": ints(-1, 3, 5)}, r"qo_indptr\[0\]: must be 0, got -1"),
    ("offsets fall", {"qo_indptr": ints(0, 4, 3)}, r"qo_indptr\[2\]: must not be below qo_indptr\[1\] = 4, got 3"),
    ("offsets end", {"qo_indptr": ints(0, 3, 6)}, r"qo_indptr\[-1\]: must be at most 5 \(rows of q\), got 6"),
    ("no offsets", {"qo_indptr": None, "kv": cache(6)}, "q: must have a row for each of the 6 requests, got 5 rows"),
    (
        "rows of nobody",
        {"qo_indptr": None, "kv": cache(3)},
        "qo_indptr: must be given .* None for 5 rows and 3 requests",
    ),
]

COMMON_RULES = [
    ("scale text", {"sm_scale": "1"}, "sm_scale: must be a finite number, got '1'"),
    ("scale nan", {"sm_scale": float("nan")}, "sm_scale: must be a finite number, got nan"),
    ("scale bool", {"sm_scale": True}, "sm_scale: must be a finite number, got True"),
    ("scale of no float32", {"sm_scale": 3e38}, r"sm_scale: must be at most 1\.179e\+38 in size, got 3e\+38"),
    ("lse wanted by an int", {"return_lse": 1}, "return_lse: must be a bool, got 1"),
    ("lse wanted by an array", {"return_lse": np.array([True, False])}, "return_lse: must be a bool, got array"),
    ("sinks list", {"sinks": [0.0] * 4}, "sinks: must be a NumPy or CuPy array, got list"),
    ("sinks length", {"sinks": zeros(3)}, r"sinks: must be \[4\] \(num_qo_heads\), got shape \(3,\)"),
    ("sinks axes", {"sinks": zeros(1, 4)}, r"sinks: must be \[4\] \(num_qo_heads\), got shape \(1, 4\)"),
    ("sinks dtype", {"sinks": ints(0, 0, 0, 0)}, "sinks: must be a float dtype, got int32"),
    ("sinks size", {"sinks": np.array([0, 0, 3e38, 0])}, r"sinks\[2\]: must be at most 1\.179e\+38, got 3e\+38"),
    ("sinks inf", {"sinks": np.array([0, 0, 0, np.inf], BF16)}, r"sinks\[3\]: must be at most 1\.179e\+38, got inf"),
    ("sinks nan", {"sinks": np.array([0, np.nan, 0, 0], np.float16)}, r"sinks\[1\]: must be a number, got nan\."),
    ("k_scale nan", {"k_scale": np.full((2, 1), np.nan)}, r"k_scale\[0, 0\]: must be a number, got nan\."),
    ("v_scale nan", {"v_scale": np.array([np.nan], BF16)}, r"v_scale\[0\]: must be a number, got nan\."),
    (
        "k_scale size",
        {"k_scale": np.full((2, 1), -1e300)},
        r"k_scale\[0, 0\]: must be at most .* in size, got -1e\+300",
    ),
    ("v_scale size", {"v_scale": np.array([1e39])}, r"v_scale\[0\]: must be at most 1\.179e\+38 in size, got 1e\+39"),
    ("k_scale text", {"k_scale": "1"}, "k_scale: must be a NumPy or CuPy array, got str"),
    ("k_scale inf", {"k_scale": float("inf")}, "k_scale: must be a finite number, got inf"),
    ("k_scale dtype", {"k_scale": ints(1)}, "k_scale: must be a float dtype, got int32"),
    (
        "k_scale shape",
        {"k_scale": zeros(3, 1)},
        r"k_scale: must broadcast to \[2, 8\] \(num_kv_heads, head_dim\), got shape \(3, 1\)",
    ),
    ("k_scale axes", {"k_scale": zeros(2, 1, 8)}, r"k_scale: must broadcast to \[2, 8\].*got shape \(2, 1, 8\)"),
    ("v_scale shape", {"v_scale": zeros(8)}, r"v_scale: must broadcast to \[2, 6\].*got shape \(8,\)"),
    (
        "k_scale int8",
        {"kv": cache(dtype=np.int8), "v_scale": 1.0},
        "k_scale: must be given for an int8 cache, got None",
    ),
    (
        "v_scale int8",
        {"kv": cache(dtype=np.int8), "k_scale": 1.0},
        "v_scale: must be given for an int8 cache, got None",
    ),
    ("split zero", {"split_size": 0}, "split_size: must be at least 1, got 0"),
    ("split float", {"split_size": 2.0}, r"split_size: must be an int, got 2\.0"),
    (
        "out dtype int",
        {"out_dtype": "int8"},
        "out_dtype: must be one of float16, bfloat16, float32 or q's dtype, got int8",
    ),
    ("out dtype 64", {"out_dtype": "float64"}, "out_dtype: must be one of .* or q's dtype, got float64"),
    ("out dtype name", {"out_dtype": "float7"}, "out_dtype: must name a NumPy or ml_dtypes type, got 'float7'"),
    ("out dtype list", {"out_dtype": "(2,"}, r"out_dtype: must name a NumPy or ml_dtypes type, got '\(2,'"),
    ("out type", {"out": [0.0]}, "out: must be a NumPy or CuPy array, got list"),
    (
        "out shape",
        {"out": np.full((ROWS, HEADS, DIM), SENTINEL, np.float32)},
        r"out: must be float32 of shape \[5, 4, 6\], got float32 of shape \[5, 4, 8\]",
    ),
    ("out dtype", {"out": results(np.float16)["out"]}, r"out: must be float32 of shape \[5, 4, 6\], got float16"),
    ("out of q's dtype", {"out_dtype": "float16"}, r"out: must be float16 of shape .*, got float32"),
    (
        "out last axis",
        {"out": np.full((ROWS, HEADS, 2 * DIM_VO), SENTINEL, np.float32)[..., ::2]},
        "out: the last axis must be contiguous",
    ),
    ("out read-only", {"out": read_only(results()["out"])}, "out: must be writable, got a read-only array"),
    (
        "lse shape",
        {"lse": np.full((HEADS, ROWS), SENTINEL, np.float32)},
        r"lse: must be float32 of shape \[5, 4\], got float32 of shape \[4, 5\]",
    ),
    ("lse dtype", {"lse": np.full((ROWS, HEADS), SENTINEL, np.float64)}, r"lse: must be float32 .*, got float64"),
    ("lse read-only", {"lse": read_only(results()["lse"])}, "lse: must be writable, got a read-only array"),
    ("lse base", {"lse_base": "10"}, 'lse_base: must be "2" or "e", got \'10\''),
    ("lse base number", {"lse_base": 2}, 'lse_base: must be "2" or "e", got 2'),
    ("target", {"target": "tpu"}, 'target: must be "cpu", "cuda" or "gpu", got \'tpu\''),
    ("target array", {"target": np.array(["cpu", "gpu"])}, 'target: must be "cpu", "cuda" or "gpu", got array'),
    ("lse base array", {"lse_base": np.array(["2", "e"])}, 'lse_base: must be "2" or "e", got array'),
    ("scale of no float", {"sm_scale": 10**400}, "sm_scale: must be at most .* in size, got 10000"),
]

PAGED_RULES = [
    ("window float", {"window_left": 1.5}, r"window_left: must be an int, got 1\.5"),
    ("window bool", {"window_left": True}, "window_left: must be an int, got True"),
    ("chunk zero", {"chunk_size": 0}, "chunk_size: must be at least 1, got 0"),
    ("chunk float", {"chunk_size": 4.0}, r"chunk_size: must be an int, got 4\.0"),
    ("cap negative", {"logits_soft_cap": -1.0}, r"logits_soft_cap: must not be negative, got -1\.0"),
    ("cap of no float32", {"logits_soft_cap": 1e-40}, r"logits_soft_cap: must be 0 or at least 8\.148e-39, got 1e-40"),
    (
        "slopes size",
        {"alibi_slopes": np.array([0, -1e39, 0, 0])},
        r"alibi_slopes\[1\]: must be at most 1\.179e\+38 in size, got -1e\+39",
    ),
    (
        "slopes nan",
        {"alibi_slopes": np.array([0, 0, 0, np.nan])},
        r"alibi_slopes\[3\]: must be a number, got nan\.",
    ),
    ("cap inf", {"logits_soft_cap": float("inf")}, "logits_soft_cap: must be a finite number, got inf"),
    ("mask type", {"attn_mask": [True]}, "attn_mask: must be a NumPy or CuPy array, got list"),
    ("mask dtype", {"attn_mask": ints(1)}, r"attn_mask: must be bool \(True = keep\) or a float dtype, got int32"),
    ("mask axes", {"attn_mask": zeros(1, 1, 1, 1, 9)}, "attn_mask: must have 1 to 4 dimensions, got 5"),
    ("mask scalar", {"attn_mask": zeros()}, "attn_mask: must have 1 to 4 dimensions, got 0"),
    (
        "mask requests",
        {"attn_mask": zeros(3, 1, 3, 9)},
        r"attn_mask: must broadcast to \[2 or 1, 4 or 1, 3, 9\] .*got shape \(3, 1, 3, 9\)",
    ),
    ("mask heads", {"attn_mask": zeros(2, 3, 9)}, r"attn_mask: must broadcast .*got shape \(2, 3, 9\)"),
    ("mask rows", {"attn_mask": zeros(2, 9)}, r"attn_mask: must broadcast .*got shape \(2, 9\)"),
    ("mask keys", {"attn_mask": zeros(3, 8)}, r"attn_mask: must broadcast .*got shape \(3, 8\)"),
    ("slopes length", {"alibi_slopes": zeros(2)}, r"alibi_slopes: must be \[4\] \(num_qo_heads\), got shape \(2,\)"),
    ("slopes dtype", {"alibi_slopes": ints(1, 1, 1, 1)}, "alibi_slopes: must be a float dtype, got int32"),
    ("rope type", {"rope": 1e4}, "rope: must be a nbattn.Rope, got float"),
    (
        "rope head size",
        {"q": zeros(ROWS, HEADS, 7), "kv": cache(dim=7), "rope": Rope()},
        "rope: needs an even head size, got 7",
    ),
    ("start length", {"kv_start": ints(0)}, r"kv_start: must be \[2\], got shape \(1,\)"),
    ("start negative", {"kv_start": ints(0, -3)}, r"kv_start\[1\]: must be at least 0, got -3"),
    ("start dtype", {"kv_start": zeros(2)}, "kv_start: must be int32"),
    ("positions length", {"q_positions": ints(0, 1)}, r"q_positions: must be \[5\], got shape \(2,\)"),
    ("positions dtype", {"q_positions": zeros(5)}, "q_positions: must be int32"),
    (
        "lowest position",
        {"q_positions": np.array([-(2**63), 0, 1, 2, 3])},
        r"q_positions\[0\]: must be a position within",
    ),
    ("plan type", {"plan": object()}, r"plan: must be a Plan, got object\. Make one with nbattn\.plan"),
]

GATHER_RULES = [
    ("indices type", {"token_indices": [[0]]}, "token_indices: must be a NumPy or CuPy array, got list"),
    ("indices dtype", {"token_indices": zeros(ROWS, 3)}, "token_indices: must be int32"),
    (
        "indices axes",
        {"token_indices": zeros(ROWS, dtype=np.int32)},
        r"token_indices: must have 2 dimensions, got shape \(5,\)",
    ),
    (
        "indices rows",
        {"token_indices": zeros(4, 3, dtype=np.int32)},
        r"token_indices: must have 5 rows \(rows of q\), got shape \(4, 3\)",
    ),
    ("counts dtype", {"counts": zeros(ROWS)}, "counts: must be int32"),
    ("counts axes", {"counts": zeros(ROWS, 1, dtype=np.int32)}, r"counts: must have 1 dimension, got shape \(5, 1\)"),
    ("counts rows", {"counts": zeros(4, dtype=np.int32)}, r"counts: must have 5 rows \(rows of q\), got shape \(4,\)"),
    ("gate type", {"output_gate": 1.0}, "output_gate: must be a NumPy or CuPy array, got float"),
    ("gate dtype", {"output_gate": zeros(ROWS, HEADS, dtype=np.int8)}, "output_gate: must be a float dtype, got int8"),
    (
        "gate shape",
        {"output_gate": zeros(ROWS, HEADS, DIM)},
        r"output_gate: must be \[5, 4\] or \[5, 4, 6\], got shape \(5, 4, 8\)",
    ),
    (
        "gate rows",
        {"output_gate": zeros(4, HEADS)},
        r"output_gate: must be \[5, 4\] or \[5, 4, 6\], got shape \(4, 4\)",
    ),
]


def named(rules):
    return pytest.mark.parametrize(("changes", "message"), [r[1:] for r in rules], ids=[r[0] for r in rules])


CAUSAL_RULES = [
    ("causal array", {"causal": np.array([True, False])}, "causal: must be a bool, got array"),
    ("causal None", {"causal": None}, "causal: must be a bool, got None"),
    ("causal int", {"causal": 1}, "causal: must be a bool, got 1"),
]


@named([*QUERY_RULES, *COMMON_RULES, *PAGED_RULES, *CAUSAL_RULES])
def test_paged_attention_refuses(changes, message):
    refuse(nbattn.paged_attention, paged(**changes), ContractError, message)


@named([*QUERY_RULES, *COMMON_RULES, *GATHER_RULES])
def test_gather_attention_refuses(changes, message):
    refuse(nbattn.gather_attention, gathering(**changes), ContractError, message)


def test_what_the_refused_calls_are_made_from_works():
    base_works(nbattn.paged_attention, paged())
    base_works(nbattn.gather_attention, gathering())
    base_works(nbattn.cascade_attention, cascading())
    for lists in (np.int64, np.uint32):
        base_works(nbattn.paged_attention, paged(qo_indptr=ints(0, 3, 5, dtype=lists)))


def test_numpy_numbers_are_numbers():
    q, kv = np.ones((ROWS, HEADS, DIM), np.float32), cache()
    kv.k[:, 1:] = kv.v[:, 1:] = 1
    for number in (np.float16, np.float32, np.float64, np.longdouble):
        options = {"sm_scale": 0.5, "logits_soft_cap": 2.0, "rope": Rope(512.0, 2.0)}
        mine = {"sm_scale": number(0.5), "logits_soft_cap": number(2), "rope": Rope(number(512), number(2))}
        want, got = (nbattn.paged_attention(**paged(q=q, kv=kv, **x))[0] for x in (options, mine))
        np.testing.assert_array_equal(got, want)


def test_sinks_far_below_zero_are_none_and_float64_has_its_own_range():
    low = np.array([-np.inf, np.finfo(np.float64).min, np.finfo(np.float32).min, -1e39])
    np.testing.assert_array_equal(nbattn.paged_attention(**paged(sinks=low))[0], nbattn.paged_attention(**paged())[0])
    wide = {"kv": cache(dtype=np.float64), "q": zeros(ROWS, HEADS, DIM, dtype=np.float64), "out": None, "lse": None}
    _, lse = nbattn.paged_attention(**paged(**wide, sinks=np.full(HEADS, 1e300), lse_base="e"))
    np.testing.assert_allclose(lse, 1e300)
    refuse(nbattn.paged_attention, paged(**wide, sinks=np.full(HEADS, 1.7e308)), ContractError, r"sinks\[0\]: must be")


def test_the_smallest_soft_cap_is_a_cap():
    q, kv = np.ones((ROWS, HEADS, DIM), np.float32), cache()
    kv.k[:] = 1
    capped = nbattn.paged_attention(**paged(q=q, kv=kv, logits_soft_cap=8.2e-39))[1]
    np.testing.assert_array_equal(capped, nbattn.paged_attention(**paged(q=q, kv=kv, sm_scale=0))[1])


def test_plan_refuses_an_array_as_causal():
    with pytest.raises(ContractError, match=r"^causal: must be a bool, got array"):
        nbattn.plan(cache(), ints(0, 3, 5), num_qo_heads=HEADS, causal=np.array([True, False]))


@pytest.mark.parametrize("target", ["cuda", "gpu"])
@pytest.mark.parametrize(
    ("function", "arguments"), [(nbattn.paged_attention, paged), (nbattn.gather_attention, gathering)]
)
def test_a_target_only_confirms_where_the_arrays_are(function, arguments, target):
    message = rf'target: "{target}" needs CuPy arrays, got NumPy arrays\. Move them'
    refuse(function, arguments(target=target), TargetError, message)
    base_works(function, arguments(target="cpu"))


SECOND_RULES = [
    ("kv heads", Level(cache(heads=4), ints(0, 3, 5)), r"levels\[1\]\.kv: must have level 0's num_kv_heads 2, got 4"),
    ("value size", Level(cache(dim_vo=8), ints(0, 3, 5)), r"levels\[1\]\.kv: must have level 0's head_dim_vo 6, got 8"),
    ("key size", Level(cache(dim=4), ints(0, 3, 5)), "q: must have the keys' head size 4, got 8"),
    (
        "dtype",
        Level(cache(dtype=ml_dtypes.float8_e5m2), ints(0, 3, 5)),
        r"levels\[1\]\.kv: must have level 0's kv_dtype float32, got float8_e5m2",
    ),
    ("offsets length", Level(cache(), ints(0, 5)), r"levels\[1\]\.qo_indptr: must be \[3\] \(batch \+ 1\)"),
    ("offsets below 0", Level(cache(), ints(-1, 3, 5)), r"levels\[1\]\.qo_indptr\[0\]: must be at least 0, got -1"),
    (
        "offsets fall",
        Level(cache(), ints(4, 2, 5)),
        r"levels\[1\]\.qo_indptr\[1\]: must not be below levels\[1\]\.qo_indptr\[0\] = 4",
    ),
    ("offsets end", Level(cache(), ints(0, 2, 9)), r"levels\[1\]\.qo_indptr\[-1\]: must be at most 5"),
    ("no level", cache(), r"levels\[1\]: must be a Level, got PagedKV"),
    (
        "causal",
        Level(cache(), ints(0, 3, 5), causal=np.array([True, False])),
        r"levels\[1\]\.causal: must be a bool, got array",
    ),
    ("no cache", Level(zeros(1)), r"levels\[1\]\.kv: must be a PagedKV, got ndarray"),
]


@pytest.mark.parametrize(("second", "message"), [r[1:] for r in SECOND_RULES], ids=[r[0] for r in SECOND_RULES])
def test_cascade_attention_refuses_a_level(second, message):
    refuse(nbattn.cascade_attention, cascading(second=second), ContractError, message)


@pytest.mark.parametrize("levels", [[], (), None, cache()], ids=["empty", "tuple", "None", "PagedKV"])
def test_cascade_attention_needs_levels(levels):
    arguments = cascading()
    arguments["levels"] = levels
    refuse(nbattn.cascade_attention, arguments, ContractError, "levels: must be a non-empty list of Level, got ")


def test_a_cascade_of_one_level_names_its_cache():
    message = r"levels\[0\]\.kv: must be a PagedKV, got NoneType"
    refuse(nbattn.cascade_attention, cascading(levels=[Level(None)]), ContractError, message)


@named([*COMMON_RULES[:2], *PAGED_RULES[:6]])
def test_cascade_attention_refuses(changes, message):
    refuse(nbattn.cascade_attention, cascading(**changes), ContractError, message)


def test_a_mask_must_reach_over_all_levels():
    message = r"attn_mask: must broadcast to \[2 or 1, 4 or 1, 3, 13\] .*got shape \(3, 12\)"
    refuse(nbattn.cascade_attention, cascading(attn_mask=zeros(3, 12)), ContractError, message)


@pytest.mark.parametrize("name", ["theta", "scale"])
@pytest.mark.parametrize("value", [0, -1.0, float("inf"), float("nan"), "1", 10**400])
def test_rope_refuses(name, value):
    with pytest.raises(
        ContractError, match=rf"^rope\.{name}: must be a positive finite number, got {re.escape(repr(value))}"
    ):
        Rope(**{name: value})


@pytest.mark.parametrize("name", ["theta", "scale"])
def test_rope_refuses_bools_and_what_makes_angles_infinite(name):
    with pytest.raises(ContractError, match=rf"^rope\.{name}: must be a positive finite number, got True"):
        Rope(**{name: True})
    with pytest.raises(ContractError, match=rf"^rope\.{name}: must be at least 1\.175e-38, got 1e-308"):
        Rope(**{name: 1e-308})
    far = {"kv_start": ints(0, 2**30), "q_positions": ints(2**30, 1, 2, 3, 4), "rope": Rope(2.0**-126, 2.0**-126)}
    base_works(nbattn.paged_attention, paged(**far))


@pytest.mark.parametrize("n", [0, -1, 1.5, True, "2"])
def test_set_num_threads_refuses(n):
    before = nbattn.get_num_threads()
    with pytest.raises(ContractError, match=rf"^n: must be a positive int or None, got {re.escape(repr(n))}"):
        nbattn.set_num_threads(n)
    assert nbattn.get_num_threads() == before

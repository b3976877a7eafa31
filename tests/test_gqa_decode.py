"""gqa_decode: the document's examples, every parameter against the oracle, every rule, and what must not be read."""

import ml_dtypes
import numpy as np
import pytest

import nbattn
from nbattn import ContractError, PageTableError, TargetError, oracle
from nbattn.testing import assert_close, expect, poison, spread

LENGTHS = np.array([9, 0, 4], np.int32)
ROWS, SLOTS, HEADS, GROUP, DK, DV = 3, 9, 2, 3, 16, 8


def problem(q_dtype="float32", kv_dtype=None, lengths=LENGTHS, group=GROUP, dims=(DK, DV), seed=0):
    """Return query, key_cache, value_cache and lengths; stale slots and the gaps of the views are poison."""
    rng = np.random.default_rng(seed)
    shape = len(lengths), SLOTS, HEADS
    stale = np.arange(SLOTS)[None, :, None, None] >= lengths[:, None, None, None]
    query = spread(rng.normal(size=(shape[0], HEADS * group, dims[0])).astype(q_dtype), rng)
    caches = [(3 * rng.normal(size=(*shape, dim))).astype(kv_dtype or q_dtype) for dim in dims]
    return query, *[spread(poison(cache, rng, stale), rng) for cache in caches], lengths


def check(args, **options):
    actual = nbattn.gqa_decode(*args, return_lse=True, **options)
    assert actual[0].dtype == np.float32
    assert_close(actual, expect(oracle.gqa_decode, *args, out_dtype="float32", **options))
    return actual


EXAMPLES = [
    ([[[1, 0], [0, 1]]], [[[[1, 0]], [[0, 1]], [[5, 5]]]], [[[[1, 2]], [[3, 4]], [[50, 50]]]], [2],
     [[[1.660477, 2.660477], [2.339523, 3.339523]]]),
    ([[[1, 0], [0, 1], [1, 1], [-1, 0]], [[0.5, 0.5], [1, -1], [0, 2], [2, 0]]],
     [[[[1, 0], [0, 1]], [[0, 1], [1, 0]], [[1, 1], [-1, 1]]], [[[1, 0], [0, 1]], [[9, 9], [9, 9]], [[9, 9], [9, 9]]]],
     [[[[1, 0], [0, 1]], [[0, 1], [1, 0]], [[2, 2], [-2, 2]]],
      [[[1, 2], [3, 4]], [[90, 90], [90, 90]], [[90, 90], [90, 90]]]],
     [3, 1],
     [[[1.203336, 1.0], [1.0, 1.203336], [0.00556, 0.796664], [-1.011921, 1.435946]],
      [[1.0, 2.0], [1.0, 2.0], [3.0, 4.0], [3.0, 4.0]]]),
    ([[[1, 0, 1, 0], [0, 2, 0, -1]]],
     [[[[1, 1, 0, 0], [0, 1, 0, 1]], [[0, 0, 1, 1], [1, 0, 1, 0]], [[1, 0, 0, 1], [0, 0, 2, 0]],
       [[0, 1, 1, 0], [1, 1, 1, 1]]]],
     [[[[1, 0, 0, 0], [0, 1, 0, 0]], [[0, 1, 0, 0], [0, 0, 1, 0]], [[0, 0, 1, 0], [0, 0, 0, 1]],
       [[0, 0, 0, 1], [1, 0, 0, 0]]]],
     [4], [[[0.25, 0.25, 0.25, 0.25], [0.31123, 0.31123, 0.18877, 0.18877]]]),
]  # fmt: skip


@pytest.mark.parametrize("example", EXAMPLES, ids=["one", "two", "three"])
@pytest.mark.parametrize("dtype", [None, np.float32], ids=["as written", "float32"])
def test_the_document(example, dtype):
    query, key, value, lengths, expected = (np.array(x) for x in example)
    if dtype is not None:  # as written: integers where all numbers are
        query, key, value = (x.astype(dtype) for x in (query, key, value))
    elif query.dtype == np.float64:
        query = query.astype(np.float32)
    out = nbattn.gqa_decode(query, key, value, lengths)
    assert out.dtype == np.float32
    np.testing.assert_allclose(out, expected, rtol=0, atol=6e-7)


@pytest.mark.parametrize(
    ("q_dtype", "kv_dtype"),
    [("float32", None), ("bfloat16", None), ("float16", None), ("float64", None), ("float32", "float8_e5m2")],
)
def test_the_result_is_float32_whatever_the_inputs(q_dtype, kv_dtype):
    _, lse = check(problem(q_dtype, kv_dtype))
    assert lse.dtype == (np.float64 if q_dtype == "float64" else np.float32)


@pytest.mark.parametrize("group", [1, 5, 6, 7, 9, 16, 32])
def test_p11_every_group_size(group):
    value = np.zeros((1, 4, HEADS, 1), np.float32)
    value[:, :, 1] = 10
    out = nbattn.gqa_decode(
        np.zeros((1, HEADS * group, 64), np.float32), np.zeros((1, 4, HEADS, 64), np.float32), value, np.array([3])
    )
    assert out.ravel().tolist() == [0] * group + [10] * group
    check(problem(group=group))


@pytest.mark.parametrize("dim", [1, 56, 72, 80, 96, 136, 192, 224, 256, 512])
def test_p12_every_head_size(dim):
    check(problem(dims=(dim, dim), seed=dim))


def test_sm_scale():
    args = problem()
    default = check(args)[0]
    assert np.array_equal(nbattn.gqa_decode(*args, sm_scale=0.25), default)
    assert np.abs(check(args, sm_scale=0.7)[0] - default).max() > 0.1
    out, lse = check(args, sm_scale=0)  # all kept keys weigh the same
    assert_close(out[2, 0], args[2][2, :4, 0].astype(np.float64).mean(axis=0), budget=1e-6)
    assert lse[2].tolist() == [2.0] * HEADS * GROUP


def test_lengths_include_the_new_token():
    keys, values = np.zeros((1, 4, 1, 64), np.float32), np.eye(4, dtype=np.float32)[None, :, None]
    query = np.zeros((1, 1, 64), np.float32)
    for length, weights in [(4, [0.25] * 4), (3, [1 / 3] * 3 + [0]), (1, [1, 0, 0, 0])]:  # M6
        out, lse = nbattn.gqa_decode(query, keys, values, np.array([length]), return_lse=True)
        np.testing.assert_allclose(out[0, 0], weights, atol=1e-7)
        np.testing.assert_allclose(lse, np.log2(length), atol=1e-6)


def test_r2_r3_empty_and_stale():
    key, value = np.full((3, 4, 1, 64), np.nan, np.float32), np.full((3, 4, 1, 1), 99, np.float32)
    key[1, :3], value[1, :3] = 0, 5
    out, lse = np.full((3, 1, 1), np.nan, np.float32), np.full((3, 1), np.nan, np.float32)
    query = np.ones((3, 1, 64), np.float32)
    for empty in (0, -1, -(2**31)):
        out[:], lse[:] = np.nan, np.nan
        lengths = np.array([empty, 3, empty], np.int32)
        given = nbattn.gqa_decode(query, key, value, lengths, out=out, lse=lse, return_lse=True)
        assert given[0] is out
        assert given[1] is lse
        assert out.ravel().tolist() == [0, 5, 0]
        np.testing.assert_allclose(lse.ravel(), [-np.inf, np.log2(3), -np.inf], rtol=1e-6)


def test_m9_logits_far_below_zero():
    query, key = np.full((1, 1, 128), 64, np.float32), np.full((1, 2, 1, 128), -64, np.float32)
    out, lse = nbattn.gqa_decode(query, key, np.ones((1, 2, 1, 1), np.float32), np.array([2]), return_lse=True)
    assert out.item() == 1
    assert lse.item() == pytest.approx(-66854.859, rel=1e-6)


def test_r10_lse_shape_and_base():
    args = problem()
    _, base_2 = check(args)
    _, base_e = check(args, lse_base="e")
    assert base_2.shape == (ROWS, HEADS * GROUP)
    np.testing.assert_allclose(base_e[[0, 2]], base_2[[0, 2]] * np.log(2), rtol=1e-5)
    assert (base_e[1] == -np.inf).all()


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int16, np.int32, np.uint32, np.int64])
def test_integers_are_read_as_float32_values(dtype):
    rng = np.random.default_rng(3)
    shapes = (ROWS, HEADS * GROUP, DK), (ROWS, SLOTS, HEADS, DK), (ROWS, SLOTS, HEADS, DV)
    numbers = [rng.integers(0 if np.dtype(dtype).kind == "u" else -3, 4, shape).astype(dtype) for shape in shapes]
    floats = [x.astype(np.float32) for x in numbers]
    expected = expect(oracle.gqa_decode, *floats, LENGTHS)
    assert_close(nbattn.gqa_decode(*numbers, LENGTHS, return_lse=True), expected)
    assert_close(nbattn.gqa_decode(floats[0], *numbers[1:], LENGTHS, return_lse=True), expected)
    assert_close(nbattn.gqa_decode(floats[0], numbers[1], floats[2], LENGTHS), expected)
    assert_close(nbattn.gqa_decode(numbers[0], floats[1], numbers[2], LENGTHS), expected)


def test_an_int8_cache_beside_a_16_bit_query():
    query, key, value, lengths = problem("bfloat16")
    numbers = [np.rint(np.nan_to_num(x.astype(np.float32), posinf=0, neginf=0)).astype(np.int8) for x in (key, value)]
    check((query, *numbers, lengths))


def test_the_cache_is_never_written(tmp_path):
    query, key, value, lengths = problem()
    mapped = []
    for name, cache in [("key", key), ("value", value)]:
        cache.astype(np.float32).tofile(tmp_path / name)
        mapped.append(np.memmap(tmp_path / name, np.float32, "r", shape=cache.shape))  # a write would end the process
    before = [bytes(x) for x in mapped]
    assert_close(nbattn.gqa_decode(query, *mapped, lengths), expect(oracle.gqa_decode, query, *mapped, lengths))
    assert [bytes(x) for x in mapped] == before


def test_target_only_confirms():
    args = problem()
    assert np.array_equal(nbattn.gqa_decode(*args), nbattn.gqa_decode(*args, target="cpu"))
    for target in ("cuda", "gpu"):
        with pytest.raises(TargetError, match=r"^target: "):
            nbattn.gqa_decode(*args, target=target)


def test_no_sequences():
    out, lse = nbattn.gqa_decode(*problem(lengths=LENGTHS[:0]), return_lse=True)
    assert out.shape == (0, HEADS * GROUP, DV)
    assert lse.shape == (0, HEADS * GROUP)


Q, K, V, _ = problem(lengths=np.full(3, SLOTS, np.int32))
RULES = {
    "query a list": (dict(query=Q.tolist()), ContractError, "query: must be a NumPy or CuPy array, got list."),
    "no query": (dict(query=None), ContractError, "query: must be a NumPy or CuPy array, got NoneType."),
    "no keys": (dict(key_cache=None), ContractError, "key_cache: must be a NumPy or CuPy array, got NoneType."),
    "no values": (dict(value_cache=None), ContractError, "value_cache: must be a NumPy or CuPy array, got NoneType."),
    "no lengths": (dict(lengths=None), ContractError, "lengths: must be a NumPy or CuPy array, got NoneType."),
    "keys a list": (dict(key_cache=K.tolist()), ContractError, "key_cache: must be a NumPy or CuPy array"),
    "values a list": (dict(value_cache=V.tolist()), ContractError, "value_cache: must be a NumPy or CuPy array"),
    "lengths a list": (dict(lengths=[1, 2, 3]), ContractError, "lengths: must be a NumPy or CuPy array"),
    "query rank": (dict(query=Q[0]), ContractError, "query: must be [3, num_qo_heads, head_dim] (sequences of"),
    "query rank 4": (dict(query=Q[..., None]), ContractError, "query: must be [sequences, num_qo_heads, head_dim]"),
    "sequences": (dict(query=Q[:2]), ContractError, "query: must be [3, num_qo_heads, head_dim] (sequences of"),
    "head size": (dict(query=Q[..., :8]), ContractError, "query: must have the keys' head size 16, got 8."),
    "group": (dict(query=Q[:, :5]), ContractError, "query: must have a positive multiple of 2 (num_kv_heads) heads"),
    "query dtype": (dict(query=Q > 0), ContractError, "query: must be one of float16, bfloat16, float32, float64, got"),
    "complex": (dict(query=Q.astype(complex)), ContractError, "query: must be one of float16"),
    "gaps": (dict(query=np.zeros((3, 6, 32), np.float32)[..., ::2]), ContractError, "query: the last axis must be"),
    "cache dtype": (dict(query=Q.astype("float16")), ContractError, "key_cache, value_cache: must have query's dtype"),
    "integers beside 16 bits": (
        dict(query=Q.astype(ml_dtypes.bfloat16), key_cache=np.ones(K.shape, int), value_cache=np.ones(V.shape, int)),
        ContractError, "key_cache, value_cache: must have query's dtype bfloat16 or one of"),
    "key rank": (dict(key_cache=K[0]), ContractError, "key_cache: must be [pages, page_size, kv_heads, dim] (NHD)"),
    "value dtype": (dict(value_cache=V.astype("float16")), ContractError, "value_cache: must be float32 as key_cache"),
    "value slots": (dict(value_cache=V[:, :4]), ContractError, "value_cache: must be (3, 9, 2, 8) to match key_cache"),
    "value heads": (dict(value_cache=V[:, :, :1]), ContractError, "value_cache: must be (3, 9, 2, 8) to match"),
    "lengths shape": (dict(lengths=LENGTHS[:2]), ContractError, "lengths: must be [3] (sequences of key_cache), got"),
    "lengths dtype": (dict(lengths=np.ones(3)), ContractError, "lengths: must be int32"),
    "length past the slots": (
        dict(lengths=np.array([9, 10, 1])), PageTableError, "lengths[1]: must be in 0..9 (slots of a row), got 10."),
    "sm_scale": (dict(sm_scale="1"), ContractError, "sm_scale: must be a finite number, got '1'."),
    "sm_scale inf": (dict(sm_scale=np.inf), ContractError, "sm_scale: must be a finite number, got inf."),
    "lse_base": (dict(lse_base="10"), ContractError, 'lse_base: must be "2" or "e", got \'10\'.'),
    "out dtype": (dict(out=np.zeros((3, 6, 8))), ContractError, "out: must be float32 of shape [3, 6, 8], got float64"),
    "out shape": (dict(out=np.zeros((3, 6, 7), "f")), ContractError, "out: must be float32 of shape [3, 6, 8]"),
    "lse shape": (dict(lse=np.zeros((3, 5), "f")), ContractError, "lse: must be float32 of shape [3, 6]"),
    "target": (dict(target="tpu"), ContractError, 'target: must be "cpu", "cuda" or "gpu", got \'tpu\'.'),
}  # fmt: skip


@pytest.mark.parametrize(("changes", "kind", "message"), RULES.values(), ids=RULES)
def test_rules(changes, kind, message):
    arguments = dict(query=Q, key_cache=K, value_cache=V, lengths=LENGTHS) | changes
    with pytest.raises(kind) as caught:
        nbattn.gqa_decode(**arguments)
    assert type(caught.value) is kind
    assert str(caught.value).startswith(message)

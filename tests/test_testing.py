"""The testing module itself: its budget lets sound arithmetic pass and catches every class of fault it is meant for."""

from dataclasses import replace

import numpy as np
import pytest

from nbattn import ContractError, oracle, testing
from nbattn.arrays import dtype_from_name
from nbattn.testing import CascadeCase, GatherCase, MergeCase, PagedCase, run_case


def as_a_path(case, **changes):
    """Return the oracle behind the case's own signature and dtypes, with some options changed on the way."""

    def run(*args, **kwargs):
        result = getattr(oracle, case.family)(*args, **{**kwargs, **changes})
        if result is None:
            return None
        lse_dtype = np.float64 if case.q_dtype == "float64" else np.float32
        out, lse = result[0].astype(dtype_from_name(case.out_dtype or case.q_dtype)), result[1].astype(lse_dtype)
        if kwargs.get("out") is not None:
            kwargs["out"][...], kwargs["lse"][...] = out, lse
        return out, lse

    return run


def float32_decode(q, kv, qo_indptr, *, causal, sm_scale=None, sinks=None, window_left=-1, lse_base="2", **_):
    """Return attention of one row per request by an online softmax in float32, one key at a time."""
    out = np.zeros((*q.shape[:2], kv.v.shape[3]), np.float32)
    lse = np.zeros(q.shape[:2], np.float32)
    one = np.float32(1)
    for b, h in np.ndindex(*q.shape[:2]):
        m, d = np.float32(-np.inf), np.float32(0)
        if sinks is not None and sinks[h] > -np.inf:
            m, d = sinks[h], one
        acc = np.zeros(kv.v.shape[3], np.float32)
        first = max(0, kv.kv_lens[b] - 1 - window_left) if window_left >= 0 else 0
        for j in range(first, kv.kv_lens[b]):
            page, slot = kv.kv_indices[kv.kv_indptr[b] + j // kv.page_size], j % kv.page_size
            head = h // (q.shape[1] // kv.num_kv_heads)
            k, v = (x[page, slot, head].astype(np.float32) for x in (kv.k, kv.v))
            s = np.dot(q[b, h].astype(np.float32), k) * np.float32(sm_scale or q.shape[2] ** -0.5)
            top = max(m, s)
            p, old = np.exp(s - top), np.exp(m - top)
            acc, d, m = acc * old + p * v, d * old + p, top
        with np.errstate(divide="ignore"):
            out[b, h] = acc / max(d, np.float32(1e-30))
            lse[b, h] = (np.log(d) + m) / (np.log(2) if lse_base == "2" else 1)
    return out.astype(q.dtype), lse


PLAIN = [
    PagedCase(seed=s, q_dtype=t, kv_lens=(0, 1, 61, 200), page_size=p, group_size=3, head_dim=d, sinks=k, window_left=w)
    for s, (t, p, d, k, w) in enumerate(
        [("float32", 16, 64, None, -1), ("bfloat16", 61, 128, "normal", -1), ("float16", 1, 80, "some", 30),
         ("float32", 3, 256, "huge", 0), ("float32", 2, 1, None, 3)]
    )
]  # fmt: skip


@pytest.mark.parametrize("case", PLAIN, ids=lambda c: c.id)
def test_float32_arithmetic_is_within_the_budget(case):
    result = run_case(case, float32_decode)
    assert result.passed, result


@pytest.mark.parametrize("family", testing.FAMILIES)
def test_random_cases_read_no_poison_and_pass(family):
    rng = np.random.default_rng(2024)
    for _ in range(40):
        case = testing.random_case(family, rng)
        result = run_case(case, as_a_path(case))
        assert result.passed, result


@pytest.mark.parametrize("family", testing.CASES)
def test_the_table_builds_in_every_layout(family):
    for case in testing.CASES[family]:
        result = run_case(case, as_a_path(case))
        assert result.passed, result
        assert eval(repr(case), dict(vars(testing))) == case  # the repr is the repro


LONG = PagedCase(seed=4, kv_lens=(40, 90), qo_lens=(3, 2), group_size=2, head_dim=80, page_size=16, sinks="normal")
FAULTS = [
    (replace(LONG, window_left=16), {"window_left": 15}),
    (LONG, {"sinks": None}),
    (LONG, {"causal": False}),
    (LONG, {"lse_base": "e"}),
    (LONG, {"sm_scale": 0.1119}),
    (replace(LONG, logits_soft_cap=2.0), {"logits_soft_cap": None}),
    (replace(LONG, k_scale="channel"), {"k_scale": 1.0}),
    (replace(LONG, v_scale="head"), {"v_scale": None}),
    (replace(LONG, kv_start=True, chunk_size=16), {"kv_start": None}),
    (replace(LONG, attn_mask="bool"), {"attn_mask": None}),
    (replace(LONG, alibi=True), {"alibi_slopes": None}),
    (replace(LONG, rope=(1e4, 1.0)), {"rope": None}),
    (replace(LONG, extra_rows=2, given_out=True), {"out": None, "lse": None}),
    (CascadeCase(rope=(1e4, 1.0)), {"rope": oracle.Rope(1e4, 1.01)}),
    (GatherCase(kv_lens=(90,), output_gate=True), {"output_gate": None}),
]


@pytest.mark.parametrize("q_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("case", "fault"), FAULTS, ids=lambda x: next(iter(x)) if isinstance(x, dict) else "")
def test_faults_are_caught(case, fault, q_dtype):
    case = case.with_dtypes(q_dtype)
    assert run_case(case, as_a_path(case)).passed
    assert not run_case(case, as_a_path(case, **fault)).passed


def test_merging_with_the_wrong_base_is_caught():
    case = MergeCase(seed=3, rows=9, states=3)
    assert not run_case(case, lambda v, s, **_: oracle.merge_states(v, s, lse_base="e")).passed


def test_writing_beside_a_given_out_is_caught():
    case = PagedCase(kv_lens=(5, 3), given_out=True)

    def careless(*args, out, lse, **kwargs):
        out.base[-1, 0, 0] = 0.0
        return as_a_path(case)(*args, out=out, lse=lse, **kwargs)

    result = run_case(case, careless)
    assert result.out.passed
    assert not result.passed


def test_a_mismatch_names_its_coordinates():
    expected = np.zeros((2, 3))
    actual = expected.copy()
    actual[1, 2] = 0.5
    with pytest.raises(AssertionError, match=r"out: 1 of 6 elements .* worst at \[1, 2\]: got 0\.5, expected 0\.0"):
        testing.assert_close(actual, expected, budget=0.25)
    testing.assert_close(actual, expected, budget=0.5)
    actual[0, 0] = np.nan
    with pytest.raises(AssertionError, match=r"worst at \[0, 0\]"):
        testing.assert_close(actual, expected, budget=1e9)
    with pytest.raises(AssertionError, match=r"shape \(2, 3\), got \(3, 2\)"):
        testing.assert_close(actual.T, expected)


@pytest.mark.parametrize("dtype", [np.uint16, "int8", bool, complex])
def test_a_result_that_is_no_float_is_refused(dtype):
    with pytest.raises(ContractError, match=rf"^out_dtype: must be a float dtype, got {np.dtype(dtype)}\."):
        testing.expect(oracle.merge_states, np.zeros((1, 1, 1, 2)), np.zeros((1, 1, 1)), out_dtype=dtype)


def test_infinities_and_nan_must_stand_in_the_same_places():
    special = np.array([np.nan, np.inf, -np.inf, 1.0])
    testing.assert_close(special, special)
    for swapped in (special[::-1], np.array([np.nan, -np.inf, -np.inf, 1.0])):
        assert not testing.compare(swapped, special, budget=1e9).passed


def test_strided_views_keep_values_between_poison():
    rng = np.random.default_rng(0)
    values = np.arange(24, dtype=np.float32).reshape(3, 2, 4)
    view = testing.spread(values, rng)
    np.testing.assert_array_equal(view, values)
    assert view.strides[2] == 4
    assert view.strides[1] > 16
    assert view.strides[0] > 2 * view.strides[1]
    assert np.count_nonzero(~np.isfinite(view.base)) == view.base.size - values.size
    junk = testing.poison(np.zeros(99, np.float16), rng, np.arange(99) > 1)
    assert (np.isfinite(junk) == (np.arange(99) < 2)).all()
    assert np.isnan(junk).any()
    assert np.isposinf(junk).any()
    assert np.isneginf(junk).any()

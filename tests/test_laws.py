"""Laws that hold between calls, whatever the numbers: on problems that hypothesis draws, through the kernels."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import nbattn
from nbattn import Level, PagedKV
from nbattn.testing import Handmade, assert_close
from nbattn.testing.paths import flat, paged_kv

law = settings(max_examples=40, deadline=None, derandomize=True)
DTYPES = ["float32", "float32", "bfloat16"]


@st.composite
def problems(draw, rotated=True):
    """Draw a problem: ragged rows over ragged requests, a dtype, and options that go together."""
    rng = np.random.default_rng(draw(st.integers(0, 2**31)))
    dtype = nbattn.arrays.dtype_from_name(draw(st.sampled_from(DTYPES)))
    heads, group = draw(st.sampled_from([(1, 1), (1, 4), (2, 3), (2, 1), (1, 20)]))
    dim = draw(st.sampled_from([8, 64, 80]))
    batch = draw(st.integers(1, 3))
    lens = [draw(st.integers(0, 70)) for _ in range(batch)]
    rows = [draw(st.sampled_from([0, 1, 1, 2, 5])) for _ in range(batch)]
    requests = [tuple(rng.normal(size=(2, n, heads, dim)).astype(dtype)) for n in lens]
    q = rng.normal(size=(sum(rows), heads * group, dim)).astype(dtype)
    options = {
        "causal": draw(st.booleans()),
        "window_left": draw(st.sampled_from([-1, -1, 0, 9])),
        "chunk_size": draw(st.sampled_from([None, None, 16])),
        "kv_start": draw(st.sampled_from([None, rng.integers(0, 9, batch).astype(np.int32)])),
        "sinks": draw(st.sampled_from([None, rng.normal(size=heads * group).astype(np.float32)])),
    }
    if rotated:
        options["logits_soft_cap"] = draw(st.sampled_from([None, None, 2.0]))
        options["rope"] = draw(st.sampled_from([None, None, nbattn.Rope(100.0)]))
    return Handmade(requests, q, rows, options)


def budget(problem):
    """Return how far two sound results may differ: a rounding of the inputs' dtype, and of float32 sums."""
    return 2e-2 if problem.query.dtype != np.float32 else 2e-5


def same(actual, expected):
    for x, y in zip(actual, expected, strict=True):
        np.testing.assert_array_equal(x.view(np.uint8), y.view(np.uint8))


def sliced(problem, requests):
    """Return the part of a problem that some of its requests are."""
    bounds = problem.qo_indptr
    q = np.concatenate([problem.query[bounds[b] : bounds[b + 1]] for b in requests])
    options = dict(problem.options)
    if options["kv_start"] is not None:
        options["kv_start"] = options["kv_start"][requests]
    return Handmade([problem.requests[b] for b in requests], q, problem.lens[requests], options)


@law
@given(problems(), st.integers(1, 40))
def test_splits_change_nothing(problem, split_size):
    assert_close(flat(problem, split_size=split_size), flat(problem, split_size=1000), budget=budget(problem))


@law
@given(problems(), st.sampled_from([1, 2, 16, 61]), st.sampled_from(["NHD", "HND"]))
def test_pages_change_no_bit(problem, page_size, kv_layout):
    k, v = (np.zeros((len(problem.requests), 71, *x.shape[1:]), x.dtype) for x in problem.requests[0])
    for row, (keys, values) in enumerate(problem.requests):
        k[row, : len(keys)], v[row, : len(keys)] = keys, values
    kv = PagedKV.from_slots(k, v, problem.kv_lens)
    contiguous = nbattn.paged_attention(problem.query, kv, problem.qo_indptr, return_lse=True, **problem.options)
    same(flat(problem, page_size=page_size, kv_layout=kv_layout), contiguous)


@law
@given(problems(rotated=False))
def test_gathering_all_tokens_is_dense_attention(problem):
    options = {"sinks": problem.options["sinks"]}
    dense = flat(Handmade(problem.requests, problem.query, problem.lens, {"causal": False, **options}))
    width = int(problem.kv_lens.max()) + 1
    lists = np.tile(np.arange(width, dtype=np.int32), (len(problem.query), 1))
    counts = problem.kv_lens[problem.request_of_row]
    kv = paged_kv(problem.requests, 4)
    gathered = nbattn.gather_attention(problem.query, kv, lists, counts, problem.qo_indptr, return_lse=True, **options)
    assert_close(gathered, dense, budget=budget(problem))


@law
@given(problems(), st.integers(0, 70), st.sampled_from([None, 7]))
def test_a_cascade_is_flat_attention(problem, cut, split_size):
    options = dict(problem.options)
    causal = options.pop("causal")
    parts = [[tuple(x[:cut] for x in r), tuple(x[cut:] for x in r)] for r in problem.requests]
    levels = [Level(paged_kv(list(p), 4), problem.qo_indptr, causal) for p in zip(*parts, strict=True)]
    got = nbattn.cascade_attention(problem.query, levels, split_size=split_size, return_lse=True, **options)
    assert_close(got, flat(problem), budget=budget(problem))


@law
@given(problems(), st.randoms(use_true_random=False))
def test_the_order_of_the_batch_changes_no_bit(problem, random):
    order = list(range(len(problem.requests)))
    random.shuffle(order)
    results = [flat(p, split_size=16) for p in (problem, sliced(problem, order))]
    rows = np.concatenate([np.arange(*problem.qo_indptr[b : b + 2]) for b in order]).astype(int)
    same(results[1], [x[rows] for x in results[0]])


@law
@given(problems(), st.data())
def test_the_batch_around_a_request_changes_no_bit(problem, data):
    b = data.draw(st.integers(0, len(problem.requests) - 1))
    rows = slice(*problem.qo_indptr[b : b + 2])
    same(flat(sliced(problem, [b]), split_size=16), [x[rows] for x in flat(problem, split_size=16)])


@pytest.fixture
def two_threads():
    yield lambda n: nbattn.set_num_threads(n)
    nbattn.set_num_threads(None)


def large_problem():
    """Return a problem that is worth more than one thread."""
    rng = np.random.default_rng(5)
    requests = [tuple(rng.normal(size=(2, n, 2, 64)).astype(np.float32)) for n in (3000, 100, 1700)]
    return Handmade(requests, rng.normal(size=(12, 8, 64)).astype(np.float32), (1, 10, 1))


def test_the_number_of_threads_changes_no_bit(two_threads):
    problem = large_problem()
    results = []
    for n in (1, 2, 5):
        two_threads(n)
        results.append(flat(problem, split_size=256))
    same(results[0], results[1])
    same(results[0], results[2])


def test_twenty_runs_give_the_same_bits(two_threads):
    two_threads(4)
    problem = large_problem()
    first = flat(problem)
    for _ in range(20):
        same(flat(problem), first)


@law
@given(problems(rotated=False), st.integers(1, 20))
def test_keys_masked_away_are_a_shorter_cache(problem, extra):
    p = problem.row_position
    longer, mask = [], np.zeros((len(problem.requests), 1, 1, int(problem.kv_lens.max()) + extra), bool)
    for b, (k, v) in enumerate(problem.requests):
        junk = np.full((extra, *k.shape[1:]), np.nan, k.dtype)
        longer.append((np.concatenate([k, junk]), np.concatenate([v, junk])))
        mask[b, ..., : len(k)] = True
    options = {**problem.options, "q_positions": p}
    masked = Handmade(longer, problem.query, problem.lens, {**options, "attn_mask": mask})
    assert_close(flat(masked, split_size=16), flat(problem, split_size=16), budget=budget(problem))


@st.composite
def states(draw, count):
    """Draw states [count] of the same shape, some absent with NaN for values."""
    rng = np.random.default_rng(draw(st.integers(0, 2**31)))
    n, heads, dim = draw(st.integers(0, 5)), draw(st.integers(1, 3)), draw(st.sampled_from([1, 7, 64]))
    v = rng.normal(size=(n, count, heads, dim)).astype(np.float32)
    s = (4 * rng.normal(size=(n, count, heads))).astype(np.float32)
    absent = rng.random(s.shape) < 0.3
    s[absent], v[absent] = -np.inf, np.nan
    return v, s


@law
@given(states(2), st.sampled_from(["2", "e"]))
def test_merging_commutes(pair, lse_base):
    v, s = pair
    one = nbattn.merge_state(v[:, 0], s[:, 0], v[:, 1], s[:, 1], lse_base=lse_base)
    other = nbattn.merge_state(v[:, 1], s[:, 1], v[:, 0], s[:, 0], lse_base=lse_base)
    assert_close(one, other, budget=1e-6)


@law
@given(states(3), st.sampled_from(["2", "e"]))
def test_merging_associates(triple, lse_base):
    v, s = triple
    a, b, c = ((v[:, i], s[:, i]) for i in range(3))
    left = nbattn.merge_state(*nbattn.merge_state(*a, *b, lse_base=lse_base), *c, lse_base=lse_base)
    right = nbattn.merge_state(*a, *nbattn.merge_state(*b, *c, lse_base=lse_base), lse_base=lse_base)
    assert_close(left, right, budget=8e-6)
    assert_close(nbattn.merge_states(v, s, lse_base=lse_base), left, budget=8e-6)

"""The cascade wrappers: flat attention over the concatenated keys of all levels, planned once and run for many layers."""

import inspect
from dataclasses import dataclass

import ml_dtypes
import numpy as np
import pytest

import nbattn
from nbattn import oracle
from nbattn.testing import assert_close, expect, poison

Multi = nbattn.MultiLevelCascadeAttentionWrapper
Decode = nbattn.BatchDecodeWithSharedPrefixPagedKVCacheWrapper
Prefill = nbattn.BatchPrefillWithSharedPrefixPagedKVCacheWrapper


@dataclass(frozen=True)
class Setup:
    """Levels of (qo_indptr, kv_lens) over one pool of shuffled pages; every slot that nobody owns is poison."""

    levels: tuple
    num_kv_heads: int = 2
    group_size: int = 3
    head_dim: int = 16
    page_size: int = 4
    dtype: str = "float32"
    seed: int = 0

    def build(self):
        rng = np.random.default_rng(self.seed)
        dtype = np.dtype(getattr(ml_dtypes, self.dtype, self.dtype))
        pages = [[-(-n // self.page_size) for n in lens] for _, lens in self.levels]
        order = rng.permutation(sum(map(sum, pages)) + 3).astype(np.int32)
        shape = (len(order), 2, self.page_size, self.num_kv_heads, self.head_dim)
        cache = rng.normal(size=shape).astype(dtype)
        live = np.zeros((len(order), self.page_size), bool)
        lists, at = ([], [], [], []), 0
        for (offsets, lens), counts in zip(self.levels, pages, strict=True):
            indptr = np.cumsum([0, *counts]).astype(np.int32)
            ids = order[at : at + indptr[-1]]
            at += indptr[-1]
            for begin, n in zip(indptr, lens, strict=False):
                token = np.arange(n)
                live[ids[begin + token // self.page_size], token % self.page_size] = True
            junk = np.array([2**31 - 1, -7], np.int32)  # past the table, never read
            lists[0].append(np.array(offsets, np.int32))
            lists[1].append(indptr)
            lists[2].append(np.concatenate([ids, junk]))
            lists[3].append(np.array([(n - 1) % self.page_size + 1 if n else 99 for n in lens], np.int32))
        poison(cache, rng, ~live[:, None, :, None, None])
        rows = max(offsets[-1] for offsets, _ in self.levels)
        q = rng.normal(size=(rows, self.num_kv_heads * self.group_size, self.head_dim)).astype(dtype)
        return q, cache, lists

    @property
    def sizes(self):
        return self.num_kv_heads * self.group_size, self.num_kv_heads, self.head_dim, self.page_size

    def flat(self, cache, lists):
        """Return a PagedKV of each last-level request's keys over all levels, one after another."""
        requests = []
        for begin in lists[0][-1][:-1]:
            ids = []
            for offsets, indptr, indices, last in zip(*lists, strict=True):
                b = np.searchsorted(offsets, begin, side="right") - 1
                own = indices[indptr[b] : indptr[b + 1]]
                tokens = cache[own].swapaxes(1, 2).reshape(-1, 2, *cache.shape[3:])  # [tokens, 2, heads, dim]
                ids.append(tokens[: len(tokens) - self.page_size + last[b]] if len(own) else tokens)
            requests.append(np.concatenate(ids))
        slots = np.full((len(requests), max(map(len, requests)) + 1, *requests[0].shape[1:]), np.nan, cache.dtype)
        for row, tokens in zip(slots, requests, strict=True):
            row[: len(tokens)] = tokens
        lens = np.array([len(x) for x in requests], np.int32)
        return nbattn.PagedKV.from_slots(slots[:, :, 0], slots[:, :, 1], lens)


ONE = ((((0, 2, 3, 7), (9, 1, 4)),), "one")
TWO = ((((0, 7), (13,)), ((0, 2, 3, 7), (9, 1, 4))), "two")
THREE = ((((0, 7), (13,)), ((0, 3, 7), (8, 17)), ((0, 2, 3, 7), (9, 1, 4))), "three")
FOUR = (
    (((0, 7), (70,)), ((0, 3, 7), (4, 0)), ((0, 3, 5, 7), (3, 5, 0)), ((0, 1, 2, 3, 5, 7), (3, 1, 2, 2, 9))),
    "four",
)
NESTED = [pytest.param(levels, id=name) for levels, name in (ONE, TWO, THREE, FOUR)]
UNEVEN = [
    pytest.param((((1, 4), (11,)), ((0, 2, 4), (3, 5))), id="level-0-starts-at-row-1"),
    pytest.param((((0, 3), (11,)), ((0, 2, 5), (3, 5))), id="level-0-ends-early"),
    pytest.param((((0, 4), (11,)), ((2, 3, 4), (3, 5))), id="last-level-starts-at-row-2"),
    pytest.param((((0, 3), (9,)), ((0, 1, 2, 3), (0, 2, 0))), id="empty-suffixes"),
    pytest.param((((0, 4), (0,)), ((0, 2, 4), (0, 6))), id="empty-prefix"),
    pytest.param((((0, 4, 4, 6), (5, 3, 8)), ((0, 0, 3, 6), (7, 5, 3))), id="requests-without-rows"),
    pytest.param((((0, 3, 6), (6, 9)), ((0, 2, 6), (4, 7))), id="a-request-under-two-prefixes"),
]
OPTIONS = [
    {},
    {"causal": True},
    {"window_left": 5},
    {"causal": True, "window_left": 0},
    {"logits_soft_cap": 0.7, "sm_scale": 0.5},
    {"causal": True, "pos_encoding_mode": "ROPE_LLAMA"},
    {"pos_encoding_mode": "ROPE_LLAMA", "rope_scale": 2.5, "rope_theta": 100.0, "window_left": 7},
    {"causal": True, "pos_encoding_mode": "ALIBI"},
    {"causal": True, "pos_encoding_mode": "ALIBI", "logits_soft_cap": 2.0, "window_left": 11, "sm_scale": 0.2},
]


def run_options(setup, kind):
    rng = np.random.default_rng(5)
    heads, kv_heads, dim, _ = setup.sizes
    if kind == "plain":
        return {}
    return {
        "sinks": np.where(np.arange(heads) % 2, -np.inf, rng.normal(size=heads)).astype(np.float32),
        "k_scale": rng.uniform(0.5, 1.5, (kv_heads, 1)).astype(np.float32),
        "v_scale": rng.uniform(0.5, 1.5, (kv_heads, dim)).astype(np.float32),
        "lse_base": "e",
    }


def planned(setup, lists, options=None, **kwargs):
    wrapper = Multi(len(setup.levels), **kwargs)
    wrapper.plan(*lists, *setup.sizes, **(options or {}))
    return wrapper


@pytest.mark.parametrize("run_kind", ["plain", "all"])
@pytest.mark.parametrize("options", OPTIONS, ids=lambda x: "-".join(map(str, x.values())) or "plain")
@pytest.mark.parametrize("levels", NESTED + UNEVEN)
def test_every_cascade_is_its_definition(levels, options, run_kind):
    setup = Setup(levels, group_size=3, seed=len(levels))
    q, cache, lists = setup.build()
    more = run_options(setup, run_kind)
    result = planned(setup, lists, options).run(q, cache, return_lse=True, **more)
    assert_close(result, expect(oracle.multi_level_cascade, q, cache, *lists, **options, **more))


@pytest.mark.parametrize("run_kind", ["plain", "all"])
@pytest.mark.parametrize("options", OPTIONS, ids=lambda x: "-".join(map(str, x.values())) or "plain")
@pytest.mark.parametrize("levels", NESTED)
def test_cascade_is_flat_attention_over_the_concatenated_keys(levels, options, run_kind):
    setup = Setup(levels, group_size=5, num_kv_heads=1, page_size=3)
    q, cache, lists = setup.build()
    more = run_options(setup, run_kind)
    result = planned(setup, lists, options).run(q, cache, return_lse=True, **more)
    flat = dict(options)
    mode = flat.pop("pos_encoding_mode", "NONE")
    rope = nbattn.Rope(flat.pop("rope_theta", 1e4), flat.pop("rope_scale", 1.0)) if mode == "ROPE_LLAMA" else None
    slopes = oracle.alibi_slopes(5).astype(np.float32) if mode == "ALIBI" else None
    flat = {"causal": False, "rope": rope, "alibi_slopes": slopes, **flat, **more}
    expected = nbattn.paged_attention(q, setup.flat(cache, lists), lists[0][-1], return_lse=True, **flat)
    budget = expect(oracle.multi_level_cascade, q, cache, *lists, **options, **more)
    for name, a, b, one in zip(("out", "lse"), result, expected, (budget.out_budget, budget.lse_budget), strict=True):
        assert_close(a, b, budget=2 * one, name=name)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
def test_every_query_dtype(dtype):
    setup = Setup(THREE[0], dtype=dtype, head_dim=24)
    q, cache, lists = setup.build()
    wrapper = planned(setup, lists, {"causal": True, "q_data_type": dtype, "kv_data_type": dtype})
    out, lse = wrapper.run(q, cache, return_lse=True)
    assert (out.dtype, lse.dtype) == (q.dtype, np.float64 if dtype == "float64" else np.float32)
    assert_close((out, lse), expect(oracle.multi_level_cascade, q, cache, *lists, causal=True))


def test_int8_cache_needs_its_scales():
    setup = Setup(TWO[0])
    q, cache, lists = setup.build()
    cache = np.clip(np.nan_to_num(40 * cache, nan=127, posinf=127, neginf=-127), -127, 127).astype(np.int8)
    wrapper = planned(setup, lists, {"kv_data_type": "int8"})
    scales = {"k_scale": 0.025, "v_scale": np.float32(0.03)}
    assert_close(wrapper.run(q, cache, **scales), expect(oracle.multi_level_cascade, q, cache, *lists, **scales))
    with pytest.raises(nbattn.ContractError, match="v_scale: must be given for an int8 cache"):
        wrapper.run(q, cache, k_scale=0.025)


@pytest.mark.parametrize("form", ["combined", "tuple", "list", "strided"])
@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_cache_forms_give_the_same_bits(layout, form):
    setup = Setup(TWO[0])
    q, cache, lists = setup.build()
    expected = planned(setup, lists).run(q, cache)
    x = cache if layout == "NHD" else np.ascontiguousarray(cache.swapaxes(2, 3))
    if form in ("tuple", "list"):
        x = {"tuple": tuple, "list": list}[form]([x[:, 0], x[:, 1].copy()])
    if form == "strided":
        x = np.repeat(x, 2, axis=0)[::2]
    np.testing.assert_array_equal(planned(setup, lists, kv_layout=layout).run(q, x), expected)


def test_value_heads_may_have_another_size():
    setup = Setup(TWO[0])
    q, cache, lists = setup.build()
    pair = cache[:, 0], cache[:, 1, :, :, :5].copy()
    out = planned(setup, lists).run(q, pair)
    assert out.shape == (7, 6, 5)
    assert_close(out, expect(oracle.multi_level_cascade, q, pair, *lists))


# ---- life cycle


def test_one_plan_serves_many_layers_and_a_second_plan_replaces_it():
    setup, later = Setup(TWO[0]), Setup(((TWO[0][0]), ((0, 1, 4, 6), (2, 6, 12))), seed=3)
    wrapper = Multi(2)
    for one, options in ((setup, {"causal": True}), (later, {"window_left": 2}), (setup, {})):
        q, cache, lists = one.build()
        wrapper.plan(*lists, *one.sizes, **options)
        for layer in range(3):
            shown = cache if layer < 2 else cache[..., ::-1].copy()
            expected = expect(oracle.multi_level_cascade, q, shown, *lists, **options)
            assert_close(wrapper.run(q, shown, return_lse=True), expected)


def test_a_plan_does_not_see_later_edits_of_its_arrays():
    setup = Setup(TWO[0])
    q, cache, lists = setup.build()
    wrapper = planned(setup, lists)
    expected = wrapper.run(q, cache)
    for arrays in lists:
        for x in arrays:
            x[:] = -1
    np.testing.assert_array_equal(wrapper.run(q, cache), expected)


def test_a_plan_serves_caches_of_any_size_that_holds_its_pages():
    setup = Setup(TWO[0])
    q, cache, lists = setup.build()
    wrapper = planned(setup, lists)
    expected = wrapper.run(q, cache)
    np.testing.assert_array_equal(wrapper.run(q, np.concatenate([cache, cache])), expected)
    np.testing.assert_array_equal(wrapper.run(q, cache), expected)
    largest = max(x[: p[-1]].max() for p, x in zip(lists[1], lists[2], strict=True))
    with pytest.raises(nbattn.PageTableError, match=rf"paged_kv_indices_arr\[\d\]\[\d+\]: must be below {largest}"):
        wrapper.run(q, cache[:largest])


def test_run_before_plan_says_so():
    with pytest.raises(nbattn.ContractError, match=r"run: must follow plan\(\.\.\.\)"):
        Multi(2).run(np.zeros((1, 1, 8), np.float32), np.zeros((1, 2, 4, 1, 8), np.float32))
    for wrapper in (Decode(), Prefill()):
        with pytest.raises(nbattn.ContractError, match=r"forward: must follow begin_forward\(\.\.\.\)"):
            wrapper.forward(*[np.zeros((1, 1, 8), np.float32)] * 3, np.zeros((1, 2, 4, 1, 8), np.float32))


def test_a_refused_plan_leaves_the_last_one():
    setup = Setup(TWO[0])
    q, cache, lists = setup.build()
    wrapper = planned(setup, lists)
    expected = wrapper.run(q, cache)
    with pytest.raises(nbattn.ContractError):
        wrapper.plan(*lists, *setup.sizes, causal=True, q_data_type="int8")
    np.testing.assert_array_equal(wrapper.run(q, cache), expected)


def test_workspaces_aliases_and_end_forward_change_nothing():
    setup = Setup(TWO[0])
    q, cache, lists = setup.build()
    expected = planned(setup, lists).run(q, cache)
    workspace = np.full(64, 0xFF, np.uint8)
    wrapper = Multi(2, workspace)
    assert wrapper.begin_forward(*lists, *setup.sizes) is None
    wrapper.reset_workspace_buffer(workspace[:8], [workspace, workspace])
    np.testing.assert_array_equal(wrapper.forward(q, cache), expected)
    assert wrapper.end_forward() is None
    wrapper.reset_workspace_buffer(None, None)
    np.testing.assert_array_equal(wrapper.run(q, cache), expected)
    assert (workspace == 0xFF).all()


def test_fp16_reduction_changes_nothing():
    setup = Setup(TWO[0])
    q, cache, lists = setup.build()
    a, b = (planned(setup, lists, {"use_fp16_qk_reduction": x}).run(q, cache) for x in (False, True))
    np.testing.assert_array_equal(a, b)


CHANGES = {
    "causal": True,
    "pos_encoding_mode": "ALIBI",
    "sm_scale": 0.7,
    "window_left": 3,
    "logits_soft_cap": 0.3,
}


@pytest.mark.parametrize("name", CHANGES)
def test_each_planned_option_changes_the_result(name):
    setup = Setup(TWO[0])
    q, cache, lists = setup.build()
    plain = planned(setup, lists).run(q, cache)
    assert np.abs(planned(setup, lists, {name: CHANGES[name]}).run(q, cache) - plain).max() > 1e-3


@pytest.mark.parametrize(("name", "value"), [("rope_scale", 3.0), ("rope_theta", 50.0)])
def test_rotary_numbers_count_in_their_mode_alone(name, value):
    setup = Setup(TWO[0])
    q, cache, lists = setup.build()
    for mode in ("NONE", "ALIBI", "ROPE_LLAMA"):
        a, b = (
            planned(setup, lists, {"pos_encoding_mode": mode, **more}).run(q, cache) for more in ({}, {name: value})
        )
        assert (np.abs(a - b).max() > 1e-3) == (mode == "ROPE_LLAMA")


@pytest.mark.parametrize("name", ["sinks", "k_scale", "v_scale"])
def test_each_run_option_changes_the_result(name):
    setup = Setup(TWO[0])
    q, cache, lists = setup.build()
    wrapper = planned(setup, lists)
    changed = wrapper.run(q, cache, **{name: run_options(setup, "all")[name]})
    assert np.abs(changed - wrapper.run(q, cache)).max() > 1e-3


def test_off_values_are_the_defaults():
    setup = Setup(TWO[0])
    q, cache, lists = setup.build()
    plain = planned(setup, lists).run(q, cache)
    off = {"window_left": -9, "logits_soft_cap": 0, "sm_scale": 0.25, "rope_theta": 1e4, "rope_scale": 1.0}
    np.testing.assert_array_equal(planned(setup, lists, off).run(q, cache), plain)


def test_given_out_and_lse_are_filled_and_uncovered_rows_stay():
    setup = Setup((((1, 3), (11,)), ((1, 2, 3), (3, 5))))
    q, cache, lists = setup.build()
    q = np.concatenate([q, np.full_like(q[:1], np.nan)])
    q[0] = np.nan  # no level covers rows 0 and 3
    out, lse = np.full((4, 6, 16), 7, np.float32), np.full((4, 6), 7, np.float32)
    wrapper = planned(setup, lists)
    result = wrapper.run(q, cache, out=out, lse=lse, return_lse=True)
    assert result[0] is out
    assert result[1] is lse
    assert (out[[0, 3]] == 7).all()
    assert (lse[[0, 3]] == 7).all()
    fresh = wrapper.run(q, cache, return_lse=True)
    assert (fresh[0][[0, 3]] == 0).all()
    assert (fresh[1][[0, 3]] == -np.inf).all()
    np.testing.assert_array_equal(fresh[0][1:3], out[1:3])


def test_natural_lse_is_base_2_times_ln_2():
    setup = Setup(TWO[0])
    q, cache, lists = setup.build()
    wrapper = planned(setup, lists)
    two, natural = (wrapper.run(q, cache, return_lse=True, lse_base=base)[1] for base in "2e")
    np.testing.assert_allclose(natural, two * np.log(2), rtol=1e-6)


def test_unmapped_pages_are_dropped():
    setup = Setup(TWO[0])
    q, cache, lists = setup.build()
    lists[2][0][1] = -3
    assert_close(planned(setup, lists).run(q, cache), expect(oracle.multi_level_cascade, q, cache, *lists))


def test_no_rows_and_no_requests():
    wrapper = Multi(2)
    nothing = np.zeros(0, np.int32)
    wrapper.plan([np.zeros(1, np.int32)] * 2, [np.zeros(1, np.int32)] * 2, [nothing] * 2, [nothing] * 2, 2, 1, 8, 4)
    out, lse = wrapper.run(np.zeros((0, 2, 8), np.float32), np.zeros((1, 2, 4, 1, 8), np.float32), return_lse=True)
    assert (out.shape, lse.shape) == ((0, 2, 8), (0, 2))


# ---- buffers of CUDA graphs, on NumPy


def buffers_for(lists, spare=0):
    buffers = [[np.full(x.size + spare, -5, np.int32) for x in arrays] for arrays in lists]
    names = "qo_indptr_buf_arr paged_kv_indptr_buf_arr paged_kv_indices_buf_arr paged_kv_last_page_len_buf_arr".split()
    return dict(zip(names, buffers, strict=True))


@pytest.mark.parametrize("spare", [0, 5])
def test_plan_copies_into_the_buffers_and_run_reads_them(spare):
    setup = Setup(TWO[0])
    q, cache, lists = setup.build()
    buffers = buffers_for(lists, spare)
    wrapper = planned(setup, lists, {"causal": True}, use_cuda_graph=True, **buffers)
    assert wrapper.is_cuda_graph_enabled
    for (name, given), arrays in zip(buffers.items(), lists, strict=True):
        for level, (buffer, x) in enumerate(zip(given, arrays, strict=True)):
            filled = lists[1][level][-1] if "indices" in name else x.size
            assert buffer[:filled].tolist() == x[:filled].tolist()
            assert (buffer[filled:] == -5).all()
    assert_close(wrapper.run(q, cache), expect(oracle.multi_level_cascade, q, cache, *lists, causal=True))
    first, second = buffers["paged_kv_indices_buf_arr"]
    first[[0, 1]] = first[[1, 0]]
    second[0] = second[1]
    edited = [first[:4].copy(), second[: lists[1][1][-1]].copy()]
    lists = (*lists[:2], edited, lists[3])
    assert_close(wrapper.run(q, cache), expect(oracle.multi_level_cascade, q, cache, *lists, causal=True))
    buffers["paged_kv_last_page_len_buf_arr"][0][0] = 4  # 16 keys instead of 13: fill them first
    cache = np.where(np.isfinite(cache), cache, np.float32(0.5))
    lists[3][0] = np.array([4])
    assert_close(wrapper.run(q, cache), expect(oracle.multi_level_cascade, q, cache, *lists, causal=True))


def test_a_later_plan_reuses_the_buffers():
    setup, later = Setup(TWO[0]), Setup(((TWO[0][0]), ((0, 1, 4, 6), (2, 6, 5))), seed=3)
    buffers = buffers_for(setup.build()[2])
    wrapper = Multi(2, use_cuda_graph=True, **buffers)
    for one in (setup, later):
        q, cache, lists = one.build()
        wrapper.plan(*lists, *one.sizes)
        for _ in range(2):
            assert_close(wrapper.run(q, cache), expect(oracle.multi_level_cascade, q, cache, *lists))


def test_buffers_without_a_graph_are_not_touched():
    setup = Setup(TWO[0])
    q, cache, lists = setup.build()
    buffers = buffers_for(lists)
    wrapper = planned(setup, lists, **buffers)
    assert not wrapper.is_cuda_graph_enabled
    np.testing.assert_array_equal(wrapper.run(q, cache), planned(setup, lists).run(q, cache))
    assert all((x == -5).all() for given in buffers.values() for x in given)


@pytest.mark.parametrize("level", [0, 1])
@pytest.mark.parametrize("number", range(4))
def test_a_buffer_that_is_too_small_names_its_level(number, level):
    setup = Setup(TWO[0])
    _, _, lists = setup.build()
    buffers = buffers_for(lists)
    name = list(buffers)[number]
    used = int(lists[1][level][-1]) if number == 2 else buffers[name][level].size
    buffers[name][level] = np.full(used - 1, -5, np.int32)
    wrapper = Multi(2, use_cuda_graph=True, **buffers)
    rule = rf"{name}\[{level}\]: must hold at least {used} entries for level {level}, got {used - 1}"
    with pytest.raises(nbattn.ContractError, match=rule):
        wrapper.plan(*lists, *setup.sizes)
    assert all((x == -5).all() for given in buffers.values() for x in given)  # nothing was copied


def frozen(x):
    x.flags.writeable = False
    return x


BAD_BUFFERS = [
    (None, "qo_indptr_buf_arr: must be given with use_cuda_graph=True, got None"),
    ([np.zeros(2, np.int32)], r"qo_indptr_buf_arr: must be a list of 2 arrays \(num_levels\), got 1 entries"),
    (np.zeros((2, 2), np.int32), "qo_indptr_buf_arr: must be a list of 2 arrays"),
    ([np.zeros(2, np.int64)] * 2, r"qo_indptr_buf_arr\[0\]: must be a one-dimensional int32 array, got int64"),
    ([np.zeros((2, 1), np.int32)] * 2, r"qo_indptr_buf_arr\[0\]: must be a one-dimensional int32 array"),
    ([[0, 1]] * 2, r"qo_indptr_buf_arr\[0\]: must be a NumPy or CuPy array, got list"),
    ([frozen(np.zeros(2, np.int32))] * 2, r"qo_indptr_buf_arr\[0\]: must be writable"),
]


@pytest.mark.parametrize(("given", "rule"), BAD_BUFFERS)
def test_bad_buffers_are_refused(given, rule):
    buffers = buffers_for(Setup(TWO[0]).build()[2])
    with pytest.raises(nbattn.ContractError, match=rule):
        Multi(2, use_cuda_graph=True, **{**buffers, "qo_indptr_buf_arr": given})


# ---- what is refused


@pytest.mark.parametrize(
    ("kwargs", "rule"),
    [
        ({"num_levels": 0}, "num_levels: must be at least 1, got 0"),
        ({"num_levels": "2"}, "num_levels: must be an int, got '2'"),
        ({"num_levels": 1, "kv_layout": "DNH"}, 'kv_layout: must be "NHD" or "HND", got \'DNH\''),
    ],
)
def test_bad_constructor_arguments(kwargs, rule):
    with pytest.raises(nbattn.ContractError, match=rule):
        Multi(**kwargs)
    if "kv_layout" in kwargs:
        for wrapper in (Decode, Prefill):
            with pytest.raises(nbattn.ContractError, match=rule):
                wrapper(None, kwargs["kv_layout"])


BAD_PLANS = [
    ({"num_qo_heads": 5}, r"num_qo_heads: must be a multiple of 2 \(num_kv_heads\), got 5"),
    ({"num_qo_heads": 0}, "num_qo_heads: must be at least 1, got 0"),
    ({"num_kv_heads": 0}, "num_kv_heads: must be at least 1, got 0"),
    ({"head_dim": 16.0}, r"head_dim: must be an int, got 16\.0"),
    ({"page_size": 0}, "page_size: must be at least 1, got 0"),
    ({"pos_encoding_mode": "ROPE"}, "pos_encoding_mode: must be one of NONE, ROPE_LLAMA, ALIBI, got 'ROPE'"),
    ({"pos_encoding_mode": "ROPE_LLAMA", "head_dim": 15}, "head_dim: must be even for pos_encoding_mode ROPE_LLAMA"),
    ({"sm_scale": np.nan}, "sm_scale: must be a finite number, got nan"),
    ({"window_left": 1.5}, r"window_left: must be an int, got 1\.5"),
    ({"logits_soft_cap": -1.0}, r"logits_soft_cap: must not be negative, got -1\.0"),
    ({"rope_scale": 0}, "rope_scale: must be positive, got 0"),
    ({"rope_theta": -1.0}, r"rope_theta: must be positive, got -1\.0"),
    ({"rope_theta": "1e4"}, "rope_theta: must be a finite number"),
    ({"q_data_type": "int8"}, "q_data_type: must be None or one of float16, bfloat16, float32, float64, got 'int8'"),
    ({"q_data_type": "torch.float16"}, "q_data_type: must be None or one of"),
    ({"kv_data_type": np.int16}, "kv_data_type: must be None or one of"),
]


@pytest.mark.parametrize(("change", "rule"), BAD_PLANS)
def test_bad_plan_options(change, rule):
    setup = Setup(TWO[0])
    names = ["num_qo_heads", "num_kv_heads", "head_dim", "page_size"]
    arguments = {**dict(zip(names, setup.sizes, strict=True)), **change}
    with pytest.raises(nbattn.ContractError, match=f"^{rule}"):
        Multi(2).plan(*setup.build()[2], **arguments)


LIST_NAMES = ["qo_indptr_arr", "paged_kv_indptr_arr", "paged_kv_indices_arr", "paged_kv_last_page_len"]
BAD_LEVELS = [  # (list, level, array, rule): TWO has one request of 4 pages above three of 3, 1 and 1
    (0, 0, [0, 5, 7], r"qo_indptr_arr\[0\]: must be \[2\] \(batch \+ 1\), got shape \(3,\)"),
    (0, 1, [0, 2, 1, 7], r"qo_indptr_arr\[1\]\[2\]: must not be below qo_indptr_arr\[1\]\[1\] = 2, got 1"),
    (0, 1, [-1, 2, 3, 7], r"qo_indptr_arr\[1\]\[0\]: must be at least 0, got -1"),
    (1, 0, [1, 4], r"paged_kv_indptr_arr\[0\]\[0\]: must be 0, got 1"),
    (1, 1, [0, 3, 2, 5], r"paged_kv_indptr_arr\[1\]\[2\]: must be at least 3 \(paged_kv_indptr_arr\[1\]\[1\]\), got 2"),
    (1, 1, [0, 3, 4, 9], r"paged_kv_indptr_arr\[1\]\[3\]: must be at most 7 \(entries of paged_kv_indices_arr\[1\]\)"),
    (1, 1, [], r"paged_kv_indptr_arr\[1\]: must hold at least the leading 0"),
    (3, 1, [1, 1], r"paged_kv_last_page_len\[1\]: must have 3 entries \(one per request of paged_kv_indptr_arr\[1\]\)"),
    (3, 1, [1, 5, 1], r"paged_kv_last_page_len\[1\]\[1\]: must be in 1\.\.4 \(page_size\), got 5 \(request 1 owns "
                      r"paged_kv_indices_arr\[1\]\[3:4\]\)"),
    (3, 0, [0], r"paged_kv_last_page_len\[0\]\[0\]: must be in 1\.\.4 \(page_size\), got 0"),
    (2, 0, [[1, 2]], r"paged_kv_indices_arr\[0\]: must have 1 dimension, got shape \(1, 2\)"),
]  # fmt: skip


@pytest.mark.parametrize(("number", "level", "array", "rule"), BAD_LEVELS)
def test_bad_tables_name_argument_level_and_request(number, level, array, rule):
    setup = Setup(TWO[0])
    lists = setup.build()[2]
    lists[number][level] = np.array(array, np.int32)
    with pytest.raises(nbattn.ContractError, match=f"^{rule}"):
        Multi(2).plan(*lists, *setup.sizes)


@pytest.mark.parametrize("number", range(4))
def test_bad_lists(number):
    setup, name = Setup(TWO[0]), LIST_NAMES[number]
    for change, rule in [
        (lambda x: x[:1], rf"{name}: must be a list of 2 arrays \(num_levels\), got 1 entries"),
        (lambda x: x[0], rf"{name}: must be a list of 2 arrays \(num_levels\), got ndarray"),
        (lambda x: [x[0], x[1].astype(np.float32)], rf"{name}\[1\]: must be int32"),
        (lambda x: [x[0].tolist(), x[1]], rf"{name}\[0\]: must be a NumPy or CuPy array, got list"),
    ]:
        lists = list(setup.build()[2])
        lists[number] = change(lists[number])
        with pytest.raises(nbattn.ContractError, match=f"^{rule}"):
            Multi(2).plan(*lists, *setup.sizes)


def test_one_level_is_paged_attention_and_starts_at_row_0():
    lists = Setup(ONE[0]).build()[2]
    lists[0][0] = np.array([1, 2, 3, 7], np.int32)
    with pytest.raises(nbattn.ContractError, match=r"^qo_indptr_arr\[0\]\[0\]: must be 0, got 1"):
        Multi(1).plan(*lists, *Setup(ONE[0]).sizes)


BAD_RUNS = [
    ("q", lambda q: q[:5], r"q: must be \[7, 6, 16\] \(rows, num_qo_heads and head_dim as planned\), got shape \[5"),
    ("q", lambda q: q[:, :4], r"q: must be \[7, 6, 16\]"),
    ("q", lambda q: q[..., :8], r"q: must be \[7, 6, 16\]"),
    ("q", lambda q: q[0], r"q: must be \[7, 6, 16\]"),
    ("q", lambda q: q.tolist(), "q: must be a NumPy or CuPy array, got list"),
    ("q", lambda q: q.astype(np.float16), r"q: must be float32 as planned \(q_data_type\), got float16"),
    ("cache", lambda c: c[:, :, :3], r"paged_kv_cache: must have pages of \[4, 2, 16\] \(NHD; page_size, num_kv_heads "
                                     r"and head_dim as planned\), got \[3, 2, 16\]\."),
    ("cache", lambda c: c.swapaxes(2, 3), r'got \[2, 4, 16\]; axes 1 and 2 look swapped: kv_layout="HND"\?'),
    ("cache", lambda c: c[:, 0], "paged_kv_cache: must be .* with 5 axes or a pair"),
    ("cache", lambda c: (c[:, 0],), "paged_kv_cache: must be a 5-D array or a pair"),
    ("cache", lambda c: c.astype(np.float16), r"paged_kv_cache: must be float32 as planned \(kv_data_type\), got flo"),
    ("sinks", lambda _: np.zeros(5, np.float32), r"sinks: must be \[6\] \(num_qo_heads\)"),
    ("k_scale", lambda _: np.zeros(3, np.float32), r"k_scale: must broadcast to \[2, 16\]"),
    ("out", lambda _: np.zeros((7, 6, 16)), r"out: must be float32 of shape \[7, 6, 16\]"),
    ("lse", lambda _: np.zeros((6, 7), np.float32), r"lse: must be float32 of shape \[7, 6\]"),
    ("lse_base", lambda _: "10", 'lse_base: must be "2" or "e"'),
    ("target", lambda _: "tpu", 'target: must be "cpu", "cuda" or "gpu"'),
]  # fmt: skip


@pytest.mark.parametrize(("name", "change", "rule"), BAD_RUNS)
def test_bad_run_arguments(name, change, rule):
    setup = Setup(TWO[0])
    q, cache, lists = setup.build()
    wrapper = planned(setup, lists, {"q_data_type": np.float32, "kv_data_type": "float32"})
    out = np.full_like(q, 7)
    arguments = {"q": q, "cache": cache, "out": out}
    arguments[name] = change(arguments.get(name))
    q, cache = arguments.pop("q"), arguments.pop("cache")
    with pytest.raises(nbattn.ContractError, match=rule):
        wrapper.run(q, cache, **arguments)
    assert (out == 7).all()


def test_target_only_confirms():
    setup = Setup(TWO[0])
    q, cache, lists = setup.build()
    wrapper = planned(setup, lists)
    np.testing.assert_array_equal(wrapper.run(q, cache, target="cpu"), wrapper.run(q, cache))
    with pytest.raises(nbattn.TargetError, match='"gpu" needs CuPy arrays'):
        wrapper.run(q, cache, target="gpu")


# ---- the shared-prefix wrappers


def prefix_setup(layout="NHD", dtype="float32", **shape):
    """Return q, dense prefix, suffix cache, the suffixes' arrays, and the same as a two-level cascade in one pool."""
    setup = Setup((((0, 7), (12,)), ((0, 2, 3, 7), (9, 0, 5))), dtype=dtype, **shape)
    q, cache, lists = setup.build()
    prefix = cache[lists[2][0][:3]].swapaxes(1, 2).reshape(12, 2, *cache.shape[3:])
    k, v = prefix[:, 0], prefix[:, 1]
    unique = cache
    if layout == "HND":
        k, v, unique = (np.ascontiguousarray(x.swapaxes(-2, -3)) for x in (k, v, unique))
    return setup, q, (k, v), cache, unique, lists


def both_prefix_wrappers(setup, lists, layout="NHD", rows=None):
    decode, prefill = Decode(None, layout), Prefill(None, layout)
    csr = [x[1] for x in lists[1:]]
    decode.begin_forward(*csr, *setup.sizes)
    prefill.begin_forward(lists[0][1] if rows is None else rows, *csr, *setup.sizes)
    return decode, prefill


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_prefill_wrapper_is_a_cascade_of_two_levels(layout, causal):
    setup, q, (k, v), cache, unique, lists = prefix_setup(layout)
    _, prefill = both_prefix_wrappers(setup, lists, layout)
    sinks = np.linspace(-1, 1, 6, dtype=np.float32)
    result = prefill.forward_return_lse(q, k, v, unique, causal, sm_scale=0.4, sinks=sinks)
    expected = planned(setup, lists, {"causal": causal, "sm_scale": 0.4}).run(q, cache, sinks=sinks, return_lse=True)
    assert_close(result, expect(oracle.multi_level_cascade, q, cache, *lists, causal=causal, sm_scale=0.4, sinks=sinks))
    csr = [x[1] for x in lists[1:]]
    rest = {"kv_layout": layout, "causal": causal, "sm_scale": 0.4, "sinks": sinks}
    assert_close(result, expect(oracle.shared_prefix, q, k, v, unique, *csr, lists[0][1], **rest))
    for a, b in zip(result, expected, strict=True):
        np.testing.assert_array_equal(a, b)  # one plan, one kernel: the same bits
    only_out = prefill.forward(q, k, v, unique, causal, False, 0.4, sinks=sinks)
    np.testing.assert_array_equal(only_out, result[0])


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_decode_wrapper_is_a_cascade_of_two_levels(dtype, layout):
    setup, q, (k, v), cache, unique, lists = prefix_setup(layout, dtype)
    q = q[:3]
    decode, prefill = both_prefix_wrappers(setup, lists, layout, np.arange(4))
    result = decode.forward_return_lse(q, k, v, unique)
    lists[0][:] = [np.array([0, 3]), np.arange(4)]
    expected = planned(setup, lists).run(q, cache, return_lse=True)
    csr = [x[1] for x in lists[1:]]
    assert_close(result, expect(oracle.shared_prefix, q, k, v, unique, *csr, kv_layout=layout))
    for a, b, c in zip(result, expected, prefill.forward_return_lse(q, k, v, unique), strict=True):
        np.testing.assert_array_equal(a, b)
        np.testing.assert_array_equal(a, c)


def test_prefix_wrappers_plan_once_and_follow_prefix_and_causality():
    setup, q, (k, v), cache, _, lists = prefix_setup()
    _, prefill = both_prefix_wrappers(setup, lists)
    csr = [x[1] for x in lists[1:]]
    for length, causal in [(12, False), (12, True), (5, True), (0, True), (1, False), (12, False)]:
        expected = expect(oracle.shared_prefix, q, k[:length], v[:length], cache, *csr, lists[0][1], causal=causal)
        for _ in range(2):
            assert_close(prefill.forward_return_lse(q, k[:length], v[:length], cache, causal), expected)
    rows = np.array([0, 1, 2, 6], np.int32)
    prefill.begin_forward(rows, *csr, *setup.sizes)
    expected = expect(oracle.shared_prefix, q[:6], k, v, cache, *csr, rows)
    assert_close(prefill.forward_return_lse(q[:6], k, v, cache), expected)


def test_prefix_arguments_that_change_nothing():
    setup, q, (k, v), cache, _, lists = prefix_setup()
    decode, prefill = both_prefix_wrappers(setup, lists)
    plain = prefill.forward(q, k, v, cache)
    plain_decode = decode.forward(q[:3], k, v, cache)
    for more in ({"use_fp16_qk_reduction": True}, {"rope_scale": 3.0}, {"rope_theta": 7.0}):
        np.testing.assert_array_equal(prefill.forward(q, k, v, cache, **more), plain)
    for wrapper in (decode, prefill):
        wrapper.reset_workspace_buffer(np.zeros(3, np.uint8), None)
        assert wrapper.end_forward() is None
    np.testing.assert_array_equal(prefill.forward(q, k, v, cache), plain)
    np.testing.assert_array_equal(decode.forward(q[:3], k, v, cache), plain_decode)


@pytest.mark.parametrize("more", [{"causal": True}, {"sm_scale": 0.9}])
def test_prefill_arguments_that_change_the_result(more):
    setup, q, (k, v), cache, _, lists = prefix_setup()
    _, prefill = both_prefix_wrappers(setup, lists)
    plain = prefill.forward(q, k, v, cache)
    assert np.abs(prefill.forward(q, k, v, cache, **more) - plain).max() > 1e-3


def test_prefix_is_read_in_place():
    setup, q, (k, v), cache, _, lists = prefix_setup()
    _, prefill = both_prefix_wrappers(setup, lists)
    wide = np.full((24, 3, 20), np.nan, np.float32)
    views = wide[::2, :2, 2:18], wide[1::2, :2, 2:18]
    views[0][:], views[1][:] = k, v
    before = wide.copy()
    np.testing.assert_array_equal(prefill.forward(q, *views, cache), prefill.forward(q, k, v, cache))
    np.testing.assert_array_equal(wide, before)


BAD_PREFIXES = [
    (lambda k, v: (k[None], v), r"k_shared: must be \[prefix, kv_heads, dim\] \(NHD\), got shape \(1, 12, 2, 16\)"),
    (lambda k, v: (k, v[0]), r"v_shared: must be \[prefix, kv_heads, dim\] \(NHD\), got shape \(2, 16\)"),
    (
        lambda k, v: (k[:, :1], v),
        r"k_shared: must be .* with 2 heads of 16 as unique_kv_cache, got shape \(12, 1, 16\)",
    ),
    (lambda k, v: (k, v[..., :8].copy()), r"v_shared: must be .* with 2 heads of 16 as unique_kv_cache"),
    (lambda k, v: (k, v[:5]), r"v_shared: must have k_shared's prefix \(12, 2\), got \(5, 2\)"),
    (lambda k, v: (k.astype(np.float16), v), "k_shared: must be float32 as unique_kv_cache is, got float16"),
    (lambda k, v: (k, v.tolist()), "v_shared: must be a NumPy or CuPy array, got list"),
    (lambda k, v: (None, v), "k_shared: must be a NumPy or CuPy array, got NoneType"),
    (lambda k, v: (np.repeat(k, 2, 2)[..., ::2], v), "k_shared: must be contiguous along its last axis"),
]


@pytest.mark.parametrize(("change", "rule"), BAD_PREFIXES)
def test_bad_prefixes(change, rule):
    setup, q, (k, v), cache, _, lists = prefix_setup()
    decode, prefill = both_prefix_wrappers(setup, lists)
    for wrapper, rows in ((decode, q[:3]), (prefill, q)):
        with pytest.raises(nbattn.ContractError, match=f"^{rule}"):
            wrapper.forward(rows, *change(k, v), cache)


def test_bad_prefix_plans_and_caches():
    setup, q, (k, v), cache, _, lists = prefix_setup()
    decode, prefill = both_prefix_wrappers(setup, lists)
    csr = [x[1] for x in lists[1:]]
    bad = [*csr[:2], np.array([1, 1, 9], np.int32)]
    with pytest.raises(nbattn.PageTableError, match=r"^unique_kv_last_page_len\[2\]: must be in 1\.\.4"):
        decode.begin_forward(*bad, *setup.sizes)
    with pytest.raises(nbattn.PageTableError, match=r"^paged_kv_last_page_len\[2\]: must be in 1\.\.4"):
        prefill.begin_forward(lists[0][1], *bad, *setup.sizes)
    with pytest.raises(nbattn.ContractError, match=r"^qo_indptr\[0\]: must be 0, got 1"):
        prefill.begin_forward(np.array([1, 2, 3, 7]), *csr, *setup.sizes)
    with pytest.raises(nbattn.ContractError, match="^qo_indptr: must be an int array"):
        prefill.begin_forward(None, *csr, *setup.sizes)
    with pytest.raises(nbattn.ContractError, match="^data_type: must be None or one of"):
        decode.begin_forward(*csr, *setup.sizes, data_type="complex64")
    decode.begin_forward(*csr, *setup.sizes, data_type=ml_dtypes.bfloat16)
    with pytest.raises(nbattn.ContractError, match=r"^unique_kv_cache: must be bfloat16 as planned \(data_type\)"):
        decode.forward(q[:3], k, v, cache)
    with pytest.raises(nbattn.ContractError, match=r"^q: must be \[3, 6, 16\]"):
        decode.forward(q[:2], k, v, cache)
    with pytest.raises(nbattn.ContractError, match=r"^unique_kv_cache: must have pages of \[4, 2, 16\]"):
        prefill.forward(q, k, v, cache[:, :, :2])
    with pytest.raises(nbattn.PageTableError, match=r"^paged_kv_indices\[\d\]: must be below 1 "):
        prefill.forward(q, k, v, cache[:1])


# ---- the documents' own examples, and their signatures

UNIQUE_INDPTR = np.array([0, 17, 29, 44, 48, 66, 100, 128], np.int32)
UNIQUE_LAST_PAGE_LEN = np.array([1, 7, 14, 4, 3, 1, 16], np.int32)


def half(rng, *shape):
    return rng.standard_normal(shape, np.float32).astype(np.float16)


def check_head(out, kv_head, group, q, definition):
    """Hold the query heads of one KV head to the oracle: the heads do not know of each other."""
    heads = slice(kv_head * group, (kv_head + 1) * group)
    assert_close(out[:, heads], definition(q[:, heads], slice(kv_head, kv_head + 1)))


def test_example_of_the_multi_level_wrapper():
    rng = np.random.default_rng(0)
    wrapper = Multi(2, np.empty(1024, np.uint8), "NHD")
    lists = (
        [np.array([0, 7], np.int32), np.arange(8, dtype=np.int32)],
        [np.array([0, 512], np.int32), UNIQUE_INDPTR],
        [np.arange(512, dtype=np.int32), np.arange(512, 640, dtype=np.int32)],
        [np.array([16], np.int32), UNIQUE_LAST_PAGE_LEN],
    )
    wrapper.plan(*lists, 64, 8, 128, 16)
    for layer in range(2):
        cache, q = half(rng, 640, 2, 16, 8, 128), half(rng, 7, 64, 128)
        out = wrapper.run(q, cache)
        assert (out.shape, out.dtype) == ((7, 64, 128), np.float16)
        check_head(
            out,
            3 * layer,
            8,
            q,
            lambda rows, h, c=cache: expect(oracle.multi_level_cascade, rows, c[..., h, :], *lists),
        )


def test_example_of_the_decode_wrapper():
    rng = np.random.default_rng(1)
    wrapper = Decode(np.empty(1024, np.uint8), "NHD")
    csr = UNIQUE_INDPTR, np.arange(128, dtype=np.int32), UNIQUE_LAST_PAGE_LEN
    wrapper.begin_forward(*csr, 64, 8, 128, 16, data_type=np.float16)
    cache, q = half(rng, 128, 2, 16, 8, 128), half(rng, 7, 64, 128)
    k, v = half(rng, 8192, 8, 128), half(rng, 8192, 8, 128)
    out = wrapper.forward(q, k, v, cache)
    assert out.shape == (7, 64, 128)
    check_head(
        out, 5, 8, q, lambda rows, h: expect(oracle.shared_prefix, rows, k[:, h], v[:, h], cache[..., h, :], *csr)
    )


def test_example_of_the_prefill_wrapper():
    rng = np.random.default_rng(2)
    wrapper = Prefill(np.empty(1024, np.uint8), "NHD")
    qo_indptr = np.array([0, 33, 44, 55, 66, 77, 88, 100], np.int32)
    csr = UNIQUE_INDPTR, np.arange(128, dtype=np.int32), UNIQUE_LAST_PAGE_LEN
    wrapper.begin_forward(qo_indptr, *csr, 64, 16, 128, 16)
    cache, q = half(rng, 128, 2, 16, 16, 128), half(rng, 100, 64, 128)
    k, v = half(rng, 8192, 16, 128), half(rng, 8192, 16, 128)
    out = wrapper.forward(q, k, v, cache, causal=True)
    wrapper.end_forward()
    assert out.shape == (100, 64, 128)
    rest = {"causal": True, "qo_indptr": qo_indptr}
    check_head(
        out, 7, 4, q,
        lambda rows, h: expect(oracle.shared_prefix, rows, k[:, h], v[:, h], cache[..., h, :], *csr, **rest),
    )  # fmt: skip


SIGNATURES = {
    Multi.__init__: "num_levels float_workspace_buffer kv_layout use_cuda_graph qo_indptr_buf_arr "
    "paged_kv_indptr_buf_arr paged_kv_indices_buf_arr paged_kv_last_page_len_buf_arr",
    Multi.plan: "qo_indptr_arr paged_kv_indptr_arr paged_kv_indices_arr paged_kv_last_page_len num_qo_heads "
    "num_kv_heads head_dim page_size causal pos_encoding_mode use_fp16_qk_reduction sm_scale window_left "
    "logits_soft_cap rope_scale rope_theta q_data_type kv_data_type",
    Multi.run: "q paged_kv_cache",
    Multi.reset_workspace_buffer: "float_workspace_buffer int_workspace_buffers",
    Decode.__init__: "float_workspace_buffer kv_layout",
    Decode.begin_forward: "unique_kv_indptr unique_kv_indices unique_kv_last_page_len num_qo_heads num_kv_heads "
    "head_dim page_size data_type",
    Decode.forward: "q k_shared v_shared unique_kv_cache",
    Decode.reset_workspace_buffer: "float_workspace_buffer int_workspace_buffer",
    Prefill.begin_forward: "qo_indptr paged_kv_indptr paged_kv_indices paged_kv_last_page_len num_qo_heads "
    "num_kv_heads head_dim page_size",
    Prefill.forward: "q k_shared v_shared unique_kv_cache causal use_fp16_qk_reduction sm_scale rope_scale rope_theta",
}


@pytest.mark.parametrize("function", SIGNATURES, ids=lambda f: f.__qualname__)
def test_positional_arguments_are_the_documents(function):
    parameters = list(inspect.signature(function).parameters.values())[1:]
    positional = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert positional == SIGNATURES[function].split()


def test_the_module_has_flashinfers_names():
    from nbattn import cascade

    for name in (
        "merge_state",
        "merge_state_in_place",
        "merge_states",
        *(c.__name__ for c in (Multi, Decode, Prefill)),
    ):
        assert getattr(cascade, name) is getattr(nbattn, name)
    assert callable(cascade.build_levels)


# ---- rows of the table of small inputs that broke other systems


def exact_levels(*levels, page_size=4, eye=True, dim=None):
    """Return a cache and lists for zero keys; V is the identity over all levels' keys, or the given numbers."""
    total = sum(sum(lens) for _, lens, *_ in levels)
    setup = Setup(tuple((offsets, lens) for offsets, lens, *_ in levels), 1, 1, dim or 64, page_size)
    _, cache, lists = setup.build()
    k = np.where(np.isfinite(cache[:, 0]), np.float32(0), cache[:, 0])
    v = np.full((len(k), page_size, 1, total if eye else 1), np.nan, np.float32)
    number = 0
    for (_, lens, *values), indptr, ids in zip(levels, *lists[1:3], strict=True):
        for begin, n in zip(indptr, lens, strict=False):
            for j in range(n):
                v[ids[begin + j // page_size], j % page_size, 0] = np.eye(total)[number] if eye else values[0]
                number += 1
    return setup, (k, v), lists


def test_r5_parts_of_one_and_three_keys():
    setup, cache, lists = exact_levels(((0, 1), (1,), 0.0), ((0, 1), (3,), 1.0), eye=False)
    out, lse = planned(setup, lists).run(np.zeros((1, 1, 64), np.float32), cache, return_lse=True)
    np.testing.assert_allclose(out.ravel(), [0.75], rtol=1e-6)
    np.testing.assert_allclose(lse.ravel(), [2.0], rtol=1e-6)


def test_r10_lse_is_rows_by_heads():
    setup = Setup((((0, 3), (6,)), ((0, 1, 2, 3), (4, 1, 7))), num_kv_heads=1, group_size=5)
    q, cache, lists = setup.build()
    out, lse = planned(setup, lists).run(q, cache, return_lse=True)
    assert lse.shape == (3, 5)
    assert_close((out, lse), expect(oracle.multi_level_cascade, q, cache, *lists))


def test_r12_empty_suffixes_see_the_prefix_only():
    setup, cache, lists = exact_levels(((0, 3), (4,), 1.0), ((0, 1, 2, 3), (0, 2, 0), 7.0), eye=False)
    out, lse = planned(setup, lists).run(np.zeros((3, 1, 64), np.float32), cache, return_lse=True)
    np.testing.assert_allclose(out.ravel(), [1, 3, 1], rtol=1e-6)
    np.testing.assert_allclose(lse.ravel(), np.log2([4, 6, 4]), rtol=1e-6)


def test_r14_a_level_starting_at_row_1_gives_row_0_nothing():
    setup, cache, lists = exact_levels(((1, 2), (4,)), ((0, 1, 2), (2, 2)))
    out, lse = planned(setup, lists).run(np.zeros((2, 1, 64), np.float32), cache, return_lse=True)
    np.testing.assert_allclose(out[0, 0], [0, 0, 0, 0, 0.5, 0.5, 0, 0], rtol=1e-6)
    np.testing.assert_allclose(out[1, 0], np.array([1, 1, 1, 1, 0, 0, 1, 1]) / 6, rtol=1e-6)
    np.testing.assert_allclose(lse.ravel(), np.log2([2, 6]), rtol=1e-6)


def test_s8_a_sink_counts_once_over_prefix_and_suffix():
    setup, cache, lists = exact_levels(((0, 1), (2,), 1.0), ((0, 1), (2,), 1.0), eye=False)
    wrapper = planned(setup, lists)
    out, lse = wrapper.run(np.zeros((1, 1, 64), np.float32), cache, sinks=np.zeros(1, np.float32), return_lse=True)
    np.testing.assert_allclose(out.ravel(), [0.8], rtol=1e-6)  # 4 of 5; twice would be 4 of 6
    np.testing.assert_allclose(lse.ravel(), [np.log2(5)], rtol=1e-6)


def test_w6_a_window_runs_over_the_border_of_levels():
    setup, cache, lists = exact_levels(((0, 1), (4,)), ((0, 1), (3,)))
    out = planned(setup, lists, {"window_left": 3, "causal": True}).run(np.zeros((1, 1, 64), np.float32), cache)
    np.testing.assert_allclose(out.ravel(), [0, 0, 0, 0.25, 0.25, 0.25, 0.25], rtol=1e-6)


@pytest.mark.parametrize("split", [(3, 0), (0, 3), (1, 2), (2, 1)])
def test_n5_rotary_positions_run_over_all_levels(split):
    setup, (k, v), lists = exact_levels(((0, 1), split[:1]), ((0, 1), split[1:]), page_size=1, dim=4)
    k[np.isfinite(k)] = 0
    k[..., :2] = 1
    q = np.array([[[1, 1, 0, 0]]], np.float32)
    options = {"pos_encoding_mode": "ROPE_LLAMA", "sm_scale": 1.0, "causal": True}
    out, lse = planned(setup, lists, options).run(q, (k, v), return_lse=True)
    np.testing.assert_allclose(out.ravel(), [0.1295, 0.3369, 0.5336], atol=5e-5)
    np.testing.assert_allclose(lse.ravel(), [3.7915], atol=5e-5)


def test_n6_alibi_slopes_of_six_heads():
    from nbattn.alibi import alibi_slopes

    assert alibi_slopes(6).tolist() == [0.25, 0.0625, 0.015625, 0.00390625, 0.5, 0.125]
    setup = Setup((((0, 1), (1,)), ((0, 1), (1,))), num_kv_heads=1, group_size=6)
    _, cache, lists = setup.build()
    q = np.zeros((1, 6, 16), np.float32)
    lse = planned(setup, lists, {"pos_encoding_mode": "ALIBI"}).run(q, cache, return_lse=True, lse_base="e")[1]
    np.testing.assert_allclose(lse[0], np.log1p(np.exp(-alibi_slopes(6))), rtol=1e-6)


@pytest.mark.parametrize("heads", [1, 2, 3, 5, 7, 8, 12, 33])
def test_alibi_slopes_are_the_oracles(heads):
    from nbattn.alibi import alibi_slopes

    np.testing.assert_allclose(alibi_slopes(heads), oracle.alibi_slopes(heads), rtol=1e-15)

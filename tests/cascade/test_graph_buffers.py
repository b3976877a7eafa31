"""The buffers of CUDA graphs, on NumPy: plan copies into them, run reads them."""

import numpy as np
import pytest
from level_setup import TWO, Multi, Setup, planned

import nbattn
from nbattn import oracle
from nbattn.testing import assert_close, expect


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


@pytest.mark.parametrize(("first", "second"), [((0, 0), (0, 1)), ((1, 0), (2, 0)), ((0, 1), (3, 1))])
def test_buffers_that_share_memory_are_refused(first, second):
    setup = Setup(TWO[0])
    buffers = buffers_for(setup.build()[2])
    names = list(buffers)
    (a, i), (b, j) = first, second
    whole = np.zeros(60, np.int32)
    buffers[names[a]][i], buffers[names[b]][j] = whole[:20], whole[19:]
    rule = rf"must share no memory with {names[a]}\[{i}\], got overlapping"
    later = rf"{names[b]}\[{j}\]: {rule}"
    with pytest.raises(nbattn.ContractError, match=f"^{later}"):
        Multi(2, use_cuda_graph=True, **buffers)
    buffers[names[b]][j] = whole[20:]  # neighbours are served
    Multi(2, use_cuda_graph=True, **buffers).plan(*setup.build()[2], *setup.sizes)


@pytest.mark.parametrize("number", range(4))
def test_a_buffer_that_became_read_only_leaves_plan_and_buffers_alone(number):
    setup, later = Setup(TWO[0]), Setup(((TWO[0][0]), ((0, 1, 4, 6), (2, 6, 5))), seed=3)
    q, cache, lists = setup.build()
    buffers = buffers_for(lists)
    wrapper = planned(setup, lists, use_cuda_graph=True, **buffers)
    want, name = wrapper.run(q, cache), list(buffers)[number]
    before = [x.copy() for given in buffers.values() for x in given]
    frozen(buffers[name][1])
    with pytest.raises(nbattn.ContractError, match=rf"^{name}\[1\]: must be writable, got a read-only array"):
        wrapper.plan(*later.build()[2], *later.sizes)
    assert all(np.array_equal(x, y) for x, y in zip(before, (x for g in buffers.values() for x in g), strict=True))
    np.testing.assert_array_equal(wrapper.run(q, cache), want)


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

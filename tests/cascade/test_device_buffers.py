"""Metadata and buffers on a GPU, seen from the host: what `plan` copies and refuses, on a stand-in for CuPy."""

import numpy as np
import pytest
import stand_in_cupy
from level_setup import TWO, Decode, Multi, Setup

import nbattn


@pytest.fixture
def cupy(monkeypatch):
    return stand_in_cupy.install(monkeypatch)


def buffers(lists, make):
    return [[make(np.full(x.size + 2, -5, np.int32)) for x in arrays] for arrays in lists]


@pytest.mark.parametrize("metadata", ["device", "host", "wide host"])
def test_plan_fills_device_buffers_from_anywhere(cupy, metadata):
    setup = Setup(TWO[0])
    lists = setup.build()[2]
    own = buffers(lists, cupy.asarray)
    move = {"device": cupy.asarray, "host": lambda x: x, "wide host": lambda x: x.astype(np.int64)}[metadata]
    wrapper = Multi(2, None, "NHD", True, *own)
    for shift in (0, 1):  # planned again: the same buffers
        shown = [list(arrays) for arrays in lists]
        shown[2] = [x + np.int32(shift) * (x < 2**31 - 1).astype(np.int32) for x in shown[2]]
        wrapper.plan(*[[move(x) for x in arrays] for arrays in shown], *setup.sizes)
        for number, (given, arrays) in enumerate(zip(own, shown, strict=True)):
            for level, (buffer, x) in enumerate(zip(given, arrays, strict=True)):
                used = lists[1][level][-1] if number == 2 else x.size
                assert buffer.host[:used].tolist() == x[:used].tolist()
                assert (buffer.host[used:] == -5).all()


def test_buffers_on_the_host_take_metadata_from_the_device(cupy):
    setup = Setup(TWO[0])
    lists = setup.build()[2]
    own = buffers(lists, lambda x: x)
    Multi(2, None, "NHD", True, *own).plan(*[[cupy.asarray(x) for x in arrays] for arrays in lists], *setup.sizes)
    assert own[3][1][:3].tolist() == lists[3][1].tolist()


def test_buffers_live_in_one_place(cupy):
    own = buffers(Setup(TWO[0]).build()[2], cupy.asarray)
    own[2][1] = np.zeros(9, np.int32)
    rule = r"paged_kv_indices_buf_arr\[1\]: must live where qo_indptr_buf_arr\[0\] does"
    with pytest.raises(nbattn.ContractError, match=rule):
        Multi(2, None, "NHD", True, *own)


def test_device_buffers_that_share_memory_are_refused(cupy):
    own = buffers(Setup(TWO[0]).build()[2], cupy.asarray)
    own[2] = [(whole := cupy.asarray(np.zeros(40, np.int32)))[:20], whole[19:]]
    rule = r"^paged_kv_indices_buf_arr\[1\]: must share no memory with paged_kv_indices_buf_arr\[0\], got overlap"
    with pytest.raises(nbattn.ContractError, match=rule):
        Multi(2, None, "NHD", True, *own)


@pytest.mark.parametrize("number", range(4))
def test_device_metadata_beside_a_numpy_cache_is_refused_by_name(cupy, number):
    setup = Setup(TWO[0])
    q, cache, lists = setup.build()
    names = ["qo_indptr_arr", "paged_kv_indptr_arr", "paged_kv_indices_arr", "paged_kv_last_page_len"]
    lists[number][1] = cupy.asarray(lists[number][1])
    wrapper = Multi(2)
    wrapper.plan(*lists, *setup.sizes)
    with pytest.raises(
        nbattn.ContractError, match=rf"^{names[number]}\[1\]: must be a NumPy array beside a NumPy cache"
    ):
        wrapper.run(q, cache)
    if number:
        decode = Decode()
        decode.begin_forward(*[x[1] for x in lists[1:]], *setup.sizes)
        unique = names[number].replace("paged_kv", "unique_kv").replace("_arr", "")
        with pytest.raises(nbattn.ContractError, match=f"^{unique}: must be a NumPy array beside a NumPy cache"):
            decode.forward(q[:3], q[:, :2], q[:, :2], cache)


def test_int64_on_the_device_is_refused(cupy):
    setup = Setup(TWO[0])
    lists = setup.build()[2]
    lists[2][0] = cupy.asarray(lists[2][0].astype(np.int64))
    with pytest.raises(
        nbattn.ContractError, match=r"^paged_kv_indices_arr\[0\]: must be int32 or uint32 on the device"
    ):
        Multi(2).plan(*lists, *setup.sizes)

"""Caches and tables on a GPU, seen from the host: what is copied, what stays there and what is refused.

A stand-in for CuPy gives its values away through copies alone, so these tests need no GPU and count every copy.
"""

import sys
from types import ModuleType

import numpy as np
import pytest
import stand_in_cupy
from stand_in_cupy import DeviceArray

from nbattn import ContractError, PagedKV, PageTableError, TargetError, append_paged_kv_cache
from nbattn.arrays import overlap


@pytest.fixture
def cupy(monkeypatch):
    return stand_in_cupy.install(monkeypatch)


CACHE = np.arange(8 * 2 * 4 * 2 * 16, dtype=np.float32).reshape(8, 2, 4, 2, 16)
INDPTR, INDICES, LAST = np.array([0, 3, 4], np.int32), np.array([5, -1, 7, 2], np.int32), np.array([1, 3], np.int32)
TABLE, LENS = np.array([[5, 1], [2, 9]], np.int32), np.array([7, 3], np.int32)


def test_offsets_and_lengths_are_copied_once_and_ids_never(cupy):
    arrays = [cupy.asarray(x) for x in (INDPTR, INDICES, LAST)]
    kv = PagedKV.from_page_table(cupy.asarray(CACHE), *arrays)
    assert (cupy.copies, cupy.waits) == ([(3,), (2,)], [2])
    assert (kv.library, kv.kv_lens.tolist(), kv.kv_indptr.tolist()) == ("cupy", [9, 3], [0, 3, 4])
    assert isinstance(kv.kv_indices, DeviceArray)
    arrays[1].host[:] = 77
    assert kv.kv_indices.host.tolist() == INDICES.tolist()  # a snapshot
    spread = [cupy.asarray(np.repeat(x, 2))[::2] for x in (INDPTR, INDICES, LAST)]
    cupy.copies.clear()
    cupy.waits.clear()
    kv = PagedKV.from_page_table(cupy.asarray(CACHE), *spread)
    assert (cupy.copies, cupy.waits) == ([(3,), (2,)], [2])
    assert (kv.kv_lens.tolist(), kv.kv_indptr.tolist()) == ([9, 3], [0, 3, 4])
    assert kv.kv_indices.host.tolist() == INDICES.tolist()
    cupy.copies.clear()
    cupy.waits.clear()
    table = cupy.asarray(np.repeat(TABLE, 2, axis=1))[:, ::2]
    kv = PagedKV.from_block_table(*[cupy.asarray(CACHE[:, 0])] * 2, table, cupy.asarray(LENS))
    assert (cupy.copies, cupy.waits) == ([(2,)], [])
    assert kv.kv_indices.host.tolist() == [5, 1, 2, 9]
    assert kv.kv_indices.host.flags.c_contiguous


def test_an_empty_batch_needs_no_wait(cupy):
    empty = np.zeros(0, np.int32)
    kv = PagedKV.from_page_table(cupy.asarray(CACHE), *map(cupy.asarray, (INDPTR[:1], empty, empty)))
    assert (kv.batch_size, sorted(cupy.copies), cupy.waits) == (0, [(0,), (1,)], [])


def test_host_tables_stay_on_the_host_and_are_checked(cupy):
    kv = PagedKV.from_page_table(cupy.asarray(CACHE), INDPTR, INDICES, LAST)
    assert isinstance(kv.kv_indices, np.ndarray)
    with pytest.raises(PageTableError, match=r"^kv_indices\[3\]: must be below 8 .* got 8 "):
        PagedKV.from_page_table(cupy.asarray(CACHE), INDPTR, np.array([5, -1, 7, 8]), LAST)
    assert cupy.copies == []


def test_slot_ids_are_checked_on_the_host(cupy):
    pages = [cupy.asarray(CACHE[:, 0])] * 2
    kv = PagedKV.from_slots(*pages, LENS - 3, cupy.asarray(np.array([6, 0], np.uint32)))
    assert cupy.copies == [(2,)]
    assert (kv.kv_indices.tolist(), kv.kv_lens.tolist()) == ([6, 0], [4, 0])
    with pytest.raises(PageTableError, match=r"^slot_ids\[1\]: must differ from slot_ids\[0\], got 6 in both\.$"):
        PagedKV.from_slots(*pages, LENS - 3, cupy.asarray(np.array([6, 6], np.int32)))


def test_offsets_on_the_device_are_checked(cupy):
    with pytest.raises(PageTableError, match=r"^kv_last_page_len\[1\]: must be in 1\.\.4 \(page_size\), got 5 "):
        PagedKV.from_page_table(cupy.asarray(CACHE), INDPTR, cupy.asarray(INDICES), cupy.asarray(LAST + LAST - 1))


def test_check_and_explain_read_the_ids_back(cupy):
    indices = cupy.asarray(np.array([5, -1, 9, 2], np.int32))
    kv = PagedKV.from_page_table(cupy.asarray(CACHE), INDPTR, indices, LAST)  # dropped on the device: no error
    with pytest.raises(PageTableError, match=r"^kv_indices\[2\]: must be below 8 [^\n]*, got 9 [^\n]*$"):
        kv.check()
    assert "9 outside the cache   x...  8 dropped" in kv.explain(0)
    good = PagedKV.from_page_table(cupy.asarray(CACHE), INDPTR, cupy.asarray(INDICES), LAST)
    assert good.check() is None


def test_uint32_ids_on_the_device_keep_their_bits(cupy):
    ids = cupy.asarray(np.array([5, 2**32 - 1, 7, 2], np.uint32))
    assert PagedKV.from_page_table(cupy.asarray(CACHE), INDPTR, ids, LAST).kv_indices.host.tolist() == [5, -1, 7, 2]


def test_a_device_array_of_int64_is_refused_with_its_remedy(cupy):
    for name, arrays in (
        ("kv_indptr", (INDPTR.astype(np.int64), INDICES)),
        ("kv_indices", (INDPTR, INDICES.astype(np.int64))),
    ):
        with pytest.raises(ContractError) as caught:
            PagedKV.from_page_table(cupy.asarray(CACHE), *map(cupy.asarray, arrays), LAST)
        message = f"{name}: must be int32 or uint32 on the device, got int64. Use {name}.astype(int32)."
        assert str(caught.value) == message


@pytest.mark.parametrize("position", range(3))
def test_device_metadata_beside_a_numpy_cache_is_refused(cupy, position):
    arrays = [INDPTR, INDICES, LAST]
    arrays[position] = cupy.asarray(arrays[position])
    name = ["kv_indptr", "kv_indices", "kv_last_page_len"][position]
    with pytest.raises(
        ContractError, match=rf"^{name}: must be a NumPy array beside a NumPy cache, got a CuPy array\. "
    ):
        PagedKV.from_page_table(CACHE, *arrays)


def test_k_and_v_live_in_one_place(cupy):
    pair = cupy.asarray(CACHE[:, 0]), CACHE[:, 1]
    with pytest.raises(ContractError, match=r"^paged_kv_cache\[1\]: must live where paged_kv_cache\[0\] does \(cupy\)"):
        PagedKV.from_page_table(pair, INDPTR, INDICES, LAST)
    other = cupy.asarray(CACHE[:, 1])
    other.device = "<CUDA Device 1>"
    with pytest.raises(
        ContractError, match=r"^paged_kv_cache\[1\]: must be on <CUDA Device 0> as .* got <CUDA Device 1>"
    ):
        PagedKV.from_page_table((pair[0], other), INDPTR, INDICES, LAST)


def test_page_stride_on_the_device(cupy):
    memory = cupy.asarray(np.arange(2048, dtype=np.float32))
    blocks = memory[: 7 * 128].reshape(7, 2, 1, 4, 2, 8)
    kv = PagedKV.from_blocks(blocks, TABLE, LENS, 0, page_stride=cupy.asarray(np.array([320])))
    assert cupy.copies == [(1,)]
    assert kv.v[6].host.ravel().tolist() == list(range(6 * 320 + 64, 2048))
    with pytest.raises(ContractError, match=r"^page_stride: the last of 7 pages must end inside .* 2048 elements"):
        PagedKV.from_blocks(blocks, TABLE, LENS, 0, page_stride=321)


def append_arguments(cupy):
    rows, places = cupy.asarray(np.ones((1, 2, 16), np.float32)), np.array([0], np.int32)
    return rows, rows, places, cupy.asarray(places), cupy.asarray(CACHE), INDICES, INDPTR, LAST


def test_append_without_cuda_kernels_says_so(cupy, monkeypatch):
    monkeypatch.setitem(sys.modules, "nbattn.cuda_kernels.append_kv", None)  # importing it now fails
    with pytest.raises(TargetError, match=r"^paged_kv_cache: CuPy arrays need the CUDA kernels, got .*append_kv"):
        append_paged_kv_cache(*append_arguments(cupy))


def test_append_hands_checked_arguments_to_the_cuda_pass(cupy, monkeypatch):
    calls, stub = [], ModuleType("nbattn.cuda_kernels.append_kv")
    stub.append_kv = lambda *arguments: calls.append(arguments)
    monkeypatch.setitem(sys.modules, stub.__name__, stub)
    arguments = append_arguments(cupy)
    append_paged_kv_cache(*arguments)
    ((*given, kv),) = calls
    assert all(x is y for x, y in zip(given, arguments[:4], strict=True))
    assert kv.kv_lens.tolist() == [9, 3]
    with pytest.raises(PageTableError, match=r"^batch_indices\[0\]: must name one of 2 requests, got 2\.$"):
        append_paged_kv_cache(*arguments[:2], np.array([2]), *arguments[3:])
    assert len(calls) == 1


def test_overlap_is_told_by_addresses_alone(cupy):
    x = cupy.asarray(np.zeros((4, 8)))
    assert not overlap(x[:, :4], x[:, 4:])
    assert overlap(x[:, :5], x[:, 4:])
    assert cupy.copies == []

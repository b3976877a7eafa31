"""The operator faces with arrays on a GPU, seen from the host: what is copied back, and what reaches the target.

A stand-in for CuPy counts every copy, and a stand-in for the CUDA target keeps the checked problem.
"""

from importlib import import_module
from types import SimpleNamespace

import numpy as np
import pytest
import stand_in_cupy
from stand_in_cupy import DeviceArray

import nbattn
from nbattn import ContractError, PagedKVCollection, PageTableError
from nbattn.planning import Tiling


class Target(SimpleNamespace):
    """A target that keeps what it is given."""

    def tiling(self, levels, num_qo_heads, split_size, max_kv_len=None):
        return Tiling((1,) * len(levels), 1)

    def lane(self):
        return 0

    def run_paged(self, problem, plan):
        self.problem, self.plan = problem, plan

    def run_gather(self, problem, token_indices, counts, split_size):
        self.problem, self.lists = problem, (token_indices, counts)


@pytest.fixture
def cupy(monkeypatch):
    """Install the stand-ins; ``cupy.target`` is that of the CUDA target."""
    module = stand_in_cupy.install(monkeypatch)
    module.target = Target()
    users = [import_module(f"nbattn.{name}") for name in ("engine", "gather", "merging", "warming")]  # all before any
    for user in users:
        monkeypatch.setattr(user, "backend", lambda target: {"cuda": module.target}[target])
    return module


F32 = np.float32


def test_gqa_decode_cuts_lengths_on_the_device(cupy):
    device = cupy.asarray
    cache = device(np.zeros((3, 9, 2, 8), F32))
    query = device(np.zeros((3, 4, 8), F32))
    out = nbattn.gqa_decode(query, cache, cache, device(np.array([-4, 99, 7], np.int32)))
    assert cupy.target.problem.levels[0].kv.kv_lens.tolist() == [0, 9, 7]
    assert cupy.copies == [(3,)]
    assert isinstance(out, DeviceArray)
    assert out.dtype == F32
    with pytest.raises(PageTableError, match=r"^lengths\[1\]: must be in 0\.\.9"):
        nbattn.gqa_decode(query, cache, cache, np.array([-4, 99, 7]))
    integers = device(np.zeros((3, 9, 2, 8), np.int32))
    nbattn.gqa_decode(query, integers, integers, np.array([1, 2, 3]))
    assert cupy.target.problem.levels[0].kv.kv_dtype == "float32"


@pytest.mark.parametrize("paged", [False, True])
def test_over_cache_copies_offsets_and_lengths_alone(cupy, paged):
    device = cupy.asarray
    cache = device(np.zeros((4, 2, 8, 8), F32))
    start = device(np.full((2, 3), 99, np.int32) if paged else np.full(2, 99, np.int32))
    plane, ids = device(np.zeros((5, 2), F32)), device(np.full(3, 77, np.int32))
    options = {"rope_cos": plane, "rope_sin": plane, "q_norm_gain": device(np.ones(8, F32)), "qk_norm_eps": 0.1}
    out, lse = nbattn.attention_over_cache(
        device(np.zeros((3, 32), F32)), cache, cache, start, device(np.array([0, 1, 3], np.int32)),
        device(np.array([5, 8], np.int32)), device(np.array([2], np.int32)), position_ids=ids, num_heads=4,
        q_scale=device(np.array([0.5], F32)), smooth_softmax=True, k_scale=device(np.ones((2, 1, 8), F32)),
        slot_ids=None if paged else device(np.array([3, 1], np.int32)), return_lse=True, **options,
    )  # fmt: skip
    assert sorted(cupy.copies) == [(1,), (1,), *([] if paged else [(2,)]), (2,), (3,)]
    assert out.shape == (3, 32)
    assert lse.shape == (3, 4)
    given = cupy.target.problem.options
    assert given.prepare.positions is ids  # 77 is not seen here: the kernel makes such a row NaN
    assert given.sinks.shape == (4,)
    assert given.k_scale.shape == (2, 8)
    assert given.sm_scale == 0.5


def test_over_cache_checks_host_positions_beside_device_data(cupy):
    cache, plane = cupy.asarray(np.zeros((4, 2, 8, 8), F32)), cupy.asarray(np.zeros((5, 2), F32))
    args = cupy.asarray(np.zeros((3, 4, 8), F32)), cache, cache, np.zeros(2, int), np.array([0, 1, 3])
    with pytest.raises(
        ContractError, match=r"^position_ids\[1\]: must be in 0\.\.4 \(positions of rope_cos\), got 5\."
    ):
        nbattn.attention_over_cache(
            *args, np.array([5, 8]), rope_cos=plane, rope_sin=plane, position_ids=np.arange(4, 7)
        )
    with pytest.raises(ContractError, match=r"^rope_cos: must hold the position of row 1, in 0\.\.4"):
        nbattn.attention_over_cache(*args, np.array([5, 8]), rope_cos=plane, rope_sin=plane)
    for name, x in [("rope_sin", np.zeros((5, 2), F32)), ("head_sink", np.zeros(4, F32)), ("k_scale", np.ones(8, F32))]:
        options = {"rope_cos": plane, "rope_sin": plane} | {name: x}
        with pytest.raises(ContractError, match=rf"^{name}: must live where q does \(cupy\), got numpy\."):
            nbattn.attention_over_cache(*args, np.array([5, 5]), **options)
    assert cupy.copies == []


def pool_and_table(cupy):
    table = np.array([[1, 2**31 + 5], [0, 3]], np.uint32)
    return cupy.asarray(np.zeros((4, 2, 3, 4, 2, 8), F32)), cupy.asarray(table)


def test_cross_attention_copies_offsets_and_lengths_alone(cupy):
    device = cupy.asarray
    pool, table = pool_and_table(cupy)
    collection = PagedKVCollection(pool, device(np.array([3, 2], np.uint32)), table, device(np.array([-1])))
    out = device(np.zeros((3, 4, 8), F32))
    offsets = device(np.array([0, 1, 3], np.uint32))
    args = device(np.zeros((3, 4, 8), F32)), offsets, device(np.array([2], np.uint32)), offsets, collection, 2, 0.5
    assert nbattn.generic_cross_attention_kv_cache(*args, out, mask_str="causal") is out
    assert sorted(cupy.copies) == [(1,), (1,), (2,), (3,), (3,)]
    assert cupy.target.plan.places.row_position.tolist() == [3, 2, 3]


def test_qsa_copies_offsets_and_lengths_alone(cupy):
    device = cupy.asarray
    pool, table = pool_and_table(cupy)
    indices, counts = device(np.zeros((3, 5), np.int32)), device(np.zeros(3, np.int32))
    nbattn.qsa_sparse_attention(
        device(np.zeros((3, 4, 8), F32)), device(np.array([0, 1, 3], np.uint32)), pool, None,
        device(np.array([3, 2], np.uint32)), table, None, None, 2, indices, counts, 0.5,
    )  # fmt: skip
    assert sorted(cupy.copies) == [(2,), (3,)]
    assert cupy.target.lists == (indices, counts)
    with pytest.raises(ContractError, match=r"^token_indices: must be int32 or uint32 on the device, got int64\."):
        nbattn.qsa_sparse_attention(
            device(np.zeros((1, 4, 8), F32)), np.array([0, 1, 1]), pool, None, np.array([3, 2]), table, None, None, 2,
            device(np.zeros((1, 5), np.int64)), counts, 0.5,
        )  # fmt: skip


def test_device_metadata_beside_host_data_is_refused(cupy):
    lengths = cupy.asarray(np.array([1], np.int32))
    cache = np.zeros((1, 9, 2, 8), F32)
    with pytest.raises(
        ContractError, match=r"^lengths: must be a NumPy array beside a NumPy cache, got a CuPy array\."
    ):
        nbattn.gqa_decode(np.zeros((1, 4, 8), F32), cache, cache, lengths)
    with pytest.raises(ContractError, match=r"^key_cache: must live where query does \(numpy\), got cupy\."):
        nbattn.gqa_decode(np.zeros((1, 4, 8), F32), cupy.asarray(cache), cupy.asarray(cache), lengths)

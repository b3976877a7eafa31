"""The plugin that runs tests on a GPU, with other memory of the host as its device."""

from weakref import WeakKeyDictionary

import numpy as np
import on_device
import pytest

import nbattn
from nbattn.testing import assert_close
from nbattn.testing.memory import owner_of


class OtherMemory:
    """A device made of NumPy arrays."""

    def __init__(self):
        self.made = []

    def holds(self, x):
        return isinstance(x, np.ndarray)

    def bytes(self, size):
        self.made.append(np.zeros(size, np.uint8))
        return self.made[-1]

    def view(self, memory, offset, like):
        return np.ndarray(like.shape, like.dtype, memory, offset, like.strides)

    def write(self, target, host):
        target[...] = host

    def read(self, x):
        return x.copy()


@pytest.fixture
def transfer():
    return on_device.Transfer(OtherMemory(), WeakKeyDictionary())


def test_views_of_one_array_stay_views_of_one_array(transfer):
    pool = np.arange(24, dtype=np.float32).reshape(4, 6)
    first, second = transfer.to_device([pool[1:3, ::-2], pool.T])
    np.testing.assert_array_equal(first, pool[1:3, ::-2])
    np.testing.assert_array_equal(second, pool.T)
    first[0, 0] = 99
    second[2, 0] = 77  # beside the first view
    assert pool.max() == 23
    transfer.give_back()
    assert (pool[1, 5], pool[0, 2]) == (99, 77)
    assert len(transfer.device.made) == 1


def test_any_order_of_memory_arrives(transfer):
    for x in (np.asfortranarray(np.arange(6.0).reshape(2, 3)), np.arange(24.0).reshape(2, 3, 4).transpose(2, 0, 1) * 1):
        np.testing.assert_array_equal(transfer.to_device(x), x)
        assert owner_of(x[1:]) is x


def test_what_may_not_stand_on_a_device_stays(transfer):
    x = np.arange(3)
    assert transfer.to_device((x, None, 2.0)) == (x, None, 2.0)


def test_a_given_result_is_itself_and_a_call_is_counted(monkeypatch):
    plugin = on_device.OnDevice(OtherMemory(), "test_")
    monkeypatch.setattr(nbattn.PagedKV, "from_slots", plugin.built("from_slots"))
    k = np.ones((1, 4, 1, 8), np.float32)
    kv = nbattn.PagedKV.from_slots(k, k, np.array([3], np.int32))
    q, out, lse = np.ones((1, 2, 8), np.float32), np.full((1, 2, 8), np.nan, np.float32), np.zeros((1, 2), np.float32)
    result = plugin.moved(nbattn.paged_attention)(q, kv, out=out, lse=lse, return_lse=True)
    assert result[0] is out
    assert result[1] is lse
    assert_close(out, np.ones((1, 2, 8)), budget=1e-6)
    assert plugin.calls == 1


def test_a_refused_call_gives_back_what_it_wrote():
    plugin = on_device.OnDevice(OtherMemory(), "test_")

    def writes_then_fails(x):
        x[0] = 5
        raise nbattn.ContractError("x: must not be written")

    x = np.zeros(2, np.float32)
    with pytest.raises(nbattn.ContractError):
        plugin.moved(writes_then_fails)(x)
    assert x.tolist() == [5, 0]
    assert not plugin.inside
    assert plugin.calls == 0


def test_rounded_calls_pad_v_and_return_what_was_asked_for():
    plugin = on_device.OnDevice(OtherMemory(), "test_", "bfloat16")
    seen = []

    def paged_attention(q, kv, **options):
        seen.append((q.dtype, kv.k.dtype, kv.v.shape))
        return nbattn.paged_attention(q, kv, **options)

    k, v = np.ones((1, 4, 1, 16), np.float32), np.arange(12, dtype=np.float32).reshape(1, 4, 1, 3)
    kv = nbattn.PagedKV.from_slots(k, v, np.array([3], np.int32))
    out, lse = plugin.moved(paged_attention)(np.ones((1, 2, 16), np.float32), kv, return_lse=True)
    assert (out.shape, lse.shape, out.dtype) == ((1, 2, 3), (1, 2), np.float32)
    assert seen == [("bfloat16", "bfloat16", (1, 4, 1, 64))]
    on_device.loose_close(out, np.array([[[3.0, 4, 5]] * 2]))
    with pytest.raises(AssertionError):
        on_device.loose_close(out, np.array([[[3.0, 4, 6]] * 2]))

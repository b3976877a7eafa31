"""A stand-in for CuPy, for tests of what the host side of the library does with arrays on a GPU.

Its arrays give their values away through copies alone, and every copy to the host is counted.
"""

import ctypes
import sys
from types import ModuleType, SimpleNamespace

import numpy as np


class DeviceArray:
    """A NumPy array behind the part of CuPy's interface that the host side of the library may use."""

    def __init__(self, host, module, base=None):
        self.host, self.module, self.base = host, module, base
        self.shape, self.dtype, self.ndim, self.size = host.shape, host.dtype, host.ndim, host.size
        self.strides, self.itemsize, self.device = host.strides, host.itemsize, "<CUDA Device 0>"
        self.nbytes, self.flags = host.nbytes, host.flags
        self.data = SimpleNamespace(
            ptr=host.__array_interface__["data"][0],
            device_id=0,
            copy_from_device_async=lambda data, size: ctypes.memmove(self.data.ptr, data.ptr, size),
        )

    def get(self, out=None, blocking=True):
        self.module.copies.append(self.shape)
        if out is None:
            return self.host.copy()
        assert not blocking
        self.module.pending.append((out.ctypes.data, self.host))
        return out

    def set(self, values):
        assert isinstance(values, np.ndarray)
        assert values.dtype == self.dtype
        self.host[...] = values

    def item(self):
        return self.get().item()

    def _new(self, host):
        return DeviceArray(host, self.module)

    def _view(self, host):
        return DeviceArray(host, self.module, self if self.base is None else self.base)

    def copy(self):
        return self._new(self.host.copy())

    def astype(self, dtype, order="K"):
        return self._new(self.host.astype(dtype, order=order))

    def reshape(self, *shape):
        return self._view(self.host.reshape(*shape))

    def view(self):
        return self._view(self.host.view())

    def transpose(self, *axes):
        return self._view(self.host.transpose(*axes))

    def __getitem__(self, index):
        return self._view(self.host[index])

    def __setitem__(self, index, values):
        assert isinstance(values, DeviceArray)
        self.host[index] = values.host

    def __len__(self):
        return len(self.host)

    def __array__(self, *args, **kwargs):
        raise TypeError("Implicit conversion to a NumPy array is not allowed.")


def install(monkeypatch):
    """Put the module in CuPy's place and return it.

    ``copies`` lists the shape of every array that was copied to the host, ``waits`` how many copies each wait for the
    stream was for, and ``pending`` those that the stream has not done yet.
    """
    module = ModuleType("cupy")
    module.ndarray, module.copies, module.waits, module.pending = DeviceArray, [], [], []

    def synchronize():
        for address, values in module.pending:
            ctypes.memmove(address, np.ascontiguousarray(values).ctypes.data, values.nbytes)
        module.waits.append(len(module.pending))
        module.pending.clear()

    def as_strided(x, shape, strides):
        return DeviceArray(np.lib.stride_tricks.as_strided(x.host, shape, strides), module, x)

    module.asarray = lambda x: DeviceArray(np.array(x), module)
    module.empty = lambda *args: DeviceArray(np.empty(*args), module)
    module.zeros = lambda *args: DeviceArray(np.zeros(*args), module)
    module.full = lambda *args: DeviceArray(np.full(*args), module)
    module.lib = SimpleNamespace(stride_tricks=SimpleNamespace(as_strided=as_strided))
    streams = {0: SimpleNamespace(synchronize=synchronize)}
    module.cuda = SimpleNamespace(
        alloc_pinned_memory=bytearray,
        get_current_stream=streams.__getitem__,
        runtime=SimpleNamespace(getDevice=lambda: 0),
    )
    monkeypatch.setitem(sys.modules, "cupy", module)
    return module

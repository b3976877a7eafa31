"""How kernels are launched, with a driver that only takes notes."""

from __future__ import annotations

import ctypes
import struct
import sys
from types import SimpleNamespace

import pytest

from nbattn.cuda_kernels import launch
from nbattn.cuda_kernels.compile import Cubin
from nbattn.cuda_kernels.parameters import PARAMETERS
from nbattn.errors import TargetError

GRID = (4, 2, 1)


class Notes:
    """A driver, and CuPy's part of it: `calls` lists what they were asked."""

    def __init__(self):
        self.calls, self.result = [], 0
        self.functions = 0
        runtime = SimpleNamespace(free=lambda x: None)
        api = SimpleNamespace(CUDADriverError=OSError, launchKernel=self.launch_kernel)
        self.cupy = SimpleNamespace(cuda=SimpleNamespace(driver=api, runtime=runtime))

    def launch_kernel(self, function, x, y, z, threads, _y, _z, shared, stream, address, extra):
        if self.result:
            raise OSError("no")
        self.calls.append(("plain", function, (x, y, z), threads, shared, stream))

    def cuModuleLoadData(self, module, image):
        return 0

    def cuModuleGetFunction(self, function, module, name):
        self.functions += 1
        function._obj.value = self.functions
        return 0

    def cuFuncSetAttribute(self, function, attribute, value):
        self.calls.append(("attribute", function.value, attribute, value))
        return 0

    def cuLaunchKernelEx(self, config, function, address, extra):
        found = config._obj
        attributes = [(x.name, x.value[0]) for x in found.attributes[: found.num_attributes]]
        shape = tuple(found.grid), found.block[0], found.shared_bytes, found.stream
        self.calls.append(("overlapping", function.value, *shape, attributes))
        return self.result

    def cuGetErrorString(self, result, text):
        text._obj.value = b"no luck"


@pytest.fixture
def notes(monkeypatch):
    notes = Notes()
    monkeypatch.setitem(sys.modules, "cupy", notes.cupy)
    monkeypatch.setattr(launch, "cupy", lambda: notes.cupy)
    monkeypatch.setattr(launch, "driver", lambda: notes)
    monkeypatch.setattr(launch, "compute_capability", lambda device: (9, 0) if device == 0 else (8, 0))
    monkeypatch.setattr(launch, "cubin_for", lambda *what: Cubin(b"", "name", 128, 1024))
    monkeypatch.setattr(launch, "loaded", {})
    return notes


def bound(device=0, cluster=1, overlaps=True, grid=GRID):
    kernel = launch.kernel("append_rows", device, unit=4)
    cells = (ctypes.c_int64 * 1)()
    return kernel.bind(cells, {}, grid, (0,) * len(PARAMETERS["append_rows"]), None, overlaps, cluster)


@pytest.mark.parametrize("family", PARAMETERS)
def test_parameters_stand_where_the_driver_reads_them(family):
    layout, offsets, order = launch._layout(family)
    codes = "@"
    for (name, _), offset in zip(PARAMETERS[family], offsets, strict=True):
        codes += {"i64": "q", "i32": "i", "f32": "f"}[PARAMETERS[family][order[name]][1]]
        assert offset == struct.calcsize(codes) - struct.calcsize(codes[-1])
    assert layout.size == struct.calcsize(codes)


def test_a_launch_overlaps_where_it_may(notes):
    launch_it = bound()
    notes.calls.clear()
    launch_it.on(7)()
    launch_it.on(8)()
    assert notes.calls == [("overlapping", 1, GRID, 128, 1024, stream, [(6, 1)]) for stream in (7, 8)]
    for plain in (bound(overlaps=False), bound(device=1)):
        notes.calls.clear()
        plain.on(7)()
        assert [name for name, *_ in notes.calls] == ["plain"]
    notes.calls.clear()
    bound(grid=(4, 0, 1)).on(7)()
    assert notes.calls == []


def test_clusters_are_an_attribute_of_a_launch(notes):
    launch_it = bound(cluster=16)
    assert notes.calls == [("attribute", 1, 14, 1)]
    launch_it.on(7)()
    bound(cluster=8, overlaps=False).on(7)()
    assert [attributes for *_, attributes in notes.calls[1:]] == [[(6, 1), (4, 16)], [(4, 8)]]


def test_errors_say_what_was_launched(notes):
    clustered, plain = bound(cluster=2), bound(overlaps=False)
    notes.result = 701
    shape = r"grid=\(4, 2, 1\), threads=128, shared=1024, cluster="
    with pytest.raises(
        TargetError, match=rf"^cuda: cuLaunchKernelEx\({shape}2\) must succeed, got error 701 \(no luck"
    ):
        clustered.on(7)()
    with pytest.raises(TargetError, match=rf"^cuda: cuLaunchKernel\({shape}1\) must succeed, got no"):
        plain.on(7)()

"""The same kernels for other CPUs: narrower vectors, no conversions of float16, no bfloat16 dot product."""

import json
import os
import subprocess
import sys

import llvmlite.binding as llvm
import pytest

PROGRAM = """
import json
import numpy as np
from numba import njit
from nbattn import testing
from nbattn.cpu_ref import cpu
from nbattn.cpu_ref.blocks import query_operand, query_room, score_heads, weigh_values
from nbattn.cpu_ref.number_formats import address_of, half_to_float
from nbattn.cpu_ref.row_copies import narrow_float16
from nbattn.cpu_ref.tags import CACHE_KINDS, PAGED

@njit
def widen(bits, values):
    for i in range(bits.shape[0]):
        values[i] = half_to_float(bits[i])

@njit
def narrow(kind, values, bits):
    narrow_float16(kind, address_of(values), address_of(bits), bits.shape[0])

bits = np.arange(65536, dtype=np.uint32).astype(np.uint16)
values, again = np.empty(65536, np.float32), np.empty(65536, np.uint16)
widen(bits, values)
narrow(CACHE_KINDS["float32"], values, again)
exact = bits.view(np.float16).astype(np.float32)
numbers = ~np.isnan(exact)
halves = bool((values.view(np.uint32) == exact.view(np.uint32))[numbers].all() and np.isnan(values[~numbers]).all())
halves &= bool((again == bits)[numbers].all() and np.isnan(again.view(np.float16)[~numbers]).all())
rng = np.random.default_rng(0)
wild = (rng.standard_normal(200_000) * 2.0 ** rng.integers(-30, 20, 200_000)).astype(np.float32)
between = ((exact[1:31744] + exact[:31743]) / 2).astype(np.float32)  # ties
wild = np.concatenate([wild, between, np.array([65519.9, 65520, 65535.9, 65536, 1e30, np.inf, -np.inf], np.float32)])
rounded = np.empty(len(wild), np.uint16)
narrow(CACHE_KINDS["float32"], np.concatenate([wild, np.zeros(16, np.float32)]), rounded)  # padded to whole vectors
with np.errstate(over="ignore"):
    halves &= bool((rounded == wild.astype(np.float16).view(np.uint16)).all())

@njit
def scores(kind, q, heads, rows, dim, listed, head_stride, slot_stride, scale, s):
    room = query_room(kind, heads * rows + 4, heads, dim)
    for _ in range(1):  # in which the room stays alive
        operand = query_operand(kind, q, room, heads, rows, dim)
        score_heads(kind, PAGED, operand, heads, rows, address_of(listed), head_stride, dim, scale,
                    address_of(s), s.strides[0], address_of(listed), head_stride, head_stride, slot_stride,
                    address_of(listed))
    return room.shape[0]

@njit
def weigh(kind, acc, heads, rows, p, listed, head_stride, slot_stride, n, dim, alpha, select):
    weigh_values(kind, PAGED, address_of(acc), acc.strides[0], heads, rows, address_of(p), p.strides[0],
                 address_of(listed), head_stride, slot_stride, n, dim, address_of(alpha), select, address_of(listed),
                 head_stride, address_of(listed))

def tile_error(dtype, heads, rows, dim, n):
    number, count, width = np.dtype(dtype), heads * rows, -(-dim // 16) * 16
    cache = rng.standard_normal((16, heads, dim)).astype(number)
    listed = np.concatenate([cache.ctypes.data + np.arange(16) * cache.strides[0]] * 3)
    places = listed, cache.strides[1], cache.strides[0]
    q, s = np.zeros((count + 4, width), number), np.zeros((16, -(-(count + 4) // 16) * 16), number)
    q[:count, :dim] = rng.standard_normal((count, dim))
    tag = CACHE_KINDS[dtype]
    scores(tag, q, heads, rows, dim, *places, number.type(0.5), s)
    expected = 0.5 * np.einsum("hrd,jhd->jhr", q[:count, :dim].reshape(heads, rows, dim).astype(float), cache)
    errors = [np.abs(s[:, :count].reshape(16, heads, rows) - expected).max()]
    for select in (0, 1):
        acc, p, alpha = np.zeros((count + 4, width), number), rng.random(s.shape).astype(number), np.zeros_like(s[0])
        acc[:count], alpha[:] = 1, rng.random(alpha.shape)
        expected = alpha[:count, None].astype(float).reshape(heads, rows, 1) + np.einsum(
            "jhr,jhd->hrd", p[:n, :count].reshape(n, heads, rows).astype(float), cache[:n]
        )
        weigh(tag, acc, heads, rows, p, *places, n, dim, alpha, select)
        errors.append(np.abs(acc[:count, :dim].reshape(heads, rows, dim) - expected).max())
    return float(max(errors) / np.finfo(number).eps)

tiles = {
    f"{dtype} {heads} x {rows} x {dim}, {n} keys": tile_error(dtype, heads, rows, dim, n)
    for dtype in ("float32", "float64")
    for heads, rows, dim, n in (
        (2, 1, 64, 16), (5, 1, 100, 3), (2, 2, 80, 16), (1, 3, 36, 1), (3, 4, 128, 15), (2, 5, 1, 2), (1, 6, 9, 5),
        (2, 7, 256, 4), (2, 8, 128, 16), (1, 8, 83, 7), (3, 9, 64, 6), (1, 14, 72, 13), (2, 16, 130, 11),
    )
}
shares = {}
for q_dtype, kv_dtype in (("float32", None), ("float16", None), ("bfloat16", None), ("float32", "float8_e4m3fn")):
    for case in testing.CASES["paged_attention"][:24:3]:
        result = testing.run_case(case.with_dtypes(q_dtype, kv_dtype))
        shares[f"{q_dtype} {kv_dtype} {case.id}"] = result.budget_share if result.passed else 1e9
for case in testing.CASES["merge"]:
    result = testing.run_case(case)
    shares[f"merge {case.id}"] = result.budget_share if result.passed else 1e9
print(json.dumps({"bytes": cpu.REGISTER_BYTES, "dot": cpu.BFLOAT16_DOT, "halves": halves, "shares": shares,
                  "tiles": tiles}))
"""

EMULATED = """
import json
import llvmlite.ir as ir
from nbattn.cpu_ref import cpu

cpu.REGISTER_BYTES, cpu.BFLOAT16_DOT = 64, True
from nbattn import testing
from nbattn.cpu_ref.lanes import Lanes
from nbattn.cpu_ref.paged_attention import paged_worker

class Emulated(Lanes):  # pairs stay words: the two products of a pair are two multiply-adds
    def __init__(self, builder, kind, dot=False):
        super().__init__(builder, kind, dot)
        self.pairs = self.words

    def multiply_add(self, a, b, c):
        if not self.dot:
            return self.fma(a, b, c)
        words = ir.VectorType(ir.IntType(32), self.count)
        a, b = (self.builder.bitcast(x, words) for x in (a, b))
        upper, half = ir.Constant(words, [-65536] * self.count), ir.Constant(words, [16] * self.count)
        for x, y in (
            (self.builder.shl(a, half), self.builder.shl(b, half)),
            (self.builder.and_(a, upper), self.builder.and_(b, upper)),
        ):
            c = self.fma(self.builder.bitcast(x, self.vector), self.builder.bitcast(y, self.vector), c)
        return c

import nbattn.cpu_ref.packing, nbattn.cpu_ref.tiles
nbattn.cpu_ref.packing.Lanes = nbattn.cpu_ref.tiles.Lanes = Emulated
shares = {}
for case in testing.CASES["paged_attention"][:40]:
    result = testing.run_case(case.with_dtypes("bfloat16", None))
    shares[case.id] = result.budget_share if result.passed else 1e9
kinds = sorted({signature[4].tag for signature in paged_worker.signatures})
print(json.dumps({"shares": shares, "kinds": kinds}))
"""


HOST_FEATURES = llvm.get_host_cpu_features().flatten()


def printed_by(program: str, **variables: str) -> dict:
    """Return the JSON that a program prints in a process of its own, which keeps no compiled code."""
    environment = {**os.environ, **variables}
    environment.pop("NBATTN_CPU_CACHE", None)
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize(
    ("name", "features", "dot"),
    [
        ("generic", "", False),
        ("haswell", "", False),
        pytest.param(
            "znver4",
            HOST_FEATURES,
            True,
            marks=pytest.mark.skipif("+avx512bf16" not in HOST_FEATURES, reason="this CPU has no bfloat16 dot product"),
        ),
    ],
)
def test_results_do_not_depend_on_the_cpu(name, features, dot):
    if sys.platform != "linux" or os.uname().machine != "x86_64":
        pytest.skip("the CPUs named here are x86")
    found = printed_by(PROGRAM, NUMBA_CPU_NAME=name, NUMBA_CPU_FEATURES=features)
    assert found["halves"]
    assert max(found["tiles"].values()) < 300, found["tiles"]  # in epsilons; sums of up to 256 numbers
    worst = max(found["shares"], key=found["shares"].get)
    assert len(found["shares"]) == 42
    assert found["shares"][worst] <= 1, worst
    assert (found["bytes"], found["dot"]) == (64 if dot else 32, dot)


def test_the_dot_product_path_is_right_with_the_instruction_emulated():
    found = printed_by(EMULATED)
    assert found["kinds"] == ["few", "many"]
    worst = max(found["shares"], key=found["shares"].get)
    assert found["shares"][worst] <= 1, worst

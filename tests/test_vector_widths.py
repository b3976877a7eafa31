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
from nbattn.cpu_ref.number_formats import float_to_half, half_to_float

@njit
def there_and_back(bits, values, again):
    for i in range(bits.shape[0]):
        values[i] = half_to_float(bits[i])
    for i in range(again.shape[0]):
        again[i] = float_to_half(values[i])

@njit
def narrow(values, bits):
    for i in range(values.shape[0]):
        bits[i] = float_to_half(values[i])

bits = np.arange(65536, dtype=np.uint32).astype(np.uint16)
values, again = np.empty(65536, np.float32), np.empty(65536, np.uint16)
there_and_back(bits, values, again)
exact = bits.view(np.float16).astype(np.float32)
numbers = ~np.isnan(exact)
halves = bool((values.view(np.uint32) == exact.view(np.uint32))[numbers].all() and np.isnan(values[~numbers]).all())
halves &= bool((again == bits)[numbers].all() and np.isnan(again.view(np.float16)[~numbers]).all())
rng = np.random.default_rng(0)
wild = (rng.standard_normal(200_000) * 2.0 ** rng.integers(-30, 20, 200_000)).astype(np.float32)
between = ((exact[1:31744] + exact[:31743]) / 2).astype(np.float32)  # ties
wild = np.concatenate([wild, between, np.array([65519.9, 65520, 65535.9, 65536, 1e30, np.inf, -np.inf], np.float32)])
rounded = np.empty(len(wild), np.uint16)
narrow(wild, rounded)
with np.errstate(over="ignore"):
    halves &= bool((rounded == wild.astype(np.float16).view(np.uint16)).all())
shares = {}
for q_dtype, kv_dtype in (("float32", None), ("float16", None), ("bfloat16", None), ("float32", "float8_e4m3fn")):
    for case in testing.CASES["paged_attention"][:24:3]:
        result = testing.run_case(case.with_dtypes(q_dtype, kv_dtype))
        shares[f"{q_dtype} {kv_dtype} {case.id}"] = result.budget_share if result.passed else 1e9
print(json.dumps({"bytes": cpu.REGISTER_BYTES, "dot": cpu.BFLOAT16_DOT, "halves": halves, "shares": shares}))
"""


HOST_FEATURES = llvm.get_host_cpu_features().flatten()


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
    environment = {**os.environ, "NUMBA_CPU_NAME": name, "NUMBA_CPU_FEATURES": features}
    environment.pop("NBATTN_CPU_CACHE", None)
    if sys.platform != "linux" or os.uname().machine != "x86_64":
        pytest.skip("the CPUs named here are x86")
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["halves"]
    worst = max(found["shares"], key=found["shares"].get)
    assert len(found["shares"]) == 32
    assert found["shares"][worst] <= 1, worst
    assert (found["bytes"], found["dot"]) == (64 if dot else 32, dot)

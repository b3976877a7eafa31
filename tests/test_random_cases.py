"""Random cases over layouts, dtypes and options together; `scripts/random_campaign.py` draws thousands."""

import numpy as np
import pytest

from nbattn import testing
from nbattn.testing.random_cases import KV_DTYPES, pick

CASES_OF_A_FAMILY = 200
SEED = 20_240_801
KINDS = ("float16", "bfloat16", "float32", "float64", "float8_e4m3fn", "float8_e5m2", "int8")
Q_OF_KIND = {kind: [q for q, caches in KV_DTYPES.items() if q == kind or kind in caches] for kind in KINDS}


@pytest.mark.parametrize("kind", KINDS)  # one test compiles the kernels of one cache dtype
def test_random_attention(kind):
    rng = np.random.default_rng([SEED, KINDS.index(kind)])
    for family in ("paged_attention", "cascade_attention", "gather_attention"):
        for _ in range(-(-CASES_OF_A_FAMILY // len(KINDS))):
            q_dtype = pick(rng, Q_OF_KIND[kind])
            case = testing.random_case(family, rng).with_dtypes(q_dtype, None if kind == q_dtype else kind)
            result = testing.run_case(case)
            assert result.passed, result


def test_random_merges():
    rng = np.random.default_rng(SEED)
    for _ in range(CASES_OF_A_FAMILY):
        result = testing.run_case(testing.random_case("merge", rng))
        assert result.passed, result


@pytest.mark.parametrize("wrapper", testing.WRAPPERS)
def test_random_cascade_wrappers(wrapper):
    for number in range(CASES_OF_A_FAMILY):
        rng = np.random.default_rng([SEED, number])
        result = testing.run_case(testing.random_case(wrapper, rng, "float32", "float32"))
        assert result.passed, result

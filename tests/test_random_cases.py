"""Random cases over layouts, dtypes and options together; `scripts/random_campaign.py` draws thousands."""

import numpy as np
import pytest

from nbattn import testing
from nbattn.testing.draws import KV_DTYPES, pick

CASES_OF_A_FAMILY = 200
SEED = 20_240_801
KINDS = ("float16", "bfloat16", "float32", "float64", "float8_e4m3fn", "float8_e5m2", "int8")
Q_OF_KIND = {kind: [q for q, caches in KV_DTYPES.items() if q == kind or kind in caches] for kind in KINDS}


FOUND = [  # by a campaign
    testing.PagedCase(  # a dot product that the cap makes small keeps its rounding error
        seed=562262685, q_dtype="float64", out_dtype="float16", group_size=16, head_dim=128, page_size=2, sm_scale=0.5,
        layout="block_table", k_scale="head", window_left=100, chunk_size=1, logits_soft_cap=0.5, kv_start=True,
        split_size=3, kv_lens=(105, 65, 16), qo_lens=(1, 0, 2), causal=False,
    ),
]  # fmt: skip


@pytest.mark.parametrize("case", FOUND, ids=lambda case: str(case.seed))
def test_cases_that_once_failed(case):
    result = testing.run_case(case)
    assert result.passed, result


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

"""Random calls of the operator faces against the oracle: options drawn together, junk in every place not to be read."""

import numpy as np
import pytest

from nbattn import testing

SEED, DRAWS, PARTS = 3, 200, 4


@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("face", testing.FACES)
def test_random_calls(face, part):
    dtype = "bfloat16" if part == 0 else "float32"  # scripts/random_campaign.py draws all of them
    failed = []
    for number in range(part, DRAWS, PARTS):
        result = testing.run_case(testing.random_case(face, np.random.default_rng([SEED, number]), dtype, dtype))
        failed += [] if result.passed else [str(result)]
    assert not failed, "\n".join(failed)


def test_a_case_is_its_own_repro():
    case = testing.random_case("qsa_sparse_attention", np.random.default_rng(5), "float32")
    assert eval(repr(case), {"FaceCase": testing.FaceCase}) == case
    assert case.with_dtypes("bfloat16", "int8").kv_dtype == "int8"
    first, again = case.build(), case.build()
    for name, x in first.oracle_kwargs.items():
        assert np.asarray(x).tobytes() == np.asarray(again.oracle_kwargs[name]).tobytes()

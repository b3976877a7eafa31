"""`warmup` compiles what the first call needs, and refuses what it does not know by name."""

import numpy as np
import pytest

import nbattn
from nbattn.cpu_ref import workers
from nbattn.cpu_ref.gather_attention import gather_worker
from nbattn.cpu_ref.merge_states import merge_worker
from nbattn.cpu_ref.paged_attention import paged_worker


def test_kernels_of_a_dtype_are_there_afterwards():
    assert nbattn.warmup("float32") >= 0
    ready = {entry[0] for entry in workers._codes}
    assert {paged_worker, gather_worker, merge_worker} <= ready
    before = len(workers._codes)
    assert nbattn.warmup("float32") < 1  # nothing is left to compile
    k = np.zeros((1, 40, 2, 64), np.float32)
    kv = nbattn.PagedKV.from_slots(k, k, np.array([40]))
    for rows in (1, 40):
        for rules in ({}, {"logits_soft_cap": 1.0}):
            nbattn.paged_attention(np.ones((rows, 8, 64), np.float32), kv, np.array([0, rows]), **rules)
    assert len(workers._codes) == before


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"q_dtype": "bf16"}, "q_dtype: must be one of float16, bfloat16, float32, float64, got 'bf16'"),
        ({"q_dtype": "int8"}, "q_dtype: must be one of"),
        ({"kv_dtype": "int16"}, "kv_dtype: must be one of"),
        ({"families": ("prefill",)}, "families: must be among"),
        ({"families": None}, "families: must be among"),
        ({"families": (["merge_state"],)}, "families: must be among"),
        ({"head_dim": 64.0}, r"head_dim: must be an int, got 64\.0"),
        ({"head_dim": 10**30}, "head_dim: must be at most 4194304, got 10"),
        ({"head_dim": 2**20}, "head_dim: must be at most 524288 with 8 heads, got 1048576"),
        ({"target": "tpu"}, 'target: must be "cpu", "cuda" or "gpu"'),
    ],
)
def test_what_is_unknown_is_refused_by_name(arguments, words):
    with pytest.raises(nbattn.ContractError, match=words):
        nbattn.warmup(**arguments)

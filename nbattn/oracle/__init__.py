"""The float64 definition of every public function: dense, slow NumPy that takes the same arguments and uses no kernel.

Results are float64 whatever the inputs; NumPy arrays only. `rounding` adds exactly the roundings that a path may make.

Examples
--------
>>> import numpy as np
>>> from nbattn import oracle
>>> k = np.zeros((1, 4, 1, 2), np.float32)  # [rows, slots, kv_heads, head_dim]
>>> v = np.arange(8, dtype=np.float32).reshape(1, 4, 1, 2)
>>> oracle.gqa_decode(np.ones((1, 1, 2), np.float32), k, v, np.array([3]), return_lse=True)
(array([[[2., 3.]]]), array([[1.5849625]]))
"""

from nbattn.oracle.layouts import Cache
from nbattn.oracle.levels import Level, cascade_attention, gather_attention, paged_attention
from nbattn.oracle.operators import (
    Rope,
    attention_over_cache,
    generic_cross_attention_kv_cache,
    gqa_decode,
    multi_level_cascade,
    qsa_sparse_attention,
    shared_prefix,
)
from nbattn.oracle.score_pipeline import Extremes, Pipeline, Rounding, alibi_slopes, attend
from nbattn.oracle.states import append_paged_kv_cache, merge_state, merge_state_in_place, merge_states

__all__ = [
    "Cache",
    "Extremes",
    "Level",
    "Pipeline",
    "Rope",
    "Rounding",
    "alibi_slopes",
    "append_paged_kv_cache",
    "attend",
    "attention_over_cache",
    "cascade_attention",
    "gather_attention",
    "generic_cross_attention_kv_cache",
    "gqa_decode",
    "merge_state",
    "merge_state_in_place",
    "merge_states",
    "multi_level_cascade",
    "paged_attention",
    "qsa_sparse_attention",
    "shared_prefix",
]

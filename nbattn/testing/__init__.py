"""Cases, poison and the error budget: what this library is tested with, for users' own kernels too.

Examples
--------
>>> from nbattn import oracle, testing
>>> case = testing.MergeCase(rows=5, states=3)
>>> result = testing.run_case(case, oracle.merge_states)  # or your own function of that signature
>>> result.passed, result.case
(True, MergeCase(rows=5, states=3))
"""

from nbattn.testing.attention_cases import AttentionCase, CascadeCase, PagedCase
from nbattn.testing.budget import Comparison, Expected, allowed_rounding, assert_close, compare, expect
from nbattn.testing.cases import CacheCase, Case, GatherCase, MergeCase, Problem
from nbattn.testing.draws import FACES, WRAPPERS
from nbattn.testing.exact import scatter, zero_logit_tokens
from nbattn.testing.face_cases import FaceCase
from nbattn.testing.memory import poison, spread, to_cupy
from nbattn.testing.paths import GATHER_PATHS, PATHS, RANGE_PATHS, Handmade
from nbattn.testing.random_cases import FAMILIES, random_case
from nbattn.testing.run import Result, run_case
from nbattn.testing.table import CASES
from nbattn.testing.wrapper_cases import WrapperCase

__all__ = [
    "CASES",
    "FACES",
    "FAMILIES",
    "GATHER_PATHS",
    "PATHS",
    "RANGE_PATHS",
    "WRAPPERS",
    "AttentionCase",
    "CacheCase",
    "CascadeCase",
    "Case",
    "Comparison",
    "Expected",
    "FaceCase",
    "GatherCase",
    "Handmade",
    "MergeCase",
    "PagedCase",
    "Problem",
    "Result",
    "WrapperCase",
    "allowed_rounding",
    "assert_close",
    "compare",
    "expect",
    "poison",
    "random_case",
    "run_case",
    "scatter",
    "spread",
    "to_cupy",
    "zero_logit_tokens",
]

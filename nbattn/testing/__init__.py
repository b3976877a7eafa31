"""Cases, poison and the error budget: what this library is tested with, for users' own kernels too."""

from nbattn.testing.budget import Comparison, Expected, allowed_rounding, assert_close, compare, expect
from nbattn.testing.exact import scatter, zero_logit_tokens

__all__ = [
    "Comparison",
    "Expected",
    "allowed_rounding",
    "assert_close",
    "compare",
    "expect",
    "scatter",
    "zero_logit_tokens",
]

"""Check a kernel of your own against the float64 definition and the error budget of this library."""

import numpy as np

import nbattn
from nbattn import oracle, testing


def my_attention(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    """Stand in for your kernel: one request, not causal, [tokens, heads, head_dim]."""
    s = np.einsum("qhd,khd->hqk", q, k) / np.float32(np.sqrt(q.shape[-1]))
    p = np.exp(s - s.max(-1, keepdims=True))
    return np.einsum("hqk,khd->qhd", p / p.sum(-1, keepdims=True), v)


rng = np.random.default_rng(0)
q, k, v = rng.standard_normal((3, 37, 4, 64), dtype=np.float32)
kv = nbattn.PagedKV.from_slots(k[None], v[None], kv_lens=np.array([37], np.int32))  # [rows, slots, kv_heads, head_dim]
expected = testing.expect(oracle.paged_attention, q, kv, np.array([0, 37], np.int32), causal=False)
print(testing.compare(my_attention(q, k, v), expected.out, expected.out_budget))

wrong = my_attention(q, k[:36], v[:36])  # forgets the last key
print(testing.compare(wrong, expected.out, expected.out_budget))

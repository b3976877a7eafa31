"""Four requests share a system prompt: attend to it once for all of them, and to each request's own keys (a cascade).

The two levels live in different pools with different page sizes; the result equals attention over the joined keys.
"""

import numpy as np

import nbattn

rng = np.random.default_rng(0)
num_requests, num_qo_heads, num_kv_heads, head_dim = 4, 8, 2, 64


def pool(pages: int, page_size: int) -> np.ndarray:
    return rng.standard_normal((pages, 2, page_size, num_kv_heads, head_dim), dtype=np.float32)


def table(*ids: int) -> np.ndarray:
    return np.array(ids, np.int32)


prompt = nbattn.PagedKV.from_page_table(pool(8, 16), table(0, 3), table(5, 0, 7), table(9))  # 41 keys, once
own = nbattn.PagedKV.from_page_table(pool(9, 4), table(0, 1, 3, 4, 6), table(0, 8, 2, 4, 1, 6), table(2, 4, 1, 3))
q = rng.standard_normal((num_requests, num_qo_heads, head_dim), dtype=np.float32)

levels = [
    nbattn.Level(prompt, qo_indptr=table(0, 4)),  # all four rows
    nbattn.Level(own, qo_indptr=table(0, 1, 2, 3, 4), causal=True),  # a row for each request
]
out, lse = nbattn.cascade_attention(q, levels, return_lse=True)

# The same from the parts: attend to each level, then merge the two states.
states = [nbattn.paged_attention(q, level.kv, level.qo_indptr, causal=False, return_lse=True) for level in levels]
merged, merged_lse = nbattn.merge_state(*states[0], *states[1])
print(
    f"cascade and merged parts differ by {np.abs(out - merged).max():.1e}, lse by {np.abs(lse - merged_lse).max():.1e}"
)

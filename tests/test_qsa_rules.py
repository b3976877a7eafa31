"""qsa_sparse_attention: every rule of every argument is refused by class, argument and message."""

import numpy as np
import pytest

import nbattn
from nbattn import ContractError, PageTableError, TargetError

F32 = np.float32
OUT = np.zeros((12, 6, 8), F32)
IDS = np.zeros((12, 7), np.int32)


def call(**changes):
    """Attend with 10 rows of 4 requests that have 10, 2, 2 and 9 keys, after changing some arguments."""
    arguments = {
        "q": OUT,
        "input_row_offsets": np.array([0, 3, 3, 5, 10], np.uint32),
        "kv_blocks": np.zeros((14, 2, 3, 4, 2, 8), F32),
        "page_stride": -1,
        "cache_lengths": np.array([7, 2, 0, 4], np.uint32),
        "kv_lookup_table": np.arange(16, dtype=np.uint32).reshape(4, 4) % 14,
        "max_prompt_length": None,
        "max_cache_length": None,
        "layer_idx": 1,
        "token_indices": IDS,
        "counts": IDS[:, 0],
        "scale": 1.0,
    }
    return nbattn.qsa_sparse_attention(**arguments | changes)


RULES = {
    "q rank": ({"q": OUT[0]}, "q: must be [rows, num_heads, head_dim], got shape (6, 8)."),
    "q list": ({"q": OUT.tolist()}, "q: must be a NumPy or CuPy array, got list."),
    **{
        f"no {name}": ({name: None}, f"{name}: must be a NumPy or CuPy array, got NoneType.")
        for name in (
            "q", "kv_blocks", "input_row_offsets", "cache_lengths", "kv_lookup_table", "token_indices", "counts",
        )
    },
    "q dtype": ({"q": OUT.astype(int)}, "q: must be one of float16, bfloat16, float32, float64, got int64."),
    "cache dtype": ({"q": OUT.astype("f2")}, "kv_blocks: must have q's dtype float16 or one of"),
    "q heads": ({"q": OUT[:, :5]}, "q: must have a positive multiple of 2 (num_kv_heads) heads, got 5."),
    "q head size": ({"q": OUT[..., :4]}, "q: must have the keys' head size 8, got 4."),
    "offsets size": (
        {"input_row_offsets": np.zeros(4, int)}, "input_row_offsets: must be [5] (batch + 1), got shape (4,)."),
    "offsets start": ({"input_row_offsets": np.arange(1, 6)}, "input_row_offsets[0]: must be 0, got 1."),
    "offsets fall": (
        {"input_row_offsets": np.array([0, 2, 1, 3, 4])},
        "input_row_offsets[2]: must not be below input_row_offsets[1] = 2, got 1."),
    "offsets end": (
        {"input_row_offsets": np.array([0, 2, 3, 3, 13])}, "input_row_offsets[-1]: must be at most 12 (rows of q)"),
    "blocks rank": (
        {"kv_blocks": OUT}, "kv_blocks: must be [pages, 2, layers, page_size, kv_heads, dim], got (12, 6, 8)."),
    "page_stride": ({"page_stride": 383}, "page_stride: must be -1 or at least 384 (one packed page), got 383."),
    "page_stride type": (
        {"page_stride": 384.0}, "page_stride: must be an integer or a one-element integer array, got 384.0."),
    "page_stride beyond": (
        {"page_stride": 385}, "page_stride: the last of 14 pages must end inside the memory of the base"),
    "page_stride of no int64": ({"page_stride": 2**70}, "page_stride: the last of 14 pages must end inside the memory"),
    "cache_lengths": ({"cache_lengths": np.array([0, 0, -1, 0])}, "cache_lengths[2]: must not be negative, got -1."),
    "cache_lengths dtype": ({"cache_lengths": np.zeros(4)}, "cache_lengths: must be int32"),
    "table rank": ({"kv_lookup_table": np.zeros(4, int)}, "kv_lookup_table: must have 2 dimensions, got shape (4,)."),
    "max_prompt_length": (
        {"max_prompt_length": 4}, "max_prompt_length: must be at least 5 (rows of the longest request)"),
    "max_cache_length": (
        {"max_cache_length": np.array([6])}, "max_cache_length: must be at least 7 (longest of cache_lengths), got 6."),
    "max_cache_length type": (
        {"max_cache_length": "7"}, "max_cache_length: must be an integer or a one-element integer"),
    "layer_idx": ({"layer_idx": 3}, "layer_idx: must be in 0..2 (layers of kv_blocks), got 3."),
    "token_indices rank": ({"token_indices": IDS[0]}, "token_indices: must have 2 dimensions, got shape (7,)."),
    "token_indices rows": (
        {"token_indices": IDS[:9]}, "token_indices: must have 12 rows (rows of q), got shape (9, 7)."),
    "token_indices dtype": ({"token_indices": IDS * 1.0}, "token_indices: must be int32"),
    "counts rank": ({"counts": IDS}, "counts: must have 1 dimension, got shape (12, 7)."),
    "counts rows": ({"counts": IDS[0]}, "counts: must have 12 rows (rows of q), got shape (7,)."),
    "counts list": ({"counts": [0] * 12}, "counts: must be a NumPy or CuPy array, got list."),
    "scale": ({"scale": "1"}, "scale: must be a finite number, got '1'."),
    "group": ({"group": 2}, "group: must be num_q_heads / num_kv_heads, 6 / 2, got 2."),
    "group zero": ({"group": 0}, "group: must be at least 1, got 0."),
    "warps": ({"warps": 0}, "warps: must be at least 1, got 0."),
    "warps type": ({"warps": 2.5}, "warps: must be an int, got 2.5."),
    "unroll": ({"unroll": -4}, "unroll: must be at least 1, got -4."),
    "output and out": ({"output": OUT, "out": OUT}, "output: is this operator's name for out, got both. Give one."),
    "output": ({"output": OUT[:3]}, "output: must be float32 of shape [12, 6, 8], got float32 of shape [3, 6, 8]."),
    "out": ({"out": OUT.astype("f8")}, "out: must be float32 of shape [12, 6, 8], got float64"),
    "out_dtype": (
        {"out_dtype": "int8"}, "out_dtype: must be one of float16, bfloat16, float32 or q's dtype, got int8."),
    "k_scale": ({"k_scale": np.ones((2, 4), F32)}, "k_scale: must broadcast to [2, 8] (num_kv_heads, head_dim), got"),
    "v_scale": ({"v_scale": np.ones(8, int)}, "v_scale: must be a float dtype, got int64."),
    "output_gate": ({"output_gate": OUT[:, :3]}, "output_gate: must be [12, 6] or [12, 6, 8], got shape (12, 3, 8)."),
    "output_gate dtype": ({"output_gate": OUT.astype(int)}, "output_gate: must be a float dtype, got int64."),
    "lse": ({"lse": np.zeros((12, 5), F32)}, "lse: must be float32 of shape [12, 6], got"),
    "lse_base": ({"lse_base": "ten"}, 'lse_base: must be "2" or "e", got \'ten\'.'),
}  # fmt: skip
OTHER_RULES = {
    "table rows": (
        {"kv_lookup_table": np.zeros((3, 4), int)}, PageTableError,
        "kv_lookup_table: must have 4 rows (one per entry of (cache_lengths + rows)), got 3."),
    "past the table": (
        {"cache_lengths": np.array([7, 0, 15, 0])}, PageTableError,
        "(cache_lengths + rows)[2]: must be in 0..16 (4 blocks of 4 in kv_lookup_table), got 17."),
    "page id": (
        {"kv_lookup_table": np.full((4, 4), 14, np.uint32)}, PageTableError,
        "kv_lookup_table[0, 0]: must be below 14 (pages of the cache), got 14"),
    "target": ({"target": "gpu"}, TargetError, 'target: "gpu" needs CuPy arrays'),
}  # fmt: skip


def refused(kind, message, changes):
    with pytest.raises(kind) as caught:
        call(**changes)
    assert type(caught.value) is kind
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(("changes", "message"), RULES.values(), ids=RULES)
def test_rules(changes, message):
    refused(ContractError, message, changes)


@pytest.mark.parametrize(("changes", "kind", "message"), OTHER_RULES.values(), ids=OTHER_RULES)
def test_other_rules(changes, kind, message):
    refused(kind, message, changes)


def test_what_is_not_broken_is_not_refused():
    assert call().shape == OUT.shape

"""attention_over_cache: every rule of every argument is refused by class, argument and message."""

import numpy as np
import pytest

import nbattn
from nbattn import ContractError, PageTableError, TargetError

F32 = np.float32
CU_Q = np.array([0, 3, 5, 10, 14], np.int32)
IDS = np.zeros(16, np.int32)


def planes(columns=4, positions=14):
    return {"rope_cos": np.ones((positions, columns), F32), "rope_sin": np.zeros((positions, columns), F32)}


ROPE = planes()
NORM = {**ROPE, "q_norm_gain": np.ones(8, F32), "qk_norm_eps": 1e-5}


def call(paged=False, **changes):
    """Attend with 4 requests of 7, 0, 12 and 3 keys, 4 over 2 heads of 8 and 6, after changing some arguments."""
    rows = (20, 2, 4) if paged else (4, 2, 14)
    arguments = {
        "q": np.zeros((16, 4, 8), F32),
        "cache_key": np.zeros((*rows, 8), F32),
        "cache_value": np.zeros((*rows, 6), F32),
        "kvcache_start": np.arange(16).reshape(4, 4) if paged else np.zeros(4, int),
        "cu_seqlens_q": CU_Q,
        "cu_seqlens_k": np.array([7, 0, 12, 3]),
    }
    return nbattn.attention_over_cache(**arguments | changes)


RULES = {
    "q rank": ({"q": np.zeros(3, F32)}, "q: must be [rows, num_heads, dim] or folded"),
    "q a list": ({"q": [[1.0]]}, "q: must be a NumPy or CuPy array, got list."),
    **{
        f"no {name}": ({name: None}, f"{name}: must be a NumPy or CuPy array, got NoneType.")
        for name in ("q", "cache_key", "cache_value", "kvcache_start", "cu_seqlens_q", "cu_seqlens_k")
    },
    "q dtype": ({"q": np.zeros((16, 4, 8), int)}, "q: must be one of float16, bfloat16, float32, float64, got int64."),
    "q head size": ({"q": np.zeros((16, 4, 9), F32)}, "q: must have the keys' head size 8, got 9."),
    "q heads": ({"q": np.zeros((16, 3, 8), F32)}, "q: must have a positive multiple of 2 (kv_num_heads) heads"),
    "folded without num_heads": ({"q": np.zeros((16, 32), F32)}, "num_heads: must be given with a folded q, got None."),
    "folded unevenly": (
        {"q": np.zeros((16, 33), F32), "num_heads": 4}, "q: must be [rows, 4 * dim] (num_heads = 4), got"),
    "num_heads zero": ({"q": np.zeros((16, 32), F32), "num_heads": 0}, "num_heads: must be at least 1, got 0."),
    "num_heads": ({"num_heads": 2}, "num_heads: must be 4 (axis 1 of q), got 2."),
    "num_heads type": ({"num_heads": 4.0}, "num_heads: must be an int, got 4.0."),
    "kv_num_heads": ({"kv_num_heads": 4}, "kv_num_heads: must be 2 (heads of cache_key), got 4."),
    "cache rank": (
        {"cache_key": np.zeros((4, 2, 8), F32)}, "cache_key: must be [pages, kv_heads, page_size, dim] (HND)"),
    "cache dtypes": (
        {"cache_value": np.zeros((4, 2, 14, 6))}, "cache_value: must be float32 as cache_key is, got float64"),
    "cache shapes": (
        {"cache_value": np.zeros((4, 2, 13, 6), F32)}, "cache_value: must be (4, 2, 14, 6) to match cache_key"),
    "cache dtype": ({"q": np.zeros((16, 4, 8), "f2")}, "cache_key, cache_value: must have q's dtype float16 or one of"),
    "kvcache_start rank": ({"kvcache_start": np.zeros((4, 1, 1), int)}, "kvcache_start: must be [requests] for a"),
    "kvcache_start dtype": ({"kvcache_start": np.zeros(4)}, "kvcache_start: must be int32"),
    "cu_seqlens_q size": ({"cu_seqlens_q": CU_Q[:4]}, "cu_seqlens_q: must be [5] (batch + 1), got shape (4,)."),
    "cu_seqlens_q start": ({"cu_seqlens_q": CU_Q + 1}, "cu_seqlens_q[0]: must be 0, got 1."),
    "cu_seqlens_q falls": (
        {"cu_seqlens_q": np.array([0, 3, 2, 5, 9])}, "cu_seqlens_q[2]: must not be below cu_seqlens_q[1]"),
    "cu_seqlens_q end": (
        {"cu_seqlens_q": np.array([0, 3, 4, 5, 17])}, "cu_seqlens_q[-1]: must be at most 16 (rows of q)"),
    "cu_seqlens_k size": (
        {"cu_seqlens_k": np.zeros(3, int)}, "cu_seqlens_k: must be [4] (each length) or [5] (cumulative), got [3]."),
    "cu_seqlens_k start": ({"cu_seqlens_k": np.array([1, 1, 1, 1, 1])}, "cu_seqlens_k[0]: must be 0, got 1."),
    "cu_seqlens_k falls": (
        {"cu_seqlens_k": np.array([0, 2, 1, 1, 1])}, "cu_seqlens_k[2]: must not be below cu_seqlens_k[1]"),
    "max_seqlen_q": ({"max_seqlen_q": 4}, "max_seqlen_q: must be at least 5 (rows of the longest request), got 4."),
    "max_seqlen_k": (
        {"max_seqlen_k": np.array([11])}, "max_seqlen_k: must be at least 12 (keys of the longest request)"),
    "max_seqlen_k type": (
        {"max_seqlen_k": 12.5}, "max_seqlen_k: must be an integer or a one-element integer array, got"),
    "max_seqlen_q array": (
        {"max_seqlen_q": np.array([5, 5])}, "max_seqlen_q: must be an integer or a one-element integer"),
    "is_causal": ({"is_causal": 1}, "is_causal: must be True, False or None, got 1."),
    "smooth_softmax": ({"smooth_softmax": "yes"}, "smooth_softmax: must be True, False or None, got 'yes'."),
    "q_scale": ({"q_scale": "1"}, "q_scale: must be a finite number, got '1'."),
    "q_scale array": ({"q_scale": np.ones(2)}, "q_scale: must be a finite number, got array"),
    "softcap": ({"softcap": -1.0}, "softcap: must not be negative, got -1.0."),
    "sliding_window 0": (
        {"sliding_window": 0}, "sliding_window: must be positive (tokens, the row's own included) or -1"),
    "sliding_window -2": (
        {"sliding_window": -2}, "sliding_window: must be positive (tokens, the row's own included) or -1"),
    "sliding_window type": ({"sliding_window": 2.0}, "sliding_window: must be an int, got 2.0."),
    "head_sink": ({"head_sink": np.zeros(3)}, "head_sink: must be [4] (num_heads), got shape (3,)."),
    "head_sink dtype": ({"head_sink": np.zeros(4, int)}, "head_sink: must be a float dtype, got int64."),
    "attn_mask shape": ({"attn_mask": np.ones((5, 11), bool)}, "attn_mask: must broadcast to [4 or 1, 4 or 1, 5, 12]"),
    "attn_mask dtype": ({"attn_mask": np.ones((5, 12), int)}, "attn_mask: must be bool (True = keep) or a float dtype"),
    "attn_mask rank": (
        {"attn_mask": np.ones((1, 1, 1, 5, 12), bool)}, "attn_mask: must have 1 to 4 dimensions, got 5."),
    "one plane": ({"rope_cos": ROPE["rope_cos"]}, "rope_sin: must be given with the other plane, got None."),
    "other plane": ({"rope_sin": ROPE["rope_cos"]}, "rope_cos: must be given with the other plane, got None."),
    "planes differ": (
        ROPE | {"rope_sin": np.ones((14, 3), F32)}, "rope_sin: must be [14, 4] as rope_cos is, got shape (14, 3)"),
    "planes rank": (
        ROPE | {"rope_cos": np.ones(14, F32)}, "rope_cos: must be [positions, rotary_dim / 2], got shape (14,)."),
    "planes dtype": (ROPE | {"rope_cos": np.ones((14, 4), int)}, "rope_cos: must be a float dtype, got int64."),
    "planes a list": (ROPE | {"rope_cos": [[1.0] * 4]}, "rope_cos: must live where q does (numpy), got list."),
    "planes too wide": (planes(5), "rope_cos: must have 1..4 columns (half of head_dim), got 5."),
    "planes too short": (
        planes(positions=11), "rope_cos: must hold the position of row 9, in 0..10 (positions of rope_cos)"),
    "position_ids without planes": (
        {"position_ids": IDS}, "position_ids: must come with rope_cos and rope_sin, got none."),
    "position_ids shape": (ROPE | {"position_ids": IDS[:3]}, "position_ids: must be [16] (rows of q), got shape (3,)."),
    "position_ids dtype": (ROPE | {"position_ids": IDS + 0.0}, "position_ids: must be int32"),
    "position past": (
        ROPE | {"position_ids": IDS + 14}, "position_ids[0]: must be in 0..13 (positions of rope_cos), got 14."),
    "rotary_mode without planes": (
        {"rotary_mode": "half"}, "rotary_mode: must come with rope_cos and rope_sin, got none."),
    "rotary_mode": (
        ROPE | {"rotary_mode": "neox"}, 'rotary_mode: must be "half", "interleaved" or None, got \'neox\'.'),
    "rotary_mode array": (
        ROPE | {"rotary_mode": np.array(["half", "half"])}, 'rotary_mode: must be "half", "interleaved" or None, got'),
    "gain without eps": (NORM | {"qk_norm_eps": None}, "q_norm_gain: must come with qk_norm_eps, got None."),
    "gain without planes": (
        NORM | {"rope_cos": None, "rope_sin": None}, "q_norm_gain: must come with rope_cos and rope_sin, got none."),
    "eps without gain": (
        ROPE | {"qk_norm_eps": 1e-5}, "qk_norm_eps: must come with q_norm_gain or k_norm_gain, got 1e-05"),
    "eps negative": (NORM | {"qk_norm_eps": -1e-5}, "qk_norm_eps: must not be negative, got -1e-05."),
    "eps type": (NORM | {"qk_norm_eps": "small"}, "qk_norm_eps: must be a finite number, got 'small'."),
    "gain shape": (NORM | {"q_norm_gain": np.ones(4, F32)}, "q_norm_gain: must be [8] (head_dim), got shape (4,)."),
    "gain dtype": (NORM | {"q_norm_gain": np.ones(8, int)}, "q_norm_gain: must be a float dtype, got int64."),
    "k_scale shape": ({"k_scale": np.ones((2, 8), F32)}, "k_scale: must broadcast to [2, 1, 8], got shape (2, 8)."),
    "k_scale width": ({"k_scale": np.ones(6, F32)}, "k_scale: must broadcast to [2, 1, 8], got shape (6,)."),
    "k_scale dtype": ({"k_scale": np.ones(8, int)}, "k_scale: must be a float dtype, got int64."),
    "k_scale type": ({"k_scale": "one"}, "k_scale: must be a NumPy or CuPy array, got str."),
    "v_scale width": ({"v_scale": np.ones(8, F32)}, "v_scale: must broadcast to [2, 1, 6], got shape (8,)."),
    "slot_ids rank": ({"slot_ids": np.zeros((4, 1), int)}, "slot_ids: must have 1 dimension, got shape (4, 1)."),
    "lse_base": ({"lse_base": 2}, 'lse_base: must be "2" or "e", got 2.'),
    "out rank": ({"out": np.zeros((16, 24), F32)}, "out: must be as q is, got shape (16, 24)."),
    "out dtype": ({"out": np.zeros((16, 4, 6))}, "out: must be float32 of shape [16, 4, 6], got float64"),
    "lse": ({"lse": np.zeros((16, 4))}, "lse: must be float32 of shape [16, 4], got float64"),
    "target": ({"target": "tpu"}, 'target: must be "cpu", "cuda" or "gpu", got \'tpu\'.'),
}  # fmt: skip
TABLE_RULES = {
    "past max_seq": (
        {"cu_seqlens_k": np.array([7, 15, 1, 1])}, "cu_seqlens_k[1]: must be in 0..14 (slots of a row), got 15."),
    "past max_seq, cumulative": (
        {"cu_seqlens_k": np.array([0, 7, 22, 22, 22])}, "diff(cu_seqlens_k)[1]: must be in 0..14 (slots of a row)"),
    "negative length": ({"cu_seqlens_k": np.array([7, -1, 1, 1])}, "cu_seqlens_k[1]: must be in 0..14"),
    "slot_ids size": (
        {"slot_ids": np.arange(3)}, "slot_ids: must have 4 entries (one per entry of cu_seqlens_k), got 3."),
    "slot_ids range": (
        {"slot_ids": np.array([0, 1, 2, 4])}, "slot_ids[3]: must name one of 4 rows of the cache, got 4."),
    "slot_ids negative": (
        {"slot_ids": np.array([0, -1, 2, 3])}, "slot_ids[1]: must name one of 4 rows of the cache, got -1."),
    "slot_ids twice": (
        {"slot_ids": np.array([0, 1, 2, 1])}, "slot_ids[3]: must differ from slot_ids[1], got 1 in both."),
    "more requests than rows": (
        {"cache_key": np.zeros((3, 2, 14, 8), F32), "cache_value": np.zeros((3, 2, 14, 6), F32)},
        "cu_seqlens_k: must have at most 3 entries (rows of the cache), got 4."),
}  # fmt: skip
PAGED_RULES = {
    "slot_ids": ({"slot_ids": np.arange(4)}, ContractError, "slot_ids: must be None with a block table"),
    "short table": (
        {"cu_seqlens_k": np.array([7, 0, 17, 3])}, PageTableError,
        "cu_seqlens_k[2]: must be in 0..16 (4 blocks of 4 in kvcache_start), got 17."),
    "block id": (
        {"kvcache_start": np.full((4, 4), 20)}, PageTableError,
        "kvcache_start[0, 0]: must be below 20 (pages of the cache), got 20 (request 0"),
    "folded out": (
        {"q": np.zeros((16, 32), F32), "num_heads": 4, "out": np.zeros((16, 4, 6), F32)}, ContractError,
        "out: must be folded as q is, got shape (16, 4, 6)."),
    "folded out width": (
        {"q": np.zeros((16, 32), F32), "num_heads": 4, "out": np.zeros((16, 28), F32)}, ContractError,
        "out: must be float32 of shape [16, 4, 6]"),
    "target": ({"target": "gpu"}, TargetError, 'target: "gpu" needs CuPy arrays, got NumPy arrays.'),
}  # fmt: skip


def refused(kind, message, paged=False, **changes):
    with pytest.raises(kind) as caught:
        call(paged, **changes)
    assert type(caught.value) is kind
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(("changes", "message"), RULES.values(), ids=RULES)
def test_rules(changes, message):
    refused(ContractError, message, **changes)


@pytest.mark.parametrize(("changes", "message"), TABLE_RULES.values(), ids=TABLE_RULES)
def test_rules_of_the_table(changes, message):
    refused(PageTableError, message, **changes)


@pytest.mark.parametrize(("changes", "kind", "message"), PAGED_RULES.values(), ids=PAGED_RULES)
def test_rules_of_the_paged_cache(changes, kind, message):
    refused(kind, message, paged=True, **changes)


def test_what_is_not_broken_is_not_refused():
    assert call().shape == call(paged=True).shape == (16, 4, 6)

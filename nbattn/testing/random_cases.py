"""Random cases whose dtypes, layouts and options are drawn together."""

from __future__ import annotations

from typing import Any

from nbattn.testing.attention_cases import CascadeCase, PagedCase
from nbattn.testing.cases import Case, GatherCase, MergeCase
from nbattn.testing.draws import (
    FACES,
    GROUPS,
    HEAD_DIMS,
    KV_DTYPES,
    PAGE_SIZES,
    WRAPPERS,
    pick,
    random_lens,
    random_levels,
    sometimes,
)
from nbattn.testing.face_cases import random_face_case
from nbattn.testing.memory import Rng
from nbattn.testing.pools import LAYOUTS
from nbattn.testing.wrapper_cases import random_wrapper_case

FAMILIES = ("paged_attention", "cascade_attention", "gather_attention", "merge")


def cache_fields(rng: Rng, q_dtype: str | None, kv_dtype: str | None) -> dict[str, Any]:
    """Return the fields of `CacheCase`, drawn together."""
    q_dtype = q_dtype or pick(rng, tuple(KV_DTYPES))
    head_dim = pick(rng, HEAD_DIMS)
    layout = pick(rng, LAYOUTS)
    pair = layout in ("combined", "blocks")  # one array holds K and V: one head size
    drawn = {
        "seed": int(rng.integers(2**31)),
        "q_dtype": q_dtype,
        "kv_dtype": kv_dtype or pick(rng, KV_DTYPES[q_dtype]),
        "out_dtype": sometimes(rng, pick(rng, ("float16", "bfloat16", "float32"))),
        "lse_base": sometimes(rng, "e", "2"),
        "num_kv_heads": pick(rng, (1, 1, 2, 3)),
        "group_size": pick(rng, GROUPS),
        "head_dim": head_dim,
        "page_size": pick(rng, PAGE_SIZES),
        "layout": layout,
        "kv_layout": sometimes(rng, "HND", "NHD", 0.5) if layout != "blocks" else "NHD",
        "shared": layout != "slots" and sometimes(rng, True, False),
        "unmapped": layout != "slots" and sometimes(rng, True, False, 0.15),
        "sm_scale": sometimes(rng, pick(rng, (0.0, 0.05, 0.5, 1.0))),
        "sinks": sometimes(rng, pick(rng, ("normal", "normal", "some", "huge"))),
        "k_scale": sometimes(rng, pick(rng, ("one", "head", "channel"))),
        "v_scale": sometimes(rng, pick(rng, ("one", "head", "channel"))),
        "given_out": sometimes(rng, True, False),
        "extra_rows": sometimes(rng, 2, 0),
    }
    if not pair and rng.random() < 0.15:
        drawn.update(sometimes(rng, {"head_dim": 192, "head_dim_vo": 128}, {"head_dim_vo": pick(rng, HEAD_DIMS)}, 0.5))
    return drawn


def attention_fields(rng: Rng, head_dim: int) -> dict[str, Any]:
    """Return the fields of `AttentionCase`, drawn together."""
    position = pick(rng, ("none", "none", "none", "rope", "alibi"))
    axes = pick(rng, ("bhnl", "11nl", "b1nl", "1h1l", "hnl", "nl", "l"))
    return {
        "window_left": sometimes(rng, pick(rng, (0, 1, 3, 16, 100)), -1),
        "chunk_size": sometimes(rng, pick(rng, (1, 4, 32, 100)), None, 0.15),
        "logits_soft_cap": sometimes(rng, pick(rng, (0.5, 2.0, 30.0))),
        "attn_mask": (mask := sometimes(rng, pick(rng, ("bool", "additive")))),
        "mask_axes": axes if mask else "bhnl",
        "alibi": position == "alibi",
        "rope": (pick(rng, (1e4, 100.0)), pick(rng, (1.0, 2.5))) if position == "rope" and head_dim % 2 == 0 else None,
        "kv_start": sometimes(rng, True, False, 0.2),
        "q_positions": sometimes(rng, True, False, 0.15),
        "split_size": pick(rng, (None, None, 1, 3, 17, 64)),
    }


def random_case(family: str, rng: Rng, q_dtype: str | None = None, kv_dtype: str | None = None) -> Case:
    """Return a random case of a family; dtypes are drawn unless they are given.

    Parameters
    ----------
    family : one of `FAMILIES`, `FACES` or `WRAPPERS`
    rng : numpy.random.Generator

    Examples
    --------
    >>> import numpy as np
    >>> random_case("merge", np.random.default_rng(0)).family.startswith("merge_state")
    True
    """
    if family in FACES:
        return random_face_case(family, rng, q_dtype, kv_dtype)
    if family in WRAPPERS:
        q_dtype = q_dtype or pick(rng, tuple(KV_DTYPES))
        return random_wrapper_case(family, rng, q_dtype, kv_dtype or pick(rng, KV_DTYPES[q_dtype]))
    if family == "merge":
        return MergeCase(
            seed=int(rng.integers(2**31)),
            q_dtype=q_dtype or pick(rng, tuple(KV_DTYPES)),
            lse_base=sometimes(rng, "e", "2"),
            form=pick(rng, ("states", "state", "in_place", "masked")),
            rows=pick(rng, (0, 1, 3, 7)),
            states=pick(rng, (0, 1, 2, 3, 5, 9)),
            heads=pick(rng, (1, 2, 5, 65)),
            head_dim=pick(rng, HEAD_DIMS),
            s_dtype=sometimes(rng, "float64", "float32"),
        )
    drawn = cache_fields(rng, q_dtype, kv_dtype)
    batch_size = int(rng.integers(1, 5))
    page_size, ragged = drawn["page_size"], rng.random() < 0.7
    qo_lens = tuple(int(n) for n in rng.choice([0, 1, 2, 5, 9], batch_size)) if ragged else None
    drawn["extra_rows"] = drawn["extra_rows"] if ragged else 0
    lens = random_lens(rng, batch_size, page_size)
    if family == "gather_attention":
        width, gate = int(rng.choice([1, 3, 16, 130])), sometimes(rng, True, False)
        return GatherCase(**drawn, kv_lens=lens, qo_lens=qo_lens, width=width, output_gate=gate)
    drawn.update(attention_fields(rng, drawn["head_dim"]))
    if family == "paged_attention":
        return PagedCase(**drawn, kv_lens=lens, qo_lens=qo_lens, causal=bool(rng.random() < 0.7))
    return CascadeCase(**drawn, levels=random_levels(rng, page_size))

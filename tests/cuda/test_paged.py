"""Paged attention kernels, run in the emulator through the public functions and held to the oracle's error budget."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import instructions
import numpy as np
import pytest
from small_problems import numbers, poisoned_cache

import nbattn
from nbattn import oracle, testing


@dataclass(frozen=True)
class Case:
    """One call: lengths, rows of each request, and what differs from a bfloat16 decode of 4 over 2 heads of size 64."""

    kv_lens: tuple[int, ...]
    rows: tuple[int, ...] | None = None
    kernels: tuple[str, ...] = ("paged_decode",)
    q: str = "bfloat16"
    cache: str | None = None
    heads: tuple[int, int] = (4, 2)
    layout: dict[str, Any] = field(default_factory=dict)
    options: tuple[str, ...] = ()
    values: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        changed = [f"{k}={v}" for k, v in {**self.layout, **self.values}.items()]
        name = f"{self.cache or self.q}-{self.heads[0]}on{self.heads[1]}"
        return "-".join([name, f"{list(self.kv_lens)}x{list(self.rows or ())}", *self.options, *changed])


TILES = [
    Case((1,)),
    Case((70, 0, 17), values={"split_size": 32}, kernels=("paged_decode", "merge_states")),
    Case((127, 129), layout={"page_size": 16}),
    Case((33,), q="float16", heads=(3, 1), layout={"page_size": 1, "dims": (80, 48)}),
    Case((20,), heads=(5, 1), layout={"dims": (192, 128), "page_size": 61}),
    Case((40,), heads=(2, 1), layout={"dims": (160, 256), "hnd": True}),
    Case((33, 16), cache="float8_e4m3fn", heads=(8, 1), layout={"dims": (64, 96), "page_size": 16}),
    Case((20, 31), cache="float8_e5m2", q="float16", options=("k_scale",)),
    Case((20,), cache="int8", q="float16", values={"k_scale": 0.02, "v_scale": 0.01}),
    Case((20,), cache="int8", options=("v_scale",), values={"k_scale": 0.02}),
    Case((20, 9), layout={"unmapped": True, "page_size": 4}),
    Case((35, 3), options=("sinks", "alibi_slopes"), values={"window_left": 7, "logits_soft_cap": 2.0}),
    Case((35, 0), options=("sinks",), values={"lse_base": "e", "out_dtype": np.float32}),
    Case((20, 9), rows=(2, 2), options=("bool_mask",), values={"causal": False}),
    Case((20, 9), rows=(2, 2), options=("float_mask",)),
    Case((50,), rows=(3,), values={"chunk_size": 12}),
    Case((37,), heads=(20, 1), kernels=("paged_prefill",)),
    Case((40, 25), rows=(9, 9), kernels=("paged_prefill",)),
    Case((90, 12), rows=(40, 1), heads=(2, 1), layout={"page_size": 7}, kernels=("paged_decode", "paged_prefill")),
    Case((150,), rows=(131,), heads=(1, 1), values={"window_left": 20, "split_size": 64},
         kernels=("paged_decode", "paged_prefill", "merge_states")),
    Case((40,), rows=(20,), heads=(2, 1), layout={"dims": (160, 192)}, kernels=("paged_prefill",)),
    Case((40,), rows=(20,), heads=(2, 1), q="float16", cache="float8_e4m3fn", kernels=("paged_prefill",)),
    Case((30,), rows=(20,), options=("bool_mask", "sinks"), values={"logits_soft_cap": 3.0},
         kernels=("paged_prefill",)),
]  # fmt: skip
HOPPER = [
    Case((300,), rows=(128,), heads=(1, 1), layout={"page_size": 16}),
    Case((37,), heads=(20, 1), layout={"dims": (128, 128)}),
    Case((270, 25), rows=(11, 9), q="float16", layout={"dims": (128, 96), "page_size": 7}),
    Case((150,), rows=(131,), heads=(1, 1), values={"window_left": 20, "split_size": 64},
         kernels=("paged_decode", "paged_wgmma", "merge_states")),
    Case((140,), rows=(20,), heads=(2, 1), layout={"dims": (160, 192), "hnd": True}),
    Case((140, 9), rows=(20, 9), layout={"unmapped": True, "page_size": 4}, values={"causal": False}),
    Case((30,), rows=(20,), q="float16", options=("bool_mask", "sinks"), values={"logits_soft_cap": 3.0}),
    Case((150,), rows=(20,), options=("float_mask", "alibi_slopes", "v_scale"), layout={"dims": (128, 128)}),
    Case((20, 0), rows=(30, 20), values={"sm_scale": -0.3, "chunk_size": 12, "lse_base": "e"}),
]  # fmt: skip
HOPPER = [Case(**{**vars(c), "kernels": c.kernels if len(c.kernels) > 1 else ("paged_wgmma",)}) for c in HOPPER]
PLAIN = [
    Case((5,), q="float32"),
    Case((70, 0, 17), q="float32", layout={"dims": (7, 33)}, values={"split_size": 32},
         kernels=("paged_plain", "merge_states")),
    Case((33, 16), q="float32", cache="float8_e4m3fn", heads=(8, 1), layout={"dims": (20, 9), "page_size": 16}),
    Case((35, 3), q="float32", options=("sinks", "alibi_slopes"), values={"window_left": 7, "logits_soft_cap": 2.0}),
    Case((20, 9), q="float32", rows=(3, 3), options=("float_mask",), values={"k_scale": 0.5}),
    Case((20,), q="bfloat16", layout={"dims": (300, 5)}),
    Case((20, 33), q="float16", layout={"dims": (24, 24)}, rows=(2, 5)),
    Case((40,), q="float32", rows=(2,), options=("rope",)),
    Case((40,), q="bfloat16", rows=(2,), options=("rope", "k_scale")),
]  # fmt: skip
PLAIN = [Case(**{**vars(c), "kernels": c.kernels if len(c.kernels) > 1 else ("paged_plain",)}) for c in PLAIN]


def build(case: Case) -> tuple[np.ndarray, nbattn.PagedKV, np.ndarray, dict[str, Any]]:
    """Return q, kv, qo_indptr and the options of a case."""
    rng = np.random.default_rng(7)
    dtype = case.cache or case.q
    kv = poisoned_cache(rng, list(case.kv_lens), heads=case.heads[1], dtype=dtype, **case.layout)
    rows = case.rows or (1,) * len(case.kv_lens)
    indptr = np.concatenate([[0], np.cumsum(rows)]).astype(np.int32)
    q = numbers(rng, (int(indptr[-1]), case.heads[0], kv.head_dim_qk), case.q)
    heads, num_kv_heads = case.heads
    mask_shape = (len(rows), heads, max(rows), max(case.kv_lens) + 1)
    made = {
        "sinks": lambda: rng.standard_normal(heads).astype(np.float32),
        "alibi_slopes": lambda: oracle.alibi_slopes(heads).astype(np.float32),
        "bool_mask": lambda: rng.random(mask_shape) > 0.4,
        "float_mask": lambda: np.where(
            rng.random(mask_shape[-2:]) > 0.4, rng.standard_normal(mask_shape[-2:]), -np.inf
        ).astype(np.float32),
        "k_scale": lambda: (rng.random((num_kv_heads, kv.head_dim_qk)) + 0.5).astype(np.float32),
        "v_scale": lambda: (rng.random((1, kv.head_dim_vo)) * 0.01).astype(np.float32),
        "rope": lambda: nbattn.Rope(theta=100.0),
    }
    options = {("attn_mask" if "mask" in name else name): made[name]() for name in case.options}
    return q, kv, indptr, {**options, **case.values}


@pytest.mark.parametrize("case", HOPPER, ids=str)
def test_warpgroups_match_the_oracle(case, lent):
    lent.compute_capability = (9, 0)
    test_matches_the_oracle(case, lent)


@pytest.mark.parametrize("skipped", ["wait_at_barrier", "publish_writes"])
def test_the_emulator_sees_tiles_used_before_they_are_there(skipped, lent, monkeypatch):
    monkeypatch.setitem(instructions.STAND_INS, skipped, lambda *_: None)
    lent.compute_capability = (9, 0)
    with pytest.raises(AssertionError):
        test_matches_the_oracle(HOPPER[0], lent)


@pytest.mark.parametrize("case", TILES + PLAIN, ids=str)
def test_matches_the_oracle(case, lent):
    q, kv, indptr, options = build(case)
    result = nbattn.paged_attention(q, kv, indptr, return_lse=True, **options)
    launched = {family for family, _ in lent.launched} - {"prepare_query"}
    assert launched - {"merge_states"} == set(case.kernels) - {"merge_states"}
    assert "merge_states" in launched or "merge_states" not in case.kernels
    expected = testing.expect(oracle.paged_attention, q, kv, indptr, **options)
    testing.assert_close(result, expected)


CLUSTERS = [
    (16, 16, Case((200,))),
    (16, 16, Case((40, 25), heads=(2, 1), layout={"dims": (128, 64)}, values={"logits_soft_cap": 2.0})),
    (8, 2, Case((300, 0, 40), heads=(8, 2), options=("sinks",))),
    (8, 8, Case((77, 130), rows=(2, 3), heads=(3, 1), options=("sinks", "alibi_slopes"), values={"window_left": 50})),
    (8, 2, Case((400, 20, 9), heads=(4, 2), options=("sinks",))),
    (4, 8, Case((90,), heads=(4, 1), cache="float8_e4m3fn", layout={"dims": (96, 128)}, options=("v_scale",))),
    (4, 4, Case((150,), rows=(2,), options=("rope", "k_scale"), kernels=("paged_plain",))),
]  # fmt: skip


@pytest.mark.parametrize(("multiprocessors", "cluster", "case"), CLUSTERS, ids=str)
def test_a_cluster_merges_its_blocks(multiprocessors, cluster, case, lent):
    lent.multiprocessors = multiprocessors
    q, kv, indptr, options = build(case)
    plan = nbattn.plan(
        kv, indptr, num_qo_heads=case.heads[0], window_left=options.get("window_left", -1),
        causal=options.get("causal", True),
    )  # fmt: skip
    assert plan.tiling.cluster == cluster
    result = nbattn.paged_attention(q, kv, indptr, plan=plan, return_lse=True, **options)
    merges = {"merge_states"} if 0 in case.kv_lens else set()  # of empty rows
    assert {family for family, _ in lent.launched} - {"prepare_query"} == {*case.kernels, *merges}
    testing.assert_close(result, testing.expect(oracle.paged_attention, q, kv, indptr, **options))


def test_what_clusters_are_not_for(lent):
    """A given split size, so that the bits of a row do not depend on its neighbours, and many keys, also later."""
    lent.multiprocessors = 16
    kv = poisoned_cache(np.random.default_rng(4), [100])
    assert nbattn.plan(kv, num_qo_heads=4).tiling.cluster == 16
    assert nbattn.plan(kv, num_qo_heads=4, split_size=64).tiling.cluster == 1
    assert nbattn.plan(kv, num_qo_heads=4, max_kv_len=4096).tiling.cluster == 16
    assert nbattn.plan(kv, num_qo_heads=4, max_kv_len=4097).tiling.cluster == 1


@pytest.mark.parametrize(
    ("q_dtype", "cache", "capability"),
    [
        ("bfloat16", "bfloat16", (8, 0)),
        ("bfloat16", "bfloat16", (9, 0)),
        ("float16", "float8_e4m3fn", (8, 0)),
        ("float32", "float32", (8, 0)),
    ],
)
def test_a_nan_reaches_only_the_rows_that_keep_it(q_dtype, cache, capability, lent):
    """The value of a key that one row of a tile keeps and another drops is selected away, not multiplied by 0."""
    lent.compute_capability = capability
    rng = np.random.default_rng(3)
    for rows, poisoned in ((2, [30]), (40, [30, 12])):
        kv = poisoned_cache(rng, [31], dtype=cache)
        for key in poisoned:
            kv.v[kv.kv_indices[key // kv.page_size], key % kv.page_size] = np.nan
        q = numbers(rng, (rows, 4, 64), q_dtype)
        indptr = np.array([0, rows], np.int32)
        out, lse = nbattn.paged_attention(q, kv, indptr, return_lse=True)
        sees_first_nan = np.arange(rows) + 31 - rows >= min(poisoned)
        assert np.isnan(out[sees_first_nan].astype(np.float32)).all()
        expected = oracle.paged_attention(q, kv, indptr)
        np.testing.assert_allclose(out[~sees_first_nan].astype(np.float64), expected[~sees_first_nan], atol=0.03)
        assert np.isfinite(lse[np.arange(rows) + 31 - rows >= 0]).all()


def test_cascade_levels_share_one_merge(lent):
    rng = np.random.default_rng(5)
    prefix, suffix = poisoned_cache(rng, [40]), poisoned_cache(rng, [5, 0, 21])
    levels = [nbattn.Level(prefix, np.array([0, 3])), nbattn.Level(suffix, np.array([0, 1, 2, 3]), causal=True)]
    q = numbers(rng, (3, 4, 64), "bfloat16")
    sinks = np.array([0.5, -1.0, 2.0, -np.inf], np.float32)
    result = nbattn.cascade_attention(q, levels, sinks=sinks, return_lse=True)
    assert [family for family, _ in lent.launched].count("merge_states") == 1
    testing.assert_close(result, testing.expect(oracle.cascade_attention, q, levels, sinks=sinks))


def test_a_plan_is_refilled_in_place(lent):
    rng = np.random.default_rng(6)
    q = numbers(rng, (2, 4, 64), "bfloat16")
    plan = nbattn.plan(poisoned_cache(rng, [0, 0]), num_qo_heads=4, max_kv_len=40, max_num_pages=40, split_size=16)
    buffers = []
    for lengths in ([0, 0], [20, 9], [33, 40], [0, 1]):
        kv = poisoned_cache(rng, lengths)
        plan.update(kv)
        lent.launched.clear()
        result = nbattn.paged_attention(q, kv, plan=plan, return_lse=True)
        testing.assert_close(result, testing.expect(oracle.paged_attention, q, kv))
        buffers.append((plan.on_target.metadata.pointers, lent.launched[:]))
    assert all(buffer == buffers[0] for buffer in buffers)


def test_a_plan_beyond_its_room_is_refused(lent):
    rng = np.random.default_rng(6)
    kv = poisoned_cache(rng, [20])
    plan = nbattn.plan(kv, num_qo_heads=4, split_size=16)
    nbattn.paged_attention(numbers(rng, (1, 4, 64), "bfloat16"), kv, plan=plan)
    with pytest.raises(nbattn.ContractError, match="the plan holds"):
        plan.update(poisoned_cache(rng, [60]))


def test_rows_outside_the_offsets_stay_untouched(lent):
    rng = np.random.default_rng(8)
    kv = poisoned_cache(rng, [20])
    q = numbers(rng, (3, 4, 64), "bfloat16")
    out = np.full((3, 4, 64), 7, q.dtype)
    lse = np.full((3, 4), 7, np.float32)
    nbattn.paged_attention(q, kv, np.array([0, 2], np.int32), out=out, lse=lse)
    assert ((out == 7).all((1, 2)) == [False, False, True]).all()
    assert ((lse == 7).all(1) == [False, False, True]).all()


@pytest.mark.parametrize("name", ["window_left", "chunk_size", "split_size"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_size_that_no_int32_holds_is_the_largest(name, dtype, lent):
    rng = np.random.default_rng(6)
    kv, q = poisoned_cache(rng, [9, 5], dtype=dtype), numbers(rng, (3, 4, 64), dtype)
    offsets = np.array([0, 2, 3], np.int32)
    want = nbattn.paged_attention(q, kv, offsets, split_size=1000, return_lse=True)
    for size in (2**31 - 1, 2**31, 2**32 + 1, 2**70):
        options = {"split_size": 1000, name: size}
        plan = nbattn.plan(kv, offsets, num_qo_heads=4, **options)
        for given in ({}, {"plan": plan}):
            got = nbattn.paged_attention(q, kv, offsets, return_lse=True, **options, **given)
            for x, y in zip(got, want, strict=True):
                np.testing.assert_array_equal(x, y)


def test_gather_takes_any_split_size(lent):
    rng = np.random.default_rng(7)
    kv, q = poisoned_cache(rng, [9], dtype="float32"), numbers(rng, (1, 4, 64), "float32")
    lists, counts = np.arange(9, dtype=np.int32)[None], np.array([9], np.int32)
    want = nbattn.gather_attention(q, kv, lists, counts, split_size=1000)
    for size in (2**31 - 1, 2**70):
        np.testing.assert_array_equal(nbattn.gather_attention(q, kv, lists, counts, split_size=size), want)

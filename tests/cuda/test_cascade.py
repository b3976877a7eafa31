"""Cascades on the CUDA target: how lengths decide tiles and splits, and every choice held to the oracle."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from lent_device import LentDevice
from small_problems import numbers, poisoned_cache

import nbattn
from nbattn import Level, oracle, testing
from nbattn.cuda_kernels import calls, shapes, target
from nbattn.cuda_kernels.parameters import PARAMETERS, WAITS_NEVER
from nbattn.cuda_kernels.shapes import merge_team
from nbattn.planning import Plan, PlanRules
from nbattn.work_list import KEY_BEGIN, KEY_END, LEVEL, ROW_BEGIN, ROW_END

MULTIPROCESSORS = 132
HEADS = (32, 8)
PREFILL, DECODE = 32, 4  # rows of a tile at four heads a group


def levels_of(batch, prefix, suffix, kv_heads, rows=1, head_dim=8):
    """Return two levels of these lengths, for planning alone."""
    page = np.zeros((1, 1, kv_heads, head_dim), np.float16)
    length = max(prefix, suffix)
    tables = np.zeros((1, length), np.int32), np.zeros((batch, length), np.int32)
    offsets = np.array([0, batch * rows]), np.arange(batch + 1) * rows
    lens = np.array([prefix]), np.full(batch, suffix)
    kvs = [nbattn.PagedKV.from_block_table(page, page, t, n) for t, n in zip(tables, lens, strict=True)]
    return tuple(Level(kv, rows, causal=False) for kv, rows in zip(kvs, offsets, strict=True))


def plan_of(monkeypatch, levels, heads, split_size=None, capability=(8, 0)):
    """Return the plan of these levels for a GPU of 132 multiprocessors."""
    device = SimpleNamespace(multiprocessors=MULTIPROCESSORS, largest_cluster=16, compute_capability=capability)
    monkeypatch.setattr(target, "current_device", lambda: device)
    rules = PlanRules(heads, levels[0].kv.num_kv_heads, tuple(level.causal for level in levels), split_size=split_size)
    return Plan(levels, int(levels[-1].qo_indptr[-1]), rules, target.tiling(levels, heads, split_size))


def shape_of(work, level):
    """Return (most rows, most keys, items) of a level's work."""
    mine = work[work[:, LEVEL] == level]
    return (mine[:, ROW_END] - mine[:, ROW_BEGIN]).max(), (mine[:, KEY_END] - mine[:, KEY_BEGIN]).max(), len(mine)


@pytest.mark.parametrize(
    ("batch", "prefix", "heads", "rows", "keys", "items"),
    [
        (16, 1024, (32, 8), DECODE, 256, 16),  # with the suffixes one wave of equal blocks
        (64, 1024, (32, 8), DECODE, 1024, 16),
        (16, 8192, (32, 8), DECODE, 1024, 32),
        (8, 4000, (8, 1), 2, 128, 128),
        (256, 1024, (32, 8), PREFILL, 1024, 8),  # little beside the suffixes: every second multiprocessor
        (64, 8192, (32, 8), PREFILL, 1024, 16),  # a block of each multiprocessor
        (256, 8192, (32, 8), PREFILL, 4096, 16),
        (64, 8192, (32, 32), 64, 2048, 4),
        (16, 32768, (32, 8), 16, 1024, 32),  # hardly any suffix beside it: two blocks
        (64, 32768, (32, 8), PREFILL, 1984, 34),
        (256, 32768, (32, 8), PREFILL, 8192, 32),
    ],
)
def test_lengths_decide_the_tile_and_splits_of_a_prefix(batch, prefix, heads, rows, keys, items, monkeypatch):
    levels = levels_of(batch, prefix, 256, heads[1])
    plan = plan_of(monkeypatch, levels, heads[0])
    assert shape_of(plan.work_list.work, 0) == (rows, keys, items)
    assert shape_of(plan.work_list.work, 1)[0] == 1
    if heads[1] > 1:
        assert shape_of(plan.work_list.work, 1) == (1, 256, batch)  # suffixes stay whole


@pytest.mark.parametrize(
    ("batch", "prefix", "keys", "items"),
    [(64, 1024, 512, 4), (64, 8192, 1664, 10), (16, 32768, 2240, 15), (64, 32768, 4736, 14), (256, 1024, 1024, 8)],
)
def test_tiles_that_fill_a_multiprocessor_leave_some_to_the_suffixes(batch, prefix, keys, items, monkeypatch):
    levels = levels_of(batch, prefix, 256, 8)
    plan = plan_of(monkeypatch, levels, 32, capability=(9, 0))
    assert shape_of(plan.work_list.work, 0) == (min(batch, PREFILL), keys, items)


@pytest.mark.parametrize(
    ("batch", "prefix", "tiles", "three"),
    [
        (16, 1024, "decode decode", False),  # two blocks a multiprocessor
        (32, 1024, "decode decode", True),
        (64, 1024, "prefill decode", True),
        (16, 8192, "prefill decode", False),  # blocks of one warpgroup leave room by themselves
    ],
)
def test_three_decode_blocks_share_a_multiprocessor_where_two_levels_crowd_it(batch, prefix, tiles, three, monkeypatch):
    levels = levels_of(batch, prefix, 256, 8, head_dim=128)
    plan = plan_of(monkeypatch, levels, 32, capability=(9, 0))
    device = LentDevice()
    device.multiprocessors, device.compute_capability = MULTIPROCESSORS, (9, 0)
    metadata = target.PlanOnDevice(device, plan, levels).metadata
    q = np.zeros((batch, 32, 128), np.float16)
    options, kvs = calls.AttentionOptions(scale=1.0), [level.kv for level in levels]
    kernels = [
        kernel for _, kernel in calls.paged_kernels(device, metadata, q, kvs, [(0, False)] * 2, options, q, None)
    ]
    assert [segment.tile for segment in metadata.segments] == tiles.split()
    assert [x.shared_bytes is None for x in kernels if x.family == "paged_decode"] == [three] * tiles.count("decode")
    place = [name for name, _ in PARAMETERS["paged_decode"]].index("waits")
    waits = [kernel.values[place] for kernel in kernels[:2]]
    assert waits[0] != WAITS_NEVER  # the second starts when the first has waited
    assert waits[1] == WAITS_NEVER


@pytest.mark.parametrize(
    ("batch", "heads", "prefix", "keys", "rest"),
    [(256, (32, 8), 8192, 6656, 1536), (256, (32, 8), 32768, 18560, 14208), (256, (32, 32), 32768, 26496, 6272)],
)
def test_tiles_that_would_fill_every_multiprocessor_become_shares_and_rests(
    batch, heads, prefix, keys, rest, monkeypatch
):  # fmt: skip
    """Equal pieces would keep the suffixes out until all of them are done."""
    plan = plan_of(monkeypatch, levels_of(batch, prefix, 256, heads[1]), heads[0], capability=(9, 0))
    work = plan.work_list.work[plan.work_list.work[:, LEVEL] == 0]
    found = work[:, KEY_END] - work[:, KEY_BEGIN]
    tiles = batch * heads[0] // heads[1] // 128
    assert sorted(found.tolist()) == [rest] * tiles + [keys] * tiles


@pytest.mark.parametrize(
    ("batch", "prefix", "rows", "keys", "items"),
    [(16, 32768, 16, 1152, 29), (16, 8192, 16, 448, 19), (16, 1024, DECODE, 256, 16), (17, 32768, PREFILL, 2240, 15)],
)
def test_rows_that_fit_a_warpgroup_get_two_blocks_of_each_multiprocessor(batch, prefix, rows, keys, items, monkeypatch):
    levels = levels_of(batch, prefix, 256, 8, head_dim=128)
    plan = plan_of(monkeypatch, levels, 32, capability=(9, 0))
    assert shape_of(plan.work_list.work, 0) == (min(batch, rows), keys, items)
    given = plan_of(monkeypatch, levels, 32, 512, capability=(9, 0))
    assert given.tiling.tokens[0] == PREFILL  # so that bits do not follow from how many rows there are


@pytest.mark.parametrize(("levels", "split_size"), [(2, 64), (1, None)])
def test_given_splits_and_single_levels_leave_the_tile_alone(levels, split_size, monkeypatch):
    """So the bits of a row with a given split size do not follow from how many others there are."""
    cascade = levels_of(16, 256, 64, HEADS[1])[:levels]
    plan = plan_of(monkeypatch, cascade, HEADS[0], split_size)
    assert plan.tiling.tokens == (PREFILL, 1)[:levels]


def test_rows_of_a_prefill_are_not_cut_for_the_decode_tile_where_their_keys_are_many(monkeypatch):
    levels = levels_of(4, 0, 4096, HEADS[1], rows=64)
    assert plan_of(monkeypatch, levels, HEADS[0]).tiling.tokens == (DECODE, PREFILL)  # no keys are soon read


def small_cascade(kv_lens=(40, 5, 0, 21), dtype="bfloat16"):
    """Return levels whose prefix three rows share, and q."""
    rng = np.random.default_rng(5)
    prefix, suffix = poisoned_cache(rng, [kv_lens[0]], dtype=dtype), poisoned_cache(rng, list(kv_lens[1:]), dtype=dtype)
    rows = len(kv_lens) - 1
    levels = [Level(prefix, np.array([0, rows])), Level(suffix, np.arange(rows + 1), causal=True)]
    return levels, numbers(rng, (rows, 20, 64), "bfloat16")


@pytest.mark.parametrize("most_keys", [0, 1000])
@pytest.mark.parametrize(
    "options",
    [{}, {"window_left": 30}, {"logits_soft_cap": 2.0, "alibi_slopes": True, "sinks": True}, {"v_scale": 0.5}],
    ids=str,
)
def test_a_prefix_on_either_tile_matches_the_oracle(most_keys, options, lent, monkeypatch):
    monkeypatch.setattr(target, "MOST_DECODE_KEYS", most_keys)
    levels, q = small_cascade()
    given = {"alibi_slopes": oracle.alibi_slopes(20).astype(np.float32), "sinks": np.linspace(-2, 2, 20, dtype="f4")}
    options = {name: given.get(name, value) for name, value in options.items()}
    result = nbattn.cascade_attention(q, levels, return_lse=True, **options)
    families = {family for family, _ in lent.launched}
    assert families == {"paged_decode", "merge_states"} | ({"paged_prefill"} if most_keys == 0 else set())
    testing.assert_close(result, testing.expect(oracle.cascade_attention, q, levels, **options))


def test_updated_plans_keep_their_tiles(lent):
    levels, q = small_cascade()
    plan = nbattn.plan(levels, num_qo_heads=20, max_kv_len=60, max_num_pages=60)
    for kv_lens in ((40, 5, 0, 21), (55, 60, 1, 0), (0, 3, 3, 3)):
        levels, q = small_cascade(kv_lens)
        plan.update(levels)
        result = nbattn.cascade_attention(q, levels, plan=plan, return_lse=True)
        testing.assert_close(result, testing.expect(oracle.cascade_attention, q, levels))


def test_a_row_has_the_same_bits_however_many_groups_share_its_states(lent, monkeypatch):
    rng = np.random.default_rng(9)
    kv, q = poisoned_cache(rng, [330, 40]), numbers(rng, (2, 4, 64), "bfloat16")
    results = []
    whole = shapes.merge_shape(True)
    for shape, groups in ((whole, 8), (whole._replace(blocks=1 / 256), 1)):
        monkeypatch.setattr(shapes, "merge_shape", lambda listed, shape=shape: shape)
        assert 1 << merge_team(8, 64, 4, lent.multiprocessors, 21, listed=True)[1][1] == groups
        results.append(nbattn.paged_attention(q, kv, split_size=16, return_lse=True))
    testing.assert_close(results[0], testing.expect(oracle.paged_attention, q, kv))
    for one, several in zip(*results, strict=True):
        np.testing.assert_array_equal(one, several)


@pytest.mark.parametrize(
    ("rows", "states", "groups"),
    [(64, 4, 1), (64, 5, 2), (64, 9, 4), (64, 32, 8), (64, 300, 8), (512, 17, 8), (4096, 5, 1), (4096, 17, 1)],
)
def test_groups_take_one_stream_of_states_each_or_one_takes_all(rows, states, groups):
    """Groups beyond a row's batches would only wait, and more threads than reside come one after another."""
    constants, (lanes, group_bits, _), grid = merge_team(rows, 128, 4, MULTIPROCESSORS, states, listed=True)
    assert constants == {"vector": True, "listed": True}
    assert (lanes, 1 << group_bits) == (5, groups)
    assert grid[0] * 256 == rows * 32 * groups


@pytest.mark.parametrize(
    ("rows", "states", "groups"),
    [(32, 64, 8), (512, 64, 4), (512, 16, 4), (2048, 16, 1), (2048, 32, 4), (8192, 64, 4), (16384, 64, 1), (32, 8, 1)],
)
def test_groups_of_equal_rows_give_each_multiprocessor_two_blocks_or_are_four(rows, states, groups):
    """More than that only wait for each other; what fills the device takes its states one batch after the other."""
    assert merge_team(rows, 128, 8, MULTIPROCESSORS, states) == (
        {"vector": True, "listed": False},
        (4, groups.bit_length() - 1, int(rows * 16 * groups <= 6 * 128 * MULTIPROCESSORS)),
        (rows * 16 * groups // 128, 1, 1),
    )


def test_a_merge_of_no_rows_has_an_empty_grid():
    assert merge_team(0, 128, 8, MULTIPROCESSORS, 64)[2][0] == 0

"""Plans: work lists that cover every key of every row once, room for later lengths, and every rule of the contract."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import nbattn
from nbattn import ContractError, Level, PagedKV, oracle
from nbattn.planning import Plan, PlanRules, Tiling
from nbattn.positions import LevelLengths, place_rows
from nbattn.testing import assert_close, expect
from nbattn.work_list import (
    CAUSAL,
    KEY_BEGIN,
    KEY_END,
    LEVEL,
    ROW_BEGIN,
    ROW_END,
    STATE,
    build_work,
)

ROWS, HEADS, DIM = 5, 4, 8
SENTINEL = 7.0


def zeros(*shape, dtype=np.float32):
    return np.zeros(shape, dtype)


def ints(*values):
    return np.array(values, np.int32)


def cache(lens=(9, 8)):
    return PagedKV.from_slots(zeros(len(lens), 9, 2, DIM), zeros(len(lens), 9, 2, DIM), np.array(lens))


def planned(**changes):
    return nbattn.plan(**{"kv_or_levels": cache(), "qo_indptr": ints(0, 3, 5), "num_qo_heads": HEADS, **changes})


# ---- what a work list covers


lens_of = st.integers(0, 90)
options_of = st.fixed_dictionaries(
    {
        "window_left": st.sampled_from([-1, 0, 3, 40]),
        "chunk_size": st.sampled_from([0, 0, 1, 7, 32]),
        "split_size": st.sampled_from([None, 1, 5, 64]),
        "tile_tokens": st.tuples(*[st.sampled_from([1, 2, 7, 64])] * 3),
        "shares": st.sampled_from([1, 3, 40]),
        "few_tokens": st.sampled_from([0, 1, 4]),
        "many_shares": st.sampled_from([1, 2.4, 20]),
        "wave": st.sampled_from([0, 1.5, 16.5]),
    }
)


def of_levels(options, levels):
    return {**options, "tile_tokens": options["tile_tokens"][: len(levels)]}


@st.composite
def cascades(draw):
    """Draw the lengths of one to three levels over the same rows."""
    rows = draw(st.integers(1, 9))
    levels = []
    for _ in range(draw(st.integers(1, 3))):
        cuts = sorted(draw(st.lists(st.integers(0, rows), max_size=3)))
        offsets = np.array([0, *cuts, rows])
        lens = np.array([draw(lens_of) for _ in offsets[1:]])
        levels.append(LevelLengths(lens, np.cumsum(lens), offsets, draw(st.booleans())))
    return levels, rows


@settings(max_examples=150, deadline=None)
@given(cascades(), options_of)
def test_every_key_that_a_row_sees_is_visited_once(cascade, options):
    levels, rows = cascade
    places = place_rows(levels, rows)
    options = of_levels(options, levels)
    work_list = build_work(levels, places, **options)
    visits = [np.zeros((rows, 90), int) for _ in levels]
    for item in work_list.work:
        assert item[KEY_BEGIN] < item[KEY_END]
        assert item[ROW_END] - item[ROW_BEGIN] <= options["tile_tokens"][item[LEVEL]]
        visits[item[LEVEL]][item[ROW_BEGIN] : item[ROW_END], item[KEY_BEGIN] : item[KEY_END]] += 1
    window, chunk = options["window_left"], options["chunk_size"]
    for number, level in enumerate(levels):
        for first, end, kv_len in zip(level.qo_indptr[:-1], level.qo_indptr[1:], level.kv_lens, strict=True):
            for row in range(first, end):
                p = int(places.row_position[row])
                j = int(places.key_position[number][row]) + np.arange(90)
                sees = np.arange(90) < kv_len
                if level.causal:
                    sees &= j <= p
                if window >= 0:
                    sees &= j >= p - window
                if chunk:
                    sees &= j // chunk == p // chunk
                assert (visits[number][row][sees] == 1).all()
                assert visits[number][row].max(initial=0) <= 1
                assert not visits[number][row][kv_len:].any()


@settings(max_examples=150, deadline=None)
@given(cascades(), options_of)
def test_states_are_written_once_and_merged_once(cascade, options):
    levels, rows = cascade
    places = place_rows(levels, rows)
    options = of_levels(options, levels)
    work_list = build_work(levels, places, **options)
    written = np.zeros(work_list.num_states, int)
    owner = np.full(work_list.num_states, -1)
    direct = np.zeros(rows, int)
    for item in work_list.work:
        span = np.arange(item[ROW_BEGIN], item[ROW_END])
        if item[STATE] < 0:
            direct[span] += 1
        else:
            written[item[STATE] + np.arange(len(span))] += 1
            owner[item[STATE] + np.arange(len(span))] = span
    assert (written == 1).all()
    assert sorted(work_list.merge_slots) == list(range(work_list.num_states))
    merged = np.zeros(rows, int)
    for row, (first, end) in zip(work_list.merge_rows, pairwise(work_list.merge_indptr), strict=True):
        assert (owner[work_list.merge_slots[first:end]] == row).all()
        merged[row] += 1
    assert (merged + direct == places.covered).all()  # each covered row is written exactly once


@settings(max_examples=150, deadline=None)
@given(cascades(), options_of, st.data())
def test_a_plan_has_room_for_all_lengths_up_to_its_longest(cascade, options, data):
    levels, rows = cascade
    keys = np.zeros((1, 1, 1, 8), np.float32)

    def bound(lens):
        found = []
        for level, own in zip(levels, lens, strict=True):
            table = np.zeros((len(own), 90), np.int32)
            kv = PagedKV.from_block_table(keys, keys, table, own)
            found.append(Level(kv, level.qo_indptr, level.causal))
        return tuple(found)

    causal = tuple(level.causal for level in levels)
    rules = PlanRules(1, 1, causal, options["window_left"], options["chunk_size"], options["split_size"])
    options = of_levels(options, levels)
    tiling = Tiling(
        options["tile_tokens"], options["shares"], options["few_tokens"], options["many_shares"], wave=options["wave"]
    )
    plan = Plan(bound([np.zeros_like(level.kv_lens) for level in levels]), rows, rules, tiling, max_kv_len=90)
    for _ in range(3):
        plan.update(list(bound([np.array([data.draw(lens_of) for _ in level.kv_lens]) for level in levels])))
    assert plan.work_list.work.dtype == np.int32


def test_a_lone_long_request_fits_a_plan_for_many():
    """A balanced work list cuts it into more splits than it cuts each of many long ones."""
    table = np.zeros((8, 64), np.int32)
    pages = zeros(1, 64, 1, DIM), zeros(1, 64, 1, DIM)
    short, skewed = (PagedKV.from_block_table(*pages, table, np.array([n] + [64] * 7)) for n in (64, 4096))
    plan = nbattn.plan(short, num_qo_heads=1, max_kv_len=4096)
    plan.update(skewed)
    assert len(plan.work_list.work) > 8


def test_a_cascade_planned_short_has_room_for_a_long_prefix():
    """All rows share the prefix: each of its pieces is a state of every row, whatever the suffixes are cut into."""
    table, pages = np.zeros((64, 256), np.int32), (zeros(1, 16, 1, DIM), zeros(1, 16, 1, DIM))
    suffix = Level(PagedKV.from_block_table(*pages, table, np.full(64, 16)), np.arange(65), False)
    short, long = (
        Level(PagedKV.from_block_table(*pages, table[:1], np.array([n])), ints(0, 64), False) for n in (16, 4096)
    )
    plan = nbattn.plan([short, suffix], num_qo_heads=1, max_kv_len=4096)
    plan.update([long, suffix])
    assert plan.work_list.num_states > 2 * 64


def test_a_plan_serves_many_layers_and_options():
    rng = np.random.default_rng(3)
    k = rng.normal(size=(3, 2, 9, 2, DIM)).astype(np.float32)  # layers
    q = rng.normal(size=(ROWS, HEADS, DIM)).astype(np.float32)
    plan = planned(split_size=2)
    first = PagedKV.from_slots(k[0], k[0], np.array([9, 8]))
    for layer in k:
        kv = first.with_pages(layer, layer)
        for options in ({}, {"sinks": q[0, :, 0]}, {"attn_mask": np.ones((3, 9), bool)}, {"sm_scale": 0.1}):
            got = nbattn.paged_attention(q, kv, ints(0, 3, 5), plan=plan, return_lse=True, **options)
            assert_close(got, expect(oracle.paged_attention, q, kv, ints(0, 3, 5), **options))


def test_work_keeps_causality_and_longest_items_first():
    plan = planned(split_size=4)
    work = plan.work_list.work
    assert (work[:, CAUSAL] == 1).all()
    cost = (work[:, KEY_END] - work[:, KEY_BEGIN]) * (work[:, ROW_END] - work[:, ROW_BEGIN])
    assert (np.diff(cost) <= 0).all()


# ---- rules


PLAN_RULES = [
    ("cache", {"kv_or_levels": zeros(3)}, "kv_or_levels: must be a PagedKV or a list of Level, got ndarray"),
    ("level", {"kv_or_levels": [cache()]}, "kv_or_levels: must be a PagedKV or a list of Level, got list"),
    ("no cache", {"kv_or_levels": [Level(None)]}, r"levels\[0\]\.kv: must be a PagedKV, got NoneType"),
    ("next cache", {"kv_or_levels": [Level(cache()), Level(3)]}, r"levels\[1\]\.kv: must be a PagedKV, got int"),
    ("empty", {"kv_or_levels": []}, "kv_or_levels: must hold at least one Level, got an empty list"),
    ("offsets", {"qo_indptr": ints(0, 5)}, r"qo_indptr: must be \[3\]"),
    ("heads zero", {"num_qo_heads": 0}, "num_qo_heads: must be at least 1, got 0"),
    ("heads", {"num_qo_heads": 3}, r"num_qo_heads: must be a multiple of 2 \(num_kv_heads\), got 3"),
    ("heads float", {"num_qo_heads": 4.0}, r"num_qo_heads: must be an int, got 4\.0"),
    ("window", {"window_left": "3"}, "window_left: must be an int, got '3'"),
    ("chunk", {"chunk_size": 0}, "chunk_size: must be at least 1, got 0"),
    ("split", {"split_size": -1}, "split_size: must be at least 1, got -1"),
    ("longest", {"max_kv_len": -1}, "max_kv_len: must be at least 0, got -1"),
    ("pages", {"max_num_pages": 1.5}, r"max_num_pages: must be an int, got 1\.5"),
    ("start", {"kv_start": ints(1)}, r"kv_start: must be \[2\], got shape \(1,\)"),
    ("positions", {"q_positions": ints(1)}, r"q_positions: must be \[5\], got shape \(1,\)"),
]


@pytest.mark.parametrize(("changes", "message"), [r[1:] for r in PLAN_RULES], ids=[r[0] for r in PLAN_RULES])
def test_plan_refuses(changes, message):
    with pytest.raises(ContractError, match="^" + message):
        planned(**changes)


DISAGREEMENTS = [
    ("causal", {"causal": False}, r"causal: must be the plan's \(True,\), got \(False,\)\. Plan with the same options"),
    ("window", {"window_left": 3}, "window_left: must be the plan's -1, got 3"),
    ("chunk", {"chunk_size": 3}, "chunk_size: must be the plan's 0, got 3"),
    ("split", {"split_size": 3}, "split_size: must be the plan's None, got 3"),
    ("heads", {"q": zeros(ROWS, 8, DIM), "out": None}, "num_qo_heads: must be the plan's 4, got 8"),
    (
        "lengths",
        {"kv": cache(lens=[9, 7])},
        r"plan: must be made for this call's lengths, offsets and table widths, level 0 differs\.",
    ),
    (
        "offsets",
        {"qo_indptr": ints(0, 2, 5)},
        "plan: must be made for this call's lengths, offsets and table widths, level 0 differs",
    ),
    ("start", {"kv_start": ints(1, 0)}, "kv_start: must be the plan's, got others"),
    ("positions", {"q_positions": ints(0, 1, 2, 3, 4)}, "q_positions: must be the plan's, got others"),
    (
        "rows",
        {"q": zeros(3, HEADS, DIM), "qo_indptr": ints(0, 3, 3), "out": None},
        "q: must have at least the plan's 5 rows, got 3",
    ),
]


@pytest.mark.parametrize(("changes", "message"), [r[1:] for r in DISAGREEMENTS], ids=[r[0] for r in DISAGREEMENTS])
def test_a_call_must_agree_with_its_plan(changes, message):
    out = np.full((ROWS, HEADS, DIM), SENTINEL, np.float32)
    given = {"q": zeros(ROWS, HEADS, DIM), "kv": cache(), "qo_indptr": ints(0, 3, 5), "out": out, "plan": planned()}
    with pytest.raises(ContractError, match="^" + message):
        nbattn.paged_attention(**{**given, **changes})
    assert (out == SENTINEL).all()


def test_an_update_must_fit_its_plan():
    plan = planned(kv_or_levels=cache(lens=[2, 2]), split_size=2)
    before = plan.work_list
    with pytest.raises(
        ContractError, match=r"^Plan\.update: needs \d+ work items, the plan holds \d+\. Plan with a larger"
    ):
        plan.update(cache(), ints(0, 3, 5))
    assert plan.work_list is before
    with pytest.raises(ContractError, match=r"^Plan\.update: must keep 1 level\(s\) and at most 5 rows, got 1 and 6"):
        plan.update(cache(), ints(0, 3, 6))
    with pytest.raises(ContractError, match=r"^Plan\.update: must keep 1 level\(s\) and at most 5 rows, got 2 and 5"):
        plan.update([Level(cache(), ints(0, 3, 5)), Level(cache(), ints(0, 3, 5))])
    with pytest.raises(ContractError, match=r"^Plan\.update: must keep the levels' causal \(True,\), got \(False,\)\."):
        plan.update([Level(cache(lens=[2, 2]), ints(0, 3, 5))])
    table = np.zeros((2, 9), np.int32)
    wide = PagedKV.from_block_table(zeros(1, 9, 2, 8), zeros(1, 9, 2, 8), table, ints(2, 2))
    with pytest.raises(ContractError, match=r"^Plan\.update: needs 18 page-table entries, the plan holds 2"):
        plan.update(wide, ints(0, 3, 5))
    plan.update(cache(lens=[2, 1]), ints(0, 3, 5))  # still in use


def tables_of_two_widths():
    """Return two caches with the same values: block tables of two and of four columns over the same pages."""
    k, v = zeros(16, 1, 1, 1), np.arange(16, dtype=np.float32).reshape(16, 1, 1, 1)
    lens = ints(2, 2)
    narrow = nbattn.PagedKV.from_block_table(k, v, np.array([[0, 1], [2, 3]], np.int32), lens)
    wide = nbattn.PagedKV.from_block_table(k, v, np.array([[0, 1, 9, 9], [2, 3, 9, 9]], np.int32), lens)
    return narrow, wide


def test_a_plan_is_for_tables_of_its_width():
    narrow, wide = tables_of_two_widths()
    q = zeros(2, 1, 1)
    assert nbattn.paged_attention(q, wide).ravel().tolist() == [0.5, 2.5]
    with pytest.raises(ContractError, match=r"^plan: must be made for"):
        nbattn.paged_attention(q, wide, plan=nbattn.plan(narrow, num_qo_heads=1))


def test_a_kept_plan_is_for_tables_of_its_width():
    narrow, wide = tables_of_two_widths()
    own = nbattn.PagedKV.from_slots(narrow.k, narrow.v, ints(1, 1))
    rows = ints(0, 1, 2)
    first, second = (
        nbattn.cascade_attention(zeros(2, 1, 1), [nbattn.Level(top, rows), nbattn.Level(own, rows, True)])
        for top in (narrow, wide)
    )
    assert first.tobytes() == second.tobytes()
    np.testing.assert_allclose(first.ravel(), [1 / 3, 2], rtol=1e-6)


def test_positions_of_a_plan_may_be_left_out():
    k, v = zeros(1, 16, 1, 1), np.arange(16, dtype=np.float32).reshape(1, 16, 1, 1)
    kv = nbattn.PagedKV.from_slots(k, v, ints(16))
    plan = nbattn.plan(kv, num_qo_heads=1, q_positions=ints(1))
    for positions in (None, ints(1)):
        assert nbattn.paged_attention(zeros(1, 1, 1), kv, plan=plan, q_positions=positions).item() == 0.5


@pytest.mark.parametrize("options", [{}, {"rope": 30.0}, {"rope": 30.0, "kv_start": ints(3, 7)}])
def test_an_update_to_fewer_rows_may_bring_positions(options):
    rng = np.random.default_rng(1)
    k, v = rng.standard_normal((2, 3, 12, 1, DIM)).astype(np.float32)
    q, rows, positions = rng.standard_normal((3, 1, DIM)).astype(np.float32), ints(0, 1, 2), ints(9, 10)
    plan = nbattn.plan(PagedKV.from_slots(k, v, ints(12, 5, 9)), num_qo_heads=1)
    kv = PagedKV.from_slots(k, v, ints(7, 5))
    starts = {name: x for name, x in options.items() if name != "rope"}
    plan.update(kv, rows, q_positions=positions, **starts)
    ropes = [{"rope": Rope(options["rope"])} if "rope" in options else {} for Rope in (nbattn.Rope, oracle.Rope)]
    got = nbattn.paged_attention(q, kv, rows, plan=plan, return_lse=True, **ropes[0])
    given = {"q_positions": ints(*positions, 0), **starts}  # row 2 is nobody's
    assert_close(got, expect(oracle.paged_attention, q, kv, rows, **given, **ropes[1]))

"""A planned call that comes again is computed from what its arrays hold now, and is refused like the first."""

import gc
import weakref
from dataclasses import replace

import numpy as np
import pytest

import nbattn
from nbattn import ContractError, PagedKV

ROWS, HEADS, DIM = 5, 4, 8
OFFSETS = np.array([0, 3, 5], np.int32)
rng = np.random.default_rng(0)
K = rng.normal(size=(3, 2, 9, 2, DIM)).astype(np.float32)  # layers
Q = rng.normal(size=(3, ROWS, HEADS, DIM)).astype(np.float32)


def cache(layer=0, lens=(9, 8)):
    return PagedKV.from_slots(K[layer], K[layer], np.array(lens))


def fresh(kv):
    """Return the same without any plan that its table keeps."""
    return PagedKV(kv.k, kv.v, replace(kv.table), kv.kv_layout)


def planned(kv, **options):
    return nbattn.plan(kv, OFFSETS, num_qo_heads=HEADS, split_size=4, **options)


def same(actual, expected):
    for x, y in zip(actual, expected, strict=True):
        np.testing.assert_array_equal(x, y)


ARRAYS = {
    "sinks": lambda: rng.normal(size=HEADS).astype(np.float32),
    "alibi_slopes": lambda: rng.uniform(size=HEADS).astype(np.float32),
    "k_scale": lambda: rng.uniform(0.5, 2, (2, DIM)).astype(np.float32),
    "v_scale": lambda: rng.uniform(0.5, 2, (2, 1)).astype(np.float32),
    "attn_mask": lambda: rng.random((2, 1, 3, 9)) < 0.6,
}


@pytest.mark.parametrize("name", ARRAYS)
@pytest.mark.parametrize("in_place", [True, False])
def test_options_are_read_anew(name, in_place):
    kv, make = cache(), ARRAYS[name]
    plan, value = planned(kv), make()
    results = []
    for _ in range(3):
        if in_place:
            value[...] = make()
        else:
            value = make()
        options = {name: value, "return_lse": True}
        got = nbattn.paged_attention(Q[0], kv, OFFSETS, plan=plan, **options)
        same(got, nbattn.paged_attention(Q[0], fresh(kv), OFFSETS, split_size=4, **options))
        results.append(got[0])
    assert not np.array_equal(results[0], results[1])
    assert not np.array_equal(results[1], results[2])


@pytest.mark.parametrize("name", ["q_positions", "kv_start"])
def test_positions_belong_to_the_plan(name):
    values = {"q_positions": np.array([6, 7, 8, 2, 3], np.int32), "kv_start": np.array([3, 5], np.int32)}[name]
    kv = cache()
    plan = planned(kv, window_left=2, **{name: values})
    options = {"window_left": 2, "return_lse": True, name: values}
    first = nbattn.paged_attention(Q[0], kv, OFFSETS, plan=plan, **options)
    same(first, nbattn.paged_attention(Q[0], fresh(kv), OFFSETS, split_size=4, **options))
    same(nbattn.paged_attention(Q[0], kv, OFFSETS, plan=plan, **options), first)


def test_numbers_are_read_anew():
    kv = cache()
    plan = planned(kv)
    for options in ({}, {"sm_scale": 0.1}, {"sm_scale": 0.0}, {"k_scale": 2.0}, {"v_scale": 3.0}, {"lse_base": "e"},
                    {"logits_soft_cap": 1.0}, {"rope": nbattn.Rope(10.0)}, {"out_dtype": "float16"}, {}):  # fmt: skip
        for q in Q:
            got = nbattn.paged_attention(q, kv, OFFSETS, plan=plan, return_lse=True, **options)
            same(got, nbattn.paged_attention(q, fresh(kv), OFFSETS, split_size=4, return_lse=True, **options))


def test_layers_and_strides_may_change():
    first = cache()
    plan = planned(first)
    wide = np.zeros((2, 9, 2, 2 * DIM), np.float32)
    wide[..., :DIM] = K[2]
    for kv in (
        first,
        first.with_pages(K[1], K[1]),
        first.with_pages(K[2], K[1]),
        first.with_pages(wide[..., :DIM], K[0]),
    ):
        spread = np.zeros((2 * ROWS, HEADS, DIM), np.float32)
        spread[::2] = Q[1]
        for q in (Q[0], Q[1], spread[::2]):
            got = nbattn.paged_attention(q, kv, OFFSETS, plan=plan, return_lse=True)
            same(got, nbattn.paged_attention(q, fresh(kv), OFFSETS, split_size=4, return_lse=True))


def test_results_go_where_they_are_given():
    kv = cache()
    plan = planned(kv)
    want = nbattn.paged_attention(Q[0], kv, OFFSETS, plan=plan, return_lse=True)
    for _ in range(2):
        out, lse = np.full_like(want[0], 7), np.full_like(want[1], 7)
        assert nbattn.paged_attention(Q[0], kv, OFFSETS, plan=plan, out=out, lse=lse) is out
        same((out, lse), want)
        guarded = np.full((ROWS + 2, HEADS, 2 * DIM), 7, np.float32)
        nbattn.paged_attention(Q[0], kv, OFFSETS, plan=plan, out=guarded[1:-1, :, :DIM])
        same([guarded[1:-1, :, :DIM]], want[:1])
        assert (guarded[[0, -1]] == 7).all()
        assert (guarded[..., DIM:] == 7).all()


def test_uncovered_rows_stay_what_they_are():
    kv = cache()
    plan = planned(kv)
    q = np.concatenate([Q[0], np.full((2, HEADS, DIM), np.nan, np.float32)])
    for _ in range(3):
        out, lse = nbattn.paged_attention(q, kv, OFFSETS, plan=plan, return_lse=True)
        assert (out[ROWS:] == 0).all()
        assert (lse[ROWS:] == -np.inf).all()
        mine = np.full((ROWS + 2, HEADS, DIM), 7, np.float32)
        nbattn.paged_attention(q, kv, OFFSETS, plan=plan, out=mine)
        assert (mine[ROWS:] == 7).all()
        same([mine[:ROWS]], [out[:ROWS]])


def read_only():
    out = np.full((ROWS, HEADS, DIM), 7, np.float32)
    out.flags.writeable = False
    return out


REFUSALS = [
    ({"causal": False}, "causal: must be the plan's"),
    ({"causal": np.array([True, False])}, "causal: must be a bool, got array"),
    ({"window_left": 3}, "window_left: must be the plan's"),
    ({"chunk_size": 3}, "chunk_size: must be the plan's"),
    ({"split_size": 3}, "split_size: must be the plan's 4, got 3"),
    ({"split_size": 4.0}, "split_size: must be an int"),
    ({"window_left": True}, "window_left: must be an int"),
    ({"sm_scale": float("nan")}, "sm_scale: must be a finite number"),
    ({"sinks": np.zeros(3, np.float32)}, r"sinks: must be \[4\]"),
    ({"kv": cache(lens=(9, 7))}, "plan: must be made for this call's lengths"),
    ({"kv": PagedKV.from_slots(K[0], K[0][:, :, :, :4], np.array([9, 8])), "out": read_only()}, "out: must be float32"),
    ({"qo_indptr": np.array([0, 2, 5])}, "plan: must be made for this call's lengths"),
    ({"q": Q[0].astype(np.float16)}, "k, v: must have q's dtype"),
    ({"q": Q[0][:3]}, "qo_indptr"),
    ({"out": read_only()}, "out: must be writable"),
    ({"out": np.full((ROWS, HEADS, DIM), 7, np.float16)}, "out: must be float32"),
    ({"lse": np.full((HEADS, ROWS), 7, np.float32)}, "lse: must be float32"),
    ({"lse_base": 2}, "lse_base: must be"),
    ({"target": "tpu"}, "target: must be"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "message"), REFUSALS, ids=[f"{next(iter(c))}{i}" for i, (c, _) in enumerate(REFUSALS)]
)
def test_a_wrong_call_after_good_ones_is_refused(changes, message):
    kv = cache()
    good = {
        "q": Q[0],
        "kv": kv,
        "qo_indptr": OFFSETS,
        "plan": planned(kv),
        "out": np.full((ROWS, HEADS, DIM), 7, np.float32),
    }
    nbattn.paged_attention(**good)
    nbattn.paged_attention(**good)
    bad = {**good, "out": np.full((ROWS, HEADS, DIM), 7, np.float32), **changes}
    with pytest.raises(ContractError, match="^" + message):
        nbattn.paged_attention(**bad)
    assert (bad["out"] == 7).all()
    nbattn.paged_attention(**good)


def test_offsets_edited_in_place_are_seen():
    kv, offsets = cache(), OFFSETS.copy()
    plan = planned(kv)
    nbattn.paged_attention(Q[0], kv, offsets, plan=plan)
    nbattn.paged_attention(Q[0], kv, offsets, plan=plan)
    offsets[1] = 2
    with pytest.raises(ContractError, match=r"^plan: must be made for this call's lengths"):
        nbattn.paged_attention(Q[0], kv, offsets, plan=plan)


def test_an_updated_plan_forgets_the_calls_before():
    kv, later = cache(), cache(lens=(4, 2))
    plan = planned(kv, max_kv_len=9)
    for _ in range(2):
        nbattn.paged_attention(Q[0], kv, OFFSETS, plan=plan)
    plan.update(later, OFFSETS)
    with pytest.raises(ContractError, match=r"^plan: must be made for this call's lengths"):
        nbattn.paged_attention(Q[0], kv, OFFSETS, plan=plan)
    for _ in range(2):
        got = nbattn.paged_attention(Q[0], later, OFFSETS, plan=plan, return_lse=True)
        same(got, nbattn.paged_attention(Q[0], fresh(later), OFFSETS, split_size=4, return_lse=True))


def test_one_plan_in_many_threads():
    from concurrent.futures import ThreadPoolExecutor

    kv = cache()
    plan = planned(kv)
    want = [nbattn.paged_attention(q, fresh(kv), OFFSETS, split_size=4, sinks=q[0, :, 0]) for q in Q]

    def work(i):
        q = Q[i % 3]
        return np.array_equal(nbattn.paged_attention(q, kv, OFFSETS, plan=plan, sinks=q[0, :, 0].copy()), want[i % 3])

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(work, range(400)))


def kept(kv):
    return [plan for _, plan in kv.table.kept]


def test_layers_share_the_plan_of_a_call_without_one():
    kv, plans = cache(), []
    for layer in range(3):
        same(
            nbattn.paged_attention(Q[layer], kv.with_pages(K[layer], K[layer]), OFFSETS, return_lse=True),
            nbattn.paged_attention(Q[layer], cache(layer), OFFSETS, return_lse=True),
        )
        plans += kept(kv)
    assert plans == [plans[0]] * 3


def test_calls_of_other_rules_rows_or_threads_make_plans_of_their_own():
    kv = cache()
    others = [{}, {"window_left": 3}, {"split_size": 2}, {"causal": False}, {"offsets": np.array([0, 2, 5])}]
    for count, options in enumerate([*others, *others], start=1):
        options = dict(options)
        offsets = options.pop("offsets", OFFSETS)
        got = nbattn.paged_attention(Q[0], kv, offsets, return_lse=True, **options)
        same(got, nbattn.paged_attention(Q[0], fresh(kv), offsets, return_lse=True, **options))
        assert len(kept(kv)) == min(count, 4)
    before = kept(kv)
    nbattn.set_num_threads(nbattn.get_num_threads() + 1)
    try:
        nbattn.paged_attention(Q[0], kv, OFFSETS, causal=False)
    finally:
        nbattn.set_num_threads(None)
    assert kept(kv)[-1] not in before


def test_caches_of_other_heads_share_neither_plan():
    kv, plan = cache(), planned(cache())
    nbattn.paged_attention(Q[0], kv, OFFSETS)
    narrow = PagedKV(K[0][:, :, :1], K[0][:, :, :1], kv.table, kv.kv_layout)
    same(
        nbattn.paged_attention(Q[0], narrow, OFFSETS, return_lse=True),
        nbattn.paged_attention(Q[0], fresh(narrow), OFFSETS, return_lse=True),
    )
    assert len(kept(kv)) == 2
    with pytest.raises(ContractError, match=r"^num_kv_heads: must be the plan's 2, got 1\."):
        nbattn.paged_attention(Q[0], narrow, OFFSETS, plan=plan)


def test_positions_make_a_plan_that_nobody_keeps():
    kv = cache()
    for start in ([0, 0], [3, 5]):
        given = {"kv_start": np.array(start, np.int32), "window_left": 2, "return_lse": True}
        same(
            nbattn.paged_attention(Q[0], kv, OFFSETS, **given), nbattn.paged_attention(Q[0], cache(), OFFSETS, **given)
        )
    assert kept(kv) == []


def test_a_plan_goes_with_its_table():
    gc.collect()
    gc.disable()
    try:
        kv = cache()
        nbattn.paged_attention(Q[0], kv, OFFSETS)
        plan = weakref.ref(kept(kv)[0])
        assert plan().last_call is not None
        del kv
        assert plan() is None
    finally:
        gc.enable()

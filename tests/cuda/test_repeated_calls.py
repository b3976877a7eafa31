"""Calls that a plan or a wrapper repeats by addresses alone: right results, or the error of the first call."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from small_problems import numbers, poisoned_cache

import nbattn
from nbattn import ContractError, oracle, testing
from nbattn.cuda_kernels import target

HEADS, DIM = 4, 64
LENGTHS = [20, 9]


@pytest.fixture
def problem():
    """Return a plan whose rows are split, its cache, and q."""
    rng = np.random.default_rng(1)
    kv = poisoned_cache(rng, LENGTHS)
    return nbattn.plan(kv, num_qo_heads=HEADS, split_size=16), kv, numbers(rng, (2, HEADS, DIM), "bfloat16")


def agrees(result, q, kv, **options):
    testing.assert_close(result, testing.expect(oracle.paged_attention, q, kv, **options))


def test_arrays_may_lie_elsewhere_and_hold_something_else(problem, lent):
    plan, kv, q = problem
    rng = np.random.default_rng(2)
    agrees(nbattn.paged_attention(q, kv, plan=plan, return_lse=True), q, kv)
    call, launches = plan.last_call, len(lent.launched)
    assert call is not None
    spaced = [np.concatenate([x, x[..., :16]], axis=-1)[..., :DIM] for x in (kv.v, kv.k)]
    for layer in (kv.with_pages(*spaced), kv.with_pages(*spaced[::-1])):
        q = numbers(rng, q.shape, "bfloat16")
        agrees(nbattn.paged_attention(q, layer, plan=plan, return_lse=True), q, layer)
    q[...] = numbers(rng, q.shape, "bfloat16")
    agrees(nbattn.paged_attention(q, layer, plan=plan, return_lse=True), q, layer)
    assert plan.last_call is call  # none went through the contract
    assert lent.launched == lent.launched[:launches] * 4


@pytest.mark.parametrize("name", ["sinks", "alibi_slopes", "attn_mask", "v_scale"])
def test_options_on_the_device_are_read_in_place(problem, lent, name):
    plan, kv, q = problem
    rng = np.random.default_rng(3)
    make = {
        "sinks": lambda: rng.standard_normal(HEADS).astype(np.float32),
        "alibi_slopes": lambda: rng.random(HEADS).astype(np.float32),
        "attn_mask": lambda: rng.random((2, 1, 1, 20)) > 0.3,
        "v_scale": lambda: rng.random((2, DIM)).astype(np.float32),
    }[name]
    value = make()
    agrees(nbattn.paged_attention(q, kv, plan=plan, return_lse=True, **{name: value}), q, kv, **{name: value})
    call = plan.last_call
    assert call is not None
    value[...] = make()
    for given in (value, make()):
        agrees(nbattn.paged_attention(q, kv, plan=plan, return_lse=True, **{name: given}), q, kv, **{name: given})
        assert plan.last_call is call
    agrees(nbattn.paged_attention(q, kv, plan=plan, return_lse=True), q, kv)
    assert plan.last_call is not call


def test_converted_options_are_converted_again(problem, lent):
    plan, kv, q = problem
    wide = np.linspace(-1, 1, 2 * HEADS)
    for sinks in (wide[:HEADS], wide[::2].astype(np.float32), wide.astype(np.float32)[::2]):
        agrees(nbattn.paged_attention(q, kv, plan=plan, return_lse=True, sinks=sinks), q, kv, sinks=sinks)
        sinks += 1
        agrees(nbattn.paged_attention(q, kv, plan=plan, return_lse=True, sinks=sinks), q, kv, sinks=sinks)
        k_scale = np.full((2, DIM), 0.5, np.float32)
        agrees(nbattn.paged_attention(q, kv, plan=plan, return_lse=True, k_scale=k_scale), q, kv, k_scale=k_scale)
        assert plan.last_call is None


def test_other_forms_go_through_the_contract(problem, lent):
    plan, kv, q = problem
    out = np.zeros_like(q)
    nbattn.paged_attention(q, kv, plan=plan, out=out)
    spread, spread_out = np.zeros((2, HEADS, 2 * DIM), q.dtype)[..., :DIM], np.zeros((4, HEADS, DIM), q.dtype)[::2]
    spread[...] = q
    agrees((nbattn.paged_attention(spread, kv, plan=plan, out=spread_out, return_lse=True)), q, kv)
    shifted = np.zeros(q.size + 2, q.dtype)[2:].reshape(q.shape)  # aligned to 4 bytes only
    shifted[...] = q
    for _ in range(2):
        agrees(nbattn.paged_attention(shifted, kv, plan=plan, return_lse=True), q, kv)
    half = q.astype(np.float16)
    with pytest.raises(ContractError, match="k, v: must have q's dtype float16"):
        nbattn.paged_attention(half, kv, plan=plan, out=out)


def test_a_graph_that_rotates_is_replayed_where_it_holds_angles(lent, monkeypatch):
    rng = np.random.default_rng(4)
    k, v = rng.standard_normal((2, 1, 300, 1, 8)).astype(np.float32)
    q = rng.standard_normal((1, 1, 8)).astype(np.float32)
    short, long = (nbattn.PagedKV.from_slots(k, v, np.array([n], np.int32)) for n in (5, 300))
    monkeypatch.setattr(lent, "capturing", lambda: True)
    monkeypatch.setattr(target, "POSITIONS_AHEAD", 512)
    ahead, rope = nbattn.plan(short, num_qo_heads=1, max_kv_len=300), nbattn.Rope(7e3)
    agrees(nbattn.paged_attention(q, short, plan=ahead, rope=rope, return_lse=True), q, short, rope=oracle.Rope(7e3))
    _, cos, _ = ahead.on_target.planes_in_graphs[0]
    ahead.update(long)
    agrees(nbattn.paged_attention(q, long, plan=ahead, rope=rope, return_lse=True), q, long, rope=oracle.Rope(7e3))
    assert ahead.on_target.planes_in_graphs[1][1] is cos  # what a replay reads
    monkeypatch.setattr(target, "POSITIONS_AHEAD", 8)
    plan, rope = nbattn.plan(short, num_qo_heads=1, max_kv_len=300), nbattn.Rope(8e3)
    first = nbattn.paged_attention(q, short, plan=plan, rope=rope)
    with pytest.raises(
        ContractError, match=r"^Plan.update: a captured graph rotates positions 0 to 255, got 0 to 299\."
    ):
        plan.update(long)
    np.testing.assert_array_equal(nbattn.paged_attention(q, short, plan=plan, rope=rope), first)


@pytest.mark.parametrize(
    "places",
    [{"kv_start": [3, 2**30]}, {"q_positions": [3, 2**30]}, {"kv_start": [2**20, 7], "q_positions": [2**20, 99]}],
)
def test_far_positions_rotate_right(lent, places):
    rng = np.random.default_rng(4)
    k, v = rng.standard_normal((2, 2, 12, 1, 8)).astype(np.float32)
    q = rng.standard_normal((2, 2, 8)).astype(np.float32)
    kv = nbattn.PagedKV.from_slots(k, v, np.array([12, 5], np.int32))
    options = {name: np.array(x) for name, x in places.items()}
    got = nbattn.paged_attention(q, kv, rope=nbattn.Rope(50.0), return_lse=True, **options)
    agrees(got, q, kv, rope=oracle.Rope(50.0), **options)


def test_a_graph_that_rotates_may_lose_keys_and_rows(lent, monkeypatch):
    rng = np.random.default_rng(6)
    k, v = rng.standard_normal((2, 3, 12, 1, 8)).astype(np.float32)
    q = rng.standard_normal((3, 1, 8)).astype(np.float32)
    kvs = [nbattn.PagedKV.from_slots(k, v, np.array(lens, np.int32)) for lens in ([5, 6, 7], [3, 0, 4], [3, 12])]
    plan = nbattn.plan(kvs[0], num_qo_heads=1, max_kv_len=12)
    monkeypatch.setattr(lent, "capturing", lambda: True)
    for kv in kvs:
        rows = np.arange(kv.batch_size + 1)
        plan.update(kv)
        got = nbattn.paged_attention(q, kv, rows, plan=plan, rope=nbattn.Rope(60.0), return_lse=True)
        agrees(got, q, kv, qo_indptr=rows, rope=oracle.Rope(60.0))
    assert all(origin == 0 for origin, _, _ in plan.on_target.planes_in_graphs)


def test_an_update_may_bring_starts_to_a_graph_that_rotates(lent, monkeypatch):
    rng = np.random.default_rng(5)
    k, v = rng.standard_normal((2, 2, 12, 1, 8)).astype(np.float32)
    q = rng.standard_normal((2, 1, 8)).astype(np.float32)
    kv = nbattn.PagedKV.from_slots(k, v, np.array([12, 5], np.int32))
    plan = nbattn.plan(kv, num_qo_heads=1, max_kv_len=12)
    monkeypatch.setattr(lent, "capturing", lambda: True)
    nbattn.paged_attention(q, kv, plan=plan, rope=nbattn.Rope(50.0))
    places = {"kv_start": np.array([0, 2**30 - 9]), "q_positions": np.array([9, 2**30])}
    plan.update(kv, **places)
    got = nbattn.paged_attention(q, kv, plan=plan, rope=nbattn.Rope(50.0), return_lse=True)
    agrees(got, q, kv, rope=oracle.Rope(50.0), **places)
    far = {"q_positions": np.array([9, 2**30])}
    with pytest.raises(ContractError, match=r"^Plan.update: a captured graph rotates positions 0 to 255, got 0 to"):
        plan.update(kv, **far)
    with pytest.raises(
        ContractError, match=r"^q_positions: must lie within 131072 positions of the keys in a captured"
    ):
        nbattn.paged_attention(q, kv, rope=nbattn.Rope(50.0), **far)


REFUSED = [
    ({"qo_indptr": np.array([0, 2, 2], np.int32)}, "plan: must be made for this call's lengths, offsets"),
    ({"causal": False}, "causal: must be the plan's"),
    ({"out": np.zeros((2, HEADS, DIM), np.float16)}, "out: must be bfloat16"),
    ({"sinks": np.zeros(3, np.float32)}, r"sinks: must be \[4\]"),
    ({"sm_scale": "1"}, "sm_scale: must be a finite number"),
    ({"lse_base": 2}, "lse_base: must be"),
    ({"kv": None}, "kv: must be a PagedKV"),
    ({"q": None}, "q: must be a NumPy or CuPy array"),
]


@pytest.mark.parametrize(("changes", "message"), REFUSED, ids=[next(iter(r[0])) for r in REFUSED])
def test_what_the_first_call_refuses_is_refused_again(problem, lent, changes, message):
    plan, kv, q = problem
    nbattn.paged_attention(q, kv, plan=plan, out=np.zeros_like(q))
    assert plan.last_call is not None
    launches = len(lent.launched)
    with pytest.raises(ContractError, match="^" + message):
        nbattn.paged_attention(**{"q": q, "kv": kv, "plan": plan, "out": np.zeros_like(q), **changes})
    out = np.zeros_like(q)
    out.flags.writeable = False
    with pytest.raises(ContractError, match=r"^out: must be writable"):
        nbattn.paged_attention(q, kv, plan=plan, out=out)
    assert len(lent.launched) == launches


def test_an_updated_plan_forgets(problem, lent):
    plan, kv, q = problem
    nbattn.paged_attention(q, kv, plan=plan)
    shorter = poisoned_cache(np.random.default_rng(4), [19, 3])
    plan.update(shorter)
    with pytest.raises(ContractError, match="plan: must be made for this call's lengths"):
        nbattn.paged_attention(q, kv, plan=plan)
    for _ in range(2):
        agrees(nbattn.paged_attention(q, shorter, plan=plan, return_lse=True), q, shorter)
    assert plan.last_call is not None


def test_threads_and_streams_share_a_plan(problem, lent, monkeypatch):
    """Each stream has partial states of its own; on one stream, launches of one call stay together."""
    plan, kv, _ = problem
    rng = np.random.default_rng(5)
    streams = {}
    monkeypatch.setattr(lent, "stream", lambda: streams.get(threading.get_ident(), 0))
    queries = [numbers(rng, (2, HEADS, DIM), "bfloat16") for _ in range(3)]
    nbattn.paged_attention(queries[0], kv, plan=plan)
    results, errors = [None] * 3, []

    def work(i):
        streams[threading.get_ident()] = i // 2  # two threads on stream 0, one on stream 1
        try:
            for _ in range(3):
                results[i] = nbattn.paged_attention(queries[i], kv, plan=plan)
        except Exception as error:  # a thread's own would be lost
            errors.append(error)

    workers = [threading.Thread(target=work, args=(i,)) for i in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not errors
    for q, result in zip(queries, results, strict=True):
        np.testing.assert_array_equal(result, nbattn.paged_attention(q, kv, split_size=16))
    assert len(plan.last_call.launch._on_streams) == 2


def paged(rng, pool, lengths):
    ids = rng.permutation(len(pool))[: 2 * 4].reshape(2, 4).astype(np.int32)
    return nbattn.PagedKV.from_block_table(pool[:, 0], pool[:, 1], ids, np.array(lengths, np.int32))


def test_a_call_outlives_an_update_of_lengths_and_pages(lent):
    rng = np.random.default_rng(8)
    pool = numbers(rng, (9, 2, 16, 2, DIM), "bfloat16")
    q, first = numbers(rng, (2, HEADS, DIM), "bfloat16"), paged(rng, pool, [20, 9])
    plan = nbattn.plan(first, num_qo_heads=HEADS, max_kv_len=64, split_size=16)
    nbattn.paged_attention(q, first, plan=plan, return_lse=True)
    launch = plan.last_call.launch
    for lengths in ([64, 3], [0, 33]):
        kv = paged(rng, pool, lengths)
        plan.update(kv)
        agrees(nbattn.paged_attention(q, kv, plan=plan, return_lse=True), q, kv)
        assert plan.last_call.launch is launch
    with pytest.raises(ContractError, match="plan: must be made for this call's lengths"):
        nbattn.paged_attention(q, paged(rng, pool, [1, 1]), plan=plan)


def test_tables_on_the_device_are_copied_there(lent, monkeypatch):
    rng = np.random.default_rng(10)
    pool = numbers(rng, (9, 2, 16, 2, DIM), "bfloat16")
    q, tables = numbers(rng, (2, HEADS, DIM), "bfloat16"), [paged(rng, pool, x) for x in ([20, 9], [64, 3], [0, 33])]
    on_device = {id(kv.kv_indices) for kv in tables[:2]}
    monkeypatch.setattr(lent, "holds", lambda x: id(x) in on_device)
    plan = nbattn.plan(tables[0], num_qo_heads=HEADS, max_kv_len=64)
    for kv in (*tables, tables[1]):
        plan.update(kv)
        agrees(nbattn.paged_attention(q, kv, plan=plan, return_lse=True), q, kv)
    whole, entries = lent.uploaded[0], 2 * 4
    assert lent.uploaded == [whole, whole - entries, whole, whole - entries]
    more = nbattn.PagedKV.from_block_table(pool[:, 0], pool[:, 1], np.zeros((2, 5), np.int32), np.array([20, 9]))
    on_device.add(id(more.kv_indices))
    with pytest.raises(ContractError, match=r"^Plan.update: needs 10 page-table entries, the plan holds 8"):
        plan.update(more)


@pytest.mark.parametrize("change", ["rows", "mask", "positions", "table"])
def test_a_call_does_not_outlive_other_updates(lent, change):
    rng = np.random.default_rng(9)
    pool = numbers(rng, (9, 2, 16, 2, DIM), "bfloat16")
    q, first, second = numbers(rng, (3, HEADS, DIM), "bfloat16"), paged(rng, pool, [20, 9]), paged(rng, pool, [21, 40])
    mask = {"attn_mask": np.ones((1, 40), bool)} if change == "mask" else {}
    plan = nbattn.plan(first, np.array([0, 1, 3]), num_qo_heads=HEADS, max_kv_len=64)
    for called in (first, paged(rng, pool, [20, 9]) if change == "table" else first):
        nbattn.paged_attention(q, called, np.array([0, 1, 3]), plan=plan, **mask)
    assert plan.last_call is not None
    offsets = np.array([0, 2, 3] if change == "rows" else [0, 1, 3])
    plan.update(second, offsets, kv_start=np.array([1, 2]) if change == "positions" else None)
    assert plan.last_call is None


def cascade(rng, q_rows=3):
    pool = numbers(rng, (6, 2, 16, 2, DIM), "bfloat16")
    wrapper = nbattn.MultiLevelCascadeAttentionWrapper(2)
    each = np.arange(q_rows + 1, dtype=np.int32)
    lists = ([np.array([0, q_rows], np.int32), each], [np.array([0, 1], np.int32), each])
    ids, lens = [np.array([5]), np.array([0, 3, 1])], [np.array([16]), np.array([4, 16, 1])]
    wrapper.plan(*lists, ids, lens, HEADS, 2, DIM, 16)
    suffix, prefix = (lambda x: nbattn.PagedKV.from_page_table(x, each, ids[1], lens[1])), np.array([0, q_rows])
    levels = lambda x: [  # noqa: E731
        nbattn.Level(nbattn.PagedKV.from_page_table(x, np.array([0, 1]), ids[0], lens[0]), prefix),
        nbattn.Level(suffix(x)),
    ]
    return wrapper, pool, levels


def test_cascade_runs_are_repeated(lent):
    rng = np.random.default_rng(6)
    wrapper, pool, levels = cascade(rng)
    options = {"sinks": np.array([0.5, -1, 2, 0], np.float32)}
    first = None
    for turn in range(3):
        q, layer = numbers(rng, (3, HEADS, DIM), "bfloat16"), numbers(rng, pool.shape, "bfloat16")
        options["sinks"] = options["sinks"] + turn
        result = wrapper.run(q, layer, return_lse=True, **options)
        testing.assert_close(result, testing.expect(oracle.cascade_attention, q, levels(layer), **options))
        first = first or wrapper._planned.keeper.last_run
        assert first is not None
        assert wrapper._planned.keeper.last_run is first
    flipped = layer[::-1].copy()[::-1]
    result = wrapper.run(q, flipped, return_lse=True, **options)
    testing.assert_close(result, testing.expect(oracle.cascade_attention, q, levels(layer), **options))
    pair = layer[:, 0].copy(), layer[:, 1].copy()
    for _ in range(2):
        result = wrapper.run(q, pair, return_lse=True, **options)
        testing.assert_close(result, testing.expect(oracle.cascade_attention, q, levels(layer), **options))
    with pytest.raises(ContractError, match=r"^q: must be"):
        wrapper.run(q[:2], pair, **options)
    with pytest.raises(ContractError, match=r"^paged_kv_cache: must have pages of"):
        wrapper.run(q, layer[:, :, :8], **options)


def test_shared_prefixes_may_lie_inside_the_suffixes_memory(lent):
    rng = np.random.default_rng(7)
    memory = numbers(rng, (2, 8, 2, 16, 2, DIM), "bfloat16")
    wrapper = nbattn.BatchDecodeWithSharedPrefixPagedKVCacheWrapper()
    indptr, ids, lens = np.array([0, 1, 2]), np.array([2, 1]), np.array([3, 16])
    wrapper.begin_forward(indptr, ids, lens, HEADS, 2, DIM, 16)
    q, offsets = numbers(rng, (2, HEADS, DIM), "bfloat16"), np.array([0, 2])
    for prefix, suffixes in ((memory[0, 5], memory[0]), (memory[1, 6], memory[0]), (memory[0, 7], memory[1])):
        shared = prefix[0, :9], prefix[1, :9]
        levels = [
            nbattn.Level(nbattn.PagedKV.from_slots(shared[0][None], shared[1][None], np.array([9])), offsets),
            nbattn.Level(nbattn.PagedKV.from_page_table(suffixes, indptr, ids, lens)),
        ]
        result = wrapper.forward(q, *shared, suffixes, return_lse=True)
        testing.assert_close(result, testing.expect(oracle.cascade_attention, q, levels))
        assert wrapper._keeper.last_run is not None

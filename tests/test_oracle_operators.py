"""The oracle's operators, merges and cascades against hand values, SciPy and the examples of their documents."""

from types import SimpleNamespace

import numpy as np
import pytest
from hand_values import INF, LN, both, close, zeros
from scipy.special import logsumexp, softmax

from nbattn import oracle
from nbattn.oracle import Level, Rope
from nbattn.oracle.score_pipeline import rotate
from nbattn.testing import scatter, zero_logit_tokens


def test_r1_cross_attention_sees_every_key():
    blocks = np.zeros((1, 2, 1, 4, 1, 64))
    blocks[0, 1, 0, :3, 0, :3] = np.eye(3)
    blocks[0, :, 0, 3] = np.nan
    collection = SimpleNamespace(
        kv_blocks=blocks, cache_lengths=np.array([0]), kv_lookup_table=np.array([[0, 9]], np.uint32), page_stride=-1
    )

    def run(mask, **options):
        args = np.array([0, 1]), 1, np.array([0, 3]), collection, 0, 0.125
        return oracle.generic_cross_attention_kv_cache(zeros(1), *args, mask_str=mask, **options)[0, 0, :3]

    close(run("null"), [1 / 3] * 3)
    close(run("causal"), [1, 0, 0])  # row cache_lengths[0] + 0 = 0
    close(run("causal", q_start="bottom_right"), [1 / 3] * 3)
    close(run("sliding_window_causal", q_start="bottom_right", local_window_size=2), [0, 0.5, 0.5])
    close(run("chunked", local_window_size=2), [0.5, 0.5, 0])
    close(run("chunked_causal", local_window_size=2), [1, 0, 0])


def test_r2_empty_requests():
    kv = scatter(zero_logit_tokens(0, 1.0), zero_logit_tokens(3, 1.0), zero_logit_tokens(0, 1.0))
    out, lse = both(zeros(3), kv, out=np.full((3, 1, 1), np.nan))
    close(out[:, 0, 0], [0, 1, 0])
    close(lse[:, 0], [-INF, np.log2(3), -INF])


def test_r3_stale_slots():
    key, value = np.zeros((2, 3, 1, 64)), np.full((2, 3, 1, 1), 99.0)
    value[0, :1], value[1, :3] = 1, 2
    close(oracle.gqa_decode(zeros(2), key, value, np.array([1, 3]))[:, 0, 0], [1, 2])


def test_r4_rows_past_the_end_stay_untouched():
    q = zeros(4)
    q[2:] = np.nan
    out, lse = both(
        q, scatter(zero_logit_tokens(2, 1.0)), np.array([0, 2]), out=np.full((4, 1, 1), 7.0), lse=np.full((4, 1), 8.0)
    )
    close(out[:, 0, 0], [1, 1, 7, 7])
    close(lse[:, 0], [0, 1, 8, 8])


def test_r5_merge_is_base_2():
    v, s = oracle.merge_state(*[np.array([[x]]) for x in ([0.0], 0.0, [1.0], np.log2(3))])
    close(v, [[[0.75]]])
    close(s, [[2.0]])
    close(
        oracle.merge_states(np.array([[[[0.0]], [[1.0]]]]), np.array([[[0.0], [LN(3)]]]), lse_base="e")[0], [[[0.75]]]
    )


@pytest.mark.parametrize("junk", [np.nan, INF, 5.0])
def test_r6_a_side_without_keys_contributes_nothing(junk):
    empty = np.full((1, 1, 2), junk), np.full((1, 1), -INF)
    full = np.array([[[3.0, 4.0]]]), np.array([[-60000.0]])
    for a, b in [(empty, full), (full, empty)]:
        v, s = oracle.merge_state(*a, *b)
        close(v, full[0], 0)
        close(s, full[1], 0)  # R7: -60000 beats -inf
    v, s = oracle.merge_state(*empty, *empty)
    assert v.tolist() == [[[0.0, 0.0]]]
    assert s.tolist() == [[-INF]]


@pytest.mark.parametrize("bad", [np.nan, INF])
def test_bad_states_make_their_row_nan(bad):
    v, s = oracle.merge_states(np.ones((2, 2, 1, 1)), np.array([[[bad], [0.0]], [[1.0], [1.0]]]))
    assert np.isnan(v[0]).all()
    assert np.isnan(s[0]).all()
    close([v[1, 0, 0], s[1, 0]], [1, 2])


def test_no_states_and_in_place():
    v, s = oracle.merge_states(np.ones((2, 0, 3, 4)), np.ones((2, 0, 3)))
    assert v.shape == (2, 3, 4)
    assert not v.any()
    assert (s == -INF).all()
    v, s = np.zeros((2, 1, 1), np.float32), np.zeros((2, 1), np.float32)
    assert oracle.merge_state_in_place(v, s, v + 4, s, mask=np.array([1, 0])) is None
    close([v[0, 0, 0], s[0, 0], v[1, 0, 0], s[1, 0]], [2, 1, 0, 0])


def test_n1_scales():
    k, v = np.array([[[2.0]], [[0.0]]]), np.array([[[1.0]], [[0.0]]])
    out = oracle.paged_attention(np.ones((1, 1, 1)), scatter((k, v)), sm_scale=1.0, k_scale=0.5, v_scale=2.0)
    close(out, [[[1.4621]]], 1e-4)


def test_n2_norm_then_rotary():
    cache = np.array([[[[1.0, 0.0], [0.0, 0.0]]]]), np.array([[[[1.0], [0.0]]]])
    out, lse = oracle.attention_over_cache(
        np.ones((1, 1, 2)), *cache, np.zeros(1, int), np.array([0, 1]), np.array([2]), q_scale=1.0,
        rope_cos=np.array([[1.0], [0.0]]), rope_sin=np.array([[0.0], [1.0]]),
        q_norm_gain=np.array([2.0, 1.0]), qk_norm_eps=0.0, return_lse=True,
    )  # fmt: skip
    close(out, [[[0.2689]]], 1e-4)
    close(lse, [[0.4519]], 1e-4)


@pytest.mark.parametrize(
    ("angles", "mode"), [([90, 0], "interleaved"), ([90], "half")], ids=["N3", "N4: the tail is copied"]
)
def test_n3_n4_rotary(angles, mode):
    cos, sin = (f(np.deg2rad([angles])) for f in (np.cos, np.sin))
    close(rotate(np.array([[[1.0, 2, 3, 4]]]), cos, sin, mode), [[[-2, 1, 3, 4]]])


def test_n5_llama_rope():
    row = np.array([1.0, 1, 0, 0])
    kv = scatter((np.tile(row, (3, 1, 1)), np.eye(3)[:, None]))
    out, lse = both(row.reshape(1, 1, 4), kv, sm_scale=1.0, rope=Rope())
    close(out[0, 0], [0.1295, 0.3369, 0.5336], 1e-4)
    close(lse, [[3.7915]], 1e-4)


def test_n6_alibi():
    slopes = oracle.alibi_slopes(6)
    close(slopes, [0.25, 0.0625, 0.015625, 0.00390625, 0.5, 0.125])
    out = oracle.paged_attention(zeros(1, 6), scatter(zero_logit_tokens(3, num_kv_heads=6)), alibi_slopes=slopes)
    close(out[0, 4], softmax([-1.0, -0.5, 0.0]))


def random_parts(*lens, seed=5):
    rng = np.random.default_rng(seed)
    return [(rng.normal(size=(n, 2, 8)), rng.normal(size=(n, 2, 8))) for n in lens]


@pytest.mark.parametrize(
    "options",
    [{}, {"sinks": np.array([0.5, -1, 2, 0])}, {"window_left": 3}, {"rope": Rope(100.0, 2.0)},
     {"alibi_slopes": oracle.alibi_slopes(4)}, {"chunk_size": 3}, {"attn_mask": np.arange(7) % 3 > 0}],
)  # fmt: skip
def test_s8_w6_a_cascade_is_flat_attention(options):
    (pk, pv), (sk, sv) = random_parts(4, 3)
    q = np.random.default_rng(6).normal(size=(2, 4, 8))
    whole = scatter((np.concatenate([pk, sk]), np.concatenate([pv, sv])))
    rows = np.array([0, 2])
    levels = [Level(scatter((pk, pv)), rows), Level(scatter((sk, sv)), rows, causal=True)]
    close(oracle.cascade_attention(q, levels, return_lse=True, **options), both(q, whole, rows, **options))


def test_w6_positions_count_every_level():
    levels = [
        Level(scatter(zero_logit_tokens(4, np.arange(4))), None),
        Level(scatter(zero_logit_tokens(3, np.arange(4, 7))), None, True),
    ]
    close(oracle.cascade_attention(zeros(1), levels, window_left=3).item(), (3 + 4 + 5 + 6) / 4)


def test_r12_r14_levels_that_a_row_is_not_in():
    prefix = Level(scatter(zero_logit_tokens(4, 1.0)), np.array([0, 3]))
    suffix = Level(scatter(zero_logit_tokens(0, 5.0), zero_logit_tokens(4, 5.0), zero_logit_tokens(0, 5.0)), None, True)
    close(oracle.cascade_attention(zeros(3), [prefix, suffix])[:, 0, 0], [1, 3, 1])
    late = Level(scatter(zero_logit_tokens(4, 5.0), zero_logit_tokens(12, 5.0)), np.array([1, 2, 3]), True)
    close(oracle.cascade_attention(zeros(3), [prefix, late])[:, 0, 0], [1, 3, 4])


def test_shared_prefix_and_multi_level_agree():
    (pk, pv), (sk, sv) = random_parts(8, 6)
    q = np.random.default_rng(6).normal(size=(2, 4, 8))
    cache = np.full((4, 2, 4, 2, 8), np.nan)
    for page, (k, v) in enumerate([(pk[:4], pv[:4]), (pk[4:], pv[4:]), (sk[:4], sv[:4]), (sk[4:], sv[4:])]):
        cache[page, 0, : len(k)], cache[page, 1, : len(v)] = k, v
    rows, table = np.array([0, 2]), (np.array([0, 2]), np.array([2, 3]), np.array([2]))
    prefix_table = np.array([0, 2]), np.array([0, 1]), np.array([4])
    lists = [list(x) for x in zip(prefix_table, table, strict=True)]
    whole = both(q, scatter((np.concatenate([pk, sk]), np.concatenate([pv, sv]))), rows)
    close(oracle.multi_level_cascade(q, cache, [rows, rows], *lists, causal=True, return_lse=True), whole)
    close(oracle.shared_prefix(q, pk, pv, cache, *table, rows, causal=True, return_lse=True), whole)
    hnd = cache.swapaxes(2, 3)
    shared = pk.swapaxes(0, 1), pv.swapaxes(0, 1)
    close(oracle.shared_prefix(q, *shared, hnd, *table, rows, causal=True, kv_layout="HND"), whole[0])


GQA_EXAMPLES = [
    (
        [[[1, 0], [0, 1]]], [[[[1, 0]], [[0, 1]], [[5, 5]]]], [[[[1, 2]], [[3, 4]], [[50, 50]]]], [2],
        [[[1.660477, 2.660477], [2.339523, 3.339523]]],
    ),
    (
        [[[1, 0], [0, 1], [1, 1], [-1, 0]], [[0.5, 0.5], [1, -1], [0, 2], [2, 0]]],
        [[[[1, 0], [0, 1]], [[0, 1], [1, 0]], [[1, 1], [-1, 1]]],
         [[[1, 0], [0, 1]], [[9, 9], [9, 9]], [[9, 9], [9, 9]]]],
        [[[[1, 0], [0, 1]], [[0, 1], [1, 0]], [[2, 2], [-2, 2]]],
         [[[1, 2], [3, 4]], [[90, 90], [90, 90]], [[90, 90], [90, 90]]]],
        [3, 1],
        [[[1.203336, 1.0], [1.0, 1.203336], [0.00556, 0.796664], [-1.011921, 1.435946]],
         [[1.0, 2.0], [1.0, 2.0], [3.0, 4.0], [3.0, 4.0]]],
    ),
    (
        [[[1, 0, 1, 0], [0, 2, 0, -1]]],
        [[[[1, 1, 0, 0], [0, 1, 0, 1]], [[0, 0, 1, 1], [1, 0, 1, 0]], [[1, 0, 0, 1], [0, 0, 2, 0]],
          [[0, 1, 1, 0], [1, 1, 1, 1]]]],
        [[[[1, 0, 0, 0], [0, 1, 0, 0]], [[0, 1, 0, 0], [0, 0, 1, 0]], [[0, 0, 1, 0], [0, 0, 0, 1]],
          [[0, 0, 0, 1], [1, 0, 0, 0]]]],
        [4],
        [[[0.25, 0.25, 0.25, 0.25], [0.31123, 0.31123, 0.18877, 0.18877]]],
    ),
]  # fmt: skip


@pytest.mark.parametrize("example", GQA_EXAMPLES, ids=["one", "two", "three"])
def test_the_three_examples_of_gqa_decode(example):
    query, key, value, lengths, out = (np.array(x) for x in example)
    np.testing.assert_allclose(oracle.gqa_decode(query, key, value, lengths), out, atol=6e-7, rtol=0)


@pytest.mark.parametrize("lse_base", ["2", "e"])
def test_against_scipy(lse_base):
    rng = np.random.default_rng(11)
    q, k, v = rng.normal(size=(5, 6, 16)), rng.normal(size=(11, 2, 16)), rng.normal(size=(11, 2, 4))
    sinks = rng.normal(size=6)
    out, lse = both(q, scatter((k, v)), np.array([0, 5]), causal=False, sinks=sinks, lse_base=lse_base)
    s = np.einsum("nhd,lhd->nhl", q, k.repeat(3, axis=1)) / 4
    s = np.concatenate([s, np.broadcast_to(sinks[None, :, None], (5, 6, 1))], axis=2)
    close(out, np.einsum("nhl,lhd->nhd", softmax(s, axis=2)[..., :11], v.repeat(3, axis=1)))
    close(lse, logsumexp(s, axis=2) / (LN(2) if lse_base == "2" else 1))

"""The score pipeline of the oracle against numbers computed by hand.

The ids (S1, M3, ...) name classes of faults seen in other systems; unless a test says otherwise pages hold 4 tokens,
q is zero (so that visible keys weigh the same), V is the identity (so that the output is the row of weights), there is
one query row, and attention is causal.
"""

import numpy as np
import pytest
from hand_values import INF, LN, both, close, zeros

from nbattn import oracle
from nbattn.testing import scatter, zero_logit_tokens


def logit_keys(logits, v=None):
    """Return (q, kv) of head size 1 whose scaled logits at sm_scale 1 are `logits`."""
    keys = np.reshape(logits, (-1, 1, 1)).astype(float)
    return np.ones((1, 1, 1)), scatter((keys, zero_logit_tokens(len(keys), v)[1]))


def out_of(num_keys, rows=1, v=None, **options):
    """Return out [rows, dim] of one zero-logit request."""
    kv = scatter(zero_logit_tokens(num_keys, v))
    return oracle.paged_attention(zeros(rows), kv, np.array([0, rows]), **options)[:, 0]


def test_s1_a_sink_takes_its_share_on_every_row():
    close(out_of(64, 3, v=1.0, causal=False, sinks=[5.0]), np.full((3, 1), 0.3013), 1e-4)


def test_s2_sinks_belong_to_heads_not_rows():
    out = oracle.paged_attention(
        zeros(2, 2),
        scatter(zero_logit_tokens(1, 1.0, num_kv_heads=2)),
        np.array([0, 2]),
        causal=False,
        sinks=[0.0, LN(9)],
    )
    close(out[..., 0], [[0.5, 0.1], [0.5, 0.1]])


@pytest.mark.parametrize(("keys", "sink", "share"), [(129, LN(129), 0.5), (4, 0.0, 0.8)], ids=["S3", "S4"])
def test_a_sink_counts_once(keys, sink, share):
    close(out_of(keys, v=1.0, sinks=[sink]), [[share]])


def test_s5_the_sink_is_in_the_lse():
    out, lse = both(zeros(1, 2), scatter(zero_logit_tokens(1, 3.0, num_kv_heads=2)), sinks=[0.0, LN(3)])
    close(out[0, :, 0], [1.5, 0.75])
    close(lse, [[1.0, 2.0]])


def test_s6_huge_sinks_and_no_sink():
    kv = scatter(zero_logit_tokens(4, 1.0))
    out, lse = both(zeros(1), kv, sinks=[1e4])
    assert 0.0 <= out[0, 0, 0] < 1e-30
    close(lse, [[14426.950408889634]])
    close(both(zeros(1), kv, sinks=[-INF]), both(zeros(1), kv), 0)


def test_s7_a_window_of_the_row_itself_beside_a_sink():
    close(out_of(64, window_left=0, sinks=[0.0]), [0.5 * np.eye(64)[63]])


def test_m1_an_additive_mask_comes_after_the_cap():
    close(out_of(2, logits_soft_cap=0.5, attn_mask=np.array([[0.0, -INF]])), [[1.0, 0.0]])


def test_m2_a_row_that_masks_everything_is_zero():
    out, lse = both(
        zeros(2), scatter(zero_logit_tokens(3)), np.array([0, 2]), attn_mask=np.array([[False] * 3, [True] * 3])
    )
    close(out[:, 0], [[0, 0, 0], [1 / 3] * 3])
    close(lse[:, 0], [-INF, np.log2(3)])


def test_m3_past_keys_and_the_new_one_are_visible():
    close(out_of(3), [[1 / 3] * 3])


def test_m4_axis_0_of_a_rank_3_mask_is_the_head():
    mask = np.zeros((2, 1, 3), bool)
    mask[0] = True
    mask[1, :, 0] = True
    out = oracle.paged_attention(
        zeros(2, 2), scatter(zero_logit_tokens(3, num_kv_heads=2), zero_logit_tokens(3, num_kv_heads=2)), attn_mask=mask
    )
    close(out, [[[1 / 3] * 3, [1, 0, 0]]] * 2)


def test_m5_m10_rows_before_the_first_key_are_empty():
    out, lse = both(zeros(3), scatter(zero_logit_tokens(2, [1.0, 3.0])), np.array([0, 3]))
    close(out[:, 0, 0], [0, 1, 2])
    close(lse[:, 0], [-INF, 0, 1])
    rng = np.random.default_rng(1)
    q, k = rng.normal(size=(3, 1, 64)), rng.normal(size=(1, 1, 64))
    out, lse = both(q, scatter((k, np.ones((1, 1, 1)))), np.array([0, 3]))
    close(out[:, 0, 0], [0, 0, 1])
    close(lse[:, 0], [-INF, -INF, q[2, 0] @ k[0, 0] / 8 / LN(2)])


def test_m6_causal_is_bottom_right():
    close(out_of(4), [[0.25] * 4])


def test_m7_no_finite_minus_infinity():
    out, lse = both(*logit_keys([-20000, -20000]), sm_scale=1.0, attn_mask=np.array([True, False]))
    close(out[0, 0], [1, 0])
    close(lse, [[-28853.900817779268]])


def test_m8_scaled_logits_are_capped():
    out = oracle.paged_attention(*logit_keys([4, 0]), sm_scale=1.0, logits_soft_cap=1.0)
    close(out[0, 0], [0.7309, 0.2691], 5e-4)


def test_m9_logits_far_below_zero_are_ordinary():
    kv = scatter((np.full((2, 1, 128), -64.0), np.ones((2, 1, 1))))
    out, lse = both(np.full((1, 1, 128), 64.0), kv)
    close(out, [[[1.0]]])
    np.testing.assert_allclose(lse, [[-66854.859]], rtol=1e-6)


@pytest.mark.parametrize(
    ("cap", "out", "lse"), [(1.0, 0.731059, 1.894636), (30.0, None, 43.1708), (None, 1.0, 144.2695), (0, 1.0, 144.2695)]
)
def test_m11_cap(cap, out, lse):
    q, k = np.zeros((1, 1, 64)), np.zeros((2, 1, 64))
    q[..., 0], k[0, 0, 0] = 80, 10
    got, got_lse = both(q, scatter((k, np.array([[[1.0]], [[0.0]]]))), logits_soft_cap=cap)
    if out is not None:
        close(got, [[[out]]], 1e-6)
    close(got_lse, [[lse]], 1e-6)


def test_m12_a_window_alone_bounds_only_the_left():
    half, third = 1 / 2, 1 / 3
    close(out_of(4, 2, window_left=1), [[0, half, half, 0], [0, 0, half, half]])
    close(out_of(4, 2, window_left=1, causal=False), [[0, third, third, third], [0, 0, half, half]])


@pytest.mark.parametrize(("window", "kept"), [(0, 1), (1, 2), (3, 4), (-1, 4)])
def test_w2_window_left(window, kept):
    out, lse = both(zeros(1), scatter(zero_logit_tokens(4)), window_left=window)
    close(out[0, 0], [0] * (4 - kept) + [1 / kept] * kept)
    close(lse, [[np.log2(kept)]])


def test_w1_w4_m12_sliding_window_counts_the_row_itself():
    cache = np.zeros((1, 1, 5, 64)), np.eye(5)[None, None]
    run = lambda n, total, **options: oracle.attention_over_cache(  # noqa: E731
        zeros(n), *cache, np.zeros(1, int), np.array([0, n]), np.array([total]), **options
    )[:, 0]
    close(run(1, 4, sliding_window=2), [[0, 0, 0.5, 0.5, 0]])
    close(run(2, 5, sliding_window=2), [[0, 0, 0.5, 0.5, 0], [0, 0, 0, 0.5, 0.5]])
    close(run(2, 4, sliding_window=2, is_causal=False)[0], [0, 1 / 3, 1 / 3, 1 / 3, 0])
    close(run(1, 4, sliding_window=-1), [[0.25] * 4 + [0]])


@pytest.mark.parametrize("poison", [np.nan, INF, -INF])
def test_w3_nothing_before_the_window_matters(poison):
    k, v = (np.array(x) for x in zero_logit_tokens(9))
    k[:5] = v[:5] = poison
    close(oracle.paged_attention(zeros(1), scatter((k, v)), window_left=3)[0, 0], [0] * 5 + [0.25] * 4)


def test_w3_a_value_may_be_dropped_for_one_row_and_kept_for_another():
    k, v = (np.array(x) for x in zero_logit_tokens(3, 1.0))
    v[1] = np.nan
    out = oracle.paged_attention(zeros(2), scatter((k, v)), np.array([0, 2]), window_left=0)[:, 0, 0]
    assert np.isnan(out[0])
    assert out[1] == 1.0


def test_w5_a_window_over_long_keys():
    lse = both(zeros(300), scatter(zero_logit_tokens(4096, 0.0)), np.array([0, 300]), window_left=333, causal=False)[1][
        :, 0
    ]
    close(2.0**lse, 4096 - (3796 + np.arange(300) - 333), 1e-9)


def test_chunks():
    close(out_of(7, chunk_size=4), [[0] * 4 + [1 / 3] * 3])
    close(out_of(7, 3, chunk_size=4, causal=False)[0], [0, 0, 0, 0, 1 / 3, 1 / 3, 1 / 3])
    kv = scatter(zero_logit_tokens(7))
    close(oracle.paged_attention(zeros(1), kv, chunk_size=4, kv_start=[2])[0, 0], [0, 0, 0, 0, 0, 0, 1])


def test_positions_may_be_given():
    close(out_of(4, q_positions=[1]), [[0.5, 0.5, 0, 0]])
    close(out_of(4, q_positions=[1], kv_start=[1]), [[1, 0, 0, 0]])


def gather(kv, indices, counts=None, v_rows=1):
    indices = np.atleast_2d(indices)
    counts = np.full(len(indices), indices.shape[1]) if counts is None else np.asarray(counts)
    return oracle.gather_attention(
        zeros(len(indices)), kv, indices, counts, np.array([0, len(indices)]), return_lse=True
    )


def test_p2_gather_through_a_permuted_table():
    out, _ = gather(scatter(zero_logit_tokens(66), page_size=64), [65, 0])
    close(out[0, 0], (np.eye(66)[65] + np.eye(66)[0]) / 2)


def test_p3_counts_bound_the_list():
    counts = np.where(np.arange(65) % 2, 3, 1)
    indices = np.full((65, 4), -(2**31))
    indices[:, :3] = [2, 0, 1]
    indices[::2, 1:] = 2**31 - 1
    out, lse = gather(scatter(zero_logit_tokens(3)), indices, counts)
    close(out[:, 0], np.where(counts[:, None] == 3, 1 / 3, [[0, 0, 1]]))
    close(2.0 ** lse[:, 0], counts)


def test_p5_p6_p7_lists():
    out, lse = gather(scatter(zero_logit_tokens(130, np.arange(130))), np.arange(130))
    close([out.item(), lse.item()], [64.5, np.log2(130)])
    out, lse = gather(scatter(zero_logit_tokens(64, np.arange(64))), np.concatenate([np.full(64, -1), np.arange(64)]))
    close([out.item(), lse.item()], [31.5, 6])
    close(gather(scatter(zero_logit_tokens(2, [1.0, 0.0])), [0, 0, 1])[0].item(), 2 / 3)
    out, lse = gather(scatter(zero_logit_tokens(2, 1.0)), [[2, -1], [0, 1], [0, 1]], counts=[2, 0, 99])
    close(out[:, 0, 0], [0, 0, 1])
    close(lse[:, 0], [-INF, -INF, 1])


def test_gather_gate_is_a_sigmoid_before_the_only_rounding():
    q, kv = zeros(1, 2), scatter(zero_logit_tokens(2, 1.0, num_kv_heads=2))
    options = {"rounding": oracle.Rounding(out=np.float16)}
    out = oracle.gather_attention(q, kv, np.array([[0, 1]]), [2], output_gate=np.array([[0.0, LN(3)]]), **options)
    close(out[0, :, 0], [0.5, 0.75])


def test_p8_unmapped_pages_drop_their_keys():
    kv = scatter(zero_logit_tokens(3, 1.0))
    for page, kept in [(kv.kv_indices[0], 3), (-1, 0), (len(kv.k), 0)]:
        table = kv._replace(kv_indices=np.array([page, 99]))
        out, lse = both(zeros(1), table)
        close([out.item(), lse.item()], [float(kept > 0), np.log2(kept) if kept else -INF])


def test_p9_a_request_without_pages_is_empty():
    cache = np.zeros((9, 2, 16, 1, 1))
    for last_page_len in ([0, 1], [4, 1]):
        _, lse = oracle.multi_level_cascade(
            np.zeros((2, 1, 1)), cache, [np.arange(3)], [np.array([0, 0, 9])], [np.arange(9)],
            [np.array(last_page_len)], return_lse=True,
        )  # fmt: skip
        close(lse[:, 0], [-INF, np.log2(129)])


@pytest.mark.parametrize("group", [1, 3, 5, 6, 7, 9, 16, 32])
def test_p11_heads_read_their_group(group):
    k, v = np.zeros((3, 2, 64)), np.tile([[[0.0], [10.0]]], (3, 1, 1))
    close(oracle.paged_attention(zeros(1, 2 * group), scatter((k, v)))[0, :, 0], [0] * group + [10] * group)


def test_p13_one_call_is_three_decode_calls():
    rng = np.random.default_rng(3)
    q, k, v = rng.normal(size=(3, 2, 8)), rng.normal(size=(7, 1, 8)), rng.normal(size=(7, 1, 8))
    steps = [oracle.paged_attention(q[[i]], scatter((k[: 5 + i], v[: 5 + i]))) for i in range(3)]
    close(oracle.paged_attention(q, scatter((k, v)), np.array([0, 3])), np.concatenate(steps))


def test_append_then_attend():
    cache = np.full((3, 2, 2, 1, 1), np.nan)
    key, value = np.zeros((4, 1, 1)), np.arange(4.0).reshape(4, 1, 1)
    args = np.array([0, 0, 0, 5]), np.array([0, 1, 2, 0]), cache, np.array([2, 0]), np.array([0, 2]), np.array([1])
    oracle.append_paged_kv_cache(key, value, *args)
    close([cache[2, 1, 0, 0, 0], cache[2, 1, 1, 0, 0], cache[0, 1, 0, 0, 0]], [0, 1, 2])
    assert np.isnan(cache[1]).all()


def test_roundings_are_the_only_difference():
    q, kv = logit_keys([0.0, LN(3)], v=[1.0, 2.0])
    exact = oracle.paged_attention(q, kv, sm_scale=1.0).item()
    close(exact, 1.75)
    p = float(np.float16(1 / 3))
    rounding = oracle.Rounding(p=np.float16)
    close(oracle.paged_attention(q, kv, sm_scale=1.0, rounding=rounding).item(), (p + 2) * 0.75)
    third = oracle.paged_attention(np.full((1, 1, 1), 1 / 3), logit_keys([3.0])[1], sm_scale=1.0, return_lse=True,
                                   rounding=oracle.Rounding(q=np.float16))[1]  # fmt: skip
    close(third.item() * LN(2), 3 * p)

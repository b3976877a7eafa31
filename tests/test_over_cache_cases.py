"""attention_over_cache on rows of the public table of small inputs that broke other systems, on both caches."""

import numpy as np
import pytest

import nbattn
from nbattn.testing import scatter, zero_logit_tokens

LAYOUTS = ("continuous", "paged")
LN = np.log


def random(*shape, seed=2):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def ask(layout, q, *requests, new=None, **options):
    """Return (out, lse) of q [rows, heads, dim] over requests (k [L, heads, dim], v), with NaN wherever no key is."""
    cache = scatter(*requests)
    lens = cache.kv_lens
    if layout == "paged":
        table = np.full((len(lens), 40), 99, np.int32)
        for row, (first, end) in enumerate(zip(cache.kv_indptr[:-1], cache.kv_indptr[1:], strict=True)):
            table[row, : end - first] = cache.kv_indices[first:end]
        k, v = (x.astype(np.float32).swapaxes(1, 2) for x in (cache.k, cache.v))
    else:
        table = np.zeros(len(lens), np.int32)
        k, v = (np.full((len(lens), x.shape[1], max(lens) + 2, x.shape[2]), np.nan, np.float32) for x in requests[0])
        for row, request in enumerate(requests):
            for cached, x in zip((k, v), request, strict=True):
                cached[row, :, : len(x)] = x.swapaxes(0, 1)
    q = np.asarray(q, np.float32)
    rows = np.cumsum([0, *(new or [len(q) // len(lens)] * len(lens))])
    return nbattn.attention_over_cache(q, k, v, table, rows, lens, return_lse=True, **options)


def zeros(rows=1, heads=1, dim=64):
    return np.zeros((rows, heads, dim), np.float32)


def close(actual, expected, tolerance=2e-6):
    np.testing.assert_allclose(actual, expected, rtol=tolerance, atol=tolerance)


def floats(*values):
    return np.array(values, np.float32)


@pytest.mark.parametrize("layout", LAYOUTS)
class TestCases:
    def test_s1_s2_s3_s5_s6_s7_sinks(self, layout):
        def sink(tokens, *sinks, rows=1, v=1.0, **options):
            parts = zero_logit_tokens(tokens, v)
            return ask(layout, zeros(rows, len(sinks)), parts, head_sink=floats(*sinks), **options)

        close(sink(64, 5.0, rows=3, is_causal=False)[0], np.full((3, 1, 1), 0.3013), 1e-4)  # S1
        close(sink(1, 0, LN(9), rows=2, is_causal=False)[0][..., 0], [[0.5, 0.1]] * 2)  # S2
        close(sink(129, LN(129))[0], [[[0.5]]])  # S3
        out, lse = sink(1, 0, LN(3), v=4.0)  # S5
        close(out[0, :, 0], [2, 1])
        close(lse, [[1, 2]])
        out, lse = sink(4, 1e4)  # S6
        assert abs(out.item()) < 1e-30
        close(lse, [[14426.950]], 1e-7)
        close(sink(4, -np.inf)[1], [[2]])
        close(sink(64, 0, v=np.arange(64), sliding_window=1)[0], [[[31.5]]])  # S7
        close(ask(layout, zeros(), zero_logit_tokens(3, 1.0), smooth_softmax=True)[0], [[[0.75]]])

    def test_m1_m2_m7_masks(self, layout):
        two = zero_logit_tokens(2)
        close(ask(layout, zeros(), two, attn_mask=floats(0, -np.inf), softcap=0.5)[0], [[[1, 0]]])
        out, lse = ask(layout, zeros(2), two, is_causal=False, attn_mask=np.array([[True, True], [False, False]]))  # M2
        assert out[1].tolist() == [[0, 0]]
        close(lse, [[1], [-np.inf]])
        q = zeros()
        q[0, 0, 0] = -20000 * 8
        keys = np.zeros((2, 1, 64))
        keys[:, 0, 0] = 1
        out, lse = ask(layout, q, (keys, two[1]), attn_mask=np.array([True, False]))  # M7
        close(out, [[[1, 0]]])
        close(lse, [[-28853.901]], 1e-7)

    def test_m3_m5_m6_m10_m12_w4_rows_stand_bottom_right(self, layout):
        close(ask(layout, zeros(), zero_logit_tokens(3))[0], [[[1 / 3] * 3]])  # M3
        out, lse = ask(layout, zeros(3), zero_logit_tokens(2, [1, 3]))  # M5
        close(out[:, 0, 0], [0, 1, 2])
        close(lse[:, 0], [-np.inf, 0, 1])
        close(ask(layout, zeros(), zero_logit_tokens(4))[0], [[[0.25] * 4]])  # M6
        q, key = random(3, 1, 64), random(1, 1, 64)
        out, lse = ask(layout, q, (key, np.ones((1, 1, 1))))  # M10
        close(out[:, 0, 0], [0, 0, 1])
        close(lse[:, 0], [-np.inf, -np.inf, (q[2, 0] @ key[0, 0]) / 8 / LN(2)])
        kept = ask(layout, zeros(2), zero_logit_tokens(4), sliding_window=2)[0][:, 0] > 0  # M12
        assert kept.tolist() == [[False, True, True, False], [False, False, True, True]]
        kept = ask(layout, zeros(2), zero_logit_tokens(4), sliding_window=2, is_causal=False)[0][:, 0] > 0
        assert kept.tolist() == [[False, True, True, True], [False, False, True, True]]
        kept = ask(layout, zeros(2), zero_logit_tokens(5), sliding_window=2)[0][:, 0] > 0  # W4
        assert kept.tolist() == [[False, False, True, True, False], [False, False, False, True, True]]

    def test_m4_a_mask_broadcasts_as_in_numpy(self, layout):
        mask = np.ones((2, 1, 3), bool)
        mask[1, 0] = [True, False, False]
        out, _ = ask(layout, zeros(2, 2), zero_logit_tokens(3), zero_logit_tokens(3), attn_mask=mask)
        for request in out:
            close(request, [[1 / 3] * 3, [1, 0, 0]])

    def test_m8_m11_softcap(self, layout):
        def cap(logit, softcap):
            q, keys = zeros(), np.zeros((2, 1, 64))
            q[0, 0, 0], keys[0, 0, 0] = logit * 8 / 10, 10
            return ask(layout, q, (keys, np.eye(2)[:, None]), softcap=softcap)

        close(cap(4, 1)[0], [[[0.731, 0.269]]], 1e-3)
        for softcap, first, lse in [(1, 0.731059, 1.894636), (30, 1, 43.1708), (None, 1, 144.2695)]:
            out, actual = cap(100, softcap)
            close(out[0, 0, 0], first)
            close(actual, [[lse]])

    def test_w1_w2_w3_windows(self, layout):
        close(ask(layout, zeros(), zero_logit_tokens(4), sliding_window=2)[0], [[[0, 0, 0.5, 0.5]]])
        for window, weights, lse in [
            (1, [0, 0, 0, 1], 0),
            (2, [0, 0, 0.5, 0.5], 1),
            (4, [0.25] * 4, 2),
            (-1, [0.25] * 4, 2),
        ]:
            out, actual = ask(layout, zeros(), zero_logit_tokens(4), sliding_window=window)
            close(out, [[weights]])
            close(actual, [[lse]])
        k, v = random(9, 1, 64), random(9, 1, 64)
        clean = ask(layout, random(1, 1, 64), (k, v), sliding_window=3)
        for x in (k, v):
            x[:6] = np.nan
        close(ask(layout, random(1, 1, 64), (k, v), sliding_window=3)[0], clean[0], 0)

    def test_r2_r3_ragged(self, layout):
        out, lse = ask(layout, zeros(3), *[zero_logit_tokens(n, 1.0) for n in (0, 3, 0)])
        close(out[:, 0, 0], [0, 1, 0])
        close(lse[:, 0], [-np.inf, np.log2(3), -np.inf])
        out, _ = ask(layout, zeros(2), zero_logit_tokens(1, 1.0), zero_logit_tokens(3, 2.0))
        close(out[:, 0, 0], [1, 2])

    def test_n1_scales(self, layout):
        keys, values = np.array([2.0, 0]).reshape(2, 1, 1), np.array([1.0, 0]).reshape(2, 1, 1)
        out, _ = ask(layout, np.ones((1, 1, 1)), (keys, values), q_scale=1, k_scale=0.5, v_scale=2.0)
        close(out, [[[1.4621]]], 1e-4)

    def test_n2_norm_then_rotary(self, layout):
        keys, values = np.array([[1.0, 0], [0, 0]])[:, None], np.array([1.0, 0]).reshape(2, 1, 1)
        quarter = {"rope_cos": floats([1], [0]), "rope_sin": floats([0], [1])}
        out, lse = ask(
            layout, np.ones((1, 1, 2)), (keys, values), q_scale=1, **quarter, q_norm_gain=floats(2, 1), qk_norm_eps=0
        )
        close(out, [[[0.2689]]], 1e-4)
        close(lse, [[0.4519]], 1e-4)

    @pytest.mark.parametrize(("angles", "mode"), [([90, 0], "interleaved"), ([90], "half")], ids=["N3", "N4"])
    def test_n3_n4_rotary(self, layout, angles, mode):
        cos, sin = (f(np.deg2rad([angles])).astype(np.float32) for f in (np.cos, np.sin))
        out, _ = ask(
            layout, [[[1, 2, 3, 4]]], (np.eye(4)[:, None], np.eye(4)[:, None]), q_scale=1, rope_cos=cos, rope_sin=sin,
            rotary_mode=mode, position_ids=np.zeros(1, int),
        )  # fmt: skip
        close(LN(out[0, 0] / out[0, 0, 1]) + 1, [-2, 1, 3, 4])  # logits are q itself

    def test_p13_one_call_is_three_decode_calls(self, layout):
        q, k, v = random(3, 2, 64), random(7, 1, 64), random(7, 1, 64, seed=9)
        out, lse = ask(layout, q, (k, v))
        for i, cached in enumerate((5, 6, 7)):
            one = ask(layout, q[[i]], (k[:cached], v[:cached]))
            close(one[0], out[[i]])
            close(one[1], lse[[i]])

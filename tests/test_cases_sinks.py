"""Sinks: a logit without a value, counted once for each row however its keys are split."""

import math

import numpy as np
import pytest

import nbattn
from nbattn.testing import PATHS, Handmade, assert_close, zero_logit_tokens
from nbattn.testing.paths import flat, paged_kv

LN2 = math.log(2)
every_path = pytest.mark.parametrize("path", PATHS.values(), ids=PATHS)


def ones(num_tokens: int, num_kv_heads: int = 1):
    return zero_logit_tokens(num_tokens, 1.0, num_kv_heads)


def sinks(*values: float) -> np.ndarray:
    return np.array(values, np.float32)


@every_path
@pytest.mark.parametrize("rows", [1, 3])
def test_s1_a_sink_takes_its_share_on_every_row(path, rows):
    out, _ = path(Handmade([ones(64)], qo_lens=(rows,), options={"sinks": sinks(5), "causal": False}))
    assert_close(out, np.full((rows, 1, 1), 64 / (64 + math.exp(5))), budget=1e-6)
    assert out[0, 0, 0] == pytest.approx(0.3013, abs=5e-5)


@every_path
def test_s2_a_sink_belongs_to_its_head(path):
    q = np.zeros((2, 2, 64), np.float32)
    out, _ = path(Handmade([ones(1)], q, (2,), {"sinks": sinks(0, math.log(9)), "causal": False}))
    assert_close(out[..., 0], np.array([[0.5, 0.1], [0.5, 0.1]]), budget=1e-6)


@every_path
@pytest.mark.parametrize("num_keys", [128, 129, 257])
def test_s3_a_sink_counts_once_however_many_blocks(path, num_keys):
    out, lse = path(Handmade([ones(num_keys)], options={"sinks": sinks(math.log(num_keys))}))
    assert_close((out, lse), (np.full((1, 1, 1), 0.5), np.full((1, 1), math.log2(2 * num_keys))), budget=4e-6)


@every_path
def test_s4_a_sink_counts_once_however_many_splits(path):
    out, lse = path(Handmade([ones(4)], options={"sinks": sinks(0)}))
    assert_close((out, lse), (np.full((1, 1, 1), 0.8), np.full((1, 1), math.log2(5))), budget=1e-6)


@every_path
def test_s5_a_sink_is_in_the_lse(path):
    values = np.array([[3.0, -8.0]])  # of the only key
    request = (np.zeros((1, 1, 64), np.float32), values[:, None].astype(np.float32))
    out, lse = path(Handmade([request], np.zeros((1, 2, 64), np.float32), None, {"sinks": sinks(0, math.log(3))}))
    assert_close(out, np.array([0.5, 0.25])[None, :, None] * values[:, None], budget=1e-6)
    assert_close(lse, np.array([[1.0, 2.0]]), budget=1e-6)


@every_path
def test_s6_a_huge_sink_leaves_nothing_and_an_absent_one_everything(path):
    out, lse = path(Handmade([ones(5)], options={"sinks": sinks(1e4)}))
    assert np.abs(out).max() < 1e-30
    assert lse[0, 0] == pytest.approx(1e4 / LN2, rel=1e-6)
    assert lse[0, 0] == pytest.approx(14426.950, abs=2e-3)
    out, lse = path(Handmade([ones(5)], options={"sinks": sinks(-np.inf)}))
    assert_close((out, lse), (np.ones((1, 1, 1)), np.full((1, 1), math.log2(5))), budget=1e-6)


@every_path
def test_s6_without_keys_the_sink_is_all_there_is(path):
    out, lse = path(Handmade([ones(0), ones(2)], options={"sinks": sinks(3.0)}))
    assert out[0].item() == 0
    assert lse[0].item() == pytest.approx(3 / LN2)
    out, lse = path(Handmade([ones(0), ones(2)], options={"sinks": sinks(-np.inf)}))
    assert (out[0].item(), lse[0].item()) == (0, -np.inf)


@every_path
def test_s7_a_sink_beside_a_window_of_one_key(path):
    values = np.arange(64.0)
    out, lse = path(Handmade([zero_logit_tokens(64, values)], options={"sinks": sinks(0), "window_left": 0}))
    assert_close((out, lse), (np.full((1, 1, 1), 0.5 * 63), np.ones((1, 1))), budget=1e-5)


@pytest.mark.parametrize("split_size", [None, 1, 3])
@pytest.mark.parametrize("base", ["2", "e"])
def test_s8_a_cascade_counts_the_sink_once(split_size, base):
    rng = np.random.default_rng(8)
    prefix, *suffixes = [tuple(rng.normal(size=(2, n, 2, 64)).astype(np.float32)) for n in (9, 3, 1)]
    joined = [tuple(np.concatenate(x) for x in zip(prefix, s, strict=True)) for s in suffixes]
    q = rng.normal(size=(3, 6, 64)).astype(np.float32)
    options = {"sinks": rng.normal(size=6).astype(np.float32), "lse_base": base}
    want = flat(Handmade(joined, q, (2, 1), options))
    levels = [
        nbattn.Level(paged_kv([prefix], 4), np.array([0, 3])),
        nbattn.Level(paged_kv(suffixes, 2), np.array([0, 2, 3]), causal=True),
    ]
    got = nbattn.cascade_attention(q, levels, split_size=split_size, return_lse=True, **options)
    assert_close(got, want, budget=2e-6)
    without = nbattn.cascade_attention(q, levels, split_size=split_size, return_lse=True, lse_base=base)
    assert np.abs(without[0] - want[0]).max() > 1e-2  # the sink matters

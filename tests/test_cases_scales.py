"""Scales, norm and rotation: applied once, in the right order, to the right side."""

import math

import numpy as np
import pytest

import nbattn
from nbattn import oracle
from nbattn.paged import attend
from nbattn.problem import Preparation
from nbattn.testing import PATHS, RANGE_PATHS, Handmade, assert_close, zero_logit_tokens
from nbattn.testing.paths import paged_kv

every_path = pytest.mark.parametrize("path", PATHS.values(), ids=PATHS)
range_paths = pytest.mark.parametrize("path", RANGE_PATHS.values(), ids=RANGE_PATHS)

SCALES = [0.5, np.float32(0.5), np.array([0.5], np.float32), np.full((1, 1), 0.5, np.float16)]


def rows(*vectors) -> np.ndarray:
    """Return vectors [D] as float32 [n, 1, D]."""
    return np.array(vectors, np.float32)[:, None]


@every_path
@pytest.mark.parametrize("k_scale", SCALES, ids=["float", "float32", "one", "one_by_one"])
def test_n1_key_and_value_scales(path, k_scale):
    request = rows([2.0], [0.0]), rows([1.0], [0.0])
    options = {"sm_scale": 1.0, "k_scale": k_scale, "v_scale": 2.0}
    out, lse = path(Handmade([request], rows([1.0]), options=options))
    assert out.item() == pytest.approx(2 * math.e / (math.e + 1), rel=1e-6)
    assert out.item() == pytest.approx(1.4621, abs=5e-5)
    assert lse.item() == pytest.approx(math.log2(math.e + 1), rel=1e-6)  # v_scale never touches it


@every_path
def test_n1_scales_of_heads_and_channels(path):
    rng = np.random.default_rng(1)
    k, v = rng.normal(size=(2, 9, 2, 64)).astype(np.float32)
    q = rng.normal(size=(2, 6, 64)).astype(np.float32)
    k_scale = rng.uniform(0.5, 2, (2, 64)).astype(np.float32)
    v_scale = rng.uniform(0.5, 2, (2, 1)).astype(np.float32)
    scaled = [(k.astype(float) * k_scale, v.astype(float) * v_scale)]
    want = oracle.attend(q, *scaled[0], row_position=[7, 8], causal=True)
    got = path(Handmade([(k, v)], q, (2,), {"k_scale": k_scale, "v_scale": v_scale}))
    assert_close(got, want, budget=4e-6)


@range_paths
def test_n1_a_key_scale_beside_rotated_keys(path):
    rng = np.random.default_rng(2)
    k, v = rng.normal(size=(2, 9, 2, 64)).astype(np.float32)
    q = rng.normal(size=(2, 6, 64)).astype(np.float32)
    k_scale = rng.uniform(0.5, 2, (2, 64)).astype(np.float32)  # of channels: does not commute with a rotation
    options = oracle.Pipeline(rope=oracle.Rope())
    want = oracle.attend(q, k.astype(float) * k_scale, v, options, row_position=[7, 8], causal=True)
    got = path(Handmade([(k, v)], q, (2,), {"k_scale": k_scale, "rope": nbattn.Rope()}))
    assert_close(got, want, budget=4e-6)


@every_path
def test_a_scale_of_zero_is_honoured(path):
    rng = np.random.default_rng(3)
    k = rng.normal(size=(5, 1, 64)).astype(np.float32)
    request = k, zero_logit_tokens(5)[1]
    out, lse = path(Handmade([request], rng.normal(size=(1, 1, 64)).astype(np.float32), options={"sm_scale": 0.0}))
    assert_close((out, lse), (np.full((1, 1, 5), 0.2), np.full((1, 1), math.log2(5))), budget=1e-6)


def prepared(q: np.ndarray, keys, values, preparation: Preparation):
    """Return attention of one row over keys by the engine's internal entry, which prepares q."""
    kv = paged_kv([(rows(*keys), rows(*values))], 4)
    level = nbattn.Level(kv, np.array([0, 1]), True)
    return attend(q, [level], sm_scale=1.0, prepare=preparation, return_lse=True)


def read_back(q: np.ndarray, preparation: Preparation) -> list[float]:
    """Return the prepared q: each logit against a unit key is one of its numbers."""
    dim = q.shape[2]
    lses = [prepared(q, [unit], [[0.0]], preparation)[1].item() for unit in np.eye(dim)]
    return [s * math.log(2) for s in lses]


def plane(*angles: float) -> np.ndarray:
    """Return angles [R/2] as a plane of two positions; the row stands at the second."""
    return np.array([[0.1] * len(angles), angles])


@pytest.mark.parametrize("lone", [True, False])
def test_n2_norm_comes_before_rotation(lone):
    angle = plane(math.pi / 2)
    how = Preparation(
        np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32), np.array([1], np.int32),
        gain=np.array([2, 1], np.float32), eps=0.0,
    )  # fmt: skip
    q = rows([1.0, 1.0])
    if lone:
        assert read_back(q, how) == pytest.approx([-1, 2], abs=1e-6)
    else:
        out, lse = prepared(q, [[1, 0], [0, 0]], [[1.0], [0.0]], how)
        assert out.item() == pytest.approx(1 / (1 + math.e), rel=1e-6)
        assert out.item() == pytest.approx(0.2689, abs=5e-5)
        assert lse.item() == pytest.approx(0.4519, abs=5e-5)


@pytest.mark.parametrize("eps", [0.0, 1e-5, 3.0])
@pytest.mark.parametrize("scale", [1.0, 1e-3])
def test_n2_eps_is_added_to_the_mean_square(eps, scale):
    q = scale * rows([1.0, -2.0, 3.0, 0.5])
    gain = np.array([1, 2, 0.5, -1], np.float32)
    x = q[0, 0].astype(float)
    want = x / math.sqrt((x**2).mean() + eps) * gain
    assert read_back(q, Preparation(gain=gain, eps=eps)) == pytest.approx(want, rel=2e-6, abs=1e-6)


def test_n3_interleaved_pairs():
    angle = plane(math.pi / 2, 0.0)
    how = Preparation(np.cos(angle), np.sin(angle), np.array([1], np.int32), interleaved=True)
    assert read_back(rows([1.0, 2.0, 3.0, 4.0]), how) == pytest.approx([-2, 1, 3, 4], abs=1e-6)


def test_n4_a_short_rotation_copies_the_tail():
    angle = plane(math.pi / 2)
    how = Preparation(np.cos(angle), np.sin(angle), np.array([1], np.int32))
    assert read_back(rows([1.0, 2.0, 3.0, 4.0]), how) == pytest.approx([-2, 1, 3, 4], abs=1e-6)


def test_n4_a_position_outside_the_planes_gives_a_nan_row():
    angle = plane(math.pi / 2)
    for position in (2, 99):
        how = Preparation(np.cos(angle), np.sin(angle), np.array([position], np.int32))
        out, lse = prepared(rows([1.0, 2.0]), [[1, 0]], [[1.0]], how)
        assert np.isnan(out).all()
        assert np.isnan(lse).all()


@range_paths
def test_n5_rope_turns_halves_and_counts_from_the_first_key(path):
    request = rows(*[[1, 1, 0, 0]] * 3), zero_logit_tokens(3)[1]
    out, lse = path(Handmade([request], request[0][:1], options={"sm_scale": 1.0, "rope": nbattn.Rope()}))
    assert_close(out, np.array([[[0.1295, 0.3369, 0.5336]]]), budget=5e-5)
    assert lse.item() == pytest.approx(3.7915, abs=5e-5)


@range_paths
def test_n5_rope_depends_on_distance_alone(path):
    rng = np.random.default_rng(5)
    k, v = rng.normal(size=(2, 9, 1, 64)).astype(np.float32)
    q = rng.normal(size=(2, 1, 64)).astype(np.float32)
    near, far = [
        path(Handmade([(k, v)], q, (2,), {"rope": nbattn.Rope(1e4, 2.0), "kv_start": np.array([start], np.int32)}))
        for start in (0, 100_000)
    ]
    assert_close(far, near, budget=5e-6)  # planes in float32 angles would be off by 0.01 at position 1e5


SLOPES = [0.25, 0.0625, 0.015625, 0.00390625, 0.5, 0.125]


def test_n6_slopes_of_six_heads():
    assert oracle.alibi_slopes(6).tolist() == SLOPES
    assert oracle.alibi_slopes(8).tolist() == [2.0**-i for i in range(1, 9)]


@range_paths
def test_n6_alibi_adds_slope_times_distance(path):
    q = np.zeros((2, 6, 64), np.float32)
    options = {"alibi_slopes": np.array(SLOPES, np.float32), "causal": False, "kv_start": np.array([5], np.int32)}
    out, lse = path(Handmade([zero_logit_tokens(3)], q, (2,), options))
    distance = np.arange(3) - np.array([1, 2])[:, None]  # key minus row: 0 on the row's own key
    bias = np.array(SLOPES)[None, :, None] * distance[:, None]
    weights = np.exp(bias)
    assert_close(out, weights / weights.sum(-1, keepdims=True), budget=1e-6)
    assert_close(lse, np.log2(weights.sum(-1)), budget=1e-6)

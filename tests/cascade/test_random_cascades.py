"""Cascades drawn at random, options together, poison in every unread place: the wrappers against their definitions."""

import numpy as np
import pytest
from level_setup import Decode, Multi, Prefill, Setup

from nbattn import oracle
from nbattn.testing import assert_close, expect

CASES = 200


def maybe(rng, value, otherwise=None):
    return value if rng.random() < 0.4 else otherwise


def random_setup(rng):
    """Return up to five levels over up to nine rows; levels may start late, end early and hold empty requests."""
    rows = int(rng.integers(1, 10))
    levels = []
    count = int(rng.integers(1, 6))
    for _ in range(count):
        batch = int(rng.integers(1, 5))
        cuts = np.sort(rng.integers(0, rows + 1, batch - 1)).tolist()
        first = maybe(rng, int(rng.integers(0, rows + 1)), 0) if count > 1 else 0
        offsets = np.clip([first, *cuts, maybe(rng, int(rng.integers(0, rows + 1)), rows)], first, None)
        lens = rng.choice([0, 1, 3, 4, 5, 9, 16, 17, 70], batch).tolist()
        levels.append((tuple(np.maximum.accumulate(offsets).tolist()), tuple(lens)))
    return Setup(
        tuple(levels),
        num_kv_heads=int(rng.integers(1, 4)),
        group_size=int(rng.choice([1, 2, 3, 5, 8])),
        head_dim=int(rng.choice([2, 8, 20, 64])),
        page_size=int(rng.choice([1, 2, 4, 7, 16])),
        seed=int(rng.integers(0, 2**31)),
    )


def random_options(rng, setup):
    """Return what plan and what run takes."""
    heads, kv_heads, dim, _ = setup.sizes
    plan = {
        "causal": bool(rng.random() < 0.5),
        "pos_encoding_mode": str(rng.choice(["NONE", "NONE", "ROPE_LLAMA", "ALIBI"])),
        "sm_scale": maybe(rng, float(rng.uniform(0, 0.5))),
        "window_left": maybe(rng, int(rng.integers(0, 40)), -1),
        "logits_soft_cap": maybe(rng, float(rng.uniform(0.3, 5))),
        "rope_scale": maybe(rng, 2.5),
        "rope_theta": maybe(rng, 500.0),
    }
    sinks = rng.normal(size=heads).astype(np.float32)
    sinks[rng.random(heads) < 0.3] = -np.inf
    run = {
        "sinks": maybe(rng, sinks),
        "k_scale": maybe(rng, rng.uniform(0.5, 1.5, (kv_heads, 1)).astype(np.float32)),
        "v_scale": maybe(rng, rng.uniform(0.5, 1.5, (kv_heads, dim)).astype(np.float32)),
        "lse_base": str(rng.choice(["2", "e"])),
    }
    return plan, run


def check_multi_level(seed):
    rng = np.random.default_rng(seed)
    setup = random_setup(rng)
    plan, run = random_options(rng, setup)
    q, cache, lists = setup.build()
    wrapper = Multi(len(setup.levels))
    wrapper.plan(*lists, *setup.sizes, **plan)
    result = wrapper.run(q, cache, return_lse=True, **run)
    assert_close(result, expect(oracle.multi_level_cascade, q, cache, *lists, **plan, **run))


def check_shared_prefix(seed):
    rng = np.random.default_rng(seed)
    batch = int(rng.integers(1, 5))
    decode = rng.random() < 0.5
    qo_lens = np.ones(batch, int) if decode else rng.integers(0, 4, batch)
    offsets = np.cumsum([0, *qo_lens]).astype(np.int32)
    lens = tuple(rng.choice([0, 1, 4, 5, 17], batch).tolist())
    shape = {"num_kv_heads": int(rng.integers(1, 3)), "group_size": int(rng.choice([1, 3, 4]))}
    setup = Setup(((tuple(offsets.tolist()), lens),), page_size=int(rng.choice([1, 4, 5])), seed=seed, **shape)
    q, cache, lists = setup.build()
    k, v = rng.normal(size=(2, int(rng.choice([0, 1, 9, 70])), *cache.shape[3:])).astype(np.float32)
    csr = [x[0] for x in lists[1:]]
    layout = str(rng.choice(["NHD", "HND"]))
    if layout == "HND":
        cache, k, v = cache.swapaxes(2, 3), k.swapaxes(0, 1), v.swapaxes(0, 1)
    run = random_options(rng, setup)[1]
    more = {} if decode else {"causal": bool(rng.random() < 0.5), "sm_scale": maybe(rng, 0.3)}
    wrapper = (Decode if decode else Prefill)(None, layout)
    wrapper.begin_forward(*(csr if decode else (offsets, *csr)), *setup.sizes)
    result = wrapper.forward_return_lse(q, k, v, cache, **more, **run)
    expected = expect(oracle.shared_prefix, q, k, v, cache, *csr, offsets, kv_layout=layout, **more, **run)
    assert_close(result, expected)


@pytest.mark.parametrize("check", [check_multi_level, check_shared_prefix])
def test_random_cases(check):
    for seed in range(CASES):
        try:
            check(seed)
        except Exception as error:
            error.add_note(f"{check.__name__}({seed})")
            raise

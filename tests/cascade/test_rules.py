"""What the multi-level wrapper refuses, by argument, level and rule."""

import numpy as np
import pytest
from level_setup import ONE, TWO, Decode, Multi, Prefill, Setup, planned

import nbattn


@pytest.mark.parametrize(
    ("kwargs", "rule"),
    [
        ({"num_levels": 0}, "num_levels: must be at least 1, got 0"),
        ({"num_levels": "2"}, "num_levels: must be an int, got '2'"),
        ({"num_levels": 1, "kv_layout": "DNH"}, 'kv_layout: must be "NHD" or "HND", got \'DNH\''),
        ({"num_levels": 1, "kv_layout": ["NHD"]}, 'kv_layout: must be "NHD" or "HND", got'),
        ({"num_levels": 1, "use_cuda_graph": np.array([True, False])}, "use_cuda_graph: must be a bool, got array"),
    ],
)
def test_bad_constructor_arguments(kwargs, rule):
    with pytest.raises(nbattn.ContractError, match=rule):
        Multi(**kwargs)
    if "kv_layout" in kwargs:
        for wrapper in (Decode, Prefill):
            with pytest.raises(nbattn.ContractError, match=rule):
                wrapper(None, kwargs["kv_layout"])


BAD_PLANS = [
    ({"num_qo_heads": 5}, r"num_qo_heads: must be a multiple of 2 \(num_kv_heads\), got 5"),
    ({"num_qo_heads": 0}, "num_qo_heads: must be at least 1, got 0"),
    ({"num_kv_heads": 0}, "num_kv_heads: must be at least 1, got 0"),
    ({"page_size": 2**70}, "page_size: must be at most 2147483647"),
    ({"causal": np.array([True, False])}, "causal: must be a bool, got array"),
    ({"pos_encoding_mode": np.array(["NONE", "ALIBI"])}, 'pos_encoding_mode: must be "NONE", "ROPE_LLAMA" or "ALIBI"'),
    ({"rope_theta": 10**400}, "rope_theta: must be at most"),
    ({"head_dim": 16.0}, r"head_dim: must be an int, got 16\.0"),
    ({"page_size": 0}, "page_size: must be at least 1, got 0"),
    ({"pos_encoding_mode": "ROPE"}, 'pos_encoding_mode: must be "NONE", "ROPE_LLAMA" or "ALIBI", got'),
    ({"pos_encoding_mode": "ROPE_LLAMA", "head_dim": 15}, "head_dim: must be even for pos_encoding_mode ROPE_LLAMA"),
    ({"sm_scale": np.nan}, "sm_scale: must be a finite number, got nan"),
    ({"window_left": 1.5}, r"window_left: must be an int, got 1\.5"),
    ({"logits_soft_cap": -1.0}, r"logits_soft_cap: must not be negative, got -1\.0"),
    ({"rope_scale": 0}, "rope_scale: must be positive, got 0"),
    ({"rope_theta": -1.0}, r"rope_theta: must be positive, got -1\.0"),
    ({"rope_scale": 1e-308}, r"rope_scale: must be at least 1\.175e-38, got 1e-308"),
    ({"causal": 1}, "causal: must be a bool, got 1"),
    ({"rope_theta": "1e4"}, "rope_theta: must be a finite number"),
    ({"q_data_type": "int8"}, "q_data_type: must be None or one of float16, bfloat16, float32, float64, got 'int8'"),
    ({"q_data_type": "torch.float16"}, "q_data_type: must be None or one of"),
    ({"kv_data_type": np.int16}, "kv_data_type: must be None or one of"),
]


@pytest.mark.parametrize(("change", "rule"), BAD_PLANS)
def test_bad_plan_options(change, rule):
    setup = Setup(TWO[0])
    names = ["num_qo_heads", "num_kv_heads", "head_dim", "page_size"]
    arguments = {**dict(zip(names, setup.sizes, strict=True)), **change}
    with pytest.raises(nbattn.ContractError, match=f"^{rule}"):
        Multi(2).plan(*setup.build()[2], **arguments)


LIST_NAMES = ["qo_indptr_arr", "paged_kv_indptr_arr", "paged_kv_indices_arr", "paged_kv_last_page_len"]


BAD_LEVELS = [  # (list, level, array, rule): TWO has one request of 4 pages above three of 3, 1 and 1
    (0, 0, [0, 5, 7], r"qo_indptr_arr\[0\]: must be \[2\] \(batch \+ 1\), got shape \(3,\)"),
    (0, 1, [0, 2, 1, 7], r"qo_indptr_arr\[1\]\[2\]: must not be below qo_indptr_arr\[1\]\[1\] = 2, got 1"),
    (0, 1, [-1, 2, 3, 7], r"qo_indptr_arr\[1\]\[0\]: must be at least 0, got -1"),
    (1, 0, [1, 4], r"paged_kv_indptr_arr\[0\]\[0\]: must be 0, got 1"),
    (1, 1, [0, 3, 2, 5], r"paged_kv_indptr_arr\[1\]\[2\]: must be at least 3 \(paged_kv_indptr_arr\[1\]\[1\]\), got 2"),
    (1, 1, [0, 3, 4, 9], r"paged_kv_indptr_arr\[1\]\[3\]: must be at most 7 \(entries of paged_kv_indices_arr\[1\]\)"),
    (1, 1, [], r"paged_kv_indptr_arr\[1\]: must hold at least the leading 0"),
    (3, 1, [1, 1], r"paged_kv_last_page_len\[1\]: must have 3 entries \(one per request of paged_kv_indptr_arr\[1\]\)"),
    (3, 1, [1, 5, 1], r"paged_kv_last_page_len\[1\]\[1\]: must be in 1\.\.4 \(page_size\), got 5 \(request 1 owns "
                      r"paged_kv_indices_arr\[1\]\[3:4\]\)"),
    (3, 0, [0], r"paged_kv_last_page_len\[0\]\[0\]: must be in 1\.\.4 \(page_size\), got 0"),
    (2, 0, [[1, 2]], r"paged_kv_indices_arr\[0\]: must have 1 dimension, got shape \(1, 2\)"),
]  # fmt: skip


@pytest.mark.parametrize(("number", "level", "array", "rule"), BAD_LEVELS)
def test_bad_tables_name_argument_level_and_request(number, level, array, rule):
    setup = Setup(TWO[0])
    lists = setup.build()[2]
    lists[number][level] = np.array(array, np.int32)
    with pytest.raises(nbattn.ContractError, match=f"^{rule}"):
        Multi(2).plan(*lists, *setup.sizes)


@pytest.mark.parametrize("number", range(4))
def test_bad_lists(number):
    setup, name = Setup(TWO[0]), LIST_NAMES[number]
    for change, rule in [
        (lambda x: x[:1], rf"{name}: must be a list of 2 arrays \(num_levels\), got 1 entries"),
        (lambda x: x[0], rf"{name}: must be a list of 2 arrays \(num_levels\), got ndarray"),
        (lambda x: [x[0], x[1].astype(np.float32)], rf"{name}\[1\]: must be int32"),
        (lambda x: [x[0].tolist(), x[1]], rf"{name}\[0\]: must be a NumPy or CuPy array, got list"),
    ]:
        lists = list(setup.build()[2])
        lists[number] = change(lists[number])
        with pytest.raises(nbattn.ContractError, match=f"^{rule}"):
            Multi(2).plan(*lists, *setup.sizes)


def test_one_level_is_paged_attention_and_starts_at_row_0():
    lists = Setup(ONE[0]).build()[2]
    lists[0][0] = np.array([1, 2, 3, 7], np.int32)
    with pytest.raises(nbattn.ContractError, match=r"^qo_indptr_arr\[0\]\[0\]: must be 0, got 1"):
        Multi(1).plan(*lists, *Setup(ONE[0]).sizes)


BAD_RUNS = [
    ("q", lambda q: q[:5], r"q: must be \[7, 6, 16\] \(rows, num_qo_heads and head_dim as planned\), got shape \[5"),
    ("q", lambda q: q[:, :4], r"q: must be \[7, 6, 16\]"),
    ("q", lambda q: q[..., :8], r"q: must be \[7, 6, 16\]"),
    ("q", lambda q: q[0], r"q: must be \[7, 6, 16\]"),
    ("q", lambda q: q.tolist(), "q: must be a NumPy or CuPy array, got list"),
    ("q", lambda q: q.astype(np.float16), r"q: must be float32 as planned \(q_data_type\), got float16"),
    ("cache", lambda c: c[:, :, :3], r"paged_kv_cache: must have pages of \[4, 2, 16\] \(NHD; page_size, num_kv_heads "
                                     r"and head_dim as planned\), got \[3, 2, 16\]\."),
    ("cache", lambda c: c.swapaxes(2, 3), r'got \[2, 4, 16\]; axes 1 and 2 look swapped: kv_layout="HND"\?'),
    ("cache", lambda c: c[:, 0], "paged_kv_cache: must be .* with 5 axes or a pair"),
    ("cache", lambda c: (c[:, 0],), "paged_kv_cache: must be a 5-D array or a pair"),
    ("cache", lambda c: (None, None), r"paged_kv_cache\[0\]: must be a NumPy or CuPy array, got NoneType"),
    ("cache", lambda c: c.astype(np.float16), r"paged_kv_cache: must be float32 as planned \(kv_data_type\), got flo"),
    ("sinks", lambda _: np.zeros(5, np.float32), r"sinks: must be \[6\] \(num_qo_heads\)"),
    ("k_scale", lambda _: np.zeros(3, np.float32), r"k_scale: must broadcast to \[2, 16\]"),
    ("out", lambda _: np.zeros((7, 6, 16)), r"out: must be float32 of shape \[7, 6, 16\]"),
    ("lse", lambda _: np.zeros((6, 7), np.float32), r"lse: must be float32 of shape \[7, 6\]"),
    ("lse_base", lambda _: "10", 'lse_base: must be "2" or "e"'),
    ("target", lambda _: "tpu", 'target: must be "cpu", "cuda" or "gpu"'),
]  # fmt: skip


@pytest.mark.parametrize(("name", "change", "rule"), BAD_RUNS)
def test_bad_run_arguments(name, change, rule):
    setup = Setup(TWO[0])
    q, cache, lists = setup.build()
    wrapper = planned(setup, lists, {"q_data_type": np.float32, "kv_data_type": "float32"})
    out = np.full_like(q, 7)
    arguments = {"q": q, "cache": cache, "out": out}
    arguments[name] = change(arguments.get(name))
    q, cache = arguments.pop("q"), arguments.pop("cache")
    with pytest.raises(nbattn.ContractError, match=rule):
        wrapper.run(q, cache, **arguments)
    assert (out == 7).all()


def test_target_only_confirms():
    setup = Setup(TWO[0])
    q, cache, lists = setup.build()
    wrapper = planned(setup, lists)
    np.testing.assert_array_equal(wrapper.run(q, cache, target="cpu"), wrapper.run(q, cache))
    with pytest.raises(nbattn.TargetError, match='"gpu" needs CuPy arrays'):
        wrapper.run(q, cache, target="gpu")

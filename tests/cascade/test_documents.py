"""The documents' own examples at fewer layers, and their signatures."""

import inspect

import numpy as np
import pytest
from level_setup import Decode, Multi, Prefill

import nbattn
from nbattn import oracle
from nbattn.testing import assert_close, expect

UNIQUE_INDPTR = np.array([0, 17, 29, 44, 48, 66, 100, 128], np.int32)


UNIQUE_LAST_PAGE_LEN = np.array([1, 7, 14, 4, 3, 1, 16], np.int32)


def half(rng, *shape):
    return rng.standard_normal(shape, np.float32).astype(np.float16)


def check_head(out, kv_head, group, q, definition):
    """Hold the query heads of one KV head to the oracle: the heads do not know of each other."""
    heads = slice(kv_head * group, (kv_head + 1) * group)
    assert_close(out[:, heads], definition(q[:, heads], slice(kv_head, kv_head + 1)))


def test_example_of_the_multi_level_wrapper():
    rng = np.random.default_rng(0)
    wrapper = Multi(2, np.empty(1024, np.uint8), "NHD")
    lists = (
        [np.array([0, 7], np.int32), np.arange(8, dtype=np.int32)],
        [np.array([0, 512], np.int32), UNIQUE_INDPTR],
        [np.arange(512, dtype=np.int32), np.arange(512, 640, dtype=np.int32)],
        [np.array([16], np.int32), UNIQUE_LAST_PAGE_LEN],
    )
    wrapper.plan(*lists, 64, 8, 128, 16)
    for layer in range(2):
        cache, q = half(rng, 640, 2, 16, 8, 128), half(rng, 7, 64, 128)
        out = wrapper.run(q, cache)
        assert (out.shape, out.dtype) == ((7, 64, 128), np.float16)
        check_head(
            out,
            3 * layer,
            8,
            q,
            lambda rows, h, c=cache: expect(oracle.multi_level_cascade, rows, c[..., h, :], *lists),
        )


def test_example_of_the_decode_wrapper():
    rng = np.random.default_rng(1)
    wrapper = Decode(np.empty(1024, np.uint8), "NHD")
    csr = UNIQUE_INDPTR, np.arange(128, dtype=np.int32), UNIQUE_LAST_PAGE_LEN
    wrapper.begin_forward(*csr, 64, 8, 128, 16, data_type=np.float16)
    cache, q = half(rng, 128, 2, 16, 8, 128), half(rng, 7, 64, 128)
    k, v = half(rng, 8192, 8, 128), half(rng, 8192, 8, 128)
    out = wrapper.forward(q, k, v, cache)
    assert out.shape == (7, 64, 128)
    check_head(
        out, 5, 8, q, lambda rows, h: expect(oracle.shared_prefix, rows, k[:, h], v[:, h], cache[..., h, :], *csr)
    )


def test_example_of_the_prefill_wrapper():
    rng = np.random.default_rng(2)
    wrapper = Prefill(np.empty(1024, np.uint8), "NHD")
    qo_indptr = np.array([0, 33, 44, 55, 66, 77, 88, 100], np.int32)
    csr = UNIQUE_INDPTR, np.arange(128, dtype=np.int32), UNIQUE_LAST_PAGE_LEN
    wrapper.begin_forward(qo_indptr, *csr, 64, 16, 128, 16)
    cache, q = half(rng, 128, 2, 16, 16, 128), half(rng, 100, 64, 128)
    k, v = half(rng, 8192, 16, 128), half(rng, 8192, 16, 128)
    out = wrapper.forward(q, k, v, cache, causal=True)
    wrapper.end_forward()
    assert out.shape == (100, 64, 128)
    rest = {"causal": True, "qo_indptr": qo_indptr}
    check_head(
        out, 7, 4, q,
        lambda rows, h: expect(oracle.shared_prefix, rows, k[:, h], v[:, h], cache[..., h, :], *csr, **rest),
    )  # fmt: skip


SIGNATURES = {
    Multi.__init__: "num_levels float_workspace_buffer kv_layout use_cuda_graph qo_indptr_buf_arr "
    "paged_kv_indptr_buf_arr paged_kv_indices_buf_arr paged_kv_last_page_len_buf_arr",
    Multi.plan: "qo_indptr_arr paged_kv_indptr_arr paged_kv_indices_arr paged_kv_last_page_len num_qo_heads "
    "num_kv_heads head_dim page_size causal pos_encoding_mode use_fp16_qk_reduction sm_scale window_left "
    "logits_soft_cap rope_scale rope_theta q_data_type kv_data_type",
    Multi.run: "q paged_kv_cache",
    Multi.reset_workspace_buffer: "float_workspace_buffer int_workspace_buffers",
    Decode.__init__: "float_workspace_buffer kv_layout",
    Decode.begin_forward: "unique_kv_indptr unique_kv_indices unique_kv_last_page_len num_qo_heads num_kv_heads "
    "head_dim page_size data_type",
    Decode.forward: "q k_shared v_shared unique_kv_cache",
    Decode.reset_workspace_buffer: "float_workspace_buffer int_workspace_buffer",
    Prefill.begin_forward: "qo_indptr paged_kv_indptr paged_kv_indices paged_kv_last_page_len num_qo_heads "
    "num_kv_heads head_dim page_size",
    Prefill.forward: "q k_shared v_shared unique_kv_cache causal use_fp16_qk_reduction sm_scale rope_scale rope_theta",
}


@pytest.mark.parametrize("function", SIGNATURES, ids=lambda f: f.__qualname__)
def test_positional_arguments_are_the_documents(function):
    parameters = list(inspect.signature(function).parameters.values())[1:]
    positional = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert positional == SIGNATURES[function].split()


def test_the_module_has_flashinfers_names():
    from nbattn import cascade

    for name in (
        "merge_state",
        "merge_state_in_place",
        "merge_states",
        *(c.__name__ for c in (Multi, Decode, Prefill)),
    ):
        assert getattr(cascade, name) is getattr(nbattn, name)
    assert callable(cascade.build_levels)

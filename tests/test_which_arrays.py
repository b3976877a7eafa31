"""Which subclasses of NumPy's array are arrays: those whose data say all, and so neither masked arrays nor matrices."""

import numpy as np
import pytest
from engine_calls import DIM, DIM_VO, HEADS, KV_HEADS, ROWS, cache, gathering, ints, paged, refuse, results, zeros

import nbattn
from nbattn import ContractError


def other_arrays(x):
    return [np.ma.array(x), *([np.matrix(x)] if x.ndim == 2 else [])]


@pytest.mark.filterwarnings("ignore:the matrix subclass:PendingDeprecationWarning")
@pytest.mark.parametrize(
    "name",
    ["q", "qo_indptr", "sinks", "attn_mask", "alibi_slopes", "k_scale", "v_scale", "kv_start", "q_positions", "out"],
)
def test_masked_arrays_and_matrices_are_no_arrays(name):
    x = {
        "q": zeros(ROWS, HEADS, DIM), "qo_indptr": ints(0, 3, 5), "sinks": zeros(HEADS), "attn_mask": zeros(3, 9),
        "alibi_slopes": zeros(HEADS), "k_scale": zeros(2, DIM), "v_scale": zeros(2, DIM_VO), "kv_start": ints(0, 0),
        "q_positions": np.arange(ROWS), "out": results()["out"],
    }[name]  # fmt: skip
    nbattn.paged_attention(**paged(**{name: x.copy()}))
    for other in other_arrays(x):
        rule = rf"{name}: must be a NumPy or CuPy array, got {type(other).__name__}\. Pass numpy\.asarray\({name}\)"
        refuse(nbattn.paged_attention, paged(**{name: other}), ContractError, rule)


def test_masked_caches_and_lists_are_no_arrays():
    k, lens = zeros(2, 9, KV_HEADS, DIM), ints(9, 8)
    for name, call in {
        "k_cache": lambda: nbattn.PagedKV.from_slots(np.ma.array(k), k, lens),
        "v_cache": lambda: nbattn.PagedKV.from_slots(k, np.ma.array(k), lens),
        "kv_lens": lambda: nbattn.PagedKV.from_slots(k, k, np.ma.array(lens)),
        "token_indices": lambda: nbattn.gather_attention(**gathering(token_indices=np.ma.zeros((ROWS, 3), np.int32))),
    }.items():
        with pytest.raises(ContractError, match=f"^{name}: must be a NumPy or CuPy array, got MaskedArray"):
            call()


ONE_ELEMENT = {  # a legal number, and what takes it
    "q_scale": (1, lambda x: over_cache(q_scale=x)),
    "max_seqlen_q": (1, lambda x: over_cache(max_seqlen_q=x)),
    "layer_idx": (1, lambda x: layered(x)),
    "page_stride": (192, lambda x: layered(1, x)),
    "request": (1, lambda x: nbattn.PagedKV.from_slots(*zeros(2, 2, 4, 1, 8), ints(4, 4)).explain(x)),
    "scale": (1, lambda x: nbattn.generic_cross_attention_kv_cache(*cross_attention(), x)),
}


def layered(layer_idx, page_stride=-1):
    return nbattn.PagedKV.from_blocks(zeros(1, 2, 3, 4, 1, 8), ints(0).reshape(1, 1), ints(4), layer_idx, page_stride)


def cross_attention():
    lengths, table = np.zeros(1, np.uint32), np.zeros((1, 1), np.uint32)
    cache = nbattn.PagedKVCollection(zeros(1, 2, 1, 4, 1, 8), lengths, table)
    return zeros(1, 1, 8), ints(0, 1), 1, ints(0, 1), cache, 0


def over_cache(**options):
    k = zeros(1, 1, 4, 8)
    return nbattn.attention_over_cache(zeros(1, 1, 8), k, k, ints(0), ints(0, 1), ints(4), **options)


@pytest.mark.filterwarnings("ignore:the matrix subclass:PendingDeprecationWarning")
@pytest.mark.parametrize("name", ONE_ELEMENT)
def test_masked_arrays_and_matrices_are_no_numbers(name):
    number, call = ONE_ELEMENT[name]
    for one in (number, np.int32(number), ints(number), np.array([[number]])):
        call(one)
    masked = [np.ma.array(number), np.ma.array([number]), np.ma.array([number], mask=[True]), np.ma.masked]
    for one in (*masked, np.matrix([[number]])):
        rule = rf"^{name}: must be a NumPy or CuPy array, got (Masked\w+|matrix)\. Pass numpy\.asarray\({name}\)\.$"
        with pytest.raises(ContractError, match=rule):
            call(one)


def test_offsets_that_are_masked_do_not_pass_for_a_plans():
    kv, q, offsets = cache(), zeros(ROWS, HEADS, DIM), ints(0, 3, 5)
    plan = nbattn.plan(kv, offsets, num_qo_heads=HEADS)
    nbattn.paged_attention(q, kv, offsets, plan=plan)
    with pytest.raises(ContractError, match=r"^qo_indptr: must be a NumPy or CuPy array, got MaskedArray"):
        nbattn.paged_attention(q, kv, np.ma.array(offsets), plan=plan)


def test_memory_maps_and_other_plain_arrays_are_served(tmp_path):
    class Plain(np.ndarray):
        pass

    lens, q = ints(9, 8), np.ones((2, HEADS, DIM), np.float32)
    k = np.random.default_rng(0).standard_normal((2, 9, KV_HEADS, DIM)).astype(np.float32)
    np.save(tmp_path / "k.npy", k)
    mapped, want = np.load(tmp_path / "k.npy", mmap_mode="r"), None
    for x, y in ((k, q), (mapped, q.view(Plain))):
        got = nbattn.paged_attention(y, nbattn.PagedKV.from_slots(x, x, lens.view(type(y))))
        want = got if want is None else want
        np.testing.assert_array_equal(got, want)

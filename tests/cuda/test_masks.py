"""Masks in the emulator: wherever their elements lie, a pair of neighbours is read as one or each by itself."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from small_problems import numbers, poisoned_cache

import nbattn
from nbattn import oracle, testing
from nbattn.arrays import dtype_from_name

DEAD, SHARED = (5, 8, 70, 75), 66  # keys that all rows drop, and one that some rows keep


def _off_by_one(mask: np.ndarray) -> np.ndarray:
    """Return the mask as a view that begins one element into its memory."""
    memory = np.zeros(mask.size + 1, mask.dtype)
    memory[1:] = mask.ravel()
    return memory[1:].reshape(mask.shape)


def _every_second(mask: np.ndarray) -> np.ndarray:
    wide = np.zeros((*mask.shape[:-1], 2 * mask.shape[-1]), mask.dtype)
    wide[..., ::2] = mask
    return wide[..., ::2]


FORMS: dict[str, Callable] = {
    "rows of odd length": lambda mask: mask,
    "rows of even length": lambda mask: np.concatenate([mask, mask[..., :1]], axis=-1),
    "an element off": _off_by_one,
    "every second element": _every_second,
    "keys first": lambda mask: np.ascontiguousarray(mask.swapaxes(-1, -2)).swapaxes(-1, -2),
    "of all rows": lambda mask: np.broadcast_to(mask[:, :, 1:2], mask.shape),
    "of all heads": lambda mask: np.broadcast_to(mask, (1, 2, *mask.shape[2:])),
    "of all keys": lambda mask: np.broadcast_to(mask[..., 2:3], mask.shape),
}
KERNELS = {  # family, head size, compute capability, dtype, rows
    "wgmma 64": ("paged_wgmma", 64, (9, 0), "bfloat16", 12),
    "wgmma 256": ("paged_wgmma", 192, (9, 0), "float16", 12),
    "prefill": ("paged_prefill", 64, (8, 0), "bfloat16", 12),
    "decode": ("paged_decode", 64, (8, 0), "float16", 2),
}
CASES = [
    ("wgmma 64", "rows of odd length", "bool", 141),
    ("wgmma 64", "rows of even length", "float32", 77),
    ("wgmma 256", "an element off", "bfloat16", 77),
    ("prefill", "keys first", "float32", 77),
    ("prefill", "rows of even length", "bool", 77),
    ("decode", "every second element", "bool", 141),
    ("decode", "rows of even length", "float16", 141),
    ("decode", "of all rows", "float32", 141),
    ("decode", "of all heads", "bool", 141),
    ("decode", "of all keys", "bfloat16", 141),
]


@pytest.mark.parametrize(("kernel", "form", "kind", "keys"), CASES)
def test_a_mask_of_any_form(kernel, form, kind, keys, lent):
    family, size, lent.compute_capability, dtype, rows = KERNELS[kernel]
    rng = np.random.default_rng(11)
    kv = poisoned_cache(rng, [keys], heads=1, dims=(size, size), dtype=dtype)
    q, indptr = numbers(rng, (rows, 2, size), dtype), np.array([0, rows], np.int32)
    keep = rng.random((1, 1, rows, keys)) > 0.3
    keep[..., DEAD] = False
    keep[..., ::2, SHARED] = False
    keep[..., 0, :] = False
    if form != "of all keys":  # there a row keeps all or nothing
        for key in DEAD:
            kv.k[kv.kv_indices[key // kv.page_size], key % kv.page_size] = np.nan
            kv.v[kv.kv_indices[key // kv.page_size], key % kv.page_size] = np.nan
        kv.v[kv.kv_indices[SHARED // kv.page_size], SHARED % kv.page_size] = np.inf
    mask = keep if kind == "bool" else np.where(keep, rng.standard_normal(keep.shape), -np.inf)
    mask = FORMS[form](mask.astype(dtype_from_name(kind)))
    options = {"attn_mask": mask, "causal": False}
    out, lse = nbattn.paged_attention(q, kv, indptr, return_lse=True, **options)
    assert {name for name, _ in lent.launched} - {"merge_states"} == {family}
    testing.assert_close((out, lse), testing.expect(oracle.paged_attention, q, kv, indptr, **options))
    if not form.startswith(("of all rows", "of all keys")):  # the first row has no key
        assert (lse[0] == -np.inf).all()
        assert (out[0] == 0).all()

"""Check tensors of another kernel against the definition: what ``validate --tensors FILE.npz`` reads.

A file holds q, a cache, its table, options and the kernel's `out` (and `lse`) under the argument names of
`nbattn.paged_attention`, or of `nbattn.gather_attention` if it has `token_indices`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import numpy as np

from nbattn import gather, oracle, paged
from nbattn.arrays import dtype_from_name, is_float
from nbattn.errors import ContractError
from nbattn.kv_cache import PagedKV
from nbattn.npz import read_npz
from nbattn.problem import ArrayOptions, Level, PlainOptions, Rope
from nbattn.testing import Comparison, compare, expect

HELP = """\
keys of FILE.npz for --tensors (as written by numpy.savez):
  q, out                                  required: [total_q, num_qo_heads, head_dim]; lse [total_q, num_qo_heads] too
  the cache, one of
    paged_kv_cache | k_cache, v_cache     with kv_indptr, kv_indices, kv_last_page_len
    k_cache, v_cache, block_table, kv_lens
    k_cache, v_cache, kv_lens             fixed rows of slots, optionally slot_ids
    kv_blocks, kv_lookup_table, kv_lens, layer_idx
  kv_layout                               "NHD" (default) or "HND"
  qo_indptr                               rows of each request; without it one each
  options of paged_attention              causal sm_scale window_left chunk_size logits_soft_cap sinks attn_mask
                                          alibi_slopes k_scale v_scale kv_start q_positions lse_base,
                                          rope_theta rope_scale (either turns rotation on)
  token_indices, counts, output_gate      make it gather_attention (sm_scale sinks k_scale v_scale lse_base)
  q_dtype, kv_dtype, out_dtype            "bfloat16", "float8_e4m3fn", ...: NumPy files hold such numbers as bytes, so
                                          save x.view(uint16) or x.view(uint8) and name the type here; lse is
                                          float32 or float64
"""

PAGED_OPTIONS = (
    "causal", "sm_scale", "window_left", "chunk_size", "logits_soft_cap", "sinks", "attn_mask", "alibi_slopes",
    "k_scale", "v_scale", "kv_start", "q_positions", "lse_base",
)  # fmt: skip
GATHER_OPTIONS = ("sm_scale", "sinks", "k_scale", "v_scale", "output_gate", "lse_base")
ROPE = ("rope_theta", "rope_scale")
CACHES = ("paged_kv_cache", "k_cache", "v_cache", "kv_blocks")
TYPED = {"q": "q_dtype", "out": "out_dtype", **dict.fromkeys(CACHES, "kv_dtype")}  # which key names whose dtype
FLOATS = ("lse", *TYPED)
FORMS = ("paged_kv_cache", "kv_blocks", "kv_indptr", "block_table", "slot_ids", "kv_layout")  # which say a cache's form
KEYS = {
    *PAGED_OPTIONS, *GATHER_OPTIONS, *ROPE, *FLOATS, *TYPED.values(), "kv_layout", "kv_indptr", "kv_indices",
    "kv_last_page_len", "block_table", "kv_lens", "slot_ids", "kv_lookup_table", "layer_idx", "qo_indptr",
    "token_indices", "counts",
}  # fmt: skip


class Tensors:
    """The arrays of a file; remembers which were used, so that a misspelt key does not pass in silence."""

    def __init__(self, arrays: dict[str, np.ndarray]):
        self.arrays, self.used = arrays, set(TYPED.values())

    def __contains__(self, name: str) -> bool:
        return name in self.arrays

    def need(self, name: str, why: str) -> Any:
        """Return an array that must be there."""
        if name not in self.arrays:
            hint = _did_you_mean(name, set(self.arrays) - KEYS)
            raise ContractError(f"{name}: must be in the file ({why}), found {', '.join(sorted(self.arrays))}.{hint}")
        return self.get(name)

    def get(self, name: str) -> Any:
        """Return an array, a number or a string, or None."""
        self.used.add(name)
        x = self.arrays.get(name)
        if x is None:
            return None
        if name in FLOATS:
            return self.floats(name, x)
        return x.item() if x.ndim == 0 else x

    def floats(self, name: str, x: np.ndarray) -> np.ndarray:
        """Return numbers that must be floats, bytes among them as the dtype that the file names."""
        key = TYPED.get(name)
        if key in self.arrays:
            dtype = dtype_from_name(str(self.arrays[key]), key)
            if x.dtype != dtype and (x.dtype.itemsize != dtype.itemsize or x.dtype.kind not in "uiV"):
                raise ContractError(f"{name}: must hold the bytes of {dtype} as {key} says, got {x.dtype}.")
            x = x.view(dtype)
        if is_float(x.dtype) or (key == "kv_dtype" and x.dtype == np.int8):
            return x
        rule = "a float dtype or int8" if key == "kv_dtype" else "a float dtype"
        hint = f"NumPy stores bfloat16 and float8 as bytes: name the type in {key}." if key else "Save it as float32."
        raise ContractError(f"{name}: must be {rule}, got {x.dtype}. {hint}")

    def options(self, names: tuple[str, ...]) -> dict[str, Any]:
        """Return those of the named options that the file has."""
        return {name: self.get(name) for name in names if name in self.arrays}

    def check_all_used(self) -> None:
        """Refuse keys that nothing has asked for."""
        surplus = sorted(set(self.arrays) - self.used)
        if surplus:
            rule = "must be a known key of this kind of file, got it beside the others."
            hint = "" if surplus[0] in KEYS else _did_you_mean(surplus[0], KEYS)
            raise ContractError(f"{surplus[0]}: {rule}{hint}")


def misspelt(held: Iterable[str], known: Iterable[str]) -> dict[str, str]:
    """Return the unknown names close to a known one that is missing, each with that one."""
    held, known = set(held), sorted(known)
    close = {name: get_close_matches(name, known, 1) for name in sorted(held.difference(known))}
    return {name: found[0] for name, found in close.items() if found and found[0] not in held}


def _did_you_mean(name: str, known: Iterable[str]) -> str:
    close = get_close_matches(name, sorted(known), 1)
    return f" Did you mean {close[0]}?" if close else ""


def cache_of(tensors: Tensors) -> PagedKV:
    """Return the file's cache."""
    for name, meant in misspelt(tensors.arrays, KEYS).items():
        if meant in FORMS:  # without which the file would be read as another form
            raise ContractError(f"{name}: must be a known key of this kind of file. Did you mean {meant}?")
    layout = tensors.get("kv_layout") or "NHD"
    if "kv_blocks" in tensors:
        why = "beside kv_blocks"
        table, lens = tensors.need("kv_lookup_table", why), tensors.need("kv_lens", why)
        return PagedKV.from_blocks(tensors.get("kv_blocks"), table, lens, tensors.need("layer_idx", why))
    pair: Any
    if "paged_kv_cache" in tensors:
        pair = tensors.get("paged_kv_cache")
    else:
        pair = tuple(tensors.need(name, "or paged_kv_cache, or kv_blocks") for name in ("k_cache", "v_cache"))
    if "kv_indptr" in tensors or "paged_kv_cache" in tensors:
        why = "a CSR page table has kv_indptr, kv_indices, kv_last_page_len"
        indptr, indices, last = (tensors.need(name, why) for name in ("kv_indptr", "kv_indices", "kv_last_page_len"))
        return PagedKV.from_page_table(pair, indptr, indices, last, layout)
    k, v = pair
    lens = tensors.need("kv_lens", "or kv_indptr, kv_indices, kv_last_page_len")
    if "block_table" in tensors:
        return PagedKV.from_block_table(k, v, tensors.get("block_table"), lens, layout)
    return PagedKV.from_slots(k, v, lens, tensors.get("slot_ids"), layout)


def check_tensors(arrays: dict[str, np.ndarray]) -> list[Comparison]:
    """Return how `out` (and `lse`) of the arrays compare with the definition.

    Raises
    ------
    ContractError
        If a key is missing or unknown, or an array breaks a rule of the operator.

    Examples
    --------
    >>> import numpy as np
    >>> ones = np.ones((1, 4, 1, 8), np.float32)
    >>> arrays = {"k_cache": ones, "v_cache": ones, "kv_lens": np.array([3]), "q": ones[:, 0], "out": ones[:, 0]}
    >>> [comparison.passed for comparison in check_tensors(arrays)]
    [True]
    """
    tensors = Tensors(arrays)
    q, kv = tensors.need("q", "the query rows"), cache_of(tensors)
    out, lse = tensors.need("out", "what the kernel returned"), tensors.get("lse")
    qo_indptr = tensors.get("qo_indptr")
    definition: Callable[..., Any] = oracle.paged_attention
    check: Callable[..., Any] = _check_paged
    args: list[Any] = [q, kv, qo_indptr]
    if "token_indices" in tensors:
        definition, check = oracle.gather_attention, gather.checked_problem
        lists = [tensors.need(name, "a gather has token_indices and counts") for name in ("token_indices", "counts")]
        args = [q, kv, *lists, qo_indptr]
        options = tensors.options(GATHER_OPTIONS)
    else:
        options = tensors.options(PAGED_OPTIONS)
        rope = tensors.options(ROPE)
        if rope:
            options["rope"] = oracle.Rope(rope.get("rope_theta", 1e4), rope.get("rope_scale", 1.0))
    tensors.check_all_used()
    check(*args, **options)  # as a call of the library: the oracle has no rules
    expected = expect(definition, *args, out_dtype=out.dtype, **options)
    results = [_same_shape("out", out, expected.out, expected.out_budget)]
    if lse is not None:
        results.append(_same_shape("lse", lse, expected.lse, expected.lse_budget))
    return results


def _same_shape(name: str, actual: np.ndarray, expected: np.ndarray, budget: float) -> Comparison:
    if actual.shape != expected.shape:
        raise ContractError(f"{name}: must have the shape {expected.shape}, got {actual.shape}.")
    return compare(actual, expected, budget, name)


def _check_paged(q: Any, kv: PagedKV, qo_indptr: Any, *, causal: Any = True, rope: Any = None, **options: Any) -> None:
    arrays = {name: options.pop(name) for name in ArrayOptions._fields if name in options}
    plain = PlainOptions(rope=None if rope is None else Rope(*rope), **options)
    paged.checked_problem(q, [Level(kv, qo_indptr, causal)], plain, ArrayOptions(**arrays))


def check_file(path: Path) -> int:
    """Check a file, print the comparisons, and return 0 if all passed, 1 if not, 2 if the file cannot be used."""
    try:
        arrays = read_npz(path)
    except ContractError as error:
        print(f"nbattn validate: {error}", file=sys.stderr)
        return 2
    try:
        results = check_tensors(arrays)
    except ValueError as error:  # a ContractError is one
        print(f"nbattn validate: {path}: {error}", file=sys.stderr)
        return 2
    for result in results:
        print(f"{result}\n  {result.share:.3f} of the budget, {'passed' if result.passed else 'FAILED'}")
    return int(any(not result.passed for result in results))

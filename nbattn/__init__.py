"""KV-cache attention in pure Python: NumPy arrays on Numba CPU kernels, CuPy arrays on Numba CUDA kernels.

Every public name is imported at its first use, so that ``import nbattn`` loads no compiler and no GPU package.

Examples
--------
>>> import numpy as np, nbattn
>>> k = v = np.zeros((1, 4, 2, 8), np.float32)  # [rows, slots, kv_heads, head_dim]
>>> kv = nbattn.PagedKV.from_slots(k, v, kv_lens=np.array([3], np.int32))
>>> nbattn.paged_attention(np.ones((1, 4, 8), np.float32), kv).shape
(1, 4, 8)
"""

from importlib import import_module
from pathlib import Path
from typing import Any

__version__ = "0.1.0"

_NAMES_OF_MODULE = {  # editors and type checkers read the same table from __init__.pyi
    "append": ["append_paged_kv_cache"],
    "cascade": [
        "BatchDecodeWithSharedPrefixPagedKVCacheWrapper",
        "BatchPrefillWithSharedPrefixPagedKVCacheWrapper",
        "MultiLevelCascadeAttentionWrapper",
    ],
    "cross_attention": ["PagedKVCollection", "generic_cross_attention_kv_cache"],
    "engine": ["plan"],
    "errors": ["ContractError", "PageTableError", "TargetError"],
    "fixed_cache": ["gqa_decode"],
    "gather": ["gather_attention"],
    "kv_cache": ["PagedKV"],
    "merging": ["merge_state", "merge_state_in_place", "merge_states"],
    "over_cache": ["attention_over_cache"],
    "paged": ["cascade_attention", "paged_attention"],
    "planning": ["Plan"],
    "problem": ["Level", "Rope"],
    "sparse_attention": ["qsa_sparse_attention"],
    "threads": ["get_num_threads", "set_num_threads"],
    "warming": ["warmup"],
}
_MODULE_OF_NAME = {name: module for module, names in _NAMES_OF_MODULE.items() for name in names}
_MODULES = ["cascade", "oracle", "testing"]

__all__ = ["__version__", *_MODULE_OF_NAME, *_MODULES]

_checkout = Path(__file__).resolve().parent.parent
if (_checkout / "pyproject.toml").is_file() and (_checkout / "cpu_ref" / "__init__.py").is_file():
    __path__.append(str(_checkout))  # in a checkout cpu_ref and cuda_kernels stand beside this folder


def __getattr__(name: str) -> Any:
    """Import a public name at its first use (PEP 562)."""
    if name in _MODULE_OF_NAME:
        value = getattr(import_module(f"nbattn.{_MODULE_OF_NAME[name]}"), name)
    elif name in _MODULES:
        value = import_module(f"nbattn.{name}")
    else:
        raise AttributeError(f"module 'nbattn' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)

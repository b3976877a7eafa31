"""Checks on real input, for a checkout: attention tensors of a model, and decode steps of a request trace."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import numpy as np

from nbattn.testing import PATHS, Comparison, Handmade, compare

CAPTURE, TRACE, TRACE_SCRIPT = "tests/data/minilm_attention.npz", "tests/data/synthetic_trace.jsonl", "trace_to_tables"
LAYERS = 6
REQUESTS_OF_A_STEP = 8
STEPS = ((4, 2, "float32"), (1, 3, "bfloat16"), (2, 5, "float16"))  # page size, levels, dtype


def checkout() -> Path | None:
    """Return the root of the repository that this package or the working directory belongs to, or None."""
    for root in (Path(__file__).resolve().parent.parent, Path.cwd()):
        if all((root / name).is_file() for name in (CAPTURE, TRACE, f"scripts/{TRACE_SCRIPT}.py")):
            return root
    return None


@dataclass(frozen=True)
class ModelCheck:
    """One layer of all-MiniLM-L6-v2 through one path; the truth is the model's own attention output."""

    root: str
    layer: int
    path: str
    op = "real model"
    q_dtype = kv_dtype = "float32"

    @property
    def id(self) -> str:
        """A readable name."""
        return f"model-layer={self.layer}-{self.path}"

    def run(self) -> list[Comparison]:
        """Compare the layer's output."""
        captured = _captured(self.root)
        q, k, v, context = (captured[name][self.layer] for name in ("q", "k", "v", "context"))
        cuts = captured["indptr"][1:-1]
        requests = list(zip(np.split(k, cuts), np.split(v, cuts), strict=True))
        out, _ = PATHS[self.path](Handmade(requests, q, np.diff(captured["indptr"]), {"causal": False}))
        logits = np.einsum("qhd,khd->hqk", q, k) / np.sqrt(q.shape[-1])
        budget = 8 * 2.0**-24 * (1 + np.abs(logits).max()) * np.abs(v).max()
        return [compare(out, context, 2 * float(budget))]  # twice: the truth is float32 as well


@dataclass(frozen=True)
class TraceCheck:
    """One decode step of a batch of requests that share prefixes, flat and as a cascade."""

    root: str
    batch: int
    page_size: int
    max_levels: int
    q_dtype: str
    op = "request trace"

    @property
    def kv_dtype(self) -> str:
        """Dtype of the cache."""
        return self.q_dtype

    @property
    def id(self) -> str:
        """A readable name."""
        return f"trace-batch={self.batch}-page_size={self.page_size}-levels={self.max_levels}-{self.q_dtype}"

    def run(self) -> list[Comparison]:
        """Compare both with the oracle over the flat tables."""
        script = _trace_script(self.root)
        requests = list(script.read_trace(Path(self.root, TRACE)))[self.batch :: len(_batches(self.root))]
        requests.sort(key=lambda request: request.hash_ids)
        tables = script.decode_tables(requests, 0.3, tokens_per_block=4, page_size=self.page_size, seed=self.batch)
        return list(script.check_step(tables, self.max_levels, head_dim=40, dtype=self.q_dtype, seed=self.batch))


def checks(root: Path) -> Iterator[ModelCheck | TraceCheck]:
    """Yield every check on the real inputs of a checkout."""
    for layer in range(LAYERS):
        for path in PATHS:
            yield ModelCheck(str(root), layer, path)
    for page_size, max_levels, dtype in STEPS:
        for batch in _batches(str(root)):
            yield TraceCheck(str(root), batch, page_size, max_levels, dtype)


@cache
def _captured(root: str) -> dict[str, np.ndarray]:
    with np.load(Path(root, CAPTURE)) as arrays:
        return {name: arrays[name] for name in ("q", "k", "v", "context", "indptr")}


@cache
def _batches(root: str) -> range:
    requests = sum(1 for line in Path(root, TRACE).read_text().splitlines() if line.strip())
    return range(-(-requests // REQUESTS_OF_A_STEP))


@cache
def _trace_script(root: str) -> ModuleType:
    import sys

    spec = spec_from_file_location(TRACE_SCRIPT, Path(root, "scripts", f"{TRACE_SCRIPT}.py"))
    if spec is None or spec.loader is None:
        raise ImportError(f"{TRACE_SCRIPT}: cannot be loaded from {root}.")
    module = module_from_spec(spec)
    sys.modules.setdefault(TRACE_SCRIPT, module)  # its dataclasses look their module up
    spec.loader.exec_module(module)
    return module

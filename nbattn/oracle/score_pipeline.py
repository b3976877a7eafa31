"""One set of rows against one explicit list of keys, in float64: the score pipeline of the library as it is defined."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

LseBase = Literal["2", "e"]
FARTHEST = 2**62  # windows and chunks beyond are alike: no position is so far from another


@dataclass(frozen=True)
class Rounding:
    """The dtypes to which a path may round on its way; None keeps float64.

    Attributes
    ----------
    q : the prepared query (after norm, rotary and the fold of ``k_scale``), as tensor and bf16-dot paths round it.
    p : the unnormalised weights ``exp(s - max)``; their sum is not rounded.
    out : the result.
    """

    q: Any = None
    p: Any = None
    out: Any = None


@dataclass
class Extremes:
    """The largest kept logit (sinks included; before and after a soft cap) and value, by magnitude, for the budget."""

    logit: float = 0.0
    value: float = 0.0

    def see(self, logits: Any, values: Any) -> None:
        """Take in two arrays; entries that are not finite are skipped."""
        logits, values = np.abs(logits), np.abs(values)
        self.logit = float(np.max(logits, initial=self.logit, where=np.isfinite(logits)))
        self.value = float(np.max(values, initial=self.value, where=np.isfinite(values)))


def rounded(x: np.ndarray, dtype: Any) -> np.ndarray:
    """Return `x` rounded to `dtype` and read back as float64 (unchanged for None)."""
    with np.errstate(all="ignore"):
        return x if dtype is None else x.astype(dtype).astype(np.float64)


def rope_planes(positions: np.ndarray, dim: int, theta: float, scale: float) -> tuple[np.ndarray, np.ndarray]:
    """Return cos and sin [positions, dim/2] of ``position * theta^(-2i/dim) / scale``."""
    frequency = theta ** (-2.0 * np.arange(dim // 2) / dim) / scale
    angle = np.asarray(positions, np.float64)[:, None] * frequency
    return np.cos(angle), np.sin(angle)


def rotate(x: np.ndarray, cos: np.ndarray, sin: np.ndarray, mode: str = "half") -> np.ndarray:
    """Rotate the first R of D of x [n, heads, D] by planes [n, R/2], in pairs (d, d + R/2) or (2d, 2d + 1)."""
    half = cos.shape[1]
    a, b = (slice(0, half), slice(half, 2 * half)) if mode == "half" else (slice(0, 2 * half, 2), slice(1, 2 * half, 2))
    cos, sin = cos[:, None], sin[:, None]  # [n, 1, R/2]
    y = x.copy()
    y[..., a] = x[..., a] * cos - x[..., b] * sin
    y[..., b] = x[..., b] * cos + x[..., a] * sin
    return y


def alibi_slopes(num_heads: int) -> np.ndarray:
    """Return the usual ALiBi slopes [num_heads], also where `num_heads` is no power of two."""
    n = 2 ** int(np.log2(num_heads))
    first = 2.0 ** (-8.0 * np.arange(1, n + 1) / n)
    return np.concatenate([first, 2.0 ** (-4.0 * np.arange(1, 2 * n, 2) / n)])[:num_heads]


def scale_of(scale: Any, num_kv_heads: int, dim: int) -> np.ndarray:
    """Return a scale (None, a number, one element, or anything that broadcasts) as [num_kv_heads, dim]."""
    scale = np.asarray(1.0 if scale is None else scale).astype(np.float64)
    return np.broadcast_to(scale.reshape(()) if scale.size == 1 else scale, (num_kv_heads, dim))


@dataclass(frozen=True)
class Pipeline:
    """The options of the score pipeline, which are the same for all rows of a call.

    Attributes
    ----------
    window_left, chunk_size : a negative window and None are off.
    rope : anything with `theta` and `scale`; rotates q and k at their positions, in half-split pairs.
    k_scale, v_scale : None, a number, one element, or broadcasting to [num_kv_heads, dim].
    sinks : [num_qo_heads], natural-log units.
    rounding, extremes : what may be rounded on the way (nothing by default), and where to note the largest magnitudes.
    """

    sm_scale: float | None = None
    window_left: int = -1
    chunk_size: int | None = None
    logits_soft_cap: float | None = None
    alibi_slopes: Any = None
    rope: Any = None
    k_scale: Any = None
    v_scale: Any = None
    sinks: Any = None
    lse_base: LseBase = "2"
    rounding: Rounding = Rounding()
    extremes: Extremes | None = None

    def sees(self, p: np.ndarray, j: np.ndarray, causal: Any) -> np.ndarray:
        """Return which keys at positions `j` [L] a row at position `p` [n, 1] sees by position alone [n, L]."""
        see = (j <= p) | ~np.asarray(causal, bool)
        if self.window_left >= 0:
            see = see & (j >= p - min(self.window_left, FARTHEST))
        if self.chunk_size:
            chunk_size = min(self.chunk_size, FARTHEST)
            see = see & (j // chunk_size == p // chunk_size)
        return see

    def prepare(self, q: np.ndarray, k: np.ndarray, p: np.ndarray, j: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return q and k scaled by k_scale, rotated and rounded, ready for their dot products."""
        k_scale = scale_of(self.k_scale, *k.shape[1:])
        if self.rope is None:  # <q, k * k_scale> = <q * k_scale, k>: a path that rounds q rounds this product
            q = q * np.repeat(k_scale, q.shape[1] // k.shape[1], axis=0)
        else:
            first = j[:1].sum()  # only distances count, and a float64 angle at position 2**30 is off by 1e-7
            q = rotate(q, *rope_planes(p - first, q.shape[2], self.rope.theta, self.rope.scale))
            k = rotate(k * k_scale, *rope_planes(j - first, k.shape[2], self.rope.theta, self.rope.scale))
        return rounded(q, self.rounding.q), k

    def logits(self, q: np.ndarray, k: np.ndarray, head: int, distance: np.ndarray) -> np.ndarray:
        """Return one head's capped and ALiBi-biased logits [n, L]; `distance` is key minus row position."""
        s = q @ k.T * (1.0 / np.sqrt(q.shape[1]) if self.sm_scale is None else float(self.sm_scale))
        if self.logits_soft_cap:
            s = self.logits_soft_cap * np.tanh(s / self.logits_soft_cap)
        return s if self.alibi_slopes is None else s + float(self.alibi_slopes[head]) * distance


def attend(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    options: Pipeline = Pipeline(),
    *,
    row_position: Any = None,
    key_position: Any = None,
    keep: Any = True,
    bias: Any = 0.0,
    causal: Any = False,
) -> tuple[np.ndarray, np.ndarray]:
    """Return out [n, num_qo_heads, head_dim_vo] and lse [n, num_qo_heads] of `n` rows over `L` keys, both float64.

    Parameters
    ----------
    q, k, v : arrays [n, num_qo_heads, head_dim], [L, num_kv_heads, head_dim], [L, num_kv_heads, head_dim_vo].
    row_position, key_position : ints [n] and [L]; None counts from 0.
    keep, bias : bool and float, broadcast to [n, num_qo_heads, L]. What is not kept may hold NaN or Inf.
    causal : bool or bool [L], the keys for which ``key_position <= row_position`` is required.
    """
    q, k, v = (np.asarray(x).astype(np.float64) for x in (q, k, v))
    n, num_qo_heads, _ = q.shape
    num_keys, num_kv_heads, head_dim_vo = v.shape
    p = np.arange(n) if row_position is None else np.asarray(row_position, np.int64)  # [n]
    j = np.arange(num_keys) if key_position is None else np.asarray(key_position, np.int64)  # [L]
    sinks = np.full(num_qo_heads, -np.inf) if options.sinks is None else np.asarray(options.sinks).astype(np.float64)
    keep = np.asarray(keep, bool) & options.sees(p[:, None], j, causal)[:, None]
    keep = np.broadcast_to(keep, (n, num_qo_heads, num_keys))
    bias = np.broadcast_to(np.asarray(bias, np.float64), keep.shape)

    out = np.empty((n, num_qo_heads, head_dim_vo))
    lse = np.empty((n, num_qo_heads))
    with np.errstate(all="ignore"):  # dropped keys may hold anything; they are selected away
        q, k = options.prepare(q, k, p, j)
        v = v * scale_of(options.v_scale, *v.shape[1:])
        for h in range(num_qo_heads):
            kv_head = h // (num_qo_heads // num_kv_heads)
            s = options.logits(q[:, h], k[:, kv_head], h, j - p[:, None]) + bias[:, h]
            s = np.where(keep[:, h], s, -np.inf)
            out[:, h], lse[:, h] = softmax_average(s, v[:, kv_head], sinks[h], options.rounding.p)
            if options.extremes is not None:
                options.extremes.see(np.append(s, sinks[h]), v[keep[:, h].any(axis=0), kv_head])
                if options.logits_soft_cap:  # the dot product was rounded before the cap made it small
                    uncapped = replace(options, logits_soft_cap=None).logits(q[:, h], k[:, kv_head], h, j - p[:, None])
                    options.extremes.see(np.where(keep[:, h], uncapped, -np.inf), 0.0)
    return rounded(out, options.rounding.out), lse / np.log(2.0) if options.lse_base == "2" else lse


def softmax_average(s: np.ndarray, v: np.ndarray, sink: float, p_dtype: Any) -> tuple[np.ndarray, np.ndarray]:
    """Return ``softmax(s) @ v`` [n, dim] and the natural-log lse [n]; a logit of -inf marks a dropped key."""
    m = np.maximum(s.max(axis=1, initial=-np.inf), sink)
    m = np.where(m == -np.inf, 0.0, m)  # nothing kept: every weight below is exp(-inf) = 0
    weight = np.exp(s - m[:, None])  # [n, L]
    d = weight.sum(axis=1) + np.exp(sink - m)
    weight = rounded(weight, p_dtype)
    finite = np.isfinite(v).all(axis=1)
    total = weight[:, finite] @ v[finite]
    for key in np.flatnonzero(~finite):  # 0 * NaN is NaN: only the rows that keep such a value may see it
        total += np.where(s[:, [key]] == -np.inf, 0.0, weight[:, [key]] * v[key])
    return total / np.where(d == 0.0, 1.0, d)[:, None], np.log(d) + m

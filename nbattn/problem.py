"""The vocabulary of a checked attention call: levels of keys, options in one form, and where results go."""

from __future__ import annotations

import math
import numbers
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from nbattn.arrays import Array, accumulator_dtype, dtype_name
from nbattn.errors import ContractError
from nbattn.kv_cache import PagedKV

FLAG_TYPES = (bool, np.bool_)
SMALLEST_ROPE = 2.0**-126  # the smallest normal float32: angles at any position stay finite


def as_float(value: Any) -> float:
    """Return a real number as a float, infinite where none is so large; NumPy compares numbers in their own range."""
    try:
        return float(value)
    except OverflowError:  # an int
        return math.inf if value > 0 else -math.inf


@dataclass(frozen=True)
class Rope:
    """Rotary position encoding inside attention: q and k are rotated in half-split pairs.

    Pair ``i`` of a head of size D turns by ``position * theta**(-2 i / D) / scale``.

    Parameters
    ----------
    theta : float
        Base of the frequencies, positive.
    scale : float
        Divides every angle, positive (position interpolation).

    Examples
    --------
    >>> Rope(theta=5e5).scale
    1.0
    """

    theta: float = 1e4
    scale: float = 1.0

    def __post_init__(self) -> None:
        for name in ("theta", "scale"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, numbers.Real) or not 0 < as_float(value) < math.inf:
                raise ContractError(f"rope.{name}: must be a positive finite number, got {value!r}.")
            if value < SMALLEST_ROPE:
                raise ContractError(f"rope.{name}: must be at least {SMALLEST_ROPE:.4g}, got {value!r}.")


@dataclass(frozen=True, eq=False)
class Level:
    """One level of a cascade: a cache, the query rows of each of its requests, and whether rows see only their past.

    Parameters
    ----------
    kv : PagedKV
        Keys and values of the level's requests.
    qo_indptr : int array, shape [batch + 1], optional
        Request b owns rows ``qo_indptr[b]`` to ``qo_indptr[b + 1]``; None is one row per request. In a cascade of
        several levels it may start above 0: rows outside get nothing from this level. More rows than keys are legal, as
        for `paged_attention`.
    causal : bool
        Keep only keys up to the row's own position. False by default here, since rows see all keys of a shared level;
        True by default of `paged_attention`.

    Examples
    --------
    >>> import numpy as np
    >>> from nbattn import Level, PagedKV
    >>> k = np.zeros((1, 8, 1, 4), np.float32)
    >>> Level(PagedKV.from_slots(k, k, np.array([8])), np.array([0, 3])).causal
    False
    """

    kv: PagedKV
    qo_indptr: Any = None  # an array in every level that was checked
    causal: bool = False


@dataclass(frozen=True, eq=False)
class Preparation:
    """What is done to q before attention: RMS norm per head, then rotation of its first ``2 * cos.shape[1]`` numbers.

    Parameters
    ----------
    cos, sin : float array, shape [positions, rotary_dim / 2], or None
        Planes whose row 0 belongs to position `origin`.
    positions : int array, shape [total_q]
        Rotary position of each row.
    interleaved : bool
        Pairs ``(2d, 2d + 1)`` instead of ``(d, d + rotary_dim / 2)``.
    gain : float array, shape [head_dim], or None
        Gain of the norm; `eps` is added to the mean square.
    """

    cos: Array | None = None
    sin: Array | None = None
    positions: Array | None = None
    origin: int = 0
    interleaved: bool = False
    gain: Array | None = None
    eps: float = 0.0


class PlainOptions(NamedTuple):
    """The options of a call as they were given, without those that may be arrays where q lies."""

    sm_scale: Any = None
    window_left: Any = -1
    chunk_size: Any = None
    logits_soft_cap: Any = None
    rope: Any = None
    kv_start: Any = None
    q_positions: Any = None
    prepare: Preparation | None = None
    split_size: Any = None
    out_dtype: Any = None
    return_lse: Any = False
    lse_base: Any = "2"
    target: Any = None


class ArrayOptions(NamedTuple):
    """The options of a call that may be arrays where q lies, as they were given."""

    sinks: Any = None
    attn_mask: Any = None
    alibi_slopes: Any = None
    k_scale: Any = None
    v_scale: Any = None


@dataclass(frozen=True, eq=False)
class Options:
    """The score options in one form: numbers where a default or None was given, arrays as they came."""

    sm_scale: float
    window_left: int = -1
    chunk_size: int = 0
    soft_cap: float = 0.0
    sinks: Array | None = None
    attn_mask: Array | None = None  # 4-D
    alibi_slopes: Array | None = None
    rope: Rope | None = None
    k_scale: Any = None  # broadcasts to [num_kv_heads, head_dim]
    v_scale: Any = None
    kv_start: np.ndarray | None = None  # int64 [batch] on the host
    q_positions: np.ndarray | None = None  # int64 [total_q] on the host
    output_gate: Array | None = None  # 3-D
    prepare: Preparation | None = None
    lse_base: str = "2"

    @property
    def arrays(self) -> tuple[Any, ...]:
        """The checked `ArrayOptions`."""
        return self.sinks, self.attn_mask, self.alibi_slopes, self.k_scale, self.v_scale


@dataclass(frozen=True, eq=False)
class Problem:
    """A checked call: everything an engine needs, nothing left to doubt."""

    target: str
    q: Array
    levels: tuple[Level, ...]  # qo_indptr as int64 host arrays
    options: Options
    out: Array
    lse: Array | None

    @cached_property
    def number(self) -> np.dtype:
        """The dtype of scores and states."""
        return accumulator_dtype(dtype_name(self.q))

    @property
    def num_qo_heads(self) -> int:
        """Query heads."""
        return self.q.shape[1]

"""The shapes that are timed: what each reads and computes at least, and the bars that it is held to."""

from __future__ import annotations

from dataclasses import dataclass, replace

from nbattn.arrays import dtype_from_name


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What all shapes have in common.

    Attributes
    ----------
    heads : (num_qo_heads, num_kv_heads)
    dtype : str
        Of the cache; queries have it too unless it is an 8-bit one, which is read with bfloat16 queries.
    limit_bar : float, optional
        Most multiples of the machine's limit.
    rival_bar : float, optional
        Least multiple of our time that the best rival should take.
    threads : int, optional
        The thread count for which the bars are meant; None is any.
    """

    heads: tuple[int, int] = (32, 8)
    head_dim: int = 128
    page_size: int = 16
    dtype: str = "bfloat16"
    layout: str = "NHD"
    hot: bool = False  # one cache that stays in the CPU's own caches, instead of cold ones in turn
    limit_bar: float | None = None
    rival_bar: float | None = None
    threads: int | None = None

    @property
    def q_dtype(self) -> str:
        """Dtype of queries and results."""
        return self.dtype if self.itemsize > 1 else "bfloat16"

    @property
    def itemsize(self) -> int:
        """Bytes of a cached number."""
        return dtype_from_name(self.dtype).itemsize

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's keys and values."""
        return 2 * self.heads[1] * self.head_dim * self.itemsize

    def query_bytes(self, rows: int) -> int:
        """Bytes of `rows` query rows and of their results."""
        return 2 * rows * self.heads[0] * self.head_dim * dtype_from_name(self.q_dtype).itemsize

    def pair_flops(self, pairs: int) -> int:
        """Floating-point operations of so many (query row, key) pairs: two dot products each."""
        return 4 * self.heads[0] * self.head_dim * pairs

    def describe(self, what: str) -> str:
        """Return `what` with heads, dtype, and whatever is not usual."""
        parts = [what, f"{self.heads[0]}/{self.heads[1]}", self.dtype]
        unusual = ((self.head_dim, 128, "d{}"), (self.page_size, 16, "page {}"), (self.layout, "NHD", "{}"))
        parts += [form.format(value) for value, usual, form in unusual if value != usual]
        return " ".join([*parts, "hot"] if self.hot else parts)


@dataclass(frozen=True, kw_only=True)
class Paged(Shape):
    """`rows` new rows of each of `batch` requests over its `keys` keys: decode if rows is 1, else prefill.

    `ruled` turns a window over half of the keys, a soft cap and sinks on; `mask` is the dtype of a mask that keeps
    four fifths of the pairs, the same for all requests and heads, or empty. Rivals are not asked for masks.
    """

    batch: int = 1
    keys: int = 4096
    rows: int = 1
    causal: bool = True
    ruled: bool = False
    mask: str = ""

    @property
    def op(self) -> str:
        """Name of the operator's family."""
        return "decode" if self.rows == 1 else "prefill"

    @property
    def name(self) -> str:
        """A readable identifier."""
        work = f"{self.batch} x {self.keys}" if self.rows == 1 else f"{self.batch} x {self.rows} on {self.keys}"
        rules = (" ruled" if self.ruled else "") + (f" {self.mask} mask" if self.mask else "")
        return self.describe(work + ("" if self.causal else " full") + rules)

    @property
    def plain(self) -> bool:
        """Whether nothing but causality stands between rows and keys: what most rivals can be asked for."""
        return not (self.ruled or self.mask)

    @property
    def window_left(self) -> int:
        """Keys to the left that a row sees; -1 is all."""
        return self.keys // 2 - 1 if self.ruled else -1

    @property
    def first_key(self) -> int:
        """First key that any row of a request keeps."""
        return max(0, self.keys - self.rows - self.window_left) if self.ruled else 0

    @property
    def bytes(self) -> int:
        """Keys, values, queries and results, each once."""
        return self.batch * (self.keys - self.first_key) * self.token_bytes + self.query_bytes(self.batch * self.rows)

    @property
    def flops(self) -> int:
        """Floating-point operations of the pairs that are kept."""
        if self.ruled:
            return self.pair_flops(self.batch * self.rows * (self.window_left + 1))
        hidden = self.rows * (self.rows - 1) // 2 if self.causal else 0
        return self.pair_flops(self.batch * (self.rows * self.keys - hidden))


@dataclass(frozen=True, kw_only=True)
class Cascade(Shape):
    """One decode row of each of `batch` requests over a shared prefix and a suffix of its own."""

    batch: int = 16
    prefix: int = 8192
    suffix: int = 256
    op: str = "cascade"

    @property
    def name(self) -> str:
        """A readable identifier."""
        return self.describe(f"{self.batch} x ({self.prefix} + {self.suffix})")

    @property
    def bytes(self) -> int:
        """Prefix and suffixes, queries and results, each once."""
        return (self.prefix + self.batch * self.suffix) * self.token_bytes + self.query_bytes(self.batch)

    @property
    def flops(self) -> int:
        """Floating-point operations of all pairs."""
        return self.pair_flops(self.batch * (self.prefix + self.suffix))


@dataclass(frozen=True, kw_only=True)
class Gather(Shape):
    """`rows` query rows of one request of `keys` keys, each over `width` of them in its own random order."""

    rows: int = 32
    width: int = 2048
    keys: int = 32768
    op: str = "gather"

    @property
    def name(self) -> str:
        """A readable identifier."""
        return self.describe(f"{self.rows} x {self.width} of {self.keys}")

    @property
    def bytes(self) -> int:
        """Every listed token of every row, queries and results."""
        return self.rows * self.width * self.token_bytes + self.query_bytes(self.rows)

    @property
    def flops(self) -> int:
        """Floating-point operations of all pairs."""
        return self.pair_flops(self.rows * self.width)


@dataclass(frozen=True, kw_only=True)
class Merge(Shape):
    """`states` states of each of `rows` rows; `pair` takes two arrays (merge_state), else one (merge_states).

    A pair `in_place` is written over its first state (merge_state_in_place).
    """

    rows: int = 256
    states: int = 2
    pair: bool = False
    in_place: bool = False
    op: str = "merge"

    @property
    def name(self) -> str:
        """A readable identifier."""
        call = ("merge_state_in_place" if self.in_place else "merge_state") if self.pair else "merge_states"
        return f"{call} {self.rows} x {self.states} {self.heads[0]} heads {self.dtype}"

    @property
    def bytes(self) -> int:
        """States read and the merged one written, with float32 sums."""
        return (self.states + 1) * self.rows * self.heads[0] * (self.head_dim * self.itemsize + 4)

    @property
    def flops(self) -> int:
        """One multiply-add of each number."""
        return 2 * self.states * self.rows * self.heads[0] * self.head_dim


def small_shapes() -> list[Shape]:
    """Return one small shape of each operator: a check that all of the benchmark works."""
    size = {"heads": (8, 2), "head_dim": 64, "dtype": "float32"}
    return [
        Paged(batch=2, keys=256, **size),
        Paged(batch=1, keys=96, rows=32, **size),
        Cascade(batch=4, prefix=128, suffix=32, **size),
        Gather(rows=4, width=64, keys=256, **size),
        Merge(rows=32, states=2, pair=True, **size),
        Merge(rows=32, states=2, pair=True, in_place=True, **size),
        Merge(rows=32, states=4, **size),
    ]


def cpu_shapes() -> list[Shape]:
    """Return the CPU's table of bars, and cascades, which have none."""
    one, two = {"threads": 1}, {"threads": 2}
    wide, half = {"dtype": "float32"}, {"dtype": "float16"}
    large, tiny = [(1, 16384), (32, 1024), (8, 16384)], [(1, 32), (1, 128), (8, 32), (8, 128)]
    return [
        Paged(batch=8, keys=4096, limit_bar=1.15, rival_bar=1.9, **two),
        Paged(batch=8, keys=4096, limit_bar=1.25, rival_bar=2.2, **one),
        *(Paged(keys=n, limit_bar=1.2, rival_bar=1.4, **two) for n in (1024, 4096)),
        *(Paged(batch=b, keys=n, limit_bar=1.15, rival_bar=1.75, **two) for b, n in large),
        Paged(batch=8, heads=(32, 4), limit_bar=1.2, rival_bar=2.0, **two),
        Paged(batch=8, heads=(32, 32), limit_bar=1.2, rival_bar=1.25, **two),
        Paged(batch=8, limit_bar=1.25, rival_bar=1.7, **half, **two),
        Paged(batch=8, limit_bar=1.2, rival_bar=1.4, **wide, **two),
        Paged(batch=8, heads=(32, 4), limit_bar=1.2, rival_bar=1.7, **wide, **two),
        Paged(batch=8, heads=(32, 32), limit_bar=1.1, rival_bar=0.9, **wide, **two),
        *(Paged(batch=b, keys=n, hot=True, rival_bar=0.9, **wide, **two) for b, n in tiny),
        Gather(limit_bar=1.25, rival_bar=4.0, **wide, **two),
        Gather(limit_bar=0.7, rival_bar=12.0, **two),
        Paged(rows=512, keys=4608, limit_bar=1.2, rival_bar=1.05, **wide, **two),
        Paged(rows=512, keys=4608, limit_bar=0.65, rival_bar=1.15, **two),
        Paged(rows=2048, keys=2048, limit_bar=1.2, rival_bar=1.05, **wide, **two),
        Merge(rows=4096, pair=True, rival_bar=4.0, **wide, **two),
        Merge(rows=4096, pair=True, in_place=True, limit_bar=1 / 0.9, **wide, **two),
        Cascade(batch=8, prefix=4096, suffix=256),
        Cascade(batch=32, prefix=4096, suffix=256),
    ]  # fmt: skip


def cpu_variations() -> list[Shape]:
    """Return the CPU's decode rows with other head sizes, pages, layout and rules: 1.3 times the bar of the limit."""
    changes = [*({"head_dim": d} for d in (64, 80, 256)), {"page_size": 1}, {"page_size": 64}, {"layout": "HND"},
               {"ruled": True}]  # fmt: skip
    rows = [s for s in cpu_shapes() if s.op == "decode" and not s.hot]
    return [replace(s, limit_bar=1.3 * s.limit_bar, rival_bar=None, **change) for s in rows for change in changes]


def gpu_shapes() -> list[Shape]:
    """Return the grid of the GPU's bars."""
    sizes = [(1, 1024), (1, 4096), (1, 16384), (1, 65536), (8, 1024), (8, 4096), (8, 16384), (32, 1024), (32, 4096),
             (32, 16384), (128, 1024), (128, 4096), (256, 1024), (256, 4096)]  # fmt: skip
    few = [(1, 4096), (8, 4096), (64, 8192), (256, 1024)]
    return [
        *(Paged(batch=b, keys=n) for b, n in sizes),
        *(Paged(batch=b, keys=n, heads=(64, 8)) for b, n in few),
        *(Paged(batch=b, keys=min(n, 4096), heads=(32, 32)) for b, n in few),
        Paged(batch=64, keys=8192, heads=(28, 4)),
        Paged(batch=64, keys=8192),
        Paged(batch=64, keys=8192, dtype="float8_e4m3fn"),
        *(Cascade(batch=b, prefix=p) for p in (1024, 8192, 32768) for b in (16, 64, 256)),
        Cascade(batch=256, prefix=32768, heads=(32, 32)),
        Cascade(batch=64, prefix=8192, suffix=128, heads=(32, 32)),
        Cascade(batch=8, prefix=4000, suffix=128, heads=(8, 1)),
        *(Merge(rows=n, states=s) for n, s in ((1, 64), (16, 64), (256, 8), (256, 64), (2048, 2), (2048, 64))),
        *(Merge(rows=n, pair=True) for n in (256, 2048, 16384)),
        *(Gather(rows=n, keys=131072, page_size=1) for n in (1, 16, 128, 1024)),
        Gather(rows=128, keys=131072, heads=(24, 2), head_dim=256, page_size=1),
        Paged(rows=8192, keys=8192),
        Paged(batch=4, rows=512, keys=4096),
        Paged(batch=16, rows=64, keys=8192),
        Paged(rows=256, keys=32768, heads=(32, 32), causal=False),
    ]


def gpu_variations() -> list[Shape]:
    """Return more GPU shapes, most of them under the bars too: fp8, head sizes, pages, HND, masks, paged gathers."""
    changes = [*({"head_dim": d} for d in (64, 256)), *({"page_size": p} for p in (1, 64)), {"layout": "HND"}]
    fp8 = [(1, 4096), (8, 4096), (32, 4096), (256, 1024)]
    return [
        *(Paged(batch=b, keys=n, dtype="float8_e4m3fn") for b, n in fp8),
        *(Paged(batch=b, keys=4096, **change) for b in (1, 64) for change in changes),
        *(Paged(batch=4, rows=512, keys=4096, mask=mask) for mask in ("bool", "float32", "float16")),
        *(Paged(batch=4, rows=512, keys=4096, mask="bool", head_dim=d) for d in (64, 256)),
        Paged(rows=8192, keys=8192, mask="bool"),
        Gather(rows=128, keys=131072, page_size=64),
    ]


def shapes_of(which: str, target: str) -> list[Shape]:
    """Return the shapes of a list of set names: small, grid, more, all."""
    sets = {
        "small": small_shapes,
        "grid": cpu_shapes if target == "cpu" else gpu_shapes,
        "more": cpu_variations if target == "cpu" else gpu_variations,
    }
    names = ["grid", "more"] if which == "all" else which.split(",")
    if unknown := [name for name in names if name not in sets]:
        raise ValueError(f"shapes: must be of {', '.join(sets)} or all, got {', '.join(unknown)}.")
    return [shape for name in names for shape in sets[name]()]

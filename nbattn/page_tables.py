"""Page tables: which pages hold the keys of each request, and every rule such a table must keep.

All four ways of writing a table end in one form, a CSR list on the host: request ``b`` may use the page ids
``kv_indices[kv_indptr[b]:kv_indptr[b + 1]]`` and reads the first ``ceil(kv_lens[b] / page_size)`` of them.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

import numpy as np

from nbattn.arrays import Array, copy_of, dtype_name, library_of, on_host, require_array, single_value
from nbattn.errors import ContractError, PageTableError

INT32_MAX = 2**31 - 1
MOST_PAGES = 2**31  # every id names a page: the page count is not known yet
MAX_NAMED = 8  # positions that a report lists for one broken rule before it only counts


class TableForm(NamedTuple):
    """How the caller wrote the table; decides which argument and position a message names."""

    ids: str  # the argument that holds page ids
    lens: str  # the argument that holds lengths
    kind: Literal["csr", "table", "slots"]
    indptr: str = "kv_indptr"  # the argument that holds a CSR list's offsets


PAGE_TABLE = TableForm("kv_indices", "kv_last_page_len", "csr")
BLOCK_TABLE = TableForm("block_table", "kv_lens", "table")
LOOKUP_TABLE = TableForm("kv_lookup_table", "kv_lens", "table")
SLOTS = TableForm("slot_ids", "kv_lens", "slots")


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class PageTable:
    """A checked snapshot of one table; its arrays on the host are read-only.

    Attributes
    ----------
    kv_indptr : numpy.ndarray, shape [batch_size + 1], int32
    kv_indices : array, shape [entries], int32, contiguous; on the device if it was given there
    kv_lens : numpy.ndarray, shape [batch_size], int32
    page_size, num_pages : int
    form : TableForm
    unmapped : bool
        Whether some id on the host is negative.
    kept : list
        Plans of calls that came without one, for the next layer's: see `nbattn.engine.kept_plans`.
    """

    kv_indptr: np.ndarray
    kv_indices: Array
    kv_lens: np.ndarray
    page_size: int
    num_pages: int
    form: TableForm
    unmapped: bool = False
    kept: list[Any] = field(default_factory=list, init=False, repr=False)

    def over(self, num_pages: int) -> PageTable:
        """Return the same table over a cache of another number of pages, which ids on the host must not pass."""
        table = replace(self, num_pages=num_pages)
        if library_of(self.kv_indices) == "numpy":
            raise_first(table.faults())
        return table

    def faults(self) -> Iterator[str]:
        """Yield one message for every broken rule, reading the page ids back from a device if need be."""
        ids = self.kv_indices if library_of(self.kv_indices) == "numpy" else self.kv_indices.get()
        return table_faults(self.kv_indptr, ids, self.kv_lens, self.page_size, self.num_pages, self.form)


def csr_table(kv_indptr: Array, kv_indices: Array, kv_last_page_len: Array, k: Array) -> PageTable:
    """Return the table of FlashInfer's three arrays over pages `k`; entries past ``kv_indptr[-1]`` are ignored."""
    return csr_table_of(kv_indptr, kv_indices, kv_last_page_len, k.shape[1], k.shape[0], library=library_of(k))


def csr_table_of(
    kv_indptr: Array,
    kv_indices: Array,
    kv_last_page_len: Array,
    page_size: int,
    num_pages: int = MOST_PAGES,
    *,
    library: str | None = None,
    form: TableForm = PAGE_TABLE,
) -> PageTable:
    """Return the same over a cache known by its sizes only; the page count may come later, by `PageTable.over`."""
    for name, x in ((form.indptr, kv_indptr), (form.lens, kv_last_page_len)):
        require_index_array(name, x, 1, library)
    indptr, last_page_len = (x.astype(np.int64) for x in on_host(kv_indptr, kv_last_page_len))
    require_index_array(form.ids, kv_indices, 1, library)
    if indptr.size == 0:
        raise PageTableError(f"{form.indptr}: must hold at least the leading 0, got an empty array.")
    pages, entries = indptr[1:] - indptr[:-1], kv_indices.shape[0]
    fewest = _fewest(pages)
    if last_page_len.size != pages.size or indptr[0] != 0 or fewest < 0 or _largest(indptr) > entries:
        raise_first(_csr_faults(indptr, kv_indices, last_page_len.size, form))
    lens = (pages - 1) * page_size + last_page_len
    if fewest == 0:
        lens[pages == 0] = 0  # whatever last_page_len says
    used = int(indptr[-1])
    ids = kv_indices if used == entries else kv_indices[:used]
    return _checked(indptr, pages, ids, lens, page_size, num_pages, form)


def block_table(table: Array, kv_lens: Array, k: Array, form: TableForm = BLOCK_TABLE) -> PageTable:
    """Return the table of a ``[batch_size, max_blocks]`` array of page ids over pages `k`."""
    require_index_array(form.ids, table, 2, library_of(k))
    lens = host_int64(form.lens, kv_lens, library_of(k))
    batch_size, max_blocks = table.shape
    if batch_size != lens.size:
        raise PageTableError(
            f"{form.ids}: must have {lens.size} rows (one per entry of {form.lens}), got {batch_size}."
        )
    indptr = np.arange(batch_size + 1, dtype=np.int64) * max_blocks
    blocks = np.full(batch_size, max_blocks)
    return _checked(indptr, blocks, table.reshape(-1), lens, k.shape[1], k.shape[0], form)


def slot_table(slot_ids: Array | None, kv_lens: Array, k: Array, form: TableForm = SLOTS) -> PageTable:
    """Return the table of a fixed cache `k`: one row of slots, here one page, per request."""
    library, rows = library_of(k), k.shape[0]
    lens = host_int64(form.lens, kv_lens, library)
    batch_size = lens.size
    if slot_ids is None:
        if batch_size > rows:
            rule = f"must have at most {rows} entries (rows of the cache)"
            raise PageTableError(f"{form.lens}: {rule}, got {batch_size}. Share rows by a block table.")
        ids = np.arange(batch_size, dtype=np.int32)
    else:
        ids = host_int64(form.ids, slot_ids, library)
        if ids.size != batch_size:
            rule = f"must have {batch_size} entries (one per entry of {form.lens})"
            raise PageTableError(f"{form.ids}: {rule}, got {ids.size}.")
    indptr, one = np.arange(batch_size + 1, dtype=np.int64), np.ones(batch_size, np.int64)
    return _checked(indptr, one, ids, lens, k.shape[1], k.shape[0], form)


def _checked(
    indptr: np.ndarray, capacity: np.ndarray, ids: Array, lens: np.ndarray, page_size: int, num_pages: int,
    form: TableForm,
) -> PageTable:  # fmt: skip
    """Return the table of offsets that are right, once its lengths and ids are; `capacity` counts each one's pages."""
    raise_first(_entry_faults(indptr, capacity, ids, lens, page_size, num_pages, form))
    kept = indptr.astype(np.int32), snapshot(ids), lens.astype(np.int32)
    for array in kept:
        if isinstance(array, np.ndarray):
            array.flags.writeable = False  # plans made for them would not notice
    unmapped = isinstance(kept[1], np.ndarray) and kept[1].size > 0 and _largest(kept[1]) > INT32_MAX
    return PageTable(*kept, page_size, num_pages, form, unmapped)


def table_faults(
    indptr: np.ndarray, ids: Array, lens: np.ndarray, page_size: int, num_pages: int, form: TableForm
) -> Iterator[str]:
    """Yield a message per broken rule; ids on a device are not looked at."""
    indptr, lens = indptr.astype(np.int64, copy=False), lens.astype(np.int64, copy=False)
    if faults := list(indptr_faults(indptr, ids.shape[0], form)):  # nobody can say which entries belong to whom
        yield from faults
        return
    yield from _entry_faults(indptr, indptr[1:] - indptr[:-1], ids, lens, page_size, num_pages, form)


def _entry_faults(
    indptr: np.ndarray, capacity: np.ndarray, ids: Array, lens: np.ndarray, page_size: int, num_pages: int,
    form: TableForm,
) -> Iterator[str]:  # fmt: skip
    """Yield a message per broken rule of lengths and ids, whose offsets are right."""
    yield from _length_faults(indptr, capacity, lens, page_size, form)
    if library_of(ids) != "numpy":
        return
    if form.kind == "slots":
        yield from _slot_faults(ids, num_pages, form.ids)
    elif ids.size and ids.max() >= num_pages:  # padding may hold anything: look closer
        used = np.clip(-(-lens // page_size), 0, capacity)
        yield from _id_faults(indptr, ids, used, page_size, num_pages, form)


def _largest(numbers: np.ndarray) -> int:
    """Return the largest of some int64, or int32, among which a negative one counts as larger than any."""
    return int(np.maximum.reduce(numbers.view(np.uint64 if numbers.itemsize == 8 else np.uint32)))


def _fewest(counts: np.ndarray) -> int:
    """Return the smallest of some counts, 0 if there are none."""
    return int(np.minimum.reduce(counts)) if counts.size else 0


def indptr_faults(indptr: np.ndarray, entries: int, form: TableForm) -> Iterator[str]:
    """Yield a message per broken rule of the offsets alone."""
    name = form.indptr
    if indptr[0] != 0:
        yield f"{name}[0]: must be 0, got {indptr[0]}."
    yield from _named(
        np.flatnonzero(indptr[1:] < indptr[:-1]),
        lambda b: f"{name}[{b + 1}]: must be at least {indptr[b]} ({name}[{b}]), got {indptr[b + 1]}.",
    )
    if indptr[-1] > entries:
        yield f"{name}[{indptr.size - 1}]: must be at most {entries} (entries of {form.ids}), got {indptr[-1]}."


def _csr_faults(indptr: np.ndarray, ids: Array, batch: int, form: TableForm) -> Iterator[str]:
    """Yield a message per broken rule of the offsets, then of how many lengths there are; the first with a hint."""
    faults = list(indptr_faults(indptr, ids.shape[0], form))
    if batch != indptr.size - 1:
        rule = f"must have {indptr.size - 1} entries (one per request of {form.indptr})"
        faults.append(f"{form.lens}: {rule}, got {batch}.")
    ids_are_offsets = library_of(ids) == "numpy" and ids.size == batch + 1
    if ids_are_offsets and not any(indptr_faults(ids.astype(np.int64), indptr.size, form)):
        faults[0] += f" {form.indptr} and {form.ids} look swapped."
    elif indptr.size == batch and indptr[0] > 0:
        faults[0] += " It has one entry per request: offsets are a 0, then the running sums of the page counts."
    yield from faults


def _length_faults(
    indptr: np.ndarray, capacity: np.ndarray, lens: np.ndarray, page_size: int, form: TableForm
) -> Iterator[str]:
    most = capacity * page_size
    spare = most - lens
    if lens.size == 0:
        return
    bound = page_size - 1 if form.kind == "csr" else 2**63 - 1  # a last page holds a key; others may be empty
    if _largest(lens) <= INT32_MAX and _largest(spare) <= bound:
        return
    least = np.where(capacity > 0, most - page_size + 1, 0) if form.kind == "csr" else 0

    def name(b: int) -> str:
        if form.kind == "csr" and capacity[b] == 0:
            return f"kv_lens[{b}]: must be 0 (request {b} owns no page), got {lens[b]}."
        if form.kind == "csr":
            last = lens[b] - (most[b] - page_size)
            owned = f"request {b} owns {form.ids}[{indptr[b]}:{indptr[b + 1]}]"
            return f"{form.lens}[{b}]: must be in 1..{page_size} (page_size), got {last} ({owned})."
        space = "slots of a row" if form.kind == "slots" else f"{capacity[b]} blocks of {page_size} in {form.ids}"
        return f"{form.lens}[{b}]: must be in 0..{most[b]} ({space}), got {lens[b]}."

    yield from _named(np.flatnonzero((lens < least) | (lens > most)), name)
    yield from _named(
        np.flatnonzero((lens > INT32_MAX) & (lens <= most)),
        lambda b: f"{form.lens}[{b}]: request {b} must have at most {INT32_MAX} keys (int32), got {lens[b]}.",
    )


def _slot_faults(ids: np.ndarray, num_rows: int, argument: str) -> Iterator[str]:
    yield from _named(
        np.flatnonzero((ids < 0) | (ids >= num_rows)),
        lambda b: f"{argument}[{b}]: must name one of {num_rows} rows of the cache, got {ids[b]}.",
    )
    order = np.argsort(ids, kind="stable")
    again = order[1:][ids[order[1:]] == ids[order[:-1]]]
    yield from _named(
        np.sort(again),
        lambda b: f"{argument}[{b}]: must differ from {argument}[{np.argmax(ids == ids[b])}], got {ids[b]} in both.",
    )


def _id_faults(
    indptr: np.ndarray, ids: np.ndarray, used: np.ndarray, page_size: int, num_pages: int, form: TableForm
) -> Iterator[str]:
    begin = np.repeat(indptr[:-1] - (np.cumsum(used) - used), used)
    entries = begin + np.arange(begin.size)  # [sum of used]: where the used page ids stand

    def name(entry: int) -> str:
        request = int(np.searchsorted(indptr, entry, side="right")) - 1
        page = entry - int(indptr[request])
        where = f"{form.ids}[{entry}]" if form.kind == "csr" else f"{form.ids}[{request}, {page}]"
        first = page * page_size
        return (
            f"{where}: must be below {num_pages} (pages of the cache), got {ids[entry]}"
            f" (request {request}, keys from {first} on). Negative ids mark unmapped pages."
        )

    yield from _named(entries[ids[entries] >= num_pages], name)


def _named(positions: np.ndarray, name: Callable[[int], str]) -> Iterator[str]:
    for position in positions[:MAX_NAMED].tolist():
        yield name(position)
    if positions.size > MAX_NAMED:
        yield f"(the last rule is broken at {positions.size - MAX_NAMED} more positions)"


def raise_first(faults: Iterator[str]) -> None:
    """Raise the first of the given messages, if there is one; the error keeps the others."""
    for message in faults:
        error = PageTableError(message)
        error.others = tuple(faults)
        raise error


def require_index_array(name: str, x: Array, ndim: int, library: str | None) -> Array:
    """Return `x` if it is an index array that may stand beside a cache of `library`."""
    where = library_of(require_array(name, x))
    if where == "cupy" and library == "numpy":
        raise ContractError(
            f"{name}: must be a NumPy array beside a NumPy cache, got a CuPy array. Copy it with cupy.asnumpy({name})."
        )
    if x.ndim != ndim:
        raise ContractError(f"{name}: must have {ndim} dimension{'s' if ndim > 1 else ''}, got shape {x.shape}.")
    dtype = dtype_name(x)
    if where == "cupy" and dtype not in ("int32", "uint32"):
        raise ContractError(f"{name}: must be int32 or uint32 on the device, got {dtype}. Use {name}.astype(int32).")
    if dtype not in ("int32", "int64", "uint32"):
        raise ContractError(f"{name}: must be int32 (int64 and uint32 are accepted on the host), got {dtype}.")
    return x


def host_int64(name: str, x: Array, library: str | None) -> np.ndarray:
    """Return a one-dimensional index array on the host as int64: one small copy if it is on the device."""
    require_index_array(name, x, 1, library)
    (host,) = on_host(x)
    return host.astype(np.int64)


def snapshot(ids: Array) -> Array:
    """Return a contiguous int32 copy of page ids where they are.

    Ids beyond int32 stand only where no key is, and stay invalid there: uint32 ones become negative.
    """
    if dtype_name(ids) == "int64":
        ids = np.clip(ids, -1, INT32_MAX)
    return copy_of(ids) if ids.dtype == np.int32 else ids.astype(np.int32, order="C")


def single_int(name: str, value: Any) -> int:
    """Return an integer that may be given as a one-element array."""
    try:
        return operator.index(single_value(name, value))
    except TypeError as error:
        raise ContractError(f"{name}: must be an integer or a one-element integer array, got {value!r}.") from error

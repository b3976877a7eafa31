"""A planned call that was checked once and comes again with other arrays of the same form: the layers of a model.

A contract looks at the *form* of an array (type, dtype, shape, strides) and never at its contents, so a call passes it
if its options equal those of one that passed and its arrays have the forms of that one's: only addresses differ.
Options that are arrays (sinks, slopes, a mask) count as such arrays where the target reads them in place, wherever they
lie: their contents may change, and another layer may bring its own. Where a target keeps a converted copy of one
instead, it gives no `Launch` and the call is not remembered. Neither is one with offsets on a device, which could only
be compared by a copy to the host.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import is_
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from nbattn.arrays import Array, Form, form_of, has_form, library_of
from nbattn.kv_cache import PagedKV
from nbattn.problem import FLAG_TYPES, ArrayOptions, Level, PlainOptions, Problem

if TYPE_CHECKING:
    from nbattn.page_tables import PageTable
    from nbattn.planning import Plan

PLAIN_VALUES = (type(None), bool, int, float, str, type, np.dtype)


class Launch(Protocol):
    """A target's side of a checked call: everything is settled but where its arrays lie."""

    address: Callable[[Array], int]
    follows_plan: bool  # lengths and page ids are read where `Plan.update` writes them

    def __call__(self, addresses: tuple[int, ...], options: tuple[int, ...] = ()) -> bool:
        """Run on the arrays at `addresses`: q, out, lse (0 if none), then K and V of every level.

        `options` are the addresses of the `ArrayOptions`, 0 where one is no array; none at all stand for no array.
        False: arrays there need another kernel, and nothing was done.
        """
        ...


class LevelForm(NamedTuple):
    """What must be equal of a level: the table itself, forms of K and V, and what `_offsets` returns."""

    table: weakref.ref[PageTable]  # the table may keep the call
    pages: tuple[Form, Form]
    causal: bool
    offsets: Any


@dataclass(eq=False, slots=True)
class RememberedCall:
    """A call that passed its contract; nothing of it changes."""

    plain: tuple[Any, ...]  # PlainOptions
    arrays: tuple[Any, ...]  # ArrayOptions, each a number, None or a form
    levels: tuple[LevelForm, ...]
    query: Form
    results: tuple[Form | None, Form | None]  # of out and lse as they were given
    shapes: tuple[Any, ...]  # out's shape and dtype, lse's dtype
    covered: bool  # every row is written
    launch: Launch

    def again(
        self, q: Array, levels: Sequence[tuple[Any, Any, Any]], plain: tuple[Any, ...], arrays: tuple[Any, ...],
        out: Any, lse: Any,
    ) -> Any:  # fmt: skip
        """Return what the call returns if it is this one again, else None: nothing was done.

        `levels` are the fields of each `Level`.
        """
        if not _equal(plain, self.plain) or len(levels) != len(self.levels):
            return None
        address = self.launch.address
        pages: list[int] = []
        for i, (table, forms, causal, offsets) in enumerate(self.levels):
            kv, qo_indptr, is_causal = levels[i]
            if type(kv) is not PagedKV or kv.table is not table() or kv.forms != forms:
                return None
            if is_causal is not causal and not (isinstance(is_causal, FLAG_TYPES) and bool(is_causal) is causal):
                return None
            if qo_indptr is not offsets and _offsets(qo_indptr) != offsets:
                return None
            pages += (address(kv.k), address(kv.v))
        return self.over(pages, q, arrays, out, lse)

    def after_update(self, tables: list[Any]) -> RememberedCall | None:
        """Return the call over the tables for which its plan was refilled, the rows being the same.

        None where more than lengths and page ids was settled: by the target, or for a mask, which has a size.
        """
        if not self.launch.follows_plan or self.arrays[_ATTN_MASK] is not None:
            return None
        levels = tuple(
            LevelForm(weakref.ref(table), *level[1:]) for level, table in zip(self.levels, tables, strict=True)
        )
        return RememberedCall(
            self.plain, self.arrays, levels, self.query, self.results, self.shapes, self.covered, self.launch
        )

    def over(self, pages: list[int], q: Array, arrays: tuple[Any, ...], out: Any, lse: Any) -> Any:
        """Run over K and V at `pages`, which have the forms of the call's, if the other arrays have theirs too."""
        launch, address = self.launch, self.launch.address
        options: tuple[int, ...] = ()
        sinks, mask, slopes, k_scale, v_scale = arrays
        if self.arrays is not _NO_ARRAYS or not sinks is mask is slopes is k_scale is v_scale is None:
            if not _equal(_forms(arrays), self.arrays):
                return None
            options = tuple(address(x) if library_of(x) else 0 for x in arrays)
        form, lse_form = self.results
        if not has_form(q, self.query) or not has_form(out, form):
            return None
        if lse is not lse_form and not has_form(lse, lse_form):
            return None
        both = self.plain[_RETURN_LSE]
        if isinstance(q, np.ndarray) and not (_writable(out) and _writable(lse)):
            return None
        if out is None or (lse is None and both):
            new, (shape, dtype, lse_dtype) = np if isinstance(q, np.ndarray) else sys.modules["cupy"], self.shapes
            if out is None:
                out = new.empty(shape, dtype) if self.covered else new.zeros(shape, dtype)
            if lse is None and both:
                lse = new.full(shape[:2], -np.inf, lse_dtype)
        if not launch((address(q), address(out), 0 if lse is None else address(lse), *pages), options):
            return None
        return (out, lse) if both else out


_RETURN_LSE = PlainOptions._fields.index("return_lse")
_ATTN_MASK = ArrayOptions._fields.index("attn_mask")
_NO_ARRAYS = ArrayOptions()


def remember(
    problem: Problem, plan: Plan, levels: Any, plain: tuple[Any, ...], arrays: tuple[Any, ...],
    results: tuple[Any, Any], launch: Launch | None,
) -> RememberedCall | None:  # fmt: skip
    """Return the call to be repeated, or None where it cannot be: see the module."""
    offsets = [_offsets(level.qo_indptr) for level in levels]
    if launch is None or "device" in offsets or not all(isinstance(x, PLAIN_VALUES) for x in plain):
        return None
    forms = tuple(
        LevelForm(weakref.ref(level.kv.table), level.kv.forms, bool(level.causal), own)
        for level, own in zip(levels, offsets, strict=True)
    )
    out, lse = (None if x is None else form_of(x) for x in results)
    shapes = problem.out.shape, problem.out.dtype, problem.number
    covered, query = plan.covers(len(problem.q)), form_of(problem.q)
    given = _NO_ARRAYS if all(x is None for x in arrays) else _forms(arrays)
    return RememberedCall(plain, given, forms, query, (out, lse), shapes, covered, launch)


@dataclass(frozen=True, eq=False, slots=True)
class RememberedRun:
    """A wrapper's run, where K and V of every level lie at fixed distances from the caches that a run brings."""

    call: RememberedCall
    values: tuple[Any, ...]  # the run's own options
    caches: tuple[Form, ...]
    places: tuple[tuple[int, int], ...]  # of K and V of each level: which cache, and how many bytes behind its address

    def again(
        self, q: Array, caches: tuple[Any, ...], values: tuple[Any, ...], arrays: tuple[Any, ...], out: Any, lse: Any
    ) -> Any:  # fmt: skip
        """Return what the run returns if it is this one again, else None: nothing was done."""
        if not _equal(values, self.values):
            return None
        if len(caches) != len(self.caches) or not all(map(has_form, caches, self.caches)):
            return None
        begins = list(map(self.call.launch.address, caches))
        return self.call.over([begins[i] + distance for i, distance in self.places], q, arrays, out, lse)


def remember_run(
    call: RememberedCall, levels: list[Level], caches: tuple[Array, ...], owners: list[int], values: tuple[Any, ...]
) -> RememberedRun:
    """Return a wrapper's run to be repeated, whose `call` was made on `levels`.

    `owners` says of K and V of each level, one after another, which of `caches` they are views of.
    """
    address = call.launch.address
    pages = [page for level in levels for page in (level.kv.k, level.kv.v)]
    places = tuple((i, address(page) - address(caches[i])) for i, page in zip(owners, pages, strict=True))
    return RememberedRun(call, values, tuple(map(form_of, caches)), places)


def _equal(given: tuple[Any, ...], mine: tuple[Any, ...]) -> bool:
    """Return whether options are equal and of the same types: 1, 1.0 and True differ; arrays are never compared."""
    if all(map(is_, given, mine)):
        return True
    return all(a is b or (type(a) is type(b) and a == b) for a, b in zip(given, mine, strict=True))


def _forms(arrays: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(x if x is None or not library_of(x) else form_of(x) for x in arrays)


def _writable(x: np.ndarray | None) -> bool:
    return x is None or bool(x.flags.writeable)


def _offsets(given: Any) -> Any:
    """Return all that offsets on the host say, None where none are given."""
    if given is None:
        return None
    on_host = type(given) is np.ndarray or library_of(given) == "numpy"
    return (given.dtype, given.shape, given.tobytes()) if on_host else "device"

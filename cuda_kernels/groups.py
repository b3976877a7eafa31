"""Kernel parameters that travel together, as named tuples: they cost nothing, the compiler takes them apart again."""

from __future__ import annotations

from typing import NamedTuple


class Item(NamedTuple):
    """A work item: rows, keys, and where they stand; see `nbattn.work_list`."""

    row_begin: int
    row_end: int
    key_begin: int
    key_end: int
    page_begin: int
    key_position: int
    key_base: int
    kv_len: int
    state: int
    causal: int


class Queries(NamedTuple):
    """Query rows and what their scores are multiplied by; see `parameters`."""

    q: int
    row: int
    head: int
    kind: int
    head_dim: int
    group_size: int
    scale: float


class Pages(NamedTuple):
    """One KV head of the cache: addresses, strides and row sizes in bytes."""

    k: int
    k_page: int
    k_slot: int
    k_bytes: int
    v: int
    v_page: int
    v_slot: int
    v_bytes: int
    num_pages: int


class Side(NamedTuple):
    """K or V of one KV head of the cache."""

    rows: int
    page: int
    slot: int
    row_bytes: int
    num_pages: int


class Table(NamedTuple):
    """Where a work item's page ids stand, and the key where it ends."""

    key_end: int
    page_begin: int
    kv_indices: int
    page_size: int


class Sides(NamedTuple):
    """Sides of a warpgroup's products: matrix descriptors, the ring of V, bits of keys that exist, rings' barriers."""

    query: int
    keys: int
    values: int
    v_tiles: int
    bits: int
    barriers: int


class Rules(NamedTuple):
    """What decides which keys a row keeps and what is added to their scores; see `parameters`."""

    row_position: int
    row_request: int
    row_index: int
    window_left: int
    chunk_size: int
    soft_cap: float
    alibi_slopes: int
    mask: int
    mask_request: int
    mask_head: int
    mask_row: int
    mask_key: int
    mask_kind: int


class Result(NamedTuple):
    """Where rows go and what is done to them once, at the end; see `parameters`."""

    num_qo_heads: int
    head_dim: int
    state_v: int
    state_s: int
    out: int
    out_row: int
    out_head: int
    out_dim: int
    out_kind: int
    lse: int
    lse_row: int
    lse_head: int
    lse_unit: float
    sinks: int
    v_scale: int
    v_unit: float
    gate: int
    gate_row: int
    gate_head: int
    gate_dim: int
    gate_kind: int

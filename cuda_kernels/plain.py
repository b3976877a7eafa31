"""Attention of one query row and head without matrix instructions: any head size, any format, float32 throughout.

A warp takes 32 keys at a time: a lane scores one key, then the lanes share the weights and each sums some dimensions.
q and the accumulators are float32 in shared memory.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

from numba.cuda import float32, int32, int64
from numba.extending import register_jitable

from nbattn.cuda_kernels import ptx
from nbattn.cuda_kernels.epilogue import EMPTY
from nbattn.cuda_kernels.formats import element_loader, load_number
from nbattn.cuda_kernels.loops import keep_rolled
from nbattn.cuda_kernels.shapes import PLAIN_WARPS
from nbattn.scoring import rotate_pair, shift, state_weight

WARPS = PLAIN_WARPS


@register_jitable
def over_warp(x, reduce):
    """Reduce over the 32 lanes."""
    for distance in (16, 8, 4, 2, 1):
        x = reduce(x, ptx.exchange_f32(x, int32(distance)))
    return x


@register_jitable
def row_bytes(head_dim):
    """Return what a row of float32 takes in shared memory, a multiple of 16; see `shapes.shared_bytes_for`."""
    return int32(((head_dim + int32(3)) & int32(-4)) << int32(2))


@register_jitable
def load_row(shared, address, kind, item_bytes, head_dim, thread):
    """Copy a query row to shared memory as float32, all threads of the block together."""
    dim = thread
    while dim < head_dim:
        ptx.shared_store_f32(shared + (dim << int32(2)), load_number(address + int64(dim) * item_bytes, kind))
        dim = int32(dim + int32(32 * WARPS))
        keep_rolled()
    ptx.sync_block()


def make_plain(cache: str) -> SimpleNamespace:
    """Return the steps for a cache format."""
    load: Callable = element_loader(cache)

    @register_jitable
    def dot(query, k_row, head_dim):
        """Return ``<q, k>`` for the lane's own key."""
        even, odd = float32(0), float32(0)
        dim = int32(0)
        while dim + int32(1) < head_dim:
            even += ptx.shared_load_f32(query + (dim << int32(2))) * load(k_row, int64(dim))
            odd += ptx.shared_load_f32(query + (dim << int32(2)) + int32(4)) * load(k_row, int64(dim) + int64(1))
            dim = int32(dim + int32(2))
        if dim < head_dim:
            even += ptx.shared_load_f32(query + (dim << int32(2))) * load(k_row, int64(dim))
        return even + odd

    @register_jitable
    def dot_rotated(query, k_row, scale_row, head_dim, cos, sin, rope_dim, position):
        """Return ``<q, rotated k>``: k times its scale, pairs ``(d, d + rope_dim / 2)`` turned by row `position`."""
        half = int32(rope_dim >> int32(1))
        at = int64(position) * int64(half) * int64(4)
        total = float32(0)
        for dim in range(half):
            c, s = ptx.load_f32(cos + at + int64(dim) * int64(4)), ptx.load_f32(sin + at + int64(dim) * int64(4))
            x, y = load(k_row, int64(dim)), load(k_row, int64(dim + half))
            if scale_row != int64(0):
                x *= ptx.load_f32(scale_row + int64(dim) * int64(4))
                y *= ptx.load_f32(scale_row + int64(dim + half) * int64(4))
            x, y = rotate_pair(x, y, c, s)
            total += ptx.shared_load_f32(query + (dim << int32(2))) * x
            total += ptx.shared_load_f32(query + ((dim + half) << int32(2))) * y
            keep_rolled()
        for dim in range(rope_dim, head_dim):
            x = load(k_row, int64(dim))
            if scale_row != int64(0):
                x *= ptx.load_f32(scale_row + int64(dim) * int64(4))
            total += ptx.shared_load_f32(query + (dim << int32(2))) * x
            keep_rolled()
        return total

    @register_jitable
    def fold(score, page, slot, m, d_lane, accumulator, lane, v, v_page, v_slot, head_dim):
        """Take 32 keys into the running softmax: each lane's score (-inf: dropped), page and slot.

        Returns the new maximum and the lane's share of the denominator.
        """
        top = ptx.maximum(m, over_warp(score, ptx.maximum))
        base = shift(top)
        alpha, weight = state_weight(m, base), state_weight(score, base)
        first = int32(0)
        while first < head_dim:
            dim = int32(first + lane)
            at = accumulator + (dim << int32(2))
            value = float32(0)
            if dim < head_dim and alpha != float32(0):
                value = alpha * ptx.shared_load_f32(at)
            for j in range(32):
                w = ptx.from_lane_f32(weight, int32(j))
                key_page, key_slot = ptx.from_lane_i32(page, int32(j)), ptx.from_lane_i32(slot, int32(j))
                if dim < head_dim and w != float32(0):  # a dropped key's value is not read
                    row = v + int64(key_page) * v_page + int64(key_slot) * v_slot
                    value += w * load(row, int64(dim))
                keep_rolled()
            if dim < head_dim:
                ptx.shared_store_f32(at, value)
            first = int32(first + int32(32))
            keep_rolled()
        return top, d_lane * alpha + weight

    return SimpleNamespace(dot=dot, dot_rotated=dot_rotated, fold=fold)


@register_jitable
def add(x, y):
    """Return ``x + y``."""
    return x + y


@register_jitable
def publish_row(m, d_lane, partials, warp, lane):
    """Lay a warp's maximum and denominator down for `write_row`."""
    total = over_warp(d_lane, add)
    if lane == int32(0):
        ptx.shared_store_2f32(partials + warp * int32(8), m, total)
    ptx.sync_block()


@register_jitable
def empty_accumulator(accumulator, head_dim, lane):
    """Set a warp's accumulator to zero; every lane touches only its own dimensions from here on."""
    dim = lane
    while dim < head_dim:
        ptx.shared_store_f32(accumulator + (dim << int32(2)), float32(0))
        dim = int32(dim + int32(32))
        keep_rolled()
    return EMPTY, float32(0)

"""Which specialisation serves a call and how large its blocks are: what host and kernels must agree on."""

from __future__ import annotations

from math import ceil
from typing import NamedTuple

from nbattn.errors import TargetError

DECODE_ROWS, PREFILL_ROWS = 16, 128  # (query row, head) pairs of one block
WARPGROUP_ROWS = 64  # of them, that four warps multiply at once
LARGEST_CLUSTER = 16  # blocks that merge what they found in one another's shared memory
PORTABLE_CLUSTER = 8  # that every device with clusters has room for
LARGEST_CLUSTERED_HEAD = 128
CLUSTERED_BYTES = 1 << 16  # of K and V for each block; with more, a cluster's uneven places cost more than a merge
TWO_BLOCKS_BYTES = 80 * 1024  # of shared memory, which a third block finds no room for
MANY_BLOCKS = 7  # of a multiprocessor, one after another
PLAIN_WARPS, PLAIN_BLOCKS = 4, 4  # of a block, of a multiprocessor
MERGE_STREAMS = 8  # of listed states; most groups of lanes that share a row
PAIR_THREADS, PAIR_BLOCKS, PAIR_TASKS = 512, 4, 1  # blocks of a multiprocessor; see merge_pair
CHUNK_BYTES = 16  # that a lane of a merge takes at a time, where rows are packed and aligned
LINE_BYTES = 128  # of the L2 cache
LARGEST_HEAD = 8192  # of the plain path: q and four accumulators fill a multiprocessor's shared memory


def head_size_class(cache_dtype: str, head_dim_qk: int, head_dim_vo: int) -> int | None:
    """Return the head size that a tile is compiled for, or None where only the plain path serves.

    Tiles take multiples of 16; they pad them in shared memory, not in what they read.
    """
    largest = max(head_dim_qk, head_dim_vo)
    if cache_dtype == "float32" or head_dim_qk % 16 or head_dim_vo % 16 or not head_dim_qk or not head_dim_vo:
        return None
    sizes = {"float16": (64, 128, 256), "bfloat16": (64, 128, 256), "float8_e4m3fn": (128, 256)}.get(
        cache_dtype, (128,)
    )
    return next((size for size in sizes if largest <= size), None)


class DecodeShape(NamedTuple):
    """Keys of a tile, warps of a block, tiles in each warp's ring, and blocks that a multiprocessor has room for."""

    keys: int
    warps: int
    stages: int
    blocks: int


def decode_shape(cache: str, head_dim: int) -> DecodeShape:
    """Return how the decode tile of a head-size class is laid out: tiles of 8 KB, or 16 KB of the widest rows."""
    row_bytes = head_dim * (2 if cache in ("float16", "bfloat16") else 1)
    if row_bytes > 256:
        return DecodeShape(16, 6, 2, 1)
    return DecodeShape(16 if row_bytes > 128 else 32, 4, 2, 3 if head_dim <= 128 else 2)


def decode_shared_bytes(head_dim: int, blocks_each: float, crowded: bool) -> int | None:
    """Return the shared memory of the decode tile for so many blocks of each multiprocessor; None is what it needs.

    More makes two blocks fill a multiprocessor: three in one place are twice as slow as one in another, which only the
    average over many waves evens out. It is `crowded` where other launches' blocks take their places too.
    """
    return TWO_BLOCKS_BYTES if head_dim <= 128 and blocks_each < MANY_BLOCKS and not crowded else None


class GatherShape(NamedTuple):
    """Warps of a block, tiles of keys in each warp's ring, and blocks of a multiprocessor."""

    warps: int
    stages: int
    blocks: int


def gather_shape(cache: str, head_dim: int) -> GatherShape:
    """Return how the gather of a head-size class is laid out: many warps, since a warp waits for its own arithmetic."""
    wide = cache in ("float16", "bfloat16")
    if head_dim > 128:
        return GatherShape(6, 2, 1) if wide else GatherShape(8, 3, 1)
    if head_dim > 64:
        return GatherShape(4, 2, 3) if wide else GatherShape(4, 3, 3)
    return GatherShape(4, 3, 4)


def paged_family(tile: str, cache: str, compute_capability: tuple[int, int]) -> str:
    """Return the kernel family that serves a tile: prefill of 16-bit caches has its own on exactly Hopper GPUs."""
    wide = cache in ("float16", "bfloat16")
    return "paged_wgmma" if tile == "prefill" and wide and compute_capability == (9, 0) else f"paged_{tile}"


def wgmma_groups(head_dim: int, full: bool, pairs: int) -> int:
    """Return the warpgroups of a block of a head-size class, for items of up to so many (row, head) pairs."""
    return 1 if pairs <= WARPGROUP_ROWS and head_dim == 128 and not full else 2


def wgmma_keys(head_dim: int, full: bool, groups: int) -> int:
    """Return the keys of a warpgroup's tile of a head-size class: as many as registers and shared memory allow."""
    return 64 if full or head_dim > 128 or groups == 1 else 128


def needs_full(cache_dtype: str, head_dim: int, tile: str, features: bool) -> bool:
    """Return whether a call runs the variant with soft cap, ALiBi and masks; rarer kernels exist in no other."""
    rare = head_dim > 128 or cache_dtype in ("float8_e5m2", "int8")
    return features or rare or (tile == "prefill" and cache_dtype == "float8_e4m3fn")


def shared_bytes_for(head_dim: int) -> int:
    """Return the dynamic shared memory of the plain path for the larger head size."""
    if head_dim > LARGEST_HEAD:
        raise TargetError(f"cuda: head sizes must be at most {LARGEST_HEAD}, got {head_dim}.")
    return 4 * (head_dim + 3 & -4) * (1 + PLAIN_WARPS) + 8 * PLAIN_WARPS


def lane_bits(head_dim: int, width: int) -> int:
    """Return log2 of the lanes whose chunks of `width` numbers cover a row of a merge."""
    return (-(-head_dim // width) - 1).bit_length()


class MergeShape(NamedTuple):
    """Threads of a block, states that a lane takes at a time, and blocks that reside on a multiprocessor."""

    threads: int
    batch: int
    blocks: int


def merge_shape(listed: bool) -> MergeShape:
    """Return how blocks of a merge are laid out, by whether its states are listed."""
    return MergeShape(256, 4, 4) if listed else MergeShape(128, 8, 6)


def merge_team(
    rows: int, head_dim: int, width: int, multiprocessors: int, num_states: int, listed: bool = False
) -> tuple[dict[str, bool], tuple[int, int, int], tuple[int, int, int]]:
    """Return a merge's constants, how its blocks are shared out and the grid.

    The second are log2 of a row's lanes, log2 of the groups of lanes that share a row's states, and 1 if blocks ask for
    their first states early, which helps where all are resident at once.

    Parameters
    ----------
    rows : int
        (row, head) pairs.
    width : int
        Numbers that a lane takes at a time.
    num_states : int
        States of every row, or most states of a row where they are `listed`.
    listed : bool
        Groups take whole streams: one each, or one group takes all. The sum's order is then the same.
    """
    listed = listed or width == 1  # one kernel serves both where memory is not packed
    threads, batch, blocks = merge_shape(listed)
    bits = min(5, lane_bits(head_dim, width))
    resident, batches = multiprocessors * blocks * threads, ceil(num_states / batch)
    if listed:
        group_bits = (max(1, min(batches, MERGE_STREAMS)) - 1).bit_length()
        waves = ceil((rows << bits + group_bits) / resident)
        if waves > max(1, batches // 2):  # then one batch after the other is faster than one wave after the other
            group_bits = 0
    elif batches <= 1 or rows << bits >= 2 * resident:
        group_bits = 0
    else:  # two blocks a multiprocessor, or four groups where each would take more than two batches
        few = max(0, (2 * threads * multiprocessors // max(1, rows << bits)).bit_length() - 1)
        group_bits = few if batches <= 2 << few else min(2, (batches - 1).bit_length())
        group_bits = min(group_bits, (threads >> bits).bit_length() - 1, MERGE_STREAMS.bit_length() - 1)
    grid = ceil(rows / (threads >> (bits + group_bits))), ceil(head_dim / (width << bits)), 1
    return {"vector": width > 1, "listed": listed}, (bits, group_bits, int(rows << bits + group_bits <= resident)), grid


def specialisations(compute_capability: tuple[int, int]) -> list[tuple[str, dict[str, str | int | bool]]]:
    """Return every specialisation that a device's calls may take, as (family, constants)."""
    found: list[tuple[str, dict[str, str | int | bool]]] = []
    for cache in ("bfloat16", "float16", "float8_e4m3fn", "float8_e5m2", "int8", "float32"):
        found += [("paged_plain", {"cache": cache}), ("gather_plain", {"cache": cache})]
        for size in (64, 128, 256):
            if head_size_class(cache, size, size) != size:
                continue
            found.append(("gather_attention", {"cache": cache, "head_dim": size}))
            for tile in ("decode", "prefill"):
                for full in sorted({needs_full(cache, size, tile, features) for features in (False, True)}):
                    family = paged_family(tile, cache, compute_capability)
                    constants: dict[str, str | int | bool] = {"cache": cache, "head_dim": size, "full": full}
                    if family != "paged_wgmma":
                        found.append((family, constants))
                        continue
                    for groups in sorted({wgmma_groups(size, full, pairs) for pairs in (1, PREFILL_ROWS)}):
                        found.append((family, {**constants, "groups": groups}))
    found += [("merge_pair", {"vector": vector}) for vector in (False, True)]
    for vector, listed in ((False, True), (True, True), (True, False)):
        found.append(("merge_states", {"vector": vector, "listed": listed}))
    found += [("append_rows", {"unit": unit}) for unit in (1, 4, 16)]
    return [*found, ("prepare_query", {})]

"""Scatter new keys and values into their pages: a warp takes one token and one KV head, and copies bytes."""

from __future__ import annotations

from numba import cuda
from numba.cuda import int32, int64
from numba.extending import register_jitable

from nbattn.cuda_kernels import ptx
from nbattn.cuda_kernels.compile import Kernel
from nbattn.cuda_kernels.rows import element
from nbattn.indexing import idiv, mapped_page, page_and_slot

WARPS = 4


def make(unit: int) -> Kernel:
    """Return the kernel that copies `unit` bytes (1, 4 or 16) at a time."""

    @register_jitable
    def copy(target, source, count, lane):
        for at in range(lane * int32(unit), count, int32(32 * unit)):
            if unit == 16:
                a, b, c, d = ptx.load_4u32(source + int64(at))
                ptx.store_4u32(target + int64(at), a, b, c, d)
            elif unit == 4:
                ptx.store_u32(target + int64(at), ptx.load_u32(source + int64(at)))
            else:
                ptx.store_u8(target + int64(at), ptx.load_u8(source + int64(at)))

    def append_rows(
        key, key_row, key_head, value, value_row, value_head, k, k_page, k_slot, k_head, v, v_page, v_slot, v_head,
        batch_indices, positions, kv_indptr, kv_lens, kv_indices, num_tokens, batch_size, num_heads, num_pages,
        page_size, key_bytes, value_bytes,
    ):  # fmt: skip
        thread = int32(cuda.threadIdx.x)
        lane = int32(thread & int32(31))
        task = int32(cuda.blockIdx.x * WARPS + (thread >> int32(5)))
        token = idiv(task, num_heads)
        head = int64(task - token * num_heads)
        if token >= num_tokens:
            return
        request, position = element(batch_indices, token), element(positions, token)
        if request < int32(0) or request >= batch_size or position < int32(0):
            return
        if position >= element(kv_lens, request):
            return
        ordinal, slot = page_and_slot(position, page_size)
        page = element(kv_indices, element(kv_indptr, request) + ordinal)
        if mapped_page(page, num_pages):
            target = k + int64(page) * k_page + int64(slot) * k_slot + head * k_head
            copy(target, key + int64(token) * key_row + head * key_head, key_bytes, lane)
            target = v + int64(page) * v_page + int64(slot) * v_slot + head * v_head
            copy(target, value + int64(token) * value_row + head * value_head, value_bytes, lane)

    return Kernel(append_rows, 32 * WARPS, 8)

"""The query side of the tensor-core tile: how a lane's part of its rows gets into registers or shared memory."""

from __future__ import annotations

from types import SimpleNamespace

from numba import cuda
from numba.cuda import float32, int32, int64, types, uint32
from numba.extending import register_jitable

from nbattn.cuda_kernels import ptx
from nbattn.cuda_kernels.formats import BF16, CACHE_FORMATS, F16, F32, unpack_bf16
from nbattn.cuda_kernels.loops import unroll_fully

SHARES = 4  # parts of a tile of 16 rows of q, each brought by a warp


@register_jitable
def over_quad(x, reduce):
    """Reduce over the four lanes that hold one row."""
    x = reduce(x, ptx.exchange_f32(x, int32(1)))
    return reduce(x, ptx.exchange_f32(x, int32(2)))


def make_query(cache: str, head_dim: int, sixteens: int, shares_query: bool, panel_rows: int) -> SimpleNamespace:
    """Return the steps by which q is loaded and read; the parameters are those of `tile.make_tile`."""
    form = CACHE_FORMATS[cache]
    pack, WIDEN, HALF = form.pack, form.item_bytes == 1, form.multiply is ptx.multiply_f16
    OWN_KIND = F16 if HALF else BF16
    Q_SHARED = shares_query or panel_rows or head_dim * sixteens > 128  # the accumulators leave no registers for q
    STEPS = head_dim // 16
    PAIRS = 2 * STEPS  # of neighbouring numbers, that a lane holds of a row of q
    SHARE = PAIRS // SHARES

    @register_jitable
    def first_dim(step, half, c):
        """First of the two dimensions of q that half `half` of a lane's fragment holds."""
        if WIDEN:
            return int32(step * 16) + int32(4) * c + int32(2 * half)
        return int32(step * 16) + int32(2) * c + int32(8 * half)

    @register_jitable
    def load_words(words, address, head_dim, c):
        """Load the lane's pairs of a row of q of 16-bit numbers; all loads are under way at once."""
        for i in range(PAIRS):
            dim = first_dim(i // 2, i % 2, c)
            words[i] = ptx.load_u32_if(address + int64(dim) * int64(2), int32(dim < head_dim))

    @register_jitable
    def round_query(words, address, kind, head_dim, c):
        """Load a row of q of another format and round it to the tile's; return what it has been divided by.

        float16 has a short range: its rows are divided by the power of two above their largest number.
        """
        x, y = cuda.local.array(PAIRS, types.float32), cuda.local.array(PAIRS, types.float32)
        if kind == F32:
            for i in range(PAIRS):
                dim = first_dim(i // 2, i % 2, c)
                x[i], y[i] = ptx.load_2f32_if(address + int64(dim) * int64(4), int32(dim < head_dim))
        else:
            load_words(words, address, head_dim, c)
            if kind == BF16:
                for i in range(PAIRS):
                    x[i], y[i] = unpack_bf16(words[i])
            else:
                for i in range(PAIRS):
                    x[i], y[i] = ptx.unpack_f16(words[i])
        top = float32(0)
        for i in range(PAIRS):
            top = ptx.maximum(top, ptx.maximum(abs(x[i]), abs(y[i])))
        unit = inverse = float32(1)
        if HALF:
            exponent = ptx.float_bits(over_quad(top, ptx.maximum)) & uint32(0x7F800000)
            exponent = min(max(exponent, uint32(0x10000000)), uint32(0x6F000000))  # its inverse is a number too
            unit, inverse = ptx.bits_float(exponent), ptx.bits_float(uint32(0x7F000000) - exponent)
        for i in range(PAIRS):
            words[i] = pack(x[i] * inverse, y[i] * inverse)
        return unit

    @register_jitable
    def load_query(q, address, i, kind, head_dim, lane, writes):
        """Load the lane's row number i into `q`; return what scores are to be multiplied by.

        `q` is a local array, or, where head sizes leave no registers, the address of ``[steps, sixteens, 32, 4]``
        words, which a warp fills if it `writes`.
        """
        c = lane & int32(3)
        words = cuda.local.array(PAIRS, types.uint32)
        unit = float32(1)
        if kind == OWN_KIND:
            load_words(words, address, head_dim, c)
        else:
            unit = round_query(words, address, kind, head_dim, c)
        for j in range(PAIRS):
            word, place = 2 * (j % 2) + i % 2, j // 2 * sixteens + i // 2
            if panel_rows:
                row = (lane >> int32(2)) + int32(8 * i)
                at = q + int32(128 * panel_rows * (j // 8)) + row * int32(128) + int32(4) * c
                ptx.shared_store_u32(at + ((int32(j % 8) ^ (row & int32(7))) << int32(4)), words[j])
            elif Q_SHARED:
                if writes:
                    ptx.shared_store_u32(q + int32(512 * place + 4 * word) + (lane << int32(4)), words[j])
            else:
                q[4 * place + word] = words[j]
        return unit

    @register_jitable
    def read_query_share(words, address, i, kind, head_dim, lane, warp):
        """Start loading the warp's share of the lane's row number i, if it has the tile's format."""
        if kind == OWN_KIND:
            for j in range(SHARE):
                dim = first_dim(j // 2, j % 2, lane & int32(3)) + warp * int32(8 * SHARE)
                words[SHARE * i + j] = ptx.load_u32_if(address + int64(dim) * int64(2), int32(dim < head_dim))
                unroll_fully()

    @register_jitable
    def put_query_share(q, words, address, i, kind, head_dim, lane, warp):
        """Lay down in shared memory what `read_query_share` has read, or the whole row; return as `load_query` does."""
        if kind != OWN_KIND:
            return load_query(q, address, i, kind, head_dim, lane, warp == int32(0))
        at = q + warp * int32(256 * SHARE) + (lane << int32(4))
        if warp < int32(SHARES):
            for j in range(SHARE):
                ptx.shared_store_u32(at + int32(512 * (j // 2) + 4 * (2 * (j % 2) + i)), words[SHARE * i + j])
                unroll_fully()
        return float32(1)

    @register_jitable
    def query_words(q, step, t, lane):
        """Return the lane's fragment of q of 16 rows and one step of 16 dimensions."""
        place = step * sixteens + t
        if Q_SHARED:
            return ptx.shared_load_4u32(q + int32(512 * place) + (lane << int32(4)))
        return q[4 * place], q[4 * place + 1], q[4 * place + 2], q[4 * place + 3]

    return SimpleNamespace(
        Q_SHARED=Q_SHARED,
        Q_WORDS=1 if Q_SHARED else 4 * STEPS * sixteens,
        Q_BYTES=512 * STEPS * sixteens if Q_SHARED else 0,
        SHARE=SHARE,
        load_query=load_query,
        read_query_share=read_query_share,
        put_query_share=put_query_share,
        query_words=query_words,
    )

"""The tensor-core tile: 16 or 32 query rows against 16 or more keys, held by one warp.

A warp's lane number is ``4 r + c``. Of every 16x8 result it holds rows r and r + 8, columns 2c and 2c + 1, as four
float32 ``[row r: 2c, 2c + 1, row r + 8: 2c, 2c + 1]``; scores `s` and accumulator `o` are such results side by side,
those of rows 16 to 31 after those of rows 0 to 15. What a lane keeps per row is ordered r, r + 8, r + 16, r + 24.
The tile's rows are (query row, query head) pairs of one KV head, so that a group's heads share the keys they read.

Rows of K and V lie in shared memory as 16-byte chunks, chunk j of row i at place ``j ^ (i % 8)``: no bank conflicts.
8-bit caches are widened to float16 on their way from there. One `ldmatrix` then gives a lane four neighbouring numbers
where it gives two 16-bit ones, so the order of the dimensions inside a step of 16 differs: see `out_dim`, `tile_query`.
"""

from __future__ import annotations

from types import SimpleNamespace

from numba import cuda
from numba.cuda import float32, int32, types, uint32
from numba.extending import register_jitable

from nbattn.cuda_kernels import ptx
from nbattn.cuda_kernels.formats import CACHE_FORMATS
from nbattn.cuda_kernels.loops import keep_rolled, unroll_fully
from nbattn.cuda_kernels.tile_copies import make_copies
from nbattn.cuda_kernels.tile_query import make_query, over_quad
from nbattn.scoring import shift, state_weight


@register_jitable
def add(x, y):
    """Return ``x + y``."""
    return x + y


def make_tile(
    cache: str,
    head_dim: int,
    keys: int,
    fetched: int = 16,
    sixteens: int = 1,
    shares_query: bool = False,
    panel_rows: int = 0,
) -> SimpleNamespace:
    """Return the tile's steps for a cache format, a head-size class and a number of keys, a multiple of 16.

    Parameters
    ----------
    cache : str
        Key of `CACHE_FORMATS`, 8 or 16 bits.
    head_dim : int
        The class: both head sizes are run-time values up to it; what is missing reads as zero.
    keys : int
        Keys that one round of the softmax handles.
    fetched : int
        Keys that a warp brings at once: 8, 16 or 32.
    sixteens : int
        Query rows over 16.
    shares_query : bool
        Keep q in shared memory, for several warps, also where registers would hold it.
    panel_rows : int
        0, or the query rows of a block whose q, K and V lie in shared memory in the panels of `warpgroup`.
    """
    form = CACHE_FORMATS[cache]
    pack, unpack, widen, multiply = form.pack, form.unpack, form.widen, form.multiply
    WIDEN, HALF = form.item_bytes == 1, form.multiply is ptx.multiply_f16
    K_ROW = V_ROW = head_dim * form.item_bytes
    ITEM = form.item_bytes
    KEY_ROW, PANEL = (128, 128 * keys) if panel_rows else (K_ROW, 128)  # bytes between rows and between 128-byte pieces
    S_ROWS, O_ROWS, ROWS = 2 * keys // 4, head_dim // 2, 2 * sixteens  # numbers of 16 rows, rows of a lane
    GROUPS, OUT_TILES = keys // 16, head_dim // 8
    PROBED = keys * V_ROW // (2048 if panel_rows else 512)  # turns of a warp; those of a warpgroup share a tile
    query = make_query(cache, head_dim, sixteens, shares_query, panel_rows)
    query_words = query.query_words
    PROBE_BITS, PROBE_ADD, PROBE_HIT = (uint32(x) for x in form.probe)

    @register_jitable
    def out_dim(tile, e, c):
        """Output dimension of column ``2c + e`` of result `tile`."""
        if WIDEN:
            return int32((tile // 2) * 16 + tile % 2 + 2 * e) + int32(4) * c
        return int32(tile * 8 + e) + int32(2) * c

    @register_jitable
    def accumulate(c, i, a, b0, b1):
        """``c[i:i+4] += a @ (b0, b1)``, one 16x8 result."""
        c[i], c[i + 1], c[i + 2], c[i + 3] = multiply(
            a[0], a[1], a[2], a[3], b0, b1, c[i], c[i + 1], c[i + 2], c[i + 3]
        )

    @register_jitable
    def multiply_keys(q, s, k_tile, lane):
        """``s = q @ k.T`` for all keys of the tile."""
        row = (lane & int32(7)) + ((lane >> int32(4)) << int32(3))
        place = (((lane >> int32(3)) & int32(1)) ^ (lane & int32(7))) << int32(4)
        base = k_tile + row * int32(K_ROW)
        for i in range(sixteens * S_ROWS):
            s[i] = float32(0)
        for pair in range(K_ROW // 32):  # 32 bytes of a row of K: one step of 16 numbers, or two of 8-bit numbers
            for g in range(GROUPS):
                x0, x1, x2, x3 = ptx.load_matrices(base + int32(g * 16 * K_ROW) + (place ^ int32(pair << 5)))
                for t in range(sixteens):
                    i = S_ROWS * t + 8 * g
                    if WIDEN:
                        a, a_next = query_words(q, 2 * pair, t, lane), query_words(q, 2 * pair + 1, t, lane)
                        accumulate(s, i, a, widen(x0), widen(x0 >> uint32(16)))
                        accumulate(s, i + 4, a, widen(x2), widen(x2 >> uint32(16)))
                        accumulate(s, i, a_next, widen(x1), widen(x1 >> uint32(16)))
                        accumulate(s, i + 4, a_next, widen(x3), widen(x3 >> uint32(16)))
                    else:
                        a = query_words(q, pair, t, lane)
                        accumulate(s, i, a, x0, x1)
                        accumulate(s, i + 4, a, x2, x3)
            unroll_fully()

    @register_jitable
    def weigh(s, factor, m, d_sum, alphas):
        """Online softmax: turn scores over `factor` >= 0 into weights under the new maxima.

        Return whether some maximum of the warp rises; what has been summed is then to be multiplied by `alphas`.
        """
        rises = int32(0)
        for i in range(ROWS):
            j = S_ROWS * (i // 2) + 2 * (i % 2)
            top = ptx.maximum(s[j], s[j + 1])
            for n in range(1, 2 * GROUPS):
                top = ptx.maximum(top, ptx.maximum(s[j + 4 * n], s[j + 4 * n + 1]))
            top = ptx.maximum(m[i], over_quad(top, ptx.maximum) * factor[i])
            base = shift(top)
            alpha = state_weight(m[i], base)
            m[i] = top
            even, odd = d_sum[i] * alpha, float32(0)
            for n in range(2 * GROUPS):
                for e in range(2):
                    s[j + 4 * n + e] = state_weight(s[j + 4 * n + e] * factor[i], base)
                even += s[j + 4 * n]
                odd += s[j + 4 * n + 1]
            d_sum[i], alphas[i] = even + odd, alpha
            if alpha != float32(1):
                rises = int32(1)
        return ptx.ballot(rises) != uint32(0)  # seldom after the first tiles

    @register_jitable
    def rescale(o, alphas):
        """Multiply what has been summed for each row."""
        for i in range(ROWS):
            for n in range(OUT_TILES):
                j = O_ROWS * (i // 2) + 4 * n + 2 * (i % 2)
                o[j] *= alphas[i]
                o[j + 1] *= alphas[i]

    @register_jitable
    def soften(s, m, d_sum, o):
        """Turn scores into weights under the new maxima, and rescale what has been summed."""
        alphas, factor = cuda.local.array(ROWS, types.float32), cuda.local.array(ROWS, types.float32)
        for i in range(ROWS):
            factor[i] = float32(1)
        if weigh(s, factor, m, d_sum, alphas):
            rescale(o, alphas)

    @register_jitable
    def pack_weights(s, p):
        """Round the weights to 16 bits; a result's layout is that of the next product's left side."""
        for n in range(sixteens * S_ROWS // 2):
            p[n] = pack(s[2 * n], s[2 * n + 1])

    @register_jitable
    def multiply_values(p, o, v_tile, lane):
        """``o += p @ v`` for all keys of the tile."""
        base = v_tile + (lane & int32(15)) * int32(V_ROW)
        place = ((lane >> int32(4)) ^ (lane & int32(7))) << int32(4)
        for g in range(GROUPS):
            for pair in range(V_ROW // 32):
                x0, x1, x2, x3 = ptx.load_matrices_transposed(base + int32(g * 16 * V_ROW) + (place ^ int32(pair << 5)))
                for t in range(sixteens):
                    n = S_ROWS // 2 * t + 4 * g
                    a = p[n], p[n + 1], p[n + 2], p[n + 3]
                    if WIDEN:
                        for odd in range(2):
                            select = uint32(0x3131 if odd else 0x2020)
                            y0, y1 = ptx.permute_bytes(x0, x0, select), ptx.permute_bytes(x1, x1, select)
                            accumulate(o, O_ROWS * t + 16 * pair + 4 * odd, a, widen(y0), widen(y1))
                            y2, y3 = ptx.permute_bytes(x2, x2, select), ptx.permute_bytes(x3, x3, select)
                            accumulate(o, O_ROWS * t + 16 * pair + 8 + 4 * odd, a, widen(y2), widen(y3))
                    else:
                        accumulate(o, O_ROWS * t + 8 * pair, a, x0, x1)
                        accumulate(o, O_ROWS * t + 8 * pair + 4, a, x2, x3)
                unroll_fully()

    @register_jitable
    def probe(at, turns, lane):
        """Return a word that is not 0 if the lane's share of ``512 * turns`` bytes holds an infinity or a NaN."""
        found = uint32(0)
        for i in range(turns):
            x0, x1, x2, x3 = ptx.shared_load_4u32(at + (int32(32 * i) + lane) * int32(16))
            found |= ((x0 & PROBE_BITS) + PROBE_ADD) | ((x1 & PROBE_BITS) + PROBE_ADD)
            found |= ((x2 & PROBE_BITS) + PROBE_ADD) | ((x3 & PROBE_BITS) + PROBE_ADD)
        return found & PROBE_HIT

    @register_jitable
    def has_nonfinite(v_tile, lane):
        """Return whether any value of the tile, or of a warp's share from `v_tile` on, is infinite or NaN."""
        return ptx.ballot(int32(probe(v_tile, PROBED, lane) != uint32(0))) != uint32(0)

    @register_jitable
    def add_selected(o, i, w0, w1, value):
        """Add a weighted value to both rows; a weight of 0 selects it away."""
        if w0 != float32(0):
            o[i] += w0 * value
        if w1 != float32(0):
            o[i + 2] += w1 * value

    @register_jitable
    def select_values(s, o, v_tile, scratch, lane):
        """``o += s @ v`` where 0 * NaN is never formed.

        Matrix instructions cannot do that for a key that one row keeps and another drops. It runs only for a tile that
        holds an infinity or a NaN. `scratch` is the warp's 16x16 float32 in shared memory.
        """
        r, c = lane >> int32(2), lane & int32(3)
        for g in range(GROUPS):
            for t in range(sixteens):
                for n in range(2):
                    for i in range(2):
                        place = (r + int32(8 * i)) * int32(16) + int32(8 * n) + int32(2) * c
                        j = S_ROWS * t + 8 * g + 4 * n + 2 * i
                        ptx.shared_store_2f32(scratch + (place << int32(2)), s[j], s[j + 1])
                ptx.sync_warp()
                for k in range(16):
                    key = int32(k)
                    w0 = ptx.shared_load_f32(scratch + ((r * int32(16) + key) << int32(2)))
                    w1 = ptx.shared_load_f32(scratch + (((r + int32(8)) * int32(16) + key) << int32(2)))
                    row = v_tile + (int32(16 * g) + key) * int32(KEY_ROW) + int32(4) * c
                    swizzle = (key & int32(7)) << int32(4)
                    for chunk in range(V_ROW // 16):  # the lane's four bytes of 16
                        at = row + int32(chunk // 8 * PANEL) + (int32(chunk % 8 << 4) ^ swizzle)
                        word = ptx.shared_load_u32(at)
                        if WIDEN:
                            j = O_ROWS * t + 8 * chunk
                            x0, x1 = unpack(widen(word))
                            x2, x3 = unpack(widen(word >> uint32(16)))
                            add_selected(o, j, w0, w1, x0)
                            add_selected(o, j + 4, w0, w1, x1)
                            add_selected(o, j + 1, w0, w1, x2)
                            add_selected(o, j + 5, w0, w1, x3)
                        else:
                            j = O_ROWS * t + 4 * chunk
                            x0, x1 = unpack(word)
                            add_selected(o, j, w0, w1, x0)
                            add_selected(o, j + 1, w0, w1, x1)
                        unroll_fully()
                    keep_rolled()
                ptx.sync_warp()
                unroll_fully()
            unroll_fully()

    return SimpleNamespace(
        OWN_KIND="f16" if HALF else "bf16",
        unpack=unpack,
        K_ROW=K_ROW,
        V_ROW=V_ROW,
        ITEM=ITEM,
        HAS_NONFINITE=form.probe[2] != 0,
        ROWS=ROWS,
        S_NUMBERS=sixteens * S_ROWS,
        P_WORDS=sixteens * S_ROWS // 2,
        O_NUMBERS=sixteens * O_ROWS,
        out_dim=out_dim,
        **vars(query),
        **vars(make_copies(K_ROW, KEY_ROW, PANEL, fetched)),
        multiply_keys=multiply_keys,
        weigh=weigh,
        rescale=rescale,
        soften=soften,
        pack_weights=pack_weights,
        multiply_values=multiply_values,
        probe=probe,
        has_nonfinite=has_nonfinite,
        select_values=select_values,
    )

"""Which keys a query row sees and where they lie: the integers both targets compile unchanged.

Every function is plain Python for tests and is inlined by Numba's CPU and CUDA compilers. All positions and lengths
are non-negative except a query position, which is negative for a row that stands before the first key.
"""

from __future__ import annotations

from numba.extending import register_jitable


def idiv(a, b):
    """Return ``a // b`` for ``a >= 0, b > 0``; each target overloads it with its cheapest division."""
    return a // b


@register_jitable
def kv_head_of(qo_head, group_size):
    """Return the KV head that query head `qo_head` reads."""
    return idiv(qo_head, group_size)


@register_jitable
def page_and_slot(key, page_size):
    """Return (ordinal of the page inside the request, slot inside the page) of key `key`."""
    page = idiv(key, page_size)
    return page, key - page * page_size


@register_jitable
def visible_keys(position, key_position, kv_len, causal, window_left, chunk_size):
    """Return the interval ``[first, end)`` of a level's keys that the row at `position` may see.

    Causal, window and chunk rules each keep an interval of key positions, so together they do too.

    Parameters
    ----------
    position : int
        Absolute position of the query row.
    key_position : int
        Absolute position of the level's key 0.
    kv_len : int
        Keys the request has in this level.
    causal : bool
        Keep keys at positions up to `position`.
    window_left : int
        Keep keys at positions from ``position - window_left``; negative is off.
    chunk_size : int
        Keep keys whose ``position // chunk_size`` equals the row's; 0 is off.

    Returns
    -------
    first, end : int
        Level-local key indices; an empty interval has ``end == first``.
    """
    first = 0
    end = kv_len
    if causal:
        end = min(end, position - key_position + 1)
    if window_left >= 0:
        first = max(first, position - window_left - key_position)
    if chunk_size > 0:
        if position < 0:
            end = 0
        else:
            chunk_position = idiv(position, chunk_size) * chunk_size
            first = max(first, chunk_position - key_position)
            end = min(end, chunk_position + chunk_size - key_position)
    first = min(first, kv_len)
    return first, max(first, end)


@register_jitable
def selected_token(token, kv_len):
    """Return whether an entry of an index list names a key of the request."""
    return token >= 0 and token < kv_len


@register_jitable
def mapped_page(page_id, num_pages):
    """Return whether a page-table entry points into the pool; anything else drops the page's keys."""
    return page_id >= 0 and page_id < num_pages

"""The kernels' parameters, in order: what the launcher packs and what a kernel function must be declared with.

``i64`` is a pointer or a stride in bytes, ``i32`` a count, ``f32`` a number. A pointer of 0 means "not given". A
`*_kind` is one of `KINDS`. The last axis of q, k and v is contiguous.
"""

from __future__ import annotations

KINDS = {"float16": 0, "bfloat16": 1, "float32": 2, "float64": 3, "bool": 4}

Parameters = tuple[tuple[str, str], ...]

# Columns of the work lists; `nbattn.work_list` fills them, see there.
WORK: tuple[str, ...] = ("LEVEL", "ROW_BEGIN", "ROW_END", "KEY_BEGIN", "KEY_END", "PAGE_BEGIN")
WORK += ("KEY_POSITION", "KEY_BASE", "KV_LEN", "STATE", "CAUSAL")

# When a launch that may start before the one ahead of it ends waits for that one's results. Plans are copied to the
# device and may be read before; page ids may be, unless the caller brought them in an array on the device.
WAITS_NEVER = 0  # it runs beside the launch ahead, which has waited already
WAITS_FIRST = 1  # before it reads page ids
WAITS_FOR_DATA = 2  # before it reads anything but the plan and page ids
WAITS_ASKING = 3  # the same, and asks for its first keys and values meanwhile


def _parameters(text: str) -> Parameters:
    pairs: list[tuple[str, str]] = []
    for line in filter(None, map(str.strip, text.splitlines())):
        kind, names = line.split("#")[0].split(":")
        pairs += [(name, kind) for name in names.split()]
    return tuple(pairs)


_QUERY = """
    i64: q q_row q_head              # [row, qo_head, head_dim_qk]
    i32: q_kind
"""
_CACHE = """
    i64: k k_page k_slot k_head      # [page, slot, kv_head, head_dim_qk]
    i64: v v_page v_slot v_head      # [page, slot, kv_head, head_dim_vo]
    i64: kv_indices                  # int32
    i32: num_pages page_size
    i32: head_dim_qk head_dim_vo group_size num_qo_heads
    f32: scale                       # sm_scale * log2(e)
"""
_RESULT = """
    i64: state_v state_s             # float32 [state, qo_head, head_dim_vo] and [state, qo_head]
    i64: out out_row out_head out_dim
    i32: out_kind
    i64: lse lse_row lse_head        # float32 [row, qo_head]
    f32: lse_unit                    # 1 for base 2, ln 2 for base e
    i64: sinks                       # float32 [qo_head], natural logarithm
    i64: v_scale                     # float32 [kv_head, head_dim_vo]
    f32: v_unit                      # a scale of all values
    i64: gate gate_row gate_head gate_dim   # [row, qo_head, head_dim_vo]
    i32: gate_kind
"""
_PAGED = _parameters(
    """
    i64: work row_position row_request row_index   # int32
    i32: waits                       # for the launches ahead: one of WAITS_...
    """
    + _QUERY
    + _CACHE
    + """
    i32: window_left chunk_size
    f32: soft_cap                    # times log2(e); 0 is off
    i64: alibi_slopes                # float32 [qo_head]
    i64: mask mask_request mask_head mask_row mask_key
    i32: mask_kind
    i64: rope_cos rope_sin           # float32 [position, rope_dim / 2]: rotates the keys
    i32: rope_dim rope_origin         # position of the planes' row 0
    i64: k_scale                      # float32 [kv_head, head_dim_qk], of rotated keys
    """
    + _RESULT
)

_GATHER = _parameters(
    """
    i64: rows                              # int32 [row, 2]: where its request's page ids start, and its keys
    i64: token_indices token_indices_row   # int32 [row, width]
    i64: counts                            # int32 [row]
    i32: num_rows width splits split_size  # a list is cut into `splits` parts of `split_size` entries
    i32: heads_last                        # blocks go through all parts before the next KV head
    """
    + _QUERY
    + _CACHE
    + _RESULT
)

PARAMETERS: dict[str, Parameters] = {
    "paged_decode": _PAGED,
    "paged_prefill": _PAGED,
    "paged_wgmma": _PAGED,
    "paged_plain": _PAGED,
    "gather_attention": _GATHER,
    "gather_plain": _GATHER,
    "merge_states": _parameters(
        """
    i64: v v_row v_state v_head v_dim      # [row, state, head, head_dim]
    i32: v_kind
    i64: s s_row s_state s_head
    i32: s_kind
    i64: merge_rows merge_indptr merge_slots   # int32; 0: row r is the merge of its num_states states
    i32: num_rows num_states num_heads group_size head_dim
    i32: lane_bits group_bits              # log2 of a row's lanes, and of the groups of lanes that share it
    i32: asks_early                        # whether blocks ask for their first states before they wait
    i64: out out_row out_head out_dim
    i32: out_kind
    i64: lse lse_row lse_head
    i32: lse_kind
    f32: s_unit lse_unit                   # what turns s into base 2, and a base-2 lse into what is asked for
    i64: sinks v_scale
    f32: v_unit
    i64: gate gate_row gate_head gate_dim
    i32: gate_kind
    """
    ),
    "prepare_query": _parameters(
        _QUERY
        + """
    i64: out out_row out_head              # float32
    i32: num_rows num_heads group_size head_dim
    i64: gain                              # float32 [head_dim]; 0: no norm
    f32: eps
    i64: rope_cos rope_sin positions       # float32 [position, rope_dim / 2], int32 [row]
    i32: rope_dim rope_rows rope_origin interleaved
    i64: k_scale                           # float32 [kv_head, head_dim]
    """
    ),
    "append_rows": _parameters(
        """
    i64: key key_row key_head value value_row value_head
    i64: k k_page k_slot k_head v v_page v_slot v_head
    i64: batch_indices positions kv_indptr kv_lens kv_indices   # int32
    i32: num_tokens batch_size num_heads num_pages page_size key_bytes value_bytes
    """
    ),
    "merge_pair": _parameters(
        """
    i64: v_a v_a_row v_a_head v_a_dim s_a s_a_row s_a_head
    i64: v_b v_b_row v_b_head v_b_dim s_b s_b_row s_b_head
    i64: out out_row out_head out_dim lse lse_row lse_head   # may be v_a and s_a
    i32: v_kind out_kind s_kind lse_kind
    i32: num_rows num_heads head_dim lane_bits
    i32: early_blocks                      # that ask for their states before they wait for the launch ahead
    f32: s_unit lse_unit
    i64: mask                              # one byte a row: a zero leaves the row as it is; 0: all rows
    """
    ),
}

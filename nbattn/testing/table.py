"""The hand-picked cases, odd on purpose, that `python -m nbattn validate` runs in every dtype."""

from __future__ import annotations

from nbattn.testing.attention_cases import CascadeCase, PagedCase
from nbattn.testing.cases import Case, GatherCase, MergeCase
from nbattn.testing.draws import FACES, WRAPPERS
from nbattn.testing.face_cases import FaceCase
from nbattn.testing.pools import LAYOUTS
from nbattn.testing.wrapper_cases import WrapperCase

P, C, G, M = PagedCase, CascadeCase, GatherCase, MergeCase
EDGES = (0, 1, 60, 61, 62, 127, 128, 129)  # with pages of 61

PAGED: tuple[Case, ...] = (
    # lengths, pages and layouts
    P(kv_lens=EDGES, page_size=61, num_kv_heads=2, group_size=3),
    P(kv_lens=(15, 16, 17), page_size=16, num_kv_heads=2, group_size=4, head_dim=128, layout="combined"),
    P(kv_lens=(0, 1, 2, 3, 129), page_size=1, group_size=8, head_dim=128, kv_layout="HND"),
    P(kv_lens=(7, 130, 64), page_size=2, group_size=5, head_dim=80, layout="list", shared=True),
    P(kv_lens=(128, 5), page_size=16, group_size=8, head_dim=192, head_dim_vo=128, layout="block_table"),
    P(kv_lens=(9, 33), num_kv_heads=2, group_size=1, head_dim=256, layout="slots", kv_layout="HND"),
    P(kv_lens=(40, 129), page_size=16, group_size=16, layout="blocks"),
    P(kv_lens=(70, 64, 3), page_size=16, group_size=3, unmapped=True, layout="block_table", kv_layout="HND"),
    P(kv_lens=(5, 17), page_size=3, group_size=7, head_dim=1),
    P(kv_lens=(5, 17), page_size=3, group_size=9, head_dim=20, head_dim_vo=3),
    P(kv_lens=(66,), page_size=64, group_size=2, head_dim=136),
    P(kv_lens=(50, 2), page_size=16, group_size=4, head_dim=72, head_dim_vo=56, given_out=True),
    # ragged rows
    P(kv_lens=(7, 0, 129, 3), qo_lens=(3, 2, 0, 5), page_size=16, group_size=3, extra_rows=3, given_out=True),
    P(kv_lens=(129, 128), qo_lens=(33, 65), page_size=61, group_size=2, head_dim=128, split_size=17),
    P(kv_lens=(128, 200), qo_lens=(128, 70), page_size=16, group_size=4, layout="combined", kv_layout="HND"),
    P(kv_lens=(3, 20), qo_lens=(9, 4), causal=False, page_size=2, group_size=5, head_dim=96),
    # options, most of them together
    P(kv_lens=(129, 64), qo_lens=(5, 1), page_size=16, group_size=4, sinks="normal", split_size=1, lse_base="e"),
    P(kv_lens=(129, 3), group_size=5, sinks="some", window_left=16, split_size=64, page_size=16),
    P(kv_lens=(64, 9), qo_lens=(2, 9), group_size=2, sinks="huge", logits_soft_cap=30.0, k_scale="one"),
    P(kv_lens=(100, 40), qo_lens=(7, 40), window_left=3, logits_soft_cap=0.5, group_size=3, head_dim=80),
    P(kv_lens=(100, 40), qo_lens=(7, 9), window_left=0, causal=False, split_size=17, group_size=8),
    P(kv_lens=(100, 31), qo_lens=(9, 31), chunk_size=32, kv_start=True, group_size=4, page_size=61),
    P(kv_lens=(90, 5), qo_lens=(4, 6), attn_mask="bool", causal=False, group_size=3, split_size=3),
    P(kv_lens=(90, 5), qo_lens=(4, 1), attn_mask="additive", mask_axes="hnl", window_left=50, group_size=5),
    P(kv_lens=(33, 17), attn_mask="bool", mask_axes="1h1l", sinks="normal", num_kv_heads=2, group_size=3),
    P(kv_lens=(70, 12), qo_lens=(3, 12), alibi=True, logits_soft_cap=2.0, group_size=6, kv_start=True),
    P(kv_lens=(70, 12), qo_lens=(3, 5), rope=(1e4, 1.0), group_size=4, head_dim=128, page_size=16, q_positions=True),
    P(kv_lens=(129, 1), rope=(100.0, 2.5), k_scale="channel", v_scale="head", group_size=2, kv_start=True),
    P(kv_lens=(20, 65), qo_lens=(5, 2), k_scale="channel", v_scale="channel", num_kv_heads=2, group_size=3),
    P(kv_lens=(20, 65), sm_scale=0.0, window_left=9, v_scale="one", group_size=8, out_dtype="float32"),
    P(kv_lens=(), group_size=4),
)

CASCADE: tuple[Case, ...] = (
    C(group_size=4),
    C(levels=(((0, 3), (64,), False), ((0, 1, 2, 3), (0, 2, 0), True)), page_size=16, group_size=3, sinks="normal"),
    C(levels=(((0, 9), (130,), False), ((0, 4, 9), (17, 16), False), ((0, 1, 4, 9), (5, 3, 66), True)), group_size=5,
      head_dim=128, page_size=16, window_left=100),
    C(levels=(((1, 4), (33,), False), ((0, 2, 4), (9, 61), True)), page_size=61, group_size=2, split_size=17),
    C(levels=(((0, 5), (65,), False), ((0, 2, 5), (7, 70), True)), attn_mask="additive", group_size=4, lse_base="e"),
    C(levels=(((0, 5), (65,), False), ((0, 2, 5), (7, 70), True)), rope=(1e4, 1.0), chunk_size=32, group_size=8),
    C(levels=(((0, 3), (9,), False), ((0, 1, 3), (4, 0), False)), alibi=True, head_dim=80, extra_rows=2,
      given_out=True),
    C(levels=(((0, 3, 6), (16, 20), False), ((0, 2, 6), (5, 30), True)), k_scale="head", v_scale="channel",
      num_kv_heads=2, layout="combined", shared=True, logits_soft_cap=2.0),
)  # fmt: skip

GATHER: tuple[Case, ...] = (
    G(group_size=4),
    G(kv_lens=(66, 0, 200), page_size=64, width=130, group_size=16, head_dim=128, layout="blocks"),
    G(kv_lens=(129, 7), qo_lens=(9, 3), width=16, page_size=16, group_size=3, sinks="normal", lse_base="e"),
    G(
        kv_lens=(40, 61),
        qo_lens=(0, 5),
        width=65,
        page_size=61,
        num_kv_heads=2,
        group_size=5,
        head_dim=80,
        unmapped=True,
    ),
    G(kv_lens=(40,), qo_lens=(33,), width=3, group_size=8, head_dim=192, head_dim_vo=128, layout="block_table"),
    G(kv_lens=(90, 90), width=130, page_size=16, group_size=4, k_scale="channel", v_scale="head", output_gate=True),
    G(kv_lens=(5, 3), qo_lens=(2, 4), group_size=9, head_dim=3, extra_rows=2, given_out=True, sinks="some"),
    G(kv_lens=(300,), qo_lens=(2,), width=300, page_size=1, group_size=2, head_dim=256, kv_layout="HND", shared=True),
)

MERGE: tuple[Case, ...] = (
    M(), M(rows=65, states=3, heads=5, head_dim=128), M(rows=3, states=0), M(rows=0),
    M(states=9, heads=65, head_dim=80), M(states=5, heads=200, head_dim=1),
    M(form="state", heads=3, head_dim=192, lse_base="e"),
    M(form="state", rows=9, heads=5, head_dim=40), M(form="in_place", head_dim=96, s_dtype="float64"),
    M(form="masked", rows=17, heads=2, head_dim=256),
)  # fmt: skip

FORMS = [(layout, order) for layout in LAYOUTS for order in ("NHD", "HND") if (layout, order) != ("blocks", "HND")]
EVERY_LAYOUT: dict[str, tuple[Case, ...]] = {
    "paged_attention": tuple(
        P(kv_lens=(5, 0, 35), qo_lens=(2, 1, 3), page_size=16, group_size=3, layout=layout, kv_layout=order)
        for layout, order in FORMS
    ),
    "cascade_attention": tuple(C(group_size=3, layout=layout, kv_layout=order) for layout, order in FORMS),
    "gather_attention": tuple(
        G(kv_lens=(5, 0, 35), page_size=16, group_size=3, width=20, layout=layout, kv_layout=order)
        for layout, order in FORMS
    ),
}

SEEDS = range(8)  # of the faces: each draws shapes, layouts and options together

CASES: dict[str, tuple[Case, ...]] = {
    "paged_attention": PAGED + EVERY_LAYOUT["paged_attention"],
    "cascade_attention": CASCADE + EVERY_LAYOUT["cascade_attention"],
    "gather_attention": GATHER + EVERY_LAYOUT["gather_attention"],
    "merge": MERGE,
    **{
        face: tuple(FaceCase(seed, face=face, out_dtype="float32" if face == "gqa_decode" else None) for seed in SEEDS)
        for face in FACES
    },
    **{face: tuple(WrapperCase(seed, face=face) for seed in SEEDS) for face in WRAPPERS},
}

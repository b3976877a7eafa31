"""One plan for many layers, another after it, and what each argument of plan and run does to the values."""

import numpy as np
import pytest
from level_setup import TWO, Decode, Multi, Prefill, Setup, planned, run_options

import nbattn
from nbattn import oracle
from nbattn.testing import assert_close, expect


def test_one_plan_serves_many_layers_and_a_second_plan_replaces_it():
    setup, later = Setup(TWO[0]), Setup(((TWO[0][0]), ((0, 1, 4, 6), (2, 6, 12))), seed=3)
    wrapper = Multi(2)
    for one, options in ((setup, {"causal": True}), (later, {"window_left": 2}), (setup, {})):
        q, cache, lists = one.build()
        wrapper.plan(*lists, *one.sizes, **options)
        for layer in range(3):
            shown = cache if layer < 2 else cache[..., ::-1].copy()
            expected = expect(oracle.multi_level_cascade, q, shown, *lists, **options)
            assert_close(wrapper.run(q, shown, return_lse=True), expected)


def test_a_plan_does_not_see_later_edits_of_its_arrays():
    setup = Setup(TWO[0])
    q, cache, lists = setup.build()
    wrapper = planned(setup, lists)
    expected = wrapper.run(q, cache)
    for arrays in lists:
        for x in arrays:
            x[:] = -1
    np.testing.assert_array_equal(wrapper.run(q, cache), expected)


def test_a_plan_serves_caches_of_any_size_that_holds_its_pages():
    setup = Setup(TWO[0])
    q, cache, lists = setup.build()
    wrapper = planned(setup, lists)
    expected = wrapper.run(q, cache)
    np.testing.assert_array_equal(wrapper.run(q, np.concatenate([cache, cache])), expected)
    np.testing.assert_array_equal(wrapper.run(q, cache), expected)
    largest = max(x[: p[-1]].max() for p, x in zip(lists[1], lists[2], strict=True))
    with pytest.raises(nbattn.PageTableError, match=rf"paged_kv_indices_arr\[\d\]\[\d+\]: must be below {largest}"):
        wrapper.run(q, cache[:largest])


def test_run_before_plan_says_so():
    with pytest.raises(nbattn.ContractError, match=r"run: must follow plan\(\.\.\.\)"):
        Multi(2).run(np.zeros((1, 1, 8), np.float32), np.zeros((1, 2, 4, 1, 8), np.float32))
    for wrapper in (Decode(), Prefill()):
        with pytest.raises(nbattn.ContractError, match=r"forward: must follow begin_forward\(\.\.\.\)"):
            wrapper.forward(*[np.zeros((1, 1, 8), np.float32)] * 3, np.zeros((1, 2, 4, 1, 8), np.float32))


def test_a_refused_plan_leaves_the_last_one():
    setup = Setup(TWO[0])
    q, cache, lists = setup.build()
    wrapper = planned(setup, lists)
    expected = wrapper.run(q, cache)
    with pytest.raises(nbattn.ContractError):
        wrapper.plan(*lists, *setup.sizes, causal=True, q_data_type="int8")
    np.testing.assert_array_equal(wrapper.run(q, cache), expected)


def test_workspaces_aliases_and_end_forward_change_nothing():
    setup = Setup(TWO[0])
    q, cache, lists = setup.build()
    expected = planned(setup, lists).run(q, cache)
    workspace = np.full(64, 0xFF, np.uint8)
    wrapper = Multi(2, workspace)
    assert wrapper.begin_forward(*lists, *setup.sizes) is None
    wrapper.reset_workspace_buffer(workspace[:8], [workspace, workspace])
    np.testing.assert_array_equal(wrapper.forward(q, cache), expected)
    assert wrapper.end_forward() is None
    wrapper.reset_workspace_buffer(None, None)
    np.testing.assert_array_equal(wrapper.run(q, cache), expected)
    assert (workspace == 0xFF).all()


def test_fp16_reduction_changes_nothing():
    setup = Setup(TWO[0])
    q, cache, lists = setup.build()
    a, b = (planned(setup, lists, {"use_fp16_qk_reduction": x}).run(q, cache) for x in (False, True))
    np.testing.assert_array_equal(a, b)


CHANGES = {
    "causal": True,
    "pos_encoding_mode": "ALIBI",
    "sm_scale": 0.7,
    "window_left": 3,
    "logits_soft_cap": 0.3,
}


@pytest.mark.parametrize("name", CHANGES)
def test_each_planned_option_changes_the_result(name):
    setup = Setup(TWO[0])
    q, cache, lists = setup.build()
    plain = planned(setup, lists).run(q, cache)
    assert np.abs(planned(setup, lists, {name: CHANGES[name]}).run(q, cache) - plain).max() > 1e-3


@pytest.mark.parametrize(("name", "value"), [("rope_scale", 3.0), ("rope_theta", 50.0)])
def test_rotary_numbers_count_in_their_mode_alone(name, value):
    setup = Setup(TWO[0])
    q, cache, lists = setup.build()
    for mode in ("NONE", "ALIBI", "ROPE_LLAMA"):
        a, b = (
            planned(setup, lists, {"pos_encoding_mode": mode, **more}).run(q, cache) for more in ({}, {name: value})
        )
        assert (np.abs(a - b).max() > 1e-3) == (mode == "ROPE_LLAMA")


@pytest.mark.parametrize("name", ["sinks", "k_scale", "v_scale"])
def test_each_run_option_changes_the_result(name):
    setup = Setup(TWO[0])
    q, cache, lists = setup.build()
    wrapper = planned(setup, lists)
    changed = wrapper.run(q, cache, **{name: run_options(setup, "all")[name]})
    assert np.abs(changed - wrapper.run(q, cache)).max() > 1e-3


def test_off_values_are_the_defaults():
    setup = Setup(TWO[0])
    q, cache, lists = setup.build()
    plain = planned(setup, lists).run(q, cache)
    off = {"window_left": -9, "logits_soft_cap": 0, "sm_scale": 0.25, "rope_theta": 1e4, "rope_scale": 1.0}
    np.testing.assert_array_equal(planned(setup, lists, off).run(q, cache), plain)


def test_given_out_and_lse_are_filled_and_uncovered_rows_stay():
    setup = Setup((((1, 3), (11,)), ((1, 2, 3), (3, 5))))
    q, cache, lists = setup.build()
    q = np.concatenate([q, np.full_like(q[:1], np.nan)])
    q[0] = np.nan  # no level covers rows 0 and 3
    out, lse = np.full((4, 6, 16), 7, np.float32), np.full((4, 6), 7, np.float32)
    wrapper = planned(setup, lists)
    result = wrapper.run(q, cache, out=out, lse=lse, return_lse=True)
    assert result[0] is out
    assert result[1] is lse
    assert (out[[0, 3]] == 7).all()
    assert (lse[[0, 3]] == 7).all()
    fresh = wrapper.run(q, cache, return_lse=True)
    assert (fresh[0][[0, 3]] == 0).all()
    assert (fresh[1][[0, 3]] == -np.inf).all()
    np.testing.assert_array_equal(fresh[0][1:3], out[1:3])


def test_natural_lse_is_base_2_times_ln_2():
    setup = Setup(TWO[0])
    q, cache, lists = setup.build()
    wrapper = planned(setup, lists)
    two, natural = (wrapper.run(q, cache, return_lse=True, lse_base=base)[1] for base in "2e")
    np.testing.assert_allclose(natural, two * np.log(2), rtol=1e-6)


def test_unmapped_pages_are_dropped():
    setup = Setup(TWO[0])
    q, cache, lists = setup.build()
    lists[2][0][1] = -3
    assert_close(planned(setup, lists).run(q, cache), expect(oracle.multi_level_cascade, q, cache, *lists))


def test_no_rows_and_no_requests():
    wrapper = Multi(2)
    nothing = np.zeros(0, np.int32)
    wrapper.plan([np.zeros(1, np.int32)] * 2, [np.zeros(1, np.int32)] * 2, [nothing] * 2, [nothing] * 2, 2, 1, 8, 4)
    out, lse = wrapper.run(np.zeros((0, 2, 8), np.float32), np.zeros((1, 2, 4, 1, 8), np.float32), return_lse=True)
    assert (out.shape, lse.shape) == ((0, 2, 8), (0, 2))

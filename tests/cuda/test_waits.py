"""When launches that start early wait for the ones ahead of them; the emulator refuses what they read too early."""

from __future__ import annotations

import numpy as np
import pytest
from small_problems import numbers, poisoned_cache

import nbattn
from nbattn import oracle, testing
from nbattn.cuda_kernels.parameters import PARAMETERS, WAITS_ASKING, WAITS_FIRST, WAITS_FOR_DATA

HEADS, DIM = 4, 64
LENGTHS = [40, 9]


@pytest.fixture
def waits(lent, monkeypatch):
    """Return the list of what each launch of attention was told, in order."""
    found, launch = [], lent.launch

    def spy(family, constants, grid, values, *how):
        names = [name for name, _ in PARAMETERS[family]]
        if "waits" in names:
            found.append((family, values[names.index("waits")]))
        launch(family, constants, grid, values, *how)

    monkeypatch.setattr(lent, "launch", spy)
    return found


def attend(q, kv, **options):
    """Run a decode and hold it to the oracle."""
    result = nbattn.paged_attention(q, kv, return_lse=True, **options)
    testing.assert_close(result, testing.expect(oracle.paged_attention, q, kv))


@pytest.mark.parametrize("split_size", [None, 16])
def test_blocks_that_run_at_once_ask_for_their_first_keys(split_size, lent, waits):
    rng = np.random.default_rng(1)
    lent.multiprocessors = 8
    attend(numbers(rng, (2, HEADS, DIM), "bfloat16"), poisoned_cache(rng, LENGTHS), split_size=split_size)
    assert waits == [("paged_decode", WAITS_ASKING)]


def test_blocks_of_many_waves_ask_for_nothing(lent, waits):
    rng = np.random.default_rng(1)
    attend(numbers(rng, (2, HEADS, DIM), "bfloat16"), poisoned_cache(rng, LENGTHS), split_size=16)
    assert waits == [("paged_decode", WAITS_FOR_DATA)]


def test_a_table_that_a_kernel_may_have_filled_is_read_behind_the_wait(lent, waits, monkeypatch):
    rng = np.random.default_rng(1)
    lent.multiprocessors = 8
    kv, q = poisoned_cache(rng, LENGTHS), numbers(rng, (2, HEADS, DIM), "bfloat16")
    plan = nbattn.plan(kv, num_qo_heads=HEADS)
    attend(q, kv, plan=plan)
    monkeypatch.setattr(lent, "holds", lambda array: array is kv.kv_indices)
    planned = poisoned_cache(np.random.default_rng(2), LENGTHS)
    other = nbattn.plan(planned, num_qo_heads=HEADS)
    attend(q, planned, plan=other)
    attend(q, kv, plan=other)  # the same lengths, and a table of its own
    assert [x for _, x in waits] == [WAITS_ASKING, WAITS_ASKING, WAITS_FIRST]

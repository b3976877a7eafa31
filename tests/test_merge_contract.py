"""Bad input: one test per rule of the merges; a refused merge writes nothing."""

import numpy as np
import pytest

import nbattn
from nbattn import ContractError

SENTINEL = 7.0


def zeros(*shape, dtype=np.float32):
    return np.zeros(shape, dtype)


def ints(*values):
    return np.array(values, np.int32)


def read_only(x):
    x.flags.writeable = False
    return x


def states(count=2, form="merge_state", dtype=np.float32, s_dtype=np.float32):
    v, s = np.full((3, 2, 8), SENTINEL, dtype), np.full((3, 2), SENTINEL, s_dtype)
    if form == "merge_states":
        return {"v": zeros(3, count, 2, 8, dtype=dtype), "s": zeros(3, count, 2, dtype=s_dtype)}
    names = ("v_a", "s_a", "v_b", "s_b") if form == "merge_state" else ("v", "s", "v_other", "s_other")
    return dict(zip(names, (v, s, v.copy(), s.copy()), strict=True))


STATE_RULES = [
    ("v None", 0, None, r"{v}: must be a NumPy or CuPy array, got NoneType"),
    ("s None", 1, None, r"{s}: must be a NumPy or CuPy array, got NoneType"),
    ("v list", 0, [0.0], r"{v}: must be a NumPy or CuPy array, got list"),
    ("v axes", 0, zeros(3, 8), r"{v}: must have \d dimensions, got shape \(3, 8\)"),
    ("v dtype", 0, "int32", r"{v}: must be one of float16, bfloat16, float32, float64, got int32"),
    ("v last axis", 0, "gaps", r"{v}: the last axis must be contiguous"),
    ("s list", 1, [0.0], r"{s}: must be a NumPy or CuPy array, got list"),
    ("s shape", 1, zeros(2, 3), r"{s}: must be \[3, .*\] \({v} without its last axis\), got \(2, 3\)"),
    ("s dtype", 1, "float16", r"{s}: must be float32 or float64, got float16\. A log-sum-exp needs the range"),
]


@pytest.mark.parametrize("form", ["merge_state", "merge_state_in_place", "merge_states"])
@pytest.mark.parametrize(("which", "value", "message"), [r[1:] for r in STATE_RULES], ids=[r[0] for r in STATE_RULES])
def test_merges_refuse_a_state(form, which, value, message):
    arguments = states(form=form)
    names = list(arguments)
    pairs = [names[i : i + 2] for i in range(0, len(names), 2)]
    for pair in pairs:
        changed = states(form=form)
        before = {name: x.copy() for name, x in changed.items()}
        x = changed[pair[which]]
        if isinstance(value, str):
            value_here = np.concatenate([x, x], -1)[..., ::2] if value == "gaps" else x.astype(value)
        else:
            value_here = value
        changed[pair[which]] = value_here
        with pytest.raises(ContractError, match="^" + message.format(v=pair[0], s=pair[1])):
            getattr(nbattn, form)(**changed)
        for name in set(changed) - {pair[which]}:
            np.testing.assert_array_equal(changed[name], before[name])


MERGE_RULES = [
    (
        "v_b shape",
        "merge_state",
        {"v_b": zeros(3, 2, 4)},
        r"v_b: must be like v_a, float32 of shape \[3, 2, 8\], got float32 of shape \[3, 2, 4\]",
    ),
    ("v_b dtype", "merge_state", {"v_b": zeros(3, 2, 8, dtype=np.float16)}, r"v_b: must be like v_a, .*got float16"),
    (
        "s_b dtype",
        "merge_state",
        {"s_b": zeros(3, 2, dtype=np.float64)},
        r"s_b: must be like s_a, float32 .*, got float64",
    ),
    ("base", "merge_state", {"lse_base": "10"}, 'lse_base: must be "2" or "e", got \'10\''),
    ("base of states", "merge_states", {"lse_base": None}, 'lse_base: must be "2" or "e", got None'),
    ("base array", "merge_state", {"lse_base": np.array(["2", "e"])}, 'lse_base: must be "2" or "e", got array'),
    ("other shape", "merge_state_in_place", {"v_other": zeros(3, 2, 4)}, "v_other: must be like v, float32"),
    ("other s", "merge_state_in_place", {"s_other": zeros(3, 2, dtype=np.float64)}, "s_other: must be like s, float32"),
    (
        "v read-only",
        "merge_state_in_place",
        {"v": read_only(states()["v_a"])},
        "v: must be writable, got a read-only array",
    ),
    (
        "s read-only",
        "merge_state_in_place",
        {"s": read_only(states()["s_a"])},
        "s: must be writable, got a read-only array",
    ),
    ("base in place", "merge_state_in_place", {"lse_base": 2}, 'lse_base: must be "2" or "e", got 2'),
    ("mask type", "merge_state_in_place", {"mask": [1, 0, 1]}, "mask: must be a NumPy or CuPy array, got list"),
    (
        "mask length",
        "merge_state_in_place",
        {"mask": ints(1, 0)},
        r"mask: must be bool or int \[3\], got int32 of shape \(2,\)",
    ),
    (
        "mask dtype",
        "merge_state_in_place",
        {"mask": zeros(3)},
        r"mask: must be bool or int \[3\], got float32 of shape \(3,\)",
    ),
]


@pytest.mark.parametrize(("form", "changes", "message"), [r[1:] for r in MERGE_RULES], ids=[r[0] for r in MERGE_RULES])
def test_merges_refuse(form, changes, message):
    arguments = {**states(form=form), **changes}
    before = {name: x.copy() for name, x in arguments.items() if isinstance(x, np.ndarray)}
    with pytest.raises(ContractError, match="^" + message):
        getattr(nbattn, form)(**arguments)
    for name, x in before.items():
        np.testing.assert_array_equal(arguments[name], x)

"""The validation itself: it passes, names what fails, replays a case, and checks users' tensors."""

import json
import re
import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest

import nbattn
from nbattn import external, oracle, real_inputs, validate, validation
from nbattn.errors import ContractError
from nbattn.testing import CASES, FACES, WRAPPERS, MergeCase, PagedCase

FAST = PagedCase(kv_lens=(5, 3), group_size=3)


@pytest.fixture
def few(monkeypatch):
    """Leave two checks of float32 and one of float64 in the table."""
    checks = [validation.CaseCheck(c) for c in (FAST, MergeCase(), FAST.with_dtypes("float64"))]
    monkeypatch.setattr(validate, "all_checks", lambda root: checks)
    return [check.id for check in checks]


def test_every_operator_dtype_and_layout_is_checked():
    checks = validation.all_checks()
    pairs = {(c.op, c.q_dtype, c.kv_dtype) for c in checks}
    for op in ("paged_attention", "cascade_attention", "gather_attention", *FACES, *WRAPPERS):
        expected = {p for p in validation.DTYPES if p[1] != "int8" or op != "generic_cross_attention_kv_cache"}
        assert {p[1:] for p in pairs if p[0] == op} == expected
    layouts = {(c.op, c.case.layout, c.case.kv_layout) for c in checks if hasattr(c.case, "layout")}
    assert len(layouts) == 3 * 11
    assert len({c.id for c in checks}) == len(checks)
    assert len(checks) > sum(map(len, CASES.values()))


def test_a_checkout_adds_real_input():
    root = real_inputs.checkout()
    assert root is not None
    found = list(real_inputs.checks(root))
    assert {check.op for check in found} == {"real model", "request trace"}
    assert {check.layer for check in found if check.op == "real model"} == set(range(6))
    for check in (found[0], found[-1]):
        assert validation.run_check(check).passed
    assert set(found) <= set(validation.all_checks(root))


def test_a_passing_run(few, capsys, tmp_path):
    file = tmp_path / "outcomes.json"
    assert validate.main(["--json", str(file), "--jobs", "1"]) == 0
    out = capsys.readouterr().out
    assert "3 checks, 0 failed" in out
    assert "\r" not in out  # no bar without a terminal
    outcomes = json.loads(file.read_text())
    assert sorted(o["id"] for o in outcomes) == sorted(few)
    assert all(o["passed"] and 0 <= o["share"] <= 1 and o["error"] <= o["budget"] for o in outcomes)
    table = out.split("\n\n")[0].splitlines()[1:]
    assert [float(line.split()[-1]) for line in table] == sorted(float(line.split()[-1]) for line in table)


def test_a_wrong_kernel_fails_the_run(few, capsys, monkeypatch, tmp_path):
    right = nbattn.paged_attention

    def wrong(q, *args, **kwargs):
        out, lse = right(q, *args, **kwargs)
        return out + np.float32(1e-3) * (q.dtype == np.float32), lse

    monkeypatch.setattr(nbattn, "paged_attention", wrong)
    file = tmp_path / "outcomes.json"
    assert validate.main(["--jobs", "1", "--json", str(file)]) == 1
    out = capsys.readouterr().out
    assert "3 checks, 1 failed" in out
    assert f"FAILED {FAST.id}\n{FAST!r}\nout: 384 of 384 elements over the budget" in out
    assert out.split("\n\n")[0].splitlines()[-1].split()[:2] == ["paged_attention", "float32"]  # the worst stands last
    assert [o["id"] for o in json.loads(file.read_text()) if not o["passed"]] == [FAST.id]


@pytest.mark.parametrize("error", [RuntimeError("no"), UserWarning("no")])
def test_a_crash_and_a_warning_are_failures(few, capsys, monkeypatch, error):
    def broken(*args, **kwargs):
        raise error

    monkeypatch.setattr(nbattn, "paged_attention", broken)
    assert validate.main(["--jobs", "1"]) == 1
    assert f"{type(error).__name__}: no" in capsys.readouterr().out


def test_written_guards_are_a_failure(monkeypatch):
    def careless(*args, out=None, **kwargs):
        out.base[0] = 0
        return right(*args, out=out, **kwargs)

    right = nbattn.paged_attention
    monkeypatch.setattr(nbattn, "paged_attention", careless)
    outcome = validation.run_check(validation.CaseCheck(PagedCase(given_out=True)))
    assert not outcome.passed
    assert "were written" in outcome.report


def test_two_processes_share_the_work(few):
    checks = validate.all_checks(None)
    outcomes = list(validation.run_checks(checks, jobs=2))
    assert sorted(o.check.id for o in outcomes) == sorted(few)
    assert all(o.passed for o in outcomes)


def test_a_process_that_dies_is_a_failure(few, monkeypatch, tmp_path):
    (tmp_path / "deadly_check.py").write_text(
        "import os\nclass Deadly:\n    op, q_dtype, id = 'deadly', 'float32', 'deadly'\n    kv_dtype = 'int8'\n"
        "    def run(self):\n        os._exit(3)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    import deadly_check

    checks = [deadly_check.Deadly(), validation.CaseCheck(MergeCase())]
    outcomes = {o.check.id: o for o in validation.run_checks(checks, jobs=2)}
    assert not outcomes["deadly"].passed
    assert "its process died" in outcomes["deadly"].report


def test_one_case_is_replayed(few, capsys):
    for name in (few[0], repr(FAST)):
        assert validate.main(["--case", name]) == 0
        out = capsys.readouterr().out.splitlines()
        assert out[0] == repr(FAST)
        assert out[1].startswith("out: 0 of 384 elements over the budget")
        assert out[-1].startswith("passed: 0.")


def test_the_ids_are_listed(few, capsys):
    assert validate.main(["--list"]) == 0
    assert capsys.readouterr().out.splitlines() == few
    assert validate.main(["--list", "--ops", "merge_states"]) == 0
    assert capsys.readouterr().out.splitlines() == [few[1]]
    assert validate.main(["--list", "--dtypes", "float64"]) == 0
    assert capsys.readouterr().out.splitlines() == [few[2]]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--case", "nothing"], "--case: must be the id of a check, got 'nothing'"),
        (["--ops", "softmax"], "--ops: must be some of merge_states, paged_attention, got 'softmax'"),
        (["--dtypes", "int4"], "--dtypes: must be some of float32, .*, got 'int4'"),
    ],
)
def test_wrong_arguments_are_named(few, capsys, arguments, message):
    assert validate.main(arguments) == 2
    assert re.search(message, capsys.readouterr().err)


def test_the_plain_bar(capsys):
    advance = validate._plain_progress(2)
    for share in (0.1, 0.2):
        advance(validation.Outcome(validation.CaseCheck(FAST), True, 0.0, 1.0, share, 0.0))
    lines = capsys.readouterr().err.split("\r")
    assert lines[1].startswith("[###############...............] 1/2 paged_attention")
    assert lines[2].startswith("[##############################] 2/2")


def test_without_a_terminal_there_is_a_line_when_an_operator_is_done(capsys):
    checks = [validation.CaseCheck(FAST), validation.CaseCheck(FAST), validation.CaseCheck(FAST.with_dtypes("float16"))]
    with validate.progress(checks) as advance:
        for done, line in enumerate(
            ["", r"2/3 checks, \d+ s: paged_attention float32/float32 done", r"3/3 .* float16/float16 done"], 1
        ):
            advance(validation.Outcome(checks[done - 1], True, 0.0, 1.0, 0.1, 0.0))
            assert re.fullmatch(line, capsys.readouterr().err.strip())


@pytest.mark.parametrize("command", [["-m", "nbattn", "validate"], ["scripts/validate.py"]])
def test_both_commands(command):
    root = real_inputs.checkout()
    done = subprocess.run([sys.executable, *command, "--help"], capture_output=True, text=True, cwd=root, check=True)
    assert "--tensors FILE.npz" in done.stdout
    assert "kv_last_page_len" in done.stdout


# ---- users' tensors


def tensors(**changes):
    rng = np.random.default_rng(0)
    k, v = rng.normal(size=(2, 4, 8, 2, 16)).astype(np.float32)
    made = {
        "q": rng.normal(size=(2, 6, 16)).astype(np.float32), "k_cache": k, "v_cache": v,
        "kv_indptr": np.array([0, 2, 3]), "kv_indices": np.array([3, 0, 1]), "kv_last_page_len": np.array([5, 8]),
    }  # fmt: skip
    kv = nbattn.PagedKV.from_page_table((k, v), *(made[n] for n in ("kv_indptr", "kv_indices", "kv_last_page_len")))
    out, lse = oracle.paged_attention(made["q"], kv, return_lse=True)
    return {**made, "out": out.astype(np.float32), "lse": lse.astype(np.float32), **changes}


def save(tmp_path, arrays):
    np.savez(tmp_path / "mine.npz", **arrays)
    return ["--tensors", str(tmp_path / "mine.npz")]


def test_right_tensors_pass_and_wrong_ones_fail(tmp_path, capsys):
    assert validate.main(save(tmp_path, tensors())) == 0
    out = capsys.readouterr().out
    assert "out: 0 of 192 elements" in out
    assert "lse: 0 of 12 elements" in out
    wrong = tensors()
    wrong["out"][1, 2, 3] += 0.01
    assert validate.main(save(tmp_path, wrong)) == 1
    assert "worst at [1, 2, 3]" in capsys.readouterr().out
    assert validate.main(save(tmp_path, tensors(window_left=np.array(2)))) == 1  # another function's result


def test_other_caches_and_options(monkeypatch):
    for run in ("run_paged", "run_gather"):  # rules and the definition alone: a kernel would take seconds to compile
        monkeypatch.delattr(f"nbattn.cpu_ref.target.{run}")
    made = tensors()
    table, lens = np.array([[3, 0], [1, 9]]), np.array([13, 8])
    pair = np.stack([made["k_cache"], made["v_cache"]], 1)
    forms = {
        "combined": {"paged_kv_cache": pair},
        "block table": {"block_table": table, "kv_lens": lens},
        "HND": {**{name: made[name].swapaxes(1, 2) for name in ("k_cache", "v_cache")}, "kv_layout": np.array("HND")},
        "layers": {"kv_blocks": pair[:, :, None], "kv_lookup_table": table, "kv_lens": lens, "layer_idx": np.array(0)},
    }
    csr = ("kv_indptr", "kv_indices", "kv_last_page_len")
    for name, changes in forms.items():
        arrays = {**made, **changes}
        drop = {"combined": ("k_cache", "v_cache"), "block table": csr, "HND": ()}.get(
            name, ("k_cache", "v_cache", *csr)
        )
        arrays = {key: x for key, x in arrays.items() if key not in drop}
        assert all(c.passed for c in external.check_tensors(arrays)), name
    kv = nbattn.PagedKV.from_block_table(made["k_cache"], made["v_cache"], table, np.array([13, 8]))
    options = {"logits_soft_cap": 2.0, "sinks": np.ones(6, np.float32), "causal": False, "lse_base": "e"}
    lists = {"token_indices": np.array([[0, 12, 5], [1, 1, 9]], np.int32), "counts": np.array([3, 2], np.int32)}
    base = {k: x for k, x in made.items() if k not in ("out", "lse")}
    out, lse = oracle.paged_attention(made["q"], kv, rope=oracle.Rope(100.0, 2.0), return_lse=True, **options)
    given = {name: np.array(x) for name, x in options.items()}
    rope = {"rope_theta": np.array(100.0), "rope_scale": np.array(2.0)}
    assert all(c.passed for c in external.check_tensors({**base, **given, **rope, "out": out.astype("f4"), "lse": lse}))
    out = oracle.gather_attention(made["q"], kv, *lists.values())
    assert external.check_tensors({**base, **lists, "out": out.astype("f4")})[0].passed
    slots = {"k_cache": made["k_cache"], "v_cache": made["v_cache"], "kv_lens": np.array([8, 2]), "q": made["q"]}
    kv = nbattn.PagedKV.from_slots(made["k_cache"], made["v_cache"], np.array([8, 2]), np.array([2, 0]))
    out = oracle.paged_attention(made["q"], kv).astype("f4")
    assert external.check_tensors({**slots, "slot_ids": np.array([2, 0]), "out": out})[0].passed


def test_bfloat16_and_fp8_come_as_bytes(tmp_path):
    made = tensors()
    q = made["q"].astype(ml_dtypes.bfloat16)
    k, v = (made[name].astype(ml_dtypes.float8_e4m3fn) for name in ("k_cache", "v_cache"))
    kv = nbattn.PagedKV.from_page_table((k, v), made["kv_indptr"], made["kv_indices"], made["kv_last_page_len"])
    out = oracle.paged_attention(q, kv).astype(ml_dtypes.bfloat16)
    raw = {"q": q.view(np.uint16), "k_cache": k.view(np.uint8), "v_cache": v.view(np.uint8), "out": out.view(np.uint16)}
    named = {"q_dtype": "bfloat16", "kv_dtype": "float8_e4m3fn", "out_dtype": "bfloat16"}
    arrays = {**made, **raw, **{key: np.array(x) for key, x in named.items()}}
    del arrays["lse"]
    assert validate.main(save(tmp_path, arrays)) == 0
    arrays.update(q=q, out=out)  # saved as they are, NumPy makes them void
    assert validate.main(save(tmp_path, arrays)) == 0
    for name, key in (("q", "q_dtype"), ("k_cache", "kv_dtype"), ("out", "out_dtype")):
        for x in (raw[name], raw[name].view(f"V{raw[name].itemsize}")):
            message = f"^{name}: must be a float dtype.*, got .*: name the type in {key}.$"
            with pytest.raises(ContractError, match=message):
                external.check_tensors({**{k: v for k, v in arrays.items() if k != key}, name: x})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"q": None}, r"q: must be in the file \(the query rows\), found k_cache, "),
        ({"out": None}, r"out: must be in the file \(what the kernel returned\)"),
        ({"v_cache": None}, "v_cache: must be in the file"),
        ({"kv_indices": None}, "kv_indices: must be in the file .a CSR page table has"),
        ({"kv_indptr": None}, "kv_lens: must be in the file"),
        ({"windw_left": np.array(3)}, r"windw_left: must be a known key .* Did you mean window_left\?$"),
        ({"counts": np.zeros(2, np.int32)}, r"counts: must be a known key of this kind of file, .* the others\.$"),
        ({"kv_indices": None, "kv_index": np.zeros(3)}, r"kv_indices: must be in .* Did you mean kv_index\?$"),
        ({"kv_indptr": None, "kv_indprt": np.zeros(3)}, r"kv_indprt: must be a known key .* Did you mean kv_indptr\?$"),
        ({"kv_layuot": np.array("HND")}, r"kv_layuot: must be a known key .* Did you mean kv_layout\?$"),
        ({"token_indices": np.zeros((2, 1), np.int32)}, "counts: must be in the file"),
        ({"kv_last_page_len": np.array([9, 1])}, r"kv_last_page_len\[0\]: must be in 1\.\.8"),
        ({"out": np.zeros((2, 6, 8), np.float32)}, r"out: must have the shape \(2, 6, 16\), got \(2, 6, 8\)"),
        ({"out": np.zeros((2, 6, 16), np.int64)}, "out: must be a float dtype, got int64"),
        ({"out_dtype": np.array("int64"), "out": np.zeros((2, 6, 16), np.int64)}, "out: must be a float dtype, got"),
        ({"out": np.float32(0)}, r"out: must have the shape \(2, 6, 16\), got \(\)"),
        ({"lse": np.zeros((2, 6), np.uint16)}, r"lse: must be a float dtype, got uint16\. Save it as float32"),
        ({"q_dtype": np.array("float8_e5m2")}, "q: must hold the bytes of float8_e5m2 as q_dtype says, got float32"),
        ({"q_dtype": np.array("float7")}, "q_dtype: must name a NumPy or ml_dtypes type, got 'float7'"),
        ({"sinks": np.zeros(5, np.float32)}, r"sinks: must be \[6\]"),
        ({"causal": np.array("no")}, "causal: must be a bool, got 'no'"),
        ({"rope_theta": np.array(-1.0)}, r"rope\.theta: must be a positive finite number, got -1"),
    ],
)
def test_unusable_files_are_named(tmp_path, capsys, changes, message):
    arrays = {name: x for name, x in tensors(**changes).items() if x is not None}
    with pytest.raises(ContractError, match=message):
        external.check_tensors(arrays)
    assert validate.main(save(tmp_path, arrays)) == 2
    assert capsys.readouterr().err.startswith("nbattn validate: ")


def test_no_such_file_and_no_archive(tmp_path, capsys):
    assert validate.main(["--tensors", str(tmp_path / "none.npz")]) == 2
    (tmp_path / "text.npz").write_text("text")
    assert validate.main(["--tensors", str(tmp_path / "text.npz")]) == 2
    assert "text.npz: " in capsys.readouterr().err

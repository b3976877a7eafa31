"""The benchmark checks, times and reports every operator on the CPU, and its records can be drawn."""

import json

import bench
import bench_report
import bench_rivals
import bench_shapes
import numpy as np
import pytest
from bench_problems import problem_of

import nbattn

OPS = ["decode", "prefill", "cascade", "gather", "merge"]
RESULT_KEYS = {
    "kind", "op", "shape", "threads", "timer", "heads", "head_dim", "page_size", "layout", "dtype", "itemsize", "bytes",
    "flops", "repeats", "ours_us", "limit_us", "x_limit", "limits_us", "rivals_us", "rivals_ratio", "variants_ratio",
    "limit_bar", "rival_bar", "bars_threads",
}  # fmt: skip
TINY = {"heads": (4, 2), "head_dim": 16, "dtype": "float32"}
MERGED = {"heads": (16, 16), "head_dim": 32, "dtype": "float32"}  # 4096 bytes of sums


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    path = tmp_path_factory.mktemp("bench") / "results.jsonl"
    ops = ",".join([*OPS, "host"])
    status = bench.main(
        ["--shapes", "small", "--ops", ops, "--threads", "1", "--rivals", "numpy", "--quick", "--json", str(path)]
    )
    return status, path, [json.loads(line) for line in path.read_text().splitlines()]


def test_every_operator_is_timed_beside_its_limit(run):
    status, _, records = run
    results = [r for r in records if r["kind"] == "result"]
    assert status == 0
    assert [r["op"] for r in results] == [s.op for s in bench_shapes.small_shapes()]
    for r in results:
        assert set(r) == RESULT_KEYS
        assert min(r["ours_us"], r["limit_us"], *r["limits_us"].values()) > 0
        assert r["repeats"] == 3
    with_rival = {r["op"] for r in results if "numpy" in r["rivals_ratio"]}
    assert with_rival == {"decode", "prefill", "merge"}


def test_records_say_where_they_come_from(run):
    _, _, records = run
    assert records[0]["kind"] == "environment"
    assert {"date", "command", "device", "versions", "settings", "target"} <= set(records[0])
    assert {r["name"] for r in records if r["kind"] == "host"} >= {"planned decode of 1", "decode of 64, a layer"}


def test_report_ends_with_the_table_of_ratios(run):
    _, _, records = run
    text = bench_report.report(records)
    assert text.index("planned decode of 1") < text.index("x limit") < text.index("cascade  1 threads")


def test_picture_is_drawn(run, tmp_path):
    import plot_roofline

    _, path, _ = run
    for name in ("roofline.png", "roofline.svg"):
        assert plot_roofline.main([str(path), str(tmp_path / name)]) == 0
        assert (tmp_path / name).stat().st_size > 10_000


@pytest.mark.parametrize("text", [None, "", "no JSON", '{"kind": "environment"}', "[1]"])
def test_records_that_cannot_be_drawn_are_named(text, tmp_path, capsys):
    import plot_roofline

    if text is not None:
        (tmp_path / "results.jsonl").write_text(text)
    with pytest.raises(SystemExit):
        plot_roofline.main([str(tmp_path / "results.jsonl"), str(tmp_path / "roofline.png")])
    assert "error: json: must " in capsys.readouterr().err


def test_wrong_result_is_not_timed(monkeypatch, tmp_path):
    right = nbattn.merge_states

    def wrong(v, s):
        merged, lse = right(v, s)
        merged[-1, -1, -1] += 0.1
        return merged, lse

    monkeypatch.setattr(nbattn, "merge_states", wrong)
    path = tmp_path / "results.jsonl"
    arguments = ["--shapes", "small", "--ops", "merge", "--threads", "1", "--rivals", "none", "--quick"]
    assert bench.main([*arguments, "--json", str(path)]) == 1
    records = bench_report.read(str(path))
    results = [r["shape"].split()[0] for r in records if r["kind"] == "result"]
    assert results == ["merge_state", "merge_state_in_place"]
    (skipped,) = [r for r in records if r["kind"] == "skipped"]
    assert skipped["shape"].startswith("merge_states")
    assert "over the budget" in skipped["why"]


@pytest.mark.parametrize(
    "shape",
    [
        bench_shapes.Paged(batch=2, keys=37, layout="HND", ruled=True, **TINY),
        bench_shapes.Paged(batch=2, keys=37, rows=5, page_size=1, causal=False, **TINY),
        bench_shapes.Gather(rows=3, width=9, keys=21, page_size=4, **TINY),
    ],
    ids=lambda shape: f"{shape.op}-{shape.layout}",
)
def test_limit_reads_the_bytes_that_are_counted(shape):
    problem = problem_of(shape, np)
    addresses, size = problem.blocks(0)
    tokens = shape.batch * (shape.keys - shape.first_key) if shape.op != "gather" else shape.rows * shape.width
    slack = shape.batch * 2 * shape.page_size * shape.token_bytes if shape.op != "gather" else 0  # whole pages
    assert tokens * shape.token_bytes <= len(addresses) * size <= tokens * shape.token_bytes + slack
    begin = problem.caches[0].bits.ctypes.data
    assert addresses.min() >= begin
    assert addresses.max() + size <= begin + problem.caches[0].bits.nbytes
    assert all(c.passed for c in problem.check())


@pytest.mark.parametrize(
    "shape",
    [
        bench_shapes.Merge(rows=64, states=3, **MERGED),
        bench_shapes.Merge(rows=64, pair=True, **MERGED),
        bench_shapes.Merge(rows=64, pair=True, in_place=True, **MERGED),
    ],
    ids=lambda shape: shape.name.split()[0],
)
def test_limit_of_a_merge_counts_what_is_written(shape):
    problem = problem_of(shape, np)
    addresses, size = problem.blocks(0)
    assert len(addresses) * size == shape.bytes
    inputs = [x.bits for x in (*problem.values[0], *problem.sums)]
    places = np.concatenate([np.arange(x.ctypes.data, x.ctypes.data + x.nbytes, size) for x in inputs])
    assert set(addresses) == set(places)
    for _ in range(2):  # the second time from what the first one has written
        assert all(c.passed for c in problem.check())


def test_check_of_a_merge_in_place_sees_a_wrong_result(monkeypatch):
    problem = problem_of(bench_shapes.Merge(rows=64, pair=True, in_place=True, **MERGED), np)
    monkeypatch.setattr(nbattn, "merge_state_in_place", lambda *_: None)
    assert not any(c.passed for c in problem.check())


def test_rival_with_another_result_is_left_out():
    ours = np.ones((2, 2))
    assert bench_rivals.disagreement(np.float32([[1, 1], [1, 1.01]]), ours) == ""
    assert "wrong result" in bench_rivals.disagreement(np.float32([[1, 1], [1, 1.1]]), ours)


@pytest.mark.parametrize("name", ["openvino", "ggml"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("rows", [1, 5])
def test_rival_with_a_graph_of_its_own_agrees_with_us(name, dtype, rows):
    pytest.importorskip(bench_rivals.RIVALS[name][0])
    shape = bench_shapes.Paged(batch=3, keys=71, rows=rows, **(TINY | {"dtype": dtype, "head_dim": 64}))
    problem = problem_of(shape, np)
    ours = bench.host_result(problem, problem.ours()[0]())
    found, skipped = bench_rivals.contenders(problem, 2, [name], ours, bench_rivals.RIVALS)
    assert skipped == {}
    assert name in found
    for calls in found.values():
        assert len(calls) == problem.sets
        for call in calls:
            assert bench_rivals.disagreement(call(), ours) == ""


def test_rival_that_is_missing_or_wrong_or_fails_is_left_out_with_the_reason():
    def wrong(problem, threads):
        yield "wrong", [lambda: np.zeros((2, 2))]

    def failing(problem, threads):
        raise ValueError("no such kernel")
        yield

    registry = {"missing": ("no_such_package", wrong), "wrong": ("numpy", wrong), "failing": ("numpy", failing)}
    found, skipped = bench_rivals.contenders(None, 1, list(registry), np.ones((2, 2)), registry)
    assert found == {}
    assert skipped["missing"] == "not installed"
    assert skipped["wrong"].startswith("wrong result")
    assert skipped["failing"] == "ValueError: no such kernel"


def test_gpu_families_take_the_bars_of_their_ratios():
    record = {"op": "cascade", "itemsize": 2, "rivals_ratio": {"flashinfer cascade": 3.5, "flashinfer flat": 1.2}}
    assert bench_report.families(record) == {"cascade, best of three": 1.2, "cascade, default": 3.5}
    record = {"op": "prefill", "itemsize": 2, "rivals_ratio": {"flashinfer fa2": 1.1, "flashinfer fa3": 0.6}}
    assert bench_report.families(record) == {"prefill, fa2": 1.1}
    record = {
        "op": "decode",
        "itemsize": 1,
        "rivals_ratio": {"flashinfer cuda cores": 2.0, "flashinfer tensor cores": 1.5},
    }
    assert bench_report.families(record) == {"decode, 8-bit": 1.5}


@pytest.mark.parametrize("target", ["cpu", "cuda"])
def test_shape_names_tell_the_shapes_apart(target):
    shapes = bench_shapes.shapes_of("all", target)
    assert len({(s.op, s.name, s.threads) for s in shapes}) == len(shapes)

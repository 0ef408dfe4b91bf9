"""Draw a benchmark's CSV: how many times as fast we are as Inductor's own backend, one bar a case, with both medians written in it.

    python -m benchmarks.plot benchmarks/results/h200.csv docs/speed_h200.png

Wants matplotlib (`pip install -e '.[dev]'`).
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks import harness
from benchmarks.harness import BACKEND, BASELINE

FASTER, EVEN, SLOWER = "#2a7f62", "#8d99ae", "#c1440e"
# Ratios closer to 1 than this are drawn as even.
NOISE = 0.02


def draw(rows: Sequence[Mapping[str, str]], output: Path) -> None:
    """One figure of all measured rows, the fastest first. Raises ValueError where there is none."""
    from matplotlib import pyplot

    measured = sorted((row for row in rows if row.get("ratio")), key=lambda row: float(row["ratio"]))
    if not measured:
        raise ValueError("no row has a ratio: nothing was measured")
    figure, axes = pyplot.subplots(figsize=(10, 1.6 + 0.3 * len(measured)), layout="constrained")
    for height, row in enumerate(measured):
        speed = float(row["ratio"])
        axes.barh(height, speed, color=_color(speed), height=0.72)
        words = f"{speed:.2f}x   {_ms(row, BASELINE)} → {_ms(row, BACKEND)} ms   {row['lowerings']}"
        axes.text(max(speed, 1.0) + 0.02, height, words, va="center", fontsize=8)
    axes.axvline(1.0, color="black", linewidth=0.8)
    axes.set_yticks(range(len(measured)), [f"{r['model']}, {r['implementation']}, {r['scenario']}" for r in measured])
    axes.tick_params(axis="y", labelsize=8)
    axes.set_xlim(0, 1.7 * max(float(row["ratio"]) for row in measured))
    axes.set_xlabel('speed against torch.compile(model, backend="inductor"), median; right of the line is faster')
    where = measured[0]
    axes.set_title(f"{where['device']}, torch {where['torch']}, {where['dtype']}", fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(output, dpi=130)
    pyplot.close(figure)


def _color(ratio: float) -> str:
    if abs(ratio - 1) <= NOISE:
        return EVEN
    return FASTER if ratio > 1 else SLOWER


def _ms(row: Mapping[str, str], side: str) -> str:
    return f"{float(row[f'{side}_p50_ms']):.3g}"


def main() -> None:
    """Read the CSV and write the picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path)
    parser.add_argument("output", type=Path)
    options = parser.parse_args()
    draw(harness.read(options.results), options.output)


if __name__ == "__main__":
    main()

"""Draw how a model learnt with each recipe of FP8: its loss by step, the mean over seeds, in per cent above bfloat16's.

    python -m benchmarks.plot_learning benchmarks/results/fp8_training_h200.csv loss.svg [--dark]

The site draws it when it is made (website/plots.py). Wants matplotlib (`pip install -e '.[dev]'`).
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks import harness
from benchmarks.plot import SERIES, style

#: the way that others are held against
BESIDE = "bfloat16"


def curves(rows: Sequence[Mapping[str, str]]) -> dict[str, list[tuple[int, float]]]:
    """By the way of computing: steps, and the mean loss of all seeds there."""
    found: dict[str, list[tuple[int, float]]] = {}
    for way in dict.fromkeys(row["way"] for row in rows):
        mine = [row for row in rows if row["way"] == way]
        steps = [name for name in mine[0] if name.startswith("step_") and all(row[name] for row in mine)]
        found[way] = [(int(name[5:]), statistics.fmean(float(row[name]) for row in mine)) for name in steps]
    return found


def above(found: Mapping[str, Sequence[tuple[int, float]]]) -> dict[str, list[tuple[int, float]]]:
    """Of each other way, how many per cent its loss is above BESIDE's, at the steps that both have."""
    beside = dict(found[BESIDE])
    return {
        way: [(step, 100 * (loss / beside[step] - 1)) for step, loss in points if step in beside]
        for way, points in found.items()
        if way != BESIDE
    }


def draw(rows: Sequence[Mapping[str, str]], output: Path, *, dark: bool = False) -> None:
    """One figure, a line for each way. Raises ValueError where there is no row."""
    import matplotlib
    from matplotlib import pyplot

    found = curves(rows)
    if not found:
        raise ValueError("no row has a loss: nothing was measured")
    with matplotlib.rc_context(style(dark=dark)):
        figure, axes = pyplot.subplots(figsize=(6.4, 3.6), layout="constrained")
        for place, (way, points) in enumerate(above(found).items()):
            color, mark = SERIES[place % len(SERIES)]
            xs, ys = [step for step, _ in points], [loss for _, loss in points]
            axes.plot(xs, ys, color=color, marker=mark, markersize=4, markevery=4, linewidth=1.3, label=way)
        axes.set_xlabel("step")
        axes.set_ylabel(f"loss above {BESIDE}'s, per cent")
        axes.axhline(0, color=axes.xaxis.label.get_color(), linewidth=1.0)
        axes.grid()
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(fontsize=9)
        figure.savefig(output, dpi=130)
        pyplot.close(figure)


def main() -> None:
    """Read the CSV and write the picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--dark", action="store_true", help="for a dark page")
    options = parser.parse_args()
    draw(harness.read(options.results), options.output, dark=options.dark)


if __name__ == "__main__":
    main()

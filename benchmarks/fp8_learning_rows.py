"""What runs of learning come to: how far each way to compute attention is from the baseline, seed by seed. See fp8_learning.py."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.fp8_training import WINDOW

BASELINE = "bfloat16"
ORDER = (
    *(BASELINE, "bfloat16, flash", "bfloat16, triton"),
    *("per block", "per tensor", "delayed", "accurate", "backward too"),
)
_ENDS = ("loss", "held_out")

Rows = Sequence[Mapping[str, str]]


def against_baseline(rows: Rows, way: str, column: str) -> list[float]:
    """Per cent above the baseline's, seed by seed, of the seeds that both have."""
    usual = {row["seed"]: float(row[column]) for row in rows if row["way"] == BASELINE}
    own = [row for row in rows if row["way"] == way and row["seed"] in usual]
    return [100 * (float(row[column]) / usual[row["seed"]] - 1) for row in own]


def mean_and_error(values: Sequence[float]) -> tuple[float, float]:
    """The mean, and its standard error; NaN of one value alone."""
    error = statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else float("nan")
    return statistics.fmean(values), error


def shared(rows: Rows) -> Rows:
    """Those of the seeds that every way has: means over them compare."""
    of_each = [{row["seed"] for row in rows if row["way"] == way} for way in ways_of(rows)]
    common = set.intersection(*of_each)
    return [row for row in rows if row["seed"] in common]


def ways_of(rows: Rows) -> list[str]:
    """In ORDER, and then as they come."""
    found = dict.fromkeys(row["way"] for row in rows)
    return sorted(found, key=lambda name: ORDER.index(name) if name in ORDER else len(ORDER))


def print_table(rows: Rows) -> None:
    title = f"end of learning: mean of the seeds that all have, deviation of all; % above {BASELINE} seed by seed, with standard error"
    table = Table(title=title)
    for name in ("attention", "runs", "loss", "±", "%", "held out", "±", "%"):
        table.add_column(name)
    for way in ways_of(rows):
        cells = []
        for column in _ENDS:
            values = _values(rows, way, column)
            spread = statistics.stdev(values) if len(values) > 1 else float("nan")
            mean = statistics.fmean(_values(shared(rows), way, column) or values)
            cells += [f"{mean:.4f}", f"{spread:.4f}", _percent(against_baseline(rows, way, column))]
        table.add_row(way, str(len(_values(rows, way, "seed"))), *cells)
    Console(width=None if sys.stdout.isatty() else 120).print(table)


def _values(rows: Rows, way: str, column: str) -> list[float]:
    return [float(row[column]) for row in rows if row["way"] == way]


def _percent(values: Sequence[float]) -> str:
    if not values:
        return ""
    mean, error = mean_and_error(values)
    return f"{mean:+.2f} ± {error:.2f}"


def draw(rows: Rows, output: Path) -> None:
    """Each way's loss, its distance from the baseline's seed by seed on the way, and at the end of each run on held-out text."""
    from matplotlib import pyplot

    figure, axes = pyplot.subplot_mosaic(
        [["loss", "held_out"], ["apart", "held_out"]], figsize=(11, 6), layout="constrained", width_ratios=[3, 2]
    )
    columns = [name for name in rows[0] if name.startswith("step_") and all(row[name] for row in rows)]
    steps = [int(name.removeprefix("step_")) for name in columns]
    names = ways_of(rows)
    for i, way in enumerate(names):
        means = [statistics.fmean(_values(shared(rows) or rows, way, name)) for name in columns]
        (line,) = axes["loss"].plot(steps, means, label=way, linewidth=1.2)
        if way == BASELINE:
            low, high = ([pick(_values(rows, way, name)) for name in columns] for pick in (min, max))
            axes["loss"].fill_between(steps, low, high, color=line.get_color(), alpha=0.2, linewidth=0)
            continue
        color = line.get_color()
        apart = [mean_and_error(against_baseline(rows, way, name)) for name in columns]
        axes["apart"].errorbar(steps, *zip(*apart, strict=True), color=color, linewidth=1, elinewidth=0.5)
        ends = against_baseline(rows, way, "held_out")
        axes["held_out"].plot(ends, [i] * len(ends), "o", color=color, markersize=4, alpha=0.5)
        mean, error = mean_and_error(ends)
        axes["held_out"].errorbar([mean], [i], xerr=[error], fmt="|", color=color, markersize=16, capsize=4)
    _label(axes, names)
    figure.savefig(output, dpi=130)
    pyplot.close(figure)


def _label(axes: Mapping[str, Any], names: Sequence[str]) -> None:
    axes["loss"].set_ylabel(f"loss, mean of {WINDOW} steps\n(band: all seeds of {BASELINE})")
    axes["loss"].legend(frameon=False, fontsize="small")
    axes["apart"].set_ylabel(f"% above {BASELINE}\n(mean and standard error)")
    axes["apart"].set_xlabel("step")
    axes["apart"].axhspan(-1, 1, color="0.93")
    axes["held_out"].axvspan(-1, 1, color="0.93")
    axes["held_out"].set_yticks(range(1, len(names)), names[1:])
    axes["held_out"].invert_yaxis()
    axes["held_out"].set_xlabel(f"held-out text: % above {BASELINE}\n(each seed, mean and standard error)")
    for each in axes.values():
        each.spines[["top", "right"]].set_visible(False)

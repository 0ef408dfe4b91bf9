"""Draw a benchmark's CSV: how many times as fast we are as Inductor's own backend, a line for each model and a mark for each call.

    python -m benchmarks.plot benchmarks/results/h200.csv speed.svg [--dark]

The site draws them when it is made (website/plots.py). Wants matplotlib (`pip install -e '.[dev]'`).
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import harness

Row = Mapping[str, str]
#: of each series: a colour that is told apart on white and on black, also by who sees no green or no red, and a mark
SERIES = (("#3b82c4", "o"), ("#e08e0b", "s"), ("#2fa37c", "^"), ("#b565a7", "D"), ("#7d8896", "v"))
#: more kinds of calls than this are words of the lines, not marks
_MOST_MARKS = len(SERIES)
#: where the axis has numbers
_TICKS = (0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0)
_WORDS = {
    "prefill": "inference",
    "prefill_padded": "inference, padded",
    "prefill_cache": "inference, with a cache",
    "train": "training",
    "train_padded": "training, padded",
    "train_checkpointed": "training, checkpoints",
}


def style(*, dark: bool) -> dict[Any, Any]:
    """matplotlib's settings: text and lines for a light page or a dark one, and no ground."""
    text, line = ("#e7ebf0", "#56616d") if dark else ("#1a1f26", "#b4bdc7")
    names = ("text.color", "axes.labelcolor", "xtick.color", "ytick.color", "axes.titlecolor")
    return {
        **dict.fromkeys(names, text),
        "axes.edgecolor": line,
        "grid.color": line,
        "grid.linewidth": 0.5,
        "legend.frameon": False,
        "font.size": 10,
        "figure.facecolor": "none",
        "axes.facecolor": "none",
        "savefig.facecolor": "none",
    }


def draw(rows: Sequence[Row], output: Path, *, dark: bool = False) -> None:
    """One figure of all measured rows, the fastest first, with a panel for each implementation of the model's attention. Raises ValueError
    where there is none."""
    import matplotlib
    from matplotlib import pyplot

    measured = [row for row in rows if row.get("ratio")]
    if not measured:
        raise ValueError("no row has a ratio: nothing was measured")
    calls = list(dict.fromkeys(row["scenario"] for row in measured))
    marked = len(calls) <= _MOST_MARKS
    panels = {
        name: lines(_of(measured, name), marked=marked)
        for name in dict.fromkeys(row["implementation"] for row in measured)
    }
    heights = [0.8 + len(panel) for panel in panels.values()]
    with matplotlib.rc_context(style(dark=dark)):
        figure, grid = pyplot.subplots(
            len(panels),
            1,
            figsize=(6.4, 1.5 + 0.27 * sum(heights)),
            height_ratios=heights,
            sharex=True,
            squeeze=False,
            layout="constrained",
        )
        found = list(grid[:, 0])
        for axes, (name, panel) in zip(found, panels.items(), strict=True):
            _panel(axes, panel, calls if marked else [""])
            axes.set_title(f"attention as {name}", fontsize=10, loc="left")
        speed_axis(found, [float(row["ratio"]) for row in measured])
        found[-1].set_xlabel("times as fast as Inductor; right of 1x is faster")
        if marked:
            handles, names = found[0].get_legend_handles_labels()
            figure.legend(handles, names, fontsize=9, loc="outside lower center", ncols=2)
        where = measured[0]
        figure.suptitle(f"{where['device']}, torch {where['torch'].partition('+')[0]}, {where['dtype']}", fontsize=10)
        figure.savefig(output, dpi=130)
        pyplot.close(figure)


def _of(rows: Sequence[Row], implementation: str) -> list[Row]:
    return [row for row in rows if row["implementation"] == implementation]


def lines(rows: Sequence[Row], *, marked: bool) -> dict[str, dict[str, float]]:
    """By the words of a line, the largest ratio first: the ratio of each call. marked: calls are marks, else they are in the words."""
    found: dict[str, dict[str, float]] = {}
    for row in rows:
        words = row["model"] if marked else f"{row['model']}, {row['scenario']}"
        found.setdefault(words, {})[row["scenario"] if marked else ""] = float(row["ratio"])
    return dict(sorted(found.items(), key=lambda item: -max(item[1].values())))


def _panel(axes: Any, panel: Mapping[str, Mapping[str, float]], calls: Sequence[str]) -> None:
    places = range(len(panel) - 1, -1, -1)
    for call, (color, mark) in zip(calls, SERIES, strict=False):
        points = [(each[call], y) for each, y in zip(panel.values(), places, strict=True) if call in each]
        axes.scatter([x for x, _ in points], [y for _, y in points], color=color, marker=mark, s=34, zorder=3)
        # A panel that lacks a call has its name all the same: the legend is of all panels.
        axes.scatter([], [], color=color, marker=mark, s=34, label=_WORDS.get(call, call))
    axes.set_yticks(list(places), list(panel))
    axes.set_ylim(-0.7, len(panel) - 0.3)


def speed_axis(panels: Sequence[Any], ratios: Sequence[float]) -> None:
    """A logarithmic axis with numbers above and below, and a line where both are equally fast."""
    least, most = 0.93 * min(1.0, *ratios), 1.1 * max(ratios)
    for axes in panels:
        axes.set_xscale("log")
        axes.set_xlim(least, most)
        axes.set_xticks([x for x in _TICKS if least <= x <= most])
        axes.xaxis.set_major_formatter("{x:g}x")
        axes.xaxis.set_minor_locator(_nothing())
        axes.axvline(1.0, color=axes.xaxis.label.get_color(), linewidth=1.0)
        axes.grid(axis="both")
        axes.tick_params(axis="x", labelbottom=True, labeltop=axes is panels[0], length=0)
        axes.tick_params(axis="y", length=0)
        axes.spines[["top", "right", "left"]].set_visible(False)


def _nothing() -> Any:
    from matplotlib import ticker

    return ticker.NullLocator()


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

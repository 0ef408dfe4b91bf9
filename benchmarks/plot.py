"""Draw a benchmark's CSV.

    python -m benchmarks.plot benchmarks/results/h200.csv speed.svg [--dark]
    python -m benchmarks.plot benchmarks/results/select_h200.csv select.svg --of select
    python -m benchmarks.plot benchmarks/results/fp8_training_h200.csv loss.svg --of learning

Of models: how many times as fast we are as Inductor's own backend, a line for each model and a mark for each call. Of bench_select.py: for
each kind of mask, how many times as long as our choice the fastest kernel, PyTorch's own and the site as an unmodified model presents it
take. Of learning with each recipe of FP8: the loss by step, the mean over seeds, in per cent above bfloat16's.

The site draws them when it is made (website/plots.py). Wants matplotlib (`pip install -e '.[dev]'`).
"""

from __future__ import annotations

import statistics
import sys
from argparse import Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import harness, select_rows
from benchmarks.bench_select import Shape
from benchmarks.harness import arg, command

Row = Mapping[str, str]
#: of each series: a colour that is told apart on white and on black, also by who sees no green or no red, and a mark
SERIES = (("#3b82c4", "o"), ("#e08e0b", "s"), ("#2fa37c", "^"), ("#b565a7", "D"), ("#7d8896", "v"))
#: more kinds of calls than this are words of the lines, not marks
_MOST_MARKS = len(SERIES)
#: where the axis has numbers
_TICKS = (0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0)
_WORDS = {
    "prefill": "inference", "prefill_padded": "inference, padded", "prefill_cache": "inference, with a cache",
    "train": "training", "train_padded": "training, padded", "train_checkpointed": "training, checkpoints",
}  # fmt: skip


def style(*, dark: bool) -> dict[Any, Any]:
    """matplotlib's settings: text and lines for a light page or a dark one, and no ground."""
    text, line = ("#e7ebf0", "#56616d") if dark else ("#1a1f26", "#b4bdc7")
    names = ("text.color", "axes.labelcolor", "xtick.color", "ytick.color", "axes.titlecolor")
    return {
        **dict.fromkeys(names, text), "axes.edgecolor": line, "grid.color": line, "grid.linewidth": 0.5,
        "legend.frameon": False, "font.size": 10, "figure.facecolor": "none", "axes.facecolor": "none",
        "savefig.facecolor": "none",
    }  # fmt: skip


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
        name: lines([row for row in measured if row["implementation"] == name], marked=marked)
        for name in dict.fromkeys(row["implementation"] for row in measured)
    }
    heights = [0.8 + len(panel) for panel in panels.values()]
    with matplotlib.rc_context(style(dark=dark)):
        figure, grid = pyplot.subplots(
            len(panels), 1, figsize=(6.4, 1.5 + 0.27 * sum(heights)), height_ratios=heights, sharex=True,
            squeeze=False, layout="constrained",
        )  # fmt: skip
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
    from matplotlib import ticker

    least, most = 0.93 * min(1.0, *ratios), 1.1 * max(ratios)
    for axes in panels:
        axes.set_xscale("log")
        axes.set_xlim(least, most)
        axes.set_xticks([x for x in _TICKS if least <= x <= most])
        axes.xaxis.set_major_formatter("{x:g}x")
        axes.xaxis.set_minor_locator(ticker.NullLocator())
        axes.axvline(1.0, color=axes.xaxis.label.get_color(), linewidth=1.0)
        axes.grid(axis="both")
        axes.tick_params(axis="x", labelbottom=True, labeltop=axes is panels[0], length=0)
        axes.tick_params(axis="y", length=0)
        axes.spines[["top", "right", "left"]].set_visible(False)


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


def draw_learning(rows: Sequence[Mapping[str, str]], output: Path, *, dark: bool = False) -> None:
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


#: the name of a side, or "best", and its words
_SIDES = (
    ("presented", "as the model has it: dense mask, repeated K and V"),
    ("sdpa", "scaled_dot_product_attention, clean inputs"),
    ("best", "the fastest of all kernels"),
)
#: from the smallest to the largest ratio, and the geometric mean
Spread = tuple[float, float, float]


def draw_select(rows: Sequence[Mapping[str, str]], output: Path, *, dark: bool = False) -> None:
    """One figure with a panel for each pass, of the choices that are made now. Raises ValueError where nothing was measured."""
    import matplotlib
    from matplotlib import pyplot

    shapes = select_rows.replayed(rows)
    if not shapes:
        raise ValueError("no row has a time and a choice: nothing was measured")
    passes = sorted({shape.which for shape in shapes}, reverse=True)
    found = {which: spreads([shape for shape in shapes if shape.which == which]) for which in passes}
    with matplotlib.rc_context(style(dark=dark)):
        size = (6.4, 1.8 + sum(0.6 + 0.42 * len(kinds) for kinds in found.values()))
        figure, panels = pyplot.subplots(len(passes), 1, figsize=size, layout="constrained", squeeze=False, sharex=True)
        for axes, which in zip(panels[:, 0], passes, strict=True):
            _select_panel(axes, found[which])
            axes.set_title(which, fontsize=10, loc="left")
        speed_axis(
            panels[:, 0], [x for kinds in found.values() for sides in kinds.values() for x in _ends(sides.values())]
        )
        panels[-1, 0].set_xlabel("its time over that of our choice; right of 1x ours is faster")
        handles, labels = panels[0, 0].get_legend_handles_labels()
        figure.legend(handles, labels, fontsize=9, loc="outside lower center")
        where = rows[0]
        figure.suptitle(f"{where['device']}, torch {where['torch'].partition('+')[0]}, {where['dtype']}", fontsize=10)
        figure.savefig(output, dpi=130)
        pyplot.close(figure)


def spreads(shapes: Sequence[Shape]) -> dict[str, dict[str, Spread]]:
    """By the kind of attention, and by side: the smallest ratio, the geometric mean and the largest."""
    found: dict[str, dict[str, Spread]] = {}
    for kind in sorted({_kind(shape) for shape in shapes}):
        mine = [shape for shape in shapes if _kind(shape) == kind]
        for side, _ in _SIDES:
            ratios = [
                ratio for shape in mine if (ratio := shape.ratio(shape.best if side == "best" else side)) is not None
            ]
            if ratios:
                spread = (min(ratios), statistics.geometric_mean(ratios), max(ratios))
                found.setdefault(kind, {})[side] = spread
    # A kind that has the fastest kernel alone shows nothing.
    return {kind: sides for kind, sides in found.items() if len(sides) > 1}


def _kind(shape: Shape) -> str:
    """ "causal gqa" of "causal_gqa_d128_s8192"."""
    return shape.case.partition("_d")[0].replace("_", " ")


def _ends(spreads: Any) -> list[float]:
    return [x for least, _, most in spreads for x in (least, most)]


def _select_panel(axes: Any, kinds: Mapping[str, Mapping[str, Spread]]) -> None:
    for place, (side, words) in enumerate(_SIDES):
        color, mark = SERIES[place]
        points = [(sides[side], -y - 0.22 * (place - 1)) for y, sides in enumerate(kinds.values()) if side in sides]
        for (least, _, most), y in points:
            axes.plot([least, most], [y, y], color=color, linewidth=1.2, zorder=2)
        axes.scatter(
            [mean for (_, mean, _), _ in points], [y for _, y in points], color=color, marker=mark, s=30, zorder=3,
            label=words,
        )  # fmt: skip
    axes.set_yticks([-y for y in range(len(kinds))], list(kinds))
    axes.set_ylim(0.6 - len(kinds), 0.6)


DRAWINGS = {"models": draw, "select": draw_select, "learning": draw_learning}


@command(
    __doc__,
    arg("results", type=Path),
    arg("output", type=Path),
    arg("--dark", action="store_true", help="for a dark page"),
    arg("--of", choices=list(DRAWINGS), default="models"),
)
def main(given: Namespace) -> None:
    """Read the CSV and write the picture."""
    DRAWINGS[given.of](harness.read(given.results), given.output, dark=given.dark)


if __name__ == "__main__":
    sys.exit(main())

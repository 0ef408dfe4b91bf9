"""Draw what bench_select.py measured: for each kind of mask, how many times as long as our choice the fastest kernel, PyTorch's own and the
site as an unmodified model presents it take.

    python -m benchmarks.plot_select benchmarks/results/select_h200.csv select.svg [--dark]

The site draws it when it is made (website/plots.py). Wants matplotlib (`pip install -e '.[dev]'`).
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import harness, select_rows, standing
from benchmarks.plot import SERIES, speed_axis, style

#: the name of a side, or "best", and its words
_SIDES = (
    ("presented", "as the model has it: dense mask, repeated K and V"),
    ("sdpa", "scaled_dot_product_attention, clean inputs"),
    ("best", "the fastest of all kernels"),
)
#: from the smallest to the largest ratio, and the geometric mean
Spread = tuple[float, float, float]


def draw(rows: Sequence[Mapping[str, str]], output: Path, *, dark: bool = False) -> None:
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
            _panel(axes, found[which])
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


def spreads(shapes: Sequence[standing.Shape]) -> dict[str, dict[str, Spread]]:
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


def _kind(shape: standing.Shape) -> str:
    """ "causal gqa" of "causal_gqa_d128_s8192"."""
    return shape.case.partition("_d")[0].replace("_", " ")


def _ends(spreads: Any) -> list[float]:
    return [x for least, _, most in spreads for x in (least, most)]


def _panel(axes: Any, kinds: Mapping[str, Mapping[str, Spread]]) -> None:
    for place, (side, words) in enumerate(_SIDES):
        color, mark = SERIES[place]
        points = [(sides[side], -y - 0.22 * (place - 1)) for y, sides in enumerate(kinds.values()) if side in sides]
        for (least, _, most), y in points:
            axes.plot([least, most], [y, y], color=color, linewidth=1.2, zorder=2)
        axes.scatter(
            [mean for (_, mean, _), _ in points],
            [y for _, y in points],
            color=color,
            marker=mark,
            s=30,
            zorder=3,
            label=words,
        )
    axes.set_yticks([-y for y in range(len(kinds))], list(kinds))
    axes.set_ylim(0.6 - len(kinds), 0.6)


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

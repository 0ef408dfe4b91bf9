"""Draw what bench_select.py measured: for each shape, how many times as long as our choice the best side, PyTorch's own, and the site
as an unmodified model presents it take.

    python -m benchmarks.plot_select benchmarks/results/select_h200.csv docs/select_h200.png

Wants matplotlib (`pip install -e '.[dev]'`).
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import harness, select_rows, standing
from benchmarks.plot import EVEN, FASTER, SLOWER

# The name of a side, or "best"; its colour, mark and words.
_SERIES = (
    ("presented", EVEN, "^", "as the model presents it: dense mask, repeated K/V"),
    ("sdpa", FASTER, "o", "scaled_dot_product_attention on clean inputs"),
    ("best", SLOWER, "|", "the fastest of all kernels"),
)


def draw(rows: Sequence[Mapping[str, str]], output: Path) -> None:
    """One figure with a panel for each pass, of the choices that are made now. Raises ValueError where nothing was measured."""
    from matplotlib import pyplot

    shapes = select_rows.replayed(rows)
    if not shapes:
        raise ValueError("no row has a time and a choice: nothing was measured")
    passes = list(dict.fromkeys(shape.which for shape in shapes))
    most = max(sum(shape.which == which for shape in shapes) for which in passes)
    size = (8 * len(passes), 1.8 + 0.16 * most)
    figure, panels = pyplot.subplots(1, len(passes), figsize=size, layout="constrained", squeeze=False)
    for axes, which in zip(panels[0], passes, strict=True):
        _panel(axes, sorted((s for s in shapes if s.which == which), key=lambda shape: shape.case, reverse=True))
        axes.set_title(which, fontsize=10)
    handles, labels = panels[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, fontsize=8, loc="outside lower center", ncols=len(_SERIES))
    where = rows[0]
    figure.suptitle(f"{where['device']}, torch {where['torch']}, cuDNN {where['cudnn']}, {where['dtype']}", fontsize=10)
    figure.savefig(output, dpi=110)
    pyplot.close(figure)


def _panel(axes: Any, shapes: Sequence[standing.Shape]) -> None:
    for side, color, mark, words in _SERIES:
        found = [
            (ratio, place)
            for place, shape in enumerate(shapes)
            if (ratio := shape.ratio(shape.best if side == "best" else side)) is not None
        ]
        xs, ys = [ratio for ratio, _ in found], [place for _, place in found]
        axes.scatter(xs, ys, color=color, marker=mark, s=22, label=words)
    axes.axvline(1.0, color="black", linewidth=0.8)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:g}x")
    axes.set_yticks(range(len(shapes)), [f"{shape.case}: {shape.chosen}" for shape in shapes], fontsize=6)
    axes.set_xlabel("its time over that of the kernel we choose; right of the line, ours is faster", fontsize=8)
    axes.set_ylim(-0.7, len(shapes) - 0.3)


def main() -> None:
    """Read the CSV and write the picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path)
    parser.add_argument("output", type=Path)
    options = parser.parse_args()
    draw(harness.read(options.results), options.output)


if __name__ == "__main__":
    main()

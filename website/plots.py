"""The plots of the site, as SVG for a light and for a dark page, drawn from the CSVs of benchmarks/results when the site is made.

A page says where one goes by `<!-- plot: NAME -->`, which a reader of the repository does not see.
"""

from __future__ import annotations

import posixpath
import re
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import plot
from website.gains import MODELS, Row, rows_of

_PLACE = re.compile(r"<!-- plot: (\w+) -->")


@dataclass(frozen=True, kw_only=True)
class Plot:
    """words: what it shows, for who does not see it. file: the CSV. draw: of its rows and a path. rows: makes those from the CSV's."""

    words: str
    file: str
    draw: Callable[..., None] = plot.draw
    rows: Callable[[Sequence[Row]], Sequence[Row]] = list


def _named(rows: Sequence[Row]) -> Sequence[Row]:
    return [{**row, "model": MODELS.get(row["model"], row["model"])} for row in rows]


def _of_unpad(rows: Sequence[Row]) -> Sequence[Row]:
    """Under the names of the other benchmarks."""
    return [
        {
            **row,
            "model": row["case"],
            "implementation": "sdpa",
            "scenario": f"{row['inputs']}, {float(row['fill']):.0%} real",
            "attn_compiler_p50_ms": row["unpad_p50_ms"],
            "ratio": row["over_inductor"],
        }
        for row in rows
    ]


PLOTS: Mapping[str, Plot] = {
    "h200": Plot(words="Speed against Inductor on an H200, by model and call", file="h200", rows=_named),
    "cpu": Plot(words="Speed against Inductor on a CPU", file="cpu"),
    "unpad": Plot(words="Speed against Inductor on a CPU with unpad", file="unpad_cpu", rows=_of_unpad),
    "select": Plot(words="Our choice beside other kernels", file="select_h200", draw=plot.draw_select),
    "fp8_training": Plot(
        words="How far the loss is above that of bfloat16, by step and FP8 recipe",
        file="fp8_training_h200",
        draw=plot.draw_learning,
    ),
}


def given(name: str) -> Sequence[Row]:
    """The rows that a plot is drawn of."""
    return PLOTS[name].rows(rows_of(PLOTS[name].file))


def drawn(name: str, *, dark: bool) -> str:
    """One plot as the text of an SVG. Equal rows give equal texts."""
    import matplotlib

    fixed: dict[Any, Any] = {"svg.hashsalt": name, "svg.fonttype": "path"}
    with tempfile.TemporaryDirectory() as folder, matplotlib.rc_context(fixed):
        matplotlib.use("svg")
        path = Path(folder) / f"{name}.svg"
        PLOTS[name].draw(given(name), path, dark=dark)
        return path.read_text(encoding="utf-8")


def files() -> dict[str, str]:
    """Every plot, by its path in the site."""
    return {
        f"plots/{name}_{mode}.svg": drawn(name, dark=mode == "dark") for name in PLOTS for mode in ("light", "dark")
    }


def placed(markdown: str, here: str) -> str:
    """A page's text with its plots: the theme shows the one of its mode. here: its path in the site. Raises KeyError for no plot."""
    up = posixpath.relpath("plots", posixpath.dirname(here) or ".")

    def images(found: re.Match[str]) -> str:
        name = found[1]
        return "\n".join(f"![{PLOTS[name].words}]({up}/{name}_{mode}.svg#only-{mode})" for mode in ("light", "dark"))

    return _PLACE.sub(images, markdown)

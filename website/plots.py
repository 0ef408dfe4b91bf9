"""The plots of the site, as SVG, drawn from the CSVs of benchmarks/results."""

from __future__ import annotations

import csv
import tempfile
from collections.abc import Mapping
from pathlib import Path

from benchmarks import plot
from website import links

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"

HEAD = """# Plots

Each bar is one case: how many times as fast as `torch.compile(model, backend="inductor")`, with both medians. They are drawn
when this site is made, from the rows that are linked. [How it was measured](benchmarks.md).
"""

#: name -> (heading, CSV)
PLOTS = {
    "h200": ("An H200, bfloat16", "h200"),
    "cpu": ("A CPU, one thread, float32", "cpu"),
    "unpad": ("A CPU, without padding (`options={'unpad': True}`)", "unpad_cpu"),
}


def rows_of(name: str) -> list[dict[str, str]]:
    """The rows of a CSV, with the columns that a plot wants."""
    with (RESULTS / f"{name}.csv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    return [_of_unpad(row) for row in rows] if name == "unpad_cpu" else rows


def _of_unpad(row: Mapping[str, str]) -> dict[str, str]:
    """A row of unpad_cpu.csv under the names of the other benchmarks."""
    scenario = f"{row['inputs']}, {float(row['fill']):.0%} real"
    ours = {"attn_compiler_p50_ms": row["unpad_p50_ms"], "ratio": row["over_inductor"]}
    return {**row, "model": row["case"], "implementation": "sdpa", "scenario": scenario, **ours}


def drawn(name: str) -> str:
    """One plot as the text of an SVG. Equal rows give equal texts."""
    import matplotlib

    _, results = PLOTS[name]
    fixed = {"svg.hashsalt": name, "svg.fonttype": "path"}
    with tempfile.TemporaryDirectory() as folder, matplotlib.rc_context(fixed):
        matplotlib.use("svg")
        path = Path(folder) / f"{name}.svg"
        plot.draw(rows_of(results), path)
        return path.read_text(encoding="utf-8")


def page() -> str:
    """The page that shows them."""
    parts = [
        f"## {heading}\n\n[rows]({links.copy_of(f'benchmarks/results/{results}.csv')})\n\n![{heading}](plots/{name}.svg)\n"
        for name, (heading, results) in PLOTS.items()
    ]
    return "\n".join([HEAD, *parts])

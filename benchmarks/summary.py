"""The rows of bench_h200.py for Markdown: geometric means of each comparison, and a table.

python -m benchmarks.summary benchmarks/results/h200.csv # prints both python -m benchmarks.summary benchmarks/results/h200.csv --newer
FILE.csv # its rows replace those of the same cases, first
"""

from __future__ import annotations

import statistics
import sys
from argparse import Namespace
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks import bench_h200, harness, models
from benchmarks.harness import BACKEND, BASELINE, Row, arg, command

_WORDS = {"prefill_padded": "prefill, padded", "train_padded": "train, padded", "prefill_cache": "prefill, cache"}


def merged(rows: Sequence[Row], newer: Sequence[Row]) -> list[Row]:
    """All rows, one for each case, in the order of families, cases and implementations; a newer one counts if it was measured."""
    found = {_case(row): row for row in rows}
    found |= {_case(row): row for row in newer if row.get("ratio")}
    return [found[case] for case in sorted(found, key=_place)]


def _case(row: Row) -> tuple[str, ...]:
    return tuple(row.get(key, "") for key in bench_h200.KEYS)


def _place(case: tuple[str, ...]) -> tuple[object, ...]:
    family, implementation, scenario, *rest = case
    orders = (list(models.SCENARIOS), list(models.FAMILIES), list(bench_h200.IMPLEMENTATIONS))
    return (*(order.index(name) for order, name in zip(orders, (scenario, family, implementation), strict=True)), *rest)


def means(rows: Sequence[Row]) -> Iterator[str]:
    """Lines of Markdown: for each implementation on Inductor's side, the geometric mean of the ratios of each scenario and of all, in
    brackets of how many, and the smallest."""
    scenarios = [name for name in models.SCENARIOS if any(row["scenario"] == name for row in rows)]
    yield from _header("Inductor with", *(_WORDS.get(name, name) for name in scenarios), "all", "smallest")
    for implementation in bench_h200.IMPLEMENTATIONS:
        mine = [row for row in rows if row["implementation"] == implementation]
        if mine:
            groups = [[row for row in mine if row["scenario"] == name] for name in scenarios]
            smallest = min(mine, key=lambda row: float(row["ratio"]))
            least = f"{float(smallest['ratio']):.2f} ({smallest['model']}, {_WORDS.get(smallest['scenario'], smallest['scenario'])})"
            yield _line(implementation, *map(_mean, groups), _mean(mine), least)


def _mean(rows: Sequence[Row]) -> str:
    ratios = [float(row["ratio"]) for row in rows]
    return f"{statistics.geometric_mean(ratios):.2f} ({len(ratios)})" if ratios else ""


def table(rows: Sequence[Row]) -> Iterator[str]:
    """Lines of Markdown, one for each row."""
    yield from _header("model", "attention", "case", "kernel", "Inductor, ms", "ours, ms", "ratio")
    for row in rows:
        times = (f"{float(row[f'{side}_p50_ms']):.3g}" for side in (BASELINE, BACKEND))
        kernels = (row["lowerings"] or row["forced"]).replace(" x", " ×")
        case = _WORDS.get(row["scenario"], row["scenario"])
        yield _line(row["model"], row["implementation"], case, kernels, *times, row["ratio"])


def _header(*names: str) -> tuple[str, str]:
    return _line(*names), "|---" * len(names) + "|"


def _line(*cells: str) -> str:
    return "| " + " | ".join(cells) + " |"


@command(
    __doc__,
    arg("results", type=Path),
    arg("--newer", type=Path, nargs="+", default=[], help="files whose rows are taken into the first"),
)
def main(given: Namespace) -> None:
    """Merge if asked to, and print."""
    rows: Sequence[Row] = harness.read(given.results)
    if given.newer:
        newer = [row for path in given.newer for row in harness.read(path)]
        rows = merged(rows, newer)
        columns = list(dict.fromkeys(name for row in (*newer, *rows) for name in row))
        harness.write(given.results, columns, rows, lineterminator="\r\n")
    measured = [row for row in rows if row.get("ratio")]
    print(*means(measured), "", *table(measured), sep="\n")


if __name__ == "__main__":
    sys.exit(main())

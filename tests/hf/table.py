"""The survey's results as a CSV (a row a case), and the tables of docs/models.md (a row a family, then what failed and what is absent)."""

from __future__ import annotations

import csv
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.hf import mask_kinds
from tests.hf.scenarios import SCENARIOS
from tests.hf.survey import FAMILY, Case, Result

COLUMNS = (
    "family", "scenario", "impl", "dtype", "status", "found", "expected", "uncaptured", "graphs", "lowerings",
    "patterns", "masks", "kinds", "unproved", "verified", "biases", "unverified", "scores", "misses", "max_error",
    "limit", "seconds", "detail",
)  # fmt: skip


def write_csv(results: Sequence[Result], path: Path) -> None:
    """max_error: the worst tensor's error over its largest value; limit: that error over the allowed one. seconds: wall time."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(COLUMNS)
        writer.writerows(_row(result) for result in results)


def _row(result: Result) -> list[str]:
    row = []
    for column in COLUMNS:
        value = getattr(result.case, column) if hasattr(result.case, column) else getattr(result, column)
        if isinstance(value, tuple):
            value = "; ".join(x if isinstance(x, str) else " × ".join(map(str, reversed(x))) for x in value)
        elif isinstance(value, float):
            value = f"{value:.3g}"
        row.append("" if value is None else str(value))
    return row


def read_csv(path: Path) -> list[Result]:
    """Results of what the pages say: patterns, masks, scores and misses stay in the file."""
    with path.open(newline="", encoding="utf-8") as file:
        return [_read(row) for row in csv.DictReader(file)]


def _read(row: Mapping[str, str]) -> Result:
    counted = (part.partition(" × ") for part in _parts(row["kinds"]))
    return Result(
        case=Case(**{name: row[name] for name in ("family", "scenario", "impl", "dtype")}),
        status=row["status"],
        detail=row["detail"],
        **{name: int(row[name] or 0) for name in ("found", "expected", "uncaptured", "graphs", "verified", "biases")},  # type: ignore[arg-type]
        **{name: _parts(row[name]) for name in ("lowerings", "unproved", "unverified")},  # type: ignore[arg-type]
        **{name: float(row[name]) if row[name] else None for name in ("max_error", "limit")},  # type: ignore[arg-type]
        kinds=tuple((kind, int(count)) for count, _, kind in counted),
    )


def _parts(cell: str) -> tuple[str, ...]:
    return tuple(filter(None, cell.split("; ")))


def found(results: Sequence[Result]) -> list[str]:
    """Totals, what was found in each family and scenario, masks, and failures."""
    ran = _ran(results)
    return [
        _totals(ran),
        "",
        *_grid(ran),
        "",
        "### Masks",
        "",
        *masks(results),
        "",
        *_section("Masks made in the graph and not proved", _reasons(ran, "unproved")),
        *_section("Masks and biases not held against the model's own", _reasons(ran, "unverified")),
        *_section("Failures", [(r.case.id, f"{r.status}: {r.detail}") for r in ran if r.failed]),
    ]


def masks(results: Sequence[Result]) -> list[str]:
    ran = _ran(results)
    return [
        *mask_kinds.table([(r.case.family, r.kinds) for r in ran]),
        "",
        f"{sum(r.verified for r in ran)} masks and {sum(r.biases for r in ran)} biases were held against the model's own at"
        " every index.",
    ]


def of_other_release(results: Sequence[Result]) -> list[str]:
    return [_totals(_ran(results)), "", *masks(results)]


def others(results: Sequence[Result]) -> list[str]:
    """Lowerings, and what is not in the totals."""
    ran = _ran(results)
    return [
        *_lowerings([(r.case.family, r.case.impl, r.lowerings) for r in ran]),
        *_section("Left to Python by Dynamo", _uncaptured(ran)),
        *_section("Absent", _absences(results)),
    ]


def _ran(results: Sequence[Result]) -> list[Result]:
    return [result for result in results if result.status not in ("absent", "unavailable")]


def _totals(ran: Sequence[Result]) -> str:
    sites = f"{sum(r.found for r in ran)} of {sum(r.expected for r in ran)} attention sites found"
    return f"{len(ran)} cases ran: {sites}, {sum(r.failed for r in ran)} cases failed."


def _grid(ran: Sequence[Result]) -> list[str]:
    """A row a family and implementation, a column a scenario; a cell sums its dtypes and shows the worst error over its limit."""
    scenarios = [scenario.name for scenario in SCENARIOS]
    cells: dict[tuple[str, str], dict[str, list[Result]]] = defaultdict(lambda: defaultdict(list))
    for result in ran:
        cells[result.case.family, result.case.impl][result.case.scenario].append(result)
    lines = [
        "Sites found / in the model and, in brackets, the worst error as a part of what is allowed.",
        "",
        "| family | attention | " + " | ".join(scenarios) + " |",
        "|---" * (len(scenarios) + 2) + "|",
    ]
    for (family, impl), row in cells.items():
        lines.append(f"| {family} | {impl} | " + " | ".join(_cell(row[name]) for name in scenarios) + " |")
    return lines


def _cell(results: Sequence[Result]) -> str:
    if not results:
        return "–"
    text = f"{sum(r.found for r in results)}/{sum(r.expected for r in results)}"
    limits = [r.limit for r in results if r.limit is not None]
    text += f" ({max(limits):.2g})" if limits else ""
    return f"**{text}**" if any(r.failed for r in results) else text


def _lowerings(ran: Sequence[tuple[str, str, Sequence[str]]]) -> list[str]:
    """The lowerings that serve each family, a row a family and implementation."""
    found: dict[tuple[str, str], dict[str, None]] = defaultdict(dict)
    for family, impl, lowerings in ran:
        found[family, impl].update(dict.fromkeys(lowerings))
    rows = [f"| {family} | {impl} | {', '.join(names) or 'none'} |" for (family, impl), names in found.items()]
    return ["### Lowerings", "", "| family | attention | lowerings |", "|---|---|---|", *rows, ""]


def _reasons(ran: Sequence[Result], column: str) -> list[tuple[str, str]]:
    """Each reason with the families and scenarios that it was given in."""
    where: dict[str, dict[str, None]] = defaultdict(dict)
    for result in ran:
        for reason in getattr(result, column):
            where[reason][f"{result.case.family} {result.case.scenario} {result.case.impl}"] = None
    return [(", ".join(names), reason) for reason, names in where.items()]


def _uncaptured(ran: Sequence[Result]) -> list[tuple[str, str]]:
    return [
        (r.case.id, f"{r.uncaptured} attentions: {FAMILY[r.case.family].uncaptured[r.case.scenario].why}")
        for r in ran
        if r.uncaptured
    ]


def _absences(results: Sequence[Result]) -> list[tuple[str, str]]:
    found: dict[tuple[str, str], dict[str, None]] = defaultdict(dict)
    for result in results:
        if result.status in ("absent", "unavailable"):
            found[result.case.family, result.detail][f"{result.case.impl} {result.case.scenario}"] = None
    return [(family, f"{', '.join(where)}: {why}") for (family, why), where in found.items()]


def _section(title: str, rows: Sequence[tuple[str, str]]) -> list[str]:
    if not rows:
        return []
    return [f"### {title}", "", *(f"- {name}: {text.splitlines()[0]}" for name, text in rows), ""]

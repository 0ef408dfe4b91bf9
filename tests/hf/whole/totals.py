"""Totals of a survey of a whole package, and the rows that differ at the second size."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from tests.hf.today.running import DATA, NONE, PARTLY, PROVED, TARGETS, Row

_NOT_YET = "not run yet"


def is_failed(row: Row) -> bool:
    """Whether a model failed, or attention was passed over in silence."""
    return row.status == "error" or row.found + sum(row.misses.values()) < row.total


def not_yet(name: str) -> Row:
    """The row of a file or model that a run did not come to."""
    return Row(model=name, call="not built", device="meta", status="unavailable", detail=_NOT_YET)


def is_waiting(row: Row) -> bool:
    return row.detail == _NOT_YET


def lines(rows: Sequence[Row]) -> list[str]:
    """How much was run, and a row of totals for each implementation and size."""
    names = {_unit(row) for row in rows}
    lacking = {_unit(row) for row in rows if row.status != "ok"}
    ran = {_unit(row) for row in rows if row.status == "ok"}
    waiting = {row.model for row in rows if is_waiting(row)}
    calls = list(dict.fromkeys(row.call for row in rows if row.status == "ok"))
    return [
        f"{len(names)} with an attention: {len(names - lacking)} run as a whole, {len(ran & lacking)} in part, "
        f"{len(names - ran - waiting)} not{f', {len(waiting)} not yet' if waiting else ''}.",
        "",
        f"| call | models | found | misses | no mask | proved | in part | data | {' | '.join(map(_heading, TARGETS))} |",
        "|---" * (8 + len(TARGETS)) + "|",
        *(_line(call, [row for row in rows if row.call == call and row.status == "ok"]) for call in calls),
        "",
        f"At the second size {len(list(differing(rows)))} models have fewer attentions found, proved or on a kernel.",
    ]


def _heading(machine: str) -> str:
    return f"{machine}: slow, dense, of these proved"


def _unit(row: Row) -> str:
    return row.model.partition(" ")[0]


def _line(call: str, rows: Sequence[Row]) -> str:
    masks: Counter[str] = Counter()
    for row in rows:
        masks.update(row.masks)
    found, total = sum(row.found for row in rows), sum(row.total for row in rows)
    misses = sum(sum(row.misses.values()) for row in rows)
    kinds = [masks[state] for state in (NONE, PROVED, PARTLY, DATA)]
    slow = [
        f"{sum(r.slow(m) for r in rows)}, {sum(_dense(r, m, '*') for r in rows)}, {sum(_dense(r, m, '**') for r in rows)}"
        for m in TARGETS
    ]
    return f"| {' | '.join(map(str, [call, len(rows), f'{found}/{total}', misses, *kinds, *slow]))} |"


def _dense(row: Row, machine: str, stars: str) -> int:
    return sum(count for name, count in row.kernels.get(machine, {}).items() if name.endswith(stars))


def differing(rows: Sequence[Row]) -> Iterator[tuple[Row, Row]]:
    """Pairs of a model's first and second size of which the second has less."""
    first = {(row.model, row.call.removesuffix(", first")): row for row in rows if row.call.endswith(", first")}
    for row in rows:
        before = first.get((row.model, row.call.removesuffix(", second")))
        if before is not None and row.call.endswith(", second") and _knows(row) < _knows(before):
            yield before, row


def _knows(row: Row) -> tuple[int, ...]:
    return (
        row.found - row.total,
        -row.masks.get(PARTLY, 0) - row.masks.get(DATA, 0),
        -sum(row.slow(m) for m in TARGETS),
    )

"""A table of what is the same in every run: a line for each thing, with its kind, and how two of them differ."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Mapping
from pathlib import Path

COLUMNS = ("kind", "name", "what", "value")
#: lines of a failure that are shown; the others are counted
_SHOWN = 40

#: (kind, name, what) -> value
Table = Mapping[tuple[str, str, str], str]


def read(path: Path) -> dict[tuple[str, str, str], str]:
    with path.open(newline="") as file:
        return {(row["kind"], row["name"], row["what"]): row["value"] for row in csv.DictReader(file)}


def write(path: Path, table: Table) -> None:
    with path.open("w", newline="") as file:
        rows = csv.writer(file, lineterminator="\n")
        rows.writerow(COLUMNS)
        rows.writerows([*key, value] for key, value in table.items())


def of_kinds(table: Table, kinds: Iterable[str]) -> dict[tuple[str, str, str], str]:
    """The lines of these kinds."""
    wanted = set(kinds)
    return {key: value for key, value in table.items() if key[0] in wanted}


def differences(before: Table, now: Table) -> list[str]:
    """A line for each thing that is not as before: "launch causal_128, attention_forward 0: was grid 8 4 2, is grid 4 4 2"."""
    said = []
    for key in [*before, *(key for key in now if key not in before)]:
        was, is_now = before.get(key, "not there"), now.get(key, "not there")
        if was != is_now:
            kind, name, what = key
            said.append(f"{kind} {name}, {what}: was {was}, is {is_now}")
    return said


def failure(said: list[str], command: str) -> str:
    """What a test says where something differs. command: makes the table anew."""
    shown = said[:_SHOWN]
    further = [f"... and {len(said) - len(shown)} more"] if len(said) > len(shown) else []
    return "\n".join([f"{len(said)} lines differ", *shown, *further, f"if that is meant: {command}"])

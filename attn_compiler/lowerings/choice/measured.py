"""Tables of measured rows: CSV files beside this one, and a frozen class for each, whose fields are its columns.

The rows nearest to a shape decide, up to a limit beyond which it is too far from all of them.
"""

from __future__ import annotations

import csv
import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar


class HasLength(Protocol):
    """A row with the length that it was measured at."""

    @property
    def seqlen(self) -> int: ...


X = TypeVar("X")
Row = TypeVar("Row", bound=HasLength)

_YES_NO: Mapping[str, bool | None] = {"yes": True, "no": False, "": None}
_READ: Mapping[str, Callable[[str], Any]] = {
    "str": str,
    "int": int,
    "float": float,
    "bool": _YES_NO.__getitem__,
    "bool | None": _YES_NO.__getitem__,
}
#: largest ratio of the shortest row's length to a shape's, and of a shape's longer length to its shorter one: rows say nothing beyond
_FAR = 2


class Table(Generic[Row]):
    """Rows of a CSV file. path: of the file. kind: a dataclass for the rows. A field named like a word of Python ends in an underscore."""

    def __init__(self, path: str | Path, kind: type[Row]) -> None:
        self.path = Path(__file__).with_name(path) if isinstance(path, str) else path
        self.kind = kind
        fields: tuple[dataclasses.Field[Any], ...] = dataclasses.fields(kind)  # type: ignore[arg-type]
        self._columns = {field.name.rstrip("_"): field for field in fields}
        self._rows: tuple[Row, ...] | None = None

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of the columns, in the order of the file."""
        return tuple(self._columns)

    def rows(self) -> tuple[Row, ...]:
        """Return the rows. The file is read once."""
        if self._rows is None:
            with self.path.open(newline="") as file:
                self._rows = tuple(map(self._row, csv.DictReader(file)))
        return self._rows

    def nearest(
        self,
        applies: Callable[[Row], bool],
        seqlens: tuple[int, int],
        further: Callable[[Row], tuple[float, ...]] = lambda row: (),
        wanted: tuple[float, ...] = (),
    ) -> list[Row] | str:
        """Return, of the rows that apply, those of the nearest length, and then of the nearest further sizes.

        Where rows say nothing of such lengths, return why; "" if no row applies. seqlens: the smaller and the larger one.
        """
        there = [row for row in self.rows() if applies(row)]
        least = min((row.seqlen for row in there), default=0)
        if there and is_far(seqlens, least):
            return f"lengths of {seqlens[0]} and {seqlens[1]}, and the nearest row has S {least}"
        return nearest_rows(there, lambda row: (row.seqlen, *further(row)), (seqlens[0], *wanted)) or ""

    def _row(self, line: Mapping[str, str]) -> Row:
        return self.kind(**{field.name: _READ[str(field.type)](line[name]) for name, field in self._columns.items()})


def is_far(seqlens: tuple[int, int], least: int) -> bool:
    """Return whether rows say nothing of these lengths. seqlens: the smaller and the larger one. least: the shortest row's."""
    shorter, longer = seqlens
    return _FAR * shorter < least or longer > _FAR * shorter


def nearest_rows(rows: Iterable[X], sizes: Callable[[X], tuple[float, ...]], wanted: tuple[float, ...]) -> list[X]:
    """Return all rows that are as near as the nearest one. The first size decides, as a ratio, and then the next one.

    sizes: of a row, as many as `wanted` has.
    """
    near = [(_distance(sizes(row), wanted), row) for row in rows]
    least = min((distance for distance, _ in near), default=None)
    return [row for distance, row in near if distance == least]


def _distance(sizes: tuple[float, ...], wanted: tuple[float, ...]) -> tuple[float, ...]:
    return tuple(abs(math.log(max(a, 1)) - math.log(max(b, 1))) for a, b in zip(sizes, wanted, strict=True))

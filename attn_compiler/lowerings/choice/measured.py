"""Tables of measured rows: CSV files beside this one, and a frozen class for each, whose fields are its columns."""

from __future__ import annotations

import csv
import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Generic, TypeVar

Row = TypeVar("Row")

_YES_NO: Mapping[str, bool | None] = {"yes": True, "no": False, "": None}
_READ: Mapping[str, Callable[[str], Any]] = {
    "str": str,
    "int": int,
    "float": float,
    "bool": _YES_NO.__getitem__,
    "bool | None": _YES_NO.__getitem__,
}


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

    def _row(self, line: Mapping[str, str]) -> Row:
        return self.kind(**{field.name: _READ[str(field.type)](line[name]) for name, field in self._columns.items()})

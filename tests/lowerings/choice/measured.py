"""Rows of a test's own in place of those that were measured, and what those rest on."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from attn_compiler.lowerings.choice.measured import Table

_RESULTS = Path(__file__).parents[3] / "benchmarks" / "results"


def without_evidence(module: Any, results: str, sides: Sequence[str], *keys: str) -> list[tuple[str, ...]]:
    """Speeds in a module's rows that no row of a file of benchmarks/results has: of the same case, day and `keys`, by side."""
    with (_RESULTS / results).open(newline="") as file:
        seen = {
            (*(row[x] for x in ("case", "date", *keys)), row["side"], row["tflops"]) for row in csv.DictReader(file)
        }
    with module.TABLE.path.open(newline="") as file:
        said = [
            (*(row[x] for x in ("case", "since", *keys)), side, row[side])
            for row in csv.DictReader(file)
            for side in sides
        ]
    return [speed for speed in said if speed not in seen]


@contextmanager
def rows_from(module: Any, lines: str, folder: Path) -> Iterator[None]:
    """A module of choice/ reads these lines within the block. folder: for its file."""
    path = folder / "rows.csv"
    path.write_text(lines)
    with mock.patch.object(module, "TABLE", Table(path, module.TABLE.kind)):
        yield

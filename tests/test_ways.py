"""docs/ways.md: every row is of a test that there is, and every recipe has a row."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tests.integrations import launching

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "ways.md").read_text(encoding="utf-8")
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in PAGE.splitlines()
    if re.match(r"\| .*`tests/", line)
]


def _functions(path: Path) -> set[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("row", ROWS, ids=lambda row: str(row[0]))
def test_a_row_is_of_a_test_that_there_is(row: list[str]) -> None:
    _, counts, known, equal, by = row
    found, there = map(int, counts.split(" / "))
    assert int(known) <= found <= there
    assert found == there or "as it was" in equal or "as they were" in equal
    path, _, name = by.strip("`").partition("::")
    assert name in _functions(ROOT / path)


def test_every_recipe_has_a_row() -> None:
    ways = [row[0].casefold() for row in ROWS]
    for heading in launching.recipes():
        assert any(way.startswith(heading.casefold()) for way in ways), heading


def test_pages_lead_there() -> None:
    assert "(ways.md)" in (ROOT / "docs" / "launchers.md").read_text(encoding="utf-8")

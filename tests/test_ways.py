"""Rows of docs/models.md (ways.csv): each is of a test that there is, and every recipe has one."""

from __future__ import annotations

import ast
import csv
from pathlib import Path

import pytest

from tests.integrations import launching

ROOT = Path(__file__).parents[1]
with (ROOT / "tests" / "ways.csv").open(newline="", encoding="utf-8") as file:
    ROWS = list(csv.DictReader(file))


def _functions(path: Path) -> set[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["way"])
def test_a_row_is_of_a_test_that_there_is(row: dict[str, str]) -> None:
    found, there, equal = int(row["found"]), int(row["there"]), row["equal"]
    assert int(row["known"]) <= found <= there
    assert found == there or "as it was" in equal or "as they were" in equal
    path, _, name = row["test"].partition("::")
    assert name in _functions(ROOT / path)


def test_every_recipe_has_a_row() -> None:
    ways = [row["way"].casefold() for row in ROWS]
    for heading in launching.recipes():
        assert any(way.startswith(heading.casefold()) for way in ways), heading


def test_pages_lead_there() -> None:
    assert "(models.md#ways-to-run-a-model)" in (ROOT / "docs" / "recipes.md").read_text(encoding="utf-8")

"""docs/recipes.md: every recipe is short, and one of these tests runs it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integrations import launching

RECIPES = launching.recipes()
TESTS = [path.read_text(encoding="utf-8") for path in Path(__file__).parent.glob("test_*.py")]


@pytest.mark.parametrize("heading", RECIPES)
def test_a_recipe_has_ten_lines_and_a_test(heading: str) -> None:
    assert len([line for line in RECIPES[heading].splitlines() if line.strip()]) <= 10
    assert any(f'"{heading}"' in text for text in TESTS)

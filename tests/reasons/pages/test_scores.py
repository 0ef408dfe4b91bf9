"""Pages of masks and scores: each example gives its page's code."""

from __future__ import annotations

import pytest

from attn_compiler.reasons.pages import Page, scores
from tests.reasons.pages import running


@running.each(scores.PAGES)
@pytest.mark.filterwarnings("ignore")
def test_its_example_gives_the_code(page: Page) -> None:
    assert running.gives_its_code(page)


def test_its_codes_are_one_group() -> None:
    assert running.groups(scores.PAGES) == {"AC3xx"}
    assert str(scores.__doc__).startswith("AC3xx: ")

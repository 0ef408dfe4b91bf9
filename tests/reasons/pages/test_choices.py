"""Pages of what was asked for: each example gives its page's code."""

from __future__ import annotations

import pytest

from attn_compiler.reasons.pages import Page, choices
from tests.reasons.pages import running


@running.each(choices.PAGES)
@pytest.mark.filterwarnings("ignore")
def test_its_example_gives_the_code(page: Page) -> None:
    assert running.gives_its_code(page)


def test_its_codes_are_one_group() -> None:
    assert running.groups(choices.PAGES) == {"AC4xx"}
    assert str(choices.__doc__).startswith("AC4xx: ")

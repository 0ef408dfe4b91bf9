"""Pages of q, k and v: each example gives its page's code."""

from __future__ import annotations

import pytest

from attn_compiler.reasons.pages import Page, tensors
from tests.reasons.pages import running


@running.each(tensors.PAGES)
@pytest.mark.filterwarnings("ignore")
def test_its_example_gives_the_code(page: Page) -> None:
    assert running.gives_its_code(page)


def test_its_codes_are_one_group() -> None:
    assert running.groups(tensors.PAGES) == {"AC2xx"}
    assert str(tensors.__doc__).startswith("AC2xx: ")

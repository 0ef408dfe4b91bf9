"""Pages of DTensors: what an example in words names is there."""

from __future__ import annotations

from attn_compiler.reasons.pages import dtensors
from tests.reasons.pages import running


def test_what_is_named_is_there() -> None:
    files = running.files_told(dtensors.PAGES)
    assert files
    assert [path for path in files if not path.exists()] == []


def test_its_codes_are_one_group() -> None:
    assert running.groups(dtensors.PAGES) == {"AC7xx"}
    assert str(dtensors.__doc__).startswith("AC7xx: ")

"""Pages of faults of ours: what an example in words names is there."""

from __future__ import annotations

from attn_compiler.reasons.pages import faults
from tests.reasons.pages import running


def test_what_is_named_is_there() -> None:
    files = running.files_told(faults.PAGES)
    assert files
    assert [path for path in files if not path.exists()] == []


def test_its_codes_are_one_group() -> None:
    assert running.groups(faults.PAGES) == {"AC8xx"}
    assert str(faults.__doc__).startswith("AC8xx: ")

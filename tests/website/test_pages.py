"""Generated pages: those that stand in docs/ are what the code says now, and the others can be made."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from attn_compiler.lowerings import LOWERINGS
from attn_compiler.options.options import Options
from attn_compiler.reasons.codes import Code
from attn_compiler.reasons.pages import PAGES, ExampleKind
from website import codes, gains, options, supported

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"


def test_the_page_of_what_is_supported_is_current() -> None:
    """python -m website.supported > docs/supported.md"""
    assert (DOCS / "supported.md").read_text(encoding="utf-8") == supported.page()


def test_every_lowering_is_on_that_page() -> None:
    text = (DOCS / "supported.md").read_text(encoding="utf-8")
    assert [x.name for x in LOWERINGS if f"`{x.name}`" not in text and x.name != "reference_fp8"] == []


def test_the_list_of_codes_is_current() -> None:
    """python -m website.codes > docs/codes.md"""
    assert (DOCS / "codes.md").read_text(encoding="utf-8") == codes.listed()


def test_the_page_of_a_code_has_its_parts() -> None:
    of = PAGES[Code.DTYPE]
    text = codes.page(of, "q is float16; observed float32 (AC201)")
    for part in (f"# AC201: {of.title}", of.cause, of.remedy, "q is float16; observed float32 (AC201)"):
        assert part in text
    raises = next(page for page in PAGES.values() if page.kind is ExampleKind.RAISES)
    assert raises.example in codes.page(raises, "x")
    told = next(page for page in PAGES.values() if page.kind is ExampleKind.TOLD)
    assert "```" not in codes.page(told, None)


def test_a_page_shows_nothing_that_a_reader_can_not_run() -> None:
    assert [code for code, of in PAGES.items() if "why_not(" in codes.page(of, "x") + of.remedy] == []


def test_codes_become_links_but_in_code_in_headings_and_on_their_own_page() -> None:
    text = "# AC201\n\nAC201, `AC201` and AC999\n\n```text\nAC201\n```\n"
    linked = codes.linked(text, "codes/")
    assert linked == text.replace("\nAC201,", "\n[AC201](codes/AC201.md),")
    assert codes.linked(text, "codes/", own="AC201") == text


def test_every_option_is_described() -> None:
    words = options.described()
    assert set(words) == {field.name for field in dataclasses.fields(Options)}
    assert all(text.endswith((".", ").")) for text in words.values())
    assert "| `unpad` | `False` |" in options.page()


def test_readmes_numbers_are_those_of_the_rows_that_they_link_to() -> None:
    rows = re.findall(
        r"^\|.*\| ([\d.]+) ms \| ([\d.]+) ms \| \[([\d.]+)x\]\((\S+)\) \|.*$",
        (ROOT / "README.md").read_text(),
        re.MULTILINE,
    )
    assert len(rows) == len(gains.README) > 6
    for inductor, ours, ratio, path in rows:
        numbers = [float(x) for x in re.findall(r"(?<=,)\d+\.?\d*(?=[,\n])", (ROOT / path).read_text())]
        assert any(_rounds_to(x, inductor) for x in numbers)
        assert any(_rounds_to(x, ours) for x in numbers)
        # A row of both sides has the median of the ratios, which may be another number than the ratio of the medians.
        assert any(_rounds_to(x, ratio) for x in (*numbers, round(float(inductor) / float(ours), 2)))


def _rounds_to(number: float, text: str) -> bool:
    """Whether a number is what a text says, to the digits that it has."""
    digits = len(text.partition(".")[2])
    return abs(number - float(text)) <= 0.5001 * 10**-digits


def test_lines_of_fields_become_a_list() -> None:
    pytest.importorskip("griffe", reason="pip install -e '.[docs]'")
    from website.fields import listed

    text = "One graph.\n\nseconds: time by pass.\nfaults: what failed,\n    and where.\n\nNote that: no."
    assert (
        listed(text)
        == "One graph.\n\n- `seconds`: time by pass.\n- `faults`: what failed,\n    and where.\n\nNote that: no."
    )

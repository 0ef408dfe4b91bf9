"""Markup: whatever is put in comes out as text."""

from __future__ import annotations

import html
from html.parser import HTMLParser

import pytest
from hypothesis import given, strategies as st

from attn_compiler.reporting.page.markup import Markup, element, escaped, facts, folded, joined, table

HOSTILE = ["<script>alert(1)</script>", '"><img src=x onerror=alert(1)>', "' onload='x", "&lt;b&gt;", "]]></style>"]


class _Seen(HTMLParser):
    """What a parser makes of a text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.text = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs

    def handle_data(self, data: str) -> None:
        self.text += data


@pytest.mark.parametrize("text", HOSTILE)
def test_text_stays_text_and_attributes_stay_attributes(text: str) -> None:
    seen = _Seen(element("p", text, title=text))
    assert seen.tags == ["p"]
    assert seen.attributes == [("title", text)]
    assert seen.text == text


@given(st.text())
def test_any_text_can_be_read_again(text: str) -> None:
    seen = _Seen(element("p", text, title=text))
    assert seen.tags == ["p"]
    assert seen.text == html.unescape(escaped(text))
    seen.text.encode("utf-8")


def test_what_no_document_holds_is_shown_by_its_number() -> None:
    assert escaped("a\x00b\x1b\ud800\u202ec\n") == "a\\u0000b\\u001b\\ud800\\u202ec\n"


def test_markup_is_not_escaped_again() -> None:
    inner = element("b", "<")
    assert element("p", inner) == "<p><b>&lt;</b></p>"
    assert escaped(inner) is inner


def test_joining_a_string_to_markup_gives_a_string_that_is_escaped() -> None:
    assert not isinstance(element("b") + "<i>", Markup)
    assert element("p", element("b") + "<i>") == "<p>&lt;b&gt;&lt;/b&gt;&lt;i&gt;</p>"


def test_attributes_are_left_out_or_have_no_value() -> None:
    assert (
        element("details", open_=True, class_=None, hidden=False, aria_label="x")
        == '<details open aria-label="x"></details>'
    )
    assert element("meta", charset="utf-8") == '<meta charset="utf-8">'


def test_what_is_empty_is_left_out() -> None:
    assert joined(["a", None, "", "b"], "<") == "a&lt;b"
    assert facts([("Nothing", None)]) == ""
    assert facts([("A", "1"), ("B", "")]) == "<dl><div><dt>A</dt><dd>1</dd></div></dl>"


def test_tables_have_headers_with_scopes() -> None:
    made = table("All", ("Name", "Bytes"), [("q", "8"), ("k", "4")], numbers=frozenset({1}))
    assert (
        '<caption>All</caption><thead><tr><th scope="col">Name</th><th scope="col" class="number">Bytes</th></tr>'
        in made
    )
    assert '<tr><th scope="row">q</th><td class="number">8</td></tr><tr><th scope="row">k</th>' in made
    # It scrolls by keys where it is too wide.
    assert made.startswith('<div class="wide" tabindex="0" role="group" aria-label="All">')


def test_folds() -> None:
    assert folded("More", "text") == "<details><summary>More</summary>text</details>"

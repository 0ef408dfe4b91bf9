"""Paragraphs and sentences of a page, to hold their lengths: code, headings and links' targets are none of them."""

from __future__ import annotations

import re
from collections.abc import Iterator

MOST_WORDS_OF_A_SENTENCE = 35
MOST_WORDS_OF_A_PARAGRAPH = 120

_FENCED = re.compile(r"^( *)(```|~~~).*?^\1\2[ ]*$", re.MULTILINE | re.DOTALL)
_COMMENT = re.compile(r"<!--.*?-->", re.DOTALL)
_LINK = re.compile(r"!?\[([^\]]*)\]\([^)]*\)")
_RULE = re.compile(r"^[|:\- ]+$")
_ITEM = re.compile(r"^ *(?:[-*+]|\d+\.) +")
_CELLS = re.compile(r"(?<!\\)\|")
_END = re.compile(r"(?<=[.!?])[)\"*_]*\s+|(?<=[.!?][)\"*_])\s+")


def paragraphs(markdown: str) -> Iterator[str]:
    """Each paragraph, item of a list and cell of a table, in one line."""
    lines: list[str] = []
    # A line that is indented by four is code, unless it goes on with a paragraph or an item.
    for line in [*_COMMENT.sub("", _FENCED.sub("", markdown)).splitlines(), ""]:
        item = _ITEM.match(line)
        if item or not line.strip() or line.startswith(("#", "|")):
            yield from _joined(lines)
            lines = []
        if line.startswith("|"):
            yield from _cells(line)
        elif item:
            lines = [line[item.end() :]]
        elif line.strip() and not line.startswith("#") and (lines or not line.startswith("    ")):
            lines.append(line)


def sentences(paragraph: str) -> list[str]:
    return [each for each in _END.split(paragraph) if each]


def too_long(markdown: str, most_words_of_a_sentence: int = MOST_WORDS_OF_A_SENTENCE) -> list[str]:
    """What of a page is longer than it may be, with its number of words."""
    found: list[str] = []
    for paragraph in paragraphs(markdown):
        if len(paragraph.split()) > MOST_WORDS_OF_A_PARAGRAPH:
            found.append(f"a paragraph of {len(paragraph.split())} words: {paragraph[:80]}")
        found += [
            f"a sentence of {len(sentence.split())} words: {sentence}"
            for sentence in sentences(paragraph)
            if len(sentence.split()) > most_words_of_a_sentence
        ]
    return found


def _joined(lines: list[str]) -> Iterator[str]:
    text = " ".join(_LINK.sub(r"\1", " ".join(lines)).split())
    if text:
        yield text


def _cells(row: str) -> Iterator[str]:
    if not _RULE.match(row):
        for cell in _CELLS.split(row):
            yield from _joined([cell])

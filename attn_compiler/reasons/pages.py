"""Meaning, cause and remedy of each code: `PAGES`, and `page_of`. pages.md has the words. This imports no torch."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from attn_compiler.reasons.codes import Code


class ExampleKind(Enum):
    """Instructions to run an example.

    DECISION: an expression; `why_not(lowering, attention(...), Target.fake(...))` gives reasons, without a GPU.
    PROGRAM: Python that defines `model` and `inputs`, and `options` if it has any; `explain` is asked on a CPU.
    RAISES: Python that raises the error.
    TOLD: words, if no small program can show it.
    """

    DECISION = "decision"
    PROGRAM = "program"
    RAISES = "raises"
    TOLD = "told"


@dataclass(frozen=True, kw_only=True, slots=True)
class Page:
    """The page of one code.

    title: the event, in a few words.
    cause: when it happens, and why it has to.
    remedy: what to do, or that there is nothing to do.
    kind: of `example`.
    example: a way to meet the code.
    """

    code: Code
    title: str
    cause: str
    remedy: str
    kind: ExampleKind
    example: str


_FENCED = re.compile(r"```python (\w+)\n(.*)\n```", re.DOTALL)


def read(markdown: str) -> Iterator[tuple[str, tuple[Page, ...]]]:
    """Yield (heading, pages) of each section. Raises ValueError for a page that lacks a part."""
    for section in re.split(r"^## ", markdown, flags=re.MULTILINE)[1:]:
        heading, *pages = re.split(r"^### ", section, flags=re.MULTILINE)
        yield heading.strip(), tuple(map(_page, pages))


def _page(text: str) -> Page:
    head, _, below = text.partition("\n\n")
    code, _, title = head.partition(": ")
    cause, _, below = below.partition("\n\n**What to do.** ")
    remedy, _, example = below.strip().partition("\n\n")
    if not (title and cause and remedy and example):
        raise ValueError(f"the page of {code} lacks its title, its cause, what to do, or its example")
    fenced = _FENCED.fullmatch(example)
    return Page(
        code=Code(code),
        title=title,
        cause=_joined(cause),
        remedy=_joined(remedy),
        kind=ExampleKind.TOLD if fenced is None else ExampleKind(fenced[1]),
        example=_joined(example.removeprefix("**Example.** ")) if fenced is None else fenced[2],
    )


def _joined(text: str) -> str:
    return " ".join(text.split())


#: (heading, pages), in the order of the codes
SECTIONS = tuple(read(Path(__file__).with_suffix(".md").read_text(encoding="utf-8")))
PAGES: dict[Code, Page] = {page.code: page for _, pages in SECTIONS for page in pages}


def advice(code: Code) -> str:
    """Return the first sentence of what to do, as the end of a longer one."""
    first = re.split(r"(?<=\.) (?=[A-Z`])", PAGES[code].remedy)[0].replace("`", "").rstrip(".")
    return first[0].lower() + first[1:]


def page_of(text: str) -> Page | None:
    """Return the page of "AC201", in any case; None if there is no such code."""
    try:
        return PAGES[Code(text.upper())]
    except ValueError:
        return None

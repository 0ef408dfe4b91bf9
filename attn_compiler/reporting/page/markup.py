"""HTML without injection: `element` escapes everything that is not `Markup` already. Nothing else makes Markup.

It replaces a template engine. Names of modules, ops and files come from models, and a forgotten escape here gives text, and no markup.
Types are checked, too, which they are not in templates.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterable

#: elements without an end
_VOID = frozenset({"meta"})

#: forbidden in documents, escaped or not: control characters, lone surrogates, and noncharacters
_FORBIDDEN = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]")
#: direction marks, which can disguise a line
_DIRECTIONS = re.compile("[\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")


class Markup(str):
    """Text that is HTML: made by `element` and `joined`, or written in this package's own source."""

    __slots__ = ()


#: None and "" are left out
Content = str | None


def escaped(text: str) -> Markup:
    """Escape text. Forbidden characters and direction marks are shown by their number."""
    if isinstance(text, Markup):
        return text
    shown = _DIRECTIONS.sub(_number, _FORBIDDEN.sub(_number, text))
    return Markup(html.escape(shown, quote=True))


def _number(found: re.Match[str]) -> str:
    return f"\\u{ord(found.group()):04x}"


def joined(parts: Iterable[Content], between: str = "") -> Markup:
    """Join all parts that are not empty, escaped."""
    return Markup(escaped(between).join(escaped(part) for part in parts if part))


def element(tag: str, *content: Content, **attributes: str | bool | None) -> Markup:
    """Return <tag attribute="...">content</tag>. Attributes: "_" is written "-", and one at the end is left out; None and False are left
    out."""
    written = "".join(_attribute(name, value) for name, value in attributes.items())
    if tag in _VOID:
        return Markup(f"<{tag}{written}>")
    return Markup(f"<{tag}{written}>{joined(content)}</{tag}>")


def _attribute(name: str, value: str | bool | None) -> str:
    if value is None or value is False:
        return ""
    name = name.removesuffix("_").replace("_", "-")
    return f" {name}" if value is True else f' {name}="{escaped(value)}"'


def code(text: str) -> Markup:
    """Mark up a name, a path or a formula."""
    return element("code", text)


def folded(summary: Content, *content: Content, open_: bool = False, class_: str | None = None) -> Markup:
    """Fold content under a summary."""
    return element("details", element("summary", summary), *content, open_=open_, class_=class_)


def table(
    caption: str, columns: Iterable[str], rows: Iterable[Iterable[Content]], *, numbers: frozenset[int] = frozenset()
) -> Markup:
    """Return a table with a header for each column and, in its first cell, each row. numbers: columns aligned as numbers."""
    names = tuple(columns)

    def kind(place: int) -> str | None:
        return "number" if place in numbers else None

    head = [element("th", name, scope="col", class_=kind(place)) for place, name in enumerate(names)]
    body = []
    for row in rows:
        first, *rest = row
        cells = [element("th", first, scope="row"), *(element("td", c, class_=kind(i)) for i, c in enumerate(rest, 1))]
        body.append(element("tr", *cells))
    inside = (element("caption", caption), element("thead", element("tr", *head)), element("tbody", *body))
    # A table wider than the page scrolls separately, also by keys.
    return element("div", element("table", *inside), class_="wide", tabindex="0", role="group", aria_label=caption)


def facts(rows: Iterable[tuple[str, Content]]) -> Markup:
    """Return a list of names with their values."""
    pairs = [element("div", element("dt", name), element("dd", value)) for name, value in rows if value]
    return element("dl", *pairs) if pairs else Markup("")

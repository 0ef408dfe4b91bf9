"""What an HTML parser makes of a page: its elements with their texts."""

from __future__ import annotations

from dataclasses import dataclass, field
from html.parser import HTMLParser

_VOID = frozenset({"meta"})


@dataclass(kw_only=True)
class Element:
    """One element: its attributes, what is in it, and all text below it."""

    tag: str
    attributes: dict[str, str | None] = field(default_factory=dict)
    inside: list[Element] = field(default_factory=list)
    text: str = ""

    def all(self, tag: str, class_: str | None = None) -> list[Element]:
        """Those of a tag below this one, in order; of a class, if one is given."""
        found = []
        for child in self.inside:
            if child.tag == tag and (class_ is None or class_ in (child.attributes.get("class") or "").split()):
                found.append(child)
            found += child.all(tag, class_)
        return found

    def one(self, tag: str, class_: str | None = None) -> Element:
        """The only one."""
        (found,) = self.all(tag, class_)
        return found


class _Reader(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.open = [Element(tag="")]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        made = Element(tag=tag, attributes=dict(attrs))
        self.open[-1].inside.append(made)
        if tag not in _VOID:
            self.open.append(made)

    def handle_endtag(self, tag: str) -> None:
        closed = self.open.pop()
        assert closed.tag == tag, f"</{tag}> ends <{closed.tag}>"
        self.open[-1].text += closed.text

    def handle_data(self, data: str) -> None:
        self.open[-1].text += data


def read(text: str) -> Element:
    """The root. Fails where an element is not closed in order."""
    reader = _Reader()
    reader.feed(text)
    reader.close()
    assert len(reader.open) == 1, f"<{reader.open[-1].tag}> is not closed"
    return reader.open[0]

"""A Griffe extension: the lines "field: what it is" of our docstrings become a list, which Markdown would join to one paragraph."""

from __future__ import annotations

import re
from typing import Any

import griffe

_FIELD = re.compile(r"^([a-z_][\w, ]{0,40}): (?=\S)")


def listed(text: str) -> str:
    """The docstring with its field lines as a list."""
    lines: list[str] = []
    for line in text.splitlines():
        found = _FIELD.match(line)
        if found is None:
            lines.append(line)
            continue
        if lines and lines[-1].strip() and not lines[-1].startswith("- "):
            lines.append("")
        lines.append(f"- `{found[1]}`: {line[found.end() :]}")
    return "\n".join(lines)


class Fields(griffe.Extension):
    """Does so for every docstring."""

    def on_instance(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = listed(obj.docstring.value)

"""Links of the repository's pages as the site has them, and what a list of pages says of each."""

from __future__ import annotations

import posixpath
import re

#: files outside of docs/ that are pages of the site -> where it has them
OUTSIDE = {"CONTRIBUTING.md": "contributing.md", "README.md": "index.md"}
#: folders whose files are copied where a page links to them
COPIED = ("attn_compiler/", "benchmarks/", "examples/", "tests/")
LINK = re.compile(r"\]\(([^)#\s]+)(#[^)\s]*)?\)")


def mended(markdown: str, here: str) -> str:
    """A page's text with links that work in the site. here: its path there."""
    return LINK.sub(lambda found: f"]({_target(found[1], here, found[2] or '')}{found[2] or ''})", markdown)


def source_of(here: str) -> str:
    """The file of the repository that a page of the site is made of."""
    return next((outside for outside, inside in OUTSIDE.items() if inside == here), f"docs/{here}")


def in_repository(target: str, here: str) -> str | None:
    """The path in the repository that a link of a page leads to; None if it leads out of it."""
    if "://" in target or target.startswith("mailto:"):
        return None
    return posixpath.normpath(posixpath.join(posixpath.dirname(source_of(here)), target))


def copy_of(path: str) -> str:
    """Where the site has a file of the repository that is no page of it. Files of one name have different folders."""
    return f"data/{path}"


def rows_of(path: str) -> str:
    """The page of the site that has a CSV's rows, each with its line as its anchor."""
    return f"rows/{posixpath.basename(path).removesuffix('.csv')}.md"


def _target(target: str, here: str, anchor: str) -> str:
    path = in_repository(target, here)
    if path is None:
        return target
    if path in OUTSIDE:
        inside = OUTSIDE[path]
    elif path.startswith("docs/"):
        inside = path.removeprefix("docs/")
    elif path.endswith(".csv") and anchor.startswith("#L"):
        inside = rows_of(path)
    elif path.startswith(COPIED):
        inside = copy_of(path)
    else:
        return target
    return posixpath.relpath(inside, posixpath.dirname(here) or ".")


def first_sentence(markdown: str) -> str:
    """The first sentence of prose, without links."""
    prose = re.sub(r"^```.*?^```$", "", markdown, flags=re.MULTILINE | re.DOTALL)
    prose = re.sub(r"^(?:[#|!>:-]|<!--)[^\n]*$", "", prose, flags=re.MULTILINE)
    plain = " ".join(re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", prose).split())
    return re.split(r"(?<=[.!?]) ", plain, maxsplit=1)[0]

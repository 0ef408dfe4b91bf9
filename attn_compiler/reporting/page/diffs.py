"""Changes of the graph by each pass, from the dump: a diff for each pass that changed something."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from attn_compiler.reporting.page.markup import Markup, code, element, folded, joined

#: the most lines of one diff in the page; the file has all
_LINES = 1500

_NAME = re.compile(r"(\d+)_(.+)\.diff\.txt")
_TAGS = {"+": "ins", "-": "del", "@": "b"}


@dataclass(frozen=True, kw_only=True, slots=True)
class PassDiff:
    """step: the pass, with its number. counts: changes of op counts. lines: the unified diff; none if the text is the same."""

    step: str
    counts: tuple[str, ...]
    lines: tuple[str, ...]
    path: Path


def read(directory: Path) -> Iterator[PassDiff]:
    """Yield the diffs in the order of the passes. Raises OSError."""
    for path in sorted(directory.iterdir()):
        named = _NAME.fullmatch(path.name)
        if named is None:
            continue
        counts, _, diff = path.read_text(encoding="utf-8", errors="backslashreplace").rstrip("\n").partition("\n\n")
        lines = diff.split("\n") if diff.startswith("---") else []
        yield PassDiff(step=f"{named[1]} {named[2]}", counts=tuple(counts.split("\n")), lines=tuple(lines), path=path)


def section(directory: str | None) -> Markup:
    """Return folded diffs. directory: of the graph's dump; None if there is none."""
    if directory is None:
        return element(
            "p", "Not known: compile with ", code("options={'dump_dir': ...}"), " and the page has it.", class_="aside"
        )
    try:
        found = list(read(Path(directory)))
    except OSError as error:
        return element("p", f"The dump in {directory} can't be read any more: {error.strerror}.", class_="aside")
    changed = [one for one in found if one.lines]
    same = [one.step for one in found if not one.lines]
    parts = [folded(joined((code(one.step), f": {one.counts[0]}")), _diff(one)) for one in changed]
    if same:
        parts.append(element("p", f"Nothing changed in {', '.join(same)}.", class_="aside"))
    return joined((*parts, element("p", "All graphs, before and after each pass: ", code(directory), class_="aside")))


def _diff(one: PassDiff) -> Markup:
    ops = element("ul", *(element("li", line.strip()) for line in one.counts[1:]), class_="ops")
    # The first two lines name the files.
    shown = one.lines[2 : _LINES + 2]
    left_out = len(one.lines) - 2 - len(shown)
    text = element("pre", joined(map(_line, shown)), tabindex="0", role="group", aria_label=f"Diff of pass {one.step}")
    rest = element("p", f"{left_out} more lines are in ", code(str(one.path)), class_="aside") if left_out else None
    return joined((ops if len(one.counts) > 1 else None, text, rest))


def _line(line: str) -> Markup:
    tag = _TAGS.get(line[:1])
    return element(tag, f"{line}\n") if tag else joined((line, "\n"))

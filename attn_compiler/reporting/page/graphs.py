"""The section of one graph: its attentions, misses, padding, compile time, and the diff of each pass."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from attn_compiler.reporting import render, wording
from attn_compiler.reporting.columns import REASON, UNPAD
from attn_compiler.reporting.facts import SiteReport
from attn_compiler.reporting.page.markup import Content, Markup, code, element, facts, folded, joined, table
from attn_compiler.reporting.page.sites import card, listed

if TYPE_CHECKING:
    from attn_compiler.reporting.facts import GraphReport, LinearReport, MissReport, UnpadReport

#: the most lines of one diff in the page; the file has all
_MOST_LINES = 1500

_DIFF_NAME = re.compile(r"(\d+)_(.+)\.diff\.txt")
_TAGS = {"+": "ins", "-": "del", "@": "b"}


def records(report: GraphReport, identity: str) -> list[tuple[str, SiteReport | LinearReport | MissReport]]:
    """Return a graph's attentions and misses, with the identity of each one's card in the page. identity: of the graph."""
    kinds: dict[str, Sequence[SiteReport | LinearReport | MissReport]] = {
        "site": report.sites,
        "linear": report.linear,
        "miss": report.misses,
    }
    return [(f"{identity}-{kind}-{n}", each) for kind, found in kinds.items() for n, each in enumerate(found, 1)]


def likeness(site: SiteReport) -> SiteReport:
    """Return a key that is equal for sites that differ in their place alone."""
    return dataclasses.replace(site, modules=())


def section(report: GraphReport, identity: str, first: Mapping[SiteReport, str]) -> Markup:
    """Return the section. identity: of this graph in its page, a prefix of identities inside. first: the full card of each likeness."""
    parts: list[Content] = [
        element("h2", f"Graph {report.name}", id=identity),
        element("p", f"{render.what_was_found(report)}. Decided for {report.target}.", class_="lead"),
        *_failures(report),
    ]
    for own, record in records(report, identity):
        if record is next(iter(report.misses), None):
            parts.append(element("p", _MISSES, class_="aside"))
        parts.append(card(record, own, first.get(likeness(record), own) if isinstance(record, SiteReport) else own))
    if report.unpad is not None:
        parts += [element("h3", "Padding"), _padding(report.unpad)]
    parts += [element("h3", "Compile time"), _seconds(report)]
    parts += [element("h3", "What each pass did to the graph"), diffs(report.dumped)]
    return element("section", *parts, aria_labelledby=identity)


_MISSES = "What follows has a softmax or calls attention, and is left as the model has it."


def _failures(report: GraphReport) -> list[Markup]:
    boxes = []
    if report.failure:
        message, _, details = report.failure.partition("\n")
        lines = folded("Traceback", element("pre", details, tabindex="0")) if details.strip() else None
        boxes.append(
            element("div", element("b", "Failed; the graph was left as it was: "), message, lines, class_="bad")
        )
    return boxes + [element("div", element("b", "Fault: "), fault, class_="bad") for fault in report.faults]


def _padding(unpad: UnpadReport) -> Markup:
    if unpad.kept is None:
        return facts(((unpad.title.capitalize(), unpad.result), *listed(UNPAD, unpad)))
    place = ("Place", " ".join(part for part in (unpad.module, unpad.source and f"({unpad.source})") if part))
    return facts(
        ((unpad.title.capitalize(), f"{unpad.result}, as the model has it"), place, *listed(REASON, unpad.kept))
    )


def _seconds(report: GraphReport) -> Markup:
    notes = [
        *(f"{said}." for said in report.untried),
        "The rewrite was done before: it is from the cache, and no pass ran." if report.from_cache else "",
        f"The rewrite is not kept for the next process: {report.not_kept}." if report.not_kept else "",
        ""
        if report.kernels
        else "No kernel was compiled beside Inductor, as far as is known. Inductor's own time is not in here.",
    ]
    times = [
        table(caption, (of, "Time"), [(name, wording.duration(took)) for name, took in rows], numbers=frozenset({1}))
        for caption, of, rows in (
            ("Passes", "Pass", report.seconds),
            ("Kernels, beside Inductor", "Kernel", report.kernels),
        )
        if rows
    ]
    kernels = wording.duration(sum(seconds for _, seconds in report.kernels))
    of_kernels = f", kernels {kernels}" if report.kernels else ""
    folds = folded(
        f"Passes {wording.duration(report.total_seconds)}{of_kernels}", element("div", *times, class_="times")
    )
    return element("div", folds, *(element("p", note, class_="aside") for note in notes if note))


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class PassDiff:
    """step: the pass, with its number. counts: changes of op counts. lines: the unified diff; none if the text is the same."""

    step: str
    counts: tuple[str, ...]
    lines: tuple[str, ...]
    path: Path


def read_diffs(directory: Path) -> Iterator[PassDiff]:
    """Yield the diffs in the order of the passes. Raises OSError."""
    for path in sorted(directory.iterdir()):
        named = _DIFF_NAME.fullmatch(path.name)
        if named is None:
            continue
        counts, _, diff = path.read_text(encoding="utf-8", errors="backslashreplace").rstrip("\n").partition("\n\n")
        lines = diff.split("\n") if diff.startswith("---") else []
        yield PassDiff(step=f"{named[1]} {named[2]}", counts=tuple(counts.split("\n")), lines=tuple(lines), path=path)


def diffs(directory: str | None) -> Markup:
    """Return folded diffs. directory: of the graph's dump; None if there is none."""
    if directory is None:
        return element(
            "p", "Not known: compile with ", code("options={'dump_dir': ...}"), " and the page has it.", class_="aside"
        )
    try:
        found = list(read_diffs(Path(directory)))
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
    shown = one.lines[2 : _MOST_LINES + 2]
    left_out = len(one.lines) - 2 - len(shown)
    text = element("pre", joined(map(_line, shown)), tabindex="0", role="group", aria_label=f"Diff of pass {one.step}")
    rest = element("p", f"{left_out} more lines are in ", code(str(one.path)), class_="aside") if left_out else None
    return joined((ops if len(one.counts) > 1 else None, text, rest))


def _line(line: str) -> Markup:
    tag = _TAGS.get(line[:1])
    return element(tag, f"{line}\n") if tag else joined((line, "\n"))

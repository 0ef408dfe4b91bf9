"""The section of one graph: its attentions, misses, padding, compile time, and the diff of each pass."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from attn_compiler.reporting import render, wording
from attn_compiler.reporting.page import diffs
from attn_compiler.reporting.page.markup import Content, Markup, element, facts, folded, table
from attn_compiler.reporting.page.sites import again_card, linear_card, miss_card, reason_rows, site_card

if TYPE_CHECKING:
    from attn_compiler.reporting.facts import GraphReport, SiteReport, UnpadReport


def site_identities(report: GraphReport, identity: str) -> dict[str, SiteReport]:
    """Return the identities of a graph's site cards in the page."""
    return {f"{identity}-site-{number}": site for number, site in enumerate(report.sites, 1)}


def likeness(site: SiteReport) -> SiteReport:
    """Return a key that is equal for sites that differ in their place alone."""
    return dataclasses.replace(site, modules=())


def section(report: GraphReport, identity: str, first: Mapping[SiteReport, str]) -> Markup:
    """Return the section. identity: of this graph in its page, a prefix of identities inside. first: the full card of each likeness."""
    cards = [
        site_card(site, own) if first[likeness(site)] == own else again_card(site, own, first[likeness(site)])
        for own, site in site_identities(report, identity).items()
    ]
    parts: list[Content] = [
        element("h2", f"Graph {report.graph}", id=identity),
        element("p", f"{render.what_was_found(report)}. Decided for {report.target}.", class_="lead"),
        *_failures(report),
        *cards,
    ]
    parts += [linear_card(one, f"{identity}-linear-{number}") for number, one in enumerate(report.linear, 1)]
    if report.misses:
        parts.append(element("p", _MISSES, class_="aside"))
        parts += [miss_card(miss, f"{identity}-miss-{number}") for number, miss in enumerate(report.misses, 1)]
    if report.unpad is not None:
        parts += [element("h3", "Padding"), _padding(report.unpad)]
    parts += [element("h3", "Compile time"), _seconds(report)]
    parts += [element("h3", "What each pass did to the graph"), diffs.section(report.dumped)]
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
    if unpad.kept is not None:
        place = ("Place", " ".join(part for part in (unpad.module, unpad.source and f"({unpad.source})") if part))
        return facts((("Padding", "computed, as the model has it"), place, *reason_rows(unpad.kept)))
    failed = Counter(reason for step in unpad.last for reason in step.failed)
    return facts(
        (
            ("Padding", "left out"),
            ("0 at padding", ", ".join(unpad.zeroed)),
            ("Asked at each call", _list(unpad.facts)),
            ("Notes", _list(unpad.notes)),
            ("Real tokens of the last batches", ", ".join(f"{step.fill:.0%}" for step in unpad.last)),
            (
                "Padding was computed",
                _list([f"{wording.counted(n, 'time')}, since not: {why}" for why, n in failed.items()]),
            ),
        )
    )


def _list(lines: Sequence[str]) -> Markup | None:
    return element("ul", *(element("li", line) for line in lines)) if lines else None


def _seconds(report: GraphReport) -> Markup:
    notes = [
        *(f"{said}." for said in report.untried),
        "The rewrite was done before: it is from the cache, and no pass ran." if report.from_cache else "",
        f"The rewrite is not kept for the next process: {report.not_kept}." if report.not_kept else "",
        ""
        if report.kernels
        else "No kernel was compiled beside Inductor, as far as is known. Inductor's own time is not in here.",
    ]
    passes = table(
        "Passes",
        ("Pass", "Time"),
        [(name, wording.duration(seconds)) for name, seconds in report.seconds],
        numbers=frozenset({1}),
    )
    kernels = table(
        "Kernels, beside Inductor",
        ("Kernel", "Time"),
        [(name, wording.duration(seconds)) for name, seconds in report.kernels],
        numbers=frozenset({1}),
    )
    times = element("div", passes if report.seconds else None, kernels if report.kernels else None, class_="times")
    of_kernels = (
        f", kernels {wording.duration(sum(seconds for _, seconds in report.kernels))}" if report.kernels else ""
    )
    folds = folded(f"Passes {wording.duration(report.total_seconds)}{of_kernels}", times)
    return element("div", folds, *(element("p", note, class_="aside") for note in notes if note))

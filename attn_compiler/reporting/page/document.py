"""The whole page: head, totals, contents, a section for each graph. It needs no network, and no script runs in it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from attn_compiler.reporting import render, wording
from attn_compiler.reporting.facts import LinearReport, MissReport, SiteReport
from attn_compiler.reporting.page import graphs
from attn_compiler.reporting.page.drawing import hatching
from attn_compiler.reporting.page.markup import Content, Markup, code, element, facts, joined, table
from attn_compiler.reporting.page.sites import names
from attn_compiler.spec.target import version_of

if TYPE_CHECKING:
    from attn_compiler.reporting.facts import GraphReport

_STYLE = Path(__file__).with_name("page.css")
#: Browsers load nothing and run nothing, even if a model's name holds markup.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'"
_TITLE = "attn_compiler report"
_NO_GRAPH = (
    "No graph was compiled. Was the model run, and is torch.compile enabled? A method of what torch.compile returns, such as generate or "
    'encode, runs the plain model. model.compile(backend="attn_compiler") compiles the model in place, and its methods run that.'
)


def page(reports: Sequence[GraphReport]) -> str:
    """Return one HTML document, in UTF-8."""
    shown = {f"graph-{number}": report for number, report in enumerate(reports, 1) if wording.has_content(report)}
    empty = [report for report in reports if not wording.has_content(report)]
    first: dict[SiteReport, str] = {}
    for identity, report in shown.items():
        for own, record in graphs.records(report, identity):
            if isinstance(record, SiteReport):
                first.setdefault(graphs.likeness(record), own)
    # Without a version the package runs from its sources.
    version = version_of("attn_compiler") or "of unknown version"
    lead = f"{wording.totals(reports)}." if reports else _NO_GRAPH
    body = (
        element("a", "Skip to the attentions", href="#attentions", class_="skip"),
        hatching(),
        element("header", element("h1", _TITLE), element("p", lead, class_="lead"), _totals(reports)),
        _contents(shown),
        element(
            "main",
            _overview(shown),
            *(graphs.section(report, identity, first) for identity, report in shown.items()),
            element("p", f"{wording.without_attention(empty)}.", class_="aside") if empty else None,
            id="attentions",
        ),
        element("footer", element("p", f"Made by attn_compiler {version}. How to read it: docs/reading.md.")),
    )
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", http_equiv="Content-Security-Policy", content=_POLICY),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", name="color-scheme", content="light dark"),
        element("title", _TITLE),
        element("style", Markup(_STYLE.read_text(encoding="utf-8"))),
    )
    return f"<!DOCTYPE html>\n{element('html', head, element('body', *body), lang='en')}\n"


def _totals(reports: Sequence[GraphReport]) -> Markup | None:
    if not reports:
        return None
    found = [site for report in reports for site in report.sites]
    gains = [(gain, len(site.modules)) for site in found if (gain := _gained(site)) is not None]
    sites = sum(report.num_sites for report in reports)
    chosen = [joined((code(name), f" ×{count}")) for name, count in wording.lowerings(found).items()]
    rows: list[tuple[str, Content]] = [
        ("Attentions found", str(sites)),
        ("Missed", str(sum(report.num_misses for report in reports))),
        ("Chosen", joined(chosen, ", ")),
        ("Copies put in", str(sum(len(site.copies) * len(site.modules) for site in found))),
    ]
    if gains:
        total, known = sum(gain for gain, _ in gains), sum(count for _, count in gains)
        word = "gained" if total >= 0 else "lost"
        rows.append(("Estimated", f"{abs(total):.3g} ms {word}, one call each of {known} of {sites}"))
    return element("div", facts(rows), class_="totals")


def _contents(shown: dict[str, GraphReport]) -> Markup | None:
    if len(shown) < 2:
        return None
    links = [
        element("li", element("a", f"Graph {report.name}", href=f"#{identity}")) for identity, report in shown.items()
    ]
    return element("nav", element("ul", *links), aria_label="Graphs")


def _overview(shown: dict[str, GraphReport]) -> Markup | None:
    rows = [
        _row(record, own, report.name)
        for identity, report in shown.items()
        for own, record in graphs.records(report, identity)
    ]
    if not rows:
        return None
    columns = ("Attention", "Chosen", "Mask, or why it was missed", "Copies", "Estimated gain", "Graph")
    return table("All attentions", columns, rows, numbers=frozenset({3, 4}))


def _row(record: SiteReport | LinearReport | MissReport, identity: str, graph: str) -> tuple[Content, ...]:
    link = element("a", names(record.modules), href=f"#{identity}")
    match record:
        case MissReport():
            return link, "miss", record.reason.rule, "", "", graph
        case LinearReport():
            return link, code(record.decision.lowering), record.spec.words, "0", "not known", graph
    gain = "not known" if (gained := _gained(record)) is None else f"{gained:+.3g} ms"
    words, copies = render.middle_left_out(record.spec.mask.words), str(len(record.copies))
    return link, code(record.decision.lowering), words, copies, gain, graph


def _gained(site: SiteReport) -> float | None:
    """Return the milliseconds gained by all layers of a site; None if that is not known."""
    estimate = site.estimate
    return None if estimate is None or estimate.gained is None else estimate.gained * len(site.modules)

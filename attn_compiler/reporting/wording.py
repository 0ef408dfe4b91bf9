"""Words of a report for logs and tables. Imports no table library."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from attn_compiler.reporting.facts import GraphReport, LinearReport, SiteReport
    from attn_compiler.spec.masks import MaskSpec

#: the most kinds of sites in a line of the log, and characters of the mask of each
_INTRODUCED, _INTRODUCED_WORDS = 4, 60
#: the most graphs without attention that are named
_NAMED = 8


def summary(report: GraphReport) -> str:
    """Return one line for a log: the findings in one graph, and their lowerings."""
    return f"graph {report.name} on {report.target}: {totals([report])}"


def introduction(report: GraphReport) -> str:
    """Return the line for the first graph of a process: findings, lowerings, and the way to more."""
    kinds = [f"{len(site.modules)} × {_shown(site.spec.mask.words)}: {site.decision.lowering}" for site in report.sites]
    more = [f"{len(kinds) - _INTRODUCED} more kinds"] if len(kinds) > _INTRODUCED else []
    told = f"; by mask: {'; '.join([*kinds[:_INTRODUCED], *more])}" if kinds else ""
    return f"{summary(report)}{told}; attn_compiler.reports().save('report.html') shows why"


def _shown(words: str) -> str:
    return words if len(words) <= _INTRODUCED_WORDS else f"{words[:_INTRODUCED_WORDS]}…"


def totals(reports: Sequence[GraphReport]) -> str:
    """Return counts over the graphs: "2 graphs, 33 attention sites (sdpa 32, untouched 1), 1 miss, 0.21 s in passes"."""
    chosen = lowerings(site for report in reports for site in report.sites)
    dense = sum(len(site.modules) for report in reports for site in report.sites if site.proved_as_dense)
    misses = sum(report.num_misses for report in reports)
    failures = sum(report.failure is not None for report in reports)
    faults = sum(len(report.faults) for report in reports)
    seconds = sum(report.total_seconds for report in reports)
    parts = [counted(len(reports), "graph")] if len(reports) > 1 else []
    parts.append(counted(chosen.total(), "attention site") + (f" ({_each(chosen)})" if chosen else ""))
    parts += [f"{dense} of them proved and read as a dense tensor"] if dense else []
    parts += linear_totals(reports)
    parts += [counted(misses, "miss", "misses")] if misses else []
    parts += [f"{failures} FAILED"] if failures else []
    parts += [counted(faults, "fault")] if faults else []
    return ", ".join([*parts, f"{duration(seconds)} in passes"])


def linear_totals(reports: Sequence[GraphReport]) -> list[str]:
    """Return "36 layers of linear attention (linear_reference 36)", as a list that is empty without any."""
    chosen = lowerings(one for report in reports for one in report.linear)
    layers = counted(chosen.total(), "layer of linear attention", "layers of linear attention")
    return [f"{layers} ({_each(chosen)})"] if chosen else []


def lowerings(records: Iterable[SiteReport | LinearReport]) -> Counter[str]:
    """Return the number of places of each lowering."""
    chosen: Counter[str] = Counter()
    for record in records:
        chosen[record.decision.lowering] += len(record.modules)
    return chosen


def _each(chosen: Counter[str]) -> str:
    return ", ".join(f"{name} {count}" for name, count in chosen.items())


def unproved(mask: MaskSpec) -> str | None:
    """Return why the meaning of a mask's tensor is not known; None if it is."""
    return mask.reason or mask.added


def duration(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"


def without_attention(reports: Sequence[GraphReport]) -> str:
    """Return one line on graphs without content: their number, and the names of some."""
    names = [report.name for report in reports[:_NAMED]]
    names += [f"and {len(reports) - _NAMED} more"] if len(reports) > _NAMED else []
    return f"{counted(len(reports), 'graph')} without attention: {', '.join(names)}"


def counted(number: int, noun: str, plural: str | None = None) -> str:
    return f"{number} {noun if number == 1 else plural or noun + 's'}"


def has_content(report: GraphReport) -> bool:
    return bool(report.sites or report.linear or report.misses or report.failure or report.faults)

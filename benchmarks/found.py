"""What our backend found in a model, as columns of a row: sites, misses, masks, lowerings, and why something is not as wished."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from attn_compiler.reporting.report import Report
from benchmarks import compare

COLUMNS = ("graphs", "sites", "misses", "proved", "dense", "lowerings", "masks", "why")
_LONGEST = 400


def columns(reports: Sequence[Report]) -> dict[str, str]:
    """graphs: those that were compiled. proved: sites whose mask was read, or that have none; dense: sites with a tensor that was not read.

    why: of misses, of dense masks, of sites that were left as they were and of failures, each reason once.
    """
    proved, masks = Counter[bool](), Counter[str]()
    for report in reports:
        for site in report.sites:
            proved[site.spec.mask.reason is None] += len(site.modules)
            masks[site.spec.mask.words] += len(site.modules)
    return {
        "graphs": str(len(reports)),
        **compare.chosen(reports),
        "proved": str(proved[True]),
        "dense": str(proved[False]),
        "masks": " + ".join(f"{words} x{count}" for words, count in masks.most_common()),
        "why": "; ".join(dict.fromkeys(_reasons(reports)))[:_LONGEST],
    }


def _reasons(reports: Sequence[Report]) -> Iterator[str]:
    for report in reports:
        if report.failure:
            yield f"failure: {report.failure}"
        yield from (f"fault: {fault}" for fault in report.faults)
        for miss in report.misses:
            yield f"{miss.anchor}: {miss.reason.observed}"
        for site in report.sites:
            if site.spec.mask.reason:
                yield f"mask: {site.spec.mask.reason}"
            if site.decision.lowering == "untouched":
                yield from (
                    f"{refusal.lowering}: {reason.observed}"
                    for refusal in site.decision.refusals
                    for reason in refusal.reasons[:1]
                )

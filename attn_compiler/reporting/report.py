"""A report for people (table, page) and tools (JSON): `Report` of one compiled graph, `Reports` of several.

facts.py has the data. publishing.py hands reports out, and keeps the last ones. Rendering is imported on demand. The JSON
(`Report.to_dict`, `Reports.to_dict`) has a "version". Keys are only ever added within a version, and every key is always there; an unknown
value is null, and a symbolic size is a string ("s0").
"""

from __future__ import annotations

import html
import json
import os
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from attn_compiler.reasons.errors import ReportNotSaved
from attn_compiler.reporting import wording
from attn_compiler.reporting.facts import GraphReport, LinearReport, MissReport, SiteReport, UnpadReport

if TYPE_CHECKING:
    from rich.console import RenderableType

JSON_VERSION = 1


class Report(GraphReport):
    """One graph handed to the backend: the fields of GraphReport. str(report) is the plain table, 88 columns wide; rich's print shows it in
    colour."""

    __slots__ = ()

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON as nested dicts and lists; the module's docstring says what stays stable."""
        return {
            "version": JSON_VERSION,
            "graph": self.graph,
            "target": self.target,
            "num_sites": self.num_sites,
            "num_misses": self.num_misses,
            "sites": [_site_dict(site) for site in self.sites],
            "misses": [_miss_dict(miss) for miss in self.misses],
            "num_linear": self.num_linear,
            "linear": [_linear_dict(one) for one in self.linear],
            "seconds": [{"pass": name, "seconds": seconds} for name, seconds in self.seconds],
            "kernels": [{"kernel": name, "seconds": seconds} for name, seconds in self.kernels],
            "failure": self.failure,
            "faults": list(self.faults),
            "from_cache": self.from_cache,
            "not_kept": self.not_kept,
            "untried": list(self.untried),
            "unpad": None if self.unpad is None else _unpad_dict(self.unpad),
            "dumped": self.dumped,
        }

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=1)

    def to_html(self) -> str:
        """Return one page that needs no network (docs/report.md): matches, choices and reasons, with a drawing of each mask."""
        return _page((self,))

    def _repr_html_(self) -> str:
        """The page in a frame, for notebooks."""
        return _framed(self.to_html())

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the page of `to_html`: report.save("report.html"). Raises ReportNotSaved."""
        _save(self.to_html(), path)

    def __str__(self) -> str:
        from attn_compiler.reporting import render

        return render.plain(render.report_view(self))

    def __rich__(self) -> RenderableType:
        from attn_compiler.reporting import render

        return render.report_view(self)


class Reports(tuple[Report, ...]):
    """The reports of several graphs, in the order of their compilation: one table, one JSON, with totals."""

    __slots__ = ()

    @property
    def num_sites(self) -> int:
        return sum(report.num_sites for report in self)

    @property
    def num_misses(self) -> int:
        return sum(report.num_misses for report in self)

    @property
    def num_linear(self) -> int:
        return sum(report.num_linear for report in self)

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON as Report.to_dict does; "graphs" holds the result of Report.to_dict for each."""
        return {
            "version": JSON_VERSION,
            "num_graphs": len(self),
            "num_sites": self.num_sites,
            "num_misses": self.num_misses,
            "num_linear": self.num_linear,
            "graphs": [report.to_dict() for report in self],
        }

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=1)

    def to_html(self) -> str:
        """Return one page for all graphs, as Report.to_html does."""
        return _page(self)

    def _repr_html_(self) -> str:
        """The page in a frame, for notebooks."""
        return _framed(self.to_html())

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the page of `to_html`: attn_compiler.reports().save("report.html"). Raises ReportNotSaved."""
        _save(self.to_html(), path)

    def __str__(self) -> str:
        from attn_compiler.reporting import render

        return render.plain(render.reports_view(self))

    def __repr__(self) -> str:
        return f"<Reports: {wording.totals(self)}; print() shows the table>"

    def __rich__(self) -> RenderableType:
        from attn_compiler.reporting import render

        return render.reports_view(self)


def _framed(page: str) -> str:
    return f'<iframe srcdoc="{html.escape(page)}" style="width: 100%; height: 36em; border: 0"></iframe>'


def _page(reports: Sequence[Report]) -> str:
    # Imported on demand: nothing else needs it.
    from attn_compiler.reporting.page import page

    return page(reports)


def _save(text: str, path: str | os.PathLike[str]) -> None:
    try:
        with open(path, "w", encoding="utf-8", newline="\n") as file:
            file.write(text)
    except (OSError, ValueError) as error:
        raise ReportNotSaved(path=os.fspath(path), cause=str(error)) from error


def _site_dict(site: SiteReport) -> dict[str, Any]:
    return {
        "modules": list(site.modules),
        "pattern": site.pattern,
        "spec": json.loads(site.spec.to_text()),
        "mask": site.spec.mask.words,
        "mask_formula": site.spec.mask.formula,
        "mask_unproved": wording.unproved(site.spec.mask),
        "score": site.spec.score.words,
        "score_added": site.spec.score.added,
        "lowering": site.decision.lowering,
        "refusals": [
            {"lowering": refusal.lowering, "reasons": [asdict(reason) for reason in refusal.reasons]}
            for refusal in site.decision.refusals
        ],
        "copies": [asdict(copy) for copy in site.copies],
        "notes": list(site.notes),
        "source": site.source,
        "evidence": None if site.evidence is None else asdict(site.evidence),
        "estimate": None if site.estimate is None else asdict(site.estimate),
        "faster": None if site.faster is None else asdict(site.faster),
    }


def _unpad_dict(unpad: UnpadReport) -> dict[str, Any]:
    return {
        "kept": None if unpad.kept is None else asdict(unpad.kept),
        "module": unpad.module,
        "source": unpad.source,
        "zeroed": list(unpad.zeroed),
        "facts": list(unpad.facts),
        "notes": list(unpad.notes),
        "last": [{"fill": step.fill, "failed": list(step.failed)} for step in unpad.last],
    }


def _linear_dict(one: LinearReport) -> dict[str, Any]:
    return {
        "modules": list(one.modules),
        "computes": one.spec.words,
        "function": one.function,
        "spec": asdict(one.spec),
        "lowering": one.decision.lowering,
        "refusals": [asdict(refusal) for refusal in one.decision.refusals],
        "evidence": one.evidence,
    }


def _miss_dict(miss: MissReport) -> dict[str, Any]:
    return {
        "modules": list(miss.modules),
        "anchor": miss.anchor,
        "nearest": miss.nearest,
        "stopped_at": miss.stopped_at,
        "reason": asdict(miss.reason),
        "source": miss.source,
    }

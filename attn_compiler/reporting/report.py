"""What was found, chosen and refused, as data: `Report` is one compiled graph's answer, for people (table) and tools (JSON).

publishing.py hands reports out, and keeps the last ones.

The JSON (`Report.to_dict`, `Reports.to_dict`) has a "version". Keys are only ever added within a version, and every key is
always there; a value that is not known is null, and a symbolic size is a string ("s0").
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from attn_compiler.reasons.decisions import Copy, Decision, Estimate, Evidence, Faster, Reason
from attn_compiler.reasons.errors import ReportNotSaved
from attn_compiler.reporting import wording
from attn_compiler.spec.attention import AttentionSpec
from attn_compiler.torch_private.unpadding import Steps, UnpaddedStep

if TYPE_CHECKING:
    from rich.console import RenderableType

JSON_VERSION = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class SiteReport:
    """Every site that shares one spec, decision and set of copies (one row of the table).

    modules: the module paths, one a site. notes: what else the rewrite did (a repeat_kv taken out, a mask combined).
    source: the line of the model that the first of them was traced from ("llama.py:120"), if known.
    evidence: the measurement that gave lowerings their order; None where the user did, or no measurement is for such a machine.
    estimate: how long one call takes; None where nothing like it was measured.
    faster: what was measured to be faster on sites like it, and wants a package that is not installed; None where nothing is.
    texts: of the leaf ops that compute it, by which their failures are told.
    """

    modules: tuple[str, ...]
    pattern: str
    spec: AttentionSpec
    decision: Decision
    copies: tuple[Copy, ...] = ()
    notes: tuple[str, ...] = ()
    source: str | None = None
    evidence: Evidence | None = None
    estimate: Estimate | None = None
    faster: Faster | None = None
    texts: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class MissReport:
    """An anchor (a softmax or an SDPA call) that is no attention that we understand. nearest: the pattern that came furthest.

    source: the line of the model that the first of them was traced from, if known.
    """

    modules: tuple[str, ...]
    anchor: str
    nearest: str
    stopped_at: str
    reason: Reason
    source: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class UnpadReport:
    """What became of a graph's padding (`options={"unpad": True}`).

    kept: why padding is computed as the model has it; None: it is left out.
    module, source: of the op that is to blame, if it is one.
    zeroed: outputs that are 0 at padding.
    facts: what has to hold at each call; else the model's own graph runs.
    notes: what else there is to know.
    steps: the last calls.
    """

    kept: Reason | None = None
    module: str | None = None
    source: str | None = None
    zeroed: tuple[str, ...] = ()
    facts: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    steps: Steps | None = field(default=None, compare=False)

    @property
    def last(self) -> tuple[UnpaddedStep, ...]:
        """The last calls, up to now: how much of each batch was real, and whether the model's own graph ran."""
        return () if self.steps is None else tuple(self.steps.last)


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """One graph handed to the backend.

    seconds: time by pass.
    kernels: seconds by kernel that was compiled beside the inner compiler, of all its variants; where it was on disk, next to nothing.
    failure: set when something failed and the model's own graph was compiled.
    faults: what failed and cost only a site or a call, each as it was warned of.
    from_cache: the passes did not run; what they made of the same graph before was done again.
    not_kept: why the next process has to run the passes again, if it has to.
    unpad: what became of padding; None if nobody asked for that.
    untried: which installed releases are newer than all that this version was tried with.
    dumped: the directory that has the graph before and after each pass; None if nobody asked for that.

    str(report) is the plain table, 100 columns wide; rich's print shows it in colour.
    """

    graph: str
    target: str
    sites: tuple[SiteReport, ...] = ()
    misses: tuple[MissReport, ...] = ()
    seconds: tuple[tuple[str, float], ...] = ()
    kernels: tuple[tuple[str, float], ...] = ()
    failure: str | None = None
    faults: tuple[str, ...] = ()
    from_cache: bool = False
    not_kept: str | None = None
    untried: tuple[str, ...] = ()
    unpad: UnpadReport | None = None
    dumped: str | None = field(default=None, compare=False)

    @property
    def num_sites(self) -> int:
        return sum(len(site.modules) for site in self.sites)

    @property
    def num_misses(self) -> int:
        return sum(len(miss.modules) for miss in self.misses)

    @property
    def total_seconds(self) -> float:
        return sum(seconds for _, seconds in self.seconds)

    def to_dict(self) -> dict[str, Any]:
        """The JSON as nested dicts and lists; see the module's docstring for what stays stable."""
        return {
            "version": JSON_VERSION,
            "graph": self.graph,
            "target": self.target,
            "num_sites": self.num_sites,
            "num_misses": self.num_misses,
            "sites": [_site_dict(site) for site in self.sites],
            "misses": [_miss_dict(miss) for miss in self.misses],
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
        """One page that needs no network (docs/report.md): what was found and chosen and why, with each mask as a drawing."""
        return _page((self,))

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
    """The reports of several graphs, in the order in which they were compiled: one table, one JSON, with totals."""

    __slots__ = ()

    @property
    def num_sites(self) -> int:
        return sum(report.num_sites for report in self)

    @property
    def num_misses(self) -> int:
        return sum(report.num_misses for report in self)

    def to_dict(self) -> dict[str, Any]:
        """As Report.to_dict; "graphs" holds what Report.to_dict gives for each."""
        return {
            "version": JSON_VERSION,
            "num_graphs": len(self),
            "num_sites": self.num_sites,
            "num_misses": self.num_misses,
            "graphs": [report.to_dict() for report in self],
        }

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=1)

    def to_html(self) -> str:
        """As Report.to_html: one page for all graphs."""
        return _page(self)

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


def _page(reports: Sequence[Report]) -> str:
    # Imported when a page is wanted: nothing else needs it.
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


def _miss_dict(miss: MissReport) -> dict[str, Any]:
    return {
        "modules": list(miss.modules),
        "anchor": miss.anchor,
        "nearest": miss.nearest,
        "stopped_at": miss.stopped_at,
        "reason": asdict(miss.reason),
        "source": miss.source,
    }

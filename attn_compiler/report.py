"""What was found, chosen and refused, as data: `Report` is one compiled graph's answer, for people (table) and tools (JSON)."""

from __future__ import annotations

from dataclasses import dataclass

from attn_compiler.spec import AttentionSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class Reason:
    """One refusal as a value. rule: what has to hold. observed: what was seen. remedy: what to do, where there is something."""

    rule: str
    observed: str
    remedy: str | None = None

    def __str__(self) -> str:
        return f"{self.rule}; observed {self.observed}" + (f"; {self.remedy}" if self.remedy else "")


@dataclass(frozen=True, kw_only=True, slots=True)
class Refusal:
    """Why one lowering was not taken."""

    lowering: str
    reasons: tuple[Reason, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Decision:
    """The lowering that a spec gets on a target, and every refusal on the way to it."""

    lowering: str
    refusals: tuple[Refusal, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Copy:
    """A copy that the layout pass put into the graph. bytes: None when a size is symbolic."""

    operand: str
    bytes: int | None
    why: str


@dataclass(frozen=True, kw_only=True, slots=True)
class SiteReport:
    """Every site that shares one spec, decision and set of copies (one row of the table).

    modules: the module paths, one a site. notes: what else the rewrite did (a repeat_kv taken out, a mask combined).
    """

    modules: tuple[str, ...]
    pattern: str
    spec: AttentionSpec
    decision: Decision
    copies: tuple[Copy, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class MissReport:
    """An anchor (a softmax or an SDPA call) that is no attention that we understand. nearest: the pattern that came furthest."""

    modules: tuple[str, ...]
    anchor: str
    nearest: str
    stopped_at: str
    reason: Reason


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """One graph handed to the backend. seconds: time by pass. failure: set when a pass failed and the graph was left as it was."""

    graph: str
    target: str
    sites: tuple[SiteReport, ...] = ()
    misses: tuple[MissReport, ...] = ()
    seconds: tuple[tuple[str, float], ...] = ()
    failure: str | None = None

    @property
    def num_sites(self) -> int:
        return sum(len(site.modules) for site in self.sites)

"""The words of a decision: which lowering, what was refused and why, what had to be copied. Pure data that imports nothing of ours."""

from __future__ import annotations

from dataclasses import dataclass


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
    """Why one lowering was not taken. when_built: nothing spoke against it until it was built; it may be built another time."""

    lowering: str
    reasons: tuple[Reason, ...]
    when_built: bool = False


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

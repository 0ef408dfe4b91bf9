"""Data of a decision: the lowering, refusals with reasons, copies. Pure data that imports the codes alone."""

from __future__ import annotations

from dataclasses import dataclass

from attn_compiler.reasons.codes import Code


@dataclass(frozen=True, kw_only=True, slots=True)
class Reason:
    """One refusal as a value.

    code: the code to look up (codes.py).
    rule: the condition that has to hold.
    observed: the value that breaks it.
    remedy: advice for this case, if the code's page says less.
    """

    code: Code
    rule: str
    observed: str
    remedy: str | None = None

    @property
    def advice(self) -> str:
        """Advice to the user: the remedy, or else the first sentence of the code's page."""
        from attn_compiler.reasons import pages

        return self.remedy or pages.advice(self.code)

    def __str__(self) -> str:
        return f"{self.rule}; observed {self.observed}; {self.advice} ({self.code})"


def refuse(code: Code, rule: str, observed: str, remedy: str | None = None) -> list[Reason]:
    """Return the refusal of a check that does not hold, as every check returns its reasons."""
    return [Reason(code=code, rule=rule, observed=observed, remedy=remedy)]


@dataclass(frozen=True, kw_only=True, slots=True)
class Refusal:
    """The reasons against one lowering. when_built: only building it failed; another attempt may succeed."""

    lowering: str
    reasons: tuple[Reason, ...]
    when_built: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Decision:
    """The lowering that a spec gets on a target, and every refusal on the way to it.

    zeros: the lowering gets zeros behind each head's numbers, up to a multiple of so many (`AttentionSpec.with_zeros`).
    """

    lowering: str
    refusals: tuple[Refusal, ...] = ()
    zeros: int = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Copy:
    """A copy that the layout pass put into the graph. bytes: None when a size is symbolic. remedy: what spares it, if that is known."""

    operand: str
    bytes: int | None
    why: str
    remedy: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Evidence:
    """The basis of a decision besides refusals: the measurement that ordered the lowerings, or the reasoning.

    order: the lowerings, in the order of asking.
    why: the measurement, in words.
    since: its date.
    measured: on such a machine. Otherwise `why` is reasoning.
    length: the lengths assumed for the order if they are unknown, in words.
    """

    order: tuple[str, ...]
    why: str
    since: str
    measured: bool = True
    length: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Faster:
    """A lowering of a package that is not installed, measured to be faster on sites like this one.

    lowering: its name.
    distribution: the package that is missing, or installed in another version.
    install: the command that installs it.
    speed: the speed-up over the chosen lowering; forward, and backward if the site needs gradients.
    why: the measurement, in words.
    since: its date.
    """

    lowering: str
    distribution: str
    install: str
    speed: float
    why: str
    since: str

    @property
    def words(self) -> str:
        """For people, in one line."""
        return f"{self.lowering} was {self.speed:.2f} times as fast on such sites ({self.since}; {self.why}): {self.install}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """Estimated time of one call of a site, from measurements of similar sites on such a GPU. The model itself was not timed.

    milliseconds: with the chosen lowering; forward, and backward if the site needs gradients.
    other: the lowering to compare with, which PyTorch would run; None if that was not measured.
    other_milliseconds: with `other`.
    like: the measured sizes.
    since: the date of the measurement.
    """

    milliseconds: float
    other: str | None
    other_milliseconds: float | None
    like: str
    since: str

    @property
    def words(self) -> str:
        """For people, in one line."""
        other = f", {self.other_milliseconds:.3g} by {self.other}" if self.other_milliseconds is not None else ""
        return f"about {self.milliseconds:.3g} ms a call{other}"

    @property
    def gained(self) -> float | None:
        """Milliseconds saved a call; negative if the chosen lowering takes longer."""
        return None if self.other_milliseconds is None else self.other_milliseconds - self.milliseconds

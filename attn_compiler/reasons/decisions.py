"""The words of a decision: which lowering, what was refused and why, what had to be copied. Pure data that imports the codes alone."""

from __future__ import annotations

from dataclasses import dataclass

from attn_compiler.reasons.codes import Code


@dataclass(frozen=True, kw_only=True, slots=True)
class Reason:
    """One refusal as a value.

    code: what it is, to be looked up (codes.py).
    rule: what has to hold.
    observed: what was seen.
    remedy: what to do, where there is something.
    """

    code: Code
    rule: str
    observed: str
    remedy: str | None = None

    def __str__(self) -> str:
        return (
            f"{self.rule}; observed {self.observed}" + (f"; {self.remedy}" if self.remedy else "") + f" ({self.code})"
        )


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


@dataclass(frozen=True, kw_only=True, slots=True)
class Evidence:
    """What a decision rests on besides refusals: the measurement that put lowerings in their order, or the reasoning.

    order: the lowerings, the first one asked first.
    why: the measurement, in words.
    since: its date.
    measured: on such a machine. Otherwise `why` is reasoning.
    length: where lengths are not known, which ones the order was chosen for, in words.
    """

    order: tuple[str, ...]
    why: str
    since: str
    measured: bool = True
    length: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Faster:
    """A lowering that would take a site if a package were installed, and was measured to be faster on sites like it.

    lowering: its name.
    distribution: what is not installed, or in another version.
    install: the command that installs it.
    speed: how many times as fast as the chosen lowering; forward, and backward where the site needs gradients.
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
        return f"{self.lowering} was {self.speed:.2f} times as fast on such sites ({self.since}): {self.install}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """How long one call of a site takes, from speeds that were measured on such a GPU for sites like it. Nothing of the model was timed.

    milliseconds: with the chosen lowering; forward, and backward where the site needs gradients.
    other: what it is held against, which is what PyTorch would run; None if that was not measured.
    other_milliseconds: with that.
    like: the sizes that were measured.
    since: the date of the measurement.
    """

    milliseconds: float
    other: str | None
    other_milliseconds: float | None
    like: str
    since: str

    @property
    def gained(self) -> float | None:
        """Milliseconds a call; negative where the chosen lowering takes longer."""
        return None if self.other_milliseconds is None else self.other_milliseconds - self.milliseconds

"""Results of `options={"verify": True}` as data: one `Verification` a check, kept for this process."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

log = logging.getLogger(__name__)

KEPT_VERIFICATIONS = 4096


@dataclass(frozen=True, kw_only=True, slots=True)
class Verification:
    """One check of one attention, or of a whole graph, on the real inputs of a graph's first call.

    graph: as in the report ("0/0"). module: the site's path; "graph 0/0" for the whole.
    subject: the comparison. "mask": the recovered condition with the model's own mask, exactly. "bias": the proved biases with the model's
        additions, up to rounding. "output": of the lowered graph, with the model's own. "graph outputs": of the
        compiled graph, with its writes to inputs. "graph gradients": of its inputs, in the first backward.
    formula: the condition, or the bias in words, if it was read. elements: the number of compared ones.
    error, allowed: (not for masks) the difference nearest to its limit, and that limit.
    skipped: why nothing was compared; None if it was, and it held. A failed check raises, and is not kept.
    """

    graph: str
    module: str
    subject: str
    formula: str | None = None
    elements: int = 0
    error: float | None = None
    allowed: float | None = None
    skipped: str | None = None

    def __str__(self) -> str:
        if self.skipped is not None:
            return f"{self.module}: {self.subject} not verified: {self.skipped}"
        limits = "" if self.error is None else f", off by {self.error:.3g} of {self.allowed:.3g} allowed"
        formula = "" if self.formula is None else f" ({self.formula})"
        return f"{self.module}: {self.subject}{formula} verified on {self.elements} elements{limits}"


_kept: deque[Verification] = deque(maxlen=KEPT_VERIFICATIONS)


class Verifications(tuple[Verification, ...]):
    """Checks, oldest first. str(verifications) has a line for each."""

    __slots__ = ()

    def __str__(self) -> str:
        return (
            "\n".join(map(str, self))
            or 'nothing was verified: compile with options={"verify": True}, and call the model'
        )


def verifications() -> Verifications:
    """Return the last 4096 checks of this process that held or were skipped, oldest first."""
    return Verifications(_kept)


def forget() -> None:
    """Forget every check."""
    _kept.clear()


def keep(found: Iterable[Verification]) -> None:
    """Keep the checks, and log skipped ones as warnings."""
    for verification in found:
        _kept.append(verification)
        log.log(logging.INFO if verification.skipped is None else logging.WARNING, "%s", verification)

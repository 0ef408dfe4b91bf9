"""The decision that softmax and linear attention share: the first lowering of an order that nothing speaks against."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

from attn_compiler.lowerings.base import UNTOUCHED
from attn_compiler.reasons.codes import Code
from attn_compiler.reasons.decisions import Decision, Reason, Refusal
from attn_compiler.spec.target import Target


class Dated(Protocol):
    """Evidence with its date, as rows and reports hold it."""

    @property
    def why(self) -> str: ...
    @property
    def since(self) -> str: ...


def first_unopposed(order: Iterable[str], objection: Callable[[str], Refusal | None]) -> Decision:
    """Take the first lowering without an objection; `untouched` if each has one."""
    refusals: list[Refusal] = []
    for name in order:
        refused = objection(name)
        if refused is None:
            return Decision(lowering=name, refusals=tuple(refusals))
        refusals.append(refused)
    return Decision(lowering=UNTOUCHED, refusals=tuple(refusals))


def with_reason(decision: Decision, row: Dated | None, target: Target, own: str, remedy: str) -> Decision:
    """Say of a decision for `untouched` without a refusal that nothing is known to be faster. own: the model's computation, in words."""
    if decision.lowering != UNTOUCHED or decision.refusals:
        return decision
    reason = Reason(
        code=Code.OWN_IS_FASTEST,
        rule=f"a kernel is known to be faster than what the inner compiler makes of the model's own {own}",
        observed=f"none is for such a site on {target.words}" if row is None else f"{row.why} ({row.since})",
        remedy=remedy,
    )
    return Decision(lowering=UNTOUCHED, refusals=(Refusal(lowering="any", reasons=(reason,)),))

"""Split what is added to the scores into a mask and summands."""

from __future__ import annotations

import math
from dataclasses import dataclass

from attn_compiler import index_expr as ix
from attn_compiler.index_expr import Apply, Const, Expr, Ranges
from attn_compiler.index_expr.reach import Reach, is_known, reach
from attn_compiler.passes.matching.patterns.score_steps import MASKED_BELOW, STILL_MASKED_BELOW
from attn_compiler.passes.spelling.fills import shuts_out


@dataclass(frozen=True, kw_only=True, slots=True)
class Summand:
    """One summand of what is added to a score: weight · value."""

    value: Expr
    weight: float = 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Split:
    """An additive term: masked where `allowed` does not hold, and `added` elsewhere.

    fills: the numbers that mask, with all factors applied.
    sums: a masked pair may get the sum of several fills.
    """

    allowed: Expr
    added: tuple[Summand, ...] = ()
    fills: frozenset[float] = frozenset()
    sums: bool = False

    def reach(self, within: Ranges) -> Reach:
        """Return bounds of the added values. A low run-time value, such as (1 - mask) · -1e9, masks too: it undoes no mask.

        A value that lowers every key, such as bias - 1e9, masks none of them: it brings them down to the fill.
        """
        own = Reach()
        for part in self.added:
            found = reach(total((part,)), within)
            own = own.plus(found if is_known(part.value) else Reach(low=min(found.high, 0.0), high=found.high))
        return own


def split(x: Expr, weight: float = 1.0, *, scores_up_to: float = 0.0, within: Ranges | None = None) -> Split:
    """Split an additive term into a mask and added values. weight: the factor of the whole term.

    A number masks nothing if the term's other values, or scores up to `scores_up_to`, may undo it. All of the term is added then.
    """
    found = _split(x, weight)
    # A number that all keys get masks none of them.
    if found.allowed == ix.TRUE or (
        found.allowed != ix.FALSE and shuts_out(found.fills, found.reach(within or {}), scores_up_to)
    ):
        return found
    return Split(allowed=ix.TRUE, added=(Summand(value=x, weight=weight),))


def _split(x: Expr, weight: float) -> Split:
    match x:
        case Const(value=value):
            masks_out = weight > 0 and value <= MASKED_BELOW and value * weight <= STILL_MASKED_BELOW
            if masks_out:
                return Split(allowed=ix.FALSE, fills=frozenset({float(value * weight)}))
            return Split(allowed=ix.TRUE, added=() if x.value == 0 else (Summand(value=x, weight=weight),))
        case Apply(op="add", args=(a, b)):
            one, other = _split(a, weight), _split(b, weight)
            allowed = ix.apply("and", one.allowed, other.allowed)
            sums = one.sums or other.sums or bool(one.fills and other.fills)
            return Split(allowed=allowed, added=one.added + other.added, fills=one.fills | other.fills, sums=sums)
        case Apply(op="mul", args=(a, Const(value=factor))) if _is_factor(factor):
            found = _split(a, weight * factor)
            if found.allowed == ix.TRUE and len(found.added) > 1 and abs(weight * factor) >= -MASKED_BELOW:
                # 3e38 · (1 - mask): each part is so large that anything added to it is rounded away.
                return Split(allowed=ix.TRUE, added=(Summand(value=a, weight=weight * factor),))
            return found
        case Apply(op="div", args=(a, Const(value=factor))) if _is_factor(factor):
            return _split(a, weight / factor)
        case Apply(op="rounded", args=(a,)) if ix.kind_of(a) == "float":
            return _split(a, weight)
        case Apply(op="where", args=(condition, a, b)):
            return _split_choice(x, condition, _split(a, weight), _split(b, weight), weight)
        case _:
            return Split(allowed=ix.TRUE, added=(Summand(value=x, weight=weight),))


def _is_factor(x: float) -> bool:
    return math.isfinite(x) and x != 0


def _split_choice(x: Expr, condition: Expr, yes: Split, no: Split, weight: float) -> Split:
    """Split a choice between two terms. Values added on a masked side make no difference."""
    allowed, fills = ix.where(condition, yes.allowed, no.allowed), yes.fills | no.fills
    sums = yes.sums or no.sums
    if yes.allowed == ix.FALSE or no.allowed == ix.FALSE:
        return Split(allowed=allowed, added=yes.added + no.added, fills=fills, sums=sums)
    if yes.allowed == no.allowed == ix.TRUE and (yes.added or no.added):
        return Split(allowed=allowed, added=(Summand(value=x, weight=weight),))
    value = ix.where(condition, total(yes.added), total(no.added))
    rest = () if value == Const(0.0) else (Summand(value=value),)
    return Split(allowed=allowed, added=rest, fills=fills, sums=sums)


def total(added: tuple[Summand, ...]) -> Expr:
    """The summands as one expression."""
    whole: Expr = Const(0.0)
    for part in added:
        whole = ix.add(whole, ix.mul(part.value, Const(float(part.weight))))
    return whole

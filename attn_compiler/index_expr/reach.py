"""Range of numbers known while compiling. Run-time numbers count as 0 to 1, the range of a truth value, since no more is known."""

from __future__ import annotations

import math
from dataclasses import dataclass

from attn_compiler.index_expr.looking import parts
from attn_compiler.index_expr.nodes import Apply, Const, Expr, Linear, Load, kind_of
from attn_compiler.index_expr.ranges import Ranges, bounds


@dataclass(frozen=True, kw_only=True, slots=True)
class Reach:
    """The lowest and the highest value."""

    low: float = 0.0
    high: float = 0.0

    def plus(self, other: Reach) -> Reach:
        """Return the reach of a sum. Infinities of both signs give NaN, so any value is possible."""
        low, high = self.low + other.low, self.high + other.high
        return Reach(low=-math.inf if math.isnan(low) else low, high=math.inf if math.isnan(high) else high)

    def times(self, other: Reach) -> Reach:
        """Return the reach of a product, with 0 times infinity as 0."""
        return _hull(*(a * b if a and b else 0.0 for a in (self.low, self.high) for b in (other.low, other.high)))


def _hull(*ends: float) -> Reach:
    if any(map(math.isnan, ends)):
        return Reach(low=-math.inf, high=math.inf)
    return Reach(low=min(ends), high=max(ends))


def reach(x: Expr, within: Ranges) -> Reach:
    """Return the reach of a number, as far as it is known: a run-time number times anything but a constant counts as 0. within: ranges of
    its indices and sizes."""
    match x:
        case Load():
            return Reach(high=1.0)
        case Const(value=value):
            return _hull(float(value))
        case Apply(op="where", args=(_, a, b)):
            one, other = reach(a, within), reach(b, within)
            return _hull(one.low, one.high, other.low, other.high)
        case _ if kind_of(x) != "float":
            low, high = bounds(x, within)
            return _terms_reach(x, within) if low is None or high is None else _hull(float(low), float(high))
        case Apply(op="float" | "rounded", args=(a,)):
            return reach(a, within)
        case Apply(op="add", args=(a, b)):
            return reach(a, within).plus(reach(b, within))
        case Apply(op="mul", args=(a, b)) if isinstance(b, Const) or is_known(x):
            return reach(a, within).times(reach(b, within))
        case Apply(op="div", args=(a, Const(value=divisor))) if divisor:
            return reach(a, within).times(_hull(1.0 / divisor))
        case Apply(op="min" | "max" as op, args=(a, b)):
            one, other = reach(a, within), reach(b, within)
            choose = min if op == "min" else max
            return Reach(low=choose(one.low, other.low), high=choose(one.high, other.high))
        case Apply(op="abs", args=(a,)):
            own = reach(a, within)
            nearest = 0.0 if own.low <= 0.0 <= own.high else min(abs(own.low), abs(own.high))
            return Reach(low=nearest, high=max(abs(own.low), abs(own.high)))
        case _:
            return Reach()


def _terms_reach(x: Expr, within: Ranges) -> Reach:
    """Return the reach of an integer without bounds: of its sum, such as 1 - a truth value. Anything else counts as 0."""
    total = Reach()
    if isinstance(x, Linear) and x.terms != ((x, 1),):
        total = _hull(float(x.const))
        for term, factor in x.terms:
            total = total.plus(reach(term, within).times(_hull(float(factor))))
    return total


def is_known(x: Expr) -> bool:
    """Return True if a number depends on run-time values only in conditions of choices."""
    match x:
        case Load():
            return False
        case Apply(op="where", args=(_, a, b)):
            return is_known(a) and is_known(b)
        case _:
            return kind_of(x) == "bool" or all(map(is_known, parts(x)))

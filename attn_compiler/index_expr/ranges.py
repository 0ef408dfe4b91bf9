"""What the ranges of the indices settle: comparisons that hold, or fail, for every index."""

from __future__ import annotations

from collections.abc import Mapping

from attn_compiler.index_expr.building import combine, linear, rebuilt
from attn_compiler.index_expr.nodes import FALSE, TRUE, Apply, Const, Expr, Index, Linear, Size, Test, kind_of

#: largest value of each index, as a linear form: {"q": Sq - 1, "k": Skv - 1}
Ranges = Mapping[str, Linear]


def decide(x: Expr, ranges: Ranges) -> Expr:
    """x with every comparison settled that holds (or fails) for all indices in their ranges."""
    match x:
        case Test(relation=relation, form=form):
            return _decided(relation, form, ranges) or x
        case Apply(op=op, args=args):
            return rebuilt(op, tuple(decide(a, ranges) for a in args))
        case _:
            return x


def _decided(relation: str, form: Linear, ranges: Ranges) -> Expr | None:
    low, high = (_bound(form, ranges, lowest=lowest) for lowest in (True, False))
    if relation == ">=":
        if low is not None and low >= 0:
            return TRUE
        return FALSE if high is not None and high < 0 else None
    apart = (low is not None and low > 0) or (high is not None and high < 0)
    return Const(relation == "!=") if apart else None


def _bound(form: Linear, ranges: Ranges, *, lowest: bool) -> int | None:
    """A number that the form never goes below (above), if there is one. Sizes are at least 1."""
    rest = form
    for term, factor in form.terms:
        if isinstance(term, Index) and (factor > 0) != lowest:
            if term.name not in ranges:
                return None
            rest = combine(rest, combine(ranges[term.name], linear(term), -1), factor)
    total = rest.const
    for term, factor in rest.terms:
        if isinstance(term, Index) and (factor > 0) == lowest:
            continue
        if isinstance(term, Size) and (factor > 0) == lowest:
            total += factor
            continue
        return None
    return total


def lower_bound(x: Expr) -> int | None:
    """A number that a whole-number expression never goes below, if there is one for all indices."""
    return _bound(linear(x), {}, lowest=True) if kind_of(x) == "int" else None

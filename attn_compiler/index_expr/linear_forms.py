"""Sums of integers: sorted terms with coefficients, and a constant."""

from __future__ import annotations

import bisect

from attn_compiler.index_expr.nodes import Const, Expr, Index, Linear, Test
from attn_compiler.index_expr.placing import place


def linear(x: Expr) -> Linear:
    """Return an integer expression as a linear form."""
    match x:
        case Linear():
            return x
        case Const(value=value):
            return Linear((), int(value))
        case _:
            return Linear(((x, 1),))


def combine(a: Linear, b: Linear, factor: int) -> Linear:
    """Return a + factor · b, merging the shorter form into the longer one, whose terms are sorted."""
    if factor == 0:
        return a
    terms, added = list(a.terms), [(term, factor * c) for term, c in b.terms]
    if len(added) > len(terms):
        terms, added = added, terms
    for term, coefficient in added:
        at = bisect.bisect_left(terms, place(term), key=lambda pair: place(pair[0]))
        if at == len(terms) or terms[at][0] != term:
            terms.insert(at, (term, coefficient))
        elif terms[at][1] != -coefficient:
            terms[at] = (term, terms[at][1] + coefficient)
        else:
            del terms[at]
    return Linear(tuple(terms), a.const + factor * b.const)


def solved(condition: Expr, index: Index) -> Expr | None:
    """Return the value that an equation gives an index of factor 1 or -1: q - 1 for k, of k + 1 = q. None if it gives none."""
    if not isinstance(condition, Test) or condition.relation != "==":
        return None
    factor = dict(condition.form.terms).get(index, 0)
    if abs(factor) != 1:
        return None
    rest = combine(condition.form, Linear(((index, factor),)), -1)
    return None if index.name in rest.facts.indices else plain(combine(Linear(()), rest, -factor))


def plain(form: Linear) -> Expr:
    """Unwrap a linear form that is a constant or a single term."""
    if not form.terms:
        return Const(form.const)
    if form.const == 0 and len(form.terms) == 1 and form.terms[0][1] == 1:
        return form.terms[0][0]
    return form

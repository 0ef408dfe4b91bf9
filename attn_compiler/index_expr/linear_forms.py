"""Sums of whole numbers: terms with coefficients, each at its place, and a constant."""

from __future__ import annotations

import bisect

from attn_compiler.index_expr.nodes import Const, Expr, Linear
from attn_compiler.index_expr.placing import place


def linear(x: Expr) -> Linear:
    """A whole-number expression as a linear form."""
    match x:
        case Linear():
            return x
        case Const(value=value):
            return Linear((), int(value))
        case _:
            return Linear(((x, 1),))


def combine(a: Linear, b: Linear, factor: int) -> Linear:
    """a + factor · b. The shorter one is put into the longer one, whose terms have their places already."""
    if factor == 0:
        return a
    terms, added = list(a.terms), [(term, factor * c) for term, c in b.terms]
    if len(added) > len(terms):
        terms, added = added, terms
    for term, coefficient in added:
        at = bisect.bisect_left(terms, place(term), key=_place_of_term)
        if at == len(terms) or terms[at][0] != term:
            terms.insert(at, (term, coefficient))
        elif terms[at][1] != -coefficient:
            terms[at] = (term, terms[at][1] + coefficient)
        else:
            del terms[at]
    return Linear(tuple(terms), a.const + factor * b.const)


def _place_of_term(term: tuple[Expr, int]) -> tuple[str, bytes]:
    return place(term[0])


def plain(form: Linear) -> Expr:
    """A linear form without needless wrapping."""
    if not form.terms:
        return Const(form.const)
    if form.const == 0 and len(form.terms) == 1 and form.terms[0][1] == 1:
        return form.terms[0][0]
    return form

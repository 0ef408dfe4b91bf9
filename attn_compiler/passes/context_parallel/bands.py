"""A distance that is bounded, |q - k| <= w, as one bound of keys on each side.

Where q is a position of the whole sequence and k begins with the first key of a halo, kernels know the two bounds, and not the distance.
"""

from __future__ import annotations

from attn_compiler import index_expr as ix
from attn_compiler.index_expr import Apply, Const, Expr, Index, Test
from attn_compiler.index_expr.changing import throughout


def opened(condition: Expr) -> Expr:
    """The same condition with every such distance as two bounds."""
    return throughout(condition, _opened)


def _opened(x: Expr) -> Expr:
    if not isinstance(x, Test) or x.relation != ">=" or len(x.form.terms) != 1:
        return x
    (term, factor), width = x.form.terms[0], x.form.const
    if factor != -1 or not isinstance(term, Apply) or term.op != "abs" or not ix.mentions(term, Index("k")):
        return x
    (apart,) = term.args
    return ix.apply(
        "and", ix.compare("<=", apart, Const(width)), ix.compare(">=", ix.add(apart, Const(width)), Const(0))
    )

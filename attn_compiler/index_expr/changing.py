"""Changing what is in an expression, and what its normal form is then."""

from __future__ import annotations

from collections.abc import Callable

from attn_compiler.index_expr.building import add, linear, mul, rebuilt, test
from attn_compiler.index_expr.nodes import Apply, Const, Expr, Linear, Load, Test


def with_parts(x: Expr, change: Callable[[Expr], Expr]) -> Expr:
    """x with every expression right below it changed, in normal form again."""
    match x:
        case Linear(terms=terms, const=const):
            total: Expr = Const(const)
            for term, factor in terms:
                total = add(total, mul(change(term), Const(factor)))
            return total
        case Test(relation=relation, form=form):
            return test(relation, linear(change(form)))
        case Load(tensor=tensor, at=at, kind=kind):
            return Load(tensor, tuple(map(change, at)), kind)
        case Apply(op=op, args=args):
            return rebuilt(op, tuple(map(change, args)))
        case _:
            return x


def rename(x: Expr, name: Callable[[str], str]) -> Expr:
    """x with every load under another name of its tensor."""
    changed = with_parts(x, lambda part: rename(part, name))
    return Load(name(changed.tensor), changed.at, changed.kind) if isinstance(changed, Load) else changed

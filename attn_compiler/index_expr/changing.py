"""Changing what is in an expression, and what its normal form is then."""

from __future__ import annotations

from collections.abc import Callable

from attn_compiler.index_expr.building import rebuilt_of
from attn_compiler.index_expr.looking import ordered, parts
from attn_compiler.index_expr.nodes import Expr, Load


def with_parts(x: Expr, change: Callable[[Expr], Expr]) -> Expr:
    """x with every expression right below it changed, in normal form again."""
    return rebuilt_of(x, {part: change(part) for part in parts(x)})


def throughout(x: Expr, change: Callable[[Expr], Expr]) -> Expr:
    """x with everything in it changed, each expression once, after what is in it."""
    done: dict[Expr, Expr] = {}
    for part in ordered(x):
        done[part] = change(rebuilt_of(part, done))
    return done[x]


def rename(x: Expr, name: Callable[[str], str]) -> Expr:
    """x with every load under another name of its tensor."""

    def renamed(part: Expr) -> Expr:
        return Load(name(part.tensor), part.at, part.kind) if isinstance(part, Load) else part

    return throughout(x, renamed) if x.facts.has_loads else x

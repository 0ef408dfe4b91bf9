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
    if not x.facts.has_loads:
        return x
    done: dict[Expr, Expr] = {}
    for part in ordered(x):
        rebuilt = rebuilt_of(part, done)
        # Of a form that is one load alone the normal form is that load, under its new name already.
        if isinstance(part, Load) and isinstance(rebuilt, Load):
            rebuilt = Load(name(rebuilt.tensor), rebuilt.at, rebuilt.kind)
        done[part] = rebuilt
    return done[x]

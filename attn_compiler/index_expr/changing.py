"""Rewriting of parts of an expression, in normal form again."""

from __future__ import annotations

from collections.abc import Callable

from attn_compiler.index_expr.building import rebuilt_of
from attn_compiler.index_expr.looking import ordered, parts
from attn_compiler.index_expr.nodes import Expr, Load


def with_parts(x: Expr, change: Callable[[Expr], Expr]) -> Expr:
    """Change each direct part of x, in normal form again."""
    return rebuilt_of(x, {part: change(part) for part in parts(x)})


def throughout(x: Expr, change: Callable[[Expr], Expr]) -> Expr:
    """Change every expression in x once, after its parts."""
    done: dict[Expr, Expr] = {}
    for part in ordered(x):
        done[part] = change(rebuilt_of(part, done))
    return done[x]


def rename(x: Expr, name: Callable[[str], str]) -> Expr:
    """Rename the tensor of every load in x."""
    if not x.facts.has_loads:
        return x
    done: dict[Expr, Expr] = {}
    for part in ordered(x):
        rebuilt = rebuilt_of(part, done)
        # The normal form of a form with one load alone is that load, already renamed.
        if isinstance(part, Load) and isinstance(rebuilt, Load):
            rebuilt = Load(name(rebuilt.tensor), rebuilt.at, rebuilt.kind)
        done[part] = rebuilt
    return done[x]

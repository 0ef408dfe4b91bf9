"""What the rules ask of a node besides its elements: its fake tensor, the axis that it was given, and sizes as expressions."""

from __future__ import annotations

import functools

import sympy
import torch
from torch import fx

from attn_compiler import index_expr as ix
from attn_compiler.index_expr import Expr
from attn_compiler.passes.graph.views import argument
from attn_compiler.torch_private import symbols as torch_symbols


def fake(node: fx.Node) -> torch.Tensor:
    value: torch.Tensor = node.meta["val"]
    return value


def dim_of(node: fx.Node, default: int | None = None) -> int | None:
    given = argument(node, "dim", default)
    return given if isinstance(given, int) else default


def size(expr: sympy.Expr) -> Expr | None:
    """A size as an expression; None if it is no whole-number combination of symbols."""
    total: Expr = ix.ZERO
    for symbols, coefficient in expr.as_coefficients_dict().items():
        if not coefficient.is_Integer or not (symbols == 1 or symbols.is_Symbol):
            return None
        part: Expr = ix.ONE if symbols == 1 else ix.Size(str(symbols))
        total = ix.add(total, part, int(coefficient))
    return total


def whole_number(expr: sympy.Expr) -> Expr | None:
    """A size, or the larger or smaller one of several (MPT's `max(0, most - length)`)."""
    plain = size(expr)
    if plain is not None:
        return plain
    op = type(expr).__name__.lower()
    if op in ("max", "min"):
        parts = [whole_number(part) for part in expr.args]
        known = [part for part in parts if part is not None]
        return functools.reduce(functools.partial(ix.apply, op), known) if len(known) == len(parts) else None
    total: Expr = ix.ZERO
    for part, coefficient in expr.as_coefficients_dict().items():
        own = ix.ONE if part == 1 else None if part == expr else whole_number(part)
        if own is None or not coefficient.is_Integer:
            return None
        total = ix.add(total, own, int(coefficient))
    return total


def symbolic(number: torch.SymInt) -> Expr | None:
    """A number of the model's own, made of sizes or of what it was called with. None where it is made of one that may be below 1."""
    return whole_number(torch_symbols.decided(number)) if torch_symbols.is_of_positive(number) else None

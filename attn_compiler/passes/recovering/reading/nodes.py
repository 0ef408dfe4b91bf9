"""Properties of a node that rules read besides its elements: its fake tensor, its axis argument, and sizes as expressions."""

from __future__ import annotations

import functools
from collections.abc import Callable

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


#: operations in sizes, by the names of sympy's and PyTorch's classes
_MADE_OF: dict[str, Callable[[Expr, Expr], Expr]] = {
    "Add": ix.add,
    "Mul": ix.mul,
    **{name: functools.partial(ix.apply, "floordiv") for name in ("FloorDiv", "CleanDiv")},
    **{name: functools.partial(ix.apply, "mod") for name in ("Mod", "PythonMod")},
    **{name: functools.partial(ix.apply, name.lower()) for name in ("Max", "Min")},
}


def size(expr: sympy.Expr) -> Expr | None:
    """Return a size as an expression: sums and products of symbols, quotients and remainders (patches of a series), minima and maxima.
    None if it contains anything else."""
    return _size(sympy.expand(expr))


def _size(expr: sympy.Expr) -> Expr | None:
    if expr.is_Symbol or expr.is_Integer:
        return ix.Size(str(expr)) if expr.is_Symbol else ix.Const(int(expr))
    factor, rest = expr.as_coeff_Mul()
    if factor != 1:
        part = _size(rest) if factor.is_Integer else None
        return None if part is None else ix.mul(part, ix.Const(int(factor)))
    base, power = expr.as_base_exp()
    name, args = ("Mul", (base,) * int(power)) if power.is_Integer and power > 1 else (type(expr).__name__, expr.args)
    parts = [_size(part) for part in args] if name in _MADE_OF else []
    known = [part for part in parts if part is not None]
    return functools.reduce(_MADE_OF[name], known) if parts and len(known) == len(parts) else None


def symbolic(number: torch.SymInt) -> Expr | None:
    """Return a symbolic number of the model, made of sizes or of its arguments. None if one of these may be below 1."""
    return size(torch_symbols.decided(number)) if torch_symbols.is_of_positive(number) else None

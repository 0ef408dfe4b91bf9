"""Folding of constants, and cheap checks of an expression that need no walk through it."""

from __future__ import annotations

import math

from attn_compiler.index_expr.nodes import Apply, Const, Expr, Index, Load, Test

#: integers up to this one are exact in bfloat16 and wider dtypes, and no neighbouring integer rounds to them
EXACT_IN_EVERY_DTYPE = 256

#: float ops whose results are rounded even for integers
_ROUNDED = frozenset({"div", "log", "exp", "pow", "rounded"})


def pinned_by(condition: Expr, what: type[Index | Load]) -> tuple[Expr, Expr] | None:
    """Return (index or load, value) if the condition fixes it to one value."""
    if isinstance(condition, Test) and condition.relation == "==" and len(condition.form.terms) == 1:
        (term, factor), const = condition.form.terms[0], condition.form.const
        if isinstance(term, what) and const % factor == 0:
            return term, Const(-const // factor)
    return None


def choice_of_numbers(x: Expr) -> tuple[Expr, Expr, Expr] | None:
    """Return (condition, number where it holds, number where not) if x is a choice between two constants."""
    if isinstance(x, Apply) and x.op == "where" and all(isinstance(number, Const) for number in x.args[1:]):
        return x.args[0], x.args[1], x.args[2]
    return None


def has_value(op: str, values: list[bool | int | float]) -> bool:
    """Return True if an op can be folded. A division of integers by zero, or a NaN as an integer, has no value. A rounding float op is not
    folded: the model's dtype rounds it in another way, and `is_exact` has to find it."""
    if op == "rounded":
        return abs(values[0]) <= EXACT_IN_EVERY_DTYPE and values[0] == int(values[0])
    if op in _ROUNDED:
        return False
    if op in ("floordiv", "mod"):
        return values[1] != 0 and all(map(math.isfinite, values))
    return op != "int" or math.isfinite(values[0])


def may_hold(x: Expr, searched: Expr) -> bool:
    """Return False if x surely does not contain an expression: x is too small, or lacks its names."""
    mine, wanted = x.facts, searched.facts
    has_names = wanted.indices <= mine.indices and wanted.sizes <= mine.sizes
    return has_names and mine.size >= wanted.size and mine.tensors >= wanted.tensors

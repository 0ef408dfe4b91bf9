"""Which ops of numbers can be done at once, and what an expression shows of numbers without being looked through."""

from __future__ import annotations

import math

from attn_compiler.index_expr.nodes import Apply, Const, Expr, Index, Load, Test

#: whole numbers up to this one, and their neighbours, are no other number rounded, in bfloat16 as in any wider dtype
EXACT_IN_EVERY_DTYPE = 256

#: float ops whose results are rounded even for whole numbers
_ROUNDED = frozenset({"div", "log", "exp", "pow", "rounded"})


def pinned_by(condition: Expr, what: type[Index | Load]) -> tuple[Expr, Expr] | None:
    """(index or load, value) if the condition says that it has one value."""
    if isinstance(condition, Test) and condition.relation == "==" and len(condition.form.terms) == 1:
        (term, factor), const = condition.form.terms[0], condition.form.const
        if isinstance(term, what) and const % factor == 0:
            return term, Const(-const // factor)
    return None


def choice_of_numbers(x: Expr) -> tuple[Expr, Expr, Expr] | None:
    """(condition, number where it holds, number where not) if x is a choice between two numbers that are known now."""
    if isinstance(x, Apply) and x.op == "where" and all(isinstance(number, Const) for number in x.args[1:]):
        return x.args[0], x.args[1], x.args[2]
    return None


def has_value(op: str, values: list[bool | int | float]) -> bool:
    """Whether an op can be done now: a division of whole numbers by zero, or a NaN as a whole number, is nobody's value.

    Nor is what a float op rounds: the model's dtype rounds it another way, and `is_exact` has to find it.
    """
    if op == "rounded":
        return abs(values[0]) <= EXACT_IN_EVERY_DTYPE and values[0] == int(values[0])
    if op in _ROUNDED:
        return False
    if op in ("floordiv", "mod"):
        return values[1] != 0 and all(map(math.isfinite, values))
    return op != "int" or math.isfinite(values[0])


def may_hold(x: Expr, searched: Expr) -> bool:
    """False where it is known at once that an expression is not in x: x is too small, or has not the names that it has."""
    mine, wanted = x.facts, searched.facts
    has_names = wanted.indices <= mine.indices and wanted.sizes <= mine.sizes
    return has_names and mine.size >= wanted.size and mine.tensors >= wanted.tensors

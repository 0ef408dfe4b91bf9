"""Comparisons: of integers as tests of a linear form, of floats as they are, with NaN."""

from __future__ import annotations

import math
from collections.abc import Iterator

from attn_compiler.index_expr.building import add, apply, as_float, as_int, invert, test, where, whole_of
from attn_compiler.index_expr.folding import EXACT_IN_EVERY_DTYPE, choice_of_numbers
from attn_compiler.index_expr.linear_forms import combine, linear
from attn_compiler.index_expr.nodes import Apply, Const, Expr, Linear, kind_of

#: bound on the relative rounding error of bfloat16: half a unit in the last place is less
_COARSEST = 2.0**-8

#: int64's largest number plus one
_LARGEST_WHOLE = 2.0**63

#: float16's largest number
_FINITE_IN_EVERY_DTYPE = 65504.0


def compare(op: str, a: Expr, b: Expr) -> Expr:
    """Return a op b for op in <=, <, >=, >, ==, !=."""
    if kind_of(a) == kind_of(b) == "bool" and op in ("==", "!="):
        different = apply("xor", a, b)
        return different if op == "!=" else invert(different)
    if "float" in (kind_of(a), kind_of(b)):
        return _compare_floats(op, a, b)
    x, y = linear(as_int(a)), linear(as_int(b))
    match op:
        case "<=":
            return test(">=", combine(y, x, -1))
        case "<":
            return test(">=", combine(combine(y, x, -1), Linear((), 1), -1))
        case ">=":
            return test(">=", combine(x, y, -1))
        case ">":
            return test(">=", combine(combine(x, y, -1), Linear((), 1), -1))
        case _:
            return test(op, combine(x, y, -1))


def _compare_floats(op: str, a: Expr, b: Expr) -> Expr:
    found = _comparison_of_choice(op, a, b) or _comparison_of_whole(op, a, b)
    if found is not None:
        return found
    match op:
        case "==":
            return apply("eq", a, b)
        case "!=":
            return invert(apply("eq", a, b))
        case "<":
            return apply("lt", a, b)
        case ">":
            return apply("lt", b, a)
        case _:
            # Not `invert(b < a)`: with a NaN both are false.
            less = apply("lt", a, b) if op == "<=" else apply("lt", b, a)
            return apply("or", less, apply("eq", a, b))


def _comparison_of_choice(op: str, a: Expr, b: Expr) -> Expr | None:
    """Split a comparison of a number with `c ? x : y`, or its sum with something, into one each for x and y, if those are numbers."""
    for x, other, turned in ((a, b, False), (b, a, True)):
        if not isinstance(other, Const):
            continue
        for choice, rest in _summands(x):
            numbers = choice_of_numbers(choice)
            if numbers is not None:
                found = (_comparison_of_sum(op, number, rest, other, turned=turned) for number in numbers[1:])
                return where(numbers[0], *found)
    return None


def _comparison_of_sum(op: str, number: Expr, rest: Expr | None, other: Const, *, turned: bool) -> Expr:
    if op in ("==", "!=") and isinstance(number, Const) and _is_far_apart(number.value, rest, other.value):
        return Const(op == "!=")
    total = _sum(number, rest, other)
    return _compare_floats(op, *((other, total) if turned else (total, other)))


def _is_far_apart(number: float, rest: Expr | None, other: float) -> bool:
    """Return True if number + rest never equals `other`: no integer of any dtype is as large as their difference. An overflow gives
    infinity or NaN, which do not equal a finite number, either."""
    while isinstance(rest, Apply) and rest.op in ("rounded", "float"):
        (rest,) = rest.args
    is_whole = rest is not None and kind_of(rest) in ("int", "bool")
    return is_whole and math.isfinite(other) and abs(number - other) > 2 * _LARGEST_WHOLE + abs(number) * _COARSEST


def _sum(number: Expr, rest: Expr | None, other: Const) -> Expr:
    """Return number + rest for a comparison with `other`, marked as rounded if rounding to the model's dtype may change the outcome."""
    if rest is None or number in (Const(0.0), Const(-0.0)):
        return number if rest is None else as_float(rest)
    choice = choice_of_numbers(rest)
    if choice is not None:
        return where(choice[0], *(_sum(number, n, other) for n in choice[1:]))
    total = add(number, rest)
    is_told_apart = isinstance(total, Const) and _is_told_apart(total.value, other.value)
    return total if is_told_apart else apply("rounded", total)


def _is_told_apart(total: float, other: float) -> bool:
    """Return True if `total`, rounded to any float dtype, stays on its side of `other`, even where it becomes infinite."""
    if math.isnan(total) or math.isinf(total):
        return True
    if math.isinf(other):
        return abs(total) <= _FINITE_IN_EVERY_DTYPE
    return abs(total - other) > abs(total) * _COARSEST


def _summands(x: Expr) -> Iterator[tuple[Expr, Expr | None]]:
    """Yield x itself, or each side of a sum with the other one."""
    if isinstance(x, Apply) and x.op == "add":
        yield from (x.args, x.args[::-1])  # type: ignore[misc]
    else:
        yield x, None


_TURNED = {"<=": ">=", "<": ">", ">=": "<=", ">": "<", "==": "==", "!=": "!="}


def _comparison_of_whole(op: str, a: Expr, b: Expr) -> Expr | None:
    """Compare an integer with another one, or with a float that is known now, as integers."""
    whole, other = whole_of(a), whole_of(b)
    match a, b:
        case Apply(op="rounded", args=(x,)), Const(value=c) if kind_of(x) == "int" and abs(c) < EXACT_IN_EVERY_DTYPE:
            # On which side of a small number a whole one is, rounding leaves as it is.
            whole = x
    if whole is not None and other is not None:
        return compare(op, whole, other)
    if whole is None and other is not None:
        return _comparison_of_whole(_TURNED[op], b, a)
    if whole is None or not isinstance(b, Const):
        return None
    if not math.isfinite(b.value):
        return Const({"<=": b.value > 0, "<": b.value > 0, ">=": b.value < 0, ">": b.value < 0}.get(op, op == "!="))
    if op in ("==", "!="):
        return Const(op == "!=")
    return compare(op, whole, Const(math.floor(b.value) if op in ("<=", ">") else math.ceil(b.value)))

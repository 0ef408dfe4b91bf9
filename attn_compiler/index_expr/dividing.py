"""Divisions that the ranges of the indices settle: (4·b + h) // 4 is b with remainder h, as long as h stays below 4."""

from __future__ import annotations

from attn_compiler.index_expr.building import add
from attn_compiler.index_expr.changing import throughout
from attn_compiler.index_expr.linear_forms import combine, linear
from attn_compiler.index_expr.nodes import ZERO, Apply, Const, Expr, Linear, kind_of
from attn_compiler.index_expr.ranges import Ranges, bounds


def divide(x: Expr, ranges: Ranges) -> Expr:
    """Carry out every integer quotient and remainder in x whose form is the same for all indices in their ranges."""

    def carried_out(part: Expr) -> Expr:
        return _divided(part, ranges) if isinstance(part, Apply) and part.op in ("floordiv", "mod") else part

    return throughout(x, carried_out)


def _divided(x: Apply, ranges: Ranges) -> Expr:
    """Move terms that the divisor divides into the quotient, if the rest surely lies in [0, divisor)."""
    dividend, divisor = x.args[0], x.args[1].value if isinstance(x.args[1], Const) else None
    if not isinstance(divisor, int) or divisor <= 0 or kind_of(dividend) != "int":
        return x
    form = linear(dividend)
    whole = Linear(tuple((t, c) for t, c in form.terms if c % divisor == 0), form.const - form.const % divisor)
    rest = add(combine(form, whole, -1), ZERO)
    low, high = bounds(rest, ranges)
    if low is None or high is None or low < 0 or high >= divisor:
        return x
    quotient = Linear(tuple((t, c // divisor) for t, c in whole.terms), whole.const // divisor)
    return rest if x.op == "mod" else add(quotient, ZERO)

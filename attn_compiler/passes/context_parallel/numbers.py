"""Numbers that may come from the length of a rank's part: Python computes with lengths outside of the graph, and the whole is longer."""

from __future__ import annotations

import math

from attn_compiler import index_expr as ix
from attn_compiler.index_expr import Apply, Expr, Linear
from attn_compiler.passes.context_parallel.places import CannotShard

#: the name in ContextParallel(allow=...) for numbers of the model that look like the length of a rank's part
LENGTH = "length"

IF_CHANCE = (
    "compile with another length, or, if the model has that number whatever the length, give "
    f"ContextParallel(..., allow=({LENGTH!r},))"
)

#: ops that give another number when computed in other steps, or in another dtype
_ROUNDED = frozenset({"div", "log", "exp", "pow"})


def is_near(number: int, lengths: set[int]) -> bool:
    """Return whether a number may be a length, or a number beside one: `k < n - 1` is read as k <= n - 2."""
    return any(length > 2 and -2 + (length < 5) <= abs(number) - length <= 1 for length in lengths)


def is_half(number: int, lengths: set[int]) -> bool:
    """Return whether a number may come from half a length."""
    return any(length > 5 and -1 <= abs(number) - length // 2 <= 0 for length in lengths)


def is_of_length(number: float, length: int) -> bool:
    """Return whether a number may be a scale that comes from a length."""
    return length > 2 and any(
        math.isclose(number, one, rel_tol=1e-9) for one in (length, 1 / length, math.log(length), math.log2(length))
    )


def check_numbers(x: Expr, length: int) -> None:
    """Raise CannotShard for a number that may come from the rank's own length: the whole sequence has another one."""
    found = _length_in(x, length)
    if found is not None:
        raise CannotShard(
            "what a mask or bias says does not depend on how many positions a rank has",
            f"{ix.text(found, 120)}, and a rank has {length} positions",
            remedy=IF_CHANCE,
        )


def check_rounding(x: Expr) -> None:
    """Raise CannotShard if a whole number or a truth value depends on how a number is rounded: emitted ops round in other steps."""
    left = [x]
    while left:
        part = left.pop()
        is_step = isinstance(part, Apply) and (part.op == "int" or part.op in ("lt", "eq"))
        if is_step and any(map(_is_rounded, ix.parts(part))):
            raise CannotShard(
                "no bucket of a mask or bias depends on how a number is rounded",
                ix.text(part, 120),
                remedy="compute buckets with whole numbers",
            )
        left += ix.parts(part)


def _is_rounded(x: Expr) -> bool:
    return (isinstance(x, Apply) and x.op in _ROUNDED) or any(map(_is_rounded, ix.parts(x)))


def _length_in(x: Expr, length: int) -> Expr | None:
    """Return the first part of x that names the length, a number beside it, or half of it; half in a distance is allowed, for windows."""
    left = [(x, False)]
    while left:
        part, is_distance = left.pop()
        is_distance = is_distance or (bool(part.facts.indices & {"q", "k"}) and _is_of_distance(part))
        numbers = [part.const, *(factor for _, factor in part.terms)] if isinstance(part, Linear) else []
        numbers += [part.value] if isinstance(part, ix.Const) and isinstance(part.value, int) else []
        halved = isinstance(part, Linear) and not is_distance and any(is_half(number, {length}) for number in numbers)
        if halved or any(is_near(number, {length}) for number in numbers):
            return part
        real = part.value if isinstance(part, ix.Const) and isinstance(part.value, float) else 0.0
        if is_of_length(real, length):
            return part
        left += [(inner, is_distance) for inner in ix.parts(part)]
    return None


def _is_of_distance(x: Expr) -> bool:
    """Return whether x depends on q and k through their distance alone."""
    q, k = ix.Index("q"), ix.Index("k")
    key = ix.substitute(x, k, ix.add(k, ix.ONE))
    return bool(ix.substitute(key, q, ix.add(q, ix.ONE)) == x)

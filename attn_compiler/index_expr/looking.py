"""What is in an expression: its indices, its loads, and whether rounding can make a difference to it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from attn_compiler.index_expr.nodes import Apply, Const, Expr, Index, Linear, Load, Test, kind_of

#: float ops that give exactly what they are given
_EXACT = frozenset(
    {"and", "or", "not", "xor", "eq", "lt", "where", "abs", "min", "max", "floordiv", "mod", "int", "float"}
)


def parts(x: Expr) -> tuple[Expr, ...]:
    """The expressions right below x."""
    match x:
        case Linear(terms=terms):
            return tuple(term for term, _ in terms)
        case Test(form=form):
            return (form,)
        case Load(at=args) | Apply(args=args):
            return args
        case _:
            return ()


def mentions(x: Expr, index: Index) -> bool:
    """Whether the index occurs anywhere in x."""
    return x == index or any(mentions(part, index) for part in parts(x))


def loads(x: Expr) -> Iterator[Load]:
    """Every load in x, outermost first."""
    if isinstance(x, Load):
        yield x
    for part in parts(x):
        yield from loads(part)


def loads_last(xs: Iterable[Expr]) -> list[Expr]:
    """Parts of a junction in the order to look at them: what only depends on indices says whether a load is within its tensor."""
    return sorted(xs, key=lambda x: any(True for _ in loads(x)))


def is_exact(x: Expr) -> bool:
    """Whether x is the very value that a tensor of its dtype holds: nothing in it is rounded.

    Arithmetic on floats is rounded to a dtype that an expression doesn't know: true of a bias up to rounding, and of no
    comparison. Conversions of whole numbers count as exact; who makes them sees to it that they are.
    """
    if isinstance(x, Apply) and x.op not in _EXACT and kind_of(x) == "float":
        return x.op == "mul" and x.args[1] == Const(-1) and is_exact(x.args[0])
    return all(is_exact(part) for part in parts(x))


def nonzero(x: Expr) -> tuple[Expr, bool]:
    """(what x asks of whether it is true or nonzero, whether x holds where it is not): x itself if it asks nothing like that."""
    negated = False
    if isinstance(x, Apply) and x.op == "not":
        x, negated = x.args[0], True
    if isinstance(x, Test) and x.relation in ("!=", "==") and x.form.const == 0 and len(x.form.terms) == 1:
        return x.form.terms[0][0], negated != (x.relation == "==")
    if isinstance(x, Apply) and x.op == "eq" and isinstance(x.args[1], Const) and x.args[1].value == 0:
        return x.args[0], not negated
    return x, negated

"""Queries of an expression: its parts, indices and loads, and its exactness."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from attn_compiler.index_expr.nodes import Apply, Const, Expr, Index, Linear, Load, Test, kind_of

#: ops without rounding
_EXACT = frozenset(
    {"and", "or", "not", "xor", "eq", "lt", "where", "abs", "min", "max", "floordiv", "mod", "int", "float"}
)


def parts(x: Expr) -> tuple[Expr, ...]:
    """Return the expressions right below x."""
    match x:
        case Linear(terms=terms):
            return tuple(term for term, _ in terms)
        case Test(form=form):
            return (form,)
        case Load(at=args) | Apply(args=args):
            return args
        case _:
            return ()


def ordered(x: Expr, below: Callable[[Expr], tuple[Expr, ...]] = parts) -> list[Expr]:
    """List everything in x, each object once and after its parts, x last. below: the parts to descend to."""
    found: dict[int, Expr] = {}
    waiting = [(x, False)]
    while waiting:
        part, is_done_below = waiting.pop()
        if id(part) in found:
            continue
        if is_done_below:
            found[id(part)] = part
        else:
            waiting.append((part, True))
            waiting += [(inner, False) for inner in reversed(below(part)) if id(inner) not in found]
    return list(found.values())


def mentions(x: Expr, *indices: Index) -> bool:
    """Return True if one of the indices occurs anywhere in x."""
    return any(index.name in x.facts.indices for index in indices)


def sizes(x: Expr) -> frozenset[str]:
    """Return the names of all symbolic sizes in x."""
    return x.facts.sizes


def loads(x: Expr) -> Iterator[Load]:
    """Yield every load in x once, outermost first."""
    waiting, seen = [x], {x}
    while waiting:
        part = waiting.pop()
        if isinstance(part, Load):
            yield part
        inner = [p for p in dict.fromkeys(parts(part)) if p.facts.has_loads and p not in seen]
        seen.update(inner)
        waiting += reversed(inner)


def loads_last(xs: Iterable[Expr]) -> list[Expr]:
    """Sort parts of a junction for evaluation: those of indices alone first, which guard loads against indices out of bounds."""
    return sorted(xs, key=lambda x: x.facts.has_loads)


def is_exact(x: Expr) -> bool:
    """Return True if x is the very value that a tensor of its dtype holds: nothing in it is rounded.

    Float arithmetic is rounded to a dtype that an expression doesn't know: right for a bias up to rounding, but for no comparison.
    Conversions of integers count as exact; their maker checks that they are.
    """
    return not any(_rounds(part) for part in ordered(x))


def _rounds(x: Expr) -> bool:
    """Return True if x itself is float arithmetic that is rounded. A negation is not."""
    if not isinstance(x, Apply) or x.op in _EXACT or kind_of(x) != "float":
        return False
    return x.op != "mul" or x.args[1] != Const(-1)


def is_truth(x: Expr) -> bool:
    """Return True if a value is provably 0 or 1, or a truth value."""
    match x:
        case Const(value=value):
            return value in (0, 1)
        case Apply(op="where", args=(_, a, b)) | Apply(op="mul" | "min" | "max", args=(a, b)):
            return is_truth(a) and is_truth(b)
        case Apply(op="float" | "int" | "rounded", args=(a,)):
            return is_truth(a)
        case Linear(terms=((term, factor),), const=const) if (factor, const) in ((1, 0), (-1, 1)):
            return is_truth(term)
        case _:
            return kind_of(x) == "bool"


def nonzero(x: Expr) -> tuple[Expr, bool]:
    """Return the expression that x compares with zero, and True if x holds where that is zero. An x without such a comparison is returned
    itself."""
    negated = False
    if isinstance(x, Apply) and x.op == "not":
        x, negated = x.args[0], True
    if isinstance(x, Test) and x.relation in ("!=", "==") and x.form.const == 0 and len(x.form.terms) == 1:
        return x.form.terms[0][0], negated != (x.relation == "==")
    if isinstance(x, Apply) and x.op == "eq" and isinstance(x.args[1], Const) and x.args[1].value == 0:
        return x.args[0], not negated
    return x, negated

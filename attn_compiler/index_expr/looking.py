"""What is in an expression: its indices, its loads, and whether rounding can make a difference to it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

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


def ordered(x: Expr, below: Callable[[Expr], tuple[Expr, ...]] = parts) -> list[Expr]:
    """Everything in x, each object once and after those in it, x last. below: what to go on to from an expression."""
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


def mentions(x: Expr, index: Index) -> bool:
    """Whether the index occurs anywhere in x."""
    return index.name in x.facts.indices


def sizes(x: Expr) -> frozenset[str]:
    """The names of all symbolic sizes in x."""
    return x.facts.sizes


def loads(x: Expr) -> Iterator[Load]:
    """Every load in x, each once, outermost first."""
    waiting, seen = [x], {x}
    while waiting:
        part = waiting.pop()
        if isinstance(part, Load):
            yield part
        inner = [p for p in dict.fromkeys(parts(part)) if p.facts.has_loads and p not in seen]
        seen.update(inner)
        waiting += reversed(inner)


def loads_last(xs: Iterable[Expr]) -> list[Expr]:
    """Parts of a junction in the order to look at them: what only depends on indices says whether a load is within its tensor."""
    return sorted(xs, key=lambda x: x.facts.has_loads)


def is_exact(x: Expr) -> bool:
    """Whether x is the very value that a tensor of its dtype holds: nothing in it is rounded.

    Arithmetic on floats is rounded to a dtype that an expression doesn't know: true of a bias up to rounding, and of no
    comparison. Conversions of whole numbers count as exact; who makes them sees to it that they are.
    """
    return not any(_rounds(part) for part in ordered(x))


def _rounds(x: Expr) -> bool:
    """Whether x itself is float arithmetic that is rounded. A negation is none."""
    if not isinstance(x, Apply) or x.op in _EXACT or kind_of(x) != "float":
        return False
    return x.op != "mul" or x.args[1] != Const(-1)


def is_truth(x: Expr) -> bool:
    """Whether a value is shown to be 0 or 1, or to be a truth value."""
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
    """The expression whose truth x asks about, and whether x is true where that expression is false.

    An x that asks no such question is its own answer.
    """
    negated = False
    if isinstance(x, Apply) and x.op == "not":
        x, negated = x.args[0], True
    if isinstance(x, Test) and x.relation in ("!=", "==") and x.form.const == 0 and len(x.form.terms) == 1:
        return x.form.terms[0][0], negated != (x.relation == "==")
    if isinstance(x, Apply) and x.op == "eq" and isinstance(x.args[1], Const) and x.args[1].value == 0:
        return x.args[0], not negated
    return x, negated

"""What the ranges of the indices settle: bounds of whole numbers, and comparisons that hold, or fail, for every index."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from attn_compiler.index_expr.building import combine, linear, rebuilt
from attn_compiler.index_expr.nodes import FALSE, TRUE, Apply, Const, Expr, Index, Linear, Load, Size, Test, kind_of

#: largest value of each index, and of sizes where that is known, as a linear form: {"q": Sq - 1, "k": Skv - 1}
Ranges = Mapping[str, Linear]

#: under these, ranges may hold the number n of what lies from -n - 1 to n: of a tensor's elements, and of floats cut to whole numbers
LOADED_KEY, MADE_OF_FLOAT = "{}[]", "int()"

#: What is loaded in 64 bits is taken to be below this, so that sums and differences of three such numbers fit, and what of it is
#: multiplied by another number that is not known, to be below that, so that the product does
LOADED, LOADED_FACTOR = 2**61, 2**31 - 1


def decide(x: Expr, ranges: Ranges) -> Expr:
    """x with every comparison settled that holds (or fails) for all indices in their ranges."""
    match x:
        case Test(relation=relation, form=form):
            return _decided(relation, form, ranges) or x
        case Apply(op=op, args=args):
            return rebuilt(op, tuple(decide(a, ranges) for a in args))
        case _:
            return x


def bounds(x: Expr, ranges: Ranges) -> tuple[int | None, int | None]:
    """Numbers that a whole-number expression never goes below and above, where there are some. (None, None) for floats."""
    if kind_of(x) == "bool":
        return 0, 1
    if kind_of(x) != "int":
        return None, None
    return _bound(linear(x), ranges, lowest=True), _bound(linear(x), ranges, lowest=False)


def lower_bound(x: Expr) -> int | None:
    """A number that a whole-number expression never goes below, if there is one for all indices."""
    return bounds(x, {})[0]


def _decided(relation: str, form: Linear, ranges: Ranges) -> Expr | None:
    low, high = bounds(form, ranges)
    if relation == ">=":
        if low is not None and low >= 0:
            return TRUE
        return FALSE if high is not None and high < 0 else None
    apart = (low is not None and low > 0) or (high is not None and high < 0)
    return Const(relation == "!=") if apart else None


def _bound(form: Linear, ranges: Ranges, *, lowest: bool) -> int | None:
    """A number that the form never goes below (above), if there is one. Sizes are at least 1."""
    rest = form
    for term, factor in form.terms:
        if isinstance(term, (Index, Size)) and (factor > 0) != lowest:
            if term.name not in ranges:
                # A size may cancel against that of an index.
                continue
            # Sizes that an index runs below may cancel against the form's own, so they are put in first.
            rest = combine(rest, combine(ranges[term.name], linear(term), -1), factor)
    total = rest.const
    for term, factor in rest.terms:
        if isinstance(term, Index) and (factor > 0) == lowest:
            continue
        if isinstance(term, Size) and (factor > 0) == lowest:
            total += factor
            continue
        if isinstance(term, (Index, Size)):
            return None
        bound = _bound_of_term(term, ranges)[0 if (factor > 0) == lowest else 1]
        if bound is None:
            return None
        total += factor * bound
    return total


def _bound_of_term(term: Expr, ranges: Ranges) -> tuple[int | None, int | None]:
    known = ranges.get(_key(term))
    if known is not None:
        return -known.const - 1, known.const
    if not isinstance(term, Apply):
        return None, None
    if term.op == "mul":
        return _product(*(bounds(a, _of_factors(ranges)) for a in term.args))
    match term.op, [bounds(a, ranges) for a in term.args]:
        case "where", [_, (low_a, high_a), (low_b, high_b)]:
            return _or_none(min, low_a, low_b), _or_none(max, high_a, high_b)
        case "abs", [(low, high)]:
            furthest = _or_none(max, high, None if low is None else -low)
            nearest = max(0, low if low is not None else 0, -high if high is not None else 0)
            return nearest, furthest
        case "min", [(low_a, high_a), (low_b, high_b)]:
            return _or_none(min, low_a, low_b), _either(min, high_a, high_b)
        case "max", [(low_a, high_a), (low_b, high_b)]:
            return _either(max, low_a, low_b), _or_none(max, high_a, high_b)
        case "mod", [_, (divisor, same)] if divisor is not None and divisor == same and divisor > 0:
            return 0, divisor - 1
        case "floordiv", [(low, high), (divisor, same)] if divisor is not None and divisor == same and divisor > 0:
            return (None if low is None else low // divisor), (None if high is None else high // divisor)
        case _:
            return None, None


def _key(term: Expr) -> str:
    """Under what ranges may hold how large a term is."""
    if isinstance(term, Load):
        return LOADED_KEY.format(term.tensor)
    return MADE_OF_FLOAT if isinstance(term, Apply) and term.op == "int" else ""


def _of_factors(ranges: Ranges) -> Ranges:
    """The ranges for what stands in a product."""
    return {
        name: Linear((), LOADED_FACTOR) if name.endswith("[]") and most.const == LOADED else most
        for name, most in ranges.items()
    }


def _product(a: tuple[int | None, int | None], b: tuple[int | None, int | None]) -> tuple[int | None, int | None]:
    ends = [None if x is None or y is None else x * y for x in a for y in b]
    known = [end for end in ends if end is not None]
    return (min(known), max(known)) if len(known) == len(ends) else (None, None)


def _or_none(choose: Callable[[Iterable[int]], int], a: int | None, b: int | None) -> int | None:
    """The outer one of two bounds: unknown if one of them is."""
    return None if a is None or b is None else choose((a, b))


def _either(choose: Callable[[Iterable[int]], int], a: int | None, b: int | None) -> int | None:
    """The inner one of two bounds: one of them is enough."""
    return choose(known) if (known := [bound for bound in (a, b) if bound is not None]) else None

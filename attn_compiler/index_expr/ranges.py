"""Consequences of the indices' ranges: bounds of integers, and comparisons that hold, or fail, for every index."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from attn_compiler.index_expr.building import rebuilt
from attn_compiler.index_expr.linear_forms import combine, linear
from attn_compiler.index_expr.looking import ordered, parts
from attn_compiler.index_expr.nodes import FALSE, TRUE, Apply, Const, Expr, Index, Linear, Load, Size, Test, kind_of

#: largest value of each index, and of sizes where that is known, as a linear form: {"q": Sq - 1, "k": Skv - 1}
Ranges = Mapping[str, Linear]

#: keys of ranges for a number n whose values lie from -n - 1 to n: one tensor's elements, those of any other tensor, and floats cut to
#: integers
LOADED_KEY, ANY_LOAD, MADE_OF_FLOAT = "{}[]", "[]", "int()"

#: key of ranges for the largest value of any index without a name there
ANY_INDEX = "any index"

#: names that stand for more than one index or size
_OF_ANYTHING = frozenset({ANY_INDEX, MADE_OF_FLOAT})

#: assumed bounds of 64-bit elements: of three summed or subtracted ones, so that the result fits, and of a factor of an unknown number,
#: so that the product fits
LOADED, LOADED_FACTOR = 2**61, 2**31 - 1


Bounds = tuple[int | None, int | None]

#: key of remembered bounds: the digests of the ranges of the expression's names
_Key = frozenset[tuple[str, bytes]]

_UNKNOWN: Bounds = (None, None)


def decide(x: Expr, ranges: Ranges) -> Expr:
    """Settle every comparison in x that holds (or fails) for all indices in their ranges."""
    done: dict[Expr, Expr] = {}
    for part in ordered(x, lambda part: part.args if isinstance(part, Apply) else ()):
        if isinstance(part, Test):
            done[part] = _decided(part.relation, part.form, ranges) or part
        elif isinstance(part, Apply):
            args = tuple([done[a] for a in part.args])
            done[part] = part if args == part.args else rebuilt(part.op, args)
        else:
            done[part] = part
    return done[x]


def bounds(x: Expr, ranges: Ranges) -> Bounds:
    """Return the lowest and the highest value of an integer expression, None for unknown. (None, None) for floats. They are computed once
    for each part of x and the same ranges."""
    key = _key(x, ranges)
    if key not in x.remembered:
        for part in ordered(x, lambda part: _unbounded_parts(part, ranges)):
            part.remembered[_key(part, ranges)] = _bounds(part, ranges)
    found: Bounds = x.remembered[key]
    return found


def _key(x: Expr, ranges: Ranges) -> _Key:
    names = x.facts.indices | x.facts.sizes | _OF_ANYTHING
    tensors = x.facts.tensors
    known = [(name, most) for name, most in ranges.items() if name in names or _is_of_load(name, tensors)]
    return frozenset([(name, most.facts.digest) for name, most in known])


def _is_of_load(name: str, tensors: frozenset[str]) -> bool:
    """Return True if this name of ranges bounds loads of one of these tensors, or any load."""
    return name.endswith(ANY_LOAD) and (name == ANY_LOAD or name.removesuffix(ANY_LOAD) in tensors)


def _unbounded_parts(x: Expr, ranges: Ranges) -> tuple[Expr, ...]:
    """Return the parts of x whose bounds are needed for its own, and not known yet."""
    if kind_of(x) != "int" or not isinstance(x, (Linear, Apply)):
        return ()
    return tuple([part for part in parts(x) if _key(part, ranges) not in part.remembered])


def _bounds(x: Expr, ranges: Ranges) -> Bounds:
    """Bound one expression by the bounds of its parts."""
    if kind_of(x) == "bool":
        return 0, 1
    if kind_of(x) != "int":
        return _UNKNOWN
    most = _most(x, ranges)
    if most is not None:
        return -most - 1, most
    if isinstance(x, Load):
        return _UNKNOWN
    if isinstance(x, Apply) and x.op == "mul":
        return _product(*(bounds(a, _factor_ranges(ranges)) for a in x.args))
    if isinstance(x, Apply):
        return _bounds_of_result(x.op, [bounds(a, ranges) for a in x.args])
    return _bound(linear(x), ranges, lowest=True), _bound(linear(x), ranges, lowest=False)


def lower_bound(x: Expr) -> int | None:
    """Return a number that an integer expression never goes below, if there is one for all indices."""
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
    """Return a number that the form never goes below (above), if there is one. Sizes are at least 1; expressions of sizes alone may be
    less."""
    total = form.const
    names = Linear(())
    for term, factor in form.terms:
        if isinstance(term, (Index, Size)) or is_of_sizes(term):
            names = combine(names, _reached(term, factor, ranges, lowest=lowest), factor)
            continue
        both = (0, 1) if kind_of(term) == "bool" else bounds(term, ranges)
        bound = both[0 if (factor > 0) == lowest else 1]
        if bound is None:
            return None
        total += factor * bound
    total += names.const
    # Bounds are remembered by the ranges of the form's own names, and ranges of indices brought in further names.
    own = {name: most for name, most in ranges.items() if name in form.facts.sizes}
    for term, factor in names.terms:
        if isinstance(term, Index) and (factor > 0) == lowest:
            continue
        bound = bounds(term, own)[0 if (factor > 0) == lowest else 1] if is_of_sizes(term) else None
        bound = 1 if isinstance(term, Size) and (factor > 0) == lowest else bound
        if bound is None:
            return None
        total += factor * bound
    return total


def is_of_sizes(x: Expr) -> bool:
    """Return True for one number made of sizes, the same for all indices: it may cancel against an index that runs below it."""
    return isinstance(x, Apply) and bool(x.facts.sizes) and not x.facts.indices and not x.facts.tensors


def _reached(term: Expr, factor: int, ranges: Ranges, *, lowest: bool) -> Linear:
    """Substitute an index or a size with this factor by its largest value, if that decides and is known. A size may cancel against that of
    an index, and sizes that an index runs below against the form's own, so both are kept as sizes."""
    if (factor > 0) == lowest or not isinstance(term, (Index, Size)):
        return linear(term)
    known = ranges.get(term.name) or (ranges.get(ANY_INDEX) if isinstance(term, Index) else None)
    return linear(term) if known is None else known


def _bounds_of_result(op: str, args: list[Bounds]) -> Bounds:
    match op, args:
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
            return _UNKNOWN


def _most(x: Expr, ranges: Ranges) -> int | None:
    """Return the number n of the ranges for a load, or a float cut to an integer, which lies from -n - 1 to n."""
    if isinstance(x, Load):
        known = ranges.get(LOADED_KEY.format(x.tensor), ranges.get(ANY_LOAD))
    else:
        known = ranges.get(MADE_OF_FLOAT) if isinstance(x, Apply) and x.op == "int" else None
    return None if known is None else known.const


def _factor_ranges(ranges: Ranges) -> Ranges:
    """Return the ranges for factors of a product."""
    return {
        name: Linear((), LOADED_FACTOR) if name.endswith("[]") and most.const == LOADED else most
        for name, most in ranges.items()
    }


def _product(a: Bounds, b: Bounds) -> Bounds:
    if a[0] is not None and b[0] is not None and a[0] >= 0 and b[0] >= 0:
        return a[0] * b[0], None if a[1] is None or b[1] is None else a[1] * b[1]
    ends = [None if x is None or y is None else x * y for x in a for y in b]
    known = [end for end in ends if end is not None]
    return (min(known), max(known)) if len(known) == len(ends) else _UNKNOWN


def _or_none(choose: Callable[[Iterable[int]], int], a: int | None, b: int | None) -> int | None:
    """Return the outer one of two bounds: unknown if one of them is."""
    return None if a is None or b is None else choose((a, b))


def _either(choose: Callable[[Iterable[int]], int], a: int | None, b: int | None) -> int | None:
    """Return the inner one of two bounds: one of them is enough."""
    return choose(known) if (known := [bound for bound in (a, b) if bound is not None]) else None

"""Integers and floats as their dtypes hold them: rounded numbers are marked, numbers that may wrap around are not read.

Expressions calculate with integers of any size, tensors with those of their dtype. So an op on integers is read only if its
result surely fits, and a conversion to a float is exact only if the float holds every possible number. The bounds of a number
follow from the shape of the tensor that it is an element of, from the dtype of the tensor that it was loaded from, and from
three assumptions:

- A symbolic size is at most LONGEST. A guard ensures that (`Reader.within`): a larger one recompiles, and is only known to be
  below IN_MEMORY, which no tensor's axis reaches.
- An integer of 64 bits that is loaded, or made of a float, is below LOADED: positions, lengths, document numbers and times in
  nanoseconds are. If two are multiplied, each is below LOADED_FACTOR, as masks and positions are.
- An integer loaded in a narrower dtype may be any number of that dtype. So may the result of arithmetic that was not read.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch

from attn_compiler import index_expr as ix
from attn_compiler.index_expr import Apply, Const, Expr, Index, Linear, Ranges, Size
from attn_compiler.index_expr.looking import ordered
from attn_compiler.index_expr.ranges import ANY_INDEX, ANY_LOAD, LOADED, MADE_OF_FLOAT
from attn_compiler.passes.graph import axes
from attn_compiler.spec.dtypes import computed_in

#: Sizes that are symbolic while compiling stay below this, far below float32's last whole number, 2 ** 24
LONGEST = 2**22

#: no axis is as long: a tensor of so many elements takes a terabyte
IN_MEMORY = 2**40


def kind_of_dtype(dtype: torch.dtype) -> str:
    return "bool" if dtype == torch.bool else "float" if dtype.is_floating_point else "int"


def largest_loaded(dtype: torch.dtype, *, by_arithmetic: bool = False) -> int:
    """Return n if an element of an integer tensor lies from -n - 1 to n. by_arithmetic: the tensor is a result that may have wrapped."""
    limits = torch.iinfo(dtype)
    return LOADED if limits.bits == 64 and not by_arithmetic else limits.max


def ranges(
    x: Expr,
    shape: Sequence[int | torch.SymInt],
    at: tuple[Expr, ...],
    *,
    longest: Callable[[int | torch.SymInt], int] | None = None,
    named: Mapping[str, int] | None = None,
) -> Ranges:
    """Return ranges of the indices, sizes and loads in x, if x is the element at `at` of a tensor of that shape.

    longest: the largest value of a size. named: the largest values of sizes (by name) and loads (by LOADED_KEY of their tensors).
    """
    largest: dict[str, int] = dict.fromkeys(ix.sizes(x), LONGEST)
    largest |= named or {}
    # Inside of a vmap an element has fewer or more indices than its tensor has axes.
    for position, length in zip(at, shape, strict=False) if len(at) == len(shape) else ():
        known = axes.size_expr(length)
        last = (int(known) if known.is_Integer else LONGEST if longest is None else longest(length)) - 1
        for name, most in _largest(position, last):
            largest[name] = min(most, largest.get(name, most))
    return {name: Linear((), most) for name, most in largest.items()}


def bounds(x: Expr, within: Ranges) -> tuple[int | None, int | None]:
    """Return the lower and upper bound of an integer. within: the ranges of its indices, sizes and loads.

    Any other index is only known to run along an axis, and any other load to have 64 bits.
    """
    return ix.bounds(x, _ASSUMED | dict(within))


#: bounds of all that the ranges do not name
_ASSUMED: dict[str, Linear] = {
    ANY_INDEX: Linear((), IN_MEMORY),
    ANY_LOAD: Linear((), LOADED),
    MADE_OF_FLOAT: Linear((), LOADED),
}


def _largest(position: Expr, last: int) -> Iterator[tuple[str, int]]:
    """Yield the largest value of each index in a position of at most `last`, if all terms of the position are >= 0."""
    if ix.kind_of(position) != "int":
        return
    form = ix.linear(position)
    if all(isinstance(term, (Index, Size)) and factor > 0 for term, factor in form.terms):
        for term, factor in form.terms:
            if isinstance(term, Index):
                yield term.name, (last - form.const) // factor


def fits(x: Expr, dtype: torch.dtype, within: Ranges) -> bool:
    """True if an integer or truth value surely survives a conversion to the dtype. within: ranges of x's indices."""
    if dtype == torch.bool or dtype.is_floating_point or ix.kind_of(x) == "bool":
        return True
    limits = torch.iinfo(dtype)
    if isinstance(x, Const):
        return limits.min <= x.value <= limits.max
    if isinstance(x, Apply) and x.op == "where":
        return all(fits(end, dtype, within) for end in _ends(x))
    if ix.kind_of(x) == "float":
        return limits.bits == 64
    low, high = bounds(x, within)
    return low is not None and high is not None and limits.min <= low and high <= limits.max


def _ends(x: Expr) -> list[Expr]:
    """Return the values of a choice and of the choices nested in it, each once."""
    found = ordered(x, lambda part: part.args[1:] if isinstance(part, Apply) and part.op == "where" else ())
    return [part for part in found if not (isinstance(part, Apply) and part.op == "where")]


def converted(x: Expr, source: torch.dtype | None, dtype: torch.dtype, within: Ranges) -> Expr | None:
    """Convert x, an element of dtype `source` (None for a Python number); None if it may wrap around."""
    if dtype == torch.bool:
        return ix.as_bool(x)
    if not dtype.is_floating_point:
        x = whole_part(x, within) or x
        if not _holds_all_of(dtype, source) and not fits(x, dtype, within):
            return None
        return ix.as_int(x) if ix.kind_of(x) != "float" else ix.apply("int", x)
    if source is not None and source.is_floating_point and torch.promote_types(source, dtype) == dtype:
        return x
    return _rounded(x, dtype, within)


def whole_part(x: Expr, within: Ranges, *, floor: bool = False) -> Expr | None:
    """Return a float, rounded towards zero or down, as an integer; None if that may be another one. Only a quotient by a power of two is
    exact: a CUDA device multiplies by the reciprocal of a number, and 49 / 49 is below 1 there."""
    match x:
        case Apply(op="float", args=(a,)) if ix.kind_of(a) == "int":
            return a
        case Apply(op="div" | "mul" as op, args=(Apply(op="float", args=(a,)), Const(value=number))):
            by = number if op == "div" else 1 / number if number else 0.0
            low, _ = bounds(a, within) if ix.kind_of(a) == "int" else (None, None)
            if by >= 1 and math.frexp(by)[0] == 0.5 and low is not None and (floor or low >= 0):
                return ix.apply("floordiv", a, Const(int(by)))
    return None


def _holds_all_of(dtype: torch.dtype, source: torch.dtype | None) -> bool:
    """True if an integer dtype holds every number of another one."""
    if source is None or source.is_floating_point or source == torch.bool:
        return source == torch.bool
    own, other = torch.iinfo(dtype), torch.iinfo(source)
    return own.min <= other.min and other.max <= own.max


def computed(x: Expr, dtype: torch.dtype, within: Ranges) -> Expr:
    """Return the result of float arithmetic in a dtype. Constants are rounded to it; other arithmetic is inexact anyhow."""
    match x:
        case Const(value=value):
            return Const(nearest(value, dtype))
        case Apply(op="where", args=(condition, a, b)):
            return ix.where(condition, computed(a, dtype, within), computed(b, dtype, within))
        case Apply(op="float"):
            return _rounded(x, dtype, within)
        case _:
            return ix.as_float(x)


def _rounded(x: Expr, dtype: torch.dtype, within: Ranges) -> Expr:
    """Round a number to the nearest one of a float dtype."""
    match x:
        case Const(value=value):
            return Const(nearest(value, dtype))
        case Apply(op="where", args=(condition, a, b)):
            return ix.where(condition, _rounded(a, dtype, within), _rounded(b, dtype, within))
        case Apply(op="float", args=(whole,)):
            return _rounded(whole, dtype, within)
    if ix.kind_of(x) == "bool" or (ix.kind_of(x) == "int" and _is_exact_in(x, dtype, within)):
        return ix.as_float(x)
    return ix.apply("rounded", x)


def nearest(value: float, dtype: torch.dtype) -> float:
    """Round a number to a float dtype, through float32 as kernels do for narrower ones."""
    return float(torch.tensor(value, dtype=computed_in(dtype)).to(dtype).item())


def _is_exact_in(x: Expr, dtype: torch.dtype, within: Ranges) -> bool:
    """True if the dtype holds every integer that x can be."""
    low, high = bounds(x, within)
    largest = round(2 / torch.finfo(dtype).eps)
    return low is not None and high is not None and -largest <= low and high <= largest

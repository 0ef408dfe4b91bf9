"""Conversions between dtypes, as exact as tensors make them: what is rounded says so, what may wrap is not converted.

A whole number becomes a float without loss as long as it is small enough; how large it gets is known from the shape of the
tensor that it is an element of.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from attn_compiler import index_expr as ix
from attn_compiler.index_expr import Apply, Const, Expr, Index, Linear, Ranges, Size
from attn_compiler.passes import axes

#: Sizes that are symbolic while compiling are taken to stay below this, far below float32's last whole number, 2 ** 24
LONGEST = 2**22


def kind_of_dtype(dtype: torch.dtype) -> str:
    return "bool" if dtype == torch.bool else "float" if dtype.is_floating_point else "int"


def is_unbounded(dtype: torch.dtype) -> bool:
    """Whether whole numbers of that dtype may be taken as unbounded: positions overflow uint8, and differences of them wrap."""
    return dtype in (torch.int32, torch.int64)


def ranges(x: Expr, shape: torch.Size, at: tuple[Expr, ...]) -> Ranges:
    """How large the indices and sizes in x can be, if x is the element at `at` of a tensor of that shape."""
    largest: dict[str, int] = dict.fromkeys(ix.sizes(x), LONGEST)
    # Inside of a vmap an element has fewer or more indices than its tensor has axes.
    for position, length in zip(at, shape, strict=False) if len(at) == len(shape) else ():
        known = axes.size_expr(length)
        last = (int(known) if known.is_Integer else LONGEST) - 1
        for name, most in _largest(position, last):
            largest[name] = min(most, largest.get(name, most))
    return {name: Linear((), most) for name, most in largest.items()}


def _largest(position: Expr, last: int) -> Iterator[tuple[str, int]]:
    """For each index in a position that is at most `last`: how large it can be, where all terms of the position are >= 0."""
    if ix.kind_of(position) != "int":
        return
    form = ix.linear(position)
    if all(isinstance(term, (Index, Size)) and factor > 0 for term, factor in form.terms):
        for term, factor in form.terms:
            if isinstance(term, Index):
                yield term.name, (last - form.const) // factor


def fits(x: Expr, dtype: torch.dtype, within: Ranges) -> bool:
    """Whether a whole number or truth value surely survives a conversion to the dtype. within: ranges of x's indices."""
    if is_unbounded(dtype) or dtype == torch.bool or dtype.is_floating_point or ix.kind_of(x) == "bool":
        return True
    limits = torch.iinfo(dtype)
    if isinstance(x, Const):
        return limits.min <= x.value <= limits.max
    if isinstance(x, Apply) and x.op == "where":
        return all(fits(a, dtype, within) for a in x.args[1:])
    low, high = ix.bounds(x, within)
    return low is not None and high is not None and limits.min <= low and high <= limits.max


def converted(x: Expr, source: torch.dtype | None, dtype: torch.dtype, within: Ranges) -> Expr | None:
    """x, an element of dtype `source` (None for a Python number), converted; None if that may wrap around."""
    if dtype == torch.bool:
        return ix.as_bool(x)
    if not dtype.is_floating_point:
        if not fits(x, dtype, within):
            return None
        return ix.as_int(x) if ix.kind_of(x) != "float" else ix.apply("int", x)
    if source is not None and source.is_floating_point and torch.promote_types(source, dtype) == dtype:
        return x
    return _rounded(x, dtype, within)


def computed(x: Expr, dtype: torch.dtype, within: Ranges) -> Expr:
    """The result of float arithmetic in a dtype: what is known now is rounded to it, other arithmetic is not exact anyhow."""
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
    """A number as the nearest one of a float dtype."""
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
    """A number in a float dtype, rounded through float32 as kernels do for narrower ones."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    return float(torch.tensor(value, dtype=wide).to(dtype).item())


def _is_exact_in(x: Expr, dtype: torch.dtype, within: Ranges) -> bool:
    """Whether the dtype holds every whole number that x can be."""
    low, high = ix.bounds(x, within)
    largest = round(2 / torch.finfo(dtype).eps)
    return low is not None and high is not None and -largest <= low and high <= largest

"""Simplify the alternatives of a mask: drop implied ones, and factor out common conditions. Rows that a loop wrote one by one become the
band or the frames that they form."""

from __future__ import annotations

import functools

import torch

from attn_compiler import index_expr as ix
from attn_compiler.index_expr import Apply, Const, Expr, Index, Linear, Ranges, Test
from attn_compiler.index_expr.junctions import split
from attn_compiler.index_expr.linear_forms import solved

Q, K = Index("q"), Index("k")

#: the most alternatives that are compared with each other, and the most that are kept
_FEW, _MOST = 16, 64
#: the most pairs of a mask that is evaluated, times its number of alternatives
_MOST_PAIRS = 2**30

_Parts = tuple[Expr, ...]


def fewer(condition: Expr, within: Ranges) -> Expr:
    """Return an equivalent condition with fewer alternatives. within: ranges of indices and sizes."""
    parts = [_fewer(part, within) for part in split("and", condition)]
    kept = list(parts)
    # A part that another one implies says nothing.
    for part in parts if len(parts) <= _FEW else ():
        if any(other is not part and _implies(other, part, within) for other in kept):
            kept = [other for other in kept if other is not part]
    return ix.apply("and", *kept)


def too_many(condition: Expr) -> str | None:
    """Return why a condition has too many alternatives, so that the model's tensor is used; else None."""
    most = max((len(split("or", part)) for part in split("and", condition)), default=0)
    if most <= _MOST:
        return None
    return (
        f"it has {most} alternatives, and {_MOST} are the most: compare positions in one expression, such as "
        f"(k <= q) & (k > q - window), where a loop writes row by row"
    )


def _fewer(part: Expr, within: Ranges) -> Expr:
    alternatives = [split("and", each) for each in split("or", part)]
    if len(alternatives) < 2:
        return part
    drawn = _drawn(part, len(alternatives), within) if len(alternatives) > 2 else None
    if drawn is not None:
        return drawn
    if len(alternatives) > _FEW:
        return part
    kept: list[_Parts] = []
    for place, each in enumerate(alternatives):
        if not any(_follows(other, each, within) for other in (*kept, *alternatives[place + 1 :])):
            kept.append(each)
    if len(kept) < 2:
        return ix.apply("and", *kept[0])
    common = [x for each in kept for x in each if all(each is own or _follows((x,), own, within) for own in kept)]
    rest = [ix.apply("and", *(x for x in each if x not in common)) for each in kept]
    return ix.apply("and", *common, ix.apply("or", *rest))


def _follows(wanted: _Parts, known: _Parts, within: Ranges) -> bool:
    """True if the conjunction `known` implies the conjunction `wanted`."""
    return all(any(_implies(x, part, within) for x in known) for part in wanted)


def _implies(a: Expr, b: Expr, within: Ranges) -> bool:
    if a == b:
        return True
    for index in map(Index, sorted(a.facts.indices)):
        value = solved(a, index)
        if value is not None and ix.decide(ix.substitute(b, index, value), within) == ix.TRUE:
            return True
    if not isinstance(a, Test) or not isinstance(b, Test) or b.relation == "==" or a.relation == "!=":
        return False
    signs = (1, -1) if a.relation == "==" else (-1,)
    least = 0 if b.relation == ">=" else 1
    forms = (b.form,) if b.relation == ">=" else (b.form, ix.combine(Linear(()), b.form, -1))
    lows = [ix.bounds(ix.combine(form, a.form, sign), within)[0] for form in forms for sign in signs]
    return any(low is not None and low >= least for low in lows)


# ---- a mask of known sizes ----------------------------------------------------------------------------------------


def _drawn(x: Expr, alternatives: int, within: Ranges) -> Expr | None:
    """Return the band or frames equal to a condition on positions of known sizes, checked on every pair; else None."""
    queries, keys = (_count(within, index) for index in (Q, K))
    if not queries or not keys or alternatives * queries * keys > _MOST_PAIRS:
        return None
    pairs = _pairs(x, {Q: torch.arange(queries)[:, None], K: torch.arange(keys)[None]})
    if pairs is None:
        return None
    pairs = pairs.expand(queries, keys)
    first, last = pairs.int().argmax(1), keys - 1 - pairs.flip(1).int().argmax(1)
    if not torch.equal(last - first + 1, pairs.sum(1)):
        return None
    upper, lower = _line(last, keys - 1, torch.clamp_max), _line(first, 0, torch.clamp_min)
    if upper is None or lower is None:
        return None
    return ix.decide(ix.apply("and", ix.compare("<=", K, upper), ix.compare(">=", K, lower)), within)


def _count(within: Ranges, index: Index) -> int | None:
    last = within.get(index.name)
    return None if last is None or last.terms else last.const + 1


def _pairs(x: Expr, places: dict[Index, torch.Tensor]) -> torch.Tensor | None:
    """Evaluate a condition for all pairs; None if it reads anything but positions."""
    match x:
        case Apply(op="and" | "or" as op, args=args):
            found = [_pairs(part, places) for part in args]
            known = [each for each in found if each is not None]
            join = torch.logical_and if op == "and" else torch.logical_or
            return functools.reduce(join, known) if len(known) == len(found) else None
        case Test(relation=relation, form=form):
            total = torch.full((1, 1), form.const)
            for term, factor in form.terms:
                if not isinstance(term, Index) or term not in places:
                    return None
                total = total + factor * places[term]
            return total.ge(0) if relation == ">=" else total.eq(0) if relation == "==" else total.ne(0)
    return None


def _line(ends: torch.Tensor, limit: int, clamp: object) -> Expr | None:
    """Return the ends of all rows, clamped to `limit`, as one expression: a number, q + n, or c · (q // c) + n; else None."""
    at = torch.arange(len(ends))
    free = (ends != limit).nonzero().flatten()
    if not len(free):
        return Const(limit)
    place = int(free[0])
    runs = torch.diff(ends).nonzero().flatten() + 1
    width = int(torch.diff(runs)[0]) if len(runs) > 1 else int(runs[0]) if len(runs) else 0
    for size in (1, width):
        if size < 1:
            continue
        offset = int(ends[place]) - place // size * size
        found = clamp(at // size * size + offset, limit)  # type: ignore[operator]
        if torch.equal(found, ends):
            chunk = Q if size == 1 else ix.mul(ix.apply("floordiv", Q, Const(size)), Const(size))
            return ix.add(chunk, Const(offset))
    return Const(int(ends[0])) if bool((ends == ends[0]).all()) else None

"""Intervals of keys that a query may use: a band, or an interval between two expressions."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass

from attn_compiler import index_expr as ix
from attn_compiler.index_expr import Const, Expr, Index, Test
from attn_compiler.lowerings.shared.parts.kernel_plan import Band
from attn_compiler.spec import dims, masks
from attn_compiler.spec.attention import AttentionSpec
from attn_compiler.spec.masks import SEQLEN_KV, SEQLEN_Q, MaskKind

B, H, Q, K = map(Index, "bhqk")


@dataclass(frozen=True, kw_only=True, slots=True)
class Interval:
    """The keys with lower <= k < upper. Both bounds are over (b, q), sizes and run-time tensors; None leaves a side open."""

    lower: Expr | None = None
    upper: Expr | None = None

    def both(self, other: Interval) -> Interval:
        """Intersect two intervals."""
        return Interval(lower=_of_two("max", self.lower, other.lower), upper=_of_two("min", self.upper, other.upper))

    @property
    def is_length(self) -> bool:
        """Return whether it begins with the first key, and ends at the same one for all queries of a batch row."""
        return self.lower is None and self.upper is not None and not ix.mentions(self.upper, Q)


def band_of(kind: MaskKind, spec: AttentionSpec) -> Band | None:
    """Return the band that equals a mask kind, whatever the tensors hold; None if there is none."""
    match kind:
        case masks.Causal(alignment=alignment):
            from_end = alignment is masks.Alignment.BOTTOM_RIGHT and not dims.same(spec.seqlen_q, spec.seqlen_kv)
            return Band(right=0, from_end=from_end)
        case masks.CausalFrom(offset=Const(value=int(offset))):
            return Band(right=offset)
        case masks.SlidingWindow(left=left, right=right):
            return Band(left=left, right=right)
    return None


def as_interval(band: Band) -> Interval:
    """Convert a band to an interval of each query."""
    position: Expr = ix.add(ix.add(Q, SEQLEN_KV), SEQLEN_Q, -1) if band.from_end else Q
    return Interval(
        lower=None if band.left is None else ix.add(position, Const(-band.left)),
        upper=None if band.right is None else ix.add(position, Const(band.right + 1)),
    )


def interval_of(kind: MaskKind) -> Interval | None:
    """Return the keys that each query may use, if they are in one piece whatever the tensors hold, and the same for every head."""
    match kind:
        case masks.CausalFrom() | masks.KeyBound() | masks.Formula():
            return _of_condition(kind.condition)
        case masks.Prefix(length=length):
            return Interval(upper=ix.apply("max", ix.add(Q, ix.ONE), length))
        case masks.Chunked(size=size, start=start):
            chunk = ix.apply("floordiv", ix.add(Q, start, -1), Const(size))
            first = ix.add(ix.mul(chunk, Const(size)), start)
            return Interval(lower=first, upper=ix.add(first, Const(size)))
        case masks.AnyOf(alternatives=alternatives):
            return _of_alternatives(alternatives)
    return None


def _of_alternatives(alternatives: tuple[tuple[MaskKind, ...], ...]) -> Interval | None:
    """Rectangles and the like. Where all begin with the first key, the longest says it; else each query has to be in one of them alone."""
    asked = [tuple(kind.condition for kind in kinds if not ix.mentions(kind.condition, K)) for kinds in alternatives]
    found = [_of_all(kind for kind in kinds if ix.mentions(kind.condition, K)) for kinds in alternatives]
    intervals = [interval for interval in found if interval is not None]
    if len(intervals) < len(found) or any(ix.mentions(x, H) for conditions in asked for x in conditions):
        return None
    here = [ix.apply("and", *conditions) for conditions in asked]
    uppers = [SEQLEN_KV if each.upper is None else each.upper for each in intervals]
    if all(each.lower is None for each in intervals):
        lengths = [ix.where(condition, upper, ix.ZERO) for condition, upper in zip(here, uppers, strict=True)]
        return Interval(upper=functools.reduce(lambda x, y: ix.apply("max", x, y), lengths))
    if not all(_exclude(a, b) for i, a in enumerate(asked) for b in asked[:i]):
        return None
    lower: Expr = ix.ZERO
    upper: Expr = ix.ZERO
    for each, condition, last in zip(intervals, here, uppers, strict=True):
        lower = ix.where(condition, ix.ZERO if each.lower is None else each.lower, lower)
        upper = ix.where(condition, last, upper)
    return Interval(lower=lower, upper=upper)


def _of_all(kinds: Iterable[MaskKind]) -> Interval | None:
    total = Interval()
    for kind in kinds:
        match kind:
            case masks.Causal(alignment=alignment):
                found: Interval | None = as_interval(Band(right=0, from_end=alignment is masks.Alignment.BOTTOM_RIGHT))
            case masks.SlidingWindow(left=left, right=right):
                found = as_interval(Band(left=left, right=right))
            case _:
                found = interval_of(kind)
        if found is None:
            return None
        total = total.both(found)
    return total


def _exclude(some: Iterable[Expr], others: Iterable[Expr]) -> bool:
    """Return whether two conjunctions never hold together."""
    return any(_contradict(a, b) for a in some for b in others if isinstance(a, Test) and isinstance(b, Test))


def _contradict(a: Test, b: Test) -> bool:
    """Return whether two bounds or single values never hold together. A form that is 0 may be taken away as well as added."""
    if "!=" in (a.relation, b.relation):
        return False
    sums = [ix.bounds(ix.combine(a.form, b.form, sign), {}) for sign in (1, -1)]
    if a.relation == b.relation == "==":
        return any((low is not None and low > 0) or (high is not None and high < 0) for low, high in sums)
    if a.relation == b.relation:
        return sums[0][1] is not None and sums[0][1] < 0
    if a.relation == "==":
        return _contradict(b, a)
    return any(high is not None and high < 0 for _, high in sums)


def _of_condition(condition: Expr) -> Interval | None:
    """Convert n · k <= f(b, q) or n · k >= f(b, q), where keys are every n-th of a sequence, or a condition on the query: k <=
    cache_position[q]."""
    if ix.mentions(condition, H):
        return None
    if not ix.mentions(condition, K):
        return Interval(upper=ix.where(condition, SEQLEN_KV, ix.ZERO))
    if not isinstance(condition, Test) or condition.relation != ">=":
        return None
    factor = dict(condition.form.terms).get(K, 0)
    if not factor:
        return None
    rest = ix.add(ix.combine(condition.form, ix.linear(K), -factor), ix.ZERO)
    if ix.mentions(rest, K):
        return None
    times = ix.apply("floordiv", rest, Const(abs(factor)))
    if factor < 0:
        return Interval(upper=ix.add(times, ix.ONE))
    return Interval(lower=ix.mul(times, Const(-1)))


def _of_two(op: str, a: Expr | None, b: Expr | None) -> Expr | None:
    """Return the tighter one of two bounds. None is an open side."""
    known: Iterable[Expr] = [x for x in (a, b) if x is not None]
    return functools.reduce(lambda x, y: ix.apply(op, x, y), known) if known else None

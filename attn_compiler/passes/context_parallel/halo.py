"""Halos: where a proved mask lets a query see only near keys, a rank needs only its own chunks, and a halo around each.

Chunks of one rank lie apart in the sequence, so each becomes a separate row of the batch. Positions of keys then differ from those of
queries by a known number, and the mask is the same band of pairs in each chunk. Positions beyond the ends of the sequence are masked.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import fx

from attn_compiler import index_expr as ix
from attn_compiler.context_parallel import halo_ops as torch_halos
from attn_compiler.context_parallel.halo import Halo, most_sent
from attn_compiler.context_parallel.layout import Layout
from attn_compiler.index_expr import Const, Expr
from attn_compiler.passes.context_parallel.exchanging import GraphLayout, Met, PairPlaces
from attn_compiler.passes.graph.emit import GraphBuilder
from attn_compiler.passes.recovering import kinds
from attn_compiler.spec import masks
from attn_compiler.spec.masks import MaskKind

# ---- width ---------------------------------------------------------------------------------------------------------------


def found(allowed: Expr, length: int, layout: GraphLayout) -> Halo | None:
    """Return the halo that the queries of every chunk need, if it sends and keeps less than a gather of all keys.

    allowed: the proved condition over positions of the whole sequence. length: the number of them that a rank has.
    """
    lay = Layout(size=layout.size, balanced=layout.is_balanced)
    whole, chunk = length * layout.size, length * layout.size // lay.chunks
    size = ix.linear(Const(whole))
    known = kinds.recognise(allowed, size, size)
    lefts, rights = [0], [0]
    for start in range(0, whole, chunk):
        first, last = first_key(known, start), last_key(known, start + chunk - 1)
        lefts.append(start - max(0, 0 if first is None else first))
        rights.append(min(whole - 1, whole if last is None else last) - (start + chunk - 1))
    halo = Halo(left=max(lefts), right=max(rights), chunk=chunk)
    is_less = most_sent(lay, halo) < (layout.size - 1) * length and halo.keys * (lay.chunks // lay.size) < whole
    return halo if is_less else None


def first_key(known: Iterable[MaskKind], query: int) -> int | None:
    """Return a key before which no query from this one on uses any; None: no kind tells one."""
    bounds = [bound for kind in known if (bound := _first(kind, query)) is not None]
    return max(bounds, default=None)


def last_key(known: Iterable[MaskKind], query: int) -> int | None:
    """Return a key after which no query up to this one uses any; None: no kind tells one."""
    bounds = [bound for kind in known if (bound := _last(kind, query)) is not None]
    return min(bounds, default=None)


def _first(kind: MaskKind, query: int) -> int | None:
    match kind:
        case masks.SlidingWindow(left=int(left)):
            return query - left
        case masks.Chunked(size=size, start=Const(value=int(start))):
            return (query - start) // size * size + start
        case masks.AnyOf(alternatives=alternatives):
            bounds = [first_key(one, query) for one in alternatives]
            return None if None in bounds else min(bound for bound in bounds if bound is not None)
    return None


def _last(kind: MaskKind, query: int) -> int | None:
    match kind:
        case masks.Causal(alignment=masks.Alignment.TOP_LEFT):
            return query
        case masks.CausalFrom(offset=Const(value=int(offset))):
            return query + offset
        case masks.SlidingWindow(right=int(right)):
            return query + right
        case masks.Chunked(size=size, start=Const(value=int(start))):
            return (query - start) // size * size + start + size - 1
        case masks.AnyOf(alternatives=alternatives):
            bounds = [last_key(one, query) for one in alternatives]
            return None if None in bounds else max(bound for bound in bounds if bound is not None)
    return None


# ---- nodes ---------------------------------------------------------------------------------------------------------------


def meet(builder: GraphBuilder, layout: GraphLayout, halo: Halo, q: fx.Node, k: fx.Node, v: fx.Node) -> Met:
    """Return each chunk's queries, and its keys with their halo, as a row of the batch. One exchange where k and v are of one dtype."""
    value = builder.value
    chunks = _chunks(layout)
    if not halo.left and not halo.right:
        return _alone(builder, layout, halo, q, k, v)
    ends = [_ends(builder, halo, chunks, x) for x in (k, v)]
    if value(k).dtype == value(v).dtype:
        both = _come(builder, layout, halo, builder.call(torch.cat, ends, 4))
        of_k, of_v = value(k).shape[3], value(v).shape[3]
        around = [builder.call(torch.narrow, both, 4, at, n) for at, n in ((0, of_k), (of_k, of_v))]
    else:
        around = [_come(builder, layout, halo, x) for x in ends]
    keys, values = (_joined(builder, halo, chunks, *pair) for pair in zip((k, v), around, strict=True))
    places = _places(builder, layout, halo, value(q))
    lay = Layout(size=layout.size, balanced=layout.is_balanced)
    widths = sum(x.shape[1] * x.shape[3] * x.element_size() for x in (value(k), value(v)))
    sent = most_sent(lay, halo) * int(value(k).shape[0] * widths)
    folded = _folded(builder, q, chunks)
    return Met(q=folded, k=keys, v=values, queries=places.q, first_head=None, bytes=sent, places=places)


def _alone(builder: GraphBuilder, layout: GraphLayout, halo: Halo, q: fx.Node, k: fx.Node, v: fx.Node) -> Met:
    places = _places(builder, layout, halo, builder.value(q))
    folded, keys, values = (_folded(builder, x, _chunks(layout)) for x in (q, k, v))
    return Met(q=folded, k=keys, v=values, queries=places.q, first_head=None, bytes=0, places=places)


def unfolded(builder: GraphBuilder, layout: GraphLayout, out: fx.Node) -> fx.Node:
    """Turn (B · chunks, H, n, D) into (B, H, chunks · n, D)."""
    chunks = _chunks(layout)
    if chunks == 1:
        return out
    parted = builder.call(torch.unflatten, out, 0, (-1, chunks))
    return builder.call(torch.flatten, builder.call(torch.movedim, parted, 1, 2), 2, 3)


def _chunks(layout: GraphLayout) -> int:
    """Return the number of a rank's chunks."""
    return 2 if layout.is_balanced else 1


def _ends(builder: GraphBuilder, halo: Halo, chunks: int, x: fx.Node) -> fx.Node:
    """Return what other chunks may need of each: (B, H, n, D) -> (B, H, chunks, tail + head, D)."""
    parted = builder.call(torch.unflatten, x, 2, (chunks, halo.chunk))
    cuts = [(halo.chunk - halo.tail, halo.tail), (0, halo.head)]
    parts = [builder.call(torch.narrow, parted, 3, start, n) for start, n in cuts if n]
    return parts[0] if len(parts) == 1 else builder.call(torch.cat, parts, 3)


def _come(builder: GraphBuilder, layout: GraphLayout, halo: Halo, ends: fx.Node) -> fx.Node:
    """Return the halo of each of the rank's chunks, left before right."""
    lies = (layout.size, layout.is_balanced, layout.group)
    return builder.call(torch_halos.halo, ends, halo.left, halo.right, halo.chunk, *lies)


def _joined(builder: GraphBuilder, halo: Halo, chunks: int, own: fx.Node, around: fx.Node) -> fx.Node:
    """Join chunks and halos to (B · chunks, H, left + n + right, D)."""
    call = builder.call
    middle = call(torch.unflatten, own, 2, (chunks, halo.chunk))
    parts = [middle]
    if halo.left:
        parts.insert(0, call(torch.narrow, around, 3, 0, halo.left))
    if halo.right:
        parts.append(call(torch.narrow, around, 3, halo.left, halo.right))
    # The axes are moved before the join, so that folding them into the batch makes no copy.
    return call(torch.flatten, call(torch.cat, [call(torch.movedim, x, 2, 1) for x in parts], 3), 0, 1)


def _folded(builder: GraphBuilder, x: fx.Node, chunks: int) -> fx.Node:
    """Turn (B, H, chunks · n, D) into (B · chunks, H, n, D)."""
    if chunks == 1:
        return x
    parted = builder.call(torch.unflatten, x, 2, (chunks, -1))
    return builder.call(torch.flatten, builder.call(torch.movedim, parted, 2, 1), 0, 1)


def _places(builder: GraphBuilder, layout: GraphLayout, halo: Halo, q: torch.Tensor) -> PairPlaces:
    """Return the positions of queries and keys in the whole sequence, and which keys are in it. q: before it was folded."""
    call, device, rows = builder.call, q.device, int(q.shape[0]) * _chunks(layout)
    key = (layout, halo, rows, device)

    def start() -> fx.Node:
        """Return the position of the first query of each row's chunk."""
        rank = layout.rank(builder, device)
        front = call(torch.mul, rank, halo.chunk)
        if not layout.is_balanced:
            return front
        back = call(torch.sub, (2 * layout.size - 1) * halo.chunk, front)
        return call(torch.where, call(torch.eq, call(torch.remainder, row, 2), 0), front, back)

    def along(count: int, first: int, *shape: int) -> fx.Node:
        return call(torch.Tensor.view, call(torch.arange, first, first + count, device=device), shape)

    def inside() -> fx.Node:
        begins = call(torch.ge, keys, 0)
        ends = call(torch.lt, keys, halo.chunk * _chunks(layout) * layout.size)
        sides = [x for x, is_needed in ((begins, halo.left), (ends, halo.right)) if is_needed]
        return sides[0] if len(sides) == 1 else call(torch.logical_and, *sides)

    row = builder.once(("rows of a halo", key), lambda: along(rows, 0, -1, 1, 1, 1))
    first = builder.once(("start in a halo", key), start)
    queries = builder.once(
        ("queries of a halo", key), lambda: call(torch.add, along(halo.chunk, 0, 1, 1, -1, 1), first)
    )
    keys = builder.once(
        ("keys of a halo", key), lambda: call(torch.add, along(halo.keys, -halo.left, 1, 1, 1, -1), first)
    )
    batch = (
        row
        if _chunks(layout) == 1
        else builder.once(("batch of a halo", key), lambda: call(torch.div, row, 2, rounding_mode="floor"))
    )
    is_open = not halo.left and not halo.right
    within = None if is_open else builder.once(("inside of a sequence", key), inside)
    return PairPlaces(b=batch, q=queries, k=keys, inside=within)

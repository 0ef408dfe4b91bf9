"""Ops that move elements: views, slices, gathers."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import sympy
import torch
from torch import fx

from attn_compiler import index_expr as ix
from attn_compiler.index_expr import Const, Expr
from attn_compiler.passes.graph import axes
from attn_compiler.passes.graph.views import EXPANDS, PERMUTES, RESHAPES, SQUEEZES, Order, argument
from attn_compiler.passes.recovering.reading.core import At, Reader, ReadOp, broadcast, converted_of
from attn_compiler.passes.recovering.reading.nodes import dim_of, fake, size
from attn_compiler.torch_private import symbols as torch_symbols

aten = torch.ops.aten

_TO_THE_END = torch.iinfo(torch.int64).max


def _unsqueeze(reader: Reader, node: fx.Node, at: At) -> Expr | None:
    dim, source = dim_of(node), node.args[0]
    if dim is None or not isinstance(source, fx.Node):
        return None
    dim %= len(at)
    return reader.read(source, at[:dim] + at[dim + 1 :])


def _reshaped(reader: Reader, node: fx.Node, at: At) -> Expr | None:
    """Read view, reshape, squeeze, flatten. Axes that are split or merged need known sizes, except the outermost of each group."""
    source = node.args[0]
    if not isinstance(source, fx.Node):
        return None
    own = reindexed(at, fake(node), fake(source))
    return None if own is None else reader.read(source, own)


def reindexed(at: At, value: torch.Tensor, other: torch.Tensor) -> At | None:
    """Return the indices in `other` of the element of `value` at `at`, if one is a reshape of the other; None if unknown."""
    mine = [(i, s) for i, s in zip(at, axes.shape_exprs(value), strict=True) if s != axes.ONE]
    theirs = [s for s in axes.shape_exprs(other) if s != axes.ONE]
    found: list[Expr] = []
    for taken, sizes in _groups(mine, theirs):
        own = [taken[0][0]] if len(sizes) == len(taken) == 1 else _unflattened(_flattened(taken), sizes)
        if own is None:
            return None
        found += own
    if len(found) != len(theirs):
        return None
    rest = iter(found)
    return tuple(ix.ZERO if s == axes.ONE else next(rest) for s in axes.shape_exprs(other))


_Sized = tuple[Expr, sympy.Expr]


def _groups(mine: list[_Sized], theirs: list[sympy.Expr]) -> Iterator[tuple[list[_Sized], list[sympy.Expr]]]:
    """Yield groups of dimensions of both sides, in order, that have the same total size. Ends early if there are none."""
    mine, theirs = list(mine), list(theirs)
    while mine and theirs:
        taken, sizes = [mine.pop(0)], [theirs.pop(0)]
        while not axes.same_size(own := axes.product(s for _, s in taken), other := axes.product(sizes)):
            grows = theirs if axes.exact_quotient(own, other) is not None else mine
            if not grows:
                return
            if grows is theirs:
                sizes.append(theirs.pop(0))
            else:
                taken.append(mine.pop(0))
        yield taken, sizes


def _flattened(indices: list[_Sized]) -> Expr | None:
    """Return the row-major position of indices, one a dimension, each with its size; None if an inner size is unknown."""
    position, *rest = indices
    total = position[0]
    for index, extent in rest:
        if not extent.is_Integer:
            return None
        total = ix.add(ix.mul(total, Const(int(extent))), index)
    return total


def _unflattened(position: Expr | None, sizes: list[sympy.Expr]) -> list[Expr] | None:
    """Return an index for each of the sizes from the row-major position; None if an inner size is unknown."""
    if position is None or not all(s.is_Integer for s in sizes[1:]):
        return None
    indices: list[Expr] = []
    for extent in reversed(sizes[1:]):
        indices.insert(0, ix.apply("mod", position, Const(int(extent))))
        position = ix.apply("floordiv", position, Const(int(extent)))
    return [position, *indices]


def _expanded(reader: Reader, node: fx.Node, at: At) -> Expr | None:
    source = node.args[0]
    return reader.read(source, broadcast(fake(source), at)) if isinstance(source, fx.Node) else None


def _repeated(reader: Reader, node: fx.Node, at: At) -> Expr | None:
    """Read repeat and tile: the whole tensor again and again, along new leading axes too."""
    source, times = node.args[0], argument(node, "repeats", argument(node, "dims"))
    if not isinstance(source, fx.Node) or not isinstance(times, (list, tuple)):
        return None
    sizes = axes.shape_exprs(fake(source))
    times = [1] * (len(at) - len(times)) + list(times)
    new = len(at) - len(sizes)
    own = [_within(i, s, n) for i, s, n in zip(at[new:], sizes, times[new:], strict=True)]
    return None if any(i is None for i in own) else reader.read(source, tuple(i for i in own if i is not None))


def _within(i: Expr, size: sympy.Expr, times: object) -> Expr | None:
    """Map an index below times · size to the index below `size`; None if unknown."""
    if size == axes.ONE:
        return ix.ZERO
    if isinstance(times, int) and times == 1:
        return i
    return ix.apply("mod", i, Const(int(size))) if size.is_Integer else None


def _repeated_in_place(reader: Reader, node: fx.Node, at: At) -> Expr | None:
    """Read repeat_interleave with the same number of times for each element."""
    source, times, dim = node.args[0], argument(node, "repeats"), dim_of(node)
    if not isinstance(source, fx.Node) or dim is None:
        return None
    dim %= len(at)
    alone = axes.shape_exprs(fake(source))[dim] == axes.ONE
    if not alone and not isinstance(times, int):
        return None
    own = ix.ZERO if alone else ix.apply("floordiv", at[dim], Const(times))  # type: ignore[arg-type]
    return reader.read(source, (*at[:dim], own, *at[dim + 1 :]))


def _permuted(reader: Reader, node: fx.Node, at: At) -> Expr | None:
    source, order = node.args[0], permuted(node, len(at))
    if order is None or not isinstance(source, fx.Node):
        return None
    own: list[Expr] = [ix.ZERO] * len(at)
    for position, dim in enumerate(order):
        own[dim] = at[position]
    return reader.read(source, tuple(own))


def permuted(node: fx.Node, rank: int) -> Order | None:
    """Return the source's axis for each axis of a result; None if unknown."""
    try:
        return PERMUTES[node.target](node, rank)
    except axes.AxisError:
        return None


def _select(reader: Reader, node: fx.Node, at: At) -> Expr | None:
    dim, index, source = dim_of(node), argument(node, "index"), node.args[0]
    if dim is None or not isinstance(index, int) or index < 0 or not isinstance(source, fx.Node):
        return None
    dim %= fake(source).dim()
    return reader.read(source, (*at[:dim], Const(index), *at[dim:]))


def _slice(reader: Reader, node: fx.Node, at: At) -> Expr | None:
    dim, source = dim_of(node, 0), node.args[0]
    step = argument(node, "step", 1)
    if dim is None or not isinstance(source, fx.Node) or not isinstance(step, int):
        return None
    dim %= len(at)
    first = first_of_slice(node, source, dim)
    if first is None:
        return None
    return reader.read(source, (*at[:dim], ix.add(first, ix.mul(at[dim], Const(step))), *at[dim + 1 :]))


def first_of_slice(node: fx.Node, source: fx.Node, dim: int) -> Expr | None:
    """Return the start of a slice or a narrow; None if unknown."""
    start: Any = argument(node, "start") or 0
    if _is_from_the_front(start):
        value = start.meta["val"] if isinstance(start, fx.Node) else start
        return Const(value) if isinstance(value, int) else size(torch_symbols.decided(value))
    extent = axes.shape_exprs(fake(source))[dim]
    if isinstance(start, int) and extent.is_Integer:
        return Const(max(0, start + int(extent)))
    if node.target is aten.narrow.default:
        return None
    if argument(node, "step", 1) != 1 or argument(node, "end") not in (None, _TO_THE_END):
        return None
    # The start is the difference of both lengths, whether it was counted from the front or from the end.
    whole, kept = (size(axes.shape_exprs(fake(n))[dim]) for n in (source, node))
    return None if whole is None or kept is None else ix.add(whole, kept, -1)


def _is_from_the_front(start: Any) -> bool:
    """True if a start surely counts from the front. A start below zero counts from the end."""
    value = start.meta.get("val") if isinstance(start, fx.Node) else start
    return isinstance(value, (int, torch.SymInt)) and torch_symbols.statically_known(value >= 0)


def _indexed(reader: Reader, node: fx.Node, at: At) -> Expr | None:
    """Read x[:, i, j, ...] with index tensors for adjacent axes."""
    source, given = node.args[0], node.args[1]
    if not isinstance(source, fx.Node) or not isinstance(given, (list, tuple)):
        return None
    indices = [x for x in given if isinstance(x, fx.Node)]
    first = len(given) - len(indices)
    if any(x is not None for x in given[:first]) or any(fake(i).dtype == torch.bool for i in indices):
        return None
    last = first + max(fake(i).dim() for i in indices)
    read = tuple(reader.read(i, broadcast(fake(i), at[first:last])) for i in indices)
    whole = (*at[:first], *read, *at[last:])
    if all((lowest := ix.lower_bound(i)) is not None and lowest >= 0 for i in read):
        return reader.read(source, whole)
    # An index that may be negative counts from the end. A load allows that, the rules of the source's op do not.
    return reader.load(source, whole)


def _picked(reader: Reader, node: fx.Node, at: At) -> Expr | None:
    """Read index_select and gather, whose indices are never negative."""
    source, dim, indices = node.args[0], dim_of(node), argument(node, "index")
    if not isinstance(source, fx.Node) or not isinstance(indices, fx.Node) or dim is None or not at:
        return None
    dim %= len(at)
    picked = reader.read(indices, at if node.target is aten.gather.default else (at[dim],)[: fake(indices).dim()])
    return reader.read(source, (*at[:dim], picked, *at[dim + 1 :]))


def _stacked(reader: Reader, node: fx.Node, at: At) -> Expr | None:
    """Read stack: the index along the new axis selects a tensor."""
    parts, dim = node.args[0], dim_of(node, 0)
    if not isinstance(parts, (list, tuple)) or dim is None:
        return None
    dim %= len(at)
    found: Expr | None = None
    for i in reversed(_that_may_hold(at[dim], [axes.ONE] * (len(parts) - 1))):
        part = parts[i]
        if not isinstance(part, fx.Node):
            return None
        element = reader.read(part, (*at[:dim], *at[dim + 1 :]))
        converted = converted_of(reader, element, node, fake(part).dtype, at)
        if converted is None:
            return None
        found = converted if found is None else ix.where(ix.compare("<=", at[dim], Const(i)), converted, found)
    return found


def _flipped(reader: Reader, node: fx.Node, at: At) -> Expr | None:
    """Read flip: an index counts from the end."""
    source, dims = node.args[0], argument(node, "dims")
    if not isinstance(source, fx.Node) or not isinstance(dims, (list, tuple)):
        return None
    own = list(at)
    for dim in dims:
        extent = size(axes.shape_exprs(fake(source))[dim])
        if extent is None:
            return None
        own[dim] = ix.add(ix.add(extent, Const(-1)), at[dim], -1)
    return reader.read(source, tuple(own))


def _rolled(reader: Reader, node: fx.Node, at: At) -> Expr | None:
    """Read roll: an index is shifted, and wraps around."""
    source, shifts, dims = node.args[0], argument(node, "shifts"), argument(node, "dims", [])
    if not isinstance(source, fx.Node) or not isinstance(shifts, (list, tuple)) or not isinstance(dims, (list, tuple)):
        return None
    own = list(at)
    for shift, dim in zip(shifts, dims, strict=False):
        extent = axes.shape_exprs(fake(source))[dim]
        if not isinstance(shift, int) or not extent.is_Integer:
            return None
        own[dim] = ix.apply("mod", ix.add(own[dim], Const(-shift)), Const(int(extent)))
    return reader.read(source, tuple(own)) if len(dims) == len(shifts) else None


def _padded(reader: Reader, node: fx.Node, at: At) -> Expr | None:
    """Read pad: the tensor, and a number around it. A pad below zero crops."""
    source, pads, value = node.args[0], argument(node, "pad"), argument(node, "value", 0) or 0
    if (
        not isinstance(source, fx.Node)
        or not isinstance(pads, (list, tuple))
        or argument(node, "mode", "constant") != "constant"
    ):
        return None
    if not isinstance(value, (bool, int, float)):
        return None
    own, conditions = list(at), []
    for i, (before, after) in enumerate(zip(pads[::2], pads[1::2], strict=True)):
        dim = len(at) - 1 - i
        first, extent = _whole_number(before), size(axes.shape_exprs(fake(source))[dim])
        if first is None or extent is None:
            return None
        own[dim] = ix.add(at[dim], first, -1)
        if before != 0:
            conditions.append(ix.compare(">=", own[dim], ix.ZERO))
        if after != 0:
            conditions.append(ix.compare("<", own[dim], extent))
    inside = ix.apply("and", *conditions) if conditions else ix.TRUE
    element = converted_of(reader, reader.read(source, tuple(own)), node, fake(source).dtype, at)
    around = converted_of(reader, Const(value), node, None, at)
    return None if element is None or around is None else ix.where(inside, element, around)


def _whole_number(value: Any) -> Expr | None:
    value = value.meta["val"] if isinstance(value, fx.Node) else value
    return Const(value) if isinstance(value, int) else size(torch_symbols.decided(value))


def _joined(reader: Reader, node: fx.Node, at: At) -> Expr | None:
    """Read cat: the index selects a part."""
    parts, dim = node.args[0], dim_of(node, 0)
    if not isinstance(parts, (list, tuple)) or dim is None:
        return None
    nodes = [x for x in parts if isinstance(x, fx.Node) and fake(x).dim() == len(at)]
    dim %= len(at)
    sizes = [axes.shape_exprs(fake(x))[dim] for x in nodes]
    starts = [start for x in itertools.accumulate(sizes[:-1], initial=sympy.S.Zero) if (start := size(x)) is not None]
    if not len(starts) == len(nodes) == len(parts):
        return None
    found: Expr | None = None
    for i in reversed(_that_may_hold(at[dim], sizes[:-1])):
        # A part of size one has only index 0: the element there is the same for all indices.
        own = ix.ZERO if sizes[i] == axes.ONE else ix.add(at[dim], starts[i], -1)
        element = reader.read(nodes[i], (*at[:dim], own, *at[dim + 1 :]))
        converted = converted_of(reader, element, node, fake(nodes[i]).dtype, at)
        if converted is None:
            return None
        found = converted if found is None else ix.where(ix.compare("<", at[dim], starts[i + 1]), converted, found)
    return found


def _that_may_hold(position: Expr, sizes: Sequence[sympy.Expr]) -> range:
    """Return the consecutive parts that a position can be in. sizes: of all parts but the last."""
    if not all(x.is_Integer for x in sizes):
        return range(len(sizes) + 1)
    starts = [0, *itertools.accumulate(map(int, sizes))]
    low, high = ix.bounds(position, {})
    first = 0 if low is None else max(0, bisect.bisect_right(starts, low) - 1)
    return range(first, len(starts) if high is None else max(first + 1, bisect.bisect_right(starts, high)))


def _embedding(reader: Reader, node: fx.Node, at: At) -> Expr | None:
    weight, indices = node.args[0], node.args[1]
    if not isinstance(weight, fx.Node) or not isinstance(indices, fx.Node):
        return None
    return reader.read(weight, (reader.read(indices, at[:-1]), at[-1]))


READERS: dict[object, ReadOp] = {
    **dict.fromkeys(PERMUTES, _permuted),
    **dict.fromkeys((*RESHAPES, *SQUEEZES), _reshaped),
    **dict.fromkeys(EXPANDS, _expanded),
    aten.unsqueeze.default: _unsqueeze,
    aten.repeat.default: _repeated,
    aten.tile.default: _repeated,
    aten.repeat_interleave.self_int: _repeated_in_place,
    aten.select.int: _select,
    aten.slice.Tensor: _slice,
    aten.narrow.default: _slice,
    aten.index.Tensor: _indexed,
    aten.embedding.default: _embedding,
    aten.index_select.default: _picked,
    aten.gather.default: _picked,
    aten.stack.default: _stacked,
    aten.flip.default: _flipped,
    aten.roll.default: _rolled,
    aten.constant_pad_nd.default: _padded,
    aten.pad.default: _padded,
    aten.cat.default: _joined,
    aten.concat.default: _joined,
    aten.concatenate.default: _joined,
}

"""Ops that move elements: views, slices, gathers."""

from __future__ import annotations

import bisect
import itertools
import operator
from collections.abc import Callable, Iterator, Sequence
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


def _by_indices(own: Callable[[fx.Node, fx.Node, At], At | None]) -> ReadOp:
    """Make a rule of an op that moves elements. own: returns the indices in a tensor of the element of a node at `at`, or None."""

    def read(reader: Reader, node: fx.Node, at: At) -> Expr | None:
        source = node.args[0]
        if not isinstance(source, fx.Node):
            return None
        found = own(node, source, at)
        return None if found is None else reader.read(source, found)

    return read


def _with(at: At, dim: int, own: Expr) -> At:
    return (*at[:dim], own, *at[dim + 1 :])


def _unsqueezed(node: fx.Node, source: fx.Node, at: At) -> At | None:
    dim = dim_of(node)
    return None if dim is None else at[: dim % len(at)] + at[dim % len(at) + 1 :]


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


def _expanded(node: fx.Node, source: fx.Node, at: At) -> At | None:
    return broadcast(fake(source), at)


def _repeated(node: fx.Node, source: fx.Node, at: At) -> At | None:
    """The whole tensor comes again and again, along new leading axes too."""
    times = argument(node, "repeats", argument(node, "dims"))
    if not isinstance(times, (list, tuple)):
        return None
    sizes = axes.shape_exprs(fake(source))
    times = [1] * (len(at) - len(times)) + list(times)
    new = len(at) - len(sizes)
    own = [_within(i, s, n) for i, s, n in zip(at[new:], sizes, times[new:], strict=True)]
    return None if any(i is None for i in own) else tuple(i for i in own if i is not None)


def _within(i: Expr, size: sympy.Expr, times: object) -> Expr | None:
    """Map an index below times · size to the index below `size`; None if unknown."""
    if size == axes.ONE:
        return ix.ZERO
    if isinstance(times, int) and times == 1:
        return i
    return ix.apply("mod", i, Const(int(size))) if size.is_Integer else None


def _repeated_in_place(node: fx.Node, source: fx.Node, at: At) -> At | None:
    """Each element comes the same number of times."""
    times, dim = argument(node, "repeats"), dim_of(node)
    if dim is None:
        return None
    dim %= len(at)
    if axes.shape_exprs(fake(source))[dim] == axes.ONE:
        return _with(at, dim, ix.ZERO)
    return _with(at, dim, ix.apply("floordiv", at[dim], Const(times))) if isinstance(times, int) else None


def _permuted(node: fx.Node, source: fx.Node, at: At) -> At | None:
    order = permuted(node, len(at))
    return None if order is None else tuple(at[order.index(dim)] for dim in range(len(at)))


def permuted(node: fx.Node, rank: int) -> Order | None:
    """Return the source's axis for each axis of a result; None if unknown."""
    try:
        return PERMUTES[node.target](node, rank)
    except axes.AxisError:
        return None


def _select(node: fx.Node, source: fx.Node, at: At) -> At | None:
    dim, index = dim_of(node), argument(node, "index")
    if dim is None or not isinstance(index, int):
        return None
    dim %= fake(source).dim()
    first = size(axes.shape_exprs(fake(source))[dim]) if index < 0 else ix.ZERO
    return None if first is None else (*at[:dim], ix.add(first, Const(index)), *at[dim:])


def _slice(node: fx.Node, source: fx.Node, at: At) -> At | None:
    dim, step = dim_of(node, 0), argument(node, "step", 1)
    if dim is None or not isinstance(step, int):
        return None
    dim %= len(at)
    first = first_of_slice(node, source, dim)
    return None if first is None else _with(at, dim, ix.add(first, ix.mul(at[dim], Const(step))))


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


def _piece(reader: Reader, node: fx.Node, at: At) -> Expr | None:
    """Read getitem(split(x, sizes, dim), i)."""
    pieces, place = node.args
    if not isinstance(pieces, fx.Node) or not isinstance(place, int) or pieces.target not in _SPLITS:
        return None
    whole, dim = pieces.args[0], argument(pieces, "dim", 0)
    if not isinstance(dim, int) or not isinstance(whole, fx.Node):
        return None
    dim %= len(at)
    first = size(sympy.Add(*(axes.shape_exprs(value)[dim] for value in pieces.meta["val"][:place])))
    return None if first is None else reader.read(whole, _with(at, dim, ix.add(at[dim], first)))


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
    return reader.read(source, _with(at, dim, picked))


def _flipped(node: fx.Node, source: fx.Node, at: At) -> At | None:
    """An index counts from the end."""
    dims = argument(node, "dims")
    if not isinstance(dims, (list, tuple)):
        return None
    for dim in dims:
        extent = size(axes.shape_exprs(fake(source))[dim])
        if extent is None:
            return None
        at = _with(at, dim % len(at), ix.add(ix.add(extent, Const(-1)), at[dim], -1))
    return at


def _rolled(node: fx.Node, source: fx.Node, at: At) -> At | None:
    """An index is shifted, and wraps around."""
    shifts, dims = argument(node, "shifts"), argument(node, "dims", [])
    if not isinstance(shifts, (list, tuple)) or not isinstance(dims, (list, tuple)) or len(dims) != len(shifts):
        return None
    for shift, dim in zip(shifts, dims, strict=True):
        extent = axes.shape_exprs(fake(source))[dim]
        if not isinstance(shift, int) or not extent.is_Integer:
            return None
        at = _with(at, dim % len(at), ix.apply("mod", ix.add(at[dim], Const(-shift)), Const(int(extent))))
    return at


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
    """Read cat and stack: the index selects a part. A part of stack has no such index."""
    given, dim, is_stack = node.args[0], dim_of(node, 0), node.target is aten.stack.default
    if not isinstance(given, (list, tuple)) or dim is None:
        return None
    parts = [x for x in given if isinstance(x, fx.Node) and fake(x).dim() == len(at) - is_stack]
    dim %= len(at)
    sizes = [axes.ONE if is_stack else axes.shape_exprs(fake(x))[dim] for x in parts]
    starts = [start for x in itertools.accumulate(sizes[:-1], initial=sympy.S.Zero) if (start := size(x)) is not None]
    if not len(starts) == len(parts) == len(given):
        return None
    found: Expr | None = None
    for i in reversed(_that_may_hold(at[dim], sizes[:-1])):
        # A part of size one has only index 0: the element there is the same for all indices.
        own = ix.ZERO if sizes[i] == axes.ONE else ix.add(at[dim], starts[i], -1)
        element = reader.read(parts[i], (*at[:dim], *(() if is_stack else (own,)), *at[dim + 1 :]))
        converted = converted_of(reader, element, node, fake(parts[i]).dtype, at)
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


_SPLITS = (
    aten.split_with_sizes.default,
    aten.split.Tensor,
    aten.split.sizes,
    aten.chunk.default,
    aten.tensor_split.sections,
)

READERS: dict[object, ReadOp] = {
    **dict.fromkeys(PERMUTES, _by_indices(_permuted)),
    # Axes that are split or merged need known sizes, except the outermost of each group.
    **dict.fromkeys(
        (*RESHAPES, *SQUEEZES), _by_indices(lambda node, source, at: reindexed(at, fake(node), fake(source)))
    ),
    **dict.fromkeys(EXPANDS, _by_indices(_expanded)),
    **dict.fromkeys((aten.repeat.default, aten.tile.default), _by_indices(_repeated)),
    **dict.fromkeys((aten.slice.Tensor, aten.narrow.default), _by_indices(_slice)),
    aten.unsqueeze.default: _by_indices(_unsqueezed),
    aten.repeat_interleave.self_int: _by_indices(_repeated_in_place),
    aten.select.int: _by_indices(_select),
    aten.flip.default: _by_indices(_flipped),
    aten.roll.default: _by_indices(_rolled),
    operator.getitem: _piece,
    aten.index.Tensor: _indexed,
    aten.embedding.default: _embedding,
    **dict.fromkeys((aten.index_select.default, aten.gather.default), _picked),
    **dict.fromkeys((aten.constant_pad_nd.default, aten.pad.default), _padded),
    **dict.fromkeys((aten.cat.default, aten.concat.default, aten.concatenate.default, aten.stack.default), _joined),
}

"""Ops that move elements: views, slices, gathers."""

from __future__ import annotations

from typing import Any

import sympy
import torch
from torch import fx

from attn_compiler import index_expr as ix
from attn_compiler import torch_compat
from attn_compiler.index_expr import Const, Expr
from attn_compiler.passes import axes
from attn_compiler.passes.reading.core import At, Reader, ReadOp, broadcast, dim_of, fake
from attn_compiler.passes.views import argument

aten = torch.ops.aten


def _unsqueeze(reader: Reader, node: fx.Node, at: At) -> Expr | None:
    dim, source = dim_of(node), node.args[0]
    if dim is None or not isinstance(source, fx.Node):
        return None
    dim %= len(at)
    return reader.read(source, at[:dim] + at[dim + 1 :])


def _reshaped(reader: Reader, node: fx.Node, at: At) -> Expr | None:
    """view, reshape, squeeze, flatten: only where nothing but axes of size one come and go."""
    source = node.args[0]
    if not isinstance(source, fx.Node):
        return None
    kept = [i for i, s in zip(at, fake(node).shape, strict=True) if axes.size_expr(s) != axes.ONE]
    own = [s for s in axes.shape_exprs(fake(source)) if s != axes.ONE]
    if own != [s for s in axes.shape_exprs(fake(node)) if s != axes.ONE]:
        return None
    rest = iter(kept)
    return reader.read(source, tuple(ix.ZERO if s == axes.ONE else next(rest) for s in axes.shape_exprs(fake(source))))


def _expanded(reader: Reader, node: fx.Node, at: At) -> Expr | None:
    source = node.args[0]
    return reader.read(source, broadcast(fake(source), at)) if isinstance(source, fx.Node) else None


def _repeated(reader: Reader, node: fx.Node, at: At) -> Expr | None:
    """repeat, tile: the whole tensor again and again, along new axes in front too."""
    source, times = node.args[0], argument(node, "repeats", argument(node, "dims"))
    if not isinstance(source, fx.Node) or not isinstance(times, (list, tuple)):
        return None
    sizes = axes.shape_exprs(fake(source))
    times = [1] * (len(at) - len(times)) + list(times)
    new = len(at) - len(sizes)
    own = [_within(i, s, n) for i, s, n in zip(at[new:], sizes, times[new:], strict=True)]
    return None if any(i is None for i in own) else reader.read(source, tuple(i for i in own if i is not None))


def _within(i: Expr, size: sympy.Expr, times: object) -> Expr | None:
    """The index below `size` that an index below times · size falls on."""
    if size == axes.ONE:
        return ix.ZERO
    if isinstance(times, int) and times == 1:
        return i
    return ix.apply("mod", i, Const(int(size))) if size.is_Integer else None


def _repeated_in_place(reader: Reader, node: fx.Node, at: At) -> Expr | None:
    """repeat_interleave: each element the same number of times."""
    source, times, dim = node.args[0], argument(node, "repeats"), dim_of(node)
    if not isinstance(source, fx.Node) or dim is None:
        return None
    dim %= len(at)
    alone = axes.shape_exprs(fake(source))[dim] == axes.ONE
    if not alone and not isinstance(times, int):
        return None
    own = ix.ZERO if alone else ix.apply("floordiv", at[dim], Const(times))  # type: ignore[arg-type]
    return reader.read(source, (*at[:dim], own, *at[dim + 1 :]))


def _transposed(reader: Reader, node: fx.Node, at: At) -> Expr | None:
    source, i, j = node.args[0], argument(node, "dim0"), argument(node, "dim1")
    if not isinstance(source, fx.Node) or not isinstance(i, int) or not isinstance(j, int):
        return None
    swapped = list(at)
    swapped[i], swapped[j] = swapped[j], swapped[i]
    return reader.read(source, tuple(swapped))


def _permuted(reader: Reader, node: fx.Node, at: At) -> Expr | None:
    source, order = node.args[0], list(argument(node, "dims"))  # type: ignore[call-overload]
    if not isinstance(source, fx.Node):
        return None
    own: list[Expr] = [ix.ZERO] * len(at)
    for position, dim in enumerate(order):
        own[dim] = at[position]
    return reader.read(source, tuple(own))


def _select(reader: Reader, node: fx.Node, at: At) -> Expr | None:
    dim, index, source = dim_of(node), argument(node, "index"), node.args[0]
    if dim is None or not isinstance(index, int) or index < 0 or not isinstance(source, fx.Node):
        return None
    dim %= fake(source).dim()
    return reader.read(source, (*at[:dim], Const(index), *at[dim:]))


def _slice(reader: Reader, node: fx.Node, at: At) -> Expr | None:
    dim, source = dim_of(node, 0), node.args[0]
    start, step = argument(node, "start"), argument(node, "step", 1)
    if dim is None or not isinstance(source, fx.Node) or not isinstance(step, int):
        return None
    first = reader.operand(start or 0, torch.Size(()), ())
    if first is None or not _is_from_the_front(start or 0):
        return None
    dim %= len(at)
    return reader.read(source, (*at[:dim], ix.add(first, ix.mul(at[dim], Const(step))), *at[dim + 1 :]))


def _is_from_the_front(start: Any) -> bool:
    """A start below zero counts from the end."""
    value = start.meta.get("val") if isinstance(start, fx.Node) else start
    return isinstance(value, (int, torch.SymInt)) and torch_compat.statically_known(value >= 0)


def _indexed(reader: Reader, node: fx.Node, at: At) -> Expr | None:
    """x[i, j, ...] with index tensors for the leading axes and nothing left out between them."""
    source, given = node.args[0], node.args[1]
    if not isinstance(source, fx.Node) or not isinstance(given, (list, tuple)):
        return None
    indices = [x for x in given if isinstance(x, fx.Node)]
    if len(indices) != len(given) or any(fake(i).dtype == torch.bool for i in indices):
        return None
    rank = max(fake(i).dim() for i in indices)
    read = tuple(reader.read(i, broadcast(fake(i), at[:rank])) for i in indices)
    if all((lowest := ix.lower_bound(i)) is not None and lowest >= 0 for i in read):
        return reader.read(source, (*read, *at[rank:]))
    # An index that may be negative counts from the end: true of an element of the tensor, not of what it is made of.
    return reader.load(source, (*read, *at[rank:]))


def _embedding(reader: Reader, node: fx.Node, at: At) -> Expr | None:
    weight, indices = node.args[0], node.args[1]
    if not isinstance(weight, fx.Node) or not isinstance(indices, fx.Node):
        return None
    return reader.read(weight, (reader.read(indices, at[:-1]), at[-1]))


READERS: dict[object, ReadOp] = {
    aten.unsqueeze.default: _unsqueeze,
    aten.squeeze.default: _reshaped,
    aten.squeeze.dim: _reshaped,
    aten.view.default: _reshaped,
    aten.reshape.default: _reshaped,
    aten.expand.default: _expanded,
    aten.expand_as.default: _expanded,
    aten.repeat.default: _repeated,
    aten.tile.default: _repeated,
    aten.repeat_interleave.self_int: _repeated_in_place,
    aten.transpose.int: _transposed,
    aten.permute.default: _permuted,
    aten.select.int: _select,
    aten.slice.Tensor: _slice,
    aten.index.Tensor: _indexed,
    aten.embedding.default: _embedding,
}

"""Masks that allow keys by their indices, such as `ones.scatter(-1, topk, False)`, read for each key or for the block of a key.

The tensor holds one number at the indices and another one elsewhere. A part of the mask that is true for the first and false for the
second says exactly which keys the indices name.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable

import sympy
import torch
from torch import fx

from attn_compiler import index_expr as ix
from attn_compiler.index_expr import Apply, Const, Expr, Index, Load
from attn_compiler.index_expr.changing import throughout
from attn_compiler.passes.graph import axes, views
from attn_compiler.passes.graph.mirror import Mirror
from attn_compiler.passes.graph.mutation import Version
from attn_compiler.passes.graph.site import Match
from attn_compiler.passes.graph.views import argument
from attn_compiler.passes.recovering.reading import Reader, Unreadable, fake
from attn_compiler.spec.chosen_keys import Chosen
from attn_compiler.torch_private import symbols as torch_symbols

aten = torch.ops.aten

K = Index("k")

#: ops whose result has the elements of their input, one for one
_SAME = (*views.CASTS, *views.COPIES)


def of(mirror: Mirror, match: Match, reader: Reader, parts: Iterable[Expr]) -> Chosen | None:
    """Return the chosen keys of the first part of a conjunction that names some; else None."""
    keys = axes.dim_size(match.axes.key)
    found = (_of(mirror, reader, part, load, keys) for part in parts for load in ix.loads(part))
    return next((each for each in found if each is not None), None)


def _of(mirror: Mirror, reader: Reader, part: Expr, load: Load, keys: sympy.Expr) -> Chosen | None:
    """Return the chosen keys that a load in `part` names, or None. keys: the number of keys."""
    writer = _scatter(mirror, reader.tensors[load.tensor])
    block = _block(load.at[-1]) if load.at else None
    if writer is None or block is None or any(ix.mentions(x, K) for x in load.at[:-1]):
        return None
    base, indices = writer.args[0], argument(writer, "index")
    if not isinstance(base, fx.Node) or not isinstance(indices, fx.Node) or not _is_of_rows(writer, indices):
        return None
    when = mirror.order(writer)
    try:
        before = reader.read_at(when, base, load.at)
        element = reader.load_at(when, indices, (*load.at[:-1], ix.ZERO))
    except Unreadable:
        return None
    if (
        not isinstance(before, Const)
        or not isinstance(element, Load)
        or throughout(part, lambda x: before if x == load else x) != ix.FALSE
    ):
        return None
    written = _written(writer, load)
    if written is None or throughout(part, lambda x: written if x == load else x) != ix.TRUE:
        return None
    count = torch_symbols.dim_of(fake(indices).shape[-1])
    return Chosen(
        tensor=element.tensor,
        at=load.at[:-1],
        count=count,
        most=None if isinstance(count, int) else torch_symbols.range_of(fake(indices).shape[-1])[1],
        distinct=_are_distinct(indices),
        condition=part,
        block=block,
        is_within=block == 1 and axes.shape_exprs(fake(writer))[-1] == keys,
    )


def _block(at: Expr) -> int | None:
    """Return the number of consecutive keys that share an element; None if unknown."""
    if at == K:
        return 1
    match at:
        case Apply(op="floordiv", args=(Index(name="k"), Const(value=int(size)))) if size > 0:
            return size
    return None


def _scatter(mirror: Mirror, version: Version) -> fx.Node | None:
    """Return the scatter of one number that wrote last, if it wrote to the tensor itself and not to a view."""
    writer = version.node if version.since is None else version.since
    if writer.graph is not mirror.graph:
        return None
    if version.since is None:
        return writer if writer.target is aten.scatter.value else None
    return writer if writer.target is aten.scatter_.value and writer.args[0] is version.node else None


def _written(writer: fx.Node, load: Load) -> Const | None:
    """Return the number at the indices, converted to the tensor's dtype."""
    value = argument(writer, "value")
    if not isinstance(value, (bool, int, float)):
        return None
    held = torch.tensor(value).to(fake(writer).dtype).item()
    return Const({"bool": bool, "int": int, "float": float}[load.kind](held))


def _is_of_rows(writer: fx.Node, indices: fx.Node) -> bool:
    """True if each row along the last axis has its own row of indices."""
    value, own = fake(writer), fake(indices)
    dim = argument(writer, "dim")
    if not isinstance(dim, int) or own.dim() != value.dim() or dim % value.dim() != value.dim() - 1:
        return False
    return axes.shape_exprs(own)[:-1] == axes.shape_exprs(value)[:-1]


def _are_distinct(indices: fx.Node) -> bool:
    """True if the indices are the unchanged result of a topk along the last axis."""
    while indices.target in _SAME and isinstance(indices.args[0], fx.Node):
        indices = indices.args[0]
    if indices.target is not operator.getitem or indices.args[1] != 1 or not isinstance(indices.args[0], fx.Node):
        return False
    top, dim = indices.args[0], argument(indices.args[0], "dim", -1)
    return (
        top.target is aten.topk.default
        and isinstance(dim, int)
        and dim % fake(indices).dim() == fake(indices).dim() - 1
    )

"""Ops that make elements: aranges, constants, conversions, copies."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from attn_compiler import index_expr as ix
from attn_compiler.index_expr import Const, Expr
from attn_compiler.passes.graph import axes
from attn_compiler.passes.graph.views import argument
from attn_compiler.passes.recovering.reading.converting import fits
from attn_compiler.passes.recovering.reading.core import At, Reader, ReadOp, Unreadable, converted_of
from attn_compiler.passes.recovering.reading.nodes import fake, size

aten = torch.ops.aten


def _arange(reader: Reader, node: fx.Node, at: At) -> Expr | None:
    start = argument(node, "start", 0) if node.target is not aten.arange.default else 0
    step = argument(node, "step", 1) if node.target is aten.arange.start_step else 1
    first = reader.operand(start, torch.Size(()), ())
    if first is None or not isinstance(step, int) or ix.kind_of(first) == "float" or fake(node).is_floating_point():
        return None
    found = ix.add(first, ix.mul(at[0], Const(step)))
    length = size(axes.shape_exprs(fake(node))[0])
    # However its index is spelled, an element lies between the first and the last one.
    last = None if length is None else ix.add(first, ix.mul(ix.add(length, Const(-1)), Const(step)))
    ends = (found,) if last is None else (first, last)
    return found if all(fits(end, fake(node).dtype, reader.within(end, node, at)) for end in ends) else None


def _fill(reader: Reader, node: fx.Node, at: At) -> Expr | None:
    name = node.target.overloadpacket.__name__  # type: ignore[union-attr]
    value: Any = 0 if "zeros" in name else 1 if "ones" in name else argument(node, "fill_value", argument(node, "s"))
    if not isinstance(value, (bool, int, float)):
        return None
    return converted_of(reader, Const(value), node, None, at)


def _cast(reader: Reader, node: fx.Node, at: At) -> Expr | None:
    source, element = node.args[0], _same(reader, node, at)
    return None if element is None else converted_of(reader, element, node, fake(source).dtype, at)  # type: ignore[arg-type]


def _same(reader: Reader, node: fx.Node, at: At) -> Expr | None:
    source = node.args[0]
    return reader.read(source, at) if isinstance(source, fx.Node) else None


def _copied(reader: Reader, node: fx.Node, at: At) -> Expr | None:
    """Read a copy. Later writes to its source do not change it (a cache's length), so an unreadable source makes it a load."""
    try:
        return _same(reader, node, at)
    except Unreadable:
        return None


def _one_hot(reader: Reader, node: fx.Node, at: At) -> Expr | None:
    """Read 1 where a number equals the index along the last axis, else 0."""
    numbers = _same(reader, node, at[:-1])
    return None if numbers is None else ix.as_int(ix.compare("==", numbers, at[-1]))


_SAME = (aten.contiguous, aten.alias, aten.detach, aten.detach_, aten.lift_fresh, aten.lift_fresh_copy)

READERS: dict[object, ReadOp] = {
    aten.one_hot.default: _one_hot,
    **dict.fromkeys((aten.arange.default, aten.arange.start, aten.arange.start_step), _arange),
    **{getattr(aten, f"{fill}{like}").default: _fill for fill in ("full", "zeros", "ones") for like in ("", "_like")},
    **{getattr(aten, f"new_{fill}").default: _fill for fill in ("full", "zeros", "ones")},
    aten.scalar_tensor.default: _fill,
    **dict.fromkeys((aten.to.dtype, aten.to.dtype_layout, aten.to.other, aten.to.device), _cast),
    **dict.fromkeys((aten.type_as.default, aten._to_copy.default), _cast),
    aten.clone.default: _copied,
    **{packet.default: _same for packet in _SAME},
}

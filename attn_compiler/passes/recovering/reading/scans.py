"""Ops that run along an axis: differences, and sums of constants."""

from __future__ import annotations

import torch
from torch import fx

from attn_compiler import index_expr as ix
from attn_compiler.index_expr import Const, Expr
from attn_compiler.passes.graph import axes
from attn_compiler.passes.graph.views import argument
from attn_compiler.passes.recovering.reading.core import At, Reader, ReadOp, computed_of, converted_of
from attn_compiler.passes.recovering.reading.nodes import dim_of, fake

aten = torch.ops.aten


def _difference(reader: Reader, node: fx.Node, at: At) -> Expr | None:
    """Read torch.diff with n = 1: x[i] - x[i - 1], where x starts with the prepended element, if any."""
    source, before = node.args[0], argument(node, "prepend")
    if argument(node, "n", 1) != 1 or argument(node, "append") is not None or not isinstance(source, fx.Node):
        return None
    if fake(source).dtype == torch.bool:
        return None
    dim = (dim_of(node, -1) or 0) % len(at)
    here = at[dim]

    def element(position: Expr) -> Expr:
        return reader.read(source, (*at[:dim], position, *at[dim + 1 :]))

    if before is None:
        return computed_of(reader, ix.add(element(ix.add(here, ix.ONE)), element(here), -1), node, at)
    if not isinstance(before, fx.Node) or axes.shape_exprs(fake(before))[dim] != axes.ONE:
        return None
    first = reader.read(before, (*at[:dim], ix.ZERO, *at[dim + 1 :]))
    previous = ix.where(ix.compare("==", here, ix.ZERO), first, element(ix.add(here, Const(-1))))
    return computed_of(reader, ix.add(element(here), previous, -1), node, at)


def _running_sum(reader: Reader, node: fx.Node, at: At) -> Expr | None:
    """Read a cumsum of a constant along its axis; any other cumsum is a load."""
    dim, source = dim_of(node), node.args[0]
    if dim is None or not isinstance(source, fx.Node):
        return None
    dim %= len(at)
    variable = reader.scan_variable()
    body = reader.read(source, (*at[:dim], variable, *at[dim + 1 :]))
    if not isinstance(body, Const) or int(body.value) != body.value:
        return None
    total = ix.mul(ix.add(at[dim], ix.ONE), Const(int(body.value)))
    if not fake(node).is_floating_point():
        return computed_of(reader, total, node, at)
    # Floats that are integers are summed exactly, up to where their dtype no longer has every integer.
    return converted_of(reader, total, node, torch.int64, at)


READERS: dict[object, ReadOp] = {aten.diff.default: _difference, aten.cumsum.default: _running_sum}

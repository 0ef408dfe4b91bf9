"""Numbers that are written at indices of run time: where, only the tensor itself tells."""

from __future__ import annotations

import math

import torch
from torch import fx

from attn_compiler import index_expr as ix
from attn_compiler.index_expr import Const, Expr
from attn_compiler.passes.graph.views import argument
from attn_compiler.passes.recovering.reading.core import At, Reader, ReadOp
from attn_compiler.passes.recovering.reading.nodes import fake

aten = torch.ops.aten


def _scatter(reader: Reader, node: fx.Node, at: At) -> Expr | None:
    """One of two numbers, where one was written into a tensor of another. Of truth values an element says it by itself."""
    base, value, dtype = node.args[0], argument(node, "value"), fake(node).dtype
    if not isinstance(base, fx.Node) or not isinstance(value, (bool, int, float)) or not dtype.is_floating_point:
        return None
    before, number = reader.read(base, at), float(value)
    if (
        not isinstance(before, Const)
        or before.value == number
        or not all(_has(dtype, x) for x in (before.value, number))
    ):
        return None
    element = reader.load_at(reader.mirror.order(node) + 1, node, at)
    return ix.where(ix.apply("eq", element, Const(number)), Const(number), before)


def _has(dtype: torch.dtype, x: float) -> bool:
    """Whether it is a number of the dtype, and so equal to what a tensor holds of it."""
    return not math.isnan(x) and float(torch.tensor(x, dtype=torch.float64).to(dtype)) == x


READERS: dict[object, ReadOp] = {aten.scatter.value: _scatter, aten.scatter_.value: _scatter}

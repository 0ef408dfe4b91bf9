"""Ops that write in place: the written values are read by the rule of the same op without the underscore.

The reader finds the elements of tensors that a write reaches.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from attn_compiler import index_expr as ix
from attn_compiler.index_expr import Const, Expr
from attn_compiler.passes.graph.views import argument
from attn_compiler.passes.recovering.reading import pointwise
from attn_compiler.passes.recovering.reading.core import At, Reader, ReadOp, broadcast, converted_of
from attn_compiler.passes.recovering.reading.nodes import fake

aten = torch.ops.aten


def _written(rule: ReadOp) -> ReadOp:
    """Make a rule that converts the result of an op to the dtype of the tensor that is written to."""

    def read(reader: Reader, node: fx.Node, at: At) -> Expr | None:
        found = rule(reader, node, at)
        source = fake(node).dtype if found is not None and ix.kind_of(found) == "float" else None
        return None if found is None else converted_of(reader, found, node, source, at)

    return read


def _fill(reader: Reader, node: fx.Node, at: At) -> Expr | None:
    value = argument(node, "value", 0)
    number = Const(value) if isinstance(value, (bool, int, float)) else None
    return None if number is None else converted_of(reader, number, node, None, at)


def _fill_diagonal(reader: Reader, node: fx.Node, at: At) -> Expr | None:
    """Read a matrix whose elements with equal indices are set to a number."""
    source, value = node.args[0], argument(node, "fill_value")
    if (
        not isinstance(source, fx.Node)
        or len(at) != 2
        or not isinstance(value, (bool, int, float))
        or argument(node, "wrap", False)
    ):
        return None
    number = converted_of(reader, Const(value), node, None, at)
    return None if number is None else ix.where(ix.compare("==", *at), number, reader.read(source, at))


def _given(reader: Reader, node: fx.Node, value: object, at: At) -> Expr | None:
    """Read the source, as large or broadcast, converted to the dtype of the tensor."""
    if not isinstance(value, fx.Node):
        return None
    found = reader.read(value, broadcast(fake(value), at))
    return converted_of(reader, found, node, fake(value).dtype, at)


def _in_place(functional: Any) -> object | None:
    """Return the op that writes the result of another one to its first operand (add_ for add, __iand__ for __and__), or None."""
    name = functional._schema.name.removeprefix("aten::")
    packet = getattr(aten, f"__i{name[2:]}" if name.startswith("__") else f"{name}_", None)
    return getattr(packet, functional._overloadname, None)


READERS: dict[object, ReadOp] = {
    op: _written(rule) for functional, rule in pointwise.READERS.items() if (op := _in_place(functional)) is not None
} | {
    aten.fill_diagonal_.default: _fill_diagonal,
    aten.fill_.Scalar: _fill,
    aten.fill_.Tensor: lambda reader, node, at: _given(reader, node, argument(node, "value"), ()),
    aten.zero_.default: _fill,
    aten.copy_.default: lambda reader, node, at: _given(reader, node, argument(node, "src"), at),
}

"""Ops that work on elements one by one: arithmetic, comparisons, boolean algebra, choices, triangles."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import fx

from attn_compiler import index_expr as ix
from attn_compiler.index_expr import Const, Expr
from attn_compiler.passes.reading.core import At, Reader, ReadOp, cast, fake, fits, in_range, kind_of_dtype
from attn_compiler.passes.views import argument

aten = torch.ops.aten


def _pointwise(combine: Callable[..., Expr | None]) -> ReadOp:
    def read(reader: Reader, node: fx.Node, at: At) -> Expr | None:
        operands = [reader.operand(x, fake(node).shape, at) for x in node.args]
        if any(x is None for x in operands) or any(v not in (1, None) for v in node.kwargs.values()):
            return None
        return combine(*operands) if _numbers_fit(node) else None

    return read


def _numbers_fit(node: fx.Node) -> bool:
    """Whether the Python numbers of a call fit into the dtype of its tensors, which they are converted to: -1 is 255 in uint8."""
    values = [x.meta.get("val") for x in node.args if isinstance(x, fx.Node)]
    dtypes = [v.dtype for v in values if isinstance(v, torch.Tensor) and kind_of_dtype(v.dtype) == "int"]
    numbers = [Const(x) for x in node.args if isinstance(x, int) and not isinstance(x, bool)]
    return all(in_range(number, dtype) for number in numbers for dtype in dtypes)


def _arithmetic(combine: Callable[..., Expr | None]) -> ReadOp:
    """A pointwise op whose result is as exact as its expression: true of whole numbers that don't overflow, and of choices."""
    exactly = _pointwise(combine)

    def read(reader: Reader, node: fx.Node, at: At) -> Expr | None:
        dtype = fake(node).dtype
        found = exactly(reader, node, at)
        if found is None or dtype == torch.bool:
            return None if found is None else ix.as_bool(found)
        if dtype.is_floating_point:
            return cast(found, dtype)
        return found if fits(found, dtype) else None

    return read


def _compare(op: str) -> ReadOp:
    return _pointwise(lambda a, b: ix.compare(op, a, b))


def _logical(op: str) -> ReadOp:
    """Also for the bitwise ops, which on truth values are the logical ones; on whole numbers they stay loads."""

    def read(reader: Reader, node: fx.Node, at: At) -> Expr | None:
        bitwise = "bitwise" in str(node.target) or str(node.target).startswith("aten.__")
        if bitwise and fake(node).dtype != torch.bool:
            return None
        operands = [reader.operand(x, fake(node).shape, at) for x in node.args]
        if any(x is None for x in operands):
            return None
        return ix.apply(op, *(ix.as_bool(x) for x in operands if x is not None))

    return read


def _subtract(a: Expr, b: Expr) -> Expr:
    return ix.add(a, b, -1)


def _where(reader: Reader, node: fx.Node, at: At) -> Expr | None:
    condition, a, b = (reader.operand(x, fake(node).shape, at) for x in node.args[:3])
    if condition is None or a is None or b is None:
        return None
    return ix.where(ix.as_bool(condition), cast(a, fake(node).dtype), cast(b, fake(node).dtype))


def _masked_fill(reader: Reader, node: fx.Node, at: At) -> Expr | None:
    source, mask, value = (reader.operand(x, fake(node).shape, at) for x in node.args[:3])
    if source is None or mask is None or value is None:
        return None
    return ix.where(ix.as_bool(mask), cast(value, fake(node).dtype), source)


def _triangle(keeps_lower: bool) -> ReadOp:
    def read(reader: Reader, node: fx.Node, at: At) -> Expr | None:
        diagonal, source = argument(node, "diagonal", 0), node.args[0]
        if not isinstance(diagonal, int) or not isinstance(source, fx.Node):
            return None
        column_minus_row = ix.add(at[-1], at[-2], -1)
        kept = ix.compare("<=" if keeps_lower else ">=", column_minus_row, Const(diagonal))
        zero = cast(Const(0), fake(node).dtype)
        return ix.where(kept, reader.read(source, at), zero)

    return read


def _floor_div(reader: Reader, node: fx.Node, at: At) -> Expr | None:
    if node.target is not aten.floor_divide.default and argument(node, "rounding_mode") != "floor":
        return None
    a, b = (reader.operand(x, fake(node).shape, at) for x in node.args[:2])
    if a is None or not isinstance(b, Const) or ix.kind_of(a) != "int" or not isinstance(b.value, int) or b.value <= 0:
        return None
    return ix.apply("floordiv", a, b)


def _remainder(a: Expr, b: Expr) -> Expr | None:
    whole = ix.kind_of(a) == "int" and isinstance(b, Const) and isinstance(b.value, int) and b.value > 0
    return ix.apply("mod", a, b) if whole else None


READERS: dict[object, ReadOp] = {
    aten.add.Tensor: _arithmetic(ix.add),
    aten.sub.Tensor: _arithmetic(_subtract),
    aten.rsub.Scalar: _arithmetic(lambda a, b: _subtract(b, a)),
    aten.mul.Tensor: _arithmetic(ix.mul),
    aten.neg.default: _arithmetic(lambda a: ix.mul(a, Const(-1))),
    aten.abs.default: _arithmetic(lambda a: ix.apply("abs", a)),
    aten.minimum.default: _pointwise(lambda a, b: ix.apply("min", a, b)),
    aten.maximum.default: _pointwise(lambda a, b: ix.apply("max", a, b)),
    aten.remainder.Scalar: _pointwise(_remainder),
    aten.floor_divide.default: _floor_div,
    aten.div.Tensor_mode: _floor_div,
    aten.div.Scalar_mode: _floor_div,
    aten.where.self: _where,
    aten.where.ScalarOther: _where,
    aten.where.ScalarSelf: _where,
    aten.where.Scalar: _where,
    aten.masked_fill.Scalar: _masked_fill,
    aten.masked_fill.Tensor: _masked_fill,
    aten.tril.default: _triangle(True),
    aten.triu.default: _triangle(False),
    aten.logical_and.default: _logical("and"),
    aten.logical_or.default: _logical("or"),
    aten.logical_not.default: _logical("not"),
    aten.logical_xor.default: _logical("xor"),
    aten.bitwise_and.Tensor: _logical("and"),
    aten.bitwise_or.Tensor: _logical("or"),
    aten.bitwise_not.default: _logical("not"),
    aten.__and__.Tensor: _logical("and"),
    aten.__or__.Tensor: _logical("or"),
    **{
        getattr(getattr(aten, name), kind): _compare(op)
        for name, op in (("le", "<="), ("lt", "<"), ("ge", ">="), ("gt", ">"), ("eq", "=="), ("ne", "!="))
        for kind in ("Tensor", "Scalar")
    },
}

"""Ops that work on elements one by one: arithmetic, comparisons, boolean algebra, choices, triangles."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import fx

from attn_compiler import index_expr as ix
from attn_compiler.index_expr import Apply, Const, Expr, Index
from attn_compiler.passes.graph import axes
from attn_compiler.passes.graph.views import argument
from attn_compiler.passes.recovering.reading import scattered
from attn_compiler.passes.recovering.reading.converting import converted, fits, whole_part
from attn_compiler.passes.recovering.reading.core import At, Reader, ReadOp, broadcast, computed_of
from attn_compiler.passes.recovering.reading.nodes import fake, size

aten = torch.ops.aten


def _pointwise(combine: Callable[..., Expr | None]) -> ReadOp:
    """Make a rule of an op that converts its operands to one dtype, as PyTorch does. -1 is 255 in uint8, and stays unread."""

    def read(reader: Reader, node: fx.Node, at: At) -> Expr | None:
        if any(v not in (1, None) for v in node.kwargs.values()):
            return None
        dtype = _common_dtype(node.args)
        if any(_overflows(x, dtype) for x in node.args):
            return None
        operands = [_operand(reader, node, x, at, dtype) for x in node.args]
        return None if any(x is None for x in operands) else combine(*operands)

    return read


def _overflows(x: Any, dtype: torch.dtype) -> bool:
    """True if a finite Python number is infinite in a dtype.

    PyTorch calculates with the number itself, and rounds the result: 0 · 1e5 is 0 in float16. Some ops refuse such a number.
    """
    is_number = isinstance(x, (int, float)) and not isinstance(x, bool)
    return is_number and dtype.is_floating_point and math.isfinite(x) and abs(x) > torch.finfo(dtype).max


def _common_dtype(args: Iterable[Any]) -> torch.dtype:
    """Return the dtype that PyTorch converts an op's operands to. A symbolic number counts as an integer."""
    values = [x.meta.get("val") if isinstance(x, fx.Node) else x for x in args]
    known = [v if isinstance(v, (bool, int, float, torch.Tensor)) else 0 for v in values]
    return torch.result_type(known[0], known[-1])


def _operand(reader: Reader, node: fx.Node, x: Any, at: At, dtype: torch.dtype) -> Expr | None:
    """An operand of a node, converted to a dtype; None if that may wrap."""
    element = reader.operand(x, fake(node).shape, at)
    value = x.meta.get("val") if isinstance(x, fx.Node) else None
    source = value.dtype if isinstance(value, torch.Tensor) else None
    return None if element is None else converted(element, source, dtype, reader.within(element, node, at))


def _arithmetic(combine: Callable[..., Expr | None]) -> ReadOp:
    """Make a rule of a pointwise op that is as exact as its expression: integers that don't overflow, and choices."""
    exactly = _pointwise(combine)

    def read(reader: Reader, node: fx.Node, at: At) -> Expr | None:
        found = exactly(reader, node, at)
        return None if found is None else computed_of(reader, found, node, at)

    return read


def _compare(op: str) -> ReadOp:
    """Make a rule of a comparison. Integers are compared by their difference with zero, which must fit, except in == and !=."""

    def read(reader: Reader, node: fx.Node, at: At) -> Expr | None:
        dtype = _common_dtype(node.args)
        if any(_overflows(x, dtype) for x in node.args):
            return None
        a, b = (_compared(reader, node, x, at, dtype) for x in node.args)
        if a is None or b is None or (op not in ("==", "!=") and not _differ_by_little(reader, node, a, b, at)):
            return None
        return ix.compare(op, a, b)

    return read


def _compared(reader: Reader, node: fx.Node, x: Any, at: At, dtype: torch.dtype) -> Expr | None:
    """Return an operand of a comparison. Rounded numbers of queries alone, or of keys alone, are loaded from their tensor."""
    element = _operand(reader, node, x, at, dtype)
    if element is None or ix.is_exact(element) or not isinstance(x, fx.Node) or reader.varies(x):
        return element
    is_of_fewer = sum(s != axes.ONE for s in axes.shape_exprs(fake(x))) < sum(
        s != axes.ONE for s in axes.shape_exprs(fake(node))
    )
    if not is_of_fewer:
        return element
    loaded = reader.load(x, broadcast(fake(x), at))
    return converted(loaded, fake(x).dtype, dtype, reader.within(loaded, node, at))


def _differ_by_little(reader: Reader, node: fx.Node, a: Expr, b: Expr, at: At) -> bool:
    """True if 64 bits hold the difference of two integers, in either direction, plus one."""
    if "float" in (ix.kind_of(a), ix.kind_of(b)):
        return True
    apart = ix.add(a, b, -1)
    within = reader.within(apart, node, at)
    return all(fits(ix.add(ix.mul(apart, Const(sign)), ix.ONE, sign), torch.int64, within) for sign in (1, -1))


def _logical(op: str) -> ReadOp:
    """Make a rule of a logical op. A bitwise op is the same on truth values; on integers it stays a load."""

    def read(reader: Reader, node: fx.Node, at: At) -> Expr | None:
        bitwise = "bitwise" in str(node.target) or str(node.target).startswith("aten.__")
        if bitwise and fake(node).dtype != torch.bool:
            return None
        operands = [reader.operand(x, fake(node).shape, at) for x in node.args]
        if any(x is None for x in operands):
            return None
        return ix.apply(op, *(ix.as_bool(x) for x in operands if x is not None))

    return read


def _rounded(combine: Callable[..., Expr | None]) -> ReadOp:
    """Make a rule of a float op whose result is rounded: good for biases, never for masks (ix.is_exact)."""
    pointwise = _pointwise(lambda *operands: combine(*map(ix.as_float, operands)))

    def read(reader: Reader, node: fx.Node, at: At) -> Expr | None:
        return pointwise(reader, node, at) if fake(node).dtype.is_floating_point else None

    return read


def _multiply(reader: Reader, node: fx.Node, at: At) -> Expr | None:
    dtype = _common_dtype(node.args)
    if any(v not in (1, None) for v in node.kwargs.values()) or any(_overflows(x, dtype) for x in node.args):
        return None
    a, b = (_operand(reader, node, x, at, dtype) for x in node.args)
    return None if a is None or b is None else computed_of(reader, _product(reader, node, at, a, b), node, at)


def _product(reader: Reader, node: fx.Node, at: At, a: Expr, b: Expr) -> Expr:
    """Multiply two elements. For truth values, in floats too, this is a conjunction, exact in any dtype. Integers held as floats are
    multiplied as integers: their product has the sign of the rounded one if no number is infinite."""
    if isinstance(a, Const) or isinstance(b, Const):
        return ix.mul(a, b)
    if ix.is_truth(a) and ix.is_truth(b):
        both = ix.as_int(ix.apply("and", ix.as_bool(a), ix.as_bool(b)))
        return ix.as_float(both) if "float" in (ix.kind_of(a), ix.kind_of(b)) else both
    x, y, dtype = _whole(a, fake(node).dtype), _whole(b, fake(node).dtype), fake(node).dtype
    if x is None or y is None or not dtype.is_floating_point:
        return ix.mul(a, b)
    total = ix.mul(x, y)
    within = reader.within(total, node, at)
    exactly = converted(total, torch.int64, dtype, within) if fits(total, torch.int64, within) else None
    return ix.mul(a, b) if exactly is None else exactly


def _whole(x: Expr, dtype: torch.dtype) -> Expr | None:
    """Return the integer that a float of a dtype is, or was before it was rounded to a finite one; else None."""
    match x:
        case Apply(op="float" | "rounded" as op, args=(a,)) if ix.kind_of(a) == "int":
            return a if op == "float" or dtype != torch.float16 else None
    return None


def _of_truths(op: str, junction: str) -> Callable[[Expr, Expr], Expr]:
    """Combine two elements by min or max, which for truth values is a junction (and, or)."""

    def combine(a: Expr, b: Expr) -> Expr:
        if ix.kind_of(a) == ix.kind_of(b) == "bool":
            return ix.as_int(ix.apply(junction, a, b))
        return ix.apply(op, a, b)

    return combine


def _times(axes_of: Callable[[fx.Node], tuple[str, str, str] | None]) -> ReadOp:
    """Make a rule of a product of tensors. It sums over no axis, over a single element, or over truth values of which one holds at one
    place of that axis alone (documents as one-hot rows). axes_of: letters of both operands and of the result."""

    def read(reader: Reader, node: fx.Node, at: At) -> Expr | None:
        found = axes_of(node)
        if found is None or len(found[2]) != len(at):
            return None
        *letters, out = found
        index = dict(zip(out, at, strict=True))
        extents = {
            letter: extent
            for source, own in zip(_sources(node), letters, strict=True)
            for letter, extent in zip(own, axes.shape_exprs(fake(source)), strict=True)
            if letter not in index and extent != axes.ONE
        }
        if len(extents) > 1 or any(len(set(own)) < len(own) for own in letters):
            return None
        over = {letter: reader.scan_variable() for letter in extents}
        operands: list[Expr] = []
        for source, own in zip(_sources(node), letters, strict=True):
            one = [extent == axes.ONE for extent in axes.shape_exprs(fake(source))]
            places = zip(own, one, strict=True)
            at_own = tuple(ix.ZERO if is_one else (index | over)[letter] for letter, is_one in places)
            operands.append(reader.read(source, at_own))
        if not over:
            return computed_of(reader, _product(reader, node, at, operands[0], operands[1]), node, at)
        (variable,), (extent,) = over.values(), extents.values()
        return _summed(operands, variable, size(extent), is_float=fake(node).dtype.is_floating_point)

    return read


def _summed(operands: list[Expr], variable: Index, extent: Expr | None, *, is_float: bool) -> Expr | None:
    """Sum products of truth values. At most one is not 0, since an equation fixes the variable; None if there is none."""
    if extent is None or not all(map(ix.is_truth, operands)):
        return None
    found = scattered.somewhere(ix.apply("and", *map(ix.as_bool, operands)), variable, extent)
    return None if found is None else ix.as_float(found) if is_float else ix.as_int(found)


def _sources(node: fx.Node) -> list[fx.Node]:
    """Return the tensors that an op contracts."""
    given = node.args[1] if isinstance(node.args[0], str) else node.args
    return [x for x in given if isinstance(x, fx.Node)]  # type: ignore[union-attr]


def _of_equation(node: fx.Node) -> tuple[str, str, str] | None:
    """Letters of an einsum of two tensors with an explicit result, or None."""
    equation = node.args[0]
    if not isinstance(equation, str) or "." in equation or "->" not in equation or len(_sources(node)) != 2:
        return None
    operands, _, out = equation.replace(" ", "").partition("->")
    a, comma, b = operands.partition(",")
    return (a, b, out) if comma and "," not in b else None


def _of_matmul(node: fx.Node) -> tuple[str, str, str] | None:
    """Letters of a product of matrices, in batches that broadcast."""
    ranks = [fake(x).dim() for x in _sources(node)]
    if len(ranks) != 2 or min(ranks) < 2 or max(ranks) > 6:
        return None
    batch = "bcde"[: max(ranks) - 2]
    a, b = (batch[len(batch) - (rank - 2) :] for rank in ranks)
    return f"{a}ik", f"{b}kj", f"{batch}ij"


def _divide(a: Expr, b: Expr) -> Expr:
    return a if b == Const(1.0) else ix.apply("div", a, b)


def _power(a: Expr, b: Expr) -> Expr:
    return a if b == Const(1.0) else ix.apply("pow", a, b)


def _clamp(reader: Reader, node: fx.Node, at: At) -> Expr | None:
    source = _operand(reader, node, node.args[0], at, fake(node).dtype)
    if source is None:
        return None
    for name, op in (("min", "max"), ("max", "min")):
        given = argument(node, name)
        bound = None if given is None else _operand(reader, node, given, at, fake(node).dtype)
        if given is not None and bound is None:
            return None
        source = source if bound is None else ix.apply(op, source, bound)
    return source


def _subtract(a: Expr, b: Expr) -> Expr:
    return ix.add(a, b, -1)


def _where(reader: Reader, node: fx.Node, at: At) -> Expr | None:
    condition = reader.operand(node.args[0], fake(node).shape, at)
    a, b = (_operand(reader, node, x, at, fake(node).dtype) for x in node.args[1:3])
    return None if condition is None or a is None or b is None else ix.where(ix.as_bool(condition), a, b)


def _masked_fill(reader: Reader, node: fx.Node, at: At) -> Expr | None:
    source, mask = (reader.operand(x, fake(node).shape, at) for x in node.args[:2])
    value = _operand(reader, node, node.args[2], at, fake(node).dtype)
    return None if source is None or mask is None or value is None else ix.where(ix.as_bool(mask), value, source)


def _triangle(keeps_lower: bool) -> ReadOp:
    def read(reader: Reader, node: fx.Node, at: At) -> Expr | None:
        diagonal, source = argument(node, "diagonal", 0), node.args[0]
        if not isinstance(diagonal, int) or not isinstance(source, fx.Node):
            return None
        column_minus_row = ix.add(at[-1], at[-2], -1)
        kept = ix.compare("<=" if keeps_lower else ">=", column_minus_row, Const(diagonal))
        zero = converted(ix.ZERO, None, fake(node).dtype, {})
        return None if zero is None else ix.where(kept, reader.read(source, at), zero)

    return read


def _floor_div(reader: Reader, node: fx.Node, at: At) -> Expr | None:
    if node.target is not aten.floor_divide.default and argument(node, "rounding_mode") != "floor":
        return None
    dtype = _common_dtype(node.args[:2])
    a, b = (_operand(reader, node, x, at, dtype) for x in node.args[:2])
    if a is None or not isinstance(b, Const) or ix.kind_of(a) != "int" or not isinstance(b.value, int) or b.value <= 0:
        return None
    return ix.apply("floordiv", a, b)


def _whole_part(floor: bool) -> ReadOp:
    """Make a rule of floor or trunc on floats that hold whole numbers, or their quotients."""

    def read(reader: Reader, node: fx.Node, at: At) -> Expr | None:
        x = reader.operand(node.args[0], fake(node).shape, at)
        found = None if x is None else whole_part(x, reader.within(x, node, at), floor=floor)
        return None if found is None else ix.as_float(found)

    return read


def _remainder(a: Expr, b: Expr) -> Expr | None:
    whole = ix.kind_of(a) == "int" and isinstance(b, Const) and isinstance(b.value, int) and b.value > 0
    return ix.apply("mod", a, b) if whole else None


def _each(name: str, kinds: str, rule: ReadOp) -> dict[object, ReadOp]:
    """Return the overloads of an op, by their names, with one rule."""
    packet = getattr(aten, name)
    return {getattr(packet, kind): rule for kind in kinds.split()}


READERS: dict[object, ReadOp] = {
    aten.add.Tensor: _arithmetic(ix.add),
    aten.sub.Tensor: _arithmetic(_subtract),
    aten.rsub.Scalar: _arithmetic(lambda a, b: _subtract(b, a)),
    aten.mul.Tensor: _multiply,
    aten.einsum.default: _times(_of_equation),
    **dict.fromkeys((aten.matmul.default, aten.bmm.default, aten.mm.default), _times(_of_matmul)),
    aten.neg.default: _arithmetic(lambda a: ix.mul(a, Const(-1))),
    aten.abs.default: _arithmetic(lambda a: ix.apply("abs", a)),
    **dict.fromkeys((aten.minimum.default, aten.min.other), _arithmetic(_of_truths("min", "and"))),
    **dict.fromkeys((aten.maximum.default, aten.max.other), _arithmetic(_of_truths("max", "or"))),
    **_each("clamp", "default Tensor", _clamp),
    **dict.fromkeys((aten.clamp_min.default, aten.clamp_max.default), _clamp),
    aten.div.Tensor: _rounded(_divide),
    aten.floor.default: _whole_part(True),
    aten.trunc.default: _whole_part(False),
    aten.reciprocal.default: _rounded(lambda x: _divide(Const(1.0), x)),
    aten.log.default: _rounded(lambda x: ix.apply("log", x)),
    aten.exp.default: _rounded(lambda x: ix.apply("exp", x)),
    aten.exp2.default: _rounded(lambda x: _power(Const(2.0), x)),
    **_each("pow", "Tensor_Tensor Tensor_Scalar Scalar", _rounded(_power)),
    aten.remainder.Scalar: _pointwise(_remainder),
    aten.floor_divide.default: _floor_div,
    **_each("div", "Tensor_mode Scalar_mode", _floor_div),
    **_each("where", "self ScalarOther ScalarSelf Scalar", _where),
    **_each("masked_fill", "Scalar Tensor", _masked_fill),
    aten.tril.default: _triangle(True),
    aten.triu.default: _triangle(False),
    aten.logical_not.default: _logical("not"),
    aten.bitwise_not.default: _logical("not"),
    **{getattr(aten, f"logical_{op}").default: _logical(op) for op in ("and", "or", "xor")},
    **{
        x: rule
        for op in ("and", "or", "xor")
        for x, rule in _each(f"bitwise_{op}", "Tensor Scalar", _logical(op)).items()
    },
    **{x: rule for op in ("and", "or") for x, rule in _each(f"__{op}__", "Tensor Scalar", _logical(op)).items()},
    **{
        x: rule
        for name, op in (("le", "<="), ("lt", "<"), ("ge", ">="), ("gt", ">"), ("eq", "=="), ("ne", "!="))
        for x, rule in _each(name, "Tensor Scalar", _compare(op)).items()
    },
}

"""One element of a mirror node as an index expression: `Reader.read(node, indices)`, on demand and remembered.

Each op has one line in READERS. What can't be looked into is a load: an element of that very tensor at those indices, which is
true of any tensor. So reading never guesses; at worst it says little.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import sympy
import torch
from torch import fx

from attn_compiler import index_expr as ix
from attn_compiler import torch_compat
from attn_compiler.index_expr import Apply, Const, Expr, Index, Load
from attn_compiler.passes import axes, mutation
from attn_compiler.passes.mirror import Mirror
from attn_compiler.passes.views import argument

aten = torch.ops.aten
At = tuple[Expr, ...]
ReadOp = Callable[["Reader", fx.Node, At], Expr | None]

_DEEPEST = 200

#: how Dynamo names what the model was called with: l_kwargs_attention_mask_
_ARGUMENT = re.compile(r"^l_(?:kwargs_|self_)?(\w+?)_*$")


class Unreadable(Exception):
    """Reading would be wrong or endless; the text says why. Internal: the mask stays dense, with this reason."""


class Reader:
    """Reads elements of one mirror's nodes. tensors: the node behind each name that a load uses.

    An expression says what a tensor holds at one time. So a tensor that anything in the graph writes to in place is not read.
    """

    def __init__(self, mirror: Mirror) -> None:
        self._mirror = mirror
        self._written = set().union(*(written for _, written in mirror.writers))
        self._known: dict[tuple[fx.Node, At], Expr] = {}
        self._depth = 0
        self._scans = 0
        self.tensors: dict[str, fx.Node] = {}

    def read(self, node: fx.Node, at: At) -> Expr:
        """The element of `node` at `at`, one expression a dimension."""
        key = (node, at)
        if key not in self._known:
            self._known[key] = self._read(node, at)
        return self._known[key]

    def _read(self, node: fx.Node, at: At) -> Expr:
        if self._written & mutation.storages(node):
            raise Unreadable(f"{node.name} is written in place")
        if self._depth == _DEEPEST:
            raise Unreadable(f"more than {_DEEPEST} ops in a row")
        held = self._mirror.constant(node)
        if held is not None and held.numel() == 1:
            return cast(Const(held.item()), held.dtype)
        rule = READERS.get(node.target)
        if rule is None:
            return self.load(node, at)
        self._depth += 1
        try:
            found = rule(self, node, at)
        finally:
            self._depth -= 1
        return found if found is not None else self.load(node, at)

    def load(self, node: fx.Node, at: At) -> Expr:
        """An element of the tensor itself."""
        dynamo = self._mirror.dynamo_node(node)
        name = dynamo.name if dynamo is not None else node.name
        short = _ARGUMENT.sub(r"\1", name)
        name = short if self.tensors.setdefault(short, node) is node else name
        # A node that only the mirror has may be named as another one of Dynamo's is.
        while self.tensors.setdefault(name, node) is not node:
            name += "'"
        return Load(name, at, _kind(fake(node).dtype))

    def scan_variable(self) -> Index:
        """A new bound variable for a cumulative op."""
        self._scans += 1
        return Index(f"j{self._scans}")

    def operand(self, x: Any, shape: torch.Size, at: At) -> Expr | None:
        """An argument of a pointwise op: a number, or a tensor that broadcasts to `shape`."""
        if isinstance(x, (bool, int, float)):
            return Const(x)
        if isinstance(x, torch.SymInt):
            return size(axes.size_expr(x))
        if not isinstance(x, fx.Node):
            return None
        if isinstance(x.meta.get("val"), torch.SymInt):
            return size(axes.size_expr(x.meta["val"]))
        return self.read(x, broadcast(fake(x), at)) if isinstance(x.meta.get("val"), torch.Tensor) else None


def fake(node: fx.Node) -> torch.Tensor:
    value: torch.Tensor = node.meta["val"]
    return value


def _kind(dtype: torch.dtype) -> str:
    return "bool" if dtype == torch.bool else "float" if dtype.is_floating_point else "int"


def broadcast(value: torch.Tensor, at: At) -> At:
    """The indices of an operand that broadcasts: the last ones, 0 along axes of size one."""
    own = at[len(at) - value.dim() :]
    return tuple(ix.ZERO if axes.size_expr(s) == axes.ONE else i for i, s in zip(own, value.shape, strict=True))


def size(expr: sympy.Expr) -> Expr | None:
    """A size as an expression; None if it is no whole-number combination of symbols."""
    total: Expr = ix.ZERO
    for symbols, coefficient in expr.as_coefficients_dict().items():
        if not coefficient.is_Integer or not (symbols == 1 or symbols.is_Symbol):
            return None
        part: Expr = ix.ONE if symbols == 1 else ix.Size(str(symbols))
        total = ix.add(total, part, int(coefficient))
    return total


def _dim(node: fx.Node, default: int | None = None) -> int | None:
    given = argument(node, "dim", default)
    return given if isinstance(given, int) else default


# ---- ops that make elements ----------------------------------------------------------------------------------------


def _arange(reader: Reader, node: fx.Node, at: At) -> Expr | None:
    start = argument(node, "start", 0) if node.target is not aten.arange.default else 0
    step = argument(node, "step", 1) if node.target is aten.arange.start_step else 1
    first = reader.operand(start, torch.Size(()), ())
    if first is None or not isinstance(step, int) or not _is_unbounded(fake(node).dtype):
        return None
    return ix.add(first, ix.mul(at[0], Const(step)))


def _fill(reader: Reader, node: fx.Node, at: At) -> Expr | None:
    name = node.target.overloadpacket.__name__  # type: ignore[union-attr]
    value: Any = 0 if "zeros" in name else 1 if "ones" in name else argument(node, "fill_value", argument(node, "s"))
    if not isinstance(value, (bool, int, float)):
        return None
    return cast(Const(value), fake(node).dtype)


def _is_unbounded(dtype: torch.dtype) -> bool:
    """Whether whole numbers of that dtype may be taken as unbounded: positions overflow uint8, and differences of them wrap."""
    return dtype in (torch.int32, torch.int64)


def _fits(x: Expr, dtype: torch.dtype) -> bool:
    """Whether a whole number or truth value surely survives a conversion to the dtype."""
    if _is_unbounded(dtype) or dtype == torch.bool or dtype.is_floating_point or ix.kind_of(x) == "bool":
        return True
    if isinstance(x, Const):
        return _in_range(x, dtype)
    return isinstance(x, Apply) and x.op == "where" and all(_fits(a, dtype) for a in x.args[1:])


def _in_range(x: Const, dtype: torch.dtype) -> bool:
    return torch.iinfo(dtype).min <= x.value <= torch.iinfo(dtype).max


def cast(x: Expr, dtype: torch.dtype) -> Expr:
    """A dtype conversion of what fits into the dtype."""
    if dtype == torch.bool:
        return ix.as_bool(x)
    if dtype.is_floating_point:
        return x if ix.kind_of(x) == "float" else ix.apply("float", x)
    return ix.as_int(x) if ix.kind_of(x) != "float" else ix.apply("int", x)


def _cast(reader: Reader, node: fx.Node, at: At) -> Expr | None:
    source = node.args[0]
    if not isinstance(source, fx.Node):
        return None
    element = reader.read(source, at)
    return cast(element, fake(node).dtype) if _fits(element, fake(node).dtype) else None


def _same(reader: Reader, node: fx.Node, at: At) -> Expr | None:
    source = node.args[0]
    return reader.read(source, at) if isinstance(source, fx.Node) else None


# ---- pointwise ops -------------------------------------------------------------------------------------------------


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
    dtypes = [v.dtype for v in values if isinstance(v, torch.Tensor) and _kind(v.dtype) == "int"]
    numbers = [Const(x) for x in node.args if isinstance(x, int) and not isinstance(x, bool)]
    return all(_in_range(number, dtype) for number in numbers for dtype in dtypes)


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
        return found if _fits(found, dtype) else None

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


# ---- ops that move elements ----------------------------------------------------------------------------------------


def _unsqueeze(reader: Reader, node: fx.Node, at: At) -> Expr | None:
    dim, source = _dim(node), node.args[0]
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
    dim, index, source = _dim(node), argument(node, "index"), node.args[0]
    if dim is None or not isinstance(index, int) or index < 0 or not isinstance(source, fx.Node):
        return None
    dim %= fake(source).dim()
    return reader.read(source, (*at[:dim], Const(index), *at[dim:]))


def _slice(reader: Reader, node: fx.Node, at: At) -> Expr | None:
    dim, source = _dim(node, 0), node.args[0]
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


def _difference(reader: Reader, node: fx.Node, at: At) -> Expr | None:
    """torch.diff, once, with something prepended or not: x[i] - x[i - 1] where x starts with what is prepended."""
    source, before = node.args[0], argument(node, "prepend")
    if argument(node, "n", 1) != 1 or argument(node, "append") is not None or not isinstance(source, fx.Node):
        return None
    if fake(source).dtype == torch.bool:
        return None
    dim = (_dim(node, -1) or 0) % len(at)
    here = at[dim]

    def element(position: Expr) -> Expr:
        return reader.read(source, (*at[:dim], position, *at[dim + 1 :]))

    if before is None:
        return ix.add(element(ix.add(here, ix.ONE)), element(here), -1)
    if not isinstance(before, fx.Node) or axes.shape_exprs(fake(before))[dim] != axes.ONE:
        return None
    first = reader.read(before, (*at[:dim], ix.ZERO, *at[dim + 1 :]))
    previous = ix.where(ix.compare("==", here, ix.ZERO), first, element(ix.add(here, Const(-1))))
    return ix.add(element(here), previous, -1)


def _running_sum(reader: Reader, node: fx.Node, at: At) -> Expr | None:
    """cumsum of something constant along its axis; anything else is a load of the sum."""
    dim, source = _dim(node), node.args[0]
    if dim is None or not isinstance(source, fx.Node):
        return None
    dim %= len(at)
    variable = reader.scan_variable()
    body = ix.as_int(reader.read(source, (*at[:dim], variable, *at[dim + 1 :])))
    if not isinstance(body, Const) or not _is_unbounded(fake(node).dtype):
        return None
    return ix.mul(ix.add(at[dim], ix.ONE), body)


#: the ATen op -> how an element of its result reads
READERS: dict[object, ReadOp] = {
    aten.arange.default: _arange,
    aten.arange.start: _arange,
    aten.arange.start_step: _arange,
    aten.full.default: _fill,
    aten.zeros.default: _fill,
    aten.ones.default: _fill,
    aten.full_like.default: _fill,
    aten.zeros_like.default: _fill,
    aten.ones_like.default: _fill,
    aten.new_full.default: _fill,
    aten.new_zeros.default: _fill,
    aten.new_ones.default: _fill,
    aten.scalar_tensor.default: _fill,
    aten.to.dtype: _cast,
    aten.to.dtype_layout: _cast,
    aten.to.other: _cast,
    aten.to.device: _cast,
    aten.type_as.default: _cast,
    aten._to_copy.default: _cast,
    aten.clone.default: _same,
    aten.contiguous.default: _same,
    aten.alias.default: _same,
    aten.detach.default: _same,
    aten.detach_.default: _same,
    aten.lift_fresh.default: _same,
    aten.lift_fresh_copy.default: _same,
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
    **{
        getattr(getattr(aten, name), kind): _compare(op)
        for name, op in (("le", "<="), ("lt", "<"), ("ge", ">="), ("gt", ">"), ("eq", "=="), ("ne", "!="))
        for kind in ("Tensor", "Scalar")
    },
    aten.logical_and.default: _logical("and"),
    aten.logical_or.default: _logical("or"),
    aten.logical_not.default: _logical("not"),
    aten.logical_xor.default: _logical("xor"),
    aten.bitwise_and.Tensor: _logical("and"),
    aten.bitwise_or.Tensor: _logical("or"),
    aten.bitwise_not.default: _logical("not"),
    aten.__and__.Tensor: _logical("and"),
    aten.__or__.Tensor: _logical("or"),
    aten.unsqueeze.default: _unsqueeze,
    aten.squeeze.default: _reshaped,
    aten.squeeze.dim: _reshaped,
    aten.view.default: _reshaped,
    aten.reshape.default: _reshaped,
    aten.expand.default: _expanded,
    aten.expand_as.default: _expanded,
    aten.transpose.int: _transposed,
    aten.permute.default: _permuted,
    aten.select.int: _select,
    aten.slice.Tensor: _slice,
    aten.index.Tensor: _indexed,
    aten.embedding.default: _embedding,
    aten.diff.default: _difference,
    aten.cumsum.default: _running_sum,
}

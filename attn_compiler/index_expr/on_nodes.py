"""Index expressions as graph nodes: index_expr/on_tensors.py's values, one torch function a node, which Inductor fuses.

Integers are int64, truth values bool, other numbers of one float dtype that the caller picks.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import reduce
from typing import Any, Protocol

import torch
from torch import fx

from attn_compiler.index_expr import Ranges, bounds
from attn_compiler.index_expr.nodes import OPS, Apply, Const, Expr, Index, Linear, Load, Size, Test, kind_of

aten = torch.ops.aten

#: a tensor's node, or a constant
Value = fx.Node | bool | int | float


class NodeMaker(Protocol):
    """A builder of graph nodes: a lowering's emitter, or a pass's builder."""

    def call(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> fx.Node:
        """Insert `function(*args, **kwargs)`; args may hold nodes, alone or in lists."""
        ...

    def value(self, node: fx.Node) -> torch.Tensor:
        """The node's fake value: shape, strides, dtype, device, requires_grad."""
        ...


def emit(emitter: NodeMaker, x: Expr, names: Names, *, real: torch.dtype = torch.float64) -> fx.Node:
    """Emit x at every element of the index tensors as one tensor: bool, int64 or `real`, of their broadcast shape.

    real: the dtype of all numbers but integers. float64 is exact for conditions; a formula that the model computes in float32 and rounds to
    an integer (T5's buckets) is only the same in float32. Loads clamp their indices into the tensor: out of bounds, nothing reads the
    result. Raises KeyError for a tensor, an index or a size without a node.
    """
    nodes = _Nodes(emitter, names, real)
    return nodes.tensor(nodes.value(x), kind_of(x))


@dataclass(frozen=True, kw_only=True)
class Names:
    """Nodes and numbers by an expression's names.

    indices: int64 tensors that broadcast against each other, on `device`. sizes: numbers, or nodes of them. tensors: read by loads, on
    `device`. within: ranges of the indices; a load's index that is within its tensor by them is not clamped. counted: for an index that
    counts from 0, the number of its values, which may be symbolic. learned: the op that loads from tensors with a gradient, with the
    arguments of aten.index.
    """

    device: torch.device
    indices: Mapping[str, fx.Node] = field(default_factory=dict)
    sizes: Mapping[str, int | fx.Node] = field(default_factory=dict)
    tensors: Mapping[str, fx.Node] = field(default_factory=dict)
    within: Ranges = field(default_factory=dict)
    counted: Mapping[str, int | torch.SymInt] = field(default_factory=dict)
    learned: Callable[..., Any] = aten.index.Tensor


def size_of(emitter: NodeMaker, node: fx.Node, axis: int | None) -> int | fx.Node:
    """Return a dimension of a tensor: the number, or a node if it is symbolic. axis: None for the node of a number, which is returned."""
    if axis is None:
        return node
    size = emitter.value(node).shape[axis]
    return size if isinstance(size, int) else emitter.call(aten.sym_size.int, node, axis)


@dataclass
class _Nodes:
    """known: emitted values by expression, so that equal parts are one node."""

    emitter: NodeMaker
    names: Names
    real: torch.dtype
    known: dict[Expr, Value] = field(default_factory=dict)

    def value(self, x: Expr) -> Value:
        if x not in self.known:
            self.known[x] = self._value(x)
        return self.known[x]

    def tensor(self, value: Value, kind: str) -> fx.Node:
        """Return a number as a tensor of its kind ("bool", "int", "float"), made on the device without a copy."""
        if isinstance(value, fx.Node):
            return value
        dtype = {"bool": torch.bool, "int": torch.int64, "float": self.real}[kind]
        return self._filled(value, dtype)

    def _value(self, x: Expr) -> Value:
        match x:
            case Const(value=value):
                return value
            case Index(name=name):
                return self.names.indices[name]
            case Size(name=name):
                size = self.names.sizes[name]
                return self._filled(size, torch.int64) if isinstance(size, fx.Node) else size
            case Load(tensor=tensor, at=at):
                return self._loaded(self.names.tensors[tensor], at)
            case Linear(terms=terms, const=const):
                start: Value = const
                return reduce(self._add, (self._times(term, factor) for term, factor in terms), start)
            case Test(relation=relation, form=form):
                return self._compared(relation, self.value(form))
            case Apply(op=op, args=args):
                values = [self.value(a) for a in args]
                if not any(isinstance(value, fx.Node) for value in values):
                    number: Value = OPS[op][0](*values)
                    return number
                kinds = [kind_of(a) for a in args]
                return self._applied(op, [self.tensor(v, kind) for v, kind in zip(values, kinds, strict=True)])

    def _applied(self, op: str, args: list[fx.Node]) -> fx.Node:
        if op == "where":
            return self._call(torch.where, self._truth(args[0]), *self._alike(args[1], args[2]))
        if op in ("and", "or"):
            join = torch.logical_and if op == "and" else torch.logical_or
            return reduce(lambda a, b: self._call(join, a, b), map(self._truth, args))
        if op in ("not", "xor"):
            return self._call(torch.logical_not if op == "not" else torch.logical_xor, *map(self._truth, args))
        if op in ("floordiv", "mod"):
            return self._divided(op, *self._alike(*map(self._number, args)))
        if op in _ON_REALS:
            return self._call(_ON_REALS[op], *(self._as(arg, self.real) for arg in args))
        if op in ("float", "rounded"):
            return self._as(args[0], self.real)
        if op == "int":
            return self._as(args[0], torch.int64)
        if op in _ON_NUMBERS:
            return self._call(_ON_NUMBERS[op], *self._alike(*map(self._number, args)))
        raise NotImplementedError(f"the op {op!r} of index expressions has no nodes yet")

    # ---- whole numbers --------------------------------------------------------------------------------------------

    def _times(self, term: Expr, factor: int) -> Value:
        value = self.value(term)
        if not isinstance(value, fx.Node):
            return int(value) * factor
        value = self._as(value, torch.int64)
        return value if factor == 1 else self._call(torch.mul, value, factor)

    def _add(self, a: Value, b: Value) -> Value:
        if not isinstance(a, fx.Node) and not isinstance(b, fx.Node):
            return a + b
        if not isinstance(a, fx.Node):
            a, b = b, a
        return a if not isinstance(b, fx.Node) and b == 0 else self._call(torch.add, a, b)

    def _compared(self, relation: str, form: Value) -> Value:
        compare = _RELATIONS[relation]
        return self._call(compare[0], form, 0) if isinstance(form, fx.Node) else bool(compare[1](form, 0))

    def _divided(self, op: str, a: fx.Node, b: fx.Node) -> fx.Node:
        """Divide, with 1 for a zero divisor: nothing reads that result, but integer division by zero fails."""
        divisor = self._call(torch.where, self._call(torch.eq, b, 0), 1, b)
        if op == "mod":
            return self._call(torch.remainder, a, divisor)
        return self._call(torch.div, a, divisor, rounding_mode="floor")

    # ---- loads ----------------------------------------------------------------------------------------------------

    def _same_rank(self, indices: list[fx.Node]) -> list[fx.Node]:
        """Give all indices the same rank: PyTorch infers no result shape for a 0-dimensional index beside others."""
        most = max(self.emitter.value(index).dim() for index in indices)
        return [
            reduce(lambda x, _: self._call(torch.unsqueeze, x, 0), range(most - self.emitter.value(x).dim()), x)
            for x in indices
        ]

    def _loaded(self, tensor: fx.Node, at: tuple[Expr, ...]) -> fx.Node:
        value = self.emitter.value(tensor)
        if value.dim() != len(at):
            raise IndexError(f"{tensor.name} has {value.dim()} dimensions, and is read at {len(at)} indices")
        if at:
            inside = [self._inside(tensor, dim, index) for dim, index in enumerate(at)]
            load = self.names.learned if value.requires_grad else aten.index.Tensor
            tensor = self._call(load, tensor, self._same_rank(inside))
        if value.dtype == torch.bool:
            return tensor
        return self._as(tensor, self.real if value.dtype.is_floating_point else torch.int64)

    def _inside(self, tensor: fx.Node, dim: int, index: Expr) -> fx.Node:
        position = self._as(self.tensor(self.value(index), "int"), torch.int64)
        # Compare symbolic numbers by their text: comparing values would add a guard.
        own = str(self.emitter.value(tensor).shape[dim])
        if isinstance(index, Index) and str(self.names.counted.get(index.name)) == own:
            return position
        size = size_of(self.emitter, tensor, dim)
        if isinstance(size, int):
            low, high = bounds(index, self.names.within)
            if low is not None and high is not None and -size <= low and high < size:
                return position
            return self._call(torch.clamp, position, -size, size - 1)
        lowest, last = self._call(operator.neg, size), self._call(operator.sub, size, 1)
        return self._call(torch.clamp, position, lowest, last)

    # ---- conversions ----------------------------------------------------------------------------------------------

    def _call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> fx.Node:
        return self.emitter.call(function, *args, **kwargs)

    def _filled(self, value: Value, dtype: torch.dtype) -> fx.Node:
        return self._call(torch.full, (), value, dtype=dtype, device=self.names.device)

    def _dtype(self, node: fx.Node) -> torch.dtype:
        return self.emitter.value(node).dtype

    def _as(self, node: fx.Node, dtype: torch.dtype) -> fx.Node:
        return node if self._dtype(node) == dtype else self._call(torch.Tensor.to, node, dtype)

    def _truth(self, node: fx.Node) -> fx.Node:
        return node if self._dtype(node) == torch.bool else self._call(torch.ne, node, 0)

    def _number(self, node: fx.Node) -> fx.Node:
        """Convert truth values to 0 and 1, since a sum of bools is a bool."""
        return self._as(node, torch.int64) if self._dtype(node) == torch.bool else node

    def _alike(self, *nodes: fx.Node) -> list[fx.Node]:
        dtype = reduce(torch.promote_types, map(self._dtype, nodes))
        return [self._as(node, dtype) for node in nodes]


#: relation of a form with zero -> (on tensors, on numbers)
_RELATIONS: dict[str, tuple[Callable[..., Any], Callable[[Any, Any], Any]]] = {
    ">=": (torch.ge, operator.ge),
    "==": (torch.eq, operator.eq),
    "!=": (torch.ne, operator.ne),
}

_ON_REALS: dict[str, Callable[..., Any]] = {"div": torch.div, "log": torch.log, "exp": torch.exp, "pow": torch.pow}

_ON_NUMBERS: dict[str, Callable[..., Any]] = {
    "mul": torch.mul,
    "add": torch.add,
    "abs": torch.abs,
    "min": torch.minimum,
    "max": torch.maximum,
    "eq": torch.eq,
    "lt": torch.lt,
}

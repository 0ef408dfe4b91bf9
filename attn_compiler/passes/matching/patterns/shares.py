"""Factors of each query's weights or output, read as a quotient of exponentials.

X is the sum of a query's exponentiated scores, the exp of their logsumexp. Y is the exp of a tensor independent of the scores. The share of
sinks (sinks.py) is X / (X + Y), however it is computed. All other exponentials must cancel, such as that of a row's maximum.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import sympy
import torch
from torch import fx

from attn_compiler.passes.graph import axes, constants, mutation, views
from attn_compiler.passes.graph.axes import AxisError, Dims
from attn_compiler.passes.graph.calls import reached
from attn_compiler.passes.graph.mirror import Mirror
from attn_compiler.passes.graph.views import argument
from attn_compiler.passes.matching.patterns.paths import is_passed
from attn_compiler.passes.matching.patterns.score_chain import Joined

aten = torch.ops.aten
Number: TypeAlias = sympy.Expr
Reader: TypeAlias = Callable[[fx.Node, "QueryNumbers"], "QueryNumbers | None"]

#: the sum of a query's exponentiated scores
X = sympy.Symbol("X", positive=True)
ONE = sympy.Integer(1)
_JOINS = frozenset({aten.cat.default, aten.concat.default, aten.concatenate.default, aten.stack.default})
_PARTS = frozenset("split split_with_sizes chunk unbind".split())
_NEAR = 1e-9
#: highest clamp of a sum: a sum of 1, with rounding in half precision, is never below it
MOST_CLAMPED = 0.5
#: highest addend that leaves no trace in a float32 sum of at least 1; float32 also computes the sums of half precision
_MOST_ADDED = 2.0**-24


def unseen(node: fx.Node) -> float:
    """Return the largest addend that leaves a number of at least 1 unchanged."""
    return min(_MOST_ADDED, torch.finfo(views.value(node).dtype).eps / 2)


@dataclass(frozen=True, kw_only=True)
class QueryNumbers:
    """A tensor with numbers for each query. of: the numbers. If `power` is given, the tensor holds log(of) · power instead.

    Several of them are joined along `axis`. dims: meanings of the dimensions; the joined axis has none.
    """

    of: tuple[Number, ...]
    dims: Dims
    power: float | None = None
    axis: int | None = None


def own(dims: Dims) -> list[list[axes.Atom]]:
    """Return the atoms of each dimension that carry an index."""
    return [[a for a in axes.resolve(dim) if a.size != axes.ONE] for dim in dims]


def below(known: Mapping[fx.Node, QueryNumbers]) -> set[fx.Node]:
    """Return all nodes computed from known values, with the known nodes."""
    return set(reached(known, lambda node: [user for user in node.users if views.reads_elements(user, node)]))


class Reading:
    """Reader of numbers of queries, upward in the graph. nodes: the nodes that compute them, from the known values on.

    above: a number that is at least 1.
    """

    def __init__(self, mirror: Mirror, known: Mapping[fx.Node, QueryNumbers], above: Number | None = None) -> None:
        self._mirror = mirror
        self._above = above
        self._known = known
        self._below = below(known)
        self._read: dict[fx.Node, QueryNumbers | None] = {}
        self._leaves: dict[Number, Joined | float] = {}

    @property
    def nodes(self) -> set[fx.Node]:
        """Nodes that were read."""
        return {node for node, value in self._read.items() if value is not None}

    def sinks_of(self, share: Number) -> Joined | float | None:
        """Return the sinks of a share X / (X + Y), where Y is their exponential: -inf if Y is 0, None if the share has another form."""
        y = sympy.cancel(X / share - X)
        if y.is_Rational:
            return math.log(y) if y > 0 else -math.inf if y == 0 else None
        return self._leaves.get(y)

    def values(self) -> Iterator[tuple[fx.Node, QueryNumbers]]:
        """Yield all nodes that hold numbers of queries, from the known ones on."""

        def readers(node: fx.Node) -> list[fx.Node]:
            return [user for user in self._mirror.readers(node) if self.value(user) is not None]

        for node in reached(self._known, readers):
            value = self.value(node)
            if value is not None:
                yield node, value

    def value(self, node: fx.Node) -> QueryNumbers | None:
        """Return the value of a node, or None if unknown."""
        if node not in self._read:
            self._read[node] = self._known.get(node) or self._made(node)
        return self._read[node]

    def _made(self, node: fx.Node) -> QueryNumbers | None:
        if node not in self._below or node.op != "call_function":
            return None
        if node.target is operator.getitem:
            return self._item(node)
        if not isinstance(node.target, torch._ops.OpOverload):
            return None
        if node.target in _JOINS:
            return self._joined(node)
        source = node.args[0] if node.args else None
        value = self.value(source) if isinstance(source, fx.Node) else None
        if value is not None and is_passed(node):
            return self._passed(node, value)
        name = node.target.overloadpacket.__name__
        name = name.removesuffix("_") if mutation.writes(node) else name.removeprefix("special_")
        if value is not None and value.power is None and value.of == (self._above,) and self._is_idle(node, name):
            return value
        if (name in _BINARY or node.target in _STABLE) and len(node.args) > 1:
            return self._of_two(node, name)
        if value is None:
            return None
        if value.axis is not None and name in _OVER_PARTS:
            return self._over_parts(node, name, value)
        reader = _POINTWISE.get(name)
        return None if reader is None else reader(node, value)

    def _is_idle(self, node: fx.Node, name: str) -> bool:
        """Return whether a node leaves a number of at least 1 as it is: it adds one that rounding loses, or clamps from below."""
        second = argument(node, "min" if "clamp" in name else "other", None)
        number = constants.number(self._mirror, second)
        if number is None or (name == "clamp" and argument(node, "max", None) is not None):
            return False
        is_added = name == "add" and argument(node, "alpha") == 1 and 0 <= number <= unseen(node)
        return is_added or (name in ("clamp", "clamp_min") and number <= MOST_CLAMPED)

    def _passed(self, node: fx.Node, value: QueryNumbers) -> QueryNumbers | None:
        if not views.is_view(node):
            return value
        if value.axis is not None:
            return value if views.value(node).shape == views.value(views.source(node)).shape else None
        return replace(value, dims=views.forward(node, value.dims))

    # ---- several joined ---------------------------------------------------------------------------------------------

    def _joined(self, node: fx.Node) -> QueryNumbers | None:
        parts: Any = node.args[0]
        own = [self.value(x) for x in parts]
        first = next((x for x in own if x is not None), None)
        if first is None or any(x is not None and x.axis is not None for x in own):
            return None
        is_stack = node.target is aten.stack.default
        axis = int(argument(node, "dim")) % views.value(node).dim()  # type: ignore[call-overload]
        if not is_stack and any(views.value(x).shape[axis] != 1 for x in parts):
            return None
        of = []
        for x, value in zip(parts, own, strict=True):
            found = value or self._leaf(x, first, node)
            if found is None or found.power != first.power or not _are_alike(found.dims, first.dims):
                return None
            of.append(found.of[0])
        dims = (*first.dims[:axis], (), *first.dims[axis if is_stack else axis + 1 :])
        return QueryNumbers(of=tuple(of), dims=dims, power=first.power, axis=axis)

    def _over_parts(self, node: fx.Node, name: str, value: QueryNumbers) -> QueryNumbers | None:
        axis = value.axis
        dim = argument(node, "index" if name == "_" else "dim")
        dim = dim[0] if isinstance(dim, (list, tuple)) and len(dim) == 1 else dim
        if not isinstance(dim, int) or axis is None or dim % len(value.dims) != axis:
            return None
        if name in ("softmax", "_softmax", "_safe_softmax", "log_softmax", "_log_softmax"):
            if value.power != 1.0:
                return None
            total = sum(value.of)
            return replace(value, of=tuple(x / total for x in value.of), power=1.0 if "log" in name else None)
        if name in ("logsumexp", "sum"):
            if value.power != (1.0 if name == "logsumexp" else None):
                return None
            dims = value.dims if argument(node, "keepdim") else (*value.dims[:axis], *value.dims[axis + 1 :])
            return replace(value, of=(sum(value.of),), dims=dims, axis=None)
        if name in _PARTS:
            return value
        index = argument(node, "index") if name == "select" else argument(node, "start")
        index = 0 if index is None else index
        if not isinstance(index, int) or (name != "select" and views.value(node).shape[axis] != 1):
            return None
        return _part(value, index, is_kept=name != "select")

    def _item(self, node: fx.Node) -> QueryNumbers | None:
        source, index = node.args
        value = self.value(source) if isinstance(source, fx.Node) else None
        if value is None or value.axis is None or not isinstance(index, int) or not isinstance(source, fx.Node):
            return None
        if len(source.meta["val"]) != len(value.of):
            return None
        return _part(value, index, is_kept=source.target is not aten.unbind.int)

    # ---- two of them --------------------------------------------------------------------------------------------------

    def _of_two(self, node: fx.Node, name: str) -> QueryNumbers | None:
        if argument(node, "rounding_mode") is not None:
            return None
        if name in ("add", "sub", "rsub") and constants.number(self._mirror, argument(node, "alpha", 1)) != 1.0:
            return None
        a, b = (self._side(x) for x in node.args[:2])
        whole = a if isinstance(a, QueryNumbers) else b if isinstance(b, QueryNumbers) else None
        if whole is None or whole.axis is not None:
            return None
        if axes.shape_exprs(views.value(node)) != axes.shape_exprs(views.value(_node_of(node, whole is a))):
            return None
        if node.target in _STABLE:
            return replace(whole, of=(sympy.Symbol(node.name, positive=True),))
        power = 1.0 if name == "logaddexp" else whole.power
        if isinstance(a, QueryNumbers) and isinstance(b, QueryNumbers):
            shape = views.value(node).dim()
            if len(a.dims) != shape or len(b.dims) != shape or not _are_alike(a.dims, b.dims):
                return None
        elif name in ("mul", "div") and whole.power is not None:
            return self._scaled(name, whole, b if whole is a else None)
        left, right = (x if isinstance(x, QueryNumbers) else self._leaf(x, whole, node) for x in (a, b))
        if left is None or right is None or left.power != right.power or (name == "logaddexp" and left.power != 1.0):
            return None
        combined = _BINARY[name][0 if power is not None else 1]
        if combined is None:
            return None
        return replace(whole, of=(combined(left.of[0], right.of[0]),), power=power)

    def _side(self, x: object) -> object:
        """Return the value of an operand, or the operand itself if unknown."""
        found = self.value(x) if isinstance(x, fx.Node) and x in self._below else None
        return x if found is None else found

    def _scaled(self, name: str, whole: QueryNumbers, by: object) -> QueryNumbers | None:
        number = constants.number(self._mirror, by)
        if not number or whole.power is None:
            return None
        power = whole.power / number if name != "mul" else whole.power * number
        return replace(whole, power=1.0 if abs(power - 1.0) < _NEAR else power)

    def _leaf(self, x: object, beside: QueryNumbers, used: fx.Node) -> QueryNumbers | None:
        """Return the value of a number, or of a tensor independent of the scores, next to numbers of queries."""
        number = constants.everywhere(self._mirror, x)
        if number is not None and math.isfinite(number):
            if beside.power is None:
                return replace(beside, of=(sympy.Rational(number),))
            of = sympy.Integer(1) if number == 0 else self._symbol(number / beside.power, number / beside.power)
            return replace(beside, of=(of,))
        value = x.meta.get("val") if isinstance(x, fx.Node) and x not in self._below else None
        if not isinstance(x, fx.Node) or not isinstance(value, torch.Tensor) or not value.is_floating_point():
            return None
        if beside.power is None and x.target is aten.exp.default and isinstance(x.args[0], fx.Node):
            x, used = x.args[0], x
        elif beside.power != 1.0:
            return replace(beside, of=(sympy.Symbol(x.name, positive=True),))
        return replace(beside, of=(self._symbol(x.name, Joined(node=x, dims=beside.dims, used=used)),))

    def _symbol(self, name: object, logits: Joined | float) -> Number:
        symbol = sympy.Symbol(f"exp of {name}", positive=True)
        self._leaves.setdefault(symbol, logits)
        return symbol


def _node_of(node: fx.Node, is_first: bool) -> fx.Node:
    found = node.args[0 if is_first else 1]
    if not isinstance(found, fx.Node):
        raise AxisError(f"{node.name} is made of no tensor")
    return found


def _part(value: QueryNumbers, index: int, *, is_kept: bool) -> QueryNumbers | None:
    axis = value.axis
    if axis is None or not -len(value.of) <= index < len(value.of):
        return None
    dims = value.dims if is_kept else (*value.dims[:axis], *value.dims[axis + 1 :])
    return replace(value, of=(value.of[index],), dims=dims, axis=None)


def _are_alike(one: Dims, other: Dims) -> bool:
    return own(one) == own(other)


# ---- what ops do -----------------------------------------------------------------------------------------------------

_Two = Callable[[Number, Number], Number]
#: effect on logarithms, in terms of their arguments, and effect on numbers
_BINARY: dict[str, tuple[_Two | None, _Two | None]] = {
    "add": (operator.mul, operator.add),
    "sub": (operator.truediv, operator.sub),
    "rsub": (lambda a, b: b / a, lambda a, b: b - a),
    "mul": (None, operator.mul),
    "div": (None, operator.truediv),
    "logaddexp": (operator.add, None),
}
#: numbers subtracted from logarithms before exp, which must cancel later
_STABLE = frozenset({aten.maximum.default, aten.max.other})
_OVER_PARTS = (
    frozenset("softmax _softmax _safe_softmax log_softmax _log_softmax logsumexp sum select slice narrow".split())
    | _PARTS
)


def _of_logarithms(change: Callable[[Number], Number], *, gives_number: bool) -> Reader:
    def read(node: fx.Node, value: QueryNumbers) -> QueryNumbers | None:
        if value.power is None or (not gives_number and value.power != 1.0):
            return None
        raised = [_raised(x, value.power) for x in value.of]
        of = tuple(change(x) for x in raised if x is not None)
        return replace(value, of=of, power=None if gives_number else 1.0) if len(of) == len(raised) else None

    return read


def _raised(x: Number, power: float) -> Number | None:
    nearest = round(2 * power)
    return x ** sympy.Rational(nearest, 2) if nearest and abs(2 * power - nearest) < _NEAR else None


def _to_logarithm(change: Callable[[Number], Number], power: float) -> Reader:
    def read(node: fx.Node, value: QueryNumbers) -> QueryNumbers | None:
        return None if value.power is not None else replace(value, of=tuple(map(change, value.of)), power=power)

    return read


def _negated(node: fx.Node, value: QueryNumbers) -> QueryNumbers:
    if value.power is not None:
        return replace(value, of=tuple(1 / x for x in value.of))
    return replace(value, of=tuple(-x for x in value.of))


def _power(node: fx.Node, value: QueryNumbers) -> QueryNumbers | None:
    exponent = argument(node, "exponent")
    return replace(value, of=tuple(1 / x for x in value.of)) if value.power is None and exponent == -1 else None


def _exp2(node: fx.Node, value: QueryNumbers) -> QueryNumbers | None:
    scaled = None if value.power is None else replace(value, power=value.power * math.log(2))
    return None if scaled is None else _POINTWISE["exp"](node, scaled)


def _softplus(node: fx.Node, value: QueryNumbers) -> QueryNumbers | None:
    beta, threshold = argument(node, "beta", 1), argument(node, "threshold", 20)
    is_plain = beta == 1 and isinstance(threshold, (int, float)) and threshold >= 20
    return _of_logarithms(lambda x: 1 + x, gives_number=False)(node, value) if is_plain else None


_POINTWISE: dict[str, Reader] = {
    "exp": _of_logarithms(lambda x: x, gives_number=True),
    "exp2": _exp2,
    "expm1": _of_logarithms(lambda x: x - 1, gives_number=True),
    **dict.fromkeys(("sigmoid", "expit"), _of_logarithms(lambda x: x / (1 + x), gives_number=True)),
    "tanh": _of_logarithms(lambda x: (x**2 - 1) / (x**2 + 1), gives_number=True),
    "log_sigmoid": _of_logarithms(lambda x: x / (1 + x), gives_number=False),
    "softplus": _softplus,
    "log": _to_logarithm(lambda x: x, 1.0),
    "log2": _to_logarithm(lambda x: x, 1 / math.log(2)),
    "log1p": _to_logarithm(lambda x: 1 + x, 1.0),
    **dict.fromkeys(("neg", "negative"), _negated),
    "pow": _power,
    "reciprocal": lambda _, x: None if x.power is not None else replace(x, of=tuple(1 / number for number in x.of)),
}

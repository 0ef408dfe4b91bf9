"""The reader itself, and what every rule uses: conversions, and the indices of an operand that broadcasts."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import sympy
import torch
from torch import fx

from attn_compiler import index_expr as ix
from attn_compiler.index_expr import Const, Expr, Index, Load
from attn_compiler.passes import axes, mutation
from attn_compiler.passes.mirror import Mirror
from attn_compiler.passes.reading import per_example
from attn_compiler.passes.reading.converting import converted, kind_of_dtype, ranges
from attn_compiler.passes.views import argument

At = tuple[Expr, ...]
ReadOp = Callable[["Reader", fx.Node, At], Expr | None]

_DEEPEST = 200

#: how Dynamo names what the model was called with: l_kwargs_attention_mask_
_ARGUMENT = re.compile(r"^l_(?:kwargs_|self_)?(\w+?)_*$")


class Inputs(Protocol):
    """What the inputs of a body are in the graphs that call it."""

    def element(self, reader: Reader, node: fx.Node, at: At) -> Expr | None:
        """The element of an input at `at`, its loads entered in reader.tensors; None if it is not the same at every call."""
        ...


class Unreadable(Exception):
    """Reading would be wrong or endless; the text says why. Internal: the mask stays dense, with this reason."""


class Reader:
    """Reads elements of one mirror's nodes. rules: by ATen op. inputs: what the inputs of a body are where it is called.

    tensors: the node behind each name that a load uses. It belongs to this mirror or, for what an input of a body was followed
    to, to the mirror of a graph that calls the body: `tensors[name].graph` is that mirror's graph.

    An expression says what a tensor holds where the model uses it. So a tensor that is used after it was written to again is
    not read, and what is loaded is nothing that is written to later.
    """

    def __init__(self, mirror: Mirror, rules: Mapping[object, ReadOp], inputs: Inputs | None = None) -> None:
        self.mirror = mirror
        self._rules = rules
        self._inputs = inputs
        self._varies = per_example.regions_of(mirror)
        self._known: dict[tuple[fx.Node, At], Expr] = {}
        self._depth = 0
        self._scans = 0
        self.tensors: dict[str, fx.Node] = {}

    def read(self, node: fx.Node, at: At) -> Expr:
        """The element of `node` at `at`, one expression a dimension. Raises Unreadable."""
        key = (node, at)
        if key not in self._known:
            self._known[key] = self._read(node, at)
        return self._known[key]

    def _read(self, node: fx.Node, at: At) -> Expr:
        self._require_unwritten(node)
        if self._depth == _DEEPEST:
            raise Unreadable(f"more than {_DEEPEST} ops in a row")
        held = self.mirror.constant(node)
        if held is not None and held.numel() == 1:
            return Const(held.item())
        self._depth += 1
        try:
            found = self._looked_into(node, at)
        finally:
            self._depth -= 1
        return found if found is not None else self.load(node, at)

    def _looked_into(self, node: fx.Node, at: At) -> Expr | None:
        if node.op == "placeholder" and self._inputs is not None:
            return self._inputs.element(self, node, at)
        rule = self._rules.get(node.target)
        return None if rule is None else rule(self, node, at)

    def _require_unwritten(self, node: fx.Node) -> None:
        """Whoever reads the node reads what it held when it was made."""
        again = mutation.written_after(self.mirror, mutation.storages(node), node)
        if again is not None and any(self.mirror.order(user) > self.mirror.order(again) for user in node.users):
            raise Unreadable(f"{node.name} is written in place, by {again.name}, and used after that")

    def varies(self, node: fx.Node) -> bool:
        """Whether the node is one example's of a vmap: nothing outside of that vmap has this tensor."""
        return bool(self._varies.get(node))

    def load(self, node: fx.Node, at: At) -> Expr:
        """An element of the tensor itself. Raises Unreadable where there is no such tensor, or it does not stay as it is."""
        if self.varies(node):
            raise Unreadable(f"{node.name} is computed inside of a vmap")
        again = mutation.written_after(self.mirror, mutation.storages(node), node)
        if again is not None:
            raise Unreadable(f"{node.name} is written in place, by {again.name}")
        dynamo = self.mirror.dynamo_node(node)
        name = dynamo.name if dynamo is not None else node.name
        short = _ARGUMENT.sub(r"\1", name)
        name = short if self.tensors.setdefault(short, node) is node else name
        # A node that only the mirror has may be named as another one of Dynamo's is, and one of a body as one of its caller.
        while self.tensors.setdefault(name, node) is not node:
            name += "'"
        return Load(name, at, kind_of_dtype(fake(node).dtype))

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


def dim_of(node: fx.Node, default: int | None = None) -> int | None:
    given = argument(node, "dim", default)
    return given if isinstance(given, int) else default


def converted_of(x: Expr, node: fx.Node, source: torch.dtype | None, at: At) -> Expr | None:
    """x, of dtype `source` (None for a number), as the element of `node` at `at` holds it; None if that may wrap around."""
    return converted(x, source, fake(node).dtype, ranges(x, fake(node).shape, at))

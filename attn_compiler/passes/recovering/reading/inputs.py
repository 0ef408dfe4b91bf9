"""Inputs of a body (of a checkpoint, say), read in the graphs that call it, where masks are made once for all layers."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import fx

from attn_compiler import index_expr as ix
from attn_compiler.index_expr import Expr
from attn_compiler.passes.graph import axes, bodies as higher_order
from attn_compiler.passes.graph.mutation import Version
from attn_compiler.passes.graph.unit import BodyCall, Unit, unsupported_tensor
from attn_compiler.passes.recovering.reading.core import At, Reader, Unreadable
from attn_compiler.passes.recovering.reading.nodes import fake


class BodyInputs:
    """Reads inputs of a body at its calls. calls: all of them; none if one is not understood. reader_of: returns the reader of
    a calling graph, which gets a mirror only then."""

    are_of_body = True

    def __init__(self, calls: Sequence[BodyCall], reader_of: Callable[[Unit], Reader]) -> None:
        self._calls = calls
        self._reader_of = reader_of
        self._not_followed: set[str] = set()

    def element(self, reader: Reader, node: fx.Node, at: At) -> Expr | None:
        """The element of an input at `at`; None if it can't be read at a call, or is not the same at every call."""
        found = [self._given(call, reader, node, at) for call in self._calls]
        first = next(iter(found), None)
        if first is None or any(other != first for other in found):
            return None
        element, tensors = first
        if any(reader.tensors.get(name, tensor) != tensor for name, tensor in tensors.items()):
            return None
        reader.tensors.update(tensors)
        reader.not_followed |= self._not_followed & tensors.keys()
        return element

    def _given(self, call: BodyCall, reader: Reader, node: fx.Node, at: At) -> tuple[Expr, dict[str, Version]] | None:
        """The element as the caller reads it, and the tensors that it loads from."""
        if unsupported_tensor(call.unit.graph_module) is not None:
            return None
        above = self._reader_of(call.unit)
        argument = _argument(call, above, reader.mirror.dynamo_node(node))
        # Writes of the call come after its first mirror node.
        when = min((above.mirror.order(n) for n in above.mirror.owned(call.node)), default=None)
        if argument is None or when is None or above.varies(argument) or not are_alike(argument, node):
            return None
        try:
            element = above.read_at(when, argument, at)
        except Unreadable:
            return None
        self._not_followed |= above.not_followed
        # An index may itself be loaded, from a tensor of the body: its name is the body's unless the caller has one of that name.
        indices = {load.tensor for index in at for load in ix.loads(index)}
        names = {load.tensor for load in ix.loads(element)}
        return element, {name: above.tensors[name] for name in names if name in above.tensors or name not in indices}


def _argument(call: BodyCall, above: Reader, placeholder: fx.Node | None) -> fx.Node | None:
    if placeholder is None:
        return None
    owner = placeholder.graph.owning_module
    inputs = higher_order.placeholders(owner) if isinstance(owner, fx.GraphModule) else []
    given = above.mirror.arguments(call.node)
    position = call.first + inputs.index(placeholder) if placeholder in inputs else len(given)
    return given[position] if position < len(given) else None


def are_alike(argument: fx.Node, placeholder: fx.Node) -> bool:
    """True if two nodes of different mirrors stand for tensors of one dtype and shape."""
    a, b = fake(argument), fake(placeholder)
    return a.dtype == b.dtype and axes.shape_exprs(a) == axes.shape_exprs(b)

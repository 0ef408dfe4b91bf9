"""The passes' changes to a graph as data: some nodes stayed, some have other operands, some are new. `apply` repeats the changes.

Dynamo's nodes are known by their indices, so nothing of them is written down. A new node has a name, which tables resolve (targets.py),
arguments of plain data, and the index of the node whose origin it took over: the module and the line of the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx
from torch._subclasses import FakeTensorMode

from attn_compiler.passes.rewrites import arguments, key, targets
from attn_compiler.passes.rewrites.key import Keyed, Module
from attn_compiler.passes.rewrites.refusing import Unkeyed
from attn_compiler.torch_private import tracing as torch_tracing


@dataclass(frozen=True, kw_only=True, slots=True)
class New:
    """A node that the passes made.

    given: args and kwargs with indices for nodes; new nodes are numbered after Dynamo's, in order.
    origin: the index of the Dynamo node that it took its origin from; None if it has none.
    value: as Values.record writes it. has_value: the node has a value, which may be None.
    """

    op: str
    name: str
    target: str
    given: Any
    origin: int | None
    has_value: bool
    value: Any


@dataclass(frozen=True, kw_only=True, slots=True)
class Changed:
    """A Dynamo node with other arguments. place: index of the node. value: a new one, if has_value."""

    place: int
    given: Any
    has_value: bool
    value: Any


@dataclass(frozen=True, kw_only=True, slots=True)
class Edit:
    """The changes to one graph.

    graph: its index among the graphs. order: the indices of all nodes that it has in the end, in order.
    """

    graph: int
    order: tuple[int, ...]
    new: tuple[New, ...]
    changed: tuple[Changed, ...]


PARTS = (New, Changed, Edit)


# ---- writing ------------------------------------------------------------------------------------------------------


def record_edits(keyed: Keyed) -> tuple[Edit, ...]:
    """Return the changes since the graphs had that key. Raises Unkeyed where they can't be recorded."""
    edits = (_edit(place, module, keyed) for place, module in enumerate(keyed.modules))
    return tuple(edit for edit in edits if edit is not None)


def _edit(graph: int, module: Module, keyed: Keyed) -> Edit | None:
    if key.attribute_names(module.graph_module) != module.attributes:
        raise Unkeyed("the rewritten graph holds tensors that are kept from call to call")
    numbers = {node: place for place, node in enumerate(module.nodes)}
    after = list(module.graph_module.graph.nodes)
    new = [node for node in after if node not in numbers]
    kept = [numbers[node] for node in after if node in numbers]
    if kept != sorted(kept):
        raise Unkeyed("nodes of the graph changed places")
    numbers |= {node: len(module.nodes) + i for i, node in enumerate(new)}
    origins = _Origins(module.nodes)
    made = tuple(_new(node, numbers, origins, keyed) for node in new)
    changed = tuple(found for node in after if (found := _changed(node, numbers, module, keyed)) is not None)
    if not new and not changed and len(kept) == len(module.nodes):
        return None
    return Edit(graph=graph, order=tuple(numbers[node] for node in after), new=made, changed=changed)


class _Origins:
    """Dynamo's nodes by their meta without the value."""

    def __init__(self, nodes: Sequence[fx.Node]) -> None:
        self._places: dict[Any, int] = {}
        for place, node in enumerate(nodes):
            self._places.setdefault(self._held(node), place)

    @staticmethod
    def _held(node: fx.Node) -> Any:
        return tuple(sorted((name, id(held)) for name, held in node.meta.items() if name != "example_value"))

    def place(self, node: fx.Node) -> int | None:
        held = self._held(node)
        if held and held not in self._places:
            raise Unkeyed(f"it is not known where the new node {node.name} is from")
        return self._places[held] if held else None


def _new(node: fx.Node, numbers: dict[fx.Node, int], origins: _Origins, keyed: Keyed) -> New:
    name = targets.name_of(node)
    targets.resolved(node.op, name)
    has_value = "example_value" in node.meta
    return New(
        op=node.op,
        name=node.name,
        target=name,
        given=key.given_data(node, numbers),
        origin=origins.place(node),
        has_value=has_value,
        value=keyed.values.record(node.meta["example_value"]) if has_value else None,
    )


def _changed(node: fx.Node, numbers: dict[fx.Node, int], module: Module, keyed: Keyed) -> Changed | None:
    place = numbers[node]
    if place >= len(module.nodes):
        return None
    given = key.given_data(node, numbers)
    value = node.meta.get("example_value")
    has_value = value is not module.values[place]
    if given == module.given[place] and not has_value:
        return None
    return Changed(
        place=place, given=given, has_value=has_value, value=keyed.values.record(value) if has_value else None
    )


# ---- applying -----------------------------------------------------------------------------------------------------


def apply(keyed: Keyed, edits: Sequence[Edit], mode: FakeTensorMode) -> None:
    """Repeat the recorded changes. mode: of the graphs' fake values. Raises Unkeyed for other graphs, which are left half changed."""
    for edit in edits:
        _apply(keyed.modules[edit.graph], edit, keyed, mode)


def _apply(module: Module, edit: Edit, keyed: Keyed, mode: FakeTensorMode) -> None:
    graph, nodes = module.graph_module.graph, list(module.nodes)
    new = iter(edit.new)
    # New nodes go right before the next node of Dynamo's.
    following = _following(edit.order, len(module.nodes))
    for place, before in zip(edit.order, following, strict=True):
        if place < len(module.nodes):
            continue
        if place != len(nodes):
            raise Unkeyed("new nodes of a record are out of order")
        with graph.inserting_before(nodes[before]):
            nodes.append(_made(graph, next(new), nodes, keyed, mode))
    for changed in edit.changed:
        node = nodes[changed.place]
        node.args, node.kwargs = arguments.value_of(changed.given, nodes)
        if changed.has_value:
            node.meta["example_value"] = _value(changed.value, keyed, mode)
    kept = set(edit.order)
    for place in reversed(range(len(module.nodes))):
        if place not in kept:
            graph.erase_node(nodes[place])
    module.graph_module.recompile()


def _following(order: Sequence[int], count: int) -> list[int]:
    """Return for each index the next of Dynamo's nodes after it; there is always one, the output."""
    found, last = [], count - 1
    for place in reversed(order):
        last = place if place < count else last
        found.append(last)
    return found[::-1]


def _made(graph: fx.Graph, new: New, nodes: list[fx.Node], keyed: Keyed, mode: FakeTensorMode) -> fx.Node:
    args, kwargs = arguments.value_of(new.given, nodes)
    node = graph.create_node(new.op, targets.resolved(new.op, new.target), args, kwargs, name=new.name)
    if node.name != new.name:
        raise Unkeyed(f"the name {new.name} is taken")
    if new.origin is not None:
        node.meta.update({k: v for k, v in nodes[new.origin].meta.items() if k != "example_value"})
    if new.has_value:
        node.meta["example_value"] = _value(new.value, keyed, mode)
    return node


def _value(data: Any, keyed: Keyed, mode: FakeTensorMode) -> Any:
    with torch_tracing.beside_modes(mode), keyed.values.sizes.unasked():
        return keyed.values.made(data, mode)

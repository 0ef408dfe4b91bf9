"""Conversion of an exported program's graph to the form that the passes read, and back.

The passes know a value by Dynamo's `example_value`; an export has it as `val`. An export also asserts the dtype of cast tensors, in calls
that read scores and weights. These are removed, and inserted again if their tensor is still in the graph.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from attn_compiler.torch_private import compat as torch_compat, snapshots as torch_snapshots

_ASSERTION = torch.ops.aten._assert_tensor_metadata.default
#: metadata that a node copied from its origin and that does not describe its own value
_OF_ORIGIN = ("example_value", "tensor_meta", "unbacked_bindings", "constant")


@dataclass(frozen=True, kw_only=True)
class Assertion:
    """A removed assertion. tensor: its input."""

    tensor: fx.Node
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    meta: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Readable:
    """A graph module that the passes can read. before: all its nodes, those of bodies included. assertions: the removed ones."""

    graph_module: fx.GraphModule
    before: frozenset[fx.Node]
    assertions: tuple[Assertion, ...]


def readable(gm: fx.GraphModule, numbers: Mapping[str, torch.Tensor]) -> Readable:
    """Make a graph readable in place. numbers: the inputs that are known numbers, by name."""
    assertions = [_taken_out(node) for node in _nodes(gm) if node.target is _ASSERTION]
    nodes = _nodes(gm)
    for node in nodes:
        node.meta["example_value"] = pytree.tree_map(_without_gradient, node.meta.get("val"))
    for node in gm.graph.find_nodes(op="placeholder"):
        if node.name in numbers:
            node.meta["constant"] = numbers[node.name]
    return Readable(graph_module=gm, before=frozenset(nodes), assertions=tuple(assertions))


def put_back(read: Readable) -> None:
    """Give every node its `val`, and insert the assertions whose tensors are still in the graph."""
    for node in _nodes(read.graph_module):
        value = node.meta.get("example_value")
        for name in _OF_ORIGIN if node not in read.before else ("example_value", "constant"):
            node.meta.pop(name, None)
        if node not in read.before:
            node.meta["val"] = value
    for assertion in read.assertions:
        if not torch_snapshots.is_erased(assertion.tensor):
            _put_in(assertion)


def _nodes(gm: fx.GraphModule) -> list[fx.Node]:
    return [node for module in torch_compat.graph_modules(gm) for node in module.graph.nodes]


def _without_gradient(value: Any) -> Any:
    """Clear requires_grad: an export sets it for parameters alone, so it would be wrong for all other values."""
    if not isinstance(value, torch.Tensor) or not value.requires_grad:
        return value
    with torch.no_grad():
        return value.detach()


def _taken_out(node: fx.Node) -> Assertion:
    (tensor,) = node.all_input_nodes[:1]
    taken = Assertion(tensor=tensor, args=node.args, kwargs=dict(node.kwargs), meta=node.meta)
    node.graph.erase_node(node)
    return taken


def _put_in(assertion: Assertion) -> None:
    tensor = assertion.tensor
    place = tensor
    while place.next.op == "placeholder":
        place = place.next
    with tensor.graph.inserting_after(place):
        node = tensor.graph.call_function(_ASSERTION, assertion.args, assertion.kwargs)
    node.meta = assertion.meta

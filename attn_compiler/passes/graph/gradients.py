"""Nodes at which the model stops a gradient: a tensor read above them, or made by a kernel, must not bring it back."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import fx

from attn_compiler.passes.graph.emit import GraphBuilder
from attn_compiler.passes.graph.mirror import Mirror


def carries(mirror: Mirror, node: fx.Node) -> bool | None:
    """Return whether the tensor carries a gradient in the model; None for one that exists only inside a call of the graph."""
    dynamo = mirror.dynamo_node(node)
    value = dynamo.meta.get("example_value") if dynamo is not None else None
    return bool(value.requires_grad) if isinstance(value, torch.Tensor) else None


def stops_below(mirror: Mirror, root: fx.Node, below: Iterable[fx.Node]) -> bool:
    """Return whether `root` carries a gradient that one of the nodes computed from it no longer does (torch.no_grad)."""
    return carries(mirror, root) is True and any(carries(mirror, node) is False for node in below)


def stopped_at(mirror: Mirror, nodes: Iterable[fx.Node]) -> fx.Node | None:
    """Return the first of the nodes that has an input with a gradient and a result without one."""
    ordered = sorted(nodes, key=mirror.order)
    return next((n for n in ordered if any(stops_below(mirror, i, [n]) for i in n.all_input_nodes)), None)


def detached(builder: GraphBuilder, read: Any) -> Any:
    """Detach the operands of a kernel that was decided without gradients: PyTorch's may refuse a mask that requires one."""
    if isinstance(read, fx.Node):
        value = read.meta["example_value"]
        is_real = isinstance(value, torch.Tensor) and value.is_floating_point()
        return builder.call(torch.Tensor.detach, read) if is_real else read
    if isinstance(read, Mapping):
        return {name: detached(builder, x) for name, x in read.items()}
    if dataclasses.is_dataclass(read) and not isinstance(read, type):
        names = [each.name for each in dataclasses.fields(read)]
        return dataclasses.replace(read, **{name: detached(builder, getattr(read, name)) for name in names})
    return read

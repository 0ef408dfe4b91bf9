"""Softmaxes over another axis than the last, written so that Inductor can't take them for attention.

Its attention patterns look at no axis: they fuse softmax(q kᵀ, dim=-2) v as if the softmax ran over the keys, and the result is
wrong (https://github.com/pytorch/pytorch/issues/195320). With the axis moved to the end and back they do not match, and the
numbers are the same. Our own matching follows axes through the views.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch._subclasses import FakeTensorMode

from attn_compiler.passes import regions
from attn_compiler.passes.calls import target_name

_MOST_STEPS = 8


def run(graph_module: fx.GraphModule, mode: FakeTensorMode) -> list[str]:
    """Rewrite every such softmax that a product comes after, in place; returns the names of the softmaxes."""
    graph = graph_module.graph
    found = [n for n in graph.nodes if _is_over_another_axis(n) and _reaches_product(n)]
    where = regions.of(graph) if found else {}
    # Inside vmap a value has fewer axes than its tensor; no attention is taken there.
    found = [n for n in found if not where[n].transforms]
    for node in found:
        with where[node].active():
            _move_axis(graph, node, mode)
    return [node.name for node in found]


def _is_over_another_axis(node: fx.Node) -> bool:
    called = node.op in ("call_function", "call_method") and target_name(node) == "softmax"
    value, dim = node.meta.get("example_value"), _dim(node)
    return (
        called
        and isinstance(value, torch.Tensor)
        and isinstance(dim, int)
        and dim % max(value.dim(), 1) != value.dim() - 1
    )


def _dim(node: fx.Node) -> object:
    return node.args[1] if len(node.args) > 1 else node.kwargs.get("dim")


def _reaches_product(node: fx.Node) -> bool:
    level = [node]
    for _ in range(_MOST_STEPS):
        level = [user for above in level for user in above.users]
        if any("matmul" in name or "bmm" in name or "einsum" in name for name in map(target_name, level)):
            return True
    return False


def _move_axis(graph: fx.Graph, node: fx.Node, mode: FakeTensorMode) -> None:
    dim, before = _dim(node), node.meta["example_value"]
    users = list(node.users)
    with graph.inserting_before(node):
        moved = _call(graph, node, mode, torch.transpose, node.args[0], dim, -1)
    node.args = (moved, -1, *node.args[2:]) if len(node.args) > 1 else (moved,)
    node.kwargs = {k: -1 if k == "dim" else v for k, v in node.kwargs.items()}
    node.meta["example_value"] = _value(node, mode, before.requires_grad)
    with graph.inserting_after(node):
        back = _call(graph, node, mode, torch.transpose, node, dim, -1)
    # A softmax gives a contiguous tensor, and a view of it may rely on that.
    with graph.inserting_after(back):
        contiguous = _call(graph, node, mode, torch.Tensor.contiguous, back)
    for user in users:
        user.replace_input_with(node, contiguous)


def _call(graph: fx.Graph, origin: fx.Node, mode: FakeTensorMode, function: Any, *args: Any) -> fx.Node:
    node = graph.call_function(function, args)
    node.meta = {k: v for k, v in origin.meta.items() if k != "example_value"}
    node.meta["example_value"] = _value(node, mode, origin.meta["example_value"].requires_grad)
    return node


def _value(node: fx.Node, mode: FakeTensorMode, with_grad: bool) -> torch.Tensor:
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: n.meta["example_value"])
    with mode, torch.set_grad_enabled(with_grad):
        if node.op == "call_method":
            result: torch.Tensor = getattr(args[0], str(node.target))(*args[1:], **kwargs)
        else:
            result = node.target(*args, **kwargs)  # type: ignore[operator]
    return result

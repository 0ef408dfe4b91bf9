"""Rewrite of softmaxes over an axis other than the last, so that Inductor can't mistake them for attention.

Inductor's attention patterns check no axis: they fuse softmax(q kᵀ, dim=-2) v as if the softmax ran over the keys, and the result is wrong
(https://github.com/pytorch/pytorch/issues/195320). With the axis moved to the end and back they do not match, and the numbers are the same.
This package's matching follows axes through the views.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch._subclasses import FakeTensorMode

from attn_compiler.passes.graph import closed, regions
from attn_compiler.passes.graph.calls import Trying, argument, target_name, untried, with_arguments
from attn_compiler.torch_private import tracing as torch_tracing

_MOST_STEPS = 8


def put_keys_last(graph_module: fx.GraphModule, mode: FakeTensorMode, trying: Trying = untried) -> list[str]:
    """Rewrite in place every such softmax before a product. Return the names of the softmaxes."""
    graph = graph_module.graph
    found = [n for n in graph.nodes if _is_over_another_axis(n) and _reaches_product(n) and not closed.is_closed(n)]
    where = regions.by_node(graph) if found else {}
    # Inside vmap a value has fewer axes than its tensor. No attention is rewritten there.
    found = [n for n in found if not where[n].transforms]
    moved = []
    for node in found:
        with trying(node), where[node].active():
            _move_axis(graph, node, mode)
            moved.append(node.name)
    return moved


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
    return argument(node, 1, "dim")


def _reaches_product(node: fx.Node) -> bool:
    level = [node]
    for _ in range(_MOST_STEPS):
        level = [user for above in level for user in above.users]
        if any("matmul" in name or "bmm" in name or "einsum" in name for name in map(target_name, level)):
            return True
    return False


def _move_axis(graph: fx.Graph, node: fx.Node, mode: FakeTensorMode) -> None:
    dim, scores, with_grad = _dim(node), argument(node, 0, "input"), node.meta["example_value"].requires_grad

    def value(function: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        with torch_tracing.running_in(mode), torch.set_grad_enabled(with_grad):
            result: torch.Tensor = function(*args, **kwargs)
        return result

    # Compute all values first, so that a failure leaves the graph unchanged.
    moved_value = value(torch.transpose, scores.meta["example_value"], dim, -1)
    args, kwargs = with_arguments(node, input=(0, moved_value), dim=(1, -1))
    args, kwargs = fx.map_arg((args, kwargs), lambda n: n.meta["example_value"])
    softmax = getattr(torch.Tensor, str(node.target)) if node.op == "call_method" else node.target
    softmax_value = value(softmax, *args, **kwargs)
    back_value = value(torch.transpose, softmax_value, dim, -1)
    contiguous_value = value(torch.Tensor.contiguous, back_value)

    users = list(node.users)
    with graph.inserting_before(node):
        moved = _call(graph, node, moved_value, torch.transpose, scores, dim, -1)
    node.args, node.kwargs = with_arguments(node, input=(0, moved), dim=(1, -1))
    node.meta["example_value"] = softmax_value
    with graph.inserting_after(node):
        back = _call(graph, node, back_value, torch.transpose, node, dim, -1)
    # A softmax gives a contiguous tensor, and a view of it may rely on that.
    with graph.inserting_after(back):
        contiguous = _call(graph, node, contiguous_value, torch.Tensor.contiguous, back)
    for user in users:
        user.replace_input_with(node, contiguous)


def _call(graph: fx.Graph, origin: fx.Node, value: torch.Tensor, function: Any, *args: Any) -> fx.Node:
    node = graph.call_function(function, args)
    node.meta = {**origin.meta, "example_value": value}
    return node

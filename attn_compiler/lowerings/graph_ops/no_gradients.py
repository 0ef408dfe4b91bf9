"""The zeros that are the gradient of an lse which nothing reads are made once.

Inductor fills memory anew before each op that it knows nothing of: one kernel for every attention of a backward, whose 2 µs on a GPU cost
the host more. An op of its own makes them for all attentions that are alike.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from attn_compiler.torch_private.op_library import NAMESPACE, register_helper

aten = torch.ops.aten

#: where a leaf op's backward has the gradient of the lse, and the lse
_GRAD_LSE, _LSE = 1, 7
_BACKWARD = "_backward"


def share_zeros(graph: fx.Graph) -> None:
    """Make the zeros of alike attentions once. graph: of the forward and the backward, whose nodes have values ("val")."""
    alike: dict[Any, list[fx.Node]] = {}
    for node in graph.nodes:
        if _is_backward(node) and _is_zeros(node.args[_GRAD_LSE]):
            lse = node.args[_LSE].meta["val"]
            alike.setdefault((str(tuple(lse.shape)), lse.dtype, lse.device), []).append(node)
    for nodes in alike.values():
        if len(nodes) > 1:
            _share(graph, nodes)


def _share(graph: fx.Graph, nodes: list[fx.Node]) -> None:
    first = nodes[0]
    value = first.args[_GRAD_LSE].meta["val"]  # type: ignore[union-attr]
    with graph.inserting_before(first):
        # It reads the output's gradient, so that it is a part of the backward and not kept from the forward.
        zeros = graph.call_function(getattr(torch.ops, NAMESPACE).zeros.default, (first.args[0], first.args[_LSE]))
    zeros.meta["val"] = value
    for node in nodes:
        node.update_arg(_GRAD_LSE, zeros)


def _is_backward(node: fx.Node) -> bool:
    """Whether a node is the backward of a leaf op (ops.BACKWARD_SCHEMA)."""
    schema = getattr(node.target, "_schema", None)
    if node.op != "call_function" or getattr(node.target, "namespace", None) != NAMESPACE or schema is None:
        return False
    names = [argument.name for argument in schema.arguments]
    return schema.name.endswith(_BACKWARD) and len(names) > _LSE and (names[_GRAD_LSE], names[_LSE]) == _NAMES


_NAMES = ("grad_lse", "lse")


def _is_zeros(node: Any) -> bool:
    """Whether it is 0 everywhere, as autograd makes the gradient of what nothing reads."""
    if not isinstance(node, fx.Node):
        return False
    is_filled = node.target is aten.full.default and isinstance(node.args[1], int | float) and node.args[1] == 0
    return is_filled or node.target is aten.zeros.default


def _zeros(grad_out: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
    """Like the lse, contiguous."""
    return torch.zeros(lse.shape, dtype=lse.dtype, device=lse.device)


register_helper("zeros", "(Tensor grad_out, Tensor lse) -> Tensor", function=_zeros)

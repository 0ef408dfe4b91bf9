"""Rewrite of softmaxes over an axis other than the last, so that Inductor can't mistake them for attention.

Inductor's attention patterns check no axis: they fuse softmax(q kᵀ, dim=-2) v as if the softmax ran over the keys, and the result is wrong
(https://github.com/pytorch/pytorch/issues/195320). With the axis moved to the end and back they do not match, and the numbers are the same.
This package's matching follows axes through the views.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx
from torch._subclasses import FakeTensorMode

from attn_compiler.passes.graph import regions
from attn_compiler.passes.graph.calls import Trying, argument, target_name, untried
from attn_compiler.passes.spelling import expand

_MOST_STEPS = 8


def put_keys_last(
    graph_module: fx.GraphModule, mode: FakeTensorMode, trying: Trying = untried
) -> dict[fx.Node, fx.Node]:
    """Rewrite every such softmax before a product. Return each with the softmax that replaced it."""
    moved: dict[fx.Node, fx.Node] = {}

    def spell(node: fx.Node, where: Mapping[fx.Node, regions.Region]) -> None:
        # Inside vmap a value has fewer axes than its tensor. No attention is rewritten there.
        if not where[node].transforms:
            made = expand.spell_out(graph_module, node, _with_keys_last(node), mode)[node]
            while target_name(made) != "softmax":
                (made,) = made.all_input_nodes
            moved[node] = made

    expand.each(graph_module, lambda node: _is_over_another_axis(node) and _reaches_product(node), spell, trying)
    return moved


def _with_keys_last(node: fx.Node) -> Callable[..., torch.Tensor]:
    dim = _dim(node)
    dtype = next((x for x in (*node.args, *node.kwargs.values()) if isinstance(x, torch.dtype)), None)

    def called(*args: Any, **kwargs: Any) -> torch.Tensor:
        (scores,) = (x for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor))
        # A softmax gives a contiguous tensor, and a view of it may rely on that.
        return F.softmax(scores.transpose(dim, -1), -1, dtype=dtype).transpose(dim, -1).contiguous()

    return called


def _is_over_another_axis(node: fx.Node) -> bool:
    called = node.op in ("call_function", "call_method") and target_name(node) == "softmax"
    value, dim = node.meta.get("example_value"), _dim(node)
    return (
        called
        and isinstance(value, torch.Tensor)
        and isinstance(dim, int)
        and dim % max(value.dim(), 1) != value.dim() - 1
    )


def _dim(node: fx.Node) -> Any:
    return argument(node, 1, "dim")


def _reaches_product(node: fx.Node) -> bool:
    level = [node]
    for _ in range(_MOST_STEPS):
        level = [user for above in level for user in above.users]
        if any("matmul" in name or "bmm" in name or "einsum" in name for name in map(target_name, level)):
            return True
    return False

"""What the passes emitted, in the ops that an exported program may have: functions and methods of PyTorch become what they call."""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import fx
from torch._subclasses import FakeTensorMode

from attn_compiler.passes.spelling import expand
from attn_compiler.torch_private import compat as torch_compat


def spelled_out(gm: fx.GraphModule, before: Collection[fx.Node], mode: FakeTensorMode) -> dict[fx.Node, fx.Node]:
    """Rewrite all nodes but those of `before`, in place; gives what took the place of each. mode: of the graph's values."""
    replaced: dict[fx.Node, fx.Node] = {}
    for module in torch_compat.graph_modules(gm):
        for node in [node for node in module.graph.nodes if node not in before and not _is_plain(node)]:
            parts = expand.spell_out(module, node, _called(node), mode)
            replaced.update({old: new for old, new in parts.items() if isinstance(new, fx.Node)})
    return replaced


def _is_plain(node: fx.Node) -> bool:
    if node.op == "call_method":
        return False
    plain = isinstance(node.target, (torch._ops.OpOverload, torch._ops.HigherOrderOperator))
    # A call without a value is there for what it does.
    return node.op != "call_function" or plain or node.target is operator.getitem or node.meta["example_value"] is None


def _called(node: fx.Node) -> Callable[..., Any]:
    called: Callable[..., Any] = getattr(torch.Tensor, node.target) if isinstance(node.target, str) else node.target
    return called

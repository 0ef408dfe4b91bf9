"""What a Dynamo node calls."""

from __future__ import annotations

import torch
from torch import fx


def target_name(node: fx.Node) -> str:
    """The bare name of what a node calls: "linear" for F.linear, torch.linear, aten.linear.default."""
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        return str(target.overloadpacket.__name__)
    return target if isinstance(target, str) else getattr(target, "__name__", str(target))

"""Ops of this package in a program that is compiled ahead: those that launch Triton kernels become their twins, which a compilation
takes apart (lowerings/shared/launching/packaged_ops.py), and what holds a value becomes a copy of it."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import fx

from attn_compiler import lowerings
from attn_compiler.torch_private import compat as torch_compat
from attn_compiler.torch_private.op_library import NAMESPACE

_PLAIN = {torch.ops.attn_compiler.held.default: torch.ops.aten.clone.default}
#: Ops of lowerings that can be packaged. Their twins are there from here on, for programs that are loaded.
_TWINS = {
    op: lowerings.packaged_twin(op)
    for op in (torch.ops.attn_compiler.triton.default, torch.ops.attn_compiler.tile_lists.default)
}


def compiled_ahead(gm: fx.GraphModule, before: Collection[fx.Node]) -> None:
    """Rewrite all nodes but those of `before`, in place."""
    for module in torch_compat.graph_modules(gm):
        for node in module.graph.nodes:
            if node not in before and getattr(node.target, "namespace", None) == NAMESPACE:
                node.target = {**_PLAIN, **_TWINS}[node.target]
